"""The fast tier in several processes: loads and runs a model there, as `tiers/fast.py` does in one process."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from minipaged.contracts import Runner
from minipaged.errors import InvalidRequest, ModelError
from minipaged.models.config import ModelConfig
from minipaged.models.shards import check_parallel_sizes, local_config, shards_of
from minipaged.parallel.messages import RankLoaded, RankRefused
from minipaged.parallel.options import Options
from minipaged.parallel.runner import ParallelRunner
from minipaged.parallel.workers import RankProcesses
from minipaged.params import EngineConfig, KVCacheDtype
from minipaged.tiers import FastTier


@dataclass(frozen=True, slots=True)
class ParallelTier(FastTier):
    """The fast tier with a worker for each part of the model. Its `load_weights` returns the `RankProcesses`."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    worker_timeout: float = 60.0

    @classmethod
    def over(
        cls, tier: FastTier, tensor_parallel_size: int, pipeline_parallel_size: int, worker_timeout: float
    ) -> ParallelTier:
        """Make a ParallelTier with the settings of `tier`. Raises InvalidRequest if there are too few GPUs."""
        num_ranks = tensor_parallel_size * pipeline_parallel_size
        if tier.device == "cuda" and num_ranks > (there := torch.cuda.device_count()):
            raise InvalidRequest(
                f"tensor_parallel_size is {tensor_parallel_size} and pipeline_parallel_size is "
                f"{pipeline_parallel_size}, which needs {num_ranks} GPUs, but there are {there}; use smaller sizes, or "
                "device='cpu'"
            )
        parts = {each.name: getattr(tier, each.name) for each in fields(FastTier)}
        return cls(
            **parts,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            worker_timeout=worker_timeout,
        )

    @property
    def description(self) -> str:
        whole = FastTier.description.fget(self)  # type: ignore[attr-defined]
        sizes = f"tensor parallel {self.tensor_parallel_size}, pipeline parallel {self.pipeline_parallel_size}"
        return f"{whole}, in {self.tensor_parallel_size * self.pipeline_parallel_size} processes ({sizes})"

    def for_model(self, config: ModelConfig, device: str, dtype: str) -> FastTier:
        return self

    def load_weights(self, folder: Path, config: ModelConfig) -> Any:
        sizes = (self.tensor_parallel_size, self.pipeline_parallel_size)
        check_parallel_sizes(config, *sizes)  # before any process starts
        with self.kernels_compiled():
            pass  # otherwise all workers would compile them at the same time
        num_ranks = math.prod(sizes)
        where = (str(folder), self.device, self.dtype)
        num_threads = max(1, self.num_threads // num_ranks)
        options = [Options(*where, rank, *sizes, num_threads) for rank in range(num_ranks)]
        workers = RankProcesses(options, self.worker_timeout)
        try:
            for rank in range(num_ranks):
                loaded = workers.answer(rank, patient=True)
                if isinstance(loaded, RankRefused):
                    raise ModelError(loaded.error)
                assert isinstance(loaded, RankLoaded)
                if loaded.free_device_bytes is not None:
                    workers.free_device_bytes = min(workers.free_device_bytes, loaded.free_device_bytes)
        except BaseException:  # Ctrl-C, too
            workers.close()
            raise
        return workers

    def _free_bytes(self, weights: Any) -> int:
        return int(weights.free_device_bytes)

    def make_runner(self, config: ModelConfig, weights: Any, engine_config: EngineConfig) -> Runner:
        return ParallelRunner(weights, engine_config)

    def block_bytes(
        self,
        config: ModelConfig,
        block_size: int,
        kv_cache_dtype: KVCacheDtype = "auto",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        *,
        on_host: bool = False,
    ) -> int:
        """Bytes of a block: the sum over ranks that share memory, as on the host; else those of the largest rank."""
        each = [
            FastTier.block_bytes(self, local_config(config, shard), block_size, kv_cache_dtype)
            for stage in shards_of(config, self.tensor_parallel_size, self.pipeline_parallel_size)
            for shard in stage
        ]
        return sum(each) if on_host or self.device == "cpu" else max(each)
