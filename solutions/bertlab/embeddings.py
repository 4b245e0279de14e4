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
    ### BEGIN SOLUTION
    # Eight bits of precision are too few for a mean and a variance: bfloat16 is widened.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centered = wide - wide.mean(dim=-1, keepdim=True)
    variance = centered.square().mean(dim=-1, keepdim=True)
    normalized = centered * torch.rsqrt(variance + eps)
    return (normalized * weight + bias).to(x.dtype)
    ### END SOLUTION


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
    ### BEGIN SOLUTION
    if length < 1 or width < 1:
        raise ValueError(f"length is {length} and width is {width}, but both must be at least 1")
    position = torch.arange(length, dtype=torch.float64)[:, None]  # [length, 1]
    unit = torch.arange(width)
    pair = unit - unit % 2  # 0, 0, 2, 2, 4, 4, ...: a sine and a cosine share a wavelength
    angle = position / 10000.0 ** (pair / width).double()  # [length, width]
    return torch.where(unit % 2 == 0, angle.sin(), angle.cos()).float()
    ### END SOLUTION


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
        ### BEGIN SOLUTION
        hidden = config.hidden_size
        self.word = nn.Embedding(config.vocab_size, hidden, padding_idx=config.pad_token_id)
        self.position = nn.Embedding(config.max_position_embeddings, hidden)
        self.token_type = nn.Embedding(config.type_vocab_size, hidden)
        self.norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        ### END SOLUTION

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
        ### BEGIN SOLUTION
        if position_ids is None:
            length, limit = input_ids.shape[-1], self.position.num_embeddings
            if length > limit:
                raise ValueError(
                    f"input_ids has {length} tokens, but this model has positions for {limit}; "
                    "see bertlab.embeddings.sliding_windows"
                )
            position_ids = torch.arange(length, device=input_ids.device)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        summed = self.word(input_ids) + self.token_type(token_type_ids)
        return self.dropout(self.norm(summed + self.position(position_ids)))
        ### END SOLUTION


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
    ### BEGIN SOLUTION
    if len(input_ids) == 0:
        raise ValueError("input_ids has 0 tokens, but must have at least 1")
    if not 0 <= stride < max_length:
        raise ValueError(
            f"stride is {stride}, but must be at least 0 and less than max_length ({max_length})"
        )
    step = max_length - stride
    # A window that starts within the last `stride` tokens would hold nothing new.
    starts = range(0, max(len(input_ids) - stride, 1), step)
    return [input_ids[start : start + max_length] for start in starts]
    ### END SOLUTION


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
    ### BEGIN SOLUTION
    if len(vectors) == 0 or length < 1:
        raise ValueError(
            f"vectors has {len(vectors)} windows for {length} tokens; both must be 1 or more"
        )
    given = [len(window) for window in vectors]
    # A text that fits into one window has no overlap, whatever the stride.
    overlap = stride if given[0] < length else 0
    sizes = [len(window) for window in sliding_windows(list(range(length)), given[0], overlap)]
    if given not in (sizes, [*sizes[:-1], given[0]]):
        raise ValueError(
            f"vectors has windows of {given} tokens, but {length} tokens "
            f"make windows of {sizes} with stride {stride}"
        )
    kept = []
    for index, (window, size) in enumerate(zip(vectors, sizes, strict=True)):
        first = (overlap + 1) // 2 if index > 0 else 0  # the deeper half of each overlap
        last = size - overlap // 2 if index < len(sizes) - 1 else size
        kept.append(window[first:last])
    return torch.cat(kept)
    ### END SOLUTION


# --- end of exercise 2.5 ---
