"""The Rust tokenizer behind `transformers.BertTokenizer`, part by part, under this course's names.

Chapter 1 compares with it, and it stands in for what is not done yet. Neither PyTorch nor
Transformers is imported.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import (
    Encoding,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

SPECIAL_TOKENS = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")

Span = tuple[int, int]
Token = tuple[int, Span]
Words = list[tuple[str, Span]]
Normalized = str | tuple[str, list[int]]

# --- the parts -----------------------------------------------------------------------------------


def aligned(normalizer: Any, text: str) -> tuple[str, list[int]]:
    """Return the normalized text, and for each of its characters where it came from.

    Rust keeps the alignment to itself, but gives a token's place in the original text. So each
    character of the normalized text is made a token.
    """
    characters = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    characters.normalizer = normalizer
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    clean = normalizer.normalize_str(text)
    return clean, [start for start, _ in characters.encode(text).offsets]


def reject_surrogates(text: str) -> None:
    """Rust's strings cannot hold half of a surrogate pair; say so as the contract has it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text has a lone surrogate at position {error.start}") from None


def bert_normalizer(
    lowercase: bool = True, strip_accents: bool | None = None, **options: bool
) -> Any:
    """Return Rust's normalizer for BERT with BERT's own defaults."""
    return normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents, **options)


def normalize_by(normalizer: Callable[[bool, bool | None], Any]) -> Callable[..., Normalized]:
    """Return a `normalize` that a Rust normalizer does, made for the two settings."""

    def normalize(
        text: str,
        lowercase: bool = True,
        strip_accents: bool | None = None,
        with_alignment: bool = False,
    ) -> Normalized:
        reject_surrogates(text)
        made = normalizer(lowercase, strip_accents)
        return aligned(made, text) if with_alignment else made.normalize_str(text)

    return normalize


their_normalize = normalize_by(bert_normalizer)


def their_pre_tokenize(text: str) -> Words:
    """Return the words and marks that Rust's BertPreTokenizer finds."""
    return pre_tokenizers.BertPreTokenizer().pre_tokenize_str(text)


def possible_pieces(word: str, vocab: Collection[str]) -> list[str]:
    """Return the pieces of a vocabulary that a word could be cut into: Rust needs no others."""
    longest = len(word) if len(word) < 40 else max(map(len, vocab), default=0)
    ends = range(1, len(word) + 1)
    parts = {word[start:end] for end in ends for start in range(max(end - longest, 0), end)}
    return sorted(piece for part in parts for piece in (part, "##" + part) if piece in vocab)


def rust_pieces(
    word: str, pieces: Iterable[str], unk_token: str, max_chars: int, prefix: str = "##"
) -> list[str]:
    """Return the pieces, of those given, into which Rust's WordPiece cuts a word."""
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys([*pieces, unk_token]))}
    model = models.WordPiece(
        vocab,
        unk_token=unk_token,
        max_input_chars_per_word=max_chars,
        continuing_subword_prefix=prefix,
    )
    return [token.value for token in model.tokenize(word)]


def their_wordpiece(
    word: str, vocab: Collection[str], unk_token: str = "[UNK]", max_chars: int = 100
) -> list[str]:
    """Return the pieces into which Rust's WordPiece cuts a word."""
    pieces = possible_pieces(word, vocab) if len(word) <= max_chars else []
    return rust_pieces(word, pieces, unk_token, max_chars)


# --- the whole -----------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _both_ways(
    pieces: tuple[str, ...], ids: Sequence[int]
) -> tuple[dict[str, int], dict[int, str]]:
    """Return each piece's id and each id's piece; made once, for it takes a while."""
    return dict(zip(pieces, ids, strict=True)), dict(zip(ids, pieces, strict=True))


@lru_cache(maxsize=8)
def assembled(
    pieces: tuple[str, ...],
    ids: Sequence[int],
    lowercase: bool,
    strip_accents: bool | None,
    special_tokens_whole: bool = True,
) -> Tokenizer:
    """Put Rust's parts together as `transformers.BertTokenizer` does."""
    vocab = dict(zip(pieces, ids, strict=True))
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.add_special_tokens(list(SPECIAL_TOKENS))
    made.encode_special_tokens = not special_tokens_whole
    made.normalizer = bert_normalizer(lowercase, strip_accents)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(
        ("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"])
    )
    made.decoder = decoders.WordPiece()
    return made


@cache
def _counting() -> Tokenizer:
    """Return a tokenizer that knows one word, to see what Rust's truncation leaves of many."""
    return Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))


