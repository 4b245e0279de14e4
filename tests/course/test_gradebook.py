"""The journal of results: nothing that is in it is lost, whatever happens to the run."""

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bertlab.course.grading import gradebook, visible
from bertlab.course.grading.gradebook import DiskFull, Gradebook, GradebookError, opened

DEFAULTS = {"exercises": ["0.1", "1.3"], "seed": 1, "device": "cpu", "unsafe": False}


def record(exercise: str, points: float = 2.0, **changes: Any) -> dict[str, Any]:
    return {
        "exercise": exercise,
        "status": "passed" if points else "failed",
        "points": points,
        "max_points": 2,
        "reason": "" if points else "wrong",
        "tests": [],
        **changes,
    }


def filled(folder: Path, count: int = 3) -> list[dict[str, Any]]:
    """A gradebook with some results."""
    with opened(folder, {}, DEFAULTS, resume=False) as book:
        for number in range(count):
            book.add(f"student {number}", "f", record("0.1"))
    return list(gradebook.results(folder))


# --- the journal ---


def test_a_result_is_on_the_disk_when_add_returns(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda d: flushed.append(os.fstat(d).st_size))
    with opened(tmp_path, {}, DEFAULTS, resume=False) as book:
        book.snapshot()
        flushed.clear()
        book.add("alice", "f", record("0.1"))
        assert flushed == [book.journal.stat().st_size]


def test_a_run_that_is_resumed_knows_what_was_judged(tmp_path):
    filled(tmp_path)
    with opened(tmp_path, {}, DEFAULTS, resume=True) as book:
        assert set(book.known("student 0", "f")) == {"0.1"}
        assert book.known("student 9", "f") == {}
        with pytest.raises(GradebookError, match="already"):
            book.add("student 0", "f", record("0.1"))


def test_another_submission_of_the_same_student_is_judged_anew(tmp_path):
    filled(tmp_path)
    with opened(tmp_path, {}, DEFAULTS, resume=True) as book:
        assert book.known("student 0", "g") == {}
        book.add("student 0", "g", record("0.1", points=0.0))
        assert book.known("student 0", "g")["0.1"].status == "failed"
    points = {line["student"]: line["points"] for line in gradebook.results(tmp_path)}
    assert points == {"student 0": 0.0, "student 1": 2.0, "student 2": 2.0}


def test_of_a_student_who_hands_in_anew_no_older_mark_stays(tmp_path):
    """Of the second submission one exercise is judged, of the first there were two"""
    with opened(tmp_path, {}, DEFAULTS, resume=False) as book:
        book.add("alice", "f", record("0.1"))
        book.add("bob", "f", record("0.1"))
        book.add("alice", "f", record("1.3"))
        book.add("alice", "g", record("1.3", points=0.0))
    counted = [
        (one["student"], one["exercise"], one["points"]) for one in gradebook.results(tmp_path)
    ]
    assert counted == [("bob", "0.1", 2.0), ("alice", "1.3", 0.0)]
    shown = dict(visible.Grades(tmp_path).records())
    assert set(shown["alice"]) == {"1.3"} and shown["alice"]["1.3"]["points"] == 0.0
    with opened(tmp_path, {}, DEFAULTS, resume=True) as book:
        assert set(book.known("alice", "g")) == {"1.3"} and book.known("alice", "f") == {}
        book.add("alice", "f", record("0.1"))  # the first one again
    assert [one["exercise"] for one in gradebook.results(tmp_path)] == ["0.1", "0.1"]


def test_a_lost_result_is_made_again_and_the_last_one_counts(tmp_path):
    with opened(tmp_path, {}, DEFAULTS, resume=False) as book:
        book.add("alice", "f", record("0.1", points=0.0, reason="lost"))
    with opened(tmp_path, {}, DEFAULTS, resume=True) as book:
        assert book.known("alice", "f") == {}
        book.add("alice", "f", record("0.1"))
    assert [line["points"] for line in gradebook.results(tmp_path)] == [2.0]


