"""Find what was handed in, and read it: every submission becomes its modules' texts.

A submission is a folder or a zip with ``bertlab/`` or just exercise modules somewhere in it. A
folder or a zip of submissions, as learning platforms hand it out, may hold both kinds. Nothing is
extracted to disk: only exercise modules are read, in memory, each up to a size. Links, devices,
names with ``..`` and whatever else is no exercise module are ignored, and said.
"""

import hashlib
import io
import json
import os
import re
import stat
import tokenize
import unicodedata
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bertlab.course import outline

#: The most bytes of one exercise module.
MAX_MODULE = 2**20
#: The most bytes of a zip inside another zip; it is read into memory.
MAX_INNER_ZIP = 2**28
#: The most bytes that a zip's table of contents may have (about 100,000 names).
MAX_CONTENTS = 2**23
#: The most files of one submission.
MAX_FILES = 100_000
#: How many ignored files of a submission are named.
MAX_NAMED = 40
#: How many zips may lie in each other.
MAX_NESTED = 3

_NOISE = {"__MACOSX", "__pycache__", "node_modules", "Thumbs.db", "desktop.ini"}
_OTHER_ARCHIVES = (".rar", ".7z", ".tar", ".gz", ".tgz", ".bz2", ".xz")
_COMPRESSIONS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2}
_MOODLE = re.compile(r"_assignsubmission_(file|onlinetext)_?$")
_CANVAS = re.compile(r"(?P<name>[^_]+)_(?:LATE_)?(?P<user>\d+)_\d+_(?P<file>.+)")
_CODING = re.compile(r"^([ \t\f]*#.*?coding[:=][ \t]*)[-\w.]+", re.ASCII)


class UnreadableSubmission(ValueError):
    """A submission cannot be read, and why."""


@dataclass(frozen=True)
class HandedIn:
    """What a student handed in.

    Attributes:
        student: the student's id: the name of the folder or zip.
        where: where it was found.
        modules: the exercise modules, name to text.
        ignored: what else there is, and what was wrong with it.
        problem: why nothing could be read; "" if something was.
    """

    student: str
    where: str
    modules: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def fingerprint(self) -> str:
        """A hash of what is judged: it changes when the student hands in something else."""
        judged = json.dumps([self.modules, self.problem], sort_keys=True)
        return hashlib.sha256(judged.encode()).hexdigest()[:16]

    def record(self) -> dict[str, Any]:
        """What the gradebook keeps: everything but the texts."""
        return {
            "where": self.where,
            "modules": sorted(self.modules),
            "ignored": self.ignored,
            "problem": self.problem,
            "fingerprint": self.fingerprint,
        }


@dataclass(frozen=True)
class File:
    """A file of a submission: a path with ``/``, and how to read at most so many bytes of it."""

    path: str
    read: Callable[[int], bytes]
    refused: str = ""  # why it is not looked at


#: Opens something and lists its files; what must be closed goes on the stack.
Opener = Callable[[ExitStack], list[File]]


@dataclass(frozen=True)
class Found:
    """A submission that was found and is not read yet."""

    student: str
    where: str
    files: Opener


@dataclass(frozen=True)
class Findings:
    """What is in a folder or zip of submissions."""

    found: list[Found]
    ignored: list[str]


def find(path: Path) -> Findings:
    """Find the submissions in a folder or zip, which may itself be a single one.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        UnreadableSubmission: `path` is neither a folder nor a readable zip.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; name a folder or zip of submissions")
    name = path.resolve().stem if path.is_file() else path.resolve().name
    children, opener = _top(path)
    if _is_single(children):
        return Findings([Found(student_id(name), path.name, opener)], [])
    while (inner := _wrapped(children)) is not None:
        children = inner
    return _sorted_out(children)


def read(found: Found) -> HandedIn:
    """Read a submission; what is wrong with it is said in the result, and nothing is raised."""
    try:
        with ExitStack() as stack:
            return _handed_in(found, _unwrapped(found.files(stack), stack))
    except UnreadableSubmission as error:
        return HandedIn(found.student, found.where, problem=str(error))
    except Exception as error:  # zipfile raises many kinds on a damaged or hostile archive
        problem = f"cannot be read ({type(error).__name__}: {str(error)[:200]})"
        return HandedIn(found.student, found.where, problem=problem)


def student_id(name: str) -> str:
    """Return a name as a student's id: printable, and the same however it was encoded."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    text = unicodedata.normalize("NFC", _MOODLE.sub("", text))
    text = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069/\\]", "_", text)
    return text.strip()[:120] or "unnamed"


