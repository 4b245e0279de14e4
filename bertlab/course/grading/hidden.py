"""What a hidden test gets: a submission to ask, and the reference to compare it with.

A test says what is to be done once, as a function of an implementation, and `Submission.agrees`
does it three times: with the student's part, with the reference, and with the reference in
float64. So a test needs no tolerance and no expected value.
"""

import builtins
import contextlib
import functools
import hashlib
import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from bertlab.course import exercise as exercises
from bertlab.course import judging, outline
from bertlab.course.exercise import Case, Exercise
from bertlab.course.grading import calls, wire
from bertlab.course.grading.sandbox import SessionFailed

CALLS = calls.__name__
#: Before the name of a class in an exercise's file that its probe uses: ``"chapter_6.Guesser"``.
HELPERS = "bertlab.course.exercises."
#: What a target begins with that is none of the submission's.
OUTSIDE = ("torch.", "random.", "bertlab.course.")
_numbers = itertools.count()


class StudentError(Exception):
    """The student's code raised an exception that is none of Python's own."""


def is_students(error: BaseException) -> bool:
    """True if an exception came out of the sandbox, and not of a hidden test itself."""
    return hasattr(error, "students_kind")


class Answering(Protocol):
    """Whoever answers a request: the sandbox, or the reference in this process."""

    def ask(self, request: dict[str, Any]) -> dict[str, Any]: ...


class Config(dict[str, Any]):
    """An argument that becomes `BertConfig(**fields)` where it arrives: `Config(hidden_size=8)`."""


class Part(NamedTuple):
    """An argument that becomes a part of the submission: `Part("encoder.BertModel")`."""

    target: str


@dataclass(frozen=True, eq=False)
class Kept:
    """An object in the student's process, such as a tokenizer or a model.

    It can be handed to other calls, and called itself.
    """

    owner: "Submission"
    number: int
    path: str = ""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the object and return its value."""
        return self.call("", *arguments, **options)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method: ``tokenizer.call("encode", text)``."""
        return self.owner._called(self._at(method), arguments, options)

    def make(self, method: str, *arguments: Any, **options: Any) -> "Kept":
        """Call a method, or with ``""`` the object itself, and keep what it returns."""
        return self.owner._keeping(
            "call", target=self._at(method), arguments=list(arguments), options=options
        )

    def gradients(
        self, *arguments: Any, of: str = "", cotangent: Any = None, **options: Any
    ) -> dict[str, Tensor]:
        """Call the module; return the gradients of its output, as `Submission.gradients` does."""
        return self.owner._gradients(self._at(""), arguments, options, of, cotangent)

    def get(self, path: str) -> Any:
        """What stands under a path: ``model.get("mlm_head.decoder.weight")``."""
        return self.owner._asked("get", target=self._at(path))

    def put(self, path: str, value: Any) -> None:
        """Put something there."""
        self.owner._asked("put", target=self._at(path), value=value)

    def part(self, path: str) -> "Kept":
        """The object under a path, as an argument of other calls."""
        return Kept(self.owner, self.number, f"{self.path}.{path}".strip("."))

    def is_same(self, other: "Kept") -> bool:
        """Whether both are one object."""
        return bool(self.owner._asked("same", first=self._at(""), second=other._at("")))

    def load(self, state: dict[str, Tensor], train: bool = False) -> "Kept":
        """Give the module these parameters, and put it into evaluation or training mode."""
        self.owner._asked("load", target=self._at(""), state=state, train=train)
        return self

    def parameters(self) -> dict[str, Tensor]:
        """The module's parameters by name, a tied one once."""
        return self.owner._asked("parameters", target=self._at(""))

    def files(self, path: str = "") -> dict[str, bytes]:
        """The files in the folder that `Submission.folder` made, of the kinds that are only read.

        Raises:
            AssertionError: a name leads out of the folder, or a file is not bytes.
        """
        found = self.owner._asked("read", target=[self.number, path])
        assert isinstance(found, dict), "the folder cannot be read"
        for name, content in found.items():
            assert re.fullmatch(r"[\w-][\w.-]{0,99}", str(name)), f"{name!r} is no name of a file"
            assert isinstance(content, Tensor) and content.dtype == torch.uint8, "is not bytes"
        known = (".json", ".txt", ".safetensors")  # never a pickle
        return {n: found[n].numpy().tobytes() for n in found if str(n).endswith(known)}

    def _at(self, path: str) -> list[Any]:
        return [self.number, f"{self.path}.{path}".strip(".")]


