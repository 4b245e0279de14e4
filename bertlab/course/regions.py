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


def find_regions(source: str) -> dict[str, Region]:
    """Return the regions of a module's source by exercise id, in the order they stand.

    Raises:
        RegionError: a region is opened twice, never closed, or closed by another's line.
    """
    regions: dict[str, Region] = {}
    lines = source.splitlines(keepends=True)
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


def replace_region(source: str, exercise_id: str, text: str) -> str:
    """Return `source` with the text of one region replaced.

    Raises:
        RegionError: there is no such region, or `text` itself holds an exercise comment line.
    """
    region = find_regions(source).get(exercise_id)
    if region is None:
        raise RegionError(f"no region for exercise {exercise_id} in this module")
    for line in text.splitlines():
        if _BEGIN.match(line.rstrip()) or _END.match(line.rstrip()):
            raise RegionError(
                f"the line {line.strip()!r} marks where an exercise begins or ends in the "
                "package; leave it out of the cell"
            )
    lines = source.splitlines(keepends=True)
    start = region.first_line - 1
    end = start + region.text.count("\n")
    return "".join(lines[:start]) + normalize_text(text) + "".join(lines[end:])


def normalize_text(text: str) -> str:
    """Return `text` without blank lines at its ends, ending in exactly one newline."""
    return text.replace("\r\n", "\n").strip("\n").rstrip() + "\n"


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

    Line numbers stay as they are.
    """
    lines = source.splitlines(keepends=True)
    for region in find_regions(source).values():
        for number in range(region.text.count("\n")):
            lines[region.first_line - 1 + number] = "\n"
    return "".join(lines)


def is_stub(text: str) -> bool:
    """True if some part of the region is still to be written.

    That is so while it holds ``raise NotImplementedError("exercise ...")`` anywhere.

    Raises:
        SyntaxError: the text is not Python.
    """
    return any(_raises_exercise(node) for node in ast.walk(ast.parse(text)))


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
