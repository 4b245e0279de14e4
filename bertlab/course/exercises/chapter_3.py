"""Chapter 3: attention, from the formula to the layer BERT uses."""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
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
    normal,
    padding_mask,
    pair,
    parameters_like,
    with_parameters,
)

# --- shared by the exercises ---


def low_mask(lengths: list[int], seq: int) -> Tensor:
    """An additive float32 mask `[batch, 1, 1, seq]` that hides what follows each length."""
    lowest = torch.finfo(torch.float32).min / 2
    return (padding_mask(lengths, seq) == 0)[:, None, None, :] * lowest


def keeps_weights(call: Callable[[], Any], seq: int) -> bool:
    """Say whether a call keeps a `[..., seq, seq]` matrix of weights for the backward pass."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    # A mask that was expanded has the shape of weights too, but not their memory.
    return any(
        tensor.shape[-2:] == (seq, seq)
        and tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
        for tensor in kept
    )


# --- 3.1: scaled dot-product attention ---

Attention = tuple[Tensor, Tensor]


def torch_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Attention:
    """PyTorch's attention; the weights are what it makes of the identity matrix as values."""
    identity = torch.eye(key.shape[-2], dtype=value.dtype, device=value.device)
    identity = identity.expand(*key.shape[:-2], -1, -1)
    context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return context, F.scaled_dot_product_attention(query, key, identity, attn_mask=mask)


def _with_query(factor: Callable[[Tensor], float]) -> Callable[..., Attention]:
    """Attention whose scores are off by a factor, which may depend on the query's shape."""
    return lambda query, key, value, mask=None: torch_attention(
        query * factor(query), key, value, mask
    )


def _with_mask(change: Callable[[Tensor, Tensor], Tensor | None]) -> Callable[..., Attention]:
    """Attention with another mask."""
    return lambda query, key, value, mask=None: torch_attention(
        query, key, value, None if mask is None else change(mask, query)
    )


