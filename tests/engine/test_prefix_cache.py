"""The prefix cache against the simplest model there is: the set of token prefixes whose blocks it keeps.

Run with the real chain hash and with bad ones, under which most lookups meet another block's hash. Checked after every
step: exact-references, conservation, content (a match leads to the K/V of exactly these tokens), and that what counts
as evictable is what only the cache holds. A prefix that does not end with a full block is a partial entry: the last
block of a sequence that has finished.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minipaged.contracts import BlockTable as AnyBlockTable
from minipaged.engine.cached_blocks import CachedBlock
from minipaged.engine.partial_hits import beginning_of, keep
from minipaged.engine.prefix_cache import PrefixCache
from minipaged.handover.block_hashes import ChainHash, chain_hash
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable
from tests.effort import examples, scaled

Prefix = tuple[int, ...]


def four_hashes(parent: int, tokens: Prefix) -> int:
    return chain_hash(parent, tokens) % 4


def one_hash(parent: int, tokens: Prefix) -> int:
    return 0


def ignores_the_parent(parent: int, tokens: Prefix) -> int:
    """The same tokens after different prefixes collide."""
    return chain_hash(0, tokens)


@dataclass
class Sequence:
    tokens: list[int]
    table: AnyBlockTable
    num_published: int = 0


def num_common(one: list[int], other: Prefix) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=7)
picks = st.integers(0, 3)


class PrefixCacheMachine(RuleBasedStateMachine):
    """Sequences come, share what is cached, grow, fork and go; the cache is asked to evict now and then."""

    hash_function: ChainHash

    @initialize(block_size=st.integers(1, 3), num_blocks=st.integers(3, 9))
    def start(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks)
        self.cache = PrefixCache(block_size, self.allocator, type(self).hash_function)
        self.sequences: list[Sequence] = []
        self.content: dict[int, Prefix] = {}
        """What was written last into each block: the K/V of these tokens' last `block_size`."""
        self.kept: dict[Prefix, int] = {}
        """The model: the block of each cached prefix."""
        self.waiting: list[tuple[list[int], list[CachedBlock]]] = []
        """Tokens that wait, with what the last look has found."""

    # --- What an engine does ----------------------------------------------------------------------

    @precondition(lambda self: len(self.sequences) < 3)
    @rule(tokens=token_lists)
    def begin(self, tokens: list[int]) -> None:
        found, num_tokens = self.cache.match(tokens)
        longest = []
        for end in range(self.block_size, len(tokens), self.block_size):
            if tuple(tokens[:end]) not in self.kept:
                break
            longest.append(self.kept[tuple(tokens[:end])])
        assert found[: len(longest)] == longest, "the longest chain of full blocks, one token left to run"
        start = len(longest) * self.block_size
        after = [prefix[start:] for prefix in self.kept if prefix[:start] == tuple(tokens[:start])]
        most = max((num_common(tokens[start:-1], other) for other in after), default=0)
        assert num_tokens == start + most, "then the longest beginning of a block"
        assert len(found) == len(longest) + (most > 0)
        for i, block in enumerate(found):
            end = min((i + 1) * self.block_size, num_tokens)
            assert self.content[block][:end] == tuple(tokens[:end]), "content"

        spare = self.allocator.num_free + self.cache.num_evictable - -(-len(tokens) // self.block_size)
        beginning = beginning_of(self.cache, tokens, spare)
        assert beginning.num_tokens in (num_tokens, start)
        table = BlockTable(self.block_size, self.allocator)
        table.adopt(beginning.blocks)
        table.trim(beginning.num_tokens)
        self.cache.reused(beginning.blocks)
        if beginning.takes_over:
            self.forget(beginning.blocks[-1])
            self.cache.drop(beginning.blocks[-1])
        sequence = Sequence(list(tokens), table, beginning.num_tokens // self.block_size)
        if self.run(sequence):
            self.sequences.append(sequence)
        else:
            self.release(sequence)

    @precondition(lambda self: self.sequences)
    @rule(which=picks, tokens=token_lists)
    def go_on(self, which: int, tokens: list[int]) -> None:
        sequence = self.sequences[which % len(self.sequences)]
        sequence.tokens += tokens
        if not self.run(sequence):
            self.sequences.remove(sequence)
            self.release(sequence)

    @precondition(lambda self: 0 < len(self.sequences) < 3)
    @rule(which=picks)
    def fork(self, which: int) -> None:
        parent = self.sequences[which % len(self.sequences)]
        self.sequences.append(Sequence(list(parent.tokens), parent.table.fork(), parent.num_published))

    @precondition(lambda self: self.sequences)
    @rule(which=picks)
    def abort(self, which: int) -> None:
        self.release(self.sequences.pop(which % len(self.sequences)))

    @precondition(lambda self: self.sequences)
    @rule(which=picks)
    def finish(self, which: int) -> None:
        sequence = self.sequences.pop(which % len(self.sequences))
        if entry := keep(self.cache, sequence.tokens, sequence.table, self.allocator):
            tokens = tuple(sequence.tokens)
            assert entry.block == sequence.table.blocks[-1]
            assert len(tokens) % self.block_size
            assert not any(prefix[: len(tokens)] == tokens for prefix in self.kept), "nothing redundant is added"
            self.kept[tokens] = entry.block
            self.drop_redundant(entry.block)
        self.release(sequence)

    @precondition(lambda self: len(self.waiting) < 3)
    @rule(tokens=token_lists)
    def wait(self, tokens: list[int]) -> None:
        self.waiting.append((tokens, []))

    @precondition(lambda self: self.waiting)
    @rule()
    def look_again(self) -> None:
        for tokens, found in self.waiting:
            self.cache.look_up(tokens, found)
            self.cache.look_up(tokens, anew := [])
            assert found == anew, "what was found before is forgotten when it is gone"

    @rule(num_blocks=st.integers(1, 3))
    def evict_some(self, num_blocks: int) -> None:
        self.evict(min(num_blocks, self.cache.num_evictable))

    # --- How ---------------------------------------------------------------------------------------

    def run(self, sequence: Sequence) -> bool:
        """Compute what is left of the sequence and publish it. False when there is no room."""
        table = sequence.table
        num_new = len(sequence.tokens) - table.num_tokens
        needed = table.blocks_needed(num_new)
        if needed > self.allocator.num_free + self.cache.num_evictable:
            return False
        self.evict(max(0, needed - self.allocator.num_free))
        copies = table.append(num_new)
        self.cache.released([source for source, _ in copies])
        for logical in range(sequence.num_published, len(table.blocks)):
            self.content[table.blocks[logical]] = tuple(sequence.tokens[: (logical + 1) * self.block_size])
        for logical, own, cached in self.cache.publish(sequence.tokens, table, sequence.num_published):
            assert table.blocks[logical] == cached
            prefix = tuple(sequence.tokens[: (logical + 1) * self.block_size])
            if own == cached:
                assert prefix not in self.kept
                self.kept[prefix] = cached
                self.drop_redundant(cached)
            else:
                assert self.kept[prefix] == cached
        sequence.num_published = table.num_tokens // self.block_size
        return True

    def release(self, sequence: Sequence) -> None:
        blocks = list(sequence.table.blocks)
        sequence.table.trim(0)
        self.cache.released(reversed(blocks))

    def evict(self, num_blocks: int) -> None:
        for block in self.cache.evict(num_blocks):
            self.forget(block)

    def forget(self, block: int) -> None:
        prefix = next(prefix for prefix, kept in self.kept.items() if kept == block)
        del self.kept[prefix]
        children = [other for other in self.kept if other[: len(prefix)] == prefix]
        assert not children or len(prefix) % self.block_size, "leaves before their parents"

    def drop_redundant(self, block: int) -> None:
        prefix = next(prefix for prefix, kept in self.kept.items() if kept == block)
        first = (len(prefix) - 1) // self.block_size * self.block_size
        shorter = [other for other in self.kept if first < len(other) < len(prefix) and prefix[: len(other)] == other]
        assert [self.cache.redundant(block)] == ([self.kept[other] for other in shorter] or [None])
        for other in shorter:
            self.cache.drop(self.kept.pop(other))

    # --- What always holds --------------------------------------------------------------------------

    @invariant()
    def the_cache_keeps_what_the_model_keeps(self) -> None:
        assert set(self.cache.blocks) == set(self.kept.values())
        assert all(block in self.cache for block in self.kept.values())
        for prefix, block in self.kept.items():
            assert self.content[block][: len(prefix)] == prefix, "content"

    @invariant()
    def every_reference_is_a_table_entry_or_the_caches(self) -> None:
        """Exact-references and conservation."""
        holders = Counter(block for sequence in self.sequences for block in sequence.table.blocks)
        holders.update(self.kept.values())
        for block in range(self.allocator.num_blocks):
            assert self.allocator.ref_count(block) == holders[block], "exact-references"
        assert self.allocator.num_free == self.allocator.num_blocks - len(+holders), "conservation"

    @invariant()
    def evictable_is_what_only_the_cache_holds(self) -> None:
        only_cached = {block for block in self.kept.values() if self.allocator.ref_count(block) == 1}
        assert {block for block in self.kept.values() if self.cache.is_evictable(block)} == only_cached
        assert self.cache.num_evictable == len(only_cached)

    def teardown(self) -> None:
        """When all sequences have gone and all is evicted, the pool is full again."""
        if not hasattr(self, "cache"):
            return
        for sequence in self.sequences:
            self.release(sequence)
        self.sequences = []
        self.evict(self.cache.num_evictable)
        assert self.allocator.num_free == self.allocator.num_blocks
        assert not self.kept


@scaled
@pytest.mark.parametrize("hash_function", [chain_hash, four_hashes, one_hash, ignores_the_parent])
def test_content_and_exact_references_hold_whatever_the_hash(hash_function: ChainHash) -> None:
    """And conservation; and num_evictable is exact; and leaves are evicted before their parents."""
    machine = type("Machine", (PrefixCacheMachine,), {"hash_function": staticmethod(hash_function)})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(100), stateful_step_count=30))


