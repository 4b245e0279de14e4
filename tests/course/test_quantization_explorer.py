"""The quantization explorer shows what really comes back, in the picture and in the table."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from bertlab.course.widgets import quantization_explorer as explorer

DOWN = "feed-forward down, layer 6"


@pytest.fixture
def values():
    return np.random.default_rng(0).normal(size=(6, 40)) + np.arange(6)[:, None]


@pytest.mark.parametrize("per_channel", [False, True])
def test_with_8_bits_it_computes_what_the_exercise_does(complete, values, per_channel):
    given = torch.tensor(values)
    whole, scale, zero_point = complete.compression.quantize_int8(given, per_channel)
    expected = (whole.int() - zero_point) * scale
    found = explorer.rounded(values, 8, per_channel)
    np.testing.assert_allclose(found.values, expected.numpy(), atol=1e-12)
    assert found.ranges == (6 if per_channel else 1)


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_a_range_has_no_more_numbers_than_its_bits_say_and_0_comes_back_as_0(values, bits):
    values[2, 3] = 0
    found = explorer.rounded(values, bits, True)
    assert max(len(np.unique(row)) for row in found.values) <= 2**bits
    assert found.values[2, 3] == 0


def test_a_bit_less_doubles_the_error_and_a_range_for_each_row_makes_it_smaller(values):
    errors = {b: explorer.rounded(values, b, True).error for b in (8, 7, 6)}
    assert errors[7] / errors[8] == pytest.approx(2, rel=0.1)
    assert errors[6] / errors[7] == pytest.approx(2, rel=0.1)
    assert errors[8] < explorer.rounded(values, 8, False).error


def test_error_and_lost_numbers_are_as_defined():
    found = explorer.rounded(np.array([[0.0, 0.1, 0.4, 3.0]]), 2, False)
    assert found.values.tolist() == [[0, 0, 0, 3]]
    assert found.zeros == pytest.approx(2 / 3)
    assert found.error == pytest.approx(np.sqrt(0.17 / 9.17))


def test_numbers_that_are_all_0_stay_0():
    found = explorer.rounded(np.zeros((2, 3)), 4, True)
    assert not found.values.any()
    assert (found.error, found.zeros) == (0, 0)


@pytest.mark.parametrize("bits", [1, 9])
def test_other_bits_are_refused(values, bits):
    with pytest.raises(ValueError, match=f"bits is {bits}, but must be from 2 to 8"):
        explorer.rounded(values, bits, True)


def test_the_numbers_are_minilms_own():
    from bertlab.course.reference import minilm

    weight: Any = minilm().get_submodule("encoder.layer.5.output.dense").weight
    np.testing.assert_array_equal(explorer.numbers(DOWN), weight.detach().numpy())
    activations = explorer.numbers("activations into feed-forward down, layer 6")
    assert activations.shape[1] == 1536
    assert activations.min() >= -0.171  # they come out of a GELU, which is never below
    with pytest.raises(ValueError, match="must be one of"):
        explorer.numbers("the moon")


def test_the_size_counts_bits_and_ranges():
    assert explorer.size_kb((100, 1000), 8, 100) == pytest.approx(100.8)
    assert explorer.size_kb((100, 1000), 4, 0) == pytest.approx(50)


def test_there_is_a_bar_wherever_there_are_numbers_and_a_single_one_is_seen():
    edges = np.array([0.0, 1.0, 2.0, 3.0])
    found = explorer.heights(np.array([0.5] * 998 + [2.5]), edges)
    assert found[1] == 0
    assert 0.05 < found[2] < found[0] <= 1


def test_the_lower_half_has_as_many_bars_as_numbers_that_come_back():
    few = explorer.render(DOWN, 2, False).html
    many = explorer.render(DOWN, 8, False).html
    below = [html.count("fill:var(--bl-orange)") for html in (few, many)]
    assert 1 <= below[0] <= 4 < below[1]


@pytest.mark.parametrize("bits", range(explorer.LEAST_BITS, explorer.MOST_BITS + 1))
def test_no_number_lies_beyond_the_bars(bits):
    """Rounded, the highest number can come back higher than any was."""
    values = explorer.numbers(DOWN)
    back = explorer.rounded(values, bits, False).values
    edges = explorer.bar_edges(values, back)
    for some in (values, back):
        assert np.histogram(some, edges)[0].sum() == some.size


def test_the_table_marks_the_choice_and_says_the_same_error_as_the_text():
    shown = explorer.render(DOWN, 6, True)
    marked = re.findall(r'<td class="number">([^<]+) ◂</td>', shown.html)
    error = explorer.errors(DOWN)[6, True][0]
    assert marked == [explorer._percent(error)]
    assert f"Error: {marked[0]} of the numbers' size" in shown.text
    assert error < explorer.errors(DOWN)[6, False][0]


def test_the_view_follows_each_control():
    view: Any = explorer.quantization_explorer()
    seen = [view._picture.value]
    for name, value in (("bits", 8), ("per_channel", True), ("what", "query weight, layer 1")):
        view.controls[name].value = value
        seen.append(view._picture.value)
    assert len(set(seen)) == 4
    assert all(control.description for control in view.controls.values())


def test_the_static_view_says_what_the_picture_shows():
    bundle = explorer.quantization_explorer()._repr_mimebundle_()
    assert 'role="img" aria-label="Histogram' in bundle["text/html"]
    assert "589,824 numbers" in bundle["text/plain"]
    assert "bits  error" in bundle["text/plain"]


def test_a_choice_that_there_is_not_is_refused_at_once():
    with pytest.raises(ValueError, match="what is 'the moon', but must be one of"):
        explorer.quantization_explorer("the moon")
    with pytest.raises(ValueError, match="bits is 12, but must be from 2 to 8"):
        explorer.quantization_explorer(bits=12)
