"""The documentation corpus: what a paragraph is, and a cache that cannot lie."""

import gzip
import itertools
import multiprocessing
import sys
from collections import Counter
from pathlib import Path

import pytest

from bertlab.course import corpus
from bertlab.course.corpus import Paragraph, split_paragraphs

SENTENCE = "This is a sentence that has quite enough plain words to be kept"

NUMPYDOC = f"""Return the thing.

    Parameters
    ----------
    x : array_like, optional
        {SENTENCE}, the first of all.
    axis : int
        {SENTENCE}, and it goes
        on in a second line.

    .. math::

        {SENTENCE} but as a formula

    .. note::
        {SENTENCE}, as a note on :class:`~numpy.ndarray` should.

    >>> print("{SENTENCE}")
    {SENTENCE}
"""

GOOGLE = f"""{SENTENCE} here::

        {SENTENCE} but as code

    Args:
        dim (int, optional): {SENTENCE}, with
            its end hanging.
        keepdim (bool): {SENTENCE}, too.

    ```python
    {SENTENCE} but fenced
    ```
    {{}} {SENTENCE} from a template
"""


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    """A package that can be found but would fail if it were imported, as the only library."""
    package = tmp_path / "site" / "tinylib"
    (package / "tests").mkdir(parents=True)
    (package / "__init__.py").write_text(f'"""{SENTENCE} A."""\nraise SystemExit("imported")\n')
    (package / "b.py").write_text(f'def f():\n    """{SENTENCE} B.\n\n    {SENTENCE} A."""\n')
    (package / "broken.py").write_text(f'"""{SENTENCE} broken."""\ndef (:\n')
    (package / "docs.py").write_text(f'add_docstr(f, r"""{SENTENCE} C.""")\n')
    (package / "tests" / "test_b.py").write_text(f'"""{SENTENCE} of a test."""\n')
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(corpus, "LIBRARIES", {"tinylib": "tinylib"})
    monkeypatch.setattr(corpus, "_versions", lambda: {"tinylib": "1.0"})
    monkeypatch.setenv("BERTLAB_CACHE", str(tmp_path / "cache"))
    yield package
    sys.modules.pop("tinylib", None)


EXPECTED = [
    Paragraph(f"{SENTENCE} A.", "tinylib", 0),
    Paragraph(f"{SENTENCE} B.", "tinylib", 1),
    Paragraph(f"{SENTENCE} C.", "tinylib", 2),
]


def test_numpy_style_keeps_descriptions_and_drops_tables_formulas_and_examples():
    assert list(split_paragraphs(NUMPYDOC)) == [
        f"{SENTENCE}, the first of all.",
        f"{SENTENCE}, and it goes on in a second line.",
        f"{SENTENCE}, as a note on numpy.ndarray should.",
    ]


def test_google_style_keeps_descriptions_and_drops_code_and_templates():
    assert list(split_paragraphs(GOOGLE)) == [
        f"{SENTENCE} here:",
        f"{SENTENCE}, with its end hanging.",
        f"{SENTENCE}, too.",
    ]


@pytest.mark.parametrize("mark", ["- ", "* ", "1. ", "(2) "])
def test_each_item_of_a_list_is_a_paragraph_without_its_mark(mark):
    text = f"{mark}{SENTENCE} one\n  and on\n{mark}{SENTENCE} two"
    assert list(split_paragraphs(text)) == [f"{SENTENCE} one and on", f"{SENTENCE} two"]


@pytest.mark.parametrize("text", ["", "Too short.", "a = b + c; d = e[f(g)] ** 2; h, i = j, k"])
def test_what_is_no_sentence_is_no_paragraph(text):
    assert list(split_paragraphs(text)) == []


def test_text_that_no_file_can_hold_is_left_out():
    assert list(split_paragraphs(f"{SENTENCE} \ud800")) == []


def test_nothing_is_imported_and_tests_broken_files_and_duplicates_are_left_out(small_library):
    assert list(corpus.paragraphs()) == EXPECTED
    assert "tinylib" not in sys.modules


def test_a_second_call_reads_the_cache_and_not_the_sources(small_library, monkeypatch):
    list(corpus.paragraphs())
    monkeypatch.setattr(corpus, "_harvest", lambda: pytest.fail("harvested again"))
    assert list(corpus.paragraphs()) == EXPECTED


def test_another_version_of_a_library_or_of_the_format_is_another_file(small_library, monkeypatch):
    first = corpus.cache_file()
    monkeypatch.setattr(corpus, "FORMAT", corpus.FORMAT + 1)
    second = corpus.cache_file()
    monkeypatch.setattr(corpus, "_versions", lambda: {"tinylib": "1.1"})
    assert len({first, second, corpus.cache_file()}) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:20],
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: content[:60] + bytes([content[60] ^ 1]) + content[61:],
        lambda content: gzip.compress(b"tinylib\t0\tforged\n"),
    ],
    ids=["empty", "stump", "cut", "longer", "flipped bit", "another file"],
)
def test_a_damaged_cache_is_made_again(small_library, damage):
    list(corpus.paragraphs())
    file = corpus.cache_file()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    assert list(corpus.paragraphs()) == EXPECTED
    assert file.read_bytes() == good, "the same sources must give the same bytes"
    assert list(file.parent.iterdir()) == [file], "no leftovers"


