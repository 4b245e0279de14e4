"""The benchmarks of chapter 8: small models, prepared models, ONNX, and a served model.

The models are trained once, on the paragraphs of chapter 7, and kept below the cache folder; the
first run takes about a quarter of an hour longer. Ratios are "times as fast", taken in turn.
"""

import hashlib
import http.client
import inspect
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.bench_model import BASE, CPU, TINY, Setting, batch_of, models, package, unlabelled
from tests.bench_pretraining import has_bf16_units
from tests.measure import ROOT, Row, paired, seconds, spread

MAX_LENGTH = 64  # tokens of a paragraph, as in chapter 7
STUDENTS = {"3 layers": 3, "2 layers": 2}
BATCH = 32


# --- the models, trained once ---


@cache
def trained(small: bool) -> SimpleNamespace:
    """The task of chapter 7, the teacher of 6 layers, and students of fewer, all fine-tuned.

    Attributes:
        task, tokenizer: the texts with labels, and MiniLM's tokenizer.
        folder: the teacher and the tokenizer, as `save_pretrained` wrote them.
        teacher: a `SequenceClassifier`.
        students: by name, from `STUDENTS`.
    """
    from bertlab.course.corpus import cache_folder
    from bertlab.course.reference import minilm_folder
    from bertlab.course.tasks import library_of_paragraph

    sizes = (4, 2, 4) if small else (120, 30, 250)
    task = library_of_paragraph(*sizes)
    tokenizer = package().tokenizer.WordPieceTokenizer.from_pretrained(minilm_folder())
    folder = cache_folder() / "bench-compression" / _key(task)
    found = SimpleNamespace(task=task, tokenizer=tokenizer, folder=folder, students={})
    if not (folder / "config.json").exists():
        _train_teacher(found, small)
    found.teacher = package().weights.from_pretrained(_classifier, folder)
    for name, layers in STUDENTS.items():
        file = folder / f"{layers}.safetensors"
        if not file.exists():
            package().compression.save_compressed(_taught(found, layers, small), file)
        found.students[name] = package().compression.load_compressed(file)
    return found


def _key(task: Any) -> str:
    """What the trained models depend on: the texts, and how they are trained."""
    how = inspect.getsource(_train_teacher) + inspect.getsource(_taught)
    about = [how, torch.__version__, repr(task.train), repr(task.validation)]
    starts = package().compression.alternate_layers
    about += [repr(starts(6, layers)) for layers in STUDENTS.values()]
    return hashlib.sha256("".join(about).encode()).hexdigest()[:16]


def _classifier(config: Any) -> Any:
    return package().fine_tuning.SequenceClassifier(package().encoder.BertModel(config), 8)


def batches_of(found: Any, texts: Sequence[str], labels: Sequence[int]) -> Any:
    """Texts, cut to `MAX_LENGTH`, in padded batches of like lengths."""
    rows = [
        {**found.tokenizer(text, truncation=True, max_length=MAX_LENGTH), "labels": label}
        for text, label in zip(texts, labels, strict=True)
    ]
    return package().fine_tuning.BucketedBatches(rows, BATCH, found.tokenizer.pad_token_id)


def part(found: Any, name: str) -> Any:
    """The batches of `train`, `validation` or `test`."""
    return batches_of(found, *zip(*getattr(found.task, name), strict=True))


def _train_teacher(found: Any, small: bool) -> None:
    """Fine-tune MiniLM as chapter 7 does; in small, a tiny model of as many layers."""
    from bertlab.course.reference import minilm_folder

    fine_tuning, weights, bert = package().fine_tuning, package().weights, package().encoder
    torch.manual_seed(0)
    if small:
        sizes = {**TINY, "num_hidden_layers": 6, "vocab_size": found.tokenizer.vocab_size}
        start = bert.BertModel(package().config.BertConfig(**sizes))
    else:
        start = weights.from_pretrained(bert.BertModel, minilm_folder())
    model = fine_tuning.SequenceClassifier(start, 8)
    settings = fine_tuning.FineTuningSettings(
        learning_rate=3e-4, epochs=4, layer_decay=0.9, freeze_embeddings=True, frozen_layers=2
    )
    fine_tuning.fine_tune(model.train(), part(found, "train"), part(found, "validation"), settings)
    found.tokenizer.save(found.folder)
    weights.save_pretrained(model, found.folder)


