"""Chapter 1: from text to token ids and back.

Nothing here imports PyTorch or Transformers: `tokenizers`, the Rust library behind
`transformers.BertTokenizer`, is the reference.
"""

import re
import tempfile
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from bertlab.course.exercise import Case, Exercise, Misconception
from bertlab.course.exercises.plain import error_of, pair, results, written
from bertlab.course.exercises.rust import (
    SPECIAL_TOKENS,
    Normalized,
    RustTokenizer,
    Span,
    Token,
    Words,
    assembled,
    bert_normalizer,
    normalize_by,
    possible_pieces,
    reject_surrogates,
    rust_pieces,
    their_normalize,
    their_pre_tokenize,
    their_wordpiece,
)

# --- drawing text --------------------------------------------------------------------------------


def _word(rng: np.random.Generator, syllables: int = 0) -> str:
    """Draw a word such as "retilo" or "sun"; the letters q, w, x, y and z are never in one."""
    count = syllables or int(rng.integers(1, 4))
    parts = [rng.choice(list("bcdfgklmnprst")) + rng.choice(list("aeiou")) for _ in range(count)]
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
        [normalizers.Replace(Regex(pattern), replacement), bert_normalizer(lowercase, strip)]
    )


def _after(*steps: Any) -> Callable[..., Any]:
    """Return BERT's normalizer with something done to its result."""
    return lambda lowercase, strip: normalizers.Sequence(
        [bert_normalizer(lowercase, strip), *steps]
    )


def _cleaned(keep: str) -> list[Any]:
    """Return the steps of cleaning, with some characters left as they are."""
    dropped = rf"[[\p{{Cc}}\p{{Cf}}\p{{Co}}\x{{fffd}}]&&[^\t\n\r{keep}]]"
    return [normalizers.Replace(Regex(dropped), "")]


def _white_space_kept(lowercase: bool, strip: bool | None) -> Any:
    return normalizers.Sequence(
        [*_cleaned(""), bert_normalizer(lowercase, strip, clean_text=False)]
    )


def _format_characters_kept(lowercase: bool, strip: bool | None) -> Any:
    space = normalizers.Replace(Regex(r"[\s&&[^\x0b\x0c\x1c-\x1f\x85]]"), " ")
    return normalizers.Sequence(
        [*_cleaned(r"\p{Cf}"), space, bert_normalizer(lowercase, strip, clean_text=False)]
    )


def _accents_by(*steps: Any) -> Callable[..., Any]:
    """Return BERT's normalizer with other steps where accents are to be stripped."""

    def normalizer(lowercase: bool, strip: bool | None) -> Any:
        if not (lowercase if strip is None else strip):
            return bert_normalizer(lowercase, strip)
        lower = [normalizers.Lowercase()] if lowercase else []
        made = [step() if callable(step) else step for step in steps]
        return normalizers.Sequence([bert_normalizer(False, False), *made, *lower])

    return normalizer


def _all_marks() -> Any:
    return normalizers.Replace(Regex(r"\p{M}"), "")


@cache
def _marks_that_combine() -> Any:
    """Return the step that drops the marks whose combining class is not 0."""
    marks = [char for char in map(chr, range(0x300, 0x3100)) if unicodedata.combining(char)]
    return normalizers.Replace(Regex(f"[{''.join(marks)}]"), "")


def _always_decomposed(lowercase: bool, strip: bool | None) -> Any:
    steps = [bert_normalizer(False, False), normalizers.NFD()]
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
    kept = [
        char in "\t\n\r" or bool(bert_normalizer(False, False).normalize_str(char)) for char in text
    ]
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
            {"normalize": normalize_by(_after(normalizers.Replace(Regex(" +"), " ")))},
        ),
        Misconception(
            "white space at the ends is cut off",
            "A text that begins with a space keeps it. `strip()` does no harm to the words, but it "
            "moves every character to the left, and a span then points beside the word it means.",
            {"normalize": normalize_by(_after(normalizers.Strip()))},
        ),
        Misconception(
            "tabs and line breaks are kept as they are",
            "Tab, line break, no-break space, ideographic space: each white-space character "
            "becomes the one plain space, so that later only that has to be looked for. "
            "`str.isspace` knows them all.",
            {"normalize": normalize_by(_white_space_kept)},
        ),
        Misconception(
            "tabs and line breaks are dropped",
            "Tab, newline and carriage return are control characters by Unicode's category (Cc), "
            "but BERT counts them as white space. Dropped, they take the border between two words "
            "with them: the last word of a line and the first of the next become one.",
            {"normalize": normalize_by(_before(r"[\t\n\r]", ""))},
        ),
        Misconception(
            "vertical tabs and the like become spaces instead of being dropped",
            "`str.isspace` is true of \\x0b, \\x0c, \\x1c to \\x1f and \\x85 as well, but BERT "
            "drops them as control characters, so that the letters around them form one word. Ask "
            "`is_dropped` before you ask `isspace`.",
            {"normalize": normalize_by(_before(r"[\x0b\x0c\x1c-\x1f\x85]", " "))},
        ),
        Misconception(
            "invisible format characters are kept",
            "Soft hyphens, zero-width spaces and byte-order marks have the category Cf, not Cc. "
            "They cannot be seen, and a word with one of them inside looks right and is in no "
            "vocabulary. BERT drops them; `is_dropped` knows them.",
            {"normalize": normalize_by(_format_characters_kept)},
        ),
        Misconception(
            "Chinese characters get no spaces",
            "Chinese is written without spaces, so BERT makes each of its characters a word by "
            "putting a space before and after it. Without them a whole sentence is one word, and "
            "one unknown character makes all of it [UNK].",
            {
                "normalize": normalize_by(
                    lambda lowercase, strip: bert_normalizer(
                        lowercase, strip, handle_chinese_chars=False
                    )
                )
            },
        ),
        Misconception(
            "accents stay where strip_accents is not given",
            "None does not mean no: it means 'as `lowercase` says'. A plain `if strip_accents:` is "
            "false for None, and an uncased model then meets é, for which its vocabulary has no "
            "piece.",
            {
                "normalize": normalize_by(
                    lambda lowercase, strip: bert_normalizer(lowercase, strip or False)
                )
            },
        ),
        Misconception(
            "accents go where strip_accents is not given, in a cased model too",
            "None means 'as `lowercase` says', and a cased model keeps its accents: its vocabulary "
            "has é, and résumé and resume are two words in it.",
            {
                "normalize": normalize_by(
                    lambda lowercase, strip: bert_normalizer(lowercase, strip is not False)
                )
            },
        ),
        Misconception(
            "strip_accents is ignored",
            "Accents follow `lowercase` only where `strip_accents` is None. There are models that "
            "lower-case and keep accents (a German one, say, for which schon and schön are two "
            "words), so True and False must be obeyed.",
            {"normalize": normalize_by(lambda lowercase, strip: bert_normalizer(lowercase))},
        ),
        Misconception(
            "lowercase is ignored",
            "A cased model has pieces for Turkey and for turkey, with different vectors. With "
            "`lowercase=False` letters stay as they are.",
            {
                "normalize": normalize_by(
                    lambda lowercase, strip: bert_normalizer(
                        True, lowercase if strip is None else strip
                    )
                )
            },
        ),
        Misconception(
            "all that is not ASCII is dropped with the accents",
            "`text.encode('ascii', 'ignore')` after decomposing takes accents away, and with them "
            "Greek, Cyrillic, Arabic, Chinese and the German ß. Drop only what is a mark: "
            "characters of category Mn.",
            {
                "normalize": normalize_by(
                    _accents_by(normalizers.NFD(), normalizers.Replace(Regex(r"[^\x00-\x7f]"), ""))
                )
            },
        ),
        Misconception(
            "accents are taken off the letter and left beside it",
            "Decomposing makes two characters of é, e and a combining mark. The mark is still "
            "there, and the screen shows é as before. Drop the characters of category Mn after "
            "decomposing.",
            {"normalize": normalize_by(_accents_by(normalizers.NFD()))},
        ),
        Misconception(
            "only marks with a combining class are dropped",
            "`unicodedata.combining` gives the class by which marks are sorted, and 0 for some of "
            "them, such as the vowel signs of Hindi and Thai. What BERT drops is the category Mn.",
            {"normalize": normalize_by(_accents_by(normalizers.NFD(), _marks_that_combine))},
        ),
        Misconception(
            "marks that take room of their own are dropped too",
            "Unicode has three kinds of marks. Accents are Mn, marks without width. Vowel signs of "
            "Hindi or Tamil that stand beside their letter are Mc, and BERT keeps them: without "
            "them a word is no longer readable.",
            {"normalize": normalize_by(_accents_by(normalizers.NFD(), _all_marks))},
        ),
        Misconception(
            "ligatures and fractions are taken apart (NFKD)",
            "NFKD also replaces what only looks related: ﬁ by fi, ½ by 1⁄2, ² by 2, ™ by TM. BERT "
            "uses NFD, which takes apart only letters with marks.",
            {
                "normalize": normalize_by(
                    _accents_by(normalizers.NFKD(), normalizers.StripAccents())
                )
            },
        ),
        Misconception(
            "the text is decomposed even if accents are kept",
            "Where accents stay, é stays one character. Decomposed, it is two, and the vocabulary "
            "of a cased model, which has é as one, does not know it.",
            {"normalize": normalize_by(_always_decomposed)},
        ),
        Misconception(
            "the text is lower-cased as a whole",
            "Python's `lower` looks at the whole word for one letter: at the end of a word Σ "
            "becomes ς, elsewhere σ. BERT lower-cases each character alone and writes σ "
            "everywhere. Join `char.lower()` for each character.",
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

# --- 1.2 pre-tokenize ----------------------------------------------------------------------------

ASCII_SYMBOLS = tuple("$+<=>^`|~")
ASCII_MARKS = tuple('!"#%&()*,./:;?@[\\]{}')
MARKS = ("\u201c", "\u201d", "—", "…", "¿", "¡", "«", "»", "、", "。", "！", "·", "§")
SYMBOLS = ("€", "£", "©", "°", "√", "×", "→", "☃", "☆")


def _pre_tokenize_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, *texts: str) -> Case:
        return Case(name, {"texts": list(texts)})

    def word() -> str:
        return _word(rng)

    yield case("words and runs of spaces", _joined(rng, (" ", "  ", "   ")), "  ", "")
    marks = [str(mark) for mark in rng.permutation(ASCII_MARKS)]
    pairs = [first + second for first, second in zip(marks[::2], marks[1::2], strict=False)]
    yield case("marks in a row", _joined(rng, [*pairs, "...", ". ", " (", "), "]))
    yield case("ASCII's symbols", _joined(rng, [*ASCII_SYMBOLS, " $", " = "]))
    yield case("punctuation of other scripts", _joined(rng, [*MARKS, " “", "”, "]))
    yield case("symbols that are no punctuation", _joined(rng, [*SYMBOLS, " €", " + "]))
    inside = f"{word()}'s {word()}-{word()}-{word()} {word()}_{word()} '{word()}' don't -{word()}"
    yield case("apostrophes, hyphens and underscores inside words", inside)
    same = word()
    yield case("a word that comes again", f"{same}s, {same} {word()} {same} {same}: {word()},")


