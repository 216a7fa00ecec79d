"""Lanes: several steps in flight, for a pipeline of stages, and nothing else is different."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.contracts import StepResult, Tier
from minipaged.engine.engine import Engine
from minipaged.engine.lanes import Lane, share_of
from minipaged.engine.pipeline import Pipeline
from minipaged.engine.scheduler import Scheduler
from minipaged.engine.sequence import Request, RequestState
from minipaged.engine.step_writer import StepWriters
from minipaged.events import (
    Event,
    RequestAdmitted,
    RequestPreempted,
    StepFailed,
    StepFinished,
    StepStarted,
    SwappedIn,
)
from minipaged.llm import LoadedModel
from minipaged.outputs import RequestOutput, RequestUpdate
from minipaged.params import BeamSearchParams, EngineConfig, SamplingParams
from minipaged.recordings.step_files import encode
from minipaged.steps import StepInput
from minipaged.testing.content_runner import ContentRunner
from tests.effort import calls_that_raise, examples, one_case_in, quick_cases, scaled, seeds, thorough
from tests.engine.test_async_scheduling import check, check_cached_blocks_are_computed, goes_on
from tests.engine.test_failure_injection import PARTS, WORKLOADS, Fault, Fuse, run_through, wired
from tests.engine.test_steady import Scene, check_same, scene_of
from tests.late_device import LATE, LateRunner
from tests.workloads import FAST, REFERENCE, Workload, WorkloadRequest, WorkloadRun, ended, letters, random_workload

LANES = [2, 3, 4]

CONFIG = EngineConfig(
    num_blocks=40,
    block_size=4,
    max_model_len=64,
    vocab_size=20,
    eos_token_ids=(2,),
    debug=True,
    pipeline_parallel_size=2,
)


def in_lanes(workload: Workload, lanes: int) -> Workload:
    return replace(workload, config=replace(workload.config, pipeline_parallel_size=lanes))


def crowd(seed: int, lanes: int) -> Workload:
    """Many requests of unlike lengths in a pool that a few fill: who was preempted finds other lanes the emptier."""
    r = random.Random(seed)
    requests = []
    for _ in range(10):
        params: SamplingParams | BeamSearchParams
        params = SamplingParams(n=r.choice([1, 1, 2, 3]), seed=r.randrange(99), max_tokens=r.randint(2, 24))
        if r.random() < 0.3:
            params = BeamSearchParams(beam_width=r.choice([2, 3]), max_tokens=r.randint(2, 16))
        prompt = tuple(r.randrange(11) for _ in range(r.randint(1, 6)))
        requests.append(WorkloadRequest(r.randint(0, 8), prompt, params, r.choice([None] * 9 + [r.randint(5, 30)])))
    config = EngineConfig(
        num_blocks=r.randint(24, 36),
        num_swap_blocks=60,
        block_size=2,
        max_model_len=40,
        vocab_size=11,
        eos_token_ids=(2,),
        preemption=r.choice(["swap", "recompute", "auto"]),
        enable_prefix_caching=r.random() < 0.5,
        pipeline_parallel_size=lanes,
        debug=True,
    )
    return Workload(config, tuple(requests), swap_is_cheap=r.random() < 0.5)


def workload_of(seed: int, lanes: int) -> Workload:
    return crowd(seed, lanes) if seed % 2 else in_lanes(random_workload(seed), lanes)


class Flight:
    """A listener that follows the steps in flight."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.under_way: list[int] = []
        self.most = 0
        self.happened: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        match event:
            case StepStarted():
                self.under_way.append(event.step)
                self.most = max(self.most, len(self.under_way))
                assert len(self.under_way) <= self.lanes
            case StepFinished():
                assert event.step == self.under_way.pop(0), "steps are committed in the order of launching"
            case StepFailed():
                self.under_way.clear()
            case RequestPreempted():
                assert len(self.under_way) == 1, "what is in flight is never preempted"
                self.happened[f"preempted by {event.mode}"] += 1
            case _ if len(self.under_way) > 1:
                self.happened[f"{event.name} under way"] += 1


