"""Entities in docstrings: parameters, types, default values and libraries.

Three kinds of sentences. `template_sentences` are made, so their tags are free. `unlabelled` are
real, without tags. `checked_sentences` are real and were tagged by hand: 209 of them, whose text
stays in the packages; the repository has their places, a hash of each, and the places of the
entities within it.

The rules by which they were tagged, one sentence after the other, by one reader:

parameter
    The name of an argument, of the function that is documented or of another one, where the
    sentence means the argument: written as in code, with or without quotes. In `axis=0` it is
    `axis`. An English word that is also an argument's name ("the window", "while padding") counts
    only with quotes, or where it stands without an article as a name would. Attributes, methods
    and returned values do not count.
type
    The name of a type of Python, NumPy, pandas or PyTorch for data, as it is written in code and
    in the singular: `int`, `str`, `list`, `tuple`, `dict`, `set`, `callable`, `array_like`,
    `ndarray`, `DataFrame`, `Tensor`, `torch.long`. English words (string, array, matrix, sequence,
    complex numbers) do not count, nor does "list" where it is a verb or a list in prose, nor do
    classes that are not for data.
default
    The value that something has when nothing is given, where the sentence names it: a constant, a
    name or an expression, without its quotes; a former default too. What the value does ("the
    default is to use all axes") does not count.
library
    The name of a library: NumPy, LAPACK, PyTorch. Languages and platforms (Python, Fortran, CUDA)
    do not count, nor does the library's name within a dotted name, a path or an address.

A word belongs to one entity at most; a default that is also something else is a default.
"""

import hashlib
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bertlab.course.tasks.docstrings import (
    all_docstrings,
    docstrings_of,
    how_to_mend,
    installed,
    sentences_of,
)
from bertlab.course.tasks.examples import TaggedWords, near_duplicates

CHECKED_FILE = Path(__file__).parent.parent / "data" / "docstring_entities.json"

KINDS = ("parameter", "type", "default", "library")
TAGS = ("O", *(f"{letter}-{kind}" for kind in KINDS for letter in "BI"))

WORD = re.compile(r"\w+(?:[.\-]\w+)*|[^\w\s]")


def words_of(text: str) -> list[tuple[str, int, int]]:
    """The words and marks of a sentence, with their first and last characters.

    A dotted name, a number and a word with hyphens are one word; each other mark is one by itself.
    """
    return [(m.group(), m.start(), m.end()) for m in WORD.finditer(text)]


def tagged(text: str, entities: Iterable[tuple[int, int, str]]) -> TaggedWords:
    """The words of a sentence with the tags of its entities.

    Args:
        entities: `(start, end, kind)`, in characters.

    Raises:
        ValueError: a kind is not in `KINDS`, or an entity does not begin and end with a word.
    """
    words = words_of(text)
    tags = ["O"] * len(words)
    for start, end, kind in entities:
        inside = [i for i, (_, first, last) in enumerate(words) if start <= first and last <= end]
        fits = inside and words[inside[0]][1] == start and words[inside[-1]][2] == end
        if kind not in KINDS or not fits:
            raise ValueError(f"({start}, {end}, {kind!r}) is no entity of {text!r}")
        for i in inside:
            tags[i] = f"{'B' if i == inside[0] else 'I'}-{kind}"
    return TaggedWords(tuple(word for word, *_ in words), tuple(tags))


# The hand-checked sentences ----------------------------------------------------------------------


def checked_sentences(file: Path = CHECKED_FILE) -> list[TaggedWords]:
    """The sentences that were tagged by hand, in the file's order.

    Raises:
        RuntimeError: a sentence is not where it was, because the package has another version; the
            message says which, and how to get the version that has it.
    """
    return [
        tagged(located_text(row), [(start, end, kind) for start, end, kind in row["entities"]])
        for row in json.loads(file.read_text(encoding="utf-8"))
    ]


def located_text(row: dict[str, Any]) -> str:
    """The sentence at a place; see `checked_sentences`."""
    place = f"characters {row['start']} to {row['end']} of the docstring of {row['name']!r}"
    try:
        found = [d for d in docstrings_of(row["library"], row["file"]) if d.name == row["name"]]
        text = found[0].text[row["start"] : row["end"]] if found else ""
    except FileNotFoundError:
        text = ""
    if fingerprint(text) != row["sha256"]:
        raise RuntimeError(
            f"a hand-checked sentence is not where it was ({place} in {row['file']}): "
            f"{installed(row['library'])} is another version; {how_to_mend(row['library'])}"
        )
    return text


