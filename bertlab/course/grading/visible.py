"""What may be seen of the results: the one place where a record becomes something to show.

Pages and exports are made from `ShownStudent` and nothing else. Its fields are chosen one by one,
so that what is added to a record is not shown until someone decides that it may be: no detail, no
seed, no input, no expected value, no path.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from bertlab.course import display, outline
from bertlab.course.grading import gradebook

#: Each reason code in words, as a student reads it.
REASONS = {
    "": "",
    "wrong": "The answer differs from the reference.",
    "raised": "The code raised an exception.",
    "todo": "This is not written yet.",
    "missing": "The module cannot be imported, or the name is not in it.",
    "timeout": "The code took longer than is allowed.",
    "memory": "The code took more memory than is allowed.",
    "processes": "The code started more processes than are allowed.",
    "exit": "The program ended before it answered.",
    "signal": "The program crashed, or was ended by a signal.",
    "protocol": "What came back was not an answer.",
    "too_large": "The answer was larger than is allowed.",
    "lost": "The result was lost with the machine that made it; it will be made again.",
    "unreadable": "Nothing could be read of what was handed in.",
    "waiting": "This has not been judged yet.",
    "no_tests": "No hidden test was run. This is not your doing: ask your instructor.",
    "grader": "The hidden test itself failed. This is not your doing: ask your instructor.",
}
#: The codes that are the grader's fault, not the student's.
FAULTS = ("no_tests", "grader", "lost")

SIGNS = {**display.SIGNS, "partly": "◐", "skipped": "–", "waiting": "○"}
WORDS = {**display.WORDS, "partly": "in part", "skipped": "not judged", "waiting": "not judged yet"}
#: How a single hidden test went, in words.
TEST_WORDS = {**WORDS, "failed": "a wrong answer", "error": "no answer"}

#: Characters that XML 1.0 does not allow, the other control characters, and lone surrogates.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
#: Characters that turn the direction of what follows them: a name must not disguise another.
_TURNING = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")


# --- reading GRADES ---


@dataclass
class Grades:
    """A folder GRADES: where each student's results lie in its journal.

    Only places are kept, so that ten thousand students take little memory.

    Args:
        folder: the folder; results may be added to it meanwhile.

    Raises:
        FileNotFoundError: it holds no journal.
        GradebookError: the journal is damaged.
    """

    folder: Path
    places: dict[str, dict[str, int]] = field(default_factory=dict, init=False)
    submissions: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not self.journal.is_file():
            raise FileNotFoundError(f"no results.jsonl in {self.folder}: nothing is graded there")
        self.submissions = gradebook.read_object(self.folder / "submissions.json")
        self.places = {student: {} for student in self.submissions}
        self.places |= gradebook.places(self.journal)

    @property
    def journal(self) -> Path:
        return self.folder / "results.jsonl"

    @property
    def changed(self) -> datetime:
        """When the last result came."""
        return datetime.fromtimestamp(self.journal.stat().st_mtime, UTC)

    @property
    def exercises(self) -> list[str]:
        """What is judged in this run, in the course's order."""
        found = {id for places in self.places.values() for id in places}
        found.update(gradebook.read_object(self.folder / "run.json").get("exercises") or ())
        known = {id: index for index, id in enumerate(outline.entries())}
        return sorted(found, key=lambda id: (known.get(id, len(known)), id))

    def records(self) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
        """Each student and the last record of each exercise, by the student's id."""
        with open(self.journal, "rb") as file:
            for student, places in sorted(self.places.items()):
                records = {}
                for exercise_id, place in places.items():
                    file.seek(place)
                    records[exercise_id] = json.loads(file.readline())
                yield student, records

    def students(self) -> Iterator["ShownStudent"]:
        """What may be seen of each student's results."""
        exercise_ids = self.exercises
        for student, records in self.records():
            submission = self.submissions.get(student, {})
            yield shown_student(student, records, exercise_ids, submission)


# --- what is shown ---


@dataclass(frozen=True)
class ShownTest:
    """A hidden test as the student sees it: its name and, if it did not pass, its hint."""

    name: str
    hint: str
    status: str
    reason: str
    weight: float

    @property
    def sign(self) -> str:
        return SIGNS[self.status]

    @property
    def word(self) -> str:
        return TEST_WORDS[self.status]

    @property
    def said(self) -> str:
        """The reason in words."""
        return said(self.reason)


@dataclass(frozen=True)
class ShownExercise:
    """How a student did on one exercise; the status `waiting` says that it is not judged yet."""

    id: str
    title: str
    chapter: int
    status: str
    points: float
    max_points: float
    reason: str
    tests: tuple[ShownTest, ...]
    stand_ins: tuple[str, ...] = ()
    level: str = ""
    seconds: float = 0.0

    @property
    def look(self) -> str:
        """The status, or `partly` for a part of the points."""
        return "partly" if self.status != "passed" and self.points > 0 else self.status

    @property
    def sign(self) -> str:
        return SIGNS[self.look]

    @property
    def word(self) -> str:
        return WORDS[self.look]

    @property
    def said(self) -> str:
        """The reason in words."""
        return said(self.reason)


