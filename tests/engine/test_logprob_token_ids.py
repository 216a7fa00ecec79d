"""The log-probabilities of tokens that a request names: the model's own at each position, come what may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minipaged.contracts import Tier
from minipaged.engine.engine import Engine
from minipaged.errors import InvalidRequest
from minipaged.events import Event, PrefixReused, RequestPreempted
from minipaged.params import EngineConfig, SamplingParams
from minipaged.testing.content_runner import ContentRunner
from minipaged.testing.fake_model import FakeModel
from minipaged.testing.numpy_model import fake_logits
from minipaged.testing.plain_model import PlainModel
from tests.workloads import FAST, REFERENCE, Workload, WorkloadRequest, WorkloadRun

CONFIG = EngineConfig(
    num_blocks=15,
    num_swap_blocks=16,
    block_size=4,
    max_model_len=40,
    vocab_size=11,
    max_num_batched_tokens=8,  # so prompts run in chunks
    debug=True,
)
PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)
ASKED = (7, 0, 10, 7)
PARAMS = SamplingParams(
    n=3, seed=1, max_tokens=12, ignore_eos=True, repetition_penalty=1.2, bad_words=["BC"], logprob_token_ids=ASKED
)
GREEDY = SamplingParams(temperature=0, seed=3, max_tokens=12, ignore_eos=True, logprob_token_ids=ASKED)
PLAIN = replace(PARAMS, logprob_token_ids=(), seed=2)


def expected(tokens: Sequence[int], chosen: int) -> dict[int, float]:
    """By the logits after `tokens`, in float64, likeliest first."""
    wide = fake_logits(tokens, CONFIG.vocab_size).astype(np.float64)
    logprobs = wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()
    return {token: logprobs[token] for token in sorted({*ASKED, chosen}, key=lambda token: -wide[token])}


@pytest.mark.parametrize("tier", [REFERENCE, FAST], ids=lambda tier: tier.name)
@pytest.mark.parametrize(
    "settings",
    [
        {"preemption": "swap"},
        {"preemption": "recompute", "async_scheduling": True},
        {"preemption": "recompute", "pipeline_parallel_size": 2},
    ],
    ids=str,
)
def test_each_position_has_those_of_the_tokens_asked_for_and_the_chosen_one(
    tier: Tier, settings: dict[str, Any]
) -> None:
    """Among samples, chunks, prefix hits and preemptions; the updates of a stream bring them too."""
    events: list[Event] = []
    requests = (
        WorkloadRequest(0, PROMPT, PARAMS),
        WorkloadRequest(3, PROMPT, PLAIN),
        WorkloadRequest(4, PROMPT, GREEDY),
    )
    workload = Workload(replace(CONFIG, **settings), requests, swap_is_cheap=True)
    run = WorkloadRun(workload, tier, listeners=[events.append])
    run.to_the_end()
    run.check_outputs()
    assert {RequestPreempted, PrefixReused} <= {type(event) for event in events}
    for output in (*run.outputs["r0"].outputs, *run.outputs["r2"].outputs):
        assert output.logprobs is not None
        assert len(output.logprobs) == 12
        for place, (token, reported) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            wanted = expected([*PROMPT, *output.token_ids[:place]], token)
            assert list(reported) == list(wanted)
            assert reported == pytest.approx(wanted, abs=2e-6)
    assert all(output.logprobs is None for output in run.outputs["r1"].outputs)


def test_a_model_without_numpy_reports_them_as_well() -> None:
    model: FakeModel = PlainModel()
    run = WorkloadRun(Workload(CONFIG, (WorkloadRequest(0, PROMPT, PARAMS),), swap_is_cheap=True), model=model)
    run.to_the_end()
    [first, *_] = run.outputs["r0"].outputs[0].logprobs or ()
    assert first.keys() == {*ASKED, run.outputs["r0"].outputs[0].token_ids[0]}


@pytest.mark.parametrize("token", [-1, 11])
def test_a_token_that_the_model_does_not_have_is_refused(token: int) -> None:
    engine = Engine(CONFIG, REFERENCE, ContentRunner(16, 16, 4, 11))
    with pytest.raises(InvalidRequest, match=f"^logprob_token_ids has {token}, which is none of this model's tokens"):
        engine.add_request(PROMPT, SamplingParams(logprob_token_ids=[3, token]))
    assert not engine.has_unfinished_requests()
