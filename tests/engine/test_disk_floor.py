"""The disk floor: what the host floor drops is written there, and whatever happens to a file costs a computation."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minipaged import LLM, SamplingParams
from minipaged.engine import floors
from minipaged.engine.floors import BlockName, Disk, FlooredBlockManager, HostFloor, KeptBlock
from minipaged.errors import InvalidRequest, InvariantViolation
from minipaged.events import BlocksLoaded, HostBlockDropped
from minipaged.handover import disk_floor
from minipaged.handover.disk_floor import PROBES, DiskFloor
from minipaged.handover.kv_connector import Handshake
from minipaged.handover.shared_storage import SharedStorageConnector
from minipaged.params import EngineConfig
from minipaged.setup.settings import Settings
from minipaged.steps import BlockMoves
from minipaged.testing.content_runner import Prefixes
from minipaged.testing.workloads import with_salts
from tests.effort import one_case_in, scaled, seeds, thorough
from tests.engine.test_floors import floored
from tests.handover.oracle import HandsOver, InMemory, LateHandsOver
from tests.late_device import LATE
from tests.workloads import REFERENCE, Workload, WorkloadRun

TIERS: dict[str, Any] = {"kv_cache_tiers": ("host", "disk")}
BYTES = 8
"""The size of a slot in the content oracle's blocks."""


class DiskInMemory(InMemory):
    """A disk whose files are entries of a dictionary. `calls`: called before each call, and may raise."""

    seconds_per_block = 0.0

    def __init__(self, block_size: int, calls: Callable[[str], None] = lambda name: None) -> None:
        super().__init__(block_size)
        self.calls = calls

    def lacking(self, token_ids: Sequence[int], start: int, stop: int) -> Sequence[int]:
        self.calls("lacking")
        return super().lacking(token_ids, start, stop)

    def store(self, token_ids: Sequence[int], blocks: Mapping[int, bytes]) -> Sequence[int]:
        self.calls("store")
        return super().store(token_ids, blocks)

    def load(self, token_ids: Sequence[int], start: int, stop: int) -> Sequence[bytes]:
        self.calls("load")
        return super().load(token_ids, start, stop)


def disk_run(
    seed: int,
    disk: Disk,
    prefixes: Prefixes | None = None,
    make_runner: type[HandsOver] | None = None,
    late: bool = True,
    salts: int | None = None,
) -> WorkloadRun:
    """The workload of this seed, with few host blocks and this disk below them. `prefixes`: common to all engines that
    share the disk. `salts`: the seed of the requests' salts."""
    workload = floored(seed) if salts is None else with_salts(floored(seed), salts)
    config = replace(workload.config, kv_cache_tiers=("host", "disk"), num_swap_blocks=1 + seed % 4)
    if config.preemption == "swap":
        config = replace(config, preemption="auto")
    config = replace(config, async_scheduling=config.async_scheduling and late)
    runners: list[HandsOver] = []

    def make(*sizes: Any) -> HandsOver:
        runner = (make_runner or (LateHandsOver if config.async_scheduling else HandsOver))(*sizes)
        runner.prefixes = prefixes or runner.prefixes
        runners.append(runner)
        return runner

    def memory(*parts: Any) -> FlooredBlockManager:
        size = BYTES * config.block_size
        read = runners[-1].read_host_blocks
        return FlooredBlockManager(*parts, disk=disk, read_host_blocks=read, block_bytes=size)

    tier = LATE if config.async_scheduling else REFERENCE
    run = WorkloadRun(
        replace(workload, config=config, swap_is_cheap=True), tier, make_runner=make, memory=memory, steady=seed % 4 < 2
    )

    def count(event: Any) -> None:
        run.happened["blocks loaded"] += isinstance(event, BlocksLoaded)

    run.engine.listeners.append(count)
    return run


def check(run: WorkloadRun) -> WorkloadRun:
    run.to_the_end()
    run.check_outputs()
    run.check_nothing_leaked()
    return run


