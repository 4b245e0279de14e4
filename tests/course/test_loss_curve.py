"""The loss curve shows the losses it was given, in one place, and at the end all of them."""

import matplotlib
import pytest

from bertlab.course import loss_curve
from bertlab.course.loss_curve import LossCurve, smoothed

matplotlib.use("Agg")


@pytest.fixture
def shown(monkeypatch):
    """What was displayed: the plots shown, and those that replaced one."""
    events = []

    class Place:
        def update(self, plot):
            events.append(("update", plot))

    def display(plot, display_id):
        assert display_id is True
        events.append(("display", plot))
        return Place()

    monkeypatch.setattr("IPython.display.display", display)
    return events


def lines(plot):
    return {line.get_label(): line for line in plot.axes[0].get_lines()}


def test_the_last_plot_has_every_step_and_stands_in_the_place_of_the_first(shown):
    curve = LossCurve("A loss", total_steps=5, seconds=0)
    for step in range(1, 6):
        curve(step, 10.0 - step)
    assert [what for what, _ in shown] == ["display"] + ["update"] * 4
    raw = shown[-1][1].axes[0].get_lines()[0]
    assert list(raw.get_xdata()) == [1, 2, 3, 4, 5]
    assert list(raw.get_ydata()) == [9, 8, 7, 6, 5]


def test_it_is_drawn_at_the_end_however_quick_the_training_was(shown):
    curve = LossCurve("A loss", total_steps=3, seconds=1000)
    for step in (1, 2):
        curve(step, 1.0)
    assert shown == []
    curve(3, 1.0)
    assert len(shown) == 1


def test_a_run_that_is_resumed_is_drawn_from_the_step_it_goes_on_at(shown):
    curve = LossCurve("A loss", total_steps=12, seconds=1000)
    for step in (11, 12):
        curve(step, 2.0)
    assert list(shown[0][1].axes[0].get_lines()[0].get_xdata()) == [11, 12]


def test_held_out_losses_are_rings(shown):
    curve = LossCurve("A loss", total_steps=2)
    assert "held out" not in lines(curve.plot())
    curve.mark(1, 6.5)
    ring = lines(curve.plot())["held out"]
    assert (list(ring.get_xdata()), list(ring.get_ydata())) == ([1], [6.5])


def test_the_line_is_a_mean_over_the_last_steps():
    values = [float(n) for n in range(30)]
    assert smoothed(values, 1) == values
    means = smoothed(values, 4)
    assert means[0] == 0 and means[1] == 0.5
    assert means[-1] == sum([26, 27, 28, 29]) / 4
    assert loss_curve.SMOOTHED > 1


def test_no_figure_is_left_open(shown):
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    LossCurve("A loss", total_steps=1)(1, 1.0)
    assert plt.get_fignums() == before