def test_a_journal_cut_off_anywhere_in_its_last_line_loses_that_line_alone(tmp_path):
    before = filled(tmp_path)
    journal = tmp_path / "results.jsonl"
    whole = journal.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(whole), 5):
        journal.write_bytes(whole[:end])
        assert list(gradebook.results(tmp_path)) == before[:-1]
        with opened(tmp_path, {}, DEFAULTS, resume=True) as book:
            assert journal.read_bytes() == whole[:last]
            book.add("student 2", "f", record("0.1"))
        assert journal.read_bytes() == whole


@pytest.mark.parametrize("tail", [b"\0" * 4096, b'{"student": "x"}\n', b"[1, 2]\n", b"\xff\n"])
def test_rubbish_at_the_end_of_the_journal_is_cut_away(tmp_path, tail):
    before = filled(tmp_path)
    with open(tmp_path / "results.jsonl", "ab") as file:
        file.write(tail)
    with opened(tmp_path, {}, DEFAULTS, resume=True) as book:
        book.add("zoe", "f", record("0.1"))
    assert list(gradebook.results(tmp_path))[:-1] == before


def test_damage_in_the_middle_is_said_and_nothing_is_cut_away(tmp_path):
    filled(tmp_path)
    journal = tmp_path / "results.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    damaged = lines[0] + b"{\n" + lines[2]
    journal.write_bytes(damaged)
    with (
        pytest.raises(GradebookError, match="line 2 of"),
        opened(tmp_path, {}, DEFAULTS, resume=True),
    ):
        pass
    assert journal.read_bytes() == damaged


def test_text_of_any_kind_is_one_line(tmp_path):
    odd = "a\nb\u2028c\ud800\x00</script>=1+1"
    with opened(tmp_path, {}, DEFAULTS, resume=False) as book:
        book.add("alice", "f", record("0.1", tests=[{"detail": odd}]))
        book.add("bob", "f", record("0.1"))
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").split("\n")
    assert len(lines) == 3
    assert json.loads(lines[0])["tests"][0]["detail"] == odd.replace("\ud800", "?")


# --- settings ---


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"seed": 2}, "another seed"),
        ({"exercises": ["0.1"]}, "exercises"),
        ({"device": "cuda"}, "device cpu, not cuda"),
        ({"unsafe": True}, "unsafe"),
        ({"course": {"tests": "b", "solutions": "a"}}, "tests a then, b now"),
    ],
)
def test_a_run_is_not_resumed_as_another(tmp_path, wanted, says):
    settings = {**DEFAULTS, "course": {"tests": "a", "solutions": "a"}}
    with opened(tmp_path, {}, settings, resume=False) as book:
        book.add("alice", "f", record("0.1"))
    before = (tmp_path / "results.jsonl").read_bytes()
    with pytest.raises(GradebookError) as raised, opened(tmp_path, wanted, DEFAULTS, resume=True):
        pass
    assert says in str(raised.value)
    assert "seed 1" not in str(raised.value)  # a secret is not said on a screen
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_what_is_not_asked_for_is_as_the_run_began(tmp_path):
    with opened(tmp_path, {"seed": 7, "device": None}, DEFAULTS, resume=False) as book:
        assert (book.run["seed"], book.run["device"]) == (7, "cpu")
    with opened(tmp_path, {"seed": None}, {**DEFAULTS, "seed": 8}, resume=True) as book:
        assert book.run["seed"] == 7


def test_a_run_is_not_begun_over_another(tmp_path):
    filled(tmp_path)
    with pytest.raises(GradebookError, match="--resume"), opened(tmp_path, {}, DEFAULTS, False):
        pass


