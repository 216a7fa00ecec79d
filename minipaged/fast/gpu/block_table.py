"""Block tables in the device's memory, changed and read there (paper, section 4.2, Fig. 6).

The tables of all sequences are one int32 tensor `tables` [num_rows, max_blocks]; each sequence owns a row. Entries of a
row past its sequence's last block are leftovers of a former owner and have no meaning. Sending all tables at each step
would take num_rows * max_blocks numbers. Sending the changes takes at most one entry for each sequence that began a
block:

    edit_tables      (row, logical block, physical block) for each entry that is new or replaced
    fork_tables      (parent row, child row, entries) for each sequence forked: its row is copied on the device
    slot_mapping     the slots of any tokens: prefill, chunks and mixed batches
    advance_decode   one token more for each sequence: position, slot and context length of the next step

`advance_decode` makes it possible to replay a captured CUDA graph step after step. It reads and writes fixed buffers,
so the host sends only the edits: for each sequence, in one step out of block_size.

The kernels do not check rows, positions or entries. A wrong one is the caller's error, and makes a kernel read or
overwrite other memory. Slots are int32, so a cache has fewer than 2**31 of them.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 128
"""The edits or tokens of one program: one per thread. The launch takes longer than the work, with any number."""

PIECE = 1024
"""The table entries that a program copies in a fork: more than most sequences have, so that few programs are idle."""


def edit_tables(tables: Tensor, edits: Tensor) -> None:
    """See `minipaged.fast.kernels`. All entries are set at the same time."""
    n = len(edits)
    _edit_tables[(triton.cdiv(n, LANES),)](tables, edits, n, tables.stride(0), LANES=LANES, num_warps=4)


# Triton would recompile a kernel for each n, and for addresses that 16 does or does not divide. Both change from step
# to step (index tensors are often pieces of one buffer), and these kernels gain nothing by it. Nor do they gain by the
# stride of tables, which differs when tables are made for one batch.
@triton.jit(do_not_specialize=["edits", "n", "table_stride"])
def _edit_tables(tables, edits, n, table_stride, LANES: tl.constexpr):
    edit = tl.program_id(0) * LANES + tl.arange(0, LANES)  # [LANES]
    mask = edit < n
    row = tl.load(edits + 3 * edit, mask=mask).to(tl.int64)
    logical = tl.load(edits + 3 * edit + 1, mask=mask)
    physical = tl.load(edits + 3 * edit + 2, mask=mask)
    tl.store(tables + row * table_stride + logical, physical, mask=mask)


def fork_tables(tables: Tensor, forks: Tensor) -> None:
    """See `minipaged.fast.kernels`. All rows are copied at the same time."""
    pieces = triton.cdiv(tables.shape[1], PIECE)
    _fork_tables[len(forks), pieces](tables, forks, tables.stride(0), PIECE=PIECE, num_warps=4)


@triton.jit(do_not_specialize=["forks", "table_stride"])
def _fork_tables(tables, forks, table_stride, PIECE: tl.constexpr):
    """One program per (fork, piece) copies a piece of the parent's row. The host does not know the lengths, so programs
    past the entries to copy do nothing."""
    fork = tl.program_id(0)
    parent = tl.load(forks + 3 * fork).to(tl.int64)
    child = tl.load(forks + 3 * fork + 1).to(tl.int64)
    length = tl.load(forks + 3 * fork + 2)
    logical = tl.program_id(1) * PIECE + tl.arange(0, PIECE)  # [PIECE]
    mask = logical < length
    blocks = tl.load(tables + parent * table_stride + logical, mask=mask)
    tl.store(tables + child * table_stride + logical, blocks, mask=mask)


def slot_mapping(tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """See `minipaged.fast.kernels`."""
    n = len(positions)
    slots = torch.empty_like(positions)
    _slot_mapping[(triton.cdiv(n, LANES),)](
        tables, rows, positions, slots, n, tables.stride(0), BLOCK_SIZE=block_size, LANES=LANES, num_warps=4
    )
    return slots


@triton.jit(do_not_specialize=["rows", "positions", "slots", "n", "table_stride"])
def _slot_mapping(tables, rows, positions, slots, n, table_stride, BLOCK_SIZE: tl.constexpr, LANES: tl.constexpr):
    token = tl.program_id(0) * LANES + tl.arange(0, LANES)  # [LANES]
    mask = token < n
    position = tl.load(positions + token, mask=mask, other=-1)  # -1: past the end
    row = tl.load(rows + token, mask=mask, other=0)
    tl.store(slots + token, _slots(tables, table_stride, row, position, BLOCK_SIZE), mask=mask)


@triton.jit
def _slots(tables, table_stride, row, position, BLOCK_SIZE: tl.constexpr):
    """Return the slots of positions, -1 for a negative position. Only the entries of real positions are read."""
    real = position >= 0
    block = tl.load(tables + row.to(tl.int64) * table_stride + position // BLOCK_SIZE, mask=real, other=0)
    return tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)


def advance_decode(
    tables: Tensor, rows: Tensor, positions: Tensor, slots: Tensor, context_lens: Tensor, block_size: int
) -> None:
    """See `minipaged.fast.kernels`."""
    n = len(positions)
    _advance_decode[(triton.cdiv(n, LANES),)](
        tables, rows, positions, slots, context_lens, n, tables.stride(0),
        BLOCK_SIZE=block_size, LANES=LANES, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "positions", "slots", "context_lens", "n", "table_stride"])
def _advance_decode(
    tables, rows, positions, slots, context_lens, n, table_stride, BLOCK_SIZE: tl.constexpr, LANES: tl.constexpr
):
    sequence = tl.program_id(0) * LANES + tl.arange(0, LANES)  # [LANES]
    mask = sequence < n
    position = tl.load(positions + sequence, mask=mask, other=-2)
    position += (position >= -1).to(tl.int32)
    row = tl.load(rows + sequence, mask=mask, other=0)
    tl.store(positions + sequence, position, mask=mask)
    tl.store(slots + sequence, _slots(tables, table_stride, row, position, BLOCK_SIZE), mask=mask)
    tl.store(context_lens + sequence, tl.maximum(position + 1, 0), mask=mask)
