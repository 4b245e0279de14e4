"""Chapter 3: laws of attention, and masks of every kind."""

import pytest
import torch
from torch import Tensor, nn

from bertlab.course.exercises.support import integers, normal, padding_mask, parameters_like

LOW = torch.finfo(torch.float32).min / 2


def hiding(lengths, seq):
    """An additive mask that hides what follows each length."""
    return (padding_mask(lengths, seq) == 0)[:, None, None, :] * LOW


def inputs(rng, batch=2, heads=3, queries=5, keys=7, size=8, spread=1.5):
    """Draw queries, keys and values."""
    shape = batch, heads, keys, size
    key, value = normal(rng, *shape, scale=spread), normal(rng, *shape)
    return normal(rng, batch, heads, queries, size, scale=spread), key, value


# --- 3.1 scaled dot-product attention ---


def attention(of, *given):
    """Attend, and return context and weights."""
    context, weights = of.call("attention.scaled_dot_product_attention", *given)
    return {"context": context, "weights": weights}


@pytest.mark.exercise("3.1")
@pytest.mark.hint("Each query shares its attention out among the keys: a row of weights sums to 1.")
def test_rows_of_weights_sum_to_one(submission, rng):
    """Every row of the weights sums to 1, with a mask and with large scores too"""
    given = *inputs(rng, spread=6.0), hiding([7, 3], 7)
    submission.agrees(
        lambda of, *given: attention(of, *given)["weights"].sum(-1),
        *given,
        truth=lambda query, key, value, mask: torch.ones_like(query[..., 0]),
    )


@pytest.mark.exercise("3.1")
@pytest.mark.hint(
    "Keys are a set: in another order, each with its value and mask, nothing changes."
)
def test_keys_in_another_order(submission, rng):
    """Keys in another order, with their values and masks, give the same"""
    order = torch.from_numpy(rng.permutation(7))

    def turned(of, query, key, value, mask):
        found = attention(of, query, key[:, :, order], value[:, :, order], mask[..., order])
        return {**found, "weights": found["weights"][..., order.argsort()]}

    submission.agrees(turned, *inputs(rng), normal(rng, 2, 1, 5, 7, scale=2.0))


@pytest.mark.exercise("3.1")
@pytest.mark.hint(
    "Where all scores are equal, so are the weights: the context is the values' mean."
)
def test_a_query_that_prefers_nothing(submission, rng):
    """A query of zeros gives the mean of the values that it may see, one key its value"""
    query, key, value = inputs(rng, batch=3)
    submission.agrees(
        lambda of, *given: attention(of, *given)["context"],
        *(0 * query, key, value, hiding([7, 4, 1], 7)),
        truth=lambda query, key, value, mask: torch.stack(
            [value[i, :, :n].mean(1, True).expand(-1, 5, -1) for i, n in enumerate((7, 4, 1))]
        ),
    )


@pytest.mark.exercise("3.1")
@pytest.mark.hint("The softmax sees differences: what is added to all scores of a query is lost.")
def test_the_same_added_to_all_scores(submission, rng):
    """A mask that is the same for all keys changes nothing, whatever its shape"""
    for shape in ((2, 1, 1, 1), (1, 3, 5, 1), (5, 1)):
        submission.agrees(attention, *inputs(rng), normal(rng, *shape, scale=3.0))


# --- 3.2 split and merge heads ---


