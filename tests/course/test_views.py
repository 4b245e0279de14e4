"""Widgets are views over plain functions: tested here without a browser."""

import ipywidgets

from bertlab.course.display import Shown, card, table
from bertlab.course.widgets.parameter_explorer import parameter_explorer, parameter_shares
from bertlab.course.widgets.view import View


def test_the_shares_add_up_to_the_count_of_the_real_model(complete):
    base = complete.config.BertConfig.base()
    assert sum(parameter_shares().values()) == complete.config.count_parameters(base)
    narrow = complete.config.BertConfig.base(
        hidden_size=384, num_hidden_layers=6, intermediate_size=384
    )
    shares = parameter_shares(layers=6, width=384, inner=1)
    assert sum(shares.values()) == complete.config.count_parameters(narrow)


def test_a_view_follows_its_controls():
    view = parameter_explorer()
    before = view._picture.value
    view.controls["layers"].value = 2
    assert view._picture.value != before
    assert "38,603,520" in view._picture.value  # a BERT-Base with two layers


def test_a_view_has_a_static_form_of_its_starting_values():
    bundle = parameter_explorer()._repr_mimebundle_()
    assert "109,482,240 parameters" in bundle["text/html"]
    assert "109,482,240 parameters" in bundle["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_what_cannot_be_shown_is_said_and_the_controls_stay():
    def render(text: str) -> Shown:
        if not text:
            raise ValueError("type something")
        return Shown(text, text)

    view = View({"text": ipywidgets.Text("hello")}, render)
    view.controls["text"].value = ""
    assert "type something" in view._picture.value
    view.controls["text"].value = "again"
    assert "again" in view._picture.value


def test_cards_and_tables_escape_what_they_are_given():
    evil = "<script>alert(1)</script>"
    for shown in (card("failed", evil, [evil], code=evil, items=[evil]), table([evil], [[evil]])):
        assert "<script>" not in shown.html
        assert evil in shown.text


def test_the_plain_form_of_a_card_names_its_status():
    assert card("passed", "3.1 title").text == "✓ passed: 3.1 title"
    assert card("failed", "3.1 title").text == "✗ not yet: 3.1 title"
