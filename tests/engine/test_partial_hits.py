"""Partial hits: what is found within a block, what becomes of the block, and that no request needs more room for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.contracts import BlockAllocator
from minipaged.engine import block_manager, partial_hits
from minipaged.engine.block_manager import BlockManager
from minipaged.engine.cached_blocks import NO_PARENT, CachedBlock, Children
from minipaged.engine.partial_hits import Beginning
from minipaged.engine.prefix_cache import PrefixCache
from minipaged.engine.sequence import SequenceState
from minipaged.errors import InvariantViolation
from minipaged.events import (
    BlockCached,
    BlockCopied,
    BlockEvicted,
    BlocksFreed,
    Event,
    PrefixReused,
    RequestPreempted,
    StepScheduled,
)
from minipaged.params import BeamSearchParams, EngineConfig, SamplingParams
from minipaged.replay.state import State
from minipaged.replay.teller import explain
from minipaged.steps import BlockMoves
from minipaged.testing.content_runner import ContentRunner
from tests.effort import examples
from tests.workloads import FAST, REFERENCE, Workload, WorkloadRequest, WorkloadRun, find_a_failure

ONE = SamplingParams(temperature=0, seed=1, max_tokens=1, ignore_eos=True)
Prompt = Sequence[int]


class Served:
    """An engine that serves prompts, with its events."""

    def __init__(self, num_blocks: int = 16, block_size: int = 4, tier: Any = REFERENCE, **config: Any) -> None:
        sizes = EngineConfig(
            num_blocks=num_blocks, block_size=block_size, max_model_len=48, vocab_size=50, debug=True, **config
        )
        self.events: list[Event] = []
        self.run = WorkloadRun(Workload(sizes, (), swap_is_cheap=True), tier, listeners=[self.events.append])
        self.engine = self.run.engine
        self.outputs: dict[str, Any] = {}

    def add(self, prompt: Prompt, params: SamplingParams | BeamSearchParams = ONE, cache_salt: Any = None) -> str:
        return self.engine.add_request(list(prompt), params, request_id=str(len(self.events)), cache_salt=cache_salt)

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.outputs |= {update.request_id: update.output for update in self.engine.step() if update.output}

    def serve(self, prompt: Prompt, params: SamplingParams | BeamSearchParams = ONE, cache_salt: Any = None) -> Any:
        name = self.add(prompt, params, cache_salt)
        while self.engine.has_unfinished_requests():
            self.step()
        self.run.check_nothing_leaked()
        return self.outputs[name]

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def told(self, kind: type[Event]) -> list[str]:
        """What the stepper says of these events."""
        state, sentences = State(), []
        for event in self.events:
            if isinstance(event, kind):
                sentences.append(explain(state, event))
            state.apply(event)
        return sentences


def num_common(one: Prompt, other: Prompt) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# --- How much is found ----------------------------------------------------------------------------

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=20)


@settings(max_examples=examples(300))
@given(st.sampled_from([REFERENCE, FAST]), st.sampled_from([1, 2, 3, 4, 16]), prompts, prompts, st.integers(0, 20))
def test_of_every_two_prompts_the_second_computes_only_what_the_first_has_not(
    tier: Any, block_size: int, one: list[int], own: list[int], num_shared: int
) -> None:
    """And one token, from which its next one is chosen."""
    other = [*one[:num_shared], *own]
    served = Served(48, block_size, tier)
    assert served.serve(one).num_cached_tokens == 0
    assert served.serve(other).num_cached_tokens == min(num_common(one, other), len(other) - 1)
    assert served.engine.stats.prefix_cache_hit_tokens == served.outputs.popitem()[1].num_cached_tokens


@settings(max_examples=examples(100))
@given(st.integers(1, 4), prompts, prompts, st.integers(0, 20))
def test_a_collision_costs_hits_and_no_content(
    block_size: int, one: list[int], own: list[int], num_shared: int
) -> None:
    """All blocks have one hash, so only the first that is published can be found by it."""
    other = [*one[:num_shared], *own]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            block_manager,
            "PrefixCache",
            lambda size, pool: PrefixCache(size, pool, chain_hash=lambda parent, tokens: 0),
        )
        served = Served(48, block_size)
    served.serve(one)
    found, most = served.serve(other).num_cached_tokens, min(num_common(one, other), len(other) - 1)
    assert min(most, 2 * block_size - 1) >= found >= min(most, block_size)


def test_tokens_of_an_output_are_found_but_not_the_last_one_which_was_never_run() -> None:
    served = Served()
    first = served.serve([1, 2, 3, 4, 5], replace(ONE, max_tokens=5))
    said = [1, 2, 3, 4, 5, *first.outputs[0].token_ids]
    assert served.serve([*said, 9, 9]).num_cached_tokens == len(said) - 1


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_nor_is_it_with_steps_in_flight_that_have_begun_to_run_it(async_scheduling: bool) -> None:
    served = Served(async_scheduling=async_scheduling, eos_token_ids=())
    first = served.serve([1, 2, 3, 4, 5], replace(ONE, max_tokens=5))
    stop = first.outputs[0].token_ids[2]
    again = served.serve([1, 2, 3, 4, 6], replace(ONE, max_tokens=20, stop_token_ids=(stop,)))
    said = [1, 2, 3, 4, 6, *again.outputs[0].token_ids]
    assert served.serve([*said, 9, 9]).num_cached_tokens == len(said) - 1


def test_a_request_that_is_aborted_leaves_no_partial_entry() -> None:
    served = Served()
    name = served.add([1, 2, 3, 4, 5, 6], replace(ONE, max_tokens=9))
    served.step()
    served.engine.abort(name)
    assert [event.num_tokens for event in served.of(BlockCached)] == [4]
    assert served.serve([1, 2, 3, 4, 5, 6, 7]).num_cached_tokens == 4


# --- What becomes of the block --------------------------------------------------------------------


def test_a_block_that_others_hold_is_copied() -> None:
    served = Served()
    served.add(range(8), replace(ONE, max_tokens=9))
    served.step(2)
    served.add([0, 1, 2, 3, 4, 5, 9])
    served.step(8)
    assert [event.holders for event in served.of(BlockCopied)] == [3]  # both requests, and the cache
    assert not served.of(BlockEvicted)
    assert served.told(PrefixReused) == [
        "Sequence B begins with blocks 0 and 1, already computed (prefix cache). 2 of 4 tokens are shared; "
        "the block is copied at the first write."
    ]


def test_a_block_that_only_the_cache_holds_is_copied_and_stays() -> None:
    served = Served()
    served.serve(range(8))
    for _ in range(2):
        assert served.serve([0, 1, 2, 3, 4, 5, 9]).num_cached_tokens == 6
        assert served.serve([*range(8), 9]).num_cached_tokens == 8
    assert [event.holders for event in served.of(BlockCopied)] == [2] * 2
    assert not served.of(BlockEvicted)


def test_a_partial_entry_is_taken_over_by_the_request_that_goes_on_and_promoted_when_its_block_is_full() -> None:
    served = Served()
    served.serve([0, 1, 2, 3, 4, 5])
    assert [(event.block, event.num_tokens, event.block_hash == 0) for event in served.of(BlockCached)] == [
        (0, 4, False),
        (1, 2, True),
    ]
    assert served.serve([*range(8), 9]).num_cached_tokens == 6
    assert not served.of(BlockCopied)
    assert served.of(BlockEvicted) == [BlockEvicted(1, "taken over")]
    assert (served.of(BlockCached)[2].block, served.of(BlockCached)[2].num_tokens) == (1, 4)
    assert served.told(PrefixReused)[0].endswith(
        "2 of 4 tokens are shared; nobody else holds the block, so the sequence writes into it."
    )
    assert served.serve([*range(8), 7]).num_cached_tokens == 8


def test_a_partial_entry_that_is_the_beginning_of_another_entry_is_not_kept() -> None:
    served = Served()
    served.add([1, 2, 3], replace(ONE, max_tokens=2))
    served.add([1, 2])
    served.step()  # both at once: nothing is found, and the second leaves a partial entry
    assert [event.num_tokens for event in served.of(BlockCached)] == [2]
    assert not served.of(BlockEvicted)
    served.step()
    assert [event.num_tokens for event in served.of(BlockCached)] == [2, 4]
    assert served.of(BlockEvicted) == [BlockEvicted(1, "redundant")]
    served.serve([1, 2])
    assert [event.num_tokens for event in served.of(BlockCached)] == [2, 4]
    assert len(served.of(BlockEvicted)) == 1


def test_a_block_that_a_sibling_still_fills_is_not_kept_for_others() -> None:
    """A reference more would make the sibling copy it, for which nobody has reserved a block."""
    served = Served(num_blocks=3)
    served.serve([1, 2, 3, 4, 5], replace(ONE, n=2, max_tokens=1))
    assert [event.num_tokens for event in served.of(BlockCached)] == [4, 1]  # when the second has let go of it, too
    assert [type(event) for event in served.events if isinstance(event, (BlockCached, BlocksFreed))] == [
        BlockCached,
        BlocksFreed,
        BlockCached,
        BlocksFreed,
    ]


def test_partial_entries_are_evicted_before_full_blocks_although_they_were_used_later() -> None:
    served = Served(num_blocks=5)
    served.serve(range(8))
    served.serve([9, 8])
    served.serve([7] * 9)
    assert [(event.block, event.reason) for event in served.of(BlockEvicted)] == [(2, "room")]
    assert served.serve([*range(8), 9]).num_cached_tokens == 8


def test_of_partial_entries_the_last_released_goes_first() -> None:
    served = Served(num_blocks=3)
    for first in (7, 8, 9):
        served.serve([first, first])
    served.serve([1] * 8)
    assert [event.block for event in served.of(BlockEvicted)] == [2, 1]


def test_a_request_that_ends_by_a_stop_string_leaves_its_last_block_too() -> None:
    text = Served().serve([9, 2, 3, 4, 5], replace(ONE, max_tokens=8)).outputs[0].text
    served = Served()
    ended = served.serve([9, 2, 3, 4, 5], replace(ONE, max_tokens=8, stop=(text[1:3],))).outputs[0]
    assert ended.stop_reason == text[1:3]
    num_computed = 5 + len(ended.token_ids) - 1
    assert [event.num_tokens for event in served.of(BlockCached)] == [4, num_computed % 4]


# --- Room -----------------------------------------------------------------------------------------


def test_without_a_spare_block_the_source_is_taken_over() -> None:
    """Two blocks, both needed by the request: the copy and its source would be three with the first one."""
    served = Served(num_blocks=2)
    served.serve(range(8))
    assert served.serve([0, 1, 2, 3, 4, 5, 9]).num_cached_tokens == 6
    assert not served.of(BlockCopied)
    assert BlockEvicted(1, "taken over") in served.of(BlockEvicted)
    assert served.serve([0, 1, 2, 3, 4, 5, 6, 7]).num_cached_tokens == 6  # the content is the newer request's


def test_a_spare_block_is_for_one_source_alone() -> None:
    """Two requests come in together. Each needs one block of the three, so the third can hold one copy's source."""
    served = Served(num_blocks=3)
    served.serve([0, 1, 2, 3])
    served.serve([4, 5, 6, 7])
    names = [served.add(prompt) for prompt in ([0, 1, 2, 9], [4, 5, 6, 9])]
    served.step()
    assert [served.outputs[name].num_cached_tokens for name in names] == [3, 3]
    assert [event.source for event in served.of(BlockCopied)] == [0]
    assert BlockEvicted(1, "taken over") in served.of(BlockEvicted)
    served.run.check_nothing_leaked()


