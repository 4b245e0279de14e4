"""Where a copy may lie: odd paths, a folder that cannot be written, one that is another user's."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bertlab.course.regions import find_regions

from .kernels import bertlab, kernel
from .test_book import run_book

ODD = "Kurs 2027 – Übung, 北京 (Ж) 'x'"
NOBODY = 65534


@pytest.fixture(scope="module")
def solution(root) -> str:
    text = (root / "solutions" / "bertlab" / "config.py").read_text("utf-8")
    return find_regions(text)["0.1"].text


@pytest.fixture(scope="module")
def odd_copy(pristine_copy, tmp_path_factory) -> Path:
    """A student's copy below a path with spaces, quotes and letters of several scripts."""
    copy = tmp_path_factory.mktemp("odd") / ODD / "my course"
    shutil.copytree(pristine_copy, copy)
    return copy


def test_a_notebook_works_below_an_odd_path(odd_copy, solution):
    with kernel(odd_copy) as running:
        running.run("%load_ext bertlab.course")
        shown = running.run(f"%%fill 0.1\n{solution}")
        assert "✓ passed: 0.1" in shown.text and not shown.error
        judged = running.run("%check 0")  # in a fresh process
        assert "✓ passed: 0.1" in judged.text and not judged.error
    assert json.loads(bertlab(odd_copy, "check", "0.1", "--json").stdout)[0]["status"] == "passed"


#: Where the libraries below put what they can make again; `.cache/bertlab` is ours.
USUAL = {".cache/bertlab", ".cache/matplotlib", ".config/matplotlib", ".ipython", ".jupyter"}
USUAL |= {".local/share", ".cache/huggingface", ".cache/torch", "torchinductor_"}


def test_nothing_is_left_outside_the_copy(pristine_copy, tmp_path, monkeypatch, solution):
    copy, home, temporary = (tmp_path / name for name in ("copy", "home", "temporary"))
    shutil.copytree(pristine_copy, copy)
    home.mkdir()
    temporary.mkdir()
    for name in [name for name in os.environ if name.startswith(("XDG_", "BERTLAB_C", "HF_HOME"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(temporary))
    for words in (["status"], ["check", "0.1"]):
        bertlab(copy, *words)
    with kernel(copy) as running:
        running.run("%load_ext bertlab.course")
        assert "passed: 0.1" in running.run(f"%%fill 0.1\n{solution}").text
        running.run("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
        running.run("%check 0")
    found = [path.relative_to(home) for path in home.rglob("*") if path.is_file()]
    outside = {"/".join(path.parts[:2]) for path in found}
    outside |= {path.name for path in temporary.iterdir()}
    assert {path for path in outside if not path.startswith(tuple(USUAL))} == set()


def test_the_book_is_made_below_an_odd_path(odd_copy):
    done = run_book(odd_copy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (odd_copy / "site" / "03_attention.html").is_file()


def test_make_finds_its_way_below_an_odd_path(odd_copy):
    (odd_copy / ".venv" / "bin").mkdir(parents=True)
    program = odd_copy / ".venv" / "bin" / "bertlab"
    program.write_text('#!/bin/sh\necho "bertlab $* in $PWD"\n')
    program.chmod(0o755)
    (odd_copy / ".venv" / ".installed").touch()
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(  # as in a terminal, also if these tests were started by make
        ["make", "lab", "ARGS=--no-browser"],
        cwd=odd_copy,
        env=outside,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"bertlab lab --no-browser in {odd_copy}"


# --- a folder that cannot be written, or belongs to another ---


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


#: Root may write everywhere. Without its capabilities it is a user like any other.
POWERLESS = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []


def as_a_plain_user(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a copy's command line as a user who may only do what a file's mode says."""
    path = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [*POWERLESS, sys.executable, "-m", "bertlab.course.cli", *words],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def locked_copy(pristine_copy, open_folder) -> Iterator[Path]:
    """A copy that cannot be written."""
    copy = open_folder / "course"
    shutil.copytree(pristine_copy, copy)
    change_modes(copy, 0o555, 0o444)
    yield copy
    change_modes(copy, 0o755, 0o644)


def change_modes(folder: Path, of_folders: int, of_files: int) -> None:
    for path in [folder, *folder.rglob("*")]:
        path.chmod(of_folders if path.is_dir() else of_files)


def test_the_plain_user_of_these_tests_cannot_write(locked_copy):
    for target in (locked_copy / "new.txt", locked_copy / "bertlab" / "config.py"):
        done = subprocess.run(
            [*POWERLESS, "sh", "-c", f"echo x >> '{target}'"], capture_output=True, check=False
        )
        assert done.returncode != 0


def test_a_copy_that_cannot_be_written_can_be_looked_at(locked_copy):
    for words, status in ((("status",), 0), (("hint", "0.1"), 0), (("check", "0.1"), 1)):
        done = as_a_plain_user(locked_copy, *words)
        assert done.returncode == status, done.stderr
        assert "0.1" in done.stdout and "Traceback" not in done.stderr
    assert not (locked_copy / ".bertlab").exists()


def test_what_needs_to_write_says_so_in_one_line(locked_copy, open_folder):
    newer = open_folder / "newer"
    shutil.copytree(locked_copy, newer)
    for words in (("reset", "0.1"), ("update", str(newer))):
        done = as_a_plain_user(locked_copy, *words)
        assert done.returncode == 2, done.stdout
        assert "writable" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_the_landing_page_is_left_out_where_it_cannot_be_written(locked_copy):
    code = (
        "from bertlab.course.path import write_page\n"
        "from bertlab.course.workspace import Workspace\n"
        "print(write_page(Workspace()))\n"
    )
    done = subprocess.run(
        [*POWERLESS, sys.executable, "-c", code],
        cwd=locked_copy,
        env={**os.environ, "PYTHONPATH": str(locked_copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "None", done.stderr


def test_a_second_user_reads_the_firsts_copy_and_works_in_their_own(
    pristine_copy, locked_copy, open_folder
):
    first, second = locked_copy, open_folder / "second"
    shutil.copytree(pristine_copy, second)
    if os.geteuid() == 0:  # only root can give files to another user; else it is the mode alone
        for path in [first, *first.rglob("*")]:
            os.chown(path, NOBODY, NOBODY)
    done = as_a_plain_user(first, "status")
    assert done.returncode == 0 and "○ 0.1" in done.stdout, done.stderr
    assert as_a_plain_user(first, "reset", "0.1").returncode == 2
    assert as_a_plain_user(second, "reset", "0.1").returncode == 0
    assert not (first / ".bertlab").exists() and (second / ".bertlab").exists()
