"""What the GPU kernels become for real GPUs: machine code, read on a machine that need not have one.

That a kernel is right says nothing about whether it is fast, and what makes it slow is seldom seen in its source: an
intermediate too many and registers go to memory and back at every turn; a tile too small and the tensor cores are left
out. `compile_kernels.py` says how the code is read, and which kernels there are.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from minipaged.tiers.devices import LEAST_TRITON
from tests.effort import thorough

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no Triton for this machine", allow_module_level=True)

from minipaged.fast.gpu.attention import PROGRAMS_PER_SM
from tests.fast.compile_kernels import WGMMA
from tests.fast.kept import kept

SHARED_MEMORY = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that one program may have, by architecture (CUDA C++ Programming Guide, technical specifications).

sm_80 itself has 163 KB; but what suits it must suit consumer chips too (sm_86, 89, 120), which have 99 KB."""

pytestmark = thorough

Report = dict[str, Any]


@pytest.fixture(scope="session")
def all_reports(pytestconfig: pytest.Config) -> list[Report]:
    """One for each kernel on each architecture, all compiled by one process, and only if something has changed. The
    thorough profile leaves out half of the shapes of attention, drawn by the run's seed."""
    in_part = settings.get_current_profile_name() == "thorough"
    sample = ["--sample", str(pytestconfig.getoption("--hypothesis-seed"))] if in_part else []
    return [json.loads(line) for line in kept("compiled-kernels", "tests.fast.compile_kernels", *sample).splitlines()]


@pytest.fixture(params=SHARED_MEMORY, ids=lambda arch: f"sm_{arch}")
def reports(request: pytest.FixtureRequest, all_reports: list[Report]) -> list[Report]:
    """One for each kernel."""
    found = [report for report in all_reports if report["arch"] == request.param]
    assert found
    return found


def test_what_is_read_here_was_compiled_by_the_oldest_triton_that_is_allowed() -> None:
    """3.7.0 left a fence out of 28 kernels for Hopper that are right with 3.7.1. If a newer one is pinned, these tests
    must run with the oldest one, too."""
    oldest = ".".join(map(str, LEAST_TRITON))
    assert importlib.metadata.version("triton") == oldest
    root = Path(__file__).parents[2]
    assert f"triton>={oldest};" in (root / "pyproject.toml").read_text()
    assert f"\ntriton=={oldest}\n" in (root / "constraints.txt").read_text()


def names(reports: list[Report]) -> list[str]:
    return [report["kernel"] for report in reports]


def test_every_register_stays_in_the_processor(reports: list[Report]) -> None:
    assert names([report for report in reports if report["spills"] or report["stack_bytes"]]) == []


def test_shared_memory_suffices(reports: list[Report]) -> None:
    assert names([report for report in reports if report["shared_bytes"] > SHARED_MEMORY[report["arch"]]]) == []


def test_shared_memory_is_what_was_reckoned_before_compiling(reports: list[Report]) -> None:
    """By it models are refused that a GPU has no room for."""
    attention = [report for report in reports if report["shared_bytes_reckoned"]]
    assert {report["kernel"].partition("-")[0] for report in attention} == {"decode", "prefill", "shared"}
    over = {report["kernel"]: report["shared_bytes_reckoned"] - report["shared_bytes"] for report in attention}
    assert {kernel: more for kernel, more in over.items() if not 0 <= more <= 10 * 1024} == {}


def test_as_many_programs_of_a_decode_as_are_planned_fit_at_once(reports: list[Report]) -> None:
    """`PROGRAMS_PER_SM` of minipaged/fast/gpu/attention.py, by which contexts are split."""
    if reports[0]["arch"] == 80:
        pytest.skip("the chips it stands for have very different multiprocessors")
    decodes = [report for report in reports if report["kernel"].startswith("decode")]
    assert decodes
    assert names([report for report in decodes if report["programs_an_sm"] < math.ceil(PROGRAMS_PER_SM)]) == []


def test_matrices_are_multiplied_on_the_tensor_cores(reports: list[Report]) -> None:
    needed = [report for report in reports if report["tensor_cores_needed"]]
    assert needed
    assert names([report for report in needed if not report["tensor_cores"]]) == []


def test_prefill_and_packed_matrices_multiply_with_wgmma_on_hopper(reports: list[Report]) -> None:
    needed = [report for report in reports if report["wgmma_needed"]]
    if reports[0]["arch"] == 90:
        assert {core for report in needed for core in report["tensor_cores"]} == {*WGMMA}
    assert names([report for report in needed if not {*WGMMA} & {*report["tensor_cores"]}]) == []


def test_shared_memory_is_read_when_what_was_written_is_there(reports: list[Report]) -> None:
    """Behind a barrier, and behind a fence where the tensor cores read it by themselves."""
    copying = [report for report in reports if report["copies_past_registers"]]
    assert {report["kernel"].partition("-")[0] for report in copying} >= {"decode", "prefill"}
    assert names([report for report in reports if report["early_reads"]]) == []
    # It would be seen if they were left out.
    assert names([report for report in copying if not report["early_reads_without"]["bar.sync"]]) == []
    fenced = [report for report in copying if {"HGMMA", "UTCHMMA"} & {*report["tensor_cores"]}]
    assert fenced or reports[0]["arch"] == 80
    assert names([report for report in fenced if not report["early_reads_without"]["fence.proxy.async"]]) == []


@pytest.mark.parametrize("access", ["loads", "stores"])
def test_memory_is_read_and_written_16_bytes_at_a_time_on_hopper(reports: list[Report], access: str) -> None:
    """Where rows and blocks begin at multiples of 16 bytes. What is narrower is a slot here and a position there."""
    needed = [report for report in reports if access in report["wide_needed"]]
    if reports[0]["arch"] == 90:
        assert needed
    assert names([report for report in needed if report[access]["wide"] <= report[access]["narrow"]]) == []
