"""The embeddings give Hugging Face's numbers, and long texts lose nothing in windows."""

import itertools

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.bert.modeling_bert import BertEmbeddings as TheirEmbeddings
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings

THEIR_NAMES = {
    "word.weight": "word_embeddings.weight",
    "position.weight": "position_embeddings.weight",
    "token_type.weight": "token_type_embeddings.weight",
    "norm.weight": "LayerNorm.weight",
    "norm.bias": "LayerNorm.bias",
}
SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
}


def assert_as_exact(ours, theirs, truth):
    """Our error against float64 is at most twice theirs, plus a few units in the last place."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    scale = truth.abs().max().item()
    allowed = 2 * (theirs.double() - truth).abs().max().item()
    allowed += 4 * torch.finfo(theirs.dtype).eps * scale
    assert (ours.double() - truth).abs().max().item() <= allowed


@pytest.fixture(scope="module")
def both(complete):
    """Our embeddings and Hugging Face's, with the same parameters, every one drawn at random."""
    torch.manual_seed(0)
    theirs = TheirEmbeddings(transformers.BertConfig(**SIZES))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours = complete.embeddings.BertEmbeddings(complete.config.BertConfig(**SIZES))
    state = theirs.state_dict()
    ours.load_state_dict({our: state[their] for our, their in THEIR_NAMES.items()})
    return ours, theirs


@pytest.fixture
def batch():
    """A pair of texts, and a shorter text with padding."""
    return {
        "input_ids": torch.tensor([[2, 7, 8, 3, 9, 9, 3], [2, 11, 12, 3, 0, 0, 0]]),
        "token_type_ids": torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]]),
    }


# 2.1


@pytest.mark.parametrize("spread", [1e-5, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layer_norm_is_as_exact_as_torch_at_every_variance(complete, dtype, spread):
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(3, 5, 64, generator=generator) * spread).to(dtype)
    weight, bias = torch.randn(2, 64, generator=generator).to(dtype)
    truth = F.layer_norm(x.double(), (64,), weight.double(), bias.double(), 1e-12)
    theirs = F.layer_norm(x, (64,), weight, bias, 1e-12)
    assert_as_exact(complete.embeddings.layer_norm(x, weight, bias), theirs, truth)


@pytest.mark.parametrize("eps", [1e-12, 1e-5])
def test_layer_norm_uses_the_eps_it_is_given(complete, eps):
    x = torch.randn(4, 32, dtype=torch.float64) * 1e-5
    weight, bias = torch.randn(2, 32, dtype=torch.float64)
    ours = complete.embeddings.layer_norm(x, weight, bias, eps)
    torch.testing.assert_close(ours, F.layer_norm(x, (32,), weight, bias, eps))


def test_layer_norm_of_equal_units_is_the_bias(complete):
    bias = torch.randn(8)
    assert torch.equal(complete.embeddings.layer_norm(torch.full((2, 8), 3.0), bias, bias)[1], bias)


def test_layer_norm_has_the_gradient_of_torch(complete):
    x, weight, bias = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 8), 8, 8)
    )
    assert torch.autograd.gradcheck(complete.embeddings.layer_norm, (x, weight, bias))


@settings(max_examples=40, deadline=None)
@given(shift=st.floats(-100, 100), scale=st.floats(0.01, 100))
def test_layer_norm_does_not_see_the_shift_or_scale_of_a_vector(complete, shift, scale):
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).sin()
    one, zero = torch.ones(16), torch.zeros(16)
    moved = complete.embeddings.layer_norm(x * scale + shift, one, zero)
    torch.testing.assert_close(moved, complete.embeddings.layer_norm(x, one, zero))


# 2.2


@pytest.mark.parametrize(("length", "width"), [(1, 2), (10, 6), (600, 64), (7, 5), (3, 1)])
def test_sinusoids_are_those_of_distilbert(complete, length, width):
    theirs = torch.empty(length, width)
    create_sinusoidal_embeddings(n_pos=length, dim=width, out=theirs)
    ours = complete.embeddings.sinusoidal_positions(length, width)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_the_match_of_two_sinusoids_depends_on_their_distance_alone(complete, first, second, shift):
    table = complete.embeddings.sinusoidal_positions(128, 32)
    match = table[first] @ table[second]
    torch.testing.assert_close(match, table[first + shift] @ table[second + shift])


