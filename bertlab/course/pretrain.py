"""Pretrain a BERT from one file of settings, on one processor or on many GPUs.

    python -m bertlab.course.pretrain --config tiny.toml
    torchrun --nproc-per-node 8 -m bertlab.course.pretrain --config base.toml
    accelerate launch -m bertlab.course.pretrain --config base.toml

It uses your own package; parts that are not written yet are replaced by their stand-ins. A run
that was stopped goes on when it is started again, with any number of processes that divides the
batch, and each step takes the same texts as before.
"""

import dataclasses
import datetime
import json
import os
import sys
import time
import tomllib
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

EXAMPLE = """
output = "runs/tiny"          # checkpoint, metrics and the finished model; made if need be

[model]                       # fields of BertConfig; or checkpoint = "a folder or a cached name"
hidden_size = 128
num_hidden_layers = 2
num_attention_heads = 2
intermediate_size = 512

[tokenizer]                   # pieces: learn so many from the data; or name = "a folder or name"
pieces = 8000

[data]                        # source: "documentation", "folder" or "dataset"
source = "documentation"      # libraries = ["numpy", "torch"]
held_out = 0.02               # folder: path; dataset: name, config_name, split, column

[training]
total_steps = 1000
warmup_steps = 100
learning_rate = 1e-3
batch_size = 64               # texts in one step, all processes together
micro_batch_size = 32         # texts that one process takes at a time
max_length = 64
"""


# --- the file of settings ---


@dataclass(frozen=True)
class ModelTable:
    """A checkpoint to begin with, or the fields of a `BertConfig`."""

    checkpoint: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenizerTable:
    """A name, or how many pieces to learn; neither is the vocabulary of bert-base-uncased."""

    name: str | None = None
    pieces: int | None = None


@dataclass(frozen=True)
class DataTable:
    """Where the text comes from, and what share of its documents is kept to evaluate on."""

    source: str = "documentation"
    libraries: list[str] | None = None
    path: str | None = None
    name: str | None = None
    config_name: str | None = None
    split: str = "train"
    column: str = "text"
    held_out: float = 0.01


@dataclass(frozen=True)
class TrainingTable:
    """What `PretrainingSettings` has, and what a run of several processes needs besides."""

    total_steps: int = 1000
    warmup_steps: int = 100
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    precision: str = "float32"
    batch_size: int = 256
    micro_batch_size: int = 32
    max_length: int = 128
    next_sentence: bool = True
    whole_word: bool = False
    without_padding: bool = True
    checkpoint_every: int = 500
    evaluate_every: int = 500
    log_every: int = 10
    seed: int = 0


@dataclass(frozen=True)
class Config:
    """A file of settings, read and checked."""

    output: Path
    model: ModelTable
    tokenizer: TokenizerTable
    data: DataTable
    training: TrainingTable


def read_config(path: Path) -> Config:
    """Read a TOML file.

    Raises:
        ValueError: it is no TOML, or has an unknown name, a value of a wrong type or one that is
            not allowed; the message says where.
        FileNotFoundError: there is no such file.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # TOML, or UTF-8
        raise ValueError(f"{path} is not TOML: {error}") from error
    known = ["output", "model", "tokenizer", "data", "training"]
    _refuse_others(path, "the file", content, known)
    if not isinstance(content.get("output"), str):
        raise ValueError(f'{path} needs output = "a folder" at its beginning')
    tables = {name: content.get(name, {}) for name in known[1:]}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(f"{path}: {name} is {table!r}, but must be a table: [{name}]")
    config = Config(
        output=Path(content["output"]),
        model=_model_table(path, tables["model"]),
        tokenizer=_table(path, "tokenizer", TokenizerTable, tables["tokenizer"]),
        data=_table(path, "data", DataTable, tables["data"]),
        training=_table(path, "training", TrainingTable, tables["training"]),
    )
    _check(path, config)
    return config


def _model_table(path: Path, table: dict[str, Any]) -> ModelTable:
    if "checkpoint" in table:
        return _table(path, "model", ModelTable, table, allowed=["checkpoint"])
    from bertlab.config import BertConfig

    names = [each.name for each in dataclasses.fields(BertConfig)]
    _refuse_others(path, "[model]", table, ["checkpoint", *names])
    return ModelTable(fields=table)


def _table(
    path: Path, name: str, kind: Any, table: dict[str, Any], allowed: list[str] | None = None
) -> Any:
    """A table's dataclass, its names and types checked."""
    types_of = typing.get_type_hints(kind)
    _refuse_others(path, f"[{name}]", table, allowed or list(types_of))
    for key, value in table.items():
        if not _fits(value, types_of[key]):
            wanted = getattr(types_of[key], "__name__", str(types_of[key]).replace(" | None", ""))
            raise ValueError(f"{path}: {key} in [{name}] is {value!r}, but must be {wanted}")
    return kind(**table)


