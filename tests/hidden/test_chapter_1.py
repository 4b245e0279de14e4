"""Chapter 1: laws of the tokenizer, and the edges of what it reads."""

import unicodedata

import pytest
from tokenizers import normalizers

from bertlab.course.exercises import chapter_1 as drawing
from bertlab.course.exercises.rust import SPECIAL_TOKENS

LETTERS = "abcdegikmnoprstu"


def several_scripts(rng):
    """Draw a text of many scripts, with spaces of several kinds and characters that are dropped."""
    spaces = drawing._joined(rng, [*drawing.WHITE_SPACE, "  ", *drawing.CONTROLS])
    return f"{drawing._any_script(rng)} {spaces} {drawing._joined(rng, drawing.ACCENTED)}"


def words(rng, count):
    """Draw different words of Latin letters."""
    return drawing._words(rng, count)


def cleaned(text):
    """Return the text as BERT's normalizer leaves it."""
    return normalizers.BertNormalizer().normalize_str(text)


# --- 1.1 normalize ---


def normalized(of, text, **more):
    """Clean a text."""
    return of.call("tokenizer.normalize", text, **more)


@pytest.mark.exercise("1.1")
@pytest.mark.hint("Each character is looked at by itself: what stands beside it changes nothing.")
def test_a_text_is_its_parts(submission, rng):
    """Two texts with a space between them, cleaned together or apart"""
    one, two = f" {several_scripts(rng)}\n", f"\t{several_scripts(rng)}  "
    submission.agrees(
        lambda of: normalized(of, f"{one} {two}"),
        truth=lambda: f"{cleaned(one)} {cleaned(two)}",
    )


@pytest.mark.exercise("1.1")
@pytest.mark.hint("`origin` is as long as the clean text, and says where each character came from.")
def test_origins_in_many_scripts(submission, rng):
    """Where each character came from, in many scripts"""
    for options in ({}, {"lowercase": False}, {"strip_accents": False}):
        submission.agrees(
            lambda of, text, more: normalized(of, text, with_alignment=True, **more),
            *(several_scripts(rng), options),
        )


@pytest.mark.exercise("1.1")
@pytest.mark.hint("A block ends where it ends: its last character is in it, the next one is not.")
def test_the_edges_of_the_chinese_blocks(submission):
    """The first and last characters of the blocks that get spaces, and their neighbours"""
    places = [0x4E00, 0x9FA5, 0x3400, 0x4DB5, 0x20000, 0x2A6D6, 0xF900, 0xFA2D, 0x2F800, 0x2FA1D]
    near = [chr(place + step) for place in places for step in (-1, 0, 1)]
    old = unicodedata.ucd_3_2_0
    text = "a".join(char for char in near if old.category(char) != "Cn")
    submission.agrees(lambda of: normalized(of, text))


@pytest.mark.exercise("1.1")
@pytest.mark.hint("A text may be empty, or have nothing in it that is kept.")
def test_nothing_is_left(submission):
    """Texts of which nothing is left, and the empty one"""
    for text in ("", "\x00\u200b", "\u0301\u0308"):
        with_origin = normalized(submission, text, with_alignment=True)
        assert with_origin == ("", [])
        assert normalized(submission, text) == ""


@pytest.mark.exercise("1.1")
@pytest.mark.hint("Half of a surrogate pair is refused wherever it stands, and the place is said.")
def test_half_a_character_anywhere(submission, rng):
    """Half of a character at the beginning, in the middle and at the end"""
    text = " ".join(words(rng, 30))
    for place in (0, int(rng.integers(20, 60)), len(text)):
        half = str(rng.choice(["\ud800", "\udbff", "\udc00", "\udfff"]))
        with submission.raises(ValueError, place):
            normalized(submission, text[:place] + half + text[place:])


# --- 1.2 pre-tokenize ---


def pre_tokenized(of, text):
    """Cut a text into words."""
    return of.call("tokenizer.pre_tokenize", text)


@pytest.mark.exercise("1.2")
@pytest.mark.hint("`text[start:end]` is the word, and only spaces lie between two spans.")
def test_spans_cut_the_words_out(submission, rng):
    """Every span cuts its word out of the text, and nothing but spaces is left over"""
    text = cleaned(f"{several_scripts(rng)} {'.'.join(words(rng, 5) * 2)}")

    def cut(of):
        found = pre_tokenized(of, text)
        left, parts = text, []
        for _, (start, end) in found:
            parts.append(text[start:end])
            left = left[:start] + " " * len(left[start:end]) + left[end:]
        return {"the words": [word for word, _ in found] == parts, "left": left.strip(" ")}

    submission.agrees(cut, truth=lambda: {"the words": True, "left": ""})


