"""The command line: what it prints, and how it exits."""

import json
import subprocess
import sys

import pytest

from bertlab.course import outline
from bertlab.course.regions import find_regions
from bertlab.course.workspace import Workspace

from .kernels import bertlab

FIELDS = {
    "exercise",
    "status",
    "points",
    "max_points",
    "diagnosis",
    "cases",
    "worst_error",
    "tolerance",
    "device",
    "reference",
}


def test_json_has_one_record_for_each_exercise_asked_for(student_copy, root):
    source = (root / "solutions" / "bertlab" / "config.py").read_text(encoding="utf-8")
    text = find_regions(source)["0.1"].text + "print('noise on import')\n"
    Workspace(student_copy).fill("0.1", text)
    done = bertlab(student_copy, "check", "0", "1.2", "--json")
    records = json.loads(done.stdout)
    assert [record["exercise"] for record in records] == ["0.1", "1.2"]
    assert [record["status"] for record in records] == ["passed", "todo"]
    assert all(set(record) >= FIELDS for record in records)
    assert records[0]["points"] == records[0]["max_points"] == 2
    assert records[1]["points"] == 0
    assert done.returncode == 1  # not all that were asked for passed
    assert bertlab(student_copy, "check", "0").returncode == 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("import sys; sys.exit(0)", "called sys.exit"),
        ("import os; os._exit(0)", "without a verdict (exit status 0)"),
        ("import os; os.kill(os.getpid(), 9)", "without a verdict (exit status -9)"),
    ],
)
def test_a_part_that_exits_fails_and_the_rest_is_judged(student_copy, line, says):
    Workspace(student_copy).fill("0.1", f"def count_parameters(config):\n    {line}\n")
    done = bertlab(student_copy, "check", "0.1", "1.2", "--json")
    assert done.returncode == 1
    records = json.loads(done.stdout)
    assert says in records[0]["diagnosis"] and records[0]["points"] == 0
    assert records[1]["status"] == "todo"
    assert says in bertlab(student_copy, "check", "0.1").stdout


@pytest.mark.parametrize("line", ["import sys; sys.exit(0)", "import os; os._exit(0)"])
def test_a_module_that_exits_is_an_error(student_copy, line):
    path = student_copy / "bertlab" / "config.py"
    text = path.read_text().replace(
        'raise NotImplementedError("exercise 0.1")', "return 1\n\n\n" + line
    )
    path.write_text(text)
    done = bertlab(student_copy, "check", "0.1")
    assert done.returncode == 1
    assert ("sys.exit" if "sys.exit" in line else "os._exit") in done.stdout


def test_output_of_other_programs_stays_out_of_the_json(student_copy, root):
    source = (root / "solutions" / "bertlab" / "config.py").read_text(encoding="utf-8")
    text = find_regions(source)["0.1"].text + "import os; os.system('echo [')\n"
    Workspace(student_copy).fill("0.1", text)
    done = bertlab(student_copy, "check", "0.1", "--json")
    assert [record["status"] for record in json.loads(done.stdout)] == ["passed"]
    assert "[" in done.stderr


def test_another_folder_is_judged_with_this_installations_course(student_copy, root, tmp_path):
    """--workspace: the modules are the folder's, the judge is ours, whatever else lies there."""
    folder = tmp_path / "handed in"
    (folder / "bertlab" / "course").mkdir(parents=True)
    (folder / "bertlab" / "course" / "judging.py").write_text("raise SystemExit('planted')\n")
    (folder / "bertlab" / "__init__.py").write_text("raise SystemExit('planted')\n")
    for module in outline.modules():
        text = (student_copy / "bertlab" / f"{module}.py").read_text()
        (folder / "bertlab" / f"{module}.py").write_text(text)
    complete = root / "solutions" / "bertlab" / "config.py"
    (folder / "bertlab" / "config.py").write_text(complete.read_text())
    done = bertlab(student_copy, "check", "0.1", "--workspace", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert Workspace(student_copy).status("0.1") == "todo"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("check", "9.9"), "there is no exercise or chapter '9.9'"),
        (("hint", "3"), "name one exercise"),
        (("check", "--workspace", "nowhere"), "has no folder bertlab/"),
        (("build",), "student's copy"),
    ],
)
def test_a_mistake_is_one_line_and_not_a_traceback(student_copy, words, says):
    done = bertlab(student_copy, *words)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_hints_come_one_by_one_and_the_last_stays(student_copy):
    said = [bertlab(student_copy, "hint", "0.1").stdout for _ in range(4)]
    assert [f"hint {n} of 3" in text for n, text in zip((1, 2, 3, 3), said, strict=True)] == [
        True
    ] * 4
    assert said[2] == said[3]


def test_status_shows_every_exercise_and_what_is_next(student_copy):
    shown = bertlab(student_copy, "status").stdout
    for exercise_id in outline.entries():
        assert exercise_id in shown
    assert "Next: 0.1" in shown


def test_reset_says_where_the_work_went(student_copy):
    Workspace(student_copy).fill("0.1", "def count_parameters(config):\n    return 5\n")
    said = bertlab(student_copy, "reset", "0.1").stdout
    assert ".bertlab/history/0.1/" in said
    assert "already" in bertlab(student_copy, "reset", "0.1").stdout


def test_doctor_says_what_it_runs_on_without_a_traceback(student_copy):
    done = bertlab(student_copy, "doctor")
    assert done.returncode == 0
    for what in ("device for checks", "reference in use", "real weights", "grading sandbox"):
        assert what in done.stdout
    assert "seeded" in done.stdout


def test_nothing_but_download_touches_the_network():
    """Every process of the course sets the hub's offline switch before the hub can be imported."""
    program = (
        "import os, sys\nos.environ.pop('HF_HUB_OFFLINE', None)\n"
        "sys.argv = ['bertlab', 'status']\n"
        "from bertlab.course import cli\n"
        "try:\n    cli.main()\nexcept SystemExit: pass\n"
        "assert os.environ['HF_HUB_OFFLINE'] == '1'\nassert 'huggingface_hub' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
