"""The explorer of chapter 2 shows MiniLM's own vectors, and says what it cannot show."""

import pytest
import torch

from bertlab.course.reference import vocabulary
from bertlab.course.widgets.embedding_explorer import (
    embedding_explorer,
    nearest_pieces,
    render,
    sentence_norms,
    tables,
)


def test_the_tables_are_those_of_the_model():
    sizes = {name: tuple(table.shape) for name, table in tables().items()}
    assert sizes == {"word": (30522, 384), "position": (512, 384), "token_type": (2, 384)}


def test_neighbors_are_sorted_and_never_the_piece_itself():
    found = nearest_pieces("king", 50)
    assert len(found) == 50 and "king" not in dict(found)
    assert [cosine for _, cosine in found] == sorted(dict(found).values(), reverse=True)
    assert {"kings", "queen"} <= set(dict(found[:5]))


def test_a_cosine_is_the_one_of_the_two_rows():
    (name, cosine), *_ = nearest_pieces("##ing")
    rows = tables()["word"][[vocabulary()["##ing"], vocabulary()[name]]]
    assert cosine == pytest.approx(torch.cosine_similarity(rows[0], rows[1], dim=0).item())


def test_the_same_word_differs_only_by_its_place():
    first, second = (
        token for token in sentence_norms("the dog bites the man") if token[0] == "the"
    )
    assert first.word == second.word and first.token_type == second.token_type
    assert first.position != second.position


def test_the_sum_is_that_of_the_vectors_and_not_of_the_lengths():
    *_, token = sentence_norms("one")
    assert token.total < token.word + token.position + token.token_type
    row = tables()["word"][102] + tables()["position"][2] + tables()["token_type"][0]
    assert token.total == pytest.approx(row.norm().item())


@pytest.mark.parametrize(
    ("piece", "said"), [("unhappiness", "un ##ha ##pp ##iness"), ("  ", "##ing"), ("é", "e")]
)
def test_what_is_not_one_piece_is_refused_with_its_pieces(piece, said):
    with pytest.raises(ValueError, match=said):
        nearest_pieces(piece)


def test_a_sentence_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="32 tokens; 24 fit"):
        sentence_norms("word " * 30)


def test_both_forms_show_every_token_and_escape_what_was_typed():
    shown = render("King", "<b> & dogs")
    for piece in ("[CLS]", "dogs", "[SEP]"):
        assert piece in shown.html and piece in shown.text
    assert "&lt;" in shown.html and "&amp;" in shown.html and "<td><</td>" not in shown.html


def test_a_word_that_cannot_be_shown_becomes_a_card_and_the_controls_stay():
    view = embedding_explorer()
    view.controls["piece"].value = "unhappiness"
    picture = view.widget.children[-1].value
    assert "cannot be shown" in picture and "##iness" in picture
    view.controls["piece"].value = "queen"
    assert "Nearest to queen" in view.widget.children[-1].value
