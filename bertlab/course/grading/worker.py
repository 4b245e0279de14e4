"""What runs inside the sandbox: it loads the student's modules and calls them.

Started as ``python -I worker.py CONTROL``, where CONTROL is the number of a socket's descriptor.
The first process imports PyTorch once and runs no student's code. For each exercise it is given
a channel of its own, and forks: the child loads the modules, answers requests on that channel, and
ends. When the trusted side says so, everything but the first process is killed.

This file is mounted into the sandbox and imports nothing of the course but `wire`.
"""

import copy
import ctypes
import importlib
import importlib.abc
import importlib.machinery
import os
import resource
import shutil
import signal
import socket
import sys
import types
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import wire


def main() -> None:
    """Serve the control channel until it closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: no other process may read or trace this one
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        except OSError:
            return
        if not descriptors:
            return
        order = wire.receive(control)
        for name in order["preload"]:
            __import__(name)
        if os.fork() == 0:
            control.close()
            serve(socket.socket(fileno=descriptors[0]), order)
            os._exit(0)
        os.close(descriptors[0])
        if wire.receive(control) == "end":
            kill_all_others()
            wire.send(control, "ended")


def kill_all_others() -> None:
    """Kill every process of the sandbox but this one and its parent; twice, for who just forked."""
    for _ in range(3):
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return


def serve(channel: socket.socket, order: dict[str, Any]) -> None:
    """Load the student's modules, say so, and answer requests until the channel closes."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_DATA, (order["memory"], order["memory"]))
    resource.setrlimit(resource.RLIMIT_NPROC, (order["processes"], order["processes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    install(order["folder"], order["modules"])
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
    shutil.rmtree(package, ignore_errors=True)
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
    before = copy.deepcopy(inputs)
    repeatable()
    value = function(parts, **inputs)
    changed = [name for name in inputs if not same(inputs[name], before[name])]
    return {"value": value, "changed": changed[0] if changed else None}


def on_device(value: Any, device: str) -> Any:
    """Move the tensors of a value to the device."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(item, device) for item in value)
    if isinstance(value, dict):
        return {key: on_device(item, device) for key, item in value.items()}
    return value


def same(first: Any, second: Any) -> bool:
    """True if an input is as it was before the call."""
    import torch

    if isinstance(first, dict):
        return set(first) == set(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, torch.Tensor):
        first, second = torch.nan_to_num(first.detach()), torch.nan_to_num(second.detach())
        return first.shape == second.shape and torch.equal(first, second)
    return bool(first == second)


def repeatable() -> None:
    """The same random numbers and full float32 precision for every call."""
    import random

    import numpy
    import torch

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
