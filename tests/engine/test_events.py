"""Events as JSON, and which of them a run has. (That they are complete is tested in tests/replay.)"""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged import events
from minipaged.events import EVENT_TYPES, Event, from_json, read_jsonl
from tests.effort import examples
from tests.workloads import WorkloadRun, random_workload

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
    assert json.loads(line) == {"event": "block_evicted", "block": 3, "reason": "room"}


def test_a_file_of_events_is_read_back_line_by_line() -> None:
    run = WorkloadRun(random_workload(3), listeners=[(heard := []).append])
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


# --- A run's events ------------------------------------------------------------------------------


def test_every_kind_of_event_occurs() -> None:
    """Otherwise the fold (tests/replay) would not have been tested on it."""
    # Those are in the runs with faults, and these in those of several engines (tests/handover).
    seen: set[str] = {"step_failed", "blocks_stored", "blocks_loaded"}
    seen |= {"block_demoted", "blocks_promoted", "host_block_dropped"}  # and these in tests/engine/test_floors.py
    seen |= {"blocks_passed"}  # and this in tests/engine/test_windows.py
    seen |= {"tokens_drafted", "tokens_accepted", "blocks_rolled_back"}  # and these in tests/engine/test_drafts.py
    for seed in range(300):
        run = WorkloadRun(random_workload(seed), listeners=[lambda event: seen.add(event.name)])
        run.to_the_end()
        if seen == set(EVENT_TYPES):
            return
    assert seen == set(EVENT_TYPES)


def test_the_first_event_tells_the_sizes_and_steps_are_numbered_from_one() -> None:
    run = WorkloadRun(random_workload(0), listeners=[(heard := []).append])
    run.to_the_end()
    config = run.workload.config
    assert heard[0] == events.EngineStarted(
        config.num_blocks, config.num_swap_blocks, config.block_size, config.max_model_len
    )
    steps = [event.step for event in heard if isinstance(event, events.StepStarted)]
    assert steps == list(range(1, len(steps) + 1))
    assert [event.step for event in heard if isinstance(event, events.StepFinished)] == steps
