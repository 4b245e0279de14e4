"""From token ids to vectors: word, position and token type, added and normalized.

The last two functions are for texts longer than the model has positions for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from bertlab.config import BertConfig

# What sliding_windows is given is what its windows are: lists, or one-dimensional tensors.
Ids = TypeVar("Ids", list[int], Tensor)


# --- exercise 2.1: layer normalization ---
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-12) -> Tensor:
    """Give every vector mean 0 and variance 1, then scale and shift each unit.

        weight * (x - mean) / sqrt(variance + eps) + bias

    Mean and variance are taken over the last axis, of each vector by itself; the variance
    is the biased one (divided by `hidden`, not `hidden - 1`).

    Args:
        x: `[..., hidden]`.
        weight: `[hidden]`, the gain of each unit.
        bias: `[hidden]`, the shift of each unit.
        eps: keeps the division finite when all units are equal; BERT's is 1e-12.

    Returns:
        `[..., hidden]`, in the dtype of `x`. Half-precision input is computed in float32.

    Source: Ba, Kiros and Hinton 2016, section 3. In production: `torch.nn.functional.layer_norm`.
    """
    raise NotImplementedError("exercise 2.1")
# --- end of exercise 2.1 ---


# --- exercise 2.2: sinusoidal positions ---
def sinusoidal_positions(length: int, width: int) -> Tensor:
    """The fixed position table of the 2017 Transformer, which BERT replaced by a learned one.

        table[position, 2i]     = sin(position / 10000 ** (2i / width))
        table[position, 2i + 1] = cos(position / 10000 ** (2i / width))

    Args:
        length: the number of positions, counted from 0.
        width: the number of units of each position's vector; may be odd.

    Returns:
        `[length, width]`, float32. It has no parameters and no gradient.

    Raises:
        ValueError: `length` or `width` is less than 1.

    Source: Vaswani et al. 2017, section 3.5.
    """
    raise NotImplementedError("exercise 2.2")
# --- end of exercise 2.2 ---


# --- exercise 2.3: BERT's embeddings ---
class BertEmbeddings(nn.Module):
    """Word, position and token-type vectors, added, normalized and thinned by dropout.

    Attributes:
        word: `nn.Embedding`, `[vocab_size, hidden]`; the row of `pad_token_id` gets no gradient.
        position: `nn.Embedding`, `[max_position_embeddings, hidden]`.
        token_type: `nn.Embedding`, `[type_vocab_size, hidden]`.
        norm: `nn.LayerNorm` with the config's eps.
        dropout: `nn.Dropout` with `hidden_dropout_prob`.

    Source: Devlin et al. 2019, section 3 and figure 2.
    In production: `transformers.models.bert.modeling_bert.BertEmbeddings`.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        raise NotImplementedError("exercise 2.3")

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Look up and add the three vectors of every token, then normalize.

        Args:
            input_ids: `[batch, seq]`, rows of the word table.
            token_type_ids: `[batch, seq]`, 0 for the first text and 1 for the second;
                all 0 when None.
            position_ids: `[batch, seq]` or `[seq]`; 0, 1, 2, ... when None. When given,
                they may restart, so `seq` may then be longer than the table.

        Returns:
            `[batch, seq, hidden]`.

        Raises:
            ValueError: `position_ids` is None and `seq` is more than
                `max_position_embeddings`; the message says both numbers.
        """
        raise NotImplementedError("exercise 2.3")
# --- end of exercise 2.3 ---


# --- exercise 2.4: sliding windows ---
def sliding_windows(input_ids: Ids, max_length: int, stride: int) -> list[Ids]:
    """Cut a long text into windows in which neighbors share `stride` tokens.

    `stride` has the meaning it has in Transformers: the overlap, not the step. Each window
    starts `max_length - stride` tokens after the one before it, and the first window that
    reaches the end of the text is the last. So every token is in some window, no window
    lies inside another, and only the last may be shorter than `max_length`.

    Args:
        input_ids: the text's ids, a list or a tensor `[seq]`, without special tokens.
        max_length: the most tokens a window may have (leave room for [CLS] and [SEP]).
        stride: how many tokens a window shares with the next; 0 is no overlap.

    Returns:
        The windows in order, each a slice of `input_ids`; a single one for a short text.

    Raises:
        ValueError: `input_ids` is empty, or `stride` is not in `[0, max_length)`: the
            windows would then never advance.

    Source: Devlin et al.'s `run_squad.py` (2018), "sliding window approach".
    In production: `tokenizer(..., stride=..., return_overflowing_tokens=True)`.
    """
    raise NotImplementedError("exercise 2.4")
# --- end of exercise 2.4 ---


# --- exercise 2.5: stitch the windows ---
def stitch_windows(vectors: Sequence[Tensor] | Tensor, length: int, stride: int) -> Tensor:
    """One vector a token, each from the window in which the token stands deepest.

    Depth is the distance to the nearest *cut*: a place where the text went on but the window
    did not. The text's own beginning and end are no cuts. Where a token stands equally deep
    in two windows, the earlier one counts. For windows of one size this means that each
    overlap is cut in its middle, and an odd token in the middle goes to the earlier window.

    Args:
        vectors: one `[window, hidden]` tensor for each window that `sliding_windows` made, in
            order, without the vectors of special tokens; or all as `[windows, max_length,
            hidden]`, where the last may be padded at its end.
        length: the number of tokens of the whole text.
        stride: the overlap the windows were made with.

    Returns:
        `[length, hidden]`; gradients flow to the windows.

    Raises:
        ValueError: there is no window, or number and sizes of the windows are not those that
            `sliding_windows` makes of `length` tokens with this `stride`.

    Source: `_check_is_max_context` of Devlin et al.'s `run_squad.py` (2018).
    """
    raise NotImplementedError("exercise 2.5")
# --- end of exercise 2.5 ---
