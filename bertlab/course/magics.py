"""The notebook's magics: ``%%fill``, ``%check``, ``%hint``, ``%pull`` and ``%status``."""

import ast
import importlib
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.display import display

from bertlab.course import cards, judging, outline, path
from bertlab.course.display import Shown, card
from bertlab.course.elsewhere import judged_elsewhere
from bertlab.course.package import Package, remove_packages, try_module
from bertlab.course.regions import RegionError, fingerprint, is_begun, is_stub
from bertlab.course.workspace import RegionChanged, Workspace, WorkspaceError, pristine_region


def register(shell: Any) -> None:
    """Register the magics and take over the import of the exercise modules."""
    previous = getattr(shell, "_bertlab", None)
    if previous is not None:
        previous.unregister()
    magics = CourseMagics(shell)
    shell.register_magics(magics)
    shell._bertlab = magics
    display(magics.welcome())


@magics_class
class CourseMagics(Magics):
    """The magics of one notebook, on the package that its kernel imports."""

    shell: Any

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # only `bertlab download` uses the network
        self.workspace = Workspace()
        self.package = Package(self.workspace)
        self.package.install()
        self._warm_up: threading.Thread | None = None
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._after_cell)
        shell.input_transformers_cleanup.append(_with_a_body)

    def unregister(self) -> None:
        """Let go of the notebook, so that the extension can be loaded anew."""
        self.shell.events.unregister("pre_run_cell", self._before_cell)
        self.shell.events.unregister("post_run_cell", self._after_cell)
        self.shell.input_transformers_cleanup.remove(_with_a_body)
        remove_packages()

    def welcome(self) -> Shown:
        """Return the card that the notebook's first cell shows."""
        other = Path.cwd().parent / "bertlab" / "config.py"
        if other.exists() and other.resolve() != self.workspace.path("config").resolve():
            return card(
                "error",
                "This notebook is not using the package beside it",
                [
                    f"The kernel imports bertlab from `{self.workspace.root}`, not from the folder "
                    "of this notebook, so `%%fill` would write there. Start JupyterLab with "
                    "`make lab` in the folder you want to work in."
                ],
            )
        return card(
            "note",
            "The course is loaded",
            [
                "`%%fill` writes a cell into the package and checks it; `%hint 3.1` helps, "
                "`%check 3` judges a chapter, `%status` shows where you are."
            ],
        )

    # --- the magics ---

    @cell_magic
    def fill(self, line: str, cell: str) -> None:
        """Write the cell into the package, reload it, and check it: ``%%fill 3.1``."""
        words = line.split()
        overwrite = "--overwrite" in words
        exercise_id = self._one_id([word for word in words if word != "--overwrite"], "%%fill")
        if exercise_id is None:
            return
        try:
            refused = self._filled(exercise_id, cell, overwrite)
            display(refused or self._judged(exercise_id, filled=True))
        except KeyboardInterrupt:
            display(cards.interrupted(exercise_id))

    @line_magic
    def check(self, line: str) -> None:
        """Judge what is in the package now: ``%check 3.1`` here, ``%check 3`` in a new process."""
        try:
            ids = outline.select(line.split())
        except outline.UnknownExercise as error:
            display(card("error", "%check", [str(error)]))
            return
        try:
            if line.strip() in ids:  # one exercise, not a chapter
                with self._rebinding():
                    self.package.refresh()
                display(self._judged(ids[0]))
            else:
                self._judge_elsewhere(ids)
        except KeyboardInterrupt:
            display(cards.interrupted(*ids))

    @line_magic
    def hint(self, line: str) -> None:
        """Show the next hint of an exercise: ``%hint 3.1``."""
        exercise_id = self._one_id(line.split(), "%hint")
        if exercise_id is not None:
            display(cards.hint(exercise_id, cards.next_hint(self.workspace, exercise_id)))

    @line_magic
    def pull(self, line: str) -> None:
        """Put the package's version of a region into a cell: ``%pull 3.1``."""
        exercise_id = self._one_id(line.split(), "%pull")
        if exercise_id is None:
            return
        try:
            text = self.workspace.region(exercise_id).text
        except (WorkspaceError, RegionError) as error:
            display(cards.problem(exercise_id, str(error)))
            return
        self.workspace.remember(exercise_id, filled=fingerprint(text))
        self.shell.set_next_input(f"%%fill {exercise_id}\n{text.rstrip()}", replace=False)
        display(
            card(
                "note",
                cards.title(exercise_id),
                ["The cell below holds the package's version; run it to check it."],
            )
        )

    @line_magic
    def status(self, line: str) -> None:
        """Show the whole course at a glance."""
        display(path.card(self.workspace))

    # --- filling ---

    def _filled(self, exercise_id: str, cell: str, overwrite: bool) -> Shown | None:
        """Write a cell into the package; return a card if it was not written."""
        refusal = self._refusal(exercise_id, cell)
        if refusal is not None:
            return refusal
        if is_stub(cell) and not is_begun(cell, pristine_region(exercise_id)):
            return self._stub_cell(exercise_id)
        return self._write(exercise_id, cell, overwrite)

    def _one_id(self, words: list[str], magic: str) -> str | None:
        """Return the one exercise that is named, or show what is wrong and return None."""
        try:
            ids = outline.select(words) if len(words) == 1 else []
        except outline.UnknownExercise as error:
            display(card("error", magic, [str(error)]))
            return None
        if len(ids) != 1 or words[0] != ids[0]:
            display(card("error", magic, [f"Name one exercise, as in `{magic} 3.1`."]))
            return None
        return ids[0]

    def _refusal(self, exercise_id: str, cell: str) -> Shown | None:
        """Return a card that says why the cell cannot go into the package, if it cannot."""
        if not cell.strip():
            return cards.problem(exercise_id, "The cell is empty. Nothing was written.")
        try:
            compile(cell, f"<exercise {exercise_id}>", "exec", dont_inherit=True)
        except SyntaxError as error:
            return cards.syntax_error(exercise_id, error, cell)
        except ValueError as error:
            return cards.problem(exercise_id, f"The cell is not Python: {error}")
        missing = _missing_names(cell, outline.entries()[exercise_id].names)
        if missing:
            defined = ", ".join(f"`{name}`" for name in _defined_names(cell)) or "nothing"
            return cards.problem(
                exercise_id,
                f"This cell does not define `{missing[0]}`, which exercise {exercise_id} asks "
                f"for; it defines {defined}. Nothing was written.",
            )
        return None

    def _stub_cell(self, exercise_id: str) -> Shown | None:
        """A cell that is still to do is never written over work that is in the package."""
        try:
            if is_stub(self.workspace.region(exercise_id).text):
                return None
        except (SyntaxError, WorkspaceError, RegionError) as error:
            return cards.problem(exercise_id, str(error))
        return card(
            "todo",
            cards.title(exercise_id),
            [
                "This cell is still to do, but the package already holds your work on it, which "
                f"stays as it is. `%pull {exercise_id}` brings it here, `%check {exercise_id}` "
                "judges it."
            ],
        )

    def _write(self, exercise_id: str, cell: str, overwrite: bool) -> Shown | None:
        """Write the cell into its region and load the package anew. Returns a card on refusal."""
        module = outline.entries()[exercise_id].module
        try:
            try_module(
                self.workspace.with_region(exercise_id, cell), module, self.workspace.path(module)
            )
        except (WorkspaceError, RegionError) as error:
            return cards.problem(exercise_id, f"{error}. Nothing was written.")
        except (Exception, SystemExit) as error:
            return cards.problem(
                exercise_id,
                f"With this cell in it, bertlab/{module}.py cannot be loaded: it "
                f"{judging.said(error).rstrip('.')}. Nothing was written; the package is as it "
                f"was.{judging.advice(error, module)}",
                judging.student_frames(error, module),
            )
        try:
            self.workspace.fill(exercise_id, cell, overwrite)
        except RegionChanged as error:
            return cards.conflict(error)
        except WorkspaceError as error:
            return cards.problem(exercise_id, str(error))
        with self._rebinding():
            self.package.reload(module)
            if is_stub(cell):  # a part is left to do, and the whole could not be used
                self.package.use_stand_in(exercise_id)
                return None
            self.package.use_own(exercise_id)
        self.shell.user_ns.update(vars(self.package.own(exercise_id)))
        return None

    @contextmanager
    def _rebinding(self) -> Iterator[None]:
        """Let names that the notebook imported from the package follow the package's new ones."""
        before = {
            module: {
                name: part
                for name, part in vars(module).items()
                if isinstance(part, (type, FunctionType))
            }
            for module in self.package.loaded()
        }
        yield
        fresh = {
            id(part): vars(module)[name]
            for module, parts in before.items()
            for name, part in parts.items()
            if name in vars(module)
        }
        for name, value in list(self.shell.user_ns.items()):
            if id(value) in fresh:
                self.shell.user_ns[name] = fresh[id(value)]

    # --- judging ---

    def _judged(self, exercise_id: str, filled: bool = False) -> Shown:
        self._join_warm_up()
        shown = cards.of_verdict(self.package.judge(exercise_id), filled)
        self._start_warm_up()
        return shown

    def _judge_elsewhere(self, ids: list[str]) -> None:
        """Judge in a fresh process, so that nothing of this kernel can help or hurt."""
        with tempfile.TemporaryFile() as output:  # what the student's code prints
            try:
                for verdict in judged_elsewhere(self.workspace.root, ids, output=output):
                    display(cards.of_verdict(verdict))
            except WorkspaceError as error:
                display(card("error", "%check", [str(error)]))

    # --- Transformers takes seconds to import: do it while the student reads ---

    def _start_warm_up(self) -> None:
        if self._warm_up is None:
            self._warm_up = threading.Thread(target=_import_reference, daemon=True)
            self._warm_up.start()

    def _join_warm_up(self) -> None:
        if self._warm_up is not None:
            self._warm_up.join()

    def _before_cell(self, info: Any) -> None:
        if info is not None and "transformers" in (info.raw_cell or ""):
            self._join_warm_up()
        self.package.uses.clear()

    def _after_cell(self, result: Any) -> None:
        if self.package.uses:
            names = "; ".join(cards.title(id) for id in sorted(self.package.uses))
            print(f"(on a stand-in for what is not done yet: {names})")
            self.package.uses.clear()


def _with_a_body(lines: list[str]) -> list[str]:
    """Give a `%%fill` without a cell an empty line: IPython calls no magic on nothing."""
    if len(lines) == 1 and lines[0].startswith("%%fill"):
        return [lines[0].rstrip() + "\n", "\n"]
    return lines


def _import_reference() -> None:
    importlib.import_module("transformers.models.bert.modeling_bert")


def _defined_names(cell: str) -> list[str]:
    names: list[str] = []
    for node in ast.parse(cell).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [alias.asname or alias.name for alias in node.names]
    return names


def _missing_names(cell: str, names: tuple[str, ...]) -> list[str]:
    defined = _defined_names(cell)
    return [name for name in names if name not in defined]
