"""Runs a student's tests in the worker: pytest, with the part under test put where the tests import it from."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import hypothesis  # noqa: F401  (students may use it; loaded here, since it looks for plugins on the whole machine)
import pytest

MODULE = "block_allocator"
"""What the tests import the part from."""
LOADING = "loading the file"
"""What failed where no test could be run."""
KEPT = 300
"""Characters of the reason why a test failed, its end: that is where pytest says what was raised."""


class _Log:
    """A plugin that notes what came of each test."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[tuple[str, str]] = []
        self.message = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.failed:
            self.failed.append((name, _reason(report)))
        elif report.passed and report.when == "call":
            self.passed.append(name)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append((LOADING, _reason(report)))


def run(path: str, factory: Any) -> tuple[list[str], list[tuple[str, str]], str]:
    """Run the tests of the file; gives those that passed, those that failed and why, and a word on anything else."""

    class BlockAllocator:
        """The allocator under test."""

        def __new__(cls, num_blocks: int) -> Any:
            return factory.make(num_blocks)

    module = ModuleType(MODULE)
    module.__dict__["BlockAllocator"] = BlockAllocator
    sys.modules[MODULE] = module
    log = _Log()
    # No plugins of the machine's, no files of pytest's own, no configuration from the folders above.
    options = [
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:faulthandler",
        "-c",
        "/dev/null",
        "--rootdir",
        ".",
        "--confcutdir",
        ".",
    ]
    status = pytest.main([*options, path], plugins=[log])
    known = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    if not known and not log.failed:
        log.message = f"pytest ended with {status!r}"
    return log.passed, log.failed, log.message


def _reason(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash:
        return str(crash.message)[:KEPT]
    raised = [line[1:].strip() for line in str(report.longrepr or "").splitlines() if line.startswith("E ")]
    return " ".join(raised)[-KEPT:]
