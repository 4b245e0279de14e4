"""The benchmarks of chapter 7: examples per second of fine-tuning, and of inference.

Both sides have MiniLM's weights with the same fresh head, the same paragraphs in float32, and
batches of the same size, and run in turn in one process.
"""

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.bench_model import CPU, Setting, package
from tests.measure import Row, seconds

BATCH = 8  # what Trainer takes when nobody says another


def fine_tuning(setting: Setting = CPU) -> Iterator[Row]:
    """Fine-tuning by `fine_tune` beside Trainer with its defaults, to the same accuracy."""
    experiment = Experiment(setting)
    taken, accuracy = {}, {}
    for name, train in (("Trainer", experiment.trainer), ("ours", experiment.ours)):
        taken[name], accuracy[name] = train()
    examples = len(experiment.train) * experiment.epochs
    ratio = taken["Trainer"] / taken["ours"]
    # Two accuracies on `n` texts differ by chance by up to two standard errors of a difference.
    spread = 2 * (2 * accuracy["Trainer"] * (1 - accuracy["Trainer"]) / len(experiment.test)) ** 0.5
    equal = accuracy["ours"] >= accuracy["Trainer"] - spread
    yield Row(
        f"fine-tuning MiniLM on the library of a paragraph, {examples:,} examples in batches of "
        f"{BATCH}, validated after each epoch, float32, with QuickDropout; accuracy "
        f"{accuracy['ours']:.1%}, Trainer with its defaults "
        f"{accuracy['Trainer']:.1%}, on {len(experiment.test)} others",
        f"{examples / taken['ours']:.1f} examples/s, {ratio:.2f} times as many as Trainer",
        "2 times, at equal accuracy",
        ratio >= 2 and equal,
    )


def inference(setting: Setting = CPU) -> Iterator[Row]:
    """`predict` over 20,000 paragraphs of the documentation beside a pipeline."""
    from bertlab.course.corpus import paragraphs

    count, of_theirs = (64, 32) if setting.small else (20_000, 4_000)
    texts = [paragraph.text for paragraph in paragraphs()]
    random.Random(0).shuffle(texts)
    texts = fitting(texts, count)
    experiment = Experiment(setting, task=False)
    classify = experiment.pipeline()
    classify(texts[:BATCH])
    found: dict[str, Any] = {}

    def mine() -> None:
        found["ours"] = package().fine_tuning.predict(experiment.mine, experiment.tokenizer, texts)

    def theirs() -> None:
        found["theirs"] = classify(texts[:of_theirs])

    ours, yours = seconds(mine), seconds(theirs) * count / of_theirs
    labels = [f"LABEL_{i}" for i in found["ours"].argmax(dim=-1)[:of_theirs].tolist()]
    same = sum(a == b["label"] for a, b in zip(labels, found["theirs"], strict=True)) / of_theirs
    yield Row(
        f"inference over {count:,} paragraphs of the documentation, MiniLM, float32 (the pipeline "
        f"read {of_theirs:,} of them, in the same random order; {same:.2%} of the labels agree)",
        f"{count / ours:.0f} paragraphs/s, {yours / ours:.2f} times as many as "
        'pipeline("text-classification", batch_size=32)',
        "3.5 times, the same labels",
        same > 0.999 and yours / ours >= 3.5,
    )


def fitting(texts: Sequence[str], count: int) -> list[str]:
    """The first texts that fit into 512 tokens, so that both sides read all of each."""
    kind = package().tokenizer.WordPieceTokenizer
    from bertlab.course.reference import minilm_folder

    tokenizer, found = kind.from_pretrained(minilm_folder()), []
    for text, ids in zip(texts, tokenizer.encode_batch(texts[: 2 * count]), strict=False):
        if 2 < len(ids) <= 512 and len(found) < count:
            found.append(text)
    return found


@cache
def starting_folder(labels: int) -> Path:
    """A checkpoint of Transformers: MiniLM with a fresh head for so many classes."""
    import transformers

    from bertlab.course.reference import minilm_folder

    transformers.utils.logging.set_verbosity_error()  # that the head is fresh is meant
    torch.manual_seed(0)
    kind = transformers.BertForSequenceClassification
    model = kind.from_pretrained(minilm_folder(), num_labels=labels)
    folder = Path(tempfile.mkdtemp())
    model.save_pretrained(folder)
    transformers.BertTokenizer.from_pretrained(minilm_folder()).save_pretrained(folder)
    return folder


