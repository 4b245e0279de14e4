"""The folder GRADES: a journal of results that survives whatever happens to the run.

::

    run.json           settings, the secret seed, and on what they were used
    results.jsonl      the journal: a result a line, on the disk before the next one is asked for
    submissions.json   what was found and ignored, by student
    summary.json       points by student, as of some seconds ago

A result counts once its line is in the journal with its end of line. What was cut off (the machine
went down, the disk was full) is cut away when the run is resumed, and only that result is made
again. The other files are replaced in one step, so all can be read while the run goes on.
"""

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from bertlab.course.workspace import write_atomically

#: Results that say nothing of the student's work, so that a resumed run makes them anew.
RETRIED = frozenset({"lost"})
#: Seconds between two snapshots of the points; more where writing one takes long.
SNAPSHOT_EVERY = 10.0
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class GradebookError(RuntimeError):
    """The folder GRADES cannot be used as asked; says why and what to do."""


class DiskFull(GradebookError):
    """A result could not be kept; every one before it was."""


@dataclass(frozen=True)
class Mark:
    """What is kept in memory of a result."""

    status: str
    points: float
    max_points: int
    reason: str


@dataclass
class Gradebook:
    """The results of a run, open for more; make one with `opened`.

    Attributes:
        folder: the folder GRADES.
        run: what is in ``run.json``.
        marks: by student, the fingerprint of the submission and its results by exercise.
    """

    folder: Path
    run: dict[str, Any]
    marks: dict[str, tuple[str, dict[str, Mark]]] = field(default_factory=dict)
    submissions: dict[str, dict[str, Any]] = field(default_factory=dict)
    _descriptor: int = -1
    _snapshot_due: float = 0.0

    @property
    def journal(self) -> Path:
        return self.folder / "results.jsonl"

    def known(self, student: str, fingerprint: str) -> dict[str, Mark]:
        """The results of a submission that need not be made again, by exercise."""
        of, marks = self.marks.get(student, ("", {}))
        if of != fingerprint:
            return {}
        return {id: mark for id, mark in marks.items() if mark.reason not in RETRIED}

    def add(self, student: str, fingerprint: str, record: dict[str, Any]) -> None:
        """Keep a result: it is on the disk when this returns.

        Raises:
            DiskFull: there is no room for it.
            GradebookError: it cannot be written, or was there before.
        """
        if record["exercise"] in self.known(student, fingerprint):
            raise GradebookError(f"{student} has a result on {record['exercise']} already")
        line = {"student": student, "submission": fingerprint, **record}
        self._append(_line(line))
        self._note(line)
        if time.monotonic() > self._snapshot_due:
            self.snapshot()

    def note_submission(self, student: str, record: dict[str, Any]) -> None:
        """Note what was found of a student; it is written with the next snapshot."""
        self.submissions[student] = record

    def snapshot(self, state: str = "running") -> None:
        """Write the points of every student, and what was found.

        Args:
            state: `running`, `stopped` or `finished`.

        Raises:
            DiskFull: there is no room for it.
        """
        start = time.monotonic()
        students = {student: _total(marks) for student, (_, marks) in sorted(self.marks.items())}
        with _disk_trouble(self.folder):
            _write(self.folder / "submissions.json", dict(sorted(self.submissions.items())))
            _write(self.folder / "summary.json", {"state": state, "students": students})
        took = time.monotonic() - start
        self._snapshot_due = time.monotonic() + max(SNAPSHOT_EVERY, 20 * took)

    def update_run(self, **facts: Any) -> None:
        """Add facts to ``run.json``."""
        self.run.update(facts)
        with _disk_trouble(self.folder):
            _write(self.folder / "run.json", self.run)

    # --- the journal ---

    def _append(self, line: bytes) -> None:
        """Add a line and wait until it is on the disk; of a line that does not fit, nothing stays.

        Raises as `add` does.
        """
        size = os.fstat(self._descriptor).st_size
        try:
            with _disk_trouble(self.folder):
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
                os.fsync(self._descriptor)
        except GradebookError:
            os.ftruncate(self._descriptor, size)
            raise

    def _note(self, line: dict[str, Any]) -> None:
        student, fingerprint = line["student"], line["submission"]
        if self.marks.get(student, ("",))[0] != fingerprint:
            self.marks[student] = (fingerprint, {})
        mark = Mark(line["status"], line["points"], line["max_points"], line["reason"])
        self.marks[student][1][line["exercise"]] = mark

    def _load(self) -> None:
        """Read the journal, and cut away a last line that was not finished."""
        self._descriptor = os.open(self.journal, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        whole = 0
        for line in complete_lines(self.journal):
            whole += len(line)
            self._note(json.loads(line))
        os.ftruncate(self._descriptor, whole)
        os.fsync(self._descriptor)
        _flush_names(self.folder)
        self.submissions = read_object(self.folder / "submissions.json")


@contextmanager
def opened(
    folder: Path, wanted: dict[str, Any], defaults: dict[str, Any], resume: bool
) -> Iterator[Gradebook]:
    """Open a gradebook: a new one, or one to go on with.

    Args:
        folder: the folder GRADES; made if need be.
        wanted: the settings that were asked for; None for those that were not.
        defaults: what a new run takes where nothing was asked for.
        resume: go on if there is a run; a run that has not begun is begun.

    Raises:
        GradebookError: there is a run and `resume` is not set; it has other settings; another
            process is writing there; or the journal is damaged.
        DiskFull: there is no room to begin.
    """
    if folder.exists() and not folder.is_dir():
        raise GradebookError(f"--out {folder} is a file; name a folder")
    with _disk_trouble(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it holds the seed and the details
    with _locked(folder):
        for leftover in folder.glob(".*.new"):  # of a run that was killed
            leftover.unlink(missing_ok=True)
        book = Gradebook(folder, _settings(folder, wanted, defaults, resume))
        try:
            with _disk_trouble(folder):
                book.update_run()
                book._load()
            yield book
        finally:
            if book._descriptor >= 0:
                os.close(book._descriptor)


def places(journal: Path) -> dict[str, dict[str, int]]:
    """Where the results that count begin in a journal, by student and exercise.

    They are those of the submission of which a student has the latest result, and of each exercise
    the last one: who hands in anew is judged anew, and no older mark stays beside the new ones.

    Raises:
        GradebookError: the journal is damaged.
    """
    found: dict[str, dict[str, int]] = {}
    judged: dict[str, str] = {}
    place = 0
    for line in complete_lines(journal):
        record = json.loads(line)
        student = record["student"]
        if judged.get(student) != record["submission"]:
            judged[student], found[student] = record["submission"], {}
        found[student][record["exercise"]] = place
        place += len(line)
    return found


def results(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the results in a folder GRADES that count (see `places`), in the journal's order.

    Raises:
        GradebookError: the journal is damaged.
    """
    journal = folder / "results.jsonl"
    starts = sorted(start for of in places(journal).values() for start in of.values())
    if not starts:
        return
    with open(journal, "rb") as file:
        for start in starts:
            file.seek(start)
            yield json.loads(file.readline())


# --- settings ---


def _settings(
    folder: Path, wanted: dict[str, Any], defaults: dict[str, Any], resume: bool
) -> dict[str, Any]:
    """The settings of the run: those of the one that is there, or those of a new one."""
    begun = read_object(folder / "run.json")
    given = {name: value for name, value in wanted.items() if value is not None}
    if not begun:
        if (folder / "results.jsonl").exists():
            raise GradebookError(f"{folder} holds results but no run.json; name another folder")
        return {**defaults, **given, "begun": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    if not resume:
        raise GradebookError(
            f"{folder} holds a run already; go on with it with --resume, or name another folder"
        )
    for name, value in given.items():
        if name not in begun or begun[name] != value:
            raise GradebookError(_departure(name, begun.get(name), value))
    return begun


def _departure(name: str, begun: Any, value: Any) -> str:
    """Say that a resumed run would not be the same run."""
    what = name.replace("_", " ")
    if isinstance(value, dict):
        names = [key for key in value if begun is None or begun.get(key) != value[key]]
        pairs = [f"{key} {(begun or {}).get(key)} then, {value[key]} now" for key in names]
        change = f"other {what} ({', '.join(pairs)})"
    elif name == "seed" or "hash" in name:
        change = f"another {what}"
    else:
        change = f"{what} {begun}, not {value}"
    return (
        f"this run was begun with {change}, so that its results would not belong together; "
        "resume it as it was begun, or begin a new one in another folder"
    )


# --- files ---


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace") + b"\n"  # a lone surrogate becomes a question mark


def complete_lines(journal: Path) -> Iterator[bytes]:
    """The lines of a journal that were written to their end.

    Raises:
        GradebookError: one before the last is damaged.
    """
    if not journal.exists():
        return
    damaged = 0
    with open(journal, "rb") as file:
        for number, line in enumerate(file, start=1):
            if damaged:
                raise GradebookError(
                    f"line {damaged} of {journal} is damaged and is not the last; put it right, "
                    "or take it out to have this one result made again"
                )
            if line.endswith(b"\n") and _is_result(line):
                yield line
            else:
                damaged = number


def _is_result(line: bytes) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    wanted = {"student", "submission", "exercise", "status", "points", "max_points", "reason"}
    return isinstance(record, dict) and wanted <= set(record)


def _total(marks: dict[str, Mark]) -> dict[str, Any]:
    return {
        "points": round(sum(mark.points for mark in marks.values()), 2),
        "max_points": sum(mark.max_points for mark in marks.values()),
        "judged": len(marks),
    }


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of the folder; {} if there is no such file.

    Raises:
        GradebookError: it is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        raise GradebookError(f"{path} is damaged; name another folder") from None
    return found if isinstance(found, dict) else {}


def _flush_names(folder: Path) -> None:
    """Have the names of new files on the disk too, not only what is in them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=1) + "\n")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise GradebookError(f"another grading run is writing to {folder}") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _disk_trouble(folder: Path) -> Iterator[None]:
    """Say in words that the disk does not take what is written."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFull(
                f"the disk that holds {folder} is full. Every result so far is kept; make room "
                "and go on with --resume"
            ) from error
        raise GradebookError(f"cannot write to {folder}: {error.strerror or error}") from error
