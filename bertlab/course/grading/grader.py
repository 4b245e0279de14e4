"""The trusted side: hidden tests on one submission, exercise by exercise.

Hidden tests are plain pytest files below ``tests/hidden``. A test names its exercise with
``@pytest.mark.exercise("3.1")`` and reaches the student's code through the fixture `submission`
alone, which sends inputs into the sandbox and gets outputs back.
"""

import contextlib
import functools
import io
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertlab.course import exercise as exercises
from bertlab.course import outline
from bertlab.course.grading import slices
from bertlab.course.grading.hidden import CALLS, Submission, Truths, is_students
from bertlab.course.grading.sandbox import FAILURES, Limits, Sandbox, SessionFailed
from bertlab.course.regions import find_regions

# --- results ---


@dataclass
class TestResult:
    """How one hidden test went.

    Attributes:
        name: what the student is shown: the first line of the test's docstring.
        hint: what else the student is shown if it did not pass.
        status: `passed`, `failed` (a wrong answer), `error` (no answer) or `skipped`.
        reason: a code; "" if it passed: `wrong`, `raised`, `todo`, `missing`, or one of a
            failed session's, such as `timeout`.
        detail: for instructors only: it may hold inputs and expected values.
        weight: its share of the exercise's points.
    """

    __test__ = False  # not a test itself

    name: str
    hint: str
    status: str
    reason: str = ""
    detail: str = ""
    weight: float = 1.0


@dataclass
class ExerciseResult:
    """How one submission did on one exercise."""

    exercise: str
    status: str
    points: float
    max_points: int
    reason: str
    tests: list[TestResult] = field(default_factory=list)
    stand_ins: list[str] = field(default_factory=list)
    level: str = ""
    device: str = "cpu"
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """The result as plain data."""
        return asdict(self)


def graded(exercise_id: str, tests: list[TestResult]) -> ExerciseResult:
    """The result of an exercise from those of its tests: points by the weight of what passed.

    Where the student's process once failed to answer, there are none: what it had said before is
    not trusted, and which tests had come before is chance.
    """
    entry = outline.entries()[exercise_id]
    counted = [test for test in tests if test.status != "skipped"]
    total = sum(test.weight for test in counted)
    reached = sum(test.weight for test in counted if test.status == "passed")
    points = round(entry.points * reached / total, 2) if total else 0.0
    missed = [test for test in counted if test.status != "passed"]
    unanswered = [test for test in missed if test.reason in FAILURES]
    if unanswered:
        return ExerciseResult(exercise_id, "error", 0.0, entry.points, unanswered[0].reason, tests)
    if not counted:
        return ExerciseResult(exercise_id, "error", 0.0, entry.points, "no_tests", tests)
    if not missed:
        return ExerciseResult(exercise_id, "passed", points, entry.points, "", tests)
    status = "error" if all(test.status == "error" for test in counted) else "failed"
    return ExerciseResult(exercise_id, status, points, entry.points, missed[0].reason, tests)


# --- the modules of a submission ---


def workspace(given: dict[str, str], handed_in: dict[str, str]) -> dict[str, str]:
    """The package to judge: this installation's modules overlaid with the submission's.

    Args:
        given: the installation's modules, unfinished: name to text.
        handed_in: the submission's, name to text; a name that is no exercise module is ignored.
    """
    allowed = set(outline.modules())
    return {**given, **{name: text for name, text in handed_in.items() if name in allowed}}


def with_stand_ins(
    modules: dict[str, str], solutions: dict[str, str], exercise_ids: Iterable[str]
) -> dict[str, str]:
    """The package with some exercises replaced by the complete ones, so that another can be judged.

    The complete text is put at the end of its module: whatever stood under these names before is
    not used.
    """
    result = dict(modules)
    for exercise_id in exercise_ids:
        module = outline.entries()[exercise_id].module
        region = find_regions(solutions[module])[exercise_id].text
        result[module] = f"{result.get(module, '')}\n\n{region}"
    return result


# --- running the hidden tests ---


