"""Another memory through the door (`engine/memory.py`): each request gets one piece for all that it may ever hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from minipaged.contracts import BlockAllocator, Tier
from minipaged.engine.block_manager import BlockManager
from minipaged.engine.engine import Engine
from minipaged.engine.memory import Memory
from minipaged.engine.sequence import Request, SequenceState
from minipaged.engine.step_writer import StepWriters
from minipaged.errors import InvalidRequest, OutOfBlocks
from minipaged.events import BlocksFreed, Emit, TokensComputed
from minipaged.params import EngineConfig, SamplingParams
from minipaged.reference import block_allocator
from minipaged.reference.block_table import BlockTable
from minipaged.steps import BlockMoves, CopyPair
from minipaged.testing.content_runner import ContentRunner
from minipaged.testing.workloads import Workload, WorkloadRun, random_workload
from tests.effort import examples, quick_cases, scaled
from tests.workloads import REFERENCE


class Pieces(block_allocator.BlockAllocator):
    """A pool of which neighbouring blocks are handed out together."""

    def take(self, num_blocks: int) -> list[int]:
        """The first gap that is large enough. Raises OutOfBlocks."""
        free = set(self._free)
        for first in range(self.num_blocks):
            piece = list(range(first, first + num_blocks))
            if free.issuperset(piece):
                self._free = [block for block in self._free if block not in piece]
                for block in piece:
                    self._ref_counts[block] = 1
                return piece
        raise OutOfBlocks(f"no piece of {num_blocks} blocks is free")


class Reserved(BlockTable):
    """Its blocks are there from the first token on."""

    def reserve(self, blocks: list[int]) -> None:
        self._blocks = blocks

    def blocks_needed(self, num_new_tokens: int) -> int:
        return 0

    def append(self, num_new_tokens: int) -> list[CopyPair]:
        self._num_tokens += num_new_tokens
        return []

    def trim(self, num_tokens: int) -> None:
        assert num_tokens == 0
        self._allocator.free_many(reversed(self._blocks))
        self._blocks, self._num_tokens = [], 0


class Contiguous(Memory):
    def __init__(
        self,
        config: EngineConfig,
        tier: Tier,
        allocator: Callable[[int], BlockAllocator] | None,
        writer: StepWriters,
        emit: Emit,
    ) -> None:
        self.block_size = config.block_size
        self.allocator: Pieces = Pieces(config.num_blocks)
        self._writer, self._emit = writer, emit
        self._reserved: dict[int, int] = {}

    def most_blocks(self, request: Request) -> int:
        """More than paging ever takes: a piece has a power of two."""
        return 1 << (super().most_blocks(request) - 1).bit_length()

    def blocks_to_admit(self, request: Request) -> int:
        return self.most_blocks(request)

    def blocks_needed(self, work: Sequence[tuple[SequenceState, int]]) -> int:
        return 0

    def new_table(self) -> Reserved:
        return Reserved(self.block_size, self.allocator)

    def begin(self, request: Request, sequence: SequenceState) -> None:
        self._reserved[sequence.sequence_id] = self.blocks_to_admit(request)

    def append(self, sequence: SequenceState, num_tokens: int) -> None:
        table, new = sequence.table, ()
        assert isinstance(table, Reserved)
        if not table.blocks:
            new = tuple(self.allocator.take(self._reserved.pop(sequence.sequence_id)))
            table.reserve(list(new))
            self._writer.table_changed(sequence, 0)
        table.append(num_tokens)
        self.num_entries += len(new)
        self.num_tokens += num_tokens
        self._emit(TokensComputed(sequence.sequence_id, table.num_tokens, new, 0))

    def fork(self, request: Request, parent: SequenceState, child: SequenceState) -> None:
        raise NotImplementedError

    def free(self, sequence: SequenceState) -> None:
        blocks, num_tokens = tuple(sequence.table.blocks), sequence.table.num_tokens
        if blocks:
            sequence.table.trim(0)
            self.num_entries -= len(blocks)
            self.num_tokens -= num_tokens
            self._writer.table_changed(sequence, 0)
            self._emit(BlocksFreed(sequence.sequence_id, blocks))

    def take_moves(self) -> BlockMoves:
        return BlockMoves()


def of_single_sequences(seed: int, *, async_scheduling: bool) -> Workload:
    workload = random_workload(seed)
    config = replace(workload.config, async_scheduling=async_scheduling, enable_prefix_caching=False, debug=True)
    requests = [
        replace(request, params=replace(request.params, n=1))
        for request in workload.requests
        if isinstance(request.params, SamplingParams)
    ]
    # Gaps between pieces are not counted as room that cannot be used, so there is room for two pieces of each request.
    return replace(workload, config=replace(config, num_blocks=128 * len(requests) + 1), requests=tuple(requests))


@quick_cases(1)
@scaled
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_a_memory_that_reserves_serves_the_same_tokens(async_scheduling: bool) -> None:
    """By the same engine, scheduler and policy, with every read and every reference count checked; and wastes more."""
    wasted = dict.fromkeys(("paged", "reserved"), 0)
    for seed in range(examples(80, least=30)):
        workload = of_single_sequences(seed, async_scheduling=async_scheduling)
        runs = {"paged": WorkloadRun(workload), "reserved": WorkloadRun(workload, memory=Contiguous)}
        for name, run in runs.items():
            run.to_the_end()
            wasted[name] += run.engine.stats.paged.internal_fragmentation
        tokens = [
            {name: [one.token_ids for one in output.outputs] for name, output in run.outputs.items() if output.finished}
            for run in runs.values()
        ]
        assert tokens[0] == tokens[1]
    assert wasted["reserved"] > 2 * wasted["paged"] > 0


def test_a_request_for_which_no_piece_is_large_enough_is_refused_at_the_door() -> None:
    """It needs 5 blocks, which paging would have; a piece of 8 is more than there are."""
    config = EngineConfig(num_blocks=6, block_size=4, max_model_len=24, vocab_size=11, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    for memory, takes_it in ((BlockManager, True), (Contiguous, False)):
        engine = Engine(config, REFERENCE, ContentRunner(6, 0, 4, 11), memory=memory)
        if takes_it:
            engine.add_request([1] * 12, params)
            continue
        with pytest.raises(InvalidRequest, match=r"prompt and output can need 8 blocks.*the whole pool has 6"):
            engine.add_request([1] * 12, params)
