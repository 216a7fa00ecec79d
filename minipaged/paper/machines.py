"""The machines of the paper's evaluation (section 6.1, Table 1), as cost models of a step.

Sizes are the paper's. Three of the speeds are fitted to the paper's flat points, and two to measured kernels
(`calibration.py`). `python -m minipaged.paper.machines` fits them again, and a test compares the results. Assumed
numbers are marked as assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from minipaged.paper.calibration import (
    FlatPoint,
    calibrate,
    calibrate_by_kernels,
    flat_points,
    measured_steps,
)
from minipaged.paper.workloads import MAX_MODEL_LEN
from minipaged.simulation.simulated import Machine

Kind = Literal["paper", "data sheet", "measured", "calibrated", "assumed"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One column of Table 1: a model and the server that it ran on."""

    model: str
    num_gpus: int
    layers: int
    hidden_size: int
    weight_bytes: float
    kv_memory_bytes: int
    memory_bytes_per_second: float
    """Memory bandwidth of all GPUs together, from the data sheet."""
    flops_per_second: float
    """Arithmetic of all GPUs' 16-bit tensor cores together, from the data sheet."""
    panels: tuple[str, ...]
    """The panels of Fig. 12 (for LLaMA of Fig. 16) whose flat points calibrate the machine."""
    seconds: float
    """The duration of its traces."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's K and V in 16 bits. For OPT-13B these are the paper's 800 KB (section 3)."""
        return 2 * self.layers * self.hidden_size * 2


A100_40, A100_80 = 1.555e12, 2.039e12  # bytes a second, data sheet
A100_FLOPS = 312e12  # data sheet

SETTINGS = {
    setting.model: setting
    for setting in (
        Setting("OPT-13B", 1, 40, 5120, 26e9, 12 << 30, A100_40, A100_FLOPS, ("12a", "12d"), 3600),
        Setting("OPT-66B", 4, 64, 9216, 132e9, 21 << 30, 4 * A100_40, 4 * A100_FLOPS, ("12b", "12e"), 3600),
        Setting("OPT-175B", 8, 96, 12288, 346e9, 264 << 30, 8 * A100_80, 8 * A100_FLOPS, ("12c", "12f"), 900),
        Setting("LLaMA-13B", 1, 40, 5120, 26e9, 12 << 30, A100_40, A100_FLOPS, ("16a", "16b"), 3600),
    )
}

KERNELS = {"weights": 0.698, "arithmetic": 0.635}
"""Shares of the data sheet's memory speed and arithmetic that measured kernels of LLaMA-13B reach on an A100 of 80 GB.
"""
LINK_BYTES_PER_SECOND, SECONDS_PER_COPY = 12.6e9, 2.64e-6
"""Speed of the link to the host, and time to start a copy. Fitted to Fig. 19a, as the mean of both directions, on the
assumption that it moves 256 tokens. The paper does not state this number, but its times imply it."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The speeds of one machine that were fitted to the flat points of Fig. 12 (for LLaMA-13B of Fig. 16)."""

    seconds_per_step: float
    seconds_per_row: float
    kv: float
    """Speed of reading K and V, as a share of the data sheet's memory speed."""


CALIBRATED = {
    "OPT-13B": Calibrated(4.21e-3, 0.277e-3, 0.624),
    "OPT-66B": Calibrated(21.02e-3, 0.336e-3, 0.495),
    "OPT-175B": Calibrated(49.23e-3, 0.365e-3, 0.999),
    "LLaMA-13B": Calibrated(2.21e-3, 0.305e-3, 0.999),
}

FURTHER_SAMPLE, FURTHER_BEAM = 0.2, 0.7
"""The cost per row of the second and each further sample or beam of a request, relative to the first
(`Machine.seconds_per_row`, mostly work of the host). Fitted to the flat points of Fig. 14 in steps of 0.1. A test shows
that 0.1 more or less fits worse."""


@cache
def machine(model: str) -> Machine:
    """Return the machine that serves this model."""
    setting, found = SETTINGS[model], CALIBRATED[model]
    gpus = "an A100 of 40 GB" if setting.num_gpus == 1 else f"{setting.num_gpus} A100"
    return Machine(
        name=f"{model} on {gpus}",
        weight_bytes=setting.weight_bytes,
        kv_bytes_per_token=setting.kv_bytes_per_token,
        kv_memory_bytes=setting.kv_memory_bytes,
        max_model_len=MAX_MODEL_LEN,
        flops_per_token=setting.weight_bytes,  # two operations for each parameter, which has two bytes
        weight_bytes_per_second=KERNELS["weights"] * setting.memory_bytes_per_second,
        kv_bytes_per_second=found.kv * setting.memory_bytes_per_second,
        flops_per_second=KERNELS["arithmetic"] * setting.flops_per_second,
        link_bytes_per_second=setting.num_gpus * LINK_BYTES_PER_SECOND,
        seconds_per_copy=SECONDS_PER_COPY,
        copies_per_block=2 * setting.layers,
        seconds_per_step=found.seconds_per_step,
        seconds_per_row=found.seconds_per_row,
    )


