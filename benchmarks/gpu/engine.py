"""The whole engine, on the workload of nano-vllm's benchmark: 256 requests of 100 to 1024 tokens in and out.

Random weights in the shapes of three models, temperature 0.6, no end of sequence. A run is compared with

- the floor: each step of decoding must read every weight and the keys and values of every sequence once. These bytes
  at the speed of a large copy are what no engine can undercut (prompts and all arithmetic are left out);
- transformers' `generate`, all prompts of a batch padded to the longest, in the better of two batch sizes. A batch runs
  until its longest request is done; tokens count up to what each request asked for. Only its prompts and its first
  steps are timed (whole runs would take minutes), and the other steps are taken to be as fast: that flatters it, for
  contexts grow;
- transformers' `generate_batch`, its own continuous batching, on SDPA. It is stopped after some seconds; the tokens of
  finished requests count.

How busy the GPU is while decoding: its kernels are traced for some steps in which all sequences decode; the share of
the time that any of them runs. (Tracing costs the host some time, so the true share is a little higher.)
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from benchmarks.gpu.harness import Job, Row, Setting, wall_seconds
from minipaged.engine.engine import Engine
from minipaged.events import Event, StepFinished
from minipaged.fast import gpu
from minipaged.fast.kv_cache import KVCache
from minipaged.fast.llama import Llama, Weights
from minipaged.models.config import ModelConfig, weight_shapes
from minipaged.params import EngineConfig, SamplingParams
from minipaged.tiers import fast_tier

BLOCK_SIZE = 16
TEMPERATURE = 0.6

MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True,
}  # fmt: skip
SHARE_OF_FLOOR = {"SmolLM2-135M": 0.25, "Llama-3.2-1B": 0.45}
"""What is aimed at."""


@dataclass(frozen=True)
class Workload:
    """What all are given: prompts, and how many tokens each wants."""

    shape: dict[str, Any]
    prompts: list[list[int]]
    wanted: list[int]
    peer_seconds: float
    """How long a peer runs, at most."""

    @property
    def config(self) -> ModelConfig:
        rope = {"rope_theta": 5e5, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
        return ModelConfig.from_dict({"model_type": "llama"} | rope | self.shape)

    def floor_bytes(self, item_bytes: int) -> int:
        """What decoding must read: in each step all weights, and the keys and values of those who are not done."""
        config = self.config
        shapes = weight_shapes(config)
        if not config.tie_word_embeddings:
            del shapes["model.embed_tokens.weight"]  # of which only some rows are read
        weights = sum(map(prod, shapes.values()))
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        # The token of step t of a request sees its prompt and the t tokens before it, itself included.
        read = sum(
            len(prompt) * (wanted - 1) + (wanted - 1) * wanted // 2
            for prompt, wanted in zip(self.prompts, self.wanted, strict=True)
        )
        return item_bytes * (weights * (max(self.wanted) - 1) + per_token * read)


def workload(name: str, setting: Setting) -> Workload:
    number, shortest, longest = (256, 100, 1024)
    if setting.quick:
        number, longest = 64, 256
    if setting.tiny:
        number, shortest, longest = 3, 3, 6
    numbers = random.Random(0)
    vocab = TINY["vocab_size"] if setting.tiny else 10_000
    prompts = [[numbers.randrange(vocab) for _ in range(numbers.randint(shortest, longest))] for _ in range(number)]
    wanted = [numbers.randint(shortest, longest) for _ in range(number)]
    return Workload(TINY if setting.tiny else MODELS[name], prompts, wanted, 3 if setting.quick else 6)


def engine_jobs(name: str, setting: Setting) -> list[Job]:
    work = workload(name, setting)
    return [
        Job(f"{name}: minipaged", partial(run_ours, name, work, setting)),
        Job(f"{name}: transformers generate", partial(run_generate, work, setting)),
        Job(f"{name}: transformers generate_batch", partial(run_generate_batch, work, setting)),
    ]


# --- minipaged -------------------------------------------------------------------------------------


def run_ours(name: str, work: Workload, setting: Setting) -> Row:
    engine, setup_seconds = None, 0.0

    def make() -> None:
        nonlocal engine
        engine = make_engine(work, setting)
        others = [prompt[::-1] for prompt in work.prompts[:8]]  # or the prefix cache would know these prompts
        run_engine(engine, others, [4] * len(others))  # compiles what is left to compile

    setup_seconds = wall_seconds(make, setting)
    assert engine is not None
    steps: list[StepFinished] = []
    engine.listeners.append(lambda event: note_step(event, steps))
    seconds = wall_seconds(lambda: run_engine(engine, work.prompts, work.wanted), setting)
    decoding = [step for step in steps if step.num_query_tokens == step.num_sequences]
    try:
        busy: Row = {"busy": share_busy(engine, work, setting)}
    except Exception as error:  # some machines do not let a program trace its kernels; the rest was measured already
        busy = {"busy": None, "busy_error": f"{type(error).__name__}: {error}"}
    return busy | {
        "seconds": seconds,
        "setup_seconds": setup_seconds,
        "prompt_seconds": seconds - sum(step.seconds for step in decoding),
        "tokens_per_second": sum(work.wanted) / seconds,
        "rate": work.floor_bytes(setting.half.itemsize) / seconds,
        "unit": "GB/s",
        "ceiling": "copy",
        "steps": len(steps),
        "decoding_steps": len(decoding),
        "preempted": engine.stats.preempted_by_recompute,
        "target": {"busy": 0.95} | ({"share": SHARE_OF_FLOOR[name]} if name in SHARE_OF_FLOOR else {}),
    }


def note_step(event: Event, steps: list[StepFinished]) -> None:
    if isinstance(event, StepFinished):
        steps.append(event)


def make_engine(work: Workload, setting: Setting) -> Engine:
    """Random weights, made on the device; a cache for all requests at once, if there is room for it."""
    config, dtype = work.config, setting.half
    generator = setting.random("weights")

    def random_weight(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=setting.device)
        weight = torch.empty(shape, dtype=dtype, device=setting.device)
        return weight.normal_(std=shape[1] ** -0.5, generator=generator)

    weights = Weights.of(config, {name: random_weight(shape) for name, shape in weight_shapes(config).items()}, gpu)
    num_blocks = sum(-(-(len(p) + n) // BLOCK_SIZE) + 1 for p, n in zip(work.prompts, work.wanted, strict=True))
    if setting.on_gpu:
        per_block = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * BLOCK_SIZE
        free = torch.cuda.mem_get_info()[0] * 0.85
        num_blocks = min(num_blocks, int(free / (per_block * dtype.itemsize)))
    engine_config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=min(config.max_position_embeddings, num_blocks * BLOCK_SIZE),
        vocab_size=config.vocab_size,
        block_size=BLOCK_SIZE,
        preemption="recompute",
        max_num_seqs=8 if setting.tiny else 256,
        max_num_batched_tokens=16 if setting.tiny else 16384,
        async_scheduling=setting.on_gpu,  # as LLM has it
    )
    cache = KVCache(
        config.num_hidden_layers, num_blocks, BLOCK_SIZE, config.num_key_value_heads, config.head_dim,
        dtype=dtype, device=setting.device, kernels=gpu,
    )  # fmt: skip
    runner = Llama(
        config, weights, cache, max_num_seqs=engine_config.max_num_seqs, max_model_len=engine_config.max_model_len
    )
    return Engine(engine_config, fast_tier(), runner)


def run_engine(engine: Engine, prompts: list[list[int]], wanted: list[int]) -> None:
    add_requests(engine, prompts, wanted)
    produced = 0
    while engine.has_unfinished_requests():
        produced += sum(len(output.outputs[0].token_ids) for output in engine.step())
    assert produced == sum(wanted), f"{produced} tokens came back, {sum(wanted)} were asked for"


def add_requests(engine: Engine, prompts: list[list[int]], wanted: list[int]) -> None:
    for prompt, number in zip(prompts, wanted, strict=True):
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=number, ignore_eos=True)
        engine.add_request(prompt, params)


def share_busy(engine: Engine, work: Workload, setting: Setting) -> float | None:
    """Of some steps in which all sequences decode: the share of the time that some kernel runs."""
    warm, traced = (1, 1) if setting.tiny else (5, 30)
    enough = warm + traced + 100  # those whose prompts are computed first decode meanwhile
    add_requests(engine, work.prompts, [enough] * len(work.prompts))
    while any(not request.prompt_computed for request in engine._requests.values()):
        engine.step()
    for _ in range(warm):
        engine.step()
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CUDA] if setting.on_gpu else [activity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(traced):
            engine.step()
        if setting.on_gpu:
            torch.cuda.synchronize()
    for request_id in engine.unfinished_requests:
        engine.abort(request_id)
    engine.step()
    wanted = "CUDA" if setting.on_gpu else "CPU"
    spans = sorted((e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type.name == wanted)
    return share_covered(spans)


def share_covered(spans: list[tuple[float, float]]) -> float | None:
    """Of the time from the first start to the last end: the share that lies within any of the (rising) spans."""
    if not spans:
        return None
    covered, reached = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / max(reached - spans[0][0], 1e-9)


# --- transformers ----------------------------------------------------------------------------------


def their_model(work: Workload, setting: Setting, attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(  # type: ignore[call-arg]
        **work.shape, max_position_embeddings=2048, rms_norm_eps=1e-5,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(setting.half if setting.on_gpu else torch.float32)
    try:
        with torch.device(setting.device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.pad_token_id = 0
    return model


def run_generate(work: Workload, setting: Setting) -> Row:
    model = their_model(work, setting, "sdpa")
    sizes = sorted({min(size, len(work.prompts)) for size in (64, 256)})
    found: dict[str, Row | str] = {}
    for size in sizes:
        try:
            found[f"batch of {size}"] = static_batch(model, work, size, setting)
        except torch.OutOfMemoryError:
            found[f"batch of {size}"] = "out of memory"
            torch.cuda.empty_cache()
    speeds = {name: row["tokens_per_second"] for name, row in found.items() if isinstance(row, dict)}
    best = max(speeds, key=lambda name: speeds[name])
    return {"tokens_per_second": speeds[best], "batch": best, "batches": found}


@torch.inference_mode()
def static_batch(model: Any, work: Workload, size: int, setting: Setting) -> Row:
    """The first `size` requests in one batch: its prompts are timed, and its first steps; the rest is reckoned."""
    prompts, wanted = work.prompts[:size], work.wanted[:size]
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    padded = torch.tensor(rows, device=setting.device)
    mask = torch.tensor([[int(i >= longest - len(p)) for i in range(longest)] for p in prompts], device=setting.device)

    def generate(width: int, num_tokens: int, seconds: float | None) -> tuple[int, float]:
        """How many tokens each sequence got, and how long it took."""
        length = 0

        def run() -> None:
            nonlocal length
            out = model.generate(
                padded[:, -width:], attention_mask=mask[:, -width:], do_sample=True, temperature=TEMPERATURE, top_k=0,
                top_p=1.0, max_new_tokens=num_tokens, max_time=seconds,
            )  # fmt: skip
            length = int(out.shape[1]) - width

        took = wall_seconds(run, setting)
        return length, took

    generate(min(len(prompt) for prompt in prompts), 3, None)  # warms up
    _, prompt_seconds = generate(longest, 1, None)
    steps, seconds = generate(longest, max(wanted), prompt_seconds + work.peer_seconds)
    if steps < max(wanted):
        step_seconds = (seconds - prompt_seconds) / max(1, steps - 1)
        seconds = prompt_seconds + step_seconds * (max(wanted) - 1)
    return {
        "tokens_per_second": sum(wanted) / seconds,
        "seconds": seconds,
        "prompt_seconds": prompt_seconds,
        "timed_steps": steps,
        "all_steps": max(wanted),
    }


def run_generate_batch(work: Workload, setting: Setting) -> Row:
    from transformers import GenerationConfig

    if not setting.on_gpu:
        return {"status": "skipped", "reason": "on a CPU its cache takes most of the machine's memory"}
    model = their_model(work, setting, "sdpa")
    if not hasattr(model, "generate_batch"):
        return {"status": "skipped", "reason": "missing: this transformers has no generate_batch"}
    config = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, max_new_tokens=max(work.wanted),
        eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    limit = 3 * work.peer_seconds
    with model.continuous_batching_context_manager(generation_config=config, block=True, timeout=5) as manager:
        drain(manager, [(work.prompts[0], 4)], limit)  # warms up
        start = time.perf_counter()
        produced, finished = drain(manager, list(zip(work.prompts, work.wanted, strict=True)), limit)
        seconds = time.perf_counter() - start
    if not finished:
        raise TimeoutError(f"no request was finished after {limit} seconds")
    return {
        "seconds": seconds,
        "tokens_per_second": produced / seconds,
        "finished": f"{finished} of {len(work.prompts)} requests",
    }


def drain(manager: Any, requests: list[tuple[list[int], int]], limit: float) -> tuple[int, int]:
    """Tokens of the requests that finished in time, and how many did."""
    deadline = time.perf_counter() + limit
    for prompt, number in requests:
        manager.add_request(prompt, max_new_tokens=number)
    produced = finished = 0
    while finished < len(requests) and time.perf_counter() < deadline:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            produced += len(result.generated_tokens)
            finished += 1
        elif result is None and not manager.is_running():
            raise RuntimeError("its generation thread ended")
    return produced, finished
