"""Chapter 7: batches, heads for tasks, the fine-tuning loop, more examples, impacts.

Heads, loops and impacts are judged on a small model with the names of `BertModel` (`Reader`), so
that no other exercise's part is needed. Where a part draws at random, laws and shares are judged.
"""

import copy
import itertools
import math
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

# --- shared by the exercises ---

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 24,
}


class _Table(nn.Module):
    """Looks rows up: an `nn.Embedding` that draws nothing when it is made."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class _Linear(nn.Module):
    """The parameters of an `nn.Linear`; nothing is drawn when it is made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))
        self.bias = nn.Parameter(torch.zeros(width))

    def of(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight, self.bias))


class _Embeddings(nn.Module):
    def __init__(self, config: Any, dropout: float) -> None:
        super().__init__()
        width = config.hidden_size
        self.word = _Table(config.vocab_size, width)
        self.position = _Table(config.max_position_embeddings, width)
        self.token_type = _Table(config.type_vocab_size, width)
        self.norm = nn.LayerNorm(width)
        self.rate = dropout

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        summed = self.word(input_ids) + self.position.weight[: input_ids.shape[1]]
        types = self.token_type.weight
        summed = summed + (types[0] if token_type_ids is None else types[token_type_ids])
        return F.dropout(self.norm(summed), self.rate, self.training)


class Reader(nn.Module):
    """A small model with the names of `BertModel`, as a head, a loop and an impact need them.

    In each layer a token looks at itself and at the mean of all real tokens.
    """

    def __init__(self, config: Any, dropout: float = 0.0) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.embeddings = _Embeddings(config, dropout)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(_Linear(width) for _ in range(config.num_hidden_layers))
        self.pooler = _Linear(width)
        self.modes: list[bool] = []

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> Any:
        """Read a batch, and note in which mode."""
        from bertlab.encoder import BertModelOutput

        self.modes.append(self.training)
        encoder: Any = self.encoder
        last = self.embeddings(input_ids, token_type_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        real = mask[..., None].to(last.dtype)
        for layer in encoder.layers:
            text = (last * real).sum(dim=1, keepdim=True) / real.sum(dim=1, keepdim=True)
            last = last + layer.of(last + text)
        return BertModelOutput(last, self.pooler.of(last[:, 0]))


def drawn_reader(rng: np.random.Generator, **changes: Any) -> dict[str, Tensor]:
    """Draw the parameters of a `Reader`, by their names in a model that has it as `bert`."""
    reader = Reader(bert_config(**{**SIZES, **changes}))
    state = parameters_like(reader, rng, {"position.weight": 1.5, "token_type.weight": 2.0})
    return {f"bert.{name}": value for name, value in state.items()}


def drawn_layer(
    rng: np.random.Generator, name: str, outputs: int, inputs: int = SIZES["hidden_size"]
) -> dict[str, Tensor]:
    """Draw a linear layer's weight and bias."""
    return {
        f"{name}.weight": normal(rng, outputs, inputs, scale=2 * inputs**-0.5),
        f"{name}.bias": normal(rng, outputs),
    }


def drawn_batch(
    rng: np.random.Generator, lengths: Sequence[int], pairs: bool = True
) -> dict[str, Tensor]:
    """Draw a padded batch; `pairs` gives each text's second half token type 1."""
    mask = padding_mask(lengths, max(lengths))
    ids = integers(rng, 1, SIZES["vocab_size"], *mask.shape) * mask
    batch = {"input_ids": ids, "attention_mask": mask}
    if pairs:
        halves = torch.tensor(lengths)[:, None] // 2
        batch["token_type_ids"] = (torch.arange(max(lengths)) >= halves).long() * mask
    return batch


class Adapter(nn.Module):
    """A model of this course, called as Transformers calls its own."""

    def __init__(self, read: Callable[..., Any]) -> None:
        super().__init__()
        object.__setattr__(self, "read", read)  # not a part of this module

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **unused: Any,
    ) -> Any:
        """Return what Transformers' `BertModel` would."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        read = vars(self)["read"](input_ids, attention_mask, token_type_ids)
        return BaseModelOutputWithPooling(read.last_hidden_state, read.pooler_output)


@lru_cache(maxsize=64)
def _theirs(kind: str, config: Any, num_labels: int) -> Any:
    """Transformers' task model without layers of its own: every call puts the caller's in."""
    import transformers.models.bert.modeling_bert as theirs
    from transformers.models.bert.configuration_bert import BertConfig

    small = {"vocab_size": 1, "num_hidden_layers": 0, "max_position_embeddings": 1}
    theirs_config = BertConfig.from_dict({**config.to_hf(), **small, "pad_token_id": 0})
    theirs_config.num_labels = num_labels
    theirs_config.problem_type = "single_label_classification"
    return getattr(theirs, kind)(theirs_config)


class Head(nn.Module):
    """A task model of Transformers on top of a model of this course."""

    kind = ""
    layer = ""

    def __init__(self, bert: Any, num_labels: int = 2) -> None:
        super().__init__()
        self.config, self.bert, self.num_labels = bert.config, self.taken(bert), num_labels
        layer = nn.Linear(bert.config.hidden_size, num_labels)
        self.fresh(layer)
        setattr(self, self.layer, layer)
        if self.layer == "classifier":
            self.dropout = nn.Dropout(bert.config.hidden_dropout_prob)

    def theirs(self, **arguments: Any) -> Any:
        """Call Transformers' model with this one's layers."""
        model = _theirs(self.kind, self.config, self.num_labels)
        setattr(model, self.layer, getattr(self, self.layer))
        if self.layer == "classifier":
            model.dropout = self.dropout
        model.bert = Adapter(self.read)
        return model(**arguments)

    # What a wrong version does in another way.

    def taken(self, bert: Any) -> Any:
        return bert

    def fresh(self, layer: nn.Linear) -> None:
        _theirs(self.kind, self.config, self.num_labels)._init_weights(layer)

    def read(self, input_ids: Tensor, mask: Any, types: Any) -> Any:
        return self.bert(input_ids, mask, types)

    def check(self, name: str, labels: Tensor, most: int) -> None:
        from bertlab.fine_tuning import check_labels

        check_labels(name, labels, most)


class _Classifier(Head):
    """What the classifiers of texts and of tokens share."""

    layer = "classifier"

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        if labels is not None:
            self.check("labels", labels, self.num_labels)
        output = self.theirs(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            labels=None if labels is None else self.target(labels, attention_mask),
        )
        logits = self.scores(output.logits)
        return self.returned(self.loss(output.loss, logits, labels), logits)

    # What a wrong version does in another way.

    def target(self, labels: Tensor, attention_mask: Tensor | None) -> Tensor:
        return labels

    def scores(self, logits: Tensor) -> Tensor:
        return logits

    def loss(self, loss: Tensor | None, logits: Tensor, labels: Tensor | None) -> Tensor | None:
        return loss

    def returned(self, loss: Tensor | None, logits: Tensor) -> Any:
        from bertlab.fine_tuning import TaskOutput

        return TaskOutput(loss, logits)


def flat_loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """The cross-entropy of scores and labels of any number of axes."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **options)


class _Unmasked:
    def read(self: Any, input_ids: Tensor, mask: Any, types: Any) -> Any:
        return self.bert(input_ids, None, types)


class _Untyped:
    def read(self: Any, input_ids: Tensor, mask: Any, types: Any) -> Any:
        return self.bert(input_ids, mask)


class _Swapped:
    """The second and third argument, by place, in the other order."""

    def read(self: Any, input_ids: Tensor, mask: Any, types: Any) -> Any:
        return self.bert(input_ids, types, mask)


class _Unchecked:
    def check(self, name: str, labels: Tensor, most: int) -> None:
        pass


class _CopiedBert:
    def taken(self, bert: Any) -> Any:
        return copy.deepcopy(bert)


class _Probabilities:
    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1)


class _SoftmaxTwice:
    def loss(self, loss: Any, logits: Tensor, labels: Tensor | None) -> Tensor | None:
        return None if labels is None else flat_loss(logits.softmax(dim=-1), labels)


class _SummedLoss:
    def loss(self, loss: Any, logits: Tensor, labels: Tensor | None) -> Tensor | None:
        return None if labels is None else flat_loss(logits, labels, reduction="sum")


class _LogitsFirst:
    def returned(self, loss: Any, logits: Tensor) -> Any:
        from typing import NamedTuple

        class TaskOutput(NamedTuple):
            logits: Tensor
            loss: Tensor | None

        return TaskOutput(logits, loss)


class _LossAlone:
    def returned(self: Any, loss: Any, logits: Tensor) -> Any:
        return (logits,) if loss is None else (loss, logits)


class _NeverDropped:
    def __init__(self: Any, *arguments: Any) -> None:
        super().__init__(*arguments)  # type: ignore[misc]  # a mixin before Head
        self.dropout = nn.Dropout(0.0)


class _FreshLinear:
    def fresh(self, layer: nn.Linear) -> None:
        pass


def initial(model: Any, bert: Any, layer: str) -> dict[str, Any]:
    """What is right about a head that was just built."""
    own = getattr(model, layer)
    spread = own.weight.detach().std().item() / bert.config.initializer_range
    return {
        "its bert is the one that was given": model.bert is bert,
        "its config is the model's": model.config == bert.config,
        f"{layer}'s fresh weight has the spread of initializer_range": 0.5 < spread < 2,
        f"{layer}'s fresh bias is 0": bool((own.bias == 0).all()),
    }


def both_forms(output: Any, names: Sequence[str]) -> dict[str, Any]:
    """A named tuple's fields, by name and by place; None stays None."""
    found: dict[str, Any] = {}
    for place, name in enumerate(names):
        found[name] = getattr(output, name)
        found[f"{name} is number {place} of the tuple"] = output[place] is found[name]
    return found


def dropped(head: Any, name: str, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """What dropout does in training to a head whose linear layer passes everything on."""
    width = head.config.hidden_size
    layer = head.classifier
    with torch.no_grad():
        layer.weight.copy_(torch.eye(width))
        layer.bias.zero_()
    head.bert.eval()
    before = getattr(head.bert(**batch), name)
    head.train()
    after = head(**batch).logits.detach()
    head.eval()
    again = head(**batch).logits.detach()
    gone = (after == 0).double().mean().item()
    factor = after[after != 0] / before[after != 0]
    return {
        "in training, about half is dropped": 0.2 < gone < 0.8,
        "in training, the rest is doubled": bool(((factor - 2).abs() < 1e-3).all()),
        "in eval mode, nothing is dropped": bool(((again - before).abs() < 1e-3).all()),
    }


def outcome(call: Callable[[], Any]) -> str:
    """Say whether a call ends well, or which error it raises."""
    return error_of(call, kind=ValueError)["error"]


# --- 7.1: batches ---


@lru_cache(maxsize=8)
def _padding_tokenizer(pad_token_id: int) -> Any:
    """A tokenizer of Transformers that can do nothing but pad."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocab = {"[PAD]": pad_token_id, "[UNK]": pad_token_id + 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocab, unk_token="[UNK]")),
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


class Padding:
    """Transformers' collators, and the checks that exercise 7.1 asks for."""

    def pad_batch(self, examples: Sequence[Mapping[str, Any]], pad_token_id: int) -> Any:
        self.check(examples)
        from transformers.data.data_collator import (
            DataCollatorForTokenClassification,
            DataCollatorWithPadding,
        )

        of_tokens = isinstance(examples[0].get("labels"), (list, tuple))
        kind: Any = DataCollatorForTokenClassification if of_tokens else DataCollatorWithPadding
        collate = kind(_padding_tokenizer(pad_token_id))
        return dict(collate([{**example} for example in examples]))

    def check(self, examples: Sequence[Mapping[str, Any]]) -> None:
        if not examples:
            raise ValueError("examples is empty")
        for number, example in enumerate(examples):
            tokens = len(example["input_ids"])
            if set(example) != set(examples[0]):
                differing = ", ".join(sorted(set(example) ^ set(examples[0])))
                raise ValueError(f"examples[{number}] differs from the first in {differing}")
            if not tokens:
                raise ValueError(f"examples[{number}] has no token in its input_ids")
            for name, value in example.items():
                if isinstance(value, list) and len(value) != tokens:
                    raise ValueError(f"examples[{number}] has {len(value)} {name}")


class _WrongPadding(Padding):
    """Pads by itself, so that it can do it in a wrong way."""

    def pad_batch(self, examples: Sequence[Mapping[str, Any]], pad_token_id: int) -> Any:
        self.check(examples)
        columns = {name: [example[name] for example in examples] for name in examples[0]}
        columns.setdefault("attention_mask", self.mask(columns["input_ids"], pad_token_id))
        length = self.length(columns["input_ids"])
        batch = {}
        for name, rows in columns.items():
            if isinstance(rows[0], list):
                fill = self.filling(name, pad_token_id)
                rows = [self.filled(row, [fill] * (length - len(row))) for row in rows]
            batch[name] = self.tensor(rows)
        return batch

    def mask(self, rows: list[list[int]], pad_token_id: int) -> list[list[int]]:
        return [[1] * len(row) for row in rows]

    def length(self, rows: list[list[int]]) -> int:
        return max(map(len, rows))

    def filling(self, name: str, pad_token_id: int) -> int:
        return {"input_ids": pad_token_id, "labels": -100}.get(name, 0)

    def filled(self, row: list[int], padding: list[int]) -> list[int]:
        return row + padding

    def tensor(self, rows: list[Any]) -> Tensor:
        return torch.tensor(rows)


class _MaskOfOnes(_WrongPadding):
    def filling(self, name: str, pad_token_id: int) -> int:
        return 1 if name == "attention_mask" else super().filling(name, pad_token_id)


class _LabelZero(_WrongPadding):
    def filling(self, name: str, pad_token_id: int) -> int:
        return 0 if name == "labels" else super().filling(name, pad_token_id)


class _IdZero(_WrongPadding):
    def filling(self, name: str, pad_token_id: int) -> int:
        return 0 if name == "input_ids" else super().filling(name, pad_token_id)


class _AllPadIds(_WrongPadding):
    def filling(self, name: str, pad_token_id: int) -> int:
        return pad_token_id


class _OnTheLeft(_WrongPadding):
    def filled(self, row: list[int], padding: list[int]) -> list[int]:
        return padding + row


class _FixedLength(_WrongPadding):
    def length(self, rows: list[list[int]]) -> int:
        return 512


class _CutToShortest(_WrongPadding):
    def length(self, rows: list[list[int]]) -> int:
        return min(map(len, rows))

    def filled(self, row: list[int], padding: list[int]) -> list[int]:
        return row[: self.shortest]

    def pad_batch(self, examples: Sequence[Mapping[str, Any]], pad_token_id: int) -> Any:
        self.shortest = min((len(example["input_ids"]) for example in examples), default=0)
        return super().pad_batch(examples, pad_token_id)


class _InPlace(_WrongPadding):
    def filled(self, row: list[int], padding: list[int]) -> list[int]:
        row.extend(padding)
        return row


class _MaskFromIds(_WrongPadding):
    def mask(self, rows: list[list[int]], pad_token_id: int) -> list[list[int]]:
        return [[int(i != pad_token_id) for i in row] for row in rows]


class _NoMaskMade(_WrongPadding):
    def pad_batch(self, examples: Sequence[Mapping[str, Any]], pad_token_id: int) -> Any:
        batch = super().pad_batch(examples, pad_token_id)
        return {name: x for name, x in batch.items() if name in examples[0]}


class _Floats(_WrongPadding):
    def tensor(self, rows: list[Any]) -> Tensor:
        return torch.tensor(rows).float()


class _PaddingUnchecked(_WrongPadding):
    def check(self, examples: Sequence[Mapping[str, Any]]) -> None:
        pass


class _NumberMissing(_WrongPadding):
    def check(self, examples: Sequence[Mapping[str, Any]]) -> None:
        try:
            super().check(examples)
        except ValueError as error:
            raise ValueError("the examples do not fit together") from error


class Buckets:
    """Transformers' length-grouped order, cut into batches."""

    def bucket_batches(
        self, lengths: Sequence[int], batch_size: int, rng: random.Random
    ) -> list[list[int]]:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, but must be at least 1")
        batches = self.cut(self.order(lengths, batch_size, rng), batch_size)
        return self.shuffled(batches, rng)

    def order(self, lengths: Sequence[int], batch_size: int, rng: random.Random) -> list[int]:
        from transformers.trainer_pt_utils import get_length_grouped_indices

        if not lengths:
            return []
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        return [int(i) for i in get_length_grouped_indices(lengths, batch_size, 50, generator)]

    def cut(self, order: list[int], batch_size: int) -> list[list[int]]:
        return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]

    def shuffled(self, batches: list[list[int]], rng: random.Random) -> list[list[int]]:
        return rng.sample(batches, len(batches))


class _Unsorted(Buckets):
    def order(self, lengths: Sequence[int], batch_size: int, rng: random.Random) -> list[int]:
        return rng.sample(range(len(lengths)), len(lengths))


class _FromShortToLong(Buckets):
    def order(self, lengths: Sequence[int], batch_size: int, rng: random.Random) -> list[int]:
        drawn = rng.sample(range(len(lengths)), len(lengths))
        return sorted(drawn, key=lambda i: lengths[i])

    def shuffled(self, batches: list[list[int]], rng: random.Random) -> list[list[int]]:
        return batches


