"""Run All on an untouched chapter ends without an error, whatever came before it is not done."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from bertlab.course import outline
from bertlab.course.authoring.chapters import environment
from bertlab.course.regions import find_regions
from bertlab.course.workspace import Workspace

from .kernels import bertlab

FILES = [chapter.file for chapter in outline.chapters()]


def run_all(copy: Path, file: str) -> nbformat.NotebookNode:
    """Execute a chapter of a student's copy cell by cell, its experiments cut short."""
    node = nbformat.read(copy / "chapters" / f"{file}.ipynb", as_version=4)
    client = NotebookClient(
        node,
        timeout=600,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": str(copy / "chapters")}},
    )
    short = {"BERTLAB_SHORT": "1", "TORCH_COMPILE_DISABLE": "1"}  # compiling alone takes 10 s
    client.execute(env={**environment(copy), **short})
    return node


def texts(node: nbformat.NotebookNode) -> str:
    """Return everything the cells printed or showed, as plain text."""
    outputs = [output for cell in node.cells for output in cell.get("outputs", [])]
    return "\n".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs)


@pytest.mark.parametrize("file", FILES)
def test_run_all_on_an_untouched_chapter_has_no_error(file, student_copy):
    before = {path: path.read_bytes() for path in (student_copy / "bertlab").glob("*.py")}
    node = run_all(student_copy, file)
    for cell in node.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error", (cell.id, output.ename, output.evalue)
            assert "Traceback" not in str(output.get("text", "")), (cell.id, output.text)
    shown = texts(node)
    chapter = outline.chapters()[FILES.index(file)]
    for entry in chapter.exercises:
        assert f"○ to do: {entry.id} {entry.title}" in shown
    # Nothing was written, and nothing counts as done although everything ran on stand-ins.
    assert before == {path: path.read_bytes() for path in (student_copy / "bertlab").glob("*.py")}
    workspace = Workspace(student_copy)
    assert all(workspace.status(exercise_id) == "todo" for exercise_id in outline.entries())
    assert "on a stand-in for what is not done yet" in shown


def test_a_wrong_earlier_part_does_not_fail_a_later_one(student_copy, root):
    """3.5 is right and calls a wrong 3.4: it passes, and 3.4 is the one that fails."""
    workspace = Workspace(student_copy)
    complete = (root / "solutions" / "bertlab" / "attention.py").read_text(encoding="utf-8")
    regions = find_regions(complete)
    for exercise_id, region in regions.items():
        workspace.fill(exercise_id, region.text)
    wrong = regions["3.4"].text.replace("return F.", "return 2 * F.")
    assert wrong != regions["3.4"].text
    workspace.fill("3.4", wrong)
    done = bertlab(student_copy, "check", "--json", "3.4", "3.5")
    statuses = {record["exercise"]: record["status"] for record in json.loads(done.stdout)}
    assert statuses == {"3.4": "failed", "3.5": "passed"}, done.stderr
    assert workspace.status("3.4") == "failed"


def test_a_module_that_cannot_be_loaded_does_not_stop_the_others(student_copy):
    path = student_copy / "bertlab" / "config.py"
    stub = 'raise NotImplementedError("exercise 0.1")'
    path.write_text(path.read_text().replace(stub, "return (1 +"))
    done = bertlab(student_copy, "check", "--json", "0.1", "3.1", "2.3")
    records = {record["exercise"]: record for record in json.loads(done.stdout)}
    assert records["0.1"]["status"] == "error"
    assert "was never closed" in records["0.1"]["diagnosis"]
    assert records["3.1"]["status"] == records["2.3"]["status"] == "todo"
