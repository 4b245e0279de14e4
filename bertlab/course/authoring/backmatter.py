"""The pages of the book that are no chapter: welcome, what was measured, exercises, glossary."""

import re
import tomllib
from html import escape
from pathlib import Path
from typing import NamedTuple

from bertlab.course import outline
from bertlab.course.authoring.claims import OUTCOMES, Claim
from bertlab.course.authoring.mathematics import with_mathml
from bertlab.course.authoring.pages import exercise_anchor

PAGES = Path(__file__).parent / "book_pages"


class Term(NamedTuple):
    """One entry of the glossary.

    Attributes:
        says: one or two sentences of Markdown.
        chapter: where it is explained.
    """

    term: str
    says: str
    chapter: int


def welcome(root: Path) -> str:
    """Return the first page: what the course is, and its chapters."""
    text = (PAGES / "welcome.md").read_text(encoding="utf-8")
    rows = ["| chapter | exercises | minutes of writing | points |", "| --- | ---: | ---: | ---: |"]
    rows += [
        f"| [{c.number} {c.title}]({c.file}.md) | {len(c.exercises)} | {c.minutes} "
        f"| {sum(entry.points for entry in c.exercises)} |"
        for c in outline.chapters(root)
    ]
    return text.replace("{{ chapters }}", "\n".join(rows))


def claims_page(settled: dict[outline.Chapter, list[Claim]]) -> str:
    """Return the page of claims: what is said, what came of it, and where it was measured."""
    parts = [(PAGES / "claims.md").read_text(encoding="utf-8").strip()]
    for chapter, found in settled.items():
        if not found:
            continue
        parts.append(f"## {chapter.number} {chapter.title}")
        rows = ["| it is said that | outcome | measured here | |", "| --- | --- | --- | --- |"]
        rows += [_claim_row(chapter, claim) for claim in found]
        parts += ['<div class="claims">', "\n".join(rows), "</div>"]
    return "\n\n".join(parts) + "\n"


def _claim_row(chapter: outline.Chapter, claim: Claim) -> str:
    said, measured = (
        with_mathml(text.replace("|", "\\|")) for text in (claim.said, claim.measured)
    )
    outcome = f"{OUTCOMES[claim.outcome]}\u00a0{claim.outcome}"
    address = f"{chapter.file}.html#{claim.anchor}"
    place = f'<a href="{address}" aria-label="where this was measured">where</a>'
    return f"| {said} | {outcome} | {measured} | {place} |"


def exercises_page(root: Path) -> str:
    """Return the index of exercises, with difficulty, time and points."""
    every = [entry for chapter in outline.chapters(root) for entry in chapter.exercises]
    parts = [
        "# All exercises",
        f"{len(every)} exercises, {sum(entry.points for entry in every)} points, about "
        f"{sum(entry.minutes for entry in every) / 60:.0f} hours of writing. `%hint` helps with "
        "each.",
    ]
    for chapter in outline.chapters(root):
        parts.append(f"## {chapter.number} {chapter.title}")
        rows = ["| exercise | you write | difficulty | minutes | points |"]
        rows.append("| --- | --- | --- | ---: | ---: |")
        rows += [_exercise_row(chapter, entry) for entry in chapter.exercises]
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _exercise_row(chapter: outline.Chapter, entry: outline.Entry) -> str:
    place = f"{chapter.file}.md#{exercise_anchor(entry.id)}"
    targets = ", ".join(f"`{target}`" for target in entry.targets)
    return (
        f"| [{entry.id} {entry.title}]({place}) | {targets} | {entry.difficulty} "
        f"| {entry.minutes} | {entry.points} |"
    )


def glossary() -> list[Term]:
    """Return the glossary's entries in alphabetical order, symbols first."""
    with open(PAGES / "glossary.toml", "rb") as file:
        terms = [Term(**row) for row in tomllib.load(file)["terms"]]
    return sorted(terms, key=lambda term: (not term.term.startswith("$"), _plain(term.term)))


def glossary_page(root: Path) -> str:
    """Return the glossary: each term with what it means and the chapter that explains it."""
    files = {chapter.number: chapter for chapter in outline.chapters(root)}
    lines = [(PAGES / "glossary.md").read_text(encoding="utf-8").strip(), "", "<dl>"]
    for term in glossary():
        chapter = files.get(term.chapter)
        place = ""
        if chapter:
            place = f' <a href="{chapter.file}.html">chapter {chapter.number}</a>'
        lines.append(
            f'<dt id="term-{_plain(term.term)}">{_marked(term.term)}</dt>'
            f"<dd>{_marked(term.says)}{place}</dd>"
        )
    return "\n".join([*lines, "</dl>"]) + "\n"


def _plain(term: str) -> str:
    """A term in small letters, digits and hyphens, for its place and its order."""
    return re.sub(r"[^a-z0-9]+", "-", term.lower()).strip("-")


def _marked(text: str) -> str:
    """Formulas and code of a text inside HTML, where Markdown is not read."""
    pieces = re.split(r"(`[^`]+`|\$[^$]+\$)", text)
    return "".join(
        f"<code>{escape(piece[1:-1])}</code>"
        if piece.startswith("`")
        else with_mathml(piece)
        if piece.startswith("$")
        else escape(piece, quote=False)
        for piece in pieces
    )