def _over_queries(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Attention:
    if mask is not None:
        mask = mask.expand(-1, -1, query.shape[-2], -1).mT
    weights = torch_attention(key, query, query, mask)[1].mT
    return weights @ value, weights


def _masked_afterwards(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Attention:
    context, weights = torch_attention(query, key, value)
    if mask is None:
        return context, weights
    weights = weights.masked_fill(mask < -1e4, 0.0)
    return weights @ value, weights


def _weights_detached(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Attention:
    context, weights = torch_attention(query, key, value, mask)
    return context, weights.detach()


def _weights_divided(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Attention:
    size = query.shape[-1] ** 0.5
    context, weights = torch_attention(query * size, key, value, mask)
    return context / size, weights / size


def _attention_inputs(
    rng: np.random.Generator,
    batch: int,
    heads: int,
    length: int,
    size: int,
    keys: int | None = None,
    spread: float = 1.5,
) -> dict[str, Tensor]:
    """Queries and keys whose weights are far from uniform, and what gradients are taken of."""
    keys = length if keys is None else keys
    return {
        "query": normal(rng, batch, heads, length, size, scale=spread),
        "key": normal(rng, batch, heads, keys, size, scale=spread),
        "value": normal(rng, batch, heads, keys, size),
        "cotangent": normal(rng, batch, heads, length, size),
    }


def _attention_cases(rng: np.random.Generator) -> Iterator[Case]:
    yield Case("one text, one head, no mask", _attention_inputs(rng, 1, 1, 4, 5))
    inputs = _attention_inputs(rng, 3, 2, 7, 8)
    inputs["mask"] = low_mask([7, 4, 1], 7)
    yield Case("two heads, padding in two texts", inputs)
    inputs = _attention_inputs(rng, 2, 3, 6, 8)
    distance = (torch.arange(6)[:, None] - torch.arange(6)[None, :]).abs()
    slopes = 0.25 + torch.arange(3.0)[:, None, None] / 2
    inputs["mask"] = -(slopes * distance)[None]  # [1, heads, query, key]
    yield Case("a mask of small numbers, another for each head and query", inputs)
    inputs = _attention_inputs(rng, 2, 2, 5, 16, keys=9)
    yield Case("fewer queries than keys", inputs)
    inputs = _attention_inputs(rng, 2, 2, 5, 8)
    inputs["mask"] = low_mask([0, 5], 5)
    inputs["cotangent"][0] = 0  # what comes of no token means nothing, nor does its gradient
    yield Case("a text that is nothing but padding", inputs)
    inputs = _attention_inputs(rng, 1, 2, 6, 16)
    inputs["query"] = 5 * inputs["query"]
    inputs["key"] = inputs["query"] + 0.5 * inputs["key"]
    yield Case("scores beyond 100, whose exponential float32 does not hold", inputs)


def _attention_probe(
    part: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cotangent: Tensor,
    mask: Tensor | None = None,
) -> dict[str, Any]:
    wanted = {"query": query, "key": key, "value": value}
    wanted = {name: tensor.clone().requires_grad_() for name, tensor in wanted.items()}
    attend = part.scaled_dot_product_attention
    arguments = wanted.values() if mask is None else [*wanted.values(), mask]
    context, weights = pair(attend(*arguments), "(context, weights)")
    loss = (context * cotangent).sum()
    if isinstance(weights, Tensor):  # who looks at the weights may train through them
        loss = loss + (weights * weights).sum()
    found = gradients(loss, torch.ones_like(loss), wanted)
    return {"context": context, "weights": weights, **found}


# --- 3.2: split and merge heads ---


def chunked_heads(x: Tensor, num_heads: int) -> Tensor:
    """Cut the units into slices and stack them as heads."""
    if x.shape[-1] % num_heads != 0:
        raise ValueError(
            f"x has {x.shape[-1]} units, but must have a multiple of num_heads ({num_heads})"
        )
    return torch.stack(x.chunk(num_heads, dim=-1), dim=1)


def joined_heads(x: Tensor) -> Tensor:
    """Put the heads side by side."""
    return torch.cat(x.unbind(dim=1), dim=-1)


def _viewed_as_heads(x: Tensor, num_heads: int) -> Tensor:
    chunked_heads(x, num_heads)
    return x.reshape(x.shape[0], num_heads, x.shape[1], -1)


def _merged_by_view(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], x.shape[2], -1)


def _dealt_in_turn(x: Tensor, num_heads: int) -> Tensor:
    chunked_heads(x, num_heads)
    regrouped = x.reshape(*x.shape[:-1], -1, num_heads).mT.reshape(x.shape)
    return chunked_heads(regrouped, num_heads)


def _interleaved(x: Tensor) -> Tensor:
    return torch.stack(x.unbind(dim=1), dim=-1).reshape(x.shape[0], x.shape[2], -1)


def _left_to_torch(x: Tensor, num_heads: int) -> Tensor:
    try:
        return chunked_heads(x, num_heads)
    except ValueError as error:
        raise RuntimeError("shape is invalid for input of this size") from error


def _heads_cases(rng: np.random.Generator) -> Iterator[Case]:
    for name, batch, seq, heads, size in (
        ("one head", 2, 5, 1, 4),
        ("2 texts, 5 tokens, 3 heads of 4 units", 2, 5, 3, 4),
        ("4 texts, 6 tokens, 8 heads of 3 units", 4, 6, 8, 3),
    ):
        inputs = {
            "x": normal(rng, batch, seq, heads * size),
            "split": normal(rng, batch, heads, seq, size),
            "heads": heads,
        }
        yield Case(name, inputs)
    inputs["from_transposed"] = True
    yield Case("the input is a transposed view of another tensor", inputs)


def _heads_probe(
    part: Any, x: Tensor, split: Tensor, heads: int, from_transposed: bool = False
) -> dict[str, Any]:
    if from_transposed:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
        split = split.transpose(0, 2).contiguous().transpose(0, 2)
    x = x.clone().requires_grad_()
    given = part.split_heads(x, heads)
    uneven = torch.zeros(1, 2, 2 * heads + 1, device=x.device)
    return {
        "split_heads": given,
        "merge_heads": part.merge_heads(split),
        **gradients(given, split, {"x": x}),
        "of a width that does not divide": error_of(
            lambda: part.split_heads(uneven, heads) if heads > 1 else None
        ),
    }


# --- 3.3: from a padding mask to an additive mask ---


def transformers_mask(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Transformers' mask, halved: so that a score may still be added to its lowest number."""
    from transformers.masking_utils import create_bidirectional_mask

    if attention_mask.dim() != 2:
        shape = list(attention_mask.shape)
        raise ValueError(f"attention_mask has shape {shape}, but must be [batch, seq]")
    states = torch.zeros(*attention_mask.shape, 1, dtype=dtype, device=attention_mask.device)
    mask = create_bidirectional_mask(_eager_config(), states, attention_mask)
    if mask is None:  # nothing is padding
        return torch.zeros_like(states).mT[:, None]
    return mask[:, :, :1] / 2


@lru_cache(maxsize=1)
def _eager_config() -> Any:
    from transformers.models.bert.configuration_bert import BertConfig

    config = BertConfig()
    config._attn_implementation = "eager"
    return config


def _filled_with(low: Callable[[torch.dtype], float]) -> Callable[..., Tensor]:
    """The reference with another number at padding."""

    def mask(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
        right = transformers_mask(attention_mask, dtype)
        return torch.where(right == 0, right, torch.tensor(low(dtype)).to(right))

    return mask


def _billion(dtype: torch.dtype) -> float:
    return float("-inf") if dtype == torch.float16 else -1e9


def _additive_mask_cases(rng: np.random.Generator) -> Iterator[Case]:
    def inputs(lengths: list[int], seq: int, spread: float, mean: float = 0.0) -> dict[str, Any]:
        scores = normal(rng, len(lengths), 2, seq, seq, scale=spread, mean=mean)
        return {"attention_mask": padding_mask(lengths, seq), "scores": scores}

    yield Case("padding in two of three texts", inputs([6, 4, 1], 6, 2.0))
    yield Case("no padding at all", inputs([5, 5], 5, 2.0))
    left = inputs([4, 2], 5, 2.0)
    left["attention_mask"] = left["attention_mask"].flip(-1).bool()
    yield Case("a mask of True and False, padding on the left", left)
    yield Case("a text that is nothing but padding", inputs([5, 0], 5, 2.0))
    yield Case("padding whose scores are higher by 30", _tempting(inputs([6, 3], 6, 1.0), 30.0))
    far = _tempting(inputs([5, 3], 5, 1.0), 2000.0)
    yield Case("padding whose scores are higher by 2000", far)
    yield Case("bfloat16, one text nothing but padding", inputs([4, 0], 4, 3.0), dtype="bfloat16")
    yield Case("float16, one text nothing but padding", inputs([4, 0], 4, 3.0), dtype="float16")
    yield Case(
        "float16, scores near -60, one text nothing but padding",
        inputs([4, 0], 4, 3.0, mean=-60.0),
        dtype="float16",
    )


def _tempting(inputs: dict[str, Any], extra: float) -> dict[str, Any]:
    """Raise the scores of padding, so that a mask that is not low enough lets it through."""
    inputs["scores"] += extra * (inputs["attention_mask"] == 0)[:, None, None, :]
    return inputs


def _additive_mask_probe(part: Any, attention_mask: Tensor, scores: Tensor) -> dict[str, Any]:
    mask = part.additive_mask(attention_mask, scores.dtype)
    masked = scores + mask
    weights = masked.softmax(dim=-1)
    texts = attention_mask.any(dim=-1)  # the weights of a text without a token mean nothing
    return {
        "shape of the mask": list(mask.shape),
        "dtype of the mask is the one asked for": mask.dtype == scores.dtype,
        "the mask where there are tokens": mask.expand(-1, 1, 1, -1)[:, 0, 0][
            attention_mask.bool()
        ],
        "softmax(scores + mask)": weights[texts],
        "scores + mask is finite": bool(masked.isfinite().all()),
        "softmax(scores + mask) is finite": bool(weights.isfinite().all()),
        "of a mask with four axes": error_of(
            lambda: part.additive_mask(attention_mask[:, None, None, :], scores.dtype)
        ),
    }


# --- 3.4: attention without storing the weights ---


def torch_fast_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """PyTorch's fused attention."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p)


def _fast(**changes: Any) -> Callable[..., Tensor]:
    """PyTorch's attention called with other options."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *_: Any) -> Tensor:
        options = {"attn_mask": mask, **changes}
        return F.scaled_dot_product_attention(query, key, value, **options)

    return attend


def _mask_as_boolean(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *_: Any
) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, None if mask is None else mask.bool())


def _scaled_twice(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *_: Any
) -> Tensor:
    return torch_fast_attention(query * query.shape[-1] ** -0.5, key, value, mask)


def _heads_last(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *_: Any
) -> Tensor:
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


def _weights_kept(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *_: Any
) -> Tensor:
    context, weights = torch_attention(query, key, value, mask)
    return context + 0 * (weights * weights).sum()


def _fast_cases(rng: np.random.Generator) -> Iterator[Case]:
    yield Case("no mask", _attention_inputs(rng, 2, 3, 9, 8))
    inputs = _attention_inputs(rng, 3, 2, 7, 8)
    inputs["mask"] = low_mask([7, 4, 1], 7)
    yield Case("padding in two texts", inputs)
    inputs = _attention_inputs(rng, 2, 2, 5, 8)
    inputs["mask"] = low_mask([0, 5], 5)
    inputs["cotangent"][0] = 0  # what comes of no token means nothing, nor does its gradient
    yield Case("a text that is nothing but padding", inputs)
    yield Case("96 tokens", _attention_inputs(rng, 1, 2, 96, 16, spread=1.2))


def _fast_probe(
    part: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cotangent: Tensor,
    mask: Tensor | None = None,
) -> dict[str, Any]:
    wanted = {"query": query, "key": key, "value": value}
    wanted = {name: tensor.clone().requires_grad_() for name, tensor in wanted.items()}
    context = part.fast_attention(*wanted.values(), mask)
    return {
        "context": context,
        **gradients(context, cotangent, wanted),
        "a matrix of weights is kept": keeps_weights(
            lambda: part.fast_attention(*wanted.values()), query.shape[-2]
        ),
    }


# --- 3.5: multi-head self-attention ---


class ReferenceMultiHeadSelfAttention(nn.Module):
    """Transformers' `BertSelfAttention` followed by `BertSelfOutput.dense`."""

    _theirs: Any

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.bert import modeling_bert

        theirs = modeling_bert.BertSelfAttention(
            _transformers_config(
                config.hidden_size, config.num_attention_heads, config.attention_probs_dropout_prob
            )
        )
        self.num_heads = config.num_attention_heads
        self.query, self.key, self.value = theirs.query, theirs.key, theirs.value
        self.output = modeling_bert.BertSelfOutput(theirs.config).dense
        self.dropout = theirs.dropout
        # Not registered as a module: its layers are this module's, under this module's names.
        object.__setattr__(self, "_theirs", theirs)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Attend; weights, when asked for, are those before dropout."""
        mask = None
        if attention_mask is not None:
            mask = transformers_mask(attention_mask, hidden_states.dtype)
        if not return_weights:
            return self.output(self._attend(hidden_states, mask, "sdpa", self.training)[0])
        context, weights = self._attend(hidden_states, mask, "eager", self.training)
        if self.training:
            weights = self._attend(hidden_states, mask, "eager", False)[1]
        return self.output(context), weights

    def _attend(
        self, hidden_states: Tensor, mask: Tensor | None, implementation: str, training: bool
    ) -> Any:
        theirs = self._theirs
        theirs.query, theirs.key, theirs.value = self._projections()
        theirs.dropout, theirs.training = self.dropout, training
        theirs.config._attn_implementation = implementation
        return theirs(hidden_states, mask)

    def _projections(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.query, self.key, self.value


@lru_cache(maxsize=32)  # shared: `_attend` sets what it needs before each use
def _transformers_config(width: int, heads: int, dropout: float) -> Any:
    from transformers.models.bert.configuration_bert import BertConfig

    return BertConfig(
        hidden_size=width, num_attention_heads=heads, attention_probs_dropout_prob=dropout
    )


class _WithoutOutput(ReferenceMultiHeadSelfAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mixing, self.output = self.output, nn.Identity()
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.output = mixing


class _Exchanged(ReferenceMultiHeadSelfAttention):
    def _projections(self) -> Any:
        return self.key, self.query, self.value


class _ValueUnused(ReferenceMultiHeadSelfAttention):
    def _projections(self) -> Any:
        return self.query, self.key, nn.Identity()


class _MaskIgnored(ReferenceMultiHeadSelfAttention):
    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, return_weights: bool = False
    ) -> Any:
        return super().forward(hidden_states, None, return_weights)


class _OneHead(ReferenceMultiHeadSelfAttention):
    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        self._theirs.attention_head_size = self.query.out_features
        self._theirs.scaling = self.query.out_features**-0.5
        return super()._attend(*args, **kwargs)


class _ScaledByHidden(ReferenceMultiHeadSelfAttention):
    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        self._theirs.scaling = self.query.out_features**-0.5
        return super()._attend(*args, **kwargs)


class _MergedWrongly(ReferenceMultiHeadSelfAttention):
    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        context, weights = super()._attend(*args, **kwargs)
        return chunked_heads(context, self.num_heads).reshape(context.shape), weights


class _ResidualInside(ReferenceMultiHeadSelfAttention):
    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, return_weights: bool = False
    ) -> Any:
        returned = super().forward(hidden_states, attention_mask, return_weights)
        if return_weights:
            return returned[0] + hidden_states, returned[1]
        return returned + hidden_states


class _WeightsAveraged(ReferenceMultiHeadSelfAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        returned = super().forward(*args, **kwargs)
        return (returned[0], returned[1].mean(1)) if isinstance(returned, tuple) else returned


class _WeightsAlways(ReferenceMultiHeadSelfAttention):
    def _attend(self, hidden_states: Tensor, mask: Any, implementation: str, training: bool) -> Any:
        return super()._attend(hidden_states, mask, "eager", training)


class _WeightsDropped(ReferenceMultiHeadSelfAttention):
    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, return_weights: bool = False
    ) -> Any:
        returned = super().forward(hidden_states, attention_mask, return_weights)
        if not return_weights:
            return returned
        return returned[0], F.dropout(returned[1], self.dropout.p, self.training)


class _DroppedInEval(ReferenceMultiHeadSelfAttention):
    def _attend(self, hidden_states: Tensor, mask: Any, implementation: str, training: bool) -> Any:
        return super()._attend(hidden_states, mask, implementation, implementation == "sdpa")


class _FastPathUndropped(ReferenceMultiHeadSelfAttention):
    def _attend(self, hidden_states: Tensor, mask: Any, implementation: str, training: bool) -> Any:
        training = training and implementation == "eager"
        return super()._attend(hidden_states, mask, implementation, training)


class _NeverDropped(ReferenceMultiHeadSelfAttention):
    def _attend(self, hidden_states: Tensor, mask: Any, implementation: str, training: bool) -> Any:
        return super()._attend(hidden_states, mask, implementation, False)


class _OutputDropped(_NeverDropped):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        returned = super().forward(*args, **kwargs)
        if isinstance(returned, tuple):
            return self.dropout(returned[0]), returned[1]
        return self.dropout(returned)


_SIZES = {"hidden_size": 24, "num_attention_heads": 4, "attention_probs_dropout_prob": 0.0}
_PEAKED = {"query.weight": 2.0, "key.weight": 2.0}


def _layer_state(rng: np.random.Generator, fields: Mapping[str, Any]) -> dict[str, Tensor]:
    width = fields["hidden_size"]
    names = ("query", "key", "value", "output")
    layers = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
    return parameters_like(layers, rng, _PEAKED)


def _layer_cases(rng: np.random.Generator) -> Iterator[Case]:
    def inputs(batch: int, seq: int, **changes: Any) -> dict[str, Any]:
        fields = {**_SIZES, **changes}
        shape = batch, seq, fields["hidden_size"]
        return {
            "fields": fields,
            "state": _layer_state(rng, fields),
            "hidden_states": normal(rng, *shape),
            "cotangent": normal(rng, *shape),
        }

    def padded(lengths: list[int], seq: int, **changes: Any) -> dict[str, Any]:
        given = inputs(len(lengths), seq, **changes)
        mask = padding_mask(lengths, seq)
        given["hidden_states"] += 4.0 * (mask == 0)[..., None]  # padding that stands out
        given["cotangent"] *= mask[..., None]
        return {**given, "attention_mask": mask}

    def real(given: dict[str, Any]) -> dict[str, Any]:
        return {"output": given["attention_mask"], "output beside weights": given["attention_mask"]}

    yield Case("no mask, in evaluation", inputs(2, 11))
    given = padded([9, 5, 1], 9)
    yield Case("padding in two of three texts", given, real(given))
    given = padded([6, 0], 6)
    yield Case("a text that is nothing but padding", given, real(given))
    given = padded([7, 4], 7, hidden_size=30, num_attention_heads=3)
    yield Case("3 heads of 10 units", given, real(given))
    given = inputs(64, 1, attention_probs_dropout_prob=0.5)
    width = given["fields"]["hidden_size"]
    given["state"]["output.weight"] = torch.eye(width)  # the output shows the heads as they are
    given["state"]["output.bias"] = torch.zeros(width)
    yield Case("texts of one token, dropout 0.5", {**given, "dropout": True})


def _layer_probe(
    part: Any,
    fields: dict[str, Any],
    state: dict[str, Tensor],
    hidden_states: Tensor,
    cotangent: Tensor,
    attention_mask: Tensor | None = None,
    dropout: bool = False,
) -> dict[str, Any]:
    module = with_parameters(part.MultiHeadSelfAttention(bert_config(**fields)), state)
    if dropout:
        return _dropout_found(module, hidden_states, fields["num_attention_heads"])
    hidden_states = hidden_states.clone().requires_grad_()
    returned = module(hidden_states, attention_mask, return_weights=True)
    beside, weights = pair(returned, "(output, weights)")
    output = module(hidden_states, attention_mask)
    # The key's bias is left out: it adds the same to all scores of a query, so its gradient is 0.
    wanted = {name: p for name, p in module.named_parameters() if name != "key.bias"}
    wanted["hidden_states"] = hidden_states
    slow = gradients(beside, cotangent, wanted)
    asking = slice(None) if attention_mask is None else attention_mask.bool()
    return {
        "shape of the weights": list(weights.shape),
        "output": output,
        "output beside weights": beside,
        "weights of the real tokens": weights.transpose(1, 2)[asking],
        **gradients(output, cotangent, wanted),
        **{f"{name}, beside weights": found for name, found in slow.items()},
        "every output is finite": bool(output.isfinite().all() and beside.isfinite().all()),
        "a matrix of weights is kept though none were asked for": keeps_weights(
            lambda: module(hidden_states), hidden_states.shape[1]
        ),
    }


def _dropout_found(module: Any, hidden_states: Tensor, heads: int) -> dict[str, Any]:
    """What becomes of the heads of one-token texts, whose only weight is 1 or dropped."""
    found = {}
    for mode in ("evaluation", "training"):
        module.train(mode == "training")
        alone = module(hidden_states)
        beside, weights = pair(module(hidden_states, return_weights=True), "(output, weights)")
        for name, output in (("alone", alone), ("beside weights", beside)):
            times = (output / module.value(hidden_states)).unflatten(-1, (heads, -1)).flatten(0, 2)
            times = (times.detach().cpu().double() * 100).round() / 100 + 0.0
            pairs = {(min(units), max(units)) for units in times.tolist()}
            what = f"in {mode}, {name}: the least and largest multiple of the value in a head"
            found[what] = sorted(pairs)
        found[f"weights in {mode}"] = weights
    return found


# --- 3.6: clinic ---


def torch_reading(padding: Tensor) -> Tensor:
    """Look at which tokens PyTorch's own attention sees, given the mask."""
    dtype = padding.dtype if padding.is_floating_point() else torch.float32
    attention = nn.MultiheadAttention(1, 1, batch_first=True, device=padding.device, dtype=dtype)
    states = torch.zeros(*padding.shape, 1, device=padding.device, dtype=dtype)
    _, weights = attention(states, states, states, key_padding_mask=padding)
    return (weights[:, 0] > 0).long()


def _only_boolean_turned(padding: Tensor) -> Tensor:
    return torch_reading(padding) ^ int(padding.is_floating_point())


def _still_additive(padding: Tensor) -> Tensor:
    seen = torch_reading(padding)
    return torch.zeros(seen.shape, device=seen.device).masked_fill(seen == 0, float("-inf"))


def _clinic_cases(rng: np.random.Generator) -> Iterator[Case]:
    lengths = sorted(int(length) for length in rng.integers(1, 8, 4))
    is_padding = padding_mask([8, *lengths], 8) == 0
    additive = torch.zeros(is_padding.shape).masked_fill(is_padding, float("-inf"))
    yield Case("True is padding", {"padding": is_padding})
    yield Case("minus infinity is padding", {"padding": additive})
    yield Case("True is padding, on the left", {"padding": is_padding.flip(-1)})
    yield Case("no padding at all", {"padding": torch.zeros(2, 5)})
    yield Case("float16, minus infinity is padding", {"padding": additive}, dtype="float16")


def _clinic_probe(part: Any, padding: Tensor) -> Any:
    return part.mend_mask(padding)


_NAN_MASK = (
    "Where a whole row is padding, every score is minus infinity, and the softmax divides 0 by 0: "
    "NaN. One empty text in a batch, and the loss of the whole batch is NaN. "
)

EXERCISES = [
    Exercise(
        id="3.1",
        reference={"scaled_dot_product_attention": torch_attention},
        reference_name="torch.nn.functional.scaled_dot_product_attention",
        cases=_attention_cases,
        probe=_attention_probe,
        misconceptions=(
            Misconception(
                "the scores are not scaled",
                "A score is a sum of `head` products, so its variance grows with `head`: 64 in "
                "BERT, if queries and keys have variance 1. Without the division by √head the "
                "softmax puts nearly all its weight on one key, and then its gradient is nearly 0.",
                {"scaled_dot_product_attention": _with_query(lambda q: q.shape[-1] ** 0.5)},
            ),
            Misconception(
                "the scores are divided by √(heads · head), the whole width",
                "A score is a sum over the units of one head, so it is the head's width that "
                "counts: `query.shape[-1]`, 64 in BERT-Base, and not hidden_size, 768. Your "
                "weights come out too even by a factor of √heads in the scores.",
                {"scaled_dot_product_attention": _with_query(lambda q: q.shape[1] ** -0.5)},
            ),
            Misconception(
                "the scores are divided by the head's width, not by its square root",
                "The variance of a sum of n products grows like n, so its typical size grows like "
                "√n. Dividing by n itself makes the scores too small, and attention too even.",
                {"scaled_dot_product_attention": _with_query(lambda q: q.shape[-1] ** -0.5)},
            ),
            Misconception(
                "the weights are divided by √head, and the scores are not",
                "The division has to come before the softmax, where it makes the weights less "
                "extreme. After it, it only makes them too small: the rows no longer sum to 1.",
                {"scaled_dot_product_attention": _weights_divided},
            ),
            Misconception(
                "the softmax runs over the queries",
                "Each query shares its attention out among the keys, so every row of the weights "
                "sums to 1. In `[batch, heads, query, key]` that is the last axis, dim=-1. With as "
                "many queries as keys the shapes fit either way.",
                {"scaled_dot_product_attention": _over_queries},
            ),
            Misconception(
                "the mask is not used",
                "Padding gets attention like any word, so what a text means depends on how long "
                "the other texts of its batch are. Add the mask to the scores.",
                {"scaled_dot_product_attention": _with_mask(lambda mask, query: None)},
            ),
            Misconception(
                "the masked weights are set to 0 after the softmax",
                "The padding has then already taken its share, and the rest of the row sums to "
                "less than 1. Add the mask before the softmax: what is left is shared out anew.",
                {"scaled_dot_product_attention": _masked_afterwards},
            ),
            Misconception(
                "the mask is divided by √head as well",
                "Scale the product of query and key, then add the mask. Where the mask is 0 or "
                "enormous nobody can tell. But masks of small numbers exist (ALiBi and T5 push "
                "distant tokens down by them), and they would come out too weak.",
                {
                    "scaled_dot_product_attention": _with_mask(
                        lambda mask, query: mask * query.shape[-1] ** -0.5
                    )
                },
            ),
            Misconception(
                "the mask is subtracted",
                "The mask holds 0 where a key may be seen and a large negative number where not, "
                "so it is added. Subtracted, it gives all the attention to what should be hidden.",
                {"scaled_dot_product_attention": _with_mask(lambda mask, query: -mask)},
            ),
            Misconception(
                "the weights are returned without their gradient",
                "Numbers for a picture need no gradient, but these weights are a result like the "
                "context. Whoever trains on them (a penalty for scattered attention, a student "
                "model that imitates its teacher's attention) would train nothing, and get no "
                "error. Return them without `detach()`.",
                {"scaled_dot_product_attention": _weights_detached},
            ),
        ),
        hints=(
            "Four steps: a score for each pair of query and key, the mask, the softmax, the "
            "weighted sum. Write the shape beside each line; every step works on the last two "
            "axes only, so batch and heads come along by themselves.",
            "`query @ key.transpose(-2, -1)` is `[batch, heads, query, key]`. Divide it by the "
            "square root of the last axis of `query`, add the mask if there is one, and take the "
            "softmax over the keys. Leave the exponential to `torch.softmax`: it subtracts the "
            "largest score first, so that large scores do not overflow.",
            "scores = query times key transposed, times `query.shape[-1] ** -0.5`; "
            "`scores = scores + mask` unless mask is None; weights = softmax of the scores with "
            "dim=-1; the context is `weights @ value`; return context and weights, in this order.",
        ),
    ),
    Exercise(
        id="3.2",
        reference={"split_heads": chunked_heads, "merge_heads": joined_heads},
        reference_name="torch.chunk and torch.cat (BertSelfAttention views and transposes)",
        cases=_heads_cases,
        probe=_heads_probe,
        misconceptions=(
            Misconception(
                "both functions change the shape without exchanging axes",
                "The shapes are right and the numbers are not. `view` and `reshape` read memory in "
                "order: the units of the first token, then those of the second. Asked for "
                "[batch, heads, seq, head] at once, they cut the *sequence* into pieces and call "
                "those heads. Your two functions undo each other, so a round trip does not show "
                "it. Cut the last axis first, then exchange two axes.",
                {"split_heads": _viewed_as_heads, "merge_heads": _merged_by_view},
            ),
            Misconception(
                "split_heads changes the shape without exchanging axes",
                "The shape is right and the numbers are not. `view` and `reshape` read memory in "
                "order: the units of the first token, then those of the second. Asked for "
                "[batch, heads, seq, head] at once, they cut the *sequence* into pieces and call "
                "those heads. Cut the last axis in two, then exchange the axes seq and heads.",
                {"split_heads": _viewed_as_heads},
            ),
            Misconception(
                "merge_heads changes the shape without exchanging axes",
                "The shape is right and the numbers are not: read in memory order, a row of the "
                "result holds one head of several tokens, not all heads of one token. Exchange "
                "the axes seq and heads first, then join the last two.",
                {"merge_heads": _merged_by_view},
            ),
            Misconception(
                "the units are dealt to the heads in turn",
                "You dealt the units out like cards: unit 0 to head 0, unit 1 to head 1. A head "
                "has neighbouring units, h · head to (h + 1) · head - 1. A model trained from "
                "scratch would not care; a checkpoint's weights rely on it. When you cut the last "
                "axis, `num_heads` comes before `head`.",
                {"split_heads": _dealt_in_turn},
            ),
            Misconception(
                "merge_heads mixes the heads unit by unit",
                "The result has the first unit of every head, then the second of every head. The "
                "heads' slices have to stand side by side, whole: before you join the last two "
                "axes they must be `heads, head` in this order.",
                {"merge_heads": _interleaved},
            ),
            Misconception(
                "a width that does not divide is left to PyTorch to refuse",
                "It is refused, but with a message about sizes that does not name the cause. "
                "The contract asks for a ValueError: check `x.shape[-1] % num_heads` first, and "
                "say both numbers. Whoever sees the error sees it far away from here.",
                {"split_heads": _left_to_torch},
            ),
        ),
        hints=(
            "Two steps each. To split: cut the last axis in two, then exchange two axes. To merge: "
            "exchange them back, then join the last two.",
            "`x.unflatten(-1, (num_heads, -1))` (or `view`) makes [batch, seq, heads, head] "
            "without moving a number. `transpose(1, 2)` exchanges the two axes in the middle.",
            "split: raise ValueError if `x.shape[-1] % num_heads` is not 0, then unflatten and "
            "transpose(1, 2). merge: transpose(1, 2), then `flatten(2)` (or reshape: a transposed "
            "tensor cannot be viewed).",
        ),
    ),
    Exercise(
        id="3.3",
        reference={"additive_mask": transformers_mask},
        reference_name="transformers.masking_utils.create_bidirectional_mask, halved",
        cases=_additive_mask_cases,
        probe=_additive_mask_probe,
        misconceptions=(
            Misconception(
                "the 1/0 mask itself is added",
                "You hand on the mask of ones and zeros as it is. Added to the scores, it raises "
                "a real token's score by 1, so multiplies its weight by e, and padding stays. The "
                "loss falls all the same, which is why this is found late.",
                {"additive_mask": lambda a, dtype: a[:, None, None, :].to(dtype)},
            ),
            Misconception(
                "the mask is upside down",
                "The real tokens are hidden and the padding is seen. attention_mask is 1 where "
                "there is a token; the number to add must be 0 there, and very low elsewhere.",
                {"additive_mask": lambda a, dtype: transformers_mask(1 - a.long(), dtype)},
            ),
            Misconception(
                "padding gets minus infinity",
                _NAN_MASK + "Use a number that is very low but finite.",
                {"additive_mask": _filled_with(lambda dtype: float("-inf"))},
            ),
            Misconception(
                "padding gets minus a billion in every dtype",
                "float16 ends at -65504, so -1e9 becomes minus infinity there. "
                + _NAN_MASK
                + "Ask the dtype for its lowest number: `torch.finfo(dtype).min`.",
                {"additive_mask": _filled_with(_billion)},
            ),
            Misconception(
                "padding gets the lowest number of the dtype",
                "It leaves no room for the score that is added: in float16, -65504 + (-60) is "
                "minus infinity. " + _NAN_MASK + "Half of the lowest number is low enough. "
                "(Transformers uses the lowest number. In float32 and bfloat16 it does no harm: "
                "scores are too small beside it to make a difference.)",
                {"additive_mask": _filled_with(lambda dtype: torch.finfo(dtype).min)},
            ),
            Misconception(
                "the queries are hidden instead of the keys",
                "Your mask is [batch, 1, seq, 1]. It lowers every score of a padded query alike, "
                "which the softmax does not notice, and lets every token look at padding. The "
                "last axis of the scores is the key, so the mask is [batch, 1, 1, seq].",
                {"additive_mask": lambda a, dtype: transformers_mask(a, dtype).mT},
            ),
            Misconception(
                "the number at padding is not low enough",
                "A padded key whose score happens to be high keeps some weight. The number must "
                "be out of reach of any score: scores of 30 and more occur in trained models.",
                {"additive_mask": _filled_with(lambda dtype: -10.0)},
            ),
        ),
        hints=(
            "0 where attention_mask is 1, a very low number where it is 0. How low the number can "
            "be depends on the dtype: `torch.finfo(dtype)` knows.",
            "`attention_mask[:, None, None, :]` has the shape asked for. `torch.finfo(dtype).min` "
            "is the lowest number; leave room for a score to be added to it.",
            "Raise ValueError unless `attention_mask.dim() == 2`. Make zeros of the shape "
            "[batch, 1, 1, seq], of `dtype`, on the mask's device, and `masked_fill` them with "
            "`torch.finfo(dtype).min / 2` where attention_mask == 0.",
        ),
    ),
    Exercise(
        id="3.4",
        reference={"fast_attention": torch_fast_attention},
        reference_name="torch.nn.functional.scaled_dot_product_attention",
        cases=_fast_cases,
        probe=_fast_probe,
        misconceptions=(
            Misconception(
                "the weights are computed and kept",
                "The numbers are right, but a matrix of [batch, heads, seq, seq] is kept for the "
                "backward pass, which is what this function is there to avoid: at 512 tokens and "
                "12 heads it has 3.1 million numbers for each text in each layer. Call PyTorch's "
                "fused kernel and let it return the context alone.",
                {"fast_attention": _weights_kept},
            ),
            Misconception(
                "is_causal is switched on",
                "is_causal=True hides all later tokens. That is GPT, which must not see the word "
                "it is to predict. BERT reads in both directions.",
                {"fast_attention": _fast(attn_mask=None, is_causal=True)},
            ),
            Misconception(
                "the additive mask is made boolean",
                "A boolean attn_mask has True where a key may be seen; an additive one has 0 "
                "there. `mask.bool()` is True where the mask is not 0, so it turns the mask "
                "upside down. Hand the additive mask on as it is.",
                {"fast_attention": _mask_as_boolean},
            ),
            Misconception(
                "the mask is not handed on",
                "The kernel takes the mask as `attn_mask`. Without it, padding gets attention like "
                "any word, and the other texts of a batch change what this one means.",
                {"fast_attention": _fast(attn_mask=None)},
            ),
            Misconception(
                "the scores are scaled twice",
                "You divided by √head, and the kernel does it again: its `scale` is 1/√head "
                "unless you say otherwise. Hand it query and key as they are.",
                {"fast_attention": _scaled_twice},
            ),
            Misconception(
                "the scores are not scaled",
                "scale=1.0 switches the kernel's own scaling off, and the softmax becomes as sharp "
                "as it was in exercise 3.1 without the root. Left alone, scale is 1/√head.",
                {"fast_attention": _fast(scale=1.0)},
            ),
            Misconception(
                "the heads of each token attend to each other",
                "You handed over [batch, seq, heads, head]. The kernel takes the last axis but "
                "one as the sequence, whatever it means to you. It wants heads before seq.",
                {"fast_attention": _heads_last},
            ),
            Misconception(
                "weights are dropped even though nobody asked for it",
                "The kernel does not know about `eval()`: a dropout_p above 0 drops weights "
                "always, so that two calls give different numbers. It is the caller who passes "
                "0.0 outside training; your part hands `dropout_p` on and adds none of its own.",
                {"fast_attention": _fast(dropout_p=0.1)},
            ),
        ),
        hints=(
            "PyTorch has this function. It bears the name of exercise 3.1 and lives in "
            "`torch.nn.functional`, which is imported here as `F`.",
            "Read its signature: `attn_mask` takes the additive mask as it is, `dropout_p` is a "
            "probability, and `scale` is already what BERT needs.",
            "Return `F.scaled_dot_product_attention` of query, key and value, with attn_mask set "
            "to mask and dropout_p to dropout_p. Nothing else.",
        ),
    ),
    Exercise(
        id="3.5",
        reference={"MultiHeadSelfAttention": ReferenceMultiHeadSelfAttention},
        reference_name="transformers BertSelfAttention, then BertSelfOutput.dense",
        cases=_layer_cases,
        probe=_layer_probe,
        misconceptions=(
            Misconception(
                "the output layer is missing",
                "The heads' results stand side by side and are never mixed: unit 0 to 63 of the "
                "output come from head 0 alone. Pass the merged heads through `output`.",
                {"MultiHeadSelfAttention": _WithoutOutput},
            ),
            Misconception(
                "query and key are exchanged",
                "The scores come out transposed: token i gets the weights with which the others "
                "would have looked at it. Trained from scratch the two layers would just swap "
                "roles; with a checkpoint's weights every number is wrong.",
                {"MultiHeadSelfAttention": _Exchanged},
            ),
            Misconception(
                "the value layer is not used",
                "What is mixed are the hidden states themselves. They have to pass through "
                "`value` first: what a token says about itself is not what it is.",
                {"MultiHeadSelfAttention": _ValueUnused},
            ),
            Misconception(
                "the attention mask is not used",
                "Padding gets attention, so the output of a real token changes with the amount "
                "of padding beside it. Make an additive mask of it (3.3) and hand it on.",
                {"MultiHeadSelfAttention": _MaskIgnored},
            ),
            Misconception(
                "there is one big head",
                "The scores are sums over the whole width, and each token has one set of weights "
                "instead of one for each head. Split query, key and value into heads (3.2) before "
                "attention, and merge after it.",
                {"MultiHeadSelfAttention": _OneHead},
            ),
            Misconception(
                "the scores are divided by √hidden_size",
                "Each score is a sum over the units of one head, so it is divided by the root of "
                "the head's width. With √hidden_size all heads are too soft, by a factor of "
                "√heads in the scores.",
                {"MultiHeadSelfAttention": _ScaledByHidden},
            ),
            Misconception(
                "the heads are merged without exchanging the axes back",
                "The context is [batch, heads, seq, head]. Reshaped at once to "
                "[batch, seq, hidden] it has the right shape, but each row holds several tokens' "
                "numbers. Use merge_heads.",
                {"MultiHeadSelfAttention": _MergedWrongly},
            ),
            Misconception(
                "the residual is added inside",
                "You add hidden_states to the output. BERT does that too, but in the encoder "
                "layer (chapter 4), together with LayerNorm. Done here, it is done twice.",
                {"MultiHeadSelfAttention": _ResidualInside},
            ),
            Misconception(
                "the weights are averaged over the heads",
                "PyTorch's nn.MultiheadAttention does so unless told otherwise, and with it goes "
                "what each head was looking at. Return [batch, heads, seq, seq].",
                {"MultiHeadSelfAttention": _WeightsAveraged},
            ),
            Misconception(
                "the weights are computed even if nobody asks for them",
                "The numbers are right, but a [batch, heads, seq, seq] matrix is made and kept in "
                "every layer of every training step. Take fast_attention (3.4) unless "
                "`return_weights` is true.",
                {"MultiHeadSelfAttention": _WeightsAlways},
            ),
            Misconception(
                "the weights are returned after dropout",
                "In training, some of the returned weights are 0 and the rest are scaled up, so "
                "rows no longer sum to 1. Whoever asks for the weights wants to see where the "
                "model looks: return them as they were before dropout. (Transformers returns "
                "them after it.)",
                {"MultiHeadSelfAttention": _WeightsDropped},
            ),
            Misconception(
                "dropout acts in evaluation as well",
                "F.scaled_dot_product_attention does not know about `eval()`: it drops whenever "
                "dropout_p is above 0. Pass `self.dropout.p` in training and 0.0 otherwise; "
                "`self.training` tells which it is.",
                {"MultiHeadSelfAttention": _DroppedInEval},
            ),
            Misconception(
                "nothing is dropped on the fast path",
                "In training, weights are dropped only when they are asked for. The model then "
                "trains without the dropout its config asks for, and nothing tells you. Pass "
                "`dropout_p` to fast_attention in training, and see that fast_attention hands "
                "it on to the kernel.",
                {"MultiHeadSelfAttention": _FastPathUndropped},
            ),
            Misconception(
                "nothing is ever dropped",
                "Dropout acts on the weights: in training each is set to 0 with probability "
                "`attention_probs_dropout_prob`, and the others are scaled up. On the path with "
                "weights use `self.dropout`, on the fast one pass `dropout_p`.",
                {"MultiHeadSelfAttention": _NeverDropped},
            ),
            Misconception(
                "dropout acts on the output instead of on the weights",
                "BERT has a dropout there too, with another probability, and it belongs to the "
                "encoder layer. The one here acts on the weights: it makes a head miss a token as "
                "a whole, not a unit here and there.",
                {"MultiHeadSelfAttention": _OutputDropped},
            ),
        ),
        hints=(
            "`__init__`: the number of heads, four linear layers of hidden_size to hidden_size, "
            "and an nn.Dropout. `forward`: three projections split into heads, the mask, "
            "attention, merge, the output layer. Everything but the order of calls is written "
            "already: 3.1 to 3.4.",
            "Two paths. Without weights: fast_attention(query, key, value, mask, dropout_p), "
            "where dropout_p is self.dropout.p in training and 0.0 otherwise. With weights: "
            "scaled_dot_product_attention gives context and weights; in training the context has "
            "to be made anew from the dropped weights.",
            "query = split_heads(self.query(hidden_states), self.num_heads), and so for key and "
            "value. mask = additive_mask(attention_mask, query.dtype), or None if there is none. "
            "The result is self.output(merge_heads(context)). In training with weights, "
            "context = self.dropout(weights) @ value, and the weights returned are those before "
            "dropout.",
        ),
    ),
    Exercise(
        id="3.6",
        reference={"mend_mask": torch_reading},
        reference_name="torch.nn.MultiheadAttention, argument key_padding_mask",
        cases=_clinic_cases,
        probe=_clinic_probe,
        misconceptions=(
            Misconception(
                "the mask is handed on as it is",
                "That is the patient's illness. PyTorch's mask says True for padding, BERT's says "
                "1 for a token: they are each other's opposite, and nothing complains.",
                {"mend_mask": lambda padding: 1 - torch_reading(padding)},
            ),
            Misconception(
                "only the boolean form is turned round",
                "With True and False your part is right. In the floating-point form a real token "
                "is 0 and padding is minus infinity, so there too 'not 0' is what is padding.",
                {"mend_mask": _only_boolean_turned},
            ),
            Misconception(
                "the result stays boolean",
                "The values are right, the type is not: BERT's attention_mask holds the whole "
                "numbers 1 and 0, int64. A sum over a boolean mask or `1 - mask` would behave "
                "differently further on.",
                {"mend_mask": lambda padding: torch_reading(padding).bool()},
            ),
            Misconception(
                "an additive mask is returned",
                "What is to be added to the scores is made inside the attention (exercise 3.3). "
                "BERT is given [batch, seq] of 1 and 0, and an additive mask read as such would "
                "hide the real tokens, which are 0 in it.",
                {"mend_mask": _still_additive},
            ),
        ),
        hints=(
            "Print the mask and the batch side by side. In which places is it True (or minus "
            "infinity), and what is there in the text?",
            "In both of PyTorch's forms a real token is the same value: False or 0.",
            "A token is where `padding == 0`, whichever form it has. Turn that into int64.",
        ),
    ),
]
