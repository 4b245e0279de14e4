"""The code cells of the chapters: linted by Ruff, and their names and calls followed by pyright.

Exercise cells are left out: they hold what is in solutions/, which is checked there. Rules about
types are off where PyTorch's own annotations do not say enough (an attribute of a module may be a
`Tensor` or a `Module` to the checker); names, modules and unbound variables are checked.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from .test_solved_notebooks import solved

#: What Ruff looks for in cells. A cell may be a little wider than a line of a module.
RUFF = ["--select", "E,W,F,I,UP,B,SIM,C4,RET,RUF", "--line-length", "110"]
#: Imports stand where they are needed; wide characters are meant; lists here are short.
RUFF += ["--ignore", "E402,RUF001,RUF002,RUF003,RUF017,B905", "--target-version", "py311"]

PYRIGHT: dict = {
    "pythonVersion": "3.11",
    "typeCheckingMode": "standard",
    "reportAttributeAccessIssue": False,
    "reportOptionalMemberAccess": False,
    "reportOptionalSubscript": False,
    "reportOptionalOperand": False,
    "reportOptionalIterable": False,
    "reportGeneralTypeIssues": False,
    "reportIndexIssue": False,
    "reportCallIssue": False,
    "reportArgumentType": False,
    "reportOperatorIssue": False,
    "reportRedeclaration": False,
}


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


def pyright(folder: Path, modules: dict[str, str]) -> list[str]:
    """Check modules beside the complete package in `folder`; return the errors, one a line."""
    for name, text in modules.items():
        (folder / name).write_text(text, encoding="utf-8")
    settings = {**PYRIGHT, "include": list(modules)}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [
        f"{Path(one['file']).stem} line {one['range']['start']['line'] + 1}: {one['message']}"
        for one in found
        if one["severity"] == "error"
    ]


@pytest.fixture
def beside_the_package(root, tmp_path) -> Path:
    shutil.copytree(root / "bertlab", tmp_path / "bertlab")
    shutil.copytree(root / "solutions" / "bertlab", tmp_path / "bertlab", dirs_exist_ok=True)
    return tmp_path


def test_cells_pass_the_linter(root):
    done = ruff(solved(root))
    assert done.returncode == 0, done.stdout


def test_cells_name_only_what_there_is(root, beside_the_package):
    modules = {f"{path.stem}_cells.py": cells(path) for path in solved(root)}
    assert min(len(text) for text in modules.values()) > 500  # cells were found
    assert pyright(beside_the_package, modules) == []


def test_a_slip_in_a_cell_is_found(tmp_path, beside_the_package):
    slips = {
        "import torch\nprint(torhc.ones(3))": "torhc",
        "from bertlab.atention import scaled_dot_product_attention": "atention",
        "for row in []:\n    width = row\nprint(width)": "width",
        "def double(x):\n    return 2 * y\n": "y",
    }
    modules = {f"slip{number}.py": text for number, text in enumerate(slips)}
    said = pyright(beside_the_package, modules)
    for number, word in enumerate(slips.values()):
        assert any(line.startswith(f"slip{number} ") and word in line for line in said), said
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import os\nprint(3)")])
    nbformat.write(notebook, tmp_path / "slip.ipynb")
    assert "F401" in ruff([tmp_path / "slip.ipynb"]).stdout
