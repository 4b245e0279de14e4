"""Cheats and sabotage: they gain nothing, and nothing of them stays.

Each is a real submission in the real sandbox, judged by the real hidden tests.
"""

import json
import os
import pickle
import socket
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from bertlab.course import exercise as exercises
from bertlab.course import judging, outline
from bertlab.course.grading import submissions, syscalls, wire
from bertlab.course.grading.grader import ExerciseResult, Grader
from bertlab.course.grading.hidden import Kept, Submission, is_students, raised
from bertlab.course.grading.sandbox import FAILURES, Limits, best_level
from bertlab.course.regions import replace_region, stub_module

from .attacks import BOMBS, CHEATS, CRASHES, LEFTOVERS, MARK, PEEPING, PRELUDE, Attack
from .hidden_double import HIDDEN

SEED = 20_260_401
#: What an attack may use: less than usual, so that a bomb goes off early.
SMALL = Limits(memory=2**30, processes=40)
GENEROUS = Limits()
EVERYTHING = {**CHEATS, **CRASHES, **BOMBS, **LEFTOVERS}


@pytest.fixture(scope="module")
def solutions(root) -> dict[str, str]:
    """The complete modules, name to text."""
    return {path.stem: path.read_text() for path in (root / "solutions/bertlab").glob("*.py")}


@pytest.fixture(scope="module")
def grader(complete, solutions) -> Iterator[Grader]:
    """A grader with a real sandbox."""
    if best_level() == "none":
        pytest.skip("no sandbox works here")
    stubs = {name: stub_module(text) for name, text in solutions.items()}
    made = Grader(HIDDEN, stubs, solutions, SEED, "bubblewrap")
    yield made
    made.close()


def judged(
    grader: Grader, handed_in: dict[str, str], exercise_id: str = "2.1", limits: Limits = GENEROUS
) -> ExerciseResult:
    """Grade one exercise of a submission."""
    grader.limits = limits
    (result,) = grader.grade(handed_in, [exercise_id])
    return result


def record(result: ExerciseResult) -> dict[str, Any]:
    """All of a result but its time."""
    return {**result.record(), "seconds": 0}


@pytest.fixture(scope="module")
def honest(grader, solutions) -> dict[str, dict[str, Any]]:
    """What an honest submission gets before anybody attacks."""
    return {id: record(judged(grader, solutions, id)) for id in ("2.1", "1.3")}


def limits_of(attack: Attack) -> Limits:
    return Limits(attack.seconds, SMALL.memory, SMALL.processes)


def processes_inside(grader: Grader) -> list[psutil.Process]:
    """What runs in the sandbox beside bubblewrap's own process and the one that waits."""
    return grader.sandbox.processes()[2:]


def marked_processes() -> list[str]:
    return [p.info["name"] for p in psutil.process_iter(["name"]) if MARK[:15] in p.info["name"]]


def marked_files() -> list[str]:
    """Files that an attack left in the places where it tried."""
    folders = ["/tmp", "/var/tmp", "/dev/shm", "/", "/usr", "/root", os.getcwd(), Path.home()]
    folders += [outline.COURSE_ROOT, Path(torch.__file__).parent, os.path.dirname(os.__file__)]
    return [str(folder) for folder in folders if (Path(folder) / MARK).exists()]


# --- who is honest, and who is merely wrong ---


def test_honest_submissions_get_exactly_their_marks(honest):
    assert honest["2.1"]["points"] == honest["2.1"]["max_points"] == 2
    assert honest["1.3"]["points"] == honest["1.3"]["max_points"] == 2


def test_the_wrong_answer_below_every_trick_is_worth_nothing(grader):
    """So whatever an attack had above 0 would be its own doing"""
    result = judged(grader, {"embeddings": PRELUDE})
    assert (result.points, result.status, result.reason) == (0, "failed", "wrong")


def test_whoever_calls_the_library_itself_is_right_and_gets_the_marks(grader):
    """The grader sees what comes back and not how it was made; the handbook says so"""
    text = "def layer_norm(x, weight, bias, eps=1e-12):\n    import torch\n"
    text += "    wide = x.to(torch.promote_types(x.dtype, torch.float32))\n"
    text += "    given = x.shape[-1:], weight.to(wide), bias.to(wide), eps\n"
    text += "    return torch.nn.functional.layer_norm(wide, *given).to(x.dtype)\n"
    assert judged(grader, {"embeddings": text}).points == 2


