"""Questions about the Parameters sections of numpydoc docstrings, whose answers stand in them.

"What type is axis?" is answered by what stands behind the parameter's name, "What is the default of
axis?" by its value. A parameter without a default makes a question without an answer; so does
one that belongs to another function.
"""

import random
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from bertlab.course.tasks.docstrings import Docstring, all_docstrings
from bertlab.course.tasks.examples import (
    Question,
    Span,
    Task,
    near_duplicates,
    without_near_duplicates,
)

NUMPYDOC = ("matplotlib", "networkx", "numpy", "scipy", "sklearn")

SECTION = re.compile(r"^([ \t]*)Parameters[ \t]*\n\1-{4,}[ \t]*\n", re.MULTILINE)
HEADING = re.compile(r"^\s*-{4,}\s*$")
ENTRY = re.compile(r"(?P<name>\*{0,2}\w+) ?: (?P<type>\S.*)")
ENTRY_LINE = re.compile(r"\s*\*{0,2}\w+(?:, ?\*{0,2}\w+)* ?: \S")
TYPE_END = re.compile(r",\s*(?=optional\b|default\b|keyword|required)|\s*\(optional\)|\s*\(default")
DEFAULT = re.compile(
    r"\b[Dd]efault(?:s to| value is| is| value:|:|=| ?=|)\s*:?\s*"
    r"(?P<quote>``|['`\"]?)(?P<value>[\w.+-]*\w|\([^()]*\)|\[[^\[\]]*\])(?P=quote)(?=[\s.,;)}]|$)"
)
NOT_A_VALUE = re.compile(
    r"(a|all|an|and|are|as|be|behavior|by|for|from|if|in|is|it|no|not|of|on|or|set|that|the|then"
    r"|this|to|used|value|when|will|with|you)"
)


class Parameter(NamedTuple):
    """A parameter in a passage, and where its entry, type and default stand, in characters.

    `default` is None when the entry does not speak of a default at all, and (0, 0) when it does in
    a way that is not understood: then nothing is asked about it.
    """

    name: str
    entry: Span
    type: Span
    default: Span | None


class Section(NamedTuple):
    """A Parameters section on one line, and its parameters."""

    passage: str
    parameters: list[Parameter]


def sections() -> Iterator[Section]:
    """The Parameters sections of all numpydoc docstrings in the course's files."""
    for docstring in all_docstrings(NUMPYDOC):
        section = section_of(docstring)
        if section is not None and len(section.parameters) > 1:
            yield section


def section_of(docstring: Docstring) -> Section | None:
    """A docstring's Parameters section; None when it has none."""
    start = SECTION.search(docstring.text)
    if start is None:
        return None
    passage, places = "", list[Span]()
    for is_entry, line in section_lines(docstring.text[start.end() :], len(start[1])):
        passage += " " if passage else ""
        if is_entry:
            places.append((len(passage), len(passage) + len(line)))
        passage += line
    following = [*places[1:], (len(passage), 0)]
    found = [
        parameter_of(passage, first, last, end)
        for (first, last), (end, _) in zip(places, following, strict=False)
    ]
    return Section(passage, [parameter for parameter in found if parameter is not None])


def section_lines(text: str, indentation: int) -> Iterator[tuple[bool, str]]:
    """The lines of a section, each with whether a parameter's entry begins there."""
    lines = [*text.split("\n"), ""]
    for line, after in pairwise(lines):
        depth = len(line) - len(line.lstrip())
        if line.strip() and (depth < indentation or HEADING.match(after)):
            return
        if line.strip():
            yield (
                depth == indentation and ENTRY_LINE.match(line) is not None,
                " ".join(line.split()),
            )


def parameter_of(passage: str, start: int, header_end: int, end: int) -> Parameter | None:
    """The parameter whose entry stands at `start` to `end`; None when it has no single name."""
    entry = ENTRY.match(passage, start, header_end)
    if entry is None:
        return None
    stop = TYPE_END.search(passage, entry.start("type"), header_end)
    type_span = (entry.start("type"), stop.start() if stop else header_end)
    name, default = entry["name"].strip("*"), default_of(passage, start, end)
    return Parameter(name, (start, end), type_span, default)


def default_of(passage: str, start: int, end: int) -> Span | None:
    """Where an entry says a default: None if nowhere, (0, 0) if it does not say it plainly."""
    values = [
        match.span("value")
        for match in DEFAULT.finditer(passage, start, end)
        if not NOT_A_VALUE.fullmatch(match["value"])
    ]
    if len({passage[slice(*span)] for span in values}) == 1:
        return values[0]
    return (0, 0) if re.search("default", passage[start:end], re.IGNORECASE) else None


# Questions ---------------------------------------------------------------------------------------


def questions_about_parameters(
    train: int = 300, validation: int = 60, test: int = 120, most_words: int = 40, seed: int = 0
) -> Task[Question]:
    """What type is a parameter, and what is its default?

    Passages to train on and to choose by are cut from sections, and there are two questions about
    each, so that nothing can be answered without the question. The passages of the test are whole
    sections, with one question each. No entry of a parameter is, or nearly is, in the test and in
    another part of the task.

    Args:
        train, validation, test: how many questions.
        most_words: of a passage that is cut.
        seed: of the draw.

    Raises:
        ValueError: there are not enough.
    """
    rng = random.Random(seed)
    whole = without_near_duplicates(sections(), lambda section: section.passage)
    names = sorted({parameter.name for section in whole for parameter in section.parameters})
    to_test, others = whole[::3], [section for i, section in enumerate(whole) if i % 3]
    others = without_entries_of(others, to_test)
    rng.shuffle(others)
    border = 4 * len(others) // 5
    parts = [
        asked([p for s in some for p in pieces_of(s, most_words)], names, 2, count, rng)
        for some, count in ((others[:border], train), (others[border:], validation))
    ]
    parts.append(asked(to_test, names, 1, test, rng))
    return Task("questions about parameters", (), *parts)


