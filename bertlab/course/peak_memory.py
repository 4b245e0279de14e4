"""How much memory a process needs to run a model once: measured in processes of their own.

    peak_memory_mb({"small": "small.safetensors", "for ONNX": "small.onnx"}, batch)

A process never gives back what it once needed, so each model gets a fresh one. Models of
`save_compressed` need PyTorch; an ONNX file needs ONNX Runtime alone, and its process loads
nothing else.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

SECONDS = 120  # a process that takes longer is given up


def peak_memory_mb(
    files: Mapping[str, str | Path], batch: Mapping[str, Any]
) -> dict[str, float | None]:
    """The most memory that a process held which loaded a model and read a batch, all included.

    Args:
        files: by name: a `.safetensors` of `save_compressed`, or an `.onnx` file.
        batch: the model's inputs by name, tensors or arrays of whole numbers.

    Returns:
        For each file millions of bytes; None where it could not be measured, as on Windows, or
        while parts of the package are not written yet.

    Raises:
        ValueError: a file has another ending.
    """
    found: dict[str, float | None] = dict.fromkeys(files)
    kinds: dict[str, dict[str, str]] = {".safetensors": {}, ".onnx": {}}
    for name, file in files.items():
        suffix = Path(file).suffix
        if suffix not in kinds:
            raise ValueError(f"{file} must end in .safetensors or .onnx")
        kinds[suffix][name] = str(Path(file).resolve())
    if not hasattr(os, "fork"):
        return found
    with tempfile.TemporaryDirectory() as folder:
        numbers = Path(folder) / "batch.npz"
        arrays: dict[str, Any] = {name: np.asarray(x) for name, x in batch.items()}
        np.savez(numbers, **arrays)
        for chosen in kinds.values():
            if chosen:
                found.update(_in_a_process(chosen, numbers))
    return found


def _in_a_process(files: dict[str, str], batch: Path) -> dict[str, float | None]:
    """Let a fresh Python, with the same `bertlab`, measure these files."""
    home = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(files), str(batch)],
        env={**os.environ, "PYTHONPATH": home},
        cwd=home,  # Python looks there first
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a group of its own, which can be ended with its children
    )
    try:
        said, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""  # what was measured until then counts
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return dict(json.loads(line) for line in said.splitlines(keepends=True) if line[-1:] == b"\n")


# --- in the process that measures ---


def main(files: str, batch: str) -> None:
    """Print a line of JSON for each file: its name and memory, in a child of this process."""
    inputs = dict(np.load(batch))
    paths: dict[str, str] = json.loads(files)
    prepare = _with_onnx if all(path.endswith(".onnx") for path in paths.values()) else _with_torch
    run = prepare()  # the imports, which the children share
    for name, path in paths.items():
        print(json.dumps([name, in_a_child(partial(run, path, inputs))]), flush=True)


def in_a_child(run: Callable[[], Any]) -> float | None:
    """Do something in a child of this process, and return the most memory that it ever held."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run()
            os.write(write, str(_held_mb()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return float(text) if text else None


def _held_mb() -> float:
    import resource

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held / 1e6 if sys.platform == "darwin" else held * 1024 / 1e6


def _with_torch() -> Callable[[str, dict[str, np.ndarray]], Any]:
    import torch

    from bertlab.compression import load_compressed

    def run(path: str, inputs: dict[str, np.ndarray]) -> Any:
        with torch.inference_mode():
            return load_compressed(path)(**{n: torch.from_numpy(x) for n, x in inputs.items()})

    return run


def _with_onnx() -> Callable[[str, dict[str, np.ndarray]], Any]:
    import onnxruntime

    def run(path: str, inputs: dict[str, np.ndarray]) -> Any:
        session: Any = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return session.run(None, {name: x.astype(np.int64) for name, x in inputs.items()})

    return run


if __name__ == "__main__":
    main(*sys.argv[1:])
