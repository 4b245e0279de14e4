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
    for cell in ("%%fill 0.1\n\n", "%%fill 0.1\n", "%%fill 0.1"):
        refused(session, cell, "The cell is empty. Nothing was written.")


def test_a_magic_inside_the_cell_is_explained(session):
    refused(session, "%%fill 0.1\n%matplotlib inline\n", "notebook magics")


def test_an_exercise_comment_in_the_cell_is_refused(session):
    cell = (
        "%%fill 0.1\ndef count_parameters(config):\n    return 1\n# --- end of exercise 0.1 ---\n"
    )
    refused(session, cell, "leave it out of the cell. Nothing was written.")


def test_a_cell_that_cannot_be_imported_is_not_written(session):
    cell = "%%fill 0.1\ndef count_parameters(config):\n    return 1\nprint(config)\n"
    refused(session, cell, "NameError", "Nothing was written", "runs inside bertlab/config.py")


def test_a_cell_that_exits_is_not_written(session):
    cell = "%%fill 0.1\ndef count_parameters(config):\n    return 1\nimport sys; sys.exit(0)\n"
    refused(session, cell, "it called sys.exit. Nothing was written")


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


def test_an_exit_inside_is_a_failure_and_the_kernel_lives(session):
    running, _ = session
    result = running.run("%%fill 0.1\ndef count_parameters(config):\n    raise SystemExit(0)\n")
    assert (
        not result.error
        and result.text.startswith("✗ not yet")
        and "called sys.exit" in result.text
    )
    assert running.run("print(6 * 7)").printed == "42\n"


def test_a_name_that_the_module_lacks_is_explained(session):
    running, _ = session
    result = running.run("%%fill 0.1\ndef count_parameters(config):\n    return np.sum(config)\n")
    assert "runs inside bertlab/config.py" in result.text and "sees only" in result.text


def test_a_wrong_value_names_the_misconception(session):
    running, _ = session
    result = running.run(RIGHT.replace("+ h * h + h\n", "\n"))
    assert "the pooler is left out" in result.text
    assert "This notebook uses your version from now on" in result.text
    assert running.run("print(count_parameters(BertConfig.base()))").printed != "109482240\n"
    assert "This notebook uses" not in running.run("%check 0.1").text


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


def test_a_cell_that_is_partly_done_is_written_and_says_what_is_left(session):
    running, copy = session
    path = copy / "bertlab" / "attention.py"
    stub = find_regions(path.read_text())["3.2"].text
    todo = '    raise NotImplementedError("exercise 3.2")\n'
    half = stub.replace(todo, "    return x\n", 1)
    result = running.run(f"%%fill 3.2\n{half}")
    assert result.text.startswith("○ to do"), result.text
    assert "Still to be written: `merge_heads`." in result.text
    assert find_regions(path.read_text())["3.2"].text == normalize_text(half)
    assert Workspace(copy).status("3.2") == "todo"
    assert "Still to be written" in running.run(f"%%fill 3.2\n{stub}").text  # and not overwritten
    assert find_regions(path.read_text())["3.2"].text == normalize_text(half)
    more = half.replace(todo, "    kept = x\n" + todo)
    assert "`merge_heads`" in running.run(f"%%fill 3.2\n{more}").text
    kept = [file.read_text() for file in Workspace(copy).history("3.2")]
    assert normalize_text(half) in kept


def test_line_separators_in_a_text_damage_nothing(session):
    running, copy = session
    text = RIGHT.replace("    h, i", "    note = 'a\u2028b\x0cc\x85d'\n    h, i")
    cell = text.replace("0.1", "0.1 --overwrite", 1)
    assert "✓ passed" in running.run(cell).text
    assert "✓ passed" in running.run(RIGHT).text
    assert module(copy).read_text().count("end of exercise 0.1") == 1
    assert "note = " not in module(copy).read_text()
    broken = "%%fill 0.1\ndef count_parameters(config):\n    x = 'a\u2028b'\n    return (\n"
    refused(session, broken, "Line 3 of your code", "  |     return (")


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
    broken = "import bertlab.course.judging as j\njudge, j.judge = j.judge, None"
    running.run(broken)
    assert "✓ passed: 0.1" in running.run("%check 0").text
    running.run("j.judge = judge")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "import os; os._exit(0)",
            "without a verdict (exit status 0): does your code call os._exit",
        ),
        ("import os; os.system('echo one; echo [')", "✓ passed"),
    ],
)
def test_no_exit_and_no_output_confuses_a_chapters_check(session, line, says):
    running, _ = session
    cell = RIGHT.replace("0.1", "0.1 --overwrite", 1).replace("    h, i", f"    {line}\n    h, i")
    Workspace(session[1]).fill("0.1", cell.split("\n", 1)[1], overwrite=True)
    result = running.run("%check 0")
    assert not result.error and says in result.text, result.text


