"""The tutorials: what each has, and that those whose run as a script is another than as a notebook run as scripts.

All of them run as notebooks when the site is built (`tests/site/test_tutorials.py`)."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.effort import quick_cases

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))
MOST_SECONDS = 30
"""Of computing, so that whoever runs one by hand on two cores waits for less."""
AS_SCRIPTS = [script for script in TUTORIALS if script.name[:2] in ("01", "15")]
"""The first, and the one that starts processes: they import the script again."""


@quick_cases(1)
@pytest.mark.parametrize("script", AS_SCRIPTS, ids=lambda script: script.stem)
def test_a_tutorial_runs_as_a_script(script: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    before = seconds_computed()
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert seconds_computed() - before < MOST_SECONDS


def seconds_computed() -> float:
    """By this process' children that have ended, on all cores together, whatever else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_link_to_a_step_leads_to_the_step_that_it_names_and_the_run_is_asked_for_it() -> None:
    linked = 0
    for script in TUTORIALS:
        text = script.read_text()
        links = re.findall(r'<a href="\?step=(\d+)#stepper-\d+">step (\d+)</a>', text)
        assert len(links) == text.count("?step="), "a link that is written in another way"
        for step, named in links:
            assert step == named
            assert re.search(rf"^assert .*\b({step}|{int(step) - 1})\b", text, re.MULTILINE), f"{script.stem}: {step}"
        linked += bool(links)
    assert linked >= 3


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda script: script.stem)
def test_a_tutorial_says_what_it_is_for_and_asks_before_it_answers(script: Path) -> None:
    text = script.read_text()
    for part in ("**What you will understand.**", "**Predict.**", "## Exercise", '# %% tags=["solution"]', "\nassert "):
        assert part in text, part
