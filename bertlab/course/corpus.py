"""The course's text: the documentation of the scientific packages installed beside it.

The docstrings of eight libraries are some 87,000 paragraphs, 12 MB, of plain English about things
a reader of this course knows, each labelled with the library it comes from. They are read from
the source files with `ast`, so nothing is imported and nothing is downloaded, and the same
package versions give the same corpus, in the same order, on every machine.

    for paragraph in paragraphs(["numpy", "torch"]):
        print(paragraph.library, paragraph.text)

The first call reads some 5,000 source files, which takes half a minute on two cores; the result
is kept in one file of under 4 MB below `cache_folder()`, read in half a second.

Other text goes the same way: `from_folder` for files, `from_dataset` for what the package
`datasets` has on this machine. Text flows through, a paragraph at a time, and none of it is held:
reading takes at most 32 MB however long the text is (`make bench ARGS=corpus` reads 1 GB). Most of
that is the fingerprints of the paragraphs seen last, by which duplicates are left out.
"""

import ast
import gzip
import hashlib
import importlib.metadata
import importlib.util
import inspect
import io
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

LIBRARIES = {
    "matplotlib": "matplotlib",
    "networkx": "networkx",
    "numpy": "numpy",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "sympy": "sympy",
    "torch": "torch",
    "transformers": "transformers",
}
"""Import name (the label) and distribution name (for the version) of each library read."""

LONGEST = 2**14
"""Characters of a paragraph in your own text; a longer one is cut, at a space if it has one."""

REMEMBERED = 2**17
"""Of how many different paragraphs, at least, a repetition is noticed."""


class Paragraph(NamedTuple):
    """One paragraph of prose, on one line, and where it comes from.

    `document` numbers the docstrings (or files) of the corpus: consecutive paragraphs with the
    same number were written to be read one after the other.
    """

    text: str
    library: str
    document: int


def paragraphs(libraries: Iterable[str] | None = None) -> Iterator[Paragraph]:
    """Every paragraph of the documentation corpus, in a fixed order.

    Args:
        libraries: names from `LIBRARIES`; all of them when None.

    Raises:
        ValueError: a name is not in `LIBRARIES`.
        RuntimeError: one of the libraries is not installed.
    """
    wanted = _checked_names(libraries)
    return (item for item in _unpack(_open_corpus()) if item.library in wanted)


def documents(libraries: Iterable[str] | None = None) -> Iterator[list[Paragraph]]:
    """The same paragraphs, those of one docstring together in a list."""
    return as_documents(paragraphs(libraries))


def as_documents(items: Iterable[Paragraph]) -> Iterator[list[Paragraph]]:
    """Paragraphs in order, those of one document together in a list."""
    for _, group in itertools.groupby(items, key=lambda item: item.document):
        yield list(group)


def documentation(
    libraries: Iterable[str] | None = None,
    per_library: int | None = None,
    min_words: int = 0,
    seed: int = 0,
) -> list[Paragraph]:
    """The corpus as a list, or a random sample of it with as many paragraphs of each library.

    Args:
        libraries: names from `LIBRARIES`; all of them when None.
        per_library: how many paragraphs to draw from each library; None takes every paragraph.
        min_words: leave out paragraphs that are shorter.
        seed: the sample is the same for the same seed and the same package versions.

    Returns:
        All paragraphs in the corpus's order, or the sample in a random order.
    """
    long_enough = (p for p in paragraphs(libraries) if len(p.text.split()) >= min_words)
    if per_library is None:
        return list(long_enough)
    rng = random.Random(seed)
    sample: list[Paragraph] = []
    for _, group in itertools.groupby(long_enough, key=lambda item: item.library):
        sample += _reservoir_sample(group, per_library, rng)
    rng.shuffle(sample)
    return sample


def counts_by_library() -> dict[str, int]:
    """How many paragraphs each library has, by name."""
    return dict(Counter(item.library for item in paragraphs()))


def from_folder(path: str | os.PathLike[str]) -> Iterator[Paragraph]:
    """Paragraphs of your own text: every `.txt`, `.md` and `.rst` file below a folder.

    Blank lines separate paragraphs; one of more than `LONGEST` characters is cut. The label is the
    name of the subfolder the file is in, or of the folder itself, and each file is one document.
    A paragraph that came before, within the last `REMEMBERED` different ones, is left out.

    Raises:
        NotADirectoryError: `path` is not a folder.
        ValueError: there is no such file in it.
    """
    root = Path(path)
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is not a folder of text files")
    if not (files := _text_files(root)):
        raise ValueError(f"path is {root}, but no .txt, .md or .rst file is below it")
    return _new_only(_folder_paragraphs(root, files))


