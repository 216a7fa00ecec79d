"""The docs site, built once a run of the tests, strictly: what it warns of is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parent.parent.parent
MEANWHILE = 200
"""Tests that take longer, together, than the building."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One test of the site goes first, and builds it; the others come when that is done, so that nobody waits."""
    of_the_site = [item for item in items if "site" in item.nodeid.split("/")[:2]]
    others = [item for item in items if item not in of_the_site]
    items[:] = [*of_the_site[:1], *others[:MEANWHILE], *of_the_site[1:], *others[MEANWHILE:]]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. The processes of one test run share it."""
    built = tmp_path_factory.getbasetemp().parent / f"site-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
    with FileLock(f"{built}.lock"):
        if not built.is_dir():
            environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
            # With --quiet, mkdocs forgets its warnings, and --strict refuses nothing.
            for command in (["docs.build"], ["mkdocs", "build", "--strict", "--site-dir", str(built)]):
                done = subprocess.run(
                    [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True
                )
                assert done.returncode == 0, done.stdout + done.stderr
    return built
