"""Where the heads of a real BERT look, for any sentence: chapter 3."""

from functools import lru_cache
from html import escape
from typing import Any

import ipywidgets
import numpy as np

from bertlab.course.display import Shown
from bertlab.course.widgets.view import View

SENTENCE = "It returns a copy (not a view) of the array."
LAYERS, HEADS, MOST_TOKENS = 6, 12, 40

_CELL, _LETTER = 19, 7.2  # pixels: a square of the map, a letter of a label
_FAINT = 0.1  # weights below this get no arc


@lru_cache(maxsize=1)
def _model() -> tuple[Any, Any]:
    from tokenizers import Tokenizer

    from bertlab.course.reference import minilm, minilm_folder

    tokenizer = Tokenizer.from_file(str(minilm_folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer, minilm("eager")


@lru_cache(maxsize=64)
def attention_of(sentence: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Return a sentence's tokens and MiniLM's attention weights.

    Returns:
        `(tokens, weights)`: with `[CLS]` and `[SEP]`, and `[layers, heads, seq, seq]`, of which
        the last but one axis is the token that asks and the last the token it looks at.

    Raises:
        ValueError: the sentence is empty, or too long to be drawn.
    """
    import torch

    tokenizer, model = _model()
    encoding = tokenizer.encode(sentence)
    if not 2 < len(encoding.ids) <= MOST_TOKENS:
        raise ValueError(
            f"sentence has {len(encoding.ids) - 2} tokens; between 1 and {MOST_TOKENS - 2} "
            "can be drawn"
        )
    with torch.no_grad():
        layers = model(torch.tensor([encoding.ids]), output_attentions=True).attentions
    return tuple(encoding.tokens), torch.cat(layers).numpy()


def strongest(tokens: tuple[str, ...], weights: np.ndarray) -> list[tuple[str, str, float]]:
    """Return for each token which token it looks at most, and with what weight.

    Args:
        weights: one head's, `[seq, seq]`.
    """
    best = weights.argmax(axis=-1)
    return [
        (token, tokens[place], float(weights[row, place]))
        for row, (token, place) in enumerate(zip(tokens, best, strict=True))
    ]


def heat_map(tokens: tuple[str, ...], weights: np.ndarray) -> str:
    """Return an SVG: a square for each pair of tokens, the fuller the more it is looked at."""
    margin = _LETTER * max(map(len, tokens)) + 8
    side = _CELL * len(tokens)
    parts = [_opened(margin + side + 2, margin + side + 2, "heat map of the attention weights")]
    for place, token in enumerate(tokens):
        middle = margin + _CELL * (place + 0.5)
        parts += [
            f'<text x="{margin - 5:.0f}" y="{middle + 4:.0f}" text-anchor="end">{escape(token)}'
            "</text>",
            f'<text transform="translate({middle + 4:.0f} {margin - 5:.0f}) rotate(-90)">'
            f"{escape(token)}</text>",
        ]
    parts.append('<g stroke="currentColor" stroke-opacity=".15" fill="currentColor">')
    parts += [
        _square(margin, row, column, float(weights[row, column]), f"{asking} looks at {seen}")
        for row, asking in enumerate(tokens)
        for column, seen in enumerate(tokens)
    ]
    return "".join(parts) + "</g></svg>"


def _square(margin: float, row: int, column: int, weight: float, looks: str) -> str:
    x, y = margin + _CELL * column, margin + _CELL * row
    opened = f'<rect x="{x:.0f}" y="{y:.0f}" width="{_CELL}" height="{_CELL}"'
    opened += f' fill-opacity="{_step(weight)}"'
    if weight < 0.05:
        return f"{opened}/>"
    return f"{opened}><title>{escape(looks)}: {weight:.2f}</title></rect>"


def arcs(tokens: tuple[str, ...], weights: np.ndarray) -> str:
    """Return an SVG: an arc from each token to those it looks at; on the left to earlier ones.

    A dot marks the end that is looked at, a ring a token that looks at itself.
    """
    width = _LETTER * max(map(len, tokens)) + 22
    reach = 12 + 7.0 * len(tokens)
    left, right = reach, reach + width
    parts = [_opened(2 * reach + width, _CELL * len(tokens) + 8, "arcs between tokens")]
    parts += [
        f'<text x="{reach + width / 2:.0f}" y="{_CELL * (place + 0.5) + 8:.0f}" '
        f'text-anchor="middle">{escape(token)}</text>'
        for place, token in enumerate(tokens)
    ]
    parts.append('<g stroke="currentColor" fill="none">')
    for row, column in np.argwhere(weights >= _FAINT).tolist():
        weight, shift = float(weights[row, column]), column - row
        edge, bend = (left, -1) if shift < 0 else (right, 1)
        start, end = (_CELL * (place + 0.5) + 4 for place in (row, column))
        look = f'stroke-width="{1 + 3 * _step(weight):.1f}"'
        look += f' stroke-opacity="{_step(0.3 + 0.7 * weight)}"'
        if shift == 0:
            parts.append(f'<circle cx="{right + 5:.0f}" cy="{start:.0f}" r="4" {look}/>')
            continue
        far = edge + bend * (6 + 9.0 * abs(shift))
        parts += [
            f'<path d="M{edge:.0f} {start:.0f}C{far:.0f} {start:.0f} {far:.0f} {end:.0f} '
            f'{edge:.0f} {end:.0f}" {look}/>',
            f'<circle cx="{edge:.0f}" cy="{end:.0f}" r="2.5" fill="currentColor" stroke="none"/>',
        ]
    return "".join(parts) + "</g></svg>"


def _step(weight: float) -> float:
    """Round to twentieths: more shades nobody sees, and the picture is the same everywhere."""
    return round(min(weight, 1.0) * 20) / 20


def _opened(width: float, height: float, name: str) -> str:
    return (
        f'<svg role="img" aria-label="{name}" width="{width:.0f}" height="{height:.0f}" '
        'style="font:12px ui-monospace,monospace;flex:none" fill="currentColor">'
    )


def render(sentence: str, layer: int, head: int) -> Shown:
    """Return one head's weights as heat map and arcs; layer and head count from 1."""
    tokens, weights = attention_of(sentence)
    of_head = weights[layer - 1, head - 1]
    title = f"layer {layer}, head {head}"
    html = (
        f'<div class="bertlab wide"><p><b>MiniLM, {title}</b></p>'
        '<div style="display:flex;flex-wrap:wrap;gap:2.5em;align-items:flex-end">'
        f"{heat_map(tokens, of_head)}{arcs(tokens, of_head)}</div>"
        '<p class="soft">Left: a row for the token that asks, a column for the token it looks at; '
        "each row sums to 1. Right: the same, as arcs from the token that asks; on the left to "
        "earlier tokens, on the right to later ones; a dot where the look arrives, a ring where a "
        "token looks at itself. Only weights of at least 0.1 have an arc.</p></div>"
    )
    lines = [f"MiniLM, {title}: what each token looks at most"]
    widest = max(map(len, tokens))
    lines += [
        f"{asking:>{widest}} -> {seen:<{widest}} {weight:.2f}"
        for asking, seen, weight in strongest(tokens, of_head)
    ]
    return Shown(html, "\n".join(lines))


def attention_explorer(sentence: str = SENTENCE, layer: int = 1, head: int = 3) -> View:
    """Return the explorer: any sentence, and a slider each for layer and head."""
    wide: dict[str, Any] = {
        "style": {"description_width": "6em"},
        "layout": {"width": "36em"},
        "continuous_update": True,
    }
    return View(
        {
            "sentence": ipywidgets.Text(sentence, description="sentence", **wide),
            "layer": ipywidgets.IntSlider(layer, 1, LAYERS, description="layer", **wide),
            "head": ipywidgets.IntSlider(head, 1, HEADS, description="head", **wide),
        },
        render,
    )
