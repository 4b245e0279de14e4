"""Claims that the chapters settle by measurement, collected from marks in their Markdown.

A mark stands below the sentence that settles the claim. It is a comment, so a notebook does not
show it::

    <!-- claim: each head has its own job
    outcome: wrong
    measured: 2 of 72 heads have a job that three words name; 37 have no main kind -->

`outcome` is one of `OUTCOMES`. Every number of `measured` must stand in the chapter too, in its
prose or its outputs, so that the page of claims cannot drift from what was measured.
"""

import re
from dataclasses import dataclass

#: What may come of a claim, with the sign that goes before the word.
OUTCOMES = {"holds": "✓", "wrong": "✗", "partly": "±", "not settled": "?"}

_MARK = re.compile(r"<!-- claim:(?P<body>.*?)-->", re.DOTALL)
_FIELDS = re.compile(
    r"\s*(?P<said>.+?)\s*\noutcome:\s*(?P<outcome>.+?)\s*\nmeasured:\s*(?P<measured>.+?)\s*\Z",
    re.DOTALL,
)
_NUMBER = re.compile(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?%?")


class ClaimError(ValueError):
    """A mark is not as it must be, or says a number that the chapter does not."""


@dataclass(frozen=True)
class Claim:
    """A claim and what came of it.

    Attributes:
        anchor: the place in the chapter's page where it was settled.
    """

    said: str
    outcome: str
    measured: str
    anchor: str


def claims_of(markdown: str, chapter: int) -> list[Claim]:
    """Return the claims that are marked in a chapter's Markdown, in order.

    Raises:
        ClaimError: a mark lacks a line, or its outcome is none of `OUTCOMES`.
    """
    return [
        _claim(match["body"], f"claim-{chapter}-{number}")
        for number, match in enumerate(_MARK.finditer(markdown), start=1)
    ]


def _claim(body: str, anchor: str) -> Claim:
    fields = _FIELDS.match(body)
    if not fields:
        raise ClaimError(
            f"the mark 'claim:{body.rstrip()}' must have three parts, each on a new line: the "
            "claim, 'outcome: ...' and 'measured: ...'"
        )
    if fields["outcome"] not in OUTCOMES:
        raise ClaimError(f"outcome is {fields['outcome']!r}, but must be one of {list(OUTCOMES)}")
    said, measured = (" ".join(fields[name].split()) for name in ("said", "measured"))
    return Claim(said, fields["outcome"], measured, anchor)


def with_anchors(markdown: str, chapter: int, before: int = 0) -> str:
    """Return a Markdown text with each mark replaced by the anchor that claims link to.

    Args:
        before: how many marks the chapter has before this text.
    """
    numbers = iter(range(before + 1, before + 1 + len(_MARK.findall(markdown))))
    return _MARK.sub(lambda _: f'<a id="claim-{chapter}-{next(numbers)}"></a>', markdown)


def count_marks(markdown: str) -> int:
    """Return how many claims a text marks."""
    return len(_MARK.findall(markdown))


def check_numbers(claims: list[Claim], chapter_text: str) -> None:
    """See that every number of the claims stands in the chapter outside of the marks.

    Args:
        chapter_text: the chapter's prose and its outputs.

    Raises:
        ClaimError: a claim has a number that the chapter does not have.
    """
    known = set(_NUMBER.findall(_MARK.sub("", chapter_text)))
    for claim in claims:
        strange = [number for number in _NUMBER.findall(claim.measured) if number not in known]
        if strange:
            raise ClaimError(
                f"the claim {claim.said!r} says {', '.join(strange)}, which the chapter's prose "
                "and outputs do not"
            )
