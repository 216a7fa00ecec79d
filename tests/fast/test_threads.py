"""The fast tier keeps to the number of threads that it is given, computes on fewer where others take cores, and leaves
torch's number alone."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from minipaged.contracts import BeamStep
from minipaged.fast import cpu
from minipaged.fast.beam_search import BeamSearch
from minipaged.fast.cores import usable_cores
from minipaged.fast.cpu import computing, paged_decode, threads
from minipaged.fast.cpu.threads import LONGEST_WAIT, Threads
from minipaged.fast.kernels import Paged
from minipaged.params import BeamSearchParams
from tests.effort import thorough

REPORT = """
import sys, threading
import numba, torch
from minipaged import LLM, SamplingParams
before = torch.get_num_threads()
llm = LLM(sys.argv[1], tier="fast", device="cpu", num_blocks=16)
def serve():
    for _ in range(2):
        llm.generate([[3, 4, 5]], SamplingParams(max_tokens=3), use_tqdm=False)
    print(before, torch.get_num_threads(), numba.get_num_threads())
serve()
other = threading.Thread(target=serve)  # numba counts threads for each of Python's by itself
other.start()
other.join()
"""


@thorough
@pytest.mark.parametrize("threads", range(1, min(2, usable_cores()) + 1))
def test_omp_num_threads_holds_for_torch_and_for_numba_in_any_thread(tiny_model: Path, threads: int) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-c", REPORT, str(tiny_model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == [f"{threads} {threads} {threads}"] * 2 + [""]


TWO_ENGINES = """
import sys, threading
import numba
from minipaged import LLM, BeamSearchParams, SamplingParams
def serve():
    llm = LLM(sys.argv[1], tier="fast", device="cpu", num_blocks=64)
    for _ in range(10):
        llm.generate([[3, 4, 5] * 20] * 4, SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False)
        llm.beam_search([[3, 4, 5]], BeamSearchParams(beam_width=4, max_tokens=20))
