"""The pages of students and instructors: readable, the same each time, and without a secret."""

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bertlab.course import outline
from bertlab.course.grading import report
from bertlab.course.grading.report import write_report
from bertlab.course.grading.visible import FAULTS, REASONS, file_name

from .synthetic_grades import (
    CANARIES,
    ODD_IDS,
    TESTS,
    drawn_records,
    exercise_record,
    hidden_test,
    make_grades,
)

EXERCISES = ["1.1", "1.2", "3.1", "3.5"]
ATTACK = "<img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}\x07\u202e"


@pytest.fixture(scope="module")
def grades(tmp_path_factory) -> Path:
    """A class with odd ids and attacks in every text, reported."""
    rng = random.Random(11)
    names = [f"s{number:03d}" for number in range(20)] + ODD_IDS
    records = [record for name in names for record in drawn_records(name, EXERCISES, rng)]
    records += drawn_records("half-done", EXERCISES[:2], rng)
    odd = hidden_test(ATTACK, "failed", f"code {ATTACK}", hint=ATTACK)
    records.append(exercise_record("odd", "1.1", [odd], stand_ins=[ATTACK], level=ATTACK))
    records.append(exercise_record("fault", "1.2", [hidden_test("t", "error", "grader")]))
    folder = make_grades(tmp_path_factory.mktemp("grades"), records, '{"stud', EXERCISES)
    write_report(folder)
    return folder


