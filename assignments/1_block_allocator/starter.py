"""Assignment 1: the block allocator. Write the methods; everything you need is in handout.md.

minipaged grade block-allocator starter.py
"""

from minipaged import BlockNotAllocated, OutOfBlocks  # noqa: F401  (you will raise them)


class BlockAllocator:
    """Hands out the blocks of one pool. A block is a number: 0, 1, ... num_blocks - 1.

    A block is *free* (nobody holds it) or *held*, by one or by several: its reference count says by how many.
    A call that raises changes nothing.
    """

    def __init__(self, num_blocks):
        """A pool of `num_blocks` free blocks. Raises ValueError when `num_blocks` is less than 1."""
        raise NotImplementedError

    @property
    def num_blocks(self):
        """The size of the pool. (A plain attribute will do as well: then delete these three lines.)"""
        raise NotImplementedError

    @property
    def num_free(self):
        """How many blocks are free now. (The same goes for this one.)"""
        raise NotImplementedError

    def allocate(self):
        """Return a block that was free; it has one holder now. Raises OutOfBlocks when none is free."""
        raise NotImplementedError

    def share(self, block):
        """`block` has one holder more. Raises BlockNotAllocated when nobody holds it, or there is no such block."""
        raise NotImplementedError

    def free(self, block):
        """`block` has one holder less; without any it is free. Raises BlockNotAllocated as `share` does."""
        raise NotImplementedError

    def ref_count(self, block):
        """How many hold `block`: 0 when it is free. Raises BlockNotAllocated when there is no such block."""
        raise NotImplementedError

    def copy_on_write(self, block):
        """Return the block to write to, for one holder of `block` that wants to change what is in it.

        When nobody else holds it, that is `block` itself. Otherwise it is a newly allocated block, and `block` has one
        holder less (the caller copies the contents). Raises BlockNotAllocated as `share` does, and OutOfBlocks.
        """
        raise NotImplementedError
