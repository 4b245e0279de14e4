"""The benchmarks of the whole model: chapters 4 and 5 beside Transformers, on any device.

Every ratio is ours to theirs, or theirs to ours where the claim is "times as fast", measured in
turn in one process. Peak memory is that of a process of its own.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.measure import ROOT, Row, complete, paired, seconds, spread

BASE: dict[str, Any] = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
MINILM: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 500,
}


@dataclass(frozen=True)
class Setting:
    """Where and at what size the benchmarks run."""

    device: str = "cpu"
    small: bool = False
    rounds: int = 7

    def shape(self, sizes: dict[str, Any]) -> dict[str, Any]:
        return TINY if self.small else sizes

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


CPU = Setting()


@cache
def package() -> SimpleNamespace:
    return complete()


def models(name: str, sizes: dict[str, Any], setting: Setting) -> tuple[Any, Any]:
    """Return our model of this name and Hugging Face's: same weights, on the device, eval mode."""
    import transformers

    from bertlab.course.reference import seeded_bert

    config = transformers.BertConfig(**setting.shape(sizes))
    theirs = seeded_bert(config, model_class=getattr(transformers, name))
    home = package().encoder if name == "BertModel" else package().heads
    ours = getattr(home, name)(package().config.BertConfig.from_hf(config)).eval()
    package().weights.load_hf_state_dict(ours, theirs.state_dict())
    return ours.to(setting.device), theirs.to(setting.device)


def batch_of(texts: int, seq: int, vocab_size: int, device: str) -> dict[str, Tensor]:
    """Return a full batch as a tokenizer gives it, with 15% of the places labelled."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocab_size, (texts, seq), generator=generator)
    labelled = torch.rand(texts, seq, generator=generator) < 0.15
    labelled[0, 0] = True
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
        "labels": torch.where(labelled, ids, -100),
    }
    return {name: x.to(device) for name, x in batch.items()}


def unlabelled(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in batch.items() if name != "labels"}


def step_of(model: Any, batch: dict[str, Tensor], setting: Setting) -> Callable[[], None]:
    """Return one training step: forward, loss, backward, AdamW."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step() -> None:
        output = model(**batch)
        loss = getattr(output, "loss", None)
        if loss is None:
            loss = output.last_hidden_state.square().mean() + output.pooler_output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        setting.wait()

    return step


def forward_of(call: Callable[..., Any], batch: dict[str, Tensor], setting: Setting):
    def forward() -> Any:
        with torch.no_grad():
            output = call(**batch)
        setting.wait()
        return output

    return forward


# --- the model ---


def forward(setting: Setting = CPU) -> Iterator[Row]:
    """BERT-Base's forward pass beside Transformers with sdpa, and beside the machine's peak."""
    ours, theirs = models("BertModel", BASE, setting)
    for texts, seq in ((8, 128), (1, 32)):
        batch = unlabelled(batch_of(texts, seq, ours.config.vocab_size, setting.device))
        mine, yours = (forward_of(model, batch, setting) for model in (ours, theirs))
        mine()
        yours()
        rounds = setting.rounds * (1 if texts > 1 else 5)
        ratios = paired(yours, mine, rounds)
        yield Row(
            f"BERT-Base forward, {texts} x {seq}, float32: time of Transformers' (sdpa)",
            spread(ratios),
            "at most 1.00 within the spread",
            statistics.median(ratios) <= 1 or min(ratios) <= 1,
        )
        if texts > 1:
            yield _fraction_of_peak(mine, texts, seq, ours, setting)


def _fraction_of_peak(run: Callable[[], Any], texts: int, seq: int, model: Any, setting: Setting):
    """The forward pass's multiplications per second beside those of one large matrix product."""
    size = 256 if setting.small else 3072
    a, b = (torch.randn(size, size, device=setting.device) for _ in range(2))

    def product() -> None:
        torch.mm(a, b)
        setting.wait()

    product()
    peak = 2 * size**3 / min(seconds(product) for _ in range(9))
    reached = forward_flops(model.config, texts, seq) / min(seconds(run) for _ in range(5))
    return Row(
        f"the same: {reached / 1e9:,.0f} GFLOP/s, where a matrix product of {size} reaches "
        f"{peak / 1e9:,.0f}",
        f"{reached / peak:.2f} of the peak",
        "stated",
        True,
    )


def forward_flops(config: Any, texts: int, seq: int) -> int:
    """Multiplications and additions of the matrix products of a forward pass."""
    hidden, wide = config.hidden_size, config.intermediate_size
    linear = 2 * hidden * (4 * hidden + 2 * wide)  # a token, a layer
    attention = 2 * 2 * seq * hidden  # the scores and the mixing
    pooler = 2 * hidden * hidden
    return texts * (seq * config.num_hidden_layers * (linear + attention) + pooler)


