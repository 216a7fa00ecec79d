"""`python -m benchmarks.parallel [--starts 100]`: what it costs the driver that a model runs in several processes.

- The message of a step in which 256 sequences go on decoding, in bytes, as each worker gets it.
- What the driver computes in such a step, all of its threads, beside what the engine of one process does with the same
  model: scheduling, writing the step, committing, updates. In several processes sending and reading are counted too; in
  one the runner is not, but for the choices that come of it. Seconds of the processor, not of the clock; in turns, five
  rounds.
- `--starts`: so many times two workers are started and ended, half of them killed at a random moment. What is left
  behind: processes, files, shared memory, sockets, threads.

The model is a small one with random weights: none of this depends on it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil

from minipaged import LLM, SamplingParams
from minipaged.contracts import Runner, StepResult
from minipaged.engine.engine import Engine
from minipaged.errors import WorkerFailed
from minipaged.parallel.messages import Message, encode
from minipaged.parallel.workers import RankProcesses
from minipaged.scheduling import Costs
from minipaged.steps import StepInput
from tests.tiny_model import make_tiny_model

SEQUENCES, STEPS, ROUNDS = 256, 48, 5
TARGET_BYTES, TARGET_RATIO = 2048, 1.2


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--starts", type=int, default=0)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        print_cost(model, tensor=2, pipeline=1)
        print_cost(model, tensor=1, pipeline=2)
        if given.starts:
            print_what_is_left(model, given.starts)


def print_cost(model: Path, tensor: int, pipeline: int) -> None:
    """The message, and the driver's work."""
    with closing(start(model, tensor, pipeline)) as llm:
        sizes: list[int] = []
        workers = llm.loaded.weights
        assert isinstance(workers, RankProcesses)
        tell = workers.tell

        def counted(message: Message) -> None:
            sizes.append(len(encode(message)))
            tell(message)

        engine = decoding(llm)
        workers.tell = counted  # type: ignore[method-assign]
        for _ in range(32):
            engine.step()
        workers.tell = tell  # type: ignore[method-assign]
        print(
            f"{tensor} x {pipeline} ranks: the message of a step, {SEQUENCES} sequences: {min(sizes)} to {max(sizes)} "
            f"bytes (<= {TARGET_BYTES})"
        )
        alone = decoding(start(model, 1, 1))
        runner = alone.runner = Timed(alone.runner)
        for step in (alone.step, engine.step):
            seconds_of(step)
        ratios, microseconds = [], []
        for _ in range(ROUNDS):
            runner.seconds, began = 0.0, time.thread_time()
            seconds_of(alone.step)
            one = (time.thread_time() - began - runner.seconds) / STEPS
            several = seconds_of(engine.step) * pipeline
            ratios.append(several / one)
            microseconds.append((one * 1e6 / SEQUENCES, several * 1e6 / SEQUENCES))
        one, several = (statistics.median(each) for each in zip(*microseconds, strict=True))
        print(
            f"  the driver's work / that of one process: {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f}; {several:.1f} and {one:.1f} us a sequence and step; <= {TARGET_RATIO})"
        )


class Timed(Runner):
    """Another runner, and the seconds that it took of this thread."""

    def __init__(self, runner: Runner) -> None:
        self.seconds = 0.0
        self._runner = runner

    def run(self, step: StepInput) -> StepResult:
        began = time.thread_time()
        result = self._runner.run(step)
        self.seconds += time.thread_time() - began
        return result

    def costs(self) -> Costs:
        return self._runner.costs()


def decoding(llm: LLM) -> Engine:
    """An engine in which all go on decoding. It makes no text, which costs the same anywhere."""
    engine = Engine(llm.config, llm.loaded.tier, llm.engine.runner)
    for i in range(SEQUENCES):
        prompt = [(i * 7 + k) % 256 for k in range(64)]
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=900, ignore_eos=True))
    while engine.scheduler.waiting or not all(request.prompt_computed for request in engine.scheduler.running):
        engine.step()
    return engine


def start(model: Path, tensor: int, pipeline: int) -> LLM:
    return LLM(
        model,
        tier="fast",
        device="cpu",
        dtype="float32",
        num_blocks=80 * SEQUENCES,
        num_swap_blocks=0,
        max_num_seqs=SEQUENCES,
        async_scheduling=False,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
    )


def seconds_of(step: Callable[[], object]) -> float:
    """A step's seconds of the processor, in all threads of this process."""
    before = time.process_time()
    for _ in range(STEPS):
        step()
    return (time.process_time() - before) / STEPS


def print_what_is_left(model: Path, starts: int) -> None:
    rng = random.Random(0)
    start(model, 2, 1).close()  # what this process keeps for good is there
    before, failures = left(), 0
    for i in range(starts):
        try:
            with closing(start(model, 2, 1)) as llm:
                workers = llm.loaded.weights
                assert isinstance(workers, RankProcesses)
                if i % 2:
                    pid, moment = rng.choice(workers.pids), rng.uniform(0, 0.5)
                    threading.Timer(moment, lambda pid=pid: suppressed_kill(pid)).start()  # type: ignore[misc]
                prompts = [[k, 2, 3] for k in range(8)]
                for _ in range(1 + 40 * (i % 2)):
                    llm.generate(prompts, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True), use_tqdm=False)
        except WorkerFailed:
            failures += 1
        print(f"\r{i + 1} of {starts}", end="", file=sys.stderr)
    deadline = time.monotonic() + 5
    while left() != before and time.monotonic() < deadline:
        time.sleep(0.1)
    print(f"\n{starts} starts, {failures} of them ended by a killed worker; left behind: ", end="")
    print({name: now - then for (name, now), then in zip(left().items(), before.values(), strict=True)})


def suppressed_kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def left() -> dict[str, int]:
    """What there is of each kind that workers need."""
    me = psutil.Process()
    return {
        "processes": len(me.children(recursive=True)),
        "files": len(list(Path(tempfile.gettempdir()).glob("minipaged-workers-*"))),
        "shared memory": len(list(Path("/dev/shm").iterdir())),
        "sockets": len(me.net_connections("all")),
        "descriptors": me.num_fds(),
        "threads": me.num_threads(),
    }


if __name__ == "__main__":
    main()
