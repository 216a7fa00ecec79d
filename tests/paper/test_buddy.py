"""The buddy allocator, against the simplest model there is: which chunks are held, each with its count.

Checked after every call: conservation, chunks of neighbouring blocks that begin at a multiple of their size and do not
overlap, and buddies that are both free are one chunk again. And it keeps what every allocator has to keep.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minipaged.errors import BlockNotAllocated, OutOfBlocks
from minipaged.paper.buddy import BuddyAllocator
from tests.effort import examples, scaled
from tests.reference.test_block_allocator import check_allocator

LARGEST_POOL = 40
sizes = st.sampled_from([1, 2, 4, 8, 16, 32])


def free_chunks(allocator: BuddyAllocator) -> dict[int, set[int]]:
    """By the blocks that nobody holds: size -> first blocks of the largest aligned pieces that are free throughout."""
    free = [allocator.ref_count(block) == 0 for block in range(allocator.num_blocks)]
    found: dict[int, set[int]] = {}
    block = 0
    while block < allocator.num_blocks:
        if not free[block]:
            block += 1
            continue
        size = allocator._largest
        while block % size or not all(free[block : block + size]) or block + size > allocator.num_blocks:
            size //= 2
        found.setdefault(size, set()).add(block)
        block += size
    return found


class BuddyMachine(RuleBasedStateMachine):
    """Chunks taken, shared and given back in any order; `held`: (blocks, count) of each."""

    @initialize(num_blocks=st.integers(1, LARGEST_POOL), largest=st.sampled_from([None, 4, 16]))
    def start(self, num_blocks: int, largest: int | None) -> None:
        self.allocator = BuddyAllocator(num_blocks, largest)
        self.held: list[tuple[list[int], int]] = []

    @rule(size=sizes)
    def take(self, size: int) -> None:
        """It raises when there is none, and only then, as `can_take` says."""
        there = self.allocator.can_take([size])
        assert there == any(free >= size for free in free_chunks(self.allocator))
        if not there:
            with pytest.raises(OutOfBlocks, match=f"no chunk of {size} blocks is free"):
                self.allocator.take(size)
            return
        blocks = self.allocator.take(size)
        assert len(blocks) == size
        assert blocks == list(range(blocks[0], blocks[0] + size)), "neighbours"
        assert blocks[0] % size == 0, "aligned"
        assert not set(blocks) & {block for others, _ in self.held for block in others}, "handed out twice"
        self.held.append((blocks, 1))

    @rule(wanted=st.lists(sizes, max_size=6))
    def ask_for_several(self, wanted: list[int]) -> None:
        """`can_take` changes nothing, and says what taking them comes to, the largest first."""
        before = [self.allocator.ref_count(block) for block in range(self.allocator.num_blocks)]
        there = self.allocator.can_take(wanted)
        assert before == [self.allocator.ref_count(block) for block in range(self.allocator.num_blocks)]
        taken: list[list[int]] = []
        try:
            taken += [self.allocator.take(size) for size in sorted(wanted, reverse=True)]
        except OutOfBlocks:
            assert not there
            return self._give_back(before)
        assert there
        for blocks in taken:
            self.allocator.give_back(blocks[-1])
        return None

    def _give_back(self, before: list[int]) -> None:
        """What was taken since."""
        for block, count in enumerate(before):
            if count == 0 and self.allocator.ref_count(block):
                self.allocator.give_back(block)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 1000), within=st.integers(0, 31))
    def share(self, pick: int, within: int) -> None:
        """By any of its blocks."""
        blocks, count = self.held[pick % len(self.held)]
        self.allocator.share(blocks[within % len(blocks)])
        self.held[pick % len(self.held)] = blocks, count + 1

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 1000), within=st.integers(0, 31))
    def give_back(self, pick: int, within: int) -> None:
        blocks, count = self.held.pop(pick % len(self.held))
        self.allocator.give_back(blocks[within % len(blocks)])
        if count > 1:
            self.held.append((blocks, count - 1))

    @rule(block=st.integers(-2, LARGEST_POOL + 1))
    def name_a_block_that_nobody_holds(self, block: int) -> None:
        if all(block not in blocks for blocks, _ in self.held):
            with pytest.raises(BlockNotAllocated):
                self.allocator.give_back(block)

    @invariant()
    def nothing_is_lost(self) -> None:
        counts = {block: count for blocks, count in self.held for block in blocks}
        assert self.allocator.num_free == self.allocator.num_blocks - len(counts), "conservation"
        for block in range(self.allocator.num_blocks):
            assert self.allocator.ref_count(block) == counts.get(block, 0), "exact-references"

    @invariant()
    def free_buddies_are_one_chunk(self) -> None:
        kept = {size: firsts for size, firsts in self.allocator._free.items() if firsts}
        assert kept == free_chunks(self.allocator)


def test_chunks_are_aligned_and_disjoint_and_buddies_merge() -> None:
    run_state_machine_as_test(BuddyMachine, settings=settings(max_examples=examples(300), stateful_step_count=40))


@scaled
def test_it_keeps_what_every_allocator_keeps() -> None:
    """Chunks of one block: conservation, exact-references, atomic-failure."""
    check_allocator(BuddyAllocator)


def test_a_pool_of_no_power_of_two_is_carved_into_several() -> None:
    assert BuddyAllocator(11).can_take([8, 2, 1])
    assert not BuddyAllocator(11).can_take([8, 4])
    assert not BuddyAllocator(11, largest=4).can_take([8])
    assert BuddyAllocator(11, largest=4).can_take([4, 4, 2, 1])


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks is {num_blocks}"):
        BuddyAllocator(num_blocks)
