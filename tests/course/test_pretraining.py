"""Pretraining: what is masked, what is a pair, what a step moves, and that a killed run resumes."""

import copy
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bertlab.course import exercise, judging
from bertlab.course.exercises import chapter_6

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 20,
}
STILL: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def model_of(complete, name="BertForPreTraining", seed=0, **changes):
    torch.manual_seed(seed)
    return getattr(complete.heads, name)(complete.config.BertConfig(**{**SIZES, **changes}))


def batch_of(lengths, labelled, seed=0, pairs=True):
    """A batch of texts with these lengths, and so many labelled places all together."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, 97, mask.shape, generator=generator) * mask
    labels, real = torch.full_like(ids, -100), mask.nonzero()
    for text, place in real[torch.randperm(len(real), generator=generator)][:labelled].tolist():
        labels[text, place] = 7 + place
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    follows = torch.randint(2, (len(lengths),), generator=generator)
    return batch | ({"next_sentence_label": follows} if pairs else {})


def settings_of(complete, **changes):
    return complete.pretraining.PretrainingSettings(**{"learning_rate": 0.01, **changes})


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def tokenizer(complete):
    from bertlab.course.reference import vocabulary_file

    return complete.tokenizer.WordPieceTokenizer.from_vocab_file(vocabulary_file())


@pytest.fixture(scope="module")
def their_tokenizer():
    from bertlab.course.reference import minilm_folder

    return transformers.AutoTokenizer.from_pretrained(minilm_folder())


# 6.1: masks


@pytest.mark.parametrize("whole_word", [False, True])
def test_both_tokenizers_give_the_same_masks(complete, tokenizer, their_tokenizer, whole_word):
    text = "Tokenization of unaffordable words, 3.14 of them, is unbelievably easy \U0001f642"
    ids = torch.tensor([tokenizer.encode(text)] * 50)
    assert tokenizer.unk_token_id in ids
    masked = [
        complete.pretraining.mask_tokens(
            ids, one, generator=torch.Generator().manual_seed(1), whole_word=whole_word
        )
        for one in (tokenizer, their_tokenizer)
    ]
    assert all(torch.equal(*both) for both in zip(*masked, strict=True))
    chosen = masked[0][1] != -100
    assert not (chosen & torch.isin(ids, torch.tensor(tokenizer.all_special_ids))).any()
    assert chosen.any()


def shifted(**split: float) -> chapter_6.Masking:
    return chapter_6._Split(**split)


class Rarer(chapter_6.Masking):
    """Chooses 14.25% for 15%, and 95 of 100 words for all."""

    def __call__(self, ids, tokenizer, probability=0.15, generator=None, whole_word=False):
        return super().__call__(ids, tokenizer, 0.95 * probability, generator, whole_word)


OFF_BY_5_PERCENT = {
    "14.25% are chosen": Rarer(),
    "76% become [MASK]": shifted(mask_replace_prob=0.76, random_replace_prob=0.12),
    "84% become [MASK]": shifted(mask_replace_prob=0.84, random_replace_prob=0.08),
    "9.5% become another piece": shifted(random_replace_prob=0.095),
    "10.5% become another piece": shifted(random_replace_prob=0.105),
}


def is_noticed(exercise_id, parts, case_name, seed):
    """Whether these parts differ from the reference on one case."""
    one = exercise.load(exercise_id)
    standards = judging.Standards(one, seed)
    (case,) = (each for each in standards.cases if case_name in each.name)
    assert standards.of(case).difference(standards.outcome(case, standards.reference)) is None
    return standards.of(case).difference(standards.outcome(case, parts)) is not None


@pytest.mark.parametrize("name", OFF_BY_5_PERCENT)
def test_a_share_that_is_off_by_5_percent_is_noticed(name):
    case = "15%" if name == "14.25% are chosen" else "all of them"
    for seed in range(3):
        parts = SimpleNamespace(mask_tokens=OFF_BY_5_PERCENT[name])
        assert is_noticed("6.1", parts, case, seed)


def test_pairs_of_which_half_plus_5_percent_are_true_are_noticed():
    class Truer(chapter_6.Pairs):
        half = 0.525

    for seed in range(3):
        parts = SimpleNamespace(sentence_pairs=Truer())
        assert is_noticed("6.2", parts, "thirty documents", seed)


def test_the_false_alarm_of_a_share_is_what_is_stated():
    """The exact test refuses with probability at most ALARM, and nearly that much."""
    from scipy.stats import binom

    n, share = 5_000, 0.15
    refused = [k for k in range(n + 1) if chapter_6.as_asked(k, n, share) != "as asked"]
    probability = binom.pmf(refused, n, share).sum()
    assert chapter_6.ALARM / 4 < probability <= chapter_6.ALARM
    kept = set(range(n + 1)) - set(refused)
    assert kept == set(range(min(kept), max(kept) + 1))
    assert 60 * chapter_6.ALARM < 1e-6


def test_an_exercise_judges_no_more_shares_than_its_alarm_allows(complete, monkeypatch):
    asked = []
    right = chapter_6.as_asked
    monkeypatch.setattr(chapter_6, "as_asked", lambda *a: asked.append(a) or right(*a))
    for exercise_id in ("6.1", "6.2", "6.6"):
        asked.clear()
        one = exercise.load(exercise_id)
        parts = SimpleNamespace(**{n: getattr(complete.pretraining, n) for n in one.names})
        standards = judging.Standards(one)
        assert judging.judge(one, parts, standards=standards).status == "passed"
        assert len(asked) <= 2 * 60  # the reference is looked at too


def test_a_masking_loop_over_tokens_passes():
    """Written token by token, with another order of draws, and 80/10/10 by one number."""

    def mask_tokens(input_ids, tokenizer, probability=0.15, generator=None, whole_word=False):
        shape, special = input_ids.shape, set(tokenizer.all_special_ids)
        fate, chance = torch.rand(2, *shape, generator=generator).tolist()
        pieces = torch.randint(0, len(tokenizer), shape, generator=generator).tolist()
        inputs, labels = input_ids.clone().tolist(), torch.full(shape, -100).tolist()
        known = tokenizer.convert_ids_to_tokens(range(tokenizer.vocab_size))
        for row, (out, label) in enumerate(zip(inputs, labels, strict=True)):
            draw = 1.0
            for place, token in enumerate(list(out)):
                if not (whole_word and place and known[token].startswith("##")):
                    draw = chance[row][place]
                if token in special or draw >= probability:
                    continue
                label[place] = token
                if fate[row][place] < 0.1:
                    out[place] = pieces[row][place]
                elif fate[row][place] < 0.9:
                    out[place] = tokenizer.mask_token_id
        return torch.tensor(inputs), torch.tensor(labels)

    verdict = judging.judge(exercise.load("6.1"), SimpleNamespace(mask_tokens=mask_tokens))
    assert verdict.status == "passed", verdict.diagnosis


# 6.2: pairs


def test_pairs_are_the_same_with_both_tokenizers(complete, tokenizer, their_tokenizer):
    documents = [["A kernel is small.", "It slides.", "It stops."], ["Axes are named.", "Yes."]]
    ours, theirs = (
        complete.pretraining.sentence_pairs(documents, one, 12, random.Random(3))
        for one in (tokenizer, their_tokenizer)
    )
    assert ours == theirs
    assert len(ours) == 3


def test_no_pairs_come_of_no_neighbors_and_one_document_is_refused(complete, tokenizer):
    pairs = complete.pretraining.sentence_pairs
    assert pairs([["one"], ["two"], []], tokenizer, 16, random.Random(0)) == []
    for seed in range(5):  # whatever is drawn
        with pytest.raises(ValueError, match="at least 2"):
            pairs([["one", "two"], []], tokenizer, 16, random.Random(seed))


# 6.4: the optimizer


@pytest.mark.parametrize("name", ["BertForPreTraining", "BertForMaskedLM"])
def test_groups_are_those_of_transformers_trainer(complete, name):
    theirs = getattr(transformers, name)(transformers.BertConfig(**SIZES))
    args: Any = SimpleNamespace(get_decay_parameter_names=None)
    wanted = transformers.Trainer.get_decay_parameter_names(args, theirs)
    ours = model_of(complete, name)
    renamed = complete.weights.hf_name_map(ours.config)
    decayed, others = complete.pretraining.parameter_groups(ours, 0.1)
    names = {id(p): n for n, p in ours.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {
        renamed[n] for n, _ in theirs.named_parameters() if n in wanted
    }
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_a_bert_step_moves_to_where_torchs_optimizer_moves(complete):
    ours, theirs = model_of(complete).double(), model_of(complete).double()
    groups = complete.pretraining.parameter_groups
    mine = complete.pretraining.AdamW(groups(ours, 0.1), lr=0.01)
    other = torch.optim.AdamW(groups(theirs, 0.1), lr=0.01)
    for step in range(3):
        for model, optimizer in ((ours, mine), (theirs, other)):
            torch.manual_seed(step)
            model(**batch_of([9, 6], 5, step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    # Adam divides by the gradient's size, so rounding in a tiny gradient comes out enlarged.
    assert (weights(ours) - weights(theirs)).abs().max() < 1e-10
    assert (weights(ours) - weights(model_of(complete).double())).abs().max() > 1e-2


def test_the_fused_optimizer_gives_the_exercises_numbers(complete):
    parameters = [nn.Parameter(torch.randn(5, 3).double()) for _ in range(2)]
    other = copy.deepcopy(parameters)
    mine = complete.pretraining.AdamW(parameters, lr=0.02)
    fused = complete.pretraining.fused_adamw([{"params": other, "lr": 0.02}])
    for _ in range(4):
        for one, two in zip(parameters, other, strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        mine.step()
        fused.step()
    for one, two in zip(parameters, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-13, atol=1e-14)


# 6.5: one batch out of micro-batches


def gradient_of_the_first_step(complete, model, micro_batches, **changes):
    found = []

    def note(optimizer, args, kwargs):
        found.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))

    handle = register_optimizer_step_pre_hook(note)
    settings = settings_of(
        complete,
        total_steps=1,
        accumulation_steps=len(micro_batches),
        max_grad_norm=None,
        **changes,
    )
    try:
        losses = complete.pretraining.pretrain(model, micro_batches, settings)
    finally:
        handle.remove()
    return found[0], losses[0]


UNLIKE = [([9], 1), ([7, 5, 6, 3], 12), ([4, 2], 3), ([8, 8, 8], 0)]


@pytest.mark.parametrize("pairs", [True, False])
def test_accumulated_gradients_are_those_of_the_large_batch(complete, pairs):
    micro_batches = [batch_of(*shape, seed=i, pairs=pairs) for i, shape in enumerate(UNLIKE)]
    large = chapter_6.joined(micro_batches)
    name = "BertForPreTraining" if pairs else "BertForMaskedLM"
    model = model_of(complete, name, **STILL).double()
    expected = model(**large).loss
    expected.backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    found, loss = gradient_of_the_first_step(complete, model, micro_batches)
    assert (found - wanted).abs().max() < 1e-10
    assert abs(loss - expected.item()) < 1e-10


def test_equal_weights_for_unlike_micro_batches_would_be_noticed(complete):
    """The mutant of the test above: a mean of means is off by far more than 1e-10."""
    micro_batches = [batch_of(*shape, seed=i, pairs=False) for i, shape in enumerate(UNLIKE[:3])]
    model = model_of(complete, "BertForMaskedLM", **STILL).double()
    means = torch.stack([model(**batch).loss for batch in micro_batches]).mean()
    large = model(**chapter_6.joined(micro_batches)).loss
    assert abs(means - large) > 1e-3


def test_a_step_of_base_models_is_transformers(complete):
    """Loss and weights after two steps, beside Transformers' model, schedule and optimizer."""
    theirs: Any = transformers.BertForPreTraining(transformers.BertConfig(**{**SIZES, **STILL}))
    theirs.double().train()
    ours = model_of(complete, **STILL).double()
    complete.weights.load_hf_state_dict(ours, theirs.state_dict())
    data = [batch_of([9, 6], 5), batch_of([7, 8], 6, 1)]
    settings = settings_of(complete, total_steps=2, weight_decay=0.1)
    losses = complete.pretraining.pretrain(ours, data, settings)
    args: Any = SimpleNamespace()
    decayed = set(transformers.Trainer.get_decay_parameter_names(args, theirs))
    groups = [
        {"params": [p for n, p in theirs.named_parameters() if (n in decayed) is kind]}
        | {"weight_decay": decay}
        for kind, decay in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, 2)
    for batch, loss in zip(data, losses, strict=True):
        expected = theirs(**batch).loss
        expected.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert abs(loss - expected.item()) < 1e-9
    with torch.no_grad():
        batch = data[0]
        again, wanted = ours.eval()(**batch).loss, theirs.eval()(**batch).loss
    torch.testing.assert_close(again, wanted, rtol=1e-7, atol=1e-8)


