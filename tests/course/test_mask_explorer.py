"""The mask explorer shows what the model really guesses, escaped, with controls that follow."""

import re
from typing import Any

import pytest

from bertlab.course.widgets import mask_explorer as explorer


@pytest.fixture(scope="module")
def found():
    return explorer.guess(explorer.SENTENCE, 7)


def test_the_small_head_gives_the_guesses_of_chapter_0(found):
    from bertlab.course.demo import fill_mask

    words = list(found.pieces)
    words[found.place - 1] = "[MASK]"
    assert fill_mask(" ".join(words), best=5) == [piece for piece, _ in found.best[:5]]


def test_the_guesses_are_the_likeliest_and_the_rank_is_the_true_pieces(found):
    probabilities = [probability for _, probability in found.best]
    assert probabilities == sorted(probabilities, reverse=True)
    assert len(probabilities) == explorer.SHOWN
    assert 0 < sum(probabilities) < 1
    assert found.rank > explorer.SHOWN  # it is not among those shown, and is less likely than they
    assert found.probability < probabilities[-1]


def test_a_piece_that_is_guessed_has_its_place_as_rank_and_is_marked():
    first = explorer.guess(explorer.SENTENCE, 12)  # the full stop
    assert (first.best[0][0], first.rank) == (".", 1)
    assert first.probability == pytest.approx(first.best[0][1])
    assert ". ✓" in explorer.render(explorer.SENTENCE, 12).html
    assert "✓</td>" not in explorer.render(explorer.SENTENCE, 7).html


@pytest.mark.parametrize("place", [1, 5, 12])
def test_the_mask_stands_where_the_slider_says(place):
    line = explorer.render(explorer.SENTENCE, place).text.splitlines()[0]
    assert line.split(": ", 1)[1].split().index("[MASK]") == place - 1


def test_a_place_behind_the_end_is_the_last_piece():
    assert explorer.guess("a copy", 9).place == 2


def test_the_bars_are_as_long_as_the_probabilities(found):
    widths = re.findall(
        r'class="bar plain" style="width:([0-9.]+)em', explorer.render(explorer.SENTENCE, 7).html
    )
    lengths = [float(width) for width in widths]
    longest = lengths[0] / found.best[0][1]
    assert lengths == pytest.approx([longest * p for _, p in found.best], abs=longest * 1e-3)


def test_what_is_typed_is_shown_as_text_and_never_as_html():
    shown = explorer.render("a <script>alert(1)</script> & more", 2)
    assert "<script" not in shown.html
    assert "&lt;" in shown.html


@pytest.mark.parametrize("sentence", ["", "   ", "word " * 60])
def test_a_sentence_that_cannot_be_shown_is_refused_with_the_number_of_pieces(sentence):
    with pytest.raises(ValueError, match=r"sentence has \d+ pieces; between 1 and 40"):
        explorer.guess(sentence, 1)


def test_the_slider_follows_the_sentence():
    view = explorer.mask_explorer()
    place: Any = view.controls["place"]
    assert place.max == 12
    first = view._picture.value
    place.value = 12
    assert view._picture.value != first
    view.controls["sentence"].value = "a copy"
    assert (place.max, place.value) == (2, 2)
    view.controls["sentence"].value = ""
    assert "This cannot be shown" in view._picture.value
    view.controls["sentence"].value = explorer.SENTENCE
    assert "[MASK]" in view._picture.value


def test_the_static_view_says_what_the_picture_shows():
    bundle = explorer.mask_explorer()._repr_mimebundle_()
    assert "<table>" in bundle["text/html"]
    assert "has rank" in bundle["text/plain"]


def test_a_checkpoint_with_an_mlm_head_is_used_and_one_without_is_not(tmp_path):
    import torch
    from transformers import BertConfig, BertForMaskedLM, BertModel

    from bertlab.course.reference import vocabulary_file

    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    theirs = BertForMaskedLM(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path / "with")
    BertModel(config).save_pretrained(tmp_path / "without")
    for folder in ("with", "without"):
        (tmp_path / folder / "vocab.txt").write_bytes(vocabulary_file().read_bytes())
    assert explorer._checkpoint(tmp_path / "without") is None
    mine = explorer._checkpoint(tmp_path / "with")
    assert mine is not None
    ids = torch.tensor([[101, 1037, 103, 102]])
    with torch.no_grad():
        torch.testing.assert_close(mine.logits(mine.features(ids)), theirs(ids).logits)
