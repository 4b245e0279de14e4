"""The course's outline: chapters, exercises, points and minutes, read from ``book.toml``."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import bertlab

#: The folder that holds ``bertlab/``, ``chapters/`` and ``book.toml``.
COURSE_ROOT = Path(bertlab.__path__[0]).resolve().parent


class UnknownExercise(ValueError):
    """An exercise or chapter was asked for that the course does not have."""


@dataclass(frozen=True)
class Entry:
    """What ``book.toml`` says of one exercise.

    Attributes:
        targets: what is written, as ``"module.name"``; all in one region of one module.
        minutes: how long it takes a student, roughly.
        difficulty: ``"easy"``, ``"medium"`` or ``"hard"``.
    """

    id: str
    title: str
    targets: tuple[str, ...]
    points: int
    minutes: int
    difficulty: str

    @property
    def chapter(self) -> int:
        return int(self.id.split(".")[0])

    @property
    def module(self) -> str:
        """The module of the package that holds it, such as ``"attention"``."""
        return self.targets[0].split(".")[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that its region must define."""
        return tuple(target.split(".", 1)[1] for target in self.targets)


@dataclass(frozen=True)
class Chapter:
    """What ``book.toml`` says of one chapter."""

    number: int
    file: str
    title: str
    exercises: tuple[Entry, ...]

    @property
    def minutes(self) -> int:
        return sum(entry.minutes for entry in self.exercises)


@cache
def chapters(root: Path = COURSE_ROOT) -> tuple[Chapter, ...]:
    """Return the chapters in order."""
    with open(root / "book.toml", "rb") as file:
        table = tomllib.load(file)["preprocessor"]["bertlab"]["chapters"]
    return tuple(_chapter(number, row) for number, row in enumerate(table))


def _chapter(number: int, row: dict) -> Chapter:
    entries = tuple(
        Entry(**{**exercise, "targets": tuple(exercise["targets"])})
        for exercise in row["exercises"]
    )
    return Chapter(number, row["file"], row["title"], entries)


def entries() -> dict[str, Entry]:
    """Return every exercise of the course by its id, in order."""
    return {entry.id: entry for chapter in chapters() for entry in chapter.exercises}


def select(words: list[str] | tuple[str, ...]) -> list[str]:
    """Return the exercise ids that `words` name: ``"3.1"``, a chapter ``"3"``, or nothing for all.

    Raises:
        UnknownExercise: a word names neither an exercise nor a chapter.
    """
    known = entries()
    if not words:
        return list(known)
    chosen: list[str] = []
    for word in words:
        found = [id for id, entry in known.items() if word in (id, str(entry.chapter))]
        if not found:
            raise UnknownExercise(
                f"there is no exercise or chapter {word!r}; the course has the exercises "
                + ", ".join(known)
            )
        chosen += [id for id in found if id not in chosen]
    return chosen


def modules() -> tuple[str, ...]:
    """Return the modules of the package that hold exercises, in the course's order."""
    return tuple(dict.fromkeys(entry.module for entry in entries().values()))
