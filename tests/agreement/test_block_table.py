"""The two block tables, side by side; and the tables on the device beside both.

Two worlds, one of each tier, with a device pool and a host pool and several tables, are given the same calls. What
the calls return or raise, all tables and all counts must be the same after each (atomic-failure included). Now and then
a batch of the fast tables is brought to the device, and must read there as it does in the reference.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor

from tests.effort import examples, scaled

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from minipaged import contracts
from minipaged.fast import block_allocator as fast_allocator
from minipaged.fast import block_table as fast
from minipaged.fast import cpu, gpu
from minipaged.fast.block_table import DeviceTables
from minipaged.fast.kernels import BlockTableKernels
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable

GPU_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_ROWS, MAX_BLOCKS, MAX_TABLES = 3, 4, 5
picks = st.integers(0, MAX_TABLES - 1)
token_counts = st.integers(0, 9)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, in lists; or what it raises."""
    try:
        result = call()
    except Exception as error:
        return type(error), str(error)
    return list(result) if isinstance(result, Sequence) else result


@dataclass
class World:
    """Pools and tables of one tier."""

    make_allocator: Callable[[int], contracts.BlockAllocator]
    make_table: Callable[[int, contracts.BlockAllocator], Any]
    pools: list[contracts.BlockAllocator] = field(default_factory=list)
    tables: list[Any] = field(default_factory=list)

    def everything(self) -> object:
        return (
            [(list(table.blocks), table.num_tokens) for table in self.tables],
            [[pool.ref_count(block) for block in range(pool.num_blocks)] for pool in self.pools],
            [pool.num_free for pool in self.pools],
        )


