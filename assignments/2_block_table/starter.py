"""Assignment 2: the block table. Write the methods; everything you need is in handout.md.

minipaged grade block-table starter.py
"""


class BlockTable:
    """Maps the positions of one sequence to slots. Position p is in logical block p // block_size.

    All blocks but the last are full. The table holds one reference on each of its blocks.
    A call that raises changes nothing.
    """

    def __init__(self, block_size, allocator):
        """Make an empty table over `allocator`'s pool. Raises ValueError when `block_size` is less than 1."""
        raise NotImplementedError

    @property
    def blocks(self):
        """The blocks in logical order, as a list."""
        raise NotImplementedError

    @property
    def num_tokens(self):
        """The number of positions that have a slot: 0, 1, ... num_tokens - 1."""
        raise NotImplementedError

    def blocks_needed(self, num_new_tokens):
        """Return the number of blocks that `append(num_new_tokens)` would take from the pool, a copy included."""
        raise NotImplementedError

    def append(self, num_new_tokens):
        """Add slots for `num_new_tokens` tokens, each in a block that only this table holds.

        Returns the list of blocks to copy before the new slots are written: one pair (old block, new block) when the
        last block was partly filled and held by others too; else an empty list.
        Raises OutOfBlocks when the pool has too few blocks, and ValueError for a number below 0.
        """
        raise NotImplementedError

    def adopt(self, blocks):
        """Begin this empty table with full blocks that are already held, and take a reference on each.

        Raises BlockNotAllocated when one of them is free, and ValueError when the table is not empty.
        """
        raise NotImplementedError

    def fork(self):
        """Return a second table over the same blocks and positions; all blocks are now shared."""
        raise NotImplementedError

    def trim(self, num_tokens):
        """Keep the first `num_tokens` positions, and free the blocks past them, last first.

        Raises ValueError for a number below 0, or above the table's number of tokens.
        """
        raise NotImplementedError

    def replace(self, logical_block, block):
        """Make `block`, which has the same content and is already held, the block number `logical_block`.

        Takes a reference on `block`, and frees the old block. Raises BlockNotAllocated when `block` is free.
        """
        raise NotImplementedError

    def relocate(self, blocks, allocator):
        """Move the table to `blocks`, the same number of blocks in another pool, `allocator`'s (swapping).

        The caller has already taken this table's references on `blocks`; the table frees its old blocks.
        """
        raise NotImplementedError

    def slot_mapping(self, start, stop):
        """Return a list of the slots of positions start, ... stop - 1. Raises ValueError if a position has none."""
        raise NotImplementedError