@pytest.mark.parametrize(("length", "width"), [(0, 4), (4, 0), (-1, 4)])
def test_a_sinusoid_table_needs_rows_and_columns(complete, length, width):
    with pytest.raises(ValueError, match="at least 1"):
        complete.embeddings.sinusoidal_positions(length, width)


# 2.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_embeddings_are_hugging_faces_number_for_number(both, batch, dtype):
    ours, theirs = (module.to(dtype) for module in both)
    try:
        assert torch.equal(ours(**batch), theirs(**batch))
        assert torch.equal(ours(batch["input_ids"]), theirs(batch["input_ids"]))
    finally:
        for module in both:
            module.float()


def test_embeddings_take_the_positions_they_are_given(both, batch):
    ours, theirs = both
    positions = torch.tensor([[3, 2, 1, 0, 15, 14, 13], [0, 0, 1, 1, 2, 2, 3]])
    got = ours(**batch, position_ids=positions)
    assert torch.equal(got, theirs(**batch, position_ids=positions))


def test_gradients_are_hugging_faces(both, batch):
    for module in both:
        module.zero_grad()
        (module(**batch) ** 3).sum().backward()
    ours, theirs = (dict(module.named_parameters()) for module in both)
    for our, their in THEIR_NAMES.items():
        torch.testing.assert_close(ours[our].grad, theirs[their].grad)


def test_every_used_position_learns_and_padding_does_not(both, batch):
    ours, _ = both
    ours.zero_grad()
    (ours(**batch) ** 3).sum().backward()
    learns = ours.position.weight.grad.norm(dim=-1) > 0
    assert learns.tolist() == [True] * 7 + [False] * 9
    assert ours.word.weight.grad[0].norm() == 0
    assert ours.word.weight.grad[2].norm() > 0


def test_a_text_that_is_too_long_is_refused_with_both_numbers(both):
    ours, _ = both
    ours(torch.ones(1, 16, dtype=torch.long))
    with pytest.raises(ValueError, match=r"17 tokens.*16.*sliding_windows"):
        ours(torch.ones(1, 17, dtype=torch.long))


def test_positions_that_restart_may_fill_a_longer_row(both):
    ours, _ = both
    ids = torch.arange(1, 21)[None]
    packed = ours(ids, position_ids=torch.arange(10).repeat(2))
    torch.testing.assert_close(packed.view(2, 10, -1), ours(ids.view(2, 10)))


def test_dropout_and_eps_are_the_configs(complete):
    config = complete.config.BertConfig.mini(hidden_dropout_prob=0.3, layer_norm_eps=1e-6)
    module = complete.embeddings.BertEmbeddings(config)
    assert (module.dropout.p, module.norm.eps) == (0.3, 1e-6)


# 2.4 and 2.5

texts = st.integers(1, 60).map(lambda length: list(range(100, 100 + length)))
cuts = st.integers(1, 20).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1)))


@settings(max_examples=40, deadline=None)
@given(texts, cuts)
def test_windows_overlap_by_stride_and_lose_no_token(complete, text, cut):
    max_length, stride = cut
    windows = complete.embeddings.sliding_windows(text, max_length, stride)
    assert all(len(window) == max_length for window in windows[:-1])
    assert windows[0] + [id_ for window in windows[1:] for id_ in window[stride:]] == text
    for window, following in itertools.pairwise(windows):
        assert following[:stride] == window[max_length - stride :]


@settings(max_examples=40, deadline=None)
@given(texts, cuts)
def test_no_window_lies_inside_another(complete, text, cut):
    windows = [set(window) for window in complete.embeddings.sliding_windows(text, *cut)]
    assert not any(a <= b for i, a in enumerate(windows) for b in windows[:i] + windows[i + 1 :])


@settings(max_examples=40, deadline=None)
@given(texts, cuts)
def test_windows_are_those_of_the_rust_tokenizer(complete, text, cut):
    max_length, stride = cut
    vocab = {str(id_): id_ for id_ in range(200)} | {"[UNK]": 200}
    tokenizer = rust_tokenizer(vocab)
    tokenizer.enable_truncation(max_length, stride=stride)
    encoding = tokenizer.encode(" ".join(map(str, text)))
    theirs = [encoding.ids] + [window.ids for window in encoding.overflowing]
    assert complete.embeddings.sliding_windows(text, max_length, stride) == theirs


