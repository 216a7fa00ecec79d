"""Prompts that arrive among decoding sequences, on the CUDA path, rehearsed with a CPU's tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.effort import thorough

ROOT = Path(__file__).parents[2]

pytest.importorskip("triton")  # there is none for this machine's operating system


@thorough
def test_with_and_without_a_graph_for_those_that_decode_the_tokens_are_the_references(tiny_model: Path) -> None:
    """Asynchronously; with chunks, a prefix that is reused, samples that fork, a prompt of one token."""
    command = [sys.executable, "-m", "tests.fast.rehearse_mixed_batches", str(tiny_model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)
    reference, apart, together = runs["reference"], runs["in two parts"], runs["in one pass"]
    assert reference["tokens"] == apart["tokens"] == together["tokens"]
    assert apart["mixed"] == together["mixed"] > 4
    assert apart["replayed"] == apart["mixed"]
    assert together["replayed"] == 0
