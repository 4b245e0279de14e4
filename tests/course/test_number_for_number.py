"""The complete package against Transformers, number for number.

The rule is that of `bertlab.course.agreement`: the truth is Hugging Face's model in float64, and
ours may err by a small multiple of what Hugging Face's own errs in the same type.
"""

import copy
import random

import pytest
import torch
import transformers
from torch import Tensor

from bertlab.course import reference
from bertlab.course.agreement import Agreement, compare, compare_gradients, compared

DTYPES = [torch.float32, torch.bfloat16]


def drawn_config(seed: int) -> transformers.BertConfig:
    """Draw an architecture: heads, widths, layers, token types, activation and positions."""
    rng = random.Random(seed)
    heads = rng.choice([1, 2, 3, 4, 8])
    return transformers.BertConfig(
        vocab_size=rng.randint(50, 400),
        hidden_size=heads * rng.choice([5, 8, 16]),
        num_hidden_layers=rng.randint(1, 5),
        num_attention_heads=heads,
        intermediate_size=rng.randint(7, 150),
        hidden_act=rng.choice(["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"]),
        max_position_embeddings=rng.choice([128, 512, 777, 1024]),
        type_vocab_size=rng.randint(1, 3),
        layer_norm_eps=rng.choice([1e-12, 1e-5]),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def drawn_batch(config, seed: int, texts: int | None = None, seq: int | None = None):
    """Draw a batch with padding, sentence pairs and labels; at least one label."""
    rng = random.Random(seed)
    texts, seq = texts or rng.choice([1, 2, 3, 5]), seq or rng.choice([2, 7, 19, 33])
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, config.vocab_size, (texts, seq), generator=generator)
    lengths = torch.randint(1, seq + 1, (texts,), generator=generator)
    mask = (torch.arange(seq)[None] < lengths[:, None]).long()
    labelled = (torch.rand(texts, seq, generator=generator) < 0.3) & mask.bool()
    labelled[0, 0] = True
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "token_type_ids": torch.randint(
            0, config.type_vocab_size, (texts, seq), generator=generator
        ),
        "labels": torch.where(labelled, ids, -100),
        "next_sentence_label": torch.randint(0, 2, (texts,), generator=generator),
    }


def inputs_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in batch.items() if not name.endswith(("labels", "label"))}


def pair_of(complete, config, seed: int = 0):
    """Return our BertForPreTraining and Hugging Face's, with the same drawn weights."""
    theirs = reference.seeded_bert(config, seed, model_class=transformers.BertForPreTraining)
    ours = complete.heads.BertForPreTraining(complete.config.BertConfig.from_hf(config)).eval()
    complete.weights.load_hf_state_dict(ours, theirs.state_dict())
    return ours, theirs


def outputs_agree(ours, theirs, batch: dict[str, Tensor]) -> Agreement:
    """Compare what the two models return: all hidden states, attention weights and logits."""
    exact = copy.deepcopy(theirs).double()
    wanted = {"output_hidden_states": True, "output_attentions": True}
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        mine, yardstick, truth = (m(**inputs_of(batch), **wanted) for m in (ours, theirs, exact))
    parts = []
    for name in ("prediction_logits", "seq_relationship_logits"):
        tensors = [getattr(output, name) for output in (mine, yardstick, truth)]
        parts.append(compared(name, *tensors, real=real))
    for name in ("hidden_states", "attentions"):
        lists = [getattr(output, name) for output in (mine, yardstick, truth)]
        assert len({len(tensors) for tensors in lists}) == 1, name
        for number, tensors in enumerate(zip(*lists, strict=True)):
            # [batch, heads, query, key]: the weights of real queries, with padded keys among them
            tensors = [x.movedim(1, 2) if x.ndim == 4 else x for x in tensors]
            parts.append(compared(f"{name}[{number}]", *tensors, real=real))
    return Agreement(tuple(parts))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_random_architectures_agree_in_every_number(complete, seed, dtype):
    config = drawn_config(seed)
    ours, theirs = (model.to(dtype) for model in pair_of(complete, config, seed=seed))
    batch = drawn_batch(config, seed)
    assert compare(ours, theirs, inputs_of(batch)).first_departure is None
    names = complete.weights.hf_name_map(ours.config)
    gradients = compare_gradients(ours, theirs, batch, names)
    assert gradients.first_departure is None, gradients.verdict
    assert len(gradients.parts) == 1 + sum(1 for _ in theirs.parameters())
    theirs.set_attn_implementation("eager")  # the only one with weights to compare
    assert outputs_agree(ours, theirs, batch).first_departure is None


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("texts", "seq"), [(1, 1), (3, 1), (2, 128), (1, 512)])
def test_odd_shapes_agree(complete, seed, texts, seq):
    config = drawn_config(seed)
    config.max_position_embeddings = max(seq, 128)
    ours, theirs = pair_of(complete, config, seed)
    batch = drawn_batch(config, seed, texts, seq)
    assert compare(ours, theirs, inputs_of(batch)).first_departure is None
    names = complete.weights.hf_name_map(ours.config)
    assert compare_gradients(ours, theirs, batch, names).first_departure is None


