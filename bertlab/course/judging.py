"""Judging: does an implementation agree with the reference, and if not, how does it differ?

There are no hand-picked tolerances. The truth is the reference in float64; the yardstick is the
reference's own error in the type in which the student's part runs, on the same device. A tensor
agrees with the truth if it errs by no more than `MULTIPLE` yardsticks, with a floor of
`FLOOR_ULP` units in the last place of the output's scale (the reference may be lucky and exact).
"""

import copy
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from bertlab.course.exercise import Case, Exercise, Misconception

#: How many of the reference's own errors a student's part may err.
MULTIPLE = 8
#: The least tolerance, in units in the last place of the largest value of the output.
FLOOR_ULP = 8
#: The seed of the cases that the notebook shows. The grader draws its own.
PUBLIC_SEED = 2018


@dataclass(frozen=True)
class Outcome:
    """What came of calling an implementation on one case: a value, or an exception."""

    value: Any = None
    error: BaseException | None = None
    changed: str | None = None  # name of an input that the call changed in place


@dataclass(frozen=True)
class Difference:
    """The first way in which an outcome departs from another."""

    message: str
    error: float = 0.0
    tolerance: float = 0.0


@dataclass(frozen=True)
class CaseResult:
    """How one case went."""

    name: str
    passed: bool
    message: str = ""


@dataclass
class Verdict:
    """The judgement on one exercise: passed, failed, todo or error, and why."""

    exercise: str
    status: str
    points: int
    max_points: int
    diagnosis: str = ""
    misconception: str = ""
    cases: list[CaseResult] = field(default_factory=list)
    worst_error: float | None = None
    tolerance: float | None = None
    device: str = "cpu"
    reference: str = ""
    frames: str = ""  # for an exception: the student's own lines of the traceback


class NothingJudged(RuntimeError):
    """An exercise yielded no case: the course is at fault, and nothing may pass."""


# --- running an implementation on a case ---


def run(exercise: Exercise, parts: Any, case: Case, device: str, dtype: str) -> Outcome:
    """Call `parts` on a case, with floating-point inputs cast to `dtype` on `device`."""
    inputs = _placed(case.inputs, device, dtype)
    pristine = copy.deepcopy(inputs)
    try:
        with _repeatable():
            value = exercise.probe(parts, **inputs)
    except (Exception, SystemExit) as error:
        return Outcome(error=error)
    changed = [name for name in inputs if not _same(inputs[name], pristine[name])]
    return Outcome(value=value, changed=changed[0] if changed else None)


