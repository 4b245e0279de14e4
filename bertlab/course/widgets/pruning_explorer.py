"""The attention heads of a classifier, turned off one by one, and what that costs: chapter 8."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ipywidgets
import traitlets

from bertlab.course.display import Shown
from bertlab.course.widgets.view import View

Head = tuple[int, int]  # layer and head, from 0
MB = 4 / 1e6  # millions of bytes of a number in float32


@dataclass(frozen=True)
class Measured:
    """What a classifier is worth with some heads turned off.

    Attributes:
        right: how many of the texts it gets right.
        texts: how many there are.
        parameters: of the model when these heads are pruned.
        pruned: how many parameters went with them.
    """

    right: int
    texts: int
    parameters: int
    pruned: int

    @property
    def accuracy(self) -> float:
        return self.right / self.texts

    @property
    def error(self) -> float:
        """One standard error of the accuracy."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.texts)


def attentions_of(model: Any) -> list[Any]:
    """The attention of each layer of a classifier."""
    return [layer.attention for layer in model.bert.encoder.layers]


def least_important(importance: Any, count: int, most_first: bool = False) -> list[Head]:
    """So many heads in the order of their importance; every layer keeps one at least.

    Args:
        importance: `[layers, heads]`, as `head_importance` gives it.
        most_first: the most important ones instead.

    Raises:
        ValueError: there are not so many heads that can go.
    """
    rows = [[float(x) for x in row] for row in importance]
    most = sum(len(row) - 1 for row in rows)
    if not 0 <= count <= most:
        raise ValueError(f"count is {count}, but must be from 0 to {most}: each layer keeps a head")
    left = [len(row) for row in rows]
    ranked = [(x, layer, head) for layer, row in enumerate(rows) for head, x in enumerate(row)]
    chosen: list[Head] = []
    for _, layer, head in sorted(ranked, reverse=most_first):
        if len(chosen) < count and left[layer] > 1:
            chosen.append((layer, head))
            left[layer] -= 1
    return chosen


