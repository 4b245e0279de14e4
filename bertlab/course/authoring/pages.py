"""A chapter's notebook as a page of the book: Markdown with the outputs as HTML.

The page is made from two notebooks: the student's, which is made anew from its source and holds
stubs, and the solved one, of which only the outputs are read. So no solution can be in a cell;
and an output that shows a line of one is refused.
"""

import ast
import base64
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from bertlab.course import outline
from bertlab.course.authoring import chapters as sources
from bertlab.course.authoring import claims
from bertlab.course.authoring.mathematics import with_mathml
from bertlab.course.regions import find_regions, stub

#: Lines of a solution that are shorter may well stand elsewhere too: ``return x``.
_TELLING = 40

#: Takes an image's bytes and a name, returns the address to use in the page.
Keep = Callable[[bytes, str], str]


class PageError(RuntimeError):
    """A page that may not be made: it would be stale, or tell a solution."""


@dataclass(frozen=True)
class Page:
    """A chapter as it goes into the book.

    Attributes:
        markdown: with outputs and formulas as HTML.
        claims: what the chapter settles.
        unnamed: ids of the cells with a figure for which no alternative text was found.
    """

    markdown: str
    claims: list[claims.Claim]
    unnamed: list[str]


def chapter_page(root: Path, chapter: outline.Chapter, solved: bool, keep: Keep) -> Page:
    """Return a chapter's page.

    Args:
        root: the course. In a student's copy, the page shows the student's own notebook.
        solved: show solutions, for the instructor's edition.
        keep: stores a figure.

    Raises:
        PageError: the solved notebook is not of this source, or an output tells a solution.
    """
    cells = _cells(root, chapter, solved)
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    found = claims.claims_of(text, chapter.number)
    if (root / "solutions").is_dir():  # a student's notebook need not have been run
        claims.check_numbers(found, _everything_said(cells))
    exercises = {entry.id: entry for entry in chapter.exercises}
    shown, marks, unnamed = [], 0, []
    for cell in cells:
        if cell.cell_type == "markdown":
            shown.append(_prose(cell.source, chapter, marks))
            marks += claims.count_marks(cell.source)
            continue
        outputs = _outputs(cell, keep)
        unnamed += [cell.id] if _FIGURE_WITHOUT_NAME in outputs else []
        name = re.match(r"%%fill (\d+\.\d+)", cell.source)
        entry = exercises.get(name[1]) if name else None
        shown.append(_code(cell.source) if entry is None else _exercise(entry, cell.source))
        if outputs and (entry is None or solved):
            shown.append(outputs)
    shown.insert(1, _facts(chapter))
    return Page("\n\n".join(shown) + "\n", found, unnamed)


# --- where the cells come from ---


def _cells(root: Path, chapter: outline.Chapter, solved: bool) -> list[NotebookNode]:
    """The cells to show, with their outputs."""
    if not (root / "solutions").is_dir():
        return _read(root / "chapters" / f"{chapter.file}.ipynb")
    cells = sources.notebook(root, chapter, solved=solved).cells
    stored = _read(root / "solutions" / "chapters" / f"{chapter.file}.ipynb")
    complete = sources.notebook(root, chapter, solved=True).cells
    if [cell.source for cell in stored] != [cell.source for cell in complete]:
        raise PageError(f"solutions/chapters/{chapter.file}.ipynb is out of date: run `make build`")
    telling = set() if solved else telling_lines(root)
    for cell, other in zip(cells, stored, strict=True):
        if cell.cell_type == "code":
            cell.outputs = other.outputs
            _refuse_solution(cell, telling)
    return cells


def _read(path: Path) -> list[NotebookNode]:
    return nbformat.reads(path.read_text(encoding="utf-8"), as_version=4).cells


def telling_lines(root: Path) -> set[str]:
    """Return the lines that stand in solutions and in no stub: who has one, has been told."""
    found: set[str] = set()
    for path in sorted((root / "solutions" / "bertlab").glob("*.py")):
        for exercise_id, region in find_regions(path.read_text(encoding="utf-8")).items():
            found |= _lines(region.text) - _lines(stub(region.text, exercise_id))
    return found


def _lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= _TELLING}


def _refuse_solution(cell: NotebookNode, telling: set[str]) -> None:
    said = "" if cell.source.startswith("%%fill") else _said(cell)  # a fill's card is not shown
    told = [line for line in sorted(telling) if line in said]
    if told:
        raise PageError(f"an output of cell {cell.id} tells a line of a solution: {told[0]!r}")


def _everything_said(cells: list[NotebookNode]) -> str:
    return "\n".join(cell.source if cell.cell_type == "markdown" else _said(cell) for cell in cells)


def _said(cell: NotebookNode) -> str:
    """The outputs of a cell as plain text."""
    return "\n".join(
        output.get("text", "") or output.get("data", {}).get("text/plain", "")
        for output in cell.get("outputs", [])
    )


# --- what a page is made of ---


