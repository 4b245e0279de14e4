"""The judge itself: what must never pass, and what must always be said."""

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bertlab.course import exercise as exercises
from bertlab.course import judging
from bertlab.course.exercise import Case, Exercise, Misconception
from bertlab.course.exercises.plain import error_of

HINTS = ("Look.", "Look again.", "Look at the sign.")


def softmax(x):
    return torch.softmax(x, dim=-1)


def wrong_axis(x):
    return torch.softmax(x, dim=0)


def toy(cases=None, probe=None) -> Exercise:
    """An exercise with the outline's entry of 2.1, on a softmax."""

    def drawn(rng):
        for rows in (3, 4, 5):
            yield Case(f"{rows} rows", {"x": torch.from_numpy(rng.normal(size=(rows, 7))).float()})

    return Exercise(
        id="2.1",
        reference={"layer_norm": softmax},
        reference_name="torch.softmax",
        cases=cases or drawn,
        probe=probe or (lambda part, x: part.layer_norm(x)),
        misconceptions=(
            Misconception(
                "the axis is the wrong one", "Over the last axis.", {"layer_norm": wrong_axis}
            ),
        ),
        hints=HINTS,
    )


def verdict_of(function, **options) -> judging.Verdict:
    return judging.judge(toy(**options), SimpleNamespace(layer_norm=function))


def test_the_reference_passes():
    assert verdict_of(softmax).status == "passed"


def test_an_equal_formula_in_other_order_passes():
    assert verdict_of(lambda x: x.exp() / x.exp().sum(-1, keepdim=True)).status == "passed"


def test_a_bias_of_a_millionth_fails():
    assert verdict_of(lambda x: softmax(x) + 1e-5).status == "failed"


def test_half_precision_on_the_way_fails():
    assert verdict_of(lambda x: softmax(x.bfloat16()).float()).status == "failed"


def test_a_misconception_is_named():
    verdict = verdict_of(wrong_axis)
    assert verdict.misconception == "the axis is the wrong one"
    assert verdict.points == 0


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: x * float("nan"), "NaN"),
        (lambda x: softmax(x)[:, :-1], "shape"),
        (lambda x: softmax(x).double(), "dtype"),
        (lambda x: None, "None"),
        (lambda x: softmax(x).numpy(), "ndarray"),
        (lambda x: (softmax(x), x), "tuple"),
        (lambda x: x.no_such_method(), "AttributeError"),
        (lambda x: softmax(x.add_(1.0)), "in place"),
        (lambda x: softmax(x).to_sparse(), ""),
        (lambda x: sys.exit(0), "called sys.exit"),
        (lambda x: eval("no_such_name"), "runs inside bertlab/embeddings.py"),
        (lambda x: float("inf") * torch.ones_like(x), "off by inf"),
    ],
)
def test_what_is_wrong_is_said(function, says):
    verdict = verdict_of(function)
    assert verdict.status == "failed"
    assert says in verdict.diagnosis + str(verdict.cases)


def test_one_nan_among_right_values_never_passes():
    def nearly(x):
        right = softmax(x).clone()
        right[0, 0] = float("nan")
        return right

    assert verdict_of(nearly).status == "failed"


def test_an_exercise_without_cases_is_an_error_and_not_a_pass():
    with pytest.raises(judging.NothingJudged):
        verdict_of(softmax, cases=lambda rng: iter(()))


def test_a_reference_that_fails_is_an_error_and_not_a_pass():
    def broken(part, x):
        raise RuntimeError("the probe is broken")

    with pytest.raises(judging.NothingJudged):
        verdict_of(softmax, probe=broken)


def test_not_implemented_is_to_do_only_for_this_exercise():
    def stub(x):
        raise NotImplementedError("exercise 2.1")

    def other(x):
        raise NotImplementedError("exercise 1.1")

    assert verdict_of(stub).status == "todo"
    assert verdict_of(other).status == "failed"


