"""BertConfig reads what Hugging Face writes, and refuses what cannot be built."""

import dataclasses
import subprocess
import sys

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.bert.modeling_bert import BertModel

sizes = st.fixed_dictionaries(
    {
        "vocab_size": st.integers(1, 50),
        "num_hidden_layers": st.integers(1, 3),
        "num_attention_heads": st.integers(1, 4),
        "head_size": st.integers(1, 5),
        "intermediate_size": st.integers(1, 20),
        "max_position_embeddings": st.integers(1, 20),
        "type_vocab_size": st.integers(1, 3),
    }
)


def with_hidden_size(drawn):
    fields = dict(drawn)
    fields["hidden_size"] = fields.pop("head_size") * fields["num_attention_heads"]
    return fields


def test_bert_base_has_109_482_240_parameters(complete):
    assert complete.config.count_parameters(complete.config.BertConfig.base()) == 109_482_240


@settings(max_examples=20, deadline=None)
@given(sizes)
def test_the_count_is_that_of_the_model_hugging_face_builds(complete, drawn):
    fields = with_hidden_size(drawn)
    model = BertModel(transformers.BertConfig(**fields))
    counted = complete.config.count_parameters(complete.config.BertConfig(**fields))
    assert counted == sum(parameter.numel() for parameter in model.parameters())


def test_the_defaults_are_those_of_hugging_face(complete):
    config = complete.config.BertConfig
    assert config.from_hf(transformers.BertConfig()) == config.base() == config.from_hf({})


@settings(max_examples=30, deadline=None)
@given(
    drawn=sizes,
    activation=st.sampled_from(["gelu", "gelu_tanh", "relu"]),
    dropout=st.floats(0, 1, exclude_max=True),
)
def test_a_configuration_survives_the_way_to_hugging_face_and_back(
    complete, drawn, activation, dropout
):
    config = complete.config.BertConfig(
        **with_hidden_size(drawn), hidden_act=activation, hidden_dropout_prob=dropout
    )
    theirs = transformers.BertConfig.from_dict(config.to_hf())
    assert complete.config.BertConfig.from_hf(theirs) == config
    assert complete.config.BertConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh"])
def test_both_hugging_face_names_of_the_approximation_are_known(complete, name):
    theirs = transformers.BertConfig(hidden_act=name)
    assert complete.config.BertConfig.from_hf(theirs).hidden_act == "gelu_tanh"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("position_embedding_type", "relative_key"),
        ("model_type", "roberta"),
        ("hidden_act", "silu"),
        ("pad_token_id", None),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(complete, field, value):
    with pytest.raises(ValueError, match=field):
        complete.config.BertConfig.from_hf({field: value})


def test_something_that_is_no_configuration_is_refused(complete):
    with pytest.raises(TypeError, match="config is a str, but must be"):
        complete.config.BertConfig.from_hf("bert-base-uncased")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 770),
        ("hidden_size", 768.0),
        ("num_attention_heads", 0),
        ("num_hidden_layers", -1),
        ("vocab_size", True),
        ("hidden_act", "swish"),
        ("hidden_dropout_prob", 1.0),
        ("attention_probs_dropout_prob", -0.1),
        ("layer_norm_eps", 0.0),
        ("initializer_range", -0.02),
        ("pad_token_id", 30522),
    ],
)
def test_an_impossible_value_is_refused_with_its_name_and_itself(complete, field, value):
    with pytest.raises(ValueError, match=f"{field} is {value!r}, but must be"):
        complete.config.BertConfig(**{field: value})


def test_a_configuration_cannot_be_changed_by_accident(complete):
    with pytest.raises(dataclasses.FrozenInstanceError):
        complete.config.BertConfig.mini().hidden_size = 1


def test_the_configuration_needs_neither_torch_nor_transformers(complete):
    code = (
        "import runpy, sys; "
        f"runpy.run_path({complete.config.__file__!r}, run_name='config'); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
