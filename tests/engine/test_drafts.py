"""Drafts in the engine, on the content oracle: whatever is drafted, each request gets the tokens that it gets alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from minipaged.engine.commit import Committer
from minipaged.engine.drafting import AdaptiveDrafts
from minipaged.engine.drafts import Drafts, LookupDrafts
from minipaged.engine.memory import Memory
from minipaged.engine.sequence import Request, SequenceState
from minipaged.errors import InvalidRequest, InvariantViolation
from minipaged.events import Event, TokensComputed
from minipaged.params import EngineConfig, SamplingParams, SpeculativeConfig
from minipaged.testing.workloads import expected_tokens
from tests.effort import calls_that_raise, one_case_in, quick_cases, scaled, seeds
from tests.engine.test_failure_injection import WORKLOADS, Fuse, run_through, wired
from tests.engine.test_floors import floored
from tests.workloads import Workload, WorkloadRequest, WorkloadRun, random_workload


class Guesses(Drafts):
    """Drafts that are often right: of the tokens that the request is to get, with faults."""

    def __init__(self, workload: Workload, seed: int) -> None:
        super().__init__(AdaptiveDrafts(4))
        self.counts = Counter[str]()
        self._random = random.Random(f"guesses of {seed}")
        self._workload = workload

    def draft(self, request: Request, sequence: SequenceState, num_sequences: int) -> list[int]:
        r = self._random
        config = self._workload.config
        expected = expected_tokens(self._workload.requests[int(request.request_id[1:])], config)[sequence.index]
        following = expected[len(sequence.output_token_ids) :][: r.randrange(6)]
        return [r.randrange(config.vocab_size) if r.random() < 0.2 else token for token in following] + [
            0
        ] * r.randrange(3)

    def note(self, sequence: SequenceState, num_drafted: int, num_accepted: int) -> None:
        self.counts.update(drafted=num_drafted, accepted=num_accepted, whole=num_drafted == num_accepted > 0)
        super().note(sequence, num_drafted, num_accepted)


def run_with_guesses(seed: int, workload: Workload | None = None) -> tuple[WorkloadRun, Counter[str]]:
    workload = workload or random_workload(seed)
    guesses = Guesses(workload, seed)
    longest = list[int]()

    def listen(event: Event) -> None:
        if isinstance(event, TokensComputed):
            longest.append(event.num_tokens)

    run = WorkloadRun(workload, drafts=guesses, listeners=[listen])
    run.to_the_end()
    assert max(longest, default=0) < workload.config.max_model_len, "the last token of an output is never run"
    run.check_outputs()
    run.check_nothing_leaked()
    return run, guesses.counts


def counted(run: Callable[[int], tuple[WorkloadRun, Counter[str]]], seeds: range) -> Counter[str]:
    """What was drafted in the workloads of these seeds. An error says in which."""
    counts = Counter[str]()
    for seed in seeds:
        try:
            counts += run(seed)[1]
        except Exception as error:
            error.add_note(f"workload {seed}")
            raise
    return counts


@one_case_in(4)
@scaled
@pytest.mark.parametrize("seeds", seeds(600, 30), ids=str)
def test_every_invariant_holds_whatever_is_drafted(seeds: range) -> None:
    """And outputs are those without drafts. The workloads have samples, penalties, stop strings, bad words, preemption
    both ways, chunks, prefix hits, aborts, and beam searches, for which nothing is drafted."""
    counts = counted(run_with_guesses, seeds)
    assert 0 < counts["accepted"] < counts["drafted"]
    assert counts["whole"]


@scaled
@pytest.mark.parametrize("seeds", seeds(400, 40), ids=str)
def test_every_invariant_holds_with_drafts_in_several_lanes(seeds: range) -> None:
    """While one lane's drafts are in flight, another lane is scheduled."""
    counts = Counter[str]()
    for seed in seeds:
        workload = random_workload(seed)
        config = replace(workload.config, pipeline_parallel_size=2 + seed % 2)
        counts += run_with_guesses(seed, replace(workload, config=config))[1]
    assert 0 < counts["accepted"] < counts["drafted"]


@quick_cases(4)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("part", ["fetch", "allocate", "share", "copy_on_write", "forward", "sample"])
def test_every_request_gets_its_tokens_and_no_block_leaks_whichever_call_raises(
    part: str, workload: Workload, request: pytest.FixtureRequest
) -> None:
    """Atomic-failure, exact-references, content, liveness."""
    calls = Fuse(part)
    assert run_through(wired(workload, calls, Guesses(workload, 0))) == 0
    assert calls.calls > 0, "this workload never makes that call"
    for number in calls_that_raise(request, range(1, calls.calls + 1)):
        assert run_through(wired(workload, Fuse(part, number), Guesses(workload, 0))) == 1, f"call {number}"


