"""The tiers by name: the one file that knows the wings of the house, `reference/` and `fast/`.

Everything above asks here for a tier's parts, and for the weights and the runner that compute with them on a device.
"""

from __future__ import annotations

import gc
import importlib.util
import platform
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from minipaged.contracts import BlockAllocator, BlockTable, Runner, Sampled, SamplingInput, Tier
from minipaged.errors import InvalidRequest
from minipaged.models.config import ModelConfig
from minipaged.models.shards import Shard, cut_weights, local_config, shards_of
from minipaged.params import EngineConfig, KVCacheDtype
from minipaged.tiers.devices import gpu_problem, has_nvidia_gpu

if TYPE_CHECKING:
    from minipaged.fast.llama import Llama as FastLlama
    from minipaged.fast.sharded import Ranks, StageLlama
    from minipaged.reference.llama import Llama

AnyLlama = TypeVar("AnyLlama", bound="FastLlama")

NEEDED_BY_FAST = ("torch", "numba")
"""And triton, on a machine with a GPU."""
HOW_TO_GET_FAST = (
    "install minipaged with its extra 'fast' "
    f"(in a clone: {sys.executable} -m pip install -c constraints.txt -e '.[fast]')"
)
SCRATCH_BYTES = 2 << 30
"""Of a GPU's memory, what is left to sampling, swapping and the libraries."""


def choose_tier(name: str, device: str = "auto", dtype: str = "auto") -> DeviceTier:
    """The tier called `name`, on `device`, computing in `dtype`. Raises InvalidRequest where that cannot be had.

    "auto" is the fast tier where its packages are installed and it knows the dtype, else the reference.
    """
    check_names(name, dtype)
    missing = missing_for_fast()
    if name == "fast" or (name == "auto" and not missing and dtype in (*FastTier.DTYPES, "auto")):
        return FastTier.on(device, dtype)
    try:
        chosen = ReferenceTier.on(device, dtype)
    except InvalidRequest as error:
        if name == "reference" or not missing:
            raise
        raise InvalidRequest(f"{error}; the fast tier, not installed here, knows more: {HOW_TO_GET_FAST}") from None
    if name == device == "auto" and missing and dtype in (*FastTier.DTYPES, "auto") and has_nvidia_gpu():
        print(f"the GPU is not used: the fast tier is not installed; {HOW_TO_GET_FAST}", file=sys.stderr)
    return chosen


def check_names(name: str, dtype: str) -> None:
    """Raise InvalidRequest for a tier or a dtype that nobody knows, or a tier that is not installed."""
    if name not in ("auto", "reference", "fast"):
        raise InvalidRequest(f"tier is {name!r}; choose 'reference', 'fast' or 'auto'")
    missing = missing_for_fast()
    if name == "fast" and missing:
        raise InvalidRequest(
            f"the fast tier needs {' and '.join(missing)}, not installed here; {HOW_TO_GET_FAST}, "
            "or use tier='reference'"
        )
    if dtype not in ("auto", *FastTier.DTYPES, *ReferenceTier.DTYPES):
        known = sorted({*FastTier.DTYPES, *ReferenceTier.DTYPES})
        raise InvalidRequest(f"dtype is {dtype!r}; choose auto, {', '.join(known)}")


def missing_for_fast() -> list[str]:
    """The packages that the fast tier needs and that are not installed."""
    return [package for package in NEEDED_BY_FAST if importlib.util.find_spec(package) is None]


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
    ) -> int:
        """Memory of one block: K and V of `block_size` tokens in every layer, on all ranks together, in bytes."""
        in_8_bits = kept_as(config, kv_cache_dtype) != "auto"  # then each head has a scale, in float32
        per_head = config.head_dim + 4 if in_8_bits else config.head_dim * self.ITEM_BYTES[self.dtype]
        kv_heads = max(config.num_key_value_heads, tensor_parallel_size)  # each rank has one at least
        return block_size * config.num_hidden_layers * 2 * kv_heads * per_head

    def host_block_bytes(
        self,
        config: ModelConfig,
        block_size: int,
        kv_cache_dtype: KVCacheDtype = "auto",
        tensor_parallel_size: int = 1,
    ) -> int:
        """The same on the host, where it may be swapped to."""
        return self.block_bytes(config, block_size, kv_cache_dtype, tensor_parallel_size)


