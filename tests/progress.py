"""What `make test` says: while it runs, how far it is and what is left; at its end, one screen about the run.

Progress is measured by the rooms' budgets (`tests/budget.toml`), not by the number of tests: a test of the real model
takes as long as a thousand others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import settings

from tests import durations
from tests.durations import Cost, Sums

EVERY_S = 15
"""Seconds between two lines, where there is no terminal on which one line can be written over."""
DEAREST = 20
SLOWEST = 5
LEFT_OUT = {
    "quick": "left out: {number} thorough tests ({rooms}), for make test-thorough (of many like cases, a sample), and "
    "nine tenths of the random examples, of which it tries more",
    "thorough": "left out: {number} cases that were not drawn ({rooms}); make test-nightly runs them all",
}


class Progress:
    """The plugin of the process that people see: it receives the report of each phase of each test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._in_lines = bool(config.getoption("numprocesses", None)) and config.get_verbosity() == 0
        self._began = self._said = time.monotonic()
        self._all: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self._costs: list[Cost] = []
        self._thorough: set[str] = set()
        self._over: list[str] = []
        self._left_out: dict[str, int] = {}

    @property
    def _rooms(self) -> Mapping[str, float]:
        """What a whole run with this profile may cost in each room, in seconds of processor."""
        rooms: Mapping[str, float] = durations.budget().get(settings.get_current_profile_name(), {})
        return rooms

    def _is_whole(self) -> bool:
        """Whether this is all of `make test`, or all of `make test-thorough`."""
        chosen = {"quick": "not thorough", "thorough": "thorough or scaled or hypothesis"}
        option, profile = self._config.option, settings.get_current_profile_name()
        everywhere = self._config.args == self._config.getini("testpaths") and not option.keyword
        return everywhere and option.markexpr == chosen.get(profile)

    # --- While it runs

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._all = Counter(map(durations.room, ids))  # each process collects the same tests

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._left_out = getattr(node, "workeroutput", {}).get("left out", self._left_out)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No dots: the lines say more."""
        return ("passed", "", "") if self._in_lines and report.when == "call" and report.passed else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._costs += (Cost(**cost) for cost in getattr(report, "costs", []))
        if getattr(report, "thorough", False):
            self._thorough.add(report.nodeid)
        if report.when == "teardown":
            self._done[durations.room(report.nodeid)] += 1
        if self._in_lines:
            self._say(report)

    def _say(self, report: pytest.TestReport) -> None:
        """A failure at once, and now and then how far the run is."""
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message.partition("\n")[0] if crash is not None else str(report.longrepr)[-200:]
            terminal.write_line(f" failed in its {report.when}: {report.nodeid}: {reason}", red=True)
        now = time.monotonic()
        if now - self._said >= (0.5 if terminal.isatty else EVERY_S):
            self._said = now
            line = how_far(self._all, self._done, self._rooms, now - self._began)
            if terminal.isatty:
                terminal.rewrite(line[: terminal._tw.fullwidth - 1], erase=True)
            else:
                terminal.write_line(line)

    # --- At its end

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session, "left_out"):
            self._left_out = session.left_out
        durations.write(self._costs, time.monotonic() - self._began)
        if settings.get_current_profile_name() in ("thorough", "nightly"):  # they try more examples in each test
            self._thorough.update(cost.test for cost in self._costs)
        self._over = durations.over_budget(self._costs, self._thorough, rooms=self._rooms if self._is_whole() else {})
        if self._over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in screen(self._costs):
            terminalreporter.write_line(line)
        profile = settings.get_current_profile_name()
        if self._left_out and profile in LEFT_OUT:
            rooms = ", ".join(f"{name} {number}" for name, number in sorted(self._left_out.items()))
            terminalreporter.write_line(LEFT_OUT[profile].format(number=sum(self._left_out.values()), rooms=rooms))
        for line in self._over:
            terminalreporter.write_line(f"too dear: {line}", red=True)


def how_far(every: Counter[str], done: Counter[str], rooms: Mapping[str, float], seconds: float) -> str:
    """How far a run is: the number of all tests, and of those that are done, by room; what the rooms cost."""
    left = every - done
    whole = sum(rooms.get(name, 0) for name in every) or 1
    still = sum(rooms.get(name, 0) * number / every[name] for name, number in left.items())
    where = ", ".join(f"{name} {number}" for name, number in left.most_common()) or "nothing"
    part = f"{int(seconds) // 60}:{int(seconds) % 60:02} {100 - 100 * still / whole:3.0f} %"
    return f"{part}  {done.total():,} of {every.total():,}; left: {where}"


def screen(costs: list[Cost]) -> list[str]:
    """The dearest files beside the dearest fixtures, the slowest tests, and the most memory."""

    def column(sums: Sums, width: int) -> list[str]:
        most = [(name.removeprefix("tests/"), processor) for name, (processor, _) in list(sums.items())[:DEAREST]]
        return [f"{processor:6.1f} {name[-width:]:{width}}" for name, processor in most]

    if not costs:
        return []
    total = sum(cost.processor for cost in costs)
    files, fixtures = column(durations.by_file(costs), 40), column(durations.by_fixture(costs), 60)
    lines = [f"{total:.0f} s of processor (build/durations.json); the dearest files, and the dearest fixtures:"]
    lines += ["  ".join(pair).rstrip() for pair in zip_longest(files, fixtures, fillvalue=" " * 47)]
    tests = sorted(durations.by_test(costs).items(), key=lambda each: -each[1][1])[:SLOWEST]
    lines += ["the slowest tests, in seconds by the clock:", *(f"{wall:6.1f} {name}" for name, (_, wall) in tests)]
    most = max(costs, key=lambda cost: cost.memory)
    return [*lines, f"most memory of a test process: {most.memory / 1024:.2f} GiB, in {most.test}"]
