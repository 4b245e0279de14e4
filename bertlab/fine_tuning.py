"""Fine-tuning: batches, heads for four kinds of task, a training loop, and why a model decided.

After the exercises stands what is given: how texts, words and questions become examples, a run
that can be resumed, prediction without padding, and the picture of a decision.
"""

from __future__ import annotations

import html
import math
import random
import re
import string
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from bertlab.embeddings import sliding_windows, stitch_windows
from bertlab.encoder import initialize_weights
from bertlab.heads import IGNORED
from bertlab.pretraining import (
    autocast_for,
    check_tensors,
    device_of,
    fused_adamw,
    own_tensors,
    parameter_groups,
    put_tensors,
    read_checkpoint,
    require,
    take_tensors,
    warmup_linear,
    write_checkpoint,
)

Batch = Mapping[str, Tensor]  # the arguments of a model's forward, labels among them
Example = Mapping[str, Any]  # one text: lists, one number a token, and numbers, one a text
Span = tuple[int, int]  # the characters from, and up to but not including
Impact = tuple[str, float]  # a piece or a word, and what it did to a decision
Target = int | tuple[int, int]


# --- exercise 7.1: batches ---
def pad_batch(examples: Sequence[Example], pad_token_id: int) -> dict[str, Tensor]:
    """Put texts of unequal length into one batch, as long as its longest text.

    Args:
        examples: dicts with the same fields. A list has one whole number for each token; a number
            (such as a text's label) stands for the whole text. `input_ids` is always there.
        pad_token_id: fills up `input_ids`. `labels` are filled up with -100, every other list
            (`token_type_ids`, `attention_mask`) with 0.

    Returns:
        The fields as tensors, `[batch, seq]` for lists and `[batch]` for numbers. Where the
        examples have no `attention_mask`, it is made: 1 for a real token, 0 for padding. The
        examples are not changed.

    Raises:
        ValueError: there is no example; or an example has not the fields of the first, has no
            token, or has a list that is not as long as its `input_ids`. The message says which
            (`examples[3]`), and names the field.

    In production: `transformers.DataCollatorWithPadding`, `DataCollatorForTokenClassification`.
    """
    raise NotImplementedError("exercise 7.1")


def bucket_batches(lengths: Sequence[int], batch_size: int, rng: random.Random) -> list[list[int]]:
    """Put texts of like length into the same batch, so that little is padding.

    Args:
        lengths: how many tokens each text has.
        batch_size: how many texts a batch has; one batch may have fewer.
        rng: which texts of like length meet, and the order of the batches, are drawn from it, so
            that no two epochs are the same.

    Returns:
        Lists of indices into `lengths`; every index is in one of them, once. Lengths within a batch
        are as alike as sorting makes them; the batches come in random order, not from short to
        long.

    Raises:
        ValueError: `batch_size` is less than 1.

    In production: `Trainer` with `train_sampling_strategy="group_by_length"`.
    """
    raise NotImplementedError("exercise 7.1")
# --- end of exercise 7.1 ---


class TaskOutput(NamedTuple):
    """What a classifier of texts or of tokens returns; the names are Transformers'.

    Attributes:
        loss: a number; None without labels.
        logits: `[batch, num_labels]` for texts, `[batch, seq, num_labels]` for tokens.
    """

    loss: Tensor | None
    logits: Tensor


class SpanOutput(NamedTuple):
    """What a model that answers from a passage returns; the names are Transformers'.

    Attributes:
        loss: a number; None without positions.
        start_logits, end_logits: `[batch, seq]`.
    """

    loss: Tensor | None
    start_logits: Tensor
    end_logits: Tensor


def check_labels(name: str, labels: Tensor, num_labels: int) -> None:
    """Raise ValueError unless every label is a class or -100 (none); the message says which text.

    PyTorch's own error names no text, and on a GPU it ends the process.

    Args:
        name: what the argument is called.
        labels: `[batch]` or `[batch, seq]`.
        num_labels: how many classes there are.
    """
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= num_labels))
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name}{place} is {int(labels[tuple(place)])}, but must be 0 to {num_labels - 1}, or "
            f"{IGNORED} for none"
        )


# --- exercise 7.2: classify texts ---
class SequenceClassifier(nn.Module):
    """BERT that says which class a text, or a pair of texts, belongs to.

    Attributes:
        bert: the `BertModel` it was given: the same, not a copy.
        dropout: `nn.Dropout` with the config's `hidden_dropout_prob`, on the pooler's output.
        classifier: `nn.Linear`, `hidden_size` to `num_labels`; its weight is drawn from a normal
            distribution with the config's `initializer_range`, its bias is 0
            (`bertlab.encoder.initialize_weights` does both).
        config: the model's `BertConfig`.

    Source: Devlin et al. 2019, section 4.1.
    In production: `transformers.BertForSequenceClassification`.
    """

    def __init__(self, bert: Any, num_labels: int) -> None:
        super().__init__()
        raise NotImplementedError("exercise 7.2")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> TaskOutput:
        """Score the classes.

        Args:
            input_ids, attention_mask, token_type_ids: `[batch, seq]`, as for `BertModel`.
            labels: `[batch]`, from 0 to `num_labels - 1`.

        Returns:
            A `TaskOutput`: the mean cross-entropy, None without labels; and the logits,
            `[batch, num_labels]`.

        Raises:
            ValueError: a label is out of range; the message says which text's (see
                `check_labels`, given).
        """
        raise NotImplementedError("exercise 7.2")
# --- end of exercise 7.2 ---


# --- exercise 7.3: tag words ---
def align_labels(word_labels: Sequence[int], word_ids: Sequence[int | None]) -> list[int]:
    """Give the labels of words to their pieces: each word's first piece has it.

    Args:
        word_labels: one for each word of the sentence.
        word_ids: for each token the number of its word, None for a special token. A sentence that
            was cut has fewer words than labels.

    Returns:
        One label for each token: the word's at its first piece, -100 at its other pieces and at
        special tokens. A cross-entropy leaves -100 out.

    Raises:
        ValueError: there are more words than labels; the message says how many of each.

    Source: Devlin et al. 2019, section 5.3.
    In production: the function `tokenize_and_align_labels` of Transformers' `run_ner.py`.
    """
    raise NotImplementedError("exercise 7.3")


class TokenClassifier(nn.Module):
    """BERT that says for each token which class it belongs to.

    Attributes:
        bert: the `BertModel` it was given: the same, not a copy.
        dropout: `nn.Dropout` with the config's `hidden_dropout_prob`, on BERT's last hidden state.
        classifier: `nn.Linear`, `hidden_size` to `num_labels`, initialized as
            `SequenceClassifier`'s.
        config: the model's `BertConfig`.

    Source: Devlin et al. 2019, section 5.3.
    In production: `transformers.BertForTokenClassification`.
    """

    def __init__(self, bert: Any, num_labels: int) -> None:
        super().__init__()
        raise NotImplementedError("exercise 7.3")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> TaskOutput:
        """Score the classes of each token.

        Args:
            input_ids, attention_mask, token_type_ids: `[batch, seq]`, as for `BertModel`.
            labels: `[batch, seq]`, from 0 to `num_labels - 1`; -100 where there is none.

        Returns:
            A `TaskOutput`: the mean cross-entropy over all labelled tokens of the batch, None
            without labels; and the logits, `[batch, seq, num_labels]`.

        Raises:
            ValueError: a label is out of range; the message says which (see `check_labels`).
        """
        raise NotImplementedError("exercise 7.3")


