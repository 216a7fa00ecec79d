"""Block tables in the machine's own memory, changed and read there: what `gpu/block_table.py` does, by torch.

`tables` is one int32 tensor [num_rows, max_blocks]; a sequence owns a row. What a row holds past its sequence's last
block is left over from its former owners and means nothing. Nothing here checks rows or entries.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def edit_tables(tables: Tensor, edits: Tensor) -> None:
    """Set single entries of many tables: blocks appended, or replaced after a copy-on-write.

    tables: [num_rows, max_blocks] int32. edits: [n, 3] int32: (row, logical block, physical block).
    """
    rows, logical, physical = edits.unbind(1)
    tables[rows, logical] = physical


def fork_tables(tables: Tensor, forks: Tensor) -> None:
    """Begin child tables with the leading entries of their parents': parallel sampling and beam search.

    tables: [num_rows, max_blocks] int32. forks: [n, 3] int32: (parent row, child row, number of entries). No child's
    row may be a parent's row too, or come twice.
    """
    memory = tables.numpy()  # the same memory: for a few numbers at a time NumPy has less to do before it begins
    for parent, child, count in forks.tolist():
        memory[child, :count] = memory[parent, :count]


def slot_mapping(tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The slots of n tokens: of position `positions[i]` in the sequence that owns row `rows[i]`.

    tables: [num_rows, max_blocks] int32. rows, positions: [n] int32. Returns [n] int32.
    """
    logical, offset = np.divmod(positions.numpy(), np.int32(block_size))
    return torch.from_numpy(tables.numpy()[rows.numpy(), logical] * np.int32(block_size) + offset)
