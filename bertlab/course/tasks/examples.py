"""The examples of the four kinds of task, and how they are split without a leak.

A *leak* is a test example that was, or was nearly, seen in training: it is answered from memory,
and the number that comes out says nothing. So splits are made of whole paragraphs or docstrings,
and what is nearly the same stands on one side only.
"""

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

Span = tuple[int, int]
Item = TypeVar("Item")

#: Texts whose sets of word triples have at least this Jaccard index are near-duplicates.
THRESHOLD = 0.4


class LabelledText(NamedTuple):
    """A text and the number of its class."""

    text: str
    label: int


class LabelledPair(NamedTuple):
    """Two texts and the number of their class."""

    text: str
    pair: str
    label: int


class TaggedWords(NamedTuple):
    """The words of a sentence, and a tag for each: `O`, `B-type` or `I-type`."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


class Question(NamedTuple):
    """A question, its passage, and the characters of the answer; None when there is none."""

    question: str
    passage: str
    answer: Span | None

    @property
    def answer_text(self) -> str:
        """The answer as it is written; empty when there is none."""
        return "" if self.answer is None else self.passage[slice(*self.answer)]


@dataclass(frozen=True)
class Task(Generic[Item]):
    """Examples to train on, to choose by, and to report on.

    Attributes:
        name: of the task.
        labels: the names of the classes, or of the tags, by number; empty for questions.
        train, validation, test: examples; no test example has a near-duplicate in another part.
    """

    name: str
    labels: tuple[str, ...]
    train: list[Item]
    validation: list[Item]
    test: list[Item]


def near_duplicates(
    texts: Sequence[str], threshold: float = THRESHOLD, contained: bool = False
) -> list[tuple[int, int]]:
    """All pairs of texts that say nearly the same: `(first, second)`, first below second.

    The Jaccard index of two texts is how many triples of consecutive words they share, divided by
    how many different ones they have together. Case, numbers and punctuation do not count. It is
    computed exactly for all pairs, by a product of sparse matrices; texts of one or two words are
    near-duplicates only of themselves.

    Args:
        texts: in any order.
        threshold: above 0, at most 1.
        contained: divide by how many triples the shorter text has, so that a text and a part of it
            are near-duplicates, too.

    Raises:
        ValueError: `threshold` is out of range.

    Source: Broder 1997, "On the resemblance and containment of documents".
    """
    import numpy as np
    from scipy.sparse import csr_matrix, triu

    if not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold!r}, but must be above 0 and at most 1")
    columns: dict[Any, int] = {}
    found = [{columns.setdefault(s, len(columns)) for s in shingles(text)} for text in texts]
    sizes = np.array([len(one) for one in found], dtype=np.int64)
    indices = np.fromiter((i for one in found for i in sorted(one)), dtype=np.int64)
    ends = np.concatenate([[0], sizes.cumsum()])
    ones = np.ones(len(indices), dtype=np.int32)
    table = csr_matrix((ones, indices, ends), shape=(len(texts), len(columns)))
    shared: Any = triu(table @ table.T, k=1).tocoo()
    first, second = sizes[shared.row], sizes[shared.col]
    whole = np.minimum(first, second) if contained else first + second - shared.data
    close = shared.data >= threshold * whole
    return sorted(zip(shared.row[close].tolist(), shared.col[close].tolist(), strict=True))


def shingles(text: str) -> set[tuple[str, ...]]:
    """The triples of consecutive words of a text; the whole text if it has fewer words."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}


def without_near_duplicates(
    items: Iterable[Item], text_of: Callable[[Item], str], threshold: float = THRESHOLD
) -> list[Item]:
    """The items, in order, less each that is nearly the same as one before it."""
    items = list(items)
    later = {j for _, j in near_duplicates([text_of(item) for item in items], threshold)}
    return [item for i, item in enumerate(items) if i not in later]


def leaks(task: Task[Any], text_of: Callable[[Any], str]) -> list[tuple[str, str]]:
    """Pairs of near-duplicates of which one is in the test part and the other is not."""
    others = [text_of(item) for item in [*task.train, *task.validation]]
    tests = [text_of(item) for item in task.test]
    texts, border = [*others, *tests], len(others)
    pairs = near_duplicates(texts)
    return [(texts[i], texts[j]) for i, j in pairs if i < border <= j]


def split(
    items: Sequence[Item], sizes: tuple[int, int, int], seed: int
) -> tuple[list[Item], list[Item], list[Item]]:
    """Draw the three parts of a task: so many items to train on, to choose by, to report on.

    Raises:
        ValueError: there are not enough items.
    """
    if len(items) < sum(sizes):
        raise ValueError(f"sizes is {sizes}, {sum(sizes)} together, but there are {len(items)}")
    drawn = random.Random(seed).sample(items, sum(sizes))
    first, second = sizes[0], sizes[0] + sizes[1]
    return drawn[:first], drawn[first:second], drawn[second:]
