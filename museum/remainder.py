"""Exhibit 2 of the bug museum: a block is needed when the length leaves a remainder of 1. Or is it?

A block table whose first append is the prompt; after it, a new block is taken whenever a remainder says so. Something
is wrong with it: docs/museum/remainder.md.

    minipaged grade block-table museum/remainder.py --no-model
"""

from minipaged import OutOfBlocks


class BlockTable:
    """A list of blocks, and how many of their slots are filled."""

    def __init__(self, block_size, allocator):
        if block_size < 1:
            raise ValueError(f"a block has at least one slot, not {block_size}")
        self._block_size = block_size
        self._allocator = allocator
        self._blocks = []
        self._num_tokens = 0

    @property
    def blocks(self):
        return self._blocks

    @property
    def num_tokens(self):
        return self._num_tokens

    def blocks_needed(self, num_new_tokens):
        if num_new_tokens < 0:
            raise ValueError(f"cannot append {num_new_tokens} tokens")
        return self._new_blocks(num_new_tokens) + self._copies(num_new_tokens)

    def append(self, num_new_tokens):
        if self.blocks_needed(num_new_tokens) > self._allocator.num_free:
            raise OutOfBlocks("too few blocks are free")
        pairs = []
        if self._copies(num_new_tokens):
            shared = self._blocks[-1]
            self._blocks[-1] = self._allocator.copy_on_write(shared)
            pairs = [(shared, self._blocks[-1])]
        for _ in range(self._new_blocks(num_new_tokens)):
            self._blocks.append(self._allocator.allocate())
        self._num_tokens += num_new_tokens
        return pairs

    def _new_blocks(self, num_new_tokens):
        """How many blocks so many more tokens begin."""
        if not self._blocks:
            return -(-num_new_tokens // self._block_size)  # the prompt: rounded up
        lengths = range(self._num_tokens, self._num_tokens + num_new_tokens)
        return sum(length % self._block_size == 1 for length in lengths)

    def _copies(self, num_new_tokens):
        """1 where the next token goes into a block that is partly filled and held by others too."""
        partly_filled = self._num_tokens % self._block_size != 0
        return int(num_new_tokens > 0 and partly_filled and self._allocator.ref_count(self._blocks[-1]) > 1)

    def adopt(self, blocks):
        if self._blocks:
            raise ValueError("the table is not empty")
        self._allocator.share_many(blocks)
        self._blocks = list(blocks)
        self._num_tokens = len(blocks) * self._block_size

    def fork(self):
        child = BlockTable(self._block_size, self._allocator)
        child.adopt(self._blocks)
        child._num_tokens = self._num_tokens
        return child

    def trim(self, num_tokens):
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"cannot keep {num_tokens} of {self._num_tokens} tokens")
        kept = -(-num_tokens // self._block_size)
        self._allocator.free_many(reversed(self._blocks[kept:]))
        del self._blocks[kept:]
        self._num_tokens = num_tokens

    def replace(self, logical_block, block):
        old = self._blocks[logical_block]
        self._allocator.share(block)
        self._blocks[logical_block] = block
        self._allocator.free(old)

    def relocate(self, blocks, allocator):
        self._allocator.free_many(reversed(self._blocks))
        self._blocks = list(blocks)
        self._allocator = allocator

    def slot_mapping(self, start, stop):
        if not 0 <= start <= stop <= self._num_tokens:
            raise ValueError(f"positions {start} to {stop} do not all have slots")
        size = self._block_size
        return [self._blocks[position // size] * size + position % size for position in range(start, stop)]