def test_a_model_without_padding_has_the_same_losses_and_gradients(complete):
    for name in ("BertForPreTraining", "BertForMaskedLM"):
        model = model_of(complete, name, **STILL).double()
        batch = batch_of([9, 4, 6, 4], 7, pairs=name == "BertForPreTraining")
        plain = model(**batch).loss
        plain.backward()
        wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
        packed = complete.pretraining.WithoutPadding(model)(**batch).loss
        packed.backward()
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert abs(packed - plain) < 1e-12
        assert (found - wanted).abs().max() < 1e-12


def test_no_text_attends_to_another_when_they_are_packed(complete):
    model = complete.pretraining.WithoutPadding(model_of(complete, **STILL).eval())
    batch = batch_of([9, 4, 6], 7)
    with torch.no_grad():
        before = model(**batch).seq_relationship_logits
        changed = {**batch, "input_ids": batch["input_ids"].clone()}
        changed["input_ids"][0, :9] = 11
        after = model(**changed).seq_relationship_logits
    assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0], after[0])


# precision


def test_bf16_keeps_the_weights_in_float32_and_learns_alike(complete):
    curves = {}
    for precision in ("float32", "bf16"):
        model = model_of(complete, **STILL)
        settings = settings_of(complete, total_steps=25, precision=precision)
        curves[precision] = complete.pretraining.pretrain(model, [batch_of([9, 6], 5)], settings)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    full, half = curves["float32"], curves["bf16"]
    assert full != half  # it did run in 16 bits
    assert full[-1] < full[0] - 2
    assert max(abs(a - b) for a, b in zip(full, half, strict=True)) < 0.2


