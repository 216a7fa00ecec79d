"""The content oracle: random workloads through the engine, on a memory that remembers which tokens wrote each slot.

Every workload checks, in every step, content, exclusive-write, exact-references and conservation; and at its end that
every request has finished (liveness) with the tokens that it gets when it is served alone (scheduling-invariance).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from minipaged.engine import block_manager, launch, steady
from minipaged.engine.block_manager import BlockManager
from minipaged.engine.cached_blocks import Match
from minipaged.engine.engine import Engine
from minipaged.engine.prefix_cache import PrefixCache
from minipaged.engine.scheduler import Scheduler
from minipaged.engine.sequence import SequenceState
from minipaged.errors import Invariant, InvariantViolation
from minipaged.fast.cascade import shared_prefixes as fast_shared_prefixes
from minipaged.params import EngineConfig, SamplingParams
from minipaged.reference.block_table import BlockTable
from minipaged.reference.cascade import shared_prefixes
from minipaged.steps import BlockMoves
from minipaged.testing.content_runner import ContentRunner, GivenRow
from tests.effort import one_case_in, scaled, seeds, thorough
from tests.workloads import (
    REFERENCE,
    Workload,
    WorkloadRequest,
    WorkloadRun,
    find_a_failure,
    random_workload,
    run_workload,
)

EVERYTHING_THAT_CAN_HAPPEN = {
    "block copied",
    "block deduplicated",
    "block evicted",
    "block redundant",
    "block reused in part",
    "block taken over",
    "cancelled while running",
    "cancelled while swapped",
    "cancelled while waiting",
    "last block kept",
    "preempted by recompute",
    "preempted by swap",
    "prefix reused from cache",
    "prefix reused from sibling",
    "prompt computed in chunks",
    "request refused",
}


@one_case_in(4)
@scaled
@pytest.mark.parametrize("seeds", seeds(2000, 100), ids=str)
@pytest.mark.parametrize("steady", [True, False], ids=["steady", "straight"])
def test_every_invariant_holds_in_random_workloads(steady: bool, seeds: range) -> None:
    """Content, exclusive-write, exact-references, conservation, liveness, scheduling-invariance."""
    for seed in seeds:
        try:
            run_workload(seed, steady=steady)
        except Exception as error:
            error.add_note(f"Workload {seed}. To run it again: python -m tests.fuzz --seed {seed}")
            raise


RICH_WORKLOADS = (75, 134, 166, 227, 832, 1427)
"""In which everything that can happen has happened, when this was written: looked at first, because few others have
"cancelled while swapped"."""


def test_the_workloads_bring_about_everything_that_can_happen() -> None:
    """The oracle must not become empty: each of these happens in several of its workloads."""
    workloads_with: Counter[str] = Counter()
    for seed in dict.fromkeys((*RICH_WORKLOADS, *range(2000))):
        run = WorkloadRun(random_workload(seed))
        run.to_the_end()
        workloads_with.update(set(run.happened))
        if workloads_with.keys() >= EVERYTHING_THAT_CAN_HAPPEN and min(workloads_with.values()) >= 2:
            break
    assert workloads_with.keys() == EVERYTHING_THAT_CAN_HAPPEN
    assert min(workloads_with.values()) >= 2, workloads_with


def test_the_engine_checks_its_invariants_at_every_step_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `debug`, which all of them ask for."""
    checked, right = list[Engine](), Engine.check_invariants

    def check(self: Engine) -> None:
        checked.append(self)
        right(self)

    monkeypatch.setattr(Engine, "check_invariants", check)
    run = WorkloadRun(random_workload(RICH_WORKLOADS[0]))
    run.to_the_end()
    assert len(checked) >= run.engine.stats.steps > 10


# --- The rows of a step do not depend on each other -----------------------------------------------


class OneByOne(ContentRunner):
    """Runs each row of a step through the whole model before the next one, the last row first or the first."""

    def compute(self, rows: Sequence[GivenRow]) -> np.ndarray:
        backwards = self.mirror.rows.number % 2
        parts = [super(OneByOne, self).compute([row]) for row in (reversed(rows) if backwards else rows)]
        return np.concatenate(parts[::-1] if backwards else parts)


def run_with(make_runner: type[ContentRunner], seed: int) -> None:
    """Every other one with steps in flight, so that a step is planned before the one before it is committed; and of
    both kinds every other one without the short way."""
    workload = random_workload(seed)
    config = replace(workload.config, async_scheduling=bool(seed % 2))
    run = WorkloadRun(replace(workload, config=config), make_runner=make_runner, steady=seed % 4 < 2)
    run.to_the_end()
    run.check_outputs()


@thorough
@one_case_in(4)
@scaled
@pytest.mark.parametrize("seeds", seeds(1000, 100, least=100, tried=False), ids=str)
def test_no_row_reads_what_another_row_writes_in_the_same_step(seeds: range) -> None:
    """So a runner may run some of them first. What the prefix cache and siblings offer was computed in steps before;
    a shared block that is written into was copied before the pass."""
    for seed in seeds:
        try:
            run_with(OneByOne, seed)
        except Exception as error:
            error.add_note(f"in workload {seed}")
            raise