def _placed(tree: Any, device: str, dtype: str) -> Any:
    if isinstance(tree, dict):
        return {key: _placed(value, device, dtype) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)) and any(_is_tensor(item) for item in tree):
        return type(tree)(_placed(item, device, dtype) for item in tree)
    if _is_tensor(tree):
        import torch

        assert isinstance(tree, torch.Tensor)
        cast = getattr(torch, dtype) if tree.is_floating_point() else tree.dtype
        return tree.detach().clone().to(device=device, dtype=cast)
    return copy.deepcopy(tree)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return set(first) == set(second) and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    if _is_tensor(first):
        import torch

        return first.shape == second.shape and torch.equal(
            torch.nan_to_num(first.detach()), torch.nan_to_num(second.detach())
        )
    return type(first).__eq__ is object.__eq__ or bool(first == second)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Run with a fixed seed, full float32 precision and no trace left in the global generators."""
    import random
    import sys

    torch = sys.modules.get("torch")
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    if torch is None:
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
        return
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    tf32 = torch.backends.cudnn.allow_tf32
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            _seed(torch)
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)
        torch.backends.cudnn.allow_tf32 = tf32
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _seed(torch: Any) -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        torch.manual_seed(0)
    else:  # the same, without a note, kept for good, to seed a GPU that may still come
        torch.default_generator.manual_seed(0)


# --- comparing outcomes ---


@dataclass
class Standard:
    """What an implementation is compared with on one case: its truth and its yardstick."""

    case: Case
    truth: Outcome
    yardstick: Outcome

    @classmethod
    def measure(
        cls, exercise: Exercise, parts: Any, case: Case, device: str, yardstick: Outcome
    ) -> "Standard":
        """Run `parts` on a case in float64; `yardstick` is what it gave in the case's own type."""
        if yardstick.error is not None or not _holds_floats(yardstick.value):
            return cls(case, yardstick, yardstick)  # float64 would say the same
        exact_device = "cpu" if device == "mps" else device  # Apple's GPUs have no float64
        truth = run(exercise, parts, case, exact_device, "float64")
        if truth.error is not None:
            truth = yardstick  # not every implementation runs in float64 (a wrong one need not)
        return cls(case, truth, yardstick)

    def difference(self, outcome: Outcome, nan_allowed: bool = False) -> Difference | None:
        """Return the first difference of an outcome from this standard, or None."""
        if outcome.error is not None or self.yardstick.error is not None:
            return _error_difference(outcome, self.yardstick)
        if outcome.changed and not self.yardstick.changed:
            return Difference(f"changed its argument `{outcome.changed}` in place")
        found: Difference | None = None
        for given, truth, yardstick in self._leaves(outcome.value):
            if isinstance(given, Difference):
                return given
            path, value = given
            difference = _leaf_difference(
                path, value, truth, yardstick, self.case.positions.get(path), nan_allowed
            )
            if difference is not None and (found is None or _size(difference) > _size(found)):
                found = difference
        return found

    def margin(self, outcome: Outcome) -> tuple[float, float]:
        """Return the largest error of an outcome that agrees, in units of its tolerance: both."""
        worst = (0.0, 1.0)
        for given, truth, yardstick in self._leaves(outcome.value):
            if isinstance(given, Difference) or not _is_numeric(truth):
                continue
            error, tolerance, _ = _errors(
                given[1], truth, yardstick, self.case.positions.get(given[0])
            )
            if error / tolerance > worst[0] / worst[1]:
                worst = (error, tolerance)
        return worst

    def _leaves(self, value: Any) -> Iterator[tuple[Any, Any, Any]]:
        truth, yardstick = self.truth.value, self.yardstick.value
        if not isinstance(yardstick, dict):
            value, truth, yardstick = {"output": value}, {"output": truth}, {"output": yardstick}
        if not isinstance(value, dict) or set(value) != set(yardstick):
            given = sorted(value) if isinstance(value, dict) else _described(value)
            missing = Difference(f"the outputs are {given}, expected {sorted(yardstick)}")
            yield missing, None, None
            return
        for path in yardstick:
            yield (path, value[path]), truth[path], yardstick[path]


def _size(difference: Difference) -> float:
    return difference.error / difference.tolerance if difference.tolerance else float("inf")


def _error_difference(outcome: Outcome, standard: Outcome) -> Difference | None:
    given, expected = outcome.error, standard.error
    if given is not None and expected is not None:
        if type(given) is type(expected):
            return None
        return Difference(f"{said(given)}, expected {_name(expected)}")
    if given is not None:
        return Difference(said(given))
    return Difference(f"returned a value, expected {_name(expected)}")


def said(error: BaseException) -> str:
    """Say what came of a call that raised `error`: ``"raised ValueError: ..."``."""
    if isinstance(error, SystemExit):
        return "called sys.exit"
    if "leaf Variable that requires grad" in str(error) and "in-place" in str(error):
        return f"changed an argument (or a parameter) in place, which it must not ({_name(error)})"
    return f"raised {_name(error)}"


def advice(error: BaseException | None, module: str) -> str:
    """Return a sentence to add where code raised `error`, if it usually helps."""
    if type(error) is NameError:
        return (
            f" The cell runs inside bertlab/{module}.py, not in the notebook, and sees only what "
            "that file imports and defines."
        )
    return ""


def _name(error: BaseException | None) -> str:
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return text if len(text) <= 300 else text[:300] + " ..."