def test_a_source_is_available_again_in_the_step_that_copies_it() -> None:
    served = Served()
    served.serve(range(8))
    served.serve([0, 1, 2, 3, 4, 5, 9])
    assert [event.blocks_cached for event in served.of(StepScheduled)] == [0, 1]


def test_a_sibling_that_catches_up_begins_with_full_blocks_alone() -> None:
    """Its blocks were counted when its request was admitted, and nothing is spare for a copy's source."""
    seen = list[bool]()
    right = partial_hits.beginning_of

    def watched(*arguments: Any, within_block: bool = True) -> Beginning:
        seen.append(within_block)
        return right(*arguments, within_block=within_block)

    served = Served(num_blocks=9, preemption="recompute")
    served.add([7, *range(8)], replace(ONE, max_tokens=24))
    served.add(range(6), replace(ONE, n=2, temperature=1.0, max_tokens=12))
    while not served.of(RequestPreempted):
        served.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_manager, "beginning_of", watched)
        while served.engine.has_unfinished_requests():
            served.step()
    served.run.check_nothing_leaked()
    assert seen.count(True) == 0 < len(seen)


def test_without_a_spare_block_a_source_that_a_sequence_holds_is_copied() -> None:
    """It was not available anyway, so it costs nothing that it stays."""
    served = Served(num_blocks=4)
    first = served.add(range(8), replace(ONE, max_tokens=5))
    served.step(2)  # from now on it has all blocks that it will ever hold
    second = served.add([0, 1, 2, 3, 4, 5, 9])
    served.step()
    assert [event.holders for event in served.of(BlockCopied)] == [3]
    served.step(5)
    assert served.outputs[first].finished
    assert served.outputs[second].num_cached_tokens == 6
    assert not served.of(BlockEvicted)


