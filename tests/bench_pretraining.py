"""The benchmarks of chapter 6: a step of pretraining, a loss in less time, data, and a large text.

Each ratio is taken in turn in one process. What is compared with Transformers does the same work:
the same weights, texts and share of masks, masking and optimizer included on both sides.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tests.bench_model import (
    BASE,
    CPU,
    MINILM,
    Setting,
    _peak_of,
    _same_loss_and_gradients,
    batch_of,
    forward_flops,
    models,
    package,
)
from tests.measure import ROOT, Row, paired, seconds, spread

BF16_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is Arm's


def has_bf16_units() -> bool:
    """True if this processor multiplies bf16 numbers itself, so that bf16 may be faster."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and not BF16_UNITS.isdisjoint(cpuinfo.read_text().split())


# --- a training step, all included ---

SHAPES = (
    ("BERT-Base's shape", BASE, 8, 128, {"float32": 1.15, "bf16": 3.0}),
    ("MiniLM's shape", MINILM, 32, 64, {"float32": 1.9, "bf16": 4.0}),
)


def step(setting: Setting = CPU) -> Iterator[Row]:
    """A step, masks and optimizer included, beside BertForMaskedLM with collator and AdamW."""
    on_gpu = setting.device == "cuda"
    for label, sizes, texts, seq, asked in SHAPES:
        ours, theirs = models("BertForMaskedLM", sizes, setting)
        same = _same_loss_and_gradients(
            ours, theirs, batch_of(texts, seq, ours.config.vocab_size, setting.device)
        )
        ids = batch_of(texts, seq, ours.config.vocab_size, "cpu")["input_ids"]
        yours = their_step(theirs, ids, setting)
        yours()
        for precision in ("float32", "bf16"):
            mine = our_step(ours, ids, precision, setting)
            mine()
            ratios = paired(mine, yours, setting.rounds)
            counts = precision == "float32" or on_gpu or has_bf16_units()
            yield Row(
                f"MLM training step, {label}, {texts} x {seq}, {precision}, masks, QuickDropout "
                "and AdamW included; loss and gradients without dropout "
                + ("the same" if same else "DIFFERENT"),
                f"{spread(ratios)} times as fast as BertForMaskedLM in float32",
                f"{asked[precision]} times"
                + ("" if counts else " with bf16 units, which are not here: stated"),
                same and (not counts or statistics.median(ratios) >= asked[precision]),
            )
            if precision == "float32":
                yield step_of_peak(mine, texts, seq, ours, setting)


class Numbers:
    """A vocabulary of numbers, as far as masking asks for one."""

    mask_token_id, mask_token, pad_token_id = 4, "[MASK]", 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.all_special_ids = vocab_size, [0, 1, 2, 3, 4]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"piece{i}" for i in ids]


def our_step(model: Any, ids: Tensor, precision: str, setting: Setting) -> Callable[[], None]:
    """Masking, forward, backward and AdamW of the complete package, with `QuickDropout`."""
    pretraining = package().pretraining
    tokenizer = Numbers(model.config.vocab_size)
    optimizer = pretraining.fused_adamw(pretraining.parameter_groups(model, 0.01))  # pretrain's
    for group in optimizer.param_groups:
        group["lr"] = 1e-6
    generator = torch.Generator().manual_seed(0)
    device = torch.device(setting.device)
    mask = torch.ones_like(ids).to(device)

    def run() -> None:
        model.train()
        inputs, labels = pretraining.mask_tokens(ids, tokenizer, generator=generator)
        batch = {"input_ids": inputs.to(device), "labels": labels.to(device)}
        autocast = pretraining.autocast_for(device, precision)
        with pretraining.QuickDropout():
            pretraining.training_step(model, {**batch, "attention_mask": mask}, autocast=autocast)
        optimizer.step()
        optimizer.zero_grad()
        setting.wait()

    return run


