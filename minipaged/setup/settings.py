"""The settings of an `LLM`: its keyword arguments, which are also options of the command line (`options.py`).

A setting that is None gets its value once the model is loaded. The `EngineConfig` has the final values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, TypeVar

from minipaged.contracts import BlockAllocator
from minipaged.errors import InvalidRequest
from minipaged.handover.kv_connector import KVConnector
from minipaged.params import (
    EngineConfig,
    EngineSettings,
    KVCacheDtype,
    PreemptionMode,
    SpeculativeConfig,
    check,
    check_speculation,
    check_tiers,
    setting,
)
from minipaged.scheduling import MakePolicy

MakeAllocator = Callable[[int], BlockAllocator]
"""A class of block allocators (or a function) to call with the number of blocks."""

DISK_SPACE = 4.0
"""The default of `kv_cache_disk_space`."""


def left_open(name: str) -> Any:
    """Make a field like EngineConfig's of this name that the user may leave open (None)."""
    [known] = [each for each in fields(EngineConfig) if each.name == name]
    return field(default=None, metadata=known.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(EngineSettings):
    """All settings of an `LLM`. Raises InvalidRequest (a ValueError) for a value out of range."""

    tier: str = "auto"
    """Tier to compute with: reference, fast, or auto, which is fast if that is installed."""
    device: str = "auto"
    """Device to compute on: cpu, cuda, or auto, which is a GPU if there is one."""
    dtype: str = "auto"
    """Data type to compute in: float32, bfloat16, float16, float64, or auto, which suits the device."""
    num_blocks: int | None = left_open("num_blocks")
    """Blocks in the KV cache's pool; if left open, the number that `gpu_memory_utilization` allows."""
    gpu_memory_utilization: float = setting(0.9, above=0, at_most=1)
    """Share to use of the memory that is free after loading the weights: the GPU's memory, or without a GPU the
    machine's."""
    num_swap_blocks: int | None = left_open("num_swap_blocks")
    """Blocks in the host pool that swapping uses; if left open, a quarter of `num_blocks`, or the number that fits into
    half of the host's free memory, if that is less."""
    swap_space: float | None = setting(None, at_least=0, at_most=2**20)
    """Size of the host pool in GiB, as older versions of vLLM had it; give this or `num_swap_blocks`."""
    max_model_len: int | None = left_open("max_model_len")
    """Maximum length of a sequence, prompt and output together, in tokens; if left open (or -1), the model's maximum,
    or what the pool holds if that is less."""
    async_scheduling: bool | None = left_open("async_scheduling")
    """Launch a step before the tokens of the step before are known; this changes no token. If left open, on with a GPU,
    which then need not wait for the host, unless there is a `speculative_config`. No effect with
    `pipeline_parallel_size` above 1."""
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None
    """How to draft tokens, several of which one step verifies. A dict with `method` ("ngram" or "draft_model"),
    `num_speculative_tokens`, and perhaps `model`, `prompt_lookup_max`, `prompt_lookup_min` and
    `disable_by_batch_size`."""
    allocator: MakeAllocator | None = None
    """Class of block allocators to use instead of the tier's own; it is checked at every call."""
    worker_timeout: float = setting(60.0, above=0)
    """Seconds that a step may take in worker processes before it is given up. (There are workers if
    `tensor_parallel_size` or `pipeline_parallel_size` is above 1.)"""
    scheduling_policy: str | MakePolicy = "fcfs"
    """Policy that decides who is served when: fcfs (first come, first served), priority, shortest-first,
    longest-prefix-first (while it is cached), or a class of your own (minipaged/scheduling.py)."""
    kv_connector: KVConnector | None = None
    """Connector that hands full blocks over to other engines and loads theirs: `SharedStorageConnector(folder)`, or one
    of your own (minipaged/handover/kv_connector.py)."""
    kv_cache_folder: str | None = None
    """Folder of the blocks that `kv_cache_tiers` keeps on "disk". Other engines may use it too, and so may a
    `SharedStorageConnector`."""
    kv_cache_disk_space: float = setting(DISK_SPACE, above=0, at_most=2**20)
    """Size of all blocks in `kv_cache_folder` in GiB, at least that of one; the least recently used are removed."""

    def __post_init__(self) -> None:
        if self.max_model_len in (-1, "auto"):  # vLLM's ways to leave it open
            object.__setattr__(self, "max_model_len", None)
        check(self)
        if self.allocator is not None and not callable(self.allocator):
            raise InvalidRequest(
                f"allocator is {self.allocator!r}; it must be a class (or a function) that makes allocators"
            )
        if self.preemption == "swap" and 0 in (self.num_swap_blocks, self.swap_space):
            raise InvalidRequest(
                "preemption is 'swap' but num_swap_blocks is 0; give the host pool some blocks or choose 'recompute'"
            )
        check_tiers(self, 0 in (self.num_swap_blocks, self.swap_space))
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.read(self.speculative_config))
        check_speculation(self, self.speculation, self.async_scheduling)
        if self.swap_space is not None and self.num_swap_blocks is not None:
            raise InvalidRequest(
                f"swap_space is {self.swap_space} GiB and num_swap_blocks is {self.num_swap_blocks}; give one of them"
            )
        if ("disk" in self.kv_cache_tiers) != (self.kv_cache_folder is not None):
            raise InvalidRequest(
                f"kv_cache_tiers is {self.kv_cache_tiers!r} and kv_cache_folder is {self.kv_cache_folder!r}; "
                "'disk' and a folder go together: give ('host', 'disk') and a folder, or neither"
            )
        if self.kv_cache_folder is None and self.kv_cache_disk_space != DISK_SPACE:
            raise InvalidRequest(
                f"kv_cache_disk_space is {self.kv_cache_disk_space} but there is no kv_cache_folder; give ('host', "
                "'disk') as kv_cache_tiers and a folder, or leave it out"
            )
        if self.kv_cache_folder is not None:
            self._check_one_rank("kv_cache_folder", "can keep blocks on disk")
        if self.kv_connector is not None:
            self._check_kv_connector()

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The `speculative_config` as it was read."""
        return self.speculative_config if isinstance(self.speculative_config, SpeculativeConfig) else None

    def _check_kv_connector(self) -> None:
        if self.kv_cache_tiers:
            raise InvalidRequest(
                "kv_connector and kv_cache_tiers are both given, and do not work together; leave one of them out (what "
                "a connector has left in a folder is found with that as kv_cache_folder)"
            )
        if isinstance(self.kv_connector, type):
            name = self.kv_connector.__name__
            raise InvalidRequest(f"kv_connector is the class {name}; give an instance, as in {name}(folder)")
        methods = ("check", "open", "lacking", "store", "load")
        if missing := [name for name in methods if not hasattr(self.kv_connector, name)]:
            raise InvalidRequest(
                f"kv_connector is {self.kv_connector!r}, which has no {', '.join(missing)}; give a "
                "SharedStorageConnector(folder), or another with these methods (minipaged/handover/kv_connector.py)"
            )
        if not self.enable_prefix_caching:
            raise InvalidRequest(
                "kv_connector is given but enable_prefix_caching is False; the prefix cache hands the blocks over, so "
                "leave one of them out"
            )
        self._check_one_rank("kv_connector", "can hand blocks over")

    def _check_one_rank(self, given: str, can: str) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (value := getattr(self, name)) > 1:
                raise InvalidRequest(
                    f"{given} is given but {name} is {value}, where each rank has a part of every block; only engines "
                    f"of one rank {can}, so leave one of them out"
                )


class GivenSettings(TypedDict, total=False):
    """The settings that a caller gives, with the names and types of `Settings`, for type checkers and editors."""

    tier: str
    device: str
    dtype: str
    block_size: int
    kv_cache_dtype: KVCacheDtype
    num_blocks: int | None
    gpu_memory_utilization: float
    num_swap_blocks: int | None
    swap_space: float | None
    preemption: PreemptionMode
    enable_prefix_caching: bool
    kv_cache_tiers: tuple[str, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    async_scheduling: bool | None
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None
    allocator: MakeAllocator | None
    worker_timeout: float
    scheduling_policy: str | MakePolicy
    kv_connector: KVConnector | None
    kv_cache_folder: str | None
    kv_cache_disk_space: float
    tensor_parallel_size: int
    pipeline_parallel_size: int
    seed: int
    debug: bool


Function = TypeVar("Function", bound=Callable[..., Any])


def takes_settings(function: Function) -> Function:
    """Decorator that shows each setting in the signature of a function with `**settings`, for help() and completion."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    each = (inspect.Parameter(f.name, keyword, default=f.default, annotation=f.type) for f in fields(Settings))
    return with_parameters(function, inspect.signature(function), each)


def with_parameters(function: Function, signature: inspect.Signature, each: Iterable[inspect.Parameter]) -> Function:
    """Return the function with its last parameter, `**name`, replaced by these parameters in its signature."""
    own = list(signature.parameters.values())[:-1]
    function.__signature__ = signature.replace(parameters=[*own, *each])  # type: ignore[attr-defined]
    return function
