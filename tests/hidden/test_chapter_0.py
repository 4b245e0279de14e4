"""Chapter 0: properties of the count that the notebook does not show."""

import pytest
import torch

from bertlab.course.grading.hidden import Config

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")


def drawn(rng, heads=4, **fields):
    """Draw the sizes of a model whose width this number of heads divides."""
    sizes = {name: int(size) for name, size in zip(SIZES, rng.integers(5, 60, 4), strict=True)}
    sizes |= {"hidden_size": heads * sizes["hidden_size"], "num_attention_heads": heads}
    return Config(sizes | {"max_position_embeddings": int(rng.integers(9, 99))} | fields)


def built(config):
    """Count the parameters of Transformers' model."""
    from transformers import BertConfig, BertModel

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in BertModel(BertConfig(**config)).parameters())


@pytest.mark.exercise("0.1")
@pytest.mark.hint("The heads share the width among them: how many there are changes nothing.")
def test_the_number_of_heads_changes_nothing(submission, rng):
    """The number of heads changes nothing"""
    config = drawn(rng, heads=12)
    counts = [Config(config, num_attention_heads=heads) for heads in (1, 2, 3, 12)]
    submission.agrees(
        lambda of: [of.call("config.count_parameters", one) for one in counts],
        truth=lambda: [built(config)] * 4,
    )


@pytest.mark.exercise("0.1")
@pytest.mark.hint("Every layer has the same parts, so each adds the same number.")
def test_every_layer_adds_the_same(submission, rng):
    """Each layer more adds as much as the one before"""
    config = drawn(rng)
    configs = [Config(config, num_hidden_layers=layers) for layers in (1, 2, 3, 40)]
    submission.agrees(
        lambda of: [of.call("config.count_parameters", config) for config in configs],
        truth=lambda: [built(config) for config in configs],
    )


@pytest.mark.exercise("0.1")
@pytest.mark.hint("Where every size is 1, each table and each matrix is a single number.")
def test_the_smallest_model(submission):
    """A model whose sizes are all 1"""
    ones = Config(dict.fromkeys((*SIZES, "num_attention_heads", "type_vocab_size"), 1))
    ones["max_position_embeddings"] = 1
    submission.agrees(
        lambda of: of.call("config.count_parameters", ones), truth=lambda: built(ones)
    )


@pytest.mark.exercise("0.1")
@pytest.mark.hint("The answer is a whole number however large it is: no division, no float.")
def test_more_parameters_than_a_float_can_count(submission, rng):
    """A model so large that only whole numbers count it exactly"""
    vocab = 2**40 + int(rng.integers(1000))
    large = Config(drawn(rng, heads=1, vocab_size=vocab), hidden_size=2**13 + 1)
    small = Config(large, vocab_size=1)
    submission.agrees(
        lambda of: of.call("config.count_parameters", large),
        truth=lambda: built(small) + (vocab - 1) * large["hidden_size"],
    )