def entity_f1(true_tags: Sequence[Sequence[str]], predicted_tags: Sequence[Sequence[str]]) -> float:
    """How well the entities of sentences were found: F1, over entities and not over words.

    A tag is `O` (outside), or a letter, a hyphen and a type, such as `B-type`. `B` begins an
    entity and `I` goes on with one; where single words and ends are marked too, `S` is an entity
    of one word and `E` its last. An entity is found when one of the same type, with the same first
    and the same last word, was predicted.

    Taggers write sequences that break these rules, and they are read as generously as the CoNLL
    evaluation did: an `I` or `E` after `O`, after another type, or after a word that ended its
    entity, begins an entity; an entity also ends with the sentence, and before any word that does
    not go on with it.

    Args:
        true_tags: for each sentence the tags of its words.
        predicted_tags: the same, as predicted.

    Returns:
        `2 * found / (true + predicted)`, of the numbers of entities in all sentences together; 0
        when there is none at all.

    Raises:
        ValueError: numbers of sentences differ, or those of a sentence's tags; the message says
            which sentence.

    Source: Tjong Kim Sang and De Meulder 2003. In production: `seqeval.metrics.f1_score`.
    """
    raise NotImplementedError("exercise 7.3")
# --- end of exercise 7.3 ---


# --- exercise 7.4: answer from a passage ---
class SpanClassifier(nn.Module):
    """BERT that answers a question with a span of a passage: where it begins and where it ends.

    Attributes:
        bert: the `BertModel` it was given: the same, not a copy.
        qa_outputs: `nn.Linear`, `hidden_size` to 2, initialized as `SequenceClassifier`'s: the
            first score of a token is that an answer begins there, the second that it ends there.
        config: the model's `BertConfig`.

    Source: Devlin et al. 2019, section 4.2. In production: `transformers.BertForQuestionAnswering`.
    """

    def __init__(self, bert: Any) -> None:
        super().__init__()
        raise NotImplementedError("exercise 7.4")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
    ) -> SpanOutput:
        """Score each token as an answer's first and as its last.

        Args:
            input_ids, attention_mask, token_type_ids: `[batch, seq]`, as for `BertModel`: question
                and passage as a pair.
            start_positions, end_positions: `[batch]`, the tokens where the right answer begins and
                ends (the last one of it); both 0, that is `[CLS]`, where the text has none. Both
                are given, or none.

        Returns:
            A `SpanOutput`: the mean of two cross-entropies over a text's tokens, that of the start
            and that of the end, averaged over the texts; and both logits, `[batch, seq]`. No
            answer begins at padding: there the logits are the lowest number of their dtype, so
            that the loss is the same however long the batch is padded. (Transformers' model
            lets padding take part.)

        Raises:
            ValueError: a position is outside the text; the message says which text's (see
                `check_labels`).
        """
        raise NotImplementedError("exercise 7.4")


def best_spans(
    start_logits: Tensor,
    end_logits: Tensor,
    offsets: Sequence[Sequence[Span | None]],
    n_best: int = 5,
    max_answer_tokens: int = 30,
) -> list[tuple[int, int, float]]:
    """The likeliest answers of a passage that was read in windows.

    An answer's score is the start's logit plus the end's. It begins and ends in the same window,
    does not end before it begins, and has at most `max_answer_tokens` tokens. Windows overlap, so
    the same span may be found twice: it is listed once, with its best score.

    That there is no answer scores `[CLS]`'s start plus its end, in the window where this is
    lowest: a passage has no answer only if none of its windows has one.

    Args:
        start_logits, end_logits: `[windows, seq]`; `[CLS]` is the first token.
        offsets: for each window and each of its `seq` tokens its `(start, end)` in the passage, in
            characters; None where no answer may begin or end: the question, special tokens and
            padding.
        n_best: at most so many are returned.
        max_answer_tokens: see above.

    Returns:
        `(start, end, score)`, best first: the answer is `passage[start:end]`. No answer is
        `(0, 0, score)`, has its place among the others, and is left out like them when it is not
        among the best.

    Raises:
        ValueError: `offsets` has not one entry for each token.

    Source: Devlin et al. 2019, sections 4.2 and 4.3; their `run_squad.py` (2018).
    """
    raise NotImplementedError("exercise 7.4")
# --- end of exercise 7.4 ---


@dataclass(frozen=True)
class FineTuningSettings:
    """How `fine_tune` trains.

    Attributes:
        learning_rate: the head's, at the end of the warm-up.
        weight_decay: as in pretraining; biases and norms are not decayed.
        epochs: how often the examples are read, at most.
        warmup: the part of all steps in which the learning rate rises from 0, rounded up.
        layer_decay: the top layer's learning rate is the head's times this, the layer's below times
            this squared, and so on; the embeddings come last. What is neither layer nor embedding
            (the pooler too) has the head's.
        freeze_embeddings: leave the embeddings as they are.
        frozen_layers: leave so many layers as they are, from the bottom.
        patience: stop when so many epochs in a row have not lowered the lowest validation loss;
            None never stops.
        max_grad_norm: a longer gradient is shortened to this length; None never shortens.
        class_weights: how much a text or token of each class counts, in training and validation;
            None counts all alike. `balanced_weights` (given) makes them.
        precision: `"float32"`; `"bf16"` runs the forward pass in 16 bits where that is safe.
        without_padding: let a model with a `bert` compute nothing for padding (the same numbers).
        seed: of dropout, and of all that is drawn from PyTorch's global generator in training.
        checkpoint: a file that is written after each epoch, and from which a run that was stopped
            goes on; None keeps nothing.

    Raises:
        ValueError: a field has a value that makes no sense; the message names it.

    Source: Devlin et al. 2019, appendix A.3, has BERT's numbers: learning rate 2e-5 to 5e-5, 2 to 4
    epochs; layer decay: Howard and Ruder 2018, section 3.2.
    """

    learning_rate: float = 5e-5
    weight_decay: float = 0.01
    epochs: int = 3
    warmup: float = 0.1
    layer_decay: float = 1.0
    freeze_embeddings: bool = False
    frozen_layers: int = 0
    patience: int | None = None
    max_grad_norm: float | None = 1.0
    class_weights: tuple[float, ...] | None = None
    precision: str = "float32"
    without_padding: bool = True
    seed: int = 0
    checkpoint: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay", "frozen_layers"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        require(self.epochs >= 1, "epochs", self.epochs, "at least 1")
        require(0 <= self.warmup <= 1, "warmup", self.warmup, "from 0 to 1")
        require(0 < self.layer_decay <= 1, "layer_decay", self.layer_decay, "above 0, at most 1")
        for name in ("patience", "max_grad_norm"):
            value = getattr(self, name)
            require(value is None or value > 0, name, value, "greater than 0, or None")
        weights = self.class_weights
        require(weights is None or min(weights) >= 0, "class_weights", weights, "at least 0 each")
        allowed = self.precision in ("float32", "bf16")
        require(allowed, "precision", self.precision, "float32 or bf16")


