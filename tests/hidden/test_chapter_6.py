"""Chapter 6: laws of masking and of pairs, an optimizer by its formulas, loops that are stopped.

Where a part draws at random, its counts are judged by `right.as_asked`: an exact binomial test
that refuses a right part in 1 of 100,000,000 counts. No exercise has more than 60 counts here.
"""

import numpy as np
import pytest
import torch

from bertlab.course.exercises import chapter_5
from bertlab.course.exercises import chapter_6 as right
from bertlab.course.exercises.support import integers, normal
from bertlab.course.grading.hidden import HELPERS, Config

FIELDS = {**chapter_5.SIZES, "num_hidden_layers": 2}


def pieces_of(of, names):
    """Make a tokenizer that knows these pieces, and splits at spaces."""
    return of.make(f"{HELPERS}chapter_6.Pieces", names)


def pretraining_model(of, state):
    """Make a small BERT for pretraining, with its parameters."""
    return of.make("heads.BertForPreTraining", Config(FIELDS)).load(state)


def weights(rng):
    """Draw the parameters of a small BERT for pretraining, a tied one once."""
    state = chapter_5.in_our_names(chapter_5.drawn(rng, FIELDS), FIELDS)
    return {name: value for name, value in state.items() if name != "mlm_head.decoder.weight"}


def lawful(submission, law):
    """Assert that a law holds: a function of the implementation that asserts it."""
    submission.agrees(lambda of: law(of) is None, truth=lambda: True)


# --- 6.1 mask tokens ---


def generator(of, seed):
    """Make a generator of random numbers in the sandbox."""
    made = of.make("torch.Generator")
    made.call("manual_seed", seed)
    return made


def masked(of, names, ids, seed, **options):
    """Mask ids with a generator of this seed."""
    given = {"generator": generator(of, seed), **options}
    found = of.call("pretraining.mask_tokens", ids, pieces_of(of, names), **given)
    inputs, labels = found
    assert inputs.shape == labels.shape == ids.shape, "has another shape"
    return inputs, labels


def seed_of(rng):
    """Draw a seed."""
    return int(rng.integers(2**31))


def counted(**counts):
    """Assert that each count of so many draws fits its share: `(count, draws, share)`."""
    said = {name: right.as_asked(*given) for name, given in counts.items()}
    assert set(said.values()) == {"as asked"}, {n: s for n, s in said.items() if s != "as asked"}


@pytest.mark.exercise("6.1")
@pytest.mark.hint("Each token has a draw of its own: that its neighbor is chosen says nothing.")
def test_tokens_are_chosen_one_by_one(submission, rng):
    """Neighbors in a text, and the same places of two texts, are chosen independently"""
    names, share = right.vocabulary(rng, 20), float(rng.choice([0.4, 0.5, 0.6]))
    words = [i for i, name in enumerate(names) if name not in right.SPECIAL]
    ids = torch.from_numpy(rng.choice(words, (4000, 8)))

    def law(of):
        _, labels = masked(of, names, ids, seed_of(rng), probability=share)
        chosen = labels != -100
        beside, below = chosen[:, ::2] & chosen[:, 1::2], chosen[::2] & chosen[1::2]
        counted(
            chosen=(chosen.sum(), chosen.numel(), share),
            both_neighbors=(beside.sum(), beside.numel(), share**2),
            both_texts=(below.sum(), below.numel(), share**2),
        )

    lawful(submission, law)


@pytest.mark.exercise("6.1")
@pytest.mark.hint("A piece drawn at random is any of the vocabulary, each as likely as the others.")
def test_every_piece_may_come(submission, rng):
    """Of the pieces that are put in, each of the vocabulary comes as often as any other"""
    names = right.vocabulary(rng, 25)
    word, mask = names.index(f"w{rng.integers(25)}"), names.index("[MASK]")
    ids = torch.full((300, 200), word)

    def law(of):
        inputs, labels = masked(of, names, ids, seed_of(rng), probability=1.0)
        assert bool((labels == word).all()), "a label is not what stood there"
        share, counts = 0.1 / len(names), {}
        for piece, name in enumerate(names):
            kept = {mask: 0.8, word: 0.1}.get(piece, 0.0)
            counts[name] = (inputs == piece).sum(), inputs.numel(), kept + share
        counted(**counts)

    lawful(submission, law)


