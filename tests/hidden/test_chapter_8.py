"""Chapter 8: int8 by their laws, a teacher's gradient, silent heads, files, measured times."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bertlab.course.exercises import chapter_8 as right
from bertlab.course.exercises.support import integers, normal, parameters_like
from bertlab.course.grading.hidden import HELPERS, Part

HELPER = f"{HELPERS}chapter_8."


def lawful(submission, law):
    """Assert that a law holds: a function of the implementation that asserts it."""
    submission.agrees(lambda of: law(of) is None, truth=lambda: True)


def with_part(of, target):
    """Make what the exercise's own probes call: an object that has the part by its name."""
    name = target.split(".")[1]
    return of.make(f"{HELPER}SimpleNamespace", **{name: Part(target)})


def drawn_texts(rng, lengths):
    """Draw a padded batch without labels."""
    return right.texts_of(right.drawn_batch(rng, lengths, max(lengths)))


# --- 8.1 eight bits ---


def quantized(of, weight, *options):
    """Call `quantize_int8`, and look at what types it returns."""
    int8, scale, zero_point = of.call("compression.quantize_int8", weight, *options)
    kinds = [str(x.dtype) for x in (int8, scale, zero_point)]
    assert kinds == ["torch.int8", "torch.float32", "torch.int32"], kinds
    return int8, scale, zero_point


@pytest.mark.exercise("8.1")
@pytest.mark.hint("255 steps from the lowest to the highest number; each number at its nearest.")
def test_half_a_step(submission, rng):
    """No number is further than half a step from its int8, and a range has exactly 255 steps"""
    sizes = torch.from_numpy(10.0 ** rng.uniform(-3, 3, (12, 1))).float()
    weight = normal(rng, 12, 40) * sizes
    weight[:, 0], weight[:, 1] = -sizes[:, 0], 2 * sizes[:, 0]  # so that 0 lies inside
    weight[-1] = torch.tensor([153.5, -101.5] * 20)  # both ends are halves

    def law(of):
        for by_row, low, high in (
            (True, weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)),
            (False, weight.amin()[None, None], weight.amax()[None, None]),
        ):
            int8, scale, zero_point = quantized(of, weight, by_row)
            assert int8.shape == weight.shape and scale.shape == zero_point.shape == low.shape
            assert bool(((high - low) / scale - 255).abs().max() < 1e-3), "another range"
            off = ((int8.int() - zero_point) * scale - weight).abs() / scale
            assert bool(off.max() <= 0.5001), "a number that is not at its nearest step"

    lawful(submission, law)


@pytest.mark.exercise("8.1")
@pytest.mark.hint("0 is one of the 256 numbers of every range, also where a row has one sign.")
def test_zero_is_a_number_of_every_range(submission, rng):
    """Rows above 0, below 0 and of nothing but 0 have a zero point that int8 can be"""
    row = torch.from_numpy(rng.uniform(2, 9, (1, 20))).float()
    weight = torch.cat([row, -row, torch.zeros(1, 20)])

    def law(of):
        int8, scale, zero_point = quantized(of, weight)
        assert zero_point[:2, 0].tolist() == [-128, 127], "0 is not at the end of the range"
        assert -128 <= int(zero_point[2, 0]) <= 127, "a zero point that no int8 is"
        assert float(scale[2, 0]) == 1, "the scale of a range without numbers"
        assert bool((int8[2] == zero_point[2]).all()), "0 does not come back as 0"

    lawful(submission, law)


@pytest.mark.exercise("8.1")
@pytest.mark.hint(
    "With one range a row, other rows do not matter; with one for all, no shape does."
)
def test_a_row_among_others(submission, rng):
    """A row has the int8 that it has alone; with one range for all, the order does not matter"""
    weight = right._off_ties(rng, 6, 10)

    def law(of):
        for whole in (weight, weight.view(2, 3, 10)):
            found = quantized(of, whole)
            alone = [quantized(of, row[None]) for row in weight]
            for together, single in zip(found, zip(*alone, strict=True), strict=True):
                assert torch.equal(together.reshape(6, -1), torch.cat(single)), "another range"
        across, down = (quantized(of, x, False) for x in (weight, weight.T.contiguous()))
        assert torch.equal(across[0], down[0].T), "the order matters"
        assert all(x.numel() == 1 for x in (*across[1:], *down[1:])), "more than one range"

    lawful(submission, law)


