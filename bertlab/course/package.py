"""The package in use: the student's modules, with stand-ins where a part is not done yet.

Each exercise module is loaded from its file by `StudentLoader`, never from a cached bytecode
file. Until a part has passed, the reference stands in for it wherever other code needs it; the
stand-in is labelled, and `uses` tells that it was called. What is judged is always the
student's own part.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from bertlab.course import exercise as exercises
from bertlab.course import judging, outline
from bertlab.course.regions import is_begun, is_stub, lines_of, unwritten, without_regions
from bertlab.course.workspace import Workspace, WorkspaceError, pristine_region


class StudentLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from its source, every time: two edits in one second must not mix up."""

    def __init__(self, name: str, path: str, package: "Package") -> None:
        super().__init__(name, path)
        self.package = package

    def get_code(self, fullname: str) -> CodeType:
        linecache.checkcache(self.path)
        source = self.get_data(self.path)
        return compile(source, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        _clear(module)
        text = _text_of(self.get_data(self.path))
        try:
            super().exec_module(module)
            broken = None
        except (Exception, SystemExit) as error:
            # One broken exercise must not take the rest of the package with it: the given code
            # is loaded alone, and the reference stands in for every exercise of this module.
            broken = error
            _clear(module)
            exec(compile(without_regions(text), self.path, "exec"), vars(module))
        self.package.after_import(module, text, broken)


def _text_of(data: bytes) -> str:
    """Return a file's text as `Workspace.source` would, whatever its bytes are."""
    text = data.decode("utf-8-sig", errors="replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _clear(module: ModuleType) -> None:
    for name in [name for name in vars(module) if not name.startswith("__")]:
        delattr(module, name)  # a name that is no longer in the file must not live on


class Package(importlib.abc.MetaPathFinder):
    """The exercise modules of a workspace, importable as ``bertlab.<module>``."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.uses: list[str] = []
        self._own: dict[str, dict[str, Any]] = {}
        self._stand_ins: dict[str, dict[str, Any]] = {}
        self._text: dict[str, str] = {}
        self._broken: dict[str, BaseException] = {}
        self._standing_in: set[str] = {
            id for id in outline.entries() if workspace.status(id) != "passed"
        }

    # --- importing ---

    def install(self) -> None:
        """Take over the import of the exercise modules, in place of an earlier package."""
        remove_packages()
        sys.meta_path.insert(0, self)
        self.reload(outline.modules()[0])

    def find_spec(self, fullname: str, path: Any = None, target: Any = None):
        module = fullname.removeprefix("bertlab.")
        if module == fullname or module not in outline.modules():
            return None
        file = str(self.workspace.path(module))
        loader = StudentLoader(fullname, file, self)
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)

    def module(self, name: str) -> ModuleType:
        """Return an exercise module, imported if need be."""
        return importlib.import_module(f"bertlab.{name}")

    def reload(self, first: str) -> None:
        """Load anew every imported exercise module from `first` on, in the course's order."""
        order = outline.modules()
        for name in order[order.index(first) :]:
            module = sys.modules.get(f"bertlab.{name}")
            if module is not None:
                importlib.reload(module)

    def refresh(self) -> bool:
        """Load anew what was edited since it was imported. Returns whether anything was."""
        for name in outline.modules():
            if self._is_edited(name):
                self.reload(name)
                return True
        return False

    def _is_edited(self, name: str) -> bool:
        path = self.workspace.path(name)
        if name not in self._text or not path.exists():
            return False
        return _text_of(path.read_bytes()) != self._text[name]

    def after_import(self, module: ModuleType, text: str, broken: BaseException | None) -> None:
        """Note a module's own parts, and put stand-ins where they are due."""
        name = module.__name__.removeprefix("bertlab.")
        was_broken = self._broken.pop(name, None) is not None
        self._text[name] = text
        if broken is not None:
            self._broken[name] = broken
        for entry in outline.entries().values():
            if entry.module != name:
                continue
            if broken is not None:
                self._standing_in.add(entry.id)
            elif was_broken and self.workspace.status(entry.id) == "passed":
                self._standing_in.discard(entry.id)
            self._own[entry.id] = {
                part: vars(module)[part] for part in entry.names if part in vars(module)
            }
            if entry.id in self._standing_in:
                self._bind(entry.id, stand_in=True)

    # --- stand-ins ---

    def stand_in(self, exercise_id: str) -> dict[str, Any]:
        """Return the labelled stand-ins of an exercise, by name."""
        if exercise_id not in self._stand_ins:
            reference = exercises.load(exercise_id).reference
            self._stand_ins[exercise_id] = {
                name: _labelled(part, exercise_id, self.uses) for name, part in reference.items()
            }
        return self._stand_ins[exercise_id]

    def use_own(self, exercise_id: str) -> None:
        """Use the student's own part of an exercise from now on."""
        self._standing_in.discard(exercise_id)
        self._bind(exercise_id, stand_in=False)

    def use_stand_in(self, exercise_id: str) -> None:
        """Use the stand-in of an exercise from now on."""
        self._standing_in.add(exercise_id)
        self._bind(exercise_id, stand_in=True)

    def standing_in(self) -> list[str]:
        """Return the ids of the exercises whose stand-ins are in use, in order."""
        return [id for id in outline.entries() if id in self._standing_in]

    def own(self, exercise_id: str) -> SimpleNamespace:
        """Return the student's own parts of an exercise, whatever stands in for them.

        Raises:
            WorkspaceError: the module does not define one of them.
        """
        entry = outline.entries()[exercise_id]
        self.module(entry.module)
        if entry.module in self._broken:
            raise self._broken[entry.module]
        found = self._own.get(exercise_id, {})
        missing = [name for name in entry.names if name not in found]
        if missing:
            raise WorkspaceError(
                f"bertlab/{entry.module}.py does not define `{missing[0]}`, which exercise "
                f"{exercise_id} asks for"
            )
        return SimpleNamespace(**found)

    def _bind(self, exercise_id: str, stand_in: bool) -> None:
        """Make every module that uses a part of the exercise use the one asked for."""
        own = self._own.get(exercise_id, {})
        if not own and not self._imported(exercise_id):
            return  # bound when its module is imported
        known = self._stand_ins.get(exercise_id, {})
        chosen = self.stand_in(exercise_id) if stand_in else own
        home = self._imported(exercise_id)
        for name in outline.entries()[exercise_id].names:
            replaced = [part for part in (own.get(name), known.get(name)) if part is not None]
            for user in self.loaded():
                for key, value in list(vars(user).items()):
                    if any(value is part for part in replaced) and name in chosen:
                        setattr(user, key, chosen[name])
            if home is not None and name in chosen:
                setattr(home, name, chosen[name])

    def _imported(self, exercise_id: str) -> ModuleType | None:
        return sys.modules.get(f"bertlab.{outline.entries()[exercise_id].module}")

    def loaded(self) -> list[ModuleType]:
        """Return the exercise modules that are imported, in the course's order."""
        names = [f"bertlab.{name}" for name in outline.modules()]
        return [sys.modules[name] for name in names if name in sys.modules]

    # --- judging ---

    @contextmanager
    def only(self, exercise_id: str) -> Iterator[SimpleNamespace]:
        """Give the student's own parts of an exercise, over stand-ins for what has not passed.

        So a mistake in one exercise does not fail the next one that calls it.
        """
        before = set(self._standing_in)
        parts = self.own(exercise_id)
        try:
            self.use_own(exercise_id)
            for id in outline.entries():
                if id != exercise_id and id not in before and self.workspace.status(id) != "passed":
                    self.use_stand_in(id)
            yield parts
        finally:
            for id in outline.entries():
                if (id in self._standing_in) != (id in before):
                    self.use_stand_in(id) if id in before else self.use_own(id)
            self.uses.clear()

    def judge(
        self, exercise_id: str, seed: int = judging.PUBLIC_SEED, device: str | None = None
    ) -> judging.Verdict:
        """Judge the student's own part of an exercise as its file has it now, and remember it."""
        verdict = self._judge(exercise_id, seed, device or best_device())
        if verdict.status != "error" or self._readable(exercise_id):
            self.workspace.record([verdict])
        return verdict

    def _judge(self, exercise_id: str, seed: int, device: str) -> judging.Verdict:
        entry = outline.entries()[exercise_id]
        reference = exercises.load(exercise_id)
        failed = judging.Verdict(
            exercise_id,
            "error",
            0,
            entry.points,
            device=device,
            reference=reference.reference_name,
        )
        try:
            text = self.workspace.region(exercise_id).text
            if is_stub(text):
                failed.status, failed.diagnosis = "todo", _what_is_left(exercise_id, text)
                return failed
            self.refresh()
            with self.only(exercise_id) as parts:
                return judging.judge(reference, parts, seed, device)
        except (WorkspaceError, SyntaxError) as error:
            failed.diagnosis = str(error)
        except judging.NothingJudged as error:
            failed.diagnosis = f"the course is at fault, not you: {error}"
        except (Exception, SystemExit) as error:  # the module itself cannot be loaded
            failed.diagnosis = f"bertlab/{entry.module}.py {judging.said(error)}."
            failed.diagnosis += judging.advice(error, entry.module)
            failed.frames = judging.student_frames(error, entry.module)
        return failed

    def _readable(self, exercise_id: str) -> bool:
        try:
            return bool(self.workspace.region(exercise_id).text)
        except (WorkspaceError, ValueError):
            return False


def _what_is_left(exercise_id: str, text: str) -> str:
    """Say which functions of a region are still to be written, if others have been."""
    if not is_begun(text, pristine_region(exercise_id)):
        return ""
    return "Still to be written: " + ", ".join(f"`{name}`" for name in unwritten(text)) + "."


def remove_packages() -> None:
    """Give the import of the exercise modules back to Python."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Package)]


def try_module(source: str, module: str, path: Path) -> None:
    """Execute a module's text for trial: if it raises, nothing has been written or replaced."""
    name, file = f"bertlab.{module}", f"<exercise module {module}>"
    trial = ModuleType(name)
    trial.__file__ = str(path)
    linecache.cache[file] = (len(source), None, lines_of(source), file)
    code = compile(source, file, "exec", dont_inherit=True)
    before = sys.modules.get(name)
    sys.modules[name] = trial  # dataclasses look their module up there
    try:
        exec(code, vars(trial))
    finally:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before


def best_device() -> str:
    """Return the device that checks run on: cuda, mps or cpu."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _labelled(part: Any, exercise_id: str, uses: list[str]) -> Any:
    """Return a stand-in that says what it stands in for, and notes that it was used."""

    def note() -> None:
        if exercise_id not in uses:
            uses.append(exercise_id)

    if isinstance(part, type):
        return _labelled_class(part, exercise_id, note)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        note()
        return part(*args, **kwargs)

    stand_in.__name__ = getattr(part, "__name__", "stand_in")
    stand_in.__doc__ = f"Stand-in for exercise {exercise_id}, which is not done yet."
    stand_in.__stand_in__ = exercise_id  # type: ignore[attr-defined]  # the label itself
    return stand_in


def _labelled_class(part: type, exercise_id: str, note: Any) -> type:
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        note()
        super(labelled, self).__init__(*args, **kwargs)

    labelled = type(
        part.__name__,
        (part,),
        {
            "__init__": initialize,
            "__doc__": f"Stand-in for exercise {exercise_id}, which is not done yet.",
            "__stand_in__": exercise_id,
            "__module__": part.__module__,
        },
    )
    return labelled
