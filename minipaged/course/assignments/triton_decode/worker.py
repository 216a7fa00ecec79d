"""Runs in the worker with a student's decode kernel: makes tensors of the grader's arrays, and measures time.

The module is loaded before the student's file. It does not compute attention. With `TRITON_INTERPRET` set, the tensors
are on the CPU and Triton interprets the kernel. The worker that measures speed has it unset, and uses the GPU.
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
"""The number of calls before the clock starts (the first one compiles), and of the calls measured together."""


def call(paged_decode: Any, query: Any, cache: Any, block_tables: Any, context_lens: Any, scale: Any) -> Any:
    """Call the function. Return its output, and the names of the other tensors that it wrote to."""
    # Spare memory lies around the cache, beside and behind the tables, and on both sides of `out`, to detect reads and
    # writes out of bounds.
    blocks = np.full((len(cache) + 2, *cache.shape[1:]), np.nan, cache.dtype)
    blocks[1:-1] = cache
    tables = np.full((len(query) + 256, block_tables.shape[1] + 1), -1, np.int32)
    tables[: len(query), :-1] = block_tables
    room = np.full(query.size + 512, -4096, query.dtype)  # a place that keeps this value was not written
    given = {"query": query, "the cache": blocks, "block_tables": tables, "context_lens": context_lens, "out": room}
    q, c, t, n, r = (torch.tensor(array, device=DEVICE) for array in given.values())
    out = r[256:-256].view(q.shape)
    version = r._version  # torch counts its own writes, but not a kernel's
    paged_decode(q, c[1:-1, 0], c[1:-1, 1], t[: len(query), :-1], n, scale, out)
    by_torch = ["`out` with torch"] if r._version != version else []
    after = {name: tensor.cpu().numpy() for name, tensor in zip(given, (q, c, t, n, r), strict=True)}
    output = after["out"][256:-256].reshape(query.shape).copy()
    after["out"][256:-256] = -4096
    written = [name for name, array in given.items() if array.tobytes() != after[name].tobytes()]
    return output, [name.replace("out", "memory beside out") for name in written] + by_torch


class KernelError(Exception):
    """An error inside a kernel, without the interpreter's wrapping. Its traceback ends in the kernel's line."""


def decode(module: ModuleType, name: str, *arguments: Any) -> Any:
    """Call the student's function as in `call`. Errors inside its kernel become KernelError."""
    try:
        return call(getattr(module, name), *arguments)
    except InterpreterError as error:
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)
        inside = [one for one in causes if _passes_through(one, module)]  # the last was raised in the kernel's own line
        text = f"{type(causes[-1]).__name__}: {causes[-1]}"
        raise KernelError(text).with_traceback(inside[-1].__traceback__ if inside else None) from None


def _passes_through(error: BaseException, module: ModuleType) -> bool:
    return any(frame.f_code.co_filename == module.__file__ for frame, _ in walk_tb(error.__traceback__))


def has_kernel(module: ModuleType) -> bool:
    """Whether the file defines a Triton kernel itself. It may be wrapped (`@triton.heuristics`)."""
    for value in vars(module).values():
        while type(value).__module__.startswith("triton.runtime"):
            value = getattr(value, "fn", None)
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                return True
    return False


def fast_decode(
    query: Any, keys: Any, values: Any, block_tables: Any, context_lens: Any, scale: float, out: Any
) -> None:
    """Call the fast tier's kernel with the arguments of a student's. (Student code cannot import that kernel.)"""
    from minipaged.fast.gpu.attention import paged_decode
    from minipaged.fast.kernels import Paged

    rows = torch.arange(len(query), dtype=torch.int32, device=DEVICE)
    out.copy_(paged_decode(query, Paged(keys, values, block_tables, rows, context_lens), scale))


def seconds(
    module: ModuleType, name: str, seqs: int, context: int, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> float:
    """Return the seconds per call of many calls in a row, in float16."""
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
    """Wait for the GPU, which runs launched kernels while the host goes on."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