def test_an_fp16_step_that_overflows_is_left_out(complete):
    class Overflowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.factors = [1e30, 1.0, 1.0]

        def forward(self, **batch: Any) -> Any:
            return SimpleNamespace(loss=(self.weight * self.factors.pop(0)).sum() * 1e4)

    model, moved = Overflowing(), []
    settings = settings_of(complete, total_steps=3, precision="fp16", weight_decay=0.5)
    data = [{"labels": torch.zeros(1, 1, dtype=torch.long)}]
    complete.pretraining.pretrain(
        model, data, settings, lambda *step: moved.append(model.weight.detach().clone())
    )
    assert torch.equal(moved[0], torch.ones(3))  # not even decayed
    assert not torch.equal(moved[1], moved[0])
    assert moved[-1].isfinite().all()


# checkpoints


DRIVER = """
import json, os, random, signal, sys
import numpy as np, torch
import torch._dynamo  # what the first step imports, once for all children
from bertlab.config import BertConfig
from bertlab.heads import BertForPreTraining
from bertlab.pretraining import PretrainingSettings, pretrain

folder, kills = sys.argv[1], json.loads(sys.argv[2])


def data():
    generator = torch.Generator().manual_seed(5)
    while True:
        shape = (3, 6 + random.randrange(4))
        ids = torch.randint(5, 60, shape, generator=generator) + int(np.random.randint(9))
        labels = torch.where(torch.rand(shape) < 0.3, ids, -100)
        labels[0, 0] = 7
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels,
               "next_sentence_label": torch.randint(2, (3,))}


def train(name, lifetime):
    torch.manual_seed(1)
    model = BertForPreTraining(BertConfig(**SIZES))
    goes_on = os.path.exists(f"{folder}/{name}")
    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(os.getpid() if goes_on else 1)  # what is drawn now must not matter

    done = []

    def on_step(step, loss):
        done.append(step)
        if len(done) == lifetime:
            os.kill(os.getpid(), signal.SIGKILL)

    settings = PretrainingSettings(learning_rate=0.01, warmup_steps=3, total_steps=70,
        accumulation_steps=2, checkpoint=f"{folder}/{name}", checkpoint_every=3)
    losses = pretrain(model, data(), settings, on_step)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), losses


def in_a_child(name, lifetime):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        weights, losses = train(name, lifetime)
        with open(f"{folder}/{name}.end", "wb") as file:
            file.write(weights.numpy().tobytes() + json.dumps(losses).encode())
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)


in_a_child("whole", None)
signals = [in_a_child("killed", steps) for steps in kills]
print(json.dumps([signals, in_a_child("killed", None)]))
"""


