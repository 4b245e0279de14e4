"""Chapter 4: laws of the feed-forward network, the layer and the whole encoder."""

import pytest
import torch

from bertlab.course.exercises import chapter_4 as right
from bertlab.course.exercises.support import (
    bert_config,
    integers,
    normal,
    padding_mask,
    parameters_like,
)
from bertlab.course.grading.hidden import Config

FIELDS = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
PEAKED = {"query.weight": 2.0, "key.weight": 2.0}


def drawn(rng, module, **fields):
    """Draw the parameters of a module."""
    return parameters_like(module(bert_config(**{**FIELDS, **fields})), rng, PEAKED)


def made(of, name, state, *options, train=False, fields=FIELDS, **more):
    """Make a module in the sandbox, and give it its parameters."""
    return of.make(name, Config(fields), *options, **more).load(state, train)


# --- 4.1 GELU ---


def gelus(of, x):
    """Apply both functions."""
    return [of.call(f"feed_forward.{name}", x) for name in ("gelu", "gelu_tanh")]


@pytest.mark.exercise("4.1")
@pytest.mark.hint("The probability of being below x and that of being below -x add up to 1.")
def test_both_sides_add_up(submission, rng):
    """What a number and its negative give differ by the number itself"""
    submission.agrees(
        lambda of, x: [a - b for a, b in zip(gelus(of, x), gelus(of, -x), strict=True)],
        normal(rng, 300, scale=3.0),
        truth=lambda x: [x, x],
    )


@pytest.mark.exercise("4.1")
@pytest.mark.hint("Far from 0 the functions are x on one side and 0 on the other, never NaN.")
def test_very_large_numbers(submission):
    """Numbers far from 0, in three types: x on one side, 0 on the other"""
    far = torch.tensor([30.0, 250.0, 6e4, 0.0, -30.0, -250.0, -6e4])
    for dtype in ("float32", "float16", "bfloat16"):
        submission.agrees(gelus, far, truth=lambda x: [x.clamp(min=0)] * 2, dtype=dtype)


@pytest.mark.exercise("4.1")
@pytest.mark.hint("At 0 both rise by one half, far on the right by 1, and they dip on the left.")
def test_slopes(submission, rng):
    """How steep both are, at 0, beside it and far away"""
    x = torch.cat([torch.tensor([0.0, 8.0, -8.0]), normal(rng, 40)])
    submission.agrees(
        lambda of, x: [of.gradients(f"feed_forward.{n}", x)["0"] for n in ("gelu", "gelu_tanh")], x
    )


@pytest.mark.exercise("4.1")
@pytest.mark.hint(
    "The approximation departs from the exact form, by less than 0.0005, where it should."
)
def test_how_far_apart_they_are(submission):
    """How far apart the two are, everywhere between -5 and 5"""
    submission.agrees(
        lambda of, x: gelus(of, x)[0] - gelus(of, x)[1], torch.linspace(-5, 5, 1001).view(7, 11, 13)
    )


# --- 4.2 the feed-forward network ---


def widened(of, state, x, train=False, **fields):
    """Apply the feed-forward network."""
    return of.forward("feed_forward.FeedForward", {**FIELDS, **fields}, state, x, train=train)


@pytest.mark.exercise("4.2")
@pytest.mark.hint("Every token is worked on by itself: neighbours and batch change nothing.")
def test_tokens_do_not_see_each_other(submission, rng):
    """A token alone, in another order, and in a wide batch"""
    order = torch.from_numpy(rng.permutation(6))

    def one_by_one(of, state, x):
        alone = torch.cat([widened(of, state, x[:, place : place + 1]) for place in range(6)], 1)
        return alone, widened(of, state, x[:, order])[:, order.argsort()]

    submission.agrees(one_by_one, drawn(rng, right.FeedForward), normal(rng, 90, 6, 16))


@pytest.mark.exercise("4.2")
@pytest.mark.hint("With relu and without biases, an input three times as large comes out as large.")
def test_relu_keeps_proportions(submission, rng):
    """With relu and no biases, three times the input gives three times the output"""
    state = drawn(rng, right.FeedForward)
    state = {name: value * (not name.endswith("bias")) for name, value in state.items()}
    submission.agrees(
        lambda of, state, x: widened(of, state, 4 * x, hidden_act="relu"),
        *(state, normal(rng, 2, 5, 16)),
        truth=lambda state, x: 4 * ((x @ state["up.weight"].T).relu() @ state["down.weight"].T),
    )


