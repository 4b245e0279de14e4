"""A corpus as numbers on disk, and the micro-batches that any number of processes make of it.

Text is tokenized once, into one long row of ids that is mapped into memory and never read as a
whole. Micro-batch number 7 is the same whoever makes it, so the processes of a run only have to
agree who takes which number: no text is read twice, a run that goes on needs to remember one
number, and it may go on with more or fewer processes.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK = 1000  # documents whose stretches are mixed with each other

# --- on disk ---


@dataclass(frozen=True)
class Shards:
    """A tokenized corpus.

    Attributes:
        ids: `[tokens]`, all texts end to end, without special tokens.
        stretches: `[stretches + 1]`, where in `ids` each stretch of text begins, and the end.
        documents: `[documents + 1]`, where in `stretches` each document begins, and the end.
    """

    ids: np.ndarray
    stretches: np.ndarray
    documents: np.ndarray

    def stretch(self, number: int) -> tuple[int, ...]:
        """The ids of one stretch of text."""
        start, end = self.stretches[number : number + 2].tolist()
        return tuple(self.ids[start:end].tolist())

    def document(self, number: int) -> list[tuple[int, ...]]:
        """The stretches of one document."""
        return [self.stretch(i) for i in range(*self.documents[number : number + 2].tolist())]


def write_shards(
    documents: Iterable[Sequence[str]], tokenizer: Any, folder: Path, longest: int, about: Any
) -> None:
    """Tokenize a corpus into a folder, which appears when it is complete.

    Args:
        documents: lists of paragraphs; read one after the other, never held.
        longest: the most tokens in a stretch. Paragraphs of one document are joined while they
            fit; one that is longer is cut.
        about: anything JSON can hold; `is_about` compares it.
    """
    kind = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        _write_arrays(documents, tokenizer, unfinished, longest, kind)
        description = {"about": about, "dtype": np.dtype(kind).name}
        (unfinished / "about.json").write_text(json.dumps(description), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_arrays(
    documents: Iterable[Sequence[str]], tokenizer: Any, folder: Path, longest: int, kind: Any
) -> None:
    tokens = stretches = 0
    with (
        open(folder / "ids", "wb") as ids_file,
        open(folder / "stretches", "wb") as stretch_file,
        open(folder / "documents", "wb") as document_file,
    ):
        for document in _encoded(documents, tokenizer):
            document_file.write(np.int64(stretches).tobytes())
            for stretch in _joined(document, longest):
                stretch_file.write(np.int64(tokens).tobytes())
                ids_file.write(np.array(stretch, dtype=kind).tobytes())
                tokens, stretches = tokens + len(stretch), stretches + 1
        stretch_file.write(np.int64(tokens).tobytes())
        document_file.write(np.int64(stretches).tobytes())


def _encoded(documents: Iterable[Sequence[str]], tokenizer: Any) -> Iterator[list[list[int]]]:
    """The ids of every paragraph, without special tokens; encoded many at a time, for speed."""
    waiting = iter(documents)
    while several := list(islice(waiting, 500)):
        rows = iter(tokenizer.encode_batch(list(chain.from_iterable(several))))
        for document in several:
            yield [next(rows)[1:-1] for _ in document]


def _joined(paragraphs: list[list[int]], longest: int) -> Iterator[list[int]]:
    """Stretches of at most `longest` ids."""
    current: list[int] = []
    for paragraph in paragraphs:
        if current and len(current) + len(paragraph) > longest:
            yield current
            current = []
        current = current + paragraph
        while len(current) > longest:
            yield current[:longest]
            current = current[longest:]
    if current:
        yield current


def is_about(folder: Path, about: Any) -> bool:
    """True if a folder holds a corpus that was written with the same `about`."""
    try:
        return json.loads((folder / "about.json").read_text(encoding="utf-8"))["about"] == about
    except (OSError, ValueError, KeyError, TypeError):
        return False


def open_shards(folder: Path) -> Shards:
    """A corpus that `write_shards` wrote."""
    dtype = json.loads((folder / "about.json").read_text(encoding="utf-8"))["dtype"]
    kinds = {"ids": dtype, "stretches": "int64", "documents": "int64"}
    return Shards(**{name: _mapped(folder / name, kind) for name, kind in kinds.items()})


def _mapped(file: Path, kind: str) -> np.ndarray:
    if file.stat().st_size == 0:  # cannot be mapped
        return np.zeros(0, dtype=kind)
    return np.memmap(file, dtype=kind, mode="r")


# --- micro-batches ---


class AlreadyIds:
    """What `sentence_pairs` asks of a tokenizer, for sentences that are tuples of ids already."""

    def __init__(self, tokenizer: Any) -> None:
        self.cls, self.sep = tokenizer.cls_token_id, tokenizer.sep_token_id

    def __call__(
        self, first: Any, second: Any, truncation: bool = True, max_length: int = 512
    ) -> dict[str, Any]:
        """Join pairs; they fit, because a stretch has at most half the room."""
        if isinstance(first, tuple):
            return {name: column[0] for name, column in self([first], [second]).items()}
        pairs = list(zip(first, second, strict=True))
        return {
            "input_ids": [[self.cls, *a, self.sep, *b, self.sep] for a, b in pairs],
            "token_type_ids": [[0] * (len(a) + 2) + [1] * (len(b) + 1) for a, b in pairs],
            "attention_mask": [[1] * (len(a) + len(b) + 3) for a, b in pairs],
        }


class Batches:
    """Micro-batches without end, masked, of which each process takes its own.

    Of the micro-batches numbered 0, 1, 2, ..., process r of n takes r, r + n, r + 2n, ... Where one
    round of the documents ends and the next begins, the texts that do not fill a micro-batch are
    left out of that round; every round has another order, other pairs and other masks.

    Attributes:
        read: how many micro-batches all processes have taken.
        tokens: how many tokens this process has taken.

    Args:
        shards: the corpus.
        documents: the numbers of the documents to read.
        tokenizer: the one it was made with.
        size: texts (or pairs of texts) in a micro-batch.
        next_sentence: make pairs of neighboring stretches, half of them wrong, by `sentence_pairs`;
            without it each stretch is a text.
        whole_word: as in `mask_tokens`.
        seed: of the order, the pairs and the masks.
        rank, processes: which process this is, and how many there are.

    Raises:
        ValueError: there are not enough texts for one micro-batch.
    """

    def __init__(
        self,
        shards: Shards,
        documents: np.ndarray,
        tokenizer: Any,
        size: int,
        next_sentence: bool,
        whole_word: bool = False,
        seed: int = 0,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        self.shards, self.tokenizer, self.size, self.seed = shards, tokenizer, size, seed
        self.next_sentence, self.whole_word = next_sentence, whole_word
        self.rank, self.processes = rank, processes
        self.read = self.tokens = 0
        stretches = np.diff(shards.documents)[documents]
        examples = np.maximum(stretches - 1, 0) if next_sentence else stretches
        self.documents, self.examples = documents[stretches > 0], examples[stretches > 0]
        self.in_a_round = int(self.examples.sum()) // size
        if self.in_a_round == 0:
            kind = "pairs of neighboring stretches" if next_sentence else "stretches of text"
            raise ValueError(
                f"{len(documents)} documents have {self.examples.sum()} {kind}, which do not fill "
                f"one micro-batch of {size}"
            )
        self.order = lru_cache(maxsize=1)(self._order)
        self.rows_of_block = lru_cache(maxsize=2)(self._rows_of_block)

    def state_dict(self) -> dict[str, int]:
        """What a run has to remember: the same in every process."""
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there, whatever the number of processes."""
        self.read = state["read"]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            batch = self.micro_batch(self.read + self.rank)
            self.read += self.processes
            self.tokens += int(batch["attention_mask"].sum())
            yield batch

    def micro_batch(self, number: int) -> dict[str, Tensor]:
        """One micro-batch: `input_ids`, `token_type_ids`, `attention_mask`, `labels`, and
        `next_sentence_label` where there are pairs."""
        from bertlab.pretraining import mask_tokens

        turn, place = divmod(number, self.in_a_round)
        rows = self._rows(turn, place * self.size, (place + 1) * self.size)
        fill = {"input_ids": self.tokenizer.pad_token_id, "token_type_ids": 0, "attention_mask": 0}
        longest = max(len(row["input_ids"]) for row in rows)
        batch = {
            name: torch.tensor([row[name] + [x] * (longest - len(row[name])) for row in rows])
            for name, x in fill.items()
        }
        generator = torch.Generator().manual_seed(self._seed("masks", number))
        batch["input_ids"], batch["labels"] = mask_tokens(
            batch["input_ids"],
            self.tokenizer,
            generator=generator,
            whole_word=self.whole_word,
        )
        if self.next_sentence:
            batch["next_sentence_label"] = torch.tensor([r["next_sentence_label"] for r in rows])
        return batch

    def _rows(self, turn: int, start: int, stop: int) -> list[dict[str, Any]]:
        """Texts `start` to `stop` of a round; they may lie in several blocks."""
        _, ends = self.order(turn)
        rows: list[dict[str, Any]] = []
        while start < stop:
            block = int(np.searchsorted(ends, start, side="right"))
            begin = int(ends[block - 1]) if block else 0
            rows += self.rows_of_block(turn, block)[start - begin : stop - begin]
            start = min(stop, int(ends[block]))
        return rows

    def _order(self, turn: int) -> tuple[list[np.ndarray], np.ndarray]:
        """The documents of a round, block by block, and how many texts there are up to each end."""
        order = np.random.default_rng(self._seed("order", turn)).permutation(len(self.documents))
        blocks = np.array_split(order, max(1, len(order) // BLOCK))
        return blocks, np.cumsum([int(self.examples[block].sum()) for block in blocks])

    def _rows_of_block(self, turn: int, block: int) -> list[dict[str, Any]]:
        from bertlab.pretraining import sentence_pairs

        chosen = self.documents[self.order(turn)[0][block]]
        documents = [self.shards.document(number) for number in chosen.tolist()]
        rng = random.Random(self._seed("pairs", turn, block))
        if self.next_sentence:
            rows = sentence_pairs(documents, AlreadyIds(self.tokenizer), 2**30, rng)  # type: ignore[arg-type]  # ids for text
        else:
            rows = [self._alone(stretch) for document in documents for stretch in document]
        rng.shuffle(rows)
        return rows

    def _alone(self, ids: tuple[int, ...]) -> dict[str, Any]:
        full = [self.tokenizer.cls_token_id, *ids, self.tokenizer.sep_token_id]
        return {
            "input_ids": full,
            "token_type_ids": [0] * len(full),
            "attention_mask": [1] * len(full),
        }

    def _seed(self, *what: Any) -> int:
        digest = hashlib.sha256(repr((self.seed, *what)).encode()).digest()
        return int.from_bytes(digest[:7], "big")
