"""Real numbers of a BERT written with few bits, and what comes back: chapter 8."""

from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import Any

import ipywidgets
import numpy as np

from bertlab.course.display import Shown
from bertlab.course.widgets.view import View

LEAST_BITS, MOST_BITS = 2, 8
BYTES_OF_A_RANGE = 8  # a scale and a zero point, 4 bytes each
BINS = 75

NUMBERS = {
    "query weight, layer 1": "encoder.layer.0.attention.self.query",
    "feed-forward down, layer 6": "encoder.layer.5.output.dense",
    "word table, 3,000 rows": "embeddings.word_embeddings",
    "activations into feed-forward down, layer 6": "encoder.layer.5.output.dense",
}
"""What can be looked at, and the part of MiniLM (Hugging Face's name) where it is found."""

TEXTS = (
    "Returns a new array with the eigenvalues of the matrix in ascending order.",
    "The optimizer takes a step, and the gradient is set to zero.",
    "If axis is None, the mean of all elements is computed.",
)

_WIDTH, _HALF = 560, 84  # of the picture, in pixels; each half of it is so high


@dataclass(frozen=True)
class Rounded:
    """Numbers after a way through a few bits.

    Attributes:
        values: what comes back, in the shape of what was given.
        step: the median distance of two neighboring numbers that can be said.
        ranges: how many ranges there are.
        error: the root mean square of what was changed, divided by that of the numbers.
        zeros: the part of the numbers, among those that are not 0, that come back as 0.
    """

    values: np.ndarray
    step: float
    ranges: int
    error: float
    zeros: float


def rounded(values: np.ndarray, bits: int, per_channel: bool) -> Rounded:
    """Write numbers with so many bits, and read them again.

    Args:
        values: `[rows, columns]`.
        bits: of each number; 2**bits different ones can be said within a range.
        per_channel: one range for each row, or one for all numbers together.

    Raises:
        ValueError: `bits` is not between `LEAST_BITS` and `MOST_BITS`.

    Source: Jacob et al. 2018, section 2.1.
    """
    if not LEAST_BITS <= bits <= MOST_BITS:
        raise ValueError(f"bits is {bits}, but must be from {LEAST_BITS} to {MOST_BITS}")
    axis = 1 if per_channel else None
    values = values.astype(np.float64)
    low = np.minimum(values.min(axis=axis, keepdims=True), 0)
    high = np.maximum(values.max(axis=axis, keepdims=True), 0)
    scale = (high - low) / (2**bits - 1)
    scale = np.where(scale == 0, 1.0, scale)
    zero_point = np.round(-low / scale)
    whole = np.clip(np.round(values / scale) + zero_point, 0, 2**bits - 1)
    back = (whole - zero_point) * scale
    size = np.sqrt(np.mean(values**2)) or 1.0
    lost = (back == 0) & (values != 0)
    return Rounded(
        values=back,
        step=float(np.median(scale)),
        ranges=scale.size,
        error=float(np.sqrt(np.mean((back - values) ** 2)) / size),
        zeros=float(lost.sum() / max(1, np.count_nonzero(values))),
    )


def size_kb(shape: tuple[int, ...], bits: int, ranges: int) -> float:
    """How much memory numbers take with so many bits, their ranges included, in 1000 bytes."""
    return (np.prod(shape) * bits / 8 + ranges * BYTES_OF_A_RANGE) / 1000


@lru_cache(maxsize=len(NUMBERS))
def numbers(what: str) -> np.ndarray:
    """Real numbers of MiniLM: a weight `[out, in]`, rows of its table, or activations by token.

    Raises:
        ValueError: `what` is none of `NUMBERS`.
    """
    if what not in NUMBERS:
        raise ValueError(f"what is {what!r}, but must be one of {', '.join(NUMBERS)}")
    from bertlab.course.reference import minilm

    model: Any = minilm()
    part = model.get_submodule(NUMBERS[what])
    if what.startswith("activations"):
        return _inputs_of(part, model)
    weight = part.weight.detach().numpy()
    return weight[2000:5000] if what.startswith("word table") else weight


def _inputs_of(part: Any, model: Any) -> np.ndarray:
    """What a part of a model reads on a few texts, `[tokens, in]`."""
    import torch
    from transformers import BertTokenizer

    from bertlab.course.reference import minilm_folder

    tokenizer = BertTokenizer.from_pretrained(minilm_folder())
    seen = []
    hook = part.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0].numpy()))
    try:
        with torch.no_grad():
            for text in TEXTS:
                model(torch.tensor([tokenizer(text)["input_ids"]]))
    finally:
        hook.remove()
    return np.concatenate(seen)


@lru_cache(maxsize=64)
def errors(what: str) -> dict[tuple[int, bool], tuple[float, float]]:
    """For each number of bits, per channel or not: the relative error, and the size in KB."""
    values = numbers(what)
    found = {}
    for bits in range(MOST_BITS, LEAST_BITS - 1, -1):
        for per_channel in (False, True):
            one = rounded(values, bits, per_channel)
            found[bits, per_channel] = one.error, size_kb(values.shape, bits, one.ranges)
    return found


# --- the view ---