def _taught(found: Any, layers: int, small: bool) -> Any:
    """A student of the teacher: it also reads paragraphs that nobody labelled."""
    compression = package().compression
    more = unlabelled_paragraphs(found.task, 2 if small else 1000)
    texts = [text for text, _ in found.task.train] + more
    labels = [label for _, label in found.task.train] + [-100] * len(more)
    settings = package().fine_tuning.FineTuningSettings(
        learning_rate=3e-4, epochs=1 if small else 4, freeze_embeddings=True
    )
    torch.manual_seed(0)
    student = compression.student_of(found.teacher, layers).train()
    train = batches_of(found, texts, labels)
    known = taught_once(found.teacher)
    compression.distil(student, known, train, part(found, "validation"), settings, alpha=0.9)
    return student.eval()


@cache
def taught_once(teacher: Any) -> Any:
    """The teacher's answers, which all students share."""
    return package().compression.TeacherLogits(teacher)


def unlabelled_paragraphs(task: Any, per_library: int) -> list[str]:
    """Other paragraphs of the same libraries, none of them nearly one of the task's."""
    from bertlab.course.corpus import documentation
    from bertlab.course.tasks import without_near_duplicates

    known = [text for text, _ in [*task.test, *task.validation, *task.train]]
    drawn = documentation(task.labels, per_library=per_library, min_words=12, seed=1)
    numbered = list(enumerate([*known, *(each.text for each in drawn)]))
    fresh = without_near_duplicates(numbered, lambda item: item[1])
    return [text for number, text in fresh if number >= len(known)]


def in_transformers(folder: Path) -> Any:
    """The teacher as Transformers loads it, in float32."""
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification.from_pretrained(folder, num_labels=8).eval()


def accuracy(model: Any, batches: Any) -> float:
    hits = []
    with torch.inference_mode():
        for batch in batches:
            texts = {name: x for name, x in batch.items() if name != "labels"}
            hits.append(model(**texts).logits.argmax(dim=-1) == batch["labels"])
    return torch.cat(hits).double().mean().item()


def calls_of(model: Any, batch: dict[str, Tensor], calls: int) -> Callable[[], None]:
    """So many calls of a model."""

    def run() -> None:
        with torch.inference_mode():
            for _ in range(calls):
                model(**batch)

    run()
    return run


def full_batch(found: Any, texts: int) -> dict[str, Tensor]:
    """Texts of exactly `MAX_LENGTH` tokens: paragraphs of the test, one after the other."""
    ids = [i for text, _ in found.task.test for i in found.tokenizer.encode(text)[1:-1]]
    room, rows = MAX_LENGTH - 2, []
    for number in range(texts):
        start = number * room % (len(ids) - room)
        inner = ids[start : start + room]
        rows.append([found.tokenizer.cls_token_id, *inner, found.tokenizer.sep_token_id])
    ids_of_all = torch.tensor(rows)
    types = torch.zeros_like(ids_of_all)
    return {
        "input_ids": ids_of_all,
        "attention_mask": torch.ones_like(ids_of_all),
        "token_type_ids": types,
    }


# --- the smallest model that is nearly as good ---


