"""`%%fill` in a real kernel: whatever goes wrong, the file stays intact and the message helps."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bertlab.course.regions import find_regions, is_stub, normalize_text
from bertlab.course.workspace import RegionChanged, Workspace

from .kernels import bertlab, kernel

LOAD = "%load_ext bertlab.course"
DOC = '    """Doc."""\n'
RIGHT = """%%fill 0.1
def count_parameters(config):
    h, i = config.hidden_size, config.intermediate_size
    rows = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
    layer = 4 * (h * h + h) + (h * i + i) + (i * h + h) + 4 * h
    return rows * h + 2 * h + config.num_hidden_layers * layer + h * h + h
"""


def module(copy: Path) -> Path:
    return copy / "bertlab" / "config.py"


@pytest.fixture(scope="module")
def session(pristine_copy, tmp_path_factory):
    """One kernel for the module's tests: each must leave it usable for the next."""
    import shutil

    copy = tmp_path_factory.mktemp("student") / "course"
    shutil.copytree(pristine_copy, copy)
    with kernel(copy) as running:
        assert "The course is loaded" in running.run(LOAD).text
        yield running, copy


def refused(session, cell: str, *says: str) -> None:
    """Run a cell that must be refused: no traceback, the file as before, the kernel usable."""
    running, copy = session
    before = module(copy).read_bytes()
    result = running.run(cell)
    assert not result.error, result.error
    for text in says:
        assert text in result.text, result.text
    assert module(copy).read_bytes() == before
    assert running.run("print(6 * 7)").printed == "42\n"


def test_the_stub_is_to_do_and_not_an_error(session):
    _, copy = session
    text = find_regions(module(copy).read_text())["0.1"].text
    refused(session, f"%%fill 0.1\n{text}", "to do")


def test_a_syntax_error_points_at_the_cells_line(session):
    cell = "%%fill 0.1\ndef count_parameters(config):\n    return (1 +\n"
    refused(session, cell, "Line 2 of your code", "Nothing was written")


def test_a_wrong_name_is_named(session):
    cell = "%%fill 0.1\ndef count_params(config):\n    return 1\n"
    refused(session, cell, "`count_parameters`", "`count_params`")


def test_an_unknown_exercise_is_said(session):
    refused(session, "%%fill 9.9\nx = 1\n", "no exercise or chapter '9.9'")
    refused(session, "%%fill\nx = 1\n", "Name one exercise")


def test_an_empty_cell_is_said(session):
    refused(session, "%%fill 0.1\n\n", "empty")


def test_a_magic_inside_the_cell_is_explained(session):
    refused(session, "%%fill 0.1\n%matplotlib inline\n", "notebook magics")


def test_an_exercise_comment_in_the_cell_is_refused(session):
    cell = (
        "%%fill 0.1\ndef count_parameters(config):\n    return 1\n# --- end of exercise 0.1 ---\n"
    )
    refused(session, cell, "leave it out of the cell")


def test_a_cell_that_cannot_be_imported_is_not_written(session):
    cell = "%%fill 0.1\ndef count_parameters(config):\n    return 1\nprint(config)\n"
    refused(session, cell, "NameError", "Nothing was written")


def test_a_loop_that_never_ends_at_import_can_be_interrupted(session):
    running, copy = session
    before = module(copy).read_bytes()
    cell = "%%fill 0.1\ndef count_parameters(config):\n    return 1\nwhile True: pass\n"
    result = running.run(cell, interrupt_after=2)
    assert not result.error and "Interrupted" in result.text
    assert module(copy).read_bytes() == before


def test_an_exception_inside_shows_the_students_line(session):
    running, copy = session
    result = running.run("%%fill 0.1\ndef count_parameters(config):\n    return config.width\n")
    assert not result.error
    assert "AttributeError" in result.text and "return config.width" in result.text
    assert "def count_parameters(config):\n    return config.width" in module(copy).read_text()


def test_a_wrong_value_names_the_misconception(session):
    running, _ = session
    result = running.run(RIGHT.replace("+ h * h + h\n", "\n"))
    assert "the pooler is left out" in result.text


def test_an_endless_loop_in_a_check_can_be_interrupted(session):
    running, _ = session
    cell = "%%fill 0.1\ndef count_parameters(config):\n    while True: pass\n"
    result = running.run(cell, interrupt_after=4)
    assert not result.error and "Interrupted" in result.text
    assert running.run("print(6 * 7)").printed == "42\n"


def test_a_right_part_passes_and_the_notebooks_names_follow(session):
    running, copy = session
    running.run("from bertlab.config import count_parameters as mine, BertConfig")
    result = running.run(RIGHT)
    assert result.text.startswith("✓ passed"), result.text
    assert running.run("print(mine(BertConfig.base()))").printed == "109482240\n"
    assert Workspace(copy).status("0.1") == "passed"


def test_two_edits_in_the_same_second_are_both_judged(session):
    running, _ = session
    assert "✗" in running.run(RIGHT.replace("+ h * h + h\n", "+ h * h - h\n")).text
    assert "✓" in running.run(RIGHT).text


def test_work_done_in_an_editor_is_not_overwritten(session):
    running, copy = session
    running.run(RIGHT)
    edited = module(copy).read_text().replace("h * h + h\n", "h * h + h  # from my editor\n", 1)
    module(copy).write_text(edited)
    refused(session, RIGHT, "%pull 0.1", "--overwrite", "from my editor")
    pulled = running.run("%pull 0.1")
    assert "from my editor" in pulled.payload[0]["text"]
    assert "✓" in running.run(pulled.payload[0]["text"]).text


