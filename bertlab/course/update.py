"""``bertlab update``: bring a student's copy to a newer release, and lose nothing.

For every file there are three versions: what was handed out, what the student has, and what the
newer release hands out. What the student did not touch is replaced. What the student wrote into
an exercise stays, word for word, in the newer file around it. Where both changed the same thing,
the student's work wins in exercises and notebooks' exercise cells, and the newer version
everywhere else; the file as it was is kept below ``.bertlab/before_update/``, and it is said.
"""

import difflib
import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertlab.course.regions import (
    RegionError,
    find_regions,
    fingerprint,
    normalize_text,
    replace_region,
    without_regions,
)
from bertlab.course.workspace import Workspace, WorkspaceError, write_atomically

#: Where a release says what it handed out.
RECORD = "bertlab/course/release.json"

_PRISTINE = "bertlab/course/pristine"


@dataclass(frozen=True)
class Conflict:
    """Something that the student and the newer release both changed.

    Attributes:
        what: the file, and the exercise if it is one.
        outcome: which version is in the file now, and where the other one is.
        difference: the lines that differ, as a unified diff; may be empty.
    """

    what: str
    outcome: str
    difference: str = ""


@dataclass
class Plan:
    """What an update would do; nothing is written before it is complete.

    Attributes:
        writes: the new text of each file, by path below the course.
        removed: files that the newer release no longer has, and that were not touched.
        kept: files of which the present version goes into the backup first.
        carried: exercises whose text was taken along.
        conflicts: what the student should look at.
    """

    writes: dict[str, bytes] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    conflicts: list[Conflict] = field(default_factory=list)


# --- what a release hands out ---


def handed_out(root: Path, files: Iterable[Path]) -> dict[str, Any]:
    """Return the hash of every file and of every notebook cell, as `RECORD` keeps them."""
    hashes, cells = {}, {}
    for path in files:
        name = path.relative_to(root).as_posix()
        content = path.read_bytes()
        hashes[name] = _hash(content)
        if path.suffix == ".ipynb":
            cells[name] = sorted({_hash_of_cell(cell) for cell in _cells(content)})
    return {"files": hashes, "cells": cells}


def _record(root: Path) -> dict[str, Any]:
    """What was handed out; nothing for a copy that does not say."""
    path = root / RECORD
    if not path.is_file():
        return {"files": {}, "cells": {}}
    return json.loads(path.read_text(encoding="utf-8"))


# --- planning ---


def plan(root: Path, newer: Path) -> Plan:
    """Return what bringing the copy at `root` to the release at `newer` would do.

    Raises:
        WorkspaceError: `newer` is no release, is this copy itself, or an exercise of the copy
            cannot be found in its module.
    """
    if not (newer / RECORD).is_file():
        raise WorkspaceError(
            f"{newer} is not a release of the course: it has no {RECORD}. Give the folder that "
            "your instructor made with `bertlab release`"
        )
    if newer.resolve() == root.resolve():
        raise WorkspaceError(f"{newer} is this copy itself; give the folder of the newer release")
    made, old, new = Plan(), _record(root), _record(newer)
    modules = [name for name in new["files"] if _is_module(newer, name)]
    notebooks = [name for name in new["files"] if name.endswith(".ipynb")]
    # What students write first: if the update is stopped, the rest still says what it was.
    for name in modules:
        _plan_module(made, root, newer, name)
    for name in notebooks:
        handed = {*old["cells"].get(name, []), *new["cells"][name]}
        _plan_notebook(made, root, newer, name, old["files"].get(name), handed)
    for name in sorted(set(new["files"]) - {*modules, *notebooks}):
        _plan_file(made, root, newer, name, old)
    for name in sorted(set(old["files"]) - set(new["files"]) - {RECORD}):
        _plan_removal(made, root, name, old)
    made.writes[RECORD] = (newer / RECORD).read_bytes()  # the last: until then, not updated
    return made


def _is_module(newer: Path, name: str) -> bool:
    return name.count("/") == 1 and (newer / _PRISTINE / Path(name).name).is_file()


