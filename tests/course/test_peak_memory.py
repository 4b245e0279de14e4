"""Peak memory is that of a process which holds the model, and nothing of the one that asks."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from bertlab.course import peak_memory
from bertlab.course.exercises.chapter_8 import quick_exporter

pytestmark = pytest.mark.skipif(not hasattr(peak_memory.os, "fork"), reason="needs fork")


HOLDING = """
import json
import numpy as np
from bertlab.course.peak_memory import in_a_child

def hold(mb):
    return lambda: np.ones(mb * 1_000_000, dtype=np.uint8).sum()

print(json.dumps([in_a_child(hold(mb)) for mb in (1, 200, 1)]))
"""


def test_a_child_that_holds_more_says_so_and_the_next_does_not_remember():
    """In a fresh process, as it is used: a child may inherit what its parent once held."""
    done = subprocess.run(
        [sys.executable, "-c", HOLDING], capture_output=True, text=True, check=True
    )
    small, large, again = json.loads(done.stdout)
    assert large - small == pytest.approx(200, abs=20)
    assert abs(again - small) < 20


def test_a_child_that_fails_has_no_number():
    assert peak_memory.in_a_child(lambda: 1 / 0) is None


def test_a_model_that_never_ends_is_given_up_with_its_process_and_the_others_keep_their_numbers(
    tmp_path, monkeypatch
):
    """Its class is a student's, so it may do anything: here it sleeps for an hour."""
    package = tmp_path / "bertlab"
    package.mkdir()
    course = shutil.copytree(Path(peak_memory.__file__).parent, package / "course")
    (package / "__init__.py").touch()
    (package / "compression.py").write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "def load_compressed(path):\n"
        "    def slow(**batch):\n"
        f"        Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid()))\n"
        "        time.sleep(3600)\n"
        "    return slow if 'slow' in path else lambda **batch: None\n"
    )
    monkeypatch.setattr(peak_memory, "__file__", str(course / "peak_memory.py"))
    monkeypatch.setattr(peak_memory, "SECONDS", 20)
    files = {name: tmp_path / f"{name}.safetensors" for name in ("quick", "slow")}
    found = peak_memory.peak_memory_mb(files, {"input_ids": np.ones((1, 2), dtype=np.int64)})
    assert found["quick"] is not None
    assert found["slow"] is None
    assert not runs(int((tmp_path / "pid").read_text()))


def runs(number: int) -> bool:
    """Whether a process is there, and is more than an entry that nobody has asked for yet."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_another_file_is_refused():
    with pytest.raises(ValueError, match=r"must end in .safetensors or .onnx"):
        peak_memory.peak_memory_mb({"a": "model.bin"}, {})


def test_a_model_that_cannot_be_run_has_no_number(tmp_path):
    (tmp_path / "no.onnx").write_bytes(b"nothing")
    batch = {"input_ids": np.ones((1, 2), dtype=np.int64)}
    assert peak_memory.peak_memory_mb({"no": tmp_path / "no.onnx"}, batch) == {"no": None}


def test_a_larger_model_needs_more_by_about_its_file(complete, tmp_path, monkeypatch, root):
    import torch

    files = {}
    for name, words in (("small", 1000), ("large", 1_000_000)):
        config = complete.config.BertConfig(
            vocab_size=words,
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=16,
        )
        model = complete.encoder.BertModel(config).eval()
        for suffix, write in (
            ("safetensors", complete.compression.save_compressed),
            ("onnx", complete.compression.export_onnx),
        ):
            files[f"{name}, {suffix}"] = tmp_path / f"{name}.{suffix}"
            with quick_exporter():
                write(model, tmp_path / f"{name}.{suffix}")
    home = Path(complete.compression.__file__).parents[1]
    monkeypatch.setattr(peak_memory, "__file__", str(home / "bertlab" / "course" / "x.py"))
    batch = {
        "input_ids": torch.ones(4, 8, dtype=torch.int64),
        "attention_mask": torch.ones(4, 8, dtype=torch.int64),
        "token_type_ids": torch.zeros(4, 8, dtype=torch.int64),
    }
    found = peak_memory.peak_memory_mb(files, batch)
    grown = 1_000_000 * 64 * 4 / 1e6
    for suffix in ("safetensors", "onnx"):
        small, large = found[f"small, {suffix}"], found[f"large, {suffix}"]
        assert small is not None
        assert large is not None
        assert 0.9 * grown < large - small < 3.5 * grown  # a file that is read may be held twice
    torch_too, onnx_alone = found["small, safetensors"], found["small, onnx"]
    assert torch_too is not None
    assert onnx_alone is not None
    assert onnx_alone < torch_too  # its process never loads PyTorch


def test_on_a_package_with_stubs_nothing_is_measured(tmp_path, monkeypatch, root):
    """A student's copy whose chapter 8 is not written: no number, and no error."""
    shutil.copytree(root / "bertlab", tmp_path / "bertlab")
    monkeypatch.setattr(peak_memory, "__file__", str(tmp_path / "bertlab" / "course" / "x.py"))
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    assert peak_memory.peak_memory_mb({"it": file}, {"input_ids": np.ones((1, 2))}) == {"it": None}
