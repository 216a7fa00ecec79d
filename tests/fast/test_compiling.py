"""Nothing compiles while a GPU serves: all that can come up does so while the model is made and warmed up.

Shown without a GPU, in a process of its own, where `rehearse_compiling.py` says how.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.effort import one_case_in, thorough

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no Triton for this machine", allow_module_level=True)

from minipaged.fast import gpu
from tests.fast.kept import kept
from tests.fast.test_compiled_kernels import SHARED_MEMORY

Report = dict[str, Any]

SHARING = {"_shared_kernel", "_decode_kernel", "_reduce_kernel"}
FAULTS = {
    "chooses only": {"_copy_blocks", "_fork_tables", "_prefill_kernel", *SHARING},
    "shares unprepared": SHARING,
    "draws only": {"_forbid", "_tile_totals", "_draw"},
    "greedy only": {"_forbid", "_tile_totals", "_draw"},
    "no grammars": {"_tile_allowed", "_row_allowed", "_forbid", "_tile_totals", "_draw"},
    "looks at addresses": {"_slot_mapping"},
}
"""What is broken on purpose in the rehearsal, and which kernels are then compiled too late."""

MODELS: list[dict[str, Any]] = [
    {"head_dim": 16, "group": 1, "dtype": "float32"},
    {"head_dim": 36, "group": 2, "kv_heads": 3, "dtype": "float16"},
    {"head_dim": 80, "group": 1, "kv_heads": 5, "capability": 80},
    {"head_dim": 96, "group": 8, "kv_heads": 1},
    {"head_dim": 128, "group": 16, "kv_heads": 1, "capability": 100},
    {"head_dim": 192, "group": 4, "dtype": "float16"},
    {"head_dim": 256, "group": 2, "dtype": "float32"},
    {"head_dim": 256, "group": 2, "capability": 89, "sms": 20},
    {"head_dim": 256, "group": 71, "kv_heads": 1},
    {"small_layers": False},
    {"packed": "gguf"},
    {"packed": "gptq", "dtype": "float16"},
    {"packed": "int8", "capability": 100},
    {"packed": "float8", "max_num_seqs": 40, "num_blocks": 60},
    {"packed": "float8", "capability": 80},
    {"model_type": "qwen2"},
    {"model_type": "mistral", "window": 40, "num_blocks": 60},
    {"model_type": "mistral", "window": 150, "num_blocks": 60, "max_num_seqs": 40, "sms": 20, "dtype": "float32"},
    {"model_type": "gemma2", "window": 300, "num_layers": 2, "num_blocks": 90, "head_dim": 256, "group": 2},
    {"model_type": "gemma2", "window": 40, "num_layers": 3, "num_blocks": 90, "small_layers": False},
    {"model_type": "qwen3", "head_dim": 128},
    {"model_type": "qwen3", "head_dim": 36, "kv_heads": 3, "dtype": "float16"},  # the second norm at an odd address
    {"head_dim": 36, "group": 1, "kv_heads": 1, "dtype": "float16", "small_layers": False},  # 72 bytes a query token
]
SIZES: list[dict[str, Any]] = [
    {"block_size": 1, "num_blocks": 400},
    {"block_size": 2, "num_blocks": 220, "head_dim": 36},
    {"block_size": 7, "num_blocks": 60, "vocab": 251, "dtype": "float32"},
    {"block_size": 256, "num_blocks": 4},
    {"block_size": 100, "num_blocks": 1, "group": 1},  # prompts of up to 99 tokens, which take tiles of 128 rows
    {"block_size": 20, "num_blocks": 5, "group": 1, "max_num_seqs": 3},
    {"max_num_seqs": 1},
    {"max_num_seqs": 40, "max_num_batched_tokens": 16, "num_blocks": 60, "sms": 20},
    {"max_num_seqs": 600, "num_blocks": 700, "kv_heads": 1, "max_num_batched_tokens": 1024},  # more than a graph has
]


BROKEN = [{"fault": fault} for fault in FAULTS] + [{"fault": "captures at once", "requests": 0}]
READ_BACK = [{"capability": capability, "vocab": 4100, "read_back": True} for capability in SHARED_MEMORY]
THOROUGH = BROKEN + MODELS + SIZES + READ_BACK
"""All that thorough tests rehearse, in one process."""


def rehearse(name: str, cases: list[dict[str, Any]]) -> list[Report]:
    """Only if something has changed since they were rehearsed."""
    printed = kept(name, "tests.fast.rehearse_compiling", json.dumps(cases))
    return [json.loads(line) for line in printed.splitlines()]


GROUPS = {"model_type": "gemma2", "window": 40, "num_layers": 5, "num_blocks": 93, "max_num_seqs": 5}
"""Three groups of layers, with tables of 10 rows of 31 blocks each, which 16 bytes do not divide."""


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return rehearse("rehearsed-compiling", [{"requests": 40, "packed": "int8"}, GROUPS])


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    return reports[0]


@pytest.fixture(scope="module")
def report_of(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], Report]:
    """For each of the thorough cases that tests of this run ask for."""
    ours = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = [item.callspec.params.get("case") for item in ours]
    cases = [case for case in THOROUGH if case in [*asked, *BROKEN]]
    reports = rehearse("rehearsed-compiling-thoroughly", cases)
    assert len(reports) == len(cases)
    return lambda case: reports[cases.index(case)]


def kernels(compiled: list[str]) -> set[str]:
    return {each.split()[0] for each in compiled}


def check(report: Report) -> None:
    """Nothing is compiled while a graph is captured, and nothing while requests are served."""
    assert report["compiled"].keys() == {"making", "warm-up"}, report["compiled"]
    assert report["compiled by numba while serving"] == []
    assert report["served"]["finished_requests"] > 10


def test_nothing_compiles_while_requests_are_served(report: Report) -> None:
    check(report)


def test_nothing_compiles_for_groups_of_layers_and_no_kernel_twice_for_their_tables(reports: list[Report]) -> None:
    """Tables at an address that 16 does not divide would take kernels of their own."""
    check(reports[1])
    assert reports[1]["served"]["blocks_passed"] > 10
    compiled = [each for phase in reports[1]["compiled"].values() for each in phase]
    assert [each for each in compiled if "('*i32', '')" in each] == []


def test_the_rehearsal_comes_to_all_kernels_and_to_all_that_moves_blocks(report: Report) -> None:
    sources = "".join(path.read_text() for path in Path(gpu.__file__).parent.glob("*.py"))
    launched = set(re.findall(r"^ +(_\w+)\[", sources, flags=re.MULTILINE))
    assert set(report["launched"]) == launched - {"_write"}, "which no model calls"
    counted = ("preempted_by_swap", "preempted_by_recompute", "blocks_copied", "prefix_cache_hit_tokens")
    assert [name for name in counted if not report["served"][name]] == []


@thorough
@one_case_in(2)
@pytest.mark.parametrize("case", MODELS + SIZES, ids=str)
def test_nothing_compiles_while_requests_are_served_whatever_the_shapes(
    case: dict[str, Any], report_of: Callable[[dict[str, Any]], Report]
) -> None:
    check(report_of(case))


@thorough
@pytest.mark.parametrize("case", READ_BACK, ids=lambda case: str(case["capability"]))
def test_all_that_is_compiled_fits_the_chip_and_reads_what_is_there(
    case: dict[str, Any], report_of: Callable[[dict[str, Any]], Report]
) -> None:
    """Each kernel for the very types, constants and numbers it is asked for with, not those of `compile_kernels.py`."""
    report, capability = report_of(case), case["capability"]
    assert {kernel["kernel"] for kernel in report["kernels"]} >= set(report["launched"])
    for kernel in report["kernels"]:
        assert kernel["spills"] == kernel["stack_bytes"] == 0, kernel
        assert kernel["shared_bytes"] <= SHARED_MEMORY[capability], kernel
        assert kernel["early_reads"] == [], kernel
    multiplied = {core for kernel in report["kernels"] for core in kernel["tensor_cores"]}
    assert multiplied == {80: {"HMMA"}, 90: {"HMMA", "HGMMA"}, 100: {"HMMA", "UTCHMMA"}}[capability]


@thorough
@pytest.mark.parametrize("case", BROKEN[:-1], ids=lambda case: case["fault"])
def test_what_is_not_warmed_up_is_found(case: dict[str, Any], report_of: Callable[[dict[str, Any]], Report]) -> None:
    assert kernels(report_of(case)["compiled"]["serving"]) == FAULTS[case["fault"]]


@thorough
def test_a_function_of_numba_that_is_not_warmed_up_is_found(report_of: Callable[[dict[str, Any]], Report]) -> None:
    report = report_of({"fault": "greedy only"})
    assert kernels(report["compiled by numba while serving"]) == {"_uniform"}


@thorough
def test_what_is_compiled_during_a_capture_is_found(report_of: Callable[[dict[str, Any]], Report]) -> None:
    assert "_decode_kernel" in kernels(report_of(BROKEN[-1])["compiled"]["capture"])
