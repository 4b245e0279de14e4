"""Attention gives Hugging Face's numbers, with and without weights, padding and halves."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.bert.modeling_bert import BertSelfAttention, BertSelfOutput

from bertlab.course import exercise as exercises
from bertlab.course import judging

SIZES: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 4}
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def assert_as_exact(ours, theirs, truth):
    """Our error against float64 is at most twice theirs, plus a few units in the last place."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    scale = truth.abs().max().item()
    allowed = 2 * (theirs.double() - truth).abs().max().item()
    allowed += 4 * torch.finfo(theirs.dtype).eps * scale
    assert (ours.double() - truth).abs().max().item() <= allowed


def peaked(*shape, seed=0, dtype=torch.float32):
    """Random query, key and value with which the weights are far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).mul(1.5).to(dtype) for _ in range(3)]


class Theirs(torch.nn.Module):
    """BertSelfAttention followed by BertSelfOutput.dense."""

    def __init__(self, implementation):
        super().__init__()
        config = transformers.BertConfig(**SIZES, attention_probs_dropout_prob=0.0)
        config._attn_implementation = implementation
        self.attention, self.dense = BertSelfAttention(config), BertSelfOutput(config).dense

    def forward(self, hidden_states, attention_mask):
        lowest = torch.finfo(hidden_states.dtype).min
        mask = (1 - attention_mask[:, None, None, :].to(hidden_states.dtype)) * lowest
        context, weights = self.attention(hidden_states, mask)
        return self.dense(context), weights


@pytest.fixture(scope="module", params=["eager", "sdpa"])
def both(complete, request):
    """Our layer and Hugging Face's, with the same parameters, every one drawn at random."""
    torch.manual_seed(0)
    theirs = Theirs(request.param).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    config = complete.config.BertConfig(**SIZES, attention_probs_dropout_prob=0.0)
    ours = complete.attention.MultiHeadSelfAttention(config).eval()
    for name in ("query", "key", "value"):
        getattr(ours, name).load_state_dict(getattr(theirs.attention, name).state_dict())
    ours.output.load_state_dict(theirs.dense.state_dict())
    return ours, theirs


@pytest.fixture
def batch():
    torch.manual_seed(1)
    hidden_states = torch.randn(3, 9, 48)
    attention_mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 2 + [0] * 7])
    return hidden_states, attention_mask


def real(tensor, attention_mask):
    return tensor[attention_mask.bool()]


# 3.1 and 3.4


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("masked", [False, True])
def test_both_attentions_are_as_exact_as_torch(complete, dtype, masked):
    query, key, value = peaked(2, 3, 7, 16, dtype=dtype)
    mask = torch.zeros(2, 1, 1, 7, dtype=dtype)
    mask[1, ..., 4:] = torch.finfo(dtype).min / 2
    mask = mask if masked else None
    wide = [tensor.double() for tensor in (query, key, value)]
    truth = F.scaled_dot_product_attention(*wide, attn_mask=None if mask is None else mask.double())
    theirs = F.scaled_dot_product_attention(query, key, value, mask)
    context, weights = complete.attention.scaled_dot_product_attention(query, key, value, mask)
    assert_as_exact(complete.attention.fast_attention(query, key, value, mask), theirs, truth)
    # A matrix product in half precision rounds the weights, which the fused kernel does not.
    tolerance = 4 * torch.finfo(dtype).eps * truth.abs().max().item()
    assert (context.double() - truth).abs().max() <= tolerance
    assert weights.dtype == dtype


def test_queries_and_keys_may_differ_in_number(complete):
    query, _, _ = peaked(2, 3, 5, 16)
    _, key, value = peaked(2, 3, 8, 16, seed=1)
    context, weights = complete.attention.scaled_dot_product_attention(query, key, value)
    assert weights.shape == (2, 3, 5, 8)
    torch.testing.assert_close(context, complete.attention.fast_attention(query, key, value))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 9), st.integers(0, 10**6))
def test_weights_are_a_distribution_over_the_keys(complete, heads, length, size, seed):
    query, key, value = peaked(2, heads, length, size, seed=seed)
    context, weights = complete.attention.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, heads, length))
    assert (weights >= 0).all()
    lowest, highest = value.amin(dim=2, keepdim=True), value.amax(dim=2, keepdim=True)
    assert ((context >= lowest - 1e-5) & (context <= highest + 1e-5)).all()


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(6)))
def test_attention_does_not_know_the_order_of_the_keys(complete, order):
    query, key, value = peaked(1, 2, 6, 8)
    attend = complete.attention.scaled_dot_product_attention
    context, weights = attend(query, key, value)
    moved, moved_weights = attend(query, key[:, :, order], value[:, :, order])
    torch.testing.assert_close(moved, context)
    torch.testing.assert_close(moved_weights, weights[..., order])


