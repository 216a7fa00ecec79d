"""`python -m benchmarks.live [--events 1000 --pages 2 --rounds 5]`: what the live page costs the engine.

Sequences decode at a pace that makes so many events a second, in a pool of 10,000 blocks: with nobody listening; with a
watch listening and no page that looks; and with pages that read the watch over HTTP, in processes of their own, while
its server runs in a thread beside the engine's. The runner computes nothing. Counted is the processor time of the
process: the engine's own, the making of events, their folding, and the frames. What is more than with nobody listening
is what the page could take from an engine that is always busy, if it took all of it while the engine wants Python's
lock. Kinds take turns; what is told is the median of their rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median

import httpx
import uvicorn
from fastapi import FastAPI

from benchmarks.host_cost import Following
from minipaged import SamplingParams
from minipaged.engine.engine import Engine
from minipaged.params import EngineConfig
from minipaged.serve.live.routes import live_routes
from minipaged.serve.live.watch import Watch
from minipaged.tiers import fast_tier

NOBODY, LISTENING, LOOKED_AT = "nobody listens", "listening, no page looks", "listening, pages look"
TARGET = 0.03
"""Of an engine's time, at 1,000 events a second."""
NUM_BLOCKS, SEQUENCES, PROMPT_TOKENS, MAX_TOKENS, VOCAB_SIZE = 10_000, 32, 500, 3000, 50
SECONDS = 5.0
"""Of a round."""


def engine_that_decodes() -> Engine:
    """One with requests that go on for longer than a round."""
    config = EngineConfig(
        num_blocks=NUM_BLOCKS,
        max_model_len=PROMPT_TOKENS + MAX_TOKENS,
        vocab_size=VOCAB_SIZE,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=SEQUENCES * PROMPT_TOKENS,
    )
    return Engine(config, fast_tier(), Following(SEQUENCES, NUM_BLOCKS // SEQUENCES, chooses=False))


def round_of(engine: Engine, steps_per_second: float) -> float:
    """Seconds of processor time that this process takes for each second of decoding at that pace."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for number in range(SEQUENCES):
        engine.add_request([(7 * number + place) % VOCAB_SIZE for place in range(PROMPT_TOKENS)], params)
    engine.step()  # the prompts
    time.sleep(0.5)  # and whoever looks has seen it
    num_steps = round(SECONDS * steps_per_second)
    before, start = time.process_time(), time.perf_counter()
    for step in range(1, num_steps + 1):
        engine.step()
        time.sleep(max(0.0, start + step / steps_per_second - time.perf_counter()))
    return (time.process_time() - before) * steps_per_second / num_steps


def look(url: str, tell: Connection) -> None:
    """One page: reads what it is sent, and tells how many bytes when it is over."""
    num_bytes = 0
    with httpx.stream("GET", url, timeout=None) as answer:
        chunks = answer.iter_bytes()
        num_first = len(next(chunks))
        tell.send("connected")
        num_bytes = sum(map(len, chunks))
    tell.send((num_first, num_bytes))


@contextmanager
def looked_at(watch: Watch, num_pages: int, num_bytes: list[float]) -> Iterator[None]:
    """So many pages look, each in a process of its own; what each was sent (bytes a second) is put into `num_bytes`."""
    app = FastAPI()
    app.include_router(live_routes(watch))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/live/events"
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(num_pages)]
    processes = [spawn.Process(target=look, args=(url, there)) for _, there in pipes]
    for process in processes:
        process.start()
    for here, _ in pipes:
        here.recv()
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    watch.close()
    num_bytes += [here.recv()[1] / seconds for here, _ in pipes]
    server.should_exit = True
    for each in (*processes, thread):
        each.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--events", type=int, default=1000, help="a second")
    parser.add_argument("--pages", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    steps_per_second = given.events / (2 * SEQUENCES + 3)  # two for each sequence, and the step's own
    shares: dict[str, list[float]] = {NOBODY: [], LISTENING: [], LOOKED_AT: []}
    num_bytes: list[float] = []
    for _ in range(given.rounds):
        for kind, taken in shares.items():
            engine = engine_that_decodes()
            if kind == NOBODY:
                taken.append(round_of(engine, steps_per_second))
                continue
            watch = Watch.of(engine)
            with looked_at(watch, given.pages if kind == LOOKED_AT else 0, num_bytes):
                taken.append(round_of(engine, steps_per_second))
    print(f"{given.events} events a second, {SEQUENCES} sequences, {NUM_BLOCKS} blocks; % of one core's time:")
    alone = median(shares[NOBODY])
    for kind, taken in shares.items():
        spread = f"{100 * min(taken):.1f} to {100 * max(taken):.1f}"
        print(f"{kind:26} {100 * median(taken):5.1f} ({spread}), {100 * (median(taken) - alone):+.1f}")
    print(f"each of {given.pages} pages is sent {median(num_bytes) / 1000:.1f} kB a second")
    cost = median(shares[LOOKED_AT]) - alone
    print(f"target: at most {TARGET:.0%} more: {'met' if cost <= TARGET else 'missed'}")


if __name__ == "__main__":
    main()
