"""The cost of a step, fitted to the flat parts of the paper's curves, where no request waits.

The cost model of a step (`simulated.Machine`; the figures' texts call it the *law*):

    seconds = t0 + r * rows + max(weights / bandwidth, operations / peak) + K/V bytes / bandwidth2

Three of its five speeds are fitted to the paper's curves: `t0`, `r` and `bandwidth2`. No point of the curves separates
`bandwidth` and `peak` from `t0`. These two are fitted to measured kernels of an A100 (`calibrate_by_kernels`).

If no request waits, the height of a curve depends on the step alone. By Little's law, `rate * latency` requests run at
once, so a step has that many rows. The rate gives the number of prompts per step. The latency is the output length
times the duration of a step. `normalized_latency` solves these equations. `calibrate` searches for the machine with the
smallest sum of absolute errors at the points that `flat_points` selects. The two points around a knee are never used.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import product

import numpy as np

from minipaged.paper import published
from minipaged.paper.workloads import PREFIX, draw_lengths
from minipaged.simulation.simulated import Machine

FLAT_RATE = 0.75
"""A point is flat only at or below this share of the rate at which its curve leaves the panel."""
FLAT_HEIGHT = 1.05
"""A point is flat only at or below this multiple of the lowest latency of any curve at its rate or above. Higher points
include queueing."""
NUM_LENGTHS = 4_000
"""The number of requests drawn to compute means over lengths."""


@dataclass(frozen=True, slots=True)
class FlatPoint:
    """A point of Fig. 12, 14 or 16 at which no request waits."""

    panel: str
    dataset: str
    system: str
    rate: float
    """Requests per second."""
    seconds_per_token: float
    prefix: int = 0
    """Tokens of the shared prefix before each prompt."""
    cached: int = 0
    """Tokens of the prefix whose keys and values are cached."""


@dataclass(frozen=True, slots=True)
class Means:
    """Request lengths drawn from a dataset, for means over them."""

    prompts: np.ndarray
    """Prompt tokens, [requests]."""
    outputs: np.ndarray
    """Output tokens, [requests]."""

    @classmethod
    def of(cls, dataset: str) -> Means:
        lengths = np.array(draw_lengths(dataset, NUM_LENGTHS, np.random.default_rng(0)))  # [requests, 2]
        return cls(lengths[:, 0], lengths[:, 1])


def prompt_seconds(machine: Machine, num_tokens: np.ndarray) -> np.ndarray:
    """Return the seconds by which computing `num_tokens` query tokens exceeds reading the weights, or 0. [lengths]"""
    read = machine.weight_bytes / machine.weight_bytes_per_second
    return np.maximum(0, num_tokens * machine.flops_per_token / machine.flops_per_second - read)


def normalized_latency(machine: Machine, rate: float, lengths: Means, prefix: int = 0, cached: int = 0) -> float:
    """Return the mean of latency / output tokens at `rate` requests per second, in seconds per token.

    It assumes that a request waits only for the current step to end. The result is infinite if the machine cannot keep
    up. Each prompt has `prefix` additional tokens, and `cached` of them need no computation."""
    prompts, outputs = lengths.prompts + prefix, lengths.outputs  # [requests]
    step = machine.seconds_per_step + machine.weight_bytes / machine.weight_bytes_per_second
    context = float(np.mean(outputs * (prompts + outputs / 2)))  # context tokens, summed over a request's steps
    fixed = step
    for _ in range(200):
        rows = rate * step * float(outputs.mean())
        excess = prompt_seconds(machine, prompts - cached + rows)  # [requests], for the step with the prompt
        longer = rate * step * float(excess.mean())
        reading = rate * step * context * machine.kv_bytes_per_token / machine.kv_bytes_per_second
        new = fixed + machine.seconds_per_row * rows + reading + longer
        if not new < 10:
            return np.inf
        if abs(new - step) < 1e-7:
            break
        step = new
    # A request waits half a step on average before its first step, which also computes its prompt.
    own = step / 2 + prompt_seconds(machine, prompts - cached + rows)  # [requests]
    return float(step + np.mean(own / outputs))


# --- The points -----------------------------------------------------------------------------------


def flat_points(panel: str) -> list[FlatPoint]:
    """Return the points of a panel that calibrate its machine: those low in rate and in height.

    From Fig. 14 only vLLM's points are used, for the cost of a request's further sequences. FasterTransformer's points
    are never used, because its batching rules are hardly known. Panels outside Figs. 12, 14 and 16 have no such points.
    """
    if panel[:2] not in ("12", "14", "16"):
        return []
    dataset, prefix = published.dataset(panel), PREFIX.get(panel, 0)
    lines = {name: line for name, line in published.curves(panel).items() if name != "FasterTransformer"}
    low: list[FlatPoint] = []
    for system, line in lines.items():
        last = published.with_exit(panel, system)[-1][0]
        for rate, seconds in line:
            lowest = min(y for other in lines.values() for x, y in other if x >= rate)
            if (system == "vLLM" or panel[:2] != "14") and rate <= FLAT_RATE * last and seconds <= FLAT_HEIGHT * lowest:
                cached = prefix // 16 * 16 if system == "vLLM" else 0  # whole blocks
                low.append(FlatPoint(panel, dataset, system, rate, seconds, prefix, cached))
    return low


# --- The fit --------------------------------------------------------------------------------------


def relative_errors(machine: Machine, points: Iterable[FlatPoint]) -> list[float]:
    """Return the relative error of the cost model at each point: (model - paper) / paper."""
    means = {dataset: Means.of(dataset) for dataset in {point.dataset for point in points}}
    return [error_at(machine, point, means[point.dataset]) for point in points]


def error_at(machine: Machine, point: FlatPoint, means: Means) -> float:
    """Return the relative error of the cost model at one point: (model - paper) / paper."""
    by_law = normalized_latency(machine, point.rate, means, point.prefix, point.cached)
    return by_law / point.seconds_per_token - 1


def calibrate(machine: Machine, points: Sequence[FlatPoint], memory_bytes_per_second: float) -> Machine:
    """Fit `t0`, `r` and `bandwidth2` to the points, with the least sum of absolute errors. Other fields stay unchanged.

    `memory_bytes_per_second` is the memory speed of the data sheet, an upper limit for `bandwidth2`.
    """
    means = {dataset: Means.of(dataset) for dataset in {point.dataset for point in points}}

    def error(machine: Machine) -> float:
        if machine.kv_bytes_per_second > memory_bytes_per_second:
            return np.inf
        return sum(abs(error_at(machine, point, means[point.dataset])) for point in points)

    return least(error, machine, ("seconds_per_step", "seconds_per_row", "kv_bytes_per_second"))


def least(error: Callable[[Machine], float], start: Machine, names: Sequence[str]) -> Machine:
    """Return the machine with the least error, changing only the fields in `names`.

    This is a pattern search (Hooke and Jeeves, 1961). Each round tries every combination of raising, lowering or
    keeping the fields, and takes the best one. If none is better, the stride is halved. The error has a kink at every
    point, so gradient methods would not help.
    """
    best, stride, reached = start, 0.5, error(start)
    while stride > 1e-3:
        tried = [
            replace(
                best, **{name: getattr(best, name) * math.exp(stride * up) for name, up in zip(names, ups, strict=True)}
            )
            for ups in product((-1, 0, 1), repeat=len(names))
        ]
        found, i = min((error(one), i) for i, one in enumerate(tried))
        if found < reached:
            best, reached = tried[i], found
        else:
            stride /= 2
    return best


# --- Calibration by measured kernels --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step's duration on an A100 with 80 GB: the sum of measured kernels of LLaMA-13B (40 layers and the head).

    The kernel times are from the profiles of microsoft/vidur (MIT) and ai-dynamo/aiconfigurator (Apache-2.0). The sums
    are in `data/a100_steps.csv`.
    """

    kind: str
    """The kind of step: decode, prefill or mixed."""
    decode_rows: int
    context_each: int
    prefill_tokens: int
    seconds: float

    def by(self, machine: Machine) -> float:
        """Return the step's duration by the machine's cost model, in seconds."""
        prompts = self.prefill_tokens > 0
        context = self.decode_rows * self.context_each + self.prefill_tokens
        return machine.step_seconds(self.decode_rows + prompts, self.decode_rows + self.prefill_tokens, context)


def measured_steps() -> list[MeasuredStep]:
    """Load all measured steps from `data/a100_steps.csv`."""
    lines = (files("minipaged.paper") / "data/a100_steps.csv").read_text().splitlines()
    return [
        MeasuredStep(
            line["kind"],
            int(line["decode_rows"]),
            int(line["context_each"]),
            int(line["prefill_tokens"]),
            float(line["ms"]) / 1000,
        )
        for line in csv.DictReader(lines)
    ]


def calibrate_by_kernels(machine: Machine, steps: Sequence[MeasuredStep]) -> Machine:
    """Fit the machine's speeds to measured steps, with the least sum of absolute errors.

    Kernel times exclude the host, so `t0` is 0.
    """

    def error(machine: Machine) -> float:
        return sum(abs(step.by(machine) / step.seconds - 1) for step in steps)

    names = ("seconds_per_row", "weight_bytes_per_second", "flops_per_second", "kv_bytes_per_second")
    return least(error, replace(machine, seconds_per_step=0.0), names)
