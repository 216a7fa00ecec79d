"""Every tier's block allocator against the simplest model there is: a dict from each held block to its count.

Checked after every call, those that raise included: conservation, exact-references, atomic-failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

from minipaged import contracts
from minipaged.contracts import Tier
from minipaged.errors import BlockNotAllocated, OutOfBlocks
from minipaged.reference.block_allocator import BlockAllocator
from tests.effort import examples, scaled
from tests.workloads import TIERS

every_tier = pytest.mark.parametrize("tier", TIERS.values(), ids=TIERS)

LARGEST_POOL = 4
numbers = st.integers(min_value=-2, max_value=LARGEST_POOL + 1)
"""Blocks, and numbers outside the pool on both sides of it."""
picks = st.integers(min_value=0, max_value=LARGEST_POOL - 1)
"""Which of the held blocks, where it is to be one of them."""


class AllocatorMachine(RuleBasedStateMachine):
    """Calls in any order, on an allocator that `make` makes; `counts` is what they ought to come to."""

    make: Callable[[int], contracts.BlockAllocator]

    @initialize(num_blocks=st.integers(1, LARGEST_POOL))
    def start(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.allocator = type(self).make(num_blocks)
        self.counts: Counter[int] = Counter()

    @contextmanager
    def refused(self, error: type[Exception]) -> Iterator[None]:
        """The call raises `error`; and it changes nothing (atomic-failure)."""
        with pytest.raises(error):
            yield
        self.matches_the_model()

    def take(self, block: int) -> None:
        """`block` was handed out: one that was free until now."""
        assert block in range(self.num_blocks)
        assert block not in self.counts, "handed out twice"
        self.counts[block] = 1

    def give_up(self, block: int) -> None:
        self.counts[block] -= 1
        if self.counts[block] == 0:
            del self.counts[block]

    @rule()
    def allocate(self) -> None:
        if len(self.counts) < self.num_blocks:
            self.take(self.allocator.allocate())
        else:
            with self.refused(OutOfBlocks):
                self.allocator.allocate()

    def held(self, pick: int) -> int:
        return sorted(self.counts)[pick % len(self.counts)]

    @precondition(lambda self: self.counts)
    @rule(pick=picks)
    def share(self, pick: int) -> None:
        block = self.held(pick)
        self.allocator.share(block)
        self.counts[block] += 1

    @precondition(lambda self: self.counts)
    @rule(pick=picks)
    def free(self, pick: int) -> None:
        block = self.held(pick)
        self.allocator.free(block)
        self.give_up(block)

    @precondition(lambda self: self.counts)
    @rule(pick=picks)
    def copy_on_write(self, pick: int) -> None:
        block = self.held(pick)
        if self.counts[block] == 1:
            assert self.allocator.copy_on_write(block) == block
        elif len(self.counts) == self.num_blocks:
            with self.refused(OutOfBlocks):
                self.allocator.copy_on_write(block)
        else:
            self.take(self.allocator.copy_on_write(block))
            self.give_up(block)

    @rule(block=numbers, method=st.sampled_from(["share", "free", "copy_on_write"]))
    def name_a_block_that_nobody_holds(self, block: int, method: str) -> None:
        if block not in self.counts:
            with self.refused(BlockNotAllocated):
                getattr(self.allocator, method)(block)

    @rule(n=st.integers(-2, LARGEST_POOL + 1))
    def allocate_many(self, n: int) -> None:
        if n < 0:
            with self.refused(ValueError):
                self.allocator.allocate_many(n)
        elif n > self.num_blocks - len(self.counts):
            with self.refused(OutOfBlocks):
                self.allocator.allocate_many(n)
        else:
            blocks = self.allocator.allocate_many(n)
            assert len(blocks) == n
            for block in blocks:
                self.take(block)

    def some(self, chosen: list[int], also: list[int]) -> list[int]:
        return [self.held(pick) for pick in chosen if self.counts] + also

    @rule(chosen=st.lists(picks, max_size=4), also=st.lists(numbers, max_size=1))
    def share_many(self, chosen: list[int], also: list[int]) -> None:
        blocks = self.some(chosen, also)
        if all(block in self.counts for block in blocks):
            self.allocator.share_many(blocks)
            self.counts.update(blocks)
        else:
            with self.refused(BlockNotAllocated):
                self.allocator.share_many(blocks)

    @rule(chosen=st.lists(picks, max_size=4), also=st.lists(numbers, max_size=1))
    def free_many(self, chosen: list[int], also: list[int]) -> None:
        blocks = self.some(chosen, also)
        if Counter(blocks) <= self.counts:
            self.allocator.free_many(iter(blocks))
            for block in blocks:
                self.give_up(block)
        else:
            with self.refused(BlockNotAllocated):
                self.allocator.free_many(iter(blocks))

    @rule(block=numbers)
    def count_a_number_outside_the_pool(self, block: int) -> None:
        if block not in range(self.num_blocks):
            with self.refused(BlockNotAllocated):
                self.allocator.ref_count(block)

    @invariant()
    def matches_the_model(self) -> None:
        assert self.allocator.num_blocks == self.num_blocks
        assert self.allocator.num_free == self.num_blocks - len(self.counts), "conservation"
        for block in range(self.num_blocks):
            assert self.allocator.ref_count(block) == self.counts[block], "exact-references"


def check_allocator(make: Callable[[int], contracts.BlockAllocator], thorough: int = 200) -> None:
    """Run the machine over the allocators that `make` makes."""
    machine = type("Machine", (AllocatorMachine,), {"make": staticmethod(make)})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(thorough), stateful_step_count=30))


@scaled
@every_tier
def test_conservation_exact_references_and_atomic_failure_hold_after_every_call(tier: Tier) -> None:
    check_allocator(tier.block_allocator)


@every_tier
@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(tier: Tier, num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks is {num_blocks}"):
        tier.block_allocator(num_blocks)


@every_tier
def test_a_pool_can_be_emptied_and_filled_again_and_again(tier: Tier) -> None:
    """Conservation: two rounds hand out the same blocks, each once."""
    allocator = tier.block_allocator(1000)
    for _ in range(2):
        blocks = allocator.allocate_many(1000)
        assert sorted(blocks) == list(range(1000))
        with pytest.raises(OutOfBlocks):
            allocator.allocate()
        allocator.free_many(blocks)
        assert allocator.num_free == 1000


@every_tier
def test_errors_say_which_block_and_how_large_the_pool_is(tier: Tier) -> None:
    allocator = tier.block_allocator(2)
    with pytest.raises(BlockNotAllocated, match="block 1 is free"):
        allocator.free(1)
    with pytest.raises(BlockNotAllocated, match="no block 2; the pool has blocks 0 to 1"):
        allocator.share(2)
    with pytest.raises(BlockNotAllocated, match="block 0 freed 2 times but held 1 times"):
        allocator.free_many([allocator.allocate()] * 2)
    with pytest.raises(OutOfBlocks, match="3 blocks asked for, 1 of 2 are free"):
        allocator.allocate_many(3)


class FailingAt(BlockAllocator):
    """Runs out of memory in the third call of one of its methods."""

    def __init__(self, num_blocks: int, method: str) -> None:
        super().__init__(num_blocks)
        self.method, self.calls = method, 0

    def _count(self, method: str) -> None:
        self.calls += method == self.method
        if self.calls == 3:
            raise MemoryError

    def allocate(self) -> int:
        self._count("allocate")
        return super().allocate()

    def share(self, block: int) -> None:
        self._count("share")
        super().share(block)


def test_allocate_many_gives_back_what_it_took_when_one_call_fails() -> None:
    """Atomic-failure of the form that every allocator gets from the base class."""
    allocator = FailingAt(5, "allocate")
    with pytest.raises(MemoryError):
        allocator.allocate_many(4)
    assert allocator.num_free == 5


def test_share_many_gives_back_what_it_took_when_one_call_fails() -> None:
    """Atomic-failure of the form that every allocator gets from the base class."""
    allocator = FailingAt(5, "share")
    blocks = allocator.allocate_many(4)
    with pytest.raises(MemoryError):
        allocator.share_many(blocks)
    assert [allocator.ref_count(block) for block in blocks] == [1, 1, 1, 1]
