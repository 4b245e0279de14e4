"""A sentence under `mask_tokens`: which pieces are chosen, and what the model reads: chapter 6."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import Any

import ipywidgets

from bertlab.course.display import Shown
from bertlab.course.reference import minilm_folder
from bertlab.course.widgets.view import View

SENTENCE = "The eigenvalues of the covariance matrix are returned in ascending order."
MOST_PIECES, DRAWS = 40, 2_000

FATES = {
    "mask": "[MASK] instead",
    "other": "another piece instead",
    "same": "left as it is",
}
"""What can become of a chosen piece, and how the view says it."""

_BORDER = {"mask": "2px solid", "other": "2px dashed", "same": "2px dotted"}
_NOT_CHOSEN = "2px solid transparent"


@dataclass(frozen=True)
class Place:
    """One piece of the sentence after masking.

    Attributes:
        piece: what stands in the sentence.
        read: what the model reads there.
        fate: a key of `FATES` if the piece was chosen; None if it was not.
    """

    piece: str
    read: str
    fate: str | None


def mask(sentence: str, probability: float, whole_word: bool, seed: int) -> list[Place]:
    """Mask a sentence once with the package's `mask_tokens`.

    Args:
        probability: how likely a piece, or a word, is chosen.
        seed: the same seed gives the same draws.

    Raises:
        ValueError: the sentence is empty or too long to be shown.
    """
    inputs, labels = _draw(_ids_of(sentence), probability, whole_word, seed, 1)
    to_pieces = _tokenizer().convert_ids_to_tokens
    ids = _ids_of(sentence)
    return [
        Place(piece, read, fate)
        for piece, read, fate in zip(
            to_pieces(ids),
            to_pieces(inputs[0].tolist()),
            _fates(ids, inputs, labels)[0],
            strict=True,
        )
    ][1:-1]


def shares(sentence: str, probability: float, whole_word: bool, seed: int) -> dict[str, float]:
    """What happens on average over `DRAWS` draws.

    Returns:
        `chosen`, the share of the pieces; and of the chosen ones the share of each of `FATES`.
    """
    ids = _ids_of(sentence)
    drawn = _draw(ids, probability, whole_word, seed, DRAWS)
    counts = Counter(fate for row in _fates(ids, *drawn) for fate in row if fate)
    chosen = counts.total()
    return {
        "chosen": chosen / (DRAWS * (len(ids) - 2)),
        **{fate: counts[fate] / max(chosen, 1) for fate in FATES},
    }


def _draw(ids: list[int], probability: float, whole_word: bool, seed: int, rows: int) -> Any:
    """`mask_tokens` on so many copies of the ids: `(inputs, labels)`, both `[rows, seq]`."""
    import torch

    from bertlab import pretraining  # the student's, once exercise 6.1 is done

    copies = torch.tensor([ids]).repeat(rows, 1)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for a stand-in that does not draw from the generator
        return pretraining.mask_tokens(copies, _tokenizer(), probability, generator, whole_word)


def _fates(ids: list[int], inputs: Any, labels: Any) -> list[list[str | None]]:
    """For each row and place a key of `FATES`, or None where there is no label."""
    masked = _tokenizer().mask_token_id
    return [
        [
            None if y == -100 else "mask" if x == masked else "same" if x == was else "other"
            for was, x, y in zip(ids, row, targets, strict=True)
        ]
        for row, targets in zip(inputs.tolist(), labels.tolist(), strict=True)
    ]


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    from transformers import BertTokenizer

    return BertTokenizer.from_pretrained(minilm_folder())


def _ids_of(sentence: str) -> list[int]:
    ids = _tokenizer()(sentence)["input_ids"]
    if not 2 < len(ids) <= MOST_PIECES + 2:
        raise ValueError(
            f"sentence has {len(ids) - 2} pieces; between 1 and {MOST_PIECES} can be shown"
        )
    return ids


# --- the view ---


def render(sentence: str, probability: float, whole_word: bool, seed: int) -> Shown:
    """Return the sentence as the model reads it, its labels, and the shares over many draws."""
    places = mask(sentence, probability, whole_word, seed)
    average = shares(sentence, probability, whole_word, seed)
    counts = Counter(place.fate for place in places if place.fate)
    rows = [("pieces chosen", f"{counts.total()} of {len(places)}", _percent(average["chosen"]))]
    rows += [
        (f"of these, {name}", str(counts[fate]), _percent(average[fate]))
        for fate, name in FATES.items()
    ]
    body = "".join(
        f'<tr><td style="border-bottom:1px solid var(--bl-line)">{_legend(name)}</td>'
        f'<td class="number">{now}</td><td class="number">{many}</td></tr>'
        for name, now, many in rows
    )
    html = (
        f'<div class="bertlab"><p>{"".join(map(_box, places))}</p>'
        f"<table><thead><tr><th></th><th>this draw</th><th>mean of {DRAWS:,} draws</th></tr>"
        f"</thead><tbody>{body}</tbody></table>"
        '<p class="soft">Above: what the model reads. Below a chosen piece: its label, what the '
        "model has to say there. At all other pieces the label is -100, and nothing is asked.</p>"
        "</div>"
    )
    lines = ["reads:  " + " ".join(place.read for place in places)]
    lines += ["labels: " + " ".join(place.piece if place.fate else "·" for place in places)]
    lines += [f"{name}: {now}; mean of {DRAWS:,} draws: {many}" for name, now, many in rows]
    return Shown(html, "\n".join(lines))


def _box(place: Place) -> str:
    """What the model reads, and the label below it; the border says what happened."""
    border = _BORDER[place.fate] if place.fate else _NOT_CHOSEN
    label = escape(place.piece) if place.fate else "&nbsp;"
    read = f"<b>{escape(place.read)}</b>" if place.fate else escape(place.read)
    return (
        f'<span style="display:inline-block;vertical-align:top;text-align:center;border:{border};'
        f'border-radius:4px;margin:1px;padding:0 .3em">{read}<br>'
        f'<span class="soft">{label}</span></span>'
    )


def _legend(name: str) -> str:
    """A row's name, in the border by which its fate is drawn."""
    border = next((_BORDER[fate] for fate, said in FATES.items() if name.endswith(said)), None)
    style = f"border:{border};border-radius:4px;padding:0 .3em" if border else ""
    return f'<span style="{style}">{escape(name)}</span>'


def _percent(share: float) -> str:
    return f"{share:.0%}"


def masking_explorer(
    sentence: str = SENTENCE, probability: float = 0.15, whole_word: bool = False, seed: int = 3
) -> View:
    """Return the explorer: any sentence, the probability, whole words or pieces, and the seed."""
    wide: dict[str, Any] = {
        "style": {"description_width": "6em"},
        "layout": {"width": "36em", "max_width": "100%"},
    }
    return View(
        {
            "sentence": ipywidgets.Text(sentence, description="sentence", **wide),
            "probability": ipywidgets.FloatSlider(
                probability, min=0.0, max=1.0, step=0.05, description="probability", **wide
            ),
            "whole_word": ipywidgets.Checkbox(whole_word, description="whole words", **wide),
            "seed": ipywidgets.IntSlider(seed, 0, 50, description="draw", **wide),
        },
        render,
    )
