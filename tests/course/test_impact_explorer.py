"""The impact explorer shows what the model really says, and marks what removal really does."""

import re
from typing import Any

import pytest
import torch

from bertlab.course.tasks.docstrings import FILES
from bertlab.course.widgets import impact_explorer as explorer


@pytest.fixture(autouse=True)
def _package(complete):
    """The picture is drawn by the student's module, of which that part is given."""


@pytest.fixture(scope="module")
def found():
    return explorer.decide(explorer.SENTENCE)


def logits_of(ids: list[int]) -> torch.Tensor:
    """The model's logits, computed here by Transformers alone."""
    from safetensors.torch import load_file

    from bertlab.course.reference import minilm

    head = load_file(explorer.HEAD_FILE)
    with torch.no_grad():
        states = minilm()(torch.tensor([ids])).last_hidden_state
    return states.mean(dim=1)[0] @ head["weight"].T + head["bias"]


def test_probabilities_and_impacts_are_those_of_the_model(found):
    tokenizer = explorer.encoder()[0]
    ids = tokenizer(explorer.SENTENCE)["input_ids"]
    whole = logits_of(ids)
    assert found.probabilities == pytest.approx(whole.softmax(-1).tolist(), abs=1e-5)
    target = list(FILES).index(found.target)
    for place in (1, 4, 12):
        rest = logits_of(ids[:place] + ids[place + 1 :])
        expected = float(whole[target] - rest[target])
        assert found.impacts[place - 1][1] == pytest.approx(expected, abs=1e-4)
    assert len({round(impact, 4) for _, impact in found.impacts}) > 10


def test_the_sentence_it_starts_with_is_of_torch_and_tensor_speaks_for_it(found):
    assert found.said == found.target == "torch"
    impacts = dict(found.impacts)
    assert impacts["tensor"] > 0.1
    assert impacts["tensor"] > impacts["same"]


def test_another_target_has_other_impacts_of_the_same_decision(found):
    other = explorer.decide(explorer.SENTENCE, "numpy")
    assert other.probabilities == found.probabilities
    assert other.target == "numpy"
    assert [x for _, x in other.impacts] != [x for _, x in found.impacts]


@pytest.mark.parametrize("text", ["", "   ", "word " * 60])
def test_a_text_that_cannot_be_shown_is_refused_with_the_number_of_pieces(text):
    with pytest.raises(ValueError, match=r"text has \d+ pieces; between 1 and 48"):
        explorer.decide(text)


def test_an_unknown_library_is_refused_by_name():
    with pytest.raises(ValueError, match="target is 'pandas'"):
        explorer.decide("a table", "pandas")


def test_what_is_typed_is_shown_as_text_and_never_as_html():
    shown = explorer.render("a <script>alert(1)</script> & more")
    assert "<script" not in shown.html
    assert "&lt;" in shown.html


def test_the_bars_are_as_long_as_the_probabilities(found):
    html = explorer.render(explorer.SENTENCE).html
    widths = re.findall(r'class="bar plain" style="width:([0-9.]+)em', html)
    ranked = sorted(found.probabilities, reverse=True)
    expected = [explorer._BAR * value for value in ranked]
    assert [float(width) for width in widths] == pytest.approx(expected, abs=0.02)


def test_the_picture_follows_the_controls():
    view = explorer.impact_explorer()
    typed: Any = view.controls["text"]
    first = view._picture.value
    typed.value = "Draw the graph with nodes and edges."
    second = view._picture.value
    assert first != second
    view.controls["target"].value = "sympy"
    assert "What speaks for sympy" in view._picture.value
    typed.value = ""
    assert "This cannot be shown" in view._picture.value
    typed.value = explorer.SENTENCE
    assert "It would come from" in view._picture.value


def test_the_static_view_can_be_read_without_a_kernel_and_without_color():
    bundle = explorer.impact_explorer()._repr_mimebundle_()
    assert "It would come from torch" in bundle["text/html"]
    assert re.search(r"tensor\[\+", bundle["text/plain"])
    assert "speaks for it" in bundle["text/plain"]