# --- attacks ---


@pytest.mark.parametrize("name", EVERYTHING)
def test_an_attack_gains_nothing_and_leaves_nothing(name, grader, honest, solutions):
    attack = EVERYTHING[name]
    handed_in = {**solutions, "embeddings": PRELUDE + attack.text}
    result = judged(grader, handed_in, limits=limits_of(attack))

    assert result.points == 0 and result.status in ("failed", "error")
    found = {test.reason for test in result.tests}
    assert found & set(attack.reasons.split()), result.tests
    assert found <= {*attack.reasons.split(), *FAILURES, "wrong", "raised"}, result.tests
    assert not processes_inside(grader) and not marked_processes() and not marked_files()

    if name not in CHEATS:  # the same submission's other exercises
        assert record(judged(grader, handed_in, "1.3")) == honest["1.3"]
    assert record(judged(grader, solutions)) == honest["2.1"]  # and the next submission


def test_there_are_enough_attacks():
    assert len(EVERYTHING) >= 40


def test_answers_for_the_public_seed_are_worth_nothing(grader, complete):
    """A table of the notebook's cases and their answers, and a wrong answer for all others"""
    known, count = [], complete.config.count_parameters
    noting = SimpleNamespace(
        count_parameters=lambda c: known.append([vars(c), count(c)]) or count(c)
    )
    exercise = exercises.load("0.1")
    for case in exercise.cases(np.random.default_rng(judging.PUBLIC_SEED)):
        assert judging.run(exercise, noting, case, "cpu", case.dtype).error is None
    text = f"KNOWN = {known!r}\n\n\ndef count_parameters(config):\n"
    text += "    return dict((str(k), v) for k, v in KNOWN).get(str(vars(config)), 1)\n"
    config = grader.given["config"] + "\n\n" + text
    public = {c[1] for c in known}
    assert len(public) > 3
    assert judged(grader, {"config": config}, "0.1").points == 0


def test_patched_comparisons_hide_no_change_in_place(grader):
    honestly = "import torch\ndef layer_norm(x, weight, bias, eps=1e-12):\n"
    honestly += "    given = x.float(), x.shape[-1:], weight.float(), bias.float(), eps\n"
    honestly += "    right = torch.nn.functional.layer_norm(*given).to(x.dtype)\n"
    changing = honestly + "    x.detach().zero_()\n    return right\n"
    patched = "import copy, torch\ntorch.equal = lambda *a: True\ncopy.deepcopy = lambda x: x\n"
    plainly, hidden = (
        judged(grader, {"embeddings": text}) for text in (changing, patched + changing)
    )
    assert judged(grader, {"embeddings": f"{honestly}    return right\n"}).points == 2
    assert plainly.points == hidden.points == 0


def test_who_forges_the_answer_about_it_gains_what_a_copy_would_have_given(grader):
    """Whether an argument was changed is found out beside the student's code; see the handbook"""
    body = "    given = x.float(), x.shape[-1:], weight.float(), bias.float(), eps\n"
    body += "    right = torch.nn.functional.layer_norm(*given).to(x.dtype)\n"
    body += "    x.detach().zero_()\n    return right\n"
    head = "import torch\ndef layer_norm(x, weight, bias, eps=1e-12):\n"
    forged = "import __main__\n__main__.same = lambda *a: True\n" + head + body
    copied = head + "    x = x.clone()\n" + body
    first, second = (judged(grader, {"embeddings": text}) for text in (forged, copied))
    assert first.points <= second.points


# --- what can be seen and reached ---


@pytest.fixture
def somebody_listens() -> Iterator[tuple[int, str]]:
    """Servers on this machine, at a port and at a name."""
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as named:
        named.bind(f"\0{MARK}-socket")
        named.listen()
        yield port.getsockname()[1], f"{MARK}-socket"


def seen(grader: Grader, port: int, canary: str) -> dict[str, str]:
    """What a submission sees and reaches that looks around."""
    places = [str(outline.COURSE_ROOT / name) for name in ("tests", "solutions", "book.toml")]
    safe = grader.sandbox.level == "none"
    facts = f"PLACES, CANARY, PORT, LOOK_ONLY = {places!r}, {canary!r}, {port}, {safe}\n"
    result = judged(grader, {"embeddings": PRELUDE + facts + PEEPING})
    assert result.reason == "raised", result.tests
    return json.loads(result.tests[0].detail.split("ValueError: ")[-1])


