"""The state is a fold over events: any prefix of them gives what the engine really had, forwards and back."""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from minipaged.engine.grouped_prefix_cache import GroupedPrefixCache
from minipaged.engine.prefix_cache import PrefixCache
from minipaged.events import (
    HOLE,
    BlockCached,
    BlockCopied,
    BlockDeduplicated,
    BlockEvicted,
    BlocksFreed,
    EngineStarted,
    Event,
    PrefixReused,
    RequestAdmitted,
    RequestArrived,
    StepFinished,
    StepStarted,
    TokenGenerated,
    TokensComputed,
    from_json,
)
from minipaged.replay.state import KEPT_REQUESTS, NO_LETTER, LiveSequence, PoolState, State
from minipaged.replay.teller import tell
from minipaged.replay.timeline import Timeline
from tests.effort import calls_that_raise, one_case_in, quick_cases, scaled, seeds
from tests.engine.test_draft_model import RandomNumber, TwoModels
from tests.engine.test_drafts import Guesses
from tests.engine.test_failure_injection import WORKLOADS, Fault, Fuse, wired
from tests.workloads import Workload, WorkloadRun, random_workload, windowed


def summary(state: State) -> dict[str, Any]:
    """Everything in a state that an engine can be asked for."""
    return {
        "step": state.step,
        "waiting": [request.name for request in state.waiting],
        "running": [request.name for request in state.running],
        "swapped": [request.name for request in state.swapped],
        "sequences": {
            number: (s.request.name, s.tokens, s.table, s.num_computed, s.swapped)
            for number, s in sorted(state.sequences.items())
        },
        "cached": state.cached,
        "ref counts": {block: n for block in range(state.device.num_blocks) if (n := state.ref_count(block))},
        "host ref counts": {block: len(holders) for block, holders in sorted(state.host.holders.items())},
        "filled": state.device.filled,
        "room": state.num_free + state.num_cached_only,
        "contiguous": (state.num_on_device, state.contiguous_tokens),
    }


def cached(cache: PrefixCache | GroupedPrefixCache | None) -> dict[int, tuple[int, ...]]:
    """The tokens in each cached block."""
    if isinstance(cache, GroupedPrefixCache):
        return {block: node.tokens for block, (node, _) in cache._places.items()}
    return {one.block: one.tokens for one in cache.entry_of.values()} if cache else {}


def engine_summary(run: WorkloadRun, step: int) -> dict[str, Any]:
    """The same, from the engine."""
    scheduler, blocks = run.engine.scheduler, run.engine.blocks
    live = [(r, s) for r in (*scheduler.waiting, *scheduler.running) for s in r.sequences]
    filled: Counter[int] = Counter()
    for request in scheduler.running:
        for block, slots in request.filled_slots(blocks.block_size).items():
            filled[block] = max(filled[block], slots)
    pools = [
        {b: n for b in range(pool.num_blocks) if (n := pool.ref_count(b))} if pool else {}
        for pool in (blocks.allocator, blocks.host_allocator)
    ]
    on_device = [s.num_computed for _, s in live if s.entries and not s.swapped]
    return {
        "step": step,
        "waiting": [request.request_id for request in scheduler.waiting],
        "running": [request.request_id for request in scheduler.running],
        "swapped": [request.request_id for request in scheduler.waiting if request.state.value == "swapped"],
        "sequences": {
            s.sequence_id: (r.request_id, list(s.tokens), list(s.entries), s.num_computed, s.swapped)
            for r, s in sorted(live, key=lambda pair: pair[1].sequence_id)
        },
        "cached": cached(blocks.prefix_cache),
        "ref counts": pools[0],
        "host ref counts": pools[1],
        "filled": dict(filled),
        "room": blocks.num_available,
        "contiguous": (len(on_device), sum(on_device)),
    }