@pytest.mark.exercise("6.1")
@pytest.mark.hint("A word has one draw, whether it has one piece or five.")
def test_long_words_are_chosen_as_often_as_short_ones(submission, rng):
    """With whole words, a word of five pieces is chosen as often as one of one, and wholly"""
    names, share = right.vocabulary(rng, 20, 20), float(rng.choice([0.2, 0.3]))
    row = ["[CLS]"]
    for length in (1, 2, 3, 5):
        row += [f"w{length}", *(f"##c{i}" for i in rng.integers(0, 20, length - 1))]
    ids = torch.tensor([[names.index(name) for name in [*row, "[SEP]", "[PAD]"]]] * 1500)
    given = {"probability": share, "whole_word": True}

    def law(of):
        _, labels = masked(of, names, ids, seed_of(rng), **given)
        words = (labels[:, 1:12] != -100).split([1, 2, 3, 5], dim=1)
        assert all(bool((word.all(1) == word.any(1)).all()) for word in words), "a part of a word"
        assert bool((labels[:, [0, 12, 13]] == -100).all()), "a special token"
        counted(**{f"of {w.shape[1]}": (w.all(1).sum(), 1500, share) for w in words})

    lawful(submission, law)


@pytest.mark.exercise("6.1")
@pytest.mark.hint("With probability 0 nothing is chosen, with 1 everything but special tokens.")
def test_nothing_and_everything(submission, rng):
    """With probability 0 nothing changes, with 1 every token but the special ones has a label"""
    names = right.vocabulary(rng, 12, 4)
    ids, numbers = right._texts(rng, names, 6, 25, 9)

    def law(of):
        for whole in (False, True):
            for share in (0.0, 1.0):
                given = {"probability": share, "whole_word": whole}
                inputs, labels = masked(of, names, ids, seed_of(rng), **given)
                chosen = (numbers >= 0) & (share == 1)
                assert torch.equal(labels, torch.where(chosen, ids, -100)), "other labels"
                assert torch.equal(inputs[~chosen], ids[~chosen]), "changed what was not chosen"

    lawful(submission, law)


@pytest.mark.exercise("6.1")
@pytest.mark.hint(
    "All draws come from the generator that is given, which goes on from call to call."
)
def test_the_generator_goes_on(submission, rng):
    """A generator goes on from call to call, and the same seed gives the same calls again"""
    names, ids, seed = right.vocabulary(rng, 30), integers(rng, 0, 35, 20, 30), seed_of(rng)

    def law(of):
        def calls():
            made, tokenizer = generator(of, seed), pieces_of(of, names)
            given = {"generator": made, "whole_word": bool(seed % 2)}
            found = [of.call("pretraining.mask_tokens", ids, tokenizer, **given) for _ in range(3)]
            return [[x.tolist() for x in pair] for pair in found]

        first, again = calls(), calls()
        assert first == again, "another result for the same seed"
        assert first[0] != first[1] != first[2], "the same draws again"

    lawful(submission, law)


# --- 6.2 pairs of sentences ---


def pairs_of(of, documents, names, most, seed):
    """Make pairs in the sandbox."""
    drawing = of.make("random.Random", seed)
    return of.call("pretraining.sentence_pairs", documents, pieces_of(of, names), most, drawing)


def numbered(sizes):
    """Documents of so many sentences of one word each, and the pieces of a tokenizer for them."""
    words = iter(f"w{i}" for i in range(sum(sizes)))
    documents = [[next(words) for _ in range(size)] for size in sizes]
    return documents, [*right.SPECIAL, *(f"w{i}" for i in range(sum(sizes)))]


@pytest.mark.exercise("6.2")
@pytest.mark.hint(
    "First draw one of the other documents, each as likely; then one of its sentences."
)
def test_short_documents_are_drawn_as_often_as_long_ones(submission, rng):
    """A wrong sentence comes from each other document alike, whatever its length"""
    sizes = [2500, 1, 2, 5]
    documents, names = numbered(sizes)

    def law(of):
        rows = pairs_of(of, documents, names, 8, seed_of(rng))
        home = np.repeat(np.arange(4), sizes)
        ids = np.array([row["input_ids"] for row in rows])
        first, second = ids[:, 1] - len(right.SPECIAL), ids[:, 3] - len(right.SPECIAL)
        wrong = np.array([row["next_sentence_label"] for row in rows]) == 1
        wrong, long = wrong & (home[first] == 0), home[first] == 0
        assert long.sum() == sizes[0] - 1, "not every sentence with a next one begins a pair"
        counts = {
            f"sentence {i}": ((second[wrong] == i).sum(), wrong.sum(), 1 / 3 / sizes[home[i]])
            for i in range(sizes[0], sum(sizes))
        }
        counted(wrong=(wrong.sum(), long.sum(), 0.5), **counts)

    lawful(submission, law)