@scaled
@pytest.mark.parametrize("seeds", seeds(100, 20), ids=str)
def test_every_invariant_holds_with_floors_below_the_prefix_cache(seeds: range) -> None:
    """Only blocks of verified tokens go there, and come back."""
    counts = Counter[str]()
    for seed in seeds:
        workload = floored(seed)
        config = replace(workload.config, async_scheduling=False)
        run, guessed = run_with_guesses(seed, replace(workload, config=config))
        counts += guessed
        counts.update(demoted=run.engine.stats.blocks_demoted, promoted=run.engine.stats.blocks_promoted)
    assert counts["accepted"]
    assert counts["demoted"] > counts["promoted"] > 0


@scaled
@pytest.mark.parametrize("seeds", seeds(100, 20), ids=str)
def test_a_setting_asks_for_prompt_lookup(seeds: range) -> None:
    counts = Counter[str]()
    asked = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)
    for seed in seeds:
        workload = random_workload(seed)
        run = WorkloadRun(replace(workload, config=replace(workload.config, speculative_config=asked)))
        run.to_the_end()
        run.check_outputs()
        run.check_nothing_leaked()
        counts.update(drafted=run.engine.stats.tokens_drafted, accepted=run.engine.stats.tokens_accepted)
    assert counts["drafted"] > counts["accepted"] > 0


def test_what_drafts_do_not_go_with_is_refused() -> None:
    config = replace(repetitive().config, async_scheduling=True)
    with pytest.raises(InvalidRequest, match="drafts work without asynchronous scheduling and windows only"):
        WorkloadRun(Workload(config, (), True), drafts=LookupDrafts(AdaptiveDrafts(4), 1, 3))


def repetitive(num_requests: int = 1, **params: object) -> Workload:
    """Greedy requests with a prompt that repeats itself, and a model whose output does so too."""
    wanted = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, seed=0, **params)  # type: ignore[arg-type]
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=80, vocab_size=2, debug=True)
    requests = (WorkloadRequest(0, (0, 1, 0, 1, 1, 0, number % 2), wanted) for number in range(num_requests))
    return Workload(config, tuple(requests), True)


@pytest.mark.parametrize("num_requests", [1, 3])
def test_prompt_lookup_takes_fewer_steps_for_the_same_tokens(num_requests: int) -> None:
    workload = repetitive(num_requests)
    plain = WorkloadRun(workload)
    drafting = WorkloadRun(workload, drafts=LookupDrafts(AdaptiveDrafts(4), 1, 3))
    for run in (plain, drafting):
        run.to_the_end()
        run.check_outputs()
        run.check_nothing_leaked()
    assert drafting.engine.stats.steps < plain.engine.stats.steps
    assert drafting.engine.stats.generated_tokens == plain.engine.stats.generated_tokens
    assert drafting.engine.stats.query_tokens > plain.engine.stats.query_tokens


# --- Faults that the oracle must find ---------------------------------------------------------------------


def assert_a_workload_fails() -> None:
    def run_some() -> None:
        for seed in range(40):
            run_with_guesses(seed)

    with pytest.raises((AssertionError, InvariantViolation, ValueError, IndexError)):
        run_some()


def test_slots_that_are_not_given_back_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "trim", lambda self, sequence, num_tokens: ())
    assert_a_workload_fails()


def test_one_slot_too_many_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Memory.trim

    def trim(self: Memory, sequence: SequenceState, num_tokens: int) -> tuple[int, ...]:
        return right(self, sequence, min(num_tokens + 1, sequence.table.num_tokens))

    monkeypatch.setattr(Memory, "trim", trim)
    assert_a_workload_fails()


def test_blocks_of_unverified_tokens_in_the_prefix_cache_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of all drafted tokens are published, as if all stood."""
    right = Committer._commit_drafted

    def commit(self: Committer, request: Request, scheduled: object, choices: object, by_runner: object) -> None:
        for sequence, _ in scheduled.work:  # type: ignore[attr-defined]
            drafted = scheduled.drafted(sequence)  # type: ignore[attr-defined]
            if self._blocks.prefix_cache:
                tokens = sequence.tokens
                sequence.tokens = [*tokens, *reversed(drafted)]  # wrong ones
                self._blocks.publish(sequence, len(sequence.tokens))
                sequence.tokens = tokens
        right(self, request, scheduled, choices, by_runner)  # type: ignore[arg-type]

    monkeypatch.setattr(Committer, "_commit_drafted", commit)
    assert_a_workload_fails()
