"""The agreement explorer breaks one layer, and the comparison names that layer and no other."""

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import torch

from bertlab.course.widgets import agreement_explorer as explorer

pytestmark = pytest.mark.usefixtures("complete")

NAMES = [fault.name for fault in explorer.FAULTS]

#: By fault, the half of the broken layer that is the first to depart.
FIRST = {
    "tanh-GELU instead of GELU": "feed-forward",
    "the bias of `down` is lost": "feed-forward",
    "query and key are exchanged": "attention",
    "the mask is not handed on": "attention",
    "the layer and the next are exchanged": "attention",
    "the residual is added twice": "feed-forward",
}


def test_without_a_fault_every_part_agrees():
    for precision in explorer.PRECISIONS:
        found = explorer.agreement_with("none", 0, precision)
        assert len(found.parts) == 2 * explorer.LAYERS + 2
        assert found.first_departure is None


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("fault", FIRST)
def test_the_first_part_to_depart_is_the_broken_one_and_all_after_it_depart(fault, layer):
    found = explorer.agreement_with(fault, layer)
    assert found.first_departure is not None
    assert found.first_departure.name == f"layer {layer} {FIRST[fault]}"
    agrees = [part.agrees for part in found.parts]
    assert agrees == sorted(agrees, reverse=True)


def test_the_bias_of_the_keys_does_nothing():
    for precision in explorer.PRECISIONS:
        assert explorer.agreement_with(
            "the bias of `key` is lost", 2, precision
        ).verdict.startswith("all")


def test_a_wrong_eps_hides_in_float32_and_shows_in_float64():
    fault = "LayerNorm's eps is 1e-5"
    assert explorer.agreement_with(fault, 3).first_departure is None
    first = explorer.agreement_with(fault, 3, "float64").first_departure
    assert first is not None and first.name == "layer 3 attention"


def test_every_fault_is_in_the_menu_and_either_shows_or_is_said_not_to():
    assert set(NAMES) == {*FIRST, "none", "LayerNorm's eps is 1e-5", "the bias of `key` is lost"}
    menu: Any = explorer.agreement_explorer().controls["fault"]
    assert list(menu.options) == NAMES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a typo", 0), "fault is 'a typo'"),
        ((NAMES[1], 6), "layer is 6.*0 to 5"),
        ((NAMES[1], 0, "float16"), "precision is 'float16'"),
    ],
)
def test_what_does_not_exist_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        explorer.agreement_with(*arguments)


def test_a_bar_for_each_part_filled_where_it_departs():
    shown = explorer.render("the mask is not handed on", 3)
    (svg,) = re.findall(r"<svg.*?</svg>", shown.html)
    bars = ElementTree.fromstring(svg).findall(".//rect")
    found = explorer.agreement_with("the mask is not handed on", 3).parts
    assert [bar.get("fill") == "none" for bar in bars] == [part.agrees for part in found]
    lengths = [float(bar.get("width", "nan")) for bar in bars]
    assert min(lengths[7:]) > max(lengths[:7])


def test_the_controls_change_the_picture_and_back():
    view = explorer.agreement_explorer()
    first = view._picture.value
    view.controls["layer"].value = 1
    assert view._picture.value != first
    view.controls["layer"].value = 3
    assert view._picture.value == first


def test_the_static_view_says_which_part_departs_first():
    bundle = explorer.agreement_explorer()._repr_mimebundle_()
    assert "<svg" in bundle["text/html"] and "<code>" not in bundle["text/plain"]
    assert "the first part to depart: layer 3 feed-forward" in bundle["text/plain"]


def test_the_weights_are_copied_and_not_shared():
    theirs = explorer._their_model()
    before = theirs.embeddings.word_embeddings.weight.clone()
    explorer.with_weights_of(theirs).embeddings.word.weight.data.zero_()
    assert torch.equal(theirs.embeddings.word_embeddings.weight, before)
