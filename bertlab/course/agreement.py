"""Part by part beside Hugging Face: where a model first departs, and by how much.

The rule is that of the checks: the truth is Hugging Face's model in float64, and a part may err by
a small multiple of what Hugging Face's own model errs in the type it runs in. A part is compared
where it stands, so one that departs shows in every part after it; the first is the one to mend.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bertlab.course import display
from bertlab.course.judging import FLOOR_ULP, MULTIPLE

#: A gradient this much smaller than the largest, in float64, is 0 but for rounding.
NO_GRADIENT = 1e-12

#: A batch: `input_ids`, `attention_mask`, and what else the models take by keyword.
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Part:
    """One part of the model, compared.

    Attributes:
        name: such as `"layer 3 attention"`.
        error: the largest absolute error at a real token; infinite if a shape is wrong or a
            value is not a number.
        allowed: the largest error that counts as rounding.
    """

    name: str
    error: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """True if the error is no more than rounding."""
        return self.error <= self.allowed


@dataclass(frozen=True)
class Agreement:
    """All parts compared, in the order in which the model runs through them."""

    parts: tuple[Part, ...]

    @property
    def first_departure(self) -> Part | None:
        """The first part that departs; None if all agree."""
        return next((part for part in self.parts if not part.agrees), None)

    @property
    def verdict(self) -> str:
        """One sentence: that all parts agree, or which departs first and by how much."""
        first = self.first_departure
        if first is None:
            return f"all {len(self.parts)} parts agree with Hugging Face up to rounding"
        return (
            f"the first part that departs is {first.name}: "
            f"off by {first.error:.1g}, where rounding explains at most {first.allowed:.0e}"
        )

    def _shown(self) -> display.Shown:
        rows = [
            (part.name, _size(part), "agrees" if part.agrees else "departs") for part in self.parts
        ]
        return display.table(["part", "largest error", ""], rows, self.verdict)

    @property
    def text(self) -> str:
        """The table as plain text, the same on every machine as long as all parts agree."""
        return self._shown().text

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self._shown()._repr_mimebundle_()

    def plot(self, title: str = "Error by part") -> Any:
        """Draw the error of each part beside what is allowed; returns matplotlib's figure."""
        from bertlab.course.figures import BLUE, GREY, ORANGE, figure, label

        drawn, axes = figure(figsize=(7.0, 1.2 + 0.19 * len(self.parts)))
        places = range(len(self.parts))
        floor = min(part.allowed for part in self.parts) / 1e3
        axes.scatter(
            [max(part.allowed, floor) for part in self.parts],
            places,
            marker="|",
            s=90,
            color=GREY,
            label="allowed: rounding explains it",
            zorder=2,
        )
        for agrees, color, marker, name in (
            (True, BLUE, "o", "agrees"),
            (False, ORANGE, "X", "departs"),
        ):
            chosen = [(i, part) for i, part in enumerate(self.parts) if part.agrees == agrees]
            if chosen:
                errors = [min(max(part.error, floor), 1e6) for _, part in chosen]
                axes.scatter(
                    errors, [i for i, _ in chosen], marker=marker, color=color, label=name, zorder=3
                )
        axes.set_xscale("log")
        axes.set_yticks(list(places), [part.name for part in self.parts], fontsize=8)
        axes.invert_yaxis()
        label(
            axes,
            title,
            "largest absolute error (logarithmic; exact agreement at the left edge)",
            "",
        )
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=3, fontsize=8)
        return drawn


def _size(part: Part) -> str:
    return "within rounding" if part.agrees else f"{part.error:.1g}"


def compare(ours: nn.Module, theirs: nn.Module, batch: Batch) -> Agreement:
    """Compare every part of a model with Hugging Face's model of the same weights.

    Both run as they are (in eval mode or not: turn dropout off first), on the device and in the
    dtype they have.

    Args:
        ours: a `BertModel`, `BertForPreTraining` or `BertForMaskedLM` of bertlab.
        theirs: Hugging Face's model of the same name.
        batch: `input_ids`, `attention_mask` if anything is padded, `token_type_ids`; no labels.

    Returns:
        An `Agreement` over the embeddings, each layer's attention and feed-forward, the pooler
        and the heads, as far as both models have them.
    """
    real = _real_tokens(batch)
    mine = _recorded(ours, our_parts(ours), batch)
    yardstick = _recorded(theirs, their_parts(theirs), batch)
    exact = copy.deepcopy(theirs).to("cpu").double()
    truth = _recorded(exact, their_parts(exact), {name: x.cpu() for name, x in batch.items()})
    return Agreement(
        tuple(
            compared(name, mine[name], yardstick[name], truth[name], real)
            for name in truth
            if name in mine
        )
    )