@pytest.mark.exercise("1.2")
@pytest.mark.hint("`is_punctuation` knows all marks; what is none stays in its word.")
def test_every_ascii_character(submission, rng):
    """Each character of ASCII, between letters and twice in a row"""
    ascii_text = " ".join(f"a{char}b{char}{char}" for char in map(chr, range(33, 127)))
    submission.agrees(lambda of: of.call("tokenizer.pre_tokenize", ascii_text))


@pytest.mark.exercise("1.2")
@pytest.mark.hint("Punctuation is all of Unicode's categories P, not a list you can type.")
def test_marks_of_all_scripts(submission, rng):
    """Marks of all scripts, drawn from all of Unicode's"""
    old = unicodedata.ucd_3_2_0
    marks = [chr(code) for code in range(0xA1, 0xFF66) if old.category(chr(code))[0] in "PS"]
    stable = [mark for mark in marks if unicodedata.category(mark) == old.category(mark)]
    text = "".join(f"{word}{rng.choice(stable)}" for word in words(rng, 60))
    submission.agrees(lambda of: pre_tokenized(of, text))


@pytest.mark.exercise("1.2")
@pytest.mark.hint("Do not forget the first and the last word; without a word there is no span.")
def test_short_texts(submission):
    """Texts of one character, of none, and of spaces"""
    texts = ["", " ", "   ", "a", ".", " a", "a ", ". ", "a.", ".a", "  ..  ", "é", "我"]
    submission.agrees(lambda of: [pre_tokenized(of, text) for text in texts])


# --- 1.3 greedy longest match ---


def cuts_of(of, drawn, vocab, *more):
    """Cut some words into pieces."""
    return [of.call("tokenizer.wordpiece", word, vocab, *more) for word in drawn]


def pieces_of(rng, letters=LETTERS[:5], longer=40):
    """Draw a vocabulary of a few letters and longer pieces of them."""
    return dict.fromkeys(drawing._small_vocabulary(rng, letters, longer), 0)


def letter_words(rng, count, letters=LETTERS[:5]):
    """Draw words of a few letters."""
    return ["".join(rng.choice(list(letters), int(rng.integers(1, 15)))) for _ in range(count)]


@pytest.mark.exercise("1.3")
@pytest.mark.hint("The pieces without their ## are the word again, letter by letter.")
def test_pieces_joined_are_the_word(submission, rng):
    """The pieces, joined again, are the word, and only the first has no ##"""
    vocab, drawn = pieces_of(rng), letter_words(rng, 25)

    def joined(of):
        cuts = cuts_of(of, drawn, vocab)
        first = [not cut[0].startswith("##") for cut in cuts]
        later = [all(piece.startswith("##") for piece in cut[1:]) for cut in cuts]
        return ["".join(p.removeprefix("##") for p in cut) for cut in cuts], first, later

    submission.agrees(joined, truth=lambda: (drawn, [True] * 25, [True] * 25))


@pytest.mark.exercise("1.3")
@pytest.mark.hint(
    "The longest piece is taken for good, even where a shorter one would serve later."
)
def test_greed_where_it_hurts(submission, rng):
    """Vocabularies with holes, where the longest piece is often the wrong choice"""
    full = pieces_of(rng, LETTERS[:3], 30)
    vocab = {piece: 0 for piece in full if rng.random() < 0.6}
    submission.agrees(cuts_of, letter_words(rng, 30, LETTERS[:3]), vocab)


@pytest.mark.exercise("1.3")
@pytest.mark.hint("A word that is a piece needs no cut, unless it has too many characters.")
def test_a_word_that_is_a_piece(submission, rng):
    """Words that stand in the vocabulary whole, up to the limit and beyond it"""
    known = ["😀" * 100, "é" * 100, "我", *letter_words(rng, 5)]
    vocab = {**pieces_of(rng), **dict.fromkeys([*known, "ü" * 101, "é" * 7, "é"], 0)}
    submission.agrees(
        lambda of: [
            *cuts_of(of, [*known, "ü" * 101], vocab),
            *cuts_of(of, ["é" * 7, "é"], vocab, "[UNK]", 6),
        ],
        truth=lambda: [*([word] for word in known), ["[UNK]"], ["[UNK]"], ["é"]],
    )


