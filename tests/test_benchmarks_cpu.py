"""Engines take turns on a CPU, and the profile of the fast tier counts what there is to count."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import cpu_engines
from tests.effort import thorough

ROOT = Path(__file__).parent.parent


def test_a_workload_that_there_is_not_is_told_and_nothing_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cpu_profile", "64 mixd"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("there is no workload '64 mixd'; choose of one request, 32 decoding, 64 mixed")


def test_engines_take_turns_each_with_a_python_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pythons = {}
    for name in ("ours", "theirs"):
        pythons[name] = tmp_path / name
        pythons[name].write_text(f'#!/bin/sh\nshift\necho {name} "$@" >> {tmp_path}/calls\n')
        pythons[name].chmod(0o755)
    peer = ["--peer", "openvino", "--peer-folder", "ir", "--peer-python", str(pythons["theirs"])]
    each = ["--dtype", "float32", "--busy", "1", "--workload", "one request"]
    monkeypatch.setattr(sys, "argv", ["cpu_engines", "minipaged", "model", *peer, *each])
    monkeypatch.setattr(sys, "executable", str(pythons["ours"]))
    cpu_engines.main()
    turn = [f"ours minipaged model {' '.join(each)}", f"theirs openvino ir {' '.join(each)}"]
    assert (tmp_path / "calls").read_text().splitlines() == 2 * turn


def test_others_compute_while_an_engine_is_measured_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beside: list[list[psutil.Process]] = []
    us = psutil.Process()
    before = us.children()

    def run(requests: list[cpu_engines.Request]) -> None:
        beside.append([child for child in us.children() if child not in before])

    monkeypatch.setitem(cpu_engines.ENGINES, "vllm", lambda folder, dtype: run)
    cpu_engines.measure("vllm", "model", "float32", ["one request", "prefill of 512"], busy_processes=2)
    assert [len(each) for each in beside] == [0, 2, 2], "none while it warms up"
    assert not any(each.is_running() for each in beside[1])
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "vllm, one request",
        "vllm, prefill of 512",
    ]


@thorough
@pytest.mark.model
def test_parts_and_the_rest_are_the_whole_and_floors_are_as_reckoned_by_hand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A prompt of 6 tokens and two that follow: three steps, of which two decode; 100 bytes a second."""
    from benchmarks.cpu_profile import Profile, shapes, show
    from minipaged import LLM
    from minipaged.fast import cpu, llama
    from minipaged.fast.cpu.llama import DenseMatrix
    from minipaged.fast.cpu.product import TiledMatrix

    before = DenseMatrix.__call__, TiledMatrix.__call__, llama.attend, cpu.swiglu
    llm = LLM("smollm2-135m-instruct", tier="fast", num_blocks=8, enable_prefix_caching=False)
    profile = Profile(read_rate=100.0, product_rate=1e30)
    show("a small one", [([11, 12, 13, 14, 15, 16], 3)], llm, profile)
    assert (DenseMatrix.__call__, TiledMatrix.__call__, llama.attend, cpu.swiglu) == before
    assert llm.engine.runner._one_call is not None  # type: ignore[attr-defined]
    config, width = llm.loaded.config, getattr(torch, llm.loaded.tier.dtype).itemsize
    for (rows, columns), name in shapes(llm).items():
        times = 1 if name == "products: head" else config.num_hidden_layers
        assert profile.floors[name] == pytest.approx(3 * times * rows * columns * width / 100)
        each = [1, 1, 1] if name == "products: head" else [6, 1, 1]  # the head has one row of the prompt
        assert profile.operations[name] == 2 * times * rows * columns * sum(each)
    per_token = 2 * config.num_key_value_heads * config.head_dim * width
    assert profile.floors["attention"] == pytest.approx(config.num_hidden_layers * (6 + 7 + 8) * per_token / 100)
    scores = 6 * 7 / 2 + 7 + 8
    heads = config.num_attention_heads * config.head_dim
    assert profile.operations["attention"] == config.num_hidden_layers * 4 * heads * scores
    told = capsys.readouterr().out
    *table, last = told.splitlines()[3:]
    shares = [float(line[22:].split("%")[0]) for line in table]
    assert sum(shares) == pytest.approx(100, abs=1)
    assert len(shares) == 9
    found = re.fullmatch(r"with all layers in one call: (\S+) s, (\S+) of them in that call", last)
    assert found
    assert 0 < float(found[2]) < float(found[1])
