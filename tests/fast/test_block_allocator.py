"""What the fast block allocator promises beyond the contract: plain numbers, no views kept, NumPy where it pays."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array

import numpy as np
import pytest

from minipaged.errors import BlockNotAllocated
from minipaged.fast.block_allocator import MANY, BlockAllocator


@pytest.mark.parametrize("n", [0, 1, MANY - 1, MANY, 4096])
def test_blocks_are_plain_numbers_even_when_numpy_gave_them_back(n: int) -> None:
    """Events hold block numbers and are written as JSON, which knows no NumPy integers."""
    allocator = BlockAllocator(5000)
    allocator.free_many(np.array(allocator.allocate_many(n)[::-1], np.int32))
    blocks = allocator.allocate_many(n)
    assert json.loads(json.dumps(tuple(blocks))) == list(range(n))
    assert type(allocator.allocate()) is int


def test_what_was_handed_out_can_be_changed_without_harm() -> None:
    """No view of it is kept (an array that somebody looks into cannot grow), and no part of the pool."""
    allocator = BlockAllocator(2 * MANY)
    blocks = allocator.allocate_many(MANY)
    assert isinstance(blocks, array)
    try:
        allocator.free_many(blocks + blocks[:1])
    except BlockNotAllocated as error:
        kept = error  # and with it, the frames it went through
        blocks.append(0)
    assert str(kept) == f"block {blocks[0]} freed 2 times but held 1 times"
    blocks[0] = 7
    assert allocator.ref_count(0) == 1
    assert list(allocator.allocate_many(MANY)) == list(range(MANY, 2 * MANY))


class InterruptsOnce(int):
    """A block that the user presses Ctrl-C at."""

    pressed = False

    def __ge__(self, other: int) -> bool:
        if not InterruptsOnce.pressed:
            InterruptsOnce.pressed = True
            raise KeyboardInterrupt
        return super().__ge__(other)


def test_an_interrupted_call_changes_nothing() -> None:
    """Atomic-failure."""
    allocator = BlockAllocator(4)
    first, second = allocator.allocate_many(2)
    with pytest.raises(KeyboardInterrupt):
        allocator.free_many([first, InterruptsOnce(second)])
    assert (allocator.ref_count(first), allocator.ref_count(second), allocator.num_free) == (1, 1, 2)


def test_numpy_is_imported_only_when_there_are_many_blocks() -> None:
    program = f"""
import sys
from minipaged.fast.block_allocator import BlockAllocator
allocator = BlockAllocator({2 * MANY})
blocks = allocator.allocate_many({MANY - 1})
allocator.share_many(blocks)
allocator.free_many(blocks)
allocator.free(blocks[0])
assert "numpy" not in sys.modules
allocator.allocate_many({MANY})
assert "numpy" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("n", [2, MANY, 3 * MANY])
def test_blocks_given_up_by_all_their_holders_at_once_are_free_in_the_order_of_their_last_references(n: int) -> None:
    allocator = BlockAllocator(n)
    blocks = list(allocator.allocate_many(n))
    allocator.share_many(blocks)
    allocator.free_many([*reversed(blocks), *blocks])
    assert list(allocator.allocate_many(n)) == blocks[::-1]


def test_numbers_that_are_not_whole_are_refused_and_not_rounded() -> None:
    allocator = BlockAllocator(MANY)
    blocks = np.array(allocator.allocate_many(MANY)) + 0.5
    for call in (allocator.share_many, allocator.free_many):
        with pytest.raises(TypeError):
            call(blocks)
    assert {allocator.ref_count(block) for block in range(MANY)} == {1}