def test_a_run_killed_at_twenty_random_steps_ends_with_the_same_weights(complete, tmp_path):
    """Twenty processes, each killed after 1 to 7 steps of its own, then one for the rest."""
    kills = random.Random(7).choices(range(1, 8), k=20)
    source = DRIVER.replace("SIZES", repr(SIZES))
    package = os.path.dirname(os.path.dirname(complete.pretraining.__file__))
    done = subprocess.run(
        [sys.executable, "-c", source, str(tmp_path), json.dumps(kills)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    signals, last = json.loads(done.stdout)
    assert signals == [signal.SIGKILL] * 20
    assert last == 0
    assert (tmp_path / "whole.end").read_bytes() == (tmp_path / "killed.end").read_bytes()


class Unplugged(Exception):
    pass


def stopped_run(complete, path, data, stop=None, seed=0, **changes):
    """Train a fresh model, until it is stopped; its weights, and the losses if it was not."""
    losses: Any = None
    model = model_of(complete)
    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(seed)
    changes = {"total_steps": 12, "checkpoint_every": 2, **changes}
    settings = settings_of(complete, checkpoint=path, **changes)

    def on_step(step, loss):
        if step == stop:
            raise Unplugged

    with suppress(Unplugged):
        losses = complete.pretraining.pretrain(model, data, settings, on_step)
    return weights(model), losses


def loader():
    """PyTorch's own, shuffled by the global generator: 5 batches of 2 in a round."""
    texts = [batch_of([8], 3, seed) for seed in range(10)]
    joined: Any = [{k: x[0] for k, x in text.items()} for text in texts]
    return torch.utils.data.DataLoader(joined, batch_size=2, shuffle=True)


def loader_with_a_generator():
    texts: Any = [{k: x[0] for k, x in batch_of([8], 3, seed).items()} for seed in range(10)]
    generator = torch.Generator().manual_seed(3)
    return torch.utils.data.DataLoader(texts, batch_size=2, shuffle=True, generator=generator)


class WithState:
    """Data that knows where it is; reading it from the beginning would be noticed."""

    def __init__(self) -> None:
        self.number = 0
        self.made: list[int] = []

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]

    def __iter__(self) -> Any:
        while True:
            self.made.append(self.number)
            self.number += 1
            yield batch_of([8, 5], 4, self.made[-1])


@pytest.mark.parametrize("make", [loader, loader_with_a_generator, WithState])
@pytest.mark.parametrize("stop", [1, 7, 11])
def test_a_stopped_run_goes_on_in_the_middle_of_its_data(complete, tmp_path, make, stop):
    whole = stopped_run(complete, tmp_path / "whole", make())
    stopped_run(complete, tmp_path / "parts", make(), stop)
    data = make()
    seed = 0 if stop == 1 else 99  # stopped before the first checkpoint, it begins anew
    found = stopped_run(complete, tmp_path / "parts", data, seed=seed)
    assert torch.equal(found[0], whole[0])
    assert found[1] == whole[1]
    if make is WithState:
        assert data.made[0] == stop // 2 * 2


def test_a_finished_run_trains_no_more(complete, tmp_path):
    done = stopped_run(complete, tmp_path / "it", loader())
    assert len(done[1]) == 12
    again = stopped_run(complete, tmp_path / "it", loader(), stop=1, seed=5)
    assert again[1] == done[1] and torch.equal(again[0], done[0])


def test_on_step_may_look_at_the_model_without_changing_the_run(complete, tmp_path):
    """Evaluating in between draws nothing, as long as the mode is put back."""
    model, other = model_of(complete), model_of(complete)
    data, settings = [batch_of([9, 6], 5)], settings_of(complete, total_steps=4)

    def look(step, loss):
        assert other.training
        with torch.no_grad():
            other.eval()(**data[0])
        other.train()

    torch.manual_seed(1)
    complete.pretraining.pretrain(model, data, settings)
    torch.manual_seed(1)
    complete.pretraining.pretrain(other, data, settings, look)
    assert torch.equal(weights(model), weights(other))


@pytest.fixture
def checkpoint(complete, tmp_path):
    path = tmp_path / "run" / "checkpoint.safetensors"
    stopped_run(complete, path, loader(), stop=5)
    return path


def test_a_checkpoint_holds_no_pickle(checkpoint):
    from safetensors import safe_open

    with safe_open(checkpoint, framework="pt") as content:
        names = set(content.keys())
        json.loads(content.metadata()["plain"])
    assert {"losses", "generators.0.now.torch", "generators.0.now.numpy"} <= names
    assert any(name.startswith("optimizer.state.0.") for name in names)


def untouched(complete, path, match, **changes):
    """A run from a bad checkpoint is refused, and the model is as it was."""
    before, after = model_of(complete), model_of(complete, **changes.pop("sizes", {}))
    initial = weights(after).clone()
    settings = settings_of(
        complete, **{"total_steps": 12, "checkpoint_every": 2, "checkpoint": path, **changes}
    )
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=match):
        complete.pretraining.pretrain(after, loader(), settings)
    assert torch.equal(weights(after), initial)
    assert torch.equal(torch.get_rng_state(), state)
    del before


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
def test_a_truncated_checkpoint_is_refused(complete, checkpoint, share):
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[: int(len(content) * share)])
    untouched(complete, checkpoint, "damaged or incomplete")