threads = [threading.Thread(target=serve) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(numba.threading_layer())
"""


@thorough
@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_two_engines_of_one_process_compute_on_any_threads_of_numbas(tiny_model: Path, layer: str) -> None:
    """Numba's own threads, which it takes where the system has no libgomp, end a process that calls them twice at
    once."""
    environment = os.environ | {"NUMBA_THREADING_LAYER": layer}
    command = [sys.executable, "-c", TWO_ENGINES, str(tiny_model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == f"{layer}\n", done.stderr


@pytest.mark.parametrize(("layer", "waits"), [("omp", False), ("workqueue", True)])
def test_engines_take_turns_on_numbas_own_threads(layer: str, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba, "threading_layer", lambda: layer)

    def compute() -> None:
        with computing(throughout=False), computing(throughout=False):  # one within the other is one engine's
            pass

    other = threading.Thread(target=compute)
    with computing(throughout=False):
        other.start()
        other.join(0.1 if waits else 60)
        assert other.is_alive() == waits
    other.join()


# --- Fewer threads where others take cores -----------------------------------------------------------

PASS = 0.06
"""Seconds of a pass through the model."""


class Machine:
    """A machine of which `free` cores are left for the threads. Threads that compute or wait take all they can get."""

    def __init__(self, num_threads: int, free: float) -> None:
        self.free = free
        self.now = self.processor = 0.0
        self.threads = Threads(num_threads, lambda: self.now, lambda: self.processor)

    def run(self, seconds: float) -> list[int]:
        """The number of threads in each pass."""
        counts = []
        for _ in range(round(seconds / PASS)):
            with self.threads.watched():
                counts.append(self.threads.count)
                self.now += PASS
                self.processor += PASS * min(self.threads.count, self.free)
        return counts


@pytest.mark.parametrize(("num_threads", "free"), [(1, 0.5), (2, 2.0), (2, 1.8), (8, 6.6), (64, 50)])
def test_all_threads_compute_where_nobody_takes_much_of_a_core(num_threads: int, free: float) -> None:
    assert {*Machine(num_threads, free).run(60)} == {num_threads}


@pytest.mark.parametrize(
    ("num_threads", "free", "fewer"),
    [(2, 1.5, 1), (2, 1.0, 1), (2, 0.7, 1), (8, 4.0, 4), (8, 2.0, 2), (4, 3.0, 3)],
)
def test_a_thread_that_gets_no_core_is_left_out_and_tried_now_and_then(
    num_threads: int, free: float, fewer: int
) -> None:
    counts = Machine(num_threads, free).run(120)
    assert counts[:2] == [num_threads, fewer]
    assert {*counts[1:]} == {fewer, fewer + 1}
    assert 120 / LONGEST_WAIT - 2 < counts.count(fewer + 1) < 120 / LONGEST_WAIT + 6


def test_all_threads_compute_again_when_the_cores_are_free() -> None:
    machine = Machine(8, 4.0)
    machine.run(60)
    machine.free = 8.0
    assert {*machine.run(LONGEST_WAIT + 1)[-5:]} == {8}
    machine.free = 5.0
    assert machine.run(1)[2] == 5, "what is taken later is noticed at once"
    machine.free = 8.0
    assert {*machine.run(1)[-2:]} == {8}, "and one that was taken for a moment is soon tried"


class SharedMachine:
    """A machine of which other processes take `taken` cores, which threads then share with them half and half. Each
    thread has an equal part of a pass, which takes `PASS` on all cores, and waits for the last one. `asleep`: the
    cores' worth of waiting threads that sleep. `noise`: how much passes differ."""

    def __init__(
        self, num_threads: int, taken: int, asleep: float, kind: object = "32 decode", noise: float = 0.0
    ) -> None:
        self.cores, self.taken, self.asleep, self.kind = num_threads, taken, asleep, kind
        self.noise, self.random = noise, random.Random(0)
        self.now = self.processor = 0.0
        self.threads = Threads(num_threads, lambda: self.now, lambda: self.processor)

    def run(self, seconds: float) -> list[tuple[int, float]]:
        """The number of threads in each pass, and its seconds."""
        passes, end = [], self.now + seconds
        while self.now < end:
            with self.threads.watched(self.kind):
                count = self.threads.count
                sharing = max(0, count + self.taken - self.cores)
                took = PASS * self.cores / count * (2 if sharing else 1) * self.random.lognormvariate(0, self.noise)
                self.now += took
                self.processor += took * (count - sharing / 2 - self.asleep * count / self.cores)
            passes.append((count, took))
        return passes


def mean_seconds(passes: list[tuple[int, float]]) -> float:
    return sum(took for _, took in passes) / len(passes)


@pytest.mark.parametrize("asleep", [0.0, 0.12])
@pytest.mark.parametrize(("num_threads", "taken"), [(3, 1), (4, 1), (8, 1), (64, 1), (8, 2), (8, 3), (16, 3)])
def test_a_core_of_many_that_is_taken_is_left_to_the_others(num_threads: int, taken: int, asleep: float) -> None:
    """Its thread loses half a core, which is less than many threads lose on a quiet machine, and the pass takes twice
    as long."""
    machine = SharedMachine(num_threads, taken, asleep * num_threads)
    machine.run(60)
    fewer = PASS * num_threads / (num_threads - taken)
    assert fewer <= mean_seconds(machine.run(120)) < 1.05 * fewer
    machine.taken = 0
    machine.run(LONGEST_WAIT + 1)
    assert mean_seconds(machine.run(300)) < 1.02 * PASS
    machine.taken = 1
    machine.run(1)
    soon = mean_seconds(machine.run(20))
    assert soon < 1.15 * PASS * num_threads / (num_threads - 1), "what is taken after a quiet time is noticed at once"


@pytest.mark.parametrize("num_threads", [3, 4, 8, 64])
@pytest.mark.parametrize(("asleep", "noise"), [(0.0, 0.0), (0.12, 0.0), (0.12, 0.2)])
def test_trying_fewer_threads_costs_next_to_nothing_on_a_quiet_machine(
    num_threads: int, asleep: float, noise: float
) -> None:
    machine = SharedMachine(num_threads, 0, asleep * num_threads, noise=noise)
    machine.run(60)
    counts = [count for count, _ in machine.run(300)]
    assert sum(num_threads / count for count in counts) < 1.002 * len(counts)
    assert asleep or {*counts} == {num_threads}, "and nothing where no core is missing"


def test_fewer_threads_are_not_tried_where_no_two_passes_are_alike() -> None:
    machine = SharedMachine(8, 1, 0.0, kind=None)
    assert {count for count, _ in machine.run(60)} == {8}
    machine = SharedMachine(8, 1, 0.0)
    for machine.kind in range(60):
        machine.run(0.06)
        assert machine.threads.count >= 7
    assert machine.threads.count == 8, "what was tried could not be compared"


def test_two_passes_at_once_are_not_taken_for_lost_cores() -> None:
    machine = Machine(2, 1.0)
    with machine.threads.watched():
        for _ in range(5):
            with machine.threads.watched():
                machine.now += PASS
        assert machine.threads.count == 2
        machine.processor += 2 * 5 * PASS
    assert machine.threads.count == 2


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    """Two threads for this process, in which the tests have one otherwise."""
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("numba has one thread here")
    given = torch.get_num_threads()
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(threads, "_threads", two := Threads(2))
    torch.set_num_threads(2)
    yield two
    torch.set_num_threads(given)
    threads.use_threads()


def numbers() -> tuple[int, int]:
    return torch.get_num_threads(), numba.get_num_threads()


@pytest.mark.parametrize("throughout", [True, False])
def test_torch_and_numba_have_their_own_numbers_again_afterwards(two_threads: Threads, throughout: bool) -> None:
    two_threads.count = 1
    with suppress(ZeroDivisionError), computing(throughout=throughout):
        assert numbers() == (1, 1)
        raise ZeroDivisionError
    assert numbers() == (2, 2)


def test_what_is_measured_is_computed_on_one_thread(two_threads: Threads) -> None:
    with threads.on_one_thread():
        assert numbers() == (1, 1)
        assert threads.num_pieces() == 2, "other engines go on dividing their work as before"
    assert numbers() == (2, 2)
    assert two_threads.count == 2


def test_an_engine_that_begins_while_another_computes_on_fewer_threads_does_not_keep_to_those(
    two_threads: Threads,
) -> None:
    """torch's number, where a thread of Python first asks for it, is the one that was set last."""
    two_threads.count = 1
    found = []

    def begin() -> None:
        with computing():
            found.append(numbers())
        found.append(numbers())

    with computing():
        other = threading.Thread(target=begin)
        other.start()
        other.join()
    assert found == [(1, 1), (2, 2)]
    assert threads._current() is two_threads


def test_more_threads_than_usable_cores_do_not_compute(two_threads: Threads) -> None:
    torch.set_num_threads(7)
    with computing():
        assert numbers() == (2, 2)
    assert numbers() == (7, 2)


def test_attention_gives_the_same_bits_on_fewer_threads(two_threads: Threads) -> None:
    lens = torch.tensor([700, 45, 3], dtype=torch.int32)
    random = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, 60, 1, 16, 64, generator=random)  # [blocks, kv heads, block size, head dim]
    paged = Paged(keys, values, torch.arange(60, dtype=torch.int32).repeat(3, 1), torch.arange(3).int(), lens)
    query = torch.randn(3, 2, 64, generator=random)
    found = []
    for two_threads.count in (2, 1):
        with computing():
            found.append(paged_decode(query, paged, 0.1).numpy())
    assert np.array_equal(*found)
    threads._threads = Threads(1)  # which really are fewer, and divide the work otherwise
    assert not np.array_equal(paged_decode(query, paged, 0.1).numpy(), found[0])