def compared(
    name: str,
    given: Tensor,
    yardstick: Tensor,
    truth: Tensor,
    real: Tensor | None = None,
    scale: float = 0.0,
) -> Part:
    """Compare one tensor with the truth.

    Args:
        given: what is judged.
        yardstick: the reference's own, in the type and on the device of `given`.
        truth: the reference's in float64.
        real: boolean `[batch, seq]`; where the tensors have these two axes, only True places
            count.
        scale: the size of the terms that were summed up, if it is larger than the truth's.
    """
    if given.shape != truth.shape or given.dtype != yardstick.dtype:
        return Part(name, float("inf"), _allowed(yardstick, truth, scale))
    if real is not None and truth.shape[:2] == real.shape:
        given, yardstick, truth = (x.cpu()[real] for x in (given, yardstick, truth))
    return Part(name, _error(given, truth), _allowed(yardstick, truth, scale))


def _error(given: Tensor, truth: Tensor) -> float:
    error = (given.detach().cpu().double() - truth.detach()).abs()
    return float("inf") if error.isnan().any() else float(error.max()) if error.numel() else 0.0


def _allowed(yardstick: Tensor, truth: Tensor, scale: float) -> float:
    ulp = max(_largest(truth), scale) * torch.finfo(yardstick.dtype).eps
    return max(MULTIPLE * _error(yardstick, truth), FLOOR_ULP * ulp)


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _real_tokens(batch: Batch) -> Tensor | None:
    mask = batch.get("attention_mask")
    return None if mask is None else mask.cpu() != 0


# --- what stands where in the two models ---


def our_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a bertlab model whose outputs are compared, by the part's name."""
    bert: Any = getattr(model, "bert", model)
    yield "embeddings", bert.embeddings
    for number, layer in enumerate(bert.encoder.layers):
        yield f"layer {number} attention", layer.attention_norm
        yield f"layer {number} feed-forward", layer
    if any(True for _ in bert.pooler.parameters()):
        yield "pooler", bert.pooler
    for name, head in (("MLM logits", "mlm_head"), ("NSP logits", "nsp_head")):
        if hasattr(model, head):
            yield name, getattr(model, head)


def their_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a Hugging Face model whose outputs are compared, by the part's name."""
    bert: Any = getattr(model, "bert", model)
    yield "embeddings", bert.embeddings
    for number, layer in enumerate(bert.encoder.layer):
        yield f"layer {number} attention", layer.attention.output
        yield f"layer {number} feed-forward", layer
    if bert.pooler is not None:
        yield "pooler", bert.pooler
    heads: Any = getattr(model, "cls", None)
    for name, head in (("MLM logits", "predictions"), ("NSP logits", "seq_relationship")):
        if hasattr(heads, head):
            yield name, getattr(heads, head)


@torch.no_grad()
def _recorded(
    model: nn.Module, parts: Iterator[tuple[str, nn.Module]], batch: Batch
) -> dict[str, Tensor]:
    """Run a model and return what each of its parts gave."""
    seen: dict[str, Tensor] = {}
    with _hooks(parts, seen):
        model(**batch)
    return seen


@contextmanager
def _hooks(parts: Iterator[tuple[str, nn.Module]], seen: dict[str, Tensor]) -> Iterator[None]:
    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            seen[name] = (output[0] if isinstance(output, tuple) else output).detach()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --- gradients ---


def compare_gradients(
    ours: nn.Module, theirs: nn.Module, batch: Batch, names: Mapping[str, str]
) -> Agreement:
    """Compare the loss, and its gradient with respect to every parameter.

    Args:
        ours, theirs: as for `compare`, with a head; dropout off.
        batch: with the labels from which the models compute their loss.
        names: Hugging Face's parameter names to ours, `bertlab.weights.hf_name_map(config)`.

    Returns:
        An `Agreement` whose parts are the loss and the parameters, by our names.
    """
    exact = copy.deepcopy(theirs).to("cpu").double()
    mine = _gradients(ours, batch)
    yardstick = _renamed(_gradients(theirs, batch), names)
    truth = _renamed(_gradients(exact, {name: x.cpu() for name, x in batch.items()}), names)
    # The softmax cancels the bias of the keys, so its exact gradient is 0 and what is computed is
    # the rounding of terms as large as other gradients are.
    scale = max(_largest(gradient) for name, gradient in truth.items() if name != "loss")
    nothing = torch.tensor([])
    return Agreement(
        tuple(
            compared(
                name,
                mine.get(name, nothing),
                yardstick[name],
                truth[name],
                scale=scale if _largest(truth[name]) < NO_GRADIENT * scale else 0.0,
            )
            for name in truth
        )
    )


def _gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    model.zero_grad()
    return {"loss": loss.detach(), **found}


def _renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    return {names.get(name, name): tensor for name, tensor in tensors.items()}
