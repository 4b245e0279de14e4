"""Chapter 5: the heads of pretraining, and the names and files of real checkpoints."""

import copy
import dataclasses
import importlib
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
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
)

# --- shared by the exercises ---

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 12,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def transformers_config(config: Any) -> Any:
    """Return Transformers' configuration of the same model."""
    from transformers.models.bert.configuration_bert import BertConfig

    return BertConfig.from_dict(config.to_hf())


@lru_cache(maxsize=32)
def _config_to_read(config: Any) -> Any:
    """The same, made once for each configuration: nobody may change it."""
    return transformers_config(config)


def built(module: str, name: str, config: Any) -> Any:
    """Build a model of the package as it is now: the student's own, or its stand-in."""
    homes = {"BertModel": "4.5", "BertForPreTraining": "5.2"}
    try:
        return getattr(importlib.import_module(f"bertlab.{module}"), name)(config)
    except NotImplementedError:  # a package of stubs, without stand-ins
        if name not in homes:
            raise
        return stand_in(homes[name], name)(config)


def stand_in(exercise_id: str, name: str) -> Any:
    """Return the reference of another exercise's part."""
    from bertlab.course.exercise import load  # not above: a sandbox has no list of exercises

    return load(exercise_id).reference[name]


def model_of(name: str, fields: Mapping[str, Any]) -> Any:
    """Build one of the three models by its name, in eval mode."""
    from bertlab.weights import WithoutInitialization

    module = "encoder" if name == "BertModel" else "heads"
    with WithoutInitialization():  # every parameter gets a value afterwards
        return built(module, name, bert_config(**fields)).eval()


@lru_cache(maxsize=32)
def _shapes(fields: tuple[tuple[str, Any], ...]) -> dict[str, torch.Size]:
    from transformers import BertForPreTraining

    with torch.device("meta"):
        model = BertForPreTraining(transformers_config(bert_config(**dict(fields))))
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def drawn(rng: np.random.Generator, fields: Mapping[str, Any]) -> Tensor:
    """Draw the tensors of a `BertForPreTraining`, in one row; see `unpacked`."""
    state = {}
    for name, shape in _shapes(tuple(sorted(fields.items()))).items():
        if name.endswith("LayerNorm.weight"):
            state[name] = normal(rng, *shape, scale=0.3, mean=1.0)
        elif len(shape) == 1:
            state[name] = normal(rng, *shape, scale=0.3)
        else:
            peaked = 2.0 if re.search(r"query|key|word_embeddings", name) else 1.0
            state[name] = normal(rng, *shape, scale=peaked * shape[-1] ** -0.5)
    return torch.cat([tensor.flatten() for tensor in state.values()])


