"""Text to token ids and back, exactly as BERT does it (chapter 1).

The way of a text, one exercise each: `normalize` cleans it, `pre_tokenize` cuts it into words,
`wordpiece` cuts a word into pieces of the vocabulary, `train_wordpiece` makes such a vocabulary,
and `WordPieceTokenizer` joins them into what a model reads. The truth is
`transformers.BertTokenizer` (Rust): the same ids, spans and masks.
"""

import heapq
import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any, Literal, Self, overload

Span = tuple[int, int]  # a half-open range of character positions: (start, end)
Token = tuple[int, Span]  # the id of a piece, and where in the text it stands

# The order is Transformers' own for `all_special_ids`.
SPECIAL_TOKENS = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")

# The blocks of Chinese characters BERT puts spaces around (not Japanese kana, not Korean).
CJK_BLOCKS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
ASCII_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
ASCII_WORD_OR_MARK = re.compile(r"[^\s!-/:-@\[-`{-~]+|[!-/:-@\[-`{-~]")
PLAIN_ASCII = re.compile(r"[ -~\t\n\r]*")

SURROGATE = re.compile("[\ud800-\udfff]")
# A text with these must stay whole: `str.split` cuts at a white space that `normalize` drops, and
# a surrogate's place in the text must be known.
UNSPLITTABLE = re.compile("[\x0b\x0c\x1c-\x1f\x85\ud800-\udfff]")

# What Transformers' WordPiece decoder replaces, piece by piece, in this order.
CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def reject_surrogates(text: str) -> None:
    """Raise ValueError when text holds half of a surrogate pair, which is no character."""
    found = SURROGATE.search(text)
    if found:
        raise ValueError(
            f"text has a lone surrogate U+{ord(found[0]):04X} at position {found.start()}: it is "
            "half of a character and cannot be encoded; read the text again in its right encoding"
        )


def is_dropped(char: str) -> bool:
    """Whether BERT removes the character: NUL, U+FFFD, control, format and private-use ones.

    Tab, newline and carriage return are white space, not control characters.
    """
    if char in "\t\n\r":
        return False
    return char == "\ufffd" or unicodedata.category(char) in ("Cc", "Cf", "Co")


def is_cjk(char: str) -> bool:
    """Whether the character stands in one of the CJK blocks that BERT splits into characters."""
    return char >= "\u3400" and any(first <= ord(char) <= last for first, last in CJK_BLOCKS)


@cache
def is_punctuation(char: str) -> bool:
    """Whether BERT makes the character a word of its own: Unicode's P*, and all ASCII symbols."""
    return char in ASCII_PUNCTUATION or unicodedata.category(char).startswith("P")


def decompose(chars: list[str], origin: list[int]) -> tuple[list[str], list[int]]:
    """Take accented characters apart (Unicode's NFD): the characters, and where each came from.

    Marks that follow each other are sorted by combining class, as NFD asks. The origins stay
    ascending all the same: each first character of a decomposition takes the next, as in Rust.
    """
    parts = [
        (part, place == 0)
        for char in chars
        for place, part in enumerate(unicodedata.normalize("NFD", char))
    ]
    runs = groupby(parts, key=lambda item: unicodedata.combining(item[0]) > 0)
    parts = [
        item
        for _, run in runs
        for item in sorted(run, key=lambda item: unicodedata.combining(item[0]))
    ]
    sources = iter(origin)
    source = 0
    new_origin: list[int] = []
    for _, is_first in parts:
        source = next(sources) if is_first else source
        new_origin.append(source)
    return [part for part, _ in parts], new_origin


@overload
def normalize(
    text: str,
    lowercase: bool = True,
    strip_accents: bool | None = None,
    with_alignment: Literal[False] = False,
) -> str: ...
@overload
def normalize(
    text: str,
    lowercase: bool = True,
    strip_accents: bool | None = None,
    *,
    with_alignment: Literal[True],
) -> tuple[str, list[int]]: ...


