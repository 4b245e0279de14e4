"""The exercise: the one concept on which everything in the course hangs.

A chapter's file in ``bertlab/course/exercises/`` lists its exercises. Each says what is right
(the reference, from the ecosystem), on what inputs that is looked at (the cases), how the part
is called (the probe), and what people get wrong (the misconceptions).
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bertlab.course import outline

if TYPE_CHECKING:
    import numpy

#: The names of an exercise and what stands behind them, such as
#: ``{"split_heads": function, "merge_heads": function}``.
Parts = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One input on which an implementation is looked at.

    Attributes:
        name: what is special about it, in a few words: ``"padding in the second text"``.
        inputs: what the probe receives by keyword: tensors, numbers, text, lists and dicts
            of these. Floating-point tensors are written in float32 and cast by the judge.
        positions: for outputs of this name, a boolean tensor of their leading shape that is
            True where they are compared (real tokens, not padding).
        dtype: the floating-point type in which the implementation runs.
    """

    name: str
    inputs: dict[str, Any]
    positions: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"


@dataclass(frozen=True)
class Misconception:
    """A wrong implementation that people really write.

    Attributes:
        name: a few words: ``"scores are not scaled"``.
        explanation: the paragraph a good teacher would say on seeing it.
        parts: the wrong versions, by name; names left out are taken from the reference.
    """

    name: str
    explanation: str
    parts: Parts


@dataclass(frozen=True)
class Exercise:
    """One thing the student writes, and how it is judged.

    Attributes:
        id: chapter and number, ``"3.1"``.
        reference: what is right, by name: each callable exactly as the student's part is.
        reference_name: the reference as a reader would look it up.
        cases: yields the cases for a random generator.
        probe: calls an implementation on a case's inputs and returns its outputs: a tensor or
            plain value, or a dict of these. It is given the parts as attributes of `part`.
        misconceptions: at least three.
        hints: three, each saying more than the one before.
    """

    id: str
    reference: Parts
    reference_name: str
    cases: Callable[["numpy.random.Generator"], Iterator[Case]]
    probe: Callable[..., Any]
    misconceptions: tuple[Misconception, ...]
    hints: tuple[str, str, str]

    def __post_init__(self) -> None:
        if set(self.reference) != set(self.names):
            raise ValueError(f"exercise {self.id}: the reference must give exactly {self.names}")
        for misconception in self.misconceptions:
            if not set(misconception.parts) <= set(self.names) or not misconception.parts:
                raise ValueError(f"exercise {self.id}: {misconception.name}: unknown part names")

    @property
    def module(self) -> str:
        """The module of the package that holds it, such as ``"attention"``."""
        return self.entry.module

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the region must define."""
        return self.entry.names

    @property
    def entry(self) -> outline.Entry:
        """Title, targets, points and minutes, from ``book.toml``."""
        return outline.entries()[self.id]

    def wrong(self, misconception: Misconception) -> SimpleNamespace:
        """Return the parts with one misconception put in the reference's place."""
        return SimpleNamespace(**{**self.reference, **misconception.parts})


def load(exercise_id: str) -> Exercise:
    """Return an exercise by its id.

    Raises:
        UnknownExercise: the course has no such exercise.
    """
    chapter = outline.entries()[outline.select([exercise_id])[0]].chapter
    for exercise in of_chapter(chapter):
        if exercise.id == exercise_id:
            return exercise
    raise outline.UnknownExercise(
        f"book.toml lists exercise {exercise_id}, but "
        f"bertlab/course/exercises/chapter_{chapter}.py does not define it"
    )


def of_chapter(number: int) -> tuple[Exercise, ...]:
    """Return the exercises that a chapter's file defines."""
    module = importlib.import_module(f"bertlab.course.exercises.chapter_{number}")
    return tuple(module.EXERCISES)
