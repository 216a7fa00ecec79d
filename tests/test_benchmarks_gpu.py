"""The GPU benchmark's own tests: its checks pass here in a dry run, and would not if a kernel were wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from tests.effort import quick_cases, thorough

pytest.importorskip("triton")  # there is none for this machine's operating system

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import checks, engine, harness, page
from benchmarks.gpu.__main__ import Part, compile_ahead, line_of, main, parse, put_beside, sections_of
from benchmarks.gpu.engine import Workload, drain, share_covered, workload
from benchmarks.gpu.targets import GOALS, first_line, judge, verdicts
from minipaged.fast.gpu import attention, block_table, kv_cache, llama, packed, sampling

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


@thorough
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
    def broken(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        written = function(x[:-1], *arguments)
        return torch.cat([written, torch.empty_like(written[:1])])

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


def rows_ignored(draw: Callable[..., Any]) -> Break:
    return lambda logits, rows, *others, depth: draw(logits, torch.arange(len(rows)).to(rows), *others, depth=depth)


def number_off_in_products(make: Callable[..., Any]) -> Break:
    return lambda *given: Off(make(*given))


class Off:
    """A matrix of whose products one number is."""

    def __init__(self, matrix: Any) -> None:
        self.matrix, self.rows = matrix, matrix.rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return one_number_off(self.matrix)(x)


def codes_of_the_first_token(quantized: Callable[..., Any]) -> Break:
    def broken(x: torch.Tensor, how: Any) -> Any:
        codes, scales, zeros = quantized(x, how)
        return codes, scales[:1].expand_as(scales).contiguous(), zeros

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
    (sampling, "likeliest_allowed", last_result_off, "likeliest_allowed"),
    (sampling, "allowed_only", nothing, "allowed_only"),
    (sampling, "draw", last_result_off, "draw"),
    (sampling, "draw", rows_ignored, "draw"),
    (packed, "packed", number_off_in_products, "packed Q4_1"),
    (packed, "quantized", codes_of_the_first_token, "packed W8A8 FP8"),
    (block_table, "edit_tables", nothing, "block tables"),
    (block_table, "fork_tables", nothing, "block tables"),
    (block_table, "slot_mapping", last_result_off, "block tables"),
    (block_table, "advance_decode", last_result_off, "block tables"),
]


@quick_cases(1)
@pytest.mark.parametrize(("module", "name", "break_it", "check"), BROKEN, ids=[name for _, name, _, _ in BROKEN])
def test_a_broken_kernel_fails_its_check(
    module: ModuleType, name: str, break_it: Callable[[Any], Break], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = replace(DRY_RUN, seed=1)  # the numbers of a few seeds hide some of the breaks
    jobs = [job for job in checks.kernel_checks(setting) if job.name.startswith(check)][:1]
    monkeypatch.setattr(module, name, break_it(getattr(module, name)))
    (row,) = harness.run_jobs("kernels", jobs, setting, seconds=60)
    assert row["status"] == "failed"
    assert "AssertionError" in row["error"]


@thorough
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


# --- The command -----------------------------------------------------------------------------------

ON_A_GPU = harness.Setting(torch.device("cuda"), tiny=False, quick=False, seed=3)


def test_which_sections_run() -> None:
    checks_of, all_of = ("kernels against float64", "whole model"), [*command.SECONDS]
    assert tuple(sections_of(parse(["--checks-only"]))) == checks_of
    assert sections_of(parse(["--tests-only"])) == ["test suites"]
    assert sections_of(parse(["--timings-only"])) == all_of[all_of.index("ceilings") :]
    assert sections_of(parse([])) == [name for name in all_of if name != "test suites"]
    assert sections_of(parse(["--section", "tuning"])) == ["ceilings", "tuning"]
    assert sections_of(parse(["--section", "ceilings"])) == ["ceilings"]
    assert sections_of(parse(["--section", "whole model"])) == ["whole model"]


def test_some_jobs_of_a_section_alone_after_its_ceilings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    asked = ["--tiny", "--section", "packed matrices", "--only", "Q[48]_[01],.*rows", "--seed", "5"]
    assert main([*asked, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    ceilings = ["copy", "matmul", "device to host", "host to device"]
    packed_ones = [f"packed {name}, 2 rows of 256 to 64" for name in ("Q4_1", "Q8_0")]
    assert [row["name"] for row in report["rows"]] == ceilings + packed_ones
    assert {row["status"] for row in report["rows"]} == {"ok"}
    assert report["command"] == (
        "python -m benchmarks.gpu --tiny --section 'packed matrices' --only 'Q[48]_[01],.*rows' --seed 5"
    )
    assert "6 measurements were gone through" in capsys.readouterr().out


@pytest.mark.parametrize("file", [["--json", "/home/me/run.json"], ["--json=/home/me/run.json"]])
def test_where_the_results_went_is_not_written_down(file: list[str]) -> None:
    assert command.without_file(["--quick", *file, "--seed", "5"]) == ["--quick", "--seed", "5"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--section", "kernel"], r"invalid choice: 'kernel' .*whole model.*packed matrices.*engine, Llama-3.1-8B"),
        (["--only", "swap"], r"--section names it"),
        (["--section", "ceilings", "--only", "("], r"'\(' is no regular expression: "),
        (["--section", "ceilings", "--checks-only"], r"not allowed with"),
    ],
)
def test_what_cannot_be_chosen_is_refused(asked: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--tiny", *asked])
    assert ended.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_pattern_that_matches_no_job_is_told_what_jobs_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tiny", "--section", "ceilings", "--only", "copies"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("no job of 'ceilings' matches 'copies'; there are\n  copy\n  matmul\n")
    assert said.out == ""


def test_where_a_section_is_run_alone_the_trace_of_a_failure_ends_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def torn() -> harness.Row:
        raise OSError("torn")

    monkeypatch.setattr(command, "jobs_of", lambda section, setting: [harness.Job("a", torn), harness.Job("b", dict)])
    assert main(["--tiny", "--section", "whole model", "--only", "a"]) == 1
    said = capsys.readouterr().out
    assert said.rstrip().endswith("OSError: torn")
    assert "\na:\nTraceback (most recent call last):\n" in said
    assert "checks: 0 passed, 1 failed, 0 skipped" in said, "job b was run, too"


def test_the_processes_that_compile_ahead_do_every_job_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def jobs_of(section: str, setting: harness.Setting) -> list[harness.Job]:
        return [harness.Job(f"{section} {number}", dict) for number in range(5)]

    monkeypatch.setattr(command, "jobs_of", jobs_of)
    parts = [[job.name for job in Part(("a", "b"), "", n, 4).jobs(DRY_RUN)] for n in range(4)]
    assert parts[0] == ["a 0", "a 4", "b 3"]
    assert sorted(name for part in parts for name in part) == [f"{section} {n}" for section in "ab" for n in range(5)]
    assert [job.name for job in Part(("a", "b"), "[ab] [12]", 1, 2).jobs(DRY_RUN)] == ["a 2", "b 2"]


def test_a_process_does_the_jobs_that_its_command_says() -> None:
    asked = Part(("ceilings",), "host", 1, 2).command(ON_A_GPU, seconds=60)[3:]
    options = parse(asked)
    assert options.seed == 3
    part = Part(tuple(options.work_on), options.only, *options.share)
    assert part == Part(("ceilings",), "host", 1, 2)
    assert [job.name for job in part.jobs(DRY_RUN)] == ["host to device"]


def test_what_befalls_a_process_that_compiles_ahead_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One does its part, one fails, one would never end. All are gone afterwards."""
    does = {
        0: "open(sys.argv[1], 'w').write(os.environ['OMP_NUM_THREADS'])",
        1: "raise SystemExit(3)",
        2: "print('x' * 10**6, flush=True); time.sleep(600)",
    }
    asked: list[Part] = []
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def as_fake(part: Part, setting: harness.Setting, seconds: float) -> list[str]:
        asked.append(part)
        return [sys.executable, "-c", f"import os, sys, time; {does[part.first]}", str(tmp_path / "done")]

    def start(*given: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*given, **options))
        return started[-1]

    monkeypatch.setattr(Part, "command", as_fake)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(command, "AHEAD_SECONDS", 2)
    assert 2 <= compile_ahead(["whole model", "kernels", "tuning"], "D128", ON_A_GPU) < 10
    assert asked == [Part(("whole model", "tuning"), "D128", number, 3) for number in range(3)]
    assert (tmp_path / "done").read_text() == "1"
    assert [process.returncode for process in started] == [0, 3, -9]


