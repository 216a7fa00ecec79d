"""Every tier's block table against the simplest model there is: for each table, the list of what its slots hold.

Several tables live over two pools (device and host), fork, grow, shrink, swap blocks and move. Whatever a table is
said to hold must be read back through its slots. Checked after every call: exact-references, exclusive-write, content,
atomic-failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

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

from minipaged import contracts
from minipaged.contracts import Tier
from minipaged.errors import BlockNotAllocated, OutOfBlocks
from minipaged.reference.block_allocator import BlockAllocator
from tests.effort import examples
from tests.workloads import TIERS

every_tier = pytest.mark.parametrize("tier", TIERS.values(), ids=TIERS)
picks = st.integers(0, 7)
"""Which of the tables (or blocks), where it is to be one of them."""
token_counts = st.integers(0, 9)


@dataclass
class Model:
    """A table, and what it ought to be."""

    table: contracts.BlockTable
    content: list[int]
    """What its slots hold, by position."""
    pool: int = 0
    """0: device, 1: host."""


class BlockTableMachine(RuleBasedStateMachine):
    """Calls in any order on the tables of one tier."""

    tier: Tier

    @initialize(
        block_size=st.sampled_from([4, 3, 2, 1, 5, 6, 7, 8]),
        pool_sizes=st.sampled_from([(6, 4), (3, 3), (4, 2), (2, 8), (1, 1)]),
        prompt=token_counts,
    )
    def start(self, block_size: int, pool_sizes: tuple[int, int], prompt: int) -> None:
        self.block_size = block_size
        self.pools = [type(self).tier.block_allocator(num_blocks) for num_blocks in pool_sizes]
        self.memory: list[dict[int, int]] = [{}, {}]  # of each pool: slot -> what was written there
        self.models: list[Model] = []
        self.fresh = count()
        self.make()
        self.append(0, prompt)
        self.fork(0)

    # --- Helpers ----------------------------------------------------------------------------------

    def pick(self, which: int) -> Model:
        return self.models[which % len(self.models)]

    def new_table(self) -> contracts.BlockTable:
        return type(self).tier.block_table(self.block_size, self.pools[0])

    def copy(self, source: tuple[int, int], destination: tuple[int, int]) -> None:
        """Copy a block; each is (pool, block)."""
        for offset in range(self.block_size):
            slot = source[1] * self.block_size + offset
            if slot in self.memory[source[0]]:
                self.memory[destination[0]][destination[1] * self.block_size + offset] = self.memory[source[0]][slot]

    @contextmanager
    def refused(self, error: type[Exception]) -> Iterator[None]:
        """The call raises `error`; and it changes nothing (atomic-failure)."""
        before = self.everything()
        with pytest.raises(error):
            yield
        assert self.everything() == before, "atomic-failure"

    def everything(self) -> object:
        return (
            [(list(model.table.blocks), model.table.num_tokens) for model in self.models],
            [[pool.ref_count(block) for block in range(pool.num_blocks)] for pool in self.pools],
        )

    # --- What can be done to a table --------------------------------------------------------------

    @precondition(lambda self: len(self.models) < 4)
    @rule()
    def make(self) -> None:
        self.models.append(Model(self.new_table(), []))

    @precondition(lambda self: self.models)
    @rule(which=picks, num_tokens=token_counts)
    def append(self, which: int, num_tokens: int) -> None:
        model = self.pick(which)
        pool, table = self.pools[model.pool], model.table
        needed = table.blocks_needed(num_tokens)
        if needed > pool.num_free:
            with self.refused(OutOfBlocks):
                table.append(num_tokens)
            return
        free_before = pool.num_free
        writes_into_last = num_tokens > 0 and len(model.content) % self.block_size > 0
        shared = writes_into_last and pool.ref_count(table.blocks[-1]) > 1
        copies = table.append(num_tokens)
        assert len(copies) == shared, "one copy where it is needed, and none elsewhere"
        assert free_before - pool.num_free == needed, "blocks_needed is what append takes"
        for source, destination in copies:
            self.copy((model.pool, source), (model.pool, destination))
        first = len(model.content)
        for slot in table.slot_mapping(first, first + num_tokens):
            assert pool.ref_count(slot // self.block_size) == 1, "exclusive-write"
            value = next(self.fresh)
            self.memory[model.pool][slot] = value
            model.content.append(value)

    @precondition(lambda self: 0 < len(self.models) < 4)
    @rule(which=picks)
    def fork(self, which: int) -> None:
        model = self.pick(which)
        self.models.append(Model(model.table.fork(), list(model.content), model.pool))

    @precondition(lambda self: self.models)
    @rule(which=picks, keep=token_counts)
    def trim(self, which: int, keep: int) -> None:
        model = self.pick(which)
        keep = min(keep, len(model.content))
        model.table.trim(keep)
        del model.content[keep:]

    @precondition(lambda self: self.models)
    @rule(which=picks, other=picks, num_blocks=st.integers(0, 3))
    def adopt(self, which: int, other: int, num_blocks: int) -> None:
        """An empty table begins with full blocks of another (which is over the device pool, as every new table is)."""
        model, donor = Model(self.new_table(), []), self.pick(other)
        if donor.pool != 0 or len(self.models) == 4:
            return
        num_blocks = min(num_blocks, len(donor.content) // self.block_size)
        model.table.adopt(list(donor.table.blocks[:num_blocks]))
        model.content = donor.content[: num_blocks * self.block_size]
        self.models.append(model)

    @precondition(lambda self: self.models)
    @rule(which=picks, logical=picks)
    def replace(self, which: int, logical: int) -> None:
        """By a copy of the same content."""
        model = self.pick(which)
        pool = self.pools[model.pool]
        if not model.table.blocks or not pool.num_free:
            return
        logical %= len(model.table.blocks)
        twin = pool.allocate()
        self.copy((model.pool, model.table.blocks[logical]), (model.pool, twin))
        model.table.replace(logical, twin)
        pool.free(twin)  # the table alone holds it now

    @precondition(lambda self: self.models)
    @rule(which=picks)
    def replace_by_itself(self, which: int) -> None:
        table = self.pick(which).table
        for logical, block in enumerate(list(table.blocks)):
            table.replace(logical, block)

    @precondition(lambda self: self.models)
    @rule(which=picks)
    def relocate(self, which: int) -> None:
        model = self.pick(which)
        target = 1 - model.pool
        if len(model.table.blocks) > self.pools[target].num_free:
            return
        new = self.pools[target].allocate_many(len(model.table.blocks))
        for source, destination in zip(model.table.blocks, new, strict=True):
            self.copy((model.pool, source), (target, destination))
        model.table.relocate(new, self.pools[target])
        model.pool = target

    # --- What is refused --------------------------------------------------------------------------

    @precondition(lambda self: self.models)
    @rule(which=picks, beyond=st.integers(1, 3))
    def ask_for_what_is_not_there(self, which: int, beyond: int) -> None:
        model = self.pick(which)
        table, num_tokens, num_blocks = model.table, len(model.content), len(model.table.blocks)
        calls: list[Callable[[], object]] = [
            lambda: table.trim(num_tokens + beyond),
            lambda: table.trim(-beyond),
            lambda: table.slot_mapping(0, num_tokens + beyond),
            lambda: table.slot_mapping(-beyond, num_tokens),
            lambda: table.slot_mapping(num_tokens, num_tokens - beyond),
            lambda: table.append(-beyond),
            lambda: table.blocks_needed(-beyond),
            lambda: table.replace(num_blocks + beyond - 1, 0),
            lambda: table.replace(-beyond, 0),
            lambda: table.relocate([0] * (num_blocks + beyond), self.pools[0]),
        ]
        if num_blocks:
            calls.append(lambda: table.adopt([]))
        for call in calls:
            with self.refused(ValueError):
                call()

    @precondition(lambda self: self.models)
    @rule(which=picks)
    def hold_a_block_that_nobody_holds(self, which: int) -> None:
        model = self.pick(which)
        pool = self.pools[model.pool]
        nobodys = next((block for block in range(pool.num_blocks) if pool.ref_count(block) == 0), pool.num_blocks)
        if model.table.blocks:
            with self.refused(BlockNotAllocated):
                model.table.replace(0, nobodys)
        elif model.pool == 0:
            held = [block for other in self.models if other.pool == 0 for block in other.table.blocks]
            with self.refused(BlockNotAllocated):
                model.table.adopt([*held[:1], nobodys])

    # --- What always holds ------------------------------------------------------------------------

    @invariant()
    def every_table_reads_back_what_it_holds(self) -> None:
        """Content; and no block more than the tokens need."""
        for model in self.models:
            num_tokens = len(model.content)
            assert model.table.num_tokens == num_tokens
            assert len(model.table.blocks) == -(-num_tokens // self.block_size)
            slots = model.table.slot_mapping(0, num_tokens)
            assert [self.memory[model.pool][slot] for slot in slots] == model.content, "content"

    @invariant()
    def every_reference_is_a_table_entry(self) -> None:
        """Exact-references, in both pools."""
        for number, pool in enumerate(self.pools):
            holders = Counter(block for model in self.models if model.pool == number for block in model.table.blocks)
            for block in range(pool.num_blocks):
                assert pool.ref_count(block) == holders[block], "exact-references"
            assert pool.num_free == pool.num_blocks - len(+holders), "conservation"

    def teardown(self) -> None:
        """Trimming every table to nothing leaves both pools full."""
        for model in getattr(self, "models", []):
            model.table.trim(0)
        for pool in getattr(self, "pools", []):
            assert pool.num_free == pool.num_blocks


@every_tier
def test_exact_references_exclusive_write_content_and_atomic_failure_hold_after_every_call(tier: Tier) -> None:
    machine = type("Machine", (BlockTableMachine,), {"tier": tier})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(150), stateful_step_count=40))


@every_tier
@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_has_at_least_one_slot(tier: Tier, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size is {block_size}"):
        tier.block_table(block_size, tier.block_allocator(1))


@every_tier
def test_the_papers_figure_6_block_by_block(tier: Tier) -> None:
    """Seven prompt tokens in blocks of four: the eighth fills the second block, the ninth takes a third."""
    table = tier.block_table(4, tier.block_allocator(8))
    taken = []
    for num_tokens in (7, 1, 1):
        taken.append(table.blocks_needed(num_tokens))
        table.append(num_tokens)
    assert taken == [2, 0, 1]
    blocks = list(table.blocks)
    assert table.slot_mapping(0, 9) == [blocks[p // 4] * 4 + p % 4 for p in range(9)]


@every_tier
def test_the_papers_figure_8_the_first_writer_copies_and_the_last_does_not(tier: Tier) -> None:
    """Exclusive-write: two samples of one prompt share its last block until the first of them writes into it."""
    allocator = tier.block_allocator(8)
    first = tier.block_table(4, allocator)
    first.append(7)
    shared = list(first.blocks)
    second = first.fork()
    assert list(second.blocks) == shared
    assert first.append(1) == [(shared[1], first.blocks[1])]
    assert first.blocks[1] != shared[1]
    assert second.append(1) == []
    assert list(second.blocks) == shared
    assert allocator.ref_count(shared[0]) == 2


@every_tier
def test_a_full_last_block_may_stay_shared_while_both_go_on(tier: Tier) -> None:
    table = tier.block_table(4, tier.block_allocator(8))
    table.append(4)
    assert table.fork().append(1) == []
    assert table.append(1) == []


class Recorder(BlockAllocator):
    """Remembers the order in which blocks were given back."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.freed: list[int] = []

    def free(self, block: int) -> None:
        super().free(block)
        self.freed.append(block)


@every_tier
def test_trim_gives_blocks_back_last_first(tier: Tier) -> None:
    allocator = Recorder(8)
    table = tier.block_table(2, allocator)
    table.append(9)
    blocks = list(table.blocks)
    table.trim(4)
    assert allocator.freed == [blocks[4], blocks[3], blocks[2]]


class CopyFails(BlockAllocator):
    def copy_on_write(self, block: int) -> int:
        raise MemoryError


@every_tier
def test_append_changes_nothing_when_copy_on_write_fails_after_blocks_were_taken(tier: Tier) -> None:
    """Atomic-failure, in the middle of a call that takes new blocks and copies one."""
    allocator = CopyFails(8)
    table = tier.block_table(4, allocator)
    table.append(2)
    sibling = table.fork()
    with pytest.raises(MemoryError):
        table.append(9)
    assert allocator.num_free == 7
    assert (table.num_tokens, list(table.blocks)) == (2, list(sibling.blocks))
