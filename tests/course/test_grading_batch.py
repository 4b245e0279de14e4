"""Many submissions: nothing is lost or graded twice, whatever is killed on the way."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tqdm import tqdm

from bertlab.course import cli, doctor, outline
from bertlab.course.grading import batch, commands, gradebook, jobs, sandbox, submissions
from bertlab.course.grading.batch import Batch, GradingStopped, Request, Tally

from .kernels import bertlab

IDS = ["0.1", "1.3"]  # quick ones
SETTINGS = {"exercises": IDS, "seed": 20181011}
#: The student whose module ends the process.
EXITS = 7
#: How often a run is killed.
KILLS = 20


# --- what is handed in ---


def class_of(folder: Path, count: int) -> Path:
    """Submissions of all kinds: complete, half, with a mistake, not text, no module, no zip."""
    solutions = outline.COURSE_ROOT / "solutions" / "bertlab"
    config, tokenizer = ((solutions / f"{name}.py").read_text() for name in ("config", "tokenizer"))
    kinds = [
        {"config.py": config, "tokenizer.py": tokenizer},
        {"tokenizer.py": tokenizer},
        {"config.py": "def count_parameters(config):\n    return 1\n", "tokenizer.py": tokenizer},
    ]
    for number in range(count):
        exits = {"config.py": "import os\nos._exit(0)\n"}
        for name, text in (exits if number == EXITS else kinds[number % len(kinds)]).items():
            path = folder / f"student {number}" / "bertlab" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (folder / "zed.zip").write_bytes(b"no zip at all")
    (folder / "notes.txt").write_text("ignored")
    return folder


def final(grades: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The results without the seconds; fails if one is there twice."""
    lines = [json.loads(line) for line in (grades / "results.jsonl").read_text().splitlines()]
    counts = Counter((line["student"], line["exercise"]) for line in lines)
    assert set(counts.values()) <= {1}, "graded twice"
    return {(r["student"], r["exercise"]): {**r, "seconds": 0} for r in gradebook.results(grades)}


# --- a cluster that the tests share ---


@dataclass
class Shared:
    """A cluster of two workers, and a class that was graded on it without any trouble."""

    address: str
    client: Any
    submissions: Path
    undisturbed: dict[tuple[str, str], dict[str, Any]]
    most_read_ahead: int

    def results_of(self, *students: str) -> dict[tuple[str, str], dict[str, Any]]:
        return {key: record for key, record in self.undisturbed.items() if key[0] in students}

    def request(self, grades: Path, **changes: Any) -> Request:
        common = {"settings": SETTINGS, "scheduler": self.address, "resume": True}
        return Request(self.submissions, grades, **{**common, **changes})


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    import distributed

    folder = class_of(tmp_path_factory.mktemp("class"), 10)
    options: dict[str, Any] = {"dashboard_address": "127.0.0.1:0", "memory_limit": 0}
    cluster: Any = distributed.LocalCluster(n_workers=2, threads_per_worker=1, **options)
    with cluster, distributed.Client(cluster) as client:
        one = Shared(cluster.scheduler_address, client, folder, {}, 0)
        grades = tmp_path_factory.mktemp("undisturbed")
        one.most_read_ahead = read_ahead(lambda: batch.run(one.request(grades)), grades)
        one.undisturbed = final(grades)
        yield one


def read_ahead(run: Callable[[], Tally], grades: Path) -> int:
    """Run, and return how many students at most were read and not yet finished."""
    most, number, real = 0, 0, submissions.read

    def counted(found: submissions.Found) -> submissions.HandedIn:
        nonlocal most, number
        number += 1
        most = max(most, number - results_in(grades) // len(IDS))
        return real(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submissions, "read", counted)
        run()
    return most


def results_in(grades: Path) -> int:
    journal = grades / "results.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def wait_for_results(grades: Path, count: int, process: Any = None) -> None:
    deadline = time.monotonic() + 600  # no run hangs that long, however busy the machine is
    while results_in(grades) < count:
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None
        time.sleep(0.01)


# --- a run without trouble ---


def test_every_student_has_the_marks_that_are_due(shared):
    points = {key: record["points"] for key, record in shared.undisturbed.items()}
    assert len(points) == 11 * 2
    reasons = {key: record["reason"] for key, record in shared.undisturbed.items()}
    for number in range(10):
        right = (0, 0) if number == EXITS else [(2, 2), (0, 2), (0, 2)][number % 3]
        assert tuple(points[f"student {number}", id] for id in IDS) == right
    assert reasons["student 1", "0.1"] == "todo"
    assert reasons[f"student {EXITS}", "0.1"] == "exit"
    assert reasons["zed", "0.1"] == reasons["zed", "1.3"] == "unreadable"
    assert {r["level"] for r in shared.undisturbed.values()} == {"bubblewrap", ""}


def test_a_student_is_read_when_a_worker_can_take_him(shared):
    assert 2 <= shared.most_read_ahead <= 2 * 2 + 2


# --- a run that is killed ---


def grade_quietly(request: Request) -> None:
    """What a process does that is going to be killed."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    batch.run(request)


def begun(request: Request) -> Any:
    """A process that grades; it starts at once, with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["distributed", "bertlab.course.grading.batch"])
    process = context.Process(target=grade_quietly, args=(request,))
    process.start()
    return process