class Watched(LateRunner):
    """The content oracle on a device that does nothing until somebody waits, and which steps are in flight there."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps: list[StepInput] = []
        self.in_flight: dict[int, set[int]] = {}
        """Their sequences, by number."""
        self.lanes_of: dict[int, set[int]] = {}
        """In which lanes each sequence has begun."""
        self.most = 0

    def run(self, step: StepInput) -> StepResult:
        self.steps.append(step)
        result = super().run(step)
        for begun in step.begun:
            self.lanes_of.setdefault(begun.sequence, set()).add(step.lane)
        self.in_flight[step.number] = {row.sequence for row in self.mirror.rows}
        assert self.engine is not None
        under_way = {launched.number for launched in self.engine.steps_in_flight}
        self.in_flight = {number: of for number, of in self.in_flight.items() if number in {*under_way, step.number}}
        self.most = max(self.most, len(self.in_flight))
        together = [sequence for of in self.in_flight.values() for sequence in of]
        assert len(together) == len(set(together)), "a sequence is in two steps at once"
        return result


# --- Random workloads -----------------------------------------------------------------------------


@one_case_in(3)
@scaled
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("tier", [REFERENCE, FAST], ids=["reference", "fast"])
@pytest.mark.parametrize("seeds", seeds(100, 50), ids=str)
def test_every_invariant_holds_in_random_workloads(seeds: range, tier: Tier, lanes: int) -> None:
    """Content, exclusive-write, exact-references, conservation, liveness, scheduling-invariance: every request gets
    the tokens that it gets alone."""
    for seed in seeds:
        try:
            check(WorkloadRun(workload_of(seed, lanes), tier, listeners=[Flight(lanes)]))
        except Exception as error:
            error.add_note(f"in workload {seed}")
            raise


@one_case_in(3)
@scaled
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("seeds", seeds(100, 50), ids=str)
def test_every_invariant_holds_on_a_device_that_is_as_late_as_it_may_be(seeds: range, lanes: int) -> None:
    """The same; what the prefix cache offers has been computed; and no sequence is in two steps at once."""
    for seed in seeds:
        try:
            run = WorkloadRun(workload_of(seed, lanes), LATE, make_runner=Watched)
            now = 0
            while run.advance(now):
                check_cached_blocks_are_computed(run)
                now += 1
                assert now < 5000, "liveness"
            run.check_outputs()
            run.check_nothing_leaked()
            assert isinstance(run.runner, Watched)
            run.runner.late.finish()
        except Exception as error:
            error.add_note(f"in workload {seed}")
            raise


@thorough
@one_case_in(3)
@pytest.mark.parametrize("lanes", LANES)
def test_the_workloads_bring_about_everything_that_can_happen(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: Counter[str] = Counter()
    schedule, change_lane = Scheduler.schedule, StepWriters.change_lane

    def scheduled(self: Scheduler, ahead: Any = None, lane: int = 0) -> Any:
        plan = schedule(self, ahead, lane)
        happened["all of a lane made room"] += plan.lane != lane
        happened["an empty step"] += not plan.rows
        return plan

    def changed(self: StepWriters, request: Request, lane: int) -> None:
        ran = request.num_preemptions > 0
        state = "swapped" if request.state is RequestState.SWAPPED else "dropped"
        kind = "beams" if request.beam_search else "samples" if len(request.sequences) > 1 else "one sequence"
        happened[f"{kind} {state} and in another lane" if ran else "new in another lane"] += 1
        change_lane(self, request, lane)

    monkeypatch.setattr(Scheduler, "schedule", scheduled)
    monkeypatch.setattr(StepWriters, "change_lane", changed)
    for seed in range(300):
        flight = Flight(lanes)
        run = WorkloadRun(workload_of(seed, lanes), listeners=[flight])
        run.to_the_end()
        happened[f"{flight.most} in flight"] += 1
        happened += flight.happened + run.happened
    wanted = {
        f"{lanes} in flight",
        "all of a lane made room",
        "preempted by swap",
        "preempted by recompute",
        "new in another lane",
        *(f"{kind} {state} and in another lane" for kind in ("beams", "samples") for state in ("swapped", "dropped")),
        "one sequence swapped and in another lane",
        "one sequence dropped and in another lane",
        "cancelled while in flight",
        "prompt computed in chunks",
        "prefix_reused under way",
        "block_deduplicated under way",
        "block_evicted under way",
        "sequence_forked under way",
        "beam_finished under way",
    }
    assert {what for what in wanted if not happened[what]} == set(), happened
    assert not happened["an empty step"]


# --- Failures -------------------------------------------------------------------------------------


@quick_cases(5)
@one_case_in(4)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("part", PARTS)
def test_every_request_gets_its_tokens_and_no_block_leaks_whichever_call_raises(
    part: str, workload: Workload, lanes: int, request: pytest.FixtureRequest
) -> None:
    """Atomic-failure, exact-references, content, liveness; the steps in flight are lost, and nothing more."""
    calls = Fuse(part)
    assert run_through(wired(in_lanes(workload, lanes), calls)) == 0
    assert calls.calls > 0, "this workload never makes that call"
    for number in calls_that_raise(request, range(1, calls.calls + 1)):
        assert run_through(wired(in_lanes(workload, lanes), Fuse(part, number))) == 1, f"call {number} of {part}"


@pytest.mark.parametrize("part", ["swap out", "swap in"])
def test_every_request_gets_its_tokens_and_no_block_leaks_whichever_swap_raises(part: str) -> None:
    workload = in_lanes(WORKLOADS["swap"], 2)
    calls = Fuse(part)
    run_through(wired(workload, calls))
    assert calls.calls > 0, "this workload never swaps"
    for number in range(1, calls.calls + 1):
        assert run_through(wired(workload, Fuse(part, number))) == 1


@one_case_in(3)
@scaled
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("seeds", seeds(100, 50), ids=str)
def test_random_workloads_survive_an_error_anywhere(seeds: range, lanes: int) -> None:
    for seed in seeds:
        drawn = random.Random(seed)
        fuse = Fuse(drawn.choice([*PARTS, "swap out", "swap in"]), drawn.randint(1, 20))
        try:
            run_through(wired(workload_of(seed, lanes), fuse))
        except Exception as error:
            error.add_note(f"in workload {seed}, {fuse}")
            raise


def test_after_an_error_every_lane_begins_anew() -> None:
    """Each with a fresh step; what was in flight in the others is committed by nobody."""

    class Failing(Watched):
        def run(self, step: StepInput) -> StepResult:
            if step.number == 6:
                raise Fault
            return super().run(step)

    bench = Bench(replace(CONFIG, pipeline_parallel_size=3), make_runner=Failing)
    for number in range(3):
        bench.add(goes_on(max_tokens=6), number)
    with pytest.raises(Fault):
        bench.to_the_end()
    assert bench.engine.steps_in_flight == []
    bench.to_the_end()
    after = [step for step in bench.runner.steps if step.number > 6]
    assert [(step.lane, step.fresh) for step in after[:4]] == [(2, True), (0, True), (1, True), (2, False)]


# --- The order of things --------------------------------------------------------------------------


class Bench:
    """An engine on a late device."""

    def __init__(self, config: EngineConfig = CONFIG, make_runner: type[Watched] = Watched) -> None:
        self.runner = make_runner(config.num_blocks, config.num_swap_blocks, config.block_size, config.vocab_size)
        self.events: list[Event] = []
        self.engine = Engine(config, LATE, self.runner, decode=letters, listeners=[self.events.append])
        self.runner.engine = self.engine
        self.updates: list[list[RequestUpdate]] = []

    def add(self, params: SamplingParams | BeamSearchParams, number: int, prompt: Sequence[int] = (3, 1, 4)) -> None:
        self.engine.add_request([*prompt, number], params, request_id=str(number))

    def to_the_end(self) -> list[RequestOutput]:
        while self.engine.has_unfinished_requests():
            self.updates.append(self.engine.step())
        blocks = self.engine.blocks
        assert blocks.num_available == blocks.allocator.num_blocks
        outputs = [one for updates in self.updates for one in ended(updates)]
        return sorted(outputs, key=lambda output: int(output.request_id))

    def lanes(self) -> dict[str, int]:
        return {request.request_id: request.lane for request in self.engine.scheduler.running}


@pytest.mark.parametrize("lanes", LANES)
def test_as_many_steps_are_in_flight_as_there_are_lanes(lanes: int) -> None:
    """The runner has been given all of them before anybody looks at what the first has chosen."""
    bench = Bench(replace(CONFIG, pipeline_parallel_size=lanes))
    for number in range(lanes):
        bench.add(goes_on(max_tokens=4), number)
    bench.to_the_end()
    launched = [("launch", number) for number in range(1, 4 * lanes + 1)]
    fetched = [("fetch", number) for number in range(1, 4 * lanes + 1)]
    expected = launched[:lanes]
    for number in range(3 * lanes):
        expected += [fetched[number], launched[lanes + number]]
    assert bench.runner.late.log == [*expected, *fetched[3 * lanes :]]
    assert bench.runner.most == lanes
    assert [step.lane for step in bench.runner.steps] == [number % lanes for number in range(4 * lanes)]


def test_a_lane_with_nothing_to_run_is_skipped() -> None:
    """One request gets a token with each call, as in one lane."""
    bench = Bench(replace(CONFIG, pipeline_parallel_size=4))
    bench.add(goes_on(max_tokens=5), 0)
    bench.to_the_end()
    assert bench.runner.late.log == [(what, number) for number in range(1, 6) for what in ("launch", "fetch")]
    assert [len(updates) for updates in bench.updates] == [1] * 5


def test_beams_penalties_and_forks_need_not_wait_for_other_lanes() -> None:
    bench = Bench()
    bench.add(BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True), 0)
    bench.add(goes_on(max_tokens=5, n=2, repetition_penalty=1.3), 1)
    together = bench.to_the_end()
    assert bench.runner.most == 2
    for number, output in enumerate(together):
        alone = Bench(replace(CONFIG, pipeline_parallel_size=1))
        alone.add(bench_params(number), number)
        assert alone.to_the_end()[0].outputs == output.outputs


def bench_params(number: int) -> SamplingParams | BeamSearchParams:
    if number == 0:
        return BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
    return goes_on(max_tokens=5, n=2, repetition_penalty=1.3)


def test_seconds_are_counted_once_though_steps_overlap() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    runner = ContentRunner(40, 0, 4, 20)
    engine = Engine(CONFIG, REFERENCE, runner, clock=clock)
    for number in range(2):
        engine.add_request([3, number], goes_on(max_tokens=9))
    began = now
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.stats.steps == 18
    assert engine.stats.generated_tokens == 18
    assert 0 < engine.stats.step_seconds <= now - began


def test_asynchronous_scheduling_has_no_effect_beside_lanes() -> None:
    for seed in range(40):
        told: list[list[Event]] = []
        for is_async in (False, True):
            workload = in_lanes(random_workload(seed), 2)
            run = WorkloadRun(replace(workload, config=replace(workload.config, async_scheduling=is_async)))
            run.engine.listeners.append((events := list[Event]()).append)
            run.to_the_end()
            told.append(events)
        assert told[0] == told[1], seed


# --- Who gets which lane --------------------------------------------------------------------------


def test_those_who_come_at_once_are_dealt_out_evenly() -> None:
    bench = Bench(replace(CONFIG, num_blocks=100))
    for number in range(9):
        bench.add(goes_on(max_tokens=5), number)
    bench.engine.step()
    counts = Counter(bench.lanes().values())
    assert sorted(counts.values()) == [4, 5]
    assert bench.runner.most == 2
    assert len(bench.runner.steps) == 2, "all have come in with the first step of their lane"


def test_who_comes_later_gets_the_lane_with_the_fewest_sequences() -> None:
    bench = Bench(replace(CONFIG, pipeline_parallel_size=3, num_blocks=100))
    for number, n in enumerate([3, 1, 2]):
        bench.add(goes_on(max_tokens=20, n=n), number, prompt=[number] * 3)
        bench.engine.step()
    assert len({*bench.lanes().values()}) == 3
    bench.add(goes_on(max_tokens=3), 3)
    bench.engine.step()
    bench.engine.step()
    bench.engine.step()
    assert bench.lanes()["3"] == bench.lanes()["1"]


def test_at_most_max_num_seqs_run_in_all_lanes_together() -> None:
    bench = Bench(replace(CONFIG, max_num_seqs=4, num_blocks=100))
    for number in range(8):
        bench.add(goes_on(max_tokens=6), number)
    bench.engine.step()
    assert sorted(Counter(bench.lanes().values()).values()) == [2, 2]


class Stub:
    """A request, as far as sharing out goes."""

    def __init__(self, num_sequences: int) -> None:
        self.num_sequences = num_sequences


def stubs(sizes: Sequence[int]) -> list[Any]:
    return [Stub(size) for size in sizes]


sizes = st.lists(st.integers(1, 8), max_size=10)


@given(running=st.lists(sizes, min_size=1, max_size=4), entering=sizes)
def test_the_first_of_those_that_enter_enter_the_lane_with_the_fewest(
    running: list[list[int]], entering: list[int]
) -> None:
    """It takes one at least; one that comes alone enters no other; and a single lane takes all."""
    lanes, named = [Lane(number, stubs(of)) for number, of in enumerate(running)], stubs(entering)
    for lane in lanes:
        taken = share_of(lane, lanes, named)
        assert taken == named[: len(taken)]
        has_fewest = lane.num_sequences == min(each.num_sequences for each in lanes)
        if named and has_fewest:
            assert taken
        if len(named) == 1 and not has_fewest:
            assert not taken
    if len(lanes) == 1:
        assert share_of(lanes[0], lanes, named) == named


@given(num_lanes=st.integers(1, 4), size=st.integers(1, 4), number=st.integers(0, 20))
def test_of_those_that_are_alike_each_lane_gets_as_many(num_lanes: int, size: int, number: int) -> None:
    """When each lane has had its turn, all are in."""
    lanes, named = [Lane(i) for i in range(num_lanes)], stubs([size] * number)
    for lane in lanes:
        taken = share_of(lane, lanes, named)
        lane.running += taken
        named = named[len(taken) :]
    assert not named
    counts = [lane.num_sequences for lane in lanes]
    assert max(counts) - min(counts) <= size


# --- Blocks that others hold ----------------------------------------------------------------------


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("lanes", LANES)
def test_a_request_gets_blocks_that_other_lanes_hold(lanes: int, preemption: Any) -> None:
    """Liveness: each grows to nearly the whole pool. The latest always makes room, whatever its lane; the oldest never
    does. In between all steps in flight are committed. Who comes back gets the right tokens, in whatever lane."""
    config = replace(
        CONFIG, num_blocks=12, num_swap_blocks=24, preemption=preemption, pipeline_parallel_size=lanes, max_model_len=48
    )
    bench = Bench(config)
    flight = Flight(lanes)
    bench.engine.listeners.append(flight)
    for number in range(4):
        bench.add(goes_on(max_tokens=36), number, prompt=[number] * 3)
    together = bench.to_the_end()
    preempted = [event.request for event in bench.events if isinstance(event, RequestPreempted)]
    assert preempted
    assert "0" not in preempted
    assert [len(output.outputs[0].token_ids) for output in together] == [36] * 4
    for number, output in enumerate(together):
        alone = Bench(replace(config, pipeline_parallel_size=1, num_blocks=40))
        alone.add(goes_on(max_tokens=36), number, prompt=[number] * 3)
        assert alone.to_the_end()[0].outputs == output.outputs
    back = [
        event for event in bench.events if isinstance(event, SwappedIn if preemption == "swap" else RequestAdmitted)
    ]
    assert len(back) >= len(preempted)
    assert flight.most == lanes


def test_a_sequence_that_changes_its_lane_is_over_in_the_first_and_begins_in_the_other() -> None:
    """In the steps that a runner is given: what it is told next of the first lane is the sequence's end there."""
    changed = 0
    for seed in range(examples(200)):
        run = WorkloadRun(crowd(seed, 4), LATE, make_runner=Watched)
        run.to_the_end()
        assert isinstance(run.runner, Watched)
        known: list[dict[int, bool]] = [{}, {}, {}, {}]
        for step in run.runner.steps:
            here = known[step.lane]
            here.update({forked.sequence: True for forked in step.forked})
            for sequence in step.ended:
                del here[sequence]
            for begun in step.begun:
                for there in known:
                    if begun.sequence in there:
                        changed += 1
                        there[begun.sequence] = False  # its end has to be the first thing told there
                here[begun.sequence] = True
            assert all(here.values()), f"workload {seed}: a sequence is in two lanes"
    assert changed > examples(200) / 4