def _refuse_others(path: Path, where: str, table: Mapping[str, Any], known: list[str]) -> None:
    for key in table:
        if key not in known:
            raise ValueError(f"{path}: {where} has no {key!r}; it may have {', '.join(known)}")


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(x, typing.get_args(kind)[0]) for x in value)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _check(path: Path, config: Config) -> None:
    data, training = config.data, config.training
    needed = {"documentation": None, "folder": "path", "dataset": "name"}
    checks = {
        f"source in [data] is {data.source!r}, but must be one of {', '.join(needed)}": (
            data.source in needed
        ),
        f"source {data.source!r} in [data] needs {needed.get(data.source)} too": (
            needed.get(data.source) is None or getattr(data, str(needed[data.source])) is not None
        ),
        f"held_out in [data] is {data.held_out}, but must be in [0, 0.5]": (
            0 <= data.held_out <= 0.5
        ),
        "[tokenizer] has both name and pieces; give one": (
            config.tokenizer.name is None or config.tokenizer.pieces is None
        ),
        f"batch_size in [training] is {training.batch_size}, but must be a multiple of "
        f"micro_batch_size ({training.micro_batch_size})": (
            training.micro_batch_size >= 1
            and training.batch_size >= 1
            and training.batch_size % training.micro_batch_size == 0
        ),
        f"max_length in [training] is {training.max_length}, but must be at least 8": (
            training.max_length >= 8
        ),
        f"log_every in [training] is {training.log_every}, but must be at least 1": (
            training.log_every >= 1
        ),
        f"evaluate_every in [training] is {training.evaluate_every}, but must be at least 0": (
            training.evaluate_every >= 0
        ),
    }
    for message, holds in checks.items():
        if not holds:
            raise ValueError(f"{path}: {message}")


# --- processes ---


def start_processes() -> str:
    """Join the other processes, if torchrun or accelerate started this one; return the device."""
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        patience = datetime.timedelta(days=1)  # while process 0 tokenizes a large corpus
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=patience)
    return f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"


def once(work: Callable[[], None]) -> None:
    """Let process 0 do something while the others wait; what it raises is raised in all."""
    from bertlab.pretraining import of_all_processes, rank_here

    error: Exception | None = None
    if rank_here() == 0:
        try:
            work()
        except Exception as raised:  # the others must not wait for ever
            error = raised
    message = of_all_processes(None if error is None else str(error))[0]
    if error is not None:
        raise error
    if message is not None:
        raise ValueError(f"process 0: {message}")


# --- tokenizer, data and model ---


def paragraphs_of(data: DataTable) -> Iterator[Any]:
    """The paragraphs of the source that was asked for."""
    from bertlab.course import corpus

    if data.source == "folder":
        return corpus.from_folder(str(data.path))
    if data.source == "dataset":
        return corpus.from_dataset(str(data.name), data.config_name, data.split, data.column)
    return corpus.paragraphs(data.libraries)


def documents_of(data: DataTable) -> Iterator[list[str]]:
    """The source's documents, as lists of paragraphs."""
    from bertlab.course.corpus import as_documents

    return ([item.text for item in document] for document in as_documents(paragraphs_of(data)))


