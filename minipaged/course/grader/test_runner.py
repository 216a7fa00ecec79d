"""Runs a student's tests in the worker with pytest. The part under test is put into `sys.modules`."""

from __future__ import annotations

import linecache
import os
import sys
from functools import partial
from types import ModuleType
from typing import Any

import hypothesis  # noqa: F401  (students may use it; imported early, since it searches the whole machine for plugins)
import pytest

LOADING = "loading the file"
"""The name of the failure if no test could run."""
KEPT = 300
"""The number of characters kept of a failure's reason: its end, where pytest names the error."""
OPTIONS = (
    *("-q", "-x", "-p", "no:cacheprovider", "-p", "no:faulthandler"),
    *("-c", "/dev/null", "--rootdir", ".", "--confcutdir", "."),
)
"""pytest options that turn off plugins, files that pytest writes, and configuration from other folders."""


class _Log:
    """A pytest plugin that records the outcome of each test."""

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


def run(path: str, module: str, source: str) -> tuple[list[str], list[tuple[str, str]], str]:
    """Run the tests of a file. They import `module`, which has this source.

    Returns the tests that passed, the tests that failed with the reason, and a message if pytest ended otherwise.
    """
    part = ModuleType(module)
    sys.modules[module] = part
    file = f"{module}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # Triton reads its kernels
    exec(compile(source, file, "exec", dont_inherit=True), part.__dict__)
    if "triton" not in sys.modules:
        del linecache.cache[file]
        sys.addaudithook(partial(_keep_secret, part, path))
    log = _Log()
    status = pytest.main([*OPTIONS, path], plugins=[log])
    known = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    if not known and not log.failed:
        log.message = f"pytest ended with {status!r}"
    return log.passed, log.failed, log.message


def _keep_secret(part: ModuleType, tests: str, event: str, args: tuple[Any, ...]) -> None:
    """An audit hook that raises PermissionError when the tests read the part's code; they have to call it."""
    if event == "object.__getattr__" and args[1] == "__code__":
        function, reader = args[0], sys._getframe(1).f_code.co_filename
        if getattr(function, "__globals__", None) is part.__dict__ and reader.endswith((tests, f"{os.sep}dis.py")):
            raise PermissionError("the grader does not allow this: the tests read the code of what they test")


def _reason(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash:
        return str(crash.message)[:KEPT]
    raised = [line[1:].strip() for line in str(report.longrepr or "").splitlines() if line.startswith("E ")]
    return " ".join(raised)[-KEPT:]