@pytest.mark.exercise("1.3")
@pytest.mark.hint("One character that no piece has makes all of the word unknown, once.")
def test_one_strange_character(submission, rng):
    """A character that no piece has, at each place of a word"""
    vocab, word = {**pieces_of(rng), "<?>": 0}, "".join(rng.choice(list(LETTERS[:5]), 9))
    spoiled = [word[:place] + "☃" + word[place:] for place in range(10)]
    submission.agrees(
        *(cuts_of, [*spoiled, "", "☃☃"], vocab, "<?>"),
        truth=lambda *_: [*[["<?>"]] * 10, [], ["<?>"]],
    )


# --- 1.4 learn a vocabulary ---

RULES = ("wordpiece", "bpe")
right = drawing.ByDefinition()


def trained(of, counts, size, **more):
    """Learn a vocabulary."""
    return of.call("tokenizer.train_wordpiece", counts, size, **more)


def counted(rng, letters=LETTERS[:4], count=14):
    """Draw words and how often each occurs."""
    return {word: int(rng.integers(1, 30)) for word in letter_words(rng, count, letters)}


def alphabet(word_counts):
    """Return the special tokens and the symbols that words begin as."""
    symbols = {"##" * (place > 0) + char for w in word_counts for place, char in enumerate(w)}
    return [*drawing.FIRST_TOKENS, *sorted(symbols)]


@pytest.mark.exercise("1.4")
@pytest.mark.hint(
    "A vocabulary depends on the words and their counts, not on the order they come in."
)
def test_the_order_of_the_words_does_not_matter(submission, rng):
    """The same words in another order give the same vocabulary"""
    counts = counted(rng)
    turned = {word: counts[word] for word in rng.permutation(list(counts)).tolist()}
    submission.agrees(trained, turned, len(alphabet(counts)) + 12)


@pytest.mark.exercise("1.4")
@pytest.mark.hint(
    "Merges come one after the other: a larger vocabulary begins with the smaller one."
)
def test_a_larger_vocabulary_begins_with_the_smaller(submission, rng):
    """A larger vocabulary begins with the smaller one"""
    counts = counted(rng)
    sizes = [len(alphabet(counts)) + merges for merges in (0, 1, 5, 9)]
    for rule in RULES:
        submission.agrees(
            lambda of, rule: [trained(of, counts, size, rule=rule) for size in sizes],
            rule,
            truth=lambda rule: [right(counts, sizes[-1], rule=rule)[:size] for size in sizes],
        )


@pytest.mark.exercise("1.4")
@pytest.mark.hint("With room enough, joining goes on until every word is one symbol.")
def test_every_word_becomes_one_piece(submission, rng):
    """With room enough, every word becomes a piece, and no piece is there twice"""

    def left_out(of, counts, rule):
        found = trained(of, counts, 10**4, rule=rule)
        return sorted(set(counts) - set(found)), len(found) - len(set(found))

    for rule in RULES:
        submission.agrees(left_out, counted(rng, count=8), rule, truth=lambda *_: ([], 0))


@pytest.mark.exercise("1.4")
@pytest.mark.hint("Scores compare pairs: ten times as many of every word changes no comparison.")
def test_ten_times_as_many(submission, rng):
    """Every word ten times as often, and each only once"""
    for counts in (counted(rng), dict.fromkeys(letter_words(rng, 9), 1)):
        tenfold = {word: 10 * count for word, count in counts.items()}
        submission.agrees(
            lambda of, *given: [trained(of, counts, given[-1]) for counts in given[:2]],
            *(counts, tenfold, len(alphabet(counts)) + 9),
            truth=lambda counts, _, size: [right(counts, size)] * 2,
        )


@pytest.mark.exercise("1.4")
@pytest.mark.hint(
    "The list starts with the special tokens and the sorted alphabet, whatever they are."
)
def test_words_of_one_character(submission, rng):
    """Words of one character, in several scripts, and no special tokens"""
    counts = {char: int(rng.integers(1, 9)) for char in rng.permutation(list("zeñ我Ωб"))}
    whole = len(drawing.FIRST_TOKENS) + 6
    submission.agrees(
        lambda of: [
            *(trained(of, counts, size) for size in (50, whole)),
            trained(of, counts, 6, special_tokens=[]),
        ],
        truth=lambda: [alphabet(counts), alphabet(counts), sorted(counts)],
    )
    with submission.raises(ValueError):
        trained(submission, counts, whole - 1)


# --- 1.5 the whole tokenizer ---


def vocabulary(rng, known):
    """Draw a vocabulary in which some words are whole, some in pieces, and z is unknown."""
    return drawing._own_vocabulary(rng, known)


def tokenizer(of, vocab, **settings):
    """Make a tokenizer in the sandbox."""
    return of.make("tokenizer.WordPieceTokenizer", vocab, **settings)