def test_padding_is_not_compared():
    positions = torch.tensor([[True, True, False]])

    def cases(rng):
        x = torch.from_numpy(rng.normal(size=(1, 3, 4))).float()
        yield Case("padding at the end", {"x": x}, positions={"output": positions})

    def noisy_padding(x):
        right = softmax(x).clone()
        right[:, 2] = 9.0
        return right

    def noisy_token(x):
        right = softmax(x).clone()
        right[:, 1] = 9.0
        return right

    assert verdict_of(noisy_padding, cases=cases).status == "passed"
    assert verdict_of(noisy_token, cases=cases).status == "failed"


def test_integers_and_text_are_compared_exactly():
    def cases(rng):
        yield Case("words", {"words": ["a", "b"]})

    def probe(part, words):
        return {"ids": part.layer_norm(words)}

    exercise = dataclasses.replace(
        toy(cases, probe), reference={"layer_norm": lambda words: [1, 2]}, misconceptions=()
    )

    def judged(value):
        return judging.judge(exercise, SimpleNamespace(layer_norm=lambda words: value)).status

    assert judged([1, 2]) == "passed"
    for wrong in ([1, 3], [1, 2, 3], (1, 2), [1.0, 2], [True, 2], torch.tensor([1, 2]), None):
        assert judged(wrong) == "failed", wrong


def test_judging_leaves_the_random_generators_as_they_were():
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), str(np.random.get_state())
    verdict_of(lambda x: softmax(x) + torch.rand(1) * 0 + np.random.rand() * 0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert str(np.random.get_state()) == before[1]


def test_judging_leaves_the_default_type_as_it_was():
    def careless(x):
        torch.set_default_dtype(torch.float64)
        return softmax(x)

    verdict_of(careless)
    assert torch.get_default_dtype() is torch.float32


def test_an_argument_that_needs_its_gradient_must_not_be_changed_either():
    verdict = verdict_of(
        lambda x: softmax(x.mul_(2)),
        probe=lambda part, x: part.layer_norm(x.clone().requires_grad_()),
    )
    assert "your part changed an argument" in verdict.diagnosis


def test_a_message_that_lacks_a_word_is_said_plainly():
    def refuse(x):
        raise ValueError("x has 12 columns, but 3 are allowed")

    def vague(x):
        raise ValueError("wrong shape")

    probe = lambda part, x: error_of(lambda: part.layer_norm(x), 12)  # noqa: E731
    exercise = dataclasses.replace(
        toy(probe=probe), reference={"layer_norm": refuse}, misconceptions=()
    )
    assert judging.judge(exercise, SimpleNamespace(layer_norm=refuse)).status == "passed"
    verdict = judging.judge(exercise, SimpleNamespace(layer_norm=vague))
    assert "its message must mention '12'" in verdict.diagnosis


def test_the_tolerance_is_the_references_own_error_and_not_a_constant():
    """Scaling inputs up scales the tolerance with it; nothing is picked by hand."""
    small = judging.judge(toy(), SimpleNamespace(layer_norm=softmax))
    scaled = dataclasses.replace(
        toy(), reference={"layer_norm": lambda x: 1e6 * softmax(x)}, misconceptions=()
    )
    large = judging.judge(scaled, SimpleNamespace(layer_norm=lambda x: 1e6 * softmax(x)))
    assert small.tolerance is not None and large.tolerance is not None
    assert 1e5 < large.tolerance / small.tolerance < 1e7


@pytest.mark.skipif(
    not (torch.cuda.is_available() or torch.backends.mps.is_available()),
    reason="needs a GPU; the same test runs on the CPU above",
)
def test_the_reference_passes_on_the_gpu():
    device = "cuda" if torch.cuda.is_available() else "mps"
    for chapter in (2, 3):
        for exercise in exercises.of_chapter(chapter):
            parts = SimpleNamespace(**exercise.reference)
            assert judging.judge(exercise, parts, device=device).status == "passed"
