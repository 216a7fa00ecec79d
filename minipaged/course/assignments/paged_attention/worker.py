"""Runs in the worker with a student's paged attention: fills the KV cache, and measures memory and time.

The module is loaded before the student's file. It does not compute attention; the cache is the reference's.
"""

from __future__ import annotations

import time
import tracemalloc
from types import ModuleType
from typing import Any

import numpy as np

Arguments = tuple[Any, ...]
"""The arguments of `paged_attention`."""


def fill(kv_cache: Any, blocks: Any) -> Any:
    """Write these blocks into the cache: [num_blocks, layers, 2, block_size, kv_heads, head_dim]."""
    kv_cache.device_blocks[:] = blocks
    return kv_cache


def changed(kv_cache: Any, blocks: Any) -> bool:
    """Whether the cache's content differs from these blocks."""
    return not np.array_equal(kv_cache.device_blocks, blocks, equal_nan=True)


def attend(module: ModuleType, name: str, *arguments: Any) -> tuple[Any, list[str]]:
    """Return the function's output, and the names of the arguments that it changed."""
    names = ("query", "kv_cache", "layer", "block_tables", "query_start", "context_lens", "scale")
    before = [argument.copy() if isinstance(argument, np.ndarray) else None for argument in arguments]
    output = getattr(module, name)(*arguments)
    pairs = zip(names, before, arguments, strict=True)
    return output, [one for one, old, new in pairs if old is not None and not np.array_equal(old, new)]


def peak_bytes(module: ModuleType, name: str, *arguments: Any) -> int:
    """Return the function's peak memory in bytes, measured by tracemalloc, which counts NumPy's arrays."""
    function = getattr(module, name)
    function(*arguments)  # a first call, so that memory kept between calls is not counted
    tracemalloc.start()
    try:
        np.ones(2048)  # 16 kB, freed again: a lower peak later means that it was reset
        before = tracemalloc.get_traced_memory()[1]
        function(*arguments)
        peak = tracemalloc.get_traced_memory()[1]
        if peak < before:
            raise RuntimeError("the submission stopped tracemalloc, or reset its peak")
        return peak
    finally:
        tracemalloc.stop()


def seconds(module: ModuleType, name: str, *arguments: Any) -> float:
    """Return the seconds that one call takes."""
    function = getattr(module, name)
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started
