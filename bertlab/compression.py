"""Compression: a BERT that is smaller, faster, or both, and what that costs.

Six ways: numbers of 8 bits, a student that learns from a teacher, fewer heads and layers, another
program that runs the model, small parts that are trained in place of the whole, and matrices laid
out for the processor. After the exercises stands what is given: whole models made smaller, files,
measurements, and the table and the plot that compare them.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import os
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, reduce
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bertlab.config import BertConfig
from bertlab.encoder import BertModel, BertModelOutput, initialize_weights
from bertlab.fine_tuning import (
    Batch,
    FineTuningSettings,
    SequenceClassifier,
    SpanClassifier,
    TaskOutput,
    TokenClassifier,
    eval_mode,
    fine_tune,
    onednn_linear,
    quickest,
)
from bertlab.heads import IGNORED, BertForMaskedLM, BertForPreTraining
from bertlab.pretraining import device_of, own_tensors, require
from bertlab.weights import WithoutInitialization, replacing

LOWEST, HIGHEST = -128, 127  # what a number of 8 bits with a sign can be
OPSET = 20  # ONNX's set of operators: the first that has GELU as one of them


# --- exercise 8.1: eight bits ---
def quantize_int8(weight: Tensor, per_channel: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Write numbers as whole ones from -128 to 127, which need a quarter of the memory.

        weight ≈ (int8 - zero_point) * scale

    A range from `low` to `high` becomes -128 to 127. It runs from the lowest to the highest number,
    and always holds 0, which is then met exactly: that is what padding and a zero weight are.

        scale = (high - low) / 255
        zero_point = round(-128 - low / scale)
        int8 = round(weight / scale) + zero_point, cut off at -128 and 127

    `round` is to the nearest whole number, a half to the even one, as `torch.round` does.

    Args:
        weight: `[..., in]`, such as a linear layer's weight `[out, in]`; or activations,
            `[..., in]`, one range for each token.
        per_channel: one range for each row of `in` numbers; otherwise one for all numbers together.

    Returns:
        `(int8, scale, zero_point)`: `weight`'s shape, `torch.int8`; and for each range its scale,
        in float32 (float64 for float64), and its zero point, `torch.int32`. These two broadcast
        against `weight`: `[..., 1]`, or all axes 1 without `per_channel`. A range in which all is 0
        has scale 1.

    Source: Jacob et al. 2018, section 2.1. In production: `torchao.quantization`.
    """
    raise NotImplementedError("exercise 8.1")