@pytest.mark.exercise("6.2")
@pytest.mark.hint("Each pair is what the tokenizer makes of its two texts, cut to max_length.")
def test_pairs_are_what_the_tokenizer_makes_of_them(submission, rng):
    """Each pair is what the tokenizer makes of A and B, cut to the length, unpadded"""
    sizes = [rng.integers(1, 12, count).tolist() for count in (6, 1, 4, 3)]
    words = [[f"w{d}x{i}" for i in range(11)] for d in range(len(sizes))]
    documents = [
        [" ".join(own[:size]) for size in document]
        for own, document in zip(words, sizes, strict=True)
    ]
    names = [*right.SPECIAL, *(word for own in words for word in own)]
    tokenizer, most = right.Pieces(names), int(rng.integers(7, 16))

    def law(of):
        rows = pairs_of(of, documents, names, most, seed_of(rng))
        firsts = [(d, i) for d, document in enumerate(documents) for i in range(len(document) - 1)]
        assert len(rows) == len(firsts), "not a pair for each sentence with a next one"
        for row, (d, i) in zip(rows, firsts, strict=True):
            follows = row["next_sentence_label"] == 0
            others = [text for e, other in enumerate(documents) if e != d for text in other]
            seconds = [documents[d][i + 1]] if follows else others
            made = [tokenizer(documents[d][i], second, max_length=most) for second in seconds]
            assert {n: x for n, x in row.items() if n != "next_sentence_label"} in made, row

    lawful(submission, law)


@pytest.mark.exercise("6.2")
@pytest.mark.hint("Every draw comes from rng, so the same state of it makes the same pairs.")
def test_rng_goes_on(submission, rng):
    """The same seed makes the same pairs, and the same generator goes on to others"""
    documents, names = numbered([20, 15, 0, 25])
    seed = seed_of(rng)

    def law(of):
        def calls():
            drawing = of.make("random.Random", seed)
            given = documents, pieces_of(of, names), 8, drawing
            return [of.call("pretraining.sentence_pairs", *given) for _ in range(2)]

        first, again = calls(), calls()
        assert first == again, "other pairs for the same seed"
        assert first[0] != first[1], "the same pairs in the next round"

    lawful(submission, law)


# --- 6.3 warm-up and decay ---