@dataclass(frozen=True, slots=True)
class ReferenceTier(DeviceTier):
    """The tier to be read: NumPy."""

    DTYPES: ClassVar[tuple[str, ...]] = ("float32", "float64")

    @classmethod
    def on(cls, device: str, dtype: str) -> ReferenceTier:
        if device not in ("auto", "cpu"):
            raise InvalidRequest(f"device is {device!r}; the reference tier computes with NumPy, on 'cpu' only")
        if dtype not in ("auto", *cls.DTYPES):
            raise InvalidRequest(f"dtype is {dtype!r}; the reference tier knows auto, {', '.join(cls.DTYPES)}")
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
        )
        return Llama(config, weights, cache)

    def free_device_bytes(
        self, config: ModelConfig, weights: Any, max_num_seqs: int, max_num_batched_tokens: int
    ) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class FastTier(DeviceTier):
    """The tier to be fast: Triton on a GPU; numba and torch where there is none."""

    DTYPES: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")

    @classmethod
    def on(cls, device: str, dtype: str) -> FastTier:
        import torch

        if device not in ("auto", "cpu", "cuda"):
            raise InvalidRequest(f"device is {device!r}; the fast tier knows cpu, cuda and auto")
        if dtype not in ("auto", *cls.DTYPES):
            raise InvalidRequest(f"dtype is {dtype!r}; the fast tier knows auto, {', '.join(cls.DTYPES)}")
        problem = gpu_problem() if device in ("auto", "cuda") else None
        if device == "cuda" and problem:
            raise InvalidRequest(f"device is 'cuda', but {problem}; use device='cpu' (or 'auto')")
        if device == "auto":
            device = "cpu" if problem else "cuda"
            if problem and has_nvidia_gpu():
                print(f"the GPU is not used: {problem}", file=sys.stderr)
        if device == "cuda":
            has_bfloat16 = is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            has_bfloat16 = onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
            # oneDNN has it with AVX512 alone, too: there a prompt of 512 tokens took 4 times as long as in float32, 32
            # sequences that decode 2.6 times (and one by itself 0.75 times).
            is_x86 = platform.machine() in ("x86_64", "AMD64")
            is_fast = has_bfloat16 and (not is_x86 or torch.cpu._is_avx512_bf16_supported())
        if device == "cpu" and dtype == "float16":
            raise InvalidRequest("dtype is 'float16', which CPUs compute slowly; use bfloat16 or float32 on 'cpu'")
        if dtype == "bfloat16" and not has_bfloat16:
            raise InvalidRequest(f"dtype is 'bfloat16', which this {device} device does not compute in; use float32")
        if dtype == "auto":
            half = "float16" if device == "cuda" else "float32"
            dtype = "bfloat16" if is_fast else half
        return cls.of(fast_tier(), device, dtype)

    @property
    def description(self) -> str:
        import torch

        if self.device == "cuda":
            return f"fast tier on {torch.cuda.get_device_name()}: Triton kernels, CUDA graphs, {self.dtype}"
        threads = torch.get_num_threads()
        return f"fast tier on cpu ({threads} threads): numba kernels, oneDNN matrix products, {self.dtype}"

    def for_model(self, config: ModelConfig, device: str, dtype: str) -> FastTier:
        problem = self._shape_problem(config) if self.device == "cuda" else None
        if problem is None:
            return self
        if device == "cuda":
            raise InvalidRequest(f"device is 'cuda', but {problem}; use device='cpu', or tier='reference'")
        print(f"the GPU is not used: {problem}", file=sys.stderr)
        return FastTier.on("cpu", dtype)

    def _shape_problem(self, config: ModelConfig) -> str | None:
        """Why the GPU cannot run the kernels that the model needs, if it cannot."""
        import torch

        from minipaged.fast.gpu.attention import shape_problem

        major, minor = torch.cuda.get_device_capability()
        # 1 KB of a multiprocessor's is the system's; a program may have the rest.
        shared_memory = torch.cuda.get_device_properties().shared_memory_per_multiprocessor - 1024
        group = config.num_attention_heads // config.num_key_value_heads
        return shape_problem(getattr(torch, self.dtype), config.head_dim, group, 10 * major + minor, shared_memory)

    def load_weights(self, folder: Path, config: ModelConfig) -> Any:
        with self.kernels_compiled():
            return self._load(folder, config)

    def load_shard(self, folder: Path, config: ModelConfig, shard: Shard, ranks: Ranks) -> Any:
        """The same for one rank (`models.shards`), which exchanges its results with the others by `ranks`."""
        from minipaged.fast.sharded import over_ranks

        return over_ranks(self._load(folder, config, shard), config, shard, ranks)

    def _load(self, folder: Path, config: ModelConfig, shard: Shard | None = None) -> Any:
        import torch

        from minipaged.fast import kernels_for
        from minipaged.fast.llama import Weights
        from minipaged.models.loading import load_weights

        device, dtype = torch.device(self.device), getattr(torch, self.dtype)
        own = config if shard is None else local_config(config, shard)
        try:
            loaded = load_weights(
                folder, config, convert=lambda values: torch.from_numpy(values).to(device, dtype), shard=shard
            )
            return Weights.of(own, loaded, kernels_for(device))
        except torch.OutOfMemoryError:
            total, free = torch.cuda.mem_get_info()[::-1]
            raise InvalidRequest(
                f"the weights of {folder} in {self.dtype} do not fit this GPU ({free:,} of {total:,} bytes are free); "
                "free some memory, use a smaller model, or device='cpu'"
            ) from None

    def kernels_compiled(self) -> AbstractContextManager[None]:
        """On leaving, numba's kernels are compiled, if they are needed: for whoever comes next, too."""
        if self.device != "cpu":
            return nullcontext()
        import torch

        from minipaged.fast.cpu.compiling import compiled_meanwhile

        return compiled_meanwhile(getattr(torch, self.dtype))

    def make_runner(self, config: ModelConfig, weights: Any, engine_config: EngineConfig) -> Runner:
        from minipaged.fast.llama import Llama

        return self._make(Llama, config, weights, engine_config)

    def make_stage(self, config: ModelConfig, weights: Any, engine_config: EngineConfig, ranks: Ranks) -> StageLlama:
        """The same for a stage that is not the last; `config`: the shard's own."""
        from minipaged.fast.sharded import StageLlama

        return self._make(partial(StageLlama, ranks=ranks), config, weights, engine_config)

    def _make(
        self, make: Callable[..., AnyLlama], config: ModelConfig, weights: Any, engine_config: EngineConfig
    ) -> AnyLlama:
        import torch

        from minipaged.fast.kv_cache import KVCache
        from minipaged.models.loading import static_scales

        if self.device == "cuda":
            give_back_unused()
            print("preparing the GPU's kernels, which are compiled at the first start and then kept", file=sys.stderr)
        scales = None
        if has_static_scales(config, engine_config):
            scales = torch.from_numpy(static_scales(config, weights.kv_scales)).to(self.device)
        try:
            cache = KVCache(
                config.num_hidden_layers,
                engine_config.num_blocks,
                engine_config.block_size,
                config.num_key_value_heads,
                config.head_dim,
                engine_config.num_swap_blocks,
                getattr(torch, self.dtype),
                kept_as(config, engine_config.kv_cache_dtype),
                scales,
                self.device,
            )
            llama = make(
                config,
                weights,
                cache,
                max_num_seqs=engine_config.max_num_seqs,
                max_model_len=engine_config.max_model_len,
                num_lanes=engine_config.pipeline_parallel_size,
            )
            llama.warm_up()
            return llama
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):  # the latter: pinned memory
                raise MemoryError(str(error)) from None
            raise

    def free_device_bytes(
        self, config: ModelConfig, weights: Any, max_num_seqs: int, max_num_batched_tokens: int
    ) -> int | None:
        if self.device != "cuda":
            return None
        from minipaged.fast.llama import BATCH_SIZES

        # What a step needs beside the cache: each captured step's logits, a batch's activations (a few tensors of the
        # widest layer are alive at once), and the scratch space of sampling, of swapping and of the libraries.
        item = self.ITEM_BYTES[self.dtype]
        logits = sum(size for size in BATCH_SIZES if size <= max_num_seqs) * config.vocab_size * item
        activations = 4 * max_num_batched_tokens * 2 * config.intermediate_size * item
        return int(self._free_bytes(weights) - logits - activations - SCRATCH_BYTES)

    def _free_bytes(self, weights: Any) -> int:
        """Of the GPU's memory, now."""
        import torch

        give_back_unused()
        return int(torch.cuda.mem_get_info()[0])