class Page(HTMLParser):
    """A page as a browser sees it: its tags, its attributes, its text; unclosed tags are errors."""

    VOID = frozenset({"meta", "br", "path", "use", "line", "rect"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.text = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        if tag in ("td", "th", "li", "caption"):
            self.text += " "
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text += data

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


def student(grades: Path, id: str) -> Page:
    return Page(grades / "students" / f"{file_name(id)}.html")


def pages(grades: Path) -> list[Path]:
    return [*grades.glob("*.html"), *grades.glob("students/*.html")]


# --- a student's page ---


def test_every_student_has_a_page(grades):
    ids = [*(f"s{number:03d}" for number in range(20)), *ODD_IDS, "half-done", "odd", "fault"]
    assert {path.stem for path in (grades / "students").iterdir()} == {file_name(id) for id in ids}


def test_a_page_shows_points_status_reason_test_and_hint(tmp_path):
    tests = [
        hidden_test("Agrees with the reference"),
        hidden_test("Keeps the mask", "failed", "wrong", hint="Where is it added?"),
        hidden_test("Does not take long", "error", "timeout", hint=""),
    ]
    record = exercise_record("a", "3.5", tests, stand_ins=["3.1", "3.2"])
    write_report(make_grades(tmp_path, [record]))
    words = student(tmp_path, "a").words
    for expected in (
        "Results of a",
        "1.33 of 4 points",
        "Chapter 3. Attention",
        "3.5 multi-head self-attention",
        "◐ in part",
        "✓ Agrees with the reference",
        "✗ Keeps the mask: a wrong answer. Hint: Where is it added?",
        "! Does not take long: no answer. The code took longer than is allowed.",
        "The answer differs from the reference.",
        "Judged with the course's own 3.1, 3.2 in place of yours",
    ):
        assert expected.replace(" ", "") in words.replace(" ", ""), expected


def test_a_test_that_passed_shows_no_hint(tmp_path):
    record = exercise_record("a", "3.5", [hidden_test("t", hint="The answer is 42.")])
    write_report(make_grades(tmp_path, [record]))
    assert "42" not in student(tmp_path, "a").text


def test_what_is_not_judged_yet_is_said(grades):
    words = student(grades, "half-done").words
    assert "Not everything has been judged yet" in words and "○ not judged yet" in words


def test_a_submission_that_cannot_be_read_is_said(tmp_path):
    folder = make_grades(tmp_path, [exercise_record("a", "1.1", [hidden_test("t")])])
    found = {"b": {"problem": "is no zip <b>", "ignored": ["x<i>.txt"], "where": CANARIES["where"]}}
    (folder / "submissions.json").write_text(json.dumps(found))
    page = Page(write_report(folder).parent / "students" / "b.html")
    assert "It is no zip <b>." in page.words and "x<i>.txt" in page.words
    assert "b: is no zip <b>" in Page(folder / "index.html").words


def test_every_reason_that_the_grader_gives_has_words(root):
    folder = root / "bertlab" / "course" / "grading"
    text = "".join(path.read_text() for path in sorted(folder.glob("*.py")))
    codes = set(
        re.findall(
            r'(?:_fail|SessionFailed|_overrun =|_without_judgement)\(? ?(?:[\w.\[\]]+, )?"(\w+)"',
            text,
        )
    )
    codes |= set(re.findall(r'"(?:error|failed|skipped)", "(\w+)"', text))
    codes -= {"passed", "failed", "error", "skipped"}
    assert {"timeout", "exit", "wrong", "todo", "lost", "unreadable"} <= codes
    assert codes <= set(REASONS) and set(FAULTS) <= set(REASONS)


# --- safety ---


def test_no_text_becomes_a_tag(grades):
    for path in pages(grades):
        page = Page(path)
        assert not {"script", "img", "iframe", "object", "b>", "link"} & set(page.tags)
        assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_an_attack_is_shown_as_the_text_it_is(grades):
    page = student(grades, "odd")
    seen = "<img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}"
    assert page.words.count(seen) >= 3
    assert "<script>alert(1)</script>" in Page(grades / "index.html").words


def test_no_page_holds_a_character_that_turns_or_breaks_the_text(grades):
    for path in pages(grades):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", path.read_text())


def test_no_page_needs_anything_from_elsewhere(grades):
    for path in pages(grades):
        page = Page(path)
        for name, value in page.attributes:
            if name in ("src", "href", "xlink:href", "data", "action"):
                assert re.match(r"#|students/[a-z0-9._-]+\.html$|index(-\d+)?\.html", value), value
        assert not re.search(r"@import|url\((?!#)", page.source)
        assert "default-src 'none'" in page.source


def test_links_lead_to_pages(grades):
    links = re.findall(r'href="(students/[^"]+)"', (grades / "index.html").read_text())
    assert len(links) >= 20 + len(ODD_IDS)
    assert all((grades / link).is_file() for link in links)


def test_no_secret_is_in_a_page(grades):
    for path in pages(grades):
        text = path.read_text()
        assert not [name for name, secret in CANARIES.items() if str(secret) in text]


def test_a_secret_in_a_page_would_be_found(grades, tmp_path):
    record = exercise_record("a", "1.1", [hidden_test("t", "failed", "wrong")])
    record["tests"][0]["hint"] = record["tests"][0]["detail"]
    write_report(make_grades(tmp_path, [record]))
    assert CANARIES["detail"] in (tmp_path / "students" / "a.html").read_text()


def test_status_is_a_word_and_a_sign_and_not_a_colour_alone(grades):
    source = student(grades, "s000").source
    badges = re.findall(r'<span class="sign">(.*?)</span>', source)
    assert len(badges) == len(EXERCISES)
    assert all(re.fullmatch(r"[✓◐✗!–○] [a-z ]+", badge) for badge in badges)


def test_pages_are_for_light_dark_and_print(grades):
    source = student(grades, "s000").source
    assert "prefers-color-scheme: dark" in source and "@media print" in source


# --- the overview ---


def test_the_overview_counts_what_was_missed(tmp_path):
    good, bad = hidden_test(TESTS[0]), hidden_test(TESTS[1], "failed", "wrong")
    records = [exercise_record(f"s{i}", "1.1", [good, bad]) for i in range(3)]
    records += [exercise_record(f"s{i}", "1.2", [good]) for i in range(4)]
    records.append(exercise_record("s3", "1.1", [hidden_test(TESTS[0], "error", "timeout")]))
    words = Page(write_report(make_grades(tmp_path, records))).words
    assert "4 students, 2 exercises; 2.75 of 4 points on average" in words
    assert re.search(r"1\.1 normalize 4 100 0\.75 2 The answer differs", words)
    assert re.search(r"1\.2 pre-tokenize 0 0 2\.00 2", words)
    assert f"1.1 {TESTS[1]} 3 100 The answer differs from the reference." in words
    assert f"1.1 {TESTS[0]} 1 25 The code took longer than is allowed." in words


def test_a_hidden_test_that_does_not_work_is_said_to_the_instructor(grades):
    words = Page(grades / "index.html").words
    assert "Students for whom a hidden test did not work: 1" in words and "look here" in words


def test_results_without_a_sandbox_are_said(tmp_path):
    record = exercise_record("a", "1.1", [hidden_test("t")], level="none")
    words = Page(write_report(make_grades(tmp_path, [record]))).words
    assert "Results made without a sandbox: 1" in words


def test_plots_have_titles_and_named_axes_with_units(grades):
    page = Page(grades / "index.html")
    assert page.tags.count("svg") == 2
    for text in (
        "Distribution of points",
        "total (points, each bar is 1 point wide)",
        "number of students",
        "How each exercise went",
        "share of the students (%)",
        "exercise",
    ):
        assert text in page.words
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    targets = re.findall(r'(?:url\(|href=")#([^")]+)', page.source)
    assert targets and set(targets) <= set(ids)


def test_the_same_results_give_the_same_pages(grades, tmp_path):
    before = {path.relative_to(grades): path.read_bytes() for path in pages(grades)}
    write_report(grades)
    assert {path.relative_to(grades): path.read_bytes() for path in pages(grades)} == before


def test_a_class_of_nobody_has_an_overview(tmp_path):
    assert "0 students" in Page(write_report(make_grades(tmp_path, []))).words


def test_the_pages_of_three_thousand_students_are_small(tmp_path):
    rng = random.Random(5)
    exercise_ids = list(outline.entries())[:3]
    some = [drawn_records("x", exercise_ids, rng) for _ in range(40)]
    records = [
        {**record, "student": f"s{number:04d}"}
        for number in range(3000)
        for record in some[number % len(some)]
    ]
    folder = make_grades(tmp_path, records)
    write_report(folder)
    overviews = sorted(folder.glob("index*.html"))
    assert len(overviews) == 3000 // report.PAGE
    assert max(path.stat().st_size for path in pages(folder)) < 200_000
    linked = [re.findall(r'href="students/([^"]+)"', path.read_text()) for path in overviews]
    assert len({link for links in linked for link in links}) == 3000
    assert len(list((folder / "students").iterdir())) == 3000


def test_a_smaller_class_leaves_no_page_of_a_larger_one(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "PAGE", 2)
    records = [exercise_record(f"s{i}", "1.1", [hidden_test("t")]) for i in range(5)]
    write_report(make_grades(tmp_path, records))
    assert len(list(tmp_path.glob("index*.html"))) == 3
    write_report(make_grades(tmp_path, records[:2]))
    assert len(list(tmp_path.glob("index*.html"))) == 1