def check_invariants(state: State, event: Event, has_draft_model: bool = False) -> None:
    """Those that can be seen in a state after any event, also in the middle of a step."""
    for pool, host in ((state.device, False), (state.host, True)):
        entries = Counter(block for s in state.sequences.values() if s.swapped == host for block in s.blocks)
        assert {block: len(holders) for block, holders in pool.holders.items()} == entries, "exact-references"
        assert pool.num_filled == sum(pool.filled.values())
        assert pool.filled.keys() == entries.keys()
        tables = [sequence.tables() for sequence in state.sequences.values() if sequence.swapped == host]
        for group in range(len(state.group_windows)):
            held = {block for each in tables for block in each[group] if block != HOLE}
            assert pool.by_group[group] == len(held)
    held = state.device.holders.keys() | state.cached
    assert state.num_free + len(held) == state.device.num_blocks, "conservation"
    if isinstance(event, TokensComputed):
        sequence, size = state.sequences[event.sequence], state.block_size
        for block in (*(table[(event.num_tokens - 1) // size] for table in sequence.tables()), *event.new_blocks):
            assert state.ref_count(block) == 1, "exclusive-write"
    # A step may run ahead by one token, and by drafts. What a draft model has guessed is told later.
    most_ahead = 8 if state.counts["tokens_drafted"] or has_draft_model else 1
    for sequence in state.sequences.values():
        for table in sequence.tables():
            assert len(table) == -(-sequence.num_computed // state.block_size), "content"
        assert sequence.num_computed <= len(sequence.tokens) + most_ahead
    letters = [s.letter for s in state.sequences.values() if s.letter not in ("", NO_LETTER)]
    assert len(letters) == len(set(letters))
    assert len(state.finished) <= KEPT_REQUESTS
    assert state.num_swapped == len(state.swapped)


def follow(run: WorkloadRun, timeline: Timeline) -> dict[int, dict[str, Any]]:
    """Run to the end. Every prefix is checked for the invariants; returns what the engine had after some of them."""
    run.engine.listeners.append(timeline.append)
    known: dict[int, dict[str, Any]] = {}
    for now in range(1000):
        try:
            goes_on = run.advance(now)
        except Fault:
            goes_on = True
        while not timeline.at_end:
            event = timeline.next_event()
            tell(timeline.state, event)
            timeline.forward()
            check_invariants(timeline.state, event, isinstance(run.runner, TwoModels))
        if not len(timeline):
            continue  # nothing has arrived, and the engine has told nobody of its sizes
        known[len(timeline)] = engine_summary(run, timeline.state.step)
        assert summary(timeline.state) == known[len(timeline)]
        if not goes_on:
            break
    return known


def check_any_prefix(run: WorkloadRun, seed: int) -> None:
    timeline = Timeline(spacing=random.Random(seed).choice([1, 7, 50, 10_000]))
    known = follow(run, timeline)
    places = list(known)
    random.Random(seed).shuffle(places)
    for place in places:
        timeline.seek(place)
        assert summary(timeline.state) == known[place]


def ahead(workload: Workload) -> Workload:
    return replace(workload, config=replace(workload.config, async_scheduling=True))


def in_lanes(workload: Workload) -> Workload:
    return replace(workload, config=replace(workload.config, pipeline_parallel_size=3))


@one_case_in(3)
@scaled
@pytest.mark.parametrize("seeds", seeds(300, 50), ids=str)
def test_any_prefix_of_a_random_workload_gives_what_the_engine_had(seeds: range) -> None:
    for seed in seeds:
        workload = random_workload(seed)
        try:
            check_any_prefix(WorkloadRun(workload), seed)
            check_any_prefix(WorkloadRun(ahead(workload)), seed)
            check_any_prefix(WorkloadRun(in_lanes(workload)), seed)
            check_any_prefix(WorkloadRun(windowed(seed)), seed)
        except Exception as error:
            error.add_note(f"in workload {seed}")
            raise


@scaled
@pytest.mark.parametrize("seeds", seeds(60, 15), ids=str)
def test_any_prefix_is_right_where_tokens_are_drafted(seeds: range) -> None:
    """Slots of drafted tokens are taken and given back, with and without a block."""
    happened = Counter[str]()
    for seed in seeds:
        for workload in (random_workload(seed), in_lanes(random_workload(seed))):
            count = Happened()
            if workload.config.pipeline_parallel_size == 1 and seed % 2:  # a draft model says later what it has guessed
                run = WorkloadRun(workload, make_runner=TwoModels, drafts=RandomNumber(seed), listeners=[count])
            else:
                run = WorkloadRun(workload, drafts=Guesses(workload, seed), listeners=[count])
            check_any_prefix(run, seed)
            stats, state = run.engine.stats, count.state
            assert state.counts["tokens accepted"] == stats.tokens_accepted == sum(stats.tokens_accepted_at)
            assert state.counts["blocks rolled back"] == stats.blocks_rolled_back
            assert state.counts["tokens_accepted"] == stats.num_drafts
            assert state.counts["tokens drafted"] >= stats.tokens_drafted  # an aborted request's are not verified
            happened += state.counts
    assert happened["tokens drafted"] > happened["tokens accepted"] > 0
    assert happened["blocks_rolled_back"] > happened["blocks rolled back"] > 0


@scaled
@pytest.mark.parametrize("seeds", seeds(60, 5), ids=str)
def test_a_drafted_token_that_stands_is_generated_next_and_between_steps_none_is_left(seeds: range) -> None:
    """Some stand and are not generated, because the sequence ends before them."""
    num_generated = num_accepted = 0
    for seed, has_draft_model in product(seeds, (False, True)):
        state = State()

        def listen(event: Event, state: State = state) -> None:
            nonlocal num_generated
            if isinstance(event, TokenGenerated) and (sequence := state.sequences[event.sequence]).num_standing:
                assert event.token_id == sequence.drafted[0]
                num_generated += 1
            if isinstance(event, StepStarted | StepFinished):
                assert not any(sequence.drafted for sequence in state.sequences.values())
            state.apply(event)

        workload = random_workload(seed)
        if has_draft_model:
            WorkloadRun(workload, make_runner=TwoModels, drafts=RandomNumber(seed), listeners=[listen]).to_the_end()
        else:
            WorkloadRun(workload, drafts=Guesses(workload, seed), listeners=[listen]).to_the_end()
        num_accepted += state.counts["tokens accepted"]
    assert 0 < num_generated <= num_accepted


class Happened:
    """Keeps the state after all events of a run."""

    def __init__(self) -> None:
        self.state = State()

    def __call__(self, event: Event) -> None:
        self.state.apply(event)


@quick_cases(1)
@one_case_in(4)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize(
    "part", ["allocate", "share", "copy_on_write", "swap out", "swap in", "forward", "sample", "fetch"]
)
def test_the_state_is_right_after_a_step_that_failed(part: str, workload: Any, request: pytest.FixtureRequest) -> None:
    for number in calls_that_raise(request, range(1, 60, 2)):
        follow(wired(workload, Fuse(part, number)), Timeline())
        follow(wired(ahead(workload), Fuse(part, number)), Timeline())
        follow(wired(in_lanes(workload), Fuse(part, number)), Timeline())


@quick_cases(5)
@pytest.mark.parametrize("part", ["allocate", "copy_on_write", "swap out", "forward", "sample"])
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_any_prefix_is_right_where_a_step_failed(part: str, workload: Any, request: pytest.FixtureRequest) -> None:
    for number in calls_that_raise(request, range(1, 60, 9)):
        check_any_prefix(wired(workload, Fuse(part, number)), number)


def whole(state: State) -> dict[str, Any]:
    """All of a state, in plain data that can be compared."""

    def sequence(s: LiveSequence) -> tuple[Any, ...]:
        return (s.number, s.request.name, s.tokens, s.letter, s.table, s.num_computed, s.swapped, s.ended)

    def request(r: Any) -> tuple[Any, ...]:
        sequences = [sequence(s) for s in (*r.sequences, *r.done)]
        return (r.name, r.order, r.queue, sequences, r.preempted, r.joining)

    def pool(p: PoolState) -> tuple[Any, ...]:
        return (p.holders, p.filled, p.num_filled, p.by_group, p.last_request, p.most_used, p.highest)

    return summary(state) | {
        "requests": [request(r) for r in state.requests.values()],
        "finished": [request(r) for r in state.finished],
        "queues": [[request(r) for r in queue] for queue in (state.waiting, state.running)],
        "pools": [pool(state.device), pool(state.host)],
        "this step": [
            [(sequence(a), sequence(b)) for a, b in state.forks],
            [(sequence(s), blocks) for s, blocks in state.dropped.values()],
        ],
        "counts": state.counts,
        "others": (state.num_arrived, state.num_generated, state.most_sequences, list(state.letters)),
        "recent": list(state.recent),
    }


@pytest.mark.parametrize("seed", range(6))
def test_a_state_that_was_gone_back_to_is_the_state_that_was_there(seed: int) -> None:
    """Nothing of a copy is shared with what goes on."""
    run = WorkloadRun(random_workload(seed), listeners=[(heard := []).append])
    run.to_the_end()
    timeline, there = Timeline(heard, spacing=20), []
    while not timeline.at_end:
        there.append(deepcopy(whole(timeline.state)))
        timeline.forward()
    for place in sorted(range(len(heard)), key=lambda place: place * 7919 % len(heard)):
        timeline.seek(place)
        assert whole(timeline.state) == there[place]


def test_of_a_long_run_the_last_events_can_be_gone_back_to() -> None:
    run = WorkloadRun(random_workload(1), listeners=[(heard := []).append])
    run.to_the_end()
    timeline, plain = Timeline(spacing=5, keep=30), Timeline()
    for event in heard:
        timeline.append(event)
        plain.append(event)
        timeline.seek(len(timeline))
    assert 0 < timeline.first <= len(heard) - 30
    for place in (len(heard) - 30, timeline.first, 0):
        timeline.seek(place)
        plain.seek(max(place, timeline.first))
        assert timeline.position == plain.position
        assert whole(timeline.state) == whole(plain.state)


def test_another_run_in_the_same_file_starts_anew() -> None:
    runs: list[list[Event]] = []
    for seed in (2, 3):
        runs.append([])
        WorkloadRun(random_workload(seed), listeners=[runs[-1].append]).to_the_end()
    both, second = Timeline([*runs[0], *runs[1]]), Timeline(runs[1])
    both.seek(len(both))
    second.seek(len(second))
    assert whole(both.state) == whole(second.state)


@pytest.mark.parametrize(
    "line",
    [
        '{"event":"token_generated","request":"0","sequence":7,"token_id":1,"logprob":0}',
        '{"event":"request_admitted","request":"0"}',
        '{"event":"block_evicted","block":3}',
    ],
)
def test_an_event_of_something_that_never_came_is_refused(line: str) -> None:
    with pytest.raises((LookupError, ValueError)):
        State().apply(from_json(line))


def state_of(*events: Event) -> State:
    """A pool of four blocks of two slots, in which request "a" has two of them: 0, which is cached too, and 1."""
    state = State()
    for event in (
        EngineStarted(4, 0, 2, 8),
        RequestArrived("a", 0, (7, 8, 9), 1),
        RequestAdmitted("a"),
        TokensComputed(0, 3, (0, 1), 0),
        BlockCached(0, 0, 0),
        *events,
    ):
        state.apply(event)
    return state


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (BlockCopied(0, 1, 1, 2, 2), "block 1 has 1 holders before the copy, not 2"),
        (BlockCopied(0, 1, 0, 2, 2), "entry 1 of the table of sequence 0 is 1, not 0"),
        (BlockCached(0, 1, 3), "entry 1 of the table of sequence 0 is 1, not 3"),
        (BlockDeduplicated(0, 1, 1, 3), "block 3 is not in the prefix cache"),
        (BlockEvicted(0), "block 0 has 2 holders"),
        (BlocksFreed(0, (0, 2)), r"sequence 0 holds blocks \[0, 1\], not \[0, 2\]"),
        (PrefixReused(0, (0,), "cache"), r"the table of sequence 0 already holds blocks \[0, 1\]"),
    ],
    ids=lambda value: value.name if isinstance(value, Event) else "",
)
def test_what_does_not_follow_from_the_events_before_is_refused(event: Event, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        state_of(event)


def test_what_a_block_holds_can_be_read_off() -> None:
    state = state_of()
    assert state.cached == {0: (7, 8)}
    assert [state.sequences[0].tokens_in(logical, 2) for logical in (0, 1)] == [(7, 8), (9,)]
    state.apply(TokenGenerated("a", 0, 5, -0.5))
    assert state.sequences[0].tokens_in(1, 2) == (9,)  # it is known, but its slot is not filled
    state.apply(TokensComputed(0, 4, (), 0))
    assert state.sequences[0].tokens_in(1, 2) == (9, 5)