def test_a_file_of_another_kind_is_refused(complete, checkpoint):
    save_file({"weight": torch.ones(2)}, checkpoint)
    untouched(complete, checkpoint, "no checkpoint of pretrain")
    checkpoint.write_text("notes")
    untouched(complete, checkpoint, "damaged or incomplete")


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 0.02},
        {"total_steps": 13},
        {"warmup_steps": 1},
        {"precision": "bf16"},
        {"weight_decay": 0.0},
        {"max_grad_norm": None},
        {"accumulation_steps": 2},
    ],
)
def test_a_run_with_other_settings_is_refused(complete, checkpoint, changes):
    untouched(complete, checkpoint, next(iter(changes)), **changes)


def test_another_model_is_refused(complete, checkpoint):
    untouched(complete, checkpoint, "of another model: .*layers.2", sizes={"num_hidden_layers": 3})
    untouched(complete, checkpoint, "of another model: .*word", sizes={"vocab_size": 98})


def test_how_often_it_is_written_may_change(complete, checkpoint):
    assert len(stopped_run(complete, checkpoint, loader(), checkpoint_every=5)[1]) == 12


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs limits on file size")
def test_a_full_disk_leaves_the_checkpoint_before(complete, checkpoint):
    """A limit on the size of files stands for a disk with no room left."""
    import resource

    before = checkpoint.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot be written.*one before is still good"):
            stopped_run(complete, checkpoint, loader())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert checkpoint.read_bytes() == before
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]


