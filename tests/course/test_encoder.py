"""Feed-forward network, layer and encoder give Hugging Face's numbers, padded, packed and fresh."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.roberta_prelayernorm import modeling_roberta_prelayernorm

from bertlab.course import exercise as exercises
from bertlab.course import judging
from bertlab.course.exercises import chapter_4
from bertlab.course.reference import seeded_bert
from bertlab.course.widgets.agreement_explorer import with_weights_of

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 100,
    "max_position_embeddings": 20,
}


def randomized(module, seed=0, std=0.3):
    """A module with every parameter drawn at random, so that no bug hides behind a 0 or a 1."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=std, generator=generator)
    return module.eval()


def config_of(complete, **changes):
    return complete.config.BertConfig(**{**SIZES, **changes})


@pytest.fixture(scope="module")
def theirs():
    return seeded_bert(transformers.BertConfig(**SIZES), attention="eager")


@pytest.fixture(scope="module")
def ours(complete, theirs):
    """The complete `BertModel` with the weights of `theirs`."""
    return with_weights_of(theirs)


@pytest.fixture(scope="module")
def batch():
    """Pairs of texts, three of four with padding."""
    generator = torch.Generator().manual_seed(1)
    mask = (torch.arange(13)[None, :] < torch.tensor([13, 9, 4, 1])[:, None]).long()
    ids = torch.randint(1, 90, mask.shape, generator=generator) * mask
    types = (torch.arange(13)[None, :] >= torch.tensor([6, 5, 2, 9])[:, None]).long() * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def real(tensor, batch):
    return tensor[batch["attention_mask"].bool()]


# 4.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_both_activations_are_torchs_in_every_dtype(complete, dtype):
    x = torch.linspace(-9, 9, 1001, dtype=torch.float64).to(dtype)
    for name, approximate in (("gelu", "none"), ("gelu_tanh", "tanh")):
        given = getattr(complete.feed_forward, name)(x)
        assert given.dtype == dtype
        expected = F.gelu(x, approximate=approximate)
        torch.testing.assert_close(given, expected, rtol=0, atol=8 * torch.finfo(dtype).eps * 9)


@settings(max_examples=50, deadline=None)
@given(st.floats(-50, 50))
def test_gelu_of_x_minus_gelu_of_minus_x_is_x(complete, x):
    value = torch.tensor(x, dtype=torch.float64)
    for activation in (complete.feed_forward.gelu, complete.feed_forward.gelu_tanh):
        assert float(activation(value) - activation(-value)) == pytest.approx(x, abs=1e-12)


def test_the_approximation_is_off_by_five_ten_thousandths_and_no_more(complete):
    x = torch.linspace(-8, 8, 16001, dtype=torch.float64)
    error = (complete.feed_forward.gelu_tanh(x) - complete.feed_forward.gelu(x)).abs()
    assert 4e-4 < error.max() < 5e-4
    assert 2.6 < x[error.argmax()].abs() < 2.8


# 4.2 and 4.3


