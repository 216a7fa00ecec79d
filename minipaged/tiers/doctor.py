"""The report of `minipaged doctor`: this machine's devices and packages, the tier that would be chosen, and why."""

from __future__ import annotations

import io
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path

from minipaged.errors import InvalidRequest
from minipaged.tiers import choose, devices


def report() -> Iterator[tuple[str, str]]:
    """Yield the lines of the report, each as a name and a text."""
    yield from devices.versions().items()
    yield "CPU", f"{_processor()}, {_cores()}"
    missing = choose.missing_for_fast()
    if not missing and (problem := devices.threads_problem()):
        yield "threads", problem
    if not missing:
        yield "products", devices.products(choose.choose_tier("fast", "cpu").dtype)
    if "torch" in missing:
        yield "GPU", "there is a driver for one, and no torch" if devices.has_nvidia_gpu() else devices.NO_DRIVER
    else:
        yield from _gpus()
    for tier in ("reference", "fast"):
        try:
            yield f"tier {tier}", _described(tier)
        except InvalidRequest as error:
            yield f"tier {tier}", f"no: {error}"
    yield "chosen", f"{_described('auto')} (tier, device and dtype 'auto')"


def _described(tier: str) -> str:
    with redirect_stderr(io.StringIO()):  # another line of the report says why a GPU is not used
        return choose.choose_tier(tier).description


def _processor() -> str:
    """The processor's name, or only its architecture if the system does not give a name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _cores() -> str:
    usable, there = devices.usable_cores(), os.cpu_count()
    return f"{there} cores" if usable == there else f"{usable} of {there} cores may be used"


def _gpus() -> Iterator[tuple[str, str]]:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the problems that are reported below
        count = torch.cuda.device_count()
    for number in range(count):
        found = torch.cuda.get_device_properties(number)
        yield (
            f"GPU {number}",
            f"{found.name}, compute capability {found.major}.{found.minor}, {found.total_memory:,} bytes",
        )
    problem = devices.gpu_problem()
    used = "used" if count < 2 else "GPU 0 is used, no other"
    yield "GPU", f"not used: {problem}" if problem else f"{used}, with Triton kernels; CUDA {torch.version.cuda}"
    for name, what in (("Triton", devices.triton_problem()), ("C compiler", devices.compiler_problem())):
        yield name, what or "as the kernels for GPUs need it"
