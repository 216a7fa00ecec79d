"""Shared reading: which sequences of a batch begin with the same blocks. The twin of `reference/cascade.py`.

The attention kernels may read such blocks once for all of these sequences (`kernels.Shared`). The step's tables alone
decide: a block's reference count is the number of its holders, which may be other sequences.

The tables are compared anew in each step. If no two sequences begin with the same block, that is one comparison of
first blocks (5 µs for 32 sequences); otherwise a few comparisons of arrays (0.1 ms for 32 sequences that share 128
blocks, 0.6 ms for 256 that share 512).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minipaged.fast.kernels import Shared

SharedPrefix = tuple[NDArray[np.intp], int]
"""The members (indices of sequences), and the number of blocks with which all of them begin."""
MOST_SPLITS = 8
"""The number of times in a row that the members of a prefix are split by their next block. Members that part after
that share no more than the prefix. Each split compares the blocks that are left: 256 sequences that part at 256 places
would take 13 ms."""


def shared_prefixes(
    block_tables: Tensor, context_lens: Tensor, block_size: int, rows: Tensor | None = None, least: int = 1
) -> Shared | None:
    """Return the prefixes that sequences share, with their members; None if there are none.

    If some members also share the blocks after a prefix, they get this longer prefix instead where that saves more
    reads. This is done at most `MOST_SPLITS` times in a row.

    block_tables: [num_rows, max_blocks]. context_lens: [seqs]. All on the host. Each sequence has one query, its last
        token. The block of that token is not shared: the step writes into it.
    rows: [seqs], the row that each sequence owns; None: the sequences own all rows, in order.
    least: the fewest tokens that a prefix saves: all members but one need not read it.
    """
    tables, whole = block_tables.numpy(), (context_lens.numpy() - 1) // block_size
    owners = np.arange(len(whole)) if rows is None else rows.numpy()  # [seqs]
    own = -1 - np.arange(len(whole), dtype=np.int32)  # [seqs]: equal to no block, and to no other
    first = np.where(whole > 0, tables[owners, 0], own)  # [seqs]
    if len(set(first.tolist())) == len(first):
        return None
    blocks = tables[owners, : whole.max()]  # [seqs, blocks]
    blocks = np.where(np.arange(blocks.shape[1]) < whole[:, None], blocks, own[:, None])  # [seqs, blocks]
    prefixes = [prefix for part in _split(first, np.arange(len(owners))) for prefix in _best(blocks, part)[1]]
    prefixes = [(members, run) for members, run in prefixes if (len(members) - 1) * run * block_size >= least]
    if not prefixes:
        return None
    starts = np.cumsum([0, *(len(members) for members, _ in prefixes)])
    return Shared(
        torch.from_numpy(np.concatenate([members for members, _ in prefixes]).astype(np.int32)),
        torch.from_numpy(starts.astype(np.int32)),
        torch.tensor([run * block_size for _, run in prefixes], dtype=torch.int32),
    )


def _best(
    blocks: NDArray[np.int32], members: NDArray[np.intp], begin: int = 0, splits: int = MOST_SPLITS
) -> tuple[int, list[SharedPrefix]]:
    """Return the number of blocks that need not be read again, and the prefixes that save them. The members' first
    `begin` blocks are known to be equal."""
    differs = (blocks[members, begin:] != blocks[members[0], begin:]).any(axis=0)  # [blocks left]
    run = begin + (int(differs.argmax()) if differs.any() else len(differs))
    apart, prefixes = 0, list[SharedPrefix]()
    if run < blocks.shape[1] and splits:
        for part in _split(blocks[members, run], members):
            saved, found = _best(blocks, part, run + 1, splits - 1)
            apart, prefixes = apart + saved, prefixes + found
    together = (len(members) - 1) * run
    return (apart, prefixes) if apart > together else (together, [(members, run)])


def _split(block: NDArray[np.int32], members: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    """Yield the members that have the same block, for each block that several have. block: [members]."""
    order = np.argsort(block, kind="stable")
    ends = np.flatnonzero(np.diff(block[order])) + 1
    for part in np.split(members[order], ends):
        if len(part) > 1:
            yield part
