"""However a request ends, or the server: whoever is there is told, and nothing stays behind (no-orphan)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.types import Message

from minipaged.async_llm import AsyncLLM
from minipaged.cli import main
from minipaged.errors import InvalidRequest, ModelError
from minipaged.llm import LoadedModel
from minipaged.outputs import RequestUpdate
from minipaged.serve.app import create_app
from minipaged.serve.server import Server, make_server, serve
from minipaged.serve.serving import LocalModel
from minipaged.serve.settings import ServeSettings
from tests.effort import examples, thorough
from tests.serve.harness import PATIENCE_S, Served, check_empty, process, run, served, wait_until

LONG = {"prompt": "a prompt that takes several steps", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 300, "ignore_eos": True}


# --- The client goes ------------------------------------------------------------------------------


class Client:
    """A client without a network: sends one body, and hangs up when it is told to."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.sent: list[Message] = []
        self.gone = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("test", 1),
            "server": ("test", 80),
        }

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await asyncio.sleep(0)
        self.sent.append(message)


@pytest.mark.parametrize("how", ["hangs up", "is cancelled"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_may_go_at_every_await_point(tiny: LoadedModel, path: str, stream: bool, how: str) -> None:
    """After any number of turns of the loop, so within each await once; then after some milliseconds of service."""
    body = (CHAT if "chat" in path else LONG) | {"stream": stream}

    async def work() -> None:
        allm = AsyncLLM(tiny, num_blocks=64, block_size=4, max_num_batched_tokens=8)
        app = create_app(LocalModel(allm, ["tiny"]))
        moments = [(turns, 0.0) for turns in range(examples(120, least=30))]
        moments += [(0, random.Random(i).uniform(0.001, 0.03)) for i in range(examples(80, least=10))]
        for turns, seconds in moments:
            client = Client(path, body)
            serving = asyncio.ensure_future(app(client.scope, client.receive, client.send))
            for _ in range(turns):
                await asyncio.sleep(0)
            if seconds:
                await asyncio.sleep(seconds)
            if how == "hangs up":
                client.gone.set()
            else:
                serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            assert not allm.num_open, (turns, seconds)
        await allm.shutdown()
        check_empty(allm)

    run(work)


def test_a_client_that_hangs_up_frees_its_blocks_at_once(server: Served) -> None:
    for stream in (True, False):
        with server.slow(0.01):
            request = httpx.Request("POST", server.url + "/v1/completions", json=LONG | {"stream": stream})
            with httpx.Client(timeout=0.3) as client, suppress(httpx.ReadTimeout):
                client.send(request, stream=True).close()  # that which is not streamed has no beginning before its end
            server.check_nothing_is_left()


def test_clients_that_go_while_they_wait_never_run(tiny: LoadedModel) -> None:
    ran: list[str] = []
    patience = httpx.Timeout(PATIENCE_S, read=0.3)
    with served(tiny, max_num_seqs=1) as running, running.slow(0.1), httpx.Client(timeout=PATIENCE_S) as client:
        running.allm.llm.engine.listeners.append(lambda event: ran.append(event.name))
        first = client.send(
            client.build_request("POST", running.url + "/v1/completions", json=LONG | {"stream": True}), stream=True
        )
        lines = first.iter_lines()
        next(lines)
        for stream in (True, False):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(running.url + "/v1/completions", json=LONG | {"stream": stream}, timeout=patience)
        wait_until(lambda: running.allm.num_open == 1)
        first.close()
        running.check_nothing_is_left()
    assert ran.count("request_admitted") == 1


def test_a_slow_reader_makes_nothing_grow(tiny: LoadedModel) -> None:
    """It takes nothing for a while: its one slot holds all that came, and the engine has long been done."""

    async def work() -> None:
        allm = AsyncLLM(tiny, num_blocks=64)
        app = create_app(LocalModel(allm, ["tiny"]))
        client = Client("/v1/completions", LONG | {"stream": True})
        goes_on = asyncio.Event()
        real = client.send

        async def slow(message: Message) -> None:
            await real(message)
            if len(client.sent) == 3:
                await goes_on.wait()

        serving = asyncio.ensure_future(app(client.scope, client.receive, slow))
        while len(client.sent) < 3 or allm.num_open:
            await asyncio.sleep(0.001)
        goes_on.set()
        await serving
        assert len(client.sent) <= 6  # the start, two pieces, the rest in one or two, the end
        text = b"".join(message.get("body", b"") for message in client.sent).decode()
        pieces = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]
        assert pieces[-1]["choices"][0]["finish_reason"] == "length"
        await allm.shutdown()
        check_empty(allm)

    run(work)


def test_a_crowd_of_whom_a_third_goes(server: Served) -> None:
    rng = random.Random(1)

    async def one(client: httpx.AsyncClient) -> None:
        body = LONG | {"max_tokens": rng.randint(1, 40), "stream": rng.random() < 0.5, "n": rng.choice([1, 2])}
        timeout = rng.random() / 5 if rng.random() < 1 / 3 else 60
        try:
            async with asyncio.timeout(timeout):
                answer = await client.post(server.url + "/v1/completions", json=body, timeout=PATIENCE_S)
                assert answer.status_code == 200
        except TimeoutError:
            assert timeout < 1

    async def work() -> None:
        async with httpx.AsyncClient() as client:
            for _ in range(examples(20)):
                await asyncio.gather(*(one(client) for _ in range(20)))

    asyncio.run(work())
    server.check_nothing_is_left()
    wait_until(lambda: server.get("/load").json() == {"server_load": 0})


# --- The server goes ------------------------------------------------------------------------------


def test_terminated_it_finishes_what_runs_and_refuses_what_comes(tiny: LoadedModel) -> None:
    settings = ServeSettings(shutdown_timeout=PATIENCE_S)
    with served(tiny, settings) as running, httpx.Client(timeout=PATIENCE_S) as client:
        answers: list[httpx.Response] = []
        with running.held() as go_on:
            body = LONG | {"max_tokens": 50}
            thread = threading.Thread(
                target=lambda: answers.append(running.post("/v1/completions", body)),
            )
            thread.start()
            wait_until(lambda: running.allm.num_open == 1)
            running.terminate()
            wait_until(lambda: running.allm._closing)
            refused = client.post(running.url + "/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
            ill = running.get("/health")  # so that nobody sends more
            assert ill.status_code == 503
            assert "shutting down" in ill.json()["error"]["message"]
            go_on.set()
            thread.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 50
        running.thread.join(PATIENCE_S)
        assert running.server.status == 0
        check_empty(running.allm)


def test_terminated_it_aborts_what_takes_too_long_and_says_so(tiny: LoadedModel) -> None:
    settings = ServeSettings(shutdown_timeout=0.1)
    with served(tiny, settings) as running, httpx.Client(timeout=PATIENCE_S) as client, running.slow(0.1):
        request = client.build_request("POST", running.url + "/v1/completions", json=LONG | {"stream": True})
        answer = client.send(request, stream=True)
        lines = answer.iter_lines()
        next(lines)
        running.terminate()
        events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "abort"
        running.thread.join(PATIENCE_S)
        assert running.server.status == 0
        check_empty(running.allm)


def test_when_the_engine_dies_all_are_told_and_the_server_ends(tiny: LoadedModel) -> None:
    def broken() -> Any:
        raise MemoryError("planted")

    with served(tiny) as running, httpx.Client(timeout=PATIENCE_S) as client, running.slow():
        with running.last_words():
            request = client.build_request("POST", running.url + "/v1/completions", json=LONG | {"stream": True})
            answer = client.send(request, stream=True)
            lines = answer.iter_lines()
            next(lines)
            running.allm.llm.engine.step = broken  # type: ignore[method-assign]
            events = [line.removeprefix("data: ") for line in lines if line]
            assert events[-1] == "[DONE]"
            told = json.loads(events[-2])["error"]
            assert "planted" in told["message"]
            assert (told["type"], told["code"]) == ("ServiceUnavailableError", 503)  # as of an answer in one piece
            assert running.get("/health").status_code == 503
            late = running.post("/v1/completions", LONG)
            assert late.status_code == 503
            assert late.headers["retry-after"] == "1"
            assert "planted" in late.json()["error"]["message"]
        running.thread.join(PATIENCE_S)
        assert not running.thread.is_alive()
        assert running.server.status == 1


def test_a_step_that_does_not_end_is_not_waited_for(tiny: LoadedModel) -> None:
    """The time to finish bounds the end of the server, whatever its engine does."""
    goes_on = threading.Event()
    with served(tiny, ServeSettings(shutdown_timeout=0.1)) as running:
        step = running.allm.llm.engine.step

        def stuck() -> list[RequestUpdate]:
            goes_on.wait()
            return step()

        running.allm.llm.engine.step = stuck  # type: ignore[method-assign]
        asking = threading.Thread(target=lambda: running.post("/v1/completions", LONG))
        asking.start()
        wait_until(lambda: running.allm.num_open == 1)
        running.terminate()
        running.thread.join(PATIENCE_S)
        ended = not running.thread.is_alive()
        goes_on.set()
        asking.join()
        assert ended


@pytest.mark.parametrize("end", [0, 1, ModelError("no such model")])
def test_the_program_leaves_without_taking_everything_apart(
    end: int | ModelError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With torch and numba that takes seconds, and whoever has registered something may take as long as he likes."""

    def run_server(*arguments: Any, **engine: Any) -> int:
        if isinstance(end, ModelError):
            raise end
        return end

    left: list[int] = []
    monkeypatch.setattr("minipaged.serve.server.serve", run_server)
    monkeypatch.setattr(os, "_exit", left.append)
    with pytest.raises(SystemExit):
        main(["serve"])
    assert left == [1 if isinstance(end, ModelError) else end]
    assert ("error: no such model" in capsys.readouterr().err) == isinstance(end, ModelError)


def test_settings_that_suit_no_model_are_refused_before_one_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    for settings, words in (
        ({"tier": "nope"}, "tier is 'nope'"),
        ({"dtype": "nope"}, "dtype is 'nope'"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_blocks": 1, "max_model_len": 8192}, "max_model_len is 8192, .* lower max_model_len to 16 or"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"scheduling_policy": "nope"}, "scheduling_policy is 'nope'"),
        ({"preemption": "swap", "num_swap_blocks": 0}, "num_swap_blocks is 0"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            serve("no-such-model", ServeSettings(port=0), **settings)
        assert "loading" not in capsys.readouterr().err


def test_the_log_is_of_requests_and_not_of_those_who_watch(tiny: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    make_server(tiny, ServeSettings(log_level="critical"), num_blocks=64)
    log = logging.getLogger("uvicorn.access")
    log.addHandler(caplog.handler)
    try:
        for path, status in (("/metrics?x", 200), ("/health", 200), ("/health", 503), ("/v1/completions", 200)):
            record = log.makeRecord(
                log.name, logging.INFO, "", 0, '%s "%s %s %s" %d', ("", "GET", path, "", status), None
            )
            log.handle(record)
    finally:
        log.removeHandler(caplog.handler)
    assert [record.args[2:] for record in caplog.records if record.args] == [
        ("/health", "", 503),
        ("/v1/completions", "", 200),
    ]


@pytest.mark.parametrize(
    "moment",
    [0.0, pytest.param(0.1, marks=thorough), pytest.param(0.5, marks=thorough), pytest.param(1.0, marks=thorough)],
)
def test_sigterm_ends_the_program_in_order(tiny_folder: Path, moment: float) -> None:
    with process(tiny_folder, "--num-blocks", "64", "--shutdown-timeout", "20") as (program, url):
        answers: list[int | str] = []
        body = LONG | {"max_tokens": 900 if moment else 300}

        def ask() -> None:
            try:
                answers.append(httpx.post(url + "/v1/completions", json=body, timeout=PATIENCE_S).status_code)
            except httpx.ConnectError:
                answers.append("nobody")

        clients = [threading.Thread(target=ask) for _ in range(3)]
        wait_until(lambda: httpx.get(url + "/health", timeout=PATIENCE_S).status_code == 200)
        for client in clients:
            client.start()
        wait_until(lambda: httpx.get(url + "/load", timeout=PATIENCE_S).json()["server_load"] > 0 or bool(answers))
        time.sleep(moment)
        children = psutil.Process(program.pid).children(recursive=True)
        program.send_signal(signal.SIGTERM)
        assert program.wait(PATIENCE_S) == 0
        for client in clients:
            client.join()
        # Who came too late even to be refused found nobody there.
        assert sum(answers.count(status) for status in (200, 503, "nobody")) == 3
        assert 200 in answers or 503 in answers
        assert not [child for child in children if child.is_running()]


def test_a_second_signal_ends_it_at_once(tiny_folder: Path) -> None:
    with process(tiny_folder, "--num-blocks", "64", "--shutdown-timeout", "600") as (program, url):
        body = LONG | {"max_tokens": 900, "stream": True, "n": 4}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            while program.poll() is None:  # two that come together are one
                program.send_signal(signal.SIGINT)
                time.sleep(0.05)
            assert program.returncode == 128 + signal.SIGINT


def test_it_says_what_it_does_and_is_ready_for_a_chat(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It loads, listens, and meanwhile imports what writes a conversation out."""
    servers: list[Server] = []
    monkeypatch.setattr(Server, "run", lambda self, sockets: servers.append(self))
    said: list[str] = []

    def make(*arguments: Any, **engine: Any) -> Server:
        said.append(capsys.readouterr().err)
        return make_server(*arguments, **engine)

    monkeypatch.setattr("minipaged.serve.server.make_server", make)
    assert serve(str(tiny_folder), ServeSettings(port=0), tier="reference", num_blocks=64) == 0
    assert said == [f"loading {tiny_folder} ...\n"]
    assert "listening on http://127.0.0.1:" in capsys.readouterr().err
    with warnings.catch_warnings(record=True) as heard:  # which a thread may not keep another from hearing
        warnings.warn("The 'alias' attribute with value 'body' was provided", UserWarning, stacklevel=1)
    assert not heard
    wait_until(lambda: "in_transformers" in vars(servers[0].serving.allm.llm.need_tokenizer()))


def test_a_model_without_a_tokenizer_is_served_all_the_same(tiny: LoadedModel) -> None:
    serving = LocalModel(AsyncLLM(replace(tiny, tokenizer=None), num_blocks=64), ["tiny"])
    serving.warm_up()


@thorough
def test_what_is_wrong_with_the_command_line_is_said_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, words in (
            (["--port", port], f"port {port}"),
            (["--host", "999.1.1.1"], "999.1.1.1"),
            (["--api-key", ""], "openssl"),
            (["--max-waiting", "0"], "max_waiting"),
            (["--log-level", "loud"], "log_level"),
            (["--tier", "nope", "--scheduling-policy", "nope"], "scheduling_policy"),
        ):
            left.clear()
            with pytest.raises(SystemExit) as end:
                main(["serve", "no-such-model", "--port", "0", *options])
            assert (left or [end.value.code]) == [1]
            said = capsys.readouterr().err
            assert words in said
            assert said.startswith("error: ")
    command = [sys.executable, "-m", "minipaged", "serve", "no-such-model", "--max-waiting", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
