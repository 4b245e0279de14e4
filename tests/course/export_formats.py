"""The rules of the formats that marks are exported in, as checks that raise `WrongFormat`.

JUnit XML has a schema that most tools follow (Windy Road's ``JUnit.xsd``), Gradescope a page
"Autograder specifications", LTI a specification "Assignment and Grade Services". Each rule here is
one of theirs.
"""

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree


class WrongFormat(AssertionError):
    """A file breaks a rule of its format; says which."""


def require(condition: object, rule: str) -> None:
    """Raise unless a rule is kept."""
    if not condition:
        raise WrongFormat(rule)


# --- JUnit XML ---


def _token(text: str) -> bool:
    return bool(text.strip())


def _text(text: str) -> bool:
    return True


def _count(text: str) -> bool:
    return bool(re.fullmatch(r"\d{1,9}", text))


def _decimal(text: str) -> bool:
    return bool(re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)", text))


def _moment(text: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", text):
        return False
    try:
        return datetime.fromisoformat(text).tzinfo is None
    except ValueError:
        return False


@dataclass(frozen=True)
class Element:
    """What the schema says of an element.

    Attributes:
        required, optional: attributes and what their values must be.
        children: in this order: name, and how often at least and at most.
        choice: at most one of these, instead.
        has_text: it may hold text.
    """

    required: dict[str, Callable[[str], bool]] = field(default_factory=dict)
    optional: dict[str, Callable[[str], bool]] = field(default_factory=dict)
    children: tuple[tuple[str, int, float], ...] = ()
    choice: tuple[str, ...] = ()
    has_text: bool = False


_MANY = float("inf")
_FOUND = Element({"type": _text}, {"message": _text}, has_text=True)
SCHEMA = {
    "testsuites": Element(children=(("testsuite", 0, _MANY),)),
    "testsuite": Element(
        required={
            "name": _token,
            "package": _text,
            "id": _count,
            "timestamp": _moment,
            "hostname": _token,
            "tests": _count,
            "failures": _count,
            "errors": _count,
            "time": _decimal,
        },
        optional={"skipped": _count},
        children=(
            ("properties", 1, 1),
            ("testcase", 0, _MANY),
            ("system-out", 1, 1),
            ("system-err", 1, 1),
        ),
    ),
    "properties": Element(children=(("property", 0, _MANY),)),
    "property": Element(required={"name": _token, "value": _text}),
    "testcase": Element(
        required={"name": _text, "classname": _text, "time": _decimal},
        choice=("skipped", "error", "failure"),
    ),
    "failure": _FOUND,
    "error": _FOUND,
    "skipped": Element(optional={"message": _text}, has_text=True),
    "system-out": Element(has_text=True),
    "system-err": Element(has_text=True),
}


def check_junit(text: str) -> ElementTree.Element:
    """Check an XML file and return its root."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise WrongFormat(f"not XML: {error}") from None
    require(root.tag == "testsuites", "the root is testsuites")
    for element in root.iter():
        require(element.tag in SCHEMA, f"{element.tag} is no element of the schema")
        _check_attributes(element, SCHEMA[element.tag])
        _check_children(element, SCHEMA[element.tag])
    for index, suite in enumerate(root):
        _check_counts(index, suite)
    return root


def _check_attributes(element: ElementTree.Element, rule: Element) -> None:
    missing = set(rule.required) - set(element.attrib)
    require(not missing, f"{element.tag} lacks {missing}")
    for name, value in element.attrib.items():
        allowed = {**rule.required, **rule.optional}
        require(name in allowed, f"{element.tag} has no attribute {name}")
        require(allowed[name](value), f"{element.tag}.{name} cannot be {value!r}")


def _check_children(element: ElementTree.Element, rule: Element) -> None:
    found = [child.tag for child in element]
    if rule.choice:
        require(len(found) <= 1 and set(found) <= set(rule.choice), f"{element.tag}: {found}")
        return
    order = [name for name, _, _ in rule.children]
    require(set(found) <= set(order), f"{element.tag} holds {found}")
    require(found == sorted(found, key=order.index), f"{element.tag}: order is {order}")
    for name, least, most in rule.children:
        require(least <= found.count(name) <= most, f"{element.tag}: {found.count(name)} {name}")
    if not rule.has_text:
        require(not (element.text or "").strip(), f"{element.tag} holds text")


def _check_counts(index: int, suite: ElementTree.Element) -> None:
    require(suite.get("id") == str(index), "ids count from 0")
    cases = suite.findall("testcase")
    require(int(suite.attrib["tests"]) == len(cases), "tests is the number of testcases")
    for attribute, tag in {"failures": "failure", "errors": "error", "skipped": "skipped"}.items():
        count = sum(case.find(tag) is not None for case in cases)
        require(int(suite.get(attribute, count)) == count, f"{attribute} is the number of {tag}")


# --- Gradescope ---

_VISIBILITY = ("hidden", "after_due_date", "after_published", "visible")
_TEXT_FORMATS = ("text", "html", "simple_format", "md", "ansi")
_RESULT = {
    "score": (int, float),
    "execution_time": (int, float),
    "output": str,
    "output_format": _TEXT_FORMATS,
    "test_output_format": _TEXT_FORMATS,
    "test_name_format": _TEXT_FORMATS,
    "visibility": _VISIBILITY,
    "stdout_visibility": _VISIBILITY,
    "extra_data": dict,
    "tests": list,
    "leaderboard": list,
}
_TEST = {
    "score": (int, float),
    "max_score": (int, float),
    "status": ("passed", "failed"),
    "name": str,
    "name_format": _TEXT_FORMATS,
    "number": str,
    "output": str,
    "output_format": _TEXT_FORMATS,
    "tags": list,
    "visibility": _VISIBILITY,
    "extra_data": dict,
}


def check_gradescope(text: str) -> dict[str, Any]:
    """Check a ``results.json`` and return it."""
    result = _loaded(text)
    _check_fields(result, _RESULT)
    require("score" in result or result.get("tests"), "a score, or tests with scores")
    for test in result.get("tests", ()):
        _check_fields(test, _TEST)
        require("score" in test, "each test has a score, as there is none for all")
        require(0 <= test["score"] <= test.get("max_score", test["score"]), "score up to max_score")
    return result


def _check_fields(value: Any, fields: dict[str, Any]) -> None:
    require(isinstance(value, dict), "an object")
    for name, content in value.items():
        require(name in fields, f"{name} is no field")
        allowed = fields[name]
        if isinstance(allowed, tuple) and isinstance(allowed[0], str):
            require(content in allowed, f"{name} is one of {allowed}")
        else:
            good = isinstance(content, allowed) and not isinstance(content, bool)
            require(good, f"{name} cannot be {content!r}")


# --- LTI Assignment and Grade Services ---

_ACTIVITY = ("Initialized", "Started", "InProgress", "Submitted", "Completed")
_GRADING = ("FullyGraded", "Pending", "PendingManual", "Failed", "NotReady")


def check_ags(text: str) -> dict[str, Any]:
    """Check a score and return it."""
    score = _loaded(text)
    require(isinstance(score, dict), "an object")
    for name in ("userId", "activityProgress", "gradingProgress", "timestamp"):
        require(isinstance(score.get(name), str) and name in score, f"{name} is required, a string")
    require(score["activityProgress"] in _ACTIVITY, f"activityProgress is one of {_ACTIVITY}")
    require(score["gradingProgress"] in _GRADING, f"gradingProgress is one of {_GRADING}")
    if "scoreGiven" in score:
        require("scoreMaximum" in score, "scoreMaximum goes with scoreGiven")
        for name in ("scoreGiven", "scoreMaximum"):
            require(type(score[name]) in (int, float), f"{name} is a number")
        require(score["scoreGiven"] >= 0 and score["scoreMaximum"] > 0, "positive numbers")
    moment = re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+(Z|[+-]\d\d:\d\d)", score["timestamp"]
    )
    require(moment, "the timestamp has parts of a second and a zone")
    require(isinstance(score.get("comment", ""), str), "the comment is text")
    return score


def _loaded(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise WrongFormat(f"{constant} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise WrongFormat(f"not JSON: {error}") from None


# --- CSV ---


def check_csv(path: Path) -> list[dict[str, str]]:
    """Check that every row has every column and no cell is a formula; return the rows."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        header, *rows = csv.reader(io.StringIO(file.read(), newline=""), strict=True)
    require(len(set(header)) == len(header), "each column has a name of its own")
    for row in (header, *rows):
        require(len(row) == len(header), "each row has every column")
        for cell in row:
            require(not is_formula(cell), f"{cell!r} is a formula")
    return [dict(zip(header, row, strict=True)) for row in rows]


def is_formula(cell: str) -> bool:
    """True if a spreadsheet could compute a cell. A number is none, nor what begins with one `'`
    that the exporter put there."""
    if re.fullmatch(r"-?\d+(\.\d+)?", cell):
        return False
    if cell.startswith(("\t", "\r", "\n")):
        return True
    return cell.lstrip(' "\u00a0').startswith(("=", "+", "-", "@", "＝", "＋", "－", "＠"))
