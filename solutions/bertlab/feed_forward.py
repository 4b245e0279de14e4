"""The feed-forward network: what each token does by itself with what attention brought it.

First the activation, by its formula and by the approximation of 2016; then the network BERT
has, and the gated one that most models have today.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertlab.config import BertConfig


# --- exercise 4.1: GELU, exact and approximate ---
def gelu(x: Tensor) -> Tensor:
    """The Gaussian error linear unit: `x` times the probability that a normal draw is below it.

        gelu(x) = x * (1 + erf(x / sqrt(2))) / 2

    Args:
        x: any shape, floating-point.

    Returns:
        The shape and dtype of `x`.

    Source: Hendrycks and Gimpel 2016, section 2. In production: `torch.nn.functional.gelu`.
    """
    ### BEGIN SOLUTION
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    ### END SOLUTION


def gelu_tanh(x: Tensor) -> Tensor:
    """The approximation of `gelu` that needs no error function.

        gelu_tanh(x) = x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2

    Args:
        x: any shape, floating-point.

    Returns:
        The shape and dtype of `x`.

    Source: Hendrycks and Gimpel 2016, section 2.
    In production: `torch.nn.functional.gelu(x, approximate="tanh")`.
    """
    ### BEGIN SOLUTION
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x * 0.5 * (1 + torch.tanh(inner))
    ### END SOLUTION


# --- end of exercise 4.1 ---

# By the names of `config.hidden_act`: the same functions as kernels that read and write memory
# once. The formulas above do so once for each operation.
ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu}


# --- exercise 4.2: the feed-forward network ---
class FeedForward(nn.Module):
    """Widen each token's vector, bend it, and bring it back to its width.

        down(activation(up(x)))

    Attributes:
        up: `nn.Linear`, `hidden_size` to `intermediate_size`.
        down: `nn.Linear`, back to `hidden_size`.
        dropout: `nn.Dropout` with `hidden_dropout_prob`, after `down`.

    The activation is `config.hidden_act`: `gelu`, `gelu_tanh` or `relu`. Residual connection
    and LayerNorm belong to the encoder layer.

    Source: Vaswani et al. 2017, section 3.3.
    In production: `BertIntermediate` followed by `BertOutput.dense` and its dropout.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.hidden_act = config.hidden_act
        ### END SOLUTION

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the network to every token by itself.

        Args:
            hidden_states: `[batch, seq, hidden]`.

        Returns:
            `[batch, seq, hidden]`.
        """
        ### BEGIN SOLUTION
        widened = ACTIVATIONS[self.hidden_act](self.up(hidden_states))
        return self.dropout(self.down(widened))
        ### END SOLUTION


# --- end of exercise 4.2 ---


# --- exercise 4.3: SwiGLU ---
class SwiGLU(nn.Module):
    """The gated network of today's models, with as many parameters as `FeedForward` has.

        down(silu(gate(x)) * up(x))        silu(x) = x * sigmoid(x)

    Attributes:
        gate, up: `nn.Linear` with bias, `hidden_size` to `inner`.
        down: `nn.Linear` with bias, `inner` to `hidden_size`.
        dropout: `nn.Dropout` with `hidden_dropout_prob`, after `down`.

    `inner` is the number of units with which the number of parameters, biases counted, comes
    nearest to that of `FeedForward(config)`; about two thirds of `intermediate_size`, because
    there are three matrices instead of two.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", section 2.
    In production: `transformers.models.llama.modeling_llama.LlamaMLP` (without biases).
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        hidden, wide = config.hidden_size, config.intermediate_size
        # inner * (3 * hidden + 2) + hidden parameters, against wide * (2 * hidden + 1) + hidden.
        inner = max(1, round(wide * (2 * hidden + 1) / (3 * hidden + 2)))
        self.gate = nn.Linear(hidden, inner)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        ### END SOLUTION

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the network to every token by itself.

        Args:
            hidden_states: `[batch, seq, hidden]`.

        Returns:
            `[batch, seq, hidden]`.
        """
        ### BEGIN SOLUTION
        gated = F.silu(self.gate(hidden_states)) * self.up(hidden_states)
        return self.dropout(self.down(gated))
        ### END SOLUTION


# --- end of exercise 4.3 ---
