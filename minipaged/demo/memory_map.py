"""Who holds which block, folded from the engine's events alone.

The engine is never asked: it says what happens, and whoever follows its events from the first on knows every block
table (paper, Fig. 6) and every reference count (Fig. 8). Each sequence is drawn in one of three ways:

    waiting       an empty table
    running       a table of device blocks
    swapped out   a table of host blocks (section 4.5), which hold no device memory
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minipaged.events import (
    BlockCached,
    BlockCopied,
    BlockDeduplicated,
    BlockEvicted,
    BlocksFreed,
    EngineStarted,
    Event,
    PrefixReused,
    RequestArrived,
    SequenceForked,
    SwappedIn,
    SwappedOut,
    TokenGenerated,
    TokensComputed,
)


@dataclass(slots=True)
class SequenceMap:
    """One sequence: its tokens, and where their keys and values are."""

    request: str
    tokens: list[int]
    """Prompt and output."""
    num_prompt_tokens: int
    table: list[int] = field(default_factory=list)
    """Its blocks in logical order, now."""
    num_filled: int = 0
    """Filled slots of the table."""
    swapped: bool = False
    """Whether `table` holds numbers of host blocks."""
    last_table: list[int] = field(default_factory=list)
    """The blocks that it gave back last."""
    last_filled: int = 0


@dataclass(slots=True)
class MemoryMap:
    """The device pool and all sequences, up to the last event."""

    num_blocks: int = 0
    block_size: int = 1
    sequences: dict[int, SequenceMap] = field(default_factory=dict)
    cached: set[int] = field(default_factory=set)
    """Blocks that the prefix cache holds."""

    def holders(self, block: int) -> int:
        """The reference count of a device block: table entries, and the prefix cache."""
        return self.table_entries(block) + (block in self.cached)

    def table_entries(self, block: int) -> int:
        """How many block tables hold the device block."""
        return sum(sequence.table.count(block) for sequence in self.sequences.values() if not sequence.swapped)

    def of_request(self, request: str) -> list[SequenceMap]:
        return [sequence for sequence in self.sequences.values() if sequence.request == request]

    def on_event(self, event: Event) -> None:
        """Follow one event. They must come in order, from the first."""
        match event:
            case EngineStarted():
                self.num_blocks, self.block_size = event.num_blocks, event.block_size
            case RequestArrived():
                prompt = list(event.prompt_token_ids)
                self.sequences[event.sequence] = SequenceMap(event.request, prompt, len(prompt))
            case SequenceForked():
                parent = self.sequences[event.parent]
                self.sequences[event.child] = SequenceMap(
                    parent.request, [*parent.tokens], parent.num_prompt_tokens, [*parent.table], parent.num_filled
                )
            case TokenGenerated():
                self.sequences[event.sequence].tokens.append(event.token_id)
            case SwappedOut() | SwappedIn():
                moved = dict(event.pairs)
                for sequence in self.of_request(event.request):
                    sequence.table = [moved[block] for block in sequence.table]
                    sequence.swapped = isinstance(event, SwappedOut)
            case BlockCached():
                self.cached.add(event.block)
            case BlockEvicted():
                self.cached.remove(event.block)
            case TokensComputed() | BlockCopied() | PrefixReused() | BlockDeduplicated() | BlocksFreed():
                self._change_table(self.sequences[event.sequence], event)

    def _change_table(
        self,
        sequence: SequenceMap,
        event: TokensComputed | BlockCopied | PrefixReused | BlockDeduplicated | BlocksFreed,
    ) -> None:
        match event:
            case TokensComputed():
                sequence.table.extend(event.new_blocks)
                sequence.num_filled = event.num_tokens
            case BlockCopied():
                sequence.table[event.logical_block] = event.destination
            case PrefixReused():
                sequence.table = list(event.blocks)
                sequence.num_filled = len(event.blocks) * self.block_size
            case BlockDeduplicated():
                sequence.table[event.logical_block] = event.cached
            case BlocksFreed():
                sequence.last_table, sequence.last_filled = sequence.table, sequence.num_filled
                sequence.table, sequence.num_filled, sequence.swapped = [], 0, False
