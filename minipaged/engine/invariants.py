"""The checks of debug mode: invariants by name, after every step and before every write (`errors.Invariant`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence

from minipaged.engine.grouped_memory import catches_up
from minipaged.engine.grouped_table import first_seen
from minipaged.engine.memory import Memory
from minipaged.engine.sequence import Request, SequenceState
from minipaged.errors import Invariant, InvariantViolation
from minipaged.events import HOLE


def check_exclusive_writes(work: Iterable[tuple[SequenceState, int]], blocks: Memory) -> None:
    """Raise InvariantViolation if a slot about to be written is in a block with more than one holder.

    `work`: each sequence with the number of its latest slots, which the step writes.
    """
    for sequence, num_tokens in work:
        stop = sequence.table.num_tokens
        slots = sequence.table.slot_mapping(stop - num_tokens, stop)
        for block in {slot // blocks.block_size for slot in slots}:
            if (holders := blocks.allocator.ref_count(block)) != 1:
                raise InvariantViolation(
                    Invariant.EXCLUSIVE_WRITE,
                    f"a slot of block {block} is about to be written, but it has {holders} holders",
                )


def check_blocks(sequences: Iterable[SequenceState], blocks: Memory) -> None:
    """Raise InvariantViolation unless conservation and exact-references hold in both pools.

    `sequences`: all sequences of the engine.
    """
    expected = {False: Counter[int](), True: Counter[int]()}
    num_tokens = 0
    for sequence in sequences:
        expected[sequence.swapped].update(sequence.table.blocks)
        num_tokens += 0 if sequence.swapped else sequence.table.num_tokens
    held = sum(expected[False].values()), num_tokens
    if held != (blocks.num_entries, blocks.num_tokens):
        raise InvariantViolation(
            Invariant.CONSERVATION,
            f"the tables on the device have {held[0]} blocks and {held[1]} tokens, but {blocks.num_entries} and "
            f"{blocks.num_tokens} were counted",
        )
    expected[False].update(blocks.held_beside_tables)
    expected[True].update(blocks.held_on_host)
    for allocator, counts in ((blocks.allocator, expected[False]), (blocks.host_allocator, expected[True])):
        if allocator is None:
            continue
        for block in range(allocator.num_blocks):
            if allocator.ref_count(block) != counts[block]:
                raise InvariantViolation(
                    Invariant.EXACT_REFERENCES,
                    f"block {block} has ref_count {allocator.ref_count(block)} but {counts[block]} holders",
                )
        if allocator.num_free + len(counts) - list(counts.values()).count(0) != allocator.num_blocks:
            raise InvariantViolation(
                Invariant.CONSERVATION,
                f"{allocator.num_free} free and {len(counts)} held blocks in a pool of {allocator.num_blocks}",
            )


def check_windows(
    requests: Iterable[Request], windows: Sequence[int | None], block_size: int, in_flight: Container[Request]
) -> None:
    """Raise InvariantViolation unless window-content holds. `windows`: the window of each group of layers.

    Not checked are requests of which a step is in flight, and those that catch up, which keep more (`catches_up`).
    """
    for request in requests:
        if request in in_flight or catches_up(request):
            continue
        for sequence in request.sequences:
            for group, window in enumerate(windows):
                entries = sequence.entries[group :: len(windows)]
                holes = first_seen(window, sequence.num_computed) // block_size
                if [block == HOLE for block in entries] != [i < holes for i in range(len(entries))]:
                    raise InvariantViolation(
                        Invariant.WINDOW_CONTENT,
                        f"sequence {sequence.sequence_id} holds blocks {list(entries)} of group {group}; from position "
                        f"{sequence.num_computed} on, its layers see everything but the first {holes}",
                    )