def test_nothing_is_compiled_ahead_where_nothing_would_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(subprocess, "Popen")
    assert compile_ahead(["whole model"], "", DRY_RUN) == 0
    assert compile_ahead(["ceilings", "kernels", "engine, SmolLM2-135M", "test suites"], "", ON_A_GPU) == 0


def test_at_most_fourteen_processes_compile_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def start(command: list[str], **options: Any) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(wait=lambda seconds: 0, kill=lambda: None)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    compile_ahead(["tuning"], "", ON_A_GPU)
    assert len(started) == 14


def test_no_budget_counts_before_all_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    budgets: dict[str, float] = {}
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(command, "describe_machine", lambda setting: synthetic_run()["machine"])

    def ahead(sections: list[str], only: str, setting: harness.Setting) -> float:
        nonlocal now
        now += 140
        return 140.04

    def rows_of(section: str, only: str, setting: harness.Setting, seconds: float) -> Iterator[harness.Row]:
        nonlocal now
        budgets[section] = seconds
        now += 60
        yield {"section": section, "name": section, "status": "ok"}

    monkeypatch.setattr(command, "compile_ahead", ahead)
    monkeypatch.setattr(command, "rows_of", rows_of)
    file = tmp_path / "run.json"
    for asked, ran in (["--checks-only"], 2), (["--tests-only"], 1):
        budgets.clear()
        asked += ["--json", str(file)]
        assert command.measure(parse(asked), ON_A_GPU, asked) == 0
        assert budgets == {name: command.SECONDS[name] for name in budgets}
        report = json.loads(file.read_text())
        assert (len(budgets), report["ahead_seconds"], report["run_seconds"]) == (ran, 140.0, 60 * ran)