def from_dataset(
    name_or_path: str | os.PathLike[str],
    config_name: str | None = None,
    split: str = "train",
    column: str = "text",
) -> Iterator[Paragraph]:
    """Paragraphs of a data set of the package `datasets` that is on this machine already.

    Each row is one document, and blank lines separate its paragraphs. In WikiText, where a row is
    a line, a document is an article: from a first title, `= Title =`, on, documents begin at
    titles, and headings are left out. The label is the data set's name. Nothing is downloaded.

    Args:
        name_or_path: a name on the hub, such as "Salesforce/wikitext"; a folder with Parquet, JSON
            lines or CSV files; or a folder made by `save_to_disk`.
        config_name: which of the data set's configurations, such as "wikitext-2-raw-v1".
        split: which of its splits.
        column: the column with the text.

    Raises:
        RuntimeError: the package `datasets` is not installed.
        FileNotFoundError: the data set is not on this machine.
        ValueError: it has no such split or column.
    """
    rows = _dataset_rows(os.fspath(name_or_path), config_name, split)
    columns = rows.column_names or list(next(iter(rows), {}))
    if column not in columns:
        raise ValueError(f"column is {column!r}, but the data set has {', '.join(columns)}")
    label = Path(name_or_path).resolve().name if Path(name_or_path).is_dir() else str(name_or_path)
    return _new_only(_row_paragraphs((str(row[column] or "") for row in rows), label))


