"""The measurements of a run: KV memory with paging and with a contiguous cache, effects of sharing and preemption.

Memory is broken down as in the paper's Fig. 2, in bytes, as the mean over all steps of a run. Both sides have the same
pool of memory and the same sequences in the same steps:

- *paging* takes a block when a token needs it, and shares blocks;
- *contiguous* reserves `max_model_len` slots for every sequence when it starts, as earlier systems did.

`engine.stats` counts the slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from minipaged.engine.stats import MemoryUse, Stats


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """Bytes of KV memory by use, as the mean over the steps."""

    tokens: float
    """Bytes of slots that hold a token's K and V."""
    reserved: float
    """Bytes of slots held for tokens that were computed later."""
    internal_fragmentation: float
    """Bytes of slots held for tokens that were never computed."""
    free: float
    """Bytes of the pool that are free. A negative number says by how much the pool is too small."""
    share_of_tokens: float
    """The share of the memory taken that holds tokens: 0 to 1."""


@dataclass(frozen=True, slots=True)
class Measures:
    """The measurements of one run of the engine, from an empty pool to the last token."""

    run: str
    block_size: int
    num_blocks: int
    max_model_len: int
    pool_bytes: int
    steps: int
    seconds: float
    generated_tokens: int
    most_sequences: int
    """Sequences in the largest batch."""
    contiguous_sequences: int
    """The number of sequences with `max_model_len` slots that would fit in the pool."""
    paged: MemoryBytes
    contiguous: MemoryBytes
    peak_blocks_used: int
    blocks_saved: float
    """The number of block-table entries minus the number of blocks that they name, as the mean over the steps."""
    share_saved: float
    """Blocks saved by sharing / blocks without sharing (paper, Fig. 15): 0 to 1."""
    blocks_copied: int
    """The number of copies on write."""
    blocks_swapped_out: int
    blocks_swapped_in: int
    preempted_by_swap: int
    preempted_by_recompute: int
    tokens_recomputed: int
    prefix_cache_hit_tokens: int
    prefix_cache_evictions: int


def measure(
    run: str, stats: Stats, slot_bytes: int, most_sequences: int, seconds: float, num_groups: int = 1
) -> Measures:
    """The measurements of a finished run. `slot_bytes`: the bytes of one token's K and V in the layers of a block, that
    is of one group of `num_groups`."""
    slots, steps = stats.blocks_total * stats.block_size, max(1, stats.steps)
    pool_bytes = slots * slot_bytes

    def memory(use: MemoryUse, slot_bytes: int) -> MemoryBytes:
        return MemoryBytes(
            tokens=use.tokens / steps * slot_bytes,
            reserved=use.reserved / steps * slot_bytes,
            internal_fragmentation=use.internal_fragmentation / steps * slot_bytes,
            free=pool_bytes - use.taken / steps * slot_bytes,
            share_of_tokens=use.share_of_tokens(),
        )

    return Measures(
        run=run,
        block_size=stats.block_size,
        num_blocks=stats.blocks_total,
        max_model_len=stats.max_model_len,
        pool_bytes=pool_bytes,
        steps=stats.steps,
        seconds=seconds,
        generated_tokens=stats.generated_tokens,
        most_sequences=most_sequences,
        contiguous_sequences=slots // (stats.max_model_len * num_groups),
        paged=memory(stats.paged, slot_bytes),
        contiguous=memory(stats.contiguous, slot_bytes * num_groups),  # it has a slot in every layer
        peak_blocks_used=stats.peak_blocks_used,
        blocks_saved=(stats.table_entry_steps - stats.block_steps) / steps,
        share_saved=stats.share_saved,
        blocks_copied=stats.blocks_copied,
        blocks_swapped_out=stats.blocks_swapped_out,
        blocks_swapped_in=stats.blocks_swapped_in,
        preempted_by_swap=stats.preempted_by_swap,
        preempted_by_recompute=stats.preempted_by_recompute,
        tokens_recomputed=stats.tokens_recomputed,
        prefix_cache_hit_tokens=stats.prefix_cache_hit_tokens,
        prefix_cache_evictions=stats.prefix_cache_evictions,
    )
