"""Type a text: which library would it come from, and which words say so? Chapter 7.

The model is MiniLM as it came, with one linear layer on the mean of its vectors, which
``bertlab/course/authoring/library_head.py`` trained on the documentation.
"""

from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets

from bertlab.course.display import Shown
from bertlab.course.tasks.docstrings import FILES
from bertlab.course.widgets.view import View

HEAD_FILE = Path(__file__).parents[1] / "data" / "minilm_library_head.safetensors"

SENTENCE = "Returns a new tensor with the gradient of the loss, on the same device as the input."
LIKELIEST = "the likeliest"
MOST_PIECES = 48

_BAR = 20  # em: the length of a bar for a probability of 1


@dataclass(frozen=True)
class Decision:
    """What the model says of a text, and what each piece did to it.

    Attributes:
        probabilities: of each library of `FILES`, in their order.
        target: the library that the impacts are about.
        impacts: for each piece its logit's fall when the piece is taken out.
    """

    probabilities: tuple[float, ...]
    target: str
    impacts: tuple[tuple[str, float], ...]

    @property
    def said(self) -> str:
        """The likeliest library."""
        return max(zip(self.probabilities, FILES, strict=True))[1]


@lru_cache(maxsize=1)
def encoder() -> tuple[Any, Any]:
    """MiniLM's tokenizer, and MiniLM."""
    from transformers import BertTokenizer

    from bertlab.course.reference import minilm, minilm_folder

    return BertTokenizer.from_pretrained(minilm_folder()), minilm()


@lru_cache(maxsize=1)
def _head() -> tuple[Any, Any]:
    """The layer's weight `[8, 384]` and bias `[8]`."""
    from safetensors.torch import load_file

    head = load_file(HEAD_FILE)
    return head["weight"], head["bias"]


def features(input_ids: Any, attention_mask: Any) -> Any:
    """The mean of MiniLM's vectors at real tokens, `[batch, 384]`."""
    import torch

    with torch.no_grad():
        states = encoder()[1](input_ids, attention_mask).last_hidden_state
    mask = attention_mask[..., None].float()
    return (states * mask).sum(dim=1) / mask.sum(dim=1)


@lru_cache(maxsize=256)
def decide(text: str, target: str = LIKELIEST) -> Decision:
    """Say which library a text would come from, and what each of its pieces did to that.

    Args:
        target: the library whose logit is looked at; the likeliest one by default.

    Raises:
        ValueError: the text is empty or too long to be shown, or there is no such library.
    """
    import torch

    if target not in (*FILES, LIKELIEST):
        raise ValueError(f"target is {target!r}, but must be {LIKELIEST} or one of {list(FILES)}")
    tokenizer, (weight, bias) = encoder()[0], _head()
    ids = tokenizer(text)["input_ids"]
    pieces = len(ids) - 2
    if not 0 < pieces <= MOST_PIECES:
        raise ValueError(f"text has {pieces} pieces; between 1 and {MOST_PIECES} can be shown")
    without = [ids[:place] + ids[place + 1 :] for place in range(1, pieces + 1)]
    whole = features(torch.tensor([ids]), torch.ones(1, len(ids)).long()) @ weight.T + bias
    rest = torch.tensor(without)
    others = features(rest, torch.ones_like(rest)) @ weight.T + bias
    chosen = int(whole.argmax()) if target == LIKELIEST else list(FILES).index(target)
    impacts = (whole[0, chosen] - others[:, chosen]).tolist()
    return Decision(
        tuple(whole[0].softmax(dim=-1).tolist()),
        list(FILES)[chosen],
        tuple(zip(tokenizer.convert_ids_to_tokens(ids[1:-1]), impacts, strict=True)),
    )


def render(text: str, target: str = LIKELIEST) -> Shown:
    """Return the libraries with their probabilities, and the text with its words marked."""
    from bertlab.fine_tuning import ImpactPicture  # given; its module imports torch

    found = decide(text, target)
    picture = ImpactPicture(list(found.impacts), f"What speaks for {found.target}")
    ranked = sorted(zip(found.probabilities, FILES, strict=True), reverse=True)
    rows = "".join(_row(name, value, name == found.target) for value, name in ranked)
    html = (
        f'<div class="bertlab"><p><b>It would come from {escape(found.said)}</b></p>'
        "<table><thead><tr><th>library</th><th>probability</th><th></th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{picture._repr_html_()}"
    )
    lines = [f"It would come from {found.said}"]
    lines += [f"{name:>12} {_percent(value):>4}" for value, name in ranked]
    return Shown(html, "\n".join([*lines, str(picture)]))


def _row(name: str, value: float, is_target: bool) -> str:
    mark = " ←" if is_target else ""
    return (
        f'<tr><td style="white-space:nowrap">{escape(name)}{mark}</td>'
        f'<td class="number">{_percent(value)}</td><td style="min-width:{_BAR}em">'
        f'<div class="bar plain" style="width:{_BAR * round(value, 3):.2f}em"></div></td></tr>'
    )


def _percent(value: float) -> str:
    return f"{value:.0%}" if value >= 0.005 else "<1%"


def impact_explorer(text: str = SENTENCE) -> View:
    """Return the explorer: any text, and which library the marks are about."""
    wide: dict[str, Any] = {
        "style": {"description_width": "6em"},
        "layout": {"width": "46em"},
        "continuous_update": True,
    }
    typed = ipywidgets.Text(text, description="text", **wide)
    target = ipywidgets.Dropdown(
        options=[LIKELIEST, *FILES], value=LIKELIEST, description="marks for"
    )
    return View({"text": typed, "target": target}, render)
