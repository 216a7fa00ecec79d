"""The content oracle with engines that hand blocks over: a block is the names of the prefixes that are in its slots."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minipaged.contracts import Tier
from minipaged.engine.connected_memory import ConnectedBlockManager
from minipaged.engine.memory import MakeMemory
from minipaged.events import BlocksLoaded, BlocksStored, Event, RequestPreempted, SequenceFinished
from minipaged.handover.kv_connector import Handshake, KVConnector
from minipaged.steps import BlockMoves
from minipaged.testing.content_runner import ContentRunner, Prefixes
from tests.late_device import LATE, LateRunner
from tests.workloads import REFERENCE, Workload, WorkloadRun


class HandsOver(ContentRunner):
    """Its blocks can be read and written."""

    def move(self, moves: BlockMoves) -> None:
        super().move(moves)
        for block, content in moves.load:
            self.device[block] = list(struct.unpack(f"{self.block_size}q", content))

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        return [struct.pack(f"{self.block_size}q", *self.device[block]) for block in blocks]

    def read_host_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        """Without waiting for the device: no move of theirs is under way."""
        return [struct.pack(f"{self.block_size}q", *self.host[block]) for block in blocks]


class LateHandsOver(LateRunner, HandsOver):
    """The same on a late device, whose blocks are read when it has done what it was given."""

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        self.late.finish()
        return super().read_blocks(blocks)


class InMemory(KVConnector):
    """Blocks in a dictionary, by the tokens that led to them. `lose`: asked of each block that is looked for."""

    def __init__(self, block_size: int, lose: Callable[[], bool] = lambda: False) -> None:
        self.block_size = block_size
        self.blocks: dict[tuple[int, ...], bytes] = {}
        self.lose = lose

    def check(self, handshake: Handshake) -> None:
        raise AssertionError("the LLM's business")

    open = check

    def _key(self, token_ids: Sequence[int], logical: int) -> tuple[int, ...]:
        return tuple(token_ids[: (logical + 1) * self.block_size])

    def lacking(self, token_ids: Sequence[int], start: int, stop: int) -> Sequence[int]:
        return [logical for logical in range(start, stop) if self._key(token_ids, logical) not in self.blocks]

    def store(self, token_ids: Sequence[int], blocks: Mapping[int, bytes]) -> Sequence[int]:
        for logical, block in blocks.items():
            key = self._key(token_ids, logical)
            assert len(key) == (logical + 1) * self.block_size, "a block that is not full"
            self.blocks[key] = block
        return list(blocks)

    def load(self, token_ids: Sequence[int], start: int, stop: int) -> Sequence[bytes]:
        found = []
        for logical in range(start, stop):
            key = self._key(token_ids, logical)
            if key not in self.blocks:
                break
            if self.lose():
                if len(key) % 2:
                    found.append(self.blocks[key][:-1])  # it arrives cut
                break
            found.append(self.blocks[key])
        return found


def connected_run(
    workload: Workload,
    connector: KVConnector,
    prefixes: Prefixes,
    make_runner: type[HandsOver] | None = None,
    tier: Tier | None = None,
    **options: Any,
) -> WorkloadRun:
    """The workload on an engine that hands its blocks over by this connector. `prefixes`: common to all of them."""
    late = workload.config.async_scheduling
    runners: list[HandsOver] = []

    def make(*sizes: Any) -> HandsOver:
        runner = (make_runner or (LateHandsOver if late else HandsOver))(*sizes)
        runner.prefixes = prefixes
        runners.append(runner)
        return runner

    def memory(*parts: Any) -> ConnectedBlockManager:
        read_blocks = runners[-1].read_blocks
        size = 8 * workload.config.block_size
        return ConnectedBlockManager(*parts, connector=connector, read_blocks=read_blocks, block_bytes=size)

    made: MakeMemory = memory
    run = WorkloadRun(workload, tier or (LATE if late else REFERENCE), make_runner=make, memory=made, **options)
    run.engine.listeners.append(Counting(run))
    return run


class Counting:
    """Counts what happens to requests that have loaded blocks."""

    def __init__(self, run: WorkloadRun) -> None:
        self._run = run
        self._owner: dict[int, str] = {}
        self._loaded: set[str] = set()

    def __call__(self, event: Event) -> None:
        happened = self._run.happened
        match event:
            case BlocksStored():
                happened["stored"] += 1
            case BlocksLoaded():
                requests = (*self._run.engine.scheduler.running, *self._run.engine.scheduler.waiting)
                owner = [r for r in requests for s in r.sequences if s.sequence_id == event.sequence]
                if owner:
                    self._loaded.add(owner[0].request_id)
                    happened["loaded behind hits"] += len(owner[0].sequences[0].table.blocks) > len(event.blocks)
                happened["loaded"] += 1
            case RequestPreempted() if event.request in self._loaded:
                happened[f"loaded, then preempted by {event.mode}"] += 1
            case SequenceFinished() if event.reason == "abort" and event.request in self._loaded:
                happened["loaded, then cancelled"] += 1


def losing(seed: int, share: float) -> Callable[[], bool]:
    r = random.Random(seed)
    return lambda: r.random() < share
