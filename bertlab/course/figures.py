"""One look for every plot: quiet lines, labelled axes, readable without colour."""

from typing import Any

#: Colours that differ in lightness too, so that a plot can be read in black and white.
#: Use a marker or hatch beside each.
INK, BLUE, ORANGE, GREY = "#1f2328", "#2f6db5", "#d9822b", "#9aa4ae"
MARKERS = ("o", "s", "^", "D", "v", "P")
HATCHES = ("", "//", "..", "xx", "\\\\", "++")

_STYLE: Any = {
    "figure.dpi": 100,
    "figure.figsize": (7.0, 3.6),
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.hashsalt": "bertlab",
}


def figure(rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return matplotlib's ``(figure, axes)`` in the course's look; options as `subplots` takes."""
    import matplotlib.pyplot as plt
    from cycler import cycler

    style = {**_STYLE, "axes.prop_cycle": cycler(color=[BLUE, ORANGE, INK, GREY])}
    plt.rcParams.update(style)
    return plt.subplots(rows, columns, layout="constrained", **options)


def label(axes: Any, title: str, x: str, y: str) -> None:
    """Give a plot its title and the names, with units, of its axes."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
