"""The masking explorer shows what `mask_tokens` did, escaped, with controls that follow."""

import re
from collections import Counter
from typing import Any

import pytest
import torch

from bertlab.course.widgets import masking_explorer as explorer

pytestmark = pytest.mark.usefixtures("complete")

SENTENCE = explorer.SENTENCE


def test_what_is_shown_is_what_mask_tokens_did(complete):
    ids = explorer._ids_of(SENTENCE)
    generator = torch.Generator().manual_seed(3)
    inputs, labels = complete.pretraining.mask_tokens(
        torch.tensor([ids]), explorer._tokenizer(), 0.4, generator
    )
    places = explorer.mask(SENTENCE, 0.4, False, 3)
    to_ids = explorer._tokenizer().convert_tokens_to_ids
    assert to_ids([place.read for place in places]) == inputs[0, 1:-1].tolist()
    assert [place.fate is not None for place in places] == (labels[0, 1:-1] != -100).tolist()
    assert to_ids([place.piece for place in places]) == ids[1:-1]


def test_each_fate_is_named_by_what_happened():
    drawn = [place for seed in range(60) for place in explorer.mask(SENTENCE, 0.5, False, seed)]
    for place in drawn:
        if place.fate == "mask":
            assert place.read == "[MASK]"
        elif place.fate == "other":
            assert place.read not in ("[MASK]", place.piece)
        else:
            assert place.read == place.piece
    counts = Counter(place.fate for place in drawn)
    assert all(counts[fate] > 20 for fate in (None, *explorer.FATES))


def test_the_shares_are_those_of_bert_and_add_up():
    found = explorer.shares(SENTENCE, 0.15, False, 0)
    # 2,000 x 17 pieces: six standard deviations of a share are 0.012, and 0.036 among the chosen
    assert found["chosen"] == pytest.approx(0.15, abs=0.013)
    assert found["mask"] == pytest.approx(0.8, abs=0.036)
    assert found["other"] == pytest.approx(0.1, abs=0.027)
    assert found["mask"] + found["other"] + found["same"] == pytest.approx(1)


def test_a_mask_that_never_replaces_by_another_piece_would_be_seen(monkeypatch, complete):
    def always_mask(input_ids, tokenizer, probability, generator, whole_word):
        chosen = torch.rand(input_ids.shape, generator=generator) < probability
        return input_ids.masked_fill(chosen, 103), input_ids.masked_fill(~chosen, -100)

    monkeypatch.setattr(complete.pretraining, "mask_tokens", always_mask)
    assert explorer.shares(SENTENCE, 0.15, False, 0)["mask"] == 1


def test_whole_words_are_chosen_together_and_pieces_are_not():
    def torn(whole_word):
        """In how many of 40 draws one piece of a word was chosen and the next was not."""
        count = 0
        for seed in range(40):
            places = explorer.mask(SENTENCE, 0.5, whole_word, seed)
            inside = [n for n, place in enumerate(places) if place.piece.startswith("##")]
            count += any((places[n].fate is None) != (places[n - 1].fate is None) for n in inside)
        return count

    assert torn(True) == 0
    assert torn(False) > 20


def test_another_draw_is_another_masking_and_the_same_one_is_the_same():
    first = explorer.render(SENTENCE, 0.15, False, 0)
    assert first == explorer.render(SENTENCE, 0.15, False, 0)
    assert first.text != explorer.render(SENTENCE, 0.15, False, 1).text


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    explorer.render(SENTENCE, 0.15, False, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_and_everything_can_be_chosen():
    assert "pieces chosen: 0 of 17" in explorer.render(SENTENCE, 0.0, False, 0).text
    assert "pieces chosen: 17 of 17" in explorer.render(SENTENCE, 1.0, False, 0).text


def test_a_box_for_each_piece_with_the_border_of_its_fate():
    places = explorer.mask(SENTENCE, 0.5, False, 1)
    html = explorer.render(SENTENCE, 0.5, False, 1).html.split("<table>")[0]
    borders = re.findall(r"text-align:center;border:([^;]+);", html)
    expected = [explorer._BORDER[p.fate] if p.fate else explorer._NOT_CHOSEN for p in places]
    assert borders == expected
    assert len(set(explorer._BORDER.values())) == 3, "told apart without color"


def test_what_is_typed_is_shown_as_text_and_never_as_html():
    shown = explorer.render("a <script>alert(1)</script> & more", 1.0, False, 2)
    assert "<script" not in shown.html
    assert "&lt;" in shown.html


@pytest.mark.parametrize("sentence", ["", "  ", "word " * 60])
def test_a_sentence_that_cannot_be_shown_is_refused_with_the_number_of_pieces(sentence):
    with pytest.raises(ValueError, match=r"sentence has \d+ pieces; between 1 and 40"):
        explorer.mask(sentence, 0.15, False, 0)


def test_the_picture_follows_the_controls():
    view = explorer.masking_explorer()
    controls: Any = view.controls
    seen = {view._picture.value}
    for name, value in (("seed", 4), ("probability", 0.5), ("whole_word", True)):
        controls[name].value = value
        seen.add(view._picture.value)
    assert len(seen) == 4
    controls["sentence"].value = ""
    assert "This cannot be shown" in view._picture.value


def test_the_static_view_says_what_the_boxes_show():
    text = explorer.masking_explorer()._repr_mimebundle_()["text/plain"]
    reads, labels = text.splitlines()[:2]
    assert "[MASK]" in reads and "·" in labels
    assert len(reads.split()) == len(labels.split())
