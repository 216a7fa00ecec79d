"""The block allocator: which physical blocks are free, and how many holders each of the others has.

Paper, section 4.2: KV memory is cut into blocks of equal size, handed out one at a time as sequences grow, so that no
memory is reserved for tokens that may never come. Section 4.4: several sequences may hold the same block. A reference
count says how many do, and a block is copied only when one of several holders wants to write to it.

A block is *free* (count 0) or *held* (count 1 or more):

    free --allocate--> held by 1 --share--> held by 2 ... --free--> held by 1 --free--> free

At any moment every block is either on the free list or has a count above 0 (conservation). Each method checks before it
changes anything, so a call that raises leaves everything as it was (atomic-failure).
"""

from __future__ import annotations

from minipaged import contracts
from minipaged.errors import BlockNotAllocated, OutOfBlocks


class BlockAllocator(contracts.BlockAllocator):
    """A free list and a list of reference counts. Every operation takes constant time."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs at least 1 block")
        self._ref_counts = [0] * num_blocks
        # A stack: the block that was freed last is handed out first. Block 0 starts on top.
        self._free = list(reversed(range(num_blocks)))

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        if not self._free:
            raise OutOfBlocks(f"all {self.num_blocks} blocks are held")
        block = self._free.pop()
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        self._check_held(block)
        self._ref_counts[block] += 1

    def free(self, block: int) -> None:
        self._check_held(block)
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._free.append(block)

    def ref_count(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise BlockNotAllocated(f"there is no block {block}; the pool has blocks 0 to {self.num_blocks - 1}")
        return self._ref_counts[block]

    def copy_on_write(self, block: int) -> int:
        self._check_held(block)
        if self._ref_counts[block] == 1:
            return block  # the caller is its only holder
        copy = self.allocate()  # first, since it may raise
        self._ref_counts[block] -= 1
        return copy

    def _check_held(self, block: int) -> None:
        if self.ref_count(block) == 0:
            raise BlockNotAllocated(f"block {block} is free: nobody holds it")
