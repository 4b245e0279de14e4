"""What a worker process does: it keeps one grader, and grades a submission on an exercise.

A job is everything that a run's graders need, as plain data, so that a worker on another machine
needs this course and nothing else of the instructor's. The scheduler hands it to every worker that
comes; nothing of it enters a sandbox.
"""

import hashlib
import importlib.metadata
import json
import platform
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import WorkerPlugin, get_worker

from bertlab.course import outline
from bertlab.course.regions import stub_module

if TYPE_CHECKING:
    from bertlab.course.grading.grader import Grader

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
#: What decides how an exercise is judged, beside the tests and the solutions.
_JUDGES = (
    "course/judging.py",
    "course/exercise.py",
    "course/reference.py",
    "course/exercises/*.py",
    "course/grading/calls.py",
    "course/grading/grader.py",
    "course/grading/hidden.py",
    "course/grading/sandbox.py",
    "course/grading/slices.py",
    "course/grading/syscalls.py",
    "course/grading/wire.py",
    "course/grading/worker.py",
)


class OtherInstallation(RuntimeError):
    """A worker would judge otherwise than the machine that asked it."""


@dataclass(frozen=True)
class Job:
    """What a run's graders need.

    Attributes:
        tests: the hidden tests, path to bytes.
        given: the unfinished modules, name to text.
        solutions: the complete modules, name to text.
        settings: `run` (an id), `seed`, `device`, `time_limit` in seconds, `memory_limit` in GB,
            `unsafe`.
        installation: as `installation` says on the machine that asks.
    """

    tests: dict[str, bytes]
    given: dict[str, str]
    solutions: dict[str, str]
    settings: dict[str, Any]
    installation: dict[str, str]

    @property
    def name(self) -> str:
        """The same for the same job of the same run, and for no other."""
        return f"bertlab-grade-{_hash(repr(sorted(asdict(self).items())))}"


def make_job(root: Path, settings: dict[str, Any]) -> Job:
    """Gather the hidden tests and the solutions of the course at `root`.

    Raises:
        FileNotFoundError: they are not there: this is a student's copy.
    """
    tests, solutions = root / "tests" / "hidden", root / "solutions" / "bertlab"
    if not tests.is_dir() or not solutions.is_dir():
        raise FileNotFoundError(
            f"{root} has no tests/hidden/ or no solutions/: grading needs the authors' course"
        )
    complete = {path.stem: path.read_text("utf-8") for path in sorted(solutions.glob("*.py"))}
    return Job(
        tests=_files_below(tests),
        given={name: stub_module(text) for name, text in complete.items()},
        solutions=complete,
        settings=settings,
        installation=installation(),
    )


def course_hashes(job: Job) -> dict[str, str]:
    """What `gradebook` compares when a run is resumed."""
    return {
        "tests": _hash(repr(sorted(job.tests.items()))),
        "solutions": _hash(json.dumps(job.solutions, sort_keys=True)),
        "judging": job.installation["judging"],
    }


@cache
def installation() -> dict[str, str]:
    """Versions, and a hash of the files that judge: a worker's must equal the asker's."""
    folder = outline.COURSE_ROOT / "bertlab"
    paths = [path for pattern in _JUDGES for path in sorted(folder.glob(pattern))]
    judges = [path.read_text("utf-8") for path in [outline.COURSE_ROOT / "book.toml", *paths]]
    # 2.13.0+cpu and 2.13.0+cu130 are the same version, for other devices.
    versions = {name: importlib.metadata.version(name).split("+")[0] for name in _PACKAGES}
    return {"judging": _hash(repr(judges)), "python": platform.python_version(), **versions}