# --- exercise 7.5: the fine-tuning loop ---
def fine_tune(
    model: Any,
    train: Any,
    validation: Iterable[Batch],
    settings: FineTuningSettings,
    on_epoch: Callable[[int, Evaluation], None] | None = None,
) -> list[float]:
    """Train a model with a head, and leave it with the weights that did best on validation.

    In each step: a batch's loss (`batch_loss`, given), its gradient, shortened to
    `max_grad_norm`, and a step of AdamW (yours, or the faster `bertlab.pretraining.fused_adamw`). A
    parameter's learning rate is its part's (see `layer_decay`) times `warmup_linear(steps done,
    warm-up steps, steps of all epochs)`. What is frozen does not move, decay included, and has no
    part in the gradient's length; afterwards it can be trained as before.

    After each epoch `evaluate` (given) measures the validation loss, in eval mode. The run stops
    after `epochs`, or earlier for want of `patience`. At the end the model has the weights of the
    epoch with the lowest validation loss, the first of them if several are equal.

    `FineTuningRun` (given) gives the epoch's batches with a progress bar, keeps the best weights,
    and the checkpoint.

    Args:
        model: `SequenceClassifier`, `TokenClassifier` or `SpanClassifier`, or another model with
            a `bert`; it is left in the mode it was in.
        train: yields batches and has a length, again and again: a list, a `DataLoader`, or
            `BucketedBatches` (given). If it has `set_epoch`, that is called before each epoch.
        validation: yields batches, again and again.
        settings: see `FineTuningSettings`.
        on_epoch: called after each epoch with its number, from 1, and its `Evaluation`.

    Returns:
        The validation loss of every epoch, those before a resume included.

    Raises:
        ValueError: there is no batch to train or validate on; more layers are to be frozen than
            there are; a loss is not finite; or the checkpoint is of another run.

    Source: Devlin et al. 2019, appendix A.3. In production: `transformers.Trainer` with
    `EarlyStoppingCallback`.
    """
    raise NotImplementedError("exercise 7.5")
# --- end of exercise 7.5 ---


# --- exercise 7.6: more examples ---
def pseudo_label(
    model: Callable[[Sequence[str]], Tensor], texts: Sequence[str], threshold: float = 0.95
) -> list[tuple[str, int]]:
    """Label texts with what a model is sure of.

    Args:
        model: gives the logits of texts, `[texts, num_labels]`; such as
            `lambda texts: predict(classifier, tokenizer, texts)`.
        texts: without labels.
        threshold: how probable a class has to be, from 0 to 1.

    Returns:
        `(text, label)` for each text whose likeliest class has a probability of at least
        `threshold`, in the order of `texts`; nothing for no texts.

    Raises:
        ValueError: `threshold` is not from 0 to 1.

    Source: Lee 2013, "Pseudo-Label".
    """
    raise NotImplementedError("exercise 7.6")


def augment(
    text: str,
    model: Any,
    tokenizer: Any,
    probability: float = 0.15,
    top_k: int = 5,
    generator: torch.Generator | None = None,
) -> str:
    """Write a text in another way: some of its words become words that fit there as well.

    Each word that is one piece of letters alone is chosen with `probability`, independently. All
    chosen ones are masked at once, and the model reads the text. Each becomes one of the `top_k`
    likeliest *other* pieces of letters alone (no `##`, no mark, no digit, no special token, not
    what stood there), drawn with their probabilities (those of the `top_k`, made to sum to 1).
    Everything else, white space too, stays as it is written.

    Args:
        text: is not cut; may be empty.
        model: `BertForMaskedLM`, read in eval mode and left in the mode it was in. Or
            `BackTranslation` (given), which is called with the text; the other arguments are then
            not used.
        tokenizer: the model's, a `WordPieceTokenizer`: `tokenizer(text, return_offsets=True)`
            says where each piece stands in the text.
        probability: how likely a word is chosen.
        top_k: how many words it may become.
        generator: where the draws come from; PyTorch's global generator when None.

    Returns:
        The text with the new words, in the vocabulary's spelling.

    Source: Kobayashi 2018, "Contextual Augmentation"; back-translation: Sennrich et al. 2016.
    """
    raise NotImplementedError("exercise 7.6")
# --- end of exercise 7.6 ---


# --- exercise 7.7: why the model decided ---
def occlusion_impact(
    model: Any, tokenizer: Any, text: str | tuple[str, str], target: int | None = None
) -> list[Impact]:
    """What each token did to a decision: the logit with it, minus the logit without it.

    Without it means that the token is deleted: those after it move up by one place.

    Args:
        model: `SequenceClassifier`; read in eval mode and left in the mode it was in.
        tokenizer: the model's.
        text: a text, or a pair of texts.
        target: the class whose logit is looked at; the likeliest one when None.

    Returns:
        `(piece, impact)` for each token but `[CLS]` and `[SEP]`, from left to right; above 0 where
        the token speaks for the class, below 0 where it speaks against it.

    Raises:
        ValueError: `text` is empty; or the model has no class `target`; the message says so.

    Source: Li, Monroe and Jurafsky 2016, "Understanding Neural Networks through Representation
    Erasure".
    """
    raise NotImplementedError("exercise 7.7")


def gradient_impact(
    model: Any, tokenizer: Any, text: str | tuple[str, str], target: int | None = None
) -> list[Impact]:
    """What each token did to a decision, as its gradient guesses it: gradient times embedding.

    The gradient of the logit with respect to the token's word vector (what
    `model.bert.embeddings.word` gives, before positions and token types are added), times that
    vector, summed over its units: by how much the logit would fall if the vector shrank to 0 and
    the logit followed a straight line.

    Args and errors: as for `occlusion_impact`. One pass forward and one back, for all tokens.

    Returns:
        `(piece, impact)` for each token but `[CLS]` and `[SEP]`, from left to right. No parameter
        has another gradient afterwards than before.

    Source: Denil, Demiraj and de Freitas 2014; "gradient times input" in Shrikumar et al. 2017.
    """
    raise NotImplementedError("exercise 7.7")
# --- end of exercise 7.7 ---


# --- given: from texts, words and questions to examples ---


