"""Block allocators: the reference's, a right one of another kind, and bugs on purpose."""

from __future__ import annotations

from minipaged.course.grader.mutants import seeded, source_of

REFERENCE = source_of("reference/block_allocator")

NEW, FREE, COUNTS, COPIES, REFUSED, ATOMIC = (
    "a new pool",
    "allocate and free",
    "reference counts",
    "copy-on-write",
    "calls that make no sense are refused",
    "a call that raises changes nothing",
)

GUARD_OF_SHARE = "def share(self, block: int) -> None:\n        self._check_held(block)\n"
GUARD_OF_FREE = "def free(self, block: int) -> None:\n        self._check_held(block)\n"
GUARD_OF_COPY = "def copy_on_write(self, block: int) -> int:\n        self._check_held(block)\n"
RETURN_TO_POOL = "if self._ref_counts[block] == 0:\n            self._free.append(block)"
COUNT_DOWN = "self._ref_counts[block] -= 1\n        if self._ref_counts"
COPY = "copy = self.allocate()  # first, since it may raise\n        self._ref_counts[block] -= 1\n        return copy"
POP = "block = self._free.pop()"

BUGS = {
    "empty-pool-accepted: a pool of 0 blocks is made": (NEW, "if num_blocks < 1:", "if num_blocks < 0:"),
    "last-block-missing: the last block of the pool is never handed out": (
        NEW,
        "list(reversed(range(num_blocks)))",
        "list(reversed(range(max(1, num_blocks - 1))))",
    ),
    "one-block-too-many: a block past the end of the pool is handed out": (
        NEW,
        "list(reversed(range(num_blocks)))",
        "list(reversed(range(num_blocks + 1)))",
    ),
    "numbers-from-one: blocks are numbered from 1": (
        FREE,
        "list(reversed(range(num_blocks)))",
        "list(range(num_blocks, 0, -1))",
    ),
    "num-free-counts-holders: num_free counts a shared block once for each holder": (
        COUNTS,
        "return len(self._free)",
        "return self.num_blocks - sum(self._ref_counts)",
    ),
    "num-free-never-changes: num_free stays at the size of the pool": (
        FREE,
        "return len(self._free)",
        "return self.num_blocks",
    ),
    "new-block-uncounted: allocate leaves the reference count at 0": (FREE, "self._ref_counts[block] = 1", "pass"),
    "new-block-counted-twice: allocate sets the count to 2": (
        FREE,
        "self._ref_counts[block] = 1",
        "self._ref_counts[block] = 2",
    ),
    "stays-on-the-free-list: allocate forgets to take the block off the free list": (
        FREE,
        POP,
        "block = self._free[-1]",
    ),
    "two-blocks-for-one: allocate takes two blocks off the free list: one leaks": (
        FREE,
        POP,
        "block = self._free.pop()\n        del self._free[-1:]",
    ),
    "keeps-one-back: OutOfBlocks while one block is still free": (
        FREE,
        "if not self._free:",
        "if len(self._free) <= (self.num_blocks > 1):",
    ),
    "wrong-error-when-full: IndexError, not OutOfBlocks, when no block is free": (
        FREE,
        "if not self._free:",
        "if False:",
    ),
    "hands-out-a-held-block: when none is free, block 0 is handed out again": (
        FREE,
        'raise OutOfBlocks(f"all {self.num_blocks} blocks are held")',
        "return 0",
    ),
    "share-not-counted: share does not count": (COUNTS, "self._ref_counts[block] += 1", "pass"),
    "share-stops-at-two: a third holder is not counted": (
        COUNTS,
        "self._ref_counts[block] += 1",
        "self._ref_counts[block] = 2",
    ),
    "free-blocks-can-be-shared: share accepts a block that nobody holds": (
        REFUSED,
        GUARD_OF_SHARE,
        "def share(self, block: int) -> None:\n        self.ref_count(block)\n",
    ),
    "double-free-accepted: a free block can be freed again": (
        REFUSED,
        GUARD_OF_FREE,
        "def free(self, block: int) -> None:\n        if self.ref_count(block) == 0:\n            return\n",
    ),
    "block-free-twice: a second free puts the block on the free list twice, so that it is handed out twice": (
        REFUSED,
        GUARD_OF_FREE + "        " + COUNT_DOWN,
        "def free(self, block: int) -> None:\n        self.ref_count(block)\n"
        "        self._ref_counts[block] = max(0, self._ref_counts[block] - 1)\n        if self._ref_counts",
    ),
    "freed-while-shared: the first holder to go frees the block": (
        COUNTS,
        RETURN_TO_POOL,
        "self._ref_counts[block] = 0\n        self._free.append(block)",
    ),
    "on-the-free-list-while-shared: a block with holders left is on the free list too": (
        COUNTS,
        RETURN_TO_POOL,
        "self._free.append(block)",
    ),
    "freed-at-one: a block is returned to the pool while one still holds it": (
        FREE,
        "if self._ref_counts[block] == 0:\n            self._free",
        "if self._ref_counts[block] == 1:\n            self._free",
    ),
    "never-free-again: freed blocks are not handed out again: they leak": (FREE, RETURN_TO_POOL, "pass"),
    "third-holder-cannot-leave: free does not count down from three holders": (
        COUNTS,
        COUNT_DOWN,
        "self._ref_counts[block] -= self._ref_counts[block] != 3\n        if self._ref_counts",
    ),
    "count-stays-after-free: free does not count down": (FREE, COUNT_DOWN, "if self._ref_counts"),
    "negative-blocks: -1 is taken for the last block": (
        REFUSED,
        "if not 0 <= block < self.num_blocks:",
        "if not block < self.num_blocks:",
    ),
    "one-past-the-end: the number after the last block gives IndexError, not BlockNotAllocated": (
        REFUSED,
        "if not 0 <= block < self.num_blocks:",
        "if not 0 <= block <= self.num_blocks:",
    ),
    "count-is-held-or-not: ref_count says 1 for any held block": (
        COUNTS,
        "return self._ref_counts[block]\n",
        "return min(1, self._ref_counts[block])\n",
    ),
    "copies-the-unshared: a block with one holder is copied as well": (
        COPIES,
        "if self._ref_counts[block] == 1:\n            return block",
        "pass",
    ),
    "never-copies: a shared block is written to as it is": (
        COPIES,
        "if self._ref_counts[block] == 1:\n            return",
        "if self._ref_counts[block] >= 1:\n            return",
    ),
    "writes-with-two-holders: only a block with three holders or more is copied": (
        COPIES,
        "if self._ref_counts[block] == 1:\n            return",
        "if self._ref_counts[block] <= 2:\n            return",
    ),
    "copy-keeps-the-reference: after a copy the writer still counts as a holder of the old block": (
        COPIES,
        COPY,
        "return self.allocate()",
    ),
    "copy-gives-up-first: the reference is given up before allocate, which may raise": (
        ATOMIC,
        COPY,
        "self._ref_counts[block] -= 1\n        return self.allocate()",
    ),
    "copy-gives-up-all: after a copy nobody counts as a holder of the old block": (
        COPIES,
        COPY,
        "copy = self.allocate()\n        self._ref_counts[block] = 0\n        return copy",
    ),
    "copy-frees-the-old: after a copy the old block is on the free list, though others hold it": (
        COPIES,
        COPY,
        COPY.replace("return", "self._free.append(block)\n        return"),
    ),
    "free-blocks-can-be-copied: copy_on_write accepts a block that nobody holds": (
        REFUSED,
        GUARD_OF_COPY,
        GUARD_OF_COPY.replace("self._check_held(block)", "if self.ref_count(block) == 0:\n            return block"),
    ),
    "full-pool-writes-in-place: with no block free, a shared block is written to as it is": (
        ATOMIC,
        GUARD_OF_COPY,
        GUARD_OF_COPY + "        if not self._free:\n            return block\n",
    ),
}

