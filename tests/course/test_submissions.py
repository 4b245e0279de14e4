"""What was handed in: found in folders and zips of all kinds, read in memory, never trusted."""

import io
import os
import stat
import struct
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from bertlab.course.grading import submissions
from bertlab.course.grading.submissions import UnreadableSubmission, find, read

CONFIG = "def count_parameters(config):\n    return 1\n"


def zipped(files: Mapping[str, str | bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip of these files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def laid_out(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files below a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def handed_in(path: Path) -> dict[str, submissions.HandedIn]:
    return {found.student: read(found) for found in find(path).found}


def only(path: Path) -> submissions.HandedIn:
    (one,) = handed_in(path).values()
    return one


# --- what is found ---


PACKAGE = {"bertlab/config.py": CONFIG, "chapters/00.ipynb": "{}", "bertlab/helper.py": "x"}


@pytest.mark.parametrize(
    "layout",
    [
        {f"alice/{name}": text for name, text in PACKAGE.items()},
        {"alice/config.py": CONFIG},
        {f"alice/my work/v2/{name}": text for name, text in PACKAGE.items()},
        {"alice.zip": zipped(PACKAGE)},
        {"alice.ZIP": zipped({f"alice/{name}": text for name, text in PACKAGE.items()})},
        {"alice_assignsubmission_file_/work.zip": zipped(PACKAGE)},
        {"all of them/alice.zip": zipped(PACKAGE), "all of them/bob.zip": zipped({})},
        {"class.zip": zipped({"alice.zip": zipped(PACKAGE), "bob.zip": zipped({})})},
        {"class.zip": zipped({f"all/{who}/config.py": CONFIG for who in ("alice", "bob")})},
    ],
    ids=[
        "a folder with the package",
        "a folder with modules",
        "deep in a folder",
        "a zip",
        "a zip with a folder",
        "a zip in Moodle's folder",
        "zips in one folder",
        "a zip of zips",
        "a zip of folders",
    ],
)
def test_a_submission_is_found_in_every_form(tmp_path, layout):
    path = laid_out(tmp_path / "in", layout)
    path = path / "class.zip" if "class.zip" in layout else path
    alice = handed_in(path)["alice"]
    assert alice.modules == {"config": CONFIG}
    assert alice.problem == ""


def test_what_is_ignored_is_said(tmp_path):
    laid_out(tmp_path, {f"alice/{name}": text for name, text in PACKAGE.items()})
    laid_out(tmp_path, {"README.md": "", ".DS_Store": "", "alice/.git/config.py": "x"})
    assert sorted(only(tmp_path).ignored) == ["bertlab/helper.py", "chapters/00.ipynb"]
    assert find(tmp_path).ignored == ["README.md"]


def test_a_whole_course_copy_is_its_package_not_its_stubs(tmp_path):
    stubs = dict.fromkeys(("scripts/config.py", "mine/bertlab/course/pristine/config.py"), "stub")
    laid_out(tmp_path / "in" / "alice", {"mine/bertlab/config.py": CONFIG, **stubs})
    assert only(tmp_path / "in").modules == {"config": CONFIG}


@pytest.mark.parametrize("as_zip", [True, False])
def test_one_submission_alone_is_graded_too(tmp_path, as_zip):
    if as_zip:
        path = laid_out(tmp_path, {"alice.zip": zipped(PACKAGE)}) / "alice.zip"
    else:
        path = laid_out(tmp_path / "alice", PACKAGE)
    assert only(path).student == "alice"
    assert only(path).modules == {"config": CONFIG}


def test_files_that_canvas_hands_out_one_by_one_are_one_submission(tmp_path):
    names = ("doejane_77_1001_config.py", "doejane_LATE_77_1002_tokenizer-1.py")
    laid_out(tmp_path, dict.fromkeys(names, CONFIG))
    one = only(tmp_path)
    assert one.student == "doejane_77"
    assert one.modules == {"config": CONFIG, "tokenizer": CONFIG}


def test_two_submissions_of_one_student_are_both_kept(tmp_path):
    laid_out(tmp_path, {"alice/config.py": CONFIG, "Alice.zip": zipped({"config.py": "other"})})
    found = handed_in(tmp_path)
    assert sorted(found) == ["Alice", "alice (2)"]
    assert {one.modules["config"] for one in found.values()} == {CONFIG, "other"}


def test_a_zip_beside_its_own_contents_is_one_submission(tmp_path):
    laid_out(tmp_path, {"alice/config.py": CONFIG, "alice.zip": zipped({"config.py": CONFIG})})
    assert list(handed_in(tmp_path)) == ["alice"]
    assert find(tmp_path).ignored == ["alice.zip (the same as alice)"]


def test_names_in_any_encoding_are_names(tmp_path):
    nfd = "Mu\u0308ller"
    laid_out(tmp_path / "in", {f"{nfd}/config.py": CONFIG})
    os.mkdir(os.fsencode(tmp_path / "in") + b"/J\xf6rg")
    assert sorted(handed_in(tmp_path / "in")) == ["J\ufffdrg", "M\u00fcller"]
    unmarked = zipped({"Xy.zip": zipped({"config.py": CONFIG}), "b.zip": b""})
    unmarked = unmarked.replace(b"Xy.zip", "\u00fc.zip".encode())  # UTF-8, and does not say so
    assert "\u00fc" in handed_in(laid_out(tmp_path, {"c.zip": unmarked}) / "c.zip")


def test_a_students_name_cannot_reach_out_of_a_line_or_folder():
    assert submissions.student_id("a\n\u202eb/../c\\d") == "a__b_.._c_d"
    assert submissions.student_id("") == "unnamed"


def test_a_module_is_read_as_python_would_read_it(tmp_path):
    data = "# coding: latin-1\r\nname = '\u00fc'\r\n".encode("latin-1")
    laid_out(tmp_path / "in" / "a", {"config.py": data, "tokenizer.py": b"\xef\xbb\xbfx = 1\n"})
    modules = only(tmp_path / "in").modules
    assert modules == {"config": "# coding: utf-8\nname = '\u00fc'\n", "tokenizer": "x = 1\n"}


# --- what cannot be read ---


def damaged(data: bytes) -> bytes:
    """A zip whose contents do not fit its checksums."""
    place = data.index(b"config.py") + 20
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


def encrypted(data: bytes) -> bytes:
    """A zip that says of its entries that they are encrypted."""
    for mark, offset in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        place = data.index(mark) + offset
        data = data[:place] + b"\x01\x00" + data[place + 2 :]
    return data


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.zip", b"no zip at all", "not a readable zip"),
        ("a.zip", zipped(PACKAGE)[:-30], "not a readable zip"),
        ("a.zip", b"", "not a readable zip"),
        ("a.zip", zipped({}), "is empty"),
        ("a.zip", damaged(zipped({"config.py": CONFIG * 50})), "config.py (not read:"),
        ("a.zip", encrypted(zipped({"config.py": CONFIG})), "encrypted"),
        ("a.zip", zipped({"config.py": CONFIG}, zipfile.ZIP_LZMA), "unusual method"),
        ("a.zip", zipped({"b.zip": zipped({}), "c.zip": zipped({})}), "several zips"),
        ("a.zip", zipped({"x/bertlab/config.py": "", "y/bertlab/config.py": ""}), "several pack"),
        ("a.rar", b"Rar!", "ask for a zip"),
        ("a.ipynb", b"{}", "notebooks are not judged"),
        ("a/notes.txt", b"", "holds no exercise module"),
        ("a/config.py", b"\xff\xfe\x00", "not text in UTF-8"),
        ("a/config.py", b"#" * (submissions.MAX_MODULE + 1), "larger than 1 MB"),
    ],
)
def test_an_unreadable_submission_says_why_and_is_not_lost(tmp_path, name, content, says):
    laid_out(tmp_path / "in", {name: content, "bob/config.py": CONFIG})
    found = handed_in(tmp_path / "in")
    assert says in found["a"].problem
    assert found["a"].modules == {}
    assert found["bob"].modules == {"config": CONFIG}


def test_one_unreadable_module_leaves_the_others(tmp_path):
    laid_out(tmp_path / "in" / "a", {"config.py": CONFIG, "tokenizer.py": b"\xff\xfe\x00"})
    one = only(tmp_path / "in")
    assert one.modules == {"config": CONFIG}
    assert one.ignored == ["tokenizer.py (not read: not text in UTF-8)"]


@pytest.mark.parametrize("name", ["nowhere", "file.txt"])
def test_submissions_that_are_none_are_said(tmp_path, name):
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises((FileNotFoundError, UnreadableSubmission), match=name):
        find(tmp_path / name)


# --- what is hostile ---


def test_links_and_devices_on_disk_are_not_followed(tmp_path):
    secret = laid_out(
        tmp_path / "secret", {"config.py": "SECRET", "bertlab/tokenizer.py": "SECRET"}
    )
    folder = laid_out(tmp_path / "in", {"a/attention.py": CONFIG}) / "a"
    (folder / "config.py").symlink_to(secret / "config.py")
    (folder / "bertlab").symlink_to(secret / "bertlab")
    os.mkfifo(folder / "embeddings.py")
    (tmp_path / "in" / "b").symlink_to(secret)
    found = handed_in(tmp_path / "in")
    assert found["a"].modules == {"attention": CONFIG}
    assert set(found["a"].ignored) == {
        "bertlab (a link)",
        "config.py (a link)",
        "embeddings.py (not a file)",
    }
    assert found["b"].modules == {}
    assert found["b"].problem


def test_a_file_that_becomes_a_link_after_it_was_found_is_not_followed(tmp_path):
    secret = laid_out(tmp_path, {"secret.py": "SECRET"}) / "secret.py"
    folder = laid_out(tmp_path / "in" / "a", {"config.py": CONFIG})
    files = submissions._files_of_folder(folder)
    (folder / "config.py").unlink()
    (folder / "config.py").symlink_to(secret)
    with pytest.raises(OSError):
        files[0].read(100)


@pytest.mark.parametrize(
    "name",
    ["../config.py", "/config.py", "C:\\config.py", "bertlab/../../config.py", "..\\config.py"],
)
def test_a_name_that_leads_out_of_a_zip_is_refused(tmp_path, name):
    content = zipped({name: "SECRET", "bertlab/tokenizer.py": CONFIG})
    one = only(laid_out(tmp_path / "in", {"a.zip": content}))
    assert one.modules == {"tokenizer": CONFIG}
    assert any("its name leads out of the zip" in line for line in one.ignored)


def test_a_name_that_leads_out_of_a_zip_of_zips_is_no_student(tmp_path):
    content = zipped({"../x/config.py": "SECRET", "a.zip": zipped(PACKAGE), "/b.zip": b""})
    path = laid_out(tmp_path, {"class.zip": content}) / "class.zip"
    assert [one.student for one in find(path).found if read(one).modules] == ["a"]


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFBLK])
def test_links_and_devices_in_a_zip_are_refused(tmp_path, kind):
    entry = zipfile.ZipInfo("bertlab/config.py")
    entry.external_attr = (kind | 0o777) << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(entry, "/etc/passwd")
        archive.writestr("bertlab/tokenizer.py", CONFIG)
    one = only(laid_out(tmp_path / "in", {"a.zip": buffer.getvalue()}))
    assert one.modules == {"tokenizer": CONFIG}
    said = "a link" if kind == stat.S_IFLNK else "not a file"
    assert one.ignored == [f"bertlab/config.py ({said})"]


