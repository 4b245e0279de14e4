"""Marks as the university's systems take them: JSON, CSV, JUnit XML, Gradescope, LTI AGS.

Each export holds what a student may see and no more (`visible`), so that it may be handed on. JSON
alone can hold the details of each test, for instructors, if that is asked for.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bertlab.course.grading.visible import (
    Grades,
    ShownExercise,
    ShownStudent,
    ShownTest,
    cleaned,
    new_folder,
    number,
    one_line,
    shown_student,
    total,
    write_file,
)


def export(grades: Path, format: str, details: bool = False) -> Path:
    """Write the results in a format into ``GRADES/export`` and return what was written.

    - `json`: one file ``grades.json``;
    - `csv`: one file ``grades.csv``, a row a student, a column an exercise;
    - `junit`: a folder with an XML file a student;
    - `gradescope`: a folder with a folder a student, which holds its ``results.json``;
    - `ags`: a folder with a JSON file a student, to be sent to the platform's score service. Its
      `userId` is the student's id as handed in.

    Args:
        grades: the folder GRADES; it may be of a run that goes on.
        format: one of `FORMATS`.
        details: with `json`, also what instructors alone may see of each test: it may hold inputs
            and expected values.

    Raises:
        ValueError: there is no such format, or it cannot hold details.
        FileNotFoundError: the folder holds no results.
    """
    if format not in FORMATS:
        raise ValueError(f"there is no format {format!r}; there are {', '.join(FORMATS)}")
    if details and format != "json":
        raise ValueError(f"details go into json alone: students may see what is in {format}")
    results, folder = Grades(grades), grades / "export"
    return _json(results, folder, details=True) if details else FORMATS[format](results, folder)


# --- JSON ---


def _json(grades: Grades, folder: Path, details: bool = False) -> Path:
    path = folder / ("grades-with-details.json" if details else "grades.json")
    write_file(path, _json_lines(grades, details))
    return path


def _json_lines(grades: Grades, details: bool) -> Iterator[str]:
    """A JSON text piece by piece, a line a student."""
    exercise_ids = grades.exercises
    yield '{"schema": "bertlab-grades-1", "students": ['
    for index, (id, records) in enumerate(grades.records()):
        found = grades.submissions.get(id)
        shown = _student(shown_student(id, records, exercise_ids, found))
        if details:
            shown = _with_details(shown, records)
        yield (",\n" if index else "\n") + json.dumps(shown, allow_nan=False)
    yield "\n]}\n"


def _student(student: ShownStudent) -> dict[str, Any]:
    return {
        "student": student.id,
        "points": student.points,
        "max_points": student.max_points,
        "finished": student.finished,
        "problem": student.problem,
        "ignored": list(student.ignored),
        "exercises": [_exercise(exercise) for exercise in student.exercises],
    }


def _exercise(exercise: ShownExercise) -> dict[str, Any]:
    return {
        "exercise": exercise.id,
        "title": exercise.title,
        "status": exercise.status,
        "points": exercise.points,
        "max_points": exercise.max_points,
        "reason": exercise.reason,
        "said": exercise.said,
        "stand_ins": list(exercise.stand_ins),
        "level": exercise.level,
        "tests": [
            {
                "name": test.name,
                "hint": test.hint,
                "status": test.status,
                "reason": test.reason,
                "said": test.said,
            }
            for test in exercise.tests
        ],
    }


def _with_details(shown: dict[str, Any], records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Add to each test what instructors alone may see."""
    for exercise in shown["exercises"]:
        record = records.get(exercise["exercise"], {"tests": []})
        for test, known in zip(exercise["tests"], record["tests"], strict=False):
            test |= {"weight": known.get("weight", 1.0), "detail": known.get("detail", "")}
    return shown


# --- CSV ---


def _csv(grades: Grades, folder: Path) -> Path:
    """Rows of points; an exercise that is not judged yet is an empty cell, not a zero.

    The file starts with a byte-order mark, without which Excel misreads names.
    """
    rows = io.StringIO()
    writer = csv.writer(rows, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\r\n")
    exercises = shown_student("", {}, grades.exercises).exercises
    columns = [f"{exercise.id} {exercise.title}" for exercise in exercises]
    writer.writerow(map(defused, ["student", *columns, "total", "out of", "judged", "page"]))
    for student in grades.students():
        judged = [exercise.status != "waiting" for exercise in student.exercises]
        points = [_cell(exercise) for exercise in student.exercises]
        sums = [_short(student.points), _short(student.max_points), sum(judged)]
        page = f"students/{student.file}.html"  # no other student has the same
        writer.writerow([defused(student.id), *points, *sums, page])
    path = folder / "grades.csv"
    write_file(path, [rows.getvalue()], encoding="utf-8-sig")
    return path


def _cell(exercise: ShownExercise) -> float | None:
    return None if exercise.status == "waiting" else _short(exercise.points)


def _short(value: float) -> float:
    """The same number, an int if it is whole."""
    return int(value) if value == int(value) else value


#: What a spreadsheet takes for the start of a formula, also as wide characters.
_FORMULA = tuple("=+-@|%＝＋－＠")


def defused(text: str) -> str:
    """Text for a cell that no spreadsheet takes for a formula: one that could be gets a quote.

    A tab, a line break or another control character becomes a space or goes.
    """
    line = one_line(text)
    bare = line.lstrip(" \"'`´‘’“”«»")
    return f"'{line}" if bare.startswith(_FORMULA) else line


# --- JUnit XML ---


def _junit(grades: Grades, folder: Path) -> Path:
    made = grades.changed.strftime("%Y-%m-%dT%H:%M:%S")  # the schema allows no zone; this is UTC
    with new_folder(folder / "junit") as new:
        for student in grades.students():
            root = ElementTree.Element("testsuites")
            for index, exercise in enumerate(student.exercises):
                root.append(_suite(student, exercise, index, made))
            ElementTree.indent(root)
            text = ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)
            write_file(new / f"{student.file}.xml", ['<?xml version="1.0"?>\n', text, "\n"])
    return folder / "junit"


