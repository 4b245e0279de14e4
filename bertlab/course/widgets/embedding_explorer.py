"""The word vectors of a real BERT, and the three vectors that make a token's: chapter 2."""

from functools import cache
from html import escape
from typing import Any, NamedTuple

import ipywidgets
import torch.nn.functional as F
from torch import Tensor

from bertlab.course.display import Shown
from bertlab.course.reference import minilm_folder, vocabulary, vocabulary_file
from bertlab.course.widgets.view import View

NAMES = ("word", "position", "token_type")
BARS = ("first", "second", "third")  # classes of look.css
MOST_TOKENS = 24


class TokenNorms(NamedTuple):
    """How long the three vectors of one token are, and their sum."""

    piece: str
    word: float
    position: float
    token_type: float
    total: float


@cache
def tables() -> dict[str, Tensor]:
    """Return MiniLM's three embedding tables: `word`, `position` and `token_type`."""
    from safetensors import safe_open

    with safe_open(minilm_folder() / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(f"embeddings.{name}_embeddings.weight") for name in NAMES}


def nearest_pieces(piece: str, count: int = 10) -> list[tuple[str, float]]:
    """Return the pieces whose word vectors point most nearly the same way, with the cosine.

    Raises:
        ValueError: the vocabulary does not hold it as one piece; the message says its pieces.
    """
    known = vocabulary()
    if piece not in known:
        raise ValueError(_not_one_piece(piece))
    directions = _directions()
    likeness = directions @ directions[known[piece]]
    likeness[known[piece]] = -1
    best = likeness.topk(count)
    names = list(known)
    return [
        (names[index], value)
        for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def sentence_norms(sentence: str) -> list[TokenNorms]:
    """Return, for each token of a sentence, the lengths of its vectors and of their sum.

    Raises:
        ValueError: the sentence has more tokens than can be shown.
    """
    encoding = _tokenizer().encode(sentence)
    if len(encoding.ids) > MOST_TOKENS:
        raise ValueError(
            f"the sentence has {len(encoding.ids)} tokens; {MOST_TOKENS} fit here: shorten it"
        )
    word, position, token_type = (tables()[name] for name in NAMES)
    return [
        TokenNorms(
            piece,
            *(
                vector.norm().item()
                for vector in (
                    word[index],
                    position[place],
                    token_type[0],
                    word[index] + position[place] + token_type[0],
                )
            ),
        )
        for place, (piece, index) in enumerate(zip(encoding.tokens, encoding.ids, strict=True))
    ]


def render(piece: str, sentence: str) -> Shown:
    """Return the neighbors of a piece, and the vectors of a sentence as bars."""
    piece = piece.strip()
    neighbors = nearest_pieces(piece if piece in vocabulary() else piece.lower())
    norms = sentence_norms(sentence)
    html = [f"<p><b>Nearest to {escape(piece)}</b> among 30,522 word vectors (cosine)</p><table>"]
    html += [
        f"<tr><td>{escape(name)}</td><td style='min-width:14em'>{_bar(14 * cosine, BARS[0])}</td>"
        f"<td class=number>{cosine:.2f}</td></tr>"
        for name, cosine in neighbors
    ]
    html += ["</table><p><b>Lengths of the vectors that are added</b> for each token</p>"]
    legend = ", ".join(
        f"{_bar(1, look)} {name}"
        for look, name in zip(BARS, ("word", "position", "type"), strict=True)
    )
    html += [f"<table><tr><th>token</th><th>{legend}</th>"]
    html += ["<th>word</th><th>position</th><th>type</th><th>sum</th></tr>"]
    for token in norms:
        lengths = (token.word, token.position, token.token_type)
        bars = "".join(_bar(5 * n, look) for n, look in zip(lengths, BARS, strict=True))
        cells = "".join(f"<td class=number>{n:.2f}</td>" for n in (*lengths, token.total))
        html += [
            f"<tr><td>{escape(token.piece)}</td><td style='min-width:24em'>{bars}</td>{cells}</tr>"
        ]
    return Shown(
        f'<div class="bertlab">{"".join(html)}</table></div>', _text(piece, neighbors, norms)
    )


def embedding_explorer(piece: str = "king", sentence: str = "the dog bites the man") -> View:
    """Return the explorer, at a piece and a sentence."""
    wide: dict[str, Any] = {
        "style": {"description_width": "8em"},
        "layout": {"width": "34em"},
        "continuous_update": False,
    }
    return View(
        {
            "piece": ipywidgets.Text(piece, description="word or piece", **wide),
            "sentence": ipywidgets.Text(sentence, description="sentence", **wide),
        },
        render,
    )


def _bar(width: float, look: str) -> str:
    return f'<div class="bar {look}" style="width:{max(width, 0):.2f}em"></div>'


def _text(piece: str, neighbors: list[tuple[str, float]], norms: list[TokenNorms]) -> str:
    lines = [f"nearest to {piece}: "]
    lines[0] += ", ".join(f"{name} {cosine:.2f}" for name, cosine in neighbors)
    width = max(len(token.piece) for token in norms)
    lines += [f"{'length of':<{width}}  word  position  type   sum"]
    lines += [
        f"{token.piece:<{width}}  {token.word:.2f}      {token.position:.2f}  "
        f"{token.token_type:.2f}  {token.total:.2f}"
        for token in norms
    ]
    return "\n".join(lines)


@cache
def _directions() -> Tensor:
    return F.normalize(tables()["word"], dim=1)


@cache
def _tokenizer() -> Any:
    from tokenizers import BertWordPieceTokenizer

    return BertWordPieceTokenizer(str(vocabulary_file()), lowercase=True)


def _not_one_piece(text: str) -> str:
    if not text.strip():
        return "type a word, or a piece such as ##ing"
    pieces = " ".join(_tokenizer().encode(text, add_special_tokens=False).tokens)
    return f"{text!r} is not one piece of the vocabulary but {pieces}: type one of these"