def _plan_file(made: Plan, root: Path, newer: Path, name: str, old: dict[str, Any]) -> None:
    """A file that nobody is meant to edit: the newer one, with the student's kept if edited."""
    present, wanted = _bytes(root / name), (newer / name).read_bytes()
    if present == wanted:
        return
    made.writes[name] = wanted
    if present is not None and _hash(present) != old["files"].get(name):
        made.kept.append(name)
        difference = _difference(present, wanted, "yours", "newer")
        made.conflicts.append(
            Conflict(name, "the newer version is in place; yours is in the backup", difference)
        )


def _plan_removal(made: Plan, root: Path, name: str, old: dict[str, Any]) -> None:
    present = _bytes(root / name)
    if present is None:
        return
    if _hash(present) == old["files"][name]:
        made.removed.append(name)
    elif (root / _PRISTINE / Path(name).name).is_file() or name.endswith(".ipynb"):
        made.conflicts.append(Conflict(name, "the newer release no longer has it; yours stays"))
    else:
        made.kept.append(name)
        made.removed.append(name)
        made.conflicts.append(
            Conflict(name, "the newer release no longer has it; yours is in the backup")
        )


# --- modules: what was written into exercises ---


def _plan_module(made: Plan, root: Path, newer: Path, name: str) -> None:
    present, wanted = _bytes(root / name), (newer / name).read_bytes().decode()
    if present is None:
        made.writes[name] = wanted.encode()
        return
    mine = _module_text(present, name)
    base = _bytes(root / _PRISTINE / Path(name).name)
    handed = base.decode() if base is not None else wanted
    before, after, written = _regions(handed), _regions(wanted), _regions(mine, name)
    text = wanted
    for exercise_id, body in written.items():
        stubs = (before.get(exercise_id, ""), after.get(exercise_id, ""))
        if fingerprint(body) in map(fingerprint, stubs):
            continue  # still the stub
        if exercise_id not in after:
            made.kept.append(name)
            made.conflicts.append(
                Conflict(
                    f"{name}, exercise {exercise_id}",
                    "the newer release no longer has it; what you wrote is in the backup",
                )
            )
            continue
        text = replace_region(text, exercise_id, body)
        made.carried.append(exercise_id)
        _compare_stubs(made, name, exercise_id, before.get(exercise_id, ""), after[exercise_id])
    _compare_given(made, name, mine, handed, wanted)
    if text.encode() != present:
        made.writes[name] = text.encode()


