"""A stand-in for the sandbox: it answers in this process, with wrong parts put into the package."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from bertlab.course.exercise import Exercise
from bertlab.course.grading import wire
from bertlab.course.grading.grader import (
    ExerciseResult,
    HiddenTests,
    TestResult,
    graded,
    run_pytest,
)
from bertlab.course.grading.hidden import Submission, Truths

HIDDEN = Path(__file__).resolve().parents[1] / "hidden"


def worker() -> ModuleType:
    """What runs inside the sandbox, which finds its neighbour beside itself."""
    sys.modules.setdefault("wire", wire)
    return importlib.import_module("bertlab.course.grading.worker")


class LocalSession:
    """Does with a request what the sandbox does.

    Args:
        parts: what stands in the package's place, by target: ``{"attention.split_heads": ...}``.
    """

    def __init__(self, parts: dict[str, Any]) -> None:
        self.parts = parts

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request."""
        with self._in_place():
            try:
                answer = worker().perform(wire.crossed(request))
            except BaseException as error:
                answer = {"error": worker().described(error)}
        return wire.crossed(answer)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        before = []
        for target, part in self.parts.items():
            module, name = target.split(".", 1)
            home = importlib.import_module(f"bertlab.{module}")
            before.append((home, name, getattr(home, name)))
            setattr(home, name, part)
        try:
            yield
        finally:
            for place in before:
                setattr(*place)


def parts_of(exercise: Exercise, wrong: Mapping[str, Any]) -> dict[str, Any]:
    """An exercise's parts by target: the wrong ones, and the reference's where there is none."""
    named = {target: target.split(".", 1)[1] for target in exercise.entry.targets}
    return {t: wrong.get(name, exercise.reference[name]) for t, name in named.items()}


class ManyHiddenTests(HiddenTests):
    """The hidden tests of one exercise on many packages, in one run of pytest.

    Args:
        submissions: by a name for each.
    """

    def __init__(self, submissions: dict[str, Submission]) -> None:
        super().__init__(next(iter(submissions.values())))
        self.submissions = submissions
        self.results_of: dict[str, list[TestResult]] = {name: [] for name in submissions}

    @pytest.fixture
    def submission(self, request: pytest.FixtureRequest, which: str) -> Submission:
        self.submissions[which].begin(request.function.__name__)
        self.results = self.results_of[which]
        return self.submissions[which]

    @pytest.fixture
    def rng(self, request: pytest.FixtureRequest) -> np.random.Generator:
        return np.random.default_rng([self.submission_.seed, *request.function.__name__.encode()])

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        super().pytest_generate_tests(metafunc)
        if "submission" in metafunc.fixturenames:
            metafunc.parametrize("which", list(self.submissions))


def judged(
    exercise_id: str, packages: dict[str, dict[str, Any]], seed: int, truths: Truths | None = None
) -> dict[str, ExerciseResult]:
    """Run the hidden tests of an exercise on the package with each of some parts put in."""
    truths = truths or Truths()
    submissions = {
        name: Submission(LocalSession(parts), exercise_id, seed, truths)
        for name, parts in packages.items()
    }
    plugin = ManyHiddenTests(submissions)
    run_pytest(HIDDEN, plugin)
    return {name: graded(exercise_id, results) for name, results in plugin.results_of.items()}
