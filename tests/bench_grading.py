"""The benchmarks of grading: CPU time of the hidden tests, submissions an hour, memory.

Submissions an hour are measured beside nbgrader, with the same submissions, the same hidden tests
and the same seed. nbgrader gets an environment of its own, and notebooks that hold the exercises of
a chapter and nothing else of it: an answer's cell, and a locked cell that runs the hidden tests of
that exercise in the kernel. What its kernels do without is the sandbox.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.measure import ROOT, Row, complete, seconds

SEED = 20_181_011
#: How many submissions both graders get; BERTLAB_BENCH_STUDENTS=4 is a quick look.
STUDENTS = int(os.environ.get("BERTLAB_BENCH_STUDENTS", "20"))
CHAPTERS = range(6)
MANY = 500


def grading() -> Iterator[Row]:
    """All rows."""
    yield cpu_of_one_submission()
    yield memory_of_many()
    yield beside_nbgrader()


# --- one submission, and many ---


def _solutions() -> dict[str, str]:
    paths = (ROOT / "solutions" / "bertlab").glob("*.py")
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def _grader() -> Any:
    from bertlab.course.grading.grader import Grader
    from bertlab.course.grading.sandbox import required_level
    from bertlab.course.regions import stub_module

    complete()
    solutions = _solutions()
    stubs = {name: stub_module(text) for name, text in solutions.items()}
    level = required_level(unsafe_allowed=False)
    return Grader(ROOT / "tests" / "hidden", stubs, solutions, SEED, level)


def _exercises(chapters: Any) -> list[str]:
    from bertlab.course import outline

    return outline.select([str(number) for number in chapters])


def _cpu(grader: Any) -> float:
    """Seconds of CPU so far: of this process, and of all that ran in the sandbox."""
    own = psutil.Process().cpu_times()
    inside = [process.cpu_times() for process in grader.sandbox.processes()]
    return own.user + own.system + sum(sum(times[:4]) for times in inside)


def cpu_of_one_submission() -> Row:
    """User and system time of both sides, once Transformers and the reference are loaded."""
    grader, exercises = _grader(), _exercises(CHAPTERS)
    for _ in grader.grade({}, exercises):  # loads, and fills the table of truths
        pass
    start = _cpu(grader)
    results = list(grader.grade(_solutions(), exercises))
    taken = _cpu(grader) - start
    grader.close()
    right = all(result.status == "passed" for result in results)
    what = f"all hidden tests of chapters 0 to 5, {len(exercises)} exercises, one honest submission"
    result = f"{taken:.1f} s of CPU" + ("" if right else " (NOT ALL PASSED)")
    return Row(what, result, "at most 30 s", right and taken <= 30)


def memory_of_many() -> Row:
    """Resident memory of the grader and of its sandbox, after a fifth and after all of them."""
    grader, sizes = _grader(), []
    for number in range(1, MANY + 1):
        handed_in = {**_solutions(), "note": "", "config": _solutions()["config"] + f"\n# {number}"}
        ((result,),) = [list(grader.grade(handed_in, ["0.1"]))]
        assert result.status == "passed", result
        if number in (MANY // 5, MANY):
            both = [psutil.Process(), *grader.sandbox.processes()]
            sizes.append(sum(process.memory_info().rss for process in both) / 2**20)
    grader.close()
    grown = sizes[1] - sizes[0]
    result = f"{sizes[0]:,.0f} MB after {MANY // 5}, {sizes[1]:,.0f} MB after {MANY}"
    return Row(f"memory of the grader over {MANY} submissions", result, "stated", grown < 50)


# --- beside nbgrader ---


def beside_nbgrader() -> Row:
    """Submissions an hour of both, on the same submissions."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = nbgraders_python(folder / "environment")
        handed_in = class_of(STUDENTS)
        write_submissions(folder / "submissions", handed_in)
        write_course(python, folder / "course", handed_in)
        theirs = seconds(lambda: autograde(python, folder / "course"))
        ours = seconds(lambda: grade(folder / "submissions", folder / "grades"))
        same = our_points(folder / "grades") == their_points(python, folder / "course")
    rates = [3600 * STUDENTS / taken for taken in (ours, theirs)]
    result = f"{rates[0]:.0f} an hour, nbgrader {rates[1]:.0f}: {theirs / ours:.1f} times; points "
    result += "equal" if same else "DIFFERENT"
    what = f"{STUDENTS} submissions of chapters 0 to 5, {os.cpu_count()} cores"
    return Row(what, result, "5 times nbgrader's", same and theirs / ours >= 5)


def class_of(count: int) -> list[dict[str, str]]:
    """The texts of exercises, by id, of each student: complete, but for one that is not written."""
    from bertlab.course.regions import find_regions, stub_module

    solutions, exercises = _solutions(), _exercises(CHAPTERS)
    texts, stubs = {}, {}
    for exercise_id in exercises:
        module = solutions[_module(exercise_id)]
        texts[exercise_id] = find_regions(module)[exercise_id].text
        stubs[exercise_id] = find_regions(stub_module(module))[exercise_id].text
    # Those on which no other builds: nbgrader knows no stand-ins for what is missing.
    left_out = [exercise_id for exercise_id in exercises if "clinic" in _module(exercise_id)]
    missed = [left_out[number % len(left_out)] for number in range(count)]
    return [{**texts, one: stubs[one]} for one in missed]


def _module(exercise_id: str) -> str:
    from bertlab.course import outline

    return outline.entries()[exercise_id].module


