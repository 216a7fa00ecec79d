"""The log-probabilities of a prompt: the same however it is computed, and told once, whatever happens meanwhile.

The random workloads ask for them too, and compare each with those of the prompt's beginnings
(`WorkloadRun.check_outputs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from minipaged.contracts import PromptInput, Sampled
from minipaged.engine.engine import Engine
from minipaged.events import Event, RequestPreempted
from minipaged.outputs import RequestOutput
from minipaged.params import BeamSearchParams, EngineConfig, SamplingParams
from minipaged.testing.content_runner import ContentRunner
from tests.workloads import REFERENCE, Workload, WorkloadRequest, WorkloadRun, ended

CONFIG = EngineConfig(
    num_blocks=12,
    num_swap_blocks=12,
    block_size=4,
    max_model_len=40,
    vocab_size=11,
    max_num_batched_tokens=16,
    preemption="recompute",
    debug=True,
)
PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2)
PARAMS = SamplingParams(prompt_logprobs=2, max_tokens=4, seed=1, ignore_eos=True)


def run_of(
    *requests: SamplingParams | BeamSearchParams, config: EngineConfig = CONFIG, make_runner: Any = ContentRunner
) -> WorkloadRun:
    """Requests with one prompt, each a step after the one before; run to the end and checked."""
    workload = Workload(config, tuple(WorkloadRequest(i, PROMPT, one) for i, one in enumerate(requests)), True)
    run = WorkloadRun(workload, make_runner=make_runner)
    run.to_the_end()
    return run


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("caches", [False, True])
def test_they_are_the_same_whatever_the_chunks_and_the_blocks(caches: bool, is_async: bool) -> None:
    found = []
    for chunk, block_size in product((1, 2, 3, 5, 64), (1, 4, 16)):
        config = replace(
            CONFIG,
            num_blocks=80 // block_size,
            block_size=block_size,
            max_num_batched_tokens=chunk,
            enable_prefix_caching=caches,
            async_scheduling=is_async,
        )
        run = run_of(PARAMS, replace(PARAMS, seed=2), config=config)
        run.check_outputs()
        found += [run.outputs[name].prompt_logprobs for name in ("r0", "r1")]
    assert len(set(map(str, found))) == 1
    [first, *others] = found[0] or ()
    assert first is None
    assert [token in (one or {}) for token, one in zip(PROMPT[1:], others, strict=True)] == [True] * 12
    assert {len(one or {}) for one in others} <= {2, 3}


def test_a_request_that_asks_takes_nothing_from_the_prefix_cache_but_leaves_its_blocks_there() -> None:
    plain = replace(PARAMS, prompt_logprobs=None)
    run = run_of(plain, PARAMS, plain)
    run.check_outputs()
    assert [run.outputs[f"r{i}"].num_cached_tokens for i in range(3)] == [0, 0, 12]
    alone = run_of(PARAMS, plain)
    assert [alone.outputs[f"r{i}"].num_cached_tokens for i in range(2)] == [0, 12]


def test_as_many_blocks_are_asked_for_as_the_whole_prompt_takes() -> None:
    """Not as many fewer as the cache could give: they would be missing when it is admitted."""
    config = replace(CONFIG, num_blocks=7)
    long = replace(PARAMS, prompt_logprobs=None, max_tokens=12)  # still holds the blocks that are cached
    run = run_of(long, PARAMS, config=config)
    run.check_outputs()
    assert run.outputs["r1"].metrics.num_preemptions == 0


def test_the_samples_of_a_prompt_share_them_and_beams_have_none() -> None:
    run = run_of(replace(PARAMS, n=3), replace(PARAMS, prompt_logprobs=None), BeamSearchParams(beam_width=2))
    run.check_outputs()
    assert [len(run.outputs[f"r{i}"].prompt_logprobs or ()) for i in range(3)] == [13, 0, 0]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_they_survive_a_preemption_in_the_middle_of_the_prompt(mode: Any) -> None:
    """And are not told twice where the prompt, or a part of it, is computed again."""
    preempted: list[int] = []

    def listen(event: Event) -> None:
        if isinstance(event, RequestPreempted) and event.request == "r1":
            preempted.append(event.num_tokens)

    crowd = replace(PARAMS, n=3, prompt_logprobs=None, max_tokens=16)
    for num_blocks, arrives in product((13, 14, 15), range(0, 12, 2)):
        config = replace(CONFIG, num_blocks=num_blocks, max_num_batched_tokens=5, preemption=mode)
        requests = (WorkloadRequest(0, PROMPT[:4], crowd), WorkloadRequest(arrives, PROMPT, replace(PARAMS, n=2)))
        run = WorkloadRun(Workload(config, requests, swap_is_cheap=True), listeners=[listen])
        run.to_the_end()
        run.check_outputs()
    assert any(0 < num_tokens < len(PROMPT) for num_tokens in preempted), preempted
    assert any(num_tokens > len(PROMPT) for num_tokens in preempted), preempted


def test_of_an_aborted_request_there_is_what_was_computed() -> None:
    config = replace(CONFIG, max_num_batched_tokens=5)
    whole = run_of(PARAMS, config=config).outputs["r0"].prompt_logprobs or ()
    for num_steps, known in ((0, 1), (1, 6), (2, 11), (3, 13)):
        engine = Engine(config, REFERENCE, ContentRunner(12, 12, 4, 11))
        engine.add_request(PROMPT, PARAMS, request_id="a")
        for _ in range(num_steps):
            engine.step()
        engine.abort("a")
        [output] = ended(engine.step())
        assert output.prompt_logprobs == whole[:known]
        assert not output.finished


class Silent(ContentRunner):
    """Has none to tell."""

    def prompt_logprobs(self, inputs: Sequence[PromptInput]) -> Mapping[int, Sequence[Sampled]]:
        return {}


class WithNaN(ContentRunner):
    """Computes no number after the third token of a prompt."""

    def compute(self, *given: Any) -> np.ndarray:
        logits = super().compute(*given)
        for rows in self.prompt_logits.values():
            rows[2][5] = np.nan
        return logits


@pytest.mark.parametrize(
    ("make_runner", "message"),
    [
        (Silent, "this runner cannot report log-probabilities of prompts; leave out prompt_logprobs"),
        (WithNaN, "the model's logits for the next token hold NaN (first at token 5)"),
    ],
)
def test_where_they_cannot_be_told_that_request_fails_and_no_other(make_runner: Any, message: str) -> None:
    """And K/V that may have led to it are offered to nobody."""
    plain = replace(PARAMS, prompt_logprobs=None)
    run = run_of(PARAMS, plain, make_runner=make_runner)
    failed: RequestOutput = run.outputs["r0"]
    assert (failed.error or "").startswith(message)
    assert failed.outputs[0].finish_reason == "error"
    assert run.outputs["r1"].finished
    assert run.outputs["r1"].num_cached_tokens == 0
    run.check_outputs(failed={"r0"})
    run.check_nothing_leaked()


def test_a_step_that_fails_loses_none_and_tells_none_twice() -> None:
    class Failing(ContentRunner):
        fuse = 3

        def forward(self, batch: Any) -> Any:
            self.fuse -= 1
            if self.fuse == 0:
                raise OSError("once")
            return super().forward(batch)

    config = replace(CONFIG, max_num_batched_tokens=5)
    workload = Workload(config, (WorkloadRequest(0, PROMPT, PARAMS),), swap_is_cheap=True)
    run = WorkloadRun(workload, make_runner=Failing)
    with pytest.raises(OSError, match="once"):
        run.to_the_end()
    for now in range(1, 20):
        run.advance(now)
    run.check_outputs()
