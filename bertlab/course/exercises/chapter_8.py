"""Chapter 8: eight bits, a teacher, fewer heads, ONNX, adapters, and honest measurements."""

import copy
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertlab.course.exercise import Case, Exercise, Misconception
from bertlab.course.exercises.support import (
    bert_config,
    error_of,
    gradients,
    integers,
    normal,
    padding_mask,
    parameters_like,
    with_parameters,
)

# --- shared by the exercises: a small BERT that only does what chapter 8 needs -------------------

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.5,
}
LABELS = 4


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.query, self.key = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.value, self.output = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        seen = None if attention_mask is None else attention_mask[:, None, None, :] != 0
        query, key, value = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return self.output(context.transpose(1, 2).flatten(-2))


class _FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class _Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = _Attention(config.hidden_size, config.num_attention_heads)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.feed_forward = _FeedForward(config.hidden_size, config.intermediate_size)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=1e-12)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.attention_norm(x + self.attention(x, attention_mask))
        return self.feed_forward_norm(x + self.feed_forward(x))


class _Embeddings(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type = nn.Embedding(2, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-12)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        return self.norm(self.word(input_ids) + self.position(places) + self.token_type(types))


class _Encoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, *asked: bool
    ) -> tuple[Tensor, None, None]:
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x, None, None


class _Pooler(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x[:, 0]).tanh()


class SmallBert(nn.Module):
    """A BERT with this course's names; `calls` notes how it was called."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embeddings, self.encoder = _Embeddings(config), _Encoder(config)
        self.pooler = _Pooler(config)
        self.calls: list[str] = []

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> Any:
        """Read a batch, padding and all."""
        self.calls.append("padded")
        last = self.encoder(self.embeddings(input_ids, token_type_ids), attention_mask)[0]
        return SimpleNamespace(last_hidden_state=last, pooler_output=self.pooler(last))

    def forward_packed(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Any:
        """Stands for the forward pass that computes nothing for padding."""
        self.calls.append("packed")
        embedded = self.embeddings(input_ids, token_type_ids)
        last = self.encoder(embedded, attention_mask)[0]
        return SimpleNamespace(last_hidden_state=last, pooler_output=self.pooler(last))


class SmallClassifier(nn.Module):
    """A classifier with this course's names."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.config = bert_config(**{**SIZES, **changes})
        self.bert = SmallBert(self.config)
        self.dropout = nn.Dropout(self.config.hidden_dropout_prob)
        self.classifier = nn.Linear(self.config.hidden_size, LABELS)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """Score the classes."""
        read = self.bert(input_ids, attention_mask, token_type_ids)
        logits = self.classifier(self.dropout(read.pooler_output))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


def drawn_state(rng: np.random.Generator, **changes: Any) -> dict[str, Tensor]:
    """Parameters of a `SmallClassifier`, all drawn, with peaked attention."""
    scales = {"query.weight": 3.0, "key.weight": 3.0, "word.weight": 3.0}
    return parameters_like(SmallClassifier(**changes), rng, scales)


def model_of(state: Mapping[str, Tensor], train: bool = False, **changes: Any) -> Any:
    """A `SmallClassifier` with these parameters, its device and its type."""
    return with_parameters(SmallClassifier(**changes), state, train)


def drawn_batch(rng: np.random.Generator, lengths: Sequence[int], seq: int) -> dict[str, Tensor]:
    """A batch with padding, pairs and labels."""
    mask = padding_mask(lengths, seq)
    ids = integers(rng, 1, SIZES["vocab_size"], len(lengths), seq) * mask
    types = (torch.arange(seq)[None, :] >= 2).long() * mask
    labels = integers(rng, 0, LABELS, len(lengths))
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "labels": labels}


