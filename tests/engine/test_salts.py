"""Salts: requests with different ones never share a cached block, in whichever way blocks are found.

No test here looks at a clock. What is looked at are blocks and hits, and what the content oracle finds in memory: it
takes a slot that a request of another salt has written for a wrong one.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.engine import arrivals, block_manager, commit, floors, sequence
from minipaged.engine.grouped_prefix_cache import GroupedPrefixCache
from minipaged.engine.prefix_cache import PrefixCache
from minipaged.errors import InvalidRequest, Invariant, InvariantViolation
from minipaged.events import (
    BlockCached,
    BlocksLoaded,
    BlocksPromoted,
    Event,
    PrefixReused,
    RequestArrived,
    SequenceForked,
)
from minipaged.handover.block_hashes import block_hashes, salt_number, salted, token_bytes
from minipaged.params import BeamSearchParams, SamplingParams
from minipaged.testing.content_runner import Prefixes
from minipaged.testing.workloads import with_salts
from tests.effort import one_case_in, scaled, seeds
from tests.engine.test_disk_floor import DiskInMemory, disk_run
from tests.engine.test_floors import TIER as FLOORS
from tests.engine.test_floors import floored
from tests.engine.test_partial_hits import ONE, Served
from tests.handover.oracle import InMemory, connected_run
from tests.handover.test_engine import cached_workload
from tests.late_device import LATE, LateRunner
from tests.workloads import FAST, REFERENCE, WorkloadRequest, WorkloadRun, random_workload, windowed

PROMPT = range(1, 14)  # in blocks of 4: three full blocks and a token
SALTS = (None, "a", "b")
PAIRS = list(product(SALTS, SALTS))
SAMPLES = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=7, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=7, ignore_eos=True)

some_salts = st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
some_tokens = st.lists(st.integers(0, 3), max_size=9)


# --- Tokens by which blocks are named ---------------------------------------------------------------


@given(some_tokens, some_salts, some_tokens, some_salts)
def test_equal_names_mean_equal_tokens_and_equal_salts(
    one: list[int], salt: str | None, other: list[int], other_salt: str | None
) -> None:
    mine, theirs = salted(one, salt_number(salt)), salted(other, salt_number(other_salt))
    same = one == other and (salt == other_salt or not one)
    assert (list(mine) == list(theirs)) == same
    assert (token_bytes(mine) == token_bytes(theirs)) == same
    assert (block_hashes(mine, 2) == block_hashes(theirs, 2)) == (
        one[: len(one) // 2 * 2] == other[: len(other) // 2 * 2] and (salt == other_salt or len(one) < 2)
    )


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_without_a_salt_names_are_as_they_were(tokens: list[int]) -> None:
    """Digests of tokens without a salt are those of earlier versions, whose blocks are found by them."""
    assert salted(tokens, 0) is tokens
    assert token_bytes(tokens) == array("q", tokens).tobytes()


def test_the_name_of_a_salt_stays_the_same() -> None:
    """It is part of the names and digests of stored files."""
    assert salt_number(None) == 0
    assert salt_number("tenant") == 0xA4C530B42F6F981D22D3F538590C0EA9 << 64


# --- Invalid salts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("salt", "message"),
    [
        (7, "cache_salt is of type int; requests share .* so give a text, or leave it out"),
        (b"a", "cache_salt is of type bytes"),
        (False, "cache_salt is of type bool"),
        ("", "cache_salt has 0 characters, and 1 to 1,024 are taken; .* or leave it out"),
        ("x" * 1025, "cache_salt has 1,025 characters, and 1 to 1,024 are taken"),
        ("ok\ud800", r"cache_salt has half of a character at place 2 \('\\ud800'\), which UTF-8 cannot write; leave"),
    ],
)
def test_an_invalid_salt_is_refused_with_the_reason(salt: Any, message: str) -> None:
    served = Served()
    with pytest.raises(InvalidRequest, match=message):
        served.add(PROMPT, cache_salt=salt)
    assert served.engine.stats.prefix_cache_salts == 0
    served.serve(PROMPT, cache_salt="x" * 1024)


def test_different_salts_are_counted_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MOST_SALTS", 3)
    served, counted = Served(), []
    for salt in (None, "a", "b", "a", None, "c", "d", "e"):
        served.serve(PROMPT, cache_salt=salt)
        counted.append(served.engine.current_stats().prefix_cache_salts)
    assert counted == [0, 1, 2, 2, 2, 3, 3, 3]


# --- Hits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [REFERENCE, FAST], ids=["reference", "fast"])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_only_the_same_salt_finds_full_blocks(tier: Any, first: str | None, second: str | None) -> None:
    served = Served(tier=tier)
    served.serve(PROMPT, cache_salt=first)
    assert served.serve(PROMPT, cache_salt=second).num_cached_tokens == (12 if first == second else 0)
    hashes = [event.block_hash for event in served.of(BlockCached) if event.block_hash]
    assert len(hashes) == len(set(hashes)) == (3 if first == second else 6)


@pytest.mark.parametrize("tier", [REFERENCE, FAST], ids=["reference", "fast"])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_only_the_same_salt_finds_a_part_of_a_block(tier: Any, first: str | None, second: str | None) -> None:
    """In a block after others, in a first block, and in the last block of a request that has ended."""
    for others, part in ((PROMPT, [1, 2, 3, 4, 5, 6, 30, 31]), (PROMPT, [1, 2, 30]), ([1, 2, 3], [1, 2, 3, 30])):
        served = Served(tier=tier)
        served.serve(others, cache_salt=first)
        found = len([token for token in part if token < 30]) if first == second else 0
        assert served.serve(part, cache_salt=second).num_cached_tokens == found


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_only_the_same_salt_shares_blocks_with_a_running_request(first: str | None, second: str | None) -> None:
    served = Served()
    longer = replace(ONE, max_tokens=8)
    for salt in (first, second):
        served.engine.add_request(list(PROMPT), longer, cache_salt=salt)
        served.step(2)
    running = served.engine.scheduler.running
    mine, theirs = ({*request.sequences[0].table.blocks} for request in running)
    assert len(mine & theirs) == (3 if first == second else 0)


@pytest.mark.parametrize("windows", [(None, 5), (7,)], ids=str)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_only_the_same_salt_finds_blocks_of_layer_groups(
    windows: tuple[int | None, ...], first: str | None, second: str | None
) -> None:
    served = Served(num_blocks=24, group_windows=windows)
    served.serve(PROMPT, cache_salt=first)
    assert served.serve(PROMPT, cache_salt=second).num_cached_tokens == (12 if first == second else 0)


@pytest.mark.parametrize("params", [SAMPLES, BEAMS], ids=["samples", "beams"])
@pytest.mark.parametrize("windows", [(None,), (None, 5)], ids=str)
def test_forked_sequences_keep_the_salt(params: Any, windows: tuple[int | None, ...]) -> None:
    """What samples and beams have generated is found with their salt only."""
    prompt = list(range(1, 10))
    served = Served(num_blocks=40, group_windows=windows)
    output = served.serve(prompt, params, cache_salt="a")
    assert served.of(SequenceForked)
    turns = [[*prompt, *completion.token_ids[:-1], 40] for completion in output.outputs]
    for turn in turns:
        for salt in (None, "b"):
            served = Served(num_blocks=40, group_windows=windows)
            assert served.serve(prompt, params, cache_salt="a").outputs == output.outputs
            assert served.serve(turn, cache_salt=salt).num_cached_tokens == 0
        served = Served(num_blocks=40, group_windows=windows)
        served.serve(prompt, params, cache_salt="a")
        assert served.serve(turn, cache_salt="a").num_cached_tokens >= 8


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_only_the_same_salt_finds_what_was_evicted_to_the_host(first: str | None, second: str | None) -> None:
    served = Served(num_blocks=4, num_swap_blocks=12, **FLOORS)
    served.serve(range(1, 10), cache_salt=first)
    served.serve(range(20, 34), cache_salt="others")
    again = served.serve(range(1, 10), cache_salt=second)
    assert again.num_cached_tokens == (8 if first == second else 0)
    assert bool(served.of(BlocksPromoted)) == (first == second)


def test_admission_counts_only_blocks_of_the_same_salt() -> None:
    served = Served()
    for salt in SALTS:
        served.engine.add_request(list(PROMPT), replace(ONE, max_tokens=8), request_id=str(salt), cache_salt=salt)
        if salt == "a":
            served.step(2)  # without a salt and "a" run, and hold their blocks
    served.engine.add_request(list(PROMPT), ONE, request_id="a again", cache_salt="a")
    waiting = served.engine.scheduler.waiting
    needed = {request.request_id: served.engine.blocks.blocks_to_admit(request) for request in waiting}
    assert needed == {"b": 4, "a again": 1}


def test_blocks_are_offered_to_a_connector_once_for_each_salt() -> None:
    workload, prefixes = cached_workload(0), Prefixes()
    connector = InMemory(4)
    asked = tuple(WorkloadRequest(10 * i, tuple(PROMPT), ONE, cache_salt=salt) for i, salt in enumerate(2 * SALTS))
    config = replace(workload.config, block_size=4, num_blocks=20, max_model_len=40, vocab_size=50)
    made = connected_run(replace(workload, config=config, requests=asked), connector, prefixes)
    run(made)
    assert len(connector.blocks) == 9
    assert made.engine.stats.blocks_stored == 9


def test_a_policy_sees_only_tokens_of_the_same_salt() -> None:
    """`RequestView.num_cached_tokens` of a waiting request."""
    served = Served()
    served.serve(PROMPT, cache_salt="a")
    for salt in SALTS:
        served.engine.add_request(list(PROMPT), ONE, request_id=str(salt), cache_salt=salt)
    waiting = served.engine.scheduler.waiting
    found = {request.request_id: served.engine.blocks.num_cached_tokens(request) for request in waiting}
    assert found == {"None": 0, "a": 12, "b": 0}


# --- Random workloads -------------------------------------------------------------------------------


class Watched:
    """Follows which salt has published each block, and checks each hit: no block is found with another salt."""

    def __init__(self, run: WorkloadRun) -> None:
        self.found: Counter[str] = Counter()
        """Hits of requests with and without a salt, by their kind."""
        self._salts = {name: request.cache_salt for name, request in run.named_requests()}
        self._of: dict[int, str | None] = {}  # sequence -> salt
        self._published: dict[int, str | None] = {}  # block -> salt
        run.engine.listeners.append(self)

    def __call__(self, event: Event) -> None:
        match event:
            case RequestArrived():
                self._of[event.sequence] = self._salts[event.request]
            case SequenceForked():
                self._of[event.child] = self._of[event.parent]
            case BlockCached():
                self._published[event.block] = self._of[event.sequence]
            case PrefixReused() if event.source == "cache":
                salt = self._of[event.sequence]
                self.found[f"hit {salt and 'salted'}"] += 1
                assert {self._published[block] for block in event.blocks if block in self._published} <= {salt}
            case BlocksPromoted() | BlocksLoaded():
                self.found[f"{event.name} {self._of[event.sequence] and 'salted'}"] += 1


def plain(seed: int) -> WorkloadRun:
    workload = random_workload(seed)
    late = bool(seed % 2)
    config = replace(workload.config, enable_prefix_caching=True, async_scheduling=late)
    workload = with_salts(replace(workload, config=config), seed)
    tier, runner = (LATE, LateRunner) if late else ((REFERENCE, FAST)[seed // 2 % 2], None)
    return WorkloadRun(workload, tier, **({"make_runner": runner} if runner else {}))


def grouped(seed: int) -> WorkloadRun:
    workload = windowed(seed)
    return WorkloadRun(with_salts(replace(workload, config=replace(workload.config, enable_prefix_caching=True)), seed))


def with_a_floor(seed: int) -> WorkloadRun:
    workload = floored(seed)
    late = workload.config.async_scheduling
    runner = {"make_runner": LateRunner} if late else {}
    return WorkloadRun(with_salts(workload, seed), LATE if late else REFERENCE, **runner)


def handed_over(seed: int) -> WorkloadRun:
    """On an engine that has what another one has stored for the same requests, whose salts are others."""
    workload, prefixes = cached_workload(seed), Prefixes()
    connector = InMemory(workload.config.block_size)
    run(connected_run(with_salts(workload, -1 - seed), connector, prefixes))
    return connected_run(with_salts(workload, seed), connector, prefixes)


def with_a_disk(seed: int) -> WorkloadRun:
    """A run with a disk below the host floor."""
    disk, prefixes = DiskInMemory(floored(seed).config.block_size), Prefixes()
    made = [disk_run(seed, disk, prefixes, salts=salts) for salts in (-1 - seed, seed)]
    run(made[0])
    return made[1]


WAYS = (plain, grouped, with_a_floor, handed_over, with_a_disk)


def run(made: WorkloadRun) -> Watched:
    watched = Watched(made)
    made.to_the_end()
    made.check_outputs()
    made.check_nothing_leaked()
    return watched


@one_case_in(2)
@scaled
@pytest.mark.parametrize("make", WAYS)
@pytest.mark.parametrize("seeds", seeds(400, 40), ids=str)
def test_no_hit_crosses_salts_in_random_workloads(make: Callable[[int], WorkloadRun], seeds: range) -> None:
    found: Counter[str] = Counter()
    for seed in seeds:
        try:
            found += run(make(seed)).found
        except Exception as error:
            error.add_note(f"in workload {seed}")
            raise
    ways = {with_a_floor: ["blocks_promoted"], handed_over: ["blocks_loaded"], with_a_disk: ["blocks_loaded"]}
    for kind in ["hit None", "hit salted", *(f"{way} salted" for way in ways.get(make, []))]:
        assert found[kind], found


# --- Planted bugs -----------------------------------------------------------------------------------


def forget(tokens: Sequence[int]) -> list[int]:
    """The tokens without the salt, whose number is a multiple of 2^64."""
    return [token % 2**64 for token in tokens]


def everywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sequence, "salted", lambda tokens, salt: tokens)


def in_forks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit, "SequenceState", lambda *given, salt, **more: sequence.SequenceState(*given, **more))


def in_last_blocks(patch: pytest.MonkeyPatch) -> None:
    right = block_manager.keep
    patch.setattr(block_manager, "keep", lambda cache, tokens, *rest: right(cache, forget(tokens), *rest))


def in_what_is_published(patch: pytest.MonkeyPatch) -> None:
    for cache in (PrefixCache, GroupedPrefixCache):
        right: Any = cache.publish
        wrong = lambda self, tokens, *rest, right=right: right(self, forget(tokens), *rest)  # noqa: E731
        patch.setattr(cache, "publish", wrong)


def in_names_on_floors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(floors, "token_bytes", lambda tokens: token_bytes(forget(tokens)))


def in_the_connector(patch: pytest.MonkeyPatch) -> None:
    right = InMemory._key
    patch.setattr(InMemory, "_key", lambda self, tokens, logical: right(self, forget(tokens), logical))


def run_all(make: Callable[[int], WorkloadRun]) -> None:
    for seed in range(300):
        make(seed).to_the_end()


@pytest.mark.parametrize(
    ("bug", "make"),
    [
        *((everywhere, make) for make in WAYS),
        *((in_what_is_published, make) for make in (plain, grouped)),
        (in_forks, plain),
        (in_forks, grouped),
        (in_last_blocks, plain),
        (in_names_on_floors, with_a_floor),
        (in_the_connector, handed_over),
        (in_the_connector, with_a_disk),
    ],
)
def test_the_content_oracle_finds_a_salt_that_is_forgotten(
    bug: Callable[[pytest.MonkeyPatch], None], make: Callable[[int], WorkloadRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(InvariantViolation, match=f"invariant '{Invariant.CONTENT.value}' broken"):
        run_all(make)
