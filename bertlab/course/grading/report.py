"""The pages: one for each student, and an overview of the class.

They need no script, no network and no other file, and can be printed. Everything in them comes from
`visible`, and the templates in ``pages/`` escape whatever is put in.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import mean, median

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bertlab.course import display
from bertlab.course.grading import plots
from bertlab.course.grading.visible import (
    SIGNS,
    Grades,
    ShownExercise,
    ShownStudent,
    number,
    said,
    shown_student,
    total,
    write_file,
)

#: How many students a page of the overview lists.
PAGE = 200
#: How many students are named whose hidden tests did not work.
NAMED = 20


def write_report(grades: Path) -> Path:
    """Write the page of each student and the overview, and return the overview's path.

    It can be called while grading goes on: a reader finds each page old or new, never half.

    Args:
        grades: the folder GRADES.

    Raises:
        FileNotFoundError: the folder holds no results.
    """
    results = Grades(grades)
    overview = Overview.empty(results.exercises)
    for student in results.students():
        write_file(grades / "students" / f"{student.file}.html", [student_page(student)])
        overview.add(student)
    _write_overview(overview, grades)
    return grades / "index.html"


def student_page(student: ShownStudent) -> str:
    """The page that a student is given."""
    return _templates().get_template("student.html").render(student=student)


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("bertlab.course.grading", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    look = Markup(display.STYLE)  # the course's own, nobody's input
    environment.globals |= {"number": number, "total": total, "signs": SIGNS, "look": look}
    return environment


# --- the class ---


@dataclass
class Missed:
    """How often an exercise or a hidden test was missed, and why."""

    id: str
    title: str
    max_points: float = 0.0
    first: bool = False  # the first of its chapter
    points: float = 0.0
    looks: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, look: str, reason: str, points: float = 0.0) -> None:
        """Count one student."""
        self.looks[look] += 1
        self.points += points
        if look not in ("passed", "skipped", "waiting"):
            self.reasons[reason] += 1

    @property
    def missed(self) -> int:
        return sum(self.reasons.values())

    @property
    def judged(self) -> int:
        return self.missed + self.looks["passed"]

    @property
    def mean(self) -> float:
        return self.points / self.judged if self.judged else 0.0

    @property
    def reason(self) -> str:
        """The most common reason in words; of two, the first by its code."""
        common = sorted(self.reasons, key=lambda reason: (-self.reasons[reason], reason))
        return said(common[0]) if common else ""


@dataclass(frozen=True, slots=True)
class Row:
    """A student in the table of the class."""

    name: str
    file: str
    points: float
    cells: tuple[tuple[str, float], ...]


@dataclass
class Overview:
    """What is known of the class; students are added one by one."""

    exercises: list[Missed]
    tests: dict[tuple[str, str], Missed] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    levels: Counter[str] = field(default_factory=Counter)
    faulty: list[tuple[str, str]] = field(default_factory=list)
    at_fault: int = 0
    unfinished: int = 0
    unreadable: list[tuple[str, str, str]] = field(default_factory=list)

    @classmethod
    def empty(cls, exercise_ids: list[str]) -> "Overview":
        """The overview of a class of nobody."""
        exercises: list[Missed] = []
        for _, _, chapter in shown_student("", {}, exercise_ids).by_chapter():
            exercises += [
                Missed(exercise.id, exercise.title, exercise.max_points, index == 0)
                for index, exercise in enumerate(chapter)
            ]
        return cls(exercises)

    def add(self, student: ShownStudent) -> None:
        """Add a student."""
        cells = tuple((exercise.look, exercise.points) for exercise in student.exercises)
        self.rows.append(Row(student.name, student.file, student.points, cells))
        self.unfinished += not student.finished
        if student.problem:
            self.unreadable.append((student.name, student.file, student.problem))
        if student.at_fault:
            self.at_fault += 1
            self.faulty = [*self.faulty, (student.name, student.file)][:NAMED]
        for known, exercise in zip(self.exercises, student.exercises, strict=True):
            known.max_points = exercise.max_points
            known.add(exercise.look, exercise.reason, exercise.points)
            self._add_tests(exercise)

    def _add_tests(self, exercise: ShownExercise) -> None:
        if exercise.status == "waiting":
            return
        if exercise.level:  # nothing ran where nothing could be read
            self.levels[exercise.level] += 1
        by_name = {test.name: test for test in exercise.tests}
        by_name |= {test.name: test for test in exercise.tests if test.status != "passed"}
        for name, test in by_name.items():  # a student counts once, also where a name comes twice
            known = self.tests.setdefault((exercise.id, name), Missed(exercise.id, name))
            known.add(test.status, test.reason)

    @property
    def students(self) -> int:
        return len(self.rows)

    @property
    def max_points(self) -> float:
        return total(exercise.max_points for exercise in self.exercises)

    @property
    def mean(self) -> float:
        return mean(row.points for row in self.rows)

    @property
    def median(self) -> float:
        return median(row.points for row in self.rows)

    def missed_exercises(self) -> list[Missed]:
        """The exercises, the most often missed first."""
        return sorted(self.exercises, key=lambda exercise: -exercise.missed)

    def missed_tests(self, count: int) -> list[Missed]:
        """The hidden tests that were missed most."""
        missed = [test for test in self.tests.values() if test.missed]
        return sorted(missed, key=lambda test: (-test.missed, test.id, test.title))[:count]


@dataclass(frozen=True)
class Page:
    """A page of the overview: its file, and the first and the last student on it."""

    file: str
    first: str
    last: str


def _write_overview(overview: Overview, grades: Path) -> None:
    chunks = [overview.rows[i : i + PAGE] for i in range(0, len(overview.rows), PAGE)] or [[]]
    pages = list(_pages(chunks))
    drawn = {
        "points": Markup(plots.points([row.points for row in overview.rows], overview.max_points)),
        "exercises": Markup(
            plots.outcomes({x.id: x.looks for x in overview.exercises}, overview.students)
        ),
    }
    template = _templates().get_template("overview.html")
    for index, (page, rows) in enumerate(zip(pages, chunks, strict=True), 1):
        text = template.render(found=overview, page=index, pages=pages, rows=rows, plots=drawn)
        write_file(grades / page.file, [text])
    for path in grades.glob("index-*.html"):  # of an earlier, larger class
        if path.name not in {page.file for page in pages}:
            path.unlink()


def _pages(chunks: list[list[Row]]) -> Iterator[Page]:
    for index, rows in enumerate(chunks, 1):
        file = "index.html" if index == 1 else f"index-{index}.html"
        yield Page(file, rows[0].name if rows else "", rows[-1].name if rows else "")
