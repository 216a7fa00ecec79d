"""Assignment 10: eviction. Write the methods; everything you need is in handout.md.

minipaged grade eviction starter.py
"""


class Eviction:
    """Decides which block leaves a floor of the cache.

    A block is an int. Its parent is the block before it in the text; the first block of a text has none. Each block in
    the cache lies on one floor: on the device, or on the host.
    """

    def __init__(self, device, host):
        """Make a policy for an empty cache. `device` and `host`: the number of blocks each floor has room for."""
        raise NotImplementedError

    def use(self, block, parent):
        """Note that a request uses this block. From now on it lies on the device, wherever it was before.

        `parent` is None for the first block of a text. A request uses the blocks of its text in order.
        """
        raise NotImplementedError

    def evict(self, floor, pinned):
        """Return the block that leaves `floor`, "device" or "host"; None if no block of the floor may leave.

        A block may leave if it is not in `pinned`, a list, and has no child on the same floor. From the device it goes
        down to the host; from the host it leaves the cache.
        """
        raise NotImplementedError
