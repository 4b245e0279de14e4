"""``bertlab build``: make everything that is derived, and say when something is out of step.

What is derived, and from what:

- ``bertlab/<module>.py`` and ``bertlab/course/pristine/<module>.py``: the stubs, from
  ``solutions/bertlab/<module>.py``;
- ``chapters/<chapter>.ipynb``: the student's notebooks, from ``solutions/chapters/*.md``;
- ``chapters/SUMMARY.md``: from ``book.toml``;
- ``solutions/chapters/<chapter>.ipynb``: the solved notebooks, executed.

``solutions/manifest.json`` holds the hash of each file as it was made, so a file that somebody
edited by hand is noticed, and never overwritten silently.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from bertlab.course import outline
from bertlab.course.authoring import chapters as sources
from bertlab.course.authoring.release import release
from bertlab.course.regions import stub_module
from bertlab.course.workspace import write_atomically

MANIFEST = "solutions/manifest.json"


class EditedByHand(RuntimeError):
    """A derived file was edited; building would lose the edit."""


@dataclass
class Report:
    """What a build made, or what a check found wrong."""

    made: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def derived_texts(root: Path) -> dict[str, str]:
    """Return every derived file that needs no execution: path below `root` to text."""
    texts: dict[str, str] = {}
    for path in sorted((root / "solutions" / "bertlab").glob("*.py")):
        text = stub_module(path.read_text(encoding="utf-8"))
        texts[f"bertlab/{path.name}"] = text
        texts[f"bertlab/course/pristine/{path.name}"] = text
    for chapter in outline.chapters(root):
        node = sources.notebook(root, chapter, solved=False)
        texts[f"chapters/{chapter.file}.ipynb"] = sources.written(node)
    texts["chapters/SUMMARY.md"] = sources.summary(outline.chapters(root))
    return texts


def build(
    root: Path,
    overwrite: bool = False,
    only: list[str] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Make what is derived and out of date; execute the solved notebooks that changed.

    Args:
        only: chapters to execute, by file name; all that are out of date by default.

    Raises:
        EditedByHand: a derived file was edited since it was made, and `overwrite` is false.
    """
    manifest, report = read_manifest(root), Report()
    texts = derived_texts(root)
    edited = [path for path in texts if _edited(root, path, texts[path], manifest)]
    if edited and not overwrite:
        raise EditedByHand(
            "edited by hand since it was made: " + ", ".join(edited) + ". Move the edit into its "
            "source below solutions/, or run `bertlab build --overwrite` to lose it"
        )
    for path, text in texts.items():
        if _text(root, path) != text:
            write_atomically(root / path, text)
            report.made.append(path)
        manifest[path] = _hash(text)
    for stale in set(manifest) - set(texts) - _solved_paths(root):
        del manifest[stale]
    _write_manifest(root, manifest)
    for chapter in outline.chapters(root):
        path = f"solutions/chapters/{chapter.file}.ipynb"
        if only is not None and chapter.file not in only:
            continue
        if only is None and not _solved_is_wrong(root, chapter, manifest):
            continue
        text = None if only else refreshed(root, chapter, manifest)
        if text is None:
            progress(f"executing {chapter.file} ...")
            text = executed(root, chapter)
        write_atomically(root / path, text)
        manifest[path] = _hash(text)
        manifest[f"{path}#source"] = sources.source_hash(root, chapter)
        _write_manifest(root, manifest)
        report.made.append(path)
    return report


def check(root: Path) -> Report:
    """Compare every derived file with what would be made, without writing anything."""
    manifest, report = read_manifest(root), Report()
    for path, text in derived_texts(root).items():
        present = _text(root, path)
        if present is None:
            report.wrong.append(f"{path} is missing")
        elif present != text:
            edited = manifest.get(path) != _hash(present)
            why = "was edited by hand" if edited else "is out of date"
            report.wrong.append(f"{path} {why}")
    for chapter in outline.chapters(root):
        wrong = _solved_is_wrong(root, chapter, manifest)
        if wrong:
            report.wrong.append(wrong)
    return report