class Int8Linear(nn.Module):
    """A linear layer with weights of 8 bits, which writes its input in 8 bits as it comes.

    Attributes:
        weight: `[out, in]`, int8; with `scale` and `zero_point`, from `quantize_int8`.
        bias: `[out]` as it was, or None.

    All are buffers: they are saved and moved with the model, and are not trained.

    Args:
        linear: an `nn.Linear`; it is not changed.
        per_channel: one range for each output, or one for the whole weight.

    In production: `torchao.quantization.Int8DynamicActivationInt8WeightConfig`.
    """

    weight: Tensor
    scale: Tensor
    zero_point: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, per_channel: bool = True) -> None:
        super().__init__()
        raise NotImplementedError("exercise 8.1")

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., out]`, in the dtype of `x`.

        Each token's input gets a range of its own, `quantize_int8(x)`. The output is what a linear
        layer makes of the numbers that the two kinds of int8 stand for; `int8_matmul` (given)
        multiplies the int8 themselves:

            sum over in of  (x_int8 - x_zero_point) * (weight - zero_point)
            times           x_scale * scale,    plus bias

        Args:
            x: `[..., in]`.
        """
        raise NotImplementedError("exercise 8.1")
# --- end of exercise 8.1 ---


INT_MM: Any = torch._int_mm  # type: ignore[attr-defined]  # PyTorch has no public name for it


def int8_matmul(first: Tensor, second: Tensor) -> Tensor:
    """The exact product of int8 matrices, `[m, k]` and `[n, k]` to `[m, n]` of int32.

    By the processor's own int8 arithmetic where that is the faster way (see `has_quick_int8`).
    Otherwise by float32, which is exact for whole numbers up to 2**24, and so for 1024 products of
    two int8 together.
    """
    k = first.shape[1]
    if has_quick_int8(first.device.type, len(second), k) and fits_int_mm(first, second):
        return INT_MM(first, second.T)
    pairs = zip(first.float().split(1024, dim=1), second.float().split(1024, dim=1), strict=True)
    products = ((a @ b.T).int() for a, b in pairs)
    return reduce(torch.Tensor.add_, products)


def fits_int_mm(first: Tensor, second: Tensor) -> bool:
    """Say whether `torch._int_mm` takes these shapes: on CUDA not every one.

    On the CPU it takes all, and where a row's step in memory is less than the row's length, as it
    may be where there is one row or one column, what it returns is no product (PyTorch, issue
    195066).
    """
    if first.device.type != "cuda":
        steps = first.stride(0), second.stride(0)
        return len(first) > 0 and first.shape[1] > 1 and min(steps) >= first.shape[1]
    return len(first) > 16 and first.shape[1] % 8 == 0 and len(second) % 8 == 0


@cache
def has_quick_int8(device: str, outputs: int, inputs: int) -> bool:
    """Measure, once for each shape, whether this device multiplies int8 faster than float32.

    Processors with VNNI or AMX instructions, and GPUs, do; others take a detour. Arithmetic that
    cuts off the sum of two large products, as AVX2's does, is never quick enough.
    """
    first = torch.full((64, inputs), HIGHEST, dtype=torch.int8, device=device)
    second = torch.full((outputs, inputs), HIGHEST, dtype=torch.int8, device=device)
    try:
        if not fits_int_mm(first, second):
            return False
        exact = bool((INT_MM(first, second.T) == HIGHEST**2 * inputs).all())
        by_int8 = quickest(lambda: INT_MM(first, second.T), device)
    except RuntimeError:  # there is no such kernel on this device
        return False
    return exact and by_int8 < quickest(lambda: first.float() @ second.float().T, device)


# --- exercise 8.2: learn from a teacher ---
def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    temperature: float = 3.0,
    alpha: float = 0.7,
) -> Tensor:
    """How far a student is from its teacher, and from the labels.

        alpha * temperature**2 * KL(teacher || student) + (1 - alpha) * cross-entropy

    The Kullback-Leibler divergence is that of the two distributions over classes, each the softmax
    of logits divided by `temperature`, and is the mean over all texts. A high temperature makes
    the teacher's small probabilities count, which say what a text is *like*. It also makes the
    gradient smaller by its square, which the factor takes back.

    Args:
        student_logits: `[batch, num_labels]`.
        teacher_logits: `[batch, num_labels]`; the teacher gets no gradient.
        labels: `[batch]`, and -100 for a text that has none: it counts in the teacher's part alone.
        temperature: above 0.
        alpha: the weight of the teacher's part, from 0 to 1.

    Returns:
        A number. The cross-entropy, at temperature 1, is the mean over the texts that have a label,
        and 0 when none has.

    Raises:
        ValueError: `temperature` or `alpha` is not allowed, or the two kinds of logits have
            different shapes; the message says the numbers.

    Source: Hinton et al. 2015, section 2. In production: `torch.nn.functional.kl_div`.
    """
    raise NotImplementedError("exercise 8.2")
# --- end of exercise 8.2 ---


# --- exercise 8.3: prune heads ---
def head_importance(model: Any, batches: Iterable[Batch]) -> Tensor:
    """How much the loss would change if each attention head were turned down a little.

    Put a gate of 1 on what each head hands to its layer's `attention.output`. A head's importance
    is the absolute value of the derivative of a text's loss by its gate, and the mean of this over
    texts.

    Args:
        model: has a `bert`, and `model(**batch).loss` is the mean over the texts of the batch. It
            is read in eval mode and left in the mode it was in; its gradients are as they were.
        batches: with labels.

    Returns:
        `[layers, heads]`, float32; layers with fewer heads than the others have 0 at the end.

    Raises:
        ValueError: there is no batch.

    Source: Michel et al. 2019, section 4.1, equation 2.
    """
    raise NotImplementedError("exercise 8.3")


def prune_heads(model: Any, heads: Mapping[int, Iterable[int]]) -> None:
    """Take attention heads out of a model, in place, for good.

    The rows of `query`, `key` and `value` (weight and bias) that make a head, and the columns of
    `output` that read it, are gone; `attention.num_heads`, `in_features` and `out_features` say
    what is left. The model computes what it did when those heads' columns of `output` were 0.

    Args:
        model: a `BertModel`, or a model that has one as `bert`.
        heads: for each layer, counted from 0, which heads go. They are counted from 0 among the
            heads that the layer has now, in their order, after earlier prunings too.

    Raises:
        ValueError: there is no such layer or head, or no head would be left in a layer; the message
            says which. The model is then as it was.

    Source: Michel et al. 2019. Transformers had `prune_heads` until version 5.
    """
    raise NotImplementedError("exercise 8.3")
# --- end of exercise 8.3 ---


# --- exercise 8.4: export to ONNX ---
def export_onnx(model: Any, path: str | Path) -> None:
    """Write a model as an ONNX file, which programs without PyTorch can run.

    The file has the inputs `input_ids`, `attention_mask` and `token_type_ids`, int64
    `[batch, length]`, both sizes free (length up to the model's positions); the output `logits`, or
    `start_logits` and `end_logits`, or `last_hidden_state` and `pooler_output`: whatever tensors
    the model's output has. It uses ONNX's operators of version 20 (`OPSET`) and holds its weights.
    The model is exported in eval mode and left in the mode it was in.

    Given are `exportable(model)`, a module whose forward takes the three inputs and returns a tuple
    of tensors; `INPUTS`, `output_names(model)` and `example_inputs(model)`; `positions_of(model)`;
    and `write_onnx(module, path, **options)`, which calls `torch.onnx.export` with these options,
    checks the result with `onnx.checker`, puts it in its place, and says which part is at fault
    when a model cannot be exported.

    Args:
        model: `SequenceClassifier`, or another model with a `bert`, or a `BertModel`.
        path: the file, such as `"model.onnx"`; replaced whole or not at all.

    Raises:
        ValueError: the model cannot be exported; the message says which part and why.

    In production: `optimum`, or `torch.onnx.export` as here.
    """
    raise NotImplementedError("exercise 8.4")
# --- end of exercise 8.4 ---


# --- exercise 8.5: adapters and LoRA ---
class Adapter(nn.Module):
    """A small network beside a frozen one: down to a few units, GELU, up again, and added.

        x + up(gelu(down(x)))

    Attributes:
        down: `nn.Linear`, `hidden` to `bottleneck`.
        up: `nn.Linear`, `bottleneck` to `hidden`; weight and bias start at 0, so that at first
            the output is `x`.

    Source: Houlsby et al. 2019, section 2.1 and figure 2.
    """

    def __init__(self, hidden: int, bottleneck: int) -> None:
        super().__init__()
        raise NotImplementedError("exercise 8.5")

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., hidden]` for `[..., hidden]`."""
        raise NotImplementedError("exercise 8.5")


def add_adapters(model: Any, bottleneck: int = 16) -> Any:
    """Give every layer of a model two adapters, and freeze the BERT inside.

    An adapter follows `attention.output` and another follows `feed_forward.down`, in each layer:
    these become `nn.Sequential(linear, Adapter)`, the adapter on the device and of the dtype of the
    linear layer. Every parameter that `bert` had is frozen; the adapters and the head are trained.

    Args:
        model: has a `bert`; changed in place.
        bottleneck: the units of an adapter; with 16, MiniLM trains less than 1% of its parameters.

    Returns:
        The model, which computes what it did.

    Raises:
        ValueError: the model has adapters already.

    Source: Houlsby et al. 2019, figure 2.
    """
    raise NotImplementedError("exercise 8.5")


class LoRALinear(nn.Module):
    """A frozen linear layer, and a change of low rank that is learned.

        linear(x) + alpha / rank * x @ lora_a.T @ lora_b.T

    Attributes:
        linear: the `nn.Linear` it was given, frozen.
        lora_a: parameter `[rank, in]`, drawn as an `nn.Linear`'s weight.
        lora_b: parameter `[out, rank]`, 0 at first, so that the layer computes what it did.

    Source: Hu et al. 2021, section 4.1. In production: `peft.tuners.lora.Linear`.
    """

    def __init__(self, linear: nn.Linear, rank: int = 8, alpha: float = 16) -> None:
        super().__init__()
        raise NotImplementedError("exercise 8.5")

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., out]` for `[..., in]`."""
        raise NotImplementedError("exercise 8.5")

    def merge(self) -> nn.Linear:
        """Return one plain layer that computes the same. Nothing here changes, so it may be called
        again."""
        raise NotImplementedError("exercise 8.5")
