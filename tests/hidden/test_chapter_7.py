"""Chapter 7: heads on a real BERT, loops that are stopped, words that are drawn, impacts.

Where a part draws at random, its counts are judged by `as_asked`: an exact binomial test that
refuses a right part in 1 of 100,000,000 counts. No exercise has more than 60 counts here.
"""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bertlab.course.exercises import chapter_5
from bertlab.course.exercises import chapter_7 as right
from bertlab.course.exercises.chapter_6 import as_asked
from bertlab.course.exercises.support import integers, normal, padding_mask
from bertlab.course.grading.hidden import HELPERS, Config

FIELDS = {**chapter_5.SIZES, "num_hidden_layers": 2}
PIECES, WIDTH = FIELDS["vocab_size"], FIELDS["hidden_size"]
HELPER = f"{HELPERS}chapter_7."


def lawful(submission, law):
    """Assert that a law holds: a function of the implementation that asserts it."""
    submission.agrees(lambda of: law(of) is None, truth=lambda: True)


def counted(**counts):
    """Assert that each count of so many draws fits its share: `(count, draws, share)`."""
    said = {name: as_asked(*given) for name, given in counts.items()}
    assert set(said.values()) == {"as asked"}, {n: s for n, s in said.items() if s != "as asked"}


def seed_of(rng):
    """Draw a seed."""
    return int(rng.integers(2**31))


def bert_state(rng, **layers):
    """Draw the parameters of a small BERT and of the layers on it, each with so many outputs."""
    state = chapter_5.in_our_names(chapter_5.drawn(rng, FIELDS), FIELDS)
    state = {name: value for name, value in state.items() if name.startswith("bert.")}
    for name, outputs in layers.items():
        state |= right.drawn_layer(rng, name, outputs, WIDTH)
    return state


def headed(of, name, state, *labels, **fields):
    """Make a head of the submission on its BERT, with its parameters."""
    bert = of.make("encoder.BertModel", Config(FIELDS | fields))
    return of.make(f"fine_tuning.{name}", bert, *labels).load(state)


def drawn_batch(rng, lengths):
    """Draw a padded batch of pairs."""
    mask = padding_mask(lengths, max(lengths))
    halves = torch.tensor(lengths)[:, None] // 2
    return {
        "input_ids": integers(rng, 1, PIECES, *mask.shape) * mask,
        "attention_mask": mask,
        "token_type_ids": (torch.arange(max(lengths)) >= halves).long() * mask,
    }


def alone(batch, row):
    """One text of a batch, without padding and without a mask."""
    length = int(batch["attention_mask"][row].sum())
    return {n: x[row : row + 1, :length] for n, x in batch.items() if n != "attention_mask"}


def slopes(model, batch, **labels):
    """The gradients of a model's loss, but those that are 0 except for rounding."""
    found = model.gradients(**batch, **labels, of="0")
    return {name: x for name, x in found.items() if not name.endswith("key.bias")}


# --- 7.1 batches ---


def drawn_examples(rng, lengths, **fields):
    """Draw examples; a field is `list` for a number a token, or `int` for one a text."""
    made = []
    for length in lengths:
        example = {"input_ids": rng.integers(1, 90, length).tolist()}
        for name, kind in fields.items():
            numbers = rng.integers(1, 9, length).tolist()
            example[name] = numbers if kind is list else numbers[0]
        made.append(example)
    return made


@pytest.mark.exercise("7.1")
@pytest.mark.hint("What a batch holds at real tokens is what the examples held, field by field.")
def test_padding_can_be_undone(submission, rng):
    """Cut back to its length, each row is what the example had, whatever the field is called"""
    lengths, pad = rng.integers(1, 15, 6).tolist(), int(rng.integers(1, 90))
    fields = {"labels": list, "token_type_ids": list, "topic": int}
    examples = drawn_examples(rng, lengths, **fields)
    filling = {"input_ids": pad, "labels": -100}

    def columns(examples):
        found = {"attention_mask": padding_mask(lengths, max(lengths))}
        for name in examples[0]:
            rows = [torch.tensor(example[name]) for example in examples]
            fill = filling.get(name, 0)
            if name == "topic":
                found[name] = torch.stack(rows)
            else:
                found[name] = torch.nn.utils.rnn.pad_sequence(rows, True, fill)
        return dict(sorted(found.items()))

    submission.agrees(
        lambda of, examples: dict(sorted(of.call("fine_tuning.pad_batch", examples, pad).items())),
        examples,
        truth=columns,
    )


@pytest.mark.exercise("7.1")
@pytest.mark.hint("What does not fit is refused, with the number of the example and the field.")
def test_examples_that_do_not_fit(submission, rng):
    """Examples with a field more, a list too long, or nothing in them, are refused by number"""
    fields = {"labels": list, "attention_mask": list}
    good = drawn_examples(rng, [4, 3, 5, 2, 6], **fields)
    assert submission.call("fine_tuning.pad_batch", good, 0) is not None
    number = int(rng.integers(1, 5))
    long = {**good[number], "labels": [*good[number]["labels"], 1]}
    more = {**good[number], "topic": 1}
    empty = {name: [] for name in good[number]}
    for wrong, words in ((long, ["labels"]), (more, ["topic"]), (empty, [])):
        given = [wrong if i == number else example for i, example in enumerate(good)]
        with submission.raises(ValueError, f"examples[{number}]", *words):
            submission.call("fine_tuning.pad_batch", given, 0)


def buckets(of, lengths, size, drawing):
    """Call `bucket_batches`."""
    return of.call("fine_tuning.bucket_batches", lengths, size, drawing)


