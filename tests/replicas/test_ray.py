"""Several engines behind one endpoint, by the command line: what Ray starts, kills and ends. All of these are thorough,
for which `make test-all` installs Ray.

Starting Ray takes most of the time. So tests share one command until one of them ends it, and one cluster.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from minipaged.llm import LLM
from minipaged.params import SamplingParams
from tests.effort import thorough
from tests.serve.harness import PATIENCE_S
from tests.tiny_model import make_tiny_model

pytestmark = thorough
ENGINE: dict[str, Any] = {"tier": "reference", "dtype": "float32", "num_blocks": 64, "num_swap_blocks": 0}
"""The reference tier: its steps are slow enough that something goes on when a replica is killed."""
OPTIONS = (*(f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()), "--shutdown-timeout=60")


@dataclass
class Running:
    """`minipaged serve --replicas 2`."""

    url: str
    process: subprocess.Popen[str]
    said: Path
    segments: set[str]
    """Shared memory that was there before."""

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(self.url + "/v1/completions", json=body, timeout=PATIENCE_S)

    def processes(self) -> list[psutil.Process]:
        """The command's, and all that it has started, itself or by others."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def replicas(self) -> list[psutil.Process]:
        return [one for one in self.processes() if _title(one) == "ray::ServeReplica:minipaged:replica"]

    def both_replicas(self) -> list[psutil.Process]:
        """Those two. For a moment Ray may call a process by something else."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = self.replicas()
            return len(found) == 2

        wait_until(look, "the sight of two replicas")
        return found

    def count(self, name: str, **labels: str) -> float:
        """The sum of a metric over the replicas."""
        lines = httpx.get(self.url + "/metrics", timeout=PATIENCE_S).text.splitlines()
        wanted = [line for line in lines if line.startswith(name + "{")]
        has = [line for line in wanted if all(f'{label}="{value}"' in line for label, value in labels.items())]
        return sum(float(line.rsplit(" ", 1)[1]) for line in has)


def _title(process: psutil.Process) -> str:
    try:
        return (process.cmdline() or [""])[0]
    except psutil.Error:
        return ""


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, f"{what} has not come to be in {PATIENCE_S} s"
        time.sleep(0.25)  # looking through all processes takes time, too


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=PATIENCE_S).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("replicas") / "tiny")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def launch(model: Path, folder: Path, *options: str) -> Running:
    port, said, segments = free_port(), folder / "said", set(os.listdir("/dev/shm"))
    command = [sys.executable, "-m", "minipaged", "serve", str(model), "--replicas", "2", "--port", str(port)]
    with said.open("w") as out:
        process = subprocess.Popen([*command, *OPTIONS, *options], stdout=out, stderr=out, text=True)
    return Running(f"http://127.0.0.1:{port}", process, said, segments)


def start(model: Path, folder: Path, *options: str) -> Running:
    for _ in range(2):
        running = launch(model, folder, *options)
        if not has_given_up(running):
            return running
    running = launch(model, folder, *options)
    assert not has_given_up(running), running.said.read_text()
    return running


def has_given_up(running: Running) -> bool:
    """Waits until it listens. True: it has ended, because Ray waited 30 s for itself, too few on a busy machine."""
    process, said = running.process, running.said
    try:
        wait_until(lambda: process.poll() is not None or is_healthy(running.url), "the endpoint")
        if "node timed out during startup" in said.read_text():
            process.wait(PATIENCE_S)
            return True
        assert process.poll() is None, said.read_text()
        wait_until(lambda: "listening" in said.read_text(), "its first words")
    except BaseException:
        process.kill()  # nobody else would end it
        raise
    return False


@pytest.fixture(scope="module")
def started(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Running]]:
    """The command that runs, or else another one."""
    all_of_them: list[Running] = []

    def one_that_runs() -> Running:
        if not all_of_them or all_of_them[-1].process.poll() is not None:
            all_of_them.append(start(model, tmp_path_factory.mktemp("running")))
        return all_of_them[-1]

    yield one_that_runs
    for each in all_of_them:
        if each.process.poll() is None:
            processes = each.processes()
            each.process.send_signal(signal.SIGTERM)
            assert each.process.wait(PATIENCE_S) == 0, each.said.read_text()
            check_nothing_is_left(each, processes)


@pytest.fixture
def running(started: Callable[[], Running]) -> Running:
    """A command with two replicas, which other tests have asked before, and will."""
    return started()


def check_nothing_is_left(running: Running, processes: list[psutil.Process]) -> None:
    """No process, no port, no shared memory."""
    assert len(processes) > 5
    wait_until(lambda: not any(_lives(one) for one in processes), "the end of all processes")
    # Others may use it, too.
    wait_until(lambda: set(os.listdir("/dev/shm")) <= running.segments, "the end of shared memory")
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", int(running.url.rpartition(":")[2])))


def test_replicas_say_what_one_engine_says(running: Running, model: Path) -> None:
    prompts = [f"{n} and then" for n in range(8)]
    llm = LLM(model, **ENGINE)
    right = [one.outputs[0] for one in llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0))]
    assert llm.tokenizer is not None
    with ThreadPoolExecutor(8) as pool:
        bodies = [{"prompt": one, "max_tokens": 12, "temperature": 0, "return_token_ids": True} for one in prompts]
        answers = [one.json() for one in pool.map(lambda body: running.post(**body), bodies)]
        streamed = list(pool.map(lambda body: read_stream(running, body), bodies))
    assert [tuple(one["choices"][0]["token_ids"]) for one in answers] == [one.token_ids for one in right]
    assert [one["choices"][0]["text"] for one in answers] == [one.text for one in right]
    assert [text for text, _ in streamed] == [one.text for one in right]
    assert {error for _, error in streamed} == {None}
    both = httpx.post(running.url + "/v1/completions", json=bodies[0] | {"prompt": prompts[:2]}, timeout=PATIENCE_S)
    assert [one["text"] for one in both.json()["choices"]] == [one.text for one in right[:2]]
    # Both replicas have worked, each under a name of its own.
    text = httpx.get(running.url + "/metrics", timeout=PATIENCE_S).text
    told = re.findall(r'^vllm:generation_tokens_total\{engine="(\w+)".*\} (.*)$', text, re.MULTILINE)
    assert len(dict(told)) == 2
    assert all(float(number) > 0 for _, number in told)
    assert text.count("# TYPE vllm:generation_tokens_total ") == 1


def read_stream(running: Running, body: dict[str, Any]) -> tuple[str, str | None]:
    """What a stream says, and the error that it ends with, if it does. Raises for one that is cut off."""
    text, error, line = "", None, ""
    url = running.url + "/v1/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=PATIENCE_S) as answer:
        if answer.status_code != 200:
            return "", json.loads(answer.read())["error"]["message"]
        for line in filter(None, answer.iter_lines()):
            event = {} if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
            error = event["error"]["message"] if "error" in event else error
            text += "".join(choice["text"] for choice in event.get("choices", ()))
    assert line == "data: [DONE]"
    return text, error


def test_errors_are_those_of_one_engine(running: Running) -> None:
    refused = running.post(prompt="", max_tokens=1)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
    unknown = running.post(prompt="x", model="no-such")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFoundError")
    assert httpx.get(running.url + "/", timeout=PATIENCE_S).status_code == 404
    assert "(--replicas)" in httpx.get(running.url + "/", timeout=PATIENCE_S).json()["error"]["message"]  # no page
    twice = running.post(prompt="x", max_tokens=1, request_id="mine")
    assert twice.json()["id"] == "cmpl-mine"


def test_who_hangs_up_ends_the_request(running: Running) -> None:
    aborted = running.count("vllm:request_success_total", finished_reason="abort")
    body = {"prompt": "for ever", "max_tokens": 900, "ignore_eos": True}
    with httpx.stream(
        "POST", running.url + "/v1/completions", json=body | {"stream": True}, timeout=PATIENCE_S
    ) as answer:
        lines = answer.iter_lines()  # kept: the connection is closed when it goes
        assert next(lines)
        assert running.count("vllm:num_requests_running") == 1
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(running.url + "/v1/completions", json=body, timeout=httpx.Timeout(PATIENCE_S, read=0.5))
    wait_until(lambda: running.count("vllm:request_success_total", finished_reason="abort") == aborted + 2, "both ends")
    assert running.count("minipaged:blocks", state="held") == 0
    assert httpx.get(running.url + "/load", timeout=PATIENCE_S).json() == {"server_load": 0}


def test_a_prompt_goes_where_its_beginning_was_computed(running: Running) -> None:
    beginning = "All of these begin in the same way, and at some length, so that it is worth while. "
    hits = running.count("vllm:prefix_cache_hits_total")
    for number in range(6):
        assert running.post(prompt=f"{beginning}{number}", max_tokens=1).status_code == 200
    found = running.count("vllm:prefix_cache_hits_total") - hits
    assert found == 5 * len(beginning)  # a token a byte: all but the first find it


def test_when_a_replica_is_killed_every_request_is_right_or_told(running: Running, model: Path) -> None:
    prompts = [f"{n} of them" for n in range(20)]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    outputs = [one.outputs[0] for one in LLM(model, **ENGINE).generate(prompts, params)]  # of one engine
    assert len({one.token_ids for one in outputs}) > 10, "or a wrong one might be taken for right"
    right = [one.text for one in outputs]
    victim, others = running.both_replicas()
    came = Counter[str]()

    def ask(number: int) -> None:
        if number == 200:
            victim.kill()
        body = {"prompt": prompts[number % 20], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        body["return_token_ids"] = True
        if number % 2:
            text, error = read_stream(running, body)
            expected = right[number % 20]
            came["told" if error else "right" if text == expected else "wrong"] += 1
            assert not error or ("has died" in error and expected.startswith(text))
            return
        answer = running.post(**body)
        if answer.status_code == 200:
            choice = answer.json()["choices"][0]
            said = choice["text"], tuple(choice["token_ids"])
            came["right" if said == (right[number % 20], outputs[number % 20].token_ids) else "wrong"] += 1
        else:
            assert answer.status_code == 503
            assert "has died" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"] == "1"
            came["told"] += 1

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(500)))
    assert came["right"] + came["told"] == 500, came
    assert came["told"] <= 16  # those that it had
    assert victim.pid not in [one.pid for one in running.both_replicas()]
    assert others.is_running()
    assert is_healthy(running.url)
    wait_until(lambda: "replicas: 2 running" in running.said.read_text(), "what is said of that")
    said = running.said.read_text().splitlines()
    assert "1 has died, and Ray starts others in their place" in "".join(said)
    assert len([line for line in said if not line.startswith("replicas: ")]) == 4, said  # Ray's own words are not here


def test_a_first_signal_lets_requests_finish_and_nothing_is_left(running: Running) -> None:
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", running.url + "/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        processes = running.processes()
        running.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "1 request has 60 s to finish" in running.said.read_text(), "what it says of that")
        refused = running.post(prompt="y", max_tokens=1)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        said = [line for line in lines if line]
    assert said[-1] == "data: [DONE]"
    assert json.loads(said[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert running.process.wait(PATIENCE_S) == 0, running.said.read_text()
    check_nothing_is_left(running, processes)


def test_where_the_command_is_killed_nothing_is_left(model: Path, tmp_path: Path) -> None:
    running = start(model, tmp_path)
    processes = running.processes()
    running.process.kill()
    running.process.wait()
    check_nothing_is_left(running, processes)


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, psutil.Process]]:
    """The address of one on this machine, which nobody of ours has started, and the process that it ends with."""
    monkeypatch = pytest.MonkeyPatch()
    port = free_port()
    options = ("--include-dashboard=false", "--disable-usage-stats", f"--ray-client-server-port={free_port()}")
    command = ["ray", "start", "--head", "--block", "--num-cpus=4", f"--port={port}", *options]
    command[0] = str(Path(sys.executable).parent / "ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # or it asks for a token, if whoever runs this has one
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    head = psutil.Process(process.pid)
    try:
        wait_until(lambda: any("raylet" in _title(one) for one in head.children(recursive=True)), "the cluster")
        yield f"127.0.0.1:{port}", head
    finally:
        started = head.children(recursive=True)
        process.terminate()
        process.wait(PATIENCE_S)
        monkeypatch.undo()
    wait_until(lambda: not any(_lives(one) for one in started), "the end of the cluster")


def replicas_in(cluster: tuple[str, psutil.Process]) -> list[psutil.Process]:
    return [one for one in cluster[1].children(recursive=True) if "ServeReplica" in _title(one)]


def test_a_cluster_is_left_as_it_was_however_the_command_ends(
    model: Path, tmp_path: Path, cluster: tuple[str, psutil.Process]
) -> None:
    address, head = cluster
    starting = launch(model, tmp_path, "--ray-address", address)
    wait_until(lambda: bool(replicas_in(cluster)) or starting.process.poll() is not None, "the beginning of a replica")
    starting.process.send_signal(signal.SIGINT)
    assert starting.process.wait(PATIENCE_S) == 128 + signal.SIGINT, starting.said.read_text()
    assert "listening" not in starting.said.read_text()
    wait_until(lambda: not replicas_in(cluster), "the end of the replicas")

    running = start(model, tmp_path, "--ray-address", address)
    assert running.post(prompt="x", max_tokens=2).status_code == 200
    assert len(replicas_in(cluster)) >= 2
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE_S) == 0, running.said.read_text()
    wait_until(lambda: not replicas_in(cluster), "the end of the replicas")
    assert head.is_running()


def test_what_a_replica_says_is_the_reason_and_not_that_the_endpoint_finds_none() -> None:
    from minipaged.replicas.server import LAST_WORDS  # needs Ray

    account = "Traceback (most recent call last):\n  ...\n{}\n"
    replica = account.format("minipaged.errors.ModelError: no weights in tiny")
    nobody = "ray.serve.exceptions.DeploymentUnavailableError: Deployment(name='replica', app='minipaged')"
    endpoint = account.format(nobody)
    assert LAST_WORDS.findall(replica + endpoint) == ["no weights in tiny"]
    assert not LAST_WORDS.findall(endpoint)


def test_why_no_replica_starts_is_said_in_a_line(
    model: Path, tmp_path: Path, cluster: tuple[str, psutil.Process]
) -> None:
    folder = tmp_path / "without_weights"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    command = [sys.executable, "-m", "minipaged", "serve", str(folder), "--replicas", "2", "--port", "0", *OPTIONS]
    command += ["--ray-address", cluster[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert not done.stdout
    first, error = done.stderr.splitlines()
    assert first.startswith("starting Ray")
    assert error.startswith("error: no replica could be started: ")
    assert str(folder) in error
    wait_until(lambda: not replicas_in(cluster), "the end of the replicas")
    assert cluster[1].is_running()