@pytest.mark.exercise("4.2")
@pytest.mark.hint("The width inside and the activation are what the config says.")
def test_every_activation_at_every_width(submission, rng):
    """Every activation, one unit inside and many, in bfloat16 too"""
    for inner, act, dtype in (
        (1, "gelu", "float32"),
        (200, "gelu_tanh", "float32"),
        (24, "gelu", "bfloat16"),
    ):
        fields = {"intermediate_size": inner, "hidden_act": act}
        submission.agrees(
            lambda of, state, x, fields: widened(of, state, x, **fields),
            *(drawn(rng, right.FeedForward, **fields), normal(rng, 2, 3, 16), fields),
            dtype=dtype,
        )


@pytest.mark.exercise("4.2")
@pytest.mark.hint(
    "Dropout is the last step, with the probability `hidden_dropout_prob`, in training."
)
def test_dropout_comes_last(submission, rng):
    """Dropout is the last step: training gives each number scaled up, or 0"""
    state, x = drawn(rng, right.FeedForward), normal(rng, 30, 9, 16)

    def multiples(of):
        still, moved = (
            widened(of, state, x, train, hidden_dropout_prob=0.5) for train in (False, True)
        )
        return widened(of, state, x, True).sub(still).eq(0).all(), (moved / still).round(
            decimals=2
        ).unique()

    submission.agrees(multiples, truth=lambda: (torch.tensor(True), torch.tensor([0.0, 2.0])))


# --- 4.3 SwiGLU ---


def gated(of, state, x, train=False, **fields):
    """Apply the gated network."""
    return of.forward("feed_forward.SwiGLU", {**FIELDS, **fields}, state, x, train=train)


@pytest.mark.exercise("4.3")
@pytest.mark.hint(
    "Try the number of units above and below: yours must come nearest to `FeedForward`."
)
def test_as_many_parameters_as_nearly_as_can_be(submission, rng):
    """As many parameters as the plain network, as nearly as can be, for many sizes"""
    sizes = [(4 * int(h), int(w)) for h, w in rng.integers(1, 40, (20, 2))]

    def distances(of, sizes):
        configs = [Config(FIELDS, hidden_size=h, intermediate_size=w) for h, w in sizes]
        found = [of.make("feed_forward.SwiGLU", config).parameters() for config in configs]
        counts = [sum(value.numel() for value in one.values()) for one in found]
        plain = [w * (2 * h + 1) + h for h, w in sizes]
        return [abs(count - goal) for count, goal in zip(counts, plain, strict=True)]

    submission.agrees(distances, sizes)


@pytest.mark.exercise("4.3")
@pytest.mark.hint("A gate of 0 lets nothing through; what passes is multiplied, so it scales.")
def test_what_passes_the_gate(submission, rng):
    """A closed gate leaves the last bias alone, and twice the input to it gives twice the rest"""
    state = drawn(rng, right.SwiGLU)
    closed = {n: value * (not n.startswith("gate")) for n, value in state.items()}
    doubled = {n: value * (1 + n.startswith("up")) for n, value in state.items()}
    submission.agrees(
        lambda of, x, *states: [gated(of, state, x) for state in states],
        *(normal(rng, 2, 3, 16), closed, doubled),
    )


@pytest.mark.exercise("4.3")
@pytest.mark.hint("Every token is worked on by itself, and dropout is the last step.")
def test_gated_tokens_and_dropout(submission, rng):
    """Tokens in another order; in training each number scaled up, or 0"""
    state, order = drawn(rng, right.SwiGLU), torch.from_numpy(rng.permutation(7))
    x = normal(rng, 40, 7, 16)
    submission.agrees(
        lambda of, state, x: gated(of, state, x[:, order], True)[:, order.argsort()], state, x
    )

    def multiples(of):
        still, moved = (
            gated(of, state, x, train, hidden_dropout_prob=0.5) for train in (False, True)
        )
        return (moved / still).round(decimals=2).unique()

    submission.agrees(multiples, truth=lambda: torch.tensor([0.0, 2.0]))