@pytest.mark.parametrize(
    ("act", "theirs"), [("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("relu", "relu")]
)
def test_the_network_is_hugging_faces(complete, act, theirs):
    network = randomized(complete.feed_forward.FeedForward(config_of(complete, hidden_act=act)))
    config = transformers.BertConfig(**SIZES, hidden_act=theirs)
    first, second = BertIntermediate(config), BertOutput(config).dense
    first.dense.load_state_dict(network.up.state_dict())
    second.load_state_dict(network.down.state_dict())
    x = torch.randn(2, 5, 48)
    torch.testing.assert_close(network(x), second(first(x)))


@pytest.mark.parametrize("name", ["FeedForward", "SwiGLU"])
def test_no_token_looks_at_another(complete, name):
    network = randomized(getattr(complete.feed_forward, name)(config_of(complete)))
    x = torch.randn(2, 6, 48)
    alone = torch.cat([network(x[:, place : place + 1]) for place in range(6)], dim=1)
    torch.testing.assert_close(network(x), alone)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(1, 700))
def test_no_other_number_of_units_comes_nearer_to_the_plain_networks_size(complete, hidden, wide):
    config = config_of(complete, hidden_size=hidden, num_attention_heads=1, intermediate_size=wide)
    with torch.device("meta"):
        gated = complete.feed_forward.SwiGLU(config)
        plain = complete.feed_forward.FeedForward(config)
    goal = sum(parameter.numel() for parameter in plain.parameters())
    count = sum(parameter.numel() for parameter in gated.parameters())
    inner = gated.up.out_features
    assert count == chapter_4.count_of(inner, hidden)
    for other in (inner - 1, inner + 1):
        assert abs(count - goal) <= abs(chapter_4.count_of(other, hidden) - goal)


def test_swiglu_is_llamas_with_biases(complete):
    network = randomized(complete.feed_forward.SwiGLU(config_of(complete)))
    config = transformers.LlamaConfig(
        hidden_size=48,
        num_attention_heads=4,
        intermediate_size=network.up.out_features,
        mlp_bias=True,
    )
    theirs = LlamaMLP(config)
    for name in ("gate", "up", "down"):
        getattr(theirs, f"{name}_proj").load_state_dict(getattr(network, name).state_dict())
    x = torch.randn(2, 5, 48)
    torch.testing.assert_close(network(x), theirs(x))


# 4.4


def test_pre_norm_is_hugging_faces_roberta_prelayernorm(complete):
    layer = randomized(complete.encoder.EncoderLayer(config_of(complete), pre_norm=True))
    config = transformers.RobertaPreLayerNormConfig(**SIZES, layer_norm_eps=1e-12)
    config._attn_implementation = "eager"
    theirs = modeling_roberta_prelayernorm.RobertaPreLayerNormLayer(config).eval()
    for mine, other in (
        (layer.attention.query, theirs.attention.self.query),
        (layer.attention.key, theirs.attention.self.key),
        (layer.attention.value, theirs.attention.self.value),
        (layer.attention.output, theirs.attention.output.dense),
        (layer.attention_norm, theirs.attention.LayerNorm),
        (layer.feed_forward.up, theirs.intermediate.dense),
        (layer.feed_forward_norm, theirs.intermediate.LayerNorm),
        (layer.feed_forward.down, theirs.output.dense),
    ):
        other.load_state_dict(mine.state_dict())
    x = torch.randn(2, 7, 48)
    expected = theirs(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pre_norm", [False, True])
@settings(max_examples=10, deadline=None)
@given(extra=st.integers(0, 6), content=st.floats(-1e3, 1e3))
def test_padding_never_changes_a_real_token(complete, pre_norm, extra, content):
    layer = complete.encoder.EncoderLayer(config_of(complete), pre_norm=pre_norm)
    layer = randomized(layer, std=0.15)
    states = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(2))
    padded = F.pad(states, (0, 0, 0, extra), value=content)
    mask = F.pad(torch.ones(2, 5, dtype=torch.long), (0, extra))
    output, _ = layer(padded, mask, return_weights=True)
    for found in (layer(padded, mask), output):
        torch.testing.assert_close(found[:, :5], layer(states), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_dropout_acts_on_what_each_half_adds_and_only_in_training(complete, pre_norm):
    config = config_of(complete, hidden_dropout_prob=0.5)
    layer = complete.encoder.EncoderLayer(config, pre_norm=pre_norm)
    state = {name: value.detach() for name, value in layer.named_parameters()}
    found = chapter_4.layer_dropout(layer, layer, state, torch.zeros(64, 8, 48))
    for half in ("attention", "feed-forward"):
        assert found[f"share of the units dropped from the half of {half}"] == "0.5"
        assert found[f"units dropped in evaluation, {half}"] == "0.0"


# 4.5


def test_the_model_is_hugging_faces_at_every_layer(ours, theirs, batch):
    truth = copy.deepcopy(theirs).double()
    asked = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        mine, other, exact = (
            ours(**batch, **asked),
            theirs(**batch, **asked),
            truth(**batch, **asked),
        )
    assert len(mine.hidden_states) == 4 and len(mine.attentions) == 3
    pairs = list(zip(mine.hidden_states, other.hidden_states, exact.hidden_states, strict=True))
    asking = batch["attention_mask"].bool()[:, None, :].expand(-1, 4, -1)
    for weights in zip(mine.attentions, other.attentions, exact.attentions, strict=True):
        pairs.append(tuple(one[asking] for one in weights))
    pairs.append((mine.pooler_output, other.pooler_output, exact.pooler_output))
    for found, yardstick, expected in pairs:
        if found.shape[:2] == batch["attention_mask"].shape:
            found, yardstick, expected = (real(x, batch) for x in (found, yardstick, expected))
        allowed = 4 * (yardstick - expected).abs().max() + 8e-7 * expected.abs().max()
        assert (found - expected).abs().max() <= allowed
    assert mine.last_hidden_state is mine.hidden_states[-1]


def test_the_gradients_are_hugging_faces(ours, theirs, batch):
    def gradients(model):
        model = copy.deepcopy(model).double()
        output = model(**batch)
        loss = (real(output.last_hidden_state, batch) ** 2).mean() + output.pooler_output.sum()
        loss.backward()
        return model

    mine, other = gradients(ours), gradients(theirs)
    pairs = [
        (mine.embeddings.word, other.embeddings.word_embeddings),
        (mine.embeddings.token_type, other.embeddings.token_type_embeddings),
        (mine.encoder.layers[0].attention.query, other.encoder.layer[0].attention.self.query),
        (mine.encoder.layers[1].attention_norm, other.encoder.layer[1].attention.output.LayerNorm),
        (mine.encoder.layers[2].feed_forward.down, other.encoder.layer[2].output.dense),
        (mine.pooler.dense, other.pooler.dense),
    ]
    for a, b in pairs:
        torch.testing.assert_close(a.weight.grad, b.weight.grad, rtol=1e-7, atol=1e-9)


def test_nothing_is_kept_that_nobody_asked_for(ours, batch):
    output = ours(**batch)
    assert output.hidden_states is None and output.attentions is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": torch.ones(13, dtype=torch.long)}, r"input_ids has shape \[13\]"),
        ({"attention_mask": torch.ones(1, 13)}, r"attention_mask has shape \[1, 13\].*\[4, 13\]"),
        ({"token_type_ids": torch.zeros(13, dtype=torch.long)}, r"token_type_ids has shape \[13\]"),
        (
            {"input_ids": torch.ones(4, 21, dtype=torch.long), "attention_mask": None}
            | {"token_type_ids": None},
            "21 tokens.*20",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(ours, batch, changes, message):
    with pytest.raises(ValueError, match=message):
        ours(**{**batch, **changes})


def test_fresh_weights_are_drawn_as_bert_began(complete):
    torch.manual_seed(0)
    model = complete.encoder.BertModel(config_of(complete, initializer_range=0.05))
    assert chapter_4.oddly_drawn(model, 0.05) == []


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda m: torch.nn.init.normal_(m.embeddings.word.weight, std=0.05), "the row of [PAD]"),
        (lambda m: m.pooler.dense.reset_parameters(), "pooler.dense.weight"),
        (lambda m: m.embeddings.position.weight.data.mul_(1.5), "embeddings.position.weight"),
        (lambda m: m.encoder.layers[1].attention_norm.weight.data.add_(0.1), "attention_norm"),
        (lambda m: m.encoder.layers[2].feed_forward.up.weight.data.add_(0.02), "up.weight"),
    ],
)
def test_weights_that_are_drawn_otherwise_are_noticed(complete, spoil, named):
    torch.manual_seed(0)
    model = complete.encoder.BertModel(config_of(complete, initializer_range=0.05))
    spoil(model)
    assert any(named in name for name in chapter_4.oddly_drawn(model, 0.05))


