"""The fast tier: its parts, and how it loads and runs models on a GPU or on this machine's CPU."""

from __future__ import annotations

import gc
import platform
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from minipaged.contracts import Runner, Tier
from minipaged.errors import InvalidRequest
from minipaged.models.config import ModelConfig
from minipaged.models.shards import Shard, local_config
from minipaged.params import EngineConfig
from minipaged.tiers import devices
from minipaged.tiers.device_tier import DeviceTier, has_static_scales, kept_as
from minipaged.tiers.drafted import DraftedRunner

if TYPE_CHECKING:
    from minipaged.fast.llama import Llama as FastLlama
    from minipaged.fast.sharded import Ranks, StageLlama

AnyLlama = TypeVar("AnyLlama", bound="FastLlama")

SCRATCH_BYTES = 2 << 30
"""GPU memory that is left for sampling, swapping and the libraries."""


@dataclass(frozen=True, slots=True)
class FastTier(DeviceTier):
    """The tier that is fast: Triton kernels on a GPU, numba and torch on a CPU."""

    DTYPES: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")

    @classmethod
    def on(cls, device: str, dtype: str) -> FastTier:
        import torch

        if device not in ("auto", "cpu", "cuda"):
            raise InvalidRequest(f"device is {device!r}; the fast tier supports cpu, cuda and auto")
        if dtype not in ("auto", *cls.DTYPES):
            raise InvalidRequest(f"dtype is {dtype!r}; the fast tier supports auto, {', '.join(cls.DTYPES)}")
        problem = devices.gpu_problem() if device in ("auto", "cuda") else None
        if device == "cuda" and problem:
            raise InvalidRequest(f"device is 'cuda', but {problem}; use device='cpu' (or 'auto')")
        if device == "auto":
            device = "cpu" if problem else "cuda"
            if problem and devices.has_nvidia_gpu():
                print(f"the GPU is not used: {problem}", file=sys.stderr)
        if device == "cuda":
            has_bfloat16 = is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            has_bfloat16 = onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
            # With AVX512 alone oneDNN has bfloat16 too, but it is slow: a prompt of 512 tokens took 4 times as long as
            # in float32, a decode of 32 sequences 2.6 times as long (of one sequence 0.75 times). On ARM it has it
            # only where the processor multiplies bfloat16.
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
        return f"fast tier on cpu ({self.num_threads} threads): numba kernels, {self.dtype}"

    @property
    def num_threads(self) -> int:
        """The number of threads that compute: torch's, and on a CPU at most as many as this process may use cores."""
        import torch

        if self.device == "cuda":
            return torch.get_num_threads()
        from minipaged.fast.cpu.threads import most_threads

        return most_threads()

    def for_model(self, config: ModelConfig, device: str, dtype: str) -> FastTier:
        problem = self._shape_problem(config) if self.device == "cuda" else None
        if problem is None:
            return self
        if device == "cuda":
            raise InvalidRequest(f"device is 'cuda', but {problem}; use device='cpu', or tier='reference'")
        print(f"the GPU is not used: {problem}", file=sys.stderr)
        return FastTier.on("cpu", dtype)

    def _shape_problem(self, config: ModelConfig) -> str | None:
        """Say why the GPU cannot run the kernels that the model needs; None if it can."""
        import torch

        from minipaged.fast.gpu.attention import shape_problem

        major, minor = torch.cuda.get_device_capability()
        # The system takes 1 KB of a multiprocessor's shared memory; a program may use the rest.
        shared_memory = torch.cuda.get_device_properties().shared_memory_per_multiprocessor - 1024
        group = config.num_attention_heads // config.num_key_value_heads
        return shape_problem(getattr(torch, self.dtype), config.head_dim, group, 10 * major + minor, shared_memory)

    def load_weights(self, folder: Path, config: ModelConfig) -> Any:
        with self.kernels_compiled():
            return self._load(folder, config)

    def load_shard(self, folder: Path, config: ModelConfig, shard: Shard, ranks: Ranks) -> Any:
        """Load the weights of one rank (`models.shards`), which exchanges its results with the others by `ranks`."""
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
        """Return a context manager that compiles numba's kernels, if needed, and saves them while its body runs."""
        if self.device != "cpu":
            return nullcontext()
        import torch

        from minipaged.fast.cpu.compiling import compiled_meanwhile

        return compiled_meanwhile(getattr(torch, self.dtype))

    def make_runner(self, config: ModelConfig, weights: Any, engine_config: EngineConfig) -> Runner:
        from minipaged.fast.llama import Llama

        return self._make(Llama, config, weights, engine_config)

    def make_stage(self, config: ModelConfig, weights: Any, engine_config: EngineConfig, ranks: Ranks) -> StageLlama:
        """Make the runner of a pipeline stage that is not the last; `config` is the shard's own."""
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
        if not engine_config.has_windows:
            config = config.in_one_group()
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
                config.groups.places,
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

    def drafted(self, runner: Runner, draft_runner: Runner) -> Runner:
        from minipaged.fast.speculation import verify

        joined = DraftedRunner(runner, draft_runner, verify)
        with self.kernels_compiled():
            joined.warm_up()
        return joined

    def free_device_bytes(
        self, config: ModelConfig, weights: Any, max_num_seqs: int, max_num_batched_tokens: int
    ) -> int | None:
        if self.device != "cuda":
            return None
        from minipaged.fast.llama import BATCH_SIZES

        # A step also needs memory for the logits of each captured step, for a batch's activations (a few tensors of the
        # widest layer are alive at once), and for the scratch space of sampling, swapping and the libraries.
        item = self.ITEM_BYTES[self.dtype]
        logits = sum(size for size in BATCH_SIZES if size <= max_num_seqs) * config.vocab_size * item
        activations = 4 * max_num_batched_tokens * 2 * config.intermediate_size * item
        return int(self._free_bytes(weights) - logits - activations - SCRATCH_BYTES)

    def _free_bytes(self, weights: Any) -> int:
        """The GPU memory that is free now, in bytes."""
        import torch

        give_back_unused()
        return int(torch.cuda.mem_get_info()[0])


def fast_tier() -> Tier:
    """The parts of the fast tier."""
    from minipaged.fast.beam_search import BeamSearch
    from minipaged.fast.block_allocator import BlockAllocator
    from minipaged.fast.block_table import BlockTable
    from minipaged.fast.sampling import sample

    return Tier("fast", BlockAllocator, BlockTable, BeamSearch, sample)


def give_back_unused() -> None:
    """Return the memory of former models to the GPU: torch keeps freed memory, and Python keeps reference cycles."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
