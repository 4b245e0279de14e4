"""``bertlab grade``: the command line of grading."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

#: What the extra `grade` installs, by the name under which it is imported.
_EXTRA = ("dask", "distributed", "psutil", "cryptography")
#: The most local workers where nobody asked for a number: each takes some GB.
MOST_JOBS = 8


class _RunsByDefault(TyperGroup):
    """``bertlab grade SUBMISSIONS`` means ``bertlab grade run SUBMISSIONS``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunsByDefault,
    no_args_is_help=True,
    help="Instructors: grade submissions with the hidden tests (`bertlab grade run --help`).",
)
Grades = Annotated[Path, typer.Argument(metavar="GRADES", help="What --out named.")]


@contextmanager
def problems_in_one_line() -> Iterator[None]:
    """Say known problems in one line and exit with 2; an interrupted run exits with 130."""
    from bertlab.course.grading.gradebook import GradebookError
    from bertlab.course.grading.submissions import UnreadableSubmission

    try:
        yield
    except ImportError as error:
        if (error.name or "").split(".")[0] not in _EXTRA:
            raise
        _exit(
            f"{error.name} is missing; install what grading needs, in the course's folder: "
            "pip install -c constraints.txt -e '.[grade]'"
        )
    except (GradebookError, UnreadableSubmission) as error:
        _exit(str(error))


def _exit(problem: str, code: int = 2) -> None:
    typer.echo(f"bertlab grade: {problem}", err=True)
    raise typer.Exit(code)


@app.command("run")
def run(
    submissions: Annotated[
        Path, typer.Argument(metavar="SUBMISSIONS", help="A folder or zip of folders or zips.")
    ],
    out: Annotated[Path, typer.Option(metavar="GRADES", help="A folder for the results.")],
    chapters: Annotated[
        str | None, typer.Option(help="Such as 1-5, or 1,3.2; all by default.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Local workers; by default one a core, at most 8.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in GRADES.")] = False,
    student: Annotated[
        list[str] | None, typer.Option(help="Only this student; may be repeated.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The secret seed; drawn by default.")
    ] = None,
    scheduler: Annotated[
        str, typer.Option(metavar="ADDRESS", help="A Dask scheduler, in place of local workers.")
    ] = "",
    device: Annotated[str | None, typer.Option(help="cpu, or cuda to judge on the GPU.")] = None,
    time_limit: Annotated[
        float | None, typer.Option(min=1, help="Seconds for one exercise; 60 by default.")
    ] = None,
    memory_limit: Annotated[
        float | None, typer.Option(min=0.5, help="GB for one exercise; 4 by default.")
    ] = None,
    unsafe: Annotated[
        bool, typer.Option("--unsafe-no-sandbox", help="Grade even where no sandbox works.")
    ] = False,
) -> None:
    """Grade SUBMISSIONS; the results are in GRADES, readable while it runs."""
    with problems_in_one_line():
        _check_extra()
        settings = {
            "exercises": None if chapters is None else exercises_of(chapters),
            "seed": seed,
            "device": device,
            "time_limit": time_limit,
            "memory_limit": memory_limit,
            "unsafe": unsafe,
        }
        count = jobs or min(os.cpu_count() or 1, MOST_JOBS)
        _run(submissions, out, settings, count, resume, tuple(student or ()), scheduler)


def _run(
    submissions: Path,
    out: Path,
    settings: dict[str, Any],
    jobs: int,
    resume: bool,
    students: tuple[str, ...],
    scheduler: str,
) -> None:
    from bertlab.course.grading import batch

    if settings["device"] not in (None, "cpu", "cuda"):
        raise typer.BadParameter("--device is cpu or cuda")
    request = batch.Request(submissions, out, settings, jobs, resume, students, scheduler)
    try:
        tally = batch.run(request)
    except batch.GradingStopped as error:
        _exit(f"{error}\n{_what_is_there(out)}")
    except KeyboardInterrupt:
        _exit(f"stopped. {_what_is_there(out)}", 130)
    else:
        _say(tally, out)
        report(out)
        raise typer.Exit(1 if tally.lost else 0)


def _what_is_there(out: Path) -> str:
    """Say where the results of a run are that did not come to its end, and what can be done."""
    return (
        f"What was graded is in {out}; --resume goes on, and `bertlab grade report {out}` "
        "makes the pages of what is there."
    )


def _say(tally: Any, out: Path) -> None:
    """Say what came of a run, and what was wrong with what was handed in."""
    for line in tally.ignored:
        typer.echo(f"ignored: {line}", err=True)
    for line in tally.unreadable:
        typer.echo(f"unreadable, 0 points: {line}", err=True)
    if tally.lost:
        typer.echo(
            f"{tally.lost} results could not be made, which says nothing of the submissions "
            "(reason `lost`; the detail is in results.jsonl); --resume tries them again",
            err=True,
        )
    before = f" ({tally.known} of them before)" if tally.known else ""
    typer.echo(f"{tally.known + tally.made} results{before} are in {out}")


@app.command()
def report(grades: Grades) -> None:
    """Make the HTML pages again: one a student, and an overview of the class."""
    with problems_in_one_line():
        from bertlab.course.grading.report import write_report

        write_report(grades)
        typer.echo(f"pages: {grades / 'index.html'}")


@app.command()
def export(
    grades: Grades,
    format: Annotated[str, typer.Option(help="csv, json, junit, gradescope or ags.")],
    details: Annotated[
        bool,
        typer.Option("--with-details", help="With json, for instructors only: inputs and values."),
    ] = False,
) -> None:
    """Write the results as the university's systems take them."""
    with problems_in_one_line():
        from bertlab.course.grading.export import export as write

        try:
            typer.echo(f"written: {write(grades, format, details)}")
        except ValueError as error:
            _exit(str(error))


def _check_extra() -> None:
    """Raise ModuleNotFoundError for what grading needs and is not installed."""
    for name in _EXTRA:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"{name} is missing", name=name)


def exercises_of(chapters: str) -> list[str]:
    """Return the exercise ids that ``1-5`` or ``0.1,2-3`` names, in the course's order.

    Raises:
        UnknownExercise: there is no such chapter or exercise.
    """
    from bertlab.course import outline

    words: list[str] = []
    for part in chapters.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        is_range = dash and first.isdigit() and last.isdigit() and int(first) <= int(last)
        words += map(str, range(int(first), int(last) + 1)) if is_range else [part.strip()]
    chosen = set(outline.select(words))
    return [id for id in outline.entries() if id in chosen]
