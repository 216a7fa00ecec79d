"""What a step costs, found from what the paper measured while nothing waited (Fig. 12's curves where they are flat).

The law of a step (`simulated.Machine`):

    seconds = t0 + r * rows + max(weights / bandwidth, operations / peak) + K/V bytes / bandwidth2

Three of its five speeds are found so: `t0`, `r` and `bandwidth2`. The speed at which weights are read and the peak no
point of Fig. 12 tells apart from `t0`: for these there are measured kernels (`calibrate_by_kernels`), of an A100 too.

Where no request waits, a curve's height follows from the step alone. By Little's law, `rate * latency` requests run, so
a step has that many rows; the rate says how many prompts come in meanwhile; and the latency is the outputs' length in
steps. `normalized_latency` solves this; `calibrate` looks for the machine with the smallest absolute errors at the
points that `flat_points` lets through. Those on either side of a knee are never among them.
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
"""Of the rate at which a curve leaves its panel: below it, it is flat,"""
FLAT_HEIGHT = 1.05
"""and no higher than so many times the lowest of all curves at or above its rate: what is higher has begun to queue."""
NUM_LENGTHS = 4_000
"""Requests by which means over lengths are taken."""


@dataclass(frozen=True, slots=True)
class FlatPoint:
    """A point of Fig. 12 at which nothing waits."""

    panel: str
    dataset: str
    system: str
    rate: float
    """Requests a second."""
    seconds_per_token: float
    prefix: int = 0
    """Tokens before each prompt, and `cached`, those of them whose keys and values are there."""
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Means:
    """What of a dataset's lengths the mean latency depends on."""

    prompts: np.ndarray
    """[requests] tokens."""
    outputs: np.ndarray
    """[requests] tokens."""

    @classmethod
    def of(cls, dataset: str) -> Means:
        lengths = np.array(draw_lengths(dataset, NUM_LENGTHS, np.random.default_rng(0)))  # [requests, 2]
        return cls(lengths[:, 0], lengths[:, 1])


def prompt_seconds(machine: Machine, num_tokens: np.ndarray) -> np.ndarray:
    """By how much so many query tokens make a step longer than reading the weights takes. [lengths]"""
    read = machine.weight_bytes / machine.weight_bytes_per_second
    return np.maximum(0, num_tokens * machine.flops_per_token / machine.flops_per_second - read)


def normalized_latency(machine: Machine, rate: float, lengths: Means, prefix: int = 0, cached: int = 0) -> float:
    """Mean of latency / output tokens at `rate` requests a second, seconds a token, if nothing waits but for a step to
    end; infinite where the machine cannot keep up. Each prompt has `prefix` tokens more, of which `cached` need not be
    computed."""
    prompts, outputs = lengths.prompts + prefix, lengths.outputs  # [requests]
    step = machine.seconds_per_step + machine.weight_bytes / machine.weight_bytes_per_second
    context = float(np.mean(outputs * (prompts + outputs / 2)))  # tokens held, summed over a request's steps
    fixed = step
    for _ in range(200):
        rows = rate * step * float(outputs.mean())
        excess = prompt_seconds(machine, prompts - cached + rows)  # [requests], of the step that a prompt joins
        longer = rate * step * float(excess.mean())
        reading = rate * step * context * machine.kv_bytes_per_token / machine.kv_bytes_per_second
        new = fixed + machine.seconds_per_row * rows + reading + longer
        if not new < 10:
            return np.inf
        if abs(new - step) < 1e-7:
            break
        step = new
    # Before its first step it waits for half of one, on average, and that step has its prompt to compute.
    own = step / 2 + prompt_seconds(machine, prompts - cached + rows)  # [requests]
    return float(step + np.mean(own / outputs))


# --- The points -----------------------------------------------------------------------------------


def flat_points(panel: str) -> list[FlatPoint]:
    """Those of a panel by which its machine is calibrated, low in rate and in height. Of Fig. 14 vLLM's alone, which
    say what a further sequence of a request costs. None, if the panel is of none of Figs. 12, 14 and 16.

    FasterTransformer's never are: it batches by other rules, of which little is known.
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
    """Of each point, (by the law - in the paper) / in the paper."""
    means = {dataset: Means.of(dataset) for dataset in {point.dataset for point in points}}
    return [error_at(machine, point, means[point.dataset]) for point in points]


def error_at(machine: Machine, point: FlatPoint, means: Means) -> float:
    """(By the law - in the paper) / in the paper."""
    by_law = normalized_latency(machine, point.rate, means, point.prefix, point.cached)
    return by_law / point.seconds_per_token - 1


def calibrate(machine: Machine, points: Sequence[FlatPoint], memory_bytes_per_second: float) -> Machine:
    """The machine with the least sum of absolute errors at the points; what it has of sizes and measurements stays.

    `memory_bytes_per_second`: of the data sheet; nothing is read faster.
    """
    means = {dataset: Means.of(dataset) for dataset in {point.dataset for point in points}}

    def error(machine: Machine) -> float:
        if machine.kv_bytes_per_second > memory_bytes_per_second:
            return np.inf
        return sum(abs(error_at(machine, point, means[point.dataset])) for point in points)

    return least(error, machine, ("seconds_per_step", "seconds_per_row", "kv_bytes_per_second"))


def least(error: Callable[[Machine], float], start: Machine, names: Sequence[str]) -> Machine:
    """The machine with the least error, found by changing these speeds and no others.

    By pattern search (Hooke and Jeeves, 1961): the speeds up, down or left alone, in every combination, as long as one
    of them is better, then by half as much. The error has a kink at every point, so nothing finer would help.
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


# --- The other calibration: kernels ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step's time on an A100 of 80 GB, the sum of measured kernels of LLaMA-13B (40 layers and the head).

    From the profiles of microsoft/vidur (MIT) and ai-dynamo/aiconfigurator (Apache-2.0), `data/a100_steps.csv`.
    """

    kind: str
    """decode, prefill or mixed."""
    decode_rows: int
    context_each: int
    prefill_tokens: int
    seconds: float

    def by(self, machine: Machine) -> float:
        """What the step takes by the law, in seconds."""
        prompts = self.prefill_tokens > 0
        context = self.decode_rows * self.context_each + self.prefill_tokens
        return machine.step_seconds(self.decode_rows + prompts, self.decode_rows + self.prefill_tokens, context)


def measured_steps() -> list[MeasuredStep]:
    """All of them."""
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
    """The machine with the least sum of absolute errors at measured steps.

    Kernels have no host beside them: `t0` is 0.
    """

    def error(machine: Machine) -> float:
        return sum(abs(step.by(machine) / step.seconds - 1) for step in steps)

    names = ("seconds_per_row", "weight_bytes_per_second", "flops_per_second", "kv_bytes_per_second")
    return least(error, replace(machine, seconds_per_step=0.0), names)
