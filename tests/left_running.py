"""A run fails if a test leaves a process running.

pytest puts the name of the running test into the environment (PYTEST_CURRENT_TEST). Processes inherit it, also those
whose parent ends before them. So after the last test of each file, and at the end of a run, we look for processes whose
environment says that a test of this process started them. Two kinds are not seen: a grader's workers, which are started
with a clean environment, and copies of a process that was started before the test.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator

import psutil
import pytest

PATIENCE_S = 60
"""Seconds that a process may take to end after it was told to, even on a busy machine."""
OURS = "MINIPAGED_TEST_PROCESS"
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Python starts these by itself, once, and they live as long as the process that started them."""


class LeftRunning:
    """The plugin of a test process."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        os.environ[OURS] = str(os.getpid())

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """After a file's last test, fails if a process that a test started is still running. After the run's last test,
        it also fails for processes that fixtures started."""
        done = yield
        if nextitem is None or nextitem.path != item.path:
            left = wait_for_their_end(self._patience_s, everything=nextitem is None)
            if left:
                pytest.fail("left running: " + "; ".join(left), pytrace=False)
        return done


def wait_for_their_end(patience_s: float, *, everything: bool) -> list[str]:
    """The processes that still run after `patience_s` seconds: which test started it, and its command."""
    end = time.monotonic() + patience_s
    while (left := list(left_running(everything=everything))) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def left_running(*, everything: bool) -> Iterator[str]:
    """Processes that a test started; with `everything` also those of fixtures."""
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get(OURS) != str(os.getpid()) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            test, _, phase = environment.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
            command = " ".join(process.cmdline())
        except psutil.Error:  # it ended meanwhile, or is not ours to look at
            continue
        if (phase == "(call)" or everything) and not any(helper in command for helper in HELPERS):
            yield f"{process.pid} ({command[:200]}), started by {test} {phase}"
