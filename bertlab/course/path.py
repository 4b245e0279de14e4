"""The course as a path: what is done, what is next, and how long the rest takes.

`%status` shows it as a card, ``bertlab lab`` as the page that JupyterLab opens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from bertlab.course import outline
from bertlab.course.display import SIGNS, WORDS, Shown
from bertlab.course.workspace import Workspace, write_atomically

#: The page, beside ``chapters/``; made anew by every ``bertlab lab``.
PAGE = "where_you_are.md"


@dataclass(frozen=True)
class Step:
    """One chapter of the path.

    Attributes:
        states: passed, failed, error, todo or stale, by exercise id.
        is_next: the next exercise is here.
    """

    chapter: outline.Chapter
    states: Mapping[str, str]
    is_next: bool

    @property
    def done(self) -> int:
        return sum(state == "passed" for state in self.states.values())

    @property
    def is_done(self) -> bool:
        return self.done == len(self.states)

    @property
    def minutes_left(self) -> int:
        left = (entry for entry in self.chapter.exercises if self.states[entry.id] != "passed")
        return sum(entry.minutes for entry in left)

    @property
    def progress(self) -> str:
        """``2 of 6 done, 40 min left``."""
        said = f"{self.done} of {len(self.states)} done"
        return said if self.is_done else f"{said}, {self.minutes_left} min left"


def steps(workspace: Workspace) -> list[Step]:
    """Return the chapters with the state of their exercises, in order."""
    states = {id: workspace.status(id) for id in outline.entries()}
    following = next_exercise(states)
    return [
        Step(
            chapter,
            {entry.id: states[entry.id] for entry in chapter.exercises},
            following in [entry.id for entry in chapter.exercises],
        )
        for chapter in outline.chapters()
    ]


def next_exercise(states: Mapping[str, str]) -> str | None:
    """Return the first exercise that is not passed; None when all are."""
    return next((id for id, state in states.items() if state != "passed"), None)


def summary(path: list[Step]) -> str:
    """Return one line: points, time left, and the next exercise."""
    states = {id: state for step in path for id, state in step.states.items()}
    entries = outline.entries()
    following = next_exercise(states)
    if following is None:
        return "Everything is done."
    points = sum(entries[id].points for id, state in states.items() if state == "passed")
    total = sum(entry.points for entry in entries.values())
    minutes = sum(step.minutes_left for step in path)
    return (
        f"{points} of {total} points; about {minutes} minutes left. "
        f"Next: {following} {entries[following].title}."
    )


LEGEND = "Signs: " + ", ".join(f"{SIGNS[key]} {WORDS[key]}" for key in SIGNS if key != "note") + "."


# --- as a card ---


def card(workspace: Workspace) -> Shown:
    """Return the course at a glance: a line for each chapter, what is next, what is left."""
    path = steps(workspace)
    closing = [summary(path), LEGEND]
    html = (
        '<div class="bertlab card note"><div class="head"><b>The course at a glance</b></div>'
        f'<ol class="path">{"".join(_item(step) for step in path)}</ol>'
        + "".join(f'<p class="soft">{escape(line)}</p>' for line in closing)
        + "</div>"
    )
    return Shown(html, "\n".join(["The course at a glance", *_lines(path), *closing]))


def _item(step: Step) -> str:
    look = "done" if step.is_done else "here" if step.is_next else ""
    chips = " &ensp;".join(
        f'<span class="chip {state}" title="{escape(outline.entries()[id].title)}: {WORDS[state]}">'
        f'<span class="sign">{SIGNS[state]}</span> {id}</span>'
        for id, state in step.states.items()
    )
    name = f"{'→ ' if step.is_next else ''}{step.chapter.number} {step.chapter.title}"
    return (
        f'<li class="{look}"><div class="line"><b>{escape(name)}</b>'
        f'<span class="soft">{step.progress}</span></div><div>{chips}</div></li>'
    )


def _lines(path: list[Step]) -> list[str]:
    """A line for each chapter, in columns."""
    rows = [
        (
            f"{'→' if step.is_next else ' '} {step.chapter.number} {step.chapter.title}",
            step.progress,
            " ".join(f"{SIGNS[state]} {id}" for id, state in step.states.items()),
        )
        for step in path
    ]
    wide, middle = (max(len(row[i]) for row in rows) for i in (0, 1))
    return [f"{name:<{wide}}  {progress:<{middle}}  {signs}" for name, progress, signs in rows]


# --- as the page that `bertlab lab` opens ---


def page(workspace: Workspace) -> str:
    """Return the path as Markdown, with links to the chapters."""
    path = steps(workspace)
    lines = ["# Where you are", "", _invitation(path), "", "| | chapter | exercises | |"]
    lines += ["| --- | --- | --- | --- |", *map(_row, path), ""]
    lines += [f"{summary(path)} {LEGEND}", ""]
    lines += [
        "This page is made anew when you run `bertlab lab`; `%status` in a notebook shows the same "
        "as it is now. In a notebook, `%%fill` writes a cell into your package and checks it, "
        "`%hint` helps, `%check` judges what is there. You may enter at any chapter: what is not "
        "written yet is stood in for.",
        "",
    ]
    return "\n".join(lines)


def _invitation(path: list[Step]) -> str:
    here = next((step for step in path if step.is_next), None)
    if here is None:
        return "**Everything is done.** `%check` in any chapter judges it once more."
    begun = any(state == "passed" for step in path for state in step.states.values())
    word = "Go on" if begun else "Begin"
    return f"**{word} with [chapter {here.chapter.number}, {here.chapter.title}]({_link(here)}).**"


def _row(step: Step) -> str:
    signs = " ".join(f"{SIGNS[state]}&nbsp;{id}" for id, state in step.states.items())
    name = f"[{step.chapter.number} {step.chapter.title}]({_link(step)})"
    return f"| {'→' if step.is_next else ''} | {name} | {signs} | {step.progress} |"


def _link(step: Step) -> str:
    return f"chapters/{step.chapter.file}.ipynb"


def write_page(workspace: Workspace) -> Path | None:
    """Write the page; None where the folder is read-only or holds another's file of that name."""
    target = workspace.root / PAGE
    try:
        if target.exists() and not target.read_text(encoding="utf-8").startswith("# Where you are"):
            return None
        write_atomically(target, page(workspace))
    except (OSError, UnicodeDecodeError):
        return None
    return target
