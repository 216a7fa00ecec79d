"""Preemption: what it costs to bring a request back, and how its blocks are moved (paper, section 4.5).

When the pool is full, the scheduler takes all blocks of the latest request away. It can come back in two ways:

    swap        copy its blocks to the host now, and back to the device later
    recompute   drop them, and compute keys and values again later; prompt and generated tokens are all known by
                then, so this is one prefill instead of the token-by-token decode that made them

The cost of swapping depends on the bytes and on the number of copies: each copy takes some time to start, whatever its
size. Small blocks need many copies, and starting them takes longer than moving the bytes. The cost of recomputing does
not depend on blocks at all. Hence Fig. 19: swapping is slow at small block sizes, recomputation is flat, and from 16 to
64 they are comparable.

This file measures the quantities that decide this (`Costs`). The policy computes both costs from them
(`engine/policy.py`), in the same way on every tier.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from minipaged.contracts import Batch, BatchRow
from minipaged.reference.handover import write_blocks
from minipaged.reference.kv_cache import KVCache
from minipaged.scheduling import Costs
from minipaged.steps import BlockMoves

SCRATCH_BYTES = 32 << 20
"""Bytes that `measure` copies: enough that most of them come from memory and not from a processor's cache."""
PROBE_TOKENS = 64
"""The length of the prompt that `measure` runs, in tokens."""


def carry(kv_cache: KVCache, moves: BlockMoves) -> None:
    """Carry out the moves in the order of the contract: a block's content is saved before anything overwrites it."""
    kv_cache.swap_out(moves.swap_out)
    kv_cache.poison(moves.poison)
    kv_cache.swap_in(moves.swap_in)
    kv_cache.copy(moves.copy)
    write_blocks(kv_cache, moves.load)


def measure(kv_cache: KVCache, forward: Callable[[Batch], object], num_groups: int = 1) -> Costs:
    """Measure this machine's copies and its prefill, in a fraction of a second.

    The live cache is left alone: `forward` runs a prompt in the first blocks of another cache like it. Copies run
    within two scratch caches: one with blocks of a few bytes, where only the start of a copy counts, and one with
    blocks of this cache's own size.
    """
    shape = (kv_cache.layers_per_block, kv_cache.block_size, kv_cache.num_kv_heads, kv_cache.head_dim)
    tiny = _seconds_per_block(kv_cache, (1, 1, 1, 1), 64)
    full = _seconds_per_block(kv_cache, shape, max(1, SCRATCH_BYTES // kv_cache.block_bytes))
    return Costs(
        seconds_per_copy=tiny,
        copies_per_block=1,  # a block is one piece of memory
        block_bytes=kv_cache.block_bytes,
        # A small block may appear to take less time than a tiny one; the time left for its bytes must stay positive.
        link_bytes_per_second=kv_cache.block_bytes / max(full - tiny, full / 2),
        prefill_tokens_per_second=_prefill_rate(kv_cache, forward, num_groups),
    )


def _seconds_per_block(kv_cache: KVCache, shape: tuple[int, int, int, int], num_blocks: int) -> float:
    """Swap a whole scratch cache out a few times; return the best time per block."""
    layers, block_size, kv_heads, head_dim = shape
    kinds = (kv_cache.dtype, kv_cache.kv_cache_dtype)
    scratch = KVCache(layers, num_blocks, block_size, kv_heads, head_dim, num_blocks, *kinds)
    pairs = [(block, block) for block in range(num_blocks)]
    scratch.poison(range(num_blocks))
    scratch.swap_out(pairs)  # allocates all of the memory, so that the copies below have no page faults
    return min(_seconds(lambda: scratch.swap_out(pairs)) for _ in range(3)) / num_blocks


def _prefill_rate(kv_cache: KVCache, forward: Callable[[Batch], object], num_groups: int) -> float:
    """Return the prefill speed for a short prompt, in tokens per second."""
    num_tokens = min(PROBE_TOKENS, kv_cache.num_blocks * kv_cache.block_size)
    blocks = [i // num_groups for i in range(-(-num_tokens // kv_cache.block_size) * num_groups)]  # groups share them
    prompt = BatchRow([0] * num_tokens, first_position=0, blocks=blocks, wants_logits=False)
    return num_tokens / _seconds(lambda: forward([prompt]))


def probe_cache(kv_cache: KVCache) -> KVCache:
    """Return a cache like the live one, with just enough blocks for the prompt that `measure` runs."""
    num_blocks = min(kv_cache.num_blocks, -(-PROBE_TOKENS // kv_cache.block_size))
    sizes = (kv_cache.num_layers, num_blocks, kv_cache.block_size, kv_cache.num_kv_heads, kv_cache.head_dim)
    return KVCache(*sizes, dtype=kv_cache.dtype, kv_cache_dtype=kv_cache.kv_cache_dtype, places=kv_cache.places)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
