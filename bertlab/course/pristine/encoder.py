"""The encoder: attention and feed-forward as one layer, the layers as a stack, and `BertModel`.

At the end stands what is given: how fresh weights are drawn, and the forward pass that computes
nothing for padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bertlab.attention import MultiHeadSelfAttention, fast_attention, merge_heads, split_heads
from bertlab.config import BertConfig
from bertlab.embeddings import BertEmbeddings
from bertlab.feed_forward import FeedForward


# --- exercise 4.4: the encoder layer ---
class EncoderLayer(nn.Module):
    """Attention, then the feed-forward network, each with a residual connection and a LayerNorm.

        Post-LN (BERT):  x = norm(x + sublayer(x))
        Pre-LN:          x = x + sublayer(norm(x))

    Attributes:
        attention: `MultiHeadSelfAttention`.
        attention_norm: `nn.LayerNorm`, that of the attention's half.
        feed_forward: `FeedForward`, which has its own dropout.
        feed_forward_norm: `nn.LayerNorm`, that of the feed-forward's half.
        dropout: `nn.Dropout` with `hidden_dropout_prob`, on the attention's output.

    Args:
        config: the sizes.
        pre_norm: normalize the input of each half instead of its sum; for the experiment of
            chapter 4. BERT is Post-LN.

    Source: Devlin et al. 2019, section 3; Vaswani et al. 2017, section 3.1. Pre-LN: Xiong et
    al. 2020, figure 1. In production: `transformers.models.bert.modeling_bert.BertLayer`.
    """

    def __init__(self, config: BertConfig, pre_norm: bool = False) -> None:
        super().__init__()
        raise NotImplementedError("exercise 4.4")

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Let the tokens ask each other, then think by themselves.

        Args:
            hidden_states: `[batch, seq, hidden]`.
            attention_mask: `[batch, seq]`, 1 for a real token and 0 for padding.
            return_weights: also return the attention weights.

        Returns:
            `[batch, seq, hidden]`, or `(output, weights)` with weights
            `[batch, heads, seq, seq]`.
        """
        raise NotImplementedError("exercise 4.4")
# --- end of exercise 4.4 ---


@dataclass
class BertModelOutput:
    """What `BertModel` returns; the names are Transformers'.

    Attributes:
        last_hidden_state: `[batch, seq, hidden]`, the last layer's output.
        pooler_output: `[batch, hidden]`, from the first token.
        hidden_states: the embeddings' output and that of every layer: `num_hidden_layers + 1`
            tensors `[batch, seq, hidden]`; None unless asked for.
        attentions: every layer's weights, `[batch, heads, seq, seq]`; None unless asked for.
    """

    last_hidden_state: Tensor
    pooler_output: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


