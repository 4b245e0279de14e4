"""Pretraining: hidden words and pairs of sentences to guess, an optimizer, and a loop that resumes.

At the end stands what is given: how precision is chosen, a quicker dropout, how the labels of
several micro-batches (and of several processes) are weighed, what a checkpoint holds, and a model
that computes nothing for padding.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from bertlab.heads import IGNORED, BertForPreTrainingOutput, masked_lm_loss
from bertlab.weights import replacing

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Batch = Mapping[str, Tensor]  # the arguments of a model's forward, labels among them


@dataclass(frozen=True)
class PretrainingSettings:
    """How `pretrain` trains.

    Attributes:
        learning_rate: the highest that is reached, at the end of the warm-up.
        weight_decay: by how much a weight shrinks in a step, times the learning rate; biases and
            norms do not.
        warmup_steps: steps in which the learning rate rises from 0.
        total_steps: steps of the optimizer, after which the learning rate is 0.
        accumulation_steps: micro-batches that make the batch of one step.
        max_grad_norm: a longer gradient, all parameters together, is shortened to this length;
            None never shortens.
        precision: `"float32"`; `"bf16"` or `"fp16"` run the forward pass in 16 bits where PyTorch's
            autocast finds that safe, and leave the weights in float32.
        checkpoint: the file that a run is kept in, and from which it goes on; None keeps nothing.
        checkpoint_every: write it after so many steps; 0 at the end only.

    Raises:
        ValueError: a field has a value that makes no sense; the message names it.

    Source: Devlin et al. 2019, appendix A.2, has BERT's numbers: 1e-4, 0.01, 10,000 steps of
    warm-up, 1,000,000 steps of 256 texts.
    """

    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    warmup_steps: int = 0
    total_steps: int = 1000
    accumulation_steps: int = 1
    max_grad_norm: float | None = 1.0
    precision: str = "float32"
    checkpoint: str | Path | None = None
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        for name, least in LEAST.items():
            value = getattr(self, name, least)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            require(is_whole and value >= least, name, value, f"a whole number, at least {least}")
        norm = self.max_grad_norm
        require(norm is None or norm > 0, "max_grad_norm", norm, "greater than 0, or None")
        allowed = f"one of {', '.join(PRECISIONS)}"
        require(self.precision in PRECISIONS, "precision", self.precision, allowed)


@dataclass(frozen=True)
class AdaptationSettings(PretrainingSettings):
    """How `adapt` trains: the fields of `PretrainingSettings`, and three more.

    Attributes:
        batch_size: texts in a micro-batch.
        max_length: tokens in a text, `[CLS]` and `[SEP]` included; longer texts are cut into
            several.
        seed: of the order of the texts and of the masks.
    """

    batch_size: int = 32
    max_length: int = 128
    seed: int = 0


LEAST = {  # the settings that count something, and the least they may be
    "warmup_steps": 0,
    "total_steps": 1,
    "accumulation_steps": 1,
    "checkpoint_every": 0,
    "batch_size": 1,
    "max_length": 3,
}


def require(allowed: bool, name: str, value: object, allowed_values: str) -> None:
    """Raise ValueError unless a setting has a value that is allowed."""
    if not allowed:
        raise ValueError(f"{name} is {value!r}, but must be {allowed_values}")


# --- exercise 6.1: mask tokens ---
def mask_tokens(
    input_ids: Tensor,
    tokenizer: Any,
    probability: float = 0.15,
    generator: torch.Generator | None = None,
    whole_word: bool = False,
) -> tuple[Tensor, Tensor]:
    """Hide some tokens of a batch, and say what they were.

    Each token is chosen with `probability`, independently of the others; a special token
    (`tokenizer.all_special_ids`, `[UNK]` among them) never. Of the chosen ones 80% become
    `[MASK]`, 10% a piece drawn from the whole vocabulary, each piece as likely as any other, and
    10% stay as they are.

    Args:
        input_ids: `[batch, seq]`, padded or not; not changed.
        tokenizer: has `mask_token_id`, `all_special_ids`, `vocab_size` and
            `convert_ids_to_tokens`, as `WordPieceTokenizer` and Transformers' tokenizers do.
        probability: how likely a token is chosen.
        generator: where the draws come from, on the device of `input_ids`; PyTorch's global
            generator when None.
        whole_word: choose words instead of tokens, each with `probability`: a piece and the
            pieces with `##` that follow it are chosen together. What a chosen piece becomes is
            drawn for each piece by itself.

    Returns:
        `(inputs, labels)`, both `[batch, seq]`: what the model reads, and the ids that were there
        at the chosen places, -100 elsewhere.

    Source: Devlin et al. 2019, section 3.1, task 1; whole words: their `create_pretraining_data.py`
    of May 2019. In production: `transformers.DataCollatorForLanguageModeling`.
    """
    ### BEGIN SOLUTION
    device = input_ids.device
    special = torch.tensor(tokenizer.all_special_ids, device=device)
    draws = torch.rand(input_ids.shape, generator=generator, device=device)
    if whole_word:
        draws = draws.gather(-1, first_pieces(input_ids, tokenizer))  # a word has one draw
    chosen = (draws < probability) & ~torch.isin(input_ids, special)
    labels = input_ids.masked_fill(~chosen, IGNORED)

    fate = torch.rand(input_ids.shape, generator=generator, device=device)
    pieces = torch.randint(
        tokenizer.vocab_size, input_ids.shape, generator=generator, device=device
    )
    inputs = input_ids.masked_fill(chosen & (fate < 0.8), tokenizer.mask_token_id)
    return torch.where(chosen & (fate >= 0.9), pieces, inputs), labels
    ### END SOLUTION


### BEGIN SOLUTION
def first_pieces(input_ids: Tensor, tokenizer: Any) -> Tensor:
    """For each token the place, `[batch, seq]`, where its word begins."""
    ids = input_ids.unique()
    pieces = tokenizer.convert_ids_to_tokens(ids.tolist())
    goes_on = [piece is not None and piece.startswith("##") for piece in pieces]
    begins = ~torch.isin(input_ids, ids[torch.tensor(goes_on, device=ids.device)])
    begins[..., 0] = True
    places = torch.arange(input_ids.shape[-1], device=ids.device).expand_as(input_ids)
    return places.masked_fill(~begins, 0).cummax(dim=-1).values


### END SOLUTION
# --- end of exercise 6.1 ---


# --- exercise 6.2: pairs of sentences ---
def sentence_pairs(
    documents: Sequence[Sequence[str]], tokenizer: Any, max_length: int, rng: random.Random
) -> list[dict[str, Any]]:
    """Pairs of sentences, half of which stood one after the other.

    Every sentence A that has a next one in its document makes a pair, in the order of the text.
    With probability 1/2 its B is that next sentence; otherwise B is a sentence of another
    document, each of the others as likely, and each sentence of it.

    Args:
        documents: lists of sentences. A "sentence" may be any stretch of text, such as a
            paragraph; BERT's own ran over several sentences to fill 512 tokens. A document without
            sentences is ignored.
        tokenizer: called as `tokenizer(firsts, seconds, truncation=True, max_length=max_length)`,
            it takes two lists of texts and gives lists of `input_ids`, `token_type_ids` and
            `attention_mask`, the longer text of a pair cut first.
        max_length: in tokens, `[CLS]` and both `[SEP]` included.
        rng: where the draws come from.

    Returns:
        A dict for each pair: `input_ids, token_type_ids, attention_mask`, lists of whole numbers,
        unpadded, and `next_sentence_label`: 0 where B follows A, 1 where it does not (Transformers'
        convention).

    Raises:
        ValueError: there are sentences to pair in one document only, so there is no other to draw
            from.

    Source: Devlin et al. 2019, section 3.1, task 2, and their `create_pretraining_data.py`.
    """
    ### BEGIN SOLUTION
    documents = [document for document in documents if document]
    if len(documents) == 1 and len(documents[0]) > 1:
        raise ValueError(
            "documents has 1 with sentences, but must have at least 2: a wrong second sentence "
            "comes from another document"
        )
    firsts, seconds, labels = [], [], []
    for number, document in enumerate(documents):
        for first, second in pairwise(document):
            label = rng.randrange(2)
            if label == 1:
                second = rng.choice(another_document(documents, number, rng))
            firsts.append(first)
            seconds.append(second)
            labels.append(label)
    if not labels:
        return []
    columns = tokenizer(firsts, seconds, truncation=True, max_length=max_length)
    names = ("input_ids", "token_type_ids", "attention_mask")
    rows = zip(*(columns[name] for name in names), labels, strict=True)
    return [dict(zip((*names, "next_sentence_label"), row, strict=True)) for row in rows]
    ### END SOLUTION


### BEGIN SOLUTION
def another_document(
    documents: Sequence[Sequence[str]], number: int, rng: random.Random
) -> Sequence[str]:
    """A document drawn from all but the one with this number."""
    other = rng.randrange(len(documents) - 1)
    return documents[other + (other >= number)]


### END SOLUTION
# --- end of exercise 6.2 ---


# --- exercise 6.3: warm-up and decay ---
def warmup_linear(step: int, warmup_steps: int, total_steps: int) -> float:
    """What the learning rate is multiplied by: up from 0 to 1 in a line, and down to 0 in a line.

    Args:
        step: how many steps of the optimizer are done.
        warmup_steps: with so many steps done it is 1; it starts there when 0.
        total_steps: with so many steps done, or more, it is 0.

    Returns:
        A number from 0 to 1.

    Source: Devlin et al. 2019, appendix A.2.
    In production: `transformers.get_linear_schedule_with_warmup`.
    """
    ### BEGIN SOLUTION
    if step < warmup_steps:
        return step / warmup_steps
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))
    ### END SOLUTION


# --- end of exercise 6.3 ---


# --- exercise 6.4: AdamW ---
def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """A model's parameters in two groups for an optimizer: with weight decay, and without.

    Biases and the weights of an `nn.LayerNorm` are not decayed; everything else is. A parameter
    that stands in two places (the MLM head's decoder) is listed once. Parameters that are not
    trained (`requires_grad` is False) are left out.

    Args:
        model: any module.
        weight_decay: of the first group.

    Returns:
        `[{"params": [...], "weight_decay": weight_decay}, {"params": [...], "weight_decay": 0.0}]`,
        each in the order of `model.named_parameters()`.

    Source: Devlin et al.'s `optimization.py`, `exclude_from_weight_decay`.
    In production: `transformers.Trainer.get_decay_parameter_names`.
    """
    ### BEGIN SOLUTION
    norms = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.LayerNorm)
        for parameter in module.parameters(recurse=False)
    }
    decayed, others = [], []
    for name, parameter in model.named_parameters():  # a tied parameter comes once
        if parameter.requires_grad:
            spared = parameter in norms or name.split(".")[-1] == "bias"
            (others if spared else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    ### END SOLUTION


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay.

    For a parameter p with gradient g, in step t = 1, 2, ...:

        p <- p - lr * weight_decay * p
        m <- beta1 * m + (1 - beta1) * g            v <- beta2 * v + (1 - beta2) * g²
        p <- p - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)

    m and v start at 0. A parameter without a gradient is left as it is, decay included.

    Args:
        params: parameters, or groups of them: dicts with `params` and any of the settings below.
        lr: the learning rate.
        betas: how much of the running means of g and g² is kept in a step.
        eps: added to the root.
        weight_decay: see above.

    Source: Loshchilov and Hutter 2019, algorithm 2. In production: `torch.optim.AdamW`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        ### BEGIN SOLUTION
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        ### END SOLUTION

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient.

        Args:
            closure: None, or a function that computes the gradients anew and returns the loss; it
                is called first, with gradients enabled.

        Returns:
            What `closure` returned; None without one.
        """
        ### BEGIN SOLUTION
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    move(parameter, parameter.grad, self.state[parameter], group)
        return loss
        ### END SOLUTION


### BEGIN SOLUTION
def move(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Any) -> None:
    """One parameter's step; `state` is what is kept of it from step to step."""
    if not state:
        state |= {"step": 0, "m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter)}
    state["step"] += 1
    (beta1, beta2), m, v = group["betas"], state["m"], state["v"]
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    m.lerp_(gradient, 1 - beta1)
    v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (v / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
    parameter.addcdiv_(m, root, value=-group["lr"] / (1 - beta1 ** state["step"]))


### END SOLUTION
# --- end of exercise 6.4 ---


# --- exercise 6.5: the training loop ---
def training_step(
    model: nn.Module,
    batch: Batch,
    scaler: torch.amp.GradScaler | None = None,
    autocast: AbstractContextManager[Any] | None = None,
    share: Share | None = None,
) -> Tensor:
    """Run a micro-batch forward and backward: its gradient is added to what is there.

    Args:
        model: called as `model(**batch)`, it returns an object with `loss`.
        batch: on the model's device.
        scaler: its `scale(loss)` is what is differentiated; the loss itself when None.
        autocast: the context in which the forward pass runs; the backward pass does not.
        share: what part of its batch's labels the micro-batch has. The loss is then this
            micro-batch's part of the batch's loss (`loss_in_batch`, given); when None it is
            `model`'s own.

    Returns:
        The loss, a number without a graph, not scaled.
    """
    ### BEGIN SOLUTION
    with autocast or nullcontext():
        output = model(**batch)
        loss = output.loss if share is None else loss_in_batch(output, batch, share)
    (loss if scaler is None else scaler.scale(loss)).backward()
    return loss.detach()
    ### END SOLUTION


def pretrain(
    model: nn.Module,
    data: Iterable[Batch],
    settings: PretrainingSettings,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train a model, and go on where an earlier call with the same checkpoint stopped.

    In each step: read `accumulation_steps` micro-batches, add up their gradients, each weighed so
    that the sum is the gradient of all their texts as one batch; unscale it, shorten it to
    `max_grad_norm`, and let AdamW move the parameters (your own, or `fused_adamw`, given: the same
    numbers, sooner), at a learning rate of `learning_rate * warmup_linear(steps done, ...)`. Biases
    and norms are not decayed.

    In several processes (`torch.distributed`), each reads `data` of its own, and one step takes
    the micro-batches of all.

    Args:
        model: called as `model(**batch)`, it returns an object with `loss`. It is trained in
            training mode, and left in the mode it was in.
        data: yields micro-batches, dicts of the arguments of `model`'s forward. It is read from the
            beginning again when it ends. A resumed run reads what was used already once more and
            skips it, so `data` must yield the same then: any draws come from PyTorch's, NumPy's or
            Python's global generator, or from one that `data` makes with a seed. If `data` has
            `state_dict` and `load_state_dict`, these are used instead, and nothing is read twice.
        settings: see `PretrainingSettings`.
        on_step: called after each step, and after its checkpoint was written, with the number of
            steps done and the loss.

    Returns:
        The loss of every step, those before a resume included.

    Raises:
        ValueError: `data` is empty; or the checkpoint is damaged, of another model, or of a run
            with other settings. The model is then as it was.
    """
    ### BEGIN SOLUTION
    optimizer = fused_adamw(parameter_groups(model, settings.weight_decay))
    scaler = gradient_scaler(model, settings.precision)
    run = TrainingRun(model, optimizer, scaler, MicroBatches(data), settings)
    run.resume()
    was_training = model.training
    model.train()
    for step in progress(run):
        micro_batches = [next(run.data) for _ in range(settings.accumulation_steps)]
        rate = warmup_linear(step, settings.warmup_steps, settings.total_steps)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate
        loss = accumulate(model, micro_batches, scaler, settings.precision)
        add_up_gradients(model)
        scaler.unscale_(optimizer)
        if settings.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.losses.append(loss)
        run.save_if_due()
        if on_step is not None:
            on_step(step + 1, loss)
    model.train(was_training)
    return run.losses
    ### END SOLUTION


### BEGIN SOLUTION
def accumulate(model: nn.Module, micro_batches: list[Batch], scaler: Any, precision: str) -> float:
    """Add up the gradients of micro-batches; returns the loss of all their texts as one batch."""
    device = device_of(model)
    losses = []
    for batch, share in zip(micro_batches, shares(micro_batches), strict=True):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        autocast = autocast_for(device, precision)
        losses.append(training_step(model, batch, scaler, autocast, share))
    return add_up([sum(loss.item() for loss in losses)])[0]


### END SOLUTION
# --- end of exercise 6.5 ---


# --- exercise 6.6: adapt a model to a domain ---
def adapt(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str],
    settings: AdaptationSettings,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Pretrain a model further on a domain's texts, by masked words alone.

    The texts are read again and again until `total_steps` are done, each time all of them, in
    another order and with other masks. A text of more than `max_length` tokens is cut into pieces
    of `max_length`, the last one shorter, each with a `[CLS]` and `[SEP]` of its own. A micro-batch
    is `batch_size` of these (the last of a round may have fewer), padded to the longest.

    Args:
        model: `BertForMaskedLM` or `BertForPreTraining`; changed in place.
        tokenizer: the model's: has `encode(text)`, a list of ids with `[CLS]` and `[SEP]`,
            `pad_token_id`, and what `mask_tokens` asks for.
        texts: of the domain.
        settings: see `AdaptationSettings`.
        on_step: as for `pretrain`.

    Returns:
        The loss of every step.

    Raises:
        ValueError: `texts` is empty; or as in `pretrain`.

    Source: Gururangan et al. 2020, "Don't Stop Pretraining", section 3.
    In production: Transformers' `run_mlm.py`.
    """
    ### BEGIN SOLUTION
    pieces = cut_texts(tokenizer, texts, settings.max_length)
    if not pieces:
        raise ValueError("texts has no text with a token in it; give at least one")
    return pretrain(model, masked_batches(pieces, tokenizer, settings), settings, on_step)
    ### END SOLUTION


### BEGIN SOLUTION
def cut_texts(tokenizer: Any, texts: Sequence[str], max_length: int) -> list[Tensor]:
    """The ids of every text, cut into pieces of at most `max_length`, each with its own ends."""
    pieces, room = [], max_length - 2
    for text in texts:
        cls, *ids, sep = tokenizer.encode(text)
        for start in range(0, len(ids), room):
            pieces.append(torch.tensor([cls, *ids[start : start + room], sep]))
    return pieces


def masked_batches(
    pieces: list[Tensor], tokenizer: Any, settings: AdaptationSettings
) -> Iterator[dict[str, Tensor]]:
    """Micro-batches without end; pieces of like length stand together, to save padding."""
    generator = torch.Generator().manual_seed(settings.seed)
    lengths = torch.tensor([len(piece) for piece in pieces])
    while True:
        batches: list[Tensor] = []
        for pool in torch.randperm(len(pieces), generator=generator).split(
            16 * settings.batch_size
        ):
            batches += pool[lengths[pool].argsort(stable=True)].split(settings.batch_size)
        for number in torch.randperm(len(batches), generator=generator).tolist():
            chosen = [pieces[i] for i in batches[number].tolist()]
            input_ids = nn.utils.rnn.pad_sequence(
                chosen, batch_first=True, padding_value=tokenizer.pad_token_id
            )
            inputs, labels = mask_tokens(input_ids, tokenizer, generator=generator)
            real = nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in chosen], batch_first=True)
            yield {"input_ids": inputs, "attention_mask": real, "labels": labels}


### END SOLUTION
# --- end of exercise 6.6 ---


# --- given: a batch in several micro-batches, and in several processes ---


class Share(NamedTuple):
    """What part of a batch's labels a micro-batch has, from 0 to 1, of each kind."""

    words: float
    pairs: float


def shares(micro_batches: Sequence[Batch]) -> list[Share]:
    """The shares of micro-batches that make one batch, with those of all other processes."""
    counts = [count_labels(batch) for batch in micro_batches]
    words, pairs = add_up([sum(column) for column in zip(*counts, strict=True)])
    return [Share(w / max(words, 1), p / max(pairs, 1)) for w, p in counts]


def count_labels(batch: Batch) -> tuple[float, float]:
    """How many words and how many pairs of a micro-batch have a label."""
    kinds = ("labels", "next_sentence_label")
    words, pairs = (
        float((batch[kind] != IGNORED).sum()) if kind in batch else 0.0 for kind in kinds
    )
    return words, pairs


def loss_in_batch(output: Any, batch: Batch, share: Share) -> Tensor:
    """A micro-batch's part of its batch's loss: what all of them add up to.

    A model's loss is the mean over its labelled words, plus the mean over its pairs. A micro-batch
    with twice as many labelled words as another counts twice in the mean of both, and the two
    kinds of label have to be weighed apart.

    Args:
        output: what the model returned for `batch`: `loss` and, where there are pairs,
            `seq_relationship_logits`.
    """
    if "next_sentence_label" not in batch:
        return weighed(output.loss, share.words)
    if "labels" not in batch:
        return weighed(output.loss, share.pairs)
    target = batch["next_sentence_label"].view(-1)
    pairs = F.cross_entropy(output.seq_relationship_logits, target)
    return weighed(output.loss - pairs, share.words) + weighed(pairs, share.pairs)


def weighed(loss: Tensor, share: float) -> Tensor:
    """A mean times its share; 0 where the share is 0, and so the mean one of nothing."""
    return loss * share if share else loss.nan_to_num() * 0


def processes() -> int:
    """How many processes train together; 1 without `torch.distributed`."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def add_up(numbers: Sequence[float]) -> list[float]:
    """The sum of each number over all processes."""
    if processes() == 1:
        return list(numbers)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def add_up_gradients(model: nn.Module) -> None:
    """Replace every gradient by its sum over all processes: what one process would have."""
    if processes() == 1:
        return
    waiting = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # no label of that kind here; perhaps elsewhere
                parameter.grad = torch.zeros_like(parameter)
            waiting.append(dist.all_reduce(parameter.grad, async_op=True))
    for work in waiting:
        work.wait()


# --- given: the optimizer's kernel, precision, and dropout with fewer random bits ---


def fused_adamw(groups: Iterable[Any]) -> torch.optim.Optimizer:
    """`AdamW`'s numbers from one kernel, which reads and writes each parameter once.

    The formulas of exercise 6.4 go through memory once for each operation.
    """
    return torch.optim.AdamW(groups, fused=True)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are."""
    return next(model.parameters()).device


def autocast_for(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The context for a forward pass in this precision."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=PRECISIONS[precision])


class QuickDropout(TorchFunctionMode):
    """Within it, dropout on the CPU draws 16 random bits for each number, and PyTorch's draws more.

        with QuickDropout():
            fine_tune(model, train, validation, settings)

    Dropout is about a tenth of a training step on a CPU, and most of that is random numbers, which
    are drawn on one core. Here a probability is rounded to a multiple of 1/65,536, and what is kept
    is scaled by the rounded one, so that the mean stays. The same seed gives other masks than
    PyTorch's dropout. On a GPU, and in eval mode, nothing changes.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call PyTorch's function, or for dropout and attention the one below."""
        quick = {
            F.dropout: quick_dropout,
            F.scaled_dot_product_attention: attention_with_quick_dropout,
        }
        return quick.get(func, func)(*args, **(kwargs or {}))


def quick_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """`F.dropout`, of numbers on the CPU with a probability of 16 bits."""
    parts = round(p * 2**16)
    if input.device.type != "cpu" or not training or inplace or not 0 < parts < 2**16:
        return F.dropout(input, p, training, inplace)
    eight_bytes = torch.empty(-(-input.numel() // 4), dtype=torch.int64, device=input.device)
    eight_bytes.random_(-(2**63), None)
    numbers = eight_bytes.view(torch.int16)[: input.numel()].view(input.shape)
    kept = (numbers >= parts - 2**15).to(input.dtype)
    return input * kept.mul_(2**16 / (2**16 - parts))


def attention_with_quick_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    **options: Any,
) -> Tensor:
    """`F.scaled_dot_product_attention`, which with dropout holds all the weights too on a CPU."""
    is_quick = query.device.type == "cpu" and dropout_p > 0 and not options
    if not is_quick or not leaves_something(attn_mask):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p=dropout_p, **options
        )
    scores = query * query.shape[-1] ** -0.5 @ key.mT
    weights = (scores if attn_mask is None else scores + attn_mask).softmax(dim=-1)
    return quick_dropout(weights, dropout_p) @ value


def leaves_something(mask: Tensor | None) -> bool:
    """Say whether a mask is one that is added, and hides all in no row: there softmax makes NaN."""
    if mask is None or not mask.dtype.is_floating_point:
        return mask is None
    return not mask.isneginf().all(dim=-1).any()


def gradient_scaler(model: nn.Module, precision: str) -> torch.amp.GradScaler:
    """A scaler that is at work in fp16 alone, and otherwise hands everything on unchanged.

    The smallest number above 0 that float16 knows is 6e-8, and many gradients are smaller. So the
    loss is multiplied by a large number before they are computed, and they are divided by it
    afterwards; a step in which that was too much is left out.
    """
    return torch.amp.GradScaler(device_of(model).type, enabled=precision == "fp16")


# --- given: a run, and the checkpoint that it is kept in ---


class MicroBatches:
    """Reads `data` one micro-batch after the other, and knows how far it is.

    Attributes:
        epoch: how often `data` was read to its end.
        place: how many micro-batches of this epoch are read.
        start: the state of the generators when this epoch began: what `data` drew then (an order,
            say) it draws again from there.
    """

    def __init__(self, data: Iterable[Batch]) -> None:
        self.data: Any = data
        self.epoch, self.place = -1, 0
        self.start: Mapping[str, Tensor] = {}
        self.iterator: Iterator[Batch] = iter(())

    def begin_epoch(self) -> None:
        """Read `data` from its beginning."""
        self.epoch += 1
        self.place = 0
        self.start = generator_states()
        self.iterator = iter(self.data)

    def __next__(self) -> Batch:
        """The next micro-batch; of the next epoch, if this one is over."""
        batch = next(self.iterator, None)
        if batch is None:
            self.begin_epoch()
            batch = next(self.iterator, None)
        if batch is not None:
            self.place += 1
            return batch
        raise ValueError(
            "data has no more micro-batches, and none when it is read from the beginning; give a "
            "list, or another object that can be read again, or a generator that does not end"
        )

    def position(self) -> dict[str, Any]:
        """How far it is, as plain values."""
        position = {"epoch": self.epoch, "place": self.place}
        if hasattr(self.data, "state_dict"):
            position["data"] = self.data.state_dict()
        return position

    def go_to(self, position: Mapping[str, Any], start: Mapping[str, Tensor]) -> None:
        """Go on from a position; `start` is what the generators were when its epoch began.

        Raises:
            ValueError: `data` is shorter than it was.
        """
        if "data" in position:
            self.data.load_state_dict(position["data"])
            self.iterator = iter(self.data)
            self.epoch, self.place, self.start = position["epoch"], position["place"], start
            return
        for _ in range(position["epoch"]):
            self.begin_epoch()
            for _ in self.iterator:
                pass
        set_generator_states(start)
        self.begin_epoch()
        for _ in range(position["place"]):
            next(self)
        if self.epoch != position["epoch"]:
            raise ValueError(
                f"data has ended before micro-batch {position['place']}, which the run had read; "
                "it must yield the same as when the run began"
            )


@dataclass
class TrainingRun:
    """All that a run has become so far, which is what its checkpoint holds.

    A checkpoint is one safetensors file: tensors, and plain values as JSON in its header. Nothing
    in it is run when it is read, as a pickle's content would be.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    data: MicroBatches
    settings: PretrainingSettings
    losses: list[float] = field(default_factory=list)

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self.losses)

    def save_if_due(self) -> None:
        """Write the checkpoint, if there is one and it is time."""
        every = self.settings.checkpoint_every
        is_due = self.step == self.settings.total_steps or (every and self.step % every == 0)
        if self.settings.checkpoint is not None and is_due:
            self.save(Path(self.settings.checkpoint))

    def save(self, path: Path) -> None:
        """Write the checkpoint; the one before stays until the new one is complete."""
        tensors = {f"model.{name}": value for name, value in own_tensors(self.model).items()}
        plain = {
            "settings": what_decides(self.settings),
            "processes": processes(),
            "position": self.data.position(),
            "scaler": self.scaler.state_dict(),
            "optimizer": take_tensors(self.optimizer.state_dict(), "optimizer", tensors),
        }
        tensors["losses"] = torch.tensor(self.losses, dtype=torch.float64)
        for rank, states in enumerate(of_all_processes((generator_states(), self.data.start))):
            for kind, state in zip(("now", "start"), states, strict=True):
                tensors |= {f"generators.{rank}.{kind}.{name}": x for name, x in state.items()}
        if rank_here() == 0:
            write_checkpoint(path, tensors, plain)

    def resume(self) -> None:
        """Become what the checkpoint holds, if there is one.

        Raises:
            ValueError: it is damaged, of another model, or of a run with other settings. Nothing
                was changed then.
        """
        path = self.settings.checkpoint
        if path is None or not Path(path).exists():
            return
        tensors, plain = read_checkpoint(Path(path))
        check_settings(Path(path), plain["settings"], self.settings)
        own = own_tensors(self.model)
        check_tensors(Path(path), tensors, own)
        check_processes(Path(path), plain)
        self.optimizer.load_state_dict(put_tensors(plain["optimizer"], "optimizer", tensors))
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(tensors[f"model.{name}"])
        if plain["scaler"]:
            self.scaler.load_state_dict(plain["scaler"])
        self.losses = tensors["losses"].tolist()
        now, start = generators_of(tensors, rank_here())
        set_generator_states(start)
        self.data.go_to(plain["position"], start)
        set_generator_states(now)


def progress(run: TrainingRun) -> Iterator[int]:
    """The numbers of the steps that are left, with a progress bar that shows the loss."""
    total = run.settings.total_steps
    # Only the first process shows one, unless TQDM_DISABLE hides that, too.
    hidden: dict[str, Any] = {"disable": True} if rank_here() != 0 else {}
    with tqdm(total=total, initial=run.step, desc="Training", delay=1, **hidden) as bar:
        for step in range(run.step, total):
            yield step
            bar.set_postfix(loss=f"{run.losses[-1]:.3f}", refresh=False)
            bar.update()


def rank_here() -> int:
    """The number of this process among those that train together; 0 if it is alone."""
    return dist.get_rank() if processes() > 1 else 0


def of_all_processes(value: Any) -> list[Any]:
    """Every process's value, in order; all processes must call it."""
    if processes() == 1:
        return [value]
    values: list[Any] = [None] * processes()
    dist.all_gather_object(values, value)
    return values


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and saved buffers by name, each once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor.detach()))
    return dict(found.values())


def what_decides(settings: PretrainingSettings) -> dict[str, Any]:
    """The settings on which the weights at the end depend; the batch over all processes."""
    fields = {k: v for k, v in asdict(settings).items() if not k.startswith("checkpoint")}
    return fields | {"accumulation_steps": settings.accumulation_steps * processes()}


def check_settings(path: Path, saved: Mapping[str, Any], settings: PretrainingSettings) -> None:
    """Raise ValueError if the checkpoint is of a run with other settings."""
    for name, value in what_decides(settings).items():
        if saved.get(name) != value:
            what = f"{name} (times processes)" if name == "accumulation_steps" else name
            raise ValueError(
                f"{path} is of a run with {what} {saved.get(name)!r}, but here it is {value!r}; a "
                "run goes on with the settings it began with. Give a new run another checkpoint"
            )


def check_processes(path: Path, plain: Mapping[str, Any]) -> None:
    """Raise ValueError if other processes than those of the run cannot go on with its data."""
    if plain["processes"] != processes() and "data" not in plain["position"]:
        raise ValueError(
            f"{path} is of a run in {plain['processes']} processes, and here are {processes()}; to "
            "go on with another number, data needs state_dict and load_state_dict"
        )


def check_tensors(path: Path, saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the checkpoint is of another model."""
    theirs = {
        name.removeprefix("model."): list(x.shape)
        for name, x in saved.items()
        if name.startswith("model.")
    }
    ours = {name: list(x.shape) for name, x in own.items()}
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise ValueError(
                f"{path} is of another model: {name} has shape {theirs.get(name)} there and "
                f"{ours.get(name)} here"
            )


def take_tensors(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A state dict with every tensor replaced by None and put into `tensors` under its path."""
    if isinstance(tree, Tensor):
        tensors[name] = tree
        return None
    if isinstance(tree, Mapping):
        return {key: take_tensors(value, f"{name}.{key}", tensors) for key, value in tree.items()}
    return tree


def put_tensors(tree: Any, name: str, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `take_tensors`; the keys of a dict that are numbers become numbers again."""
    if name in tensors:
        return tensors[name]
    if isinstance(tree, Mapping):
        return {
            int(key) if key.isdigit() else key: put_tensors(value, f"{name}.{key}", tensors)
            for key, value in tree.items()
        }
    return tree


CHECKPOINT = "bertlab pretraining checkpoint 1"  # the layout's name; another layout, another number


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Write a checkpoint beside its place, wait until the disk has it, and put it in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left_over in path.parent.glob(f".{path.name}.*"):  # of a process that was killed
        left_over.unlink(missing_ok=True)
    metadata = {"format": "pt", "kind": CHECKPOINT, "plain": json.dumps(plain)}
    try:
        with replacing(path) as file:
            save_file({name: x.cpu().contiguous() for name, x in tensors.items()}, file, metadata)
            with open(file, "rb") as written:
                os.fsync(written.fileno())
    except (OSError, SafetensorError) as error:
        kept = "the one before is still good" if path.exists() else "there is none yet"
        raise OSError(f"the checkpoint {path} cannot be written ({error}); {kept}") from error


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the plain values of a checkpoint.

    Raises:
        ValueError: it is damaged, or something else than a checkpoint of `pretrain`.
    """
    try:
        with safe_open(path, framework="pt") as content:
            metadata = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  # no dict
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as a checkpoint ({error}): it is damaged or incomplete; move "
            "it away to begin anew"
        ) from error
    if metadata.get("kind") != CHECKPOINT:
        raise ValueError(
            f"{path} is no checkpoint of pretrain (of this version: {CHECKPOINT!r}); give another "
            "file as settings.checkpoint"
        )
    return tensors, json.loads(metadata["plain"])


# --- given: the generators of random numbers ---


def generator_states() -> dict[str, Tensor]:
    """The states of Python's, NumPy's and PyTorch's global generators."""
    _, numbers, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(numbers),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), place, has_gauss]),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Put the generators into states that `generator_states` returned."""
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    *keys, place, has_gauss = states["numpy"].tolist()
    cached = states["numpy_gauss"].item()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), place, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])


def generators_of(tensors: Mapping[str, Tensor], rank: int) -> list[dict[str, Tensor]]:
    """A process's generators in a checkpoint: as they were when it was written, and at the start
    of the epoch.

    A process that the run did not have before gets those of process 0, moved on to a seed of its
    own: it then draws other numbers.
    """
    known = rank if f"generators.{rank}.now.torch" in tensors else 0
    found = []
    for kind in ("now", "start"):
        prefix = f"generators.{known}.{kind}."
        states = {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}
        if known != rank:
            drawn = torch.Generator()
            drawn.set_state(states["torch"])
            seed = int(torch.randint(2**62, (1,), generator=drawn)) + rank
            states["torch"] = torch.Generator().manual_seed(seed).get_state()
        found.append(states)
    return found


# --- given: a model that computes nothing for padding ---


class WithoutPadding(nn.Module):
    """A pretraining model that lays the texts of a batch end to end, and drops the padding.

    The same losses as `model`'s own, for less: time follows the number of tokens. No text attends
    to another (see `bertlab.encoder.packed_forward`).

    Attributes:
        model: `BertForMaskedLM` or `BertForPreTraining`, whose parameters these are.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **wanted: Tensor | None,
    ) -> BertForPreTrainingOutput:
        """The arguments (`labels` and `next_sentence_label` among them) and the loss of `model`."""
        model: Any = self.model
        read = model.bert.forward_packed(input_ids, attention_mask, token_type_ids)
        loss, logits = masked_lm_loss(model.mlm_head, read.last_hidden_state, wanted.get("labels"))
        pair_logits = model.nsp_head(read.pooler_output) if hasattr(model, "nsp_head") else None
        follows = wanted.get("next_sentence_label")
        if follows is not None and pair_logits is not None:
            pairs = F.cross_entropy(pair_logits, follows.view(-1))
            loss = pairs if loss is None else loss + pairs
        return BertForPreTrainingOutput(loss, logits, pair_logits)
