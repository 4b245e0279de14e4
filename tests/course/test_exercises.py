"""What must be true of every exercise: the starter is to do, the solution passes, and every
misconception fails and is named. New exercises are covered without a line here."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from bertlab.course import exercise as exercises
from bertlab.course import judging, outline
from bertlab.course.regions import find_regions, is_stub
from bertlab.course.workspace import Workspace

from .kernels import bertlab, python

IDS = list(outline.entries())
#: `make prove` takes 20, which is for who changed an exercise; every run of the tests takes some.
SEEDS = range(int(os.environ.get("BERTLAB_SEEDS", "6")))


@pytest.mark.parametrize("exercise_id", IDS)
def test_the_starter_is_to_do(exercise_id, pristine_copy):
    assert is_stub(Workspace(pristine_copy).region(exercise_id).text)


def test_no_starter_passes(student_copy):
    done = bertlab(student_copy, "check", "--json")
    assert done.returncode == 1, done.stderr
    statuses = {record["exercise"]: record["status"] for record in _records(done.stdout)}
    assert statuses == dict.fromkeys(IDS, "todo")


def _records(text: str) -> list[dict]:
    return json.loads(text)


@pytest.mark.parametrize("exercise_id", IDS)
def test_the_solution_passes_on_every_seed(exercise_id, complete):
    exercise = exercises.load(exercise_id)
    module = getattr(complete, exercise.module)
    parts = SimpleNamespace(**{name: getattr(module, name) for name in exercise.names})
    for seed in SEEDS:
        verdict = judging.judge(exercise, parts, seed)
        assert verdict.status == "passed", (seed, verdict.diagnosis, verdict.cases)
        assert len(verdict.cases) >= 3


@pytest.mark.parametrize("exercise_id", IDS)
def test_every_misconception_fails_on_every_seed_and_is_the_one_named(exercise_id):
    exercise = exercises.load(exercise_id)
    departures: dict[str, float] = {}
    for seed in SEEDS:
        standards = judging.Standards(exercise, seed)
        for wrong in exercise.misconceptions:
            # Once as a student's part, run by itself; then the run that it is compared with, too.
            parts = exercise.wrong(wrong) if seed == 0 else standards.wrong(wrong)
            verdict = judging.judge(exercise, parts, standards=standards)
            assert verdict.status == "failed", f"{wrong.name}, seed {seed}: it passes"
            assert verdict.misconception == wrong.name, f"{wrong.name}, seed {seed}: {verdict}"
            if verdict.worst_error and verdict.tolerance:
                departure = verdict.worst_error / verdict.tolerance
                departures[wrong.name] = min(departures.get(wrong.name, departure), departure)
    # Numeric ones must depart clearly, not barely.
    assert all(departure >= 20 for departure in departures.values()), departures


@pytest.mark.parametrize("exercise_id", IDS)
def test_an_exercise_is_complete(exercise_id):
    exercise = exercises.load(exercise_id)
    assert len(exercise.misconceptions) >= 3
    assert len({m.name for m in exercise.misconceptions}) == len(exercise.misconceptions)
    assert all(len(m.explanation.split()) >= 20 for m in exercise.misconceptions)
    assert len(exercise.hints) == 3
    assert all(hint.strip() for hint in exercise.hints)
    assert len(set(exercise.hints)) == 3


@pytest.mark.parametrize("exercise_id", IDS)
def test_the_region_stands_where_the_outline_says(exercise_id, root):
    entry = outline.entries()[exercise_id]
    source = (root / "solutions" / "bertlab" / f"{entry.module}.py").read_text(encoding="utf-8")
    assert find_regions(source)[exercise_id].title == entry.title


@pytest.mark.parametrize("exercise_id", IDS)
def test_cases_differ_from_seed_to_seed(exercise_id):
    exercise = exercises.load(exercise_id)
    draws = [repr(list(exercise.cases(np.random.default_rng(seed)))) for seed in (1, 2)]
    assert draws[0] != draws[1], "a hard-coded answer for the public seed would pass anywhere"


def test_every_solution_passes_in_a_fresh_process_and_is_counted(student_copy, root):
    """What a student who has done everything sees: all passed, exit status 0."""
    from bertlab.course.authoring.build import complete_package

    folder = student_copy.parent / "complete"
    complete_package(root, folder)
    done = bertlab(student_copy, "check", "--workspace", str(folder))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("✓ passed") == len(IDS)


def test_a_check_that_never_ends_is_an_error_and_the_rest_is_judged(student_copy):
    loop = (
        "def count_parameters(config):\n"
        "    try:\n        while True: pass\n    except Exception: pass\n"
    )
    Workspace(student_copy).fill("0.1", loop)
    # In a process of its own: judging loads the exercise modules anew, and `complete` is of them.
    script = (
        "from pathlib import Path\n"
        "import torch\n"  # before the clock starts
        "from bertlab.course.cli import judge_all\n"
        "from bertlab.course.workspace import Workspace\n"
        "for one in judge_all(Workspace(Path.cwd()), ['0.1', '2.1'], time_limit=1.0):\n"
        "    print(one.status, one.diagnosis)\n"
    )
    first, second = python(student_copy, script).splitlines()
    assert first.startswith("error ") and "within 1 seconds" in first
    assert second.startswith("todo")


def test_students_can_test_their_own_package(student_copy, root):
    """Right, wrong and to do: what `make test` says in a student's copy."""
    workspace = Workspace(student_copy)
    solved = (root / "solutions" / "bertlab" / "config.py").read_text(encoding="utf-8")
    workspace.fill("0.1", find_regions(solved)["0.1"].text)
    workspace.fill("2.2", "def sinusoidal_positions(length, width):\n    return None\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/public", "-rA"],
        cwd=student_copy,
        env={**os.environ, "PYTHONPATH": str(student_copy)},
        capture_output=True,
        text=True,
    )
    name = "tests/public/test_package.py::test_the_part_agrees_with_the_reference"
    assert f"PASSED {name}[0.1]" in done.stdout, done.stdout + done.stderr
    assert f"FAILED {name}[2.2]" in done.stdout
    assert f"1 failed, 1 passed, {len(IDS) - 2} skipped" in done.stdout