def compressed(setting: Setting = CPU) -> Iterator[Row]:
    """The quickest of the compressed models within a point of the teacher, beside the teacher."""
    found = trained(setting.small)
    teacher, test = in_transformers(found.folder), list(part(found, "test"))
    batch, calls = full_batch(found, 1), 2 if setting.small else 20
    theirs, right = calls_of(teacher, batch, calls), accuracy(teacher, test)
    best: tuple[float, str] = (0.0, "none")
    with tempfile.TemporaryDirectory() as folder:
        for name, model in compressed_models(found, Path(folder)):
            ratios = paired(calls_of(model, batch, calls), theirs, setting.rounds)
            point = 100 * (accuracy(model, test) - right)
            if point >= -1:
                best = max(best, (statistics.median(ratios), name))
            yield Row(
                f"1 x {MAX_LENGTH}, {name}: accuracy {100 * right + point:.1f} %, the teacher's "
                f"{100 * right:.1f} % ({point:+.1f} points), {len(found.task.test)} texts",
                f"{spread(ratios)} times the float32 teacher in Transformers",
                "stated",
                True,
            )
    yield Row(
        f"1 x {MAX_LENGTH}, the quickest within a point of the teacher: {best[1]}",
        f"{best[0]:.2f} times as fast",
        "8 times",
        best[0] >= 8,
    )


def compressed_models(found: Any, folder: Path) -> Iterator[tuple[str, Any]]:
    """The teacher and its students in every form, by name."""
    compression = package().compression
    precisions = ("float32", "bf16") if has_bf16_units() else ("float32",)
    for label, model in {"6 layers": found.teacher, **found.students}.items():
        for precision in precisions:
            prepared = compression.prepare_for_inference(model, precision)
            yield f"{label}, prepared, {precision}", prepared
        yield f"{label}, int8 in PyTorch", compression.quantize_model(model)
        file = folder / f"{label}.onnx"
        compression.export_onnx(model, file)
        yield f"{label}, ONNX float32", compression.OnnxModel(file)
        compression.quantize_onnx(file, folder / f"{label} int8.onnx")
        yield f"{label}, ONNX int8", compression.OnnxModel(folder / f"{label} int8.onnx")


# --- a prepared model ---


def prepared(setting: Setting = CPU) -> Iterator[Row]:
    """prepare_for_inference on BERT-Base's shapes beside Transformers, float32 and bf16."""
    ours, theirs = models("BertModel", BASE, setting)
    units = has_bf16_units()
    for texts, seq in ((8, 128), (1, 32)):
        batch = unlabelled(batch_of(texts, seq, ours.config.vocab_size, "cpu"))
        calls = 1 if texts > 1 else 5
        yours = calls_of(theirs, batch, calls)
        for precision, asked in (("float32", 1.7), ("bf16", 3.0)):
            fast = package().compression.prepare_for_inference(ours, precision)
            same = _as_exact(fast, theirs, batch, precision)
            ratios = paired(calls_of(fast, batch, calls), yours, setting.rounds)
            least = asked if units and texts > 1 else 1.0
            middle = statistics.median(ratios)
            enough = middle >= least or (least == 1 and max(ratios) >= 1)
            yield Row(
                f"prepared BERT-Base, {texts} x {seq}, {precision} ({ways_of(fast)}); outputs "
                + ("the same" if same else "DIFFERENT"),
                f"{spread(ratios)} times as fast as Transformers in float32",
                f"{least} times"
                if least > 1
                else "never slower, within the spread" + ("" if units else " (no bf16 units here)"),
                same and enough,
            )


def ways_of(model: Any) -> str:
    """How many shapes of linear layer got which way."""
    ways = list(model.picked.values())
    return ", ".join(f"{ways.count(way)} of {len(ways)} {way}" for way in sorted(set(ways)))


@torch.inference_mode()
def _as_exact(fast: Any, theirs: Any, batch: dict[str, Tensor], precision: str) -> bool:
    """Within 20 times float32's own error; in bf16, no further off than Transformers in bf16."""
    import copy

    truth = copy.deepcopy(theirs).double()(**batch).last_hidden_state
    error = float((fast(**batch).last_hidden_state - truth).abs().max())
    if precision == "float32":
        return error <= 20 * float((theirs(**batch).last_hidden_state - truth).abs().max())
    halved = copy.deepcopy(theirs).bfloat16()(**batch).last_hidden_state
    return error <= float((halved - truth).abs().max())


# --- many texts ---


