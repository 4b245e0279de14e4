"""Two tasks of whole texts: the library of a paragraph, and whether two sentences belong together.

Each comes with a baseline that cannot read: it counts words.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from bertlab.course.corpus import documentation
from bertlab.course.tasks.docstrings import FILES, all_docstrings, sentences_of
from bertlab.course.tasks.examples import (
    LabelledPair,
    LabelledText,
    Task,
    split,
    without_near_duplicates,
)

SPARE = 1.5  # how many times as many paragraphs are drawn as are needed: some are near-duplicates


def library_of_paragraph(
    train: int = 120, validation: int = 20, test: int = 60, seed: int = 0
) -> Task[LabelledText]:
    """Which of eight libraries is a paragraph of documentation from?

    Args:
        train, validation, test: paragraphs of each library; each has at least 12 words.
        seed: of the draw.

    Returns:
        A task whose labels are the libraries' names. No two paragraphs in it, of whatever library,
        are near-duplicates.

    Raises:
        ValueError: there are not enough paragraphs.
    """
    each = train + validation + test
    drawn = documentation(per_library=round(SPARE * each), min_words=12, seed=seed)
    fewest = min(Counter(paragraph.library for paragraph in drawn).values())
    if fewest < each:
        raise ValueError(
            f"{each} paragraphs of each library were asked for, but there are {fewest}"
        )
    parts: list[list[LabelledText]] = [[], [], []]
    fresh = without_near_duplicates(drawn, lambda paragraph: paragraph.text)
    for label, library in enumerate(FILES):
        texts = [LabelledText(p.text, label) for p in fresh if p.library == library]
        for part, chosen in zip(parts, split(texts, (train, validation, test), seed), strict=True):
            part += chosen
    for part in parts:
        random.Random(seed).shuffle(part)
    return Task("library of a paragraph", tuple(FILES), *parts)


def tf_idf_baseline(task: Task[LabelledText]) -> float:
    """The accuracy of TF-IDF of words and pairs of words with logistic regression, on the test.

    How strong its regularization is, is chosen by the validation part.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    counter = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2))
    train = counter.fit_transform([text for text, _ in task.train])
    labels = [label for _, label in task.train]

    def accuracy(strength: float, part: Sequence[LabelledText]) -> float:
        model = LogisticRegression(C=strength, max_iter=1000).fit(train, labels)
        found = model.predict(counter.transform([text for text, _ in part]))
        return sum(a == b for a, (_, b) in zip(found, part, strict=True)) / len(part)

    best = max((1.0, 10.0, 100.0), key=lambda strength: accuracy(strength, task.validation))
    return accuracy(best, task.test)


def same_docstring(
    train: int = 400, validation: int = 100, test: int = 200, seed: int = 0
) -> Task[LabelledPair]:
    """Do two sentences belong to the same docstring?

    Half of the pairs do. Each first sentence stands in two pairs: once with another sentence of
    its docstring, once with one from another docstring of the same library. A docstring is in one
    part of the task only, and no two sentences in the task are near-duplicates.

    Args:
        train, validation, test: how many pairs; even numbers.

    Raises:
        ValueError: a number is odd, or there are not enough docstrings.
    """
    for name, count in (("train", train), ("validation", validation), ("test", test)):
        if count % 2 or count < 2:
            raise ValueError(f"{name} is {count}, but must be an even number of pairs, at least 2")
    rng = random.Random(seed)
    sizes = (train // 2, validation // 2, test // 2)
    parts = [list(pairs_of(part, rng)) for part in split(distinct_sentences(), sizes, seed)]
    for part in parts:
        rng.shuffle(part)
    return Task("same docstring", ("other", "same"), *parts)


Group = tuple[str, list[str]]  # a docstring's library and its sentences


def distinct_sentences() -> list[Group]:
    """The docstrings with at least two sentences that are near-duplicates of none before them."""
    found = [
        (number, docstring.library, " ".join(docstring.text[start:end].split()))
        for number, docstring in enumerate(all_docstrings())
        for start, end in sentences_of(docstring.text)
    ]
    fresh = without_near_duplicates(found, lambda item: item[2])
    groups = [list(group) for _, group in groupby(fresh, key=lambda item: item[0])]
    return [(g[0][1], [text for *_, text in g]) for g in groups if len(g) > 1]


def pairs_of(groups: Sequence[Group], rng: random.Random) -> Iterator[LabelledPair]:
    """Two pairs for each docstring: one with its own sentence, one with another's."""
    for group in groups:
        library, sentences = group
        first, second = rng.sample(sentences, 2)
        others = [g for g in groups if g is not group]
        near = [g for g in others if g[0] == library] or others
        yield LabelledPair(first, second, 1)
        yield LabelledPair(first, rng.choice(rng.choice(near)[1]), 0)


def shared_words_baseline(task: Task[LabelledPair]) -> float:
    """The accuracy, on the test, of a threshold on how many words two texts share.

    Rare words count more: it is the cosine of the texts' TF-IDF vectors. The threshold that does
    best in training is taken.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    counter = TfidfVectorizer(sublinear_tf=True)
    counter.fit([text for item in task.train for text in (item.text, item.pair)])

    def cosines(part: Sequence[LabelledPair]) -> list[float]:
        first: Any = counter.transform([item.text for item in part])
        second: Any = counter.transform([item.pair for item in part])
        return first.multiply(second).sum(axis=1).A1.tolist()

    def accuracy(threshold: float, found: Sequence[float], part: Sequence[LabelledPair]) -> float:
        hits = [(x >= threshold) == item.label for x, item in zip(found, part, strict=True)]
        return sum(hits) / len(hits)

    found = cosines(task.train)
    best = max(found, key=lambda threshold: accuracy(threshold, found, task.train))
    return accuracy(best, cosines(task.test), task.test)