def training(setting: Setting = CPU) -> Iterator[Row]:
    """BERT-Base's training step beside Transformers with sdpa."""
    for texts, seq in ((8, 128), (1, 32)):
        ours, theirs = models("BertModel", BASE, setting)
        batch = unlabelled(batch_of(texts, seq, ours.config.vocab_size, setting.device))
        mine, yours = (step_of(model, batch, setting) for model in (ours, theirs))
        mine()
        yours()
        ratios = paired(yours, mine, setting.rounds)
        yield Row(
            f"BERT-Base training step, {texts} x {seq}, float32, dropout on, AdamW: time of "
            "Transformers' (sdpa)",
            spread(ratios),
            "at most 1.00 within the spread",
            statistics.median(ratios) <= 1 or min(ratios) <= 1,
        )


# --- without padding ---


def packed(setting: Setting = CPU) -> Iterator[Row]:
    """forward_packed on the corpus's real lengths beside forward on padded batches.

    Padding to a batch's longest makes 5 times as many positions as there are tokens where texts
    are docstrings, and 3.4 times where they are single paragraphs: that is about what leaving it
    out can give. The target is for docstrings; what it gives for paragraphs is stated.
    """
    for label, sizes, batches_of_32 in (("MiniLM's shape", MINILM, 16), ("BERT-Base's", BASE, 3)):
        ours, _ = models("BertModel", sizes, setting)
        for kind, target in (("docstrings", 3.5), ("paragraphs", None)):
            texts = 32 * (1 if setting.small else batches_of_32)
            lengths = corpus_lengths(texts, whole=kind == "docstrings")
            yield _packed_row(f"{label}, {texts} {kind}", lengths, ours, target, setting)


def _packed_row(
    what: str, lengths: list[int], ours: Any, target: float | None, setting: Setting
) -> Row:
    batches = [
        padded(lengths[start : start + 32], ours.config.vocab_size, setting.device)
        for start in range(0, len(lengths), 32)
    ]
    positions = sum(batch["input_ids"].numel() for batch in batches)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    same = all(_same_outputs(ours, batch) for batch in batches)

    def run(call: Callable[..., Any]) -> Callable[[], None]:
        def all_batches() -> None:
            for batch in batches:
                forward_of(call, batch, setting)()

        return all_batches

    ratios = paired(run(ours.forward_packed), run(ours), 3)
    return Row(
        f"forward without padding, {what} in batches of 32 ({positions / tokens:.1f} times as "
        f"many positions as tokens), outputs {'the same' if same else 'DIFFERENT'}",
        f"{spread(ratios)} times as fast as padded",
        f"{target} times, the same" if target else "the same; speed is stated",
        same and (target is None or statistics.median(ratios) >= target),
    )


def corpus_lengths(count: int, whole: bool = False) -> list[int]:
    """Numbers of tokens of paragraphs or `whole` docstrings of the corpus, at most 512."""
    from bertlab.course.corpus import paragraphs
    from bertlab.course.reference import vocabulary_file

    texts = defaultdict(list)
    for number, paragraph in enumerate(paragraphs()):
        texts[paragraph.document if whole else number].append(paragraph.text)
    drawn = [" ".join(parts) for parts in texts.values()]
    random.Random(0).shuffle(drawn)
    tokenizer = package().tokenizer.WordPieceTokenizer.from_vocab_file(vocabulary_file())
    return [min(len(ids), 512) for ids in tokenizer.encode_batch(drawn[:count])]


def padded(lengths: list[int], vocab_size: int, device: str) -> dict[str, Tensor]:
    """Return texts of random ids with these lengths, padded to the longest."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, vocab_size, mask.shape, generator=generator) * mask
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


@torch.no_grad()
def _same_outputs(model: Any, batch: dict[str, Tensor]) -> bool:
    real = batch["attention_mask"].bool()
    one = model(**batch).last_hidden_state[real]
    other = model.forward_packed(**batch).last_hidden_state[real]
    return torch.allclose(one, other, rtol=1e-4, atol=1e-4 * float(one.abs().max()))


# --- the MLM step ---


def mlm(setting: Setting = CPU) -> Iterator[Row]:
    """An MLM training step of ours beside that of Transformers' BertForMaskedLM."""
    for label, sizes, texts, seq, asked in (
        ("BERT-Base's shape", BASE, 8, 128, 1.15),
        ("MiniLM's shape", MINILM, 32, 64, 1.9),
    ):
        ours, theirs = models("BertForMaskedLM", sizes, setting)
        batch = batch_of(texts, seq, ours.config.vocab_size, setting.device)
        same = _same_loss_and_gradients(ours, theirs, batch)
        mine, yours = (step_of(model, batch, setting) for model in (ours, theirs))
        mine()
        yours()
        ratios = paired(mine, yours, setting.rounds)
        yield Row(
            f"MLM training step, {label}, {texts} x {seq}, float32; loss and gradients "
            + ("the same" if same else "DIFFERENT"),
            f"{spread(ratios)} times as fast as BertForMaskedLM",
            f"{asked} times, the same",
            same and statistics.median(ratios) >= asked,
        )


