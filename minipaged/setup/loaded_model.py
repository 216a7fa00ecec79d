"""The loaded model, and checks that run before loading, so that a wrong setting fails at once and not after minutes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from minipaged import tiers
from minipaged.contracts import Runner
from minipaged.engine.policies import POLICIES
from minipaged.errors import InvalidRequest
from minipaged.handover.disk_floor import DiskFloor
from minipaged.handover.kv_connector import Handshake
from minipaged.models import hub
from minipaged.models.config import ModelConfig
from minipaged.models.loading import load_config
from minipaged.models.shards import check_parallel_sizes
from minipaged.models.tokenizer import Tokenizer
from minipaged.params import EngineConfig, KVCacheDtype, no_drafts_with
from minipaged.scheduling import MakePolicy
from minipaged.setup.settings import GivenSettings, Settings
from minipaged.tiers import DeviceTier


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model's weights, with all that is fixed by loading them. It has no KV cache, so several LLMs can share it."""

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer | None
    tier: DeviceTier
    weights: Any
    draft: LoadedModel | None = None
    """The draft model, whose K/V lie in the same blocks; None: there is none."""

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

        `max_model_len` is checked, and `check` is called (it may raise InvalidRequest), before the weights are loaded.
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
        """End the model's worker processes, if it has any (see `LLM.close`)."""
        if close := getattr(self.weights, "close", None):  # a parallel tier's weights are its worker processes
            close()

    def settled(self, asked: Settings) -> Settings:
        """The settings of another LLM that shares this model. Raises InvalidRequest for one that the loaded model does
        not allow."""
        for name in ("tier", "device", "dtype"):
            if (value := getattr(asked, name)) != "auto":
                raise InvalidRequest(f"{name} is {value!r}, but it was settled when the model was loaded; leave it out")
        if isinstance(self.tier, tiers.FastTier):
            left_open = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "worker_timeout": 60.0}
            settled: dict[str, Any] = {}
            for name, default in left_open.items():
                settled[name] = getattr(self.tier, name, default)
                if (value := getattr(asked, name)) not in (default, settled[name]):
                    raise InvalidRequest(
                        f"{name} is {value:g}, but the model was loaded for {settled[name]:g}; leave it out"
                    )
            asked = replace(asked, **settled)
        check_length(self.config, asked.max_model_len)
        return asked

    def with_draft_model(self, asked: Settings) -> LoadedModel:
        """This model with the draft model that the settings name (`check_for_model` has seen it), or without one. It is
        loaded unless this model has it already. Raises ModelError."""
        name = asked.speculation.model if asked.speculation else None
        if name is None:
            return self if self.draft is None else replace(self, draft=None)
        folder = hub.resolve(name)
        if self.draft is not None and self.draft.folder == folder:
            return self
        config = load_config(folder).in_one_group()
        weights = self.tier.load_weights(folder, config)
        return replace(self, draft=LoadedModel(folder, config, self.tokenizer, self.tier, weights))

    @property
    def draft_cost(self) -> float:
        """The size of the draft model's weight files, as a share of the model's. That is about its share of the time,
        if both are read as they are stored. 0 without a draft model."""
        return 0.0 if self.draft is None else _weight_bytes(self.draft.folder) / _weight_bytes(self.folder)

    def make_runner(self, engine_config: EngineConfig) -> Runner:
        """Make the model's runner with its KV cache, and with its draft model if it has one. Raises MemoryError if
        there is no room for the cache."""
        runner = self.tier.make_runner(self.config, self.weights, engine_config)
        if self.draft is None:
            return runner
        return self.tier.drafted(runner, self.draft.make_runner(engine_config))

    def block_bytes(
        self,
        block_size: int,
        kv_cache_dtype: KVCacheDtype = "auto",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        *,
        on_host: bool = False,
    ) -> int:
        """Bytes of one block: K and V of `block_size` tokens in every layer of a group, on all ranks that share a
        memory, and those of the draft model. `on_host`: in the pool that blocks are swapped to."""
        kind = (block_size, kv_cache_dtype, tensor_parallel_size, pipeline_parallel_size)
        own = self.tier.block_bytes(self.config, *kind, on_host=on_host)
        return own + (0 if self.draft is None else self.draft.block_bytes(*kind, on_host=on_host))


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def check_before_loading(config: ModelConfig | None = None, **settings: Unpack[GivenSettings]) -> None:
    """Raise InvalidRequest for an LLM's settings that are wrong for every model, or for the model of `config`."""
    asked = Settings(**settings)
    policy_named(asked.scheduling_policy)
    tiers.check_names(asked.tier, known_dtype(asked.dtype))
    if config is not None:
        check_length(config, asked.max_model_len)
        check_parallel_sizes(config, asked.tensor_parallel_size, asked.pipeline_parallel_size)