@pytest.mark.exercise("8.1")
@pytest.mark.hint("Each token is quantized by itself, so it cannot matter what else is in a batch.")
def test_a_layer_on_tokens_among_others(submission, rng):
    """A layer gives a token the same alone and among others, with one range and with many"""
    state = {"weight": right._off_ties(rng, 1, 60).view(6, 10), "bias": normal(rng, 6)}
    x = right._off_ties(rng, 6, 10).view(2, 3, 10)

    def outputs(of, x, weight, bias):
        linear = of.make("torch.nn.Linear", 10, 6).load({"weight": weight, "bias": bias})
        found = []
        for options in ({}, {"per_channel": False}):
            layer = of.make("compression.Int8Linear", linear, **options)
            found += [layer(x), torch.stack([layer(token) for token in x.view(6, 10)])]
        return found

    submission.agrees(outputs, x, *state.values())


@pytest.mark.exercise("8.1")
@pytest.mark.hint(
    "What is saved is int8, its scales and zero points, and the bias: all as buffers."
)
def test_a_layer_that_is_saved(submission, rng):
    """Filled with another layer's state a layer computes what that one does, from int8 alone"""
    first, second = (
        {"weight": right._off_ties(rng, 6, 10), "bias": normal(rng, 6)} for _ in range(2)
    )
    x = right._off_ties(rng, 4, 10)

    def copied(of, x, *numbers):
        layers = []
        for weight, bias in (numbers[:2], numbers[2:]):
            linear = of.make("torch.nn.Linear", 10, 6).load({"weight": weight, "bias": bias})
            layers.append(of.make("compression.Int8Linear", linear))
        saved = layers[0].make("state_dict")
        layers[1].call("load_state_dict", saved)
        return layers[1](x), sorted(layers[0].parameters()), str(saved.get("weight").dtype)

    submission.agrees(copied, x, *first.values(), *second.values())


# --- 8.2 learn from a teacher ---


def distilled(of, *arguments):
    """Call `distillation_loss`."""
    return of.call("compression.distillation_loss", *arguments)


@pytest.mark.exercise("8.2")
@pytest.mark.hint("The teacher's part pulls by alpha * T * (softmax(s / T) - softmax(t / T)).")
def test_the_gradient_by_its_formula(submission, rng):
    """The student's gradient is that of the formula, at five temperatures; the teacher has none"""
    texts, classes = 5, 4
    labels = integers(rng, 0, classes, texts)
    labels[int(rng.integers(texts))] = -100
    for temperature in (0.7, 1.0, 2.0, 4.0, 8.0):
        alpha = float(rng.uniform(0.3, 0.6))

        def slopes(student, teacher, T=temperature, alpha=alpha):
            soft = (F.softmax(student / T, -1) - F.softmax(teacher / T, -1)) * T / texts
            known = (labels != -100)[:, None]
            single = F.one_hot(labels.clamp(min=0), classes).to(student)
            hard = (F.softmax(student, -1) - single) * known / known.sum()
            return {"0": alpha * soft + (1 - alpha) * hard, "1": torch.zeros_like(teacher)}

        submission.agrees(
            lambda of, *logits, T=temperature, alpha=alpha: of.gradients(
                "compression.distillation_loss", *logits, labels, T, alpha
            ),
            *(normal(rng, texts, classes, scale=2.0) for _ in range(2)),
            truth=slopes,
        )


@pytest.mark.exercise("8.2")
@pytest.mark.hint("A mean over texts: each text by itself, and together they are their mean.")
def test_texts_one_by_one(submission, rng):
    """The loss of a batch is the mean of its texts' losses, with two classes and with many"""
    for classes in (2, 30):
        labels = integers(rng, 0, classes, 4)
        given = labels, float(rng.uniform(1.5, 6)), float(rng.uniform(0.2, 0.4))

        def losses(of, student, teacher, given=given):
            labels, *options = given
            rows = zip(student[:, None], teacher[:, None], labels[:, None], strict=True)
            alone = [distilled(of, *row, *options) for row in rows]
            return torch.stack([torch.stack(alone).mean(), distilled(of, student, teacher, *given)])

        submission.agrees(losses, *(normal(rng, 4, classes, scale=2.0) for _ in range(2)))