# --- The test suites -------------------------------------------------------------------------------


def suites_that(monkeypatch: pytest.MonkeyPatch, status: int, said: str) -> tuple[harness.Row, list[str], Any]:
    """The row of a run of pytest that ends so; its command, and what else it was given."""
    given: list[Any] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        given.extend((command, options))
        return subprocess.CompletedProcess(command, status, said, "")

    monkeypatch.setattr(subprocess, "run", run)
    (row,) = harness.run_jobs("test suites", checks.suite_checks(NO_GPU), NO_GPU, seconds=60)
    return row, *given


NO_GPU = harness.Setting(torch.device("cpu"), tiny=False, quick=False, seed=3)


def test_the_suites_run_on_all_cores_without_their_thorough_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xdist")
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    row, ran, options = suites_that(monkeypatch, 0, "....\n743 passed, 2 skipped in 47.12s\n")
    assert (row["status"], row["summary"]) == ("ok", "743 passed, 2 skipped in 47.12s")
    said = " ".join(ran[1:])
    assert said.startswith("-m pytest -q -m not thorough tests/fast tests/agreement ")
    assert said.endswith(" -n 14 --dist worksteal")
    assert options["timeout"] == command.SECONDS["test suites"]
    assert {options["env"][name] for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"1"}


def test_suites_that_fail_name_their_tests_after_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        ".F..E\n=== short test summary info ===\n"
        "FAILED tests/fast/test_a.py::test_b[x y] - AssertionError: FAILED - no\n"
        "ERROR tests/fast/test_c.py\n1 failed, 3 passed, 1 error in 4.00s\n"
    )
    row, *_ = suites_that(monkeypatch, 1, said)
    assert (row["status"], row["summary"]) == ("failed", "1 failed, 3 passed, 1 error in 4.00s")
    assert row["failed_tests"] == ["tests/fast/test_a.py::test_b[x y]", "tests/fast/test_c.py"]
    assert row["error"].splitlines() == [row["summary"], *row["failed_tests"]]
    assert suites_that(monkeypatch, 4, "")[0]["error"] == "pytest said nothing, and ended with status 4"


def test_suites_that_are_not_done_in_time_say_what_they_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], *, timeout: float, **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout, b".....")

    monkeypatch.setattr(subprocess, "run", run)
    (row,) = harness.run_jobs("test suites", checks.suite_checks(NO_GPU), NO_GPU, seconds=60)
    assert row["error"] == "TimeoutError: not done after 540 seconds\n....."


# --- Figures beside what is aimed at ----------------------------------------------------------------

TIMING = harness.Timing(2e-3, 1e-3, 3e-3, "graph")


