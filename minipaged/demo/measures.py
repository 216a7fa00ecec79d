"""What a run measured: the KV memory of paging beside that of a contiguous cache, and what sharing and preemption did.

The breakdown is that of the paper's Fig. 2, in bytes, as the mean over all steps of a run. Both sides have the same
pool of memory and the same sequences in the same steps:

- *paging* takes a block when a token needs it, and shares blocks;
- *contiguous* is what systems before it did: reserve `max_model_len` slots for every sequence when it starts.

See `engine.stats`, which counts the slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from minipaged.engine.stats import MemoryUse, Stats


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """Bytes of KV memory, mean over the steps."""

    tokens: float
    """Slots that hold a token's K and V."""
    reserved: float
    """Slots held for tokens that came later."""
    internal_fragmentation: float
    """Slots held for tokens that never came."""
    free: float
    """What is left of the pool. Negative: so much more than the pool would have been needed."""
    share_of_tokens: float
    """Of what is taken, the share that holds tokens: 0 to 1."""


@dataclass(frozen=True, slots=True)
class Measures:
    """One run of the engine, from an empty pool to the last token."""

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
    """Sequences of `max_model_len` slots that would fit the pool."""
    paged: MemoryBytes
    contiguous: MemoryBytes
    peak_blocks_used: int
    blocks_saved: float
    """Block-table entries beyond the first that hold the same block, mean over the steps."""
    share_saved: float
    """Blocks saved by sharing / blocks without sharing (paper, Fig. 15): 0 to 1."""
    blocks_copied: int
    """Copies on write."""
    blocks_swapped_out: int
    blocks_swapped_in: int
    preempted_by_swap: int
    preempted_by_recompute: int
    tokens_recomputed: int
    prefix_cache_hit_tokens: int
    prefix_cache_evictions: int


def measure(run: str, stats: Stats, slot_bytes: int, most_sequences: int, seconds: float) -> Measures:
    """The measures of a run that has ended. `slot_bytes`: K and V of one token in all layers."""
    slots, steps = stats.blocks_total * stats.block_size, max(1, stats.steps)

    def memory(use: MemoryUse) -> MemoryBytes:
        return MemoryBytes(
            tokens=use.tokens / steps * slot_bytes,
            reserved=use.reserved / steps * slot_bytes,
            internal_fragmentation=use.internal_fragmentation / steps * slot_bytes,
            free=(slots - use.taken / steps) * slot_bytes,
            share_of_tokens=use.share_of_tokens(),
        )

    return Measures(
        run=run,
        block_size=stats.block_size,
        num_blocks=stats.blocks_total,
        max_model_len=stats.max_model_len,
        pool_bytes=slots * slot_bytes,
        steps=stats.steps,
        seconds=seconds,
        generated_tokens=stats.generated_tokens,
        most_sequences=most_sequences,
        contiguous_sequences=slots // stats.max_model_len,
        paged=memory(stats.paged),
        contiguous=memory(stats.contiguous),
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
