"""The reference tier: its parts, how it loads and runs models, and the functions of it that other packages call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from minipaged.contracts import BlockAllocator, BlockTable, Runner, Sampled, SamplingInput, Tier
from minipaged.errors import InvalidRequest
from minipaged.models.config import ModelConfig
from minipaged.models.shards import Shard, cut_weights, local_config, shards_of
from minipaged.params import EngineConfig
from minipaged.tiers.device_tier import DeviceTier, has_static_scales, kept_as
from minipaged.tiers.drafted import DraftedRunner

if TYPE_CHECKING:
    from minipaged.reference.llama import Llama


@dataclass(frozen=True, slots=True)
class ReferenceTier(DeviceTier):
    """The tier that is written to be read, in NumPy."""

    DTYPES: ClassVar[tuple[str, ...]] = ("float32", "float64")

    @classmethod
    def on(cls, device: str, dtype: str) -> ReferenceTier:
        if device not in ("auto", "cpu"):
            raise InvalidRequest(f"device is {device!r}; the reference tier computes with NumPy, on 'cpu' only")
        if dtype not in ("auto", *cls.DTYPES):
            raise InvalidRequest(f"dtype is {dtype!r}; the reference tier supports auto, {', '.join(cls.DTYPES)}")
        return cls.of(reference_tier(), "cpu", "float32" if dtype == "auto" else dtype)

    @property
    def description(self) -> str:
        return f"reference tier on cpu: NumPy, {self.dtype}"

    def load_weights(self, folder: Path, config: ModelConfig) -> Any:
        import numpy as np

        from minipaged.models.loading import load_weights

        return load_weights(folder, config, np.dtype(self.dtype))

    def make_runner(self, config: ModelConfig, weights: Any, engine_config: EngineConfig) -> Runner:
        from minipaged.reference.sharded import ShardedLlama

        shards = shards_of(config, engine_config.tensor_parallel_size, engine_config.pipeline_parallel_size)
        if len(shards) == len(shards[0]) == 1:
            return self._llama(config, weights, engine_config)

        def llama(shard: Shard) -> Llama:
            return self._llama(local_config(config, shard), cut_weights(config, shard, weights), engine_config)

        return ShardedLlama(config, shards, [[llama(shard) for shard in stage] for stage in shards])

    def _llama(self, config: ModelConfig, weights: Any, engine_config: EngineConfig) -> Llama:
        from minipaged.models.loading import static_scales
        from minipaged.reference.kv_cache import KVCache
        from minipaged.reference.llama import Llama

        if not engine_config.has_windows:
            config = config.in_one_group()
        cache = KVCache(
            config.num_hidden_layers,
            engine_config.num_blocks,
            engine_config.block_size,
            config.num_key_value_heads,
            config.head_dim,
            engine_config.num_swap_blocks,
            self.dtype,
            kept_as(config, engine_config.kv_cache_dtype),
            static_scales(config, weights) if has_static_scales(config, engine_config) else None,
            config.groups.places,
        )
        return Llama(config, weights, cache)

    def drafted(self, runner: Runner, draft_runner: Runner) -> Runner:
        from minipaged.reference.speculation import verify

        return DraftedRunner(runner, draft_runner, verify)

    def free_device_bytes(
        self, config: ModelConfig, weights: Any, max_num_seqs: int, max_num_batched_tokens: int
    ) -> int | None:
        return None


def reference_tier() -> Tier:
    """The parts of the reference tier."""
    from minipaged.reference.beam_search import BeamSearch
    from minipaged.reference.sampling import sample

    return Tier("reference", *plain_parts(), BeamSearch, sample)


def plain_parts() -> tuple[type[BlockAllocator], type[BlockTable]]:
    """The parts of the reference tier that need no NumPy, and so also run in a web page."""
    from minipaged.reference.block_allocator import BlockAllocator
    from minipaged.reference.block_table import BlockTable

    return BlockAllocator, BlockTable


def reference_penalties(logits: Any, wanted: SamplingInput) -> Any:
    """The logits [vocab], in float64, from which the reference would choose the token for `wanted`."""
    from minipaged.reference.sampling import penalise

    return penalise(logits, wanted)


def reference_logprobs(logits: Any, token_ids: Sequence[int], num_logprobs: int) -> Sequence[Sampled]:
    """The reference's `Sampled` for each of these tokens, from the token's row of `logits` [tokens, vocab]."""
    from minipaged.reference.sampling import gather_logprobs

    return gather_logprobs(logits, token_ids, num_logprobs)


def reference_draw(logits: Any, wanted: SamplingInput) -> tuple[float, Any]:
    """Return the number that the reference would draw for `wanted`, and the running sum of the probabilities [vocab].
    The drawn token is the one where the number falls between two sums."""
    import numpy as np

    from minipaged.reference.sampling import distribution, penalise, uniform

    chances = distribution(penalise(logits, wanted), wanted.params)
    sums = np.zeros(len(logits))
    sums[chances.token_ids] = chances.cumulative / chances.cumulative[-1]
    return uniform(wanted.seed, wanted.stream, wanted.position), np.maximum.accumulate(sums)


def reference_quantizer() -> Callable[..., Iterator[dict[str, Any]]]:
    """The function that quantizes a model layer by layer (`reference/quantize/layers.py`)."""
    from minipaged.reference.quantize.layers import quantize_layers

    return quantize_layers