def throughput(setting: Setting = CPU) -> Iterator[Row]:
    """20,000 paragraphs, prepared and without padding, beside a pipeline of Transformers."""
    from transformers import BertTokenizer, TextClassificationPipeline

    from bertlab.course.corpus import paragraphs

    found = trained(setting.small)
    count = 200 if setting.small else 20_000
    texts = [paragraph.text for paragraph in paragraphs()][::4][:count]
    tokenizer: Any = BertTokenizer.from_pretrained(found.folder)
    pipeline = TextClassificationPipeline(
        model=in_transformers(found.folder), tokenizer=tokenizer, batch_size=BATCH
    )
    fast = package().compression.prepare_for_inference(found.teacher)
    fine_tuning = package().fine_tuning
    pipeline(texts[:BATCH], truncation=True)
    fine_tuning.predict(fast, found.tokenizer, texts[:BATCH])
    start = perf_counter()
    theirs = [int(x["label"].rpartition("_")[2]) for x in pipeline(texts, truncation=True)]
    middle = perf_counter()
    logits = first_windows(fast, found.tokenizer, texts)
    ours_taken, theirs_taken = perf_counter() - middle, middle - start
    wrong = differing(logits, torch.tensor(theirs))
    ratio = theirs_taken / ours_taken
    yield Row(
        f"{count:,} paragraphs, float32, from text to label: {count / ours_taken:.0f} a second; a "
        f"pipeline {count / theirs_taken:.0f} a second; labels "
        + ("the same" if wrong == 0 else f"DIFFERENT for {wrong}"),
        f"{ratio:.2f} times as fast",
        "6 times, the same",
        wrong == 0 and ratio >= 6,
    )


def first_windows(model: Any, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """The logits of texts cut to 512 tokens, as a pipeline cuts them; nothing is padded."""
    fine_tuning = package().fine_tuning
    examples = [
        {"input_ids": [*ids[:511], tokenizer.sep_token_id] if len(ids) > 512 else ids}
        for ids in tokenizer.encode_batch(texts)
    ]
    outputs = fine_tuning.read_examples(model, examples, tokenizer.pad_token_id)
    return torch.stack([output.logits for output in outputs])


def differing(logits: Tensor, labels: Tensor) -> int:
    """How many labels are others than the logits', and not by a tie of float32."""
    top = logits.topk(2)
    tie = top.values[:, 0] - top.values[:, 1] < 1e-5 * logits.abs().amax(dim=1)
    return int(((top.indices[:, 0] != labels) & ~tie).sum())


# --- ONNX ---


def onnx(setting: Setting = CPU) -> Iterator[Row]:
    """ONNX Runtime, float32 and int8, beside Transformers, for one text and for 32."""
    found, compression = trained(setting.small), package().compression
    theirs, test = in_transformers(found.folder), list(part(found, "test"))
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: Path(folder) / f"{kind}.onnx" for kind in ("float32", "int8")}
        compression.export_onnx(found.teacher, files["float32"])
        compression.quantize_onnx(files["float32"], files["int8"])
        for kind, file in files.items():
            model = compression.OnnxModel(file)
            same = kind == "int8" or _same_logits(model, theirs, full_batch(found, 4))
            size, right = file.stat().st_size / 1e6, 100 * accuracy(model, test)
            for texts in (1, BATCH):
                batch, calls = full_batch(found, texts), 20 if texts == 1 else 1
                mine, yours = (calls_of(x, batch, calls) for x in (model, theirs))
                ratios = paired(mine, yours, setting.rounds)
                taken = 1000 * min(seconds(mine) for _ in range(3)) / calls
                yield Row(
                    f"ONNX Runtime, {kind}, {texts} x {MAX_LENGTH}: {taken:.1f} ms, {size:.0f} MB, "
                    f"accuracy {right:.1f} %; outputs " + ("as they should" if same else "WRONG"),
                    f"{spread(ratios)} times the float32 teacher in Transformers",
                    "stated; float32 the same outputs",
                    same,
                )


@torch.inference_mode()
def _same_logits(one: Any, other: Any, batch: dict[str, Tensor]) -> bool:
    first, second = one(**batch).logits, other(**batch).logits
    return torch.allclose(first, second, rtol=1e-4, atol=1e-4 * float(second.abs().max()))


