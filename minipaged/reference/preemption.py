"""Preemption: what each way of bringing a request back costs, and how its blocks are carried (paper, section 4.5).

When the pool is full, the scheduler takes all blocks of the latest request away. Two ways lead back:

    swap        copy its blocks to the host now, and to the device again later
    recompute   drop them, and later compute keys and values again; prompt and generated tokens are all known by
                then, so that this is one prefill, not the token-by-token decode that made them

Swapping pays for bytes, and for every single copy: each costs some time to start, whatever its size. With small
blocks there are many, and their starts outweigh the bytes. Recomputing does not care about blocks at all. Hence
Fig. 19: swapping is poor at small block sizes, recomputation flat, and from 16 to 64 they are comparable.

Here the figures are measured on which that depends (`Costs`). What follows from them is for the policy to reckon
(`engine/policy.py`), the same on every tier.
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
"""What `measure` copies, so that most of it comes from memory and not from a processor's cache."""
PROBE_TOKENS = 64
"""The prompt that `measure` runs."""


def carry(kv_cache: KVCache, moves: BlockMoves) -> None:
    """Do the moves in the order that the contract asks for: what leaves is saved before anything takes its place."""
    kv_cache.swap_out(moves.swap_out)
    kv_cache.poison(moves.poison)
    kv_cache.swap_in(moves.swap_in)
    kv_cache.copy(moves.copy)
    write_blocks(kv_cache, moves.load)


def measure(kv_cache: KVCache, forward: Callable[[Batch], object]) -> Costs:
    """Time this machine's copies and its prefill, in a fraction of a second. The live cache is left alone: `forward`
    runs a prompt in the first blocks of another one like it.

    Copies run between the blocks of two scratch caches: one with blocks of a few bytes, where starting is
    everything, and one with blocks of this cache's own size.
    """
    shape = (kv_cache.num_layers, kv_cache.block_size, kv_cache.num_kv_heads, kv_cache.head_dim)
    tiny = _seconds_per_block(kv_cache, (1, 1, 1, 1), 64)
    full = _seconds_per_block(kv_cache, shape, max(1, SCRATCH_BYTES // kv_cache.block_bytes))
    return Costs(
        seconds_per_copy=tiny,
        copies_per_block=1,  # a block is one piece of memory
        block_bytes=kv_cache.block_bytes,
        # A block of few bytes may seem to take less than a tiny one: no negative time.
        link_bytes_per_second=kv_cache.block_bytes / max(full - tiny, full / 2),
        prefill_tokens_per_second=_prefill_rate(kv_cache, forward),
    )


def _seconds_per_block(kv_cache: KVCache, shape: tuple[int, int, int, int], num_blocks: int) -> float:
    """The best of a few rounds of swapping all of a scratch cache out, per block."""
    layers, block_size, kv_heads, head_dim = shape
    kinds = (kv_cache.dtype, kv_cache.kv_cache_dtype)
    scratch = KVCache(layers, num_blocks, block_size, kv_heads, head_dim, num_blocks, *kinds)
    pairs = [(block, block) for block in range(num_blocks)]
    scratch.poison(range(num_blocks))
    scratch.swap_out(pairs)  # now all of its memory exists; page faults are no part of a copy
    return min(_seconds(lambda: scratch.swap_out(pairs)) for _ in range(3)) / num_blocks


def _prefill_rate(kv_cache: KVCache, forward: Callable[[Batch], object]) -> float:
    """Tokens a second of a short prompt."""
    num_tokens = min(PROBE_TOKENS, kv_cache.num_blocks * kv_cache.block_size)
    blocks = range(-(-num_tokens // kv_cache.block_size))
    prompt = BatchRow([0] * num_tokens, first_position=0, blocks=blocks, wants_logits=False)
    return num_tokens / _seconds(lambda: forward([prompt]))


def probe_cache(kv_cache: KVCache) -> KVCache:
    """A cache like the live one, with blocks for the prompt that `measure` runs."""
    num_blocks = min(kv_cache.num_blocks, -(-PROBE_TOKENS // kv_cache.block_size))
    sizes = (kv_cache.num_layers, num_blocks, kv_cache.block_size, kv_cache.num_kv_heads, kv_cache.head_dim)
    return KVCache(*sizes, dtype=kv_cache.dtype, kv_cache_dtype=kv_cache.kv_cache_dtype)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
