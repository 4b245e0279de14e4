"""Exercise regions as text: what a student's file may hold, and what may happen to it."""

import pytest

from bertlab.course.regions import (
    RegionError,
    find_region,
    find_regions,
    is_begun,
    replace_region,
    unwritten,
    without_regions,
)

MODULE = """import torch

# --- exercise 3.1: first ---
def first():
    return 1
# --- end of exercise 3.1 ---

GIVEN = 1

# --- exercise 3.2: second ---
def second():
    return 2
# --- end of exercise 3.2 ---
"""
STUB = '''class Layer:
    """What it is."""

    def __init__(self):
        self.size = 1

    def forward(self, x: int) -> int:
        """What it returns."""
        raise NotImplementedError("exercise 3.2")


def helper():
    raise NotImplementedError("exercise 3.2")
'''


@pytest.mark.parametrize(
    "char", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"]
)
def test_only_a_newline_ends_a_line(char):
    text = f"def first():\n    return 'a{char}b{char}{char}c'\n"
    filled = replace_region(MODULE, "3.1", text)
    assert find_regions(filled)["3.1"].text == find_region(filled, "3.1").text == text
    changed = replace_region(filled, "3.2", "def second():\n    return 3\n")
    assert changed == filled.replace("return 2", "return 3")
    assert replace_region(filled, "3.1", find_region(MODULE, "3.1").text) == MODULE
    assert "GIVEN = 1" in without_regions(filled) and "def" not in without_regions(filled)


def test_a_carriage_return_hides_no_comment_line():
    with pytest.raises(RegionError, match="leave it out"):
        replace_region(MODULE, "3.1", "x = 1\r# --- end of exercise 3.1 ---\ry = 2\n")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("# --- exercise 3.1: first ---\n", r"'# --- exercise 3.1: ... ---' is missing"),
        ("# --- end of exercise 3.1 ---\n", r"'# --- end of exercise 3.1 ---' is missing"),
    ],
)
def test_a_missing_line_is_named_and_other_regions_go_on(line, says):
    damaged = MODULE.replace(line, "")
    with pytest.raises(RegionError, match=says):
        find_region(damaged, "3.1")
    assert find_region(damaged, "3.2").text == find_region(MODULE, "3.2").text
    assert "return 3" in replace_region(damaged, "3.2", "def second():\n    return 3\n")
    assert "def first" in without_regions(damaged)
    assert "def second" not in without_regions(damaged)


def test_lines_that_stand_twice_or_out_of_order_are_an_error():
    with pytest.raises(RegionError, match="more than once"):
        find_region(MODULE + MODULE, "3.1")
    crossed = MODULE.replace("end of exercise 3.2", "end of exercise 3.x")
    crossed = crossed.replace("end of exercise 3.1", "end of exercise 3.2")
    crossed = crossed.replace("end of exercise 3.x", "end of exercise 3.1")
    with pytest.raises(RegionError, match="out of order"):
        find_region(crossed, "3.1")


def test_what_is_left_to_write_is_named():
    assert unwritten(STUB) == ["Layer.forward", "helper"]
    done = STUB.replace('raise NotImplementedError("exercise 3.2")', "return 1", 1)
    assert unwritten(done) == ["helper"]


def test_a_stub_is_begun_when_a_statement_is_new():
    assert not is_begun(STUB, STUB)
    without_docs = STUB.replace('    """What it is."""\n', "").replace("x: int", "x")
    assert not is_begun(without_docs, STUB)
    assert is_begun(STUB.replace("    raise Not", "    size = 2\n    raise Not"), STUB)
    assert is_begun(STUB.replace('raise NotImplementedError("exercise 3.2")', "pass", 1), STUB)
