"""The hidden tests themselves: who is right passes them all, and each catches somebody."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bertlab.course import exercise as exercises
from bertlab.course import outline
from bertlab.course.exercises import chapter_6, chapter_7
from bertlab.course.grading import slices
from bertlab.course.grading.grader import (
    BrokenTests,
    ExerciseResult,
    Grader,
    HiddenTests,
    run_pytest,
)
from bertlab.course.grading.hidden import Submission, Truths
from bertlab.course.grading.sandbox import best_level
from bertlab.course.regions import replace_region, stub_module

from .hidden_double import HIDDEN, LocalSession, judged, parts_of

IDS = list(outline.entries())
SEED = 20_270_301


@pytest.fixture(scope="module")
def solutions(root) -> dict[str, str]:
    """The complete modules, name to text."""
    return {path.stem: path.read_text() for path in (root / "solutions/bertlab").glob("*.py")}


@pytest.fixture(scope="module")
def stubs(solutions) -> dict[str, str]:
    """The modules as a student gets them."""
    return {name: stub_module(text) for name, text in solutions.items()}


@pytest.fixture(scope="module")
def grader(complete, solutions, stubs) -> Iterator[Grader]:
    """A grader with a real sandbox, if there is one here."""
    made = Grader(HIDDEN, stubs, solutions, SEED, best_level())
    yield made
    made.close()


def reasons(result: ExerciseResult) -> dict[str, str]:
    """Why tests did not pass."""
    return {test.name: f"{test.reason}: {test.detail}" for test in result.tests if test.reason}


# --- who is right passes ---


@pytest.mark.parametrize("exercise_id", IDS)
def test_the_complete_package_gets_full_points(exercise_id, grader, solutions):
    (result,) = grader.grade(solutions, [exercise_id])
    assert result.status == "passed", reasons(result)
    assert result.points == result.max_points == outline.entries()[exercise_id].points


# --- who is wrong does not, and each test catches somebody ---


def kept_alone(layer: Any, x: Any, mask: Any = None) -> Any:
    """Return the layer's output as the patient of exercise 4.6 computes it."""
    x = x + layer.attention_norm(layer.dropout(layer.attention(x, mask)))
    return x + layer.feed_forward_norm(layer.feed_forward(x))


def undropped(layer: Any, x: Any, mask: Any = None) -> Any:
    """Return a healthy layer's output without the dropout of the attention's half."""
    x = layer.attention_norm(x + layer.attention(x, mask))
    return layer.feed_forward_norm(x + layer.feed_forward(x))


class NeverTheLast(chapter_6.Masking):
    """Draws from all pieces but the last: ``randint(vocab_size - 1)``."""

    def collated(
        self, ids: Any, tokenizer: Any, probability: float, source: Any, spared: Any
    ) -> Any:
        inputs, labels = super().collated(ids, tokenizer, probability, source, spared)
        put_in = (labels != -100) & (inputs != ids) & (inputs == tokenizer.vocab_size - 1)
        return inputs.masked_fill(put_in, 0), labels


class MaskedMore(chapter_6.Adaptation):
    """Hides a fifth of the tokens."""

    def masked(self, ids: Any, tokenizer: Any, generator: Any) -> Any:
        return chapter_6.Masking()(ids, tokenizer, 0.2, generator)


class AlwaysTheSameSpread(chapter_7.SequenceClassifier):
    """Draws the head's weights with 0.02, whatever the config says."""

    def fresh(self, layer: torch.nn.Linear) -> None:
        torch.nn.init.normal_(layer.weight, 0, 0.02)
        torch.nn.init.zeros_(layer.bias)


class SeedIgnored(chapter_7.Tuning):
    """Draws as for seed 0, whatever the settings say."""

    def kept(self, settings: Any) -> Any:
        return replace(settings, seed=0)


class EveryOtherWord(chapter_7.MoreExamples):
    """Chooses half of the words, whatever the probability between 0 and 1."""

    def is_chosen(self, draw: float, probability: float) -> bool:
        return draw < (probability if probability in (0, 1) else 0.5)


#: Wrong parts beside the misconceptions: of those, some do what the notebook's cases do not show.
MUTANTS: dict[str, dict[str, Any]] = {
    "4.6": {
        "the patient is left as it is": {"mend_residual": kept_alone},
        "a dropout got lost": {"mend_residual": undropped},
    },
    "6.1": {"the last piece is never drawn": {"mask_tokens": NeverTheLast()}},
    "6.6": {"a fifth of the tokens is hidden": {"adapt": MaskedMore().adapt}},
    "7.2": {"the spread is always 0.02": {"SequenceClassifier": AlwaysTheSameSpread}},
    "7.5": {"the seed is always 0": {"fine_tune": SeedIgnored().fine_tune}},
    "7.6": {"half of the words are chosen": {"augment": EveryOtherWord().augment}},
}