class TwoWorlds(RuleBasedStateMachine):
    """The same calls in both worlds; `pool_of` says which pool (0: device, 1: host) each of the tables is over."""

    kernels: BlockTableKernels
    device: str

    @initialize(
        block_size=st.integers(1, 5), pool_sizes=st.sampled_from([(7, 4), (3, 3), (4, 2), (12, 8)]), prompt=token_counts
    )
    def start(self, block_size: int, pool_sizes: tuple[int, int], prompt: int) -> None:
        self.block_size = block_size
        self.worlds = [
            World(BlockAllocator, BlockTable),
            World(fast_allocator.BlockAllocator, fast.BlockTable),
        ]
        for world in self.worlds:
            world.pools = [world.make_allocator(num_blocks) for num_blocks in pool_sizes]
        self.pool_of: list[int] = []
        self.mirror = DeviceTables(MAX_ROWS, MAX_BLOCKS, type(self).device, type(self).kernels)
        self.make()
        self.append(0, prompt)
        self.sync([0])
        self.fork(0)

    def both(self, call: Callable[[World], Any]) -> Any:
        expected, actual = (outcome(lambda world=world: call(world)) for world in self.worlds)
        assert actual == expected
        return expected

    def on_both(self, which: int, call: Callable[[Any], Any]) -> None:
        """Call something of one of the tables."""
        if self.pool_of:
            self.both(lambda world: call(world.tables[which % len(self.pool_of)]))

    @property
    def reference(self) -> World:
        return self.worlds[0]

    # --- Calls ------------------------------------------------------------------------------------

    @rule()
    def make(self) -> None:
        if len(self.pool_of) < MAX_TABLES:
            for world in self.worlds:
                world.tables.append(world.make_table(self.block_size, world.pools[0]))
            self.pool_of.append(0)

    @rule(which=picks, num_tokens=token_counts)
    def append(self, which: int, num_tokens: int) -> None:
        self.on_both(which, lambda table: table.blocks_needed(num_tokens))
        self.on_both(which, lambda table: table.append(num_tokens))

    @rule(which=picks)
    def fork(self, which: int) -> None:
        if 0 < len(self.pool_of) < MAX_TABLES:
            self.on_both(which, lambda table: None)
            for world in self.worlds:
                world.tables.append(world.tables[which % len(self.pool_of)].fork())
            self.pool_of.append(self.pool_of[which % len(self.pool_of)])

    @rule(which=picks, keep=token_counts)
    def trim(self, which: int, keep: int) -> None:
        self.on_both(which, lambda table: table.trim(min(keep, table.num_tokens)))

    @rule(which=picks)
    def forget(self, which: int) -> None:
        """A sequence ends: its table is trimmed to nothing, and is no more."""
        if self.pool_of:
            which %= len(self.pool_of)
            self.on_both(which, lambda table: table.trim(0))
            for world in self.worlds:
                del world.tables[which]
            del self.pool_of[which]
            gc.collect(0)

    @rule(which=picks, blocks=st.lists(st.integers(-1, 7), max_size=5))
    def adopt(self, which: int, blocks: list[int]) -> None:
        self.on_both(which, lambda table: table.adopt(blocks))

    @rule(which=picks, other=picks, num_blocks=st.integers(0, 5))
    def adopt_of_another(self, which: int, other: int, num_blocks: int) -> None:
        self.both(
            lambda world: (
                self.pool_of
                and world.tables[which % len(self.pool_of)].adopt(
                    world.tables[other % len(self.pool_of)].blocks[:num_blocks]
                )
            )
        )

    @rule(which=picks, logical=st.integers(-1, 4), block=st.integers(-1, 7))
    def replace(self, which: int, logical: int, block: int) -> None:
        self.on_both(which, lambda table: table.replace(logical, block))

    @rule(which=picks, more=st.sampled_from([0, 0, 0, 1]))
    def relocate(self, which: int, more: int) -> None:
        if not self.pool_of:
            return
        which %= len(self.pool_of)
        table, target = self.reference.tables[which], 1 - self.pool_of[which]
        num_blocks = len(table.blocks) + more
        if num_blocks <= self.reference.pools[target].num_free:

            def move(world: World) -> None:
                blocks = world.pools[target].allocate_many(num_blocks)
                world.tables[which].relocate(blocks, world.pools[target])

            moved = self.both(move) is None
            self.pool_of[which] = target if moved else 1 - target

    @rule(which=picks, start=st.integers(-1, 9), count=st.sampled_from([-1, 0, 1, 1, 2, 3, 4, 9]))
    def slots(self, which: int, start: int, count: int) -> None:
        self.on_both(which, lambda table: table.slot_mapping(start, start + count))
        self.on_both(which, lambda table: table.slot_mapping(0, table.num_tokens))

    @rule(which=picks, num_tokens=st.sampled_from([-1, 100]))
    def ask_for_too_much(self, which: int, num_tokens: int) -> None:
        self.on_both(which, lambda table: table.trim(num_tokens))
        self.on_both(which, lambda table: table.append(num_tokens))
        self.on_both(which, lambda table: table.blocks_needed(num_tokens))

    # --- The device -------------------------------------------------------------------------------

    @rule(which=st.lists(picks, unique=True))
    def sync(self, which: list[int]) -> None:
        """The batch's tables read on the device as they do in the reference; too large a batch is refused."""
        which = [i for i in which if i < len(self.pool_of)]
        expected = [list(self.reference.tables[i].blocks) for i in which]
        batch = [self.worlds[1].tables[i] for i in which]
        if len(batch) > MAX_ROWS or any(len(blocks) > MAX_BLOCKS for blocks in expected):
            with pytest.raises(ValueError, match=r"sequences in one batch|a sequence has"):
                self.mirror.sync(batch)
            return
        rows = self.mirror.sync(batch)
        assert len(set(rows)) == len(rows)
        assert [self.mirror.tables[row, : len(e)].tolist() for row, e in zip(rows, expected, strict=True)] == expected
        assert self.mirror.sync(batch) == rows  # a table keeps its row

    @rule(which=picks)
    def sync_all_but_some(self, which: int) -> None:
        """The batch of most steps: as many as there is room for."""
        self.sync([i for i in range(len(self.pool_of)) if i != which][:MAX_ROWS])

    # --- What always holds ------------------------------------------------------------------------

    @invariant()
    def both_worlds_are_the_same(self) -> None:
        expected, actual = (world.everything() for world in self.worlds)
        assert actual == expected

    def teardown(self) -> None:
        """The free blocks come in the same order."""
        for number in range(2 if hasattr(self, "mirror") else 0):
            self.both(lambda world, number=number: world.pools[number].allocate_many(world.pools[number].num_free))


@scaled
@pytest.mark.parametrize(
    ("kernels", "device", "thorough", "steps"),
    [pytest.param(cpu, "cpu", 300, 50, id="cpu"), pytest.param(gpu, GPU_DEVICE, 40, 40, id="gpu")],
)
def test_every_call_has_the_same_outcome_and_the_device_follows(
    kernels: BlockTableKernels, device: str, thorough: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "FEW", 3)  # more than 3 positions, and
    monkeypatch.setattr(fast_allocator, "MANY", 3)  # 3 blocks or more, go the way of the many
    machine = type("Machine", (TwoWorlds,), {"kernels": kernels, "device": device})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(thorough), stateful_step_count=steps))


# --- What is sent, and how often --------------------------------------------------------------------