def make_tokenizer(config: Config, folder: Path) -> None:
    """Save the tokenizer that was asked for; learn its pieces, if need be, from the data."""
    from bertlab.course.reference import vocabulary_file
    from bertlab.tokenizer import WordPieceTokenizer, normalize, pre_tokenize, train_wordpiece

    if config.tokenizer.pieces is None:
        name = config.tokenizer.name
        make = WordPieceTokenizer.from_vocab_file
        found = (
            make(vocabulary_file()) if name is None else WordPieceTokenizer.from_pretrained(name)
        )
    else:
        counts: Counter[str] = Counter()
        for item in paragraphs_of(config.data):
            counts.update(word for word, _ in pre_tokenize(normalize(item.text)))
        found = WordPieceTokenizer(train_wordpiece(counts, config.tokenizer.pieces))
    found.save(folder)


def prepare(config: Config) -> None:
    """Make what is not there yet below `output`: the tokenizer, and the tokenized data."""
    from bertlab.course.shards import is_about, write_shards
    from bertlab.course.workspace import write_atomically
    from bertlab.tokenizer import WordPieceTokenizer

    about = {
        "tokenizer": dataclasses.asdict(config.tokenizer),
        "data": {k: v for k, v in dataclasses.asdict(config.data).items() if k != "held_out"},
        "longest": longest_stretch(config.training),
    }
    folder, note = config.output / "tokenizer", config.output / "tokenizer" / "about.json"
    wanted = json.dumps([about["tokenizer"], about["data"]])
    if not note.exists() or note.read_text(encoding="utf-8") != wanted:
        make_tokenizer(config, folder)
        write_atomically(note, wanted)
    if not is_about(config.output / "data", about):
        tokenizer = WordPieceTokenizer.from_pretrained(folder)
        documents = _with_progress(documents_of(config.data))
        write_shards(documents, tokenizer, config.output / "data", about["longest"], about)


def _with_progress(documents: Iterator[Any]) -> Iterator[Any]:
    from tqdm import tqdm

    return iter(tqdm(documents, desc="Tokenizing", unit=" documents", delay=1, leave=False))


def longest_stretch(training: TrainingTable) -> int:
    """How many tokens a stretch of text may have: all the room, or half of it in a pair."""
    if training.next_sentence:
        return (training.max_length - 3) // 2
    return training.max_length - 2


def split_documents(count: int, held_out: float) -> tuple[Any, Any]:
    """The numbers of the documents to train on, and of those to evaluate on: every n-th."""
    import numpy as np

    numbers = np.arange(count)
    if held_out == 0:
        return numbers, numbers[:0]
    every = max(2, round(1 / held_out))
    return numbers[numbers % every != every - 1], numbers[numbers % every == every - 1]


def make_model(config: Config, vocab_size: int) -> Any:
    """The model that was asked for, in training mode.

    Raises:
        ValueError: it has another number of pieces than the tokenizer, or too few positions.
    """
    from bertlab.config import BertConfig
    from bertlab.heads import BertForMaskedLM, BertForPreTraining
    from bertlab.weights import from_pretrained

    kind: Any = BertForPreTraining if config.training.next_sentence else BertForMaskedLM
    if config.model.checkpoint is not None:
        model = from_pretrained(kind, config.model.checkpoint)
    else:
        model = kind(BertConfig(**{"vocab_size": vocab_size, **config.model.fields}))
    if model.config.vocab_size != vocab_size:
        raise ValueError(
            f"the model has vocab_size {model.config.vocab_size}, but the tokenizer {vocab_size} "
            "pieces"
        )
    if model.config.max_position_embeddings < config.training.max_length:
        raise ValueError(
            f"max_length in [training] is {config.training.max_length}, but the model has "
            f"max_position_embeddings {model.config.max_position_embeddings}"
        )
    return model.train()


