"""The handbook's steps for a new exercise, followed to the letter in a scratch copy.

Each step says where its block goes: "Append to `file`, after two empty lines:", or "Insert into
`file`, before `line`:", perhaps "of `word`": before the last such line that stands above the word.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from bertlab.course.authoring.chapters import environment

from .test_release import SKIPPED

PLACE = re.compile(
    r"(?:Append to|Insert into) `(?P<file>[^`]+)`"
    r"(?:,\s+after two empty lines|,\s+before `(?P<before>[^`]+)`(?:\s+of `(?P<of>[^`]+)`)?)?:\n\n"
    r"(?P<indent> *)(?P<fence>`{3,})\w+\n(?P<block>.*?)\n(?P=indent)(?P=fence)\n",
    re.DOTALL,
)


class Step(NamedTuple):
    """A block of text, and where it goes."""

    file: str
    block: str
    before: str | None
    of: str | None


def steps(handbook: str) -> list[Step]:
    """Read the steps out of the section on adding an exercise."""
    section = re.split(r"\n## ", handbook.split("## Authors: add an exercise", 1)[1])[0]
    found = []
    for match in PLACE.finditer(section):
        lines = match["block"].split("\n")
        block = "\n".join(line.removeprefix(match["indent"]) for line in lines) + "\n"
        found.append(Step(match["file"], block, match["before"], match["of"]))
    return found


def follow(step: Step, course: Path) -> None:
    """Do what a step says; a place that is not there is an error."""
    path = course / step.file
    text = path.read_text(encoding="utf-8")
    if step.before is None:
        text += "\n\n" + step.block
    else:
        place = text.rindex(step.before, 0, text.index(step.of) if step.of else len(text))
        text = text[:place] + step.block + text[place:]
    path.write_text(text, encoding="utf-8")


def run(course: Path, *command: str) -> str:
    """Run a Python module in the copy as its author would; return what it said."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=course,
        env=environment(course),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def handbook(root) -> str:
    return (root / "solutions" / "README.md").read_text(encoding="utf-8")


def test_a_new_exercise_by_the_handbook(root, handbook, tmp_path):
    course = tmp_path / "course"
    shutil.copytree(root, course, ignore=SKIPPED)
    to_do = steps(handbook)
    assert len(to_do) == 5
    for step in to_do:
        follow(step, course)
    run(course, "bertlab.course.cli", "build")
    run(course, "bertlab.course.cli", "build", "--check")
    run(course, "ruff", "check", *(step.file for step in to_do if step.file.endswith(".py")))
    run(course, "ruff", "format", "--check", "solutions/bertlab", "bertlab/course/exercises")
    said = run(course, "pytest", "-q", "-k", "3.7", "-p", "no:cacheprovider", "tests/course")
    assert re.search(r"\b[5-9] passed|\b\d\d passed", said), said
    notebook = (course / "chapters" / "03_attention.ipynb").read_text(encoding="utf-8")
    assert "%%fill 3.7" in notebook and "entr(weights).sum(dim=-1)" not in notebook


def test_a_place_that_is_not_there_is_noticed(root, handbook, tmp_path):
    shutil.copy(root / "book.toml", tmp_path / "book.toml")
    outline = next(step for step in steps(handbook) if step.file == "book.toml")
    with pytest.raises(ValueError, match="not found"):
        follow(outline._replace(of="04_feed_back"), tmp_path)
    follow(outline, tmp_path)
    chapters = (tmp_path / "book.toml").read_text(encoding="utf-8").split('file = "')
    (third,) = (text for text in chapters if text.startswith("03_attention"))
    assert third.count('id = "3.7"') == 1