def _leaf_difference(
    path: str, value: Any, truth: Any, yardstick: Any, where: Any, nan_allowed: bool
) -> Difference | None:
    label = "the output" if path == "output" else f"`{path}`"
    if not _is_numeric(yardstick):
        if _is_tensor(yardstick) != _is_tensor(value) or not _equal(value, yardstick):
            return Difference(f"{label} is {_shown(value, yardstick)}")
        return None
    kind = _kind_difference(label, value, yardstick)
    if kind is not None:
        return kind
    error, tolerance, index = _errors(value, truth, yardstick, where, nan_allowed)
    if error <= tolerance:
        return None
    if np.isnan(error):
        return Difference(f"{label} has NaN at {index}")
    where_it_is = f" at {index}" if index else ""
    return Difference(
        f"{label} is off by {error:.1e}{where_it_is}, where {tolerance:.1e} is allowed",
        error,
        tolerance,
    )


def _kind_difference(label: str, value: Any, yardstick: Any) -> Difference | None:
    if isinstance(yardstick, float):
        if type(value) is bool or not isinstance(value, (int, float)):
            return Difference(f"{label} is {_described(value)}, expected a number")
        return None
    if not _is_tensor(value):
        return Difference(f"{label} is {_described(value)}, expected a tensor")
    for what, given, expected in (
        ("shape", tuple(value.shape), tuple(yardstick.shape)),
        ("dtype", value.dtype, yardstick.dtype),
        ("device", value.device, yardstick.device),
    ):
        if given != expected:
            return Difference(f"{label} has {what} {given}, expected {expected}")
    return None


def _errors(
    value: Any, truth: Any, yardstick: Any, where: Any, nan_allowed: bool = False
) -> tuple[float, float, str]:
    """Return the largest error, the tolerance, and where the error is."""
    given, exact, own = (_float64(tensor) for tensor in (value, truth, yardstick))
    if where is not None:
        keep = np.broadcast_to(_positions(where, given.ndim), given.shape)
        given, exact, own = (np.where(keep, array, 0.0) for array in (given, exact, own))
    with np.errstate(invalid="ignore"):
        distance = np.where(given == exact, 0.0, np.abs(given - exact))
        own_error = np.where(own == exact, 0.0, np.abs(own - exact))
    if nan_allowed:
        distance = np.where(np.isnan(given) & np.isnan(own), 0.0, distance)
    finite = np.abs(exact[np.isfinite(exact)])
    scale = float(finite.max()) if finite.size else 0.0
    own_finite = own_error[np.isfinite(own_error)]
    yard = float(own_finite.max()) if own_finite.size else 0.0
    tolerance = max(MULTIPLE * yard, FLOOR_ULP * _epsilon(yardstick) * scale, 1e-300)
    if distance.size == 0:
        return 0.0, tolerance, ""
    worst = int(np.argmax(np.where(np.isnan(distance), np.inf, distance)))
    index = [int(i) for i in np.unravel_index(worst, distance.shape)]
    return float(distance.reshape(-1)[worst]), tolerance, str(index) if index else ""


def _positions(where: Any, dimensions: int) -> np.ndarray:
    array = np.asarray(where.cpu() if _is_tensor(where) else where, dtype=bool)
    return array.reshape(array.shape + (1,) * (dimensions - array.ndim))


def _float64(value: Any) -> np.ndarray:
    if _is_tensor(value):
        import torch

        return value.detach().to("cpu").to(torch.float64).numpy()
    return np.asarray(value, dtype=np.float64)


def _epsilon(value: Any) -> float:
    if _is_tensor(value):
        import torch

        return torch.finfo(value.dtype).eps
    return float(np.finfo(np.float64).eps)


def _is_tensor(value: Any) -> bool:
    import sys

    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_numeric(value: Any) -> bool:
    return isinstance(value, float) or (_is_tensor(value) and value.is_floating_point())


def _holds_floats(value: Any) -> bool:
    leaves = value.values() if isinstance(value, dict) else [value]
    return any(_is_numeric(leaf) for leaf in leaves)


def _equal(first: Any, second: Any) -> bool:
    if _is_tensor(first):
        return first.shape == second.shape and first.dtype == second.dtype and _same(first, second)
    if isinstance(second, (list, tuple)):
        return (
            type(first) is type(second)
            and len(first) == len(second)
            and all(map(_equal, first, second))
        )
    return type(first) is type(second) and bool(first == second)


