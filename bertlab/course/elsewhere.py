"""Judging in a process of its own, which reports each verdict through a pipe.

Whatever the student's code does there (end the process, write to standard output), whoever asked
gets a verdict on every exercise. The pipe is private: nothing that is printed gets into it.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from bertlab.course import outline
from bertlab.course.judging import CaseResult, Verdict
from bertlab.course.workspace import Workspace, WorkspaceError


def judged_elsewhere(
    root: Path,
    ids: list[str],
    seed: int | None = None,
    time_limit: float = 60.0,
    output: IO[Any] | None = None,
) -> Iterator[Verdict]:
    """Judge exercises of the workspace at `root` in another process; yield a verdict on each.

    An exercise at which the process ends is an error; the others go on in a new process.

    Args:
        output: an open file for what the student's code prints; standard error by default.

    Raises:
        WorkspaceError: judging is impossible, and says why.
    """
    left = list(ids)
    while left:
        task = {"root": str(root), "ids": left, "seed": seed, "time_limit": time_limit}
        process, pipe = _start(task, output or sys.stderr)
        try:
            with pipe:
                for line in pipe:
                    yield _verdict(line)
                    left.pop(0)
                    if not left:
                        return
            process.wait()
        finally:
            process.kill()
            process.wait()
        yield _without_verdict(left.pop(0), process.returncode)


def _start(task: dict[str, Any], output: IO[Any]) -> tuple[subprocess.Popen[bytes], IO[str]]:
    """Start a process on a task; return it and what it sends, a record a line."""
    reader, writer = os.pipe()
    path = os.pathsep.join(filter(None, [str(outline.COURSE_ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "bertlab.course.elsewhere", json.dumps({**task, "pipe": writer})],
        cwd=outline.COURSE_ROOT,  # `-m` looks for modules in the working folder first
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[writer],
    )
    os.close(writer)
    return process, open(reader, encoding="utf-8")


def _verdict(line: str) -> Verdict:
    record = json.loads(line)
    if "problem" in record:
        raise WorkspaceError(record["problem"])
    return Verdict(**{**record, "cases": [CaseResult(**case) for case in record["cases"]]})


def _without_verdict(exercise_id: str, status: int) -> Verdict:
    cause = "does your code call os._exit?" if status >= 0 else "was it killed, or out of memory?"
    return Verdict(
        exercise_id,
        "error",
        0,
        outline.entries()[exercise_id].points,
        f"The check ended without a verdict (exit status {status}): {cause}",
    )


def main(task: dict[str, Any]) -> None:
    """Judge what the task says, and send a record on each exercise through its pipe."""
    from bertlab.course.cli import judge_all

    os.set_inheritable(task["pipe"], False)  # what the student's code starts must not hold it
    with open(task["pipe"], "w", encoding="utf-8") as pipe:
        try:
            workspace = Workspace(Path(task["root"]))
            for verdict in judge_all(workspace, task["ids"], task["seed"], task["time_limit"]):
                print(json.dumps(asdict(verdict)), file=pipe, flush=True)
        except KeyboardInterrupt:
            sys.exit(130)  # whoever asked was interrupted too, and says so
        except Exception as error:
            if not isinstance(error, (WorkspaceError, outline.UnknownExercise)):
                traceback.print_exc()
            print(json.dumps({"problem": str(error)}), file=pipe, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
