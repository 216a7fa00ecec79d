"""Compile numba's kernels for this machine's processor, in a process that then ends.

    python -m tests.compile_numba 0
    python -m tests.compile_numba 1

numba saves what it compiles in files. But compiling also leaves the process 300 MB larger, and a test process needs
memory for models too. The two parts take about equally long, so each of two test processes compiles one. Other kernels
are compiled when a test first calls them.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import torch
from filelock import FileLock
from numba.core import event

from minipaged.fast.cpu import compiling
from minipaged.tiers import choose_tier
from tests.durations import Measuring

ROOT = Path(__file__).parent.parent
DTYPES = sorted({"float32", choose_tier("fast", "cpu").dtype})
"""The dtypes that models are served in on this machine: not every processor has bfloat16."""


Part = list[Iterator[None]]


def parts() -> list[Part]:
    """The two parts. Each is a list of iterators, and each of their steps compiles one kernel."""
    f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
    heads = (compiling.HEAD_DIM, 8)  # only the first can be multiplied in pairs

    def attention(dtype: torch.dtype) -> Part:
        return [part(dtype, d) for d in heads for part in (compiling.prompts, compiling.decoding)]

    layers = {dtype: [compiling.layers(dtype)] for dtype in map(partial(getattr, torch), DTYPES)}
    return [
        # The kernel that runs all layers links in the kernel for decoding's attention.
        [*attention(f32), *layers[f32], compiling.sampling(f32), compiling.sampling(f64)],
        [*attention(bf16), *layers.get(bf16, [])],
    ]


def compile_in_turns(folder: Path, worker: int) -> None:
    """Each test process calls this before its first test; `folder` is shared by all of them. Where kernels are missing,
    it compiles its own part, then compiles the other part or waits for the process that does."""
    # The last kernels of the two parts.
    last = [("layers", getattr(torch, dtype)) for dtype in DTYPES] + [("sampling", torch.float64)]
    if all(compiling.is_compiled(*each) for each in last):
        return
    for i in range(2):
        part = str((worker + i) % 2)
        with FileLock(folder / f"numba-{part}.lock"):
            if not (folder / f"numba-{part}").exists():
                command = [sys.executable, "-m", __name__, part]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                (folder / f"numba-{part}").touch()


class Compiling(event.Listener):  # type: ignore[misc]
    """Records what numba compiles in this process as a cost of its own: the first test to call a kernel does not pay
    for all others that call it (`durations.py`)."""

    def __init__(self, measuring: Measuring) -> None:
        self._measuring = measuring
        self._ends: list[Callable[[], None]] = []

    def on_start(self, event: Any) -> None:
        if current_thread() is main_thread():
            name = event.data["dispatcher"].py_func.__qualname__
            self._ends.append(self._measuring.shared(f"numba: {name}"))

    def on_end(self, event: Any) -> None:
        if current_thread() is main_thread():
            self._ends.pop()()


if __name__ == "__main__":
    gc.disable()  # nothing made here is freed before the end
    for kernels in parts()[int(sys.argv[1])]:
        for _ in kernels:
            pass
