"""Exercise regions: the marked stretches of a module that a student fills in.

A region lies between two comment lines that name its exercise::

    # --- exercise 3.1: scaled dot-product attention ---
    ...
    # --- end of exercise 3.1 ---

The same two lines stand in the student's module and in the complete one, so a region can
be found, hashed, replaced and turned into its stub by working on text alone.
"""

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

_BEGIN = re.compile(r"^# --- exercise (?P<id>\d+\.\d+): (?P<title>.+?) ---$")
_END = re.compile(r"^# --- end of exercise (?P<id>\d+\.\d+) ---$")
_SOLUTION = re.compile(
    r"^(?P<indent>[ ]*)### BEGIN SOLUTION\n(?P<body>.*?)^[ ]*### END SOLUTION\n?",
    re.MULTILINE | re.DOTALL,
)


class RegionError(ValueError):
    """A module's exercise comments do not pair up, or a text may not be put into a region."""


@dataclass(frozen=True)
class Region:
    """One exercise region of a module's text.

    Attributes:
        id: the exercise, such as ``"3.1"``.
        title: what the opening comment calls it.
        text: everything between the two comment lines, ending in a newline.
        first_line: number of the text's first line in the module, counted from 1.
    """

    id: str
    title: str
    text: str
    first_line: int


def lines_of(text: str) -> list[str]:
    """Return the lines of a text with their ends, as Python and editors count them.

    A line ends at ``\\n`` alone. (`str.splitlines` also cuts at form feeds, U+2028 and others,
    which may stand in the middle of a string.)
    """
    return re.findall(r".*\n|.+", text)


def find_regions(source: str) -> dict[str, Region]:
    """Return the regions of a module's source by exercise id, in the order they stand.

    Raises:
        RegionError: a region is opened twice, never closed, or closed by another's line.
    """
    regions: dict[str, Region] = {}
    lines = lines_of(source)
    opened: tuple[int, re.Match[str]] | None = None
    for number, line in enumerate(lines, start=1):
        begin, end = _BEGIN.match(line.rstrip()), _END.match(line.rstrip())
        if begin:
            if opened or begin["id"] in regions:
                raise RegionError(f"line {number}: exercise {begin['id']} opens a second time")
            opened = (number, begin)
        elif end:
            if not opened or opened[1]["id"] != end["id"]:
                raise RegionError(f"line {number}: nothing to end for exercise {end['id']}")
            start, match = opened
            text = "".join(lines[start : number - 1])
            regions[match["id"]] = Region(match["id"], match["title"], text, start + 1)
            opened = None
    if opened:
        raise RegionError(f"exercise {opened[1]['id']} is opened and never ended")
    return regions


def find_region(source: str, exercise_id: str) -> Region:
    """Return one region; what became of the comment lines of others does not matter.

    Raises:
        RegionError: one of its two lines is missing or stands twice, or they are out of order.
    """
    lines = lines_of(source)
    marks = [_BEGIN.match(line.rstrip()) or _END.match(line.rstrip()) for line in lines]
    begins = _places(marks, exercise_id, _BEGIN)
    ends = _places(marks, exercise_id, _END)
    for line, places in (
        (f"# --- exercise {exercise_id}: ... ---", begins),
        (f"# --- end of exercise {exercise_id} ---", ends),
    ):
        if len(places) != 1:
            what = "stands more than once" if places else "is missing"
            raise RegionError(f"the line '{line}' {what}")
    begin, end = begins[0], ends[0]
    if end < begin or any(marks[begin + 1 : end]):
        raise RegionError(f"the comment lines around exercise {exercise_id} are out of order")
    match = marks[begin]
    assert match is not None
    return Region(exercise_id, match["title"], "".join(lines[begin + 1 : end]), begin + 2)


def _places(
    marks: list[re.Match[str] | None], exercise_id: str, pattern: re.Pattern[str]
) -> list[int]:
    """Return the indices of the comment lines of one kind that name the exercise."""
    return [
        place
        for place, mark in enumerate(marks)
        if mark is not None and mark.re is pattern and mark["id"] == exercise_id
    ]