class Submission:
    """A submission in its sandbox, as a hidden test sees it.

    Attributes:
        exercise_id: the exercise that is being judged.
        seed: the secret seed.
        truths: what is known about the reference.
    """

    def __init__(
        self, session: Answering, exercise_id: str, seed: int, truths: "Truths | None" = None
    ) -> None:
        self.session = session
        self.exercise_id = exercise_id
        self.seed = seed
        self.truths = truths or Truths()
        self._test = ""
        self._compared = 0  # by the test that is running
        self._kept: list[int] = []

    def begin(self, test: str) -> None:
        """Begin a hidden test; what the one before kept is let go."""
        with contextlib.suppress(SessionFailed):
            self.forget()
        self._test, self._compared = test, 0

    # --- asking ---

    def call(self, target: str, *arguments: Any, **options: Any) -> Any:
        """Call a function and return its value: ``submission.call("attention.split_heads", x, 4)``.

        Raises:
            AssertionError: it changed an argument in place.
            Exception: what the student's code raised, if it is one of Python's own.
            StudentError: it raised another.
            SessionFailed: there was no answer.
        """
        return self._called(target, arguments, options)

    def forward(
        self,
        target: str,
        config: dict[str, Any],
        state: dict[str, Any],
        *arguments: Any,
        train: bool = False,
        **options: Any,
    ) -> Any:
        """Build a module with `BertConfig(**config)`, give it the parameters `state`, and call it.

        A dataclass that it returns arrives as a dict. Raises as `call` does.
        """
        return self._asked(
            "forward",
            target=target,
            config=config,
            state=state,
            train=train,
            arguments=list(arguments),
            options=options,
        )

    def gradients(
        self, target: str, *arguments: Any, of: str = "", cotangent: Any = None, **options: Any
    ) -> dict[str, Tensor]:
        """Call a function, and return the gradients with respect to its tensors, by their place.

        Args:
            of: the path of the output that is looked at, where there are several: ``"0"``.
            cotangent: what that output is multiplied with before it is summed up; 1 when None.
        """
        return self._gradients(target, arguments, options, of, cotangent)

    def make(self, target: str, *arguments: Any, **options: Any) -> Kept:
        """Call a class or function and keep what it returns.

        `target` may also be PyTorch's or Python's, such as ``"torch.nn.Embedding"`` or
        ``"random.Random"``, or what the exercise's probe uses (`HELPERS`).
        """
        return self._keeping("call", target=target, arguments=list(arguments), options=options)

    def witness(self, answer: Any = None, stop: int = 0) -> Kept:
        """Keep a callback or hook that notes its arguments: ``.get("calls")``.

        Args:
            answer: what it returns.
            stop: the number of the call that ends in an `InterruptedError`; 0 for none.
        """
        return self.make(f"{CALLS}.Witness", answer, stop)

    def folder(self, files: dict[str, bytes] | None = None) -> Kept:
        """Make a folder in the sandbox with these files; where it is handed on it is a path."""
        packed = {
            name: torch.frombuffer(bytearray(content), dtype=torch.uint8)
            for name, content in (files or {}).items()
        }
        return self._keeping("write", files=packed)

    def forget(self) -> None:
        """Let go of everything that was kept."""
        if self._kept:
            self._asked("forget", numbers=list(self._kept))
            self._kept.clear()

    # --- judging ---

    def agrees(
        self,
        experiment: Callable[..., Any],
        *inputs: Any,
        truth: Callable[..., Any] | None = None,
        dtype: str = "float32",
    ) -> None:
        """Assert that an experiment has the outcome that it must have.

        Args:
            experiment: called as ``experiment(implementation, *inputs)`` with the submission and
                with the reference, which are asked in the same way. It returns tensors or plain
                values, or a list or dict of these.
            inputs: floating-point tensors are cast: to `dtype`, and to float64 for the truth.
            truth: called as ``truth(*inputs)`` instead of the experiment on the reference.

        Raises:
            AssertionError: the submission's outcome departs by more than `judging.MULTIPLE` times
                the reference's own error, or is of another kind.
            Exception: what the student's code raised.
        """
        right = truth or functools.partial(experiment, self.truths.reference)
        self._compared += 1
        digest = hashlib.sha256(wire.packed(list(inputs))).digest()
        key = (self.seed, self._test, self._compared, digest)
        standard = self.truths.standard(key, lambda: self._standard(right, inputs, dtype))
        try:
            value = _named(experiment(self, *_cast(inputs, dtype)))
        except Exception as error:
            if is_students(error) or isinstance(error, (AssertionError, SessionFailed)):
                raise
            raise AssertionError(f"returned something that cannot be used: {error!r}") from None
        difference = judging._safe_difference(standard, judging.Outcome(value))
        assert difference is None, difference.message

    @contextlib.contextmanager
    def raises(self, kind: type[Exception], *mentions: Any) -> Iterator[None]:
        """Assert that what is called inside raises an error, whose message has some words.

        Raises:
            AssertionError: it raises nothing, another kind, or says too little.
        """
        found: Exception | None = None
        try:
            yield
        except Exception as error:
            found = error
        assert found is not None, f"raised nothing, expected {kind.__name__}"
        students_kind = getattr(found, "students_kind", NotImplementedError)
        if students_kind is NotImplementedError:  # to do, or not the student's
            raise found
        assert issubclass(students_kind, kind), f"raised {found!r}, expected {kind.__name__}"
        left_out = [word for word in mentions if str(word) not in str(found)]
        assert not left_out, f"the message {str(found)!r} does not mention {left_out}"

    def judge(self) -> None:
        """Compare with the reference on every case drawn from the secret seed.

        Raises:
            AssertionError: an output departs; the message says how.
            SessionFailed: there was no answer.
        """
        standards = self.truths.of(self.exercise_id, self.seed)
        assert standards.cases, f"exercise {self.exercise_id} has no case to judge"
        for case in standards.cases:
            outcome = self.outcome(standards.exercise, case, standards.device)
            difference = judging._safe_difference(_here(standards.of(case)), outcome)
            assert difference is None, f"case {case.name!r}: {difference.message}"

    def _standard(self, right: Callable[..., Any], inputs: Any, dtype: str) -> judging.Standard:
        """Run what is right twice: in float64, and as the submission will run."""
        case = Case("", {}, dtype=dtype)
        yardstick = judging.Outcome(_named(_sent(right(*_cast(inputs, dtype)), [])))
        if not judging._holds_floats(yardstick.value):
            return judging.Standard(case, yardstick, yardstick)
        with self.truths.exactly():
            truth = judging.Outcome(_named(_sent(right(*_cast(inputs, "float64")), [])))
        return judging.Standard(case, truth, yardstick)

    def outcome(self, exercise: Exercise, case: Case, device: str) -> judging.Outcome:
        """Run the exercise's probe on a case in the sandbox."""
        request = {
            "targets": list(exercise.entry.targets),
            "helper": exercise.probe.__module__,
            "function": exercise.probe.__name__,
            "inputs": judging._placed(case.inputs, "cpu", case.dtype),
            "device": device,
        }
        answer = self.session.ask(request)
        if "error" in answer:
            return judging.Outcome(error=raised(answer["error"]))
        return judging.Outcome(answer["value"], None, answer["changed"])

    # --- on the way to the sandbox ---

    def _called(self, target: Any, arguments: Any, options: dict[str, Any]) -> Any:
        return self._asked("call", target=target, arguments=list(arguments), options=options)

    def _gradients(
        self, target: Any, arguments: Any, options: dict[str, Any], of: str, cotangent: Any
    ) -> dict[str, Tensor]:
        return self._asked(
            "gradients",
            target=target,
            arguments=list(arguments),
            options=options,
            of=of,
            cotangent=cotangent,
        )

    def _keeping(self, function: str, **inputs: Any) -> Kept:
        number = next(_numbers)
        self._asked(function, **inputs, keep=number)
        self._kept.append(number)
        return Kept(self, number)

    def _asked(self, function: str, **inputs: Any) -> Any:
        targets: list[str] = []
        sent = {name: _sent(value, targets) for name, value in inputs.items()}
        if isinstance(sent.get("target"), str):
            sent["target"] = _name_of(sent["target"], targets)
        request = {
            "targets": targets,
            "helper": CALLS,
            "function": function,
            "inputs": sent,
            "device": self.truths.device,
        }
        answer = self.session.ask(request)
        if "error" in answer:
            raise raised(answer["error"])
        assert not answer["changed"], "changed an argument in place"
        return answer["value"]


