"""Models whose layers are in groups, some with a window: the content oracle knows groups and windows.

Every workload checks that each group reads what it should see (content), and, after each step, that a sequence holds
exactly the blocks that its groups see from its next token on (window-content).
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from minipaged.contracts import BlockAllocator
from minipaged.engine import engine, grouped_prefix_cache
from minipaged.engine.cached_blocks import Node
from minipaged.engine.grouped_memory import GroupedBlockManager, blocks_alone, most_at_once
from minipaged.engine.grouped_prefix_cache import GroupedPrefixCache
from minipaged.engine.grouped_table import GroupedTable
from minipaged.engine.sequence import Request, SequenceState
from minipaged.errors import Invariant, InvariantViolation
from minipaged.events import HOLE
from minipaged.params import BeamSearchParams, EngineConfig, SamplingParams
from tests.effort import quick_cases, scaled, seeds
from tests.engine.test_failure_injection import Fault, Fuse, wired
from tests.workloads import Workload, WorkloadRequest, WorkloadRun, windowed


def run_windowed(seed: int, make: Callable[[int], Workload] = windowed) -> WorkloadRun:
    run = WorkloadRun(make(seed))
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


@scaled
@pytest.mark.parametrize("seeds", seeds(1000, 50), ids=str)
def test_every_invariant_holds_where_a_request_hardly_fits(seeds: range) -> None:
    """In pools of one to two times what the longest request holds at a time."""
    for seed in seeds:
        try:
            run_windowed(seed, tight)
        except Exception as error:
            error.add_note(f"tight workload {seed}")
            raise


def tight(seed: int) -> Workload:
    r = random.Random(f"tight {seed}")
    groups = r.choice([(None, 3, 3), (None, 2), (5,), (7, 2), (None, None, 4), (None, 4, 4, 4), (None, 1)])
    chunk, block_size, async_scheduling = r.choice([4, 8, 16, 64]), r.choice([1, 2, 2, 3, 4]), r.random() < 0.4
    alone = blocks_alone(groups, 64, block_size, most_at_once(chunk, async_scheduling))
    config = EngineConfig(
        num_blocks=round(alone * r.choice([1, 1, 1.1, 1.5, 2])),
        num_swap_blocks=r.choice([0, 100, 300]),
        block_size=block_size,
        max_model_len=64,
        vocab_size=11,
        enable_prefix_caching=r.random() < 0.7,
        max_num_seqs=r.choice([4, 8]),
        max_num_batched_tokens=chunk,
        group_windows=groups,
        async_scheduling=async_scheduling,
        pipeline_parallel_size=r.choice([1, 1, 3]),
        debug=True,
        seed=seed,
    )
    stem = tuple(r.randrange(1, 11) for _ in range(50))
    requests: list[WorkloadRequest] = []
    for _ in range(r.randint(2, 9)):
        prompt = r.choice([(), stem[: r.randint(1, 50)]]) + tuple(r.randrange(1, 11) for _ in range(r.randint(1, 9)))
        most = r.randint(1, max(1, 64 - len(prompt)))
        params: SamplingParams | BeamSearchParams = SamplingParams(
            temperature=r.choice([0, 1]), n=r.choice([1, 1, 1, 2]), seed=seed, max_tokens=most, ignore_eos=True
        )
        if r.random() < 0.15:
            params = BeamSearchParams(beam_width=r.randint(2, 3), max_tokens=min(most, 8), ignore_eos=True)
        requests.append(WorkloadRequest(r.choice([0, 0, r.randint(0, 30)]), prompt, params))
    return Workload(config, tuple(requests), swap_is_cheap=r.random() < 0.7)


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

    def match(self: GroupedPrefixCache, tokens: Sequence[int], found: list[Node] | None = None) -> list[int]:
        entries = right(self, tokens, found)
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


def first_broken(seeds: range) -> Invariant | None:
    """The invariant that the first of these workloads to break one breaks."""
    for seed in seeds:
        try:
            run_windowed(seed)
        except InvariantViolation as violation:
            return violation.invariant
    return None


@pytest.mark.parametrize(
    ("plant", "broken"),
    [
        (given_back_too_early, Invariant.CONTENT),
        (given_back_too_late, Invariant.WINDOW_CONTENT),
        (the_window_of_another_group, Invariant.CONTENT),
        (the_block_of_another_group, Invariant.CONTENT),
        (a_hit_without_its_window, Invariant.CONTENT),
        (a_hole_is_read, Invariant.CONTENT),
        (given_back_while_a_sibling_waits, Invariant.CONTENT),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_oracle_finds(
    plant: Callable[[pytest.MonkeyPatch], None], broken: Invariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 500 workloads: by what is read, where something is read; each is also a violation of window-content."""
    plant(monkeypatch)
    if broken is Invariant.CONTENT:
        monkeypatch.setattr(engine, "check_windows", lambda *arguments: None)
    assert first_broken(range(500)) is broken
