"""Asynchronous scheduling: the next step is launched while this one runs, and nothing else is different."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from minipaged.contracts import Logits, Sampled, SamplingInput, Tier
from minipaged.engine.engine import Engine
from minipaged.events import (
    Event,
    RequestPreempted,
    SequenceFinished,
    StepFailed,
    StepFinished,
    StepStarted,
    TokenGenerated,
    TokensComputed,
)
from minipaged.params import BeamSearchParams, EngineConfig, SamplingParams
from tests.effort import calls_that_raise, one_case_in, quick_cases, scaled, seeds, thorough
from tests.engine.test_failure_injection import Fault, Fuse, crowded, run_through, wired
from tests.late_device import LATE, LateRunner
from tests.workloads import FAST, REFERENCE, Workload, WorkloadRequest, WorkloadRun, ended, letters, random_workload

CONFIG = EngineConfig(
    num_blocks=40, block_size=4, max_model_len=64, vocab_size=20, eos_token_ids=(2,), debug=True, async_scheduling=True
)


def with_steps_in_flight(workload: Workload, *, everything_runs_ahead: bool = False) -> Workload:
    """The same workload, asynchronously. `everything_runs_ahead`: without what makes the next step wait."""

    def simpler(request: WorkloadRequest) -> WorkloadRequest:
        params = request.params
        if isinstance(params, BeamSearchParams):
            params = SamplingParams(seed=params.beam_width, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos)
        return replace(request, params=replace(params, n=1, presence_penalty=0, repetition_penalty=1))

    requests = tuple(map(simpler, workload.requests)) if everything_runs_ahead else workload.requests
    return replace(workload, config=replace(workload.config, async_scheduling=True), requests=requests)


def workload_of(seed: int) -> Workload:
    """Every other one without what makes the next step wait: or most steps would."""
    return with_steps_in_flight(random_workload(seed), everything_runs_ahead=seed % 2 == 0)


class Overlap:
    """A listener that counts what happens while two steps are under way."""

    def __init__(self) -> None:
        self.happened: Counter[str] = Counter()
        self.under_way: list[int] = []
        self._ran_ahead: set[int] = set()

    def __call__(self, event: Event) -> None:
        match event:
            case StepStarted():
                self.under_way.append(event.step)
                self._ran_ahead.clear()
                self.happened["launched ahead" if len(self.under_way) > 1 else "launched alone"] += 1
            case StepFinished():
                assert event.step == self.under_way.pop(0), "steps are committed in order"
            case StepFailed():
                self.under_way.clear()
            case RequestPreempted():
                assert len(self.under_way) == 1, "what is in flight is never preempted"
                self.happened["preempted"] += 1
            case TokensComputed() if len(self.under_way) > 1:
                self._ran_ahead.add(event.sequence)
            case SequenceFinished() if len(self.under_way) > 1:
                self.happened[f"ended by {event.reason} under way"] += 1
                self.happened["a row was thrown away"] += event.sequence in self._ran_ahead
            case _ if len(self.under_way) > 1:
                self.happened[f"{event.name} under way"] += 1


def check(run: WorkloadRun) -> None:
    run.to_the_end()
    run.check_outputs()
    run.check_nothing_leaked()


# --- Random workloads -----------------------------------------------------------------------------

WORKLOADS = 600

EVERYTHING_THAT_CAN_HAPPEN = {
    "launched ahead",
    "launched alone",
    "preempted",
    "ended by stop under way",
    "ended by length under way",
    "request_admitted under way",
    "swapped_in under way",
    "block_cached under way",
    "block_deduplicated under way",
    "block_evicted under way",
    "prefix_reused under way",
    "cancelled while in flight",
    "a row was thrown away",
}


@one_case_in(3)
@scaled
@pytest.mark.parametrize("tier", [REFERENCE, FAST], ids=["reference", "fast"])
@pytest.mark.parametrize("seeds", seeds(WORKLOADS, 100), ids=str)
def test_every_invariant_holds_in_random_workloads(seeds: range, tier: Tier) -> None:
    """Content, exclusive-write, exact-references, conservation, liveness, scheduling-invariance."""
    for seed in seeds:
        try:
            check(WorkloadRun(workload_of(seed), tier, listeners=[Overlap()]))
        except Exception as error:
            error.add_note(f"in workload {seed}")
            raise


@one_case_in(3)
@scaled
@pytest.mark.parametrize("seeds", seeds(WORKLOADS, 100), ids=str)
def test_every_invariant_holds_on_a_device_that_is_as_late_as_it_may_be(seeds: range) -> None:
    """The same, and: what the prefix cache offers has been computed, not only launched."""
    for seed in seeds:
        try:
            run = WorkloadRun(workload_of(seed), LATE, make_runner=LateRunner)
            now = 0
            while run.advance(now):
                check_cached_blocks_are_computed(run)
                now += 1
                assert now < 5000, "liveness"
            run.check_outputs()
            run.check_nothing_leaked()
            assert isinstance(run.runner, LateRunner)
            run.runner.late.finish()  # what nobody waited for was right too
        except Exception as error:
            error.add_note(f"in workload {seed}")
            raise


def check_cached_blocks_are_computed(run: WorkloadRun) -> None:
    cache = run.engine.blocks.prefix_cache
    for entry in cache._entries.values() if cache else ():
        prefix = run.runner.device[entry.parent_block][-1] if entry.parent_block >= 0 else 0
        for token, found in zip(entry.tokens, run.runner.device[entry.block], strict=True):
            assert prefix is not None
            prefix = run.runner.prefixes.extend(prefix, token)
            assert found == prefix, "a block is findable that is not computed yet"


@thorough
def test_the_workloads_bring_about_everything_that_can_happen() -> None:
    """Each in several of them; and a good part of the steps is launched ahead."""
    workloads_with: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for seed in range(WORKLOADS):
        overlap = Overlap()
        run = WorkloadRun(workload_of(seed), listeners=[overlap])
        run.to_the_end()
        steps.update(overlap.happened)
        happened = {*+overlap.happened, *run.happened} & EVERYTHING_THAT_CAN_HAPPEN
        workloads_with.update(happened)
        if workloads_with.keys() == EVERYTHING_THAT_CAN_HAPPEN and min(workloads_with.values()) >= 2:
            break  # after 301 of them, when this was written
    assert workloads_with.keys() == EVERYTHING_THAT_CAN_HAPPEN
    assert min(workloads_with.values()) >= 2, workloads_with
    assert steps["launched ahead"] > steps["launched alone"] / 2, steps


@one_case_in(2)
@scaled
@pytest.mark.parametrize("seeds", seeds(300, 100), ids=str)
def test_the_same_requests_make_the_same_tokens_in_the_same_order_as_without(seeds: range) -> None:
    """Of each sequence; steps overlap, so that one request may be a step behind where it was."""
    for seed in seeds:
        told: list[dict[int, list[int]]] = []
        for workload in (workload_of(seed), replace(workload_of(seed), config=random_workload(seed).config)):
            tokens: dict[int, list[int]] = {}
            run = WorkloadRun(replace(workload, requests=tuple(replace(r, cancelled=None) for r in workload.requests)))

            def on_event(event: Event, tokens: dict[int, list[int]] = tokens) -> None:
                if isinstance(event, TokenGenerated):
                    tokens.setdefault(event.sequence, []).append(event.token_id)

            run.engine.listeners.append(on_event)
            run.to_the_end()
            told.append(tokens)
        assert sorted(told[0].values()) == sorted(told[1].values()), seed


# --- The order of things --------------------------------------------------------------------------


class Late:
    """An engine on a late device."""

    def __init__(self, config: EngineConfig = CONFIG) -> None:
        self.runner = LateRunner(config.num_blocks, config.num_swap_blocks, config.block_size, config.vocab_size)
        self.overlap = Overlap()
        self.events: list[Event] = []
        self.engine = Engine(config, LATE, self.runner, decode=letters, listeners=[self.overlap, self.events.append])
        self.runner.engine = self.engine

    @property
    def log(self) -> list[tuple[str, int]]:
        return self.runner.late.log

    def serve(self, *requests: SamplingParams | BeamSearchParams) -> list[list[int]]:
        for number, params in enumerate(requests):
            self.engine.add_request([3, 1, 4, number], params, request_id=str(number))
        outputs = []
        while self.engine.has_unfinished_requests():
            outputs += ended(self.engine.step())
        self.check_nothing_left()
        return [list(o.outputs[0].token_ids) for o in sorted(outputs, key=lambda output: output.request_id)]

    def check_nothing_left(self) -> None:
        assert self.engine.blocks.num_available == self.engine.blocks.allocator.num_blocks
        assert not self.overlap.under_way
        assert not self.engine.has_unfinished_requests()


def goes_on(**params: Any) -> SamplingParams:
    return SamplingParams(seed=1, ignore_eos=True, **params)


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_looked_at() -> None:
    late = Late()
    late.serve(goes_on(max_tokens=5))
    expected = [("launch", 1)]
    for step in range(1, 5):
        expected += [("launch", step + 1), ("fetch", step)]
    assert late.log == [*expected, ("fetch", 5)]


def test_without_it_every_step_is_committed_before_the_next_is_launched() -> None:
    late = Late(replace(CONFIG, async_scheduling=False))
    late.serve(goes_on(max_tokens=3))
    assert late.log == [("launch", 1), ("fetch", 1), ("launch", 2), ("fetch", 2), ("launch", 3), ("fetch", 3)]


def test_a_request_that_ends_by_length_does_not_hold_up_the_others() -> None:
    late = Late()
    late.serve(goes_on(max_tokens=2), goes_on(max_tokens=6))
    assert late.overlap.happened["launched alone"] == 1
    assert [e.num_sequences for e in late.events if isinstance(e, StepFinished)] == [2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "params",
    [
        goes_on(max_tokens=4, presence_penalty=0.5),
        goes_on(max_tokens=4, frequency_penalty=0.5),
        goes_on(max_tokens=4, repetition_penalty=1.5),
        BeamSearchParams(beam_width=2, max_tokens=4),
    ],
    ids=["presence", "frequency", "repetition", "beams"],
)
def test_what_needs_the_newest_tokens_waits_for_them(params: SamplingParams | BeamSearchParams) -> None:
    late = Late()
    late.serve(params, goes_on(max_tokens=4))
    assert late.overlap.happened["launched ahead"] == 0
    assert Late(replace(CONFIG, async_scheduling=False)).serve(params, goes_on(max_tokens=4)) == Late().serve(
        params, goes_on(max_tokens=4)
    )


def test_samples_of_one_prompt_run_ahead_once_they_have_forked() -> None:
    late = Late()
    late.serve(goes_on(n=3, max_tokens=4))
    assert late.log[:4] == [("launch", 1), ("fetch", 1), ("launch", 2), ("launch", 3)]


def test_tokens_that_would_stop_too_early_are_forbidden_counting_the_one_being_chosen() -> None:
    params = SamplingParams(seed=3, min_tokens=4, max_tokens=12, stop_token_ids=[0, 1, 3, 4, 5, 6, 7, 8, 9])
    expected = Late(replace(CONFIG, async_scheduling=False)).serve(params)
    late = Late()
    assert late.serve(params) == expected
    assert 4 <= len(expected[0]) < 12
    assert late.overlap.happened["launched ahead"] >= 3


# --- What ends while its next step is under way ----------------------------------------------------


class Scripted(Late):
    """Stream i gets the tokens `script[i]`, whatever the logits are."""

    def __init__(self, *script: Sequence[int], config: EngineConfig = CONFIG) -> None:
        super().__init__(config)
        self.runner._choose = self.sample
        self.script = script
        self.asked: list[tuple[int, int]] = []  # (stream, number of the token)

    def sample(self, logits: Logits, inputs: Sequence[SamplingInput]) -> Any:
        places = [(one.stream, one.position - len(one.prompt_token_ids)) for one in inputs]
        self.asked += places
        samples = LATE.sample(logits, inputs)
        samples.later._work = lambda: [Sampled(self.script[i][place], -1.0, None) for i, place in places]
        return samples


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, stop_token_ids=[2], ignore_eos=True),
        SamplingParams(max_tokens=9, stop=letters([7, 2]), ignore_eos=True),
    ],
    ids=["eos", "stop token", "stop string"],
)
def test_the_row_of_a_sequence_that_has_ended_is_thrown_away(params: SamplingParams) -> None:
    bench = Scripted([5, 7, 2, 8, 9])
    assert bench.serve(params) == [[5, 7, 2]]
    assert bench.asked == [(0, 0), (0, 1), (0, 2), (0, 3)]  # the last one for nothing
    assert [event.step for event in bench.events if isinstance(event, StepFinished)] == [1, 2, 3, 4]
    bench.runner.late.finish()


def test_one_of_several_samples_ends_while_the_others_go_on() -> None:
    bench = Scripted([5, 2, 8, 8], [6, 6, 6, 2, 8], [7, 7, 2, 8, 8])
    bench.engine.add_request([1, 2, 3], SamplingParams(n=3, max_tokens=9), request_id="r")
    outputs = []
    while bench.engine.has_unfinished_requests():
        outputs += ended(bench.engine.step())
    assert [list(one.token_ids) for one in outputs[0].outputs] == [[5, 2], [6, 6, 6, 2], [7, 7, 2]]
    bench.check_nothing_left()


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_request_is_cancelled_while_its_step_is_in_flight(steps: int) -> None:
    """Its blocks are free at once; the others do not notice."""
    params = [goes_on(max_tokens=8), goes_on(max_tokens=8)]
    expected = Late().serve(*params)
    late = Late()
    for number, one in enumerate(params):
        late.engine.add_request([3, 1, 4, number], one, request_id=str(number))
    for _ in range(steps):
        late.engine.step()
    held = late.engine.blocks.num_available
    late.engine.abort("0")
    assert late.engine.blocks.num_available > held
    late.engine.check_invariants()
    outputs = {output.request_id: output for output in ended(late.engine.step())}
    assert list(outputs["0"].outputs[0].token_ids) == expected[0][: steps - 1]
    while late.engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in ended(late.engine.step())}
    assert list(outputs["1"].outputs[0].token_ids) == expected[1]
    late.check_nothing_left()


def test_when_all_are_cancelled_the_step_in_flight_is_nobodys() -> None:
    """As Ctrl-C does between steps: every block is given back, and nothing waits for the device."""
    late = Late()
    late.engine.add_request([1, 2, 3], goes_on(max_tokens=8), request_id="r")
    late.engine.step()
    late.engine.step()
    fetched = [entry for entry in late.log if entry[0] == "fetch"]
    late.engine.abort("r")
    assert [output.finished for output in ended(late.engine.take_updates())] == [False]
    late.check_nothing_left()
    assert [entry for entry in late.log if entry[0] == "fetch"] == fetched
    assert late.serve(goes_on(max_tokens=3)) == Late().serve(goes_on(max_tokens=3))


# --- What raises with a step in flight -------------------------------------------------------------

ASYNC_CROWDED = {
    preemption: with_steps_in_flight(crowded(preemption, prefix_caching=True)) for preemption in ("swap", "recompute")
}
SIMPLE_CROWDED = {
    f"{name}, all ahead": with_steps_in_flight(workload, everything_runs_ahead=True)
    for name, workload in ASYNC_CROWDED.items()
}
CROWDED = ASYNC_CROWDED | SIMPLE_CROWDED
PARTS = ["allocate", "share", "after moving", "forward", "half way through forward", "sample", "fetch"]


@quick_cases(3)
@pytest.mark.parametrize(
    "workload", [*ASYNC_CROWDED.values(), *SIMPLE_CROWDED.values()], ids=[*ASYNC_CROWDED, *SIMPLE_CROWDED]
)
@pytest.mark.parametrize("part", PARTS)
def test_every_request_gets_its_tokens_and_no_block_leaks_whichever_call_raises(
    part: str, workload: Workload, request: pytest.FixtureRequest
) -> None:
    """Atomic-failure, exact-references, content, liveness."""
    calls = Fuse(part)
    overlap = Overlap()
    run = wired(workload, calls)
    run.engine.listeners.append(overlap)
    assert run_through(run) == 0
    assert overlap.happened["launched ahead"] >= 3
    assert calls.calls > 0, "this workload never makes that call"
    for number in calls_that_raise(request, range(1, calls.calls + 1)):
        assert run_through(wired(workload, Fuse(part, number))) == 1, f"call {number} of {part}"


@pytest.mark.parametrize("part", ["forward", "fetch"])
def test_an_interrupt_by_the_user_is_survived_like_any_error(part: str) -> None:
    for number in range(1, 12):
        fuse = Fuse(part, number, KeyboardInterrupt)
        assert run_through(wired(SIMPLE_CROWDED["swap, all ahead"], fuse), KeyboardInterrupt) == 1


def test_seconds_of_steps_that_overlap_are_counted_once() -> None:
    late = Late()
    started = time.perf_counter()
    late.serve(goes_on(max_tokens=20))
    assert 0 < late.engine.stats.step_seconds < time.perf_counter() - started
    assert late.engine.stats.steps == 20


def test_an_engine_that_fails_again_and_again_still_gets_on() -> None:
    class EveryFifth(Fuse):
        def check(self, part: str) -> None:
            if part == self.part:
                self.calls += 1
                if self.calls % 5 == 0:
                    raise Fault

    for workload in SIMPLE_CROWDED.values():
        assert run_through(wired(workload, EveryFifth("fetch"))) >= 2
