"""Serve on a GPU that is not there, and write down what is compiled when.

    python -m tests.fast.rehearse_compiling '[{"head_dim": 128}, {"block_size": 1}]'      a line of JSON for each case

Triton compiles a kernel for the types of its arguments, for its constants, and for what it sees of the rest: which
integers are 1, which integers and addresses 16 divides. Each combination that is new takes seconds, in which nobody is
served. So it has to come up while the model is made and warmed up, and never later; nor while a CUDA graph is captured,
where nothing can be compiled.

The model's tensors are a CPU's here, and all else is as on a GPU: `is_gpu` says so, before the wing is loaded. Triton's
own binder looks at the arguments of every launch and asks for what it has not got; it is given a kernel that does
nothing. The streams, events and graphs of torch.cuda do nothing either. Memory that nobody writes is 0, so that every
logit is 0, and serving goes on. numba compiles as ever (what draws random numbers), and is watched too.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from numba.core.dispatcher import Dispatcher
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from minipaged.fast import device

device.is_gpu = lambda _: True  # before anything of the wing is loaded that asks


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and how it is served."""

    model_type: str = "llama"
    window: int | None = None
    """The window of the layers that have one in this type of model."""
    num_layers: int = 1
    head_dim: int = 64
    kv_heads: int = 2
    group: int = 3
    vocab: int = 256
    dtype: str = "bfloat16"
    block_size: int = 16
    num_blocks: int = 30
    max_num_seqs: int = 6
    max_num_batched_tokens: int = 200
    capability: int = 90
    """The GPU's, times ten."""
    sms: int = 132
    """Its multiprocessors."""
    packed: str = ""
    """How the matrices are packed: one of `PACKED`. Nothing: they are not."""
    small_layers: bool = True
    """Whether the sequences that decode keep their graph in a step with prompts."""
    requests: int = 20
    fault: str = ""
    """What is broken on purpose: one of `FAULTS`."""
    read_back: bool = False
    """Then compile, in the end, all that was asked for, and say what has become of it (`compile_kernels.read_back`)."""


# --- A GPU that is not there ------------------------------------------------------------------------


class Log:
    """What was compiled and what was launched, by phase."""

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.compiled: dict[str, list[str]] = defaultdict(list)
        self.asked: list[tuple[str, ASTSource, dict[str, Any]]] = []
        """Of each kernel its name, what it is compiled from, and for what."""
        self.launched: dict[str, set[str]] = defaultdict(set)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


LOG = Log()


class Kernel:
    """Compiled; does nothing."""

    function = packed_metadata = None

    def __init__(self, name: str) -> None:
        self._name = name

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, x: int, y: int, z: int, *_: Any) -> None:
        within = 0 < x < 2**31 and 0 < y < 2**16 and 0 < z < 2**16
        assert within, f"{self._name}: no GPU has a grid of {x}, {y}, {z}"
        LOG.launched[LOG.phase].add(self._name)


def compile_nothing(
    function: Any, key: str, signature: Any, device: int, constants: Any, options: Any, attributes: Any, warmup: bool
) -> Kernel:
    """In place of Triton's compiler, which is asked for what the binder has not found."""
    name = function.fn.__name__
    LOG.compiled[LOG.phase].append(f"{name} {key}")
    LOG.asked.append((name, ASTSource(function, signature, constants, attributes), options.__dict__))
    function.used_global_vals = {}  # the compiler would have looked them up
    kernel = function.device_caches[device][0][key] = Kernel(name)
    return kernel


class Driver:
    """What Triton asks of a driver before it launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        major, minor = torch.cuda.get_device_capability()
        return GPUTarget("cuda", 10 * major + minor, 32)


class Inert:
    """A stream, an event, a graph: whatever is asked of it is done already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@contextlib.contextmanager
def capture(graph: Any, **_: Any) -> Iterator[None]:
    with LOG.during("capture"):
        yield


