"""Assignment 2: the block table. Write the methods; everything you need is in handout.md.

minipaged grade block-table starter.py
"""


class BlockTable:
    """Maps the positions of one sequence to slots. Position p is in logical block p // block_size.

    All blocks but the last are full. The table holds one reference on each of its blocks.
    A call that raises changes nothing.
    """

    def __init__(self, block_size, allocator):
        """An empty table over `allocator`'s pool. Raises ValueError when `block_size` is less than 1."""
        raise NotImplementedError

    @property
    def blocks(self):
        """The blocks in logical order, as a list."""
        raise NotImplementedError

    @property
    def num_tokens(self):
        """How many positions have a slot: 0, 1, ... num_tokens - 1."""
        raise NotImplementedError

    def blocks_needed(self, num_new_tokens):
        """How many blocks `append(num_new_tokens)` would take from the pool, a copy included."""
        raise NotImplementedError

    def append(self, num_new_tokens):
        """Slots for so many more tokens, each in a block that only this table holds.

        Returns a list of what has to be copied before the new slots are written: one pair (old block, new block) when
        the last block was partly filled and held by others too; else nothing.
        Raises OutOfBlocks when the pool has too few, and ValueError for a number below 0.
        """
        raise NotImplementedError

    def adopt(self, blocks):
        """Begin this empty table with full blocks that somebody else holds: takes a reference on each.

        Raises BlockNotAllocated when nobody holds one of them, and ValueError when the table is not empty.
        """
        raise NotImplementedError

    def fork(self):
        """Return a second table over the same blocks and positions; all blocks are now shared."""
        raise NotImplementedError

    def trim(self, num_tokens):
        """Keep the first `num_tokens` positions; give back the blocks past them, last first.

        Raises ValueError below 0, and above what the table has.
        """
        raise NotImplementedError

    def replace(self, logical_block, block):
        """From now on `logical_block` is in `block`, which has the same content and which somebody else holds.

        Takes a reference on `block`, gives back the one on the old block. Raises BlockNotAllocated when nobody holds
        `block`.
        """
        raise NotImplementedError

    def relocate(self, blocks, allocator):
        """The same tokens now live in as many `blocks` of another pool, `allocator`'s (swapping).

        The caller has taken this table's references on `blocks`; the table gives back those on its old blocks.
        """
        raise NotImplementedError

    def slot_mapping(self, start, stop):
        """A list of the slots of positions start, ... stop - 1. Raises ValueError where a position has none."""
        raise NotImplementedError
