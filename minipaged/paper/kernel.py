"""What a block table costs attention: decoding over blocks beside the same over contiguous memory, measured here.

Of each tier the paged kernel is the one that serves. Its peer knows neither blocks nor tables, and has keys and values
as one array: plain NumPy beside the reference tier, torch's `scaled_dot_product_attention` beside the fast one. Two
programs differ in more than the table, here as in the paper.
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
"""A quarter of OPT-13B's 40 heads: what one GPU of four would have."""
BLOCK_SIZE = 16


def tiers_here() -> list[str]:
    """reference; and fast on the CPU and on a GPU, where torch is and where a GPU is."""
    if missing_for_fast():
        return ["reference"]
    import torch

    return ["reference", "fast, CPU", *(["fast, GPU"] if torch.cuda.is_available() else [])]


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """One query of each of `batch` sequences, over `context` tokens of each."""

    tier: str
    """One of `tiers_here`."""
    batch: int
    context: int
    repetitions: int

    def run(self) -> Measured:
        """Measure both in turns. Raises ArithmeticError where they do not say the same."""
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
    """Seconds, the least of all repetitions: what other processes take is in none of the fastest."""

    paged: float
    contiguous: float


Pair = tuple[Callable[[], Any], Callable[[], Any]]
"""Attention over blocks, and the same over contiguous keys and values: each returns [batch, HEADS, HEAD_DIM]."""


def _inputs(batch: int, context: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """query [batch, HEADS, HEAD_DIM]; keys and values [2, batch, context, HEADS, HEAD_DIM], all float32; and a block
    table [batch, context / BLOCK_SIZE] of blocks in random order."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((batch, HEADS, HEAD_DIM), np.float32)
    kv = rng.standard_normal((2, batch, context, HEADS, HEAD_DIM), np.float32)
    tables = rng.permutation(batch * context // BLOCK_SIZE).reshape(batch, -1)
    return query, kv, tables


def _slots(tables: np.ndarray) -> np.ndarray:
    """Where each token of each sequence is: [batch x context]."""
    slots: np.ndarray = (tables[..., None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()
    return slots


def reference_pair(batch: int, context: int, device: str) -> Pair:
    """In NumPy."""
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
    """In torch: float32 on a CPU, float16 on a GPU, which is waited for."""
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
        sizes = {"num_decoding": batch, "max_query_len": 1}
        return finished(attend(query, cache, 0, tables, rows, starts, lens, scale, **sizes))

    def contiguous() -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(query[:, :, None], keys, values, scale=scale)
        return finished(out[:, :, 0])

    return paged, contiguous