def points_of(model: str) -> list[FlatPoint]:
    """Return the flat points that calibrate this model's machine."""
    return [point for panel in SETTINGS[model].panels for point in flat_points(panel)]


def calibrated_anew(model: str) -> Calibrated:
    """Calibrate this model's machine again. The search starts at round numbers, not at the values in CALIBRATED."""
    setting = SETTINGS[model]
    speed = setting.memory_bytes_per_second
    start = replace(
        machine(model),
        seconds_per_step=0.1 * setting.weight_bytes / speed,
        seconds_per_row=0.3e-3,
        kv_bytes_per_second=0.7 * speed,
    )
    found = calibrate(start, points_of(model), speed)
    return Calibrated(found.seconds_per_step, found.seconds_per_row, found.kv_bytes_per_second / speed)


def kernels_anew() -> Machine:
    """Fit the speeds to measured kernels again: LLaMA-13B on an A100 of 80 GB."""
    start = replace(
        machine("LLaMA-13B"),
        name="kernels of LLaMA-13B on an A100 of 80 GB",
        seconds_per_row=0.01e-3,
        kv_bytes_per_second=0.7 * A100_80,
        weight_bytes_per_second=0.8 * A100_80,
        flops_per_second=0.6 * A100_FLOPS,
    )
    return calibrate_by_kernels(start, measured_steps())


@dataclass(frozen=True, slots=True)
class Fact:
    """One number of a machine, and its source."""

    what: str
    value: str
    kind: Kind


def facts(model: str) -> list[Fact]:
    """Return all numbers that a simulated step of this model's machine depends on."""
    setting, found = SETTINGS[model], CALIBRATED[model]
    speed = setting.memory_bytes_per_second / 1e12
    sizes: Kind = "assumed" if model == "LLaMA-13B" else "paper"  # the paper has none for LLaMA: OPT-13B's
    further = [
        Fact("a request's further samples, of a row each", f"{FURTHER_SAMPLE:g}", "calibrated"),
        Fact("a request's further beams, of a row each", f"{FURTHER_BEAM:g}", "calibrated"),
    ]
    return [
        Fact("weights", f"{setting.weight_bytes / 1e9:.0f} GB, read once a step", sizes),
        Fact("memory for K and V", f"{setting.kv_memory_bytes >> 30} GiB", sizes),
        Fact("K and V of a token", f"{setting.kv_bytes_per_token >> 10} KiB", sizes),
        Fact("memory speed", f"{speed:.2f} TB/s", "data sheet"),
        Fact("arithmetic", f"{setting.flops_per_second / 1e12:.0f} TFLOPS", "data sheet"),
        Fact("of the memory speed, reached by reading weights", f"{KERNELS['weights']:.1%}", "measured"),
        Fact("of the arithmetic, reached by prompts", f"{KERNELS['arithmetic']:.1%}", "measured"),
        Fact("of the memory speed, reached by attention", f"{found.kv:.1%}", "calibrated"),
        Fact("a step beside", f"{1e3 * found.seconds_per_step:.2f} ms", "calibrated"),
        Fact("a row beside", f"{1e3 * found.seconds_per_row:.3f} ms", "calibrated"),
        *(further if model == "OPT-13B" else []),  # Fig. 14 has no other model
        Fact("link to the host", f"{setting.num_gpus * LINK_BYTES_PER_SECOND / 1e9:.1f} GB/s", "calibrated"),
        Fact("a copy over it", f"{1e6 * SECONDS_PER_COPY:.2f} us", "calibrated"),
        Fact("copies of a block", f"{2 * setting.layers}, a pool of keys and one of values a layer", "assumed"),
    ]


if __name__ == "__main__":
    kernels = kernels_anew()
    print(
        f"weights {kernels.weight_bytes_per_second / A100_80:.3f},",
        f"arithmetic {kernels.flops_per_second / A100_FLOPS:.3f}",
    )
    for name in SETTINGS:
        print(name, calibrated_anew(name))
