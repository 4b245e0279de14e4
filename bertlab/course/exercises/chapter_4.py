"""Chapter 4: the feed-forward network, the encoder layer, and the whole encoder."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertlab.course.exercise import Case, Exercise, Misconception
from bertlab.course.exercises.chapter_2 import TheirBertEmbeddings
from bertlab.course.exercises.chapter_3 import ReferenceMultiHeadSelfAttention, keeps_weights
from bertlab.course.exercises.support import (
    bert_config,
    error_of,
    gradients,
    integers,
    normal,
    padding_mask,
    parameters_like,
    with_parameters,
)

# --- shared by the exercises ---------------------------------------------------------------------


def parameter_shapes(module: nn.Module) -> list[list[Any]]:
    """Return a module's parameters as `[name, shape]`, in the order of their names."""
    return sorted([name, list(value.shape)] for name, value in module.named_parameters())


def real_tokens(*names: str, mask: Tensor) -> dict[str, Tensor]:
    """Say that the outputs of these names are compared at real tokens only."""
    return dict.fromkeys(names, mask)


def alone_or_beside(returned: Any) -> tuple[Any, Any, str]:
    """Return the output, what came beside it if anything, and which of both it was."""
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned[0], returned[1], "a pair"
    return returned, None, type(returned).__name__


