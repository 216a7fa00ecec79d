"""The two block tables, side by side; and the tables on the device beside those of whole engines.

Two worlds, one of each tier, with a device pool and a host pool and several tables, are given the same calls. What
the calls return or raise, all tables and all counts must be the same after each (atomic-failure included). The tables
on the device follow the steps of random workloads, and after each must read as those of the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
from minipaged.contracts import StepResult
from minipaged.fast import block_allocator as fast_allocator
from minipaged.fast import block_table as fast
from minipaged.fast import cpu, gpu
from minipaged.fast.block_table import DeviceTables
from minipaged.fast.kernels import BlockTableKernels
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable
from minipaged.steps import LOGITS, Begun, Forked, StepInput, TableChange
from minipaged.testing.content_runner import ContentRunner
from tests.workloads import WorkloadRun, random_workload, windowed

GPU_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_TABLES = 5
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
        self.make()
        self.append(0, prompt)
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

    # --- What always holds ------------------------------------------------------------------------

    @invariant()
    def both_worlds_are_the_same(self) -> None:
        expected, actual = (world.everything() for world in self.worlds)
        assert actual == expected

    def teardown(self) -> None:
        """The free blocks come in the same order."""
        for number in range(2 if hasattr(self, "worlds") else 0):
            self.both(lambda world, number=number: world.pools[number].allocate_many(world.pools[number].num_free))


@scaled
def test_every_call_has_the_same_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "FEW", 3)  # more than 3 positions, and
    monkeypatch.setattr(fast_allocator, "MANY", 3)  # 3 blocks or more, go the way of the many
    run_state_machine_as_test(TwoWorlds, settings=settings(max_examples=examples(300), stateful_step_count=50))


# --- On the device ----------------------------------------------------------------------------------


class TablesRunner(ContentRunner):
    """The content oracle, which brings the tables to the device as well, and reads them there."""

    tables: DeviceTables

    def run(self, step: StepInput) -> StepResult:
        self.tables.apply(step)
        result = super().run(step)
        rows = [row.sequence for row in self.mirror.rows]
        places = self.tables.rows_of(rows)
        assert len(set(places)) == len(places)
        by_group = self.tables.by_group.tolist()
        for sequence, place in zip(rows, places, strict=True):
            blocks = self.mirror.sequences[sequence].blocks
            for group, on_device in enumerate(by_group):
                expected = blocks[group :: len(by_group)]
                assert on_device[place][: len(expected)] == expected
        return result


@scaled
@pytest.mark.parametrize(
    ("kernels", "device", "number", "least"),
    [pytest.param(cpu, "cpu", 100, 30, id="cpu"), pytest.param(gpu, GPU_DEVICE, 20, 2, id="gpu")],
)
def test_the_tables_on_the_device_are_those_of_the_engine(
    kernels: BlockTableKernels, device: str, number: int, least: int
) -> None:
    """At every step, with twice as many rows as sequences may run; in some workloads for several groups of layers. (The
    oracle makes sure that the mirror is right.)"""
    for seed in range(examples(number, least)):
        workload, num_lanes = (windowed if seed % 4 == 1 else random_workload)(seed), 1 + seed % 3
        config = replace(workload.config, pipeline_parallel_size=num_lanes)
        run = WorkloadRun(replace(workload, config=config), make_runner=TablesRunner, steady=seed % 2 == 0)
        assert isinstance(run.runner, TablesRunner)
        sizes = 2 * config.max_num_seqs, max(config.num_blocks, config.max_model_len)
        groups = len(config.group_windows)
        run.runner.tables = DeviceTables(*sizes, device, kernels, num_lanes, groups)
        run.to_the_end()
        run.check_outputs()


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
    """Tables on a device, and what is sent to it for them."""

    def __init__(self, max_rows: int = 8, max_blocks: int = 8) -> None:
        self.recorder = Recorder(cpu)
        self.tables = DeviceTables(max_rows, max_blocks, "cpu", self.recorder)
        self.step = 0

    def begin(self, *tables: tuple[int, ...], fresh: bool = False) -> list[tuple[str, list[list[int]]]]:
        """Sequences 0, 1, ... with these blocks."""
        begun = tuple(Begun(i, (), 0, blocks, None) for i, blocks in enumerate(tables))
        return self.sent(begun=begun, fresh=fresh)

    def sent(self, **differences: Any) -> list[tuple[str, list[list[int]]]]:
        """What it takes to bring the device up to date."""
        self.step += 1
        self.tables.apply(StepInput(self.step, **differences))
        return self.recorder.take()

    def read(self, sequence: int) -> list[int]:
        [row] = self.tables.rows_of([sequence])
        return self.tables.tables[row].tolist()


def test_only_what_changed_is_sent_and_nothing_when_nothing_did() -> None:
    setup = Setup()
    assert setup.begin((5, 6, 7), (3,)) == [("edit", [[0, 0, 5], [0, 1, 6], [0, 2, 7], [1, 0, 3]])]
    assert setup.sent() == []
    changes = (TableChange(0, 3, (4,)), TableChange(1, 0, (2, 8)))
    assert setup.sent(tables=changes) == [("edit", [[0, 3, 4], [1, 0, 2], [1, 1, 8]])]
    assert (setup.read(0)[:4], setup.read(1)[:2]) == ([5, 6, 7, 4], [2, 8])


def test_forks_are_copied_on_the_device_and_their_copies_on_write_are_edits() -> None:
    """Paper, section 4.4, Fig. 8: three samples of one prompt, whose last block has room."""
    setup = Setup()
    setup.begin((0, 1, 2))
    forked = (Forked(1, 0, 1), Forked(2, 0, 2))
    changes = (TableChange(0, 2, (3,)), TableChange(1, 2, (4,)))
    assert setup.sent(forked=forked, tables=changes) == [
        ("fork", [[0, 1, 3], [0, 2, 3]]),
        ("edit", [[0, 2, 3], [1, 2, 4]]),
    ]
    assert [setup.read(sequence)[:3] for sequence in range(3)] == [[0, 1, 3], [0, 1, 4], [0, 1, 2]]


def test_children_of_a_parent_that_is_gone_are_copied_from_what_it_left() -> None:
    """As at each step of a beam search (Fig. 9): two beams need four rows."""
    setup = Setup(max_rows=4)
    setup.begin((3, 1), (3, 2))
    for step in range(5):
        old, new = (2 * step, 2 * step + 1), (2 * step + 2, 2 * step + 3)
        forked = tuple(Forked(child, old[1], LOGITS) for child in new)
        [(kind, forks)] = setup.sent(forked=forked, ended=old)
        assert (kind, [count for *_, count in forks]) == ("fork", [2, 2])
        assert [setup.read(child)[:2] for child in new] == [[3, 2], [3, 2]]


def test_a_sequence_that_waits_gives_up_its_row_and_is_sent_anew() -> None:
    setup = Setup(max_rows=2)
    setup.begin((1,), (2, 3))
    with pytest.raises(ValueError, match="more than 2 sequences hold blocks; that is the number of block tables"):
        setup.sent(begun=(Begun(2, (), 0, (4,), None),))
    setup.begin((1,), (2, 3), fresh=True)
    assert setup.sent(tables=(TableChange(1, 0, ()),)) == []
    assert setup.sent(begun=(Begun(2, (), 0, (4,), None),)) == [("edit", [[1, 0, 4]])]
    assert setup.sent(ended=(0,), tables=(TableChange(1, 0, (5, 6)),)) == [("edit", [[0, 0, 5], [0, 1, 6]])]


def test_a_table_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence has 9 blocks; the block tables have room for 8"):
        Setup().begin(tuple(range(9)))


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
    """Nobody reads it; but neither is it anybody's to write."""
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
    begun = tuple(Begun(i, (), 0, tuple(table.blocks), None) for i, table in enumerate(tables))
    mirror.apply(StepInput(1, fresh=True, begun=begun))
    rows = mirror.rows_of(range(3))
    tokens = [(i, position) for i in (2, 0, 1) for position in range(20)]
    expected = [tables[i].slot_mapping(position, position + 1)[0] for i, position in tokens]
    positions = torch.tensor([position for _, position in tokens], dtype=torch.int32, device=device)
    owners = torch.tensor([rows[i] for i, _ in tokens], dtype=torch.int32, device=device)
    assert kernels.slot_mapping(mirror.tables, owners, positions, 3).tolist() == expected


@pytest.mark.parametrize("failing", ["edit_tables", "fork_tables"])
@pytest.mark.parametrize("made", [False, True], ids=["before the change", "after the change"])
def test_after_an_error_a_fresh_step_makes_everything_good(failing: str, made: bool) -> None:
    """Whether the device was changed or not before the error."""
    setup = Setup()
    setup.begin((4, 3, 2, 1))
    right = getattr(cpu, failing)

    def fail(*arguments: Tensor) -> None:
        if made:
            right(*arguments)
        raise RuntimeError

    setattr(setup.recorder, failing, fail)
    with pytest.raises(RuntimeError):
        setup.sent(forked=(Forked(1, 0, 1),), begun=(Begun(2, (), 0, (7, 8), None),))
    delattr(setup.recorder, failing)
    setup.begin((7,), (1, 2, 3), (3, 2, 1), fresh=True)
    assert setup.read(0)[:1] == [7]
    assert [setup.read(1)[:3], setup.read(2)[:3]] == [[1, 2, 3], [3, 2, 1]]