# --- 4.4 the encoder layer ---

LAYER = "encoder.EncoderLayer"


def silent(state, *names):
    """The same parameters, with these layers giving 0."""
    return {n: value * (n.rpartition(".")[0] not in names) for n, value in state.items()}


@pytest.mark.exercise("4.4")
@pytest.mark.hint(
    "Where both halves add nothing, Pre-LN changes nothing, and Post-LN only normalizes."
)
def test_halves_that_add_nothing(submission, rng):
    """Where both halves add nothing: Pre-LN gives its input, Post-LN its norms"""
    state = silent(drawn(rng, right.EncoderLayer), "attention.output", "feed_forward.down")
    x = normal(rng, 2, 5, 16, scale=3.0)
    submission.agrees(lambda of, state, x: made(of, LAYER, state)(x), state, x)
    submission.agrees(
        lambda of, state, x: made(of, LAYER, state, pre_norm=True)(x),
        *(state, x),
        truth=lambda state, x: x,
    )


@pytest.mark.exercise("4.4")
@pytest.mark.hint("What stands in the padding, and how much of it, changes no real token.")
def test_padding_never_changes_a_real_token(submission, rng):
    """More padding, with anything in it, changes no real token, in Post-LN and Pre-LN"""
    rubbish, masks = normal(rng, 2, 6, 16, scale=50.0), padding_mask([5, 5], 11)

    def padded(of, state, x):
        layers = [made(of, LAYER, state, pre_norm=pre_norm) for pre_norm in (False, True)]
        return [layer(torch.cat([x, rubbish.to(x)], 1), masks)[:, :5] for layer in layers]

    submission.agrees(padded, drawn(rng, right.EncoderLayer), normal(rng, 2, 5, 16))


@pytest.mark.exercise("4.4")
@pytest.mark.hint("A layer does not know places; asking for the weights changes no output.")
def test_order_and_weights(submission, rng):
    """Tokens in another order come out in that order; asking for weights changes nothing"""
    order = torch.from_numpy(rng.permutation(6))

    def turned(of, state, x):
        layer = made(of, LAYER, state)
        output, weights = layer(x, return_weights=True)
        return layer(x[:, order])[:, order.argsort()], output, weights, weights.sum(-1)

    submission.agrees(turned, drawn(rng, right.EncoderLayer), normal(rng, 3, 6, 16))


@pytest.mark.exercise("4.4")
@pytest.mark.hint("Each half has its own norm, with the config's eps; training may drop nothing.")
def test_norms_have_their_own_gains(submission, rng):
    """One half at a time, with an eps that counts, in bfloat16 too, in training with dropout 0"""
    fields = {**FIELDS, "layer_norm_eps": 0.5}
    for name, dtype in (("attention.output", "float32"), ("feed_forward.down", "bfloat16")):
        for pre_norm in (False, True):
            submission.agrees(
                lambda of, state, x, pre_norm: made(
                    of, LAYER, state, train=True, fields=fields, pre_norm=pre_norm
                )(x),
                *(silent(drawn(rng, right.EncoderLayer), name), normal(rng, 2, 4, 16), pre_norm),
                dtype=dtype,
            )


@pytest.mark.exercise("4.4")
@pytest.mark.hint("Both halves drop what they add, each once, and nothing else is dropped.")
def test_each_half_drops_once(submission, rng):
    """In training each half drops from what it adds, once, and never from the token"""
    fields, half = {**FIELDS, "hidden_dropout_prob": 0.5}, ("attention.output", "feed_forward.down")
    state = {name: 0 * value for name, value in drawn(rng, right.EncoderLayer).items()}

    def steps(of):
        states = [state | {f"{name}.bias": torch.ones(16)} for name in half]
        layers = [made(of, LAYER, one, train=True, fields=fields, pre_norm=True) for one in states]
        added = [layer(torch.full((60, 9, 16), 5.0)) - 5 for layer in layers]
        return [[x.unique(), (x == 0).double().mean().round(decimals=1)] for x in added]

    one = [torch.tensor([0.0, 2.0]), torch.tensor(0.5).double()]
    submission.agrees(steps, truth=lambda: [one, one])


