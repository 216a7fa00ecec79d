"""The fast tier keeps to the number of threads that it is given, and leaves torch's alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.effort import thorough

REPORT = """
import sys, threading
import numba, torch
from minipaged import LLM, SamplingParams
before = torch.get_num_threads()
llm = LLM(sys.argv[1], tier="fast", device="cpu", num_blocks=16)
def serve():
    for _ in range(2):
        llm.generate([[3, 4, 5]], SamplingParams(max_tokens=3), use_tqdm=False)
    print(before, torch.get_num_threads(), numba.get_num_threads())
serve()
other = threading.Thread(target=serve)  # numba counts threads for each of Python's by itself
other.start()
other.join()
"""


@thorough
@pytest.mark.parametrize("threads", range(1, min(2, os.cpu_count() or 1) + 1))
def test_omp_num_threads_holds_for_torch_and_for_numba_in_any_thread(tiny_model: Path, threads: int) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-c", REPORT, str(tiny_model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == [f"{threads} {threads} {threads}"] * 2 + [""]
