"""What a tier is on a device: its parts, how a model is loaded there, and what its cache may take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from minipaged.contracts import Runner, Tier
from minipaged.models.config import ModelConfig
from minipaged.params import EngineConfig, KVCacheDtype


@dataclass(frozen=True, slots=True)
class DeviceTier(Tier, ABC):
    """One tier on one device: its parts, as the engine takes them, and how to load and run a model with it."""

    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """What it computes in: "float32", ..."""

    ITEM_BYTES: ClassVar[dict[str, int]] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

    @classmethod
    def of(cls, parts: Tier, device: str, dtype: str) -> Self:
        """The tier of these parts, there."""
        return cls(**{each.name: getattr(parts, each.name) for each in fields(parts)}, device=device, dtype=dtype)

    @property
    @abstractmethod
    def description(self) -> str:
        """Tier, device, kernels and dtype, in a few words."""

    def for_model(self, config: ModelConfig, device: str, dtype: str) -> DeviceTier:
        """This tier; or, where its device has no room for the kernels that the model needs, another one that goes with
        the `device` and the `dtype` that were asked for. Raises InvalidRequest where there is none."""
        return self

    @abstractmethod
    def load_weights(self, folder: Path, config: ModelConfig) -> Any:
        """The checkpoint's weights, as `make_runner` wants them. Raises ModelError."""

    @abstractmethod
    def make_runner(self, config: ModelConfig, weights: Any, engine_config: EngineConfig) -> Runner:
        """The tier's Llama with its KV cache. Raises MemoryError when there is no room for the cache."""

    @abstractmethod
    def free_device_bytes(
        self, config: ModelConfig, weights: Any, max_num_seqs: int, max_num_batched_tokens: int
    ) -> int | None:
        """Memory of the device that a cache can have beside these weights; None where it is the host's memory."""

    def block_bytes(
        self,
        config: ModelConfig,
        block_size: int,
        kv_cache_dtype: KVCacheDtype = "auto",
        tensor_parallel_size: int = 1,
        *,
        on_host: bool = False,
    ) -> int:
        """Bytes of one block: K and V of `block_size` tokens in every layer, on all ranks that share a memory.

        `on_host`: in the pool that blocks are swapped to.
        """
        in_8_bits = kept_as(config, kv_cache_dtype) != "auto"  # then each head has a scale, in float32
        per_head = config.head_dim + 4 if in_8_bits else config.head_dim * self.ITEM_BYTES[self.dtype]
        kv_heads = max(config.num_key_value_heads, tensor_parallel_size)  # each rank has one at least
        return block_size * config.num_hidden_layers * 2 * kv_heads * per_head


def kept_as(config: ModelConfig, kv_cache_dtype: str) -> str:
    """How keys and values are kept: with "auto" as the checkpoint has it."""
    return config.kv_cache_dtype if kv_cache_dtype == "auto" else kv_cache_dtype


def has_static_scales(config: ModelConfig, engine_config: EngineConfig) -> bool:
    """Whether keys and values are rounded with the checkpoint's scales. (What is asked for by name finds its own.)"""
    return engine_config.kv_cache_dtype == "auto" and config.kv_cache_dtype != "auto"
