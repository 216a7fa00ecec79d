"""The data that calibrated the simulated machines, and the fit of the cost model to it. Not a figure of the paper.

The model was fitted to two kinds of data (`paper/calibration.py`). Measured kernels give the speeds of reading weights
and of computing prompts; some of them are drawn here. The flat points of Figs. 12 and 16 give the other speeds. The
cost of swapping is fitted to Fig. 19a, and the cost of a request's further sequences to Fig. 14; see there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from minipaged.paper import published
from minipaged.paper.calibration import FlatPoint, Means, MeasuredStep, measured_steps, normalized_latency
from minipaged.paper.figure import Check, Figure, FigureResult, Job, Line, Plot
from minipaged.paper.machines import A100_80, A100_FLOPS, SETTINGS, kernels_anew, machine, points_of

TOLERANCE = 4.0
"""Tolerance of the model's median error, in percent. The model was fitted to this data, so this is no prediction."""
DECODE_ROWS = (1, 8, 32, 64, 128, 256)
"""The numbers of rows of the decode steps that are drawn."""
BESIDE_PROMPTS = ((0, 0), (8, 512), (32, 512), (128, 512))
"""The steps with a prompt that are drawn: (rows that decode, context of each)."""
NUM_RATES = 40
"""The number of points of a curve."""


@dataclass(frozen=True, slots=True)
class KernelCalibration:
    """A job that fits the cost model to the measured steps."""

    def run(self) -> KernelFit:
        """Fit it, with the search that found `machines.KERNELS`."""
        found = kernels_anew()
        return KernelFit(
            seconds=[step.by(found) for step in measured_steps()],
            weights=found.weight_bytes_per_second / A100_80,
            kv=found.kv_bytes_per_second / A100_80,
            arithmetic=found.flops_per_second / A100_FLOPS,
            seconds_per_row=found.seconds_per_row,
        )


@dataclass(frozen=True, slots=True)
class KernelFit:
    """The cost model fitted to measured steps."""

    seconds: Sequence[float]
    """The model's duration of each of `measured_steps()`."""
    weights: float
    """Speed of reading weights, as a share of the data sheet's memory speed."""
    kv: float
    """Speed of reading K and V, as a share of the data sheet's memory speed."""
    arithmetic: float
    """Speed of computing, as a share of the data sheet's arithmetic."""
    seconds_per_row: float


@dataclass(frozen=True, slots=True)
class FlatPoints:
    """A job that computes the latencies at one machine's flat points by the cost model."""

    model: str

    def run(self) -> FlatFit:
        """Compute them, with the speeds that all figures use."""
        made, points = machine(self.model), points_of(self.model)
        means = {point.dataset: Means.of(point.dataset) for point in points}

        def latency(point: FlatPoint, rate: float) -> float:
            return normalized_latency(made, rate, means[point.dataset], point.prefix, point.cached)

        curves: dict[str, list[published.Point]] = {}
        for label in dict.fromkeys(map(curve_of, points)):
            alike = [point for point in points if curve_of(point) == label]
            rates = sorted({point.rate for point in alike})
            between = np.geomspace(rates[0], rates[-1], NUM_RATES if len(rates) > 1 else 1).tolist()
            curves[label] = [(rate, latency(alike[0], rate)) for rate in between]
        return FlatFit([latency(point, point.rate) for point in points], curves)


def curve_of(point: FlatPoint) -> str:
    """Return the label of the model's curve that a flat point belongs to."""
    return f"Fig. {point.panel}{', prefix kept' if point.cached else ''}"


@dataclass(frozen=True, slots=True)
class FlatFit:
    """Latencies of one machine by the cost model."""

    latencies: Sequence[float]
    """Seconds per token at each of `points_of(model)`."""
    curves: Mapping[str, Sequence[published.Point]]
    """The model's curves between these points: one for each panel, and another for vLLM with a cached prefix."""