# --- 4.5 the whole encoder ---

MODEL = "encoder.BertModel"


def batch(rng, lengths, seq):
    """Draw ids, a mask and token types."""
    mask = padding_mask(lengths, seq)
    return (
        integers(rng, 1, 50, len(lengths), seq) * mask,
        mask,
        integers(rng, 0, 2, len(lengths), seq),
    )


@pytest.mark.exercise("4.5")
@pytest.mark.hint("What is in the padding, and how much of it, changes no text.")
def test_padding_never_changes_a_text(submission, rng):
    """A text alone, in a batch and with more padding, with any ids in it"""
    ids, mask, _ = batch(rng, [6, 13, 2], 13)
    more = torch.cat([ids[:1, :6], integers(rng, 0, 50, 1, 14)], 1), padding_mask([6], 20)

    def thrice(of, state):
        model = made(of, MODEL, state)
        outputs = model(ids[:1, :6]), model(ids, mask), model(*more)
        return [(x["last_hidden_state"][0, :6], x["pooler_output"][0]) for x in outputs]

    submission.agrees(thrice, drawn(rng, right.BertModel))


@pytest.mark.exercise("4.5")
@pytest.mark.hint(
    "Each hidden state is what one layer made of the one before; the last is the output."
)
def test_hidden_states_are_a_chain(submission, rng):
    """Every hidden state is what one layer makes of the one before"""
    ids, mask, types = batch(rng, [9, 4], 9)

    def chain(of, state):
        model = made(of, MODEL, state)
        full = model(ids, mask, types, output_hidden_states=True, output_attentions=True)
        states, attentions = full["hidden_states"], full["attentions"]
        layers = [model.part(f"encoder.layers.{number}") for number in range(3)]
        again = [layer(x, mask) for layer, x in zip(layers, states, strict=False)]
        last = torch.equal(states[-1][mask == 1], full["last_hidden_state"][mask == 1])
        return [x[mask == 1] for x in again], last, len(states), [x.sum(-1) for x in attentions]

    submission.agrees(chain, drawn(rng, right.BertModel))


@pytest.mark.exercise("4.5")
@pytest.mark.hint("Run without padding, a batch gives the same numbers at its real tokens.")
def test_without_computing_padding(submission, rng):
    """The run that computes nothing for padding gives the same numbers"""
    ids, mask, types = batch(rng, [5, 12, 1, 12, 7], 12)

    def packed(of, state):
        model = made(of, MODEL, state)
        output = model.call("forward_packed", ids, mask, types)
        return output["last_hidden_state"][mask == 1], output["pooler_output"]

    def padded(state):
        output = made(submission.truths.reference, MODEL, state)(ids, mask, types)
        return output["last_hidden_state"][mask == 1], output["pooler_output"]

    submission.agrees(packed, drawn(rng, right.BertModel), truth=padded)


@pytest.mark.exercise("4.5")
@pytest.mark.hint("The pooler looks at the first token, and at nothing else.")
def test_the_pooler_looks_at_the_first_token(submission, rng):
    """The pooler looks at the first token alone, and stays between -1 and 1"""
    state = {"dense.weight": normal(rng, 16, 16), "dense.bias": normal(rng, 16)}

    def pooled(of, state, x):
        given = x, x[:, :1], torch.cat([x[:, :1], 9 * x[:, 1:]], 1)
        return [of.forward("encoder.Pooler", FIELDS, state, one) for one in given]

    submission.agrees(pooled, state, normal(rng, 4, 6, 16))


@pytest.mark.exercise("4.5")
@pytest.mark.hint(
    "Arguments that do not fit together are refused, and so is a text that is too long."
)
def test_arguments_that_do_not_fit(submission, rng):
    """Arguments that do not fit together, and a text of one token too many"""
    ids, model = integers(rng, 1, 50, 3, 21), submission.make(MODEL, Config(FIELDS))
    with submission.raises(ValueError, 21, 20):
        model(ids)
    short, one = ids[:, :8], torch.ones(1, 8).long()
    for given in ((short[0],), (short[None],), (short, one), (short, None, one), (short, ids)):
        with submission.raises(ValueError):
            model(*given)