def encode_texts(
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    labels: Sequence[int] | None = None,
    max_length: int = 512,
    stride: int = 64,
) -> tuple[list[dict[str, Any]], list[int]]:
    """Examples of texts or of pairs; a text that is too long becomes several, which overlap.

    Args:
        tokenizer: a `WordPieceTokenizer`.
        texts, pairs: the texts, and the second text of each pair.
        labels: one for each text, which all of its windows get; none when None.
        max_length: in tokens, special ones included.
        stride: how many tokens a window shares with the next; at most a quarter of a window.

    Returns:
        The examples, for `pad_batch`, and for each the number of its text.

    Raises:
        ValueError: a text is empty, or numbers of texts and labels differ; the message says which.
    """
    for name, column in (("texts", texts), ("pairs", pairs or ())):
        for number, text in enumerate(column):
            if not text.strip():
                raise ValueError(f"{name}[{number}] is empty: {text!r}; leave it out")
    for name, column in (("pairs", pairs), ("labels", labels)):
        if column is not None and len(column) != len(texts):
            raise ValueError(f"there are {len(texts)} texts, but {len(column)} {name}")
    columns = tokenizer(
        list(texts),
        None if pairs is None else list(pairs),
        truncation=True,
        max_length=max_length,
        stride=min(stride, (max_length - 3) // 4),
    )
    sources = columns.pop("overflow_to_sample_mapping")
    if labels is not None:
        columns["labels"] = [int(labels[source]) for source in sources]
    return rows_of(columns), sources


def rows_of(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Columns of a table as a dict for each row."""
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def encode_words(
    tokenizer: Any, words: Sequence[str], max_length: int = 512, stride: int = 64
) -> list[tuple[dict[str, Any], list[int | None]]]:
    """Examples of a sentence that is given as words, and for each token the number of its word.

    A word without a piece (of control characters alone, say) is read as `[UNK]`, so that every
    word has one. A sentence that is too long becomes several examples, which overlap by `stride`
    tokens.
    """
    require(len(words) > 0, "words", words, "at least one word")
    pieces = [(i, number) for number, word in enumerate(words) for i in ids_of(tokenizer, word)]
    ids, word_ids = zip(*pieces, strict=True)
    examples, room = [], max_length - 2
    for window in sliding_windows(list(range(len(ids))), room, min(stride, room - 1)):
        window_ids = [tokenizer.cls_token_id, *(ids[i] for i in window), tokenizer.sep_token_id]
        example = {"input_ids": window_ids, "token_type_ids": [0] * len(window_ids)}
        examples.append((example, [None, *(word_ids[i] for i in window), None]))
    return examples


def ids_of(tokenizer: Any, word: str) -> list[int]:
    """The ids of a word's pieces; a word without a piece is unknown."""
    return tokenizer.encode(word)[1:-1] or [tokenizer.unk_token_id]


def tagged_examples(
    tokenizer: Any,
    sentences: Sequence[Sequence[str]],
    tags: Sequence[Sequence[str]],
    names: Sequence[str],
    max_length: int = 512,
    stride: int = 64,
) -> list[dict[str, Any]]:
    """Examples of sentences with a tag for each word; a tag's label is its place in `names`.

    Raises:
        ValueError: a sentence is empty or has more words than tags, or fewer, or a tag that is not
            in `names`; the message says which sentence.
    """
    if len(sentences) != len(tags):
        raise ValueError(f"there are {len(sentences)} sentences, but tags for {len(tags)}")
    label_of = {name: label for label, name in enumerate(names)}
    examples = []
    for number, (words, given) in enumerate(zip(sentences, tags, strict=True)):
        if len(words) != len(given) or not words:
            raise ValueError(f"sentence {number} has {len(words)} words and {len(given)} tags")
        unknown = [tag for tag in given if tag not in label_of]
        if unknown:
            raise ValueError(
                f"sentence {number} has the tag {unknown[0]!r}, but must have {', '.join(names)}"
            )
        labels = [label_of[tag] for tag in given]
        for example, word_ids in encode_words(tokenizer, words, max_length, stride):
            # A window may begin within a word, whose label then stands at its first piece there.
            examples.append({**example, "labels": align_labels(labels, word_ids)})
    return examples


def span_examples(
    tokenizer: Any,
    question: str,
    passage: str,
    answer: Span | None = None,
    max_length: int = 384,
    stride: int = 128,
) -> tuple[list[dict[str, Any]], list[list[Span | None]]]:
    """A question and its passage as examples, one for each window of the passage.

    Args:
        answer: the right span of the passage; None when it has no answer. A window in which the
            answer does not lie wholly has none.
        max_length: tokens of a window, with question and special tokens.
        stride: how many of the passage's tokens a window shares with the next; at most a quarter
            of `max_length`.

    Returns:
        The examples, with `start_positions` and `end_positions`, and the offsets that `best_spans`
        asks for.

    Raises:
        ValueError: question or passage is empty, or `answer` is not a span of the passage.
    """
    for name, text in (("question", question), ("passage", passage)):
        require(bool(text.strip()), name, text, "a text with a word in it")
    is_span = answer is None or 0 <= answer[0] < answer[1] <= len(passage)
    require(
        is_span, "answer", answer, f"(start, end) within the {len(passage)} characters, or None"
    )
    columns = tokenizer(
        [question],
        [passage],
        truncation="only_second",
        max_length=max_length,
        stride=min(stride, max_length // 4),
        return_offsets=True,
    )
    offsets = [
        [span if of_passage and span[0] < span[1] else None for span, of_passage in pairs]
        for pairs in (
            list(zip(spans, types, strict=True))
            for spans, types in zip(columns["offsets"], columns["token_type_ids"], strict=True)
        )
    ]
    rows = rows_of({name: columns[name] for name in ("input_ids", "token_type_ids")})
    for row, spans in zip(rows, offsets, strict=True):
        row["start_positions"], row["end_positions"] = places_of(answer, spans)
    return rows, offsets


def places_of(answer: Span | None, spans: Sequence[Span | None]) -> tuple[int, int]:
    """The first and the last token of an answer in a window; (0, 0) when it is not wholly there."""
    if answer is None:
        return 0, 0
    inside = [
        place
        for place, span in enumerate(spans)
        if span is not None and span[0] < answer[1] and span[1] > answer[0]
    ]
    present = [span for span in spans if span is not None]
    if not inside or present[0][0] > answer[0] or present[-1][1] < answer[1]:
        return 0, 0
    return inside[0], inside[-1]


def fill_template(
    template: str, values: Mapping[str, Sequence[str]], rng: random.Random
) -> tuple[list[str], list[str]]:
    """A sentence made from a template, with the tag of each word.

        fill_template("{parameter} defaults to {default} .", {"parameter": ["axis"], ...}, rng)
        # (["axis", "defaults", "to", "None", "."], ["B-parameter", "O", "O", "B-default", "O"])

    Args:
        template: words, and in braces the types of entities, with spaces between them.
        values: for each type what it may be, of one word or several.
        rng: draws the values.

    Raises:
        ValueError: there are no values for a type.
    """
    words: list[str] = []
    tags: list[str] = []
    for part in template.split():
        slot = re.fullmatch(r"\{(\w+)\}", part)
        if slot is None:
            words.append(part)
            tags.append("O")
            continue
        kind = slot[1]
        require(bool(values.get(kind)), "values", sorted(values), f"a dict that has {kind!r}")
        chosen = rng.choice(values[kind]).split()
        words += chosen
        tags += [f"B-{kind}", *[f"I-{kind}"] * (len(chosen) - 1)]
    return words, tags


class BucketedBatches:
    """Padded batches of texts of like length, in another order in every epoch.

    Args:
        examples: see `pad_batch`.
        batch_size: texts in a batch.
        pad_token_id: the tokenizer's.
        seed: an epoch's order follows from the seed and the epoch's number alone.
    """

    def __init__(
        self, examples: Sequence[Example], batch_size: int, pad_token_id: int, seed: int = 0
    ) -> None:
        require(len(examples) >= 1, "examples", list(examples), "at least one example")
        require(batch_size > 0, "batch_size", batch_size, "at least 1")
        self.examples, self.batch_size = examples, batch_size
        self.pad_token_id, self.seed, self.epoch = pad_token_id, seed, 0

    def __len__(self) -> int:
        return math.ceil(len(self.examples) / self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is read next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rng = random.Random(f"{self.seed}, epoch {self.epoch}")
        self.epoch += 1
        lengths = [len(example["input_ids"]) for example in self.examples]
        for chosen in bucket_batches(lengths, self.batch_size, rng):
            yield pad_batch([self.examples[i] for i in chosen], self.pad_token_id)


def balanced_weights(labels: Sequence[int], num_labels: int) -> tuple[float, ...]:
    """Class weights with which every class counts as much as any other, however rare it is.

    In production: `sklearn.utils.class_weight.compute_class_weight("balanced", ...)`.
    """
    counts = Counter(labels)
    return tuple(
        len(labels) / (num_labels * counts[label]) if counts[label] else 0.0
        for label in range(num_labels)
    )


# --- given: a loss, and how good a model is ---


class Evaluation(NamedTuple):
    """How good a model is: its mean loss, and the part of the labels that it gets right."""

    loss: float
    accuracy: float


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Within it, a model is in eval mode; afterwards in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def without_padding(model: Any) -> Iterator[None]:
    """Within it, the `bert` of a model computes nothing for padding.

    Its outputs are those of `forward` at real tokens, and zeros at padding (see
    `bertlab.encoder.packed_forward`).
    """
    bert = model.bert

    def forward(
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Any:
        if attention_mask is None or attention_mask.all():
            return type(bert).forward(bert, input_ids, None, token_type_ids)
        return bert.forward_packed(input_ids, attention_mask, token_type_ids)

    bert.forward = forward  # the instance's own hides that of its class
    try:
        yield
    finally:
        del bert.forward


@contextmanager
def as_settings_say(model: Any, settings: FineTuningSettings) -> Iterator[None]:
    """Within it, a model runs in the precision, and without padding, as the settings say."""
    can_pack = hasattr(getattr(model, "bert", None), "forward_packed")
    with autocast_for(device_of(model), settings.precision):
        if settings.without_padding and can_pack:
            with without_padding(model):
                yield
        else:
            yield


def batch_loss(model: nn.Module, batch: Batch, settings: FineTuningSettings) -> Tensor:
    """The loss of a batch, in the precision and with the class weights of the settings."""
    with as_settings_say(model, settings):
        output = model(**batch)
    return weighted_loss(output, batch, settings.class_weights)


def weighted_loss(output: Any, batch: Batch, class_weights: Sequence[float] | None) -> Tensor:
    """A model's loss, or with class weights the weighted mean of the cross-entropies.

    Raises:
        ValueError: there are not as many weights as classes.
    """
    if class_weights is None:
        return output.loss
    logits, labels = output.logits, batch["labels"]
    classes = f"{logits.shape[-1]} numbers, one for each class"
    require(len(class_weights) == logits.shape[-1], "class_weights", class_weights, classes)
    weights = torch.tensor(class_weights, dtype=logits.dtype, device=logits.device)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), weights)


def evaluate(
    model: nn.Module, batches: Iterable[Batch], settings: FineTuningSettings | None = None
) -> Evaluation:
    """The loss and the accuracy of a model over batches, in eval mode.

    Every label counts alike (with class weights as much as they say), in whatever batch it stands:
    the mean of the batches' means would count those of a small batch more.

    Raises:
        ValueError: there is no batch, or no label.
    """
    settings = settings or FineTuningSettings()
    total = weight = right = count = 0.0
    with eval_mode(model), torch.no_grad():
        for batch in on_device(batches, device_of(model)):
            with as_settings_say(model, settings):
                output = model(**batch)
            hits, labels = hits_of(output, batch)
            share = weight_of(labels, settings.class_weights)
            if share:
                loss = weighted_loss(output, batch, settings.class_weights)
                total, weight = total + loss.item() * share, weight + share
            right, count = right + hits.sum().item(), count + hits.numel()
    if not weight:
        raise ValueError("batches has no label; give at least one batch with one")
    return Evaluation(total / weight, right / count)


def hits_of(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """For each label of a batch whether it was predicted, and the label; both `[labels]`."""
    if hasattr(output, "start_logits"):
        start = output.start_logits.argmax(dim=-1) == batch["start_positions"]
        end = output.end_logits.argmax(dim=-1) == batch["end_positions"]
        return start & end, batch["start_positions"]
    labelled = batch["labels"] != IGNORED
    labels = batch["labels"][labelled]
    return output.logits.argmax(dim=-1)[labelled] == labels, labels


def weight_of(labels: Tensor, class_weights: Sequence[float] | None) -> float:
    """How much labels `[labels]` count together."""
    if class_weights is None:
        return float(len(labels))
    return torch.tensor(class_weights)[labels.cpu()].sum().item()


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Batches, moved to a device one by one."""
    for batch in batches:
        yield {name: tensor.to(device) for name, tensor in batch.items()}


# --- given: a run ---


class FineTuningRun:
    """What a run of `fine_tune` has become so far, which is what its checkpoint holds.

    It goes on from the checkpoint when it is made, if there is one.

    Attributes:
        losses: the validation loss of each epoch that is done.
        best: the weights, by name, of the epoch with the lowest of them.

    Raises:
        ValueError: the checkpoint is of another run; the model is then as it was.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: FineTuningSettings
    ) -> None:
        self.model, self.optimizer, self.settings = model, optimizer, settings
        self.losses: list[float] = []
        self.best: dict[str, Tensor] = {}
        self.shown: dict[str, str] = {}
        self.bar: Any = None
        if settings.checkpoint is not None and Path(settings.checkpoint).exists():
            self.resume(Path(settings.checkpoint))

    def batches(self, train: Any) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The number of steps done, and the next batch, through one epoch.

        What is drawn from PyTorch's global generator in the epoch (dropout, a `DataLoader`'s
        order) follows from the seed and the epoch alone; the generator is put back afterwards.
        """
        epoch, device = len(self.losses), device_of(self.model)
        if len(train) == 0:
            raise ValueError("train has no batch; give at least one")
        if hasattr(train, "set_epoch"):
            train.set_epoch(epoch)
        self.open_bar(len(train) * self.settings.epochs, len(train) * epoch)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            seed_generators(random.Random(f"{self.settings.seed}, {epoch}").getrandbits(63), device)
            for place, batch in enumerate(on_device(train, device)):
                yield len(train) * epoch + place, batch

    def open_bar(self, steps: int, done: int) -> None:
        """Begin the progress bar."""
        if self.bar is None:
            self.bar = tqdm(total=steps, initial=done, desc="Fine-tuning", delay=1)

    def show(self, loss: Tensor) -> None:
        """Say that a step is done, and what its loss was.

        Raises:
            ValueError: the loss is not finite.
        """
        value = loss.item()
        if not math.isfinite(value):
            raise ValueError(
                f"the loss is {value} in epoch {len(self.losses) + 1}: the learning rate "
                f"({self.settings.learning_rate}) may be too high, or a batch have no label"
            )
        self.shown = {"loss": f"{value:.3f}", **self.without_loss()}
        self.bar.set_postfix(self.shown, refresh=False)
        self.bar.update()

    def without_loss(self) -> dict[str, str]:
        """What the bar shows of the epochs that are done."""
        return {name: text for name, text in self.shown.items() if name != "loss"}

    def note(self, result: Evaluation) -> None:
        """Say that an epoch is done: keep its weights if they are the best, write the checkpoint.

        Raises:
            ValueError: the validation loss is not finite.
        """
        require(math.isfinite(result.loss), "the validation loss", result.loss, "finite")
        self.losses.append(result.loss)
        if result.loss < min(self.losses[:-1], default=math.inf):
            self.best = {name: x.clone() for name, x in own_tensors(self.model).items()}
        self.shown |= {"validation": f"{result.loss:.3f}", "accuracy": f"{result.accuracy:.1%}"}
        if self.bar is not None:
            self.bar.set_postfix(self.shown)
        if self.settings.checkpoint is not None:
            self.save(Path(self.settings.checkpoint))

    def restore_best(self) -> None:
        """Give the model the best weights, and end the progress bar."""
        copy_into(own_tensors(self.model), self.best)
        if self.bar is not None:
            self.bar.close()

    def save(self, path: Path) -> None:
        """Write the checkpoint; the one before stays until the new one is complete."""
        tensors = {f"model.{name}": x for name, x in own_tensors(self.model).items()}
        tensors |= {f"best.{name}": x for name, x in self.best.items()}
        state = take_tensors(self.optimizer.state_dict(), "optimizer", tensors)
        tensors["losses"] = torch.tensor(self.losses, dtype=torch.float64)
        write_checkpoint(path, tensors, {"fine_tune": self.plain_settings(), "optimizer": state})

    def resume(self, path: Path) -> None:
        """Become what the checkpoint holds."""
        tensors, plain = read_checkpoint(path)
        check_run(path, plain.get("fine_tune"), self.plain_settings())
        own = own_tensors(self.model)
        check_tensors(path, tensors, own)
        self.optimizer.load_state_dict(put_tensors(plain["optimizer"], "optimizer", tensors))
        copy_into(own, {name: tensors[f"model.{name}"] for name in own})
        self.best = {name: tensors[f"best.{name}"] for name in own}
        self.losses = tensors["losses"].tolist()

    def plain_settings(self) -> dict[str, Any]:
        """The settings on which the weights at the end depend, as JSON has them."""
        fields = {k: v for k, v in asdict(self.settings).items() if k != "checkpoint"}
        weights = fields["class_weights"]
        return fields | {"class_weights": None if weights is None else list(weights)}


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed PyTorch's global generators: that of the CPU, and that of the device."""
    torch.default_generator.manual_seed(seed)
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).manual_seed(seed)


@torch.no_grad()
def copy_into(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write values into tensors of the same names."""
    for name, tensor in own.items():
        tensor.copy_(values[name])


def check_run(path: Path, saved: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless a checkpoint is of a run of `fine_tune` with these settings."""
    if saved is None:
        raise ValueError(f"{path} is no checkpoint of fine_tune; give another file as checkpoint")
    for name, value in settings.items():
        if saved.get(name) != value:
            raise ValueError(
                f"{path} is of a run with {name} {saved.get(name)!r}, but here it is {value!r}; a "
                "run goes on with the settings it began with. Give a new run another checkpoint"
            )


# --- given: prediction ---


def predict(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    max_length: int = 512,
    stride: int = 64,
    batch_tokens: int = 2048,
    precision: str = "float32",
) -> Tensor:
    """The logits of texts, `[texts, num_labels]`, in their order; nothing is computed for padding.

    Texts of like length are read together. A text of more than `max_length` tokens is read in
    windows, and has the mean of their logits.

    Args:
        model: `SequenceClassifier`; read in eval mode and left in the mode it was in.
        batch_tokens: at most so many tokens are read at once, but at least one text.

    Raises:
        ValueError: there is no text, or one is empty; the message says which.
    """
    require(len(texts) > 0, "texts", texts, "at least one text")
    examples, sources = encode_texts(tokenizer, texts, pairs, max_length=max_length, stride=stride)
    settings = FineTuningSettings(precision=precision)
    outputs = read_examples(model, examples, tokenizer.pad_token_id, settings, batch_tokens)
    windows = torch.stack([output.logits for output in outputs])
    owner = torch.tensor(sources)
    sums = windows.new_zeros(len(texts), windows.shape[1]).index_add_(0, owner, windows)
    return sums / owner.bincount(minlength=len(texts))[:, None]


def read_examples(
    model: Any,
    examples: Sequence[Example],
    pad_token_id: int,
    settings: FineTuningSettings | None = None,
    batch_tokens: int = 2048,
) -> list[Any]:
    """What a model returns for each example, in their order, on the CPU, without padding."""
    settings = settings or FineTuningSettings()
    outputs: list[Any] = [None] * len(examples)
    lengths = [len(example["input_ids"]) for example in examples]
    device = device_of(model)
    with eval_mode(model), torch.no_grad(), QuickLinear():
        for chosen in batches_of_tokens(lengths, batch_tokens):
            batch = pad_batch([examples[i] for i in chosen], pad_token_id)
            with as_settings_say(model, settings):
                output = model(**{name: x.to(device) for name, x in batch.items()})
            for row, i in enumerate(chosen):
                outputs[i] = one_of(output, row, lengths[i])
    return outputs


class QuickLinear(TorchFunctionMode):
    """Within it, linear layers that are read, not trained, are oneDNN's where those are faster.

    PyTorch's own products in float32 are MKL's, which on some processors leaves half of what they
    can do. The results are the same but for rounding.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call PyTorch's function, or for a linear layer oneDNN's."""
        if func is F.linear and fits_onednn(*args, **(kwargs or {})) and has_quick_onednn():
            func = onednn_linear
        return func(*args, **(kwargs or {}))


def onednn_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` by the product that `torch.compile` calls, and PyTorch by itself does not."""
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


def fits_onednn(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Say whether `onednn_linear` takes these: in float32 on the CPU, without gradients."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    given = [x for x in (input, weight, bias) if x is not None]
    return all(x.device.type == "cpu" and x.dtype == torch.float32 for x in given)


@cache
def has_quick_onednn() -> bool:
    """Measure, once, whether oneDNN's product is faster here by more than a tenth."""
    if not torch.backends.mkldnn.is_available():
        return False
    rows, weight = torch.ones(1024, 384), torch.ones(1536, 384)  # of MiniLM's shapes
    with torch.no_grad():
        by_pytorch = quickest(lambda: F.linear(rows, weight))
        return quickest(lambda: onednn_linear(rows, weight)) < 0.9 * by_pytorch


def quickest(function: Callable[[], Any], device: str = "cpu", calls: int = 5) -> float:
    """The shortest of a few calls, in seconds, after one that is not counted.

    What disturbs a measurement only ever makes it longer, so the shortest is the least disturbed.
    """
    times = []
    for _ in range(calls + 1):
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def one_of(output: Any, row: int, length: int) -> Any:
    """A text's part of a batch's output: no loss, and nothing of its padding."""
    of_tokens = hasattr(output, "start_logits") or output.logits.ndim == 3
    own = [x[row, :length] if of_tokens else x[row] for x in output[1:]]
    return type(output)(None, *(x.float().cpu() for x in own))


def batches_of_tokens(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices of like lengths, the longest first, so that no batch has more tokens than asked."""
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not batches or (len(batches[-1]) + 1) * longest > batch_tokens:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    return batches


def word_logits(model: Any, tokenizer: Any, sentences: Sequence[Sequence[str]]) -> list[Tensor]:
    """The logits of each word, from its first piece: for each sentence `[words, num_labels]`.

    A sentence longer than the model's positions is read in windows, and each token counts in the
    window in which it stands deepest (`stitch_windows`).
    """
    limit, stride = model.config.max_position_embeddings, 64
    read = [encode_words(tokenizer, words, limit, stride) for words in sentences]
    examples = [example for windows in read for example, _ in windows]
    outputs = iter(read_examples(model, examples, tokenizer.pad_token_id))
    found = []
    for words, windows in zip(sentences, read, strict=True):
        *starts, end = accumulate((len(ids_of(tokenizer, word)) for word in words), initial=0)
        vectors = [next(outputs).logits[1:-1] for _ in windows]  # without [CLS] and [SEP]
        found.append(stitch_windows(vectors, end, min(stride, limit - 3))[starts])
    return found


def predict_tags(
    model: Any, tokenizer: Any, sentences: Sequence[Sequence[str]], names: Sequence[str]
) -> list[list[str]]:
    """The tag of each word of each sentence; `names` are the tags by label."""
    logits = word_logits(model, tokenizer, sentences)
    return [[names[int(i)] for i in scores.argmax(dim=-1)] for scores in logits]


def pseudo_tag(
    model: Any,
    tokenizer: Any,
    sentences: Sequence[Sequence[str]],
    names: Sequence[str],
    threshold: float = 0.95,
) -> list[tuple[Sequence[str], list[str]]]:
    """`pseudo_label` for tags: `(words, tags)` of the sentences every word of which is sure."""
    sure: list[tuple[Sequence[str], list[str]]] = []
    for words, scores in zip(sentences, word_logits(model, tokenizer, sentences), strict=True):
        probabilities, labels = scores.softmax(dim=-1).max(dim=-1)
        if probabilities.min() >= threshold:
            sure.append((words, [names[int(label)] for label in labels]))
    return sure


class Answer(NamedTuple):
    """A span of a passage and its score; an empty text at (0, 0) says that there is no answer."""

    text: str
    start: int
    end: int
    score: float


def answer(
    model: Any,
    tokenizer: Any,
    question: str,
    passage: str,
    n_best: int = 5,
    max_length: int = 384,
    stride: int = 128,
) -> list[Answer]:
    """The best answers to a question from a passage of any length, best first."""
    examples, offsets = span_examples(tokenizer, question, passage, None, max_length, stride)
    fields = ("input_ids", "token_type_ids")
    bare = [{name: example[name] for name in fields} for example in examples]
    outputs = read_examples(model, bare, tokenizer.pad_token_id)
    pad = nn.utils.rnn.pad_sequence
    starts, ends = (
        pad([getattr(o, name) for o in outputs], batch_first=True, padding_value=-math.inf)
        for name in ("start_logits", "end_logits")
    )
    padded = [[*spans, *[None] * (starts.shape[1] - len(spans))] for spans in offsets]
    spans = best_spans(starts, ends, padded, n_best)
    return [Answer(passage[start:end], start, end, score) for start, end, score in spans]


def exact_match_and_f1(predicted: str, right: str) -> tuple[float, float]:
    """How well an answer's text agrees with the right one, as SQuAD counts: exactly, and F1.

    Case, punctuation, articles and white space do not count. F1 is over words. Without an answer
    both texts are empty, and agree or do not.

    Source: Rajpurkar et al. 2016, section 6.1, and their `evaluate-v2.0.py`.
    """
    mine, theirs = (answer_words(text) for text in (predicted, right))
    exact = float(mine == theirs)
    common = sum((Counter(mine) & Counter(theirs)).values())
    if not mine or not theirs:
        return exact, exact
    return exact, 2 * common / (len(mine) + len(theirs))


def answer_words(text: str) -> list[str]:
    """The words of an answer that count."""
    text = "".join(mark for mark in text.lower() if mark not in string.punctuation)
    return [word for word in text.split() if word not in ("a", "an", "the")]


# --- given: other words by translation ---


class BackTranslation:
    """Writes a text in other words: into another language and back. `augment` takes it as a model.

    Args:
        there, back: from text to text, such as two `translator`s.
    """

    def __init__(self, there: Callable[[str], str], back: Callable[[str], str]) -> None:
        self.there, self.back = there, back

    def __call__(self, text: str) -> str:
        return self.back(self.there(text))


def translator(name_or_path: str | Path) -> Callable[[str], str]:
    """A translation model that is in the local cache, such as `Helsinki-NLP/opus-mt-en-de`.

    Raises:
        FileNotFoundError: it is not there; nothing is downloaded.
    """
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer  # slow to import

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name_or_path, local_files_only=True)
        model: Any = AutoModelForSeq2SeqLM.from_pretrained(name_or_path, local_files_only=True)
    except OSError as error:
        raise FileNotFoundError(
            f"{name_or_path} is no folder with a translation model, and not in the local Hugging "
            "Face cache"
        ) from error

    def translate(text: str) -> str:
        ids = model.generate(**tokenizer(text, return_tensors="pt"))
        return tokenizer.decode(ids[0], skip_special_tokens=True)

    return translate


# --- given: why a model decided, for all kinds of model, and as a picture ---


def read_text(
    model: Any, tokenizer: Any, text: str | tuple[str, str]
) -> tuple[dict[str, Tensor], list[int], list[str]]:
    """A text or a pair as a batch of one, and the places and pieces that an impact is asked for.

    Returns:
        `(batch, places, pieces)`: the arguments of the model's forward, `[1, seq]` each; the places
        of all tokens but `[CLS]` and `[SEP]`; and these tokens' pieces.

    Raises:
        ValueError: `text` has no token.
    """
    texts = (text,) if isinstance(text, str) else text
    read = tokenizer(*texts)
    ends = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    places = [place for place, i in enumerate(read["input_ids"]) if i not in ends]
    if not places:
        raise ValueError(f"text is {text!r}, but must have at least one token")
    device = device_of(model)
    batch = {
        name: torch.tensor([read[name]], device=device)
        for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    ids = [read["input_ids"][place] for place in places]
    return batch, places, tokenizer.convert_ids_to_tokens(ids)


def checked_target(target: int | None, logits: Tensor) -> int:
    """The class that is looked at: `target`, or the likeliest of `logits`, `[num_labels]`.

    Raises:
        ValueError: there is no such class.
    """
    if target is None:
        return int(logits.argmax())
    allowed = f"0 to {len(logits) - 1}, or None"
    require(0 <= target < len(logits), "target", target, allowed)
    return target


class OneDecision(nn.Module):
    """What a tagger or a span model decides at one place of one text, as a classifier of texts.

    So `occlusion_impact` and `gradient_impact` explain these models too. When a token before the
    place is deleted, the place moves with its token. The decided token itself cannot be deleted
    without the decision; instead it is masked.

    Args:
        model: `TokenClassifier` or `SpanClassifier`.
        input_ids: `[1, seq]`, the whole text.
        places: the tagged token's; or an answer's first and last token's.
        mask_token_id: the tokenizer's.
    """

    def __init__(
        self, model: Any, input_ids: Tensor, places: Sequence[int], mask_token_id: int
    ) -> None:
        super().__init__()
        self.model, self.bert = model, model.bert
        self.input_ids, self.places, self.mask_token_id = input_ids, places, mask_token_id
        self.train(model.training)  # not a change, but the mode to go back to

    def forward(self, **batch: Tensor) -> TaskOutput:
        """`logits` are the tag's, `[batch, num_labels]`, or the answer's score, `[batch, 1]`."""
        rows = []
        for row in range(len(batch["input_ids"])):
            rows.append(self.decide({name: x[row : row + 1] for name, x in batch.items()}))
        return TaskOutput(None, torch.stack(rows))

    def decide(self, batch: dict[str, Tensor]) -> Tensor:
        """The logits of one text, from which one token may have been deleted."""
        places = list(self.places)
        if batch["input_ids"].shape[1] < self.input_ids.shape[1]:
            differs = batch["input_ids"] != self.input_ids[:, :-1]
            deleted = int(differs.long().argmax()) if differs.any() else len(differs[0])
            if deleted in places:
                batch = self.masked(batch, deleted)
            else:
                places = [place - (place > deleted) for place in places]
        output = self.model(**batch)
        if hasattr(output, "start_logits"):
            start, end = output.start_logits[0, places[0]], output.end_logits[0, places[1]]
            return (start + end)[None]
        return output.logits[0, places[0]]

    def masked(self, batch: dict[str, Tensor], deleted: int) -> dict[str, Tensor]:
        """The batch with the deleted token put back as `[MASK]`."""
        filled = {}
        for name, x in batch.items():
            fill = torch.full_like(x[:, :1], self.mask_token_id)
            fill = fill if name == "input_ids" else x[:, deleted - 1 : deleted]
            filled[name] = torch.cat([x[:, :deleted], fill, x[:, deleted:]], dim=1)
        return filled


Method = Callable[..., list[Impact]]


def tag_impact(
    model: Any,
    tokenizer: Any,
    text: str,
    place: int,
    target: int | None = None,
    method: Method | None = None,
) -> list[Impact]:
    """What each token did to the tag of one token.

    Args:
        model: `TokenClassifier`.
        place: the token's, in the list that is returned.
        target: the label whose logit is looked at; the likeliest one when None.
        method: `occlusion_impact`, which is taken when None, or `gradient_impact`.
    """
    batch, places, _ = read_text(model, tokenizer, text)
    allowed = f"0 to {len(places) - 1}"
    require(0 <= place < len(places), "place", place, allowed)
    decision = OneDecision(model, batch["input_ids"], [places[place]], tokenizer.mask_token_id)
    return (method or occlusion_impact)(decision, tokenizer, text, target)


def span_impact(
    model: Any,
    tokenizer: Any,
    question: str,
    passage: str,
    method: Method | None = None,
) -> list[Impact]:
    """What each token of question and passage did to the score of the best answer.

    Args:
        model: `SpanClassifier`; question and passage must fit into one window.
        method: `occlusion_impact`, which is taken when None, or `gradient_impact`.
    """
    best = answer(model, tokenizer, question, passage, 1, model.config.max_position_embeddings)[0]
    span = (best.start, best.end) if best.text else None
    limit = model.config.max_position_embeddings
    examples, _ = span_examples(tokenizer, question, passage, span, limit)
    places = [examples[0][name] for name in ("start_positions", "end_positions")]
    batch, _, _ = read_text(model, tokenizer, (question, passage))
    decision = OneDecision(model, batch["input_ids"], places, tokenizer.mask_token_id)
    return (method or occlusion_impact)(decision, tokenizer, (question, passage), 0)


def merge_pieces(impacts: Iterable[Impact]) -> list[Impact]:
    """Impacts by word: a word's is the sum of its pieces'."""
    words: list[Impact] = []
    for piece, impact in impacts:
        if piece.startswith("##") and words:
            word, before = words.pop()
            words.append((word + piece[2:], before + impact))
        else:
            words.append((piece, impact))
    return words


@dataclass(frozen=True)
class ImpactPicture:
    """What each word did to a decision, for people: the text itself, marked.

    A word that speaks for the decision is blue, has a solid line below it and a plus; one that
    speaks against it is orange, has a dotted line and a minus. The stronger, the darker. So it can
    be read without color, and by a screen reader. Printed, it is the text with the signed impact
    behind each strong word.

    Args:
        impacts: by piece or by word; pieces are merged.
        decision: what was decided: the heading.
    """

    impacts: Sequence[Impact]
    decision: str = ""

    @property
    def words(self) -> list[Impact]:
        """The impacts by word."""
        return merge_pieces(self.impacts)

    @property
    def strongest(self) -> float:
        """The largest impact, whatever its sign."""
        return max((abs(impact) for _, impact in self.words), default=0.0)

    def marked(self, impact: float) -> str:
        """The impact as it is written behind a word; nothing below a tenth of the strongest."""
        if abs(impact) < 0.1 * self.strongest or self.strongest == 0:
            return ""
        return f"{impact:+.2g}".replace("-", "−")

    def __str__(self) -> str:
        text = " ".join(
            f"{word}[{self.marked(impact)}]" if self.marked(impact) else word
            for word, impact in self.words
        )
        lines = [self.decision] if self.decision else []
        lines += textwrap.wrap(text, 96, break_long_words=False, break_on_hyphens=False)
        return "\n".join([*lines, "[+] speaks for it, [−] against it; small impacts are left out"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        words = " ".join(self.html_word(word, impact) for word, impact in self.words)
        heading = f"<b>{html.escape(self.decision)}</b>" if self.decision else ""
        return (
            '<div class="bertlab" style="max-width:46em;line-height:2.6">'
            f'<div style="line-height:1.5">{heading}</div><div>{words}</div>'
            '<div style="line-height:1.5;font-size:.9em">Blue, solid line, plus: speaks for it. '
            "Orange, dotted line, minus: speaks against it. Small impacts are unmarked.</div></div>"
        )

    def html_word(self, word: str, impact: float) -> str:
        """One word, marked by its impact."""
        mark, text = self.marked(impact), html.escape(word)
        if not mark:
            return f"<span>{text}</span>"
        color, line = ("31,111,235", "solid") if impact > 0 else ("230,120,20", "dotted")
        alpha = 0.08 + 0.37 * abs(impact) / self.strongest  # pale enough for black or white text
        style = (
            f"background:rgba({color},{alpha:.2f});border-bottom:3px {line} rgb({color});"
            "padding:.1em .15em;white-space:nowrap"
        )
        return (
            f'<span style="{style}">{text}<sup style="font-size:.7em;margin-left:.2em">{mark}</sup>'
            "</span>"
        )