def test_fast_attention_holds_no_matrix_of_weights(complete, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a softmax over stored scores")

    monkeypatch.setattr(torch.Tensor, "softmax", refuse)
    monkeypatch.setattr(torch, "softmax", refuse)
    monkeypatch.setattr(F, "softmax", refuse)
    query, key, value = (tensor.requires_grad_() for tensor in peaked(1, 1, 64, 8))
    context = complete.attention.fast_attention(query, key, value)
    saved = saved_by(context)
    assert max(saved) < 64 * 64
    context.sum().backward()


def saved_by(context):
    """How many numbers each tensor kept for the backward pass holds."""
    node = context.grad_fn
    names = [name for name in dir(node) if name.startswith("_saved_")]
    tensors = [getattr(node, name) for name in names]
    return [tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor)]


# 3.2


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), st.integers(1, 5))
def test_merging_undoes_splitting(complete, batch_size, length, heads, size):
    x = torch.randn(batch_size, length, heads * size)
    split = complete.attention.split_heads(x, heads)
    assert split.shape == (batch_size, heads, length, size)
    assert torch.equal(complete.attention.merge_heads(split), x)


def test_a_head_is_a_slice_of_neighbouring_units(complete):
    x = torch.randn(2, 5, 12)
    assert torch.equal(complete.attention.split_heads(x, 3)[:, 1], x[..., 4:8])


def test_units_that_do_not_divide_are_refused(complete):
    with pytest.raises(ValueError, match=r"10 units.*num_heads \(4\)"):
        complete.attention.split_heads(torch.zeros(1, 2, 10), 4)


def test_a_transposed_tensor_can_be_split(complete):
    x = torch.randn(5, 2, 12)
    expected = complete.attention.split_heads(x.transpose(0, 1).contiguous(), 3)
    assert torch.equal(complete.attention.split_heads(x.transpose(0, 1), 3), expected)


# 3.3


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_mask_is_zero_for_tokens_and_finite_for_padding(complete, dtype):
    mask = complete.attention.additive_mask(torch.tensor([[1, 1, 0], [0, 0, 0]]), dtype)
    assert mask.shape == (2, 1, 1, 3)
    assert mask.dtype == dtype
    assert (mask[0, 0, 0, :2] == 0).all()
    assert mask.isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=20, deadline=None)
@given(st.floats(-1000, 1000))
def test_padding_has_no_weight_and_nothing_but_padding_no_nan(complete, dtype, score):
    attention_mask = torch.tensor([[True, True, False], [False, False, False]])
    mask = complete.attention.additive_mask(attention_mask, dtype)
    weights = (torch.full((2, 1, 3, 3), score).to(dtype) + mask).softmax(dim=-1)
    assert (weights[0, ..., 2] == 0).all()
    assert weights.isfinite().all()


def test_masks_of_any_kind_of_number_are_the_same(complete):
    masks = [torch.tensor([[1, 0]]).to(dtype) for dtype in (torch.long, torch.bool, torch.float)]
    first, *others = (complete.attention.additive_mask(mask, torch.float32) for mask in masks)
    assert all(torch.equal(first, other) for other in others)


def test_a_mask_that_was_already_made_additive_is_refused(complete):
    with pytest.raises(ValueError, match=r"shape \[2, 1, 1, 5\].*\[batch, seq\]"):
        complete.attention.additive_mask(torch.zeros(2, 1, 1, 5), torch.float32)


# 3.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_layer_is_as_exact_as_hugging_faces(both, batch, dtype):
    hidden_states, attention_mask = batch
    ours, theirs = both
    truth, _ = theirs.double()(hidden_states.to(dtype).double(), attention_mask)
    inputs = (hidden_states.to(dtype), attention_mask)
    try:
        expected, _ = theirs.to(dtype)(*inputs)
        for output in (ours.to(dtype)(*inputs), ours(*inputs, return_weights=True)[0]):
            assert_as_exact(*(real(t, attention_mask) for t in (output, expected, truth)))
    finally:
        ours.float()
        theirs.float()


@pytest.mark.parametrize("both", ["eager"], indirect=True)
def test_the_weights_are_hugging_faces(both, batch):
    ours, theirs = both
    _, weights = ours(*batch, return_weights=True)
    torch.testing.assert_close(weights, theirs(*batch)[1])


def gradients(module, batch, **options):
    """Of a loss at the real tokens, in float64: for the input, then for each parameter."""
    module = copy.deepcopy(module).double()
    hidden_states, attention_mask = batch
    inputs = hidden_states.double().requires_grad_()
    output = module(inputs, attention_mask, **options)
    output = output[0] if isinstance(output, tuple) else output
    loss = (real(output, attention_mask) ** 2).sum()
    return torch.autograd.grad(loss, [inputs, *module.parameters()])


@pytest.mark.parametrize("return_weights", [False, True])
def test_the_gradients_are_hugging_faces(both, batch, return_weights):
    ours, theirs = both
    torch.testing.assert_close(
        gradients(ours, batch, return_weights=return_weights),
        gradients(theirs, batch),
        rtol=1e-9,
        atol=1e-9,
    )