# --- exercise 1.1: normalize ---
def normalize(
    text: str,
    lowercase: bool = True,
    strip_accents: bool | None = None,
    with_alignment: bool = False,
) -> str | tuple[str, list[int]]:
    """Clean a text as BERT does before it looks for words.

    Character by character, in this order: drop what `is_dropped` says; make each white-space
    character one space (runs of spaces stay); put a space before and after each CJK character;
    `decompose` and drop the accents (category Mn) when `strip_accents`; make each
    character lower case when `lowercase`.

    Args:
        text: any text.
        lowercase: False for a cased model.
        strip_accents: None does as `lowercase` does.
        with_alignment: also return where each character came from.

    Returns:
        The clean text; with alignment `(clean, origin)`, where `origin` is as long as `clean` and
        `text[origin[i]]` is the character that became `clean[i]`.

    Raises:
        ValueError: text has a lone surrogate; the message gives its position.

    Source: `BertNormalizer` of Hugging Face tokenizers; `BasicTokenizer` of google-research/bert.
    """
    raise NotImplementedError("exercise 1.1")
# --- end of exercise 1.1 ---


# --- exercise 1.2: pre-tokenize ---
def pre_tokenize(text: str) -> list[tuple[str, Span]]:
    """Cut a normalized text at white space, and make every punctuation mark a word of its own.

    Args:
        text: what `normalize` returned.

    Returns:
        `(word, (start, end))` for each word in order, with `text[start:end] == word`.

    Source: `BertPreTokenizer` of Hugging Face tokenizers.
    """
    raise NotImplementedError("exercise 1.2")
# --- end of exercise 1.2 ---


# --- exercise 1.3: greedy longest match ---
def wordpiece(
    word: str, vocab: Collection[str], unk_token: str = "[UNK]", max_chars: int = 100
) -> list[str]:
    """Cut a word into pieces of the vocabulary, the longest that fits first.

    A piece that does not begin the word is looked up with `##` before it. If at any place no
    piece fits, or the word has more than `max_chars` characters, the whole word is unknown.

    Args:
        word: one word, as `pre_tokenize` gives it.
        vocab: the known pieces; a dict or a set, so that `in` is fast.
        unk_token: what stands for an unknown word.
        max_chars: the longest word that is tried.

    Returns:
        The pieces; `[unk_token]` for an unknown word; `[]` for an empty one.

    Source: `WordpieceTokenizer` of google-research/bert; Wu et al. 2016, section 4.1.
    """
    raise NotImplementedError("exercise 1.3")
# --- end of exercise 1.3 ---


Pair = tuple[str, str]  # two symbols that stand side by side in a word


class PairCounts:
    """Words as symbols, and how often each symbol and each pair of neighbours occurs in them.

    At first each character is a symbol, with `##` before all but a word's first.

    Args:
        word_counts: how often each word occurs; words that occur 0 times are left out.

    Attributes:
        symbols: occurrences of each symbol over all words, times the words' counts.
        pairs: the same for each pair of neighbours; a pair that no longer occurs is no key.
    """

    def __init__(self, word_counts: Mapping[str, int]) -> None:
        self.symbols: Counter[str] = Counter()
        self.pairs: Counter[Pair] = Counter()
        self._word_counts = {word: count for word, count in word_counts.items() if word and count}
        self._spelling = {w: [w[0], *("##" + char for char in w[1:])] for w in self._word_counts}
        self._words: defaultdict[Pair, set[str]] = defaultdict(set)  # where a pair occurs
        self._pairs_of: defaultdict[str, set[Pair]] = defaultdict(set)  # what a symbol is part of
        for word in self._spelling:
            self._add(word)

    def join(self, pair: Pair, merged: str) -> set[Pair]:
        """Replace the pair by the symbol `merged` in every word, from left to right.

        Returns:
            All pairs with one of the three symbols: no other pair's score has changed.
        """
        for word in list(self._words[pair]):
            self._remove(word)
            self._spelling[word] = self._joined(self._spelling[word], pair, merged)
            self._add(word)
        return self._pairs_of[pair[0]] | self._pairs_of[pair[1]] | self._pairs_of[merged]

    @staticmethod
    def _joined(symbols: list[str], pair: Pair, merged: str) -> list[str]:
        joined: list[str] = []
        position = 0
        while position < len(symbols):
            found = tuple(symbols[position : position + 2]) == pair
            joined.append(merged if found else symbols[position])
            position += 2 if found else 1
        return joined

    def _add(self, word: str) -> None:
        symbols, count = self._spelling[word], self._word_counts[word]
        for symbol in symbols:
            self.symbols[symbol] += count
        for pair in pairwise(symbols):
            self.pairs[pair] += count
            self._words[pair].add(word)
            for symbol in pair:
                self._pairs_of[symbol].add(pair)

    def _remove(self, word: str) -> None:
        symbols, count = self._spelling[word], self._word_counts[word]
        for symbol in symbols:
            self.symbols[symbol] -= count
        for pair in pairwise(symbols):
            self.pairs[pair] -= count
            self._words[pair].discard(word)
            if not self.pairs[pair]:
                del self.pairs[pair]
                for symbol in pair:
                    self._pairs_of[symbol].discard(pair)


