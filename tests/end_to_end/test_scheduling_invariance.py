"""The invariant scheduling-invariance, on real models: how requests are scheduled never shows in what they say.

The same requests run once undisturbed (each alone, in a roomy pool, in one chunk, without a prefix cache) and once
crowded: other block sizes, a pool with hardly more blocks than the largest request needs, small chunks, arrivals at
different steps. `debug=True` throughout: memory that is nobody's holds NaN, and the invariants are checked each step.

Greedy tokens are compared in float32, the way users run, and may part only at a proven tie (`ties.py`). Sampled tokens
and beams are compared in float64, where rounding (1e-16) decides nothing: no difference is allowed at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged import LLM, BeamSearchParams, RequestOutput, SamplingParams
from minipaged.events import BlockCopied, Event, PrefixReused
from minipaged.models.quantized.recipe import Recipe
from minipaged.quantizing.checkpoint import quantize
from tests.effort import examples, one_case_in, thorough
from tests.end_to_end.ties import check_same_or_tied
from tests.memory import give_back
from tests.workloads import ended

Params = SamplingParams | BeamSearchParams


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    params: Params


STEM = tuple(range(20, 52))
"""What several prompts begin with, for the prefix cache to find."""
PROMPTS = [STEM, (*STEM, 7), (*STEM[:20], 9, 8), (5,), tuple(range(90, 60, -3)), (*STEM, 7, 60, 61, 62), (*STEM[:9], 4)]

GREEDY = [Job(prompt, SamplingParams(temperature=0, max_tokens=14 + 2 * i)) for i, prompt in enumerate(PROMPTS)]
SAMPLED = [
    Job(prompt, SamplingParams(n=1 + i % 3, temperature=0.8, top_p=0.95, seed=i, max_tokens=12 + i, ignore_eos=True))
    for i, prompt in enumerate(PROMPTS)
]
BEAMS = [
    Job(prompt, BeamSearchParams(beam_width=2 + i % 3, max_tokens=8 + i, length_penalty=i % 3))
    for i, prompt in enumerate(PROMPTS)
]
JOBS = {"greedy": GREEDY, "sampled": SAMPLED, "beams": BEAMS}
DTYPE = {"greedy": "float32", "sampled": "float64", "beams": "float64"}
every_kind = pytest.mark.parametrize(
    ("tier", "kind"), [("reference", "greedy"), ("reference", "sampled"), ("reference", "beams"), ("fast", "greedy")]
)
"""The fast tier does not compute in float64, without which a sample or a beam may lie too close to another choice."""


class PowerCut(Exception):
    """What a test lets happen within a step."""


def outputs_alone(model: Path | str, jobs: Sequence[Job], dtype: str, **settings: Any) -> list[RequestOutput]:
    """What each job gives when nothing disturbs it."""
    settings = {
        "tier": "reference",
        "num_blocks": 64,
        "block_size": 16,
        "enable_prefix_caching": False,
        "dtype": dtype,
    } | settings
    llm = LLM(model, **settings)
    return [run(llm, [job])[0] for job in jobs]


def run(llm: LLM, jobs: Sequence[Job], arrivals: Sequence[int] = ()) -> list[RequestOutput]:
    """The outputs of all jobs in order; job i arrives before step `arrivals[i]` (0 where none is given)."""
    arrives = dict(enumerate(arrivals))
    outputs: dict[str, RequestOutput] = {}
    step = 0
    while len(outputs) < len(jobs):
        for i, job in enumerate(jobs):
            if arrives.get(i, 0) == step:
                llm.engine.add_request(job.prompt, job.params, request_id=f"job {i}")
        with suppress(PowerCut):
            outputs |= {output.request_id: output for output in ended(llm.engine.step())}
        step += 1
        assert step < 5000, "liveness: the jobs do not come to an end"
    return [outputs[f"job {i}"] for i in range(len(jobs))]


def check_same(
    folder: Path, jobs: Sequence[Job], crowded: Sequence[RequestOutput], alone: Sequence[RequestOutput]
) -> None:
    """Fail unless the two runs of `jobs` gave the same tokens; greedy ones may part at a proven tie."""
    for job, ours, undisturbed in zip(jobs, crowded, alone, strict=True):
        for got, expected in zip(ours.outputs, undisturbed.outputs, strict=True):
            if isinstance(job.params, SamplingParams) and job.params.temperature == 0:
                check_same_or_tied(folder, job.prompt, got.token_ids, expected.token_ids)
            else:
                assert got.token_ids == expected.token_ids
                assert got.cumulative_logprob == pytest.approx(expected.cumulative_logprob, rel=1e-4)


def check_nothing_is_held(llm: LLM) -> None:
    blocks = llm.engine.blocks
    assert blocks.num_used == 0
    assert blocks.host_allocator is None or blocks.host_allocator.num_free == blocks.host_allocator.num_blocks


@pytest.fixture(scope="module")
def alone(small_llama: Path) -> dict[str, list[RequestOutput]]:
    return {kind: outputs_alone(small_llama, jobs, DTYPE[kind]) for kind, jobs in JOBS.items()}


def largest_need(jobs: Sequence[Job], block_size: int) -> int:
    """Blocks for the most demanding job alone: its prompt's full blocks once, the rest for each sequence."""
    most = 0
    for job in jobs:
        sequences = job.params.n if isinstance(job.params, SamplingParams) else job.params.beam_width
        assert job.params.max_tokens is not None
        each = -(-(len(job.prompt) + job.params.max_tokens - 1) // block_size)
        shared = len(job.prompt) // block_size
        most = max(most, shared + sequences * (each - shared))
    return most


class CopiesForSiblings:
    """A listener that counts blocks that are copied because siblings share them. The others are partial hits: a request
    copies the last block that it has found in the cache."""

    def __init__(self, llm: LLM) -> None:
        self.number = 0
        self._found_in_part: dict[int, int] = {}
        self._block_size = llm.config.block_size
        llm.engine.listeners.append(self)

    def __call__(self, event: Event) -> None:
        if isinstance(event, PrefixReused) and event.num_tokens % self._block_size:
            self._found_in_part[event.sequence] = len(event.blocks) - 1
        elif isinstance(event, BlockCopied):
            self.number += self._found_in_part.pop(event.sequence, None) != event.logical_block


# --- Any schedule ---------------------------------------------------------------------------------


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of an LLM, and the steps at which the jobs arrive. Shrinks towards the undisturbed run."""
    return {
        "block_size": draw(st.sampled_from([16, 8, 5, 4, 3, 2, 1])),
        "blocks_to_spare": draw(st.sampled_from([60, 20, 10, 5, 2, 1, 0])),
        "num_swap_blocks": draw(st.sampled_from([0, 4, 16, 100])),
        "preemption": draw(st.sampled_from(["recompute", "swap", "auto"])),
        "enable_prefix_caching": draw(st.booleans()),
        "max_num_seqs": draw(st.sampled_from([64, 8, 4])),
        "max_num_batched_tokens": draw(st.sampled_from([2048, 37, 16, 7, 4])),
        "async_scheduling": draw(st.booleans()),
        "arrivals": draw(st.lists(st.integers(0, 30), min_size=len(PROMPTS), max_size=len(PROMPTS))),
    }


@every_kind
@settings(max_examples=examples(30, least=5))
@given(schedule=schedules())
def test_no_schedule_shows_in_the_tokens(
    small_llama: Path, alone: dict[str, list[RequestOutput]], tier: str, kind: str, schedule: dict[str, Any]
):
    schedule = dict(schedule)
    arrivals, to_spare = schedule.pop("arrivals"), schedule.pop("blocks_to_spare")
    if schedule["num_swap_blocks"] == 0 and schedule["preemption"] == "swap":
        schedule["preemption"] = "recompute"
    num_blocks = largest_need(JOBS[kind], schedule["block_size"]) + to_spare
    llm = LLM(
        small_llama, tier=tier, num_blocks=num_blocks, dtype=DTYPE[kind], debug=True, max_model_len=128, **schedule
    )
    check_same(small_llama, JOBS[kind], run(llm, JOBS[kind], arrivals), alone[kind])
    check_nothing_is_held(llm)


# --- Schedules in which everything happens --------------------------------------------------------


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@every_kind
def test_preemption_chunks_and_prefix_hits_do_not_show_in_the_tokens(
    small_llama: Path, alone: dict[str, list[RequestOutput]], tier: str, kind: str, preemption: Any
):
    block_size = 4
    llm = LLM(
        small_llama,
        tier=tier,
        block_size=block_size,
        num_blocks=largest_need(JOBS[kind], block_size) + 4,
        num_swap_blocks=100,
        preemption=preemption,
        max_num_batched_tokens=11,
        max_model_len=128,
        dtype=DTYPE[kind],
        debug=True,
    )
    copies = CopiesForSiblings(llm)
    check_same(small_llama, JOBS[kind], run(llm, JOBS[kind], [0, 0, 0, 0, 5, 5, 9]), alone[kind])
    check_nothing_is_held(llm)
    stats = llm.stats()
    assert stats.prefix_cache_hit_tokens > 0
    assert stats.prefix_cache_evictions > 0
    if preemption == "swap":
        assert stats.preempted_by_swap > 0
        assert stats.blocks_swapped_in == stats.blocks_swapped_out > 0
        assert stats.preempted_by_recompute == stats.tokens_recomputed == 0
    else:
        assert stats.preempted_by_recompute > 0
        assert stats.tokens_recomputed > 0
        assert stats.preempted_by_swap == stats.blocks_swapped_out == 0
    assert (copies.number > 0) == (kind != "greedy")  # only siblings share a block that is not full


@pytest.mark.parametrize(("kv_cache_dtype", "preemption"), [("int8", "swap"), ("fp8", "recompute")])
@every_kind
def test_in_8_bits_no_schedule_shows_in_the_tokens_either(
    small_llama: Path, tier: str, kind: str, kv_cache_dtype: Any, preemption: Any
):
    """The scale of a token's keys and values depends on that token alone. On both tiers the same tokens, none tied."""
    jobs = JOBS[kind]
    llm = LLM(
        small_llama,
        tier=tier,
        kv_cache_dtype=kv_cache_dtype,
        block_size=4,
        num_blocks=largest_need(jobs, 4) + 4,
        num_swap_blocks=100,
        preemption=preemption,
        max_num_batched_tokens=11,
        max_model_len=128,
        dtype=DTYPE[kind],
        debug=True,
    )
    cache = llm.engine.runner.kv_cache  # type: ignore[attr-defined]
    assert cache.kv_cache_dtype == kv_cache_dtype
    assert cache.block_bytes == llm.loaded.block_bytes(4, kv_cache_dtype) < llm.loaded.block_bytes(4) / 3
    copies = CopiesForSiblings(llm)
    crowded = run(llm, jobs, [0, 0, 0, 0, 5, 5, 9])
    alone = outputs_alone(small_llama, jobs, DTYPE[kind], kv_cache_dtype=kv_cache_dtype)
    for ours, undisturbed in zip(crowded, alone, strict=True):
        assert [each.token_ids for each in ours.outputs] == [each.token_ids for each in undisturbed.outputs]
    check_nothing_is_held(llm)
    stats = llm.stats()
    assert stats.prefix_cache_hit_tokens > 0
    assert (stats.preempted_by_swap > 0) == (preemption == "swap")
    assert (stats.preempted_by_recompute > 0) == (preemption == "recompute")
    assert (copies.number > 0) == (kind != "greedy")


@every_kind
def test_with_packed_weights_no_schedule_shows_in_the_tokens_either(
    small_llama: Path, tier: str, kind: str, tmp_path: Path
):
    """However many tokens are multiplied by a packed matrix at a time."""
    jobs, folder = JOBS[kind], tmp_path / "packed"
    quantize(small_llama, folder, Recipe("rtn", group_size=32))
    llm = LLM(
        folder,
        tier=tier,
        block_size=4,
        num_blocks=largest_need(jobs, 4) + 4,
        num_swap_blocks=20,
        max_num_batched_tokens=11,
        max_model_len=128,
        dtype=DTYPE[kind],
        debug=True,
    )
    crowded = run(llm, jobs, [0, 0, 0, 0, 5, 5, 9])
    # A tier with itself: the fast one does not round a weight to float16, as the reference does.
    alone = outputs_alone(folder, jobs, DTYPE[kind], tier=tier)
    for ours, undisturbed in zip(crowded, alone, strict=True):
        assert [each.token_ids for each in ours.outputs] == [each.token_ids for each in undisturbed.outputs]
    check_nothing_is_held(llm)
    assert llm.stats().preempted_by_swap + llm.stats().preempted_by_recompute > 0


def test_a_host_pool_that_is_too_small_for_some_makes_both_kinds_of_preemption(
    small_llama: Path, alone: dict[str, list[RequestOutput]], tier: str
):
    llm = LLM(
        small_llama,
        tier=tier,
        dtype="float32",
        block_size=4,
        num_blocks=17,
        num_swap_blocks=8,
        preemption="swap",
        debug=True,
    )
    check_same(small_llama, GREEDY, run(llm, GREEDY), alone["greedy"])
    assert llm.stats().preempted_by_swap > 0
    assert llm.stats().preempted_by_recompute > 0


@every_kind
def test_steps_that_fail_half_way_do_not_show_in_the_tokens(
    small_llama: Path, alone: dict[str, list[RequestOutput]], tier: str, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """Now and then a step dies when keys and values are written but no token is chosen yet."""
    num_blocks = largest_need(JOBS[kind], 4) + 6
    llm = LLM(
        small_llama, tier=tier, block_size=4, num_blocks=num_blocks, num_swap_blocks=30, preemption="swap",
        dtype=DTYPE[kind], max_num_batched_tokens=23, max_model_len=128, debug=True,
    )  # fmt: skip
    runner, failures = llm.engine.runner, 0
    sample = runner.sample

    def unsteady(logits: Any, inputs: Any) -> Any:
        nonlocal failures
        if llm.engine.stats.steps % 7 == 3 and failures <= llm.engine.stats.steps // 7:
            failures += 1
            raise PowerCut
        return sample(logits, inputs)

    monkeypatch.setattr(runner, "sample", unsteady)
    check_same(small_llama, JOBS[kind], run(llm, JOBS[kind], [0, 0, 0, 2, 2, 6, 6]), alone[kind])
    check_nothing_is_held(llm)
    assert failures > 3
    assert llm.stats().tokens_recomputed > 0


def test_a_second_run_of_the_same_jobs_comes_from_the_prefix_cache_and_says_the_same(
    small_llama: Path, alone: dict[str, list[RequestOutput]], tier: str
):
    llm = LLM(small_llama, tier=tier, dtype="float32", block_size=4, num_blocks=200, debug=True)
    first, second = run(llm, GREEDY), run(llm, GREEDY)
    check_same(small_llama, GREEDY, first, alone["greedy"])
    check_same(small_llama, GREEDY, second, alone["greedy"])
    for output in second:  # all tokens but the one that must run for its logits
        assert output.num_cached_tokens == len(output.prompt_token_ids) - 1


# --- The real model -------------------------------------------------------------------------------

GREEDY_20 = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SYSTEM = "You are a librarian who answers briefly and always names a book. "
REAL_JOBS: list[tuple[str, Params]] = [
    (f"{SYSTEM}Where do I begin?", GREEDY_20),
    (f"{SYSTEM}What is new?", GREEDY_20),
    (f"{SYSTEM}I like the sea.", GREEDY_20),
    ("Paging is", SamplingParams(n=2, temperature=0.9, top_k=10, seed=5, max_tokens=14, ignore_eos=True)),
    ("A block table maps", BeamSearchParams(beam_width=3, max_tokens=12)),
]
"""Neither a sample nor a beam comes nearer than 0.001 to another choice, and rounding is about 0.00001."""


@pytest.fixture(scope="session")  # tests of one tier run before those of the other, other modules' among them
def smollm2_alone(smollm2_folder: Path) -> tuple[list[Job], list[RequestOutput]]:
    """The jobs for SmolLM2, and what they give alone."""
    llm = LLM(smollm2_folder, tier="reference", num_blocks=64, enable_prefix_caching=False)
    assert llm.tokenizer is not None
    jobs = [Job(tuple(llm.tokenizer.encode(text)), params) for text, params in REAL_JOBS]
    return jobs, [run(llm, [job])[0] for job in jobs]


@thorough
@one_case_in(2)
@pytest.mark.model
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_crowded_smollm2_says_what_it_says_alone(
    smollm2_folder: Path, smollm2_alone: tuple[list[Job], list[RequestOutput]], tier: str, preemption: Any
):
    jobs, alone = smollm2_alone
    give_back()  # the weights that served each alone
    llm = LLM(
        smollm2_folder,
        tier=tier,
        dtype="float32",
        block_size=8,
        num_blocks=largest_need(jobs, 8) + 2,
        num_swap_blocks=64,
        preemption=preemption,
        max_num_batched_tokens=24,
        max_model_len=128,
        debug=True,
    )
    crowded = run(llm, jobs, [0, 0, 2, 3, 3])
    check_nothing_is_held(llm)
    stats = llm.stats()
    del llm
    give_back()  # a tie takes weights of its own
    check_same(smollm2_folder, jobs, crowded, alone)
    assert stats.blocks_copied > 0
    assert stats.prefix_cache_hit_tokens > 0
    assert (stats.preempted_by_swap > 0) == (preemption == "swap")
    assert (stats.preempted_by_recompute > 0) == (preemption == "recompute")