def _pre_tokenize_probe(part: Any, texts: list[str]) -> dict[str, Any]:
    return results(
        (written("pre_tokenize", text), lambda text=text: part.pre_tokenize(text)) for text in texts
    )


def _cut_at(*steps: tuple[str, str]) -> Callable[[str], Words]:
    """Return a `pre_tokenize` that drops white space and cuts at patterns, Rust's way.

    Args:
        steps: a pattern and what becomes of it: "isolated", "removed" or "contiguous".
    """

    def pre_tokenize(text: str) -> Words:
        cuts = [pre_tokenizers.Split(Regex(pattern), what) for pattern, what in steps]
        return pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)

    return pre_tokenize


_SPACES = (" +", "removed")
_ASCII = r"!-/:-@\[-`{-~"
_MARK = rf"[\p{{P}}{_ASCII}]"


def _respanned(
    span: Callable[[str, str, tuple[int, int]], tuple[int, int]],
) -> Callable[[str], Words]:
    """Return a `pre_tokenize` with other spans, from the text, the word and the right span."""
    return lambda text: [
        (word, span(text, word, where)) for word, where in their_pre_tokenize(text)
    ]


def _within_chunk(text: str, word: str, where: tuple[int, int]) -> tuple[int, int]:
    start = text.rfind(" ", 0, where[0]) + 1
    return where[0] - start, where[1] - start


PRE_TOKENIZE = Exercise(
    id="1.2",
    reference={"pre_tokenize": their_pre_tokenize},
    reference_name="tokenizers.pre_tokenizers.BertPreTokenizer",
    cases=_pre_tokenize_cases,
    probe=_pre_tokenize_probe,
    misconceptions=(
        Misconception(
            "marks stay on the words",
            "Cut at white space alone, 'end.' is another word than 'end', and the vocabulary would "
            "need every word once more with each mark. Each punctuation mark is a word of its own.",
            {"pre_tokenize": _cut_at(_SPACES)},
        ),
        Misconception(
            "marks in a row are kept together",
            "Three dots are three words to BERT, and '),' is two. Each mark stands alone, so that "
            "the vocabulary needs one piece for each mark and none for their combinations.",
            {"pre_tokenize": _cut_at(_SPACES, (_MARK, "contiguous"))},
        ),
        Misconception(
            "marks are thrown away",
            "Marks are words like any other to BERT: whether a sentence ends in a full stop or a "
            "question mark tells it something. Cut at a mark, and keep it.",
            {"pre_tokenize": _cut_at(_SPACES, (_MARK, "removed"))},
        ),
        Misconception(
            "ASCII's symbols are not taken for punctuation",
            "To Unicode $ + < = > ^ ` | and ~ are symbols, not punctuation. BERT treats every "
            "ASCII character that is no letter, digit or space as punctuation all the same. "
            "`is_punctuation` knows both.",
            {"pre_tokenize": _cut_at(_SPACES, (r"\p{P}", "isolated"))},
        ),
        Misconception(
            "only ASCII's punctuation counts",
            "`string.punctuation` is ASCII. Curly quotes, dashes, the ellipsis, ¿ and the Chinese "
            "full stop are punctuation too: all of Unicode's categories that begin with P.",
            {"pre_tokenize": _cut_at(_SPACES, (f"[{_ASCII}]", "isolated"))},
        ),
        Misconception(
            "all that is no letter or digit is cut off, but for the underscore",
            "That is what `\\w+|[^\\w\\s]` matches. It makes words of €, © and ☃, which BERT "
            "leaves where they stand, and it keeps snake_case whole, which BERT cuts in three.",
            {"pre_tokenize": _cut_at(_SPACES, (r"[^\w\s]", "isolated"))},
        ),
        Misconception(
            "apostrophes and hyphens inside a word do not cut it",
            "It looks reasonable, but BERT cuts don't into don, ' and t, and state-of-the-art into "
            "seven words. Its vocabulary was made from text cut that way, so it has no piece with "
            "an apostrophe inside.",
            {"pre_tokenize": _cut_at(_SPACES, (rf"(?!(?<=\w)['-](?=\w)){_MARK}", "isolated"))},
        ),
        Misconception(
            "spaces are words too",
            "Your cut keeps what it cuts at. A space separates words and belongs to none of them; "
            "drop it, and the empty strings between two of them.",
            {"pre_tokenize": _cut_at((" ", "isolated"), (_MARK, "isolated"))},
        ),
        Misconception(
            "a span ends at the last character instead of after it",
            "A span is half-open, (start, end), like a slice: `text[start:end]` is the word, and "
            "end - start is its length. Your end is one too small.",
            {"pre_tokenize": _respanned(lambda text, word, span: (span[0], span[1] - 1))},
        ),
        Misconception(
            "a span is the word's first occurrence in the text",
            "`text.find(word)` finds the first place where these letters stand, even inside a "
            "longer word. When a word comes again its span must be where it stands now: keep count "
            "of the position while you go.",
            {
                "pre_tokenize": _respanned(
                    lambda text, word, span: (text.find(word), text.find(word) + len(word))
                )
            },
        ),
        Misconception(
            "spans start anew after each space",
            "Your positions are counted within the chunk between two spaces. Add where the chunk "
            "begins in the text, or look for words in the whole text at once.",
            {"pre_tokenize": _respanned(_within_chunk)},
        ),
    ),
    hints=(
        "Read the text once, character by character, and remember where the word you are in began. "
        "A word ends where a space or a mark stands, or with the text.",
        "With `enumerate(text)` you have each position. At a space or a mark: if a word has begun, "
        "add it with its span (start, position). A mark is then added too, as a word of one "
        "character. The next word begins after it. `is_punctuation` says what a mark is.",
        "Keep `start`, the place after the last space or mark. At such a character add "
        "(text[start:position], (start, position)) if start < position, then the mark itself with "
        "(position, position + 1), and set start to position + 1. Do not forget the word that the "
        "text ends with.",
    ),
)

# --- 1.3 greedy longest match --------------------------------------------------------------------


@cache
def _real_vocabulary() -> tuple[str, ...]:
    from bertlab.course.reference import vocabulary

    return tuple(vocabulary())


def _small_vocabulary(rng: np.random.Generator, letters: str, longer: int) -> list[str]:
    """Draw a vocabulary: each letter at a word's beginning and inside, and longer pieces."""
    pieces = dict.fromkeys([*letters, *("##" + letter for letter in letters)])
    while len(pieces) < 2 * len(letters) + longer:
        piece = "".join(rng.choice(list(letters), int(rng.integers(2, 5))))
        pieces[piece if rng.random() < 0.5 else "##" + piece] = None
    return [*SPECIAL_TOKENS, *pieces]


def _letters(rng: np.random.Generator, count: int) -> str:
    return "".join(rng.choice(list("abcdefghijklmnoprstu"), count, replace=False))


def _wordpiece_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, words: Sequence[str], vocab: Any, **options: Any) -> Case:
        return Case(name, {"words": list(words), "vocab": vocab, "options": options})

    letters = _letters(rng, 4)
    vocab = _small_vocabulary(rng, letters, 20)
    drawn = ["".join(rng.choice(list(letters), int(rng.integers(2, 10)))) for _ in range(10)]
    yield case("words of a small vocabulary", [*drawn, ""], vocab)
    a, b, c, d, e, f = _letters(rng, 6)
    nested = [a, a + b, a + b + c, "##" + d, "##" + c + d + e, "##" + e, a + b + c + d + e + f]
    yield case("a longer beginning that needs more pieces", [a + b + c + d + e], nested)
    stuck = [a, a + b, a + b + c, "##" + c + d, "##" + c, "##" + b, "##" + f]
    yield case("a longer beginning after which nothing fits", [a + b + c + d, a + b + c], stuck)
    halves = [a + b, "##" + c, c, d, "##" + e + f, a]
    words = [a + b + c, c + a + b, a + b + d, e + f, c + e + f]
    yield case("pieces that only begin a word, or only go on", words, halves)
    known = drawn[0] + letters
    unknown = [f + known, known[:3] + "ß" + known[3:], known + "ß", "ß", known]
    yield case("a character that no piece has", [w.replace(f, "æ") for w in unknown], vocab)
    long = [letters[:1] * 99, letters[1:2] * 100, letters[2:3] * 101, "é" * 60, "é" * 100]
    yield case("words of about 100 characters", long, [*vocab, "é", "##é"])
    limit = int(rng.integers(5, 9))
    lengths = [drawn[0][:1] * length for length in (limit - 1, limit, limit + 1)]
    yield case("another limit", lengths, vocab, max_chars=limit)
    wide = [drawn[0][:1] * 110, drawn[0][:1] * 121]
    yield case("a higher limit", wide, vocab, max_chars=120)
    yield case("another unknown token", ["ß", drawn[0]], [*vocab, "<unk>"], unk_token="<unk>")
    english = ["unhappiness", "tokenization", "etfs", "embeddings", "the", "☃", *_words(rng, 3)]
    yield case("the real vocabulary", english, "bert-base-uncased")


@lru_cache(maxsize=4)
def _numbered(pieces: tuple[str, ...]) -> dict[str, int]:
    return {piece: index for index, piece in enumerate(pieces)}


def _wordpiece_probe(
    part: Any, words: list[str], vocab: Any, options: dict[str, Any]
) -> dict[str, Any]:
    pieces = _real_vocabulary() if isinstance(vocab, str) else vocab
    known = dict(_numbered(tuple(pieces)))
    return results(
        (
            written("wordpiece", word, **options),
            lambda word=word: part.wordpiece(word, known, **options),
        )
        for word in words
    )


def _wordpiece_by(
    pieces: Callable[[list[str]], Iterable[str]] = lambda pieces: pieces,
    after: Callable[[list[str]], list[str]] = lambda cut: cut,
    prefix: str = "##",
) -> Callable[..., list[str]]:
    """Return Rust's WordPiece with other pieces, another prefix, or a change at the end."""

    def wordpiece(
        word: str, vocab: Collection[str], unk_token: str = "[UNK]", max_chars: int = 100
    ) -> list[str]:
        if len(word) > max_chars:
            return [unk_token]
        possible = pieces(possible_pieces(word, vocab))
        cut = rust_pieces(word, possible, unk_token, max_chars, prefix)
        return cut if cut == [unk_token] else after(cut)

    return wordpiece


def _without_longer(pieces: list[str]) -> list[str]:
    """Leave out what begins with another piece: the longest match is then the shortest."""
    known = set(pieces)
    shortest = {piece: 3 if piece.startswith("##") else 1 for piece in pieces}
    return [
        piece
        for piece in pieces
        if not any(piece[:end] in known for end in range(shortest[piece], len(piece)))
    ]


