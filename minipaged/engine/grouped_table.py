"""The block table of a sequence whose model has several groups of layers, some of them with a window.

The layers of a group see the same tokens: all tokens up to the current one, or the last `window` of these. Each group
has a block table of its own, over the one pool of equal blocks. A block of group g holds the K/V of `block_size` tokens
in the layers of g, and in no others:

    window 4, block size 2, eight tokens; the next one, at position 8, sees positions 5 to 8

    logical block                      0     1     2     3
    tokens                            0 1   2 3   4 5   6 7
    group 0 (layers that see all)       7     2     5     0
    group 1 (layers with the window)    -     -     4     6      two blocks were given back: holes

    entries:   7 -   2 -   5 4   0 6      what a runner gets: all groups' entries of a logical block, then the next

A runner takes every G-th entry from the g-th on for layers of group g (`entries[g::G]`). It gets no notice when a block
is given back. No layer reads that entry again, so it does not matter which block number the runner still has there.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipaged.contracts import BlockAllocator, BlockTable
from minipaged.engine.cached_blocks import Node
from minipaged.events import HOLE
from minipaged.steps import CopyPair


def first_seen(window: int | None, position: int) -> int:
    """The first position that the token at `position` sees in a layer with this window: a window of w is the token
    itself and w - 1 before it."""
    return 0 if window is None else max(0, position - window + 1)


class GroupedTable(BlockTable):
    """A block table for each group of layers. All have the same number of tokens.

    `windows`: the window of each group; None: its layers see everything.
    """

    def __init__(self, block_size: int, allocator: BlockAllocator, windows: Sequence[int | None]) -> None:
        self._block_size = block_size
        self._allocator = allocator
        self._windows = windows
        self._entries: list[int] = []
        self._num_tokens = 0
        self._given_back = [0] * len(windows)  # the number of holes in each group, all at its beginning
        self.found: list[Node] = []
        """What the last look into the prefix cache found for its sequence, while that waited."""

    @property
    def blocks(self) -> list[int]:
        """The blocks that the table holds, in the order of its entries."""
        return [block for block in self._entries if block != HOLE]

    @property
    def entries(self) -> Sequence[int]:
        """The table as a runner gets it, with a HOLE for each block that was given back."""
        return self._entries

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def num_groups(self) -> int:
        return len(self._windows)

    @property
    def num_blocks(self) -> int:
        return len(self._entries) - sum(self._given_back)

    @property
    def holes(self) -> Sequence[int]:
        """The number of holes in each group."""
        return self._given_back

    def blocks_needed(self, num_new_tokens: int) -> int:
        new = self._entries_for(self._num_tokens + num_new_tokens) - len(self._entries)
        return new + len(self._shared_ends(num_new_tokens))

    def append(self, num_new_tokens: int) -> list[CopyPair]:
        shared = self._shared_ends(num_new_tokens)
        needed = self.blocks_needed(num_new_tokens)
        new = list(self._allocator.allocate_many(needed))
        sources = [self._entries[i] for i in shared]
        try:
            self._allocator.free_many(sources)  # others hold them too, so they stay as they are
        except BaseException:
            self._allocator.free_many(reversed(new))
            raise
        for i in shared:
            self._entries[i] = new.pop(0)
        self._entries += new
        self._num_tokens += num_new_tokens
        return [(source, self._entries[i]) for source, i in zip(sources, shared, strict=True)]

    def adopt(self, blocks: Sequence[int]) -> None:
        """Begin this empty table with full blocks: `blocks` are its entries, with holes at the beginning of groups."""
        if self._entries:
            raise ValueError(f"only an empty table can adopt blocks; this one holds {len(self._entries)}")
        self._allocator.share_many(block for block in blocks if block != HOLE)
        self._entries = list(blocks)
        self._given_back = [self._entries[g :: len(self._windows)].count(HOLE) for g in range(len(self._windows))]
        self._num_tokens = len(blocks) // len(self._windows) * self._block_size

    def fork(self) -> GroupedTable:
        child = GroupedTable(self._block_size, self._allocator, self._windows)
        child.adopt(self._entries)
        child._num_tokens = self._num_tokens  # the last blocks may be partly filled
        return child

    def trim(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"cannot trim to {num_tokens} tokens; the table holds {self._num_tokens}")
        kept = self._entries_for(num_tokens)
        self._allocator.free_many(block for block in reversed(self._entries[kept:]) if block != HOLE)
        del self._entries[kept:]
        self._given_back = [min(holes, kept // len(self._windows)) for holes in self._given_back]
        self._num_tokens = num_tokens

    def replace(self, logical_block: int, block: int) -> None:
        """Replace entry number `logical_block` by `block`, which has the same content in the layers of its group."""
        old = self._entries[logical_block]
        self._allocator.share(block)
        self._entries[logical_block] = block
        self._allocator.free(old)

    def relocate(self, blocks: Sequence[int], allocator: BlockAllocator) -> None:
        """Use `blocks` of another pool in place of the blocks that the table holds; holes stay."""
        held = self.blocks
        if len(blocks) != len(held):
            raise ValueError(f"{len(blocks)} blocks cannot take the place of {len(held)}")
        self._allocator.free_many(reversed(held))
        others = iter(blocks)
        self._entries = [HOLE if block == HOLE else next(others) for block in self._entries]
        self._allocator = allocator

    def slot_mapping(self, start: int, stop: int) -> list[int]:
        """The slots of positions start to stop - 1: those of group 0, then those of group 1, and so on."""
        if not 0 <= start <= stop <= self._num_tokens:
            raise ValueError(f"positions {start} to {stop} are not all within the table's {self._num_tokens} tokens")
        size, groups = self._block_size, len(self._windows)
        return [
            self._entries[p // size * groups + group] * size + p % size
            for group in range(groups)
            for p in range(start, stop)
        ]

    def give_back(self, position: int) -> list[tuple[int, int]]:
        """Give back the blocks that the token at `position`, and so every later one, does not see. Returns them, each
        with the index of its entry, which is a hole now: (entry, block)."""
        groups, passed = len(self._windows), list[tuple[int, int]]()
        for group, window in enumerate(self._windows):
            first = first_seen(window, position) // self._block_size
            entries = range(self._given_back[group] * groups + group, first * groups, groups)
            passed += [(i, self._entries[i]) for i in entries]
        self._allocator.free_many(block for _, block in passed)
        for i, _ in passed:
            self._entries[i] = HOLE
            self._given_back[i % groups] += 1
        return passed

    def _entries_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size) * len(self._windows)

    def _shared_ends(self, num_new_tokens: int) -> list[int]:
        """The entries of partly filled last blocks that others hold too, if new tokens are written into them."""
        if not num_new_tokens or self._num_tokens % self._block_size == 0:
            return []
        ends = range(len(self._entries) - len(self._windows), len(self._entries))
        return [i for i in ends if self._allocator.ref_count(self._entries[i]) > 1]
