"""The events of a run are complete: who folds them knows every block table, count, queue and token of the engine."""

from __future__ import annotations

import json
from bisect import insort
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged import events
from minipaged.events import EVENT_TYPES, Event, from_json, read_jsonl
from tests.effort import examples, quick_cases, scaled, seeds
from tests.engine.test_failure_injection import WORKLOADS, Fault, Fuse, wired
from tests.workloads import Run, Workload, random_workload

# --- JSON -----------------------------------------------------------------------------------------

any_event = st.one_of(*(st.builds(event_type) for event_type in EVENT_TYPES.values()))


@settings(max_examples=examples(500))
@given(any_event)
def test_every_event_survives_the_way_through_json(event: Event) -> None:
    line = event.to_json()
    assert "\n" not in line
    again = from_json(line)
    assert type(again) is type(event)
    for part in fields(event):  # also those that do not count when events are compared
        ours, theirs = getattr(event, part.name), getattr(again, part.name)
        assert ours == theirs or ours != ours, part.name  # NaN


def test_every_kind_of_event_has_a_name_of_its_own() -> None:
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)]
    assert len(EVENT_TYPES) == len(kinds) - 1  # all but Event itself
    assert "" not in EVENT_TYPES


def test_a_line_says_which_event_it_is() -> None:
    line = events.BlockEvicted(block=3).to_json()
    assert json.loads(line) == {"event": "block_evicted", "block": 3}


def test_a_file_of_events_is_read_back_line_by_line() -> None:
    run = Run(random_workload(3), listeners=[(heard := []).append])
    run.to_the_end()
    lines = [event.to_json() + "\n" for event in heard]
    assert list(read_jsonl([*lines[:2], "\n", *lines[2:]])) == heard


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"event": "no_such_event"}', "not an event"),
        ('{"block": 3}', "not an event"),
        ("[1, 2]", "not an event"),
        ('{"event": "block_evicted"}', "not a valid block_evicted event.*block"),
        ('{"event": "block_evicted", "block": 1, "color": 2}', "not a valid block_evicted event.*color"),
        ("{", "property name"),
    ],
)
def test_what_is_no_event_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(line)


# --- Folding --------------------------------------------------------------------------------------


@dataclass
class FoldedSequence:
    request: str
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    swapped: bool = False


class Fold:
    """What the events say that the engine's state is: nothing here looks at the engine."""

    def __init__(self) -> None:
        self.sequences: dict[int, FoldedSequence] = {}
        self.arrivals: list[str] = []
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.cached: set[int] = set()
        self.block_size = 0

    def references(self, *, host: bool) -> Counter[int]:
        """The reference count of each held block of one pool."""
        counts = Counter(block for s in self.sequences.values() if s.swapped == host for block in s.table)
        if not host:
            counts.update(self.cached)
        return counts

    def of_request(self, request: str) -> list[FoldedSequence]:
        return [sequence for sequence in self.sequences.values() if sequence.request == request]

    def move(self, request: str, source: list[str], target: list[str]) -> None:
        """From one queue to the other; both are in order of arrival."""
        source.remove(request)
        insort(target, request, key=self.arrivals.index)

    def on_event(self, event: Event) -> None:
        handle = getattr(self, f"on_{event.name}", None)
        if handle:
            handle(event)

    def on_engine_started(self, event: events.EngineStarted) -> None:
        self.block_size = event.block_size

    def on_request_arrived(self, event: events.RequestArrived) -> None:
        self.sequences[event.sequence] = FoldedSequence(event.request, list(event.prompt_token_ids))
        self.arrivals.append(event.request)
        self.waiting.append(event.request)

    def on_request_admitted(self, event: events.RequestAdmitted) -> None:
        self.move(event.request, self.waiting, self.running)

    def on_request_preempted(self, event: events.RequestPreempted) -> None:
        self.move(event.request, self.running, self.waiting)

    def on_request_finished(self, event: events.RequestFinished) -> None:
        (self.running if event.request in self.running else self.waiting).remove(event.request)

    def on_step_failed(self, event: events.StepFailed) -> None:
        for request in event.requests:
            if request in self.running:
                self.move(request, self.running, self.waiting)

    def on_sequence_forked(self, event: events.SequenceForked) -> None:
        parent = self.sequences[event.parent]
        self.sequences[event.child] = FoldedSequence(
            event.request, list(parent.tokens), list(parent.table), parent.num_computed, parent.swapped
        )

    def on_token_generated(self, event: events.TokenGenerated) -> None:
        self.sequences[event.sequence].tokens.append(event.token_id)

    def on_sequence_finished(self, event: events.SequenceFinished) -> None:
        """Its blocks are freed next, if it holds any; then nothing is left of it."""
        if not self.sequences[event.sequence].table:
            del self.sequences[event.sequence]
        else:
            self.sequences[event.sequence].request = ""

    def on_blocks_freed(self, event: events.BlocksFreed) -> None:
        sequence = self.sequences[event.sequence]
        assert sequence.table == list(event.blocks)
        if sequence.request:
            sequence.table, sequence.num_computed, sequence.swapped = [], 0, False
        else:
            del self.sequences[event.sequence]

    def on_tokens_computed(self, event: events.TokensComputed) -> None:
        sequence = self.sequences[event.sequence]
        sequence.table += event.new_blocks
        sequence.num_computed = event.num_tokens

    def on_block_copied(self, event: events.BlockCopied) -> None:
        sequence = self.sequences[event.sequence]
        assert sequence.table[event.logical_block] == event.source
        assert self.references(host=False)[event.source] == event.holders
        sequence.table[event.logical_block] = event.destination

    def on_prefix_reused(self, event: events.PrefixReused) -> None:
        sequence = self.sequences[event.sequence]
        assert not sequence.table
        sequence.table = list(event.blocks)
        sequence.num_computed = len(event.blocks) * self.block_size

    def on_swapped_out(self, event: events.SwappedOut) -> None:
        self.relocate(event.request, dict(event.pairs), swapped=True)

    def on_swapped_in(self, event: events.SwappedIn) -> None:
        self.relocate(event.request, dict(event.pairs), swapped=False)
        self.move(event.request, self.waiting, self.running)

    def relocate(self, request: str, new: dict[int, int], *, swapped: bool) -> None:
        for sequence in self.of_request(request):
            sequence.table = [new[block] for block in sequence.table]
            sequence.swapped = swapped

    def on_block_cached(self, event: events.BlockCached) -> None:
        assert self.sequences[event.sequence].table[event.logical_block] == event.block
        self.cached.add(event.block)

    def on_block_deduplicated(self, event: events.BlockDeduplicated) -> None:
        sequence = self.sequences[event.sequence]
        assert sequence.table[event.logical_block] == event.own
        assert event.cached in self.cached
        sequence.table[event.logical_block] = event.cached

    def on_block_evicted(self, event: events.BlockEvicted) -> None:
        assert self.references(host=False)[event.block] == 1
        self.cached.remove(event.block)


