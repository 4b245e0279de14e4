"""The served model: a real server in a process of its own, asked over real HTTP."""

import copy
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from bertlab.course import serve
from bertlab.course.exercises.chapter_8 import quick_exporter

from . import browser as browsing

WORDS = ["the", "a", "of", "model", "reads", "text", "words", "is", "not", "number", "array", "sum"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s", "##ing", ".", ","]
LABELS = ("code", "<i>prose</i>", "100% other")


@pytest.fixture(scope="module")
def models(complete, tmp_path_factory) -> SimpleNamespace:
    """A classifier and a masked language model, each in memory and in a folder."""
    folder = tmp_path_factory.mktemp("models")
    config = complete.config.BertConfig(
        vocab_size=len(PIECES),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=40,
    )
    torch.manual_seed(0)
    found = {
        "classifier": complete.fine_tuning.SequenceClassifier(
            complete.encoder.BertModel(config), 3
        ),
        "mlm": complete.heads.BertForMaskedLM(config),
    }
    tokenizer = complete.tokenizer.WordPieceTokenizer({x: i for i, x in enumerate(PIECES)})
    for name, model in found.items():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
        complete.weights.save_pretrained(model.eval(), folder / name)
        tokenizer.save(folder / name)
    return SimpleNamespace(folder=folder, tokenizer=tokenizer, complete=complete, **found)


@pytest.fixture(scope="module")
def exported(models) -> dict[str, Path]:
    """Both models as ONNX files, beside their configs and tokenizers."""
    files = {name: models.folder / name / "model.onnx" for name in ("classifier", "mlm")}
    with quick_exporter():
        for name, file in files.items():
            models.complete.compression.export_onnx(getattr(models, name), file)
    return files


@contextmanager
def served(models: SimpleNamespace, *arguments: str) -> Iterator[SimpleNamespace]:
    """Start a server on a free port, and make sure that it is gone afterwards."""
    package = Path(models.complete.compression.__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "bertlab.course.serve", "--port", "0", *arguments],
        env={**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"},
        cwd=models.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if "serving on" in line:
                break
        port = re.search(r":(\d+) \(try", "".join(said))
        assert port, process.communicate(timeout=10)
        yield SimpleNamespace(process=process, port=int(port[1]), said="".join(said))
        if process.poll() is None:  # Ctrl+C stops it as SIGTERM does
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=serve.GRACE_SECONDS / 2) == 0
    finally:
        process.kill()
        process.communicate(timeout=10)


@pytest.fixture(scope="module")
def server(models) -> Iterator[SimpleNamespace]:
    """One that serves both tasks."""
    with served(
        models, "classifier", "mlm", "--labels", ",".join(LABELS), "--max-wait-ms", "20"
    ) as running:
        yield running


def ask(
    server: SimpleNamespace,
    path: str,
    body: Any = None,
    method: str | None = None,
    **headers: str,
) -> SimpleNamespace:
    """Send one request: the status, the headers and the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        given = {"Content-Type": "application/json", **given}
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method or ("GET" if body is None else "POST"), path, body, given)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    is_json = "json" in response.headers.get("Content-Type", "")
    return SimpleNamespace(
        status=response.status,
        headers=response.headers,
        text=text,
        json=json.loads(text) if is_json and text else None,
    )


def refused(answer: SimpleNamespace, status: int, *words: str) -> None:
    """Check that a request was refused in JSON, with these words and no traceback."""
    assert answer.status == status and answer.json["status"] == status, answer.text
    assert set(answer.json) == {"error", "status"}
    for word in words:
        assert word in answer.json["error"], answer.json["error"]
    assert "Traceback" not in answer.text and ".py" not in answer.text


def status(server: SimpleNamespace, task: str = "classification") -> dict[str, Any]:
    found = ask(server, "/status").json["models"]
    return next(model for model in found if model["task"] == task)


# --- answers ---


def test_a_text_gets_the_probabilities_of_the_model_called_directly(server, models):
    """Also a pair; catches labels in another order, and a pair read as one text."""
    for text, pair in (("The model reads words.", None), ("A sum", "of numbers is an array")):
        batch = models.complete.fine_tuning.pad_batch([models.tokenizer(text, pair)], 0)
        with torch.no_grad():
            expected = models.classifier(**batch).logits[0].softmax(dim=-1)
        asked = {"text": text} if pair is None else {"text": text, "pair": pair}
        answer = ask(server, "/classify", asked)
        assert answer.status == 200
        found = {each["name"]: each["probability"] for each in answer.json["labels"]}
        assert list(found.values()) == sorted(found.values(), reverse=True)
        torch.testing.assert_close(torch.tensor([found[name] for name in LABELS]), expected)
        assert expected.max() - expected.min() > 0.05  # so that another order would show


def test_a_mask_is_filled_as_the_package_fills_it(server, models):
    """Two masks, from left to right, as many pieces as asked."""
    text = "the [MASK] reads [MASK] ."
    expected = models.complete.weights.fill_mask(models.mlm, models.tokenizer, text, top_k=3)
    answer = ask(server, "/fill-mask", {"text": text, "top_k": 3})
    assert answer.status == 200
    found = [[(x["name"], x["probability"]) for x in row] for row in answer.json["masks"]]
    assert [[name for name, _ in row] for row in found] == [[n for n, _ in row] for row in expected]
    assert found[0] != found[1]
    numbers = [torch.tensor([[p for _, p in row] for row in rows]) for rows in (found, expected)]
    torch.testing.assert_close(*numbers)


def test_requests_that_arrive_together_are_read_together(server, models):
    """And each still gets its own answer; catches answers that are handed to the wrong text."""
    texts = [" ".join(WORDS[: number + 1]) for number in range(8)]
    alone = [ask(server, "/classify", {"text": text}).json for text in texts]
    assert {answer["batch"] for answer in alone} == {1}
    before = status(server)
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda text: ask(server, "/classify", {"text": text}), texts))
    after = status(server)
    assert after["texts"] - before["texts"] == 8
    assert after["batches"] - before["batches"] < 8
    assert max(answer.json["batch"] for answer in together) > 1
    for one, other in zip(alone, together, strict=True):
        rows = [{x["name"]: x["probability"] for x in each["labels"]} for each in (one, other.json)]
        assert rows[0] == pytest.approx(rows[1], rel=1e-4)
    assert len({json.dumps(answer["labels"]) for answer in alone}) == 8


# --- what is refused ---


def test_a_text_that_is_too_long_is_refused_with_both_numbers(server):
    characters = "a " * serve.MAX_CHARACTERS
    refused(ask(server, "/classify", {"text": characters}), 400, "20000", "10000", "text")
    refused(ask(server, "/classify", {"text": "a", "pair": characters}), 400, "pair")
    refused(ask(server, "/classify", {"text": "the " * 39}), 400, "41 tokens", "at most 40")
    assert ask(server, "/classify", {"text": "the " * 38}).status == 200


def test_a_body_that_is_too_large_is_refused_however_it_comes(server):
    """With its length, in chunks, and larger than what is read to the end."""
    size = serve.MAX_BODY + 1
    refused(ask(server, "/classify", b" " * size), 413, str(size), str(serve.MAX_BODY))
    refused(ask(server, "/status", b" " * size, "GET"), 413, str(size))
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        head = f"POST /classify HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        connection.sendall(chunk * (serve.MAX_BODY // 0x10000 + 1) + b"0\r\n\r\n")
        assert connection.recv(200).startswith(b"HTTP/1.1 413")
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(f"{head}Content-Length: {10**12}\r\n\r\n".encode())
        assert sent_until_closed(connection) < 10 * serve.MAX_DRAINED  # it reads no terabyte
    assert ask(server, "/status").status == 200


def sent_until_closed(connection: socket.socket) -> int:
    """How many bytes, of at most 10 times those that are read, are sent before the end hangs up."""
    sent = 0
    with suppress(OSError):
        while sent < 10 * serve.MAX_DRAINED:
            sent += connection.send(b" " * 0x10000)
    return sent


BAD_BODIES = {
    b"": "no JSON",
    b"{": "no JSON",
    b"\xff\xfe": "no JSON",
    b"[" * 100_000: "no JSON",
    b"[1]": "type list",
    b"{}": "text is missing",
    b'{"text": 3}': "text is of type int",
    b'{"text": "  "}': "text is empty",
    b'{"text": "a", "pair": []}': "pair is of type list",
    b'{"text": "a", "texts": "b"}': "texts",
    b'{"text": "a", "top_k": 0}': "top_k is 0",
    b'{"text": "a", "top_k": true}': "top_k is True",
    b'{"text": "a", "top_k": 51}': "1 to 50",
    b'{"text": "\\ud800"}': "surrogate",
}


@pytest.mark.parametrize(("body", "word"), BAD_BODIES.items())
def test_a_bad_body_is_refused_and_the_message_says_what_came(server, body, word):
    refused(ask(server, "/classify", body), 400, word)


def test_a_text_without_a_mask_or_with_too_many_is_refused(server):
    refused(ask(server, "/fill-mask", {"text": "the model"}), 400, "0 [MASK]", "1 to 16")
    refused(ask(server, "/fill-mask", {"text": "[MASK]" * 17}), 400, "17 [MASK]")


def test_another_method_path_or_type_is_refused(server):
    refused(ask(server, "/classify"), 405, "GET", "POST")
    assert ask(server, "/classify").headers["Allow"] == "POST"
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        refused(ask(server, "/status", method=method), 405, method, "GET")
    typed = ask(server, "/classify", {"text": "a"}, Content_Type="text/plain")
    refused(typed, 415, "text/plain", "application/json")
    refused(ask(server, "/nothing"), 404, "/nothing", "/classify")


@pytest.mark.parametrize(
    "path",
    ["/../serve.py", "/serve.py", "/%2e%2e/look.css", "//etc/passwd", "/look.css/../serve.py"],
)
def test_no_path_leads_to_another_file(server, path):
    answer = ask(server, path)
    assert answer.status == 404, answer.text
    assert "def " not in answer.text and "root:" not in answer.text


def test_a_foreign_host_or_origin_is_refused(server):
    """A page elsewhere that points its own name at 127.0.0.1 gets nothing, the page neither."""
    for path, body in (("/", None), ("/status", None), ("/classify", {"text": "a"})):
        for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1", "localhost:1"):
            refused(ask(server, path, body, Host=host), 403, host)
        refused(ask(server, path, body, Origin="http://evil.example"), 403, "evil.example")
        refused(ask(server, path, body, Origin="null"), 403, "null")
    own = f"localhost:{server.port}"
    assert ask(server, "/classify", {"text": "a"}, Host=own, Origin=f"http://{own}").status == 200
    assert "Access-Control-Allow-Origin" not in ask(server, "/status").headers


def test_only_this_machine_is_listened_to(server):
    found = psutil.Process(server.process.pid).net_connections(kind="inet")
    listening = {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


def test_a_fault_of_the_model_is_told_to_the_operator_and_not_to_the_client(
    models, caplog, monkeypatch
):
    """A model that raises: 500 without the reason, for every text of the batch, and the server
    goes on."""
    import asyncio

    from tornado.httpclient import AsyncHTTPClient, HTTPClientError

    def broken(batch: Any) -> Any:
        raise RuntimeError("secret reason")

    model = serve.load(models.folder / "classifier")
    monkeypatch.setattr(model, "scores", broken)
    asked: dict[str, Any] = {"method": "POST", "body": '{"text": "a"}'}
    answers: list[Any] = []

    async def go() -> None:
        async def client(address: str) -> None:
            headers = {"Content-Type": "application/json"}
            for _ in range(2):
                try:
                    await AsyncHTTPClient().fetch(f"{address}/classify", headers=headers, **asked)
                except HTTPClientError as error:
                    answers.append((error.code, error.response.body.decode()))  # type: ignore[union-attr]  # it has one
            os.kill(os.getpid(), signal.SIGTERM)

        with ThreadPoolExecutor(1) as worker:
            tasks = []
            batcher = serve.Batcher(model, worker)
            announce = lambda address: tasks.append(asyncio.create_task(client(address)))  # noqa: E731
            await serve.serve({"classification": batcher}, serve.listen(0), announce)

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    asyncio.run(go())
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert [code for code, _ in answers] == [500, 500]
    assert all("secret" not in body and "Traceback" not in body for _, body in answers)
    assert "secret reason" in caplog.text


# --- waiting and stopping ---


def test_a_full_line_is_refused_and_a_stop_answers_what_is_in_flight(models):
    """The first two texts wait five seconds for others; the third finds the line full. Then comes
    SIGTERM: both are answered, together, nothing new is taken, and the server exits with 0. A
    client that went away in the middle of its body is not waited for."""
    options = ("--max-waiting", "2", "--max-wait-ms", "5000")
    with served(models, "classifier", *options) as server, ThreadPoolExecutor(2) as threads:
        kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        kept.request("GET", "/status")
        kept.getresponse().read()
        in_flight = [threads.submit(ask, server, "/classify", {"text": x}) for x in ("a", "the")]
        wait_for(lambda: status(server)["waiting"] == 2)
        refused(ask(server, "/classify", {"text": "of"}), 503, "2 texts are waiting")
        assert status(server)["refused"] == 1
        leave_in_the_middle(server)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not listens(server))
        assert not any(each.done() for each in in_flight)
        kept.request("POST", "/classify", b'{"text": "a"}', {"Content-Type": "application/json"})
        late = kept.getresponse()
        assert late.status == 503 and b"stopped" in late.read()
        for each in in_flight:
            assert each.result(30).status == 200 and each.result().json["batch"] == 2
        out, errors = server.process.communicate(timeout=serve.GRACE_SECONDS / 2)
        assert server.process.returncode == 0 and out.endswith("stopped\n")
        assert "Traceback" not in errors


def test_who_went_away_is_not_computed_for_and_makes_room(models):
    """The line holds two: the second place is free again as soon as its client has left."""
    with (
        served(models, "classifier", "--max-waiting", "2", "--max-wait-ms", "3000") as server,
        ThreadPoolExecutor(1) as threads,
    ):
        body = b'{"text": "the"}'
        head = f"POST /classify HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        lost = socket.create_connection(("127.0.0.1", server.port), timeout=5)
        lost.sendall(head.encode() + body)
        wait_for(lambda: status(server)["waiting"] == 1)
        stays = threads.submit(ask, server, "/classify", {"text": "a"})
        wait_for(lambda: status(server)["waiting"] == 2)
        lost.close()
        wait_for(lambda: status(server)["waiting"] == 1)
        answer = stays.result(30)
        assert answer.status == 200 and answer.json["batch"] == 1
        assert status(server)["texts"] == 1
        server.process.send_signal(signal.SIGTERM)
        _, errors = server.process.communicate(timeout=serve.GRACE_SECONDS / 2)
        assert server.process.returncode == 0
        assert errors == ""


def test_all_who_wait_may_go_away():
    """Also the only one, in the moment in which its batch is made."""
    import asyncio

    def never(*examples: Any) -> Any:
        raise AssertionError("nobody waits for it")

    async def go() -> None:
        batcher = serve.Batcher(
            SimpleNamespace(answers=never),  # type: ignore[arg-type]  # only this is used
            ThreadPoolExecutor(1),
            max_wait=0.01,
        )
        running = asyncio.create_task(batcher.run())
        text = batcher.add({"input_ids": [0]})
        await asyncio.sleep(0)
        batcher.leave(text)
        await asyncio.sleep(0.05)
        assert not running.done() and not batcher.waiting
        assert batcher.counts["batches"] == 0
        assert isinstance(text.answer.exception(), serve.Refusal)
        running.cancel()

    asyncio.run(go())


def test_nothing_is_kept_of_who_left_in_the_middle_of_a_body(models):
    """Each such request would else wait for the rest of its body as long as the server runs."""
    import asyncio

    unfinished: list[list[str]] = []

    def handling() -> list[str]:
        names = (str(task.get_coro()) for task in asyncio.all_tasks())
        return [name for name in names if "_execute" in name]

    async def go(worker: Any) -> None:
        async def client(address: str) -> None:
            host = address.removeprefix("http://")
            _, writer = await asyncio.open_connection("127.0.0.1", int(host.rpartition(":")[2]))
            head = f"POST /classify HTTP/1.1\r\nHost: {host}\r\nContent-Length: 99\r\n\r\nhalf"
            writer.write(head.encode())
            await asyncio.sleep(0.2)
            unfinished.append(handling())
            writer.close()
            await asyncio.sleep(0.2)
            unfinished.append(handling())
            os.kill(os.getpid(), signal.SIGTERM)

        asked = []
        announce = lambda address: asked.append(asyncio.create_task(client(address)))  # noqa: E731
        batcher = serve.Batcher(serve.load(models.folder / "classifier"), worker)
        await serve.serve({"classification": batcher}, serve.listen(0), announce)

    with ThreadPoolExecutor(1) as worker:
        asyncio.run(go(worker))
    assert len(unfinished[0]) == 1 and unfinished[1] == []


def test_what_is_not_answered_in_time_is_told_so(models, monkeypatch):
    """A model that takes longer than the server has after SIGTERM: 503, to who is read and to
    who still waits."""
    import asyncio
    import threading

    from tornado.httpclient import AsyncHTTPClient

    release = threading.Event()
    model = serve.load(models.folder / "classifier")
    monkeypatch.setattr(model, "scores", lambda batch: release.wait(60))
    monkeypatch.setattr(serve, "GRACE_SECONDS", 0.3)
    answers: list[tuple[int, str]] = []

    async def go(worker: Any) -> None:
        batcher = serve.Batcher(model, worker, max_batch=1)

        async def client(address: str) -> None:
            headers = {"Content-Type": "application/json"}
            asked = {"method": "POST", "body": '{"text": "a"}', "raise_error": False}
            both = [
                AsyncHTTPClient().fetch(f"{address}/classify", headers=headers, **asked)
                for _ in range(2)
            ]
            while len(batcher.waiting) + len(batcher.read_now) < 2:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            for response in await asyncio.gather(*both):
                answers.append((response.code, response.body.decode()))

        asked = []
        announce = lambda address: asked.append(asyncio.create_task(client(address)))  # noqa: E731
        await serve.serve({"classification": batcher}, serve.listen(0), announce)
        await asyncio.gather(*asked)
        release.set()

    with ThreadPoolExecutor(1) as worker:
        asyncio.run(go(worker))
    assert [code for code, _ in answers] == [503, 503]
    assert all("was stopped" in body for _, body in answers)


def leave_in_the_middle(server: SimpleNamespace) -> None:
    """Send half of a body, and close the connection."""
    lost = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    head = f"POST /classify HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 99\r\n"
    lost.sendall(f"{head}\r\nhalf".encode())
    time.sleep(0.2)
    lost.close()
    time.sleep(0.2)


def listens(server: SimpleNamespace) -> bool:
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=5).close()
    except OSError:
        return False
    return True


def wait_for(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_a_batch_has_no_more_tokens_than_allowed():
    """Scores of the vocabulary for 32 long texts would take gigabytes."""
    batcher = serve.Batcher(SimpleNamespace(), SimpleNamespace(), max_batch=100)  # type: ignore[arg-type]  # neither is used
    for length in (512, 8, 512, 512, 512, 512, 512, 512, 512, 8):
        batcher.waiting.append(serve.Waiting({"input_ids": [0] * length}, 0.0, None))  # type: ignore[arg-type]  # nobody waits
    batches = []
    while batcher.waiting:
        batches.append(len(batcher._next_batch()))
    assert batches == [8, 2]
    batcher.waiting.append(serve.Waiting({"input_ids": [0] * 9999}, 0.0, None))  # type: ignore[arg-type]  # nobody waits
    assert len(batcher._next_batch()) == 1


# --- what can be served ---


def test_every_kind_of_file_gives_the_answers_of_its_model(models, exported, tmp_path):
    """Compressed, ONNX and int8, of both tasks, against the float model in this process."""
    compression, tokenizer = models.complete.compression, models.tokenizer
    tokenizer.save(tmp_path)
    compression.save_compressed(models.classifier, tmp_path / "small.safetensors")
    ours = models.folder
    cases = [
        ("classification", ours / "classifier", "float32", 1e-5),
        ("classification", ours / "classifier", "bfloat16", 0.05),
        ("classification", ours / "classifier", "int8", 0.05),
        ("classification", tmp_path, "float32", 1e-5),
        ("classification", tmp_path / "small.safetensors", "int8", 0.05),
        ("classification", exported["classifier"], "float32", 1e-5),
        ("classification", exported["classifier"], "int8", 0.05),
        ("fill-mask", ours / "mlm", "float32", 1e-5),
        ("fill-mask", ours / "mlm", "int8", 0.05),
        ("fill-mask", exported["mlm"], "float32", 1e-5),
    ]
    texts = ["the model reads [MASK] .", "a [MASK] of words is a [MASK]"]
    examples = [tokenizer(text) for text in texts]
    with torch.no_grad():
        batches = [models.complete.fine_tuning.pad_batch([example], 0) for example in examples]
        expected = {
            "classification": [models.classifier(**batch).logits.softmax(-1) for batch in batches],
            "fill-mask": [
                models.mlm(**batch).logits[batch["input_ids"] == 4].softmax(-1) for batch in batches
            ],
        }
    for task, path, precision, tolerance in cases:
        model = serve.load(path, precision)
        assert model.task == task
        if task == "classification":
            named = ours in path.parents  # by its config, which save_pretrained wrote
            assert model.labels == tuple(f"LABEL_{n}" if named else f"{n}" for n in range(3))
        for answer, rows in zip(model.answers(examples), expected[task], strict=True):
            assert len(answer) == len(rows)
            for found, row in zip(answer, rows, strict=True):
                assert max(abs(row[i].item() - p) for i, p in found) < tolerance, (path, precision)


def test_labels_come_from_the_config_that_transformers_writes(models, tmp_path):
    folder = shutil.copytree(models.folder / "classifier", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {"2": "c", "0": "a", "1": "b"}
    (folder / "config.json").write_text(json.dumps(config))
    assert serve.load(folder).labels == ("a", "b", "c")
    assert serve.load(folder, labels=["x", "y", "z"]).labels == ("x", "y", "z")
    with pytest.raises(ValueError, match=r"labels has 2 names.*3 classes"):
        serve.load(folder, labels=["x", "y"])


def test_what_cannot_be_served_is_refused_before_anybody_asks(models, exported, tmp_path):
    complete = models.complete
    with pytest.raises(FileNotFoundError, match="nowhere"):
        serve.load(tmp_path / "nowhere")
    complete.weights.save_pretrained(models.classifier, tmp_path / "bare")
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        serve.load(tmp_path / "bare")
    headless = shutil.copytree(models.folder / "mlm", tmp_path / "headless")
    complete.weights.save_pretrained(models.mlm.bert, headless)
    with pytest.raises(ValueError, match=r"BertModel.*SequenceClassifier"):
        serve.load(headless)
    other = shutil.copytree(models.folder / "mlm", tmp_path / "other")
    larger = {x: i for i, x in enumerate([*PIECES, "more"])}
    complete.tokenizer.WordPieceTokenizer(larger).save(other)
    with pytest.raises(ValueError, match=r"tokenizer.*another model"):
        serve.load(other)
    tags = shutil.copy(exported["mlm"], other / "tags.onnx")  # scores of other choices than pieces
    with pytest.raises(ValueError, match=r"logits.*SequenceClassifier"):
        serve.load(tags)
    with pytest.raises(ValueError, match="bfloat16"):
        serve.load(tags, "bfloat16")


def test_a_damaged_file_a_missing_head_or_a_model_without_numbers_is_refused(
    models, exported, tmp_path
):
    broken = shutil.copytree(models.folder / "mlm", tmp_path / "broken")
    (broken / "model.onnx").write_bytes(exported["mlm"].read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model.onnx, which cannot be loaded"):
        serve.load(broken / "model.onnx")
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match=r"broken|model\.safetensors"):
        serve.load(broken)
    headless = shutil.copytree(models.folder / "classifier", tmp_path / "headless")
    architectures = json.loads((headless / "config.json").read_text())
    models.complete.weights.save_pretrained(models.classifier.bert, headless)
    (headless / "config.json").write_text(json.dumps(architectures))
    with pytest.raises(ValueError, match="without a classifier"):
        serve.load(headless)
    other = copy.deepcopy(models.classifier)
    with torch.no_grad():
        other.classifier.bias[1] = torch.nan
    models.complete.weights.save_pretrained(other, tmp_path / "nan")
    models.tokenizer.save(tmp_path / "nan")
    with pytest.raises(ValueError, match=r"cannot be served: its scores are not numbers"):
        serve.load(tmp_path / "nan")


def test_a_file_that_does_not_say_how_many_classes_it_has_is_served(models, exported, tmp_path):
    import onnx

    folder = shutil.copytree(models.folder / "classifier", tmp_path / "model")
    file = onnx.load(exported["classifier"])
    file.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "classes"
    onnx.save(file, folder / "model.onnx")
    assert serve.load(folder / "model.onnx").labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_a_model_with_one_token_type_reads_no_pairs(models, tmp_path):
    config = models.complete.config.BertConfig(
        **{**vars(models.classifier.bert.config), "type_vocab_size": 1}
    )
    bert = models.complete.encoder.BertModel(config)
    one = models.complete.fine_tuning.SequenceClassifier(bert, 3).eval()
    models.complete.weights.save_pretrained(one, tmp_path)
    models.tokenizer.save(tmp_path)
    model = serve.load(tmp_path)
    assert not model.pairs
    assert serve.load(models.folder / "classifier").pairs
    assert serve.example_of(model, "the", None)["input_ids"]
    with pytest.raises(serve.Refusal) as refusal:
        serve.example_of(model, "the", "a")
    assert refusal.value.status_code == 400 and "one token type" in refusal.value.message


@pytest.mark.parametrize(("way", "said"), [("oneDNN, bfloat16", True), ("oneDNN", False)])
def test_bfloat16_is_said_only_where_it_was_picked(models, monkeypatch, way, said):
    from bertlab import compression

    monkeypatch.setattr(
        compression, "quickest_linear", lambda linear, precision: compression.ONEDNN
    )
    ours = compression.as_prepared
    monkeypatch.setattr(compression, "as_prepared", lambda fast, _: ours(fast, {"8 to 8": way}))
    found = serve.load(models.folder / "classifier", "bfloat16").precision
    assert (found == "bfloat16") is said
    assert said or found.startswith("float32")


def started(models: SimpleNamespace, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A server that must refuse to start."""
    package = Path(models.complete.compression.__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-m", "bertlab.course.serve", *arguments],
        env={**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"},
        cwd=models.folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_port_that_is_taken_is_named_before_anything_is_loaded(server, models):
    refused = started(models, "nowhere", "--port", str(server.port))
    assert refused.returncode == 2
    assert f"port is {server.port}" in refused.stderr and "--port 0" in refused.stderr


def test_labels_without_a_classifier_are_refused(models):
    refused = started(models, "mlm", "--port", "0", "--labels", "a,b")
    assert refused.returncode == 2
    assert "labels is a,b" in refused.stderr


def test_the_port_that_needs_no_number_is_served_without_one():
    assert serve.hosts(8765) == ["127.0.0.1:8765", "localhost:8765"]
    assert set(serve.hosts(80)) >= {"127.0.0.1", "localhost", "localhost:80"}


# --- the page ---


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_used_by_keyboard_in_both_schemes(server, scheme):
    with browsing.chromium() as browser:
        page = browser.new_page(color_scheme=scheme, viewport={"width": 390, "height": 800})
        notes = browsing.Notes()
        notes.watch(page)
        page.goto(f"http://127.0.0.1:{server.port}/", wait_until="networkidle")
        assert page.evaluate("document.activeElement.id") == "text"
        page.keyboard.type("the model reads words")
        page.keyboard.press("Control+Enter")
        page.locator("#answer table").wait_for(timeout=20_000)
        shown = page.locator("#answer th").all_inner_texts()
        assert sorted(shown) == sorted(LABELS)  # as text, not as HTML
        browsing.photograph(page, f"serve_{scheme}")
        assert browsing.low_contrast(page) == []
        assert browsing.overflow(page) == 0
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("ArrowDown")
        assert page.locator("input:checked").get_attribute("value") == "fill-mask"
        page.fill("#text", "the [MASK] reads [MASK]")
        page.locator("#text").press("Tab")
        page.keyboard.press("Enter")
        page.locator("#answer caption", has_text="Mask 2").wait_for(timeout=20_000)
        assert page.locator("#answer table").count() == 2
        assert notes == browsing.Notes()
        page.fill("#text", "no mask")
        page.click("#ask")
        page.locator("#answer .wrong").wait_for(timeout=20_000)
        assert "text has 0 [MASK]" in page.locator("#answer").inner_text()
        assert browsing.low_contrast(page) == []