def test_a_text_that_is_padding_but_for_one_token_agrees(complete):
    config = drawn_config(3)
    ours, theirs = pair_of(complete, config)
    batch = inputs_of(drawn_batch(config, 3, 2, 20))
    batch["attention_mask"][1] = torch.arange(20) == 0
    assert compare(ours, theirs, batch).first_departure is None


@pytest.mark.parametrize("model_class", ["BertModel", "BertForMaskedLM"])
def test_the_other_models_agree(complete, model_class):
    config = drawn_config(4)
    theirs = reference.seeded_bert(config, 4, model_class=getattr(transformers, model_class))
    home = complete.encoder if model_class == "BertModel" else complete.heads
    ours = getattr(home, model_class)(complete.config.BertConfig.from_hf(config)).eval()
    complete.weights.load_hf_state_dict(ours, theirs.state_dict())
    batch = drawn_batch(config, 4)
    assert compare(ours, theirs, inputs_of(batch)).first_departure is None
    if model_class == "BertForMaskedLM":
        del batch["next_sentence_label"]
        names = complete.weights.hf_name_map(ours.config)
        assert compare_gradients(ours, theirs, batch, names).first_departure is None


def test_minilm_agrees_on_real_text(complete):
    folder = reference.minilm_folder()
    ours = complete.weights.from_pretrained(complete.encoder.BertModel, folder)
    tokenizer = complete.tokenizer.WordPieceTokenizer.from_pretrained(folder)
    texts = ["Where did the numbers come from?", "A tensor is a multi-dimensional array.", "No."]
    batch = {name: torch.tensor(x) for name, x in tokenizer(texts, padding=True).items()}
    agreement = compare(ours, reference.minilm(), batch)
    assert agreement.first_departure is None, agreement
    assert len(agreement.parts) == 1 + 2 * 6 + 1


def test_bert_base_agrees_with_its_gradients(complete):
    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ours, theirs = pair_of(complete, config)
    assert sum(p.numel() for p in ours.bert.parameters()) == 109_482_240
    batch = drawn_batch(config, 0, 2, 24)
    assert compare(ours, theirs, inputs_of(batch)).first_departure is None
    names = complete.weights.hf_name_map(ours.config)
    gradients = compare_gradients(ours, theirs, batch, names)
    assert gradients.first_departure is None, gradients.verdict


# --- padding-free ---


@pytest.mark.parametrize("seed", range(5))
def test_packed_texts_give_the_same_numbers(complete, seed):
    config = drawn_config(seed)
    ours, theirs = pair_of(complete, config, seed=seed)
    batch = inputs_of(drawn_batch(config, seed, 5, 33))
    batch["attention_mask"][0, 5:] = 0
    real = batch["attention_mask"].bool()
    exact = copy.deepcopy(theirs).double()
    with torch.no_grad():
        packed = ours.bert.forward_packed(**batch)
        yardstick, truth = (model.bert(**batch) for model in (theirs, exact))
    for name in ("last_hidden_state", "pooler_output"):
        tensors = [getattr(output, name) for output in (packed, yardstick, truth)]
        part = compared(name, *tensors, real=real if name == "last_hidden_state" else None)
        assert part.agrees, part
    assert not packed.last_hidden_state[~real].any()


