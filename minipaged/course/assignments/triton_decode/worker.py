"""What runs in the worker beside a student's decode kernel: tensors made of the grader's arrays, and a clock.

Loaded before the student's file. Nothing here knows what attention gives. Where `TRITON_INTERPRET` is set the tensors
are the CPU's and Triton interprets the kernel; the worker that measures speed has it unset, and all is on the GPU.
"""

from __future__ import annotations

import os
import time
from traceback import walk_tb
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from triton.runtime.errors import InterpreterError

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
WARM_UP, REPEATS = 3, 20
"""Calls before the clock is started (the first compiles), and calls that it measures together."""


def call(paged_decode: Any, query: Any, cache: Any, block_tables: Any, context_lens: Any, scale: Any) -> Any:
    """What the function writes to `out`, and what else it wrote to."""
    # Around the cache, beside and behind the tables, and on both sides of `out` lies memory that is nobody's: what goes
    # too far shows.
    blocks = np.full((len(cache) + 2, *cache.shape[1:]), np.nan, cache.dtype)
    blocks[1:-1] = cache
    tables = np.full((len(query) + 256, block_tables.shape[1] + 1), -1, np.int32)
    tables[: len(query), :-1] = block_tables
    room = np.full(query.size + 512, -4096, query.dtype)  # where that stays, nothing was written
    given = {"query": query, "the cache": blocks, "block_tables": tables, "context_lens": context_lens, "out": room}
    q, c, t, n, r = (torch.tensor(array, device=DEVICE) for array in given.values())
    out = r[256:-256].view(q.shape)
    version = r._version  # torch counts its own writes; a kernel's it does not see
    paged_decode(q, c[1:-1, 0], c[1:-1, 1], t[: len(query), :-1], n, scale, out)
    by_torch = ["`out` with torch"] if r._version != version else []
    after = {name: tensor.cpu().numpy() for name, tensor in zip(given, (q, c, t, n, r), strict=True)}
    output = after["out"][256:-256].reshape(query.shape).copy()
    after["out"][256:-256] = -4096
    written = [name for name, array in given.items() if array.tobytes() != after[name].tobytes()]
    return output, [name.replace("out", "memory beside out") for name in written] + by_torch


class KernelError(Exception):
    """An error inside a kernel, told without the interpreter's wrapping; its traceback ends in the kernel's line."""


def decode(module: ModuleType, name: str, *arguments: Any) -> Any:
    """`call` with the student's function."""
    try:
        return call(getattr(module, name), *arguments)
    except InterpreterError as error:
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)
        inside = [one for one in causes if _passes_through(one, module)]  # the last began in the kernel's own line
        text = f"{type(causes[-1]).__name__}: {causes[-1]}"
        raise KernelError(text).with_traceback(inside[-1].__traceback__ if inside else None) from None


def _passes_through(error: BaseException, module: ModuleType) -> bool:
    return any(frame.f_code.co_filename == module.__file__ for frame, _ in walk_tb(error.__traceback__))


def has_kernel(module: ModuleType) -> bool:
    """Whether the file has a Triton kernel of its own, wrapped perhaps (`@triton.heuristics`); not an imported one."""
    for value in vars(module).values():
        while type(value).__module__.startswith("triton.runtime"):
            value = getattr(value, "fn", None)
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                return True
    return False


def fast_decode(
    query: Any, keys: Any, values: Any, block_tables: Any, context_lens: Any, scale: float, out: Any
) -> None:
    """The fast tier's, with the student's arguments. (Where student code runs, it cannot be imported.)"""
    from minipaged.fast.gpu.attention import paged_decode
    from minipaged.fast.kernels import Paged

    rows = torch.arange(len(query), dtype=torch.int32, device=DEVICE)
    out.copy_(paged_decode(query, Paged(keys, values, block_tables, rows, context_lens), scale))


def seconds(
    module: ModuleType, name: str, seqs: int, context: int, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> float:
    """What one call takes, of many that are launched one after another, in float16."""
    num_blocks = -(-context // block_size)
    torch.manual_seed(0)
    query = torch.randn(seqs, heads, head_dim, device=DEVICE).half()
    cache = torch.empty(seqs * num_blocks, 2, kv_heads, block_size, head_dim, dtype=torch.float16, device=DEVICE)
    cache.normal_()
    tables = torch.randperm(seqs * num_blocks, device=DEVICE).int().view(seqs, num_blocks)
    lens = torch.full((seqs,), context, dtype=torch.int32, device=DEVICE)
    arguments = (query, cache[:, 0], cache[:, 1], tables, lens, head_dim**-0.5, torch.empty_like(query))
    function = getattr(module, name)
    for _ in range(WARM_UP):
        function(*arguments)
    _wait()
    started = time.perf_counter()
    for _ in range(REPEATS):
        function(*arguments)
    _wait()
    return (time.perf_counter() - started) / REPEATS


def _wait() -> None:
    """A GPU works through what was launched while the host goes on."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
