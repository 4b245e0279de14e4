"""The attention explorer shows MiniLM's own weights, escaped, without a script."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from bertlab.course.widgets import attention_explorer as explorer


@pytest.fixture(scope="module")
def example():
    return explorer.attention_of(explorer.SENTENCE)


def drawn(shown):
    """The pictures of what is shown, parsed: malformed SVG would not be."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", shown.html)]


def test_the_weights_are_those_transformers_gives(example):
    import torch
    from transformers import BertTokenizer

    from bertlab.course.reference import minilm, minilm_folder

    tokens, weights = example
    encoded = BertTokenizer.from_pretrained(minilm_folder())(explorer.SENTENCE, return_tensors="pt")
    with torch.no_grad():
        theirs = minilm("eager")(**encoded, output_attentions=True).attentions
    assert weights.shape == (explorer.LAYERS, explorer.HEADS, len(tokens), len(tokens))
    np.testing.assert_allclose(weights, torch.cat(theirs), atol=1e-6)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


def test_the_head_shown_first_looks_at_the_previous_token(example):
    tokens, weights = example
    looks_at = explorer.strongest(tokens, weights[0, 2])
    assert [seen for _, seen, _ in looks_at[1:-1]] == list(tokens[:-2])
    assert min(weight for _, _, weight in looks_at[1:-1]) > 0.9


def test_layer_and_head_choose_the_weights(example):
    tokens, weights = example
    for layer, head in ((1, 1), (2, 7), (6, 12)):
        expected = explorer.strongest(tokens, weights[layer - 1, head - 1])
        lines = explorer.render(explorer.SENTENCE, layer, head).text.splitlines()
        assert lines[0].startswith(f"MiniLM, layer {layer}, head {head}:")
        assert [line.split()[2] for line in lines[1:]] == [seen for _, seen, _ in expected]


def test_a_square_for_each_pair_and_an_arc_for_each_weight_that_counts(example):
    tokens, weights = example
    squares, arcs = drawn(explorer.render(explorer.SENTENCE, 2, 7))
    assert len(squares.findall(".//rect")) == len(tokens) ** 2
    counted = (weights[1, 6] >= 0.1) & ~np.eye(len(tokens), dtype=bool)
    assert len(arcs.findall(".//path")) == counted.sum()


def test_a_full_weight_is_a_full_square_and_none_an_empty_one():
    svg = ElementTree.fromstring(explorer.heat_map(("a", "b"), np.eye(2)))
    shades = [float(square.get("fill-opacity", "nan")) for square in svg.iter("rect")]
    assert shades == [1.0, 0.0, 0.0, 1.0]


def test_arcs_to_earlier_tokens_are_on_the_left_and_to_later_ones_on_the_right():
    def starts(weights):
        svg = ElementTree.fromstring(explorer.arcs(("a", "b"), np.array(weights)))
        middle = float(svg.get("width", "nan")) / 2
        return [float(path.get("d", "")[1:].split()[0]) < middle for path in svg.iter("path")]

    assert starts([[0.0, 0.0], [1.0, 0.0]]) == [True]
    assert starts([[0.0, 1.0], [0.0, 0.0]]) == [False]


def test_what_is_typed_is_shown_as_text_and_never_as_html():
    shown = explorer.render("a <script>alert(1)</script> & more", 1, 1)
    assert "<script" not in shown.html
    for picture in drawn(shown):
        assert "<" in [text.text for text in picture.iter("text")]


@pytest.mark.parametrize("sentence", ["", "   ", "word " * 100])
def test_a_sentence_that_cannot_be_drawn_is_refused_with_the_number_of_tokens(sentence):
    with pytest.raises(ValueError, match=r"sentence has \d+ tokens; between 1 and 38"):
        explorer.attention_of(sentence)


def test_the_controls_change_the_picture_and_survive_an_empty_sentence():
    view = explorer.attention_explorer()
    first = view._picture.value
    view.controls["head"].value = 4
    second = view._picture.value
    assert first != second
    view.controls["sentence"].value = ""
    assert "This cannot be shown" in view._picture.value
    view.controls["sentence"].value = explorer.SENTENCE
    assert view._picture.value == second


def test_the_static_view_says_what_the_picture_shows():
    bundle = explorer.attention_explorer()._repr_mimebundle_()
    assert "<svg" in bundle["text/html"]
    assert "looks at most" in bundle["text/plain"]
