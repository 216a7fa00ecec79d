"""Assignment 6, `triton-decode`: paged attention of single new tokens as a Triton kernel (paper, sections 4.1 and 5.1).

The kernel runs in Triton's interpreter, in the worker, so that no GPU is needed to learn from it. The interpreter takes
milliseconds for each turn of a kernel's loop: the properties are few, small cases, compared with softmax attention in
float64, and around all that the kernel may touch lies memory that is nobody's. Then the fast tier's Llama, on the CPU,
decodes with the student's kernel under a real engine (prompts are computed by the tier's own), and so does SmolLM2 for
a few tokens. Where there is a GPU, a right kernel is compiled, checked once more and timed beside the fast tier's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from minipaged.course.assignments.paged_attention.checks import SMALL, compare, random_weights, scarce
from minipaged.course.assignments.triton_decode.cases import DecodeCase
from minipaged.course.grader.assignment import Bench, Check, Failed, Failure, Performance, fastest
from minipaged.course.grader.points import described
from minipaged.course.grader.search import search
from minipaged.course.grader.serving import PROMPTS
from minipaged.course.sandbox.contract import Limits
from minipaged.errors import Invariant, InvariantViolation
from minipaged.params import SamplingParams
from minipaged.setup.loaded_model import LoadedModel
from minipaged.tiers import choose_tier

EXAMPLES = 20
"""Cases tried for each property: the interpreter takes about 10 milliseconds for each turn of a kernel's loop."""
WORKER = "minipaged.course.assignments.triton_decode.worker"
LIMITS = Limits(call_seconds=60, test_seconds=300, cpu_seconds=600, memory_bytes=2 << 30, processes=None)
"""The interpreter is slow, and torch starts threads."""


# --- Properties -----------------------------------------------------------------------------------

POWERS_OF_2 = st.sampled_from([1, 2, 4, 8, 16])
WHOLE, ANY = "whole", "any"
"""Contexts: as many tokens as fit into some blocks, or any number."""


def cases(
    *,
    block_sizes: st.SearchStrategy[int] = POWERS_OF_2,
    head_dims: st.SearchStrategy[int] = st.sampled_from([4, 16, 32]),  # noqa: B008
    dtypes: st.SearchStrategy[str] = st.just("float32"),  # noqa: B008
    contexts: str = ANY,
    most_blocks: int = 3,
    most_sequences: int = 1,
    grouped: bool = False,
    size: float = 1.0,
) -> st.SearchStrategy[DecodeCase]:
    """Cases of one kind. `grouped`: several query heads for each key/value head."""

    @st.composite
    def draw_case(draw: st.DrawFn) -> DecodeCase:
        block_size = draw(block_sizes)
        whole = st.integers(1, most_blocks).map(lambda n: n * block_size)
        context = whole if contexts == WHOLE else st.integers(1, most_blocks * block_size)
        lens = draw(st.lists(context, min_size=min(2, most_sequences), max_size=most_sequences))
        kv_heads = draw(st.integers(1, 2)) if grouped else 1
        heads = kv_heads * (draw(st.integers(1, 3)) if grouped else 1)
        return DecodeCase(
            block_size,
            tuple(lens),
            heads,
            kv_heads,
            draw(head_dims),
            seed=draw(st.integers(0, 20)),
            size=size,
            dtype=draw(dtypes),
        )

    return draw_case()


def property_of(inputs: st.SearchStrategy[DecodeCase], *always: DecodeCase) -> Callable[[Bench], None]:
    """A check of such cases, by a kernel of Triton's. `always`: larger ones, which few searches would come upon."""

    def check(bench: Bench) -> None:
        search(bench, inputs, lambda case: case.check(bench), EXAMPLES)
        for case in always:
            check_and_shrink(bench, case)
        if not bench.process.modules[0].call("has_kernel", bench.part[0]):
            raise Failed(
                Failure("what it computes is right; but the file has no Triton kernel of its own (@triton.jit)")
            )

    return check


def check_and_shrink(bench: Bench, case: DecodeCase) -> None:
    """Raises Failed with the smallest case that still fails."""
    try:
        case.check(bench)
    except Failed:
        for smaller in case.smaller():
            check_and_shrink(bench, smaller)
        raise


# --- A Llama that decodes with the student's kernel -----------------------------------------------


class StudentKernels:
    """The fast tier's kernels, with the student's in the place of `paged_decode`. The cache stays here: each call takes
    a layer of it along to the worker."""

    def __init__(self, bench: Bench, kernels: Any) -> None:
        self._bench, self._kernels = bench, kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def paged_decode(self, query: Any, paged: Any, scale: float) -> Any:
        import torch

        # [num_blocks, 2, kv_heads, block_size, head_dim]
        cache = np.stack([paged.keys.numpy(), paged.values.numpy()], axis=1)
        tables = paged.tables[paged.rows.long()].numpy()  # [seqs, max_blocks]
        arguments = (query.numpy(), cache, tables, paged.context_lens.numpy(), scale)
        output, written = self._bench.process.modules[0].call("decode", *self._bench.part, *arguments)
        if written:
            raise InvariantViolation(Invariant.EXCLUSIVE_WRITE, f"it wrote to {written[0]}")
        return torch.from_numpy(output)


def put_in(bench: Bench, runner: Any) -> None:
    """Let the fast tier's Llama decode with the student's kernel."""
    runner.kv_cache.kernels = StudentKernels(bench, runner.kv_cache.kernels)


