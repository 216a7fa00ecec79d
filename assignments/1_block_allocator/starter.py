"""Assignment 1: the block allocator. Write the methods; everything you need is in handout.md.

minipaged grade block-allocator starter.py
"""

from minipaged import BlockNotAllocated, OutOfBlocks  # noqa: F401  (you will raise them)


class BlockAllocator:
    """Hands out the blocks of one pool. A block is a number: 0, 1, ... num_blocks - 1.

    A block is *free* or *held*. Its reference count is the number of its holders, 0 for a free block.
    A call that raises changes nothing.
    """

    def __init__(self, num_blocks):
        """Make a pool of `num_blocks` free blocks. Raises ValueError when `num_blocks` is less than 1."""
        raise NotImplementedError

    @property
    def num_blocks(self):
        """The size of the pool. (A plain attribute will do as well: then delete these three lines.)"""
        raise NotImplementedError

    @property
    def num_free(self):
        """The number of free blocks. (A plain attribute will do here, too.)"""
        raise NotImplementedError

    def allocate(self):
        """Return a block that was free; it has one holder now. Raises OutOfBlocks when none is free."""
        raise NotImplementedError

    def share(self, block):
        """Add a holder to `block`. Raises BlockNotAllocated when it is free, or there is no such block."""
        raise NotImplementedError

    def free(self, block):
        """Remove a holder from `block`; without any it is free. Raises BlockNotAllocated as `share` does."""
        raise NotImplementedError

    def ref_count(self, block):
        """Return the number of holders of `block`, 0 when it is free. Raises BlockNotAllocated outside the pool."""
        raise NotImplementedError

    def copy_on_write(self, block):
        """Return the block that one holder of `block` may write to, in order to change its contents.

        With one holder it is `block` itself. Otherwise it is a newly allocated block, and `block` loses a holder (the
        caller copies the contents). Raises BlockNotAllocated as `share` does, and OutOfBlocks.
        """
        raise NotImplementedError