class Recorder:
    """Kernels that remember what they were called with."""

    def __init__(self, kernels: BlockTableKernels) -> None:
        self.kernels = kernels
        self.calls: list[tuple[str, list[list[int]]]] = []

    def edit_tables(self, tables: Tensor, edits: Tensor) -> None:
        self.calls.append(("edit", edits.tolist()))
        self.kernels.edit_tables(tables, edits)

    def fork_tables(self, tables: Tensor, forks: Tensor) -> None:
        self.calls.append(("fork", forks.tolist()))
        self.kernels.fork_tables(tables, forks)

    def take(self) -> list[tuple[str, list[list[int]]]]:
        calls, self.calls = self.calls, []
        return calls


class Setup:
    """Tables over one pool, and what is sent to the device for them."""

    def __init__(self, max_rows: int = 8, max_blocks: int = 8) -> None:
        self.allocator = fast_allocator.BlockAllocator(64)
        self.recorder = Recorder(cpu)
        self.mirror = DeviceTables(max_rows, max_blocks, "cpu", self.recorder)

    def table(self, num_tokens: int) -> fast.BlockTable:
        table = fast.BlockTable(2, self.allocator)
        table.append(num_tokens)
        return table

    def sent(self, *batch: fast.BlockTable) -> list[tuple[str, list[list[int]]]]:
        """What it takes to bring the device up to date; it is then."""
        for row, table in zip(self.mirror.sync(batch), batch, strict=True):
            assert self.mirror.tables[row, : len(table.blocks)].tolist() == list(table.blocks)
        return self.recorder.take()


def test_only_what_changed_is_sent_and_nothing_when_nothing_did() -> None:
    setup = Setup()
    one, two = setup.table(5), setup.table(2)
    assert setup.sent(one, two) == [
        ("edit", [[one.row, 0, 0], [one.row, 1, 1], [one.row, 2, 2], [two.row, 0, 3]]),
    ]
    one.append(1)  # its last block had room
    assert setup.sent(one, two) == []
    one.append(1)
    two.append(1)
    assert setup.sent(one, two) == [("edit", [[one.row, 3, 4], [two.row, 1, 5]])]
    one.trim(5)
    assert setup.sent(one, two) == []
    one.append(2)  # takes the same block again
    assert setup.sent(one, two) == []
    one.trim(5)
    two.append(3)  # takes it first
    one.append(2)
    assert setup.sent(one, two) == [("edit", [[one.row, 3, 6], [two.row, 2, 4]])]


def test_forks_are_copied_on_the_device_and_their_copies_on_write_are_edits() -> None:
    """Paper, section 4.4, Fig. 8: three samples of one prompt, whose last block has room."""
    setup = Setup()
    parent = setup.table(5)
    setup.sent(parent)
    children = [parent.fork(), parent.fork()]
    for table in (parent, *children):
        table.append(1)  # the last of the three writes into the block itself
    assert setup.sent(parent, *children) == [
        ("fork", [[parent.row, child.row, 3] for child in children]),
        ("edit", [[parent.row, 2, 3], [children[0].row, 2, 4]]),
    ]


def test_a_fork_of_a_fork_is_copied_from_the_ancestor_that_the_device_knows() -> None:
    setup = Setup()
    parent = setup.table(5)
    setup.sent(parent)
    child = parent.fork()
    grandchild = child.fork()
    assert setup.sent(grandchild, child) == [("fork", [[parent.row, table.row, 3] for table in (grandchild, child)])]


def test_children_of_a_parent_that_is_gone_are_copied_from_what_it_left() -> None:
    """As at each step of a beam search (Fig. 9)."""
    setup = Setup(max_rows=4)
    beams = [setup.table(4), setup.table(4)]
    setup.sent(*beams)
    for _ in range(5):
        rows = [beam.row for beam in beams]
        beams = [beams[1].fork(), beams[1].fork()]  # and the old ones are no more
        assert setup.sent(*beams) == [("fork", [[rows[1], beam.row, 2] for beam in beams])]


def test_a_row_that_is_overwritten_in_the_same_call_is_copied_to_nobody() -> None:
    """With rows for the batch alone, the children of one that is gone take its row."""
    setup = Setup(max_rows=2)
    parent, other = setup.table(4), setup.table(2)
    setup.sent(parent, other)
    children = [parent.fork(), parent.fork()]
    blocks = list(parent.blocks)
    del parent, other
    [(kind, edits)] = setup.sent(*children)
    assert kind == "edit"
    assert {tuple(edit[1:]) for edit in edits} <= set(enumerate(blocks))


def test_a_table_that_is_not_in_the_batch_gives_up_its_row_only_when_rows_run_out() -> None:
    setup = Setup(max_rows=2)
    one, two, three = setup.table(2), setup.table(4), setup.table(6)
    setup.sent(one, two)
    assert setup.sent(one) == []
    assert len(setup.sent(one, three)) == 1
    assert two.mirror is None
    assert len(setup.sent(two)) == 1
    assert setup.sent(two) == []


