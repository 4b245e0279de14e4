"""Chapter 2: laws of normalization, positions, embeddings and windows."""

import pytest
import torch
import torch.nn.functional as F

from bertlab.course.exercises.chapter_2 import TheirBertEmbeddings
from bertlab.course.exercises.support import bert_config, integers, normal, parameters_like
from bertlab.course.grading.hidden import Config

# --- 2.1 layer normalization ---


def norm(of, *given):
    """Normalize, and scale and shift."""
    return of.call("embeddings.layer_norm", *given)


def gain_and_bias(rng, width):
    """Draw a gain around 1 and a bias around 0."""
    return normal(rng, width, scale=0.3, mean=1.0), normal(rng, width, scale=0.3)


@pytest.mark.exercise("2.1")
@pytest.mark.hint(
    "With gain 1 every vector comes out with variance 1, and with the bias as its mean."
)
def test_mean_and_variance(submission, rng):
    """With gain 1 every vector has variance 1 and the bias as its mean, however large it was"""
    x = normal(rng, 6, 50, mean=2.0) * torch.tensor([0.1, 0.5, 1.0, 4.0, 20.0, 90.0])[:, None]

    def moments(of, x, gain, bias):
        output = norm(of, x, gain, bias)
        return output.mean(-1), output.square().mean(-1)

    submission.agrees(moments, x, torch.ones(50), torch.full((50,), 3.0))


@pytest.mark.exercise("2.1")
@pytest.mark.hint("How large a vector is does not matter, only how its units stand to each other.")
def test_the_size_does_not_matter(submission, rng):
    """A vector 64 times as large comes out the same, and turned round when it is negative"""
    submission.agrees(
        lambda of, x, *more: [norm(of, 64 * x, *more), norm(of, -64 * x, *more)],
        *(normal(rng, 5, 40), *gain_and_bias(rng, 40)),
        truth=lambda x, *more: [F.layer_norm(y, (40,), *more, eps=1e-12) for y in (x, -x)],
    )


@pytest.mark.exercise("2.1")
@pytest.mark.hint("Each vector is normalized by itself, however many axes stand before the last.")
def test_any_number_of_axes(submission, rng):
    """Vectors in a batch with four axes, alone, and none at all"""
    submission.agrees(
        lambda of, x, *more: [norm(of, part, *more) for part in (x, x[1, 2, 3], x[0, 0, :0])],
        *(normal(rng, 2, 3, 4, 16, scale=3.0), *gain_and_bias(rng, 16)),
    )


@pytest.mark.exercise("2.1")
@pytest.mark.hint("A vector of one unit is its own mean; a wide one is normalized like any other.")
def test_one_unit_and_many(submission, rng):
    """A vector of one unit, which leaves the bias alone, and one of 5,000"""
    for width in (1, 5000):
        submission.agrees(norm, normal(rng, 3, width, mean=1.0), *gain_and_bias(rng, width))


@pytest.mark.exercise("2.1")
@pytest.mark.hint("eps stands under the root, beside the variance, and is the one that is given.")
def test_any_eps(submission, rng):
    """An eps that is given, beside small and large variances, in half precision too"""
    for dtype in ("float32", "bfloat16", "float16"):
        given = normal(rng, 4, 30) * torch.tensor([0.01, 0.1, 1.0, 40.0])[:, None]
        eps = float(rng.uniform(0.01, 0.2))
        submission.agrees(norm, given, *gain_and_bias(rng, 30), eps, dtype=dtype)


# --- 2.2 sinusoidal positions ---


def sinusoids(of, length, width):
    """Make a table of positions."""
    return of.call("embeddings.sinusoidal_positions", length, width)