class HiddenTests:
    """A pytest plugin that runs the tests of one exercise and keeps how each went."""

    def __init__(self, submission: Submission) -> None:
        self.submission_ = submission
        self.results: list[TestResult] = []

    @pytest.fixture
    def submission(self, request: pytest.FixtureRequest) -> Submission:
        self.submission_.begin(request.node.nodeid)
        return self.submission_

    @pytest.fixture
    def rng(self, request: pytest.FixtureRequest) -> np.random.Generator:
        """A generator of random numbers from the secret seed, another one for each test."""
        return np.random.default_rng([self.submission_.seed, *request.node.name.encode()])

    def pytest_configure(self, config: pytest.Config) -> None:
        _know_marks(config)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "exercise_id" in metafunc.fixturenames:  # a test for every exercise
            metafunc.parametrize("exercise_id", [self.submission_.exercise_id])

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted = self.submission_.exercise_id
        items[:] = [item for item in items if wanted in _exercises_of(item)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]):
        report = yield
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self.results.append(_result(item, call, report))
        return report


class Listing:
    """A pytest plugin that notes in which files the tests of each exercise stand."""

    def __init__(self) -> None:
        self.files: dict[str, list[Path]] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        _know_marks(config)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "exercise_id" in metafunc.fixturenames:
            metafunc.parametrize("exercise_id", list(outline.entries()))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for exercise_id in _exercises_of(item):
                files = self.files.setdefault(exercise_id, [])
                if item.path not in files:
                    files.append(item.path)


MARKS = (
    "exercise(id): the exercise that a hidden test belongs to",
    "hint(text): what a student is told when the test does not pass",
    "weight(number): the test's share of the points; 1 by default",
)


def _know_marks(config: pytest.Config) -> None:
    for line in MARKS:
        config.addinivalue_line("markers", line)


def _exercises_of(item: pytest.Item) -> list[str]:
    named = [mark.args[0] for mark in item.iter_markers("exercise")]
    parametrized = getattr(getattr(item, "callspec", None), "params", {}).get("exercise_id")
    return [*named, parametrized] if parametrized else named


def _result(
    item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
) -> TestResult:
    mark = item.get_closest_marker("hint")
    weight = item.get_closest_marker("weight")
    documentation = getattr(getattr(item, "function", None), "__doc__", None) or item.name
    result = TestResult(
        name=documentation.strip().splitlines()[0],
        hint=str(mark.args[0]) if mark else "",
        status=report.outcome,
        weight=float(weight.args[0]) if weight else 1.0,
    )
    if call.excinfo is not None and report.outcome == "failed":
        error = call.excinfo.value
        result.status, result.reason = _judged(error)
        result.detail = f"{type(error).__name__}: {error}"[:2000]
    return result


def _judged(error: BaseException) -> tuple[str, str]:
    """Status and reason code of a test that raised."""
    if isinstance(error, SessionFailed):
        return "error", error.reason
    if "NotImplementedError: exercise " in f"{type(error).__name__}: {error}":
        return "error", "todo"
    if isinstance(error, (AssertionError, pytest.fail.Exception)) and not is_students(error):
        return "failed", "wrong"
    if isinstance(error, (ImportError, SyntaxError)):
        return "error", "missing"
    return "error", "raised" if is_students(error) else "grader"