def test_a_write_that_was_killed_leaves_the_checkpoint_before(complete, checkpoint):
    half = checkpoint.with_name(f".{checkpoint.name}.4242")
    half.write_bytes(checkpoint.read_bytes()[:100])
    whole = stopped_run(complete, checkpoint.with_name("whole"), loader())
    found = stopped_run(complete, checkpoint, loader(), seed=9)
    assert torch.equal(found[0], whole[0])
    assert not half.exists()  # nobody would ever read it


def test_data_that_became_shorter_is_refused(complete, tmp_path):
    data = [batch_of([6], 2, seed) for seed in range(6)]
    stopped_run(complete, tmp_path / "it", data, stop=4)
    with pytest.raises(ValueError, match="has ended before micro-batch 4"):
        stopped_run(complete, tmp_path / "it", data[:3])


@pytest.mark.parametrize("data", [[], iter(()), iter([batch_of([6], 2)])])
def test_data_that_runs_out_is_refused(complete, data):
    with pytest.raises(ValueError, match="data has no more micro-batches"):
        complete.pretraining.pretrain(model_of(complete), data, settings_of(complete))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "half"}, "precision is 'half', but must be one of float32, bf16, fp16"),
        ({"total_steps": 0}, "total_steps is 0"),
        ({"accumulation_steps": 2.0}, "accumulation_steps is 2.0"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"max_grad_norm": 0}, "max_grad_norm is 0"),
        ({"warmup_steps": True}, "warmup_steps is True"),
    ],
)
def test_settings_that_make_no_sense_are_refused(complete, changes, said):
    with pytest.raises(ValueError, match=said):
        settings_of(complete, **changes)
    with pytest.raises(ValueError, match="max_length is 2"):
        complete.pretraining.AdaptationSettings(max_length=2)


# 6.6: adaptation


def test_adaptation_learns_and_leaves_the_pair_head_alone(complete, tokenizer):
    texts = ["the axis of the array", "a tensor has an axis", "arrays and tensors"] * 3
    model = model_of(complete, vocab_size=tokenizer.vocab_size).eval()
    pair_head = copy.deepcopy(model.nsp_head.state_dict())
    settings = complete.pretraining.AdaptationSettings(
        learning_rate=0.02, total_steps=25, batch_size=4, max_length=12
    )
    losses = complete.pretraining.adapt(model, tokenizer, texts, settings)
    assert np.mean(losses[-5:]) < losses[0] - 2
    assert not model.training
    for name, value in model.nsp_head.state_dict().items():
        assert torch.equal(value, pair_head[name])


