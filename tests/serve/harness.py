"""A server under test: the real one, on a free port of this machine, its loop in a thread of the test process."""

from __future__ import annotations

import asyncio
import resource
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import httpx
import pytest

from minipaged.async_llm import AsyncLLM
from minipaged.llm import LoadedModel
from minipaged.outputs import RequestUpdate
from minipaged.serve.server import LAST_WORDS_S, Server, listen, make_server
from minipaged.serve.settings import ServeSettings

Result = TypeVar("Result")
PATIENCE_S = 300
"""How long anything is waited for that has to happen."""


@dataclass
class Served:
    """A server that runs."""

    url: str
    allm: AsyncLLM
    server: Server
    thread: threading.Thread

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE_S, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE_S, **options)

    @contextmanager
    def slow(self, seconds: float = 0.02) -> Iterator[None]:
        """Each step takes so much longer: a tiny model has said everything before anybody can ask what it does."""
        engine = self.allm.llm.engine
        step = engine.step

        def slowly() -> list[RequestUpdate]:
            time.sleep(seconds)
            return step()

        engine.step = slowly  # type: ignore[method-assign]
        try:
            yield
        finally:
            engine.step = step  # type: ignore[method-assign]

    @contextmanager
    def held(self) -> Iterator[threading.Event]:
        """No step begins until the event is set, or the context ends: what goes on goes on as long as a test likes."""
        engine, go_on = self.allm.llm.engine, threading.Event()
        step = engine.step

        def wait() -> list[RequestUpdate]:
            assert go_on.wait(PATIENCE_S)
            return step()

        engine.step = wait  # type: ignore[method-assign]
        try:
            yield go_on
        finally:
            engine.step = step  # type: ignore[method-assign]
            go_on.set()

    @contextmanager
    def last_words(self) -> Iterator[None]:
        """A server whose engine has died ends when the context does, and not after `LAST_WORDS_S`: a test may take as
        long as it likes to ask it something."""
        loop, held = self.server.loop, list[tuple[Any, ...]]()
        later = loop.call_later

        def hold(delay: float, *call: Any, **more: Any) -> asyncio.TimerHandle | None:
            if delay == LAST_WORDS_S and call[:2] == (setattr, self.server):
                held.append(call)
                return None
            return later(delay, *call, **more)

        with patch.object(loop, "call_later", hold):
            yield
            wait_until(lambda: bool(held))  # the engine's error is seen before it is told
            [call] = held
            loop.call_soon_threadsafe(*call)

    def terminate(self) -> None:
        """As SIGTERM does, which arrives in the main thread only."""
        self.server.loop.call_soon_threadsafe(self.server.handle_exit, signal.SIGTERM, None)

    def check_nothing_is_left(self) -> None:
        """Everybody has gone: no request, no block, no stream stays (no-orphan)."""
        wait_until(lambda: not self.allm.num_open)
        self.on_engine(lambda: check_empty(self.allm))

    def on_engine(self, check: Callable[[], None]) -> None:
        """Call this on the engine's thread, between two steps."""
        if not self.allm._thread.is_alive():  # nobody has asked for anything yet
            check()
            return
        done = threading.Event()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                check()
            except BaseException as error:
                errors.append(error)
            done.set()

        self.allm._inbox.put(run)
        assert done.wait(PATIENCE_S)
        if errors:
            raise errors[0]


@pytest.fixture(scope="module", autouse=True)
def no_certificates() -> Iterator[None]:
    """Nothing is encrypted here, and each client would load the system's certificates: 20 ms of processor."""

    def load_nothing(self: ssl.SSLContext, *files: Any, **more: Any) -> None: ...

    with patch.object(ssl.SSLContext, "load_verify_locations", load_nothing):
        yield


def check_empty(allm: AsyncLLM) -> None:
    """The engine holds nothing but what the prefix cache keeps."""
    engine = allm.llm.engine
    assert not engine.unfinished_requests
    assert engine.blocks.num_used == 0
    assert engine.current_stats().blocks_used == 0
    engine.check_invariants()


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@contextmanager
def served(
    model: LoadedModel, settings: ServeSettings | None = None, *, port: int = 0, **engine: Any
) -> Iterator[Served]:
    """A server of the model, until the context ends; on a free port, if none is named."""
    settings = replace(
        settings or ServeSettings(shutdown_timeout=5), port=port, served_model_name=("tiny",), log_level="critical"
    )
    listening = listen(settings.host, settings.port)
    server = make_server(model, settings, **{"num_blocks": 256, "num_swap_blocks": 64} | engine)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    running = Served(f"http://127.0.0.1:{listening.getsockname()[1]}", server.serving.allm, server, thread)
    try:
        yield running
    finally:
        if thread.is_alive():
            running.terminate()
        thread.join(PATIENCE_S)
        listening.close()
        assert not thread.is_alive()


@contextmanager
def process(
    folder: Path, *options: str, files: int | None = None, said: list[str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`minipaged serve` as a program, and its address. `files`: how many it may open; `said`: gets its lines."""

    def limit() -> None:
        if files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    said = [] if said is None else said
    command = [sys.executable, "-m", "minipaged", "serve", str(folder), "--tier", "reference", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=limit) as program:
        assert program.stderr is not None
        for line in program.stderr:
            said.append(line)
            if "listening on " in line:
                break
        else:
            pytest.fail("".join(said))
        draining = threading.Thread(target=lambda: said.extend(program.stderr or ()), daemon=True)
        draining.start()
        try:
            yield program, line.split("listening on ")[1].split()[0]
        finally:
            program.kill()
            draining.join()


def run(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run a test's coroutine."""
    return asyncio.run(asyncio.wait_for(work(), PATIENCE_S))