def rust_tokenizer(vocab):
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def test_windows_of_a_tensor_are_tensors(complete):
    windows = complete.embeddings.sliding_windows(torch.arange(10), 6, 2)
    assert [window.tolist() for window in windows] == [[0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize(("max_length", "stride"), [(4, 4), (4, 5), (4, -1), (0, 0)])
def test_windows_that_never_advance_are_refused(complete, max_length, stride):
    with pytest.raises(ValueError, match=f"stride is {stride}.*max_length"):
        complete.embeddings.sliding_windows([1, 2, 3], max_length, stride)


def test_a_text_without_tokens_is_refused(complete):
    with pytest.raises(ValueError, match="input_ids has 0 tokens"):
        complete.embeddings.sliding_windows([], 4, 1)


def owners(complete, length, max_length, stride):
    """For each token, the index of the window that `stitch_windows` took it from."""
    windows = complete.embeddings.sliding_windows(list(range(length)), max_length, stride)
    vectors = [
        torch.tensor([[index, token] for token in window]) for index, window in enumerate(windows)
    ]
    stitched = complete.embeddings.stitch_windows(vectors, length, stride)
    assert stitched[:, 1].tolist() == list(range(length))
    return stitched[:, 0].tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), cuts)
@example(length=10, cut=(8, 7))
def test_each_token_comes_from_the_window_in_which_it_stands_deepest(complete, length, cut):
    max_length, stride = cut
    starts = range(0, max(length - stride, 1), max_length - stride)

    def depth(token, start):
        left = token - start if start > 0 else length
        right = start + max_length - 1 - token if start + max_length < length else length
        return min(left, right)

    expected = [
        max(range(len(starts)), key=lambda index: depth(token, starts[index]))
        for token in range(length)
    ]
    assert owners(complete, length, max_length, stride) == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), cuts)
def test_stitching_keeps_the_windows_that_bert_kept_for_squad_in_2018(complete, length, cut):
    max_length, stride = cut
    windows = complete.embeddings.sliding_windows(list(range(length)), max_length, stride)

    def max_context_score(token, window):  # run_squad.py, _check_is_max_context
        if token not in window:
            return -1.0
        return min(token - window[0], window[-1] - token) + 0.01 * len(window)

    expected = [
        max(range(len(windows)), key=lambda index: max_context_score(token, windows[index]))
        for token in range(length)
    ]
    assert owners(complete, length, max_length, stride) == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), cuts)
def test_windows_of_unchanged_vectors_stitch_to_the_text(complete, length, cut):
    max_length, stride = cut
    text = torch.randn(length, 3)
    windows = complete.embeddings.sliding_windows(text, max_length, stride)
    assert torch.equal(complete.embeddings.stitch_windows(windows, length, stride), text)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), cuts)
def test_windows_may_come_as_one_padded_tensor(complete, length, cut):
    max_length, stride = cut
    text = torch.randn(length, 3)
    windows = complete.embeddings.sliding_windows(text, max_length, stride)
    padded = torch.full((len(windows), max_length, 3), torch.nan)
    for row, window in zip(padded, windows, strict=True):
        row[: len(window)] = window
    assert torch.equal(complete.embeddings.stitch_windows(padded, length, stride), text)


def test_a_short_text_is_one_window_whatever_the_stride(complete):
    text = torch.randn(5, 3)
    assert torch.equal(complete.embeddings.stitch_windows([text], 5, stride=128), text)


def test_gradient_reaches_the_window_a_vector_came_from(complete):
    windows = [torch.randn(4, 2, requires_grad=True) for _ in range(2)]
    complete.embeddings.stitch_windows(windows, 6, 2).sum().backward()
    reached = [window.grad for window in windows]
    assert [grad is not None and grad[:, 0].tolist() for grad in reached] == [
        [1, 1, 1, 0],
        [0, 1, 1, 1],
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), cuts, st.lists(st.integers(0, 8), max_size=6))
def test_windows_that_are_not_of_this_text_are_refused(complete, length, cut, sizes):
    max_length, stride = cut
    made = complete.embeddings.sliding_windows(list(range(length)), max_length, stride)
    assume(sizes[:-1] != [len(window) for window in made][:-1])
    assume(not sizes or sizes[0] < length)
    with pytest.raises(ValueError):
        complete.embeddings.stitch_windows([torch.zeros(n, 2) for n in sizes], length, stride)