def cache_folder() -> Path:
    """Where the course keeps what it can make again: BERTLAB_CACHE, or the user's cache folder."""
    if chosen := os.environ.get("BERTLAB_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "bertlab"


def cache_file() -> Path:
    """The corpus file for the package versions installed now, as this module harvests them."""
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # another rule, another corpus
    key = hashlib.sha256(json.dumps([code, _versions()]).encode()).hexdigest()
    return cache_folder() / f"documentation-{key[:16]}.gz"


# What a paragraph is ---------------------------------------------------------------------------

ENTRY = re.compile(  # "dim (int, optional): ...", "**kwargs: ...", ":param dim: ..."
    r"^(?:\*{0,2}`{0,2}[\w.]+`{0,2}(?: ?\(.*?\))?"
    r"|:(?:param|arg|keyword|returns?|raises?|type|rtype|ivar|var)\b[^:`]*):(?:\s+|$)"
)
NUMPY_ENTRY = re.compile(r"^[\w.*`'\"\\]+(?:, ?[\w.*`'\"\\]+)* ?: ?(?=[\w{(\[`'\"<:~]).*$")
LIST_MARK = re.compile(r"^(?:[-*+•]|\(?\d{1,2}[.)])\s+")
DIRECTIVE = re.compile(r"^\.\. ")
ADMONITION = re.compile(r"^\.\. (?:note|warning|tip|important|seealso|caution|hint)::\s*")
CODE_DIRECTIVE = re.compile(
    r"^\.\. (?:math|code|code-block|sourcecode|plot|testcode|testoutput|testsetup|doctest"
    r"|ipython|image|figure|table|list-table|csv-table|parsed-literal|graphviz|autosummary"
    r"|toctree|index|only|raw)::"
)
NOT_PROSE = re.compile(r"^(?:\W{3,}$|\||\+-|\[\d+\]|[A-Z][\w ]{0,30}:$|@|#)")
ROLE = re.compile(r"(?::[\w+.-]+)+:`[~!]?([^`<]+)(?: <[^`]*>)?`")
PLACEHOLDER = re.compile(r"%\(\w+\)s|\{\w*\}|\{\{")


def split_paragraphs(docstring: str) -> Iterator[str]:
    """The prose paragraphs of a docstring, each on one line.

    A paragraph ends at a blank line, at the next item of a list, at the next entry of a table of
    parameters, and where the indentation changes. Code, formulas set apart, headings, tables and
    the name and type of a parameter are left out; the description of a parameter is kept.
    """
    lines: list[str] = []
    for line in _prose_lines(docstring):
        if lines and _begins_paragraph(line, lines):
            yield from _as_prose(lines)
            lines = []
        if line:
            lines.append(line)
    yield from _as_prose(lines)


def _prose_lines(docstring: str) -> Iterator[str]:
    """Lines that may be prose, indented as they were; an empty one stands for what is left out."""
    fenced = doctest = False
    block: int | None = None  # the indentation above which lines belong to a block of code
    for line in inspect.cleandoc(docstring).splitlines():
        text = line.strip()
        indent = _indentation(line)
        if text.startswith("```"):
            fenced = not fenced
        doctest = bool(text) and (doctest or text.startswith(">>>"))
        if not text or fenced or doctest or text.startswith("```"):
            yield ""
        elif block is None or indent <= block:
            block = indent if _opens_code(text) else None
            yield _kept_part(line)


def _opens_code(text: str) -> bool:
    """Whether the deeper lines after this one are code or a formula."""
    if DIRECTIVE.match(text):
        return CODE_DIRECTIVE.match(text) is not None
    return text.endswith("::")


def _kept_part(line: str) -> str:
    """The part of a line that is prose: all, what follows a note's mark, or nothing."""
    text = line.strip()
    if ADMONITION.match(text):
        return " " * _indentation(line) + ADMONITION.sub("", text)
    if DIRECTIVE.match(text) or NUMPY_ENTRY.match(text) or NOT_PROSE.match(text):
        return ""
    return line


def _begins_paragraph(line: str, lines: list[str]) -> bool:
    """Whether `line` belongs to another paragraph than the `lines` before it."""
    text = line.strip()
    first = lines[0].strip()
    in_table = ENTRY.match(first) is not None
    if not text or LIST_MARK.match(text) or (in_table and ENTRY.match(text)):
        return True
    deeper = _indentation(line) - _indentation(lines[-1])
    return deeper < 0 or (deeper > 0 and not in_table and not LIST_MARK.match(first))


def _as_prose(lines: list[str]) -> Iterator[str]:
    """The lines as one, without marks; nothing when that is no sentence."""
    text = " ".join(" ".join(lines).split())
    text = ENTRY.sub("", LIST_MARK.sub("", text))
    text = " ".join(ROLE.sub(r"\1", text).replace("``", "").split())
    text = re.sub(r" ?::$", ":", text)
    if _is_prose(text):
        yield text


def _is_prose(text: str) -> bool:
    """At least eight plain words, most words plain, and nothing a template still has to fill in."""
    if not text.isprintable() or PLACEHOLDER.search(text):
        return False
    words = [word.strip(".,;:()`'\"*") for word in text.split()]
    plain = sum(word.isalpha() for word in words)
    return plain >= 8 and plain >= 0.6 * len(words)


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


# Harvest ---------------------------------------------------------------------------------------

LEFT_OUT = {
    *("tests", "test", "testing", "conftest.py"),
    *("externals", "_vendor", "_vendored"),  # other people's code inside
    *("_inductor", "_dynamo", "_export", "_functorch"),  # the inside of torch's compiler
}
GENERATED = b"automatically generated"  # how a copied file of transformers begins
DOCUMENTED_ELSEWHERE = {"add_newdoc", "add_docstr"}  # how compiled functions get theirs
FILES_AT_ONCE = 400


def docstrings(source: bytes) -> Iterator[str]:
    """Every docstring of a Python file in the order of its lines; none if it does not parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in other people's strings
        with suppress(SyntaxError, ValueError):
            if GENERATED not in source[:1000]:
                yield from _docstrings_in(ast.parse(source).body, documented=True)


def _docstrings_in(body: list[ast.stmt], documented: bool) -> Iterator[str]:
    for number, statement in enumerate(body):
        if isinstance(statement, ast.Expr):
            yield from _strings_of(statement.value, first=documented and number == 0)
        elif isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings_in(statement.body, documented=True)
        elif isinstance(statement, ast.If | ast.Try | ast.With | ast.For):
            yield from _docstrings_in(statement.body, documented=False)


def _strings_of(value: ast.expr, first: bool) -> Iterator[str]:
    """The docstring that an expression statement is or, by `add_docstr(...)`, gives."""
    if first and isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    if isinstance(value, ast.Call) and _called_name(value) in DOCUMENTED_ELSEWHERE:
        for part in ast.walk(value):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value


def _called_name(call: ast.Call) -> str:
    function = call.func
    return getattr(function, "attr", "") or getattr(function, "id", "")


def _harvest() -> Iterator[Paragraph]:
    """Read the installed libraries' sources; a progress bar shows how far it is."""
    from tqdm import tqdm

    portions = [part for name in LIBRARIES for part in _in_portions(name, _source_files(name))]
    first = 0
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        done = pool.map(_harvest_in_another_process, portions)
        for lines in tqdm(done, "Reading documentation", len(portions), leave=False):
            last = -1
            for text, library, last in map(_from_line, lines):
                yield Paragraph(text, library, first + last)
            first += last + 1
    finally:
        pool.shutdown(cancel_futures=True)


def _in_portions(library: str, files: list[Path]) -> Iterator[list[str]]:
    for start in range(0, len(files), FILES_AT_ONCE):
        yield [library, *map(str, files[start : start + FILES_AT_ONCE])]


def _harvest_in_another_process(portion: list[str]) -> list[str]:
    """Run this file as a script on a portion: several do several at a time, on any platform."""
    command = [sys.executable, "-I", "-X", "utf8", __file__]
    try:
        result = subprocess.run(
            command, input="\n".join(portion), capture_output=True, check=True, encoding="utf-8"
        )
        return result.stdout.split("\n")[:-1]
    except (OSError, subprocess.SubprocessError):
        return list(_harvest_portion(portion))


def _harvest_portion(portion: list[str]) -> Iterator[str]:
    """The corpus lines of some files; the portion is the library's name, then their paths."""
    library, *files = portion
    found = (text for file in files for text in docstrings(Path(file).read_bytes()))
    with_prose = (texts for doc in found if (texts := list(split_paragraphs(doc))))
    for document, texts in enumerate(with_prose):
        yield from (_to_line(Paragraph(text, library, document)) for text in texts)


def _source_files(library: str) -> list[Path]:
    """A library's Python files, without its tests, in an order that is the same everywhere."""
    spec = importlib.util.find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(_not_installed(library))
    root = Path(next(iter(spec.submodule_search_locations)))
    found = {path.relative_to(root): path for path in root.rglob("*.py")}
    return [found[name] for name in sorted(found, key=Path.as_posix) if _is_own_code(name)]


def _is_own_code(path: Path) -> bool:
    return LEFT_OUT.isdisjoint(path.parts) and not path.name.startswith("test_")


def _new_only(items: Iterable[Paragraph]) -> Iterator[Paragraph]:
    """Leave out what was said before, word for word, among the last `REMEMBERED` paragraphs.

    There are two sets of fingerprints: when the newer one is full it becomes the older one, and
    what the older one held is forgotten. So memory has a bound: 2 * REMEMBERED fingerprints.
    """
    newer: set[int] = set()
    older: set[int] = set()
    for item in items:
        digest = hashlib.blake2b(item.text.encode(), digest_size=8).digest()
        fingerprint = int.from_bytes(digest, "little")
        if fingerprint in newer or fingerprint in older:
            continue
        newer.add(fingerprint)
        if len(newer) >= REMEMBERED:
            newer, older = set(), newer
        yield item


# Other text ------------------------------------------------------------------------------------

HEADING = re.compile(r"=(?: =)* .* =(?: =)*")  # of WikiText: "= Title =", "= = Section = ="
TITLE = re.compile(r"= [^=].* =")


def _text_files(root: Path) -> list[Path]:
    found = (path for path in root.rglob("*") if path.suffix in {".txt", ".md", ".rst"})
    return sorted(path for path in found if path.is_file())


def _folder_paragraphs(root: Path, files: list[Path]) -> Iterator[Paragraph]:
    for document, path in enumerate(files):
        label = path.parent.name or root.resolve().name
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in split_at_blank_lines(file):
                yield Paragraph(text, label, document)


def split_at_blank_lines(file: IO[str]) -> Iterator[str]:
    """The paragraphs of an open text file, each on one line; no more than one is held."""
    lines: list[str] = []
    length = 0
    for line in _bounded_lines(file):
        blank = not line.strip()
        if lines and (blank or length + len(line) > LONGEST):
            yield " ".join(" ".join(lines).split())
            lines, length = [], 0
        if not blank:
            lines.append(line)
            length += len(line)
    if lines:
        yield " ".join(" ".join(lines).split())


def _bounded_lines(file: IO[str]) -> Iterator[str]:
    """The lines of a file; one of more than `LONGEST` characters in parts, cut at a space."""
    rest = ""
    while part := file.readline(LONGEST):
        line, rest = rest + part, ""
        if not part.endswith("\n") and " " in line:  # more of this line may follow
            line, _, rest = line.rpartition(" ")
        yield line
    if rest:
        yield rest


def _row_paragraphs(texts: Iterable[str], label: str) -> Iterator[Paragraph]:
    document, titled = -1, False
    for text in texts:
        line = text.strip()
        is_title = TITLE.fullmatch(line) is not None
        titled = titled or is_title
        document += is_title or not titled
        if not (titled and HEADING.fullmatch(line)):
            for paragraph in split_at_blank_lines(io.StringIO(text)):
                yield Paragraph(paragraph, label, document)


def _dataset_rows(name: str, config_name: str | None, split: str) -> Any:
    """The rows of a data set on this machine, an iterable of dicts."""
    try:
        import datasets
    except ImportError as error:
        raise RuntimeError("from_dataset needs a package: pip install datasets") from error
    if (Path(name) / "state.json").exists() or (Path(name) / "dataset_dict.json").exists():
        loaded = datasets.load_from_disk(name)  # made by save_to_disk
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded
        if split not in loaded:
            names = ", ".join(map(str, loaded))
            raise ValueError(f"split is {split!r}, but the data set has {names}")
        return loaded[split]
    try:
        with _offline(datasets):
            streaming = Path(name).is_dir()  # the hub's are on disk in a form that is not read in
            return datasets.load_dataset(name, config_name, split=split, streaming=streaming)
    except (ConnectionError, FileNotFoundError) as error:
        raise FileNotFoundError(
            f"{name} is neither a folder with a data set nor in the local Hugging Face cache; "
            f"fetch it once: datasets.load_dataset({name!r}, {config_name!r})"
        ) from error


@contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    """The package `datasets` uses nothing but this machine, whatever HF_HUB_OFFLINE says."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _reservoir_sample(items: Iterable[Paragraph], size: int, rng: random.Random) -> list[Paragraph]:
    """`size` of the items, each as likely as any other, without holding them all."""
    kept: list[Paragraph] = []
    for number, item in enumerate(items):
        place = number if number < size else rng.randrange(number + 1)
        if number < size:
            kept.append(item)
        elif place < size:
            kept[place] = item
    return kept


def _checked_names(libraries: Iterable[str] | None) -> set[str]:
    if isinstance(libraries, str):
        raise ValueError(f"libraries is a list of names; for one, write [{libraries!r}]")
    wanted = set(LIBRARIES if libraries is None else libraries)
    if unknown := sorted(wanted - set(LIBRARIES)):
        raise ValueError(f"no corpus for {', '.join(unknown)}; there is {', '.join(LIBRARIES)}")
    return wanted


def _versions() -> dict[str, str]:
    try:
        return {name: importlib.metadata.version(dist) for name, dist in LIBRARIES.items()}
    except importlib.metadata.PackageNotFoundError as error:
        raise RuntimeError(_not_installed(str(error.name))) from error


def _not_installed(name: str) -> str:
    return f"the documentation of {name} is part of the corpus, but {name} is not installed"


# Cache -----------------------------------------------------------------------------------------
# One file: the SHA-256 of what follows, then gzip of lines "library <tab> document <tab> text".

DIGEST_SIZE = hashlib.sha256().digest_size


def _to_line(item: Paragraph) -> str:
    return f"{item.library}\t{item.document}\t{item.text}"


def _from_line(line: str) -> Paragraph:
    library, document, text = line.rstrip("\n").split("\t")
    return Paragraph(text, library, int(document))


def _open_corpus() -> IO[bytes]:
    """The corpus file, harvested first if it is not there or is damaged."""
    path = cache_file()
    with suppress(OSError):
        if not _is_intact(path):
            _write_atomically(path)
        return path.open("rb")
    return io.BytesIO(_packed_in_memory(path.name))


def _is_intact(path: Path) -> bool:
    """Whether the file is there and begins with the digest of the rest."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        return file.read(DIGEST_SIZE) == hashlib.file_digest(file, "sha256").digest()


def _write_atomically(path: Path) -> None:
    """Harvest into a file of its own and rename that, so no reader ever sees a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(handle, "w+b") as file:
            _pack(file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@lru_cache(maxsize=1)
def _packed_in_memory(key: str) -> bytes:
    """The corpus where no folder can be written to, harvested once a process."""
    print(f"{cache_folder()} cannot be written to; {key} is kept in memory", file=sys.stderr)
    file = io.BytesIO()
    _pack(file)
    return file.getvalue()


def _pack(file: IO[bytes]) -> None:
    """Harvest into an open, empty file."""
    file.write(bytes(DIGEST_SIZE))
    with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
        for item in _new_only(_harvest()):
            packed.write(f"{_to_line(item)}\n".encode())
    digest = hashlib.sha256()
    file.seek(DIGEST_SIZE)
    while part := file.read(2**20):
        digest.update(part)
    file.seek(0)
    file.write(digest.digest())


def _unpack(file: IO[bytes]) -> Iterator[Paragraph]:
    """Read paragraphs one by one from an open corpus file."""
    file.seek(DIGEST_SIZE)
    with file, gzip.open(file, "rt", encoding="utf-8", newline="\n") as lines:
        yield from map(_from_line, lines)


if __name__ == "__main__":
    for corpus_line in _harvest_portion(sys.stdin.read().splitlines()):
        print(corpus_line)
