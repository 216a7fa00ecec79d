"""Exhibit 5 of the bug museum: a prefix cache that finds the right tokens, and the wrong keys and values.

Full blocks stay known after use, by a chain of hashes: of the hash of the block before and the block's own tokens.
Something is wrong with it: docs/museum/lost_hash.md.

    python museum/lost_hash.py
"""

from collections import OrderedDict

from minipaged.course.museum import try_workloads
from minipaged.engine import block_manager

NO_HASH = 0


class PrefixCache:
    """Holds one reference on each block that it knows. One that nobody else holds is idle."""

    def __init__(self, block_size, allocator):
        self.block_size = block_size
        self._allocator = allocator
        self._block_of = {}  # hash -> block
        self._hash_of = {}  # block -> its hash
        self._tokens_of = {}  # block -> its tokens
        self._idle = OrderedDict()  # the block idle longest comes first

    def match(self, tokens):
        """The known blocks that `tokens` begins with, one token at least left to run; and their number of tokens."""
        found, h = [], NO_HASH
        for end in range(self.block_size, len(tokens), self.block_size):
            own = tuple(tokens[end - self.block_size : end])
            h = hash((h, own))
            block = self._block_of.get(h)
            if self._tokens_of.get(block) != own:  # not known, or another block has the same hash
                break
            found.append(block)
        return found, len(found) * self.block_size

    def reused(self, blocks):
        """A sequence has taken these known blocks."""
        for block in blocks:
            if block in self._idle:
                self._take(block)

    def publish(self, tokens, table, num_published):
        """Make the sequence's full blocks known, from logical block `num_published` on."""
        h = self._hash_of[table.blocks[num_published - 1]] if num_published else NO_HASH
        for logical in range(num_published, len(tokens) // self.block_size):
            tokens_in_block = tuple(tokens[logical * self.block_size : (logical + 1) * self.block_size])
            h = hash((h, tokens_in_block))
            own, known = table.blocks[logical], self._block_of.get(h)
            if self._tokens_of.get(known) != tokens_in_block:
                self._allocator.share(own)
                self._take(own)
                self._block_of[h], self._hash_of[own], self._tokens_of[own] = own, h, tokens_in_block
                yield logical, own, own
            elif known != own:  # computed twice: keep the one that is known
                table.replace(logical, known)
                self.reused([known])
                yield logical, own, known

    def _take(self, block):
        """The block goes to a sequence; what it was before is over."""
        self._idle.pop(block, None)
        self._hash_of[block], self._tokens_of[block] = NO_HASH, ()

    def released(self, blocks):
        """A sequence gave these up: those that nobody else holds are idle from now on."""
        for block in blocks:
            if block in self and self._allocator.ref_count(block) == 1:
                self._idle[block] = None

    def evict(self, num_blocks):
        """Give back the blocks that have been idle longest."""
        evicted = [self._idle.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in evicted:
            self._block_of.pop(self._hash_of.pop(block), None)
            del self._tokens_of[block]
            self._allocator.free(block)
        return evicted

    def hash_of(self, block):
        return self._hash_of[block]

    def redundant(self, block):
        return None  # only full blocks are known

    def __contains__(self, block):
        return block in self._hash_of

    @property
    def blocks(self):
        return self._hash_of.keys()

    @property
    def num_evictable(self):
        return len(self._idle)

    def is_evictable(self, block):
        return block in self._idle


class BlockManager(block_manager.BlockManager):
    """The engine's, with this cache, if it uses one."""

    def __init__(self, *settings):
        super().__init__(*settings)
        if self.prefix_cache:
            self.prefix_cache = PrefixCache(self.block_size, self.allocator)

    def keep_last(self, sequence):
        """Only full blocks are known."""


PARTS = {"memory": BlockManager}

if __name__ == "__main__":
    try_workloads(PARTS)
