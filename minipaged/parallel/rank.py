"""One rank of a model: it has part of the weights and of every block, and communicates with the other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from minipaged.contracts import Runner, StepResult
from minipaged.mirror import PerLane, Rows
from minipaged.models.loading import load_config
from minipaged.models.shards import Shard, local_config, shard_of
from minipaged.parallel.messages import Choices, Ran, RankReady, RunStep
from minipaged.parallel.options import Options
from minipaged.params import EngineConfig
from minipaged.tiers import FastTier

LONGEST_EXCHANGE = timedelta(days=1)
"""The timeout of a rank that waits for the others. The driver gives up earlier, and then ends all workers."""


class Talker(Protocol):
    """The object that reports the current activity to the driver."""

    doing: str
    """The activity in a few words."""
    waits: bool
    """Whether the rank is waiting for another one."""


class Rank:
    """A part of the model that runs steps. The first rank of the last stage returns their results."""

    def __init__(self, options: Options, talker: Talker) -> None:
        """Load the weights."""
        torch.set_num_threads(options.num_threads)
        size = options.tensor_parallel_size
        folder = Path(options.folder)
        config = load_config(folder)
        self.shard = shard_of(config, options.rank % size, size, options.rank // size, options.pipeline_parallel_size)
        self._others = Processes(options, self.shard, talker)
        talker.doing = "loading the weights"
        self._config = local_config(config, self.shard)
        self._tier = FastTier.on(options.device, options.dtype)
        self._weights = self._tier.load_shard(folder, config, self.shard, self._others)
        self._runner: Runner | None = None
        self._note_choices: Callable[[int, list[int]], None] | None = None  # for a stage that does not choose tokens

    def free_device_bytes(self) -> int | None:
        """Free memory of the GPU; None if the rank is on a CPU."""
        return torch.cuda.mem_get_info()[0] if self._tier.device == "cuda" else None

    def make(self, config: EngineConfig, number: int) -> RankReady:
        """Reserve the KV cache. Raises MemoryError if there is too little memory."""
        self._runner = self._note_choices = None  # free the previous runner's cache first
        self._rows = PerLane(Rows)
        made = (self._config, self._weights, config)
        if self.shard.is_last:
            self._runner = self._tier.make_runner(*made)
        else:
            self._runner = stage = self._tier.make_stage(*made, self._others)
            self._note_choices = stage.tell
        return RankReady(number, self._runner.costs())

    @property
    def tells(self) -> bool:
        """Whether this rank sends the results of steps to the driver."""
        return self.shard.is_last and self.shard.rank == 0

    def run(self, order: RunStep) -> Ran | None:
        """Run a step. Returns its result if this rank sends the results, otherwise None."""
        if self._note_choices:
            for number, token_ids in order.chosen:
                self._note_choices(number, token_ids)
        rows = self._rows.of(order.step)
        rows.follow(order.step)
        assert self._runner is not None
        result = self._runner.run(order.step)
        return outcome(order.step.number, rows, result) if self.tells else None


def outcome(number: int, rows: Rows, result: StepResult) -> Ran:
    """A step's result as a message to the driver."""
    asks_for_logits = not rows.num_steady and any(row.num_choices < 0 for row in rows)
    return Ran(
        number,
        Choices.of(list(result.choices)),
        {sequence: Choices.of(list(told)) for sequence, told in result.prompt_logprobs.items()},
        result.logits.float().cpu().numpy().tobytes() if asks_for_logits else b"",
    )


class Processes:
    """One rank's communication with the others (`fast.sharded.Ranks`), each of which is a separate process."""

    def __init__(self, options: Options, shard: Shard, talker: Talker) -> None:
        """Connect to the other ranks."""
        self._rank, self._size, self._talker = options.rank, shard.size, talker
        talker.doing, talker.waits = "looking for the other ranks", True
        if options.device == "cuda":
            torch.cuda.set_device(options.rank)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo looks up the machine's name, which may fail
        num_ranks = shard.size * shard.num_stages
        dist.init_process_group(
            "nccl" if options.device == "cuda" else "gloo",
            store=dist.FileStore(options.rendezvous, num_ranks),  # type: ignore[attr-defined]
            rank=options.rank,
            world_size=num_ranks,
            timeout=LONGEST_EXCHANGE,
        )
        stages = [list(range(first, first + shard.size)) for first in range(0, num_ranks, shard.size)]
        groups = [
            dist.new_group(ranks, timeout=LONGEST_EXCHANGE) for ranks in stages
        ]  # every rank must make every group
        self._stage = groups[shard.stage]
        self._handed_on: tuple[Tensor, dist.Work | None] | None = None
        talker.waits = False

    def gather(self, x: Tensor) -> list[Tensor]:
        """The tensors x of all ranks in this stage, in the order of the ranks."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self._size)]
        self._talker.waits = True
        # Sent as bytes, because not every backend supports all dtypes, and nothing is computed on the way.
        dist.all_gather([part.view(torch.uint8) for part in parts], x.view(torch.uint8), group=self._stage)
        self._talker.waits = False
        return parts

    def hand_on(self, x: Tensor) -> None:
        """Start sending x to the next stage, without waiting until it receives it."""
        self._talker.waits = True
        if self._handed_on and (work := self._handed_on[1]):
            work.wait()
        self._talker.waits = False
        x = x.contiguous().view(torch.uint8)
        self._handed_on = x, dist.isend(x, self._rank + self._size)

    def take(self, x: Tensor) -> None:
        """Wait for the tensor from the previous stage and write it into x."""
        self._talker.waits = True
        dist.recv(x.view(torch.uint8), self._rank - self._size)
        self._talker.waits = False
