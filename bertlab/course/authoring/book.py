"""``bertlab book``: the chapters as a website, made by mdBook.

mdBook reads ``book.toml`` and calls this module as its preprocessor: the book comes as JSON on
standard input and goes back on standard output, with every chapter turned from a notebook into
Markdown (see ``pages``) and three pages more: what was settled, the exercises, the glossary.

mdBook copies every file beside the chapters to the site. `make` therefore gives it a folder that
was made for it, with the student's notebooks and the figures and nothing else. A bare
``mdbook build`` works too; its figures are inside the pages.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bertlab.course import outline
from bertlab.course.authoring import backmatter, pages
from bertlab.course.authoring import chapters as sources
from bertlab.course.workspace import write_atomically

#: The editions, each with the folder that it goes to.
EDITIONS = {"student": "site", "instructor": "site-instructor"}


class BookError(ValueError):
    """The book was asked for in a way that cannot be."""


# --- making it ---


def make(root: Path, edition: str = "student", arguments: tuple[str, ...] = ()) -> int:
    """Run mdBook on the course; returns its exit status.

    Args:
        edition: a key of `EDITIONS`; the instructor's shows the solutions.
        arguments: further options of ``mdbook build``, such as ``--dest-dir``.

    Raises:
        BookError: `edition` is none, or a student's copy was asked for the instructor's.
    """
    if edition not in EDITIONS:
        raise BookError(f"edition is {edition!r}, but must be one of {list(EDITIONS)}")
    if edition == "instructor" and not (root / "solutions").is_dir():
        raise BookError("this is a student's copy: it has no solutions for an instructor's edition")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lay_out(root, folder, edition)
        settings = {
            "MDBOOK_BOOK__SRC": str(folder),
            "MDBOOK_BUILD__BUILD_DIR": EDITIONS[edition],
            "MDBOOK_PREPROCESSOR__BERTLAB__EDITION": edition,
            "MDBOOK_PREPROCESSOR__BERTLAB__FIGURES": str(folder / "figures"),
        }
        if edition == "instructor":
            settings["MDBOOK_BOOK__TITLE"] = "bertlab: instructor's edition"
        programs = Path(sys.executable).parent  # of this environment, whatever PATH says
        path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"
        command = [str(programs / "mdbook"), "build", *arguments, str(root)]
        environment = {**os.environ, **settings, "PATH": path}
        return subprocess.run(command, env=environment, check=False).returncode


def lay_out(root: Path, folder: Path, edition: str) -> None:
    """Write what mdBook may copy: the table of contents and a notebook for each chapter.

    The student's notebooks are made anew, so what was written in the working tree stays there.
    """
    write_atomically(folder / "SUMMARY.md", sources.summary(outline.chapters(root)))
    for chapter in outline.chapters(root):
        target = folder / f"{chapter.file}.ipynb"
        if not (root / "solutions").is_dir():
            shutil.copy(root / "chapters" / target.name, target)
        elif edition == "instructor":
            shutil.copy(root / "solutions" / "chapters" / target.name, target)
        else:
            node = sources.notebook(root, chapter, solved=False)
            write_atomically(target, sources.written(node))


# --- mdBook's preprocessor ---


def preprocess(text: str) -> str:
    """Return mdBook's book with notebooks turned into pages, both as JSON.

    Args:
        text: ``[context, book]``, as mdBook writes it to a preprocessor.

    Raises:
        PageError: a page would be stale or tell a solution, or a file that mdBook would copy does.
    """
    context, book = json.loads(text)
    root, settings = Path(context["root"]).resolve(), _settings(context)
    edition = settings.get("edition", "student")
    folder = root / context["config"]["book"].get("src", "src")
    if edition == "student" and (root / "solutions").is_dir():
        refuse_leaks(root, folder)
    keep = _keep_in(Path(settings["figures"])) if "figures" in settings else _keep_inside
    files = {chapter.file: chapter for chapter in outline.chapters(root)}
    made: dict[str, pages.Page] = {}
    items = book["items"]
    for item in items:
        name = Path(item.get("Chapter", {}).get("path") or "").stem
        if name in files:
            made[name] = pages.chapter_page(root, files[name], edition == "instructor", keep)
            item["Chapter"].update(content=made[name].markdown, path=f"{name}.md", number=None)
    _warn_of_unnamed(made)
    items.insert(0, _item("Welcome", "index.md", backmatter.welcome(root)))
    items += [{"PartTitle": "To look things up"}, *_back_pages(root, made)]
    return json.dumps(book)


def refuse_leaks(root: Path, folder: Path) -> None:
    """See that no file that mdBook would copy to the site tells a line of a solution.

    Raises:
        PageError: one does, such as a notebook in which an author tried a solution.
    """
    telling = pages.telling_lines(root)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        text = path.read_text(encoding="utf-8", errors="ignore").replace('\\"', '"')
        told = next((line for line in telling if line in text), None)
        if told:
            raise pages.PageError(f"{path} would be copied to the site and tells {told!r}")


def _settings(context: dict[str, Any]) -> dict[str, Any]:
    return context["config"].get("preprocessor", {}).get("bertlab", {})


def _back_pages(root: Path, made: dict[str, pages.Page]) -> list[dict[str, Any]]:
    listed = [chapter for chapter in outline.chapters(root) if chapter.file in made]
    settled = {chapter: made[chapter.file].claims for chapter in listed}
    return [
        _item("What was measured", "claims.md", backmatter.claims_page(settled)),
        _item("All exercises", "exercises.md", backmatter.exercises_page(root)),
        _item("Glossary", "glossary.md", backmatter.glossary_page(root)),
    ]


def _item(name: str, path: str, content: str) -> dict[str, Any]:
    chapter = {
        "name": name,
        "content": content,
        "number": None,
        "sub_items": [],
        "path": path,
        "source_path": None,
        "parent_names": [],
    }
    return {"Chapter": chapter}


def _warn_of_unnamed(made: dict[str, pages.Page]) -> None:
    for page in made.values():
        for cell in page.unnamed:
            print(
                f"bertlab book: the figure of cell {cell} has no alternative text; give its cell "
                'alt="..." in the source, or a title by label(...)',
                file=sys.stderr,
            )


# --- figures ---


def _keep_in(folder: Path) -> pages.Keep:
    def keep(image: bytes, name: str) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(image)
        return f"{folder.name}/{name}"

    return keep


def _keep_inside(image: bytes, name: str) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()
