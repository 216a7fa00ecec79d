"""A model with windows on the CUDA path, rehearsed with a CPU's tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.effort import thorough
from tests.end_to_end.small_llama import make_small_llama

ROOT = Path(__file__).parents[2]

pytest.importorskip("triton")  # there is none for this machine's operating system


@thorough
def test_far_beyond_its_windows_a_model_says_what_the_reference_says(tmp_path: Path) -> None:
    """Asynchronously, in debug mode; with chunks, graphs, preemption in both ways, a prefix that is reused."""
    caps = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0}
    model = make_small_llama(tmp_path, model_type="gemma2", sliding_window=5, head_dim=16, eos_token_id=None, **caps)
    command = [sys.executable, "-m", "tests.fast.rehearse_windows", str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for preemption, runs in json.loads(done.stdout).items():
        assert runs["fast"]["tokens"] == runs["reference"]["tokens"]
        happened = runs["fast"]["happened"]
        assert happened["blocks_passed"] > 30
        assert happened["prefix_cache_hit_tokens"] > 0
        assert happened[f"preempted_by_{preemption}"] > 0
        assert runs["replays"] > 50