def _module_text(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise WorkspaceError(
            f"{name} is not in UTF-8, so nothing was updated; save it as UTF-8 first"
        ) from error


def _regions(text: str, name: str = "") -> dict[str, str]:
    try:
        return {exercise_id: region.text for exercise_id, region in find_regions(text).items()}
    except RegionError as error:
        raise WorkspaceError(
            f"in {name}, {error}; nothing was updated. Put the comment lines around the exercise "
            "right first"
        ) from error


def _compare_stubs(made: Plan, name: str, exercise_id: str, before: str, after: str) -> None:
    """Say it if the task changed under what the student wrote."""
    if fingerprint(before) == fingerprint(after):
        return
    difference = _difference(
        normalize_text(before).encode(), normalize_text(after).encode(), "asked then", "asked now"
    )
    outcome = "what you wrote is in place; what is asked has changed, so look at the difference"
    made.conflicts.append(Conflict(f"{name}, exercise {exercise_id}", outcome, difference))


def _compare_given(made: Plan, name: str, mine: str, handed: str, wanted: str) -> None:
    """Say it if the student changed code that is given, outside of the exercises."""
    ours, theirs, new = (_squeezed(without_regions(text)) for text in (mine, handed, wanted))
    if ours in (theirs, new):
        return
    made.kept.append(name)
    difference = _difference(theirs.encode(), ours.encode(), "as handed out", "yours")
    outcome = "what you changed outside of the exercises is only in the backup now"
    made.conflicts.append(Conflict(f"{name}, given code", outcome, difference))


def _squeezed(text: str) -> str:
    """A text without empty lines, which stand for regions of any length."""
    return "".join(line + "\n" for line in text.splitlines() if line.strip())


# --- notebooks ---


def _plan_notebook(
    made: Plan, root: Path, newer: Path, name: str, old_hash: str | None, handed: set[str]
) -> None:
    """The newer notebook, with the student's exercise cells in place and other cells at its end.

    Args:
        old_hash: of the notebook as it was handed out.
        handed: hashes of the cells that either release hands out.
    """
    present, wanted = _bytes(root / name), (newer / name).read_bytes()
    if present is None or present == wanted or _hash(present) == old_hash:
        if present != wanted:
            made.writes[name] = wanted
        return
    made.kept.append(name)
    handed = {*handed, _hash_of_cell(_heading())}
    try:
        mine = [cell for cell in _cells(present) if _hash_of_cell(cell) not in handed]
    except (ValueError, KeyError):
        outcome = "yours cannot be read, so the newer version is in place and yours in the backup"
        made.conflicts.append(Conflict(name, outcome))
        made.writes[name] = wanted
        return
    node = json.loads(wanted)
    left = [cell for cell in mine if not _put_in_place(node["cells"], cell)]
    if left:
        node["cells"] += [_heading(), *_with_new_ids(left)]
        outcome = f"{len(left)} cells that you added or changed are at its end"
        made.conflicts.append(Conflict(name, outcome))
    made.writes[name] = (json.dumps(node, indent=1, ensure_ascii=False) + "\n").encode()


def _put_in_place(cells: list[dict[str, Any]], mine: dict[str, Any]) -> bool:
    """Put a student's exercise cell where the newer notebook has that exercise."""
    command = _source(mine).split("\n", 1)[0].strip()
    if not command.startswith("%%fill "):
        return False
    for place, cell in enumerate(cells):
        if _source(cell).split("\n", 1)[0].split()[:2] == command.split()[:2]:
            cells[place] = {**mine, "id": cell["id"]}
            return True
    return False


def _heading() -> dict[str, Any]:
    source = "## Your own cells\n\nFrom before the update; they stood elsewhere in this chapter."
    return {"cell_type": "markdown", "id": "own-cells", "metadata": {}, "source": source}


def _with_new_ids(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**cell, "id": f"own-{number}"} for number, cell in enumerate(cells, start=1)]


def _cells(content: bytes) -> list[dict[str, Any]]:
    return json.loads(content)["cells"]


def _source(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _hash_of_cell(cell: dict[str, Any]) -> str:
    return _hash(f"{cell['cell_type']}\0{_source(cell)}".encode())


# --- doing it ---


def update(root: Path, newer: Path) -> tuple[Plan, Path | None]:
    """Plan and carry out, with the copy locked; returns the plan and the folder of the backup."""
    with Workspace(root).locked():
        made = plan(root, newer)
        return made, apply(root, newer, made)


def apply(root: Path, newer: Path, made: Plan) -> Path | None:
    """Carry a plan out; returns the folder of the backup, if anything had to be kept.

    Files are kept first and written one by one, each whole or not at all. An update that was
    stopped is finished by running it again.

    Raises:
        WorkspaceError: a file cannot be written.
    """
    try:
        backup = _keep(root, sorted(set(made.kept)))
        for name, content in made.writes.items():
            write_atomically(root / name, content)
            (root / name).chmod((newer / name).stat().st_mode | 0o200)
        for name in made.removed:
            (root / name).unlink(missing_ok=True)
    except OSError as error:
        raise WorkspaceError(
            f"cannot write {error.filename} ({error.strerror}); nothing of yours is lost. Put that "
            "right and run `bertlab update` again"
        ) from error
    return backup


def _keep(root: Path, names: list[str]) -> Path | None:
    if not names:
        return None
    folder = root / ".bertlab" / "before_update"
    number = 1 + max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
    backup = folder / f"{number:03d}"
    for name in names:
        (backup / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, backup / name)
    return backup


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _difference(before: bytes, after: bytes, name: str, other: str) -> str:
    try:
        first, second = (content.decode("utf-8").splitlines() for content in (before, after))
    except UnicodeDecodeError:
        return "(not text)"
    return "\n".join(difflib.unified_diff(first, second, name, other, lineterm="", n=2))
