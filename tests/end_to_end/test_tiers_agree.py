"""A real Llama on both tiers, under pressure: the same tokens, or a proven tie."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from minipaged import LLM, BeamSearchParams, RequestOutput, SamplingParams
from minipaged.contracts import SamplingInput
from minipaged.events import BlockCopied, Event, PrefixReused, RequestPreempted
from minipaged.llm import LoadedModel
from tests.effort import thorough
from tests.end_to_end.test_scheduling_invariance import Job, largest_need, run
from tests.end_to_end.ties import check_same_or_tied, check_same_or_tied_draws

pytestmark = pytest.mark.model

STEMS = (
    "The library was quiet in the morning, and",
    "Once upon a time there was a king who",
    "A page table maps virtual addresses to",
)
ENDS = ("", " one", " the old", " it is said that nobody", " in the end")


@pytest.fixture(scope="module")
def models(smollm2_folder: Path) -> dict[str, LoadedModel]:
    return {tier: LoadedModel.load(smollm2_folder, tier, dtype="float32") for tier in ("reference", "fast")}


def random_jobs(r: random.Random, encode: Callable[[str], list[int]]) -> list[Job]:
    """Few beginnings, so that prefixes are shared; several sequences a request, so that blocks are copied."""
    jobs = []
    for _ in range(r.randint(6, 9)):
        prompt = tuple(encode(r.choice(STEMS) + r.choice(ENDS)))
        max_tokens = r.randint(10, 18)
        params: SamplingParams | BeamSearchParams
        if r.random() < 0.3:
            params = BeamSearchParams(beam_width=r.randint(2, 3), max_tokens=max_tokens)
        else:
            params = SamplingParams(
                n=r.choice([1, 2, 3]),
                temperature=r.choice([0.0, 0.0, 0.8]),
                top_p=r.choice([1.0, 0.9]),
                top_k=r.choice([0, 20]),
                seed=r.randrange(2**32),
                max_tokens=max_tokens,
                ignore_eos=True,
            )
        jobs.append(Job(prompt, params))
    return jobs


@thorough
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("seed", range(2))
def test_random_workloads_give_the_same_tokens(models: dict[str, LoadedModel], seed: int, preemption: str) -> None:
    """n, beams, shared prefixes and preemption. Outputs may part at a proven tie; these beams come nowhere near one,
    and have to be equal."""
    r = random.Random(f"{seed} {preemption}")
    jobs = random_jobs(r, models["fast"].tokenizer.encode)
    happened: dict[str, Counter[str]] = {}
    outputs: dict[str, list[RequestOutput]] = {}
    for tier, model in models.items():
        count = happened[tier] = Counter[str]()

        def note(event: Event, count: Counter[str] = count) -> None:
            if isinstance(event, RequestPreempted | BlockCopied | PrefixReused):
                count[event.name] += 1

        llm = LLM(
            model,
            block_size=4,
            num_blocks=largest_need(jobs, 4) + 1,
            num_swap_blocks=100,
            max_model_len=64,
            preemption=preemption,  # type: ignore[arg-type]
            debug=True,
            listeners=[note],
        )
        outputs[tier] = run(llm, jobs)
        assert count["request_preempted"], "the pool was large enough for all"
        assert count["block_copied"]
    folder = models["fast"].folder
    for job, ours, theirs in zip(jobs, outputs["fast"], outputs["reference"], strict=True):
        for stream, (our, their) in enumerate(zip(ours.outputs, theirs.outputs, strict=True)):
            if isinstance(job.params, BeamSearchParams):
                assert our.token_ids == their.token_ids, job
            elif job.params.temperature == 0:
                check_same_or_tied(folder, job.prompt, our.token_ids, their.token_ids)
            else:
                wanted = SamplingInput(0, job.params, job.prompt, [], seed=job.params.seed or 0, stream=stream)
                check_same_or_tied_draws(folder, wanted, our.token_ids, their.token_ids)
            if our.token_ids == their.token_ids:
                assert our.cumulative_logprob == pytest.approx(their.cumulative_logprob, abs=1e-3)
