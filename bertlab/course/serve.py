"""Serve a model over HTTP, to this machine alone: the class of a text, or what its mask hides.

    python -m bertlab.course.serve MODEL [MODEL]
    curl --json '{"text": "Paris is the [MASK] of France."}' http://127.0.0.1:8765/fill-mask

It uses your own package; parts that are not written yet are replaced by their stand-ins. Requests
that arrive together are read as one batch: the first waits a few milliseconds for others, and
while the model computes, the next batch gathers. So many users cost less than as many single
calls, and one user alone loses only the wait.

What a server must see to, and this one does: it listens on 127.0.0.1 only and refuses requests
that a foreign page sends through the browser (by their Host and Origin headers); a body, a text and
the line of those who wait have limits, and what is refused is told why; a model that fails says so
here and not to the client; and when it is stopped it answers what is in flight first.
"""

import asyncio
import json
import logging
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tornado.web
import typer
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets

HOST = "127.0.0.1"
PATHS = {"classification": "/classify", "fill-mask": "/fill-mask"}
PRECISIONS = ("float32", "bfloat16", "int8")
MAX_BODY = 256 * 1024  # bytes
MAX_DRAINED = 16 * MAX_BODY  # of a body that is too large; what is more ends the connection
MAX_CHARACTERS = 10_000  # of a text
MAX_MASKS = 16  # in a text
MAX_TOP_K = 50
MAX_BATCH_TOKENS = 4096  # padding included: scores of the vocabulary take 0.1 MB for each
GRACE_SECONDS = 30  # for what is in flight when the server is stopped
ACCEPT_SECONDS = 0.1  # for connections made just before

logger = logging.getLogger(__name__)
Answer = list[list[tuple[int, float]]]  # for the text or each mask: (class or piece, probability)


# --- the model ---


@dataclass
class Served:
    """A model that answers, and what belongs to it.

    Attributes:
        task: `"classification"` or `"fill-mask"`.
        name: the file or folder it came from.
        precision: what it computes in.
        tokenizer: the model's.
        limit: how many tokens a text may have, special ones included.
        scores: a batch's scores by text: `[1, labels]`, or `[masks, vocab]`.
        labels: the classes' names; none for fill-mask.
        pairs: whether the model was made for two texts at once.
    """

    task: str
    name: str
    precision: str
    tokenizer: Any
    limit: int
    scores: Callable[[Mapping[str, Any]], Sequence[Any]]
    labels: tuple[str, ...] = ()
    pairs: bool = True

    def answers(self, examples: Sequence[Mapping[str, list[int]]]) -> list[Answer]:
        """Read texts as one batch: for each, its likeliest classes or pieces.

        Raises:
            FloatingPointError: the scores are no numbers.
        """
        import torch

        from bertlab.fine_tuning import pad_batch

        with torch.inference_mode():
            batch = pad_batch(examples, self.tokenizer.pad_token_id)
            return [likeliest(scores) for scores in self.scores(batch)]

    def name_of(self, number: int) -> str:
        """A class's name, or a piece."""
        return self.labels[number] if self.labels else self.tokenizer.convert_ids_to_tokens(number)

    def try_out(self) -> None:
        """Read the longest text of the rarest pieces once, so that no request is the first.

        Also finds out whether it reads pairs, for which it needs a second token type.

        Raises:
            ValueError: the model cannot; the message says what is wrong with it.
        """
        tokenizer = self.tokenizer
        try:
            self.answers([self._longest_text(second_type=0)])
        except FloatingPointError as error:
            raise ValueError(f"{self.name} cannot be served: {error}") from None
        except Exception as error:  # of PyTorch or ONNX Runtime
            raise ValueError(
                f"{self.name} cannot read {self.limit} tokens of a vocabulary of "
                f"{tokenizer.vocab_size} pieces ({first_line(error)}); is the tokenizer "
                "that of another model, or the model for shorter texts than config.json and the "
                "tokenizer's model_max_length say?"
            ) from error
        try:
            self.answers([self._longest_text(second_type=1)])
        except Exception:  # the same read one type: this one has no second
            self.pairs = False

    def _longest_text(self, second_type: int) -> dict[str, list[int]]:
        tokenizer, half = self.tokenizer, self.limit // 2
        inner = [tokenizer.mask_token_id, *[tokenizer.vocab_size - 1] * (self.limit - 3)]
        ids = [tokenizer.cls_token_id, *inner, tokenizer.sep_token_id]
        types = [0] * half + [second_type] * (len(ids) - half)
        return {"input_ids": ids, "token_type_ids": types}