def refreshed(root: Path, chapter: outline.Chapter, manifest: dict[str, str]) -> str | None:
    """Return the solved notebook with new prose and the stored outputs; None if code changed."""
    path = f"solutions/chapters/{chapter.file}.ipynb"
    text = _text(root, path)
    as_made = text is not None and manifest.get(path) == _hash(text)
    if not as_made or manifest.get(f"{path}#source") != sources.source_hash(root, chapter):
        return None
    made = sources.notebook(root, chapter, solved=True)
    node = sources.with_outputs_of(made, nbformat.reads(text, as_version=4))
    return None if node is None else sources.written(node)


def executed(root: Path, chapter: outline.Chapter) -> str:
    """Return the solved notebook of a chapter, executed as a student would who did all before."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "course"
        release(root, copy)
        solve_before(root, copy, chapter)
        node = sources.notebook(root, chapter, solved=True)
        return sources.written(sources.execute(node, copy / "chapters", copy))


def solve_before(root: Path, copy: Path, chapter: outline.Chapter) -> None:
    """Fill in the solutions of every chapter before this one, and record them as passed."""
    from bertlab.course.regions import find_regions
    from bertlab.course.workspace import Workspace, exercise_fingerprint, fingerprint

    workspace = Workspace(copy)
    for entry in outline.entries().values():
        if entry.chapter >= chapter.number:
            continue
        complete = (root / "solutions" / "bertlab" / f"{entry.module}.py").read_text("utf-8")
        text = find_regions(complete)[entry.id].text
        workspace.fill(entry.id, text)
        workspace.remember(
            entry.id,
            status="passed",
            judged=fingerprint(text),
            cases=exercise_fingerprint(entry.id),
        )


def complete_package(root: Path, folder: Path) -> Path:
    """Lay the complete package into `folder`: the course with the solutions filled in."""
    shutil.copytree(
        root / "bertlab", folder / "bertlab", ignore=shutil.ignore_patterns("__pycache__")
    )
    for path in (root / "solutions" / "bertlab").glob("*.py"):
        shutil.copy(path, folder / "bertlab" / path.name)
    shutil.copy(root / "book.toml", folder / "book.toml")
    return folder


# --- the manifest ---


def read_manifest(root: Path) -> dict[str, str]:
    """Return the hash of each derived file as it was made."""
    path = root / MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _write_manifest(root: Path, manifest: dict[str, str]) -> None:
    text = json.dumps(dict(sorted(manifest.items())), indent=1) + "\n"
    if _text(root, MANIFEST) != text:
        write_atomically(root / MANIFEST, text)


def _solved_paths(root: Path) -> set[str]:
    paths = {f"solutions/chapters/{chapter.file}.ipynb" for chapter in outline.chapters(root)}
    return paths | {f"{path}#source" for path in paths}


def _solved_is_wrong(root: Path, chapter: outline.Chapter, manifest: dict[str, str]) -> str:
    """Say what is wrong with a chapter's solved notebook; nothing if it is as it should be."""
    path = f"solutions/chapters/{chapter.file}.ipynb"
    text = _text(root, path)
    if text is None:
        return f"{path} is missing"
    if manifest.get(path) != _hash(text):
        return f"{path} was edited by hand"
    if manifest.get(f"{path}#source") != sources.source_hash(root, chapter):
        return f"{path} was executed on other code"
    made = sources.notebook(root, chapter, solved=True)
    stored = nbformat.reads(text, as_version=4)
    if _sources(made) != _sources(stored):
        return f"{path} is out of date"
    return ""


def _sources(node: nbformat.NotebookNode) -> list[tuple[str, str, str]]:
    return [(cell.id, cell.source, cell.metadata.get("alt", "")) for cell in node.cells]


def _edited(root: Path, path: str, text: str, manifest: dict[str, str]) -> bool:
    present = _text(root, path)
    return present is not None and present != text and manifest.get(path) != _hash(present)


def _text(root: Path, path: str) -> str | None:
    file = root / path
    return file.read_text(encoding="utf-8") if file.exists() else None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
