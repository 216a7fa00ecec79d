"""Compile numba's kernels for this machine's processor, in a process that then ends.

    python -m tests.compile_numba attention
    python -m tests.compile_numba others

numba keeps what it has compiled in files, but also 300 MB of memory, in a process that serves models on top of it. The
two halves take about as long, so two test processes on two cores have one each; neither then compiles what the other
does. What the tests need besides is compiled when they call it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock

from minipaged import LLM, SamplingParams
from minipaged.fast import cpu
from minipaged.fast.cpu import attention
from minipaged.fast.cpu.llama import kernels_are_compiled
from minipaged.tiers import choose_tier
from tests.tiny_model import make_tiny_model

ROOT = Path(__file__).parent.parent
DTYPES = sorted({"float32", choose_tier("fast", "cpu").dtype})
"""What models are served in here: not every processor has bfloat16."""


def compile_attention() -> None:
    one = torch.zeros(1, dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        query, keys, values = torch.zeros(1, 2, 8, dtype=dtype), *torch.zeros(2, 1, 1, 4, 8, dtype=dtype)
        cpu.paged_decode(query, keys, values, one[:, None], one, one + 1, 1.0)


def compile_others() -> None:
    """By serving a model without attention."""
    attention._decode = lambda *arguments: None
    with tempfile.TemporaryDirectory() as work:
        model = make_tiny_model(Path(work) / "tiny")
        for dtype in DTYPES:
            llm = LLM(model, tier="fast", device="cpu", dtype=dtype, num_blocks=8)
            for penalty in (1.0, 1.1):  # logits that are penalised are float64
                for temperature in (0.0, 1.0):
                    params = SamplingParams(temperature=temperature, repetition_penalty=penalty, max_tokens=2)
                    llm.generate([[3, 4, 5], [4]], params, progress=False)


PARTS: dict[str, Callable[[], None]] = {"attention": compile_attention, "others": compile_others}


def compile_in_turns(folder: Path, worker: int) -> None:
    """What a test process calls, with a folder that all of them have, before its first test."""
    if all(kernels_are_compiled(getattr(torch, dtype)) for dtype in DTYPES):
        return
    parts = list(PARTS)
    for i in range(len(parts)):
        part = parts[(worker + i) % len(parts)]
        with FileLock(folder / f"{part}.lock"):
            if not (folder / part).exists():
                command = [sys.executable, "-m", __name__, part]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                (folder / part).touch()


if __name__ == "__main__":
    PARTS[sys.argv[1]]()
