"""How ``bertlab/course/data/minilm_library_head.safetensors`` was made: eight libraries, one layer.

MiniLM is left as it is. The mean of its vectors over a paragraph is what a logistic regression
reads, for the widget of chapter 7 that is there before any exercise.

    python -m bertlab.course.authoring.library_head
"""

from collections.abc import Sequence

import torch
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from tqdm import tqdm

from bertlab.course.tasks import LabelledText, library_of_paragraph
from bertlab.course.widgets.impact_explorer import HEAD_FILE, encoder, features


def main() -> None:
    """Train the head, print its accuracy on paragraphs it has not seen, and write it."""
    task = library_of_paragraph(train=80, validation=2, test=40, seed=1)
    labels = [label for _, label in task.train]
    model = LogisticRegression(C=10.0, max_iter=2000).fit(read(task.train).numpy(), labels)
    found = model.predict(read(task.test).numpy())
    hits = [label == given for (_, label), given in zip(task.test, found, strict=True)]
    print(f"{sum(hits) / len(hits):.1%} of {len(hits)} unseen paragraphs right")
    head = {"weight": torch.tensor(model.coef_), "bias": torch.tensor(model.intercept_)}
    save_file({name: x.float().contiguous() for name, x in head.items()}, HEAD_FILE)


def read(part: Sequence[LabelledText], size: int = 32) -> Tensor:
    """The features of some paragraphs, `[paragraphs, 384]`."""
    tokenizer, order = encoder()[0], sorted(range(len(part)), key=lambda i: len(part[i].text))
    rows = torch.zeros(len(part), 384)
    for start in tqdm(range(0, len(order), size), unit=" batches"):
        chosen = order[start : start + size]
        texts = [part[i].text for i in chosen]
        batch = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
        rows[chosen] = features(batch["input_ids"], batch["attention_mask"])
    return rows


if __name__ == "__main__":
    main()
