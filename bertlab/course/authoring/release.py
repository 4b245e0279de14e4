"""``bertlab release``: make a student's copy of the course.

The copy is made from the sources, not from what lies in the author's working tree: stubs are
made anew, notebooks too. Only what is listed here is copied, so a forgotten file cannot leak.
"""

import json
import re
import shutil
from pathlib import Path

from bertlab.course import outline
from bertlab.course.authoring import chapters as sources
from bertlab.course.regions import stub_module
from bertlab.course.update import RECORD, handed_out
from bertlab.course.workspace import write_atomically

#: Files and folders of the root that a student's copy has as they are.
COPIED = (
    ".gitignore",
    "README.md",
    "BENCH.md",
    "LICENSE",
    "Makefile",
    "book.toml",
    "constraints.txt",
    "environment.yml",
    "pyproject.toml",
    "scripts",
    "bertlab/course",
    "tests/public",
)
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".ipynb_checkpoints", "pristine")


def release(root: Path, target: Path) -> None:
    """Write a student's copy of the course at `root` into the new folder `target`.

    Raises:
        FileExistsError: `target` exists and is not an empty folder.
        FileNotFoundError: `root` has no solutions to make a student's copy from.
    """
    if not (root / "solutions" / "bertlab").is_dir():
        raise FileNotFoundError(
            f"{root} has no solutions/; a student's copy is made from the authors' course"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not an empty folder; name a new one")
    for name in COPIED:
        _copy(root / name, target / name)
    for page in target.glob("*.md"):
        write_atomically(page, without_dead_links(page))
    for path in sorted((root / "solutions" / "bertlab").glob("*.py")):
        text = stub_module(path.read_text(encoding="utf-8"))
        write_atomically(target / "bertlab" / path.name, text)
        write_atomically(target / "bertlab" / "course" / "pristine" / path.name, text)
    for chapter in outline.chapters(root):
        node = sources.notebook(root, chapter, solved=False)
        write_atomically(target / "chapters" / f"{chapter.file}.ipynb", sources.written(node))
    write_atomically(target / "chapters" / "SUMMARY.md", sources.summary(outline.chapters(root)))
    record(target)


def record(target: Path) -> None:
    """Write down what was handed out, so that `bertlab update` knows what a student changed."""
    files = sorted(path for path in target.rglob("*") if path.is_file())
    text = json.dumps(handed_out(target, files), indent=1, sort_keys=True)
    write_atomically(target / RECORD, text + "\n")


def without_dead_links(page: Path) -> str:
    """Return a page's text without the lines that link to files which are not beside it."""
    links = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")  # a colon would make it a web address
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(
        line for line in lines if all((page.parent / link).exists() for link in links.findall(line))
    )


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=_IGNORED)
    elif source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