def test_swapped_in_again_a_table_is_sent_anew() -> None:
    setup = Setup()
    table = setup.table(4)
    setup.sent(table)
    host = fast_allocator.BlockAllocator(8)
    host.allocate_many(3)
    table.relocate(host.allocate_many(2), host)
    setup.allocator.allocate_many(5)
    table.relocate(setup.allocator.allocate_many(2), setup.allocator)
    assert setup.sent(table) == [("edit", [[table.row, logical, block] for logical, block in enumerate(table.blocks)])]


def test_a_table_may_go_from_one_mirror_to_another_and_back() -> None:
    setup = Setup()
    table = setup.table(4)
    other = DeviceTables(1, 8, "cpu", cpu)
    for mirror in (setup.mirror, other, setup.mirror, other):
        [row] = mirror.sync([table])
        assert mirror.tables[row, :2].tolist() == list(table.blocks)
        table.append(1)
        table.trim(4)


def test_thousands_of_slots_at_once_are_those_of_the_reference() -> None:
    expected, actual = BlockTable(16, BlockAllocator(500)), fast.BlockTable(16, fast_allocator.BlockAllocator(500))
    for table in (expected, actual):
        table.append(5000)
    for start, stop in ((0, 5000), (7, 4093), (31, 32), (16, 4096), (100, 100 + fast.FEW)):
        slots = actual.slot_mapping(start, stop)
        assert list(slots) == expected.slot_mapping(start, stop)
        assert {type(slot) for slot in slots} == {int}


@pytest.mark.parametrize(
    ("kernels", "device"), [pytest.param(cpu, "cpu", id="cpu"), pytest.param(gpu, GPU_DEVICE, id="gpu")]
)
def test_a_fork_leaves_the_rest_of_the_childs_row_as_it_was(kernels: BlockTableKernels, device: str) -> None:
    """`DeviceTables` remembers what the device holds there, and does not send what is there already."""
    tables = torch.arange(12, dtype=torch.int32, device=device).reshape(3, 4)
    kernels.fork_tables(tables, torch.tensor([[2, 0, 3], [2, 1, 1]], dtype=torch.int32, device=device))
    assert tables.tolist() == [[8, 9, 10, 3], [8, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize(
    ("kernels", "device"), [pytest.param(cpu, "cpu", id="cpu"), pytest.param(gpu, GPU_DEVICE, id="gpu")]
)
def test_slots_read_on_the_device_are_those_of_the_tables(kernels: BlockTableKernels, device: str) -> None:
    allocator = fast_allocator.BlockAllocator(32)
    tables = [fast.BlockTable(3, allocator) for _ in range(3)]
    for num_tokens in (2, 5, 4, 9):
        for table in tables:
            table.append(num_tokens)  # in turns, so that blocks do not follow one another
    mirror = DeviceTables(4, 8, device, kernels)
    rows = mirror.sync(tables)
    tokens = [(i, position) for i in (2, 0, 1) for position in range(20)]
    expected = [tables[i].slot_mapping(position, position + 1)[0] for i, position in tokens]
    positions = torch.tensor([position for _, position in tokens], dtype=torch.int32, device=device)
    owners = torch.tensor([rows[i] for i, _ in tokens], dtype=torch.int32, device=device)
    assert kernels.slot_mapping(mirror.tables, owners, positions, 3).tolist() == expected


@pytest.mark.parametrize("failing", ["edit_tables", "fork_tables"])
@pytest.mark.parametrize("made", [False, True], ids=["before the change", "after the change"])
def test_a_sync_that_fails_is_made_good_by_the_next(failing: str, made: bool) -> None:
    """Whether the device was changed or not before the error: the next sync sends what it must."""
    kernels = SimpleNamespace(edit_tables=cpu.edit_tables, fork_tables=cpu.fork_tables)
    device = DeviceTables(8, 16, "cpu", kernels)
    allocator = fast_allocator.BlockAllocator(32)
    parent, other = fast.BlockTable(1, allocator), fast.BlockTable(1, allocator)
    parent.append(4)
    device.sync([parent])
    child = parent.fork()
    other.append(2)

    def fail(*arguments: Tensor) -> None:
        if made:
            getattr(cpu, failing)(*arguments)
        raise RuntimeError

    setattr(kernels, failing, fail)
    with pytest.raises(RuntimeError):
        device.sync([parent, child, other])
    setattr(kernels, failing, getattr(cpu, failing))
    other.trim(0)
    parent.trim(0)  # their blocks go round, in another order
    parent.append(3)
    other.append(3)
    tables = [other, child, parent]
    for table, row in zip(tables, device.sync(tables), strict=True):
        assert device.tables[row, : len(table.blocks)].tolist() == list(table.blocks)
