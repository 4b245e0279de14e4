"""Chapter 6: hidden words, pairs of sentences, the optimizer, the training loop.

Where a part draws at random, laws and shares are judged instead of numbers. A share is right if
an exact binomial test does not refuse it at the level `ALARM`; an exercise judges at most 60
shares, so a right part is refused by chance in less than 1 check of 1,000,000. There are so many
draws that a share that is off by 5% is refused, too.
"""

import gc
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertlab.course.exercise import Case, Exercise, Misconception
from bertlab.course.exercises.support import error_of, integers, normal, padding_mask

# --- shared by the exercises ---

ALARM = 1e-8


def as_asked(count: Any, of: Any, share: float) -> str:
    """Say whether a count of independent draws fits a share, by an exact binomial test."""
    from scipy.special import bdtr, bdtrc

    count, of = int(count), int(of)
    if count > 0 and bdtrc(count - 1, of, share) < ALARM / 2:
        return "too many"
    return "too few" if bdtr(count, of, share) < ALARM / 2 else "as asked"


SPECIAL = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")


class Pieces:
    """A tokenizer as far as this chapter needs one: words are separated by spaces, and known."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces
        self.ids = {piece: i for i, piece in enumerate(pieces)}
        self.all_special_tokens = list(SPECIAL)
        self.all_special_ids = [self.ids[token] for token in SPECIAL]
        self.unk_token, self.sep_token, self.pad_token, self.cls_token, self.mask_token = SPECIAL
        self.unk_token_id, self.sep_token_id, self.pad_token_id = self.all_special_ids[:3]
        self.cls_token_id, self.mask_token_id = self.all_special_ids[3:]
        self.model_max_length = None
        self.is_fast = False

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return self.pieces[ids] if isinstance(ids, int) else [self.pieces[int(i)] for i in ids]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self.ids[tokens] if isinstance(tokens, str) else [self.ids[t] for t in tokens]

    def get_special_tokens_mask(self, ids: Any, already_has_special_tokens: bool = True) -> Any:
        return [int(int(i) in self.all_special_ids) for i in ids]

    def tokenize(self, text: str) -> list[str]:
        return text.split()

    def encode(self, text: str, pair: str | None = None) -> list[int]:
        return self.joined(*(self.convert_tokens_to_ids(t.split()) for t in (text, pair) if t))

    def joined(self, *texts: list[int]) -> list[int]:
        ids = [self.cls_token_id]
        for text in texts:
            ids += [*text, self.sep_token_id]
        return ids

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def __call__(
        self,
        text: Any,
        pair: Any = None,
        padding: Any = False,
        truncation: Any = None,
        max_length: int | None = None,
        text_pair: Any = None,
    ) -> dict[str, Any]:
        pair = text_pair if pair is None else pair
        single = isinstance(text, str)
        texts = [text] if single else text
        pairs = [pair] if pair is None or isinstance(pair, str) else pair
        pairs = pairs if len(pairs) == len(texts) else [None] * len(texts)
        rows = [self.row(*both, max_length) for both in zip(texts, pairs, strict=True)]
        columns = dict(zip(("input_ids", "token_type_ids"), zip(*rows, strict=True), strict=True))
        batch = {name: list(column) for name, column in columns.items()}
        batch["attention_mask"] = [[1] * len(ids) for ids in batch["input_ids"]]
        return {name: column[0] for name, column in batch.items()} if single else batch

    def words(self, text: str) -> list[int]:
        return [self.ids[text]] if text in self.ids else [self.ids[word] for word in text.split()]

    def row(self, text: str, pair: str | None, most: int | None) -> tuple[list[int], list[int]]:
        first = self.words(text)
        if pair is None:
            del first[10**9 if most is None else most - 2 :]
            return self.joined(first), [0] * (len(first) + 2)
        second = self.words(pair)
        while most is not None and len(first) + len(second) > most - 3:
            (first if len(first) > len(second) else second).pop()
        types = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        return [self.cls_token_id, *first, self.sep_token_id, *second, self.sep_token_id], types


def vocabulary(rng: np.random.Generator, words: int, continuations: int = 0) -> list[str]:
    """Return pieces in a random order, the special ones among them."""
    pieces = [f"w{i}" for i in range(words)] + [f"##c{i}" for i in range(continuations)]
    pieces += SPECIAL
    return [pieces[i] for i in rng.permutation(len(pieces))]


def instead_of(name: str) -> Callable[[Any], dict[str, Any]]:
    """Return what makes the parts of a misconception: something wrong by the name of a part."""
    return lambda wrong: {name: wrong}


_masks, _pairs = instead_of("mask_tokens"), instead_of("sentence_pairs")


# --- 6.1: mask tokens ---


class Masking:
    """`DataCollatorForLanguageModeling`, called as exercise 6.1 asks."""

    def __call__(
        self,
        input_ids: Tensor,
        tokenizer: Any,
        probability: float = 0.15,
        generator: torch.Generator | None = None,
        whole_word: bool = False,
    ) -> tuple[Tensor, Tensor]:
        here, ids = input_ids.device, input_ids.cpu()
        source = self.source(generator)
        spared = torch.isin(ids, torch.tensor(self.spared_ids(tokenizer)))
        if whole_word:
            words = self.words(ids, tokenizer)
            draws = torch.rand(ids.shape, generator=source)
            spared = spared | ~self.drawn_words(draws, words, probability)
            probability = 1.0
        inputs, labels = self.collated(ids, tokenizer, probability, source, spared)
        return inputs.to(here), labels.to(here)

    def source(self, generator: torch.Generator | None) -> torch.Generator | None:
        if generator is None or generator.device.type == "cpu":
            return generator
        seed = torch.randint(2**62, (1,), generator=generator, device=generator.device)
        return torch.Generator().manual_seed(int(seed))

    def spared_ids(self, tokenizer: Any) -> list[int]:
        return list(tokenizer.all_special_ids)

    def words(self, ids: Tensor, tokenizer: Any) -> Tensor:
        pieces = tokenizer.convert_ids_to_tokens(list(range(tokenizer.vocab_size)))
        begins = torch.tensor([not piece.startswith("##") for piece in pieces])[ids]
        return (begins.cumsum(dim=-1) - 1).clamp(min=0)

    def drawn_words(self, draws: Tensor, words: Tensor, probability: float) -> Tensor:
        return draws.gather(-1, words) < probability  # the n-th draw is that of the n-th word

    def collated(
        self, ids: Tensor, tokenizer: Any, probability: float, source: Any, spared: Tensor
    ) -> tuple[Tensor, Tensor]:
        return collate(ids, tokenizer, probability, source, spared)


def collate(
    ids: Tensor,
    tokenizer: Any,
    probability: float,
    source: torch.Generator | None,
    spared: Tensor,
    **split: Any,
) -> tuple[Tensor, Tensor]:
    """Mask by Transformers' collator."""
    from transformers.data.data_collator import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability, **split)
    collator.generator = source
    return collator.torch_mask_tokens(ids.clone(), spared)


class _NothingSpared(Masking):
    def spared_ids(self, tokenizer: Any) -> list[int]:
        return [-1]


class _UnknownChosen(Masking):
    def spared_ids(self, tokenizer: Any) -> list[int]:
        return [i for i in tokenizer.all_special_ids if i != tokenizer.unk_token_id]


class _Split(Masking):
    def __init__(self, **split: float) -> None:
        self.split = split

    def collated(
        self, ids: Tensor, tokenizer: Any, probability: float, source: Any, spared: Tensor
    ) -> tuple[Tensor, Tensor]:
        return collate(ids, tokenizer, probability, source, spared, **self.split)


class _Afterwards(Masking):
    """The collator's result, changed."""

    def __init__(self, change: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.change = change

    def collated(
        self, ids: Tensor, tokenizer: Any, probability: float, source: Any, spared: Tensor
    ) -> tuple[Tensor, Tensor]:
        found = collate(ids, tokenizer, probability, source, spared)
        return self.change(ids, tokenizer, *found)


def _random_again(ids: Tensor, tokenizer: Any, inputs: Tensor, labels: Tensor):
    again = (labels != -100) & (torch.rand(ids.shape) < 0.5)
    return torch.where(again, torch.randint(len(tokenizer), ids.shape), inputs), labels


def _labels_everywhere(ids: Tensor, tokenizer: Any, inputs: Tensor, labels: Tensor):
    return inputs, ids.clone()


def _labels_of_the_inputs(ids: Tensor, tokenizer: Any, inputs: Tensor, labels: Tensor):
    return inputs, torch.where(labels != -100, inputs, -100)


def _labels_zero(ids: Tensor, tokenizer: Any, inputs: Tensor, labels: Tensor):
    return inputs, labels.clamp(min=0)


def _without_special(ids: Tensor, tokenizer: Any, inputs: Tensor, labels: Tensor):
    known = torch.tensor(tokenizer.all_special_ids)
    others = torch.tensor(sorted(set(range(len(tokenizer))) - set(known.tolist())))
    changed = torch.isin(inputs, known) & (labels != -100) & (inputs != tokenizer.mask_token_id)
    return torch.where(changed, others[torch.randint(len(others), ids.shape)], inputs), labels


class _OneDraw(Masking):
    def collated(
        self, ids: Tensor, tokenizer: Any, probability: float, source: Any, spared: Tensor
    ) -> tuple[Tensor, Tensor]:
        draw = torch.rand(ids.shape, generator=source)
        chosen = (draw < probability) & ~spared
        words = torch.randint(len(tokenizer), ids.shape, generator=source)
        inputs = ids.masked_fill(chosen & (draw < 0.8), tokenizer.mask_token_id)
        inputs = torch.where(chosen & (draw > 0.9), words, inputs)
        return inputs, ids.masked_fill(~chosen, -100)


class _InPlace(Masking):
    def __call__(self, input_ids: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        inputs, labels = super().__call__(input_ids, *args, **options)
        return input_ids.copy_(inputs), labels


class _SamePlaces(Masking):
    def collated(
        self, ids: Tensor, tokenizer: Any, probability: float, source: Any, spared: Tensor
    ) -> tuple[Tensor, Tensor]:
        unwanted = torch.rand(ids.shape[-1:], generator=source) >= probability
        return collate(ids, tokenizer, 1.0, source, spared | unwanted)


class _SoManyInEachText(Masking):
    def collated(
        self, ids: Tensor, tokenizer: Any, probability: float, source: Any, spared: Tensor
    ) -> tuple[Tensor, Tensor]:
        draws = torch.rand(ids.shape, generator=source).masked_fill(spared, 2.0)
        wanted = ((~spared).sum(dim=-1, keepdim=True) * probability).round()
        chosen = draws.argsort(dim=-1).argsort(dim=-1) < wanted
        return collate(ids, tokenizer, 1.0, source, spared | ~chosen)


class _GlobalGenerator(Masking):
    def source(self, generator: torch.Generator | None) -> None:
        return None


class _FixedSeed(Masking):
    def source(self, generator: torch.Generator | None) -> torch.Generator:
        return generator or torch.Generator().manual_seed(0)


class _WordsIgnored(Masking):
    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return super().__call__(*args, **{**options, "whole_word": False})


class _AnyPiece(Masking):
    def drawn_words(self, draws: Tensor, words: Tensor, probability: float) -> Tensor:
        hit = torch.zeros_like(words).scatter_reduce(
            -1, words, (draws < probability).long(), reduce="amax"
        )
        return hit.gather(-1, words).bool()


class _FirstPieces(Masking):
    def drawn_words(self, draws: Tensor, words: Tensor, probability: float) -> Tensor:
        first = torch.ones_like(words).bool()
        first[..., 1:] = words[..., 1:] != words[..., :-1]
        return super().drawn_words(draws, words, probability) & first


class _OneFate(Masking):
    def __call__(self, input_ids: Tensor, tokenizer: Any, *args: Any, **options: Any) -> Any:
        inputs, labels = super().__call__(input_ids, tokenizer, *args, **options)
        if not options.get("whole_word"):
            return inputs, labels
        words = self.words(input_ids, tokenizer)
        first = torch.ones_like(words).bool()
        first[..., 1:] = words[..., 1:] != words[..., :-1]
        places = torch.arange(words.shape[-1]).expand_as(words)
        begin = places.masked_fill(~first, 0).cummax(dim=-1).values
        masked = (inputs == tokenizer.mask_token_id).gather(-1, begin) & (labels != -100)
        others = torch.where(inputs == tokenizer.mask_token_id, input_ids, inputs)
        return torch.where(masked, tokenizer.mask_token_id, others), labels


def _texts(
    rng: np.random.Generator, pieces: list[str], texts: int, seq: int, specials: int
) -> tuple[Tensor, Tensor]:
    """Return ids `[texts, seq]`, with so many special tokens in each, and the words' numbers.

    A word is a piece without `##` and the pieces with `##` after it; -1 stands at special tokens.
    """
    marked = np.array([piece.startswith("##") for piece in pieces])
    special = np.isin(pieces, SPECIAL)
    words, ends = np.flatnonzero(~marked & ~special), np.flatnonzero(marked)
    is_special = rng.permuted(np.tile(np.arange(seq) < specials, (texts, 1)), axis=1)
    follows = np.zeros_like(is_special)
    follows[:, 1:] = ~is_special[:, 1:] & ~is_special[:, :-1]
    follows &= rng.random(follows.shape) < (0.4 if len(ends) else 0)
    ids = rng.choice(ends if len(ends) else words, follows.shape)
    ids = np.where(~follows & ~is_special, rng.choice(words, follows.shape), ids)
    ids = np.where(is_special, rng.choice(np.flatnonzero(special), follows.shape), ids)
    numbers = np.where(is_special, -1, np.cumsum(~follows, axis=1))
    return torch.from_numpy(ids), torch.from_numpy(numbers)


def _masking_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, texts: int, seq: int, specials: int, ends: int, **more: Any) -> Case:
        pieces = vocabulary(rng, 60 - ends, ends)
        ids, words = _texts(rng, pieces, texts, seq, specials)
        inputs = {"pieces": pieces, "input_ids": ids, "words": words, **more}
        return Case(name, {**inputs, "seed": int(rng.integers(2**31))})

    yield case("two generators with the same seed, and none", 6, 40, 5, 10, repeat=True)
    yield case("nothing but special tokens", 3, 8, 8, 0)
    yield case("many tokens, 15% of them", 1500, 150, 22, 0)
    yield case("many tokens, all of them", 1800, 180, 20, 0, probability=1.0)
    yield case("whole words", 900, 120, 12, 20, whole_word=True)


SHAPES, FEW_TEXTS = "shape and type of both", 200


def _masking_probe(
    part: Any,
    pieces: list[str],
    input_ids: Tensor,
    words: Tensor,
    seed: int,
    probability: float = 0.15,
    whole_word: bool = False,
    repeat: bool = False,
) -> dict[str, Any]:
    tokenizer, device = Pieces(pieces), input_ids.device

    def masked(draws: int | None, **options: Any) -> tuple[Tensor, Tensor]:
        generator = None
        if draws is not None:
            generator = torch.Generator(device=device).manual_seed(draws)
        return part.mask_tokens(input_ids, tokenizer, generator=generator, **options)

    if repeat:
        return _repeated(masked, seed)
    if len(input_ids) > FEW_TEXTS:  # what is plainly wrong is found out in a few texts
        texts = input_ids[:FEW_TEXTS], words[:FEW_TEXTS]
        few = _masking_probe(part, pieces, *texts, seed, probability, whole_word)
        if not all(few[law] in (0, "as asked", "some", True) for law in few if law != SHAPES):
            return few
    options: dict[str, Any] = {"whole_word": True} if whole_word else {}
    if probability != 0.15:
        options["probability"] = probability
    inputs, labels = masked(seed, **options)
    found = {
        SHAPES: [[list(x.shape), str(x.dtype)] for x in (inputs, labels)],
        **_laws_of_masking(tokenizer, input_ids, inputs, labels),
    }
    chosen = labels != -100
    if whole_word:
        return found | _of_words(tokenizer, words, chosen, inputs, probability)
    return found | _of_tokens(tokenizer, input_ids, words, chosen, inputs, probability)


def _repeated(masked: Callable[..., Any], seed: int) -> dict[str, bool]:
    def same(one: Any, other: Any) -> bool:
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    first = masked(seed), masked(seed, whole_word=True)
    torch.rand(3)  # the global generator goes on
    again = masked(seed), masked(seed, whole_word=True)
    return {
        "with the same seed, the same": same(first[0], again[0]),
        "with the same seed, the same whole words": same(first[1], again[1]),
        "with another seed, another": not same(first[0], masked(seed + 1)),
        "without a generator, always another": not same(masked(None), masked(None)),
    }


def _laws_of_masking(
    tokenizer: Pieces, ids: Tensor, inputs: Tensor, labels: Tensor
) -> dict[str, Any]:
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids, device=ids.device))
    chosen = labels != -100
    return {
        "special tokens that are chosen": int((chosen & special).sum()),
        "labels that are not the id that was there": int((chosen & (labels != ids)).sum()),
        "tokens changed that were not chosen": int((~chosen & (inputs != ids)).sum()),
    }


