"""The whole engine, on the workload of nano-vllm's benchmark: 256 requests of 100 to 1024 tokens in and out.

They are drawn as nano-vllm's `bench.py` draws them, seed 0: 142,827 tokens in, 133,966 out. Random weights in the
shapes of three models, temperature 0.6, no end of sequence. A run is compared with

- the floor: each step of decoding must read every weight and the keys and values of every sequence once. These bytes
  at the speed of a large copy are what no engine can undercut (prompts and all arithmetic are left out);
- transformers' `generate`, all prompts of a batch padded to the longest, in the best of three batch sizes: the first
  64, 128 or all 256 requests, in the order in which they come (who serves does not know beforehand how long an answer
  will be). A batch runs until its longest request is done; tokens count up to what each request asked for. Only its
  prompts and its first steps are timed (whole runs would take minutes), and the other steps are taken to be as fast:
  that flatters it, for contexts grow. It is used as it comes, with SDPA and a growing cache: with a static cache,
  compiled for minutes, it would be another peer, which is not here;
- transformers' `generate_batch`, its own continuous batching, on SDPA, with the hints on the workload that
  `generate_batch` itself gives. It is stopped after some seconds; every token counts that it made until then.

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


@dataclass(frozen=True)
class Workload:
    """What all are given: prompts, and how many tokens each wants."""

    shape: dict[str, Any]
    prompts: list[list[int]]
    wanted: list[int]
    peer_seconds: float
    """How long a peer's steps are timed, at most."""

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
    last_id = TINY["vocab_size"] - 1 if setting.tiny else 10_000
    prompts = [[numbers.randint(0, last_id) for _ in range(numbers.randint(shortest, longest))] for _ in range(number)]
    wanted = [numbers.randint(shortest, longest) for _ in range(number)]
    return Workload(TINY if setting.tiny else MODELS[name], prompts, wanted, 3 if setting.quick else 6)


def engine_jobs(name: str, setting: Setting) -> list[Job]:
    work = workload(name, setting)
    return [
        Job(f"{name}: minipaged", partial(run_ours, work, setting)),
        Job(f"{name}: transformers generate", partial(run_generate, work, setting)),
        Job(f"{name}: transformers generate_batch", partial(run_generate_batch, work, setting)),
    ]


# --- minipaged -------------------------------------------------------------------------------------


def run_ours(work: Workload, setting: Setting) -> Row:
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
        produced += sum(len(new.new_token_ids) for update in engine.step() for new in update.completions)
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
    sizes = sorted({min(size, len(work.prompts)) for size in (64, 128, 256)})
    found: dict[str, Row | str] = {}
    static_batch(model, work, 1, setting, seconds=0)  # warms up
    for size in sizes:
        try:
            found[f"batch of {size}"] = static_batch(model, work, size, setting, work.peer_seconds)
        except torch.OutOfMemoryError:
            found[f"batch of {size}"] = "out of memory"
            torch.cuda.empty_cache()
    speeds = {name: row["tokens_per_second"] for name, row in found.items() if isinstance(row, dict)}
    best = max(speeds, key=lambda name: speeds[name])
    return {"tokens_per_second": speeds[best], "batch": best, "batches": found}


@torch.inference_mode()
def static_batch(model: Any, work: Workload, size: int, setting: Setting, seconds: float) -> Row:
    """The first `size` requests in one batch: prompts, then steps for some seconds; the steps left are reckoned."""
    prompts, wanted = work.prompts[:size], work.wanted[:size]
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    padded = torch.tensor(rows, device=setting.device)
    mask = torch.tensor([[int(i >= longest - len(p)) for i in range(longest)] for p in prompts], device=setting.device)
    times: list[float] = []

    def note_step(token_ids: torch.Tensor, scores: torch.Tensor, **options: Any) -> torch.Tensor:
        """Called after each token; says whether to stop."""
        if setting.on_gpu:
            torch.cuda.synchronize()  # as `generate` itself does just after
        times.append(time.perf_counter())
        return torch.full((size,), times[-1] > times[0] + seconds, device=setting.device)

    if setting.on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(
        padded, attention_mask=mask, do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0,
        max_new_tokens=max(wanted), stopping_criteria=[note_step],
    )  # fmt: skip
    steps, timed = max(wanted) - 1, len(times) - 1
    whole = times[0] - start + (times[-1] - times[0]) / max(1, timed) * steps
    return {
        "tokens_per_second": sum(wanted) / whole,
        "seconds": whole,
        "prompt_seconds": times[0] - start,
        "timed_steps": timed,
        "all_steps": steps,
    }


def run_generate_batch(work: Workload, setting: Setting) -> Row:
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    if not setting.on_gpu:
        return {"status": "skipped", "reason": "on a CPU its cache takes most of the machine's memory"}
    model = their_model(work, setting, "sdpa")
    config = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, max_new_tokens=max(work.wanted),
        eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    batching = ContinuousBatchingConfig()
    if hasattr(batching, "auto_switch_to_flash"):  # in newer ones, which would take flash attention if it is there
        batching.auto_switch_to_flash = False
    hints = WorkloadHints(max(map(len, work.prompts)), max(work.wanted), len(work.prompts))
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=batching, workload_hints=hints, block=True, timeout=5
    ) as manager:
        drain(manager, [(work.prompts[0], 4)], 3 * work.peer_seconds)  # warms up
        found = drain(manager, list(zip(work.prompts, work.wanted, strict=True)), 3 * work.peer_seconds)
    if not found["tokens"]:
        raise TimeoutError(f"not one token came in {found['seconds']:.0f} seconds")
    return found | {
        "tokens_per_second": found["tokens"] / found["seconds"],
        "finished": f"{found['finished']} of {len(work.prompts)} requests",
    }


def drain(manager: Any, requests: list[tuple[list[int], int]], limit: float) -> Row:
    """Serve requests until they are done, or for `limit` seconds: how many tokens, how many done, how long it took."""
    start = time.perf_counter()
    for prompt, number in requests:
        manager.add_request(prompt, max_new_tokens=number)
    tokens = finished = 0
    while finished < len(requests) and time.perf_counter() < start + limit:
        result = manager.get_result(timeout=0.1)
        if result is not None and result.is_finished():
            tokens += len(result.generated_tokens)
            finished += 1
        elif result is None and not manager.is_running():
            raise RuntimeError("its generation thread ended")
    seconds = time.perf_counter() - start
    if finished < len(requests):  # those under way have tokens, too, which no result tells
        scheduler = manager.batch_processor.scheduler
        under_way = [*scheduler.active_requests.values(), *scheduler.waiting_requests.values()]
        tokens += sum(len(request.to_generation_output().generated_tokens) for request in under_way)
        while (result := manager.get_result(timeout=0)) is not None:
            tokens += len(result.generated_tokens)
            finished += 1
    return {"tokens": tokens, "finished": finished, "seconds": seconds}
