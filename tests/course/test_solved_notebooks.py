"""The perfect student, and nbval: each solved notebook runs in the copy of who did all before it.

nbval executes every cell and compares each output with the stored one. After that the copy's
package must hold exactly the solutions, and the chapter's exercises count as passed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from bertlab.course import outline
from bertlab.course.authoring.build import solve_before
from bertlab.course.authoring.chapters import environment
from bertlab.course.regions import find_regions, normalize_text
from bertlab.course.workspace import Workspace

#: How many stored outputs nbval compares at least. Raise it when chapters grow; a number that
#: falls means that comparisons were lost.
AT_LEAST_COMPARED = 297


def run_nbval(copy: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Put a notebook into the copy's chapters/ and run it under nbval."""
    shutil.copy(path, copy / "chapters" / path.name)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--nbval",
        "--nbval-current-env",
        "-q",
        "-c",
        os.devnull,
        "--rootdir",
        str(copy),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-W",
        "ignore",
        "--nbval-cell-timeout",
        "600",
        f"chapters/{path.name}",
    ]
    return subprocess.run(
        command, cwd=copy, env=environment(copy), capture_output=True, text=True, check=False
    )


def solved(root: Path) -> list[Path]:
    """Return the solved notebooks in order."""
    return [root / "solutions" / "chapters" / f"{c.file}.ipynb" for c in outline.chapters()]


def compared_outputs(path: Path) -> int:
    """Count the outputs of a notebook that nbval compares: not ignored, and more than a picture."""
    count = 0
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code" or "nbval-ignore-output" in cell.metadata.get("tags", []):
            continue
        for output in cell.outputs:
            data = set(output.get("data", {"text/plain": ""})) - {"image/png", "image/jpeg"}
            count += bool(data)
    return count


def code_cells(path: Path) -> int:
    """Count the cells that nbval runs: each is a test of its own."""
    return sum(cell.cell_type == "code" for cell in nbformat.read(path, as_version=4).cells)


@pytest.mark.parametrize("number", range(len(outline.chapters())))
def test_a_solved_notebook_gives_what_is_stored_and_the_solutions(number, root, student_copy):
    chapter, path = outline.chapters()[number], solved(root)[number]
    solve_before(root, student_copy, chapter)
    done = run_nbval(student_copy, path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert f"{code_cells(path)} passed" in done.stdout
    solutions = texts_of(root / "solutions")
    todo = {id for id, entry in outline.entries().items() if entry.chapter > number}
    written = {id: text for id, text in texts_of(student_copy).items() if id not in todo}
    assert written == {id: text for id, text in solutions.items() if id not in todo}
    workspace = Workspace(student_copy)
    assert {entry.id: workspace.status(entry.id) for entry in chapter.exercises} == {
        entry.id: "passed" for entry in chapter.exercises
    }


def texts_of(course: Path) -> dict[str, str]:
    """Return what stands in the region of each exercise."""
    files = [course / "bertlab" / f"{module}.py" for module in outline.modules()]
    regions = [find_regions(path.read_text(encoding="utf-8")) for path in files]
    return {id: normalize_text(found[id].text) for found in regions for id in found}


def test_the_number_of_compared_outputs_has_not_fallen(root, capsys):
    counts = {path.stem: compared_outputs(path) for path in solved(root)}
    with capsys.disabled():
        print(f"\nnbval compares {sum(counts.values())} stored outputs: {counts}")
    assert sum(counts.values()) >= AT_LEAST_COMPARED
    assert min(counts.values()) >= 8


def test_every_solved_code_cell_was_executed(root):
    for path in solved(root):
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code":
                assert cell.execution_count is not None, (path.name, cell.id)
                assert not any(output.output_type == "error" for output in cell.outputs)


def test_one_tampered_output_makes_nbval_fail(root, student_copy, tmp_path):
    path = tmp_path / "00_start_here.ipynb"
    text = solved(root)[0].read_text(encoding="utf-8")
    assert text.count("109482240") + text.count("109,482,240") > 0
    node = nbformat.reads(text, as_version=4)
    number, output = next(
        (number, output)
        for number, cell in enumerate(node.cells)
        for output in cell.get("outputs", [])
        if "109,482,240" in output.get("data", {}).get("text/plain", "")
    )
    plain = output["data"]["text/plain"]
    output["data"]["text/plain"] = plain.replace("109,482,240", "109,482,241")
    del node.cells[number + 1 :]  # what comes after is not run once more
    nbformat.write(node, path)
    done = run_nbval(student_copy, path)
    assert done.returncode == 1
    assert "1 failed" in done.stdout