def test_a_figure_has_its_share_of_the_ceiling_its_ratio_to_each_peer_and_what_was_aimed_at() -> None:
    peers = {"A": TIMING.row(2e9, "GB/s", "copy"), "B": "missing (b)"}
    row = TIMING.row(4e9, "GB/s", "copy") | {"name": "write", "peers": peers}
    judge(row, {"copy": 4e12})
    assert (row["rate"], row["share"]) == (2e12, 0.5)
    assert (row["target"], row["met"]) == ({"share": 0.8}, {"share": False})
    assert (row["peers"]["A"]["share"], row["ratios"]) == (0.25, {"A": 2.0})
    line = " ".join(line_of(row).split())
    assert line == "write 2000.0 GB/s 2000.0 us 50.0% of copy MISSED: share; A 1000.0 GB/s (2.00 x)"
    fast: harness.Row = {"name": "decode 1 x 1024 D128 group 4", "seconds": 10e-6}
    judge(fast, {})
    assert fast["met"] == {"seconds": True}
    assert first_line("one\ntwo") == "one"


def test_a_decode_is_judged_by_its_share_of_the_copy_and_beside_flashinfer_where_that_is_there() -> None:
    name = "decode 32 x 2048 D128 group 4"
    for peer, met in (
        (TIMING.row(7.8e9, "GB/s", "copy"), {"share": True, "x FlashInfer": True}),  # 3.8 and 3.9 TB/s: 0.97
        (TIMING.row(8.2e9, "GB/s", "copy"), {"share": True, "x FlashInfer": False}),
        ("missing (flashinfer)", {"share": True}),
    ):
        row = TIMING.row(7.6e9, "GB/s", "copy") | {"name": name, "status": "ok", "peers": {"FlashInfer": peer}}
        judge(row, {"copy": 4.3e12})
        assert row["met"] == met
    told = next(v for v in verdicts([row]) if v.goal.figure == "x FlashInfer")
    assert (told.measured, told.where, told.verdict) == ("not yet measured", "missing (flashinfer)", "open")


def test_what_a_rate_should_be_depends_on_the_card() -> None:
    """2.6 TB/s and 330 TFLOP/s are much on a card whose copy and product reach 3.0 and 600, and little on an H200."""
    rates = {
        "decode 32 x 2048 D128 group 4": (2.6e12, "GB/s", "copy"),
        "prefill 4 x 4096 D128 group 4": (330e12, "TFLOP/s", "matmul"),
    }
    for ceilings, met in (({"copy": 3.0e12, "matmul": 6e14}, True), ({"copy": 4.3e12, "matmul": 7.8e14}, False)):
        for name, (rate, unit, ceiling) in rates.items():
            row = TIMING.row(rate * TIMING.seconds, unit, ceiling) | {"name": name}
            judge(row, ceilings)
            assert row["met"] == {"share": met}, row
    row = TIMING.row(1e9, "GB/s", "copy") | {"name": "decode 32 x 2048 D128 group 4"}
    judge(row, {})  # the ceiling was not measured
    assert "met" not in row


def test_other_engines_stand_beside_ours_on_the_same_model() -> None:
    rows: list[harness.Row] = [{"name": f"{model}: minipaged", "tokens_per_second": 900.0} for model in "AB"]
    ok = {"status": "ok", "tokens_per_second": 300.0}
    assert put_beside({"name": "B: transformers generate"} | ok, rows) is rows[1]
    assert put_beside({"name": "B: transformers generate_batch", "status": "failed", "error": "no"}, rows) is rows[1]
    assert put_beside({"name": "C: transformers generate"} | ok, rows) is None
    assert put_beside({"name": "write"} | ok, rows) is None
    judge(rows[1], {})
    assert rows[1]["ratios"] == {"generate": 3.0}
    assert rows[1]["peers"]["generate_batch"] == "no"
    assert "peers" not in rows[0]


def test_every_goal_is_about_rows_that_a_run_has() -> None:
    from benchmarks.gpu import engine, kernels

    setting = harness.Setting(torch.device("cpu"), tiny=False, quick=False, seed=0)
    jobs = kernels.kernel_timings(setting)
    for model in engine.MODELS:
        jobs += engine.engine_jobs(model, setting)
    for goal in GOALS:
        about = [job.name for job in jobs if goal.about({"name": job.name})]
        assert about, goal
        assert not any("again" in name for name in about)
    assert len({job.name for job in jobs}) == len(jobs)


def test_the_workload_is_nano_vllms() -> None:
    """Its README counts 133,966 tokens out."""
    work = workload("SmolLM2-135M", harness.Setting(torch.device("cpu"), tiny=False, quick=False, seed=5))
    assert (sum(map(len, work.prompts)), sum(work.wanted)) == (142_827, 133_966)


