"""`bertlab update` over two versions: what a student wrote stays, and nothing is lost."""

import json
import os
import shutil
import stat
from pathlib import Path

import nbformat
import pytest

from bertlab.course import update
from bertlab.course.authoring.release import release
from bertlab.course.regions import find_regions
from bertlab.course.workspace import Workspace, WorkspaceError

from .kernels import bertlab
from .test_release import SKIPPED

MINE = '''def count_parameters(config: "BertConfig") -> int:
    """My own words."""
    total = config.vocab_size * config.hidden_size  # I begin with the table
    return total
'''


def mended(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert text.count(old) >= 1, (path.name, old)
    path.write_text(text.replace(old, new), "utf-8")


@pytest.fixture(scope="module")
def newer(root, tmp_path_factory) -> Path:
    """The second version: other prose, a changed task, changed given code, files come and gone."""
    course = tmp_path_factory.mktemp("second") / "course"
    shutil.copytree(root, course, ignore=SKIPPED)
    solutions = course / "solutions"
    mended(solutions / "bertlab" / "config.py", '"""The number ', '"""Second edition. The number ')
    mended(
        solutions / "bertlab" / "attention.py",
        "# --- exercise 3.1",
        "# Given.\n\n# --- exercise 3.1",
    )
    prose = solutions / "chapters" / "00_start_here.md"
    mended(prose, "## Play first", "## Play first\n\nA new sentence.\n\n```python\n1 + 1\n```\n")
    mended(course / "README.md", "## Start\n", "## Start now\n")
    (course / "bertlab" / "course" / "brand_new.py").write_text('"""New."""\n')
    (course / "bertlab" / "course" / "demo.py").unlink()
    (course / "scripts" / "new.sh").write_text("#!/bin/sh\n")
    (course / "scripts" / "new.sh").chmod(0o755)
    folder = tmp_path_factory.mktemp("second") / "release"
    release(course, folder)
    return folder


def wrote(copy: Path) -> None:
    """A student at work: an exercise, its cell, and a cell of their own."""
    assert Workspace(copy).fill("0.1", MINE)
    path = copy / "chapters" / "00_start_here.ipynb"
    node = nbformat.read(path, as_version=4)
    cell = next(cell for cell in node.cells if cell.source.startswith("%%fill 0.1"))
    cell.source = f"%%fill 0.1\n{MINE}"
    cell.outputs = [nbformat.v4.new_output("stream", text="my output")]
    node.cells.append(nbformat.v4.new_code_cell("my_own = 'experiment'"))
    nbformat.write(node, path)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "lock"
    }


def test_an_untouched_copy_becomes_the_newer_release(student_copy, newer):
    made, backup = update.update(student_copy, newer)
    assert (made.conflicts, backup) == ([], None)
    assert snapshot(student_copy) == snapshot(newer)
    assert os.access(student_copy / "scripts" / "new.sh", os.X_OK)
    again, _ = update.update(student_copy, newer)
    assert list(again.writes) == [update.RECORD] and not again.removed


def test_what_was_written_stays_word_for_word_in_the_newer_file(student_copy, newer):
    wrote(student_copy)
    made, _ = update.update(student_copy, newer)
    text = (student_copy / "bertlab" / "config.py").read_text("utf-8")
    assert find_regions(text)["0.1"].text == MINE
    assert made.carried == ["0.1"]
    given = (student_copy / "bertlab" / "attention.py").read_text("utf-8")
    assert "# Given." in given
    history = Workspace(student_copy).history("0.1")
    assert len(history) == 1  # the update writes none of its own


def test_a_task_that_changed_under_the_students_text_is_shown(student_copy, newer):
    wrote(student_copy)
    done = bertlab(student_copy, "update", str(newer))
    assert done.returncode == 0, done.stderr
    assert "! bertlab/config.py, exercise 0.1: what you wrote is in place" in done.stdout
    assert '+    """Second edition.' in done.stdout or "Second edition" in done.stdout
    assert "What you wrote is in place: 0.1." in done.stdout
    assert bertlab(student_copy, "status").returncode == 0


def test_a_notebook_gets_the_new_prose_and_keeps_the_students_cells(student_copy, newer):
    wrote(student_copy)
    before = (student_copy / "chapters" / "00_start_here.ipynb").read_bytes()
    made, backup = update.update(student_copy, newer)
    path = student_copy / "chapters" / "00_start_here.ipynb"
    node = nbformat.read(path, as_version=4)
    nbformat.validate(node)
    sources = [cell.source for cell in node.cells]
    assert any("A new sentence." in source for source in sources) and "1 + 1" in sources
    fills = [cell for cell in node.cells if cell.source.startswith("%%fill 0.1")]
    assert [cell.source for cell in fills] == [f"%%fill 0.1\n{MINE}"]
    assert fills[0].outputs[0].text == "my output"
    assert sources[-1] == "my_own = 'experiment'"
    assert "## Your own cells" in sources[-2]
    assert len({cell.id for cell in node.cells}) == len(node.cells)
    assert backup and (backup / "chapters" / "00_start_here.ipynb").read_bytes() == before
    assert any("00_start_here" in conflict.what for conflict in made.conflicts)
    others = nbformat.read(student_copy / "chapters" / "03_attention.ipynb", as_version=4)
    assert "Your own cells" not in str(others)