def settings_of(config: Config, processes: int) -> Any:
    """The settings of `pretrain` in so many processes.

    Raises:
        ValueError: the batch cannot be shared out among them.
    """
    from bertlab.pretraining import PretrainingSettings

    training = config.training
    micro_batches = training.batch_size // training.micro_batch_size
    if micro_batches % processes:
        raise ValueError(
            f"a batch of {training.batch_size} is {micro_batches} micro-batches of "
            f"{training.micro_batch_size}, which {processes} processes cannot share out evenly"
        )
    names = {each.name for each in dataclasses.fields(PretrainingSettings)}
    shared = {k: v for k, v in dataclasses.asdict(training).items() if k in names}
    return PretrainingSettings(
        **shared,
        accumulation_steps=micro_batches // processes,
        checkpoint=config.output / "checkpoint.safetensors",
    )


# --- evaluation and metrics ---


def evaluate(model: Any, batches: Any, most: int) -> dict[str, float]:
    """Loss and accuracy on the first `most` micro-batches, shared out among all processes."""
    import torch

    from bertlab.pretraining import add_up, device_of, processes, rank_here

    was_training, device = model.training, device_of(model)
    model.eval()
    totals = [0.0] * 5
    with torch.no_grad():
        for number in range(rank_here(), most, processes()):
            batch = {k: x.to(device) for k, x in batches.micro_batch(number).items()}
            totals = [a + b for a, b in zip(totals, _counts(model, batch), strict=True)]
    model.train(was_training)
    loss, right, words, right_pairs, pairs = add_up(totals)
    found = {"held_out_loss": loss / max(words, 1), "held_out_accuracy": right / max(words, 1)}
    return found | ({"held_out_pair_accuracy": right_pairs / pairs} if pairs else {})


