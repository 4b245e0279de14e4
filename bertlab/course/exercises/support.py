"""What the chapters' exercise files share: drawing inputs, filling modules, taking gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertlab.course.exercises.plain import bert_config, error_of, pair

__all__ = [
    "bert_config",
    "error_of",
    "gradients",
    "integers",
    "normal",
    "padding_mask",
    "pair",
    "parameters_like",
    "with_parameters",
]


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    """Draw a float32 tensor from a normal distribution."""
    return torch.from_numpy(rng.normal(mean, scale, shape).astype(np.float32))


def integers(rng: np.random.Generator, low: int, high: int, *shape: int) -> Tensor:
    """Draw whole numbers from `low` up to, not including, `high`."""
    return torch.from_numpy(rng.integers(low, high, shape))


def padding_mask(lengths: Sequence[int], seq: int) -> Tensor:
    """Return a `[batch, seq]` mask of 1 for real tokens and 0 for padding."""
    return (torch.arange(seq)[None, :] < torch.tensor(lengths)[:, None]).long()


def parameters_like(
    module: nn.Module, rng: np.random.Generator, scales: Mapping[str, float] | None = None
) -> dict[str, Tensor]:
    """Draw every parameter of a module anew, so that no bug hides behind an initial value.

    Fresh weights hide bugs: biases are 0, LayerNorm gains 1, attention uniform. Here matrices
    are drawn so that a row of inputs keeps its size, gains around 1 and biases around 0.

    Args:
        scales: by the end of a parameter's name, a factor on its spread: ``{"query.weight": 4}``.
    """
    drawn = {}
    for name, parameter in module.named_parameters():
        factor = next((f for end, f in (scales or {}).items() if name.endswith(end)), 1.0)
        if parameter.ndim > 1:
            spread, mean = parameter.shape[-1] ** -0.5, 0.0
        else:
            spread, mean = 0.3, 1.0 if name.endswith("norm.weight") else 0.0
        drawn[name] = normal(rng, *parameter.shape, scale=factor * spread, mean=mean)
    return drawn


def with_parameters(module: nn.Module, state: Mapping[str, Tensor], train: bool = False) -> Any:
    """Give a module the parameters of `state`, in their type and on their device.

    Raises:
        AttributeError: the module lacks one of them, or has others: the message names them.
    """
    own = dict(module.named_parameters())
    missing, extra = sorted(set(state) - set(own)), sorted(set(own) - set(state))
    if missing or extra:
        wrong = [f"no parameter `{name}`" for name in missing]
        wrong += [f"a parameter `{name}` that is not asked for" for name in extra]
        raise AttributeError(f"{type(module).__name__} has {' and '.join(wrong)}")
    for name, value in state.items():
        if own[name].shape != value.shape:
            raise ValueError(
                f"parameter `{name}` of {type(module).__name__} has shape "
                f"{tuple(own[name].shape)}, expected {tuple(value.shape)}"
            )
    first = next(iter(state.values()))
    module.to(device=first.device, dtype=first.dtype)
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(value)
    return module.train(train)


def gradients(output: Tensor, cotangent: Tensor, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of `(output * cotangent).sum()` with respect to each wanted tensor.

    A tensor that does not take part gets a gradient of zeros.
    """
    names = list(wanted)
    found = torch.autograd.grad(
        (output * cotangent).sum(), [wanted[name] for name in names], allow_unused=True
    )
    return {
        f"gradient of {name}": torch.zeros_like(wanted[name]) if grad is None else grad
        for name, grad in zip(names, found, strict=True)
    }