def first_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def likeliest(scores: Any) -> Answer:
    """The likeliest numbers of each row of scores, `[rows, choices]`, and their probabilities.

    Raises:
        FloatingPointError: a score is NaN or infinite.
    """
    found = scores.float().softmax(dim=-1).topk(min(MAX_TOP_K, scores.shape[-1]))
    if not found.values.isfinite().all():
        raise FloatingPointError("its scores are not numbers (NaN or infinite)")
    rows = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [list(zip(numbers, values, strict=True)) for numbers, values in rows]


def load(path: Path, precision: str = "float32", labels: Sequence[str] = ()) -> Served:
    """Load what is to be served.

    Args:
        path: a folder that `save_pretrained` or Transformers wrote; a file of `save_compressed`,
            or the folder it is in; or an `.onnx` file. A tokenizer (`vocab.txt`) is in the same
            folder. An ONNX file does not say how long its texts may be: 512 tokens, if neither a
            `config.json` beside it nor the tokenizer says less.
        precision: `float32`, which leaves a model of `save_compressed` and an ONNX file as they
            are; `bfloat16`, not for ONNX; or `int8`.
        labels: the names of the classes; those of `config.json`, or numbers, when there are none.

    Raises:
        FileNotFoundError: the model or its tokenizer is not there.
        ValueError: it cannot be read, or has no head for one of the two tasks; or the number of
            labels is not the model's.
    """
    if not path.exists():
        raise FileNotFoundError(f"MODEL is {path}, which does not exist")
    make = _from_onnx if path.suffix == ".onnx" else _from_tensors
    try:
        served = make(path, precision)
    except (ValueError, FileNotFoundError, NotImplementedError):
        raise  # these say what is wrong
    except Exception as error:  # of whoever reads such a file: damaged, or of another kind
        raise ValueError(f"MODEL is {path}, which cannot be loaded: {first_line(error)}") from error
    served.try_out()
    if served.task == "classification":
        count = len(served.labels)
        served.labels = tuple(labels) or served.labels
        if len(served.labels) != count:
            raise ValueError(f"labels has {len(labels)} names, but {path} has {count} classes")
    return served


def _tokenizer_of(folder: Path) -> Any:
    from bertlab.tokenizer import WordPieceTokenizer

    try:
        return WordPieceTokenizer.from_pretrained(folder)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}: a model is served with its tokenizer; tokenizer.save({str(folder)!r}) "
            "puts it there"
        ) from None


def _from_tensors(path: Path, precision: str) -> Served:
    """A model of PyTorch's, prepared for this machine."""
    from bertlab.compression import (
        BF16,
        Int8Linear,
        positions_of,
        prepare_for_inference,
        quantize_model,
    )

    folder = path if path.is_dir() else path.parent
    tokenizer = _tokenizer_of(folder)
    model = _module_of(path).float().eval()
    task, scores = _task_of(model, path, tokenizer.mask_token_id)
    if precision == "int8":
        model = quantize_model(model)
    model = prepare_for_inference(model, "bf16" if precision == "bfloat16" else "float32")
    limit = min(positions_of(model), tokenizer.model_max_length or positions_of(model))
    has_int8 = any(isinstance(part, Int8Linear) for part in model.modules())
    if precision == "bfloat16" and BF16 not in model.picked.values():
        precision = "float32, since bfloat16 is not faster here"
    precision = "int8" if has_int8 else precision
    served = Served(task, str(path), precision, tokenizer, limit, lambda x: scores(model, x))
    if task == "classification":
        served.labels = label_names(folder, len(model.classifier.bias))
    return served


def _module_of(path: Path) -> Any:
    """The model in a folder or a file.

    Raises:
        ValueError: there is none, or more than one.
    """
    from bertlab.compression import load_compressed

    if path.is_file():
        return load_compressed(path)
    if (path / "config.json").exists():
        return _checkpoint(path)
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        raise ValueError(
            f"MODEL is {path}, which has no config.json and {len(files)} .safetensors files; give "
            "a folder that save_pretrained wrote, a file of save_compressed, or an .onnx file"
        )
    return load_compressed(files[0])


