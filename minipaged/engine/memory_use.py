"""The memory that requests hold, measured in every step for the statistics (`stats.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from minipaged.engine.memory import Memory
from minipaged.engine.sequence import Request, SequenceState
from minipaged.engine.stats import StepUsage


def memory_held(running: Iterable[Request], blocks: Memory, num_others: int = 0) -> StepUsage:
    """Return the memory that running requests hold in this step, and count it in each sequence (`slot_steps_reserved`).

    `num_others`: the number of sequences counted elsewhere, which share no unfilled blocks.
    """
    num_sequences, shared = num_others, 0
    for request in running:
        num_sequences += len(request.sequences)
        for sequence in request.sequences:
            sequence.num_steps += 1
            sequence.token_steps += sequence.table.num_tokens
        if len(request.sequences) > 1:
            shared += _unfilled_again(request, blocks.block_size)
    return StepUsage(
        num_sequences=num_sequences,
        num_tokens=blocks.num_tokens,
        table_entries=blocks.num_entries,
        blocks_used=blocks.num_used,
        blocks_cached=blocks.num_cached,
        slots_unfilled=blocks.num_entries * blocks.block_size - blocks.num_filled - shared * blocks.num_groups,
    )


def _unfilled_again(request: Request, block_size: int) -> int:
    """Unfilled slots of the blocks that its sequences share, once for each holder but the first."""
    ends = Counter(
        (sequence.table.blocks[-1], sequence.table.num_tokens % block_size)
        for sequence in request.sequences
        if sequence.table.num_tokens % block_size
    )
    return sum((holders - 1) * (block_size - filled) for (_, filled), holders in ends.items())


def slot_steps_reserved(sequence: SequenceState) -> int:
    """The value for `SequenceFinished` of a sequence that ends now: its final length is known."""
    final = max(sequence.most_computed, sequence.table.num_tokens)
    return sequence.num_steps * final - sequence.token_steps