@pytest.mark.exercise("3.2")
@pytest.mark.hint("Merging undoes splitting, and splitting undoes merging, number by number.")
def test_there_and_back(submission, rng):
    """Splitting and merging undo each other, in whole numbers, for every number of heads"""

    def there_and_back(of, x, heads):
        split = of.call("attention.split_heads", x, heads)
        merged = of.call("attention.merge_heads", split)
        again = of.call("attention.split_heads", merged, heads)
        return merged.tolist(), again.tolist() == split.tolist(), list(split.shape), merged.dtype

    for heads in (1, 4, 12):
        x = integers(rng, -9, 9, 3, 5, 12)
        right = x.tolist(), True, [3, heads, 5, 12 // heads], x.dtype
        submission.agrees(there_and_back, x, heads, truth=lambda *_, right=right: right)


@pytest.mark.exercise("3.2")
@pytest.mark.hint("Head h has the units from h * head on, of every token.")
def test_each_head_has_its_slice(submission, rng):
    """Each head has its own slice of the units, and merging puts the slices side by side"""
    submission.agrees(
        lambda of, x: [
            *of.call("attention.split_heads", x, 5).unbind(1),
            of.call("attention.merge_heads", torch.stack(x.chunk(5, -1), 1)),
        ],
        normal(rng, 4, 3, 20),
        truth=lambda x: [*x.chunk(5, -1), x],
    )


@pytest.mark.exercise("3.2")
@pytest.mark.hint("What does not divide is refused with a ValueError, before anything is reshaped.")
def test_widths_that_do_not_divide(submission, rng):
    """Widths that the number of heads does not divide"""
    for width, heads in ((7, 2), (12, 5), (3, 4)):
        with submission.raises(ValueError):
            submission.call("attention.split_heads", normal(rng, 2, 3, width), heads)


@pytest.mark.exercise("3.2")
@pytest.mark.hint("Each number goes to one place and keeps its gradient there.")
def test_the_gradient_takes_the_same_way(submission, rng):
    """The gradient takes the same way back, each number to its own place"""

    def back(of, x, split):
        there = of.gradients("attention.split_heads", x, 4, cotangent=split)["0"]
        return there, of.gradients("attention.merge_heads", split, cotangent=x)["0"]

    submission.agrees(back, normal(rng, 2, 3, 12), normal(rng, 2, 4, 3, 3))


# --- 3.3 from a padding mask to an additive mask ---

HALF = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.mark.exercise("3.3")
@pytest.mark.hint("Padding gets the weight 0 exactly, in every dtype, whatever its score.")
def test_padding_gets_no_weight(submission, rng):
    """Padding gets no weight at all, in every dtype, however high its score"""
    mask = padding_mask([6, 4, 1], 6)

    def weight_of_padding(of):
        added = [of.call("attention.additive_mask", mask, dtype) for dtype in HALF]
        weights = [(500.0 * (mask == 0) + one[:, 0, 0]).softmax(-1) for one in added]
        return [float(weight[mask == 0].max()) for weight in weights], [one.dtype for one in added]

    submission.agrees(weight_of_padding, truth=lambda: ([0.0] * 4, list(HALF)))


@pytest.mark.exercise("3.3")
@pytest.mark.hint("Adding a score must leave the number finite: leave room below it.")
def test_a_score_can_still_be_added(submission, rng):
    """A score of -100 can still be added in every dtype, and nothing becomes NaN"""
    mask = torch.zeros(2, 5).long()

    def finite(of):
        added = [of.call("attention.additive_mask", mask, dtype) - 100 for dtype in HALF]
        return [bool(x.isfinite().all() and x.softmax(-1).isfinite().all()) for x in added]

    submission.agrees(finite, truth=lambda: [True] * 4)


@pytest.mark.exercise("3.3")
@pytest.mark.hint("1 and True are the same: what counts is that padding is 0.")
def test_masks_of_other_types(submission, rng):
    """Masks of True and False, and of other whole numbers, holes in them too"""
    mask = torch.from_numpy(rng.integers(0, 2, (4, 9)))

    def hidden(of):
        given = [mask, mask.bool(), mask.int(), mask.to(torch.uint8)]
        found = [of.call("attention.additive_mask", one, torch.float32) for one in given]
        return [(one == 0).long() for one in found], [list(one.shape) for one in found]

    right = mask[:, None, None, :], [4, 1, 1, 9]
    submission.agrees(hidden, truth=lambda: [[one] * 4 for one in right])


@pytest.mark.exercise("3.3")
@pytest.mark.hint("The mask must have two axes, `[batch, seq]`; anything else is refused.")
def test_masks_of_other_shapes(submission):
    """Masks with one axis, three and four"""
    for shape in ((5,), (2, 1, 5), (2, 1, 1, 5)):
        with submission.raises(ValueError):
            submission.call("attention.additive_mask", torch.ones(shape).long(), torch.float32)


# --- 3.4 attention without the weights ---


def fast(of, *given, **more):
    """Attend by the fast way."""
    return of.call("attention.fast_attention", *given, **more)


@pytest.mark.exercise("3.4")
@pytest.mark.hint(
    "The mask is added to the scores, and may differ from head to head and query to query."
)
def test_any_mask_that_broadcasts(submission, rng):
    """Masks of every shape that broadcasts, and their gradients"""
    for shape in ((2, 1, 1, 7), (1, 3, 5, 7), (2, 3, 1, 7), (5, 7)):
        submission.agrees(
            lambda of, *given: (
                of.gradients("attention.fast_attention", *given[:4], cotangent=given[4])
                | {"context": fast(of, *given[:4])}
            ),
            *(*inputs(rng), normal(rng, *shape, scale=2.0), normal(rng, 2, 3, 5, 8)),
        )


@pytest.mark.exercise("3.4")
@pytest.mark.hint("Both ways of chapter 3 give the same numbers, also for one token and one head.")
def test_as_the_slow_way(submission, rng):
    """The numbers of the slow way, for one key, one query and many"""
    for sizes in ((1, 1, 1, 1, 4), (2, 2, 1, 300, 8), (1, 2, 300, 1, 8), (30, 1, 4, 4, 1)):
        submission.agrees(
            fast,
            *inputs(rng, *sizes),
            truth=lambda *given: attention(submission.truths.reference, *given)["context"],
        )


@pytest.mark.exercise("3.4")
@pytest.mark.hint("`dropout_p` is handed on: a dropped weight is 0, and the others grow in turn.")
def test_dropout_is_handed_on(submission, rng):
    """With one key, dropout keeps twice the value or nothing; without it, the value"""
    query, key, value = inputs(rng, 40, 4, 10, 1, 2)

    def multiples(of):
        times = fast(of, query, key, value, None, 0.5) / value, fast(of, query, key, value) / value
        return [sorted({round(x, 3) + 0.0 for x in one.flatten().tolist()}) for one in times]

    submission.agrees(lambda of: str(multiples(of)), truth=lambda: "[[0.0, 2.0], [1.0]]")


@pytest.mark.exercise("3.4")
@pytest.mark.hint("A text that is nothing but padding may give anything, but no NaN.")
def test_a_text_of_padding_alone(submission, rng):
    """A text of padding alone gives numbers, and leaves the others as they are"""
    given = *inputs(rng, batch=3), hiding([7, 0, 2], 7)

    def finite_and_others(of, *given):
        context = fast(of, *given)
        return bool(context.isfinite().all()), context[[0, 2]]

    for dtype in ("float32", "bfloat16"):
        submission.agrees(finite_and_others, *given, dtype=dtype)


# --- 3.5 multi-head self-attention ---

FIELDS = {"hidden_size": 24, "num_attention_heads": 4, "attention_probs_dropout_prob": 0.0}
LAYER = "attention.MultiHeadSelfAttention"


def state_of(rng, width=24):
    """Draw the layer's parameters, with queries and keys that prefer some tokens."""
    names = ("query", "key", "value", "output")
    layers = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
    return parameters_like(layers, rng, {"query.weight": 2.0, "key.weight": 2.0})


def attended(of, state, *given, fields=FIELDS, **more):
    """Attend with a submission's layer."""
    return of.forward(LAYER, fields, state, *given, **more)


@pytest.mark.exercise("3.5")
@pytest.mark.hint("What stands in the padding, and how much of it, changes no real token.")
def test_padding_never_changes_a_real_token(submission, rng):
    """More padding, with anything in it, changes no real token"""
    text, rubbish = normal(rng, 2, 5, 24), normal(rng, 2, 9, 24, scale=100.0)

    def padded(of, state, text, rubbish):
        wide, mask = torch.cat([text, rubbish], 1), padding_mask([5, 5], 14)
        output, weights = attended(of, state, wide, mask, return_weights=True)
        return attended(of, state, wide, mask)[:, :5], output[:, :5], weights[:, :, :5, :5]

    def alone(state, text, rubbish):
        output, weights = attended(submission.truths.reference, state, text, return_weights=True)
        return output, output, weights

    submission.agrees(padded, state_of(rng), text, rubbish, truth=alone)


@pytest.mark.exercise("3.5")
@pytest.mark.hint("Attention does not know places: tokens in another order come out in that order.")
def test_tokens_in_another_order(submission, rng):
    """Tokens in another order come out in that order, with their weights"""
    order, mask = torch.from_numpy(rng.permutation(8)), torch.from_numpy(rng.integers(0, 2, (3, 8)))
    mask[:, 0] = 1

    def turned(of, state, x):
        given = x[:, order], mask[:, order]
        output, weights = attended(of, state, *given, return_weights=True)
        back = order.argsort()
        return output[:, back], weights[:, :, back][..., back], attended(of, state, *given)[:, back]

    submission.agrees(turned, state_of(rng), normal(rng, 3, 8, 24))


@pytest.mark.exercise("3.5")
@pytest.mark.hint(
    "Heads are side by side and equal: exchange them in every layer, and nothing changes."
)
def test_heads_in_another_order(submission, rng):
    """Heads in another order, in all four layers, give the same output"""
    units = torch.arange(24).view(4, 6)[rng.permutation(4)].flatten()

    def exchanged(of, state, x):
        turned = {
            name: value if name == "output.bias" else value[units] for name, value in state.items()
        }
        turned["output.weight"] = state["output.weight"][:, units]
        return attended(of, turned, x)

    right = submission.truths.reference
    submission.agrees(
        *(exchanged, state_of(rng), normal(rng, 2, 7, 24)),
        truth=lambda *given: attended(right, *given),
    )


@pytest.mark.exercise("3.5")
@pytest.mark.hint("Weights are those of the softmax: rows sum to 1, and padding has none.")
def test_weights_are_shares(submission, rng):
    """Each row of the weights sums to 1, padding has none, and asking changes no output"""
    mask = padding_mask([9, 4, 1], 9)

    def shares(of, state, x):
        output, weights = attended(of, state, x, mask, return_weights=True)
        unseen = weights.transpose(1, 3)[mask == 0]
        return weights.sum(-1), unseen, output, attended(of, state, x, torch.ones_like(mask))

    submission.agrees(shares, state_of(rng), normal(rng, 3, 9, 24))


@pytest.mark.exercise("3.5")
@pytest.mark.hint("A dropout probability acts in training alone, and one of 0 never.")
def test_nothing_is_dropped(submission, rng):
    """Nothing is dropped in evaluation, nor in training with a probability of 0"""
    dropping = {**FIELDS, "attention_probs_dropout_prob": 0.9}

    def both(of, state, x):
        still = attended(of, state, x, fields=dropping)
        return (
            still,
            attended(of, state, x, train=True),
            attended(of, state, x, return_weights=True)[0],
        )

    submission.agrees(both, state_of(rng), normal(rng, 2, 6, 24))
    submission.agrees(both, state_of(rng), normal(rng, 2, 6, 24), dtype="bfloat16")


@pytest.mark.exercise("3.5")
@pytest.mark.hint(
    "Dropout acts on the weights, in training, on both paths; what is returned is undropped."
)
def test_weights_are_dropped_in_training(submission, rng):
    """In training weights are dropped, whole heads alike, on both paths"""
    state = {name: 0 * value for name, value in state_of(rng).items()}
    state |= {"value.bias": torch.ones(24), "output.weight": torch.eye(24)}
    fields = {**FIELDS, "attention_probs_dropout_prob": 0.5}  # two keys: each has half, or none

    def sums(of):
        given = state, torch.zeros(50, 2, 24)
        beside, weights = attended(of, *given, fields=fields, train=True, return_weights=True)
        found = attended(of, *given, fields=fields, train=True), beside
        units = [set(map(tuple, x.view(-1, 6).round(decimals=2).tolist())) for x in found]
        return [sorted(one) for one in units], weights

    ones = [(number,) * 6 for number in (0.0, 1.0, 2.0)]
    submission.agrees(sums, truth=lambda: ([ones] * 2, torch.full((50, 4, 2, 2), 0.5)))


@pytest.mark.exercise("3.5")
@pytest.mark.hint("One head as wide as the model, or as many heads as units: the config decides.")
def test_the_fewest_and_the_most_heads(submission, rng):
    """One head, and as many heads as units, one token and a wide batch"""
    for heads, batch, seq in ((1, 3, 5), (24, 3, 5), (4, 200, 2), (4, 1, 1)):
        submission.agrees(
            lambda of, state, x, heads: attended(
                of, state, x, fields={**FIELDS, "num_attention_heads": heads}
            ),
            *(state_of(rng), normal(rng, batch, seq, 24), heads),
        )


# --- 3.6 clinic ---


def mended(of, padding):
    """Make a mask of PyTorch's into one of BERT's."""
    return of.call("clinic.mend_mask", padding)


@pytest.mark.exercise("3.6")
@pytest.mark.hint("Both forms say the same: True or minus infinity is padding.")
def test_both_forms_say_the_same(submission, rng):
    """Both forms give the same mask, in every floating-point type"""
    hidden = torch.from_numpy(rng.integers(0, 2, (6, 8))) == 1
    low = torch.zeros(6, 8).masked_fill(hidden, float("-inf"))
    submission.agrees(
        lambda of: [mended(of, one) for one in (hidden, *(low.to(dtype) for dtype in HALF))],
        truth=lambda: [1 - hidden.long()] * 5,
    )


@pytest.mark.exercise("3.6")
@pytest.mark.hint("Turn the answer into PyTorch's form, mend it again, and you have the answer.")
def test_mending_twice(submission, rng):
    """What was mended, turned round and mended again, is the same; rows of one kind too"""
    rows = torch.tensor([[False] * 5, [True] * 5, [True] * 4 + [False], [False] + [True] * 4])

    def twice(of: object, padding: Tensor) -> Tensor:
        return mended(of, mended(of, padding) == 0)

    submission.agrees(twice, rows, truth=lambda padding: 1 - padding.long())
    submission.agrees(twice, rows[:1, :1], truth=lambda padding: 1 - padding.long())
