"""`python -m benchmarks.floors [--trace FILE] [--chats]`: what the floors below the prefix cache are worth
(`minipaged/engine/floors.py`).

- `--trace`: a trace with hashes of its prompts, one for each 512 tokens, as those of Mooncake, on a simulated machine:
  the sizes of Llama-3.1-8B, the speeds of the paper's A100, and room for 131,072 tokens on the device. The host floor
  holds 0, 1, 4 and 16 times as many. Blocks that move down do so beside their step, as on a GPU, and blocks that come
  up before it; with `--before`, both come before it. `--slower` stretches the time between requests, because one
  machine does not serve the whole trace. Answers are of one token that no prompt has, so only prompts are found. The
  same command gives the same figures.
- `--chats`: 40 chats of SmolLM2 in a pool for 8, really served: the time to the first token of each second turn, where
  it is computed and where it comes from the host or from a folder.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from minipaged import LLM, SamplingParams
from minipaged.engine.engine import Engine
from minipaged.engine.policy import carry_seconds
from minipaged.mirror import Rows
from minipaged.params import EngineConfig
from minipaged.simulation.simulated import OPT_13B_ON_AN_A100, SimulatedRunner, simulated_tier
from minipaged.steps import BlockMoves, StepInput

HASHED_TOKENS = 512
BLOCK_SIZE = 64
TIMES = (0, 1, 4, 16)
MACHINE = replace(
    OPT_13B_ON_AN_A100,
    name="Llama-3.1-8B's sizes at the speeds of the paper's A100",
    weight_bytes=16e9,
    kv_bytes_per_token=2 * 32 * 8 * 128 * 2,  # K and V, layers, heads, numbers, bytes
    kv_memory_bytes=16 << 30,
    max_model_len=131_072,
    flops_per_token=16e9,
    copies_per_block=1,
)
NUM_CHATS, IN_POOL, ANSWER, SECOND = 40, 8, 16, 32
"""Chats; chats that the pool holds; tokens of an answer; tokens of a second message."""


class BesideRunner(SimulatedRunner):
    """Blocks leave the device while the step computes. The step takes as long as the longer of the two."""

    leaving = 0.0

    def move(self, moves: BlockMoves) -> None:
        self.leaving = carry_seconds(self.costs(), len(moves.swap_out))
        super().move(moves._replace(swap_out=()))

    def step_seconds(self, step: StepInput, rows: Rows) -> float:
        leaving, self.leaving = self.leaving, 0.0
        return max(leaving, super().step_seconds(step, rows))


@dataclass(frozen=True)
class Arrival:
    """A request of a trace."""

    seconds: float
    prompt: list[int]
    answer_tokens: int


def read(path: Path, most: int, slower: float) -> list[Arrival]:
    """The first requests of a trace. A hash stands for 512 tokens that nothing else begins with. Requests with the same
    time are spread evenly over the time until the next."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        requests = [json.loads(line) for line, _ in zip(lines, range(most), strict=False)]
    bunches = [[*bunch] for _, bunch in groupby(requests, key=lambda one: one["timestamp"])]
    times = [bunch[0]["timestamp"] / 1000 * slower for bunch in bunches]
    arrivals = []
    for bunch, start, stop in zip(bunches, times, [*times[1:], times[-1] + slower], strict=True):
        for i, one in enumerate(bunch):
            tokens = [h * HASHED_TOKENS + k + 1 for h in one["hash_ids"] for k in range(HASHED_TOKENS)]
            seconds = start + (stop - start) * i / len(bunch)
            arrivals.append(Arrival(seconds, tokens[: one["input_length"]], max(1, one["output_length"])))
    return arrivals