# --- exercise 4.5: the whole encoder ---
class Encoder(nn.Module):
    """The encoder layers, one after the other.

    Attributes:
        layers: `nn.ModuleList` of `num_hidden_layers` times `EncoderLayer`.

    In production: `transformers.models.bert.modeling_bert.BertEncoder`.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        raise NotImplementedError("exercise 4.5")

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """Send the tokens through all layers.

        Args:
            hidden_states: `[batch, seq, hidden]`, the embeddings' output.
            attention_mask: `[batch, seq]`, 1 for a real token and 0 for padding.
            output_hidden_states: also return every hidden state, the input among them.
            output_attentions: also return every layer's attention weights.

        Returns:
            `(last hidden state, hidden states, attentions)`, as in `BertModelOutput`; None for
            what was not asked for.
        """
        raise NotImplementedError("exercise 4.5")


class Pooler(nn.Module):
    """One vector for the whole text: a linear layer and tanh over the first token, `[CLS]`.

    Attributes:
        dense: `nn.Linear`, `hidden_size` to `hidden_size`.

    Source: Devlin et al. 2019, section 3 ("C"), and their `modeling.py`, `pooled_output`.
    In production: `transformers.models.bert.modeling_bert.BertPooler`.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        raise NotImplementedError("exercise 4.5")

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return `[batch, hidden]` for `[batch, seq, hidden]`."""
        raise NotImplementedError("exercise 4.5")


class BertModel(nn.Module):
    """BERT without a head: ids in, one vector for each token out.

    Attributes:
        config: the `BertConfig` it was built with.
        embeddings: `BertEmbeddings`.
        encoder: `Encoder`.
        pooler: `Pooler`.

    Fresh weights are drawn by `initialize_weights`, given below.

    Source: Devlin et al. 2019, section 3. In production: `transformers.BertModel`.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        raise NotImplementedError("exercise 4.5")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> BertModelOutput:
        """Read a batch of texts.

        Args:
            input_ids: `[batch, seq]`.
            attention_mask: `[batch, seq]`, 1 for a real token and 0 for padding; all real when
                None.
            token_type_ids: `[batch, seq]`, 0 for the first text and 1 for the second; all 0
                when None.
            output_hidden_states: also return every layer's hidden state.
            output_attentions: also return every layer's attention weights; slower, because they
                then have to be stored.

        Returns:
            A `BertModelOutput`. What stands at padding has no meaning.

        Raises:
            ValueError: `input_ids` does not have two axes, another argument has not its shape
                (see `check_batch`), or `seq` is more than `max_position_embeddings`.
        """
        raise NotImplementedError("exercise 4.5")

    def forward_packed(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> BertModelOutput:
        """Given: what `forward` returns, with nothing computed for padding; zeros stand there."""
        return packed_forward(self, input_ids, attention_mask, token_type_ids)
# --- end of exercise 4.5 ---


def check_batch(
    input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
) -> None:
    """Raise ValueError unless the arguments of a model fit together."""
    shape = list(input_ids.shape)
    if len(shape) != 2:
        raise ValueError(f"input_ids has shape {shape}, but must be [batch, seq]")
    for name, given in (("attention_mask", attention_mask), ("token_type_ids", token_type_ids)):
        if given is not None and list(given.shape) != shape:
            raise ValueError(
                f"{name} has shape {list(given.shape)}, but must be {shape}, as input_ids"
            )


# --- given: fresh weights ---


def initialize_weights(module: nn.Module, spread: float) -> None:
    """Draw every parameter of a module and of what is in it anew, as BERT's training began.

    Matrices and tables from a normal distribution around 0 with standard deviation `spread`
    (the row of `[PAD]` is 0), biases 0, LayerNorm's gains 1.

    Source: Devlin et al.'s `modeling.py` (2018), `initializer_range`. They cut the normal
    distribution off at two standard deviations; Transformers and we do not.
    """
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            initialize_parameter(part, name, parameter, spread)


def initialize_parameter(part: nn.Module, name: str, parameter: Tensor, spread: float) -> None:
    """Draw one parameter of a module anew; `name` is its name there, such as `"weight"`."""
    if isinstance(part, nn.LayerNorm):
        nn.init.constant_(parameter, 1 if name == "weight" else 0)
    elif name == "bias":
        nn.init.zeros_(parameter)
    else:
        nn.init.normal_(parameter, 0, spread)
    if isinstance(part, nn.Embedding) and part.padding_idx is not None:
        nn.init.zeros_(parameter.data[part.padding_idx])


# --- given: a forward pass without padding ---

# Texts of one length stand together: how many there are, and how many tokens each has.
Groups = list[tuple[int, int]]


def packed_forward(
    model: BertModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
) -> BertModelOutput:
    """Run a `BertModel` on the real tokens of a batch alone.

    All real tokens of the batch are laid end to end, shorter texts first. Everything but
    attention looks at one token at a time and does not care where a text ends; attention goes
    from text to text. So time follows the number of tokens and not `batch` times the longest.

    Args: as `BertModel.forward`.

    Returns:
        A `BertModelOutput` with `forward`'s numbers at real tokens and zeros at padding.

    Source: the idea is that of "EffectiveTransformer" and "ByteTransformer" (Zhai et al. 2022,
    section III-D).
    """
    if attention_mask is None or attention_mask.all():
        return model(input_ids, attention_mask, token_type_ids)
    check_batch(input_ids, attention_mask, token_type_ids=token_type_ids)
    types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
    lengths, order = (attention_mask != 0).sum(dim=1).sort(stable=True)
    place, position = (attention_mask[order] != 0).nonzero(as_tuple=True)  # [tokens] each
    text = order[place]
    sizes, counts = lengths[lengths > 0].unique_consecutive(return_counts=True)
    groups = list(zip(counts.tolist(), sizes.tolist(), strict=True))

    hidden_states = model.embeddings(
        input_ids[text, position][None], types[text, position][None], position[None]
    )  # [1, tokens, hidden]
    for layer in model.encoder.layers:
        hidden_states = packed_layer(layer, hidden_states, groups)
    output = hidden_states.new_zeros(*input_ids.shape, hidden_states.shape[-1])
    output[text, position] = hidden_states[0]
    return BertModelOutput(output, model.pooler(output))


def packed_layer(layer: Any, hidden_states: Tensor, groups: Groups) -> Tensor:
    """A Post-LN `EncoderLayer` on packed texts, `[1, tokens, hidden]` to the same."""
    halves = (
        (
            layer.attention_norm,
            lambda x: layer.dropout(packed_attention(layer.attention, x, groups)),
        ),
        (layer.feed_forward_norm, layer.feed_forward),
    )
    for norm, half in halves:
        hidden_states = norm(hidden_states + half(hidden_states))
    return hidden_states


def packed_attention(attention: Any, hidden_states: Tensor, groups: Groups) -> Tensor:
    """`MultiHeadSelfAttention` on packed texts, `[1, tokens, hidden]` to the same."""
    heads = attention.num_heads
    dropout_p = attention.dropout.p if attention.training else 0.0
    pieces = [
        linear(hidden_states)[0].split([count * size for count, size in groups])
        for linear in (attention.query, attention.key, attention.value)
    ]
    contexts = []
    for *three, (count, size) in zip(*pieces, groups, strict=True):
        query, key, value = (split_heads(x.unflatten(0, (count, size)), heads) for x in three)
        context = fast_attention(query, key, value, None, dropout_p)
        contexts.append(merge_heads(context).flatten(0, 1))  # [count * size, hidden]
    return attention.output(torch.cat(contexts))[None]