def test_a_right_draw_is_never_called_odd(complete):
    for seed in range(40):
        torch.manual_seed(seed)
        model = complete.encoder.BertModel(config_of(complete))
        assert chapter_4.oddly_drawn(model, 0.02) == []


# given: packed


@pytest.mark.parametrize("left", [False, True])
def test_packed_gives_the_same_numbers_and_zeros_at_padding(ours, batch, left):
    given = {name: tensor.flip(1) if left else tensor for name, tensor in batch.items()}
    padding = given["attention_mask"] == 0
    with torch.no_grad():
        packed, padded = ours.forward_packed(**given), ours(**given)
    expected = real(padded.last_hidden_state, given)
    torch.testing.assert_close(
        real(packed.last_hidden_state, given), expected, rtol=1e-4, atol=1e-5
    )
    if not left:  # else the first place is padding
        torch.testing.assert_close(packed.pooler_output, padded.pooler_output)
    assert (packed.last_hidden_state[padding] == 0).all()


def test_packed_trains_like_padded(ours, batch):
    found = []
    for name in ("forward", "forward_packed"):
        model = copy.deepcopy(ours).double()
        output = getattr(model, name)(**batch)
        (real(output.last_hidden_state, batch) ** 2).sum().backward()
        found.append([p.grad for n, p in model.named_parameters() if "pooler" not in n])
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-8)


# the stand-ins


@pytest.fixture(scope="module")
def stand_in(complete, ours):
    model = chapter_4.BertModel(ours.config)
    model.load_state_dict(ours.state_dict())
    return model.eval()


def test_the_stand_in_is_hugging_faces_model(stand_in, theirs, batch):
    asked = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        mine = copy.deepcopy(stand_in).double()(**batch, **asked)
        exact = copy.deepcopy(theirs).double()(**batch, **asked)
    for a, b in zip(mine.hidden_states, exact.hidden_states, strict=True):
        torch.testing.assert_close(real(a, batch), real(b, batch), rtol=0, atol=1e-12)
    torch.testing.assert_close(mine.pooler_output, exact.pooler_output, rtol=0, atol=1e-12)
    asking = batch["attention_mask"].bool()[:, None, :].expand(-1, 4, -1)
    for a, b in zip(mine.attentions, exact.attentions, strict=True):
        torch.testing.assert_close(a[asking], b[asking], rtol=0, atol=1e-12)