def test_a_bomb_costs_no_memory(tmp_path):
    """A module of 100 MB in a zip of 100 kB, and one that claims to be small."""
    bomb = zipped({"config.py": b"\0" * (100 * 2**20)})
    lying = bomb.replace(struct.pack("<I", 100 * 2**20), struct.pack("<I", 10))
    laid_out(tmp_path / "in", {"a.zip": bomb, "b.zip": lying})
    del bomb, lying
    tracemalloc.start()
    found = handed_in(tmp_path / "in")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "larger than 1 MB" in found["a"].problem
    assert found["b"].problem
    assert peak < 10 * 2**20


def test_a_zip_that_unpacks_into_too_large_a_zip_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "MAX_INNER_ZIP", 2**20)
    content = zipped({"inner.zip": b"\0" * (2**20 + 1)})
    assert "larger than 1 MB" in only(laid_out(tmp_path / "in", {"a.zip": content})).problem


def test_a_table_of_contents_cannot_take_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "MAX_CONTENTS", 10_000)
    content = zipped({f"{number}.txt": "" for number in range(1000)})
    one = only(laid_out(tmp_path / "in", {"a.zip": content}))
    assert "too large a table of contents" in one.problem


def test_too_many_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "MAX_FILES", 10)
    files = {f"{number}.txt": "" for number in range(11)} | {"config.py": CONFIG}
    laid_out(tmp_path / "in", {"a.zip": zipped(files)})
    laid_out(tmp_path / "in" / "b", files)
    assert {one.problem for one in handed_in(tmp_path / "in").values()} == {
        "holds more than 10 files"
    }


