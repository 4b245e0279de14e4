"""Break one layer of a small model and see where it parts from Hugging Face: chapter 4."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets

from bertlab.course.display import Shown
from bertlab.course.widgets.view import View

if TYPE_CHECKING:  # both take seconds to import, so the functions below import them when called
    from torch import Tensor, nn

    from bertlab.course.agreement import Agreement, Part

LAYERS = 6
HIDDEN = 64
PRECISIONS = ("float32", "float64")
FLOAT64_ROUNDING = 1e-11
"""What six layers make of float64's rounding at most, however the sums are ordered."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in one layer of a model.

    Attributes:
        name: as the menu shows it.
        story: how it comes about, in one sentence.
        inject: breaks a layer of a bertlab `BertModel`, given the model and the layer's number.
    """

    name: str
    story: str
    inject: Callable[[Any, int], None]


# --- the faults ---


def _tanh_gelu(model: Any, number: int) -> None:
    from torch.nn import functional as F

    network = model.encoder.layers[number].feed_forward

    def forward(hidden_states: "Tensor") -> "Tensor":
        return network.down(F.gelu(network.up(hidden_states), approximate="tanh"))

    network.forward = forward


def _large_eps(model: Any, number: int) -> None:
    model.encoder.layers[number].attention_norm.eps = 1e-5


def _no_bias(model: Any, number: int) -> None:
    model.encoder.layers[number].feed_forward.down.bias.data.zero_()


def _no_key_bias(model: Any, number: int) -> None:
    model.encoder.layers[number].attention.key.bias.data.zero_()


def _swapped(model: Any, number: int) -> None:
    layers = model.encoder.layers
    other = number + 1 if number + 1 < len(layers) else number - 1
    layers[number], layers[other] = layers[other], layers[number]


def _no_mask(model: Any, number: int) -> None:
    attention = model.encoder.layers[number].attention
    with_mask = attention.forward

    def forward(hidden_states: "Tensor", attention_mask: Any = None, *more: Any) -> Any:
        return with_mask(hidden_states, None, *more)

    attention.forward = forward


def _exchanged(model: Any, number: int) -> None:
    attention = model.encoder.layers[number].attention
    attention.query, attention.key = attention.key, attention.query


def _residual_twice(model: Any, number: int) -> None:
    network = model.encoder.layers[number].feed_forward
    plain = network.forward
    network.forward = lambda hidden_states: hidden_states + plain(hidden_states)


FAULTS = (
    Fault("none", "Nothing is wrong: what is left is rounding.", lambda model, number: None),
    Fault(
        "tanh-GELU instead of GELU",
        "The feed-forward network bends by the approximation of exercise 4.1.",
        _tanh_gelu,
    ),
    Fault(
        "LayerNorm's eps is 1e-5",
        "`nn.LayerNorm(hidden)` was written where BERT's config says 1e-12.",
        _large_eps,
    ),
    Fault(
        "the bias of `down` is lost",
        "A checkpoint was loaded and one tensor of it was skipped.",
        _no_bias,
    ),
    Fault(
        "the bias of `key` is lost",
        "The same accident with another tensor; think of chapter 3 before you look.",
        _no_key_bias,
    ),
    Fault("query and key are exchanged", "Two names were mixed up in loading.", _exchanged),
    Fault("the mask is not handed on", "This layer attends to padding, too.", _no_mask),
    Fault(
        "the layer and the next are exchanged",
        "Layers were loaded in the order of their names as text, say.",
        _swapped,
    ),
    Fault(
        "the residual is added twice",
        "`FeedForward` adds its input, and the layer adds it again.",
        _residual_twice,
    ),
)


# --- the models ---


def with_weights_of(theirs: "nn.Module") -> Any:
    """Return bertlab's `BertModel` with the weights of a `BertModel` of Transformers, in eval mode.

    Given, so that this chapter can run on real weights; in chapter 5 you write such a function
    yourself, for any checkpoint.
    """
    from bertlab.config import BertConfig
    from bertlab.encoder import BertModel

    source: Any = theirs
    model: Any = BertModel(BertConfig.from_hf(source.config))
    tables = source.embeddings
    pairs = [
        (model.embeddings.word, tables.word_embeddings),
        (model.embeddings.position, tables.position_embeddings),
        (model.embeddings.token_type, tables.token_type_embeddings),
        (model.embeddings.norm, tables.LayerNorm),
    ]
    if source.pooler is not None:
        pairs.append((model.pooler.dense, source.pooler.dense))
    for mine, layer in zip(model.encoder.layers, source.encoder.layer, strict=True):
        pairs += _layer_pairs(mine, layer)
    for mine, other in pairs:
        mine.load_state_dict(other.state_dict())
    return model.to(source.device).eval()


def _layer_pairs(mine: Any, theirs: Any) -> list[tuple[Any, Any]]:
    """The parts of a layer, each beside the part of Transformers that has its weights."""
    attention = theirs.attention
    return [
        (mine.attention.query, attention.self.query),
        (mine.attention.key, attention.self.key),
        (mine.attention.value, attention.self.value),
        (mine.attention.output, attention.output.dense),
        (mine.attention_norm, attention.output.LayerNorm),
        (mine.feed_forward.up, theirs.intermediate.dense),
        (mine.feed_forward.down, theirs.output.dense),
        (mine.feed_forward_norm, theirs.output.LayerNorm),
    ]


@lru_cache(maxsize=1)
def _their_model() -> Any:
    from transformers.models.bert.configuration_bert import BertConfig

    from bertlab.course.reference import seeded_bert

    config = BertConfig(
        vocab_size=200,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=32,
    )
    return seeded_bert(config)


@lru_cache(maxsize=1)
def _batch() -> dict[str, Any]:
    """Four pairs of texts of random ids, three of them with padding."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 200, (4, 24), generator=generator)
    lengths = torch.tensor([24, 19, 12, 6])
    mask = (torch.arange(24)[None, :] < lengths[:, None]).long()
    second = (torch.arange(24)[None, :] >= lengths[:, None] // 2).long() * mask
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": second}


def agreement_with(fault: str, layer: int, precision: str = "float32") -> "Agreement":
    """Compare a small model that has a fault with Hugging Face's of the same weights.

    Args:
        fault: the name of one of `FAULTS`.
        layer: the layer that is broken, counting from 0 as the parts do.
        precision: the floating-point type in which both models run.

    Raises:
        ValueError: there is no such fault, layer or precision.
    """
    from bertlab.course.agreement import Agreement, compare

    found = next((one for one in FAULTS if one.name == fault), None)
    if found is None:
        raise ValueError(f"fault is {fault!r}, but must be one of {[f.name for f in FAULTS]}")
    if not 0 <= layer < LAYERS:
        raise ValueError(f"layer is {layer}, but must be one of 0 to {LAYERS - 1}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}, but must be one of {PRECISIONS}")
    theirs = _their_model()
    ours = with_weights_of(theirs)
    found.inject(ours, layer)
    if precision == "float32":
        return compare(ours, theirs, _batch())
    parts = compare(ours.double(), copy.deepcopy(theirs).double(), _batch()).parts
    parts = (replace(part, allowed=max(part.allowed, FLOAT64_ROUNDING)) for part in parts)
    return Agreement(tuple(parts))


# --- the view ---

_LOW, _HIGH = -8.0, 1.0  # powers of ten, the ends of the scale
_WIDTH, _ROW, _MARGIN, _STUB = 400, 21, 150, 6  # pixels


def _place(error: float) -> float:
    """Where an error stands on the scale, in pixels."""
    from math import log10

    power = log10(min(max(error, 10**_LOW), 10**_HIGH))
    # Steps of a quarter of a power of ten: the picture is then the same everywhere.
    power = round(power * 4) / 4
    return _MARGIN + _WIDTH * (power - _LOW) / (_HIGH - _LOW)


def picture(parts: "tuple[Part, ...]") -> str:
    """Return an SVG: a bar for the error of each part that departs, a hollow stub for the others.

    How long rounding is differs from machine to machine, and the stored picture must not.
    """
    height = _ROW * len(parts) + 30
    svg = [
        f'<svg role="img" aria-label="error of each part" width="{_MARGIN + _WIDTH + 20}" '
        f'height="{height}" style="font:12px system-ui,sans-serif;margin-top:.6em" '
        'fill="currentColor">'
    ]
    for power in range(int(_LOW), int(_HIGH) + 1):
        x = _place(10.0**power)
        svg += [
            f'<line x1="{x:.0f}" x2="{x:.0f}" y1="0" y2="{height - 26}" stroke="currentColor" '
            'stroke-opacity=".15"/>',
            f'<text x="{x:.0f}" y="{height - 12}" text-anchor="middle">1e{power}</text>',
        ]
    for row, part in enumerate(parts):
        top = _ROW * row + 4
        length = _STUB if part.agrees else max(_place(part.error) - _MARGIN, _STUB)
        look = "none" if part.agrees else "currentColor"
        svg += [
            f'<text x="{_MARGIN - 8}" y="{top + 11}" text-anchor="end">{escape(part.name)}</text>',
            f'<rect x="{_MARGIN}" y="{top}" width="{length:.0f}" height="{_ROW - 8}" '
            f'stroke="currentColor" fill="{look}" fill-opacity=".75"/>',
        ]
    return "".join(svg) + "</svg>"


def render(fault: str, layer: int, precision: str = "float32") -> Shown:
    """Return the error of each part, and which part is the first to depart."""
    found = agreement_with(fault, layer, precision)
    story = next(one.story for one in FAULTS if one.name == fault)
    title = "no fault" if fault == "none" else f"layer {layer}: {fault}"
    first = found.first_departure
    verdict = "every part agrees" if first is None else f"the first part to depart: {first.name}"
    html = (
        f'<div class="bertlab wide"><p><b>{escape(title)}</b>. {_coded(story)}'
        f"</p><p>In {precision}, <b>{escape(verdict)}</b>.</p>{picture(found.parts)}"
        '<p class="soft">The largest error of each part at real tokens, on a logarithmic scale, in '
        "the order in which the model runs. A hollow mark is an error that rounding explains. "
        "Layers count from 0.</p></div>"
    )
    lines = [f"{title}; in {precision}, {verdict}"]
    lines += [f"{part.name:>20}  {_in_words(part)}" for part in found.parts]
    return Shown(html, "\n".join(lines))


def _coded(text: str) -> str:
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))


def _in_words(part: "Part") -> str:
    return "agrees" if part.agrees else f"departs by {part.error:.0e}"


def agreement_explorer(fault: str = FAULTS[1].name, layer: int = 3) -> View:
    """Return the explorer: a menu of faults, the layer that has one, and the precision."""
    wide: dict[str, Any] = {
        "style": {"description_width": "6em"},
        "layout": {"width": "32em"},
    }
    names = [one.name for one in FAULTS]
    return View(
        {
            "fault": ipywidgets.Dropdown(options=names, value=fault, description="fault", **wide),
            "layer": ipywidgets.IntSlider(layer, 0, LAYERS - 1, description="in layer", **wide),
            "precision": ipywidgets.Dropdown(options=PRECISIONS, description="precision", **wide),
        },
        render,
    )