def block_size_of(seed: int) -> int:
    return floored(seed).config.block_size


# --- Content --------------------------------------------------------------------------------------


@one_case_in(4)
@scaled
@pytest.mark.parametrize("seeds", seeds(500, 100), ids=str)
def test_every_invariant_holds_with_two_floors(seeds: range) -> None:
    """Two engines one after another: the second finds what the first has kept."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        disk, prefixes = DiskInMemory(block_size_of(seed)), Prefixes()
        try:
            for _ in range(2):
                happened.update(check(disk_run(seed, disk, prefixes)).happened)
        except Exception as error:
            error.add_note(f"in workload {seed}")
            raise
    assert happened["host block dropped: to disk"] > 10
    assert happened["blocks loaded"] > 10


def test_a_disk_that_is_slower_than_computing_is_not_used() -> None:
    for seed in range(20):
        disk = DiskInMemory(block_size_of(seed))
        disk.seconds_per_block = 1e9
        assert not check(disk_run(seed, disk)).happened["host block dropped: to disk"]
        assert not disk.blocks


# --- Failures at every move -----------------------------------------------------------------------


class Fault(Exception):
    """Raised at a call that a test has chosen."""


def check_with_faults(run: WorkloadRun) -> int:
    """Run the workload to its end and check it, whatever fails on the way. Returns the number of faults."""
    faults = 0
    for now in range(1000):
        try:
            if not run.advance(now):
                break
        except Fault:
            faults += 1
            run.engine.check_invariants()
            assert isinstance(run.engine.blocks, FlooredBlockManager)
            assert not run.engine.blocks._load
    run.check_outputs()
    run.check_nothing_leaked()
    assert not run.engine.has_unfinished_requests()
    return faults


class FailsOnce:
    """Raises at the call of this number, and never again."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, name: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise Fault(name)