def install() -> None:
    triton.runtime.driver.set_active(Driver())
    JITFunction._do_compile = compile_nothing
    cuda = torch.cuda
    cuda.Stream = cuda.Event = cuda.CUDAGraph = Inert
    cuda.graph, cuda.stream = capture, contextlib.nullcontext
    cuda.current_stream = Inert
    cuda.synchronize = lambda device=None: None
    torch.Tensor.pin_memory = torch.Tensor.clone
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.empty = lambda *size, pin_memory=False, **given: torch.zeros(*size, **given)
    torch.empty_like = torch.zeros_like
    torch.Tensor.new_empty = torch.Tensor.new_zeros


install()

from minipaged.engine.engine import Engine  # noqa: E402
from minipaged.errors import InvalidRequest  # noqa: E402
from minipaged.fast import cpu  # noqa: E402
from minipaged.fast import llama as fast_llama  # noqa: E402
from minipaged.fast.gpu import attention, block_table, kv_cache, llama, packed, sampling  # noqa: E402
from minipaged.fast.llama import DecodeGraph, Llama  # noqa: E402
from minipaged.mirror import Mirror  # noqa: E402
from minipaged.models.config import ModelConfig, weight_shapes  # noqa: E402
from minipaged.models.quantized.stored import Activations, Float8, Grouped, StoredMatrix  # noqa: E402
from minipaged.params import BeamSearchParams, EngineConfig, SamplingParams  # noqa: E402
from minipaged.tiers import FastTier, fast_tier  # noqa: E402
from tests.fast.compile_kernels import read_back  # noqa: E402

fast_llama.LEAST_SAVED_ON_GPU = 1  # common blocks are read once for many sequences, however few there are

# --- Serving ----------------------------------------------------------------------------------------


def model(case: Case) -> tuple[ModelConfig, dict[str, torch.Tensor | StoredMatrix]]:
    """A Llama or a cousin, all zeros."""
    intermediate = 1100 if case.packed else 96  # so that inputs are divided
    config = ModelConfig.from_dict(
        {
            "model_type": case.model_type,
            "vocab_size": case.vocab,
            "hidden_size": 64,
            "intermediate_size": intermediate,
            "num_hidden_layers": case.num_layers,
            "num_attention_heads": case.kv_heads * case.group,
            "num_key_value_heads": case.kv_heads,
            "head_dim": case.head_dim,
            "tie_word_embeddings": True,
            "rope_theta": 1e5,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1024,
        }
        | ({} if case.window is None else {"sliding_window": case.window})
    )
    dtype = getattr(torch, case.dtype)
    pack = PACKED[case.packed]
    return config, {
        name: pack(name, (shape[0], shape[1])) if len(shape) == 2 and case.packed else torch.zeros(shape, dtype=dtype)
        for name, shape in weight_shapes(config).items()
    }


