"""The command line: ``bertlab lab | status | check | hint | reset | doctor | download | ...``."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from bertlab.course.grading.commands import app as grade

app = typer.Typer(
    help="bertlab: a course in which you write BERT yourself, part by part.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(grade, name="grade")

Ids = Annotated[
    list[str] | None, typer.Argument(help="Exercises (3.1) or chapters (3); all by default.")
]


def main() -> None:
    """Run the command line; known problems are one line, not a traceback."""
    from bertlab.course.outline import UnknownExercise
    from bertlab.course.workspace import WorkspaceError

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # only `bertlab download` uses the network
    try:
        app()
    except (UnknownExercise, WorkspaceError, FileNotFoundError, FileExistsError) as error:
        typer.echo(f"bertlab: {error}", err=True)
        raise SystemExit(2) from None


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(
    context: typer.Context,
    chapter: Annotated[
        int | None, typer.Option(help="Open this chapter, such as 3.", show_default=False)
    ] = None,
) -> None:
    """Open JupyterLab where you are in the course; further options go to JupyterLab."""
    from bertlab.course import outline
    from bertlab.course.path import card as status_card
    from bertlab.course.path import write_page
    from bertlab.course.workspace import Workspace

    root, workspace = outline.COURSE_ROOT, Workspace()
    page = write_page(workspace)
    opened = f"chapters/{chapter_to_open(workspace, chapter).file}.ipynb"
    if page is not None and chapter is None:
        opened = page.name
    typer.echo(status_card(workspace).text + "\n")
    typer.echo(f"Opening {opened}. Ctrl-C here ends JupyterLab.")
    sys.stdout.flush()
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--ServerApp.root_dir={root}",
        f"--LabApp.default_url=/lab/tree/{opened}",
        # No question about news, no look for updates: the course works without a network.
        f"--LabApp.app_settings_dir={Path(__file__).parent / 'jupyterlab'}",
        *(["--allow-root"] if getattr(os, "geteuid", lambda: 1)() == 0 else []),
        *context.args,
    ]
    os.chdir(root)
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})


def chapter_to_open(workspace: Any, number: int | None = None) -> Any:
    """Return the chapter with a number, or the first one that is not finished.

    Raises:
        UnknownExercise: the course has no chapter of this number.
    """
    from bertlab.course import outline
    from bertlab.course.path import steps

    chapters = outline.chapters()
    if number is None:
        return next((step.chapter for step in steps(workspace) if step.is_next), chapters[0])
    if not 0 <= number < len(chapters):
        raise outline.UnknownExercise(
            f"--chapter is {number}; the course has chapters 0 to {len(chapters) - 1}"
        )
    return chapters[number]


@app.command()
def status() -> None:
    """Show the course at a glance."""
    from bertlab.course.path import card as status_card
    from bertlab.course.workspace import Workspace

    typer.echo(status_card(Workspace()).text)


@app.command()
def check(
    ids: Ids = None,
    workspace: Annotated[
        Path | None, typer.Option(help="Judge the modules in this folder's bertlab/.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of records.")] = False,
    seed: Annotated[int | None, typer.Option(help="Draw the cases from this seed.")] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for one exercise.")] = 60.0,
) -> None:
    """Judge exercises; exit 0 only when all that were asked for passed."""
    from bertlab.course import cards, outline
    from bertlab.course.elsewhere import judged_elsewhere
    from bertlab.course.workspace import WorkspaceError

    chosen = outline.select(ids or [])
    root = workspace or outline.COURSE_ROOT
    if not (root / "bertlab").is_dir():
        raise WorkspaceError(f"--workspace {root} has no folder bertlab/ in it")
    verdicts = []
    for verdict in judged_elsewhere(root.resolve(), chosen, seed, time_limit):
        verdicts.append(verdict)
        if not as_json:
            typer.echo(cards.of_verdict(verdict).text)
    if as_json:
        typer.echo(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    raise typer.Exit(0 if all(verdict.status == "passed" for verdict in verdicts) else 1)


def judge_all(
    workspace: Any, ids: list[str], seed: int | None = None, time_limit: float = 60.0
) -> Iterator[Any]:
    """Judge exercises of a workspace one after the other, each within a time limit."""
    from bertlab.course.judging import PUBLIC_SEED, Verdict
    from bertlab.course.outline import entries
    from bertlab.course.package import Package

    package = Package(workspace)
    package.install()
    for exercise_id in ids:
        try:
            with student_output_on_stderr(), time_limited(time_limit):
                verdict = package.judge(exercise_id, PUBLIC_SEED if seed is None else seed)
        except TimeLimit:
            points = entries()[exercise_id].points
            verdict = Verdict(
                exercise_id,
                "error",
                0,
                points,
                f"The check did not end within {time_limit:g} seconds. Is there a loop in it "
                "that never ends?",
            )
        yield verdict


class TimeLimit(BaseException):
    """Time is up. Not an `Exception`, so that a student's `except Exception` lets it through."""


@contextmanager
def time_limited(seconds: float) -> Iterator[None]:
    """Raise `TimeLimit` in the block after so many seconds (where the system has alarms)."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: Any) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def student_output_on_stderr() -> Iterator[None]:
    """Send what the student's code prints to standard error, so that --json stays JSON."""
    standard, sys.stdout = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout = standard