def test_beams_are_ranked_on_as_many_threads_as_get_a_core_with_the_same_bits(
    two_threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum over one long row, as torch computes it, depends on the number of threads."""
    used, argmax_logsumexp = [], cpu.argmax_logsumexp

    def noted(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        used.append(numbers())
        return argmax_logsumexp(logits)

    monkeypatch.setattr(cpu, "argmax_logsumexp", noted)
    logits = torch.randn(4, 200_000, generator=torch.Generator().manual_seed(0))
    logits[:, 7] = 13  # about half of the probability, so that the last bits of the sum show in its own
    steps: list[list[BeamStep]] = []
    for two_threads.count in (2, 1):
        searches = [BeamSearch(BeamSearchParams(beam_width=4, max_tokens=9), 3, 12, [2]) for _ in logits]
        steps.append([search.step(logits, [row], [0.0]) for row, search in enumerate(searches)])
    assert used == [(2, 2)] * 4 + [(1, 1)] * 4
    assert steps[0] == steps[1]
    assert numbers() == (2, 2)


@pytest.mark.parametrize(
    ("variable", "value", "shows"),
    [("OMP_WAIT_POLICY", "passive", False), ("GOMP_SPINCOUNT", "0", False), ("OMP_WAIT_POLICY", "active", True)],
)
def test_lost_cores_do_not_show_where_waiting_threads_sleep(
    variable: str, value: str, shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(numba, "threading_layer", lambda: "omp")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv(variable, value)
    assert threads._shows_lost_cores() is shows
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert not threads._shows_lost_cores(), "a rank sleeps while it waits for others"


# --- Cores that a process may use --------------------------------------------------------------------

V2, V1 = "0::/pod/one\n", "5:memory:/pod/one\n4:cpu,cpuacct:/pod/one\n"
QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"


def line_of(folder: str, kind: str, options: str, top: str = "/") -> str:
    """A line of /proc/self/mountinfo. `folder`: in the test's own; `top`: the group that it is."""
    return f"32 31 0:29 {top} ROOT/{folder} rw,relatime shared:9 - {kind} {kind} rw,{options}\n"


MOUNTS = (
    "23 1 8:1 / / rw - ext4 /dev/sda rw\n"
    + line_of("memory", "cgroup", "memory")
    + line_of("cpu,cpuacct", "cgroup", "cpu,cpuacct")
    + line_of("unified", "cgroup2", "nsdelegate")
    + line_of("elsewhere", "cgroup2", "nsdelegate", "/other")
)


def cores_found(
    folder: Path, own: str | None, mounts: str | None, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> int:
    """The usable cores of a process that is bound to four, with these control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    files = {f"groups/{name}": content for name, content in files.items()}
    files |= {} if own is None else {"own": own}
    files |= {} if mounts is None else {"mounts": mounts.replace("ROOT", str(folder / "groups"))}
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, errors="surrogateescape")
    return usable_cores(folder / "own", folder / "mounts")


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        (V2, {"unified/pod/one/cpu.max": "150000 100000"}, 2),
        (V2, {"unified/pod/one/cpu.max": "max 100000", "unified/pod/cpu.max": "100000 100000"}, 1),
        (V2, {"unified/cpu.max": "20000 100000"}, 1),
        (V2, {"unified/pod/one/cpu.max": "max 100000"}, 4),
        (V2, {"elsewhere/cpu.max": "100000 100000"}, 4),
        (V2, {}, 4),
        (V1, {f"cpu,cpuacct/pod/{QUOTA}": "300000", f"cpu,cpuacct/pod/{PERIOD}": "100000"}, 3),
        (V1, {f"cpu,cpuacct/pod/{QUOTA}": "-1", f"cpu,cpuacct/pod/{PERIOD}": "100000"}, 4),
        (V1, {f"memory/pod/{QUOTA}": "100000", f"memory/pod/{PERIOD}": "100000"}, 4),
        (None, {"unified/cpu.max": "100000 100000"}, 4),
    ],
)
def test_a_containers_quota_counts(
    own: str | None, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cores_found(tmp_path, own, MOUNTS, files, monkeypatch) == cores
    assert usable_cores(tmp_path / "own", tmp_path / "none") == 4, "no folder is known"


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct", "cpuacct,cpu", "limits"])
@pytest.mark.parametrize(("top", "group"), [("/", "pod/one/"), ("/pod", "one/"), ("/pod/one", "")])
def test_the_controller_of_processor_time_is_found_by_what_is_mounted(
    folder: str, top: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder has one of several names, and may be the container's own group."""
    mounts = line_of(folder, "cgroup", "cpuacct,cpu", top)
    files = {f"{folder}/{group}{QUOTA}": "300000\n", f"{folder}/{group}{PERIOD}": "100000\n"}
    assert cores_found(tmp_path, V1, mounts, files, monkeypatch) == 3


@pytest.mark.parametrize("content", ["", "max", "100000", "one 100000", "100000 0", "-1 100000", "1 2 3", "\udcff 1"])
def test_a_quota_that_cannot_be_read_is_none(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"unified/pod/one/cpu.max": content, "unified/pod/cpu.max": "200000 100000"}
    assert cores_found(tmp_path, V2, MOUNTS, files, monkeypatch) == 2, "the other group's counts"
    del files["unified/pod/cpu.max"]
    files |= {f"cpu,cpuacct/pod/{QUOTA}": content, f"cpu,cpuacct/pod/{PERIOD}": "0"}
    assert cores_found(tmp_path / "v1", V1, MOUNTS, files, monkeypatch) == 4


@pytest.mark.parametrize(
    ("own", "mounts"),
    [(V2, None), (V2, ""), (V2, "nonsense"), (V2, "1 - cgroup2 x rw"), ("", MOUNTS), ("nonsense", MOUNTS)],
)
def test_lists_of_groups_that_cannot_be_read_set_no_quota(
    own: str, mounts: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cores_found(tmp_path, own, mounts, {"unified/cpu.max": "100000 100000"}, monkeypatch) == 4


def test_a_name_that_is_no_text_is_as_good_as_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"unified/\udcff/cpu.max": "300000 100000"}
    mounts = MOUNTS.replace("/dev/sda", "/dev/\udcff")
    assert cores_found(tmp_path, "0::/\udcff\n", mounts, files, monkeypatch) == 3
