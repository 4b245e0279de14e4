"""Grade many submissions: on local workers or a cluster, with the same tasks.

A task is one student and one exercise. The next exercise of a student is asked for when the one
before is in the journal, so a run that is stopped at any moment goes on where it was, and a worker
that is lost costs the time of one task. No more students are read than the workers are busy with.
"""

import difflib
import logging
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from bertlab.course import outline
from bertlab.course.grading import gradebook, submissions
from bertlab.course.grading.gradebook import Gradebook
from bertlab.course.grading.submissions import Found, HandedIn

if TYPE_CHECKING:
    from bertlab.course.grading.jobs import Job

#: Dask's client and future: their types do not say that they wait here.
Client: TypeAlias = Any
Future: TypeAlias = Any
#: Seconds to wait for a scheduler, and for the first of its workers.
WAIT_FOR_SCHEDULER = 10
WAIT_FOR_WORKERS = 60
#: What a new run takes where nothing was asked for.
DEFAULTS = {"device": "cpu", "time_limit": 60.0, "memory_limit": 4.0, "unsafe": False}


class GradingStopped(RuntimeError):
    """The run cannot go on; says why. What was graded is kept."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        submissions: a folder or zip.
        grades: the folder GRADES.
        settings: `exercises`, `seed`, `device`, `time_limit`, `memory_limit`, `unsafe`; None
            where nothing was asked for.
        jobs: the number of local workers.
        resume: go on with the run in `grades`.
        students: grade these only; all if empty.
        scheduler: the address of a Dask scheduler; "" for local workers.
    """

    submissions: Path
    grades: Path
    settings: dict[str, Any] = field(default_factory=dict)
    jobs: int = 1
    resume: bool = False
    students: tuple[str, ...] = ()
    scheduler: str = ""


@dataclass
class Tally:
    """What came of a run: counts of results, and the students whose submission was unreadable."""

    total: int = 0
    known: int = 0
    made: int = 0
    lost: int = 0
    unreadable: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def run(request: Request) -> Tally:
    """Grade what is asked for; the results are in ``request.grades`` and stay if this raises.

    Raises:
        FileNotFoundError: there are no submissions, or no hidden tests.
        UnreadableSubmission: the whole of the submissions cannot be read.
        GradebookError: the folder GRADES cannot be used as asked, or the disk is full.
        GradingStopped: grading cannot begin or go on.
        KeyboardInterrupt: it was interrupted.
    """
    from bertlab.course.grading import jobs

    found, ignored = _chosen(request)
    given = jobs.make_job(outline.COURSE_ROOT, {})
    wanted = {
        **request.settings,
        "course": jobs.course_hashes(given),
        "versions": {k: v for k, v in given.installation.items() if k != "judging"},
    }
    with gradebook.opened(request.grades, wanted, _defaults(), request.resume) as book:
        settings = {name: book.run[name] for name in ("run", "seed", *DEFAULTS)}
        batch = Batch(book, replace(given, settings=settings), found, Tally(ignored=ignored))
        with _interruptible(), _said_at_the_end(book):
            batch.run(partial(workers, request))
        return batch.tally


def _chosen(request: Request) -> tuple[list[Found], list[str]]:
    if request.grades.resolve().is_relative_to(request.submissions.resolve()):
        raise gradebook.GradebookError(
            f"--out {request.grades} lies in the submissions, so it would be taken for one; name "
            "a folder elsewhere"
        )
    findings = submissions.find(request.submissions)
    if not findings.found:
        raise FileNotFoundError(f"no submissions in {request.submissions}")
    names = {found.student for found in findings.found}
    wanted = {submissions.student_id(student) for student in request.students} or names
    if unknown := sorted(wanted - names):
        near = difflib.get_close_matches(unknown[0], names, 1)
        hint = f"; is it {near[0]!r}?" if near else ""
        raise FileNotFoundError(f"no submission of {unknown[0]!r} in {request.submissions}{hint}")
    return [found for found in findings.found if found.student in wanted], findings.ignored


def _defaults() -> dict[str, Any]:
    import secrets

    drawn = {"run": secrets.token_hex(8), "seed": secrets.randbits(63)}
    return {**DEFAULTS, **drawn, "exercises": list(outline.entries())}


