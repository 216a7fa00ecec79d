"""Connections without end, clients that send what nobody asked for, and halves of requests: the server lives."""

from __future__ import annotations

import errno
import json
import logging
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from minipaged.events import Event, RequestFinished, StepFinished
from minipaged.llm import LoadedModel
from minipaged.serve.connections import MOST_AHEAD, QUIET_S, SILENT_S, most_connections, raise_file_limit
from minipaged.serve.settings import ServeSettings
from tests.effort import quick_cases, thorough
from tests.serve.harness import PATIENCE_S, Served, process, served, wait_until

ENDLESS = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def post(body: bytes, length: int | None = None) -> bytes:
    """A request with this body, or with its beginning if `length` is more."""
    size = len(body) if length is None else length
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    )
    return head.encode() + body


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


@contextmanager
def connected(url: str, number: int) -> Iterator[list[socket.socket]]:
    """`number` connections that send nothing."""
    with ExitStack() as stack:
        yield [stack.enter_context(connect(url)) for _ in range(number)]


def all_of(client: socket.socket) -> bytes:
    """What comes until the other side closes."""
    return b"".join(iter(lambda: client.recv(2**16), b""))


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        client.settimeout(PATIENCE_S)


@contextmanager
def logged() -> Iterator[list[str]]:
    """The warnings and errors of the server's log."""
    lines: list[str] = []
    log, handler = logging.getLogger("uvicorn.error"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


# --- Many -----------------------------------------------------------------------------------------


def test_more_connections_than_files_keep_nobody_out(tiny_folder: Path) -> None:
    """Each accept would fail, be logged, and be tried again at once: 100 % of a core, and 4 MB of log a second."""
    said: list[str] = []
    with process(tiny_folder, "--num-blocks", "64", files=256, said=said) as (program, url):
        assert httpx.get(url + "/health", timeout=PATIENCE_S).status_code == 200
        working = psutil.Process(program.pid)
        before = working.cpu_times().user + working.cpu_times().system
        with connected(url, 600):
            time.sleep(2 * SILENT_S)
            for _ in range(3):  # while the others are there: they are not waited for
                assert httpx.get(url + "/health", timeout=PATIENCE_S).status_code == 200
            assert httpx.post(url + "/v1/completions", json={"prompt": "x"}, timeout=PATIENCE_S).status_code == 200
            assert working.cpu_times().user + working.cpu_times().system - before < 5
        assert httpx.get(url + "/health", timeout=PATIENCE_S).status_code == 200
        program.send_signal(signal.SIGTERM)
        assert program.wait(PATIENCE_S) == 0
    told = [line for line in said if "connections are open" in line]
    assert len(told) == 1
    assert len(said) < 20


@thorough
def test_thousands_of_idle_connections_are_kept(tiny_folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = min(5000, hard - 1000)  # as many as the system allows, if it allows fewer
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with process(tiny_folder, "--num-blocks", "64") as (_, url), connected(url, number) as idle:
            for _ in range(5):
                assert httpx.get(url + "/health", timeout=PATIENCE_S).status_code == 200
                assert httpx.post(url + "/v1/completions", json={"prompt": "x"}, timeout=PATIENCE_S).status_code == 200
            assert all(map(is_open, idle))
            idle[0].sendall(HEALTH)
            assert idle[0].recv(12) == b"HTTP/1.1 200"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_bound_is_what_is_left_of_the_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        most = most_connections()
        assert 0 < most < 512 - 64
        with socket.socket(), socket.socket():
            assert most_connections() == most - 2
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 2**16), hard)
        assert most_connections() == most + min(hard, 2**16) - 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def wait_until_all_are_silent(small: Served) -> None:
    """Each of three connections, for long enough to make room."""
    silent, now = small.server.door.silent, small.server.loop.time
    wait_until(lambda: len(silent) == 3 and now() - max(silent.values()) > SILENT_S)


def wait_until_read(running: Served, number: int = 1) -> None:
    """The server has taken in what this number of connections have sent of a request."""

    def has_begun(connection: Any) -> bool:
        return bool(connection.conn.trailing_data[0]) or (bool(connection.cycle) and connection.cycle.more_body)

    wait_until(lambda: sum(map(has_begun, list(running.server.server_state.connections))) == number)


@pytest.fixture
def small(tiny: LoadedModel) -> Iterator[Served]:
    """A server that has room for three connections."""
    with served(tiny) as running:
        running.server.door.most = 3
        yield running


