"""What an `LLM` can be told beside its model: its keyword arguments, and options of the command line (`options.py`).

What is None is found out when the model has been loaded; an `EngineConfig` is what has become of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, TypeVar

from minipaged.contracts import BlockAllocator
from minipaged.errors import InvalidRequest
from minipaged.handover.kv_connector import KVConnector
from minipaged.params import EngineConfig, EngineSettings, KVCacheDtype, PreemptionMode, check, setting
from minipaged.scheduling import MakePolicy

MakeAllocator = Callable[[int], BlockAllocator]
"""A class of block allocators, or a function, given the number of blocks."""


def left_open(name: str) -> Any:
    """A field of EngineConfig that the user may leave open."""
    [known] = [each for each in fields(EngineConfig) if each.name == name]
    return field(default=None, metadata=known.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(EngineSettings):
    """All settings of an `LLM`. Raises InvalidRequest (a ValueError) for a value out of range."""

    tier: str = "auto"
    """Which tier computes: reference, fast, or auto, which is the fast one where it is installed."""
    device: str = "auto"
    """Where it computes: cpu, cuda, or auto, which is a GPU where there is one."""
    dtype: str = "auto"
    """What it computes in: float32, bfloat16, float16, float64, or auto, which is what suits the device."""
    num_blocks: int | None = left_open("num_blocks")
    """Blocks in the KV cache's pool; if left open, as many as `gpu_memory_utilization` allows."""
    gpu_memory_utilization: float = setting(0.9, above=0, at_most=1)
    """Share of the memory to use that is free after loading the weights: the GPU's, or the machine's where there is no
    GPU."""
    num_swap_blocks: int | None = left_open("num_swap_blocks")
    """Blocks in the host pool that swapping uses; if left open, a quarter of `num_blocks`, or what half of the host's
    free memory holds, if that is less."""
    swap_space: float | None = setting(None, at_least=0, at_most=2**20)
    """The same in GiB, as vLLM had it: give one of them."""
    max_model_len: int | None = left_open("max_model_len")
    """Longest sequence, prompt and output together, in tokens; if left open (or -1), the model's (as far as its sliding
    window reaches, where it has one), or the pool's where that is smaller."""
    async_scheduling: bool | None = left_open("async_scheduling")
    """Launch a step before the tokens of the one before are known; it changes no token. If left open, where there is a
    GPU, which then need not wait for the host. No effect with `pipeline_parallel_size` above 1."""
    allocator: MakeAllocator | None = None
    """A class of block allocators to use in place of the tier's own; it is checked at every call."""
    worker_timeout: float = setting(60.0, above=0)
    """With `tensor_parallel_size` or `pipeline_parallel_size`: how many seconds a step may take in other processes,
    before it is given up."""
    scheduling_policy: str | MakePolicy = "fcfs"
    """Who is served when: fcfs (first come, first served), priority, shortest-first, or a class of one's own
    (minipaged/scheduling.py)."""
    kv_connector: KVConnector | None = None
    """By what full blocks are handed over to other engines, and had from them: `SharedStorageConnector(folder)`, or one
    of one's own (minipaged/handover/kv_connector.py)."""

    def __post_init__(self) -> None:
        if self.max_model_len in (-1, "auto"):  # so vLLM has it
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
        if self.swap_space is not None and self.num_swap_blocks is not None:
            raise InvalidRequest(
                f"swap_space is {self.swap_space} GiB and num_swap_blocks is {self.num_swap_blocks}; give one of them"
            )
        if self.kv_connector is not None:
            self._check_kv_connector()

    def _check_kv_connector(self) -> None:
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
                "kv_connector is given but enable_prefix_caching is False; blocks are handed over by the prefix cache, "
                "so leave one of them out"
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (value := getattr(self, name)) > 1:
                raise InvalidRequest(
                    f"kv_connector is given and {name} is {value}, where each rank has a part of every block; blocks "
                    "are handed over by engines of one rank, so leave one of them out"
                )


class GivenSettings(TypedDict, total=False):
    """Those settings that a caller gives: the names and types of `Settings`, for type checkers and editors."""

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
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    async_scheduling: bool | None
    allocator: MakeAllocator | None
    worker_timeout: float
    scheduling_policy: str | MakePolicy
    kv_connector: KVConnector | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    seed: int
    debug: bool


Function = TypeVar("Function", bound=Callable[..., Any])


def takes_settings(function: Function) -> Function:
    """Show every setting in the signature of a function that takes `**settings`, as help() and completion read it."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    each = (inspect.Parameter(f.name, keyword, default=f.default, annotation=f.type) for f in fields(Settings))
    return with_parameters(function, inspect.signature(function), each)


def with_parameters(function: Function, signature: inspect.Signature, each: Iterable[inspect.Parameter]) -> Function:
    """The function, with these parameters in its signature in place of its last, `**name`."""
    own = list(signature.parameters.values())[:-1]
    function.__signature__ = signature.replace(parameters=[*own, *each])  # type: ignore[attr-defined]
    return function
