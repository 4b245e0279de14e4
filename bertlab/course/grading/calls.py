"""How a hidden test calls a submission. This text enters the sandbox; it holds no answer.

Each function is called with `parts`, whose attributes are the names that were asked for. What a
test wants to use again is kept under a number: the objects stay here, the numbers travel.
"""

import dataclasses
import importlib
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertlab.course.exercises.support import bert_config, with_parameters
from bertlab.course.exercises.support import gradients as gradients_of

#: What was kept, by the numbers that the trusted side gave out.
KEPT: dict[int, Any] = {}
#: How an argument is written that cannot travel: `(MARK, kind, what)`.
MARK = "\0"


def call(
    parts: Any, target: Any, arguments: list[Any], options: dict[str, Any], keep: int | None = None
) -> Any:
    """Call what `target` names, and return its value or keep it."""
    value = found(parts, target)(*given(parts, arguments), **given(parts, options))
    if keep is None:
        return plain(value)
    KEPT[keep] = value
    return None


def forward(
    parts: Any,
    target: str,
    config: dict[str, Any],
    state: dict[str, Any],
    train: bool,
    arguments: list[Any],
    options: dict[str, Any],
) -> Any:
    """Build a module of the submission, give it its parameters, and call it."""
    module = found(parts, target)(bert_config(**config))
    with_parameters(module, state, train)
    return plain(module(*given(parts, arguments), **given(parts, options)))


def gradients(
    parts: Any,
    target: Any,
    arguments: list[Any],
    options: dict[str, Any],
    of: str,
    cotangent: Any,
) -> dict[str, Any]:
    """Call, and return the gradient of `(output * cotangent).sum()`.

    It is taken with respect to every floating-point argument, by its place, and of a module with
    respect to every parameter, by its name.
    """
    arguments, called = [leaf(x) for x in given(parts, arguments)], found(parts, target)
    output = at(called(*arguments, **given(parts, options)), of)
    wanted = {str(i): x for i, x in enumerate(arguments) if is_float(x)}
    if isinstance(called, nn.Module):
        wanted |= dict(called.named_parameters())
    weight = torch.ones_like(output) if cotangent is None else cotangent
    taken = gradients_of(output, weight, wanted)
    return {name.removeprefix("gradient of "): value for name, value in taken.items()}


def get(parts: Any, target: Any) -> Any:
    """Return a kept object, or what stands in it under a path such as `bert.config`."""
    return plain(found(parts, target))


def put(parts: Any, target: Any, value: Any) -> None:
    """Replace an attribute of a kept object."""
    number, path = target
    *outer, name = path.split(".")
    holder = at(KEPT[number], ".".join(outer))
    if isinstance(holder, dict):
        holder[name] = given(parts, value)
    else:
        setattr(holder, name, given(parts, value))


def same(parts: Any, first: Any, second: Any) -> bool:
    """Say whether two paths lead to one object."""
    return found(parts, first) is found(parts, second)


def load(parts: Any, target: Any, state: dict[str, Any], train: bool) -> None:
    """Give a kept module its parameters."""
    with_parameters(found(parts, target), state, train)


def parameters(parts: Any, target: Any) -> dict[str, Any]:
    """Return a kept module's parameters by name, a tied one once."""
    return {name: value.detach() for name, value in found(parts, target).named_parameters()}


def write(parts: Any, files: dict[str, Tensor], keep: int) -> None:
    """Make a folder with these files, and keep it; it is an argument like any kept object."""
    KEPT[keep] = tempfile.TemporaryDirectory()
    for name, content in files.items():
        (Path(KEPT[keep].name) / name).write_bytes(content.cpu().numpy().tobytes())


def read(parts: Any, target: Any) -> dict[str, Any]:
    """Return the files of a kept folder, as bytes by their names."""
    number, path = target
    files = [file for file in (Path(KEPT[number].name) / path).iterdir() if file.is_file()]
    return {
        file.name: torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
        for file in files
        if file.stat().st_size
    }


def forget(parts: Any, numbers: list[int]) -> None:
    """Let kept objects go."""
    for number in numbers:
        KEPT.pop(number, None)


class Witness:
    """A callback, a hook or a model that notes what it is called with.

    Args:
        answer: what it returns.
        stop: the number of the call that ends in an `InterruptedError`; 0 for none.

    Attributes:
        calls: the arguments of each call, those with a name last, as a dict. Instead of a module
            there is its mode: True in training.
    """

    def __init__(self, answer: Any = None, stop: int = 0) -> None:
        self.answer, self.stop = answer, stop
        self.calls: list[list[Any]] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls.append([noted(x) for x in arguments] + ([noted(options)] if options else []))
        if len(self.calls) == self.stop:
            raise InterruptedError("stopped")
        return self.answer


def noted(value: Any) -> Any:
    """A value as it is now, whatever becomes of it."""
    if isinstance(value, nn.Module):
        return value.training
    if isinstance(value, Tensor):
        return value.detach().clone()
    value = plain(value)
    if isinstance(value, (list, tuple)):
        return [noted(item) for item in value]
    if isinstance(value, dict):
        return {key: noted(item) for key, item in value.items()}
    return value


# --- what the functions above share ---


def found(parts: Any, target: Any) -> Any:
    """What a target names: a part, something of another module, or a path in a kept object."""
    if not isinstance(target, str):
        number, path = target
        return at(KEPT[number], path)
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module) if module else parts, name)


def at(thing: Any, path: str) -> Any:
    """Follow a path of attributes, keys and places, such as `hidden_states.0`."""
    for name in path.split(".") if path else ():
        if isinstance(thing, dict):
            thing = thing[name]
        else:
            thing = thing[int(name)] if isinstance(thing, (list, tuple)) else getattr(thing, name)
    return thing


def given(parts: Any, value: Any) -> Any:
    """An argument, with what could not travel put in its place."""
    if isinstance(value, (list, tuple)):
        if len(value) == 3 and isinstance(value[0], str) and value[0] == MARK:
            return stood_for(parts, value[1], value[2])
        return type(value)(given(parts, item) for item in value)
    if isinstance(value, dict):
        return {key: given(parts, item) for key, item in value.items()}
    return value


def stood_for(parts: Any, kind: str, what: Any) -> Any:
    """The object that a mark stands for."""
    if kind == "config":
        return bert_config(**what)
    if kind == "part":
        return found(parts, what)
    number, path = what
    kept = KEPT[number]
    return (
        Path(kept.name) / path if isinstance(kept, tempfile.TemporaryDirectory) else at(kept, path)
    )


def leaf(value: Any) -> Any:
    """A floating-point tensor as one of which a gradient can be taken; else the value."""
    return value.detach().clone().requires_grad_() if is_float(value) else value


def is_float(value: Any) -> bool:
    """Whether a value is a floating-point tensor."""
    return isinstance(value, Tensor) and value.is_floating_point()


def plain(value: Any) -> Any:
    """A dataclass or a named tuple as a dict of its fields; everything else as it is."""
    names = getattr(value, "_fields", None)
    if isinstance(value, tuple) and names:
        return dict(zip(names, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value