def test_a_row_that_reads_what_another_one_writes_in_the_same_step_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks that are offered as soon as they are taken; where all rows write before any reads, as within one layer,
    some workloads go through all the same. (Exclusive-write, which finds that too, is not looked at here.)"""
    right = BlockManager.append

    def append(self: BlockManager, sequence: SequenceState, num_tokens: int) -> None:
        right(self, sequence, num_tokens)
        if sequence.table.num_tokens <= len(sequence.tokens):
            self.publish(sequence, sequence.table.num_tokens)

    def goes_through(make_runner: type[ContentRunner], seed: int) -> bool:
        try:
            run_with(make_runner, seed)
        except InvariantViolation as error:
            return error.invariant is not Invariant.CONTENT
        return True

    monkeypatch.setattr(BlockManager, "append", append)
    for module in (launch, steady):
        monkeypatch.setattr(module, "check_exclusive_writes", lambda work, blocks: None)
    assert any(goes_through(ContentRunner, seed) and not goes_through(OneByOne, seed) for seed in range(100))


@pytest.mark.parametrize("steady", [True, False], ids=["steady", "straight"])
def test_each_position_is_looked_up_in_the_table(steady: bool) -> None:
    """On the short way too, where the table gets the slot of position 40 together with others."""

    class Elsewhere(BlockTable):
        def slot_mapping(self, start: int, stop: int) -> list[int]:
            slots = super().slot_mapping(start, stop)
            return [slot + (position == 40) for position, slot in enumerate(slots, start)]

    config = EngineConfig(num_blocks=8, max_model_len=64, vocab_size=11)
    request = WorkloadRequest(0, (1, 2, 3), SamplingParams(max_tokens=60, ignore_eos=True))
    run = WorkloadRun(
        Workload(config, (request,), swap_is_cheap=True), replace(REFERENCE, block_table=Elsewhere), steady=steady
    )
    with pytest.raises(InvariantViolation, match=r"positions .* cannot be in slots"):
        run.to_the_end()
    assert 40 < len(run.engine.scheduler.waiting[0].sequences[0].tokens) <= 49


# --- Blocks that are read once for several rows ---------------------------------------------------


class SharedReader(ContentRunner):
    """Reads the blocks that rows of one token share in the table of the first of them."""

    def compute(self, rows: Sequence[GivenRow]) -> np.ndarray:
        tables, decoding = [row.blocks for row in rows], [i for i, row in enumerate(rows) if len(row.token_ids) == 1]
        lens = [len(rows[i].tokens_before) + 1 for i in decoding]
        for members, num_blocks in self.find_prefixes([tables[i] for i in decoding], lens) if decoding else ():
            for member in members[1:]:
                first, own = decoding[members[0]], decoding[member]
                tables[own] = [*tables[first][:num_blocks], *tables[own][num_blocks:]]
        return super().compute([replace(row, blocks=table) for row, table in zip(rows, tables, strict=True)])

    def find_prefixes(self, tables: Sequence[list[int]], lens: list[int]) -> list[tuple[list[int], int]]:
        padded = np.full((len(tables), max(map(len, tables))), -1, np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        found = shared_prefixes(padded, np.array(lens), self.block_size)
        return [(members.tolist(), num_blocks) for members, num_blocks in found]


class FastSharedReader(SharedReader):
    def find_prefixes(self, tables: Sequence[list[int]], lens: list[int]) -> list[tuple[list[int], int]]:
        width = max(map(len, tables))
        padded = torch.tensor([[*table, *[-1] * (width - len(table))] for table in tables], dtype=torch.int32)
        shared = fast_shared_prefixes(padded, torch.tensor(lens, dtype=torch.int32), self.block_size)
        if shared is None:
            return []
        members, starts, num_tokens = (each.tolist() for each in shared)
        return [(members[a:z], n // self.block_size) for (a, z), n in zip(pairwise(starts), num_tokens, strict=True)]


@scaled
@pytest.mark.parametrize("make_runner", [SharedReader, FastSharedReader])
@pytest.mark.parametrize("seeds", seeds(100, 50), ids=str)
def test_blocks_are_read_once_only_for_rows_that_begin_with_them(make_runner: type[SharedReader], seeds: range) -> None:
    for seed in seeds:
        try:
            run_with(make_runner, seed)
        except Exception as error:
            error.add_note(f"in workload {seed}")
            raise


right_prefixes = SharedReader.find_prefixes


def one_block_more(self: SharedReader, tables: Sequence[list[int]], lens: list[int]) -> list[tuple[list[int], int]]:
    """The block in which the tables differ, too, where all have one."""
    whole = [(length - 1) // self.block_size for length in lens]
    found = right_prefixes(self, tables, lens)
    return [(members, min(num_blocks + 1, *(whole[i] for i in members))) for members, num_blocks in found]


def by_reference_counts(
    self: SharedReader, tables: Sequence[list[int]], lens: list[int]
) -> list[tuple[list[int], int]]:
    """Prefixes found as if a block that n sequences hold were held by any n sequences of the batch."""
    assert self.engine is not None
    counts = [[self.engine.blocks.allocator.ref_count(block) for block in table] for table in tables]
    common = [i for i, row in enumerate(counts) if row[0] == len(tables) and lens[i] > self.block_size]
    return [(common, 1)] if len(common) > 1 else []


@pytest.mark.parametrize("wrong", [one_block_more, by_reference_counts])
def test_the_oracle_finds_a_cascade_over_tables_that_differ_in_one_block(
    wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedReader, "find_prefixes", wrong)

    def fails(seed: int) -> bool:
        try:
            run_with(SharedReader, seed)
        except InvariantViolation as error:
            return error.invariant is Invariant.CONTENT
        return False

    assert any(fails(seed) for seed in range(500))


# --- Bugs that the oracle must find ---------------------------------------------------------------


def test_the_oracle_finds_a_prefix_hit_that_stays_evictable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in nano-vllm once: a hit on a block that nobody used was handled like a fresh allocation."""
    monkeypatch.setattr(PrefixCache, "reused", lambda self, blocks: None)
    find_a_failure()


