"""Marks leave the course in the formats that the university's systems take, and nothing secret with
them."""

import csv
import json
import random
import re
from pathlib import Path

import pytest

from bertlab.course import outline
from bertlab.course.grading import visible
from bertlab.course.grading.export import FORMATS, defused, export
from bertlab.course.grading.visible import file_name

from .export_formats import (
    WrongFormat,
    check_ags,
    check_csv,
    check_gradescope,
    check_junit,
    is_formula,
)
from .synthetic_grades import (
    CANARIES,
    ODD_IDS,
    drawn_records,
    exercise_record,
    hidden_test,
    make_grades,
)

EXERCISES = ["1.1", "1.2", "3.1", "3.5"]


@pytest.fixture(scope="module")
def grades(tmp_path_factory) -> Path:
    """A class: thirty students, those with odd ids, and one who is not judged on everything."""
    rng = random.Random(7)
    names = [f"s{number:03d}" for number in range(30)] + ODD_IDS
    records = [record for name in names for record in drawn_records(name, EXERCISES, rng)]
    records += drawn_records("half-done", EXERCISES[:2], rng)
    torn = '{"student": "s999", "exerc'
    return make_grades(tmp_path_factory.mktemp("grades"), records, torn, EXERCISES)


def one(folder: Path, *records) -> Path:
    return make_grades(folder / "grades", list(records))


def texts(path: Path) -> list[str]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return [file.read_text(encoding="utf-8") for file in files]


# --- what is in them ---


def test_csv_has_a_row_a_student_and_a_column_an_exercise(grades):
    rows = check_csv(export(grades, "csv"))
    assert len(rows) == 30 + len(ODD_IDS) + 1
    titles = [f"{id} {outline.entries()[id].title}" for id in EXERCISES]
    assert list(rows[0]) == ["student", *titles, "total", "out of", "judged", "page"]
    by_name = {row["student"]: row for row in rows}
    assert float(by_name["s003"]["total"]) == pytest.approx(
        sum(float(by_name["s003"][title]) for title in titles)
    )
    assert by_name["half-done"][titles[2]] == "" and by_name["half-done"]["judged"] == "2"


def test_numbers_in_csv_stay_numbers(grades):
    with open(export(grades, "csv"), encoding="utf-8-sig", newline="") as file:
        rows = list(csv.reader(file, quoting=csv.QUOTE_NONNUMERIC))
    for row in rows[1:]:
        assert isinstance(row[0], str)
        assert all(isinstance(cell, float) for cell in row[1:-1] if cell != "")


def test_pandas_reads_the_numbers_of_the_csv(grades):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(export(grades, "csv"))
    numbers = frame.drop(columns=["student", "page"])
    assert all(kind.kind in "if" for kind in numbers.dtypes)
    expected = numbers.iloc[:, : len(EXERCISES)].sum(axis=1)
    assert (numbers["total"] - expected).abs().max() < 0.011


@pytest.mark.parametrize("text", [*ODD_IDS, "＝1+1", "'\"=1", "|x", "%0A=1"])
def test_no_text_is_a_formula_once_it_is_defused(text):
    assert not is_formula(defused(text))
    assert not defused(text).startswith(("\t", "\r", "\n"))


@pytest.mark.parametrize("text", ["s1234", "Änne Müller", "a-b", "x=1", "it's", "12"])
def test_a_harmless_text_is_left_as_it_is(text):
    assert defused(text) == text


def test_json_holds_what_a_student_may_see(grades):
    found = json.loads(export(grades, "json").read_text())
    assert found["schema"] == "bertlab-grades-1"
    students = {student["student"]: student for student in found["students"]}
    assert set(ODD_IDS) <= set(students) and not students["half-done"]["finished"]
    exercise = students["s000"]["exercises"][0]
    assert exercise["exercise"] == "1.1" and exercise["max_points"] == 2
    assert set(exercise["tests"][0]) == {"name", "hint", "status", "reason", "said"}


def test_every_student_has_a_valid_junit_file(grades):
    folder = export(grades, "junit")
    roots = [check_junit(text) for text in texts(folder)]
    assert len(roots) == 30 + len(ODD_IDS) + 1
    assert all(len(root) == len(EXERCISES) for root in roots)
    root = check_junit((folder / "half-done.xml").read_text())
    assert [suite.get("skipped") for suite in root] == ["0", "0", "1", "1"]