@contextmanager
def without_heads(model: Any, off: Collection[Head]) -> Iterator[None]:
    """Within it, what these heads hand to their layer's `attention.output` is 0."""
    hooks = []
    for layer, attention in enumerate(attentions_of(model)):
        gone = [head for other, head in off if other == layer]
        if gone:
            hooks.append(attention.output.register_forward_pre_hook(_silence(attention, gone)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _silence(attention: Any, gone: Sequence[int]) -> Any:
    def silenced(module: Any, inputs: tuple[Any, ...]) -> Any:
        heads = inputs[0].unflatten(-1, (attention.num_heads, -1)).clone()
        heads[..., list(gone), :] = 0  # [..., heads, units of a head]
        return heads.flatten(-2)

    return silenced


def measure(model: Any, batches: Sequence[Mapping[str, Any]], off: Collection[Head]) -> Measured:
    """Read labelled batches with some heads turned off.

    Args:
        model: a classifier with a `bert`; it is not changed.
        batches: with `labels`.

    Raises:
        ValueError: a layer would have no head left, or there is no text.
    """
    import torch

    check(model, off)
    was_training, device = model.training, next(model.parameters()).device
    right = texts = 0
    try:
        model.eval()
        with torch.no_grad(), without_heads(model, off):
            for batch in batches:
                given = {name: x.to(device) for name, x in batch.items()}
                labels = given.pop("labels")
                right += int((model(**given).logits.argmax(-1) == labels).sum())
                texts += len(labels)
    finally:
        model.train(was_training)
    if texts == 0:
        raise ValueError("batches has no text, but must have at least one")
    total = sum(p.numel() for p in model.parameters())
    pruned = sum(size_of_head(attentions_of(model)[layer]) for layer, _ in set(off))
    return Measured(right, texts, total - pruned, pruned)


def check(model: Any, off: Collection[Head]) -> None:
    """Raise ValueError if a layer has no head left."""
    for layer, attention in enumerate(attentions_of(model)):
        gone = {head for other, head in off if other == layer}
        if len(gone) >= attention.num_heads:
            raise ValueError(f"layer {layer + 1} has no head left; a layer needs one at least")


def size_of_head(attention: Any) -> int:
    """How many parameters a head has: rows of three matrices and biases, columns of a fourth."""
    hidden = attention.output.out_features
    units = attention.output.in_features // attention.num_heads
    return 4 * hidden * units + 3 * units


# --- the view ---


def render(found: Measured, whole: Measured, importance: Any, off: Collection[Head]) -> Shown:
    """Return the heads as a grid, and accuracy and size beside those of the whole model."""
    heads = sum(len(row) for row in importance)
    title = f"{heads - len(set(off))} of {heads} heads are on"
    rows = [
        (name, f"{one.accuracy:.0%} ± {one.error:.0%}", f"{one.parameters:,}", _mb(one))
        for name, one in (("all heads", whole), ("these heads", found))
    ]
    head = ("", f"right, of {whole.texts} texts", "parameters", "MB in float32")
    share = found.pruned / whole.parameters
    facts = [
        f"{len(set(off)) / heads:.0%} of the heads are {share:.1%} of the parameters. "
        "± is one standard error.",
    ]
    html = [f'<div class="bertlab"><p><b>{title}</b></p>', _grid(importance, off), "<table><thead>"]
    html += ["<tr>", *(f"<th>{name}</th>" for name in head), "</tr></thead><tbody>"]
    for name, *cells in rows:
        numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        html.append(f"<tr><td>{name}</td>{numbers}</tr>")
    html += ["</tbody></table>", *(f"<p>{fact}</p>" for fact in facts)]
    html.append(
        '<p class="soft">A row is a layer, a column a head. The longer its bar, the more important '
        "the head is by its gradient, beside the most important one; ✕ is off.</p></div>"
    )
    lines = [title]
    for layer, row in enumerate(importance):
        marks = " ".join("✕" if (layer, h) in off else "·" for h in range(len(row)))
        lines.append(f"layer {layer + 1}: {marks}")
    lines += [
        f"{name}: {right} right, {count} parameters, {mb} MB" for name, right, count, mb in rows
    ]
    return Shown("".join(html), "\n".join([*lines, *facts]))


def _grid(importance: Any, off: Collection[Head]) -> str:
    """A table of the heads: a bar for each one's importance, and a cross where it is off."""
    most = max(float(x) for row in importance for x in row) or 1.0
    columns = max(len(row) for row in importance)
    names = "".join(f"<th>{head + 1}</th>" for head in range(columns))
    body = []
    for layer, row in enumerate(importance):
        cells = []
        for head, value in enumerate(row):
            part = float(value) / most
            mark = "✕" if (layer, head) in off else "&nbsp;"
            cells.append(
                '<td style="padding:.1em .4em .1em 0;min-width:2.2em">'
                f'<div class="bar plain" style="width:{2 * part:.2f}em;height:.5em"></div>'
                f"<div>{mark}</div></td>"
            )
        body.append(f"<tr><td>layer {layer + 1}</td>{''.join(cells)}</tr>")
    return (
        f"<table><thead><tr><th>head</th>{names}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def _mb(one: Measured) -> str:
    return f"{one.parameters * MB:.1f}"


class HeadSwitches(ipywidgets.VBox):
    """A switch for each head, and a slider that turns the least important ones off.

    Attributes:
        value: the heads that are off, in order: layer and head, from 0.
        slider: how many are off by the order of importance.
        switches: by layer and head.

    Args:
        importance: `[layers, heads]`.
        count: how many of the least important heads are off at the start.
    """

    value: Any = traitlets.Tuple()

    def __init__(self, importance: Any, count: int) -> None:
        self.importance = importance
        most = sum(len(row) - 1 for row in importance)
        self.slider = ipywidgets.IntSlider(
            count,
            0,
            most,
            description="least important heads off",
            continuous_update=False,
            style={"description_width": "initial"},
            layout={"width": "36em", "max_width": "100%"},
        )
        self.switches = {
            (layer, head): ipywidgets.ToggleButton(
                value=False,
                description=str(head + 1),
                tooltip=f"layer {layer + 1}, head {head + 1}: pressed is off",
                layout={"width": "2.6em", "margin": "1px"},
            )
            for layer, row in enumerate(importance)
            for head in range(len(row))
        }
        rows = [
            ipywidgets.HBox(
                [
                    ipywidgets.Label(f"layer {layer + 1}", layout={"width": "4.5em"}),
                    *(self.switches[layer, head] for head in range(len(row))),
                ]
            )
            for layer, row in enumerate(importance)
        ]
        super().__init__([self.slider, *rows])
        self._moving = False
        self._follow_slider()
        self.slider.observe(self._follow_slider, names="value")
        for switch in self.switches.values():
            switch.observe(self._follow_switches, names="value")

    def _follow_slider(self, change: Any = None) -> None:
        off = set(least_important(self.importance, self.slider.value))
        self._moving = True  # one change of `value`, not one for each switch
        for head, switch in self.switches.items():
            switch.value = head in off
        self._moving = False
        self._follow_switches()

    def _follow_switches(self, change: Any = None) -> None:
        if not self._moving:
            self.value = tuple(head for head, switch in self.switches.items() if switch.value)


def pruning_explorer(
    model: Any, batches: Sequence[Mapping[str, Any]], importance: Any, count: int = 24
) -> View:
    """Return the explorer of a classifier's heads.

    Args:
        model: a classifier with a `bert`; it is not changed.
        batches: labelled texts; about a hundred are read in a second.
        importance: `[layers, heads]`, as `head_importance` gives it.
        count: how many of the least important heads are off at the start.

    Raises:
        ValueError: there is no text, or there are not so many heads that can go.
    """
    importance = [
        [float(x) for x in row[: attention.num_heads]]  # a pruned layer has fewer
        for row, attention in zip(importance, attentions_of(model), strict=True)
    ]
    least_important(importance, count)  # says what is wrong with `count`
    whole = measure(model, batches, ())

    def draw(off: tuple[Head, ...]) -> Shown:
        return render(measure(model, batches, off), whole, importance, off)

    return View({"off": HeadSwitches(importance, count)}, draw)  # type: ignore[dict-item]  # it has a value
