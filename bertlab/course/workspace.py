"""The student's files: reading and writing regions, their history, and the progress made.

Everything the course remembers lies below ``.bertlab/`` beside the package, in plain files::

    .bertlab/progress.json            what has been judged, and on which text
    .bertlab/history/3.1/0007.py      every text a region has had before it was replaced

Nothing a student wrote is ever lost: files are replaced in one step or not at all, and what a
region held before goes into the history first.
"""

import contextlib
import difflib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertlab.course import outline
from bertlab.course.regions import (
    Region,
    RegionError,
    find_region,
    find_regions,
    fingerprint,
    is_stub,
    lines_of,
    normalize_text,
    replace_region,
)


class WorkspaceError(RuntimeError):
    """A file of the student's could not be read or written; says which and what to do."""


class RegionChanged(WorkspaceError):
    """The region was changed outside the notebook since the notebook last wrote it."""

    def __init__(self, exercise_id: str, difference: str) -> None:
        super().__init__(f"exercise {exercise_id} was changed in the package since the last %%fill")
        self.exercise_id = exercise_id
        self.difference = difference


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write to `path` so that a reader sees the old file or the new one, never a part.

    Text is written as UTF-8, with the line ends that it has.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".new")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Workspace:
    """A folder with a ``bertlab/`` package that somebody fills in.

    Args:
        root: the folder that holds ``bertlab/``; the one this course runs from by default.
    """

    root: Path = outline.COURSE_ROOT

    def path(self, module: str) -> Path:
        """Return the file of a module."""
        return self.root / "bertlab" / f"{module}.py"

    def source(self, module: str) -> str:
        """Return the text of a module.

        Raises:
            WorkspaceError: the file cannot be read, or is not in UTF-8.
        """
        try:
            return self.path(module).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise WorkspaceError(f"cannot read bertlab/{module}.py: {error}") from error
        except UnicodeDecodeError as error:
            line = self.path(module).read_bytes()[: error.start].count(b"\n") + 1
            raise WorkspaceError(
                f"bertlab/{module}.py is not in UTF-8 (line {line}); open it in your editor and "
                "save it as UTF-8"
            ) from error

    def region(self, exercise_id: str) -> Region:
        """Return the region of an exercise as the file has it now.

        Raises:
            WorkspaceError: the file cannot be read, or has lost the comment lines around it.
        """
        module = _module(exercise_id)
        try:
            return find_region(self.source(module), exercise_id)
        except RegionError as error:
            raise WorkspaceError(
                f"in bertlab/{module}.py, {error}. Exercise {exercise_id} stands between the lines "
                f"'# --- exercise {exercise_id}: ... ---' and '# --- end of exercise "
                f"{exercise_id} ---': put them right, or start it anew with "
                f"`bertlab reset {exercise_id}` (the file as it is now goes into the history)"
            ) from error

    # --- writing ---

    def with_region(self, exercise_id: str, text: str) -> str:
        """Return the module's text as it would be with a region replaced."""
        self.region(exercise_id)  # says what to do if it cannot be found
        return replace_region(self.source(_module(exercise_id)), exercise_id, text)

    def fill(self, exercise_id: str, text: str, overwrite: bool = False) -> bool:
        """Write a text into a region, unless that would hide work done elsewhere.

        The text that was there goes into the history. Returns whether the file changed.

        Raises:
            RegionChanged: the region holds work that the notebook did not write.
            WorkspaceError: the file is read-only or cannot be written.
        """
        with self.locked():
            self._remove_leftovers()
            current = self.region(exercise_id).text
            text = normalize_text(text)
            if fingerprint(current) == fingerprint(text):
                self._remember_fill(exercise_id, text)
                return False
            if not overwrite and self._is_foreign(exercise_id, current):
                raise RegionChanged(exercise_id, _difference(current, text))
            self._check_writable(self.path(_module(exercise_id)))
            with self._saying(_module(exercise_id)):
                self._keep(exercise_id, current)
                changed = self.with_region(exercise_id, text)
                # Noted before and after: this process may be killed in between.
                self._remember(exercise_id, {"filling": fingerprint(text)})
                write_atomically(self.path(_module(exercise_id)), changed)
                self._remember_fill(exercise_id, text)
            return True

    def _remove_leftovers(self) -> None:
        """Remove what writers left that were killed; whoever holds the lock is the only one."""
        with contextlib.suppress(OSError):
            for folder in (self.root / "bertlab", self.root / ".bertlab"):
                for path in folder.glob(".*.new"):
                    path.unlink()

    @contextmanager
    def _saying(self, module: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WorkspaceError(
                f"cannot write bertlab/{module}.py ({error.strerror}); the file is as it was"
            ) from error

    def reset(self, exercise_id: str) -> bool:
        """Put the stub back into a region; the text goes into the history. True if it changed.

        Where the comment lines around it are damaged, the whole file goes into the history and
        is made anew, with the regions that can be found in it.
        """
        source = self.source(_module(exercise_id))
        try:
            find_region(source, exercise_id)
        except RegionError:
            self._restore(_module(exercise_id), source)
            return True
        return self.fill(exercise_id, pristine_region(exercise_id), overwrite=True)

    def _restore(self, module: str, source: str) -> None:
        restored, lost = _pristine(module), []
        for other in find_regions(restored):
            try:
                restored = replace_region(restored, other, find_region(source, other).text)
            except RegionError:
                lost.append(other)
        with self.locked(), self._saying(module):
            self._check_writable(self.path(module))
            for other in lost:
                self._keep(other, source)
            write_atomically(self.path(module), restored)
            for other in lost:
                self._remember_fill(other, pristine_region(other))

    def _is_foreign(self, exercise_id: str, current: str) -> bool:
        known = self.progress().get(exercise_id, {})
        if fingerprint(current) in (known.get("filled"), known.get("filling")):
            return False
        if "filled" in known:
            return True
        try:
            return not is_stub(current)
        except SyntaxError:
            return True

    def _check_writable(self, path: Path) -> None:
        if not path.stat().st_mode & 0o222 or not os.access(path, os.W_OK):
            raise WorkspaceError(
                f"bertlab/{path.name} is read-only, so nothing was written; make it writable "
                f"(chmod u+w bertlab/{path.name}) and run the cell again"
            )

    def _keep(self, exercise_id: str, text: str) -> Path:
        folder = self.root / ".bertlab" / "history" / exercise_id
        kept = self.history(exercise_id)
        if kept and kept[-1].read_text(encoding="utf-8") == text:
            return kept[-1]
        number = int(kept[-1].stem) + 1 if kept else 1
        path = folder / f"{number:04d}.py"
        write_atomically(path, text)
        return path

    def history(self, exercise_id: str) -> list[Path]:
        """Return the files with the earlier texts of a region, oldest first."""
        return sorted((self.root / ".bertlab" / "history" / exercise_id).glob("[0-9]*.py"))

    # --- progress ---

    def progress(self) -> dict[str, Any]:
        """Return what is remembered by exercise id; an unreadable file is set aside, not lost."""
        path = self.root / ".bertlab" / "progress.json"
        try:
            remembered = json.loads(path.read_text(encoding="utf-8"))
            remembered = remembered if isinstance(remembered, dict) else {}
            return {id: facts for id, facts in remembered.items() if isinstance(facts, dict)}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            if os.access(path.parent, os.W_OK):
                os.replace(path, path.with_suffix(".unreadable"))
            return {}

    def remember(self, exercise_id: str, **facts: Any) -> None:
        """Add facts to what is remembered of an exercise; silently not, if that is read-only."""
        try:
            with self.locked():
                self._remember(exercise_id, facts)
        except (OSError, WorkspaceError):
            return

    def _remember(self, exercise_id: str, facts: dict[str, Any]) -> None:
        remembered = self.progress()
        remembered.setdefault(exercise_id, {}).update(facts)
        text = json.dumps(dict(sorted(remembered.items())), indent=1, ensure_ascii=False)
        write_atomically(self.root / ".bertlab" / "progress.json", text + "\n")

    def _remember_fill(self, exercise_id: str, text: str) -> None:
        self._remember(exercise_id, {"filled": fingerprint(text)})

    def record(self, verdicts: list[Any]) -> None:
        """Remember verdicts, each with the fingerprint of the text that was judged."""
        for verdict in verdicts:
            self.remember(
                verdict.exercise,
                status=verdict.status,
                judged=fingerprint(self.region(verdict.exercise).text),
                cases=exercise_fingerprint(verdict.exercise),
            )

    def status(self, exercise_id: str) -> str:
        """Return passed, failed, error, todo or stale (judged, but on another text than now's)."""
        try:
            text = self.region(exercise_id).text
            if is_stub(text):
                return "todo"
        except (SyntaxError, ValueError, WorkspaceError):
            return "error"
        known = self.progress().get(exercise_id, {})
        if "status" not in known:
            return "stale"
        current = (fingerprint(text), exercise_fingerprint(exercise_id))
        judged = (known.get("judged"), known.get("cases"))
        return known["status"] if current == judged else "stale"

    def locked(self) -> Any:
        """Return a lock to hold, by ``with``, while files of the workspace are changed.

        Raises:
            WorkspaceError: the folder is not writable.
        """
        from filelock import FileLock

        folder = self.root / ".bertlab"
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise WorkspaceError(
                f"cannot create the folder .bertlab beside the package ({error.strerror}); "
                "the course folder must be writable to fill exercises in"
            ) from error
        return FileLock(folder / "lock", timeout=20)


def exercise_fingerprint(exercise_id: str) -> str:
    """Return a hash of the file that says how an exercise is judged: newer cases, stale verdict."""
    chapter = outline.entries()[exercise_id].chapter
    path = Path(__file__).parent / "exercises" / f"chapter_{chapter}.py"
    return fingerprint(path.read_text(encoding="utf-8")) if path.exists() else ""


def pristine_region(exercise_id: str) -> str:
    """Return the text of a region as the course hands it out: its stub."""
    return find_region(_pristine(_module(exercise_id)), exercise_id).text


def _pristine(module: str) -> str:
    return (Path(__file__).parent / "pristine" / f"{module}.py").read_text(encoding="utf-8")


def _module(exercise_id: str) -> str:
    return outline.entries()[exercise_id].module


def _difference(package: str, cell: str) -> str:
    lines = difflib.unified_diff(
        [line.rstrip("\n") for line in lines_of(package)],
        [line.rstrip("\n") for line in lines_of(cell)],
        "the package",
        "this cell",
        lineterm="",
        n=2,
    )
    return "\n".join(lines)
