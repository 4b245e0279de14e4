"""What stands on top of BERT in pretraining: the MLM head, the NSP head, and models with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertlab.config import BertConfig
from bertlab.encoder import BertModel, initialize_weights
from bertlab.feed_forward import ACTIVATIONS

IGNORED = -100  # the label of a place that has none: PyTorch's and Transformers' convention


# --- exercise 5.1: the MLM head ---
class MLMHead(nn.Module):
    """For each token, a score for every piece of the vocabulary.

        decoder(norm(activation(transform(x))))

    Attributes:
        transform: `nn.Linear`, `hidden_size` to `hidden_size`; then `config.hidden_act`.
        norm: `nn.LayerNorm` with the config's eps.
        decoder: `nn.Linear`, `hidden_size` to `vocab_size`, with a bias of its own. Its weight
            **is** `word_embeddings.weight`: one parameter, not a copy. So a score is the dot
            product of what the token became with a word's vector, plus that word's bias.

    Args:
        config: the sizes.
        word_embeddings: the table of the words' vectors, `[vocab_size, hidden]`.

    Source: Devlin et al. 2019, section 3.1, and their `run_pretraining.py`,
    `get_masked_lm_output`; the tie: Press and Wolf 2017.
    In production: `transformers.models.bert.modeling_bert.BertLMPredictionHead`.
    """

    def __init__(self, config: BertConfig, word_embeddings: nn.Embedding) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.decoder.weight = word_embeddings.weight
        self.hidden_act = config.hidden_act
        ### END SOLUTION

    def forward(self, hidden_states: Tensor, positions: Tensor | None = None) -> Tensor:
        """Score the vocabulary at every token, or only where it is asked for.

        Args:
            hidden_states: `[batch, seq, hidden]`, BERT's last.
            positions: boolean `[batch, seq]`, True where scores are wanted; everywhere when
                None. In pretraining 15% of the places count, and the scores are by far the
                largest tensor.

        Returns:
            `[batch, seq, vocab_size]`, or with `positions` `[chosen, vocab_size]`, text by text
            from left to right.
        """
        ### BEGIN SOLUTION
        if positions is not None:
            hidden_states = hidden_states[positions]  # [chosen, hidden]
        transformed = ACTIVATIONS[self.hidden_act](self.transform(hidden_states))
        return self.decoder(self.norm(transformed))
        ### END SOLUTION


# --- end of exercise 5.1 ---


class OnDemand:
    """A field that may be given as a function, which is then called when it is first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return None  # the field's default
        value = getattr(instance, self.name)
        if callable(value):
            value = value()
            setattr(instance, self.name, value)
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance, self.name, value)


