"""How ``bertlab/course/data/minilm_mlm_head.safetensors`` was made: a masked-word head for MiniLM.

MiniLM came without the head that BERT's pretraining had. For the preview in chapter 0 a small one
is trained here on the documentation corpus, with MiniLM itself left as it is: the head reads the
last three hidden states at each mask and predicts the piece that was there. Chapter 6 does it
properly.

    python -m bertlab.course.authoring.mlm_head
"""

import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from bertlab.course.corpus import paragraphs
from bertlab.course.demo import HEAD_FILE, _minilm

CHUNKS, STEPS, BATCH, HELD_OUT = 300, 2_500, 256, 3_000
#: The bias of a piece that never stood under a mask: it is never predicted.
NEVER = -30.0


def main() -> None:
    """Train the head, print its accuracy on masks it has not seen, and write it."""
    torch.manual_seed(0)
    features, pieces = masked_features()
    words = _minilm()[1].embeddings.word_embeddings.weight.detach()
    head = nn.ModuleDict({"transform": nn.Linear(3 * 384, 384), "norm": nn.LayerNorm(384)})
    known, targets, counts = pieces[:-HELD_OUT].unique(return_inverse=True, return_counts=True)
    known_bias = nn.Parameter((counts / counts.sum()).log())  # how frequent each piece is
    train(head, known_bias, words[known], features[:-HELD_OUT], targets)
    bias = torch.full((len(words),), NEVER).index_put((known,), known_bias.detach())
    with torch.no_grad():
        found = logits(head, bias, words, features[-HELD_OUT:]).argmax(-1)
    accuracy = (found == pieces[-HELD_OUT:]).float().mean()
    print(f"{len(known)} pieces stood under a mask")
    print(f"{accuracy:.1%} of {HELD_OUT} held-out masks right")
    state = {**head.state_dict(), "bias": bias}
    Path(HEAD_FILE).parent.mkdir(exist_ok=True)
    save_file({name: value.half().contiguous() for name, value in state.items()}, HEAD_FILE)


def masked_features() -> tuple[Tensor, Tensor]:
    """Return MiniLM's last three hidden states at masks, `[masks, 1152]`, and the pieces there."""
    tokenizer, model = _minilm()
    texts = [paragraph.text for paragraph in paragraphs() if 60 < len(paragraph.text) < 300]
    rng = random.Random(0)
    rng.shuffle(texts)
    texts = sorted(texts[: 32 * CHUNKS], key=len)
    chunks = [texts[start : start + 32] for start in range(0, len(texts), 32)]
    rng.shuffle(chunks)
    found = [_features_of(tokenizer, model, chunk) for chunk in tqdm(chunks, unit=" batches")]
    return torch.cat([f for f, _ in found]), torch.cat([pieces for _, pieces in found])


def _features_of(tokenizer: Any, model: Any, texts: list[str]) -> tuple[Tensor, Tensor]:
    batch = tokenizer(texts, padding=True, truncation=True, max_length=96, return_tensors="pt")
    ids = batch["input_ids"]
    ordinary = (ids > 999) & (batch["attention_mask"] == 1)  # no special or unused piece
    chosen = (torch.rand(ids.shape) < 0.2) & ordinary
    masked = ids.masked_fill(chosen, tokenizer.mask_token_id)
    with torch.inference_mode():
        states = model(masked, batch["attention_mask"], output_hidden_states=True).hidden_states
    return torch.cat([state[chosen] for state in states[-3:]], dim=-1).clone(), ids[chosen]


def logits(head: Any, bias: Tensor, words: Tensor, features: Tensor) -> Tensor:
    """Return `[masks, vocab]` logits."""
    return F.linear(head["norm"](F.gelu(head["transform"](features))), words, bias)


def train(head: Any, bias: Tensor, words: Tensor, features: Tensor, pieces: Tensor) -> None:
    """Fit the head; the word vectors, which are its output layer, stay as they are."""
    parameters = [*head.parameters(), bias]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
    for _ in tqdm(range(STEPS), unit=" steps"):
        rows = torch.randint(0, len(features), (BATCH,))
        loss = F.cross_entropy(logits(head, bias, words, features[rows]), pieces[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


if __name__ == "__main__":
    main()
