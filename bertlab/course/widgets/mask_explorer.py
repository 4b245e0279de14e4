"""A mask that can be moved through a sentence, and what a BERT would put there: chapter 5."""

from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import Any

import ipywidgets

from bertlab.course.display import Shown
from bertlab.course.widgets.view import View

SENTENCE = "It returns a copy of the array along the given axis."
SHOWN, MOST_PIECES = 8, 40

_BAR = 30  # em: the length of a bar for a probability of 1


@dataclass(frozen=True)
class Predictor:
    """A BERT and the parameters of an MLM head for it.

    Attributes:
        name: what it is, for a caption.
        tokenizer: a `transformers.BertTokenizer`.
        bert: Transformers' `BertModel`, in eval mode.
        head: `transform.weight`, `transform.bias`, `norm.weight`, `norm.bias` and `bias`.
        layers: how many of BERT's last hidden states the head reads, side by side; 1 in BERT.
    """

    name: str
    tokenizer: Any
    bert: Any
    head: dict[str, Any]
    layers: int

    @property
    def words(self) -> Any:
        """The table of words, `[vocab_size, hidden]`: the weight of the head's decoder."""
        return self.bert.embeddings.word_embeddings.weight.detach()

    def features(self, input_ids: Any, attention_mask: Any = None) -> Any:
        """Return what the head reads, `[batch, seq, layers * hidden]`."""
        import torch

        with torch.no_grad():
            states = self.bert(input_ids, attention_mask, output_hidden_states=True).hidden_states
        return torch.cat(states[-self.layers :], dim=-1)

    def transformed(self, features: Any) -> Any:
        """Return what the words are compared with: transform, GELU, LayerNorm."""
        import torch.nn.functional as F

        head, eps = self.head, self.bert.config.layer_norm_eps
        x = F.gelu(F.linear(features, head["transform.weight"], head["transform.bias"]))
        return F.layer_norm(x, x.shape[-1:], head["norm.weight"], head["norm.bias"], eps)

    def logits(self, features: Any) -> Any:
        """Return a score for every piece of the vocabulary."""
        import torch.nn.functional as F

        return F.linear(self.transformed(features), self.words, self.head["bias"])


@lru_cache(maxsize=1)
def predictor() -> Predictor:
    """The reference in use if it has trained MLM weights, else MiniLM with chapter 0's head."""
    from bertlab.course.reference import reference_folder

    folder = reference_folder()
    return (folder and _checkpoint(folder)) or _preview()


def _preview() -> Predictor:
    from safetensors.torch import load_file
    from transformers import BertTokenizer

    from bertlab.course.demo import HEAD_FILE
    from bertlab.course.reference import minilm, minilm_folder

    head = {name: tensor.float() for name, tensor in load_file(HEAD_FILE).items()}
    tokenizer = BertTokenizer.from_pretrained(minilm_folder())
    return Predictor("MiniLM with a small head", tokenizer, minilm(), head, layers=3)


def _checkpoint(folder: Any) -> Predictor | None:
    from transformers import BertForMaskedLM, BertTokenizer

    from bertlab.course.reference import _without_progress_bar, reference_name

    with _without_progress_bar():
        loaded: Any = BertForMaskedLM.from_pretrained(
            folder, local_files_only=True, output_loading_info=True
        )
    model, report = loaded
    if report["missing_keys"]:
        return None  # a checkpoint without the head
    named = dict(model.eval().cls.predictions.transform.state_dict())
    head = {
        name.replace("dense", "transform").replace("LayerNorm", "norm"): tensor
        for name, tensor in named.items()
    }
    head["bias"] = model.cls.predictions.decoder.bias.detach()
    tokenizer = BertTokenizer.from_pretrained(folder)
    return Predictor(reference_name(), tokenizer, model.bert, head, layers=1)


@dataclass(frozen=True)
class Guess:
    """What the model makes of one masked piece.

    Attributes:
        pieces: the sentence's pieces, without `[CLS]` and `[SEP]`.
        place: which of them was masked, from 1.
        best: the likeliest pieces with their probabilities.
        rank: the place of the true piece among all, from 1.
        probability: the true piece's.
    """

    pieces: tuple[str, ...]
    place: int
    best: tuple[tuple[str, float], ...]
    rank: int
    probability: float


