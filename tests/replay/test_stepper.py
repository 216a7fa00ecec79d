"""The stepper's fold, in JavaScript, is the project's: on random runs, and on those that the bug museum shows."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from minipaged import SamplingParams
from minipaged.events import BlocksRolledBack, Event
from minipaged.stepper import Recording, Storyteller
from minipaged.testing.content_runner import Prefixes
from tests.effort import scaled, seeds
from tests.engine.test_drafts import Guesses
from tests.engine.test_failure_injection import WORKLOADS, Fault, Fuse, wired
from tests.engine.test_floors import floored
from tests.handover.oracle import InMemory, connected_run
from tests.handover.test_engine import cached_workload
from tests.javascript import check_folds_agree
from tests.workloads import WorkloadRun, random_workload, windowed

RUNS = Path(__file__).parent.parent.parent / "docs" / "runs"
RECORDED = [script for script in sorted(RUNS.glob("*.py")) if re.search(r"\bas run:", script.read_text())]
"""The museum's; those of the tutorials are in tests/site."""


@scaled
@pytest.mark.parametrize("seeds", seeds(30, 10), ids=str)
def test_at_every_step_of_random_runs_the_stepper_knows_what_the_events_say(seeds: range) -> None:
    runs: list[list[Event]] = []
    for seed in seeds:
        runs.append([])
        WorkloadRun(random_workload(seed), listeners=[runs[-1].append]).to_the_end()
    assert max(map(len, runs)) > 200  # events, so that some states were kept
    check_folds_agree(runs)


def test_and_where_layers_are_in_groups() -> None:
    runs: list[list[Event]] = []
    for seed in (2, 9, 17, 21, 37):
        runs.append([])
        WorkloadRun(windowed(seed), listeners=[runs[-1].append]).to_the_end()
    names = {event.name for run in runs for event in run}
    assert {"blocks_passed", "block_cached", "block_copied", "prefix_reused"} <= names
    check_folds_agree(runs)


def test_and_where_drafted_tokens_are_rolled_back() -> None:
    runs: list[list[Event]] = []
    for seed in (1, 4, 6):
        runs.append([])
        workload = random_workload(seed)
        WorkloadRun(workload, drafts=Guesses(workload, seed), listeners=[runs[-1].append]).to_the_end()
    assert any(isinstance(event, BlocksRolledBack) and event.blocks for run in runs for event in run)
    check_folds_agree(runs)


def test_and_where_tables_with_holes_are_swapped_out() -> None:
    heard: list[Event] = []
    model = Storyteller(["one two three four five six seven eight"])
    engine = model.engine(
        num_blocks=10, block_size=2, num_swap_blocks=12, preemption="swap", max_model_len=8, group_windows=(None, 3)
    )
    engine.listeners.append(heard.append)
    for _ in range(2):
        engine.add_request(model.encode("one two three"), SamplingParams(max_tokens=5))
    while engine.has_unfinished_requests():
        engine.step()
    passed, swapped = ([event.name for event in heard].index(name) for name in ("blocks_passed", "swapped_out"))
    assert passed < swapped
    check_folds_agree([heard])


@pytest.mark.parametrize(("part", "number"), [("forward", 3), ("allocate", 9), ("swap in", 1)])
def test_and_where_steps_fail(part: str, number: int) -> None:
    runs: list[list[Event]] = []
    for workload in WORKLOADS.values():
        run = wired(workload, Fuse(part, number))
        runs.append([])
        run.engine.listeners.append(runs[-1].append)
        for now in range(1000):
            try:
                if not run.advance(now):
                    break
            except Fault:
                pass
    assert any(event.name == "step_failed" for run in runs for event in run)
    check_folds_agree(runs)


def test_and_where_blocks_come_from_another_engine() -> None:
    runs: list[list[Event]] = []
    for seed in (4, 8, 105):
        workload, prefixes = cached_workload(seed), Prefixes()
        connector = InMemory(workload.config.block_size)
        for _ in range(2):
            runs.append([])
            connected_run(workload, connector, prefixes, listeners=[runs[-1].append]).to_the_end()
    assert any(event.name == "blocks_loaded" for run in runs for event in run)
    check_folds_agree(runs)


def test_and_where_blocks_come_back_from_the_host() -> None:
    runs: list[list[Event]] = []
    for seed in range(4, 24, 2):
        runs.append([])
        WorkloadRun(floored(seed), listeners=[runs[-1].append]).to_the_end()
    assert any(event.name == "blocks_promoted" for run in runs for event in run)
    check_folds_agree(runs)


@pytest.mark.parametrize("script", RECORDED, ids=lambda script: script.stem)
def test_a_recorded_run_is_followed_in_the_same_way(script: Path) -> None:
    recording = runpy.run_path(str(script))["run"]
    assert isinstance(recording, Recording)
    check_folds_agree([recording.events])


def test_the_recorded_runs_are_found() -> None:
    assert len(RECORDED) >= 6