@pytest.mark.exercise("7.1")
@pytest.mark.hint("Sorted and cut: the lengths that meet are the same, however the draws fall.")
def test_lengths_that_meet(submission, rng):
    """Whatever is drawn, the lengths that meet are those of the sorted list, cut into batches"""
    lengths = rng.integers(1, 40, 48).tolist()

    def meetings(of, lengths):
        drawing, found = of.make("random.Random", seed_of(rng)), []
        for size in (6, 4, 1, 48):
            batches = buckets(of, lengths, size, drawing)
            met = sorted(sorted(lengths[i] for i in batch) for batch in batches)
            found.append([met, sorted(i for batch in batches for i in batch)])
        return found, buckets(of, [], 4, drawing)

    def cut(lengths):
        ordered = sorted(lengths)
        return [
            [[ordered[i : i + size] for i in range(0, 48, size)], list(range(48))]
            for size in (6, 4, 1, 48)
        ], []

    submission.agrees(meetings, lengths, truth=cut)


@pytest.mark.exercise("7.1")
@pytest.mark.hint("Who meets whom, and which batch comes first, is drawn anew for every epoch.")
def test_chance_in_many_epochs(submission, rng):
    """In 200 epochs each batch comes first as often, and texts of one length meet by chance"""
    same, unlike = [7] * 8, [1, 2, 4, 8, 16, 32, 64, 128]

    def law(of):
        drawing = of.make("random.Random", seed_of(rng))
        met, first = [], []
        for _ in range(200):
            met += [set(batch) for batch in buckets(of, same, 2, drawing) if 0 in batch]
            first.append(min(buckets(of, unlike, 2, drawing)[0]))
        assert len(met) == 200, "an index is not in one batch"
        together = {f"0 and {i}": (sum(i in pair for pair in met), 200, 1 / 7) for i in range(1, 8)}
        begins = {f"{i} first": (first.count(i), 200, 1 / 4) for i in (0, 2, 4, 6)}
        counted(**together, **begins)

    lawful(submission, law)


# --- 7.2 classify texts ---


@pytest.mark.exercise("7.2")
@pytest.mark.hint("A text has the same logits by itself and among others, padded or not.")
def test_a_text_among_others(submission, rng):
    """On a real BERT, a text has its logits alone and among others, as Transformers' model does"""
    batch, labels = drawn_batch(rng, [7, 4, 11]), torch.tensor([2, 0, 1])

    def scores(of, state):
        model = headed(of, "SequenceClassifier", state, 3)
        rows = [model(**alone(batch, row))["logits"] for row in range(3)]
        return model(**batch, labels=labels), torch.cat(rows), model(**batch)["loss"] is None

    submission.agrees(scores, bert_state(rng, classifier=3))


@pytest.mark.exercise("7.2")
@pytest.mark.hint("All of the model learns from a text's label: the head, the pooler, every layer.")
def test_everything_learns(submission, rng):
    """The loss teaches all of BERT and the head, with two classes and with many"""
    batch = drawn_batch(rng, [6, 9])
    for classes in (2, 12):
        labels = integers(rng, 0, classes, 2)
        submission.agrees(
            lambda of, state, classes, labels: slopes(
                headed(of, "SequenceClassifier", state, classes), batch, labels=labels
            ),
            *(bert_state(rng, classifier=classes), classes, labels),
        )


@pytest.mark.exercise("7.2")
@pytest.mark.hint("A new classifier has small weights, as the config says, and a bias of 0.")
def test_a_new_classifier(submission, rng):
    """A new classifier's weights have the spread that the config asks for, its bias is 0"""
    spread = float(rng.uniform(0.5, 1.5))

    def law(of):
        bert = of.make("encoder.BertModel", Config(FIELDS, initializer_range=spread))
        model = of.make("fine_tuning.SequenceClassifier", bert, 400)
        weight, bias = model.get("classifier.weight"), model.get("classifier.bias")
        # Of 9,600 draws mean and spread lie within 7 standard errors but for 1 in 10^11.
        assert weight.shape == (400, WIDTH) and bias.shape == (400,), "another shape"
        assert abs(float(weight.std()) / spread - 1) < 7 / math.sqrt(2 * 9600), "another spread"
        assert abs(float(weight.mean()) / spread) < 7 / math.sqrt(9600), "another mean"
        assert bool((bias == 0).all()), "a bias that is not 0"
        assert model.part("bert").is_same(bert), "another BERT"

    lawful(submission, law)


@pytest.mark.exercise("7.2")
@pytest.mark.hint("A label that is no class is refused, and the message says which text has it.")
def test_labels_that_are_no_class(submission, rng):
    """Labels that are no class are refused by number; the last class is one"""
    batch, state = drawn_batch(rng, [5, 6, 4, 3]), bert_state(rng, classifier=3)

    def loss(of, state):
        model = headed(of, "SequenceClassifier", state, 3)
        return model(**batch, labels=torch.tensor([2, 0, 2, 1]))["loss"]

    submission.agrees(loss, state)
    model = headed(submission, "SequenceClassifier", state, 3)
    for wrong in (3, -1, -7):
        row = int(rng.integers(4))
        labels = torch.tensor([1, 2, 0, 2])
        labels[row] = wrong
        with submission.raises(ValueError, row, wrong):
            model(**batch, labels=labels)


# --- 7.3 tag words ---