def _files_below(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path: path.relative_to(folder).as_posix() for path in paths}
    return {
        name: path.read_bytes()
        for path, name in names.items()
        if "__pycache__" not in name and not name.startswith(".")
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- in the worker's process ---


class GraderPlugin(WorkerPlugin):
    """Gives a worker the job, and ends its grader with it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.name = job.name

    def setup(self, worker: Any) -> None:
        folder = Path(worker.local_directory) / self.name  # removed with the worker's own files
        _DESKS[self.name] = Desk(self.job, folder)

    def teardown(self, worker: Any) -> None:
        desk = _DESKS.pop(self.name, None)
        if desk is not None:  # a task may be running: not in the worker's event loop
            threading.Thread(target=desk.close, daemon=True).start()


class Desk:
    """Where a worker process grades: one submission after the other, with one grader.

    Args:
        folder: where to lay out the tests and the complete package.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.folder = folder
        self._lock = threading.Lock()
        self._grader: Grader | None = None

    def level(self) -> str:
        """The sandbox level here; the grader is ready after this.

        Raises:
            OtherInstallation: this worker would judge otherwise.
            SandboxUnavailable: no sandbox works here, and none was not allowed.
        """
        with self._lock:
            return self._ready().level

    def grade(self, modules: dict[str, str], exercise_id: str, done: dict[str, bool]) -> Any:
        """Grade a submission on one exercise; raises as `level` does."""
        with self._lock:
            (result,) = self._ready().grade(modules, [exercise_id], done)
            return result.record()

    def close(self) -> None:
        """End the grader."""
        with self._lock:
            if self._grader is not None:
                self._grader.close()
            self._grader = None

    def _ready(self) -> "Grader":
        if self._grader is None:
            _compare(self.job.installation, installation())
            self._lay_out()
            self._grader = _grader(self.job, self.folder / "tests")
        return self._grader

    def _lay_out(self) -> None:
        """Write the tests, and make the complete package the one that is imported."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, data in self.job.tests.items():
            _write(self.folder / "tests" / name, data)
        for name, text in self.job.solutions.items():
            _write(self.folder / "complete" / "bertlab" / f"{name}.py", text.encode())
        use_complete_package(self.folder / "complete")


_DESKS: dict[str, Desk] = {}


def is_ready(name: str) -> bool:
    """True if this worker has the job."""
    return name in _DESKS


def level(name: str) -> str:
    """The sandbox level of this worker; raises as `Desk.level` does."""
    return _desk(name).level()


def grade(name: str, modules: dict[str, str], exercise_id: str, done: dict[str, bool]) -> Any:
    """Grade a submission on one exercise: the task that is scheduled."""
    return _desk(name).grade(modules, exercise_id, done)


def _desk(name: str) -> Desk:
    if name not in _DESKS:  # a worker's plugins are set up before its first task
        raise OtherInstallation(f"{get_worker().address} was not given the job")
    return _DESKS[name]


def _grader(job: Job, tests: Path) -> "Grader":
    """A grader at the best level that works here, its sandbox started."""
    from bertlab.course.grading import sandbox

    if sandbox.bubblewrap() is not None:
        grader = _grader_at("bubblewrap", job, tests)
        try:
            with grader.sandbox.session({}, {}, sandbox.Limits()):
                return grader
        except (sandbox.SessionFailed, OSError):
            grader.close()
    return _grader_at(sandbox.required_level(job.settings["unsafe"]), job, tests)


def _grader_at(level: str, job: Job, tests: Path) -> "Grader":
    from bertlab.course.grading.grader import Grader
    from bertlab.course.grading.sandbox import Limits

    settings = job.settings
    limits = Limits(settings["time_limit"], int(settings["memory_limit"] * 2**30))
    return Grader(
        tests, job.given, job.solutions, settings["seed"], level, limits, settings["device"]
    )


def use_complete_package(folder: Path) -> None:
    """Make ``import bertlab.attention`` and the like find the modules in ``folder/bertlab``."""
    from bertlab.course.package import Package
    from bertlab.course.workspace import Workspace

    package = Package(Workspace(folder))
    for exercise_id in outline.entries():
        package.use_own(exercise_id)
    package.install()


def _compare(asked: Mapping[str, str], here: Mapping[str, str]) -> None:
    other = [
        f"{key} {here.get(key)} instead of {value}"
        for key, value in asked.items()
        if here.get(key) != value
    ]
    if other:
        raise OtherInstallation(
            f"a worker on {platform.node()} would judge otherwise: it has {', '.join(other)}; "
            "install the same course and versions there"
        )


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