def _limited_by(
    size: Callable[[str], int] = len, limit: Callable[[int], int] = lambda limit: limit
) -> Callable[..., list[str]]:
    """Return Rust's WordPiece with another size of a word or another limit."""

    def wordpiece(
        word: str, vocab: Collection[str], unk_token: str = "[UNK]", max_chars: int = 100
    ) -> list[str]:
        if size(word) > limit(max_chars):
            return [unk_token]
        return their_wordpiece(word, vocab, unk_token, 10**6)

    return wordpiece


def _all_cuts(word: str, vocab: Collection[str], prefix: str = "") -> Iterator[list[str]]:
    """Yield every way to cut a word into pieces, longer first pieces first."""
    if not word:
        yield []
    for end in range(len(word), 0, -1):
        if prefix + word[:end] in vocab:
            for rest in _all_cuts(word[end:], vocab, "##"):
                yield [prefix + word[:end], *rest]


def _where_greed_fails(
    choose: Callable[[Iterator[list[str]], list[str]], list[str]],
) -> Callable[..., list[str]]:
    """Return Rust's WordPiece, with another choice among all cuts of a short word."""

    def wordpiece(
        word: str, vocab: Collection[str], unk_token: str = "[UNK]", max_chars: int = 100
    ) -> list[str]:
        greedy = their_wordpiece(word, vocab, unk_token, max_chars)
        return choose(_all_cuts(word, vocab), greedy) if 0 < len(word) < 20 else greedy

    return wordpiece


def _first_cut(cuts: Iterator[list[str]], greedy: list[str]) -> list[str]:
    return next(cuts, greedy)


def _fewest_pieces(cuts: Iterator[list[str]], greedy: list[str]) -> list[str]:
    return min(cuts, key=len, default=greedy)


def _known_part_kept(
    word: str, vocab: Collection[str], unk_token: str = "[UNK]", max_chars: int = 100
) -> list[str]:
    """Cut as far as it goes, then say unknown."""
    cut = their_wordpiece(word, vocab, unk_token, max_chars)
    if cut != [unk_token] or len(word) > max_chars:
        return cut
    starts = (their_wordpiece(word[:end], vocab, unk_token) for end in range(len(word), 0, -1))
    return [*next((start for start in starts if start != [unk_token]), []), unk_token]


WORDPIECE = Exercise(
    id="1.3",
    reference={"wordpiece": their_wordpiece},
    reference_name="tokenizers.models.WordPiece",
    cases=_wordpiece_cases,
    probe=_wordpiece_probe,
    misconceptions=(
        Misconception(
            "the shortest piece is taken instead of the longest",
            "With each letter in the vocabulary the shortest piece is always one letter, and every "
            "word falls into letters. Try the whole rest of the word first, then one character "
            "less, and so on down to one.",
            {"wordpiece": _wordpiece_by(_without_longer)},
        ),
        Misconception(
            "pieces inside a word are looked up without ##",
            "'able' as a word and 'able' as the end of readable are two entries, `able` and "
            "`##able`, with vectors of their own. Where the piece does not begin the word, put ## "
            "before it and look that up.",
            {"wordpiece": _wordpiece_by(prefix="")},
        ),
        Misconception(
            "the pieces are returned without their ##",
            "You look the right entries up and return their letters. The caller needs the entries "
            "themselves: `##s` and `s` have different ids.",
            {"wordpiece": _wordpiece_by(after=lambda cut: [p.removeprefix("##") for p in cut])},
        ),
        Misconception(
            "the first piece has ## as well",
            "## says 'something stands before me in this word'. The first piece of a word is "
            "looked up as it is.",
            {
                "wordpiece": _wordpiece_by(
                    lambda pieces: [
                        form for p in pieces if p.startswith("##") for form in (p, p[2:])
                    ],
                    after=lambda cut: ["##" + p.removeprefix("##") for p in cut],
                )
            },
        ),
        Misconception(
            "only the part that does not fit becomes [UNK]",
            "You keep the pieces found so far and put [UNK] for the rest. In BERT one part that "
            "does not fit makes the whole word unknown: exactly one [UNK], and the pieces found "
            "before it are dropped.",
            {"wordpiece": _known_part_kept},
        ),
        Misconception(
            "it goes back when it is stuck",
            "You try a shorter piece when nothing fits after the longest. That finds a way more "
            "often, but BERT does not look back: the longest piece is taken for good, and if "
            "nothing fits after it, the word is unknown. To agree with a trained model you have to "
            "share its mistakes.",
            {"wordpiece": _where_greed_fails(_first_cut)},
        ),
        Misconception(
            "the cut with the fewest pieces is taken",
            "Greedy is not optimal: the longest first piece may need more pieces after it. BERT "
            "takes it all the same, and its vectors were trained on such cuts.",
            {"wordpiece": _where_greed_fails(_fewest_pieces)},
        ),
        Misconception(
            "there is no limit to a word's length",
            "A word of more than `max_chars` characters is unknown without trying. The search is "
            "quadratic in the length, and a 'word' of a thousand characters is no word but "
            "something like base64.",
            {"wordpiece": _limited_by(limit=lambda limit: 10**6)},
        ),
        Misconception(
            "a word of exactly max_chars characters is unknown",
            "`max_chars` is the longest word that is tried: more than 100 characters are too many, "
            "100 are not. Your comparison is >= where it should be >.",
            {"wordpiece": _limited_by(limit=lambda limit: limit - 1)},
        ),
        Misconception(
            "the limit counts bytes",
            "é is one character and two bytes in UTF-8. The limit counts characters, `len(word)`, "
            "so that no script has shorter words than another.",
            {"wordpiece": _limited_by(size=lambda word: len(word.encode()))},
        ),
        Misconception(
            "the limit is always 100",
            "100 is only the default, and the one that BERT has. Whoever calls may set another "
            "limit: compare with the argument `max_chars`.",
            {"wordpiece": _limited_by(limit=lambda limit: 100)},
        ),
        Misconception(
            "the unknown token is always [UNK]",
            "[UNK] is only the default, and the one that BERT has. Other vocabularies write it "
            "<unk>: return the argument `unk_token`.",
            {
                "wordpiece": lambda word, vocab, unk_token="[UNK]", max_chars=100: their_wordpiece(
                    word, vocab, "[UNK]", max_chars
                )
            },
        ),
    ),
    hints=(
        "Two loops: the outer one stands at a place in the word, the inner one tries ends from the "
        "last character backwards until a piece is in the vocabulary.",
        "The piece is `word[start:end]`, with `##` before it if start is not 0. When one is found, "
        "note it and go on at `end`. When none is found at some place, the answer is "
        "`[unk_token]`, whatever you have found before.",
        "Check the length first. `for end in range(len(word), start, -1)` runs through the ends; "
        "leave it with `break` when the piece is known, and use the loop's `else:`, which runs "
        "only if there was no break, to return `[unk_token]`.",
    ),
)

# --- 1.4 learn a vocabulary ----------------------------------------------------------------------

Pair = tuple[str, str]
FIRST_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class _Counts:
    """Spelled words, and how often each symbol and each pair occurs in them.

    `PairCounts` in bertlab/tokenizer.py is for students. This is apart from it, so that the two
    can be compared.
    """

    def __init__(self, words: Mapping[str, int]) -> None:
        self.words = dict(words)
        self.symbols: Counter[str] = Counter()
        self.pairs: Counter[Pair] = Counter()
        self.pairs_of: defaultdict[str, set[Pair]] = defaultdict(set)
        self._add(words)

    def respell(self, both: Pair, joined: Callable[[str], str]) -> set[Pair]:
        """Spell anew the words with a pair. Returns the pairs that have another score now."""
        text = " ".join(both)
        spelled = {word: joined(word) for word in self.words if text in word}
        gone = {old: self.words.pop(old) for old, new in spelled.items() if new != old}
        come = {spelled[old]: count for old, count in gone.items()}
        self.words |= come
        return self._add({old: -count for old, count in gone.items()} | come)

    def _add(self, words: Mapping[str, int]) -> set[Pair]:
        symbols: Counter[str] = Counter()
        pairs: Counter[Pair] = Counter()
        for word, count in words.items():
            spelled = word.split()
            for symbol in spelled:
                symbols[symbol] += count
            for both in pairwise(spelled):
                pairs[both] += count
        self.symbols.update(symbols)
        self.pairs.update(pairs)
        changed = {both for both, count in pairs.items() if count}
        for both in changed:
            for symbol in both:
                self.pairs_of[symbol].add(both)
        for both in [both for both in changed if not self.pairs[both]]:
            del self.pairs[both]
            for symbol in both:
                self.pairs_of[symbol].discard(both)
        moved = (symbol for symbol, count in symbols.items() if count)
        return changed.union(*(self.pairs_of[symbol] for symbol in moved))


class ByDefinition:
    """The definition, written out: of all pairs that are left the best is joined, in all words.

    A word is a string of symbols with blanks between them, as in Sennrich et al. 2016. The
    trainers of `tokenizers` are what one would call in production. They cannot be the reference:
    both count as `rule="bpe"` does, and they decide ties by ids instead of by spelling.
    """

    rules: tuple[str, ...] = ("wordpiece", "bpe")
    special_tokens_first = True

    def __call__(
        self,
        word_counts: Mapping[str, int],
        vocab_size: int,
        special_tokens: Sequence[str] = FIRST_TOKENS,
        rule: str = "wordpiece",
    ) -> list[str]:
        if rule not in self.rules:
            raise ValueError(f"rule is {rule!r}, but must be one of {self.rules}")
        words = {
            self.spelled(word): self.weight(count)
            for word, count in word_counts.items()
            if word and count
        }
        alphabet = self.alphabet(words)
        size = self.size(vocab_size, alphabet, special_tokens)
        made = self.joined_until(size, _Counts(words), alphabet, rule)
        return [*special_tokens, *made] if self.special_tokens_first else [*made, *special_tokens]

    def joined_until(
        self, size: int, counts: _Counts, alphabet: Sequence[str], rule: str
    ) -> list[str]:
        """Return the alphabet and the pieces that joining adds, in order, `size` at most."""
        made, scores = dict.fromkeys(alphabet), {}
        changed = set(counts.pairs)
        while len(made) < size:
            for both in changed:
                if both in counts.pairs:
                    scores[both] = self.score(counts.pairs[both], counts.symbols, both, rule)
                else:
                    del scores[both]  # joined everywhere
            best = self.chosen(scores, counts.pairs)
            if best is None:
                break
            made.setdefault(self.name(*best))
            changed = counts.respell(best, partial(self.joined, both=best))
        return list(made)

    def spelled(self, word: str) -> str:
        return " ".join([word[0], *("##" + char for char in word[1:])])

    def weight(self, count: int) -> int:
        return count

    def alphabet(self, words: Iterable[str]) -> list[str]:
        return sorted({symbol for word in words for symbol in word.split()})

    def size(self, vocab_size: int, alphabet: Sequence[str], special: Sequence[str]) -> int:
        """Return how many entries there will be beside the special tokens."""
        if vocab_size < len(alphabet) + len(special):
            raise ValueError(
                f"vocab_size is {vocab_size}, but special tokens and alphabet are "
                f"{len(alphabet) + len(special)}"
            )
        return vocab_size - len(special)

    def score(self, count: int, symbols: Mapping[str, int], both: Pair, rule: str) -> float:
        return count if rule == "bpe" else count / (symbols[both[0]] * symbols[both[1]])

    def chosen(self, scores: Mapping[Pair, float], pairs: Mapping[Pair, int]) -> Pair | None:
        highest = max(scores.values(), default=0)
        return min((both for both, score in scores.items() if score == highest), default=None)

    def name(self, first: str, second: str) -> str:
        return first + second.removeprefix("##")

    def joined(self, word: str, both: Pair) -> str:
        pattern = rf"(?<!\S){re.escape(' '.join(both))}(?!\S)"
        return re.sub(pattern, lambda found: self.name(*both), word)


