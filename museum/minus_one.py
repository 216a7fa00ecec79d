"""Exhibit 1 of the bug museum: a five-token prompt comes and goes, and its blocks are lost for good.

A block allocator in which a block is an object of its own. Something is wrong with it: docs/museum/minus_one.md.

    minipaged grade block-allocator museum/minus_one.py --no-model
"""

from collections import deque

from minipaged import BlockNotAllocated, OutOfBlocks


class Block:
    """One block, and how many hold it."""

    def __init__(self):
        self.ref_count = 0

    def reset(self):
        """For a new owner."""
        self.ref_count = 0


class BlockAllocator:
    """A queue of free blocks, and a set of those that are used."""

    def __init__(self, num_blocks):
        if num_blocks < 1:
            raise ValueError(f"a pool has at least one block, not {num_blocks}")
        self._pool = [Block() for _ in range(num_blocks)]
        self._free = deque(range(num_blocks))
        self._used = set()

    @property
    def num_blocks(self):
        return len(self._pool)

    @property
    def num_free(self):
        return len(self._free)

    def allocate(self):
        if not self._free:
            raise OutOfBlocks("no block is free")
        block = self._free.popleft()
        self._used.add(block)
        self._pool[block].reset()
        return block

    def share(self, block):
        self._used_one(block).ref_count += 1

    def free(self, block):
        held = self._used_one(block)
        held.ref_count -= 1
        if held.ref_count == 0:
            self._used.remove(block)
            self._free.append(block)

    def ref_count(self, block):
        if not 0 <= block < self.num_blocks:
            raise BlockNotAllocated(f"there is no block {block}")
        return self._pool[block].ref_count

    def copy_on_write(self, block):
        held = self._used_one(block)
        if held.ref_count == 1:
            return block
        copy = self.allocate()
        held.ref_count -= 1
        return copy

    def _used_one(self, block):
        if block not in self._used:
            raise BlockNotAllocated(f"nobody holds block {block}")
        return self._pool[block]
