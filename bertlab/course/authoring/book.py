"""``bertlab book``: the chapters as a website, made by mdBook.

mdBook reads ``book.toml`` and calls this module as its preprocessor: the book comes as JSON on
standard input and goes back on standard output, with every chapter turned from the student's
notebook into Markdown.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jupytext


def make(root: Path, arguments: list[str]) -> int:
    """Run mdBook on the course; returns its exit status."""
    programs = Path(sys.executable).parent  # of this environment, whatever PATH says
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [str(programs / "mdbook"), "build", *arguments, str(root)]
    return subprocess.run(command, env=environment, check=False).returncode


def preprocess(text: str) -> str:
    """Return mdBook's book with notebooks turned into Markdown, both as JSON.

    Args:
        text: ``[context, book]``, as mdBook writes it to a preprocessor.
    """
    _, book = json.loads(text)
    for item in book.get("items", book.get("sections", [])):
        chapter = item.get("Chapter") if isinstance(item, dict) else None
        if chapter and str(chapter.get("path", "")).endswith(".ipynb"):
            _turn_into_page(chapter)
    return json.dumps(book)


def _turn_into_page(chapter: dict[str, Any]) -> None:
    node = jupytext.reads(chapter["content"], fmt="ipynb")
    chapter["content"] = "\n\n".join(_shown(cell) for cell in node.cells)
    chapter["path"] = str(Path(chapter["path"]).with_suffix(".md"))


def _shown(cell: Any) -> str:
    return cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```"
