"""One rank of a model: its part of the weights and of every block, and its place among the others."""

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
"""For how long a rank waits for the others. It is the driver that gives up, and then it ends them all."""


class Talker(Protocol):
    """Who tells the driver what is being done."""

    doing: str
    waits: bool


class Rank:
    """Follows steps with its part of the model. The first rank of the last stage tells what has come of them."""

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
        self._note_choices: Callable[[int, list[int]], None] | None = None  # of a stage that does not choose

    def free_device_bytes(self) -> int | None:
        """Of the GPU, if it is on one."""
        return torch.cuda.mem_get_info()[0] if self._tier.device == "cuda" else None

    def make(self, config: EngineConfig, number: int) -> RankReady:
        """Reserve the KV cache. Raises MemoryError."""
        self._runner = self._note_choices = None  # a former one's cache is given back first
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
        """Whether this is the one that tells what has come of steps."""
        return self.shard.is_last and self.shard.rank == 0

    def run(self, order: RunStep) -> Ran | None:
        """What has come of it, if that is this rank's to tell."""
        if self._note_choices:
            for number, token_ids in order.chosen:
                self._note_choices(number, token_ids)
        rows = self._rows.of(order.step)
        rows.follow(order.step)
        assert self._runner is not None
        result = self._runner.run(order.step)
        return outcome(order.step.number, rows, result) if self.tells else None


def outcome(number: int, rows: Rows, result: StepResult) -> Ran:
    """A step's result, as the driver is told it."""
    asks_for_logits = not rows.num_steady and any(row.num_choices < 0 for row in rows)
    return Ran(
        number,
        Choices.of(list(result.choices)),
        {sequence: Choices.of(list(told)) for sequence, told in result.prompt_logprobs.items()},
        result.logits.float().cpu().numpy().tobytes() if asks_for_logits else b"",
    )


class Processes:
    """The ranks, as one of them sees them (`fast.sharded.Ranks`): all in processes of their own."""

    def __init__(self, options: Options, shard: Shard, talker: Talker) -> None:
        """Find the others."""
        self._rank, self._size, self._talker = options.rank, shard.size, talker
        talker.doing, talker.waits = "looking for the other ranks", True
        if options.device == "cuda":
            torch.cuda.set_device(options.rank)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo looks up this machine's name, which not all have
        num_ranks = shard.size * shard.num_stages
        dist.init_process_group(
            "nccl" if options.device == "cuda" else "gloo",
            store=dist.FileStore(options.rendezvous, num_ranks),  # type: ignore[attr-defined]
            rank=options.rank,
            world_size=num_ranks,
            timeout=LONGEST_EXCHANGE,
        )
        stages = [list(range(first, first + shard.size)) for first in range(0, num_ranks, shard.size)]
        groups = [dist.new_group(ranks, timeout=LONGEST_EXCHANGE) for ranks in stages]  # everybody makes all of them
        self._stage = groups[shard.stage]
        self._handed_on: tuple[Tensor, dist.Work | None] | None = None
        talker.waits = False

    def gather(self, x: Tensor) -> list[Tensor]:
        """What each rank of this stage has given, in their order."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self._size)]
        self._talker.waits = True
        # As bytes, for not every backend knows all types; and nothing is computed on the way.
        dist.all_gather([part.view(torch.uint8) for part in parts], x.view(torch.uint8), group=self._stage)
        self._talker.waits = False
        return parts

    def hand_on(self, x: Tensor) -> None:
        """Give x to the next stage, which may not have asked for it yet: the next step need not wait for that."""
        self._talker.waits = True
        if self._handed_on and (work := self._handed_on[1]):
            work.wait()
        self._talker.waits = False
        x = x.contiguous().view(torch.uint8)
        self._handed_on = x, dist.isend(x, self._rank + self._size)

    def take(self, x: Tensor) -> None:
        """Wait for what the stage before hands on."""
        self._talker.waits = True
        dist.recv(x.view(torch.uint8), self._rank - self._size)
        self._talker.waits = False
