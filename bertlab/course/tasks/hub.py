"""SST-2, CoNLL-2003 and SQuAD as the course's examples, where the package `datasets` has them.

The functions take rows of a data set with the hub's schema: a `datasets.Dataset`, or any iterable
of dicts. So a data set of your own with the same columns works too. Nothing is downloaded.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from bertlab.course import corpus
from bertlab.course.tasks.examples import LabelledText, Question, TaggedWords

Rows = Iterable[Mapping[str, Any]]

SENTIMENTS = ("negative", "positive")
CONLL_TAGS = ("O", *(f"{bi}-{kind}" for kind in ("PER", "ORG", "LOC", "MISC") for bi in "BI"))

#: Names on the hub: data set, configuration.
NAMES = {
    "sst2": ("stanfordnlp/sst2", None),
    "conll2003": ("eriktks/conll2003", None),
    "squad": ("rajpurkar/squad", None),
    "squad_v2": ("rajpurkar/squad_v2", None),
}


def cached(name: str, split: str = "train") -> Any:
    """The rows of one of `NAMES`, or of a folder with such a data set, if it is on this machine.

    Raises:
        FileNotFoundError: it is not; the message says how to fetch it once.
        RuntimeError: the package `datasets` is not installed.
    """
    return corpus._dataset_rows(*NAMES.get(name, (name, None)), split)


def sst2_examples(rows: Rows) -> list[LabelledText]:
    """Sentences of film reviews; columns `sentence` and `label`, an index into `SENTIMENTS`.

    Rows without a label (-1, in the test part) are left out.
    """
    checked = _rows(rows, {"sentence": str, "label": int})
    examples = [LabelledText(row["sentence"].strip(), row["label"]) for _, row in checked]
    return [_in_range(i, e, SENTIMENTS) for i, e in enumerate(examples) if e.label != -1]


def conll_examples(rows: Rows, names: tuple[str, ...] = CONLL_TAGS) -> list[TaggedWords]:
    """Sentences of news; columns `tokens` and `ner_tags`, each tag an index into `names`."""
    examples = []
    for number, row in _rows(rows, {"tokens": list, "ner_tags": list}):
        words, tags = row["tokens"], row["ner_tags"]
        if len(words) != len(tags) or not words:
            raise ValueError(f"row {number} has {len(words)} tokens and {len(tags)} ner_tags")
        if not all(0 <= tag < len(names) for tag in tags):
            raise ValueError(f"row {number} has ner_tags {tags}; allowed is 0 to {len(names) - 1}")
        examples.append(TaggedWords(tuple(words), tuple(names[tag] for tag in tags)))
    return examples


def squad_examples(rows: Rows) -> list[Question]:
    """Questions about Wikipedia; columns `question`, `context` and `answers`.

    `answers` has lists `text` and `answer_start`; the first is taken, and empty lists mean that
    there is no answer (SQuAD 2).
    """
    examples = []
    for number, row in _rows(rows, {"question": str, "context": str, "answers": Mapping}):
        span, texts = None, row["answers"]["text"]
        if len(texts):
            start = row["answers"]["answer_start"][0]
            span = (start, start + len(texts[0]))
            if row["context"][slice(*span)] != texts[0]:
                raise ValueError(f"row {number}: the answer {texts[0]!r} is not at {start}")
        examples.append(Question(row["question"].strip(), row["context"], span))
    return examples


def _rows(rows: Rows, columns: Mapping[str, type]) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """The rows with their numbers.

    Raises:
        ValueError: a row lacks a column or has something else in it.
    """
    for number, row in enumerate(rows):
        for name, kind in columns.items():
            if name not in row:
                raise ValueError(f"row {number} has no column {name!r}: it has {sorted(row)}")
            if not isinstance(row[name], kind):
                found = type(row[name]).__name__
                raise ValueError(f"row {number} has a {found} as {name}, not a {kind.__name__}")
        yield number, row


def _in_range(number: int, example: LabelledText, names: tuple[str, ...]) -> LabelledText:
    if not 0 <= example.label < len(names):
        allowed = f"0 to {len(names) - 1}, or -1 for none"
        raise ValueError(f"row {number} has label {example.label}; allowed is {allowed}")
    return example