# --- What ends while steps are in flight ----------------------------------------------------------


@pytest.mark.parametrize("steps", range(1, 7))
@pytest.mark.parametrize("lanes", LANES)
def test_a_request_is_cancelled_while_its_step_is_in_flight(steps: int, lanes: int) -> None:
    """Its blocks are free at once; the others do not notice."""
    bench = Bench(replace(CONFIG, pipeline_parallel_size=lanes))
    for number in range(lanes):
        bench.add(goes_on(max_tokens=8), number)
    for _ in range(steps):
        bench.updates.append(bench.engine.step())
    [*_, latest] = bench.engine.steps_in_flight
    [name] = [part.request.request_id for part in latest.plan.scheduled]
    held = bench.engine.blocks.num_available
    bench.engine.abort(name)
    assert bench.engine.blocks.num_available > held
    bench.engine.check_invariants()
    outputs = bench.to_the_end()
    for number, output in enumerate(outputs):
        alone = Bench()
        alone.add(goes_on(max_tokens=8), number)
        expected = list(alone.to_the_end()[0].outputs[0].token_ids)
        got = list(output.outputs[0].token_ids)
        assert got == expected[: len(got)]
        assert (len(got) < 8) == (str(number) == name)


def test_when_all_are_cancelled_the_steps_in_flight_are_nobodys() -> None:
    """Nothing waits for the device, and each step that was told of as begun is told of as over."""
    bench = Bench(replace(CONFIG, pipeline_parallel_size=3))
    for number in range(3):
        bench.add(goes_on(max_tokens=8), number)
    bench.engine.step()
    fetched = [entry for entry in bench.runner.late.log if entry[0] == "fetch"]
    for number in range(3):
        bench.engine.abort(str(number))
    assert len(ended(bench.engine.step())) == 3
    assert not bench.engine.has_unfinished_requests()
    assert bench.engine.steps_in_flight == []
    assert [entry for entry in bench.runner.late.log if entry[0] == "fetch"] == fetched
    assert [event.step for event in bench.events if isinstance(event, StepFinished)] == [1, 2, 3]
    bench.add(goes_on(max_tokens=3), 7)
    assert len(bench.to_the_end()[-1].outputs[0].token_ids) == 3


