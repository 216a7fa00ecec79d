"""A block manager that exchanges full blocks with engines elsewhere (`kv_connector.py`).

It is a `BlockManager` with three additions:

- *Storing.* When blocks of a prompt enter the prefix cache, they are offered to the connector. The sequence still holds
  them, so they are read out of the pool before anyone else can get them.
- *Loading.* An admitted request begins with the blocks that the prefix cache has. The connector is asked for the full
  blocks after those. What it has is put into device blocks, which admission has already counted, before the forward
  pass of the coming step (`BlockMoves.load`). If it has none, the request may begin with a part of the next block
  (`partial_hits.py`). Only full blocks are handed over.
- Loaded blocks enter the prefix cache when that step is committed, with the blocks that it computed, and not before: a
  step that fails drops them with everything else.

Blocks that cannot be loaded are computed, as without a connector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from minipaged.engine.block_manager import BlockManager
from minipaged.engine.memory import MemoryParts
from minipaged.engine.sequence import Request, SequenceState
from minipaged.events import BlocksLoaded, BlocksStored
from minipaged.handover.kv_connector import KVConnector
from minipaged.scheduling import Costs
from minipaged.steps import BlockMoves


class LoadingBlockManager(BlockManager):
    """Paged memory that can begin a table with blocks whose content comes from a KV connector.

    `block_bytes`: the size of one block.
    """

    def __init__(self, *parts: *MemoryParts, block_bytes: int) -> None:
        super().__init__(*parts)
        self._block_bytes = block_bytes
        self._load: list[tuple[int, bytes]] = []  # blocks to load since the last `take_moves`

    def _whole(self, found: Iterable[bytes]) -> list[bytes]:
        """The blocks that a connector has found, up to the first of another size."""
        return list(takewhile(lambda block: len(block) == self._block_bytes, found))

    def _extend(self, sequence: SequenceState, num_blocks: int) -> Sequence[int]:
        """Append full blocks, which moves will fill, to the sequence's table. Returns them."""
        held = len(sequence.table.blocks)
        self._make_room(num_blocks)
        sequence.table.append(num_blocks * self.block_size)
        self.num_entries += num_blocks
        self.num_tokens += num_blocks * self.block_size
        self._writer.table_changed(sequence, held)
        return sequence.table.blocks[held:]

    def take_moves(self) -> BlockMoves:
        moves, self._load = super().take_moves()._replace(load=tuple(self._load)), []
        return moves


class ConnectedBlockManager(LoadingBlockManager):
    """Paged memory that exchanges blocks with other engines. It needs the prefix cache.

    `read_blocks`: `Runner.read_blocks`; it reads after all launched steps have run. `block_bytes`: the size of one
    block.
    """

    def __init__(
        self,
        *parts: *MemoryParts,
        connector: KVConnector,
        read_blocks: Callable[[Sequence[int]], Sequence[bytes]],
        block_bytes: int,
    ) -> None:
        super().__init__(*parts, block_bytes=block_bytes)
        self._connector = connector
        self._read_blocks = read_blocks

    def load(self, request: Request, costs: Costs) -> None:
        sequence = request.sequences[0]
        if self.prefix_cache is None or sequence.num_computed or not request.reads_prefix_cache:
            return
        tokens = sequence.key_tokens
        held = self.prefix_cache.match(tokens).num_tokens // self.block_size
        most = (len(tokens) - 1) // self.block_size  # one token has to run
        found = self._connector.load(tokens, held, most)
        whole = self._whole(found)
        self.begin(request, sequence, within_block=not whole)
        self._store(sequence, 0, held)  # stored before, but perhaps lost since
        if not whole:
            return
        blocks = self._extend(sequence, len(whole))
        self._load += zip(blocks, whole, strict=True)
        self._emit(BlocksLoaded(sequence.sequence_id, tuple(blocks)))

    def publish(self, sequence: SequenceState, num_tokens: int) -> None:
        start = sequence.num_published
        super().publish(sequence, num_tokens)
        self._store(sequence, start, sequence.num_published)

    def _store(self, sequence: SequenceState, start: int, stop: int) -> None:
        """Offer those of the sequence's computed logical blocks start to stop - 1 that lie in its prompt.

        Generated blocks are not offered, because reading them would wait for the step in flight. If they come again in
        a prompt, they are offered then.
        """
        num_prompt_tokens = len(sequence.tokens) - len(sequence.output_token_ids)
        stop = min(stop, num_prompt_tokens // self.block_size)
        tokens = sequence.key_tokens
        if lacking := self._connector.lacking(tokens, start, stop):
            blocks = self._read_blocks([sequence.table.blocks[logical] for logical in lacking])
            stored = self._connector.store(tokens, dict(zip(lacking, blocks, strict=True)))
            if stored:
                there = tuple(sequence.table.blocks[logical] for logical in stored)
                self._emit(BlocksStored(sequence.sequence_id, there))
