"""A model that has been loaded, and the checks that come before loading: wrong settings cost no minutes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from minipaged import tiers
from minipaged.engine.policies import POLICIES
from minipaged.errors import InvalidRequest
from minipaged.handover.kv_connector import Handshake
from minipaged.models import hub
from minipaged.models.config import ModelConfig
from minipaged.models.loading import load_config
from minipaged.models.shards import check_parallel_sizes
from minipaged.models.tokenizer import Tokenizer
from minipaged.params import KVCacheDtype
from minipaged.scheduling import MakePolicy
from minipaged.setup.settings import GivenSettings, Settings
from minipaged.tiers import DeviceTier


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model's weights, and all that is settled with them. Several LLMs can share one; it has no KV cache."""

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer | None
    tier: DeviceTier
    weights: Any

    @classmethod
    def load(
        cls,
        model: str | Path,
        tier: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        worker_timeout: float = 60.0,
        max_model_len: int | None = None,
        check: Callable[[Path, ModelConfig, DeviceTier], None] | None = None,
    ) -> LoadedModel:
        """Find (or fetch) `model` and load it. Raises ModelError, InvalidRequest and WorkerFailed.

        `max_model_len` and `check` are looked at before the weights are loaded. `check` may raise InvalidRequest.
        """
        dtype = known_dtype(dtype)
        chosen = tiers.choose_tier(tier, device, dtype)
        folder = hub.resolve(model)
        config = load_config(folder)
        check_length(config, max_model_len)
        sizes = (tensor_parallel_size, pipeline_parallel_size)
        check_parallel_sizes(config, *sizes)
        chosen = chosen.for_model(config, device, dtype)
        if check:
            check(folder, config, chosen)
        if sizes != (1, 1) and isinstance(chosen, tiers.FastTier):
            from minipaged.parallel.tier import ParallelTier

            chosen = ParallelTier.over(chosen, *sizes, worker_timeout)
        tokenizer = Tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
        return cls(folder, config, tokenizer, chosen, chosen.load_weights(folder, config))

    def close(self) -> None:
        """See `LLM.close`."""
        if close := getattr(self.weights, "close", None):  # a parallel tier's weights are its worker processes
            close()

    def settled(self, asked: Settings) -> Settings:
        """The settings of another LLM of this model. Raises InvalidRequest for one that contradicts what is loaded."""
        for name in ("tier", "device", "dtype"):
            if (value := getattr(asked, name)) != "auto":
                raise InvalidRequest(f"{name} is {value!r}, but that was settled when the model was loaded")
        if isinstance(self.tier, tiers.FastTier):
            left_open = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "worker_timeout": 60.0}
            settled: dict[str, Any] = {}
            for name, default in left_open.items():
                settled[name] = getattr(self.tier, name, default)
                if (value := getattr(asked, name)) not in (default, settled[name]):
                    raise InvalidRequest(f"{name} is {value:g}, but the model was loaded for {settled[name]:g}")
            asked = replace(asked, **settled)
        check_length(self.config, asked.max_model_len)
        return asked

    def block_bytes(self, block_size: int, kv_cache_dtype: KVCacheDtype = "auto", tensor_parallel_size: int = 1) -> int:
        """Bytes of one block: K and V of `block_size` tokens in every layer, on all ranks together."""
        return self.tier.block_bytes(self.config, block_size, kv_cache_dtype, tensor_parallel_size)


def check_before_loading(config: ModelConfig | None = None, **settings: Unpack[GivenSettings]) -> None:
    """Raise InvalidRequest for an LLM's settings that are wrong for every model, or for the model of `config`."""
    asked = Settings(**settings)
    policy_named(asked.scheduling_policy)
    tiers.check_names(asked.tier, known_dtype(asked.dtype))
    if config is not None:
        check_length(config, asked.max_model_len)
        check_parallel_sizes(config, asked.tensor_parallel_size, asked.pipeline_parallel_size)


def check_length(config: ModelConfig, max_model_len: int | None) -> None:
    """Raise InvalidRequest if `max_model_len` is more tokens than the model was made for."""
    context, made_for = config.context_length, config.max_position_embeddings
    if max_model_len is None or max_model_len <= context:
        return
    why = f"this model was made for at most {context} tokens"
    if context < made_for:
        why = (
            f"this model sees no further back than {context} tokens (its sliding window), and attention here "
            f"has no such limit; up to max_model_len={context} it makes no difference"
        )
    raise InvalidRequest(f"max_model_len is {max_model_len}; {why}")


def check_connector(asked: Settings, folder: Path, config: ModelConfig, tier: DeviceTier) -> None:
    """Raise InvalidRequest if the KV connector is unusable, or if its other engines have blocks of another kind."""
    if asked.kv_connector is not None:
        asked.kv_connector.check(handshake(asked, folder, config, tier))


def handshake(asked: Settings, folder: Path, config: ModelConfig, tier: DeviceTier) -> Handshake:
    """The kind of this engine's blocks, for a KV connector."""
    return Handshake(
        model=hub.fingerprint(folder),
        dtype=tier.dtype,
        kv_cache_dtype=tiers.kept_as(config, asked.kv_cache_dtype),
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        block_size=asked.block_size,
    )


def known_dtype(name: str) -> str:
    """Our name of a dtype; vLLM has other names for two of them."""
    return {"half": "float16", "float": "float32"}.get(name, name)


def policy_named(policy: str | MakePolicy) -> MakePolicy:
    """The scheduling policy's class. Raises InvalidRequest for a name that no policy has."""
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        names = ", ".join(map(repr, POLICIES))
        raise InvalidRequest(
            f"scheduling_policy is {policy!r}; choose {names}, or give a class of yours (on the command line, "
            "FILE.py:Class)"
        )
    return POLICIES[policy]