def _train_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, word_counts: dict[str, int], vocab_size: int, **options: Any) -> Case:
        inputs = {"word_counts": word_counts, "vocab_size": vocab_size, "options": options}
        return Case(name, inputs)

    def alphabet(words: Iterable[str]) -> int:
        return len({"#" * (i > 0) + char for word in words for i, char in enumerate(word)})

    def drawn(letters: str, count: int, longest: int, most: int) -> dict[str, int]:
        found: dict[str, int] = {}
        while len(found) < count:
            word = "".join(rng.choice(list(letters), int(rng.integers(1, longest + 1))))
            found[word] = int(rng.integers(1, most + 1))
        return found

    def size(words: Iterable[str], merges: int, special: int = 5) -> int:
        return special + alphabet(words) + merges

    words = drawn(_letters(rng, 5), 18, 6, 40)
    yield case("the WordPiece rule", words, size(words, 10))
    yield case("the BPE rule", words, size(words, 10), rule="bpe")
    even = dict.fromkeys(drawn(_letters(rng, 4), 12, 5, 1), int(rng.integers(2, 5)))
    for rule in ("wordpiece", "bpe"):
        yield case(f"equal counts, many ties ({rule})", even, size(even, 8), rule=rule)
    u, v, x, y, z = sorted(_letters(rng, 5))
    tie = {x + y: 1, x: 1, u + v: 3, u: 2, z + y: 4, z + v: 3, z: 1000}
    yield case("two equal fractions, 1/(2·5) and 3/(5·6)", tie, size(tie, 1))
    runs = drawn(_letters(rng, 2), 12, 9, 9)
    yield case("words of two letters, many runs", runs, size(runs, 10), rule="bpe")
    more = int(rng.integers(4, 9))
    three = {v + 3 * u: more, v + 2 * u + x: int(rng.integers(1, more))}
    yield case("a run of three", three, size(three, 2), rule="bpe")
    twice = {z + v + x + u + v + x: more}
    yield case("a pair that stands twice in a word", twice, size(twice, 2), rule="bpe")
    once = drawn(_letters(rng, 4), 5, 6, 1)
    yield case("more entries asked for than there are pairs", once, 500)
    own = ["<pad>", "<unk>", "<mask>"]
    yield case("other special tokens", words, size(words, 6, 3), special_tokens=own)
    yield case("no room for a merge", words, size(words, 0))
    yield case("no room for the alphabet", words, size(words, -1), wants="error")
    yield case("a rule that does not exist", words, size(words, 3), rule="pbe", wants="error")


def _train_probe(
    part: Any, word_counts: dict[str, int], vocab_size: int, options: dict[str, Any]
) -> Any:
    options = dict(options)
    if options.pop("wants", "") == "error":
        return error_of(
            lambda: part.train_wordpiece(word_counts, vocab_size, **options), kind=ValueError
        )
    return {"the vocabulary": part.train_wordpiece(word_counts, vocab_size, **options)}


def _trained(**changes: Any) -> dict[str, Any]:
    """Return the definition with some of its steps changed."""
    return {"train_wordpiece": type("Changed", (ByDefinition,), changes)()}


def _by_score_alone(self: Any, scores: Mapping[Pair, float], pairs: Any) -> Pair | None:
    return max(pairs, key=scores.__getitem__, default=None)


def _largest_of_equals(self: Any, scores: Mapping[Pair, float], pairs: Any) -> Pair | None:
    return max(scores, key=lambda both: (scores[both], both), default=None)


def _twice_at_least(
    self: Any, scores: Mapping[Pair, float], pairs: Mapping[Pair, int]
) -> Pair | None:
    often = {both: score for both, score in scores.items() if pairs[both] > 1}
    return ByDefinition.chosen(self, often, pairs)


def _joined_as_text(self: Any, word: str, both: Pair) -> str:
    return word.replace(" ".join(both), self.name(*both))


def _joined_from_the_right(self: Any, word: str, both: Pair) -> str:
    found = word.split()
    for place in range(len(found) - 2, -1, -1):
        if tuple(found[place : place + 2]) == both:
            found[place : place + 2] = [self.name(*both)]
    return " ".join(found)


def _joined_once(self: Any, word: str, both: Pair) -> str:
    pattern = rf"(?<!\S){re.escape(' '.join(both))}(?!\S)"
    return re.sub(pattern, lambda found: self.name(*both), word, count=1)


class _CountsOfTheStart(ByDefinition):
    """A symbol keeps the count it had when it came into being."""

    def __call__(self, *args: Any, **options: Any) -> list[str]:
        changed = type("Run", (_CountsOfTheStart,), {"known": {}})()
        return ByDefinition.__call__(changed, *args, **options)

    known: dict[str, int]

    def score(self, count: int, symbols: Mapping[str, int], both: Pair, rule: str) -> float:
        for symbol, number in symbols.items():
            self.known.setdefault(symbol, number)
        return ByDefinition.score(self, count, self.known, both, rule)


def _too_small_let_through(
    self: Any, vocab_size: int, alphabet: Sequence[str], special: Sequence[str]
) -> int:
    return vocab_size - len(special)


TRAIN = Exercise(
    id="1.4",
    reference={"train_wordpiece": ByDefinition()},
    reference_name=(
        "the definition, written out (in production tokenizers.trainers, which count as BPE does)"
    ),
    cases=_train_cases,
    probe=_train_probe,
    misconceptions=(
        Misconception(
            "the most frequent pair is joined under both rules",
            "That is byte-pair encoding, and what many texts call WordPiece. WordPiece divides by "
            "the counts of both symbols: a pair is worth joining if it occurs more often than its "
            "parts would meet by chance. It prefers q and u over t and h.",
            _trained(score=lambda self, count, symbols, both, rule: count),
        ),
        Misconception(
            'the score is divided by the symbols\' counts under rule="bpe" too',
            'With `rule="bpe"` the score is the pair\'s count and nothing else. The two rules are '
            "there to be compared, so the argument must be obeyed.",
            _trained(
                score=lambda self, count, symbols, both, rule: ByDefinition.score(
                    self, count, symbols, both, "wordpiece"
                )
            ),
        ),
        Misconception(
            "each word counts once",
            "`word_counts` says how often each word occurs, and a pair inside a word that occurs "
            "40 times occurs 40 times. Add the word's count, not 1, for pairs and for symbols.",
            _trained(weight=lambda self, count: 1),
        ),
        Misconception(
            "of equal pairs the first seen is joined",
            "Ties are frequent, above all at the end. If the order of a dictionary decides, the "
            "same words in another order give another vocabulary. Of equals, join the "
            "lexicographically smallest pair.",
            _trained(chosen=_by_score_alone),
        ),
        Misconception(
            "of equal pairs the largest is joined",
            "`max` over (score, pair) takes the largest pair among equals. Asked for is the "
            "smallest: turn the score round and take `min` over (-score, pair).",
            _trained(chosen=_largest_of_equals),
        ),
        Misconception(
            "the score is divided twice",
            "count / a / b rounds twice and count / (a * b) once, and 1/2/5 and 3/5/6 come out "
            "unlike in the last bit though both are 0.1. The tie is then decided by rounding. "
            "Multiply the counts, which are whole numbers, and divide once.",
            _trained(
                score=lambda self, count, symbols, both, rule: (
                    count if rule == "bpe" else count / symbols[both[0]] / symbols[both[1]]
                )
            ),
        ),
        Misconception(
            "symbols keep the counts they had before they were joined",
            "When a and ##b become ab, there are fewer a and fewer ##b left, and every score that "
            "has one of them below the line rises. Count symbols anew after each merge, or "
            "subtract.",
            {"train_wordpiece": _CountsOfTheStart()},
        ),
        Misconception(
            "no character is marked with ##",
            "A word starts as its characters, and all but the first carry ##. Without it s at the "
            "beginning of a word and s at its end are one symbol, and the tokenizer, which looks "
            "up `##s`, finds nothing.",
            _trained(spelled=lambda self, word: " ".join(word)),
        ),
        Misconception(
            "the ## of the second part stays inside the joined piece",
            "a and ##b give ab, and ##a and ##b give ##ab: only the first part's mark stays. A "
            "piece such as a##b matches no word.",
            _trained(name=lambda self, first, second: first + second),
        ),
        Misconception(
            "the special tokens stand at the end",
            "They come first, in the order given, so that [PAD] has the id 0 and the ids do not "
            "depend on how long the training went on.",
            _trained(special_tokens_first=False),
        ),
        Misconception(
            "the alphabet is in the order in which it is met",
            "The alphabet is sorted, ## forms first as # comes before the letters, so that the "
            "same words in another order give the same ids.",
            _trained(
                alphabet=lambda self, words: list(
                    dict.fromkeys(symbol for word in words for symbol in word.split())
                )
            ),
        ),
        Misconception(
            "the alphabet has every character in both forms",
            "A character that only begins words needs no ## form, and one that never begins a word "
            "no plain one. The alphabet is the symbols that the spelled words really have. (Adding "
            "both forms makes unknown words rarer, at the price of merges. It is not what is asked "
            "for here.)",
            _trained(
                alphabet=lambda self, words: sorted(
                    form
                    for char in {s.removeprefix("##") for word in words for s in word.split()}
                    for form in (char, "##" + char)
                )
            ),
        ),
        Misconception(
            "vocab_size does not count the special tokens",
            "`vocab_size` is the length of the list that is returned, all included: special "
            "tokens, alphabet and joined pieces. It becomes the number of rows of BERT's table.",
            _trained(
                size=lambda self, vocab_size, alphabet, special: (
                    ByDefinition.size(self, vocab_size, alphabet, special) + len(special)
                )
            ),
        ),
        Misconception(
            "vocab_size is the number of merges",
            "Papers on BPE give the number of merges. Here `vocab_size` is the length of the whole "
            "list: special tokens and alphabet count too.",
            _trained(
                size=lambda self, vocab_size, alphabet, special: (
                    ByDefinition.size(self, vocab_size, alphabet, special)
                    + len(special)
                    + len(alphabet)
                )
            ),
        ),
        Misconception(
            "a vocab_size that is too small is let through",
            "A vocabulary without all of its alphabet makes [UNK] of every word with a missing "
            "letter, and one without room for the special tokens cannot be used at all. Raise a "
            "ValueError that says both numbers.",
            _trained(size=_too_small_let_through),
        ),
        Misconception(
            "an unknown rule is let through",
            "A misspelled rule that is silently taken for one of the two costs an afternoon. Raise "
            "a ValueError that repeats what was given.",
            _trained(rules=("wordpiece", "bpe", "pbe")),
        ),
        Misconception(
            "pairs that occur only once are not joined",
            "Trainers in production have such a limit (`min_frequency=2`), to learn no word by "
            "heart. This function joins until the vocabulary is full or no pair is left.",
            _trained(chosen=_twice_at_least),
        ),
        Misconception(
            "runs are joined from the right",
            "In ##a ##a ##a the pair (##a, ##a) occurs twice, and the two share a symbol. Joined "
            "from left to right it gives ##aa ##a. Yours gives ##a ##aa.",
            _trained(joined=_joined_from_the_right),
        ),
        Misconception(
            "only the first occurrence in a word is joined",
            "A pair can stand in a word more than once, as (##a, ##n) in banana. Go on through "
            "the word after joining.",
            _trained(joined=_joined_once),
        ),
        Misconception(
            "a pair is joined where only its text fits",
            "Replacing text in a spelled word finds 'a ##b' inside '##a ##b' too, and joins what "
            "is another pair. Compare symbols, not text: a list of them, or a pattern that begins "
            "and ends at a blank.",
            _trained(joined=_joined_as_text),
        ),
    ),
    hints=(
        "Begin with the simple version: spell all words, count symbols and pairs, choose the best "
        "pair, join it in all words, and repeat until the vocabulary is full. It passes the check; "
        "make it fast afterwards.",
        "`min(pairs, key=lambda pair: (-score(pair), pair))` is the best pair with ties decided. "
        "The joined symbol is `first + second.removeprefix('##')`. Walk through a word's symbols "
        "and take two at once where they are the pair.",
        "`counts = PairCounts(word_counts)` (given in bertlab/tokenizer.py) has `counts.symbols` "
        "and `counts.pairs`, and `counts.join(pair, merged)` joins a pair in all words and keeps "
        "both right. So the loop is: choose the best of `counts.pairs`, join it, put `merged` into "
        "the vocabulary. To be fast, use what `join` returns: the only pairs whose score may have "
        "changed. A heap of (-score, pair) spares the search; push those pairs anew, and skip an "
        "entry whose score is out of date, or whose pair is gone, when it comes up.",
    ),
)

