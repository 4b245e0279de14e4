"""Chapter 1: from text to token ids and back.

Nothing here imports PyTorch or Transformers: `tokenizers`, the Rust library behind
`transformers.BertTokenizer`, is the reference.
"""

import json
import re
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
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

from bertlab.course.exercise import Case, Exercise, Misconception
from bertlab.course.exercises.plain import error_of, pair, results, written

SPECIAL_TOKENS = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")

# --- drawing text --------------------------------------------------------------------------------


def _word(rng: np.random.Generator, syllables: int = 0) -> str:
    """Draw a word such as "retilo" or "sun"; the letters q, w, x, y and z are never in one."""
    count = syllables or int(rng.integers(1, 4))
    parts = [
        rng.choice(list("bcdfgklmnprst")) + rng.choice(list("aeiou")) for _ in range(count)
    ]
    return "".join(parts) + (rng.choice(list("nrst")) if rng.random() < 0.4 else "")


def _words(rng: np.random.Generator, count: int) -> list[str]:
    """Draw so many different words."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[_word(rng)] = None
    return list(found)


def _joined(rng: np.random.Generator, separators: Sequence[str], ends: bool = True) -> str:
    """Draw words with each of the separators between them, in any order, and at the ends too."""
    order = [separators[int(index)] for index in rng.permutation(len(separators))]
    text = "".join(_word(rng) + separator for separator in order) + _word(rng)
    return f"{rng.choice(separators)}{text}{rng.choice(separators)}" if ends else text


#: Blocks of Unicode from which characters of many scripts are drawn.
BLOCKS = (
    (0x20, 0x17F),  # Latin
    (0x384, 0x3CE),  # Greek
    (0x401, 0x45F),  # Cyrillic
    (0x5B0, 0x5EA),  # Hebrew
    (0x621, 0x652),  # Arabic
    (0x905, 0x939),  # Devanagari
    (0xE01, 0xE4E),  # Thai
    (0x1E00, 0x1EF9),  # Latin letters with two accents
    (0x2010, 0x2044),  # dashes, quotes
    (0x20A0, 0x20AC),  # currencies
    (0x2190, 0x21FF),  # arrows
    (0x2600, 0x2613),  # weather, stars
    (0x3001, 0x30FF),  # kana
    (0x4E00, 0x4EFF),  # Chinese
    (0xAC00, 0xACFF),  # Hangul
    (0x1D400, 0x1D433),  # mathematical letters
)


@cache
def _old_characters() -> tuple[tuple[str, ...], ...]:
    """Return the blocks' characters that are today what they were in Unicode 3.2.

    Tables of Unicode differ from version to version, Python's from Rust's. On these they agree.
    """
    old = unicodedata.ucd_3_2_0
    return tuple(
        tuple(
            char
            for char in map(chr, range(first, last + 1))
            if old.category(char) == unicodedata.category(char) != "Cn"
            and old.normalize("NFD", char) == unicodedata.normalize("NFD", char)
        )
        for first, last in BLOCKS
    )


def _any_script(rng: np.random.Generator) -> str:
    """Draw a short text of each block, in any order."""
    blocks = _old_characters()
    texts = [
        "".join(rng.choice(blocks[int(index)], int(rng.integers(2, 7))))
        for index in rng.permutation(len(blocks))
    ]
    return rng.choice(["", " "]).join(texts)


# --- 1.1 normalize -------------------------------------------------------------------------------

Normalized = str | tuple[str, list[int]]


def _aligned(normalizer: Any, text: str) -> tuple[str, list[int]]:
    """Return the normalized text, and for each of its characters where it came from.

    Rust keeps the alignment to itself, but gives a token's place in the original text. So each
    character of the normalized text is made a token.
    """
    characters = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    characters.normalizer = normalizer
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    clean = normalizer.normalize_str(text)
    return clean, [start for start, _ in characters.encode(text).offsets]


def _reject_surrogates(text: str) -> None:
    """Rust's strings cannot hold half of a surrogate pair; say so as the contract has it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text has a lone surrogate at position {error.start}") from None


def _bert(lowercase: bool = True, strip_accents: bool | None = None, **options: bool) -> Any:
    return normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, **options
    )


