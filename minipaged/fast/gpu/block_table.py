"""Block tables in the device's memory, changed and read there (paper, section 4.2, Fig. 6).

The tables of all sequences are one int32 tensor `tables` [num_rows, max_blocks]; a sequence owns a row. What a row
holds past its sequence's last block is left over from its former owners and means nothing. Sending all tables anew
for each step would be num_rows * max_blocks numbers; sending what changed is at most one entry for each sequence that
began a block:

    edit_tables      (row, logical block, physical block) for each entry that is new or replaced
    fork_tables      (parent row, child row, entries) for each sequence forked: its row is copied on the device
    slot_mapping     the slots of any tokens: prefill, chunks and mixed batches
    advance_decode   one token more for each sequence: position, slot and context length of the next step

`advance_decode` is what lets a captured CUDA graph be replayed step after step: it reads and writes fixed buffers, so
that the host has nothing to send but the edits, one step in block_size for each sequence.

Nothing here checks rows, positions or entries: a wrong one is the caller's fault and reads or overwrites other
memory. Slots are int32, so a cache has fewer than 2**31 of them.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 128
"""Edits or tokens of one program: one a thread. The launch takes longer than the work, whatever this is."""

PIECE = 1024
"""Table entries that one program copies in a fork: more than most sequences have, so that few programs are idle."""


def edit_tables(tables: Tensor, edits: Tensor) -> None:
    """See `minipaged.fast.kernels`. All entries are set at the same time."""
    n = len(edits)
    _edit_tables[(triton.cdiv(n, LANES),)](tables, edits, n, tables.stride(0), LANES=LANES, num_warps=4)


# Triton would compile a kernel anew for each n and each address that 16 divides or does not. Both differ from step to
# step (index tensors are often pieces of one buffer), and these kernels could make no use of it. Nor could they of the
# stride of tables, which is another one where tables are made for one batch.
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
    """Program (fork, piece). Pieces past the entries to copy find nothing to do: lengths are not known on the host."""
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
    position = tl.load(positions + token, mask=mask, other=-1)  # -1: past the last one
    row = tl.load(rows + token, mask=mask, other=0)
    tl.store(slots + token, _slots(tables, table_stride, row, position, BLOCK_SIZE), mask=mask)


@triton.jit
def _slots(tables, table_stride, row, position, BLOCK_SIZE: tl.constexpr):
    """The slots of positions; -1 for a negative one. Entries that nobody asked for are not read."""
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