@dataclass
class BertForPreTrainingOutput:
    """What `BertForPreTraining` returns; the names are Transformers'.

    Attributes:
        loss: a number, the sum of the losses whose labels were given; None without labels.
        prediction_logits: `[batch, seq, vocab_size]`. May be given as a function: a training
            step reads the loss alone, and need not pay for scores where there is no label.
        seq_relationship_logits: `[batch, 2]`: B follows A, and B is from elsewhere.
        hidden_states, attentions: as in `BertModelOutput`.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | Callable[[], Tensor] | None = OnDemand()  # type: ignore[assignment]  # a field that computes
    seq_relationship_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class MaskedLMOutput:
    """What `BertForMaskedLM` returns; the names are Transformers'.

    Attributes:
        loss: a number; None without labels.
        logits: `[batch, seq, vocab_size]`; may be given as a function, as in
            `BertForPreTrainingOutput`.
        hidden_states, attentions: as in `BertModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | Callable[[], Tensor] | None = OnDemand()  # type: ignore[assignment]  # a field that computes
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


# --- exercise 5.2: the pretraining model ---
class NSPHead(nn.Module):
    """Two scores for a pair of texts: the second follows the first, or it is from elsewhere.

    Attributes:
        classifier: `nn.Linear`, `hidden_size` to 2.

    Source: Devlin et al. 2019, section 3.1, task 2.
    In production: `transformers.models.bert.modeling_bert.BertOnlyNSPHead`.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        self.classifier = nn.Linear(config.hidden_size, 2)
        ### END SOLUTION

    def forward(self, pooler_output: Tensor) -> Tensor:
        """Return `[batch, 2]` for `[batch, hidden]`."""
        ### BEGIN SOLUTION
        return self.classifier(pooler_output)
        ### END SOLUTION


class BertForPreTraining(nn.Module):
    """BERT with the two heads it was pretrained with.

    Attributes:
        config: the `BertConfig` it was built with.
        bert: `BertModel`.
        mlm_head: `MLMHead`, tied to `bert.embeddings.word`.
        nsp_head: `NSPHead`.

    Source: Devlin et al. 2019, section 3.1. In production: `transformers.BertForPreTraining`.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        self.config = config
        self.bert = BertModel(config)
        words: Any = self.bert.embeddings
        self.mlm_head = MLMHead(config, words.word)
        self.nsp_head = NSPHead(config)
        for head in (self.mlm_head, self.nsp_head):
            initialize_weights(head, config.initializer_range)
        ### END SOLUTION

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> BertForPreTrainingOutput:
        """Score words and pairs, and compute the loss of the labels that are given.

        Args:
            input_ids, attention_mask, token_type_ids: `[batch, seq]`, as for `BertModel`.
            labels: `[batch, seq]`, the right ids where a token was masked, -100 elsewhere.
            next_sentence_label: `[batch]`, 0 where the second text follows the first, 1 where
                it does not.
            output_hidden_states, output_attentions: as for `BertModel`.

        Returns:
            A `BertForPreTrainingOutput`. The loss is the mean cross-entropy over the labelled
            places, plus the mean cross-entropy over the pairs; only one of them when only one
            kind of label is given, None without labels.
        """
        ### BEGIN SOLUTION
        output = self.bert(
            input_ids, attention_mask, token_type_ids, output_hidden_states, output_attentions
        )
        seq_relationship_logits = self.nsp_head(output.pooler_output)
        loss, logits = masked_lm_loss(self.mlm_head, output.last_hidden_state, labels)
        if next_sentence_label is not None:
            nsp_loss = F.cross_entropy(seq_relationship_logits, next_sentence_label.view(-1))
            loss = nsp_loss if loss is None else loss + nsp_loss
        return BertForPreTrainingOutput(
            loss, logits, seq_relationship_logits, output.hidden_states, output.attentions
        )
        ### END SOLUTION


# --- end of exercise 5.2 ---


class BertForMaskedLM(nn.Module):
    """BERT with the MLM head alone, and without a pooler: no text is judged as a whole.

    Attributes:
        config: the `BertConfig` it was built with.
        bert: `BertModel`; its pooler passes everything on unchanged and has no parameters.
        mlm_head: `MLMHead`, tied to `bert.embeddings.word`.

    In production: `transformers.BertForMaskedLM`.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = BertModel(config)
        self.bert.pooler = nn.Identity()
        tables: Any = self.bert.embeddings
        self.mlm_head = MLMHead(config, tables.word)
        initialize_weights(self.mlm_head, config.initializer_range)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> MaskedLMOutput:
        """Score words; the arguments are those of `BertForPreTraining`."""
        output = self.bert(
            input_ids,
            attention_mask,
            token_type_ids,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        found = masked_lm_loss(self.mlm_head, output.last_hidden_state, labels)
        return MaskedLMOutput(*found, output.hidden_states, output.attentions)


def masked_lm_loss(
    head: MLMHead, hidden_states: Tensor, labels: Tensor | None
) -> tuple[Tensor | None, Tensor | Callable[[], Tensor]]:
    """The MLM loss from scores at the labelled places alone, and the scores of all places.

    Args:
        hidden_states: `[batch, seq, hidden]`, BERT's last.
        labels: `[batch, seq]`, -100 where there is none.

    Returns:
        `(loss, logits)`. Without labels there is no loss, and the logits are a tensor. With
        labels they are a function that computes them: whoever reads them pays for them.
    """
    if labels is None:
        return None, head(hidden_states)
    labelled = labels != IGNORED
    loss = F.cross_entropy(head(hidden_states, labelled), labels[labelled])
    with_gradient = torch.is_grad_enabled()

    def logits() -> Tensor:
        with torch.set_grad_enabled(with_gradient):
            return head(hidden_states)

    return loss, logits