def write_submissions(folder: Path, handed_in: list[dict[str, str]]) -> None:
    """Write them as students' packages, for `bertlab grade`."""
    from bertlab.course.regions import replace_region

    for number, texts in enumerate(handed_in):
        modules = _solutions()
        for exercise_id, text in texts.items():
            module = _module(exercise_id)
            modules[module] = replace_region(modules[module], exercise_id, text)
        for name, text in modules.items():
            path = folder / f"student{number:02d}" / "bertlab" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def grade(submissions: Path, grades: Path) -> None:
    """Run `bertlab grade` as an instructor does, with its start."""
    command = [sys.executable, "-m", "bertlab.course.cli", "grade", str(submissions)]
    command += ["--out", str(grades), "--chapters", "0-5", "--seed", str(SEED)]
    _run(command)


def our_points(grades: Path) -> list[float]:
    """Each student's points."""
    from bertlab.course.grading.visible import Grades

    return [round(student.points, 1) for student in Grades(grades).students()]


def _run(command: list[str], **more: Any) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"BERTLAB_REFERENCE": "seeded", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, **more)
    if done.returncode:
        raise RuntimeError(f"{command[:4]} failed:\n{done.stderr[-3000:]}")
    return done.stdout


# --- nbgrader's side ---


def nbgraders_python(folder: Path) -> Path:
    """Make an environment with nbgrader, which finds PyTorch and the like in this one."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    here = Path(psutil.__file__).parents[1]
    (there,) = folder.glob("lib/python*/site-packages")
    (there / "this_environment.pth").write_text(f"{here}\n")
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "nbgrader==0.9.6"]
    subprocess.run(install, check=True, capture_output=True)
    return python


#: The first cell of every notebook: where answers go, and how an exercise is judged.
SETUP = """
from IPython.core.magic import register_cell_magic
import importlib
from tests.measure import complete
complete()
from bertlab.course.grading.grader import Grader, HiddenTests, Listing, graded, run_pytest
from bertlab.course.grading.hidden import Submission, Truths
from tests.course.hidden_double import HIDDEN, LocalSession

LISTED, TRUTHS = Listing(), Truths()
run_pytest(HIDDEN, LISTED, collect_only=True)

@register_cell_magic
def part(module, cell):
    exec(compile(cell, module, "exec"), vars(importlib.import_module(f"bertlab.{module}")))

def points(exercise_id):
    TRUTHS.of(exercise_id, SEED)
    plugin = HiddenTests(Submission(LocalSession({}), exercise_id, SEED, TRUTHS))
    run_pytest(HIDDEN, plugin, LISTED.files[exercise_id])
    return graded(exercise_id, plugin.results).points
"""


def write_course(python: Path, folder: Path, handed_in: list[dict[str, str]]) -> None:
    """Write nbgrader's course: the sources, and what each student handed in."""
    import nbformat

    for chapter in CHAPTERS:
        name = f"chapter{chapter}"
        blank = _notebook(chapter, handed_in[0])
        places = {folder / "source" / name: blank}
        for number, texts in enumerate(handed_in):
            places[folder / "submitted" / f"student{number:02d}" / name] = _notebook(chapter, texts)
        for place, notebook in places.items():
            place.mkdir(parents=True)
            nbformat.write(notebook, place / f"{name}.ipynb")
    config = "c = get_config()\nc.CourseDirectory.course_id = 'bench'\n"
    config += "c.ClearSolutions.code_stub = {'python': ''}\nc.ExecutePreprocessor.timeout = 600\n"
    (folder / "nbgrader_config.py").write_text(config)
    for chapter in CHAPTERS:
        make = ["generate_assignment", f"chapter{chapter}", "--create"]
        _run([str(python), "-m", "nbgrader", *make], cwd=folder)


def _notebook(chapter: int, texts: dict[str, str]) -> Any:
    from nbformat.v4 import new_notebook

    cells = [_cell("setup", f"SEED = {SEED}\n{SETUP}", locked=True)]
    for exercise_id in _exercises([chapter]):
        cells += _cells_of(exercise_id, texts[exercise_id])
    return new_notebook(cells=cells, metadata={"kernelspec": _kernel()})


def _cells_of(exercise_id: str, text: str) -> list[Any]:
    from bertlab.course import outline

    entry, name = outline.entries()[exercise_id], exercise_id.replace(".", "-")
    judge = f"points({exercise_id!r})"
    return [
        _cell(f"answer-{name}", f"%%part {entry.module}\n{text}", solution=True),
        _cell(f"test-{name}", judge, locked=True, grade=True, points=entry.points),
    ]


def _cell(id: str, source: str, **more: Any) -> Any:
    from nbformat.v4 import new_code_cell

    kind = {"grade": False, "solution": False, "locked": False, "task": False, **more}
    metadata = {"nbgrader": {**kind, "grade_id": id, "schema_version": 3, "cell_type": "code"}}
    return new_code_cell(source, metadata=metadata, id=id)


def _kernel() -> dict[str, str]:
    return {"name": "python3", "display_name": "Python 3", "language": "python"}


def autograde(python: Path, course: Path) -> None:
    """Run nbgrader's autograde on every chapter."""
    for chapter in CHAPTERS:
        command = ["autograde", f"chapter{chapter}", "--create"]
        _run([str(python), "-m", "nbgrader", *command], cwd=course)


def their_points(python: Path, course: Path) -> list[float]:
    """Each student's points, out of nbgrader's database."""
    ask = "import json\nfrom nbgrader.api import Gradebook\n"
    ask += "with Gradebook('sqlite:///gradebook.db') as book:\n"
    ask += "    print(json.dumps({s.id: s.score for s in book.students}))\n"
    found = json.loads(_run([str(python), "-c", ask], cwd=course))
    return [round(score, 1) for _, score in sorted(found.items())]
