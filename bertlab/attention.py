"""Attention: every token asks all others what they know, several times side by side.

From the formula to the layer BERT uses: first with the weights in plain sight, then by
the kernel that never stores them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertlab.config import BertConfig


# --- exercise 3.1: scaled dot-product attention ---
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mix the values, weighted by how well each query matches each key.

        weights = softmax(query @ key.T / sqrt(head) + mask)        context = weights @ value

    Args:
        query: `[batch, heads, query, head]`.
        key: `[batch, heads, key, head]`.
        value: `[batch, heads, key, head]`.
        mask: added to the scores: 0 where a key may be seen, a large negative number where
            not; broadcast to `[batch, heads, query, key]`.

    Returns:
        `(context, weights)`: `[batch, heads, query, head]`, and `[batch, heads, query, key]`
        of which each row sums to 1.

    Source: Vaswani et al. 2017, section 3.2.1, equation 1.
    """
    raise NotImplementedError("exercise 3.1")
# --- end of exercise 3.1 ---


# --- exercise 3.2: split and merge heads ---
def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Give every head its own slice of the units, and its own axis.

    Head `h` gets the units `h * head` to `(h + 1) * head - 1`, where `head` is
    `hidden / num_heads`.

    Args:
        x: `[batch, seq, hidden]`.
        num_heads: how many slices to make.

    Returns:
        `[batch, num_heads, seq, head]`.

    Raises:
        ValueError: `hidden` is not a multiple of `num_heads`.

    Source: Vaswani et al. 2017, section 3.2.2.
    """
    raise NotImplementedError("exercise 3.2")


def merge_heads(x: Tensor) -> Tensor:
    """Put the heads' slices side by side again: the inverse of `split_heads`.

    Args:
        x: `[batch, heads, seq, head]`.

    Returns:
        `[batch, seq, heads * head]`.
    """
    raise NotImplementedError("exercise 3.2")
# --- end of exercise 3.2 ---


# --- exercise 3.3: from a padding mask to an additive mask ---
def additive_mask(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn 1 for a token and 0 for padding into what is added to attention scores.

    Args:
        attention_mask: `[batch, seq]`, 1 (or True) for a real token, 0 for padding.
        dtype: the floating dtype of the scores.

    Returns:
        `[batch, 1, 1, seq]` of `dtype`: 0 for a real token, and for padding a number so low
        that its weight is 0, yet finite even after a score was added to it. So the weights
        of a text that is nothing but padding are meaningless, but never NaN.

    Raises:
        ValueError: `attention_mask` does not have two axes.

    In production: `transformers.masking_utils.create_bidirectional_mask`.
    """
    raise NotImplementedError("exercise 3.3")
# --- end of exercise 3.3 ---


# --- exercise 3.4: attention without the weights ---
def fast_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """The context of `scaled_dot_product_attention`, by a kernel that never holds the weights.

    Memory grows with `seq`, not with `seq` squared, because the softmax is summed up block
    by block.

    Args:
        query: `[batch, heads, query, head]`.
        key: `[batch, heads, key, head]`.
        value: `[batch, heads, key, head]`.
        mask: added to the scores, broadcast to `[batch, heads, query, key]`; of the dtype of
            `query`.
        dropout_p: the probability with which a weight is dropped (training only).

    Returns:
        `[batch, heads, query, head]`.

    Source: Dao et al. 2022, "FlashAttention", section 3.1.
    In production: `torch.nn.functional.scaled_dot_product_attention`.
    """
    raise NotImplementedError("exercise 3.4")
# --- end of exercise 3.4 ---


# --- exercise 3.5: multi-head self-attention ---
class MultiHeadSelfAttention(nn.Module):
    """Several attentions side by side, each with its own queries, keys and values.

    Attributes:
        num_heads: how many heads there are.
        query, key, value: `nn.Linear`, `hidden` to `hidden`, with bias.
        output: `nn.Linear`, mixes the merged heads.
        dropout: `nn.Dropout` with `attention_probs_dropout_prob`, on the weights.

    Residual connection, LayerNorm and the dropout after `output` belong to the encoder layer.

    Source: Vaswani et al. 2017, section 3.2.2.
    In production: `BertSelfAttention` followed by `BertSelfOutput.dense`.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        raise NotImplementedError("exercise 3.5")

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Let every token attend to all real tokens of its text.

        Args:
            hidden_states: `[batch, seq, hidden]`.
            attention_mask: `[batch, seq]`, 1 for a real token and 0 for padding; all real
                when None.
            return_weights: also return the weights. They then have to be stored: slower.

        Returns:
            `[batch, seq, hidden]`, or `(output, weights)` with weights
            `[batch, heads, seq, seq]`, as they are before dropout.
        """
        raise NotImplementedError("exercise 3.5")
# --- end of exercise 3.5 ---
