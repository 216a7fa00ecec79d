"""Measures the cost of block tables: decode attention over blocks against decode attention over contiguous memory.

The paged kernel of each tier is the one that serves requests. The contiguous one has keys and values in one array,
without blocks: plain NumPy for the reference tier, torch's `scaled_dot_product_attention` for the fast tier. The two
programs also differ in other ways than the block table, as they do in the paper.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minipaged.reference.attention import paged_attention
from minipaged.reference.kv_cache import KVCache
from minipaged.tiers import missing_for_fast

HEADS, HEAD_DIM = 10, 128
"""Attention heads and their size. 10 is a quarter of OPT-13B's 40 heads: the share of one GPU out of four."""
BLOCK_SIZE = 16


def tiers_here() -> list[str]:
    """Return the tiers that can run here: reference, and with torch fast on the CPU and on a GPU if there is one."""
    if missing_for_fast():
        return ["reference"]
    import torch

    return ["reference", "fast, CPU", *(["fast, GPU"] if torch.cuda.is_available() else [])]


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """A job that measures decode attention: one query for each of `batch` sequences, over `context` tokens each."""

    tier: str
    """The tier to measure, one of `tiers_here()`."""
    batch: int
    context: int
    repetitions: int

    def run(self) -> Measured:
        """Measure both kernels in turns. Raises ArithmeticError if their results differ."""
        make = reference_pair if self.tier == "reference" else fast_pair
        paged, contiguous = make(self.batch, self.context, "cuda" if "GPU" in self.tier else "cpu")
        if not np.allclose(np.asarray(paged()), np.asarray(contiguous()), rtol=2e-2, atol=2e-2):
            raise ArithmeticError(f"paged and contiguous attention differ on the {self.tier} tier")
        times: dict[str, list[float]] = {"paged": [], "contiguous": []}
        for _ in range(self.repetitions):
            for name, call in (("paged", paged), ("contiguous", contiguous)):
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
        return Measured(*(min(times[name]) for name in ("paged", "contiguous")))


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of the fastest repetition, which other processes disturbed least."""

    paged: float
    contiguous: float


Pair = tuple[Callable[[], Any], Callable[[], Any]]
"""Two functions: attention over blocks, and over contiguous keys and values. Each returns [batch, HEADS, HEAD_DIM]."""


def _inputs(batch: int, context: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return random float32 queries [batch, HEADS, HEAD_DIM], float32 keys and values [2, batch, context, HEADS,
    HEAD_DIM], and block tables [batch, context / BLOCK_SIZE] with blocks in random order."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((batch, HEADS, HEAD_DIM), np.float32)
    kv = rng.standard_normal((2, batch, context, HEADS, HEAD_DIM), np.float32)
    tables = rng.permutation(batch * context // BLOCK_SIZE).reshape(batch, -1)
    return query, kv, tables


def _slots(tables: np.ndarray) -> np.ndarray:
    """Return the slot of each token of each sequence, [batch x context]."""
    slots: np.ndarray = (tables[..., None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()
    return slots


def reference_pair(batch: int, context: int, device: str) -> Pair:
    """Return paged and contiguous attention of the reference tier, in NumPy."""
    query, kv, tables = _inputs(batch, context)
    cache = KVCache(1, tables.size, BLOCK_SIZE, HEADS, HEAD_DIM)
    cache.write(0, _slots(tables), *kv.reshape(2, -1, HEADS, HEAD_DIM))
    starts, lens = np.arange(batch + 1), np.full(batch, context)
    keys, values = (np.ascontiguousarray(one.transpose(0, 2, 1, 3)) for one in kv)  # [batch, HEADS, context, HEAD_DIM]

    def contiguous() -> np.ndarray:
        scores = (keys @ query[..., None])[..., 0] * HEAD_DIM**-0.5  # [batch, HEADS, context]
        p = np.exp(scores - scores.max(-1, keepdims=True))  # [batch, HEADS, context]
        out: np.ndarray = (p[:, :, None] @ values)[:, :, 0] / p.sum(-1, keepdims=True)  # [batch, HEADS, HEAD_DIM]
        return out

    return lambda: paged_attention(query, cache, 0, tables, starts, lens, HEAD_DIM**-0.5), contiguous


def fast_pair(batch: int, context: int, device: str) -> Pair:
    """Return paged and contiguous attention of the fast tier, in torch: float32 on a CPU, float16 on a GPU. Each call
    waits until the GPU has finished."""
    import torch

    from minipaged.fast.attention import attend
    from minipaged.fast.kv_cache import KVCache as FastKVCache

    dtype = torch.float16 if device == "cuda" else torch.float32
    given = _inputs(batch, context)
    query, kv = (torch.from_numpy(array).to(device, dtype) for array in given[:2])
    tables = torch.from_numpy(given[2]).to(device, torch.int32)
    cache = FastKVCache(1, tables.numel(), BLOCK_SIZE, HEADS, HEAD_DIM, dtype=dtype, device=device)
    cache.write(0, torch.from_numpy(_slots(given[2])).to(device), *kv.reshape(2, -1, HEADS, HEAD_DIM))
    rows, lens = (
        torch.from_numpy(array).to(device, torch.int32) for array in (np.arange(batch), np.full(batch, context))
    )
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    keys, values = (one.transpose(1, 2).contiguous() for one in kv)  # [batch, HEADS, context, HEAD_DIM]
    scale = HEAD_DIM**-0.5

    def finished(out: torch.Tensor) -> Any:
        return out.float().cpu().numpy()  # waits for a GPU

    def paged() -> Any:
        return finished(attend(query, cache, 0, tables, rows, starts, lens, scale, num_decoding=batch, max_query_len=1))

    def contiguous() -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(query[:, :, None], keys, values, scale=scale)
        return finished(out[:, :, 0])

    return paged, contiguous
