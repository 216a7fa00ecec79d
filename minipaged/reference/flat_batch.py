"""A batch as arrays: the query tokens of all its sequences lie one after another, as the forward pass takes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minipaged.contracts import Batch, BatchRow
from minipaged.reference.kv_cache import Array


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A batch as arrays: the query tokens of all sequences, one after another."""

    ids: Array  # [tokens]
    positions: Array  # [tokens]
    slots: Array  # [groups, tokens]
    query_start: Array  # [seqs + 1]
    context_lens: Array  # [seqs]
    block_tables: Array  # [groups, seqs, max_blocks], padded with -1
    logit_rows: Array  # [logits], indices of the last query tokens of rows that want them, and of drafted tokens
    prompt_rows: Array  # [prompt tokens], indices of the tokens that predict a next prompt token


def flatten(batch: Batch, block_size: int, num_groups: int = 1) -> FlatBatch:
    """Lay the rows of a batch out one after another. Each group of layers has a block table for each row."""
    query_lens = np.array([len(row.token_ids) for row in batch], dtype=np.int64)  # [seqs]
    first = np.array([row.first_position for row in batch], dtype=np.int64)  # [seqs]
    query_start = np.zeros(len(batch) + 1, dtype=np.int64)  # [seqs + 1]
    np.cumsum(query_lens, out=query_start[1:])
    max_blocks = max((len(row.blocks) for row in batch), default=0) // num_groups
    tables = np.full((len(batch), max_blocks, num_groups), -1, dtype=np.int64)  # [seqs, max_blocks, groups]
    for table, row in zip(tables, batch, strict=True):
        table[: len(row.blocks) // num_groups] = np.reshape(row.blocks, (-1, num_groups))
    rows = np.repeat(np.arange(len(batch)), query_lens)  # [tokens]
    positions = np.arange(query_start[-1]) + np.repeat(first - query_start[:-1], query_lens)  # [tokens]
    blocks = tables[rows, positions // block_size].T  # [groups, tokens]
    return FlatBatch(
        ids=np.array([token for row in batch for token in row.token_ids], dtype=np.int64),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        query_start=query_start,
        context_lens=first + query_lens,
        block_tables=np.moveaxis(tables, 2, 0),
        logit_rows=np.array(
            [i for end, row in zip(query_start[1:], batch, strict=True) for i in _logit_rows(end, row)], dtype=np.int64
        ),
        prompt_rows=np.array(
            [at + i for at, row in zip(query_start, batch, strict=False) for i in range(row.num_prompt_logits)],
            dtype=np.int64,
        ),
    )


def _logit_rows(end: int, row: BatchRow) -> range:
    """The tokens of a row that want logits; its query tokens end before `end`."""
    return range(end - 1 - row.num_drafted, end) if row.wants_logits else range(0)