def count_pieces(sentence: str) -> int:
    """How many pieces a sentence has, without `[CLS]` and `[SEP]`."""
    return len(predictor().tokenizer.tokenize(sentence))


@lru_cache(maxsize=256)
def guess(sentence: str, place: int) -> Guess:
    """Mask one piece of a sentence and let the model guess it.

    Args:
        place: the piece to be masked, counted from 1; the last one if there are fewer.

    Raises:
        ValueError: the sentence is empty or too long to be shown.
    """
    import torch

    model = predictor()
    ids = model.tokenizer(sentence)["input_ids"]
    if not 2 < len(ids) <= MOST_PIECES + 2:
        raise ValueError(
            f"sentence has {len(ids) - 2} pieces; between 1 and {MOST_PIECES} can be shown"
        )
    pieces = tuple(model.tokenizer.convert_ids_to_tokens(ids[1:-1]))
    place = max(1, min(place, len(pieces)))
    masked = torch.tensor([ids])
    masked[0, place] = model.tokenizer.mask_token_id
    features = model.features(masked)[0, place]
    probabilities = model.logits(features).softmax(dim=-1)
    values, best = probabilities.topk(SHOWN)
    true = probabilities[ids[place]]
    return Guess(
        pieces,
        place,
        tuple(
            zip(model.tokenizer.convert_ids_to_tokens(best.tolist()), values.tolist(), strict=True)
        ),
        int((probabilities > true).sum()) + 1,
        float(true),
    )


def render(sentence: str, place: int) -> Shown:
    """Return the sentence with its mask, the likeliest pieces as bars, and the true one's rank."""
    found, name = guess(sentence, place), predictor().name
    true = found.pieces[found.place - 1]
    shown = [
        f'<b style="border:1px solid var(--bl-line);padding:0 .3em">[MASK] ({escape(piece)})</b>'
        if number == found.place
        else escape(piece)
        for number, piece in enumerate(found.pieces, 1)
    ]
    rows = [_row(piece, value, piece == true) for piece, value in found.best]
    last = f"The piece that stood there, {true}, has rank {found.rank:,} of {_vocabulary():,}."
    html = (
        f'<div class="bertlab"><p><b>{escape(name)}</b></p><p>{" ".join(shown)}</p>'
        f"<table><thead><tr><th>piece</th><th>probability</th><th></th>"
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f'<p>{escape(last)}</p><p class="soft">✓ marks the piece that stood there.</p></div>'
    )
    masked = [p if n != found.place else "[MASK]" for n, p in enumerate(found.pieces, 1)]
    widest = max(len(piece) for piece, _ in found.best)
    lines = [f"{name}: {' '.join(masked)}"]
    lines += [f"{piece:>{widest}} {_percent(value):>4}" for piece, value in found.best]
    return Shown(html, "\n".join([*lines, last]))


def _row(piece: str, value: float, is_true: bool) -> str:
    style = f"width:{_BAR * round(value, 3):.2f}em"
    return (
        f'<tr><td style="white-space:nowrap">{escape(piece)}{" ✓" if is_true else ""}</td>'
        f'<td class="number">{_percent(value)}</td><td style="min-width:{_BAR}em">'
        f'<div class="bar plain" style="{style}"></div></td></tr>'
    )


def _percent(value: float) -> str:
    return f"{value:.0%}" if value >= 0.005 else "<1%"


def _vocabulary() -> int:
    return len(predictor().words)


def mask_explorer(sentence: str = SENTENCE, place: int = 7) -> View:
    """Return the explorer: any sentence, and a slider that moves the mask through it."""
    wide: dict[str, Any] = {
        "style": {"description_width": "6em"},
        "layout": {"width": "36em"},
        "continuous_update": True,
    }
    text = ipywidgets.Text(sentence, description="sentence", **wide)
    most = min(count_pieces(sentence), MOST_PIECES)
    mask = ipywidgets.IntSlider(place, 1, most, description="mask", **wide)

    def follow(change: Any) -> None:
        mask.max = max(1, min(count_pieces(change["new"]), MOST_PIECES))

    text.observe(follow, names="value")
    return View({"sentence": text, "place": mask}, render)