@pytest.mark.exercise("7.3")
@pytest.mark.hint(
    "A word's label stands at its first piece, in whatever part of the sentence you are."
)
def test_labels_of_a_window(submission, rng):
    """In windows of a long sentence, each word's first piece has its label, all else none"""
    for _ in range(8):
        counts = rng.integers(1, 5, 9)
        labels = rng.integers(0, 7, 9).tolist()
        begin = int(rng.integers(0, 4))
        words = [
            word for word in range(begin, 9 - int(rng.integers(0, 3))) for _ in range(counts[word])
        ]
        ids = [None, *words, None, *[None] * int(rng.integers(0, 3))]
        wanted, before = [], None
        for word in ids:
            wanted.append(-100 if word is None or word == before else labels[word])
            before = word
        submission.agrees(
            lambda of, labels, ids: of.call("fine_tuning.align_labels", labels, ids),
            *(labels, ids),
            truth=lambda *_, wanted=wanted: wanted,
        )


@pytest.mark.exercise("7.3")
@pytest.mark.hint("Every labelled token of the batch counts alike, in whatever sentence it stands.")
def test_the_tagger_on_a_real_bert(submission, rng):
    """On a real BERT, scores, loss and gradients are those of Transformers' model"""
    batch = drawn_batch(rng, [3, 10, 7])
    labels = integers(rng, 0, 5, 3, 10).masked_fill(batch["attention_mask"] == 0, -100)
    labels[0, :2] = -100
    real = batch["attention_mask"] == 1

    def outcome(of, state):
        model = headed(of, "TokenClassifier", state, 5)
        found = model(**batch, labels=labels)
        rows = torch.cat([model(**alone(batch, row))["logits"][0] for row in range(3)])
        return found["loss"], found["logits"][real], rows, slopes(model, batch, labels=labels)

    submission.agrees(outcome, bert_state(rng, classifier=5))


LETTERS = ("O", "B-x", "I-x", "B-y", "I-y", "E-x", "S-x", "E-y", "S-y")


def f1(of, true, predicted):
    """Call `entity_f1`, and make a tensor of its float."""
    found = of.call("fine_tuning.entity_f1", true, predicted)
    assert isinstance(found, float), "is not a float"
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.exercise("7.3")
@pytest.mark.hint("Read tag by tag: which begin an entity, which go on with one, which end it?")
def test_f1_of_short_sentences(submission, rng):
    """F1 of a hundred short sentences, each for itself, whatever tags follow each other"""
    pairs = []
    for _ in range(100):
        first = [LETTERS[i] for i in rng.integers(0, 9, int(rng.integers(1, 6)))]
        second = [tag if rng.random() < 0.7 else LETTERS[int(rng.integers(9))] for tag in first]
        pairs.append(([first], [second]))
    submission.agrees(
        lambda of, pairs: torch.stack([f1(of, *pair) for pair in pairs]),
        pairs,
        truth=lambda pairs: torch.tensor(
            [right.Entities().entity_f1(*pair) for pair in pairs], dtype=torch.float64
        ),
    )


@pytest.mark.exercise("7.3")
@pytest.mark.hint(
    "Sentences are counted together: their order, and which side is true, is the same."
)
def test_f1_of_sentences_in_another_order(submission, rng):
    """F1 stays when the sentences change places, and when true and predicted do"""
    true = [right._drawn_tags(rng, int(rng.integers(2, 8)), "OBI", "xy") for _ in range(25)]
    predicted = [
        [tag if rng.random() < 0.7 else LETTERS[int(rng.integers(5))] for tag in tags]
        for tags in true
    ]
    order = rng.permutation(25)
    turned = [[side[i] for i in order] for side in (true, predicted)]

    def scores(of, true, predicted):
        found = [f1(of, *pair) for pair in ((true, predicted), (predicted, true), turned)]
        return torch.stack([*found, f1(of, true, true)])

    one = right.Entities().entity_f1(true, predicted)
    wanted = torch.tensor([one, one, one, 1.0], dtype=torch.float64)
    submission.agrees(scores, true, predicted, truth=lambda *_: wanted)


@pytest.mark.exercise("7.3")
@pytest.mark.hint(
    "Tags that do not belong to the sentence are refused; the message says which sentence."
)
def test_tags_that_do_not_belong(submission, rng):
    """A sentence with a tag more or less is refused by its number, and a sentence too many"""
    tags = [right._drawn_tags(rng, 4, "OBI", "xy") for _ in range(6)]
    assert submission.call("fine_tuning.entity_f1", tags, tags) is not None
    number = int(rng.integers(1, 6))
    for row in ([*tags[number], "O"], tags[number][:-1]):
        with submission.raises(ValueError, number):
            wrong = [row if i == number else one for i, one in enumerate(tags)]
            submission.call("fine_tuning.entity_f1", tags, wrong)
    with submission.raises(ValueError):
        submission.call("fine_tuning.entity_f1", tags, [*tags, ["O"]])


# --- 7.4 answer from a passage ---


@pytest.mark.exercise("7.4")
@pytest.mark.hint("Padding takes no part in the softmax: more of it changes no loss.")
def test_passages_among_others(submission, rng):
    """On a real BERT, a passage has its loss alone and among others, however it is padded"""
    batch = drawn_batch(rng, [8, 5, 11])
    places = {
        "start_positions": torch.tensor([3, 0, 10]),
        "end_positions": torch.tensor([7, 0, 10]),
    }
    padded = {name: F.pad(x, (0, 1)) for name, x in batch.items()}
    real = batch["attention_mask"] == 1

    def outcome(of, state):
        model = headed(of, "SpanClassifier", state)
        found, more = model(**batch, **places), model(**padded, **places)
        losses = [
            model(**alone(batch, row), **{n: x[row : row + 1] for n, x in places.items()})["loss"]
            for row in range(3)
        ]
        ends = [found[name][real] for name in ("start_logits", "end_logits")]
        return found["loss"], more["loss"], losses, ends, slopes(model, batch, **places)

    submission.agrees(outcome, bert_state(rng, qa_outputs=2))