class RustTokenizer:
    """The Rust tokenizer behind `transformers.BertTokenizer`, under this course's names."""

    unk_token, sep_token, pad_token, cls_token, mask_token = SPECIAL_TOKENS

    def __init__(
        self,
        vocab: Mapping[str, int] | Sequence[str],
        lowercase: bool = True,
        strip_accents: bool | None = None,
    ) -> None:
        missing = [token for token in SPECIAL_TOKENS if token not in vocab]
        if missing:
            raise ValueError(f"vocab has no {', '.join(missing)}")
        ids = tuple(vocab.values()) if isinstance(vocab, Mapping) else range(len(vocab))
        self.order = tuple(vocab), ids
        known = _both_ways(*self.order)
        self.vocab, self.pieces = dict(known[0]), dict(known[1])
        self.rust = assembled(*self.order, lowercase, strip_accents)
        self.lowercase, self.strip_accents = lowercase, strip_accents
        self.model_max_length: int | None = None
        self.all_special_tokens = list(SPECIAL_TOKENS)
        self.all_special_ids = [self.vocab[token] for token in SPECIAL_TOKENS]
        (
            self.unk_token_id,
            self.sep_token_id,
            self.pad_token_id,
            self.cls_token_id,
            self.mask_token_id,
        ) = self.all_special_ids

    # Files.
    @classmethod
    def from_vocab_file(
        cls, path: str | Path, lowercase: bool = True, strip_accents: bool | None = None
    ) -> Any:
        return cls(_lines(Path(path), Path(path).stat().st_mtime_ns), lowercase, strip_accents)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path) -> Any:
        folder = _tokenizer_folder(name_or_path)
        listed = (folder / "vocab.txt").exists()
        config = _json(folder / "tokenizer_config.json")
        full = {} if listed and config else _json(folder / "tokenizer.json")
        normalizer = full.get("normalizer") or {}
        settings = (
            config.get("do_lower_case", normalizer.get("lowercase", True)),
            config.get("strip_accents", normalizer.get("strip_accents")),
        )
        if listed:
            made = cls.from_vocab_file(folder / "vocab.txt", *settings)
        else:
            made = cls(full["model"]["vocab"], *settings)
        limit = config.get("model_max_length") or 10**30
        made.model_max_length = int(limit) if limit < 10**20 else None
        return made

    def save(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.rust.model.save(str(folder))
        config: dict[str, Any] = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": self.lowercase,
            "strip_accents": self.strip_accents,
        }
        if self.model_max_length is not None:
            config["model_max_length"] = self.model_max_length
        file = Path(folder) / "tokenizer_config.json"
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    # Names.
    @property
    def vocab_size(self) -> int:
        return len(self.vocab)

    def __len__(self) -> int:
        return len(self.vocab)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.vocab)

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> Any:
        if isinstance(ids, int):
            return self.pieces.get(ids)
        return [self.pieces.get(int(index)) for index in ids]

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        if isinstance(tokens, str):
            return self.vocab.get(tokens, self.unk_token_id)
        return [self.vocab.get(token, self.unk_token_id) for token in tokens]

    # Text to ids and back.
    def _encoded(self, text: str, pair: str | None = None, special: bool = True) -> Encoding:
        for given in (text, pair or ""):
            reject_surrogates(given)
        return self.rust.encode(text, pair, add_special_tokens=special)

    def tokenize(self, text: str) -> list[str]:
        return self._encoded(text, special=False).tokens

    def tokens_with_spans(self, text: str) -> list[Token]:
        encoding = self._encoded(text, special=False)
        return list(zip(encoding.ids, encoding.offsets, strict=True))

    def encode(self, text: str, pair: str | None = None) -> list[int]:
        return self._encoded(text, pair).ids

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        given = list(texts)
        for text in given:
            reject_surrogates(text)
        return [encoding.ids for encoding in self.rust.encode_batch_fast(given)]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        return self.rust.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def truncated_lengths(
        self, first: int, second: int, room: int, strategy: str
    ) -> tuple[int, int]:
        counting = _counting()
        counting.enable_truncation(room, strategy=strategy)
        try:
            left = counting.encode(["a"] * first, ["a"] * second, is_pretokenized=True)
        except Exception as error:  # Rust's errors have no type of their own
            raise ValueError(f"truncation is {strategy!r}: {error}") from None
        finally:
            counting.no_truncation()
        return left.sequence_ids.count(0), left.sequence_ids.count(1)

    def windows(self, tokens: list[Any], size: int, stride: int | None) -> list[list[Any]]:
        if stride is not None and len(tokens) > size and stride >= size:
            raise ValueError(f"stride is {stride}, but a window has {size} tokens")
        words = [str(index) for index in range(len(tokens))]
        places = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "?"))
        encoding = places.encode(words, is_pretokenized=True)
        encoding.truncate(size, stride=stride or 0)
        found = [encoding, *(encoding.overflowing if stride is not None else [])]
        return [[tokens[index] for index in window.ids] for window in found]

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
        texts, pairs = _as_lists(text, pair)
        strategy = _strategy(truncation, padding, max_length)
        limit = self.model_max_length if max_length is None else max_length
        if strategy is not None and limit is not None:
            self._check_room(texts, pairs, limit, strategy, stride)
            self.rust.enable_truncation(limit, stride=stride or 0, strategy=strategy)
        try:
            encodings = [self._encoded(*both) for both in zip(texts, pairs, strict=True)]
        except ValueError:
            raise
        except Exception as error:  # Rust's errors have no type of their own
            raise ValueError(f"truncation is {strategy!r}: {error}") from None
        finally:
            self.rust.no_truncation()
        rows = [
            (sample, row)
            for sample, encoding in enumerate(encodings)
            for row in [encoding, *(encoding.overflowing if stride is not None else [])]
        ]
        length = _padded(padding, [len(row) for _, row in rows], limit)
        for _, row in rows:
            row.pad(length, pad_id=self.pad_token_id, pad_token=self.pad_token)
        batch: dict[str, Any] = {
            "input_ids": [row.ids for _, row in rows],
            "token_type_ids": [row.type_ids for _, row in rows],
            "attention_mask": [row.attention_mask for _, row in rows],
        }
        if return_offsets:
            batch["offsets"] = [row.offsets for _, row in rows]
        if stride is not None:
            return {**batch, "overflow_to_sample_mapping": [sample for sample, _ in rows]}
        if isinstance(text, str):
            return {name: column[0] for name, column in batch.items()}
        return batch

    def _check_room(
        self,
        texts: Sequence[str],
        pairs: Sequence[str | None],
        limit: int,
        strategy: str,
        stride: int | None,
    ) -> None:
        """Refuse what Rust would not say a word about, or would panic on."""
        if stride is not None and not 0 <= stride < max(limit - 2, 1):
            raise ValueError(f"stride is {stride}, but max_length is {limit}")
        for text, other in zip(texts, pairs, strict=True):
            room = limit - (2 if other is None else 3)
            if room < 0:
                raise ValueError(f"max_length is {limit}, less than the special tokens alone")
            if stride is None:
                continue
            lengths = [len(self.tokens_with_spans(given or "")) for given in (text, other)]
            kept = self.truncated_lengths(lengths[0], lengths[1], room, strategy)
            for length, size in zip(lengths, kept, strict=True):
                if length > size and stride >= size:
                    raise ValueError(f"stride is {stride}, but a window has {size} tokens")


