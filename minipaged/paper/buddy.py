"""The buddy allocator (Knuth, volume 1, section 2.5) that the paper's baselines use (section 6.1).

It hands out *chunks* of 1, 2, 4, ... adjacent blocks. A chunk starts at a multiple of its size. If only a larger chunk
is free, the allocator splits it into two *buddies*. Two free buddies merge into one chunk again. Requests are rounded
up to a power of two (internal fragmentation), and free blocks may not be adjacent (external fragmentation).
"""

from __future__ import annotations

from minipaged.contracts import BlockAllocator
from minipaged.errors import BlockNotAllocated, OutOfBlocks

LARGEST_TOKENS = 2048
"""The longest sequence of OPT, in tokens. No chunk is larger."""


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


class BuddyAllocator(BlockAllocator):
    """A pool of blocks that is handed out in chunks. All blocks of a chunk share one reference count."""

    def __init__(self, num_blocks: int, largest: int | None = None) -> None:
        """Divide the pool into chunks of `largest` blocks, and the rest into smaller chunks.

        `largest` is a power of two. By default it is the largest one that fits in the pool."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs at least 1")
        self._num_blocks = self._num_free = num_blocks
        self._largest = largest or 1 << (num_blocks.bit_length() - 1)
        self._free: dict[int, set[int]] = {1 << i: set() for i in range(self._largest.bit_length())}  # size -> firsts
        self._first = [-1] * num_blocks  # the first block of each block's chunk; -1 while the block is free
        self._held: dict[int, tuple[int, int]] = {}  # first block -> (size, reference count)
        start, size = 0, self._largest
        while start < num_blocks:
            while start + size > num_blocks:
                size //= 2
            self._free[size].add(start)
            start += size

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """The number of free blocks, adjacent or not."""
        return self._num_free

    def can_take(self, sizes: list[int]) -> bool:
        """Return whether chunks of all these sizes can be allocated at the same time."""
        there = {size: len(firsts) for size, firsts in self._free.items()}
        for size in sorted(sizes, reverse=True):
            cut = size
            while not there.get(cut):
                cut *= 2
                if cut > self._largest:
                    return False
            there[cut] -= 1
            while cut > size:
                cut //= 2
                there[cut] += 1
        return True

    def take(self, size: int) -> list[int]:
        """Allocate a chunk of `size` blocks with reference count 1. `size` is a power of two. Raises OutOfBlocks."""
        cut = size
        while not self._free.get(cut):
            cut *= 2
            if cut > self._largest:
                raise OutOfBlocks(f"no chunk of {size} blocks is free, though {self._num_free} blocks are")
        first = min(self._free[cut])
        self._free[cut].remove(first)
        while cut > size:
            cut //= 2
            self._free[cut].add(first + cut)
        self._held[first] = (size, 1)
        self._num_free -= size
        self._first[first : first + size] = [first] * size
        return list(range(first, first + size))

    def give_back(self, block: int) -> None:
        """Drop one reference to the chunk that contains `block`. A chunk without references is freed, and merges with
        its buddy if that is free."""
        first = self._chunk(block)
        size, count = self._held[first]
        if count > 1:
            self._held[first] = (size, count - 1)
            return
        del self._held[first]
        self._first[first : first + size] = [-1] * size
        self._num_free += size
        while size < self._largest and (buddy := first ^ size) in self._free[size]:
            self._free[size].remove(buddy)
            first, size = min(first, buddy), 2 * size
        self._free[size].add(first)

    def _chunk(self, block: int) -> int:
        if not 0 <= block < self._num_blocks or self._first[block] < 0:
            raise BlockNotAllocated(f"block {block} is not held")
        return self._first[block]

    # --- The interface of every allocator: chunks of one block -------------------------------------

    def allocate(self) -> int:
        return self.take(1)[0]

    def share(self, block: int) -> None:
        first = self._chunk(block)
        size, count = self._held[first]
        self._held[first] = (size, count + 1)

    def free(self, block: int) -> None:
        self.give_back(block)

    def ref_count(self, block: int) -> int:
        if not 0 <= block < self._num_blocks:
            raise BlockNotAllocated(f"there is no block {block}; the pool has {self._num_blocks}")
        return self._held[self._first[block]][1] if self._first[block] >= 0 else 0

    def copy_on_write(self, block: int) -> int:
        if self.ref_count(block) == 1:
            return block
        first = self._chunk(block)
        copy = self.take(1)[0]
        self.give_back(first)
        return copy