def their_step(model: Any, ids: Tensor, setting: Setting) -> Callable[[], None]:
    """Transformers' collator, forward and backward, and PyTorch's AdamW, in float32."""
    from transformers import BertTokenizer, DataCollatorForLanguageModeling

    from bertlab.course.reference import vocabulary_file

    tokenizer = BertTokenizer(str(vocabulary_file()))
    collate = DataCollatorForLanguageModeling(tokenizer)
    texts = [
        {"input_ids": row, "attention_mask": [1] * len(row), "special_tokens_mask": [0] * len(row)}
        for row in ids.tolist()
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def run() -> None:
        model.train()
        batch = {name: x.to(setting.device) for name, x in collate(texts).items()}
        batch["input_ids"] %= model.config.vocab_size  # a small model has a small vocabulary
        batch["labels"] = torch.where(batch["labels"] < model.config.vocab_size, batch["labels"], 1)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        setting.wait()

    return run


def step_of_peak(
    run: Callable[[], None], texts: int, seq: int, model: Any, setting: Setting
) -> Row:
    """Tokens per second of a step, and its multiplications beside those of one matrix product."""
    peak = product_peak(setting)
    taken = min(seconds(run) for _ in range(3))
    reached = training_flops(model.config, texts, seq) / taken
    return Row(
        f"the same: {texts * seq / taken:,.0f} tokens/s, {reached / 1e9:,.0f} GFLOP/s, where a "
        f"matrix product reaches {peak / 1e9:,.0f}",
        f"{reached / peak:.2f} of the peak",
        "stated",
        True,
    )


def product_peak(setting: Setting) -> float:
    """Multiplications and additions per second of one large matrix product in float32."""
    size = 256 if setting.small else 3072
    a, b = (torch.randn(size, size, device=setting.device) for _ in range(2))

    def product() -> None:
        torch.mm(a, b)
        setting.wait()

    product()
    return 2 * size**3 / min(seconds(product) for _ in range(9))


def training_flops(config: Any, texts: int, seq: int) -> float:
    """Those of a step: three times the forward pass, with scores at 15% of the places."""
    head = 2 * config.hidden_size * (config.hidden_size + config.vocab_size)
    return 3 * (forward_flops(config, texts, seq) + 0.15 * texts * seq * head)


# --- the data side ---


def data(setting: Setting = CPU) -> Iterator[Row]:
    """Tokenizing, masking and packing on one core beside what a step on all cores consumes."""
    made = tokens_made_per_second(2_000 if setting.small else 20_000)
    for label, sizes, texts, seq, _ in SHAPES:
        model = models("BertForMaskedLM", sizes, setting)[0]
        ids = batch_of(texts, seq, model.config.vocab_size, "cpu")["input_ids"]
        run = our_step(model, ids, "float32", setting)
        run()
        used = texts * seq / min(seconds(run) for _ in range(3))
        yield Row(
            f"data on one core, {made / 1e6:.2f} million tokens/s tokenized, paired, padded and "
            f"masked; a step of {label} uses {used:,.0f} tokens/s",
            f"{made / used:.0f} times what the step uses",
            "20 times",
            made >= 20 * used,
        )


def tokens_made_per_second(count: int) -> float:
    """Tokens per second that one core makes of documents of the corpus, tokenizing included."""
    import itertools

    import numpy as np

    from bertlab.course.corpus import documents
    from bertlab.course.reference import vocabulary_file
    from bertlab.course.shards import Batches, open_shards, write_shards

    tokenizer = package().tokenizer.WordPieceTokenizer.from_vocab_file(vocabulary_file())
    texts = [[item.text for item in document] for document in itertools.islice(documents(), count)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            start = perf_counter()
            write_shards(texts, tokenizer, Path(folder) / "data", 62, "bench")
            shards = open_shards(Path(folder) / "data")
            everything = np.arange(len(shards.documents) - 1)
            batches = Batches(shards, everything, tokenizer, 32, next_sentence=False)
            for _ in itertools.islice(batches, batches.in_a_round):
                pass
            return batches.tokens / (perf_counter() - start)
    finally:
        torch.set_num_threads(threads)


# --- seconds to the same loss ---


class Reached(Exception):
    """The loss that was aimed at is reached."""


def loss(setting: Setting = CPU) -> Iterator[Row]:
    """Seconds to a held-out loss on the documentation, beside a Trainer with its defaults."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(setting, Path(folder))
        theirs, aim = experiment.trainer()
        ours, steps = experiment.ours(aim)
    ratio = ours / theirs
    yield Row(
        f"seconds to the held-out MLM loss {aim:.2f} (perplexity {math.exp(aim):,.0f}) on the "
        f"documentation, MiniLM with a fresh head, beside Trainer with its defaults "
        f"({experiment.steps} steps of 8 texts)",
        f"{ours:.1f} s in {steps} steps; Trainer {theirs:.1f} s; ratio {ratio:.2f}",
        "at most 0.50",
        ratio <= 0.5,
    )


class Experiment:
    """MiniLM with a head that nobody trained, the documentation, and a held-out loss.

    Both sides start with the weights that Transformers draws for the head and read the same texts.
    Measuring the held-out loss is not timed.
    """

    def __init__(self, setting: Setting, folder: Path) -> None:
        from bertlab.course.corpus import documentation
        from bertlab.course.reference import minilm_folder

        self.setting, self.folder = setting, folder
        self.steps = 4 if setting.small else 200
        texts = [item.text for item in documentation(per_library=1500, min_words=12)]
        self.held_out, self.texts = texts[:200], texts[200:]
        kind = package().tokenizer.WordPieceTokenizer
        self.tokenizer = kind.from_pretrained(minilm_folder())
        self.batches = self._held_out_batches()
        self.start = self._fresh()

    def _fresh(self) -> Any:
        import transformers

        from bertlab.course.reference import minilm_folder

        transformers.utils.logging.set_verbosity_error()  # that the head is missing is meant
        torch.manual_seed(0)
        model = transformers.BertForMaskedLM.from_pretrained(minilm_folder())
        model.tie_weights()
        return model

    def _held_out_batches(self) -> list[dict[str, Tensor]]:
        generator, batches = torch.Generator().manual_seed(0), []
        rows = sorted((ids[:64] for ids in self.tokenizer.encode_batch(self.held_out)), key=len)
        for start in range(0, len(rows), 25):
            ids = torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(row) for row in rows[start : start + 25]], batch_first=True
            )
            inputs, labels = package().pretraining.mask_tokens(
                ids, self.tokenizer, generator=generator
            )
            batches.append(
                {"input_ids": inputs, "attention_mask": (ids != 0).long(), "labels": labels}
            )
        return batches

    @torch.no_grad()
    def held_out_loss(self, model: Any) -> float:
        """The mean over all masks of the held-out texts."""
        was_training = model.training
        model.eval()
        total = count = 0.0
        for batch in self.batches:
            masks = float((batch["labels"] != -100).sum())
            on_device = {name: x.to(self.setting.device) for name, x in batch.items()}
            total, count = total + model(**on_device).loss.item() * masks, count + masks
        model.train(was_training)
        return total / count

    def trainer(self) -> tuple[float, float]:
        """Train with Transformers' Trainer and its defaults: seconds, and the loss reached."""
        from transformers import (
            BertTokenizer,
            DataCollatorForLanguageModeling,
            Trainer,
            TrainingArguments,
        )

        from bertlab.course.reference import minilm_folder

        tokenizer = BertTokenizer.from_pretrained(minilm_folder())
        rows = tokenizer(
            self.texts, truncation=True, max_length=64, return_special_tokens_mask=True
        )
        examples = [
            {name: rows[name][i] for name in ("input_ids", "attention_mask", "special_tokens_mask")}
            for i in range(len(self.texts))
        ]
        model = self._fresh()
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=str(self.folder),
                max_steps=self.steps,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                use_cpu=self.setting.device == "cpu",
            ),
            train_dataset=examples,  # type: ignore[arg-type]  # a list is enough
            data_collator=DataCollatorForLanguageModeling(tokenizer),
        )
        taken = seconds(trainer.train)
        return taken, self.held_out_loss(model)

    def ours(self, aim: float) -> tuple[float, int]:
        """Train with `adapt` until the loss is reached: seconds, and steps."""
        heads, weights, pretraining = package().heads, package().weights, package().pretraining
        config = package().config.BertConfig.from_hf(self.start.config)
        model = heads.BertForMaskedLM(config)
        weights.load_hf_state_dict(model, self.start.state_dict())
        model = model.to(self.setting.device)
        settings = pretraining.AdaptationSettings(
            learning_rate=5e-4,
            warmup_steps=self.steps // 20,
            total_steps=self.steps,
            batch_size=16,
            max_length=64,
            precision="bf16" if has_bf16_units() else "float32",
        )
        measuring = 0.0

        def look(step: int, _: float) -> None:
            nonlocal measuring
            start = perf_counter()
            reached = step % 5 == 0 and self.held_out_loss(model) <= aim
            measuring += perf_counter() - start
            if reached or step == self.steps:
                raise Reached(step)

        start = perf_counter()
        try:
            pretraining.adapt(model, self.tokenizer, self.texts, settings, look)
        except Reached as reached:
            if self.held_out_loss(model) > aim:
                return math.inf, reached.args[0]
            return perf_counter() - start - measuring, reached.args[0]
        raise AssertionError("look ends every run")