def test_adaptation_takes_a_model_without_padding_and_transformers_tokenizer(
    complete, tokenizer, their_tokenizer
):
    texts = ["the axis of the array", "a tensor", "arrays and tensors of all kinds"]
    settings = complete.pretraining.AdaptationSettings(
        learning_rate=0.02, total_steps=4, batch_size=2, max_length=8
    )
    found = []
    for one, wrap in (
        (tokenizer, lambda m: m),
        (their_tokenizer, complete.pretraining.WithoutPadding),
    ):
        model = model_of(complete, "BertForMaskedLM", vocab_size=tokenizer.vocab_size, **STILL)
        found.append(complete.pretraining.adapt(wrap(model), one, texts, settings))
    assert found[0] == pytest.approx(found[1], abs=1e-4)


# 6.7: the clinic


def test_an_evaluation_written_with_item_passes(complete):
    def mend_evaluation(model, batches):
        losses = []
        for batch in batches:
            losses.append(model(**batch).loss.item())
        return sum(losses) / len(losses)

    clinic = exercise.load("6.7")
    parts = SimpleNamespace(
        mend_evaluation=mend_evaluation, mend_labels=complete.clinic.mend_labels
    )
    verdict = judging.judge(clinic, parts)
    assert verdict.status == "passed", verdict.diagnosis


# what the stand-ins do in later chapters


def test_the_stand_in_trains_a_bert_as_the_package_does(complete):
    found = []
    for pretrain in (complete.pretraining.pretrain, chapter_6.Loop().pretrain):
        model = model_of(complete, **STILL).double()
        micro_batches = [batch_of(*shape, seed=i) for i, shape in enumerate(UNLIKE)]
        settings = settings_of(complete, total_steps=3, accumulation_steps=4, warmup_steps=1)
        found.append(pretrain(model, micro_batches, settings))
    assert found[0] == pytest.approx(found[1], abs=1e-9)


def test_settings_are_frozen_and_printed_whole(complete):
    settings = settings_of(complete)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.total_steps = 5
    assert "warmup_steps=0" in repr(settings)


def test_loss_of_a_micro_batch_without_labels_is_zero_and_has_no_nan(complete):
    model = model_of(complete, **STILL).double()
    batch = batch_of([6], 0, pairs=False)
    share = complete.pretraining.Share(0.0, 0.0)
    loss = complete.pretraining.training_step(model, batch, share=share)
    assert loss == 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert F.cross_entropy(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)).isnan()


@pytest.mark.parametrize("own", ["the exercise's optimizer", "the loss over all labels by hand"])
def test_a_loop_written_in_another_way_passes(complete, monkeypatch, own):
    pretraining = complete.pretraining
    if own.startswith("the exercise"):
        monkeypatch.setattr(pretraining, "fused_adamw", pretraining.AdamW)
        pretrain = pretraining.pretrain
    else:
        pretrain = by_hand(pretraining)
    parts = SimpleNamespace(training_step=pretraining.training_step, pretrain=pretrain)
    verdict = judging.judge(exercise.load("6.5"), parts)
    assert verdict.status == "passed", verdict.diagnosis


def by_hand(pretraining):
    """A loop with LambdaLR, `clip_grad_norm_` by hand, and sums of losses instead of shares."""

    def pretrain(model, data, settings, on_step=None):
        groups = pretraining.parameter_groups(model, settings.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate)
        scaler = pretraining.gradient_scaler(model, settings.precision)
        run = pretraining.TrainingRun(
            model, optimizer, scaler, pretraining.MicroBatches(data), settings
        )
        run.resume()
        mode = model.training
        model.train()
        while run.step < settings.total_steps:
            rate = pretraining.warmup_linear(run.step, settings.warmup_steps, settings.total_steps)
            batches = [next(run.data) for _ in range(settings.accumulation_steps)]
            words = sum(int((b["labels"] != -100).sum()) for b in batches)
            pairs = sum(len(b.get("next_sentence_label", [])) for b in batches)
            total = 0.0
            for batch in batches:
                with pretraining.autocast_for(torch.device("cpu"), settings.precision):
                    output = model(**batch)
                    scores, labels = output.prediction_logits.flatten(0, 1), batch["labels"]
                    loss = F.cross_entropy(scores, labels.flatten(), reduction="sum") / words
                    if pairs:
                        logits, follows = (
                            output.seq_relationship_logits,
                            batch["next_sentence_label"],
                        )
                        loss = loss + F.cross_entropy(logits, follows, reduction="sum") / pairs
                scaler.scale(loss).backward()
                total += loss.item()
            scaler.unscale_(optimizer)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))
            if settings.max_grad_norm is not None and norm > settings.max_grad_norm:
                for gradient in gradients:
                    gradient.mul_(settings.max_grad_norm / (norm + 1e-6))
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * rate
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            run.losses.append(total)
            run.save_if_due()
            if on_step:
                on_step(run.step, total)
        model.train(mode)
        return run.losses

    return pretrain


