"""The tutorials run as the scripts that they are, and soon enough to be waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))
MOST_SECONDS = 30
"""On two cores, for whoever runs one by hand."""


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda script: script.stem)
def test_a_tutorial_runs_as_a_script(script: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    start = time.monotonic()
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < MOST_SECONDS


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda script: script.stem)
def test_a_tutorial_says_what_it_is_for_and_asks_before_it_answers(script: Path) -> None:
    text = script.read_text()
    for part in ("**What you will understand.**", "**Predict.**", "## Exercise", '# %% tags=["solution"]', "\nassert "):
        assert part in text, part
