"""schemathesis asks for whatever /openapi.json allows, and for what it does not: no server error, no other answer.

Left out is the check that what the schema allows is never refused: that a token is one of this model's, that a prompt
fits, that echo is not asked for where it cannot be, no schema says.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.effort import examples, thorough
from tests.serve.harness import Served


@pytest.mark.parametrize("phase", ["fuzzing", pytest.param("coverage", marks=thorough)])
def test_schemathesis_finds_no_failure(server: Served, tmp_path: Path, phase: str) -> None:
    # It keeps what it found in the folder where it runs.
    command = [sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json"]
    options = ["--phases", phase, "--exclude-checks", "positive_data_acceptance"]
    options += ["--max-examples", str(examples(60)), "--generation-deterministic", "--warnings", "off"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert "11 selected" in done.stdout
    server.check_nothing_is_left()
