"""The script for a GPU runs here on the CPU with small models, so that it cannot rot."""

import subprocess
import sys

import pytest

from tests.bench_model import Setting
from tests.gpu import check_gpu
from tests.measure import Row


def test_the_script_runs_and_every_check_holds(root):
    command = [sys.executable, "-m", "tests.gpu.check_gpu", "--device", "cpu", "--small"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for what in ("solutions pass", "gradient of every parameter", "MiniLM", "times as fast"):
        assert what in done.stdout


def test_a_check_that_raises_does_not_hold():
    def broken(setting: Setting):
        raise RuntimeError("out of memory")
        yield

    (row,) = check_gpu.run((broken,), Setting())
    assert not row.holds
    assert "out of memory" in row.result


def test_without_a_device_it_says_so(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["check_gpu"])
    monkeypatch.setattr(check_gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        check_gpu.main()


def test_a_row_that_does_not_hold_fails_the_script(monkeypatch, capsys):
    def wrong(setting: Setting):
        yield Row("a check", "departs", "agree", False)

    monkeypatch.setattr(sys, "argv", ["check_gpu", "--device", "cpu", "--small"])
    monkeypatch.setattr(check_gpu, "CHECKS", (wrong,))
    with pytest.raises(SystemExit) as stopped:
        check_gpu.main()
    assert stopped.value.code == 1
    assert "✗" in capsys.readouterr().out