def check_engine(bench: Bench) -> None:
    """Forks and copies, swapping and prefixes that are shared; free blocks hold NaN."""
    import torch

    from minipaged.fast import cpu
    from minipaged.fast.llama import Weights

    tier = choose_tier("fast", "cpu", "float32")
    for run, block_size in enumerate((4, 3)):
        rng = np.random.default_rng([bench.seed, run])
        weights = {name: torch.from_numpy(array) for name, array in random_weights(rng).items()}
        settings = scarce(32, block_size, max_model_len=16)
        stem = rng.integers(0, 64, 5).tolist()
        work = [
            (stem + rng.integers(0, 64, 2).tolist(), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)),
            (stem, SamplingParams(n=2, temperature=0.8, seed=run, max_tokens=5, ignore_eos=True)),
        ]
        loaded = LoadedModel(Path(), SMALL, None, tier, Weights.of(SMALL, weights, cpu))
        compare(bench, put_in, f"a small Llama, blocks of {block_size}", loaded, settings, work)


def check_model(bench: Bench) -> None:
    """A few greedy tokens of SmolLM2, the last of which needs a second block."""
    loaded = LoadedModel.load(bench.model, "fast", "cpu", "float32")
    assert loaded.tokenizer
    work = [(loaded.tokenizer.encode(PROMPTS[0])[:14], SamplingParams(temperature=0, max_tokens=4))]
    settings = {"num_blocks": 4, "block_size": 16, "max_model_len": 64, "preemption": "recompute"}
    compare(bench, put_in, "with SmolLM2", loaded, settings, work)


# --- Speed, on a GPU ------------------------------------------------------------------------------

GPU_LIMITS = replace(
    LIMITS, gpu=True, memory_bytes=1 << 46, file_bytes=1 << 30, open_files=4096, processes_allowed=True
)
"""CUDA maps far more memory than there is, and Triton starts a compiler."""
CHECKED = (
    DecodeCase(block_size=16, contexts=(100, 1, 33), heads=8, kv_heads=2, head_dim=64),
    DecodeCase(block_size=16, contexts=(100, 1, 33), heads=8, kv_heads=2, head_dim=64, dtype="float16"),
)
TIMED = {"seqs": 64, "context": 2048, "heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 16}
"""Half a gigabyte of keys and values, in float16."""
ROUNDS = 5
"""Measurements, of which the fastest counts."""


def has_gpu() -> bool:
    """Whether there is one to compile for."""
    import torch

    return torch.cuda.is_available()


def measure(bench: Bench) -> Performance:
    """Scores a second (one query, one key, one head) of the compiled kernel, in turns with the fast tier's."""
    if not has_gpu():
        raise RuntimeError("there is no GPU here, and what the interpreter takes says nothing")
    with bench.beside(limits=GPU_LIMITS) as compiled:
        for case in CHECKED:
            try:
                case.check(compiled)
            except Failed as failed:
                raise RuntimeError(f"compiled for the GPU, it is wrong: {failed}") from None
        with bench.start(GPU_LIMITS, (WORKER, "minipaged.fast.gpu.attention")) as fast:
            parts = ((compiled.process.modules[0], *compiled.part), (fast.modules[0], fast.modules[0], "fast_decode"))
            timed = [partial(worker.call, "seconds", module, name, *TIMED.values()) for worker, module, name in parts]
            best = fastest(ROUNDS, *timed)
    scores = TIMED["seqs"] * TIMED["context"] * TIMED["heads"]
    return Performance(scores / best[0], scores / best[1])


# --- The assignment -------------------------------------------------------------------------------

CHECKS: dict[str, Check] = {
    "one full block": property_of(cases(contexts=WHOLE, most_blocks=1)),
    "several blocks, through the table": property_of(cases(contexts=WHOLE), DecodeCase(16, (192,), head_dim=16)),
    "a last block that is not full": property_of(
        cases(block_sizes=st.sampled_from([2, 4, 8, 16])), DecodeCase(16, (150,))
    ),
    "grouped-query heads": property_of(cases(most_blocks=2, grouped=True)),
    "batches of different lengths": property_of(cases(most_blocks=2, most_sequences=3, grouped=True)),
    "any block size, any head dimension": property_of(
        cases(
            block_sizes=st.sampled_from([1, 3, 5, 7, 12, 24]),
            head_dims=st.sampled_from([1, 3, 5, 12, 48, 80]),
            most_sequences=2,
            grouped=True,
        )
    ),
    "long contexts, large scores, float16": property_of(
        cases(
            block_sizes=st.sampled_from([4, 16, 32]),
            head_dims=st.sampled_from([4, 16, 64]),
            dtypes=st.sampled_from(["float32", "float16"]),
            most_sequences=2,
            size=60.0,
        ),
        DecodeCase(32, (320, 3), head_dim=64, size=60.0),
        DecodeCase(32, (320, 3), head_dim=64, size=60.0, dtype="float16"),
    ),
    "a small Llama": check_engine,
    "SmolLM2": check_model,
}

ASSIGNMENT = described(
    "triton-decode",
    CHECKS,
    part="paged_decode",
    members=(),
    limits=LIMITS,
    modules=(WORKER,),
    needs=("torch", "triton", "numba"),
    measure=measure,
)
