"""How good chapter 7 is at its real tasks: mean and range over three seeds, and baselines.

    python -m tests.bench tasks

The seed draws the head, the order of the batches and dropout; the split stays. It takes about half
an hour on two idle cores.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from bertlab.course import tasks as data
from bertlab.course.reference import minilm_folder
from tests.measure import Row, complete

SEEDS = (0, 1, 2)


@lru_cache(maxsize=1)
def bertlab() -> SimpleNamespace:
    """The complete package, and MiniLM's tokenizer."""
    package = complete()
    tokenizer: Any = package.tokenizer.WordPieceTokenizer.from_pretrained(minilm_folder())
    return SimpleNamespace(tokenizer=tokenizer, tuning=package.fine_tuning, package=package)


def trained(head: str, sizes: Sequence[int], train: Any, validation: Any, seed: int, **settings):
    """MiniLM with a fresh head, fine-tuned on examples."""
    given, pad = bertlab().tuning, bertlab().tokenizer.pad_token_id
    torch.manual_seed(seed)
    package = bertlab().package
    bert = package.weights.from_pretrained(package.encoder.BertModel, minilm_folder())
    model = getattr(given, head)(bert, *sizes)
    batches = given.BucketedBatches(train, 16, pad, seed)
    held_out = [given.pad_batch(validation[i : i + 16], pad) for i in range(0, len(validation), 16)]
    chosen = given.FineTuningSettings(seed=seed, freeze_embeddings=True, **settings)
    given.fine_tune(model, batches, held_out, chosen)
    return model.eval()


def encoded(part: Sequence[Any]) -> list[dict[str, Any]]:
    """Labelled texts, or labelled pairs, as examples."""
    *texts, labels = zip(*part, strict=True)
    first, second = texts[0], texts[1] if len(texts) > 1 else None
    given = bertlab()
    return given.tuning.encode_texts(given.tokenizer, first, second, labels, max_length=96)[0]


def accuracy(model: Any, part: Sequence[Any]) -> float:
    """The share of labelled texts or pairs that a model gets right."""
    *texts, labels = zip(*part, strict=True)
    logits = bertlab().tuning.predict(model, bertlab().tokenizer, *texts, max_length=96)
    return (logits.argmax(-1) == torch.tensor(labels)).float().mean().item()


def row(what: str, measure: Callable[[int], float], baseline: float, margin: float) -> Row:
    """A measure over all seeds, beside the baseline and what was asked for."""
    found = [measure(seed) for seed in SEEDS]
    mean = sum(found) / len(found)
    result = f"{mean:.1%} ({min(found):.1%} to {max(found):.1%}); baseline {baseline:.1%}"
    asked = f"baseline + {margin:.0%}" if margin else "stated"
    return Row(what, result, asked, mean >= baseline + margin or not margin)


def paragraphs() -> Iterator[Row]:
    """The library of a paragraph: 8 classes."""
    task = data.library_of_paragraph(train=300, validation=30, test=100)
    train, validation = encoded(task.train), encoded(task.validation)

    def measure(seed: int) -> float:
        rate = {"learning_rate": 2e-4, "epochs": 3, "layer_decay": 0.9}
        model = trained("SequenceClassifier", [8], train, validation, seed, **rate)
        return accuracy(model, task.test)

    what = f"library of a paragraph, {len(task.train)} to train on, {len(task.test)} to test"
    yield row(f"{what}: right; TF-IDF", measure, data.tf_idf_baseline(task), 0.03)


def pairs() -> Iterator[Row]:
    """Whether two sentences are of one docstring."""
    task = data.same_docstring(train=800, validation=100, test=300)
    train, validation = encoded(task.train), encoded(task.validation)

    def measure(seed: int) -> float:
        rate = {"learning_rate": 2e-4, "epochs": 3}
        model = trained("SequenceClassifier", [2], train, validation, seed, **rate)
        return accuracy(model, task.test)

    baseline = data.shared_words_baseline(task)
    yield row("same docstring, 800 pairs: right; shared words", measure, baseline, 0)


def entities() -> Iterator[Row]:
    """Entities in docstrings, by templates, and after self-training."""
    given, tokenizer = bertlab().tuning, bertlab().tokenizer
    made, checked = data.template_sentences(940), data.checked_sentences()
    words, tags = ([list(column) for column in columns] for columns in zip(*checked, strict=True))
    real = data.unlabelled_sentences(1500)

    def tagger(sentences: Sequence[Any], seed: int) -> Any:
        train, held_out = (
            given.tagged_examples(tokenizer, [s[0] for s in part], [s[1] for s in part], data.TAGS)
            for part in (sentences, made[900:])
        )
        rate = {"learning_rate": 3e-4, "epochs": 2}
        return trained("TokenClassifier", [len(data.TAGS)], train, held_out, seed, **rate)

    def f1(model: Any) -> float:
        found = given.predict_tags(model, tokenizer, words, data.TAGS)
        return given.entity_f1(tags, found)

    before = {seed: tagger(made[:900], seed) for seed in SEEDS}
    baseline = given.entity_f1(tags, data.word_list_baseline(made, words))
    yield row("entities, templates: F1; word list", lambda s: f1(before[s]), baseline, 0)

    def again(seed: int) -> float:
        sure = given.pseudo_tag(before[seed], tokenizer, real, data.TAGS, 0.9)
        return f1(tagger([*made[:450], *sure[:450]], seed))

    yield row("entities, and pseudo-labels: F1; word list", again, baseline, 0)


def questions() -> Iterator[Row]:
    """Questions about parameters, whole sections in windows."""
    given, tokenizer = bertlab().tuning, bertlab().tokenizer
    task = data.questions_about_parameters(train=500, validation=60, test=120)

    def examples(part: Sequence[data.Question]) -> list[dict[str, Any]]:
        windows = (
            given.span_examples(tokenizer, q.question, q.passage, q.answer, 128, 32) for q in part
        )
        return [example for found, _ in windows for example in found]

    def scores(answers: Sequence[str]) -> tuple[float, float]:
        pairs = zip(answers, task.test, strict=True)
        both = [given.exact_match_and_f1(text, q.answer_text) for text, q in pairs]
        exact, f1 = (sum(column) / len(both) for column in zip(*both, strict=True))
        return exact, f1

    def answers_of(seed: int) -> list[str]:
        rate = {"learning_rate": 5e-4, "epochs": 4}
        parts = examples(task.train), examples(task.validation)
        reader = trained("SpanClassifier", [], *parts, seed, **rate)
        asked = [(reader, tokenizer, q.question, q.passage, 1, 128, 32) for q in task.test]
        return [given.answer(*one)[0].text for one in asked]

    found = {seed: scores(answers_of(seed)) for seed in SEEDS}
    rule = scores([data.nearest_known_answer(task.train, q) for q in task.test])
    for i, name in enumerate(("EM", "F1")):
        yield row(f"questions: {name}; rule", lambda s, i=i: found[s][i], rule[i], 0)


def tasks() -> Iterator[Row]:
    """All four tasks."""
    for bench in (paragraphs, pairs, entities, questions):
        yield from bench()