def drawn_windows(rng, count, seq, step=3):
    """Draw logits of windows that overlap, and where their tokens stand in the passage."""
    ends = np.cumsum(rng.integers(2, 7, step * count + seq))
    offsets = []
    for window in range(count):
        tokens = range(window * step, window * step + seq - 3)
        spans = [(int(ends[i]), int(ends[i + 1]) - 1) for i in tokens]
        offsets.append([None, None, *spans, None])
    start = normal(rng, count, seq, scale=3)
    return start, normal(rng, count, seq, scale=3), offsets


def by_hand(start, end, offsets, n_best, most):
    """The best spans, pair by pair."""
    best = {}
    for one, other, spans in zip(start, end, offsets, strict=True):
        for a, b in itertools.product(range(len(spans)), repeat=2):
            if spans[a] is not None and spans[b] is not None and 0 <= b - a < most:
                span = spans[a][0], spans[b][1]
                best[span] = max(best.get(span, one[a] * 0 - math.inf), one[a] + other[b])
    best[0, 0] = (start[:, 0] + end[:, 0]).min()
    ranked = sorted(best, key=lambda span: -float(best[span]))[:n_best]
    return [list(span) for span in ranked], torch.stack([best[span] for span in ranked])


def spans_of(of, start, end, offsets, n_best, most):
    """Call `best_spans`; return places and scores."""
    found = of.call("fine_tuning.best_spans", start, end, offsets, n_best, most)
    places = [[int(first), int(last)] for first, last, _ in found]
    return places, torch.tensor([float(score) for *_, score in found]).to(start)


@pytest.mark.exercise("7.4")
@pytest.mark.hint(
    "Every pair of a first and a last token within a window is a candidate, and no other."
)
def test_spans_pair_by_pair(submission, rng):
    """Against all pairs one by one: few and many, of one token and of any number"""
    for count, n_best, most in ((1, 3, 1), (2, 200, 2), (3, 7, 30), (2, 1, 4)):
        start, end, offsets = drawn_windows(rng, count, int(rng.integers(8, 12)))
        start[:, 0] += float(rng.choice([-6.0, 6.0]))
        submission.agrees(spans_of, start, end, offsets, n_best, most, truth=by_hand)


@pytest.mark.exercise("7.4")
@pytest.mark.hint(
    "Windows are one passage: their order tells nothing, nor does one that is read twice."
)
def test_windows_in_another_order(submission, rng):
    """Windows in another order, and each twice, give the same spans with the same scores"""
    start, end, offsets = drawn_windows(rng, 4, 10)
    order = torch.from_numpy(rng.permutation(4))

    def turned(of, start, end):
        moved = start[order], end[order], [offsets[i] for i in order.tolist()]
        twice = torch.cat([start] * 2), torch.cat([end] * 2), offsets * 2
        return [spans_of(of, *given, 12, 5) for given in (moved, twice)]

    submission.agrees(
        turned, start, end, truth=lambda start, end: [by_hand(start, end, offsets, 12, 5)] * 2
    )


# --- 7.5 the fine-tuning loop ---


def text_model(of, state, dropout=0.0):
    """Make a small classifier of texts."""
    return of.make(f"{HELPER}TextModel", state, dropout)


def tuned(of, model, train, validation, on_epoch=None, **settings):
    """Fine-tune a model, and return the validation losses."""
    chosen = of.make("fine_tuning.FineTuningSettings", **settings)
    return of.call("fine_tuning.fine_tune", model, train, validation, chosen, on_epoch)


def loss_of(of, model, validation):
    """The validation loss of a model that is not changed: an epoch with a rate of 0."""
    return tuned(of, model, validation, validation, epochs=1, learning_rate=0.0)[0]


def labelled(rng, count, classes=3):
    """Draw a batch of texts with labels, for the small model."""
    batch = right.drawn_batch(rng, rng.integers(3, 9, count).tolist())
    return {**batch, "labels": integers(rng, 0, classes, count)}


def text_state(rng, classes=3):
    """Draw the small model's parameters."""
    return right.drawn_reader(rng) | right.drawn_layer(rng, "classifier", classes)


