"""Docstrings with their places: which file, which object, which characters.

A place is all that the repository holds of the hand-checked sentences: their text stays in the
packages. A few files of each library are read, with `ast`, in a fixed order; nothing is imported.
"""

import ast
import importlib.metadata
import importlib.util
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from bertlab.course.corpus import LIBRARIES

#: The files that are read of each library, below its folder.
FILES = {
    "matplotlib": ("axes/_axes.py", "figure.py", "patches.py", "ticker.py", "colors.py"),
    "networkx": (
        "generators/random_graphs.py",
        "drawing/nx_pylab.py",
        "algorithms/link_analysis/pagerank_alg.py",
        "algorithms/shortest_paths/weighted.py",
        "algorithms/centrality/betweenness.py",
        "algorithms/community/louvain.py",
        "convert_matrix.py",
    ),
    "numpy": (
        "_core/fromnumeric.py",
        "_core/numeric.py",
        "lib/_function_base_impl.py",
        "lib/_npyio_impl.py",
        "lib/_nanfunctions_impl.py",
        "linalg/_linalg.py",
        "lib/_arraypad_impl.py",
    ),
    "scipy": (
        "stats/_stats_py.py",
        "signal/_signaltools.py",
        "signal/_spectral_py.py",
        "optimize/_optimize.py",
        "linalg/_decomp.py",
        "interpolate/_interpolate.py",
    ),
    "sklearn": (
        "linear_model/_logistic.py",
        "linear_model/_coordinate_descent.py",
        "ensemble/_forest.py",
        "cluster/_kmeans.py",
        "preprocessing/_data.py",
        "decomposition/_pca.py",
        "feature_extraction/text.py",
    ),
    "sympy": ("solvers/solvers.py", "simplify/simplify.py", "integrals/integrals.py"),
    "torch": (
        "functional.py",
        "nn/modules/conv.py",
        "nn/modules/loss.py",
        "nn/functional.py",
        "nn/modules/rnn.py",
        "optim/adamw.py",
        "utils/data/dataloader.py",
    ),
    "transformers": (
        "tokenization_utils_base.py",
        "trainer.py",
        "training_args.py",
        "models/bert/configuration_bert.py",
        "generation/configuration_utils.py",
        "pipelines/text_classification.py",
        "data/data_collator.py",
    ),
}

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Docstring(NamedTuple):
    """A docstring as it is written, and where.

    Attributes:
        library: a key of `FILES`.
        file: the file below the library's folder, with forward slashes.
        name: of the object, such as "LogisticRegression.fit"; empty for the module. The second of
            the same name in a file is "fit#2".
        text: indentation and line ends included.
        arguments: the names of the arguments of the function, or of the class's `__init__`.
    """

    library: str
    file: str
    name: str
    text: str
    arguments: tuple[str, ...]


@lru_cache(maxsize=64)
def docstrings_of(library: str, file: str) -> tuple[Docstring, ...]:
    """The docstrings of one file, in the order of its lines.

    Raises:
        ValueError: `library` is not one of `FILES`.
        RuntimeError: the library is not installed.
        FileNotFoundError: it has no such file.
    """
    path = library_folder(library) / file
    if not path.is_file():
        raise FileNotFoundError(f"{installed(library)} has no file {file}; {how_to_mend(library)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in other people's strings
        tree = ast.parse(path.read_bytes())
    seen: Counter[str] = Counter()
    found = []
    for name, node in documented(tree):
        seen[name] += 1
        name = name if seen[name] == 1 else f"{name}#{seen[name]}"
        text = ast.get_docstring(node, clean=False)
        if text:
            found.append(Docstring(library, file, name, text, arguments_of(node)))
    return tuple(found)


def all_docstrings(libraries: Iterable[str] = tuple(FILES)) -> Iterator[Docstring]:
    """The docstrings of all `FILES` of some libraries, in a fixed order."""
    for library in libraries:
        for file in FILES.get(library, ("",)):
            yield from docstrings_of(library, file)


def documented(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Documented]]:
    """A module and all classes and functions in it, with their names."""
    if isinstance(node, ast.Module):
        yield "", node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{child.name}"
            yield name, child
            yield from documented(child, f"{name}.")
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from documented(child, prefix)