# --- 1.5 the whole tokenizer ---------------------------------------------------------------------


def _tokenizer_cases(rng: np.random.Generator) -> Iterator[Case]:
    words = _words(rng, 14)
    vocab = _own_vocabulary(rng, words)

    def case(name: str, *calls: list[Any], vocab: Any = vocab, **settings: Any) -> Case:
        inputs = {"vocab": "\n".join(vocab), "settings": settings, "calls": list(calls)}
        return Case(name, inputs)

    def call(method: str, *args: Any, **options: Any) -> list[Any]:
        return [method, list(args), options]  # what the probe is to call

    def spans(text: str, *pair: str) -> list[Any]:
        return call("tokenizer", text, *pair, return_offsets=True)

    def text(count: int) -> str:
        return " ".join(words[int(index)] for index in rng.integers(0, len(words), count))

    one, two, unknown = f"{text(3).title()}, {text(2)}!", f"{text(3)}?", f"z{words[0]}"
    yield case(
        "one text, a pair, a batch, an unknown word",
        call("encode", one),
        call("encode", one, two),
        call("encode_batch", [one, f"{text(2)} {unknown}.", ""]),
        call("tokenizer", two, one),
        call("tokenizer", [one, two]),
        call("tokenize", f"{one} {unknown}"),
    )
    yield case("spans in the text as it was written", *_span_calls(rng, words, spans))
    inside = f"{text(1)} [MASK] {text(1)}[MASK]{text(1)}. [mask] {text(1).title()}é {text(1)}[SEP]"
    yield case(
        "special tokens written in the text",
        spans(inside),
        call("encode", inside),
        call("encode_batch", [inside, f"[MASK]{text(1)} [CLS"]),
    )
    accents = f"{words[0].title()} {words[1]} É{words[2]} {words[3]}é Ñ."
    for name, settings in (
        ("a cased model", {"lowercase": False}),
        ("lower case, accents kept", {"strip_accents": False}),
        ("cased, accents stripped", {"lowercase": False, "strip_accents": True}),
    ):
        yield case(name, call("encode", accents), spans(accents), **settings)
    yield case("a cased model, saved and loaded", call("saved", accents), lowercase=False)
    yield case("texts that are cut", *_truncation_calls(rng, text, call))
    yield case("texts in windows", *_window_calls(rng, text, call))
    batch = [text(4), text(int(rng.integers(6, 9))), text(2)]
    yield case(
        "padding",
        call("tokenizer", batch, padding=True, return_offsets=True),
        call("tokenizer", batch, [*batch[1:], two], padding=True),
        call("tokenizer", batch, padding="max_length", max_length=12, truncation=True),
        call("tokenizer", text(2), padding="max_length", max_length=9),
    )
    yield case("ids back to text", *_decode_calls(rng, vocab, call))
    split = "".join(f"{word}{char}" for word, char in zip(words, CONTROLS_LIKE_SPACE, strict=False))
    yield case(
        "characters that are dropped but cut by str.split",
        call("encode", f"{split}{words[0]} {words[1]}"),
        call("encode_batch", [f"{words[2]}\x1c{words[3]}\t{words[4]}\u3000{words[5]}"]),
    )
    yield case("the same text twice, the first list changed", call("twice", one, f"{two} {one}"))
    spoiled = f"{text(40)[: int(rng.integers(100, 200))]}\ud83d {text(2)}"
    yield case(
        "half of a character",
        *(call("fails", *args) for args in (["encode", spoiled], ["tokenizer", spoiled, True])),
        call("fails", "encode_batch", [text(2), spoiled]),
    )
    english = f"Unhappiness isn't {unknown}, ETFs naïve [MASK] ☃: {text(3)}. 我爱 tokenization"
    yield case(
        "the real vocabulary, as MiniLM has it",
        call("encode", english),
        call("encode_batch", [english, f"{text(4)} embeddings"]),
        spans(english, f"{text(2)} café"),
        vocab=(),
    )


def _own_vocabulary(rng: np.random.Generator, words: Sequence[str]) -> list[str]:
    """Draw a vocabulary for some words: whole or in two pieces, in letters, some with capitals.

    It has no z, so a word with one is unknown.
    """
    pieces: dict[str, None] = {}
    for index, word in enumerate(words):
        cut = int(rng.integers(1, len(word)))
        whole = [word] if index % 2 else [word[:cut], "##" + word[cut:]]
        pieces.update(dict.fromkeys(whole))
        if index < 3:
            pieces[word.title()] = None
    letters = "bcdfgklmnprstaeioué"
    pieces.update(dict.fromkeys([*letters, *("##" + letter for letter in letters)]))
    pieces.update(dict.fromkeys([*letters.upper(), "ñ", *"!,.?'()[]-:", "我", "mask"]))
    order = [str(piece) for piece in rng.permutation(list(pieces))]
    return ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[unused1]", "[SEP]", "[MASK]", *order]


def _span_calls(
    rng: np.random.Generator, words: Sequence[str], spans: Callable[..., list[Any]]
) -> list[Any]:
    first, second, third = (words[int(index)] for index in rng.permutation(len(words))[:3])
    return [
        spans(f"  {first.title()},\t{second.upper()}  {third}!"),
        spans(f"{first}é É{second} {third}e\u0301 o\u0308{first} {second}\u0301 {third}"),
        spans(f"{first[:2]}\u00ad{first[2:]}\u200b {second}\x00, \ufeff{third}\u200b{first}"),
        spans(f"{first}我{second}，我我 {third}"),
        spans(f"{second} z{first[:2]} {third} {first} zz, {second} ({first}) {second}"),
        spans(f"{first} é{second}", f"  {third}é {second}"),
    ]


def _truncation_calls(
    rng: np.random.Generator, text: Callable[[int], str], call: Callable[..., list[Any]]
) -> list[Any]:
    long, longer, short = text(12), text(26), str(rng.choice(["bo", "ta"]))
    odd, even = (2 * int(rng.integers(4, 6)) + odd for odd in (1, 0))
    return [
        call("tokenizer", long, max_length=odd),
        call("tokenizer", long, long, max_length=odd + 3),
        call("tokenizer", long, longer, max_length=odd + 3, return_offsets=True),
        call("tokenizer", longer, long, max_length=odd + 3),
        call("tokenizer", short, long, max_length=odd + 3),
        call("tokenizer", long, short, max_length=even + 3),
        call("tokenizer", longer, short, truncation="only_first", max_length=20),
        call("tokenizer", short, longer, truncation="only_second", max_length=20),
        call("fails", "tokenizer", short, False, long, truncation="only_first", max_length=6),
    ]


def _window_calls(
    rng: np.random.Generator, text: Callable[[int], str], call: Callable[..., list[Any]]
) -> list[Any]:
    stride = int(rng.integers(1, 4))
    size = 2 * stride + int(rng.integers(2, 5))  # of a window, without [CLS] and [SEP]

    def letters(count: int) -> str:
        return " ".join(rng.choice(list("aeiobdk"), count))

    new = size - stride
    return [
        *(
            call("tokenizer", letters(size + 2 * new + more), max_length=size + 2, stride=stride)
            for more in (0, 1, new - 1)
        ),
        call("tokenizer", letters(size), max_length=size + 2, stride=stride),
        call("tokenizer", text(9), max_length=size + 2, stride=0, return_offsets=True),
        call(
            "tokenizer",
            [letters(size + 3), letters(2)],
            max_length=size + 2,
            truncation=True,
            stride=stride,
            padding=True,
        ),
        call("tokenizer", letters(15), letters(14), max_length=2 * size + 3, stride=stride),
        call(
            "tokenizer",
            letters(3),
            letters(20),
            max_length=size + 6,
            stride=stride,
            truncation="only_second",
            return_offsets=True,
        ),
    ]