# --- exercise 1.4: learn a vocabulary ---
def train_wordpiece(
    word_counts: Mapping[str, int],
    vocab_size: int,
    special_tokens: Sequence[str] = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    rule: str = "wordpiece",
) -> list[str]:
    """Make a vocabulary by joining, again and again, the best pair of neighbouring symbols.

    A word starts as its characters, all but the first with `##`. The best pair has the highest
    `count(ab) / (count(a) * count(b))` (`rule="wordpiece"`; one division, so that equal fractions
    are equal) or the highest `count(ab)` (`rule="bpe"`); of equals, the lexicographically
    smallest. `PairCounts` (given in bertlab/tokenizer.py) counts and joins. Joining ends early
    when no pair is left. A piece that can be made in two ways is listed once.

    Args:
        word_counts: how often each word occurs.
        vocab_size: how many entries to make, special tokens and alphabet included.
        special_tokens: put first, in this order.
        rule: "wordpiece" or "bpe".

    Returns:
        special tokens, the alphabet sorted, then the joined pieces in the order they were made.

    Raises:
        ValueError: rule is unknown, or vocab_size is too small for special tokens and alphabet.

    Source: Schuster and Nakajima 2012 (the idea); Sennrich et al. 2016 (`rule="bpe"`).
    """
    raise NotImplementedError("exercise 1.4")
# --- end of exercise 1.4 ---


class Memo(dict[str, tuple[int, ...]]):
    """A dict that computes what it lacks, and starts afresh when it is full.

    Args:
        compute: makes the value of a key.
        limit: the most keys that are remembered.
        longest: a key with more characters is computed each time.
    """

    def __init__(
        self, compute: Callable[[str], Iterable[int]], limit: int = 2**18, longest: int = 100
    ) -> None:
        self.compute, self.limit, self.longest = compute, limit, longest

    def __missing__(self, key: str) -> tuple[int, ...]:
        value = tuple(self.compute(key))
        if len(key) <= self.longest:
            if len(self) >= self.limit:
                self.clear()
            self[key] = value
        return value


