"""What the course shows: one look for cards and tables, as HTML and as plain text.

Everything shown has both forms. The plain text is the same on every machine: no times, no
addresses, no paths, rounded numbers. Colour never carries meaning alone: each status has a
word and a sign.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

SIGNS = {"passed": "✓", "failed": "✗", "error": "!", "todo": "○", "stale": "↻", "note": "i"}
WORDS = {
    "passed": "passed",
    "failed": "not yet",
    "error": "error",
    "todo": "to do",
    "stale": "changed since it was judged",
    "note": "",
}

_LOOK = (Path(__file__).parent / "look.css").read_text(encoding="utf-8")
#: The look of everything shown. Comments are left out of what notebooks store.
STYLE = "<style>\n{}</style>".format(re.sub(r"/\*.*?\*/\n", "", _LOOK, flags=re.DOTALL))


@dataclass(frozen=True)
class Shown:
    """Something to display, with an HTML form and a plain-text form."""

    html: str
    text: str

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": STYLE + self.html, "text/plain": self.text}

    def __repr__(self) -> str:
        return self.text


def card(
    status: str,
    title: str,
    paragraphs: Sequence[str] = (),
    code: str = "",
    items: Sequence[str] = (),
    soft: Sequence[str] = (),
    word: str | None = None,
) -> Shown:
    """Return a card: a status, a title, and what there is to say.

    Args:
        status: a key of `SIGNS`.
        paragraphs: plain text; backquotes mark code.
        code: lines shown as they are.
        items: a list, after the paragraphs.
        soft: closing remarks in small print.
    """
    word = WORDS[status] if word is None else word
    sign = f"{SIGNS[status]} {word}".strip()
    html = [f'<div class="bertlab card {status}"><div class="head"><b>{_inline(title)}</b>']
    html += [f'<span class="sign">{escape(sign)}</span></div>']
    html += [f"<p>{_inline(paragraph)}</p>" for paragraph in paragraphs]
    if items:
        html += ["<ul>", *(f"<li>{_inline(item)}</li>" for item in items), "</ul>"]
    if code:
        html += [f"<pre>{escape(code)}</pre>"]
    html += [f'<p class="soft">{_inline(line)}</p>' for line in soft]
    text = [f"{sign}: {title}" if word else title]
    text += [f"  {paragraph}" for paragraph in paragraphs]
    text += [f"  - {item}" for item in items]
    text += [f"  | {line}" for line in code.splitlines()]
    text += [f"  {line}" for line in soft]
    return Shown("".join(html) + "</div>", "\n".join(text))


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> Shown:
    """Return a table; numbers are right-aligned, everything is shown by `str`."""
    body = [[str(value) for value in row] for row in rows]
    right = [bool(body) and all(_is_number(row[i]) for row in body) for i in range(len(header))]
    html = ['<div class="bertlab">', f"<p><b>{_inline(caption)}</b></p>" if caption else ""]
    html += ["<table><thead><tr>", *(f"<th>{_inline(name)}</th>" for name in header)]
    html += ["</tr></thead><tbody>"]
    for row in body:
        cells = (
            f"<td{' class=number' if right[i] else ''}>{_inline(value)}</td>"
            for i, value in enumerate(row)
        )
        html += ["<tr>", *cells, "</tr>"]
    html += ["</tbody></table></div>"]
    widths = [max(len(line[i]) for line in [list(header), *body]) for i in range(len(header))]
    lines = [caption] if caption else []
    for line in [list(header), ["-" * width for width in widths], *body]:
        cells = [
            cell.rjust(width) if right[i] else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return Shown("".join(html), "\n".join(lines))


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "").replace("%", "").lstrip("-<> ").isdigit()


def _inline(text: str) -> str:
    """Escape text for HTML and turn backquoted stretches into code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))
