"""Whole engines on random workloads: with either tier's parts, the same plans, events and tokens, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minipaged.events import Event
from tests.effort import one_case_in, scaled, seeds
from tests.workloads import FAST, REFERENCE, Run, random_workload, run_workload


@one_case_in(3)
@scaled
@pytest.mark.parametrize("seeds", seeds(300, 50), ids=str)
def test_both_tiers_go_through_the_same_events(seeds: range) -> None:
    """Every block number of every allocation, copy, swap and eviction is in the events, and so is every plan.

    Every other workload runs without debugging: with it, a guard around the allocator takes its batched calls apart.
    """
    for seed in seeds:
        workload = random_workload(seed)
        workload = replace(workload, config=replace(workload.config, debug=seed % 2 == 0))
        told: dict[str, list[Event]] = {}
        for tier in (REFERENCE, FAST):
            told[tier.name] = []
            run = Run(workload, tier, listeners=[told[tier.name].append])
            now = 0
            while run.advance(now):
                now += 1
        for step, (reference, fast) in enumerate(zip(told["reference"], told["fast"], strict=True)):
            assert reference == fast, f"workload {seed}, event {step}"


@one_case_in(3)
@scaled
@pytest.mark.parametrize("seeds", seeds(300, 50, first=10_000), ids=str)
def test_every_invariant_holds_with_the_fast_tiers_parts(seeds: range) -> None:
    """Content, exclusive-write, exact-references, conservation, liveness, scheduling-invariance."""
    for seed in seeds:
        run_workload(seed, FAST)