class TokenizerBase:
    """What a tokenizer needs beside its method: files, names, batches, padding.

    Args:
        vocab: the id of each piece, or the pieces in the order of their ids.
        lowercase: False for a cased model.
        strip_accents: None does as `lowercase` does.

    Raises:
        ValueError: the vocabulary lacks one of the five special tokens.
    """

    unk_token, sep_token, pad_token, cls_token, mask_token = SPECIAL_TOKENS

    def __init__(
        self,
        vocab: Mapping[str, int] | Sequence[str],
        lowercase: bool = True,
        strip_accents: bool | None = None,
    ) -> None:
        pairs = (
            vocab.items()
            if isinstance(vocab, Mapping)
            else ((piece, i) for i, piece in enumerate(vocab))
        )
        self.vocab: dict[str, int] = dict(pairs)
        missing = [token for token in SPECIAL_TOKENS if token not in self.vocab]
        if missing:
            raise ValueError(
                f"vocab has no {', '.join(missing)}; BERT's special tokens must be in it"
            )
        self.lowercase = lowercase
        self.strip_accents = strip_accents
        self.model_max_length: int | None = None  # None: no limit is known
        self.pieces: dict[int, str] = {i: piece for piece, i in self.vocab.items()}
        self.all_special_tokens = list(SPECIAL_TOKENS)
        self.all_special_ids = [self.vocab[token] for token in SPECIAL_TOKENS]
        (
            self.unk_token_id,
            self.sep_token_id,
            self.pad_token_id,
            self.cls_token_id,
            self.mask_token_id,
        ) = self.all_special_ids
        self.special_token = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
        self.memo = Memo(self.chunk_ids)

    def tokens_with_spans(self, text: str) -> list[Token]:
        """Exercise 1.5."""
        raise NotImplementedError

    def chunk_ids(self, chunk: str) -> list[int]:
        """Exercise 1.5."""
        raise NotImplementedError

    def encode(self, text: str, pair: str | None = None) -> list[int]:
        """Exercise 1.5."""
        raise NotImplementedError

    def truncated_lengths(
        self, first: int, second: int, room: int, strategy: str
    ) -> tuple[int, int]:
        """Exercise 1.5."""
        raise NotImplementedError

    def windows(self, tokens: list[Token], size: int, stride: int | None) -> list[list[Token]]:
        """Exercise 1.5."""
        raise NotImplementedError

    # Names, as Transformers has them.
    @property
    def vocab_size(self) -> int:
        """How many pieces the vocabulary has."""
        return len(self.vocab)

    def __len__(self) -> int:
        return len(self.vocab)

    def get_vocab(self) -> dict[str, int]:
        """A copy of the vocabulary: the id of each piece."""
        return dict(self.vocab)

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> str | list[str | None] | None:
        """The piece of an id, or of each id in a list; None where there is no such id."""
        if isinstance(ids, int):
            return self.pieces.get(ids)
        return [self.pieces.get(int(i)) for i in ids]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str] | tuple[str, ...]) -> list[int]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str] | tuple[str, ...]) -> int | list[int]:
        """The id of a piece, or of each piece in a list; [UNK]'s id where it is not known."""
        if isinstance(tokens, str):
            return self.vocab.get(tokens, self.unk_token_id)
        return [self.vocab.get(token, self.unk_token_id) for token in tokens]

    def tokenize(self, text: str) -> list[str]:
        """The pieces of a text as strings, without [CLS] and [SEP]."""
        return [self.pieces[i] for i in self.encode(text)[1:-1]]

    def split_special_tokens(self, text: str) -> list[tuple[str, int]]:
        """Cut a text before and after each special token written in it.

        Returns:
            `(part, start)` for each part, none empty.

        Raises:
            ValueError: text has a lone surrogate.
        """
        reject_surrogates(text)
        cuts = [
            0,
            *chain.from_iterable(found.span() for found in self.special_token.finditer(text)),
            len(text),
        ]
        return [(text[start:end], start) for start, end in pairwise(cuts) if start < end]

    # Files.
    @classmethod
    def from_vocab_file(
        cls, path: str | Path, lowercase: bool = True, strip_accents: bool | None = None
    ) -> Self:
        """Read a `vocab.txt`: one piece a line, the line's number is the id."""
        with open(path, encoding="utf-8") as lines:
            vocab = {line.rstrip("\n"): i for i, line in enumerate(lines)}
        return cls(vocab, lowercase, strip_accents)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path) -> Self:
        """Load a tokenizer that `save` or Transformers wrote; a cased model stays cased.

        Args:
            name_or_path: a folder with `vocab.txt` or `tokenizer.json` (and mostly
                `tokenizer_config.json`), or a hub name that is already in the local cache.

        Raises:
            FileNotFoundError: there is no such folder and no such name in the cache.
            ValueError: the files describe a tokenizer that is not BERT's.
        """
        folder = find_folder(name_or_path)
        config = read_json(folder / "tokenizer_config.json")
        full = read_json(folder / "tokenizer.json")
        normalizer = full.get("normalizer") or {}
        check_is_bert(folder, config, full)
        lowercase = config.get("do_lower_case", normalizer.get("lowercase", True))
        strip_accents = config.get("strip_accents", normalizer.get("strip_accents"))
        if (folder / "vocab.txt").exists():
            tokenizer = cls.from_vocab_file(folder / "vocab.txt", lowercase, strip_accents)
        else:
            tokenizer = cls(full["model"]["vocab"], lowercase, strip_accents)
        limit = config.get("model_max_length") or float("inf")
        # Transformers writes 10**30 where it knows no limit.
        tokenizer.model_max_length = int(limit) if limit < 10**20 else None
        return tokenizer

    def save(self, folder: str | Path) -> None:
        """Write `vocab.txt` and `tokenizer_config.json`, which Transformers' BertTokenizer loads.

        Raises:
            ValueError: the ids are not 0, 1, 2, ..., or a piece is empty or holds a line break.
        """
        pieces = sorted(self.vocab, key=self.vocab.__getitem__)
        if [self.vocab[piece] for piece in pieces] != list(range(len(pieces))):
            raise ValueError(
                "vocab.txt gives line n the id n, but the ids of this vocabulary have gaps"
            )
        broken = [piece for piece in pieces if not piece or "\n" in piece or "\r" in piece]
        if broken:
            raise ValueError(f"vocab.txt cannot hold the piece {broken[0]!r}: it is no single line")
        config: dict[str, Any] = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": self.lowercase,
            "strip_accents": self.strip_accents,
            "tokenize_chinese_chars": True,
        }
        for name in ("unk", "sep", "pad", "cls", "mask"):
            config[f"{name}_token"] = getattr(self, f"{name}_token")
        if self.model_max_length is not None:
            config["model_max_length"] = self.model_max_length
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "vocab.txt", "w", encoding="utf-8", newline="\n") as file:
            file.writelines(piece + "\n" for piece in pieces)
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2) + "\n", encoding="utf-8"
        )

    # Batches.
    def __call__(
        self,
        text: str | Sequence[str],
        pair: str | Sequence[str] | None = None,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        stride: int | None = None,
        return_offsets: bool = False,
    ) -> dict[str, Any]:
        """Encode a text or a list of texts, each alone or with a second one, for a model.

        Args:
            text: one text, or a list.
            pair: None, or the second text (the empty one too), or a list as long as `text`.
            padding: False; True or "longest" (to the longest of the call); "max_length".
            truncation: False; True or "longest_first"; "only_first"; "only_second". None is
                "longest_first" when `max_length` is given and `padding` is False, else False.
            max_length: in tokens, special ones included; `model_max_length` when None.
            stride: None cuts what is too long off; a number gives all of it, in windows of which
                each repeats so many tokens of the one before.
            return_offsets: also give `offsets`.

        Returns:
            `input_ids`, `token_type_ids` (1 for the second text and its [SEP]), `attention_mask`
            (0 for padding) and, when asked, `offsets` (each token's span in its text; (0, 0) for
            special tokens and padding). A flat list each for one text, else a list of lists. With
            `stride` always a list of lists, one a window, and `overflow_to_sample_mapping` says
            which text a window is of. The windows of a pair are all pairs of windows, the first
            with the first, then the others of the first text with each of the second, then the
            first with the others of the second, as in Transformers.

        Raises:
            ValueError: an unknown mode; a `max_length` or `stride` that leaves no room; a text
                that cannot be cut enough; lists of unlike length; a lone surrogate.
            TypeError: one of `text` and `pair` is a list and the other is not.
        """
        texts, pairs = as_batch(text, pair)
        strategy = truncation_strategy(padding, truncation, max_length)
        limit = self.model_max_length if max_length is None else max_length
        rows: list[tuple[list[Token], list[int]]] = []
        samples: list[int] = []
        for sample, (first, second) in enumerate(zip(texts, pairs, strict=True)):
            a, b = self._tokens(first, return_offsets), self._tokens(second, return_offsets)
            windows = self._pairs_of_windows(a, b, limit if strategy else None, strategy, stride)
            rows += [self._with_special_tokens(*window) for window in windows]
            samples += [sample] * len(windows)
        length = padded_length(padding, [len(tokens) for tokens, _ in rows], limit)
        batch = self._columns(rows, length, return_offsets)
        if stride is not None:
            return batch | {"overflow_to_sample_mapping": samples}
        return (
            {name: column[0] for name, column in batch.items()} if isinstance(text, str) else batch
        )

    def _tokens(self, text: str | None, with_spans: bool) -> list[Token] | None:
        if text is None:
            return None
        return (
            self.tokens_with_spans(text)
            if with_spans
            else [(i, (0, 0)) for i in self.encode(text)[1:-1]]
        )

    def _pairs_of_windows(
        self,
        first: list[Token] | None,
        second: list[Token] | None,
        limit: int | None,
        strategy: str | None,
        stride: int | None,
    ) -> list[tuple[list[Token], list[Token] | None]]:
        """The pieces of text that make one example each, cut to fit into `limit` tokens."""
        assert first is not None
        if limit is None or strategy is None:
            return [(first, second)]
        room = limit - (2 if second is None else 3)  # [CLS] and one [SEP] a text
        if room < 0:
            raise ValueError(
                f"max_length is {limit}, but the special tokens alone are {limit - room}"
            )
        if stride is not None and not 0 <= stride < max(limit - 2, 1):
            raise ValueError(
                f"stride is {stride}, but must be at least 0 and less than {limit - 2}, "
                "which is max_length without [CLS] and [SEP]"
            )
        lengths = self.truncated_lengths(len(first), len(second or []), room, strategy)
        a = self.windows(first, lengths[0], stride)
        if second is None:
            return [(window, None) for window in a]
        b = self.windows(second, lengths[1], stride)
        later = [(one, other) for one in a[1:] for other in b]
        return [(a[0], b[0]), *later, *((a[0], other) for other in b[1:])]

    def _with_special_tokens(
        self, first: list[Token], second: list[Token] | None
    ) -> tuple[list[Token], list[int]]:
        """[CLS] first [SEP] (second [SEP]), and the token types."""
        cls: Token = (self.cls_token_id, (0, 0))
        sep: Token = (self.sep_token_id, (0, 0))
        tokens = [cls, *first, sep]
        types = [0] * len(tokens)
        if second is not None:
            tokens += [*second, sep]
            types += [1] * (len(second) + 1)
        return tokens, types

    def _columns(
        self, rows: list[tuple[list[Token], list[int]]], length: int, with_offsets: bool
    ) -> dict[str, Any]:
        """Pad each row to at least `length` and turn the rows into named lists."""
        batch: dict[str, Any] = {"input_ids": [], "token_type_ids": [], "attention_mask": []}
        if with_offsets:
            batch["offsets"] = []
        for tokens, types in rows:
            padding = [0] * (length - len(tokens))
            batch["input_ids"].append([i for i, _ in tokens] + [self.pad_token_id] * len(padding))
            batch["token_type_ids"].append(types + padding)
            batch["attention_mask"].append([1] * len(tokens) + padding)
            if with_offsets:
                batch["offsets"].append([span for _, span in tokens] + [(0, 0)] * len(padding))
        return batch