def _name_of(target: str, targets: list[str]) -> str:
    """What a target is called where it arrives; `targets` collects those of the submission."""
    if target.startswith(OUTSIDE):
        return target
    targets.append(target)
    return target.split(".", 1)[1]


def _sent(value: Any, targets: list[str]) -> Any:
    """An argument as it travels."""
    if isinstance(value, Config):
        return (calls.MARK, "config", dict(value))
    if isinstance(value, Part):
        return (calls.MARK, "part", _name_of(value.target, targets))
    if isinstance(value, Kept):
        return (calls.MARK, "kept", [value.number, value.path])
    if isinstance(value, (list, tuple)):
        return type(value)(_sent(item, targets) for item in value)
    if isinstance(value, dict):
        return {_sent(key, targets): _sent(item, targets) for key, item in value.items()}
    if isinstance(value, np.generic):  # what a generator draws
        return value.item()
    if not isinstance(value, (str, bool, int, float, Tensor, torch.dtype, type(None))):
        raise TypeError(f"a hidden test cannot send a {type(value).__name__}: {value!r}")
    return value


def _cast(inputs: Any, dtype: str) -> list[Any]:
    return [judging._placed(value, "cpu", dtype) for value in inputs]


def _named(value: Any) -> Any:
    """Lists and tuples that hold tensors, numbers or dicts of these, as one dict of names."""
    if isinstance(value, (list, tuple)) and any(isinstance(x, _JUDGED_ALONE) for x in value):
        value = {str(place): item for place, item in enumerate(value)}
    if not isinstance(value, dict):
        return value
    flat: dict[str, Any] = {}
    for name, item in ((str(name), _named(item)) for name, item in value.items()):
        inner = item if isinstance(item, dict) else {"": item}
        flat |= {f"{name} {path}".rstrip(): leaf for path, leaf in inner.items()}
    return flat


