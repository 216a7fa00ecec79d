"""A draft model in the engine, on the content oracle: its K/V are where the model's are, in every lifecycle of a block.

The draft model's memory remembers its writers, as the model's does, and each of its passes checks all that it reads. It
guesses the right token often, so that drafts stand and fall.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest

from minipaged.contracts import Batch, Draft, Logits, Sampled, SamplingInput
from minipaged.engine.drafting import AdaptiveDrafts
from minipaged.engine.drafts import ModelDrafts
from minipaged.engine.engine import Engine
from minipaged.engine.sequence import Request, SequenceState
from minipaged.errors import InvariantViolation
from minipaged.mirror import Mirror, PerLane
from minipaged.reference.speculation import verify
from minipaged.steps import TO_DRAFT, BlockMoves
from minipaged.testing.content_runner import CheckedMirror, ContentRunner, GivenRow
from minipaged.tiers.drafted import DraftedRunner
from tests.effort import one_case_in, quick_cases, scaled, seeds
from tests.engine.test_drafts import counted
from tests.engine.test_floors import floored
from tests.workloads import Workload, WorkloadRun, random_workload


class RandomNumber(ModelDrafts):
    """Drafts of a random number of tokens."""

    def __init__(self, seed: int) -> None:
        super().__init__(AdaptiveDrafts(4))
        self._random = random.Random(f"drafts of {seed}")
        self.counts = Counter[str]()

    def draft(self, request: Request, sequence: SequenceState, num_sequences: int) -> list[int]:
        return [TO_DRAFT] * self._random.randrange(6)

    def note(self, sequence: SequenceState, num_drafted: int, num_accepted: int) -> None:
        self.counts.update(drafted=num_drafted, accepted=num_accepted, whole=num_drafted == num_accepted > 0)


class DraftMemory(ContentRunner):
    """The draft model: its choices are the model's, with faults."""

    now: Sequence[tuple[int, list[int]]] = ()
    """For each row of the pass, the sequence and its tokens before the row's."""
    fails_at = -1
    """The call of `forward` that raises."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.calls = 0
        self._random = random.Random(0)

    def forward(self, batch: Batch) -> Any:
        self.calls += 1
        if self.calls - 1 == self.fails_at:
            raise MemoryError("planted")
        self._note_salts()
        rows = []
        for (sequence, before), row in zip(self.now, batch, strict=True):
            assert len(before) == row.first_position
            slots = self.slots(row.blocks, row.first_position, row.context_len)
            rows.append(
                GivenRow(sequence, before, list(row.token_ids), slots, list(row.blocks), row.wants_logits, 0, 0)
            )
        return self.compute(rows)

    def sample(self, logits: Logits, inputs: Sequence[SamplingInput]) -> Sequence[Sampled]:
        chosen, r = super().sample(logits, inputs), self._random
        return [replace(one, token_id=r.randrange(self.vocab_size)) if r.random() < 0.3 else one for one in chosen]


class TwoModels(DraftedRunner):
    """The content oracle for both models. Tokens are compared, so that outputs are those without drafts."""

    model: ContentRunner
    draft_model: DraftMemory

    def __init__(self, *sizes: Any) -> None:
        super().__init__(ContentRunner(*sizes), DraftMemory(*sizes), compare)
        self.mirrors = PerLane[Mirror](lambda: CheckedMirror(self.model))

    @property
    def engine(self) -> Engine | None:
        return self.model.engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self.model.engine = self.draft_model.engine = engine

    def _guess(self) -> Any:
        self.model.mirror = self.mirror
        return super()._guess()

    def _draw(self, batch: Batch, guesses: Any, places: Any) -> None:
        known = {number: one.token_ids(0, one.num_tokens) for number, one in self.mirror.sequences.items()}
        if any(one.token_ids for one in guesses):
            rows = [(one.row.sequence, [*known[one.row.sequence], *one.token_ids[:-1]]) for one in guesses]
        else:
            rows = [(row.sequence, known[row.sequence][: row.start]) for row in self.mirror.rows]
        self.draft_model.now = rows
        super()._draw(batch, guesses, places)


def compare(logits: Logits, drafts: Sequence[Draft], drawn_from: object) -> list[list[Sampled]]:
    return verify(logits, drafts)


def run_with_draft_model(
    seed: int, workload: Workload | None = None, make_runner: Any = TwoModels
) -> tuple[WorkloadRun, Counter[str]]:
    drafts = RandomNumber(seed)
    run = WorkloadRun(workload or random_workload(seed), make_runner=make_runner, drafts=drafts)
    run.to_the_end()
    run.check_outputs()
    run.check_nothing_leaked()
    return run, drafts.counts


@one_case_in(4)
@scaled
@pytest.mark.parametrize("seeds", seeds(600, 30), ids=str)
def test_the_draft_models_keys_and_values_are_where_the_models_are(seeds: range) -> None:
    """And outputs are those without drafts. The workloads have forks, beams, copy-on-write, preemption both ways,
    chunks, prefix hits and aborts."""
    counts = counted(run_with_draft_model, seeds)
    assert 0 < counts["accepted"] < counts["drafted"]
    assert counts["whole"]


@scaled
@pytest.mark.parametrize("seeds", seeds(100, 20), ids=str)
def test_they_go_to_the_floors_below_the_prefix_cache_and_come_back(seeds: range) -> None:
    counts = Counter[str]()
    for seed in seeds:
        workload = floored(seed)
        config = replace(workload.config, async_scheduling=False)
        run, guessed = run_with_draft_model(seed, replace(workload, config=config))
        counts += guessed
        counts.update(demoted=run.engine.stats.blocks_demoted, promoted=run.engine.stats.blocks_promoted)
    assert counts["accepted"]
    assert counts["demoted"] > counts["promoted"] > 0


def failing_at(number: int, *sizes: Any) -> Any:
    """A runner whose draft model raises in the pass of this number."""
    runner = TwoModels(*sizes)
    runner.draft_model.fails_at = number
    return runner


@quick_cases(4)
@pytest.mark.parametrize("seed", range(12))
def test_a_pass_of_the_draft_model_that_raises_fails_its_step_and_nothing_else(seed: int) -> None:
    """The step is run anew; every request gets its tokens, and no block leaks."""
    for number in range(0, 30, 3):
        run = WorkloadRun(random_workload(seed), make_runner=partial(failing_at, number), drafts=RandomNumber(seed))
        num_raised = 0
        for now in count():
            try:
                if not run.advance(now):
                    break
            except MemoryError:
                num_raised += 1
        assert num_raised == (run.runner.draft_model.calls > number)
        run.check_outputs()
        run.check_nothing_leaked()


# --- Faults that the oracle must find ---------------------------------------------------------------------


def assert_a_workload_fails(make_runner: type[TwoModels]) -> None:
    def run_some() -> None:
        for seed in range(40):
            run_with_draft_model(seed, make_runner=make_runner)

    with pytest.raises(InvariantViolation):
        run_some()


@pytest.mark.parametrize("lost", ["swap_out", "swap_in", "copy"])
def test_a_move_that_leaves_out_the_draft_model_is_found(lost: str) -> None:
    class Forgets(TwoModels):
        def move(self, moves: BlockMoves) -> None:
            self.model.move(moves)
            self.draft_model.move(moves._replace(**{lost: ()}))

    assert_a_workload_fails(Forgets)


def test_a_step_in_which_the_draft_model_does_not_run_is_found() -> None:
    """The draft model runs only where something is drafted, so what the others computed is missing later."""

    class Skips(TwoModels):
        def _draw(self, batch: Batch, guesses: Any, places: Any) -> None:
            if any(one.row.drafted for one in guesses):
                super()._draw(batch, guesses, places)
            else:
                for one, of in zip(guesses, places, strict=True):
                    one.token_ids.append(0)
                    one.logits.append(of)

    assert_a_workload_fails(Skips)


def test_a_last_drafted_token_that_is_not_run_is_found() -> None:
    """If all drafts stand, the last one's K/V are missing."""

    class Short(TwoModels):
        def _draw(self, batch: Batch, guesses: Any, places: Any) -> None:
            is_last = {id(one) for one in guesses if len(one.token_ids) == len(one.row.drafted) > 0}
            if is_last and len(is_last) == len(guesses):
                for one in guesses:
                    one.token_ids.append(0)
                    one.logits.append(None)
            else:
                super()._draw(batch, guesses, places)

    assert_a_workload_fails(Short)
