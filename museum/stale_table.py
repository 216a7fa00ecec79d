"""Exhibit 3 of the bug museum: two requests compute the same prompt, and one of them reads a third one's tokens.

A block table that is asked to exchange a block for another with the same content. Something is wrong with it:
docs/museum/stale_table.md.

    minipaged grade block-table museum/stale_table.py --no-model
"""


class BlockTable:
    """The blocks of one sequence, and how many of their slots are filled."""

    def __init__(self, block_size, allocator):
        if block_size < 1:
            raise ValueError(f"a block has at least one slot, not {block_size}")
        self._block_size = block_size
        self._allocator = allocator
        self._held = ()
        self._num_tokens = 0

    @property
    def blocks(self):
        return list(self._held)

    @property
    def num_tokens(self):
        return self._num_tokens

    def blocks_needed(self, num_new_tokens):
        if num_new_tokens < 0:
            raise ValueError(f"cannot append {num_new_tokens} tokens")
        in_all = self._blocks_for(self._num_tokens + num_new_tokens)
        return in_all - len(self._held) + self._must_copy(num_new_tokens)

    def append(self, num_new_tokens):
        needed, copies = self.blocks_needed(num_new_tokens), self._must_copy(num_new_tokens)
        fresh = list(self._allocator.allocate_many(needed))  # all of them, or an error and none
        pairs = []
        if copies:
            *first, last = self._held
            self._held = (*first, fresh[0])
            self._allocator.free(last)
            pairs = [(last, fresh.pop(0))]
        self._held += tuple(fresh)
        self._num_tokens += num_new_tokens
        return pairs

    def adopt(self, blocks):
        if self._held:
            raise ValueError("the table is not empty")
        self._allocator.share_many(blocks)
        self._held = tuple(blocks)
        self._num_tokens = len(self._held) * self._block_size

    def fork(self):
        child = BlockTable(self._block_size, self._allocator)
        child.adopt(self._held)
        child._num_tokens = self._num_tokens
        return child

    def trim(self, num_tokens):
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"cannot keep {num_tokens} of {self._num_tokens} tokens")
        kept = self._blocks_for(num_tokens)
        self._allocator.free_many(reversed(self._held[kept:]))
        self._held, self._num_tokens = self._held[:kept], num_tokens

    def replace(self, logical_block, block):
        own = self._held[logical_block]
        self._allocator.share(block)
        self._allocator.free(own)  # computed twice: one of the two is enough

    def relocate(self, blocks, allocator):
        self._allocator.free_many(reversed(self._held))
        self._held, self._allocator = tuple(blocks), allocator

    def slot_mapping(self, start, stop):
        if not 0 <= start <= stop <= self._num_tokens:
            raise ValueError(f"positions {start} to {stop} do not all have slots")
        places = (divmod(position, self._block_size) for position in range(start, stop))
        return [self._held[logical] * self._block_size + offset for logical, offset in places]

    def _blocks_for(self, num_tokens):
        return -(-num_tokens // self._block_size)

    def _must_copy(self, num_new_tokens):
        """Whether the next token goes into a block that is partly filled and held by others too."""
        if num_new_tokens == 0 or self._num_tokens % self._block_size == 0:
            return False
        return self._allocator.ref_count(self._held[-1]) > 1
