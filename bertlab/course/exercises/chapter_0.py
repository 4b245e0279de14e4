"""Chapter 0: how many parameters does a BERT have?"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from bertlab.course.exercise import Case, Exercise, Misconception
from bertlab.course.exercises.support import bert_config


def built_count(config: Any) -> int:
    """Count by building: PyTorch's own Transformer, without memory for the numbers."""
    width = config.hidden_size
    meta: dict[str, Any] = {"device": "meta"}  # shapes only
    layer = nn.TransformerEncoderLayer(
        width, config.num_attention_heads, config.intermediate_size, **meta
    )
    tables = config.vocab_size, config.max_position_embeddings, config.type_vocab_size
    rest = nn.ModuleList(
        [
            *(_table(rows, width) for rows in tables),
            nn.LayerNorm(width, **meta),
            nn.Linear(width, width, **meta),
        ]
    )
    return config.num_hidden_layers * _size(layer) + _size(rest)


def _table(rows: int, width: int) -> nn.Embedding:
    return nn.Embedding.from_pretrained(torch.empty(rows, width, device="meta"))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _without(**changes: Any) -> Any:
    """Count for a configuration with some fields changed."""
    return lambda config: built_count(SimpleNamespace(**{**vars(config), **changes}))


def _cases(rng: np.random.Generator) -> Iterator[Case]:
    base = {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
    }
    yield Case("BERT-Base", {"fields": base})
    for number in range(1, 5):
        heads = int(rng.integers(1, 9))
        drawn = {
            "vocab_size": int(rng.integers(500, 40000)),
            "hidden_size": heads * int(rng.integers(8, 65)),
            "num_hidden_layers": int(rng.integers(2, 25)),
            "num_attention_heads": heads,
            "intermediate_size": int(rng.integers(50, 5000)),
            "max_position_embeddings": int(rng.integers(100, 1025)),
            "type_vocab_size": int(rng.integers(1, 4)),
        }
        yield Case(f"a model of other sizes ({number})", {"fields": drawn})


def _probe(part: Any, fields: dict[str, int]) -> Any:
    return part.count_parameters(bert_config(**fields))


def _biases(config: Any) -> int:
    width, inner = config.hidden_size, config.intermediate_size
    return config.num_hidden_layers * (4 * width + inner + width) + width


def _norms(config: Any) -> int:
    return 2 * config.hidden_size * (1 + 2 * config.num_hidden_layers)


EXERCISES = [
    Exercise(
        id="0.1",
        reference={"count_parameters": built_count},
        reference_name="torch.nn.TransformerEncoderLayer, built and counted",
        cases=_cases,
        probe=_probe,
        misconceptions=(
            Misconception(
                "the biases are left out",
                "A linear layer from n to m units has n·m weights and m biases. In BERT every one "
                "of them has its bias: query, key, value, the attention's output, both layers of "
                "the feed-forward network, and the pooler. It is about 0.1% of BERT-Base, so a "
                "rough look does not show it.",
                {"count_parameters": lambda config: built_count(config) - _biases(config)},
            ),
            Misconception(
                "the LayerNorms are left out",
                "A LayerNorm learns a gain and a bias for each unit: 2 × hidden_size numbers. "
                "There is one after the embeddings and two in each layer, 25 in BERT-Base.",
                {"count_parameters": lambda config: built_count(config) - _norms(config)},
            ),
            Misconception(
                "the pooler is left out",
                "After the last layer, BERT passes the vector of [CLS] through one more linear "
                "layer and a tanh, the pooler: hidden_size × hidden_size weights and hidden_size "
                "biases. Hugging Face's BertModel holds it, so it counts here.",
                {
                    "count_parameters": lambda config: (
                        built_count(config) - config.hidden_size * (config.hidden_size + 1)
                    )
                },
            ),
            Misconception(
                "each head is counted as if it were as wide as the model",
                "The heads share the width: each of the 12 heads of BERT-Base works in 64 of the "
                "768 units. Twelve projections from 768 to 64 are together one of 768 to 768. The "
                "number of heads does not change the number of parameters at all.",
                {
                    "count_parameters": lambda config: (
                        built_count(config)
                        + config.num_hidden_layers
                        * 3
                        * (config.num_attention_heads - 1)
                        * config.hidden_size
                        * (config.hidden_size + 1)
                    )
                },
            ),
            Misconception(
                "the attention's output projection is left out",
                "Attention has four linear layers, not three. After query, key and value, the "
                "heads' results are put side by side and passed through a fourth, the output "
                "projection, again hidden_size to hidden_size.",
                {
                    "count_parameters": lambda config: (
                        built_count(config)
                        - config.num_hidden_layers * config.hidden_size * (config.hidden_size + 1)
                    )
                },
            ),
            Misconception(
                "the position and token type tables are left out",
                "BERT looks up three vectors for each token: one for the word piece, one for its "
                "position (max_position_embeddings rows), one for the text it is in "
                "(type_vocab_size rows). All three tables are learned.",
                {
                    "count_parameters": _without(max_position_embeddings=0, type_vocab_size=0),
                },
            ),
            Misconception(
                "the inner layer is taken to be four times as wide as the model",
                "In BERT-Base it is, 3,072 = 4 × 768. But the width of the feed-forward network's "
                "inner layer is a number of its own, config.intermediate_size, and other models "
                "choose it differently.",
                {
                    "count_parameters": lambda config: built_count(
                        SimpleNamespace(
                            **{**vars(config), "intermediate_size": 4 * config.hidden_size}
                        )
                    )
                },
            ),
        ),
        hints=(
            "Go through the model from the bottom: three embedding tables and a LayerNorm; then "
            "one layer, times their number; then the pooler. A table has rows × columns numbers, "
            "a linear layer n × m weights and m biases, a LayerNorm two numbers for each unit.",
            "One layer has four linear layers of hidden_size to hidden_size (query, key, value, "
            "output), one up to intermediate_size and one back down, and two LayerNorms.",
            "With h for hidden_size and i for intermediate_size: the tables have "
            "(vocab_size + max_position_embeddings + type_vocab_size) · h, the LayerNorm above "
            "them 2h; one layer 4(h² + h) + (hi + i) + (ih + h) + 4h; the pooler h² + h.",
        ),
    ),
]
