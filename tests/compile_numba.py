"""Compile numba's kernels for this machine's processor, in a process that then ends.

    python -m tests.compile_numba 0
    python -m tests.compile_numba 1

numba keeps what it has compiled in files, but also 300 MB of memory, in a process that serves models on top of it. The
two parts take about as long, so two test processes on two cores have one each; neither then compiles what the other
does. What the tests need besides is compiled when they call it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock

from minipaged.fast import cpu
from minipaged.fast.cpu.llama import kernels_are_compiled
from minipaged.tiers import choose_tier

ROOT = Path(__file__).parent.parent
DTYPES = sorted({"float32", choose_tier("fast", "cpu").dtype})
"""What models are served in here: not every processor has bfloat16."""


def compile_attention(dtype: torch.dtype) -> None:
    one = torch.zeros(1, dtype=torch.int32)
    query, (keys, values) = torch.zeros(1, 2, 8, dtype=dtype), torch.zeros(2, 1, 1, 4, 8, dtype=dtype)
    cpu.paged_decode(query, keys, values, one[:, None], one, one + 1, 1.0)
    ends, two = torch.tensor([0, 2], dtype=torch.int32), query.repeat(2, 1, 1)
    cpu.paged_prefill(two, keys, values, one[:, None], one, ends, one + 2, 1.0, max_query_len=2)


def compile_sampling(dtype: torch.dtype) -> None:
    """`dtype`: of logits, which are float64 where they are penalised."""
    whole, real = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    logits = torch.zeros(1, 4, dtype=dtype)
    cpu.argmax_logsumexp(logits)
    cpu.draw(logits, whole, real, real + 1, real, whole, real, whole, real, depth=0)
    cpu.uniform(*np.zeros((3, 1), np.uint64))


def compile_others(dtype: torch.dtype) -> None:
    one, angles = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 4)
    x, weight, qkv = (torch.zeros(1, size, dtype=dtype) for size in (8, 8, 32))
    keys, values = torch.zeros(2, 1, 1, 4, 8, dtype=dtype)
    for linear in cpu.linears([(8, 8)], [torch.zeros(8, 8, dtype=dtype)], [None], x):
        linear(x)
    cpu.rms_norm(x, weight[0], 1e-5)
    cpu.add_rms_norm(x, x.clone(), weight[0], 1e-5)
    cpu.swiglu(x)
    cpu.rope_and_write(qkv, angles, angles, one, one, keys, values, 2)


Part = list[tuple[Callable[[torch.dtype], None], torch.dtype]]
PARTS: list[Part] = [
    [
        (compile_attention, torch.float32),
        *((compile_others, getattr(torch, dtype)) for dtype in DTYPES),
    ],
    [
        (compile_attention, torch.bfloat16),
        (compile_sampling, torch.float32),
        (compile_sampling, torch.float64),
    ],
]


def compile_in_turns(folder: Path, worker: int) -> None:
    """What a test process calls, with a folder that all of them have, before its first test."""
    if all(kernels_are_compiled(getattr(torch, dtype)) for dtype in DTYPES):
        return
    for i in range(len(PARTS)):
        part = str((worker + i) % len(PARTS))
        with FileLock(folder / f"numba-{part}.lock"):
            if not (folder / f"numba-{part}").exists():
                command = [sys.executable, "-m", __name__, part]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                (folder / f"numba-{part}").touch()


if __name__ == "__main__":
    for compile_kernels, of_type in PARTS[int(sys.argv[1])]:
        compile_kernels(of_type)
