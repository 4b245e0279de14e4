"""All checks and benchmarks on one device, as one table: ``python -m tests.gpu.check_gpu``.

On a GPU it takes under 4 minutes. ``--device cpu --small`` runs the same code in half a minute,
which is what continuous integration does, so that it does not rot.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("BERTLAB_REFERENCE", "seeded")

import torch
import transformers

from bertlab.course import exercise as exercises
from bertlab.course import judging, reference
from bertlab.course.agreement import compare, compare_gradients
from bertlab.course.display import table
from tests import bench_model
from tests.bench_model import Setting
from tests.measure import Row

#: Chapters whose exercises compute on the device.
ON_DEVICE = (2, 3, 4, 5)


def exercises_pass(setting: Setting) -> Iterator[Row]:
    """Every exercise of the chapters with tensors: the solution passes, each mistake fails."""
    for chapter in ON_DEVICE:
        wrong, count = [], 0
        for exercise in exercises.of_chapter(chapter):
            module = getattr(bench_model.package(), exercise.module)
            parts = SimpleNamespace(**{name: getattr(module, name) for name in exercise.names})
            standards = judging.Standards(exercise, device=setting.device)
            if judging.judge(exercise, parts, standards=standards).status != "passed":
                wrong.append(f"{exercise.id}: the solution does not pass")
            mistakes = exercise.misconceptions[: 1 if setting.small else None]
            for mistake in mistakes:
                count += 1
                verdict = judging.judge(exercise, exercise.wrong(mistake), standards=standards)
                if verdict.status != "failed":
                    wrong.append(f"{exercise.id}: {mistake.name}: passes")
        yield Row(
            f"chapter {chapter}: solutions pass, {count} known mistakes fail",
            "; ".join(wrong) or "all",
            "all",
            not wrong,
        )


def agrees(setting: Setting) -> Iterator[Row]:
    """Every part and every gradient beside Transformers: drawn BERT-Base, and MiniLM."""
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = bench_model.models("BertForPreTraining", bench_model.BASE, setting)
        ours, theirs = ours.to(dtype), theirs.to(dtype)
        batch = bench_model.padded([24, 9, 1], ours.config.vocab_size, setting.device)
        labels = torch.full_like(batch["input_ids"], -100)
        labels[:, 0] = batch["input_ids"][:, 0]
        following = torch.tensor([0, 1, 1], device=setting.device)
        names = bench_model.package().weights.hf_name_map(ours.config)
        for what, agreement in (
            ("outputs of every part", compare(ours, theirs, batch)),
            (
                "loss and gradient of every parameter",
                compare_gradients(
                    ours,
                    theirs,
                    {**batch, "labels": labels, "next_sentence_label": following},
                    names,
                ),
            ),
        ):
            yield Row(
                f"BERT-Base, drawn weights, {dtype}: {what}".replace("torch.", ""),
                agreement.verdict,
                "agree",
                agreement.first_departure is None,
            )
    package = bench_model.package()
    folder = reference.minilm_folder()
    ours = package.weights.from_pretrained(package.encoder.BertModel, folder).to(setting.device)
    batch = bench_model.padded([31, 12, 5], ours.config.vocab_size, setting.device)
    agreement = compare(ours, torch.nn.Module.to(reference.minilm(), setting.device), batch)
    yield Row("MiniLM's weights", agreement.verdict, "agree", agreement.first_departure is None)


CHECKS = (
    exercises_pass,
    agrees,
    bench_model.forward,
    bench_model.training,
    bench_model.packed,
    bench_model.mlm,
    bench_model.memory,
    bench_model.loading,
)


def run(checks: tuple[Callable[[Setting], Iterator[Row]], ...], setting: Setting) -> list[Row]:
    """Run the checks one after the other; a check that raises is a row that does not hold."""
    rows: list[Row] = []
    for check in checks:
        print(f"{check.__name__} ...", file=sys.stderr, flush=True)
        try:
            rows += check(setting)
        except Exception as error:
            rows.append(Row(check.__name__, f"{type(error).__name__}: {error}", "runs", False))
    return rows


def main() -> None:
    """Print the table; exit 1 when a check does not hold. A benchmark that misses is shown only."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu", "mps"])
    parser.add_argument("--small", action="store_true", help="tiny models, to test this script")
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; --device cpu --small tests this script")
    torch.set_float32_matmul_precision("highest")
    transformers.utils.logging.disable_progress_bar()
    start = time.perf_counter()
    setting = Setting(chosen.device, chosen.small, rounds=1 if chosen.small else 7)
    rows = run(CHECKS, setting)
    name = torch.cuda.get_device_name() if chosen.device == "cuda" else chosen.device
    print(
        table(
            ["what", "measured", "asked", ""],
            [(row.what, row.result, row.asked, "✓" if row.holds else "✗") for row in rows],
            f"{name}{', tiny models' if chosen.small else ''}; PyTorch {torch.__version__}, "
            f"Transformers {transformers.__version__}; {time.perf_counter() - start:.0f} s",
        ).text
    )
    checked = len(ON_DEVICE) + 5
    raised = any(row.asked == "runs" for row in rows)
    raise SystemExit(int(raised or not all(row.holds for row in rows[:checked])))


if __name__ == "__main__":
    main()