def _identical(first: Any, second: Any) -> bool:
    """True only if two outputs are equal to the last bit, and of the same types throughout."""
    if _is_tensor(first) and _is_tensor(second):
        alike = first.dtype == second.dtype and first.device == second.device
        return alike and first.shape == second.shape and bool((first == second).all())
    if isinstance(first, dict) and isinstance(second, dict):
        keys = list(first)
        return keys == list(second) and all(_identical(first[key], second[key]) for key in keys)
    return _equal(first, second)


def _described(value: Any) -> str:
    if value is None:
        return "None (is a `return` missing?)"
    return f"of type {type(value).__name__}"


def _shown(value: Any, expected: Any) -> str:
    """Say how a value that is not a floating-point tensor differs from the expected one."""
    if _is_tensor(value) and _is_tensor(expected):
        if value.shape != expected.shape or value.dtype != expected.dtype:
            return (
                f"of shape {tuple(value.shape)} and dtype {value.dtype}, expected "
                f"{tuple(expected.shape)} and {expected.dtype}"
            )
        value, expected = value.tolist(), expected.tolist()
    if type(value) is not type(expected):
        return f"{_described(value)}, expected {type(expected).__name__}"
    if isinstance(expected, dict) and set(value) == set(expected):
        key = next(key for key in expected if not _equal(value[key], expected[key]))
        return f"{_short(value[key])} at [{key!r}], expected {_short(expected[key])}"
    if isinstance(expected, (list, tuple)):
        for index, (given, wanted) in enumerate(zip(value, expected, strict=False)):
            if not _equal(given, wanted):
                return f"{_short(given)} at [{index}], expected {_short(wanted)}"
        return f"{len(value)} long, expected {len(expected)}"
    return f"{_short(value)}, expected {_short(expected)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# --- the verdict ---


class Standards:
    """An exercise's cases for one seed, and what implementations do on them, each run once."""

    def __init__(self, exercise: Exercise, seed: int = PUBLIC_SEED, device: str = "cpu") -> None:
        self.exercise, self.device = exercise, device
        self.cases = list(exercise.cases(np.random.default_rng(seed)))
        self.reference = SimpleNamespace(**exercise.reference)
        self._wrong = {each.name: exercise.wrong(each) for each in exercise.misconceptions}
        self._outcomes: dict[tuple[int, int], tuple[Any, Outcome]] = {}
        self._measured: dict[tuple[int, int], Standard] = {}

    def wrong(self, misconception: Misconception) -> SimpleNamespace:
        """Return the parts with one misconception in the reference's place, always the same."""
        return self._wrong[misconception.name]

    def outcome(self, case: Case, parts: Any) -> Outcome:
        """Return what comes of calling `parts` on a case."""
        key = id(case), id(parts)
        if key not in self._outcomes:
            outcome = run(self.exercise, parts, case, self.device, case.dtype)
            self._outcomes[key] = parts, outcome  # holding `parts`, so that its id stays its own
        return self._outcomes[key][1]

    def of(self, case: Case, parts: Any = None) -> Standard:
        """Return the standard that the reference, or other parts, set on a case."""
        parts = self.reference if parts is None else parts
        yardstick = self.outcome(case, parts)
        key = id(case), id(parts)
        if key not in self._measured:
            self._measured[key] = Standard.measure(
                self.exercise, parts, case, self.device, yardstick
            )
        return self._measured[key]


def judge(
    exercise: Exercise,
    parts: Any,
    seed: int = PUBLIC_SEED,
    device: str = "cpu",
    standards: Standards | None = None,
) -> Verdict:
    """Judge an implementation of an exercise on cases drawn from a seed.

    Args:
        parts: an object whose attributes are the exercise's names.
        standards: those of the exercise, seed and device, to judge several implementations with.

    Raises:
        NothingJudged: the exercise has no case, or its reference fails on one.
    """
    standards = standards or Standards(exercise, seed, device)
    points = exercise.entry.points
    verdict = Verdict(
        exercise.id,
        "passed",
        points,
        points,
        device=standards.device,
        reference=exercise.reference_name,
    )
    if not standards.cases:
        raise NothingJudged(f"exercise {exercise.id} has no case to judge")
    judged: list[Judged] = []
    for case in standards.cases:
        _require_a_right_reference(standards, case)
        outcome = standards.outcome(case, parts)
        if _is_todo(exercise, outcome.error):
            verdict.status, verdict.points, verdict.cases = "todo", 0, []
            return verdict
        difference = _safe_difference(standards.of(case), outcome)
        judged.append(Judged(case, outcome, difference))
        message = difference.message if difference else ""
        verdict.cases.append(CaseResult(case.name, difference is None, message))
    failures = [one for one in judged if one.difference]
    for one in failures or judged:  # the worst error is that of a case that failed, if one did
        error, tolerance = one.errors(standards)
        _note_worst(verdict, error, tolerance)
    if failures:
        _explain(verdict, standards, judged)
    return verdict