def _decode_calls(
    rng: np.random.Generator, vocab: Sequence[str], call: Callable[..., list[Any]]
) -> list[Any]:
    place = {piece: index for index, piece in enumerate(vocab)}

    def ids(*pieces: str) -> list[int]:
        return [place[piece] for piece in pieces]

    begins = [piece for piece in vocab if piece.isalpha() and piece.islower()]
    goes_on = [piece for piece in vocab if piece.startswith("##")]
    a, b, c = (str(piece) for piece in rng.choice(begins, 3, replace=False))
    d, e = (str(piece) for piece in rng.choice(goes_on, 2, replace=False))
    sentence = ids("[CLS]", a, d, b, ",", c, e, d, ".", "[SEP]")
    return [
        call("decode", sentence),
        call("decode", sentence, skip_special_tokens=True),
        call("decode", ids(d, a, "!")),
        call("decode", ids(a, "'", "s", "n", "'", "t", "(", b, ")", "?", "[MASK]", "[UNK]")),
        call("decode", [*ids(a), len(vocab) + int(rng.integers(5, 50)), *ids(e, b)]),
        call("decode", []),
    ]


def _tokenizer_probe(
    part: Any, vocab: str, settings: dict[str, Any], calls: list[list[Any]]
) -> dict[str, Any]:
    """Make the calls; `vocab` has one piece a line, or is empty for MiniLM's own."""
    tokenizer = _loaded(part, vocab, settings)
    found: dict[str, Any] = {}
    for method, args, options in calls:
        ways = {"fails": _how_it_fails, "twice": _twice, "saved": _saved}
        if method in ways:
            result = ways[method](tokenizer, *args, **options)
        elif method == "tokenizer":
            result = tokenizer(*args, **options)
        else:
            result = getattr(tokenizer, method)(*args, **options)
        label = written(method, *args, **options)
        parts = result.items() if isinstance(result, dict) else [("", result)]
        for name, value in parts:
            key = f"{label}[{name!r}]" if name else label
            found[f"{key} #{len(found)}" if key in found else key] = value
    return found


def _loaded(part: Any, vocab: str, settings: dict[str, Any]) -> Any:
    if not vocab:
        from bertlab.course.reference import minilm_folder

        return part.WordPieceTokenizer.from_pretrained(minilm_folder())
    return part.WordPieceTokenizer(vocab.split("\n"), **settings)


def _how_it_fails(
    tokenizer: Any, method: str, text: Any, offsets: bool = False, *args: Any, **options: Any
) -> dict[str, Any]:
    """Return which error a call raises, and whether it names where half a character stands."""
    spoiled = text if isinstance(text, str) else text[-1]
    places = [index for index, char in enumerate(spoiled) if char == "\ud83d"]
    if offsets:
        options["return_offsets"] = True
    made = tokenizer if method == "tokenizer" else getattr(tokenizer, method)
    return error_of(lambda: made(text, *args, **options), *places, kind=ValueError)


def _twice(tokenizer: Any, text: str, other: str) -> dict[str, Any]:
    """Return what a text gives after the caller has changed the lists it was given before."""
    rows = tokenizer.encode_batch([text, other, text])
    rows[0].append(-1)
    tokenizer.encode(text).clear()
    again = [list(row) for row in tokenizer.encode_batch([text, other])]
    return {"the other rows": [list(row) for row in rows[1:]], "again": again}