# --- exercise 1.5: the whole tokenizer ---
class WordPieceTokenizer(TokenizerBase):
    """BERT's tokenizer: from text to what the model reads, and back.

    `TokenizerBase` (given in bertlab/tokenizer.py) gives the files, the names, batches and
    padding; here is the method. Arguments and errors are those of `TokenizerBase`.

    Source: `transformers.BertTokenizer`.
    """

    def tokens_with_spans(self, text: str) -> list[Token]:
        """The id of each piece of the text, and the span of the original text it stands for.

        A special token written in the text (`split_special_tokens` finds them) is one piece. An
        unknown word's [UNK] spans the whole word.

        Returns:
            `(id, (start, end))` for each piece, without [CLS] and [SEP].

        Raises:
            ValueError: text has a lone surrogate.
        """
        raise NotImplementedError("exercise 1.5")

    def chunk_ids(self, chunk: str) -> list[int]:
        """The ids of a text without white space; `self.memo[chunk]` calls this and remembers it.

        ASCII without special tokens needs no Unicode tables: a regular expression finds its words,
        and each of those is a chunk that may be remembered too.
        """
        raise NotImplementedError("exercise 1.5")

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of each text with [CLS] and [SEP], fast: no spans, and each chunk is cut once.

        White space always separates words, so a text is its chunks, and most chunks were seen
        before. The lists are new ones; the caller may change them.

        Raises:
            ValueError: a text has a lone surrogate.
        """
        raise NotImplementedError("exercise 1.5")

    def encode(self, text: str, pair: str | None = None) -> list[int]:
        """The ids of a text, `[CLS] text [SEP]`, or of a pair, `[CLS] text [SEP] pair [SEP]`.

        Raises:
            ValueError: a text has a lone surrogate.
        """
        raise NotImplementedError("exercise 1.5")

    def truncated_lengths(
        self, first: int, second: int, room: int, strategy: str
    ) -> tuple[int, int]:
        """How many tokens of each text are kept so that both fit into `room` tokens.

        "only_first" and "only_second" cut one text. "longest_first" leaves a text of at most half
        the room whole; two longer ones get half each, and an odd place goes to the longer text, to
        the second if they are equally long. `second` is 0 for a single text.

        Raises:
            ValueError: the text to cut is missing, or nothing of it would be left.
        """
        raise NotImplementedError("exercise 1.5")

    def windows(self, tokens: list[Token], size: int, stride: int | None) -> list[list[Token]]:
        """The tokens in windows of `size`, each repeating the last `stride` of the one before.

        The last window ends with the last token and may be shorter. `stride=None` gives the first
        window alone; tokens that fit are one window.

        Raises:
            ValueError: stride is not less than size where a cut is needed.
        """
        raise NotImplementedError("exercise 1.5")

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of ids: pieces with `##` are joined to the one before, others by a space.

        Then each of `CLEAN_UP`'s replacements is made in each piece (its space included), in
        order; so "." loses its space, and "don ' t" stays. An id that the vocabulary does not
        have is left out.

        Args:
            ids: token ids.
            skip_special_tokens: leave the five special tokens out.
        """
        raise NotImplementedError("exercise 1.5")