def fingerprint(text: str) -> str:
    """A hash of a sentence as it is written, 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def unlabelled_sentences(count: int, seed: int = 0) -> list[tuple[str, ...]]:
    """Real sentences without tags, as words; none is a near-duplicate of a hand-checked one.

    Raises:
        ValueError: there are not so many.
    """
    checked = [" ".join(words) for words, _ in checked_sentences()]
    found = dict.fromkeys(
        tuple(word for word, *_ in words_of(docstring.text[start:end]))
        for docstring in all_docstrings()
        for start, end in sentences_of(docstring.text)
    )
    drawn = random.Random(seed).sample(list(found), min(len(found), 2 * count))
    pairs = near_duplicates([*checked, *(" ".join(words) for words in drawn)])
    known = {j - len(checked) for i, j in pairs if i < len(checked) <= j}
    kept = [words for number, words in enumerate(drawn) if number not in known]
    if len(kept) < count:
        raise ValueError(f"count is {count}, but there are {len(kept)} sentences")
    return kept[:count]


# Sentences from templates ------------------------------------------------------------------------

VALUES = {
    "parameter": (
        *("axis", "dtype", "out", "keepdims", "copy", "order", "n_jobs", "random_state", "tol"),
        *("max_iter", "alpha", "x", "y", "X", "a", "b", "ax", "mode", "method", "shape", "size"),
        *("weights", "bias", "kernel_size", "stride", "padding", "input", "dim", "batch_size"),
        *("learning_rate", "cmap", "labels", "nodelist", "G", "weight", "fit_intercept", "verbose"),
        *("n_components", "eps", "reduction", "return_tensors", "max_length", "do_sample", "func"),
    ),
    "type": (
        *("int", "float", "bool", "str", "list", "tuple", "dict", "callable", "array_like"),
        *("array-like", "ndarray", "Tensor", "DataFrame", "np.ndarray", "torch.Tensor", "set"),
        *("numpy.ndarray", "pandas.DataFrame", "torch.float32", "float64", "bytes"),
    ),
    "default": (
        *("None", "True", "False", "0", "1", "2", "10", "100", "0.5", "1.0", "0.1", "1e-3"),
        *("1e-05", "- 1", "auto", "mean", "linear", "full", "same", "l2", "utf-8", "warn"),
        *("np.nan", "self.axis", "len ( x )", "2 * n", "( 0 , 1 )", "constant", "float32"),
    ),
    "library": (
        *("NumPy", "numpy", "SciPy", "scipy", "scikit-learn", "PyTorch", "torch", "Matplotlib"),
        *("pandas", "SymPy", "NetworkX", "transformers", "LAPACK", "BLAS", "joblib", "cuDNN"),
        *("TensorFlow", "Pillow", "Transformers", "LIBLINEAR", "JAX", "CuPy"),
    ),
}

TEMPLATES = (
    "The default is {default} .",
    "Default is ` {default} ` .",
    "Default : ' {default} ' .",
    "Defaults to ` ` {default} ` ` .",
    "Default is {default} , which means that all values are used .",
    "If ` {parameter} ` is not given , it defaults to {default} .",
    "If None , will default to ` {default} ` .",
    "The default value of ` {parameter} ` is ` {default} ` .",
    "By default , {parameter} = {default} is used for the result .",
    "{parameter} ( ` {type} ` , * optional * , defaults to {default} ) : The number of steps .",
    "{parameter} ( {type} , optional ) : the size of the window . Default : {default}",
    "{parameter} ( {type} ) : The values to be sorted .",
    "If ` {parameter} ` is None , the whole array is used .",
    "If * {parameter} * is True , return a copy instead .",
    "Ignored if ` ` {parameter} = False ` ` .",
    "Only used when ` {parameter} ` is set to ' full ' .",
    "When ` ` {parameter} ` ` is 0 , no elements are removed .",
    "Either ` {parameter} ` or ` {parameter} ` must be given , but not both .",
    "The {type} that was passed as * {parameter} * .",
    "Must have the same length as {parameter} .",
    "See ` {parameter} ` for what is allowed .",
    "Return a {type} of the values along the first axis .",
    "A {type} or a {type} with one value for each row .",
    "If {type} , the fraction of samples to draw .",
    "If a {type} is given , it is called with two arguments .",
    "` {parameter} ` can be a {type} , in which case it is used for all axes .",
    "` {type} ` : The mean of the squared errors .",
    "This returns a ` {type} ` instead of a view .",
    "The result is a {type} ( possibly empty ) .",
    "This is computed with {library} .",
    "Requires {library} to be installed .",
    "Convert the values to a {library} array .",
    "Convert the table to a {library} {type} .",
    "This function is faster in {library} than in {library} .",
    "It calls a routine of {library} , which is not thread safe .",
    "Since version 1.2 of {library} , the order is kept .",
    "The graph is drawn with {library} if it is available .",
    "Compute the mean of the values along the given axis .",
    "Whether to sort the values before they are returned .",
    "The number of rows and columns of the matrix .",
    "See the notes below for a discussion of the algorithm .",
    "Note that the result may differ from run to run .",
    "Returns True if the graph is connected , and False otherwise .",
    "For complex numbers the absolute value is used .",
    "An array of integers , or a sequence of strings .",
    "This is an alias of ` mean ` , and is kept for old code .",
    "Raised when the matrix is not square .",
)


def template_sentences(count: int, seed: int = 0) -> list[TaggedWords]:
    """Sentences made from templates, with their tags: `count` of them, each template as often.

    The values are drawn from `VALUES`. A slot stands for one entity; a default may have several
    words.
    """
    from bertlab.fine_tuning import fill_template  # given; its module imports torch

    rng = random.Random(seed)
    order: list[str] = []
    while len(order) < count:
        order += rng.sample(TEMPLATES, len(TEMPLATES))
    made = [fill_template(template, VALUES, rng) for template in order[:count]]
    return [TaggedWords(tuple(words), tuple(tags)) for words, tags in made]


# A baseline --------------------------------------------------------------------------------------


def known_words(sentences: Sequence[TaggedWords]) -> dict[str, str]:
    """For each word its most frequent tag, of the words that are not mostly `O`."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for words, tags in sentences:
        for word, tag in zip(words, tags, strict=True):
            counts[word][tag] += 1
    best = {word: tag.most_common(1)[0][0] for word, tag in counts.items()}
    return {word: tag for word, tag in best.items() if tag != "O"}


def word_list_baseline(
    train: Sequence[TaggedWords], sentences: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Tags by a list of words: each word gets the tag that it had most often in `train`.

    It knows the words, and nothing of the sentence.
    """
    known = known_words(train)
    return [[known.get(word, "O") for word in words] for words in sentences]
