"""A tier on a device: its parts, how it loads and runs a model, and how much memory a cache may have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from minipaged.contracts import Runner, Tier
from minipaged.models.config import ModelConfig
from minipaged.models.shards import local_config, shards_of
from minipaged.params import EngineConfig, KVCacheDtype


@dataclass(frozen=True, slots=True)
class DeviceTier(Tier, ABC):
    """One tier on one device: the parts that the engine uses, and methods that load and run a model."""

    device: str
    """The device, "cpu" or "cuda"."""
    dtype: str
    """The data type that it computes in, as in "float32"."""

    ITEM_BYTES: ClassVar[dict[str, int]] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

    @classmethod
    def of(cls, parts: Tier, device: str, dtype: str) -> Self:
        """Make the tier of these parts on a device."""
        return cls(**{each.name: getattr(parts, each.name) for each in fields(parts)}, device=device, dtype=dtype)

    @property
    @abstractmethod
    def description(self) -> str:
        """Tier, device, kernels and dtype, in a few words."""

    def for_model(self, config: ModelConfig, device: str, dtype: str) -> DeviceTier:
        """Return this tier; or, if its device has no room for the kernels that the model needs, another one that agrees
        with the `device` and the `dtype` that the user gave. Raises InvalidRequest if there is none."""
        return self

    @abstractmethod
    def load_weights(self, folder: Path, config: ModelConfig) -> Any:
        """Load the checkpoint's weights, in the form that `make_runner` takes. Raises ModelError."""

    @abstractmethod
    def make_runner(self, config: ModelConfig, weights: Any, engine_config: EngineConfig) -> Runner:
        """Make the tier's Llama with its KV cache. Raises MemoryError if there is no room for the cache."""

    @abstractmethod
    def drafted(self, runner: Runner, draft_runner: Runner) -> Runner:
        """Join the runners of a model and of its draft model, which have the same number of blocks."""

    @abstractmethod
    def free_device_bytes(
        self, config: ModelConfig, weights: Any, max_num_seqs: int, max_num_batched_tokens: int
    ) -> int | None:
        """Device memory, in bytes, that a cache can use beside these weights; None if the cache is in host memory."""

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
        """Bytes of one block: K and V of `block_size` tokens in every layer of a group, on all ranks that share a
        memory. Each stage has room for as many layers as its largest group has there.

        `on_host`: in the pool that blocks are swapped to.
        """
        in_8_bits = kept_as(config, kv_cache_dtype) != "auto"  # then each head has a scale, in float32
        per_head = config.head_dim + 4 if in_8_bits else config.head_dim * self.ITEM_BYTES[self.dtype]
        kv_heads = max(config.num_key_value_heads, tensor_parallel_size)  # each rank has one at least
        stages = [local_config(config, stage[0]) for stage in shards_of(config, 1, pipeline_parallel_size)]
        num_layers = sum(stage.groups.layers_per_block for stage in stages)
        return block_size * num_layers * 2 * kv_heads * per_head


def kept_as(config: ModelConfig, kv_cache_dtype: str) -> str:
    """The format in which keys and values are stored; for "auto" it is the checkpoint's."""
    return config.kv_cache_dtype if kv_cache_dtype == "auto" else kv_cache_dtype


def has_static_scales(config: ModelConfig, engine_config: EngineConfig) -> bool:
    """Whether keys and values are rounded with the checkpoint's scales. (A format given by name computes its own.)"""
    return engine_config.kv_cache_dtype == "auto" and config.kv_cache_dtype != "auto"
