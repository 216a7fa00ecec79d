"""Block tables in the CPU's memory: the functions of `gpu/block_table.py`, in torch and NumPy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def edit_tables(tables: Tensor, edits: Tensor) -> None:
    """See `minipaged.fast.kernels`."""
    rows, logical, physical = edits.unbind(1)
    tables[rows, logical] = physical


def fork_tables(tables: Tensor, forks: Tensor) -> None:
    """See `minipaged.fast.kernels`."""
    memory = tables.numpy()  # the same memory: NumPy has less overhead for a few numbers
    for parent, child, count in forks.tolist():
        memory[child, :count] = memory[parent, :count]


def slot_mapping(tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """See `minipaged.fast.kernels`."""
    logical, offset = np.divmod(positions.numpy(), np.int32(block_size))
    return torch.from_numpy(tables.numpy()[rows.numpy(), logical] * np.int32(block_size) + offset)


def advance_decode(
    tables: Tensor, rows: Tensor, positions: Tensor, slots: Tensor, context_lens: Tensor, block_size: int
) -> None:
    """See `minipaged.fast.kernels`."""
    positions += positions >= -1
    torch.clamp(positions + 1, min=0, out=context_lens)
    real = positions >= 0  # [n]
    slots.fill_(-1)
    slots[real] = slot_mapping(tables, rows[real], positions[real], block_size)