@dataclass
class Grader:
    """Grades exercises of submissions; the reference is loaded once for all of them.

    Attributes:
        tests: the folder with the hidden tests.
        given: the unfinished modules, name to text.
        solutions: the complete modules, name to text.
        seed: the secret seed.

    Raises:
        BrokenTests: a hidden test's file cannot be read.
    """

    tests: Path
    given: dict[str, str]
    solutions: dict[str, str]
    seed: int
    level: str
    limits: Limits = field(default_factory=Limits)
    device: str = "cpu"

    def __post_init__(self) -> None:
        listed = Listing()
        run_pytest(self.tests, listed, collect_only=True)  # say now if one of them is broken
        self.files = listed.files
        self.truths = Truths(self.device)
        self.sandbox = Sandbox(self.level, self.device)

    def close(self) -> None:
        """End the sandbox."""
        self.sandbox.stop()

    def grade(
        self,
        handed_in: dict[str, str],
        exercise_ids: list[str],
        done: dict[str, bool] | None = None,
    ) -> Iterator[ExerciseResult]:
        """Grade a submission on some exercises, in order.

        An exercise that does not pass is judged once more with the complete version of every
        earlier exercise that did not pass either, so that one mistake is counted once.

        Args:
            handed_in: the submission's modules, name to text.
            done: exercises judged before, and whether they passed.
        """
        passed = dict(done or {})
        modules = workspace(self.given, handed_in)
        for exercise_id in exercise_ids:
            start = time.perf_counter()
            result = self.run(modules, exercise_id)
            missed = [id for id, good in passed.items() if not good and id != exercise_id]
            if result.status != "passed" and missed and not _unwritten(result):
                again = self.run(with_stand_ins(modules, self.solutions, missed), exercise_id)
                if again.points >= result.points:  # what is left is this exercise's own
                    result = again
                    result.stand_ins = missed
            passed[exercise_id] = result.status == "passed"
            result.level, result.device = self.level, self.device
            result.seconds = round(time.perf_counter() - start, 2)
            yield result

    def run(self, modules: dict[str, str], exercise_id: str) -> ExerciseResult:
        """Run the hidden tests of one exercise."""
        self.truths.of(exercise_id, self.seed)  # before the clock starts
        sent = helpers(exercise_id)
        try:
            with self.sandbox.session(modules, sent, self.limits, _preload(sent)) as session:
                submission = Submission(session, exercise_id, self.seed, self.truths)
                plugin = HiddenTests(submission)
                run_pytest(self.tests, plugin, self.files.get(exercise_id, ()))
                if not session.failed:
                    session.expect_silence()
                return graded(exercise_id, plugin.results)
        except SessionFailed as error:
            failed = TestResult("The submission answers", "", "error", error.reason, str(error))
            return graded(exercise_id, [failed])


def _unwritten(result: ExerciseResult) -> bool:
    """True if it is this exercise's own stub that every test met: no stand-in would help."""
    own = re.compile(rf"NotImplementedError: exercise {re.escape(result.exercise)}(?!\d)")
    return all(own.search(test.detail) for test in result.tests)


@functools.cache
def helpers(exercise_id: str) -> dict[str, str]:
    """What enters the sandbox beside the submission."""
    exercise = exercises.load(exercise_id)
    calls = slices.sliced({(CALLS, name) for name in slices.defined_in(CALLS)})
    probe = slices.helpers_of(exercise)
    merged = set(calls) & set(probe)
    both = slices.sliced({(name, bound) for name in merged for bound in slices.defined_in(name)})
    return {**calls, **probe, **both}


def _preload(texts: dict[str, str]) -> tuple[str, ...]:
    """Installed modules that take long to import and that the helpers need."""
    uses = any("transformers" in text for text in texts.values())
    return ("transformers.models.bert.modeling_bert",) if uses else ()


class BrokenTests(RuntimeError):
    """A hidden test's file cannot be read: nothing may be graded."""


def run_pytest(
    tests: Path,
    plugin: HiddenTests | Listing,
    files: Iterable[Path] = (),
    collect_only: bool = False,
) -> None:
    """Run the tests in this process, quietly.

    Args:
        tests: the folder with the hidden tests.
        files: some of them; all by default.

    Raises:
        BrokenTests: they cannot be collected; the message is pytest's.
    """
    arguments = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    arguments += ["--disable-plugin-autoload", "--tb=native"]  # other tracebacks take 0.1 s each
    # These two collect garbage several times a run, which takes ten times as long as the tests.
    arguments += ["-p", "no:unraisableexception", "-p", "no:threadexception"]
    arguments += ["-c", os.devnull, "--rootdir", str(tests), *map(str, list(files) or [tests])]
    arguments += ["--collect-only"] * collect_only
    _forget_other_folders(tests)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main(arguments, plugins=[plugin])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise BrokenTests(f"the hidden tests in {tests} cannot be run:\n{said.getvalue()[-3000:]}")


def _forget_other_folders(tests: Path) -> None:
    """Let go of modules of the same names from another folder: pytest would take them for these."""
    for path in tests.rglob("*.py"):
        known = sys.modules.get(path.stem)
        if known is not None and str(path) != getattr(known, "__file__", None):
            del sys.modules[path.stem]