def _checkpoint(folder: Path) -> Any:
    """The model that `save_pretrained` or Transformers wrote, with the head its config names."""
    from bertlab.encoder import BertModel
    from bertlab.fine_tuning import SequenceClassifier
    from bertlab.heads import BertForMaskedLM, BertForPreTraining
    from bertlab.weights import from_pretrained, read_config, read_tensors

    found = (read_config(folder).get("architectures") or ["no head"])[0]
    if found in ("SequenceClassifier", "BertForSequenceClassification"):
        head = read_tensors(folder).get("classifier.weight")
        if head is None:
            raise ValueError(f"MODEL is {folder}, a {found} by its config, without a classifier")
        classes = len(head)
        kind: Any = lambda config: SequenceClassifier(BertModel(config), classes)  # noqa: E731
    else:
        kinds = {"BertForMaskedLM": BertForMaskedLM, "BertForPreTraining": BertForPreTraining}
        kind = kinds.get(found)
    if kind is None:
        raise ValueError(_no_task(folder, found))
    return from_pretrained(kind, folder)


def _no_task(path: Path, found: str) -> str:
    return (
        f"MODEL is {path}, a {found}; served are SequenceClassifier (classification), and "
        "BertForMaskedLM and BertForPreTraining (fill-mask)"
    )


def _task_of(model: Any, path: Path, mask_id: int) -> tuple[str, Callable[[Any, Any], Any]]:
    """What a model can answer, and the function that gives its scores."""
    from bertlab.fine_tuning import SequenceClassifier

    if isinstance(model, SequenceClassifier):
        return "classification", lambda model, batch: model(**batch).logits[:, None]
    if not hasattr(model, "mlm_head"):
        raise ValueError(_no_task(path, type(model).__name__))

    def at_masks(model: Any, batch: Mapping[str, Any]) -> Any:
        masks = batch["input_ids"] == mask_id
        hidden_states = model.bert(**batch).last_hidden_state
        return model.mlm_head(hidden_states, masks).split(masks.sum(dim=1).tolist())

    return "fill-mask", at_masks


def label_names(folder: Path, classes: int) -> tuple[str, ...]:
    """The classes' names in a folder's `config.json`, as Transformers writes them; or numbers."""
    from bertlab.tokenizer import read_json

    found = read_json(folder / "config.json").get("id2label") or {}
    numbers = [str(number) for number in range(classes)]
    return tuple(str(found[x]) for x in numbers) if set(found) == set(numbers) else tuple(numbers)


def _from_onnx(path: Path, precision: str) -> Served:
    """A file of `export_onnx`, in ONNX Runtime."""
    from bertlab.tokenizer import read_json

    tokenizer = _tokenizer_of(path.parent)
    model = _onnx_model(path, precision)
    positions = read_json(path.parent / "config.json").get("max_position_embeddings", 512)
    limit = min(tokenizer.model_max_length or positions, positions)
    task, scores = _onnx_task_of(model, path, tokenizer)
    how = "as the file is" if precision == "float32" else precision
    served = Served(task, str(path), f"ONNX Runtime, {how}", tokenizer, limit, scores)
    if task == "classification":
        ids = [tokenizer.cls_token_id, tokenizer.sep_token_id]
        read = served.answers([{"input_ids": ids, "token_type_ids": [0, 0]}])
        served.labels = label_names(path.parent, len(read[0][0]))
    return served


def _onnx_model(path: Path, precision: str) -> Any:
    from bertlab.compression import OnnxModel, quantize_onnx

    if precision == "bfloat16":
        raise ValueError(f"precision is bfloat16, but {path.name} can be served in float32 or int8")
    if precision == "float32":
        return OnnxModel(path)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "int8.onnx"
        quantize_onnx(path, file)
        return OnnxModel(file)