@pytest.mark.exercise("8.2")
@pytest.mark.hint("Ends are allowed: alpha 0 and alpha 1; what lies beyond is refused by number.")
def test_what_is_allowed_and_what_is_not(submission, rng):
    """alpha 0 is the labels' part, alpha 1 the teacher's, without labels too; beyond is refused"""
    labels, none = integers(rng, 0, 4, 3), torch.full((3,), -100)

    def ends(of, student, teacher):
        found = [distilled(of, student, teacher, labels, 2.0, alpha) for alpha in (0.0, 1.0)]
        return torch.stack([*found, distilled(of, student, teacher, none, 2.0, 1.0)])

    student, teacher = normal(rng, 3, 4), normal(rng, 3, 4)
    submission.agrees(ends, student, teacher)
    for temperature, alpha in ((-2.5, 0.5), (2.0, -0.25), (2.0, 1.25)):
        wrong = temperature if temperature < 0 else alpha
        with submission.raises(ValueError, wrong):
            distilled(submission, student, teacher, labels, temperature, alpha)


# --- 8.3 prune heads ---

FOUR: dict[str, Any] = {"num_attention_heads": 4}


def small_model(of, state, train=False, **fields):
    """Make a small classifier in the sandbox, with its parameters."""
    return of.make(f"{HELPER}model_of", state, train, **fields)


@pytest.mark.exercise("8.3")
@pytest.mark.hint("A pruned head is a silent one: the output is that with its columns at 0.")
def test_pruned_heads_are_silent(submission, rng):
    """Pruned twice, a model computes what it did with those heads' columns at 0"""
    state, texts = right.drawn_state(rng, **FOUR), drawn_texts(rng, [7, 3, 5])
    first, second = sorted(rng.permutation(4)[:2].tolist())
    other = int(rng.integers(4))

    def pruned(of, state):
        model = small_model(of, state, **FOUR)
        for plan in ({0: [first], 1: [other]}, {0: [second - 1]}):
            of.call("compression.prune_heads", model, plan)
        return of.call(f"{HELPER}_pruned", model, texts)["logits"]

    def silent(state):
        model = right.model_of(state, **FOUR)
        layers = model.bert.encoder.layers
        with torch.no_grad():
            for layer, head in ((0, first), (0, second), (1, other)):
                layers[layer].attention.output.weight[:, 3 * head : 3 * head + 3] = 0
            return model(**texts).logits

    submission.agrees(pruned, state, truth=silent)


@pytest.mark.exercise("8.3")
@pytest.mark.hint("Look at all of a plan before you cut: what is refused leaves the model whole.")
def test_a_plan_that_is_refused(submission, rng):
    """All heads but one may go; a plan that names too much is refused and changes nothing"""
    state, texts = right.drawn_state(rng, **FOUR), drawn_texts(rng, [4, 2])
    left, beyond = int(rng.integers(4)), int(rng.integers(5, 50))

    def outcome(of, state):
        model = small_model(of, state, **FOUR)
        for plan in ({0: [0], 1: [beyond]}, {0: [0], 1: [0, 1, 2, 3]}, {0: [0], beyond: [1]}):
            refused(of, model, plan)
        found = of.call(f"{HELPER}_pruned", model, texts)
        of.call("compression.prune_heads", model, {1: [h for h in range(4) if h != left]})
        return found, of.call(f"{HELPER}_pruned", model, texts)

    submission.agrees(outcome, state)
    for plan in ({0: [0], 1: [beyond]}, {0: [0], beyond: [1]}):
        with submission.raises(ValueError, beyond):
            model = small_model(submission, state, **FOUR)
            submission.call("compression.prune_heads", model, plan)


def refused(of, model, plan):
    """Ask for a pruning that must be refused."""
    try:
        of.call("compression.prune_heads", model, plan)
    except Exception as error:
        if not issubclass(getattr(error, "students_kind", type(error)), ValueError):
            raise
        return
    raise AssertionError("did what must be refused")