class FaultyRunner(HandsOver):
    """Its moves and its reads raise at one call, of all that are made, after they were made in part."""

    fuse: FailsOnce

    def move(self, moves: BlockMoves) -> None:
        for name in ("swap_out", "swap_in", "load"):
            if moved := getattr(moves, name):
                try:
                    self.fuse(name)
                except Fault:
                    super().move(BlockMoves(**{name: moved[: len(moved) // 2]}))
                    raise
        super().move(moves)

    def read_host_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        self.fuse("read")
        return super().read_host_blocks(blocks)


def with_a_fault(seed: int, number: int) -> bool:
    """Run a workload in which this call fails. Returns whether there was such a call."""
    fuse, prefixes, disk = FailsOnce(number), Prefixes(), DiskInMemory(block_size_of(seed))
    for _ in range(2):
        disk.calls = fuse
        made = type("Faulty", (FaultyRunner,), {"fuse": fuse})
        run = disk_run(seed, disk, prefixes, made, late=False)
        check_with_faults(run)
    return fuse.left <= 0


@pytest.mark.parametrize("seed", [pytest.param(4, marks=thorough), 12, pytest.param(30, marks=thorough), 44])
def test_a_failure_at_any_move_costs_a_computation(seed: int) -> None:
    numbers = iter(range(1, 2000))
    assert with_a_fault(seed, next(numbers)), "no move at all"
    while with_a_fault(seed, next(numbers)):
        pass


def test_a_load_that_always_fails_stops_nobody() -> None:
    class NeverLoads(HandsOver):
        def move(self, moves: BlockMoves) -> None:
            if moves.load:
                raise Fault("load")
            super().move(moves)

    failed = 0
    for seed in range(0, 40, 2):
        disk, prefixes = DiskInMemory(block_size_of(seed)), Prefixes()
        check(disk_run(seed, disk, prefixes))
        failed += check_with_faults(disk_run(seed, disk, prefixes, NeverLoads, late=False))
    assert failed


def test_a_disk_that_always_raises_stops_nobody() -> None:
    """It is not asked again: the request that is being admitted would fail for ever."""

    def load(name: str) -> None:
        if name == "load":
            raise Fault(name)

    failed = 0
    for seed in range(0, 40, 2):
        disk, prefixes = DiskInMemory(block_size_of(seed)), Prefixes()
        check(disk_run(seed, disk, prefixes))
        disk.calls = load
        failed += check_with_faults(disk_run(seed, disk, prefixes, late=False))
    assert 0 < failed <= 20, "once an engine, at most"


def test_blocks_of_another_size_are_computed() -> None:
    for seed in range(0, 40, 2):
        disk, prefixes = DiskInMemory(block_size_of(seed)), Prefixes()
        check(disk_run(seed, disk, prefixes))
        disk.blocks = {key: block[:-1] for key, block in disk.blocks.items()}
        assert not check(disk_run(seed, disk, prefixes, late=False)).happened["blocks loaded"]


@pytest.mark.parametrize(("num_swap_blocks", "rounds"), [(2, 7), (3, 5), (5, 3)])
def test_prompts_longer_than_the_host_floor_come_to_the_disk_in_the_end(num_swap_blocks: int, rounds: int) -> None:
    """A block that is there leaves the few host blocks to others. Then a prompt's blocks lie on both by turns."""
    config = EngineConfig(
        num_blocks=12, num_swap_blocks=num_swap_blocks, block_size=4, max_model_len=48, vocab_size=50, **TIERS
    )
    disk = DiskInMemory(4)
    runner: list[HandsOver] = []

    def make(*sizes: Any) -> HandsOver:
        runner.append(HandsOver(*sizes))
        return runner[0]

    def memory(*parts: Any) -> FlooredBlockManager:
        return FlooredBlockManager(
            *parts, disk=disk, read_host_blocks=runner[0].read_host_blocks, block_bytes=4 * BYTES
        )

    run = WorkloadRun(Workload(config, (), swap_is_cheap=True), make_runner=make, memory=memory)
    found: list[int] = []
    for _ in range(1 + rounds):
        for first in (0, 1, 2, 3):
            prompt = [first, *range(10, 50)]
            name = run.engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
            while run.engine.has_unfinished_requests():
                found += [u.output.num_cached_tokens for u in run.engine.step() if u.output and u.request_id == name]
    assert found[:4] == [0] * 4
    assert found[-4:] == [40] * 4
    assert run.engine.stats.blocks_stored >= len(disk.blocks) >= 40 - num_swap_blocks, "or they are on the host"
    run.check_nothing_leaked()


def test_names_of_the_floor_below_are_forgotten_from_the_oldest_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "MOST_BELOW", 2)
    floor = HostFloor(REFERENCE.block_allocator(1), lambda event: None, lambda leaving: leaving)
    names = [floors.name_of(None, [token]) for token in range(4)]
    floor.note_below(names[:3])
    assert floor.keep(names[:3]) == {names[0].digest: 0}, "the others are below"
    floor.note_below(names[3:], missing=names[2:3])
    floor.moves_lost()
    assert floor.keep(names[2:]) == {names[2].digest: 0}


def test_a_floor_that_is_not_used_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    disk = DiskInMemory(block_size_of(1))
    check(disk_run(1, disk))
    assert not capsys.readouterr().err
    disk.seconds_per_block = 1e9
    check(disk_run(1, disk))
    told = capsys.readouterr().err
    assert told.startswith("kv_cache_tiers: the disk is not used: moving a block takes 10")
    assert told.count("\n") == 1


def test_a_block_that_the_disk_has_is_not_written_again() -> None:
    written = 0
    for seed in range(0, 40, 2):
        disk, prefixes, keys = DiskInMemory(block_size_of(seed)), Prefixes(), list[Any]()
        store = disk.store

        def noted(token_ids: Sequence[int], blocks: Mapping[int, bytes]) -> Sequence[int]:
            keys.extend(disk._key(token_ids, logical) for logical in blocks)  # noqa: B023
            return store(token_ids, blocks)  # noqa: B023

        disk.store = noted  # type: ignore[method-assign]
        for _ in range(2):
            check(disk_run(seed, disk, prefixes))
        assert len(keys) == len(set(keys))
        written += len(keys)
    assert written > 10


# --- Planted bugs ---------------------------------------------------------------------------------


def find_a_failure(make_runner: type[HandsOver] | None = None, change: Callable[[DiskInMemory], Any] = id) -> None:
    for seed in range(500):
        disk, prefixes = DiskInMemory(block_size_of(seed)), Prefixes()
        change(disk)
        try:
            for _ in range(2):
                check(disk_run(seed, disk, prefixes, make_runner, late=make_runner is None))
        except (InvariantViolation, AssertionError, TypeError, ValueError):
            return
        except Exception as error:
            if type(error).__name__ != "error":  # struct's: what was to be written was never there
                raise
            return
    raise AssertionError("the oracle found nothing")


def test_the_oracle_finds_a_lost_load_that_is_taken_for_done() -> None:
    class LosesLoads(HandsOver):
        def move(self, moves: BlockMoves) -> None:
            super().move(moves._replace(load=()))

    find_a_failure(LosesLoads)


def test_the_oracle_finds_a_block_that_is_written_to_disk_before_it_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pinned blocks have not received their content yet."""
    right = HostFloor.keep

    def hasty(self: HostFloor, names: Sequence[BlockName]) -> dict[bytes, int]:
        blocks = right(self, names)
        self._move_down([KeptBlock(name, blocks[name.digest]) for name in names if name.digest in blocks])
        return blocks

    monkeypatch.setattr(HostFloor, "keep", hasty)
    find_a_failure()


def test_the_oracle_finds_a_disk_that_goes_by_a_blocks_own_tokens() -> None:
    def change(disk: DiskInMemory) -> None:
        size = disk.block_size
        disk._key = lambda token_ids, logical: tuple(token_ids[logical * size : (logical + 1) * size])  # type: ignore[method-assign]
        disk.store = lambda token_ids, blocks: [  # type: ignore[method-assign]
            disk.blocks.__setitem__(disk._key(token_ids, logical), block) or logical  # type: ignore[func-returns-value]
            for logical, block in blocks.items()
        ]

    find_a_failure(change=change)


# --- Files ----------------------------------------------------------------------------------------


def opened(folder: Path, block_size: int, max_bytes: int = 1 << 30) -> DiskFloor:
    disk = DiskFloor(folder, max_bytes)
    disk.open(handshake(block_size))
    disk.seconds_per_block = 0.0
    return disk


def handshake(block_size: int) -> Handshake:
    return Handshake(
        model="oracle",
        dtype="float32",
        kv_cache_dtype="auto",
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        block_size=block_size,
        block_bytes=BYTES * block_size,
    )


def cut(data: bytes, r: random.Random) -> bytes:
    return data[: r.randrange(len(data))]


def changed(data: bytes, r: random.Random) -> bytes:
    at = r.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def foreign(data: bytes, r: random.Random) -> bytes:
    return r.randbytes(len(data))


@pytest.mark.parametrize("damage", [cut, changed, foreign])
def test_files_that_are_not_as_they_were_written_are_computed_and_said_once(
    damage: Callable[[bytes, random.Random], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = loaded = 0
    for seed in range(0, 40, 2):
        prefixes, folder, size, r = Prefixes(), tmp_path / str(seed), block_size_of(seed), random.Random(seed)
        check(disk_run(seed, opened(folder, size), prefixes))
        capsys.readouterr()
        files = sorted(folder.glob("*.block"))
        for path in files[::2]:
            path.write_bytes(damage(path.read_bytes(), r))
        if len(files) > 2 and damage is foreign:  # and one block under the name of another
            files[1].write_bytes(files[-1].read_bytes())
        loaded += check(disk_run(seed, opened(folder, size), prefixes)).happened["blocks loaded"]
        told = capsys.readouterr().err
        assert told.count("\n") <= 1
        assert told.count("is removed; blocks that cannot be kept there are computed") == told.count("\n")
        said += bool(told)
    assert said > 2
    assert loaded > 2


def test_several_engines_at_a_time_share_a_small_folder(tmp_path: Path) -> None:
    """Each removes files that others are about to read."""
    for seed in range(4, 40, 4):
        size, prefixes = block_size_of(seed), Prefixes()
        most = 4 * (16 + BYTES * size)
        runs = [disk_run(seed, opened(tmp_path / f"{seed}", size, most), prefixes) for _ in range(3)]
        going = {*range(3)}
        for now in range(2000):
            going = {i for i in going if runs[i].advance(now)}
            if not going:
                break
        for run in runs:
            run.check_outputs()
            run.check_nothing_leaked()
        assert sum(path.stat().st_size for path in (tmp_path / f"{seed}").glob("*.block")) <= most


KILLED = """
import builtins, io, os, signal, sys
from pathlib import Path
from minipaged.handover.disk_floor import DiskFloor
from minipaged.handover.kv_connector import Handshake

BOUND = 3 * 1016
SHAPE = Handshake(
    model="killed", dtype="float32", kv_cache_dtype="auto", num_layers=1, num_kv_heads=1, head_dim=2, block_size=4,
    block_bytes=1000,
)

def opened(folder):
    disk = DiskFloor(folder, BOUND)
    disk._measure = lambda: 0.0
    disk.open(SHAPE)
    return disk

def blocks():
    for number in range(6):
        yield [number // 3] * 4 * (number % 3) + [number] * 4, number % 3, bytes([number]) * 1000

def die():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def deadly(where, name):
    right = getattr(where, name)
    def call(*given, **more):
        die()
        return right(*given, **more)
    setattr(where, name, call)

class Halves:
    def __init__(self, file):
        self.file = file
    def write(self, data):
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        die()
        return self.file.write(data[len(data) // 2 :])
    def __enter__(self):
        return self
    def __exit__(self, *given):
        self.file.close()
    def __getattr__(self, name):
        return getattr(self.file, name)

def in_the_child(folder):
    right = io.open
    builtins.open = io.open = lambda path, mode="r", *given, **more: (
        Halves(right(path, mode, *given, **more)) if "w" in mode else right(path, mode, *given, **more)
    )
    for name in ("fsync", "replace", "link", "unlink", "mkdir", "scandir", "utime"):
        deadly(os, name)
    disk = opened(folder)
    for tokens, logical, content in blocks():
        disk.store(tokens, {logical: content})
    os._exit(0)

for number in range(1, 300):
    folder, left = Path(sys.argv[1]) / str(number), number
    child = os.fork()
    if not child:
        in_the_child(folder)
    status = os.waitpid(child, 0)[1]
    disk = opened(folder)
    for tokens, logical, content in blocks():
        assert disk.load(tokens, logical, logical + 1) in ([], [content]), number
        assert disk.store(tokens, {logical: content}) == [logical], number
    assert sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".json") <= BOUND, number
    if os.WIFEXITED(status):
        print(number)
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
"""


def test_a_process_killed_at_any_write_leaves_nothing_wrong(tmp_path: Path) -> None:
    """Half way through each write, and at each call by which the folder changes. The next process finds right blocks,
    or none, and none is damaged."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    assert not done.stderr
    assert int(done.stdout) > 20


def test_blocks_whose_load_was_planned_in_vain_are_not_loaded_later() -> None:
    """The disk fails for the second of two requests that come in together."""
    planned = 0
    for seed in range(10):
        for number in (2, 3):
            disk, prefixes = DiskInMemory(block_size_of(seed)), Prefixes()
            check(disk_run(seed, disk, prefixes, late=False))
            run, left = disk_run(seed, disk, prefixes, late=False), [number]
            memory = run.engine.blocks
            assert isinstance(memory, FlooredBlockManager)

            def fail(name: str, memory: FlooredBlockManager = memory, left: list[int] = left) -> None:
                left[0] -= name == "load"
                if left[0] == 0 and memory._load:
                    left[0] = -1
                    raise Fault(name)

            disk.calls = fail
            planned += check_with_faults(run)
    assert planned


# --- The disk's speed -----------------------------------------------------------------------------


class SlowDisk(DiskFloor):
    """Takes its time to write and to read."""

    writing = reading = 0.0
    num_loads = 0

    def _write(self, path: Path, data: bytes, *, to_stay: bool = False) -> None:
        time.sleep(self.writing)
        super()._write(path, data, to_stay=to_stay)

    def load(self, token_ids: Sequence[int], start: int, stop: int) -> Sequence[bytes]:
        self.num_loads += 1
        time.sleep(self.reading)
        return super().load(token_ids, start, stop)


@pytest.mark.parametrize(("writing", "reading"), [(0.2, 0.0), (0.0, 0.2), (0.2, 0.2)])
def test_the_time_of_a_block_is_that_of_storing_and_of_loading(writing: float, reading: float, tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path / "kv")
    assert disk.seconds_per_block == float("inf")
    disk.writing, disk.reading = writing, reading
    disk.open(handshake(4))
    assert writing + reading <= disk.seconds_per_block < writing + reading + 1
    assert disk.num_loads == 1, "a slow disk is measured once"
    assert [path.name for path in disk.folder.iterdir()] == ["handshake.json"]


def test_the_speed_is_measured_with_blocks_of_the_engines_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine has its own, so none removes another's."""
    written: list[tuple[Path, int]] = []
    right = DiskFloor._write

    def write(self: DiskFloor, path: Path, data: bytes, **more: Any) -> None:
        written.append((path, len(data)))
        right(self, path, data, **more)

    monkeypatch.setattr(DiskFloor, "_write", write)
    for _ in range(2):
        opened(tmp_path, 5)
    _handshake, *blocks = written
    assert {size for _, size in blocks} == {16 + 5 * BYTES}
    assert 2 <= len({path for path, _ in blocks}) == len(blocks) <= 2 * PROBES


def test_an_engine_that_measures_and_one_that_makes_room_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one measures, the other stores into a full folder. It may remove one block more."""
    size, most = 16 + 4 * BYTES, 64 * (16 + 4 * BYTES)
    first, right, there = opened(tmp_path, 4, most), os.fsync, list[int]()
    for number in range(64):
        first.store([number] * 4, {0: bytes(4 * BYTES)})

    def fsync(descriptor: int) -> None:
        right(descriptor)
        first._num_since = first.max_bytes  # a scan is due
        assert first.store([100 + len(there)] * 4, {0: bytes(4 * BYTES)}) == [0]
        there.append(len(list(tmp_path.glob("*.block"))))

    monkeypatch.setattr(os, "fsync", fsync)
    second = DiskFloor(tmp_path, most)
    second.open(handshake(4))
    monkeypatch.undo()
    assert second.seconds_per_block < 10
    assert min(there) >= 59
    left = list(tmp_path.glob("*.block"))
    assert 58 * size <= sum(path.stat().st_size for path in left) <= most
    last = 100 + len(there) - 1
    assert len(second.load([last] * 4, 0, 1)) == 1
    assert not list(tmp_path.glob("*.partial"))


def test_a_full_folder_loses_nothing_by_the_measurement(tmp_path: Path) -> None:
    first = opened(tmp_path, 4, 8 * (16 + 4 * BYTES))
    for number in range(8):
        first.store([number] * 4, {0: bytes(4 * BYTES)})
    before = sorted(tmp_path.glob("*.block"))
    opened(tmp_path, 4, 8 * (16 + 4 * BYTES))
    assert sorted(tmp_path.glob("*.block")) == before
    assert len(before) == 8


def test_a_folder_on_a_full_file_system_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for eight blocks, and eight are there."""
    first, right = opened(tmp_path, 4), tempfile.mkstemp
    for number in range(8):
        first.store([number] * 4, {0: bytes(4 * BYTES)})

    def mkstemp(**given: Any) -> tuple[int, str]:
        if len(list(tmp_path.glob("*.block"))) >= 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return right(**given)

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
    opened(tmp_path, 4)
    assert len(list(tmp_path.glob("*.block"))) == 7


def test_a_block_that_others_remove_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is gone takes no time to load."""
    right_fsync, right_replace, calls = os.fsync, os.replace, list[Path]()

    def replace(source: str, target: Path) -> None:
        right_replace(source, target)
        calls.append(target)
        if len(calls) % 4 == 1:
            target.unlink()

    def fsync(descriptor: int) -> None:
        right_fsync(descriptor)
        if len(calls) % 4 == 2:
            calls[-1].unlink()

    monkeypatch.setattr(disk_floor, "PROBE_SECONDS", 1e9)
    disk = SlowDisk(tmp_path)
    SharedStorageConnector.open(disk, handshake(4))
    disk.seconds_per_block = 0.0
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "fsync", fsync)
    disk.open(handshake(4))
    assert len(calls) == PROBES
    assert 0 < disk.seconds_per_block < 10
    monkeypatch.setattr(os, "fsync", lambda descriptor: [path.unlink() for path in tmp_path.glob("*.block")])
    with pytest.raises(InvalidRequest, match="blocks cannot be read after they were written"):
        disk.open(handshake(4))


def test_a_disk_is_used_up_to_the_time_of_computing() -> None:
    """A token takes a millisecond to compute, and a block half a microsecond to move to the host."""
    for seed in range(0, 40, 4):
        for less, used in ((6e-7, True), (4e-7, False)):
            size = block_size_of(seed)
            disk = DiskInMemory(size)
            disk.seconds_per_block = size * 1e-3 - less
            run = check(disk_run(seed, disk))
            assert isinstance(run.engine.blocks, FlooredBlockManager)
            assert run.engine.blocks._disk_pays == used
            assert used or not disk.blocks


# --- An LLM ---------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 24, "num_swap_blocks": 4, "max_model_len": 64, "debug": True}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def prompts() -> list[list[int]]:
    r = random.Random(3)
    return [[r.randrange(3, 250) for _ in range(40)] for _ in range(4)] * 2


@pytest.mark.parametrize("tier", ["reference", pytest.param("fast", marks=thorough)])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_an_llm_with_two_floors_gives_the_same_tokens(
    tiny_model: Path, tmp_path: Path, tier: str, kv_cache_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskFloor, "_measure", lambda self: 0.0)
    monkeypatch.setattr("minipaged.engine.floors.carry_seconds", lambda costs, blocks: 0.0)
    given: dict[str, Any] = {
        "tier": tier,
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_dtype": kv_cache_dtype,
        **SIZES,
    }
    plain = LLM(tiny_model, **given)
    expected = [[plain.generate([p], GREEDY)[0].outputs[0].token_ids for p in prompts()]]
    for _ in range(2):
        heard: list[Any] = []
        floors = {"kv_cache_tiers": ("host", "disk"), "kv_cache_folder": str(tmp_path)}
        llm = LLM(tiny_model, **given, **floors, listeners=[heard.append])
        expected.append([llm.generate([p], GREEDY)[0].outputs[0].token_ids for p in prompts()])
        assert any(isinstance(event, BlocksLoaded) for event in heard)
    assert any(isinstance(event, HostBlockDropped) for event in heard)
    assert expected[0] == expected[1] == expected[2]


def test_what_a_connector_has_left_is_found(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskFloor, "_measure", lambda self: 0.0)
    monkeypatch.setattr("minipaged.engine.floors.carry_seconds", lambda costs, blocks: 0.0)
    given: dict[str, Any] = {"tier": "reference", "dtype": "float32", **SIZES}
    first = LLM(tiny_model, **given, kv_connector=SharedStorageConnector(tmp_path))
    second = LLM(tiny_model, **given, kv_cache_tiers=("host", "disk"), kv_cache_folder=str(tmp_path))
    one, other = (llm.generate(prompts()[:1], GREEDY)[0] for llm in (first, second))
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert second.stats().blocks_loaded == 9


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kv_cache_tiers": ("host", "disk")}, "kv_cache_folder is None; .*give"),
        ({"kv_cache_tiers": ("host",), "kv_cache_folder": "x"}, "or neither"),
        ({"kv_cache_folder": "x"}, "or neither"),
        ({"kv_cache_tiers": ("disk",), "kv_cache_folder": "x"}, r"give \('host',\) or \('host', 'disk'\)"),
        (
            {"kv_cache_tiers": ("host", "disk"), "kv_cache_folder": "x", "tensor_parallel_size": 2},
            "only engines of one rank can keep blocks on disk",
        ),
        (
            {"kv_cache_tiers": ("host", "disk"), "kv_cache_folder": "x", "pipeline_parallel_size": 2},
            "only engines of one rank can keep blocks on disk",
        ),
        ({"kv_cache_tiers": ("host",), "kv_connector": SharedStorageConnector("x")}, "leave one of them out"),
        ({"kv_cache_disk_space": 0}, "kv_cache_disk_space is 0"),
        ({"kv_cache_disk_space": 2.0}, "kv_cache_disk_space is 2.0 but there is no kv_cache_folder"),
        ({"kv_cache_disk_space": 2.0, "kv_cache_tiers": ("host",)}, "there is no kv_cache_folder"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Settings(**given)


def test_a_folder_without_a_name_is_refused_with_advice_for_a_disk() -> None:
    with pytest.raises(InvalidRequest, match="kv_cache_folder: the folder is ''; name one, on a disk of this machine"):
        DiskFloor("")


def test_space_for_less_than_one_block_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """Before the model is loaded."""
    floors: dict[str, Any] = {"kv_cache_tiers": ("host", "disk"), "kv_cache_folder": str(tmp_path / "kv")}
    says = r"kv_cache_folder: kv_cache_disk_space allows 1 bytes, and one block takes [\d,]+; allow more"
    with pytest.raises(InvalidRequest, match=says):
        LLM(tiny_model, tier="reference", dtype="float32", **SIZES, **floors, kv_cache_disk_space=1e-12)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_block_has_the_size_that_the_handshake_says(tiny_model: Path, tmp_path: Path, kv_cache_dtype: Any) -> None:
    given: dict[str, Any] = {"tier": "reference", "dtype": "float32", "kv_cache_dtype": kv_cache_dtype, **SIZES}
    connector = SharedStorageConnector(tmp_path)
    LLM(tiny_model, **given, kv_connector=connector).generate(prompts()[:1], GREEDY)
    sizes = {path.stat().st_size for path in tmp_path.glob("*.block")}
    assert sizes == {16 + connector._block_bytes}


def test_an_engine_without_a_folder_is_refused() -> None:
    sizes = {"num_blocks": 4, "num_swap_blocks": 4, "block_size": 4, "max_model_len": 16, "vocab_size": 5}
    config = EngineConfig(**sizes, kv_cache_tiers=("host", "disk"))  # type: ignore[arg-type]
    workload = replace(floored(0), config=config)
    with pytest.raises(InvalidRequest, match="knows no folder"):
        WorkloadRun(workload)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, 4)
    (tmp_path / "handshake.json").write_text(json.dumps({"model": "another"}))
    with pytest.raises(InvalidRequest, match=r"kv_cache_folder: .* has blocks of another kind"):
        opened(tmp_path, 4)
