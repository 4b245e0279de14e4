"""What the course shows: one look for cards and tables, as HTML and as plain text.

Everything shown has both forms. The plain text is the same on every machine: no times, no
addresses, no paths, rounded numbers. Colour never carries meaning alone: each status has a
word and a sign.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
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

#: The one place where the look is defined. Variables fall back from JupyterLab's theme to
#: VS Code's and then to plain colours, so that cards can be read in light and dark. The class is
#: written twice where JupyterLab's own rule for tables (text to the right) would win otherwise.
STYLE = """<style>
.bertlab { --bl-text: var(--jp-ui-font-color0, var(--vscode-foreground, #1f2328));
  --bl-soft: var(--jp-ui-font-color1, var(--vscode-foreground, #424a53));
  --bl-back: var(--jp-layout-color1, var(--vscode-editor-background, #fff));
  --bl-line: var(--jp-border-color1, var(--vscode-panel-border, #c4c9d0));
  --bl-sign: #57606a; color: var(--bl-text); max-width: 46em;
  font: 14px/1.5 system-ui, sans-serif; }
.bertlab.card { border: 1px solid var(--bl-line); border-left: 5px solid var(--bl-sign);
  border-radius: 4px; padding: .55em .9em; margin: .4em 0; background: var(--bl-back); }
.bertlab.passed { --bl-sign: #1a7f37; } .bertlab.failed { --bl-sign: #bc4c00; }
.bertlab.error { --bl-sign: #cf222e; } .bertlab.stale { --bl-sign: #8250df; }
.bertlab .head { display: flex; gap: .6em; align-items: baseline; }
.bertlab .head b { flex: 1; }
.bertlab .sign { background: var(--bl-sign); color: #fff; border-radius: 3px; padding: 0 .45em;
  font-weight: 600; white-space: nowrap; }
.bertlab p { margin: .45em 0 0; } .bertlab ul { margin: .45em 0 0; padding-left: 1.2em; }
.bertlab .soft { color: var(--bl-soft); font-size: .93em; }
.bertlab pre, .bertlab code {
  font: 12.5px/1.45 var(--jp-code-font-family, ui-monospace, monospace); }
.bertlab pre { margin: .45em 0 0; padding: .45em .6em; overflow-x: auto; color: inherit;
  background: var(--jp-layout-color2, rgba(128,128,128,.12)); }
.bertlab table { border-collapse: collapse; margin: .5em 0 0; color: inherit; font-size: inherit; }
.bertlab.bertlab td, .bertlab.bertlab th { border-bottom: 1px solid var(--bl-line);
  padding: .22em .8em .22em 0; text-align: left; vertical-align: top; background: transparent; }
.bertlab th { font-weight: 600; } .bertlab .chip { white-space: nowrap; }
.bertlab.bertlab td.number { text-align: right; white-space: nowrap; }
</style>"""


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