def test_the_stand_in_packs_trains_and_loses_its_pooler(complete, stand_in, batch):
    model = copy.deepcopy(stand_in)
    expected = real(model(**batch).last_hidden_state, batch)
    torch.testing.assert_close(
        real(model.forward_packed(**batch).last_hidden_state, batch), expected, rtol=1e-4, atol=1e-4
    )
    model.pooler = torch.nn.Identity()
    model.train()(**batch).last_hidden_state.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert type(model).__name__ == "BertModel"


# judged by the contract, not by our way of writing it


def passes(exercise_id, **parts):
    exercise = exercises.load(exercise_id)
    given = SimpleNamespace(**{**exercise.reference, **parts})
    return [judging.judge(exercise, given, seed) for seed in (0, 1, judging.PUBLIC_SEED)]


def test_right_parts_written_in_another_way_pass(complete):
    """Own activations, own norms, a buffer, another order of operations, own loops."""
    attention = complete.attention.MultiHeadSelfAttention

    class FeedForward(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.down = torch.nn.Linear(config.intermediate_size, config.hidden_size)
            self.up = torch.nn.Linear(config.hidden_size, config.intermediate_size)
            self.dropout = torch.nn.Dropout(config.hidden_dropout_prob)
            self.register_buffer("ones", torch.ones(1), persistent=False)
            bends = {"gelu": complete.feed_forward.gelu, "relu": lambda x: x.clamp(min=0)}
            self.bend = {**bends, "gelu_tanh": complete.feed_forward.gelu_tanh}[config.hidden_act]

        def forward(self, hidden_states):
            wide = self.bend(hidden_states @ self.up.weight.T + self.up.bias)
            return self.dropout(wide @ self.down.weight.T + self.down.bias)

    class EncoderLayer(torch.nn.Module):
        def __init__(self, config, pre_norm=False):
            super().__init__()
            self.first = not pre_norm
            self.feed_forward, self.attention = FeedForward(config), attention(config)
            self.feed_forward_norm, self.attention_norm = (
                torch.nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) for _ in range(2)
            )
            self.dropout = torch.nn.Dropout(p=config.hidden_dropout_prob)

        def normalized(self, norm, x):
            given = complete.embeddings.layer_norm
            return given(x, norm.weight, norm.bias, norm.eps)

        def forward(self, hidden_states, attention_mask=None, return_weights=False):
            x, weights = hidden_states, None
            read = x if self.first else self.normalized(self.attention_norm, x)
            attended = self.attention(read, attention_mask, return_weights=return_weights)
            if return_weights:
                attended, weights = attended
            x = self.dropout(attended) + x
            if self.first:
                x = self.normalized(self.attention_norm, x)
            read = x if self.first else self.normalized(self.feed_forward_norm, x)
            x = self.feed_forward(read) + x
            if self.first:
                x = self.normalized(self.feed_forward_norm, x)
            return x if weights is None else (x, weights)

    for exercise_id, part in (("4.2", FeedForward), ("4.4", EncoderLayer)):
        for verdict in passes(exercise_id, **{part.__name__: part}):
            assert verdict.status == "passed", verdict.diagnosis


# 4.6


def test_the_patients_vectors_grow_and_the_mended_ones_do_not(complete, ours, batch):
    with torch.no_grad():
        states = mended = ill = ours.embeddings(batch["input_ids"])
        for layer in ours.encoder.layers:
            states = layer(states, batch["attention_mask"])
            mended = complete.clinic.mend_residual(layer, mended, batch["attention_mask"])
            ill = ill + layer.attention_norm(layer.attention(ill, batch["attention_mask"]))
            ill = ill + layer.feed_forward_norm(layer.feed_forward(ill))
    torch.testing.assert_close(real(mended, batch), real(states, batch))
    assert real(ill, batch).norm(dim=-1).mean() > 1.5 * real(states, batch).norm(dim=-1).mean()


@pytest.mark.parametrize("exercise_id", ["4.1", "4.2", "4.3", "4.4", "4.5", "4.6"])
def test_no_two_cases_of_an_exercise_are_the_same(exercise_id):
    cases = list(exercises.load(exercise_id).cases(np.random.default_rng(0)))
    assert len({case.name for case in cases}) == len(cases)
