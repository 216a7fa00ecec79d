"""Drafts on real models, in both tiers: the tokens are those without drafts, whatever is drafted."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from minipaged import LLM, InvalidRequest, RequestOutput, SamplingParams
from minipaged.engine.drafting import AdaptiveDrafts
from minipaged.engine.drafts import Drafts
from minipaged.engine.engine import Engine
from minipaged.engine.sequence import Request, SequenceState
from tests.end_to_end.small_llama import make_small_llama
from tests.end_to_end.test_scheduling_invariance import (
    DTYPE,
    JOBS,
    check_nothing_is_held,
    check_same,
    every_kind,
    outputs_alone,
    run,
)


class Guesses(Drafts):
    """Drafts of what another run gave, with faults."""

    def __init__(self, outputs: list[RequestOutput]) -> None:
        super().__init__(AdaptiveDrafts(4))
        self.num_drafted = self.num_accepted = 0
        self._outputs = outputs
        self._random = random.Random(0)

    def draft(self, request: Request, sequence: SequenceState, num_sequences: int) -> list[int]:
        r = self._random
        expected = self._outputs[int(request.request_id.removeprefix("job "))].outputs[sequence.index].token_ids
        following = expected[len(sequence.output_token_ids) :][: r.randrange(6)]
        return [r.randrange(128) if r.random() < 0.15 else token for token in following]

    def note(self, sequence: SequenceState, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted


def drafting(llm: LLM, drafts: Drafts) -> LLM:
    """The LLM, with drafts; it has run nothing yet."""
    llm.engine = Engine(llm.config, llm.loaded.tier, llm.engine.runner, drafts=drafts)
    return llm


@every_kind
def test_drafts_do_not_show_in_the_tokens(small_llama: Path, tier: str, kind: str) -> None:
    jobs, dtype = JOBS[kind], DTYPE[kind]
    alone = outputs_alone(small_llama, jobs, dtype)
    guesses = Guesses(alone)
    llm = LLM(small_llama, tier=tier, dtype=dtype, num_blocks=100, block_size=4, debug=True)
    outputs = run(drafting(llm, guesses), jobs, arrivals=[0, 0, 3, 5])
    check_same(small_llama, jobs, outputs, alone)
    check_nothing_is_held(llm)
    if kind == "beams":
        assert guesses.num_drafted == 0
    else:
        assert 0.5 < guesses.num_accepted / guesses.num_drafted < 0.95


ASKED = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    ("tier", "sizes"),
    [
        *[(tier, {}) for tier in ("reference", "fast")],
        *[("reference", {f"{which}_parallel_size": 2}) for which in ("tensor", "pipeline")],
        *[
            pytest.param("fast", {f"{which}_parallel_size": 2}, marks=pytest.mark.thorough)  # in processes
            for which in ("tensor", "pipeline")
        ],
    ],
    ids=str,
)
def test_a_repetitive_answer_takes_fewer_steps(small_llama: Path, tier: str, sizes: dict[str, Any]) -> None:
    """A bias makes the answer one token again and again, which prompt lookup finds."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logit_bias={77: 100.0})
    steps = list[int]()
    for asked in (None, ASKED):
        with closing(LLM(small_llama, tier=tier, num_blocks=32, speculative_config=asked, debug=True, **sizes)) as llm:
            [output] = llm.generate([[5, 6, 7]], params)
            stats = llm.stats()
        assert output.outputs[0].token_ids == (77,) * 30
        assert (stats.tokens_accepted > 15) == bool(asked)
        steps.append(stats.steps)
    assert steps[0] == 30
    assert steps[1] < 15


def test_drafts_for_a_model_with_windows_are_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    folder = make_small_llama(tmp_path, model_type="mistral", sliding_window=11)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(InvalidRequest, match=r"^speculative_config is given, but some .* max_model_len of at most 11$"):
        LLM(folder, speculative_config=ASKED)