def test_the_bias_of_the_keys_changes_nothing(both, batch):
    ours = copy.deepcopy(both[0])
    before = ours(*batch)
    ours.key.bias.data += 3.0
    torch.testing.assert_close(ours(*batch), before, rtol=1e-4, atol=1e-4)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 6), st.floats(-1e3, 1e3))
def test_padding_never_changes_a_real_token(both, extra, content):
    ours, _ = both
    hidden_states = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(2))
    alone = ours(hidden_states)
    padded = F.pad(hidden_states, (0, 0, 0, extra), value=content)
    mask = F.pad(torch.ones(2, 5, dtype=torch.long), (0, extra))
    for output in (ours(padded, mask), ours(padded, mask, return_weights=True)[0]):
        torch.testing.assert_close(output[:, :5], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("return_weights", [False, True])
def test_a_text_that_is_nothing_but_padding_gives_no_nan(complete, dtype, return_weights):
    torch.manual_seed(3)
    config = complete.config.BertConfig(**SIZES)
    layer = complete.attention.MultiHeadSelfAttention(config).to(dtype)
    layer.query.bias.data.fill_(-9)  # scores near -280: float16's lowest would overflow
    layer.key.bias.data.fill_(9)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    output = layer(torch.randn(2, 3, 48).to(dtype), mask, return_weights=return_weights)
    output = output[0] if return_weights else output
    assert output.isfinite().all()
    output.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(4)))
def test_the_order_of_the_heads_means_nothing(complete, both, order):
    ours, _ = both
    config = complete.config.BertConfig(**SIZES)
    moved = complete.attention.MultiHeadSelfAttention(config).eval()
    units = torch.arange(48).view(4, 12)[list(order)].flatten()
    for name in ("query", "key", "value"):
        source, target = getattr(ours, name), getattr(moved, name)
        target.weight.data, target.bias.data = source.weight[units], source.bias[units]
    moved.output.weight.data, moved.output.bias = ours.output.weight[:, units], ours.output.bias
    hidden_states = torch.randn(2, 6, 48)
    torch.testing.assert_close(moved(hidden_states), ours(hidden_states), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("return_weights", [False, True])
def test_dropout_thins_the_weights_in_training_and_only_then(complete, return_weights):
    torch.manual_seed(4)
    config = complete.config.BertConfig(**SIZES, attention_probs_dropout_prob=0.5)
    layer = complete.attention.MultiHeadSelfAttention(config)
    copies = torch.randn(1, 6, 48).expand(4000, -1, -1)

    def outputs():
        returned = layer(copies, return_weights=return_weights)
        return returned[0] if return_weights else returned

    with torch.no_grad():
        layer.eval()
        expected = outputs()[0]
        torch.testing.assert_close(outputs()[-1], expected)
        layer.train()
        many = outputs()
    assert many.std(dim=0).min() > 1e-3
    error = many.mean(dim=0) - expected
    assert (error.abs() <= 6 * many.std(dim=0) / 4000**0.5).all()


def test_weights_are_given_as_they_are_before_dropout(complete):
    torch.manual_seed(5)
    config = complete.config.BertConfig(**SIZES, attention_probs_dropout_prob=0.5)
    layer = complete.attention.MultiHeadSelfAttention(config).train()
    _, weights = layer(torch.randn(1, 6, 48), return_weights=True)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(1, 4, 6))


# --- what the checks let through ---


def _judged_mask(number):
    def mask(attention_mask, dtype):
        if attention_mask.dim() != 2:
            raise ValueError("attention_mask must be [batch, seq]")
        padding = attention_mask[:, None, None, :] == 0
        return torch.zeros(padding.shape, dtype=dtype).masked_fill(padding, number(dtype))

    return judging.judge(exercises.load("3.3"), SimpleNamespace(additive_mask=mask)).status


@pytest.mark.parametrize("number", [-50, -100, -1000])
def test_a_mask_that_a_score_can_outweigh_fails(number):
    assert _judged_mask(lambda dtype: number) == "failed"


@pytest.mark.parametrize(
    "number",
    [
        lambda dtype: -10000.0,  # Google's
        lambda dtype: torch.finfo(dtype).min / 2,
        lambda dtype: torch.finfo(dtype).min / 4,
        lambda dtype: -3e4 if dtype is torch.float16 else torch.finfo(dtype).min,
    ],
)
def test_a_low_number_passes_whichever_it_is(number):
    assert _judged_mask(number) == "passed"


def test_an_argument_of_attention_must_not_be_changed(complete):
    def attend(query, key, value, mask=None):
        query.mul_(query.shape[-1] ** -0.5)
        return complete.attention.scaled_dot_product_attention(query, key, value, mask)

    parts = SimpleNamespace(scaled_dot_product_attention=attend)
    assert "changed an argument" in judging.judge(exercises.load("3.1"), parts).diagnosis
