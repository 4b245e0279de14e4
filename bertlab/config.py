"""The numbers that describe one BERT, and exercise 0.1: where its parameters sit.

Nothing here needs PyTorch: a configuration is plain numbers, so that it can be read,
printed and checked before any model is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

ACTIVATIONS = ("gelu", "gelu_tanh", "relu")

# Hugging Face has two names for the approximation of 2016 that we call gelu_tanh.
HF_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}

# Settings of Hugging Face's BertConfig that change what the model computes, with the
# only value this library implements.
REQUIRED_IN_HF = {
    "model_type": "bert",
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
}


@dataclass(frozen=True)
class BertConfig:
    """What makes one BERT differ from another; the field names are Hugging Face's.

    Sizes are counts of units, heads, layers or table rows; dropout probabilities lie in
    [0, 1). The defaults are BERT-Base, uncased.

    Raises:
        ValueError: a field has a value with which no model can be built; the message
            names the field, the value and what is allowed.

    Source: Devlin et al. 2019, section 3 and appendix A.2.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        for name in _SIZES:
            _require_size(name, getattr(self, name))
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "in [0, 1)")
        for name in ("initializer_range", "layer_norm_eps"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "greater than 0")
        _require(
            self.hidden_act in ACTIVATIONS,
            "hidden_act",
            self.hidden_act,
            f"one of {', '.join(ACTIVATIONS)}",
        )
        _require(
            self.hidden_size % self.num_attention_heads == 0,
            "hidden_size",
            self.hidden_size,
            f"a multiple of num_attention_heads ({self.num_attention_heads})",
        )
        _require(
            isinstance(self.pad_token_id, int) and 0 <= self.pad_token_id < self.vocab_size,
            "pad_token_id",
            self.pad_token_id,
            f"a row of the word embeddings, 0 to {self.vocab_size - 1}",
        )

    @classmethod
    def base(cls, **changes: Any) -> Self:
        """BERT-Base, uncased: 12 layers, 768 wide, 12 heads; `changes` override fields."""
        return cls(**changes)

    @classmethod
    def mini(cls, **changes: Any) -> Self:
        """BERT-Mini of Turc et al. 2019: 4 layers, 256 wide, 4 heads; trains on a laptop."""
        sizes: dict[str, Any] = {
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 1024,
        }
        return cls(**(sizes | changes))

    @classmethod
    def from_hf(cls, config: Any) -> Self:
        """The same model's configuration, read from Hugging Face's.

        Args:
            config: a `transformers.BertConfig`, or a mapping as in its `config.json`.
                A field that is absent takes BERT-Base's value, as it does in Transformers;
                a field that says nothing about the architecture is ignored.

        Raises:
            TypeError: `config` is neither.
            ValueError: the configuration asks for something this library does not
                implement (a decoder, cross-attention, relative positions, an activation
                of another name, another model than BERT).
        """
        fields = _hf_fields(config)
        for name, supported in REQUIRED_IN_HF.items():
            _require(
                fields.get(name, supported) == supported,
                name,
                fields.get(name),
                f"{supported!r}: bertlab implements nothing else",
            )
        known = {f.name: fields[f.name] for f in dataclasses.fields(cls) if f.name in fields}
        if "hidden_act" in known:
            known["hidden_act"] = HF_ACTIVATIONS.get(known["hidden_act"], known["hidden_act"])
        return cls(**known)

    def to_hf(self) -> dict[str, Any]:
        """The same configuration as Hugging Face writes it: the content of a `config.json`."""
        fields = dataclasses.asdict(self)
        if self.hidden_act == "gelu_tanh":
            fields["hidden_act"] = "gelu_pytorch_tanh"
        return {"model_type": "bert", "architectures": ["BertModel"]} | fields

    @property
    def head_size(self) -> int:
        """How many units one attention head has."""
        return self.hidden_size // self.num_attention_heads


# --- exercise 0.1: count the parameters ---
def count_parameters(config: BertConfig) -> int:
    """The number of parameters of a BERT encoder, from arithmetic alone.

    Counts the embeddings (three tables and a LayerNorm), every encoder layer (attention
    with its output projection, the feed-forward network, two LayerNorms; biases too) and
    the pooler. No pretraining head is counted. No model is built.

    Args:
        config: the sizes of the model.

    Returns:
        How many numbers are learned; 109,482,240 for `BertConfig.base()`.

    Source: Devlin et al. 2019, section 3 ("110M parameters").
    """
    raise NotImplementedError("exercise 0.1")
# --- end of exercise 0.1 ---

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)


def _require(allowed: bool, name: str, value: object, allowed_values: str) -> None:
    if not allowed:
        raise ValueError(f"{name} is {value!r}, but must be {allowed_values}")


def _require_size(name: str, value: object) -> None:
    is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    _require(is_size, name, value, "a whole number of at least 1")


def _hf_fields(config: Any) -> Mapping[str, Any]:
    """The fields of a Hugging Face configuration, whether it is an object or a mapping."""
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        return config.to_dict()
    raise TypeError(
        f"config is a {type(config).__name__}, but must be a transformers.BertConfig or a dict"
    )
