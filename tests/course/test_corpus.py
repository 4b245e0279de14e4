"""The documentation corpus: what a paragraph is, and a cache that cannot lie."""

import gzip
import itertools
import multiprocessing
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

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


def test_another_version_of_a_library_or_of_this_module_is_another_file(
    small_library, monkeypatch, tmp_path
):
    """A corpus that an earlier rule made would else be read for ever, on this machine alone."""
    first = corpus.cache_file()
    other = tmp_path / "corpus.py"
    other.write_text(Path(corpus.__file__).read_text() + "# another rule\n")
    monkeypatch.setattr(corpus, "__file__", str(other))
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
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty, but no \.txt, \.md or \.rst file"):
        corpus.from_folder(tmp_path / "empty")


def test_a_paragraph_that_came_before_is_left_out_as_long_as_it_is_remembered(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(corpus, "REMEMBERED", 3)
    (tmp_path / "a.txt").write_text("\n\n".join("abacdaefgha"))
    assert "".join(item.text for item in corpus.from_folder(tmp_path)) == "abcdefgha"


# --- streaming ---

SHAPES = {
    "paragraphs": lambda number: f"{number} {SENTENCE}.\n\n",
    "lines without a blank one": lambda number: f"{number} {SENTENCE}.\n",
    "one line": lambda number: f"{number} {SENTENCE}. ",
    "one word": lambda number: f"{number}-{SENTENCE}".replace(" ", "-"),
}


def text_of(folder: Path, shape: str, count: int) -> Path:
    folder.mkdir()
    with (folder / "text.txt").open("w") as file:
        file.writelines(map(SHAPES[shape], range(count)))
    return folder


def peak_of(read: Callable[[], Iterable[Any]]) -> int:
    """The most memory, in bytes, that Python had taken while everything is read."""
    tracemalloc.start()
    kept = read()
    for _ in kept:
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("shape", SHAPES)
def test_text_flows_through_however_long_it_is(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(corpus, "REMEMBERED", 500)
    short = text_of(tmp_path / "short", shape, 5_000)
    long = text_of(tmp_path / "long", shape, 20_000)
    size = (long / "text.txt").stat().st_size
    peaks = [peak_of(lambda at=at: corpus.from_folder(at)) for at in (short, long)]
    assert peaks[1] < 1.3 * peaks[0] < size / 2
    held = peak_of(lambda: list(corpus.from_folder(long)))
    assert held > size, "the measure must notice a text that is held"


def test_fingerprints_without_a_bound_would_be_noticed(tmp_path, monkeypatch):
    peaks = {}
    for bound in (500, 10**9):
        monkeypatch.setattr(corpus, "REMEMBERED", bound)
        for count in (5_000, 20_000):
            at = text_of(tmp_path / f"{bound}-{count}", "paragraphs", count)
            peaks[bound, count] = peak_of(lambda at=at: corpus.from_folder(at))
    assert peaks[500, 20_000] < 1.3 * peaks[500, 5_000]
    assert peaks[10**9, 20_000] > 2 * peaks[10**9, 5_000]


@pytest.mark.parametrize("shape", SHAPES)
def test_no_word_is_lost_where_a_long_paragraph_is_cut(tmp_path, shape):
    at = text_of(tmp_path / "text", shape, 1_000)
    written = (at / "text.txt").read_text()
    texts = [item.text for item in corpus.from_folder(at)]
    if shape == "one word":
        assert "".join(texts) == written
    else:
        assert " ".join(texts).split() == written.split()
    assert max(map(len, texts)) <= 2 * corpus.LONGEST
    assert len(texts) > 1


# --- the package datasets ---


@pytest.fixture
def rows():
    import datasets

    datasets.disable_progress_bars()
    texts = ["One\nline.\n\nTwo.", "", "Two.", "Three."]
    return datasets.Dataset.from_dict({"text": texts, "label": [0, 1, 2, 3], "none": [None] * 4})


FROM_ROWS = [("One line.", 0), ("Two.", 0), ("Three.", 3)]


def save(rows: Any, folder: Path, how: str) -> None:
    import datasets

    if how == "saved":
        rows.save_to_disk(folder)
    elif how == "saved with splits":
        datasets.DatasetDict({"train": rows, "test": rows.select([3])}).save_to_disk(folder)
    else:
        folder.mkdir()
        {"parquet": rows.to_parquet, "json lines": rows.to_json}[how](
            folder / f"train.{'parquet' if how == 'parquet' else 'jsonl'}"
        )


@pytest.mark.parametrize("how", ["saved", "saved with splits", "parquet", "json lines"])
def test_a_data_set_on_disk_gives_a_document_a_row(tmp_path, rows, how):
    folder = tmp_path / "mine"
    save(rows, folder, how)
    found = list(corpus.from_dataset(folder))
    assert [(item.text, item.document) for item in found] == FROM_ROWS
    assert {item.library for item in found} == {"mine"}
    assert list(corpus.from_dataset(folder, column="none")) == []
    with pytest.raises(ValueError, match=r"column is 'words', but .* has text, label, none"):
        corpus.from_dataset(folder, column="words")
    if how != "saved":
        with pytest.raises(ValueError, match=r"split(:| is) '?dev"):
            corpus.from_dataset(folder, split="dev")


def test_another_split_is_other_text(tmp_path, rows):
    save(rows, tmp_path / "mine", "saved with splits")
    assert [x.text for x in corpus.from_dataset(tmp_path / "mine", split="test")] == ["Three."]


def test_the_articles_of_wikitext_are_its_documents(tmp_path):
    import datasets

    lines = ["", " = Valkyria = \n", "", " It is a game . \n", " = = Plot = = \n", " War . \n"]
    lines += [" = = = Part 2 = = = \n", " 1 + 1 = 2 . \n", " = Paris = \n", " A city . \n"]
    datasets.Dataset.from_dict({"text": lines}).save_to_disk(tmp_path / "wiki")
    found = list(corpus.as_documents(corpus.from_dataset(tmp_path / "wiki")))
    assert [[item.text for item in document] for document in found] == [
        ["It is a game .", "War .", "1 + 1 = 2 ."],
        ["A city ."],
    ]


def test_a_data_set_of_the_hub_is_looked_for_on_this_machine_alone(monkeypatch):
    import datasets
    from datasets import config

    seen = []

    def load(*args, **options):
        seen.append((args, config.HF_HUB_OFFLINE))
        raise ConnectionError("offline")

    monkeypatch.setattr(config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(FileNotFoundError, match=r"Salesforce/wikitext is neither a folder"):
        corpus.from_dataset("Salesforce/wikitext", "wikitext-2-raw-v1")
    assert seen == [(("Salesforce/wikitext", "wikitext-2-raw-v1"), True)]
    assert config.HF_HUB_OFFLINE is False


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RuntimeError, match="pip install datasets"):
        corpus.from_dataset("anything")


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