def learned(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters by name, without the biases of the keys.

    Those add the same to all scores of a query, so their gradient is 0 but for rounding.
    """
    return {n: p for n, p in module.named_parameters() if not n.endswith("key.bias")}


# --- 4.1 GELU ------------------------------------------------------------------------------------


def torch_gelu(x: Tensor) -> Tensor:
    """Return PyTorch's GELU, by the error function."""
    return F.gelu(x)


def torch_gelu_tanh(x: Tensor) -> Tensor:
    """Return PyTorch's GELU, by the hyperbolic tangent."""
    return F.gelu(x, approximate="tanh")


def _gelu_by(probability: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return x times something else than the probability."""
    return lambda x: x * probability(x)


def _tanh_of(inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the approximation with something else inside the tangent."""
    return lambda x: 0.5 * x * (1 + inner(x).tanh())


_ROOT = math.sqrt(2 / math.pi)


def _gelu_cases(rng: np.random.Generator) -> Iterator[Case]:
    def inputs(*shape: int, scale: float) -> dict[str, Tensor]:
        return {"x": normal(rng, *shape, scale=scale), "cotangent": normal(rng, *shape)}

    yield Case("numbers around 0", inputs(4, 50, scale=1.5))
    yield Case("a batch [batch, seq, hidden] of larger numbers", inputs(2, 5, 16, scale=6.0))
    yield Case("a single number", inputs(scale=1.0))
    yield Case("numbers in bfloat16", inputs(200, scale=2.0), dtype="bfloat16")
    yield Case("numbers in float16", inputs(200, scale=2.0), dtype="float16")


def _gelu_probe(part: Any, x: Tensor, cotangent: Tensor) -> dict[str, Any]:
    found = {}
    for name in ("gelu", "gelu_tanh"):
        leaf = x.clone().requires_grad_()
        output = getattr(part, name)(leaf)
        found[name] = output
        if x.dtype in (torch.float32, torch.float64):
            slope = gradients(output, cotangent, {name: leaf})
            found[f"gradient of {name}"] = slope[f"gradient of {name}"]
    return found


_HALF = (
    "1 + erf(...) (or 1 + tanh(...)) runs from 0 to 2, and a probability from 0 to 1: half of it "
    "is what x is multiplied with. Without the half, large numbers come out doubled."
)

GELU = Exercise(
    id="4.1",
    reference={"gelu": torch_gelu, "gelu_tanh": torch_gelu_tanh},
    reference_name="torch.nn.functional.gelu, approximate='none' and 'tanh'",
    cases=_gelu_cases,
    probe=_gelu_probe,
    misconceptions=(
        Misconception(
            "gelu is the sigmoid approximation",
            "x · sigmoid(1.702 x) is the other approximation of the paper of 2016, and it is much "
            "coarser: off by up to 0.02. CLIP uses it under the name of quick_gelu. BERT uses the "
            "error function.",
            {"gelu": _gelu_by(lambda x: (1.702 * x).sigmoid())},
        ),
        Misconception(
            "gelu is x times sigmoid of x",
            "That is SiLU, also called swish, which you meet in exercise 4.3. GELU multiplies x "
            "by the probability that a normal draw is below it; the sigmoid is the same idea with "
            "another distribution, a wider one.",
            {"gelu": F.silu},
        ),
        Misconception(
            "gelu takes the error function of x instead of x / √2",
            "erf is made for a normal distribution of variance 1/2. The probability that a "
            "standard normal draw is below x is (1 + erf(x / √2)) / 2. Without the √2 the bend is "
            "too sharp.",
            {"gelu": _gelu_by(lambda x: 0.5 * (1 + x.erf()))},
        ),
        Misconception(
            "the factor ½ is missing from gelu",
            _HALF,
            {"gelu": lambda x: 2 * F.gelu(x)},
        ),
        Misconception(
            "the factor ½ is missing from gelu_tanh",
            _HALF,
            {"gelu_tanh": lambda x: 2 * torch_gelu_tanh(x)},
        ),
        Misconception(
            "the factor ½ is missing from both",
            _HALF,
            {"gelu": lambda x: 2 * F.gelu(x), "gelu_tanh": lambda x: 2 * torch_gelu_tanh(x)},
        ),
        Misconception(
            "gelu is the probability alone, without x",
            "The probability that a normal draw is below x is what x is to be *multiplied* with. "
            "Alone it runs from 0 to 1 like a sigmoid, and large numbers all become the same.",
            {"gelu": lambda x: 0.5 * (1 + (x / 2**0.5).erf())},
        ),
        Misconception(
            "gelu is the tanh approximation",
            "The two differ by less than 0.0005, so a plot shows one curve. The checkpoints called "
            "bert-base were trained with the exact form (`hidden_act: gelu`), and the difference "
            "is a few hundred times what float32 rounds away.",
            {"gelu": torch_gelu_tanh},
        ),
        Misconception(
            "gelu_tanh is the exact form",
            "Models trained with the approximation (`gelu_new`, `gelu_pytorch_tanh`: GPT-2, "
            "ALBERT) are to be run with it, so it must be there, with its own error.",
            {"gelu_tanh": torch_gelu},
        ),
        Misconception(
            "gelu and gelu_tanh have changed places",
            "`gelu` is the exact form, by the error function; `gelu_tanh` the approximation."
            ' BERT\'s checkpoints say "gelu" and mean the exact one.',
            {"gelu": torch_gelu_tanh, "gelu_tanh": torch_gelu},
        ),
        Misconception(
            "the cubic term is missing",
            "tanh(√(2/π) · x) has the right slope at 0 and bends too slowly further out, where "
            "0.044715 x³ corrects it: without it the error is seventy times as large, 0.03.",
            {"gelu_tanh": _tanh_of(lambda x: _ROOT * x)},
        ),
        Misconception(
            "√(2/π) multiplies x alone and not the cubic term",
            "The factor stands before the bracket: √(2/π) · (x + 0.044715 x³)."
            " So the cubic term is scaled as well, and both grow together.",
            {"gelu_tanh": _tanh_of(lambda x: _ROOT * x + 0.044715 * x**3)},
        ),
        Misconception(
            "√(2/π) is written as √2/π",
            "The root covers the whole fraction: √(2/π) is 0.798, √2/π is 0.450. In Python, "
            "`math.sqrt(2 / math.pi)`."
            " So the tanh here is too flat.",
            {"gelu_tanh": _tanh_of(lambda x: math.sqrt(2) / math.pi * (x + 0.044715 * x**3))},
        ),
        Misconception(
            "√(2/π) is left out",
            "Without it the slope at 0 is right and the bend too sharp, as if the normal "
            "distribution were narrower by a fifth.",
            {"gelu_tanh": _tanh_of(lambda x: x + 0.044715 * x**3)},
        ),
        Misconception(
            "the cubic term is a square",
            "x² is the same on both sides of 0, but the function inside the tangent must change "
            "its sign with x: it is 0.044715 x³.",
            {"gelu_tanh": _tanh_of(lambda x: _ROOT * (x + 0.044715 * x**2))},
        ),
    ),
    hints=(
        "Both are one line, copied from the docstring. PyTorch has `torch.erf` and `torch.tanh`; "
        "constants come from `math`.",
        "Mind the brackets: √2 divides x inside erf; √(2/π) multiplies the sum of x and the cubic "
        "term, inside tanh. The factor ½ belongs to the whole.",
        "gelu: x times 0.5 times (1 + torch.erf(x / math.sqrt(2))). gelu_tanh: the same with "
        "torch.tanh of math.sqrt(2 / math.pi) * (x + 0.044715 * x**3) in place of erf.",
    ),
)

# --- 4.2 the feed-forward network ----------------------------------------------------------------

_THEIR_NAMES = {"gelu_tanh": "gelu_pytorch_tanh"}


class FeedForward(nn.Module):
    """Transformers' `BertIntermediate` and `BertOutput.dense`, under this course's names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.activation_name = config.hidden_act

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the network to every token."""
        return self.dropout(self.down(self.widened(hidden_states)))

    def widened(self, hidden_states: Tensor) -> Tensor:
        """Return what stands between the two linear layers."""
        from transformers.models.bert.modeling_bert import BertIntermediate

        theirs: Any = BertIntermediate.forward
        parts = SimpleNamespace(dense=self.up, intermediate_act_fn=self.activation)
        return theirs(parts, hidden_states)

    def activation(self, x: Tensor) -> Tensor:
        """Apply the activation that the config asks for."""
        from transformers.activations import ACT2FN

        return ACT2FN[_THEIR_NAMES.get(self.activation_name, self.activation_name)](x)


def _network(**methods: Any) -> dict[str, type]:
    """Return the feed-forward network with some methods replaced."""
    return {"FeedForward": type("FeedForward", (FeedForward,), methods)}


def _four_times_as_wide(self: Any, config: Any) -> None:
    FeedForward.__init__(self, replace(config, intermediate_size=4 * config.hidden_size))


def _without_biases(self: Any, config: Any) -> None:
    FeedForward.__init__(self, config)
    self.up.bias = self.down.bias = None


def _dropped_before_up(self: Any, hidden_states: Tensor) -> Tensor:
    return self.down(self.widened(self.dropout(hidden_states)))


_FFN = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def _network_state(rng: np.random.Generator, fields: Mapping[str, Any]) -> dict[str, Tensor]:
    return parameters_like(FeedForward(bert_config(**fields)), rng, {"up.weight": 1.5})


def _network_cases(rng: np.random.Generator) -> Iterator[Case]:
    def inputs(**changes: Any) -> dict[str, Any]:
        fields = {**_FFN, **changes}
        return {
            "fields": fields,
            "state": _network_state(rng, fields),
            "hidden_states": normal(rng, 2, 7, fields["hidden_size"]),
            "cotangent": normal(rng, 2, 7, fields["hidden_size"]),
        }

    yield Case("gelu", inputs())
    yield Case("gelu_tanh", inputs(hidden_act="gelu_tanh"))
    yield Case("relu", inputs(hidden_act="relu", intermediate_size=96))
    given = inputs(hidden_act="relu", hidden_dropout_prob=0.3)
    given["hidden_states"] = torch.ones(40, 8, 24)
    yield Case("training, dropout 0.3", {**given, "wants": "dropout"})
    yield Case("the parameters", {**inputs(intermediate_size=30), "wants": "parameters"})


def _network_probe(
    part: Any,
    fields: dict[str, Any],
    state: dict[str, Tensor],
    hidden_states: Tensor,
    cotangent: Tensor,
    wants: str = "numbers",
) -> dict[str, Any]:
    module = part.FeedForward(bert_config(**fields))
    if wants == "parameters":
        return {"parameters and shapes": parameter_shapes(module)}
    if wants == "dropout":
        return _where_it_drops(module, state, hidden_states)
    module = with_parameters(module, state)
    hidden_states = hidden_states.clone().requires_grad_()
    output = module(hidden_states)
    wanted = {**learned(module), "hidden_states": hidden_states}
    return {"output": output, **gradients(output, cotangent, wanted)}


def _where_it_drops(module: Any, state: Mapping[str, Tensor], ones: Tensor) -> dict[str, Any]:
    """Look for dropout in front of each linear layer and after both, one place at a time.

    In each state only one linear layer lets its input through, or none does.
    """
    hidden, inner = ones.shape[-1], state["up.bias"].shape[0]
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    through_up, through_down = torch.zeros_like(state["up.weight"]), zeros["down.weight"].clone()
    through_up[:hidden] = torch.eye(hidden).to(through_up)
    through_down[:, :hidden] = torch.eye(hidden).to(through_down)
    full = torch.ones(inner).to(state["up.bias"])
    states = {
        "the output's own bias": {"down.bias": torch.ones_like(state["down.bias"])},
        "what `down` is given": {"up.bias": full, "down.weight": through_down},
        "what `up` is given": {"up.weight": through_up, "down.weight": through_down},
    }
    found: dict[str, Any] = {}
    for where, changes in states.items():
        output = with_parameters(module, {**zeros, **changes}, train=True)(ones)
        found[f"share of zeros that training makes of {where}"] = _share(output == 0)
        kept = output[output != 0]
        found[f"factor on the rest of {where}"] = (
            f"{kept.median():.2f}" if len(kept) else "all zero"
        )
    module.eval()
    found["zeros in evaluation"] = _share(module(ones) == 0)
    return found


def _share(chosen: Tensor) -> str:
    """Return the share of True in tenths, which no other draw of dropout's mask would change."""
    return f"{chosen.cpu().double().mean():.1f}"  # Apple's GPUs have no float64


NETWORK = Exercise(
    id="4.2",
    reference={"FeedForward": FeedForward},
    reference_name="transformers BertIntermediate, then BertOutput.dense and its dropout",
    cases=_network_cases,
    probe=_network_probe,
    misconceptions=(
        Misconception(
            "the activation is gelu, whatever the config says",
            "`config.hidden_act` names the activation: `gelu`, `gelu_tanh` or `relu`. BERT's "
            "checkpoints say gelu, others do not, and nothing complains when the wrong one runs.",
            _network(activation=lambda self, x: F.gelu(x)),
        ),
        Misconception(
            "gelu_tanh is computed as gelu",
            "`relu` is obeyed, `gelu_tanh` is not: it has to be the approximation, with its own "
            "small error. A model trained with it expects it.",
            _network(
                activation=lambda self, x: x.relu() if self.activation_name == "relu" else F.gelu(x)
            ),
        ),
        Misconception(
            "gelu is computed as gelu_tanh",
            "`F.gelu` takes `approximate='tanh'` for the one and nothing for the other; "
            "`hidden_act` says which. BERT's own is the exact form.",
            _network(
                activation=lambda self, x: (
                    x.relu() if self.activation_name == "relu" else torch_gelu_tanh(x)
                )
            ),
        ),
        Misconception(
            "there is no activation",
            "Two linear layers with nothing between them are one linear layer: down(up(x)) has the "
            "rank of a hidden × hidden matrix, and all the extra width buys nothing.",
            _network(activation=lambda self, x: x),
        ),
        Misconception(
            "the activation comes after `down`",
            "Between the two linear layers nothing bends then, so they are as good as one; and the "
            "output can hardly be negative, though it is to be added to a vector that needs to go "
            "both ways. The activation stands between `up` and `down`.",
            _network(forward=lambda self, x: self.dropout(self.activation(self.down(self.up(x))))),
        ),
        Misconception(
            "the activation acts twice, after `up` and after `down`",
            "Only the wide vector is bent. The output is added to the residual (exercise 4.4) and "
            "must be able to be negative.",
            _network(forward=lambda self, x: self.dropout(self.activation(self._plain(x)))),
        ),
        Misconception(
            "dropout acts before `up`",
            "It belongs after `down`, on what the network adds to the token. Before `up` it "
            "would drop units of the token itself.",
            _network(forward=_dropped_before_up),
        ),
        Misconception(
            "dropout acts between the two linear layers",
            "PyTorch's TransformerEncoderLayer drops there too, BERT does not: its one dropout "
            "comes after `down`."
            " Units of the wide layer are never dropped.",
            _network(forward=lambda self, x: self.down(self.dropout(self.widened(x)))),
        ),
        Misconception(
            "nothing is dropped",
            "`self.dropout` is there and not called. In evaluation nobody can tell; in training "
            "the model lacks the regularization its config asks for.",
            _network(forward=lambda self, x: self.down(self.widened(x))),
        ),
        Misconception(
            "dropout acts in evaluation as well",
            "`F.dropout` does not know about `eval()` unless it is told, by "
            "`training=self.training`. `nn.Dropout` knows."
            " A model in evaluation must give the same answer twice.",
            _network(forward=lambda self, x: F.dropout(self.down(self.widened(x)), self.dropout.p)),
        ),
        Misconception(
            "the linear layers have no biases",
            "Llama's have none, BERT's have: `up.bias` and `down.bias` are in every checkpoint. "
            "The bias of `up` decides where each unit bends.",
            _network(__init__=_without_biases),
        ),
        Misconception(
            "the inner width is 4 · hidden_size, whatever the config says",
            "It is so in BERT-Base (4 · 768 = 3,072), and the config says it in a field of its "
            "own: `intermediate_size`.",
            _network(__init__=_four_times_as_wide),
        ),
        Misconception(
            "the residual is added inside",
            "You add hidden_states to the output. BERT does so, but in the encoder layer (exercise "
            "4.4), together with LayerNorm. Done here, it is done twice.",
            _network(forward=lambda self, x: x + self.dropout(self._plain(x))),
        ),
    ),
    hints=(
        "`__init__`: two `nn.Linear`, an `nn.Dropout`, and a note of which activation it is. "
        "`forward`: up, activation, down, dropout.",
        "`ACTIVATIONS[config.hidden_act]`, given above this exercise, is the function; your own "
        "`gelu` and `gelu_tanh`, with `torch.relu`, are as good.",
        "self.up goes from config.hidden_size to config.intermediate_size, self.down back, "
        "self.dropout has config.hidden_dropout_prob. Return "
        "self.dropout(self.down(activation(self.up(hidden_states)))).",
    ),
)

for _misconception in NETWORK.misconceptions:  # what two of them call
    _misconception.parts["FeedForward"]._plain = lambda self, x: self.down(self.widened(x))

# --- 4.3 SwiGLU ----------------------------------------------------------------------------------


def count_of(inner: int, hidden: int) -> int:
    """Return how many parameters a gated network has, biases counted."""
    return inner * (3 * hidden + 2) + hidden


def nearest_units(config: Any) -> int:
    """Return the number of units whose count is nearest to the feed-forward network's."""
    hidden, wide = config.hidden_size, config.intermediate_size
    goal = wide * (2 * hidden + 1) + hidden
    return min(range(1, wide + 1), key=lambda inner: abs(count_of(inner, hidden) - goal))


class SwiGLU(nn.Module):
    """Transformers' `LlamaMLP` with biases, under this course's names."""

    units = staticmethod(nearest_units)

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, self.units(config)
        self.gate, self.up = nn.Linear(hidden, inner), nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the network to every token."""
        return self.dropout(self.plain(hidden_states))

    def plain(self, hidden_states: Tensor, **changes: Any) -> Tensor:
        """Return LlamaMLP's output, without dropout."""
        from transformers.models.llama.modeling_llama import LlamaMLP

        theirs: Any = LlamaMLP.forward
        parts = {"gate_proj": self.gate, "up_proj": self.up, "down_proj": self.down}
        return theirs(SimpleNamespace(**{**parts, "act_fn": F.silu, **changes}), hidden_states)


def _gated(**methods: Any) -> dict[str, type]:
    """Return the gated network with some methods replaced."""
    return {"SwiGLU": type("SwiGLU", (SwiGLU,), methods)}


def _sized(units: Callable[[Any], int]) -> dict[str, type]:
    """Return the gated network with another number of units."""
    return _gated(units=staticmethod(units))


def _gated_without_biases(self: Any, config: Any) -> None:
    SwiGLU.__init__(self, config)
    self.gate.bias = self.up.bias = self.down.bias = None


def _gated_cases(rng: np.random.Generator) -> Iterator[Case]:
    def inputs(**changes: Any) -> dict[str, Any]:
        fields = {**_FFN, **changes}
        state = parameters_like(SwiGLU(bert_config(**fields)), rng)
        shape = 2, 7, fields["hidden_size"]
        given = {"hidden_states": normal(rng, *shape, scale=2.0), "cotangent": normal(rng, *shape)}
        return {"fields": fields, "state": state, **given}

    yield Case("as wide as in BERT, 4 times", inputs(intermediate_size=96))
    yield Case("an inner width of its own", inputs(hidden_size=20, intermediate_size=130))
    given = inputs(hidden_dropout_prob=0.3)
    given["hidden_states"] = torch.ones(40, 8, 24)
    yield Case("training, dropout 0.3", {**given, "wants": "dropout"})
    yield Case("the parameters", {**inputs(intermediate_size=144), "wants": "parameters"})


def _gated_probe(
    part: Any,
    fields: dict[str, Any],
    state: dict[str, Tensor],
    hidden_states: Tensor,
    cotangent: Tensor,
    wants: str = "numbers",
) -> dict[str, Any]:
    module = part.SwiGLU(bert_config(**fields))
    if wants == "parameters":
        return {"parameters and shapes": parameter_shapes(module)}
    if wants == "dropout":
        return _where_the_gated_drops(module, state, hidden_states)
    module = with_parameters(module, state)
    hidden_states = hidden_states.clone().requires_grad_()
    output = module(hidden_states)
    wanted = {**learned(module), "hidden_states": hidden_states}
    return {"output": output, **gradients(output, cotangent, wanted)}


def _where_the_gated_drops(module: Any, state: Mapping[str, Tensor], x: Tensor) -> dict[str, Any]:
    """Look for dropout after `down`, where only its bias is not 0, and before it."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    through = torch.zeros_like(state["down.weight"])
    through[:, : len(through.T)] = torch.eye(len(through), len(through.T)).to(through)
    states = {
        "the output's own bias": {"down.bias": torch.ones_like(state["down.bias"])},
        "what `down` is given": {
            "gate.bias": torch.ones_like(state["gate.bias"]),
            "up.bias": torch.ones_like(state["up.bias"]),
            "down.weight": through,
        },
    }
    found: dict[str, Any] = {}
    for where, changes in states.items():
        output = with_parameters(module, {**zeros, **changes}, train=True)(x)
        found[f"share of zeros that training makes of {where}"] = _share(output == 0)
    module.eval()
    found["zeros in evaluation"] = _share(module(x) == 0)
    return found


GATED = Exercise(
    id="4.3",
    reference={"SwiGLU": SwiGLU},
    reference_name="transformers LlamaMLP with mlp_bias=True, then dropout",
    cases=_gated_cases,
    probe=_gated_probe,
    misconceptions=(
        Misconception(
            "there are intermediate_size units",
            "SwiGLU has three matrices where the plain network has two, so with as many units it "
            "is half as large again. A comparison of the two would then compare sizes. It gets "
            "about two thirds of the units.",
            _sized(lambda config: config.intermediate_size),
        ),
        Misconception(
            "there are two thirds of intermediate_size units, biases not counted",
            "That is the rule of thumb, and it is right for matrices. With biases, each unit of "
            "the gated network has 3 · hidden + 2 numbers and each of the plain one 2 · hidden + "
            "1, and the nearest number of units can be another.",
            _sized(lambda config: round(config.intermediate_size * 2 / 3)),
        ),
        Misconception(
            "the number of units is cut instead of rounded",
            "`int()` and `//` cut off what is behind the point. Nearest may be the next number up."
            " `round()` does what is asked.",
            _sized(
                lambda config: int(
                    config.intermediate_size
                    * (2 * config.hidden_size + 1)
                    / (3 * config.hidden_size + 2)
                )
            ),
        ),
        Misconception(
            "gate and up have changed places",
            "SiLU acts on `gate`, and `up` stays as it is. Trained from scratch nobody could tell; "
            "with a checkpoint's weights the numbers are wrong.",
            _gated(
                plain=lambda self, x: SwiGLU.plain(self, x, gate_proj=self.up, up_proj=self.gate)
            ),
        ),
        Misconception(
            "the gate is a sigmoid",
            "That is the plain GLU of 2017 (Dauphin et al.). The Swi in SwiGLU is swish, also "
            "called SiLU: x · sigmoid(x).",
            _gated(plain=lambda self, x: SwiGLU.plain(self, x, act_fn=torch.sigmoid)),
        ),
        Misconception(
            "the gate is a GELU",
            "That is GEGLU, another variant of the same paper; ModernBERT has it. SwiGLU has SiLU."
            " The two curves look alike, but they are not the same numbers.",
            _gated(plain=lambda self, x: SwiGLU.plain(self, x, act_fn=F.gelu)),
        ),
        Misconception(
            "both branches are bent",
            "One branch is the gate, the other what passes through it: only the gate has an "
            "activation."
            " What it lets through stays linear.",
            _gated(
                plain=lambda self, x: SwiGLU.plain(self, x, up_proj=lambda y: F.silu(self.up(y)))
            ),
        ),
        Misconception(
            "the branches are added instead of multiplied",
            "A gate multiplies: what it holds at 0 does not pass. Added, the two branches are one "
            "wide branch with two kinds of unit.",
            _gated(
                plain=lambda self, x: self.down(F.silu(self.gate(x)) + self.up(x)),
            ),
        ),
        Misconception(
            "the product is bent, not the gate",
            "silu(gate(x) · up(x)) is a plain network on products. SiLU acts on `gate(x)` before "
            "the two are multiplied."
            " The order matters.",
            _gated(plain=lambda self, x: self.down(F.silu(self.gate(x) * self.up(x)))),
        ),
        Misconception(
            "the linear layers have no biases",
            "The paper's and Llama's have none. Here they have, so that the comparison with BERT's "
            "network changes one thing only.",
            _gated(__init__=_gated_without_biases),
        ),
        Misconception(
            "nothing is dropped",
            "As in `FeedForward`, dropout with `hidden_dropout_prob` comes after `down`."
            " Without it the module trains as if the config had said 0, whatever it says.",
            _gated(forward=lambda self, x: self.plain(x)),
        ),
        Misconception(
            "dropout acts before `down`",
            "As in `FeedForward`, the one dropout comes after `down`."
            " Before `down` it would drop gated units, each of which every output depends "
            "on.",
            _gated(
                forward=lambda self, x: SwiGLU.plain(
                    self, x, down_proj=lambda wide: self.down(self.dropout(wide))
                )
            ),
        ),
    ),
    hints=(
        "Count first. With `inner` units the three layers have how many numbers? Set that equal to "
        "what `FeedForward` has, and solve for `inner`; the bias of `down` is in both.",
        "A unit of SwiGLU has 3 · hidden + 2 numbers (a row of gate, a row of up, a column of "
        "down, two biases), a unit of FeedForward 2 · hidden + 1. `F.silu` is x · sigmoid(x).",
        "inner = round(intermediate_size * (2 * hidden + 1) / (3 * hidden + 2)). Then "
        "self.dropout(self.down(F.silu(self.gate(x)) * self.up(x))).",
    ),
)

# --- 4.4 the encoder layer -----------------------------------------------------------------------


def added(output: Tensor, residual: Tensor, norm: nn.Module, dropout: nn.Module) -> Tensor:
    """Return a Post-LN half's result: what Transformers' `BertSelfOutput` does after its layer."""
    from transformers.models.bert.modeling_bert import BertSelfOutput

    theirs: Any = BertSelfOutput.forward
    parts = SimpleNamespace(dense=nn.Identity(), dropout=dropout, LayerNorm=norm)
    return theirs(parts, output, residual)


def added_plainly(output: Tensor, residual: Tensor, dropout: nn.Module) -> Tensor:
    """Return a Pre-LN half's result, as Transformers' `RobertaPreLayerNorm` computes it."""
    from transformers.models.roberta_prelayernorm import modeling_roberta_prelayernorm

    theirs: Any = modeling_roberta_prelayernorm.RobertaPreLayerNormSelfOutput.forward
    return theirs(SimpleNamespace(dense=nn.Identity(), dropout=dropout), output, residual)


class EncoderLayer(nn.Module):
    """Transformers' `BertLayer`, or with `pre_norm` its `RobertaPreLayerNormLayer`, by halves."""

    def __init__(self, config: Any, pre_norm: bool = False) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.attention = ReferenceMultiHeadSelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Run both halves."""
        between, weights = self.first_half(hidden_states, attention_mask, return_weights)
        output = self.second_half(between, hidden_states)
        return (output, weights) if return_weights else output

    def first_half(self, x: Tensor, mask: Tensor | None, return_weights: bool) -> tuple[Any, Any]:
        """Run attention, with what belongs to it."""
        read = self.attention_norm(x) if self.pre_norm else x
        returned = self.attention(read, mask, return_weights)
        attended, weights = returned if return_weights else (returned, None)
        return self.join(attended, x, self.attention_norm, self.dropout), weights

    def second_half(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Run the feed-forward network, with what belongs to it; it drops by itself."""
        read = self.feed_forward_norm(x) if self.pre_norm else x
        return self.join(self.feed_forward(read), x, self.feed_forward_norm, nn.Identity())

    def join(self, output: Tensor, x: Tensor, norm: nn.Module, dropout: nn.Module) -> Tensor:
        """Add a half's output to what it was given; normalize in Post-LN."""
        if self.pre_norm:
            return added_plainly(output, x, dropout)
        return added(output, x, norm, dropout)


def _layer(**methods: Any) -> dict[str, type]:
    """Return the layer with some methods replaced."""
    return {"EncoderLayer": type("EncoderLayer", (EncoderLayer,), methods)}


def _always(pre_norm: bool) -> Any:
    def initialize(self: Any, config: Any, **_: Any) -> None:
        EncoderLayer.__init__(self, config, pre_norm)

    return initialize


def _joined(
    change: Callable[..., Tensor], first: bool = True, second: bool = True
) -> dict[str, type]:
    """Return the layer with another way to join, in one half or both."""

    def join(self: Any, output: Tensor, x: Tensor, norm: Any, dropout: Any) -> Tensor:
        if first if norm is self.attention_norm else second:
            return change(self, output, x, norm, dropout)
        return EncoderLayer.join(self, output, x, norm, dropout)

    return _layer(join=join)


def _no_residual(self: Any, output: Tensor, x: Tensor, norm: Any, dropout: Any) -> Tensor:
    return EncoderLayer.join(self, output, torch.zeros_like(x), norm, dropout)


def _norm_first(self: Any, output: Tensor, x: Tensor, norm: Any, dropout: Any) -> Tensor:
    return added_plainly(output, x, dropout) if self.pre_norm else x + norm(dropout(output))


def _sum_dropped(self: Any, output: Tensor, x: Tensor, norm: Any, dropout: Any) -> Tensor:
    joined = dropout(output + x)
    return joined if self.pre_norm else norm(joined)


def _dropped_twice(self: Any, output: Tensor, x: Tensor, norm: Any, dropout: Any) -> Tensor:
    return EncoderLayer.join(self, self.dropout(output), x, norm, dropout)


def _undropped(self: Any, output: Tensor, x: Tensor, norm: Any, dropout: Any) -> Tensor:
    return EncoderLayer.join(self, output, x, norm, nn.Identity())


def _from_the_normalized(self: Any, output: Tensor, x: Tensor, norm: Any, dropout: Any) -> Tensor:
    return EncoderLayer.join(self, output, norm(x) if self.pre_norm else x, norm, dropout)


def _one_norm_object(self: Any, config: Any, pre_norm: bool = False) -> None:
    EncoderLayer.__init__(self, config, pre_norm)
    self.feed_forward_norm = self.attention_norm


def _norms(first: str, second: str) -> dict[str, type]:
    """Return the layer that uses, in its halves, the norms of these names."""

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        own = {"attention_norm": self.attention_norm, "feed_forward_norm": self.feed_forward_norm}
        try:
            self.attention_norm = own[first]
            between = EncoderLayer.first_half
            returned = _halves(self, between, own[second], *args, **options)
        finally:
            self.attention_norm, self.feed_forward_norm = own.values()
        return returned

    return _layer(forward=forward)


def _halves(
    self: Any,
    first_half: Any,
    second_norm: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    return_weights: bool = False,
) -> Any:
    between, weights = first_half(self, hidden_states, attention_mask, return_weights)
    self.feed_forward_norm = second_norm
    output = EncoderLayer.second_half(self, between, hidden_states)
    return (output, weights) if return_weights else output


def _eps(value: float) -> Any:
    def initialize(self: Any, config: Any, pre_norm: bool = False) -> None:
        EncoderLayer.__init__(self, config, pre_norm)
        self.attention_norm.eps = self.feed_forward_norm.eps = value

    return initialize


def _dropout_of_the_weights(self: Any, config: Any, pre_norm: bool = False) -> None:
    EncoderLayer.__init__(self, config, pre_norm)
    self.dropout.p = config.attention_probs_dropout_prob


def _output_alone(self: Any, *args: Any, **options: Any) -> Any:
    returned = EncoderLayer.forward(self, *args, **options)
    return returned[0] if isinstance(returned, tuple) else returned


def _always_beside(
    self: Any, hidden_states: Tensor, attention_mask: Any = None, return_weights: bool = False
) -> Any:
    return EncoderLayer.forward(self, hidden_states, attention_mask, True)


def _weights_always(
    self: Any, hidden_states: Tensor, attention_mask: Any = None, return_weights: bool = False
) -> Any:
    output, weights = EncoderLayer.forward(self, hidden_states, attention_mask, True)
    return (output, weights) if return_weights else output


_PEAKED = {"query.weight": 2.0, "key.weight": 2.0}


def _layer_cases(rng: np.random.Generator) -> Iterator[Case]:
    def inputs(lengths: list[int], **changes: Any) -> dict[str, Any]:
        fields = {**_FFN, **changes}
        mask = padding_mask(lengths, max(lengths))
        shape = *mask.shape, fields["hidden_size"]
        return {
            "fields": fields,
            "state": parameters_like(EncoderLayer(bert_config(**fields)), rng, _PEAKED),
            "hidden_states": normal(rng, *shape) + 3.0 * (mask == 0)[..., None],
            "cotangent": normal(rng, *shape) * mask[..., None],
            "attention_mask": mask,
        }

    def real(given: dict[str, Any]) -> dict[str, Tensor]:
        return real_tokens("output", "output beside weights", mask=given["attention_mask"])

    given = inputs([8, 5, 1])
    yield Case("Post-LN, padding in two texts", given, real(given))
    given = inputs([6, 4], hidden_size=30, num_attention_heads=3, hidden_act="gelu_tanh")
    yield Case("Pre-LN, padding in one text", {**given, "pre_norm": True}, real(given))
    given = {**_of_low_variance(inputs([4, 3], layer_norm_eps=1e-7)), "wants": "output"}
    yield Case("vectors of low variance, with an eps of 1e-7", given, real(given))
    for pre_norm in (False, True):
        fields = {**_FFN, "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.1}
        given = {
            "fields": fields,
            "state": parameters_like(EncoderLayer(bert_config(**fields)), rng),
            "hidden_states": torch.full((16, 8, 24), 3.0 * pre_norm),
            "pre_norm": pre_norm,
            "wants": "dropout",
        }
        yield Case(f"{'Pre' if pre_norm else 'Post'}-LN, training, dropout 0.3", given)
    yield Case("the parameters", {**inputs([3]), "wants": "parameters"})


def _of_low_variance(given: dict[str, Any]) -> dict[str, Any]:
    """Make both sums so small that eps counts beside their variance."""
    state = given["state"]
    for name in ("attention.output", "feed_forward.down", "attention_norm"):
        for kind in ("weight", "bias"):
            state[f"{name}.{kind}"] *= 1e-3
    given["hidden_states"] *= 1e-3
    return given


def _layer_probe(
    part: Any,
    fields: dict[str, Any],
    state: dict[str, Tensor],
    hidden_states: Tensor,
    cotangent: Tensor | None = None,
    attention_mask: Tensor | None = None,
    pre_norm: bool = False,
    wants: str = "numbers",
) -> dict[str, Any]:
    options = {"pre_norm": True} if pre_norm else {}
    layer = part.EncoderLayer(bert_config(**fields), **options)
    if wants == "parameters":
        return {"parameters and shapes": parameter_shapes(layer)}
    if wants == "dropout":
        return layer_dropout(layer, layer, state, hidden_states)
    layer = with_parameters(layer, state)
    hidden_states = hidden_states.clone().requires_grad_()
    if wants == "output":
        return {"output": alone_or_beside(layer(hidden_states, attention_mask))[0]}
    alone, _, kind = alone_or_beside(layer(hidden_states, attention_mask))
    returned = layer(hidden_states, attention_mask, return_weights=True)
    beside, weights, kind_asked = alone_or_beside(returned)
    if weights is not None:
        asking = slice(None) if attention_mask is None else attention_mask.bool()
        weights = weights.transpose(1, 2)[asking]
    assert cotangent is not None
    wanted = {**learned(layer), "hidden_states": hidden_states}
    return {
        "returned": kind,
        "returned when weights are asked for": kind_asked,
        "output": alone,
        "output beside weights": beside,
        "weights of the real tokens": weights,
        **gradients(alone, cotangent, wanted),
        "a matrix of weights is kept though none were asked for": keeps_weights(
            lambda: layer(hidden_states), hidden_states.shape[1]
        ),
    }


def layer_dropout(
    layer: Any, run: Callable[[Tensor], Any], state: Mapping[str, Tensor], hidden_states: Tensor
) -> dict[str, Any]:
    """Say what dropout does in each half of a layer, with numbers that no draw changes.

    All parameters are 0 but the gains and one bias, so that one half adds 1 to every unit and the
    other nothing. In Pre-LN, which starts at 3, what was added is plain to see; in Post-LN, which
    starts at 0, the dropped units are those below the mean.
    """
    plain = {
        name: torch.ones_like(value) if name.endswith("norm.weight") else torch.zeros_like(value)
        for name, value in state.items()
    }
    found: dict[str, Any] = {}
    for half, bias in (("attention", "attention.output"), ("feed-forward", "feed_forward.down")):
        one = {f"{bias}.bias": torch.ones_like(state[f"{bias}.bias"])}
        with_parameters(layer, {**plain, **one}, train=True)
        output = alone_or_beside(run(hidden_states))[0].detach()
        low = output < output.mean(-1, keepdim=True) - 1e-3
        found[f"share of the units dropped from the half of {half}"] = _share(low)
        if hidden_states.any():
            steps = (output - hidden_states).cpu().double().round(decimals=2) + 0.0
            found[f"what the half of {half} adds"] = steps.unique().tolist()
        layer.eval()
        still = alone_or_beside(run(hidden_states))[0].detach()
        low = still < still.mean(-1, keepdim=True) - 1e-3
        found[f"units dropped in evaluation, {half}"] = _share(low)
    return found


LAYER = Exercise(
    id="4.4",
    reference={"EncoderLayer": EncoderLayer},
    reference_name="transformers BertLayer (Pre-LN: RobertaPreLayerNormLayer)",
    cases=_layer_cases,
    probe=_layer_probe,
    misconceptions=(
        Misconception(
            "the norm comes first (Pre-LN) though nobody asked for it",
            "GPT-2 and nearly every model since normalize what a half *reads*; BERT normalizes the "
            "sum, *after* the addition. With BERT's weights the order matters in every number. "
            "Post-LN is the default, Pre-LN what `pre_norm=True` asks for.",
            _layer(__init__=_always(True)),
        ),
        Misconception(
            "pre_norm is ignored",
            "With `pre_norm=True` each half should normalize its input and add to the stream as it "
            "is: x + sublayer(norm(x)). Yours is Post-LN either way, so the experiment of this "
            "chapter would compare a thing with itself.",
            _layer(__init__=_always(False)),
        ),
        Misconception(
            "both residuals are forgotten",
            "Each half *adds* to the token's vector. Without the addition a layer replaces the "
            "vector by what attention brought, and after two layers little is left of the word; "
            "gradients, too, lose the short way back.",
            _joined(_no_residual),
        ),
        Misconception(
            "the residual of the attention's half is forgotten",
            "Attention's output is added to what it was given: norm(x + attention(x)). Without x "
            "the token no longer knows which word it was.",
            _joined(_no_residual, second=False),
        ),
        Misconception(
            "the residual of the feed-forward half is forgotten",
            "The network's output is added to what the network was given: norm(x + "
            "feed_forward(x)). Without x all that attention brought has to go through the network.",
            _joined(_no_residual, first=False),
        ),
        Misconception(
            "the residual of the second half is the layer's input",
            "The second half starts from what the first one returned. You add the network's output "
            "to the vector as it was before attention, so what attention brought reaches the "
            "output only through the network.",
            _layer(
                second_half=lambda self, x, inputs: self.join(
                    self.feed_forward(self.feed_forward_norm(x) if self.pre_norm else x),
                    inputs,
                    self.feed_forward_norm,
                    nn.Identity(),
                )
            ),
        ),
        Misconception(
            "the feed-forward network reads the layer's input",
            "The halves stand one after the other: the network reads what attention's half "
            "returned, so that it can think about what the token has just learned. (GPT-J runs "
            "both side by side. BERT does not.)",
            _layer(
                second_half=lambda self, x, inputs: self.join(
                    self.feed_forward(self.feed_forward_norm(inputs) if self.pre_norm else inputs),
                    x,
                    self.feed_forward_norm,
                    nn.Identity(),
                )
            ),
        ),
        Misconception(
            "each half's output is normalized before it is added",
            "x + norm(sublayer(x)) looks like Post-LN and is not: nothing ever normalizes the sum, "
            "so the vectors grow from layer to layer. You will meet this patient again in exercise "
            "4.6. BERT normalizes the sum: norm(x + sublayer(x)).",
            _joined(_norm_first),
        ),
        Misconception(
            "in Pre-LN the residual starts at the normalized vector",
            "The line `x = norm(x)` overwrites what was to be kept. In Pre-LN the stream itself is "
            "never normalized: keep it, hand the normalized copy to the sublayer, and add to the "
            "stream.",
            _joined(_from_the_normalized),
        ),
        Misconception(
            "attention_norm is used in both halves",
            "Each half has a norm of its own, with its own gain and bias. Freshly initialized they "
            "are alike, and in a checkpoint they are not.",
            _norms("attention_norm", "attention_norm"),
        ),
        Misconception(
            "the two norms have changed places",
            "attention_norm belongs to the half of attention, feed_forward_norm to the other."
            " With fresh weights nobody sees it, because both norms start equal; a trained "
            "checkpoint's are not.",
            _norms("feed_forward_norm", "attention_norm"),
        ),
        Misconception(
            "both norms are one object",
            "Assigning the same nn.LayerNorm twice gives one set of parameters under two names: "
            "half of the checkpoint's gains have no place to go. Make two.",
            _layer(__init__=_one_norm_object),
        ),
        Misconception(
            "the norms have PyTorch's eps",
            "`nn.LayerNorm(hidden)` adds 1e-5 to the variance; BERT's config says "
            "`layer_norm_eps`, 1e-12. With vectors of variance 1 the difference is near what "
            "float32 rounds away, which is why it is found late.",
            _layer(__init__=_eps(1e-5)),
        ),
        Misconception(
            "eps is 1e-12, whatever the config says",
            "1e-12 is BERT's. The config has a field for it, `layer_norm_eps`, and other models of "
            "the same shape say 1e-5.",
            _layer(__init__=_eps(1e-12)),
        ),
        Misconception(
            "the attention mask is not handed on",
            "Padding then gets attention, and what a text means depends on how long the other "
            "texts of the batch are. Give attention_mask to self.attention.",
            _layer(
                first_half=lambda self, x, mask, return_weights: EncoderLayer.first_half(
                    self, x, None, return_weights
                )
            ),
        ),
        Misconception(
            "the weights are not returned",
            "With return_weights=True the layer gives the pair (output, weights). Ask your "
            "attention for them, and hand them on."
            " Otherwise nobody can look.",
            _layer(forward=_output_alone),
        ),
        Misconception(
            "the weights are returned even if nobody asked for them",
            "Without return_weights the layer returns the output alone, so that it can be used "
            "like any module."
            " A pair would break the next layer.",
            _layer(forward=_always_beside),
        ),
        Misconception(
            "the weights are computed even if nobody asks for them",
            "The numbers are right, but attention takes the slow way and keeps a matrix of "
            "[batch, heads, seq, seq] in every layer. Hand `return_weights` on to attention.",
            _layer(forward=_weights_always),
        ),
        Misconception(
            "nothing is dropped from the attention's output",
            "self.attention drops *weights*. The dropout on its output belongs to this layer: "
            "self.dropout, with `hidden_dropout_prob`, before the residual is added.",
            _joined(_undropped, second=False),
        ),
        Misconception(
            "dropout acts twice in the feed-forward half",
            "`FeedForward` has its own dropout, after `down`. With self.dropout around it a unit "
            "survives only if both let it pass.",
            _joined(_dropped_twice, first=False),
        ),
        Misconception(
            "dropout acts on the sum",
            "What is dropped is what attention brought, before it is added. Dropped from the sum, "
            "the token itself has holes, in every layer again.",
            _joined(_sum_dropped, second=False),
        ),
        Misconception(
            "dropout has the probability of the attention weights",
            "There are two probabilities in the config: attention_probs_dropout_prob is for the "
            "weights inside attention, hidden_dropout_prob for what a half adds.",
            _layer(__init__=_dropout_of_the_weights),
        ),
    ),
    hints=(
        "Write the Post-LN formula twice, once with attention as the sublayer and once with the "
        "feed-forward network. The second half starts from what the first returned. Get that "
        "right before you add Pre-LN.",
        "Keep the stream under its own name. Post-LN: attended = self.attention(hidden_states, "
        "attention_mask), then self.attention_norm(hidden_states + self.dropout(attended)). "
        "Pre-LN reads norm(hidden_states) and adds to hidden_states. self.feed_forward drops by "
        "itself.",
        "residual = hidden_states; in Pre-LN, hidden_states = self.attention_norm(hidden_states). "
        "Attend (attention returns a pair if return_weights). hidden_states = residual + "
        "self.dropout(attended). Then in Pre-LN return hidden_states + "
        "self.feed_forward(self.feed_forward_norm(hidden_states)); in Post-LN normalize "
        "hidden_states with attention_norm first, and the sum with self.feed_forward(...) with "
        "feed_forward_norm.",
    ),
)

# --- 4.5 the whole encoder -----------------------------------------------------------------------


class Encoder(nn.Module):
    """The layers one after the other; what Transformers collects by hooks, collected here."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_hidden_layers))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> Any:
        """Run all layers."""
        states, attentions = [hidden_states], []
        for layer in self.layers:
            returned = layer(hidden_states, attention_mask, output_attentions)
            hidden_states, weights = returned if output_attentions else (returned, None)
            states.append(hidden_states)
            attentions.append(weights)
        return (
            hidden_states,
            tuple(states) if output_hidden_states else None,
            tuple(attentions) if output_attentions else None,
        )


class Pooler(nn.Module):
    """Transformers' `BertPooler`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return one vector a text."""
        from transformers.models.bert.modeling_bert import BertPooler

        theirs: Any = BertPooler.forward
        return theirs(SimpleNamespace(dense=self.dense, activation=nn.Tanh()), hidden_states)


class BertModel(nn.Module):
    """Transformers' `BertModel`, part by part under this course's names."""

    encoder_class, pooler_class = Encoder, Pooler

    def __init__(self, config: Any) -> None:
        super().__init__()
        from bertlab.encoder import initialize_weights

        self.config = config
        self.embeddings = TheirBertEmbeddings(config)
        self.encoder = self.encoder_class(config)
        self.pooler = self.pooler_class(config)
        initialize_weights(self, config.initializer_range)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> Any:
        """Read a batch of texts."""
        from bertlab.encoder import BertModelOutput

        self.check(input_ids, attention_mask, token_type_ids)
        embedded = self.embeddings(input_ids, token_type_ids)
        last, states, attentions = self.encoder(
            embedded, attention_mask, output_hidden_states, output_attentions
        )
        return BertModelOutput(last, self.pooler(last), states, attentions)

    def check(self, *given: Any) -> None:
        """Refuse what does not fit together."""
        from bertlab.encoder import check_batch

        check_batch(*given)

    def forward_packed(
        self, input_ids: Tensor, attention_mask: Any = None, token_type_ids: Any = None
    ) -> Any:
        """Run without computing anything for padding; given in `bertlab.encoder`."""
        from bertlab.encoder import packed_forward

        model: Any = self
        return packed_forward(model, input_ids, attention_mask, token_type_ids)


def _model(**methods: Any) -> dict[str, type]:
    """Return the model with some methods replaced."""
    return {"BertModel": type("BertModel", (BertModel,), methods)}


def _with_encoder(**methods: Any) -> dict[str, type]:
    """Return an encoder with some methods replaced, and the model that uses it."""
    encoder = type("Encoder", (Encoder,), methods)
    return {"Encoder": encoder, **_model(encoder_class=encoder)}


def _with_pooler(forward: Callable[[Any, Tensor], Tensor]) -> dict[str, type]:
    """Return a pooler with another forward, and the model that uses it."""
    pooler = type("Pooler", (Pooler,), {"forward": forward})
    return {"Pooler": pooler, **_model(pooler_class=pooler)}


def _with_arguments(change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, type]:
    """Return the model that changes its arguments, by name, before it uses them."""

    def forward(
        self: Any,
        input_ids: Tensor,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> Any:
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "output_hidden_states": output_hidden_states,
            "output_attentions": output_attentions,
        }
        self.check(input_ids, attention_mask, token_type_ids)
        return BertModel.forward(self, **{**given, **change(given)})

    return _model(forward=forward)


def _encoded(change: Callable[[Any, Any, Any], Any]) -> Any:
    """Return an Encoder.forward that changes what comes out: last, states, attentions."""
    return lambda self, *args, **options: change(*Encoder.forward(self, *args, **options))


def _one_layer_repeated(self: Any, config: Any) -> None:
    Encoder.__init__(self, config)
    self.layers = nn.ModuleList([self.layers[0]] * config.num_hidden_layers)


def _twelve_layers(self: Any, config: Any) -> None:
    nn.Module.__init__(self)
    self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(12))


def _mask_kept_back(
    self: Any, x: Tensor, attention_mask: Any = None, states: bool = False, weights: bool = False
) -> Any:
    return Encoder.forward(self, x, None, states, weights)


def _states_always(
    self: Any, x: Tensor, attention_mask: Any = None, states: bool = False, weights: bool = False
) -> Any:
    return Encoder.forward(self, x, attention_mask, True, weights)


def _fresh_as_pytorch(self: Any, config: Any) -> None:
    nn.Module.__init__(self)
    self.config = config
    self.embeddings = TheirBertEmbeddings(config)
    self.encoder, self.pooler = Encoder(config), Pooler(config)


def _padding_row_drawn(self: Any, config: Any) -> None:
    BertModel.__init__(self, config)
    nn.init.normal_(self.embeddings.word.weight, std=config.initializer_range)


def _range_of_base(self: Any, config: Any) -> None:
    from bertlab.encoder import initialize_weights

    BertModel.__init__(self, config)
    initialize_weights(self, 0.02)


_MODEL = {
    **_FFN,
    "vocab_size": 60,
    "num_hidden_layers": 2,
    "max_position_embeddings": 16,
}
_FRESH = {
    **_MODEL,
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "intermediate_size": 100,
    "initializer_range": 0.01,
    "max_position_embeddings": 40,
}


@cache
def _shapes(**fields: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        return BertModel(bert_config(**fields))


def _model_cases(rng: np.random.Generator) -> Iterator[Case]:
    def inputs(lengths: list[int], **more: Any) -> dict[str, Any]:
        mask = padding_mask(lengths, max(lengths))
        ids = integers(rng, 1, 60, *mask.shape) * mask
        types = (integers(rng, 0, 10, *mask.shape).sort(dim=-1).values > 4).long() * mask
        hidden = _MODEL["hidden_size"]
        return {
            "fields": _MODEL,
            "state": parameters_like(_shapes(**_MODEL), rng, _PEAKED),
            "input_ids": ids,
            "attention_mask": mask,
            "token_type_ids": types,
            "cotangent": normal(rng, *mask.shape, hidden) * mask[..., None],
            "pooled_cotangent": normal(rng, len(lengths), hidden),
            **more,
        }

    def real(given: dict[str, Any]) -> dict[str, Tensor]:
        names = ("last_hidden_state", "hidden states", "last_hidden_state, all asked for")
        return real_tokens(*names, mask=given["attention_mask"])

    given = inputs([9, 6, 2])
    yield Case("pairs of texts, padding in two of three rows", given, real(given))
    given = inputs([7, 7])
    given["input_ids"][1, 3] = 0  # not a sign of padding: the mask alone says what is
    del given["attention_mask"], given["token_type_ids"]
    given["wants"] = "output and errors"
    yield Case("neither mask nor token types, [PAD] in the text", given)
    given = inputs([16, 4])
    yield Case("the encoder and the pooler alone", {**given, "wants": "parts"}, real(given))
    yield Case("the parameters, and how fresh ones are drawn", {"fields": _FRESH})


def _model_probe(
    part: Any,
    fields: dict[str, Any],
    state: dict[str, Tensor] | None = None,
    input_ids: Any = None,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    cotangent: Any = None,
    pooled_cotangent: Any = None,
    wants: str = "numbers",
) -> dict[str, Any]:
    config = bert_config(**fields)
    if wants == "parts":
        return _parts_found(part, config, state, cotangent, attention_mask)
    model = part.BertModel(config)
    if state is None:
        return {
            "`.config` is the config": getattr(model, "config", None) == config,
            "parameters and shapes": parameter_shapes(model),
            "parameters not drawn as they should be": oddly_drawn(model, config.initializer_range),
        }
    model = with_parameters(model, state)
    plain = model(input_ids, attention_mask, token_type_ids)
    if wants == "output and errors":
        return {
            "last_hidden_state": plain.last_hidden_state,
            "pooler_output": plain.pooler_output,
            **_model_errors(model, input_ids),
        }
    full = model(
        input_ids,
        attention_mask=attention_mask,
        token_type_ids=token_type_ids,
        output_hidden_states=True,
        output_attentions=True,
    )
    both = torch.cat([plain.last_hidden_state.flatten(), plain.pooler_output.flatten()])
    weight = torch.cat([cotangent.flatten(), pooled_cotangent.flatten()])
    return {
        "last_hidden_state": plain.last_hidden_state,
        "pooler_output": plain.pooler_output,
        "last_hidden_state, all asked for": full.last_hidden_state,
        **_collected(full.hidden_states, full.attentions, attention_mask),
        "hidden states not asked for": type(plain.hidden_states).__name__,
        "attentions not asked for": type(plain.attentions).__name__,
        **gradients(both, weight, learned(model)),
    }


def _collected(states: Any, attentions: Any, attention_mask: Tensor | None) -> dict[str, Any]:
    """Return hidden states and attentions of all layers, each as one tensor; None if missing."""
    asking = slice(None) if attention_mask is None else attention_mask.bool()
    if attentions is not None and any(weights is None for weights in attentions):
        attentions = None
    found = attentions and torch.stack(list(attentions), dim=3)  # [batch, heads, seq, layers, seq]
    return {
        "hidden states": None if states is None else torch.stack(list(states), dim=2),
        "attentions": None if found is None else found.transpose(1, 2)[asking],
    }


def _parts_found(
    part: Any, config: Any, state: Any, hidden_states: Tensor, attention_mask: Any
) -> dict[str, Any]:
    def own(name: str) -> dict[str, Tensor]:
        return {n.removeprefix(f"{name}."): v for n, v in state.items() if n.startswith(name)}

    encoder = with_parameters(part.Encoder(config), own("encoder"))
    pooler = with_parameters(part.Pooler(config), own("pooler"))
    plain = encoder(hidden_states, attention_mask)
    full = encoder(hidden_states, attention_mask, output_hidden_states=True, output_attentions=True)
    return {
        "last_hidden_state": plain[0],
        "last_hidden_state, all asked for": full[0],
        **_collected(full[1], full[2], attention_mask),
        "not asked for": [type(value).__name__ for value in plain[1:]],
        "pooler": pooler(hidden_states),
    }


def _model_errors(model: Any, ids: Tensor) -> dict[str, Any]:
    ones = torch.ones_like(ids)
    calls: dict[str, Callable[[], Any]] = {
        "ids without a batch axis": lambda: model(ids[0]),
        "a mask of one row for all texts": lambda: model(ids, ones[:1]),
        "a mask with two axes more": lambda: model(ids, ones[:, None, None, :]),
        "token types of one row for all texts": lambda: model(ids, None, ones[:1]),
        "more tokens than positions": lambda: model(ones.repeat(1, 3)),
    }
    return {name: error_of(call, kind=ValueError)["error"] for name, call in calls.items()}


def oddly_drawn(model: nn.Module, spread: float) -> list[str]:
    """Return what is wrong with fresh weights, by parameter; nothing that a right draw could be."""
    odd = []
    for name, parameter in model.named_parameters():
        values = parameter.detach().cpu().double()
        if values.ndim == 1:
            wanted = 1.0 if name.endswith("norm.weight") else 0.0
            odd += [] if (values == wanted).all() else [name]
            continue
        if "embeddings.word" in name:
            odd += [] if (values[0] == 0).all() else ["the row of [PAD]"]
            values = values[1:]
        # Six standard errors of a standard deviation and of a mean: never missed by chance.
        count = values.numel()
        ratio, mean = float(values.std()) / spread, abs(float(values.mean())) / spread
        if abs(ratio - 1) > 6 / (2 * count) ** 0.5 or mean > 6 / count**0.5:
            odd.append(name)
    return sorted(odd)


MODEL = Exercise(
    id="4.5",
    reference={"Encoder": Encoder, "Pooler": Pooler, "BertModel": BertModel},
    reference_name="transformers BertModel",
    cases=_model_cases,
    probe=_model_probe,
    misconceptions=(
        Misconception(
            "one layer is used again and again",
            "`[EncoderLayer(config)] * n` makes one layer and n references to it, so all layers "
            "share their weights: the model has a fraction of the parameters, and every step of "
            "training moves all layers at once. (ALBERT does this on purpose.) Make a new layer in "
            "each turn of a comprehension.",
            _with_encoder(__init__=_one_layer_repeated),
        ),
        Misconception(
            "there are always 12 layers",
            "12 is BERT-Base's number; the config has it as `num_hidden_layers`."
            " MiniLM has 6, and a checkpoint with another number of layers would not fit "
            "your model.",
            _with_encoder(__init__=_twelve_layers),
        ),
        Misconception(
            "the embeddings are missing from the hidden states",
            "`hidden_states` begins with what goes *into* the first layer, as in Transformers: "
            "`num_hidden_layers + 1` tensors. `hidden_states[0]` is the embeddings' output.",
            _with_encoder(
                forward=_encoded(
                    lambda last, states, weights: (last, states and states[1:], weights)
                )
            ),
        ),
        Misconception(
            "the last layer's output is missing from the hidden states",
            "You keep what goes into each layer, and so miss what comes out of the last. There are "
            "`num_hidden_layers + 1` hidden states, and the last of them is last_hidden_state.",
            _with_encoder(
                forward=_encoded(
                    lambda last, states, weights: (last, states and states[:-1], weights)
                )
            ),
        ),
        Misconception(
            "hidden states are returned though nobody asked for them",
            "Kept for nothing, they hold the memory of all layers: 13 tensors instead of one. The "
            "field is None unless output_hidden_states is true.",
            _with_encoder(forward=_states_always),
        ),
        Misconception(
            "the attentions are missing",
            "With output_attentions=True each layer is to be asked for its weights "
            "(return_weights), and they are returned as a tuple, one tensor a layer.",
            _with_encoder(forward=_encoded(lambda last, states, weights: (last, states, None))),
        ),
        Misconception(
            "only the last layer's attentions are returned",
            "`attentions` has one tensor for each layer, the first layer's first."
            " Collect them in the loop over the layers, as you collect the hidden states.",
            _with_encoder(
                forward=_encoded(
                    lambda last, states, weights: (last, states, weights and weights[-1:])
                )
            ),
        ),
        Misconception(
            "the encoder does not hand the mask on to its layers",
            "Every layer attends anew, so every layer needs the mask. Without it padding is read "
            "like words."
            " Padding then changes real tokens.",
            _with_encoder(forward=_mask_kept_back),
        ),
        Misconception(
            "the model does not hand the mask on to the encoder",
            "`attention_mask` comes in at the top and has to reach every layer's attention. "
            "Without it padding is read like words.",
            _with_arguments(lambda given: {"attention_mask": None}),
        ),
        Misconception(
            "without a mask, [PAD] is hidden",
            "When attention_mask is None all tokens are real: the contract, and Transformers, say "
            "so. Guessing the mask from the ids is right often enough to be trusted, and wrong "
            "with a model whose padding id is another.",
            _with_arguments(
                lambda given: {
                    "attention_mask": (given["input_ids"] != 0).long()
                    if given["attention_mask"] is None
                    else given["attention_mask"]
                }
            ),
        ),
        Misconception(
            "the token types are not handed on",
            "The embeddings add a vector that says which of two texts a token belongs to. Without "
            "token_type_ids all tokens count as the first text's.",
            _with_arguments(lambda given: {"token_type_ids": None}),
        ),
        Misconception(
            "the pooler takes the mean of the tokens",
            "A mean is a good way to make one vector of a text, and not what this layer was "
            "trained for: in pretraining it saw the vector of `[CLS]`, the first token, only. (The "
            "mean you take counts padding, besides.)",
            _with_pooler(lambda self, x: self.dense(x.mean(dim=1)).tanh()),
        ),
        Misconception(
            "the pooler takes the last token",
            "GPT reads from left to right, so its last token has seen everything. BERT reads both "
            "ways, and its pooler takes the first, `[CLS]`; the last place is padding more often "
            "than not.",
            _with_pooler(lambda self, x: self.dense(x[:, -1]).tanh()),
        ),
        Misconception(
            "the pooler has no tanh",
            "After the linear layer comes tanh, so that every unit lies between -1 and 1. "
            "The classifier of chapter 7 was trained on such vectors.",
            _with_pooler(lambda self, x: self.dense(x[:, 0])),
        ),
        Misconception(
            "the pooler returns `[CLS]` as it is",
            "The vector of `[CLS]` goes through a linear layer and tanh. It is trained with the "
            "next-sentence task, which is why fine-tuning sometimes throws it away.",
            _with_pooler(lambda self, x: x[:, 0] + 0 * self.dense(x[:, 0])),
        ),
        Misconception(
            "fresh weights are drawn as PyTorch draws them",
            "`nn.Embedding` starts with N(0, 1) and `nn.Linear` with a uniform distribution. BERT "
            "starts with N(0, initializer_range²), biases 0 and the row of [PAD] 0. Call "
            "`initialize_weights(self, config.initializer_range)` at the end of `__init__`.",
            _model(__init__=_fresh_as_pytorch),
        ),
        Misconception(
            "fresh weights have a spread of 0.02, whatever the config says",
            "0.02 is BERT-Base's value of `initializer_range`. A narrow model wants a wider "
            "spread, so the config has a field for it.",
            _model(__init__=_range_of_base),
        ),
        Misconception(
            "the row of [PAD] is drawn like the others",
            "`nn.init.normal_` on the whole table also fills the row that padding_idx keeps at 0. "
            "It gets no gradient, so it would stay what chance made of it. `initialize_weights` "
            "puts it back to 0.",
            _model(__init__=_padding_row_drawn),
        ),
        Misconception(
            "the shapes of the arguments are not checked",
            "A mask of one row for a batch of three is broadcast without a word, and all texts get "
            "the first one's padding. Call `check_batch` with the three arguments first: it raises "
            "a ValueError that says what is wrong.",
            _model(check=lambda self, *given: None),
        ),
    ),
    hints=(
        "Each class is a few lines. Encoder: a ModuleList of layers, a loop. Pooler: a linear "
        "layer, the first token, tanh. BertModel: embeddings, encoder, pooler, and "
        "`initialize_weights` at the end of `__init__`.",
        "In the loop, keep the input before the first layer and each layer's output after it, if "
        "they are asked for. A layer returns a pair when you ask it for weights. In BertModel "
        "call `check_batch` first; mind the order of arguments: BertEmbeddings takes (input_ids, "
        "token_type_ids).",
        "Encoder.forward: states = [hidden_states]; for layer in self.layers: output = "
        "layer(hidden_states, attention_mask, output_attentions), taken apart if it is a pair, "
        "appended to states. Return (hidden_states, tuple or None, tuple or None). "
        "BertModel.forward: BertModelOutput(last, self.pooler(last), states, attentions).",
    ),
)

# --- 4.6 clinic ----------------------------------------------------------------------------------


class Patient(EncoderLayer):
    """The clinic's layer: right parts, put together wrongly."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, return_weights: bool = False
    ) -> Tensor:
        """Normalize what each half returns, and then add."""
        x, norm = hidden_states, self.attention_norm
        x = x + norm(self.dropout(self.attention(x, attention_mask)))
        return x + self.feed_forward_norm(self.feed_forward(x))


def mended(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Return what Transformers' `BertLayer` makes of these parts."""
    return EncoderLayer.forward(layer, hidden_states, attention_mask)


def _mended_by(wrong: dict[str, type]) -> dict[str, Any]:
    """Return the cure that runs a wrong layer of exercise 4.4 on the patient's parts."""

    def mend(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        kind: Any = wrong["EncoderLayer"]
        changed = kind.__new__(kind)
        changed.__dict__ = layer.__dict__
        return changed.forward(hidden_states, attention_mask)

    return {"mend_residual": mend}


def _pre_normalized(layer: Any, x: Tensor, attention_mask: Any = None) -> Tensor:
    x = x + layer.dropout(layer.attention(layer.attention_norm(x), attention_mask))
    return x + layer.feed_forward(layer.feed_forward_norm(x))


def _clinic_cases(rng: np.random.Generator) -> Iterator[Case]:
    def inputs(lengths: list[int], **changes: Any) -> dict[str, Any]:
        fields = {**_FFN, **changes}
        mask = padding_mask(lengths, max(lengths))
        shape = *mask.shape, fields["hidden_size"]
        return {
            "fields": fields,
            "state": parameters_like(EncoderLayer(bert_config(**fields)), rng, _PEAKED),
            "hidden_states": normal(rng, *shape) + 3.0 * (mask == 0)[..., None],
            "attention_mask": mask,
        }

    given = inputs([8, 5, 2])
    yield Case("padding in two texts", given, {"output": given["attention_mask"]})
    given = inputs([6, 6])
    del given["attention_mask"]
    yield Case("no mask", given)
    given = inputs([8] * 16, hidden_dropout_prob=0.3)
    given["hidden_states"] = torch.zeros_like(given["hidden_states"])
    del given["attention_mask"]
    yield Case("training, dropout 0.3", {**given, "training": True})


def _clinic_probe(
    part: Any,
    fields: dict[str, Any],
    state: dict[str, Tensor],
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    training: bool = False,
) -> Any:
    layer = with_parameters(Patient(bert_config(**fields)), state)
    if training:
        return layer_dropout(layer, lambda x: part.mend_residual(layer, x), state, hidden_states)
    if attention_mask is None:
        return {"output": part.mend_residual(layer, hidden_states)}
    return {"output": part.mend_residual(layer, hidden_states, attention_mask)}


CLINIC = Exercise(
    id="4.6",
    reference={"mend_residual": mended},
    reference_name="transformers BertLayer",
    cases=_clinic_cases,
    probe=_clinic_probe,
    misconceptions=(
        Misconception(
            "the patient is left as it is",
            "The norms still act on what is added and not on the sum, so the sum grows with every "
            "layer. Move each norm outside: norm(x + sublayer(x)).",
            {"mend_residual": lambda layer, x, mask=None: layer(x, mask)},
        ),
        Misconception(
            "only the attention's half is mended",
            "The feed-forward half has the same illness: its norm, too, belongs around the sum."
            " One norm left inside is enough for the residual stream to grow.",
            _mended_by(_joined(_norm_first, first=False)),
        ),
        Misconception(
            "only the feed-forward half is mended",
            "The attention's half has the same illness: its norm, too, belongs around the sum."
            " One norm left inside is enough for the residual stream to grow.",
            _mended_by(_joined(_norm_first, second=False)),
        ),
        Misconception(
            "the layer is made Pre-LN",
            "x + sublayer(norm(x)) is a healthy layer of another kind, and its vectors grow too, "
            "by design: a last norm behind all layers takes care of it. The weights of this model "
            "belong to BERT's order: norm(x + sublayer(x)).",
            {"mend_residual": _pre_normalized},
        ),
        Misconception(
            "the residuals are left out",
            "The vectors stop growing, and the tokens forget which words they were. What has to "
            "move is the norm: around the sum.",
            _mended_by(_joined(_no_residual)),
        ),
        Misconception(
            "the norms have changed places",
            "attention_norm closes the first half, feed_forward_norm the second."
            " They have learned different gains and biases, so they cannot stand in for each "
            "other.",
            _mended_by(_norms("feed_forward_norm", "attention_norm")),
        ),
        Misconception(
            "attention_norm closes both halves",
            "Each half has its own norm; feed_forward_norm closes the second."
            " The second one's own gain and bias would otherwise never be used.",
            _mended_by(_norms("attention_norm", "attention_norm")),
        ),
        Misconception(
            "the residual of the second half is the layer's input",
            "The second half starts from what the first one returned, norm and all."
            " Otherwise the attention's result is lost from the sum.",
            _mended_by(LAYER.misconceptions[5].parts),  # type: ignore[arg-type]  # classes
        ),
        Misconception(
            "the attention mask is not handed on",
            "Your function takes attention_mask; give it to layer.attention."
            " Without it every token attends to padding, and a padded batch gives other "
            "numbers than the texts alone.",
            {"mend_residual": lambda layer, x, mask=None: mended(layer, x)},
        ),
        Misconception(
            "the dropout of the attention's output got lost",
            "The patient drops from what attention brought, `layer.dropout(...)`, and rightly so. "
            "Keep it: without it the mended model trains differently.",
            _mended_by(_joined(_undropped, second=False)),
        ),
        Misconception(
            "dropout acts twice in the feed-forward half",
            "`layer.feed_forward` has a dropout of its own. `layer.dropout` is for the attention's "
            "output alone."
            " Twice means that more units are dropped than the config says.",
            _mended_by(_joined(_dropped_twice, first=False)),
        ),
    ),
    hints=(
        "Compare the two lines of the patient with the formula of a Post-LN layer. All parts are "
        "there; one pair of brackets is in the wrong place, twice.",
        "norm(x + sublayer(x)): the sum goes inside. Mind that the second half works on what the "
        "first one returned, and hand the mask to the attention.",
        "x = layer.attention_norm(x + layer.dropout(layer.attention(x, attention_mask))), and "
        "then the same with layer.feed_forward_norm and layer.feed_forward(x), which drops by "
        "itself.",
    ),
)

EXERCISES = [GELU, NETWORK, GATED, LAYER, MODEL, CLINIC]
