"""Runs a student's tests in the worker: pytest, with the part under test put where the tests import it from."""

from __future__ import annotations

import linecache
import os
import sys
from functools import partial
from types import ModuleType
from typing import Any

import hypothesis  # noqa: F401  (students may use it; loaded here, since it looks for plugins on the whole machine)
import pytest

LOADING = "loading the file"
"""What failed where no test could be run."""
KEPT = 300
"""Characters of the reason why a test failed, its end: that is where pytest says what was raised."""
OPTIONS = (
    *("-q", "-x", "-p", "no:cacheprovider", "-p", "no:faulthandler"),
    *("-c", "/dev/null", "--rootdir", ".", "--confcutdir", "."),
)
"""No plugins of the machine's, no files of pytest's own, no configuration from the folders above."""


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


def run(path: str, module: str, source: str) -> tuple[list[str], list[tuple[str, str]], str]:
    """Run the tests of the file, which import `module`, made of the source; gives those that passed, those that failed
    and why, and a word on anything else."""
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
    """Tests are to call the part, not to read it: a bug is not found by its code."""
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
