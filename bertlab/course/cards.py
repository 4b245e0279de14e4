"""The cards that `%%fill`, `%check` and `%hint` show; `path` has that of `%status`."""

from bertlab.course import exercise as exercises
from bertlab.course import outline
from bertlab.course.display import Shown, card
from bertlab.course.judging import Verdict
from bertlab.course.regions import lines_of
from bertlab.course.workspace import RegionChanged, Workspace


def title(exercise_id: str) -> str:
    """Return the title of a card for an exercise."""
    return f"{exercise_id} {outline.entries()[exercise_id].title}"


def of_verdict(verdict: Verdict, filled: bool = False) -> Shown:
    """Return the card of a verdict.

    Args:
        filled: the part was just written from a notebook, which uses it from now on.
    """
    if verdict.status == "failed":
        return _failed(verdict, filled)
    return {"passed": _passed, "todo": _todo, "error": _error}[verdict.status](verdict)


def _passed(verdict: Verdict) -> Shown:
    return card(
        "passed",
        title(verdict.exercise),
        soft=[
            f"{len(verdict.cases)} cases agree with {verdict.reference}; "
            f"{verdict.points} of {verdict.max_points} points."
        ],
    )


def _failed(verdict: Verdict, filled: bool) -> Shown:
    passed = [case for case in verdict.cases if case.passed]
    failed = [case for case in verdict.cases if not case.passed]
    paragraphs = [verdict.diagnosis]
    if verdict.misconception:
        paragraphs.insert(0, f"It does what people get when {verdict.misconception}.")
    items = [f"✗ {case.name}: {case.message}" for case in failed[:5]]
    if len(failed) > 5:
        items.append(f"✗ and {len(failed) - 5} more")
    if passed:
        items.append("✓ right on: " + "; ".join(case.name for case in passed))
    return card(
        "failed",
        title(verdict.exercise),
        paragraphs,
        code=verdict.frames,
        items=items,
        soft=[
            f"Compared with {verdict.reference}. Stuck? `%hint {verdict.exercise}`",
            *([_IN_USE] if filled else []),
        ],
    )


_IN_USE = (
    "This notebook uses your version from now on, so that you can look at what it does. After a "
    "restart of the kernel, and in other notebooks, the reference stands in until yours passes."
)


def _todo(verdict: Verdict) -> Shown:
    entry = outline.entries()[verdict.exercise]
    begun = f"What you have written is in bertlab/{entry.module}.py. {verdict.diagnosis}"
    return card(
        "todo",
        title(verdict.exercise),
        [
            *([begun] if verdict.diagnosis else []),
            f"Replace `raise NotImplementedError(...)` above and run the cell. "
            f"About {entry.minutes} minutes, {entry.points} points; `%hint {entry.id}` helps.",
        ],
        soft=[f"Until then {verdict.reference} stands in for it wherever it is needed."],
    )


def _error(verdict: Verdict) -> Shown:
    return problem(verdict.exercise, verdict.diagnosis, verdict.frames)


def syntax_error(exercise_id: str, error: SyntaxError, cell: str) -> Shown:
    """Return the card for a cell that is not Python: the cell's own line, and a caret."""
    number = error.lineno or 1
    lines = lines_of(cell)
    line = lines[number - 1].rstrip("\n") if 0 < number <= len(lines) else ""
    caret = " " * max((error.offset or 1) - 1, 0) + "^"
    paragraphs = [
        f"Line {number} of your code is not Python: {error.msg}. Nothing was written; the package "
        "is as it was."
    ]
    if line.lstrip().startswith(("%", "!")):
        paragraphs.append(
            "This cell becomes part of a module, so notebook magics and shell lines do not work "
            "in it; put them into a cell of their own."
        )
    return card("error", title(exercise_id), paragraphs, code=f"{line}\n{caret}")


def problem(exercise_id: str, message: str, code: str = "") -> Shown:
    """Return the card for a fill that was refused, or a check that could not be made."""
    return card("error", title(exercise_id), [message.rstrip(".") + "."], code=code)


def interrupted(exercise_id: str, *others: str) -> Shown:
    """Return the card for a fill or check that was interrupted."""
    return card(
        "error",
        f"{exercise_id} to {others[-1]}" if others else title(exercise_id),
        [
            "Interrupted before there was a verdict. Did a loop never end? What is in the package "
            f"now: `%check {exercise_id}` judges it, `%pull {exercise_id}` shows it."
        ],
        word="interrupted",
    )


def conflict(error: RegionChanged) -> Shown:
    """Return the card for a region that was changed outside the notebook."""
    return card(
        "error",
        title(error.exercise_id),
        [
            "The package holds work on this exercise that this notebook did not write (from an "
            "editor or another notebook), so nothing was overwritten. The difference:"
        ],
        code=error.difference,
        items=[
            f"to take the package's version into the cell: `%pull {error.exercise_id}`",
            f"to write this cell over it: `%%fill {error.exercise_id} --overwrite` "
            "(the other version goes into the history)",
        ],
        word="not written",
    )


def hint(exercise_id: str, number: int) -> Shown:
    """Return the card of one hint, counted from 1."""
    hints = exercises.load(exercise_id).hints
    more = f"`%hint {exercise_id}` again says more." if number < len(hints) else "The last hint."
    return card(
        "note",
        f"{title(exercise_id)}: hint {number} of {len(hints)}",
        [hints[number - 1]],
        soft=[more],
    )


def next_hint(workspace: Workspace, exercise_id: str) -> int:
    """Return the number of the next hint, and remember that it was shown."""
    seen = workspace.progress().get(exercise_id, {}).get("hints", 0)
    number = min(seen + 1, len(exercises.load(exercise_id).hints))
    workspace.remember(exercise_id, hints=number)
    return number
