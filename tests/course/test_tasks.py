"""The tasks are what they say, the same every time, and nothing of a test is seen in training."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from bertlab.course.tasks import (
    TAGS,
    LabelledPair,
    LabelledText,
    Question,
    Task,
    cached,
    checked_sentences,
    conll_examples,
    entities,
    leaks,
    library_of_paragraph,
    near_duplicates,
    nearest_known_answer,
    questions_about_parameters,
    same_docstring,
    shared_words_baseline,
    spans,
    squad_examples,
    sst2_examples,
    template_sentences,
    tf_idf_baseline,
    unlabelled_sentences,
    without_near_duplicates,
    word_list_baseline,
)
from bertlab.course.tasks import docstrings as places


@pytest.fixture(scope="module")
def paragraphs():
    return library_of_paragraph(30, 10, 20)


@pytest.fixture(scope="module")
def pairs():
    return same_docstring(200, 40, 100)


@pytest.fixture(scope="module")
def questions():
    return questions_about_parameters(200, 40, 60)


@pytest.fixture(scope="module")
def checked():
    return checked_sentences()


# Near-duplicates and splits ----------------------------------------------------------------------


def test_near_duplicates_are_those_of_the_definition():
    texts = [
        "the mean of the values along the given axis is returned as a new array",
        "The mean of the values, along the given axis (1), is returned as a NEW array.",
        "the mean of the values along the given axis is returned as an old array",
        "draw a circle",
        "draw a line",
        "",
    ]
    sets = [
        {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}
        for words in ([w.strip(",.()1") for w in t.lower().split()] for t in texts)
    ]
    sets[1] = sets[0]
    for threshold in (0.4, 0.8, 1.0):
        expected = [
            (i, j)
            for i in range(len(texts))
            for j in range(i + 1, len(texts))
            if len(sets[i] & sets[j]) >= threshold * len(sets[i] | sets[j])
        ]
        assert near_duplicates(texts, threshold) == expected
    assert near_duplicates(texts, 0.4) == [(0, 1), (0, 2), (1, 2)]
    assert near_duplicates(["a b c d e f g h i", "b c d e"], 0.9) == []
    assert near_duplicates(["a b c d e f g h i", "b c d e"], 0.9, contained=True) == [(0, 1)]
    assert without_near_duplicates(texts, str) == [texts[0], *texts[3:]]


@pytest.mark.parametrize("threshold", [0, -1, 1.5])
def test_a_threshold_out_of_range_is_refused(threshold):
    with pytest.raises(ValueError, match="threshold is"):
        near_duplicates(["a"], threshold)


def text_of(item: Any) -> str:
    """What must not be in two parts: of a question its passage, of a pair both texts."""
    if isinstance(item, Question):
        return item.passage
    return f"{item.text} {item.pair}" if isinstance(item, LabelledPair) else item.text


@pytest.mark.parametrize("name", ["paragraphs", "pairs", "questions"])
def test_no_test_example_is_nearly_in_training_and_a_planted_one_is_caught(name, request):
    task = request.getfixturevalue(name)
    assert leaks(task, text_of) == []
    stolen = task.test[3]
    field = "passage" if isinstance(stolen, Question) else "text"
    nearly = stolen._replace(**{field: getattr(stolen, field).replace("the", "this", 1) + " Yes."})
    for part in ("train", "validation"):
        leaking = replace(task, **{part: [*getattr(task, part), nearly]})
        assert len(leaks(leaking, text_of)) >= 1


def test_a_docstring_of_the_pairs_is_in_one_part_only(pairs):
    parts = [{t for p in part for t in p[:2]} for part in (pairs.train, pairs.validation)]
    tests = {t for p in pairs.test for t in p[:2]}
    assert not tests & (parts[0] | parts[1])
    assert not parts[0] & parts[1]


def test_no_entry_of_a_tested_section_is_in_a_passage_of_training(questions):
    entries = [
        spans.entry_of(section, parameter)
        for section in spans.sections()
        for parameter in section.parameters
    ]
    tested = {e for e in entries if any(e.strip() in q.passage for q in questions.test)}
    seen = [q.passage for q in (*questions.train, *questions.validation)]
    long = [e for e in tested if len(e.split()) > 6]
    assert len(long) > 100
    assert not [e for e in long if any(e.strip() in passage for passage in seen)]


@pytest.mark.parametrize("make", [library_of_paragraph, same_docstring, questions_about_parameters])
def test_a_task_is_the_same_every_time_and_another_for_another_seed(make):
    first, again, other = (make(20, 10, 10, seed=seed) for seed in (3, 3, 4))
    assert (first.train, first.validation, first.test) == (
        again.train,
        again.validation,
        again.test,
    )
    assert first.test != other.test


@pytest.mark.parametrize("make", [library_of_paragraph, same_docstring, questions_about_parameters])
def test_more_than_there_is_is_refused(make):
    with pytest.raises(ValueError, match="there are"):
        make(90_000, 10, 10)


# Paragraphs and pairs ----------------------------------------------------------------------------


def test_paragraphs_are_as_many_of_each_library_as_asked(paragraphs):
    for part, each in ((paragraphs.train, 30), (paragraphs.validation, 10), (paragraphs.test, 20)):
        assert Counter(item.label for item in part) == dict.fromkeys(range(8), each)
    assert paragraphs.labels[6] == "torch"
    assert any("tensor" in item.text for item in paragraphs.train if item.label == 6)
    assert [item.label for item in paragraphs.train] != sorted(i.label for i in paragraphs.train)


def test_the_paragraphs_baseline_counts_words(paragraphs):
    accuracy = tf_idf_baseline(paragraphs)
    assert 0.3 < accuracy < 0.6  # a coin: 0.125
    labels = [replace_label(item, (item.label + 1) % 8) for item in paragraphs.test]
    assert tf_idf_baseline(replace(paragraphs, test=labels)) < 0.2


def replace_label(item: LabelledText, label: int) -> LabelledText:
    return item._replace(label=label)


def test_half_of_the_pairs_belong_together_and_no_side_alone_says_which(pairs):
    assert (len(pairs.train), len(pairs.validation), len(pairs.test)) == (200, 40, 100)
    for part in (pairs.train, pairs.validation, pairs.test):
        firsts = {label: {p.text for p in part if p.label == label} for label in (0, 1)}
        assert firsts[0] == firsts[1]
        assert len(firsts[0]) == len(part) / 2
    assert all(p.text != p.pair for p in pairs.train)


def test_pairs_that_belong_together_are_of_one_docstring_and_others_are_not(pairs):
    whole = [" ".join(d.text.split()) for d in places.all_docstrings()]
    for pair in pairs.test[:30]:
        together = any(pair.text in doc and pair.pair in doc for doc in whole)
        assert together == bool(pair.label)


@pytest.mark.parametrize("sizes", [(3, 2, 2), (2, 0, 2)])
def test_an_odd_number_of_pairs_is_refused_by_name(sizes):
    with pytest.raises(ValueError, match=r"(train|validation) is [30]"):
        same_docstring(*sizes)


def test_the_pairs_baseline_sees_shared_words():
    same = [LabelledPair("a red fox", "the red fox", 1), LabelledPair("an old oak", "old oak", 1)]
    other = [LabelledPair("a red fox", "an old oak", 0), LabelledPair("a cat", "one tree", 0)]
    task = Task("toy", ("other", "same"), same + other, [], same + other)
    assert shared_words_baseline(task) == 1.0
    swapped = [pair._replace(label=1 - pair.label) for pair in task.test]
    assert shared_words_baseline(replace(task, test=swapped)) == 0.0


# Entities ----------------------------------------------------------------------------------------


def test_there_are_209_checked_sentences_of_all_libraries_and_all_kinds(checked):
    rows = json.loads(entities.CHECKED_FILE.read_text(encoding="utf-8"))
    assert len(checked) == len(rows) == 209
    assert min(Counter(row["library"] for row in rows).values()) >= 20
    kinds = Counter(tag[2:] for _, tags in checked for tag in tags if tag.startswith("B-"))
    assert set(kinds) == {"parameter", "type", "default", "library"}
    assert min(kinds.values()) >= 30
    assert 40 <= sum(set(tags) == {"O"} for _, tags in checked) <= 70
    assert all(len(words) == len(tags) and set(tags) <= set(TAGS) for words, tags in checked)


def test_the_repository_holds_places_and_no_text(checked):
    stored = entities.CHECKED_FILE.read_text(encoding="utf-8")
    rows = json.loads(stored)
    fields = {"library", "file", "name", "start", "end", "sha256", "entities"}
    assert all(set(row) == fields for row in rows)
    for words, _ in checked[:60]:
        assert " ".join(words[:4]) not in stored


def test_offsets_fit_what_they_mark():
    """A few, as a reader checks them."""
    rows = json.loads(entities.CHECKED_FILE.read_text(encoding="utf-8"))
    marked = [
        (entities.located_text(row)[start:end], kind)
        for row in rows
        for start, end, kind in row["entities"]
    ]
    for found in (
        ("ymin", "parameter"),
        ("range(1, N+1)", "default"),
        ("LAPACK", "library"),
        ("array-like", "type"),
        ("self.clean_up_tokenization_spaces", "default"),
    ):
        assert found in marked
    assert all(text == text.strip() and text for text, _ in marked)


@pytest.mark.parametrize(
    "change",
    [
        {"start": 1},
        {"sha256": "0" * 16},
        {"name": "no_such_object"},
        {"file": "no/such/file.py"},
    ],
)
def test_a_sentence_that_is_not_where_it_was_names_the_package_and_the_way_out(change, tmp_path):
    rows = json.loads(entities.CHECKED_FILE.read_text(encoding="utf-8"))
    row = {**rows[60], **change}
    file = tmp_path / "places.json"
    file.write_text(json.dumps([rows[0], row]), encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"constraints\.txt: pip install -c") as caught:
        checked_sentences(file)
    assert places.LIBRARIES[row["library"]] in str(caught.value)
    assert places.installed(row["library"]) in str(caught.value)


@pytest.mark.parametrize("entity", [(0, 3, "parameter"), (1, 4, "parameter"), (0, 4, "verb")])
def test_an_entity_that_does_not_begin_and_end_with_a_word_is_refused(entity):
    assert entities.tagged("axis of x", [(0, 4, "parameter")]).tags[0] == "B-parameter"
    with pytest.raises(ValueError, match="is no entity of 'axis of x'"):
        entities.tagged("axis of x", [entity])


def test_sentences_from_templates_have_each_template_equally_often(complete):
    made = template_sentences(2 * len(entities.TEMPLATES))
    assert len(made) == 2 * len(entities.TEMPLATES)
    known = {word: kind for kind, values in entities.VALUES.items() for word in values}
    for words, tags in made:
        assert len(words) == len(tags)
        for word, tag in zip(words, tags, strict=True):
            assert tag == "O" or tag[2:] == "default" or known[word] == tag[2:]
    assert template_sentences(50) == made[:50]
    slots = sum(t.count("{") for t in entities.TEMPLATES)
    assert sum(tag.startswith("B-") for _, tags in made for tag in tags) == 2 * slots


def test_unlabelled_sentences_are_none_of_the_checked_ones(checked):
    found = unlabelled_sentences(600)
    assert len(set(found)) == 600
    texts = [" ".join(words) for words, _ in checked]
    pairs = near_duplicates([*texts, *(" ".join(words) for words in found)])
    assert not [(i, j) for i, j in pairs if i < len(texts) <= j]
    with pytest.raises(ValueError, match="count is 50000"):
        unlabelled_sentences(50_000)


def test_the_word_list_knows_words_and_nothing_else(complete):
    made = template_sentences(600)  # every value of the templates occurs
    tags = word_list_baseline(made, [["NumPy", "is", "never", "an", "int"], ["int"]])
    assert tags == [["B-library", "O", "O", "O", "B-type"], ["B-type"]]


PROSE = """Return the sorted values.

    The values are sorted along an axis. It is the last
    one by default, i.e. axis -1. See `argsort`, e.g. for
    indices of the sorted values.

    axis (int, optional): Along which axis the values are sorted. Default: -1
    kind (str): How the values are sorted in the end.

    >>> This is an example and not a sentence of prose.
    - This is in a list and not a sentence of prose.
    """


def test_sentences_are_of_prose_and_do_not_run_into_one_another():
    found = [" ".join(PROSE[a:b].split()) for a, b in places.sentences_of(PROSE)]
    assert found == [
        "The values are sorted along an axis.",
        "It is the last one by default, i.e. axis -1.",
        "See `argsort`, e.g. for indices of the sorted values.",
        "axis (int, optional): Along which axis the values are sorted.",
        "kind (str): How the values are sorted in the end.",
    ]


# Questions ---------------------------------------------------------------------------------------

DOCSTRING = """Sort.

    Parameters
    ----------
    a : array_like
        What to sort.
    axis: int or None, optional
        Along which axis. The default is -1.
    kind : {'quick', 'heap'}, default='quick'
        How.
    x, y : float
        Two at once.
    order : str, optional
        The default is the order of the fields.

    Returns
    -------
    sorted : ndarray
    """


def test_a_numpydoc_section_is_read_as_a_person_reads_it():
    section = spans.section_of(places.Docstring("numpy", "f.py", "sort", DOCSTRING, ()))
    assert section is not None
    text = section.passage
    assert "sorted" not in text
    assert text.startswith("a : array_like What to sort. axis: int or None, optional Along")
    read = [
        (p.name, text[slice(*p.type)], p.default and text[slice(*p.default)])
        for p in section.parameters
    ]
    assert read == [
        ("a", "array_like", None),
        ("axis", "int or None", "-1"),
        ("kind", "{'quick', 'heap'}", "quick"),
        ("order", "str", ""),  # it speaks of a default, and does not say which
    ]
    pieces = list(spans.pieces_of(section, 12))
    assert [[p.name for p in piece.parameters] for piece in pieces] == [
        ["a"],
        ["axis"],
        ["kind"],
        ["order"],
    ]
    for piece in pieces:
        for p in piece.parameters:
            original = next(q for q in section.parameters if q.name == p.name)
            assert piece.passage[slice(*p.type)] == text[slice(*original.type)]


def test_questions_ask_for_what_stands_in_their_passage(questions):
    assert (len(questions.train), len(questions.validation), len(questions.test)) == (200, 40, 60)
    for part in (questions.train, questions.test):
        kinds = Counter((q.question[:9], q.answer is None) for q in part)
        assert set(kinds) == {(w, x) for w in ("What type", "What is t") for x in (False, True)}
        assert 0.1 < sum(q.answer is None for q in part) / len(part) < 0.5
    for q in questions.train:
        assert q.answer is None or 0 < len(q.answer_text.strip()) == len(q.answer_text)
        name = q.question.rstrip("?").split()[-1]
        if q.answer is not None:
            assert q.passage.index(name) < q.answer[0]
    assert max(len(q.passage.split()) for q in questions.test) > 200  # for windows


def test_a_passage_of_training_has_two_questions_with_different_answers(questions):
    answers: dict[str, list[Any]] = {}
    for q in questions.train:
        answers.setdefault(q.passage, []).append(q.answer)
    assert sum(len(a) == 2 for a in answers.values()) > 0.8 * len(answers)
    assert all(len(set(a)) == len(a) for a in answers.values())


def test_the_rule_takes_the_first_known_answer_behind_the_name():
    train = [Question("What type is b?", "b : float or int", (4, 9))]
    train += [Question("What type is c?", "c : int", (4, 7))]
    passage = "x : printed float axis : int or float"
    assert nearest_known_answer(train, Question("What type is axis?", passage, None)) == "int"
    assert nearest_known_answer(train, Question("What type is x?", passage, None)) == "float"
    assert nearest_known_answer(train, Question("What type is q?", passage, None)) == ""
    assert nearest_known_answer(train, Question("What is the default of x?", passage, None)) == ""


# From the hub, with tiny local data sets of the same schema --------------------------------------

SST2 = [
    {"idx": 0, "sentence": "a gripping film ", "label": 1},
    {"idx": 1, "sentence": "dull", "label": 0},
    {"idx": 2, "sentence": "unknown", "label": -1},
]
CONLL = [
    {
        "id": "0",
        "tokens": ["EU", "rejects", "German", "call"],
        "pos_tags": [22, 42, 16, 21],
        "chunk_tags": [11, 21, 11, 12],
        "ner_tags": [3, 0, 7, 0],
    }
]
SQUAD = [
    {
        "id": "a",
        "title": "Axis",
        "context": "The axis is an int.",
        "question": " What is the axis? ",
        "answers": {"text": ["an int", "int"], "answer_start": [12, 15]},
    },
    {
        "id": "b",
        "title": "Axis",
        "context": "The axis is an int.",
        "question": "Who?",
        "answers": {"text": [], "answer_start": []},
    },
]


def dataset(rows: list[dict[str, Any]]) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list(rows)


def test_the_schemas_of_the_hub_become_the_examples_of_the_course():
    assert sst2_examples(dataset(SST2)) == [
        LabelledText("a gripping film", 1),
        LabelledText("dull", 0),
    ]
    [sentence] = conll_examples(dataset(CONLL))
    assert sentence.words == ("EU", "rejects", "German", "call")
    assert sentence.tags == ("B-ORG", "O", "B-MISC", "O")
    first, second = squad_examples(dataset(SQUAD))
    assert (first.question, first.answer_text, first.answer) == (
        "What is the axis?",
        "an int",
        (12, 18),
    )
    assert (second.answer, second.answer_text) == (None, "")


def test_a_data_set_on_disk_is_loaded_without_the_network(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"validation": dataset(SST2)}).save_to_disk(str(tmp_path / "mine"))
    rows = cached(str(tmp_path / "mine"), "validation")
    assert len(sst2_examples(rows)) == 2
    with pytest.raises(FileNotFoundError, match=r"datasets\.load_dataset\('rajpurkar/squad'"):
        cached("squad")


@pytest.mark.parametrize(
    ("read", "row", "said"),
    [
        (sst2_examples, {"sentence": "a"}, "row 0 has no column 'label'"),
        (sst2_examples, {"sentence": "a", "label": 2}, "row 0 has label 2; allowed is 0 to 1"),
        (sst2_examples, {"sentence": None, "label": 1}, "row 0 has a NoneType as sentence"),
        (conll_examples, {"tokens": ["a"], "ner_tags": [0, 0]}, "1 tokens and 2 ner_tags"),
        (conll_examples, {"tokens": ["a"], "ner_tags": [9]}, "allowed is 0 to 8"),
        (conll_examples, {"tokens": [], "ner_tags": []}, "0 tokens"),
        (
            squad_examples,
            {
                "question": "q",
                "context": "abc",
                "answers": {"text": ["b"], "answer_start": [2]},
            },
            "row 0: the answer 'b' is not at 2",
        ),
    ],
)
def test_a_row_that_does_not_fit_is_named(read, row, said):
    with pytest.raises(ValueError, match=said):
        read([row])


def test_an_unknown_library_is_refused_by_name():
    with pytest.raises(ValueError, match="library is 'pandas', but must be one of matplotlib"):
        places.library_folder("pandas")
