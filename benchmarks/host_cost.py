"""`python -m benchmarks.host_cost [--peer FOLDER]`: what the host does in a step in which all sequences go on decoding.

The runner follows the steps as the fast tier's does (its mirror, and the block tables for a device) and computes
nothing: the tokens are always the same one. Seconds are those of this thread, so other work counts little. So what is
measured is scheduling, block tables, writing and following the step, committing its tokens, and updates. Once with
nobody listening, once with every event listened to; with asynchronous scheduling and without. Then once more with
tokens chosen by the fast tier: drawn at a temperature, from so few logits that nearly all of it is what goes before and
after the kernels.

`--trace`: a trace of requests (as for `minipaged demo --scene trace`), of which the first 2,000 are served on a
simulated machine: how long that takes.

`--peer`: nano-vllm's sources (https://github.com/GeeeekExplorer/nano-vllm), measured in the same run: its scheduler
and block manager, and the lists that its runner prepares for a step of decoding. It needs blocks of 256 tokens.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import types
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from minipaged.contracts import Runner, Sampled, StepResult
from minipaged.engine.engine import Engine
from minipaged.fast import cpu
from minipaged.fast.block_table import DeviceTables
from minipaged.fast.sampling import Choosing
from minipaged.mirror import Mirror
from minipaged.params import EngineConfig, SamplingParams
from minipaged.scheduling import Costs
from minipaged.simulation.traces import TraceReplay, read_trace
from minipaged.steps import StepInput
from minipaged.tiers import fast_tier

SEQUENCES = (64, 256, 1024)
STEPS = 96
PROMPT_TOKENS = 500
VOCAB_SIZE, TEMPERATURE = 50, 0.6
TARGET, TARGET_LISTENING, TARGET_DRAWN = 3.0, 7.0, 5.0
"""Microseconds a sequence and step."""
TRACE_REQUESTS, TRACE_TARGET = 2000, 4.0
_CHOSEN = Sampled(5, -0.5, None)


class Following(Runner):
    """Knows all that there is to run, and runs nothing."""

    def __init__(self, max_num_seqs: int, max_blocks: int, *, chooses: bool) -> None:
        self._logits = torch.zeros(max_num_seqs if chooses else 0, VOCAB_SIZE)  # [rows, vocab]
        self._mirror = Mirror()
        self._tables = DeviceTables(2 * max_num_seqs, max_blocks, torch.device("cpu"), cpu)
        self._choices: Sequence[Sampled] = []
        self._how: Choosing | None = None

    def run(self, step: StepInput) -> StepResult:
        self._mirror.apply(step, wait=False)
        self._tables.apply(step)
        if len(self._logits):
            inputs = self._mirror.sampling_inputs()
            logits = self._logits[: len(inputs)]
            self._how = Choosing.of(inputs, logits, self._how)  # as `Llama.sample` keeps it
            self._choices = self._how.sample(logits)
        elif len(self._choices) != self._mirror.rows.num_choices:
            self._choices = [_CHOSEN] * self._mirror.rows.num_choices
        self._mirror.chosen(self._choices)
        return StepResult(self._choices, None)

    def costs(self) -> Costs:
        raise AssertionError("the pool is large enough for all")


def decoding(num_sequences: int, *, async_scheduling: bool, listening: bool = False, chooses: bool = False) -> Engine:
    """An engine in which so many sequences go on decoding."""
    temperature = TEMPERATURE if chooses else 0.0
    config = EngineConfig(
        num_blocks=80 * num_sequences,
        max_model_len=1200,
        vocab_size=VOCAB_SIZE,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=max(2048, 2 * num_sequences),
        async_scheduling=async_scheduling,
    )
    heard: list[Callable[[Any], None]] = [lambda event: None] if listening else []
    engine = Engine(config, fast_tier(), Following(num_sequences, 80, chooses=chooses), listeners=heard)
    for i in range(num_sequences):
        prompt = [(i * 7 + k) % VOCAB_SIZE for k in range(PROMPT_TOKENS)]
        engine.add_request(prompt, SamplingParams(temperature=temperature, max_tokens=600, ignore_eos=True))
    while engine.scheduler.waiting or not all(request.prompt_computed for request in engine.scheduler.running):
        engine.step()
    return engine


def seconds_per_step(step: Callable[[], object]) -> float:
    """The best of three times `STEPS` steps: as many as fill some blocks of each sequence."""
    best = float("inf")
    for _ in range(8):
        step()
    for _ in range(3):
        start = time.thread_time()
        for _ in range(STEPS):
            step()
        best = min(best, (time.thread_time() - start) / STEPS)
    return best


def peer_step(folder: Path, num_sequences: int, block_size: int = 256) -> Callable[[], object]:
    """One step of nano-vllm's scheduler, with as many sequences decoding."""
    if "nanovllm" not in sys.modules:
        package = types.ModuleType("nanovllm")  # without its own __init__, which imports what only a GPU has
        package.__path__ = [str(folder / "nanovllm")]
        sys.modules["nanovllm"] = package
    from nanovllm.engine.scheduler import Scheduler  # type: ignore[import-not-found]
    from nanovllm.engine.sequence import Sequence  # type: ignore[import-not-found]

    Sequence.block_size = block_size
    num_blocks = num_sequences * (1200 // block_size + 2)
    sizes = {"max_num_seqs": num_sequences, "max_num_batched_tokens": 16384, "eos": -1}
    scheduler = Scheduler(SimpleNamespace(kvcache_block_size=block_size, num_kvcache_blocks=num_blocks, **sizes))
    for i in range(num_sequences):
        prompt = [(i * 7 + k) % 50 for k in range(PROMPT_TOKENS)]
        scheduler.add(Sequence(prompt, SimpleNamespace(temperature=0, max_tokens=600, ignore_eos=True)))

    def step() -> bool:
        sequences, prefill = scheduler.schedule()
        if not prefill:
            ids, lens = [one.last_token for one in sequences], [len(one) for one in sequences]
            slots = [one.block_table[-1] * block_size + one.last_block_num_tokens - 1 for one in sequences]
            width = max(len(one.block_table) for one in sequences)
            tables = [one.block_table + [-1] * (width - len(one.block_table)) for one in sequences]
            assert len(ids) == len(lens) == len(slots) == len(tables)
        scheduler.postprocess(sequences, [5] * len(sequences), prefill)
        return bool(prefill)

    while step():
        pass
    return step


def main() -> int:
    """Print a line for each measurement, and one for each target that is missed: then the exit status is 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="nano-vllm's sources")
    parser.add_argument("--sequences", type=int, nargs="*", default=SEQUENCES)
    parser.add_argument("--trace", type=Path, help="a file of requests")
    args = parser.parse_args()
    if args.peer and find_spec("xxhash") is None:
        parser.error("nano-vllm needs xxhash to be measured: pip install xxhash")
    gc.collect()
    gc.freeze()  # as an LLM does when it has begun
    missed = list[str]()
    for num_sequences in args.sequences:
        for listening in (False, True):
            for async_scheduling in (False, True):
                engine = decoding(num_sequences, async_scheduling=async_scheduling, listening=listening)
                cost = 1e6 * seconds_per_step(engine.step) / num_sequences
                target = TARGET_LISTENING if listening else TARGET
                what = ("asynchronous" if async_scheduling else "synchronous") + ", every event" * listening
                print(f"{num_sequences:5} sequences, {what:26} {cost:6.2f} us a sequence (target {target})", flush=True)
                if cost > target:
                    missed.append(f"{num_sequences} sequences, {what}: {cost:.2f} us a sequence, not {target}")
        engine = decoding(num_sequences, async_scheduling=False, chooses=True)
        cost = 1e6 * seconds_per_step(engine.step) / num_sequences
        aim = f" (target {TARGET_DRAWN})" if num_sequences == 256 else ""
        print(f"{num_sequences:5} sequences, {'with tokens drawn':26} {cost:6.2f} us a sequence{aim}", flush=True)
        if aim and cost > TARGET_DRAWN:
            missed.append(f"{num_sequences} sequences, with tokens drawn: {cost:.2f} us a sequence, not {TARGET_DRAWN}")
        if args.peer:
            cost = 1e6 * seconds_per_step(peer_step(args.peer, num_sequences)) / num_sequences
            print(f"{num_sequences:5} sequences, {'nano-vllm':26} {cost:6.2f} us a sequence", flush=True)
    if args.trace:
        start, requests = time.thread_time(), read_trace(args.trace)[:TRACE_REQUESTS]
        for _ in (replay := TraceReplay(requests)):
            pass
        seconds, steps = time.thread_time() - start, replay.engine.stats.steps
        print(f"{len(requests)} requests of {args.trace.name}, {steps} steps: {seconds:.1f} s (target {TRACE_TARGET})")
        if seconds > TRACE_TARGET:
            missed.append(f"{args.trace.name}: {seconds:.1f} s, not {TRACE_TARGET}")
    for one in missed:
        print(f"target missed: {one}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