# --- end of exercise 8.5 ---


class Row(NamedTuple):
    """What a model is worth, as it was measured here.

    Attributes:
        name: the model's.
        size_mb: on disk, in units of a million bytes.
        latency_1_ms, latency_32_ms: the median time for one text, and for 32 together.
        accuracy: the part of the texts that it gets right.
        parameters: how many numbers it has; None where the file does not say.
        latency_1_p95_ms, latency_32_p95_ms: 95 of 100 calls are done within it.
        accuracy_error: one standard error of the accuracy, from the number of texts.
        peak_mb: the memory that a process needs for a batch of 32, in millions of bytes; None
            where it was not measured (see `bertlab.course.peak_memory`).
    """

    name: str
    size_mb: float
    latency_1_ms: float
    latency_32_ms: float
    accuracy: float
    parameters: int | None = None
    latency_1_p95_ms: float = math.nan
    latency_32_p95_ms: float = math.nan
    accuracy_error: float = math.nan
    peak_mb: float | None = None


# --- exercise 8.6: compare ---
def compare(models: Mapping[str, Any], batches: Sequence[Batch]) -> list[Row]:
    """Measure models beside each other, on the same texts.

    Each model is read in eval mode, without gradients, and left in the mode it was in. A latency is
    the median of at least 10 calls, each timed with `time.perf_counter`, after at least 3 that are
    not timed: the first calls of a model are slow, and a mean follows the slowest.

    Given are `read_mode(model)`, a context in which a module is in eval mode and an `OnnxModel` as
    it is; and `call(model, batch)`, which moves a batch to the model's device and waits for the
    answer.

    Args:
        models: by name; each a module or an `OnnxModel`, which is called without labels and
            returns an object with `logits`, `[batch, num_labels]`.
        batches: with `labels` `[batch]`; read more than once.

    Returns:
        A `Row` for each model, in their order. `size_mb` is `size_on_disk_mb(model)` (given). The
        latencies are those of `first_texts(batches, 1)` and `first_texts(batches, 32)` (given).
        `accuracy` is over all texts of all batches. The other fields may be left out.

    Raises:
        ValueError: there is no batch.
    """
    raise NotImplementedError("exercise 8.6")
# --- end of exercise 8.6 ---


# --- exercise 8.7: prepare for inference ---
def prepare_for_inference(model: Any, precision: str = "float32") -> Any:
    """Return a model that gives the same numbers sooner, on this machine.

    Its linear layers are laid out anew for the processor where that is measured to be faster
    (`quickest_linear`, given, measures which way is the fastest; once for each shape), and its
    `bert` computes nothing for padding.
    `model` itself is not changed: to go back, use that one.

    Given are `shared_copy(model)`, a copy whose parameters lie in the same memory and have no
    gradient; `replace_modules(model, kind, make)`; `PackedLinear(linear, way)`; and
    `as_prepared(copy, picked)`, which lets the copy skip padding and refuse to be trained.

    Args:
        model: with a `bert`, or a `BertModel`; in eval mode.
        precision: `"float32"`, or `"bf16"`: matrices are multiplied in 16 bits where this machine
            does that faster. Everything else stays in float32.

    Returns:
        The prepared model, in eval mode, of the same class. `prepared.picked` says what was picked
        for each shape of a linear layer, such as `{"768 to 3072": "oneDNN"}`. When `model` has
        been trained further, prepare it anew.

    Raises:
        ValueError: `model` is in training mode; `precision` is another; or the model is prepared
            already.

    In production: `torch.compile` with `freezing`, or `intel_extension_for_pytorch.optimize`.
    """
    raise NotImplementedError("exercise 8.7")
# --- end of exercise 8.7 ---


# --- given: whole models made smaller ---


def is_a(part: object, kind: type) -> bool:
    """Like `isinstance`, but a class of the same name in the same module counts as the same.

    In a notebook this module is loaded anew with each exercise, and a model that was made before
    has the classes of then.
    """
    wanted = kind.__module__, kind.__qualname__
    return any((one.__module__, one.__qualname__) == wanted for one in type(part).__mro__)


