"""Block tables, prefix cache and sizes of models whose layers are in groups: each part by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from minipaged.engine.cached_blocks import Node
from minipaged.engine.engine import Engine
from minipaged.engine.grouped_memory import blocks_alone, most_at_once
from minipaged.engine.grouped_prefix_cache import GroupedPrefixCache
from minipaged.engine.grouped_table import GroupedTable, first_seen
from minipaged.errors import InvalidRequest, OutOfBlocks
from minipaged.events import HOLE, BlocksFreed, Event
from minipaged.params import EngineConfig, SamplingParams
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.testing.content_runner import ContentRunner
from tests.workloads import REFERENCE

FULL_AND_4 = (None, 4)


def filled(num_tokens: int, windows: Sequence[int | None] = FULL_AND_4, num_blocks: int = 40) -> GroupedTable:
    """A table of this length, with blocks of two tokens, from which nothing has been given back."""
    table = GroupedTable(2, BlockAllocator(num_blocks), windows)
    table.append(num_tokens)
    return table


# --- The block table --------------------------------------------------------------------------------


def test_a_window_of_w_is_the_token_itself_and_w_minus_1_before_it() -> None:
    assert [first_seen(4, position) for position in (0, 3, 4, 8)] == [0, 0, 1, 5]
    assert first_seen(1, 8) == 8
    assert first_seen(None, 8) == 0


def test_blocks_before_the_window_are_given_back_and_leave_holes() -> None:
    table = filled(8)
    entries = list(table.entries)
    assert table.give_back(8) == [(1, entries[1]), (3, entries[3])]  # position 8 sees 5 to 8: all but blocks 0 and 1
    assert table.entries == [entries[0], HOLE, entries[2], HOLE, *entries[4:]]
    assert table.blocks == [entries[0], entries[2], *entries[4:]]
    assert table.holes == [0, 2]
    assert table._allocator.num_free == 40 - 6
    assert table.give_back(8) == []
    assert [entry for entry, _ in table.give_back(9)] == [5]  # position 9 sees 6 to 9


def test_each_group_has_slots_of_its_own() -> None:
    table = filled(5)
    first, second = table.entries[4:]
    assert table.slot_mapping(4, 5) == [2 * first, 2 * second]
    assert len(set(table.slot_mapping(0, 5))) == 10
    with pytest.raises(ValueError, match="positions 4 to 6 are not all within the table's 5 tokens"):
        table.slot_mapping(4, 6)


def test_a_fork_shares_holes_and_copies_a_last_block_in_each_group() -> None:
    table = filled(7)
    table.give_back(7)
    child = table.fork()
    assert child.entries == table.entries
    assert child.holes == table.holes == [0, 2]
    assert child.blocks_needed(1) == 2
    ends = table.entries[-2:]
    assert child.append(1) == list(zip(ends, child.entries[-2:], strict=True))
    assert child.entries[:-2] == table.entries[:-2]
    assert table.blocks_needed(1) == 0
    assert table.append(1) == []


def test_an_append_that_fails_changes_nothing() -> None:
    table = filled(3, num_blocks=5)
    child = table.fork()
    before = list(child.entries)
    with pytest.raises(OutOfBlocks):
        child.append(1)  # two copies, and one block is free
    assert child.entries == before
    assert child.num_tokens == 3
    assert table._allocator.num_free == 1


def test_holes_stay_where_they_are_when_blocks_move() -> None:
    table, host = filled(8), BlockAllocator(9)
    table.give_back(8)
    with pytest.raises(ValueError, match="5 blocks cannot take the place of 6"):
        table.relocate(host.allocate_many(5), host)
    there = BlockAllocator(9)
    table.relocate(blocks := there.allocate_many(6), there)
    assert table.blocks == list(blocks)
    assert [entry == HOLE for entry in table.entries] == [False, True, False, True, False, False, False, False]
    table.trim(0)
    assert there.num_free == 9
    assert table.holes == [0, 0]


# --- The prefix cache -------------------------------------------------------------------------------


class Cached:
    """A prompt of 16 tokens in a cache, computed by a sequence that has ended. Blocks hold two tokens."""

    def __init__(self, windows: Sequence[int | None], num_given_back: int = 0) -> None:
        self.tokens = list(range(50, 66))
        self.allocator = BlockAllocator(40)
        self.cache = GroupedPrefixCache(2, self.allocator, windows)
        self.table = GroupedTable(2, self.allocator, windows)
        self.table.append(16)
        self.entries = list(self.table.entries)
        assert len(list(self.cache.publish(self.tokens, self.table, 0))) == len(self.entries)
        self.cache.released(block for _, block in self.table.give_back(num_given_back))
        blocks = self.table.blocks
        self.table.trim(0)
        self.cache.released(reversed(blocks))

    def found(self, num_tokens: int) -> list[int]:
        return self.cache.match([*self.tokens[:num_tokens], 1])

    def evict(self, entry: int) -> None:
        self.cache._drop(self.entries[entry])


@pytest.mark.parametrize("num_tokens", [2, 4, 6, 16])
def test_a_hit_needs_everything_of_full_groups_and_the_last_window_of_others(num_tokens: int) -> None:
    cached = Cached(FULL_AND_4)
    whole = cached.entries[:num_tokens]  # two groups, two tokens in a block: as many entries as tokens
    first = first_seen(4, num_tokens) // 2
    assert cached.found(num_tokens) == [
        HOLE if entry % 2 and entry // 2 < first else block for entry, block in enumerate(whole)
    ]


def test_one_block_that_is_gone_rules_out_the_hits_that_have_it_in_their_window() -> None:
    cached = Cached(FULL_AND_4)
    cached.evict(7)  # tokens 6 and 7, in the layers with the window
    lengths = [len(cached.found(n)) // 2 * 2 for n in range(2, 17, 2)]
    assert lengths == [2, 4, 6, 6, 6, 12, 14, 16]  # windows of the tokens 8 and 10 need it: position 8 sees 5 to 8


def test_what_was_found_is_looked_up_again_once_it_is_gone() -> None:
    """Other nodes may stand for the same tokens by then."""
    full, found = Cached(FULL_AND_4), list[Node]()
    prompt = [*full.tokens, 1]
    for evicted in (0, 6, 10):
        full.cache.evict(evicted)
        assert full.cache.match(prompt, found) == full.cache.match(prompt)
    again = GroupedTable(2, full.allocator, FULL_AND_4)
    again.append(8)
    assert len([*full.cache.publish(full.tokens[:8], again, 0)]) == 8
    assert full.cache.match(prompt, found) == full.cache.match(prompt) != []


def test_a_block_of_a_full_group_takes_the_others_of_its_tokens_with_it() -> None:
    cached = Cached(FULL_AND_4)
    free = cached.allocator.num_free
    cached.evict(14)
    assert cached.allocator.num_free == free + 2
    assert len(cached.found(16)) == 14


def test_without_a_full_group_a_hit_needs_no_more_than_its_window() -> None:
    cached = Cached((4,))
    for entry in range(6):
        cached.evict(entry)
    assert cached.found(16) == [HOLE] * 6 + cached.entries[6:]
    assert cached.found(12) == []
    cached.evict(6)
    assert cached.found(16) == []
    cached.evict(7)
    assert not cached.cache._nodes  # prefixes without blocks are gone with the last block after them


def test_holes_leave_no_prefix_in_the_cache() -> None:
    """A sequence that was swapped out publishes its beginning again. The window has passed these blocks by then, and
    the cache may have evicted them."""
    table = filled(5, (2,))
    table.give_back(5)
    assert table.holes == [2]
    cache = GroupedPrefixCache(2, table._allocator, (2,))
    assert list(cache.publish([1, 2, 3, 4], table, 0)) == []
    assert not cache._nodes


def test_evicted_first_is_what_a_window_passed_first() -> None:
    cached = Cached(FULL_AND_4, num_given_back=16)
    assert cached.cache.evict(2) == [cached.entries[1], cached.entries[3]]
    assert len(cached.found(16)) == 16


def test_what_is_computed_again_takes_the_blocks_that_are_cached() -> None:
    cached = Cached(FULL_AND_4)
    again = GroupedTable(2, cached.allocator, FULL_AND_4)
    again.append(16)
    told = list(cached.cache.publish(cached.tokens, again, 0))
    assert [there for _, _, there in told] == cached.entries == again.entries
    assert cached.cache.num_evictable == 0


def test_equal_hashes_are_no_proof() -> None:
    cached = Cached(FULL_AND_4)
    cached.cache._chain_hash = lambda parent, tokens: next(iter(cached.cache._nodes))
    assert cached.cache.match([7] * 9) == []
    other = GroupedTable(2, cached.allocator, FULL_AND_4)
    other.append(4)
    assert list(cached.cache.publish([7] * 4, other, 0)) == []


# --- Sizes ------------------------------------------------------------------------------------------


def test_a_5_to_1_model_holds_less_than_a_fifth_at_32768_tokens() -> None:
    """Gemma 3 has such layers: one of six sees everything, and five see 1,024 tokens."""
    table = GroupedTable(16, BlockAllocator(20_000), (None, *[1024] * 5))
    for start in range(0, 32_768, 512):
        table.append(512)
        table.give_back(start + 512)
    without_groups = 6 * 32_768 // 16
    assert len(table.blocks) == 2048 + 5 * 64
    assert len(table.blocks) < 0.2 * without_groups


def test_the_most_blocks_that_a_sequence_holds_on_its_way() -> None:
    assert blocks_alone((None,), 100, 16, 64) == 7
    assert blocks_alone((None, 5), 100, 16, 8) == 7 + 2  # 12 tokens touch two blocks
    assert blocks_alone((5, 5), 10, 16, 8) == 2
    assert most_at_once(64, async_scheduling=True) == 128
    for window in (1, 4, 5, 8):
        table, most = GroupedTable(4, BlockAllocator(99), (window,)), 0
        for start in range(0, 60, 6):
            table.append(6)
            most = max(most, len(table.blocks))
            table.give_back(start + 6)
        assert most <= blocks_alone((window,), 60, 4, 6) <= most + 1


def engine_with(windows: Sequence[int | None], num_blocks: int, *, async_scheduling: bool = False) -> Engine:
    """An engine in debug mode, with blocks of 2 tokens, whose runner has no model."""
    sizes = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=64,
        vocab_size=99,
        block_size=2,
        max_num_batched_tokens=64,
        group_windows=tuple(windows),
        async_scheduling=async_scheduling,
        debug=True,
    )
    runner = ContentRunner(num_blocks, 0, 2, 99, windows=sizes.group_windows)
    engine = Engine(sizes, REFERENCE, runner)
    runner.engine = engine
    return engine


def greedy(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, temperature=0 if n == 1 else 1, seed=1, ignore_eos=True)


def run(engine: Engine) -> None:
    for _ in range(100):
        if not engine.has_unfinished_requests():
            return
        engine.step()
    raise AssertionError("requests wait for ever")


def test_a_hit_that_an_admission_of_the_same_step_has_evicted_is_counted_again() -> None:
    """A is admitted first, and evicts the blocks within a window without which B's hit is lost. Then B needs more
    blocks than were counted for it."""
    engine = engine_with((None, 4), 52)
    prompt = [*range(1, 46)]
    engine.add_request(prompt, greedy(8), request_id="the one that goes on")
    engine.step()
    engine.step()
    engine.add_request([*range(50, 63)], greedy(1), request_id="A")
    engine.add_request([*prompt[:10], 40], greedy(1), request_id="B")
    run(engine)


def test_hits_in_use_save_blocks_where_no_window_passes_them() -> None:
    """The blocks of a last window are shared for a while. The most blocks that the request holds stays the same."""
    engine = engine_with((None, 4), 90)
    prompt = [*range(1, 13)]
    engine.add_request(prompt, greedy(8), request_id="a")
    engine.step()
    engine.add_request([*prompt, 40], greedy(1), request_id="b")
    [waiting] = engine.scheduler.waiting
    alone = blocks_alone((None, 4), 13, 2, 64)
    assert engine.blocks.num_cached_tokens(waiting) == 12
    assert engine.blocks.blocks_to_admit(waiting) == alone - 6
    engine.abort("a")
    assert engine.blocks.num_cached_tokens(waiting) == 12
    assert engine.blocks.blocks_to_admit(waiting) == alone  # cached blocks that nobody holds count as available


def test_what_a_request_begins_with_is_not_published_again() -> None:
    engine = engine_with((None, 4), 90)
    prompt, hashed = [*range(1, 13)], list[tuple[int, ...]]()
    engine.add_request(prompt, greedy(1), request_id="a")
    run(engine)
    cache = engine.blocks.prefix_cache
    assert isinstance(cache, GroupedPrefixCache)
    right = cache._chain_hash

    def chain_hash(parent: int, tokens: tuple[int, ...]) -> int:
        hashed.append(tokens)
        return right(parent, tokens)

    cache._chain_hash = chain_hash
    engine.add_request([*prompt, 40, 41, 42], greedy(1), request_id="b")
    run(engine)
    assert [hashed.count((i, i + 1)) for i in range(1, 13, 2)] == [1] * 6  # looked up once


def test_the_last_sequence_to_catch_up_may_begin_in_a_step_that_does_not_run() -> None:
    """Its sibling has all its tokens but one, so nothing is left to catch up. Blocks or tokens may be short then."""
    engine = engine_with((2,), 40)
    engine.add_request([*range(1, 9)], greedy(8, n=2), request_id="a")
    engine.step()
    engine._recover(RuntimeError("both sequences lose their blocks"))
    engine.step()
    assert [sequence.num_computed for sequence in engine.scheduler.running[0].sequences] == [8, 0]
    engine.scheduler.assign_ahead()  # a plan that is given up
    assert [sequence.num_computed for sequence in engine.scheduler.running[0].sequences] == [8, 8]
    engine.check_invariants()
    run(engine)


def test_a_step_in_flight_reads_no_block_that_was_given_back() -> None:
    engine = engine_with((3,), 40, async_scheduling=True)
    engine.add_request([*range(1, 6)], greedy(20, n=2), request_id="a")
    rows_in_flight = 0
    for _ in range(15):
        engine.step()
        for step in engine.steps_in_flight:
            for row, (sequence, _) in zip(step.plan.rows, step.plan.work(), strict=True):
                assert HOLE not in sequence.entries[first_seen(3, row.start) // 2 :]
                rows_in_flight += 1
    assert rows_in_flight > 20
    run(engine)


@pytest.mark.parametrize("windows", [(4,), (None, 4), (None,)])
def test_tokens_that_windows_have_passed_count_as_computed(windows: tuple[int | None, ...]) -> None:
    """Computing them again is the price of a preemption."""
    engine = engine_with(windows, 90)
    for n in (1, 2):
        engine.add_request([*range(1, 30)], greedy(20, n), request_id=str(n))
    for _ in range(11):
        engine.step()
    one, two = engine.scheduler.running
    assert one.num_tokens_held(2) == 29 + 10
    assert two.num_tokens_held(2) == 28 + 2 * (1 + 10)  # the blocks of the prompt's first 28 tokens are shared


def test_what_never_fits_is_refused_with_the_groups_and_the_tokens_of_a_step() -> None:
    """A step's tokens count, until its windows have passed them: a smaller step would let the request in."""
    why = r"can need 50 blocks of 2 tokens in 2 groups of layers, .* or n \(1\), lower max_num_batched_tokens \(64\)"
    with pytest.raises(InvalidRequest, match=why):
        engine_with((None, 4), 40).add_request([*range(1, 31)], greedy(21))
    with pytest.raises(InvalidRequest, match=r"can need 25 blocks of 2 tokens, .* or n \(1\), or raise num_blocks"):
        engine_with((None,), 20).add_request([*range(1, 31)], greedy(21))


def test_a_table_of_holes_only_is_told_as_freed() -> None:
    engine = engine_with((1,), 20)
    heard: list[Event] = []
    engine.listeners.append(heard.append)
    engine.add_request([1, 2, 3, 4, 5, 6], greedy(8), request_id="a")
    engine.step()
    engine.abort("a")
    assert BlocksFreed(0, ()) in heard
    assert engine.blocks.num_tokens == 0


def test_floors_are_refused_by_name() -> None:
    with pytest.raises(
        InvalidRequest, match=r"kv_cache_tiers is \('host',\), but some of the model's layers have a win"
    ):
        EngineConfig(
            num_blocks=9,
            max_model_len=9,
            vocab_size=9,
            num_swap_blocks=9,
            group_windows=(None, 4),
            kv_cache_tiers=("host",),
            enable_prefix_caching=True,
        )
