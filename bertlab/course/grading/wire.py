"""What passes between the trusted process and the student's: JSON and safetensors, nothing else.

A message is two lengths (8 bytes each, little-endian), a JSON header and a safetensors blob. Both
are capped: the header by less, since it becomes objects that take many times its size. Values are
rebuilt as plain ones: whatever a student's object claims to be, what arrives is a tensor, a number,
text, a list, a tuple, a dict, or an `Opaque` that equals nothing.

This file is mounted into the sandbox and imports nothing of the course.
"""

import json
import math
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

#: The most bytes that a message may have: header and tensors together.
MAX_BYTES = 128 * 2**20
#: The most bytes of its header, and of the table of contents of its tensors.
MAX_HEADER = 16 * 2**20
MAX_CONTENTS = 2**20
#: How deep lists, tuples and dicts may lie in each other.
MAX_DEPTH = 40
_LENGTHS = struct.Struct("<QQ")
_PLAIN = (bool, int, str, type(None))


class WireError(Exception):
    """A message is too large, too deep, cut off, or not one of ours."""


@dataclass(frozen=True, eq=False)
class Opaque:
    """Something that may not cross: it has a type's name and equals nothing."""

    kind: str


# --- messages ---


def send(channel: socket.socket, message: Any) -> None:
    """Send one message.

    Raises:
        WireError: it is too large or too deep.
    """
    from safetensors.torch import save

    tensors: dict[str, Any] = {}
    header = json.dumps(_encoded(message, tensors, MAX_DEPTH)).encode("ascii")
    blob = save(tensors) if tensors else b""
    _check_sizes(len(header), len(blob), MAX_BYTES)
    channel.sendall(_LENGTHS.pack(len(header), len(blob)))
    channel.sendall(header)
    channel.sendall(blob)


def packed(value: Any) -> bytes:
    """What `send` would send, in one piece."""
    from safetensors.torch import save

    tensors: dict[str, Any] = {}
    header = json.dumps(_encoded(value, tensors, MAX_DEPTH)).encode("ascii")
    return header + (save(tensors) if tensors else b"")


def crossed(value: Any) -> Any:
    """A copy of a value as it arrives on the other side: plain, and on the CPU."""
    tensors: dict[str, Any] = {}
    tree = json.loads(json.dumps(_encoded(value, tensors, MAX_DEPTH)))
    return _decoded(tree, tensors, MAX_DEPTH)


def receive(channel: socket.socket, deadline: float | None = None, most: int = MAX_BYTES) -> Any:
    """Receive one message.

    Args:
        deadline: a time of `time.monotonic()`; None waits for ever.
        most: the most bytes it may have.

    Raises:
        TimeoutError: the deadline passed.
        EOFError: the other side is gone.
        WireError: the message is too large or malformed.
    """
    header_size, blob_size = _LENGTHS.unpack(_exactly(channel, _LENGTHS.size, deadline))
    _check_sizes(header_size, blob_size, most)
    header = _exactly(channel, header_size, deadline)
    blob = _exactly(channel, blob_size, deadline)
    try:
        return _decoded(json.loads(header), _tensors(blob), MAX_DEPTH)
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"a malformed message ({type(error).__name__})") from None


def _check_sizes(header: int, blob: int, most: int) -> None:
    if header > MAX_HEADER or header + blob > most:
        raise WireError(f"a message of {header:,} and {blob:,} bytes is too large")


def _exactly(channel: socket.socket, count: int, deadline: float | None) -> bytes:
    """Read so many bytes, into one place: many small pieces would take many times as much."""
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        if deadline is not None:
            channel.settimeout(max(deadline - time.monotonic(), 1e-3))
            if time.monotonic() > deadline:
                raise TimeoutError
        read = channel.recv_into(rest)
        if not read:
            raise EOFError
        rest = rest[read:]
    return bytes(data)


def _tensors(blob: bytes) -> dict[str, Any]:
    if not blob:
        return {}
    from safetensors.torch import load

    contents = int.from_bytes(blob[:8], "little")
    if contents > MAX_CONTENTS:
        raise WireError(f"a table of contents of {contents:,} bytes is too large")
    return load(blob)


# --- values ---


def _encoded(value: Any, tensors: dict[str, Any], depth: int) -> Any:
    """A value as JSON; its tensors go into `tensors`."""
    if depth == 0:
        raise WireError("a value is nested too deeply")
    if type(value) in _PLAIN:
        return value
    if type(value) is float:
        return {"float": value if math.isfinite(value) else repr(value)}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encoded(item, tensors, depth - 1) for item in value]}
    if type(value) is dict and all(map(_is_key, value)):
        pairs = [[_encoded(part, tensors, depth - 1) for part in pair] for pair in value.items()]
        return {"dict": pairs}
    return _encoded_special(value, tensors)


def _is_key(key: Any) -> bool:
    """Whether something may be a key of a dict: of other kinds millions can share one hash."""
    if type(key) is tuple:
        return all(type(part) is str for part in key)
    return type(key) in (str, bool, float, type(None)) or (type(key) is int and abs(key) < 2**63)


def _encoded_special(value: Any, tensors: dict[str, Any]) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        name = f"t{len(tensors)}"
        plain = value.detach().as_subclass(torch.Tensor)
        tensors[name] = plain.to("cpu").contiguous().clone()
        return {"tensor": name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    kind = type(value)
    return {"opaque": f"{kind.__module__}.{kind.__qualname__}"[:200]}


def _decoded(tree: Any, tensors: dict[str, Any], depth: int) -> Any:
    if depth == 0:
        raise WireError("a value is nested too deeply")
    if type(tree) in _PLAIN:
        return tree
    if type(tree) is not dict or len(tree) != 1:
        raise WireError("a malformed value")
    ((kind, content),) = tree.items()
    if kind in ("list", "tuple"):
        items = [_decoded(item, tensors, depth - 1) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        decoded = [[_decoded(part, tensors, depth - 1) for part in pair] for pair in content]
        if not all(_is_key(key) for key, _ in decoded):
            raise WireError("a malformed value: a key of a dict")
        return dict(decoded)
    return _decoded_special(kind, content, tensors)


def _decoded_special(kind: str, content: Any, tensors: dict[str, Any]) -> Any:
    if kind == "float" and (type(content) is float or content in ("nan", "inf", "-inf")):
        return float(content)
    if kind == "tensor":
        return tensors[content]
    if kind == "dtype":
        import torch

        if isinstance(dtype := getattr(torch, str(content), None), torch.dtype):
            return dtype
    if kind == "opaque":
        return Opaque(str(content)[:200])
    raise WireError("a malformed value")