def kept_as(config: ModelConfig, kv_cache_dtype: str) -> str:
    """How keys and values are kept: with "auto" as the checkpoint has it."""
    return config.kv_cache_dtype if kv_cache_dtype == "auto" else kv_cache_dtype


def has_static_scales(config: ModelConfig, engine_config: EngineConfig) -> bool:
    """Whether keys and values are rounded with the checkpoint's scales. (What is asked for by name finds its own.)"""
    return engine_config.kv_cache_dtype == "auto" and config.kv_cache_dtype != "auto"


def give_back_unused() -> None:
    """Let the GPU have back what a former model held: torch keeps freed memory, and Python what refers to itself."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def reference_penalties(logits: Any, wanted: SamplingInput) -> Any:
    """The logits [vocab] in float64 that the reference would choose `wanted` from."""
    from minipaged.reference.sampling import penalise

    return penalise(logits, wanted)


def reference_logprobs(logits: Any, token_ids: Sequence[int], num_logprobs: int) -> Sequence[Sampled]:
    """What the reference tells of given tokens, each by a row of `logits` [tokens, vocab]."""
    from minipaged.reference.sampling import gather_logprobs

    return gather_logprobs(logits, token_ids, num_logprobs)


def reference_draw(logits: Any, wanted: SamplingInput) -> tuple[float, Any]:
    """The number that the reference would draw for `wanted`; and the probability [vocab] of each token or one before
    it, among which that number falls."""
    import numpy as np

    from minipaged.reference.sampling import distribution, penalise, uniform

    chances = distribution(penalise(logits, wanted), wanted.params)
    sums = np.zeros(len(logits))
    sums[chances.token_ids] = chances.cumulative / chances.cumulative[-1]
    return uniform(wanted.seed, wanted.stream, wanted.position), np.maximum.accumulate(sums)


def reference_quantizer() -> Callable[..., Iterator[dict[str, Any]]]:
    """What quantizes a model layer by layer: `reference/quantize/layers.py`."""
    from minipaged.reference.quantize.layers import quantize_layers

    return quantize_layers


def reference_tier() -> Tier:
    """The parts of the reference tier."""
    from minipaged.reference.beam_search import BeamSearch
    from minipaged.reference.sampling import sample

    return Tier("reference", *plain_parts(), BeamSearch, sample)


def plain_parts() -> tuple[type[BlockAllocator], type[BlockTable]]:
    """Those parts of the reference tier that need no NumPy, and so run in a page too."""
    from minipaged.reference.block_allocator import BlockAllocator
    from minipaged.reference.block_table import BlockTable

    return BlockAllocator, BlockTable


def fast_tier() -> Tier:
    """The parts of the fast tier."""
    from minipaged.fast.beam_search import BeamSearch
    from minipaged.fast.block_allocator import BlockAllocator
    from minipaged.fast.block_table import BlockTable
    from minipaged.fast.sampling import sample

    return Tier("fast", BlockAllocator, BlockTable, BeamSearch, sample)