COMMON = """
from minipaged import BlockNotAllocated, OutOfBlocks


class Common:
    def __init__(self, num_blocks):
        if num_blocks < 1:
            raise ValueError(num_blocks)
        self.num_blocks = num_blocks
        self.counts = {}
        self.start()

    def share(self, block):
        self.held(block)
        self.counts[block] += 1

    def free(self, block):
        self.held(block)
        self.counts[block] -= 1
        if not self.counts[block]:
            del self.counts[block]
            self.put(block)

    def ref_count(self, block):
        if not 0 <= block < self.num_blocks:
            raise BlockNotAllocated(block)
        return self.counts.get(block, 0)

    def allocate(self):
        if len(self.counts) == self.num_blocks:
            raise OutOfBlocks
        block = self.take()
        self.counts[block] = 1
        return block

    def copy_on_write(self, block):
        self.held(block)
        if self.counts[block] == 1:
            return block
        copy = self.allocate()
        self.counts[block] -= 1
        return copy

    def held(self, block):
        if block not in self.counts:
            raise BlockNotAllocated(block)

    @property
    def num_free(self):
        return self.num_blocks - len(self.counts)
"""
HEAP = (
    COMMON
    + """
import heapq


class BlockAllocator(Common):
    def start(self):
        self.heap = [-block for block in range(self.num_blocks)]
        heapq.heapify(self.heap)

    def take(self):
        return -heapq.heappop(self.heap)

    def put(self, block):
        heapq.heappush(self.heap, -block)
"""
)

SEEDED = seeded({"the reference": REFERENCE, "a heap, highest block first": HEAP}, BUGS)