def killed_at_a_random_moment(process: Any, grades: Path, chance: random.Random) -> bool:
    """Kill a run while it starts, or after some results; False if it ended before."""
    wanted, moment = results_in(grades) + chance.randrange(3), chance.uniform(0, 1)
    while process.exitcode is None and results_in(grades) < wanted:
        time.sleep(0.001)
    process.join(moment)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
def test_killed_at_random_moments_and_resumed_the_results_are_the_same(shared, tmp_path):
    """SIGKILL at moments spread over the whole run; a run that ends is checked and begun again."""
    # without the student who ends the process each time, which is slow
    students = tuple({student for student, _ in shared.undisturbed} - {f"student {EXITS}"})
    chance, kills, partly, rounds = random.Random(4), 0, 0, 0
    while kills < KILLS:
        grades, rounds = tmp_path / str(rounds), rounds + 1
        process = begun(shared.request(grades, students=students))
        while kills < KILLS and killed_at_a_random_moment(process, grades, chance):
            kills += 1
            partly += 0 < results_in(grades) < 2 * len(students)
            process = begun(shared.request(grades, students=students))
        process.join()
        assert process.exitcode == 0
        assert final(grades) == shared.results_of(*students)
    assert partly >= KILLS // 2  # else the moments were all before the first result


def test_a_worker_that_is_killed_costs_nothing_but_time(shared, tmp_path):
    """SIGKILL for one of the two while both are at work."""
    students = tuple(f"student {number}" for number in range(6))
    request = shared.request(tmp_path / "grades", students=students)
    ends: list[Tally] = []
    run = threading.Thread(target=lambda: ends.append(batch.run(request)))
    run.start()
    wait_for_results(request.grades, 3)
    victim = next(iter(shared.client.run(os.getpid).values()))
    os.kill(victim, signal.SIGKILL)
    run.join(120)
    assert ends and ends[0].lost == 0
    assert final(request.grades) == shared.results_of(*students)
    assert victim not in shared.client.run(os.getpid).values()


