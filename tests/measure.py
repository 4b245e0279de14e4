"""How the benchmarks measure: two things in turn, in one run, as a ratio with its spread."""

import importlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Row(NamedTuple):
    """One claim: what was measured, the result, what was asked for, and whether it holds."""

    what: str
    result: str
    asked: str
    holds: bool


def seconds(function: Callable[[], object]) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def paired(first: Callable[[], object], second: Callable[[], object], rounds: int) -> list[float]:
    """Return, for each round, the time of `second` divided by that of `first`, run in turn."""
    ratios = []
    for number in range(rounds):
        order = (first, second) if number % 2 == 0 else (second, first)
        taken = {function: seconds(function) for function in order}
        ratios.append(taken[second] / taken[first])
    return ratios


def spread(values: list[float], unit: str = "") -> str:
    """Return median and range, rounded."""
    middle = statistics.median(values)
    return f"{middle:.2f}{unit} ({min(values):.2f} to {max(values):.2f})"


def complete() -> SimpleNamespace:
    """Return the complete package's modules, with the solutions filled in."""
    from bertlab.course import outline
    from bertlab.course.authoring.build import complete_package
    from bertlab.course.package import Package
    from bertlab.course.workspace import Workspace

    package = Package(Workspace(complete_package(ROOT, Path(tempfile.mkdtemp()))))
    for exercise_id in outline.entries():
        package.use_own(exercise_id)
    package.install()
    return SimpleNamespace(
        **{name: importlib.import_module(f"bertlab.{name}") for name in outline.modules()}
    )