def test_a_run_that_had_not_begun_can_be_resumed(tmp_path):
    with opened(tmp_path / "new", {}, DEFAULTS, resume=True) as book:
        assert book.marks == {}


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    with (
        opened(tmp_path, {}, DEFAULTS, resume=False),
        pytest.raises(GradebookError, match="another grading run"),
        opened(tmp_path, {}, DEFAULTS, resume=True),
    ):
        pass


def test_nobody_else_may_read_the_seed(tmp_path):
    filled(tmp_path / "grades")
    assert (tmp_path / "grades").stat().st_mode & 0o077 == 0
    assert (tmp_path / "grades" / "results.jsonl").stat().st_mode & 0o077 == 0


def test_snapshots_are_whole_and_what_a_killed_run_left_is_removed(tmp_path):
    filled(tmp_path)
    (tmp_path / ".summary.json.x.new").write_text("half")
    with opened(tmp_path, {}, DEFAULTS, resume=True) as book:
        book.note_submission("student 0", {"where": "x"})
        book.snapshot("finished")
    assert not list(tmp_path.glob("*.new"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["state"] == "finished"
    assert summary["students"]["student 0"] == {"points": 2.0, "max_points": 2, "judged": 1}
    assert json.loads((tmp_path / "submissions.json").read_text()) == {"student 0": {"where": "x"}}


# --- a disk that is full ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 200 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can make a small disk; the next test simulates one")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(grades: Path, count: int) -> None:
    with opened(grades, {}, DEFAULTS, resume=False) as book:
        for number in range(count):
            book.add(f"student {number}", "f", record("0.1", detail="x" * 1000))


def test_a_full_disk_is_said_and_everything_before_is_kept(small_disk):
    grades = small_disk / "grades"
    with pytest.raises(DiskFull, match="--resume"):
        fill(grades, 1000)
    kept = len(list(gradebook.results(grades)))
    assert 50 < kept < 250
    subprocess.run(["mount", "-o", "remount,size=2m", str(small_disk)], check=True)
    with opened(grades, {}, DEFAULTS, resume=True) as book:
        assert len(book.marks) == kept
        book.add(f"student {kept}", "f", record("0.1"))
    assert len(list(gradebook.results(grades))) == kept + 1


@pytest.mark.parametrize("broken", ["write", "fsync"])
def test_of_a_result_that_does_not_fit_nothing_stays(tmp_path, monkeypatch, broken):
    before = filled(tmp_path)
    real = os.write

    def half(descriptor: int, data: Any) -> int:
        if len(data) < 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[: len(data) // 2])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(tmp_path, {}, DEFAULTS, resume=True) as book:
        book.snapshot()
        monkeypatch.setattr(os, broken, half if broken == "write" else full)
        with pytest.raises(DiskFull, match="is full"):
            book.add("zoe", "f", record("0.1"))
        monkeypatch.undo()
        assert "zoe" not in book.marks
        assert (tmp_path / "results.jsonl").read_bytes().endswith(b"\n")
        book.add("zoe", "f", record("0.1"))
    assert list(gradebook.results(tmp_path))[:-1] == before


def test_a_disk_that_fails_otherwise_is_said_too(tmp_path, monkeypatch):
    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with opened(tmp_path, {}, DEFAULTS, resume=False) as book:
        book.snapshot()
        monkeypatch.setattr(os, "fsync", fails)
        with pytest.raises(GradebookError, match="Input/output error"):
            book.add("alice", "f", record("0.1"))
        monkeypatch.undo()


def test_thousands_of_students_take_little_memory(tmp_path, monkeypatch):
    """What is kept of a result is its mark, not its details."""
    import tracemalloc

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    with opened(tmp_path, {}, DEFAULTS, resume=False) as book:
        book._snapshot_due = float("inf")
        tracemalloc.start()
        for number in range(4_000):
            book.add(f"student {number}", "f", record("0.1", tests=[{"detail": "x" * 2000}]))
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert isinstance(book, Gradebook)
    assert used < 8 * 2**20