@pytest.mark.exercise("8.3")
@pytest.mark.hint(
    "Each text counts once, whatever it is batched with; a layer may have fewer heads."
)
def test_importance_in_other_batches(submission, rng):
    """Importance is the same however texts are batched, and 0 where a head is gone"""
    state = right.drawn_state(rng, **FOUR)
    batch = right.drawn_batch(rng, [6, 3, 5, 4], 6)

    gone = int(rng.integers(4))

    def importances(of, state):
        model, found = small_model(of, state, **FOUR), []
        for plan in ({}, {1: [gone]}):
            of.call("compression.prune_heads", model, plan)
            for cuts in ((4,), (1, 3), (2, 1, 1)):
                parts = zip(*(x.split(cuts) for x in batch.values()), strict=True)
                batches = [dict(zip(batch, part, strict=True)) for part in parts]
                found.append(of.call("compression.head_importance", model, batches))
        return [x.to(state["classifier.bias"]) for x in found]

    submission.agrees(importances, state)


@pytest.mark.exercise("8.3")
@pytest.mark.hint("To look is not to train: mode, gradients and parameters are as they were.")
def test_looking_changes_nothing(submission, rng):
    """Looking at heads leaves mode and gradients, and the next look says the same"""
    state, mark = right.drawn_state(rng), normal(rng, right.LABELS)
    batches = [right.drawn_batch(rng, [5, 3], 5)]

    def law(of):
        model = small_model(of, state)
        for train in (True, False):
            model.call("train", train)
            model.put("classifier.bias.grad", mark)
            first, again = (
                of.call("compression.head_importance", model, batches) for _ in range(2)
            )
            assert torch.equal(first, again), "another answer to the same question"
            assert float(first.min()) >= 0, "an importance below 0"
            assert model.get("training") is train, "another mode"
            assert torch.equal(model.get("classifier.bias.grad"), mark), "other gradients"
            assert model.get("bert.pooler.dense.weight.grad") is None, "a new gradient"

    lawful(submission, law)


# --- 8.4 export to ONNX ---


@pytest.mark.exercise("8.4")
@pytest.mark.hint("Both sizes are free: one token, one text, as long as the model has positions.")
def test_a_file_at_other_shapes(submission, rng):
    """A file reads one token, a text as long as the model may read, and many texts"""
    shapes = ((1, 16), (9, 2), (3, 1), (1, 8))
    batches = [
        right.drawn_batch(rng, [seq, *rng.integers(1, seq + 1, size - 1).tolist()], seq)
        for size, seq in shapes
    ]

    def read(of, state):
        part = with_part(of, "compression.export_onnx")
        return of.call(f"{HELPER}_export_probe", part, state, True, batches)

    submission.agrees(read, right.drawn_state(rng, **right.ONE_LAYER))


@pytest.mark.exercise("8.4")
@pytest.mark.hint("A BERT without a head is a model too, with two outputs, by their names.")
def test_a_bare_bert(submission, rng):
    """A BERT without a head is exported with its two outputs, in training mode or not"""
    batches = [right.drawn_batch(rng, [6, 2, 4], 6)]
    train = bool(rng.integers(2))

    def exported(of, state):
        model = small_model(of, state, train, **right.ONE_LAYER)
        folder, quick = of.folder(), of.make(f"{HELPER}quick_exporter")
        quick.call("__enter__")
        try:
            of.call("compression.export_onnx", model.part("bert"), folder.part("bert.onnx"))
        finally:
            quick.call("__exit__", None, None, None)
        found = of.call(f"{HELPER}_run_file", folder.part("bert.onnx"), batches, "cpu")
        return found | {"training": model.get("bert.training")}

    def computed(state):
        bert = right.model_of(state, **right.ONE_LAYER).bert
        with torch.no_grad():
            last = bert(**right.texts_of(batches[0])).last_hidden_state
        return {
            "inputs": ["input_ids", "attention_mask", "token_type_ids"],
            "outputs": ["last_hidden_state", "pooler_output"],
            "opset": 20,
            "dropout": False,
            "logits 0": last,
            "training": train,
        }

    submission.agrees(exported, right.drawn_state(rng, **right.ONE_LAYER), truth=computed)


# --- 8.5 adapters and LoRA ---


