"""A real Llama on both tiers, under pressure: the same tokens, or a proven tie; and each logit as by transformers.

Of its weights, half a gigabyte and more, one set is in memory at a time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from minipaged import LLM, BeamSearchParams, RequestOutput, SamplingParams
from minipaged.contracts import SamplingInput
from minipaged.events import BlockCopied, Event, PrefixReused, RequestPreempted
from minipaged.llm import LoadedModel
from minipaged.models.tokenizer import Tokenizer
from minipaged.recordings.replay_steps import logits_of
from tests.effort import one_case_in, thorough
from tests.end_to_end import yardstick
from tests.end_to_end.test_scheduling_invariance import Job, largest_need, run
from tests.end_to_end.ties import check_same_or_tied, check_same_or_tied_draws
from tests.memory import give_back

pytestmark = pytest.mark.model

STEMS = (
    "The library was quiet in the morning, and",
    "Once upon a time there was a king who",
    "A page table maps virtual addresses to",
)
ENDS = ("", " one", " the old", " it is said that nobody", " in the end")


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
@one_case_in(4)
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("seed", range(2))
def test_random_workloads_give_the_same_tokens(smollm2_folder: Path, seed: int, preemption: str) -> None:
    """n, beams, shared prefixes and preemption. Outputs may part at a proven tie; these beams come nowhere near one,
    and have to be equal."""
    r = random.Random(f"{seed} {preemption}")
    jobs = random_jobs(r, Tokenizer(smollm2_folder).encode)
    outputs: dict[str, list[RequestOutput]] = {}
    for tier in ("reference", "fast"):
        count = Counter[str]()

        def note(event: Event, count: Counter[str] = count) -> None:
            if isinstance(event, RequestPreempted | BlockCopied | PrefixReused):
                count[event.name] += 1

        llm = LLM(
            smollm2_folder,
            tier=tier,
            dtype="float32",
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
        del llm
        give_back()  # one tier's weights at a time
    for job, ours, theirs in zip(jobs, outputs["fast"], outputs["reference"], strict=True):
        for stream, (our, their) in enumerate(zip(ours.outputs, theirs.outputs, strict=True)):
            if isinstance(job.params, BeamSearchParams):
                assert our.token_ids == their.token_ids, job
            elif job.params.temperature == 0:
                check_same_or_tied(smollm2_folder, job.prompt, our.token_ids, their.token_ids)
            else:
                wanted = SamplingInput(0, job.params, job.prompt, [], seed=job.params.seed or 0, stream=stream)
                check_same_or_tied_draws(smollm2_folder, wanted, our.token_ids, their.token_ids)
            if our.token_ids == their.token_ids:
                assert our.cumulative_logprob == pytest.approx(their.cumulative_logprob, abs=1e-3)


@thorough
def test_every_logit_is_within_rounding_of_that_of_transformers(smollm2_folder: Path) -> None:
    prompt = yardstick.kept()["logits"]["prompt"]
    theirs = yardstick.last_logits(yardstick.load(smollm2_folder), prompt)
    for tier in ("reference", "fast"):
        give_back()  # the weights before
        ours = logits_of(LoadedModel.load(smollm2_folder, tier, dtype="float32"), prompt)
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max(), tier
