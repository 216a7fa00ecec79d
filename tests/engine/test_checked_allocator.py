"""The guard around users' allocators: it accepts whatever is right, and names the invariant that a wrong one breaks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minipaged.engine.checked_allocator import CheckedAllocator
from minipaged.errors import BlockNotAllocated, Invariant, InvariantViolation, OutOfBlocks
from minipaged.reference.block_allocator import BlockAllocator
from tests.reference.test_block_allocator import check_allocator
from tests.workloads import WorkloadRun, random_workload


def checked(make: Callable[[int], Any], num_blocks: int = 4) -> CheckedAllocator:
    return CheckedAllocator(num_blocks, make)


# --- Right ones, however unusual ------------------------------------------------------------------


class LinkedList:
    """The free blocks form a list through an array, as malloc does it. Has the single-block members and no more."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = self.num_free = num_blocks
        self.next_free = [*range(1, num_blocks), -1]
        self.head = 0
        self.counts = [0] * num_blocks

    def allocate(self) -> int:
        if self.head < 0:
            raise OutOfBlocks
        block, self.head = self.head, self.next_free[self.head]
        self.counts[block] = 1
        self.num_free -= 1
        return block

    def share(self, block: int) -> None:
        self._held(block)
        self.counts[block] += 1

    def free(self, block: int) -> None:
        self._held(block)
        self.counts[block] -= 1
        if self.counts[block] == 0:
            self.next_free[block], self.head = self.head, block
            self.num_free += 1

    def ref_count(self, block: int) -> int:
        return self.counts[block]

    def copy_on_write(self, block: int) -> int:
        self._held(block)
        if self.counts[block] == 1:
            return block
        copy = self.allocate()
        self.counts[block] -= 1
        return copy

    def _held(self, block: int) -> None:
        if not 0 <= block < self.num_blocks or not self.counts[block]:
            raise BlockNotAllocated