def _normalize_by(normalizer: Callable[[bool, bool | None], Any]) -> Callable[..., Normalized]:
    """Return a `normalize` that a Rust normalizer does, made for the two settings."""

    def normalize(
        text: str,
        lowercase: bool = True,
        strip_accents: bool | None = None,
        with_alignment: bool = False,
    ) -> Normalized:
        _reject_surrogates(text)
        made = normalizer(lowercase, strip_accents)
        return _aligned(made, text) if with_alignment else made.normalize_str(text)

    return normalize


their_normalize = _normalize_by(_bert)

WHITE_SPACE = ("\t", "\n", "\r", "\u00a0", "\u2003", "\u2028", "\u3000")
CONTROLS = ("\x00", "\x07", "\x7f", "\x9f", "\ufffd", "\ue000", "\u200b", "\u00ad", "\ufeff")
CONTROLS_LIKE_SPACE = ("\x0b", "\x0c", "\x1c", "\x1f", "\x85")
CHINESE = ("我", "爱", "北", "京", "龍", "㐀", "豈", "𠀀")
NOT_CHINESE = ("か", "カ", "ー", "각", "한", "ㄅ", "。", "々")
ACCENTED = ("é", "Ç", "Å", "ñ", "ü", "Š", "ệ", "Й", "ά", "e\u0301", "O\u0308", "q\u0327\u0301")
WITH_MARKS = ("हिन्दी पुस्तक", "שָׁלוֹם", "مُحَمَّد", "ที่นี่")
COMPATIBILITY = ("ﬁn", "½", "m²", "№", "™")


def _normalize_cases(rng: np.random.Generator) -> Iterator[Case]:
    def word() -> str:
        return _word(rng)

    def case(name: str, *texts: str, **options: Any) -> Case:
        return Case(name, {"texts": list(texts), "options": options})

    capitals = [f"{word().title()} {word().upper()}", f"{word()} ΟΔΟΣ {word()}ΑΣ", "Straße GROẞ"]
    yield case("capital letters, a sigma at the end of a word", *capitals)
    runs = [*WHITE_SPACE, "  ", "\t ", "\r\n"]
    yield case("all kinds of white space, in runs and at the ends", _joined(rng, runs), " \n ", "")
    yield case(
        "characters that are dropped",
        _joined(rng, CONTROLS, ends=False),
        _joined(rng, CONTROLS_LIKE_SPACE),
    )
    yield case(
        "Chinese characters, and Japanese and Korean ones that are not among them",
        _joined(rng, CHINESE),
        "".join(rng.permutation([*CHINESE, *NOT_CHINESE])),
    )
    accents = [
        _joined(rng, ACCENTED),
        _joined(rng, ("İ", *ACCENTED[:3])),
        " ".join(rng.permutation(WITH_MARKS)),
        " ".join(rng.permutation(COMPATIBILITY)) + f" {word().title()} 각",
    ]
    yield case("accents and other marks", *accents)
    yield case("accents in a cased model", *accents, lowercase=False)
    yield case("lower case, accents kept", *accents, strip_accents=False)
    yield case("cased, accents stripped", *accents, lowercase=False, strip_accents=True)
    yield case("characters of many scripts", _any_script(rng), _any_script(rng))
    mixed = " ".join(
        word() + str(rng.choice(list(part))) + word()
        for part in (CONTROLS[:4], ACCENTED, CHINESE, CONTROLS[4:], ACCENTED)
    )
    yield case("where each character came from", mixed, f"{word()}\u200b 我", with_alignment=True)
    yield case(
        "where each came from, one of them becoming two",
        f"{word()} İ{word()} {word()}",
        strip_accents=False,
        with_alignment=True,
    )
    spoiled = "".join(f"{word()} " for _ in range(60))[: int(rng.integers(100, 200))]
    half = str(rng.choice(["\ud83d", "\udc80"]))
    yield case("half of a character", f"{spoiled}{half} {word()}", wants="error")


def _normalize_probe(part: Any, texts: list[str], options: dict[str, Any]) -> dict[str, Any]:
    options = dict(options)
    if options.pop("wants", "") == "error":
        place = next(i for i, char in enumerate(texts[0]) if "\ud800" <= char <= "\udfff")
        return error_of(lambda: part.normalize(texts[0]), place, kind=ValueError)
    return results(
        (written("normalize", text, **options), lambda text=text: part.normalize(text, **options))
        for text in texts
    )