def test_nothing_can_be_seen_or_reached(grader, somebody_listens, monkeypatch):
    """Not the course, the grader, its memory or environment, the network or other processes"""
    monkeypatch.setenv("BERTLAB_CANARY", somebody_listens[1])
    grader.sandbox.stop()  # so that it starts with this environment
    assert seen(grader, *somebody_listens) == {}
    assert not marked_files()


def test_who_looks_around_without_a_sandbox_sees_all_of_this(grader, somebody_listens):
    """So the test above can fail; and without a sandbox nobody else's process is ended"""
    bystander = psutil.Popen(["sleep", "60"])
    grader.sandbox.stop()
    grader.sandbox.level = "none"
    try:
        found = seen(grader, *somebody_listens)
        leftover = judged(grader, {"embeddings": PRELUDE + LEFTOVERS["a daemon"].text})
        assert leftover.points == 0 and not marked_processes()
        assert bystander.is_running() and bystander.status() != psutil.STATUS_ZOMBIE
    finally:
        grader.sandbox.stop()
        grader.sandbox.level = "bubblewrap"
        bystander.kill()
    assert {"places", "files", "network", "abstract socket"} <= set(found)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_system_calls_is_a_whole_program(machine):
    program = syscalls.filter_program(machine)
    assert program is not None and len(program) % 8 == 0 and len(program) < 8 * 4096
    assert syscalls.filter_program("other") is None


# --- what is handed in beside the modules ---


def planted(folder: Path) -> Path:
    """A submission full of what a grader might run or follow, with a wrong module."""
    evil = f"import os\nos.system('touch /tmp/{MARK}')\n"
    names = ["conftest.py", "sitecustomize.py", "usercustomize.py", "setup.py", "pytest.ini"]
    names += ["torch.py", "tests/hidden/test_x.py", "bertlab/__init__.py", "bertlab/course/a.py"]
    names += ["bertlab/course/__init__.py", "bertlab/conftest.py", "bertlab/course.py"]
    for name in [*names, "bertlab/course/grading/wire.py", "evil.pth", "bertlab/evil.so"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(evil)
    (folder / "bertlab" / "embeddings.py").write_text(PRELUDE)
    (folder / "bertlab" / "config.pyc").write_bytes(pickle.dumps(print))
    (folder / "bertlab" / "config.py").symlink_to(
        outline.COURSE_ROOT / "solutions/bertlab/config.py"
    )
    (folder / "book.toml").write_text("points = 1000")
    return folder


def test_what_is_planted_beside_the_modules_is_ignored_and_said(grader, honest, tmp_path):
    (found,) = submissions.find(planted(tmp_path / "mallory")).found
    handed_in = submissions.read(found)
    assert set(handed_in.modules) == {"embeddings"}
    ignored = " ".join(handed_in.ignored)
    for name in ("conftest.py", "sitecustomize.py", "bertlab/course.py", "config.py (a link)"):
        assert name in ignored
    assert judged(grader, handed_in.modules).points == 0
    assert judged(grader, handed_in.modules, "0.1").points == 0  # the link gave nothing
    assert not marked_files()


def test_a_zip_that_leads_out_and_a_pickle_for_a_module_give_nothing(grader, tmp_path):
    class Runs:
        def __reduce__(self) -> Any:
            return os.system, (f"touch /tmp/{MARK}",)

    with zipfile.ZipFile(tmp_path / "mallory.zip", "w") as archive:
        archive.writestr("bertlab/embeddings.py", PRELUDE)
        archive.writestr("bertlab/config.py", pickle.dumps(Runs()))
        for name in (f"../../../tmp/{MARK}", f"/tmp/{MARK}", "bertlab/../../x/embeddings.py"):
            archive.writestr(name, "x")
        link = zipfile.ZipInfo("bertlab/tokenizer.py")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, str(outline.COURSE_ROOT / "solutions/bertlab/tokenizer.py"))
    (found,) = submissions.find(tmp_path / "mallory.zip").found
    modules = submissions.read(found).modules
    assert "tokenizer" not in modules
    assert all(judged(grader, modules, id).points == 0 for id in ("0.1", "1.3", "2.1"))
    assert not marked_files()