@pytest.mark.exercise("8.5")
@pytest.mark.hint("At the start `up` gives 0, whatever comes: the output is the input, exactly.")
def test_a_new_adapter_does_nothing(submission, rng):
    """A new adapter of any size returns what it is given, and has numbers to begin with"""
    sizes = [(int(hidden), int(inner)) for hidden, inner in rng.integers(2, 20, (3, 2))]
    inputs = [normal(rng, 2, 3, hidden, scale=5.0) for hidden, _ in sizes]

    def outputs(of, *inputs):
        made = [of.make("compression.Adapter", *size) for size in sizes]
        drawn = [bool(adapter.get("down.weight").any()) for adapter in made]
        return [adapter(x) for adapter, x in zip(made, inputs, strict=True)], drawn

    submission.agrees(outputs, *inputs, truth=lambda *inputs: (list(inputs), [True] * 3))


@pytest.mark.exercise("8.5")
@pytest.mark.hint("x + up(gelu(down(x))): both halves learn, and the input hands its gradient on.")
def test_a_filled_adapter_learns(submission, rng):
    """A filled adapter's output and all its gradients are right, for inputs of any shape"""
    filled = parameters_like(right.Adapter(9, 4), rng)

    def outcome(of, filled, *pairs):
        adapter = of.make("compression.Adapter", 9, 4).load(filled, train=True)
        return [
            (adapter(x), adapter.gradients(x, cotangent=cotangent))
            for x, cotangent in zip(pairs[::2], pairs[1::2], strict=True)
        ]

    shapes = [(9,), (9,), (2, 3, 9), (2, 3, 9)]
    submission.agrees(outcome, filled, *(normal(rng, *shape, scale=2.0) for shape in shapes))


@pytest.mark.exercise("8.5")
@pytest.mark.hint("Two adapters a layer, where the contract says; BERT is frozen, the rest learns.")
def test_adapters_in_their_places(submission, rng):
    """Filled adapters change the logits as they must; BERT is frozen, adapters and head are not"""
    texts = drawn_texts(rng, [6, 4])
    fields: dict[str, Any] = {"num_hidden_layers": 3}
    state = right.drawn_state(rng, **fields)
    filled = parameters_like(right.Adapter(right.SIZES["hidden_size"], 5), rng)
    places = [f"{n}.{part}" for n in range(3) for part in ("attention.output", "feed_forward.down")]

    def logits(of, state, filled):
        model = small_model(of, state, **fields)
        adapted = of.make("compression.add_adapters", model, 5)
        flags = [adapted.is_same(model)]
        for place in places:
            home = f"bert.encoder.layers.{place}"
            model.part(f"{home}.1").load(filled)
            names = ("0.weight", "0.bias", "1.up.weight", "1.down.bias")
            flags += [model.get(f"{home}.{name}.requires_grad") for name in names]
        names = ("bert.embeddings.word.weight", "bert.pooler.dense.bias", "classifier.weight")
        flags += [model.get(f"{name}.requires_grad") for name in names]
        return model.make("", **texts).get("logits"), flags

    submission.agrees(logits, state, filled)


def lora_layer(of, state, lora, alpha):
    """Make a `LoRALinear` whose matrices are trained."""
    rows, columns = state["weight"].shape
    linear = of.make("torch.nn.Linear", columns, rows).load(state)
    layer = of.make("compression.LoRALinear", linear, lora["lora_a"].shape[0], alpha)
    return layer.load({**{f"linear.{name}": x for name, x in state.items()}, **lora})


@pytest.mark.exercise("8.5")
@pytest.mark.hint("Merged is W + alpha / rank * B @ A, in a new layer; the old one stays.")
def test_lora_by_its_formula(submission, rng):
    """What LoRA adds, and what merging gives, twice, is the formula's, for four ranks"""
    for rank in (1, 2, 5, 8):
        alpha = float(rng.integers(9, 30))
        state = {"weight": normal(rng, 6, 9, scale=0.3), "bias": normal(rng, 6)}
        lora = {"lora_a": normal(rng, rank, 9), "lora_b": normal(rng, 6, rank)}

        def outputs(of, x, state, lora, alpha=alpha):
            layer = lora_layer(of, state, lora, alpha)
            merged = [layer.make("merge") for _ in range(2)]
            found = [plain(x) for plain in merged] + [layer(x)]
            return found, merged[0].get("weight"), sorted(merged[0].parameters())

        def formula(x, state, lora, scale=alpha / rank):
            weight = state["weight"] + scale * lora["lora_b"] @ lora["lora_a"]
            return [F.linear(x, weight, state["bias"])] * 3, weight, ["bias", "weight"]

        submission.agrees(outputs, normal(rng, 2, 3, 9), state, lora, truth=formula)


