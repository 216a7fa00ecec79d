"""What runs in the worker beside a student's paged attention: its KV cache filled, its memory and its time measured.

Loaded before the student's file. Nothing here knows what attention gives; the cache is the project's own.
"""

from __future__ import annotations

import time
import tracemalloc
from types import ModuleType
from typing import Any

import numpy as np

Arguments = tuple[Any, ...]
"""Those of `paged_attention`."""


def fill(kv_cache: Any, blocks: Any) -> Any:
    """Let the cache hold these blocks: [num_blocks, layers, 2, block_size, kv_heads, head_dim]."""
    kv_cache.device_blocks[:] = blocks
    return kv_cache


def changed(kv_cache: Any, blocks: Any) -> bool:
    """Whether the cache holds anything else than these blocks."""
    return not np.array_equal(kv_cache.device_blocks, blocks, equal_nan=True)


def attend(module: ModuleType, name: str, *arguments: Any) -> tuple[Any, list[str]]:
    """What the function returns, and which of its arguments it changed."""
    names = ("query", "kv_cache", "layer", "block_tables", "query_start", "context_lens", "scale")
    before = [argument.copy() if isinstance(argument, np.ndarray) else None for argument in arguments]
    output = getattr(module, name)(*arguments)
    pairs = zip(names, before, arguments, strict=True)
    return output, [one for one, old, new in pairs if old is not None and not np.array_equal(old, new)]


def peak_bytes(module: ModuleType, name: str, *arguments: Any) -> int:
    """The most memory that the function has at one time, in bytes. NumPy tells tracemalloc of its arrays."""
    function = getattr(module, name)
    function(*arguments)  # once before: what is kept between calls is not counted
    tracemalloc.start()
    try:
        np.ones(2048)  # 16 kB, gone at once: a peak that is lower has been reset
        before = tracemalloc.get_traced_memory()[1]
        function(*arguments)
        peak = tracemalloc.get_traced_memory()[1]
        if peak < before:
            raise RuntimeError("the submission stopped tracemalloc, or reset what it had counted")
        return peak
    finally:
        tracemalloc.stop()


def seconds(module: ModuleType, name: str, *arguments: Any) -> float:
    """How long one call takes."""
    function = getattr(module, name)
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started