@pytest.mark.exercise("6.3")
@pytest.mark.hint("Two straight lines: from 0 up to 1 at the end of the warm-up, and down to 0.")
def test_two_straight_lines(submission, rng):
    """At every step of short runs it lies on the two lines, and stays at 0 afterwards"""
    for total in (1, 2, 3, int(rng.integers(5, 30))):
        for warmup in {0, 1, total // 2, total - 1}:
            steps = range(total + 3)
            submission.agrees(
                lambda of, steps, warmup, total: torch.tensor(
                    [of.call("pretraining.warmup_linear", s, warmup, total) for s in steps],
                    dtype=torch.float64,
                ),
                *(list(steps), warmup, total),
                truth=lambda steps, warmup, total: torch.from_numpy(
                    np.interp(steps, [-1, 0, warmup, total], [0, warmup == 0, 1, 0])
                ),
            )


@pytest.mark.exercise("6.3")
@pytest.mark.hint(
    "The way down is the way up, read backwards: neither is curved, and none is longer."
)
def test_the_way_down_is_the_way_up(submission, rng):
    """The schedule read backwards is the one whose warm-up is as long as this one's decay"""
    total = int(rng.integers(10, 60))
    warmup = int(rng.integers(1, total))

    def law(of):
        for step in {0, 1, warmup, total - 1, total, *rng.integers(0, total, 12).tolist()}:
            there = of.call("pretraining.warmup_linear", step, warmup, total)
            back = of.call("pretraining.warmup_linear", total - step, total - warmup, total)
            assert isinstance(there, (int, float)) and isinstance(back, (int, float)), "no number"
            assert abs(there - back) < 1e-12 and 0 <= there <= 1, (step, there, back)

    lawful(submission, law)


# --- 6.4 AdamW ---


def linear(of, state):
    """Make a linear layer with these parameters."""
    rows, columns = state["weight"].shape
    return of.make("torch.nn.Linear", columns, rows).load(state, train=True)


def give(layer, **gradients):
    """Give a layer's parameters their gradients."""
    for name, gradient in gradients.items():
        layer.put(f"{name}.grad", gradient)


def adamw(of, layer, **settings):
    """Make an optimizer of a layer's weight and bias."""
    return of.make("pretraining.AdamW", [layer.part("weight"), layer.part("bias")], **settings)


def drawn_linear(rng):
    """Draw the parameters of a linear layer."""
    return {"weight": normal(rng, 4, 3), "bias": normal(rng, 4)}


@pytest.mark.exercise("6.4")
@pytest.mark.hint("In the first step m and v are corrected to g and g²: the step is lr * sign(g).")
def test_the_first_step_has_the_size_of_the_rate(submission, rng):
    """The first step is as long as the rate, for gradients of every size"""
    signs = torch.from_numpy(rng.choice([-1.0, 1.0], (4, 3))).float()
    gradient = signs * 10 ** torch.from_numpy(rng.uniform(-7, 5, (4, 3))).float()

    def step(of, weight, bias, gradient):
        layer = linear(of, {"weight": weight, "bias": bias})
        optimizer = adamw(of, layer, lr=0.25, weight_decay=0.0)
        give(layer, weight=gradient)
        optimizer.call("step")
        return layer.parameters()

    submission.agrees(
        step,
        *drawn_linear(rng).values(),
        gradient,
        truth=lambda weight, bias, g: {
            "weight": weight - 0.25 * g / (g.abs() + 1e-8),
            "bias": bias,
        },
    )


@pytest.mark.exercise("6.4")
@pytest.mark.hint(
    "Decay is beside the gradient: where that is 0, a weight shrinks by lr * weight_decay."
)
def test_without_a_gradient_only_decay_is_left(submission, rng):
    """With gradients of 0 a weight shrinks by rate times decay in each step, as the rate changes"""
    rates, decay = [float(x) for x in rng.uniform(0.01, 0.3, 5)], float(rng.uniform(0.2, 0.9))

    def shrunk(of, weight, bias):
        layer = linear(of, {"weight": weight, "bias": bias})
        optimizer = adamw(of, layer, lr=1.0, weight_decay=decay)
        for rate in rates:
            optimizer.put("param_groups.0.lr", rate)
            give(layer, weight=0 * weight)
            optimizer.call("step")
        return layer.parameters()

    factor = float(np.prod([1 - rate * decay for rate in rates]))
    submission.agrees(
        shrunk,
        *drawn_linear(rng).values(),
        truth=lambda weight, bias: {"weight": weight * factor, "bias": bias},
    )


@pytest.mark.exercise("6.4")
@pytest.mark.hint("Each parameter counts its own steps, and each group has its own settings.")
def test_a_group_that_comes_later(submission, rng):
    """A group that is added later begins with its first step and has its own settings"""
    gradients = [normal(rng, 4, 3) for _ in range(5)], [normal(rng, 4) for _ in range(5)]
    own = {"lr": 0.3, "betas": (0.5, 0.8), "weight_decay": 0.4}

    def trained(of, weight, bias, of_weight, of_bias):
        layer = linear(of, {"weight": weight, "bias": bias})
        optimizer = of.make("pretraining.AdamW", [layer.part("weight")], lr=0.1, eps=1e-3)
        for number, pair in enumerate(zip(of_weight, of_bias, strict=True)):
            if number == 3:
                optimizer.call("add_param_group", {"params": [layer.part("bias")], **own})
            give(layer, weight=pair[0], bias=pair[1])
            optimizer.call("step")
        return layer.parameters()

    submission.agrees(trained, *drawn_linear(rng).values(), *gradients)


@pytest.mark.exercise("6.4")
@pytest.mark.hint(
    "What an optimizer remembers is in its state_dict: a copy goes on as the first one."
)
def test_a_copy_goes_on_alike(submission, rng):
    """An optimizer that is filled with another's state goes on as that one does"""
    gradients = [normal(rng, 4, 3) for _ in range(6)]

    def trained(of, weight, bias, gradients):
        layers = [linear(of, {"weight": weight, "bias": bias}) for _ in range(2)]
        first = adamw(of, layers[0], lr=0.05, betas=(0.8, 0.9))
        for gradient in gradients[:3]:
            give(layers[0], weight=gradient)
            first.call("step")
        second = adamw(of, layers[1].load(layers[0].parameters(), train=True), lr=9.0)
        second.call("load_state_dict", first.call("state_dict"))
        for gradient in gradients[3:]:
            for layer, optimizer in zip(layers, (first, second), strict=True):
                give(layer, weight=gradient)
                optimizer.call("step")
        return [layer.parameters() for layer in layers]

    submission.agrees(trained, *drawn_linear(rng).values(), gradients)


@pytest.mark.exercise("6.4")
@pytest.mark.hint(
    "In a BERT too: no decay for biases and norms, a tied weight once, frozen ones never."
)
def test_the_groups_of_a_real_model(submission, rng):
    """The groups of a BERT have its parameters once, told by the numbers in them"""
    frozen = [f"bert.encoder.layers.{int(rng.integers(2))}.feed_forward.up.weight"]

    def groups(of, state):
        model = pretraining_model(of, state)
        for name in [*frozen, "bert.embeddings.token_type.weight"]:
            model.put(f"{name}.requires_grad", False)
        found = of.call("pretraining.parameter_groups", model, 0.25)
        sums = [sorted(float(p.double().sum()) for p in group["params"]) for group in found]
        decays = [group["weight_decay"] for group in found]
        return [torch.tensor(x, dtype=torch.float64) for x in (*sums, decays)]

    submission.agrees(groups, weights(rng))


# --- 6.5 the training loop ---


def guesser(of, state, dropout=0.0):
    """Make a small model that guesses words and pairs."""
    return of.make(f"{HELPERS}chapter_6.Guesser", state, dropout)


def trained(of, model, data, on_step=None, **settings):
    """Train a model, and return the losses."""
    chosen = of.make("pretraining.PretrainingSettings", **settings)
    return of.call("pretraining.pretrain", model, data, chosen, on_step)


def loss_of(of, model, batch):
    """The loss of a model that is not changed: a step with a rate of 0."""
    return trained(of, model, [batch], total_steps=1, learning_rate=0.0)[0]


def cut(batch, sizes):
    """Cut a batch into micro-batches, each without the columns that are padding in it."""
    parts = []
    for rows in torch.arange(sum(sizes)).split(sizes):
        most = int(batch["attention_mask"][rows].sum(1).max())
        parts.append({n: x[rows, :most] if x.ndim == 2 else x[rows] for n, x in batch.items()})
    return parts


@pytest.mark.exercise("6.5")
@pytest.mark.hint(
    "Texts that make one step teach the same, in however many micro-batches they come."
)
def test_however_a_batch_is_cut(submission, rng):
    """Six texts with pairs teach the same in one batch, in two and in three, of unequal sizes"""
    batch = right._micro_batch(rng, [7, 3, 5, 6, 2, 4], 11, pairs=True)
    settings = {"total_steps": 3, "learning_rate": 0.02, "max_grad_norm": 0.5, "warmup_steps": 1}

    def losses(of, state):
        found = []
        for sizes in ([6], [1, 5], [2, 3, 1]):
            model, data = guesser(of, state), cut(batch, sizes)
            given = {**settings, "accumulation_steps": len(sizes)}
            found += [*trained(of, model, data, **given), loss_of(of, model, batch)]
        return torch.tensor(found).to(state["words"])

    submission.agrees(losses, right._guesser_state(rng))


def by_transformers(state, batches, rate, steps):
    """The losses of Transformers' model, trained by PyTorch's AdamW on whole batches."""
    import transformers

    names = chapter_5.paired_names(FIELDS["num_hidden_layers"])
    tied = {"mlm_head.decoder.weight": state["bert.embeddings.word.weight"]}
    with chapter_5.quiet():
        model = transformers.BertForPreTraining(transformers.BertConfig(**FIELDS))
    model.load_state_dict({n: (state | tied)[ours] for n, ours in names.items()}, strict=False)
    model.to(state["nsp_head.classifier.bias"].dtype).eval()
    optimizer = torch.optim.AdamW(right.transformers_groups(model, 0.1), lr=rate)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * right.transformers_schedule(step, 2, steps)
        loss = model(**batches[step % len(batches)]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.exercise("6.5")
@pytest.mark.hint(
    "A small BERT trains step by step as Transformers' model does with PyTorch's AdamW."
)
def test_a_bert_trains_as_the_one_of_transformers(submission, rng):
    """A small BERT has the losses of Transformers' model, through warm-up, decay and clipping"""
    batches = [right._micro_batch(rng, lengths, 6, pairs=True) for lengths in ([9, 6], [5, 8, 7])]
    settings = {"weight_decay": 0.1, "warmup_steps": 2, "max_grad_norm": 1.0}

    def losses(of, state):
        model, given = pretraining_model(of, state), {"learning_rate": 2e-3, "total_steps": 6}
        found = trained(of, model, batches, **given, **settings)
        return torch.tensor(found).to(state["nsp_head.classifier.bias"])

    submission.agrees(
        losses, weights(rng), truth=lambda state: by_transformers(state, batches, 2e-3, 6)
    )


def interrupted(call):
    """Whether a call was ended by a witness."""
    try:
        call()
    except InterruptedError:
        return True
    return False


@pytest.mark.exercise("6.5")
@pytest.mark.hint(
    "A run that is killed and started again ends with the very numbers of one that was not."
)
def test_stopped_again_and_again(submission, rng):
    """A run with dropout that is stopped twice ends with the weights of one that was not"""
    first, second = sorted(int(i) for i in rng.permutation(np.arange(1, 7))[:2])
    state = right._guesser_state(rng)
    data = [right._micro_batch(rng, lengths, 3) for lengths in ([5, 3], [4, 6], [7], [2, 6, 3])]
    settings = {"total_steps": 7, "accumulation_steps": 2, "warmup_steps": 3}
    settings |= {"learning_rate": 0.03, "checkpoint_every": 1}

    def run(of, folder, stop):
        model, witness = guesser(of, state, 0.4), of.witness(stop=stop)
        drawing = of.make(f"{HELPERS}chapter_6.Drawn", data)
        given = {**settings, "checkpoint": folder.part("run.safetensors")}
        losses: list[float] = []
        was_stopped = interrupted(
            lambda: losses.extend(trained(of, model, drawing, witness, **given))
        )
        steps = [step for step, _ in witness.get("calls")]
        return was_stopped, steps, losses, model.parameters()

    def runs(of):
        whole, parts = of.folder(), of.folder()
        told = [run(of, parts, stop) for stop in (first, second - first)]
        end, right_end = run(of, parts, 0), run(of, whole, 0)
        same = all(right.alike(x, right_end[3][name]) for name, x in end[3].items())
        losses = right.alike(*map(torch.tensor, (end[2], right_end[2])))
        files = sorted(parts.files())
        return [x[:2] for x in told], end[:2], losses, len(end[2]), same, files

    def truth():
        steps = [[*range(1, first + 1)], [*range(first + 1, second + 1)], [*range(second + 1, 8)]]
        told = [(True, steps[0]), (True, steps[1])]
        return told, (False, steps[2]), True, 7, True, ["run.safetensors"]

    submission.agrees(runs, truth=truth)


@pytest.mark.exercise("6.5")
@pytest.mark.hint("A model is read in training mode, and comes back in the mode in which it came.")
def test_modes_and_what_is_told(submission, rng):
    """It is read in training mode, comes back as it was, and every step is told with its loss"""
    data = [right._micro_batch(rng, [4, 3], 3) for _ in range(2)]

    def run(of, state):
        found = []
        for train in (True, False):
            model, hook, told = guesser(of, state, 0.2), of.witness(), of.witness()
            model.call("train", train)
            model.call("register_forward_pre_hook", hook)
            losses = trained(of, model, data, told, total_steps=3, accumulation_steps=2)
            modes = sorted({mode for mode, *_ in hook.get("calls")})
            found.append(
                [
                    modes,
                    model.get("training"),
                    told.get("calls") == [*map(list, enumerate(losses, 1))],
                ]
            )
        return found

    submission.agrees(
        run, right._guesser_state(rng), truth=lambda _: [[[True], t, True] for t in (True, False)]
    )


@pytest.mark.exercise("6.5")
@pytest.mark.hint(
    "A step adds its gradient to what is there; a scaler scales it, and not the loss."
)
def test_steps_add_up(submission, rng):
    """Steps of several batches, with a scaler and without, add up their gradients in a BERT"""
    batches = [right._micro_batch(rng, lengths, 6, pairs=True) for lengths in ([5, 8], [6])]

    def steps(of, state):
        model = pretraining_model(of, state)
        scaler = of.make("torch.amp.GradScaler", "cpu", init_scale=16.0)
        given = [(batches[0], None), (batches[1], None), (batches[0], scaler)]
        losses = [of.call("pretraining.training_step", model, *one) for one in given]
        words = model.get("bert.embeddings.word.weight.grad")
        return losses, words, model.get("nsp_head.classifier.weight.grad")

    submission.agrees(steps, weights(rng))


# --- 6.6 adapt a model to a domain ---


def listened(of, names, texts, state, **settings):
    """Adapt a model, and return what it was called with, and the losses."""
    model = of.make(f"{HELPERS}chapter_6.Listener", state)
    chosen = of.make("pretraining.AdaptationSettings", learning_rate=0.01, **settings)
    losses = of.call("pretraining.adapt", model, pieces_of(of, names), texts, chosen)
    return model.get("calls"), losses


def drawn_texts(rng, sizes):
    """Draw texts in which no word comes twice, the pieces of a tokenizer, and a model for them."""
    names = right.vocabulary(rng, sum(sizes))
    words = iter(f"w{i}" for i in rng.permutation(sum(sizes)))
    texts = [" ".join(next(words) for _ in range(size)) for size in sizes]
    return names, texts, right._guesser_state(rng, len(names), 4)


def read_back(calls, names):
    """For each text that a model was given: its ids before it was masked, labels and inputs."""
    pad, found = names.index("[PAD]"), []
    for call in calls:
        ids, labels = call["input_ids"], call["labels"]
        original = torch.where(labels != -100, labels, ids)
        for rows in zip(original, labels, ids, call["attention_mask"], strict=True):
            real = (rows[0] != pad) & (rows[3] == 1)
            found.append([row[real] for row in rows[:3]])
    return found


@pytest.mark.exercise("6.6")
@pytest.mark.hint("In every round the masks are drawn anew, each token as likely as in any other.")
def test_masks_of_many_rounds(submission, rng):
    """Over many rounds 15% of the tokens are hidden, in one round whatever was in the last"""
    sizes = [18] * 20
    names, texts, state = drawn_texts(rng, sizes)
    settings = {"batch_size": 10, "max_length": 32, "total_steps": 48, "seed": seed_of(rng)}

    def law(of):
        calls, _ = listened(of, names, texts, state, **settings)
        rows = read_back(calls, names)
        chosen: dict[int, list] = {}
        for original, labels, _ in rows:
            assert len(original) == 20, "a text has lost a token, or got one"
            chosen.setdefault(int(original[1]), []).append(labels[1:-1] != -100)
        assert len(rows) == 24 * 20 and {len(x) for x in chosen.values()} == {24}, "not 24 rounds"
        places = torch.stack([torch.stack(x) for x in chosen.values()])  # [text, round, place]
        masks = sum(int((ids == names.index("[MASK]")).sum()) for _, _, ids in rows)
        twice = places[:, ::2] & places[:, 1::2]
        counted(
            chosen=(places.sum(), places.numel(), 0.15),
            masks=(masks, places.sum(), 0.8 + 0.1 / len(names)),
            in_two_rounds=(twice.sum(), twice.numel(), 0.15**2),
        )

    lawful(submission, law)


@pytest.mark.exercise("6.6")
@pytest.mark.hint(
    "A text just as long as there is room for stays whole; one more token is a second piece."
)
def test_texts_about_as_long_as_there_is_room(submission, rng):
    """Texts with as many tokens as fit, one more, one less and twice as many are cut right"""
    room = int(rng.integers(4, 9))
    sizes = rng.permutation([room, room + 1, room - 1, 2 * room, 2 * room + 1, 1]).tolist()
    names, texts, state = drawn_texts(rng, sizes)
    tokenizer, wanted = right.Pieces(names), []
    for ids in map(tokenizer.encode, texts):
        inner = ids[1:-1]
        for start in range(0, len(inner), room):
            wanted.append([ids[0], *inner[start : start + room], ids[-1]])
    size = int(rng.integers(2, 5))
    settings = {"batch_size": size, "max_length": room + 2, "seed": seed_of(rng)}
    steps = -(-len(wanted) // size)  # of one round

    def law(of):
        calls, losses = listened(of, names, texts, state, total_steps=steps, **settings)
        rows = [original.tolist() for original, _, _ in read_back(calls, names)]
        assert sorted(rows) == sorted(wanted), "not each piece of each text, once"
        assert len(losses) == steps, "not so many losses as steps"

    lawful(submission, law)


@pytest.mark.exercise("6.6")
@pytest.mark.hint("All that is drawn follows from the seed: the same one gives the same run again.")
def test_the_seed_decides(submission, rng):
    """The same seed gives the same batches and losses, and another one other batches"""
    names, texts, state = drawn_texts(rng, [6] * 16)
    seed = seed_of(rng)

    def first_inputs(of, seed):
        settings = {"batch_size": 4, "max_length": 9, "total_steps": 6, "seed": seed}
        calls, losses = listened(of, names, texts, state, **settings)
        return [call["input_ids"].tolist() for call in calls], losses

    def law(of):
        first, again, other = (first_inputs(of, x) for x in (seed, seed, seed + 1))
        assert first == again, "another run for the same seed"
        assert first[0] != other[0], "the same batches for another seed"

    lawful(submission, law)


@pytest.mark.exercise("6.6")
@pytest.mark.hint("A run that was stopped goes on, with the masks that it would have drawn.")
def test_an_adaptation_goes_on(submission, rng):
    """Stopped and gone on, an adaptation ends with the losses and weights of one that was not"""
    names, texts, state = drawn_texts(rng, [5, 6, 7, 4, 5, 8])
    settings = {"batch_size": 2, "max_length": 12, "total_steps": 5, "seed": seed_of(rng)}

    def run(of, folder, stop):
        model = of.make(f"{HELPERS}chapter_6.Guesser", state)
        given = {**settings, "checkpoint": folder.part("run.safetensors"), "checkpoint_every": 1}
        chosen = of.make("pretraining.AdaptationSettings", learning_rate=0.05, **given)
        losses: list[float] = []
        call = model, pieces_of(of, names), texts, chosen, of.witness(stop=stop)
        stopped = interrupted(lambda: losses.extend(of.call("pretraining.adapt", *call)))
        return stopped, losses, model.parameters()

    def law(of):
        whole, parts = of.folder(), of.folder()
        _, losses, weights_of_whole = run(of, whole, 0)
        assert run(of, parts, int(rng.integers(1, 5)))[0], "was not stopped by on_step"
        _, again, weights_of_parts = run(of, parts, 0)
        assert again == losses and len(losses) == 5, "other losses"
        same = [torch.equal(x, weights_of_whole[name]) for name, x in weights_of_parts.items()]
        assert all(same), "other weights"

    lawful(submission, law)


# --- 6.7 clinic ---


@pytest.mark.exercise("6.7")
@pytest.mark.hint("Only the chosen places have labels: all of them, whatever stands there now.")
def test_none_chosen_and_all(submission, rng):
    """Where nothing is chosen no label is left, where all is every one, and the rest stays"""
    batch = right._micro_batch(rng, [6, 4, 5], 5, pairs=True)
    original = integers(rng, 1, 19, 3, 6)
    some = torch.from_numpy(rng.random((3, 6)) < 0.5)

    def mended(of, batch):
        return [of.call("clinic.mend_labels", batch, x) for x in (some, some & False, some | True)]

    submission.agrees(
        mended,
        {**batch, "labels": original, "more": normal(rng, 3)},
        truth=lambda batch: [
            {**batch, "labels": torch.where(chosen, original, -100)}
            for chosen in (some, some & False, some | True)
        ],
    )


@pytest.mark.exercise("6.7")
@pytest.mark.hint("The mean of the losses as the model gives them, in whatever mode it is.")
def test_the_mean_of_many_losses(submission, rng):
    """The mean of 30 losses, in training mode too, with mode and gradients left alone"""
    batches = [right._micro_batch(rng, [4, 3], 2) for _ in range(30)]
    mark = normal(rng, 6)

    def mean(of, state, mark):
        found = []
        for train in (True, False):
            model = guesser(of, state, 0.5)
            model.call("train", train)
            model.put("bias.grad", mark)
            loss = of.call("clinic.mend_evaluation", model, batches)
            kept = torch.equal(model.get("bias.grad"), mark)
            found.append(
                [torch.tensor(loss).to(mark), kept, model.get("training"), type(loss).__name__]
            )
        return found

    submission.agrees(mean, right._guesser_state(rng), mark)