def unpacked(numbers: Tensor, fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """Cut a row of numbers into tensors by Hugging Face's names; tied ones are equal."""
    shapes = _shapes(tuple(sorted(fields.items())))
    pieces = numbers.split([shape.numel() for shape in shapes.values()])
    state = {
        name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
    state["cls.predictions.decoder.bias"] = state["cls.predictions.bias"]
    return state


def in_our_names(numbers: Tensor, fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """Cut a row of numbers into tensors by the names of this course."""
    names = paired_names(fields["num_hidden_layers"])
    return {names[theirs]: tensor for theirs, tensor in unpacked(numbers, fields).items()}


def last(tensor: Tensor) -> float:
    """Return the last number of a tensor."""
    return tensor.detach().flatten()[-1].item()


Fingerprint = list[tuple[str, float, float]]


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> Fingerprint:
    """Return the sum and the last number of each tensor, in the order of the names."""
    return [
        (name, round(tensor.detach().double().sum().item(), 4), round(last(tensor), 5))
        for name, tensor in sorted(named)
    ]


def fill(module: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Give a module the parameters of `state`, and return the names of those that it lacks.

    Raises:
        ValueError: one of them has another shape.
    """
    first, absent = next(iter(state.values())), []
    module.to(device=first.device, dtype=first.dtype)
    for name, value in state.items():
        try:
            parameter = module.get_parameter(name)
        except AttributeError:
            absent.append(name)
            continue
        if parameter.shape != value.shape:
            raise ValueError(
                f"parameter `{name}` of {type(module).__name__} has shape "
                f"{tuple(parameter.shape)}, expected {tuple(value.shape)}"
            )
        parameter.data.copy_(value)
    return absent


def parameter_or_nothing(module: nn.Module, name: str, like: Tensor) -> Tensor:
    """Return a parameter; where there is none, zeros that take part in nothing."""
    try:
        return module.get_parameter(name)
    except AttributeError:
        return torch.zeros_like(like, requires_grad=True)


def of_the_head(model: nn.Module) -> tuple[bool, int]:
    """Say whether a model's head has the table's own parameter, and how many numbers it learns."""
    own: Any = model
    tied = own.mlm_head.decoder.weight is own.bert.embeddings.word.weight
    return tied, sum(p.numel() for p in model.parameters())


@contextmanager
def quiet() -> Iterator[None]:
    """Without Transformers' progress bars, and without what is logged about missing heads."""
    from transformers.utils import logging as theirs

    if logging.root.manager.disable >= logging.WARNING:  # inside another `quiet`
        yield
        return
    bars, verbosity = theirs.is_progress_bar_enabled(), theirs.get_verbosity()
    level = logging.root.manager.disable
    theirs.disable_progress_bar()
    theirs.set_verbosity_error()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
        theirs.set_verbosity(verbosity)
        if bars:
            theirs.enable_progress_bar()


# --- 5.1: the MLM head ---


class MLMHead(nn.Module):
    """Transformers' `BertLMPredictionHead`, tied to a given table."""

    _theirs: Any

    def __init__(self, config: Any, word_embeddings: nn.Embedding) -> None:
        super().__init__()
        from transformers.models.bert.modeling_bert import BertLMPredictionHead

        theirs = BertLMPredictionHead(_config_to_read(config))
        self.transform, self.norm = theirs.transform.dense, theirs.transform.LayerNorm
        self.decoder = theirs.decoder
        self._tie(word_embeddings)
        # Not registered as a module: its layers are this module's, under this module's names.
        object.__setattr__(self, "_theirs", theirs)

    def _tie(self, word_embeddings: nn.Embedding) -> None:
        self.decoder.weight = word_embeddings.weight

    def forward(self, hidden_states: Tensor, positions: Tensor | None = None) -> Tensor:
        """Score the vocabulary, at the chosen positions if there are any."""
        if positions is not None:
            hidden_states = hidden_states[positions]
        return self._scores(hidden_states)

    def _scores(self, hidden_states: Tensor) -> Tensor:
        theirs = self._theirs
        theirs.transform.dense, theirs.transform.LayerNorm = self.transform, self.norm
        theirs.decoder = self.decoder
        return theirs(hidden_states)


class _OneLayer(MLMHead):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        del self.transform, self.norm

    def _scores(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(hidden_states)


class _TransformUnused(MLMHead):
    def _scores(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(hidden_states)


class _NotActivated(MLMHead):
    def _scores(self, hidden_states: Tensor) -> Tensor:
        self._theirs.transform.transform_act_fn = nn.Identity()
        return super()._scores(hidden_states)


class _AlwaysGelu(MLMHead):
    def _scores(self, hidden_states: Tensor) -> Tensor:
        self._theirs.transform.transform_act_fn = F.gelu
        return super()._scores(hidden_states)


class _NotNormed(MLMHead):
    def _scores(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self._theirs.transform.transform_act_fn(self.transform(hidden_states)))


class _NormedFirst(MLMHead):
    def _scores(self, hidden_states: Tensor) -> Tensor:
        normed = self.norm(self.transform(hidden_states))
        return self.decoder(self._theirs.transform.transform_act_fn(normed))


class _DefaultEps(MLMHead):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norm.eps = 1e-5


class _Copied(MLMHead):
    def _tie(self, word_embeddings: nn.Embedding) -> None:
        self.decoder.weight = nn.Parameter(word_embeddings.weight.detach().clone())


class _WithoutBias(MLMHead):
    def _tie(self, word_embeddings: nn.Embedding) -> None:
        super()._tie(word_embeddings)
        self.decoder.register_parameter("bias", None)


class _EverywhereAnyway(MLMHead):
    def forward(self, hidden_states: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states)


class _ElsewhereZero(MLMHead):
    def forward(self, hidden_states: Tensor, positions: Tensor | None = None) -> Tensor:
        scores = super().forward(hidden_states)
        return scores if positions is None else scores * positions[..., None]


class _PlaceByPlace(MLMHead):
    def forward(self, hidden_states: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            return super().forward(hidden_states)
        return super().forward(hidden_states.transpose(0, 1), positions.T)


def _head_cases(rng: np.random.Generator) -> Iterator[Case]:
    def inputs(batch: int, seq: int, size: float = 1.0, **changes: Any) -> dict[str, Any]:
        fields = {**SIZES, **changes}
        width, pieces = fields["hidden_size"], fields["vocab_size"]
        table = normal(rng, pieces, width, scale=2 * width**-0.5)
        state = {
            "transform.weight": normal(rng, width, width, scale=size * width**-0.5),
            "transform.bias": normal(rng, width, scale=0.3 * size),
            "norm.weight": normal(rng, width, scale=0.3, mean=1.0),
            "norm.bias": normal(rng, width, scale=0.3),
            "decoder.weight": table,
            "decoder.bias": normal(rng, pieces),
        }
        return {
            "fields": fields,
            "state": state,
            "hidden_states": normal(rng, batch, seq, width),
            "cotangent": normal(rng, batch, seq, pieces),
        }

    def chosen(given: dict[str, Any], share: float) -> dict[str, Any]:
        shape = given["hidden_states"].shape[:2]
        return {**given, "positions": torch.from_numpy(rng.random(shape) < share)}

    yield Case("two texts, scores everywhere", inputs(2, 5))
    some = chosen(inputs(3, 6), 0.4)
    some["positions"][0, 3], some["positions"][2, 0] = True, True
    some["positions"][1, 5] = False
    yield Case("three texts, scores at some positions", some)
    yield Case("no position is chosen", chosen(inputs(2, 4), 0.0))
    yield Case("hidden_act is relu", inputs(2, 3, hidden_act="relu"))
    yield Case("hidden states of low variance after the transform", inputs(2, 4, size=1e-3))


def _head_probe(
    part: Any,
    fields: dict[str, Any],
    state: dict[str, Tensor],
    hidden_states: Tensor,
    cotangent: Tensor,
    positions: Tensor | None = None,
) -> dict[str, Any]:
    config = bert_config(**fields)
    words = nn.Embedding(config.vocab_size, config.hidden_size)
    head = part.MLMHead(config, words)
    both = nn.ModuleDict({"words": words, "head": head})
    named = {"words.weight": state["decoder.weight"]}
    absent = fill(both, {**named, **{f"head.{name}": value for name, value in state.items()}})
    hidden_states = hidden_states.clone().requires_grad_()
    scores = head(hidden_states)
    wanted = {
        name: parameter_or_nothing(head, name, value)
        for name, value in state.items()
        if name != "decoder.weight"
    }
    wanted |= {"the table of words": words.weight, "hidden_states": hidden_states}
    found = {
        "parameters that the head lacks": absent,
        "the decoder's weight is the table's own parameter": head.decoder.weight is words.weight,
        "numbers learned, the table among them": sum(p.numel() for p in both.parameters()),
        "scores": scores,
        **gradients(scores, cotangent, wanted),
    }
    if positions is not None:
        found["scores at the chosen positions"] = head(hidden_states, positions)
    return found


# --- 5.2: the pretraining model ---


class NSPHead(nn.Module):
    """Transformers' `BertOnlyNSPHead`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.bert.modeling_bert import BertOnlyNSPHead

        self.classifier = BertOnlyNSPHead(_config_to_read(config)).seq_relationship

    def forward(self, pooler_output: Tensor) -> Tensor:
        """Return two scores for each pair."""
        return self.classifier(pooler_output)


class BertForPreTraining(nn.Module):
    """Transformers' heads on the package's `BertModel`, with PyTorch's loss."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from bertlab.encoder import initialize_weights

        self.config = config
        self.bert = built("encoder", "BertModel", config)
        self.mlm_head = MLMHead(config, self._table())
        self.nsp_head = NSPHead(config)
        for head in (self.mlm_head, self.nsp_head):
            initialize_weights(head, config.initializer_range)

    def _table(self) -> nn.Embedding:
        return self.bert.embeddings.word

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> Any:
        """Read a batch, score words and pairs, and sum the losses of the labels given."""
        from bertlab.heads import BertForPreTrainingOutput

        read = self._read(
            input_ids, attention_mask, token_type_ids, output_hidden_states, output_attentions
        )
        words = self.mlm_head(read.last_hidden_state)
        pairs = self.nsp_head(self._of_the_text(read, attention_mask))
        losses = []
        if labels is not None:
            losses.append(self._word_loss(words, labels))
        if next_sentence_label is not None:
            losses.append(F.cross_entropy(pairs, self._pair_target(next_sentence_label)))
        return BertForPreTrainingOutput(
            self._joined(losses),
            self._returned(words, labels),
            pairs,
            read.hidden_states,
            read.attentions,
        )

    # What a wrong version does in another way.

    def _read(self, input_ids: Tensor, mask: Any, token_types: Any, *wishes: bool) -> Any:
        return self.bert(input_ids, mask, token_types, *wishes)

    def _of_the_text(self, read: Any, attention_mask: Tensor | None) -> Tensor:
        return read.pooler_output

    def _word_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())

    def _pair_target(self, label: Tensor) -> Tensor:
        return label

    def _joined(self, losses: list[Tensor]) -> Tensor | None:
        return torch.stack(losses).sum() if losses else None

    def _returned(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        return scores


class _OwnTable(BertForPreTraining):
    def _table(self) -> nn.Embedding:
        return nn.Embedding(self.config.vocab_size, self.config.hidden_size)


class _MaskForgotten(BertForPreTraining):
    def _read(self, input_ids: Tensor, mask: Any, token_types: Any, *wishes: bool) -> Any:
        return self.bert(input_ids, None, token_types, *wishes)


class _TypesForgotten(BertForPreTraining):
    def _read(self, input_ids: Tensor, mask: Any, token_types: Any, *wishes: bool) -> Any:
        return self.bert(input_ids, mask, None, *wishes)


class _WishesForgotten(BertForPreTraining):
    def _read(self, input_ids: Tensor, mask: Any, token_types: Any, *wishes: bool) -> Any:
        return self.bert(input_ids, mask, token_types)


class _Unpooled(BertForPreTraining):
    def _of_the_text(self, read: Any, attention_mask: Tensor | None) -> Tensor:
        return read.last_hidden_state[:, 0]


class _MeanPooled(BertForPreTraining):
    def _of_the_text(self, read: Any, attention_mask: Tensor | None) -> Tensor:
        return read.last_hidden_state.mean(dim=1)


class _AllPlaces(BertForPreTraining):
    def _word_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return super()._word_loss(scores, labels.clamp(min=0))


class _PaddingIgnored(BertForPreTraining):
    def _word_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return super()._word_loss(scores, labels.masked_fill(labels == 0, -100))


class _Shifted(BertForPreTraining):
    def _word_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return super()._word_loss(scores[:, :-1], labels[:, 1:])


class _SummedUp(BertForPreTraining):
    def _word_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return super()._word_loss(scores, labels) * (labels != -100).sum()


class _TextByText(BertForPreTraining):
    def _word_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        texts = [F.cross_entropy(*text) for text in zip(scores, labels, strict=True)]
        return torch.stack(texts).mean()


class _Inverted(BertForPreTraining):
    def _pair_target(self, label: Tensor) -> Tensor:
        return 1 - label


class _WordsOnly(BertForPreTraining):
    def _joined(self, losses: list[Tensor]) -> Tensor | None:
        return losses[0] if losses else None


class _Averaged(BertForPreTraining):
    def _joined(self, losses: list[Tensor]) -> Tensor | None:
        return torch.stack(losses).mean() if losses else None


class _BothOrNone(BertForPreTraining):
    def _joined(self, losses: list[Tensor]) -> Tensor | None:
        return sum(losses[1:], losses[0]) if len(losses) == 2 else None


class _LabelledOnly(BertForPreTraining):
    def _returned(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        return scores if labels is None else scores[labels != -100]


def _pretraining_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, lengths: list[int], labelled: list[int], **changes: Any) -> Case:
        fields, seq = {**SIZES, **changes}, max(lengths)
        mask = padding_mask(lengths, seq)
        labels = torch.full(mask.shape, -100)
        for text, count in enumerate(labelled):
            places = torch.from_numpy(rng.permutation(lengths[text])[:count])
            labels[text, places] = integers(rng, 1, fields["vocab_size"], count)
        labels[0, labels[0].argmax()] = 0  # the id of [PAD] is a label like any other
        inputs = {
            "fields": fields,
            "numbers": drawn(rng, fields),
            "batch": {
                "input_ids": integers(rng, 1, fields["vocab_size"], *mask.shape) * mask,
                "attention_mask": mask,
                "token_type_ids": (torch.arange(seq) >= seq // 2).long() * mask,
            },
            "labels": labels,
            "next_sentence_label": torch.arange(len(lengths)) % 3 % 2,
        }
        real = ("prediction_logits", "the first hidden state")
        return Case(name, inputs, dict.fromkeys(real, mask))

    yield case("padding, pairs, 1 to 4 labels in a text", [9, 6, 7, 9], [4, 1, 2, 3])
    yield case("one pair", [8], [3])
    yield case("two layers, relu", [5, 7], [2, 3], num_hidden_layers=2, hidden_act="relu")


_JUDGED_GRADIENTS = (
    "bert.embeddings.word.weight",
    "bert.encoder.layers.0.attention.query.weight",
    "bert.pooler.dense.weight",
    "mlm_head.transform.weight",
    "mlm_head.decoder.bias",
    "nsp_head.classifier.weight",
)


def _pretraining_probe(
    part: Any,
    fields: dict[str, Any],
    numbers: Tensor,
    batch: dict[str, Tensor],
    labels: Tensor,
    next_sentence_label: Tensor,
) -> dict[str, Any]:
    config, state = bert_config(**fields), in_our_names(numbers, fields)
    model = part.BertForPreTraining(config).eval()
    absent = fill(model, state)
    tied, learned = of_the_head(model)
    plain = model(**batch, output_hidden_states=True, output_attentions=True)
    words = model(**batch, labels=labels)
    pairs = model(**batch, next_sentence_label=next_sentence_label)
    both = model(**batch, labels=labels, next_sentence_label=next_sentence_label)
    beside, real = both.prediction_logits, batch["attention_mask"].bool()
    wanted = {name: parameter_or_nothing(model, name, state[name]) for name in _JUDGED_GRADIENTS}
    found = {f"gradient of {name}": torch.zeros_like(value) for name, value in wanted.items()}
    if isinstance(both.loss, Tensor):
        found = gradients(both.loss, torch.ones_like(both.loss), wanted)
    states = plain.hidden_states or ()
    nsp = fill(part.NSPHead(config), {"classifier.weight": state["nsp_head.classifier.weight"]})
    return {
        "parameters that it lacks": absent + nsp,
        "the head is tied to the table": tied,
        "numbers learned": learned,
        "config is the one given": model.config == config,
        "loss without labels is None": plain.loss is None,
        "loss with labels": words.loss,
        "loss with next_sentence_label": pairs.loss,
        "loss with both": both.loss,
        "prediction_logits": plain.prediction_logits,
        "prediction_logits beside labels": beside[real] if beside.ndim == 3 else beside,
        "seq_relationship_logits": plain.seq_relationship_logits,
        "hidden states, and attentions, when asked for": [len(states), len(plain.attentions or ())],
        "the first hidden state": states[0] if states else None,
        **found,
    }


# --- 5.3: the names of a checkpoint ---


def _same_parts(theirs: Any) -> dict[str, nn.Module]:
    """Pair the layers of Transformers' model with the names that this course's models have."""
    bert, cls = theirs.bert, theirs.cls
    tables = {
        name: getattr(bert.embeddings, f"{name}_embeddings")
        for name in ("word", "position", "token_type")
    }
    found = {f"bert.embeddings.{name}": table for name, table in tables.items()}
    found |= {"bert.embeddings.norm": bert.embeddings.LayerNorm}
    for number, layer in enumerate(bert.encoder.layer):
        prefix, mixing = f"bert.encoder.layers.{number}.", layer.attention.output
        asking = {f"attention.{name}": part for name, part in layer.attention.self.named_children()}
        asking.pop("attention.dropout", None)
        rest = {
            "attention.output": mixing.dense,
            "attention_norm": mixing.LayerNorm,
            "feed_forward.up": layer.intermediate.dense,
            "feed_forward.down": layer.output.dense,
            "feed_forward_norm": layer.output.LayerNorm,
        }
        found |= {prefix + name: part for name, part in (asking | rest).items()}
    transform = cls.predictions.transform
    return found | {
        "bert.pooler.dense": bert.pooler.dense,
        "mlm_head.transform": transform.dense,
        "mlm_head.norm": transform.LayerNorm,
        "mlm_head.decoder": cls.predictions.decoder,
        "nsp_head.classifier": cls.seq_relationship,
    }


@lru_cache(maxsize=32)
def paired_names(layers: int) -> dict[str, str]:
    """Return Hugging Face's name of every tensor and this course's, from the same modules."""
    from transformers import BertForPreTraining

    tiny = bert_config(**{**SIZES, "num_hidden_layers": layers})
    with torch.device("meta"):
        theirs = BertForPreTraining(transformers_config(tiny))
    ours = {part: name for name, part in _same_parts(theirs).items()}
    names = {}
    for path, module in theirs.named_modules():
        for kind, _ in module.named_parameters(recurse=False) if module in ours else ():
            names[f"{path}.{kind}"] = f"{ours[module]}.{kind}"
    # A parameter of the head itself, which is tied to the decoder's.
    return {**names, "cls.predictions.bias": names["cls.predictions.decoder.bias"]}


class _Loader:
    """Rename the tensors, and let PyTorch's `load_state_dict` put them into the model."""

    def names(self, config: Any) -> dict[str, str]:
        return dict(paired_names(config.num_hidden_layers))

    def load(
        self,
        model: Any,
        state_dict: Mapping[str, Tensor],
        strict: bool = True,
        assign: bool = False,
    ) -> Any:
        own = dict(model.named_parameters(remove_duplicate=False))
        wanted = {theirs: tensor for theirs, tensor in state_dict.items() if self.is_kept(theirs)}
        names = self.names(model.config)
        ours = {theirs: self.our_name(theirs, names, own) for theirs in wanted}
        report = self.report(own, ours, wanted)
        fitting = {
            theirs: name
            for theirs, name in ours.items()
            if name in own and own[name].shape == wanted[theirs].shape
        }
        self.check_ties(own, fitting, wanted)
        if strict:
            self.refuse_unless_complete(model, report, fitting, wanted)
        values = {name: wanted[theirs] for theirs, name in fitting.items()}
        self.put(model, own, values, assign)
        return report

    def is_kept(self, theirs: str) -> bool:
        return not theirs.endswith((".position_ids", ".token_type_ids"))

    def today(self, theirs: str) -> str:
        return re.sub("gamma$", "weight", re.sub("beta$", "bias", theirs))

    def our_name(self, theirs: str, names: Mapping[str, str], own: Mapping[str, Any]) -> str:
        theirs = self.today(theirs)
        for longer in (theirs, f"bert.{theirs}"):
            for name in (names.get(longer, ""), names.get(longer, "").removeprefix("bert.")):
                if name in own:
                    return name
        known = {*names.values(), *(name.removeprefix("bert.") for name in names.values())}
        return theirs if theirs in own and theirs not in known else ""

    def report(self, own: Any, ours: Mapping[str, str], wanted: Mapping[str, Tensor]) -> Any:
        from bertlab.weights import LoadReport

        found = {own[name] for name in ours.values() if name in own}
        return LoadReport(
            sorted(self.missing(own, found)),
            sorted(theirs for theirs, name in ours.items() if name not in own),
            sorted(
                theirs
                for theirs, name in ours.items()
                if name in own and own[name].shape != wanted[theirs].shape
            ),
        )

    def missing(self, own: Mapping[str, Any], found: set[Any]) -> list[str]:
        first: dict[Any, str] = {}
        for name in sorted(own, key=lambda name: "embeddings" not in name):
            first.setdefault(own[name], name)
        return [name for parameter, name in first.items() if parameter not in found]

    def check_ties(self, own: Any, fitting: Mapping[str, str], wanted: Any) -> None:
        seen: dict[Any, str] = {}
        for theirs, name in fitting.items():
            other = seen.setdefault(own[name], theirs)
            if not torch.equal(wanted[other], wanted[theirs]):
                raise ValueError(f"{other} and {theirs} are tied here, but their values differ")

    def refuse_unless_complete(self, model: Any, report: Any, fitting: Any, wanted: Any) -> None:
        lists = {name: names for name, names in vars(report).items() if names}
        if lists:
            raise ValueError(f"the state dict does not fit: {lists}")

    def put(self, model: nn.Module, own: Any, values: Mapping[str, Tensor], assign: bool) -> None:
        if not assign:
            model.load_state_dict(values, strict=False)
            return
        for name, value in values.items():
            own[name].data = value.to(own[name])

    def parts(self) -> dict[str, Any]:
        return {"hf_name_map": self.names, "load_hf_state_dict": self.load}


def _renaming(change: Callable[[str, str], str]) -> dict[str, Any]:
    """Both parts with other names on our side: change(Hugging Face's name, ours)."""

    class Renaming(_Loader):
        def names(self, config: Any) -> dict[str, str]:
            right = super().names(config)
            return {theirs: change(theirs, ours) for theirs, ours in right.items()}

    return Renaming().parts()


def _swap(first: str, second: str) -> Callable[[str, str], str]:
    def change(theirs: str, ours: str) -> str:
        pattern = f"{re.escape(first)}|{re.escape(second)}"
        return re.sub(pattern, lambda m: second if m[0] == first else first, ours)

    return change


class _TwelveLayers(_Loader):
    def names(self, config: Any) -> dict[str, str]:
        return dict(paired_names(12))


class _OneBiasName(_Loader):
    def names(self, config: Any) -> dict[str, str]:
        right = super().names(config)
        return {theirs: ours for theirs, ours in right.items() if theirs != "cls.predictions.bias"}


class _GammaIsBias(_Loader):
    def today(self, theirs: str) -> str:
        return re.sub("beta$", "weight", re.sub("gamma$", "bias", theirs))


class _TodayOnly(_Loader):
    def today(self, theirs: str) -> str:
        return theirs


class _PrefixedOnly(_Loader):
    def our_name(self, theirs: str, names: Mapping[str, str], own: Mapping[str, Any]) -> str:
        if theirs.startswith(("embeddings", "encoder", "pooler")):
            return ""
        return super().our_name(theirs, names, own)


class _ModelsWithBertOnly(_Loader):
    def our_name(self, theirs: str, names: Mapping[str, str], own: Mapping[str, Any]) -> str:
        if not any(name.startswith("bert.") for name in own):
            return ""
        return super().our_name(theirs, names, own)


class _TaskHeadsUnknown(_Loader):
    def our_name(self, theirs: str, names: Mapping[str, str], own: Mapping[str, Any]) -> str:
        return "" if theirs.startswith("classifier") else super().our_name(theirs, names, own)


class _BuffersKept(_Loader):
    def is_kept(self, theirs: str) -> bool:
        return True


class _NeverStrict(_Loader):
    def refuse_unless_complete(self, model: Any, report: Any, fitting: Any, wanted: Any) -> None:
        return None


class _AlwaysStrict(_Loader):
    def load(self, model: Any, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load(model, state_dict, True, assign)


class _PutThenRefused(_Loader):
    def refuse_unless_complete(self, model: Any, report: Any, fitting: Any, wanted: Any) -> None:
        values = {name: wanted[theirs] for theirs, name in fitting.items()}
        self.put(model, {}, values, False)
        super().refuse_unless_complete(model, report, fitting, wanted)


class _Silent(_Loader):
    """A list of the report that stays empty."""

    empty = ""

    def report(self, own: Any, ours: Mapping[str, str], wanted: Mapping[str, Tensor]) -> Any:
        return dataclasses.replace(super().report(own, ours, wanted), **{self.empty: []})


class _SilentOnShape(_Silent):
    empty = "wrong_shape"


class _SilentOnMissing(_Silent):
    empty = "missing"


class _SilentOnUnexpected(_Silent):
    empty = "unexpected"


class _EveryNameCounts(_Loader):
    def report(self, own: Any, ours: Mapping[str, str], wanted: Mapping[str, Tensor]) -> Any:
        right = super().report(own, ours, wanted)
        given = set(ours.values())
        return dataclasses.replace(right, missing=sorted(name for name in own if name not in given))


class _TheirNames(_Loader):
    def report(self, own: Any, ours: Mapping[str, str], wanted: Mapping[str, Tensor]) -> Any:
        right = super().report(own, ours, wanted)
        theirs = {name: their for their, name in paired_names(SIZES["num_hidden_layers"]).items()}
        named = [str(theirs.get(name, name)) for name in right.missing]
        return dataclasses.replace(right, missing=sorted(named))


class _LastTiedWins(_Loader):
    def check_ties(self, own: Any, fitting: Any, wanted: Any) -> None:
        return None


class _FilesType(_Loader):
    def put(self, model: nn.Module, own: Any, values: Mapping[str, Tensor], assign: bool) -> None:
        for name, value in values.items():
            own[name].data = value if assign else value.clone()


class _AlwaysShared(_Loader):
    def put(self, model: nn.Module, own: Any, values: Mapping[str, Tensor], assign: bool) -> None:
        super().put(model, own, values, True)


class _Tagger(nn.Module):
    """A model with a task head, as chapter 7's are."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.bert = config, built("encoder", "BertModel", config)
        self.classifier = nn.Linear(config.hidden_size, 3)


_TIED = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"
_QUERY = "bert.encoder.layer.0.attention.self.query.bias"
_POSITIONS = "bert.embeddings.position_embeddings.weight"

State = Mapping[str, Tensor]


def _without(state: State, *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name not in names}


def _bert_only(state: State) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("bert.")}


def _unprefixed(state: State) -> dict[str, Tensor]:
    return {name.removeprefix("bert."): tensor for name, tensor in _bert_only(state).items()}


def of_2018(state: State) -> dict[str, Tensor]:
    """Give LayerNorms the names that TensorFlow gave them."""
    gamma, beta = ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")
    return {name.replace(*gamma).replace(*beta): tensor for name, tensor in state.items()}


def _with_buffer(state: State) -> dict[str, Tensor]:
    return {**_without(state, *_TIED), "bert.embeddings.position_ids": torch.arange(12)[None]}


def _spoilt(state: State) -> dict[str, Tensor]:
    state = _without(state, _QUERY, "bert.pooler.dense.bias", *_TIED)
    state["bert.encoder.layer.7.output.dense.bias"] = state["bert.embeddings.LayerNorm.bias"] + 1
    state["bert.embeddings.norm.weight"] = state["bert.embeddings.LayerNorm.weight"] + 1  # ours
    state[_POSITIONS] = state[_POSITIONS][:9]
    return state


def _torn(state: State) -> dict[str, Tensor]:
    return {**state, _TIED[0]: state[_TIED[0]] + 1}


def _with_task(state: State) -> dict[str, Tensor]:
    table = state[_POSITIONS]
    return {**_bert_only(state), "classifier.weight": table[:3], "classifier.bias": table[4, :3]}


def _in_bfloat16(state: State) -> dict[str, Tensor]:
    return {name: tensor.bfloat16() for name, tensor in state.items()}


_STATES: dict[str, Callable[[State], dict[str, Tensor]]] = {
    "today's names, each tied tensor once, and position_ids": _with_buffer,
    "a BertModel's names, into one with heads": _unprefixed,
    "names of 2018": of_2018,
    "heads into a BertModel that has none": dict,
    "two missing, two unexpected, one of a wrong shape": _spoilt,
    "the same, and strict": _spoilt,
    "a tied tensor with two values": _torn,
    "a state dict in bfloat16": _in_bfloat16,
    "a model with a task head": _with_task,
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "a BertModel's names, into one with heads": {"strict": False},
    "heads into a BertModel that has none": {"strict": False, "model": "BertModel"},
    "two missing, two unexpected, one of a wrong shape": {"strict": False},
    "the same, and strict": {
        "mentions": ["position_embeddings", "pooler.dense.bias", "layer.7"],
    },
    "a tied tensor with two values": {"strict": False},
    "a model with a task head": {"model": "Tagger"},
}


def _names_cases(rng: np.random.Generator) -> Iterator[Case]:
    layers = [int(rng.integers(1, 6)), 13]
    yield Case(f"the names of models with {layers[0]} and 13 layers", {"layers": layers})
    for name in _STATES:
        inputs = {"numbers": drawn(rng, SIZES), "name": name, **_OPTIONS.get(name, {})}
        yield Case(name, inputs)


def _names_probe(
    part: Any,
    name: str = "",
    layers: Iterable[int] = (),
    numbers: Tensor | None = None,
    model: str = "BertForPreTraining",
    strict: bool = True,
    mentions: Iterable[str] = (),
) -> dict[str, Any]:
    if numbers is None:
        return {f"names for {count} layers": _names_given(part, count) for count in layers}
    ours = _Tagger(bert_config(**SIZES)) if model == "Tagger" else model_of(model, SIZES)
    ours.to(device=numbers.device, dtype=numbers.dtype)
    for parameter in ours.parameters():
        parameter.data.fill_(0.25)
    state = _STATES[name](unpacked(numbers, SIZES))
    given = {name: tensor.detach().clone() for name, tensor in state.items()}
    reports: list[Any] = []
    raised = error_of(
        lambda: reports.append(part.load_hf_state_dict(ours, given, strict=strict)),
        *mentions,
        kind=ValueError,
    )
    lists = [
        [sorted(one.missing), sorted(one.unexpected), sorted(one.wrong_shape)] for one in reports
    ]
    named = list(ours.named_parameters(remove_duplicate=False))
    found = {
        "error": raised,
        "missing, unexpected, wrong shape": lists,
        "the parameters keep their dtype": all(p.dtype == numbers.dtype for _, p in named),
        "the parameters (sum, last)": fingerprint(named),
    }
    for tensor in given.values():
        tensor.mul_(2)  # what shares the tensors' memory changes with them
    shared = fingerprint(named) != found["the parameters (sum, last)"]
    return {**found, "the model shares the tensors' memory": shared}


def _names_given(part: Any, layers: int) -> list[tuple[str, str | None]]:
    fields = {**SIZES, "num_hidden_layers": layers}
    names = part.hf_name_map(bert_config(**fields))
    asked = _shapes(tuple(sorted(fields.items())))
    return [(theirs, _either_way(theirs, names.get(theirs))) for theirs in asked]


def _either_way(theirs: str, ours: str | None) -> str | None:
    """The decoder's weight is one parameter with two names, and either is right."""
    if theirs == _TIED[0] and ours == "bert.embeddings.word.weight":
        return "mlm_head.decoder.weight"
    return ours


# --- 5.4: load and save a checkpoint ---


def _part_of(theirs: str) -> str:
    """The part to which one of Hugging Face's tensors belongs, such as `"cls.predictions"`."""
    pieces = theirs.removeprefix("bert.").split(".")
    return ".".join(pieces[: 2 if pieces[0] == "cls" else 1])


_READ: dict[tuple[Any, ...], Any] = {}


def read_by_transformers(name: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Load a folder by `transformers`, and return the model and the report.

    Raises:
        FileNotFoundError: there is no such folder, or a file is missing in it.
        ValueError: the weights are a pickle, damaged, or do not fit.
    """
    import transformers

    files = sorted(folder.glob("*")) if folder.is_dir() else []
    small = bool(files) and sum(file.stat().st_size for file in files) < 200_000
    key = (name, *(file.name.encode() + file.read_bytes() for file in files)) if small else None
    if key in _READ:  # a check reads the same few files many times
        return _READ[key]
    try:
        with quiet():
            read = getattr(transformers, name).from_pretrained(
                str(folder),
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
                use_safetensors=True,
            )
        if key is not None:
            if len(_READ) > 20:
                _READ.clear()
            _READ[key] = read
        return read
    except OSError as error:
        pickled = (folder / "pytorch_model.bin").exists()
        raise (ValueError if pickled else FileNotFoundError)(str(error)) from error
    except Exception as error:  # each way of being damaged has its own type
        raise ValueError(f"{folder} cannot be loaded: {error}") from error


class _Files:
    """Transformers' own loading and saving, with this course's models at the other end."""

    def load(self, model_class: Any, name_or_path: str | Path) -> Any:
        from bertlab.config import BertConfig

        folder = Path(name_or_path)
        theirs, missing = self.read(model_class.__name__, folder)
        content = json.loads((folder / "config.json").read_text("utf-8")) if folder.is_dir() else {}
        model = model_class(self.config(BertConfig.from_hf(content or theirs.config)))
        state = theirs.state_dict()
        mapped = {name: tensor for name, tensor in state.items() if name not in missing}
        self.put(model, mapped)
        return self.finish(model)

    def read(self, name: str, folder: Path) -> tuple[Any, set[str]]:
        """Return Transformers' model, and the names of what the checkpoint did not have."""
        theirs, info = read_by_transformers(name, folder)
        missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
        self.require_whole_parts(theirs, missing, unexpected)
        return theirs, missing

    def require_whole_parts(self, theirs: Any, missing: set[str], unexpected: set[str]) -> None:
        core = {"embeddings", "encoder"}
        tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
        begun = {_part_of(name) for name in theirs.state_dict() if name not in missing | tied}
        partial = [name for name in missing if _part_of(name) in core | begun]
        surplus = [name for name in unexpected if _part_of(name) in core]
        if partial or surplus:
            raise ValueError(f"missing: {sorted(partial)}, unexpected: {sorted(surplus)}")

    def config(self, right: Any) -> Any:
        return right

    def put(self, model: Any, state: Mapping[str, Tensor]) -> None:
        _Loader().load(model, state, strict=False)

    def finish(self, model: Any) -> Any:
        return model.eval()

    def save(self, model: Any, path: str | Path) -> None:
        import transformers

        theirs_class = getattr(transformers, type(model).__name__, None)
        tensors = self.in_their_names(model)
        with quiet():
            if theirs_class is None:
                self.write(model, tensors, Path(path))
                return
            theirs = theirs_class(transformers_config(model.config))
            theirs.to(next(model.parameters()).dtype)
            theirs.load_state_dict(tensors, strict=False)
            theirs.tie_weights()
            theirs.save_pretrained(path)

    def in_their_names(self, model: Any) -> dict[str, Tensor]:
        """Return the parameters, a tied one once, by the names a model of this class has there."""
        names = paired_names(model.config.num_hidden_layers)
        theirs = {ours: name for name, ours in names.items()}
        has_bert = hasattr(model, "bert")
        found = {}
        for name, parameter in model.named_parameters():
            longer = name if has_bert else f"bert.{name}"
            named = str(theirs.get(longer, name))
            found[named if has_bert else named.removeprefix("bert.")] = parameter.detach().cpu()
        return found

    def write(self, model: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """What `save_pretrained` writes, for a model that Transformers has no class for."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        whole = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
        config = transformers_config(model.config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)

    def parts(self) -> dict[str, Any]:
        return {"from_pretrained": self.load, "save_pretrained": self.save}


class _LeftInTraining(_Files):
    def finish(self, model: Any) -> Any:
        return model.train()


class _SizesOnly(_Files):
    def config(self, right: Any) -> Any:
        default = type(right)()
        kept = ("hidden_act", "layer_norm_eps")
        return dataclasses.replace(right, **{name: getattr(default, name) for name in kept})


class _DoneByHalves(_Files):
    def require_whole_parts(self, theirs: Any, missing: set[str], unexpected: set[str]) -> None:
        return None


class _HeadsRequired(_Files):
    def require_whole_parts(self, theirs: Any, missing: set[str], unexpected: set[str]) -> None:
        if missing or unexpected:
            raise ValueError(f"missing: {sorted(missing)}, unexpected: {sorted(unexpected)}")


class _FirstShardOnly(_Files):
    def put(self, model: Any, state: Mapping[str, Tensor]) -> None:
        shards = sorted(self.folder.glob("model-*.safetensors"))[:1]
        if shards:
            from safetensors.torch import load_file

            state = {name: state[name] for name in load_file(shards[0]) if name in state}
        super().put(model, state)

    def read(self, name: str, folder: Path) -> tuple[Any, set[str]]:
        self.folder = folder
        return super().read(name, folder)


class _OneFileOnly(_Files):
    def read(self, name: str, folder: Path) -> tuple[Any, set[str]]:
        if not (folder / "model.safetensors").exists() and not list(folder.glob("*.bin")):
            raise FileNotFoundError(f"{folder} has no model.safetensors")
        return super().read(name, folder)


class _FilesDtype(_Files):
    def finish(self, model: Any) -> Any:
        return model.to(torch.bfloat16).eval() if self.half else model.eval()

    def read(self, name: str, folder: Path) -> tuple[Any, set[str]]:
        theirs, missing = super().read(name, folder)
        content = json.loads((folder / "config.json").read_text("utf-8"))
        self.half = content.get("dtype") == "bfloat16"
        return theirs, missing


class _AnyErrorWillDo(_Files):
    def load(self, model_class: Any, name_or_path: str | Path) -> Any:
        try:
            return super().load(model_class, name_or_path)
        except FileNotFoundError as error:
            raise ValueError(str(error)) from None


class _OurNames(_Files):
    def save(self, model: Any, path: str | Path) -> None:
        self.write(model, {name: p.detach() for name, p in model.named_parameters()}, Path(path))


class _TiedTwice(_Files):
    def save(self, model: Any, path: str | Path) -> None:
        tensors = self.in_their_names(model)
        if hasattr(model, "mlm_head"):
            tensors[_TIED[0]] = model.mlm_head.decoder.weight.detach()
        self.write(model, tensors, Path(path))


class _WeightsOnly(_Files):
    def save(self, model: Any, path: str | Path) -> None:
        super().save(model, path)
        (Path(path) / "config.json").unlink()


class _OurConfig(_Files):
    def save(self, model: Any, path: str | Path) -> None:
        super().save(model, path)
        ours = json.dumps(dataclasses.asdict(model.config))
        (Path(path) / "config.json").write_text(ours, encoding="utf-8")


class _DefaultConfig(_Files):
    def save(self, model: Any, path: str | Path) -> None:
        super().save(model, path)
        plain = dataclasses.replace(model.config, hidden_act="gelu", layer_norm_eps=1e-12)
        content = json.dumps(plain.to_hf())
        (Path(path) / "config.json").write_text(content, encoding="utf-8")


class _Pickled(_Files):
    def save(self, model: Any, path: str | Path) -> None:
        super().save(model, path)
        (Path(path) / "model.safetensors").unlink()
        torch.save(self.in_their_names(model), Path(path) / "pytorch_model.bin")


class _FolderExpected(_Files):
    def save(self, model: Any, path: str | Path) -> None:
        if not Path(path).is_dir():
            raise FileNotFoundError(f"No such file or directory: {path}")
        super().save(model, path)


def _loading(wrong: type[_Files]) -> dict[str, Any]:
    return {"from_pretrained": wrong().load}


def _saving(wrong: type[_Files]) -> dict[str, Any]:
    return {"save_pretrained": wrong().save}


_ODD = {"hidden_act": "gelu_tanh", "layer_norm_eps": 0.01, "type_vocab_size": 3}


def _files_cases(rng: np.random.Generator) -> Iterator[Case]:
    def load_case(name: str, changes: Mapping[str, Any] | None = None, **writing: Any) -> Case:
        model = writing.pop("model", "BertForPreTraining")
        fields = {**SIZES, **(changes or {})}
        numbers = drawn(rng, fields)
        with tempfile.TemporaryDirectory() as place, quiet():
            folder = Path(place) / "checkpoint"
            write_checkpoint(folder, fields, unpacked(numbers, fields), **writing)
            files = {file.name: file.read_bytes() for file in folder.glob("*")}
        sent = {
            file: torch.frombuffer(bytearray(content), dtype=torch.uint8)
            for file, content in files.items()
        }
        inputs = {"fields": fields, "numbers": numbers, "files": sent, "model": model}
        return Case(name, inputs)

    def save_case(name: str, model: str, changes: Mapping[str, Any] | None = None) -> Case:
        fields = {**SIZES, **(changes or {})}
        return Case(name, {"fields": fields, "numbers": drawn(rng, fields), "model": model})

    yield load_case("one file, as Transformers writes it")
    yield load_case("a tanh-GELU, another eps, three token types", _ODD)
    yield load_case("several shards", shard="6KB")
    yield load_case("a file in bfloat16, with names of 2018", half=True, old=True)
    yield load_case("heads left out, into a BertModel", model="BertModel")
    yield load_case("no heads in the file", written="BertModel")
    yield load_case("pooler and NSP head left out", model="BertForMaskedLM")
    yield load_case("one tensor of a layer is missing", drop=(_QUERY,))
    yield load_case("half of a head is missing", drop=("cls.predictions.transform.dense.bias",))
    yield load_case("a shard is missing", shard="6KB", spoil="shard")
    yield load_case("a file cut short", spoil="cut")
    yield load_case("a pickle", spoil="pickle")
    yield load_case("no such folder", spoil="gone")
    yield save_case("save a model with both heads, load it in Transformers", "BertForPreTraining")
    yield save_case("save a BertModel with a tanh-GELU and another eps", "BertModel", _ODD)
    yield save_case("save a BertForMaskedLM", "BertForMaskedLM")


def _files_probe(
    part: Any,
    fields: dict[str, Any],
    numbers: Tensor,
    model: str,
    files: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place, quiet():
        if files is None:
            return _saved(part, fields, numbers, model, Path(place) / "runs" / "today")
        folder = Path(place) / "checkpoint"
        for name, content in files.items():
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(content.cpu().numpy().tobytes())
        return _loaded(part, unpacked(numbers, fields), model, folder)


@lru_cache(maxsize=8)
def _transformers_model(name: str, fields: tuple[tuple[str, Any], ...]) -> Any:
    import transformers

    return getattr(transformers, name)(transformers_config(bert_config(**dict(fields))))


def write_checkpoint(
    folder: Path,
    fields: Mapping[str, Any],
    state: Mapping[str, Tensor],
    written: str = "BertForPreTraining",
    shard: str = "1GB",
    half: bool = False,
    old: bool = False,
    drop: Iterable[str] = (),
    spoil: str = "",
) -> None:
    """Let Transformers write a checkpoint, and spoil it."""
    from safetensors.torch import load_file, save_file

    theirs = _transformers_model(written, tuple(sorted(fields.items())))
    theirs.to(dtype=torch.bfloat16 if half else torch.float32)
    prefix = "bert." if written == "BertModel" else ""
    theirs.load_state_dict(
        {name.removeprefix(prefix): tensor for name, tensor in state.items()}, strict=False
    )
    theirs.save_pretrained(folder, max_shard_size=shard)
    file = folder / "model.safetensors"
    if old or drop:
        tensors = {n: t for n, t in load_file(file).items() if n not in set(drop)}
        save_file(of_2018(tensors) if old else tensors, file, metadata={"format": "pt"})
    if spoil == "shard":
        sorted(folder.glob("model-*.safetensors"))[-1].unlink()
    if spoil == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    if spoil == "pickle":
        torch.save(load_file(file), folder / "pytorch_model.bin")
        file.unlink()
    if spoil == "gone":
        for path in folder.iterdir():
            path.unlink()


def _loaded(part: Any, state: State, name: str, folder: Path) -> dict[str, Any]:
    module = importlib.import_module(f"bertlab.{'encoder' if name == 'BertModel' else 'heads'}")
    models: list[Any] = []
    raised = error_of(
        lambda: models.append(part.from_pretrained(getattr(module, name), folder)), kind=ValueError
    )
    if not models:
        return {"error": raised["error"]}
    model = models[0]
    own = [parameter.detach().cpu() for parameter in model.parameters()]

    def is_there(tensor: Tensor) -> bool:
        given = tensor.float().cpu(), tensor.bfloat16().float().cpu()
        return any(p.shape == t.shape and torch.equal(p.float(), t) for p in own for t in given)

    return {
        "error": raised["error"],
        "it is in training mode": any(module.training for module in model.modules()),
        "its config": dataclasses.asdict(model.config),
        "types of its parameters": sorted({str(p.dtype) for p in own}),
        "tensors of the file that are in it": [n for n, t in state.items() if is_there(t)],
        "every parameter has numbers of a sensible size": all(
            bool(p.isfinite().all()) and bool((p.abs() < 10).all()) for p in own
        ),
        "the head is tied": of_the_head(model)[0] if hasattr(model, "mlm_head") else None,
    }


def _saved(part: Any, fields: Any, numbers: Tensor, name: str, folder: Path) -> dict[str, Any]:
    import transformers
    from safetensors import safe_open

    model = model_of(name, fields)
    ours = in_our_names(numbers, fields)
    if name == "BertModel":
        ours = {n.removeprefix("bert."): t for n, t in ours.items() if n.startswith("bert.")}
    fill(model, ours)
    raised = error_of(lambda: part.save_pretrained(model, folder))
    file = folder / "model.safetensors"
    found: dict[str, Any] = {
        "error": raised["error"],
        "model.safetensors is there": file.is_file(),
        "config.json is there": (folder / "config.json").is_file(),
    }
    if not file.is_file():
        return found
    with safe_open(file, framework="pt") as content:
        found["tensors in the file"] = len(list(content.keys()))
    loaded: list[Any] = []

    def read() -> None:
        transformers.AutoConfig.from_pretrained(folder)  # knows the model by the folder alone
        loaded.append(read_by_transformers(name, folder))

    found["Transformers refuses it"] = error_of(read)["error"] != "none"
    if not loaded:
        return found
    theirs, info = loaded[0]
    missing = sorted(set(info["missing_keys"]))
    kept = ("vocab_size", "hidden_act", "layer_norm_eps", "type_vocab_size")
    return {
        **found,
        "missing in Transformers": missing,
        "unexpected in Transformers": sorted(set(info["unexpected_keys"])),
        "the config in Transformers": [(one, getattr(theirs.config, one)) for one in kept],
        "what Transformers loads (sum, last)": fingerprint(
            (one, tensor) for one, tensor in theirs.state_dict().items() if one not in missing
        ),
    }


# --- 5.5: resize the vocabulary ---


@lru_cache(maxsize=8)
def _resizer(spread: float) -> Any:
    """A model of Transformers whose methods resize the layers that they are given."""
    from transformers import BertForPreTraining as Theirs

    fields = {**SIZES, "initializer_range": spread}
    return Theirs(transformers_config(bert_config(**fields)))


def transformers_resize(model: Any, vocab_size: int) -> None:
    """Resize the table and the head's bias as Transformers does."""
    config = dataclasses.replace(model.config, vocab_size=vocab_size)
    bert, theirs = getattr(model, "bert", model), _resizer(config.initializer_range)
    word, head = bert.embeddings.word, getattr(model, "mlm_head", None)
    with quiet():
        if head is not None:
            decoder = theirs._get_resized_lm_head(head.decoder, vocab_size, mean_resizing=False)
            head.decoder.bias = nn.Parameter(decoder.bias.detach())
            head.decoder.out_features = vocab_size
        table = theirs._get_resized_embeddings(word, vocab_size, mean_resizing=False)
        word.weight = nn.Parameter(table.weight.detach(), word.weight.requires_grad)
        word.num_embeddings = vocab_size
        if head is not None:
            head.decoder.weight = word.weight
    model.config = bert.config = config


def _resized(change: Callable[[Any, Any], None]) -> dict[str, Any]:
    """The reference, and then a change: change(the resized model, what it was before)."""

    def resize(model: Any, vocab_size: int) -> None:
        before = copy.deepcopy(model)
        transformers_resize(model, vocab_size)
        change(model, before)

    return {"resize_word_embeddings": resize}


def _of_bert_or_model(model: Any) -> Any:
    return getattr(model, "bert", model).embeddings.word


def _untie(model: Any, before: Any) -> None:
    if hasattr(model, "mlm_head"):
        model.mlm_head.decoder.weight = nn.Parameter(model.mlm_head.decoder.weight.detach().clone())


def _forget_head(model: Any, before: Any) -> None:
    if hasattr(model, "mlm_head"):
        model.mlm_head.decoder = before.mlm_head.decoder


def _redraw(model: Any, before: Any) -> None:
    _of_bert_or_model(model).weight.data.normal_(0, model.config.initializer_range)


def _zero_new(model: Any, before: Any) -> None:
    _of_bert_or_model(model).weight.data[before.config.vocab_size :] = 0


def _widen_new(model: Any, before: Any) -> None:
    _of_bert_or_model(model).weight.data[before.config.vocab_size :] *= 50


def _keep_bias(model: Any, before: Any) -> None:
    if hasattr(model, "mlm_head"):
        model.mlm_head.decoder.bias = before.mlm_head.decoder.bias


def _zero_bias(model: Any, before: Any) -> None:
    if hasattr(model, "mlm_head"):
        model.mlm_head.decoder.bias.data.zero_()


def _draw_bias(model: Any, before: Any) -> None:
    if hasattr(model, "mlm_head"):
        model.mlm_head.decoder.bias.data[before.config.vocab_size :] = 0.1


def _old_config(model: Any, before: Any) -> None:
    model.config = getattr(model, "bert", model).config = before.config


def _old_inner_config(model: Any, before: Any) -> None:
    if hasattr(model, "bert"):
        model.bert.config = before.config


def _on_a_copy(model: Any, vocab_size: int) -> Any:
    model = copy.deepcopy(model)
    transformers_resize(model, vocab_size)
    return model


def _grown_only(model: Any, vocab_size: int) -> None:
    if not 0 < vocab_size <= model.config.vocab_size:
        transformers_resize(model, vocab_size)


def _resize_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, new_size: int, **more: Any) -> Case:
        least = min(new_size, more.get("then", new_size), SIZES["vocab_size"])
        ids = integers(rng, 1, least, 2, 6)
        inputs = {"numbers": drawn(rng, SIZES), "new_size": new_size, "input_ids": ids}
        return Case(name, inputs | more)

    size = SIZES["vocab_size"]
    yield case("more pieces, both heads", size + 300)
    yield case("fewer pieces, both heads", size - 9)
    yield case("more pieces, a BertModel without a head", size + 300, model="BertModel")
    yield case("three more pieces, then five fewer", size + 3, then=size - 2)
    yield case("more pieces, a BertForMaskedLM", size + 300, model="BertForMaskedLM")


def _resize_probe(
    part: Any,
    numbers: Tensor,
    new_size: int,
    input_ids: Tensor,
    model: str = "BertForPreTraining",
    then: int | None = None,
) -> dict[str, Any]:
    ours, state = model_of(model, SIZES), in_our_names(numbers, SIZES)
    if model == "BertModel":
        state = {name.removeprefix("bert."): tensor for name, tensor in state.items()}
    fill(ours, state)
    refused = error_of(lambda: part.resize_word_embeddings(ours, 0), kind=ValueError)
    untouched = len(_of_bert_or_model(ours).weight), ours.config.vocab_size
    part.resize_word_embeddings(ours, new_size)
    if then is not None:
        part.resize_word_embeddings(ours, then)
    return {
        "vocab_size 0": refused["error"],
        "sizes after that": list(untouched),
        **_of_the_vocabulary(ours, input_ids),
    }


def _of_the_vocabulary(ours: Any, input_ids: Tensor) -> dict[str, Any]:
    """What a model's vocabulary looks like: sizes, ties, old rows, new rows, scores."""
    bert = getattr(ours, "bert", ours)
    table, old = bert.embeddings.word.weight, SIZES["vocab_size"]
    found: dict[str, Any] = {
        "vocab_size of config and of bert.config": [ours.config.vocab_size, bert.config.vocab_size],
        "rows of the table": len(table),
        "old rows": table.detach()[:old],
        "learned": table.requires_grad,
    }
    new = table.detach()[old:]
    if len(new) > 100:  # enough of them for their spread to be known
        spread = float(new.double().std() / ours.config.initializer_range)
        found["spread of the new rows is initializer_range"] = (
            "yes" if 0.8 < spread < 1.25 else "wider" if spread > 1 else "narrower"
        )
    if not hasattr(ours, "mlm_head"):
        return found
    decoder = ours.mlm_head.decoder
    fits = len(decoder.weight) == len(decoder.bias)
    with torch.no_grad():
        states = bert(input_ids).last_hidden_state
        scores = ours.mlm_head(states)[..., :old] if fits else None
    return {
        **found,
        "the head is tied": decoder.weight is table,
        "rows of the decoder, biases": [len(decoder.weight), len(decoder.bias)],
        "old biases": decoder.bias.detach()[:old],
        "new biases": decoder.bias.detach()[old:],
        "scores of the old pieces": scores,
    }


# --- 5.6: fill the mask ---


def torch_fill_mask(model: Any, tokenizer: Any, text: str, top_k: int = 5) -> Any:
    """The likeliest pieces by PyTorch's categorical distribution."""
    return _Filling()(model, tokenizer, text, top_k)


class _Filling:
    """What filling a mask takes, each step by itself."""

    def __call__(self, model: Any, tokenizer: Any, text: str, top_k: int = 5) -> Any:
        ids = tokenizer(text)["input_ids"]
        input_ids = torch.tensor([ids], device=next(model.parameters()).device)
        masks = self.masks(input_ids == tokenizer.mask_token_id)
        self.require_mask(masks, text)
        logits = self.run(model, input_ids)
        filled = [
            list(zip(self.pieces(tokenizer, pieces.tolist()), values.tolist(), strict=True))
            for values, pieces in zip(*self.best(logits, masks, top_k), strict=True)
        ]
        return self.shaped(filled)

    def masks(self, where: Tensor) -> Tensor:
        return where

    def require_mask(self, masks: Tensor, text: str) -> None:
        if not masks.any():
            raise ValueError(f"there is no mask in {text!r}")

    @torch.no_grad()
    def run(self, model: Any, input_ids: Tensor) -> Tensor:
        training = model.training
        try:
            return self.logits(model.train(self.mode(training)), input_ids)
        finally:
            model.train(self.mode_after(training))

    def mode(self, training: bool) -> bool:
        return False

    def mode_after(self, training: bool) -> bool:
        return training

    def logits(self, model: Any, input_ids: Tensor) -> Tensor:
        output = model(input_ids)
        return output.logits if hasattr(output, "logits") else output.prediction_logits

    def best(self, logits: Tensor, masks: Tensor, top_k: int) -> Any:
        return self.probabilities(logits[masks]).topk(top_k)

    def probabilities(self, scores: Tensor) -> Tensor:
        return torch.distributions.Categorical(logits=scores).probs

    def pieces(self, tokenizer: Any, ids: list[int]) -> Any:
        return tokenizer.convert_ids_to_tokens(ids)

    def shaped(self, filled: list[Any]) -> Any:
        return filled[0] if len(filled) == 1 else filled


class _Scores(_Filling):
    def probabilities(self, scores: Tensor) -> Tensor:
        return scores


class _Logarithms(_Filling):
    def probabilities(self, scores: Tensor) -> Tensor:
        return scores.log_softmax(dim=-1)


class _OverMasks(_Filling):
    def probabilities(self, scores: Tensor) -> Tensor:
        return scores.softmax(dim=0)


class _OverPositions(_Filling):
    def best(self, logits: Tensor, masks: Tensor, top_k: int) -> Any:
        return logits.softmax(dim=1)[masks].topk(top_k)


class _AmongTheBest(_Filling):
    def best(self, logits: Tensor, masks: Tensor, top_k: int) -> Any:
        values, ids = logits[masks].topk(top_k)
        return values.softmax(dim=-1), ids


class _FirstMask(_Filling):
    def masks(self, where: Tensor) -> Tensor:
        return where & (where.cumsum(dim=-1) == 1)


class _NeverRefused(_Filling):
    def require_mask(self, masks: Tensor, text: str) -> None:
        return None


class _ModeAsItIs(_Filling):
    def mode(self, training: bool) -> bool:
        return training


class _LeftInEval(_Filling):
    def mode_after(self, training: bool) -> bool:
        return False


class _Ids(_Filling):
    def pieces(self, tokenizer: Any, ids: list[int]) -> Any:
        return ids


class _Words(_Filling):
    def pieces(self, tokenizer: Any, ids: list[int]) -> Any:
        return [piece.removeprefix("##") for piece in tokenizer.convert_ids_to_tokens(ids)]


class _AlwaysNested(_Filling):
    def shaped(self, filled: list[Any]) -> Any:
        return filled


_WORDS = (
    "a",
    "the",
    "of",
    "array",
    "copy",
    "tensor",
    "returns",
    "gives",
    "first",
    "last",
    "axis",
    "is",
    "are",
    "sum",
    "mean",
    "view",
)
_VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS, "##s", "##ed", "##ing", "."]


def _fill_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, masks: int, top_k: int, **more: Any) -> Case:
        fields = {**SIZES, "vocab_size": len(_VOCABULARY), **more.pop("changes", {})}
        words = [str(word) for word in rng.choice(_WORDS, 6)]
        for place in rng.permutation(6)[:masks]:
            words[place] = "[MASK]"
        text = " ".join(words) + " ."
        inputs = {"fields": fields, "numbers": drawn(rng, fields), "text": text, "top_k": top_k}
        return Case(name, inputs | more)

    yield case("one mask, five pieces", 1, 5)
    yield case("three masks, four pieces each", 3, 4)
    yield case("every piece, word ends among them", 1, len(_VOCABULARY))
    yield case("a BertForMaskedLM", 2, 3, model="BertForMaskedLM")
    dropping = {"hidden_dropout_prob": 0.4, "attention_probs_dropout_prob": 0.4}
    yield case("a model in training, with dropout", 1, 5, changes=dropping, train=True)
    yield case("no mask", 0, 5)


def _fill_probe(
    part: Any,
    fields: dict[str, Any],
    numbers: Tensor,
    text: str,
    top_k: int,
    model: str = "BertForPreTraining",
    train: bool = False,
) -> dict[str, Any]:
    ours = model_of(model, fields)
    fill(ours, in_our_names(numbers, fields))
    ours.train(train)
    tokenizer = _tokenizer(_VOCABULARY)
    if "[MASK]" not in text:
        raised = error_of(lambda: part.fill_mask(ours, tokenizer, text, top_k), kind=ValueError)
        return {"error": raised["error"]}
    filled = part.fill_mask(ours, tokenizer, text, top_k)
    single = isinstance(filled[0], tuple)
    rows: Any = [filled] if single else filled
    return {
        "what is returned": "a list of pairs" if single else "a list of lists of pairs",
        "pieces": [[piece for piece, _ in row] for row in rows],
        "probabilities": torch.tensor(
            [[float(p) for _, p in row] for row in rows], dtype=numbers.dtype
        ),
        "the model is in training mode afterwards": ours.training,
    }


def _tokenizer(vocabulary: list[str]) -> Any:
    from bertlab.tokenizer import WordPieceTokenizer

    try:
        return WordPieceTokenizer(vocabulary)
    except NotImplementedError:  # a package of stubs, without stand-ins
        return stand_in("1.5", "WordPieceTokenizer")(vocabulary)


# --- 5.7: clinic ---


def torch_tie(model: Any) -> None:
    """Tie as Transformers does, and pad the bias with PyTorch's `pad`."""
    table, decoder = model.bert.embeddings.word.weight, model.mlm_head.decoder
    added = len(table) - len(decoder.bias)
    decoder.weight = table
    decoder.bias = nn.Parameter(F.pad(decoder.bias.detach(), (0, added)))
    decoder.out_features = len(table)
    config = dataclasses.replace(model.config, vocab_size=len(table))
    model.config = model.bert.config = config


def _mended(change: Callable[[Any, Any], None]) -> dict[str, Any]:
    def mend(model: Any) -> None:
        before = copy.deepcopy(model)
        torch_tie(model)
        change(model, before)

    return {"mend_tie": mend}


def _table_shrunk(model: Any, before: Any) -> None:
    old = before.mlm_head.decoder
    model.bert.embeddings.word.weight = nn.Parameter(old.weight.detach())
    model.mlm_head.decoder.weight = model.bert.embeddings.word.weight
    model.mlm_head.decoder.bias = old.bias
    model.config = model.bert.config = before.config


def _mend_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, rows: int) -> Case:
        ids = integers(rng, 1, min(rows, SIZES["vocab_size"]), 2, 7)
        return Case(
            name,
            {
                "numbers": drawn(rng, SIZES),
                "table": normal(rng, rows, SIZES["hidden_size"], scale=0.4),
                "input_ids": ids,
            },
        )

    size = SIZES["vocab_size"]
    added = int(rng.integers(2, 9))
    yield case("some words were added", size + added)
    yield case("no word was added, the table is a new one", size)
    yield case("some words were taken away", size - added)


def _mend_probe(part: Any, numbers: Tensor, table: Tensor, input_ids: Tensor) -> dict[str, Any]:
    model = model_of("BertForPreTraining", SIZES)
    fill(model, in_our_names(numbers, SIZES))
    rows, width = table.shape
    word = nn.Embedding(rows, width, device=table.device, dtype=table.dtype)
    word.weight.data.copy_(table)
    model.bert.embeddings.word = word
    part.mend_tie(model)
    found = _of_the_vocabulary(model, input_ids)
    found["the table"] = model.bert.embeddings.word.weight.detach()
    return found


EXERCISES = [
    Exercise(
        id="5.1",
        reference={"MLMHead": MLMHead},
        reference_name="transformers BertLMPredictionHead",
        cases=_head_cases,
        probe=_head_probe,
        misconceptions=(
            Misconception(
                "the head is one linear layer, without transform and norm",
                "Many pictures of BERT show it like that: hidden states, a linear layer, scores. "
                "BERT's head first sends each hidden state through a transform of its own, an "
                "activation and a LayerNorm, and only then compares it with the words. Without "
                "these a checkpoint's predictions are wrong; the chapter measures how wrong.",
                {"MLMHead": _OneLayer},
            ),
            Misconception(
                "transform and norm are built and not used",
                "The layers are there, and take no part: the hidden states go straight to the "
                "decoder. Nothing complains, for all three shapes fit. It is "
                "decoder(norm(activation(transform(x)))).",
                {"MLMHead": _TransformUnused},
            ),
            Misconception(
                "the activation is forgotten",
                "Between transform and norm stands the activation. Without it the transform is "
                "one more linear map, followed by a norm.",
                {"MLMHead": _NotActivated},
            ),
            Misconception(
                "the activation is always GELU",
                "Which activation it is, the config says: `hidden_act`, as in the feed-forward "
                "network. For `bert-base-uncased` it happens to be GELU; other checkpoints of "
                "the same architecture use another, and yours gives wrong numbers for those.",
                {"MLMHead": _AlwaysGelu},
            ),
            Misconception(
                "the norm is left out",
                "The norm brings each transformed state to a size that fits the words' vectors. "
                "Without it, the sizes of the scores, and with them the sharpness of the "
                "probabilities, are whatever the transform makes them.",
                {"MLMHead": _NotNormed},
            ),
            Misconception(
                "the norm comes before the activation",
                "Both orders are in use in other networks, so no shape gives it away. Here the "
                "activation bends what the transform gives, and the norm comes last: what the "
                "words are compared with is normalized.",
                {"MLMHead": _NormedFirst},
            ),
            Misconception(
                "LayerNorm has PyTorch's eps of 1e-5",
                "nn.LayerNorm adds 1e-5 to the variance unless told otherwise, BERT 1e-12. On "
                "ordinary states nobody sees it; where a state varies little, everything "
                "changes. Pass `eps=config.layer_norm_eps`.",
                {"MLMHead": _DefaultEps},
            ),
            Misconception(
                "the decoder's weight is a copy of the table",
                "At first the scores are the same. But it is a second parameter: a training "
                "step moves the table by one gradient and the copy by another, and from then on "
                "they differ (and 23 million numbers are learned twice). Do not copy: "
                "`self.decoder.weight = word_embeddings.weight` makes them one parameter. "
                "A new nn.Parameter around the same numbers is a copy in this sense, too.",
                {"MLMHead": _Copied},
            ),
            Misconception(
                "the decoder has no bias",
                "The table of words has no biases, but the decoder has: one number a piece, "
                "which says how likely the piece is before anything is read. Only the weight is "
                "shared.",
                {"MLMHead": _WithoutBias},
            ),
            Misconception(
                "positions are not looked at",
                "The scores come back for every token. They are right and dear: in pretraining "
                "15% of the places have a label, and the scores of the others are the largest "
                "tensor of the whole step, computed for nothing. Choose the hidden states before "
                "anything else: `hidden_states[positions]`.",
                {"MLMHead": _EverywhereAnyway},
            ),
            Misconception(
                "scores elsewhere are set to 0 instead of left out",
                "What is asked for is a shorter tensor, [chosen, vocab_size]: the point of it is "
                "not to compute the rest. A boolean tensor as an index picks out the rows: "
                "`hidden_states[positions]` is [chosen, hidden].",
                {"MLMHead": _ElsewhereZero},
            ),
            Misconception(
                "the chosen positions are listed place by place instead of text by text",
                "You return first the chosen tokens that stand first in their text, then those "
                "that stand second. `labels[positions]` runs text by text, from left to right, "
                "and the two must fit together, or each token is compared with another's label.",
                {"MLMHead": _PlaceByPlace},
            ),
        ),
        hints=(
            "Three layers in `__init__`, and one line that ties: assign the table's weight to "
            "the decoder. The activation is not a layer with parameters; keep its name.",
            "An nn.Module takes an assigned nn.Parameter as its own: after "
            "`self.decoder.weight = word_embeddings.weight` there is one parameter with two "
            "names. Indexing with a boolean [batch, seq] tensor leaves [chosen, hidden].",
            "transform: Linear(hidden, hidden); norm: LayerNorm(hidden, eps=the config's); "
            "decoder: Linear(hidden, vocab). forward: if positions is not None, hidden_states = "
            "hidden_states[positions]; then ACTIVATIONS[config.hidden_act] of the transform, the "
            "norm, the decoder.",
        ),
    ),
    Exercise(
        id="5.2",
        reference={"NSPHead": NSPHead, "BertForPreTraining": BertForPreTraining},
        reference_name="transformers BertForPreTraining",
        cases=_pretraining_cases,
        probe=_pretraining_probe,
        misconceptions=(
            Misconception(
                "the head is tied to a table of its own",
                "The head must get the table that the embeddings look words up in: "
                "`self.bert.embeddings.word`. With a fresh nn.Embedding it is tied to something "
                "that nothing else uses.",
                {"BertForPreTraining": _OwnTable},
            ),
            Misconception(
                "the attention mask is not handed on",
                "Without it padding is read like text, and the scores of a text depend on the "
                "lengths of the others. Hand all three inputs on to `self.bert`.",
                {"BertForPreTraining": _MaskForgotten},
            ),
            Misconception(
                "the token types are not handed on",
                "BertModel takes missing token types as all 0, so the second text of each pair "
                "looks like a part of the first. Hand them on to `self.bert`.",
                {"BertForPreTraining": _TypesForgotten},
            ),
            Misconception(
                "hidden states and attentions are never asked for",
                "`output_hidden_states` and `output_attentions` are wishes that `self.bert` "
                "fulfils. Hand them on, and the two fields of its answer back."
                " Otherwise both stay None.",
                {"BertForPreTraining": _WishesForgotten},
            ),
            Misconception(
                "the pair is judged from [CLS] without the pooler",
                "In BERT, the vector of [CLS] first goes through the pooler, a linear layer and "
                "tanh, which was trained together with this head. Give `nsp_head` the "
                "`pooler_output`.",
                {"BertForPreTraining": _Unpooled},
            ),
            Misconception(
                "the pair is judged from the mean over all tokens",
                "A mean over tokens is a good vector for comparing texts, and not what BERT "
                "does here: NSP reads the pooled [CLS], `pooler_output`. (Your mean also counts "
                "padding.)",
                {"BertForPreTraining": _MeanPooled},
            ),
            Misconception(
                "places without a label count as if their label were 0",
                "A label of -100 means: no label, leave this place out. It is the default "
                "`ignore_index` of `F.cross_entropy`. Set to 0, all these places teach the model "
                "to say [PAD]: a model that predicts only a few frequent pieces is a usual sign.",
                {"BertForPreTraining": _AllPlaces},
            ),
            Misconception(
                "labels of 0 are ignored",
                "What is left out is -100, not the id of [PAD]. Padding has the label -100 "
                "already; a 0 among the labels is a label like any other.",
                {"BertForPreTraining": _PaddingIgnored},
            ),
            Misconception(
                "the labels are shifted by one place",
                "That is how GPT learns: each place predicts the next token. BERT predicts the "
                "token that stood at the very place of the mask, so scores and labels are "
                "compared where they stand.",
                {"BertForPreTraining": _Shifted},
            ),
            Misconception(
                "the loss over words is a sum",
                "The loss is the mean over labelled places, which is what F.cross_entropy does "
                "unless told otherwise. As a sum it grows with the batch and swamps the loss of "
                "the pairs.",
                {"BertForPreTraining": _SummedUp},
            ),
            Misconception(
                "the loss over words is averaged text by text",
                "A mean of the texts' means gives a label more weight in a text with few of them. "
                "The loss is one mean over all labelled places of the batch: flatten first.",
                {"BertForPreTraining": _TextByText},
            ),
            Misconception(
                "the pair's label is turned round",
                "In Transformers and in Google's code 0 means that the second text follows the "
                "first, and 1 that it does not; easily turned round, for 'is next' sounds like 1. "
                "The label is the index of the score: nothing to convert.",
                {"BertForPreTraining": _Inverted},
            ),
            Misconception(
                "the loss of the pairs is forgotten when both labels are given",
                "With both labels the loss is the sum of both. Yours is that of the words alone, "
                "and the head for pairs is never trained.",
                {"BertForPreTraining": _WordsOnly},
            ),
            Misconception(
                "the two losses are averaged",
                "BERT adds them (section A.2 of the paper: 'the sum of'). Averaged, every "
                "gradient is half as large."
                " The optimum stays, the steps do not.",
                {"BertForPreTraining": _Averaged},
            ),
            Misconception(
                "there is a loss only if both labels are given",
                "Transformers does exactly this in BertForPreTraining. Here the contract asks "
                "for more: the loss of whichever labels are given, so that a model can be trained "
                "on words alone.",
                {"BertForPreTraining": _BothOrNone},
            ),
            Misconception(
                "scores come back only where there is a label",
                "For the loss that is enough, and cheaper. But `prediction_logits` is "
                "[batch, seq, vocab_size] whether labels are given or not.",
                {"BertForPreTraining": _LabelledOnly},
            ),
        ),
        hints=(
            "The model is three parts: `BertModel(config)`, `MLMHead(config, its table of words)`, "
            "`NSPHead(config)`. forward: run bert, score words from last_hidden_state, score "
            "pairs from pooler_output, add up the losses.",
            "Below your cell the module has `masked_lm_loss(head, hidden_states, labels)`, which "
            "returns the loss over words (None without labels) and the scores. F.cross_entropy "
            "takes [batch, 2] scores and [batch] labels for the pairs.",
            "loss, logits = masked_lm_loss(self.mlm_head, output.last_hidden_state, labels). If "
            "next_sentence_label is given, nsp = F.cross_entropy(pair scores, it), and loss is "
            "nsp, or loss + nsp if there is a loss already. Return BertForPreTrainingOutput(loss, "
            "logits, pair scores, output.hidden_states, output.attentions).",
        ),
    ),
    Exercise(
        id="5.3",
        reference=_Loader().parts(),
        reference_name="the layers of transformers BertForPreTraining, torch load_state_dict",
        cases=_names_cases,
        probe=_names_probe,
        misconceptions=(
            Misconception(
                "query and key are exchanged",
                "The two have the same shape, so nothing complains, and the attention of every "
                "head is transposed. A name map is right only when a model filled by it gives "
                "the same numbers; shapes prove nothing.",
                _renaming(_swap("attention.query.", "attention.key.")),
            ),
            Misconception(
                "a layer's two LayerNorms are exchanged",
                "`attention.output.LayerNorm` belongs to attention's half, `output.LayerNorm` to "
                "that of the feed-forward network. Same shapes again. Look at the whole name, not "
                "at its end.",
                _renaming(_swap(".attention_norm.", ".feed_forward_norm.")),
            ),
            Misconception(
                "the pooler and the head's transform are exchanged",
                "Both are [hidden, hidden] with a bias and both are called `dense`: "
                "`bert.pooler.dense` is the pooler, `cls.predictions.transform.dense` is the "
                "MLM head's.",
                _renaming(_swap("bert.pooler.dense.", "mlm_head.transform.")),
            ),
            Misconception(
                "the number of layers is fixed at twelve",
                "A map of twelve layers lacks the names of a 13th, and BERT-Large has 24. The "
                "config says how many there are: `num_hidden_layers`.",
                _TwelveLayers().parts(),
            ),
            Misconception(
                "the decoder's bias has one name only",
                "Hugging Face's model has it under two: `cls.predictions.bias` and "
                "`cls.predictions.decoder.bias`, tied. A saved file has only one of them, and "
                "which one depends on who wrote it.",
                _OneBiasName().parts(),
            ),
            Misconception(
                "gamma and beta are mixed up",
                "In TensorFlow's LayerNorm `gamma` is what multiplies and `beta` what is added: "
                "PyTorch's weight and bias, in this order. Both are [hidden].",
                {"load_hf_state_dict": _GammaIsBias().load},
            ),
            Misconception(
                "the names of 2018 are not known",
                "The first PyTorch checkpoints were converted from TensorFlow name by name, and "
                "their LayerNorms have `gamma` and `beta`. bert-base-uncased has them to this "
                "day. Rename them before you look a name up.",
                {"load_hf_state_dict": _TodayOnly().load},
            ),
            Misconception(
                "names without the prefix are not known",
                "A BertModel by itself writes `embeddings...`, one inside another model writes "
                "`bert.embeddings...`. Try the name as it is, and with `bert.` in front.",
                {"load_hf_state_dict": _PrefixedOnly().load},
            ),
            Misconception(
                "only models with heads can be filled",
                "A BertModel's own parameters have no `bert.` in front: what the map calls "
                "`bert.embeddings.word.weight` is `embeddings.word.weight` there."
                " Take both forms.",
                {"load_hf_state_dict": _ModelsWithBertOnly().load},
            ),
            Misconception(
                "a task head's tensors are called unexpected",
                "`classifier.weight` is not in the map, and yet it has its place: if the model "
                "has a parameter of that very name, that is where the tensor belongs.",
                {"load_hf_state_dict": _TaskHeadsUnknown().load},
            ),
            Misconception(
                "position_ids are called unexpected",
                "Older versions stored a buffer `position_ids`, the numbers 0 to 511. It is no "
                "parameter and holds nothing that was learned, so it is ignored; if you refuse "
                "it, most of the checkpoints in the world do not load.",
                {"load_hf_state_dict": _BuffersKept().load},
            ),
            Misconception(
                "strict is not looked at, and nothing is ever refused",
                "With `strict` (which is the default) anything that does not fit is an error, "
                "that names it. Otherwise a model with a random layer goes on to be trained, and "
                "is found to be a little worse than it should be, if it is found.",
                {"load_hf_state_dict": _NeverStrict().load},
            ),
            Misconception(
                "strict=False is not looked at",
                "With strict=False what fits is loaded and what does not is listed in the "
                "report: that is how a BertModel takes its share of a checkpoint with heads.",
                {"load_hf_state_dict": _AlwaysStrict().load},
            ),
            Misconception(
                "the model is filled before the error is raised",
                "Whoever catches the error has a model that is half of one checkpoint and half "
                "of something else. Compare all names and shapes first, then raise, and copy only "
                "when nothing can go wrong any more.",
                {"load_hf_state_dict": _PutThenRefused().load},
            ),
            Misconception(
                "tensors of a wrong shape are skipped in silence",
                "Two models with different vocabularies differ in one tensor's shape, and it is "
                "the largest. Skipped without a word, the model reads random words. List it under "
                "`wrong_shape`.",
                {"load_hf_state_dict": _SilentOnShape().load},
            ),
            Misconception(
                "missing tensors are not listed",
                "Parameters for which there was no tensor keep their random values. List them "
                "under `missing`, by the model's own names.",
                {"load_hf_state_dict": _SilentOnMissing().load},
            ),
            Misconception(
                "unexpected tensors are not listed",
                "A tensor without a place is a sign that the checkpoint is of another model than "
                "you think. List it under `unexpected`, by the name it has in the state dict.",
                {"load_hf_state_dict": _SilentOnUnexpected().load},
            ),
            Misconception(
                "each name of a tied parameter counts by itself",
                "The table and the decoder's weight are one parameter with two names. Files have "
                "it once; it is missing only if neither name was there. `named_parameters()` "
                "lists it once, under its name in the embeddings.",
                {"load_hf_state_dict": _EveryNameCounts().load},
            ),
            Misconception(
                "missing tensors are listed by Hugging Face's names",
                "`missing` lists the model's parameters, so by the model's names; `unexpected` "
                "and `wrong_shape` list tensors of the state dict, by the names they have there.",
                {"load_hf_state_dict": _TheirNames().load},
            ),
            Misconception(
                "of two values for a tied parameter the last one wins",
                "If a state dict has different values for `word_embeddings` and `decoder`, it "
                "comes from a model that was not tied. One of the two would be lost, and no "
                "strictness makes that right: it is a ValueError.",
                {"load_hf_state_dict": _LastTiedWins().load},
            ),
            Misconception(
                "parameters take on the dtype of the file",
                "A bfloat16 file would turn some parameters of a float32 model into bfloat16, and "
                "the first matrix product with both raises an error. Convert the values: "
                "`copy_` does, and `tensor.to(parameter)`.",
                {"load_hf_state_dict": _FilesType().load},
            ),
            Misconception(
                "the model shares the tensors' memory although nobody asked for it",
                "Whoever changes the state dict later, or trains the model, changes both. That is "
                "what `assign=True` is for; otherwise copy.",
                {"load_hf_state_dict": _AlwaysShared().load},
            ),
        ),
        hints=(
            "The map: print `transformers.BertForPreTraining(config).state_dict().keys()` for a "
            "config of one layer, and `named_parameters()` of your own. Write a table of modules "
            "(`attention.self.query` to `attention.query`, ...) and build the names from it in a "
            "loop over the layers, for `weight` and `bias`.",
            "The loader in four steps: for each tensor find the parameter (old names, prefix), "
            "fill the report, raise if need be, copy. "
            "`dict(model.named_parameters(remove_duplicate=False))` knows a tied parameter under "
            "both names; a parameter can be a key of a dict.",
            "Names to try for one of theirs, after gamma and beta are renamed: names.get(theirs) "
            "or names.get('bert.' + theirs); of what comes out take it as it is or without "
            "'bert.', whichever the model has; if it is not in the map at all but the model has "
            "that very name, take it. Then missing = names of named_parameters() whose parameter "
            "got no tensor, and under torch.no_grad() parameter.copy_(tensor).",
        ),
    ),
    Exercise(
        id="5.4",
        reference=_Files().parts(),
        reference_name="transformers from_pretrained and save_pretrained",
        cases=_files_cases,
        probe=_files_probe,
        misconceptions=(
            Misconception(
                "the model is left in training mode",
                "A fresh module is in training mode, so dropout changes its answers from call to "
                "call. Somebody who loads a checkpoint wants to use it: return `model.eval()`.",
                _loading(_LeftInTraining),
            ),
            Misconception(
                "hidden_act and layer_norm_eps of the configuration are not looked at",
                "Sizes alone do not make the model: with another activation or eps the same "
                "weights give other numbers, and every tensor fits. "
                "`BertConfig.from_hf(...)` reads all of it.",
                _loading(_SizesOnly),
            ),
            Misconception(
                "a part that is only half there is accepted",
                "If one tensor of a layer is missing, the layer gets a random one and the model "
                "looks fine. A missing head may be meant (a new task); a hole in the middle never "
                "is. `require_whole_parts`, given below, tells the two apart.",
                _loading(_DoneByHalves),
            ),
            Misconception(
                "a head too many or too few is refused",
                "A BertModel takes its share of a checkpoint with heads, and a model with heads "
                "starts from a checkpoint that has none. Load with strict=False, and let "
                "`require_whole_parts` say what is wrong.",
                _loading(_HeadsRequired),
            ),
            Misconception(
                "only the first shard is read",
                "A large checkpoint is several files, and `model.safetensors.index.json` says "
                "which tensor is in which. The tensors of the others are left at random. "
                "`read_tensors`, given below, reads them all.",
                _loading(_FirstShardOnly),
            ),
            Misconception(
                "a checkpoint in several files is not found",
                "There is no model.safetensors when the checkpoint is sharded, but a "
                "model.safetensors.index.json. `read_tensors`, given below, takes either."
                " Large models are written in shards.",
                _loading(_OneFileOnly),
            ),
            Misconception(
                "the model takes on the dtype of the file",
                "Many checkpoints are stored in 16 bits to save space. The contract says float32 "
                "whatever the file has; who wants less says `.to(torch.bfloat16)`.",
                _loading(_FilesDtype),
            ),
            Misconception(
                "a folder that is not there is a ValueError",
                "A FileNotFoundError says at once that the path is wrong, a ValueError that the "
                "content is. `find_folder`, which the module imports, raises the right one.",
                _loading(_AnyErrorWillDo),
            ),
            Misconception(
                "tensors are saved by our own names",
                "Our own loader could not read it (5.3 maps their names), and Transformers finds "
                "nothing that it knows: it draws a whole model at random, with a warning. Turn "
                "`hf_name_map` round.",
                _saving(_OurNames),
            ),
            Misconception(
                "a tied parameter is saved twice",
                "The file gets two copies of the largest tensor: 94 MB more for BERT-Base. "
                "`named_parameters()` gives each parameter once. (safetensors refuses tensors "
                "that share memory, for this very reason; a `.clone()` silences it.)",
                _saving(_TiedTwice),
            ),
            Misconception(
                "no config.json is saved",
                "Weights alone do not say what model they belong to. Nothing can load the folder."
                " Write what `model.config.to_hf()` returns beside them.",
                _saving(_WeightsOnly),
            ),
            Misconception(
                "the configuration is saved with our own values",
                "Transformers has no activation called `gelu_tanh`, and without `model_type` it "
                "does not know what this is. `config.to_hf()` writes it as Hugging Face does.",
                _saving(_OurConfig),
            ),
            Misconception(
                "hidden_act and layer_norm_eps are not saved",
                "The folder loads, the tensors fit, and the numbers are wrong: the activation and "
                "eps are the defaults. `model.config.to_hf()` has everything.",
                _saving(_DefaultConfig),
            ),
            Misconception(
                "the weights are saved as a pickle",
                "torch.save writes a pickle, a little program that is run when it is loaded. "
                "`save_file` of safetensors writes numbers and nothing else.",
                _saving(_Pickled),
            ),
            Misconception(
                "the folder must exist already",
                "Make it, and what leads to it: `mkdir(parents=True, exist_ok=True)`. A training "
                "run of three days must not end because nobody made `runs/today`.",
                _saving(_FolderExpected),
            ),
        ),
        hints=(
            "Most of it is given, at the end of the module: `read_config`, `read_tensors`, "
            "`require_whole_parts`, `draw_missing`, `replacing`. Loading is these in order, "
            "around your load_hf_state_dict.",
            "Load: the folder (`find_folder(name_or_path, ('config.json',))`), the config, the "
            "model, load_hf_state_dict with strict=False, require_whole_parts, draw_missing, "
            "eval. Save: turn the map round, one name for each of `named_parameters()`, "
            "`save_file`, and `config.to_hf()` as JSON.",
            "config = BertConfig.from_hf(read_config(folder)); model = model_class(config); "
            "report = load_hf_state_dict(model, read_tensors(folder), strict=False). To save: "
            "theirs = {ours: name for name, ours in hf_name_map(config).items()}; a BertModel's "
            "names are looked up with 'bert.' in front and written without. The tensors must be "
            "detached, on the CPU and contiguous; metadata={'format': 'pt'}.",
        ),
    ),
    Exercise(
        id="5.5",
        reference={"resize_word_embeddings": transformers_resize},
        reference_name="transformers resize_token_embeddings(mean_resizing=False)",
        cases=_resize_cases,
        probe=_resize_probe,
        misconceptions=(
            Misconception(
                "the tie is lost",
                "The decoder has a copy of the new table. The sizes fit and the scores are right, "
                "until the first training step moves the two apart. After the new table is in "
                "place, assign it to the decoder again.",
                _resized(_untie),
            ),
            Misconception(
                "the head keeps its old size",
                "The table has new rows, the head still scores the old pieces: a new piece can "
                "be read and never predicted. The decoder's weight is the new table, and its bias "
                "grows with it.",
                _resized(_forget_head),
            ),
            Misconception(
                "the old rows are drawn anew",
                "A new nn.Embedding starts at random, and 30,522 rows that took four days to "
                "train are gone. Copy the rows that stay.",
                _resized(_redraw),
            ),
            Misconception(
                "the new rows are 0",
                "All new pieces would be the same piece, and a dot product with 0 says nothing. "
                "Draw them from a normal distribution with the config's initializer_range.",
                _resized(_zero_new),
            ),
            Misconception(
                "the new rows have the standard deviation 1",
                "nn.Embedding starts with N(0, 1), BERT with N(0, 0.02²): the new rows are 50 "
                "times as long as the model expects, and shout down the position and everything "
                "else. Draw them with `initializer_range`.",
                _resized(_widen_new),
            ),
            Misconception(
                "the decoder's bias keeps its old size",
                "The weight has more rows than the bias has numbers, and the next call of the "
                "head raises an error about sizes.",
                _resized(_keep_bias),
            ),
            Misconception(
                "the old biases are lost",
                "The bias of a piece says how likely it is before anything is read, and it was "
                "learned. Copy the old ones; only the new ones start at 0.",
                _resized(_zero_bias),
            ),
            Misconception(
                "the new biases are not 0",
                "A new nn.Linear draws its bias at random. A piece that nobody has seen yet should "
                "have the bias 0, as every piece had when training began.",
                _resized(_draw_bias),
            ),
            Misconception(
                "the configuration keeps the old vocab_size",
                "Saved like this, the model does not load: the table in the file has another "
                "number of rows than the config says. It is frozen, so replace it: "
                "`dataclasses.replace`.",
                _resized(_old_config),
            ),
            Misconception(
                "bert.config keeps the old vocab_size",
                "The model and the BERT in it each hold a configuration. Who saves or extends "
                "`model.bert` by itself gets the old one: set both.",
                _resized(_old_inner_config),
            ),
            Misconception(
                "a copy is resized and returned",
                "The contract says in place: the optimizer, and whoever else holds the model, "
                "must see the change. Change the model that was given; return nothing.",
                {"resize_word_embeddings": _on_a_copy},
            ),
            Misconception(
                "a smaller vocabulary is not made",
                "Fewer pieces than before is allowed too: the first rows stay, the rest go."
                " Copy as many rows as both tables have.",
                {"resize_word_embeddings": _grown_only},
            ),
        ),
        hints=(
            "A helper that makes a new nn.Parameter with another number of rows, and keeps the "
            "old ones, serves the table and the bias.",
            "`new = old.new_empty(rows, *old.shape[1:]).normal_(0, spread)` and then "
            "`new[:kept] = old[:kept]`, where kept is the smaller number of rows. Work on "
            "`.detach()`ed tensors and wrap the result in nn.Parameter.",
            "config = dataclasses.replace(model.config, vocab_size=vocab_size) comes first: it "
            "raises the ValueError. Then word.weight = the resized parameter; if the model has "
            "an mlm_head, decoder.weight = word.weight and decoder.bias = the bias resized with "
            "a spread of 0. Last, model.config = bert.config = config.",
        ),
    ),
    Exercise(
        id="5.6",
        reference={"fill_mask": torch_fill_mask},
        reference_name="torch.distributions.Categorical (transformers pipeline 'fill-mask')",
        cases=_fill_cases,
        probe=_fill_probe,
        misconceptions=(
            Misconception(
                "scores are returned instead of probabilities",
                "The order is right, the numbers are not: probabilities lie between 0 and 1 and "
                "sum to 1 over the vocabulary. Take the softmax over the last axis.",
                {"fill_mask": _Scores()},
            ),
            Misconception(
                "logarithms are returned instead of probabilities",
                "log_softmax gives the logarithms, which are negative. The contract asks for "
                "probabilities."
                " Probabilities lie between 0 and 1, and over the whole vocabulary they add up "
                "to 1.",
                {"fill_mask": _Logarithms()},
            ),
            Misconception(
                "the softmax runs over the masks",
                "Each mask has a distribution over the vocabulary: the softmax is over the last "
                "axis. Over the masks, a text with one mask gives the probability 1 to every "
                "piece.",
                {"fill_mask": _OverMasks()},
            ),
            Misconception(
                "the softmax runs over the positions",
                "The logits are [batch, seq, vocab_size]: `dim=1` is the sequence. The pieces of "
                "one place share a probability of 1, so it is dim=-1.",
                {"fill_mask": _OverPositions()},
            ),
            Misconception(
                "the softmax is over the best pieces only",
                "Their probabilities then sum to 1 whatever the model thinks of the rest, and "
                "depend on top_k. First the softmax over the whole vocabulary, then the best.",
                {"fill_mask": _AmongTheBest()},
            ),
            Misconception(
                "only the first mask is filled",
                "A text may have several masks, and then the answer is a list of lists, from "
                "left to right. `logits[input_ids == mask_token_id]` is [masks, vocab_size].",
                {"fill_mask": _FirstMask()},
            ),
            Misconception(
                "a text without a mask is not refused",
                "There is nothing to fill, and an empty answer would be taken for the model's. "
                "Raise a ValueError that shows the text.",
                {"fill_mask": _NeverRefused()},
            ),
            Misconception(
                "the model is read in the mode it happens to be in",
                "In training mode dropout changes the answer from call to call. Call "
                "`model.eval()` first, and put the mode back afterwards.",
                {"fill_mask": _ModeAsItIs()},
            ),
            Misconception(
                "the model is left in eval mode",
                "Somebody looks at a few predictions in the middle of training, and from then on "
                "trains without dropout. Remember `model.training` and restore it.",
                {"fill_mask": _LeftInEval()},
            ),
            Misconception(
                "ids are returned instead of pieces",
                "A reader wants to see words. `tokenizer.convert_ids_to_tokens` gives the pieces."
                " A number such as 7592 says nothing to anybody without the vocabulary.",
                {"fill_mask": _Ids()},
            ),
            Misconception(
                "the ## of a piece is stripped",
                "`##ing` continues a word and `ing` would begin one: two different rows of the "
                "vocabulary. Return the piece as the vocabulary has it.",
                {"fill_mask": _Words()},
            ),
            Misconception(
                "a single mask gives a list of one list",
                "With one mask the answer is a plain list of (piece, probability) pairs; only "
                "with several it is a list of such lists.",
                {"fill_mask": _AlwaysNested()},
            ),
        ),
        hints=(
            "`tokenizer(text)['input_ids']` is a list of ids; the model wants a tensor [1, seq] "
            "on its own device. The masks are where an id equals `tokenizer.mask_token_id`.",
            "Remember `model.training`, call `model.eval()`, run under `torch.no_grad()`, restore. "
            "BertForMaskedLM's output has `logits`, BertForPreTraining's `prediction_logits`. A "
            "boolean index picks the masks' rows.",
            "probabilities = logits[input_ids == mask_token_id].softmax(dim=-1); values, ids = "
            "probabilities.topk(top_k); for each row zip convert_ids_to_tokens(ids.tolist()) with "
            "values.tolist(). Return the first row alone if there is only one.",
        ),
    ),
    Exercise(
        id="5.7",
        reference={"mend_tie": torch_tie},
        reference_name="torch.nn.functional.pad, and what transformers tie_weights does",
        cases=_mend_cases,
        probe=_mend_probe,
        misconceptions=(
            Misconception(
                "the table's values are copied into the head",
                "The scores are right today. But the head has a parameter of its own still, and "
                "the next training step moves the two apart again. They must be one parameter: "
                "`decoder.weight = table`.",
                _mended(_untie),
            ),
            Misconception(
                "the decoder's bias keeps its old size",
                "With more rows than biases the head raises an error at its next call. The "
                "bias needs a number for each row, 0 for the new ones.",
                _mended(_keep_bias),
            ),
            Misconception(
                "the old biases are lost",
                "A new decoder starts with a bias of its own, and what the old one had learned is "
                "gone. Keep the first rows.",
                _mended(_zero_bias),
            ),
            Misconception(
                "the table is made to follow the head",
                "You tied them the wrong way round: the head has the old weights, the table is "
                "right. The added words are lost like this.",
                _mended(_table_shrunk),
            ),
            Misconception(
                "the configuration keeps the old vocab_size",
                "The model works until it is saved: then the file's table and the config's "
                "vocab_size disagree, and it does not load.",
                _mended(_old_config),
            ),
            Misconception(
                "bert.config keeps the old vocab_size",
                "The model and the BERT in it each hold a configuration; set both."
                " Otherwise what is saved from the inner model names a size that its table no "
                "longer has.",
                _mended(_old_inner_config),
            ),
        ),
        hints=(
            "Compare `model.mlm_head.decoder.weight` and `model.bert.embeddings.word.weight`: "
            "their shapes, and whether one `is` the other. Then the bias, then the two configs.",
            "One assignment ties. The bias has to be made anew with the table's length; work on "
            "`.detach()` and wrap it in nn.Parameter. The configs are frozen: "
            "`dataclasses.replace`.",
            "decoder.weight = the table's weight; decoder.bias = Parameter(zeros of len(table), "
            "with the old ones in front, as many as fit); model.config = model.bert.config = "
            "dataclasses.replace(model.config, vocab_size=len(table)).",
        ),
    ),
]