# --- end of exercise 1.5 ---


def as_batch(
    text: str | Sequence[str], pair: str | Sequence[str] | None
) -> tuple[Sequence[str], Sequence[str | None]]:
    """Both arguments of a call as lists of the same length."""
    if isinstance(text, str):
        if pair is not None and not isinstance(pair, str):
            raise TypeError(
                "text is one text, but pair is a list; give both as one text or both as lists"
            )
        return [text], [pair]
    if isinstance(pair, str):
        raise TypeError(
            "text is a list, but pair is one text; give both as one text or both as lists"
        )
    pairs = [None] * len(text) if pair is None else pair
    if len(pairs) != len(text):
        raise ValueError(f"text has {len(text)} texts, but pair has {len(pairs)}")
    return text, pairs


def truncation_strategy(
    padding: bool | str, truncation: bool | str | None, max_length: int | None
) -> str | None:
    """The strategy's name, or None for no truncation, from what the caller wrote."""
    if truncation is None:
        truncation = max_length is not None and padding is False
    strategy = {False: None, True: "longest_first", "do_not_truncate": None}.get(
        truncation, truncation
    )
    if strategy not in (None, "longest_first", "only_first", "only_second"):
        raise ValueError(
            f"truncation is {truncation!r}, but must be True, False, "
            '"longest_first", "only_first" or "only_second"'
        )
    return None if strategy is None else str(strategy)


