"""One rank of a model: its part of the weights and of every block, and its place among the others."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from minipaged.contracts import StepResult
from minipaged.mirror import Rows
from minipaged.models.loading import load_config
from minipaged.models.shards import local_config, shard_of
from minipaged.parallel.messages import Choices, Made, Ran
from minipaged.parallel.options import Options
from minipaged.params import EngineConfig
from minipaged.steps import StepInput
from minipaged.tiers import FastTier

LONGEST_EXCHANGE = timedelta(days=1)
"""For how long a rank waits for the others. It is the driver that gives up, and then it ends them all."""


class Talker(Protocol):
    """Who tells the driver what is being done."""

    doing: str
    waits: bool


class Rank:
    """Follows steps with its part of the model. Rank 0 tells what has come of them."""

    def __init__(self, options: Options, talker: Talker) -> None:
        """Load the weights."""
        torch.set_num_threads(options.num_threads)
        self._rank = options.rank
        group = ProcessGroup(options, talker)
        talker.doing = "loading the weights"
        folder = Path(options.folder)
        config = load_config(folder)
        shard = shard_of(config, options.rank, options.tensor_parallel_size)
        self._config = local_config(config, shard)
        self._tier = FastTier.on(options.device, options.dtype)
        self._weights = self._tier.load_shard(folder, config, shard, group)
        self._rows = Rows()

    def free_device_bytes(self) -> int | None:
        """Of the GPU, if it is on one."""
        return torch.cuda.mem_get_info()[0] if self._tier.device == "cuda" else None

    def make(self, config: EngineConfig) -> Made:
        """Reserve the KV cache. Raises MemoryError."""
        own = replace(config, tensor_parallel_size=1, pipeline_parallel_size=1)
        self._runner = self._tier.make_runner(self._config, self._weights, own)
        return Made(self._runner.costs())

    def run(self, step: StepInput) -> Ran | None:
        """What has come of it, if that is this rank's to tell."""
        self._rows.follow(step)
        result = self._runner.run(step)
        return self._outcome(step, result) if self._rank == 0 else None

    def _outcome(self, step: StepInput, result: StepResult) -> Ran:
        asks_for_logits = any(row.num_choices < 0 for row in self._rows)
        return Ran(
            step.number,
            Choices.of(list(result.choices)),
            {sequence: Choices.of(list(told)) for sequence, told in result.prompt_logprobs.items()},
            result.logits.float().cpu().numpy().tobytes() if asks_for_logits else b"",
        )


class ProcessGroup:
    """The ranks, as one of them sees them (`fast.sharded.Group`)."""

    def __init__(self, options: Options, talker: Talker) -> None:
        """Find the others."""
        self._size, self._talker = options.tensor_parallel_size, talker
        talker.doing, talker.waits = "looking for the other ranks", True
        if options.device == "cuda":
            torch.cuda.set_device(options.rank)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo looks up this machine's name, which not all have
        dist.init_process_group(
            "nccl" if options.device == "cuda" else "gloo",
            store=dist.FileStore(options.rendezvous, self._size),  # type: ignore[attr-defined]
            rank=options.rank,
            world_size=self._size,
            timeout=LONGEST_EXCHANGE,
        )
        talker.waits = False

    def gather(self, x: Tensor) -> list[Tensor]:
        """What each rank has given, in their order."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self._size)]
        self._talker.waits = True
        # As bytes, for not every backend knows all types; and nothing is computed on the way.
        dist.all_gather([part.view(torch.uint8) for part in parts], x.view(torch.uint8))
        self._talker.waits = False
        return parts
