"""The memory of the paper's baselines (section 6.1): a contiguous chunk for each sequence that a request will have.

All chunks are reserved when the request is admitted. So it never needs memory later, and no request is preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minipaged.engine.memory import Memory
from minipaged.engine.sequence import Request, SequenceState
from minipaged.engine.step_writer import StepWriters
from minipaged.errors import InvalidRequest, OutOfBlocks
from minipaged.events import BlockCopied, BlocksFreed, Emit, SequenceForked, TokensComputed
from minipaged.paper.buddy import LARGEST_TOKENS, BuddyAllocator, power_of_two
from minipaged.paper.chunk import Chunk, Family
from minipaged.params import EngineConfig
from minipaged.steps import BlockMoves, CopyPair

Estimate = Callable[[int], int]
"""A function from the true number of output tokens to the expected number."""


class OrcaMemory(Memory):
    """A memory that reserves, at admission, one chunk for each sequence that a request will have."""

    allocator: BuddyAllocator
    final_tokens: int = 0
    """Tokens that the sequences with a chunk will have when they end. Slots for tokens still to come are *reserved*."""
    expected_tokens: int = 0
    """Tokens that these sequences were expected to have. Slots for those that never come are internal fragmentation
    (Fig. 2)."""

    def __init__(self, config: EngineConfig, writer: StepWriters, emit: Emit, estimate: Estimate) -> None:
        self.block_size = config.block_size
        if power_of_two(config.block_size) != config.block_size:
            raise InvalidRequest(f"block_size is {config.block_size}; the buddy allocator needs a power of two")
        self.allocator = BuddyAllocator(config.num_blocks, LARGEST_TOKENS // config.block_size)
        self._writer, self._emit, self._estimate = writer, emit, estimate
        self._families: dict[SequenceState, Family] = {}
        self._copies: list[CopyPair] = []

    def chunks(self, prompt_tokens: int, output_tokens: int, num_sequences: int) -> list[int]:
        """Return the sizes of all chunks that such a request takes, in blocks."""
        most = self.expected(prompt_tokens, output_tokens)
        return [power_of_two(self.blocks_for(most))] * num_sequences

    def expected(self, prompt_tokens: int, output_tokens: int) -> int:
        """Return the expected final length of a sequence, in tokens."""
        return min(prompt_tokens + self._estimate(output_tokens), LARGEST_TOKENS)

    def _chunks_of(self, request: Request) -> list[int]:
        return self.chunks(len(request.prompt_token_ids), request.max_output_tokens, request.num_sequences)

    def most_blocks(self, request: Request) -> int:
        return sum(self._chunks_of(request))

    def blocks_to_admit(self, request: Request) -> int:
        return self.most_blocks(request)

    @property
    def held_beside_tables(self) -> list[int]:
        """The blocks of the spare chunks."""
        families = {id(family): family for family in self._families.values()}
        return [block for family in families.values() for chunk in family.spare for block in chunk]

    def blocks_needed(self, work: Sequence[tuple[SequenceState, int]]) -> int:
        return 0

    def new_table(self) -> Chunk:
        return Chunk(self.block_size, self.allocator)

    def begin(self, request: Request, sequence: SequenceState) -> None:
        """Reserve all chunks of the request, unless they are reserved already. Raises OutOfBlocks.

        Each sequence of the request takes one chunk; after an error there can be several. The other chunks are spare.
        """
        if sequence in self._families:
            return
        sizes = self._chunks_of(request)
        if not self.allocator.can_take(sizes):
            raise OutOfBlocks(f"chunks of {sizes} blocks are not all free at the same time")
        prompt, output = len(request.prompt_token_ids), request.max_output_tokens
        spare = [self.allocator.take(size) for size in sizes]
        family = Family(
            prompt + output,
            self.expected(prompt, output),
            spare,
            bool(request.beam_search),
            living=len(request.sequences),
        )
        for one in request.sequences:
            self._families[one] = family
            self._give(one, spare.pop(0))

    def _give(self, sequence: SequenceState, chunk: list[int]) -> None:
        table = sequence.table
        assert isinstance(table, Chunk)
        table.take(chunk)
        family = self._families[sequence]
        self.final_tokens += family.final
        self.expected_tokens += family.expected
        self.num_entries += len(chunk)
        self._writer.table_changed(sequence, 0)

    def append(self, sequence: SequenceState, num_tokens: int) -> None:
        table = sequence.table
        new = () if table.num_tokens else tuple(table.blocks)
        table.append(num_tokens)
        self.num_tokens += num_tokens
        if self._emit.heard:
            self._emit(TokensComputed(sequence.sequence_id, table.num_tokens, new, 0))

    def fork(self, request: Request, parent: SequenceState, child: SequenceState) -> None:
        """Give the child its own chunk with a copy of the parent's tokens. Without a spare chunk it waits for the next
        sequence of the request that ends."""
        family = self._families[child] = self._families[parent]
        family.living += 1
        child.table.append(parent.table.num_tokens)
        self.num_tokens += parent.table.num_tokens
        self._emit(SequenceForked(request.request_id, parent.sequence_id, child.sequence_id))
        family.owed.append((child, list(parent.table.blocks[: self.blocks_for(parent.table.num_tokens)])))
        if family.spare:
            self._settle(family, family.spare.pop())

    def _settle(self, family: Family, chunk: list[int]) -> None:
        """Give the chunk to the first sequence that waits for one, and copy the parent's blocks into it."""
        child, sources = family.owed.pop(0)
        self._give(child, chunk)
        for logical, pair in enumerate(zip(sources, chunk, strict=False)):
            self._copies.append(pair)
            self._emit(BlockCopied(child.sequence_id, logical, *pair, 1))

    def free(self, sequence: SequenceState) -> None:
        family = self._families.pop(sequence, None)
        if family is None:
            return
        table, blocks = sequence.table, list(sequence.table.blocks)
        self.num_entries -= len(blocks)
        self.num_tokens -= table.num_tokens
        self._copies = [(source, to) for source, to in self._copies if to not in blocks]
        family.living -= 1
        family.owed = [(child, sources) for child, sources in family.owed if child is not sequence]
        self._writer.table_changed(sequence, 0)
        if blocks:
            self.final_tokens -= family.final
            self.expected_tokens -= family.expected
            self._emit(BlocksFreed(sequence.sequence_id, tuple(blocks)))
        if blocks and (family.owed or family.searches):
            assert isinstance(table, Chunk)
            table.take([])
            if family.owed:
                self._settle(family, blocks)
            else:
                family.spare.append(blocks)
        table.trim(0)
        for chunk in () if family.living else family.spare:
            self.allocator.give_back(chunk[0])

    def take_moves(self) -> BlockMoves:
        copies, self._copies = self._copies, []
        return BlockMoves(copy=tuple(copies))