def test_without_a_spare_block_a_source_that_others_follow_is_left_alone() -> None:
    served = Served(num_blocks=3)
    served.serve(range(12))
    output = served.serve([0, 1, 9, 9, 9, 9, 9, 9, 9])
    assert output.num_cached_tokens == 0
    assert [event.reason for event in served.of(BlockEvicted)] == ["room"] * 3


@settings(max_examples=examples(200))
@given(st.sampled_from([2, 4]), st.lists(prompts, max_size=4), prompts, st.integers(1, 6), st.integers(0, 20))
def test_a_request_that_needs_the_whole_pool_gets_it_at_once_whatever_is_cached(
    block_size: int, earlier: list[list[int]], own: list[int], max_tokens: int, num_shared: int
) -> None:
    """Exactness: what it finds within a block never takes a block more."""
    wanted = [*(earlier[0][:num_shared] if earlier else ()), *own][:20]
    served = Served(-(-(len(wanted) + max_tokens - 1) // block_size), block_size)
    for prompt in earlier:
        served.serve(prompt[: served.engine.config.num_blocks * block_size])
    before, params = served.engine.stats.steps, replace(ONE, max_tokens=max_tokens)
    served.serve(wanted, params)
    assert served.engine.stats.preempted_by_recompute == 0
    assert served.engine.stats.steps == before + max_tokens


def crowd(seed: int) -> Workload:
    """Requests that begin alike, more of them than there is room for."""
    r = random.Random(seed)
    stem = [r.randrange(3) for _ in range(10)]
    config = EngineConfig(
        num_blocks=r.randint(6, 12), block_size=r.choice([2, 4]), max_model_len=24, vocab_size=11, debug=True
    )
    two = replace(ONE, max_tokens=2)
    asked = (WorkloadRequest(r.choice([0, 3]), (*stem[: r.randint(0, 10)], r.randrange(3)), two) for _ in range(6))
    return Workload(config, tuple(asked), swap_is_cheap=True)


def test_a_last_block_that_cannot_be_kept_costs_a_step_and_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop string is found before the block is kept. The step is run again, and its token is not added twice."""
    right, served = BlockManager.keep_last, Served()
    params = replace(ONE, max_tokens=7)
    text = served.serve([1, 2, 3], params).outputs[0].text
    errors = [MemoryError()]

    def keep_last(blocks: BlockManager, sequence: SequenceState) -> None:
        if errors:
            raise errors.pop()
        right(blocks, sequence)

    monkeypatch.setattr(BlockManager, "keep_last", keep_last)
    name = served.add([1, 2, 3], replace(params, stop=[text[3:5]], include_stop_str_in_output=True))
    with pytest.raises(MemoryError):
        served.step(7)
    while served.engine.has_unfinished_requests():
        served.step()
    served.run.check_nothing_leaked()
    [output] = served.outputs[name].outputs
    assert (output.text, output.stop_reason) == (text[:5], text[3:5])


def test_a_source_is_not_handed_out_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even to a request that is admitted because the one that copies has lowered its need. Seeing this needs
    several of them in one step, so the workloads are made for it."""

    def all_served() -> None:
        for seed in range(100):
            run = WorkloadRun(crowd(seed))
            run.to_the_end()
            run.check_outputs()
            run.check_nothing_leaked()

    all_served()
    right = BlockManager.append

    def append(self: BlockManager, sequence: SequenceState, num_tokens: int) -> None:
        right(self, sequence, num_tokens)
        self._released([source for source, _ in self._copy])

    monkeypatch.setattr(BlockManager, "append", append)
    with pytest.raises(InvariantViolation, match="content"):
        all_served()


# --- The index ------------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(st.sets(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), max_size=30), prompts)
def test_the_child_that_begins_with_most_of_the_tokens_is_found(some: set[tuple[int, ...]], wanted: list[int]) -> None:
    children, tokens = Children(), tuple(wanted[:5])
    entries = [CachedBlock(block, NO_PARENT, own) for block, own in enumerate(sorted(some, key=hash))]
    for entry in entries:
        children.add(entry)
    block, most = children.longest(NO_PARENT, tokens)
    assert most == max((num_common(tokens, entry.tokens) for entry in entries), default=0)
    assert (block == NO_PARENT) == (most == 0)
    assert most == 0 or num_common(tokens, entries[block].tokens) == most
    for entry in entries:
        assert NO_PARENT in children
        children.remove(entry)
    assert NO_PARENT not in children


class Counted(tuple[int, ...]):
    """Tokens that count how often they are compared."""

    compared = 0

    def __lt__(self, other: Any) -> bool:
        Counted.compared += 1
        return super().__lt__(other)

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return super().__eq__(other)

    __hash__ = tuple.__hash__


def test_the_children_of_the_root_are_not_all_looked_at() -> None:
    """Ten thousand prompts that begin with the same token."""
    r, children = random.Random(0), Children()
    for block in range(10_000):
        children.add(CachedBlock(block, NO_PARENT, Counted([1, *(r.randrange(50_000) for _ in range(15))])))
    Counted.compared = 0
    children.longest(NO_PARENT, Counted([1, *(r.randrange(50_000) for _ in range(15))]))
    assert Counted.compared <= 2 * 14 + 2  # the logarithm of 10,000, rounded up


# --- Bugs that the oracle must find ---------------------------------------------------------------


def test_the_oracle_finds_a_partial_entry_that_stays_findable_when_its_block_is_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = PrefixCache.drop

    def drop(self: PrefixCache, block: int) -> None:
        """The reference is right: a book beside the cache would not show it."""
        entry = self.entry_of[block]
        right(self, block)
        if len(entry.tokens) < self.block_size:
            self.children.add(entry)
            self.stale = {**vars(self).get("stale", {}), block: entry}  # type: ignore[attr-defined]

    def begin(cache: PrefixCache, *of: Any, **more: Any) -> Beginning:
        stale = vars(cache).get("stale", {})
        cache.entry_of |= {block: entry for block, entry in stale.items() if block not in cache.entry_of}
        try:
            return right_beginning(cache, *of, **more)
        finally:
            for block, entry in stale.items():
                if cache.entry_of[block] is entry:
                    del cache.entry_of[block]

    right_beginning = partial_hits.beginning_of
    monkeypatch.setattr(PrefixCache, "drop", drop)
    monkeypatch.setattr(block_manager, "beginning_of", begin)
    find_a_failure()


def test_the_oracle_finds_a_copy_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of cached blocks: copies for siblings are made."""
    right = ContentRunner.move

    def move(self: ContentRunner, moves: BlockMoves) -> None:
        cached = self.engine.blocks.prefix_cache or ()
        right(self, moves._replace(copy=tuple(pair for pair in moves.copy if pair[0] not in cached)))

    monkeypatch.setattr(ContentRunner, "move", move)
    find_a_failure()


def test_the_oracle_finds_a_source_for_which_no_block_is_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactness: what was promised to others is not there."""
    right = partial_hits.beginning_of
    monkeypatch.setattr(
        block_manager, "beginning_of", lambda cache, tokens, spare=0, **more: right(cache, tokens, 99, **more)
    )
    find_a_failure()


def test_the_oracle_finds_a_token_that_is_kept_before_it_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one with which a sequence ends."""
    right = partial_hits.keep

    def keep(cache: PrefixCache, tokens: list[int], table: Any, allocator: BlockAllocator) -> CachedBlock | None:
        [*known, last] = [*tokens, 0]
        room = len(known) % cache.block_size not in (0, cache.block_size - 1)
        return right(cache, [*known, last] if room else known, table, allocator)

    monkeypatch.setattr(block_manager, "keep", keep)
    find_a_failure()