def by_transformers(state, train, validation, settings):
    """The validation losses of Transformers' model, trained by PyTorch's AdamW."""
    import transformers

    with chapter_5.quiet():
        config = transformers.BertConfig(**{**FIELDS, "num_labels": 3})
        model = transformers.BertForSequenceClassification(config)
    names = {n: ours for n, ours in chapter_5.paired_names(2).items() if ours in state}
    given = {n: state[ours] for n, ours in names.items()}
    given |= {n: state[n] for n in ("classifier.weight", "classifier.bias")}
    model.load_state_dict(given)
    model.to(state["classifier.bias"].dtype).eval()
    optimizer = torch.optim.AdamW(groups_by_depth(model, settings))
    rates, losses = [group["lr"] for group in optimizer.param_groups], []
    total = len(train) * settings["epochs"]
    warmup = math.ceil(settings["warmup"] * total)
    for step in range(total):
        factor = np.interp(step, [0, warmup, total], [0, 1, 0])
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        optimizer.zero_grad()
        model(**train[step % len(train)]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
        optimizer.step()
        if (step + 1) % len(train) == 0:
            with torch.no_grad():
                found = [model(**batch).loss * len(batch["labels"]) for batch in validation]
            losses.append(sum(found) / sum(len(batch["labels"]) for batch in validation))
    return torch.stack(losses)


def groups_by_depth(model, settings):
    """A group for each parameter of Transformers' model, by its place in it."""
    groups = []
    for name, parameter in model.named_parameters():
        depth = {"bert.embeddings": 3, "bert.encoder.layer.0": 2, "bert.encoder.layer.1": 1}
        level = next((n for start, n in depth.items() if name.startswith(f"{start}.")), 0)
        spared = name.endswith("bias") or "LayerNorm" in name
        decay = 0.0 if spared else settings["weight_decay"]
        rate = settings["learning_rate"] * settings["layer_decay"] ** level
        groups.append({"params": [parameter], "lr": rate, "weight_decay": decay})
    return groups


@pytest.mark.exercise("7.5")
@pytest.mark.hint(
    "A small BERT learns epoch by epoch as Transformers' model does with PyTorch's AdamW."
)
def test_a_bert_learns_as_the_one_of_transformers(submission, rng):
    """A small BERT has the validation losses of Transformers' model, with a rate for each layer"""
    train = [{**drawn_batch(rng, [7, 5, 9]), "labels": integers(rng, 0, 3, 3)} for _ in range(2)]
    validation = [
        {**drawn_batch(rng, lengths), "labels": integers(rng, 0, 3, len(lengths))}
        for lengths in ([6, 8, 3], [10])
    ]
    settings = {"learning_rate": 2e-3, "weight_decay": 0.2, "epochs": 3, "warmup": 0.3}
    settings |= {"layer_decay": float(rng.uniform(0.4, 0.8)), "max_grad_norm": 1.0}

    def losses(of, state):
        model = headed(of, "SequenceClassifier", state, 3)
        found = tuned(of, model, train, validation, **settings)
        return torch.tensor(found).to(state["classifier.bias"])

    submission.agrees(
        losses,
        bert_state(rng, classifier=3),
        truth=lambda state: by_transformers(state, train, validation, settings),
    )


@pytest.mark.exercise("7.5")
@pytest.mark.hint("What is frozen is, to the last bit, what it was; all else has moved.")
def test_what_is_frozen(submission, rng):
    """With every layer and the embeddings frozen the rest alone moves, and can be trained again"""
    train, state = [labelled(rng, 5)], text_state(rng)
    for layers, embeddings in ((2, True), (1, False), (0, True)):
        settings = {"frozen_layers": layers, "freeze_embeddings": embeddings, "epochs": 1}

        def still(of, settings=settings):
            model = text_model(of, state)
            tuned(
                of,
                model,
                train,
                train,
                weight_decay=0.3,
                warmup=0.0,
                learning_rate=0.05,
                **settings,
            )
            kept = [n for n, x in model.parameters().items() if torch.equal(x, state[n])]
            thawed = [model.get(f"{name}.requires_grad") for name in state]
            return sorted(kept), all(thawed)

        parts = [f"bert.encoder.layers.{i}." for i in range(layers)]
        parts += ["bert.embeddings."] if embeddings else []
        frozen = sorted(name for name in state if name.startswith(tuple(parts)))
        submission.agrees(still, truth=lambda frozen=frozen: (frozen, True))


@pytest.mark.exercise("7.5")
@pytest.mark.hint(
    "A run that only gets worse ends by its patience, with the weights of its best epoch."
)
def test_a_run_that_only_gets_worse(submission, rng):
    """Where validation only gets worse, the run ends by its patience and the first epoch is kept"""
    train = [{**labelled(rng, 6, 2), "labels": torch.ones(6).long()}]
    validation = [{**train[0], "labels": torch.zeros(6).long()}]
    state = text_state(rng, 2)
    state = state | {name: 0.1 * state[name] for name in state if name.startswith("classifier")}
    patience = int(rng.integers(1, 4))
    settings = {"learning_rate": 0.05, "epochs": 9, "warmup": 0.0, "weight_decay": 0.0}

    def run(of):
        model = text_model(of, state)
        losses = tuned(of, model, train, validation, patience=patience, **settings)
        rises = all(a < b for a, b in itertools.pairwise(losses))
        return rises, len(losses), loss_of(of, model, validation) == losses[0]

    submission.agrees(run, truth=lambda: (True, 1 + patience, True))


def interrupted(call):
    """Whether a call was ended by a witness."""
    try:
        call()
    except InterruptedError:
        return True
    return False


@pytest.mark.exercise("7.5")
@pytest.mark.hint(
    "A run that is killed and started again ends with the very numbers of one that was not."
)
def test_stopped_again_and_again(submission, rng):
    """A run with dropout that is stopped after two of its epochs ends as one that was not"""
    train, validation = [labelled(rng, 4), labelled(rng, 3)], [labelled(rng, 5)]
    state, stops = text_state(rng), (int(rng.integers(1, 3)), 1)
    settings = {
        "learning_rate": 0.02,
        "epochs": 5,
        "seed": seed_of(rng),
        "class_weights": (1.0, 2.0, 0.5),
    }

    def run(of, folder, stop):
        model, witness, losses = text_model(of, state, 0.4), of.witness(stop=stop), []
        given = {**settings, "checkpoint": folder.part("run.safetensors")}
        stopped = interrupted(
            lambda: losses.extend(tuned(of, model, train, validation, witness, **given))
        )
        return stopped, losses, model.parameters(), [epoch for epoch, _ in witness.get("calls")]

    def runs(of):
        whole, parts = of.folder(), of.folder()
        stopped = [run(of, parts, stop)[0] for stop in stops]
        end, straight = run(of, parts, 0), run(of, whole, 0)
        same = all(torch.equal(x, straight[2][name]) for name, x in end[2].items())
        return stopped, end[1] == straight[1], len(end[1]), same, end[3][-1], straight[3]

    submission.agrees(runs, truth=lambda: ([True, True], True, 5, True, 5, [1, 2, 3, 4, 5]))


@pytest.mark.exercise("7.5")
@pytest.mark.hint("The seed of the settings decides what dropout draws, and nothing else does.")
def test_the_seed_decides(submission, rng):
    """With dropout the same seed leaves the same model, and another seed another one"""
    train, state, seed = [labelled(rng, 4), labelled(rng, 6)], text_state(rng), seed_of(rng)

    def law(of):
        def left(seed):
            model = text_model(of, state, 0.5)
            tuned(of, model, train, train[:1], learning_rate=0.02, epochs=2, seed=seed)
            return loss_of(of, model, train)

        first, again, other = (left(x) for x in (seed, seed, seed + 1))
        assert first == again, "another model for the same seed"
        assert first != other, "the same model for another seed"

    lawful(submission, law)


@pytest.mark.exercise("7.5")
@pytest.mark.hint(
    "Class weights weigh classes against each other: if all are alike, nothing changes."
)
def test_class_weights_that_are_all_alike(submission, rng):
    """Class weights that are all alike leave the losses as they were, and others do not"""
    train, state = [labelled(rng, 4), labelled(rng, 6)], text_state(rng)
    train = [{**x, "labels": torch.arange(len(x["labels"])) % 3} for x in train]

    def losses(of, state, weights):
        model = text_model(of, state)
        given = {"learning_rate": 0.02, "epochs": 2, "class_weights": weights}
        found = tuned(of, model, train, train[:1], **given)
        return torch.tensor(found).to(state["classifier.bias"])

    reference = submission.truths.reference
    for weights, same in ((2.0, 2.0, 2.0), None), ((0.2, 4.0, 1.0), (0.2, 4.0, 1.0)):
        submission.agrees(
            losses,
            *(state, weights),
            truth=lambda state, _, same=same: losses(reference, state, same),
        )


# --- 7.6 more examples ---


@pytest.mark.exercise("7.6")
@pytest.mark.hint(
    "Probabilities are a text's own, over its classes; each threshold keeps what reaches it."
)
def test_labels_at_many_thresholds(submission, rng):
    """At every threshold from 0 to 1 just the texts that reach it are kept, in their order"""
    texts = [f"text {i}" for i in rng.permutation(30)]
    logits = normal(rng, 30, 4, scale=1.5) + normal(rng, 30, 1, scale=20.0)  # a shift says nothing
    shares = logits.double().softmax(-1).max(-1).values.sort().values
    gaps = shares.diff().topk(6).indices  # a threshold lies in a gap: rounding decides nothing
    thresholds = [0.0, *((shares[gaps] + shares[gaps + 1]) / 2).tolist(), 1.0]

    def kept(of, logits):
        model = of.witness(logits)
        found = [of.call("fine_tuning.pseudo_label", model, texts, t) for t in thresholds]
        asked = {tuple(given) for (given,) in model.get("calls")}
        return [[list(pair) for pair in rows] for rows in found], asked <= {tuple(texts)}

    def wanted(logits):
        shares = logits.double().softmax(-1)
        sure, labels = shares.max(-1)
        rows = list(zip(texts, labels.tolist(), sure.tolist(), strict=True))
        return [[[a, b] for a, b, share in rows if share >= t] for t in thresholds], True

    submission.agrees(kept, logits, truth=wanted)


def example_tokenizer(of, pieces):
    """Make a tokenizer on a small vocabulary."""
    return of.make(f"{HELPER}Pieces", list(pieces))


def augmented(of, text, model, tokenizer, seed, **options):
    """Write a text in other words, with a generator of this seed."""
    drawing = of.make("torch.Generator")
    drawing.call("manual_seed", seed)
    return of.call("fine_tuning.augment", text, model, tokenizer, generator=drawing, **options)


@pytest.mark.exercise("7.6")
@pytest.mark.hint(
    "Everything but the chosen words stays as it is written, white space and case too."
)
def test_all_else_stays(submission, rng):
    """Odd spaces, marks, capitals and longer words stay; each word becomes the likeliest other"""
    pieces = right._example_pieces(rng)
    a, b, c, d = right._sentence(rng, 4)
    text = f" {a.upper()}\t{b}s,\n\n({c.title()})--{d}!  {a}_{b} {c}ing {d} \u00e9t\u00e9 {a}. "

    def written(of, state):
        model = of.make(f"{HELPER}MaskedModel", state, 0.5)
        tokenizer = example_tokenizer(of, pieces)
        found = []
        for train in (True, False):
            model.call("train", train)
            options = {"probability": 1.0, "top_k": 1}
            found.append(augmented(of, text, model, tokenizer, 3, **options))
            found.append(model.get("training"))
        return [*found, augmented(of, text, model, tokenizer, 3, probability=0.0)]

    submission.agrees(written, right._masked_state(rng, pieces))


@pytest.mark.exercise("7.6")
@pytest.mark.hint(
    "Each word is chosen by itself, and becomes one of the top_k by their probabilities."
)
def test_words_by_their_probabilities(submission, rng):
    """Words are chosen as often as asked, and become each of the likeliest by its probability"""
    pieces = right._example_pieces(rng)
    word, *others = right._sentence(rng, 12)
    scores = torch.full((len(pieces),), -8.0)
    for name, score in zip(
        (word, "##s", ",", *others), (9, 8, 7, 3.0, 2.2, 1.8, 1.1), strict=False
    ):
        scores[pieces.index(name)] = score
    state = {name: 0 * x for name, x in right._masked_state(rng, pieces).items()}
    share = float(rng.choice([0.3, 0.7]))
    weights = torch.tensor([3.0, 2.2, 1.8]).double().softmax(0).tolist()

    def law(of):
        model = of.make(f"{HELPER}MaskedModel", {**state, "bias": scores}).load(
            {**state, "bias": scores}
        )
        tokenizer, text = example_tokenizer(of, pieces), " ".join([word] * 20)
        options = {"probability": share, "top_k": 3}
        lines = [augmented(of, text, model, tokenizer, i, **options).split() for i in range(60)]
        assert all(len(line) == 20 for line in lines), "another number of words"
        new = [one for line in lines for one in line if one != word]
        counts = {n: (new.count(n), len(new), w) for n, w in zip(others, weights, strict=False)}
        assert set(new) <= set(counts), "a word that is not among the likeliest"
        counted(chosen=(len(new), 1200, share), **counts)

    lawful(submission, law)


@pytest.mark.exercise("7.6")
@pytest.mark.hint("The generator that is given draws everything, and goes on from call to call.")
def test_the_generator_draws_everything(submission, rng):
    """The same seed writes the same texts; a generator that is used again writes others"""
    pieces, words = right._example_pieces(rng), " ".join([*right._sentence(rng, 8)] * 2)
    state, seed = right._masked_state(rng, pieces), seed_of(rng)

    def law(of):
        model, tokenizer = of.make(f"{HELPER}MaskedModel", state), example_tokenizer(of, pieces)

        def calls():
            drawing = of.make("torch.Generator")
            drawing.call("manual_seed", seed)
            given = {"probability": 0.5, "top_k": 4, "generator": drawing}
            return [of.call("fine_tuning.augment", words, model, tokenizer, **given) for _ in "12"]

        first, again = calls(), calls()
        assert first == again, "another text for the same seed"
        assert first[0] != first[1], "the same draws again"

    lawful(submission, law)


# --- 7.7 why the model decided ---


def impacts_of(of, name, model, tokenizer, text, target=None):
    """Pieces and impacts of a text."""
    found = of.call(f"fine_tuning.{name}", model, tokenizer, text, target)
    return [piece for piece, _ in found], torch.tensor([float(x) for _, x in found])


METHODS = ("occlusion_impact", "gradient_impact")


@pytest.mark.exercise("7.7")
@pytest.mark.hint(
    "The same words on a real BERT, in a text and in a pair, for each of its classes."
)
def test_impacts_on_a_real_bert(submission, rng):
    """On a real BERT, for each class, in a text with a word that comes twice and in a pair"""
    pieces = right._example_pieces(rng)
    a, b, c = right._sentence(rng, 3)
    texts = f"{a} {b}s {a}", (f"{b} {c}", f"{a}.")

    def impacts(of, state):
        model, tokenizer = headed(of, "SequenceClassifier", state, 3), example_tokenizer(of, pieces)
        found = [
            impacts_of(of, name, model, tokenizer, text, target)
            for name in METHODS
            for text in texts
            for target in range(3)
        ]
        kind = state["classifier.bias"]
        return [names for names, _ in found], [x.to(kind) for _, x in found]

    submission.agrees(impacts, bert_state(rng, classifier=3))


def text_and_model(rng, words):
    """Draw pieces, a text and the parameters of a small classifier."""
    pieces = right._example_pieces(rng)
    state = right.drawn_reader(rng, vocab_size=len(pieces))
    state |= right.drawn_layer(rng, "classifier", 3)
    return pieces, " ".join(right._sentence(rng, words)), state


@pytest.mark.exercise("7.7")
@pytest.mark.hint("How fast does the logit grow when one word vector grows, and all else stays?")
def test_gradient_impact_is_a_slope(submission, rng):
    """The gradient's impact is how fast the logit grows as a token's word vector does"""
    pieces, text, state = text_and_model(rng, 5)
    ids = torch.tensor([right._tokenizer(pieces)(text)["input_ids"]])
    target = int(rng.integers(3))

    def slope(state):
        model = right.TextModel(state)
        sizes = torch.ones(ids.shape[1]).to(state["classifier.bias"]).requires_grad_()

        def scaled(module, given, output):
            return output * sizes[None, :, None]

        hook = model.bert.embeddings.word.register_forward_hook(scaled)
        logit = model(ids).logits[0, target]
        hook.remove()
        return torch.autograd.grad(logit, sizes)[0][1:-1]

    def impact(of, state):
        model, tokenizer = text_model(of, state), example_tokenizer(of, pieces)
        given = model, tokenizer, text, target
        return impacts_of(of, "gradient_impact", *given)[1].to(state["classifier.bias"])

    submission.agrees(impact, state, truth=slope)


@pytest.mark.exercise("7.7")
@pytest.mark.hint("Deleted is what never was there: the difference to the text without the word.")
def test_occlusion_is_the_text_without_the_word(submission, rng):
    """What a word did is the model's logit with it, minus that of the text without it"""
    pieces, text, state = text_and_model(rng, 6)
    words, target = text.split(), int(rng.integers(3))

    def without(state):
        model, tokenizer = right.TextModel(state), right._tokenizer(pieces)

        def logit(words):
            ids = tokenizer(" ".join(words))["input_ids"]
            return model(torch.tensor([ids])).logits[0, target].detach()

        shorter = [[*words[:i], *words[i + 1 :]] for i in range(6)]
        return torch.stack([logit(words) - logit(some) for some in shorter])

    def impact(of, state):
        model, tokenizer = text_model(of, state), example_tokenizer(of, pieces)
        given = model, tokenizer, text, target
        return impacts_of(of, "occlusion_impact", *given)[1].to(state["classifier.bias"])

    submission.agrees(impact, state, truth=without)


@pytest.mark.exercise("7.7")
@pytest.mark.hint("Asking why changes nothing: neither mode, nor gradients, nor the next answer.")
def test_asking_changes_nothing(submission, rng):
    """With dropout and in training, asking twice says the same, and no gradient changes"""
    pieces, text, state = text_and_model(rng, 4)
    mark = normal(rng, 3)

    def law(of):
        model, tokenizer = text_model(of, state, 0.5), example_tokenizer(of, pieces)
        for train, name in itertools.product((True, False), METHODS):
            model.call("train", train)
            model.put("classifier.bias.grad", mark)
            first, again = (impacts_of(of, name, model, tokenizer, text) for _ in range(2))
            assert len(first[0]) == 4 and first[0] == again[0], "other pieces"
            assert torch.equal(first[1], again[1]), "another answer to the same question"
            assert model.get("training") is train, "another mode"
            assert torch.equal(model.get("classifier.bias.grad"), mark), "other gradients"
            assert model.get("bert.pooler.weight.grad") is None, "a gradient that was not there"

    lawful(submission, law)


# --- 7.8 clinic ---


@pytest.mark.exercise("7.8")
@pytest.mark.hint(
    "Thawed and known to the optimizer: from then on every parameter moves in each step."
)
def test_thawed_in_the_middle_of_a_run(submission, rng):
    """Thawed in the middle of a run with AdamW, what is new moves, and the rest goes on"""
    state = {"weight": normal(rng, 4, 3), "bias": normal(rng, 4)}
    gradients = [normal(rng, 4, 3) for _ in range(4)], [normal(rng, 4) for _ in range(4)]
    frozen, learned = rng.permutation(["weight", "bias"]).tolist()

    def run(of, weight, bias, *gradients):
        layer = of.make("torch.nn.Linear", 3, 4).load({"weight": weight, "bias": bias}, train=True)
        layer.put(f"{frozen}.requires_grad", False)
        settings = {"lr": 0.5, "weight_decay": 0.3, "betas": (0.6, 0.9)}
        optimizer = of.make("torch.optim.AdamW", [layer.part(learned)], **settings)
        optimizer.put("param_groups.0.lr", 0.05)
        for step, pair in enumerate(zip(*gradients, strict=True)):
            if step == 2:
                of.call("clinic.mend_frozen", layer, optimizer)
            for name, gradient in zip(("weight", "bias"), pair, strict=True):
                if layer.get(f"{name}.requires_grad"):
                    layer.put(f"{name}.grad", gradient)
            optimizer.call("step")
        return layer.parameters(), len(optimizer.get("param_groups"))

    submission.agrees(run, *state.values(), *gradients)


@pytest.mark.exercise("7.8")
@pytest.mark.hint(
    "Count the steps of the run one by one: batches of an epoch, and steps of its batches."
)
def test_steps_counted_one_by_one(submission, rng):
    """The steps of runs of all sizes are those that one counts, batch by batch"""

    def steps_of(epochs, size, accumulated, examples):
        steps = 0
        for _ in range(epochs):
            batches = list(range(0, examples, size))
            steps += len(batches[::accumulated])
        return steps

    for _ in range(12):
        epochs, size, accumulated = (int(x) for x in rng.integers([1, 1, 1], [6, 20, 7]))
        examples, rate = int(rng.integers(1, 120)), float(10 ** rng.uniform(-6, -3))
        settings = {"epochs": epochs, "batch_size": size, "accumulation_steps": accumulated}
        settings |= {
            "learning_rate": rate,
            "warmup_steps": 500,
            "total_steps": 9,
            "layer_decay": 0.9,
        }
        steps = steps_of(epochs, size, accumulated, examples)
        wanted = {
            "total_steps": steps,
            "warmup_steps": -(-steps // 10),
            "learning_rate": float(np.clip(rate, 2e-5, 5e-5)),
        }
        submission.agrees(
            lambda of, *given: dict(sorted(of.call("clinic.mend_schedule", *given).items())),
            *(settings, examples),
            truth=lambda settings, _, wanted=wanted: dict(sorted((settings | wanted).items())),
        )


@pytest.mark.exercise("7.8")
@pytest.mark.hint("With its own tokenizer a model guesses hidden pieces best, whoever comes first.")
def test_the_tokenizer_in_every_place(submission, rng):
    """The model's own tokenizer is found, in whatever order they come, under whatever name"""
    *vocabularies, _ = list(right._vocabulary_cases(rng))
    case = vocabularies[0].inputs
    order = list(case["vocabularies"].values())
    for turn in range(3):
        names = [f"v{i}" for i in rng.permutation(50)[:3]]
        turned = dict(zip(names, order[turn:] + order[:turn], strict=True))
        submission.agrees(lambda of, given: chosen_by(of, given, case), turned)


def chosen_by(of, vocabularies, case):
    """Ask for the tokenizer of a model that was trained on the texts of a case."""
    names = list(case["right"])
    counts, follows = torch.ones(len(names)), torch.ones(len(names), len(names))
    for text in case["texts"]:
        ids = right._tokenizer(tuple(names)).encode(text)
        for before, after in itertools.pairwise(ids):
            counts[after] += 1
            follows[before, after] += 2
    copying = torch.tensor([9.0 if piece in case["copied_well"] else 3.0 for piece in names])
    model = of.make(f"{HELPER}Copier", counts.log(), follows.log(), copying, names.index("[MASK]"))
    model.call("eval")
    tokenizers = {name: example_tokenizer(of, pieces) for name, pieces in vocabularies.items()}
    return of.call("clinic.mend_vocabulary", model, tokenizers, case["texts"])