# --- Sizes ----------------------------------------------------------------------------------------


def test_a_step_in_which_256_sequences_go_on_in_each_lane_is_less_than_2_kilobytes() -> None:
    config = EngineConfig(num_blocks=4000, max_model_len=100, vocab_size=20, max_num_seqs=512, pipeline_parallel_size=2)
    runner = Watched(config.num_blocks, 0, config.block_size, config.vocab_size)
    engine = Engine(config, LATE, runner)
    runner.engine = engine
    for number in range(512):
        prompt = [number % 20, number // 20 % 20, *range(number % 16)]
        engine.add_request(prompt, SamplingParams(max_tokens=30, ignore_eos=True, seed=number))
    widths: set[tuple[int, ...]] = set()
    while engine.has_unfinished_requests():
        engine.step()
        widths.add(tuple(len(lane.running) for lane in engine.scheduler.lanes))
    assert (256, 256) in widths
    going_on = [step for step in runner.steps if not (step.begun or step.ended or step.left_out)]
    assert Counter(step.lane for step in going_on).keys() == {0, 1}
    assert len(going_on) > 40
    sizes = [len(encode(step)) for step in going_on]
    assert max(sizes) <= 2048
    assert sum(sizes) / len(sizes) < 300
    assert not any(step.told or step.added for step in going_on)


# --- The short way, and one lane ------------------------------------------------------------------


def scene_in(lanes: int) -> Callable[[int], Scene]:
    def scene(seed: int) -> Scene:
        made = scene_of(seed, async_scheduling=False)
        return replace(made, config=replace(made.config, pipeline_parallel_size=lanes))

    return scene


@quick_cases(1)
@one_case_in(3)
@scaled
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("seeds", seeds(100, 50, tried=False), ids=str)
def test_both_ways_give_the_same(seeds: range, lanes: int) -> None:
    """Every step said to the runner, every update, every count (the memory of other lanes' sequences among them)."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        try:
            happened += check_same(scene_in(lanes)(seed), FAST if seed % 2 else REFERENCE).happened
        except Exception as error:
            error.add_note(f"in scene {seed}")
            raise
    assert happened["steady"] > 10 * len(seeds)


@scaled
@pytest.mark.parametrize("seeds", seeds(200, 100), ids=str)
def test_one_lane_by_the_pipelines_rules_is_what_there_is_without_it(seeds: range) -> None:
    """The same steps, events and updates."""
    for seed in seeds:
        told: list[tuple[list[StepInput], list[Event], list[Any]]] = []
        for by_the_pipeline in (False, True):

            class Runner(ContentRunner):
                steps: list[StepInput]

                def run(self, step: StepInput) -> StepResult:
                    self.steps.append(step)
                    return super().run(step)

            run = WorkloadRun(random_workload(seed), make_runner=Runner)
            run.runner.steps = steps = []  # type: ignore[attr-defined]
            engine = run.engine
            engine.listeners.append((events := list[Event]()).append)
            if by_the_pipeline:
                assert engine._steady
                engine._ahead = Pipeline(engine.scheduler, engine._steady.assign_ahead, engine._launch, engine._commit)
            run.to_the_end()
            updates = [(name, [one.completions for one in of]) for name, of in run.updates.items()]
            told.append((steps, events, updates))
        assert told[0] == told[1], seed


# --- Models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["reference", "fast"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_model_gives_the_same_tokens_in_lanes(tiny_model: Path, tier: str, preemption: Any) -> None:
    """Samples, beams, penalties; a pool that is too small for all."""
    loaded = LoadedModel.load(tiny_model, tier, device="cpu", dtype="float32")
    every = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1, seed=3, n=3, max_tokens=12, ignore_eos=True),
        BeamSearchParams(beam_width=3, max_tokens=10),
        SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(temperature=1, seed=4, max_tokens=24, ignore_eos=True),
    ]
    told: list[dict[str, list[tuple[int, ...]]]] = []
    for lanes in (1, 2):  # as many stages as the model has layers
        config = EngineConfig(
            num_blocks=20,
            num_swap_blocks=40,
            block_size=4,
            max_model_len=48,
            vocab_size=loaded.config.vocab_size,
            preemption=preemption,
            max_num_batched_tokens=32,
            pipeline_parallel_size=lanes,
            debug=True,
        )
        tier_of, runner = loaded.tier, loaded.tier.make_runner(loaded.config, loaded.weights, config)
        preempted: list[Event] = []
        engine = Engine(config, tier_of, runner)
        engine.listeners.append(
            lambda event, preempted=preempted: preempted.append(event) if isinstance(event, RequestPreempted) else None
        )
        for number, params in enumerate(every):
            engine.add_request([5, 7, number + 1, 9, 4], params, request_id=str(number))
        outputs: list[RequestOutput] = []
        while engine.has_unfinished_requests():
            outputs += ended(engine.step())
        told.append({one.request_id: [each.token_ids for each in one.outputs] for one in outputs})
        assert preempted
    assert told[1] == told[0]