@contextmanager
def _said_at_the_end(book: Gradebook) -> Iterator[None]:
    """Note in ``summary.json`` how the run ended."""
    try:
        yield
    except gradebook.GradebookError:
        raise  # nothing can be written
    except BaseException:
        book.snapshot("stopped")
        raise
    book.snapshot("finished")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM stop the run as Ctrl-C does: batch systems send it before they kill."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --- workers ---


@contextmanager
def workers(request: Request) -> Iterator[Client]:
    """A client of the scheduler that was asked for, or of one with local workers.

    Raises:
        GradingStopped: there is no such scheduler, or it has no workers.
    """
    from distributed import Client as connect

    with ExitStack() as stack:
        if request.scheduler:
            try:
                client = stack.enter_context(connect(request.scheduler, timeout=WAIT_FOR_SCHEDULER))
            except (OSError, ValueError) as error:
                raise GradingStopped(f"no scheduler at {request.scheduler}: {error}") from None
            _wait_for_workers(client, request.scheduler)
        else:
            client = stack.enter_context(connect(stack.enter_context(_local(request.jobs))))
        yield client


@contextmanager
def _local(count: int) -> Iterator[Any]:
    """So many worker processes here; only those who know the run's own keys can talk to them."""
    import dask.config
    from distributed import LocalCluster, Security

    options: dict[str, Any] = {
        "n_workers": count,
        "threads_per_worker": 1,
        "memory_limit": 0,  # submissions have limits of their own
        "dashboard_address": "127.0.0.1:0",
        "security": Security.temporary(),
        "silence_logs": logging.CRITICAL,
    }
    no_pages = {f"distributed.{side}.http.routes": [] for side in ("scheduler", "worker")}
    with _workers_ignore_interrupts(), dask.config.set(no_pages):
        cluster = LocalCluster(**options)
    with cluster:
        yield cluster


