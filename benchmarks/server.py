"""What serving costs beside the engine: `python -m benchmarks.server`.

Streams of a crowd of clients in another process, through HTTP, beside `LLM.generate` with the same requests on the same
engine and the same thread, in turns; then

- first delta: from the moment when the engine has a request's first token to that when its client has read it;
- the lag of the event loop, which tokenizes, writes JSON and answers while the engine computes.

`--crowd 5000`: so many requests, a third of whose clients vanish at random moments; what is left of them afterwards.
All times are of `time.perf_counter`, which the processes of one machine share (on Linux and macOS).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from minipaged import SamplingParams
from minipaged.engine.stats import Stats
from minipaged.outputs import RequestUpdate
from minipaged.serve.server import Server, listen, make_server, use_one_heap
from minipaged.serve.settings import ServeSettings

LAG_PERIOD_S = 0.005
CROWD_BLOCKS = 256
"""So few that all are soon in use (the system gives memory only when it is first written to), and some preempted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--crowd", type=int, default=0, help="requests; a third of their clients vanish")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        asyncio.run(be_clients(json.load(sys.stdin)))
        return
    with running(given.model, given.tier, CROWD_BLOCKS if given.crowd else 1024) as (server, url):
        print(f"{given.model} on the {server.serving.allm.llm.loaded.tier.description}")
        if given.crowd:
            measure_crowd(server, url, given.crowd)
        else:
            measure_streams(server, url, given.streams, given.tokens, given.rounds)