def test_every_student_has_a_valid_gradescope_result(grades):
    folder = export(grades, "gradescope")
    for text in texts(folder):
        result = check_gradescope(text)
        reached = sum(test["score"] for test in result["tests"])
        assert reached == pytest.approx(result["score"], abs=0.01 * len(EXERCISES))
    assert (folder / "s000" / "results.json").is_file()


def test_every_student_has_a_valid_ags_score(grades):
    folder = export(grades, "ags")
    scores = {score["userId"]: score for score in map(check_ags, texts(folder))}
    assert set(ODD_IDS) <= set(scores)
    assert scores["s001"]["gradingProgress"] == "FullyGraded"
    maximum = sum(outline.entries()[id].points for id in EXERCISES)
    assert scores["s001"]["scoreMaximum"] == maximum


def test_a_mark_that_is_not_final_says_so_to_the_platform(grades, tmp_path):
    assert (
        check_ags((export(grades, "ags") / "half-done.json").read_text())["gradingProgress"]
        == "Pending"
    )
    broken = exercise_record("a", "1.1", [hidden_test("t"), hidden_test("u", "error", "grader")])
    score = (export(one(tmp_path, broken), "ags") / "a.json").read_text()
    assert check_ags(score)["gradingProgress"] == "PendingManual"


def test_partial_credit_follows_the_weights(tmp_path):
    tests = [
        hidden_test("big", weight=3.0),
        hidden_test("small", "failed", "wrong"),
        hidden_test("left out", "skipped", "needs"),
    ]
    folder = export(one(tmp_path, exercise_record("a", "3.5", tests)), "gradescope")
    result = check_gradescope((folder / "a" / "results.json").read_text())
    shares = [(test["score"], test["max_score"]) for test in result["tests"]]
    assert shares == [(3, 3), (0, 1), (0, 0)] and result["score"] == 3
    assert [test.get("status") for test in result["tests"]] == ["passed", "failed", None]


# --- the journal ---


def test_a_line_that_is_being_written_is_left_out(grades):
    rows = check_csv(export(grades, "csv"))
    assert "s999" not in {row["student"] for row in rows}


def test_the_last_result_counts(tmp_path):
    first = exercise_record("a", "1.1", [hidden_test("t", "failed", "wrong")])
    second = exercise_record("a", "1.1", [hidden_test("t")])
    (row,) = check_csv(export(one(tmp_path, first, second), "csv"))
    assert row["total"] == "2"


def test_the_results_of_an_earlier_submission_do_not_count(tmp_path):
    old = [exercise_record("a", id, [hidden_test("t")], submission="old") for id in EXERCISES]
    new = exercise_record("a", "1.1", [hidden_test("t")], submission="new")
    (row,) = check_csv(export(one(tmp_path, *old, new), "csv"))
    assert row["total"] == "2" and row["judged"] == "1"


def test_an_earlier_export_leaves_nothing_behind(tmp_path):
    folder = one(tmp_path, *(exercise_record(x, "1.1", [hidden_test("t")]) for x in "ab"))
    assert len(texts(export(folder, "ags"))) == 2
    make_grades(folder, [exercise_record("a", "1.1", [hidden_test("t")])])
    assert len(texts(export(folder, "ags"))) == 1


def test_an_unknown_format_or_an_empty_folder_is_said(grades, tmp_path):
    with pytest.raises(ValueError, match="there is no format 'xls'"):
        export(grades, "xls")
    with pytest.raises(FileNotFoundError, match=re.escape("no results.jsonl")):
        export(tmp_path, "csv")


# --- secrets ---


@pytest.mark.parametrize("format", FORMATS)
def test_no_secret_is_in_an_export(grades, format):
    for text in texts(export(grades, format)):
        for secret in CANARIES.values():
            assert str(secret) not in text


def test_details_are_in_json_alone_and_only_if_asked_for(grades):
    path = export(grades, "json", details=True)
    assert path.name == "grades-with-details.json" and CANARIES["detail"] in path.read_text()
    assert str(CANARIES["seed"]) not in path.read_text()
    for format in set(FORMATS) - {"json"}:
        with pytest.raises(ValueError, match="details"):
            export(grades, format, details=True)


