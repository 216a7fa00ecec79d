"""The fast tier's shards in one process: what processes have to come to, bit for bit.

Each rank has a thread, and one thread runs at a time: it has its turn until it needs what the others have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from minipaged.contracts import Runner, StepResult
from minipaged.fast.llama import Llama
from minipaged.fast.sharded import StageLlama
from minipaged.models.loading import load_config
from minipaged.models.shards import Shard, local_config, shards_of
from minipaged.params import EngineConfig
from minipaged.scheduling import Costs
from minipaged.steps import StepInput
from minipaged.tiers import FastTier


class Stage:
    """What the threads of one stage share: what they give each other, and what comes from the stage before."""

    def __init__(self, size: int) -> None:
        self.given: list[Any] = [None] * size
        self.all_there = threading.Barrier(size)
        self.all_taken = threading.Barrier(size)
        self.handed_on: list[SimpleQueue[Tensor]] = [SimpleQueue() for _ in range(size)]


class Threads:
    """`fast.sharded.Ranks` for one of the threads."""

    def __init__(self, turn: threading.Lock, stages: list[Stage], shard: Shard) -> None:
        self._turn, self._stages, self._shard = turn, stages, shard

    def gather(self, x: Tensor) -> list[Tensor]:
        stage = self._stages[self._shard.stage]
        stage.given[self._shard.rank] = x.clone()
        self._turn.release()
        stage.all_there.wait()
        given: list[Tensor] = list(stage.given)
        stage.all_taken.wait()
        self._turn.acquire()
        return given

    def hand_on(self, x: Tensor) -> None:
        self._stages[self._shard.stage + 1].handed_on[self._shard.rank].put(x.clone())

    def take(self, x: Tensor) -> None:
        self._turn.release()
        taken = self._stages[self._shard.stage].handed_on[self._shard.rank].get()
        self._turn.acquire()
        x.copy_(taken)


class ShardsInOneProcess(Runner):
    """Runs every step on all ranks of all stages, a thread each."""

    def __init__(self, folder: Path, dtype: str, config: EngineConfig) -> None:
        tier, model = FastTier.on("cpu", dtype), load_config(folder)
        shards = shards_of(model, config.tensor_parallel_size, config.pipeline_parallel_size)
        self._turn = threading.Lock()
        stages = [Stage(config.tensor_parallel_size) for _ in shards]
        each = [shard for stage in shards for shard in stage]
        self._threads = [ThreadPoolExecutor(1) for _ in each]

        def make(rank: int) -> Llama:
            shard, ranks = each[rank], Threads(self._turn, stages, each[rank])
            weights = tier.load_shard(folder, model, shard, ranks)
            if shard.is_last:
                made = tier.make_runner(local_config(model, shard), weights, config)
                assert isinstance(made, Llama)
                return made
            return tier.make_stage(local_config(model, shard), weights, config, ranks)

        self.ranks: list[Llama] = self._each(make)
        self._teller = len(each) - config.tensor_parallel_size

    def _each(self, work: Callable[[int], Any]) -> list[Any]:
        def in_turn(rank: int) -> Any:
            with self._turn:
                return work(rank)

        futures = [thread.submit(in_turn, rank) for rank, thread in enumerate(self._threads)]
        return [future.result() for future in futures]

    def run(self, step: StepInput) -> StepResult:
        result: StepResult = self._each(lambda rank: self.ranks[rank].run(step))[self._teller]
        for rank in self.ranks:
            if isinstance(rank, StageLlama):
                rank.tell(step.number, [chosen.token_id for chosen in result.choices])
        return result

    def costs(self) -> Costs:
        return self.ranks[0].costs()