def test_at_the_bound_the_one_that_is_silent_longest_makes_room(small: Served) -> None:
    """It has sent nothing, half of a head, half of a body, or waits for its next turn: the others go on."""
    with connected(small.url, 3) as clients:
        clients[0].sendall(HEALTH)
        assert clients[0].recv(2**16).startswith(b"HTTP/1.1 200")
        clients[1].sendall(HEALTH[:10])
        wait_until_read(small, 1)
        clients[2].sendall(post(b"{", 100))
        wait_until_read(small, 2)
        wait_until_all_are_silent(small)
        clients[0].sendall(HEALTH)  # and so it is the one that was heard last
        assert clients[0].recv(2**16).startswith(b"HTTP/1.1 200")
        gone = []
        for _ in range(2):
            with connect(small.url) as newcomer:
                newcomer.sendall(HEALTH)
                assert newcomer.recv(2**16).startswith(b"HTTP/1.1 200")
                gone.append([not is_open(client) for client in clients])
                with connect(small.url) as another:
                    another.sendall(HEALTH)
                    another.recv(1)
            wait_until(lambda: len(small.server.server_state.connections) < 3)
        assert gone[0] == [False, True, False]
        assert is_open(clients[0])


def test_where_all_are_served_the_next_is_refused_at_once_and_can_read_why(small: Served) -> None:
    with small.slow(0.1), ExitStack() as stack:
        lines = stack.enter_context(logged())
        streams = [stack.enter_context(connect(small.url)) for _ in range(3)]
        for stream in streams:
            stream.sendall(post(json.dumps(ENDLESS | {"stream": True}).encode()))
            assert stream.recv(15) == b"HTTP/1.1 200 OK"
        time.sleep(2 * SILENT_S)
        for _ in range(40):  # more than are let go slowly
            answer = httpx.get(small.url + "/health", timeout=PATIENCE_S)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["connection"] == "close"
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
            assert "connections" in error["message"]
        streams[0].close()
        wait_until(lambda: len(small.server.server_state.connections) < 3)
        assert small.get("/health").status_code == 200
        assert all(map(is_open, streams[1:]))
    assert [("which is the limit by files (ulimit -n)" in line) for line in lines] == [True]
    small.check_nothing_is_left()