def _counts(model: Any, batch: dict[str, Any]) -> list[float]:
    """Of one micro-batch: summed loss, words right, words, pairs right, pairs."""
    import torch.nn.functional as F

    labels, pair_labels = batch["labels"], batch.get("next_sentence_label")
    read = model.bert(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
    scores = model.mlm_head(read.last_hidden_state, labels != -100)
    target = labels[labels != -100]
    loss = F.cross_entropy(scores, target, reduction="sum")
    right = (scores.argmax(dim=-1) == target).sum()
    found = [float(loss), float(right), float(len(target)), 0.0, 0.0]
    if pair_labels is not None:
        guess = model.nsp_head(read.pooler_output).argmax(dim=-1)
        found[3:] = [float((guess == pair_labels).sum()), float(len(pair_labels))]
    return found


class Metrics:
    """Writes `metrics.jsonl`: a line for every so many steps, and for every evaluation."""

    def __init__(self, config: Config, model: Any, batches: Any, held_out: Any) -> None:
        self.config, self.model = config, model
        self.batches, self.held_out = batches, held_out
        self.file = config.output / "metrics.jsonl"
        self.last = (time.perf_counter(), batches.tokens)
        self.begun = False

    def __call__(self, step: int, loss: float) -> None:
        """Note a step; all processes must call it."""
        training = self.config.training
        last = step == training.total_steps
        line: dict[str, Any] = {"step": step, "loss": round(loss, 4)}
        if step % training.log_every == 0 or last:
            line["tokens_per_second"] = round(self._speed())
        due = training.evaluate_every and step % training.evaluate_every == 0
        if self.held_out is not None and (due or last):
            most = min(self.held_out.in_a_round, 50)
            line |= {k: round(v, 4) for k, v in evaluate(self.model, self.held_out, most).items()}
        if len(line) > 2:
            self._write(line)

    def _speed(self) -> float:
        from bertlab.pretraining import add_up

        now, tokens = time.perf_counter(), self.batches.tokens
        before, seen = self.last
        self.last = now, tokens
        return add_up([tokens - seen])[0] / max(now - before, 1e-9)

    def _write(self, line: dict[str, Any]) -> None:
        from bertlab.course.workspace import write_atomically
        from bertlab.pretraining import rank_here

        if rank_here() != 0:
            return
        if not self.begun and self.file.exists():  # lines of steps that were not kept
            lines = self.file.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [text for text in lines if _step_of(text) < line["step"]]
            write_atomically(self.file, "".join(kept))
        self.begun = True
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # cut off when the run was killed


# --- the run ---


def use_the_package() -> Any:
    """Make the student's package importable: what is written as it is, stand-ins for the rest."""
    from bertlab.course import outline
    from bertlab.course.package import Package
    from bertlab.course.regions import is_stub
    from bertlab.course.workspace import Workspace

    workspace = Workspace()
    package = Package(workspace)
    package.install()
    for exercise_id in outline.entries():
        if not is_stub(workspace.region(exercise_id).text):
            package.use_own(exercise_id)
    return package


def run(config: Config) -> list[float]:
    """Do what a file of settings says; returns the loss of every step."""
    import torch

    from bertlab import pretraining
    from bertlab.course.shards import Batches, open_shards
    from bertlab.tokenizer import WordPieceTokenizer
    from bertlab.weights import save_pretrained

    device = start_processes()
    training, rank = config.training, pretraining.rank_here()
    settings = settings_of(config, pretraining.processes())
    once(partial(prepare, config))
    tokenizer = WordPieceTokenizer.from_pretrained(config.output / "tokenizer")
    shards = open_shards(config.output / "data")
    torch.manual_seed(training.seed)
    model = make_model(config, tokenizer.vocab_size).to(device)
    same_everywhere(model)
    torch.manual_seed(training.seed + 1 + rank)  # dropout differs from process to process
    train, held_out = (
        Batches(
            shards,
            documents,
            tokenizer,
            training.micro_batch_size,
            training.next_sentence,
            training.whole_word,
            seed=training.seed,
            rank=rank,
            processes=pretraining.processes(),
        )
        if len(documents)
        else None
        for documents in split_documents(len(shards.documents) - 1, config.data.held_out)
    )
    if train is None:
        raise ValueError("the corpus has no document to train on")
    trained = pretraining.WithoutPadding(model) if training.without_padding else model
    metrics = Metrics(config, model, train, held_out)
    losses = pretraining.pretrain(trained, train, settings, metrics)
    once(lambda: save_pretrained(model, config.output / "model"))
    once(lambda: tokenizer.save(config.output / "model"))
    return losses


def same_everywhere(model: Any) -> None:
    """Give every process the parameters of process 0."""
    import torch.distributed as dist

    from bertlab.pretraining import processes

    if processes() > 1:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)


HELP = f"""Pretrain a BERT from one file of settings, on one processor or on many GPUs.

\b
python -m bertlab.course.pretrain --config FILE
torchrun --nproc-per-node 8 -m bertlab.course.pretrain --config FILE
accelerate launch -m bertlab.course.pretrain --config FILE

A run that was stopped goes on when it is started again, also with another number of processes.
Below `output` it writes checkpoint.safetensors, metrics.jsonl and, at the end, model/, which
Transformers loads. The text is tokenized once, into data/: remove that folder when the text has
changed. Nothing is downloaded. A FILE looks like this:

\b{EXAMPLE.replace(chr(10) * 2, chr(10) * 2 + chr(8) + chr(10))}
"""


def main(
    config: Annotated[Path, typer.Option(help="A TOML file; an example is above.")],
) -> None:
    """Read the settings, train, and say where the result is."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        package = use_the_package()
        settings = read_config(config)
        losses = run(settings)
    except (ValueError, OSError, RuntimeError) as error:
        typer.echo(f"pretrain: {error}", err=True)
        raise SystemExit(2) from None
    if os.environ.get("RANK", "0") == "0":
        if package.uses:
            typer.echo(f"on stand-ins for {', '.join(sorted(package.uses))}", err=True)
        model = settings.output / "model"
        typer.echo(f"{len(losses)} steps, last loss {losses[-1]:.3f}; the model is in {model}")


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command(help=HELP)(main)

if __name__ == "__main__":
    app()
    sys.exit()