def replace_modules(model: nn.Module, kind: type[nn.Module], make: Callable[[Any], Any]) -> None:
    """Put `make(part)` in the place of every part of a model that is a `kind`, in place.

    What `make` returns may be the part itself. One part in two places is made once.
    """
    made: dict[nn.Module, Any] = {}
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if is_a(part, kind):
                if part not in made:
                    made[part] = make(part)
                setattr(module, name, made[part])


class Int8Embedding(nn.Module):
    """A table of 8 bits, one range for each row; a looked-up row comes back as floats.

    Args:
        embedding: an `nn.Embedding`; it is not changed.
    """

    weight: Tensor
    scale: Tensor
    zero_point: Tensor

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        weight, scale, zero_point = quantize_int8(embedding.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)

    def forward(self, ids: Tensor) -> Tensor:
        """Return `[..., embedding_dim]` for ids of any shape."""
        return (self.weight[ids].int() - self.zero_point[ids]) * self.scale[ids]


def quantize_model(model: Any, per_channel: bool = True, embeddings: bool = True) -> Any:
    """A copy of a model whose linear layers, and tables, have 8 bits.

    `save_compressed` saves it; `save_pretrained` knows parameters alone, of which few are left.

    Args:
        per_channel: one range for each output of a linear layer, or one for its whole weight.
        embeddings: the three tables too, which in a small BERT are most of the parameters.
    """
    small = copy.deepcopy(model).eval()
    replace_modules(small, nn.Linear, lambda linear: Int8Linear(linear, per_channel))
    if embeddings:
        replace_modules(small, nn.Embedding, Int8Embedding)
    return small


def in_bfloat16(model: Any) -> Any:
    """A copy of a model in which every number has 16 bits, 8 of them for its digits."""
    return copy.deepcopy(model).eval().to(torch.bfloat16)


def drop_layers(model: Any, keep: Sequence[int]) -> Any:
    """A copy of a model that has only some of its layers, in the order of `keep`.

    Args:
        model: a `BertModel`, or a model that has one as `bert`.
        keep: the layers' numbers, from 0.

    Raises:
        ValueError: there is no such layer, or none is kept.
    """
    layers = len(getattr(model, "bert", model).encoder.layers)
    allowed = f"one or more of 0 to {layers - 1}"
    fits = len(keep) > 0 and all(0 <= number < layers for number in keep)
    require(fits, "keep", list(keep), allowed)
    smaller = copy.deepcopy(model)
    bert = getattr(smaller, "bert", smaller)
    bert.encoder.layers = nn.ModuleList(bert.encoder.layers[number] for number in keep)
    config = dataclasses.replace(bert.config, num_hidden_layers=len(keep))
    smaller.config = bert.config = config
    return smaller


def alternate_layers(layers: int, kept: int) -> list[int]:
    """Which layers a smaller model takes over: evenly spread, the first and the last among them.

    One alone is the last: pooler and head read what it gives.

    Source: Sanh et al. 2019 (DistilBERT), section 3: "one layer out of two"; its code takes over
    0, 2, 4, 7, 9 and 11 of 12.
    """
    require(1 <= kept <= layers, "kept", kept, f"from 1 to {layers}, the model's layers")
    if kept == 1:
        return [layers - 1]
    return [round(number * (layers - 1) / (kept - 1)) for number in range(kept)]


def student_of(teacher: Any, layers: int, fresh: bool = False) -> Any:
    """A student with fewer layers than its teacher, to be taught by `distil`.

    Args:
        teacher: has a `bert`; not changed.
        layers: how many the student has: some of the teacher's, evenly spread.
        fresh: draw the layers anew instead; embeddings, pooler and head are still the teacher's.
    """
    student = drop_layers(teacher, alternate_layers(len(teacher.bert.encoder.layers), layers))
    if fresh:
        initialize_weights(student.bert.encoder, student.config.initializer_range)
    return student


class TeacherLogits:
    """A teacher's answers, each computed once: what it says of a text is the same in every epoch.

    Args:
        teacher: a `SequenceClassifier`; read in eval mode, without gradients.
    """

    def __init__(self, teacher: Any) -> None:
        self.teacher = teacher
        self.known: dict[bytes, Tensor] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """Return `[batch, num_labels]`."""
        texts = dict(batch)
        texts.pop("labels", None)
        keys = [self.key(texts, row) for row in range(len(batch["input_ids"]))]
        if any(key not in self.known for key in keys):
            with eval_mode(self.teacher), torch.no_grad():
                logits = self.teacher(**texts).logits
            self.known.update(zip(keys, logits, strict=True))
        return torch.stack([self.known[key] for key in keys])

    def key(self, texts: Mapping[str, Tensor], row: int) -> bytes:
        """What tells one text from another: its tokens, without the padding."""
        real = texts["attention_mask"][row] != 0 if "attention_mask" in texts else slice(None)
        fields = [texts[name][row][real].cpu() for name in INPUTS if name in texts]
        return torch.stack(fields).numpy().tobytes()


class Pupil(nn.Module):
    """A student and the loss that it learns by: in training its teacher's, else the labels' alone.

    Attributes:
        student: what is trained.
        bert: the student's.
    """

    def __init__(
        self, student: Any, teacher: TeacherLogits, temperature: float, alpha: float
    ) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher  # no module: it is neither trained nor saved
        self.temperature, self.alpha = temperature, alpha

    @property
    def bert(self) -> Any:
        return self.student.bert

    def forward(self, labels: Tensor, **texts: Tensor) -> TaskOutput:
        """The student's logits and a loss."""
        logits = self.student(**texts).logits
        if not self.training:
            loss = F.cross_entropy(logits, labels)
            return TaskOutput(loss, logits)
        taught = self.teacher(texts)
        loss = distillation_loss(logits, taught, labels, self.temperature, self.alpha)
        return TaskOutput(loss, logits)


