"""From a chapter's source to its two notebooks: the student's, and the solved one.

A source is Markdown with code cells (jupytext's format). An exercise stands in it as an empty
cell that names it, so that prose and code each have one home::

    ```python exercise="3.1"
    ```

The student's notebook gets the stub there, the solved one the solution, both from
``solutions/bertlab/``.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from bertlab.course import outline
from bertlab.course.regions import find_regions, lines_of, normalize_text, stub

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


class ChapterError(ValueError):
    """A chapter's source asks for something that is not there."""


def notebook(root: Path, chapter: outline.Chapter, solved: bool) -> NotebookNode:
    """Return a chapter's notebook without outputs, made from its source.

    Raises:
        ChapterError: the source names an exercise without a region, or misses one of its own.
    """
    source = (root / "solutions" / "chapters" / f"{chapter.file}.md").read_text(encoding="utf-8")
    cells = jupytext.reads(source, fmt="md").cells
    named = [cell.metadata["exercise"] for cell in cells if "exercise" in cell.metadata]
    expected = [entry.id for entry in chapter.exercises]
    if named != expected:
        raise ChapterError(f"{chapter.file}.md has cells for {named}; book.toml says {expected}")
    made = [_cell(root, chapter, number, cell, solved) for number, cell in enumerate(cells)]
    # A fixed version of the format, and ids that do not change from one build to the next.
    return NotebookNode(
        cells=made,
        metadata=NotebookNode(kernelspec=NotebookNode(_KERNEL), language_info={"name": "python"}),
        nbformat=4,
        nbformat_minor=5,
    )


def _cell(
    root: Path, chapter: outline.Chapter, number: int, cell: NotebookNode, solved: bool
) -> NotebookNode:
    identity = f"{chapter.file[:2]}-{number:03d}"
    if cell.cell_type == "markdown":
        return NotebookNode(
            cell_type="markdown", id=identity, metadata=NotebookNode(), source=cell.source
        )
    exercise_id = cell.metadata.get("exercise")
    source = _exercise_source(root, exercise_id, solved) if exercise_id else cell.source
    metadata = NotebookNode()
    if cell.metadata.get("tags"):
        metadata["tags"] = list(cell.metadata["tags"])
    if cell.metadata.get("alt"):  # what stands for a figure where it cannot be seen
        metadata["alt"] = cell.metadata["alt"]
    return NotebookNode(
        cell_type="code",
        id=identity,
        metadata=metadata,
        source=source,
        execution_count=None,
        outputs=[],
    )


def _exercise_source(root: Path, exercise_id: str, solved: bool) -> str:
    module = outline.entries()[exercise_id].module
    text = (root / "solutions" / "bertlab" / f"{module}.py").read_text(encoding="utf-8")
    region = find_regions(text).get(exercise_id)
    if region is None:
        raise ChapterError(f"solutions/bertlab/{module}.py has no region for {exercise_id}")
    body = normalize_text(region.text) if solved else stub(region.text, exercise_id)
    return f"%%fill {exercise_id}\n{body.rstrip()}"


def written(node: NotebookNode) -> str:
    """Return the text of a notebook file."""
    return nbformat.writes(node) + "\n"


def source_hash(root: Path, chapter: outline.Chapter) -> str:
    """Return a hash of what the outputs of a solved notebook come from: its code and its checks.

    Prose is not in it: to mend a sentence, nothing need be executed again. Nor is what later
    chapters add to a module that several share, such as the clinic.
    """
    modules = sorted({entry.module for entry in chapter.exercises})
    paths = [root / "solutions" / "bertlab" / f"{module}.py" for module in modules]
    paths += [root / "bertlab" / "course" / "exercises" / f"chapter_{chapter.number}.py"]
    digest = hashlib.sha256()
    for cell in notebook(root, chapter, solved=True).cells:
        if cell.cell_type == "code":
            digest.update(f"{cell.source}\0{cell.metadata.get('tags', '')}\0".encode())
    for path in paths:
        text = path.read_text(encoding="utf-8")
        digest.update(_before_later_chapters(text, chapter.number).encode())
    return digest.hexdigest()[:16]


def _before_later_chapters(text: str, number: int) -> str:
    """Return a module's text up to the first region of a chapter after this one."""
    for exercise_id, region in find_regions(text).items():
        if int(exercise_id.split(".")[0]) > number:
            lines = lines_of(text)[: region.first_line - 2]  # its opening comment is left out
            return "".join(lines).rstrip() + "\n"
    return text


def with_outputs_of(node: NotebookNode, stored: NotebookNode) -> NotebookNode | None:
    """Return a notebook with the outputs of an executed one; None unless their code is the same."""
    code = [cell for cell in node.cells if cell.cell_type == "code"]
    executed = [cell for cell in stored.cells if cell.cell_type == "code"]
    if [cell.source for cell in code] != [cell.source for cell in executed]:
        return None
    for cell, other in zip(code, executed, strict=True):
        cell.outputs, cell.execution_count = other.outputs, other.execution_count
    return without_unstable(node)


def execute(node: NotebookNode, folder: Path, root: Path) -> NotebookNode:
    """Run a notebook in `folder` on the package below `root`, and keep its stable outputs."""
    client = NotebookClient(
        node,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=environment(root))
    for cell in node.cells:
        if cell.cell_type == "code":
            cell.outputs = [_stable(output) for output in _joined(cell.outputs) if _kept(output)]
    node.metadata.language_info = {"name": "python"}
    return without_unstable(node)


def without_unstable(node: NotebookNode) -> NotebookNode:
    """The notebook without outputs that nbval ignores: times, machines, what other chapters say.

    They are for the reader's own run.
    """
    for cell in node.cells:
        if "nbval-ignore-output" in cell.metadata.get("tags", []):
            cell.outputs = []
    return node


def environment(root: Path) -> dict[str, str]:
    """Return the environment in which stored outputs are made and compared."""
    # A backend that was chosen for scripts would keep plots out of the notebook.
    inherited = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    return {
        **inherited,
        "PYTHONPATH": str(root),
        "BERTLAB_REFERENCE": "seeded",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TQDM_DISABLE": "1",
        "OMP_NUM_THREADS": "1",  # sums in one order, whatever the number of cores
        "PYTHONHASHSEED": "0",
    }


def _kept(output: NotebookNode) -> bool:
    return not (output.output_type == "stream" and output.name == "stderr")


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join neighbouring pieces of the same stream: how a stream is cut is a matter of chance."""
    joined: list[NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and output.output_type == last.output_type == "stream"
            and output.name == last.name
        ):
            last.text += output.text
        else:
            joined.append(output)
    return joined


def _stable(output: NotebookNode) -> NotebookNode:
    data: dict[str, Any] = output.get("data", {})
    data.pop(_WIDGET_VIEW, None)  # its model's id is drawn anew each time
    output.pop("execution_count", None)
    if output.output_type == "execute_result":
        output["execution_count"] = None
    return output


def summary(chapters: tuple[outline.Chapter, ...]) -> str:
    """Return SUMMARY.md, the book's table of contents, from the outline."""
    lines = ["# Summary", ""]
    lines += [f"- [{c.number} {c.title}]({c.file}.ipynb)" for c in chapters]
    return "\n".join(lines) + "\n"