# --- By example -----------------------------------------------------------------------------------


class Pool:
    """A cache over a pool, and sequences that are computed and gone again at once."""

    def __init__(self, block_size: int = 2, num_blocks: int = 8, hash_function: ChainHash = chain_hash) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.cache = PrefixCache(block_size, self.allocator, hash_function)

    def compute(self, tokens: list[int]) -> AnyBlockTable:
        table = BlockTable(self.cache.block_size, self.allocator)
        found, num_tokens = self.cache.match(tokens)
        table.adopt(found)
        table.trim(num_tokens)
        self.cache.reused(found)
        copies = table.append(len(tokens) - table.num_tokens)
        self.cache.released([source for source, _ in copies])
        list(self.cache.publish(tokens, table, num_tokens // self.cache.block_size))
        return table

    def release(self, table: AnyBlockTable) -> list[int]:
        blocks = list(table.blocks)
        table.trim(0)
        self.cache.released(reversed(blocks))
        return blocks


def test_a_match_leaves_one_token_to_run_so_that_there_are_logits() -> None:
    pool = Pool()
    blocks = pool.release(pool.compute([1, 2, 3, 4]))
    assert pool.cache.match([1, 2, 3, 4]) == (blocks, 3)  # the second block, without its last token
    assert pool.cache.match([1, 2, 3]) == (blocks[:1], 2)
    assert pool.cache.match([1, 2, 3, 4, 5]) == (blocks, 4)


def test_the_same_tokens_after_another_prefix_do_not_match() -> None:
    """Content: K/V depend on everything before them too."""
    pool = Pool()
    pool.release(pool.compute([1, 2, 3, 4]))
    assert pool.cache.match([3, 4, 5]) == ([], 0)
    assert pool.cache.match([0, 0, 3, 4, 5]) == ([], 0)


def test_a_block_that_is_not_full_is_not_published() -> None:
    pool = Pool()
    pool.release(pool.compute([1, 2, 3]))
    assert pool.cache.num_evictable == 1
    assert pool.allocator.num_free == 7


def test_the_least_recently_used_prefix_is_evicted_first_its_last_block_before_its_first() -> None:
    pool = Pool()
    old = pool.release(pool.compute([1, 1, 2, 2, 0]))
    new = pool.release(pool.compute([3, 3, 4, 4, 0]))
    pool.release(pool.compute([1, 1, 2, 2, 5]))  # used again: now the newer one
    assert pool.cache.evict(4) == [new[1], new[0], old[1], old[0]]


def test_what_is_computed_twice_at_the_same_time_is_kept_once() -> None:
    """Exact-references: the later sequence exchanges its own block for the cached one and frees its own."""
    pool = Pool()
    tables = [BlockTable(2, pool.allocator) for _ in range(2)]
    for table in tables:
        table.append(3)
    own = list(tables[1].blocks)
    first = tables[0].blocks[0]
    assert list(pool.cache.publish([1, 2, 3], tables[0], 0)) == [(0, first, first)]
    assert list(pool.cache.publish([1, 2, 3], tables[1], 0)) == [(0, own[0], first)]
    assert pool.allocator.ref_count(own[0]) == 0
    assert pool.allocator.ref_count(first) == 3


def test_a_block_whose_hash_is_taken_stays_private_and_so_do_those_after_it() -> None:
    pool = Pool(hash_function=one_hash)
    pool.release(pool.compute([1, 2, 0]))
    table = pool.compute([3, 4, 5, 6, 0])
    assert not any(block in pool.cache for block in table.blocks)
    assert pool.cache.match([3, 4, 0]) == ([], 0)
    pool.release(table)
    assert pool.allocator.num_free + pool.cache.num_evictable == 8


def test_the_chain_hash_is_the_same_in_every_process() -> None:
    program = "from minipaged.handover.block_hashes import chain_hash; print(chain_hash(chain_hash(0, (1, 2)), (3, 4)))"
    hashes = {
        subprocess.check_output([sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, text=True)
        for seed in ("1", "2")
    }
    assert hashes == {f"{chain_hash(chain_hash(0, (1, 2)), (3, 4))}\n"}