# --- a served model under load ---


def served(setting: Setting = CPU) -> Iterator[Row]:
    """A server asked by eight clients of another process: float32, int8, and ONNX."""
    found, compression = trained(setting.small), package().compression
    requests = 40 if setting.small else 800
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found.tokenizer.save(folder)
        compression.export_onnx(found.teacher, folder / "teacher.onnx")
        ways = {
            "float32": (found.folder, "float32"),
            "int8 in PyTorch": (found.folder, "int8"),
            "ONNX float32": (folder / "teacher.onnx", "float32"),
            "ONNX int8": (folder / "teacher.onnx", "int8"),
        }
        texts = [text for text, _ in found.task.test]
        (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
        for way, (path, precision) in ways.items():
            for clients in (1, 8):
                loaded = under_load(path, precision, folder / "texts.json", requests, clients)
                yield Row(
                    f"served, {way}, {clients} clients, {requests} requests: median "
                    f"{loaded['median']:.1f} ms, p95 {loaded['p95']:.1f} ms, "
                    f"{loaded['batch']:.1f} texts a batch, {loaded['failed']} failed",
                    f"{loaded['per_second']:.0f} a second",
                    "stated; none fails",
                    loaded["failed"] == 0,
                )


def under_load(
    model: Path, precision: str, texts: Path, requests: int, clients: int
) -> dict[str, float]:
    """Start a server, ask it from another process, and stop it."""
    with server(model, precision) as port:
        arguments = {"port": port, "texts": str(texts), "requests": requests, "clients": clients}
        command = [sys.executable, "-m", "tests.bench_compression", json.dumps(arguments)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def server(model: Path, precision: str) -> Iterator[int]:
    """A server of the complete package on a free port, stopped afterwards."""
    course = Path(package().compression.__file__).parents[1]
    options = ["--port", "0", "--precision", precision, "--max-wait-ms", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "bertlab.course.serve", str(model.resolve()), *options],
        cwd=course,  # `-m` looks there first
        env={**os.environ, "PYTHONPATH": str(course)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = ""
        while "serving on" not in said and process.poll() is None:
            said = process.stdout.readline()
        port = re.search(r"127\.0\.0\.1:(\d+)", said)
        if port is None:
            raise RuntimeError("the server did not start")
        yield int(port[1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def load(port: int, texts: str, requests: int, clients: int) -> dict[str, float]:
    """In a process of its own: clients that each ask again as soon as they are answered."""
    bodies = [
        json.dumps({"text": text[:600], "top_k": 1}).encode()  # some 200 tokens, at most
        for text in json.loads(Path(texts).read_text(encoding="utf-8"))
    ]
    numbers, times, sizes = iter(range(requests)), list[float](), list[int]()
    lock = threading.Lock()

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            start = perf_counter()
            answer = _asked(connection, bodies[number % len(bodies)])
            if answer is not None:
                times.append(1000 * (perf_counter() - start))
                sizes.append(answer["batch"])

    threads = [threading.Thread(target=client) for _ in range(clients)]
    start = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = perf_counter() - start
    return {
        "per_second": len(times) / taken,
        "median": statistics.median(times),
        "p95": statistics.quantiles(times, n=20)[-1],
        "batch": 1 / statistics.mean(1 / size for size in sizes),
        "failed": requests - len(times),
    }


def _asked(connection: http.client.HTTPConnection, body: bytes) -> dict[str, Any] | None:
    try:
        connection.request("POST", "/classify", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, ValueError, http.client.HTTPException):
        connection.close()
        return None
    return answer if response.status == 200 else None


SMALL = replace(CPU, small=True, rounds=2)

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        print(json.dumps(load(**json.loads(sys.argv[1]))))
    else:  # a trial in small, to see that everything runs
        benches = (compressed, prepared, throughput, onnx, served)
        for bench in benches:
            if not sys.argv[1:] or bench.__name__ in sys.argv[1:]:
                for row in bench(SMALL):
                    print(row, flush=True)