def test_packed_texts_give_the_same_gradients(complete):
    config = drawn_config(5)
    ours, _ = pair_of(complete, config)
    ours.double()
    batch = inputs_of(drawn_batch(config, 5, 4, 19))
    batch["attention_mask"][0, 5:] = 0
    real = batch["attention_mask"].bool()

    def gradients(forward):
        ours.zero_grad()
        forward(**batch).last_hidden_state[real].square().sum().backward()
        return [p.grad.clone() for p in ours.bert.parameters() if p.grad is not None]

    for one, other in zip(gradients(ours.bert), gradients(ours.bert.forward_packed), strict=True):
        torch.testing.assert_close(one, other)


def test_padding_on_the_left_and_an_empty_text_can_be_packed(complete):
    config = drawn_config(6)
    ours, _ = pair_of(complete, config)
    batch = inputs_of(drawn_batch(config, 6, 3, 12))
    batch["attention_mask"] = torch.tensor([[0] * 4 + [1] * 8, [1] * 12, [0] * 12])
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        padded, packed = ours.bert(**batch), ours.bert.forward_packed(**batch)
    torch.testing.assert_close(padded.last_hidden_state[real], packed.last_hidden_state[real])


# --- dropout, by statistics ---


def test_dropout_drops_as_much_as_in_transformers(complete):
    """Mean and spread of the output over many draws, in training mode."""
    config = drawn_config(7)
    config.hidden_dropout_prob, config.attention_probs_dropout_prob = 0.2, 0.3
    ours, theirs = pair_of(complete, config)
    batch = inputs_of(drawn_batch(config, 7, 1, 7))

    def draws(model) -> Tensor:
        model.train()
        repeated = {name: x.expand(4000, -1) for name, x in batch.items()}
        torch.manual_seed(0)
        with torch.no_grad():
            return model(**repeated).seq_relationship_logits.double()  # [draw, 2]

    mine, yardstick = draws(ours), draws(theirs)
    error = (yardstick.var(0) / 4000 + mine.var(0) / 4000).sqrt()
    assert ((mine.mean(0) - yardstick.mean(0)).abs() < 5 * error).all()
    assert (mine.std(0) / yardstick.std(0) - 1).abs().max() < 0.1
    assert mine.std(0).min() > 0.01  # a model without dropout has no spread at all


# --- the report itself ---


def _drop_bias(bert):
    bert.encoder.layers[1].feed_forward.down.bias.data.zero_()


def _wrong_activation(bert):
    bert.encoder.layers[2].feed_forward.hidden_act = "gelu_tanh"


def _wrong_eps(bert):
    bert.embeddings.norm.eps = 1e-2


def _swap_query_and_key(bert):
    attention = bert.encoder.layers[0].attention
    attention.query, attention.value = attention.value, attention.query


def _no_tanh(bert):
    bert.pooler.forward = lambda states: bert.pooler.dense(states[:, 0])


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (_drop_bias, "layer 1 feed-forward"),
        (_wrong_activation, "layer 2 feed-forward"),
        (_wrong_eps, "embeddings"),
        (_swap_query_and_key, "layer 0 attention"),
        (_no_tanh, "pooler"),
    ],
)
def test_the_report_names_the_first_part_that_departs(complete, break_it, named):
    config = drawn_config(8)
    config.num_hidden_layers, config.hidden_act = 3, "gelu"
    ours, theirs = pair_of(complete, config)
    break_it(ours.bert)
    agreement = compare(ours, theirs, inputs_of(drawn_batch(config, 8, 3, 19)))
    assert agreement.first_departure is not None
    assert agreement.first_departure.name == named
    assert named in agreement.verdict
    assert f"{agreement.first_departure.error:.1g}" in agreement.text
    agreement.plot()


def test_a_wrong_gradient_is_named(complete):
    config = drawn_config(9)
    ours, theirs = pair_of(complete, config)
    ours.mlm_head.decoder.weight = torch.nn.Parameter(ours.mlm_head.decoder.weight.detach().clone())
    names = complete.weights.hf_name_map(ours.config)
    gradients = compare_gradients(ours, theirs, drawn_batch(config, 9), names)
    assert gradients.first_departure is not None
    assert gradients.first_departure.name == "bert.embeddings.word.weight"


def test_not_a_number_never_agrees():
    nan = torch.tensor([float("nan")])
    assert not compared("x", nan, torch.ones(1), torch.ones(1).double()).agrees


def test_a_wrong_shape_or_dtype_never_agrees():
    one = torch.ones(1)
    assert not compared("x", torch.ones(2), one, one.double()).agrees
    assert not compared("x", one.double(), one, one.double()).agrees