def _of_tokens(
    tokenizer: Pieces,
    ids: Tensor,
    words: Tensor,
    chosen: Tensor,
    inputs: Tensor,
    probability: float,
) -> dict[str, Any]:
    """The shares, where every token is for itself; an id drawn at random may be any, by chance."""
    allowed, size = words >= 0, tokenizer.vocab_size
    if not allowed.any():
        return {}
    masked = chosen & (inputs == tokenizer.mask_token_id)
    kept = chosen & (inputs == ids)
    other = chosen & ~masked & ~kept
    special = torch.tensor(tokenizer.all_special_ids, device=ids.device)
    many, of_a_text = int(chosen.sum()), chosen.sum(dim=-1)
    found: dict[str, Any] = {
        "chosen": as_asked(many, allowed.sum(), probability),
        "of these, now [MASK]": as_asked(masked.sum(), many, 0.8 + 0.1 / size),
        "of these, another piece": as_asked(other.sum(), many, 0.1 * (1 - 2 / size)),
        "of these, as they were": as_asked(kept.sum(), many, 0.1 + 0.1 / size),
        "special ones of the other pieces": as_asked(
            (other & torch.isin(inputs, special)).sum(), other.sum(), 4 / (size - 2)
        ),
        "the first half of the vocabulary among the other pieces": _first_half(
            special, ids, inputs, other, size
        ),
    }
    if probability < 1:
        in_a_column = chosen.sum(dim=0)  # of the same places in all texts: all, or none
        mixed = (in_a_column > 0) & (in_a_column < allowed.sum(dim=0))
        found["every text has its own places"] = bool(mixed.any())
        found["texts with just the mean number of chosen tokens"] = _at_the_mean(
            of_a_text, int(allowed[0].sum()), probability
        )
    return found


def _first_half(special: Tensor, ids: Tensor, inputs: Tensor, other: Tensor, size: int) -> str:
    """Among pieces put at random where an id of the second half stood."""
    half = size // 2
    there = other & (ids >= half)
    mask = int(special[-1])
    possible = half - (mask < half), size - 2  # neither the mask nor the id that was there
    return as_asked((there & (inputs < half)).sum(), there.sum(), possible[0] / possible[1])


def _at_the_mean(counts: Tensor, tokens: int, probability: float) -> str:
    from scipy.special import bdtr

    mean = round(tokens * probability)
    likely = float(bdtr(mean, tokens, probability) - bdtr(mean - 1, tokens, probability))
    return as_asked((counts == mean).sum(), len(counts), likely)


def _of_words(
    tokenizer: Pieces, words: Tensor, chosen: Tensor, inputs: Tensor, probability: float
) -> dict[str, Any]:
    """The shares, where words are chosen."""
    row = torch.arange(len(words), device=words.device)[:, None] * (words.shape[1] + 2)
    number = (words + row)[words >= 0]
    sizes, hits, masks = (
        torch.zeros(int(number.max()) + 1, dtype=torch.long, device=words.device).index_add(
            0, number, counted[words >= 0].long()
        )
        for counted in (torch.ones_like(chosen), chosen, inputs == tokenizer.mask_token_id)
    )
    whole, two = (sizes > 0) & (hits == sizes), sizes == 2
    both = 0.8 + 0.1 / tokenizer.vocab_size
    return {
        "words of which a part is chosen": int(((hits > 0) & (hits < sizes)).sum()),
        "words chosen": as_asked(whole.sum(), (sizes > 0).sum(), probability),
        "pieces chosen": "some" if hits.sum() else "none",
        "chosen words of two pieces that are [MASK] [MASK]": as_asked(
            (whole & two & (masks == 2)).sum(), (whole & two).sum(), both**2
        ),
    }


MASK = Exercise(
    id="6.1",
    reference={"mask_tokens": Masking()},
    reference_name="transformers DataCollatorForLanguageModeling",
    cases=_masking_cases,
    probe=_masking_probe,
    misconceptions=(
        Misconception(
            "special tokens are chosen like words",
            "[CLS] and [SEP] stand in every text at the same places: guessing them teaches "
            "nothing, and a hidden [PAD] teaches the model to say [PAD]. Leave out every id in "
            "`tokenizer.all_special_ids`; `torch.isin` finds them.",
            _masks(_NothingSpared()),
        ),
        Misconception(
            "[UNK] is chosen",
            "Where [UNK] stands, nobody knows what stood there, and a model that learns to say "
            "[UNK] has learned to say nothing. It is one of `tokenizer.all_special_ids`.",
            _masks(_UnknownChosen()),
        ),
        Misconception(
            "every chosen token becomes [MASK]",
            "Nobody writes [MASK] when the model is fine-tuned later. So that it does not learn to "
            "look at that token alone, 10% of the chosen tokens become another piece and 10% stay.",
            _masks(_Split(mask_replace_prob=1.0, random_replace_prob=0.0)),
        ),
        Misconception(
            "one draw decides whether a token is chosen and what it becomes",
            "A draw that is below 0.15 is below 0.8 as well, so every chosen token becomes [MASK]. "
            "What a chosen token becomes needs a draw of its own.",
            _masks(_OneDraw()),
        ),
        Misconception(
            "a tenth of those that did not become [MASK] is replaced",
            "That is 2% of the chosen tokens. 20% are left, and half of these become another "
            "piece: 10% of all chosen ones.",
            _masks(_Split(random_replace_prob=0.02)),
        ),
        Misconception(
            "half of all chosen tokens are replaced, [MASK] or not",
            "The second draw (one half) is meant for the 20% that did not become [MASK]. Here it "
            "overwrites masks too, and 40% of the chosen tokens are left as [MASK].",
            _masks(_Afterwards(_random_again)),
        ),
        Misconception(
            "labels stand at every place",
            "The loss then asks for all tokens, most of which the model sees: it learns to copy. "
            "A place that was not chosen has the label -100, which cross-entropy ignores.",
            _masks(_Afterwards(_labels_everywhere)),
        ),
        Misconception(
            "labels are taken from the changed ids",
            "Then the right answer to [MASK] is [MASK]. Make the labels from the ids that were "
            "there, before anything is changed.",
            _masks(_Afterwards(_labels_of_the_inputs)),
        ),
        Misconception(
            "labels are 0 where nothing was chosen",
            "0 is an id like any other, and the model learns to answer with it everywhere. What "
            "cross-entropy ignores is -100.",
            _masks(_Afterwards(_labels_zero)),
        ),
        Misconception(
            "the input is changed in place",
            "The caller's ids are gone, and with them the labels of the next epoch: there, [MASK] "
            "would be the right answer. Change a copy.",
            _masks(_InPlace()),
        ),
        Misconception(
            "the same places are chosen in every text",
            "A draw of shape [seq] serves all texts of the batch alike. Draw one number for "
            "each token of each text: `torch.rand(input_ids.shape)`.",
            _masks(_SamePlaces()),
        ),
        Misconception(
            "just so many tokens are chosen in each text",
            "BERT's own code did that: it rounded 15% of each text. Here each token is chosen for "
            "itself, with the probability given, so the number differs from text to text.",
            _masks(_SoManyInEachText()),
        ),
        Misconception(
            "random pieces are never special tokens",
            "It does no harm, but the contract says the whole vocabulary, as BERT's code and "
            "Transformers have it: `torch.randint(tokenizer.vocab_size, ...)`.",
            _masks(_Afterwards(_without_special)),
        ),
        Misconception(
            "the generator is not used",
            "With the same seed the masks must be the same, or no run can be repeated. Every draw "
            "takes `generator=generator`.",
            _masks(_GlobalGenerator()),
        ),
        Misconception(
            "without a generator, the masks are always the same",
            "A seed set inside the function draws the same masks in every call, so the model sees "
            "the same words hidden in every epoch. Without a generator, draw from PyTorch's own.",
            _masks(_FixedSeed()),
        ),
        Misconception(
            "whole_word is ignored",
            "Of a word of several pieces, one hidden piece is easily guessed from the others. With "
            "`whole_word` a word is chosen as a whole: all its pieces, or none.",
            _masks(_WordsIgnored()),
        ),
        Misconception(
            "a word is chosen as soon as one of its pieces is",
            "A word of three pieces then has three chances: 39% instead of 15%. Draw one number "
            "for each word; the draw of its first piece can serve for all.",
            _masks(_AnyPiece()),
        ),
        Misconception(
            "only the first piece of a chosen word is hidden",
            "The pieces with `##` that follow belong to the word, and in sight they would give "
            "it away: they are chosen with it.",
            _masks(_FirstPieces()),
        ),
        Misconception(
            "all pieces of a word become [MASK] together",
            "Which words are chosen is drawn word by word; what a chosen piece becomes (80/10/10) "
            "is drawn for each piece by itself, as in BERT's code.",
            _masks(_OneFate()),
        ),
    ),
    hints=(
        "Three draws of the shape of `input_ids`: which tokens are chosen, what becomes of them, "
        "and which piece is put in. `torch.rand` and `torch.randint` take `generator=` and "
        "`device=`; `torch.where` and `masked_fill` change copies.",
        "chosen = (draws < probability) & ~torch.isin(input_ids, the special ids). labels = the "
        "ids with -100 where not chosen. A second draw `fate`: below 0.8 the mask, from 0.9 on a "
        "piece from torch.randint, between the two nothing.",
        "For whole words let each token use the draw of its word's first piece: "
        "`draws.gather(-1, first)`, where `first` is the place where the word begins. To find it, "
        "write the places 0, 1, 2, ... and put 0 where a piece begins with `##`; the running "
        "maximum (`cummax`) is the place of the last beginning.",
    ),
)


# --- 6.2: pairs of sentences ---