def _saved(tokenizer: Any, text: str) -> dict[str, Any]:
    """Return what a tokenizer says after it was saved and loaded again."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder) / "new")
        again = type(tokenizer).from_pretrained(Path(folder) / "new")
    return {"ids": again.encode(text), "model_max_length": again.model_max_length}


class _AsWritten(RustTokenizer):
    """The same, but each method calls the others as `TokenizerBase` and a solution do.

    So a method that is wrong does its damage wherever it would in a student's tokenizer.
    """

    def __getattr__(self, name: str) -> Any:
        from bertlab.tokenizer import TokenizerBase

        if name not in vars(TokenizerBase):
            raise AttributeError(name)
        return vars(TokenizerBase)[name].__get__(self)

    def __call__(self, *args: Any, **options: Any) -> dict[str, Any]:
        from bertlab.tokenizer import TokenizerBase

        base: Any = TokenizerBase.__call__
        return base(self, *args, **options)

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        return [self._framed(text) for text in texts]

    def _framed(self, text: str) -> list[int]:
        ids = [index for index, _ in self.tokens_with_spans(text)]
        return [self.cls_token_id, *ids, self.sep_token_id]

    def encode(self, text: str, pair: str | None = None) -> list[int]:
        first, *second = self.encode_batch([text] if pair is None else [text, pair])
        return first + (second[0][1:] if second else [])

    def tokenize(self, text: str) -> list[str]:
        return [self.pieces[index] for index in self.encode(text)[1:-1]]


def _tokenizer_with(**methods: Any) -> dict[str, type]:
    return {"WordPieceTokenizer": type("WordPieceTokenizer", (_AsWritten,), methods)}


def _without_frame(self: Any, texts: Iterable[str]) -> list[list[int]]:
    return [ids[1:-1] for ids in _AsWritten.encode_batch(self, texts)]


def _joined_whole(self: Any, text: str, pair: str | None = None) -> list[int]:
    rows = self.encode_batch([text] if pair is None else [text, pair])
    return [index for row in rows for index in row]


def _no_separator_between(self: Any, text: str, pair: str | None = None) -> list[int]:
    first, *second = self.encode_batch([text] if pair is None else [text, pair])
    return first[:-1] + second[0][1:] if second else first


def _one_sep(self: Any, text: str, pair: str | None = None) -> list[int]:
    ids = _AsWritten.encode(self, text, pair)
    return ids if pair is None else ids[:-1]


def _frame_of_base_uncased(self: Any, texts: Iterable[str]) -> list[list[int]]:
    return [[101, *ids[1:-1], 102] for ids in _AsWritten.encode_batch(self, texts)]


def _special_tokens_cut(self: Any, text: str) -> list[Token]:
    reject_surrogates(text)
    cut = assembled(*self.order, self.lowercase, self.strip_accents, False)
    encoding = cut.encode(text, add_special_tokens=False)
    return list(zip(encoding.ids, encoding.offsets, strict=True))


def _cut_on_the_fast_way(self: Any, texts: Iterable[str]) -> list[list[int]]:
    return [
        [self.cls_token_id, *(i for i, _ in _special_tokens_cut(self, text)), self.sep_token_id]
        for text in texts
    ]


def _cut_where_split_cuts(self: Any, texts: Iterable[str]) -> list[list[int]]:
    return _AsWritten.encode_batch(self, (" ".join(text.split()) for text in texts))


def _in_chunks(self: Any, texts: Iterable[str]) -> list[list[int]]:
    """Let an error name the place within the chunk between two spaces."""
    given = list(texts)
    for text in given:
        for chunk in text.split(" "):
            reject_surrogates(chunk)
    return _AsWritten.encode_batch(self, given)


def _same_lists_again(self: Any, texts: Iterable[str]) -> list[list[int]]:
    known = self.__dict__.setdefault("known", {})
    return [known.setdefault(text, self._framed(text)) for text in texts]


def _with_settings(**settings: Any) -> Any:
    """Return a `tokens_with_spans` that always uses these settings."""

    def tokens_with_spans(self: Any, text: str) -> list[Token]:
        chosen = {"lowercase": self.lowercase, "strip_accents": self.strip_accents, **settings}
        return RustTokenizer(self.vocab, **chosen).tokens_with_spans(text)

    return tokens_with_spans


def _spans_by(change: Callable[[Any, str, int, list[Token]], list[Span]]) -> Any:
    """Return a `tokens_with_spans` with other spans.

    Args:
        change: from the tokenizer, a part of the text between two special tokens, where it
            begins, and its tokens with their spans in the part.
    """

    def tokens_with_spans(self: Any, text: str) -> list[Token]:
        found: list[Token] = []
        start = 0
        for part in re.split(r"(\[(?:UNK|SEP|PAD|CLS|MASK)\])", text):
            tokens = RustTokenizer.tokens_with_spans(self, part)
            spans = [(start, start + len(part))]
            if part not in SPECIAL_TOKENS:
                spans = change(self, part, start, tokens)
            found += [(index, span) for (index, _), span in zip(tokens, spans, strict=True)]
            start += len(part)
        return found

    return tokens_with_spans


def _origins(tokenizer: Any, part: str) -> list[int]:
    settings = tokenizer.lowercase, tokenizer.strip_accents
    return pair(their_normalize(part, *settings, with_alignment=True), "(clean, origin)")[1]


def _in_the_clean_text(tokenizer: Any, part: str, start: int, tokens: list[Token]) -> list[Span]:
    clean = str(their_normalize(part, tokenizer.lowercase, tokenizer.strip_accents))
    encoding = tokenizer.rust.encode(clean, add_special_tokens=False)
    return [(start + first, start + end) for first, end in encoding.offsets]


def _within_the_part(tokenizer: Any, part: str, start: int, tokens: list[Token]) -> list[Span]:
    return [span for _, span in tokens]


def _up_to_the_next(tokenizer: Any, part: str, start: int, tokens: list[Token]) -> list[Span]:
    origins = _origins(tokenizer, part)
    ends = [min((o for o in origins if o >= end), default=len(part)) for _, (_, end) in tokens]
    return [(start + span[0], start + end) for (_, span), end in zip(tokens, ends, strict=True)]


def _of_the_whole_word(tokenizer: Any, part: str, start: int, tokens: list[Token]) -> list[Span]:
    encoding = tokenizer.rust.encode(part, add_special_tokens=False)
    words = [encoding.word_to_chars(word) for word in encoding.word_ids]
    return [(start + first, start + end) for first, end in words]


def _unknown_of_five(tokenizer: Any, part: str, start: int, tokens: list[Token]) -> list[Span]:
    """Give [UNK] the span of five characters, as many as it has itself."""
    origins = [*_origins(tokenizer, part)]
    spans = []
    for index, (first, end) in tokens:
        if index == tokenizer.unk_token_id:
            place = min(origins.index(first) + len("[UNK]"), len(origins)) - 1
            end = origins[place] + 1
        spans.append((start + first, start + end))
    return spans


def _longest_first(kept: Callable[[int, int, int], Span]) -> Any:
    """Return a `truncated_lengths` with another way to cut both texts."""

    def truncated_lengths(self: Any, first: int, second: int, room: int, strategy: str) -> Span:
        if strategy != "longest_first" or not second or first + second <= room:
            return RustTokenizer.truncated_lengths(self, first, second, room, strategy)
        return kept(first, second, room)

    return truncated_lengths


def _halved(place: str) -> Any:
    """Return a `truncated_lengths` that gives an odd place always to one of two long texts."""

    def kept(first: int, second: int, room: int) -> Span:
        half = room // 2
        if min(first, second) <= half:
            return (first, room - first) if first <= second else (room - second, second)
        return (room - half, half) if place == "first" else (half, room - half)

    return _longest_first(kept)


def _windows_by(starts: Callable[[int, int, int], Iterable[int]]) -> Any:
    """Return a `windows` with windows that begin elsewhere."""

    def windows(self: Any, tokens: list[Any], size: int, stride: int | None) -> list[list[Any]]:
        if stride is None or len(tokens) <= size or stride >= size:
            return RustTokenizer.windows(self, tokens, size, stride)
        return [tokens[start : start + size] for start in starts(len(tokens), size, stride)]

    return windows


def _last_window_full(length: int, size: int, stride: int) -> list[int]:
    starts = range(0, length - stride, size - stride)
    return [min(start, length - size) for start in starts]


def _first_window_always(
    self: Any, tokens: list[Any], size: int, stride: int | None
) -> list[list[Any]]:
    return [tokens[:size]]


def _decoded_by(text: Callable[[Any, list[str]], str], skip: bool = True) -> dict[str, type]:
    """Return a tokenizer that makes a text of the pieces in another way."""

    def decode(self: Any, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        skipped = self.all_special_ids if skip and skip_special_tokens else []
        return text(self, [self.pieces[i] for i in ids if i in self.pieces and i not in skipped])

    return _tokenizer_with(decode=decode)


def _cleaned_as_a_whole(self: Any, pieces: list[str]) -> str:
    text = decoders.WordPiece(cleanup=False).decode(pieces)
    return decoders.WordPiece(cleanup=True).decode([text])


def _first_without_mark(self: Any, pieces: list[str]) -> str:
    return decoders.WordPiece().decode(
        [pieces[0].removeprefix("##"), *pieces[1:]] if pieces else []
    )


def _unknown_id(self: Any, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
    given = list(ids)
    [self.pieces[index] for index in given]
    return RustTokenizer.decode(self, given, skip_special_tokens)


TOKENIZER = Exercise(
    id="1.5",
    reference={"WordPieceTokenizer": RustTokenizer},
    reference_name="tokenizers.Tokenizer, assembled as in transformers.BertTokenizer",
    cases=_tokenizer_cases,
    probe=_tokenizer_probe,
    misconceptions=(
        Misconception(
            "texts get no [CLS] and no [SEP]",
            "What BERT reads always begins with [CLS] and ends with [SEP]; `encode` and "
            "`encode_batch` put them there. The vector of [CLS] is what a classifier looks at, so "
            "a model without it looks at the first word instead.",
            _tokenizer_with(encode_batch=_without_frame, encode=_joined_whole),
        ),
        Misconception(
            "the second text of a pair has its own [CLS]",
            "A pair is [CLS] first [SEP] second [SEP]: one [CLS] for both. Joining the ids of two "
            "encoded texts leaves a second one in the middle.",
            _tokenizer_with(encode=_joined_whole),
        ),
        Misconception(
            "a pair has only one [SEP]",
            "A pair is [CLS] first [SEP] second [SEP]. Each text has a [SEP] at its end, the "
            "second one too.",
            _tokenizer_with(encode=_one_sep),
        ),
        Misconception(
            "no [SEP] stands between the two texts",
            "A pair is [CLS] first [SEP] second [SEP]. Without the one in the middle nothing in "
            "`input_ids` says where the second text begins.",
            _tokenizer_with(encode=_no_separator_between),
        ),
        Misconception(
            "101 and 102 are taken for [CLS] and [SEP] in every vocabulary",
            "They have these ids in the English models that Google released and other ids "
            "elsewhere, in your own vocabulary, say. Ask the tokenizer: `self.cls_token_id`, "
            "`self.sep_token_id`.",
            _tokenizer_with(encode_batch=_frame_of_base_uncased),
        ),
        Misconception(
            "special tokens in the text are cut in pieces",
            "[MASK] written in a text means the special token, as in every fill-mask example. The "
            "usual way cuts it into [, mask and ]. `split_special_tokens` gives you the parts of "
            "the text between them, and the special tokens as parts of their own.",
            _tokenizer_with(tokens_with_spans=_special_tokens_cut),
        ),
        Misconception(
            "the fast way cuts special tokens in pieces",
            "With spans your tokenizer keeps [MASK] whole, in `encode` and `encode_batch` it does "
            "not. A chunk that has a special token inside (`self.special_token.search`) must not "
            "take the short cut for plain ASCII.",
            _tokenizer_with(encode_batch=_cut_on_the_fast_way),
        ),
        Misconception(
            "chunks are cut where str.split cuts, even at characters that are dropped",
            "`str.split` counts \\x0b, \\x0c, \\x1c to \\x1f and \\x85 as white space. "
            "`normalize` drops them, so that the letters on both sides form one word. A text with "
            "one of them (`UNSPLITTABLE` finds it) must stay one chunk.",
            _tokenizer_with(encode_batch=_cut_where_split_cuts),
        ),
        Misconception(
            "an error names the place in the chunk instead of the place in the text",
            "The message about half of a character says where it stands, and whoever reads it "
            "looks there, in the text. A text with a surrogate (`UNSPLITTABLE` finds it) must not "
            "be cut into chunks first.",
            _tokenizer_with(encode_batch=_in_chunks),
        ),
        Misconception(
            "the same list is handed out twice",
            "A remembered list belongs to the memory. A caller who appends padding to what you "
            "returned changes every later result for the same text. Make a new list for each call.",
            _tokenizer_with(encode_batch=_same_lists_again),
        ),
        Misconception(
            "a cased model lower-cases",
            "`self.lowercase` must reach `normalize`, and the short cut for plain ASCII must look "
            "at it too. A cased model has other vectors for Polish and polish.",
            _tokenizer_with(tokens_with_spans=_with_settings(lowercase=True)),
        ),
        Misconception(
            "strip_accents is not handed on",
            "`normalize` takes three settings, and `self.strip_accents` is one of them. Without it "
            "accents follow the case, whatever the tokenizer was told when it was made.",
            _tokenizer_with(tokens_with_spans=_with_settings(strip_accents=None)),
        ),
        Misconception(
            "spans are places in the normalized text",
            "A span must cut the piece out of the text that the caller has: with its spaces, "
            "accents and invisible characters. `normalize(..., with_alignment=True)` says for "
            "each character where it came from; look both ends up there.",
            _tokenizer_with(tokens_with_spans=_spans_by(_in_the_clean_text)),
        ),
        Misconception(
            "spans start anew after a special token",
            "`split_special_tokens` gives the parts of a text and where each begins. The spans you "
            "find in a part count from its beginning: add that offset.",
            _tokenizer_with(tokens_with_spans=_spans_by(_within_the_part)),
        ),
        Misconception(
            "a piece's span reaches to where the next character came from",
            "The end is one past the piece's own last character: `origin[last] + 1`. Taking "
            "`origin[last + 1]` instead swallows what was dropped in between, such as an accent or "
            "an invisible character after the word.",
            _tokenizer_with(tokens_with_spans=_spans_by(_up_to_the_next)),
        ),
        Misconception(
            "every piece has the span of its whole word",
            "Each piece stands for its own letters. Within a word, begin where the last piece "
            "ended, and go on by the piece's length without its ##.",
            _tokenizer_with(tokens_with_spans=_spans_by(_of_the_whole_word)),
        ),
        Misconception(
            "an unknown word's span is five characters long",
            "Five is the length of the text '[UNK]', not of the word. An unknown word's span is "
            "the whole word.",
            _tokenizer_with(tokens_with_spans=_spans_by(_unknown_of_five)),
        ),
        Misconception(
            "the odd place goes to the first text",
            "When two long texts share an odd room, one place is left over. It goes to the longer "
            "text, and to the second where they are equally long. It is a matter of taste, but "
            "everybody must do the same, or ids differ.",
            _tokenizer_with(truncated_lengths=_halved("first")),
        ),
        Misconception(
            "the odd place goes to the second text even if the first is longer",
            "When two long texts share an odd room, one place is left over. It goes to the longer "
            "text, and to the second only where they are equally long.",
            _tokenizer_with(truncated_lengths=_halved("second")),
        ),
        Misconception(
            "both texts of a pair are cut to half, even if one is short",
            "'Longest first' takes from the longer text until both are equally long. A text that "
            "is shorter than half of the room stays whole, and the other has all that is left.",
            _tokenizer_with(
                truncated_lengths=_longest_first(
                    lambda first, second, room: (min(first, room // 2), min(second, -(-room // 2)))
                )
            ),
        ),
        Misconception(
            "the second text is cut first, the first one only if that is not enough",
            "'Longest first' is fair to both: two long texts get half of the room each. As it is, "
            "a long first text leaves the second nothing.",
            _tokenizer_with(
                truncated_lengths=_longest_first(
                    lambda first, second, room: (min(first, room), max(room - first, 0))
                )
            ),
        ),
        Misconception(
            "stride is the step from window to window",
            "In Transformers, `stride` is the overlap: so many tokens at the end of a window come "
            "again at the beginning of the next. The step is size - stride.",
            _tokenizer_with(
                windows=_windows_by(lambda length, size, stride: range(0, length, stride or size))
            ),
        ),
        Misconception(
            "windows do not overlap",
            "Each window begins with the last `stride` tokens of the one before, so that every "
            "token has neighbours on both sides in one of them. The step is size - stride.",
            _tokenizer_with(
                windows=_windows_by(lambda length, size, stride: range(0, length, size))
            ),
        ),
        Misconception(
            "the last window lies inside the one before",
            "When the remaining tokens are no more than the overlap, the window before has them "
            "all, and another window would hold nothing new. Stop where no new token is left: "
            "`range(0, len(tokens) - stride, size - stride)`.",
            _tokenizer_with(
                windows=_windows_by(lambda length, size, stride: range(0, length, size - stride))
            ),
        ),
        Misconception(
            "the last window is moved back to be full",
            "The last window may be shorter. Moved back, it overlaps by more than `stride`, and "
            "whoever puts the windows together again counts tokens twice.",
            _tokenizer_with(windows=_windows_by(_last_window_full)),
        ),
        Misconception(
            "only the first window is kept",
            "That is right for `stride=None`, where what is too long is cut off. A number, 0 too, "
            "asks for all of the text.",
            _tokenizer_with(windows=_first_window_always),
        ),
        Misconception(
            "pieces with ## are not joined when decoding",
            "## says that the piece goes on with the word: no space before it, and the mark itself "
            "is left out.",
            _decoded_by(lambda self, pieces: " ".join(pieces)),
        ),
        Misconception(
            "a space stays before full stops and commas",
            "After joining, `CLEAN_UP` says which spaces go: the one before a full stop, a comma, "
            "a question mark. Apply its replacements, in order, to each piece with its space.",
            _decoded_by(lambda self, pieces: decoders.WordPiece(cleanup=False).decode(pieces)),
        ),
        Misconception(
            "the clean-up is made in the whole text",
            "Rust cleans each piece alone, with the space before it. So ' between two words is "
            "never found, and n ' t stays as it is; in the joined text it would become n't. It "
            "looks like a bug, and is what Transformers gives.",
            _decoded_by(_cleaned_as_a_whole),
        ),
        Misconception(
            "a ## at the very beginning is dropped",
            "The first piece keeps its mark: there is nothing before it that it could go on from, "
            "and the text of a window shows that it begins inside a word.",
            _decoded_by(_first_without_mark),
        ),
        Misconception(
            "skip_special_tokens is ignored",
            "With `skip_special_tokens=True` the five special tokens are left out of the text, "
            "[UNK] among them. `self.all_special_ids` has the ids of all five.",
            _decoded_by(lambda self, pieces: decoders.WordPiece().decode(pieces), skip=False),
        ),
        Misconception(
            "an id that the vocabulary does not have is an error when decoding",
            "Models often have a few rows more than the vocabulary has pieces, and may predict "
            "one. Such an id is left out: look it up in `self.pieces` with care.",
            _tokenizer_with(decode=_unknown_id),
        ),
    ),
    hints=(
        "Begin with `tokens_with_spans`: `split_special_tokens`, and for each other part "
        "`normalize` with alignment, `pre_tokenize`, `wordpiece`. `chunk_ids` may at first return "
        "the ids of that and nothing else, `encode_batch` puts [CLS] and [SEP] around them, and "
        "`encode` calls `encode_batch`. Make them fast when they are right.",
        "Spans: a piece stands for so many characters of the clean text as it has without its ##; "
        "[UNK] for the whole word. With first and last such place, the span is "
        "(offset + origin[first], offset + origin[last] + 1). Windows begin at "
        "range(0, len(tokens) - stride, size - stride) and each is a slice.",
        "Longest first: the shorter text keeps min(its length, room // 2), the other one has the "
        "rest of the room; of two equally long ones the second counts as the longer. To be fast, "
        "`encode_batch` splits a text at white space (unless `UNSPLITTABLE` finds something in it) "
        "and takes the ids of each chunk from `self.memo`, which calls `chunk_ids` only once for "
        "each chunk.",
    ),
)

# --- 1.6 clinic: a model that has forgotten names ------------------------------------------------


def their_settings(vocab: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings under which Rust's normalizers would leave every piece as it is."""
    pieces = _without_special_tokens(vocab)
    letters = set("".join(pieces))
    lower, apart = normalizers.Lowercase(), normalizers.NFD()
    cased = any(lower.normalize_str(letter) != letter for letter in letters)
    accented = any(_is_accented(apart.normalize_str(letter)) for letter in letters)
    return {**settings, "do_lower_case": not cased, "strip_accents": not accented}


