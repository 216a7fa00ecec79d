"""The engine's statistics are in its events: a recorded run gives them again, and the fold measures the same memory."""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from minipaged.engine.engine import Engine
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.engine.stats import Stats, stats_of
from minipaged.events import (
    Event,
    SequenceFinished,
    SequenceForked,
    StepFinished,
    StepScheduled,
    TokenGenerated,
    TokensComputed,
    read_jsonl,
)
from minipaged.params import EngineConfig, SamplingParams
from minipaged.replay.state import State
from minipaged.scheduling import RequestView
from tests.effort import one_case_in, quick_cases, scaled, seeds
from tests.engine.test_failure_injection import WORKLOADS, Fault, Fuse, wired
from tests.replay.test_state import ahead
from tests.workloads import Workload, WorkloadRequest, WorkloadRun, random_workload

ROOT = Path(__file__).parent.parent.parent
RECORDED = [
    script
    for folder in ("docs/runs", "tutorials")
    for script in sorted((ROOT / folder).glob("*.py"))
    if " as run:" in script.read_text()
]
"""What makes the recorded runs of the site."""


class Measure:
    """A listener that measures by the fold what the engine says that it has measured."""

    def __init__(self) -> None:
        self._state = State()
        self._generated = 0
        self._steps: Counter[int] = Counter()
        self._slots: Counter[int] = Counter()  # filled ones, summed over steps
        self._most: Counter[int] = Counter()
        self.num_compared = 0

    def __call__(self, event: Event) -> None:
        match event:
            case StepScheduled():
                assert event == self._scheduled(event.step)
                self.num_compared += 1
            case TokenGenerated():
                self._generated += 1
            case StepFinished():
                assert event.num_generated == self._generated
                self._generated = 0
            case TokensComputed():
                self._most[event.sequence] = max(self._most[event.sequence], event.num_tokens)
            case SequenceForked():
                self._most[event.child] = self._most[event.parent]
            case SequenceFinished():
                number = event.sequence
                reserved = self._steps[number] * self._most[number] - self._slots[number]
                assert event.slot_steps_reserved == reserved
        self._state.apply(event)

    def _scheduled(self, step: int) -> StepScheduled:
        device = self._state.device
        running = [sequence for request in self._state.running for sequence in request.sequences]
        for sequence in running:
            self._steps[sequence.number] += 1
            self._slots[sequence.number] += sequence.num_computed
        return StepScheduled(
            step,
            len(running),
            sum(sequence.num_computed for sequence in running),
            sum(len(sequence.table) for sequence in running),
            len(device.holders),
            self._state.num_cached_only,
            len(device.holders) * self._state.block_size - device.num_filled,
        )


def check(run: WorkloadRun) -> None:
    """After every call of the engine."""
    events: list[Event] = []
    counted, measure = Stats(), Measure()
    run.engine.listeners.extend([events.append, counted.on_event, measure])
    for now in range(1000):
        try:
            goes_on = run.advance(now)
        except Fault:
            goes_on = True
        if events:
            assert counted == run.engine.stats
        if not goes_on:
            break
    assert stats_of(read_jsonl(event.to_json() for event in events)) == run.engine.stats
    assert measure.num_compared >= run.engine.stats.steps


@one_case_in(3)
@scaled
@pytest.mark.parametrize("seeds", seeds(300, 50), ids=str)
def test_the_events_of_a_random_workload_give_the_engines_statistics_after_every_step(seeds: range) -> None:
    for seed in seeds:
        workload = random_workload(seed)
        try:
            check(WorkloadRun(workload))
            check(WorkloadRun(ahead(workload)))
        except Exception as error:
            error.add_note(f"in workload {seed}")
            raise


@quick_cases(8)
@one_case_in(4)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("part", ["allocate", "share", "copy_on_write", "swap out", "swap in", "forward", "fetch"])
def test_also_where_steps_fail(part: str, workload: Any) -> None:
    for number in range(1, 60, 9):
        check(wired(workload, Fuse(part, number)))
        check(wired(ahead(workload), Fuse(part, number)))


class PromptsFirst(FirstComeFirstServed):
    """Whoever decodes waits for whoever has a prompt to compute."""

    def share_tokens(self, running: Sequence[RequestView]) -> dict[str, int]:
        left, tokens = self.max_tokens, dict[str, int]()
        for request in sorted(running, key=lambda r: (r.decodes, self.turn(r))):
            given = 0 if request.decodes and request.tokens_to_run > left else min(request.tokens_to_run, left)
            tokens[request.request_id] = given
            left -= given
        return tokens


def test_also_where_samples_wait_with_a_block_that_they_share_and_have_not_filled() -> None:
    config = EngineConfig(num_blocks=40, block_size=4, max_model_len=40, vocab_size=11, max_num_batched_tokens=8)
    params = SamplingParams(n=4, max_tokens=6, seed=1, ignore_eos=True)
    requests = tuple(WorkloadRequest(0, (*range(length),), params) for length in (5, 11))
    run = WorkloadRun(Workload(config, requests, swap_is_cheap=False), policy=PromptsFirst)
    unfilled: list[int] = []
    run.engine.listeners.append(lambda e: unfilled.append(e.slots_unfilled) if isinstance(e, StepScheduled) else None)
    check(run)
    assert unfilled[1] == 3 + 1  # in the block of all four samples, and in the last of the other prompt


@pytest.mark.model
@quick_cases(7)
@one_case_in(4)
@pytest.mark.parametrize("script", RECORDED, ids=lambda script: script.stem)
def test_a_recorded_run_gives_its_engines_statistics(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[Stats, list[Event]]] = []  # and not the engines, each of which has a model
    make = Engine.__init__

    def listen(self: Engine, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        runs.append((self.stats, []))
        self.listeners.append(runs[-1][1].append)

    monkeypatch.setattr(Engine, "__init__", listen)
    runpy.run_path(str(script))
    heard = [(stats, events) for stats, events in runs if events]
    assert heard
    for stats, events in heard:
        assert stats_of(events) == stats
        assert stats_of(read_jsonl(event.to_json() for event in events)) == stats


def test_the_recorded_runs_are_found() -> None:
    assert len(RECORDED) >= 14
