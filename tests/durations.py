"""Where a test run's time goes: each run writes `build/durations.json` and ends with one screen about itself.

    python -m tests.durations OLD NEW     # compare two such files: rooms, files, fixtures and tests

Each test has three phases (setup, call, teardown), and each phase has seconds by the clock, seconds of processor and the
most memory (MiB) that the test process held in it. Processor time is what counts: it hardly changes when other programs
want the same processor. It includes every process that the test started, running or ended. A fixture's own time is
listed by itself as well, without the fixtures that it asks for.

A run of `make test` (everything that is not thorough) also has a budget, `tests/budget.toml`.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

TESTS = Path(__file__).parent
WRITTEN = TESTS.parent / "build" / "durations.json"
DEAREST = 20
LOOK_S = 0.05
"""A phase shorter than this is not worth a look at the running child processes, which costs about 2 ms."""


@dataclass(frozen=True)
class Phase:
    """What one phase of a test, or one fixture's setup, cost."""

    test: str
    """The test's id; for a fixture, its file and name (`serve/conftest.py: served`)."""

    phase: str
    """setup, call, teardown, or fixture."""

    wall: float
    """Seconds by the clock."""

    processor: float
    """Seconds of processor, of this process and of every process that it started."""

    memory: float = 0.0
    """MiB: the most memory that the test process held; 0 where the system does not say."""

    @property
    def file(self) -> str:
        return self.test.partition("::")[0]


# --- In each test process: measure ----------------------------------------------------------------


def processor_seconds() -> float:
    """Seconds of processor that this process and its descendants have used, without those that run now."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def seconds_of_running() -> float:
    """Seconds of processor of the descendants that run now, and of what they started and outlived."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += sum(child.cpu_times()[:4])  # user, system, and both of its ended children
    return total


class Meter:
    """Measures one stretch of a test process after the other."""

    def __init__(self) -> None:
        self._running = 0.0  # of descendants that ran when they were last looked at

    def measure(self) -> Callable[[], tuple[float, float]]:
        """Begins a stretch; what it returns ends it, and returns its seconds by the clock and of processor."""
        began, used = time.perf_counter(), processor_seconds()

        def end() -> tuple[float, float]:
            wall, own = time.perf_counter() - began, processor_seconds() - used
            if wall > LOOK_S:
                running = seconds_of_running()
                own += running - self._running  # less, by what has ended and is in `own` now
                self._running = running
            return wall, max(own, 0.0)

        return end


def forget_peak() -> None:
    """The system counts this process's most memory from now on."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> float:
    """MiB: this process's most memory since `forget_peak`; where only the whole life's is known, that."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


class Measured:
    """The plugin of a test process: adds `costs` to each report, which pytest-xdist carries to where the run ends."""

    def __init__(self) -> None:
        self._meter = Meter()
        self._costs: list[Phase] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        end = self._meter.measure()
        try:
            return (yield)
        finally:
            wall, processor = end()
            if processor > LOOK_S or wall > LOOK_S:
                self._costs.append(Phase(f"{fixturedef.baseid or 'pytest'}: {fixturedef.argname}", "fixture", wall, processor))

    def _phase(self, item: pytest.Item, phase: str) -> Generator[None, object, object]:
        forget_peak()
        end = self._meter.measure()
        try:
            return (yield)
        finally:
            self._costs.append(Phase(item.nodeid, phase, *end(), peak()))

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
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.costs = [asdict(cost) for cost in self._costs]  # type: ignore[attr-defined]
        self._costs.clear()
        return report


# --- Where the run ends: write, and say -----------------------------------------------------------


class Collected:
    """The plugin of the process that people see: hears of every report."""

    def __init__(self) -> None:
        self.costs: list[Phase] = []
        self._began = time.time()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.costs += (Phase(**cost) for cost in getattr(report, "costs", []))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        WRITTEN.parent.mkdir(exist_ok=True)
        began = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self._began))
        run = {"began": began, "seconds": round(time.time() - self._began, 1), "command": sys.argv[1:]}
        costs = [{k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(c).items()} for c in self.costs]
        WRITTEN.write_text(json.dumps({**run, "phases": costs}, indent=0) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in dearest(self.costs):
            terminalreporter.write_line(line)


def by(costs: Iterable[Phase], key: Callable[[Phase], str]) -> dict[str, tuple[float, float]]:
    """(seconds of processor, seconds by the clock) for each key, the dearest first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for cost in costs:
        sums[key(cost)][0] += cost.processor
        sums[key(cost)][1] += cost.wall
    return {name: (p, w) for name, (p, w) in sorted(sums.items(), key=lambda each: -each[1][0])}


def room(test: str) -> str:
    """`tests/engine/test_x.py::test_y` is in `engine`; a file beside the rooms is a room of its own."""
    parts = Path(test.partition("::")[0]).parts
    return parts[1].removesuffix(".py") if len(parts) > 1 else parts[0]


def split(costs: Iterable[Phase]) -> tuple[list[Phase], list[Phase]]:
    """The phases of tests, and those of fixtures (which are within the setups of tests)."""
    tests, fixtures = [], []
    for cost in costs:
        (fixtures if cost.phase == "fixture" else tests).append(cost)
    return tests, fixtures


def dearest(costs: Iterable[Phase]) -> list[str]:
    tests, fixtures = split(costs)
    lines = []
    for what, sums in (("files", by(tests, lambda c: c.file)), ("fixtures", by(fixtures, lambda c: c.test))):
        lines.append(f"dearest {what} (seconds of processor, seconds by the clock):")
        lines += [f"  {p:7.1f} {w:7.1f}  {name}" for name, (p, w) in list(sums.items())[:DEAREST]]
    lines.append(f"all tests: {sum(c.processor for c in tests):.0f} s of processor; written to {WRITTEN}")
    return lines


# --- Two runs side by side ------------------------------------------------------------------------


def read(path: str) -> list[Phase]:
    return [Phase(**phase) for phase in json.loads(Path(path).read_text())["phases"]]


def compare(old: list[Phase], new: list[Phase]) -> list[str]:
    """Seconds of processor before and after, where they differ most."""
    (old, old_fixtures), (new, new_fixtures) = split(old), split(new)
    lines = []
    for what, key, before, after in (
        ("rooms", lambda c: room(c.test), old, new),
        ("files", lambda c: c.file, old, new),
        ("fixtures", lambda c: c.test, old_fixtures, new_fixtures),
        ("tests", lambda c: c.test, old, new),
    ):
        was, now = ({name: p for name, (p, _) in by(each, key).items()} for each in (before, after))
        change = Counter({name: now.get(name, 0.0) - was.get(name, 0.0) for name in was | now})
        lines.append(f"{what}: {sum(was.values()):.1f} s of processor before, {sum(now.values()):.1f} s now")
        most = sorted(change, key=lambda name: -abs(change[name]))[:DEAREST]
        lines += [f"  {was.get(n, 0):7.1f} {now.get(n, 0):7.1f} {change[n]:+7.1f}  {n}" for n in most if abs(change[n]) >= 0.1]
    return lines


if __name__ == "__main__":
    print("\n".join(compare(*map(read, sys.argv[1:3]))))
