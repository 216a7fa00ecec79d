"""What students hand in, as sources: right ones however unusual, and hostile ones."""

from __future__ import annotations

from minipaged.course.assignments.block_allocator.mutants import COMMON, HEAP, REFERENCE

RIGHT = {
    "linked list": """
class Mine(Common):
    def start(self):
        self.next, self.head = [*range(1, self.num_blocks), None], 0

    def take(self):
        block, self.head = self.head, self.next[self.head]
        return block

    def put(self, block):
        self.next[block], self.head = self.head, block
""",
    "bitmap": """
class Mine(Common):
    def start(self):
        self.bits = (1 << self.num_blocks) - 1

    def take(self):
        lowest = self.bits & -self.bits
        self.bits ^= lowest
        return lowest.bit_length() - 1

    def put(self, block):
        self.bits |= 1 << block
""",
    "random order": """
import random


class Mine(Common):
    def start(self):
        self.pool = set(range(self.num_blocks))

    def take(self):
        block = random.choice(sorted(self.pool))
        self.pool.remove(block)
        return block

    def put(self, block):
        self.pool.add(block)
""",
    "numpy": """
import numpy as np


class Mine(Common):
    def start(self):
        self.is_free = np.ones(self.num_blocks, bool)

    def take(self):
        block = np.flatnonzero(self.is_free)[-1]  # an int64
        self.is_free[block] = False
        return block

    def put(self, block):
        self.is_free[block] = True
""",
}


def right(name: str) -> str:
    return COMMON + RIGHT[name]


BULK = '''

class Bulk(BlockAllocator):
    """With the optional methods, each written out."""

    def allocate_many(self, n):
        if n < 0:
            raise ValueError(n)
        if n > self.num_free:
            raise OutOfBlocks
        return [self.allocate() for _ in range(n)]

    def share_many(self, blocks):
        blocks = list(blocks)
        for block in blocks:
            self.held(block)
        for block in blocks:
            self.share(block)

    def free_many(self, blocks):
        blocks = list(blocks)
        for block in blocks:
            if self.ref_count(block) < blocks.count(block):
                raise BlockNotAllocated(block)
        for block in blocks:
            self.free(block)
'''


def right_with_many() -> str:
    """A right allocator `Bulk` that has all three of the optional methods."""
    return HEAP + BULK


def hostile(in_allocate: str = "", at_import: str = "") -> str:
    """The reference, which is right, with something else that it does."""
    marker = "def allocate(self) -> int:\n"
    body = "".join(f"        {line}\n" for line in in_allocate.splitlines())
    assert REFERENCE.count(marker) == 1
    return REFERENCE.replace(marker, marker + body) + "\n" + at_import