@pytest.mark.exercise("1.5")
@pytest.mark.hint("A batch gives what its texts give one by one, however often they come.")
def test_a_batch_is_its_texts(submission, rng):
    """A batch gives what its texts give one by one, in either order"""
    known = words(rng, 9)
    vocab, texts = vocabulary(rng, known), [*known, "", "z", f"{known[0]}z, {known[1]}!", known[0]]

    def rows(of):
        made = tokenizer(of, vocab)
        batch, turned = made.call("encode_batch", texts), made.call("encode_batch", texts[::-1])
        single = [made.call("encode", text) for text in texts]
        return [batch, turned[::-1], single, made(texts)["input_ids"]]

    submission.agrees(rows)


@pytest.mark.exercise("1.5")
@pytest.mark.hint("Cut a piece's span out of the text, lower-case it, and you have the piece.")
def test_spans_cut_the_pieces_out(submission, rng):
    """Every span cuts its own piece out of the text"""
    known = words(rng, 8)
    text = "  ".join(f"{word.title()}{rng.choice(list('!,.?'))}" for word in known)
    vocab = [
        piece
        for piece in vocabulary(rng, known)
        if piece == piece.lower() or piece in SPECIAL_TOKENS
    ]

    def cut(of):
        made = tokenizer(of, vocab)
        found = made(text, return_offsets=True)
        pieces = [vocab[index].removeprefix("##") for index in found["input_ids"][1:-1]]
        return [text[a:b].lower() for a, b in found["offsets"][1:-1]] == pieces, "".join(pieces)

    submission.agrees(cut, truth=lambda: (True, text.lower().replace(" ", "")))


@pytest.mark.exercise("1.5")
@pytest.mark.hint(
    "Padding is added at the end and marked 0; what was there before stays as it was."
)
def test_padding_adds_and_changes_nothing(submission, rng):
    """What padding adds is marked, and the rest is as it was"""
    known = words(rng, 9)
    vocab = vocabulary(rng, known)
    first, second = [" ".join(known[:n]) for n in (4, 1, 7)], [known[2], "", " ".join(known[3:])]

    def unpadded(of):
        batch = tokenizer(of, vocab)(first, second, padding=True)
        rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
        kept = [[index for index, real in zip(*row, strict=True) if real] for row in rows]
        return kept, [len(row) for row in batch["token_type_ids"]], batch["attention_mask"]

    submission.agrees(unpadded)


@pytest.mark.exercise("1.5")
@pytest.mark.hint("Leave out of each window what it repeats, and the windows are the text again.")
def test_windows_are_the_text(submission, rng):
    """The windows without what they repeat are the whole text"""
    text, vocab = " ".join(words(rng, 40)), vocabulary(rng, words(rng, 5))

    def whole(of, stride):
        made = tokenizer(of, vocab)
        rows = [row[1:-1] for row in made(text, max_length=9, stride=stride)["input_ids"]]
        joined = rows[0] + [index for row in rows[1:] for index in row[stride:]]
        return joined == made.call("encode", text)[1:-1], min(map(len, rows)) > stride

    for stride in (0, 1, 4, 6):
        submission.agrees(whole, stride, truth=lambda _: (True, True))


@pytest.mark.exercise("1.5")
@pytest.mark.hint(
    "Ids are what the vocabulary says, also where it is a dict with numbers of its own."
)
def test_ids_of_their_own(submission, rng):
    """A vocabulary whose ids do not begin at 0 and have gaps"""
    known = words(rng, 8)
    pieces = vocabulary(rng, known)
    ids = (200 + 3 * rng.permutation(len(pieces))).tolist()
    text, vocab = f"[MASK] {' '.join(known)} z", dict(zip(pieces, ids, strict=True))

    def encoded(of):
        made = tokenizer(of, vocab)
        found = made.call("encode", text, known[0])
        return (
            found,
            made.call("decode", found),
            made.call("decode", found, skip_special_tokens=True),
        )

    submission.agrees(encoded)


@pytest.mark.exercise("1.5")
@pytest.mark.hint("The shorter text of a pair stays whole as long as it has no more than its half.")
def test_every_length_of_a_pair(submission, rng):
    """Pairs of all lengths, cut to every limit"""
    letters = [str(letter) for letter in rng.permutation(list(drawing._letters(rng, 9)))]
    vocab = [*SPECIAL_TOKENS, *letters]
    pairs = [(a, b, n) for a in (1, 4, 9) for b in (1, 5, 8) for n in (5, 8, 9, 12)]

    def cut(of):
        made = tokenizer(of, vocab)
        return [
            made(" ".join(letters[:a]), " ".join(letters[:b]), max_length=n)["token_type_ids"]
            for a, b, n in pairs
        ]

    submission.agrees(cut)