def test_a_peer_that_is_stopped_is_given_all_tokens_that_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request is finished and fetched, one finished after that, one is under way, one waits to be resumed."""

    def request(tokens: int, finished: bool = False) -> SimpleNamespace:
        result = SimpleNamespace(generated_tokens=[0] * tokens, is_finished=lambda: finished)
        return SimpleNamespace(to_generation_output=lambda: result, result=result)

    results = [request(1000, finished=True).result, None, request(200, finished=True).result]
    added: list[int] = []
    now = 0.0
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: now))

    def get_result(timeout: float) -> Any:
        nonlocal now
        if timeout:  # while time is running
            now += 0.06
        return results.pop(0) if results else None

    scheduler = SimpleNamespace(active_requests={"c": request(30)}, waiting_requests={"d": request(4)})
    manager = SimpleNamespace(
        add_request=lambda prompt, max_new_tokens: added.append(max_new_tokens),
        get_result=get_result,
        is_running=lambda: True,
        batch_processor=SimpleNamespace(scheduler=scheduler),
    )
    found = drain(manager, [([1], n) for n in (1000, 200, 30, 40)], limit=0.1)
    assert (found["tokens"], found["finished"]) == (1234, 2)
    assert added == [1000, 200, 30, 40]


# --- The page --------------------------------------------------------------------------------------


def synthetic_run(**changes: Any) -> dict[str, Any]:
    """What a run could look like on a card that does not exist; no figure in it was measured."""
    ceilings = {"copy": 4e12, "matmul": 8e14, "device to host": 5e10, "host to device": 5e10}
    rows: list[dict[str, Any]] = []
    for name, rate in ceilings.items():
        unit = "TFLOP/s" if name == "matmul" else "GB/s"
        rows.append({"section": "ceilings", "name": name, "rate": rate, "seconds": 1e-3, "unit": unit, "ceiling": name})
    for name, peer in (("decode 32 x 2048 D128 group 4", 3.9e12), ("decode 128 x 8192 D128 group 4", 3.5e12)):
        row = TIMING.row(2e-3 * 3.7e12, "GB/s", "copy") | harness.work(3e10, 7.4e9)
        peers = {"FlashInfer": TIMING.row(2e-3 * peer, "GB/s", "copy"), "conch": "missing (conch)"}
        rows.append({"section": "kernels", "name": name, "peers": peers} | row)
    rows.append({"section": "kernels", "name": "write"} | TIMING.row(2e-3 * 3e12, "GB/s", "copy"))
    for row in rows:
        row["status"] = "ok"
        judge(row, ceilings)
    rows.append({"section": "kernels", "name": "swiglu", "status": "failed", "error": "AssertionError: <wrong>\nmore"})
    rows.append({"section": "engine, A", "name": "A: minipaged", "status": "skipped", "reason": "no time was left"})
    machine = {
        "card": "No Such Card", "multiprocessors": 1, "cuda": "0.0", "cores": 1, "python": "3.0",
        "versions": {"torch": "0.0", "flashinfer-python": "missing"}, "date": "2000-01-01T00:00:00+00:00",
    }  # fmt: skip
    run = {"command": "python -m benchmarks.gpu", "machine": machine, "seed": 1, "dry_run": False, "quick": False}
    return run | {"rows": rows} | changes


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pages of made-up runs go: never into the project's own."""
    monkeypatch.setattr(page, "DOCS", tmp_path / "docs")
    (tmp_path / "docs").mkdir()
    return tmp_path / "docs"


def file_of(run: dict[str, Any], folder: Path, name: str = "run.json") -> str:
    (folder / name).write_text(json.dumps(run))
    return str(folder / name)


def test_without_a_run_the_page_shows_targets_and_that_nothing_is_measured(docs: Path) -> None:
    assert page.main([]) == 0
    text = (docs / "gpu.md").read_text()
    assert text.count("| not yet measured |") == len(GOALS)
    assert "≥ 84% of copy (3.6 TB/s on an H200)" in text
    assert "≥ 51% of matmul (400 TFLOP/s on an H200)" in text
    assert "≥ 42% of matmul (330 TFLOP/s on an H200)" in text
    assert "for an H200" not in text
    assert "≤ 15 µs" in text
    assert "≥ 90% of one large pinned copy" in text
    assert "roofline" not in text
    assert not (docs / "assets").exists()