@pytest.mark.exercise("2.2")
@pytest.mark.hint("Two units that stand side by side are sine and cosine of one angle.")
def test_pairs_lie_on_the_unit_circle(submission, rng):
    """Neighbouring units lie on the unit circle"""
    length, width = int(rng.integers(200, 400)), 2 * int(rng.integers(8, 40))

    def radius(of):
        table = sinusoids(of, length, width)
        return table[:, 0::2].square() + table[:, 1::2].square()

    submission.agrees(radius, truth=lambda: torch.ones(length, width // 2))


@pytest.mark.exercise("2.2")
@pytest.mark.hint(
    "Going on by so many places turns every pair by an angle that is always the same."
)
def test_only_the_distance_counts(submission, rng):
    """How alike two positions are depends on their distance alone"""
    length, width, step = 120, 2 * int(rng.integers(10, 40)), int(rng.integers(3, 30))

    def alike(of):
        table = sinusoids(of, length, width)
        return (table[:-step] * table[step:]).sum(-1)

    submission.agrees(alike)


@pytest.mark.exercise("2.2")
@pytest.mark.hint("A row depends on its position and the width, not on the table's length.")
def test_a_longer_table_begins_with_the_shorter(submission, rng):
    """A longer table begins with the shorter one, up to 3,000 positions"""
    width, length = int(rng.integers(3, 30)), int(rng.integers(2, 40))
    submission.agrees(
        lambda of: [
            sinusoids(of, 3000, width)[[0, length - 1, -1]],
            sinusoids(of, length, width)[[0, -1]],
        ]
    )


@pytest.mark.exercise("2.2")
@pytest.mark.hint("The least table has one position and one unit; anything less is refused.")
def test_the_smallest_tables(submission):
    """The smallest tables, and sizes that make none"""
    submission.agrees(lambda of: [sinusoids(of, *size) for size in ((1, 1), (3, 1), (2, 2))])
    for size in ((4, 0), (0, 4), (-1, 4), (4, -2)):
        with submission.raises(ValueError):
            submission.call("embeddings.sinusoidal_positions", *size)


# --- 2.3 BERT's embeddings ---

FIELDS = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
    "type_vocab_size": 3,
    "layer_norm_eps": 1e-3,
    "pad_token_id": 5,
    "hidden_dropout_prob": 0.0,
}


def tables(rng):
    """Draw the parameters of embeddings."""
    return parameters_like(TheirBertEmbeddings(bert_config(**FIELDS)), rng)


def embedded(of, state, *ids, train=False, **fields):
    """Look ids up in a submission's embeddings."""
    config = {**FIELDS, **fields}
    return of.forward("embeddings.BertEmbeddings", config, state, *ids, train=train)


@pytest.mark.exercise("2.3")
@pytest.mark.hint("Each token's vector depends on its id, type and position alone.")
def test_tokens_in_another_order(submission, rng):
    """Tokens in another order, each with its own position, give the same vectors"""
    ids, types = integers(rng, 0, 31, 3, 24), integers(rng, 0, 3, 3, 24)
    order = torch.from_numpy(rng.permutation(24))
    submission.agrees(
        lambda of, state: [
            embedded(of, state, ids[:, order], types[:, order], places)[:, order.argsort()]
            for places in (order, order.expand(3, -1))
        ],
        tables(rng),
        truth=lambda state: [embedded(submission.truths.reference, state, ids, types)] * 2,
    )


@pytest.mark.exercise("2.3")
@pytest.mark.hint("What else is in the batch, and how long the text is, changes no token's vector.")
def test_a_text_alone(submission, rng):
    """A text alone has the vectors that it has in a batch, and its beginning too"""
    ids = integers(rng, 0, 31, 40, 9)
    parts = (ids, ids[7:8], ids[:, :1])
    submission.agrees(lambda of, state: [embedded(of, state, x) for x in parts], tables(rng))


@pytest.mark.exercise("2.3")
@pytest.mark.hint(
    "The row that gets no gradient is the config's `pad_token_id`, which need not be 0."
)
def test_the_row_of_padding_learns_nothing(submission, rng):
    """The row of [PAD] learns nothing, whichever it is, and all the others do"""
    ids = integers(rng, 0, 31, 4, 20)

    def slopes(of, state, cotangent):
        made = of.make("embeddings.BertEmbeddings", Config(FIELDS)).load(state)
        return made.gradients(ids, cotangent=cotangent)

    submission.agrees(slopes, tables(rng), normal(rng, 4, 20, 16))


@pytest.mark.exercise("2.3")
@pytest.mark.hint("Nothing is dropped in evaluation, nor with a probability of 0.")
def test_nothing_is_dropped(submission, rng):
    """Nothing is dropped in evaluation, nor in training with a probability of 0"""
    ids, types = integers(rng, 0, 31, 2, 11), integers(rng, 0, 3, 2, 11)

    def both(of, state):
        still = embedded(of, state, ids, types, hidden_dropout_prob=0.9)
        return still, embedded(of, state, ids, types, train=True)

    for dtype in ("float32", "bfloat16"):
        submission.agrees(both, tables(rng), dtype=dtype)


@pytest.mark.exercise("2.3")
@pytest.mark.hint("The longest text fits exactly; one more token is refused, with both numbers.")
def test_one_token_too_many(submission, rng):
    """A text of exactly the longest length, and longer ones"""
    state, ids = tables(rng), integers(rng, 0, 31, 2, 60)
    submission.agrees(lambda of, state: embedded(of, state, ids[:, :24]), state)
    for length in (25, 60):
        with submission.raises(ValueError, length, 24):
            embedded(submission, state, ids[:, :length])


# --- 2.4 sliding windows ---


def windows_of(of, *given):
    """Cut a text into windows."""
    return of.call("embeddings.sliding_windows", *given)


def sizes_of_windows(rng, count):
    """Draw texts, window sizes and strides, small ones and odd ones among them."""
    for _ in range(count):
        size = int(rng.integers(1, 12))
        yield (
            rng.integers(0, 99, int(rng.integers(1, 50))).tolist(),
            size,
            int(rng.integers(0, size)),
        )


@pytest.mark.exercise("2.4")
@pytest.mark.hint("Drop from each window but the first what it shares, and you have the text.")
def test_the_windows_are_the_text(submission, rng):
    """The windows without what they share are the text again"""
    drawn = list(sizes_of_windows(rng, 40))

    def joined(of):
        windows = [windows_of(of, *given) for given in drawn]
        overlaps = [stride for *_, stride in drawn]
        return [
            first + [token for window in rest for token in window[stride:]]
            for (first, *rest), stride in zip(windows, overlaps, strict=True)
        ]

    submission.agrees(joined, truth=lambda: [text for text, *_ in drawn])


@pytest.mark.exercise("2.4")
@pytest.mark.hint("All windows but the last are full, and the last has something new.")
def test_all_windows_but_the_last_are_full(submission, rng):
    """All windows but the last are full, and the last has something new"""
    drawn = list(sizes_of_windows(rng, 40))

    def kinds(of):
        found = [(windows_of(of, *given), *given[1:]) for given in drawn]
        full = [all(len(w) == size for w in windows[:-1]) for windows, size, _ in found]
        new = [len(w) == 1 or len(w[-1]) > stride for w, _, stride in found]
        return full, new, [len(windows[-1]) <= size for windows, size, _ in found]

    submission.agrees(kinds, truth=lambda: ([True] * 40,) * 3)


@pytest.mark.exercise("2.4")
@pytest.mark.hint("What goes in as a tensor comes out as tensors, cut at the same places.")
def test_tensors_as_lists(submission, rng):
    """A tensor is cut where a list is cut, and one token at a time if need be"""
    ids = integers(rng, 0, 999, 23)
    calls = [(5, 4), (1, 0), (23, 22), (22, 1), (24, 23), (10**6, 5)]
    submission.agrees(lambda of: [windows_of(of, ids, *call) for call in calls])


@pytest.mark.exercise("2.4")
@pytest.mark.hint(
    "A stride that does not let the windows advance is refused, and so is a text of nothing."
)
def test_windows_that_never_advance(submission):
    """Strides and texts that make no windows are refused"""
    for text, size, stride in (
        ([1, 2, 3], 2, 2),
        ([1], 2, 3),
        ([1, 2], 2, -1),
        ([1], 0, 0),
        ([], 9, 0),
    ):
        with submission.raises(ValueError):
            submission.call("embeddings.sliding_windows", text, size, stride)


# --- 2.5 stitch the windows ---


def cut(text, size, stride):
    """Cut a text's vectors into windows."""
    starts = range(0, max(len(text) - stride, 1), size - stride)
    return [text[start : start + size] for start in starts]


def stitched(of, *given):
    """Put windows together."""
    return of.call("embeddings.stitch_windows", *given)


@pytest.mark.exercise("2.5")
@pytest.mark.hint("Windows of one text, stitched together, are that text.")
def test_windows_of_one_tensor(submission, rng):
    """Windows cut out of one tensor give it back"""
    for size, stride in ((7, 0), (7, 3), (8, 5), (5, 4), (1, 0)):
        text = normal(rng, int(rng.integers(size, 40)), 3)
        submission.agrees(
            lambda of, text, *sizes: stitched(of, cut(text, *sizes), len(text), sizes[1]),
            *(text, size, stride),
            truth=lambda text, *sizes: text,
        )


@pytest.mark.exercise("2.5")
@pytest.mark.hint("Ask of each token in which window it stands farthest from a cut.")
def test_which_window_each_token_is_from(submission, rng):
    """Which window each token is from, for many sizes"""
    for _ in range(12):
        size = int(rng.integers(2, 12))
        length, stride = int(rng.integers(size, 50)), int(rng.integers(0, size))
        windows = cut(torch.zeros(length, 2), size, stride)
        numbered = [window + number for number, window in enumerate(windows)]
        submission.agrees(stitched, numbered, length, stride)


@pytest.mark.exercise("2.5")
@pytest.mark.hint("Each token is taken once, from one window, and its gradient goes there alone.")
def test_padding_and_gradients_of_one_tensor(submission, rng):
    """Windows in one tensor, the last padded: each token is taken once, and no padding"""
    length, stride = 9 + 2 * 5 + 2, 4

    def taken(of, windows, cotangent):
        given = windows, length, stride
        slopes = of.gradients("embeddings.stitch_windows", *given, cotangent=cotangent)
        return stitched(of, *given), slopes["0"]

    submission.agrees(taken, normal(rng, 4, 9, 3), normal(rng, length, 3))


@pytest.mark.exercise("2.5")
@pytest.mark.hint(
    "Windows that these numbers do not make are refused, instead of stitched somehow."
)
def test_windows_of_another_text(submission, rng):
    """Windows whose number or sizes are not those of the text"""
    windows = cut(normal(rng, 20, 3), 8, 3)
    wrong = [([], 5, 1), (windows, 21, 3), (windows[:-1], 20, 3), (windows, 20, 2), (windows, 0, 3)]
    for given in [*wrong, ([windows[0][:7], *windows[1:]], 20, 3)]:
        with submission.raises(ValueError):
            stitched(submission, *given)


# --- 2.6 clinic ---


def masks(rng, batch, seq):
    """Draw masks with padding on both sides, none, and nothing else."""
    start, end = rng.integers(0, seq, batch), rng.integers(1, seq + 1, batch)
    places = torch.arange(seq)
    bounds = torch.from_numpy(start)[:, None], torch.from_numpy(end)[:, None]
    return ((places >= bounds[0]) & (places < bounds[1])).long()


@pytest.mark.exercise("2.6")
@pytest.mark.hint("Count the real tokens from the left; padding is 0 on either side.")
def test_padding_on_both_sides(submission, rng):
    """Padding on both sides of a row, on one, and nothing but padding"""
    mask = masks(rng, 50, 9)
    ids = integers(rng, 0, 90, 50, 9)
    submission.agrees(
        lambda of: of.call("clinic.mend_positions", ids, mask),
        truth=lambda: torch.stack([(row.cumsum(0) - 1) * row for row in mask]),
    )


@pytest.mark.exercise("2.6")
@pytest.mark.hint("More padding moves the positions along with their tokens and changes none.")
def test_more_padding_on_the_left(submission, rng):
    """More padding on the left moves the positions and changes none, whatever the ids"""
    mask, more = masks(rng, 6, 7), torch.zeros(6, 4).long()
    wide, low = torch.cat([more, mask], 1), torch.zeros(6, 11).long()

    def positions(of):
        moved = [of.call("clinic.mend_positions", ids, wide) for ids in (low, low + 7)]
        return [*moved, torch.cat([more, of.call("clinic.mend_positions", low[:, :7], mask)], 1)]

    submission.agrees(positions)


@pytest.mark.exercise("2.6")
@pytest.mark.hint("Row numbers are whole numbers, counted from 0, for one token as for many.")
def test_one_token_and_one_thousand(submission):
    """Rows of one token, and of a thousand"""
    for length in (1, 1000):
        ones = torch.ones(2, length).long()
        submission.agrees(
            lambda of, ids, mask: of.call("clinic.mend_positions", ids, mask),
            *(3 * ones, ones),
            truth=lambda ids, mask: torch.arange(mask.shape[1]).repeat(2, 1),
        )