def distil(
    student: Any,
    teacher: Any,
    train: Any,
    validation: Iterable[Batch],
    settings: FineTuningSettings,
    temperature: float = 3.0,
    alpha: float = 0.7,
) -> list[float]:
    """Train a student on what its teacher says, and on the labels; in place.

    Args:
        student: a `SequenceClassifier`, such as `student_of(teacher, 3)`.
        teacher: a `SequenceClassifier`, or its `TeacherLogits`, which several runs can share.
        train, validation, settings: as for `fine_tune`. The best weights are those with the lowest
            loss against validation's labels.
        temperature, alpha: as for `distillation_loss`.

    Returns:
        The validation losses.
    """
    known = teacher if is_a(teacher, TeacherLogits) else TeacherLogits(teacher)
    pupil = Pupil(student, known, temperature, alpha).train(student.training)
    return fine_tune(pupil, train, validation, settings)


LORA_PARTS = ("query", "value")  # where Hu et al. 2021 put it, section 4.2


def add_lora(
    model: Any, rank: int = 8, alpha: float = 16, parts: Sequence[str] = LORA_PARTS
) -> Any:
    """Freeze the BERT inside a model and give its attentions' layers a `LoRALinear`, in place.

    Args:
        parts: of `query`, `key`, `value` and `output`.

    Returns:
        The model.
    """
    model.bert.requires_grad_(False)
    for layer in model.bert.encoder.layers:
        for name in parts:
            linear = getattr(layer.attention, name)
            setattr(layer.attention, name, LoRALinear(linear, rank, alpha))
    return model


def merge_lora(model: Any) -> Any:
    """Make every `LoRALinear` of a model a plain layer again, in place; and return the model."""
    replace_modules(model, LoRALinear, lambda layer: layer.merge())
    return model