def grouped(shape: tuple[int, int], bits: int, size: int, **others: Any) -> StoredMatrix:
    groups = -(-shape[1] // size)
    scales = np.zeros((shape[0], groups), np.float16)
    minima = scales if others.pop("minima", False) else None
    codes = np.zeros((shape[0], shape[1] * bits // 8), np.uint8)
    return Grouped(
        shape=shape, rounding="float32", bits=bits, codes=codes, scales=scales, minima=minima, group_size=size,
        **{"zeros": 2 ** (bits - 1)} | others,
    )  # fmt: skip


def as_gguf(name: str, shape: tuple[int, int]) -> StoredMatrix:
    """Q8_0 for the embedding, which is the head too, Q4_1 for the rest."""
    return grouped(shape, 8, 32) if "embed" in name else grouped(shape, 4, 32, zeros=0, minima=True)


def as_gptq(name: str, shape: tuple[int, int]) -> StoredMatrix:
    """Zeros for each group, and inputs in another order."""
    zeros, order = np.zeros((shape[0], -(-shape[1] // 64)), np.uint8), np.arange(shape[1], dtype=np.int32)[::-1] // 64
    return grouped(shape, 4, 64, zeros=zeros, group_index=order.copy())


def as_int8(name: str, shape: tuple[int, int]) -> StoredMatrix:
    """Multiplied by int8, but for the embedding and head."""
    if "embed" in name:
        return as_gguf(name, shape)
    return grouped(shape, 8, shape[1], activations=Activations("int8", symmetric="down" not in name))


def as_float8(name: str, shape: tuple[int, int]) -> StoredMatrix:
    scales = np.zeros((-(-shape[0] // 128), -(-shape[1] // 128)), np.float32)
    codes, how = np.zeros(shape, np.uint8), None if "embed" in name else Activations("float8", group_size=128)
    return Float8(shape=shape, rounding="float32", codes=codes, scales=scales, block=(128, 128), activations=how)


PACKED: dict[str, Callable[[str, tuple[int, int]], StoredMatrix]] = {
    "": as_gguf,
    "gguf": as_gguf,
    "gptq": as_gptq,
    "int8": as_int8,
    "float8": as_float8,
}


def params(rng: random.Random) -> SamplingParams | BeamSearchParams:
    """Of all that a request may ask for, some."""
    if rng.random() < 0.15:
        return BeamSearchParams(beam_width=rng.choice([2, 3]), max_tokens=rng.randint(1, 20))
    return SamplingParams(
        n=rng.choice([1, 1, 2, 3]),
        temperature=rng.choice([0.0, 0.7]),
        top_k=rng.choice([0, 0, 5]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        min_p=rng.choice([0.0, 0.1]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        logprobs=rng.choice([None, None, 0, 3]),
        min_tokens=rng.choice([0, 0, 1]),
        max_tokens=rng.randint(1, 40),
        prompt_logprobs=rng.choice([None, None, None, 2]),
        logit_bias=rng.choice([{}, {1: 2.0}]),
        allowed_token_ids=rng.choice([None, None, None, (5, 6, 7)]),
    )


def with_grammars(mirror: Mirror, _inputs: Callable[[Mirror], Any] = Mirror.sampling_inputs) -> Any:
    """The inputs of a step, those of odd seeds with a grammar that allows every other token. The same inputs come again
    as the same object, so that a plan goes on."""
    inputs = _inputs(mirror)
    if LOG.phase != "serving":
        return inputs
    kept = vars(mirror).setdefault("in_grammars", {})
    if kept.get("of") is not inputs:
        bits = np.full(1 << 20, 0x55555555, np.uint32)
        given = tuple(replace(wanted, allowed=bits if wanted.seed % 2 else None) for wanted in inputs)
        kept.update({"of": inputs, "given": given})
    return kept["given"]


def serve(engine: Engine, case: Case, rng: random.Random) -> None:
    """Serve as many short requests as a batch holds, at once; two that draw; then random ones, some of which begin as
    others do. An odd seed stands for a grammar (`with_grammars`)."""
    for temperature, number in ((0.0, max(2, case.max_num_seqs)), (0.7, 2)):
        for seed in range(number):
            engine.add_request([1], SamplingParams(temperature=temperature, seed=seed, max_tokens=3))
    longest = engine.config.max_model_len - 1
    lengths = [*(length for length in (1, 2, 3, 5, 9, 17, 40, 65, 97, 130, 300) if length < longest), longest]
    common = [rng.randrange(case.vocab) for _ in range(longest)]
    for _ in range(case.requests):
        length = rng.choice(lengths)
        new = rng.choice([0, length, length])
        prompt = common[: length - new] + [rng.randrange(case.vocab) for _ in range(new)]
        with contextlib.suppress(InvalidRequest):  # more sequences than a batch holds, or more blocks than there are
            engine.add_request(prompt, params(rng))
        for _ in range(rng.randint(0, 3)):
            engine.step()
    while engine.has_unfinished_requests():
        engine.step()


def rehearse(case: Case) -> dict[str, Any]:
    """What was compiled in each phase, and what serving came to."""
    for kernel in triton_functions():
        kernel.device_caches.clear()
    for function in numba_functions():
        function._reset_overloads()
    config, weights = model(case)
    windows = config.groups.windows
    settings: dict[str, Any] = {
        "block_size": case.block_size,
        "num_blocks": case.num_blocks,
        "num_swap_blocks": case.num_blocks,
        "max_num_seqs": case.max_num_seqs,
        "max_num_batched_tokens": case.max_num_batched_tokens,
        "max_model_len": min(config.max_position_embeddings, case.num_blocks // len(windows) * case.block_size),
        "vocab_size": case.vocab,
        "group_windows": windows,
    }
    torch.cuda.get_device_capability = lambda device=None: divmod(case.capability, 10)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=case.sms)
    LOG.begin("making")
    grammars = patch.object(Mirror, "sampling_inputs", with_grammars)
    with FAULTS[case.fault](), patch.object(Llama, "warm_up", warm_up), grammars:
        tier = FastTier.of(fast_tier(), "cpu", case.dtype)
        runner = tier.make_runner(config, weights, EngineConfig(**settings))
        runner._has_small_layers = case.small_layers
        LOG.phase = "serving"
        by_numba = numba_compiled()
        served: Counter[str] = Counter()
        for preemption in ("swap", "recompute"):
            late = preemption == "swap"
            more: dict[str, Any] = {"preemption": preemption, "async_scheduling": late, "debug": not late}
            engine = Engine(EngineConfig(**settings, **more), tier, runner)
            serve(engine, case, random.Random(case.head_dim))
            counted = asdict(engine.current_stats())
            served.update({name: count for name, count in counted.items() if isinstance(count, int)})
    target = GPUTarget("cuda", case.capability, 32)
    kernels = [(name, triton.compile(source, target, options)) for name, source, options in LOG.asked if case.read_back]
    launched = LOG.launched["capture"] | LOG.launched["serving"]
    return {
        "compiled": LOG.compiled,
        "compiled by numba while serving": sorted(numba_compiled() - by_numba),
        "launched": sorted(launched),
        "served": served,
        "kernels": [read_back(name, kernel) for name, kernel in kernels],
    }


def warm_up(llama: Llama, _warm_up: Callable[[Llama], None] = Llama.warm_up) -> None:
    with LOG.during("warm-up"):
        _warm_up(llama)


def triton_functions() -> list[Any]:
    rooms = (attention, block_table, kv_cache, llama, packed, sampling)
    return [found for room in rooms for found in vars(room).values() if isinstance(found, JITFunction)]


def numba_functions() -> set[Any]:
    rooms = [found for found in vars(cpu).values() if isinstance(found, ModuleType)]
    return {found for room in rooms for found in vars(room).values() if isinstance(found, Dispatcher)}


def numba_compiled() -> set[str]:
    """What numba has compiled or loaded: the function, and the types of its arguments."""
    return {f"{function.__name__} {types}" for function in numba_functions() for types in function.signatures}


# --- Faults -----------------------------------------------------------------------------------------

_step, _params = DecodeGraph.step, SamplingParams

FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": contextlib.nullcontext,
    "chooses only": lambda: patch.object(Llama, "_warm_up_kernels", lambda llama: None),
    "shares unprepared": lambda: patch.object(Llama, "_warm_up_shared_reading", lambda llama: None),
    "draws only": lambda: patch("minipaged.fast.llama.SamplingParams", lambda **given: _params(temperature=1)),
    "greedy only": lambda: patch("minipaged.fast.llama.SamplingParams", lambda **given: _params(temperature=0)),
    "no grammars": lambda: patch.object(Llama, "_warm_up_grammars", lambda llama, logits: None),
    "captures at once": lambda: patch.object(
        DecodeGraph, "step", lambda graph: _step(graph) if LOG.phase == "capture" else None
    ),
    "looks at addresses": lambda: patch.object(block_table, "_slot_mapping", JITFunction(block_table._slot_mapping.fn)),
}


if __name__ == "__main__":
    for given in json.loads(sys.argv[1]):
        print(json.dumps(rehearse(Case(**given))), flush=True)