class _LastDropped(Buckets):
    def cut(self, order: list[int], batch_size: int) -> list[list[int]]:
        return super().cut(order[: len(order) // batch_size * batch_size], batch_size)


class _FilledUp(Buckets):
    def cut(self, order: list[int], batch_size: int) -> list[list[int]]:
        return super().cut(order + order[: -len(order) % batch_size], batch_size)


class _SameMembers(Buckets):
    def order(self, lengths: Sequence[int], batch_size: int, rng: random.Random) -> list[int]:
        return sorted(range(len(lengths)), key=lambda i: lengths[i])


class _OwnSeed(Buckets):
    def bucket_batches(
        self, lengths: Sequence[int], batch_size: int, rng: random.Random
    ) -> list[list[int]]:
        return super().bucket_batches(lengths, batch_size, random.Random(0))


class _GlobalRandom(Buckets):
    def bucket_batches(
        self, lengths: Sequence[int], batch_size: int, rng: random.Random
    ) -> list[list[int]]:
        return super().bucket_batches(lengths, batch_size, random.Random(random.getrandbits(60)))


class _LengthsReturned(Buckets):
    def bucket_batches(
        self, lengths: Sequence[int], batch_size: int, rng: random.Random
    ) -> list[list[int]]:
        batches = super().bucket_batches(lengths, batch_size, rng)
        return [[lengths[i] for i in batch] for batch in batches]


class _OrderOnly(Buckets):
    def bucket_batches(
        self, lengths: Sequence[int], batch_size: int, rng: random.Random
    ) -> list[list[int]]:
        return [[i for batch in super().bucket_batches(lengths, batch_size, rng) for i in batch]]


def _batch_cases(rng: np.random.Generator) -> Iterator[Case]:
    def example(tokens: int, *fields: str, **more: Any) -> dict[str, Any]:
        ids = rng.integers(1, 50, tokens).tolist()
        made = {
            "input_ids": ids,
            "token_type_ids": (rng.random(tokens) < 0.5).astype(int).tolist(),
            "attention_mask": [1] * tokens,
            "labels": rng.integers(1, 9, tokens).tolist(),
        }
        return {name: made[name] for name in ("input_ids", *fields)} | more

    full = ("token_type_ids", "attention_mask")
    texts = [example(n, *full, labels=int(rng.integers(0, 5))) for n in (4, 7, 1)]
    yield Case("three texts with a label each", {"examples": texts, "pad_token_id": 3})
    words = [example(n, *full, "labels") for n in (2, 6, 5)]
    yield Case("a label for each token", {"examples": words, "pad_token_id": 1})
    bare = [example(n, "token_type_ids") for n in (3, 5)]
    bare[0]["input_ids"][1] = 2  # what stands for padding may be written in a text
    yield Case("no mask is given", {"examples": bare, "pad_token_id": 2})
    one = [example(4, *full, start_positions=2, end_positions=3)]
    yield Case("a single example", {"examples": one, "pad_token_id": 0})

    def broken(name: str, examples: list[Any], *mentions: str) -> Case:
        inputs = {"examples": examples, "pad_token_id": 0, "mentions": list(mentions)}
        return Case(name, inputs)

    good = [example(n, *full, labels=1) for n in (3, 2, 4, 5)]
    lacking = [{k: v for k, v in e.items() if i != 2 or k != "labels"} for i, e in enumerate(good)]
    yield broken("one example has no label", lacking, "examples[2]", "labels")
    short = [{**e, "token_type_ids": e["token_type_ids"][i == 3 :]} for i, e in enumerate(good)]
    yield broken("one example has too few token types", short, "examples[3]", "token_type_ids")
    empty = [*good[:1], {**example(0, *full), "labels": 1}, good[1]]
    yield broken("one example has no token", empty, "examples[1]")
    yield broken("no example", [])
    for name, count, size in (("many texts", 200, 6), ("the last batch is smaller", 131, 8)):
        lengths = np.minimum(rng.geometric(0.03, count) + 2, 200).tolist()
        inputs = {"lengths": lengths, "batch_size": size, "seed": int(rng.integers(2**31))}
        yield Case(f"buckets: {name}", inputs)


def _batch_probe(part: Any, **inputs: Any) -> Any:
    if "lengths" in inputs:
        return _bucket_probe(part, **inputs)
    if "mentions" in inputs:

        def call() -> Any:
            return part.pad_batch(inputs["examples"], inputs["pad_token_id"])

        return error_of(call, *inputs["mentions"], kind=ValueError)
    batch = part.pad_batch(inputs["examples"], inputs["pad_token_id"])
    return {"fields": sorted(batch), **{name: batch[name] for name in sorted(batch)}}


def _bucket_probe(part: Any, lengths: list[int], batch_size: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    first, second = (part.bucket_batches(lengths, batch_size, rng) for _ in range(2))
    again = part.bucket_batches(lengths, batch_size, random.Random(seed))
    other = part.bucket_batches(lengths, batch_size, random.Random(seed + 1))
    chosen = [i for batch in first for i in batch]
    known = all(isinstance(i, int) and 0 <= i < len(lengths) for i in chosen)
    found = {
        "types": sorted({type(first).__name__, *(type(batch).__name__ for batch in first)}),
        "every index once": sorted(chosen) == list(range(len(lengths))),
        "sizes of the batches": sorted(Counter(map(len, first)).items()),
        "the same again for the same seed": again == first,
        "another order for another seed": other != first,
        "another order in the next epoch": second != first,
        "a batch of size 0": outcome(lambda: part.bucket_batches(lengths, 0, rng)),
    }
    if not known or len(first) < 3:
        return found
    longest = [max(lengths[i] for i in batch) for batch in first]
    found["other texts meet in the next epoch"] = _members(first) != _members(second)
    found["little is padding"] = _padding(first, lengths) < 0.4 * _random_padding(
        lengths, batch_size
    )
    found["batches come in random order"] = abs(_rank_correlation(longest)) < 0.8
    return found


def _members(batches: list[list[int]]) -> set[frozenset[int]]:
    return {frozenset(batch) for batch in batches}


def _padding(batches: list[list[int]], lengths: list[int]) -> int:
    longest = (max(lengths[i] for i in batch) * len(batch) for batch in batches)
    return sum(longest) - sum(lengths[i] for batch in batches for i in batch)


def _random_padding(lengths: list[int], batch_size: int) -> float:
    order = random.Random(1).sample(range(len(lengths)), len(lengths))
    return _padding([order[i : i + batch_size] for i in range(0, len(order), batch_size)], lengths)


def _rank_correlation(values: list[int]) -> float:
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable")
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1])


def _padded(wrong: Padding) -> dict[str, Any]:
    return {"pad_batch": wrong.pad_batch}


def _bucketed(wrong: Buckets) -> dict[str, Any]:
    return {"bucket_batches": wrong.bucket_batches}


BATCHES = Exercise(
    id="7.1",
    reference={"pad_batch": Padding().pad_batch, "bucket_batches": Buckets().bucket_batches},
    reference_name="transformers.DataCollatorWithPadding, get_length_grouped_indices",
    cases=_batch_cases,
    probe=_batch_probe,
    misconceptions=(
        Misconception(
            "the attention mask is filled up with 1",
            "The mask says which tokens are real, and padding is not. With 1 there, every real "
            "token attends to the padding, and a text's output depends on its neighbors in the "
            "batch.",
            _padded(_MaskOfOnes()),
        ),
        Misconception(
            "token labels are filled up with 0",
            "0 is a class like any other, so the loss would teach the model that padding belongs "
            "to it. A cross-entropy leaves -100 out: fill `labels` up with that.",
            _padded(_LabelZero()),
        ),
        Misconception(
            "input_ids are filled up with 0",
            "In BERT's vocabulary `[PAD]` happens to be 0, in others it is not. Fill up with "
            "`pad_token_id`, which is an argument for this reason.",
            _padded(_IdZero()),
        ),
        Misconception(
            "every field is filled up with pad_token_id",
            "Only `input_ids` holds pieces. Token types and the mask have 0 at padding, and token "
            "labels -100, whatever the id of `[PAD]` is.",
            _padded(_AllPadIds()),
        ),
        Misconception(
            "texts are padded on the left",
            "BERT counts positions from the left edge. A text padded on the left would begin at "
            "position 7 or 12, where none began in pretraining, and `[CLS]` would not be first.",
            _padded(_OnTheLeft()),
        ),
        Misconception(
            "every batch is padded to 512",
            "Time and memory follow the padded length. A batch needs to be as long as its longest "
            "text and not longer; that is what makes padding dynamic.",
            _padded(_FixedLength()),
        ),
        Misconception(
            "texts are cut to the shortest of the batch",
            "The batch then has no padding, but what is cut off is lost, and another part of it in "
            "every epoch. Fill the shorter texts up to the longest instead.",
            _padded(_CutToShortest()),
        ),
        Misconception(
            "the examples' own lists are filled up",
            "`row.extend` and `row += ...` change the list that the example holds. In the next "
            "epoch it is longer than it was, and its padding counts as text. Make a new list: "
            "`[*row, *padding]`.",
            _padded(_InPlace()),
        ),
        Misconception(
            "the mask is made from the ids",
            "`[PAD]` may be written in a text, as in this chapter, and is then a real token. Real "
            "is what stands in the example's own list: as many ones as it has tokens.",
            _padded(_MaskFromIds()),
        ),
        Misconception(
            "no mask is made where the examples have none",
            "Without a mask the model takes padding for text. It costs one line to make it from "
            "the lengths, and nobody can forget it any more.",
            _padded(_NoMaskMade()),
        ),
        Misconception(
            "the tensors are of floating-point numbers",
            "Ids are rows of a table, and labels are classes: both must be whole numbers "
            "(int64). `torch.tensor(rows)` makes them so by itself.",
            _padded(_Floats()),
        ),
        Misconception(
            "examples that do not fit together are not refused",
            "A field that is missing, or a list that is too short, ends in a KeyError or an error "
            "about tensors that names no example. Look at them first, and say which one it is.",
            _padded(_PaddingUnchecked()),
        ),
        Misconception(
            "the message does not say which example",
            "Among ten thousand examples one is broken. Whoever reads the message has to find it: "
            "say `examples[3]` and name the field.",
            _padded(_NumberMissing()),
        ),
        Misconception(
            "texts of any length meet",
            "A batch is as long as its longest text. Where lengths are drawn at random, most of "
            "it is padding. Sort by length, after shuffling, and cut into batches then.",
            _bucketed(_Unsorted()),
        ),
        Misconception(
            "batches come from short to long",
            "The model would then see short texts only, and long ones later: what it learns last "
            "counts most. Shuffle the batches after cutting.",
            _bucketed(_FromShortToLong()),
        ),
        Misconception(
            "what is left over is dropped",
            "If the number of texts is no multiple of batch_size, the last batch is smaller, and "
            "its texts count as well: every index is in one batch.",
            _bucketed(_LastDropped()),
        ),
        Misconception(
            "the last batch is filled up with texts that were there before",
            "These texts then count twice. Nothing asks for batches of one size: the last one "
            "may be smaller. In evaluation that would even change the score.",
            _bucketed(_FilledUp()),
        ),
        Misconception(
            "the same texts meet in every epoch",
            "Sorting alone puts equal lengths in the order of the data, so a batch has the same "
            "members in each epoch. Shuffle before sorting: a stable sort keeps equal lengths in "
            "the shuffled order.",
            _bucketed(_SameMembers()),
        ),
        Misconception(
            "rng is not used, but a generator with a seed of its own",
            "Then every epoch has the same order. Draw from `rng`: it goes on from call to call, "
            "and whoever made it decided on its seed.",
            _bucketed(_OwnSeed()),
        ),
        Misconception(
            "the draws come from the global generator",
            "`random.shuffle` depends on all that was drawn before, anywhere, so a run cannot "
            "be repeated. Use `rng.shuffle`. The same seed must give the same batches.",
            _bucketed(_GlobalRandom()),
        ),
        Misconception(
            "lengths are returned instead of indices",
            "A batch says which texts are in it: positions in `lengths`. Sort the indices with "
            "`key=lambda i: lengths[i]`. From lengths nobody can tell which texts to put "
            "together.",
            _bucketed(_LengthsReturned()),
        ),
        Misconception(
            "one list of all indices is returned",
            "The order is right, but it is to be cut: a list of batches, each a list of at most "
            "batch_size indices.",
            _bucketed(_OrderOnly()),
        ),
    ),
    hints=(
        "For pad_batch, think of a table: a column for each field, a row for each example. Which "
        "columns have a list in each cell? For bucket_batches: shuffle, sort, cut, shuffle.",
        "The longest `input_ids` says how long every list becomes; a dict says what each field is "
        "filled up with, and 0 is for those that are not in it. Python's sort is stable: equal "
        "lengths stay in the order into which they were shuffled.",
        "`[*row, *[fill] * (length - len(row))]` for every list of a column, then "
        "`torch.tensor(rows)`; numbers go in as they are. For the buckets: `rng.shuffle(order)`, "
        "`order.sort(key=lambda i: lengths[i])`, slices of `batch_size`, `rng.shuffle(batches)`.",
    ),
)


# --- 7.2: classify texts ---


class SequenceClassifier(_Classifier):
    """Transformers' `BertForSequenceClassification` on a model of this course."""

    kind = "BertForSequenceClassification"


def _with_vector(read: Any, vector: Tensor) -> Any:
    from bertlab.encoder import BertModelOutput

    return BertModelOutput(read.last_hidden_state, vector)


class _Unpooled(SequenceClassifier):
    def read(self, input_ids: Tensor, mask: Any, types: Any) -> Any:
        read = super().read(input_ids, mask, types)
        return _with_vector(read, read.last_hidden_state[:, 0])


class _MeanPooled(SequenceClassifier):
    def read(self, input_ids: Tensor, mask: Any, types: Any) -> Any:
        read = super().read(input_ids, mask, types)
        return _with_vector(read, read.last_hidden_state.mean(dim=1))


class _PooledTwice(SequenceClassifier):
    def read(self, input_ids: Tensor, mask: Any, types: Any) -> Any:
        read = super().read(input_ids, mask, types)
        return _with_vector(read, torch.tanh(read.pooler_output))


def _wrong(name: str, base: type, *mixins: type) -> type:
    """A class that does one thing wrong."""
    return type(name, (*mixins, base), {})


def _head_cases(layer: str, tokens: bool) -> Callable[[np.random.Generator], Iterator[Case]]:
    def cases(rng: np.random.Generator) -> Iterator[Case]:
        def inputs(lengths: list[int], classes: int, pairs: bool = True) -> dict[str, Any]:
            batch = drawn_batch(rng, lengths, pairs)
            labels = integers(rng, 0, classes, *((len(lengths),)))
            if tokens:
                shape = batch["input_ids"].shape
                chosen = torch.from_numpy(rng.random(shape) < 0.6) & batch["attention_mask"].bool()
                chosen[:, 1], chosen[0, 2] = True, False
                labels = integers(rng, 0, classes, *shape).masked_fill(~chosen, -100)
            state = drawn_reader(rng) | drawn_layer(rng, layer, classes)
            return {"state": state, "batch": batch, "labels": labels, "num_labels": classes}

        def real(given: dict[str, Any]) -> dict[str, Any]:
            return {"logits": given["batch"]["attention_mask"].bool()} if tokens else {}

        given = inputs([7, 4, 9, 5], 11)
        yield Case("pairs of unlike length", given, positions=real(given))
        if not tokens:
            whole = inputs([6, 6, 6], 3, False)
            whole["batch"].pop("attention_mask")
            yield Case("no mask and no token types are given", whole)
        bad, row = inputs([5, 3, 6, 4], 4), int(rng.integers(1, 4))
        where = (row, 1) if tokens else row
        yield Case("a label that is no class", {**bad, "wrong": (where, int(rng.integers(40, 90)))})
        trained = inputs([6, 4, 5, 7, 6, 5], SIZES["hidden_size"])
        yield Case("dropout, in training", {**trained, "dropout": 0.5})

    return cases


def _refused(
    model: Any, batch: dict[str, Tensor], labels: Tensor, where: Any, wrong: int
) -> dict[str, Any]:
    """What comes of a label that is too high, and of one below 0."""
    row = where if isinstance(where, int) else where[0]
    found = {}
    for label in (wrong, -1):
        given = labels.clone()
        given[where] = label
        error = error_of(
            lambda given=given: model(**batch, labels=given), row, label, kind=ValueError
        )
        found |= {f"a label of {label}: {key}": value for key, value in error.items()}
    return found


def _head_probe(part_name: str, vector: str) -> Callable[..., dict[str, Any]]:
    def probe(
        part: Any,
        state: dict[str, Tensor],
        batch: dict[str, Tensor],
        labels: Tensor,
        num_labels: int,
        wrong: tuple[Any, int] | None = None,
        dropout: float = 0.0,
    ) -> dict[str, Any]:
        bert = Reader(bert_config(**SIZES, hidden_dropout_prob=dropout))
        model = getattr(part, part_name)(bert, num_labels)
        fresh = initial(model, bert, "classifier") if num_labels > 4 else {}
        with_parameters(model, state)
        if dropout:
            return {"rate": model.dropout.p, **dropped(model, vector, batch)}
        if wrong is not None:
            return _refused(model, batch, labels, *wrong)
        plain, labelled = model(**batch), model(**batch, labels=labels)
        names = ["classifier.weight", "bert.embeddings.word.weight", "bert.pooler.bias"]
        wanted = {name: model.get_parameter(name) for name in names}
        return {
            **fresh,
            **both_forms(labelled, ("loss", "logits")),
            "loss without labels": plain.loss,
            "logits without labels are the same": torch.equal(plain.logits, labelled.logits),
            **gradients(labelled.loss, torch.ones_like(labelled.loss), wanted),
        }

    return probe


_sequence_probe = _head_probe("SequenceClassifier", "pooler_output")


def _classify_probe(part: Any, **inputs: Any) -> dict[str, Any]:
    return _sequence_probe(part, **inputs)


CLASSIFY = Exercise(
    id="7.2",
    reference={"SequenceClassifier": SequenceClassifier},
    reference_name="transformers.BertForSequenceClassification",
    cases=_head_cases("classifier", tokens=False),
    probe=_classify_probe,
    misconceptions=(
        Misconception(
            "the pooler is skipped",
            "You classify the last hidden state of `[CLS]`. BERT was pretrained with the pooler, "
            "a linear layer and tanh, between it and its sentence-pair head; take "
            "`pooler_output`.",
            {"SequenceClassifier": _Unpooled},
        ),
        Misconception(
            "the tokens' vectors are averaged",
            "The mean of all tokens, padding among them, is not what this head is given: "
            "`pooler_output` comes from `[CLS]` alone.",
            {"SequenceClassifier": _MeanPooled},
        ),
        Misconception(
            "tanh is applied once more",
            "`pooler_output` has been through the pooler's tanh already. A second one squeezes "
            "everything between -0.76 and 0.76. Hand it on as it is.",
            {"SequenceClassifier": _PooledTwice},
        ),
        Misconception(
            "the attention mask is not handed on",
            "Without it, padding is read as text, and the same text gets another score in "
            "another batch. Give `self.bert` all three arguments.",
            {"SequenceClassifier": _wrong("Wrong", SequenceClassifier, _Unmasked)},
        ),
        Misconception(
            "the token types are not handed on",
            "Without them a pair is one long text to BERT. Give `self.bert` all three "
            "arguments. Nothing says any more where the first text ends and the second begins.",
            {"SequenceClassifier": _wrong("Wrong", SequenceClassifier, _Untyped)},
        ),
        Misconception(
            "mask and token types are swapped",
            "By place, `BertModel` takes `input_ids, attention_mask, token_type_ids`. Swapped, it "
            "reads the second text of a pair only. Name the arguments and nothing can be swapped.",
            {"SequenceClassifier": _wrong("Wrong", SequenceClassifier, _Swapped)},
        ),
        Misconception(
            "probabilities are returned as logits",
            "Logits are scores before the softmax: that is what `cross_entropy` expects and what "
            "others compare. Return them as they come out of `classifier`.",
            {"SequenceClassifier": _wrong("Wrong", SequenceClassifier, _Probabilities)},
        ),
        Misconception(
            "the softmax is taken twice",
            "`F.cross_entropy` takes the softmax itself. Given probabilities, it takes it once "
            "more, and the loss of a perfect model stays far above 0 and teaches slowly.",
            {"SequenceClassifier": _wrong("Wrong", SequenceClassifier, _SoftmaxTwice)},
        ),
        Misconception(
            "the losses of a batch are summed up",
            "A batch twice as large would then take steps twice as long. The loss is the mean "
            "over the texts, which is what `F.cross_entropy` gives by itself.",
            {"SequenceClassifier": _wrong("Wrong", SequenceClassifier, _SummedLoss)},
        ),
        Misconception(
            "logits come first",
            "The contract, and Transformers, put the loss first: `(loss, logits)`. Code that "
            "unpacks the tuple would take one for the other. Use `TaskOutput`, given above.",
            {"SequenceClassifier": _wrong("Wrong", SequenceClassifier, _LogitsFirst)},
        ),
        Misconception(
            "a plain tuple is returned",
            "Whoever writes `output.loss` gets an AttributeError, and a tuple that is shorter "
            "without labels moves the logits to another place. Return a `TaskOutput`, with a loss "
            "of None where there are no labels.",
            {"SequenceClassifier": _wrong("Wrong", SequenceClassifier, _LossAlone)},
        ),
        Misconception(
            "dropout is left out",
            "In fine-tuning there are few examples and many parameters; dropout before the "
            "classifier, with the config's rate, is part of BERT's recipe.",
            {"SequenceClassifier": _wrong("Wrong", SequenceClassifier, _NeverDropped)},
        ),
        Misconception(
            "the classifier starts as PyTorch draws it",
            "`nn.Linear` draws from -1/sqrt(hidden) to 1/sqrt(hidden), biases too. BERT's "
            "recipe begins with small weights (`initializer_range`) and biases of 0, so that the "
            "first loss is that of an even guess: `initialize_weights`.",
            {"SequenceClassifier": _wrong("Wrong", SequenceClassifier, _FreshLinear)},
        ),
        Misconception(
            "the bert is copied",
            "Whoever made the BERT may want to use it, or share it between two heads. Keep the "
            "very one you are given.",
            {"SequenceClassifier": _wrong("Wrong", SequenceClassifier, _CopiedBert)},
        ),
        Misconception(
            "labels are not checked",
            "PyTorch's error for a label out of range names no text, and on a GPU it ends the "
            "process with a message about something else. `check_labels`, given above, says "
            "which text it is.",
            {"SequenceClassifier": _wrong("Wrong", SequenceClassifier, _Unchecked)},
        ),
    ),
    hints=(
        "What summarizes a whole text in BERT, and which of the model's two outputs is it?",
        "pooler_output, dropout, one linear layer. The loss is PyTorch's cross-entropy of logits "
        "and labels, after `check_labels`, and None when there are no labels.",
        "`read = self.bert(input_ids, attention_mask, token_type_ids)`, then "
        "`self.classifier(self.dropout(read.pooler_output))`; return "
        "`TaskOutput(F.cross_entropy(logits, labels), logits)`. In `__init__`, "
        "`initialize_weights(self.classifier, bert.config.initializer_range)`.",
    ),
)


# --- 7.3: tag words ---


def _grouped(ids: Sequence[Any]) -> Iterator[tuple[Any, list[int]]]:
    """Runs of equal word numbers, with the places of each."""
    for word, run in itertools.groupby(enumerate(ids), key=lambda pair: pair[1]):
        yield word, [place for place, _ in run]


class Alignment:
    """The rule of Transformers' `run_ner.py`."""

    def align_labels(self, word_labels: Sequence[int], word_ids: Sequence[Any]) -> list[int]:
        self.check(word_labels, word_ids)
        labels = [self.elsewhere] * len(word_ids)
        for word, places in _grouped(word_ids):
            if word is not None:
                for place in self.chosen(places):
                    labels[place] = word_labels[self.index(word, places)]
        return labels

    elsewhere = -100

    def check(self, word_labels: Sequence[int], word_ids: Sequence[Any]) -> None:
        words = max((word for word in word_ids if word is not None), default=-1) + 1
        if words > len(word_labels):
            raise ValueError(f"word_ids has {words} words, word_labels {len(word_labels)} labels")

    def chosen(self, places: list[int]) -> list[int]:
        return places[:1]

    def index(self, word: int, places: list[int]) -> int:
        return word


class _AllPieces(Alignment):
    def chosen(self, places: list[int]) -> list[int]:
        return places


class _LastPiece(Alignment):
    def chosen(self, places: list[int]) -> list[int]:
        return places[-1:]


class _ZeroElsewhere(Alignment):
    elsewhere = 0


class _ByPlace(Alignment):
    def align_labels(self, word_labels: Sequence[int], word_ids: Sequence[Any]) -> list[int]:
        self.check(word_labels, word_ids)
        labels = iter(word_labels)
        return [-100 if word is None else next(labels, -100) for word in word_ids]


class _AllLabelsNeeded(Alignment):
    def check(self, word_labels: Sequence[int], word_ids: Sequence[Any]) -> None:
        super().check(word_labels, word_ids)
        words = len({word for word in word_ids if word is not None})
        if words < len(word_labels):
            raise ValueError(f"{words} words, but {len(word_labels)} labels")


class _AlignmentUnchecked(Alignment):
    def check(self, word_labels: Sequence[int], word_ids: Sequence[Any]) -> None:
        pass


class _TooManyIgnored(Alignment):
    def align_labels(self, word_labels: Sequence[int], word_ids: Sequence[Any]) -> list[int]:
        known = [None if w is None or w >= len(word_labels) else w for w in word_ids]
        return super().align_labels(word_labels, known)


class TokenClassifier(_Classifier):
    """Transformers' `BertForTokenClassification` on a model of this course."""

    kind = "BertForTokenClassification"


class _PaddingLabelled(TokenClassifier):
    def target(self, labels: Tensor, attention_mask: Tensor | None) -> Tensor:
        return labels.clamp(min=0)


class _MeanOfTexts(TokenClassifier):
    def loss(self, loss: Any, logits: Tensor, labels: Tensor | None) -> Tensor | None:
        if labels is None:
            return None
        losses = [F.cross_entropy(*text) for text in zip(logits, labels, strict=True)]
        return torch.stack(losses).mean()


class _Reshaped(TokenClassifier):
    """Makes [batch, classes, seq] by a view, which takes the numbers in the wrong order."""

    def loss(self, loss: Any, logits: Tensor, labels: Tensor | None) -> Tensor | None:
        if labels is None:
            return None
        batch, seq, classes = logits.shape
        return F.cross_entropy(logits.reshape(batch, classes, seq), labels)


def as_lists(tags: Sequence[Sequence[str]]) -> list[list[str]]:
    """Tags as seqeval wants them."""
    return [list(sentence) for sentence in tags]


class Entities:
    """seqeval's F1."""

    def entity_f1(self, true_tags: Any, predicted_tags: Any) -> float:
        self.check(true_tags, predicted_tags)
        return float(self.score(as_lists(true_tags), as_lists(predicted_tags)))

    def check(self, true_tags: Any, predicted_tags: Any) -> None:
        if len(true_tags) != len(predicted_tags):
            raise ValueError(f"{len(true_tags)} sentences, but {len(predicted_tags)} predicted")
        for number, pair in enumerate(zip(true_tags, predicted_tags, strict=True)):
            if len(pair[0]) != len(pair[1]):
                sizes = f"{len(pair[0])} tags, but {len(pair[1])} predicted"
                raise ValueError(f"sentence {number} has {sizes}")

    def score(self, true: list[list[str]], predicted: list[list[str]]) -> float:
        import warnings

        from seqeval.metrics import f1_score

        with warnings.catch_warnings():  # 0 where there is no entity is what is asked for
            warnings.simplefilter("ignore")
            score: Any = f1_score(true, predicted, **self.options())
        return float(score)

    def options(self) -> dict[str, Any]:
        return {}


def chunks(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """seqeval's entities of one sentence."""
    from seqeval.metrics.sequence_labeling import get_entities

    return [tuple(entity) for entity in get_entities(list(tags))]


class _Counted(Entities):
    """Counts by itself, so that it can do it in a wrong way."""

    def score(self, true: list[list[str]], predicted: list[list[str]]) -> float:
        expected = Counter(x for i, tags in enumerate(true) for x in self.found(i, tags))
        given = Counter(x for i, tags in enumerate(predicted) for x in self.found(i, tags))
        return self.ratio(expected, given)

    def ratio(self, expected: Counter[Any], given: Counter[Any]) -> float:
        right, every = sum((expected & given).values()), sum((expected + given).values())
        return 2 * right / every if every else 0.0

    def found(self, number: int, tags: list[str]) -> Iterable[Any]:
        return [(number, *entity) for entity in chunks(self.read(tags))]

    def read(self, tags: list[str]) -> list[str]:
        return tags


class _ByTag(_Counted):
    def found(self, number: int, tags: list[str]) -> Iterable[Any]:
        return [(number, i, tag) for i, tag in enumerate(tags) if tag != "O"]


class _ByWord(_Counted):
    def found(self, number: int, tags: list[str]) -> Iterable[Any]:
        return [(number, i, tag) for i, tag in enumerate(tags)]


class _BeginsOnly(_Counted):
    """An entity begins at B alone, and goes on with I of its type."""

    def read(self, tags: list[str]) -> list[str]:
        read: list[str] = []
        for tag in tags:
            kind, _, name = tag.partition("-")
            last = read[-1] if read else "O"
            goes_on = kind in "IE" and last[0] in "BI" and last[2:] == name
            read.append(tag if kind in "BS" or goes_on else "O")
        return read


class _TypesGone(_Counted):
    def read(self, tags: list[str]) -> list[str]:
        return [tag if tag == "O" else f"{tag[0]}-x" for tag in tags]


class _BeginsGone(_Counted):
    """B is read as I: neighbors of one type become one entity."""

    def read(self, tags: list[str]) -> list[str]:
        return [tag if tag == "O" else f"I-{tag[2:]}" for tag in tags]


class _TypeOfTheFirst(_Counted):
    """An entity goes on whatever the type of what follows."""

    def read(self, tags: list[str]) -> list[str]:
        read: list[str] = []
        for tag in tags:
            last = read[-1] if read else "O"
            follows = tag[0] in "IE" and last[0] in "BI"
            read.append(f"{tag[0]}-{last[2:]}" if follows else tag)
        return read


class _EndsUnknown(_Counted):
    """E and S are read as I."""

    def read(self, tags: list[str]) -> list[str]:
        return [f"I-{tag[2:]}" if tag[0] in "ES" else tag for tag in tags]


class _OneSentence(_Counted):
    def score(self, true: list[list[str]], predicted: list[list[str]]) -> float:
        return super().score([[*itertools.chain(*true)]], [[*itertools.chain(*predicted)]])


class _SentencesMixed(_Counted):
    def score(self, true: list[list[str]], predicted: list[list[str]]) -> float:
        expected, given = (
            {entity for tags in sentences for entity in chunks(tags)}
            for sentences in (true, predicted)
        )
        return self.ratio(Counter(expected), Counter(given))


class _Overlaps(_Counted):
    def score(self, true: list[list[str]], predicted: list[list[str]]) -> float:
        right = every = 0
        for one, other in zip(true, predicted, strict=True):
            expected, given = chunks(one), chunks(other)
            every += len(expected) + len(given)
            right += sum(
                any(x[0] == y[0] and x[1] <= y[2] and y[1] <= x[2] for y in expected) for x in given
            )
        return min(1.0, 2 * right / every) if every else 0.0


class _MeanOfTypes(Entities):
    def options(self) -> dict[str, Any]:
        return {"average": "macro"}


class _MeanOfSentences(Entities):
    def score(self, true: list[list[str]], predicted: list[list[str]]) -> float:
        pairs = zip(true, predicted, strict=True)
        scores = [super(_MeanOfSentences, self).score([one], [other]) for one, other in pairs]
        return sum(scores) / max(1, len(scores))


class _DividedByZero(_Counted):
    def ratio(self, expected: Counter[Any], given: Counter[Any]) -> float:
        right, every = sum((expected & given).values()), sum((expected + given).values())
        return 2 * right / every


class _SentencesCut(Entities):
    """Compares what there is of both."""

    def check(self, true_tags: Any, predicted_tags: Any) -> None:
        pass

    def entity_f1(self, true_tags: Any, predicted_tags: Any) -> float:
        pairs = list(zip(true_tags, predicted_tags, strict=False))
        cut = [[list(x[: min(map(len, pair))]) for x in pair] for pair in pairs]
        return self.score([pair[0] for pair in cut], [pair[1] for pair in cut])


def _drawn_tags(
    rng: np.random.Generator, words: int, kinds: str, types: Sequence[str]
) -> list[str]:
    letters = [kinds[i] for i in rng.integers(0, len(kinds), words)]
    return [x if x == "O" else f"{x}-{types[int(rng.integers(len(types)))]}" for x in letters]


def _tag_cases(rng: np.random.Generator) -> Iterator[Case]:
    def words(counts: Sequence[int], more: int = 0) -> dict[str, Any]:
        ids: list[int | None] = [None]
        for word, count in enumerate(counts):
            ids += [word] * count
        labels = rng.permutation(np.arange(1, 20))[: len(counts) + more].tolist()
        return {"word_labels": labels, "word_ids": [*ids, None]}

    yield Case("words of one piece and of several", words([1, 3, 1, 2, 4]))
    yield Case("a sentence that was cut: more labels than words", words([2, 1, 3], more=2))
    padded = words([3, 1, 2])
    yield Case("padding at the end", {**padded, "word_ids": padded["word_ids"] + [None] * 3})
    # A word without a piece has no token, so that its number is left out.
    skipping = {"word_labels": [7, 8, 9, 4], "word_ids": [None, 0, 2, 2, 3, None]}
    skipping["word_labels"] = rng.permutation(np.arange(1, 9))[:4].tolist()
    yield Case("a word that has no piece", skipping)
    few = words([1, 2, 1, 1, 3])
    few["word_labels"] = few["word_labels"][:3]
    yield Case("more words than labels", {**few, "mentions": ["5", "3"]})

    yield from _head_cases("classifier", tokens=True)(rng)

    types = ["default", "type", "parameter"]

    def tags(kinds: str, count: int = 12, change: float = 0.3) -> dict[str, Any]:
        true = [_drawn_tags(rng, int(rng.integers(3, 11)), kinds, types) for _ in range(count)]
        predicted = []
        for sentence in true:
            other = _drawn_tags(rng, len(sentence), kinds, types)
            keep = rng.random(len(sentence)) > change
            predicted.append([a if k else b for a, b, k in zip(sentence, other, keep, strict=True)])
        return {"true_tags": true, "predicted_tags": predicted}

    yield Case("F1: tags that break the rules", tags("OOBI"))
    yield Case("F1: many entities", tags("OBII", 20, 0.15))
    yield Case("F1: ends and single words are marked", tags("OOBIES", 16))
    few_types = tags("OOBI", 5, 0.0)
    yield Case("F1: nothing is wrong", few_types)
    nothing = {"true_tags": [["O"] * 3, ["O"]], "predicted_tags": [["O"] * 3, ["O"]]}
    yield Case("F1: there is no entity at all", nothing)
    uneven = tags("OBI", 4)
    uneven["predicted_tags"][2] = [*uneven["true_tags"][2], "O"]
    yield Case("F1: a tag too many", {**uneven, "mentions": ["2"]})
    missing = {**tags("OBI", 4)}
    missing["predicted_tags"] = missing["predicted_tags"][:3]
    yield Case("F1: a sentence too few", {**missing, "mentions": []})


def _tag_probe(part: Any, **inputs: Any) -> Any:
    mentions = inputs.pop("mentions", None)
    if "state" in inputs:
        return _token_probe(part, **inputs)
    function = part.align_labels if "word_ids" in inputs else part.entity_f1
    if mentions is not None:
        return error_of(lambda: function(**inputs), *mentions, kind=ValueError)
    return function(**inputs)


_token_probe = _head_probe("TokenClassifier", "last_hidden_state")


def _aligned(wrong: Alignment) -> dict[str, Any]:
    return {"align_labels": wrong.align_labels}


def _counted(wrong: Entities) -> dict[str, Any]:
    return {"entity_f1": wrong.entity_f1}


def _tagger(base: type, *mixins: type) -> dict[str, Any]:
    return {"TokenClassifier": _wrong("Wrong", base, *mixins)}


TAG = Exercise(
    id="7.3",
    reference={
        "align_labels": Alignment().align_labels,
        "TokenClassifier": TokenClassifier,
        "entity_f1": Entities().entity_f1,
    },
    reference_name="transformers.BertForTokenClassification, seqeval.metrics.f1_score",
    cases=_tag_cases,
    probe=_tag_probe,
    misconceptions=(
        Misconception(
            "every piece has its word's label",
            "A word of four pieces would count four times, and a `B` at its second piece would "
            "say that a new entity begins within the word. Only the first piece is labelled, as "
            "in the paper.",
            _aligned(_AllPieces()),
        ),
        Misconception(
            "a word's last piece has its label",
            "BERT's paper takes the first piece of each word, and so do Transformers and "
            "whoever reads your predictions. A checkpoint trained one way is useless the other "
            "way.",
            _aligned(_LastPiece()),
        ),
        Misconception(
            "pieces without a label have 0",
            "0 is a class. Special tokens and the later pieces of words get -100, which the "
            "cross-entropy leaves out. With 0 there the model learns it for every comma.",
            _aligned(_ZeroElsewhere()),
        ),
        Misconception(
            "labels are dealt out token by token",
            "As soon as a word has two pieces, every label after it stands one token too early. "
            "`word_ids` says which word a token belongs to: use it as the index.",
            _aligned(_ByPlace()),
        ),
        Misconception(
            "labels left over are an error",
            "A sentence that was cut has fewer words than labels, and that is as it should be. "
            "Only words without a label are an error.",
            _aligned(_AllLabelsNeeded()),
        ),
        Misconception(
            "words without a label end in an IndexError",
            "`list index out of range` does not say what is wrong. Compare the numbers of words "
            "and labels first, and say both.",
            _aligned(_AlignmentUnchecked()),
        ),
        Misconception(
            "words without a label are left out in silence",
            "If there are more words than labels, words and labels do not belong together, and "
            "most labels stand at the wrong word. Raise a ValueError.",
            _aligned(_TooManyIgnored()),
        ),
        Misconception(
            "-100 counts as class 0",
            "Padding, special tokens and later pieces have no label. Leave -100 as it is: "
            "`F.cross_entropy` ignores it. Clamping or filling it makes a class of it.",
            _tagger(_PaddingLabelled),
        ),
        Misconception(
            "the loss is the mean of the texts' means",
            "A sentence with one labelled token would weigh as much as one with thirty. Take the "
            "mean over all labelled tokens of the batch: flatten the batch first.",
            _tagger(_MeanOfTexts),
        ),
        Misconception(
            "the axes are changed by a view",
            "`cross_entropy` wants the classes second, and `view` or `reshape` to that shape "
            "mixes tokens and classes: it never moves a number. Flatten batch and seq "
            "(`logits.flatten(0, 1)`), or transpose.",
            _tagger(_Reshaped),
        ),
        Misconception(
            "the tagger's attention mask is not handed on",
            "Without it, padding is read as text, and a sentence's tags depend on its neighbors "
            "in the batch. Give `self.bert` all three arguments.",
            _tagger(TokenClassifier, _Unmasked),
        ),
        Misconception(
            "the tagger's token types are not handed on",
            "A tagger may be given a pair, such as a question and a sentence, and then has to know "
            "which is which. Give `self.bert` all three arguments.",
            _tagger(TokenClassifier, _Untyped),
        ),
        Misconception(
            "the tagger's dropout is left out",
            "Dropout before the classifier, with the config's rate, is part of BERT's recipe: "
            "here on the last hidden state. With few examples it matters.",
            _tagger(TokenClassifier, _NeverDropped),
        ),
        Misconception(
            "the tagger's labels are not checked",
            "PyTorch's error for a label out of range names no text, and on a GPU it ends the "
            "process. `check_labels`, given above, says which it is.",
            _tagger(TokenClassifier, _Unchecked),
        ),
        Misconception(
            "tags are counted instead of entities",
            "A prediction that has two of three words of a name right has not found the name. "
            "Collect the entities (type, first word, last word) and compare those.",
            _counted(_ByTag()),
        ),
        Misconception(
            "words outside of entities count as found",
            "Most words are `O`, so a tagger that finds nothing at all would score above 0.8. "
            "F1 is over entities; `O` is not one.",
            _counted(_ByWord()),
        ),
        Misconception(
            "an I without a B is no entity",
            "That is the strict reading. The CoNLL evaluation, and seqeval by default, are "
            "generous: an `I` that follows no entity of its type begins one.",
            _counted(_BeginsOnly()),
        ),
        Misconception(
            "types are not compared",
            "An entity is found when the type is right as well: `0.5` as a parameter is not `0.5` "
            "as a default.",
            _counted(_TypesGone()),
        ),
        Misconception(
            "neighbors of one type become one entity",
            "`B-x I-x B-x` is two entities: the second `B` begins a new one right behind the "
            "first. That is what the `B` is for.",
            _counted(_BeginsGone()),
        ),
        Misconception(
            "an entity goes on through another type",
            "`B-type I-default` is two entities: an `I` of another type cannot go on with what "
            "came before, so it begins one of its own.",
            _counted(_TypeOfTheFirst()),
        ),
        Misconception(
            "E and S are read as I",
            "`S` is an entity of one word, and `E` its last word: whatever comes after either "
            "begins a new one, even an `I` of the same type.",
            _counted(_EndsUnknown()),
        ),
        Misconception(
            "an entity goes on into the next sentence",
            "You joined all sentences into one. If one ends with an entity and the next begins "
            "with an `I` of its type, these are two.",
            _counted(_OneSentence()),
        ),
        Misconception(
            "entities of different sentences are taken for the same",
            "Words 2 to 3 of the first sentence and words 2 to 3 of the seventh are different "
            "entities. Count sentence by sentence, or keep the sentence's number with each.",
            _counted(_SentencesMixed()),
        ),
        Misconception(
            "an overlap is enough",
            "An entity is found when its first and its last word are right. Half a name is "
            "a mistake, twice even: one is missed, and one is made up.",
            _counted(_Overlaps()),
        ),
        Misconception(
            "F1 is averaged over the types",
            "That is the macro average, in which a rare type weighs as much as a frequent one. "
            "seqeval's default counts all entities together (micro).",
            _counted(_MeanOfTypes()),
        ),
        Misconception(
            "F1 is averaged over the sentences",
            "A sentence with one entity would weigh as much as one with ten. Add up the numbers of "
            "all sentences, and divide once.",
            _counted(_MeanOfSentences()),
        ),
        Misconception(
            "sentences without entities end in a division by zero",
            "If there is no entity at all, true or predicted, the ratio is 0 by zero. The "
            "contract says 0 then, as seqeval does.",
            _counted(_DividedByZero()),
        ),
        Misconception(
            "tags left over are not noticed",
            "`zip` stops at the shorter list. If a sentence has more predicted tags than words, "
            "they belong to something else, and the score means nothing: raise a ValueError that "
            "says which sentence.",
            _counted(_SentencesCut()),
        ),
    ),
    hints=(
        "align_labels: when does a new word begin? entity_f1: first write a function that lists "
        "the entities of one sentence, and only then compare lists.",
        "A piece begins a word if its word number differs from that of the token before it. An "
        "entity goes on at `I` or `E` if the tag before is `B` or `I` of the same type; at every "
        "other tag but `O` a new one begins. The tagger's loss: flatten batch and seq.",
        "`zip([None, *word_ids], word_ids)` gives each token with the one before. Keep a list of "
        "(type, first, last); where an entity goes on, replace its last. Then sets, `&`, and "
        "`2 * found / (true + predicted)`. `F.cross_entropy(logits.flatten(0, 1), "
        "labels.flatten())`.",
    ),
)


# --- 7.4: answer from a passage ---


class SpanClassifier(Head):
    """Transformers' `BertForQuestionAnswering` on a model of this course."""

    kind = "BertForQuestionAnswering"
    layer = "qa_outputs"

    def __init__(self, bert: Any) -> None:
        super().__init__(bert, 2)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
    ) -> Any:
        """Score both ends; the loss is that of the texts one by one, without their padding."""
        from bertlab.fine_tuning import SpanOutput

        places = (start_positions, end_positions)
        for name, given in zip(("start_positions", "end_positions"), places, strict=True):
            if given is not None:
                self.check(name, given, input_ids.shape[1])
        whole = self.theirs(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        )
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        start, end = (
            self.at_padding(x, real) for x in self.ends(whole.start_logits, whole.end_logits)
        )
        if start_positions is None or end_positions is None:
            return SpanOutput(None, start, end)
        sizes = self.sizes(real)
        rows = zip(start, end, start_positions, end_positions, sizes.tolist(), strict=True)
        losses = [
            self.joined(
                F.cross_entropy(one[None, :size], first[None]),
                F.cross_entropy(other[None, :size], last[None]),
            )
            for one, other, first, last, size in rows
        ]
        return SpanOutput(torch.stack(losses).mean(), start, end)

    # What a wrong version does in another way.

    def ends(self, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        return start, end

    def at_padding(self, logits: Tensor, real: Tensor) -> Tensor:
        return logits.masked_fill(real == 0, torch.finfo(logits.dtype).min)

    def sizes(self, real: Tensor) -> Tensor:
        return real.sum(dim=1)

    def joined(self, start: Tensor, end: Tensor) -> Tensor:
        return (start + end) / 2


class _EndFirst(SpanClassifier):
    def ends(self, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        return end, start


class _SumOfEnds(SpanClassifier):
    def joined(self, start: Tensor, end: Tensor) -> Tensor:
        return start + end


class _PaddingTakesPart(SpanClassifier):
    def at_padding(self, logits: Tensor, real: Tensor) -> Tensor:
        return logits

    def sizes(self, real: Tensor) -> Tensor:
        return torch.full_like(real[:, 0], real.shape[1])


class _ZeroAtPadding(SpanClassifier):
    def at_padding(self, logits: Tensor, real: Tensor) -> Tensor:
        return logits * real

    def sizes(self, real: Tensor) -> Tensor:
        return torch.full_like(real[:, 0], real.shape[1])


class _ViewedEnds(SpanClassifier):
    """Takes the two columns by a view, which mixes places and ends."""

    def ends(self, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        mixed = torch.stack([start, end], dim=-1).reshape(len(start), 2, -1)
        return mixed[:, 0], mixed[:, 1]


class Spans:
    """Transformers' `decode_spans` on each window, with the scores as logits again."""

    def best_spans(
        self,
        start_logits: Tensor,
        end_logits: Tensor,
        offsets: Sequence[Sequence[Any]],
        n_best: int = 5,
        max_answer_tokens: int = 30,
    ) -> list[tuple[int, int, float]]:
        if [len(window) for window in offsets] != [start_logits.shape[1]] * len(start_logits):
            raise ValueError("offsets must have an entry for each token")
        found: list[tuple[int, int, float]] = []
        for starts, ends, spans in zip(start_logits, end_logits, offsets, strict=True):
            found += self.of_window(starts, ends, spans, n_best, self.most(max_answer_tokens))
        return self.ranked(self.once(found), self.none(start_logits, end_logits), n_best)

    def of_window(
        self, starts: Tensor, ends: Tensor, spans: Sequence[Any], n_best: int, most: int
    ) -> list[tuple[int, int, float]]:
        from transformers.pipelines.document_question_answering import decode_spans

        allowed = np.array([self.allowed(span) for span in spans])
        logits = [x.detach().cpu().double().numpy() for x in (starts, ends)]
        shifts = [float(x.max()) for x in logits]
        one, other = (np.exp(x - s) * allowed for x, s in zip(logits, shifts, strict=True))
        firsts, lasts, scores = decode_spans(one, other, allowed.size**2, most, allowed)
        keep = scores > 0
        triples = zip(firsts[keep], lasts[keep], scores[keep], strict=True)
        kind = np.float32 if starts.dtype == torch.float32 else np.float64
        return [
            (*self.answer(spans, int(a), int(b)), float(kind(math.log(s) + sum(shifts))))
            for a, b, s in triples
        ]

    # What a wrong version does in another way.

    def allowed(self, span: Any) -> bool:
        return span is not None

    def most(self, max_answer_tokens: int) -> int:
        return max_answer_tokens

    def answer(self, spans: Sequence[Any], first: int, last: int) -> tuple[int, int]:
        return spans[first][0], spans[last][1]

    def once(self, found: list[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
        best: dict[tuple[int, int], float] = {}
        for start, end, score in found:
            best[start, end] = max(score, best.get((start, end), -math.inf))
        return [(*span, score) for span, score in best.items()]

    def none(self, start_logits: Tensor, end_logits: Tensor) -> float:
        return (start_logits[:, 0] + end_logits[:, 0]).min().item()

    def ranked(
        self, found: list[tuple[int, int, float]], none: float, n_best: int
    ) -> list[tuple[int, int, float]]:
        return sorted([*found, (0, 0, none)], key=lambda span: -span[2])[:n_best]


class _EndsApart(Spans):
    """The best start and the best end, whatever lies between them."""

    def of_window(
        self, starts: Tensor, ends: Tensor, spans: Sequence[Any], n_best: int, most: int
    ) -> list[tuple[int, int, float]]:
        places = [i for i, span in enumerate(spans) if span is not None]
        if not places:
            return []
        first = max(places, key=lambda i: float(starts[i]))
        last = max(places, key=lambda i: float(ends[i]))
        return [(spans[first][0], spans[last][1], (starts[first] + ends[last]).item())]


class _Backwards(Spans):
    """Pairs that end before they begin are among the answers."""

    def of_window(
        self, starts: Tensor, ends: Tensor, spans: Sequence[Any], n_best: int, most: int
    ) -> list[tuple[int, int, float]]:
        places = [i for i, span in enumerate(spans) if span is not None]
        pairs = itertools.product(places, places)
        return [
            (spans[a][0], spans[b][1], (starts[a] + ends[b]).item())
            for a, b in pairs
            if b - a < most
        ]


class _OneTokenLonger(Spans):
    def most(self, max_answer_tokens: int) -> int:
        return max_answer_tokens + 1


class _AnyLength(Spans):
    def most(self, max_answer_tokens: int) -> int:
        return 10**6


class _Anywhere(Spans):
    def allowed(self, span: Any) -> bool:
        return True

    def answer(self, spans: Sequence[Any], first: int, last: int) -> tuple[int, int]:
        return (spans[first] or (0, 0))[0], (spans[last] or (0, 0))[1]


class _WithoutLastToken(Spans):
    def answer(self, spans: Sequence[Any], first: int, last: int) -> tuple[int, int]:
        return spans[first][0], spans[last][0]


class _TokensNotCharacters(Spans):
    def answer(self, spans: Sequence[Any], first: int, last: int) -> tuple[int, int]:
        return first, last + 1


class _Twice(Spans):
    def once(self, found: list[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
        return found


class _MostSureOfNone(Spans):
    def none(self, start_logits: Tensor, end_logits: Tensor) -> float:
        return (start_logits[:, 0] + end_logits[:, 0]).max().item()


class _FirstWindowsNone(Spans):
    def none(self, start_logits: Tensor, end_logits: Tensor) -> float:
        return (start_logits[0, 0] + end_logits[0, 0]).item()


class _NoneLeftOut(Spans):
    def ranked(
        self, found: list[tuple[int, int, float]], none: float, n_best: int
    ) -> list[tuple[int, int, float]]:
        return sorted(found, key=lambda span: -span[2])[:n_best]


class _NoneAlways(Spans):
    def ranked(
        self, found: list[tuple[int, int, float]], none: float, n_best: int
    ) -> list[tuple[int, int, float]]:
        best = sorted(found, key=lambda span: -span[2])[: n_best - 1]
        return sorted([*best, (0, 0, none)], key=lambda span: -span[2])


class _AsProbabilities(Spans):
    def ranked(
        self, found: list[tuple[int, int, float]], none: float, n_best: int
    ) -> list[tuple[int, int, float]]:
        best = super().ranked(found, none, n_best)
        weights = torch.tensor([score for _, _, score in best]).softmax(dim=0).tolist()
        return [(a, b, w) for (a, b, _), w in zip(best, weights, strict=True)]


class _OneWindow(Spans):
    def best_spans(
        self, start_logits: Tensor, end_logits: Tensor, offsets: Any, *more: Any, **options: Any
    ) -> list[tuple[int, int, float]]:
        return super().best_spans(start_logits[:1], end_logits[:1], offsets[:1], *more, **options)


def _span_cases(rng: np.random.Generator) -> Iterator[Case]:
    def texts(lengths: list[int]) -> dict[str, Any]:
        batch = drawn_batch(rng, lengths)
        firsts = torch.tensor([int(rng.integers(0, n)) for n in lengths])
        lasts = torch.tensor(
            [int(rng.integers(i, n)) for i, n in zip(firsts, lengths, strict=True)]
        )
        state = drawn_reader(rng) | drawn_layer(rng, "qa_outputs", 2)
        return {"state": state, "batch": batch, "starts": firsts, "ends": lasts}

    lengths = [9, 4, 7, 5]
    real = padding_mask(lengths, 9).bool()
    where = {"start_logits": real, "end_logits": real}
    yield Case("passages of unlike length", texts(lengths), positions=where)
    row = int(rng.integers(0, 3))
    for name in (["starts", "ends"][int(rng.integers(2))],):
        given = texts([5, 7, 6])
        given[name][row] = 50
        yield Case(f"one of the {name} is outside its text", {**given, "broken": row})

    def windows(count: int, seq: int, question: int, step: int, **options: Any) -> dict[str, Any]:
        letters = np.cumsum(rng.integers(2, 8, step * count + seq))  # where each token begins
        offsets: list[list[Any]] = []
        for window in range(count):
            tokens = range(window * step, window * step + seq - question - 1)
            spans = [(int(letters[i]), int(letters[i + 1]) - 1) for i in tokens]
            offsets.append([None] * question + spans + [None])
        shape = (count, seq)
        given = {"start_logits": normal(rng, *shape, scale=2), "end_logits": normal(rng, *shape)}
        return {**given, "offsets": offsets, **options}

    yield Case("spans: a single window", windows(1, 12, 4, 0))
    yield Case("spans: three windows that overlap", windows(3, 12, 3, 4, n_best=8))
    same = windows(2, 10, 2, 3, n_best=40)
    yield Case("spans: all of two windows", same)
    short = windows(2, 14, 3, 6, n_best=30, max_answer_tokens=2)
    yield Case("spans: answers of at most two tokens", short)
    sure = windows(3, 11, 3, 5, n_best=4)
    sure["start_logits"][:, 0] += torch.tensor([24.0, 40.0, 9.0])
    yield Case("spans: no answer is likeliest", sure)
    unlike = windows(2, 9, 2, 4, n_best=3)
    unlike["start_logits"][0, 0] -= 9.0
    yield Case("spans: no answer is unlikely", unlike)
    ends_first = windows(1, 12, 2, 0, n_best=4)
    ends_first["start_logits"][0, 8] += 9.0
    ends_first["end_logits"][0, 4] += 9.0
    yield Case("spans: the best end stands before the best start", ends_first)
    question = windows(2, 12, 4, 4)
    question["start_logits"][:, 2] += 12.0
    question["end_logits"][:, 3] += 12.0
    yield Case("spans: the question has the highest scores", question)
    nowhere = windows(2, 6, 5, 2)
    yield Case("spans: windows without a place for an answer", nowhere)
    uneven = windows(2, 8, 2, 3)
    uneven["offsets"][1] = uneven["offsets"][1][:-1]
    yield Case("spans: an entry of offsets is missing", {**uneven, "broken": True})


def _span_probe(part: Any, broken: Any = None, **inputs: Any) -> Any:
    if "offsets" in inputs:
        if broken:
            return error_of(lambda: part.best_spans(**inputs), kind=ValueError)
        best = part.best_spans(**inputs)
        return {
            "spans": [(int(start), int(end)) for start, end, _ in best],
            "types": [type(best).__name__, *sorted({type(x).__name__ for x in best})],
            "scores": torch.tensor(
                [float(score) for _, _, score in best], dtype=inputs["start_logits"].dtype
            ),
        }
    return _ends_probe(part, broken=broken, **inputs)


def _ends_probe(
    part: Any,
    state: dict[str, Tensor],
    batch: dict[str, Tensor],
    starts: Tensor,
    ends: Tensor,
    broken: int | None = None,
) -> dict[str, Any]:
    bert = Reader(bert_config(**SIZES))
    model = part.SpanClassifier(bert)
    fresh = initial(model, bert, "qa_outputs")
    with_parameters(model, state)
    places = {"start_positions": starts, "end_positions": ends}
    if broken is not None:
        return error_of(lambda: model(**batch, **places), broken, 50, kind=ValueError)
    plain, labelled = model(**batch), model(**batch, **places)
    names = ["qa_outputs.weight", "bert.embeddings.word.weight"]
    wanted = {name: model.get_parameter(name) for name in names}
    padded = {name: F.pad(x, (0, 5)) for name, x in batch.items()}
    unmasked = {name: x for name, x in batch.items() if name != "attention_mask"}
    found = both_forms(labelled, ("loss", "start_logits", "end_logits"))
    return {
        **fresh,
        **found,
        "loss without positions": plain.loss,
        "loss with five more places of padding": model(**padded, **places).loss,
        "loss without a mask": model(**unmasked, **places).loss,
        **gradients(labelled.loss, torch.ones_like(labelled.loss), wanted),
    }


def _ended(base: type, *mixins: type) -> dict[str, Any]:
    return {"SpanClassifier": _wrong("Wrong", base, *mixins)}


def _spanned(wrong: Spans) -> dict[str, Any]:
    return {"best_spans": wrong.best_spans}


ANSWER = Exercise(
    id="7.4",
    reference={"SpanClassifier": SpanClassifier, "best_spans": Spans().best_spans},
    reference_name="transformers.BertForQuestionAnswering, decode_spans",
    cases=_span_cases,
    probe=_span_probe,
    misconceptions=(
        Misconception(
            "the two columns are swapped",
            "The first of the two scores is that of the start, the second that of the end. A "
            "checkpoint trained elsewhere would answer backwards.",
            _ended(_EndFirst),
        ),
        Misconception(
            "the two losses are summed up",
            "The loss is the mean of both: BERT's and Transformers' divide by 2. A sum doubles "
            "the gradient. Learning rates found elsewhere would then be twice too high for you.",
            _ended(_SumOfEnds),
        ),
        Misconception(
            "padding takes part in the softmax",
            "Here Transformers' own model is careless: its loss changes with the number of padded "
            "places. No answer begins at padding: put the lowest number of the dtype there "
            "(`masked_fill`) before the cross-entropy.",
            _ended(_PaddingTakesPart),
        ),
        Misconception(
            "padding has a logit of 0",
            "Multiplying by the mask gives 0 at padding, and e to the power of 0 is 1: padding "
            "still has a part of the probability. Use the lowest number of the dtype.",
            _ended(_ZeroAtPadding),
        ),
        Misconception(
            "the columns are taken apart by a view",
            "`logits.view(2, ...)` never moves a number, so places and ends get mixed up. Take "
            "the columns: `logits.unbind(dim=-1)`. Half of the starts would then be ends of "
            "other tokens.",
            _ended(_ViewedEnds),
        ),
        Misconception(
            "the reader's attention mask is not handed on",
            "Without it, padding is read as text. Give `self.bert` all three arguments. The "
            "same passage must get the same scores, whatever else is in the batch.",
            _ended(SpanClassifier, _Unmasked),
        ),
        Misconception(
            "question and passage are not told apart",
            "Token types say which tokens are the question's. Give `self.bert` all three "
            "arguments. Without them BERT reads one long text, and looks for answers in the "
            "question as well.",
            _ended(SpanClassifier, _Untyped),
        ),
        Misconception(
            "qa_outputs starts as PyTorch draws it",
            "BERT's recipe begins with small weights (`initializer_range`) and biases of 0: "
            "`initialize_weights`, as for the other heads. Then the first loss is that of an "
            "even guess.",
            _ended(SpanClassifier, _FreshLinear),
        ),
        Misconception(
            "positions are not checked",
            "A position behind the end of its text means that the text was cut and its answer is "
            "gone. `check_labels`, given above, says which text.",
            _ended(SpanClassifier, _Unchecked),
        ),
        Misconception(
            "the best start and the best end are taken apart",
            "They may not make a span: the end may stand before the start, or a hundred tokens "
            "behind it. Look at pairs, and take the pair with the best sum.",
            _spanned(_EndsApart()),
        ),
        Misconception(
            "an answer may end before it begins",
            "Of all pairs of a first and a last token, those whose last stands before the first "
            "are no spans. Leave them out before you rank.",
            _spanned(_Backwards()),
        ),
        Misconception(
            "answers are one token too long",
            "A span from token `i` to token `j` has `j - i + 1` tokens, so `j - i` must be less "
            "than `max_answer_tokens`.",
            _spanned(_OneTokenLonger()),
        ),
        Misconception(
            "answers may have any length",
            "Without `max_answer_tokens` the best pair is often half a page, from one good "
            "start to another sentence's good end. Count the tokens, and leave longer ones out.",
            _spanned(_AnyLength()),
        ),
        Misconception(
            "answers lie in the question too",
            "Where `offsets` is None no answer may begin or end: those are the tokens of the "
            "question, special tokens and padding.",
            _spanned(_Anywhere()),
        ),
        Misconception(
            "the last token is cut off",
            "An answer ends where its last token ends: `offsets[last][1]`, not where that token "
            "begins. With the beginning of its last token as the end, a one-word answer is "
            "empty.",
            _spanned(_WithoutLastToken()),
        ),
        Misconception(
            "tokens are returned instead of characters",
            "The caller slices the passage: `passage[start:end]`. Look the characters up in "
            "`offsets`. Token numbers count from the window's beginning and include the "
            "question, so they mean nothing there.",
            _spanned(_TokensNotCharacters()),
        ),
        Misconception(
            "the same span is listed twice",
            "Windows overlap, so the same characters are found in two of them. Keep each span "
            "once, with its better score, or one answer fills all places.",
            _spanned(_Twice()),
        ),
        Misconception(
            "the window that is surest of no answer decides",
            "Most windows of a long passage have no answer, and say so with confidence. A passage "
            "has none only if none of its windows has one: the lowest of their scores counts.",
            _spanned(_MostSureOfNone()),
        ),
        Misconception(
            "only the first window says whether there is an answer",
            "The answer may lie in any window. Take the lowest score of `[CLS]` over all of "
            "them. One window with an answer is enough for the passage to have one.",
            _spanned(_FirstWindowsNone()),
        ),
        Misconception(
            "there is always an answer",
            "No answer, `(0, 0, score)`, competes with the spans: a question that the passage does "
            "not answer must not be answered.",
            _spanned(_NoneLeftOut()),
        ),
        Misconception(
            "no answer is always listed",
            "It has its place among the others, by its score, and is left out like them when "
            "`n_best` better ones exist.",
            _spanned(_NoneAlways()),
        ),
        Misconception(
            "scores are probabilities",
            "A score is the sum of two logits. Probabilities over the few that are listed change "
            "with `n_best`, and cannot be compared between passages.",
            _spanned(_AsProbabilities()),
        ),
        Misconception(
            "only the first window is read",
            "A long passage comes in several windows, `[windows, seq]`, and the answer may be in "
            "any of them. Go through all, and rank once at the end.",
            _spanned(_OneWindow()),
        ),
    ),
    hints=(
        "SpanClassifier: one linear layer with two outputs for each token; which axis is softmaxed "
        "when you ask where the answer begins? best_spans: think of a square of scores, first "
        "token by last token; which part of it is allowed?",
        "`start_logits[:, None] + end_logits[None, :]` is the square for one window. Allowed is "
        "what lies on or above the diagonal, less than max_answer_tokens from it, with offsets at "
        "both ends. Put minus infinity elsewhere. A dict from (start, end) to the best score "
        "keeps each span once.",
        "`topk` of the flattened square gives the best pairs, `divmod(index, seq)` their first and "
        "last token. Then add `(0, 0)` with the minimum over windows of the two logits at place 0, "
        "and sort by score. In the head: `logits.masked_fill(attention_mask[..., None] == 0, "
        "torch.finfo(logits.dtype).min)`, then `unbind(dim=-1)`.",
    ),
)


# --- 7.5: the fine-tuning loop ---


class TextModel(nn.Module):
    """A small classifier of texts, with the names of `SequenceClassifier`."""

    def __init__(self, state: Mapping[str, Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        rows = len(state["bert.embeddings.word.weight"])
        self.bert = Reader(bert_config(**{**SIZES, "vocab_size": rows}), dropout)
        self.config = self.bert.config
        classes, width = state["classifier.weight"].shape
        self.classifier = nn.Linear(width, classes)
        with_parameters(self, state)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """Return the logits, and the loss of the labels."""
        from bertlab.fine_tuning import TaskOutput

        logits = self.classifier(self.bert(input_ids, attention_mask, token_type_ids).pooler_output)
        return TaskOutput(None if labels is None else F.cross_entropy(logits, labels), logits)


class Tuning:
    """Trains with PyTorch's AdamW and Transformers' schedule."""

    def fine_tune(
        self,
        model: Any,
        train: Any,
        validation: Any,
        settings: Any,
        on_epoch: Callable[[int, Any], None] | None = None,
    ) -> list[float]:
        from bertlab.fine_tuning import FineTuningRun

        was_training, chosen = model.training, self.to_freeze(model, settings)
        for parameter in chosen:
            parameter.requires_grad_(False).grad = None
        try:
            optimizer = torch.optim.AdamW(self.groups(model, settings), fused=True)
            run = FineTuningRun(model, optimizer, self.kept(settings))
            total = len(train) * settings.epochs
            schedule = self.schedule(optimizer, self.warmup(settings, total), total)
            self.begin(model)
            while not self.is_over(run.losses, settings):
                self.before_epoch(model)
                losses = self.epoch(model, optimizer, schedule, run, train, settings)
                result = self.result(model, validation, settings, losses)
                self.note(run, result)
                self.report(on_epoch, run, result)
        finally:
            self.thaw(chosen)
        self.restore(run)
        self.leave(model, was_training)
        return self.returned(run)

    def epoch(
        self, model: Any, optimizer: Any, schedule: Any, run: Any, train: Any, settings: Any
    ) -> list[float]:
        losses = []
        for step, batch in run.batches(train):
            for group, rate in zip(optimizer.param_groups, schedule(step), strict=True):
                group["lr"] = rate
            loss = self.loss(model, batch, settings)
            loss.backward()
            self.clip(model, settings)
            optimizer.step()
            self.zero(optimizer)
            run.show(loss)
            losses.append(loss.item())
        return losses

    # What a wrong version does in another way.

    def to_freeze(self, model: Any, settings: Any) -> list[nn.Parameter]:
        layers = model.bert.encoder.layers
        if settings.frozen_layers > len(layers):
            raise ValueError(f"frozen_layers is {settings.frozen_layers} of {len(layers)}")
        parts = list(self.layers_to_freeze(layers, settings.frozen_layers))
        parts += [model.bert.embeddings] if settings.freeze_embeddings else []
        return [parameter for part in parts for parameter in part.parameters()]

    def layers_to_freeze(self, layers: Any, number: int) -> Any:
        return layers[:number]

    def thaw(self, chosen: list[nn.Parameter]) -> None:
        for parameter in chosen:
            parameter.requires_grad_(True)

    def groups(self, model: Any, settings: Any) -> list[dict[str, Any]]:
        from transformers.trainer_pt_utils import get_parameter_names

        decayed = set(get_parameter_names(model, [nn.LayerNorm], [r"bias"]))
        layers = len(model.bert.encoder.layers)
        groups: dict[Any, list[Any]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                kind = (self.level(name, layers), self.decays(name in decayed))
                groups.setdefault(kind, []).append(parameter)
        return [
            {
                "params": parameters,
                "weight_decay": settings.weight_decay if decays else 0.0,
                "lr": settings.learning_rate * settings.layer_decay**level,
            }
            for (level, decays), parameters in groups.items()
        ]

    def decays(self, is_matrix: bool) -> bool:
        return is_matrix

    def level(self, name: str, layers: int) -> int:
        if name.startswith("bert.embeddings."):
            return layers + 1
        layer = re.match(r"bert\.encoder\.layers\.(\d+)\.", name)
        return layers - int(layer[1]) if layer else 0

    def kept(self, settings: Any) -> Any:
        return settings

    def warmup(self, settings: Any, total: int) -> int:
        return math.ceil(settings.warmup * total)

    def schedule(self, optimizer: Any, warmup: int, total: int) -> Callable[[int], list[float]]:
        from transformers.optimization import get_linear_schedule_with_warmup

        scheduler: Any = get_linear_schedule_with_warmup(optimizer, warmup, total)
        pairs = list(zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True))
        return lambda step: [rate * factor(step) for rate, factor in pairs]

    def begin(self, model: Any) -> None:
        pass

    def before_epoch(self, model: Any) -> None:
        model.train()

    def loss(self, model: Any, batch: Any, settings: Any) -> Tensor:
        output = model(**batch)
        if settings.class_weights is None:
            return output.loss
        weights = torch.tensor(settings.class_weights).to(output.logits)
        return F.cross_entropy(output.logits, batch["labels"], weights)

    def clip(self, model: Any, settings: Any) -> None:
        if settings.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)

    def zero(self, optimizer: Any) -> None:
        optimizer.zero_grad()

    def result(self, model: Any, validation: Any, settings: Any, losses: list[float]) -> Any:
        from bertlab.fine_tuning import evaluate

        return evaluate(model, validation, settings)

    def note(self, run: Any, result: Any) -> None:
        run.note(result)

    def report(self, on_epoch: Any, run: Any, result: Any) -> None:
        if on_epoch is not None:
            on_epoch(len(run.losses), result)

    def is_over(self, losses: list[float], settings: Any) -> bool:
        if len(losses) >= settings.epochs:
            return True
        return settings.patience is not None and self.waited(losses) >= settings.patience

    def waited(self, losses: list[float]) -> int:
        return len(losses) - 1 - int(np.argmin(losses)) if losses else 0

    def restore(self, run: Any) -> None:
        run.restore_best()

    def leave(self, model: Any, was_training: bool) -> None:
        model.train(was_training)

    def returned(self, run: Any) -> list[float]:
        return run.losses


class _HeadDecaysToo(Tuning):
    def level(self, name: str, layers: int) -> int:
        return super().level(name, layers) + 1


class _UpsideDown(Tuning):
    def level(self, name: str, layers: int) -> int:
        level = super().level(name, layers)
        return layers + 1 - level if 1 <= level <= layers else level


class _OneRate(Tuning):
    def level(self, name: str, layers: int) -> int:
        return 0


class _AllDecay(Tuning):
    def decays(self, is_matrix: bool) -> bool:
        return True


class _TopLayersFrozen(Tuning):
    def layers_to_freeze(self, layers: Any, number: int) -> Any:
        return layers[len(layers) - number :]


class _EmbeddingsNotFrozen(Tuning):
    def to_freeze(self, model: Any, settings: Any) -> list[nn.Parameter]:
        frozen = super().to_freeze(model, settings)
        own = set(model.bert.embeddings.parameters())
        return [parameter for parameter in frozen if parameter not in own]


class _SlicedFreely(Tuning):
    def to_freeze(self, model: Any, settings: Any) -> list[nn.Parameter]:
        parts = [*model.bert.encoder.layers[: settings.frozen_layers]]
        parts += [model.bert.embeddings] if settings.freeze_embeddings else []
        return [parameter for part in parts for parameter in part.parameters()]


class _FixedRate(Tuning):
    def schedule(self, optimizer: Any, warmup: int, total: int) -> Callable[[int], list[float]]:
        rates = [group["lr"] for group in optimizer.param_groups]
        return lambda step: rates


class _ScheduleByEpoch(Tuning):
    """The schedule runs anew in each epoch."""

    def schedule(self, optimizer: Any, warmup: int, total: int) -> Callable[[int], list[float]]:
        self.whole = super().schedule
        self.optimizer = optimizer
        return lambda step: self.rates(step % self.steps)

    def epoch(
        self, model: Any, optimizer: Any, schedule: Any, run: Any, train: Any, settings: Any
    ) -> list[float]:
        self.steps = len(train)
        if not run.losses:
            warmup = self.warmup(settings, self.steps)
            self.rates = self.whole(optimizer, warmup, self.steps)
        return super().epoch(model, optimizer, schedule, run, train, settings)


class _NeverShortened(Tuning):
    def clip(self, model: Any, settings: Any) -> None:
        pass


class _GradientsKept(Tuning):
    def zero(self, optimizer: Any) -> None:
        pass


class _WeightsOfClassesIgnored(Tuning):
    def loss(self, model: Any, batch: Any, settings: Any) -> Tensor:
        return model(**batch).loss


class _TrainOnce(Tuning):
    """Training mode is set before the first epoch, and a hand-made evaluation leaves eval mode."""

    def begin(self, model: Any) -> None:
        model.train()

    def before_epoch(self, model: Any) -> None:
        pass

    def result(self, model: Any, validation: Any, settings: Any, losses: list[float]) -> Any:
        result = super().result(model, validation, settings, losses)
        model.eval()
        return result


def hand_made(model: Any, validation: Any, settings: Any, of_means: bool, gradients: bool) -> Any:
    """An evaluation without the given function: the mean, or the mean of means."""
    from bertlab.fine_tuning import Evaluation

    device = next(model.parameters()).device
    total = weight = 0.0
    with torch.set_grad_enabled(gradients):
        for batch in validation:
            batch = {name: x.to(device) for name, x in batch.items()}
            share = 1 if of_means else len(batch["labels"])
            total += model(**batch).loss.item() * share
            weight += share
    return Evaluation(total / weight, 0.0)


class _MeanOfMeans(Tuning):
    def result(self, model: Any, validation: Any, settings: Any, losses: list[float]) -> Any:
        model.eval()
        return hand_made(model, validation, settings, True, False)


class _ValidatedInTraining(Tuning):
    def result(self, model: Any, validation: Any, settings: Any, losses: list[float]) -> Any:
        return hand_made(model, validation, settings, False, False)


class _LastWeights(Tuning):
    """Also what comes of keeping `model.state_dict()`, which is the model's own memory."""

    def restore(self, run: Any) -> None:
        pass


class _NeverStops(Tuning):
    def waited(self, losses: list[float]) -> int:
        return 0


class _FromTheEpochBefore(Tuning):
    """Patience counts epochs that were worse than the one before."""

    def waited(self, losses: list[float]) -> int:
        waited = 0
        for before, loss in itertools.pairwise(losses):
            waited = 0 if loss < before else waited + 1
        return waited


class _LeftAsItHappens(Tuning):
    def leave(self, model: Any, was_training: bool) -> None:
        model.train()


class _NewRun(Tuning):
    """Writes the checkpoint, and never reads it."""

    def kept(self, settings: Any) -> Any:
        if settings.checkpoint is not None:
            Path(settings.checkpoint).unlink(missing_ok=True)
        return settings


class _OptimizerForgotten(Tuning):
    """A resumed run has a new optimizer."""

    def epoch(
        self, model: Any, optimizer: Any, schedule: Any, run: Any, train: Any, settings: Any
    ) -> list[float]:
        if run.losses and not run.shown:
            optimizer.state.clear()
        return super().epoch(model, optimizer, schedule, run, train, settings)


class Stopped(Exception):
    """A run is stopped from outside."""


class _Data:
    """Batches that can be read again and again, and that may stop within an epoch."""

    def __init__(self, batches: Sequence[Any], stop: int | None = None) -> None:
        self.batches, self.stop, self.rounds = batches, stop, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.rounds += 1
        for place, batch in enumerate(self.batches):
            if self.rounds == self.stop and place == 1:
                raise Stopped
            yield dict(batch)


class _Curve:
    """Validation data whose labels are right in part: the loss goes up and down as asked."""

    def __init__(self, batch: Mapping[str, Tensor], right: Sequence[int]) -> None:
        self.batch, self.right, self.rounds = batch, right, 0

    def __iter__(self) -> Iterator[Any]:
        right = self.right[min(self.rounds, len(self.right) - 1)]
        self.rounds += 1
        labels = self.batch["labels"].clone()
        labels[right:] = 1 - labels[right:]
        yield {**self.batch, "labels": labels}


def _tuning_cases(rng: np.random.Generator) -> Iterator[Case]:
    def batch(count: int, classes: int) -> dict[str, Tensor]:
        lengths = [int(n) for n in rng.integers(3, 8, count)]
        return drawn_batch(rng, lengths) | {"labels": integers(rng, 0, classes, count)}

    def case(name: str, classes: int = 3, **more: Any) -> Case:
        settings = {"learning_rate": 0.02, "weight_decay": 0.5, "epochs": 2, "warmup": 0.3}
        inputs = {
            "state": drawn_reader(rng) | drawn_layer(rng, "classifier", classes),
            "train": [batch(n, classes) for n in (4, 6)],
            "validation": [batch(n, classes) for n in (7, 2)],
            "settings": settings | more.pop("settings", {}),
        }
        return Case(name, inputs | more)

    decay = {"layer_decay": 0.5, "max_grad_norm": 0.3, "class_weights": (0.2, 3.0, 1.0)}
    yield case("warm-up, layer decay, class weights, a short gradient", settings=decay)
    frozen = {"freeze_embeddings": True, "frozen_layers": 1, "max_grad_norm": 0.2, "epochs": 1}
    yield case("the embeddings and the lowest layer are frozen", settings=frozen)
    stopped = {"epochs": 2, "seed": int(rng.integers(1, 99))}
    yield case("dropout; stopped in the second epoch, and gone on", settings=stopped, dropout=0.3)
    curve = {"epochs": 8, "patience": 2, "warmup": 0.0, "learning_rate": 0.1}
    curve |= {"weight_decay": 0.0, "max_grad_norm": None}
    same = {**batch(8, 2), "labels": torch.ones(8).long()}  # learned in a few steps
    inputs: dict[str, Any] = {"train": [same], "validation": [same], "settings": curve}
    right = [5, 1, 8, 0, 3, 2, 1, 3]  # down, up, down to the lowest, up, a little down, ...
    learned = case("the validation loss goes up and down", 2, right=right, **inputs)
    learned.inputs["state"]["classifier.weight"] *= 0.1
    learned.inputs["state"]["classifier.bias"] *= 0.1
    yield learned
    yield case("no batch to train on", train=[], broken=True)
    many = {"frozen_layers": 4}
    yield case("more layers are to be frozen than there are", settings=many, broken=True)


def _tuning_probe(
    part: Any,
    state: dict[str, Tensor],
    train: list[Any],
    validation: list[Any],
    settings: dict[str, Any],
    dropout: float = 0.0,
    right: Sequence[int] | None = None,
    broken: bool = False,
) -> dict[str, Any]:
    from bertlab.fine_tuning import FineTuningSettings

    chosen = FineTuningSettings(**settings)
    model = TextModel(state, dropout).eval()
    if broken:
        error = error_of(lambda: part.fine_tune(model, train, validation, chosen), kind=ValueError)
        return error | {"gradients are as before": _trainable(model)}
    tested: Any = validation if right is None else _Curve(validation[0], right)
    told: list[Any] = []
    losses = part.fine_tune(
        model, _Data(train), tested, chosen, lambda epoch, result: told.append((epoch, result.loss))
    )
    found = {
        "epochs": len(losses),
        "types": [type(losses).__name__, *sorted({type(x).__name__ for x in losses})],
        "on_epoch was called with": [epoch for epoch, _ in told],
        "on_epoch was told the validation loss": [loss for _, loss in told] == losses,
        "the model is in training mode afterwards": model.training,
        "everything can be trained afterwards": _trainable(model),
        "modes in which batches were read": model.bert.modes,
    }
    if dropout:
        inputs = (train, validation, settings)
        return found | _gone_on(part, lambda: TextModel(state, dropout), inputs, losses)
    before = dict(TextModel(state).named_parameters())
    found["what did not move"] = sorted(
        name for name, p in model.named_parameters() if torch.equal(p, before[name])
    )
    kind = state["classifier.weight"].dtype
    return found | {
        "validation losses": torch.tensor(losses, dtype=kind),
        "the model's logits afterwards": _logits(model, [*train, *validation]),
    }


def _trainable(model: nn.Module) -> bool:
    return all(parameter.requires_grad for parameter in model.parameters())


def _logits(model: Any, batches: Sequence[Any]) -> Tensor:
    model.eval()
    with torch.no_grad():
        return torch.cat([model(**batch).logits for batch in batches])


def _gone_on(
    part: Any, built: Callable[[], Any], inputs: Sequence[Any], losses: list[float]
) -> dict[str, Any]:
    """What becomes of a run with dropout that is stopped in its second epoch, and called again."""
    from bertlab.fine_tuning import FineTuningSettings

    train, validation, settings = inputs
    torch.default_generator.manual_seed(7)  # the run's own seed decides, and nothing else
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run")
        chosen = FineTuningSettings(**settings, checkpoint=file)
        first = outcome_of_stop(
            lambda: part.fine_tune(built(), _Data(train, stop=2), validation, chosen)
        )
        written, data = file.exists(), _Data(train)
        again = part.fine_tune(built(), data, validation, chosen)
    return {
        "the first run": first,
        "a checkpoint is there": written,
        "epochs that the second run reads": data.rounds,
        "the losses are those without a stop": again == losses,
    }


def outcome_of_stop(call: Callable[[], Any]) -> str:
    """Say whether a run was stopped from outside, or came to its end."""
    try:
        call()
    except Stopped:
        return "stopped"
    return "came to its end"


def _tuned(wrong: Tuning) -> dict[str, Any]:
    return {"fine_tune": wrong.fine_tune}


TUNE = Exercise(
    id="7.5",
    reference={"fine_tune": Tuning().fine_tune},
    reference_name="torch.optim.AdamW with transformers' schedule",
    cases=_tuning_cases,
    probe=_tuning_probe,
    misconceptions=(
        Misconception(
            "the head's rate is lowered too",
            "The head is new and has everything to learn: it has the full learning rate, the top "
            "layer `layer_decay`, the next one its square. You began one power too early.",
            _tuned(_HeadDecaysToo()),
        ),
        Misconception(
            "the lowest layer learns fastest",
            "It is the other way round: layers near the input hold what is common to all tasks, "
            "and should move least. `layers[0]` is the lowest.",
            _tuned(_UpsideDown()),
        ),
        Misconception(
            "layer_decay is not looked at",
            "All parameters have one rate. Make a group for each part, with its own: `rate = "
            "learning_rate * layer_decay ** depth`.",
            _tuned(_OneRate()),
        ),
        Misconception(
            "biases and norms decay",
            "As in pretraining, only matrices and tables do. `parameter_groups` of exercise 6.4 "
            "tells the two kinds apart. Pulling a norm's gain towards 0 works against the norm.",
            _tuned(_AllDecay()),
        ),
        Misconception(
            "the top layers are frozen",
            "`frozen_layers` counts from the bottom, where what was learned is most general: "
            "`layers[:frozen_layers]`. The top layers are the ones that have most to learn for "
            "a new task.",
            _tuned(_TopLayersFrozen()),
        ),
        Misconception(
            "the embeddings are not frozen",
            "With `freeze_embeddings` all of `model.bert.embeddings` stays as it is: tables and "
            "norm. A table of which a few rows move no longer fits the rows that were not in "
            "the training texts.",
            _tuned(_EmbeddingsNotFrozen()),
        ),
        Misconception(
            "too many layers to freeze are not noticed",
            "A slice is silent: `layers[:40]` of a model with 12 layers is all of them. Whoever "
            "asks for 40 has another model in mind: raise a ValueError.",
            _tuned(_SlicedFreely()),
        ),
        Misconception(
            "the rate stays the same all the time",
            "Before each step, write each group's own rate times `warmup_linear(steps done, "
            "warm-up steps, steps of all epochs)` into its `lr`.",
            _tuned(_FixedRate()),
        ),
        Misconception(
            "the schedule begins anew in each epoch",
            "The rate goes up once and down once, over all epochs together: the total is "
            "`len(train) * settings.epochs`, and steps are counted through.",
            _tuned(_ScheduleByEpoch()),
        ),
        Misconception(
            "the gradient is never shortened",
            "One odd batch can undo an epoch. `nn.utils.clip_grad_norm_(model.parameters(), "
            "max_grad_norm)` after `backward`, unless it is None. It is the length of all "
            "gradients together that counts.",
            _tuned(_NeverShortened()),
        ),
        Misconception(
            "gradients are never set to 0",
            "They add up over all steps. Call `optimizer.zero_grad()` after each step. The "
            "second step would go along the sum of two gradients, the tenth along that of ten.",
            _tuned(_GradientsKept()),
        ),
        Misconception(
            "class weights are not looked at",
            "The model's own loss counts all classes alike. `batch_loss`, given below, weighs "
            "them as the settings say. Without them a rare class is hardly learned at all.",
            _tuned(_WeightsOfClassesIgnored()),
        ),
        Misconception(
            "from the second epoch on dropout is off",
            "Evaluation puts the model into eval mode, and nobody put it back. Call "
            "`model.train()` at the beginning of each epoch, not once before all.",
            _tuned(_TrainOnce()),
        ),
        Misconception(
            "the validation loss is the mean of the batches' means",
            "A batch of two texts would weigh as much as one of seven. Weigh each batch with its "
            "number of labels; `evaluate`, given below, does.",
            _tuned(_MeanOfMeans()),
        ),
        Misconception(
            "validation runs in training mode",
            "With dropout the loss is another one at each call, and too high. `evaluate`, given "
            "below, runs in eval mode.",
            _tuned(_ValidatedInTraining()),
        ),
        Misconception(
            "the last weights are left in the model",
            "The best epoch was an earlier one. If you did keep its `state_dict()`: that is the "
            "model's own memory, which further training changes. Clone each tensor, or let "
            "`run.note` and `run.restore_best` do it.",
            _tuned(_LastWeights()),
        ),
        Misconception(
            "the run never stops early",
            "`patience` says how many epochs in a row may pass without a new lowest loss. Then "
            "the model only learns its examples by heart: stop.",
            _tuned(_NeverStops()),
        ),
        Misconception(
            "epochs are compared with the one before",
            "A loss that is lower than the last one may still be far above the lowest. Patience "
            "counts epochs since the lowest.",
            _tuned(_FromTheEpochBefore()),
        ),
        Misconception(
            "the model is left in training mode",
            "Whoever uses it next would do so with dropout. Remember `model.training` and put "
            "it back. Its predictions would then be another draw at each call.",
            _tuned(_LeftAsItHappens()),
        ),
        Misconception(
            "the checkpoint is not read",
            "The second call begins anew. `FineTuningRun(model, optimizer, settings)` goes on "
            "from it; then loop until the run is over, instead of over `range(epochs)`.",
            _tuned(_NewRun()),
        ),
        Misconception(
            "a resumed run forgets what the optimizer knew",
            "Adam's two means are part of the run. Make the optimizer first, and hand it to "
            "`FineTuningRun`, which fills it.",
            _tuned(_OptimizerForgotten()),
        ),
    ),
    hints=(
        "Write it in this order: what is frozen; the optimizer's groups; the loop over epochs with "
        "the loop over batches in it; what happens after an epoch; what happens at the end.",
        "A dict from each parameter to its depth (top layer 1, ..., embeddings last; 0 for what is "
        "not in it) and `parameter_groups` make the groups; store each group's highest rate under "
        "a key of your own, such as `rate`. `while` the run is not over: `model.train()`, `for "
        "step, batch in run.batches(train)`, `run.note(evaluate(model, validation, settings))`.",
        "In each step: set every group's `lr` to its `rate` times `warmup_linear(step, "
        "math.ceil(settings.warmup * total), total)`; `batch_loss`, `backward`, "
        "`clip_grad_norm_`, `step`, `zero_grad`, `run.show(loss)`. Over is: `epochs` losses, or "
        "`len(losses) - 1 - losses.index(min(losses)) >= patience`. At the end "
        "`run.restore_best()`, the old mode, and `requires_grad` back in a `finally`.",
    ),
)


# --- 7.6: more examples ---

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("model", "layer", "token", "number", "matrix", "vector")
WORDS += ("text", "word", "loss", "rate", "name", "value")
ENDINGS = ("##s", "##ing", "##ed")
MARKS = (".", ",", "(", ")", "3", "_")


class Pieces:
    """BERT's tokenizer on a small vocabulary, from the library that Transformers uses."""

    def __init__(self, pieces: Sequence[str]) -> None:
        from tokenizers import BertWordPieceTokenizer

        self.pieces = list(pieces)
        vocab = {piece: i for i, piece in enumerate(self.pieces)}
        self._theirs: Any = BertWordPieceTokenizer(vocab=vocab, lowercase=True)
        self.vocab = vocab
        self.vocab_size = len(vocab)
        self.pad_token, self.unk_token, self.cls_token, self.sep_token, self.mask_token = SPECIAL
        self.all_special_ids = [vocab[token] for token in SPECIAL]
        self.pad_token_id, self.unk_token_id, self.cls_token_id = self.all_special_ids[:3]
        self.sep_token_id, self.mask_token_id = self.all_special_ids[3:]

    def __call__(self, text: str, pair: str | None = None, return_offsets: bool = False) -> Any:
        read = self._theirs.encode(text, pair)
        batch = {
            "input_ids": read.ids,
            "token_type_ids": read.type_ids,
            "attention_mask": read.attention_mask,
        }
        return batch | ({"offsets": read.offsets} if return_offsets else {})

    def encode(self, text: str, pair: str | None = None) -> list[int]:
        """The ids of a text or of a pair."""
        return self._theirs.encode(text, pair).ids

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Pieces by id, one or several."""
        return self.pieces[ids] if isinstance(ids, int) else [self.pieces[int(i)] for i in ids]

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of ids."""
        return self._theirs.decode([int(i) for i in ids], skip_special_tokens)


@lru_cache(maxsize=64)
def _tokenizer(pieces: tuple[str, ...]) -> Pieces:
    return Pieces(pieces)


class MaskedModel(nn.Module):
    """A small masked language model: what fits at a place depends on all other tokens."""

    def __init__(self, state: Mapping[str, Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        for name, value in state.items():
            setattr(self, name, nn.Parameter(value.clone()))
        self.config = SimpleNamespace(vocab_size=len(state["words"]))
        self.dropout = nn.Dropout(dropout)
        self.modes: set[bool] = set()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """Return the scores of all pieces at each place, and the loss of the labels."""
        self.modes.add(self.training)
        words, places = self.get_parameter("words"), self.get_parameter("places")
        read = words[input_ids]
        context = torch.tanh(read.mean(dim=1, keepdim=True) + places[: input_ids.shape[1]])
        mixed = self.dropout(context + self.get_parameter("own") * read)
        logits = mixed @ words.T + self.get_parameter("bias")
        loss = None if labels is None else flat_loss(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


class MoreExamples:
    """Softmax and threshold; words from `torch.distributions`."""

    def pseudo_label(
        self,
        model: Callable[[Sequence[str]], Tensor],
        texts: Sequence[str],
        threshold: float = 0.95,
    ) -> list[tuple[str, int]]:
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold is {threshold}, but must be from 0 to 1")
        if not texts:
            return []
        sure, labels = self.probabilities(model(texts)).max(dim=-1)
        rows = zip(texts, labels.tolist(), self.kept(sure, threshold).tolist(), strict=True)
        return [self.labelled(text, label) for text, label, keep in rows if keep]

    def probabilities(self, logits: Tensor) -> Tensor:
        return torch.distributions.Categorical(logits=logits).probs

    def kept(self, sure: Tensor, threshold: float) -> Tensor:
        return sure >= threshold

    def labelled(self, text: str, label: int) -> tuple[str, int]:
        return text, label

    def augment(
        self,
        text: str,
        model: Any,
        tokenizer: Any,
        probability: float = 0.15,
        top_k: int = 5,
        generator: torch.Generator | None = None,
    ) -> str:
        from bertlab.fine_tuning import BackTranslation

        if isinstance(model, BackTranslation):
            return model(text)
        read = tokenizer(text, return_offsets=True)
        ids = read["input_ids"]
        pieces = tokenizer.convert_ids_to_tokens(ids)
        chosen = [
            place
            for place in self.words(pieces)
            if self.is_chosen(float(torch.rand(1, generator=generator)), probability)
        ]
        logits = self.scores(model, tokenizer, ids, chosen)
        new = {
            place: self.drawn(logits[i], tokenizer, pieces[place], top_k, generator)
            for i, place in enumerate(chosen)
        }
        return self.written(text, read["offsets"], new, tokenizer, ids)

    # What a wrong version does in another way.

    def words(self, pieces: list[str]) -> list[int]:
        starts = [i for i, piece in enumerate(pieces) if not piece.startswith("##")]
        ends = [*starts[1:], len(pieces)]
        spans = zip(starts, ends, strict=True)
        return [a for a, b in spans if b - a == 1 and pieces[a].isalpha()]

    def is_chosen(self, draw: float, probability: float) -> bool:
        return draw < probability

    def scores(self, model: Any, tokenizer: Any, ids: list[int], chosen: list[int]) -> Tensor:
        """The scores at the chosen places, [chosen, vocab]."""
        with self.reading(model):
            return self.read(model, self.masked(ids, chosen, tokenizer.mask_token_id))[chosen]

    def masked(self, ids: list[int], chosen: list[int], mask: int) -> list[int]:
        return [mask if place in chosen else i for place, i in enumerate(ids)]

    def read(self, model: Any, ids: list[int]) -> Tensor:
        device = next(model.parameters()).device
        with torch.no_grad():
            return model(torch.tensor([ids], device=device)).logits[0].cpu()

    @contextmanager
    def reading(self, model: Any) -> Iterator[None]:
        was_training = model.training
        model.eval()
        yield
        model.train(was_training)

    def fits(self, piece: str, word: str) -> bool:
        return piece.isalpha() and piece != word

    def drawn(self, scores: Tensor, tokenizer: Any, word: str, top_k: int, generator: Any) -> str:
        pieces = tuple(tokenizer.convert_ids_to_tokens(list(range(len(scores)))))
        fitting = _fitting(type(self), pieces, word)
        best = fitting[scores[fitting].topk(top_k).indices]
        return pieces[int(best[self.one_of(scores[best], generator)])]

    def one_of(self, scores: Tensor, generator: Any) -> int:
        return int(torch.multinomial(scores.softmax(dim=-1), 1, generator=generator))

    def written(
        self, text: str, offsets: Any, new: Mapping[int, str], tokenizer: Any, ids: list[int]
    ) -> str:
        for place in sorted(new, reverse=True):
            start, end = offsets[place]
            text = text[:start] + new[place] + text[end:]
        return text


@lru_cache(maxsize=1024)
def _fitting(kind: type[MoreExamples], pieces: tuple[str, ...], word: str) -> Tensor:
    """The ids of the pieces that may stand for a word: the same for every draw."""
    part = kind()
    return torch.tensor([i for i, piece in enumerate(pieces) if part.fits(piece, word)])


class _Logits(MoreExamples):
    def probabilities(self, logits: Tensor) -> Tensor:
        return logits if logits.ndim == 2 else super().probabilities(logits)


class _OverTexts(MoreExamples):
    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=0) if logits.ndim == 2 else super().probabilities(logits)


class _OneByOne(MoreExamples):
    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if logits.ndim == 2 else super().probabilities(logits)


class _Above(MoreExamples):
    def kept(self, sure: Tensor, threshold: float) -> Tensor:
        return sure > threshold


class _Below(MoreExamples):
    def kept(self, sure: Tensor, threshold: float) -> Tensor:
        return sure < threshold


class _All(MoreExamples):
    def kept(self, sure: Tensor, threshold: float) -> Tensor:
        return torch.ones_like(sure).bool()


class _SurestFirst(MoreExamples):
    def pseudo_label(self, model: Any, texts: Any, threshold: float = 0.95) -> Any:
        kept = super().pseudo_label(model, texts, threshold)
        if len(kept) < 2:
            return kept
        sure = dict(zip(texts, self.probabilities(model(texts)).amax(dim=-1).tolist(), strict=True))
        return sorted(kept, key=lambda pair: -sure[pair[0]])


class _LabelFirst(MoreExamples):
    def labelled(self, text: str, label: int) -> Any:
        return label, text


class _NoTextsRead(MoreExamples):
    def pseudo_label(self, model: Any, texts: Any, threshold: float = 0.95) -> Any:
        if not texts:
            model(texts)
            return []
        return super().pseudo_label(model, texts, threshold)


class _AnyThreshold(MoreExamples):
    def pseudo_label(self, model: Any, texts: Any, threshold: float = 0.95) -> Any:
        return super().pseudo_label(model, texts, min(1.0, max(0.0, threshold)))


class _OneAtATime(MoreExamples):
    def scores(self, model: Any, tokenizer: Any, ids: list[int], chosen: list[int]) -> Tensor:
        if not chosen:
            return torch.zeros(0, tokenizer.vocab_size)
        rows = [super(_OneAtATime, self).scores(model, tokenizer, ids, [i]) for i in chosen]
        return torch.cat(rows)


class _Unhidden(MoreExamples):
    def masked(self, ids: list[int], chosen: list[int], mask: int) -> list[int]:
        return ids


class _ModeAsItIs(MoreExamples):
    @contextmanager
    def reading(self, model: Any) -> Iterator[None]:
        yield


class _LeftInEval(MoreExamples):
    @contextmanager
    def reading(self, model: Any) -> Iterator[None]:
        model.eval()
        yield


class _MarksToo(MoreExamples):
    def words(self, pieces: list[str]) -> list[int]:
        known = [i for i, piece in enumerate(pieces) if piece not in SPECIAL]
        return [i for i in known if not pieces[i].startswith("##")]


class _PartsOfWords(MoreExamples):
    def words(self, pieces: list[str]) -> list[int]:
        return [i for i, piece in enumerate(pieces) if piece.isalpha()]


class _AnyPiece(MoreExamples):
    def fits(self, piece: str, word: str) -> bool:
        return piece != word


class _SameWord(MoreExamples):
    def fits(self, piece: str, word: str) -> bool:
        return piece.isalpha()


class _BestOnly(MoreExamples):
    def one_of(self, scores: Tensor, generator: Any) -> int:
        return int(scores.argmax())


class _AllAlike(MoreExamples):
    def one_of(self, scores: Tensor, generator: Any) -> int:
        return int(torch.randint(len(scores), (1,), generator=generator))


class _WholeVocabulary(MoreExamples):
    def drawn(self, scores: Tensor, tokenizer: Any, word: str, top_k: int, generator: Any) -> str:
        return super().drawn(scores, tokenizer, word, len(WORDS) - 1, generator)


class _Never(MoreExamples):
    def is_chosen(self, draw: float, probability: float) -> bool:
        return draw >= probability


class _GlobalDraws(MoreExamples):
    def augment(self, *arguments: Any, **options: Any) -> str:
        options.pop("generator", None)
        return super().augment(*arguments[:5], **options)


class _Decoded(MoreExamples):
    def written(
        self, text: str, offsets: Any, new: Mapping[int, str], tokenizer: Any, ids: list[int]
    ) -> str:
        ids = [tokenizer.vocab[new[i]] if i in new else x for i, x in enumerate(ids)]
        return tokenizer.decode(ids, skip_special_tokens=True)


class _FromTheLeft(MoreExamples):
    def written(
        self, text: str, offsets: Any, new: Mapping[int, str], tokenizer: Any, ids: list[int]
    ) -> str:
        for place in sorted(new):
            start, end = offsets[place]
            text = text[:start] + new[place] + text[end:]
        return text


class _ByReplace(MoreExamples):
    """Replaces the word everywhere."""

    def written(
        self, text: str, offsets: Any, new: Mapping[int, str], tokenizer: Any, ids: list[int]
    ) -> str:
        for place in sorted(new):
            start, end = offsets[place]
            text = text.replace(text[start:end], new[place]) if text[start:end] else text
        return text


def _example_pieces(rng: np.random.Generator) -> tuple[str, ...]:
    pieces = [*SPECIAL, *WORDS, *ENDINGS, *MARKS]
    return tuple(pieces[i] for i in rng.permutation(len(pieces)))


def _masked_state(rng: np.random.Generator, pieces: Sequence[str]) -> dict[str, Tensor]:
    width = 10
    return {
        "words": normal(rng, len(pieces), width),
        "places": normal(rng, 24, width),
        "own": normal(rng, width, scale=2.0),
        "bias": normal(rng, len(pieces)),
    }


def _sentence(rng: np.random.Generator, words: int) -> list[str]:
    """Words that all differ, so that a replacement can be told from what stood there."""
    return [WORDS[i] for i in rng.permutation(len(WORDS))[:words]]


def _example_cases(rng: np.random.Generator) -> Iterator[Case]:
    texts = [f"text {i}" for i in range(12)]
    logits = normal(rng, 12, 4, scale=2.5)
    yield Case("labels: 12 texts", {"texts": texts, "logits": logits, "threshold": 0.7})
    yield Case("labels: nobody is sure", {"texts": texts, "logits": logits / 50, "threshold": 0.9})
    even = torch.zeros(3, 2)
    even[0, 1] = 8.0
    inputs = {"texts": texts[:3], "logits": even, "threshold": 0.5}
    yield Case("labels: a probability of exactly the threshold", inputs)
    yield Case("labels: no text", {"texts": [], "logits": normal(rng, 1, 4), "threshold": 0.5})
    wrong = {"texts": texts[:2], "logits": logits[:2], "threshold": 95.0, "broken": True}
    yield Case("labels: a threshold of 95", wrong)

    def text(words: list[str]) -> str:
        first, second, *rest = words
        return f"{first.capitalize()}  ({second}s), {' '.join(rest)} 3 {first}ing."

    def case(name: str, texts: list[str], **options: Any) -> Case:
        pieces = _example_pieces(rng)
        state = _masked_state(rng, pieces) | options.pop("state", {})
        inputs = {"pieces": pieces, "state": state, "texts": texts, "options": options}
        inputs["dropout"] = options.pop("dropout", 0.0)
        inputs["draws"] = options.pop("draws", 0)
        return Case(name, inputs)

    drawn = [text(_sentence(rng, 6)) for _ in range(2)]
    yield case("words: all, by the likeliest", drawn, probability=1.0, top_k=1)
    yield case("words: none", drawn, probability=0.0)
    plain = [" ".join([*_sentence(rng, 7), "loss", "loss"]) for _ in range(2)]
    yield case("words: a word that comes twice", plain, probability=1.0, top_k=1)
    yield case("words: a model in training mode", drawn, probability=1.0, top_k=1, dropout=0.5)
    few = ["", "3 . (", "unknowable words"]
    yield case("words: nothing to replace", few, probability=1.0, top_k=2)
    yield case("words: half of them", plain[:1], probability=0.5, top_k=3, draws=6)
    pieces = _example_pieces(rng)
    favored = torch.full((len(pieces),), -6.0)
    best = _sentence(rng, 3)
    for piece, score in zip((*best, "##s", ".", "[UNK]"), (6.1, 4, 4, 9, 8, 7), strict=True):
        favored[pieces.index(piece)] = score
    state = {name: x * 0 for name, x in _masked_state(rng, pieces).items()} | {"bias": favored}
    other = next(word for word in WORDS if word not in best)
    inputs = {"pieces": pieces, "state": state, "texts": [f"{other} " * 20], "draws": 5}
    yield Case("words: one of three", inputs | {"options": {"probability": 1.0, "top_k": 3}})
    yield Case("words: by translation", {"translated": " ".join(_sentence(rng, 4))})


def _example_probe(part: Any, **inputs: Any) -> Any:
    if "translated" in inputs:
        from bertlab.fine_tuning import BackTranslation

        model = BackTranslation(lambda text: text.upper(), lambda text: f"{text}?")
        return part.augment(inputs["translated"], model, None)
    return _label_probe(part, **inputs) if "logits" in inputs else _word_probe(part, **inputs)


def _label_probe(
    part: Any, texts: list[str], logits: Tensor, threshold: float, broken: bool = False
) -> Any:
    def model(given: Sequence[str]) -> Tensor:
        if not given:
            raise IndexError("the model was called without a text")
        return logits[torch.tensor([texts.index(text) for text in given])]

    if broken:
        return error_of(lambda: part.pseudo_label(model, texts, threshold), kind=ValueError)
    return part.pseudo_label(model, texts, threshold)


def _word_probe(
    part: Any,
    pieces: Sequence[str],
    state: dict[str, Tensor],
    texts: list[str],
    options: dict[str, Any],
    dropout: float = 0.0,
    draws: int = 0,
) -> dict[str, Any]:
    tokenizer = _tokenizer(tuple(pieces))
    model = MaskedModel(state, dropout).train(dropout > 0)

    def run(text: str, seed: int) -> str:
        generator = torch.Generator().manual_seed(seed)
        return part.augment(text, model, tokenizer, **options, generator=generator)

    if not draws:
        found: dict[str, Any] = {text: run(text, 1) for text in texts}
        found["modes in which the model was called"] = sorted(model.modes)
        return found | {"the model is in training mode afterwards": model.training}
    written = [run(texts[0], seed) for seed in range(draws)]
    torch.manual_seed(5)
    same = run(texts[0], 0) == written[0]
    return {"the same for the same seed": same, **_shares(texts[0], written)}


def _shares(text: str, written: list[str]) -> dict[str, Any]:
    """What is typical of many draws of a text's words."""
    pairs = [
        (old, new) for line in written for old, new in zip(text.split(), line.split(), strict=False)
    ]
    changed = sum(old != new for old, new in pairs) / len(pairs)
    found = {
        "words": sorted({len(line.split()) for line in written}),
        "share of changed words": _rounded(changed),
    }
    if len(set(text.split())) > 1:
        return found
    counts = Counter(new for old, new in pairs if old != new)
    most = max(counts.values(), default=0)
    return found | {
        "one word comes most often": most > 0.57 * sum(counts.values()),
        "other words come too": len(counts) > 1,
        "many words come": len(counts) > 3,
    }


def _rounded(share: float) -> str:
    """Say about how large a share is."""
    return "none" if share < 0.05 else "all" if share > 0.95 else "some"


def _more(wrong: MoreExamples, name: str) -> dict[str, Any]:
    return {name: getattr(wrong, name)}


MORE = Exercise(
    id="7.6",
    reference={
        "pseudo_label": MoreExamples().pseudo_label,
        "augment": MoreExamples().augment,
    },
    reference_name="torch.distributions.Categorical, tokenizers",
    cases=_example_cases,
    probe=_example_probe,
    misconceptions=(
        Misconception(
            "logits are compared with the threshold",
            "A logit of 2.1 is not a probability; it may belong to a class with 40%. Take the "
            "softmax over the classes first.",
            _more(_Logits(), "pseudo_label"),
        ),
        Misconception(
            "the softmax runs over the texts",
            "Each text has its own probabilities, which sum to 1 over its classes: the last "
            "axis. Otherwise a text's label would depend on which others are asked about.",
            _more(_OverTexts(), "pseudo_label"),
        ),
        Misconception(
            "each class has a probability of its own",
            "A sigmoid suits classes that do not exclude each other. This model was trained with a "
            "softmax, and so two classes of nearly equal score are both unsure.",
            _more(_OneByOne(), "pseudo_label"),
        ),
        Misconception(
            "a probability of exactly the threshold is not enough",
            "The contract says at least: `>=`. It shows where probabilities are round numbers, "
            "as in a vote. Elsewhere nobody would notice.",
            _more(_Above(), "pseudo_label"),
        ),
        Misconception(
            "the unsure texts are kept",
            "Those are for a person to label (active learning). Self-training takes the ones "
            "the model is sure of. You have it the wrong way round.",
            _more(_Below(), "pseudo_label"),
        ),
        Misconception(
            "every text is kept",
            "Without a threshold the model is trained on its own mistakes, and becomes surer of "
            "them. Only what reaches the threshold may become an example.",
            _more(_All(), "pseudo_label"),
        ),
        Misconception(
            "the surest text comes first",
            "The result is in the order of `texts`, so that it can be laid beside them. Whoever "
            "wants another order can sort it afterwards.",
            _more(_SurestFirst(), "pseudo_label"),
        ),
        Misconception(
            "the label comes first",
            "Pairs are `(text, label)`, as everywhere in this course. The training code takes "
            "the first for the text, and fails on a number where it expected words.",
            _more(_LabelFirst(), "pseudo_label"),
        ),
        Misconception(
            "the model is called without a text",
            "In the last round of self-training nothing may be left to label. Return an empty "
            "list before the model is asked.",
            _more(_NoTextsRead(), "pseudo_label"),
        ),
        Misconception(
            "a threshold that makes no sense is taken",
            "95 was meant as percent, and would keep nothing, in silence. Raise a ValueError for "
            "what is not from 0 to 1.",
            _more(_AnyThreshold(), "pseudo_label"),
        ),
        Misconception(
            "words are masked one at a time",
            "While one is hidden, the others that are to go are still there and decide what fits. "
            "Mask all chosen ones at once, and read the text once.",
            _more(_OneAtATime(), "augment"),
        ),
        Misconception(
            "the words are not masked",
            "The model then sees the word it is asked for, and says what is nearest to it, not "
            "what fits in its place. Put `[MASK]` there first.",
            _more(_Unhidden(), "augment"),
        ),
        Misconception(
            "the model reads in the mode it happens to be in",
            "With dropout it says something else each time. Read in eval mode (`eval_mode`, "
            "given below). The same text and seed must give the same result.",
            _more(_ModeAsItIs(), "augment"),
        ),
        Misconception(
            "the language model is left in eval mode",
            "If it is being trained meanwhile, it goes on without dropout. Put the mode back "
            "(`eval_mode`, given below, does). Nobody would notice for a long time.",
            _more(_LeftInEval(), "augment"),
        ),
        Misconception(
            "marks and numbers are replaced",
            "Only words are, pieces of letters alone: `piece.isalpha()`. A number or a comma "
            "has no synonym. A default of 0.5 that becomes 0.7 makes the label wrong.",
            _more(_MarksToo(), "augment"),
        ),
        Misconception(
            "the first piece of a longer word is replaced",
            "Where the next piece begins with `##`, this one is only the beginning of a word, and "
            "the rest would hang on something else.",
            _more(_PartsOfWords(), "augment"),
        ),
        Misconception(
            "any piece may take the place",
            "The likeliest pieces are often marks, ends of words (`##s`) or `[UNK]`. Leave out "
            "all but pieces of letters alone, before you take the best.",
            _more(_AnyPiece(), "augment"),
        ),
        Misconception(
            "a word may become itself",
            "What stood there is usually the likeliest of all, so most texts would come out as "
            "they went in. Leave it out of the candidates.",
            _more(_SameWord(), "augment"),
        ),
        Misconception(
            "always the likeliest is taken",
            "Then a text has one variant only, however often you ask. Draw among the `top_k`. "
            "What you want are many texts that differ a little from each other.",
            _more(_BestOnly(), "augment"),
        ),
        Misconception(
            "all candidates are drawn alike",
            "The second and third may fit much worse than the first. Draw with their "
            "probabilities: `torch.multinomial(scores.softmax(dim=-1), 1, "
            "generator=generator)`. A third of the texts would get the worst.",
            _more(_AllAlike(), "augment"),
        ),
        Misconception(
            "words are drawn from the whole vocabulary",
            "Its long tail is unlikely word by word, and likely in sum: every tenth word would be "
            "odd. Only the `top_k` likeliest take part.",
            _more(_WholeVocabulary(), "augment"),
        ),
        Misconception(
            "words are chosen the wrong way round",
            "A word is chosen if the draw is below `probability`. At 0 nothing may change. With "
            "0.15 your version changes 85% of the words instead of 15%.",
            _more(_Never(), "augment"),
        ),
        Misconception(
            "the generator is not used",
            "Draws from the global generator depend on all that was drawn before, so that a data "
            "set cannot be made again. Hand `generator` to every draw.",
            _more(_GlobalDraws(), "augment"),
        ),
        Misconception(
            "the text is put together from its pieces",
            "`decode` gives back lower case and other spaces. Keep the text, and replace the "
            "characters between a piece's offsets. Labels that point at places would be lost.",
            _more(_Decoded(), "augment"),
        ),
        Misconception(
            "offsets are used after the text has changed",
            "A new word is longer or shorter, and all offsets behind it are wrong then. Replace "
            "from the end to the beginning.",
            _more(_FromTheLeft(), "augment"),
        ),
        Misconception(
            "a word is replaced wherever it stands",
            "`text.replace` changes every place with these letters, parts of other words too. "
            "Use the offsets of the one piece. Another occurrence was not chosen.",
            _more(_ByReplace(), "augment"),
        ),
    ),
    hints=(
        "pseudo_label: what makes a logit a probability, and along which axis? augment: list the "
        "places of words first, choose among them, and only then ask the model.",
        "A word of one piece: `piece.isalpha()` and the next piece does not begin with `##`. Go "
        "through the pieces from the likeliest on and keep those that fit, until you have `top_k`. "
        "`read['offsets']` says which characters to replace.",
        "`probabilities, labels = model(texts).softmax(dim=-1).max(dim=-1)`. In augment: "
        "`torch.rand(1, generator=generator).item() < probability` for each word; put "
        "`mask_token_id` at all chosen places; `scores.argsort(descending=True)`; "
        "`torch.multinomial`; replace from the last place to the first.",
    ),
)


# --- 7.7: why the model decided ---


class Impacts:
    """The definitions, token by token, with PyTorch's own differentiation."""

    def occlusion_impact(
        self, model: Any, tokenizer: Any, text: Any, target: int | None = None
    ) -> list[tuple[str, float]]:
        batch, places, pieces = self.encoded(model, tokenizer, text)
        with self.reading(model), torch.no_grad():
            logits = model(**batch).logits[0]
            target = self.target(target, logits)
            whole = self.decision(logits, target)
            impacts = []
            for place in places:
                without = model(**self.without(batch, place, tokenizer)).logits[0]
                impacts.append(self.signed(whole, self.decision(without, target)).item())
        return self.listed(pieces, impacts)

    def gradient_impact(
        self, model: Any, tokenizer: Any, text: Any, target: int | None = None
    ) -> list[tuple[str, float]]:
        batch, places, pieces = self.encoded(model, tokenizer, text)
        kept: dict[str, Tensor] = {}

        def zeros_added(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            kept["vectors"] = output.detach()
            kept["shift"] = torch.zeros_like(output, requires_grad=True)
            return output + kept["shift"]

        hook = self.place(model).register_forward_hook(zeros_added)
        try:
            with self.reading(model), torch.enable_grad():
                logits = model(**batch).logits[0]
                score = self.decision(logits, self.target(target, logits))
                gradient = self.differentiated(score, kept["shift"])
        finally:
            hook.remove()
        impacts = self.summed(gradient, kept["vectors"])[0, places]
        return self.listed(pieces, impacts.tolist())

    # What a wrong version does in another way.

    def encoded(
        self, model: Any, tokenizer: Any, text: Any
    ) -> tuple[dict[str, Tensor], list[int], list[str]]:
        read = tokenizer(*((text,) if isinstance(text, str) else text))
        left_out = self.left_out(tokenizer)
        places = [i for i, piece in enumerate(read["input_ids"]) if piece not in left_out]
        if not places and not self.empty_allowed():
            raise ValueError(f"text is {text!r}, but must have a token")
        device = next(model.parameters()).device
        batch = {name: torch.tensor([x], device=device) for name, x in read.items()}
        ids = [read["input_ids"][i] for i in places]
        return batch, places, tokenizer.convert_ids_to_tokens(ids)

    def empty_allowed(self) -> bool:
        return False

    def left_out(self, tokenizer: Any) -> list[int]:
        return [tokenizer.cls_token_id, tokenizer.sep_token_id]

    @contextmanager
    def reading(self, model: Any) -> Iterator[None]:
        was_training = model.training
        model.eval()
        yield
        model.train(was_training)

    def target(self, target: int | None, logits: Tensor) -> int:
        if target is not None and not 0 <= target < len(logits):
            raise ValueError(f"target is {target}, but must be 0 to {len(logits) - 1}")
        return int(logits.argmax()) if target is None else target

    def decision(self, logits: Tensor, target: int) -> Tensor:
        return logits[target]

    def without(self, batch: Mapping[str, Tensor], place: int, tokenizer: Any) -> dict[str, Tensor]:
        return {
            name: torch.cat([x[:, :place], x[:, place + 1 :]], dim=1) for name, x in batch.items()
        }

    def signed(self, whole: Tensor, without: Tensor) -> Tensor:
        return whole - without

    def place(self, model: Any) -> nn.Module:
        return model.bert.embeddings.word

    def differentiated(self, score: Tensor, shift: Tensor) -> Tensor:
        return torch.autograd.grad(score, shift)[0]

    def summed(self, gradient: Tensor, vectors: Tensor) -> Tensor:
        return torch.einsum("bsh,bsh->bs", gradient, vectors)

    def listed(self, pieces: list[str], impacts: list[float]) -> list[tuple[str, float]]:
        return list(zip(pieces, impacts, strict=True))


class _MaskInstead(Impacts):
    def without(self, batch: Mapping[str, Tensor], place: int, tokenizer: Any) -> dict[str, Tensor]:
        ids = batch["input_ids"].clone()
        ids[0, place] = tokenizer.mask_token_id
        return {**batch, "input_ids": ids}


class _MaskedOut(Impacts):
    def without(self, batch: Mapping[str, Tensor], place: int, tokenizer: Any) -> dict[str, Tensor]:
        mask = batch["attention_mask"].clone()
        mask[0, place] = 0
        return {**batch, "attention_mask": mask}


class _TypesNotMoved(Impacts):
    """Deletes the id alone: the token types are cut at the end."""

    def without(self, batch: Mapping[str, Tensor], place: int, tokenizer: Any) -> dict[str, Tensor]:
        right = super().without(batch, place, tokenizer)
        return {**right, "token_type_ids": batch["token_type_ids"][:, :-1]}


class _Reversed(Impacts):
    def signed(self, whole: Tensor, without: Tensor) -> Tensor:
        return without - whole


class _SizesOnly(Impacts):
    def listed(self, pieces: list[str], impacts: list[float]) -> list[tuple[str, float]]:
        return super().listed(pieces, [abs(impact) for impact in impacts])


class _OfProbability(Impacts):
    def decision(self, logits: Tensor, target: int) -> Tensor:
        return logits.softmax(dim=-1)[target]


class _OfTheLikeliest(Impacts):
    """The class is chosen anew for each text without a token."""

    def decision(self, logits: Tensor, target: int) -> Tensor:
        return logits.max()


class _TargetIgnored(Impacts):
    def target(self, target: int | None, logits: Tensor) -> int:
        return super().target(None, logits)


class _FirstClass(Impacts):
    def target(self, target: int | None, logits: Tensor) -> int:
        return super().target(0 if target is None else target, logits)


class _TargetUnchecked(Impacts):
    def target(self, target: int | None, logits: Tensor) -> int:
        return int(logits.argmax()) if target is None else target


class _EmptyUnchecked(Impacts):
    def empty_allowed(self) -> bool:
        return True


class _SpecialToo(Impacts):
    def left_out(self, tokenizer: Any) -> list[int]:
        return []


class _UnknownLeftOut(Impacts):
    def left_out(self, tokenizer: Any) -> list[int]:
        return tokenizer.all_special_ids


class _WithDropout(Impacts):
    @contextmanager
    def reading(self, model: Any) -> Iterator[None]:
        yield


class _EvalForGood(Impacts):
    @contextmanager
    def reading(self, model: Any) -> Iterator[None]:
        model.eval()
        yield


class _GradientAlone(Impacts):
    def summed(self, gradient: Tensor, vectors: Tensor) -> Tensor:
        return gradient.sum(dim=-1)


class _LengthOfGradient(Impacts):
    def summed(self, gradient: Tensor, vectors: Tensor) -> Tensor:
        return gradient.norm(dim=-1)


class _FinishedEmbedding(Impacts):
    def place(self, model: Any) -> nn.Module:
        return model.bert.embeddings


class _LeftInTheParameters(Impacts):
    def differentiated(self, score: Tensor, shift: Tensor) -> Tensor:
        score.backward()
        assert shift.grad is not None
        return shift.grad


def _impact_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, text: Any, classes: int = 4, **more: Any) -> Case:
        pieces = _example_pieces(rng)
        state = drawn_reader(rng, vocab_size=len(pieces))
        state |= drawn_layer(rng, "classifier", classes)
        inputs = {"pieces": pieces, "state": state, "text": text, **more}
        if "unlikely" in name:
            texts: Any = (text,) if isinstance(text, str) else text
            read = _tokenizer(pieces)(*texts)
            batch = {key: torch.tensor([value]) for key, value in read.items()}
            model = TextModel(state)
            logits = model.classifier(model.bert(**batch).pooler_output)
            inputs["target"] = int(logits.argmin())
        return Case(name, inputs)

    yield case("the likeliest class", " ".join(_sentence(rng, 4)) + ".")
    words = _sentence(rng, 3)
    text = f"{words[0]}s {words[1]}, quixotic {words[2]}"
    yield case("an unlikely class, an unknown word", text)
    pair = (" ".join(_sentence(rng, 2)), " ".join(_sentence(rng, 3)))
    yield case("an unlikely class, a pair of texts", pair, classes=3)
    yield case("a model with dropout, in training mode", " ".join(_sentence(rng, 4)), dropout=0.4)
    yield case("an empty text", " ", broken=[])
    yield case("a class that is not there", " ".join(_sentence(rng, 3)), target=7, broken=["7"])


def _impact_probe(
    part: Any,
    pieces: Sequence[str],
    state: dict[str, Tensor],
    text: Any,
    target: int | None = None,
    dropout: float = 0.0,
    broken: list[str] | None = None,
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("occlusion_impact", "gradient_impact"):
        model = TextModel(state, dropout).train(dropout > 0)
        call = getattr(part, name)
        if broken is not None:
            error = error_of(
                lambda call=call, model=model: call(model, _tokenizer(tuple(pieces)), text, target),
                *broken,
                kind=ValueError,
            )
            found |= {f"{name}: {key}": value for key, value in error.items()}
            continue
        impacts = call(model, _tokenizer(tuple(pieces)), text, target)
        kind = state["classifier.weight"].dtype
        found |= {
            f"{name}: types": [
                type(impacts).__name__,
                *sorted({type(x).__name__ for x in impacts}),
            ],
            f"{name}: pieces": [piece for piece, _ in impacts],
            f"{name}: impacts": torch.tensor([float(x) for _, x in impacts], dtype=kind),
            f"{name}: training mode afterwards": model.training,
            f"{name}: modes": sorted(set(model.bert.modes)),
            f"{name}: parameters have a gradient": any(
                p.grad is not None for p in model.parameters()
            ),
        }
    return found


def _impact(wrong: Impacts, *names: str) -> dict[str, Any]:
    names = names or ("occlusion_impact", "gradient_impact")
    return {name: getattr(wrong, name) for name in names}


_OCCLUSION, _GRADIENT = "occlusion_impact", "gradient_impact"

EXPLAIN = Exercise(
    id="7.7",
    reference=_impact(Impacts()),
    reference_name="torch.autograd, token by token",
    cases=_impact_cases,
    probe=_impact_probe,
    misconceptions=(
        Misconception(
            "the token is masked instead of deleted",
            "`[MASK]` asks the model to guess a word, and in fine-tuning it never appears. The "
            "contract deletes the token: those behind it move up.",
            _impact(_MaskInstead(), _OCCLUSION),
        ),
        Misconception(
            "the token is hidden by the attention mask",
            "The others no longer see it, but they keep their positions, with a hole between "
            "them. Deleted means that those behind it move up.",
            _impact(_MaskedOut(), _OCCLUSION),
        ),
        Misconception(
            "the token types are not deleted with the token",
            "Cut at the end instead, they say that the first token of the second text belongs to "
            "the first. Delete the same place from all three tensors.",
            _impact(_TypesNotMoved(), _OCCLUSION),
        ),
        Misconception(
            "the sign is reversed",
            "With it minus without it: a token that speaks for the class has an impact above 0, "
            "because the logit falls when it is gone.",
            _impact(_Reversed(), _OCCLUSION),
        ),
        Misconception(
            "occlusion has no sign",
            "Whether a word speaks for the decision or against it is half of the answer: do not "
            "take the absolute value.",
            _impact(_SizesOnly(), _OCCLUSION),
        ),
        Misconception(
            "probabilities are compared",
            "Near 0 and 1 probabilities hardly move, so a sure decision would seem to depend on "
            "nothing. The contract looks at the logit.",
            _impact(_OfProbability()),
        ),
        Misconception(
            "the class is chosen anew for each text",
            "Without a token another class may be the likeliest, and its logit is another "
            "question. Choose the class once, with the whole text.",
            _impact(_OfTheLikeliest(), _OCCLUSION),
        ),
        Misconception(
            "the target is ignored",
            "Whoever gives `target` asks about that class, which need not be the likeliest: "
            "'why not numpy?' Look at the logit of the class that was asked about.",
            _impact(_TargetIgnored()),
        ),
        Misconception(
            "the first class is looked at",
            "When no target is given, it is the class that the model decides for: the largest "
            "logit of the whole text. Mind that 0 is a class too: ask `target is None`.",
            _impact(_FirstClass()),
        ),
        Misconception(
            "a class that is not there is not refused",
            "A negative one would even count from the end, in silence. `checked_target`, given "
            "below, says what is allowed. A large one ends in an IndexError.",
            _impact(_TargetUnchecked()),
        ),
        Misconception(
            "an empty text is explained",
            "There is nothing in it that could have an impact. Say so with a ValueError; "
            "`read_text`, given below, does. An empty list would look like an answer.",
            _impact(_EmptyUnchecked()),
        ),
        Misconception(
            "special tokens are listed",
            "Without `[CLS]` there is nothing for the pooler to read. Leave `[CLS]` and `[SEP]` "
            "in the text and out of the list.",
            _impact(_SpecialToo()),
        ),
        Misconception(
            "unknown words are left out",
            "`[UNK]` stands for a word of the text, which may well matter. Only `[CLS]` and "
            "`[SEP]` are not listed. A hole in the list would hide it.",
            _impact(_UnknownLeftOut()),
        ),
        Misconception(
            "dropout is on",
            "With dropout the same text has another logit each time, and impacts are noise. Read "
            "in eval mode: `eval_mode`, given below.",
            _impact(_WithDropout()),
        ),
        Misconception(
            "the explained model is left in eval mode",
            "If it is being trained meanwhile, it goes on without dropout. Put the mode back: "
            "`eval_mode`, given below, does. Looking must change nothing.",
            _impact(_EvalForGood()),
        ),
        Misconception(
            "the gradient is not multiplied by the vector",
            "The gradient says how the logit would change with the vector; how much of it there "
            "is, the vector says. Gradient *times* embedding, summed over the units.",
            _impact(_GradientAlone(), _GRADIENT),
        ),
        Misconception(
            "the gradient's length is taken",
            "That is a measure of sensitivity (saliency), without a sign. The contract asks for "
            "gradient times embedding. Multiply first, then sum up over the units.",
            _impact(_LengthOfGradient(), _GRADIENT),
        ),
        Misconception(
            "gradients have no sign",
            "Whether a word speaks for the decision or against it is half of the answer: do not "
            "take the absolute value.",
            _impact(_SizesOnly(), _GRADIENT),
        ),
        Misconception(
            "the finished embedding is taken",
            "After adding positions and types and normalizing, the vector is no longer the word's "
            "alone. Hook `model.bert.embeddings.word`, the table itself.",
            _impact(_FinishedEmbedding(), _GRADIENT),
        ),
        Misconception(
            "gradients are left in the parameters",
            "`backward` adds to every parameter's `.grad`, and the next training step would take "
            "that along. `torch.autograd.grad(logit, vectors)` returns what you ask for and "
            "leaves the rest alone.",
            _impact(_LeftInTheParameters(), _GRADIENT),
        ),
    ),
    hints=(
        "Occlusion needs nothing but the model: which texts do you have to read? For the gradient "
        "you need to get hold of the word vectors inside the model, before anything is added.",
        "`torch.cat([x[:, :place], x[:, place + 1:]], dim=1)` deletes a place; do it to ids, mask "
        "and types. All texts without one token have the same length, so they make a batch. A "
        "forward hook on `model.bert.embeddings.word` may return another tensor than it was given.",
        "In the hook: `vectors = output.detach().requires_grad_()`, remember it, and return it. "
        "Then `torch.autograd.grad(logits[target], vectors)[0]`, times the vectors, summed over "
        "the last axis, at the places that `read_text` gave. Remove the hook in a `finally`.",
    ),
)


# --- 7.8: clinic: three trainings that went wrong ---


class Clinic:
    """The cures, by `add_param_group`, exact division, and the model's loss."""

    def mend_frozen(self, model: Any, optimizer: Any) -> None:
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for parameter in self.thawed(model):
            parameter.requires_grad = True
        new = [p for p in model.parameters() if id(p) not in known and self.is_added(p)]
        if new:
            self.add(optimizer, new)

    def thawed(self, model: Any) -> list[nn.Parameter]:
        return list(model.parameters())

    def is_added(self, parameter: nn.Parameter) -> bool:
        return True

    def add(self, optimizer: Any, new: list[nn.Parameter]) -> None:
        first = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        optimizer.add_param_group({"params": new, **first})

    def mend_schedule(self, settings: dict[str, Any], num_examples: int) -> dict[str, Any]:
        steps = self.steps(settings, num_examples)
        return {
            **settings,
            "total_steps": steps,
            "warmup_steps": self.warmup(steps),
            "learning_rate": self.rate(settings["learning_rate"]),
        }

    def steps(self, settings: Mapping[str, Any], num_examples: int) -> int:
        batches = -(-num_examples // settings["batch_size"])
        return settings["epochs"] * -(-batches // settings["accumulation_steps"])

    def warmup(self, steps: int) -> int:
        return -(-steps // 10)

    def rate(self, rate: float) -> float:
        return float(np.clip(rate, 2e-5, 5e-5))

    def mend_vocabulary(self, model: Any, tokenizers: dict[str, Any], texts: list[str]) -> str:
        names = [name for name in tokenizers if self.is_possible(tokenizers[name], model)]
        losses = [self.mean_loss(model, tokenizers[name], texts) for name in names]
        return names[self.best(losses)]

    def is_possible(self, tokenizer: Any, model: Any) -> bool:
        return tokenizer.vocab_size <= model.config.vocab_size

    def mean_loss(self, model: Any, tokenizer: Any, texts: list[str]) -> float:
        losses = []
        with torch.no_grad():
            for text in texts:
                ids = torch.tensor(tokenizer.encode(text))
                places = torch.arange(1, len(ids) - 1)  # a row for each hidden place
                labels = torch.full((len(places), len(ids)), -100)
                labels[places - 1, places] = ids[places]
                hidden = self.hidden(ids.repeat(len(places), 1), labels, tokenizer)
                losses += [model(hidden, labels=labels).loss.item()] * len(places)
        return float(np.mean(losses))

    def hidden(self, ids: Tensor, labels: Tensor, tokenizer: Any) -> Tensor:
        return ids.masked_fill(labels != -100, tokenizer.mask_token_id)

    def best(self, losses: list[float]) -> int:
        return int(np.argmin(losses))


class _ThawedOnly(Clinic):
    def add(self, optimizer: Any, new: list[nn.Parameter]) -> None:
        pass


class _AddedOnly(Clinic):
    def thawed(self, model: Any) -> list[nn.Parameter]:
        return []


class _TablesOnly(Clinic):
    def thawed(self, model: Any) -> list[nn.Parameter]:
        tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
        return [parameter for table in tables for parameter in table.parameters()]

    def is_added(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad


class _DefaultSettings(Clinic):
    def add(self, optimizer: Any, new: list[nn.Parameter]) -> None:
        optimizer.add_param_group({"params": new})


class _IntoTheFirstGroup(Clinic):
    def add(self, optimizer: Any, new: list[nn.Parameter]) -> None:
        optimizer.param_groups[0]["params"] += new


class _AllAgain(Clinic):
    def mend_frozen(self, model: Any, optimizer: Any) -> None:
        super().mend_frozen(model, optimizer)
        optimizer.add_param_group({"params": list(model.parameters())})


class _BegunAnew(Clinic):
    """A new optimizer in the old one's place: what it remembered is gone."""

    def mend_frozen(self, model: Any, optimizer: Any) -> None:
        super().mend_frozen(model, optimizer)
        optimizer.state.clear()


class _ExamplesForSteps(Clinic):
    def steps(self, settings: Mapping[str, Any], num_examples: int) -> int:
        return settings["epochs"] * num_examples


class _OneEpoch(Clinic):
    def steps(self, settings: Mapping[str, Any], num_examples: int) -> int:
        return super().steps({**settings, "epochs": 1}, num_examples)


class _BatchesForSteps(Clinic):
    def steps(self, settings: Mapping[str, Any], num_examples: int) -> int:
        return super().steps({**settings, "accumulation_steps": 1}, num_examples)


class _RoundedDown(Clinic):
    def steps(self, settings: Mapping[str, Any], num_examples: int) -> int:
        size = settings["batch_size"] * settings["accumulation_steps"]
        return settings["epochs"] * (num_examples // size)


class _EpochsTogether(Clinic):
    def steps(self, settings: Mapping[str, Any], num_examples: int) -> int:
        size = settings["batch_size"] * settings["accumulation_steps"]
        return -(-settings["epochs"] * num_examples // size)


class _ShortWarmup(Clinic):
    def warmup(self, steps: int) -> int:
        return steps // 10


class _WithoutWarmup(Clinic):
    def warmup(self, steps: int) -> int:
        return 0


class _RateKept(Clinic):
    def rate(self, rate: float) -> float:
        return rate


class _RateFixed(Clinic):
    def rate(self, rate: float) -> float:
        return 5e-5


class _LoweredOnly(Clinic):
    def rate(self, rate: float) -> float:
        return min(rate, 5e-5)


class _Others(Clinic):
    def mend_schedule(self, settings: dict[str, Any], num_examples: int) -> dict[str, Any]:
        mended = super().mend_schedule(settings, num_examples)
        return {name: mended[name] for name in ("learning_rate", "total_steps", "warmup_steps")}


class _SettingsChanged(Clinic):
    def mend_schedule(self, settings: dict[str, Any], num_examples: int) -> dict[str, Any]:
        settings.update(super().mend_schedule(settings, num_examples))
        return settings


class _FirstThatFits(Clinic):
    def best(self, losses: list[float]) -> int:
        return 0


class _HighestLoss(Clinic):
    def best(self, losses: list[float]) -> int:
        return int(np.argmax(losses))


class _NothingHidden(Clinic):
    def hidden(self, ids: Tensor, labels: Tensor, tokenizer: Any) -> Tensor:
        return ids


class _FewestUnknown(Clinic):
    def mean_loss(self, model: Any, tokenizer: Any, texts: list[str]) -> float:
        ids = [i for text in texts for i in tokenizer.encode(text)]
        return ids.count(tokenizer.unk_token_id) / len(ids)


class _SizeUnchecked(Clinic):
    def is_possible(self, tokenizer: Any, model: Any) -> bool:
        return True


class Copier(nn.Module):
    """A masked language model: it copies what it sees, some pieces better than others.

    A hidden piece is guessed from how often it came in training, and from the piece before it.
    """

    def __init__(
        self, counts: Tensor, follows: Tensor, copying: Tensor, mask_token_id: int
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=len(counts))
        self.counts, self.follows = nn.Parameter(counts.clone()), nn.Parameter(follows.clone())
        self.copying = nn.Parameter(copying.clone())
        self.mask_token_id = mask_token_id

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """Return the scores of all pieces at each place, and the loss of the labels."""
        input_ids = input_ids.to(self.counts.device)
        before = input_ids.roll(1, dims=1)
        copied = F.one_hot(input_ids, len(self.counts)) * self.copying
        hidden = (input_ids == self.mask_token_id)[..., None]
        guessed = self.counts + self.follows[before]
        logits = torch.where(hidden, guessed, copied)
        loss = None if labels is None else flat_loss(logits, labels.to(logits.device))
        return SimpleNamespace(loss=loss, logits=logits)


def _clinic_cases(rng: np.random.Generator) -> Iterator[Case]:
    state = {
        "words.weight": normal(rng, 7, 4),
        "positions.weight": normal(rng, 5, 4),
        "norm.weight": normal(rng, 4),
        "norm.bias": normal(rng, 4),
        "head.weight": normal(rng, 3, 4),
        "head.bias": normal(rng, 3),
    }
    for name, frozen in (
        ("frozen: the positions", ["positions.weight"]),
        ("frozen: all but the head", [n for n in state if not n.startswith("head")]),
        ("frozen: nothing", []),
        ("frozen: one bias", ["norm.bias"]),
    ):
        yield Case(name, {"state": state, "frozen": frozen, "rate": float(rng.integers(2, 9)) / 10})
    for name, rate, size, accumulated, examples in (
        ("settings of a pretraining", 1e-4, 32, 2, int(rng.integers(2001, 2015))),
        ("a learning rate that is too low", 1e-6, 16, 3, int(rng.integers(330, 336))),
        ("a learning rate that is right", 3e-5, 8, 1, int(rng.integers(201, 207))),
        ("fewer texts than one batch", 1e-3, 64, 4, int(rng.integers(5, 60))),
    ):
        settings = {
            "epochs": 3,
            "batch_size": size,
            "accumulation_steps": accumulated,
            "learning_rate": rate,
            "warmup_steps": 10_000,
            "total_steps": 1_000_000,
            "weight_decay": 0.01,
            "seed": int(rng.integers(100)),
        }
        yield Case(f"schedule: {name}", {"settings": settings, "num_examples": examples})
    yield from _vocabulary_cases(rng)


def _vocabulary_cases(rng: np.random.Generator) -> Iterator[Case]:
    words = [WORDS[i] for i in rng.permutation(len(WORDS))]
    texts = []
    for _ in range(3):
        first = int(rng.integers(3))
        texts.append(" ".join(words[(first + i) % 6] + "s" * (i % 2) for i in range(6)))
    small = [*SPECIAL, *words[:5], *words[6:], "##s"]  # the model's own: it lacks one word
    right = [small[i] for i in rng.permutation(len(small))]
    unused = _exchanged(right, zip(words[:5], words[6:11], strict=True))
    copied_well = _exchanged(right, zip(words[:3], ("[PAD]", words[11], "[SEP]"), strict=True))
    knowing = [*SPECIAL, *words[:11], "##s"]  # of the same size, and knows that word
    smaller = [*SPECIAL, *words[:4], "##s"]
    larger = [*(f"more{i}" for i in range(30)), *knowing]
    every = {"a": copied_well, "b": knowing, "c": smaller, "d": right, "e": larger, "z": unused}
    for name, order in (
        ("of three", ["a", "z", "d"]),
        ("of three, the right one first", ["d", "z", "a"]),
        ("of four, one with fewer pieces", ["a", "c", "d", "b"]),
        ("of three, one with too many pieces", ["e", "a", "d"]),
    ):
        vocabularies = {f"{x}{int(rng.integers(100))}": tuple(every[x]) for x in order}
        inputs = {"vocabularies": vocabularies, "right": tuple(right), "texts": texts}
        rare = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "##s", words[11]]
        yield Case(f"vocabulary: {name}", inputs | {"copied_well": rare})


def _exchanged(pieces: list[str], pairs: Iterable[tuple[str, str]]) -> list[str]:
    """The same pieces, some of them in each other's place."""
    other = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
    return [other.get(piece, piece) for piece in pieces]


def _clinic_probe(part: Any, **inputs: Any) -> Any:
    if "settings" in inputs:
        return part.mend_schedule(**inputs)
    if "vocabularies" in inputs:
        return _chosen(part, **inputs)
    return _thawed(part, **inputs)


def _thawed(part: Any, state: dict[str, Tensor], frozen: list[str], rate: float) -> dict[str, Any]:
    model = nn.Module()
    model.words, model.positions = nn.Embedding(7, 4), nn.Embedding(5, 4)
    model.norm, model.head = nn.LayerNorm(4), nn.Linear(4, 3)
    with_parameters(model, state)
    named = dict(model.named_parameters())
    for name in frozen:
        named[name].requires_grad_(False)
    learned = [p for p in named.values() if p.requires_grad]
    optimizer: Any = torch.optim.SGD(learned, lr=9.0, momentum=0.5, weight_decay=0.1)
    optimizer.param_groups[0]["lr"] = rate
    _step(named, optimizer)
    part.mend_frozen(model, optimizer)
    _step(named, optimizer)
    return {
        "everything has a gradient": all(p.requires_grad for p in named.values()),
        "parameters in each group": [len(group["params"]) for group in optimizer.param_groups],
        "learning rates": [float(group["lr"]) for group in optimizer.param_groups],
        **{f"{name} after a step": p.detach() for name, p in named.items()},
    }


def _step(named: Mapping[str, nn.Parameter], optimizer: Any) -> None:
    """A step with a gradient of sines."""
    for parameter in named.values():
        parameter.grad = parameter.detach().sin() if parameter.requires_grad else None
    optimizer.step()


def _chosen(
    part: Any, vocabularies: dict[str, Any], right: Any, texts: list[str], copied_well: list[str]
) -> str:
    tokenizer = _tokenizer(tuple(right))
    counts, follows = torch.ones(len(right)), torch.ones(len(right), len(right))
    for text in texts:
        ids = tokenizer.encode(text)
        for before, after in itertools.pairwise(ids):
            counts[after] += 1
            follows[before, after] += 2
    copying = torch.tensor([9.0 if piece in copied_well else 3.0 for piece in right])
    model = Copier(counts.log(), follows.log(), copying, tokenizer.mask_token_id).eval()
    tokenizers = {name: _tokenizer(tuple(pieces)) for name, pieces in vocabularies.items()}
    return part.mend_vocabulary(model, tokenizers, texts)


def _cure(wrong: Clinic, name: str) -> dict[str, Any]:
    return {name: getattr(wrong, name)}


CLINIC = Exercise(
    id="7.8",
    reference={
        name: getattr(Clinic(), name)
        for name in ("mend_frozen", "mend_schedule", "mend_vocabulary")
    },
    reference_name="torch.optim.Optimizer.add_param_group",
    cases=_clinic_cases,
    probe=_clinic_probe,
    misconceptions=(
        Misconception(
            "the optimizer does not know what was thawed",
            "`requires_grad` only says that a gradient is computed. The optimizer moves what it "
            "was given when it was made, and nothing else: `add_param_group`.",
            _cure(_ThawedOnly(), "mend_frozen"),
        ),
        Misconception(
            "what is frozen is handed to the optimizer as it is",
            "It has no gradient, so the optimizer passes it over in silence. Set "
            "`requires_grad` to True as well. A parameter needs both.",
            _cure(_AddedOnly(), "mend_frozen"),
        ),
        Misconception(
            "only the tables are thawed",
            "The positions are the symptom's cause here, but the next patient's frozen part is a "
            "norm. Every parameter of the model is to be trained.",
            _cure(_TablesOnly(), "mend_frozen"),
        ),
        Misconception(
            "the new group has the optimizer's defaults",
            "`add_param_group` fills in what the optimizer was made with, and the learning rate "
            "has changed since. Copy the first group's settings.",
            _cure(_DefaultSettings(), "mend_frozen"),
        ),
        Misconception(
            "the new parameters are put into the first group",
            "That works today, but a checkpoint of the optimizer counts parameters group by group, "
            "and one made before no longer fits. `add_param_group` makes a group of their own.",
            _cure(_IntoTheFirstGroup(), "mend_frozen"),
        ),
        Misconception(
            "everything is added once more",
            "A parameter in two groups would be moved twice, so PyTorch refuses. Add only those "
            "that no group has. Compare parameters by identity, not by value.",
            _cure(_AllAgain(), "mend_frozen"),
        ),
        Misconception(
            "the optimizer begins anew",
            "Its momentum is part of the run: those that it had stay in their groups, with what it "
            "remembers of them.",
            _cure(_BegunAnew(), "mend_frozen"),
        ),
        Misconception(
            "examples are counted as steps",
            "A step takes `batch_size * accumulation_steps` texts. With a total that is a hundred "
            "times too large, the rate hardly falls before the run is over.",
            _cure(_ExamplesForSteps(), "mend_schedule"),
        ),
        Misconception(
            "the steps of one epoch are taken for all",
            "The rate would be 0 after the first epoch, and the others would teach nothing. "
            "Multiply by `epochs`. The schedule runs over all epochs together.",
            _cure(_OneEpoch(), "mend_schedule"),
        ),
        Misconception(
            "batches are counted as steps",
            "With `accumulation_steps` of 2 or more, the optimizer moves after that many "
            "batches only. Counting batches makes the total too large, and the rate never gets "
            "down to 0.",
            _cure(_BatchesForSteps(), "mend_schedule"),
        ),
        Misconception(
            "smaller batches are not counted",
            "What is left over at the end of an epoch makes a batch, and a step, too: round up. "
            "A run of fewer texts than one batch would otherwise have no step at all.",
            _cure(_RoundedDown(), "mend_schedule"),
        ),
        Misconception(
            "epochs are joined before rounding",
            "Each epoch ends with a batch and a step of its own, which may be smaller. Round up "
            "for one epoch, then multiply.",
            _cure(_EpochsTogether(), "mend_schedule"),
        ),
        Misconception(
            "the warm-up is rounded down",
            "A short run would have none at all. A tenth of the steps, rounded up. With 15 "
            "steps that is two, and with 5 it is one.",
            _cure(_ShortWarmup(), "mend_schedule"),
        ),
        Misconception(
            "the warm-up is left out",
            "In the first steps Adam's means know almost nothing, and its steps are as long as "
            "later ones. The warm-up keeps them short.",
            _cure(_WithoutWarmup(), "mend_schedule"),
        ),
        Misconception(
            "the learning rate is kept",
            "1e-4 is a pretraining's, 1e-3 undoes it, and with 1e-6 nothing moves. BERT's range "
            "is 2e-5 to 5e-5. Move what is outside to the nearer end.",
            _cure(_RateKept(), "mend_schedule"),
        ),
        Misconception(
            "the learning rate is always 5e-5",
            "One that is in the range stays as it is, and one that is too low becomes the lower "
            "end of it.",
            _cure(_RateFixed(), "mend_schedule"),
        ),
        Misconception(
            "a learning rate that is too low is kept",
            "That is the other cause of slow convergence: below 2e-5 it becomes 2e-5. A rate a "
            "hundred times too small needs a hundred times as many steps.",
            _cure(_LoweredOnly(), "mend_schedule"),
        ),
        Misconception(
            "other settings are dropped",
            "A run needs them all: the ones that are none of your business come back as they "
            "were. `{**settings, ...}`",
            _cure(_Others(), "mend_schedule"),
        ),
        Misconception(
            "the given settings are changed",
            "Whoever called you may want to compare the old with the new. Return a new dict. A "
            "dict that changes under its owner is hard to find.",
            _cure(_SettingsChanged(), "mend_schedule"),
        ),
        Misconception(
            "the first one that fits is taken",
            "Several have the same number of pieces, and the wrong one raises no error: that is "
            "why nobody noticed. Let the model decide.",
            _cure(_FirstThatFits(), "mend_vocabulary"),
        ),
        Misconception(
            "the highest loss wins",
            "A loss says how surprised the model is. With its own tokenizer it is least "
            "surprised. So the lowest loss tells you which one is its own.",
            _cure(_HighestLoss(), "mend_vocabulary"),
        ),
        Misconception(
            "nothing is hidden",
            "A model that sees a piece can copy it, whatever the piece means: the loss is near 0 "
            "with every tokenizer. Put `mask_token_id` there.",
            _cure(_NothingHidden(), "mend_vocabulary"),
        ),
        Misconception(
            "the fewest unknown words win",
            "The model's own tokenizer may well lack words that another one knows. What counts is "
            "whether the ids mean to the model what they mean to the tokenizer.",
            _cure(_FewestUnknown(), "mend_vocabulary"),
        ),
        Misconception(
            "ids may be larger than the model's table",
            "A tokenizer with more pieces than the model has rows ends in an IndexError, and "
            "cannot be the model's. Leave it out first.",
            _cure(_SizeUnchecked(), "mend_vocabulary"),
        ),
    ),
    hints=(
        "First patient: who moves parameters, and how does it know which? Second: how many times "
        "does the optimizer move in one epoch? Third: what can the model do only with its own "
        "tokenizer?",
        "`optimizer.param_groups` is a list of dicts with `params`; `add_param_group` adds one. "
        "`math.ceil` twice in one epoch: batches, then steps. For each tokenizer: the mean of "
        "`model(...).loss` over all places, one place masked at a time.",
        "`{**optimizer.param_groups[0], 'params': new}` has the first group's settings. "
        "`epochs * ceil(ceil(n / batch_size) / accumulation_steps)`. `labels` is -100 everywhere "
        "but at the one place; `min(names, key=...)` picks the tokenizer.",
    ),
)

EXERCISES = [BATCHES, CLASSIFY, TAG, ANSWER, TUNE, MORE, EXPLAIN, CLINIC]
