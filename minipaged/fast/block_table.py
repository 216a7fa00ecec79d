"""The block table of one sequence, and all tables of a batch on the device: the twin of `reference/block_table.py`.

`BlockTable` makes the reference's decisions (paper, section 4.2, Fig. 6; section 4.4, Fig. 8) about one sequence:

    position p  ->  logical block p // block_size  ->  slot = blocks[p // block_size] * block_size + p % block_size

The scheduler queries it for each sequence at each step, and the last block nearly always still has room. That case
takes a few additions here. The allocator is called only when blocks are needed.

`DeviceTables` is the input of the attention kernels: one int32 tensor [max_rows, max_blocks] in the device's memory,
one row for each sequence that holds blocks. It is updated by the differences that a step brings (`steps.StepInput`),
like the runner's mirror: a decoding sequence changes its table once every `block_size` steps, and a fork copies the
parent's row and may replace one entry later. So a step makes at most two calls, whatever the batch size: one copies
parents' rows to children's rows on the device, the other sets single entries.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minipaged import contracts
from minipaged.contracts import BlockAllocator
from minipaged.fast.device import to_device
from minipaged.fast.kernels import BlockTableKernels
from minipaged.steps import CopyPair, StepInput

FEW = 50
"""The number of positions up to which a loop finds the slots faster than NumPy: measured at 50 to 60, x86 server,
Python 3.11."""


class BlockTable(contracts.BlockTable):
    """An array of physical blocks and the number of filled slots."""

    def __init__(self, block_size: int, allocator: BlockAllocator) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a block has at least 1 slot")
        self.block_size = block_size
        self._allocator = allocator
        self._blocks = array("i")
        self._num_tokens = 0

    @property
    def blocks(self) -> array[int]:
        """The physical blocks [num_blocks] in logical order, int32. Keep no view of them: the array grows."""
        return self._blocks

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def blocks_needed(self, num_new_tokens: int) -> int:
        if num_new_tokens < 0:
            raise ValueError(f"cannot append {num_new_tokens} tokens")
        room = len(self._blocks) * self.block_size - self._num_tokens  # free slots of the last block
        beyond = num_new_tokens - room
        new = -(-beyond // self.block_size) if beyond > 0 else 0
        return new + self._writes_into_shared_block(num_new_tokens, room)

    def append(self, num_new_tokens: int) -> list[CopyPair]:
        num_tokens, blocks = self._num_tokens + num_new_tokens, self._blocks
        if (
            self._num_tokens < num_tokens <= len(blocks) * self.block_size
            and self._allocator.ref_count(blocks[-1]) == 1
        ):
            self._num_tokens = num_tokens
            return []
        copies: list[CopyPair] = []
        if needed := self.blocks_needed(num_new_tokens):
            room = len(self._blocks) * self.block_size - self._num_tokens
            copied = self._writes_into_shared_block(num_new_tokens, room)
            new = self._allocator.allocate_many(needed - copied)
            if copied:
                source = self._blocks[-1]
                try:
                    self._blocks[-1] = self._allocator.copy_on_write(source)
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
        return child

    def trim(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"cannot trim to {num_tokens} tokens; the table holds {self._num_tokens}")
        kept = -(-num_tokens // self.block_size)  # rounded up
        given_back = self._blocks[kept:]
        given_back.reverse()  # the last block first
        self._allocator.free_many(given_back)
        del self._blocks[kept:]
        self._num_tokens = num_tokens

    def replace(self, logical_block: int, block: int) -> None:
        if not 0 <= logical_block < len(self._blocks):
            raise ValueError(f"there is no logical block {logical_block}; the table holds {len(self._blocks)} blocks")
        old = self._blocks[logical_block]
        self._allocator.share(block)
        self._blocks[logical_block] = block
        self._allocator.free(old)

    def relocate(self, blocks: Sequence[int], allocator: BlockAllocator) -> None:
        if len(blocks) != len(self._blocks):
            raise ValueError(f"{len(blocks)} blocks cannot take the place of {len(self._blocks)}")
        self._allocator.free_many(self._blocks[::-1])
        self._blocks = array("i", blocks)
        self._allocator = allocator

    def slot_mapping(self, start: int, stop: int) -> Sequence[int]:
        """The slots of positions start .. stop - 1: a list if they are few, else an array("q")."""
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

    def _writes_into_shared_block(self, num_new_tokens: int, room: int) -> bool:
        """Whether the next tokens go into a last block that is shared with other tables. `room`: its number of free
        slots."""
        return num_new_tokens > 0 and room > 0 and self._allocator.ref_count(self._blocks[-1]) > 1


class DeviceTables:
    """The block tables of up to `max_rows` sequences, with up to `max_blocks` blocks each, on `device`.

    The tensor never moves, so a captured CUDA graph may read it. A sequence keeps its row from its first block to its
    last. With twice as many rows as sequences in a batch, the children of a beam search can begin while their parents
    still have rows. Each lane of steps has `max_rows` rows of its own, because a sequence that changes its lane frees
    its old row only with the next step of the old lane.
    """

    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        device: torch.device | str,
        kernels: BlockTableKernels,
        num_lanes: int = 1,
        num_groups: int = 1,
    ) -> None:
        rows = num_lanes * max_rows
        # Each group's tables begin at a multiple of 16 bytes: for other addresses Triton would compile more kernels.
        apart = rows if num_groups == 1 else -(-rows // 4) * 4
        self.tables = torch.full((num_groups * apart, max_blocks), -1, dtype=torch.int32, device=device)
        """[any, max_blocks] int32: all tables of the first group of layers, then all of the next. Entries of a row past
        its table's last block are undefined, and so are holes."""
        self.by_group = self.tables.view(num_groups, apart, max_blocks)
        """These tables by group, [groups, num_lanes * max_rows or more, max_blocks]. A sequence has the same row in
        each."""
        self.max_rows = max_rows
        self._kernels = kernels
        self._num_blocks = [0] * rows  # the number of logical blocks in each row
        self._lanes = [self._empty(lane) for lane in range(num_lanes)]
        self._row_of, self._vacant = self._lanes[0]  # the rows of the latest step's lane

    def _empty(self, lane: int) -> tuple[dict[int, int], list[int]]:
        """Return a lane without sequences: a map from sequence to row, and a stack of the vacant rows."""
        first = lane * self.max_rows
        return {}, list(reversed(range(first, first + self.max_rows)))

    def rows_of(self, sequences: Iterable[int]) -> list[int]:
        """The rows of sequences that hold blocks, in the latest step's lane."""
        return [self._row_of[sequence] for sequence in sequences]

    def apply(self, step: StepInput) -> None:
        """Apply a step's changes to the tables on the device. After an error they are half changed, and a fresh step
        must follow.

        Raises ValueError if more than `max_rows` sequences hold blocks, or if a sequence has more than `max_blocks`
        blocks.
        """
        if step.fresh:
            self._lanes[step.lane] = self._empty(step.lane)
        self._row_of, self._vacant = self._lanes[step.lane]
        if step.forked:
            self._fork([(forked.sequence, forked.parent) for forked in step.forked])
        for ended in step.ended:
            self._vacate(ended)
        changes = [(begun.sequence, 0, begun.blocks) for begun in step.begun]
        changes += step.tables
        if changes:
            self._edit(changes)

    def _fork(self, families: list[tuple[int, int]]) -> None:
        """Give each child a row that begins as a copy of its parent's row. `families`: (child, parent) each."""
        forks: list[tuple[int, int, int]] = []
        for child, parent in families:
            if (row := self._row_of.get(parent)) is not None:
                forks.append((row, self._take_row(child), self._num_blocks[row]))
                self._num_blocks[forks[-1][1]] = self._num_blocks[row]
        if forks:
            groups, rows, _ = self.by_group.shape
            first = np.arange(groups)[:, None, None] * rows * np.array([1, 1, 0])  # [groups, 1, 3]
            every = (first + np.array(forks)).reshape(-1, 3)  # [groups * forks, 3]
            self._kernels.fork_tables(self.tables, self._to_device(every.astype(np.int32)))

    def _edit(self, changes: list[tuple[int, int, tuple[int, ...]]]) -> None:
        """Set the entries of tables. Each change: (sequence, the first entry that changes, the physical blocks from
        there on). Entry i is that of logical block i // groups in group i % groups."""
        groups, all_rows, _ = self.by_group.shape
        rows, first, counts, physical = [], [], [], array("i")
        for sequence, kept, blocks in changes:
            num_blocks = (kept + len(blocks)) // groups
            if num_blocks > self.tables.shape[1]:
                room = self.tables.shape[1]
                raise ValueError(f"a sequence has {num_blocks} blocks; the block tables have room for {room}")
            if not num_blocks:
                self._vacate(sequence)
                continue
            row = self._row_of.get(sequence)
            rows.append(self._take_row(sequence) if row is None else row)
            self._num_blocks[rows[-1]] = num_blocks
            first.append(kept)
            counts.append(len(blocks))
            physical.extend(blocks)
        if physical:
            ends = np.cumsum(counts)
            numbers = np.arange(ends[-1]) - np.repeat(ends - counts - first, counts)  # [entries]
            logical, group = np.divmod(numbers, groups)  # [entries] each
            places = np.repeat(rows, counts) + group * all_rows  # [entries], rows of `tables`
            edits = np.stack([places, logical, np.array(physical)], axis=1)  # [entries, 3]
            self._kernels.edit_tables(self.tables, self._to_device(edits.astype(np.int32)))

    def _take_row(self, sequence: int) -> int:
        if not self._vacant:
            raise ValueError(f"more than {self.max_rows} sequences hold blocks; that is the number of block tables")
        row = self._row_of[sequence] = self._vacant.pop()
        return row

    def _vacate(self, sequence: int) -> None:
        row = self._row_of.pop(sequence, None)
        if row is not None:
            self._vacant.append(row)

    def _to_device(self, numbers: np.ndarray[Any, np.dtype[np.int32]]) -> Tensor:
        return to_device(torch.from_numpy(numbers), self.tables.device)