@pytest.mark.exercise("1.5")
@pytest.mark.hint("What `save` writes is a tokenizer that Transformers loads, with the same ids.")
def test_saved_for_transformers(submission, rng, tmp_path):
    """What is saved gives Transformers' tokenizer the same ids"""
    from transformers import BertTokenizer

    known = words(rng, 9)
    made = tokenizer(submission, vocabulary(rng, known), lowercase=False)
    folder = submission.folder()
    made.call("save", folder)
    files = folder.files()
    assert {"vocab.txt", "tokenizer_config.json"} <= set(files), f"there are {sorted(files)}"
    for name in ("vocab.txt", "tokenizer_config.json"):
        (tmp_path / name).write_bytes(files[name])
    texts = [" ".join([*known, *(word.title() for word in known), "É[MASK]é 我 z"]), ""]
    try:
        right = BertTokenizer.from_pretrained(tmp_path)(texts)["input_ids"]
    except Exception as error:
        raise AssertionError(f"Transformers cannot read it: {error}") from None
    submission.agrees(lambda of: made.call("encode_batch", texts), truth=lambda: right)


# --- 1.6 clinic ---


def mended(of, vocab, lower=True, strip=None):
    """Return the settings that a submission finds right."""
    settings = {"do_lower_case": lower, "strip_accents": strip, "model_max_length": 99}
    return of.call("clinic.mend_tokenizer", vocab, settings)


@pytest.mark.exercise("1.6")
@pytest.mark.hint("The vocabulary alone decides: what the settings said before changes nothing.")
def test_the_old_settings_do_not_matter(submission, rng):
    """The old settings do not matter, nor does mending twice or the pieces' order"""
    pieces = [*SPECIAL_TOKENS, *words(rng, 6), str(rng.choice(["é", "É", "e", "E"]))]
    turned = [str(piece) for piece in rng.permutation(pieces)]

    def answers(of):
        again = of.call("clinic.mend_tokenizer", turned, mended(of, pieces))
        old = [(True, None), (True, False), (False, True), (False, None)]
        return [again, *(mended(of, pieces, *settings) for settings in old)]

    submission.agrees(answers)


@pytest.mark.exercise("1.6")
@pytest.mark.hint("Run the normalizer on the pieces: with the right settings it changes none.")
def test_the_normalizer_changes_no_piece(submission, rng):
    """With the settings found, the normalizer leaves every piece as it is"""

    def changed(of, pieces):
        found = mended(of, [*SPECIAL_TOKENS, *pieces], False, False)
        options = found["do_lower_case"], found["strip_accents"]
        made = normalizers.BertNormalizer(lowercase=options[0], strip_accents=options[1])
        texts = [piece.removeprefix("##") for piece in pieces]
        return [made.normalize_str(text) for text in texts] == texts, options

    for more in ([], ["é"], ["É"], ["##K"], ["ǆ"]):
        submission.agrees(changed, [*words(rng, 6), *more])


@pytest.mark.exercise("1.6")
@pytest.mark.hint("Ask what lower-casing and NFD do to a letter, not what the letter looks like.")
def test_letters_that_look_like_others(submission):
    """Letters whose case or accent is easily misread, one at a time"""
    letters = [
        "ǅ",
        "ẞ",
        "İ",
        "ª",
        "ŉ",
        "ℝ",
        "Å",
        "ø",
        "ł",
        "ё",
        "ы",
        "각",
        "が",
        "हि",
        "我",
        "7",
        "ﬁ",
    ]
    submission.agrees(lambda of: [mended(of, [*SPECIAL_TOKENS, "a", letter]) for letter in letters])


@pytest.mark.exercise("1.6")
@pytest.mark.hint(
    "Special tokens stand in brackets and do not count; without pieces nothing speaks."
)
def test_no_pieces_but_special_tokens(submission):
    """A vocabulary of special tokens alone, and one whose pieces are brackets"""
    right = {"do_lower_case": True, "strip_accents": True, "model_max_length": 99}
    vocabs = [
        list(SPECIAL_TOKENS),
        [*SPECIAL_TOKENS, "[unused7]", "[X]"],
        [*SPECIAL_TOKENS, "a", "[", "]"],
    ]
    submission.agrees(
        lambda of: [mended(of, vocab, False, False) for vocab in vocabs], truth=lambda: [right] * 3
    )