def _onnx_task_of(model: Any, path: Path, tokenizer: Any) -> tuple[str, Callable[[Any], Any]]:
    """What an ONNX file can answer, and the function that gives its scores."""
    shapes = {each.name: each.shape for each in model.session.get_outputs()}
    if len(shapes.get("logits", ())) == 2:
        return "classification", lambda batch: model(**batch).logits[:, None]
    name = next((name for name in ("logits", "prediction_logits") if name in shapes), "")
    if not name or shapes[name][-1] != tokenizer.vocab_size:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(_no_task(path, f"file with the outputs {found}"))

    def at_masks(batch: Mapping[str, Any]) -> Any:
        masks = batch["input_ids"] == tokenizer.mask_token_id
        scores = getattr(model(**batch), name)[masks]
        return scores.split(masks.sum(dim=1).tolist())

    return "fill-mask", at_masks


# --- batches ---


class Refusal(tornado.web.HTTPError):
    """A request that is not answered: a status, and a message for whoever sent it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.message = message


@dataclass(eq=False)
class Waiting:
    """A text that waits for its turn.

    Attributes:
        example: its `input_ids` and `token_type_ids`.
        arrived: when, on the event loop's clock.
        answer: set when it is known: the answer, and how many texts were read together.
    """

    example: Mapping[str, list[int]]
    arrived: float
    answer: asyncio.Future[tuple[Answer, int]]

    def end(self, refusal: "Refusal") -> None:
        """Let it wait no longer."""
        if not self.answer.done():
            self.answer.set_exception(refusal)


@dataclass
class Batcher:
    """Reads texts that arrive together as one batch.

    Attributes:
        served: the model.
        worker: where it computes: one thread for all models.
        max_batch: texts in a batch, at most.
        max_wait: how long the first text waits for others, in seconds.
        max_waiting: texts that may wait; one more is refused.
        counts: of texts, batches, and texts refused; and the largest batch.
    """

    served: Served
    worker: Executor
    max_batch: int = 32
    max_wait: float = 0.005
    max_waiting: int = 256
    counts: dict[str, int] = field(
        default_factory=lambda: {"texts": 0, "batches": 0, "largest_batch": 0, "refused": 0}
    )

    def __post_init__(self) -> None:
        self.waiting: deque[Waiting] = deque()
        self.read_now: list[Waiting] = []
        self.arrived = asyncio.Event()

    def check_room(self) -> None:
        """Refuse another text when too many wait.

        Raises:
            Refusal: 503.
        """
        if len(self.waiting) >= self.max_waiting:
            self.counts["refused"] += 1
            raise Refusal(
                503,
                f"{len(self.waiting)} texts are waiting, and no more may; try again in a second",
            )

    def add(self, example: Mapping[str, list[int]]) -> Waiting:
        """Let one text wait for its answer, to be read together with others."""
        loop = asyncio.get_running_loop()
        text = Waiting(example, loop.time(), loop.create_future())
        self.waiting.append(text)
        self.arrived.set()
        return text

    def leave(self, text: Waiting) -> None:
        """Forget a text for which nobody waits any more."""
        text.end(Refusal(408, "the client went away"))
        if text in self.waiting:
            self.waiting.remove(text)

    def give_up(self) -> None:
        """Tell all who wait that there will be no answer."""
        for text in (*self.waiting, *self.read_now):
            text.end(Refusal(503, f"the server was stopped {GRACE_SECONDS} seconds ago"))

    def status(self) -> dict[str, Any]:
        """The model, the counts and the limits."""
        served = self.served
        return {
            "task": served.task,
            "path": PATHS[served.task],
            "model": Path(served.name).name,
            "precision": served.precision,
            "labels": served.labels,
            "mask_token": served.tokenizer.mask_token,
            "waiting": len(self.waiting),
            **self.counts,
            "max_batch": self.max_batch,
            "max_wait_ms": 1000 * self.max_wait,
            "max_waiting": self.max_waiting,
            "max_tokens": served.limit,
        }

    async def run(self) -> None:
        """Read batch after batch, until it is cancelled."""
        while True:
            await self._until(1)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self.waiting[0].arrived + self.max_wait):
                    await self._until(self.max_batch)
            await self._answer(self._next_batch())

    async def _until(self, count: int) -> None:
        """Wait until so many texts wait."""
        while len(self.waiting) < count:
            self.arrived.clear()
            await self.arrived.wait()

    def _next_batch(self) -> list[Waiting]:
        """The texts that have waited longest, as many as fit together."""
        chosen: list[Waiting] = []
        longest = 0
        while self.waiting and len(chosen) < self.max_batch:
            longest = max(longest, len(self.waiting[0].example["input_ids"]))
            if chosen and longest * (len(chosen) + 1) > MAX_BATCH_TOKENS:
                break
            chosen.append(self.waiting.popleft())
        return chosen

    async def _answer(self, chosen: list[Waiting]) -> None:
        """Compute in the worker's thread, while this one takes requests."""
        size = len(chosen)
        if size == 0:  # they went away
            return
        self.read_now = chosen
        self.counts["texts"] += size
        self.counts["batches"] += 1
        self.counts["largest_batch"] = max(size, self.counts["largest_batch"])
        loop, examples = asyncio.get_running_loop(), [text.example for text in chosen]
        try:
            answers = await loop.run_in_executor(self.worker, self.served.answers, examples)
        except Exception as error:  # whatever a model may raise: those who wait must hear of it
            for text in chosen:
                if not text.answer.done():
                    text.answer.set_exception(error)
            return
        for text, answer in zip(chosen, answers, strict=True):
            if not text.answer.done():
                text.answer.set_result((answer, size))


