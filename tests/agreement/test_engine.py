"""Whole engines on random workloads: with either tier's parts, the same plans, events and tokens, step by step."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from minipaged.events import Event
from tests.effort import one_case_in, scaled, seeds
from tests.workloads import FAST, REFERENCE, WorkloadRun, random_workload, run_workload


@one_case_in(3)
@scaled
@pytest.mark.parametrize("seeds", seeds(300, 50), ids=str)
def test_both_tiers_go_through_the_same_events(seeds: range) -> None:
    """Every block number of every allocation, copy, swap and eviction is in the events, and so is every plan; also if
    the engine takes no short way.

    Every other workload runs without debugging: with it, a guard around the allocator takes its batched calls apart.
    """
    for seed in seeds:
        workload = random_workload(seed)
        workload = replace(workload, config=replace(workload.config, debug=seed % 2 == 0))
        told: list[list[Event]] = []
        for tier, steady in product((REFERENCE, FAST), (False, True)):
            told.append([])
            run = WorkloadRun(workload, tier, listeners=[told[-1].append], steady=steady)
            now = 0
            while run.advance(now):
                now += 1
        for number, (first, *others) in enumerate(zip(*told, strict=True)):
            assert others == [first] * 3, f"workload {seed}, event {number}"


@one_case_in(3)
@scaled
@pytest.mark.parametrize("seeds", seeds(300, 50, first=10_000), ids=str)
@pytest.mark.parametrize("steady", [True, False], ids=["steady", "straight"])
def test_every_invariant_holds_with_the_fast_tiers_parts(steady: bool, seeds: range) -> None:
    """Content, exclusive-write, exact-references, conservation, liveness, scheduling-invariance."""
    for seed in seeds:
        run_workload(seed, FAST, steady=steady)
