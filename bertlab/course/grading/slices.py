"""The part of an exercise file that may enter the sandbox: how a part is called, and no answer.

A probe says how the student's part is called. It stands in a file with the reference and the
misconceptions, which must not be where the student's code can read them. So the probe is cut out
with what it needs: the top-level statements that it reaches by name, in its module and in the
course's other modules.
"""

import ast
import importlib
from functools import cache
from pathlib import Path
from typing import Any

from bertlab.course.exercise import Exercise


class AnswerInProbe(RuntimeError):
    """A probe reaches something that must not enter the sandbox."""


class NamelessProbe(RuntimeError):
    """A probe that cannot be cut out: no function of its file has its name."""


def helpers_of(exercise: Exercise) -> dict[str, str]:
    """Return the modules with which an exercise's probe can be called: name to text.

    Raises:
        AnswerInProbe: the probe reaches the exercise's own reference or the list of exercises.
        NamelessProbe: the probe is a lambda, say, or a function made inside another.
    """
    home, name = exercise.probe.__module__, getattr(exercise.probe, "__name__", "")
    if getattr(importlib.import_module(home), name, None) is not exercise.probe:
        raise NamelessProbe(
            f"the probe of exercise {exercise.id} is {exercise.probe}, but must be a function at "
            "the top level of its file: it is cut out of the file and called by its name"
        )
    answers = {(home, _name_of(part)) for part in exercise.reference.values()}
    return sliced({(home, name)}, frozenset(answers | {(home, "EXERCISES")}))


def _name_of(part: Any) -> str:
    """The name that leads to a part: its own, or that of the class it is an object or method of."""
    owner = getattr(part, "__self__", part)
    return getattr(owner, "__name__", type(owner).__name__)


def sliced(
    wanted: set[tuple[str, str]], forbidden: frozenset[tuple[str, str]] = frozenset()
) -> dict[str, str]:
    """Return what the wanted names reach in the course's modules: module name to text.

    Args:
        wanted: pairs of a module of the course and a name at its top level.
        forbidden: pairs that must not be reached.

    Raises:
        AnswerInProbe: one of the `forbidden` is reached.
    """
    reached: set[tuple[str, str]] = set()
    waiting = sorted(wanted)
    while waiting:
        module, name = waiting.pop()
        statement = defined_in(module).get(name)
        if statement is None or (module, name) in reached:
            continue
        if (module, name) in forbidden:
            raise AnswerInProbe(f"{sorted(wanted)} reach {name} of {module}")
        reached.add((module, name))
        local = _imported_inside(statement)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id not in local:
                waiting.append((module, node.id))
            if isinstance(node, ast.ImportFrom) and _is_course(node.module):
                waiting += [(str(node.module), alias.name) for alias in node.names]
    return {module: _text(module, reached) for module in sorted({module for module, _ in reached})}


def _text(module: str, reached: set[tuple[str, str]]) -> str:
    kept = [
        statement
        for statement in _tree(module).body
        if _is_future(statement) or any((module, name) in reached for name in _bound_by(statement))
    ]
    return "\n\n".join(map(ast.unparse, kept)) + "\n"


@cache
def _tree(module: str) -> ast.Module:
    file = importlib.import_module(module).__file__
    return ast.parse(Path(str(file)).read_text(encoding="utf-8"))


@cache
def defined_in(module: str) -> dict[str, ast.stmt]:
    """The names that a module binds at its top level, and the statements that bind them."""
    return {name: statement for statement in _tree(module).body for name in _bound_by(statement)}


def _bound_by(statement: ast.stmt) -> list[str]:
    """The names that a top-level statement binds."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).split(".")[0] for alias in statement.names]
    if isinstance(statement, ast.Assign):
        names = [node for target in statement.targets for node in ast.walk(target)]
        return [node.id for node in names if isinstance(node, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    if isinstance(statement, ast.If):  # TYPE_CHECKING
        return [name for inner in statement.body for name in _bound_by(inner)]
    return []


def _imported_inside(statement: ast.stmt) -> set[str]:
    """The names that imports in a function's body bind: they are not the module's."""
    inside = [node for node in ast.walk(statement) if node is not statement]
    imports = [node for node in inside if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {name for node in imports for name in _bound_by(node)}


def _is_course(module: str | None) -> bool:
    return module is not None and module.startswith("bertlab.course.")


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