# --- requests ---


@tornado.web.stream_request_body
class Handler(tornado.web.RequestHandler):
    """What all paths have in common: who may ask, how much, and how a refusal looks.

    A body is read to its end before anything is answered; a client that is still sending would
    not see the answer.
    """

    METHODS: ClassVar[tuple[str, ...]] = ("GET", "HEAD")

    def set_default_headers(self) -> None:
        """Say to the browser what the page may do: nothing that leaves this server."""
        self.clear_header("Server")
        self.set_header("Cache-Control", "no-store")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Referrer-Policy", "no-referrer")
        policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        policy += "img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
        self.set_header("Content-Security-Policy", policy)

    def prepare(self) -> None:
        """Note that a request began."""
        self.application.settings["in_flight"].add(self)
        self.body, self.received = bytearray(), 0

    def on_finish(self) -> None:
        """Note that it was answered."""
        self.application.settings["in_flight"].discard(self)

    def on_connection_close(self) -> None:
        """Note that the client went away."""
        super().on_connection_close()  # ends the wait for the rest of its body
        self.application.settings["in_flight"].discard(self)

    def data_received(self, chunk: bytes) -> None:
        """Keep a part of the body, as long as it is not too large."""
        self.received += len(chunk)
        if self.received <= MAX_BODY:
            self.body += chunk
        elif self.received > MAX_DRAINED and not self._finished:
            self.send_error(413, exc_info=(Refusal, self.too_large(), None))

    def too_large(self) -> Refusal:
        """What is said to a body that is too large."""
        size = self.request.headers.get("Content-Length", f"more than {MAX_BODY}")
        return Refusal(413, f"the body has {size} bytes, but may have at most {MAX_BODY}")

    async def handle(self) -> None:
        """Answer a request of any method, unless it is refused."""
        if self._finished:  # refused while its body came
            return
        self.check()
        await self.answer()

    get = head = post = put = patch = delete = options = handle

    def check(self) -> None:
        """Refuse what a foreign page sends through the browser, a wrong method, a large body."""
        own, host = self.application.settings["hosts"], self.request.headers.get("Host", "")
        if host not in own:
            allowed = f"{' or '.join(own)}"
            raise Refusal(403, f"the Host header is {host!r}, but must be {allowed}")
        origin = self.request.headers.get("Origin")
        if origin is not None and origin.removeprefix("http://") not in own:
            raise Refusal(
                403, f"the request comes from {origin}, but must come from http://{own[0]}"
            )
        if self.request.method not in self.METHODS:
            raise Refusal(
                405, f"the method is {self.request.method}, but must be {' or '.join(self.METHODS)}"
            )
        if self.received > MAX_BODY:
            raise self.too_large()
        if self.application.settings["stopping"].is_set():
            raise Refusal(503, "the server is being stopped")

    async def answer(self) -> None:
        """Answer a request that was not refused; other paths know more."""
        paths = ", ".join(["/", "/status", *PATHS.values()])
        raise Refusal(404, f"there is nothing at {self.request.path}; there are {paths}")

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Say what is wrong, in JSON; of a fault of our own, no more than that there is one."""
        error = (kwargs.get("exc_info") or (None, None, None))[1]
        message = getattr(error, "message", self._reason)
        if status_code >= 500 and not isinstance(error, Refusal):
            message = "the model failed; the reason is in the server's own output"
        if status_code == 405:
            self.set_header("Allow", ", ".join(self.METHODS))
        if status_code == 503:
            self.set_header("Retry-After", "1")
        self.finish({"error": message, "status": status_code})

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        """Log faults of our own, with their traceback; a refusal is none."""
        if not isinstance(value, tornado.web.HTTPError):
            raised = (typ, value, tb)
            logger.error("%s %s", self.request.method, self.request.path, exc_info=raised)


class Page(Handler):
    """A file of the page to try it: which, the route says, never the request."""

    TYPES: ClassVar[dict[str, str]] = {
        ".html": "text/html",
        ".css": "text/css",
        ".js": "text/javascript",
    }

    def initialize(self, file: str) -> None:
        """Note the file's name; it is beside this module."""
        self.file = Path(__file__).with_name(file)

    async def answer(self) -> None:
        """Send the file."""
        self.set_header("Content-Type", f"{self.TYPES[self.file.suffix]}; charset=utf-8")
        await self.finish(self.file.read_bytes())