# --- what lies at the top ---


@dataclass(frozen=True)
class Child:
    """A folder or file at the top of what was handed to the grader."""

    name: str
    files: Opener  # a folder's, relative to it; of a file, itself
    inside: Callable[[], list["Child"]] | None = None  # None for a file
    refused: str = ""

    @property
    def is_folder(self) -> bool:
        return self.inside is not None

    @property
    def suffix(self) -> str:
        return "" if self.is_folder else os.path.splitext(self.name)[1].lower()


def _top(path: Path) -> tuple[list[Child], Opener]:
    if path.is_dir():
        return _children_of_folder(path), lambda stack: _files_of_folder(path)
    try:
        archive = zipfile.ZipFile(path)  # open as long as its submissions may be read
    except (OSError, zipfile.BadZipFile) as error:
        raise UnreadableSubmission(f"{path} is neither a folder nor a zip: {error}") from None
    files = _files_of_zip(archive, MAX_FILES * 100)
    return _children_of_files(files), lambda stack: files


def _children_of_folder(folder: Path) -> list[Child]:
    children = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        if entry.is_symlink():
            children.append(Child(entry.name, lambda stack: [], refused="a link"))
        elif entry.is_dir():
            inside = partial(_children_of_folder, path)
            children.append(Child(entry.name, lambda stack, p=path: _files_of_folder(p), inside))
        else:
            file = File(entry.name, partial(_read_file, path), _refused_on_disk(entry))
            children.append(Child(entry.name, lambda stack, f=file: [f], refused=file.refused))
    return [child for child in children if not _is_noise(child.name)]


def _children_of_files(files: list[File]) -> list[Child]:
    """The children of a zip's folder, from the files below it."""
    below: dict[str, list[File]] = {}
    children = []
    for file in files:
        first, _, rest = file.path.partition("/")
        if rest and not file.refused.startswith("its name"):
            below.setdefault(first, []).append(File(rest, file.read, file.refused))
        else:
            children.append(Child(first, lambda stack, f=file: [f], refused=file.refused))
    for name, inner in below.items():
        inside = partial(_children_of_files, inner)
        children.append(Child(name, lambda stack, inner=inner: inner, inside))
    return sorted((c for c in children if not _is_noise(c.name)), key=lambda child: child.name)


def _is_single(children: list[Child]) -> bool:
    """True if the whole is one submission, and not a collection of them."""
    return any(_module_of(child.name) and not child.is_folder for child in children) or any(
        child.name == "bertlab" and child.is_folder for child in children
    )


def _wrapped(children: list[Child]) -> list[Child] | None:
    """What lies in the only folder there is, if that holds several submissions."""
    if len(children) != 1 or children[0].inside is None:
        return None
    with ExitStack() as stack:
        files = children[0].files(stack)
    roots, zips = _roots(files), [file for file in files if _is_zip(file)]
    several = len(roots) > 1 if roots else len(zips) > 1
    return children[0].inside() if several else None


def _sorted_out(children: list[Child]) -> Findings:
    """Each child as a submission, or as ignored; several files of a Canvas student are one."""
    found: dict[str, Found] = {}
    ignored, canvas = [], {}
    for child in children:
        if not _may_be_submission(child):
            ignored.append(_said(child.name, child.refused))
        elif not child.is_folder and (match := _CANVAS.fullmatch(child.name)):
            student = student_id(f"{match['name']}_{match['user']}")
            canvas.setdefault(student, []).append((match["file"], child))
        else:
            name = child.name if child.is_folder else os.path.splitext(child.name)[0]
            _add(found, ignored, Found(student_id(name), child.name, child.files))
    for student, uploads in canvas.items():
        where = ", ".join(child.name for _, child in uploads)
        _add(found, ignored, Found(student, where, partial(_canvas_files, uploads)))
    return Findings(sorted(found.values(), key=lambda one: one.student), ignored)


def _may_be_submission(child: Child) -> bool:
    kinds = (".zip", ".py", ".ipynb", *_OTHER_ARCHIVES)
    return child.is_folder or child.refused == "a link" or child.suffix in kinds


def _canvas_files(uploads: list[tuple[str, Child]], stack: ExitStack) -> list[File]:
    """The files that one student uploaded one by one, with the names they had."""
    files = []
    for name, child in uploads:
        original = re.sub(r"-\d+(\.\w+)$", r"\1", name)
        files += [File(original, file.read, file.refused) for file in child.files(stack)]
    return files