def replay(arrivals: list[Arrival], times: int, before: bool) -> tuple[float, list[float], Any]:
    """Serve the requests with a floor of `times` the device's blocks. Returns the share of prompt tokens that were
    found, the times to the first token, and the engine's statistics."""
    runner = (SimulatedRunner if before else BesideRunner)(MACHINE, BLOCK_SIZE)
    num_blocks = MACHINE.num_blocks(BLOCK_SIZE)
    config = EngineConfig(
        num_blocks=num_blocks,
        num_swap_blocks=times * num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MACHINE.max_model_len,
        vocab_size=1 << 40,
        kv_cache_tiers=("host",) if times else (),
        preemption="recompute",
        max_num_batched_tokens=4096,
    )
    engine = Engine(config, simulated_tier(), runner, clock=runner.clock)
    coming, due = list(reversed(arrivals)), dict[str, float]()
    first: list[float] = []
    found = 0
    while coming or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            runner.now = max(runner.now, coming[-1].seconds)
        while coming and coming[-1].seconds <= runner.now:
            one = coming.pop()
            params = SamplingParams(temperature=0, max_tokens=one.answer_tokens, ignore_eos=True)
            due[engine.add_request(one.prompt, params)] = one.seconds
        for update in engine.step():
            if update.request_id in due:
                first.append(runner.now - due.pop(update.request_id))
            if update.output:
                found += update.output.num_cached_tokens or 0
    return found / sum(len(one.prompt) for one in arrivals), first, engine.current_stats()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def trace(path: Path, most: int, slower: float, before: bool) -> None:
    arrivals = read(path, most, slower)
    tokens = sum(len(one.prompt) for one in arrivals)
    print(f"{path.name}: {len(arrivals):,} requests, {tokens:,} prompt tokens, {slower} times slower; {MACHINE.name}")
    print("| host floor ÷ device | found | TTFT p50 | p95 | mean | blocks down | up |\n|---|---|---|---|---|---|---|")
    for times in TIMES:
        found, first, stats = replay(arrivals, times, before)
        print(
            f"| {times} | {found:.1%} | {percentile(first, 0.5):.2f} s | {percentile(first, 0.95):.2f} s | "
            f"{statistics.fmean(first):.2f} s | {stats.blocks_demoted:,} | {stats.blocks_promoted:,} |",
            flush=True,
        )


def chats(prompt_tokens: int, model: str, dtype: str) -> None:
    """Serve the chats' first turns, then their second ones, one at a time."""
    r = random.Random(0)
    prompts = [[r.randrange(1000, 40_000) for _ in range(prompt_tokens)] for _ in range(NUM_CHATS)]
    length = prompt_tokens + 2 * ANSWER + SECOND
    blocks = -(-length // 16)
    given: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": length + 16,
        "num_blocks": IN_POOL * blocks,
        "max_num_seqs": 8,
    }
    print(f"{NUM_CHATS} chats of {prompt_tokens} tokens, {dtype}; second turns: time to the first token, in ms")
    print("| second turns come from | p50 | p95 | blocks found below |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, dict[str, Any]] = {
            "computing": {"num_swap_blocks": blocks},
            "the host": {"num_swap_blocks": NUM_CHATS * blocks, "kv_cache_tiers": ("host",)},
            "the disk": {
                "num_swap_blocks": blocks,
                "kv_cache_tiers": ("host", "disk"),
                "kv_cache_folder": folder,
                "kv_cache_disk_space": 16.0,
            },
        }
        for way, how in ways.items():
            llm = LLM(model, tier="fast", device="cpu", **given, **how)
            params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
            llm.generate([[5] * 64], params)  # compiles
            histories, seconds = [], list[float]()
            for prompt in prompts:
                [first] = llm.generate([prompt], params)
                histories.append([*prompt, *first.outputs[0].token_ids])
            for history in histories:
                began = time.perf_counter()
                said = [r.randrange(1000, 40_000) for _ in range(SECOND)]
                updates = llm.stream([*history, *said], params)
                next(updates)
                seconds.append(time.perf_counter() - began)
                for _ in updates:
                    pass
            stats = llm.stats()
            kept = f"{stats.blocks_promoted:,} blocks from the host, {stats.blocks_loaded:,} from the disk"
            p50, p95 = (percentile(seconds, share) * 1e3 for share in (0.5, 0.95))
            print(f"| {way} | {p50:.0f} | {p95:.0f} | {kept} |", flush=True)
            llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a trace with hash_ids (.jsonl or .jsonl.gz)")
    parser.add_argument("--requests", type=int, default=3000, help="of the trace")
    parser.add_argument("--slower", type=float, default=12.0)
    parser.add_argument("--before", action="store_true", help="blocks also move down before their step")
    parser.add_argument("--chats", action="store_true", help="serve a real model")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a chat's first message")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    asked = parser.parse_args()
    if asked.trace:
        trace(asked.trace, asked.requests, asked.slower, asked.before)
    if asked.chats:
        chats(asked.prompt, asked.model, asked.dtype)


if __name__ == "__main__":
    main()