class Status(Handler):
    """What is served, how much was asked, and what is allowed."""

    async def answer(self) -> None:
        """Send it as JSON."""
        models = [batcher.status() for batcher in self.application.settings["batchers"].values()]
        limits = {"max_body_bytes": MAX_BODY, "max_characters": MAX_CHARACTERS}
        await self.finish({"models": models, **limits, "max_top_k": MAX_TOP_K})


class Ask(Handler):
    """A text in, an answer out."""

    METHODS = ("POST",)

    def initialize(self, task: str) -> None:
        """Note the task, a key of `PATHS`."""
        self.task = task
        self.leave: Callable[[], None] = lambda: None

    def on_connection_close(self) -> None:
        """Note that the client went away, and compute nothing for it."""
        super().on_connection_close()
        self.leave()

    async def answer(self) -> None:
        """Answer with classes, or with the pieces for each mask, likeliest first."""
        batchers = self.application.settings["batchers"]
        if self.task not in batchers:
            served = ", ".join(f"{task} at {PATHS[task]}" for task in batchers)
            raise Refusal(404, f"no model for {self.task} is served; served is {served}")
        batcher = batchers[self.task]
        asked = self.asked()
        batcher.check_room()
        text = batcher.add(example_of(batcher.served, asked["text"], asked["pair"]))
        self.leave = lambda: batcher.leave(text)
        answer, size = await text.answer
        taken = 1000 * (asyncio.get_running_loop().time() - text.arrived)
        named = [
            [
                {"name": batcher.served.name_of(i), "probability": p}
                for i, p in row[: asked["top_k"]]
            ]
            for row in answer
        ]
        result = {"labels": named[0]} if self.task == "classification" else {"masks": named}
        about = {
            "tokens": len(text.example["input_ids"]),
            "batch": size,
            "milliseconds": round(taken, 3),
        }
        await self.finish({**result, **about})

    def asked(self) -> dict[str, Any]:
        """The fields of a body, checked.

        Raises:
            Refusal: 400 or 415, with what came and what is allowed.
        """
        kind = self.request.headers.get("Content-Type", "").split(";")[0].strip().lower()
        if kind != "application/json":  # a foreign page cannot send this type unasked
            raise Refusal(415, f"the Content-Type is {kind!r}, but must be application/json")
        try:
            body = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refusal(
                400, f'the body is of type {type(body).__name__}, but must be {{"text": ...}}'
            )
        return fields_of(body)


