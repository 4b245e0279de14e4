"""What runs inside the sandbox: it loads the student's modules and calls them.

Started as ``python -I worker.py CONTROL FOLDER KIND``: the number of a socket's descriptor, the
folder for temporary files, and `alone` if every process that it can see is its own. The first
process imports PyTorch once and runs no student's code. For each exercise it is given a channel of
its own, and forks: the child loads the modules, answers requests on that channel, and ends. When
the trusted side says so, everything but the first process is killed and the folder is emptied. If
anything is then not as it was at the start, the first process ends, and a new sandbox is made.

This file is mounted into the sandbox and imports nothing of the course but `wire`.
"""

import copy
import ctypes
import importlib
import importlib.abc
import importlib.machinery
import os
import random
import resource
import shutil
import signal
import socket
import sys
import types
from contextlib import suppress
from typing import Any

import numpy.random
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import wire

#: The most files that a process may have open; sockets' buffers count for no process's memory.
MAX_OPEN = 256
# As they are before a student's code can put others in their place.
_deepcopy, _equal, _without_nan = copy.deepcopy, torch.equal, torch.nan_to_num


def main() -> None:
    """Serve the control channel until it closes."""
    control, folder = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    alone = sys.argv[3] == "alone"
    protect(alone)
    torch.set_num_threads(1)
    clear_up(folder, alone)
    before = surroundings(folder)
    while (channel := next_channel(control)) is not None:
        order = wire.receive(control)
        for name in order["preload"]:
            __import__(name)
        child = os.fork()
        if child == 0:
            control.close()
            serve(channel, order, folder)
            os._exit(0)
        channel.close()
        while wire.receive(control) != "end":
            wire.send(control, how_it_ended(child))
        clear_up(folder, alone)
        if surroundings(folder) != before:
            return
        wire.send(control, "ended")


def protect(alone: bool) -> None:
    """Let no other process read or trace this one; adopt those whose parent ended."""
    with suppress(AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE
        if not alone:
            ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def next_channel(control: socket.socket) -> socket.socket | None:
    """The channel of the next submission; None at the end."""
    try:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    except OSError:
        return None
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def how_it_ended(child: int) -> str:
    """The name of the signal that ended the child; "" if it was none, or goes on."""
    with suppress(ChildProcessError):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended and os.WIFSIGNALED(status):
            return signal.Signals(os.WTERMSIG(status)).name
    return ""


def surroundings(folder: str) -> tuple[Any, ...]:
    """What a child could change of this process and its folder, and the next would inherit."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = [resource.getrlimit(getattr(resource, name)) for name in names]
    found = os.stat(folder)
    facts = [limits, os.getpriority(os.PRIO_PROCESS, 0), found.st_mode, os.listdir(folder)]
    if hasattr(os, "sched_getaffinity"):
        facts += [os.sched_getaffinity(0), os.sched_getscheduler(0), os.listxattr(folder)]
    return tuple(facts)


def clear_up(folder: str, alone: bool) -> None:
    """Kill every process that was left, and remove every file.

    Where this process is not alone, the trusted side has killed them.

    Raises:
        OSError: a file cannot be removed.
    """
    for _ in range(3 * alone):  # thrice, for one that was just being made
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while os.waitpid(-1, 0):
            pass
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def serve(channel: socket.socket, order: dict[str, Any], folder: str) -> None:
    """Load the student's modules, say so, and answer requests until the channel closes."""
    os.setsid()
    set_limits(order)
    install(os.path.join(folder, "package"), order["modules"])
    sys.meta_path.insert(0, TextModules(order["helpers"]))
    wire.send(channel, "loaded")
    while True:
        try:
            request = wire.receive(channel)
        except EOFError:
            return
        try:
            answer = perform(request)
        except BaseException as error:
            answer = {"error": described(error)}
        try:
            wire.send(channel, answer)
        except wire.WireError as error:
            wire.send(channel, {"error": {"kind": "WireError", "message": str(error)}})


def set_limits(order: dict[str, Any]) -> None:
    """Limit what this process and its children may use; none of them can raise it again."""
    for name, most in {
        "RLIMIT_DATA": order["memory"],
        "RLIMIT_NPROC": order["processes"],
        "RLIMIT_NOFILE": MAX_OPEN,
        "RLIMIT_CORE": 0,
    }.items():
        _, allowed = resource.getrlimit(getattr(resource, name))
        limit = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(getattr(resource, name), (limit, limit))


def described(error: BaseException) -> dict[str, str]:
    """An exception as plain text, cut to a length."""
    try:
        message = str(error)[:2000]
    except BaseException:
        message = "an exception whose text cannot be made"
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    name = type(error).__name__ if type(error).__module__ == "builtins" else kinds[0]
    return {"kind": name, "message": message, "exact": type(error).__name__[:200]}


def install(folder: str, modules: dict[str, str]) -> None:
    """Write the student's package into a folder and make it importable."""
    package = os.path.join(folder, "bertlab")
    os.makedirs(package)
    for name, text in modules.items():
        with open(os.path.join(package, f"{name}.py"), "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True


class TextModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes modules importable that exist as text only; their packages are empty."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self.packages = {
            ".".join(name.split(".")[:count])
            for name in texts
            for count in range(2, name.count(".") + 1)
        }

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in self.texts or name in self.packages:
            is_package = name in self.packages
            return importlib.machinery.ModuleSpec(name, self, is_package=is_package)
        return None

    def exec_module(self, module: Any) -> None:
        text = self.texts.get(module.__name__, "")
        exec(compile(text, f"<{module.__name__}>", "exec"), vars(module))


def perform(request: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked: call a helper's function on the student's parts and the given inputs."""
    parts = types.SimpleNamespace()
    for target in request["targets"]:
        module, name = target.split(".", 1)
        setattr(parts, name, getattr(importlib.import_module(f"bertlab.{module}"), name))
    function = getattr(importlib.import_module(request["helper"]), request["function"])
    inputs = {name: on_device(x, request["device"]) for name, x in request["inputs"].items()}
    before = _deepcopy(inputs)
    repeatable()
    value = function(parts, **inputs)
    changed = [name for name in inputs if not same(inputs[name], before[name])]
    return {"value": value, "changed": changed[0] if changed else None}


def on_device(value: Any, device: str) -> Any:
    """Move the tensors of a value to the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(item, device) for item in value)
    if isinstance(value, dict):
        return {key: on_device(item, device) for key, item in value.items()}
    return value


def same(first: Any, second: Any) -> bool:
    """True if an input is as it was before the call."""
    if isinstance(first, dict):
        return set(first) == set(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, torch.Tensor):
        first, second = _without_nan(first.detach()), _without_nan(second.detach())
        return first.shape == second.shape and _equal(first, second)
    return bool(first == second)


def repeatable() -> None:
    """The same random numbers and full float32 precision for every call."""
    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats a traceback each time
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


if __name__ == "__main__":
    main()
