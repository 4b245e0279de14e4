"""The code cells of the chapters, linted by Ruff; `test_types.py` has pyright follow their names.

Exercise cells are left out: they hold what is in solutions/, which is checked there.
"""

import subprocess
import sys
from pathlib import Path

import nbformat

from .test_solved_notebooks import solved

#: What Ruff looks for in cells. A cell may be a little wider than a line of a module.
RUFF = ["--select", "E,W,F,I,UP,B,SIM,C4,RET,RUF", "--line-length", "110"]
#: Imports stand where they are needed; wide characters are meant; lists here are short.
RUFF += ["--ignore", "E402,RUF001,RUF002,RUF003,RUF017,B905", "--target-version", "py311"]


def cells(path: Path) -> str:
    """The code of a notebook as a module: magics as comments, exercise cells left out."""
    parts = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code" or cell.source.startswith("%%"):
            continue
        lines = cell.source.split("\n")
        parts.append("\n".join(f"# {x}" if x.startswith(("%", "!")) else x for x in lines))
    return "\n\n".join(parts) + "\n"


def ruff(paths: list[Path]) -> subprocess.CompletedProcess[str]:
    """Lint notebooks; Ruff knows what a cell and a magic are."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", *RUFF, *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_cells_pass_the_linter(root):
    done = ruff(solved(root))
    assert done.returncode == 0, done.stdout


def test_a_slip_in_a_cell_is_found(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import os\nprint(3)")])
    nbformat.write(notebook, tmp_path / "slip.ipynb")
    assert "F401" in ruff([tmp_path / "slip.ipynb"]).stdout
