"""What the course runs on, said in one table: for ``bertlab doctor`` and for chapter 0."""

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Callable

from bertlab.course import outline
from bertlab.course.display import Shown, table

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "jupyterlab", "ipywidgets")


def report() -> Shown:
    """Return the table. A line that could not be found out says why; nothing here raises."""
    rows = [
        ("course", _tried(_course)),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        (
            "packages",
            ", ".join(f"{name} {_tried(lambda n=name: _version(n))}" for name in _PACKAGES),
        ),
        ("against constraints.txt", _tried(_departures)),
        ("device for checks", _tried(_device)),
        ("reference in use", _tried(_reference)),
        ("real weights", _tried(_minilm)),
        ("free disk", _tried(_disk)),
        ("grading sandbox", _tried(sandbox)),
    ]
    return table(["what", "found"], rows, "What the course runs on")


def _tried(find_out: Callable[[], str]) -> str:
    try:
        return find_out()
    except Exception as error:
        return f"not found: {type(error).__name__}: {error}"


def _course() -> str:
    kind = "the authors' course" if (outline.COURSE_ROOT / "solutions").is_dir() else "a student's"
    return f"{kind} copy with {len(outline.entries())} exercises"


def _version(name: str) -> str:
    return importlib.metadata.version(name)


def _departures() -> str:
    """Say which installed versions differ from those that the stored outputs were made with."""
    text = (outline.COURSE_ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = dict(line.split("==") for line in text.splitlines() if "==" in line and line[0] != "#")
    other = []
    for name in _PACKAGES:
        found = _version(name).split("+")[0]
        if name in pins and pins[name].split(";")[0].strip() != found:
            other.append(f"{name} {found} instead of {pins[name]}")
    return "; ".join(other) or "as pinned"


def _device() -> str:
    import torch

    from bertlab.course.package import best_device

    device = best_device()
    if device == "cuda":
        return f"cuda: {torch.cuda.get_device_name()}"
    return f"{device}, {torch.get_num_threads()} threads"


def _reference() -> str:
    from bertlab.course.reference import describe_reference

    return describe_reference()


def _minilm() -> str:
    from bertlab.course.reference import minilm_folder

    minilm_folder()
    return "all-MiniLM-L6-v2, as expected"


def _disk() -> str:
    return f"{shutil.disk_usage(outline.COURSE_ROOT).free / 1e9:.0f} GB"


def sandbox() -> str:
    """Say at which level submissions would be graded here: found out by starting a sandbox."""
    try:
        from bertlab.course.grading import sandbox
    except ModuleNotFoundError as error:
        return f"level none: {error.name} is not installed (only needed to grade)"
    program = sandbox.bubblewrap()
    if program is None:
        return "level none: bubblewrap is not installed (only needed to grade)"
    level = sandbox.best_level()
    if level != "none":
        return f"level {level}: works"
    return f"level none: bubblewrap fails here: {_complaint(program)}"


def _complaint(program: str) -> str:
    """What bubblewrap says when it is asked for the least that grading needs."""
    command = [program, "--unshare-all", "--ro-bind", "/", "/", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stderr.strip()[:120] or "the student's process does not start in it"