class Calibration(Figure):
    """Two plots of measured kernels, and a plot of each machine's flat points."""

    name = "calibration"
    title = "What the machines are calibrated by"
    section = "beyond"
    look = (
        "The law is the cost model of a step. It was fitted to these points, so being close to most of them proves "
        "little. Look at where it is not close. Prompts of 128 tokens take longer than reading the weights, and "
        "longer than computing: kernels do not overlap both as perfectly as a maximum assumes. For OPT-175B the law "
        "is too fast in Fig. 12f and right in Fig. 12c. No three speeds were found that fit both better."
    )
    change_it = (
        "Move attention into the maximum (`Machine.step_seconds` in simulated.py): which measured steps come out "
        "wrong?",
        "Set the cost of rows to 0 (`seconds_per_row` in `CALIBRATED`): which machine misses its flat points most?",
        "Calibrate with points nearer to the knee (`FLAT_RATE = 1` in paper/calibration.py, then `python -m "
        "minipaged.paper.machines`): which speed changes, and which system's queue causes it?",
    )

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        return [KernelCalibration(), *(FlatPoints(model) for model in SETTINGS)]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        kernels = results[KernelCalibration()]
        by_law = dict(zip(measured_steps(), kernels["seconds"], strict=True))
        plots, checks = of_kernels(by_law), [near(f"{len(by_law)} measured steps", misses(by_law.items()))]
        for kind in ("decode", "prefill", "mixed"):
            errors = misses((step, ours) for step, ours in by_law.items() if step.kind == kind)
            checks.append(
                Check(
                    f"median distance from those of them that are {kind}",
                    None,
                    median(errors),
                    None,
                    unit=" %",
                    kind="calibrated",
                )
            )
        for model in SETTINGS:
            points, found = points_of(model), results[FlatPoints(model)]
            plots.append(of_machine(model, points, found["curves"]))
            printed = [point.seconds_per_token for point in points]
            errors = [100 * abs(ours / paper - 1) for ours, paper in zip(found["latencies"], printed, strict=True)]
            checks.append(near(f"{len(points)} flat points of {model}", errors))
        worst = max(by_law, key=lambda step: abs(by_law[step] / step.seconds - 1))
        return FigureResult(
            plots,
            checks,
            notes=[
                "Measured steps are sums of measured kernels, published as profiles: LLaMA-13B on an A100 of 80 GB, 40 "
                "layers and the head. They exclude the host, so `t0` is 0. By the fit, weights are read at "
                f"{kernels['weights']:.1%} of the memory's speed, keys and values at {kernels['kv']:.1%}, prompts are "
                f"computed at {kernels['arithmetic']:.1%} of the arithmetic, and a row costs "
                f"{1e6 * kernels['seconds_per_row']:.0f} microseconds. The machines use the first and third number.",
                f"The largest error of the law is at {worst.decode_rows} rows of {worst.context_each} tokens, "
                f"{by_law[worst] / worst.seconds - 1:+.0%}. (256 rows of 64 tokens were measured as slower than 256 of "
                "128, which no law based on bytes gives.)",
                "The machines' other speeds are fitted to the flat points. Their rows therefore cost several times "
                "as much as by the kernels alone: these costs include the host at the time of the paper.",
            ],
        )


CALIBRATION = Calibration()


def near(what: str, errors: Sequence[float]) -> Check:
    """Return a check that the median of these errors is small. Errors are in percent."""
    return Check(
        f"median distance from {what}", 0.0, median(errors), TOLERANCE, relative=False, unit=" %", kind="calibrated"
    )


def misses(steps: Iterable[tuple[MeasuredStep, float]]) -> list[float]:
    """Return the model's absolute error at each step, in percent."""
    return [100 * abs(ours / step.seconds - 1) for step, ours in steps]


def of_kernels(by_law: Mapping[MeasuredStep, float]) -> list[Plot]:
    """Return plots of the decode steps by context length, and of the steps with a prompt by prompt length."""
    decoding, computing = list[Line](), list[Line]()
    for rows in DECODE_ROWS:
        steps = [step for step in by_law if step.kind == "decode" and step.decode_rows == rows]
        decoding += both(f"{rows} row{'s' * (rows > 1)}", by_law, {step: step.context_each for step in steps})
    for beside in BESIDE_PROMPTS:
        steps = [step for step in by_law if step.prefill_tokens and (step.decode_rows, step.context_each) == beside]
        label = "and {} rows of {}".format(*beside) if any(beside) else "a prompt alone"
        computing += both(label, by_law, {step: step.prefill_tokens for step in steps})
    return [
        Plot("measured steps that decode", "tokens in the context of each row", "ms", decoding, log_x=True),
        Plot("measured steps with a prompt", "tokens of the prompt", "ms", computing, log_x=True, log_y=True),
    ]


def both(label: str, by_law: Mapping[MeasuredStep, float], places: Mapping[MeasuredStep, int]) -> list[Line]:
    """Return two lines: the model's and the measured durations of these steps. `places` are their x coordinates."""
    return [
        Line(label, "ours", [(x, 1e3 * by_law[step]) for step, x in places.items()]),
        Line(label, "calibrated", [(x, 1e3 * step.seconds) for step, x in places.items()]),
    ]


def of_machine(model: str, points: Sequence[FlatPoint], curves: Mapping[str, Sequence[published.Point]]) -> Plot:
    """Return the plot of one machine: the model's curves and the flat points."""
    lines = [Line(label, "ours", curve) for label, curve in curves.items()]
    for label in dict.fromkeys(map(curve_of, points)):
        marks = [(point.rate, point.seconds_per_token) for point in points if curve_of(point) == label]
        lines.append(Line(label, "calibrated", marks))
    return Plot(model, "requests/s", "normalized latency (s/token)", lines, log_x=True)