def _same_loss_and_gradients(ours: Any, theirs: Any, batch: dict[str, Tensor]) -> bool:
    from bertlab.course.agreement import compare_gradients

    names = package().weights.hf_name_map(ours.config)
    short = {name: x[:2, :32].contiguous() for name, x in batch.items()}
    return compare_gradients(ours, theirs, short, names).first_departure is None


# --- memory and loading, each in a process of its own ---


def memory(setting: Setting = CPU) -> Iterator[Row]:
    """Peak memory of an MLM training step, ours and Transformers', MiniLM's shape."""
    peaks = {}
    for whose in ("ours", "theirs"):
        arguments = {"whose": whose, "device": setting.device, "small": setting.small}
        peaks[whose] = _in_a_process("mlm_peak", arguments)["peak"] / 1e6
    yield Row(
        "peak memory that forward and backward of MLM add to the model, MiniLM's shape, 32 x 64",
        f"{peaks['ours']:,.0f} MB; Transformers {peaks['theirs']:,.0f} MB",
        "stated",
        True,
    )


def loading(setting: Setting = CPU) -> Iterator[Row]:
    """from_pretrained of BERT-Base beside Transformers', time and peak memory."""
    import transformers

    from bertlab.course.reference import seeded_bert

    with tempfile.TemporaryDirectory() as folder:
        config = transformers.BertConfig(**setting.shape(BASE))
        seeded_bert(config).save_pretrained(folder)
        size = (Path(folder) / "model.safetensors").stat().st_size
        taken: dict[str, list[float]] = {"ours": [], "theirs": []}
        peaks: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(1 if setting.small else 5):
            for whose in taken:
                measured = _in_a_process("load", {"whose": whose, "folder": folder})
                taken[whose].append(measured["seconds"])
                peaks[whose].append(measured["peak"] / size)
    ratio = statistics.median(taken["ours"]) / statistics.median(taken["theirs"])
    yield Row(
        f"from_pretrained, BERT-Base ({size / 1e6:.0f} MB), a new process each time, after imports",
        f"{spread(taken['ours'], ' s')}; Transformers {spread(taken['theirs'], ' s')}",
        "no slower",
        ratio <= 1,
    )
    peak = statistics.median(peaks["ours"])
    yield Row(
        "peak memory that loading, and reading every weight once, add",
        f"{peak:.2f} times the file; Transformers {statistics.median(peaks['theirs']):.2f}",
        "at most 1.2 times",
        peak <= 1.2,
    )


def _in_a_process(name: str, arguments: dict[str, Any]) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.bench_model", name, json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _peak_of(run: Callable[[], Any], device: str = "cpu") -> float:
    """Return by how many bytes the peak of this process's memory exceeds what it had before."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def mlm_peak(whose: str, device: str, small: bool) -> dict[str, float]:
    """In a process of its own: the peak that forward and backward of one batch add."""
    both = models("BertForMaskedLM", MINILM, replace(CPU, device=device, small=small))
    model = both[0 if whose == "ours" else 1].train()
    batch = batch_of(32, 64, model.config.vocab_size, device)
    return {"peak": _peak_of(lambda: model(**batch).loss.backward(), device)}


def load(whose: str, folder: str) -> dict[str, float]:
    """In a process of its own: the time to load, and the peak with every weight read once."""
    import transformers

    loaders = {
        "ours": lambda: package().weights.from_pretrained(package().encoder.BertModel, folder),
        "theirs": lambda: transformers.BertModel.from_pretrained(folder),
    }
    package()
    transformers.BertModel(transformers.BertConfig(**TINY))  # imports what it needs
    package().encoder.BertModel(package().config.BertConfig(**TINY))
    taken = 0.0
    kept = []

    def run() -> None:
        nonlocal taken
        taken = seconds(lambda: kept.append(loaders[whose]()))
        with torch.no_grad():
            for parameter in kept[0].parameters():
                parameter.sum()

    peak = _peak_of(run)
    return {"seconds": taken, "peak": peak}


if __name__ == "__main__":
    measure = {"mlm_peak": mlm_peak, "load": load}[sys.argv[1]]
    print(json.dumps(measure(**json.loads(sys.argv[2]))))
