"""One source for each thing: what is derived is as its source says, and edits are noticed."""

import shutil
from pathlib import Path

import nbformat
import pytest

from bertlab.course import outline
from bertlab.course.authoring import build as builder
from bertlab.course.authoring import chapters as sources
from bertlab.course.regions import RegionError, find_regions, replace_region, stub, stub_module

from .test_release import SKIPPED

REGION = (
    "before = 1\n"
    "# --- exercise 3.1: a title ---\n"
    "def f(x):\n"
    '    """Doc."""\n'
    "    ### BEGIN SOLUTION\n"
    "    return x + 1\n"
    "    ### END SOLUTION\n"
    "# --- end of exercise 3.1 ---\n"
    "after = 2\n"
)


@pytest.fixture
def course(root, tmp_path) -> Path:
    folder = tmp_path / "course"
    shutil.copytree(root, folder, ignore=SKIPPED)
    return folder


def test_everything_derived_is_as_its_source_says(root):
    assert builder.check(root).wrong == []


def test_an_edited_stub_is_noticed_and_not_overwritten(course):
    path = course / "bertlab" / "config.py"
    path.write_text(path.read_text() + "\n# an author's edit\n")
    assert builder.check(course).wrong == ["bertlab/config.py was edited by hand"]
    with pytest.raises(builder.EditedByHand, match=r"config\.py"):
        builder.build(course, only=[])
    assert "an author's edit" in path.read_text()
    builder.build(course, overwrite=True, only=[])
    assert builder.check(course).wrong == []


def test_an_edited_solved_notebook_is_noticed(course):
    path = course / "solutions" / "chapters" / "00_start_here.ipynb"
    path.write_text(path.read_text().replace("109,482,240", "109,482,241", 1))
    assert builder.check(course).wrong == [
        "solutions/chapters/00_start_here.ipynb was edited by hand"
    ]


def test_changed_prose_asks_for_a_build_that_executes_nothing(course, monkeypatch):
    path = course / "solutions" / "chapters" / "00_start_here.md"
    path.write_text(path.read_text().replace("Start here", "Begin here", 1))
    assert builder.check(course).wrong == [
        "chapters/00_start_here.ipynb is out of date",
        "solutions/chapters/00_start_here.ipynb is out of date",
    ]
    solved = course / "solutions" / "chapters" / "00_start_here.ipynb"
    before = nbformat.read(solved, as_version=4).cells
    monkeypatch.setattr(builder, "executed", lambda *words: pytest.fail("it was executed"))
    builder.build(course)
    assert builder.check(course).wrong == []
    after = nbformat.read(solved, as_version=4).cells
    assert "Begin here" in after[0].source
    assert [cell.get("outputs") for cell in after] == [cell.get("outputs") for cell in before]


def test_changed_code_of_a_chapter_is_executed(course, monkeypatch):
    path = course / "solutions" / "chapters" / "00_start_here.md"
    path.write_text(path.read_text().replace("h, i = base", "h,  i = base", 1))
    assert "00_start_here.ipynb was executed on other code" in str(builder.check(course).wrong)
    monkeypatch.setattr(builder, "executed", lambda *words: "run")
    report = builder.build(course)
    assert "solutions/chapters/00_start_here.ipynb" in report.made
    assert (course / "solutions" / "chapters" / "00_start_here.ipynb").read_text() == "run"


@pytest.mark.parametrize("exercise_id", ["3.6", "6.7", "7.8"])
def test_a_part_of_the_clinic_is_what_its_own_chapter_and_later_ones_ran(course, exercise_id):
    path = course / "solutions" / "bertlab" / "clinic.py"
    text, chapters = path.read_text(), outline.chapters(course)
    before = [sources.source_hash(course, chapter) for chapter in chapters]
    part = find_regions(text)[exercise_id].text
    path.write_text(text.replace(part, f"{part}# one line more\n"))
    pairs = zip(chapters, before, strict=True)
    changed = [c.number for c, found in pairs if found != sources.source_hash(course, c)]
    # Chapter 0 has no clinic.
    assert changed == [c.number for c in chapters if c.number >= int(exercise_id[0])]


def test_a_changed_solution_asks_for_a_build(course):
    path = course / "solutions" / "bertlab" / "config.py"
    path.write_text(path.read_text().replace("2 * hidden", "hidden * 2", 1))
    assert any(
        "00_start_here.ipynb was executed on other" in w for w in builder.check(course).wrong
    )


def test_an_exercise_that_is_missing_in_a_chapter_is_an_error(course):
    path = course / "solutions" / "chapters" / "00_start_here.md"
    path.write_text(path.read_text().replace('exercise="0.1"', ""))
    with pytest.raises(sources.ChapterError, match=r"book\.toml says \['0\.1'\]"):
        builder.check(course)


def test_building_twice_gives_the_same_bytes(root):
    assert builder.derived_texts(root) == builder.derived_texts(root)


def test_cell_ids_are_unique_and_derived(root):
    for chapter in outline.chapters():
        ids = [cell.id for cell in sources.notebook(root, chapter, solved=False).cells]
        assert len(set(ids)) == len(ids)
        assert ids == [cell.id for cell in sources.notebook(root, chapter, solved=True).cells]


def test_a_stub_keeps_signature_and_docstring():
    text = stub(find_regions(REGION)["3.1"].text, "3.1")
    assert text == 'def f(x):\n    """Doc."""\n    raise NotImplementedError("exercise 3.1")\n'


def test_only_the_region_changes_when_it_is_replaced():
    changed = replace_region(REGION, "3.1", "def f(x):\n    return x\n")
    assert changed.startswith(
        "before = 1\n# --- exercise 3.1: a title ---\ndef f(x):\n    return x\n#"
    )
    assert changed.endswith("# --- end of exercise 3.1 ---\nafter = 2\n")


@pytest.mark.parametrize(
    "broken",
    [
        REGION.replace("# --- end of exercise 3.1 ---\n", ""),
        REGION.replace("# --- end of exercise 3.1 ---", "# --- end of exercise 3.2 ---"),
        REGION + REGION,
        REGION.replace("    ### END SOLUTION\n", ""),
        REGION.replace("    ### BEGIN SOLUTION\n", "").replace("    ### END SOLUTION\n", ""),
    ],
)
def test_comment_lines_that_do_not_pair_up_are_errors(broken):
    with pytest.raises(RegionError):
        stub_module(broken)
