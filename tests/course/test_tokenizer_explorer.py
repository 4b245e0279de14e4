"""Chapter 1's widget: what it says is what the tokenizer does, and it is readable by everybody."""

import re

import pytest
from transformers import BertTokenizer

from bertlab.course.reference import minilm_folder
from bertlab.course.widgets import tokenizer_explorer as explorer

TEXTS = [
    "",
    "Zoë's ETFs fell; unhappiness, a snowman☃ and 北京!",
    "two\nlines\tof cafe\u0301 and zero\u200bwidth",
    "[MASK] stays whole, <b>so does</b> this & that",
]


@pytest.mark.parametrize("text", TEXTS)
def test_it_shows_what_hugging_faces_tokenizer_gives(complete, text):
    expected = BertTokenizer.from_pretrained(minilm_folder())(text, return_offsets_mapping=True)
    pieces = explorer.pieces_of(text)
    assert [piece.id for piece in pieces] == expected["input_ids"][1:-1]
    assert [(p.start, p.end) for p in pieces] == expected["offset_mapping"][1:-1]


def test_each_piece_comes_with_its_characters_of_the_text(complete):
    text = "Zo\u00eb\u00ad runs"  # a soft hyphen, which is dropped
    assert [(p.piece, p.source) for p in explorer.pieces_of(text)] == [
        ("zoe", "Zo\u00eb"),
        ("runs", "runs"),
    ]


def test_the_unknown_is_marked_without_colour(complete):
    shown = explorer.render("a snowman☃ melts")
    assert "4 pieces, 1 unknown" in shown.text
    assert re.search(r"\[UNK\] +100 +2 to 10 +snowman☃  ✗ unknown", shown.text)
    assert "✗ unknown: snowman☃" in shown.html
    assert "dashed" in shown.html
    assert "unknown:" not in explorer.render("a snow man melts").html


def test_markup_in_the_text_is_shown_and_never_obeyed(complete):
    shown = explorer.render("<script>alert('☃☃')</script> ☃<b>")
    assert "<script" not in shown.html
    assert "<b>☃" not in shown.html
    assert "&lt;" in shown.html


def test_a_wrong_setting_can_be_seen(complete):
    view = explorer.tokenizer_explorer("Hello")
    assert "none unknown" in view._picture.value
    view.controls["lowercase"].value = False
    assert "✗ unknown: Hello" in view._picture.value


def test_it_shows_the_tokenizer_the_package_has_now(complete, monkeypatch):
    class Shouting(complete.tokenizer.WordPieceTokenizer):
        def __call__(self, text, **options):
            return super().__call__("loud", **options)

    monkeypatch.setattr(complete.tokenizer, "WordPieceTokenizer", Shouting)
    assert [piece.piece for piece in explorer.pieces_of("quiet")] == ["loud"]


def test_a_long_text_is_cut_and_the_rest_counted(complete):
    shown = explorer.render("word " * 200)
    assert "200 pieces" in shown.text
    assert "... 50 more" in shown.text
    assert shown.html.count("<code") == explorer.MOST


def test_half_a_character_is_an_error_that_can_be_read(complete):
    view = explorer.tokenizer_explorer()
    view.controls["text"].value = "bad \ud800"
    assert "surrogate" in view._picture.value


def test_the_static_view_names_every_piece(complete):
    bundle = explorer.tokenizer_explorer()._repr_mimebundle_()
    for piece in explorer.pieces_of(explorer.EXAMPLE):
        assert piece.piece in bundle["text/plain"]
        assert str(piece.id) in bundle["text/html"]
