"""Type a text and see what BERT is given of it: chapter 1.

Everything goes through the package's own tokenizer (or its stand-in) on the real vocabulary.
"""

import unicodedata
from functools import lru_cache
from html import escape
from importlib import import_module
from typing import Any, NamedTuple

import ipywidgets

from bertlab.course.display import Shown
from bertlab.course.reference import vocabulary_file
from bertlab.course.widgets.view import View

EXAMPLE = "Zoë's ETFs fell; unhappiness, a snowman☃ and 北京!"
MOST = 150  # more pieces than this are counted, not drawn
BACKS = ("#dbe9f8", "#f8e6d0")  # of words in turn; the ink on them is always dark

_BOX = (
    "display:inline-block;margin:.2em .06em;padding:.1em .4em;text-align:center;"
    "vertical-align:top;color:#1f2328;"
)
_KNOWN = "border:1px solid #57606a;"
_UNKNOWN = "border:2px dashed #a40e26;background:#fff;"
_PLAIN = 'style="background:none;color:inherit;padding:0"'  # not JupyterLab's grey
_SMALL = '<br><span style="font-size:.8em">'


class Piece(NamedTuple):
    """One piece of a text: what the model gets, and what it stands for."""

    piece: str
    id: int
    start: int
    end: int
    source: str
    is_unknown: bool


def pieces_of(text: str, lowercase: bool = True) -> list[Piece]:
    """Return the pieces of a text, without [CLS] and [SEP].

    Args:
        text: any text.
        lowercase: what the uncased vocabulary was made for; False shows a wrong setting.

    Raises:
        ValueError: text has a lone surrogate.
    """
    kind = import_module("bertlab.tokenizer").WordPieceTokenizer  # the student's, or its stand-in
    tokenizer = _tokenizer(kind, lowercase)
    found = tokenizer(text, return_offsets=True)
    ids, spans = found["input_ids"][1:-1], found["offsets"][1:-1]
    return [
        Piece(name, id, start, end, text[start:end], id == tokenizer.unk_token_id)
        for name, id, (start, end) in zip(
            tokenizer.convert_ids_to_tokens(ids), ids, spans, strict=True
        )
    ]


@lru_cache(maxsize=2)
def _tokenizer(kind: Any, lowercase: bool) -> Any:
    return kind.from_vocab_file(vocabulary_file(), lowercase=lowercase)


def render(text: str, lowercase: bool = True) -> Shown:
    """Return the pieces as boxes, and as a table in plain text."""
    pieces = pieces_of(text, lowercase)
    unknown = sum(piece.is_unknown for piece in pieces)
    summary = (
        f"{_counted(len(text), 'character')}, {_counted(len(pieces), 'piece')}, "
        f"{unknown or 'none'} unknown"
    )
    words, boxes = 0, []
    for piece in pieces[:MOST]:
        words += not piece.piece.startswith("##")
        boxes.append(_box(piece, BACKS[words % 2]))
    left = len(pieces) - MOST
    more = f"<p>... and {left:,} more</p>" if left > 0 else ""
    html = (
        f'<div class="bertlab"><p><b>{summary}</b></p><div>{"".join(boxes)}</div>{more}'
        '<p class="soft">In each box: the piece, its id, and the characters of your text that it '
        "stands for, from (included) to (not included). Pieces that begin with ## go on with the "
        "word before. A dashed box with ✗ is unknown.</p></div>"
    )
    return Shown(
        html, "\n".join([summary, *_lines(pieces[:MOST])] + [f"... {left:,} more"] * (left > 0))
    )


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _box(piece: Piece, back: str) -> str:
    """One box; an unknown piece differs by its border, a sign and a word, not only by colour."""
    name = f"✗ unknown: {_visible(piece.source)}" if piece.is_unknown else piece.piece
    border = _UNKNOWN if piece.is_unknown else f"{_KNOWN}background:{back};"
    title = f"{piece.piece}, id {piece.id}, characters {piece.start} to {piece.end}"
    return (
        f'<span style="{_BOX}{border}" title="{escape(title)}"><code {_PLAIN}>{escape(name)}</code>'
        f"{_SMALL}{piece.id}</span>{_SMALL}{piece.start}–{piece.end}</span></span>"
    )


def _lines(pieces: list[Piece]) -> list[str]:
    """The pieces as lines of a table in plain text."""
    wide = max((len(piece.piece) for piece in pieces), default=0)
    return [
        f"{piece.piece:<{wide}}  {piece.id:>5}  {piece.start:>3} to {piece.end:<3}  "
        f"{_visible(piece.source)}{'  ✗ unknown' if piece.is_unknown else ''}"
        for piece in pieces
    ]


def _visible(text: str) -> str:
    """The text with characters that cannot be seen written as escapes."""
    hidden = ("Cc", "Cf", "Zl", "Zp", "Co", "Cn")
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in hidden else char
        for char in text
    )


def tokenizer_explorer(text: str = EXAMPLE) -> View:
    """Return the explorer, starting with a text."""
    return View(
        {
            "text": ipywidgets.Textarea(
                text,
                description="your text",
                continuous_update=True,
                rows=2,
                layout={"width": "46em", "max_width": "100%"},
            ),
            "lowercase": ipywidgets.Checkbox(
                True,
                description="lower case (as this vocabulary expects)",
                layout={"width": "46em", "max_width": "100%"},
            ),
        },
        render,
    )