class Pairs:
    """Neighbors by `itertools.pairwise`, draws by NumPy's generator seeded from the given one."""

    half = 0.5

    def __call__(
        self, documents: Any, tokenizer: Any, max_length: int, rng: random.Random
    ) -> list[dict[str, Any]]:
        documents = [list(document) for document in documents if document]
        neighbors = [pair for document in documents for pair in pairwise(document)]
        if not neighbors:
            return []
        if len(documents) < 2:
            raise ValueError(f"documents has {len(documents)}, but must have at least 2")
        homes = np.repeat(np.arange(len(documents)), [len(d) - 1 for d in documents])
        starts, draws = np.cumsum([0, *map(len, documents)]), self.draws(rng)
        wrong = draws.random(len(homes)) >= self.half
        drawn = self.elsewhere(draws, homes, starts)
        sentences = [sentence for document in documents for sentence in document]
        both = zip(neighbors, wrong, drawn, strict=True)
        seconds = [sentences[i] if is_wrong else pair[1] for pair, is_wrong, i in both]
        firsts, labels = [pair[0] for pair in neighbors], map(self.label, wrong.tolist())
        return self.written(firsts, seconds, list(labels), tokenizer, max_length)

    def draws(self, rng: random.Random) -> np.random.Generator:
        return np.random.default_rng(rng.getrandbits(64))

    def elsewhere(self, draws: np.random.Generator, homes: Any, starts: Any) -> Any:
        other = draws.integers(len(starts) - 2, size=len(homes))
        other += other >= homes
        return draws.integers(starts[other], starts[other + 1])

    def label(self, is_wrong: bool) -> int:
        return int(is_wrong)

    def written(
        self, firsts: Any, seconds: Any, labels: list[int], tokenizer: Any, most: int
    ) -> list[dict[str, Any]]:
        columns = tokenizer(firsts, seconds, truncation=True, max_length=most)
        names = ("input_ids", "token_type_ids", "attention_mask", "next_sentence_label")
        rows = zip(*(columns[name] for name in names[:3]), labels, strict=True)
        return [dict(zip(names, row, strict=True)) for row in rows]


class _Inverted2(Pairs):
    def label(self, is_wrong: bool) -> int:
        return int(not is_wrong)


class _SameDocument(Pairs):
    def elsewhere(self, draws: np.random.Generator, homes: Any, starts: Any) -> Any:
        return draws.integers(starts[homes], starts[homes + 1])


class _AnyDocument(Pairs):
    def elsewhere(self, draws: np.random.Generator, homes: Any, starts: Any) -> Any:
        other = draws.integers(len(starts) - 1, size=len(homes))
        return draws.integers(starts[other], starts[other + 1])


class _FirstSentence(Pairs):
    def elsewhere(self, draws: np.random.Generator, homes: Any, starts: Any) -> Any:
        other = draws.integers(len(starts) - 2, size=len(homes))
        return starts[other + (other >= homes)]


class _BySize(Pairs):
    def elsewhere(self, draws: np.random.Generator, homes: Any, starts: Any) -> Any:
        sizes = starts[homes + 1] - starts[homes]
        place = draws.integers(starts[-1] - sizes)
        return place + np.where(place >= starts[homes], sizes, 0)


class _OwnSeed(Pairs):
    def draws(self, rng: random.Random) -> np.random.Generator:
        return np.random.default_rng()


class _TypesForgotten2(Pairs):
    def written(self, firsts: Any, seconds: Any, labels: Any, tokenizer: Any, most: int) -> Any:
        rows = super().written(firsts, seconds, labels, tokenizer, most)
        return [{**row, "token_type_ids": [0] * len(row["input_ids"])} for row in rows]


class _Padded(Pairs):
    def written(self, firsts: Any, seconds: Any, labels: Any, tokenizer: Any, most: int) -> Any:
        rows = super().written(firsts, seconds, labels, tokenizer, most)
        fill: dict[str, int] = dict.fromkeys(("token_type_ids", "attention_mask"), 0)
        fill["input_ids"] = tokenizer.pad_token_id
        return [
            {**row, **{n: row[n] + [x] * (most - len(row[n])) for n, x in fill.items()}}
            for row in rows
        ]


class _NeverCut(Pairs):
    def written(self, firsts: Any, seconds: Any, labels: Any, tokenizer: Any, most: int) -> Any:
        return super().written(firsts, seconds, labels, tokenizer, 10**6)


class _CutAtTheEnd(Pairs):
    def written(self, firsts: Any, seconds: Any, labels: Any, tokenizer: Any, most: int) -> Any:
        rows = super().written(firsts, seconds, labels, tokenizer, 10**6)
        return [{k: v[:most] if isinstance(v, list) else v for k, v in row.items()} for row in rows]


class _EverySecond(Pairs):
    def written(self, firsts: Any, seconds: Any, labels: Any, tokenizer: Any, most: int) -> Any:
        return super().written(firsts, seconds, labels, tokenizer, most)[::2]


def _pair_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, lengths: list[Any], max_length: int) -> Case:
        inputs = {"lengths": lengths, "max_length": max_length}
        return Case(name, {**inputs, "seed": int(rng.integers(2**31))})

    def drawn(sizes: list[int], longest: int) -> list[list[int]]:
        return [rng.integers(1, longest + 1, size).tolist() for size in sizes]

    yield case("short and long sentences, some cut", drawn([5, 1, 8, 0, 3, 12], 14), 16)
    yield case("two documents, one of them without neighbors", drawn([4, 1], 3), 32)
    yield case("sentences in one document alone", drawn([4, 0], 3), 32)
    yield case("no document with two sentences", drawn([1, 1, 0], 3), 32)
    yield case("thirty documents of 900 sentences", [900] * 29 + [1500], 16)


FEW = [[5, 1, 14, 2], [13, 12, 3], [1, 1]]
"""The words of the sentences of three documents, on which a wrong part is soon found out."""


def _pair_probe(part: Any, lengths: list[Any], max_length: int, seed: int) -> dict[str, Any]:
    """`lengths`: for each document the words of each sentence, or the number of its sentences."""
    if isinstance(lengths[0], int):
        few = _pair_probe(part, FEW, max_length, seed)
        broken = [law for law, n in few.items() if law.startswith("pairs ") and n != 0]
        if broken:
            return few  # then nothing need be counted
    sizes = [[1] * document if isinstance(document, int) else document for document in lengths]
    words = [f"w{i}" for i in range(sum(map(len, sizes)))]
    tokenizer, name = Pieces([*words, *SPECIAL]), iter(words)
    documents = [[" ".join([next(name)] * size) for size in document] for document in sizes]

    def pairs(draws: int) -> Any:
        return part.sentence_pairs(documents, tokenizer, max_length, random.Random(draws))

    if sum(map(bool, sizes)) == 1:
        return error_of(lambda: pairs(seed), kind=ValueError)
    with without_collection():
        rows = pairs(seed)
    found = {"what is returned": f"a {type(rows).__name__} of dicts", "pairs": len(rows)}
    if not rows:
        return found
    found["names and types in each"] = sorted(
        [key, type(value).__name__] for key, value in rows[0].items()
    )
    if len(rows) < 1000:
        # Several times: three pairs come out the same by chance, once in eight.
        found["with the same seed, the same"] = all(rows == pairs(seed) for _ in range(8))
        found["with another seed, another"] = any(rows != pairs(seed + i) for i in range(1, 9))
    return {**found, **_laws_of_pairs(rows, tokenizer, sizes, max_length)}


@contextmanager
def without_collection() -> Iterator[None]:
    """Do not look for garbage meanwhile: among 100,000 new lists that takes most of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _laws_of_pairs(
    rows: list[Any], tokenizer: Pieces, sizes: list[list[int]], most: int
) -> dict[str, Any]:
    """What holds for every pair; a sentence is known by its word's id, which is its number."""
    home = np.repeat(np.arange(len(sizes)), [len(document) for document in sizes])
    words = np.array([size for document in sizes for size in document])
    ids, types, mask = (
        _as_table(rows, name) for name in ("input_ids", "token_type_ids", "attention_mask")
    )
    seps, length = ids == tokenizer.sep_token_id, (ids >= 0).sum(axis=1)
    a, last = seps.argmax(axis=1) - 1, length - 1
    b, line = last - a - 2, np.arange(ids.shape[1])[None]
    ordered = (ids[:, 0] == tokenizer.cls_token_id) & (seps.sum(axis=1) == 2) & (a > 0) & (b > 0)
    ordered &= seps[np.arange(len(ids)), last]
    ordered &= (types == np.where(line > last[:, None], -1, line > a[:, None] + 1)).all(axis=1)
    found: dict[str, Any] = {
        "pairs not [CLS] A [SEP] B [SEP] with types 0 and 1": int((~ordered).sum()),
        "pairs longer than max_length": int((length > most).sum()),
        "pairs with another mask than 1 everywhere": int((mask != (ids >= 0) * 2 - 1).any(1).sum()),
    }
    if not ordered.all():
        return found
    first, second = ids[:, 1], ids[np.arange(len(ids)), a + 2]
    true = np.array([row["next_sentence_label"] for row in rows]) == 0
    shorter = np.minimum(np.minimum(words[first], words[second]), (most - 3) // 2)
    wanted = np.minimum(words[first] + words[second] + 3, most)
    found |= {
        "pairs cut too much": int((length < wanted).sum()),
        "pairs of which the shorter was cut": int((np.minimum(a, b) < shorter).sum()),
        "pairs of label 0 whose B does not follow A": int((true & (second != first + 1)).sum()),
        "pairs over the end of a document": int(
            (home[first] != np.append(home, -1)[first + 1]).sum()
        ),
        "pairs of label 1 with B from A's document": int(
            (~true & (home[second] == home[first])).sum()
        ),
        "the first sentences, in order": first.tolist() if len(first) < 1000 else int(first.sum()),
    }
    return found | (_shares_of_pairs(true, home, first, second) if len(rows) > 1000 else {})


def _as_table(rows: list[Any], name: str) -> np.ndarray:
    """Lists of numbers as one array, -1 where a row has ended."""
    columns = [row[name] for row in rows]
    lengths = np.array(list(map(len, columns)))
    table = np.full((len(rows), lengths.max()), -1)
    table[np.arange(lengths.max()) < lengths[:, None]] = list(chain(*columns))
    return table


def _shares_of_pairs(true: Any, home: Any, first: Any, second: Any) -> dict[str, str]:
    """The last document is longer than the others, which have the same length."""
    last, begins = home.max(), np.flatnonzero(np.diff(home, prepend=-1))
    elsewhere = ~true & (home[first] != last)
    others = elsewhere & (home[second] != last)
    return {
        "pairs of label 0": as_asked(true.sum(), len(true), 0.5),
        "wrong sentences from the longest document": as_asked(
            (home[second][elsewhere] == last).sum(), elsewhere.sum(), 1 / last
        ),
        "wrong sentences from the document after A's": as_asked(
            (home[second] == home[first] + 1)[elsewhere].sum(), elsewhere.sum(), 1 / last
        ),
        "wrong sentences that begin their document": as_asked(
            np.isin(second[others], begins).sum(), others.sum(), 1 / (home == 0).sum()
        ),
    }


PAIR = Exercise(
    id="6.2",
    reference={"sentence_pairs": Pairs()},
    reference_name="itertools.pairwise, numpy.random, the labels of transformers",
    cases=_pair_cases,
    probe=_pair_probe,
    misconceptions=(
        Misconception(
            "0 and 1 are exchanged",
            "In BERT's code and in Transformers, `next_sentence_label` 0 says that B follows A, "
            "and 1 that it does not. The other way round is as good, until somebody loads a real "
            "checkpoint and all its answers are wrong.",
            _pairs(_Inverted2()),
        ),
        Misconception(
            "wrong sentences come from the same document",
            "That is another task, and a harder one (ALBERT's, roughly). BERT draws from another "
            "document: the chapter looks at what that gives away.",
            _pairs(_SameDocument()),
        ),
        Misconception(
            "A's own document is drawn from too",
            "Of few documents the own one comes often, and sometimes its B is the very next "
            "sentence, with the label 1. Draw from the others: a number below `len(documents) - "
            "1`, plus 1 if it is not below A's.",
            _pairs(_AnyDocument()),
        ),
        Misconception(
            "a wrong sentence is always the first of its document",
            "First sentences are recognized by their tone, so the model would learn that. Each "
            "sentence of the drawn document is as likely: `rng.choice(document)`.",
            _pairs(_FirstSentence()),
        ),
        Misconception(
            "long documents are drawn more often",
            "You draw among all sentences, so a document of 1,000 sentences comes a hundred times "
            "as often as one of 10. Draw the document first, then one of its sentences.",
            _pairs(_BySize()),
        ),
        Misconception(
            "rng is not used",
            "Draws from another generator make a run that nobody can repeat. All draws come "
            "from the argument `rng`: `rng.random()`, `rng.randrange`, `rng.choice`.",
            _pairs(_OwnSeed()),
        ),
        Misconception(
            "token_type_ids are 0 everywhere",
            "The model then cannot tell where the second sentence begins. They are 0 up to the "
            "first [SEP], itself included, and 1 from there on; the tokenizer makes them if it is "
            "given both texts.",
            _pairs(_TypesForgotten2()),
        ),
        Misconception(
            "the pairs are padded",
            "Padding is a matter of a batch: how long the others are, nobody knows here. Return "
            "each pair at its own length.",
            _pairs(_Padded()),
        ),
        Misconception(
            "long pairs are not cut",
            "No pair may have more than `max_length` tokens, because the model has no more "
            "positions. The tokenizer cuts: `tokenizer(first, second, truncation=True, "
            "max_length=max_length)`.",
            _pairs(_NeverCut()),
        ),
        Misconception(
            "long pairs are cut at the end",
            "The last [SEP] is lost, and after a long A there is no B at all. Cut the longer of "
            "the two until both fit: the tokenizer's truncation does.",
            _pairs(_CutAtTheEnd()),
        ),
        Misconception(
            "only every second sentence begins a pair",
            "Every sentence that has a next one is an A, so most sentences are used twice: as an A "
            "and as the next one's B. `itertools.pairwise` gives the neighbors.",
            _pairs(_EverySecond()),
        ),
    ),
    hints=(
        "Two loops: over the documents, numbered, and over the neighbors of each "
        "(`itertools.pairwise(document)`). In the inner one, draw the label; if it is 1, draw "
        "another second sentence.",
        "Another document than number n: other = rng.randrange(len(documents) - 1), plus 1 if it "
        "is not below n. Then rng.choice of its sentences. Leave empty documents out before you "
        "begin.",
        "tokenizer(first, second, truncation=True, max_length=max_length) gives the three lists of "
        "a pair; add next_sentence_label. It also takes a list of firsts and a list of seconds, "
        "which is quicker. With fewer than two documents raise the ValueError where one is needed.",
    ),
)


# --- 6.3: warm-up and decay ---


def transformers_schedule(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return the multiplier of Transformers' schedule."""
    from transformers.optimization import get_linear_schedule_with_warmup

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule: Any = get_linear_schedule_with_warmup(optimizer, warmup_steps, total_steps)
    return schedule.lr_lambdas[0](step)


def _schedule_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, warmup: int, total: int, beyond: int = 3) -> Case:
        steps = {0, 1, warmup - 1, warmup, warmup + 1, total - 1, total, total + beyond}
        steps |= set(rng.integers(0, total, 8).tolist())
        inputs = {"steps": sorted(s for s in steps if s >= 0)}
        return Case(name, {**inputs, "warmup_steps": warmup, "total_steps": total})

    total = int(rng.integers(200, 1000))
    yield case("a tenth of the steps warms up", total // 10, total)
    yield case("no warm-up", 0, total)
    yield case("nothing but warm-up", total, total)
    yield case("BERT's own: 10,000 of 1,000,000 steps", 10_000, 1_000_000, 50_000)


def _schedule_probe(
    part: Any, steps: list[int], warmup_steps: int, total_steps: int
) -> dict[str, Any]:
    values = [part.warmup_linear(step, warmup_steps, total_steps) for step in steps]
    return {
        "kind": sorted({type(value + 0.0).__name__ for value in values}),
        "multipliers": torch.tensor(values, dtype=torch.float64),
    }


def _schedule(wrong: Callable[[int, int, int], float]) -> dict[str, Any]:
    return {"warmup_linear": wrong}


def _changed(change: Callable[[float, int, int, int], float]) -> dict[str, Any]:
    def wrong(step: int, warmup_steps: int, total_steps: int) -> float:
        right = transformers_schedule(step, warmup_steps, total_steps)
        return change(right, step, warmup_steps, total_steps)

    return _schedule(wrong)


def _without_floor(step: int, warmup_steps: int, total_steps: int) -> float:
    if step <= total_steps:
        return transformers_schedule(step, warmup_steps, total_steps)
    return (total_steps - step) / max(1, total_steps - warmup_steps)


def _divides(step: int, warmup_steps: int, total_steps: int) -> float:
    return min(step / warmup_steps, transformers_schedule(step, 0, total_steps))


SCHEDULE = Exercise(
    id="6.3",
    reference={"warmup_linear": transformers_schedule},
    reference_name="transformers get_linear_schedule_with_warmup",
    cases=_schedule_cases,
    probe=_schedule_probe,
    misconceptions=(
        Misconception(
            "the learning rate stays at its highest after the warm-up",
            "It is half of the schedule. From the end of the warm-up to the last step it falls to "
            "0 in a line: how many steps are left, divided by how many there were at its highest.",
            _changed(lambda right, step, warmup, total: right if step < warmup else 1.0),
        ),
        Misconception(
            "the decay begins at step 0",
            "(total - step) / total is below 1 when the warm-up ends, so the highest rate is never "
            "reached and there is a jump. Count from the end of the warm-up.",
            _changed(
                lambda right, step, warmup, total: (
                    right if step < warmup else max(0.0, 1 - step / total)
                )
            ),
        ),
        Misconception(
            "the warm-up and the decay are multiplied",
            "They are two lines, one after the other, and not two factors: during the warm-up "
            "nothing decays, and after it nothing is warmed up.",
            _changed(
                lambda right, step, warmup, total: (
                    right * (1 - step / total) if step < warmup else right
                )
            ),
        ),
        Misconception(
            "the steps are counted from 1",
            "`step` says how many are done. Before the first it is 0, and so is the multiplier "
            "(if there is a warm-up); that is what Transformers does.",
            _schedule(lambda s, w, t: transformers_schedule(s + 1, w, t)),
        ),
        Misconception(
            "it falls below 0 after the last step",
            "With a negative learning rate a step climbs, and the loss rises. Whoever trains "
            "on after the last step gets 0: `max(0.0, ...)`.",
            _schedule(_without_floor),
        ),
        Misconception(
            "no warm-up divides by 0",
            "With warmup_steps 0 there is nothing to divide by: it begins at 1. Ask whether `step` "
            "is below `warmup_steps` before you divide.",
            _schedule(_divides),
        ),
        Misconception(
            "the decay follows a cosine",
            "Many models are trained with a cosine, and it is as good a choice. This schedule is "
            "BERT's: a straight line.",
            _changed(
                lambda right, step, warmup, total: (
                    right if step < warmup else (1 - np.cos(np.pi * right).item()) / 2
                )
            ),
        ),
    ),
    hints=(
        "Two cases: during the warm-up, and after it. Draw the line on paper, and write down its "
        "value at 0, warmup_steps and total_steps.",
        "During the warm-up the share of it that is done. After it the share of the rest that is "
        "still to come, and never less than 0.",
        "(total_steps - step) / (total_steps - warmup_steps), where the lower number may be 0 if "
        "all is warm-up: use max(1, ...).",
    ),
)


# --- 6.4: AdamW ---


class Network(nn.Module):
    """Names that mislead: a LayerNorm not called so, a layer that is, a vector, a tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.between = nn.LayerNorm(4)
        self.renormed = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.LayerNorm(4)])
        self.gate = nn.Parameter(torch.ones(4))
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.decoder = nn.Linear(4, 7)
        self.decoder.weight = self.words.weight


def transformers_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return what Transformers' Trainer would give its optimizer."""
    return _grouped(model, weight_decay, [nn.LayerNorm], [r"bias"])


def _grouped(
    model: nn.Module, weight_decay: float, layers: list[Any], names: list[str]
) -> list[dict[str, Any]]:
    from transformers.trainer_pt_utils import get_parameter_names

    decayed = set(get_parameter_names(model, layers, names))
    return _in_groups(model, weight_decay, lambda name, parameter: name in decayed)


def _in_groups(
    model: nn.Module, weight_decay: float, is_decayed: Callable[[str, Tensor], bool]
) -> list[dict[str, Any]]:
    learned = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in learned if is_decayed(name, p) is kind], "weight_decay": decay}
        for kind, decay in ((True, weight_decay), (False, 0.0))
    ]


