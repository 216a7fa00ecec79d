"""A block manager that hands full blocks over: to engines elsewhere, and from them (`kv_connector.py`).

It is the `BlockManager` with three things more:

- *Storing.* What the prefix cache learns of a prompt, the connector is offered, at the same moment: the sequence holds
  the blocks still, so they are read out of the pool before anybody else can be given them.
- *Loading.* A request that comes in begins with what the prefix cache has; for the full blocks after those the
  connector is asked, and what it has gets blocks, which the admission has counted already. They are written before the
  pass of the coming step (`BlockMoves.load`).
- Loaded blocks are the prefix cache's once that step is committed, with those that it computed, and not before: until
  then a step that fails drops them with all the rest.

What could not be had is computed, as if there were no connector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from minipaged.contracts import BlockAllocator, Tier
from minipaged.engine.block_manager import BlockManager
from minipaged.engine.sequence import Request, SequenceState
from minipaged.engine.step_writer import StepWriters
from minipaged.events import BlocksLoaded, BlocksStored, Emit
from minipaged.handover.kv_connector import KVConnector
from minipaged.params import EngineConfig
from minipaged.steps import BlockMoves


class ConnectedBlockManager(BlockManager):
    """Paged memory of one engine of several. It needs the prefix cache.

    `read_blocks`: `Runner.read_blocks`, once all steps that were launched have run. `block_bytes`: of one block.
    """

    def __init__(
        self,
        config: EngineConfig,
        tier: Tier,
        allocator: Callable[[int], BlockAllocator] | None,
        writer: StepWriters,
        emit: Emit,
        *,
        connector: KVConnector,
        read_blocks: Callable[[Sequence[int]], Sequence[bytes]],
        block_bytes: int,
    ) -> None:
        super().__init__(config, tier, allocator, writer, emit)
        self._connector = connector
        self._read_blocks = read_blocks
        self._block_bytes = block_bytes
        self._load: list[tuple[int, bytes]] = []  # since the moves were last taken

    def load(self, request: Request) -> None:
        sequence = request.sequences[0]
        if sequence.num_computed or not request.reads_prefix_cache:
            return
        self.begin(request, sequence)
        held = len(sequence.table.blocks)
        self._store(sequence, 0, held)  # which were stored once, but may have been lost since
        most = (len(sequence.tokens) - 1) // self.block_size  # one token has to run
        found = self._connector.load(sequence.tokens, held, most)
        whole = list(takewhile(lambda block: len(block) == self._block_bytes, found))
        if not whole:
            return
        num_tokens = len(whole) * self.block_size
        self._make_room(len(whole))
        sequence.table.append(num_tokens)
        blocks = tuple(sequence.table.blocks[held:])
        self._load += zip(blocks, whole, strict=True)
        self.num_entries += len(blocks)
        self.num_tokens += num_tokens
        self._writer.table_changed(sequence, held)
        self._emit(BlocksLoaded(sequence.sequence_id, blocks))

    def publish(self, sequence: SequenceState, num_tokens: int) -> None:
        start = sequence.num_published
        super().publish(sequence, num_tokens)
        self._store(sequence, start, sequence.num_published)

    def _store(self, sequence: SequenceState, start: int, stop: int) -> None:
        """Offer logical blocks start .. stop - 1 of the sequence, which are computed, as far as they are the prompt's.

        (What is generated is offered when it comes again, as a prompt: reading the pool waits for the step in flight.)
        """
        num_prompt_tokens = len(sequence.tokens) - len(sequence.output_token_ids)
        stop = min(stop, num_prompt_tokens // self.block_size)
        if lacking := self._connector.lacking(sequence.tokens, start, stop):
            blocks = self._read_blocks([sequence.table.blocks[logical] for logical in lacking])
            stored = self._connector.store(sequence.tokens, dict(zip(lacking, blocks, strict=True)))
            if stored:
                there = tuple(sequence.table.blocks[logical] for logical in stored)
                self._emit(BlocksStored(sequence.sequence_id, there))

    def take_moves(self) -> BlockMoves:
        moves, self._load = super().take_moves()._replace(load=tuple(self._load)), []
        return moves
