"""A model without weights that checks every read: the content oracle.

Instead of K/V, each slot holds the name of the token prefix that wrote it. Before a row is run, everything its block
table leads to is compared with the tokens that the engine believes the sequence to have: the invariant `content`.
The logits depend on the prefix found in memory and on nothing else, so that a wrong read also shows in the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minipaged.contracts import Batch, BatchRow, BlockMoves, PendingToken, Runner
from minipaged.engine.engine import Engine
from minipaged.errors import Invariant, InvariantViolation

Prefix = int
"""A token prefix, numbered when first seen; 0 is the empty one."""


class Prefixes:
    """Numbers for token prefixes: equal numbers mean equal tokens."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Prefix, int], Prefix] = {}

    def extend(self, prefix: Prefix, token: int) -> Prefix:
        return self._numbers.setdefault((prefix, token), len(self._numbers) + 1)

    def tokens(self, prefix: Prefix) -> list[int]:
        """The tokens that the number stands for."""
        steps, tokens = list(self._numbers), list[int]()
        while prefix:
            prefix, token = steps[prefix - 1]
            tokens.append(token)
        return tokens[::-1]


def fake_logits(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """Logits after `tokens`: arbitrary, but always the same for the same tokens."""
    key = hash(tuple(tokens)) & (2**64 - 1)
    return 2 * np.random.Generator(np.random.Philox(key=key)).standard_normal(vocab_size, dtype=np.float32)


@dataclass(frozen=True)
class GivenRow:
    """A row of a batch, with all that the engine changes copied."""

    tokens_before: list[int]
    token_ids: Sequence[int | PendingToken]
    slots: Sequence[int]
    blocks: list[int]
    wants_logits: bool


@dataclass(frozen=True)
class WrongRead:
    """A slot that does not hold what its reader takes it for."""

    position: int
    block: int
    wanted: list[int]
    """The tokens whose K/V should be there: the sequence's, up to this position."""
    found: list[int] | None
    """The tokens whose K/V are there; None for memory that nobody wrote."""


class ContentRunner(Runner):
    """Runs plans on memory that remembers who wrote it."""

    def __init__(
        self, num_blocks: int, num_swap_blocks: int, block_size: int, vocab_size: int, swap_is_cheap: bool = True
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.swap_is_cheap = swap_is_cheap
        self.prefixes = Prefixes()
        self.device: list[list[Prefix | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list[Prefix | None]] = [[None] * block_size for _ in range(num_swap_blocks)]
        self.engine: Engine | None = None
        """Set by the test: where the truth about the sequences' tokens comes from."""

    def move(self, moves: BlockMoves) -> None:
        for device, host in moves.swap_out:
            self.host[host] = list(self.device[device])
        for block in moves.poison:
            self.device[block] = [None] * self.block_size
        for host, device in moves.swap_in:
            self.device[device] = list(self.host[host])
            self.host[host] = [None] * self.block_size
        assert not {source for source, _ in moves.copy} & {destination for _, destination in moves.copy}
        for source, destination in moves.copy:
            self.device[destination] = list(self.device[source])

    def forward(self, batch: Batch) -> Any:
        return self.run([self.take(row) for row in batch])

    def take(self, row: BatchRow) -> GivenRow:
        """What there is to know of a row when the batch is handed over."""
        return GivenRow(self._tokens_before(row), row.token_ids, row.slots, list(row.table.blocks), row.wants_logits)

    def run(self, rows: Sequence[GivenRow]) -> np.ndarray:
        """The forward pass; nothing but memory and the tokens being chosen may have changed since."""
        tokens = [[*row.tokens_before, *map(self.token_id, row.token_ids)] for row in rows]
        for row, known in zip(rows, tokens, strict=True):  # first every write, as in one layer of a real model
            prefix = 0
            for token in row.tokens_before:
                prefix = self.prefixes.extend(prefix, token)
            for token, slot in zip(known[len(row.tokens_before) :], row.slots, strict=True):
                prefix = self.prefixes.extend(prefix, token)
                self.device[slot // self.block_size][slot % self.block_size] = prefix
        logits = []
        for row, known in zip(rows, tokens, strict=True):
            found = self._read(row.blocks, known)
            if row.wants_logits:
                logits.append(fake_logits(found, self.vocab_size))
        return np.array(logits).reshape(len(logits), self.vocab_size)

    def token_id(self, token: int | PendingToken) -> int:
        """The number of a query token."""
        return int(token)

    def swap_seconds(self, num_blocks: int) -> float:
        return num_blocks * (1e-6 if self.swap_is_cheap else 1.0)

    def recompute_seconds(self, num_tokens: int) -> float:
        return num_tokens * 1e-3

    def _tokens_before(self, row: BatchRow) -> list[int]:
        """The tokens before the row's, of the sequence that owns the slot of the row's last token."""
        assert self.engine is not None
        start, stop = row.first_position, row.context_len
        for request in self.engine.scheduler.running:
            for sequence in request.sequences:
                table = sequence.table
                if table.num_tokens == stop and table.slot_mapping(stop - 1, stop) == [row.slots[-1]]:
                    assert sequence.query_tokens(start, stop) == list(row.token_ids)
                    return sequence.tokens[:start]
        raise InvariantViolation(Invariant.EXCLUSIVE_WRITE, f"no running sequence owns slot {row.slots[-1]}")

    def _read(self, blocks: Sequence[int], tokens: list[int]) -> list[int]:
        """The tokens whose K/V are found: `tokens`, or where a wrong read is let pass, others."""
        read, prefix = list[int](), 0
        for position, token in enumerate(tokens):
            prefix = self.prefixes.extend(prefix, token)
            block = blocks[position // self.block_size]
            found = self.device[block][position % self.block_size]
            if found == prefix:
                read.append(token)
            else:
                there = None if found is None else self.prefixes.tokens(found)
                self.on_wrong_read(WrongRead(position, block, tokens[: position + 1], there))
                read += there or []
        return read

    def on_wrong_read(self, read: WrongRead) -> None:
        """The invariant `content` is broken. Raises InvariantViolation; where it is let pass, reading goes on."""
        holds = "nothing" if read.found is None else "the K/V of other tokens"
        raise InvariantViolation(
            Invariant.CONTENT, f"position {read.position} is in block {read.block}, which holds {holds}"
        )
