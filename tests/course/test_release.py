"""A student's copy holds no trace of a solution: shown by planting canaries and searching."""

import shutil
from pathlib import Path

import pytest

from bertlab.course.authoring.release import release, without_dead_links
from bertlab.course.regions import find_regions

from .kernels import bertlab

SKIPPED = shutil.ignore_patterns(
    ".venv", ".git", "__pycache__", ".bertlab", ".pytest_cache", ".hypothesis", "site"
)


def canary(number: int) -> str:
    return f"canary_{number:03d}_x7q"


@pytest.fixture(scope="module")
def planted(root, tmp_path_factory) -> tuple[Path, int]:
    """A copy of the authors' course with a canary in every solution, text and hidden test."""
    course = tmp_path_factory.mktemp("planted") / "course"
    shutil.copytree(root, course, ignore=SKIPPED)
    count = 0
    for path in sorted((course / "solutions" / "bertlab").glob("*.py")):
        lines = []
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            lines.append(line)
            if line.strip() == "### BEGIN SOLUTION":
                indent = line[: len(line) - len(line.lstrip())]
                lines.append(f'{indent}_ = "{canary(count)}"\n')
                count += 1
        path.write_text("".join(lines), encoding="utf-8")
    (course / "tests" / "hidden").mkdir(exist_ok=True)
    (course / "tests" / "hidden" / "test_secret.py").write_text(f"# {canary(998)}\n")
    (course / "solutions" / "notes.md").write_text(f"{canary(999)}\n")
    # An author who did the course in place: the working tree holds a solution.
    shutil.copy(course / "solutions" / "bertlab" / "config.py", course / "bertlab" / "config.py")
    history = course / ".bertlab" / "history" / "0.1"
    history.mkdir(parents=True)
    (history / "0001.py").write_text(f"# {canary(997)}\n")
    return course, count


def found_in(folder: Path, word: str) -> list[str]:
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and word.encode() in path.read_bytes()
    ]


def test_the_canaries_are_there_to_be_found(planted):
    course, count = planted
    assert count >= 19
    for number in range(count):
        assert found_in(course / "solutions", canary(number))


def test_no_canary_reaches_a_students_copy(planted, tmp_path):
    course, _ = planted
    release(course, tmp_path / "copy")
    assert found_in(tmp_path / "copy", "canary_") == []
    assert found_in(tmp_path / "copy", "x7q") == []


def test_the_search_finds_a_leak(planted, tmp_path):
    """The test of the test: a copy that forgets to stub one module is caught."""
    course, _ = planted
    release(course, tmp_path / "copy")
    shutil.copy(course / "solutions" / "bertlab" / "config.py", tmp_path / "copy" / "bertlab")
    assert found_in(tmp_path / "copy", "canary_") == ["bertlab/config.py"]


def test_no_line_of_a_solution_is_in_a_students_copy(root, pristine_copy):
    """Not only canaries: no line of real solution code either (short or common lines aside)."""
    given = "\n".join(
        path.read_text(encoding="utf-8", errors="ignore")
        for path in pristine_copy.rglob("*")
        if path.is_file() and "exercises" not in path.parts and path.suffix in (".py", ".ipynb")
    )
    leaked = [
        line
        for path in sorted((root / "solutions" / "bertlab").glob("*.py"))
        for line in _solution_lines(path.read_text(encoding="utf-8"))
        if len(line) > 40 and line in given
    ]
    assert leaked == []


def _solution_lines(source: str):
    for region in find_regions(source).values():
        inside = False
        for line in region.text.splitlines():
            if line.strip() in ("### BEGIN SOLUTION", "### END SOLUTION"):
                inside = line.strip() == "### BEGIN SOLUTION"
            elif inside:
                yield line.strip()


def test_a_students_copy_has_no_hidden_tests_and_no_machinery_tests(pristine_copy):
    assert not (pristine_copy / "solutions").exists()
    assert not (pristine_copy / "tests" / "hidden").exists()
    assert not (pristine_copy / "tests" / "course").exists()
    assert not list(pristine_copy.rglob(".git"))


def test_student_notebooks_have_no_outputs(pristine_copy):
    import nbformat

    notebooks = sorted((pristine_copy / "chapters").glob("*.ipynb"))
    assert len(notebooks) >= 4
    for path in notebooks:
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs"), (path.name, cell.id)
            assert "BEGIN SOLUTION" not in cell.source


def test_a_folder_that_is_not_empty_is_refused(root, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(FileExistsError):
        release(root, tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_a_students_copy_cannot_make_a_release(student_copy, tmp_path):
    done = bertlab(student_copy, "release", str(tmp_path / "new"))
    assert done.returncode == 2
    assert "no solutions" in done.stderr and "Traceback" not in done.stderr


def test_no_page_of_a_students_copy_links_to_what_is_not_in_it(pristine_copy, root):
    for name in ("README.md", "BENCH.md"):
        assert without_dead_links(pristine_copy / name) == (pristine_copy / name).read_text("utf-8")
    authors = (root / "README.md").read_text("utf-8").splitlines()
    dropped = set(authors) - set((pristine_copy / "README.md").read_text("utf-8").splitlines())
    assert dropped and all("](solutions/" in line for line in dropped)