def check_same(fold: Fold, run: Run) -> None:
    """The fold and the engine agree on everything."""
    scheduler, blocks = run.engine.scheduler, run.engine.blocks
    assert fold.waiting == [request.request_id for request in scheduler.waiting]
    assert fold.running == [request.request_id for request in scheduler.running]
    folded = {number: vars(sequence) for number, sequence in fold.sequences.items()}
    engines: dict[int, dict[str, Any]] = {
        sequence.sequence_id: {
            "request": request.request_id,
            "tokens": sequence.tokens,
            "table": list(sequence.table.blocks),
            "num_computed": sequence.num_computed,
            "swapped": sequence.swapped,
        }
        for request in scheduler.waiting + scheduler.running
        for sequence in request.sequences
    }
    assert folded == engines
    for allocator, host in ((blocks.allocator, False), (blocks.host_allocator, True)):
        if allocator is not None:
            counts = {block: allocator.ref_count(block) for block in range(allocator.num_blocks)}
            assert {block: count for block, count in counts.items() if count} == dict(fold.references(host=host))
    assert fold.cached == set(blocks.prefix_cache.blocks if blocks.prefix_cache else ())


def ahead(workload: Workload) -> Workload:
    return replace(workload, config=replace(workload.config, async_scheduling=True))


def check_fold(run: Run) -> None:
    fold = Fold()
    run.engine.listeners.append(fold.on_event)
    for now in range(1000):
        try:
            goes_on = run.advance(now)
        except Fault:
            goes_on = True
        check_same(fold, run)
        if not goes_on:
            return


@scaled
@pytest.mark.parametrize("seeds", seeds(300, 50), ids=str)
def test_folding_the_events_gives_the_engines_state_after_every_step(seeds: range) -> None:
    """Exact-references, from the events alone; over random workloads."""
    for seed in seeds:
        workload = random_workload(seed)
        try:
            check_fold(Run(workload))
            check_fold(Run(ahead(workload)))
        except Exception as error:
            error.add_note(f"in workload {seed}")
            raise


@quick_cases(6)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize(
    "part", ["allocate", "share", "copy_on_write", "swap out", "swap in", "forward", "sample", "fetch"]
)
def test_the_fold_is_right_after_a_step_that_failed(part: str, workload: Any) -> None:
    for number in range(1, 60, 2):
        check_fold(wired(workload, Fuse(part, number)))
        check_fold(wired(ahead(workload), Fuse(part, number)))


def test_every_kind_of_event_occurs() -> None:
    """Otherwise the fold would not have been tested on it."""
    seen: set[str] = {"step_failed"}  # those are in the runs with faults
    for seed in range(300):
        run = Run(random_workload(seed), listeners=[lambda event: seen.add(event.name)])
        run.to_the_end()
        if seen == set(EVENT_TYPES):
            return
    assert seen == set(EVENT_TYPES)


def test_the_first_event_tells_the_sizes_and_steps_are_numbered_from_one() -> None:
    run = Run(random_workload(0), listeners=[(heard := []).append])
    run.to_the_end()
    config = run.workload.config
    assert heard[0] == events.EngineStarted(
        config.num_blocks, config.num_swap_blocks, config.block_size, config.max_model_len
    )
    steps = [event.step for event in heard if isinstance(event, events.StepStarted)]
    assert steps == list(range(1, len(steps) + 1))
    assert [event.step for event in heard if isinstance(event, events.StepFinished)] == steps