class RandomOrder:
    """Hands out any free block, and keeps a Counter of the held ones only."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = range(num_blocks)
        self.held: Counter[int] = Counter()
        self.random = random.Random(0)

    @property
    def num_blocks(self) -> int:
        return len(self.pool)

    @property
    def num_free(self) -> int:
        return len(self.pool) - len(self.held)

    def allocate(self) -> int:
        if not self.num_free:
            raise OutOfBlocks
        block = self.random.choice([block for block in self.pool if block not in self.held])
        self.held[block] = 1
        return block

    def share(self, block: int) -> None:
        if block not in self.held:
            raise BlockNotAllocated
        self.held[block] += 1

    def free(self, block: int) -> None:
        if block not in self.held:
            raise BlockNotAllocated
        self.held = self.held - Counter([block])

    def ref_count(self, block: int) -> int:
        return self.held[block]

    def copy_on_write(self, block: int) -> int:
        if self.held[block] == 1:
            return block
        if block not in self.held:
            raise BlockNotAllocated
        copy = self.allocate()
        self.free(block)
        return copy


@pytest.mark.parametrize("make", [BlockAllocator, LinkedList, RandomOrder])
def test_any_right_allocator_is_accepted_and_meets_the_whole_contract(make: Callable[[int], Any]) -> None:
    """Conservation, exact-references, atomic-failure; `*_many` come from the base class."""
    check_allocator(lambda num_blocks: CheckedAllocator(num_blocks, make), thorough=50)


@pytest.mark.parametrize("make", [LinkedList, RandomOrder])
def test_the_engine_runs_on_any_right_allocator(make: Callable[[int], Any]) -> None:
    """Content, exact-references, liveness: the order in which blocks are handed out does not matter."""
    for seed in range(40):
        run = WorkloadRun(random_workload(seed), allocator=make)
        run.to_the_end()
        run.check_outputs()
        run.check_nothing_leaked()


def test_block_numbers_may_be_numpys_integers() -> None:
    class NumPyStack(BlockAllocator):
        def allocate(self) -> int:
            return np.int64(super().allocate())  # type: ignore[return-value]

    allocator = checked(NumPyStack)
    block = allocator.allocate()
    assert type(block) is int
    allocator.free(block)
    assert allocator.num_free == 4


# --- Wrong ones -----------------------------------------------------------------------------------


class HandsOutTwice(BlockAllocator):
    def allocate(self) -> int:
        block = super().allocate()
        return 0 if self.num_free == 2 else block


class ForgetsToCountShares(BlockAllocator):
    def share(self, block: int) -> None:
        self.ref_count(block)


class CopiesUnsharedBlocks(BlockAllocator):
    def copy_on_write(self, block: int) -> int:
        copy = self.allocate()
        self.free(block)
        return copy


class NeverCopies(BlockAllocator):
    def copy_on_write(self, block: int) -> int:
        return block


class CopyKeepsItsReference(BlockAllocator):
    def copy_on_write(self, block: int) -> int:
        return block if self.ref_count(block) == 1 else self.allocate()


class AcceptsDoubleFree(BlockAllocator):
    def free(self, block: int) -> None:
        if self.ref_count(block):
            super().free(block)


class AcceptsSharingFreeBlocks(BlockAllocator):
    def share(self, block: int) -> None:
        if self.ref_count(block):
            super().share(block)


class AcceptsCopyingFreeBlocks(BlockAllocator):
    def copy_on_write(self, block: int) -> int:
        return super().copy_on_write(block) if self.ref_count(block) else block


class GivesUpTheReferenceBeforeItFails(BlockAllocator):
    def copy_on_write(self, block: int) -> int:
        if self.ref_count(block) == 1:
            return block
        self._ref_counts[block] -= 1
        return self.allocate()


class KeepsOneBlockBack(BlockAllocator):
    def allocate(self) -> int:
        if self.num_free == 1:
            raise OutOfBlocks
        return super().allocate()


class CountsFreeBlocksWrong(BlockAllocator):
    @property
    def num_free(self) -> int:
        return super().num_free - (super().num_free < 4)


class NeverTakesBlocksBack(BlockAllocator):
    def free(self, block: int) -> None:
        self._ref_counts[block] -= 1


class ForgetsCountsOfFreeBlocks(LinkedList):
    """`ref_count` of a free block must be 0; a dict that holds only held blocks raises KeyError."""

    def ref_count(self, block: int) -> int:
        return {block: count for block, count in enumerate(self.counts) if count}[block]


class ReturnsNothing(BlockAllocator):
    def allocate(self) -> int:
        super().allocate()
        return None  # type: ignore[return-value]


class ReturnsText(BlockAllocator):
    def allocate(self) -> int:
        return str(super().allocate())  # type: ignore[return-value]


class NumbersAboveThePool(BlockAllocator):
    def allocate(self) -> int:
        return super().allocate() + 4


class CopiesToOutsideThePool(BlockAllocator):
    def copy_on_write(self, block: int) -> int:
        return super().copy_on_write(block) - 5


class PoolOfAnotherSize(BlockAllocator):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks + 1)


Script = Callable[[CheckedAllocator], object]


def allocate_all(allocator: CheckedAllocator) -> None:
    for _ in range(4):
        allocator.allocate()


def share_one(allocator: CheckedAllocator) -> None:
    allocator.share(allocator.allocate())


def free_one(allocator: CheckedAllocator) -> None:
    allocator.free(allocator.allocate())


def free_one_twice(allocator: CheckedAllocator) -> None:
    block = allocator.allocate()
    allocator.free(block)
    allocator.free(block)


def copy_an_unshared_block(allocator: CheckedAllocator) -> None:
    allocator.copy_on_write(allocator.allocate())


def copy_a_shared_block(allocator: CheckedAllocator) -> None:
    block = allocator.allocate()
    allocator.share(block)
    allocator.copy_on_write(block)


def copy_a_shared_block_in_a_full_pool(allocator: CheckedAllocator) -> None:
    blocks = allocator.allocate_many(4)
    allocator.share(blocks[0])
    allocator.copy_on_write(blocks[0])


@pytest.mark.parametrize(
    ("make", "script", "invariant"),
    [
        (HandsOutTwice, allocate_all, Invariant.EXCLUSIVE_WRITE),
        (ForgetsToCountShares, share_one, Invariant.EXACT_REFERENCES),
        (CopiesUnsharedBlocks, copy_an_unshared_block, Invariant.EXCLUSIVE_WRITE),
        (NeverCopies, copy_a_shared_block, Invariant.EXCLUSIVE_WRITE),
        (CopyKeepsItsReference, copy_a_shared_block, Invariant.EXACT_REFERENCES),
        (AcceptsDoubleFree, free_one_twice, Invariant.CONSERVATION),
        (AcceptsSharingFreeBlocks, lambda allocator: allocator.share(3), Invariant.EXACT_REFERENCES),
        (AcceptsCopyingFreeBlocks, lambda allocator: allocator.copy_on_write(3), Invariant.EXACT_REFERENCES),
        (GivesUpTheReferenceBeforeItFails, copy_a_shared_block_in_a_full_pool, Invariant.ATOMIC_FAILURE),
        (KeepsOneBlockBack, allocate_all, Invariant.CONSERVATION),
        (CountsFreeBlocksWrong, allocate_all, Invariant.CONSERVATION),
        (NeverTakesBlocksBack, free_one, Invariant.CONSERVATION),
        (ForgetsCountsOfFreeBlocks, free_one, Invariant.EXACT_REFERENCES),
        (ReturnsNothing, allocate_all, Invariant.CONSERVATION),
        (ReturnsText, allocate_all, Invariant.CONSERVATION),
        (NumbersAboveThePool, allocate_all, Invariant.CONSERVATION),
        (CopiesToOutsideThePool, copy_a_shared_block, Invariant.CONSERVATION),
        (PoolOfAnotherSize, allocate_all, Invariant.CONSERVATION),
    ],
)
def test_a_wrong_allocator_is_caught_and_the_broken_invariant_named(
    make: type[Any], script: Script, invariant: Invariant
) -> None:
    with pytest.raises(InvariantViolation, match=f"invariant '{invariant}' broken: {make.__name__}:") as caught:
        script(checked(make))
    assert caught.value.invariant is invariant


@pytest.mark.parametrize(
    "make",
    [HandsOutTwice, ForgetsToCountShares, CopyKeepsItsReference, NeverCopies, KeepsOneBlockBack, NeverTakesBlocksBack],
)
def test_a_wrong_allocator_is_caught_while_the_engine_uses_it(make: type[BlockAllocator]) -> None:
    def run_some_workloads() -> None:
        for seed in range(100):
            WorkloadRun(random_workload(seed), allocator=make).to_the_end()

    with pytest.raises(InvariantViolation, match=f"broken: {make.__name__}:"):
        run_some_workloads()


def test_an_object_that_lacks_members_is_refused_by_their_names() -> None:
    class Half:
        num_blocks = num_free = 4

        def allocate(self) -> int:
            return 0

    with pytest.raises(TypeError, match="Half is no block allocator: it lacks share, free, ref_count, copy_on_write"):
        checked(lambda num_blocks: Half())


def test_errors_that_change_nothing_pass_through_unchanged() -> None:
    """An allocator's own errors are for its caller: only a broken invariant is an InvariantViolation."""
    allocator = checked(BlockAllocator)
    with pytest.raises(BlockNotAllocated):
        allocator.free(2)
    with pytest.raises(BlockNotAllocated):
        allocator.ref_count(-1)
    allocator.allocate_many(4)
    with pytest.raises(OutOfBlocks):
        allocator.allocate()


def test_blocks_that_changed_hands_are_remembered_for_poisoning() -> None:
    allocator = checked(BlockAllocator)
    first, second = allocator.allocate_many(2)
    assert allocator.touched == {first, second}
    allocator.share(second)
    allocator.touched.clear()
    allocator.free(first)
    allocator.free(second)
    assert allocator.touched == {first}  # somebody still reads the second
    allocator.share(second)
    allocator.touched.clear()
    copy = allocator.copy_on_write(second)
    assert allocator.touched == {copy}
