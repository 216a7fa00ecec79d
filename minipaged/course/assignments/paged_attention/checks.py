"""Assignment 3, `paged-attention`: online-softmax attention over blocks, in NumPy (paper, section 4.1, Eq. 4).

The properties are single calls with random keys and values, compared with softmax attention in float64; what fails is
shortened to the smallest batch that shows it. One test measures memory: what grows with the context has been gathered,
or its scores kept. Then the reference's Llama runs with the student's attention, first a small one with random weights
under a real engine that shares, copies and swaps blocks, then SmolLM2; both have to write the reference's tokens. The
Llama runs here, the KV cache and the student's function are in the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from minipaged.course.assignments.paged_attention.cases import AttentionCase
from minipaged.course.grader.assignment import (
    Bench,
    Check,
    Failed,
    Failure,
    Performance,
    Submission,
    fastest,
)
from minipaged.course.grader.counterexample import make_script
from minipaged.course.grader.points import described
from minipaged.course.grader.search import search
from minipaged.course.grader.serving import PROMPTS, in_engine
from minipaged.course.sandbox.contract import Handle, Raised
from minipaged.events import Event
from minipaged.llm import LLM
from minipaged.models.config import ModelConfig
from minipaged.params import SamplingParams
from minipaged.setup.loaded_model import LoadedModel
from minipaged.steps import CopyPair
from minipaged.testing.workloads import all_sound
from minipaged.tiers import choose_tier

ENGINE_RUNS = 4
SHORT, LONG = 1024, 4096
"""Contexts whose memory is compared."""
BYTES_A_POSITION = 16
"""That a position more may take. Its keys and values are 64 bytes in this test, its scores 128."""
ROUNDS = 5
"""Measurements of speed, of which the fastest counts."""


# --- Properties -----------------------------------------------------------------------------------


def cases(
    *,
    block_sizes: st.SearchStrategy[int] | None = None,
    most_blocks: int = 4,
    most_sequences: int = 1,
    causal: bool = False,
    grouped: bool = False,
    size: float = 1.0,
    empty: float = 0.0,
) -> st.SearchStrategy[AttentionCase]:
    """Cases of one kind. `causal`: with several new tokens a sequence; `grouped`: with several heads."""

    any_size = st.integers(1, 16) | st.sampled_from([32, 64, 100, 128, 255, 256])

    @st.composite
    def draw_case(draw: st.DrawFn) -> AttentionCase:
        block_size = draw(any_size if block_sizes is None else block_sizes)
        whole = st.integers(1, most_blocks).map(lambda n: n * block_size)
        context = st.just(1) | whole | whole.map(lambda n: max(1, n - 1)) | st.integers(1, most_blocks * block_size)
        context = context | st.just(min(block_size + 1, most_blocks * block_size))
        contexts = draw(st.lists(context, min_size=min(2, most_sequences), max_size=most_sequences))
        queries = [draw(st.integers(1, min(n, 20)) if causal else st.just(1)) for n in contexts]
        kv_heads = draw(st.integers(1, 3)) if grouped else 1
        heads = kv_heads * (draw(st.integers(1, 4)) if grouped else 1)
        head_dim = draw(st.sampled_from([2, 4, 16, 64]))
        seed = draw(st.integers(0, 1000))
        return AttentionCase(
            *(block_size, tuple(contexts), tuple(queries), heads, kv_heads, head_dim, seed), size=size, empty=empty
        )

    return draw_case()


def property_of(inputs: st.SearchStrategy[AttentionCase]) -> Callable[[Bench], None]:
    """A check of such cases."""
    return lambda bench: search(bench, inputs, lambda case: case.check(bench))


def check_memory(bench: Bench) -> None:
    """One query with a long context, beside one with a shorter."""
    module, name = bench.part
    peaks = []
    for context in (SHORT, LONG):
        case = AttentionCase(block_size=32, contexts=(context,), queries=(1,), heads=32, kv_heads=1, head_dim=8)
        case.check(bench)
        peaks.append(bench.process.modules[1].call("peak_bytes", module, name, *case.arguments(bench)))
    a_position = (peaks[1] - peaks[0]) / (LONG - SHORT)
    if a_position > BYTES_A_POSITION:
        message = (
            f"with {SHORT} positions it needs {peaks[0]:,} bytes at a time, with {LONG} {peaks[1]:,}: {a_position:.0f} "
            "for each position more (its keys are 32, its values 32, its scores 128)"
        )
        imports = ["import numpy as np", "from minipaged.reference.kv_cache import KVCache"]
        lines = MEMORY_SCRIPT.format(
            name=name, short=SHORT, long=LONG, most=BYTES_A_POSITION, more=LONG - SHORT
        ).splitlines()
        script = make_script(bench.submission, name, None, message, imports, lines)
        raise Failed(Failure(message, script=script))


MEMORY_SCRIPT = """\
peaks = []
for context in ({short}, {long}):
    query, tables = np.ones((1, 32, 8), np.float32), np.arange(context // 32)[None]
    kv_cache = KVCache(1, context // 32, 32, 1, 8)
    kv_cache.device_blocks[:] = 1
    arguments = (query, kv_cache, 0, tables, np.array([0, 1]), np.array([context]), 0.5)
    {name}(*arguments)
    tracemalloc.start()
    {name}(*arguments)
    peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
assert peaks[1] - peaks[0] <= {most} * {more}, f"bytes needed at a time: {{peaks}}"
"""


# --- A Llama with the student's attention ---------------------------------------------------------


class RemoteCache:
    """The KV cache of a Llama that runs here, in the worker. What changes it is sent with the next attention."""

    def __init__(self, bench: Bench, like: Any) -> None:
        """`like`: the cache that this one takes the place of."""
        self._bench = bench
        self.block_size = like.block_size
        sizes = (like.num_layers, like.num_blocks, like.block_size, like.num_kv_heads, like.head_dim)
        cache = bench.process.modules[0].call("KVCache", *sizes, like.num_swap_blocks, like.dtype.name)
        assert isinstance(cache, Handle)
        self._cache = cache
        self._pending: list[tuple[Handle, str, Sequence[Any]]] = []

    def write(self, layer: int, slots: Any, k: Any, v: Any) -> None:
        self._pending.append((self._cache, "write", (layer, slots, k, v)))

    def copy(self, pairs: Sequence[CopyPair]) -> None:
        self._pending.append((self._cache, "copy", (list(pairs),)))

    def swap_out(self, pairs: Sequence[CopyPair]) -> None:
        self._pending.append((self._cache, "swap_out", (list(pairs),)))

    def swap_in(self, pairs: Sequence[CopyPair]) -> None:
        self._pending.append((self._cache, "swap_in", (list(pairs),)))

    def poison(self, blocks: Sequence[int]) -> None:
        self._pending.append((self._cache, "poison", (list(blocks),)))

    def attend(self, query: Any, kv_cache: Any, layer: int, tables: Any, start: Any, lens: Any, scale: float) -> Any:
        """Takes the place of `paged_attention` in the Llama."""
        assert kv_cache is self
        arguments = (*self._bench.part, query, self._cache, layer, tables, start, lens, scale)
        answers = self._bench.process.batch([*self._pending, (self._bench.process.modules[1], "attend", arguments)])
        self._pending.clear()
        for answer in answers:
            if isinstance(answer, Raised):
                raise answer.error
        output = answers[-1][0]
        if not isinstance(output, np.ndarray) or output.shape != query.shape:
            raise TypeError(f"it returned {getattr(output, 'shape', output)!r}, no array of shape {query.shape}")
        return output


def put_in(bench: Bench, runner: Any) -> None:
    """Let the reference's Llama compute with the student's attention."""
    runner.kv_cache = RemoteCache(bench, runner.kv_cache)
    runner.attend = runner.kv_cache.attend


def compare(
    bench: Bench,
    put: Callable[[Bench, Any], None],
    where: str,
    loaded: LoadedModel,
    settings: Mapping[str, Any],
    work: Sequence[tuple[list[int], SamplingParams]],
) -> None:
    """The tokens that the model writes have to be the same with the student's part, which `put` puts into the runner,
    as without. Raises Failed."""
    prompts, params = (list(each) for each in zip(*work, strict=True))

    def tokens(llm: LLM) -> list[list[int]]:
        outputs = all_sound(llm.generate(prompts, params, use_tqdm=False))
        return [list(one.token_ids) for output in outputs for one in output.outputs]

    expected = tokens(LLM(loaded, **settings))
    bench.process.forget()
    events: list[Event] = []
    try:
        llm = LLM(loaded, **settings, listeners=[events.append])
        put(bench, llm.engine.runner)
        found = tokens(llm)
    except Exception as error:
        raise in_engine(error, where, events) from None
    for number, (own, right) in enumerate(zip(found, expected, strict=True)):
        if own != right:
            first = next((i for i, pair in enumerate(zip(own, right, strict=False)) if pair[0] != pair[1]), 0)
            message = f"{where}: sequence {number} continues with the tokens {own}; it should be {right}"
            raise Failed(Failure(f"{message} (the first difference is token {first})", events=tuple(events)))


def scarce(slots: int, block_size: int, **more: Any) -> dict[str, Any]:
    """Settings of a pool of so many slots: too small for all at once, so that some are swapped."""
    blocks = -(-slots // block_size)
    sizes = {"num_blocks": blocks, "num_swap_blocks": blocks, "block_size": block_size}
    return {**sizes, "preemption": "swap", "debug": True, **more}


SMALL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_ids=(),
)


def random_weights(rng: np.random.Generator) -> dict[str, Any]:
    """For the small Llama; large, so that no two logits come close."""
    shapes = {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,)}
    for layer in range(SMALL.num_hidden_layers):
        parts = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
        shapes |= {f"model.layers.{layer}.self_attn.{part}.weight": shape for part, shape in parts.items()}
        parts = {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
        shapes |= {f"model.layers.{layer}.mlp.{part}.weight": shape for part, shape in parts.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (32,)
    return {
        name: np.float32(rng.standard_normal(shape) * 0.3 if len(shape) == 2 else np.ones(shape))
        for name, shape in shapes.items()
    }


def check_engine(bench: Bench) -> None:
    """Prompts in chunks, forks and copies, prefix caching, swapping; free blocks hold NaN."""
    for run in range(ENGINE_RUNS):
        rng = np.random.default_rng([bench.seed, run])
        stem = rng.integers(0, 64, 9).tolist()
        work = [
            (stem[: int(rng.integers(1, 9))] + rng.integers(0, 64, int(rng.integers(1, 9))).tolist(), params)
            for params in (
                SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
                SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
                SamplingParams(n=2, temperature=0.8, seed=run, max_tokens=8, ignore_eos=True),
                SamplingParams(n=2, temperature=0.8, seed=run, max_tokens=6, ignore_eos=True),
            )
        ]
        block_size = (1, 4, 5, 16)[run % 4]
        settings = scarce(56, block_size, max_model_len=40, max_num_batched_tokens=8)
        loaded = LoadedModel(Path(), SMALL, None, choose_tier("reference"), random_weights(rng))
        compare(bench, put_in, f"a small Llama, blocks of {block_size}", loaded, settings, work)


def check_model(bench: Bench) -> None:
    """Greedy tokens of SmolLM2."""
    loaded = LoadedModel.load(bench.model, "reference")
    assert loaded.tokenizer
    params = SamplingParams(temperature=0, max_tokens=8)
    work = [(loaded.tokenizer.encode(prompt)[:15], params) for prompt in PROMPTS]
    settings = {"num_blocks": 24, "block_size": 4, "max_model_len": 64, "preemption": "recompute"}
    compare(bench, put_in, "with SmolLM2", loaded, settings, work)


# --- Speed ----------------------------------------------------------------------------------------

TIMED = (
    AttentionCase(block_size=16, contexts=(512,) * 8, queries=(1,) * 8, heads=9, kv_heads=3, head_dim=64),
    AttentionCase(block_size=16, contexts=(128,), queries=(128,), heads=9, kv_heads=3, head_dim=64),
)
"""Eight sequences that decode, and a prompt; heads as SmolLM2 has them."""


def measure(bench: Bench) -> Performance:
    """Scores a second (one query, one key, one head), in turns with the reference's loop."""
    with bench.beside(Submission.of_reference("attention", "paged_attention")) as theirs:
        benches = (bench, theirs)
        total = [0.0, 0.0]
        for case in TIMED:
            timed = [
                partial(one.process.modules[1].call, "seconds", *one.part, *case.arguments(one)) for one in benches
            ]
            best = fastest(ROUNDS, *timed)
            total = [before + more for before, more in zip(total, best, strict=True)]
    scores = sum(
        case.heads * (new * n - new * (new - 1) // 2)
        for case in TIMED
        for n, new in zip(case.contexts, case.queries, strict=True)
    )
    return Performance(scores / total[0], scores / total[1])


# --- The assignment -------------------------------------------------------------------------------

CHECKS: dict[str, Check] = {
    "one query, one block": property_of(cases(most_blocks=1)),
    "contexts over several blocks": property_of(cases()),
    "several new tokens: causal": property_of(cases(block_sizes=st.integers(1, 8), causal=True)),
    "grouped-query heads": property_of(cases(block_sizes=st.integers(1, 8), causal=True, grouped=True)),
    "mixed batches": property_of(cases(block_sizes=st.integers(1, 8), most_sequences=4, causal=True, grouped=True)),
    "large scores": property_of(cases(block_sizes=st.integers(1, 8), most_sequences=3, causal=True, size=100.0)),
    "what nobody filled is not seen": property_of(
        cases(block_sizes=st.integers(1, 8), most_sequences=3, causal=True, empty=float("nan"))
    ),
    "memory stays small": check_memory,
    "a small Llama": check_engine,
    "SmolLM2": check_model,
}

ASSIGNMENT = described(
    "paged-attention",
    CHECKS,
    part="paged_attention",
    members=(),
    modules=("minipaged.reference.kv_cache", "minipaged.course.assignments.paged_attention.worker"),
    measure=measure,
)