# --- dropout with fewer random bits ---


def test_quick_dropout_drops_each_number_as_likely_and_keeps_the_mean(complete):
    """A share of n numbers is off by 5.5 standard errors in 1 of 26 million runs."""
    given, count = complete.pretraining, 400_003
    torch.manual_seed(0)
    for p in (0.1, 0.5, 0.9):
        with given.QuickDropout():
            thinned, again = (F.dropout(torch.ones(count), p) for _ in range(2))
        kept = thinned != 0
        assert thinned[kept].unique().tolist() == pytest.approx([1 / (1 - p)], rel=1e-3)
        error = (p * (1 - p) / count) ** 0.5
        for one in (kept, again != 0):
            assert abs(one.double().mean() - (1 - p)) < 5.5 * error + 2**-17
        both = (kept & (again != 0)).double().mean()  # two masks know nothing of each other
        neighbors = (kept[1:] & kept[:-1]).double().mean()
        for found in (both, neighbors):
            assert abs(found - (1 - p) ** 2) < 11 * error
    torch.manual_seed(0)
    with given.QuickDropout():
        first = F.dropout(torch.ones(9), 0.1)
        torch.manual_seed(0)
        assert torch.equal(first, F.dropout(torch.ones(9), 0.1))


def test_quick_dropout_is_nowhere_but_where_dropout_is(complete):
    """Gradients follow the mask; eval mode, p = 0 and p = 1 are PyTorch's."""
    given = complete.pretraining
    x = torch.randn(50, requires_grad=True)
    with given.QuickDropout():
        F.dropout(x, 0.3).sum().backward()
        assert torch.equal(F.dropout(x, 0.3, training=False), x)
        assert torch.equal(F.dropout(x, 0.0), x)
        assert not F.dropout(x, 1.0).any()
    assert x.grad is not None
    scale = 2**16 / (2**16 - round(0.3 * 2**16))
    assert sorted(set(x.grad.tolist())) == pytest.approx([0.0, scale])
    model, batch = model_of(complete).eval(), batch_of([9, 5], 4)
    plain = model(**batch).loss
    with given.QuickDropout():
        assert torch.equal(model(**batch).loss, plain)


def test_attention_with_quick_dropout_is_attention_on_the_average(complete):
    """The mean over 4,000 masks is what there is without dropout, to 5.5 standard errors."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 5, 8).unbind()
    mask = torch.zeros(1, 1, 1, 5)
    mask[..., 4] = torch.finfo(torch.float32).min / 2
    plain = F.scaled_dot_product_attention(query, key, value, mask)
    with complete.pretraining.QuickDropout():
        many = [x.expand(4000, -1, -1, -1) for x in (query, key, value)]
        found = F.scaled_dot_product_attention(*many, attn_mask=mask, dropout_p=0.2)
        assert torch.equal(F.scaled_dot_product_attention(query, key, value, mask), plain)
    error = found.std(dim=0) / 4000**0.5
    assert ((found.mean(dim=0) - plain[0]).abs() < 5.5 * error + 1e-6).all()


def test_attention_with_quick_dropout_is_0_where_a_mask_hides_all(complete):
    query = torch.randn(2, 2, 5, 8, requires_grad=True)
    mask = torch.zeros(2, 1, 1, 5)
    mask[1] = -torch.inf
    with complete.pretraining.QuickDropout():
        found = F.scaled_dot_product_attention(query, query, query, mask, dropout_p=0.2)
    found.sum().backward()
    assert found[0].abs().min() > 0
    assert not found[1].any()
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_each_step_of_a_run_draws_from_quick_dropout(complete):
    """It reaches the dropout inside modules: the same seed gives another loss, and the same one."""
    model, batch = model_of(complete, "BertForMaskedLM").train(), batch_of([9, 5], 4, pairs=False)

    def loss(quick):
        torch.manual_seed(1)
        with complete.pretraining.QuickDropout() if quick else nullcontext():
            return model(**batch).loss.item()

    assert loss(True) == loss(True) != loss(False)
