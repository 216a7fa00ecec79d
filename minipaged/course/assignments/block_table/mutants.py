"""Block tables: the reference's, a right one written differently, and seeded bugs."""

from __future__ import annotations

from minipaged.course.grader.mutants import seeded, source_of

REFERENCE = source_of("reference/block_table")

NEW, APPEND, NEEDED = "a new table", "append and slots", "blocks_needed is what append takes"
COPY, SHARE, TRIM = "copy-on-write", "fork, adopt and replace share", "trim gives back, last first"
RELOCATE, ATOMIC = "relocate", "an append that raises changes nothing"
REFUSED = "calls that make no sense are refused"

BUGS = {
    "a block of 0 slots: a table with blocks of 0 slots is made": (NEW, "if block_size < 1:", "if block_size < 0:"),
    "takes a block before it is needed": (
        APPEND,
        "in_all = self._blocks_for(self._num_tokens + num_new_tokens)",
        "in_all = self._blocks_for(self._num_tokens + num_new_tokens + 1)",
    ),
    "block size forgotten in slots: the block number is not multiplied by the block size": (
        APPEND,
        "self._blocks[position // self.block_size] * self.block_size + position",
        "self._blocks[position // self.block_size] + position",
    ),
    "slots of physical, not logical blocks: slots are computed without looking into the table": (
        APPEND,
        "self._blocks[position // self.block_size] * self.block_size",
        "(position // self.block_size) * self.block_size",
    ),
    "copy not in blocks_needed: blocks_needed does not count the copy of a shared block": (
        NEEDED,
        "- len(self._blocks) + self._writes_into_shared_block(num_new_tokens)\n",
        "- len(self._blocks)\n",
    ),
    "never copies: append writes into a block that others hold": (
        COPY,
        "return num_new_tokens > 0 and",
        "return False and",
    ),
    "copies for no tokens: append(0) copies a shared block": (
        NEEDED,
        "return num_new_tokens > 0 and not",
        "return not",
    ),
    "copies the unshared: append copies a block that only this table holds": (
        NEEDED,
        "self._allocator.ref_count(self._blocks[-1]) > 1",
        "True",
    ),
    "copy not told: append does not return the copied pair of blocks": (
        COPY,
        "copies.append((source, self._blocks[-1]))",
        "pass",
    ),
    "fork without references: fork takes no references on the blocks": (
        COPY,
        "child.adopt(self._blocks)",
        "child._blocks = list(self._blocks)",
    ),
    "fork with one list for two: both tables have the same list of blocks": (
        COPY,
        "child.adopt(self._blocks)",
        "child.adopt(self._blocks)\n        child._blocks = self._blocks",
    ),
    "fork forgets a partly filled block: the fork's num_tokens leaves out the last block's tokens": (
        COPY,
        "child._num_tokens = self._num_tokens",
        "pass",
    ),
    "adopt without references: adopt takes no references on the blocks": (
        SHARE,
        "self._allocator.share_many(blocks)",
        "pass",
    ),
    "adopt half, then raise: an adopt that raises keeps references on some of the blocks": (
        REFUSED,
        "self._allocator.share_many(blocks)",
        "for block in blocks:\n            self._allocator.share(block)",
    ),
    "adopt into a table that is not empty": (REFUSED, "if self._blocks:\n", "if False:\n"),
    "trim first first: trim frees the first block first": (
        TRIM,
        "free_many(reversed(self._blocks[kept:]))",
        "free_many(self._blocks[kept:])",
    ),
    "trim gives the last kept one back: trim frees a block that still contains kept tokens": (
        TRIM,
        "kept = self._blocks_for(num_tokens)",
        "kept = num_tokens // self.block_size",
    ),
    "trim gives nothing back: trim frees no blocks": (
        TRIM,
        "self._allocator.free_many(reversed(self._blocks[kept:]))",
        "pass",
    ),
    "trim grows: trim accepts more tokens than the table has": (
        REFUSED,
        "if not 0 <= num_tokens <= self._num_tokens:",
        "if not 0 <= num_tokens:",
    ),
    "replace without a reference: replace takes no reference on the new block": (
        SHARE,
        "self._allocator.share(block)",
        "pass",
    ),
    "replace keeps the old one: replace does not free the old block": (SHARE, "self._allocator.free(old)", "pass"),
    "replace frees first: a replace that raises has already freed the old block": (
        REFUSED,
        "self._allocator.share(block)\n        self._blocks[logical_block] = block\n        self._allocator.free(old)",
        "self._allocator.free(old)\n        self._blocks[logical_block] = block\n        self._allocator.share(block)",
    ),
    "relocate stays with the old allocator: after relocate, blocks still come from the old pool": (
        RELOCATE,
        "        self._allocator = allocator\n\n    def slot",
        "\n    def slot",
    ),
    "relocate keeps the old blocks: relocate does not free the old blocks": (
        RELOCATE,
        "self._allocator.free_many(reversed(self._blocks))\n",
        "pass\n",
    ),
    "append half, then raise: an append that raises keeps the blocks it has already taken": (
        ATOMIC,
        "new = self._allocator.allocate_many(needed - copied)",
        "new = [self._allocator.allocate() for _ in range(self.blocks_needed(num_new_tokens) - copied)]",
    ),
    "no copy to be had, new blocks kept: if the copy fails, the new blocks are not freed": (
        ATOMIC,
        "self._allocator.free_many(reversed(new))",
        "pass",
    ),
    "slots past the end: slot_mapping accepts positions past the last token": (
        REFUSED,
        "if not 0 <= start <= stop <= self._num_tokens:",
        "if not 0 <= start <= stop:",
    ),
    "fewer tokens than none: append accepts a negative number of tokens": (
        REFUSED,
        "if num_new_tokens < 0:",
        "if False:",
    ),
}