# --- what a hidden test does with an answer, on the trusted side ---


class Answers:
    """A session that answers everything with one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return wire.crossed({"value": self.value, "changed": None})


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/b", "..", "", ".hidden", "x" * 200, "a\0b", "a\nb"]
)
def test_a_file_that_comes_back_stays_in_its_folder(name):
    content = torch.zeros(3, dtype=torch.uint8)
    folder = Kept(Submission(Answers({name: content}), "5.4", SEED), 1)
    with pytest.raises(AssertionError, match="no name of a file"):
        folder.files()


def test_of_the_files_that_come_back_none_is_a_program():
    content = torch.zeros(3, dtype=torch.uint8)
    names = ("config.json", "pytorch_model.bin", "modeling.py", "model.safetensors", "x.pkl")
    folder = Kept(Submission(Answers(dict.fromkeys(names, content)), "5.4", SEED), 1)
    assert set(folder.files()) == {"config.json", "model.safetensors"}
    with pytest.raises(AssertionError, match="not bytes"):
        Kept(Submission(Answers({"config.json": "text"}), "5.4", SEED), 1).files()


@pytest.mark.parametrize("kind", ["StopIteration", "StopAsyncIteration", "Nothing", "SystemExit"])
def test_what_a_student_raises_ends_no_loop_and_no_test(kind):
    error = raised({"kind": kind, "message": "x", "exact": kind})
    assert isinstance(error, Exception) and is_students(error)
    assert not isinstance(error, (StopIteration, StopAsyncIteration))


def test_a_span_as_long_as_the_world_is_only_wrong(grader):
    text = "def pre_tokenize(text):\n    return [('x', (0, 10**12))]\n"
    result = judged(grader, {"tokenizer": text}, "1.2")
    assert result.points == 0 and "grader" not in {test.reason for test in result.tests}


def test_a_config_as_large_as_the_world_is_only_wrong(grader, solutions):
    """What a student saved is read by Transformers on the trusted side: no more than is known"""
    line = next(x for x in solutions["weights"].split("\n") if "config = model.config.to_hf()" in x)
    huge = line + '\n    config |= {"vocab_size": 10**12, "auto_map": {"AutoModel": "x.y"}}'
    handed_in = {**solutions, "weights": solutions["weights"].replace(line, huge)}
    result = judged(grader, handed_in, "5.4")
    assert result.points < result.max_points
    assert "grader" not in {test.reason for test in result.tests}


def test_a_submission_that_fails_an_exercise_is_not_given_its_solution_later(grader, solutions):
    """The stand-in for 2.1 is there while 2.3 is judged; a note of it is gone afterwards"""
    keeps = "\nimport os\nfor folder in ('/tmp', '/tmp/package'):\n"
    keeps += "    open(folder + '/note', 'a').write(open(__file__).read())\n"
    spoilt = replace_region(
        solutions["embeddings"], "2.1", "def layer_norm(*a):\n    return None\n"
    )
    reads = "def layer_norm(x, weight, bias, eps=1e-12):\n    import os\n"
    reads += "    notes = [f for f in ('/tmp/note', '/tmp/package/note') if os.path.exists(f)]\n"
    reads += "    raise ValueError(f'notes: {notes}')\n"
    grader.limits = GENEROUS
    list(grader.grade({**solutions, "embeddings": spoilt + keeps}, ["2.1", "2.3"]))
    result = judged(grader, {"embeddings": reads})
    assert all(test.detail.endswith("ValueError: notes: []") for test in result.tests)


# --- the wire ---


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, 2: [1.5, None, True], None: (), 1.5: {}, ("a", "b"): "x"},
        [float("inf"), -0.0, 10**30, "\ud800", torch.float16],
    ],
)
def test_what_is_plain_crosses_as_it_is(value):
    assert wire.crossed(value) == value


@pytest.mark.parametrize("key", [(1, 2), (-1,), 2**63, -(2**64), ("a", (1,))])
def test_a_dict_with_keys_of_which_many_could_share_a_hash_does_not_cross(key):
    assert isinstance(wire.crossed({key: 1}), wire.Opaque)


def test_a_number_is_a_number(monkeypatch):
    for content in ("1e5", "Infinity", [1], True, None, "9" * 10**6):
        with pytest.raises(wire.WireError):
            wire._decoded({"float": content}, {}, 9)
