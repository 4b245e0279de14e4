"""What the finished package will do, shown in chapter 0 on stand-ins from Hugging Face.

Everything here is written by the student in later chapters; this module is only a preview.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

HEAD_FILE = Path(__file__).parent / "data" / "minilm_mlm_head.safetensors"


def search(question: str, texts: Sequence[str], best: int = 3) -> list[str]:
    """Return the texts whose vectors are nearest to the question's, nearest first.

    A text's vector is the mean of MiniLM's last hidden states over its tokens, of length 1.
    """
    similarity = _vectors(tuple(texts)) @ _vectors((question,))[0]
    return [texts[int(index)] for index in similarity.argsort(descending=True)[:best]]


def fill_mask(text: str, best: int = 5) -> list[str]:
    """Return the likeliest pieces for the first ``[MASK]`` in a text, likeliest first.

    Raises:
        ValueError: there is no ``[MASK]`` in `text`.
    """
    import torch

    tokenizer, model = _minilm()
    batch = tokenizer(text, return_tensors="pt")
    places = (batch["input_ids"][0] == tokenizer.mask_token_id).nonzero()
    if len(places) == 0:
        raise ValueError(f"text has no [MASK] to fill: {text!r}")
    with torch.inference_mode():
        states = model(**batch, output_hidden_states=True).hidden_states
        logits = mlm_logits(states, model.embeddings.word_embeddings.weight)[0, places[0, 0]]
    return tokenizer.convert_ids_to_tokens(logits.topk(best).indices.tolist())


def mlm_logits(hidden_states: Sequence[Any], word_embeddings: Any) -> Any:
    """Return MLM logits for MiniLM from a small head that was trained for this preview.

    Args:
        hidden_states: all of MiniLM's hidden states; the head reads the last three.
        word_embeddings: ``[vocab, hidden]``, the output layer's weight too.
    """
    import torch
    import torch.nn.functional as F

    head = _head()
    x = torch.cat(list(hidden_states[-3:]), dim=-1)
    x = F.gelu(F.linear(x, head["transform.weight"].float(), head["transform.bias"].float()))
    x = F.layer_norm(x, x.shape[-1:], head["norm.weight"].float(), head["norm.bias"].float())
    return F.linear(x, word_embeddings, head["bias"].float())


@lru_cache(maxsize=8)  # another question about the same texts costs no second reading
def _vectors(texts: tuple[str, ...]) -> Any:
    import torch
    import torch.nn.functional as F

    tokenizer, model = _minilm()
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found: dict[int, Any] = {}
    for start in range(0, len(texts), 32):
        chunk = by_length[start : start + 32]
        batch = tokenizer(
            [texts[index] for index in chunk],
            padding=True,
            truncation=True,
            max_length=128,
            return_tensors="pt",
        )
        with torch.inference_mode():
            states = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        means = F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
        found.update(zip(chunk, means, strict=True))
    return torch.stack([found[index] for index in range(len(texts))])


@lru_cache(maxsize=1)
def _minilm() -> tuple[Any, Any]:
    from transformers import BertTokenizer

    from bertlab.course.reference import minilm, minilm_folder

    return BertTokenizer.from_pretrained(minilm_folder()), minilm()


@lru_cache(maxsize=1)
def _head() -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(HEAD_FILE)