def fields_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """`text`, `pair` and `top_k` of a request.

    Raises:
        Refusal: 400: a field is unknown, missing, of another type or too large.
    """
    unknown = sorted(set(body) - {"text", "pair", "top_k"})
    if unknown:
        raise Refusal(
            400, f"there is no field {unknown[0][:100]!r}; there are text, pair and top_k"
        )
    found = {"text": body.get("text"), "pair": body.get("pair"), "top_k": body.get("top_k", 5)}
    check_text("text", found["text"])
    if found["pair"] is not None:
        check_text("pair", found["pair"])
    top_k = found["top_k"]
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= MAX_TOP_K:
        came = repr(top_k)[:100]
        raise Refusal(400, f"top_k is {came}, but must be a whole number, 1 to {MAX_TOP_K}")
    return found


def check_text(name: str, text: Any) -> None:
    """Refuse what is no text, is empty, or is too long."""
    if not isinstance(text, str) or not text.strip():
        came = "missing" if text is None else f"of type {type(text).__name__}"
        came = "empty" if isinstance(text, str) else came
        raise Refusal(400, f"{name} is {came}, but must be a string that is not empty")
    if len(text) > MAX_CHARACTERS:
        raise Refusal(
            400, f"{name} has {len(text)} characters, but may have at most {MAX_CHARACTERS}"
        )


def example_of(served: Served, text: str, pair: str | None) -> dict[str, list[int]]:
    """A text as the model reads it.

    Raises:
        Refusal: 400: it is too long, cannot be read, has no mask or too many; or it is a pair, and
            the model reads none.
    """
    if pair is not None and not served.pairs:
        raise Refusal(400, "pair is given, but this model reads one text: it has one token type")
    try:
        encoded = served.tokenizer(text, pair, truncation=False)
    except ValueError as error:  # half of a surrogate pair
        raise Refusal(400, str(error)) from None
    ids = encoded["input_ids"]
    if len(ids) > served.limit:
        raise Refusal(400, f"text has {len(ids)} tokens, but may have at most {served.limit}")
    masks, mask = ids.count(served.tokenizer.mask_token_id), served.tokenizer.mask_token
    if served.task == "fill-mask" and not 1 <= masks <= MAX_MASKS:
        raise Refusal(400, f"text has {masks} {mask}, but must have from 1 to {MAX_MASKS}")
    return {name: encoded[name] for name in ("input_ids", "token_type_ids")}


# --- the server ---


def routes() -> Iterator[tuple[str, type[Handler], dict[str, str]]]:
    """Every path there is."""
    files = {"/": "serve.html", "/serve.css": "serve.css", "/serve.js": "serve.js"}
    for path, file in {**files, "/look.css": "look.css"}.items():
        yield path.replace(".", r"\."), Page, {"file": file}
    yield "/status", Status, {}
    for task, path in PATHS.items():
        yield path, Ask, {"task": task}


def listen(port: int) -> list[socket.socket]:
    """Take a port of this machine, before time is spent on loading; 0 takes one that is free.

    Raises:
        ValueError: another program has it, or it is not for this user.
    """
    try:
        return bind_sockets(port, HOST)
    except OSError as error:
        raise ValueError(
            f"port is {port}, which cannot be used ({error.strerror}); give another with --port, "
            "or --port 0 for any that is free"
        ) from None


def hosts(port: int) -> list[str]:
    """What a client that means this server writes into its Host header."""
    plain = [HOST, "localhost"]
    return [f"{name}:{port}" for name in plain] + (plain if port == 80 else [])


async def serve(
    batchers: Mapping[str, Batcher],
    sockets: list[socket.socket],
    announce: Callable[[str], None],
) -> None:
    """Answer requests until SIGTERM or SIGINT, then what is in flight, and return.

    Args:
        batchers: by task.
        sockets: those of `listen`.
        announce: is called with the address, when it answers.
    """
    stopping, in_flight = asyncio.Event(), set[Handler]()
    port = sockets[0].getsockname()[1]
    application = tornado.web.Application(
        list(routes()),
        default_handler_class=Handler,
        log_function=lambda handler: None,
        hosts=hosts(port),
        batchers=batchers,
        stopping=stopping,
        in_flight=in_flight,
    )
    server = HTTPServer(
        application, max_body_size=2**62, body_timeout=30, idle_connection_timeout=60
    )
    running = [asyncio.create_task(batcher.run()) for batcher in batchers.values()]
    server.add_sockets(sockets)
    with _on_signals(stopping):
        announce(f"http://{HOST}:{port}")
        await stopping.wait()
        await asyncio.sleep(ACCEPT_SECONDS)  # who had connected before is told, not cut off
        server.stop()
        if not await finished(in_flight, GRACE_SECONDS):
            for batcher in batchers.values():
                batcher.give_up()
            await finished(in_flight, 1)
        await server.close_all_connections()
    for task in running:
        task.cancel()