def _facts(chapter: outline.Chapter) -> str:
    """The lines below a chapter's title: how much there is, and how to get at it."""
    points = sum(entry.points for entry in chapter.exercises)
    number = len(chapter.exercises)
    address = f"http://localhost:8888/lab/tree/chapters/{chapter.file}.ipynb"
    return (
        '<div class="facts"><p>'
        f"{number} exercise{'' if number == 1 else 's'} · about {chapter.minutes} minutes of "
        f"writing · {points} points</p><p>"
        f"<b>Open this chapter in JupyterLab</b>: run <code>bertlab lab --chapter {chapter.number}"
        f'</code> in your course folder, or, if it is running already, <a href="{address}">'
        f'go there</a>. <a href="{chapter.file}.ipynb" download>Download the notebook</a></p></div>'
    )


def _exercise(entry: outline.Entry, source: str) -> str:
    """An exercise: what it is, then its cell."""
    head = (
        f'<p class="head"><b>Exercise {entry.id}: {escape(entry.title)}</b> '
        f"<span>{entry.difficulty}, about {entry.minutes} minutes, {entry.points} "
        f"point{'' if entry.points == 1 else 's'}; goes into "
        f"<code>bertlab/{entry.module}.py</code></span></p>"
    )
    opened = f'<div class="exercise" id="{exercise_anchor(entry.id)}">'
    return f"{opened}{head}\n\n{_code(source)}\n\n</div>"


def exercise_anchor(exercise_id: str) -> str:
    """Return the place of an exercise in its chapter's page: ``exercise-3-1``."""
    return "exercise-" + exercise_id.replace(".", "-")


def _prose(source: str, chapter: outline.Chapter, marks: int) -> str:
    text = claims.with_anchors(source, chapter.number, marks)
    text = re.sub(r"\]\(([\w-]+)\.ipynb(#[^)]*)?\)", _link_to_page, text)
    return with_mathml(text)


def _link_to_page(link: re.Match[str]) -> str:
    """A notebook's link to a chapter as a link to its page; mdBook writes anchors otherwise."""
    anchor = re.sub(r"[^\w#-]", "", (link[2] or "").lower())
    return f"]({link[1]}.md{anchor})"


def _code(source: str) -> str:
    longest = max((len(ticks) for ticks in re.findall(r"`{3,}", source)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}python\n{source}\n{fence}"


# --- outputs ---

_FIGURE_WITHOUT_NAME = "a figure without a name"


def _outputs(cell: NotebookNode, keep: Keep) -> str:
    """The outputs of a cell as HTML on one line, which Markdown leaves alone."""
    parts = [_output(cell, output, keep) for output in cell.get("outputs", [])]
    html = "".join(parts)
    # A blank line would end the HTML for Markdown; a line end as a reference does not.
    return html.replace("\n", "&#10;")


def _output(cell: NotebookNode, output: NotebookNode, keep: Keep) -> str:
    data: dict[str, Any] = output.get("data", {})
    if "text/html" in data:
        look = re.compile(r"<style>.*?</style>", re.DOTALL)  # the book's style sheet has it once
        return f'<div class="output">{look.sub("", data["text/html"]).strip()}</div>'
    if "image/png" in data:
        return _figure(cell, base64.b64decode(data["image/png"]), keep)
    if output.output_type == "error":
        text = f"{output.ename}: {output.evalue}"
    else:
        text = output.get("text", "") or data.get("text/plain", "")
    return f'<div class="output"><pre>{escape(text.rstrip())}</pre></div>' if text else ""


def _figure(cell: NotebookNode, image: bytes, keep: Keep) -> str:
    name = f"{cell.id}-{hashlib.sha256(image).hexdigest()[:8]}.png"
    width, height = (int.from_bytes(image[place : place + 4], "big") for place in (16, 20))
    return (
        f'<div class="output figure"><img src="{keep(image, name)}" width="{width}" '
        f'height="{height}" alt="{escape(alternative_text(cell))}"></div>'
    )


def alternative_text(cell: NotebookNode) -> str:
    """Return what stands for a cell's figure where it cannot be seen.

    It is what the cell's source says (``alt="..."`` beside ``python``), or else the titles and
    axes that the cell gives to ``label(axes, title, x, y)``, or the title it gives to a ``.plot``.
    """
    if cell.metadata.get("alt"):
        return str(cell.metadata["alt"])
    plots = dict.fromkeys(_plot(call) for call in _calls(cell.source))
    return "; ".join(filter(None, plots)) or _FIGURE_WITHOUT_NAME


def _calls(source: str) -> list[ast.Call]:
    code = "\n".join("" if line.startswith(("%", "!")) else line for line in source.splitlines())
    return [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]


def _plot(call: ast.Call) -> str:
    """What a call says about a plot; nothing if it is about something else."""
    if getattr(call.func, "id", "") == "label":
        title, *axes = (_text(argument) for argument in call.args[1:4])
    elif getattr(call.func, "attr", "") == "plot" and call.args:
        title, axes = _text(call.args[0]), []
    else:
        return ""
    over = " over ".join(filter(None, reversed(axes)))
    return f"plot: {title}" + (f" ({over})" if over else "") if title else ""


def _text(node: ast.expr) -> str:
    """What a text in the source says, on one line, with dots for what is filled in."""
    pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
    said = [str(p.value) if isinstance(p, ast.Constant) else "..." for p in pieces]
    return "" if said == ["..."] else " ".join("".join(said).split())