def test_where_the_system_has_no_more_files_it_tries_again_after_a_while(
    small: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have taken those that were spared."""
    monkeypatch.setattr("minipaged.serve.connections.LINGER_S", 0.1)
    door, tries = small.server.door, []
    [listening] = door._listening

    class Exhausted:
        fileno = listening.fileno

        def accept(self) -> None:
            tries.append(time.monotonic())
            raise OSError(errno.EMFILE, "Too many open files")

    exhausted: Any = Exhausted()
    with logged() as lines, connect(small.url) as idle:
        wait_until(lambda: len(door.silent) == 1)
        time.sleep(2 * SILENT_S)
        door._listening[:] = [exhausted]
        small.server.loop.call_soon_threadsafe(door._take_in, exhausted)
        wait_until(lambda: len(tries) == 1)  # before that, the socket itself would still take the next one in
        with connect(small.url) as waiting:
            waiting.sendall(HEALTH)
            wait_until(lambda: len(tries) >= 3)
            assert not is_open(idle)
            assert min(after - before for before, after in pairwise(tries)) > 0.05
            exhausted.accept = listening.accept
            assert waiting.recv(2**16).startswith(b"HTTP/1.1 200")
    assert [line.startswith("no connection can be accepted: Too many open files") for line in lines][:1] == [True]
    assert len(lines) == 1


def test_an_error_of_a_connection_that_is_gone_costs_no_other(small: Served) -> None:
    """The system tells errors of the network as errors of taking the connection in."""
    door = small.server.door
    [listening] = door._listening
    errors = [errno.EPROTO, errno.EHOSTUNREACH, errno.EPERM]

    class Failing:
        fileno = listening.fileno

        def accept(self) -> Any:
            if errors:
                raise OSError(errors.pop(), "it is gone")
            raise BlockingIOError

    with logged() as lines, connect(small.url) as idle:
        wait_until(lambda: len(door.silent) == 1)
        time.sleep(2 * SILENT_S)
        small.server.loop.call_soon_threadsafe(door._take_in, Failing())
        wait_until(lambda: not errors)
        assert is_open(idle)
        idle.sendall(HEALTH)
        assert idle.recv(2**16).startswith(b"HTTP/1.1 200")
    assert lines == []


def test_what_is_logged_of_the_bound_is_said_again_after_a_while(small: Served) -> None:
    assert QUIET_S >= 10
    with logged() as lines:
        for _ in range(2):
            with connected(small.url, 3):
                wait_until(lambda: len(small.server.server_state.connections) == 3)
                for _ in range(3):
                    small.get("/health")
            small.server.door._told_at -= QUIET_S
            wait_until(lambda: not small.server.server_state.connections)
    assert len(lines) == 2


# --- More than was asked for ----------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [b"x" * 300_000, HEALTH, HEALTH * 10_000], ids=["a lot", "a request", "requests"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_sends_ahead_and_leaves_ends_its_request(server: Served, ahead: bytes, stream: bool) -> None:
    body = json.dumps(ENDLESS | {"stream": stream}).encode()
    ends: list[str] = []
    steps = 0

    def listen(event: Event) -> None:
        nonlocal steps
        steps += isinstance(event, StepFinished)
        if isinstance(event, RequestFinished):
            ends.append(event.reason)

    server.allm.llm.engine.listeners.append(listen)
    for at_once in (True, False):
        with server.slow(0.1):  # the whole of it takes a minute and a half
            with connect(server.url) as client:
                client.sendall(post(body) + (ahead if at_once else b""))
                wait_until(lambda: server.allm.num_open == 1)
                if not at_once:
                    client.sendall(ahead)
                time.sleep(0.05)
            steps = 0
            wait_until(lambda: server.allm.num_open == 0)
            assert steps < 50  # of 900
        server.check_nothing_is_left()
    server.allm.llm.engine.listeners.remove(listen)
    assert ends == ["aborted", "aborted"]


def test_requests_that_are_sent_ahead_are_answered_in_their_order(server: Served) -> None:
    body = post(json.dumps({"prompt": "x", "max_tokens": 20, "ignore_eos": True}).encode())
    models = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with server.slow(0.01), connect(server.url) as client:
        client.sendall(body + HEALTH[:20])
        wait_until(lambda: server.allm.num_open == 1)
        for piece in (HEALTH[20:] + models[:5], models[5:] + body, body + last):
            client.sendall(piece)
            time.sleep(0.02)
        told = all_of(client)
    places = [told.find(words) for words in (b"text_completion", b'"list"', b'"version"')]
    assert told.count(b"HTTP/1.1 200 OK") == 6
    assert places == sorted(places)
    assert told.count(b"text_completion") == 3


def test_who_sends_too_much_ahead_is_answered_once_and_told_that_it_is_over(server: Served) -> None:
    body = post(json.dumps({"prompt": "x", "max_tokens": 40, "ignore_eos": True}).encode())
    with server.held() as go_on, connect(server.url) as client:
        client.sendall(body)
        wait_until(lambda: server.allm.num_open == 1)
        client.sendall(HEALTH * (MOST_AHEAD // len(HEALTH) + 10))
        wait_until(lambda: any(not each.cycle.keep_alive for each in list(server.server.server_state.connections)))
        go_on.set()
        told = all_of(client)
    assert told.count(b"HTTP/1.1 200 OK") == 1
    assert b"connection: close" in told.lower()
    assert b"text_completion" in told
    [connection] = list(server.server.server_state.connections) or [None]
    assert connection is None or not connection._ahead


# --- Less -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "half",
    [b"POST /v1/comp", post(b'{"prompt": "x', 100), post(b"", 100), post(b" " * 100_000, 200_000)],
    ids=["head", "body", "no body", "long body"],
)
def test_half_a_request_does_not_fill_the_log_at_the_end(tiny: LoadedModel, half: bytes) -> None:
    with served(tiny) as running, logged() as lines, connect(running.url) as client:
        client.sendall(half)
        wait_until_read(running)
        running.terminate()
        told = all_of(client)
        running.thread.join(PATIENCE_S)
    assert running.server.status == 0
    assert not lines
    if half.startswith(b"POST /v1/completions"):
        head, _, error = told.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert json.loads(error)["error"]["code"] == 503


@quick_cases(1)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_step_without_end_does_not_fill_the_log_at_the_end(tiny: LoadedModel, stream: bool) -> None:
    """What is left is cut off, and ends by itself."""
    with served(tiny, ServeSettings(shutdown_timeout=0.1)) as running, running.slow(3), logged() as lines:
        with connect(running.url) as client:
            client.sendall(post(json.dumps(ENDLESS | {"stream": stream}).encode()))
            wait_until(lambda: running.allm.num_open == 1)
            running.terminate()
            told = all_of(client)
        running.thread.join(PATIENCE_S)
    assert told.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 503")
    assert not lines


@thorough
def test_a_reader_that_takes_nothing_does_not_fill_the_log_at_the_end(tiny: LoadedModel) -> None:
    """Its answer is longer than what the system keeps for it."""
    body = {"prompt": ["x"] * 100, "max_tokens": 90, "ignore_eos": True, "logprobs": 20, "stream": True}
    with served(tiny, ServeSettings(shutdown_timeout=0.1)) as running, connect(running.url) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with logged() as lines:
            client.sendall(post(json.dumps(body).encode()))
            wait_until(lambda: any(each.flow.write_paused for each in running.server.server_state.connections))
            running.terminate()
            running.thread.join(PATIENCE_S)
            assert not running.thread.is_alive()
    assert not lines