@pytest.mark.exercise("8.5")
@pytest.mark.hint(
    "One matrix is drawn and one is 0: the layer computes what it did, and can learn."
)
def test_a_new_lora_layer(submission, rng):
    """A new LoRA layer computes what the frozen layer does, and only one of its matrices is 0"""
    state = {"weight": normal(rng, 6, 9), "bias": normal(rng, 6)}

    def begun(of, x, weight, bias):
        linear = of.make("torch.nn.Linear", 9, 6).load({"weight": weight, "bias": bias})
        layer = of.make("compression.LoRALinear", linear, 3)
        names = ("linear.weight", "linear.bias", "lora_a", "lora_b")
        learns = [layer.get(f"{name}.requires_grad") for name in names]
        return layer(x), learns, [bool(layer.get(name).any()) for name in names[2:]]

    submission.agrees(
        begun,
        *(normal(rng, 4, 9), *state.values()),
        truth=lambda x, *own: (F.linear(x, *own), [False, False, True, True], [True, False]),
    )


# --- 8.6 compare ---


def timed_batches(rng, sizes):
    """Draw batches whose labels say nothing."""
    return [right.drawn_batch(rng, rng.integers(1, 6, size).tolist(), 5) for size in sizes]


@pytest.mark.exercise("8.6")
@pytest.mark.hint("A call's usual time in milliseconds, and right texts among all texts.")
def test_a_known_clock(submission, rng):
    """On a clock that is known, latencies are those of a usual call; accuracy is of all texts"""
    batches, table = timed_batches(rng, [1, 2, 9, 4]), normal(rng, 31, right.LABELS)
    one, more = int(rng.integers(100, 300)), int(rng.integers(5, 30))

    def row(of, table):
        part = with_part(of, "compression.compare")
        found = of.call(f"{HELPER}_compare_probe", part, table, batches, one, more, True)
        fields = ("latency_1_ms", "latency_32_ms", "accuracy")
        return [found[f"first: {name}"] for name in fields], found["mode"]

    def known(table):
        first = torch.cat([batch["input_ids"][:, 0] for batch in batches])
        labels = torch.cat([batch["labels"] for batch in batches])
        hits = (table[first].argmax(dim=-1) == labels).double().mean().item()
        return [float(one), float(one + 31 * more), round(hits, 6)], "training"

    submission.agrees(row, table, truth=known)


@pytest.mark.exercise("8.6")
@pytest.mark.hint("A module and a file side by side: both are measured alike, without labels.")
def test_a_file_beside_a_module(submission, rng):
    """A module in training and a file are measured alike, from batches of one text and of many"""
    table, file = normal(rng, 31, right.LABELS), int(rng.integers(100, 900))

    def rows(of, table):
        part, found = with_part(of, "compression.compare"), []
        for batches in two_lists:
            given = table, batches, 30, 7, True, file
            found.append(of.call(f"{HELPER}_compare_probe", part, *given))
        return found

    two_lists = [timed_batches(rng, sizes) for sizes in ([1, 1, 7], [40])]
    submission.agrees(rows, table)


# --- 8.7 prepare for inference ---


@pytest.mark.exercise("8.7")
@pytest.mark.hint("Prepared, a model says of every batch what it said: padded, full, one token.")
def test_the_same_numbers_for_every_batch(submission, rng):
    """For padded, full and tiny batches a prepared model says the same, and reads no padding"""
    state = right.drawn_state(rng, **right.ONE_LAYER)

    def found(of, state):
        part = with_part(of, "compression.prepare_for_inference")
        return [of.call(f"{HELPER}_prepare_probe", part, state, batch) for batch in batches]

    batches = [drawn_texts(rng, lengths) for lengths in ([16, 1, 9], [5, 5, 5, 5], [1])]
    submission.agrees(found, state)