def test_a_goal_is_met_only_where_each_of_its_rows_was_measured() -> None:
    good = {"section": "kernels", "name": "write", "status": "ok", "share": 0.9, "ceiling": "copy"}
    failed = {"section": "kernels", "name": "rope_and_write", "status": "failed", "error": "OSError: broken"}
    slow = good | {"name": "rope_and_write", "share": 0.5}

    def verdict(*rows: harness.Row) -> tuple[str, str]:
        told = next(v for v in verdicts(rows) if v.goal.rows == "write|rope_and_write")
        return told.verdict, told.where

    assert verdict(good, good | {"name": "rope_and_write"})[0] == "met"
    assert verdict(good, failed) == ("open", "not all rows: OSError: broken")
    assert verdict(slow, failed)[0] == "MISSED"


def test_the_page_says_what_was_checked(docs: Path, tmp_path: Path) -> None:
    run = synthetic_run()
    assert page.main([file_of(run, tmp_path)]) == 0
    assert "**No checks are in these runs**" in (docs / "gpu.md").read_text()
    check = {"section": harness.CHECKS[0], "name": "write", "status": "failed", "error": "AssertionError: wrong"}
    run["rows"].append(check)
    assert page.main([file_of(run, tmp_path)]) == 0
    assert "**Checks: 0 passed, 1 failed, 0 skipped.**" in (docs / "gpu.md").read_text()


def test_the_page_has_card_versions_command_verdicts_peers_and_failures(docs: Path, tmp_path: Path) -> None:
    assert page.main([file_of(synthetic_run(), tmp_path)]) == 0
    text = (docs / "gpu.md").read_text()
    assert "No Such Card" in text
    assert "torch 0.0, flashinfer-python missing" in text
    assert "`python -m benchmarks.gpu`, 2000-01-01T00:00:00+00:00, seed 1: run.json" in text
    worst = "| 0.949 x FlashInfer | decode 32 x 2048 D128 group 4 | MISSED |"  # the other is 1.06
    assert f"| ≥ 0.95 x FlashInfer {worst}" in text
    aim = "| ≥ 84% of copy (3.6 TB/s on an H200) "
    assert f"{aim}| 92.5% of copy | decode 32 x 2048 D128 group 4 | met |" in text
    assert "for an H200" not in text
    assert "| ≥ 80% of copy | 75.0% of copy | write | MISSED |" in text
    assert "| decode 32 x 2048 D128 group 4 | 3.70 TB/s | 2,000.0 µs | 92.5% of copy | FlashInfer 0.95 x |" in text
    assert "FlashInfer: 1 of 2 measurements, 1.06 x (decode 128 x 8192 D128 group 4)" in text
    assert "- conch: missing (conch) (decode 32 x 2048 D128 group 4)" in text
    assert "- kernels, swiglu: AssertionError: <wrong>" in text
    assert "- engine, A, A: minipaged: no time was left" in text


def test_the_roofline_is_one_svg_that_needs_nothing_else_and_has_a_dark_side(docs: Path, tmp_path: Path) -> None:
    assert page.main([file_of(synthetic_run(), tmp_path)]) == 0
    drawn = (docs / "assets" / "roofline.svg").read_text()
    root = ElementTree.fromstring(drawn)
    svg = "{http://www.w3.org/2000/svg}"
    texts = [text.text or "" for text in root.iter(f"{svg}text")]
    assert "prefers-color-scheme: dark" in drawn
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")
    assert len(list(root.iter(f"{svg}circle"))) == 1  # the other decode lies upon it; write has no operations
    assert "roof: copy 4.00 TB/s, matrix product 800 TFLOP/s" in texts
    assert "1  decode 32 x 2048 D128 group 4: 15 TFLOP/s" in texts
    (circle,) = root.iter(f"{svg}circle")
    slope = next(path for path in root.iter(f"{svg}path") if path.attrib["class"] == "roof")
    (x0, y0), (x1, y1) = ([float(n) for n in re.findall(r"[\d.]+", p)[:2]] for p in slope.attrib["d"][1:].split("L"))
    x, y = float(circle.attrib["cx"]), float(circle.attrib["cy"])
    assert x0 < x < x1
    roof = y0 + (x - x0) / (x1 - x0) * (y1 - y0)
    assert roof < y < roof + 10  # just below it: 92.5 % of the copy
    remove_measurements(docs / "gpu.md")
    assert page.main([]) == 0
    assert not (docs / "assets" / "roofline.svg").exists()  # with the run its picture goes