def test_code_that_is_given_and_was_edited_is_kept_aside_and_shown(student_copy, newer):
    module, readme = student_copy / "bertlab" / "config.py", student_copy / "README.md"
    mended(module, "from dataclasses import", "import math\nfrom dataclasses import")
    mended(readme, "# bertlab", "# my notes\n\n# bertlab")
    before = module.read_bytes(), readme.read_bytes()
    made, backup = update.update(student_copy, newer)
    assert backup is not None
    assert (
        (backup / "bertlab/config.py").read_bytes(),
        (backup / "README.md").read_bytes(),
    ) == before
    said = {conflict.what: conflict for conflict in made.conflicts}
    assert "+import math" in said["bertlab/config.py, given code"].difference
    assert "-# my notes" in said["README.md"].difference
    assert "## Start now" in readme.read_text("utf-8")


def test_every_byte_that_was_there_is_there_or_in_the_backup(student_copy, newer):
    wrote(student_copy)
    (student_copy / "my_notes.txt").write_text("precious")
    mended(
        student_copy / "bertlab" / "course" / "demo.py", '"""', '"""Mine. '
    )  # gone in the newer one
    (student_copy / "bertlab" / "course" / "brand_new.py").write_text("mine = 1\n")
    before = snapshot(student_copy)
    _, backup = update.update(student_copy, newer)
    assert backup is not None
    after, kept = snapshot(student_copy), snapshot(backup)
    first = json.loads(before[update.RECORD])["files"]
    for name, content in before.items():
        if after.get(name) == content or kept.get(name) == content:
            continue
        # The rest is as it was handed out, or an exercise in it is in the newer file.
        if name in ("bertlab/config.py",):
            assert MINE.encode() in after[name]
        else:
            assert update._hash(content) == first.get(name) or name == update.RECORD, name
    assert after["my_notes.txt"] == b"precious"
    assert kept["bertlab/course/brand_new.py"] == b"mine = 1\n"
    assert b"Mine." in kept["bertlab/course/demo.py"]


def test_a_copy_that_does_not_say_what_it_was_keeps_everything_that_differs(student_copy, newer):
    wrote(student_copy)
    (student_copy / update.RECORD).unlink()
    before = (student_copy / "README.md").read_bytes()
    made, backup = update.update(student_copy, newer)
    assert backup and (backup / "README.md").read_bytes() == before
    assert made.carried == ["0.1"]


def test_a_damaged_exercise_stops_the_update_before_anything_is_written(student_copy, newer):
    mended(student_copy / "bertlab" / "config.py", "# --- end of exercise 0.1 ---\n", "")
    before = snapshot(student_copy)
    with pytest.raises(WorkspaceError, match="nothing was updated"):
        update.update(student_copy, newer)
    assert snapshot(student_copy) == before


def test_a_dry_run_writes_nothing(student_copy, newer):
    wrote(student_copy)
    before = snapshot(student_copy)
    done = bertlab(student_copy, "update", str(newer), "--dry-run")
    assert done.returncode == 0 and "nothing was done" in done.stdout
    assert snapshot(student_copy) == before


@pytest.mark.parametrize("writes", [1, 2, 4, 7])
def test_an_update_that_was_stopped_is_finished_by_the_next(
    student_copy, newer, monkeypatch, writes
):
    wrote(student_copy)
    written = []

    def failing(path: Path, content: bytes) -> None:
        if len(written) == writes:
            raise OSError(28, "No space left on device", str(path))
        written.append(path)
        real(path, content)

    real = update.write_atomically
    monkeypatch.setattr(update, "write_atomically", failing)
    with pytest.raises(WorkspaceError, match="No space left"):
        update.update(student_copy, newer)
    monkeypatch.setattr(update, "write_atomically", real)
    update.update(student_copy, newer)
    text = (student_copy / "bertlab" / "config.py").read_text("utf-8")
    assert find_regions(text)["0.1"].text == MINE
    after, wanted = snapshot(student_copy), snapshot(newer)
    changed = {name for name in wanted if after[name] != wanted[name]}
    assert changed == {"bertlab/config.py", "chapters/00_start_here.ipynb"}
    sources = [cell["source"] for cell in update._cells(after["chapters/00_start_here.ipynb"])]
    joined = ["".join(source) for source in sources]
    assert sum(source.startswith("%%fill 0.1") for source in joined) == 1
    assert joined[-1] == "my_own = 'experiment'"
    assert len(joined) == len(update._cells(wanted["chapters/00_start_here.ipynb"])) + 2


def test_what_is_no_release_is_refused(student_copy, root, tmp_path, newer):
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(WorkspaceError, match="not a release"):
            update.plan(student_copy, folder)
    with pytest.raises(WorkspaceError, match="this copy itself"):
        update.plan(student_copy, student_copy)
    done = bertlab(root, "update", str(newer))
    assert done.returncode == 2 and "authors' course" in done.stderr


def test_files_of_the_newer_release_may_be_read_only(student_copy, newer, tmp_path):
    shutil.copytree(newer, tmp_path / "newer")
    for path in (tmp_path / "newer").rglob("*.py"):
        path.chmod(stat.S_IRUSR)
    update.update(student_copy, tmp_path / "newer")
    assert (student_copy / "bertlab" / "config.py").stat().st_mode & 0o200