@contextmanager
def running(model: str, tier: str, num_blocks: int) -> Iterator[tuple[Server, str]]:
    use_one_heap()
    with listen("127.0.0.1", 0) as listening:
        server = make_server(
            model, ServeSettings(log_level="error", max_waiting=100_000), tier=tier, num_blocks=num_blocks
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield server, f"127.0.0.1:{listening.getsockname()[1]}"
        server.loop.call_soon_threadsafe(server.handle_exit, 15, None)
        thread.join()


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# --- Streams --------------------------------------------------------------------------------------


class FirstTokens:
    """When the engine had the first token of each request, and when each step began."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def added(self, request_id: str, params: Any, num_prompt_tokens: int, arrival_time: float) -> None: ...

    def after_step(
        self, updates: Sequence[RequestUpdate], stats: Stats, num_running: int, num_waiting: int, now: float
    ) -> None:
        for update in updates:
            self.at.setdefault(update.request_id, now)


def measure_streams(server: Server, url: str, num_streams: int, num_tokens: int, rounds: int) -> None:
    first = FirstTokens()
    allm = server.serving.allm
    allm.observers.append(first)
    prompts = [f"Chapter {number}. Once upon a time there was" for number in range(num_streams)]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    noted: list[tuple[float, float]] = []  # when, and how late the loop was
    lags: list[float] = []
    watching = asyncio.run_coroutine_threadsafe(watch_lag(noted), server.loop)
    ratios, delays = [], []
    for round_number in range(rounds + 1):
        body = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        noted.clear()
        clients = ask(url, [{"prompt": prompt, **body} for prompt in prompts])
        directly = on_engine(server, prompts, params)
        if round_number == 0:
            continue  # both are warm from here on
        begin, end = min(one["begin"] for one in clients), max(one["end"] for one in clients)
        through = num_streams * num_tokens / (end - begin)
        of_round = [late for when, late in noted if begin <= when <= end]  # not while nobody is served
        lags += of_round
        ratios.append(through / directly)
        delays += [one["first"] - first.at[one["id"]] for one in clients]
        print(
            f"round {round_number}: {through:.0f} tokens/s through HTTP, {directly:.0f} by generate: "
            f"{through / directly:.3f}; loop lag p99 {1000 * percentile(of_round, 0.99):.1f} ms"
        )
    watching.cancel()
    print(f"through HTTP / generate, {num_streams} streams: median {statistics.median(ratios):.3f}")
    for name, values in (("first delta", delays), ("loop lag", lags)):
        shown = ", ".join(f"p{100 * share:g} {1000 * percentile(values, share):.1f}" for share in (0.5, 0.95, 0.99))
        print(f"{name}: {shown} ms")


async def watch_lag(noted: list[tuple[float, float]]) -> None:
    while True:
        begin = time.perf_counter()
        await asyncio.sleep(LAG_PERIOD_S)
        noted.append((begin, time.perf_counter() - begin - LAG_PERIOD_S))


def on_engine(server: Server, prompts: Sequence[str], params: SamplingParams) -> float:
    """Tokens a second of `LLM.generate`, on the thread that serves."""
    allm, done, took = server.serving.allm, threading.Event(), []

    def generate() -> None:
        begin = time.perf_counter()
        outputs = allm.llm.generate(prompts, params, use_tqdm=False)
        took.append(sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - begin))
        done.set()

    allm._inbox.put(generate)
    done.wait()
    return took[0]


def ask(url: str, bodies: list[dict[str, Any]], **how: Any) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.server", "--client"]
    done = subprocess.run(
        command, input=json.dumps({"url": url, "bodies": bodies, **how}), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return list(json.loads(done.stdout))


# --- A crowd --------------------------------------------------------------------------------------


def measure_crowd(server: Server, url: str, num_requests: int) -> None:
    allm, process = server.serving.allm, psutil.Process()
    rng = random.Random(0)
    memory = []
    done = 0
    while done < num_requests:
        number = min(500, num_requests - done)
        bodies = [
            {
                "prompt": " ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(1, 20))),
                "max_tokens": rng.randrange(1, 16),
                "stream": rng.random() < 0.7,
                "n": rng.choice((1, 1, 1, 2)),
                "leaves_after": rng.random() * 2 if rng.random() < 1 / 3 else None,
            }
            for _ in range(number)
        ]
        answers = ask(url, bodies, concurrency=48)
        done += number
        while allm.num_open:
            time.sleep(0.01)
        memory.append(process.memory_info().rss)
        complete = sum(one["complete"] for one in answers)
        left = sum(one["left"] for one in answers)
        print(f"{done} requests: {complete} answered, {left} left; {memory[-1] / 2**20:.0f} MiB")
        assert complete + left == number, "a request was stuck, or failed"
    engine = allm.llm.engine
    engine.check_invariants()
    print(
        f"left: {len(engine.unfinished_requests)} requests, {engine.blocks.num_used} blocks; memory since the first "
        f"{min(500, num_requests)}: {(memory[-1] - memory[0]) / 2**20:+.1f} MiB"
    )


# --- The clients, in a process of their own -------------------------------------------------------


async def be_clients(task: dict[str, Any]) -> None:
    host, port = task["url"].split(":")
    at_once = asyncio.Semaphore(task.get("concurrency", len(task["bodies"])))

    async def limited(body: dict[str, Any]) -> dict[str, Any]:
        async with at_once:
            return await one_client(host, int(port), body)

    print(json.dumps(await asyncio.gather(*map(limited, task["bodies"]))))


async def one_client(host: str, port: int, body: dict[str, Any]) -> dict[str, Any]:
    """Ask, and read to the end; or leave in the middle of it."""
    leaves_after = body.pop("leaves_after", None)
    reader, writer = await asyncio.open_connection(host, port)
    found: dict[str, Any] = {"begin": time.perf_counter(), "complete": False, "left": False}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
    received = b""

    async def read() -> None:
        nonlocal received
        while piece := await reader.read(65536):
            received += piece
            if "first" not in found and b'"id":"' in received:
                found["first"] = time.perf_counter()
                found["id"] = received.split(b'"id":"', 1)[1].split(b'"', 1)[0].decode()

    try:
        await asyncio.wait_for(read(), leaves_after)
        found["complete"] = b" 200 OK" in received.split(b"\r\n", 1)[0]
    except TimeoutError:
        found["left"] = True
    found["end"] = time.perf_counter()
    writer.close()
    return found


if __name__ == "__main__":
    main()