def test_a_disk_that_fills_up_stops_the_run_and_nothing_is_lost(tmp_path, monkeypatch):
    """On submissions that nobody can read, for which no worker is needed."""
    (tmp_path / "in").mkdir()
    for number in range(4):
        (tmp_path / "in" / f"{number}.zip").write_bytes(b"no zip at all")
    real, left = gradebook.Gradebook._append, [3]

    def filling_up(book: gradebook.Gradebook, line: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise gradebook.DiskFull("the disk is full")
        real(book, line)

    monkeypatch.setattr(gradebook.Gradebook, "_append", filling_up)
    request = Request(tmp_path / "in", tmp_path / "grades", SETTINGS, resume=True)
    with pytest.raises(gradebook.DiskFull):
        batch.run(request)
    assert len(final(request.grades)) == 3
    monkeypatch.undo()
    tally = batch.run(request)
    assert (tally.known, tally.made) == (3, 5)
    assert {record["reason"] for record in final(request.grades).values()} == {"unreadable"}


# --- the command ---


def started(submissions: Path, grades: Path, *options: str) -> subprocess.Popen[str]:
    """The command, in a session of its own as in a terminal."""
    words = ["--out", str(grades), "--chapters", ",".join(IDS), "--seed", "20181011", *options]
    return subprocess.Popen(
        [*(sys.executable, "-m", "bertlab.course.cli", "grade", str(submissions)), *words],
        env={**os.environ, "PYTHONPATH": str(outline.COURSE_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], how: Callable[[], None]) -> str:
    """End a run, see that no process of it stays, and return what it said."""
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 3  # a worker, its sandbox, the student's process
    how()
    _, said = process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    return said


def test_the_command_is_killed_interrupted_and_resumed(shared, tmp_path):
    """Local workers: SIGKILL leaves no process behind, Ctrl-C says how to go on."""
    grades = tmp_path / "grades"
    students = (*(f"student {number}" for number in range(6)), "zed")
    chosen = [word for student in students for word in ("--student", student)]
    killed = started(shared.submissions, grades, *chosen, "--jobs", "1")
    wait_for_results(grades, 2, killed)
    end(killed, killed.kill)

    stopped = started(shared.submissions, grades, *chosen, "--jobs", "1", "--resume")
    wait_for_results(grades, 3, stopped)
    said = end(stopped, lambda: os.killpg(stopped.pid, signal.SIGINT))  # as a terminal does
    assert stopped.returncode == 130
    assert "--resume goes on" in said and "Traceback" not in said
    assert f"bertlab grade report {grades}" in " ".join(said.split())
    assert json.loads((grades / "summary.json").read_text())["state"] == "stopped"
    assert results_in(grades) < 14

    ended = started(shared.submissions, grades, *chosen, "--resume", "--scheduler", shared.address)
    told, said = ended.communicate(timeout=300)
    assert ended.returncode == 0, said
    assert "ignored: notes.txt" in said
    assert "unreadable, 0 points: zed: " in said
    assert "14 results" in told and str(grades) in told
    assert "100%" in said
    assert final(grades) == shared.results_of(*students)
    assert json.loads((grades / "summary.json").read_text())["state"] == "finished"
    found = json.loads((grades / "submissions.json").read_text())
    assert found["student 0"]["modules"] == ["config", "tokenizer"]
    assert (grades / "index.html").is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nowhere", "--out", "GRADES"), "nowhere does not exist"),
        (("IN", "--out", "GRADES", "--chapters", "9-12"), "there is no exercise or chapter"),
        (("IN", "--out", "GRADES", "--student", "studnet 1"), "is it 'student 1'?"),
        (("IN", "--out", "USED"), "--resume"),
        (("IN", "--out", "USED", "--resume", "--seed", "5"), "another seed"),
        (("IN", "--out", "GRADES", "--scheduler", "nonsense://x"), "no scheduler at nonsense"),
        (("IN", "--out", "IN"), "lies in the submissions"),
        (("report", "GRADES"), "nothing is graded there"),
        (("export", "USED", "--format", "docx"), "there is no format 'docx'"),
        (("export", "USED", "--format", "csv", "--with-details"), "details go into json alone"),
    ],
)
def test_a_mistake_is_one_line_and_not_a_traceback(tmp_path, monkeypatch, capsys, words, says):
    """In this process, where an error that nobody caught would be no SystemExit"""
    class_of(tmp_path / "in", 2)
    with gradebook.opened(tmp_path / "used", {}, {"seed": 4, "exercises": IDS}, resume=False):
        pass
    places = {"IN": "in", "GRADES": "grades", "USED": "used"}
    given = [str(tmp_path / places[word]) if word in places else word for word in words]
    monkeypatch.setattr(sys, "argv", ["bertlab", "grade", *given])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert says in said and "Traceback" not in said


