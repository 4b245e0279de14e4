"""A student's copy in use: its command line, and a real Jupyter kernel on it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

from bertlab.course.authoring.chapters import environment


def bertlab(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line of a student's copy, in that copy."""
    return subprocess.run(
        [sys.executable, "-m", "bertlab.course.cli", *words],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )


def python(folder: Path, code: str) -> str:
    """Run code in a new process on the package in `folder`, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass
class Result:
    """What a cell gave: the plain text of everything shown, printed, and any error."""

    shown: list[str] = field(default_factory=list)
    printed: str = ""
    error: str = ""
    payload: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join([*self.shown, self.printed])


class Kernel:
    """Runs cells and gathers what they show."""

    def __init__(self, manager: KernelManager, client: Any) -> None:
        self.manager, self.client = manager, client

    def run(self, code: str, timeout: float = 120, interrupt_after: float | None = None) -> Result:
        result, waited = Result(), interrupt_after
        request = self.client.execute(code)
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=waited or timeout)
            except Exception:
                if waited is None:
                    raise
                self.manager.interrupt_kernel()
                waited = None
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            if kind in ("display_data", "execute_result"):
                result.shown.append(content["data"].get("text/plain", ""))
            elif kind == "stream":
                result.printed += content["text"]
            elif kind == "error":
                result.error = f"{content['ename']}: {content['evalue']}"
        reply = self.client.get_shell_msg(timeout=timeout)
        while reply["parent_header"].get("msg_id") != request:
            reply = self.client.get_shell_msg(timeout=timeout)
        result.payload = reply["content"].get("payload", [])
        return result


@contextmanager
def kernel(copy: Path) -> Iterator[Kernel]:
    """Start a kernel in the `chapters/` of a student's copy."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(copy / "chapters"), env=environment(copy))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