@contextmanager
def _on_signals(stopping: asyncio.Event) -> Iterator[None]:
    """Within it, SIGTERM and SIGINT (Ctrl+C) only set an event."""
    loop = asyncio.get_running_loop()
    before = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        stop = lambda *_: loop.call_soon_threadsafe(stopping.set)  # noqa: E731
        before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def finished(in_flight: set[Handler], seconds: float) -> bool:
    """Wait until everything in flight is answered, but not for ever; return whether it is."""
    end = asyncio.get_running_loop().time() + seconds
    while in_flight and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.01)
    return not in_flight


def run(
    models: Sequence[Served],
    sockets: list[socket.socket],
    max_batch: int,
    max_wait: float,
    waiting: int,
) -> None:
    """Serve models, one for each task, in this process."""

    def announce(address: str) -> None:
        for model in models:
            where = f"{address}{PATHS[model.task]}"
            typer.echo(f"{model.task} by {model.name} ({model.precision}): POST {where}")
        typer.echo(f"serving on {address} (try it there; Ctrl+C stops)")
        sys.stdout.flush()

    async def go() -> None:
        batchers = {x.task: Batcher(x, worker, max_batch, max_wait, waiting) for x in models}
        await serve(batchers, sockets, announce)

    with ThreadPoolExecutor(1, "model") as worker:
        asyncio.run(go())
    typer.echo("stopped")


HELP = """Serve a model over HTTP, to this machine alone.

\b
python -m bertlab.course.serve MODEL
curl --json '{"text": "This is it."}' http://127.0.0.1:8765/classify

MODEL is a folder that save_pretrained or Transformers wrote, with the head of a SequenceClassifier
(POST /classify), BertForMaskedLM or BertForPreTraining (POST /fill-mask); a file of
save_compressed, or its folder; or an .onnx file. Its tokenizer is in the same folder. Give one
MODEL, or one for each task. A request is JSON: text, and if wanted pair and top_k. A page to try
it is at /, and counts are at /status.
"""


def main(
    model: Annotated[list[Path], typer.Argument(help="A folder or a file, see above.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8765,
    precision: Annotated[str, typer.Option(help=" or ".join(PRECISIONS))] = "float32",
    max_batch: Annotated[int, typer.Option(min=1, max=512, help="Texts in a batch.")] = 32,
    max_wait_ms: Annotated[
        float, typer.Option(min=0, max=10_000, help="How long a text waits for others.")
    ] = 5.0,
    max_waiting: Annotated[
        int, typer.Option(min=1, max=100_000, help="Texts that may wait; more are refused.")
    ] = 256,
    labels: Annotated[str, typer.Option(help="The classes' names, as a,b,c.")] = "",
) -> None:
    """Load, serve, and stop when asked to."""
    from bertlab.course.pretrain import use_the_package

    names = [name.strip() for name in labels.split(",") if name.strip()]
    try:
        if precision not in PRECISIONS:
            allowed = ", ".join(PRECISIONS)
            raise ValueError(f"precision is {precision!r}, but must be one of {allowed}")
        sockets = listen(port)
        package = use_the_package()
        served = [load(path, precision, names) for path in model]
        tasks = [each.task for each in served]
        if names and "classification" not in tasks:
            raise ValueError(f"labels is {labels}, but no MODEL is for classification")
        if len(set(tasks)) < len(tasks):
            raise ValueError(f"the models are for {', '.join(tasks)}; give one for each task")
        if package.uses:
            typer.echo(f"on stand-ins for {', '.join(sorted(package.uses))}", err=True)
        run(served, sockets, max_batch, max_wait_ms / 1000, max_waiting)
    except (ValueError, OSError, RuntimeError) as error:
        typer.echo(f"serve: {error}", err=True)
        raise SystemExit(2) from None


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command(help=HELP)(main)

if __name__ == "__main__":
    app()