@pytest.mark.exercise("8.7")
@pytest.mark.hint(
    "Prepared is a copy in the same memory: the model it came from goes on as it was."
)
def test_the_model_goes_on(submission, rng):
    """A model can be prepared twice and trained on; the copies see its tables, and do not train"""
    state, later = (right.drawn_state(rng, **right.ONE_LAYER) for _ in range(2))
    table = "bert.embeddings.word.weight"

    def law(of):
        model = small_model(of, state, **right.ONE_LAYER)
        copies = [of.make("compression.prepare_for_inference", model) for _ in range(2)]
        model.load(later, train=True)
        assert model.get(f"{table}.requires_grad") is True, "the model is frozen"
        for copy in copies:
            assert not copy.is_same(model), "the same object"
            assert torch.equal(copy.get(table), later[table]), "memory of its own"
            assert copy.get(f"{table}.requires_grad") is False, "can be trained"
            assert copy.get("training") is False, "in training mode"
            assert len(copy.get("picked")) == 4, "does not say what was picked"

    lawful(submission, law)


@pytest.mark.exercise("8.7")
@pytest.mark.hint("Three things are refused, each by its name; a model in eval mode is prepared.")
def test_what_is_not_prepared(submission, rng):
    """A model in training, another precision and a prepared model are refused; bf16 is taken"""
    state = right.drawn_state(rng, **right.ONE_LAYER)

    def law(of):
        model, prepare = small_model(of, state, **right.ONE_LAYER), "prepare_for_inference"
        made = of.make(f"compression.{prepare}", model, "bf16")
        for precision in ("int8", "float16"):
            with of.raises(ValueError, precision):
                of.make(f"compression.{prepare}", model, precision)
        with of.raises(ValueError):
            of.make(f"compression.{prepare}", made)
        model.call("train")
        with of.raises(ValueError, "training"):
            of.make(f"compression.{prepare}", model)

    lawful(submission, law)


# --- 8.8 clinic ---

TABLE, DECODER = right._TABLE, right._DECODER


@pytest.mark.exercise("8.8")
@pytest.mark.hint("The table is right; the rest follows it, for any number of new words.")
def test_a_checkpoint_mended_twice(submission, rng):
    """Mended once or twice, a checkpoint is the same, with one name of the bias, two or none"""
    for names in ((), right._BIASES[1:], right._BIASES):
        old, new = int(rng.integers(3, 9)), int(rng.integers(0, 5))
        tensors = {
            TABLE: normal(rng, old + new, 4),
            DECODER: normal(rng, old, 4),
            "bert.pooler.dense.weight": normal(rng, 4, 4),
            **{name: normal(rng, old) for name in names},
        }

        def mended(of, tensors):
            once = of.call("clinic.mend_checkpoint", tensors)
            twice = of.call("clinic.mend_checkpoint", dict(once))
            return [dict(sorted(found.items())) for found in (once, twice)]

        def wanted(tensors, names=names, new=new):
            filled = {name: torch.cat([tensors[name], torch.zeros(new)]) for name in names}
            return [dict(sorted({**tensors, **filled, DECODER: tensors[TABLE]}.items()))] * 2

        submission.agrees(mended, tensors, truth=wanted)


@pytest.mark.exercise("8.8")
@pytest.mark.hint("Only where both signs are seen do the two change places, and then only once.")
def test_vocabularies_of_all_kinds(submission, rng):
    """Wherever the two stand and whatever is 0, they change places when both signs are seen"""
    words = [f"w{i}" for i in range(5)]
    for number in range(12):
        vocab = [str(piece) for piece in rng.permutation([*words, "[PAD]", "[UNK]"])]
        pad, unk = vocab.index("[PAD]"), vocab.index("[UNK]")
        unknown = (pad, unk, int(rng.integers(7)))[number % 3]
        table = normal(rng, 7, 3)
        table[(pad, unk)[number // 3 % 2]] = 0
        swapped = unk != unknown and not table[unk].any()
        other = {"[PAD]": "[UNK]", "[UNK]": "[PAD]"} if swapped else {}
        submission.agrees(
            lambda of, *given: of.call("clinic.mend_special_tokens", *given),
            *(vocab, unknown, table),
            truth=lambda vocab, *_, other=other: [other.get(piece, piece) for piece in vocab],
        )
