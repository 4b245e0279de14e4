"""Where the parameters of a BERT sit, with sliders: chapter 0."""

from typing import Any

import ipywidgets

from bertlab.course.display import Shown
from bertlab.course.widgets.view import View

_BARS = ("first", "fourth", "second", "third")  # classes of look.css


def parameter_shares(
    layers: int = 12, width: int = 768, vocab_size: int = 30522, inner: int = 4
) -> dict[str, int]:
    """Return how many parameters each part of a BERT has.

    Args:
        inner: width of the feed-forward network's inner layer, in widths of the model.
    """
    return {
        "word embeddings": vocab_size * width,
        "attention": layers * 4 * (width * width + width),
        "feed-forward": layers * (2 * inner * width * width + (inner + 1) * width),
        "all the rest": (512 + 2) * width + 2 * width * (1 + 2 * layers) + width * width + width,
    }


def render(layers: int, width: int, vocab_size: int, inner: int) -> Shown:
    """Return a bar for each part, with its number and share."""
    shares = parameter_shares(layers, width, vocab_size, inner)
    total = sum(shares.values())
    rows, lines = [], [f"{total:,} parameters"]
    for (name, count), look in zip(shares.items(), _BARS, strict=True):
        part = count / total
        bar = f'<div class="bar {look}" style="width:{26 * part:.2f}em"></div>'
        rows.append(
            f'<tr><td>{name}</td><td style="min-width:26em">{bar}</td>'
            f"<td class=number>{count:,}</td><td class=number>{part:.1%}</td></tr>"
        )
        lines.append(f"{name:<16} {count:>12,}  {part:6.1%}")
    html = (
        f'<div class="bertlab"><p><b>{total:,} parameters</b>, {total * 4 / 1e6:,.0f} MB in '
        f"float32</p><table>{''.join(rows)}</table></div>"
    )
    return Shown(html, "\n".join(lines))


def parameter_explorer() -> View:
    """Return the explorer, at BERT-Base."""
    wide: dict[str, Any] = {
        "style": {"description_width": "11em"},
        "layout": {"width": "34em"},
        "continuous_update": True,
    }
    return View(
        {
            "layers": ipywidgets.IntSlider(12, 1, 24, description="layers", **wide),
            "width": ipywidgets.IntSlider(768, 64, 1024, 64, description="width", **wide),
            # From 522, so that BERT's 30,522 is a place where the slider can stand.
            "vocab_size": ipywidgets.IntSlider(
                30522, 522, 120522, 500, description="vocabulary", **wide
            ),
            "inner": ipywidgets.IntSlider(4, 1, 8, description="inner width / width", **wide),
        },
        render,
    )