def test_a_chapters_check_can_be_interrupted(session):
    running, copy = session
    loop = "def count_parameters(config):\n    while True: pass\n"
    Workspace(copy).fill("0.1", loop, overwrite=True)
    result = running.run("%check 0", interrupt_after=8)
    assert not result.error and "Interrupted" in result.text
    assert running.run("print(6 * 7)").printed == "42\n"


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
    # Whatever was killed was this notebook's own writing, and what it left is cleared away.
    Workspace(student_copy).fill("0.1", "def count_parameters(config):\n    return 1\n")
    for folder in ("bertlab", ".bertlab"):
        assert not list((student_copy / folder).glob(".*.new"))


def test_a_fill_killed_before_it_was_noted_is_no_foreign_work(student_copy, monkeypatch):
    workspace = Workspace(student_copy)
    monkeypatch.setattr(Workspace, "_remember_fill", lambda *arguments: None)  # killed just before
    workspace.fill("0.1", "def count_parameters(config):\n    return 1\n")
    monkeypatch.undo()
    (student_copy / "bertlab" / ".config.py.abc.new").write_text("half a")
    assert workspace.fill("0.1", "def count_parameters(config):\n    return 2\n")
    assert not list((student_copy / "bertlab").glob(".*.new"))


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


BEGIN = "# --- exercise 3.2: split and merge heads ---\n"
END = "# --- end of exercise 3.2 ---\n"


@pytest.mark.parametrize("lost", [(BEGIN,), (END,), (BEGIN, END)])
def test_a_lost_comment_line_is_named_and_locks_nobody_out(student_copy, lost):
    path = student_copy / "bertlab" / "attention.py"
    text = path.read_text().replace('NotImplementedError("exercise 3.2")', "KeyError('mine')")
    for line in lost:
        assert line in text
        text = text.replace(line, "")
    path.write_text(text)
    workspace = Workspace(student_copy)
    assert workspace.status("3.2") == "error"
    assert workspace.status("3.1") == "todo"
    done = bertlab(student_copy, "check", "3.1", "3.2")
    assert done.returncode == 1 and "to do: 3.1" in done.stdout, done.stdout + done.stderr
    assert lost[0].strip().replace("split and merge heads", "...") + "' is missing" in done.stdout
    assert "bertlab reset 3.2" in done.stdout
    assert bertlab(student_copy, "status").returncode == 0

    workspace.fill("3.1", "def scaled_dot_product_attention(*inputs):\n    return 1\n")
    text = path.read_text()
    assert "is back to its stub" in bertlab(student_copy, "reset", "3.2").stdout
    assert is_stub(workspace.region("3.2").text)
    assert "return 1" in workspace.region("3.1").text
    assert workspace.history("3.2")[-1].read_text() == text
    assert workspace.fill("3.2", "def split_heads(x, n):\n    return x\n")


def test_a_file_of_another_encoding_is_said(student_copy):
    workspace, path = Workspace(student_copy), module(student_copy)
    text = path.read_text()
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())  # Notepad's mark
    assert workspace.source("config") == text
    path.write_bytes(text.encode() + "# caf\u00e9\n".encode("latin-1"))
    line = text.count("\n") + 1
    done = bertlab(student_copy, "check", "0.1", "2.1")
    assert f"bertlab/config.py is not in UTF-8 (line {line})" in done.stdout
    assert "save it as UTF-8." in done.stdout
    assert "to do: 2.1" in done.stdout


def test_a_progress_file_edited_by_hand_harms_nothing(student_copy):
    workspace = Workspace(student_copy)
    workspace.fill("0.1", "def count_parameters(config):\n    return 1\n")
    path = student_copy / ".bertlab" / "progress.json"
    path.write_text('{"3.1": 5, "0.1": {"status": "passed"}}')
    assert workspace.status("0.1") == "stale"
    assert workspace.status("3.1") == "todo"
    workspace.remember("3.1", hints=1)
    assert workspace.progress()["3.1"] == {"hints": 1}


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