def _before(pattern: str, replacement: str) -> Callable[..., Any]:
    """Return BERT's normalizer with something replaced before it runs."""
    return lambda lowercase, strip: normalizers.Sequence(
        [normalizers.Replace(Regex(pattern), replacement), _bert(lowercase, strip)]
    )


def _after(*steps: Any) -> Callable[..., Any]:
    """Return BERT's normalizer with something done to its result."""
    return lambda lowercase, strip: normalizers.Sequence([_bert(lowercase, strip), *steps])


def _cleaned(keep: str) -> list[Any]:
    """Return the steps of cleaning, with some characters left as they are."""
    dropped = rf"[[\p{{Cc}}\p{{Cf}}\p{{Co}}\x{{fffd}}]&&[^\t\n\r{keep}]]"
    return [normalizers.Replace(Regex(dropped), "")]


def _white_space_kept(lowercase: bool, strip: bool | None) -> Any:
    return normalizers.Sequence([*_cleaned(""), _bert(lowercase, strip, clean_text=False)])


def _format_characters_kept(lowercase: bool, strip: bool | None) -> Any:
    space = normalizers.Replace(Regex(r"[\s&&[^\x0b\x0c\x1c-\x1f\x85]]"), " ")
    return normalizers.Sequence(
        [*_cleaned(r"\p{Cf}"), space, _bert(lowercase, strip, clean_text=False)]
    )


def _accents_by(*steps: Any) -> Callable[..., Any]:
    """Return BERT's normalizer with other steps where accents are to be stripped."""

    def normalizer(lowercase: bool, strip: bool | None) -> Any:
        if not (lowercase if strip is None else strip):
            return _bert(lowercase, strip)
        lower = [normalizers.Lowercase()] if lowercase else []
        made = [step() if callable(step) else step for step in steps]
        return normalizers.Sequence([_bert(False, False), *made, *lower])

    return normalizer


@cache
def _marks_that_combine() -> Any:
    """Return the step that drops the marks whose combining class is not 0."""
    marks = [char for char in map(chr, range(0x300, 0x3100)) if unicodedata.combining(char)]
    return normalizers.Replace(Regex(f"[{''.join(marks)}]"), "")


def _always_decomposed(lowercase: bool, strip: bool | None) -> Any:
    steps = [_bert(False, False), normalizers.NFD()]
    if lowercase if strip is None else strip:
        steps.append(normalizers.StripAccents())
    return normalizers.Sequence([*steps, *([normalizers.Lowercase()] if lowercase else [])])


def _changed(
    change: Callable[[str, list[int], bool, str], tuple[str, list[int]]], cased: bool = False
) -> Callable[..., Normalized]:
    """Return a `normalize` that changes the clean text and its origins afterwards.

    Args:
        change: from clean text, origins, `lowercase` and the text given.
        cased: make the text without lower case first.
    """

    def normalize(
        text: str,
        lowercase: bool = True,
        strip_accents: bool | None = None,
        with_alignment: bool = False,
    ) -> Normalized:
        strip = lowercase if strip_accents is None else strip_accents
        aligned = their_normalize(text, lowercase and not cased, strip, with_alignment=True)
        clean, origin = change(*pair(aligned, "(clean, origin)"), lowercase, text)
        return (clean, origin) if with_alignment else clean

    return normalize


def _among_the_kept(clean: str, origin: list[int], lowercase: bool, text: str) -> Any:
    """Count in the text from which the dropped characters are gone already."""
    kept = [char in "\t\n\r" or bool(_bert(False, False).normalize_str(char)) for char in text]
    return clean, [sum(kept[:place]) for place in origin]


def _surrogates_dropped(text: str, *args: Any, **options: Any) -> Normalized:
    return their_normalize(re.sub("[\ud800-\udfff]", "", text), *args, **options)