@pytest.mark.exercise("4.5")
@pytest.mark.hint("Every layer is there once, with parameters of its own, all drawn anew.")
def test_fresh_parameters(submission, rng):
    """As many parameters as the config asks for, drawn as BERT's are"""
    wide = {"num_hidden_layers": 5, "hidden_size": 64, "initializer_range": 0.05, "pad_token_id": 3}

    def fresh(of):
        found = of.make(MODEL, Config(FIELDS, **wide)).parameters()
        ends = {
            n: value.flatten()[[0, -1]].tolist() for n, value in found.items() if value.ndim == 1
        }
        spread = torch.cat([value.flatten() for value in found.values() if value.ndim == 2]).std()
        padding = found["embeddings.word.weight"][3].abs().max()
        return sorted(found), ends, round(float(spread) / 0.05, 1), float(padding)

    submission.agrees(fresh)


# --- 4.6 clinic ---


def patient(of, state, train=False, fields=FIELDS):
    """Make a layer that has the right parts, and does nothing by itself."""
    layer, bare = made(of, LAYER, state, train=train, fields=fields), of.make("torch.nn.Module")
    for name in ("attention", "attention_norm", "feed_forward", "feed_forward_norm", "dropout"):
        bare.put(name, layer.part(name))
    return bare


@pytest.mark.exercise("4.6")
@pytest.mark.hint("Compute with the parts what a healthy Post-LN layer computes.")
def test_the_parts_of_a_healthy_layer(submission, rng):
    """With the parts alone: what a healthy layer gives, with padding and without"""
    mask = padding_mask([6, 3], 6)

    def cured(of, state, x):
        bare = patient(of, state)
        masked = of.call("clinic.mend_residual", bare, x, mask)
        return masked[mask == 1], of.call("clinic.mend_residual", bare, x)

    def healthy(state, x):
        layer = made(submission.truths.reference, LAYER, state)
        return layer(x, mask)[mask == 1], layer(x)

    submission.agrees(cured, drawn(rng, right.EncoderLayer), normal(rng, 2, 6, 16), truth=healthy)


@pytest.mark.exercise("4.6")
@pytest.mark.hint("However often it runs, each vector leaves normalized, and nothing grows.")
def test_nothing_grows(submission, rng):
    """After twelve runs the vectors are as large as after one"""

    def sizes(of, state, x):
        bare, found = patient(of, state), []
        for _ in range(12):
            x = of.call("clinic.mend_residual", bare, x)
            found.append(x.square().mean(-1).sqrt())
        return found[0], found[-1]

    state = drawn(rng, right.EncoderLayer)
    state |= {
        f"{n}_norm.{k}": torch.full((16,), float(k == "weight"))
        for n in ("attention", "feed_forward")
        for k in ("weight", "bias")
    }
    submission.agrees(sizes, state, normal(rng, 2, 5, 16), truth=lambda *_: [torch.ones(2, 5)] * 2)


@pytest.mark.exercise("4.6")
@pytest.mark.hint("What was healthy in the patient stays: both dropouts act, once each.")
def test_dropout_is_kept(submission, rng):
    """Both dropouts still act in training, once each, and never in evaluation"""
    state = {n: value * 0 for n, value in drawn(rng, right.EncoderLayer).items()}
    state |= {"attention_norm.weight": torch.ones(16), "feed_forward_norm.weight": torch.ones(16)}
    fields, half = {**FIELDS, "hidden_dropout_prob": 0.5}, ("attention.output", "feed_forward.down")

    def dropped(of):
        states = [state | {f"{name}.bias": torch.ones(16)} for name in half]
        zeros, found = torch.zeros(60, 9, 16), []
        for one, train in ((s, t) for s in states for t in (True, False)):
            x = of.call("clinic.mend_residual", patient(of, one, train, fields), zeros)
            found.append(round(float((x < x.mean(-1, keepdim=True) - 1e-3).double().mean()), 1))
        return str(found)

    submission.agrees(dropped, truth=lambda: "[0.5, 0.0, 0.5, 0.0]")