def test_overwriting_on_purpose_keeps_the_other_version(session):
    running, copy = session
    edited = module(copy).read_text().replace("from my editor", "a second thought")
    module(copy).write_text(edited)
    assert "✓" in running.run(RIGHT.replace("%%fill 0.1", "%%fill 0.1 --overwrite")).text
    kept = [path.read_text() for path in Workspace(copy).history("0.1")]
    assert any("a second thought" in text for text in kept)


def test_a_stub_cell_leaves_finished_work_alone(session):
    running, copy = session
    running.run(RIGHT)
    before = module(copy).read_bytes()
    stub = (
        '%%fill 0.1\ndef count_parameters(config):\n    raise NotImplementedError("exercise 0.1")\n'
    )
    assert "already holds your work" in running.run(stub).text
    assert module(copy).read_bytes() == before


def test_a_read_only_file_is_said_and_left(session):
    running, copy = session
    running.run(RIGHT)
    module(copy).chmod(0o444)
    try:
        refused(session, RIGHT.replace("4 * h\n", "h * 4\n"), "read-only", "chmod u+w")
    finally:
        module(copy).chmod(0o644)


def test_check_judges_the_file_and_not_a_name_in_the_notebook(session):
    running, copy = session
    running.run(RIGHT)
    running.run("import bertlab.config\nbertlab.config.count_parameters = lambda config: 0")
    assert "✓" in running.run("%check 0.1").text
    text = module(copy).read_text().replace("h * h + h\n", "h * h\n", 1)
    module(copy).write_text(text)
    running.run("import bertlab.config\nbertlab.config.count_parameters = lambda config: 109482240")
    assert "✗" in running.run("%check 0.1").text


def test_nan_and_a_wrong_shape_are_said_as_such(session):
    running, _ = session
    nan = "%%fill 2.1\ndef layer_norm(x, weight, bias, eps=1e-12):\n    return x * float('nan')\n"
    assert "NaN" in running.run(nan).text
    shape = "%%fill 2.1\ndef layer_norm(x, weight, bias, eps=1e-12):\n    return x.sum(-1)\n"
    assert "shape" in running.run(shape).text
    nothing = "%%fill 2.1\ndef layer_norm(x, weight, bias, eps=1e-12):\n    x.mean(-1)\n"
    assert "None" in running.run(nothing).text


def test_a_chapter_is_judged_in_a_fresh_process(session):
    running, _ = session
    running.run(RIGHT.replace("%%fill 0.1", "%%fill 0.1 --overwrite"))
    running.run("import bertlab.course.judging as j\nj.judge = None  # break this kernel's judge")
    assert "✓ passed: 0.1" in running.run("%check 0").text


def test_a_write_killed_in_the_middle_leaves_the_old_file_or_the_new(student_copy):
    """Kill writers at random moments: the module must always be one of the texts, whole."""
    texts = {f"def count_parameters(config):\n    return {'1' * 40_000}{i}\n" for i in range(2)}
    program = (
        "import sys, itertools\nfrom pathlib import Path\n"
        "from bertlab.course.workspace import Workspace\nw = Workspace(Path(sys.argv[1]))\n"
        f"texts = {sorted(texts)!r}\nprint('ready', flush=True)\n"
        "for text in itertools.cycle(texts): w.fill('0.1', text, overwrite=True)\n"
    )
    seen = set()
    for attempt in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(student_copy)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=student_copy,
            env={**os.environ, "PYTHONPATH": str(student_copy)},
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.5 + 0.03 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen.add(find_regions(module(student_copy).read_text())["0.1"].text)
    assert seen <= {normalize_text(text) for text in texts} and seen
    leftovers = list((student_copy / "bertlab").glob(".*.new"))
    assert len(leftovers) <= 8  # a kill may leave its own unfinished copy, never the module


def test_a_full_disk_leaves_the_file_as_it_was(student_copy, monkeypatch):
    workspace = Workspace(student_copy)
    before = module(student_copy).read_bytes()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Exception, match="No space left"):
        workspace.fill("0.1", "def count_parameters(config):\n    return 1\n")
    assert module(student_copy).read_bytes() == before
    assert not list((student_copy / "bertlab").glob(".*.new"))


def test_reset_gives_the_stub_back_and_keeps_the_work(student_copy):
    workspace = Workspace(student_copy)
    workspace.fill("0.1", "def count_parameters(config):\n    return 41\n")
    assert workspace.reset("0.1")
    assert is_stub(workspace.region("0.1").text)
    assert "return 41" in workspace.history("0.1")[-1].read_text()


def test_a_verdict_goes_stale_when_the_code_changes(student_copy):
    workspace = Workspace(student_copy)
    done = bertlab(student_copy, "check", "0.1")
    assert done.returncode == 1 and "to do" in done.stdout, done.stderr
    workspace.fill("0.1", RIGHT.split("\n", 1)[1])
    assert workspace.status("0.1") == "stale"


def test_an_unreadable_progress_file_is_set_aside(student_copy):
    workspace = Workspace(student_copy)
    workspace.remember("0.1", hints=1)
    path = student_copy / ".bertlab" / "progress.json"
    path.write_text("{broken")
    assert workspace.progress() == {}
    assert path.with_suffix(".unreadable").read_text() == "{broken"


def test_a_foreign_region_is_never_overwritten_silently(student_copy):
    workspace = Workspace(student_copy)
    text = module(student_copy).read_text()
    module(student_copy).write_text(
        text.replace('raise NotImplementedError("exercise 0.1")', "return 7  # mine")
    )
    with pytest.raises(RegionChanged) as caught:
        workspace.fill("0.1", "def count_parameters(config):\n    return 8\n")
    assert "# mine" in caught.value.difference