@contextmanager
def _workers_ignore_interrupts() -> Iterator[None]:
    """Ctrl-C reaches every process of the terminal; processes started here leave it to us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _wait_for_workers(client: Client, address: str) -> None:
    try:
        client.wait_for_workers(1, timeout=WAIT_FOR_WORKERS)
    except TimeoutError:
        raise GradingStopped(
            f"the scheduler at {address} has no workers after {WAIT_FOR_WORKERS} s; start some: "
            f"dask worker {address} --nthreads 1 --nworkers N"
        ) from None


def prepare(client: Client, job: "Job", name: str) -> list[str]:
    """Give every worker the job, those that come later too; return the levels they grade at.

    Raises:
        GradingStopped: a worker cannot grade.
    """
    from bertlab.course.grading import jobs

    if not all(client.run(jobs.is_ready, name).values()):
        client.register_plugin(jobs.GraderPlugin(job))
    addresses = list(client.scheduler_info(n_workers=-1)["workers"])
    ready = [
        client.submit(jobs.level, name, workers=[address], pure=False) for address in addresses
    ]
    try:
        return sorted(set(client.gather(ready)))
    except Exception as error:
        raise GradingStopped(_unfit(error)) from error


def _unfit(error: BaseException) -> str:
    return f"a worker cannot grade: {error}" if str(error) else f"a worker cannot grade: {error!r}"


# --- the run ---


@dataclass
class Line:
    """A student whose exercises are being judged, one after the other."""

    student: str
    fingerprint: str
    modules: dict[str, str]
    left: deque[str]
    done: dict[str, bool]


class Batch:
    """A run: it reads students as workers become free, and keeps every result at once."""

    def __init__(self, book: Gradebook, job: "Job", found: list[Found], tally: Tally) -> None:
        self.book = book
        self.job = job
        self.name = job.name
        self.exercises: list[str] = book.run["exercises"]
        self.found = found
        self.tally = tally
        self.lines: dict[str, Line] = {}  # by the key of the task that is under way
        self.tally.total = len(found) * len(self.exercises)

    def run(self, connected: Any) -> None:
        """Grade everything that is left.

        Args:
            connected: makes a context with a client, which is asked for when there is work.

        Raises:
            GradingStopped: the scheduler is lost, or a worker cannot grade.
            GradebookError: a result cannot be kept.
        """
        from tqdm import tqdm

        shown = sys.stderr.isatty()
        with tqdm(
            total=self.tally.total,
            unit="result",
            desc="grading",
            smoothing=0.05,
            mininterval=0.5 if shown else 30,
        ) as self.bar:
            lines = self._lines()
            first = next(lines, None)
            if first is not None:
                with connected() as client:
                    self._serve(client, first, lines)

    def _serve(self, client: Client, first: Line, lines: Iterator[Line]) -> None:
        from distributed import as_completed

        levels = prepare(client, self.job, self.name)
        self.book.update_run(levels=sorted({*levels, *self.book.run.get("levels", [])}))
        pool = as_completed([self._asked(client, first)])
        try:
            self._fill(client, pool, lines)
            for future in pool:
                line = self.lines.pop(future.key)
                self._keep(line, self._record(line, future))
                if line.left:
                    pool.add(self._asked(client, line))
                else:
                    self._fill(client, pool, lines)
        finally:
            with suppress(Exception):  # the scheduler may be gone
                client.unregister_worker_plugin(self.name)

    def _fill(self, client: Client, pool: Any, lines: Iterator[Line]) -> None:
        """Read students until every worker has a task and another one waiting."""
        while len(self.lines) < 2 * max(1, len(client.scheduler_info(n_workers=-1)["workers"])):
            line = next(lines, None)
            if line is None:
                return
            pool.add(self._asked(client, line))

    def _asked(self, client: Client, line: Line) -> Future:
        """Ask for a student's next exercise."""
        from bertlab.course.grading import jobs

        future = client.submit(
            jobs.grade, self.name, line.modules, line.left[0], line.done, pure=False
        )
        self.lines[future.key] = line
        return future

    def _record(self, line: Line, future: Future) -> dict[str, Any]:
        """The result that a task gave; one that no worker could give is an error with 0 points."""
        from bertlab.course.grading.jobs import OtherInstallation
        from bertlab.course.grading.sandbox import SandboxUnavailable

        if future.status == "finished":
            return future.result()
        if future.status != "error":
            raise GradingStopped("the scheduler is gone; go on with --resume when it is back")
        error = future.exception()
        if isinstance(error, (OtherInstallation, SandboxUnavailable)):
            raise GradingStopped(_unfit(error))
        self.tally.lost += 1
        said = "".join(traceback.format_exception(error))
        return _without_judgement(line.left[0], "lost", said[-2000:])

    def _keep(self, line: Line, record: dict[str, Any]) -> None:
        """Write a result into the journal."""
        self.book.add(line.student, line.fingerprint, record)
        line.left.popleft()
        line.done[record["exercise"]] = record["status"] == "passed"
        self.tally.made += 1
        self.bar.update()

    # --- students ---

    def _lines(self) -> Iterator[Line]:
        """Read the submissions one by one; those with nothing left to judge are passed over."""
        for found in self.found:
            handed_in = submissions.read(found)
            self.book.note_submission(found.student, handed_in.record())
            line = self._line(handed_in)
            self.tally.known += len(self.exercises) - len(line.left)
            self.bar.update(len(self.exercises) - len(line.left))
            if handed_in.problem:
                self._keep_unreadable(line, handed_in.problem)
            if line.left:
                yield line

    def _line(self, handed_in: HandedIn) -> Line:
        known = self.book.known(handed_in.student, handed_in.fingerprint)
        return Line(
            handed_in.student,
            handed_in.fingerprint,
            handed_in.modules,
            left=deque(id for id in self.exercises if id not in known),
            done={id: known[id].status == "passed" for id in self.exercises if id in known},
        )

    def _keep_unreadable(self, line: Line, problem: str) -> None:
        self.tally.unreadable.append(f"{line.student}: {problem}")
        while line.left:
            self._keep(line, _without_judgement(line.left[0], "unreadable", problem))


def _without_judgement(exercise_id: str, reason: str, detail: str) -> dict[str, Any]:
    """The record of an exercise on which no hidden test could be run."""
    entry = outline.entries()[exercise_id]
    test = {"name": "The submission can be judged", "hint": "", "status": "error"}
    return {
        "exercise": exercise_id,
        "status": "error",
        "points": 0.0,
        "max_points": entry.points,
        "reason": reason,
        "tests": [{**test, "reason": reason, "detail": detail, "weight": 1.0}],
        "stand_ins": [],
        "level": "",
        "device": "",
        "seconds": 0.0,
    }