def arguments_of(node: Documented) -> tuple[str, ...]:
    """The names of a function's arguments, or of those of a class's `__init__`."""
    if isinstance(node, ast.ClassDef):
        inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        return arguments_of(inits[0]) if inits else fields_of(node)
    if isinstance(node, ast.Module):
        return ()
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    given += [x for x in (node.args.vararg, node.args.kwarg) if x is not None]
    return tuple(x.arg for x in given if x.arg not in ("self", "cls"))


def fields_of(node: ast.ClassDef) -> tuple[str, ...]:
    """The annotated names of a class's body, which a dataclass takes as arguments."""
    targets = [n.target for n in node.body if isinstance(n, ast.AnnAssign)]
    return tuple(target.id for target in targets if isinstance(target, ast.Name))


def library_folder(library: str) -> Path:
    """Where a library's files are."""
    if library not in FILES:
        raise ValueError(f"library is {library!r}, but must be one of {', '.join(FILES)}")
    spec = importlib.util.find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"library is {library!r}, which is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def installed(library: str) -> str:
    """A library's name and the version that is installed."""
    return f"{LIBRARIES[library]} {importlib.metadata.version(LIBRARIES[library])}"


def how_to_mend(library: str) -> str:
    """What to do when a file is not the one that is expected."""
    return (
        f"the course was made with the versions in constraints.txt: pip install -c constraints.txt "
        f"{LIBRARIES[library]}"
    )


# Sentences --------------------------------------------------------------------------------------

SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!etc)(?<!cf)(?<!vs)[.!?](?=\s+[A-Z`*]|\s*$)")
NOT_PROSE = re.compile(r"(>>>|\.\. |:|-{3}|={3}|\*{3}|[-*+|\\#] |\d+[.)] )")
ENTRY = re.compile(r"[`*]{0,2}\w+[`*]{0,2} \(.*\)\s*:")  # "dim (int, optional): ..."
FEWEST_WORDS, MOST_WORDS = 6, 40


def sentences_of(text: str) -> Iterator[tuple[int, int]]:
    """Where the sentences of a docstring stand: `(start, end)`, in characters.

    A sentence is of prose: it begins with a capital letter, a back quote or a parameter's entry,
    ends with a mark, has 6 to 40 words, most of them plain, and stands in lines that are indented
    alike. So headings, formulas, tables and examples are left out.
    """
    for start, end in blocks_of(text):
        first = start
        for mark in SENTENCE_END.finditer(text, start, end):
            if is_sentence(text[first : mark.end()]):
                yield first, mark.end()
            rest = re.compile(r"\s*").match(text, mark.end())
            first = rest.end() if rest else mark.end()


def blocks_of(text: str) -> Iterator[tuple[int, int]]:
    """Runs of lines that are indented alike, none of them blank: `(start, end)`, in characters.

    A parameter's entry begins a block. One with a line that is no prose is left out.
    """
    block: list[tuple[int, int]] = []  # where its lines begin, without indentation, and end
    depth_of_block, place, is_prose = 0, 0, True
    for line in [*text.splitlines(keepends=True), ""]:
        content = line.strip()
        depth = len(line) - len(line.lstrip())
        if block and (not content or depth != depth_of_block or ENTRY.match(content)):
            if is_prose:
                yield block[0][0], block[-1][1]
            block, is_prose = [], True
        if content:
            block.append((place + depth, place + len(line.rstrip())))
            depth_of_block = depth
            is_prose = is_prose and NOT_PROSE.match(content) is None
        place += len(line)


def is_sentence(text: str) -> bool:
    """Say whether a text is a sentence of prose; see `sentences_of`."""
    words = text.split()
    plain = sum(word.strip(".,;:()`'\"*").isalpha() for word in words)
    begins = text[:1].isupper() or text[:1] == "`" or re.match(r"[a-z_]\w* \(", text) is not None
    is_long = FEWEST_WORDS <= len(words) <= MOST_WORDS
    return begins and is_long and plain >= 0.6 * len(words) and text.isascii()