def _add(found: dict[str, Found], ignored: list[str], new: Found) -> None:
    """Add a submission; a second one of the same student is kept beside the first."""
    number, student = 1, new.student
    while (taken := found.get(student.casefold())) is not None:
        if number == 1 and read(taken).fingerprint == read(new).fingerprint:
            ignored.append(f"{new.where} (the same as {taken.where})")
            return
        number += 1
        student = f"{new.student} ({number})"
    found[student.casefold()] = Found(student, new.where, new.files)


# --- one submission ---


def _unwrapped(files: list[File], stack: ExitStack) -> list[File]:
    """The files, with those of a zip in place of the zip where no module lies beside it."""
    for _ in range(MAX_NESTED):
        archives = [file for file in files if _is_zip(file)]
        if _roots(files) or not archives:
            return files
        if len(archives) > 1:
            raise UnreadableSubmission(
                "holds no exercise module but several zips: "
                + ", ".join(file.path for file in archives[:5])
            )
        others = [file for file in files if file is not archives[0]]
        files = [*_opened(archives[0], stack), *others]
    raise UnreadableSubmission(f"holds more than {MAX_NESTED} zips in each other")


def _opened(file: File, stack: ExitStack) -> list[File]:
    data = file.read(MAX_INNER_ZIP)
    if len(data) > MAX_INNER_ZIP:
        raise UnreadableSubmission(f"{file.path} is larger than {MAX_INNER_ZIP // 2**20} MB")
    try:
        archive = stack.enter_context(zipfile.ZipFile(_Careful(data)))
    except zipfile.BadZipFile as error:
        raise UnreadableSubmission(f"{file.path} is not a readable zip: {error}") from None
    return _files_of_zip(archive, MAX_FILES)


class _Careful(io.BytesIO):
    """A zip's bytes, of which no large piece is read at once.

    `zipfile` reads the whole table of contents, whose size is the archive's own claim, and makes
    an object of each entry: this bounds the memory that it can be made to take.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_CONTENTS:
            raise UnreadableSubmission("is a zip with too large a table of contents")
        return super().read(size)


def _handed_in(found: Found, files: list[File]) -> HandedIn:
    roots = _roots(files)
    if not roots:
        raise UnreadableSubmission(_nothing_found(files))
    if len(roots) > 1:
        raise UnreadableSubmission(
            "holds several packages, and which one counts cannot be known: "
            + ", ".join(root or "its top folder" for root in roots[:5])
        )
    modules, ignored, faults = {}, [], []
    for file in files:
        name = _module_below(file, roots[0])
        if name is None:
            ignored.append(_said(file.path, file.refused))
            continue
        try:
            modules[name] = text_of(file)
        except Exception as error:  # zipfile raises many kinds on a damaged or hostile archive
            faults.append(f"{file.path} (not read: {str(error)[:200] or type(error).__name__})")
    if not modules:
        raise UnreadableSubmission("; ".join(faults))
    return HandedIn(found.student, found.where, modules, faults + _shortened(ignored))


def _roots(files: list[File]) -> list[str]:
    """The folders that may be the package: those called ``bertlab``, and the highest of them."""
    folders = {os.path.dirname(file.path) for file in files if _is_module(file)}
    named = {folder for folder in folders if os.path.basename(folder) == "bertlab"}
    candidates = named or folders
    depth = min((_depth(folder) for folder in candidates), default=0)
    return sorted(folder for folder in candidates if _depth(folder) == depth)


def _depth(folder: str) -> int:
    return len(folder.split("/")) if folder else 0


def _is_module(file: File) -> bool:
    return bool(_module_of(os.path.basename(file.path))) and not file.refused


def _module_below(file: File, root: str) -> str | None:
    """The exercise module that a file is, if it lies in the package's folder."""
    if not _is_module(file) or os.path.dirname(file.path) != root:
        return None
    return _module_of(os.path.basename(file.path))


def _module_of(name: str) -> str | None:
    stem, suffix = os.path.splitext(name)
    return stem if suffix == ".py" and stem in outline.modules() else None