def remove_measurements(file: Path) -> None:
    head, rest = file.read_text().split(page.BEGIN)
    file.write_text(head + page.BEGIN + page.END + rest.split(page.END)[1])


def test_measurements_stay_where_no_run_is_given(
    docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until they are removed by hand."""
    assert page.main([file_of(synthetic_run(), tmp_path)]) == 0
    before = (docs / "gpu.md").read_text(), (docs / "assets" / "roofline.svg").read_text()
    assert page.main([]) == 2
    assert "gpu.md has measurements, and no runs are given" in capsys.readouterr().err
    assert before == ((docs / "gpu.md").read_text(), (docs / "assets" / "roofline.svg").read_text())
    remove_measurements(docs / "gpu.md")
    for _ in range(2):
        assert page.main([]) == 0
    assert "**Not yet measured.**" in (docs / "gpu.md").read_text()


def test_what_is_written_by_hand_stays(docs: Path, tmp_path: Path) -> None:
    assert page.main([]) == 0
    file = docs / "gpu.md"
    file.write_text("By hand.\n" + file.read_text().replace("Nothing is measured yet.", "Because of the cold."))
    assert page.main([file_of(synthetic_run(), tmp_path)]) == 0
    once = file.read_text()
    assert once.startswith("By hand.\n# ")
    assert "Because of the cold." in once
    assert "not run on a GPU" not in once
    assert page.main([file_of(synthetic_run(), tmp_path)]) == 0
    assert file.read_text() == once
    file.write_text("All of it anew.")
    assert page.main([]) == 2
    assert file.read_text() == "All of it anew."


def test_parts_of_a_run_are_put_together_and_the_later_figure_counts(docs: Path, tmp_path: Path) -> None:
    first, second = synthetic_run(), synthetic_run(command="python -m benchmarks.gpu --timings-only")
    first["rows"].append({"section": "test suites", "name": "pytest", "status": "failed", "error": "3 failed"})
    second["rows"][-3]["rate"], second["rows"][-3]["share"] = 3.6e12, 0.9
    assert page.main([file_of(first, tmp_path, "a.json"), file_of(second, tmp_path, "b.json")]) == 0
    text = (docs / "gpu.md").read_text()
    assert "| ≥ 80% of copy | 90.0% of copy | write | met |" in text
    assert "- test suites, pytest: 3 failed" in text
    assert "seed 1: a.json" in text
    assert "seed 1: b.json" in text


def test_the_projects_own_page_is_what_the_command_makes_of_the_runs_that_it_names(docs: Path) -> None:
    own = Path(__file__).parents[1] / "docs" / "gpu.md"
    named = re.findall(r"seed \d+: (\S+\.json)$", own.read_text(), flags=re.MULTILINE)
    (docs / "gpu.md").write_text(own.read_text())
    assert page.main([str(own.parents[1] / "benchmarks" / "results" / name) for name in named]) == 0
    assert (docs / "gpu.md").read_text() == own.read_text()
    assert (own.parent / "assets" / "roofline.svg").exists() == (docs / "assets" / "roofline.svg").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dry_run": True}, "is a dry run: nothing in it was measured"),
        ({"quick": True}, "is a quick run"),
        ({"machine": {"card": "Another", "versions": {}}}, "card differs"),
        ({"rows": None, "command": None}, None),
    ],
)
def test_what_was_not_measured_or_not_together_is_refused(
    change: dict[str, Any], reason: str | None, docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = synthetic_run(**change)
    if reason is None:
        run, reason = {"a": 1}, "is no run of `python -m benchmarks.gpu`"
    files = [file_of(synthetic_run(), tmp_path), file_of(run, tmp_path, "other.json")]
    assert page.main(files) == 2
    assert reason in capsys.readouterr().err
    assert not (docs / "gpu.md").exists()


def test_a_real_dry_run_is_refused(docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "kernel_checks", lambda setting: [])
    monkeypatch.setattr(checks, "model_checks", lambda setting: [])
    file = tmp_path / "run.json"
    assert main(["--tiny", "--checks-only", "--json", str(file)]) == 0
    assert page.main([str(file)]) == 2


# --- Figures ---------------------------------------------------------------------------------------


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
