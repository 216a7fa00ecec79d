"""The docs site, built once a run of the tests, strictly: what it warns of is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parent.parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of the site go first: they are one long piece of work, which nothing at the end could balance."""
    items.sort(key=lambda item: "site" not in item.nodeid.split("/")[:2])


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. The processes of one test run share it."""
    built = tmp_path_factory.getbasetemp().parent / f"site-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
    with FileLock(f"{built}.lock"):
        if not built.is_dir():
            environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
            for command in (["docs.build"], ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(built)]):
                done = subprocess.run(
                    [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True
                )
                assert done.returncode == 0, done.stdout + done.stderr
    return built