def _suite(
    student: ShownStudent, exercise: ShownExercise, index: int, made: str
) -> ElementTree.Element:
    count = [test.status for test in exercise.tests].count
    attributes = {
        "name": f"{exercise.id} {exercise.title}".strip(),
        "package": student.name,
        "id": str(index),
        "timestamp": made,
        "hostname": "localhost",
        "tests": str(len(exercise.tests)),
        "failures": str(count("failed")),
        "errors": str(count("error")),
        "skipped": str(count("skipped")),
        "time": f"{exercise.seconds:.2f}",
    }
    suite = ElementTree.Element("testsuite", attributes)
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in {"points": exercise.points, "max_points": exercise.max_points}.items():
        ElementTree.SubElement(properties, "property", name=name, value=number(value))
    for test in exercise.tests:
        suite.append(_case(test, exercise))
    ElementTree.SubElement(suite, "system-out")
    ElementTree.SubElement(suite, "system-err")
    return suite


def _case(test: ShownTest, exercise: ShownExercise) -> ElementTree.Element:
    """A test; its time is not measured, the exercise's is."""
    place = f"exercise {exercise.id}"
    case = ElementTree.Element("testcase", name=test.name, classname=place, time="0")
    if test.status == "skipped":
        ElementTree.SubElement(case, "skipped")
    elif test.status != "passed":
        kind = "failure" if test.status == "failed" else "error"
        found = ElementTree.SubElement(case, kind, message=test.said, type=test.reason or "unknown")
        found.text = test.hint
    return case


# --- Gradescope ---


def _gradescope(grades: Grades, folder: Path) -> Path:
    with new_folder(folder / "gradescope") as new:
        for student in grades.students():
            write_file(new / student.file / "results.json", _dumped(_gradescope_result(student)))
    return folder / "gradescope"


def _gradescope_result(student: ShownStudent) -> dict[str, Any]:
    return {
        "score": student.points,
        "output": summary(student),
        "output_format": "text",
        "test_output_format": "text",
        "test_name_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": [row for exercise in student.exercises for row in _gradescope_tests(exercise)],
        "extra_data": {"student": student.id, "finished": student.finished},
    }


def _gradescope_tests(exercise: ShownExercise) -> Iterator[dict[str, Any]]:
    """The tests, each with its share of the points."""
    counted = [test for test in exercise.tests if test.status != "skipped"]
    weights = sum(test.weight for test in counted)
    for index, test in enumerate(exercise.tests, 1):
        share = exercise.max_points * test.weight / weights if test in counted and weights else 0.0
        row = {
            "name": f"{exercise.id} {exercise.title}: {test.name}",
            "number": f"{exercise.id}.{index}",
            "score": round(share, 4) if test.status == "passed" else 0.0,
            "max_score": round(share, 4),
            "output": " ".join(filter(None, [test.said, test.hint])),
            "visibility": "visible",
        }
        if test.status != "skipped":  # neither passed nor failed
            row["status"] = "passed" if test.status == "passed" else "failed"
        yield row


# --- LTI Assignment and Grade Services ---


def _ags(grades: Grades, folder: Path) -> Path:
    made = grades.changed.isoformat(timespec="milliseconds")
    with new_folder(folder / "ags") as new:
        for student in grades.students():
            write_file(new / f"{student.file}.json", _dumped(_score(student, made)))
    return folder / "ags"


def _score(student: ShownStudent, made: str) -> dict[str, Any]:
    """A score; one that is not final says so, and platforms then leave the mark as it is."""
    progress = "FullyGraded" if student.finished else "Pending"
    if student.finished and student.at_fault:
        progress = "PendingManual"
    points = {"scoreGiven": student.points, "scoreMaximum": student.max_points}
    return {
        "userId": student.id,
        **(points if student.max_points else {}),  # a maximum of 0 is not allowed
        "activityProgress": "Completed",
        "gradingProgress": progress,
        "timestamp": made,
        "comment": summary(student),
    }


def summary(student: ShownStudent) -> str:
    """A student's results in a few lines of plain text."""
    lines = [f"{number(student.points)} of {number(student.max_points)} points"]
    if student.problem:
        lines.append(f"What was handed in could not be read: it {student.problem}.")
    for chapter, title, exercises in student.by_chapter():
        reached = number(total(exercise.points for exercise in exercises))
        maximum = number(total(exercise.max_points for exercise in exercises))
        lines.append(f"Chapter {chapter}, {title}: {reached} of {maximum}")
        lines += [
            f"  {exercise.sign} {exercise.id} {exercise.title}: {exercise.word}. {exercise.said}"
            for exercise in exercises
            if exercise.status not in ("passed", "waiting")
        ]
    waiting = [exercise.id for exercise in student.exercises if exercise.status == "waiting"]
    if waiting:
        lines.append(f"Not judged yet: {', '.join(waiting)}")
    return cleaned("\n".join(lines))


def _dumped(value: Any) -> list[str]:
    return [json.dumps(value, allow_nan=False), "\n"]


#: What writes each format.
FORMATS: dict[str, Callable[..., Path]] = {
    "csv": _csv,
    "json": _json,
    "junit": _junit,
    "gradescope": _gradescope,
    "ags": _ags,
}