def asked(
    passages: Sequence[Section], names: Sequence[str], each: int, count: int, rng: random.Random
) -> list[Question]:
    """So many questions, `each` or fewer about a passage; ValueError if there are not enough."""
    order = rng.sample(passages, len(passages))
    found = [q for passage in order for q in ask(passage, names, each, rng)]
    if len(found) < count:
        raise ValueError(f"{count} questions were asked for, but there are {len(found)}")
    return found[:count]


def without_entries_of(some: Sequence[Section], others: Sequence[Section]) -> list[Section]:
    """Some sections, less each entry that is nearly one of the others', or a part of it.

    Functions of one module describe the same parameter in the same words, one at more length.
    """
    known = [entry_of(section, p) for section in others for p in section.parameters]
    asked = [(i, p) for i, section in enumerate(some) for p in section.parameters]
    texts = [*known, *(entry_of(some[i], p) for i, p in asked)]
    pairs = near_duplicates(texts, 0.7, contained=True)
    seen = {j - len(known) for i, j in pairs if i < len(known) <= j}
    kept: dict[int, list[Parameter]] = {}
    for number, (i, parameter) in enumerate(asked):
        if number not in seen:
            kept.setdefault(i, []).append(parameter)
    return [Section(some[i].passage, parameters) for i, parameters in kept.items()]


def entry_of(section: Section, parameter: Parameter) -> str:
    """The text of a parameter's entry."""
    return section.passage[slice(*parameter.entry)]


def pieces_of(section: Section, most_words: int) -> Iterator[Section]:
    """Runs of a section's entries, one after the other, of so many words together at most."""
    run: list[Parameter] = []
    for parameter in section.parameters:
        start = run[0].entry[0] if run else parameter.entry[0]
        words = len(section.passage[start : parameter.entry[1]].split())
        if run and (words > most_words or run[-1].entry[1] != parameter.entry[0]):
            yield piece_of(section, run)
            run = []
        run.append(parameter)
    if run:
        yield piece_of(section, run)


def piece_of(section: Section, run: Sequence[Parameter]) -> Section:
    """Some entries of a section, as a section."""
    start, end = run[0].entry[0], run[-1].entry[1]
    moved = [
        Parameter(
            p.name,
            shifted(p.entry, start),
            shifted(p.type, start),
            None if p.default is None else shifted(p.default, start),
        )
        for p in run
    ]
    return Section(section.passage[start:end].rstrip(), moved)


def shifted(span: Span, by: int) -> Span:
    """A span of a text that begins `by` characters later."""
    return span if span == (0, 0) else (span[0] - by, span[1] - by)


def ask(section: Section, names: Sequence[str], count: int, rng: random.Random) -> list[Question]:
    """Questions about a section, `count` or fewer, no two with the same answer.

    About a third has no answer, as far as the section has parameters without a default.
    """
    present = set(re.findall(r"\w+", section.passage))
    absent = [name for name in names if name not in present]
    found: dict[Span | None, Question] = {}
    for kind in rng.sample(("type", "type", "default", "default", "none"), 5):
        question = one_question(section, kind, rng.choice(absent), rng)
        if question is not None:
            found.setdefault(question.answer, question)
    return list(found.values())[:count]


def one_question(section: Section, kind: str, absent: str, rng: random.Random) -> Question | None:
    """A question whose answer is a type, a default or none; None where there is nothing to ask."""
    if kind == "none" and rng.random() < 0.5:
        asked = rng.choice(("What type is {}?", "What is the default of {}?"))
        return Question(asked.format(absent), section.passage, None)
    if kind == "type":
        parameter = rng.choice(section.parameters)
        return Question(f"What type is {parameter.name}?", section.passage, parameter.type)
    fitting = [
        p
        for p in section.parameters
        if p.default != (0, 0) and (p.default is None) == (kind == "none")
    ]
    if not fitting:
        return None
    parameter = rng.choice(fitting)
    question = f"What is the default of {parameter.name}?"
    return Question(question, section.passage, parameter.default)


# A baseline --------------------------------------------------------------------------------------


def nearest_known_answer(train: Sequence[Question], question: Question) -> str:
    """An answer by rule: of all answers in training, the first that stands behind the name.

    The name is the question's last word. Answers to questions that begin alike are looked for, as
    whole words; an empty text, no answer, when the name or every answer is missing.
    """
    kind, name = question.question[:8], question.question.rstrip("?").split()[-1]
    at = re.search(rf"(?<!\w){re.escape(name)}(?!\w)", question.passage)
    if at is None:
        return ""
    known = {q.answer_text for q in train if q.question[:8] == kind and q.answer is not None}
    places = [
        (match.start(), -len(text), text)
        for text in known
        if (match := whole(text).search(question.passage, at.end()))
    ]
    return min(places, default=(0, 0, ""))[2]


@lru_cache(maxsize=4096)
def whole(text: str) -> re.Pattern[str]:
    """A pattern for a text that is not a part of a longer word."""
    return re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")