UNUSUAL = '''
import numpy as np

from minipaged import OutOfBlocks


class BlockTable:
    """A NumPy row of -1s for a table, blocks taken one at a time, the highest logical block first."""

    def __init__(self, block_size, allocator):
        if block_size < 1:
            raise ValueError(block_size)
        self.size, self.pool, self.num_tokens = block_size, allocator, 0
        self.row = np.full(allocator.num_blocks + 1, -1)

    @property
    def blocks(self):
        return self.row[self.row >= 0]

    def _last(self):
        return (self.num_tokens - 1) // self.size

    def _copies(self, n):
        return n > 0 and self.num_tokens % self.size > 0 and self.pool.ref_count(int(self.row[self._last()])) > 1

    def blocks_needed(self, n):
        return (self.num_tokens + n - 1) // self.size - self._last() + self._copies(n)

    def append(self, n):
        if n < 0:
            raise ValueError(n)
        if self.blocks_needed(n) > self.pool.num_free:
            raise OutOfBlocks
        before, after, pairs = self._last(), (self.num_tokens + n - 1) // self.size, []
        for i in range(after, before, -1):
            self.row[i] = self.pool.allocate()
        if self._copies(n):
            old = int(self.row[before])
            self.row[before] = self.pool.copy_on_write(old)
            pairs.append((old, self.row[before]))
        self.num_tokens += n
        return pairs

    def adopt(self, blocks):
        if self.num_tokens:
            raise ValueError
        self.pool.share_many(blocks)
        self.row[: len(blocks)] = blocks
        self.num_tokens = len(blocks) * self.size

    def fork(self):
        child = BlockTable(self.size, self.pool)
        for block in self.blocks:
            self.pool.share(block)
        child.row, child.num_tokens = self.row.copy(), self.num_tokens
        return child

    def trim(self, n):
        if n < 0 or n > self.num_tokens:
            raise ValueError(n)
        for i in range(self._last(), (n - 1) // self.size, -1):
            self.pool.free(self.row[i])
            self.row[i] = -1
        self.num_tokens = n

    def replace(self, i, block):
        self.pool.share(block)
        self.pool.free(self.row[i])
        self.row[i] = block

    def relocate(self, blocks, allocator):
        self.pool.free_many(block for block in self.blocks)
        self.row = np.full(allocator.num_blocks + 1, -1)
        self.row[: len(blocks)] = blocks
        self.pool = allocator

    def slot_mapping(self, start, stop):
        if start < 0 or stop > self.num_tokens:
            raise ValueError
        at = np.arange(start, stop)
        return self.row[at // self.size] * self.size + at % self.size
'''

SEEDED = seeded({"the reference": REFERENCE, "a NumPy row for a table": UNUSUAL}, BUGS)