def test_a_canary_would_be_found(grades, monkeypatch):
    monkeypatch.setattr(visible, "one_line", lambda text, length=0: text + CANARIES["detail"])
    assert any(CANARIES["detail"] in text for text in texts(export(grades, "gradescope")))


# --- names of files ---


def test_file_names_are_safe_and_no_two_are_the_same():
    names = [file_name(id) for id in [*ODD_IDS, "s1", "S1", "s1 ", "a/b", "a\\b", "con", "con.txt"]]
    assert len({name.casefold() for name in names}) == len(names)
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,59}", name) for name in names)
    assert not {"con", "nul", "con.txt"} & set(names)


def test_nobody_can_take_the_file_name_of_another():
    assert file_name("s1234") == "s1234" and file_name("anna.smith-2") == "anna.smith-2"
    marked = file_name("Anna")
    assert marked != "anna" and file_name(marked) != marked


# --- the checks themselves ---

GOOD_JUNIT = """<testsuites><testsuite name="n" package="p" id="0" timestamp="2026-01-02T03:04:05"
hostname="localhost" tests="1" failures="1" errors="0" time="0.5"><properties/>
<testcase name="t" classname="c" time="0"><failure type="wrong"/></testcase>
<system-out/><system-err/></testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('hostname="localhost"', ""),
        ("2026-01-02T03:04:05", "2026-01-02T03:04:05+00:00"),
        ("2026-01-02", "2026-13-02"),
        ('id="0"', 'id="1"'),
        ('tests="1"', 'tests="2"'),
        ('failures="1"', 'failures="0"'),
        ('time="0.5"', 'time="1e-3"'),
        ('<failure type="wrong"/>', "<failure/>"),
        ('<failure type="wrong"/>', '<failure type="a"/><error type="b"/>'),
        ("<properties/>", ""),
        ("<system-out/><system-err/>", "<system-err/><system-out/>"),
        ('classname="c"', 'classname="c" points="2"'),
        ("testsuites>", "tests>"),
        ('name="t"', 'name="\x07"'),
    ],
)
def test_a_wrong_junit_file_is_refused(old, new):
    check_junit(GOOD_JUNIT)
    assert old in GOOD_JUNIT
    with pytest.raises(WrongFormat):
        check_junit(GOOD_JUNIT.replace(old, new))


@pytest.mark.parametrize(
    "change",
    [
        {"score": "3"},
        {"score": float("nan")},
        {"visibility": "public"},
        {"tests": [{"score": 3, "max_score": 2}]},
        {"tests": [{"score": 1, "status": "error"}]},
        {"tests": [{"name": "no score"}]},
        {"points": 3},
        {"tests": [{"score": True}]},
    ],
)
def test_a_wrong_gradescope_result_is_refused(change):
    good = {"score": 3.0, "output": "", "tests": [{"score": 1, "max_score": 2, "name": "t"}]}
    check_gradescope(json.dumps(good))
    with pytest.raises(WrongFormat):
        check_gradescope(json.dumps({**good, **change}))


@pytest.mark.parametrize(
    "change",
    [
        {"userId": None},
        {"scoreGiven": -1},
        {"scoreMaximum": 0},
        {"scoreGiven": "3"},
        {"timestamp": "2026-01-02T03:04:05Z"},
        {"timestamp": "2026-01-02T03:04:05.000"},
        {"gradingProgress": "Graded"},
        {"activityProgress": "Done"},
        {"comment": 3},
    ],
)
def test_a_wrong_ags_score_is_refused(change):
    good = {
        "userId": "u",
        "scoreGiven": 1.5,
        "scoreMaximum": 2,
        "activityProgress": "Completed",
        "gradingProgress": "FullyGraded",
        "timestamp": "2026-01-02T03:04:05.678+00:00",
    }
    check_ags(json.dumps(good))
    with pytest.raises(WrongFormat):
        check_ags(json.dumps({**good, **change}))


@pytest.mark.parametrize(
    "rows", ["a,b\n=1,2\n", "a,b\n1\n", "a,a\n1,2\n", 'a\n"\t=1"\n', "a\n-x\n"]
)
def test_a_wrong_csv_file_is_refused(tmp_path, rows):
    path = tmp_path / "grades.csv"
    path.write_text("a,b\n-1.5,x\n")
    check_csv(path)
    path.write_text(rows)
    with pytest.raises(WrongFormat):
        check_csv(path)