@dataclass(frozen=True)
class Judged:
    """A case, what came of it, and how that differs from the reference."""

    case: Case
    outcome: Outcome
    difference: Difference | None

    def errors(self, standards: Standards) -> tuple[float, float]:
        """Return the largest error and its tolerance."""
        if self.difference is not None:
            return self.difference.error, self.difference.tolerance
        return standards.of(self.case).margin(self.outcome)


def _require_a_right_reference(standards: Standards, case: Case) -> None:
    error = standards.of(case).yardstick.error
    if error is not None:
        raise NothingJudged(
            f"the reference of exercise {standards.exercise.id} fails on case {case.name!r}"
        ) from error


def _safe_difference(standard: Standard, outcome: Outcome) -> Difference | None:
    """Compare; an output so odd that comparing it fails is a difference, never a pass."""
    try:
        return standard.difference(outcome)
    except (Exception, SystemExit) as error:
        return Difference(f"returned something that cannot be compared ({_name(error)})")


def _is_todo(exercise: Exercise, error: BaseException | None) -> bool:
    return isinstance(error, NotImplementedError) and str(error) == f"exercise {exercise.id}"


def _note_worst(verdict: Verdict, error: float, tolerance: float) -> None:
    if tolerance <= 0:
        return
    if (
        verdict.tolerance is None
        or verdict.worst_error is None
        or not (error / tolerance <= verdict.worst_error / verdict.tolerance)
    ):
        verdict.worst_error, verdict.tolerance = error, tolerance


def _explain(verdict: Verdict, standards: Standards, judged: list[Judged]) -> None:
    verdict.status, verdict.points = "failed", 0
    failures = [one for one in judged if one.difference]
    passes = [one for one in judged if not one.difference]
    misconception = recognize(standards, failures + passes)  # failures tell them apart sooner
    case, outcome, difference = failures[0].case, failures[0].outcome, failures[0].difference
    assert difference is not None
    if outcome.error is not None:
        verdict.frames = student_frames(outcome.error, standards.exercise.module)
    if misconception is not None:
        verdict.misconception = misconception.name
        verdict.diagnosis = misconception.explanation
    else:
        verdict.diagnosis = f"On the case '{case.name}' your part {_sentence(difference)}."
        verdict.diagnosis += advice(outcome.error, standards.exercise.module)


def _sentence(difference: Difference) -> str:
    message = difference.message
    if message.startswith(("raised", "returned", "changed", "called")):
        return message.rstrip(".")
    return "departs from the reference: " + message.rstrip(".")


def recognize(standards: Standards, judged: list[Judged]) -> Misconception | None:
    """Return the misconception whose outcomes equal the given ones on every case, if any."""
    for misconception in standards.exercise.misconceptions:
        wrong = standards.wrong(misconception)
        if all(_matches(standards, wrong, one) for one in judged):
            return misconception
    return None


def _matches(standards: Standards, wrong: Any, one: Judged) -> bool:
    known = standards.outcome(one.case, wrong)
    if one.outcome.changed != known.changed:
        return False
    try:
        if _identical(one.outcome.value, known.value) and one.outcome.error is known.error:
            return True  # no need of the truth in float64, which is half of the time
        standard = standards.of(one.case, wrong)
        return standard.difference(one.outcome, nan_allowed=True) is None
    except (Exception, SystemExit):
        return False


def student_frames(error: BaseException, module: str) -> str:
    """Return the lines of a traceback that lie in the student's module, newest last."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.replace("\\", "/").endswith(f"bertlab/{module}.py")
        or frame.filename.startswith("<exercise")
    ]
    lines = [f"line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames[-4:]]
    return "\n".join(lines)
