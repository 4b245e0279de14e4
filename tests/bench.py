"""`make bench`: the speed claims, each measured side by side in one run, as a table.

Medians of interleaved runs, with the spread. Nothing here is a test: a slow machine is not a bug.
Run on an otherwise idle machine: ``make bench`` or ``make bench ARGS="tokenizer"``.
"""

import os
import platform
import random
import shutil
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests import (
    bench_compression,
    bench_fine_tuning,
    bench_grading,
    bench_model,
    bench_pretraining,
    bench_tasks,
)
from tests.measure import ROOT, Row, complete, paired, seconds, spread

# --- chapter 1: the tokenizer ---


def tokenizer() -> Iterator[Row]:
    """encode_batch of the complete package against the Rust tokenizer, one core each."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    from tokenizers import BertWordPieceTokenizer

    from bertlab.course.corpus import paragraphs
    from bertlab.course.reference import vocabulary_file

    tokenizer_class = complete().tokenizer.WordPieceTokenizer
    rust = BertWordPieceTokenizer(str(vocabulary_file()))
    texts = [paragraph.text for paragraph in paragraphs()][::4][:20_000]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6

    def rust_ids(batch: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in rust._tokenizer.encode_batch_fast(batch)]

    ours = tokenizer_class.from_vocab_file(vocabulary_file())
    cold = seconds(lambda: ours.encode_batch(texts))
    same = ours.encode_batch(texts) == rust_ids(texts)
    ratios = paired(
        lambda: ours.encode_batch(texts), lambda: rust._tokenizer.encode_batch_fast(texts), 7
    )
    fast = statistics.median([seconds(lambda: ours.encode_batch(texts)) for _ in range(5)])
    yield Row(
        f"encode_batch, {len(texts):,} paragraphs, {megabytes:.1f} MB, ids "
        + ("identical" if same else "DIFFERENT"),
        f"{spread(ratios)} times Rust; {megabytes / fast:.1f} MB/s",
        "5 times, identical",
        same and statistics.median(ratios) >= 5,
    )
    rust_once = seconds(lambda: rust._tokenizer.encode_batch_fast(texts))
    yield Row(
        "the same, first call (nothing memorized)",
        f"{rust_once / cold:.2f} times Rust",
        "stated",
        True,
    )
    fresh = new_words(2_000)
    again = tokenizer_class.from_vocab_file(vocabulary_file())
    ours_new = seconds(lambda: again.encode_batch(fresh))
    rust_new = seconds(lambda: rust._tokenizer.encode_batch_fast(fresh))
    same = again.encode_batch(fresh) == rust_ids(fresh)
    yield Row(
        "text in which every word is new, ids " + ("identical" if same else "DIFFERENT"),
        f"{rust_new / ours_new:.2f} times Rust",
        "stated",
        same,
    )


def new_words(lines: int) -> list[str]:
    """Return text in which no word comes twice."""
    rng, seen = random.Random(0), set()
    while len(seen) < lines * 30:
        seen.add("".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 12))))
    words = sorted(seen)
    rng.shuffle(words)
    return [" ".join(words[start : start + 30]) for start in range(0, len(words), 30)]


# --- the engine ---


def first_card() -> Iterator[Row]:
    """From a cold kernel to the card of the first check, and each check after that."""
    from bertlab.course import outline
    from bertlab.course.authoring.release import release
    from bertlab.course.regions import find_regions
    from tests.course.kernels import kernel

    def cell(exercise_id: str) -> str:
        module = outline.entries()[exercise_id].module
        source = (ROOT / "solutions" / "bertlab" / f"{module}.py").read_text(encoding="utf-8")
        return f"%%fill {exercise_id}\n{find_regions(source)[exercise_id].text}"

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "course"
        release(ROOT, copy)
        for first in ("0.1", "3.1"):
            taken = []
            for _ in range(3):
                shutil.rmtree(copy / ".bertlab", ignore_errors=True)
                start = time.perf_counter()
                with kernel(copy) as running:
                    running.run("%load_ext bertlab.course")
                    assert "✓" in running.run(cell(first)).text
                    taken.append(time.perf_counter() - start)
                    running.run("%reset -f")
                subprocess.run(
                    [sys.executable, "-m", "bertlab.course.cli", "reset", first],
                    cwd=copy,
                    env={**os.environ, "PYTHONPATH": str(copy)},
                    capture_output=True,
                    check=True,
                )
            yield Row(
                f"cold kernel to the card of {first}",
                spread(taken, " s"),
                "at most 6 s",
                statistics.median(taken) <= 6,
            )
        with kernel(copy) as running:
            running.run("%load_ext bertlab.course")
            running.run(cell("0.1"))
            running.run("import transformers.models.bert.modeling_bert")  # read on for 10 seconds
            taken_by = {}
            for exercise_id in outline.entries():
                running.run(cell(exercise_id))
                taken_by[exercise_id] = seconds(lambda x=exercise_id: running.run(f"%check {x}"))
        slowest = max(taken_by, key=lambda x: taken_by[x])
        yield Row(
            "a single check after that, the slowest",
            f"{taken_by[slowest]:.2f} s ({slowest})",
            "at most 1 s",
            taken_by[slowest] <= 1,
        )


def chapter_checks() -> Iterator[Row]:
    """A whole chapter judged in a fresh process, as `%check 3` does."""
    from bertlab.course import outline
    from bertlab.course.authoring.build import complete_package

    with tempfile.TemporaryDirectory() as folder:
        complete_package(ROOT, Path(folder))
        environment = {**os.environ, "PYTHONPATH": folder}
        for chapter in outline.chapters():
            command = [sys.executable, "-m", "bertlab.course.cli", "check", str(chapter.number)]
            start = time.perf_counter()
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True
            )
            taken = time.perf_counter() - start
            yield Row(
                f"chapter {chapter.number} judged in a fresh process"
                + ("" if done.returncode == 0 else " (IT FAILS)"),
                f"{taken:.1f} s",
                "at most 15 s",
                taken <= 15 and done.returncode == 0,
            )


BENCHES = {
    "tokenizer": tokenizer,
    "first_card": first_card,
    "chapters": chapter_checks,
    "forward": bench_model.forward,
    "training": bench_model.training,
    "packed": bench_model.packed,
    "mlm": bench_model.mlm,
    "memory": bench_model.memory,
    "loading": bench_model.loading,
    "grading": bench_grading.grading,
    "step": bench_pretraining.step,
    "data": bench_pretraining.data,
    "loss": bench_pretraining.loss,
    "corpus": bench_pretraining.corpus,
    "fine_tuning": bench_fine_tuning.fine_tuning,
    "inference": bench_fine_tuning.inference,
    "tasks": bench_tasks.tasks,
    "compressed": bench_compression.compressed,
    "prepared": bench_compression.prepared,
    "throughput": bench_compression.throughput,
    "onnx": bench_compression.onnx,
    "served": bench_compression.served,
}


def main() -> None:
    """Run the benches named on the command line, or all."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from bertlab.course.display import table

    chosen = sys.argv[1:] or list(BENCHES)
    unknown = [name for name in chosen if name not in BENCHES]
    if unknown:
        raise SystemExit(f"no bench {unknown[0]!r}; there are {', '.join(BENCHES)}")
    rows = []
    for name in chosen:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        for row in BENCHES[name]():
            print(f"  {row.what}: {row.result}", file=sys.stderr, flush=True)
            rows.append(row)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    print(
        table(
            ["what", "measured", "asked", ""],
            [(row.what, row.result, row.asked, "✓" if row.holds else "✗") for row in rows],
            f"{time.strftime('%Y-%m-%d')}, {machine}",
        ).text
    )


if __name__ == "__main__":
    main()
