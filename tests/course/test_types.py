"""Types, by pyright: every module as `pyproject.toml` says, and the code cells of the chapters.

Exercise cells are left out: they hold what is in solutions/. In the others, rules about types are
off where PyTorch's own annotations do not say enough (an attribute of a module may be a `Tensor` or
a `Module` to the checker); names, modules and unbound variables are checked. One run of pyright
reads everything, because half a minute of it is Transformers.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from .test_code_cells import cells
from .test_solved_notebooks import solved

#: Without these a cell may do what a module may not.
OFF_IN_CELLS = (
    "reportAttributeAccessIssue",
    "reportOptionalMemberAccess",
    "reportOptionalSubscript",
    "reportOptionalOperand",
    "reportOptionalIterable",
    "reportGeneralTypeIssues",
    "reportIndexIssue",
    "reportCallIssue",
    "reportArgumentType",
    "reportOperatorIssue",
    "reportRedeclaration",
)

#: What must be found, and the word that its message has.
SLIPS = {
    "import torch\nprint(torhc.ones(3))": "torhc",
    "from bertlab.atention import scaled_dot_product_attention": "atention",
    "for row in []:\n    width = row\nprint(width)": "width",
    "def double(x):\n    return 2 * y\n": "y",
}
#: A slip of types, in a module.
TYPE_SLIP = "from bertlab.config import BertConfig\nheads: str = BertConfig().num_attention_heads\n"


def errors_by_module(root: Path, folder: Path) -> Mapping[str, list[str]]:
    """What pyright finds in all modules, the cells, and the slips, which are put into `folder`."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    settings = settings["tool"]["pyright"] | {"venvPath": str(root)}
    grading = root / "bertlab" / "course" / "grading"  # the sandbox's worker imports from beside it
    settings["extraPaths"] = [str(root), str(grading)]
    for name in ("include", "exclude"):
        settings[name] = [os.path.relpath(root / path, folder) for path in settings[name]]
    settings["include"].append(".")
    head = "# pyright: " + ", ".join(f"{rule}=false" for rule in OFF_IN_CELLS) + "\n"
    modules = {f"{path.stem}_cells": head + cells(path) for path in solved(root)}
    assert min(len(text) for text in modules.values()) > 1000  # cells were found
    modules |= {f"slip{number}": head + slip for number, slip in enumerate(SLIPS)}
    modules["type_slip"] = TYPE_SLIP
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] > len(modules) + 100, done.stderr
    errors = defaultdict(list)
    for one in report["generalDiagnostics"]:
        if one["severity"] == "error":
            line = one["range"]["start"]["line"] + 1
            errors[Path(one["file"]).stem].append(f"{one['file']}:{line}: {one['message']}")
    return errors


def test_modules_and_cells_are_clean_and_slips_are_found(root, tmp_path):
    found = errors_by_module(root, tmp_path)
    for number, word in enumerate(SLIPS.values()):
        assert any(f'{word}"' in error for error in found[f"slip{number}"]), found
    assert any('"int"' in error and '"str"' in error for error in found["type_slip"]), found
    slips = {"type_slip", *(f"slip{number}" for number in range(len(SLIPS)))}
    assert [error for name, errors in found.items() if name not in slips for error in errors] == []