def render(what: str, bits: int, per_channel: bool) -> Shown:
    """Return both histograms, what was lost, and the error of every other choice."""
    values = numbers(what)
    found = rounded(values, bits, per_channel)
    row = "token" if what.startswith("activations") else "row"
    ways = f"one range for each {row}" if per_channel else "one range for all"
    title = f"{what}: {bits} bits, {ways}"
    facts = [
        f"{values.size:,} numbers from {values.min():.2f} to {values.max():.2f}, half of them "
        f"closer to 0 than {np.median(np.abs(values)):.3f}.",
        f"Within a range {2**bits} numbers can be said, about {found.step:.2g} apart; "
        f"{_percent(found.zeros)} of the numbers come back as 0.",
        f"Error: {_percent(found.error)} of the numbers' size. {_size(what, bits, per_channel)} KB "
        f"instead of {size_kb(values.shape, 32, 0):,.0f}.",
    ]
    html = (
        f'<div class="bertlab"><p><b>{escape(title)}</b></p>{_picture(values, found)}'
        f"{''.join(f'<p>{escape(fact)}</p>' for fact in facts)}"
        f"{_table(what, bits, per_channel, row)}"
        '<p class="soft">Above the line: the numbers as they are. Below it: as they come back. The '
        "height of a bar goes with the logarithm of how many there are. The error is the root mean "
        "square of the change, divided by that of the numbers; ◂ marks the choice above.</p></div>"
    )
    lines = [title, *facts, f"bits  error, one range  error, a range for each {row}"]
    for b in range(MOST_BITS, LEAST_BITS - 1, -1):
        one, many = (_percent(errors(what)[b, way][0]) for way in (False, True))
        lines.append(f"{b:>4}  {one:>16}  {many:>{24 + len(row)}}")
    return Shown(html, "\n".join(lines))


def _table(what: str, bits: int, per_channel: bool, row: str) -> str:
    found = errors(what)
    rows = []
    for b in range(MOST_BITS, LEAST_BITS - 1, -1):
        cells = [f'<td class="number">{b}</td>']
        for way in (False, True):
            mark = " ◂" if (b, way) == (bits, per_channel) else ""
            cells.append(f'<td class="number">{_percent(found[b, way][0])}{mark}</td>')
        cells.append(f'<td class="number">{_size(what, b, True)}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        "<table><thead><tr><th>bits</th><th>error, one range for all</th>"
        f"<th>error, a range for each {row}</th><th>KB, with these ranges</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _size(what: str, bits: int, per_channel: bool) -> str:
    return f"{errors(what)[bits, per_channel][1]:,.0f}"


def _percent(part: float) -> str:
    """A share with two digits that say something."""
    if part == 0:
        return "0%"
    return f"{100 * part:.2g}%" if part < 0.995 else f"{part:.0%}"


def bar_edges(*several: np.ndarray) -> np.ndarray:
    """Where bars begin and end: all numbers lie between the first edge and the last, 0 too."""
    together = np.concatenate([values.ravel() for values in several])
    return np.linspace(min(together.min(), 0), max(together.max(), 0), BINS + 1)


def heights(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """How high each bar is, from 0 to 1: the logarithm of its count, by that of all numbers."""
    counts, _ = np.histogram(values, edges)
    return np.log1p(counts) / np.log1p(values.size)


def _picture(values: np.ndarray, found: Rounded) -> str:
    """Two histograms, one upwards and one downwards from a common line."""
    edges = bar_edges(values, found.values)
    wide, middle = _WIDTH / BINS, _HALF + 4
    bars = []
    both = ((values, -1, "var(--bl-blue)"), (found.values, 1, "var(--bl-orange)"))
    for some, sign, color in both:
        for number, height in enumerate(heights(some, edges)):
            if height:
                tall = height * _HALF
                top = middle - tall if sign < 0 else middle
                bars.append(
                    f'<rect x="{number * wide:.1f}" y="{top:.1f}" width="{wide - 1:.1f}" '
                    f'height="{tall:.1f}" style="fill:{color}"/>'
                )
    low, high = edges[0], edges[-1]
    zero = -low / (high - low) * _WIDTH
    name = "Histogram of the numbers, above as they are and below as they come back"
    label = f'y="{2 * middle + 15}" style="fill:currentColor;font-size:12px"'
    return (
        f'<svg role="img" aria-label="{name}" width="{_WIDTH}" height="{2 * middle + 20}" '
        f'viewBox="0 0 {_WIDTH} {2 * middle + 20}" style="max-width:100%">'
        f'<line x1="0" x2="{_WIDTH}" y1="{middle}" y2="{middle}" style="stroke:currentColor"/>'
        f'{"".join(bars)}<line x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{2 * middle}" '
        'style="stroke:currentColor;stroke-dasharray:3 3"/>'
        f'<text x="0" {label}>{low:.2f}</text>'
        f'<text x="{zero:.1f}" text-anchor="middle" {label}>0</text>'
        f'<text x="{_WIDTH}" text-anchor="end" {label}>{high:.2f}</text></svg>'
    )


def quantization_explorer(
    what: str = "feed-forward down, layer 6", bits: int = 4, per_channel: bool = False
) -> View:
    """Return the explorer: which numbers, how many bits, and how many ranges.

    Raises:
        ValueError: `what` is none of `NUMBERS`, or `bits` not between `LEAST_BITS` and `MOST_BITS`.
    """
    rounded(numbers(what)[:1], bits, per_channel)  # says what is wrong
    wide: dict[str, Any] = {
        "style": {"description_width": "6em"},
        "layout": {"width": "36em", "max_width": "100%"},
    }
    return View(
        {
            "what": ipywidgets.Dropdown(
                options=list(NUMBERS), value=what, description="numbers", **wide
            ),
            "bits": ipywidgets.IntSlider(bits, LEAST_BITS, MOST_BITS, description="bits", **wide),
            "per_channel": ipywidgets.Checkbox(
                per_channel, description="a range for each row (or token)", **wide
            ),
        },
        render,
    )