def test_a_students_copy_says_that_it_cannot_grade(student_copy, tmp_path):
    class_of(tmp_path / "in", 1)
    done = bertlab(student_copy, "grade", str(tmp_path / "in"), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "grading needs the authors' course" in done.stderr
    assert "Traceback" not in done.stderr


def test_chapters_may_be_ranges_and_exercises():
    assert commands.exercises_of("0,1.3") == ["0.1", "1.3"]
    assert commands.exercises_of("1.3,0.1,1.3") == ["0.1", "1.3"]
    assert commands.exercises_of("0-3") == outline.select(["0", "1", "2", "3"])


def test_what_grading_needs_and_is_not_installed_is_said(monkeypatch, capsys):
    monkeypatch.setattr(commands, "_EXTRA", ("dask", "not_installed_at_all"))
    with pytest.raises(commands.typer.Exit), commands.problems_in_one_line():
        commands._check_extra()
    assert "pip install -c constraints.txt -e '.[grade]'" in capsys.readouterr().err


# --- what a cluster may do wrong ---


def one_batch(book: gradebook.Gradebook) -> Batch:
    made = Batch(book, jobs.Job({}, {}, {}, {}, {}), [], Tally())
    made.bar = tqdm(disable=True)
    return made


def failed(error: Exception | None, status: str = "error") -> Any:
    return SimpleNamespace(status=status, exception=lambda: error)


def a_line() -> batch.Line:
    return batch.Line("alice", "f", {}, batch.deque(IDS), {})


def test_a_result_that_no_worker_could_make_is_an_error_and_is_tried_again(tmp_path):
    from distributed.scheduler import KilledWorker

    with gradebook.opened(tmp_path, {}, SETTINGS, resume=False) as book:
        made, line = one_batch(book), a_line()
        lost = made._record(line, failed(KilledWorker("task", SimpleNamespace(address="x"), 3)))  # type: ignore[arg-type]  # any worker will do
        made._keep(line, lost)
        assert (lost["status"], lost["points"], lost["reason"]) == ("error", 0.0, "lost")
        assert made.tally.lost == 1
        assert list(line.left) == ["1.3"]
    with gradebook.opened(tmp_path, {}, SETTINGS, resume=True) as book:
        assert book.known("alice", "f") == {}


@pytest.mark.parametrize(
    "future",
    [
        failed(None, "cancelled"),
        failed(None, "lost"),
        failed(jobs.OtherInstallation("other torch")),
    ],
)
def test_a_cluster_that_cannot_grade_stops_the_run_and_no_mark_comes_of_it(tmp_path, future):
    with gradebook.opened(tmp_path, {}, SETTINGS, resume=False) as book:
        with pytest.raises(GradingStopped):
            one_batch(book)._record(a_line(), future)
        assert book.marks == {}


def test_a_worker_that_would_judge_otherwise_is_refused(tmp_path):
    job = jobs.make_job(outline.COURSE_ROOT, {"unsafe": False})
    other = replace(job, installation={**job.installation, "torch": "1.0"})
    with pytest.raises(jobs.OtherInstallation, match=r"instead of 1\.0"):
        jobs.Desk(other, tmp_path).level()
    assert jobs.course_hashes(replace(job, tests={})) != jobs.course_hashes(job)
    assert replace(job, settings={"seed": 2}).name != job.name


def test_stubs_stand_in_for_what_is_missing_never_the_instructors_own_work():
    job = jobs.make_job(outline.COURSE_ROOT, {})
    assert 'raise NotImplementedError("exercise 0.1")' in job.given["config"]
    assert set(job.given) == set(job.solutions)


def listening() -> set[tuple[str, int]]:
    """The addresses at which this process and its children can be reached."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sockets = [socket for process in processes for socket in process.net_connections("inet")]
    return {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}


def shows_pages(port: int) -> bool:
    """True if what listens there answers a browser with a page."""
    for path in ("/info/main/workers.html", "/health", "/metrics", "/json/counts.json"):
        with suppress(OSError, HTTPException):
            connection = HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return True
    return False


def test_nobody_else_on_the_machine_can_talk_to_local_workers():
    from distributed import Client, Security

    before = listening()
    with batch._local(1) as cluster:
        assert cluster.scheduler_address.startswith("tls://127.0.0.1:")
        opened = listening() - before
        assert {address for address, _ in opened} == {"127.0.0.1"}
        assert not any(shows_pages(port) for _, port in opened)
        with pytest.raises(OSError):
            Client(cluster.scheduler_address, security=Security.temporary(), timeout=1)


def test_a_batch_system_that_ends_the_run_stops_it_as_ctrl_c_does():
    with pytest.raises(KeyboardInterrupt), batch._interruptible():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# --- the doctor ---


def test_the_doctor_says_the_level_at_which_submissions_would_be_graded(monkeypatch):
    monkeypatch.setattr(sandbox, "best_level", lambda: "bubblewrap")
    assert doctor.sandbox() == "level bubblewrap: works"
    monkeypatch.setattr(sandbox, "best_level", lambda: "none")
    monkeypatch.setattr(sandbox, "bubblewrap", lambda: "/bin/false")
    assert doctor.sandbox().startswith("level none: bubblewrap fails here")
    monkeypatch.setattr(sandbox, "bubblewrap", lambda: None)
    assert doctor.sandbox().startswith("level none: bubblewrap is not installed")
