"""The overview's plots, as SVG to put into a page: the same bytes for the same results."""

import io
import re
from collections import Counter
from html import escape
from typing import Any

from bertlab.course import figures

#: How an exercise can go, in the order of the bars: look, name, colour, hatch.
OUTCOMES = (
    ("passed", "passed", "#4c9a63", ""),
    ("partly", "in part", "#e3c04f", ".."),
    ("failed", "not yet", figures.ORANGE, "//"),
    ("error", "error", "#b8433f", "xx"),
    ("waiting", "not judged yet", "#e3e6ea", ""),
)


def points(reached: list[float], maximum: float) -> str:
    """How many students reached how many points: a histogram."""
    width = next(w for w in (1, 2, 5, 10, 20, 50, 100, 1000) if maximum <= 30 * w or w == 1000)
    edges = [width * i for i in range(int(maximum // width) + 2)]
    figure, axes = figures.figure(figsize=(8.0, 3.2))
    axes.hist(reached, bins=edges, color=figures.BLUE, edgecolor="white", linewidth=0.8)
    span = "each bar is 1 point wide" if width == 1 else f"each bar is {width} points wide"
    figures.label(axes, "Distribution of points", f"total (points, {span})", "number of students")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(0, edges[-1])
    return _svg(figure, "points", "Histogram: how many students reached how many points")


def outcomes(looks: dict[str, Counter[str]], students: int) -> str:
    """How each exercise went: a bar an exercise, in percent of the students."""
    figure, axes = figures.figure(figsize=(8.0, 1.5 + 0.24 * len(looks)))
    names = list(looks)
    left = [0.0] * len(names)
    for look, name, colour, hatch in OUTCOMES:
        parts = [100 * looks[id][look] / max(students, 1) for id in names]
        style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.6}
        axes.barh(names, parts, left=left, height=0.78, label=name, **style)
        left = [start + part for start, part in zip(left, parts, strict=True)]
    figures.label(axes, "How each exercise went", "share of the students (%)", "exercise")
    axes.set_xlim(0, 100)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)  # the first exercise on top
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside lower center", ncols=len(OUTCOMES))
    return _svg(figure, "outcomes", "Bars: how each exercise went, in percent of the students")


def _svg(figure: Any, name: str, description: str) -> str:
    """A figure as an SVG element without what differs from run to run.

    Args:
        name: goes before each id, so that several plots can be in one page.
        description: read out where the plot cannot be seen.
    """
    import matplotlib.pyplot as plt

    file = io.StringIO()
    with plt.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(file, format="svg")
    plt.close(figure)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'font-family: [^;"]+', "font-family: system-ui, sans-serif", svg)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(description)}" ', 1)
