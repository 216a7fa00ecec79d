"""What Figs. 18b and 19b share: one trace served with blocks of 1 to 256 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log2

from minipaged.paper.serving import ServingSetup
from minipaged.scheduling import Way

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MODEL = "OPT-13B"
RATES = {"ShareGPT": 1.65, "Alpaca": 34.0}
"""Requests a second. The paper does not give them: with these, blocks of 16 come to about its heights."""
SECONDS, QUICK_SECONDS = {"ShareGPT": 900.0, "Alpaca": 150.0}, {"ShareGPT": 150.0, "Alpaca": 40.0}
"""Of traces. Where a curve is above its knee it rises with the length of the trace, which the paper does not give."""
LONG = 2.0
"""Times the latency with blocks of 16 that is too long."""
NOT_SIMULATED = (
    "A simulated step reads K and V at one speed whatever the blocks are. On the paper's GPU small blocks are slow to "
    "read (its kernel goes block by block): that is what its curves show below 16, and ours cannot."
)


def trace(dataset: str, block_size: int, *, quick: bool, seed: int, preemption: Way | None = None) -> ServingSetup:
    """The same requests for each block size."""
    seconds = (QUICK_SECONDS if quick else SECONDS)[dataset]
    return ServingSetup(
        "vLLM", MODEL, dataset, RATES[dataset], seconds, seed, block_size=block_size, preemption=preemption
    )


def best(latencies: Sequence[float]) -> float:
    """log2 of the block size with the least of these."""
    return log2(BLOCK_SIZES[min(range(len(BLOCK_SIZES)), key=lambda i: latencies[i])])


def good(latencies: Sequence[float]) -> tuple[float, float]:
    """log2 of the smallest and of the largest block size around 16 with which latency is not LONG."""
    at = BLOCK_SIZES.index(16)
    first = last = at
    while first > 0 and latencies[first - 1] <= LONG * latencies[at]:
        first -= 1
    while last + 1 < len(BLOCK_SIZES) and latencies[last + 1] <= LONG * latencies[at]:
        last += 1
    return log2(BLOCK_SIZES[first]), log2(BLOCK_SIZES[last])


def crossover(above: Sequence[float], below: Sequence[float]) -> float | None:
    """log2 of the block size at which the first comes to be less than the second, by straight lines between sizes; None
    where it never comes to be."""
    apart = [a - b for a, b in zip(above, below, strict=True)]
    for size, (before, after) in zip(BLOCK_SIZES, pairwise(apart), strict=False):
        if before > 0 >= after:
            return log2(size) + before / (before - after)
    return None
