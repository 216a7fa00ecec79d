"""The fast tier's shards in one process: what N processes have to come to, bit for bit.

Each rank has a thread, and one thread runs at a time: it has its turn until it needs what the others have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from minipaged.contracts import Runner, StepResult
from minipaged.models.loading import load_config
from minipaged.models.shards import local_config, shard_of
from minipaged.params import EngineConfig
from minipaged.scheduling import Costs
from minipaged.steps import StepInput
from minipaged.tiers import FastTier


class Ring:
    """What the ranks' threads share: whose turn it is, and what they give each other."""

    def __init__(self, size: int) -> None:
        self.turn = threading.Lock()
        self.given: list[Any] = [None] * size
        self.all_there = threading.Barrier(size)
        self.all_taken = threading.Barrier(size)


class RingGroup:
    """`fast.sharded.Group` for one of the threads."""

    def __init__(self, ring: Ring, rank: int) -> None:
        self._ring, self._rank = ring, rank

    def gather(self, x: Tensor) -> list[Tensor]:
        ring = self._ring
        ring.given[self._rank] = x.clone()
        ring.turn.release()
        ring.all_there.wait()
        given: list[Tensor] = list(ring.given)
        ring.all_taken.wait()
        ring.turn.acquire()
        return given


class ShardsInOneProcess(Runner):
    """Runs every step on all ranks, a thread each."""

    def __init__(self, folder: Path, dtype: str, size: int, config: EngineConfig) -> None:
        self._ring = Ring(size)
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]
        tier, model = FastTier.on("cpu", dtype), load_config(folder)

        def make(rank: int) -> Runner:
            shard = shard_of(model, rank, size)
            weights = tier.load_shard(folder, model, shard, RingGroup(self._ring, rank))
            return tier.make_runner(local_config(model, shard), weights, config)

        self.ranks: list[Runner] = []
        self.ranks = self._each(make)

    def _each(self, work: Callable[[int], Any]) -> list[Any]:
        def in_turn(rank: int) -> Any:
            with self._ring.turn:
                return work(rank)

        futures = [thread.submit(in_turn, rank) for rank, thread in enumerate(self._threads)]
        return [future.result() for future in futures]

    def run(self, step: StepInput) -> StepResult:
        results = self._each(lambda rank: self.ranks[rank].run(step))
        first: StepResult = results[0]
        return first

    def costs(self) -> Costs:
        return self.ranks[0].costs()
