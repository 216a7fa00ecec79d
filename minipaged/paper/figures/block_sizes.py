"""The shared parts of Figs. 18b and 19b: one trace served with blocks of 1 to 256 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log2

from minipaged.paper.serving import ServingSetup
from minipaged.scheduling import Way

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MODEL = "OPT-13B"
RATES = {"ShareGPT": 1.65, "Alpaca": 34.0}
"""Requests per second. The paper does not give its rates. At these, blocks of 16 have about the paper's latencies."""
SECONDS, QUICK_SECONDS = {"ShareGPT": 900.0, "Alpaca": 150.0}, {"ShareGPT": 150.0, "Alpaca": 40.0}
"""Durations of the traces. Above the knee, latency grows with the duration. The paper does not give its durations."""
LONG = 2.0
"""A block size is bad if its latency exceeds this multiple of the latency with blocks of 16."""
NOT_SIMULATED = (
    "A simulated step reads K and V at the same speed for all block sizes. On the paper's GPU small blocks are slow "
    "to read, because its kernel reads block by block. This is why its curves rise below 16, which ours cannot show."
)


def trace(dataset: str, block_size: int, *, quick: bool, seed: int, preemption: Way | None = None) -> ServingSetup:
    """Return the job for one block size. All block sizes get the same requests."""
    seconds = (QUICK_SECONDS if quick else SECONDS)[dataset]
    return ServingSetup(
        "vLLM", MODEL, dataset, RATES[dataset], seconds, seed, block_size=block_size, preemption=preemption
    )


def best(latencies: Sequence[float]) -> float:
    """Return log2 of the block size with the lowest latency."""
    return log2(BLOCK_SIZES[min(range(len(BLOCK_SIZES)), key=lambda i: latencies[i])])


def good(latencies: Sequence[float]) -> tuple[float, float]:
    """Return log2 of the smallest and the largest block size of the range around 16 in which no latency is too LONG."""
    at = BLOCK_SIZES.index(16)
    first = last = at
    while first > 0 and latencies[first - 1] <= LONG * latencies[at]:
        first -= 1
    while last + 1 < len(BLOCK_SIZES) and latencies[last + 1] <= LONG * latencies[at]:
        last += 1
    return log2(BLOCK_SIZES[first]), log2(BLOCK_SIZES[last])


def crossover(above: Sequence[float], below: Sequence[float]) -> float | None:
    """Return log2 of the block size at which the line `above` falls below the line `below`, or None if it never does.
    Points are joined linearly."""
    apart = [a - b for a, b in zip(above, below, strict=True)]
    for size, (before, after) in zip(BLOCK_SIZES, pairwise(apart), strict=False):
        if before > 0 >= after:
            return log2(size) + before / (before - after)
    return None