@dataclass(frozen=True)
class ShownStudent:
    """A student's results, in the order of the course.

    Attributes:
        id: as handed in; it may hold anything.
        name: the same, fit to be shown.
        file: a name for files: safe on every system, and no other student's.
        problem: why nothing could be read of what was handed in; "" if something was.
        ignored: what else was handed in, and what was wrong with it.
    """

    id: str
    exercises: tuple[ShownExercise, ...]
    problem: str = ""
    ignored: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return one_line(self.id) or "(no name)"

    @property
    def file(self) -> str:
        return file_name(self.id)

    @property
    def points(self) -> float:
        return total(exercise.points for exercise in self.exercises)

    @property
    def max_points(self) -> float:
        return total(exercise.max_points for exercise in self.exercises)

    @property
    def finished(self) -> bool:
        """True if every exercise has been judged."""
        waiting = [exercise for exercise in self.exercises if exercise.status == "waiting"]
        return bool(self.exercises) and not waiting

    @property
    def at_fault(self) -> bool:
        """True if a hidden test did not work, so that an instructor has to look."""
        return any(
            item.reason in FAULTS
            for exercise in self.exercises
            for item in (exercise, *exercise.tests)
        )

    def by_chapter(self) -> list[tuple[int, str, list[ShownExercise]]]:
        """Number, title and exercises of each chapter."""
        titles = {chapter.number: chapter.title for chapter in outline.chapters()}
        numbers = dict.fromkeys(exercise.chapter for exercise in self.exercises)
        return [
            (number, titles.get(number, ""), [e for e in self.exercises if e.chapter == number])
            for number in numbers
        ]


def shown_student(
    student: str,
    records: Mapping[str, dict[str, Any]],
    exercise_ids: Sequence[str],
    submission: Mapping[str, Any] | None = None,
) -> ShownStudent:
    """What may be seen of a student's records.

    Args:
        records: the student's, by exercise.
        exercise_ids: what is judged in this run; one without a record is shown as waiting.
        submission: what was found of the student.
    """
    found = submission or {}
    entries = outline.entries()
    shown = (_exercise(id, entries.get(id), records.get(id)) for id in exercise_ids)
    problem, ignored = one_line(found.get("problem", "")), map(one_line, found.get("ignored", ()))
    return ShownStudent(student, tuple(shown), problem, tuple(ignored))


def _exercise(
    exercise_id: str, entry: outline.Entry | None, record: dict[str, Any] | None
) -> ShownExercise:
    title = entry.title if entry else ""
    chapter = int(exercise_id.split(".")[0])
    if record is None:
        test = ShownTest("The exercise as a whole", "", "skipped", "waiting", 1.0)
        points = entry.points if entry else 0
        return ShownExercise(
            exercise_id, title, chapter, "waiting", 0.0, points, "waiting", (test,)
        )
    return ShownExercise(
        exercise_id,
        title,
        chapter,
        _status(record["status"]),
        record["points"],
        record["max_points"],
        one_line(record["reason"]),
        tuple(map(_test, record["tests"])) or (_whole(record),),
        tuple(map(one_line, record.get("stand_ins", ()))),
        one_line(record.get("level", "")),
        record.get("seconds", 0.0),
    )


def _test(record: dict[str, Any]) -> ShownTest:
    status = _status(record["status"])
    hint = "" if status == "passed" else one_line(record["hint"])
    name, reason = one_line(record["name"]), one_line(record["reason"])
    return ShownTest(name, hint, status, reason, record.get("weight", 1.0))


def _whole(record: dict[str, Any]) -> ShownTest:
    """What stands for the tests of an exercise that has none."""
    status, reason = _status(record["status"]), one_line(record["reason"])
    return ShownTest("The exercise as a whole", "", status, reason, 1.0)


def _status(status: str) -> str:
    return status if status in ("passed", "failed", "error", "skipped") else "error"


# --- text and numbers ---


def said(reason: str) -> str:
    """A reason code in words."""
    return REASONS.get(reason, f"There was no answer to judge ({reason}).")


def cleaned(text: str) -> str:
    """Text without the characters that XML or a screen cannot take."""
    return _TURNING.sub("", _FORBIDDEN.sub("", text))


@lru_cache(10_000)  # the names and hints of tests come once a student
def one_line(text: str, length: int = 500) -> str:
    """Text fit to be shown: cleaned, on one line, cut to a length."""
    line = " ".join(cleaned(text).split())
    return line if len(line) <= length else line[: length - 2] + " …"


def total(numbers: Iterable[float]) -> float:
    """A sum of points, to two digits."""
    return round(sum(numbers), 2)


def number(value: float) -> str:
    """A number of points as it is written: `2`, `1.5`, `0.33`."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


_PLAIN = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
_DEVICES = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?")
_MARKED = re.compile(r".*-[0-9a-f]{16}")


def file_name(student: str) -> str:
    """A name for a student's files: the id if it is a plain one, else what can be read of it and
    a mark that no other id has.

    Plain are small letters and digits with single dots, dashes and underscores between them. Two
    ids that differ in their case alone have different names on every file system.
    """
    plain = len(student) <= 60 and _PLAIN.fullmatch(student)
    if plain and not _DEVICES.fullmatch(student) and not _MARKED.fullmatch(student):
        return student
    readable = re.sub(r"[^a-z0-9]+", "-", student.lower()[:80]).strip("-")[:40] or "student"
    mark = hashlib.sha256(student.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{readable}-{mark}"


# --- files that are whole at every moment ---


def write_file(path: Path, pieces: Iterable[str], encoding: str = "utf-8") -> None:
    """Write a file that a reader finds old or new, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with open(part, "w", encoding=encoding, newline="") as file:
        file.writelines(pieces)
    os.replace(part, path)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which then takes the place of the one at `path`."""
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    shutil.rmtree(path, ignore_errors=True)
    os.replace(part, path)
