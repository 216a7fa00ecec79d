"""Where a test run's time goes: each run writes `build/durations.json`, and its dearest parts are said at its end.

    python -m tests.durations OLD NEW     # compare two such files: rooms, files, fixtures and tests

Each test has three phases (setup, call, teardown). Each phase has seconds by the clock, seconds of processor (CPU
time), and the most memory (MiB) that the test process held in it. The setup of a fixture is a row of its own, not a
part of the test's setup; its teardown is a part of the last test's. Compiling by numba is a row of its own too, not a
part of the first test that calls the kernel, unless another thread calls it. Processor time is what counts, of the test
process and of every process that it started: the clock goes on while other programs have the processor.

But a processor is slower while others use its other half, its cache or its memory: up to 1.8 times, on our machine. So
each cost has a pace: the time of a fixed piece of work (`yardstick`), done just before and after. `tests/budget.toml`
says what a run may cost, and at which pace: `over_budget` compares.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import settings

from tests.effort import NOT_DRAWN

TESTS = Path(__file__).parent
WRITTEN = TESTS.parent / "build" / "durations.json"
BUDGET = TESTS / "budget.toml"
LOOK_S = 0.05
"""Looking at the running child processes costs about 2 ms. In a shorter phase we look only if a child has ended."""


@dataclass(frozen=True)
class Cost:
    """What one phase of a test cost, or the setup of one fixture."""

    test: str
    """The id of the test (of the first test that asked for the fixture)."""

    phase: str
    """setup, call or teardown; of a fixture, its scope: function, class, module, package or session."""

    wall: float
    """Seconds by the clock."""

    processor: float
    """Seconds of processor, of the test process and of every process that it started."""

    memory: float = 0.0
    """MiB: the most memory that the test process held."""

    pace: float = 1.0
    """How long the yardstick took in that time, in the yardstick's time in the budget: 2 is half as fast."""

    fixture: str | None = None
    """Where the fixture is defined, and its name: `tests/serve/conftest.py: served`."""

    @property
    def owner(self) -> str:
        """The file that pays: the test's; for a fixture that several tests share, the one that defines it."""
        if self.fixture is None or self.phase == "function":
            return self.test.partition("::")[0]
        return self.fixture.partition(": ")[0]

    @property
    def room(self) -> str:
        return room(self.owner)


def room(file: str) -> str:
    """`tests/engine/test_x.py` is in `engine`; files beside the rooms, and fixtures of all rooms, are in `tests`."""
    parts = Path(file.partition("::")[0]).parts
    return parts[1] if len(parts) > 1 and not parts[1].endswith(".py") else "tests"


# --- In each test process: measure ----------------------------------------------------------------


def seconds_of_ended() -> float:
    """Seconds of processor of the descendants that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def seconds_of_running() -> float:
    """Seconds of processor of the descendants that run now, and of those that they outlived."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += sum(child.cpu_times()[:4])  # user and system, its own and its ended children's
    return total


def forget_peak() -> None:
    """The system counts this process's most memory from now on."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """This process's most memory since `forget_peak`; where the system cannot forget, in its whole life."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


def yardstick() -> float:
    """Seconds of processor that a fixed piece of work takes now: Python's own, and numpy's on small arrays."""
    began = time.process_time()
    counts: dict[int, int] = {}
    for i in range(10_000):
        counts[i % 97] = counts.get(i % 89, 0) + i
    numbers = np.arange(20_000.0)
    for _ in range(12):
        numbers = numbers * 0.999 + 1
    return time.process_time() - began


class Pace:
    """The processor's pace: looked at once a second at most, because that takes 2 ms."""

    def __init__(self) -> None:
        self._as_budgeted = budget()["yardstick"]
        self._at = -math.inf
        self._pace = 1.0

    def __call__(self) -> float:
        if time.monotonic() > self._at + 1:
            self._pace = yardstick() / self._as_budgeted
            self._at = time.monotonic()
        return self._pace


class Meter:
    """Measures stretches of a test process. A stretch within another is not counted in the outer one."""

    def __init__(self) -> None:
        self._running = 0.0  # of descendants that ran when they were last looked at
        self._inner = [(0.0, 0.0)]  # (wall, processor) of the stretches that ended within each open one

    def measure(self) -> Callable[[], tuple[float, float]]:
        """Begins a stretch; the function that it returns ends it, and returns its seconds: wall, processor."""
        began, ended = time.perf_counter(), seconds_of_ended()
        used = time.process_time() + ended + self._running
        self._inner.append((0.0, 0.0))

        def end() -> tuple[float, float]:
            wall = time.perf_counter() - began
            if wall > LOOK_S or seconds_of_ended() > ended:  # an ended child must not count as running, too
                self._running = seconds_of_running()
            processor = time.process_time() + seconds_of_ended() + self._running - used
            inner_wall, inner_processor = self._inner.pop()
            outer_wall, outer_processor = self._inner[-1]
            self._inner[-1] = (outer_wall + wall, outer_processor + processor)
            return wall - inner_wall, max(processor - inner_processor, 0.0)

        return end


