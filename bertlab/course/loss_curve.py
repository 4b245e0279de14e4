"""A loss that is drawn while it falls: chapter 6."""

from time import perf_counter
from typing import Any

from bertlab.course.figures import BLUE, INK, figure, label

SMOOTHED = 20  # steps over which the line is averaged


class LossCurve:
    """A plot of the training loss that follows the training; hand it over as `on_step`.

    In a notebook the plot is drawn anew every few seconds, in its place. What is left, and stored
    with the notebook, is the last one.

    Args:
        title: of the plot.
        total_steps: after so many steps the last plot is drawn.
        seconds: how long a plot stays before it is drawn anew.

    Attributes:
        losses: the loss of each step so far.
        marks: `(step, loss)`, what `mark` was given.
    """

    def __init__(self, title: str, total_steps: int, seconds: float = 3.0) -> None:
        self.title, self.total_steps, self.seconds = title, total_steps, seconds
        self.losses: list[float] = []
        self.marks: list[tuple[int, float]] = []
        self._steps: list[int] = []
        self._place: Any = None
        self._drawn = perf_counter()

    def __call__(self, step: int, loss: float) -> None:
        """Note the loss of a step, and draw if it is time."""
        self._steps.append(step)
        self.losses.append(loss)
        if step == self.total_steps or perf_counter() - self._drawn >= self.seconds:
            self.draw()

    def mark(self, step: int, loss: float) -> None:
        """Draw a ring at a loss that was measured on held-out text after `step` steps."""
        self.marks.append((step, loss))

    def draw(self) -> None:
        """Show the plot, in the place of the one before."""
        import matplotlib.pyplot as plt
        from IPython.display import display

        plot = self.plot()
        plt.close(plot)  # or the notebook would show it once more below the cell
        if self._place is None:
            self._place = display(plot, display_id=True)
        else:
            self._place.update(plot)
        self._drawn = perf_counter()

    def plot(self) -> Any:
        """Return the plot as a matplotlib figure."""
        plot, axes = figure(figsize=(7, 3))
        axes.plot(self._steps, self.losses, color=BLUE, alpha=0.3, linewidth=0.8)
        axes.plot(self._steps, smoothed(self.losses), color=BLUE, label="training")
        if self.marks:
            steps, losses = zip(*self.marks, strict=True)
            axes.plot(steps, losses, "o", color=INK, mfc="none", clip_on=False, label="held out")
        axes.set_xlim(0, self.total_steps)
        axes.legend()
        label(axes, self.title, "step", "loss, nats")
        return plot


def smoothed(values: list[float], window: int = SMOOTHED) -> list[float]:
    """The mean of each value and those before it, at most `window` in all."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means