def trained_share(model: nn.Module) -> float:
    """The part of a model's parameters that has a gradient."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, trained in sizes if trained) / sum(size for size, _ in sizes)


# --- given: files of compressed models ---

COMPRESSED = "bertlab compressed model 1"  # the layout's name; another layout, another number
MODELS: dict[str, Callable[..., Any]] = {
    "BertModel": lambda config, labels: BertModel(config),
    "BertForMaskedLM": lambda config, labels: BertForMaskedLM(config),
    "BertForPreTraining": lambda config, labels: BertForPreTraining(config),
    "SequenceClassifier": lambda config, labels: SequenceClassifier(BertModel(config), labels),
    "TokenClassifier": lambda config, labels: TokenClassifier(BertModel(config), labels),
    "SpanClassifier": lambda config, labels: SpanClassifier(BertModel(config)),
}


def save_compressed(model: Any, path: str | Path) -> None:
    """Write a model that was pruned, quantized, merged, or cut, as one file.

    `save_pretrained` cannot: Transformers has no place for a layer with five heads. Unmerged
    adapters are saved too; LoRA is to be merged first.

    Args:
        model: one of this library's, such as `SequenceClassifier`.
        path: the file, such as `"student.safetensors"`; replaced whole or not at all.

    Raises:
        ValueError: the model has parts that `load_compressed` could not build; they are named.
    """
    plan = plan_of(model)
    tensors = {name: x.cpu().contiguous() for name, x in own_tensors(model).items()}
    expected = own_tensors(built(plan))
    wrong = {name for name in {*tensors, *expected} if not alike(name, tensors, expected)}
    if wrong:
        some = ", ".join(sorted(wrong)[:4])
        raise ValueError(
            f"model has {len(wrong)} tensors that a file cannot describe, such as {some}; merge "
            "LoRA first (merge_lora), and save the model that a prepared one was made from"
        )
    metadata = {"format": "pt", "kind": COMPRESSED, "plan": json.dumps(plan)}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        save_file(tensors, file, metadata)
        with open(file, "rb") as written:
            os.fsync(written.fileno())


def load_compressed(path: str | Path) -> Any:
    """The model that `save_compressed` wrote, in eval mode.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or something else than such a model.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; save_compressed writes such a file")
    try:
        with safe_open(path, framework="pt") as content:
            metadata = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  # no dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}): damaged, or another file") from error
    if metadata.get("kind") != COMPRESSED:
        raise ValueError(
            f"{path} is no model of save_compressed (of this version: {COMPRESSED!r}); "
            "from_pretrained reads a folder of Transformers'"
        )
    try:
        model = built(json.loads(metadata["plan"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} describes no model that can be built ({error!r})") from error
    own = own_tensors(model)
    wrong = sorted(name for name in {*own, *tensors} if not alike(name, own, tensors))
    if wrong:
        raise ValueError(f"{path} does not fit its own description, at {', '.join(wrong[:4])}")
    put_tensors_into(model, tensors)
    return model.eval()


def put_tensors_into(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let a model's parameters and buffers be these tensors, in their own precision."""
    held = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        held[name].data = tensor


def alike(name: str, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Say whether both have a tensor of this name and shape, and of one type if it is not float."""
    if name not in first or name not in second:
        return False
    one, other = first[name], second[name]
    both_float = one.is_floating_point() and other.is_floating_point()
    return one.shape == other.shape and (both_float or one.dtype == other.dtype)


def plan_of(model: Any) -> dict[str, Any]:
    """What `built` needs to know to build such a model, as JSON has it."""
    kind = type(model).__name__
    require(kind in MODELS, "model", f"a {kind}", f"one of {', '.join(MODELS)}")
    bert = getattr(model, "bert", model)
    parts: dict[str, Any] = dict(model.named_modules())
    adapters: list[Any] = [part for part in parts.values() if is_a(part, Adapter)]
    classifier = getattr(model, "classifier", None)
    labels = None if classifier is None else len(classifier.weight)
    return {
        "class": kind,
        "config": dataclasses.asdict(model.config),
        "labels": labels,
        "heads": [layer.attention.num_heads for layer in bert.encoder.layers],
        "bottleneck": adapters[0].down.out_features if adapters else None,
        "int8": {  # by name: one range for each output?
            name: part.scale.shape[0] > 1 for name, part in parts.items() if is_a(part, Int8Linear)
        },
        "int8_tables": [name for name, part in parts.items() if is_a(part, Int8Embedding)],
    }


def built(plan: Mapping[str, Any]) -> Any:
    """A model of the plan's architecture; its numbers mean nothing yet."""
    with WithoutInitialization():
        model = MODELS[plan["class"]](BertConfig(**plan["config"]), plan["labels"])
    bert = getattr(model, "bert", model)
    had = model.config.num_attention_heads
    prune_heads(model, {n: range(left, had) for n, left in enumerate(plan["heads"])})
    if len(plan["heads"]) != len(bert.encoder.layers):
        raise ValueError("it has not as many layers as its config says")
    if plan["bottleneck"] is not None:
        add_adapters(model, plan["bottleneck"])
    with torch.no_grad():  # memory that nobody has written may hold anything, even NaN
        for parameter in model.parameters():
            parameter.zero_()
    for name, per_channel in plan["int8"].items():
        set_part(model, name, Int8Linear(model.get_submodule(name), per_channel))  # type: ignore[arg-type]  # a linear layer
    for name in plan["int8_tables"]:
        set_part(model, name, Int8Embedding(model.get_submodule(name)))  # type: ignore[arg-type]  # a table
    return model


def set_part(model: nn.Module, name: str, part: nn.Module) -> None:
    """Put a part in a place, which is named as `named_modules` does."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, part)


# --- given: ONNX ---

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def positions_of(model: Any) -> int:
    """How long a text may be for a model."""
    return getattr(model, "bert", model).embeddings.position.num_embeddings


def tensors_of(output: Any) -> dict[str, Tensor]:
    """The tensors of a model's output, by name; what is None is left out."""
    fields = output._asdict() if hasattr(output, "_asdict") else vars(output)
    return {name.strip("_"): x for name, x in fields.items() if isinstance(x, Tensor)}


def example_inputs(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Two texts of seven tokens, one of them padded and with a second part: the three inputs."""
    device = device_of(model)
    ids = torch.ones(2, 7, dtype=torch.int64, device=device)
    mask, types = torch.ones_like(ids), torch.zeros_like(ids)
    mask[1, 5:], types[1, 3:5] = 0, 1
    return ids, mask, types


def output_names(model: Any) -> list[str]:
    """The names of the tensors that a model's output has."""
    with torch.no_grad():
        return list(tensors_of(model(*example_inputs(model))))


class Exportable(nn.Module):
    """A model as ONNX wants it: three inputs, and a tuple of tensors.

    `BertModel.forward` may look at the numbers in a mask ("is anything padded?") to take a shorter
    way. A file has only one way, so here `bert` takes the one that is always right: embeddings,
    encoder, pooler.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor
    ) -> tuple[Tensor, ...]:
        """The model's tensors, in the order of `output_names`."""
        with plain_forward(getattr(self.model, "bert", self.model)):
            return tuple(tensors_of(self.model(input_ids, attention_mask, token_type_ids)).values())


def exportable(model: Any) -> Exportable:
    """A module whose forward takes the three inputs and returns a tuple of tensors."""
    return Exportable(model)


@contextmanager
def plain_forward(bert: Any) -> Iterator[None]:
    """Within it, a `BertModel` goes through its parts without looking at the mask's numbers."""

    def forward(
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> BertModelOutput:
        embedded = bert.embeddings(input_ids, token_type_ids)
        asked = (output_hidden_states, output_attentions)
        last, states, attentions = bert.encoder(embedded, attention_mask, *asked)
        return BertModelOutput(last, bert.pooler(last), states, attentions)

    bert.forward = forward  # the instance's own hides that of its class
    try:
        yield
    finally:
        del bert.forward


def write_onnx(module: nn.Module, path: str | Path, **options: Any) -> None:
    """Export a module by `torch.onnx.export`, check the file, and put it in its place.

    Args:
        options: those of `torch.onnx.export`, `args` among them.

    Raises:
        ValueError: the module cannot be exported; the message says which part and why.
    """
    import onnx  # these take seconds to import

    refuse_packed(module)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        try:
            with quiet():
                torch.onnx.export(module, f=file, external_data=False, verbose=False, **options)
        except Exception as error:  # torch.onnx has errors of many types
            raise ValueError(why_not(module, error)) from error
        leave_out_traces(file)
        onnx.checker.check_model(file, full_check=True)


def leave_out_traces(file: str | Path) -> None:
    """Take out of an ONNX file what the exporter noted beside each node: paths of this machine."""
    import onnx

    model = onnx.load(file)
    graph = model.graph
    noted = [*graph.node, *graph.initializer, *graph.value_info, *graph.input, *graph.output]
    for part in (model, graph, *noted):
        del part.metadata_props[:]
    onnx.save(model, file)


def refuse_packed(module: nn.Module) -> None:
    """Raise ValueError if a module has parts that no ONNX operator stands for."""
    advice = {
        Int8Linear: "export the model in float32, and let quantize_onnx make the file int8",
        Int8Embedding: "export the model in float32, and let quantize_onnx make the file int8",
        PackedLinear: "export the model that this one was prepared from",
    }
    for name, part in module.named_modules():
        for kind, instead in advice.items():
            if is_a(part, kind):
                raise ValueError(
                    f"the model cannot be exported: its part {name.removeprefix('model.')} "
                    f"({kind.__name__}) computes in PyTorch's own way; {instead}"
                )


@contextmanager
def quiet() -> Iterator[None]:
    """Within it, what exporters say to their own developers is not shown."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def why_not(module: nn.Module, error: BaseException) -> str:
    """Which part of a module cannot be exported, and what the exporter says of it."""
    name, reason = part_at_fault(module, error)
    part = "it"
    if name:
        part = f"its part {name} ({type(module.get_submodule('model.' + name)).__name__})"
    return f"the model cannot be exported: {part} fails: {reason}"


def part_at_fault(module: nn.Module, error: BaseException) -> tuple[str, str]:
    """The innermost part in whose code an error came up, and the first line of the error.

    The exporter runs the model's own code, so that the parts stand in the error's traceback.
    """
    inner = ((part, name.removeprefix("model")) for name, part in module.named_modules())
    names = {id(part): name.removeprefix(".") for part, name in inner}
    found, reason = "", first_line(error)
    cause: BaseException | None = error
    while cause is not None:
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            name = names.get(id(frame.f_locals.get("self")), "")
            if name and len(name) >= len(found):
                found, reason = name, first_line(cause)
        cause = cause.__cause__ or cause.__context__
    return found, reason


def first_line(error: BaseException) -> str:
    """What an error says first, without color."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


class OnnxModel:
    """A file of `export_onnx`, called as the model it was made from.

    Attributes:
        path: the file.

    Args:
        threads: how many processor cores it uses; as many as PyTorch when None.

    Raises:
        FileNotFoundError: there is no such file.
    """

    training = False

    def __init__(self, path: str | Path, threads: int | None = None) -> None:
        import onnxruntime

        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(f"{path} does not exist; export_onnx writes such a file")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.log_severity_level = 3  # errors alone
        self.session: Any = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self.names = [output.name for output in self.session.get_outputs()]

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Any:
        """Return a `TaskOutput`, `SpanOutput` or `BertModelOutput`-like object, on the CPU."""
        ones, zeros = torch.ones_like(input_ids), torch.zeros_like(input_ids)
        given = (
            input_ids,
            ones if attention_mask is None else attention_mask,
            zeros if token_type_ids is None else token_type_ids,
        )
        feed = {name: x.cpu().long().numpy() for name, x in zip(INPUTS, given, strict=True)}
        outputs = map(torch.from_numpy, self.session.run(None, feed))
        return OnnxOutput(dict(zip(self.names, outputs, strict=True)))


class OnnxOutput:
    """What an `OnnxModel` returns: a tensor for each of the file's outputs, by its name."""

    loss = None

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        vars(self).update(tensors)


def quantize_onnx(source: str | Path, path: str | Path) -> None:
    """Make the weights and tables of an ONNX file int8, by ONNX Runtime's own tool.

    One range for each output; activations are quantized as they come. Weights use 7 bits: without
    VNNI instructions a processor adds two products of 8 bits in 16, which may overflow.

    In production: `onnxruntime.quantization.quantize_dynamic`.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path = Path(path)
    with replacing(path) as file, quiet():
        quantize_dynamic(
            source, file, per_channel=True, reduce_range=True, weight_type=QuantType.QInt8
        )


# --- given: measuring ---


@contextmanager
def read_mode(model: Any) -> Iterator[None]:
    """Within it, a module is in eval mode; anything else is as it is."""
    if isinstance(model, nn.Module):
        with eval_mode(model):
            yield
    else:
        yield


def call(model: Any, batch: Batch) -> Any:
    """What a model returns for a batch, moved to the model's device; waits until it is there."""
    device = device_of(model) if isinstance(model, nn.Module) else torch.device("cpu")
    output = model(**{name: x.to(device) for name, x in batch.items()})
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return output


def first_texts(batches: Sequence[Batch], count: int) -> dict[str, Tensor]:
    """The first texts of batches as one batch, without labels, cut to its longest text.

    When there are fewer texts than `count`, they come again.
    """
    texts = [
        {name: x[row] for name, x in batch.items() if name != "labels"}
        for batch in batches
        for row in range(len(batch["input_ids"]))
    ]
    chosen = list(islice(cycle(texts), count))
    pad = nn.utils.rnn.pad_sequence
    batch = {name: pad([text[name] for text in chosen], batch_first=True) for name in chosen[0]}
    if "attention_mask" not in batch:
        return batch
    longest = int(batch["attention_mask"].sum(dim=-1).max())
    return {name: x[:, :longest].contiguous() for name, x in batch.items()}


def size_on_disk_mb(model: Any) -> float:
    """How large a model's file is, in units of a million bytes.

    Of an `OnnxModel`, the file it came from; of a module, the file that its tensors make, each
    saved once.
    """
    if hasattr(model, "path"):
        return os.path.getsize(model.path) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file({name: x.cpu().contiguous() for name, x in own_tensors(model).items()}, file)
        return file.stat().st_size / 1e6


def count_numbers(model: Any) -> int | None:
    """How many numbers a module has in its parameters and saved buffers; None for a file."""
    if not isinstance(model, nn.Module):
        return None
    return sum(x.numel() for x in own_tensors(model).values())


def comparison_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The rows of `compare` as a table: its header, and the text of each cell."""
    header = ["model", "MB on disk", "million numbers", "1 text: ms (p95)", "32 texts: ms (p95)"]
    header += ["peak MB", "right"]
    cells = [
        [
            row.name,
            f"{row.size_mb:.1f}",
            "" if row.parameters is None else f"{row.parameters / 1e6:.1f}",
            f"{row.latency_1_ms:.1f}" + known(" ({:.1f})", row.latency_1_p95_ms),
            f"{row.latency_32_ms:.1f}" + known(" ({:.1f})", row.latency_32_p95_ms),
            "" if row.peak_mb is None else f"{row.peak_mb:.0f}",
            f"{row.accuracy:.1%}" + known(" ± {:.1%}", row.accuracy_error),
        ]
        for row in rows
    ]
    return header, cells


def known(text: str, number: float) -> str:
    """A text about a number; nothing where the number was left out."""
    return "" if math.isnan(number) else text.format(number)


def plot_comparison(rows: Sequence[Row], axes: Any) -> None:
    """Draw accuracy against the latency of one text, on a logarithmic axis; the disc is the size.

    Each disc has its name beside it and its accuracy's standard error through it.

    Args:
        axes: Matplotlib's, to draw on; title and labels are yours to set.
    """
    for number, row in enumerate(rows):
        place = row.latency_1_ms, 100 * row.accuracy
        error = 0 if math.isnan(row.accuracy_error) else 100 * row.accuracy_error
        axes.errorbar(*place, yerr=error, color="0.4", linewidth=0.5)
        axes.scatter(*place, s=6 * row.size_mb, facecolor="none", edgecolor="black", linewidth=1.2)
        away = (1 if number % 2 else -1) * (14 + 9 * (number % 3))  # names of near discs apart
        axes.annotate(row.name, place, (6, away), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")


# --- given: a prepared model ---

AS_IT_IS = "as it is"
ONEDNN = "oneDNN"
BF16 = "oneDNN, bfloat16"


def shared_copy(model: Any) -> Any:
    """A copy of a model whose parameters and buffers lie in the same memory, without gradients."""
    shared: dict[int, Any] = {}
    for parameter in model.parameters():
        shared[id(parameter)] = nn.Parameter(parameter.data, requires_grad=False)
    for buffer in model.buffers():
        shared[id(buffer)] = buffer
    return copy.deepcopy(model, shared)


class PackedLinear(nn.Module):
    """A linear layer whose weight is also there in the layout that the processor reads fastest.

    The product is the one of oneDNN that `torch.compile` calls for a linear layer with
    `torch._inductor.config.freezing`.

    Attributes:
        weight, bias: the linear layer's own, so that the model can be saved as before.

    Args:
        linear: an `nn.Linear`.
        way: `ONEDNN` or `BF16`.
    """

    def __init__(self, linear: nn.Linear, way: str) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.way = linear.weight, linear.bias, way
        self.dtype = torch.bfloat16 if way == BF16 else torch.float32
        self.multiply = laid_out(linear, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., out]` for `[..., in]`."""
        rows = x.reshape(-1, x.shape[-1]).to(self.dtype)
        with torch.no_grad():
            output = self.multiply(rows).to(x.dtype)
        return output.reshape(*x.shape[:-1], self.out_features)


def laid_out(linear: nn.Linear, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The product of `[tokens, in]` with a layer's weight, which it holds in oneDNN's layout.

    A function is no part of a model's tensors, and copies of the model share it.
    """
    weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(dtype))
    bias = None if linear.bias is None else linear.bias.detach().to(dtype, copy=True)
    return lambda rows: onednn_linear(rows, weight, bias)


def quickest_linear(linear: nn.Linear, precision: str) -> str:
    """Which way of multiplying by this layer's weight is fastest here, measured.

    A way is picked only if it is faster for many tokens by a tenth, and for few not slower.

    Returns:
        `AS_IT_IS`, or a way of `PackedLinear`.
    """
    fits = linear.weight.device.type == "cpu" and linear.weight.dtype == torch.float32
    if not fits or not torch.backends.mkldnn.is_available():
        return AS_IT_IS
    ways = [ONEDNN, BF16] if precision == "bf16" else [ONEDNN]
    with torch.inference_mode():
        best, least = AS_IT_IS, times_of(linear)
        for way in ways:
            try:
                times = times_of(PackedLinear(linear, way))
            except RuntimeError:  # this processor has no units for bfloat16
                continue
            if times[1] < 0.9 * least[1] and times[0] < 1.05 * least[0]:
                best, least = way, times
    return best


def times_of(layer: nn.Module) -> tuple[float, float]:
    """How long a linear layer takes for 32 tokens and for 512, in seconds."""
    few, many = (torch.ones(tokens, layer.in_features) for tokens in (32, 512))  # type: ignore[arg-type]  # a whole number
    return quickest(lambda: layer(few)), quickest(lambda: layer(many), calls=3)


class SkipsPadding:
    """Mixed into a `BertModel`'s class: a padded batch is read without its padding."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> BertModelOutput:
        """As `BertModel.forward`; where nothing asks for inner states, zeros stand at padding."""
        asked = output_hidden_states or output_attentions
        this: Any = self
        if asked or attention_mask is None or attention_mask.all():
            forward: Any = super().forward  # type: ignore[misc]  # of the class it is mixed into
            more = (output_hidden_states, output_attentions)
            return forward(input_ids, attention_mask, token_type_ids, *more)
        return this.forward_packed(input_ids, attention_mask, token_type_ids)


class RefusesTraining:
    """Mixed into a prepared model's class."""

    def train(self, mode: bool = True) -> Any:
        """Go to eval mode.

        Raises:
            ValueError: training is asked for.
        """
        require(not mode, "mode", "training", "eval: train the model this one was made from")
        return super().train(False)  # type: ignore[misc]  # of the class it is mixed into


def as_prepared(model: Any, picked: Mapping[str, str]) -> Any:
    """Let a copy skip padding and refuse training, in place; `picked` becomes an attribute."""
    mix_in(getattr(model, "bert", model), SkipsPadding)
    mix_in(model, RefusesTraining)
    model.picked = dict(picked)
    return model.eval()


def mix_in(module: Any, mixin: type) -> None:
    """Put a class in front of a module's own, which keeps its name."""
    own = type(module)
    module.__class__ = type(own.__name__, (mixin, own), {"__module__": own.__module__})
