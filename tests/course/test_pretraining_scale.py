"""One run in one process or in two: the same batches, the same weights, and each may go on."""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer.testing

from bertlab.course import pretrain, shards

WORDS = [a + b for a in ("ban", "kor", "lim", "sed", "tul") for b in ("a", "e", "i", "ing")]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Sixty files of two to six paragraphs."""
    folder, rng = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    for number in range(60):
        paragraphs = [
            " ".join(rng.choice(WORDS, rng.integers(4, 12))) + "."
            for _ in range(rng.integers(2, 7))
        ]
        (folder / f"{number:03}.txt").write_text("\n\n".join(paragraphs))
    return folder


def toml(texts: Path, output: Path, **training) -> str:
    training = {
        "total_steps": 6,
        "warmup_steps": 1,
        "learning_rate": 0.01,
        "batch_size": 16,
        "micro_batch_size": 4,
        "max_length": 24,
        "checkpoint_every": 3,
        "evaluate_every": 3,
        "log_every": 2,
        **training,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in training.items()]
    return f"""
output = {json.dumps(str(output))}
[model]
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
intermediate_size = 32
max_position_embeddings = 24
hidden_dropout_prob = 0.0
attention_probs_dropout_prob = 0.0
[tokenizer]
pieces = 60
[data]
source = "folder"
path = {json.dumps(str(texts))}
held_out = 0.1
[training]
""" + "\n".join(lines)


def config_of(texts: Path, output: Path, **training) -> pretrain.Config:
    output.mkdir(parents=True, exist_ok=True)
    file = output / "run.toml"
    file.write_text(toml(texts, output, **training))
    return pretrain.read_config(file)


@pytest.fixture
def float64():
    """In float64, because Adam turns the rounding of a gradient that is 0 into whole steps."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Unplugged(Exception):
    pass


def run_until(config: pretrain.Config, step_to_stop: int, monkeypatch) -> None:
    class Stopping(pretrain.Metrics):
        def __call__(self, step, loss):
            super().__call__(step, loss)
            if step == step_to_stop:
                raise Unplugged

    monkeypatch.setattr(pretrain, "Metrics", Stopping)
    with pytest.raises(Unplugged):
        pretrain.run(config)
    monkeypatch.undo()


TWO = """
import sys
from pathlib import Path
import torch
from bertlab.course import pretrain

torch.set_default_dtype(torch.float64)
whole, goes_on, stopped = (pretrain.read_config(Path(file)) for file in sys.argv[1:])
pretrain.use_the_package()
losses = pretrain.run(whole)
others = pretrain.run(goes_on)
assert max(abs(a - b) for a, b in zip(others, losses, strict=True)) < 1e-9
plain = pretrain.Metrics.__call__

def stopping(self, step, loss):
    plain(self, step, loss)
    if step == 4:
        raise SystemExit

pretrain.Metrics.__call__ = stopping
pretrain.run(stopped)
"""


def in_two_processes(complete, folder: Path, *configs: Path) -> None:
    script = folder / "two.py"
    script.write_text(TWO)
    package = Path(complete.pretraining.__file__).parents[1]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *(str(script), *map(str, configs)),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def weights_in(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    tensors = load_file(folder / "model" / "model.safetensors")
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def metrics_in(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k != "tokens_per_second"} for x in lines]


def test_one_process_and_two_end_with_the_same_weights(
    complete, texts, tmp_path, float64, monkeypatch
):
    """Whole runs in 1 and 2, and runs stopped after step 4 that go on in 2 and in 1."""
    one = config_of(texts, tmp_path / "one")
    losses = pretrain.run(one)
    from_one = config_of(texts, tmp_path / "from-one")
    run_until(from_one, 4, monkeypatch)
    two, from_two = (config_of(texts, tmp_path / name) for name in ("two", "from-two"))
    files = [config.output / "run.toml" for config in (two, from_one, from_two)]
    in_two_processes(complete, tmp_path, *files)
    assert not (from_two.output / "model").exists()
    assert pretrain.run(from_two) == pytest.approx(losses, abs=1e-9)

    expected = weights_in(one.output)
    for config in (two, from_one, from_two):
        assert (weights_in(config.output) - expected).abs().max() < 1e-9
        assert metrics_in(config.output) == metrics_in(one.output)  # reduced over both
    assert {"held_out_loss", "held_out_pair_accuracy"} <= set(metrics_in(one.output)[-1])