_JUDGED_ALONE = (Tensor, float, dict, list, tuple)


def _here(standard: judging.Standard) -> judging.Standard:
    """A standard on the CPU, where what came out of the sandbox is."""
    truth, yardstick = (
        replace(outcome, value=wire.crossed(outcome.value))
        for outcome in (standard.truth, standard.yardstick)
    )
    return replace(standard, truth=truth, yardstick=yardstick)


# --- what the student's code raised ---


def raised(error: dict[str, str]) -> BaseException:
    """The exception that a description from the sandbox stands for."""
    name, message, exact = (error.get(key, "") for key in ("kind", "message", "exact"))
    kind = getattr(builtins, name, None)
    ends_a_loop = (StopIteration, StopAsyncIteration)  # in a hidden test it would end the test's
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind in ends_a_loop:
        kind = Exception
    made: BaseException = StudentError(f"{exact}: {message}")
    if exact == name == kind.__name__:
        with contextlib.suppress(Exception):
            made = kind(message)
    made.students_kind = kind  # type: ignore[attr-defined]  # the mark that `is_students` reads
    return made


# --- the reference ---


class Reference:
    """Answers as the sandbox does, with the reference's parts and in this process."""

    def __init__(self) -> None:
        self.dtype = torch.float32

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked.

        Raises:
            Exception: the reference cannot; the hidden test is at fault.
        """
        parts = SimpleNamespace()
        for target in request["targets"]:
            setattr(parts, target.split(".", 1)[1], right_part(target))
        function = getattr(importlib.import_module(request["helper"]), request["function"])
        inputs = _on(wire.crossed(request["inputs"]), request["device"])
        with judging._repeatable():
            torch.set_default_dtype(self.dtype)  # `_repeatable` puts it back
            value = function(parts, **inputs)
        return {"value": wire.crossed(value), "changed": None}


def _on(value: Any, device: str) -> Any:
    """Move the tensors of a value to the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_on(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _on(item, device) for key, item in value.items()}
    return value


@functools.cache
def right_part(target: str) -> Any:
    """The reference's part, or the complete package's where it is no exercise's."""
    for entry in outline.entries().values():
        if target in entry.targets:
            return exercises.load(entry.id).reference[target.split(".", 1)[1]]
    module, name = target.split(".", 1)
    return getattr(importlib.import_module(f"bertlab.{module}"), name)


@dataclass
class Truths:
    """The reference's outputs, computed once for a seed and shared by all submissions."""

    device: str = "cpu"
    _known: dict[tuple[str, int], judging.Standards] = field(default_factory=dict)
    _standards: dict[Any, judging.Standard] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._session = Reference()

    @functools.cached_property
    def reference(self) -> Submission:
        """The reference, to be asked as a submission is."""
        return Submission(self._session, "", 0, self)

    def of(self, exercise_id: str, seed: int) -> judging.Standards:
        """The standards of an exercise for a seed."""
        key = (exercise_id, seed)
        if key not in self._known:
            exercise = exercises.load(exercise_id)
            self._known[key] = judging.Standards(exercise, seed, self.device)
        return self._known[key]

    def standard(self, key: Any, measure: Callable[[], judging.Standard]) -> judging.Standard:
        """What an experiment is compared with; measured when it is asked for the first time."""
        if key not in self._standards:
            if len(self._standards) >= 2000:  # inputs that depend on what students return
                self._standards.clear()
            self._standards[key] = measure()
            self.reference.forget()
        return self._standards[key]

    @contextlib.contextmanager
    def exactly(self) -> Iterator[None]:
        """Let what the reference makes without an input be float64."""
        self._session.dtype = torch.float64
        try:
            yield
        finally:
            self._session.dtype = torch.float32
