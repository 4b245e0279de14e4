"""The pruning explorer shows what pruning really gives: the same decisions, the same size."""

import copy
import re
from typing import Any

import pytest
import torch

from bertlab.course.widgets import pruning_explorer as explorer

OFF = ((0, 1), (1, 0), (1, 3))
IMPORTANCE = [[0.3, 0.1, 0.5, 0.4], [0.05, 0.9, 0.2, 0.02]]


@pytest.fixture(scope="module")
def classifier(complete):
    """Two layers of four heads, every parameter drawn."""
    torch.manual_seed(0)
    config = complete.config.BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=16,
    )
    model = complete.fine_tuning.SequenceClassifier(complete.encoder.BertModel(config), 5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


@pytest.fixture(scope="module")
def batches(classifier):
    generator = torch.Generator().manual_seed(0)
    found = []
    for rows, seq in ((20, 9), (13, 6)):
        ids = torch.randint(1, 40, (rows, seq), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, seq - 2 :] = 0
        with torch.no_grad():  # the model's own decisions are the labels
            labels = classifier(input_ids=ids, attention_mask=mask).logits.argmax(-1)
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def test_with_all_heads_it_is_the_model_itself(classifier, batches):
    found = explorer.measure(classifier, batches, ())
    assert (found.right, found.texts, found.pruned) == (33, 33, 0)
    assert found.parameters == sum(p.numel() for p in classifier.parameters())
    assert (found.accuracy, found.error) == (1, 0)


def test_heads_that_are_off_count_and_compute_as_pruned_ones(complete, classifier, batches):
    pruned = copy.deepcopy(classifier)
    complete.compression.prune_heads(pruned, {0: [1], 1: [0, 3]})
    found = explorer.measure(classifier, batches, OFF)
    assert found.parameters == sum(p.numel() for p in pruned.parameters())
    right = 0
    for batch in batches:
        given = {name: x for name, x in batch.items() if name != "labels"}
        with torch.no_grad(), explorer.without_heads(classifier, OFF):
            logits = classifier(**given).logits
        torch.testing.assert_close(logits, pruned(**given).logits)
        assert not torch.allclose(logits, classifier(**given).logits, atol=0.01)
        right += int((logits.argmax(-1) == batch["labels"]).sum())
    assert found.right == right


def test_the_model_is_as_it_was(classifier, batches):
    before = {name: p.clone() for name, p in classifier.state_dict().items()}
    classifier.train()
    explorer.measure(classifier, batches, OFF)
    assert classifier.training
    classifier.eval()
    assert explorer.measure(classifier, batches, ()).right == 33
    for name, parameter in classifier.state_dict().items():
        assert torch.equal(parameter, before[name])


def test_the_least_important_go_first_and_no_layer_is_emptied():
    assert explorer.least_important(IMPORTANCE, 3) == [(1, 3), (1, 0), (0, 1)]
    assert explorer.least_important(IMPORTANCE, 2, most_first=True) == [(1, 1), (0, 2)]
    all_but_one = explorer.least_important(IMPORTANCE, 6)
    assert [sum(layer == n for layer, _ in all_but_one) for n in (0, 1)] == [3, 3]
    assert (1, 1) not in all_but_one
    with pytest.raises(ValueError, match="count is 7, but must be from 0 to 6"):
        explorer.least_important(IMPORTANCE, 7)


def test_a_layer_without_heads_is_refused(classifier, batches):
    with pytest.raises(ValueError, match="layer 2 has no head left"):
        explorer.measure(classifier, batches, [(1, head) for head in range(4)])


def test_the_grid_has_a_cross_for_each_head_that_is_off(classifier, batches):
    whole = explorer.measure(classifier, batches, ())
    found = explorer.measure(classifier, batches, OFF)
    shown = explorer.render(found, whole, IMPORTANCE, OFF)
    assert shown.html.count("<div>✕</div>") == 3
    assert "layer 2: ✕ · · ✕" in shown.text
    assert "5 of 8 heads are on" in shown.text
    assert f"{found.parameters:,}" in shown.text
    widths = [float(w) for w in re.findall(r"width:([0-9.]+)em;height", shown.html)]
    assert max(widths) == widths[5] == 2.0  # layer 2, head 2
    assert widths[0] == pytest.approx(2 * 0.3 / 0.9, abs=0.01)


def test_switches_and_slider_turn_heads_off(classifier, batches):
    view = explorer.pruning_explorer(classifier, batches, IMPORTANCE, count=2)
    switches: Any = view.controls["off"]
    assert switches.value == ((1, 0), (1, 3))
    first = view._picture.value
    switches.switches[0, 2].value = True
    assert switches.value == ((0, 2), (1, 0), (1, 3))
    assert view._picture.value != first
    switches.slider.value = 0
    assert switches.value == ()
    assert "8 of 8 heads are on" in view._picture.value
    switches.slider.value = 3
    assert set(switches.value) == {(1, 3), (1, 0), (0, 1)}


def test_a_move_of_the_slider_is_measured_once(classifier, batches, monkeypatch):
    view = explorer.pruning_explorer(classifier, batches, IMPORTANCE, count=0)
    calls = []
    monkeypatch.setattr(view, "render", lambda off: calls.append(off) or view._start)
    switches: Any = view.controls["off"]
    switches.slider.value = 5
    assert len(calls) == 1


def test_turning_a_whole_layer_off_says_why_it_cannot_be(classifier, batches):
    view = explorer.pruning_explorer(classifier, batches, IMPORTANCE, count=0)
    switches: Any = view.controls["off"]
    for head in range(4):
        switches.switches[0, head].value = True
    assert "layer 1 has no head left" in view._picture.value


def test_the_static_view_can_be_read(classifier, batches):
    bundle = explorer.pruning_explorer(classifier, batches, IMPORTANCE, 2)._repr_mimebundle_()
    assert "6 of 8 heads are on" in bundle["text/html"]
    assert "these heads:" in bundle["text/plain"]


def test_a_pruned_model_has_fewer_switches(complete, classifier, batches):
    pruned = copy.deepcopy(classifier)
    complete.compression.prune_heads(pruned, {0: [1, 2]})
    importance = complete.compression.head_importance(pruned, batches)  # 0 for heads that are gone
    view = explorer.pruning_explorer(pruned, batches, importance, count=2)
    assert "4 of 6 heads are on" in view._repr_mimebundle_()["text/plain"]


def test_what_makes_no_sense_is_refused(classifier, batches):
    with pytest.raises(ValueError, match="batches has no text"):
        explorer.pruning_explorer(classifier, [], IMPORTANCE, count=2)
    with pytest.raises(ValueError, match="count is 7, but must be from 0 to 6"):
        explorer.pruning_explorer(classifier, batches, IMPORTANCE, count=7)


def test_an_error_leaves_the_model_as_it_was(classifier):
    classifier.train()
    with pytest.raises(KeyError):
        explorer.measure(classifier, [{"input_ids": torch.ones(1, 3, dtype=torch.long)}], ())
    assert classifier.training
    classifier.eval()
