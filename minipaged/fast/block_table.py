"""The block table, and all tables of a batch on the device: the twin of `reference/block_table.py`.

`BlockTable` makes the reference's decisions (paper, section 4.2, Fig. 6; section 4.4, Fig. 8) about one sequence:

    position p  ->  logical block p // block_size  ->  slot = blocks[p // block_size] * block_size + p % block_size

It is asked a few things for each sequence at each step, and nearly always the answer is that the last block still has
room. That case takes a few additions here; the allocator is asked for blocks only where blocks are needed.

`DeviceTables` is what the attention kernels read: one int32 tensor [max_rows, max_blocks] in the device's memory, one
row for each sequence, kept up to date by sending what changed. A decoding sequence changes its table once in
`block_size` steps, and a fork is the parent's row with, later, one entry replaced. So `sync` makes at most two calls,
for a batch of any size: one copies rows of parents to rows of children on the device, one sets single entries.

Who knows what: `DeviceTables` keeps a copy on the host of what each row of the device holds, whoever wrote it. Only
differences from it are sent, and what a row may be begun with is read from it. So whatever a table says about itself
can only save work: `changed_from`, entries before which agree with its row; and `row`, which for a table without a row
names one that began like it (that of the table it was forked from), if nobody has overwritten that since.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minipaged import contracts
from minipaged.contracts import BlockAllocator
from minipaged.fast.kernels import BlockTableKernels
from minipaged.fast.kv_cache import to_device
from minipaged.steps import CopyPair

NO_ROW = -1

FEW = 50
"""Positions up to which a loop finds the slots sooner than NumPy: measured at 50 to 60, x86 server, Python 3.11."""


class BlockTable(contracts.BlockTable):
    """An array of physical blocks, the number of filled slots, and where the device's copy stands."""

    def __init__(self, block_size: int, allocator: BlockAllocator) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a block has at least 1 slot")
        self.block_size = block_size
        self._allocator = allocator
        self._blocks = array("i")
        self._num_tokens = 0
        self.mirror: DeviceTables | None = None
        """Who keeps a row for this table."""
        self.row = NO_ROW
        """That row. Without a mirror: a row that may begin with the same blocks."""
        self.changed_from = 0
        """The mirror has seen the blocks before this one as they are now. All of them: nothing has changed."""

    @property
    def blocks(self) -> array[int]:
        """The physical blocks [num_blocks] in logical order, int32. No view of them may be kept: the array grows."""
        return self._blocks

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def blocks_needed(self, num_new_tokens: int) -> int:
        if num_new_tokens < 0:
            raise ValueError(f"cannot append {num_new_tokens} tokens")
        room = len(self._blocks) * self.block_size - self._num_tokens  # slots of the last block that are not filled
        beyond = num_new_tokens - room
        new = -(-beyond // self.block_size) if beyond > 0 else 0
        return new + self._writes_into_shared_block(num_new_tokens, room)

    def append(self, num_new_tokens: int) -> list[CopyPair]:
        copies: list[CopyPair] = []
        if needed := self.blocks_needed(num_new_tokens):
            room = len(self._blocks) * self.block_size - self._num_tokens
            copied = self._writes_into_shared_block(num_new_tokens, room)
            new = self._allocator.allocate_many(needed - copied)
            if copied:
                source = self._blocks[-1]
                try:
                    self._set(len(self._blocks) - 1, self._allocator.copy_on_write(source))
                except BaseException:
                    self._allocator.free_many(reversed(new))
                    raise
                copies.append((source, self._blocks[-1]))
            self._blocks.extend(new)
        self._num_tokens += num_new_tokens
        return copies

    def adopt(self, blocks: Sequence[int]) -> None:
        if self._blocks:
            raise ValueError(f"only an empty table can adopt blocks; this one holds {len(self._blocks)}")
        self._allocator.share_many(blocks)
        self._blocks = array("i", blocks)
        self._num_tokens = len(blocks) * self.block_size

    def fork(self) -> BlockTable:
        child = BlockTable(self.block_size, self._allocator)
        child.adopt(self._blocks)
        child._num_tokens = self._num_tokens  # the last block may be partly filled
        child.row = self.row
        return child

    def trim(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"cannot trim to {num_tokens} tokens; the table holds {self._num_tokens}")
        kept = -(-num_tokens // self.block_size)  # rounded up
        given_back = self._blocks[kept:]
        given_back.reverse()  # the last first
        self._allocator.free_many(given_back)
        del self._blocks[kept:]
        self._num_tokens = num_tokens
        self.changed_from = min(self.changed_from, kept)

    def replace(self, logical_block: int, block: int) -> None:
        if not 0 <= logical_block < len(self._blocks):
            raise ValueError(f"there is no logical block {logical_block}; the table holds {len(self._blocks)} blocks")
        old = self._blocks[logical_block]
        self._allocator.share(block)
        self._set(logical_block, block)
        self._allocator.free(old)

    def relocate(self, blocks: Sequence[int], allocator: BlockAllocator) -> None:
        if len(blocks) != len(self._blocks):
            raise ValueError(f"{len(blocks)} blocks cannot take the place of {len(self._blocks)}")
        self._allocator.free_many(self._blocks[::-1])
        self._blocks = array("i", blocks)
        self._allocator = allocator
        self.changed_from = 0

    def slot_mapping(self, start: int, stop: int) -> Sequence[int]:
        """The slots of positions start .. stop - 1: a list where they are few, else an array("q")."""
        if not 0 <= start <= stop <= self._num_tokens:
            raise ValueError(f"positions {start} to {stop} are not all within the table's {self._num_tokens} tokens")
        block_size, blocks = self.block_size, self._blocks
        if stop - start == 1:  # decoding
            return [blocks[start // block_size] * block_size + start % block_size]
        if stop - start <= FEW:
            return [blocks[p // block_size] * block_size + p % block_size for p in range(start, stop)]
        first = start // block_size
        touched = np.array(blocks[first : -(-stop // block_size)], np.int64)  # [logical blocks]
        slots = touched[:, None] * block_size + np.arange(block_size)  # [logical blocks, block_size]
        offset = first * block_size
        return array("q", slots.reshape(-1)[start - offset : stop - offset].tobytes())

    def _set(self, logical_block: int, block: int) -> None:
        self._blocks[logical_block] = block
        self.changed_from = min(self.changed_from, logical_block)

    def _writes_into_shared_block(self, num_new_tokens: int, room: int) -> bool:
        """Whether the next tokens go into a last block that has `room` left and is held by others too."""
        return num_new_tokens > 0 and room > 0 and self._allocator.ref_count(self._blocks[-1]) > 1


class DeviceTables:
    """The tables of up to `max_rows` sequences at once, of up to `max_blocks` blocks each, on `device`.

    The tensor stays where it is for good, so that a captured CUDA graph may read it. A table keeps its row as long as
    it lives; but when rows run out, those of tables that are not in the batch (waiting, or swapped out) are taken from
    them. Twice as many rows as sequences in a batch let the children of a beam search begin beside their parents.
    """

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device | str, kernels: BlockTableKernels) -> None:
        self.tables = torch.full((max_rows, max_blocks), -1, dtype=torch.int32, device=device)
        """[max_rows, max_blocks] int32. What a row holds past its table's last block means nothing."""
        self._held = np.full((max_rows, max_blocks), -1, np.int32)  # what `tables` holds, on the host
        self._kernels = kernels
        self._owners: list[weakref.ref[BlockTable] | None] = [None] * max_rows
        self._vacant = list(reversed(range(max_rows)))  # some of the rows that belong to nobody; a stack

    def sync(self, batch: Sequence[BlockTable]) -> list[int]:
        """Bring the device up to date with the tables of a batch, each of which occurs once. Returns their rows.

        Raises ValueError when they are more than `max_rows`, or one has more than `max_blocks` blocks.
        """
        # Three short loops, because they are run over all sequences at each step, and mostly there is nothing to do.
        if new := [table for table in batch if table.mirror is not self]:
            self._begin(new, batch)
        if changed := [table for table in batch if table.changed_from < len(table._blocks)]:
            self._edit(changed)
        return [table.row for table in batch]

    def _begin(self, new: list[BlockTable], batch: Sequence[BlockTable]) -> None:
        """A row for each new table; those that were forked begin with a copy of their parent's."""
        rows = self._take_rows(new, batch)
        overwritten = set(rows)
        forks: list[tuple[int, int, int]] = []
        for table, row in zip(new, rows, strict=True):
            parent, count = table.row, min(len(table._blocks), self._held.shape[1])
            table.mirror, table.row, table.changed_from = self, row, 0
            self._owners[row] = weakref.ref(table)
            # All forks are made at the same time: none can begin with what another leaves.
            known = 0 <= parent < len(self._owners) and parent not in overwritten
            if known and count and self._held[parent, 0] == table._blocks[0]:
                forks.append((parent, row, count))
        if forks:
            for _, row, count in forks:
                self._held[row, :count] = -1  # unknown, should the copy not be made
            self._kernels.fork_tables(self.tables, self._to_device(np.array(forks, np.int32)))
            for parent, row, count in forks:
                self._held[row, :count] = self._held[parent, :count]

    def _take_rows(self, new: list[BlockTable], batch: Sequence[BlockTable]) -> list[int]:
        """As many rows as there are new tables, now nobody's."""
        if len(batch) > len(self._owners):
            raise ValueError(f"{len(batch)} sequences in one batch; there are block tables for {len(self._owners)}")
        if len(self._vacant) < len(new):
            parents = {table.row for table in new}
            self._vacant = [row for row in range(len(self._owners)) if self._owner(row) is None]
            self._vacant.sort(key=lambda row: row not in parents)  # rows to copy from are overwritten last
        if (missing := len(new) - len(self._vacant)) > 0:
            staying = {table.row for table in batch if table.mirror is self}
            absent = (owner for row in range(len(self._owners)) if row not in staying and (owner := self._owner(row)))
            for owner in list(absent)[:missing]:
                self._vacant.append(owner.row)
                owner.mirror = None
        return [self._vacant.pop() for _ in new]

    def _owner(self, row: int) -> BlockTable | None:
        """The table that the row belongs to, if it is still there."""
        reference = self._owners[row]
        table = reference() if reference else None
        return table if table is not None and table.mirror is self and table.row == row else None

    def _edit(self, changed: list[BlockTable]) -> None:
        """Send those entries of the changed tables that differ from what the device holds."""
        longest = max(len(table._blocks) for table in changed)
        if longest > self._held.shape[1]:
            raise ValueError(f"a sequence has {longest} blocks; the block tables have room for {self._held.shape[1]}")
        physical, counts, first = array("i"), [], []
        for table in changed:
            physical.extend(table._blocks[table.changed_from :])
            counts.append(len(table._blocks) - table.changed_from)
            first.append(table.changed_from)
        ends = np.cumsum(counts)
        rows = np.repeat([table.row for table in changed], counts)  # [entries], and so are the others
        logical = np.arange(ends[-1]) - np.repeat(ends - counts - first, counts)
        edits = np.stack([rows, logical, np.array(physical)], axis=1).astype(np.int32)  # [entries, 3]
        edits = edits[self._held[rows, logical] != edits[:, 2]]
        if len(edits):
            self._held[edits[:, 0], edits[:, 1]] = -1  # unknown, should they not be made
            self._kernels.edit_tables(self.tables, self._to_device(edits))
            self._held[edits[:, 0], edits[:, 1]] = edits[:, 2]
        for table in changed:
            table.changed_from = len(table._blocks)

    def _to_device(self, numbers: np.ndarray[Any, np.dtype[np.int32]]) -> Tensor:
        return to_device(torch.from_numpy(numbers), self.tables.device)