def _without_special_tokens(vocab: list[str]) -> list[str]:
    return [piece for piece in vocab if not (piece[0] == "[" and piece[-1] == "]")]


def _is_accented(letter: str) -> bool:
    """Whether a letter that NFD took apart loses marks, and not all of itself, to Rust."""
    return normalizers.StripAccents().normalize_str(letter) not in (letter, "")


def _clinic_cases(rng: np.random.Generator) -> Iterator[Case]:
    own = {"model_max_length": 512, "tokenize_chinese_chars": True, "unk_token": "[UNK]"}

    def case(name: str, vocab: Any, lower: bool, strip: bool | None) -> Case:
        settings = {**own, "do_lower_case": lower, "strip_accents": strip}
        order = [str(key) for key in rng.permutation(list(settings))]
        return Case(name, {"vocab": vocab, "settings": {key: settings[key] for key in order}})

    def vocabulary(*more: str) -> list[str]:
        """Draw pieces in lower case without accents, and put some others among them."""
        words = [*_words(rng, 12), *("##" + word for word in _words(rng, 6))]
        pieces = [str(piece) for piece in rng.permutation([*words, *more])]
        return ["[PAD]", "[unused0]", *SPECIAL_TOKENS[:2], *SPECIAL_TOKENS[3:], *pieces]

    no_case = ["!", "7", "##25", "[", "]", "我", "か", "ß", "ﬁ", "##각", "한"]
    name = _word(rng)
    accent = str(rng.choice(["é", "ü", "š", "й", "ờ"]))
    capital = str(rng.choice(["É", "Ü", "Š", "Й"]))
    both = vocabulary(name.title(), "##" + name + accent, *no_case)
    yield case("a cased model whose settings are an uncased one's", both, True, None)
    yield case("an uncased model whose settings are a cased one's", vocabulary(), False, False)
    yield case("pieces without case", vocabulary(*no_case), False, None)
    yield case(
        "lower case with accents", vocabulary("##" + accent + name, name + accent), True, None
    )
    yield case("cased without accents", vocabulary(name.title(), name.upper()), True, True)
    yield case("capitals inside words only", vocabulary("##" + name[:2].upper()), True, None)
    yield case("one piece in another script", vocabulary(str(rng.choice(["Ж", "Ω"]))), True, None)
    yield case("one capital with an accent", vocabulary(capital), True, None)
    yield case("settings that are right already", vocabulary(), True, True)
    yield case("the real vocabulary's beginning", "bert-base-uncased", False, None)


def _clinic_probe(part: Any, vocab: Any, settings: dict[str, Any]) -> dict[str, Any]:
    mended = part.mend_tokenizer(
        list(_real_vocabulary()[:3000]) if isinstance(vocab, str) else vocab, settings
    )
    if not isinstance(mended, dict):
        raise TypeError(f"should return a dict, returned {type(mended).__name__}")
    return {"the settings' names": sorted(mended), **mended}


def _mended(
    lower: Callable[[list[str]], bool] | None = None,
    strip: Callable[[list[str], bool], Any] | None = None,
) -> dict[str, Any]:
    """Return the reference with one of its two decisions made otherwise."""

    def mend_tokenizer(vocab: list[str], settings: dict[str, Any]) -> dict[str, Any]:
        right = their_settings(vocab, settings)
        pieces = _without_special_tokens(vocab)
        if lower is not None:
            right["do_lower_case"] = lower(pieces)
        if strip is not None:
            right["strip_accents"] = strip(pieces, right["do_lower_case"])
        return right

    return {"mend_tokenizer": mend_tokenizer}


def _changed_in_place(vocab: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    settings.update(their_settings(vocab, settings))
    return settings


def _special_tokens_too(vocab: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    return {**their_settings(vocab, settings), "do_lower_case": False}


def _turned_round(vocab: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    lower = not settings["do_lower_case"]
    return {**settings, "do_lower_case": lower, "strip_accents": lower}


def _only_the_two(vocab: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    right = their_settings(vocab, settings)
    return {name: right[name] for name in ("do_lower_case", "strip_accents")}


CLINIC = Exercise(
    id="1.6",
    reference={"mend_tokenizer": their_settings},
    reference_name="tokenizers.normalizers: Lowercase, NFD and StripAccents must change no piece",
    cases=_clinic_cases,
    probe=_clinic_probe,
    misconceptions=(
        Misconception(
            "the special tokens' capitals count",
            "[CLS] and [SEP] are written in capitals in every vocabulary, cased or not. They are "
            "no text that was tokenized; leave pieces in brackets out before you look for "
            "capitals.",
            {"mend_tokenizer": _special_tokens_too},
        ),
        Misconception(
            "the settings are turned round without looking at the vocabulary",
            "The settings that come with this patient are wrong; the next one's may be wrong in "
            "another way, or right. Only the vocabulary tells how the text was treated when it was "
            "made.",
            {"mend_tokenizer": _turned_round},
        ),
        Misconception(
            "accents are taken to follow the case",
            "That is the default, `strip_accents=None`, and a good guess. But there are models "
            "that lower-case and keep accents, and the other way round. Look for letters with "
            "accents as well as for capitals.",
            _mended(strip=lambda pieces, lower: lower),
        ),
        Misconception(
            "strip_accents is None, to follow the case",
            "None is resolved when the tokenizer is loaded and follows `do_lower_case`, which is "
            "wrong wherever case and accents differ. Answer True or False, from the vocabulary.",
            _mended(strip=lambda pieces, lower: None),
        ),
        Misconception(
            "what has no case counts as a capital",
            "`piece.islower()` is False for '!', for '7' and for Chinese characters, so no "
            "vocabulary would ever be uncased. Ask whether lower-casing would change the piece: "
            "`piece.lower() != piece`.",
            _mended(lower=lambda pieces: all(piece.islower() for piece in pieces)),
        ),
        Misconception(
            "a capital that has no small letter counts",
            "`isupper` is true of ℝ, which stands in the vocabulary of bert-base-uncased: it is a "
            "capital by Unicode, and `lower` leaves it as it is. Ask whether lower-casing would "
            "change the piece: `piece.lower() != piece`.",
            _mended(lower=lambda pieces: not any(map(str.isupper, "".join(pieces)))),
        ),
        Misconception(
            "only the letters A to Z are looked at",
            "É, Ж and Ω are capitals too, and a model of Russian has no others. Python's `lower` "
            "knows the letters of every script.",
            _mended(lower=lambda pieces: not re.search("[A-Z]", "".join(pieces))),
        ),
        Misconception(
            "only pieces that begin a word are looked at",
            "Capitals also stand inside words, in names like McDonald and in abbreviations, and "
            "some of them are in the vocabulary only as pieces with ##.",
            _mended(
                lower=lambda pieces: (
                    not any(
                        piece != piece.lower() for piece in pieces if not piece.startswith("##")
                    )
                )
            ),
        ),
        Misconception(
            "Korean syllables are taken for letters with accents",
            "NFD takes a Korean syllable apart too, into its letters. Those are no accents: "
            "their combining class is 0. An accent is a combining mark.",
            _mended(
                strip=lambda pieces, lower: all(
                    len(unicodedata.normalize("NFD", char)) == 1 for char in "".join(pieces)
                )
            ),
        ),
        Misconception(
            "every letter beyond ASCII is taken for one with an accent",
            "ß, ﬁ and all Chinese characters are outside ASCII and have no accent. A letter has "
            "one if NFD takes it apart into a letter and combining marks.",
            _mended(strip=lambda pieces, lower: "".join(pieces).isascii()),
        ),
        Misconception(
            "the settings are changed in place",
            "The caller still holds the old settings, to compare or to report what was wrong. "
            "Return a new dict, `{**settings, ...}`, and leave theirs alone.",
            {"mend_tokenizer": _changed_in_place},
        ),
        Misconception(
            "the other settings are lost",
            "The length limit and the special tokens' names are in the same file. Return all "
            "settings, with only the two changed.",
            {"mend_tokenizer": _only_the_two},
        ),
    ),
    hints=(
        "Look at the pieces, not at the settings. What would an uncased tokenizer do to a text, "
        "and which pieces could then never be found?",
        "Leave the pieces in brackets out. The model is uncased if `piece.lower() == piece` for "
        "all others. An accent shows when a character is taken apart: "
        "`unicodedata.normalize('NFD', char)`.",
        "A character has an accent if one of the characters after the first in its NFD has "
        "`unicodedata.combining(mark)` above 0. Return {**settings, ...} with both answers as True "
        "or False.",
    ),
)

EXERCISES = [NORMALIZE, PRE_TOKENIZE, WORDPIECE, TRAIN, TOKENIZER, CLINIC]