@lru_cache(maxsize=2)
def _lines(path: Path, changed: int) -> tuple[str, ...]:
    """Return a file's lines; read again only if it has changed."""
    return tuple(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"))


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _tokenizer_folder(name_or_path: str | Path) -> Path:
    names = ("vocab.txt", "tokenizer.json")
    folder = Path(name_or_path)
    if any((folder / name).exists() for name in names):
        return folder
    if not folder.exists():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = [try_to_load_from_cache(str(name_or_path), name) for name in names]
        except HFValidationError:  # a path, not a name
            cached = []
        for file in cached:
            if isinstance(file, str):
                return Path(file).parent
    raise FileNotFoundError(f"there is no tokenizer {name_or_path} on this machine")


def _as_lists(text: Any, pair: Any) -> tuple[Sequence[str], Sequence[str | None]]:
    if pair is not None and isinstance(text, str) != isinstance(pair, str):
        raise TypeError("text and pair must both be one text, or both be lists")
    if isinstance(text, str):
        return [text], [pair]
    pairs = [None] * len(text) if pair is None else list(pair)
    if len(pairs) != len(text):
        raise ValueError(f"text has {len(text)} texts, but pair has {len(pairs)}")
    return list(text), pairs


def _strategy(truncation: Any, padding: bool | str, max_length: int | None) -> str | None:
    if truncation is None:
        truncation = max_length is not None and padding is False
    known = {False: None, True: "longest_first", "do_not_truncate": None}
    known |= {name: name for name in ("longest_first", "only_first", "only_second")}
    if truncation not in known:
        raise ValueError(f"truncation is {truncation!r}")
    return known[truncation]


def _padded(padding: bool | str, lengths: list[int], limit: int | None) -> int:
    if padding not in (False, True, "longest", "max_length", "do_not_pad"):
        raise ValueError(f"padding is {padding!r}")
    if padding in (True, "longest"):
        return max(lengths, default=0)
    return (limit or 0) if padding == "max_length" else 0