def test_zips_in_zips_come_to_an_end(tmp_path):
    content = zipped({"config.py": CONFIG})
    for _ in range(5):
        content = zipped({"inner.zip": content})
    assert "zips in each other" in only(laid_out(tmp_path / "in", {"a.zip": content})).problem


def test_of_two_files_with_one_name_the_later_counts(tmp_path):
    content = zipped({"config.py": "first", "cOnfig.py": CONFIG}).replace(b"cOnfig", b"config")
    assert only(laid_out(tmp_path / "in", {"a.zip": content})).modules == {"config": CONFIG}


def test_nothing_is_written_to_disk(tmp_path, monkeypatch):
    files = {"a.zip": zipped({"inner.zip": zipped(PACKAGE)}), "b/bertlab/config.py": CONFIG}
    path = laid_out(tmp_path / "in", files)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("tempfile.mkstemp", None)
    monkeypatch.setattr("tempfile.mkdtemp", None)
    monkeypatch.setattr(os, "mkdir", None)
    assert all(one.modules for one in handed_in(path).values())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_fingerprint_changes_with_what_is_judged_and_with_nothing_else(tmp_path):
    first = only(laid_out(tmp_path / "1", {"a/config.py": CONFIG}))
    noted = only(laid_out(tmp_path / "2", {"a/config.py": CONFIG, "a/notes.txt": "x"}))
    other = only(laid_out(tmp_path / "3", {"a/config.py": CONFIG + "\n"}))
    assert first.fingerprint == noted.fingerprint != other.fingerprint