# --- a large text ---


def corpus(setting: Setting = CPU) -> Iterator[Row]:
    """Peak memory while a text of 1 GB, made from the corpus, flows through."""
    found = {}
    for megabytes in (4, 16) if setting.small else (60, 1000):
        with tempfile.TemporaryDirectory() as folder:
            write_text(Path(folder) / "text.txt", megabytes * 10**6)
            command = [sys.executable, "-m", "tests.bench_pretraining", "corpus_peak", folder]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        found[megabytes] = json.loads(done.stdout.splitlines()[-1])
    (small, first), (large, last) = found.items()
    yield Row(
        f"memory that reading {large:,} MB of text takes ({last['paragraphs']:,} paragraphs, "
        f"{large / last['seconds']:.0f} MB/s); {small} MB take {first['peak']:.0f} MB",
        f"{last['peak']:.0f} MB",
        "at most 32 MB",
        last["peak"] <= 32,
    )


def corpus_peak(folder: str) -> dict[str, float]:
    """In a process of its own: the peak, in MB, that reading a folder of text adds."""
    from bertlab.course import corpus

    count = 0

    def read() -> None:
        nonlocal count
        for _ in corpus.from_folder(folder):
            count += 1

    start = perf_counter()
    peak = _peak_of(read) / 1e6
    return {"peak": peak, "paragraphs": count, "seconds": perf_counter() - start}


def write_text(file: Path, size: int) -> None:
    """Write the documentation again and again, each time with a number, so that all differ."""
    from bertlab.course.corpus import paragraphs

    written = turn = 0
    with file.open("w", encoding="utf-8") as text:
        while written < size:
            for paragraph in paragraphs():
                written += text.write(f"{turn} {paragraph.text}\n\n")
                if written >= size:
                    break
            turn += 1


SMALL = replace(CPU, small=True, rounds=2)

if __name__ == "__main__":
    if sys.argv[1:2] == ["corpus_peak"]:
        print(json.dumps(corpus_peak(sys.argv[2])))
    else:  # a trial in small, to see that everything runs
        for bench in (step, data, loss, corpus):
            for row in bench(SMALL):
                print(row)