NORMALIZE = Exercise(
    id="1.1",
    reference={"normalize": their_normalize},
    reference_name="tokenizers.normalizers.BertNormalizer",
    cases=_normalize_cases,
    probe=_normalize_probe,
    misconceptions=(
        Misconception(
            "runs of white space are made one space",
            "Each white-space character becomes one space, and two of them become two. The words "
            "are the same either way, but every later character would move, and with it the "
            "spans that lead from a token back to the text.",
            {"normalize": _normalize_by(_after(normalizers.Replace(Regex(" +"), " ")))},
        ),
        Misconception(
            "white space at the ends is cut off",
            "A text that begins with a space keeps it. `strip()` does no harm to the words, but it "
            "moves every character to the left, and a span then points beside the word it means.",
            {"normalize": _normalize_by(_after(normalizers.Strip()))},
        ),
        Misconception(
            "tabs and line breaks are kept as they are",
            "Tab, line break, no-break space, ideographic space: each white-space character "
            "becomes the one plain space. `str.isspace` knows them all.",
            {"normalize": _normalize_by(_white_space_kept)},
        ),
        Misconception(
            "tabs and line breaks are dropped",
            "Tab, newline and carriage return are control characters by Unicode's category (Cc), "
            "but BERT counts them as white space. Dropped, they take the border between two words "
            "with them: the last word of a line and the first of the next become one.",
            {"normalize": _normalize_by(_before(r"[\t\n\r]", ""))},
        ),
        Misconception(
            "vertical tabs and the like become spaces instead of being dropped",
            "`str.isspace` is true of \\x0b, \\x0c, \\x1c to \\x1f and \\x85 as well, but BERT drops "
            "them as control characters, so that the letters around them form one word. Ask "
            "`is_dropped` before you ask `isspace`.",
            {"normalize": _normalize_by(_before(r"[\x0b\x0c\x1c-\x1f\x85]", " "))},
        ),
        Misconception(
            "invisible format characters are kept",
            "Soft hyphens, zero-width spaces and byte-order marks have the category Cf, not Cc. "
            "They cannot be seen, and a word with one of them inside looks right and is in no "
            "vocabulary. BERT drops them; `is_dropped` knows them.",
            {"normalize": _normalize_by(_format_characters_kept)},
        ),
        Misconception(
            "Chinese characters get no spaces",
            "Chinese is written without spaces, so BERT makes each of its characters a word by "
            "putting a space before and after it. Without them a whole sentence is one word, and "
            "one unknown character makes all of it [UNK].",
            {
                "normalize": _normalize_by(
                    lambda lowercase, strip: _bert(lowercase, strip, handle_chinese_chars=False)
                )
            },
        ),
        Misconception(
            "accents stay where strip_accents is not given",
            "None does not mean no: it means 'as `lowercase` says'. A plain `if strip_accents:` is "
            "false for None, and an uncased model then meets é, for which its vocabulary has no "
            "piece.",
            {
                "normalize": _normalize_by(
                    lambda lowercase, strip: _bert(lowercase, strip or False)
                )
            },
        ),
        Misconception(
            "accents go where strip_accents is not given, in a cased model too",
            "None means 'as `lowercase` says', and a cased model keeps its accents: its vocabulary "
            "has é.",
            {
                "normalize": _normalize_by(
                    lambda lowercase, strip: _bert(lowercase, strip is not False)
                )
            },
        ),
        Misconception(
            "strip_accents is ignored",
            "Accents follow `lowercase` only where `strip_accents` is None. There are models that "
            "lower-case and keep accents (a German one, say, for which schon and schön are two "
            "words), so True and False must be obeyed.",
            {"normalize": _normalize_by(lambda lowercase, strip: _bert(lowercase))},
        ),
        Misconception(
            "lowercase is ignored",
            "A cased model has pieces for Paris and for paris. With `lowercase=False` letters stay "
            "as they are.",
            {
                "normalize": _normalize_by(
                    lambda lowercase, strip: _bert(True, lowercase if strip is None else strip)
                )
            },
        ),
        Misconception(
            "all that is not ASCII is dropped with the accents",
            "`text.encode('ascii', 'ignore')` after decomposing takes accents away, and with them "
            "Greek, Cyrillic, Arabic, Chinese and the German ß. Drop only what is a mark: "
            "characters of category Mn.",
            {
                "normalize": _normalize_by(
                    _accents_by(
                        normalizers.NFD(), normalizers.Replace(Regex(r"[^\x00-\x7f]"), "")
                    )
                )
            },
        ),
        Misconception(
            "accents are taken off the letter and left beside it",
            "Decomposing makes two characters of é, e and a combining mark. The mark is still "
            "there, and the screen shows é as before. Drop the characters of category Mn after "
            "decomposing.",
            {"normalize": _normalize_by(_accents_by(normalizers.NFD()))},
        ),
        Misconception(
            "only marks with a combining class are dropped",
            "`unicodedata.combining` gives the class by which marks are sorted, and 0 for some of "
            "them, such as the vowel signs of Hindi and Thai. What BERT drops is the category Mn.",
            {"normalize": _normalize_by(_accents_by(normalizers.NFD(), _marks_that_combine))},
        ),
        Misconception(
            "ligatures and fractions are taken apart (NFKD)",
            "NFKD also replaces what only looks related: ﬁ by fi, ½ by 1⁄2, ² by 2, ™ by TM. BERT "
            "uses NFD, which takes apart only letters with marks.",
            {
                "normalize": _normalize_by(
                    _accents_by(normalizers.NFKD(), normalizers.StripAccents())
                )
            },
        ),
        Misconception(
            "the text is decomposed even if accents are kept",
            "Where accents stay, é stays one character. Decomposed, it is two, and the vocabulary "
            "of a cased model, which has é as one, does not know it.",
            {"normalize": _normalize_by(_always_decomposed)},
        ),
        Misconception(
            "the text is lower-cased as a whole",
            "Python's `lower` looks at the whole word for one letter: at the end of a word Σ "
            "becomes ς, elsewhere σ. BERT lower-cases each character alone and writes σ everywhere. "
            "Join `char.lower()` for each character.",
            {
                "normalize": _changed(
                    lambda clean, origin, lowercase, text: (
                        clean.lower() if lowercase else clean,
                        origin,
                    ),
                    cased=True,
                )
            },
        ),
        Misconception(
            "casefold is used for lower case",
            "`casefold` is for comparing and goes further than `lower`: ß becomes ss, ς becomes σ. "
            "The vocabulary was made with `lower`.",
            {
                "normalize": _changed(
                    lambda clean, origin, lowercase, text: (
                        "".join(char.casefold() for char in clean) if lowercase else clean,
                        origin,
                    ),
                    cased=True,
                )
            },
        ),
        Misconception(
            "origin counts along the clean text",
            "`origin` leads back: `origin[i]` is the place in the text *before* normalizing. From "
            "the first dropped or added character on, that is no longer i.",
            {
                "normalize": _changed(
                    lambda clean, origin, lowercase, text: (clean, list(range(len(clean))))
                )
            },
        ),
        Misconception(
            "origin does not count the dropped characters",
            "Your places are those in the text after control characters are gone. The caller has "
            "the text before that. Number the characters first, with `enumerate(text)`, and drop "
            "them with their numbers.",
            {"normalize": _changed(_among_the_kept)},
        ),
        Misconception(
            "origin has one place where a character becomes two",
            "`len(char.lower())` is not always 1: İ becomes i and a combining dot. Both come from "
            "the same character, so its place stands in `origin` twice, and `origin` stays as long "
            "as the clean text.",
            {
                "normalize": _changed(
                    lambda clean, origin, lowercase, text: (
                        clean,
                        [p for i, p in enumerate(origin) if i == 0 or clean[i] != "\u0307"],
                    )
                )
            },
        ),
        Misconception(
            "half of a surrogate pair is let through",
            "A lone surrogate is no character: it comes from text that was read in the wrong "
            "encoding, and no tokenizer in Rust accepts it. Dropping it in silence hides the "
            "damage. `reject_surrogates` raises a ValueError that says where it is.",
            {"normalize": _surrogates_dropped},
        ),
    ),
    hints=(
        "First reject lone surrogates and settle what `strip_accents=None` means. Then go through "
        "`enumerate(text)` and keep two lists side by side: the characters of the clean text, and "
        "the index that each came from.",
        "A character that `is_dropped` is skipped; a white-space one gives a space; one that "
        "`is_cjk` gives three characters, all with the same index. `decompose(chars, origin)` "
        "takes letters and accents apart in both lists; then keep what is not of category Mn.",
        "Lower-case at the end, one character at a time, and remember that `char.lower()` may be "
        "longer than 1: its index then stands in `origin` as often. The text is the joined "
        "characters; with alignment, return it together with the indices.",
    ),
)

EXERCISES = [NORMALIZE]