def texts_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch without its labels."""
    return {name: x for name, x in batch.items() if name != "labels"}


def mode(model: nn.Module) -> str:
    """The mode that a model is in."""
    return "training" if model.training else "eval"


# --- 8.1 eight bits ------------------------------------------------------------------------------


#: ONNX Runtime's operator DynamicQuantizeLinear, which writes numbers as uint8, row after row.
_QUANTIZE = """
<ir_version: 9, opset_import: ["": 20]>
quantize (float[rows, n] x) => (uint8[rows, n] uint8, float[rows] scale, uint8[rows] zero_point)
{
    uint8, scale, zero_point = Scan <
        num_scan_inputs = 1,
        body = one_row (float[n] row) => (uint8[n] q, float s, uint8 z)
            { q, s, z = DynamicQuantizeLinear(row) }
    > (x)
}
"""


@cache
def _quantizer() -> Any:
    """Runs `_QUANTIZE`."""
    import onnxruntime
    from onnx import parser

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        parser.parse_model(_QUANTIZE).SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
    )


class Int8:
    """ONNX Runtime's quantization, one range for each row. Misconceptions replace a step."""

    levels = 255.0

    def quantize(self, weight: Tensor, per_channel: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """As exercise 8.1's function."""
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        ranges = wide.reshape(-1, weight.shape[-1]) if per_channel else wide.reshape(1, -1)
        found = _quantizer().run(None, {"x": ranges.cpu().float().numpy()})
        uint8, scale, zero_point = (torch.from_numpy(np.asarray(x)) for x in found)
        int8 = (uint8.int() - 128).to(torch.int8).reshape(weight.shape)
        shape = (*weight.shape[:-1], 1) if per_channel else (1,) * weight.ndim
        if wide.dtype == torch.float64:
            scale = self.exact_scale(ranges)
        parts = int8, scale.reshape(shape), (zero_point.int() - 128).reshape(shape)
        return tuple(part.to(weight.device) for part in parts)  # type: ignore[return-value]  # three

    def exact_scale(self, ranges: Tensor) -> Tensor:
        """The scale of each row in float64, which the operator has in float32 alone."""
        low, high = ranges.amin(1).clamp(max=0), ranges.amax(1).clamp(min=0)
        return torch.where(low == high, 1.0, (high - low) / 255)

    def __call__(self, weight: Tensor, per_channel: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        return self.quantize(weight, per_channel)


class _ByHand(Int8):
    """The same, step by step, for the versions that get a step wrong."""

    def quantize(self, weight: Tensor, per_channel: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        axes = self.axes(weight, per_channel)
        low, high = weight.amin(axes, keepdim=True), weight.amax(axes, keepdim=True)
        scale, zero = self.scales(*self.bounds(low, high))
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        shifted = self.rounded(weight / scale) + zero
        return self.cut(shifted), scale, zero.to(torch.int32)

    def axes(self, weight: Tensor, per_channel: bool) -> tuple[int, ...]:
        return (-1,) if per_channel else tuple(range(weight.ndim))

    def bounds(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return low.clamp(max=0), high.clamp(min=0)

    def scales(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        scale = (high - low) / self.levels
        return scale, (-128 - low / torch.where(scale == 0, 1, scale)).round()

    def rounded(self, x: Tensor) -> Tensor:
        return x.round()

    def cut(self, x: Tensor) -> Tensor:
        return x.clamp(-128, 127).to(torch.int8)


class _Symmetric(_ByHand):
    def scales(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.maximum(-low, high) / 127
        return scale, torch.zeros_like(scale)


class _WithoutZero(_ByHand):
    def bounds(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return low, high


class _CutOff(_ByHand):
    def rounded(self, x: Tensor) -> Tensor:
        return x.trunc()


class _ByColumn(_ByHand):
    def axes(self, weight: Tensor, per_channel: bool) -> tuple[int, ...]:
        return (0,) if per_channel else tuple(range(weight.ndim))


class _AlwaysByRow(_ByHand):
    def axes(self, weight: Tensor, per_channel: bool) -> tuple[int, ...]:
        return (-1,)


class _Wrapped(_ByHand):
    def cut(self, x: Tensor) -> Tensor:
        return ((x.long() + 128) % 256 - 128).to(torch.int8)


class _Levels256(_ByHand):
    levels = 256.0


_RIGHT = Int8()


class Int8Linear(nn.Module):
    """What the int8 stand for, multiplied as floats. The misconceptions replace one step."""

    quantize: Callable[..., tuple[Tensor, Tensor, Tensor]] = staticmethod(_RIGHT)
    weight: Tensor
    scale: Tensor
    zero_point: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, per_channel: bool = True) -> None:
        super().__init__()
        parts = self.quantize(linear.weight.detach(), per_channel)
        for name, value in zip(("weight", "scale", "zero_point"), parts, strict=True):
            self.register_buffer(name, value)
        bias = linear.bias
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply what the int8 stand for."""
        weight = (self.weight.int() - self.zero_point) * self.scale
        bias = None if self.bias is None else self.bias.to(weight.dtype)
        return F.linear(self.seen(x), weight, bias).to(x.dtype)

    def seen(self, x: Tensor) -> Tensor:
        """The input as its int8 stand for it."""
        x_int8, scale, zero_point = self.quantize(x)
        return (x_int8.int() - zero_point) * scale


class _OneRange(Int8Linear):
    def seen(self, x: Tensor) -> Tensor:
        x_int8, scale, zero_point = self.quantize(x, per_channel=False)
        return (x_int8.int() - zero_point) * scale


class _FloatInput(Int8Linear):
    def seen(self, x: Tensor) -> Tensor:
        return x


class _NoBias(Int8Linear):
    def forward(self, x: Tensor) -> Tensor:
        bias: Any = 0 if self.bias is None else self.bias
        return super().forward(x) - bias


class _FloatKept(Int8Linear):
    def __init__(self, linear: nn.Linear, per_channel: bool = True) -> None:
        super().__init__(linear, per_channel)
        self.linear = linear


def _quantizing(wrong: Int8) -> dict[str, Any]:
    """A wrong `quantize_int8`, and the layer that is built on it."""
    return {
        "quantize_int8": wrong,
        "Int8Linear": type("Int8Linear", (Int8Linear,), {"quantize": staticmethod(wrong)}),
    }


def _off_ties(rng: np.random.Generator, rows: int, width: int, positive: bool = False) -> Tensor:
    """Numbers that lie well inside the steps of their row's scale, so that no rounding can flip."""
    scale = rng.uniform(0.5, 2.0, (rows, 1)) * 10.0 ** rng.integers(-3, 1, (rows, 1))
    below = 0 if positive else rng.integers(60, 200, (rows, 1))
    steps = rng.integers(-below + 1, 255 - below, (rows, width)) + rng.uniform(
        -0.3, 0.3, (rows, width)
    )
    steps[:, :1], steps[:, 1:2] = 255 - below, -below
    if positive:
        steps[:, 1:2] = rng.integers(60, 100, (rows, 1))
        steps[:, 2:] = np.maximum(steps[:, 2:], 60)
    return torch.from_numpy((steps * scale).astype(np.float32))


def _int8_cases(rng: np.random.Generator) -> Iterator[Case]:
    for name, weight in (
        ("rows of very different sizes", _off_ties(rng, 5, 14)),
        ("rows that are all above 0", _off_ties(rng, 3, 9, positive=True)),
    ):
        yield Case(f"a weight, {name}", {"weight": weight})
    one_row = _off_ties(rng, 1, 4 * 9)[:, rng.permutation(4 * 9)]
    yield Case("one range for all", {"weight": one_row.view(4, 9), "per_channel": False})
    halves = torch.tensor([[153.5, -101.5, 0.0, 1.5, 2.5, -0.5, -3.5]]) * 2.0 ** int(
        rng.integers(-3, 3)
    )
    yield Case("halves, which go to the even number", {"weight": halves})
    zeros = torch.cat([torch.zeros(1, 6), _off_ties(rng, 1, 6)])
    yield Case("a row of zeros", {"weight": zeros, "restored": True})
    for name, bias, shape in (
        ("a batch", True, (2, 3)),
        ("no bias", False, (4,)),
        ("one text of one token", True, (1, 1)),
    ):
        x = _off_ties(rng, math.prod(shape), 10).unflatten(0, shape)
        linear = {"weight": _off_ties(rng, 6, 10), "bias": normal(rng, 6) if bias else None}
        yield Case(f"a layer: {name}", {"x": x, "linear": linear})


def _int8_probe(part: Any, **inputs: Any) -> Any:
    if "linear" in inputs:
        return _layer_of_int8(part, **inputs)
    per_channel = inputs.get("per_channel", True)
    found = part.quantize_int8(inputs["weight"], per_channel)
    int8, scale, zero_point = found
    if inputs.get("restored"):
        restored = (int8.int() - zero_point) * scale
        above = bool((scale > 0).all())
        return {"restored": restored, "dtype": str(int8.dtype), "scales are above 0": above}
    return {"int8": int8, "zero_point": zero_point, "scale": scale}


def _layer_of_int8(part: Any, x: Tensor, linear: Mapping[str, Any]) -> dict[str, Any]:
    weight, bias = linear["weight"], linear["bias"]
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None).to(weight)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    made = part.Int8Linear(layer)
    state = made.state_dict()
    large = [n for n, x in state.items() if x.is_floating_point() and x.numel() >= weight.numel()]
    return {
        "output": made(x),
        "weight": str(made.weight.dtype),
        "tensors of floats as large as the weight": large,
        "parameters to train": len(list(made.parameters())),
        "the linear layer is unchanged": torch.equal(layer.weight, weight),
    }


INT8 = Exercise(
    id="8.1",
    reference={"quantize_int8": _RIGHT, "Int8Linear": Int8Linear},
    reference_name="ONNX Runtime's DynamicQuantizeLinear",
    cases=_int8_cases,
    probe=_int8_probe,
    misconceptions=(
        Misconception(
            "the range is symmetric around 0",
            "Symmetric int8 has the zero point 0 and is simpler, but a row from -1 to 3 wastes "
            "a third of its steps on numbers that it does not have. Here the range is what the row "
            "has: from low to high.",
            _quantizing(_Symmetric()),
        ),
        Misconception(
            "0 need not be inside the range",
            "A row that is all above 0 still must be able to say 0 exactly: padding and dropped "
            "units are 0. So low is at most 0 and high at least 0, before the scale is computed.",
            _quantizing(_WithoutZero()),
        ),
        Misconception(
            "numbers are cut off instead of rounded",
            "Converting a float to an integer type drops what stands behind the point. The error "
            "is then up to a whole step instead of half of one, and always toward 0. Round first.",
            _quantizing(_CutOff()),
        ),
        Misconception(
            "each column has a range, not each row",
            "A linear layer's weight is [out, in]: an output is a row. Ranges go along the last "
            "axis, so that one output's scale can be taken out of its sum over the inputs.",
            _quantizing(_ByColumn()),
        ),
        Misconception(
            "per_channel=False is not looked at",
            "Without `per_channel` all numbers share one range, and scale and zero point have one "
            "entry. It is the coarser way, and the chapter measures how much coarser it is.",
            _quantizing(_AlwaysByRow()),
        ),
        Misconception(
            "a number beyond 127 wraps around",
            "When both ends of a range are rounded up, the highest number becomes 128, which int8 "
            "does not have: converted, it comes out as -128, the largest error there is. Clamp.",
            _quantizing(_Wrapped()),
        ),
        Misconception(
            "the range is divided into 256 steps",
            "There are 256 numbers from -128 to 127, but 255 steps between them, as five fingers "
            "have four gaps. With 256 the highest number cannot be reached.",
            _quantizing(_Levels256()),
        ),
        Misconception(
            "all tokens share one range",
            "One token with large activations then makes the steps coarse for all others, and a "
            "text's result depends on what it was batched with. Each token's input has its own.",
            {"Int8Linear": _OneRange},
        ),
        Misconception(
            "the input stays float",
            "Then only the size is smaller. For the multiplication to run in int8, both sides must "
            "be int8: the input is quantized as it comes.",
            {"Int8Linear": _FloatInput},
        ),
        Misconception(
            "the bias is forgotten",
            "The integers give the product alone. The bias stays a float, since it is one number "
            "for each output and costs nothing, and is added after the scales.",
            {"Int8Linear": _NoBias},
        ),
        Misconception(
            "the float weight is kept beside the int8",
            "The layer then needs five bytes for each weight instead of one, in memory and in the "
            "file. Keep only the int8, the scales, the zero points and the bias.",
            {"Int8Linear": _FloatKept},
        ),
    ),
    hints=(
        "`weight.amin(dim=-1, keepdim=True)` is each row's lowest number; for one range, all axes. "
        "Clamp low from above and high from below by 0. A scale of 0 would divide by 0.",
        "scale = (high - low) / 255, and 1 where that is 0. Round -128 - low / scale and weight / "
        "scale each by itself, add, clamp to -128 and 127, convert to torch.int8. In the layer, "
        "quantize the flattened tokens; the simplest right version turns both sides back to float.",
        "(int8.int() - zero_point) * scale gives the floats back. With `int8_matmul` the product "
        "needs two corrections: minus x_zero_point times the sum of (weight - zero_point), and "
        "minus the sum of x_int8 times zero_point. Then both scales, then the bias.",
    ),
)

# --- 8.2 learn from a teacher --------------------------------------------------------------------


class Distillation:
    """`F.kl_div` and `F.cross_entropy`. The misconceptions replace one step."""

    def __call__(
        self,
        student_logits: Tensor,
        teacher_logits: Tensor,
        labels: Tensor,
        temperature: float = 3.0,
        alpha: float = 0.7,
    ) -> Tensor:
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, but must be above 0")
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha is {alpha}, but must be from 0 to 1")
        if student_logits.shape != teacher_logits.shape:
            shapes = list(student_logits.shape), list(teacher_logits.shape)
            raise ValueError(f"the logits have shapes {shapes[0]} and {shapes[1]}")
        soft = self.soft(student_logits, self.taught(teacher_logits), temperature)
        return alpha * soft + (1 - alpha) * self.hard(student_logits, labels, temperature)

    def taught(self, teacher_logits: Tensor) -> Tensor:
        return teacher_logits.detach()

    def soft(self, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        own = F.log_softmax(student / temperature, dim=-1)
        return temperature**2 * self.divergence(own, F.softmax(teacher / temperature, dim=-1))

    def divergence(self, own: Tensor, taught: Tensor) -> Tensor:
        return F.kl_div(own, taught, reduction="batchmean")

    def hard(self, student: Tensor, labels: Tensor, temperature: float) -> Tensor:
        known = labels != -100
        if not known.any():
            return student.sum() * 0
        return F.cross_entropy(student[known], labels[known])


class _NotSquared(Distillation):
    def soft(self, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        return super().soft(student, teacher, temperature) / temperature**2


class _TeacherAlone(Distillation):
    def soft(self, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        own = F.log_softmax(student, dim=-1)
        return temperature**2 * self.divergence(own, F.softmax(teacher / temperature, dim=-1))


class _Reversed(Distillation):
    def divergence(self, own: Tensor, taught: Tensor) -> Tensor:
        return F.kl_div(taught.log(), own.exp(), reduction="batchmean")


class _MeanOfElements(Distillation):
    def divergence(self, own: Tensor, taught: Tensor) -> Tensor:
        return F.kl_div(own, taught, reduction="none").mean()


class _HardWithTemperature(Distillation):
    def hard(self, student: Tensor, labels: Tensor, temperature: float) -> Tensor:
        return super().hard(student / temperature, labels, temperature)


class _TeacherLearns(Distillation):
    def taught(self, teacher_logits: Tensor) -> Tensor:
        return teacher_logits


class _NotANumber(Distillation):
    def hard(self, student: Tensor, labels: Tensor, temperature: float) -> Tensor:
        return F.cross_entropy(student, labels)


def _alpha_swapped(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    temperature: float = 3.0,
    alpha: float = 0.7,
) -> Tensor:
    return Distillation()(student_logits, teacher_logits, labels, temperature, 1 - alpha)


def _distillation_cases(rng: np.random.Generator) -> Iterator[Case]:
    def inputs(**changes: Any) -> dict[str, Any]:
        return {
            "student": normal(rng, 4, 5, scale=2.0),
            "teacher": normal(rng, 4, 5, scale=2.0),
            "labels": integers(rng, 0, 5, 4),
        } | changes

    yield Case("temperature 3, alpha 0.7", inputs())
    yield Case("temperature 1.5, alpha 0.2", inputs(temperature=1.5, alpha=0.2))
    some = integers(rng, 0, 5, 4)
    some[1] = some[2] = -100
    yield Case("two of four texts have no label", inputs(labels=some, alpha=0.4))
    yield Case("no text has a label", inputs(labels=torch.full((4,), -100)))
    yield Case("temperature 0", inputs(temperature=0.0, refused=0.0))
    yield Case("alpha 1.5", inputs(alpha=1.5, refused=1.5))
    yield Case("teacher with other classes", inputs(teacher=normal(rng, 4, 7), refused=7))


def _distillation_probe(
    part: Any, student: Tensor, teacher: Tensor, labels: Tensor, **options: Any
) -> Any:
    if "refused" in options:
        number = options.pop("refused")
        call = part.distillation_loss
        return error_of(lambda: call(student, teacher, labels, **options), number)
    student, teacher = student.clone().requires_grad_(), teacher.clone().requires_grad_()
    loss = part.distillation_loss(student, teacher, labels, **options)
    wanted = {"student": student, "teacher": teacher}
    return {"loss": loss.detach(), **gradients(loss, torch.ones_like(loss), wanted)}


DISTIL = Exercise(
    id="8.2",
    reference={"distillation_loss": Distillation()},
    reference_name="torch.nn.functional.kl_div and cross_entropy",
    cases=_distillation_cases,
    probe=_distillation_probe,
    misconceptions=(
        Misconception(
            "the temperature is not squared into the loss",
            "Dividing logits by T makes the gradient of the teacher's part smaller by T squared. "
            "Without the factor, alpha means something else at every temperature.",
            {"distillation_loss": _NotSquared()},
        ),
        Misconception(
            "the student's logits are not divided by the temperature",
            "Both distributions are softened, or they cannot agree: a student with its teacher's "
            "own logits would have a loss above 0.",
            {"distillation_loss": _TeacherAlone()},
        ),
        Misconception(
            "the divergence is the other way round",
            "KL is not symmetric. KL(teacher || student) weighs each class by the teacher's "
            "probability. `F.kl_div` takes the student's log-probabilities first and the target "
            "second, the other way from how it is written.",
            {"distillation_loss": _Reversed()},
        ),
        Misconception(
            "the divergence is averaged over classes too",
            "`reduction='mean'` divides by texts times classes, so the teacher counts less the "
            "more classes there are. A divergence is a sum over classes: `batchmean`.",
            {"distillation_loss": _MeanOfElements()},
        ),
        Misconception(
            "alpha weights the labels' part",
            "alpha is the weight of the teacher's part and 1 - alpha that of the labels. Papers "
            "use both conventions, so a copied alpha can mean the opposite.",
            {"distillation_loss": _alpha_swapped},
        ),
        Misconception(
            "the labels' part has the temperature too",
            "A label is a fact and has no small probabilities to bring out. The cross-entropy is "
            "taken at temperature 1, as the student will be used.",
            {"distillation_loss": _HardWithTemperature()},
        ),
        Misconception(
            "the teacher gets a gradient",
            "If the optimizer held the teacher's parameters it would move toward the student, and "
            "the graph of the larger model costs memory in any case. `detach` it.",
            {"distillation_loss": _TeacherLearns()},
        ),
        Misconception(
            "a batch without labels gives NaN",
            "The mean over no text is 0 / 0. Texts without a label can still be learned from, "
            "since the teacher has an opinion: divide the sum by at least 1.",
            {"distillation_loss": _NotANumber()},
        ),
    ),
    hints=(
        "Two parts, each one or two lines: `F.kl_div` between softened distributions, and "
        "`F.cross_entropy` between the student's logits as they are and the labels.",
        "`F.kl_div(input, target)` wants log-probabilities as input, and probabilities as target "
        "unless `log_target=True`. Its `reduction='batchmean'` divides by the number of texts.",
        "cross_entropy(..., ignore_index=-100, reduction='sum') divided by the number of labels, "
        "clamped to at least 1. The teacher's logits `.detach()`ed. alpha * T**2 * soft + (1 - "
        "alpha) * hard. Check temperature, alpha and the shapes first.",
    ),
)

# --- 8.3 prune heads -----------------------------------------------------------------------------


class Importance:
    """The gate's derivative by its formula, text by text. Misconceptions replace one step."""

    def __call__(self, model: Any, batches: Iterable[Mapping[str, Tensor]]) -> Tensor:
        was_training = model.training
        self.prepare(model)
        found = []
        for batch in batches:
            found += self.of_batch(model, batch)
        self.restore(model, was_training)
        if not found:
            raise ValueError("batches is empty, but must have at least one batch")
        return self.joined(found)

    def prepare(self, model: Any) -> None:
        model.eval()

    def restore(self, model: Any, was_training: bool) -> None:
        model.train(was_training)

    def of_batch(self, model: Any, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """For each text `[layers, heads]`: the derivative of its loss by each head's gate."""
        rows = range(len(batch["input_ids"]))
        return [self.slopes(model, {n: x[row, None] for n, x in batch.items()}) for row in rows]

    def slopes(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        attentions = [layer.attention for layer in model.bert.encoder.layers]
        kept: list[Tensor] = []

        def keep(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
            leaf = inputs[0] if inputs[0].requires_grad else inputs[0].requires_grad_()
            kept.append(leaf)
            return leaf

        hooks = [a.output.register_forward_pre_hook(keep) for a in attentions]
        with torch.enable_grad():
            loss = model(**batch).loss
        for hook in hooks:
            hook.remove()
        slopes = self.backward(model, loss, kept)
        most = max(a.num_heads for a in attentions)
        rows = []
        for a, context, slope in zip(attentions, kept, slopes, strict=True):
            parts = (context * slope).detach().unflatten(-1, (a.num_heads, -1)).sum(dim=(0, 1, 3))
            rows.append(F.pad(parts, (0, most - a.num_heads)))
        return torch.stack(rows)

    def backward(self, model: Any, loss: Tensor, kept: list[Tensor]) -> Sequence[Tensor]:
        return torch.autograd.grad(loss, kept)

    def joined(self, found: list[Tensor]) -> Tensor:
        return torch.stack(found).abs().mean(dim=0)


class _Signed(Importance):
    def joined(self, found: list[Tensor]) -> Tensor:
        return torch.stack(found).mean(dim=0).abs()


class _ByBatch(Importance):
    def of_batch(self, model: Any, batch: Mapping[str, Tensor]) -> list[Tensor]:
        return [self.slopes(model, batch)]


class _NoAbsolute(Importance):
    def joined(self, found: list[Tensor]) -> Tensor:
        return torch.stack(found).mean(dim=0)


class _LeftInEval(Importance):
    def restore(self, model: Any, was_training: bool) -> None:
        model.eval()


class _LeavesGradients(Importance):
    def backward(self, model: Any, loss: Tensor, kept: list[Tensor]) -> Sequence[Tensor]:
        found = torch.autograd.grad(loss, kept, retain_graph=True)
        loss.backward()
        return found


class Pruning:
    """PyTorch's `index_select` on heads instead of units. The misconceptions replace one step."""

    def __call__(self, model: Any, heads: Mapping[int, Iterable[int]]) -> None:
        layers = getattr(model, "bert", model).encoder.layers
        for number, gone in heads.items():
            self.check(layers, number, set(gone))
        for number, gone in heads.items():
            self.cut(layers[number].attention, set(gone))

    def check(self, layers: Any, number: int, gone: set[int]) -> None:
        if not 0 <= number < len(layers):
            raise ValueError(f"layer is {number}, but the model has layers 0 to {len(layers) - 1}")
        had = layers[number].attention.num_heads
        if not all(0 <= head < had for head in gone):
            raise ValueError(f"heads[{number}] is {sorted(gone)}, but must be from 0 to {had - 1}")
        if len(gone) == had:
            raise ValueError(f"heads[{number}] is {sorted(gone)}: all of {had}; one must be left")

    @torch.no_grad()
    def cut(self, attention: Any, gone: set[int]) -> None:
        had = attention.num_heads
        left = [head for head in range(had) if head not in gone]
        for name in ("query", "key", "value", "output"):
            old, axis = getattr(attention, name), int(name == "output")
            index = torch.tensor(left, device=old.weight.device)

            def kept(x: Tensor, axis: int, index: Tensor = index) -> Tensor:
                by_head = x.unflatten(axis, (had, -1))
                return by_head.index_select(axis, index).flatten(axis, axis + 1)

            weight = kept(old.weight, axis)
            made = nn.Linear(weight.shape[1], weight.shape[0]).to(weight)
            made.weight.copy_(weight)
            made.bias.copy_(old.bias if axis else kept(old.bias, 0))
            made.requires_grad_(old.weight.requires_grad).train(old.training)
            setattr(attention, name, made)
        attention.num_heads = self.count(attention, left)

    def count(self, attention: Any, left: list[int]) -> int:
        return len(left)


class _ByOldNumbers(Pruning):
    """Remembers what is gone, and counts the heads that were there at first."""

    def cut(self, attention: Any, gone: set[int]) -> None:
        before = getattr(attention, "gone", set())
        old = [h for h in range(attention.num_heads + len(before)) if h not in before]
        attention.gone = before | gone
        super().cut(attention, {old.index(head) for head in gone if head in old})


class _OnlyZeroed(Pruning):
    @torch.no_grad()
    def cut(self, attention: Any, gone: set[int]) -> None:
        size = attention.query.out_features // attention.num_heads
        for head in gone:
            attention.output.weight[:, head * size : (head + 1) * size] = 0


class _KeepsTheGone(Pruning):
    def cut(self, attention: Any, gone: set[int]) -> None:
        super().cut(attention, set(range(attention.num_heads)) - gone)


class _CountKept(Pruning):
    def count(self, attention: Any, left: list[int]) -> int:
        return attention.num_heads


class _Unchecked(Pruning):
    """Finds out in the middle."""

    def __call__(self, model: Any, heads: Mapping[int, Iterable[int]]) -> None:
        layers = getattr(model, "bert", model).encoder.layers
        for number, gone in heads.items():
            self.check(layers, number, set(gone))
            self.cut(layers[number].attention, set(gone))


class _LeavesNone(Pruning):
    def check(self, layers: Any, number: int, gone: set[int]) -> None:
        if 0 <= number < len(layers) and len(gone) == layers[number].attention.num_heads:
            return
        super().check(layers, number, gone)


def _head_cases(rng: np.random.Generator) -> Iterator[Case]:
    def inputs(**more: Any) -> dict[str, Any]:
        batch = drawn_batch(rng, [5, 3], 5)
        return {"state": drawn_state(rng), "batches": [batch], **more}

    batches = [drawn_batch(rng, [6, 4, 2], 6), drawn_batch(rng, [3], 3)]
    state = drawn_state(rng)
    yield Case(
        "importance, batches of three texts and of one, a model in training mode",
        {"state": state, "batches": batches, "train": True},
    )
    one = int(rng.integers(3))
    plan = [{0: [one], 1: [2, 1, 2]}]
    yield Case("a head of one layer, two of the other, one of them named twice", inputs(heads=plan))
    yield Case("two prunings of one layer", inputs(heads=[{1: [0]}, {1: [1]}]))
    yield Case("a BertModel without a head on top", inputs(heads=[{1: [2]}], bare=True))
    wrong = [{0: [1], 2: [0]}, {0: [1], 1: [3]}, {0: [1], 1: [0, 1, 2]}, {0: [1], 1: [-2]}]
    yield Case(
        "what is not there, and all heads of a layer", inputs(heads=wrong, refused=[2, 3, 1, -2])
    )


def _head_probe(
    part: Any,
    state: Mapping[str, Tensor],
    batches: list[Any],
    train: bool = False,
    heads: list[dict[int, list[int]]] | None = None,
    refused: list[int] | None = None,
    bare: bool = False,
) -> Any:
    model = model_of(state, train)
    if heads is None:
        importance = part.head_importance(model, batches)
        grads = [name for name, p in model.named_parameters() if p.grad is not None]
        return {
            "importance": importance.to(state["classifier.bias"]),
            "mode": mode(model),
            "parameters that got a gradient": len(grads),
            "without a batch": error_of(lambda: part.head_importance(model, [])),
        }
    if refused is not None:
        found: dict[str, Any] = {
            f"{plan}": error_of(lambda plan=plan: part.prune_heads(model, plan), number)
            for plan, number in zip(heads, refused, strict=True)
        }
    else:
        found = {}
        for step in heads:
            part.prune_heads(model.bert if bare else model, step)
    return found | _pruned(model, texts_of(batches[0]))


def _pruned(model: Any, texts: Mapping[str, Tensor]) -> dict[str, Any]:
    attentions = [layer.attention for layer in model.bert.encoder.layers]
    linears = {
        f"layer {number}, {name}": getattr(attention, name)
        for number, attention in enumerate(attentions)
        for name in ("query", "key", "value", "output")
    }
    shapes = {name: list(linear.weight.shape) for name, linear in linears.items()}
    said = [[linear.out_features, linear.in_features] for linear in linears.values()]
    with torch.no_grad():
        logits = model(**texts).logits
    heads = [a.num_heads for a in attentions]
    return {"heads": heads, **shapes, "out_features, in_features": said, "logits": logits}


HEADS = Exercise(
    id="8.3",
    reference={"head_importance": Importance(), "prune_heads": Pruning()},
    reference_name="torch.index_select, equal to heads at 0; Michel et al. 2019, equation 2",
    cases=_head_cases,
    probe=_head_probe,
    misconceptions=(
        Misconception(
            "the absolute value is taken after the mean",
            "A head that helps one text and hurts another then seems useless, because the two "
            "cancel. Take the absolute value for each text, then the mean.",
            {"head_importance": _Signed()},
        ),
        Misconception(
            "a batch is looked at as one text",
            "The gate of a whole batch has the mean of its texts' derivatives, in which they "
            "cancel, and a small batch counts as much as a large one. Each text needs its own "
            "gate: [batch, heads].",
            {"head_importance": _ByBatch()},
        ),
        Misconception(
            "the absolute value is left out",
            "A negative derivative says that the loss falls when the head is turned up, which "
            "makes it an important head, not the least important one.",
            {"head_importance": _NoAbsolute()},
        ),
        Misconception(
            "the model is left in eval mode",
            "Whoever goes on training after looking at the heads trains without dropout and does "
            "not notice. Put the mode back: `eval_mode` (given) does it.",
            {"head_importance": _LeftInEval()},
        ),
        Misconception(
            "gradients are left in the parameters",
            "`loss.backward()` adds to every parameter's `.grad`, and the next optimizer step uses "
            "it. `torch.autograd.grad(loss, gates)` computes only what you ask for.",
            {"head_importance": _LeavesGradients()},
        ),
        Misconception(
            "a second pruning counts the heads that once were",
            "After head 0 is gone, the layer's heads are 0 and 1 again, counted among those left. "
            "The old numbers would have to be remembered, saved and loaded.",
            {"prune_heads": _ByOldNumbers()},
        ),
        Misconception(
            "heads are set to 0 but not removed",
            "The output is right, and the model is as large and as slow as before. Cut the rows of "
            "query, key and value and the columns of output out.",
            {"prune_heads": _OnlyZeroed()},
        ),
        Misconception(
            "the named heads stay and the others go",
            "The dict says which heads go, and what is left is the rest. `index_select` takes what "
            "stays, so the list has to be turned around first.",
            {"prune_heads": _KeepsTheGone()},
        ),
        Misconception(
            "num_heads stays as it was",
            "The layer then splits its fewer units into as many heads as before: narrower ones, "
            "made of the wrong units, or a number that cannot be split at all.",
            {"prune_heads": _CountKept()},
        ),
        Misconception(
            "earlier layers are cut before a later one is refused",
            "An error must leave the model as it was. Look at every layer and head of the plan "
            "first, and only then cut.",
            {"prune_heads": _Unchecked()},
        ),
        Misconception(
            "all heads of a layer may go",
            "A layer without a head has matrices with no rows, which most code that meets them "
            "later cannot handle. Refuse, and leave the model as it was.",
            {"prune_heads": _LeavesNone()},
        ),
    ),
    hints=(
        "A gate is a tensor of ones with `requires_grad`. A `register_forward_pre_hook` on "
        "`attention.output` can multiply what comes in, [batch, seq, hidden], if you unflatten it "
        "into heads. To prune, list the units of the heads that stay.",
        "Give every text its own gate: [batch, num_heads] for each layer. The loss is the mean "
        "over the batch, so multiply it by the batch's size before `torch.autograd.grad(loss, "
        "gates)`. `weight.index_select(0, units)` keeps rows, `(1, units)` columns.",
        "Sum slope.abs() over the batch, add up, divide by the number of texts; remove the hooks. "
        "For pruning: check all first; then query, key, value lose rows of weight and bias, output "
        "loses columns and keeps its bias; set out_features, in_features and num_heads.",
    ),
)

# --- 8.4 export to ONNX --------------------------------------------------------------------------


def as_axes(shapes: Any, names: Sequence[str]) -> dict[str, dict[int, str]]:
    """The free axes that `dynamic_shapes` names, as the exporter of 2019 wants them."""
    if not shapes:
        return {}
    listed = [shapes.get(name) for name in names] if isinstance(shapes, Mapping) else list(shapes)
    axes = {}
    for name, shape in zip(names, listed, strict=False):
        places = shape.items() if isinstance(shape, Mapping) else enumerate(shape or ())
        axes[name] = {
            axis: f"axis_{axis}" for axis, size in places if not isinstance(size, int | None)
        }
    return axes


@contextmanager
def quick_exporter() -> Iterator[None]:
    """Within it, `torch.onnx.export` is its own older way, which takes a hundredth of the time.

    It notes one run of the model. What it is told (inputs, names, free sizes, opset) is the same.
    """
    export = torch.onnx.export

    def quick(model: Any, args: Any = (), f: Any = None, **options: Any) -> Any:
        names = list(options.get("input_names") or [])
        axes = options.get("dynamic_axes") or as_axes(options.get("dynamic_shapes"), names)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            export(
                model,
                args,
                f,
                input_names=names,
                output_names=options.get("output_names"),
                dynamic_axes=axes,
                opset_version=options.get("opset_version"),
                training=torch.onnx.TrainingMode.PRESERVE,
                dynamo=False,
            )

    with mock.patch.object(torch.onnx, "export", quick):
        yield


class Stubborn(nn.Linear):
    """A layer that no exporter can follow."""

    def forward(self, input: Tensor) -> Tensor:
        jit: Any = torch.jit
        if jit.is_tracing() or torch.compiler.is_exporting():
            raise RuntimeError("this layer counts on its fingers")
        return super().forward(input)


class Export:
    """`torch.onnx.export` in its older, quicker way. Misconceptions replace what it is told."""

    opset = 20
    names = ("input_ids", "attention_mask", "token_type_ids")

    def __call__(self, model: Any, path: Any) -> None:
        from bertlab.compression import write_onnx

        was_training = model.training
        self.prepare(model)
        try:
            options = self.options(model)
            with quick_exporter():
                write_onnx(self.module(model), path, args=self.args(model), **options)
        finally:
            self.restore(model, was_training)

    def prepare(self, model: Any) -> None:
        model.eval()

    def restore(self, model: Any, was_training: bool) -> None:
        model.train(was_training)

    def module(self, model: Any) -> Any:
        from bertlab.compression import exportable

        return exportable(model)

    def args(self, model: Any) -> Any:
        from bertlab.compression import example_inputs

        return example_inputs(model)

    def options(self, model: Any) -> dict[str, Any]:
        from bertlab.compression import output_names

        return {
            "input_names": list(self.names),
            "output_names": output_names(model),
            "dynamic_shapes": (self.free(model),) * 3,
            "opset_version": self.opset,
        }

    def free(self, model: Any) -> dict[int, Any]:
        from bertlab.compression import positions_of

        length = torch.export.Dim("length", max=positions_of(model))
        return {0: torch.export.Dim("batch"), 1: length}


class _FixedBatch(Export):
    def free(self, model: Any) -> dict[int, Any]:
        return {1: super().free(model)[1]}


class _FixedLength(Export):
    def free(self, model: Any) -> dict[int, Any]:
        return {0: super().free(model)[0]}


class _InTraining(Export):
    def prepare(self, model: Any) -> None:
        pass


class _EvalAfterwards(Export):
    def restore(self, model: Any, was_training: bool) -> None:
        pass


class _OtherOpset(Export):
    opset = 17


class _OtherNames(Export):
    names = ("ids", "mask", "types")


class _BareErrors(Export):
    def __call__(self, model: Any, path: Any) -> None:
        was_training = model.training
        model.eval()
        try:
            options = self.options(model)
            torch.onnx.export(self.module(model), self.args(model), str(path), **options)
        finally:
            model.train(was_training)


ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1}


def _export_cases(rng: np.random.Generator) -> Iterator[Case]:
    batches = [
        drawn_batch(rng, [seq, *rng.integers(1, seq + 1, size - 1).tolist()], seq)
        for size, seq in ((1, 1), (2, int(rng.integers(9, 17))), (5, 7))  # the example is 2 x 7
    ]
    state = drawn_state(rng, **ONE_LAYER)
    given = {"state": state, "train": True}
    yield Case("a model in training mode, read at three shapes", {**given, "batches": batches})
    for part in ("up", "down"):
        yield Case(f"`{part}` of a layer cannot be exported", {**given, "stubborn": part})


def _export_probe(
    part: Any,
    state: Mapping[str, Tensor],
    train: bool,
    batches: list[dict[str, Tensor]] | None = None,
    stubborn: str | None = None,
) -> Any:
    model = model_of(state, train, **ONE_LAYER)
    with tempfile.TemporaryDirectory() as folder, quick_exporter():
        path = Path(folder) / "model.onnx"
        if batches is None:
            return _not_exported(part, model, path, str(stubborn))
        if state["classifier.bias"].dtype != torch.float64:
            part.export_onnx(model, path)
            return _run_file(path, batches, state["classifier.bias"].device) | {"mode": mode(model)}
    # ONNX Runtime has no float64 for every operator: the truth is the model itself.
    model.eval()
    with torch.no_grad():
        logits = {f"logits {i}": model(**texts_of(b)).logits for i, b in enumerate(batches)}
    return dict.fromkeys(("inputs", "outputs", "opset", "dropout", "mode")) | logits


def _run_file(path: Path, batches: list[dict[str, Tensor]], device: Any) -> dict[str, Any]:
    import onnx
    import onnxruntime

    file = onnx.load(path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session: Any = onnxruntime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"]
    )
    names = [given.name for given in session.get_inputs()]
    found: dict[str, Any] = {
        "inputs": names,
        "outputs": [output.name for output in session.get_outputs()],
        "opset": max(s.version for s in file.opset_import if s.domain in ("", "ai.onnx")),
        "dropout": any(node.op_type == "Dropout" for node in file.graph.node),
    }
    for number, batch in enumerate([] if found["dropout"] else batches):
        feed = dict(zip(names, (x.cpu().numpy() for x in texts_of(batch).values()), strict=False))
        try:
            logits = torch.from_numpy(session.run(None, feed)[0]).to(device)
        except Exception as error:  # of onnxruntime's own types
            logits = f"refused: {type(error).__name__}"
        found[f"logits {number}"] = logits
    return found


def _not_exported(part: Any, model: Any, path: Path, stubborn: str) -> dict[str, Any]:
    path.write_text("what was there before")
    getattr(model.bert.encoder.layers[0].feed_forward, stubborn).__class__ = Stubborn
    name = f"encoder.layers.0.feed_forward.{stubborn}"
    found = error_of(lambda: part.export_onnx(model, path), name, "fingers")
    return {**found, "mode": mode(model), "the file before": path.read_text()}


EXPORT = Exercise(
    id="8.4",
    reference={"export_onnx": Export()},
    reference_name="torch.onnx.export, read by ONNX Runtime",
    cases=_export_cases,
    probe=_export_probe,
    misconceptions=(
        Misconception(
            "the number of texts is fixed",
            "The exporter saw two texts and wrote a file for two. Whatever is to vary must be "
            "named: axis 0 of each input is a `torch.export.Dim`.",
            {"export_onnx": _FixedBatch()},
        ),
        Misconception(
            "the length is fixed",
            "The file then takes texts of exactly the example's length. Axis 1 of each input is "
            "free too, up to as many tokens as the model has positions for.",
            {"export_onnx": _FixedLength()},
        ),
        Misconception(
            "the model is exported in the mode it is in",
            "In training mode dropout becomes part of the file, and a server draws at random for "
            "every answer. Go to eval mode first; `eval_mode` (given) also goes back.",
            {"export_onnx": _InTraining()},
        ),
        Misconception(
            "the model is left in eval mode",
            "An export in the middle of a training run would end dropout for the rest of it, in "
            "silence. Put the mode back: `with eval_mode(model):`.",
            {"export_onnx": _EvalAfterwards()},
        ),
        Misconception(
            "another set of operators is used",
            "The version of the operators decides which programs can read the file and which "
            "operators it may use. Version 20 has GELU as one operator. State it: `OPSET`.",
            {"export_onnx": _OtherOpset()},
        ),
        Misconception(
            "the inputs have other names",
            "Whoever runs the file feeds it by name, and programs for BERT use Transformers' "
            "names: input_ids, attention_mask and token_type_ids, in this order. See `INPUTS`.",
            {"export_onnx": _OtherNames()},
        ),
        Misconception(
            "the exporter's error comes as it is",
            "It is pages long and seldom names the part of your model that is at fault, and the "
            "file that was there may be gone. `write_onnx` (given) says which part, and replaces a "
            "file only by a whole one.",
            {"export_onnx": _BareErrors()},
        ),
    ),
    hints=(
        "One call of `write_onnx`, inside `with eval_mode(model):`. Its first argument is "
        "`exportable(model)`, its second the path; the rest are keywords for `torch.onnx.export`.",
        "args, input_names, output_names, dynamic_shapes, opset_version. `dynamic_shapes` has one "
        "entry for each input: a dict from axis to `torch.export.Dim`.",
        "free = {0: torch.export.Dim('batch'), 1: torch.export.Dim('length', max=positions_of("
        "model))}; dynamic_shapes=(free, free, free); input_names=list(INPUTS); "
        "opset_version=OPSET.",
    ),
)

# --- 8.5 adapters and LoRA -----------------------------------------------------------------------


class Adapter(nn.Module):
    """Houlsby et al.'s adapter of PyTorch's own parts. The misconceptions replace one step."""

    def __init__(self, hidden: int, bottleneck: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(hidden, bottleneck), nn.Linear(bottleneck, hidden)
        self.begin()

    def begin(self) -> None:
        for parameter in self.up.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the small network says."""
        return x + self.up(F.gelu(self.down(x)))


class _RandomStart(Adapter):
    def begin(self) -> None:
        pass


class _NoResidual(Adapter):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.gelu(self.down(x)))


class _NoGelu(Adapter):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x))


class AddAdapters:
    """Puts adapters in. The misconceptions replace one step."""

    def __init__(self, adapter: type[Adapter] = Adapter) -> None:
        self.adapter = adapter

    def __call__(self, model: Any, bottleneck: int = 16) -> Any:
        if any(isinstance(module, Adapter) for module in model.modules()):
            raise ValueError("model has adapters already")
        self.freeze(model)
        for layer in model.bert.encoder.layers:
            for part, name in self.places(layer):
                linear = getattr(part, name)
                adapter = self.adapter(linear.out_features, bottleneck).to(linear.weight)
                setattr(part, name, nn.Sequential(linear, adapter.train(part.training)))
        return self.returned(model)

    def freeze(self, model: Any) -> None:
        model.bert.requires_grad_(False)

    def places(self, layer: Any) -> list[tuple[Any, str]]:
        return [(layer.attention, "output"), (layer.feed_forward, "down")]

    def returned(self, model: Any) -> Any:
        return model


class _NotFrozen(AddAdapters):
    def freeze(self, model: Any) -> None:
        pass


class _HeadFrozen(AddAdapters):
    def freeze(self, model: Any) -> None:
        model.requires_grad_(False)


class _OneOfTwo(AddAdapters):
    def places(self, layer: Any) -> list[tuple[Any, str]]:
        return [(layer.feed_forward, "down")]


class _WrongHalf(AddAdapters):
    def places(self, layer: Any) -> list[tuple[Any, str]]:
        return [(layer.attention, "output"), (layer.feed_forward, "up")]


class _OnACopy(AddAdapters):
    def __call__(self, model: Any, bottleneck: int = 16) -> Any:
        return super().__call__(copy.deepcopy(model), bottleneck)


def _adapting(wrong: type[Adapter]) -> dict[str, Any]:
    """A wrong `Adapter`, and what puts it in."""
    return {"Adapter": wrong, "add_adapters": AddAdapters(wrong)}


class LoRALinear(nn.Module):
    """A change of low rank beside `F.linear`. The misconceptions replace one step."""

    def __init__(self, linear: nn.Linear, rank: int = 8, alpha: float = 16) -> None:
        super().__init__()
        self.linear = linear
        self.freeze()
        self.scaling = alpha / rank
        down = nn.Linear(linear.in_features, rank, bias=False).to(linear.weight)
        self.lora_a = nn.Parameter(down.weight.detach().clone())
        self.lora_b = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))

    def freeze(self) -> None:
        self.linear.requires_grad_(False)

    def change(self) -> Tensor:
        return self.scaling * (self.lora_b @ self.lora_a)

    def forward(self, x: Tensor) -> Tensor:
        """The layer, and the change."""
        return self.linear(x) + F.linear(x, self.change())

    def merge(self) -> nn.Linear:
        """A plain layer with the sum of both."""
        merged = copy.deepcopy(self.linear)
        merged.weight = nn.Parameter((merged.weight + self.change()).detach())
        return merged.requires_grad_(True)


class _Unscaled(LoRALinear):
    def __init__(self, linear: nn.Linear, rank: int = 8, alpha: float = 16) -> None:
        super().__init__(linear, rank, alpha=rank)


class _ByAlphaAlone(LoRALinear):
    def __init__(self, linear: nn.Linear, rank: int = 8, alpha: float = 16) -> None:
        super().__init__(linear, rank, alpha * rank)


class _BothZero(LoRALinear):
    def __init__(self, linear: nn.Linear, rank: int = 8, alpha: float = 16) -> None:
        super().__init__(linear, rank, alpha)
        nn.init.zeros_(self.lora_a)


class _BaseTrained(LoRALinear):
    def freeze(self) -> None:
        pass


class _MergesIntoItself(LoRALinear):
    def merge(self) -> nn.Linear:
        with torch.no_grad():
            self.linear.weight += self.change()
        return copy.deepcopy(self.linear).requires_grad_(True)


class _MergeUnscaled(LoRALinear):
    def merge(self) -> nn.Linear:
        merged = super().merge()
        with torch.no_grad():
            merged.weight -= self.change() - self.lora_b @ self.lora_a
        return merged


def _adapter_cases(rng: np.random.Generator) -> Iterator[Case]:
    for name, zero in (("at the start", True), ("trained", False)):
        yield Case(
            f"an adapter {name}",
            {
                "x": normal(rng, 2, 3, 10),
                "adapter": None if zero else parameters_like(Adapter(10, 4), rng),
                "cotangent": normal(rng, 2, 3, 10),
            },
        )
    batch = texts_of(drawn_batch(rng, [5, 3], 5))
    yield Case("a model with adapters", {"state": drawn_state(rng), "batch": batch})
    for name, rank, alpha in (("rank 2, alpha 16", 2, 16.0), ("rank 4, alpha 6", 4, 6.0)):
        layer = {"weight": normal(rng, 7, 10, scale=0.3), "bias": normal(rng, 7)}
        lora = {"lora_a": normal(rng, rank, 10), "lora_b": normal(rng, 7, rank)}
        given = {"x": normal(rng, 2, 3, 10), "layer": layer, "lora": lora, "alpha": alpha}
        yield Case(f"LoRA, {name}", given)


def _adapter_probe(part: Any, **inputs: Any) -> Any:
    if "state" in inputs:
        return _adapted(part, **inputs)
    if "lora" in inputs:
        return _lora(part, **inputs)
    x = inputs["x"]
    module = part.Adapter(x.shape[-1], 4).to(x)
    if inputs["adapter"] is not None:
        with_parameters(module, inputs["adapter"])
    output = module(x)
    shapes = {name: list(p.shape) for name, p in sorted(module.named_parameters())}
    if inputs["adapter"] is None:  # the gradients depend on what was drawn
        return {"output": output, "shapes": shapes}
    return {
        "output": output,
        "shapes": shapes,
        **gradients(output, inputs["cotangent"], dict(module.named_parameters())),
    }


def _adapted(part: Any, state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> dict[str, Any]:
    model = model_of(state)
    before = {id(p) for p in model.bert.parameters()}
    with torch.no_grad():
        full = model(**batch).logits
    made = part.add_adapters(model, 3)
    with torch.no_grad():
        logits = made(**batch).logits
    trained = {name: p for name, p in made.named_parameters() if p.requires_grad}
    found = {
        "the same model": made is model,
        "computes what it did": bool((logits - full).abs().max() < 1e-4 * full.abs().max()),
        "of BERT's parameters trained": sum(id(p) in before for p in trained.values()),
        "numbers trained": sum(p.numel() for p in trained.values()),
        "the head is trained": "classifier.weight" in trained,
        "a second time": error_of(lambda: part.add_adapters(made, 3)),
    }
    with torch.no_grad():
        for p in made.bert.parameters():
            if id(p) not in before:
                p.fill_(0.1)  # as if trained, whatever its name
        return found | {"adapters": _places(made.bert), "logits, trained": made(**batch).logits}


def _places(bert: Any) -> list[str]:
    """What is an `nn.Sequential` now, and of what."""
    return [
        f"{name}: {len(module)}"
        for name, module in bert.encoder.named_modules()
        if isinstance(module, nn.Sequential)
    ]


def _lora(
    part: Any, x: Tensor, layer: Mapping[str, Tensor], lora: Mapping[str, Tensor], alpha: float
) -> dict[str, Any]:
    linear = nn.Linear(layer["weight"].shape[1], layer["weight"].shape[0]).to(x)
    with_parameters(linear, layer)
    module = part.LoRALinear(linear, rank=lora["lora_a"].shape[0], alpha=alpha)
    found: dict[str, Any] = {
        "at the start": module(x).detach(),
        "trained": sorted(name for name, p in module.named_parameters() if p.requires_grad),
        "lora_a has numbers at the start": bool(module.lora_a.any()),
    }
    with torch.no_grad():
        for name, value in lora.items():
            getattr(module, name).copy_(value)
        found["trained output"] = module(x)
        merged = [module.merge() for _ in range(2)]
        found |= {f"merged {number}": one(x) for number, one in enumerate(merged)}
        found["after merging"] = module(x)
    return found | {"plain layers": [isinstance(one, nn.Linear) for one in merged]}


ADAPTERS = Exercise(
    id="8.5",
    reference={"Adapter": Adapter, "add_adapters": AddAdapters(), "LoRALinear": LoRALinear},
    reference_name="torch.nn.functional.linear; Houlsby et al. 2019, Hu et al. 2021 (peft)",
    cases=_adapter_cases,
    probe=_adapter_probe,
    misconceptions=(
        Misconception(
            "an adapter does not start as nothing",
            "A fresh adapter that adds random numbers after every half layer destroys what BERT "
            "knows before training begins. Weight and bias of `up` start at 0.",
            _adapting(_RandomStart),
        ),
        Misconception(
            "the residual connection is left out",
            "Without x + the layer's output would have to go through the few units of the "
            "bottleneck, and at the start nothing would be left of it.",
            _adapting(_NoResidual),
        ),
        Misconception(
            "there is no GELU in the adapter",
            "Two linear layers without anything between them are one linear layer of low rank. "
            "That is LoRA's idea; an adapter is a small network.",
            _adapting(_NoGelu),
        ),
        Misconception(
            "BERT is not frozen",
            "The model then trains all its parameters and the adapters besides, and every task "
            "needs a copy of the whole. `requires_grad_(False)` for what `bert` had.",
            {"add_adapters": _NotFrozen()},
        ),
        Misconception(
            "the head is frozen too",
            "The head was drawn at random and knows nothing of the task. It is trained with the "
            "adapters; only the BERT inside is frozen.",
            {"add_adapters": _HeadFrozen()},
        ),
        Misconception(
            "each layer has one adapter",
            "Houlsby et al. put one after each half of a layer: after the attention's output and "
            "after the feed-forward network's `down`.",
            {"add_adapters": _OneOfTwo()},
        ),
        Misconception(
            "an adapter stands inside the feed-forward network",
            "After `up` there are as many units as the network is wide inside, four times those of "
            "the layer, and the adapter is four times as large. It follows `down`, at the half's "
            "end.",
            {"add_adapters": _WrongHalf()},
        ),
        Misconception(
            "a copy gets the adapters",
            "The contract says in place: whoever holds the model, an optimizer for instance, must "
            "see the change. Change the model that was given, and return that one.",
            {"add_adapters": _OnACopy()},
        ),
        Misconception(
            "the change is not scaled",
            "alpha / rank keeps the size of the change the same when you try another rank, so that "
            "the learning rate need not be found anew.",
            {"LoRALinear": _Unscaled},
        ),
        Misconception(
            "the change is multiplied by alpha alone",
            "With rank 8 that is eight times too much. The factor is alpha / rank: a larger rank "
            "adds up more terms, each counts less.",
            {"LoRALinear": _ByAlphaAlone},
        ),
        Misconception(
            "both matrices start at 0",
            "The product is 0, as it must be, and so are both gradients: each is multiplied by the "
            "other matrix. Nothing would ever move. Draw lora_a, and let lora_b be 0.",
            {"LoRALinear": _BothZero},
        ),
        Misconception(
            "the linear layer is trained as well",
            "The point is to train the two thin matrices alone: an optimizer keeps two more "
            "numbers for every parameter that it trains. Freeze the layer.",
            {"LoRALinear": _BaseTrained},
        ),
        Misconception(
            "merging changes the layer itself",
            "Called twice, it adds the change twice, and afterwards the layer itself computes "
            "something else. Make a new layer from the old weight.",
            {"LoRALinear": _MergesIntoItself},
        ),
        Misconception(
            "the merged weight lacks the scale",
            "What is merged must be what forward adds, factor included: weight + alpha / rank * "
            "lora_b @ lora_a. Otherwise the merged layer computes something else.",
            {"LoRALinear": _MergeUnscaled},
        ),
    ),
    hints=(
        "`nn.init.zeros_` sets a parameter to 0. Freeze before you add, then what is added is "
        "trained. `setattr(layer.attention, 'output', nn.Sequential(linear, adapter))`.",
        "LoRA's matrices are nn.Parameters: [rank, in] and [out, rank], made like the layer's "
        "weight (`weight.new_zeros`), so that device and dtype are right. `F.linear(x, lora_a)` is "
        "x @ lora_a.T.",
        "merge: `copy.deepcopy(self.linear)`, and under `torch.no_grad()` add scaling * lora_b @ "
        "lora_a to its weight; self stays as it is. `Adapter(...).to(linear.weight)` follows the "
        "layer's device and dtype.",
    ),
)

# --- 8.6 compare ---------------------------------------------------------------------------------

_CLOCKS = ("perf_counter", "monotonic", "time", "process_time", "thread_time")


class FakeClock:
    """A clock that only moves when a model says so: a measurement that no machine disturbs."""

    def __init__(self) -> None:
        self.now = 1024 * 10**9  # nanoseconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it, Python's clocks show this one's time, under whatever name they are used."""
        with ExitStack() as stack:
            for name in _CLOCKS:
                for suffix, read in (("", self.read), ("_ns", self.read_ns)):
                    self.replace(stack, name + suffix, read)
            yield

    def replace(self, stack: ExitStack, name: str, read: Callable[[], Any]) -> None:
        """Put `read` in the place of one of Python's clocks, and of what was imported from it."""
        real = getattr(time, name)
        stack.enter_context(mock.patch.object(time, name, read))
        module = sys.modules.get("bertlab.compression")
        for key, value in list(vars(module).items()) if module is not None else []:
            if value is real:
                stack.enter_context(mock.patch.object(module, key, read))

    def read(self) -> float:
        return self.now / 1e9

    def read_ns(self) -> int:
        return self.now


class Timed(nn.Module):
    """A model whose every call takes a known time on a fake clock, and which notes how it is used.

    For each number of texts the first three calls are slow, and every third after them is
    disturbed: of 13 or 14 calls half and more, of the ten that follow the first three, four.

    Args:
        one: milliseconds for one text.
        more: for each one more.
    """

    def __init__(self, table: Tensor, clock: FakeClock, one: int, more: int) -> None:
        super().__init__()
        self.table = nn.Parameter(table.clone())
        self.clock, self.one, self.more = clock, one, more
        self.counts: dict[int, int] = {}
        self.noted: dict[str, bool] = {"training": False, "gradients": False, "labels": False}

    def forward(self, **batch: Tensor) -> Any:
        """Score the classes: a row of the table for each text's first token."""
        ids = batch["input_ids"]
        self.noted["training"] |= self.training
        self.noted["gradients"] |= torch.is_grad_enabled()
        self.noted["labels"] |= "labels" in batch
        size = len(ids)
        count = self.counts[size] = self.counts.get(size, 0) + 1
        factor = 16 if count <= 3 else 4 if count % 3 == 1 else 1
        self.clock.now += factor * (self.one + self.more * (size - 1)) * 10**6
        logits = self.table[ids[:, 0]]
        return SimpleNamespace(loss=None, logits=-logits if self.training else logits)


class FromFile:
    """A model that is no module, as one that ONNX Runtime runs."""

    def __init__(self, model: Timed, path: str) -> None:
        self.model, self.path = model, path

    def __call__(self, **batch: Tensor) -> Any:
        return self.model(**batch)


class Comparison:
    """Medians of a clock's readings. The misconceptions replace one step."""

    def __call__(self, models: Mapping[str, Any], batches: Sequence[Any]) -> list[Any]:
        if not batches:
            raise ValueError("batches is empty, but must have at least one batch")
        return [self.row(name, model, batches) for name, model in models.items()]

    def row(self, name: str, model: Any, batches: Sequence[Any]) -> Any:
        from bertlab.compression import Row, first_texts, size_on_disk_mb

        was_training = getattr(model, "training", False)
        self.prepare(model)
        with self.context():
            one, many = (self.latency(model, first_texts(batches, n)) for n in (1, 32))
            accuracy = self.accuracy([self.hits(model, batch) for batch in batches])
        self.restore(model, was_training)
        return Row(name, size_on_disk_mb(model), one, many, accuracy)

    def prepare(self, model: Any) -> None:
        if isinstance(model, nn.Module):
            model.eval()

    def restore(self, model: Any, was_training: bool) -> None:
        if isinstance(model, nn.Module):
            model.train(was_training)

    def context(self) -> Any:
        return torch.no_grad()

    warm_up, timed = 3, 10

    def latency(self, model: Any, batch: Any) -> float:
        times = []
        for _ in range(self.warm_up + self.timed):
            start = time.perf_counter()
            model(**batch)
            times.append(time.perf_counter() - start)
        return self.summary(times[self.warm_up :])

    def summary(self, times: list[float]) -> float:
        return 1000 * statistics.median(times)

    def hits(self, model: Any, batch: Any) -> Tensor:
        return model(**texts_of(batch)).logits.argmax(dim=-1) == batch["labels"]

    def accuracy(self, hits: list[Tensor]) -> float:
        return torch.cat(hits).double().mean().item()


class _Cold(Comparison):
    warm_up = 0

    def latency(self, model: Any, batch: Any) -> float:
        start = time.perf_counter()
        model(**batch)
        return self.summary([time.perf_counter() - start])


class _NoWarmUp(Comparison):
    warm_up, timed = 0, 10


class _FewCalls(Comparison):
    warm_up, timed = 3, 3


class _MeanTime(Comparison):
    def summary(self, times: list[float]) -> float:
        return 1000 * statistics.mean(times)


class _Seconds(Comparison):
    def summary(self, times: list[float]) -> float:
        return statistics.median(times)


class _PerText(Comparison):
    def latency(self, model: Any, batch: Any) -> float:
        return super().latency(model, batch) / len(batch["input_ids"])


class _AsItIs(Comparison):
    def prepare(self, model: Any) -> None:
        pass


class _EvalForGood(Comparison):
    def restore(self, model: Any, was_training: bool) -> None:
        pass


class _WithGradients(Comparison):
    def context(self) -> Any:
        return torch.enable_grad()


class _MeanOfBatches(Comparison):
    def accuracy(self, hits: list[Tensor]) -> float:
        return statistics.mean(one.double().mean().item() for one in hits)


class _WithLabels(Comparison):
    def hits(self, model: Any, batch: Any) -> Tensor:
        return model(**batch).logits.argmax(dim=-1) == batch["labels"]


class _ModulesOnly(Comparison):
    def prepare(self, model: Any) -> None:
        model.eval()


def _compare_cases(rng: np.random.Generator) -> Iterator[Case]:
    def inputs(sizes: Sequence[int], **more: Any) -> dict[str, Any]:
        batches = []
        for number, size in enumerate(sizes):
            batch = drawn_batch(rng, rng.integers(2, 6, size).tolist(), 5)
            batch["labels"] = batch["input_ids"][:, 0] % LABELS  # the table says the same
            if number == 0:
                batch["labels"] = (batch["labels"] + 1) % LABELS
            batches.append(batch)
        ticks = {"one": int(rng.integers(8, 60)), "more": int(rng.integers(1, 5))}
        table = torch.eye(LABELS)[torch.arange(31) % LABELS] + normal(rng, 31, LABELS, scale=0.1)
        return {"table": table, "batches": batches, **ticks, **more}

    yield Case("two batches of unequal size", inputs([3, 8]))
    yield Case("a model in training mode, 40 texts", inputs([2, 38], train=True))
    yield Case("a module, and a model that is none", inputs([2, 5], file=int(rng.integers(9, 99))))
    yield Case("no batch", inputs([]))


def _compare_probe(
    part: Any,
    table: Tensor,
    batches: list[dict[str, Tensor]],
    one: int,
    more: int,
    train: bool = False,
    file: int | None = None,
) -> Any:
    clock = FakeClock()
    first = Timed(table.float(), clock, one, more).train(train)
    models: dict[str, Any] = {"first": first}
    if not batches:
        return error_of(lambda: part.compare(models, batches))
    with tempfile.TemporaryDirectory() as folder, clock.running():
        if file is not None:
            path = os.path.join(folder, "model.onnx")
            Path(path).write_bytes(bytes(1000 * file))
            other = Timed(table.float(), clock, more, one).eval()
            models["from a file"] = FromFile(other, path)
        rows = part.compare(models, batches)
    fields = ("size_mb", "latency_1_ms", "latency_32_ms", "accuracy")
    found: dict[str, Any] = {
        f"{row.name}: {name}": round(float(getattr(row, name)), 6)
        for row in rows
        for name in fields
    }
    found["names"] = [row.name for row in rows]
    found["3 calls and 10 more, of 1 text and of 32"] = all(
        first.counts.get(size, 0) >= 3 + 10 for size in (1, 32)
    )
    return (
        found
        | {f"seen: {name}": seen for name, seen in first.noted.items()}
        | {"mode": mode(first)}
    )


COMPARE = Exercise(
    id="8.6",
    reference={"compare": Comparison()},
    reference_name="statistics.median of time.perf_counter, on a clock that the check moves",
    cases=_compare_cases,
    probe=_compare_probe,
    misconceptions=(
        Misconception(
            "the first call is timed",
            "The first calls allocate memory, choose kernels and fill caches. They are many times "
            "as slow as the thousandth, which is the one that a service makes.",
            {"compare": _Cold()},
        ),
        Misconception(
            "the first calls are among those that are timed",
            "The median forgives some slow calls, not half of them: of ten, three were the first "
            "ones, and the machine disturbs others. Call three times before the clock is read.",
            {"compare": _NoWarmUp()},
        ),
        Misconception(
            "too few calls are timed",
            "The median of three is right if at most one of them was disturbed, and nobody knows "
            "whether that is so. Ten is the least; the time they take is what certainty costs.",
            {"compare": _FewCalls()},
        ),
        Misconception(
            "the mean is taken",
            "What disturbs a measurement makes it longer, never shorter. One call during which the "
            "machine did something else moves the mean, and leaves the median where it was.",
            {"compare": _MeanTime()},
        ),
        Misconception(
            "times are in seconds",
            "The fields say `_ms`: milliseconds. `time.perf_counter` counts seconds, so multiply "
            "by 1000, or every model looks a thousand times as fast as it is.",
            {"compare": _Seconds()},
        ),
        Misconception(
            "the time of a batch is divided by its texts",
            "That is the inverse of throughput. A latency is how long somebody waits, and whoever "
            "sends 32 texts together waits for all of them.",
            {"compare": _PerText()},
        ),
        Misconception(
            "a model is measured in the mode it is in",
            "In training mode dropout draws random numbers: the model is slower, and its accuracy "
            "is another one at every call. Go to eval mode first.",
            {"compare": _AsItIs()},
        ),
        Misconception(
            "the model is left in eval mode",
            "A measurement must not change what it measures: somebody goes on training afterwards. "
            "Remember `model.training`, and put it back: `read_mode` (given) does both.",
            {"compare": _EvalForGood()},
        ),
        Misconception(
            "gradients are computed",
            "Outside `torch.no_grad` PyTorch keeps what it would need for a backward pass: more "
            "memory, more time, and not what a service does.",
            {"compare": _WithGradients()},
        ),
        Misconception(
            "the accuracy is the mean of the batches'",
            "A batch of 3 texts then counts as much as one of 8. Count right texts over all "
            "batches, and divide once.",
            {"compare": _MeanOfBatches()},
        ),
        Misconception(
            "the model is given the labels",
            "With labels it computes a loss that nobody asked for, and an ONNX file has no such "
            "input at all. Hand on everything but `labels`.",
            {"compare": _WithLabels()},
        ),
        Misconception(
            "every model is taken for a module",
            "A file that ONNX Runtime runs has no `eval`. It is a callable, and always the same; "
            "only an `nn.Module` has a mode to change. See `read_mode`, given.",
            {"compare": _ModulesOnly()},
        ),
    ),
    hints=(
        "For each model: two latencies, a size, an accuracy. The texts for the latencies come from "
        "`first_texts`, the size from `size_on_disk_mb`. Write a helper that times one call many "
        "times.",
        "`with read_mode(model), torch.inference_mode():` around everything. Call a few times "
        "without looking at the clock, then at least ten times with `time.perf_counter()` before "
        "and after; `statistics.median`, times 1000.",
        "Accuracy: for each batch `model(**{n: x for n, x in batch.items() if n != 'labels'})"
        ".logits.argmax(-1) == batch['labels']`; `torch.cat` of them all, as floats, mean. Then "
        "Row(name=..., size_mb=..., latency_1_ms=..., latency_32_ms=..., accuracy=...).",
    ),
)

# --- 8.7 prepare for inference -------------------------------------------------------------------


class Preparing:
    """A copy with packed layers, one by one. The misconceptions replace one step."""

    def __call__(self, model: Any, precision: str = "float32") -> Any:
        from bertlab.compression import as_prepared

        self.check(model, precision)
        fast = self.copied(model)
        ways: dict[tuple[int, int], str] = {}
        for module in list(fast.modules()):
            for name, linear in list(module.named_children()):
                if type(linear) is nn.Linear:
                    setattr(module, name, self.packed(linear, precision, ways))
        picked = {f"{shape[1]} to {shape[0]}": way for shape, way in ways.items()}
        return self.finished(fast, picked, as_prepared)

    def check(self, model: Any, precision: str) -> None:
        if model.training:
            raise ValueError("model is in training mode, but must be in eval mode")
        if precision not in ("float32", "bf16"):
            raise ValueError(f"precision is {precision!r}, but must be float32 or bf16")
        if hasattr(model, "picked"):
            raise ValueError("model is prepared already")

    def copied(self, model: Any) -> Any:
        from bertlab.compression import shared_copy

        return shared_copy(model)

    def packed(self, linear: nn.Linear, precision: str, ways: dict[Any, str]) -> nn.Module:
        from bertlab.compression import AS_IT_IS, PackedLinear, quickest_linear

        shape = tuple(linear.weight.shape)
        if shape not in ways:
            ways[shape] = quickest_linear(linear, precision)
        return linear if ways[shape] == AS_IT_IS else PackedLinear(linear, ways[shape])

    def finished(self, fast: Any, picked: dict[str, str], finish: Callable[..., Any]) -> Any:
        return finish(fast, picked)


class _InPlace(Preparing):
    def copied(self, model: Any) -> Any:
        return model


class _FullCopy(Preparing):
    def copied(self, model: Any) -> Any:
        return copy.deepcopy(model)


class _TrainingTaken(Preparing):
    def check(self, model: Any, precision: str) -> None:
        was_training = model.training
        super().check(model.eval(), precision)
        model.train(was_training)


class _AnyPrecision(Preparing):
    def check(self, model: Any, precision: str) -> None:
        super().check(model, "float32")


class _PaddingRead(Preparing):
    def finished(self, fast: Any, picked: dict[str, str], finish: Callable[..., Any]) -> Any:
        own = type(fast.bert)
        finish(fast, picked)
        fast.bert.__class__ = own
        return fast


class _NothingPacked(Preparing):
    def packed(self, linear: nn.Linear, precision: str, ways: dict[Any, str]) -> nn.Module:
        super().packed(linear, precision, ways)
        return linear


class _SaysNothing(Preparing):
    def finished(self, fast: Any, picked: dict[str, str], finish: Callable[..., Any]) -> Any:
        return finish(fast, {})


class _OneForAll(Preparing):
    def packed(self, linear: nn.Linear, precision: str, ways: dict[Any, str]) -> nn.Module:
        if not ways:
            return super().packed(linear, precision, ways)
        way = next(iter(ways.values()))
        return super().packed(linear, precision, {tuple(linear.weight.shape): way})


class _Twice(Preparing):
    def check(self, model: Any, precision: str) -> None:
        if hasattr(model, "picked"):
            return
        super().check(model, precision)


def _prepare_cases(rng: np.random.Generator) -> Iterator[Case]:
    def inputs(lengths: Sequence[int], **more: Any) -> dict[str, Any]:
        batch = texts_of(drawn_batch(rng, lengths, max(lengths)))
        return {"state": drawn_state(rng, **ONE_LAYER), "batch": batch, **more}

    yield Case("a padded batch", inputs([7, 3, 1]))
    yield Case("a batch without padding", inputs([4, 4]))
    yield Case("refuses what it must", inputs([3, 2], wants="refusals"))
    yield Case("the model it was made from", inputs([5, 2], wants="original"))


@contextmanager
def measured(found: list[str]) -> Iterator[None]:
    """Within it, `quickest_linear` notes a shape and picks by it, instead of measuring."""
    import bertlab.compression as given

    def pick(linear: nn.Linear, precision: str) -> str:
        found.append(f"{linear.in_features} to {linear.out_features}")
        usable = linear.weight.dtype == torch.float32 and linear.weight.device.type == "cpu"
        wide = linear.out_features > linear.in_features
        ready = torch.backends.mkldnn.is_available()
        return given.ONEDNN if wide and usable and ready else given.AS_IT_IS

    with mock.patch.object(given, "quickest_linear", pick):
        yield


def _prepare_probe(
    part: Any, state: Mapping[str, Tensor], batch: dict[str, Tensor], wants: str = "numbers"
) -> Any:
    model = model_of(state, **ONE_LAYER)
    shapes: list[str] = []
    with measured(shapes):
        if wants == "refusals":
            return _prepare_refusals(part, model)
        if wants == "original":
            return _original(part, model)
        prepared = part.prepare_for_inference(model)
    with torch.no_grad():
        logits = prepared(**batch).logits
    return {
        "logits": logits,
        "mode": mode(prepared),
        "class": type(prepared).__name__,
        "read": prepared.bert.calls,
        "measured": sorted(shapes),
        "picked": sorted(prepared.picked),
        "left as they were": _plain(prepared),
    }


def _plain(prepared: Any) -> list[str]:
    """The linear layers to which nothing was done."""
    return sorted(
        f"{linear.in_features} to {linear.out_features}"
        for linear in prepared.modules()
        if type(linear) is nn.Linear
    )


def _prepare_refusals(part: Any, model: Any) -> dict[str, Any]:
    prepare = part.prepare_for_inference
    found: dict[str, Any] = {"half": error_of(lambda: prepare(model, "half"))}
    found["training mode"] = error_of(lambda: prepare(model.train()))
    found["mode"] = mode(model)
    prepared = prepare(model.eval(), "bf16")
    found["twice"] = error_of(lambda: prepare(prepared))
    return found | {"trained": error_of(lambda: prepared.train())}


def _original(part: Any, model: Any) -> dict[str, Any]:
    before = [type(module).__name__ for module in model.modules()]
    prepared = part.prepare_for_inference(model)
    word = prepared.bert.embeddings.word.weight
    return {
        "another object": prepared is not model,
        "its modules": [type(module).__name__ for module in model.modules()] == before,
        "its gradients": all(p.requires_grad for p in model.parameters()),
        "it is prepared": hasattr(model, "picked"),
        "memory is shared": word.data_ptr() == model.bert.embeddings.word.weight.data_ptr(),
        "parameters": sorted(n for n, _ in prepared.named_parameters())
        == sorted(n for n, _ in model.named_parameters()),
    }


PREPARE = Exercise(
    id="8.7",
    reference={"prepare_for_inference": Preparing()},
    reference_name="torch.nn.functional.linear, and oneDNN's layers of torch.compile",
    cases=_prepare_cases,
    probe=_prepare_probe,
    misconceptions=(
        Misconception(
            "the model itself is changed",
            "Then there is no way back: it cannot be trained any further, and whoever else holds "
            "it is surprised. Prepare a copy; `shared_copy` (given) costs almost no memory.",
            {"prepare_for_inference": _InPlace()},
        ),
        Misconception(
            "the copy has parameters of its own",
            "`copy.deepcopy` doubles the memory even of the tables, to which nothing is done. "
            "`shared_copy` (given) makes new modules around the same numbers.",
            {"prepare_for_inference": _FullCopy()},
        ),
        Misconception(
            "a model in training mode is taken",
            "Somebody in the middle of training would get a copy that is out of date after the "
            "next step, and not notice. Refuse it, and say how to go to eval mode.",
            {"prepare_for_inference": _TrainingTaken()},
        ),
        Misconception(
            "any precision is accepted",
            "A misspelled name would be taken for float32, in silence, and somebody would report "
            "numbers for a precision that was never used.",
            {"prepare_for_inference": _AnyPrecision()},
        ),
        Misconception(
            "padding is still read",
            "In a shuffled batch most places can be padding, and time spent there is lost whatever "
            "the matrices look like. `as_prepared` lets `bert` skip it.",
            {"prepare_for_inference": _PaddingRead()},
        ),
        Misconception(
            "what is measured is not put in",
            "`quickest_linear` only looks. Where it names a way, a `PackedLinear` has to take the "
            "layer's place: return it to `replace_modules`.",
            {"prepare_for_inference": _NothingPacked()},
        ),
        Misconception(
            "it does not say what was picked",
            "A choice that was measured differs from machine to machine. `picked` says what it was "
            "here, so that a number can be understood later.",
            {"prepare_for_inference": _SaysNothing()},
        ),
        Misconception(
            "one shape is measured for all",
            "A wide matrix and a narrow one can have different winners. Measure each shape once: "
            "layers of the same shape share the result.",
            {"prepare_for_inference": _OneForAll()},
        ),
        Misconception(
            "a prepared model is prepared again",
            "It would be measured on layers that are packed already, and its `picked` would say "
            "that nothing was done. Refuse it.",
            {"prepare_for_inference": _Twice()},
        ),
    ),
    hints=(
        "Three checks, each with its ValueError (`require`); a copy; a function that takes a "
        "linear layer and returns it or a PackedLinear; `replace_modules`; `as_prepared`.",
        "A dict from shape to way remembers what was measured: `quickest_linear(linear, "
        "precision)` is called once for each (out_features, in_features). Where it says AS_IT_IS, "
        "return the layer itself.",
        "fast = shared_copy(model); replace_modules(fast, nn.Linear, packed); return as_prepared("
        "fast, {f'{inputs} to {outputs}': way for (outputs, inputs), way in ways.items()}).",
    ),
)

# --- 8.8 clinic ----------------------------------------------------------------------------------

_TABLE = "bert.embeddings.word_embeddings.weight"
_DECODER = "cls.predictions.decoder.weight"
_BIASES = ("cls.predictions.bias", "cls.predictions.decoder.bias")


class MendCheckpoint:
    """`F.pad` and one shared tensor. The misconceptions replace one step."""

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mended = {**tensors, _DECODER: self.decoder(tensors)}
        for name in _BIASES:
            if name in tensors:
                mended[name] = self.bias(tensors[name], len(tensors[_TABLE]))
        return self.rest(mended, tensors)

    def decoder(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors[_TABLE]

    def bias(self, bias: Tensor, rows: int) -> Tensor:
        return F.pad(bias, (0, rows - len(bias)))

    def rest(self, mended: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return mended


class _TableCut(MendCheckpoint):
    def decoder(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors[_DECODER]

    def bias(self, bias: Tensor, rows: int) -> Tensor:
        return bias

    def rest(self, mended: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**mended, _TABLE: tensors[_DECODER]}


class _NewRowsOnly(MendCheckpoint):
    def decoder(self, tensors: Mapping[str, Tensor]) -> Tensor:
        old = tensors[_DECODER]
        return torch.cat([old, tensors[_TABLE][len(old) :]])


class _BiasShort(MendCheckpoint):
    def bias(self, bias: Tensor, rows: int) -> Tensor:
        return bias


class _BiasFresh(MendCheckpoint):
    def bias(self, bias: Tensor, rows: int) -> Tensor:
        return bias.new_zeros(rows)


class _OneName(MendCheckpoint):
    def rest(self, mended: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kept = {name: tensors[name] for name in _BIASES[1:] if name in tensors}
        return {**mended, **kept} if _BIASES[0] in tensors else mended


class _DecoderLeftOut(MendCheckpoint):
    def rest(self, mended: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: x for name, x in mended.items() if name != _DECODER}


class MendTokens:
    """A swap where the model says so. The misconceptions replace one step."""

    def __call__(self, vocab: list[str], unknown: int, table: Tensor) -> list[str]:
        if not self.swapped(vocab, unknown, table):
            return list(vocab)
        other = {"[PAD]": "[UNK]", "[UNK]": "[PAD]"}
        return [other.get(piece, piece) for piece in vocab]

    def swapped(self, vocab: list[str], unknown: int, table: Tensor) -> bool:
        place = vocab.index("[UNK]")
        return place != unknown and torch.count_nonzero(table[place]).item() == 0


class _Always(MendTokens):
    def swapped(self, vocab: list[str], unknown: int, table: Tensor) -> bool:
        return True


class _ByIdAlone(MendTokens):
    def swapped(self, vocab: list[str], unknown: int, table: Tensor) -> bool:
        return vocab.index("[UNK]") != unknown


class _ByRowAlone(MendTokens):
    def swapped(self, vocab: list[str], unknown: int, table: Tensor) -> bool:
        return not table[vocab.index("[UNK]")].any()


class _PadRenamed(MendTokens):
    def __call__(self, vocab: list[str], unknown: int, table: Tensor) -> list[str]:
        if not self.swapped(vocab, unknown, table):
            return list(vocab)
        return ["[UNK]" if piece == "[PAD]" else piece for piece in vocab]


def _clinic_cases(rng: np.random.Generator) -> Iterator[Case]:
    for name, biases in (("both names of the bias", _BIASES), ("one name", _BIASES[:1])):
        old, new = int(rng.integers(7, 10)), int(rng.integers(11, 14))
        bias = normal(rng, old)
        tensors = {
            _TABLE: normal(rng, new, 3),
            "bert.embeddings.LayerNorm.weight": normal(rng, 3),
            _DECODER: normal(rng, old, 3),
            **dict.fromkeys(biases, bias),
        }
        yield Case(f"a checkpoint: {name}", {"tensors": tensors})
    words = [f"word{i}" for i in rng.permutation(6)]
    for name, pad, unk, unknown, zero in (
        ("swapped", 5, 0, 5, 0),
        ("right", 0, 5, 5, 0),
        ("right, and the row of [UNK] is 0", 0, 4, 4, 4),
        ("in other places, but no row is 0", 2, 3, 4, None),
    ):
        vocab = [*words]
        vocab[pad], vocab[unk] = "[PAD]", "[UNK]"
        table = normal(rng, 6, 4)
        if zero is not None:
            table[zero] = 0
        yield Case(f"a vocabulary: {name}", {"vocab": vocab, "unknown": unknown, "table": table})


def _clinic_probe(part: Any, **inputs: Any) -> Any:
    if "vocab" in inputs:
        return part.mend_special_tokens(**inputs)
    return dict(sorted(part.mend_checkpoint(inputs["tensors"]).items()))


def _checkpoint(wrong: MendCheckpoint) -> dict[str, Any]:
    return {"mend_checkpoint": wrong}


def _tokens(wrong: MendTokens) -> dict[str, Any]:
    return {"mend_special_tokens": wrong}


CLINIC = Exercise(
    id="8.8",
    reference={"mend_checkpoint": MendCheckpoint(), "mend_special_tokens": MendTokens()},
    reference_name="torch.nn.functional.pad, and what transformers tie_weights does",
    cases=_clinic_cases,
    probe=_clinic_probe,
    misconceptions=(
        Misconception(
            "the table is replaced by the decoder",
            "The decoder is what stayed behind: it lacks the new words and did not follow the "
            "training. The table is right, and the decoder becomes the table.",
            _checkpoint(_TableCut()),
        ),
        Misconception(
            "only the new rows are taken from the table",
            "The sizes fit then, and the old rows still differ: the table was trained after the "
            "tie was lost. All rows of the decoder are the table's.",
            _checkpoint(_NewRowsOnly()),
        ),
        Misconception(
            "the bias keeps its old size",
            "The bias has one number for each piece of the vocabulary. A model with more pieces "
            "refuses it: fill it up with 0 for the new ones.",
            _checkpoint(_BiasShort()),
        ),
        Misconception(
            "the bias begins anew",
            "What the head learned of how frequent each word is stands in the old bias. Keep it, "
            "and add 0 only for the new rows.",
            _checkpoint(_BiasFresh()),
        ),
        Misconception(
            "only one of the bias's two names is mended",
            "Transformers wrote the same bias under two names, and both are read. If they differ "
            "in size, the checkpoint is refused as before.",
            _checkpoint(_OneName()),
        ),
        Misconception(
            "the decoder is left out of the file",
            "A reader that ties the two does not miss it, but the contract says the same names as "
            "before, and one that does not tie would draw the decoder at random.",
            _checkpoint(_DecoderLeftOut()),
        ),
        Misconception(
            "the two pieces are always exchanged",
            "A vocabulary that was right is wrong afterwards, and running the cure twice brings "
            "the illness back. Look first whether they are in each other's place.",
            _tokens(_Always()),
        ),
        Misconception(
            "the id alone decides",
            "That `[UNK]` is not where the model learned it can have other causes, which this cure "
            "makes worse. The row of 0 is what says that padding was learned there.",
            _tokens(_ByIdAlone()),
        ),
        Misconception(
            "the row alone decides",
            "A model that never met an unknown word has a row of 0 for `[UNK]` too, in its right "
            "place. Both signs are needed: the wrong id and the row.",
            _tokens(_ByRowAlone()),
        ),
        Misconception(
            "only one of the two is renamed",
            "The vocabulary then has `[UNK]` twice and no `[PAD]`, and the next batch cannot be "
            "padded. The two change places.",
            _tokens(_PadRenamed()),
        ),
    ),
    hints=(
        "First patient: which of the two tensors has a row for every word? Second: what stands at "
        "`vocab.index('[UNK]')`, and what does the model's table have in that row?",
        "`{**tensors, name: value}` is a new dict. A bias of the right length: zeros, with the old "
        "numbers in front. `not table[row].any()` says that a row is all 0.",
        "Mend each of the bias's names that is there. For the vocabulary: copy the list, and if "
        "`[UNK]` is not at `unknown` and its row is 0, put each piece at the other's index.",
    ),
)

EXERCISES = [INT8, DISTIL, HEADS, EXPORT, ADAPTERS, COMPARE, PREPARE, CLINIC]
