"""A storyteller in plain Python that checks every read, for testing new block allocators and block tables.

It needs no NumPy and also runs in a page. At a branch of its texts, sample 0 of a request takes the first branch,
sample 1 the second, and so on; nothing is random. In place of keys and values, its memory stores the token that was
written into each slot. A storyteller's token identifies the whole text before it. A read through the block table can
therefore be compared with the correct text: the invariant `content`. Its engines check the other invariants after every
step.

Its prompts must come from `encode`: they are beginnings of its texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

from minipaged.contracts import Batch, BlockTable, Logits, Sampled, SamplingInput, Tier
from minipaged.engine.engine import Engine
from minipaged.errors import InvalidRequest, Invariant, InvariantViolation
from minipaged.stepper.storyteller import Storyteller
from minipaged.steps import BlockMoves, Row
from minipaged.tiers import plain_parts

Slots = dict[int, int]
"""The tokens of one block, by offset."""


class Reciter(Storyteller):
    """A storyteller that stores its tokens in blocks and checks them when it reads."""

    def engine(self, **options: Any) -> Engine:
        self._engine = engine = super().engine(**{"debug": True} | options)
        self._block_size = engine.config.block_size
        self._device: dict[int, Slots] = {}
        self._host: dict[int, Slots] = {}
        self._before: dict[int, int | None] = {}
        self._position: dict[int, int] = {}
        for (before, _), token in self._tokens.items():  # each token follows its predecessor
            self._before[token] = before if before >= 0 else None
            self._position[token] = self._position[before] + 1 if before >= 0 else 0
        return engine

    def tier(self) -> Tier:
        return Tier("reciter", *plain_parts(), _no_beams, self._choose)  # type: ignore[arg-type]

    # --- Runner -----------------------------------------------------------------------------------

    def move(self, moves: BlockMoves) -> None:
        for device, host in moves.swap_out:
            self._host[host] = dict(self._device.get(device, {}))
        for block in moves.poison:
            self._device.pop(block, None)
        for host, device in moves.swap_in:
            self._device[device] = self._host.pop(host, {})
        for source, destination in moves.copy:
            self._device[destination] = dict(self._device.get(source, {}))

    def forward(self, batch: Batch) -> list[list[int]]:
        """The tokens that may follow each row that needs logits. Raises InvariantViolation for a wrong read."""
        rows, tables = self.mirror.rows, self._tables()
        for given, row in zip(batch, rows, strict=True):
            for token, slot in zip(given.token_ids, _slots(tables[row.sequence], row.start, row.stop), strict=True):
                self._device.setdefault(slot // self._block_size, {})[slot % self._block_size] = token
        for given, row in zip(batch, rows, strict=True):
            self._check_reads(given.token_ids[-1], row, tables[row.sequence])
        return self.next_tokens(batch)

    def _tables(self) -> dict[int, BlockTable]:
        """The sequences' own block tables. They are under test, so the slots must come from them."""
        running = self._engine.scheduler.running
        return {sequence.sequence_id: sequence.table for request in running for sequence in request.sequences}

    def _check_reads(self, last: int, row: Row, table: BlockTable) -> None:
        token: int | None = last
        slots = _slots(table, 0, row.stop)
        for position in reversed(range(row.stop)):  # backwards, because a token identifies its predecessor
            block, offset = divmod(slots[position], self._block_size)
            found = self._device.get(block, {}).get(offset)
            if token is None or found != token:
                holds = "holds nothing" if found is None else f"holds {self.words[found]!r}"
                wanted = "" if token is None else f", not {self.words[token]!r}"
                raise InvariantViolation(
                    Invariant.CONTENT,
                    f"position {position} is looked up in slot {slots[position]}, which {holds}{wanted}",
                )
            if position <= self._position[token]:  # a finished text repeats its last word
                token = self._before[token]

    # --- Tier -------------------------------------------------------------------------------------

    def _choose(self, following: Logits, inputs: Sequence[SamplingInput]) -> list[Sampled]:
        return [
            Sampled(ways[wanted.stream % len(ways)], -math.log(len(ways)), None)
            for wanted in inputs
            for ways in [following[wanted.row]]
        ]


def _slots(table: BlockTable, start: int, stop: int) -> Sequence[int]:
    """The slots of positions `start` to `stop` - 1. Raises InvariantViolation if the table returns more or fewer."""
    slots = table.slot_mapping(start, stop)
    if len(slots) != stop - start:
        message = f"positions {start} to {stop - 1} have {len(slots)} slots"
        raise InvariantViolation(Invariant.CONTENT, message)
    return slots


def _no_beams(*_: Any) -> NoReturn:
    raise InvalidRequest("a Reciter has no beam search; use SamplingParams, or a Storyteller")