def replace_region(source: str, exercise_id: str, text: str) -> str:
    """Return `source` with the text of one region replaced.

    Raises:
        RegionError: there is no such region, or `text` itself holds an exercise comment line.
    """
    region = find_region(source, exercise_id)
    text = normalize_text(text)
    for line in lines_of(text):
        if _BEGIN.match(line.rstrip()) or _END.match(line.rstrip()):
            raise RegionError(
                f"the line {line.strip()!r} marks where an exercise begins or ends in the "
                "package; leave it out of the cell"
            )
    lines = lines_of(source)
    start = region.first_line - 1
    end = start + len(lines_of(region.text))
    return "".join(lines[:start]) + text + "".join(lines[end:])


def normalize_text(text: str) -> str:
    """Return `text` without blank lines at its ends, ending in exactly one newline."""
    return text.replace("\r\n", "\n").replace("\r", "\n").strip("\n").rstrip() + "\n"


def stub(text: str, exercise_id: str) -> str:
    """Return a solved region's text with every solution taken out.

    A solution block inside a function becomes ``raise NotImplementedError("exercise 3.1")``;
    a block at the left margin (imports, helper functions) disappears.
    """

    def replacement(match: re.Match[str]) -> str:
        if not match["indent"]:
            return ""
        return f'{match["indent"]}raise NotImplementedError("exercise {exercise_id}")\n'

    stubbed = _SOLUTION.sub(replacement, text)
    if "### BEGIN SOLUTION" in stubbed or "### END SOLUTION" in stubbed:
        raise RegionError(f"exercise {exercise_id}: BEGIN SOLUTION and END SOLUTION do not pair up")
    return re.sub(r"\n{4,}", "\n\n\n", normalize_text(stubbed))


def stub_module(source: str) -> str:
    """Return the student's version of a complete module: every region replaced by its stub."""
    for exercise_id, region in find_regions(source).items():
        stubbed = stub(region.text, exercise_id)
        if stubbed == normalize_text(region.text):
            raise RegionError(f"exercise {exercise_id} has no solution block, so no stub")
        source = replace_region(source, exercise_id, stubbed)
    return source


def without_regions(source: str) -> str:
    """Return a module's text with every region empty: the code that is given, alone.

    Line numbers stay as they are. A region whose comment lines are damaged stays too.
    """
    lines = lines_of(source)
    for exercise_id in dict.fromkeys(re.findall(r"# --- exercise (\d+\.\d+):", source)):
        try:
            region = find_region(source, exercise_id)
        except RegionError:
            continue
        for number in range(len(lines_of(region.text))):
            lines[region.first_line - 1 + number] = "\n"
    return "".join(lines)


def is_stub(text: str) -> bool:
    """True if some part of the region is still to be written.

    That is so while it holds ``raise NotImplementedError("exercise ...")`` anywhere.

    Raises:
        SyntaxError: the text is not Python.
    """
    return any(_raises_exercise(node) for node in ast.walk(ast.parse(text)))


def unwritten(text: str) -> list[str]:
    """Return the functions and methods that are still to be written: ``["split_heads", ...]``.

    Raises:
        SyntaxError: the text is not Python.
    """
    return [
        name
        for name, function in _functions(ast.parse(text).body)
        if any(map(_raises_exercise, ast.walk(function)))
    ]


def _functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node


def is_begun(text: str, stub_text: str) -> bool:
    """True if a text holds a statement that its stub does not: somebody wrote something.

    Docstrings and signatures do not count.

    Raises:
        SyntaxError: a text is not Python.
    """
    return bool(_statements(text) - _statements(stub_text))


def _statements(text: str) -> set[str]:
    return {
        ast.dump(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt)
        and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    }


def _raises_exercise(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
        return False
    call = node.exc
    if not (isinstance(call.func, ast.Name) and call.func.id == "NotImplementedError"):
        return False
    first = call.args[0] if call.args else None
    return isinstance(first, ast.Constant) and str(first.value).startswith("exercise ")


def fingerprint(text: str) -> str:
    """Return a short hash of a region's text, blind to blank lines at its ends."""
    return hashlib.sha256(normalize_text(text).encode()).hexdigest()[:16]
