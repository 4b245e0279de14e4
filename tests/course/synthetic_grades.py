"""Made-up folders GRADES: a class whose results are known, with a secret in every secret place."""

import json
import random
from pathlib import Path
from typing import Any

from bertlab.course import outline

#: What no student may see, each in its own secret place.
CANARIES = {
    "detail": "CANARYDETAIL",
    "expected": "CANARYEXPECTED",
    "inputs": "CANARYINPUTS",
    "path": "/srv/CANARYPATH/tests/hidden/test_secret.py",
    "source": "CANARYSOURCE",
    "exception": "CANARYEXCEPTION",
    "seed": 918273645546372819,
    "setting": "CANARYSETTING",
    "where": "/home/instructor/CANARYWHERE",
    "fingerprint": "CANARYFINGERPRINT",
}
#: Ids that try something; each is a student's.
ODD_IDS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    '=HYPERLINK("http://x.example","marks")',
    "+1+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(1;2)",
    "\t=1+1",
    "\r=1+1",
    "'=1+1",
    '"=1+1',
    "  =1+1",
    'a,b;c"d\ne',
    "../../../etc/passwd",
    "..",
    "CON",
    "Anna",
    "anna",
    "Änne Müller",
    "bell\x07 null\x00 escape\x1b end",
    "half \ud800 pair",
    "\u202eterces",
    "x" * 300,
    "",
    "{{ 7 * 7 }}",
]


def hidden_test(name: str, status: str = "passed", reason: str = "", **more: Any) -> dict[str, Any]:
    """A hidden test's result as the grader records it, with a secret in its detail."""
    secrets = " ".join(str(CANARIES[key]) for key in ("detail", "expected", "inputs", "exception"))
    detail = f"AssertionError: {CANARIES['path']}: {CANARIES['source']} {secrets}"
    hint = more.pop("hint", "Look at the shapes once more.")
    return {
        "name": name,
        "hint": hint,
        "status": status,
        "reason": reason,
        "detail": "" if status == "passed" else detail,
        "weight": 1.0,
        **more,
    }


def exercise_record(
    student: str, exercise_id: str, tests: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """A line of the journal whose points follow from its tests; with fields nobody foresaw."""
    maximum = outline.entries()[exercise_id].points
    counted = [test for test in tests if test["status"] != "skipped"]
    weights = sum(test["weight"] for test in counted)
    reached = sum(test["weight"] for test in counted if test["status"] == "passed")
    missed = [test for test in counted if test["status"] != "passed"]
    status = "failed" if missed else "passed"
    if counted and all(test["status"] == "error" for test in counted):
        status = "error"
    return {
        "student": student,
        "submission": "0123456789abcdef",
        "exercise": exercise_id,
        "status": status,
        "points": round(maximum * reached / weights, 2) if weights else 0.0,
        "max_points": maximum,
        "reason": missed[0]["reason"] if missed else "",
        "tests": tests,
        "stand_ins": [],
        "level": "bubblewrap",
        "device": "cpu",
        "seconds": 0.41,
        "seed": CANARIES["seed"],
        "inputs": CANARIES["inputs"],
        "expected": CANARIES["expected"],
        "source": CANARIES["path"],
        **more,
    }


#: The hidden tests of every exercise of a made-up class.
TESTS = (
    "Agrees with the reference on inputs drawn for grading",
    "Does not change its inputs",
    "Works for a batch of one",
)


def drawn_records(
    student: str, exercise_ids: list[str], rng: random.Random
) -> list[dict[str, Any]]:
    """A student's results, drawn at random: some are better than others."""
    skill = rng.betavariate(3, 1.4)
    records = []
    for index, exercise_id in enumerate(exercise_ids):
        tests = [_drawn(rng, name, max(skill - 0.01 * index, 0.05)) for name in TESTS]
        if rng.random() < 0.06 * (1.3 - skill):
            reason = rng.choice(["timeout", "todo", "raised", "missing", "exit", "memory"])
            tests = [hidden_test(name, "error", reason) for name in TESTS]
        stand_ins = exercise_ids[:1] if rng.random() < 0.1 else []
        records.append(exercise_record(student, exercise_id, tests, stand_ins=stand_ins))
    return records


def _drawn(rng: random.Random, name: str, skill: float) -> dict[str, Any]:
    status = "passed" if rng.random() < skill ** (1 / (1 + TESTS.index(name))) else "failed"
    return hidden_test(name, status, "" if status == "passed" else "wrong")


def _found(student: str) -> dict[str, Any]:
    return {
        "where": f"{CANARIES['where']}/{student}",
        "modules": ["tokenizer"],
        "ignored": ["<b>notes</b>.txt"],
        "problem": "",
        "fingerprint": CANARIES["fingerprint"],
    }


def make_grades(
    folder: Path,
    records: list[dict[str, Any]],
    torn: str = "",
    exercises: list[str] | None = None,
) -> Path:
    """Write a folder GRADES with these results.

    Args:
        torn: the start of a line that is being written.
        exercises: what the run judges; by default what is in the records.
    """
    folder.mkdir(parents=True, exist_ok=True)
    judged = exercises or sorted({record["exercise"] for record in records})
    run = {"seed": CANARIES["seed"], "exercises": judged, "note": CANARIES["setting"]}
    (folder / "run.json").write_text(json.dumps(run))
    found = {record["student"]: _found(record["student"]) for record in records}
    (folder / "submissions.json").write_text(json.dumps(found))
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "results.jsonl").write_text(lines + torn)
    return folder