def check_length(config: ModelConfig, max_model_len: int | None) -> None:
    """Raise InvalidRequest if `max_model_len` is longer than the model's context length."""
    longest = config.max_position_embeddings
    if max_model_len is not None and max_model_len > longest:
        raise InvalidRequest(f"max_model_len is {max_model_len}; this model was made for at most {longest} tokens")


def check_draft_model(
    name: str, folder: Path, config: ModelConfig, tier: DeviceTier, max_model_len: int | None
) -> None:
    """Find (or fetch) the draft model. Raises ModelError, and InvalidRequest if it does not go with the model in
    `folder`."""
    draft = hub.resolve(name)
    own = load_config(draft)
    if own.vocab_size != config.vocab_size:
        raise InvalidRequest(
            f"the draft model {name} has a vocabulary of {own.vocab_size} tokens, and the model one of "
            f"{config.vocab_size}; take a smaller model of the same family"
        )
    if max_model_len is not None and max_model_len > own.max_position_embeddings:
        raise InvalidRequest(
            f"max_model_len is {max_model_len}; the draft model {name} was made for at most "
            f"{own.max_position_embeddings} tokens"
        )
    have_tokens = all((each / "tokenizer.json").is_file() for each in (folder, draft))
    if have_tokens and Tokenizer(folder).vocabulary != Tokenizer(draft).vocabulary:
        raise InvalidRequest(
            f"the draft model {name} has other tokens than {folder.name}: their tokenizers differ; take a "
            "smaller model of the same family"
        )
    try:
        tier.for_model(own, tier.device, tier.dtype)
    except InvalidRequest as error:
        raise InvalidRequest(f"the draft model {name}: {error}") from None


def check_for_model(asked: Settings, folder: Path, config: ModelConfig, tier: DeviceTier) -> None:
    """Raise InvalidRequest if drafts, the KV connector or the disk floor cannot be used with this model, or if other
    engines of the connector have blocks of another kind."""
    config = config.up_to(asked.max_model_len)
    if asked.speculation and any(config.groups.windows):
        raise InvalidRequest(no_drafts_with(config.groups.windows))
    if asked.speculation and asked.speculation.model is not None:
        check_draft_model(asked.speculation.model, folder, config, tier, asked.max_model_len)
    for connector in (asked.kv_connector, disk_floor(asked)):
        if connector is not None and config.groups.windows != (None,):
            name = "kv_connector" if connector is asked.kv_connector else "kv_cache_folder"
            raise InvalidRequest(
                f"{name} is given, but some of the model's layers have a window, and blocks of such models are not "
                "handed over: a block has only a part of the layers; leave it out, or give a max_model_len of at "
                f"most {min(window for window in config.layer_windows if window)}, beyond which a window is passed"
            )
        if connector is not None:
            connector.check(handshake(asked, folder, config, tier))


def disk_floor(asked: Settings) -> DiskFloor | None:
    """The floor on disk, not open yet; None if none is asked for."""
    if asked.kv_cache_folder is None:
        return None
    return DiskFloor(asked.kv_cache_folder, math.ceil(asked.kv_cache_disk_space * 2**30))


def handshake(asked: Settings, folder: Path, config: ModelConfig, tier: DeviceTier) -> Handshake:
    """The description of this engine's blocks, for a KV connector. Blocks with a draft model's K/V are another
    model's."""
    model, size = hub.fingerprint(folder), tier.block_bytes(config, asked.block_size, asked.kv_cache_dtype)
    if asked.speculation and asked.speculation.model is not None:
        draft = hub.resolve(asked.speculation.model)
        model += f"+{hub.fingerprint(draft)}"
        size += tier.block_bytes(load_config(draft).in_one_group(), asked.block_size, asked.kv_cache_dtype)
    return Handshake(
        model=model,
        dtype=tier.dtype,
        kv_cache_dtype=tiers.kept_as(config, asked.kv_cache_dtype),
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        block_size=asked.block_size,
        block_bytes=size,
    )


def known_dtype(name: str) -> str:
    """Our name for a dtype; vLLM has other names for two of them."""
    return {"half": "float16", "float": "float32"}.get(name, name)


def policy_named(policy: str | MakePolicy) -> MakePolicy:
    """The class of the scheduling policy, given by name or as itself. Raises InvalidRequest for an unknown name."""
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        names = ", ".join(map(repr, POLICIES))
        raise InvalidRequest(
            f"scheduling_policy is {policy!r}; choose {names}, or give a class of your own (on the command line, "
            "FILE.py:Class)"
        )
    return POLICIES[policy]