class Measuring:
    """The plugin of a test process: puts `costs` into each report. pytest-xdist takes reports to where the run ends."""

    def __init__(self) -> None:
        self._meter = Meter()
        self._pace = Pace()
        self._costs: list[Cost] = []
        self._left_out: Counter[str] = Counter()
        self._test = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, object, object]:
        pace, end = self._pace(), self._meter.measure()
        try:
            return (yield)
        finally:
            wall, processor = end()
            pace = (pace + self._pace()) / 2
            name = f"{fixturedef.baseid or 'plugins'}: {fixturedef.argname}"
            test = request._pyfuncitem.nodeid
            if max(wall, processor) >= 0.001:
                self._costs.append(Cost(test, fixturedef.scope, wall, processor, fixture=name, pace=pace))

    def shared(self, name: str) -> Callable[[], None]:
        """Begins a stretch that is no test's own, though one happens to be the first that needs it."""
        pace, end = self._pace(), self._meter.measure()
        return lambda: self._costs.append(
            Cost(self._test, "session", *end(), fixture=name, pace=(pace + self._pace()) / 2)
        )

    def _phase(self, item: pytest.Item, phase: str) -> Generator[None, object, object]:
        forget_peak()
        self._test = item.nodeid
        pace, end = self._pace(), self._meter.measure()
        try:
            return (yield)
        finally:
            self._costs.append(Cost(item.nodeid, phase, *end(), peak_mib(), pace=(pace + self._pace()) / 2))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._phase(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._phase(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._phase(item, "teardown"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report: Any = yield
        report.costs = [asdict(cost) for cost in self._costs]
        report.thorough = item.get_closest_marker("thorough") is not None
        self._costs.clear()
        return report

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        thorough = settings.get_current_profile_name() == "thorough"
        # In the thorough profile, tests that are deselected because `make test` has run them do not count as left out.
        self._left_out.update(room(item.nodeid) for item in items if not thorough or NOT_DRAWN in item.stash)

    def pytest_sessionfinish(self, session: Any) -> None:
        session.left_out = dict(self._left_out)
        getattr(session.config, "workeroutput", {})["left out"] = session.left_out


# --- Where the run ends: add up, and compare with the budget --------------------------------------


Sums = dict[str, tuple[float, float]]
"""(seconds of processor, seconds by the clock) by name, the dearest first."""


def sums(costs: Iterable[Cost], key: Callable[[Cost], str | None]) -> Sums:
    """Added up by `key`; costs for which it returns None are left out."""
    added: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for cost in costs:
        if (name := key(cost)) is not None:
            added[name][0] += cost.processor
            added[name][1] += cost.wall
    return {name: (processor, wall) for name, (processor, wall) in sorted(added.items(), key=lambda each: -each[1][0])}


def by_room(costs: Iterable[Cost]) -> Sums:
    return sums(costs, lambda cost: cost.room)


def by_file(costs: Iterable[Cost]) -> Sums:
    return sums(costs, lambda cost: cost.owner)


def by_fixture(costs: Iterable[Cost]) -> Sums:
    return sums(costs, lambda cost: cost.fixture)


def by_test(costs: Iterable[Cost]) -> Sums:
    """Without the fixtures that a test shares with others."""
    return sums(costs, lambda cost: cost.test if cost.fixture is None or cost.phase == "function" else None)


def budget() -> dict[str, Any]:
    return tomllib.loads(BUDGET.read_text())


def over_budget(costs: list[Cost], thorough: set[str], rooms: Mapping[str, float]) -> list[str]:
    """What would cost more at the budget's pace than `tests/budget.toml` allows, a line each: tests that are not
    `thorough`, and `rooms`."""
    allows = budget()
    # A processor that is faster at the yardstick need not be so at everything: on one where the yardstick takes 0.67
    # of its time, the thorough tests of fast/ take 521 s, mostly to compile. So nobody gets less time than written.
    costs = [replace(cost, processor=cost.processor / max(1.0, cost.pace)) for cost in costs]
    lines = [
        f"{test} took {processor:.1f} s of processor at the budget's pace; over {allows['test']} s it is to be thorough"
        for test, (processor, _) in by_test(costs).items()
        if processor > allows["test"] and test not in thorough
    ]
    for name, (processor, _) in by_room(costs).items():
        if rooms and processor > (allowed := rooms.get(name, 0) * allows["margin"]):
            took = f"tests/{name} took {processor:.0f} s of processor in all at the budget's pace"
            lines.append(f"{took}; its budget allows {allowed:.0f}")
    return lines


def write(costs: Iterable[Cost], seconds: float) -> None:
    WRITTEN.parent.mkdir(exist_ok=True)
    rows = [{k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(cost).items()} for cost in costs]
    run = {"ended": time.strftime("%Y-%m-%dT%H:%M:%S"), "seconds": round(seconds, 1), "command": sys.argv[1:]}
    lines = ",\n".join(json.dumps(row) for row in rows)
    WRITTEN.write_text(json.dumps(run)[:-1] + f', "costs": [\n{lines}\n]}}\n')


# --- Two runs side by side ------------------------------------------------------------------------


def read(path: str) -> list[Cost]:
    return [Cost(**row) for row in json.loads(Path(path).read_text())["costs"]]


def compare(old: list[Cost], new: list[Cost], most: int = 20) -> list[str]:
    """Seconds of processor before and now, where they differ most."""
    lines = []
    for what, add_up in (("rooms", by_room), ("files", by_file), ("fixtures", by_fixture), ("tests", by_test)):
        was, now = ({name: processor for name, (processor, _) in add_up(costs).items()} for costs in (old, new))
        change = {name: now.get(name, 0.0) - was.get(name, 0.0) for name in was | now}
        lines.append(f"{what}: {sum(was.values()):.1f} s of processor before, {sum(now.values()):.1f} s now")
        for name in sorted(change, key=lambda name: -abs(change[name]))[:most]:
            if abs(change[name]) >= 0.1:
                before, after = (f"{each[name]:.1f}" if name in each else "-" for each in (was, now))
                lines.append(f"  {before:>7} {after:>7} {change[name]:+7.1f}  {name}")
    return lines


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tests.durations OLD NEW (two files that a run wrote as build/durations.json)")
    print("\n".join(compare(*map(read, sys.argv[1:]))))