def _vectors_spared(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    return _in_groups(model, weight_decay, lambda name, parameter: parameter.ndim > 1)


def _norms_by_name(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    return _grouped(model, weight_decay, [], [r"bias", r"norm"])


def _norms_decayed(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    return _grouped(model, weight_decay, [], [r"bias"])


def _biases_decayed(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    return _grouped(model, weight_decay, [nn.LayerNorm], [])


def _tied_twice(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    first, second = transformers_groups(model, weight_decay)
    tied = dict(model.named_parameters(remove_duplicate=False))["decoder.weight"]
    return [{**first, "params": [*first["params"], tied]}, second]


def _frozen_too(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    frozen = [p for p in model.parameters() if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    groups = transformers_groups(model, weight_decay)
    for parameter in frozen:
        parameter.requires_grad_(False)
    return groups


class _Rewritten(torch.optim.AdamW):
    """PyTorch's moments and counts, with another last step."""

    def step(self, closure: Any = None) -> Any:
        before = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
        loss = super().step(closure)
        with torch.no_grad():
            for group, olds in zip(self.param_groups, before, strict=True):
                for parameter, old in zip(group["params"], olds, strict=True):
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        parameter.copy_(self.moved(old, parameter.grad, state, group))
        return loss

    def moved(self, old: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        mean, spread = self.unbiased(state, group)
        return self.decayed(old, group) - group["lr"] * mean / (spread.sqrt() + group["eps"])

    def unbiased(self, state: Any, group: Any) -> tuple[Tensor, Tensor]:
        beta1, beta2 = group["betas"]
        count = float(state["step"])
        return state["exp_avg"] / (1 - beta1**count), state["exp_avg_sq"] / (1 - beta2**count)

    def decayed(self, old: Tensor, group: Any) -> Tensor:
        return old * (1 - group["lr"] * group["weight_decay"])


class _Biased(_Rewritten):
    def unbiased(self, state: Any, group: Any) -> tuple[Tensor, Tensor]:
        return state["exp_avg"], state["exp_avg_sq"]


class _CountedFromTwo(_Rewritten):
    def unbiased(self, state: Any, group: Any) -> tuple[Tensor, Tensor]:
        return super().unbiased({**state, "step": state["step"] + 1}, group)


class _EpsInside(_Rewritten):
    def moved(self, old: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        mean, spread = self.unbiased(state, group)
        return self.decayed(old, group) - group["lr"] * mean / (spread + group["eps"]).sqrt()


class _DecayWithoutRate(_Rewritten):
    def decayed(self, old: Tensor, group: Any) -> Tensor:
        return old * (1 - group["weight_decay"])


class _DecayLast(_Rewritten):
    def moved(self, old: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
        mean, spread = self.unbiased(state, group)
        new = old - group["lr"] * mean / (spread.sqrt() + group["eps"])
        return self.decayed(new, group)


class _BetasSwapped(torch.optim.AdamW):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, (betas[1], betas[0]), eps, weight_decay)


class _OneCount(torch.optim.AdamW):
    """All parameters share one count of steps."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state = self.state[p] or zeros
                self.state[p] = {**state, "step": torch.tensor(self.count - 1.0)}
        super().step()
        return loss


class _DecaysAll(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        return loss


class _FirstRate(torch.optim.AdamW):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.first = [group["lr"] for group in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        for group, rate in zip(self.param_groups, self.first, strict=True):
            group["lr"] = rate
        return super().step(closure)


class _FirstGroup(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        first = {k: v for k, v in self.param_groups[0].items() if k != "params"}
        for group in self.param_groups[1:]:
            group.update(first)
        return super().step(closure)


class _ClosureIgnored(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step()


class _OwnMemory(torch.optim.AdamW):
    """What it remembers is not in `state`, so not in `state_dict` either."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": {}}


class _GradientTurned(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.zero_()
        return loss


def _adam_l2(params: Any, *args: Any, **options: Any) -> Any:
    return torch.optim.Adam(params, *args, **{"weight_decay": 1e-2, **options})


class _L2(torch.optim.Adam):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)


def _adam_cases(rng: np.random.Generator) -> Iterator[Case]:
    shapes = [(3, 5), (4,), (2, 3)]

    def case(name: str, steps: int = 3, scale: float = 1.0, **more: Any) -> Case:
        inputs = {
            "parameters": [normal(rng, *shape) for shape in shapes],
            "gradients": [
                [
                    normal(rng, *shape, scale=scale * 10 ** -float(i))
                    for i, shape in enumerate(shapes)
                ]
                for _ in range(steps)
            ],
            "decay": float(np.round(rng.uniform(0.05, 0.2), 3)),
        }
        return Case(name, inputs | more)

    groups = [{"lr": 0.02, "weight_decay": 0.3}, {"weight_decay": 0.0, "betas": [0.7, 0.9]}]
    yield case("three steps, default settings")
    yield case("other settings", settings={"lr": 0.05, "betas": [0.8, 0.95], "weight_decay": 0.4})
    yield case("two groups with their own settings", groups=groups)
    yield case("tiny gradients, where eps counts", scale=1e-6, settings={"eps": 1e-6, "lr": 0.1})
    yield case("a learning rate that changes", rates=[0.0, 0.01, 0.005])
    yield case(
        "a parameter whose gradient comes and goes",
        absent=[[1, 0], [1, 1], [2, 2]],
        settings={"lr": 0.02},
    )
    yield case("stopped, and gone on from its state_dict", resume=2)
    yield case("a closure", steps=2, closure=True)


def _adam_probe(
    part: Any,
    parameters: list[Tensor],
    gradients: list[list[Tensor]],
    decay: float,
    settings: dict[str, Any] | None = None,
    groups: list[dict[str, Any]] | None = None,
    rates: list[float] | None = None,
    absent: list[list[int]] | None = None,
    resume: int | None = None,
    closure: bool = False,
) -> dict[str, Any]:
    options = {k: tuple(v) if k == "betas" else v for k, v in (settings or {}).items()}
    own = [nn.Parameter(x.clone()) for x in parameters]

    def made(params: list[nn.Parameter]) -> Any:
        if groups is None:
            return part.AdamW(params, **options)
        rest = [{**g, "params": [p]} for g, p in zip(groups, params, strict=False)]
        for group in rest:
            group |= {"betas": tuple(group["betas"])} if "betas" in group else {}
        return part.AdamW([*rest, {"params": params[len(groups) :]}], **options)

    optimizer = made(own)
    found: dict[str, Any] = {
        "it is a torch.optim.Optimizer": isinstance(optimizer, torch.optim.Optimizer)
    }
    for number, given in enumerate(gradients):
        if number == resume:
            own, before = [nn.Parameter(p.detach().clone()) for p in own], optimizer
            optimizer = made(own)
            optimizer.load_state_dict(before.state_dict())
        for i, (parameter, gradient) in enumerate(zip(own, given, strict=True)):
            parameter.grad = None if [i, number] in (absent or []) else gradient.clone()
        for group in optimizer.param_groups:
            group["lr"] = rates[number] if rates else group["lr"]
        returned = optimizer.step(*([_asked(own, number)] if closure else []))
        found[f"step {number + 1} returns"] = "nothing" if returned is None else float(returned)
        found |= {
            f"parameter {i} after step {number + 1}": p.detach().clone() for i, p in enumerate(own)
        }
    if not (settings or groups or rates or absent or resume or closure):
        found |= _of_the_groups(part, decay)
    return found


def _asked(parameters: list[nn.Parameter], number: int) -> Callable[[], float]:
    """Return a closure: it doubles the gradients, and says 0.5 or 1.5."""

    def closure() -> float:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 2 if torch.is_grad_enabled() else None
        return number + 0.5

    return closure


def _of_the_groups(part: Any, decay: float) -> dict[str, Any]:
    network = Network()
    names = {id(p): name for name, p in network.named_parameters()}
    groups = part.parameter_groups(network, decay)
    kinds = ["the decayed", "the others"]
    return {
        "groups": len(groups),
        **{
            f"parameters of {kind}": [names.get(id(p), "?") for p in group["params"]]
            for kind, group in zip(kinds, groups, strict=False)
        },
        **{
            f"weight decay of {kind}": float(group["weight_decay"])
            for kind, group in zip(kinds, groups, strict=False)
        },
    }


def _grouping(wrong: Any) -> dict[str, Any]:
    return {"parameter_groups": wrong}


def _optimizing(wrong: Any) -> dict[str, Any]:
    return {"AdamW": wrong}


OPTIMIZER = Exercise(
    id="6.4",
    reference={"parameter_groups": transformers_groups, "AdamW": torch.optim.AdamW},
    reference_name="torch.optim.AdamW, transformers get_parameter_names",
    cases=_adam_cases,
    probe=_adam_probe,
    misconceptions=(
        Misconception(
            "weight decay is added to the gradient",
            "That is Adam with an L2 penalty, and what AdamW was written against: the penalty "
            "passes through m and v, so weights with large gradients hardly decay. In AdamW the "
            "parameter shrinks by itself, beside the gradient's step.",
            _optimizing(_L2),
        ),
        Misconception(
            "weight decay is not multiplied by the learning rate",
            "The paper writes it so, but scales it with the schedule; PyTorch multiplies it by lr. "
            "Without that, weights shrink by 1% in every step, also when the rate is almost 0.",
            _optimizing(_DecayWithoutRate),
        ),
        Misconception(
            "weight decay comes after the gradient's step",
            "Then the step itself shrinks too. The difference is small, lr² times the decay, but "
            "it is there: shrink the parameter first.",
            _optimizing(_DecayLast),
        ),
        Misconception(
            "m and v are not corrected",
            "Both start at 0, so in the first steps they are far too small: m is a tenth of the "
            "gradient, v a thousandth of its square. Divide by 1 - beta1**t and 1 - beta2**t. (The "
            "BERT of 2018 left this out and relied on its warm-up.)",
            _optimizing(_Biased),
        ),
        Misconception(
            "the count of steps is one too high",
            "In the first step t is 1, so that m / (1 - beta1) is the gradient itself. Count "
            "up before you divide, and count once.",
            _optimizing(_CountedFromTwo),
        ),
        Misconception(
            "all parameters share one count of steps",
            "A parameter that had no gradient in a step has not moved, and its m and v are a step "
            "younger. Count in each parameter's own state.",
            _optimizing(_OneCount),
        ),
        Misconception(
            "eps stands under the root",
            "sqrt(v + eps) is at least 1e-4 where sqrt(v) + eps is at least 1e-8. Parameters with "
            "tiny gradients would stand still.",
            _optimizing(_EpsInside),
        ),
        Misconception(
            "the betas are exchanged",
            "beta1 = 0.9 belongs to the mean of the gradients, beta2 = 0.999 to that of their "
            "squares, which has to be steadier.",
            _optimizing(_BetasSwapped),
        ),
        Misconception(
            "parameters without a gradient decay",
            "A parameter that took no part in the loss is left alone, its decay included: skip it "
            "when `parameter.grad is None`.",
            _optimizing(_DecaysAll),
        ),
        Misconception(
            "the learning rate of the beginning is used for ever",
            "A schedule writes a new rate into `param_groups` before each step. Read "
            "`group['lr']` in `step`, not once and for all in `__init__`.",
            _optimizing(_FirstRate),
        ),
        Misconception(
            "all groups have the first one's settings",
            "Each group has its own lr, betas, eps and weight_decay, and they may change: read "
            "them inside the loop over `self.param_groups`.",
            _optimizing(_FirstGroup),
        ),
        Misconception(
            "the closure is not called",
            "Some training loops hand over a function that computes the gradients. Call it first, "
            "with gradients enabled, and return what it returned.",
            _optimizing(_ClosureIgnored),
        ),
        Misconception(
            "what is remembered is not in the state_dict",
            "A run that goes on from a checkpoint would begin with m and v at 0. What is kept in "
            "`self.state[parameter]` is in `state_dict()` by itself; attributes of your own are "
            "not.",
            _optimizing(_OwnMemory),
        ),
        Misconception(
            "biases are decayed",
            "A bias says where a unit's threshold lies; there is no reason why it should be near "
            "0. BERT leaves biases out.",
            _grouping(_biases_decayed),
        ),
        Misconception(
            "LayerNorm's gains are decayed",
            "They start at 1 and mean 1: pulled toward 0 they make every layer fainter. Leave out "
            "the parameters of every `nn.LayerNorm`.",
            _grouping(_norms_decayed),
        ),
        Misconception(
            "norms are recognized by their name",
            "A LayerNorm may be called anything, and a layer with `norm` in its name need not be "
            "one. Ask for the type: `isinstance(module, nn.LayerNorm)`.",
            _grouping(_norms_by_name),
        ),
        Misconception(
            "every vector is spared",
            "It is a common shortcut (`p.ndim < 2`), but a vector of weights that is neither a "
            "bias nor a norm's decays like any other weight.",
            _grouping(_vectors_spared),
        ),
        Misconception(
            "a tied parameter is listed twice",
            "It would move twice in every step, and its means would be fed twice. "
            "`model.named_parameters()` gives each parameter once; `state_dict()` does not.",
            _grouping(_tied_twice),
        ),
        Misconception(
            "frozen parameters are listed",
            "They have no gradient, so nothing moves them; but who counts what is trained, or "
            "keeps optimizer states, counts them too. Leave out those with requires_grad False.",
            _grouping(_frozen_too),
        ),
    ),
    hints=(
        "`torch.optim.Optimizer.__init__(params, defaults)` makes `self.param_groups` (a list of "
        "dicts with `params` and every setting) and `self.state`, a dict of a dict for each "
        "parameter. What is left to you is `step`.",
        "For each parameter with a gradient: if its state is empty, put in a count 0 and two "
        "tensors of zeros. Then the formulas in order. `mul_`, `lerp_`, `addcmul_`, `addcdiv_` "
        "work in place. For the groups, first collect the parameters of all `nn.LayerNorm`s in a "
        "set.",
        "p.mul_(1 - lr * weight_decay); m.lerp_(g, 1 - beta1); v.mul_(beta2).addcmul_(g, g, "
        "value=1 - beta2); root = (v / (1 - beta2**t)).sqrt().add_(eps); p.addcdiv_(m, root, "
        "value=-lr / (1 - beta1**t)). A bias is a parameter whose name ends in `bias`.",
    ),
)


# --- 6.5: the training loop ---


class Guesser(nn.Module):
    """A small model with the names of BERT's: words guess words, and the text guesses its pair."""

    def __init__(self, state: Mapping[str, Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        for name, value in state.items():
            setattr(self, name, nn.Parameter(value.clone()))
        self.dropout = nn.Dropout(dropout)
        self.types: set[str] = set()
        self.modes: set[bool] = set()
        self.read: list[list[int]] = []

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
    ) -> Any:
        """Return scores, and the sum of the losses whose labels are given."""
        self.modes.add(self.training)
        self.read.append(list(input_ids.shape))
        words = self.dropout(self.get_parameter("words")[input_ids])
        real = attention_mask[..., None].to(words.dtype)
        text = (words * real).sum(dim=1) / real.sum(dim=1)  # [batch, hidden]
        mixed = F.linear(
            words + text[:, None], self.get_parameter("mix"), self.get_parameter("bias")
        )
        self.types.add(str(mixed.dtype))
        logits = F.linear(mixed.tanh(), self.get_parameter("words"))
        pairs = F.linear(text, self.get_parameter("pair"))
        losses = []
        if labels is not None:
            losses.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        if next_sentence_label is not None:
            losses.append(F.cross_entropy(pairs, next_sentence_label))
        return SimpleNamespace(
            loss=torch.stack(losses).sum() if losses else None,
            logits=logits,
            prediction_logits=logits,
            seq_relationship_logits=pairs,
        )


def torch_step(
    model: nn.Module, batch: Any, scaler: Any = None, autocast: Any = None, share: Any = None
) -> Tensor:
    """Run forward and backward."""
    from bertlab.pretraining import loss_in_batch

    with autocast or torch.autocast("cpu", enabled=False):
        output = model(**batch)
        loss = output.loss if share is None else loss_in_batch(output, batch, share)
    scaled = loss if scaler is None else scaler.scale(loss)
    torch.autograd.backward([scaled])
    return loss.detach()


class Loop:
    """Runs the micro-batches of a step as the one batch that they make."""

    def pretrain(
        self,
        model: nn.Module,
        data: Iterable[Any],
        settings: Any,
        on_step: Callable[[int, float], None] | None = None,
    ) -> list[float]:
        from bertlab import pretraining as given

        optimizer = torch.optim.AdamW(self.groups(model, settings), lr=settings.learning_rate)
        scaler = given.gradient_scaler(model, settings.precision)
        run = given.TrainingRun(model, optimizer, scaler, given.MicroBatches(data), settings)
        self.begin(run)
        was_training = model.training
        self.set_mode(model)
        for step in range(run.step, settings.total_steps):
            micro_batches = [next(run.data) for _ in range(settings.accumulation_steps)]
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * self.rate(step, settings)
            run.losses.append(self.backward(model, micro_batches, scaler, settings))
            self.move(model, optimizer, scaler, settings)
            self.keep(run)
            if on_step is not None:
                on_step(step + 1, run.losses[-1])
        model.train(was_training)
        return run.losses

    # What a wrong version does in another way.

    def groups(self, model: nn.Module, settings: Any) -> Any:
        return transformers_groups(model, settings.weight_decay)

    def begin(self, run: Any) -> None:
        run.resume()

    def set_mode(self, model: nn.Module) -> None:
        model.train()

    def rate(self, step: int, settings: Any) -> float:
        return transformers_schedule(step, settings.warmup_steps, settings.total_steps)

    def backward(self, model: nn.Module, micro_batches: Any, scaler: Any, settings: Any) -> float:
        return self.of_batches(model, [joined(micro_batches)], scaler, settings)

    def of_batches(self, model: nn.Module, batches: Any, scaler: Any, settings: Any) -> float:
        from bertlab import pretraining as given

        device = given.device_of(model)
        losses = []
        for batch, share in zip(batches, self.shares(batches), strict=True):
            batch = {name: x.to(device) for name, x in batch.items()}
            autocast = self.autocast(device, settings.precision)
            losses.append(torch_step(model, batch, scaler, autocast, share))
        return given.add_up([float(torch.stack(losses).sum())])[0]

    def shares(self, batches: Any) -> Any:
        from bertlab.pretraining import shares

        return shares(batches)

    def autocast(self, device: torch.device, precision: str) -> Any:
        from bertlab.pretraining import autocast_for

        return autocast_for(device, precision)

    def move(self, model: nn.Module, optimizer: Any, scaler: Any, settings: Any) -> None:
        from bertlab.pretraining import add_up_gradients

        add_up_gradients(model)
        scaler.unscale_(optimizer)
        self.clip(model, settings)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def clip(self, model: nn.Module, settings: Any) -> None:
        if settings.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)

    def keep(self, run: Any) -> None:
        run.save_if_due()


def joined(micro_batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return one batch of all texts, padded to the longest."""
    longest = max(batch["input_ids"].shape[1] for batch in micro_batches)
    together = {}
    for name in micro_batches[0]:
        fill = -100 if name == "labels" else 0
        together[name] = torch.cat(
            [
                F.pad(b[name], (0, longest - b[name].shape[1]), value=fill)
                if b[name].ndim == 2
                else b[name]
                for b in micro_batches
            ]
        )
    return together


class _Apart(Loop):
    """Micro-batch by micro-batch, each with a share."""

    def backward(self, model: nn.Module, micro_batches: Any, scaler: Any, settings: Any) -> float:
        return self.of_batches(model, micro_batches, scaler, settings)


class _EquallyWeighed(_Apart):
    def shares(self, batches: Any) -> Any:
        from bertlab.pretraining import Share

        return [Share(1 / len(batches), 1 / len(batches))] * len(batches)


class _Summed(_Apart):
    def shares(self, batches: Any) -> Any:
        from bertlab.pretraining import Share

        return [Share(1.0, 1.0)] * len(batches)


class _ByWordsAlone(_Apart):
    def shares(self, batches: Any) -> Any:
        from bertlab.pretraining import Share, shares

        return [Share(share.words, share.words) for share in shares(batches)]


class _NeverZeroed(Loop):
    def move(self, model: nn.Module, optimizer: Any, scaler: Any, settings: Any) -> None:
        kept = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        super().move(model, optimizer, scaler, settings)
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient


class _Unclipped(Loop):
    def clip(self, model: nn.Module, settings: Any) -> None:
        pass


class _ClippedOneByOne(Loop):
    def clip(self, model: nn.Module, settings: Any) -> None:
        for parameter in model.parameters():
            if settings.max_grad_norm is not None:
                nn.utils.clip_grad_norm_([parameter], settings.max_grad_norm)


class _ClippedScaled(Loop):
    def move(self, model: nn.Module, optimizer: Any, scaler: Any, settings: Any) -> None:
        self.clip(model, settings)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


class _ConstantRate(Loop):
    def rate(self, step: int, settings: Any) -> float:
        return 1.0


class _RateFromOne(Loop):
    def rate(self, step: int, settings: Any) -> float:
        return super().rate(step + 1, settings)


class _OneGroup(Loop):
    def groups(self, model: nn.Module, settings: Any) -> Any:
        return [{"params": list(model.parameters()), "weight_decay": settings.weight_decay}]


class _ModeKept(Loop):
    def set_mode(self, model: nn.Module) -> None:
        pass


class _Precise(Loop):
    def autocast(self, device: torch.device, precision: str) -> Any:
        return super().autocast(device, "float32")


class _HalfWeights(Loop):
    def set_mode(self, model: nn.Module) -> None:
        super().set_mode(model)
        self.before = {name: p.dtype for name, p in model.named_parameters()}

    def backward(self, model: nn.Module, micro_batches: Any, scaler: Any, settings: Any) -> float:
        if settings.precision == "bf16":
            model.to(torch.bfloat16)
        return super().backward(model, micro_batches, scaler, settings)


class _NeverRead(Loop):
    def begin(self, run: Any) -> None:
        pass


class _NeverKept(Loop):
    def keep(self, run: Any) -> None:
        pass


class _OldGenerators(Loop):
    def begin(self, run: Any) -> None:
        from bertlab.pretraining import generator_states, set_generator_states

        states = generator_states()
        super().begin(run)
        if run.step:
            set_generator_states(states)


class _DataFromTheStart(Loop):
    def begin(self, run: Any) -> None:
        from bertlab.pretraining import MicroBatches

        super().begin(run)
        run.data = MicroBatches(run.data.data)


class _NewOptimizer(Loop):
    def begin(self, run: Any) -> None:
        super().begin(run)
        run.optimizer.state.clear()


class _Steps:
    """Wrong versions of a step."""

    def with_graph(self, model: nn.Module, batch: Any, scaler: Any = None, *more: Any) -> Tensor:
        loss = model(**batch).loss
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss

    def unscaled(self, model: nn.Module, batch: Any, scaler: Any = None, *more: Any) -> Tensor:
        return torch_step(model, batch, None, *more)

    def zeroed(self, model: nn.Module, batch: Any, scaler: Any = None, *more: Any) -> Tensor:
        model.zero_grad()
        return torch_step(model, batch, scaler, *more)

    def number(self, model: nn.Module, batch: Any, scaler: Any = None, *more: Any) -> float:
        return torch_step(model, batch, scaler, *more).item()


def _guesser_state(rng: np.random.Generator, words: int = 19, hidden: int = 6) -> dict[str, Tensor]:
    return {
        "words": normal(rng, words, hidden),
        "mix": normal(rng, hidden, hidden, scale=hidden**-0.5),
        "bias": normal(rng, hidden, scale=0.3),
        "pair": normal(rng, 2, hidden),
    }


def _micro_batch(
    rng: np.random.Generator, lengths: list[int], labelled: int, pairs: bool = False
) -> dict[str, Tensor]:
    mask = padding_mask(lengths, max(lengths))
    ids = integers(rng, 1, 19, *mask.shape) * mask
    labels, real = torch.full_like(ids, -100), mask.nonzero()
    for text, place in real[torch.from_numpy(rng.permutation(len(real)))][:labelled].tolist():
        labels[text, place] = int(rng.integers(1, 19))
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return batch | ({"next_sentence_label": integers(rng, 0, 2, len(lengths))} if pairs else {})


def _training_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, data: list[Any], size: float = 1.0, **more: Any) -> Case:
        settings = {"learning_rate": 0.05, "weight_decay": 0.3, "total_steps": 4}
        settings |= more.pop("settings", {})
        state = {name: x * size for name, x in _guesser_state(rng).items()}
        inputs = {"state": state, "data": data, "settings": settings}
        return Case(name, inputs | more)

    def batches(*shapes: tuple[list[int], int], pairs: bool = False) -> list[dict[str, Tensor]]:
        return [_micro_batch(rng, lengths, labelled, pairs) for lengths, labelled in shapes]

    plain = batches(([5, 3], 3), ([4, 4, 2], 4))
    yield case("a step by itself, without a scaler and with one", plain[:1], one=True)
    clipped = {"warmup_steps": 2, "max_grad_norm": 0.1, "total_steps": 4}
    yield case("two micro-batches in turn, warm-up, a short gradient", plain, settings=clipped)
    unlike = batches(([6], 1), ([7, 5, 6, 3], 14), ([4, 2], 3), ([3], 0), ([5, 5], 2))
    three = {"accumulation_steps": 3, "max_grad_norm": None, "total_steps": 2}
    yield case("three micro-batches with unlike numbers of labels make one", unlike, settings=three)
    both = batches(([6, 5], 1), ([4], 4), ([5, 3, 3], 6), pairs=True)
    together = {"accumulation_steps": 3, "total_steps": 2, "max_grad_norm": None}
    yield case("words and pairs, three micro-batches in one", both, settings=together)
    stopped = {"total_steps": 4, "checkpoint_every": 2, "warmup_steps": 1}
    parts = batches(([5, 4], 3), ([6], 2), ([3, 4], 4))
    yield case("stopped after step 3, and gone on", parts, settings=stopped, stop=3)
    yield case("bf16", plain, settings={"precision": "bf16", "total_steps": 2}, kinds=True)
    fp16 = {"precision": "fp16", "max_grad_norm": 0.01, "total_steps": 2}
    yield case("fp16, a short gradient", plain, settings=fp16, size=0.2)
    in_eval = {"settings": {"total_steps": 2}, "dropout": 0.5, "kinds": True}
    yield case("a model in eval mode, with dropout", plain, **in_eval)
    yield case("no data", [], settings={"total_steps": 2})


class Drawn:
    """Batches that differ in every round, by draws from the three global generators."""

    def __init__(self, data: list[dict[str, Tensor]]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        of_the_round = int(torch.randint(18, (1,)))
        for batch in self.data:
            shift = of_the_round + random.randrange(18) + np.random.randint(18)
            ids = (batch["input_ids"] - 1 + shift) % 18 + 1
            yield {**batch, "input_ids": ids * batch["attention_mask"]}


class Stopped(Exception):
    """Somebody has pulled the plug."""


@contextmanager
def watched_optimizers(model: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Note what any optimizer finds before each of its steps on the model's parameters."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    notes: list[dict[str, Any]] = []
    own = {id(p): name for name, p in model.named_parameters()}

    def note(optimizer: Any, args: Any, kwargs: Any) -> None:
        decays = {
            own.get(id(p), "?"): group["weight_decay"]
            for group in optimizer.param_groups
            for p in group["params"]
        }
        gradients = [
            p.grad.detach().flatten().clone() for p in model.parameters() if p.grad is not None
        ]
        together = torch.cat(gradients)
        if together.isfinite().all():  # else a scaler was too large, and the step is left out
            rate = float(optimizer.param_groups[0]["lr"])
            known = {"remembers": any(optimizer.state.values())}
            notes.append({"rate": rate, "decays": decays, "gradient": together, **known})

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield notes
    finally:
        handle.remove()


def _training_probe(
    part: Any,
    state: dict[str, Tensor],
    data: list[dict[str, Tensor]],
    settings: dict[str, Any],
    dropout: float = 0.0,
    stop: int | None = None,
    kinds: bool = False,
    one: bool = False,
) -> dict[str, Any]:
    from bertlab.pretraining import PretrainingSettings

    if one:
        return _of_one_step(part, state, data[0])

    chosen = PretrainingSettings(**settings)
    if not data:
        model = Guesser(state)
        return error_of(lambda: part.pretrain(model, data, chosen), kind=ValueError)
    if stop is not None:
        return _stopped_and_gone_on(part, state, data, settings, stop)
    model = Guesser(state, dropout).train(not kinds)
    asked: list[int] = []
    with watched_optimizers(model) as notes:
        losses = part.pretrain(model, data, chosen, lambda step, loss: asked.append(step))
    found = {
        "what is returned": [type(losses).__name__, *sorted({type(x).__name__ for x in losses})],
        "on_step was called after steps": asked,
        "modes in which the model was called": sorted(model.modes),
        "the model is in training mode afterwards": model.training,
        "types of the weights": sorted(
            {str(p.dtype) for p in model.parameters()} - {str(state["words"].dtype)}
        ),
    }
    if kinds:
        return found | {"type of the forward pass": sorted(model.types), "steps": len(losses)}
    kind = state["words"].dtype
    norms = [float(torch.linalg.vector_norm(note["gradient"])) for note in notes]
    found["gradient norms when the optimizer steps"] = torch.tensor(norms, dtype=kind)
    if chosen.precision == "fp16":
        return found
    return {
        **found,
        "losses": torch.tensor(losses, dtype=kind),
        "learning rates": torch.tensor([note["rate"] for note in notes], dtype=torch.float64),
        "weight decays": notes[0]["decays"] if notes else {},
        "gradient of the first step": notes[0]["gradient"] if notes else None,
        "loss of the first batch afterwards": _loss_of(model, data[0]),
    }


def _loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    device = next(model.parameters()).device
    with torch.no_grad():
        return model(**{name: x.to(device) for name, x in batch.items()}).loss


def _of_one_step(part: Any, state: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Any]:
    """What `training_step` returns and adds, without a scaler and with one."""
    model, device = Guesser(state), state["words"].device
    batch = {name: x.to(device) for name, x in batch.items()}
    loss = part.training_step(model, batch)
    once = _gradient(model)
    part.training_step(model, batch)
    twice = _gradient(model)
    model.zero_grad()
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    again = part.training_step(model, batch, scaler)
    found: dict[str, Any] = {"a step's gradient": once, "after two steps": twice}
    found |= {"a step's gradient with a scaler of 8": _gradient(model)}
    for name, value in (("loss", loss), ("loss with a scaler", again)):
        is_tensor = isinstance(value, Tensor)
        found[f"a step's {name} is a tensor with a graph"] = is_tensor and value.requires_grad
        found[f"a step's {name}"] = value.detach() if isinstance(value, Tensor) else value
    return found


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    ).clone()


def alike(ours: Tensor, theirs: Tensor) -> bool:
    """Equal but for rounding: a product of matrices may round otherwise at another place in memory.

    What is forgotten at a stop (moments, the state of a generator) moves weights a thousandfold.
    """
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def _stopped_and_gone_on(
    part: Any, state: dict[str, Tensor], data: Any, settings: dict[str, Any], stop: int
) -> dict[str, Any]:
    """What becomes of a run that is stopped."""
    with tempfile.TemporaryDirectory() as folder:
        drawn = Drawn(data)
        run = partial(
            _until,
            lambda model, chosen, on_step: part.pretrain(model, drawn, chosen, on_step),
            lambda: Guesser(state, dropout=0.3).train(),
            settings,
        )
        whole, losses, _ = run(1, Path(folder, "whole"))
        run(1, Path(folder, "parts"), stop)
        is_there = Path(folder, "parts").exists()
        gone_on, all_losses, notes = run(2, Path(folder, "parts"))
    parameters = zip(whole.parameters(), gone_on.parameters(), strict=True)
    return {
        "a checkpoint is there when it is stopped": is_there,
        "the same weights as without a stop": all(alike(*pair) for pair in parameters),
        "the same losses as without a stop": alike(*map(torch.tensor, (all_losses, losses))),
        "losses that are returned": len(all_losses),
        "what was read after going on": gone_on.read,
        "the optimizer remembers what was before": bool(notes) and notes[0]["remembers"],
    }


def _until(
    train: Any, new: Any, settings: dict[str, Any], seed: int, file: Path, stop: int | None = None
) -> tuple[Any, Any, Any]:
    """Train a new model until it is stopped; return it, its losses and what was noted."""
    from bertlab.pretraining import PretrainingSettings

    def on_step(step: int, loss: float) -> None:
        if step == stop:
            raise Stopped

    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(seed)
    model, chosen = new(), PretrainingSettings(**settings, checkpoint=file)
    losses = None
    with watched_optimizers(model) as notes, suppress(Stopped):
        losses = train(model, chosen, on_step)
    return model, losses, notes


def _looping(wrong: Loop) -> dict[str, Any]:
    return {"pretrain": wrong.pretrain}


LOOP = Exercise(
    id="6.5",
    reference={"training_step": torch_step, "pretrain": Loop().pretrain},
    reference_name="torch.optim.AdamW on the whole batch, transformers' schedule",
    cases=_training_cases,
    probe=_training_probe,
    misconceptions=(
        Misconception(
            "every micro-batch counts the same",
            "The mean of means is not the mean: a micro-batch with one label would weigh as much "
            "as one with fourteen. `shares`, given below, says what part of the labels each has; "
            "hand its share to `training_step`.",
            _looping(_EquallyWeighed()),
        ),
        Misconception(
            "the micro-batches' gradients are summed up",
            "Each is the gradient of a mean, so the sum is three times too long where there are "
            "three. Weigh each with its share of the labels (`shares`, given below).",
            _looping(_Summed()),
        ),
        Misconception(
            "pairs are weighed by the number of labelled words",
            "The loss has two parts, each a mean of its own kind: over words, and over pairs. "
            "`loss_in_batch`, given below, weighs them apart.",
            _looping(_ByWordsAlone()),
        ),
        Misconception(
            "gradients are never set to 0",
            "They add up over all steps, so that each step follows the gradients of all before "
            "it. Call `optimizer.zero_grad()` after each step of the optimizer.",
            _looping(_NeverZeroed()),
        ),
        Misconception(
            "gradients are not shortened",
            "Once in a while a batch gives a gradient fifty times as long as usual, and Adam's "
            "memory of it lasts for a thousand steps. `nn.utils.clip_grad_norm_` shortens it to "
            "`max_grad_norm`.",
            _looping(_Unclipped()),
        ),
        Misconception(
            "each parameter's gradient is shortened by itself",
            "`max_grad_norm` bounds the length of all gradients together, as one long vector, "
            "which keeps its direction: one call with all parameters.",
            _looping(_ClippedOneByOne()),
        ),
        Misconception(
            "gradients are shortened before they are unscaled",
            "In fp16 they are thousands of times too long when they come from `backward`, so all "
            "of them are shortened, and then made thousands of times too short. First "
            "`scaler.unscale_(optimizer)`, then clip.",
            _looping(_ClippedScaled()),
        ),
        Misconception(
            "the learning rate stays the same",
            "The schedule has to be told to somebody. Before each step, write `learning_rate * "
            "warmup_linear(steps done, warmup_steps, total_steps)` into every group's `lr`.",
            _looping(_ConstantRate()),
        ),
        Misconception(
            "the schedule is one step ahead",
            "`warmup_linear` counts the steps that are done, not the one that is about to be "
            "made: before the first step it is given 0.",
            _looping(_RateFromOne()),
        ),
        Misconception(
            "biases decay",
            "Biases and the gains of norms have no reason to shrink towards 0. Give the "
            "optimizer the two groups of exercise 6.4: `parameter_groups(model, "
            "settings.weight_decay)`.",
            _looping(_OneGroup()),
        ),
        Misconception(
            "the model is trained in the mode it happens to be in",
            "A model that comes from a file is in eval mode, and would be trained without dropout. "
            "Call `model.train()` first.",
            _looping(_ModeKept()),
        ),
        Misconception(
            "the precision is not looked at",
            "The forward pass runs inside `autocast_for(device, settings.precision)`, which is "
            "given below. Without it everything is computed in float32, and takes its time.",
            _looping(_Precise()),
        ),
        Misconception(
            "the weights themselves become bf16",
            "bfloat16 has three significant digits: most updates are too small to change a weight "
            "at all. Weights stay in float32; autocast makes 16-bit copies for each forward pass.",
            _looping(_HalfWeights()),
        ),
        Misconception(
            "a checkpoint is not read",
            "The second call begins anew. `run.resume()` puts back what the checkpoint holds, if "
            "there is one; the loop then goes on at `run.step`.",
            _looping(_NeverRead()),
        ),
        Misconception(
            "a checkpoint is not written",
            "Then there is nothing to go on from. Call `run.save_if_due()` at the end of each "
            "step, when the loss is in `run.losses`.",
            _looping(_NeverKept()),
        ),
        Misconception(
            "the generators are not put back",
            "Dropout and masks then draw other numbers than the run without a stop, and nobody can "
            "tell whether a difference is a bug. `run.resume()` puts them back; seed nothing after "
            "it.",
            _looping(_OldGenerators()),
        ),
        Misconception(
            "a resumed run begins with the first data again",
            "Data at the beginning is seen more often than the rest. Read from `run.data`, which "
            "`run.resume()` has moved to its place.",
            _looping(_DataFromTheStart()),
        ),
        Misconception(
            "a resumed run forgets the optimizer's m and v",
            "With m and v at 0 the first steps go in other directions. Make the optimizer before "
            "`run.resume()`, which fills it, and keep it.",
            _looping(_NewOptimizer()),
        ),
        Misconception(
            "a step returns its loss with the graph",
            "As long as somebody holds that number, PyTorch holds everything that it was "
            "computed from. `loss.detach()` is the number alone.",
            {"training_step": _Steps().with_graph},
        ),
        Misconception(
            "a step ignores its scaler",
            "In float16 small gradients become 0. `scaler.scale(loss).backward()` computes "
            "them multiplied by a large number, which is taken out again before the step.",
            {"training_step": _Steps().unscaled},
        ),
        Misconception(
            "a step sets the gradients to 0",
            "Then no batch can be larger than a micro-batch, because each one forgets the "
            "others: a step adds its gradient to those that are there.",
            {"training_step": _Steps().zeroed},
        ),
        Misconception(
            "a step returns a Python number",
            "`.item()` makes the processor wait for the GPU in every micro-batch, which costs "
            "more than it says. Return the detached tensor instead.",
            {"training_step": _Steps().number},
        ),
    ),
    hints=(
        "All the parts are given below your cell: `fused_adamw` (or your own AdamW), "
        "`gradient_scaler`, `MicroBatches`, `TrainingRun` with `resume` and `save_if_due`, "
        "`progress(run)`, which yields the numbers of the steps that are left, `shares`, "
        "`autocast_for`, `add_up_gradients`, `add_up`.",
        "A step of the loop: read the micro-batches with next(run.data), set the learning rate in "
        "every group, call training_step for each micro-batch on the model's device, then "
        "add_up_gradients, unscale_, clip, scaler.step, scaler.update, zero_grad; append the loss, "
        "save_if_due, on_step. A scaler that is not enabled hands everything on, so there is no "
        "case to distinguish.",
        "training_step: with (autocast or nullcontext()): output = model(**batch), and loss = "
        "output.loss, or loss_in_batch(output, batch, share) if there is a share. Then backward "
        "on the loss or on scaler.scale(loss), and return loss.detach(). The loss of a step is "
        "the sum of its micro-batches' losses, over all processes: add_up([...])[0].",
    ),
)


# --- 6.6: adapt a model to a domain ---


class Adaptation:
    """Transformers' collator on shuffled pieces of text, and the loop above."""

    def adapt(
        self,
        model: nn.Module,
        tokenizer: Any,
        texts: Sequence[str],
        settings: Any,
        on_step: Any = None,
    ) -> list[float]:
        pieces = self.pieces(tokenizer, texts, settings.max_length)
        if not pieces:
            raise ValueError("texts is empty; give at least one text with a token in it")
        return Loop().pretrain(model, self.batches(pieces, tokenizer, settings), settings, on_step)

    def pieces(self, tokenizer: Any, texts: Sequence[str], most: int) -> list[list[int]]:
        found = []
        for text in texts:
            ids = tokenizer.encode(text)[1:-1]
            for start in range(0, len(ids), most - 2):
                found.append(self.with_ends(ids[start : start + most - 2], tokenizer))
        return found

    def with_ends(self, ids: list[int], tokenizer: Any) -> list[int]:
        return [tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]

    def batches(self, pieces: list[list[int]], tokenizer: Any, settings: Any) -> Iterator[Any]:
        generator = self.generator(settings)
        while True:
            generator = self.next_round(generator, settings)
            order = self.order(pieces, generator)
            yield from (
                self.batch([pieces[i] for i in part], tokenizer, generator)
                for part in self.parts(order, settings)
            )

    def generator(self, settings: Any) -> torch.Generator:
        return torch.Generator().manual_seed(settings.seed)

    def next_round(self, generator: torch.Generator, settings: Any) -> torch.Generator:
        return generator

    def order(self, pieces: list[list[int]], generator: torch.Generator) -> list[int]:
        return torch.randperm(len(pieces), generator=generator).tolist()

    def parts(self, order: list[int], settings: Any) -> list[list[int]]:
        size = settings.batch_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def batch(self, rows: list[list[int]], tokenizer: Any, generator: Any) -> dict[str, Tensor]:
        tensors = [torch.tensor(row) for row in rows]
        ids = nn.utils.rnn.pad_sequence(tensors, True, tokenizer.pad_token_id)
        real = nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in tensors], True)
        inputs, labels = self.masked(ids, tokenizer, generator)
        return {"input_ids": inputs, "attention_mask": real, "labels": labels}

    def masked(self, ids: Tensor, tokenizer: Any, generator: Any) -> tuple[Tensor, Tensor]:
        return Masking()(ids, tokenizer, generator=generator)


class _MaskedOnce(Adaptation):
    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}

    def pieces(self, tokenizer: Any, texts: Sequence[str], most: int) -> list[list[int]]:
        self.known.clear()
        return super().pieces(tokenizer, texts, most)

    def batch(self, rows: list[list[int]], tokenizer: Any, generator: Any) -> dict[str, Tensor]:
        masked = []
        for row in rows:
            if tuple(row) not in self.known:
                self.known[tuple(row)] = super().batch([row], tokenizer, generator)
            masked.append(self.known[tuple(row)])
        return joined(masked)


class _SameRound(Adaptation):
    def next_round(self, generator: torch.Generator, settings: Any) -> torch.Generator:
        return self.generator(settings)


class _InOrder(Adaptation):
    def order(self, pieces: list[list[int]], generator: torch.Generator) -> list[int]:
        return list(range(len(pieces)))


class _Unseeded(Adaptation):
    def generator(self, settings: Any) -> torch.Generator:
        generator = torch.Generator()
        generator.seed()
        return generator


class _CutOff(Adaptation):
    def pieces(self, tokenizer: Any, texts: Sequence[str], most: int) -> list[list[int]]:
        return [
            self.with_ends(ids, tokenizer)
            for text in texts
            if (ids := tokenizer.encode(text)[1:-1][: most - 2])
        ]


class _TooLong(Adaptation):
    def pieces(self, tokenizer: Any, texts: Sequence[str], most: int) -> list[list[int]]:
        return super().pieces(tokenizer, texts, 10**6)


class _Concatenated(Adaptation):
    def pieces(self, tokenizer: Any, texts: Sequence[str], most: int) -> list[list[int]]:
        ids = [i for text in texts for i in tokenizer.encode(text)]
        return [ids[start : start + most] for start in range(0, len(ids), most)]


class _WithoutEnds(Adaptation):
    def with_ends(self, ids: list[int], tokenizer: Any) -> list[int]:
        return ids


class _MaskedWithoutAttentionMask(Adaptation):
    def batch(self, rows: list[list[int]], tokenizer: Any, generator: Any) -> dict[str, Tensor]:
        batch = super().batch(rows, tokenizer, generator)
        return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}


class _LastDropped(Adaptation):
    def parts(self, order: list[int], settings: Any) -> list[list[int]]:
        return [part for part in super().parts(order, settings) if len(part) == settings.batch_size]


class _NothingHidden(Adaptation):
    def masked(self, ids: Tensor, tokenizer: Any, generator: Any) -> tuple[Tensor, Tensor]:
        special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
        return ids, ids.masked_fill(special, -100)


def _adapt_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, sizes: list[int], **settings: Any) -> Case:
        pieces = vocabulary(rng, sum(sizes) + 3)
        words = iter(f"w{i}" for i in rng.permutation(sum(sizes) + 3))
        texts = [" ".join(next(words) for _ in range(size)) for size in sizes]
        settings = {"learning_rate": 0.01, "seed": int(rng.integers(1, 1000)), **settings}
        state = _guesser_state(rng, len(pieces), 4)
        return Case(name, {"pieces": pieces, "texts": texts, "settings": settings, "state": state})

    sizes = rng.permutation(np.resize([9, 8, 7, 6, 5], 22)).tolist()
    two_rounds = {"batch_size": 5, "max_length": 12, "total_steps": 10}
    yield case("twenty-two texts, five a batch, two rounds", sizes, **two_rounds)
    cut = {"batch_size": 4, "max_length": 8, "total_steps": 6}
    yield case("texts that are too long", [25, 4, 13, 1, 9], **cut)
    more = {"accumulation_steps": 2, "max_length": 16, "batch_size": 2}
    yield case("two micro-batches a step", [7, 6, 8, 9, 5, 6, 7, 7], total_steps=4, **more)
    yield case("no texts", [], total_steps=2)


class Listener(Guesser):
    """A `Guesser` that remembers what it was called with."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__(state)
        self.calls: list[dict[str, Tensor]] = []

    def forward(self, *args: Any, **batch: Any) -> Any:
        self.calls.append({name: x.detach().cpu().clone() for name, x in batch.items()})
        return super().forward(*args, **batch)


def _adapt_probe(
    part: Any,
    pieces: list[str],
    texts: list[str],
    settings: dict[str, Any],
    state: dict[str, Tensor],
) -> dict[str, Any]:
    from bertlab.pretraining import AdaptationSettings

    tokenizer, chosen = Pieces(pieces), AdaptationSettings(**settings)
    model = Listener(state)
    if not texts:
        return error_of(lambda: part.adapt(model, tokenizer, texts, chosen), kind=ValueError)
    losses = part.adapt(model, tokenizer, texts, chosen)
    again = Listener(state)
    part.adapt(again, tokenizer, texts, AdaptationSettings(**{**settings, "total_steps": 1}))
    begun = model.calls[: len(again.calls)]
    rows, chosen_places, broken = _read_back(model.calls, tokenizer)
    length = len({tuple(row) for row in rows})  # of a round: every text is another
    first, second = rows[:length], rows[length : 2 * length]
    one = chosen.accumulation_steps == 1  # else micro-batches may be run together
    found = {
        "steps": len(losses),
        "labels that it was given": sorted(
            {k for call in model.calls for k in call if "label" in k}
        ),
        "what was read in the first round": sorted(first),
        "texts that were read": len(rows),
        "texts in a batch, in the first round": one and _sizes(model.calls, length),
        "places that are hidden": "some" if any(map(len, chosen_places)) else "none",
        "tokens that the model sees and is asked for": _seen(model.calls),
        "the same seed gives the same": _equal_calls(begun, again.calls),
        **broken,
    }
    if length < 20:  # few texts may look the same by chance
        return found
    other = Listener(state)
    part.adapt(
        other, tokenizer, texts, AdaptationSettings(**{**settings, "seed": 4321, "total_steps": 1})
    )
    masks: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for row, places in zip(rows, chosen_places, strict=True):
        masks.setdefault(tuple(row), set()).add(places)
    return {
        **found,
        "the second round is in another order": first[: len(second)] != second,
        "the texts are shuffled": first != _as_given(rows, texts, tokenizer),
        "masks are drawn anew": any(len(places) > 1 for places in masks.values()),
        "another seed gives another": not _equal_calls(begun, other.calls),
    }


def _read_back(
    calls: list[dict[str, Tensor]], tokenizer: Pieces
) -> tuple[list[list[int]], list[tuple[int, ...]], dict[str, int]]:
    """Return the texts as they were before they were masked, and which places were chosen."""
    rows, places, broken = [], [], Counter()
    for call in calls:
        ids, labels, mask = call["input_ids"], call["labels"], call["attention_mask"]
        original = torch.where(labels != -100, labels, ids)
        broken["padding that is attended to"] += int(
            ((original == tokenizer.pad_token_id) & (mask != 0)).sum()
        )
        broken["padding with a label"] += int(((mask == 0) & (labels != -100)).sum())
        broken["columns of padding alone"] += int((mask.sum(dim=0) == 0).sum())
        for row, real, label in zip(original, mask.bool(), labels, strict=True):
            rows.append([int(i) for i in row[real & (row != tokenizer.pad_token_id)]])
            places.append(tuple((label != -100).nonzero().flatten().tolist()))
    return rows, places, {law: count for law, count in broken.items() if count}


def _sizes(calls: list[dict[str, Tensor]], length: int) -> list[int]:
    """How many texts the batches of the first round had, largest first."""
    sizes: list[int] = []
    for call in calls:
        if sum(sizes) < length:
            sizes.append(len(call["input_ids"]))
    return sorted(sizes, reverse=True)


def _as_given(rows: list[list[int]], texts: list[str], tokenizer: Pieces) -> list[list[int]]:
    """The first round's rows in the order of the texts: by where their first word stands."""
    stream = " ".join(texts).split()
    unique = {tuple(row): row for row in rows}
    return sorted(
        unique.values(),
        key=lambda row: min(
            (stream.index(tokenizer.pieces[i]) for i in row if i not in tokenizer.all_special_ids),
            default=0,
        ),
    )


def _seen(calls: list[dict[str, Tensor]]) -> str:
    """Whether most labels ask for what the model sees."""
    asked = sum(int((call["labels"] != -100).sum()) for call in calls)
    seen = sum(int((call["labels"] == call["input_ids"]).sum()) for call in calls)
    return "few" if seen <= 0.9 * asked else "most"


def _equal_calls(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> bool:
    return len(first) == len(second) and all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(first, second, strict=True)
    )


def _adapting(wrong: Adaptation) -> dict[str, Any]:
    return {"adapt": wrong.adapt}


ADAPT = Exercise(
    id="6.6",
    reference={"adapt": Adaptation().adapt},
    reference_name="transformers DataCollatorForLanguageModeling, torch.randperm",
    cases=_adapt_cases,
    probe=_adapt_probe,
    misconceptions=(
        Misconception(
            "masks are drawn once",
            "The model then sees the same words hidden in every round, and learns them by heart. "
            "Call mask_tokens when a batch is made, not when the texts are read.",
            _adapting(_MaskedOnce()),
        ),
        Misconception(
            "every round repeats the first",
            "A generator that is seeded anew for each round draws the same order and the same "
            "masks. Make it once, before the first round.",
            _adapting(_SameRound()),
        ),
        Misconception(
            "the texts are never shuffled",
            "Texts of one source stand together, so the model would learn one source after the "
            "other. Draw a new order for each round.",
            _adapting(_InOrder()),
        ),
        Misconception(
            "the seed is not used",
            "Two runs with the same settings must see the same. Make a generator with "
            "`settings.seed`, and draw everything from it.",
            _adapting(_Unseeded()),
        ),
        Misconception(
            "what is too long is cut off",
            "The ends of long texts are never read. Cut a text into pieces of `max_length`, each "
            "with a [CLS] and [SEP] of its own.",
            _adapting(_CutOff()),
        ),
        Misconception(
            "long texts are not cut",
            "They do not fit: `max_length` is what the model, or the memory, can take. Cut the "
            "ids into stretches, so that no word is lost.",
            _adapting(_TooLong()),
        ),
        Misconception(
            "the texts are laid end to end and cut into blocks",
            "It is common (Transformers' run_mlm.py does so) and leaves no padding, but a block "
            "then holds the end of one text and the beginning of another, and each attends to the "
            "other. Here each text stays by itself.",
            _adapting(_Concatenated()),
        ),
        Misconception(
            "[CLS] and [SEP] are left out",
            "The model has never seen a text without them. Every piece of a text begins with "
            "[CLS] and ends with [SEP], as in pretraining.",
            _adapting(_WithoutEnds()),
        ),
        Misconception(
            "padding is attended to",
            "`attention_mask` is 0 where a text is padded. Without it short texts look at padding, "
            "and their losses depend on what they stand beside.",
            _adapting(_MaskedWithoutAttentionMask()),
        ),
        Misconception(
            "the last batch of a round is dropped",
            "Its texts are lost for this round. It may have fewer texts than the others; the loss "
            "is a mean.",
            _adapting(_LastDropped()),
        ),
        Misconception(
            "nothing is hidden",
            "With labels at every place and nothing masked, the model has only to copy what it "
            "reads. Inputs and labels come from mask_tokens.",
            _adapting(_NothingHidden()),
        ),
    ),
    hints=(
        "It is a call of your pretrain with data that you make: a generator function with an "
        "endless loop over rounds. In each, a new order; of each batch, the ids padded, then "
        "mask_tokens.",
        "`torch.Generator().manual_seed(settings.seed)` once; `torch.randperm(n, "
        "generator=generator)` for the order; `.split(batch_size)` cuts it. "
        "`nn.utils.rnn.pad_sequence(list, batch_first=True, padding_value=...)` pads.",
        "Pieces of a text: cls, *ids, sep = tokenizer.encode(text); for start in range(0, "
        "len(ids), max_length - 2) one piece [cls, *ids[start : start + max_length - 2], sep]. A "
        "batch is a dict with input_ids and labels from mask_tokens, and attention_mask, which is "
        "1 for each of a piece's own tokens.",
    ),
)


# --- 6.7: clinic ---


def torch_labels(batch: Mapping[str, Tensor], chosen: Tensor) -> dict[str, Tensor]:
    """Keep the labels where a token was chosen."""
    return {**batch, "labels": torch.where(chosen, batch["labels"], -100)}


@torch.no_grad()
def torch_evaluation(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> float:
    """Average without a graph."""
    return float(np.mean([float(model(**batch).loss) for batch in batches]))


def _relabelled(change: Callable[[Mapping[str, Tensor], Tensor], Tensor]) -> dict[str, Any]:
    def wrong(batch: Mapping[str, Tensor], chosen: Tensor) -> dict[str, Tensor]:
        return {**batch, "labels": change(batch, chosen)}

    return {"mend_labels": wrong}


def _in_place(batch: Mapping[str, Tensor], chosen: Tensor) -> Any:
    batch["labels"].masked_fill_(~chosen, -100)
    return dict(batch)


def _labels_alone(batch: Mapping[str, Tensor], chosen: Tensor) -> dict[str, Tensor]:
    names = ("input_ids", "attention_mask", "labels")
    found = torch_labels(batch, chosen)
    return {name: found[name] for name in names}


def _as_it_is(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> Any:
    losses = [model(**batch).loss for batch in batches]
    return (torch.stack(losses).sum() / len(losses)).item()


def _as_a_tensor(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> Any:
    return torch.tensor(torch_evaluation(model, batches))


@torch.no_grad()
def _left_in_eval(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> float:
    model.eval()
    return torch_evaluation(model, batches)


@torch.no_grad()
def _sum_of_losses(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> float:
    return float(np.sum([float(model(**batch).loss) for batch in batches]))


@torch.no_grad()
def _last_loss(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> float:
    return [float(model(**batch).loss) for batch in batches][-1]


@torch.no_grad()
def _counted(model: Any, batches: Any) -> float:
    return sum(float(model(**batch).loss) for batch in batches) / len(batches)


def _freed_by_backward(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> float:
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
    return float(np.mean(losses))


def _clinic_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, shapes: list[list[int]], train: bool = True) -> Case:
        batches, chosen = [], []
        for lengths in shapes:
            batch = _micro_batch(rng, lengths, 2, pairs=True)
            original = torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])
            places = (torch.from_numpy(rng.random(original.shape)) < 0.4) & (
                batch["attention_mask"] == 1
            )
            places[0, :3] = torch.tensor([True, False, True])
            masked = places & (torch.from_numpy(rng.random(original.shape)) < 0.6)
            ids = batch["input_ids"].masked_fill(masked, 4)
            batches.append({**batch, "input_ids": ids, "labels": original})
            chosen.append(places)
        state = _guesser_state(rng)
        return Case(name, {"batches": batches, "chosen": chosen, "state": state, "train": train})

    yield case("one batch, no padding", [[5, 5]])
    yield case("six batches with padding", [[5, 3, 4], [6], [4, 7], [3, 3], [5], [4, 6]])
    yield case("four batches, a model in eval mode", [[7, 3], [4], [5, 6, 3], [6]], train=False)


def _clinic_probe(
    part: Any,
    batches: list[dict[str, Tensor]],
    chosen: list[Tensor],
    state: dict[str, Tensor],
    train: bool,
) -> dict[str, Any]:
    device = state["words"].device
    batches = [{name: x.to(device) for name, x in batch.items()} for batch in batches]
    mended = part.mend_labels(batches[0], chosen[0].to(device))
    model = Remembered(state).train(train)
    model.get_parameter("mix").grad = torch.ones_like(model.get_parameter("mix"))
    value = part.mend_evaluation(model, (batch for batch in batches))
    gradient = model.get_parameter("mix").grad
    return {
        "names in the mended batch": sorted(mended),
        "labels of the mended batch": mended.get("labels"),
        "all else is as it was": all(
            torch.equal(mended[name], batches[0][name])
            for name in mended
            if name != "labels" and name in batches[0]
        ),
        "kind of the mean loss": type(value).__name__,
        "mean loss": torch.as_tensor(float(value), dtype=state["words"].dtype),
        "batches of which the forward pass was still held": min(model.held, 2),
        "mode of the model afterwards": model.training,
        "the gradients are as they were": gradient is not None and bool((gradient == 1).all()),
    }


class Remembered(Guesser):
    """A `Guesser` that counts of how many earlier calls the graph is still held."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__(state)
        self.alive: list[Any] = []
        self.held = 0

    def forward(self, *args: Any, **batch: Any) -> Any:
        import weakref

        self.held = max(self.held, sum(node() is not None for node in self.alive))
        output = super().forward(*args, **batch)
        graph = output.loss.grad_fn
        if graph is not None:
            kept = Held()
            graph.metadata["held"] = kept
            self.alive.append(weakref.ref(kept))
        return output


class Held:
    """Something that lives as long as what it hangs on."""


CLINIC = Exercise(
    id="6.7",
    reference={"mend_labels": torch_labels, "mend_evaluation": torch_evaluation},
    reference_name="torch.where, torch.no_grad",
    cases=_clinic_cases,
    probe=_clinic_probe,
    misconceptions=(
        Misconception(
            "only padding loses its labels",
            "The model no longer learns to say [PAD], but six of seven labels still ask for a word "
            "that stands in plain sight. Only the chosen places keep theirs.",
            _relabelled(
                lambda batch, chosen: batch["labels"].masked_fill(
                    batch["attention_mask"] == 0, -100
                )
            ),
        ),
        Misconception(
            "only places with [MASK] keep their labels",
            "The tokens that were exchanged and those that were left as they are count too: that "
            "is why they are there. `chosen` has all three kinds.",
            _relabelled(
                lambda batch, chosen: batch["labels"].masked_fill(batch["input_ids"] != 4, -100)
            ),
        ),
        Misconception(
            "the chosen places lose their labels",
            "It is the wrong way round: where `chosen` is True the label stays, and everywhere "
            "else it becomes -100, which the loss does not look at.",
            _relabelled(lambda batch, chosen: batch["labels"].masked_fill(chosen, -100)),
        ),
        Misconception(
            "labels are 0 elsewhere",
            "0 is an id like any other, that of [PAD], and the model would learn to answer "
            "with it. Cross-entropy looks away at -100.",
            _relabelled(lambda batch, chosen: batch["labels"].masked_fill(~chosen, 0)),
        ),
        Misconception(
            "the batch is changed in place",
            "The original ids are gone for whoever holds the batch and wants to read it again. "
            "Return a new dict, with new labels.",
            {"mend_labels": _in_place},
        ),
        Misconception(
            "what else is in the batch is lost",
            "There may be token types, a mask and labels of pairs, and the model needs them, "
            "too. `{**batch, 'labels': ...}` keeps all of them.",
            {"mend_labels": _labels_alone},
        ),
        Misconception(
            "the losses keep their graphs",
            "A loss is not a number but the end of a graph, which holds every layer's activations. "
            "As long as the losses are in a list or a sum, all of it stays. Evaluate under "
            "`torch.no_grad()`, or add up `loss.item()`.",
            {"mend_evaluation": _as_it_is},
        ),
        Misconception(
            "a tensor comes back",
            "The contract says a float, because a tensor may keep its graph and its place on "
            "the GPU: `.item()` or `float(...)` gives the number.",
            {"mend_evaluation": _as_a_tensor},
        ),
        Misconception(
            "the model is left in eval mode",
            "The mode is not yours to change here: if the model is in training mode, somebody "
            "is training it and goes on afterwards.",
            {"mend_evaluation": _left_in_eval},
        ),
        Misconception(
            "the losses are summed up",
            "The mean was asked for, which does not grow with the number of batches: divide "
            "the sum by how many there were.",
            {"mend_evaluation": _sum_of_losses},
        ),
        Misconception(
            "only the last batch counts",
            "A variable that is overwritten in the loop holds the loss of the last batch when "
            "the loop ends. Add them up on the way.",
            {"mend_evaluation": _last_loss},
        ),
        Misconception(
            "the batches must be a list",
            "They may be made one by one, as they are asked for, and then there is no `len`. "
            "Count them as they come.",
            {"mend_evaluation": _counted},
        ),
        Misconception(
            "the graphs are freed by computing gradients",
            "`backward()` frees the activations, but it costs twice the forward pass and changes "
            "the gradients of a training that is under way. Nothing is to be learned here: "
            "`torch.no_grad()`.",
            {"mend_evaluation": _freed_by_backward},
        ),
    ),
    hints=(
        "Compare the labels with those that exercise 6.1 makes. And ask of the sum what it holds "
        "besides a number: print it.",
        "`labels.masked_fill(~chosen, -100)` in a new dict. For the evaluation: "
        "`with torch.no_grad():`, or turn each loss into a number before it is added.",
        "return {**batch, 'labels': ...}; and in the loop total += model(**batch).loss.item(), "
        "count += 1.",
    ),
)

EXERCISES = [MASK, PAIR, SCHEDULE, OPTIMIZER, LOOP, ADAPT, CLINIC]