def test_without_a_folder_to_write_to_the_corpus_is_still_there(
    small_library, tmp_path, monkeypatch, capsys
):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("BERTLAB_CACHE", str(tmp_path / "a file" / "below"))
    corpus._packed_in_memory.cache_clear()
    assert list(corpus.paragraphs()) == EXPECTED
    assert "cannot be written to" in capsys.readouterr().err


def test_an_interrupted_harvest_leaves_nothing_behind(small_library, monkeypatch):
    def interrupted():
        yield EXPECTED[0]
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus, "_harvest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        corpus.paragraphs()
    assert list(corpus.cache_folder().iterdir()) == []


def test_the_corpus_is_harvested_here_where_no_process_can_be_started(small_library, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no more processes")

    monkeypatch.setattr(corpus.subprocess, "run", refuse)
    assert list(corpus.paragraphs()) == EXPECTED


def _harvest_once(site: str, start, results) -> None:
    sys.path.insert(0, site)
    corpus.LIBRARIES = {"tinylib": "tinylib"}
    corpus._versions = lambda: {"tinylib": "1.0"}
    start.wait()
    results.put([tuple(item) for item in corpus.paragraphs()])


def test_two_processes_that_harvest_at_once_do_each_other_no_harm(small_library):
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(2), context.Queue()
    arguments = (str(small_library.parent), start, results)
    processes = [context.Process(target=_harvest_once, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert found == [[tuple(item) for item in EXPECTED]] * 2
    assert list(corpus.cache_folder().iterdir()) == [corpus.cache_file()]


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(corpus, "LIBRARIES", {"nosuchlib": "no-such-distribution"})
    with pytest.raises(RuntimeError, match="no-such-distribution is not installed"):
        corpus.paragraphs()


def test_a_name_outside_the_corpus_is_refused_at_once():
    with pytest.raises(ValueError, match=r"no corpus for pandas; there is matplotlib"):
        corpus.paragraphs(["pandas"])
    with pytest.raises(ValueError, match=r"write \['torch'\]"):
        corpus.paragraphs("torch")


def test_a_folder_of_text_gives_paragraphs_labelled_by_subfolder(tmp_path):
    (tmp_path / "novels").mkdir()
    (tmp_path / "novels" / "b.txt").write_text("One\nline.\n\n\nTwo.\n")
    (tmp_path / "a.md").write_text("短い文。\n \nTwo.")
    (tmp_path / "c.bin").write_bytes(b"\xff\n")
    assert list(corpus.from_folder(tmp_path)) == [
        Paragraph("短い文。", tmp_path.name, 0),
        Paragraph("Two.", tmp_path.name, 0),
        Paragraph("One line.", "novels", 1),
    ]
    with pytest.raises(NotADirectoryError, match="nowhere"):
        corpus.from_folder(tmp_path / "nowhere")


def test_the_cache_folder_follows_the_users_settings(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("BERTLAB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert corpus.cache_folder() == tmp_path / "bertlab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert corpus.cache_folder() == Path.home() / ".cache" / "bertlab"
    monkeypatch.setenv("BERTLAB_CACHE", str(tmp_path / "mine"))
    assert corpus.cache_folder() == tmp_path / "mine"


def test_every_library_has_thousands_of_different_paragraphs():
    counts = corpus.counts_by_library()
    assert list(counts) == sorted(corpus.LIBRARIES)
    assert min(counts.values()) > 4000
    assert sum(counts.values()) > 75_000
    assert len({item.text for item in corpus.paragraphs()}) == sum(counts.values())


def test_paragraphs_are_one_line_of_at_least_eight_words():
    for item in corpus.paragraphs():
        assert item.text == " ".join(item.text.split())
        assert len(item.text.split()) >= 8
        assert ">>>" not in item.text[:4]


def test_a_sample_has_as_many_of_each_library_and_is_the_same_each_time():
    sample = corpus.documentation(["numpy", "torch"], per_library=50, min_words=12, seed=7)
    assert Counter(item.library for item in sample) == {"numpy": 50, "torch": 50}
    assert all(len(item.text.split()) >= 12 for item in sample)
    again = corpus.documentation(["numpy", "torch"], per_library=50, min_words=12, seed=7)
    other = corpus.documentation(["numpy", "torch"], per_library=50, min_words=12, seed=8)
    assert sample == again
    assert sample != other


def test_documents_are_the_paragraphs_of_one_docstring_in_order():
    first = list(itertools.islice(corpus.documents(["scipy"]), 500))
    flat = [item for document in first for item in document]
    assert flat == list(itertools.islice(corpus.paragraphs(["scipy"]), len(flat)))
    assert len({document[0].document for document in first}) == 500
    assert sum(len(document) > 1 for document in first) > 100