def test_the_oracle_finds_a_new_block_decided_by_remainder(monkeypatch: pytest.MonkeyPatch) -> None:
    """`len(seq) % block_size == 1` for "needs a block": right for one token, no sharing and blocks of two or more."""
    right = BlockTable.blocks_needed

    def by_remainder(self: BlockTable, num_new_tokens: int) -> int:
        if num_new_tokens != 1:
            return right(self, num_new_tokens)
        return int((self.num_tokens + 1) % self.block_size == 1)

    monkeypatch.setattr(BlockTable, "blocks_needed", by_remainder)
    find_a_failure()


def test_the_oracle_finds_a_skipped_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ContentRunner.move

    def without_copies(self: ContentRunner, moves: BlockMoves) -> None:
        right(self, moves._replace(copy=()))

    monkeypatch.setattr(ContentRunner, "move", without_copies)
    find_a_failure()


def test_the_oracle_finds_swapped_blocks_that_come_back_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ContentRunner.move

    def reversed_swap_in(self: ContentRunner, moves: BlockMoves) -> None:
        hosts = [host for host, _ in moves.swap_in]
        swapped = zip(reversed(hosts), [device for _, device in moves.swap_in], strict=True)
        right(self, moves._replace(swap_in=tuple(swapped)))

    monkeypatch.setattr(ContentRunner, "move", reversed_swap_in)
    find_a_failure()


def test_the_oracle_finds_a_lookup_that_trusts_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash of few values, a match that does not compare tokens leads to other sequences' K/V."""

    def trusting(self: PrefixCache, tokens: list[int]) -> Match:
        found, key = [], 0
        for end in range(self.block_size, len(tokens), self.block_size):
            key = self._chain_hash(key, tuple(tokens[end - self.block_size : end]))
            if key not in self._entries:
                break
            found.append(self._entries[key].block)
        return Match(found, len(found) * self.block_size)

    def poor_cache(block_size: int, allocator: object) -> PrefixCache:
        return PrefixCache(block_size, allocator, chain_hash=lambda parent, tokens: (parent + sum(tokens)) % 16)  # type: ignore[arg-type]

    monkeypatch.setattr(block_manager, "PrefixCache", poor_cache)
    for seed in range(100):
        run_workload(seed)  # a poor hash alone is harmless
    monkeypatch.setattr(PrefixCache, "match", trusting)
    find_a_failure()


def test_the_oracle_finds_a_fork_that_takes_no_references(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork_without_references(self: BlockTable) -> BlockTable:
        child = BlockTable(self.block_size, self._allocator)
        child._blocks, child._num_tokens = list(self._blocks), self._num_tokens
        return child

    monkeypatch.setattr(BlockTable, "fork", fork_without_references)
    find_a_failure()


def test_the_oracle_finds_dropped_beams_that_keep_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    right = BlockManager.free

    def forgets_dropped_beams(self: BlockManager, sequence: SequenceState) -> None:
        if sequence.finish_reason != "dropped":
            right(self, sequence)

    monkeypatch.setattr(BlockManager, "free", forgets_dropped_beams)
    find_a_failure()


def test_the_oracle_finds_a_request_that_is_preempted_but_not_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liveness."""

    right = Scheduler._preempt

    def loses_it(self: Scheduler, short: int) -> None:
        ran = list(self.running)
        right(self, short)
        [victim] = [request for request in ran if request not in self.running]
        self.waiting.remove(victim)

    monkeypatch.setattr(Scheduler, "_preempt", loses_it)
    monkeypatch.setattr(WorkloadRun.to_the_end, "__defaults__", (300,))
    find_a_failure()


def test_the_oracle_finds_a_write_into_a_shared_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exclusive-write: a table that writes into its last block whoever else holds it."""
    monkeypatch.setattr(BlockTable, "_writes_into_shared_block", lambda self, num_new_tokens: False)
    seed = find_a_failure()
    with pytest.raises(InvariantViolation, match="exclusive-write"):
        run_workload(seed)