def test_another_seed_ends_with_other_weights(texts, tmp_path, complete, float64):
    """The mutant of the test above: what a process saw does matter."""
    runs = [config_of(texts, tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    for config in runs:
        pretrain.run(config)
    first, second = (weights_in(config.output) for config in runs)
    assert (first - second).abs().max() > 1e-2


def test_the_result_loads_in_transformers_and_scores_alike(complete, texts, tmp_path):
    import transformers

    config = config_of(texts, tmp_path / "run", total_steps=2)
    pretrain.run(config)
    folder = config.output / "model"
    theirs = transformers.BertForPreTraining.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = complete.weights.from_pretrained(complete.heads.BertForPreTraining, folder)
    ids = torch.tensor([tokenizer("bana kore [MASK] limi.")["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).prediction_logits, theirs(ids).prediction_logits)


@pytest.mark.parametrize(
    "changes",
    [
        {"next_sentence": False, "whole_word": True},
        {"without_padding": False, "precision": "bf16"},
    ],
)
def test_other_ways_to_train_learn(complete, texts, tmp_path, changes):
    config = config_of(texts, tmp_path / "run", total_steps=40, evaluate_every=0, **changes)
    losses = pretrain.run(config)
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.2


# the batches


def batches_of(complete, texts, folder, rank=0, processes=1, next_sentence=True, size=4, seed=0):
    config = config_of(texts, folder)
    pretrain.prepare(config)
    tokenizer = complete.tokenizer.WordPieceTokenizer.from_pretrained(folder / "tokenizer")
    corpus = shards.open_shards(folder / "data")
    documents = np.arange(len(corpus.documents) - 1)
    return shards.Batches(
        corpus,
        documents,
        tokenizer,
        size,
        next_sentence,
        seed=seed,
        rank=rank,
        processes=processes,
    )


def original(batch) -> list[tuple[int, ...]]:
    """The texts of a batch before they were masked."""
    ids = torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])
    rows = zip(ids.tolist(), batch["attention_mask"].tolist(), strict=True)
    return [tuple(i for i, real in zip(*row, strict=True) if real) for row in rows]


def test_processes_share_the_texts_without_overlap(complete, texts, tmp_path):
    alone = batches_of(complete, texts, tmp_path, next_sentence=False)
    stream = iter(alone)
    whole = [next(stream) for _ in range(alone.in_a_round)]
    shared = []
    for rank in range(3):
        part = iter(batches_of(complete, texts, tmp_path, rank, 3, next_sentence=False))
        shared.append([next(part) for _ in range(alone.in_a_round // 3)])
    in_turn = [batch for several in zip(*shared, strict=True) for batch in several]
    for one, other in zip(whole, in_turn, strict=False):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    read = [row for batch in whole for row in original(batch)]
    known = [alone.shards.stretch(i) for i in range(len(alone.shards.stretches) - 1)]
    sources = [row[1:-1] for row in read]
    assert len(read) == alone.in_a_round * 4 > len(known) - 4
    for stretch in set(known):
        assert sources.count(stretch) <= known.count(stretch)


def test_rounds_differ_in_order_masks_and_pairs(complete, texts, tmp_path):
    batches = batches_of(complete, texts, tmp_path)
    stream = iter(batches)
    rounds = [[next(stream) for _ in range(batches.in_a_round)] for _ in range(2)]
    first, second = ([row for b in one for row in original(b)] for one in rounds)
    assert first != second
    true = [torch.cat([b["next_sentence_label"] for b in one]).double().mean() for one in rounds]
    assert all(0.3 < share < 0.7 for share in true)
    other = batches_of(complete, texts, tmp_path, seed=1)
    assert original(next(iter(other))) != original(rounds[0][0])


def test_a_right_pair_stood_in_the_text_and_a_wrong_one_did_not(complete, texts, tmp_path):
    batches = batches_of(complete, texts, tmp_path)
    corpus, sep = batches.shards, batches.tokenizer.sep_token_id
    documents = [corpus.document(i) for i in range(len(corpus.documents) - 1)]
    following = {pair for document in documents for pair in pairwise(document)}
    counts = Counter(stretch for document in documents for stretch in document)
    seen = Counter()
    for number in range(batches.in_a_round):
        batch = batches.micro_batch(number)
        for row, label in zip(original(batch), batch["next_sentence_label"].tolist(), strict=True):
            place = row.index(sep)
            pair = row[1:place], row[place + 1 : -1]
            if counts[pair[0]] == counts[pair[1]] == 1:
                seen[pair in following, label] += 1
    assert set(seen) == {(True, 0), (False, 1)}
    assert min(seen.values()) > 20


def test_held_out_documents_are_not_trained_on():
    train, held_out = pretrain.split_documents(1000, 0.02)
    assert set(train) & set(held_out) == set()
    assert len(held_out) == 20 and len(train) == 980
    assert len(pretrain.split_documents(10, 0.0)[1]) == 0


def test_a_corpus_is_read_as_it_was_written(complete, tmp_path):
    tokenizer = complete.tokenizer.WordPieceTokenizer(
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    )
    documents = [["a b", "c", "d e f g h a b"], [], ["h"]]
    shards.write_shards(documents, tokenizer, tmp_path / "it", 4, {"x": 1})
    corpus = shards.open_shards(tmp_path / "it")
    read = [
        [" ".join(tokenizer.convert_ids_to_tokens(stretch)) for stretch in corpus.document(i)]
        for i in range(3)
    ]
    assert read == [["a b c", "d e f g", "h a b"], [], ["h"]]
    assert shards.is_about(tmp_path / "it", {"x": 1})
    assert not shards.is_about(tmp_path / "it", {"x": 2})


def test_a_corpus_that_was_not_finished_is_not_there(complete, tmp_path):
    tokenizer = complete.tokenizer.WordPieceTokenizer(
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    )

    def documents():
        yield ["a"]
        raise Unplugged

    with pytest.raises(Unplugged):
        shards.write_shards(documents(), tokenizer, tmp_path / "it", 4, {})
    assert list(tmp_path.iterdir()) == []


# the file of settings


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[model]", "[modle]", "the file has no 'modle'; it may have output, model,"),
        ("output =", "outputs =", "the file has no 'outputs'"),
        ("hidden_size = 16", "hidden = 16", "[model] has no 'hidden'"),
        ("hidden_size = 16", "hidden_size = 15", "hidden_size is 15, but must be a multiple"),
        ("hidden_size = 16", "checkpoint = 'x'\nhidden_size = 16", "[model] has no 'hidden_size'"),
        ("pieces = 60", "pieces = 'many'", "pieces in [tokenizer] is 'many', but must be int"),
        ("pieces = 60", "pieces = 60\nname = 'x'", "both name and pieces"),
        ('"folder"', '"files"', "source in [data] is 'files', but must be one of documentation"),
        ("path =", "# path =", "source 'folder' in [data] needs path"),
        ("held_out = 0.1", "held_out = 0.9", "held_out in [data] is 0.9"),
        ("batch_size = 16", "batch_size = 18", "must be a multiple of micro_batch_size (4)"),
        ("learning_rate = 0.01", "learning_rate = true", "learning_rate in [training] is True"),
        ("max_length = 24", "max_length = 64", "the model has max_position_embeddings 24"),
        ("total_steps = 6", "total_steps = 0", "total_steps is 0"),
        ("warmup_steps = 1", 'precision = "fp8"', "precision is 'fp8'"),
        ("total_steps = 6", "total_steps = ", "is not TOML"),
        ("pieces = 60", "pieces = 3", "vocab_size is 3"),
        ("batch_size = 16", "batch_size = 4000\nmicro_batch_size = 4000 #", "one micro-batch of"),
    ],
)
def test_a_wrong_file_is_one_clear_line(complete, texts, tmp_path, monkeypatch, old, new, said):
    monkeypatch.setattr(pretrain, "use_the_package", lambda: SimpleNamespace(uses=[]))
    text = toml(texts, tmp_path / "run")
    assert old in text
    text = text.replace("micro_batch_size = 4\n", "") if "micro_batch_size = 4000" in new else text
    (tmp_path / "run.toml").write_text(text.replace(old, new))
    done = typer.testing.CliRunner().invoke(pretrain.app, ["--config", str(tmp_path / "run.toml")])
    assert done.exit_code == 2
    assert said in done.output and len(done.output.splitlines()) == 1
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


def test_a_file_that_is_not_there_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(pretrain, "use_the_package", lambda: SimpleNamespace(uses=[]))
    done = typer.testing.CliRunner().invoke(pretrain.app, ["--config", str(tmp_path / "no.toml")])
    assert done.exit_code == 2 and "no.toml" in done.output


def test_the_example_of_the_help_is_a_right_file(tmp_path):
    (tmp_path / "example.toml").write_text(pretrain.EXAMPLE)
    config = pretrain.read_config(tmp_path / "example.toml")
    assert config.training.batch_size == 64 and config.model.fields["hidden_size"] == 128
    shown = typer.testing.CliRunner().invoke(pretrain.app, ["--help"])
    lines = [line.strip() for line in shown.output.splitlines()]
    assert all(line.strip() in lines for line in pretrain.EXAMPLE.splitlines())


def test_a_batch_that_processes_cannot_share_is_refused(complete, texts, tmp_path):
    config = config_of(texts, tmp_path / "run")
    assert pretrain.settings_of(config, 2).accumulation_steps == 2
    with pytest.raises(ValueError, match="3 processes cannot share out"):
        pretrain.settings_of(config, 3)


def test_metrics_of_steps_that_were_lost_are_written_anew(complete, texts, tmp_path, monkeypatch):
    config = config_of(texts, tmp_path / "run", log_every=1, evaluate_every=0)
    run_until(config, 5, monkeypatch)
    with open(config.output / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    assert [line["step"] for line in metrics_in_part(config.output)] == [1, 2, 3, 4, 5]
    pretrain.run(config)
    assert [line["step"] for line in metrics_in(config.output)] == [1, 2, 3, 4, 5, 6]


def metrics_in_part(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]