class Nothing(torch.nn.Module):
    """A class that takes anything and returns None."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None

    def forward(self, *args: Any, **options: Any) -> None:
        """Return nothing."""


def nothing(exercise_id: str) -> dict[str, Any]:
    """Parts of an exercise that return None."""
    return {
        target: Nothing if target.split(".")[1][0].isupper() else lambda *args, **options: None
        for target in outline.entries()[exercise_id].targets
    }


@pytest.mark.parametrize("exercise_id", IDS)
def test_who_is_right_passes_who_is_wrong_does_not_and_each_test_catches_one(exercise_id, complete):
    exercise = exercises.load(exercise_id)
    wrong = {m.name: m.parts for m in exercise.misconceptions} | MUTANTS.get(exercise_id, {})
    packages = {name: parts_of(exercise, parts) for name, parts in wrong.items()}
    packages |= {
        "complete": {},
        "reference": parts_of(exercise, {}),
        "nothing": nothing(exercise_id),
    }
    if exercise_id == "4.6":  # its reference needs more of the patient than its parts
        del packages["reference"]
    results = judged(exercise_id, packages, SEED + 1)
    why = {name: reasons(result) for name, result in results.items()}

    assert not why["complete"] and not why.get("reference"), "right, and loses points"
    for name in wrong:
        assert results[name].points < results[name].max_points, f"{name}: loses no points"
    assert results["nothing"].points == 0, why["nothing"]
    found = {test.reason for result in results.values() for test in result.tests}
    assert found <= {"", "wrong", "raised"}, why
    caught = {test for name in wrong for test in why[name]}
    assert caught == {test.name for test in results["complete"].tests}, "some catch nobody"


@pytest.mark.parametrize("exercise_id", IDS)
def test_an_empty_stub_gets_nothing_and_is_to_do(exercise_id, grader, stubs):
    (result,) = grader.grade(
        stubs, [exercise_id], dict.fromkeys(IDS[: IDS.index(exercise_id)], False)
    )
    assert (result.points, result.status, result.reason) == (0, "error", "todo"), reasons(result)
    assert {test.reason for test in result.tests} == {"todo"}, reasons(result)


def test_an_exercise_whose_dependency_is_wrong_is_judged_on_a_stand_in(grader, solutions):
    wrong = "def split_heads(x, num_heads):\n    return x\n\n\ndef merge_heads(x):\n    return x\n"
    handed_in = {"attention": replace_region(solutions["attention"], "3.2", wrong)}
    first, second = grader.grade(handed_in, ["3.2", "3.5"])
    assert first.status == "failed" and first.points == 0
    assert second.status == "passed" and second.points == second.max_points
    assert second.stand_ins == ["3.2"]


# --- what a test must say ---


def functions() -> list[tuple[Path, ast.FunctionDef]]:
    """Every hidden test."""
    return [
        (path, node)
        for path in sorted(HIDDEN.glob("test_*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def marks(test: ast.FunctionDef) -> dict[str, Any]:
    """The marks of a test and their arguments."""
    calls = [node for node in test.decorator_list if isinstance(node, ast.Call)]
    return {ast.unparse(call.func).split(".")[-1]: ast.literal_eval(call.args[0]) for call in calls}


def test_every_exercise_has_two_tests_of_its_own():
    named = [marks(test).get("exercise") for _, test in functions()]
    assert all(named.count(exercise_id) >= 2 for exercise_id in IDS), named
    assert set(named) == {*IDS, None}


def test_every_test_has_a_sentence_and_a_hint_for_the_student():
    said = [(ast.get_docstring(test) or "", marks(test).get("hint", "")) for _, test in functions()]
    assert all(name and "\n" not in name and len(hint.split()) >= 6 for name, hint in said)
    assert len(set(said)) == len(said)


# --- how a test judges ---


def agrees(parts: dict[str, Any], experiment: Any, *inputs: Any, **options: Any) -> None:
    """Let a package with these parts agree with the reference."""
    Submission(LocalSession(parts), "2.1", SEED, Truths()).agrees(experiment, *inputs, **options)


def normalized(of: Any, x: Any) -> Any:
    return of.call("embeddings.layer_norm", x, torch.ones(8).to(x), torch.zeros(8).to(x))


@pytest.mark.parametrize("factor", [1 + 1e-5, float("nan"), float("inf")])
def test_what_departs_does_not_agree(factor, complete):
    x = torch.arange(24.0).view(3, 8) ** 2
    norm = complete.embeddings.layer_norm
    agrees({}, normalized, x)
    with pytest.raises(AssertionError):
        agrees({"embeddings.layer_norm": lambda *a: norm(*a) * factor}, normalized, x)


@pytest.mark.parametrize("value", [None, "text", 3, [1.0], {"0": 1}, torch.ones(3, 8).double()])
def test_what_is_of_another_kind_does_not_agree(value, complete):
    with pytest.raises(AssertionError):
        agrees({"embeddings.layer_norm": lambda *a: value}, normalized, torch.randn(3, 8))


def test_an_argument_changed_in_place_does_not_agree(complete):
    norm = complete.embeddings.layer_norm
    changing = {"embeddings.layer_norm": lambda x, *more: norm(x, *more) + 0 * x.add_(1)}
    with pytest.raises(AssertionError, match="in place"):
        agrees(changing, normalized, torch.randn(3, 8))


def test_an_error_counts_only_if_it_is_the_right_one_and_says_enough(complete):
    def refusing(error: Exception) -> Any:
        def sliding_windows(*args: Any) -> None:
            raise error

        parts = {"embeddings.sliding_windows": sliding_windows}
        return Submission(LocalSession(parts), "2.4", SEED)

    class Own(ValueError):
        pass

    for error, passes in (
        (ValueError("stride is 9"), True),
        (Own("stride is 9"), True),
        (ValueError("no"), False),
        (TypeError("stride is 9"), False),
        (AssertionError("stride is 9"), False),
    ):
        submission, outcome = refusing(error), "passes"
        try:
            with submission.raises(ValueError, 9):
                submission.call("embeddings.sliding_windows", [1], 9, 9)
        except AssertionError:
            outcome = "fails"
        assert (outcome == "passes") is passes, error


def test_a_witness_notes_what_it_is_called_with_and_when_it_stops(complete):
    of = Submission(LocalSession({}), "2.1", SEED)
    layer, hook = of.make("torch.nn.Linear", 2, 2), of.witness(stop=2)
    layer.call("register_forward_pre_hook", hook)
    x = torch.ones(1, 2)
    layer(x)
    layer.call("eval")
    with pytest.raises(InterruptedError):
        layer(x)
    (first_mode, (first,)), (second_mode, _) = hook.get("calls")
    assert (first_mode, second_mode) == (True, False) and torch.equal(first, x)
    assert torch.equal(of.witness(x)(), x)


def test_a_value_that_cannot_travel_is_said_to_the_author(complete):
    with pytest.raises(TypeError, match="cannot send a set"):
        Submission(LocalSession({}), "3.2", SEED).call("attention.merge_heads", {1, 2})


def test_a_broken_file_is_said_before_anything_is_graded(tmp_path, solutions):
    (tmp_path / "test_broken.py").write_text("import torch\ndef test_it(:\n")
    with pytest.raises(BrokenTests, match="test_broken"):
        Grader(tmp_path, {}, solutions, SEED, "none")


def test_a_probe_that_cannot_be_called_by_its_name_is_refused():
    exercise = exercises.load("3.2")

    def inside(part: Any, **inputs: Any) -> Any:
        return exercise.probe(part, **inputs)

    assert slices.helpers_of(exercise)
    for probe in (inside, lambda part: part, partial(exercise.probe)):
        with pytest.raises(slices.NamelessProbe, match="top level of its file"):
            slices.helpers_of(replace(exercise, probe=probe))


# --- the handbook's example ---


def test_the_example_of_the_handbook_is_short_and_works(root, tmp_path, complete):
    handbook = (root / "solutions" / "README.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(import pytest\n.*?)```", handbook, re.DOTALL)
    assert example is not None
    test = re.search(r"@pytest.*", example[1], re.DOTALL)
    assert test is not None and len(test[0].strip().splitlines()) < 10
    (tmp_path / "test_of_the_handbook.py").write_text(example[1])
    flipped = {"attention.merge_heads": lambda x: x.transpose(1, 2).flatten(2).flip(-1)}
    for parts, status in (({}, "passed"), (flipped, "failed")):
        plugin = HiddenTests(Submission(LocalSession(parts), "3.2", SEED))
        run_pytest(tmp_path, plugin)
        (result,) = plugin.results
        assert result.status == status, result
        assert result.name and result.hint