class Experiment:
    """One task, and a model on each side with the same weights."""

    def __init__(self, setting: Setting, task: bool = True) -> None:
        from bertlab.course.reference import minilm_folder

        self.setting = setting
        self.tokenizer: Any = package().tokenizer.WordPieceTokenizer.from_pretrained(
            minilm_folder()
        )
        self.epochs = 1 if setting.small else 3
        if task:
            self.read_task()
        self.mine = self.made()

    def read_task(self) -> None:
        """The paragraphs, for either side."""
        from bertlab.course.tasks import library_of_paragraph

        sizes = (4, 2, 4) if self.setting.small else (120, 20, 100)
        task = library_of_paragraph(*sizes)
        self.train, self.validation, self.test = (
            [item for item in part if len(self.tokenizer.encode(item.text)) <= 512]
            for part in (task.train, task.validation, task.test)
        )

    def made(self) -> Any:
        """Our model, with the weights that Transformers' starts from."""
        from safetensors.torch import load_file

        modules, folder = package(), starting_folder(8)
        bert = modules.weights.from_pretrained(modules.encoder.BertModel, folder)
        model = modules.fine_tuning.SequenceClassifier(bert, 8)
        tensors = load_file(folder / "model.safetensors")
        with torch.no_grad():
            for name in ("weight", "bias"):
                model.classifier.get_parameter(name).copy_(tensors[f"classifier.{name}"])
        return model.to(self.setting.device)

    def examples(self, items: Sequence[Any]) -> list[dict[str, Any]]:
        """Texts as our examples."""
        texts, labels = zip(*items, strict=True)
        return package().fine_tuning.encode_texts(self.tokenizer, texts, labels=labels)[0]

    def ours(self) -> tuple[float, float]:
        """Seconds of `fine_tune`, tokenizing and validation included, and the accuracy reached.

        Dropout draws its masks from fewer random bits, which `fine_tune` leaves to its caller.
        """
        modules = package().fine_tuning
        settings = modules.FineTuningSettings(epochs=self.epochs)

        def run() -> None:
            pad = self.tokenizer.pad_token_id
            train = modules.BucketedBatches(self.examples(self.train), BATCH, pad)
            validation = list(modules.BucketedBatches(self.examples(self.validation), 32, pad))
            with package().pretraining.QuickDropout():
                modules.fine_tune(self.mine, train, validation, settings)

        taken = seconds(run)
        logits = modules.predict(self.mine, self.tokenizer, [item.text for item in self.test])
        return taken, self.accuracy(logits)

    def accuracy(self, logits: torch.Tensor) -> float:
        """The part of the test's labels that logits get right."""
        labels = torch.tensor([item.label for item in self.test])
        return float((logits.cpu().argmax(dim=-1) == labels).float().mean())

    def trainer(self) -> tuple[float, float]:
        """Seconds of Trainer with its defaults, and the accuracy reached.

        As ours, it tokenizes, and validates after each epoch.
        """
        from transformers import (
            BertForSequenceClassification,
            BertTokenizer,
            DataCollatorWithPadding,
            Trainer,
            TrainingArguments,
        )

        tokenizer = BertTokenizer.from_pretrained(starting_folder(8))
        model = BertForSequenceClassification.from_pretrained(starting_folder(8))
        arguments = TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            num_train_epochs=self.epochs,
            report_to=[],
            save_strategy="no",
            eval_strategy="epoch",
            disable_tqdm=True,
            use_cpu=self.setting.device == "cpu",
        )

        def examples(items: Sequence[Any]) -> list[dict[str, Any]]:
            columns = tokenizer([item.text for item in items])
            return [
                {**{name: columns[name][i] for name in columns}, "label": item.label}
                for i, item in enumerate(items)
            ]

        def run() -> Any:
            trainer = Trainer(
                model=model,
                args=arguments,
                train_dataset=examples(self.train),  # type: ignore[arg-type]  # a list is enough
                eval_dataset=examples(self.validation),  # type: ignore[arg-type]
                data_collator=DataCollatorWithPadding(tokenizer),
            )
            trainer.train()
            return trainer

        kept: list[Any] = []
        taken = seconds(lambda: kept.append(run()))
        logits = kept[0].predict(examples(self.test)).predictions
        return taken, self.accuracy(torch.as_tensor(logits))

    def pipeline(self) -> Any:
        """Transformers' pipeline on the same weights."""
        import transformers

        folder = str(starting_folder(8))
        return transformers.pipeline(
            "text-classification",
            model=folder,
            tokenizer=folder,
            batch_size=32,
            device=self.setting.device,
        )


SMALL = replace(CPU, small=True, rounds=2)

if __name__ == "__main__":  # a trial in small, to see that everything runs
    for bench in (fine_tuning, inference):
        for row in bench(SMALL):
            print(row)