def _nothing_found(files: list[File]) -> str:
    if not files:
        return "is empty"
    refused = [f"{file.path} is {file.refused}" for file in files if file.refused]
    known = [file.path for file in files if file.path.lower().endswith(_OTHER_ARCHIVES)]
    if known:
        return f"is not a folder or a zip ({known[0]}); ask for a zip"
    said = "holds no exercise module such as bertlab/config.py"
    if any(file.path.endswith(".ipynb") for file in files):
        said += "; notebooks are not judged, but what %%fill wrote into bertlab/"
    return "; ".join([said, *refused[:3]])


def text_of(file: File) -> str:
    """Return the text of a module, as Python would read it.

    Raises:
        UnreadableSubmission: it is too large or no text.
    """
    data = file.read(MAX_MODULE)
    if len(data) > MAX_MODULE:
        raise UnreadableSubmission(f"larger than {MAX_MODULE // 2**20} MB")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        raise UnreadableSubmission("not text in UTF-8") from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if encoding in ("utf-8", "utf-8-sig"):
        return text
    lines = text.split("\n")  # it is handed on in UTF-8, so it must not say otherwise
    return "\n".join([_CODING.sub(r"\1utf-8", line) for line in lines[:2]] + lines[2:])


# --- files ---


def _files_of_folder(folder: Path) -> list[File]:
    files = list(_walked(folder, ""))
    if len(files) > MAX_FILES:
        raise UnreadableSubmission(f"holds more than {MAX_FILES:,} files")
    return files


def _walked(folder: Path, prefix: str) -> Iterator[File]:
    """The files below a folder; no link is followed."""
    waiting, seen = [(folder, prefix)], 0
    while waiting and seen <= MAX_FILES:
        here, above = waiting.pop()
        for entry in sorted(os.scandir(here), key=lambda entry: entry.name):
            path = f"{above}{entry.name}"
            if _is_noise(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append((Path(entry.path), f"{path}/"))
                continue
            seen += 1
            yield File(path, partial(_read_file, Path(entry.path)), _refused_on_disk(entry))


def _refused_on_disk(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "a link"
    return "" if entry.is_file(follow_symlinks=False) else "not a file"


def _read_file(path: Path, most: int) -> bytes:
    """At most `most` bytes of a plain file and one more; never of a link or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableSubmission("not a file")
        return file.read(min(most, found.st_size) + 1)  # Python sets aside what it is asked for


def _files_of_zip(archive: zipfile.ZipFile, most: int) -> list[File]:
    """The files of a zip; of two with the same name the later one counts, as it would on disk."""
    entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    if len(entries) > most:
        raise UnreadableSubmission(f"holds more than {most:,} files")
    files = {}
    for entry in entries:
        path = _name_in_zip(entry)
        if not any(_is_noise(part) for part in path.split("/")):
            files[path] = File(path, partial(_read_member, archive, entry), _refused(entry, path))
    return list(files.values())


def _read_member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, most: int) -> bytes:
    with archive.open(entry) as file:
        return file.read(most + 1)


def _name_in_zip(entry: zipfile.ZipInfo) -> str:
    """The name of an entry; many programs write UTF-8 and do not say so."""
    name = entry.filename
    if not entry.flag_bits & 0x800:
        try:
            name = name.encode("cp437").decode("utf-8")
        except UnicodeError:
            name = entry.filename
    return name.replace("\\", "/").removeprefix("./")


def _refused(entry: zipfile.ZipInfo, path: str) -> str:
    """Why an entry is not looked at, if so."""
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if path.startswith("/") or re.match(r"[A-Za-z]:", path) or ".." in path.split("/"):
        return "its name leads out of the zip"
    if kind == stat.S_IFLNK:
        return "a link"
    if kind not in (0, stat.S_IFREG):
        return "not a file"
    if entry.flag_bits & 0x1:
        return "encrypted"
    if entry.compress_type not in _COMPRESSIONS:
        return "compressed by an unusual method"
    return ""


def _is_zip(file: File) -> bool:
    return file.path.lower().endswith(".zip") and not file.refused


def _is_noise(name: str) -> bool:
    """True for what file managers, editors and version control leave; it is not even named."""
    return name in _NOISE or (name.startswith(".") and name not in (".", ".."))


def _said(path: str, refused: str) -> str:
    path = path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")[:300]
    return f"{path} ({refused})" if refused else path


def _shortened(ignored: list[str]) -> list[str]:
    if len(ignored) <= MAX_NAMED:
        return ignored
    return [*ignored[:MAX_NAMED], f"and {len(ignored) - MAX_NAMED:,} more files"]
