"""Models whose layers are in groups, some with a window: the content oracle knows groups and windows.

Every workload checks that each group reads what it should see (content), and, after each step, that a sequence holds
exactly the blocks that its groups see from its next token on (window-content).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from minipaged.contracts import BlockAllocator
from minipaged.engine import grouped_prefix_cache
from minipaged.engine.grouped_memory import GroupedBlockManager
from minipaged.engine.grouped_prefix_cache import GroupedPrefixCache
from minipaged.engine.grouped_table import GroupedTable
from minipaged.engine.sequence import Request, SequenceState
from minipaged.errors import InvariantViolation
from minipaged.events import HOLE
from tests.effort import quick_cases, scaled, seeds
from tests.engine.test_failure_injection import Fault, Fuse, wired
from tests.workloads import WorkloadRun, windowed


def run_windowed(seed: int) -> WorkloadRun:
    run = WorkloadRun(windowed(seed))
    run.to_the_end()
    run.check_outputs()
    run.check_nothing_leaked()
    return run


@scaled
@pytest.mark.parametrize("seeds", seeds(2000, 100), ids=str)
def test_every_invariant_holds_in_random_workloads(seeds: range) -> None:
    """Content, window-content, exclusive-write, exact-references, conservation, liveness, scheduling-invariance."""
    for seed in seeds:
        try:
            run_windowed(seed)
        except Exception as error:
            error.add_note(f"workload {seed}")
            raise


EVERYTHING_THAT_CAN_HAPPEN = {
    "block copied",
    "block deduplicated",
    "block evicted",
    "blocks passed",
    "preempted by recompute",
    "preempted by swap",
    "prefix reused from cache",
    "prefix reused from sibling",
    "prompt computed in chunks",
}


def test_the_workloads_bring_about_everything_that_can_happen() -> None:
    """The oracle must not become empty."""
    happened: Counter[str] = Counter()
    for seed in range(500):
        run = WorkloadRun(windowed(seed))
        run.to_the_end()
        happened.update(set(run.happened))
        if min(happened[kind] for kind in EVERYTHING_THAT_CAN_HAPPEN) >= 2:
            return
    raise AssertionError(f"{happened}")


@quick_cases(2)
@pytest.mark.parametrize("part", ["allocate", "share", "swap out", "swap in", "forward", "sample"])
def test_an_error_anywhere_costs_time_and_nothing_else(part: str) -> None:
    for seed in range(40):
        fuse = Fuse(part, 1 + seed % 9)
        run, now = wired(windowed(seed), fuse), 0
        goes_on = True
        while goes_on:
            assert now < 2000, "liveness"
            try:
                goes_on = run.advance(now)
            except Fault:
                run.engine.check_invariants()
            now += 1
        run.check_outputs()
        run.check_nothing_leaked()


# --- Planted bugs -----------------------------------------------------------------------------------


def given_back_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GroupedTable.give_back
    monkeypatch.setattr(GroupedTable, "give_back", lambda table, position: right(table, position + 1))


def given_back_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GroupedTable.give_back
    monkeypatch.setattr(GroupedTable, "give_back", lambda table, position: right(table, position - 1))


def the_window_of_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GroupedTable.__init__

    def make(self: GroupedTable, block_size: int, allocator: BlockAllocator, windows: Sequence[int | None]) -> None:
        right(self, block_size, allocator, windows[::-1])

    monkeypatch.setattr(GroupedTable, "__init__", make)


def the_block_of_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit puts a node's blocks into the entries of the wrong groups."""
    right = GroupedPrefixCache.match

    def match(self: GroupedPrefixCache, tokens: Sequence[int]) -> list[int]:
        entries = right(self, tokens)
        return [*entries[1:], entries[0]] if entries and HOLE not in entries else entries

    monkeypatch.setattr(GroupedPrefixCache, "match", match)


def a_hit_without_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit is accepted as soon as the last block is there, and with it the holes before."""
    monkeypatch.setattr(grouped_prefix_cache, "first_seen", lambda window, position: max(0, position - 1))


def a_hole_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sequence shares of a sibling has one hole too many."""
    right = GroupedBlockManager._seen_after

    def seen(self: GroupedBlockManager, entries: Sequence[int]) -> list[int]:
        return [HOLE, *right(self, entries)[1:]]

    monkeypatch.setattr(GroupedBlockManager, "_seen_after", seen)


def given_back_while_a_sibling_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GroupedBlockManager.give_back

    def give_back(self: GroupedBlockManager, request: Request, sequence: SequenceState, num_computed: int) -> None:
        right(self, replace_sequences(request, sequence), sequence, num_computed)

    def replace_sequences(request: Request, sequence: SequenceState) -> Request:
        alone = copy.copy(request)
        alone.sequences = [sequence]
        return alone

    monkeypatch.setattr(GroupedBlockManager, "give_back", give_back)


BUGS = (
    given_back_too_early,
    given_back_too_late,
    the_window_of_another_group,
    the_block_of_another_group,
    a_hit_without_its_window,
    a_hole_is_read,
    given_back_while_a_sibling_waits,
)


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_the_oracle_finds(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 500 workloads."""
    plant(monkeypatch)
    for seed in range(500):
        try:
            run_windowed(seed)
        except (InvariantViolation, AssertionError, IndexError):
            return
    raise AssertionError("not found")