@app.command()
def hint(exercise: Annotated[str, typer.Argument(help="An exercise, such as 3.1.")]) -> None:
    """Show the next hint of an exercise."""
    from bertlab.course import cards
    from bertlab.course.workspace import Workspace

    exercise_id = one_exercise(exercise)
    typer.echo(cards.hint(exercise_id, cards.next_hint(Workspace(), exercise_id)).text)


def one_exercise(word: str) -> str:
    """Return the exercise that `word` names; a chapter's number is not enough."""
    from bertlab.course.outline import UnknownExercise, entries, select

    if word not in entries():
        select([word])
        raise UnknownExercise(f"{word!r} is a chapter; name one exercise, such as {word}.1")
    return word


@app.command()
def reset(exercise: Annotated[str, typer.Argument(help="An exercise, such as 3.1.")]) -> None:
    """Put an exercise back to its stub; your text goes into the history first."""
    from bertlab.course.workspace import Workspace

    exercise_id = one_exercise(exercise)
    workspace = Workspace()
    if workspace.reset(exercise_id):
        kept = workspace.history(exercise_id)[-1].relative_to(workspace.root)
        typer.echo(f"{exercise_id} is back to its stub; what you had is in {kept}")
    else:
        typer.echo(f"{exercise_id} is its stub already; nothing changed")


@app.command()
def doctor() -> None:
    """Say what the course runs on: versions, device, reference, disk, sandbox."""
    from bertlab.course.doctor import report

    typer.echo(report().text)


@app.command()
def download(
    name: Annotated[str, typer.Argument(help="A model on the hub.")] = "bert-base-uncased",
) -> None:
    """Fetch a reference model into the local cache: the only command that uses the network."""
    os.environ.pop("HF_HUB_OFFLINE", None)
    from bertlab.course.reference import download as fetch

    fetch(name)


@app.command()
def build(
    check_only: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if a file is out of step.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option(help="Overwrite derived files that were edited by hand.")
    ] = False,
    execute: Annotated[
        list[str] | None, typer.Option(help="Execute this chapter's solved notebook anyway.")
    ] = None,
) -> None:
    """Authors: make the stubs and notebooks from their sources below solutions/."""
    from bertlab.course import outline
    from bertlab.course.authoring import build as builder

    root = outline.COURSE_ROOT
    if not (root / "solutions").is_dir():
        raise FileNotFoundError("this is a student's copy: it has no solutions/ to build from")
    if check_only:
        report = builder.check(root)
    else:
        try:
            report = builder.build(root, overwrite, execute or None, typer.echo)
        except builder.EditedByHand as error:
            typer.echo(f"bertlab build: {error}", err=True)
            raise typer.Exit(1) from None
    for line in report.wrong + [f"made {path}" for path in report.made]:
        typer.echo(line)
    if not report.wrong:
        typer.echo("everything derived is as its source says")
    raise typer.Exit(1 if report.wrong else 0)


@app.command()
def release(folder: Annotated[Path, typer.Argument(help="A new folder.")]) -> None:
    """Instructors: make a student's copy, without solutions and hidden tests."""
    from bertlab.course import outline
    from bertlab.course.authoring.release import release as make

    make(outline.COURSE_ROOT, folder)
    typer.echo(f"a student's copy is in {folder}")


@app.command()
def update(
    newer: Annotated[Path, typer.Argument(help="The folder of the newer release.")],
    dry_run: Annotated[bool, typer.Option(help="Say what would be done, and do nothing.")] = False,
) -> None:
    """Bring this copy to a newer release; what you wrote stays."""
    from bertlab.course import outline
    from bertlab.course import update as maker

    root = outline.COURSE_ROOT
    if (root / "solutions").is_dir():
        raise FileExistsError("this is the authors' course; `update` is for a student's copy")
    plan, backup = (maker.plan(root, newer), None) if dry_run else maker.update(root, newer)
    for conflict in plan.conflicts:
        typer.echo(f"! {conflict.what}: {conflict.outcome}")
        if conflict.difference:
            typer.echo("    " + conflict.difference.replace("\n", "\n    "))
    if dry_run:
        typer.echo(f"{len(plan.writes)} files would be written; nothing was done")
        return
    typer.echo(f"Updated. What you wrote is in place: {', '.join(plan.carried) or 'nothing yet'}.")
    if backup is not None:
        typer.echo(f"Files as they were before: {backup.relative_to(root)}")
    typer.echo("`make lab` installs what is new; `bertlab status` shows what to check again.")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def book(
    context: typer.Context,
    edition: Annotated[
        str, typer.Option(help="student, or instructor: with solutions, below site-instructor/.")
    ] = "student",
) -> None:
    """Make the chapters into a website below site/; further options go to mdBook."""
    if context.args[:1] == ["preprocess"]:  # called by mdBook itself
        _preprocess(context.args[1:])
        return
    from bertlab.course import outline
    from bertlab.course.authoring import book as maker

    try:
        raise typer.Exit(maker.make(outline.COURSE_ROOT, edition, tuple(context.args)))
    except ValueError as error:
        typer.echo(f"bertlab book: {error}", err=True)
        raise typer.Exit(2) from None


def _preprocess(words: list[str]) -> None:
    """Answer mdBook: ``supports RENDERER`` by the exit status, else turn the book into pages."""
    if words[:1] == ["supports"]:
        raise typer.Exit(0 if words[1:] == ["html"] else 1)
    from bertlab.course.authoring import book as maker

    try:
        sys.stdout.write(maker.preprocess(sys.stdin.read()))
    except (ValueError, RuntimeError) as error:
        typer.echo(f"bertlab book: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    main()