def padded_length(padding: bool | str, lengths: list[int], limit: int | None) -> int:
    """How long each row of a batch becomes; 0 where nothing is padded."""
    if padding not in (False, True, "longest", "max_length", "do_not_pad"):
        raise ValueError(
            f'padding is {padding!r}, but must be True, False, "longest" or "max_length"'
        )
    if padding in (True, "longest"):
        return max(lengths, default=0)
    return (limit or 0) if padding == "max_length" else 0


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def find_folder(
    name_or_path: str | Path, files: tuple[str, ...] = ("vocab.txt", "tokenizer.json")
) -> Path:
    """The folder with one of `files`: the path itself, or the hub name's in the local cache."""
    folder = Path(name_or_path)
    if folder.is_dir():
        if any((folder / name).exists() for name in files):
            return folder
        raise FileNotFoundError(f"{folder} has neither {' nor '.join(files)}")
    from huggingface_hub import try_to_load_from_cache  # slow to import, and needed only here
    from huggingface_hub.errors import HFValidationError

    for name in files:
        try:
            cached = try_to_load_from_cache(str(name_or_path), name)
        except HFValidationError:  # a path, not a name
            break
        if isinstance(cached, str):
            return Path(cached).parent
    raise FileNotFoundError(
        f"{name_or_path} is no folder, and no {files[0]} of that name is in the local Hugging Face "
        f"cache; `bertlab download {name_or_path}` fetches it"
    )


def check_is_bert(folder: Path, config: dict[str, Any], full: dict[str, Any]) -> None:
    """Raise ValueError where the files ask for what this tokenizer does not do."""
    model = full.get("model", {}).get("type", "WordPiece")
    if model != "WordPiece":
        raise ValueError(f"{folder} holds a {model} tokenizer; BERT's is WordPiece")
    if not config.get("tokenize_chinese_chars", True):
        raise ValueError(
            f"{folder} has tokenize_chinese_chars false, which this tokenizer does not do"
        )
    added = [token["content"] for token in full.get("added_tokens", [])]
    unknown = [token for token in added if token not in SPECIAL_TOKENS]
    if unknown:
        raise ValueError(
            f"{folder} has added tokens, which this tokenizer does not know: {unknown}"
        )
