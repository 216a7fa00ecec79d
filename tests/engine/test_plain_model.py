"""The content oracle on the model that needs no NumPy: the grader's engine, on a command line and in a page."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from minipaged.contracts import SamplingInput
from minipaged.params import BeamSearchParams, EngineConfig, SamplingParams
from minipaged.testing.content_runner import ContentRunner
from minipaged.testing.plain_model import PlainModel, logits, sample
from tests.effort import one_case_in, scaled, seeds
from tests.workloads import Workload, WorkloadRequest, WorkloadRun, random_workload


@one_case_in(4)
@scaled
@pytest.mark.parametrize("seeds", seeds(1000, 100), ids=str)
def test_every_invariant_holds_in_random_workloads(seeds: range) -> None:
    """As on the reference's ways to choose (test_content_oracle.py)."""
    for seed in seeds:
        run = WorkloadRun(random_workload(seed), model=PlainModel())
        run.to_the_end()
        run.check_outputs()
        run.check_nothing_leaked()


def test_logits_are_the_same_everywhere() -> None:
    """In a page, with 32 bits, as here: a digit of each would be another one if they went by Python's hash."""
    assert [round(number, 3) for number in logits([3, 1, 4], 4)] == [-2.546, 3.875, -0.306, 1.938]


def test_a_token_that_a_grammar_does_not_allow_is_never_chosen() -> None:
    """Tokens past the last bit are not allowed either."""
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature)
        rows = [[float(token)] * token + [9.0] * (70 - token) for token in range(10)]
        inputs = [SamplingInput(row, params, [1], [], seed=row, stream=0, allowed=[0b1010, 1]) for row in range(10)]
        assert {chosen.token_id for chosen in sample(rows, inputs)} <= {1, 3, 32}


def test_whoever_reads_another_token_chooses_other_tokens() -> None:
    """Sampled or by beam search. Without that a wrong read could pass the comparison of what was generated."""

    class ShortSighted(ContentRunner):
        def _read(self, sequence: int, blocks: Sequence[int], tokens: list[int], start: int) -> list[int]:
            return [1 - tokens[0], *tokens[1:]]

    for kind in (
        SamplingParams(max_tokens=12, temperature=0.0, seed=5),
        SamplingParams(max_tokens=12, seed=5),
        BeamSearchParams(beam_width=3, max_tokens=12),
    ):
        config = EngineConfig(num_blocks=20, block_size=4, max_model_len=64, vocab_size=11)
        workload = Workload(config, (WorkloadRequest(0, (1, 7), kind),), True)
        for runner in (ContentRunner, ShortSighted):
            run = WorkloadRun(workload, make_runner=runner, model=PlainModel())
            run.to_the_end()
            with nullcontext() if runner is ContentRunner else pytest.raises(AssertionError, match="r0"):
                run.check_outputs()
