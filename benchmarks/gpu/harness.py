"""What every part of the GPU benchmark is made of: jobs, how they are run, and how device work is timed.

A job is a named function that returns figures, or raises. Jobs run one after another and none stops the next: what a
job raised is its result. A section's jobs that do not fit into its budget of seconds are skipped, and say so.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]

TESTS = "test suites"
TEST_SECONDS = 540
"""The test suites are one job, which ends itself then."""

CHECKS = ("kernels against float64", "whole model", TESTS)
"""The sections that check; the others measure."""

Row = dict[str, Any]
"""One job's result, as it stands in the JSON file. Always there: section, name, status (ok, failed, skipped)."""


@dataclass(frozen=True)
class Setting:
    """On what a run runs."""

    device: torch.device
    tiny: bool
    """A dry run: the smallest sizes, and nothing that is timed is kept."""
    quick: bool
    seed: int

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Triton's interpreter computes nonsense in bfloat16."""
        return (torch.bfloat16, torch.float16, torch.float32) if self.on_gpu else (torch.float16, torch.float32)

    @property
    def half(self) -> torch.dtype:
        """What is timed."""
        return self.dtypes[0]

    def random(self, name: str) -> torch.Generator:
        """Random numbers of a job's own: it draws the same whichever jobs ran before it."""
        return torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))

    def l2_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.device).L2_cache_size if self.on_gpu else 0


@dataclass(frozen=True)
class Job:
    name: str
    run: Callable[[], Row]


class DeviceLost(Exception):
    """The device answers nothing any more (an illegal access, say): this process can use it no further."""


def run_jobs(section: str, jobs: Sequence[Job], setting: Setting, seconds: float, first: int = 0) -> Iterator[Row]:
    """The jobs from number `first` on, until `seconds` have passed. Raises DeviceLost after the job that did it."""
    deadline = time.monotonic() + seconds
    for job in jobs[first:]:
        row: Row = {"section": section, "name": job.name}
        if time.monotonic() > deadline:
            yield row | {"status": "skipped", "reason": f"the section's {seconds:.0f} seconds were spent"}
            continue
        start = time.monotonic()
        try:
            row |= {"status": "ok"} | job.run()
        except Exception as error:  # whatever it is, it is this job's result
            trace = traceback.format_exc().replace(f"{ROOT}/", "")  # no path of this machine's
            row |= {"status": "failed", "error": f"{type(error).__name__}: {error}", "trace": trace}
        row["job_seconds"] = round(time.monotonic() - start, 2)
        lost = setting.on_gpu and not device_answers()
        if lost:
            row |= {"status": "failed", "error": row.get("error", "the device no longer answers")}
        if setting.tiny:
            row = without_measurements(row)
        yield row
        if lost:
            raise DeviceLost
        gc.collect()
        if setting.on_gpu:
            torch.cuda.empty_cache()


def device_answers() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


MEASURED = (
    "job_seconds",
    "seconds",
    "least",
    "most",
    "rate",
    "tokens_per_second",
    "busy",
    "prompt_seconds",
    "setup_seconds",
)


def without_measurements(row: Row) -> Row:
    """A dry run went the same ways, but its times say nothing about any card."""
    return {
        key: "dry run" if key in MEASURED else without_measurements(value) if isinstance(value, dict) else value
        for key, value in row.items()
    }


# --- Timing ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of several rounds, and the fastest and slowest of them."""

    seconds: float
    least: float
    most: float
    how: str

    def row(self, amount: float, unit: str, ceiling: str) -> Row:
        """As figures: `amount` is bytes or operations of one call; `ceiling` the measured rate to compare it with."""
        return vars(self) | {"rate": amount / self.seconds, "unit": unit, "ceiling": ceiling}


def work(operations: float, moved: float) -> Row:
    """What one call has to do: floating-point operations, and bytes to and from memory, each once. For the roofline."""
    return {"operations": float(operations), "bytes": float(moved)}


ROUNDS = 11
ROUND_SECONDS = 2e-3
"""What one round should take: starting a graph costs some microseconds, which must not count."""


def time_calls(calls: Sequence[Callable[[], object]], setting: Setting) -> Timing:
    """Time one call. `calls` do the same work on different inputs, which together are larger than the L2 cache.

    They are captured as one CUDA graph, so that launching costs nothing; where that cannot be (some peers), launched.
    """
    for call in calls:
        call()  # compiles
    if not setting.on_gpu:
        start = time.perf_counter()
        for call in calls:
            call()
        seconds = (time.perf_counter() - start) / len(calls)
        return Timing(seconds, seconds, seconds, "dry run")

    def launch() -> list[object]:
        return [
            call() for call in calls
        ]  # kept, so that each result has memory of its own, which no cache holds either

    once = min(event_seconds(launch) for _ in range(3))
    passes = max(1, min(math.ceil(ROUND_SECONDS / once), 400 // len(calls)))
    run, how = captured(launch, passes)
    run()
    rounds = sorted(event_seconds(run) / (passes * len(calls)) for _ in range(ROUNDS))
    return Timing(statistics.median(rounds), rounds[0], rounds[-1], how)


def captured(launch: Callable[[], object], passes: int) -> tuple[Callable[[], None], str]:
    def launch_all() -> None:
        for _ in range(passes):
            launch()

    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            launch_all()
    except Exception:  # a library that waits for the device, or launches where a capture does not see it
        with suppress(RuntimeError):
            torch.cuda.synchronize()
        return launch_all, "launched"
    return graph.replay, "graph"


def event_seconds(run: Callable[[], object]) -> float:
    """Seconds that the device was busy with `run`, by its own clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def wall_seconds(run: Callable[[], object], setting: Setting) -> float:
    """Seconds until the device has done all that `run` started, on all its streams."""
    if setting.on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if setting.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def num_inputs(bytes_of_one: int, setting: Setting) -> int:
    """How many different inputs a kernel is timed on in turn, so that none is in the L2 cache when its turn comes."""
    return max(1, min(64, math.ceil(3 * setting.l2_bytes() / bytes_of_one)))
