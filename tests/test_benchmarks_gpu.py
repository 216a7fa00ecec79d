"""The GPU benchmark's own tests: its checks pass here in a dry run, and would not if a kernel were wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # there is none for this machine's operating system

from benchmarks.gpu import checks, harness
from benchmarks.gpu.__main__ import first_line, judge, line_of, main
from benchmarks.gpu.engine import Workload, share_covered
from minipaged.fast.gpu import attention, block_table, kv_cache, llama, sampling

DRY_RUN = harness.Setting(
    torch.device("cuda" if torch.cuda.is_available() else "cpu"), tiny=True, quick=False, seed=torch.seed() % 2**31
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_names_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr()
    assert "no GPU" in said.err
    assert "--tiny" in said.err
    assert said.out == ""


def test_every_check_passes_in_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    assert main(["--tiny", "--checks-only", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    kernels = [row for row in report["rows"] if row["section"] == "kernels against float64"]
    assert report["dry_run"]
    assert f"seed {report['seed']}" in capsys.readouterr().out
    assert len(kernels) == len(checks.kernel_checks(DRY_RUN))
    assert {row["status"] for row in kernels} == {"ok"}
    assert all(row["job_seconds"] == "dry run" for row in kernels)


Break = Callable[..., Any]


def one_number_off(function: Callable[..., torch.Tensor]) -> Break:
    """The largest element of the last row of what it writes is half as large again."""

    def broken(*arguments: Any, **options: Any) -> torch.Tensor:
        out = function(*arguments, **options)
        out[-1].view(-1)[out[-1].abs().argmax()] *= 1.5
        return out

    return broken


def last_row_unwritten(function: Callable[..., torch.Tensor]) -> Break:
    def broken(x: torch.Tensor, *arguments: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
        function(x[:-1], *arguments, out=out[:-1], **options)
        return out

    return broken


def nothing(function: Callable[..., Any]) -> Break:
    return lambda *arguments, **options: None


def other_slots(function: Callable[..., Any]) -> Break:
    return lambda slots, *rest: function(slots.flip(0), *rest)


def last_result_off(function: Callable[..., Any]) -> Break:
    """The last tensor that it returns or that it was handed gets one wrong number."""

    def broken(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        tensors = [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, torch.Tensor)]
        tensors = tensors or [t for t in arguments if isinstance(t, torch.Tensor)]
        tensors[-1].view(-1)[0] += 0.001 if tensors[-1].is_floating_point() else 1
        return result

    return broken


BROKEN = [
    (attention, "paged_decode", one_number_off, "paged_decode D64"),
    (attention, "paged_prefill", one_number_off, "paged_prefill D64"),
    (kv_cache, "rope_and_write", one_number_off, "rope_and_write"),
    (kv_cache, "write", other_slots, "write"),
    (kv_cache, "copy_blocks", nothing, "copy_blocks"),
    (llama, "rms_norm", last_row_unwritten, "rms_norm"),
    (llama, "add_rms_norm", one_number_off, "add_rms_norm"),
    (llama, "swiglu", last_row_unwritten, "swiglu"),
    (sampling, "argmax_logsumexp", last_result_off, "argmax_logsumexp"),
    (block_table, "edit_tables", nothing, "block tables"),
    (block_table, "fork_tables", nothing, "block tables"),
    (block_table, "slot_mapping", last_result_off, "block tables"),
    (block_table, "advance_decode", last_result_off, "block tables"),
]


@pytest.mark.parametrize(("module", "name", "break_it", "check"), BROKEN, ids=[name for _, name, _, _ in BROKEN])
def test_a_broken_kernel_fails_its_check(
    module: ModuleType, name: str, break_it: Callable[[Any], Break], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [job for job in checks.kernel_checks(DRY_RUN) if job.name.startswith(check)][:1]
    monkeypatch.setattr(module, name, break_it(getattr(module, name)))
    (row,) = harness.run_jobs("kernels", jobs, DRY_RUN, seconds=60)
    assert row["status"] == "failed"
    assert "AssertionError" in row["error"]


def test_a_failed_check_is_named_the_others_still_run_and_the_exit_status_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def some(setting: harness.Setting) -> list[harness.Job]:
        return [job for job in checks_of(setting) if job.name.startswith(("copy_blocks", "swap", "block tables"))]

    checks_of = checks.kernel_checks
    monkeypatch.setattr(checks, "kernel_checks", some)
    monkeypatch.setattr(checks, "model_checks", lambda setting: [])
    monkeypatch.setattr(kv_cache, "copy_blocks", nothing(kv_cache.copy_blocks))
    file = tmp_path / "run.json"
    assert main(["--tiny", "--checks-only", "--json", str(file), "--seed", "7"]) == 1
    table = capsys.readouterr().out
    assert "failed  kernels against float64: copy_blocks" in table
    assert "the cache is not what it should be after copying" in table
    rows = json.loads(file.read_text())["rows"]
    assert {row["name"].split()[0]: row["status"] for row in rows} == {
        "copy_blocks": "failed",
        "swap": "ok",
        "block": "ok",
        "pytest": "skipped",
    }


def test_what_is_swapped_out_must_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from minipaged.fast.kv_cache import KVCache

    jobs = [job for job in checks.kernel_checks(DRY_RUN) if job.name.startswith("swap")][:1]
    swap_in = KVCache.swap_in
    monkeypatch.setattr(KVCache, "swap_in", lambda self, pairs: swap_in(self, pairs[:-1]))
    (row,) = harness.run_jobs("kernels", jobs, DRY_RUN, seconds=60)
    assert row["error"] == "AssertionError: what came back is not what left"


def test_jobs_past_the_budget_are_skipped_and_say_so() -> None:
    jobs = [harness.Job("one", dict), harness.Job("two", dict)]
    rows = list(harness.run_jobs("section", jobs, DRY_RUN, seconds=-1))
    assert [row["status"] for row in rows] == ["skipped", "skipped"]
    assert "seconds were spent" in rows[0]["reason"]


def test_a_share_is_of_the_ceiling_and_a_target_is_met_or_missed() -> None:
    timing = harness.Timing(2e-3, 1e-3, 3e-3, "graph")
    row = timing.row(4e9, "GB/s", "copy") | {"target": {"share": 0.6}, "peers": {"A": timing.row(2e9, "GB/s", "copy")}}
    judge(row, {"copy": 4e12})
    assert (row["rate"], row["share"], row["met"]) == (2e12, 0.5, {"share": False})
    assert row["peers"]["A"]["share"] == 0.25
    line = " ".join(line_of(row | {"name": "A kernel"}).split())
    assert line == "A kernel 2000.0 GB/s 2000.0 us 50.0% of copy MISSED: share; A 1000.0 GB/s"
    fast = {"seconds": 10e-6, "target": {"seconds": 15e-6}}
    judge(fast, {})
    assert fast["met"] == {"seconds": True}
    assert first_line("one\ntwo") == "one"


def test_the_floor_counts_all_weights_each_step_and_the_tokens_that_each_query_sees() -> None:
    """Two requests of 3 and 2 prompt tokens that want 4 and 2: decoding takes 3 steps and 1."""
    shape = {
        "vocab_size": 10, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    work = Workload(shape, [[0] * 3, [0] * 2], [4, 2], 1)
    weights = 10 * 4 + 4 + 2 * 4 + 2 * (4 * 4) + 2 * (2 * 4) + 3 * (6 * 4)  # the embedding's rows are not counted
    seen = (4 + 5 + 6) + 3
    assert work.floor_bytes(2) == 2 * (3 * weights + seen * 2 * 2)


def test_busy_is_the_share_of_the_time_that_any_kernel_runs() -> None:
    assert share_covered([]) is None
    assert share_covered([(0, 4), (1, 2), (3, 5), (9, 10)]) == 0.6
