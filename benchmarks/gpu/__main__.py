"""The fast tier on a GPU, in one command: first whether it is right, then how fast it is and how fast it could be.

    python -m benchmarks.gpu [--checks-only | --timings-only] [--quick] [--seed N] [--json FILE]
    python -m benchmarks.gpu --tests-only  the fast tier's test suites, on the GPU
    python -m benchmarks.gpu --section kernels --only 'prefill .*D128'     some jobs of one section; its ceilings first
    python -m benchmarks.gpu --tiny        without a GPU: the same ways, in Triton's interpreter; times mean nothing

Each part (a *section*) runs in a process of its own, with a budget of seconds: the table below. So a kernel that hangs
or breaks the GPU's context costs its own job, and the section goes on behind it in a new process. Whatever is found is
in the JSON file at once. Before any budget counts, the jobs of the checks and of some measurements are done once by up
to 14 processes, within 150 seconds, so that their kernels are compiled. Checks and measurements then take up to eight
minutes, the test suites by themselves up to nine. Where the checks leave no time for the last measurements, run the two
halves one by one. The last thing printed is the short table of what is aimed at (`targets.py`); `python -m
benchmarks.gpu.page` makes docs/gpu.md of the files. The exit status is 1 if a check failed, or a measurement of ours.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import random
import re
import selectors
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.harness import CHECKS, ROOT, TEST_SECONDS, TESTS, DeviceLost, Job, Row, Setting, run_jobs
from benchmarks.gpu.targets import first_line, judge, verdicts
from minipaged.tiers.devices import gpu_problem

RESULTS = ROOT / "benchmarks" / "results"

SECONDS = {
    "kernels against float64": 75,
    "whole model": 120,
    TESTS: TEST_SECONDS,
    "ceilings": 20,
    "kernels": 100,
    "packed matrices": 60,
    "engine, SmolLM2-135M": 75,
    "engine, Llama-3.2-1B": 75,
    "engine, Llama-3.1-8B": 90,
    "tuning": 30,
}
"""The sections, in order, with the seconds after which no further job of one is begun. (A section seldom needs all.)

The whole model's CPU tier is compiled by numba.
"""

ALL_SECONDS = 440
"""And of all together, but for the test suites, which are run by themselves."""
GRACE = 40
"""Seconds that the last job of a section may take beyond its section's budget, before it is ended."""

AHEAD = ("kernels against float64", "whole model", "packed matrices", "tuning")
"""The sections for which kernels are compiled ahead. The others take too much of the device's memory to be done by
several processes at once."""
AHEAD_SECONDS = 150
AHEAD_PROCESSES = 14
"""At most."""

NO_GPU = """\
There is no GPU here that can be used ({why}), and this command measures one.
What runs here: `python -m benchmarks.gpu --tiny`, all checks and all measurements with tiny sizes, on the CPU in
Triton's interpreter. It shows that everything works; it measures nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    problem = gpu_problem()
    if problem:
        if not options.tiny:
            print(NO_GPU.format(why=problem), file=sys.stderr)
            return 2
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    setting = Setting(torch.device("cpu" if problem else "cuda"), options.tiny, options.quick, options.seed)
    if options.work_on:  # one of our own processes
        return work(Part(tuple(options.work_on), options.only, *options.share), options, setting)
    if options.section and not Part((options.section,), options.only).jobs(setting):
        names = "\n  ".join(job.name for job in jobs_of(options.section, setting))
        print(f"no job of {options.section!r} matches {options.only!r}; there are\n  {names}", file=sys.stderr)
        return 2
    return measure(options, setting, arguments)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Check and measure the GPU kernels.", allow_abbrev=False
    )
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--checks-only", action="store_true", help="no measurements")
    parts.add_argument("--timings-only", action="store_true", help="no checks")
    parts.add_argument("--tests-only", action="store_true", help="the fast tier's test suites, but for thorough tests")
    parts.add_argument(
        "--section",
        choices=SECONDS,
        metavar="NAME",
        help=f"one alone, after the ceilings that it is compared with: {'; '.join(SECONDS)}",
    )
    parts.add_argument("--work-on", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument(
        "--only", type=pattern, default="", metavar="REGEX", help="jobs of --section with it in the name"
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes, fewer and shorter requests")
    parser.add_argument("--tiny", action="store_true", help="a dry run with tiny sizes; needs no GPU, measures nothing")
    parser.add_argument("--seed", type=int, help="repeat the inputs of a run that printed this seed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/gpu-<card>-<time>.json")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--done", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.only and not (options.section or options.work_on):
        parser.error("--only chooses among the jobs of one section: --section names it")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**31)
    return options


def pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


def sections_of(options: argparse.Namespace) -> list[str]:
    if options.section:
        is_rated = options.section not in (*CHECKS, "ceilings")
        return ["ceilings", options.section] if is_rated else [options.section]
    if options.tests_only:
        return [TESTS]
    checks = [] if options.timings_only else [name for name in CHECKS if name != TESTS]
    timings = [] if options.checks_only else [name for name in SECONDS if name not in CHECKS]
    if options.tiny:  # in which all models are the same
        timings = [name for name in timings if name not in ("engine, Llama-3.2-1B", "engine, Llama-3.1-8B")]
    return checks + timings


def jobs_of(section: str, setting: Setting) -> list[Job]:
    """Imports what the section needs, Triton among it."""
    from benchmarks.gpu import checks, engine, kernels, packed

    make: dict[str, Callable[[Setting], list[Job]]] = {
        "kernels against float64": checks.kernel_checks,
        "whole model": checks.model_checks,
        TESTS: checks.suite_checks,
        "ceilings": kernels.ceilings,
        "kernels": kernels.kernel_timings,
        "packed matrices": packed.timings,
        "tuning": lambda setting: kernels.tuning(setting) + packed.tuning(setting),
    }
    if section in make:
        return make[section](setting)
    return engine.engine_jobs(section.removeprefix("engine, "), setting)


@dataclass(frozen=True)
class Part:
    """The jobs of one process, or the share of them that one of several processes takes."""

    sections: tuple[str, ...]
    only: str = ""
    """A regular expression that is found in the jobs' names."""
    first: int = 0
    step: int = 1
    """Every `step`-th of these jobs is taken, from number `first` on."""

    def jobs(self, setting: Setting) -> list[Job]:
        jobs = [job for section in self.sections for job in jobs_of(section, setting)]
        return [job for job in jobs if re.search(self.only, job.name)][self.first :: self.step]

    def command(self, setting: Setting, seconds: float, done: int = 0) -> list[str]:
        """The command of the process that does these jobs, without the first `done`."""
        command = [sys.executable, "-m", "benchmarks.gpu", "--work-on", *self.sections, f"--only={self.only}"]
        command += ["--share", str(self.first), str(self.step), "--done", str(done)]
        command += ["--seconds", str(seconds), "--seed", str(setting.seed)]
        return command + (["--quick"] if setting.quick else [])


# --- The process of one section ----------------------------------------------------------------------


def work(part: Part, options: argparse.Namespace, setting: Setting) -> int:
    """Print each job's result as a line of JSON; 3 if the device is lost and somebody else must go on."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed must not get among the results
    jobs = part.jobs(setting)
    print(json.dumps({"jobs": [job.name for job in jobs]}), file=out)
    try:
        for row in run_jobs(", ".join(part.sections), jobs, setting, options.seconds, options.done):
            print(json.dumps(row), file=out)
    except DeviceLost:
        return 3
    return 0


def rows_of(section: str, only: str, setting: Setting, seconds: float) -> Iterator[Row]:
    """The results of a section's jobs, one by one, however many processes it takes."""
    part = Part((section,), only)
    if setting.tiny:  # in this process: a new one would spend more on imports; times mean nothing here
        yield from run_jobs(section, part.jobs(setting), setting, math.inf)
        return
    deadline, done = time.monotonic() + seconds, 0
    names: list[str] = []
    while not names or done < len(names):
        left = max(0.0, deadline - time.monotonic())
        process = subprocess.Popen(part.command(setting, left, done), stdout=subprocess.PIPE, cwd=ROOT)
        for line in lines_before(process, deadline + GRACE):
            message = json.loads(line)
            if "jobs" in message:
                names = message["jobs"]
            else:
                done += 1
                yield message
        status = process.wait()
        if not names:
            yield {"section": section, "name": section, "status": "failed", "error": f"ended at once, status {status}"}
            return
        if status not in (0, 3) and done < len(names):  # killed by a signal, or by us
            yield {"section": section, "name": names[done], "status": "failed", "error": f"the process ended: {status}"}
            done += 1
        if time.monotonic() > deadline:
            for name in names[done:]:
                reason = f"the section's {seconds:.0f} seconds were spent"
                yield {"section": section, "name": name, "status": "skipped", "reason": reason}
            return


def lines_before(process: subprocess.Popen[bytes], deadline: float) -> Iterator[bytes]:
    """The lines that a process prints; at the deadline it is ended."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        pending = b""
        while selector.select(max(0.0, deadline - time.monotonic())):
            read = os.read(process.stdout.fileno(), 1 << 16)
            if not read:
                return
            *lines, pending = (pending + read).split(b"\n")
            yield from lines
    process.kill()


# --- Compiling ahead ---------------------------------------------------------------------------------


def compile_ahead(sections: Sequence[str], only: str, setting: Setting) -> float:
    """Do the jobs of these sections in several processes, only to fill Triton's cache. Returns the seconds it took.

    So the sections' own seconds are not spent on compiling. What a process finds is thrown away, and so is what befalls
    it: one may fail, hang, or lose the device.
    """
    sections = [name for name in sections if name in AHEAD]
    if not sections or not setting.on_gpu or setting.tiny:
        return 0.0
    began = time.monotonic()
    count = min(AHEAD_PROCESSES, os.cpu_count() or 1)
    environment, nobody = os.environ | {"OMP_NUM_THREADS": "1"}, subprocess.DEVNULL
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(count):
            command = Part(tuple(sections), only, number, count).command(setting, AHEAD_SECONDS)
            running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=nobody, stderr=nobody))
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, began + AHEAD_SECONDS - time.monotonic()))
    finally:
        for process in running:
            process.kill()
        for process in running:  # what they had of the device's memory is free again
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
    return time.monotonic() - began


# --- All sections ------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, setting: Setting, arguments: Sequence[str]) -> int:
    sections = sections_of(options)
    print(f"seed {setting.seed}" + (" (dry run: tiny sizes, times mean nothing)" if setting.tiny else ""), flush=True)
    report: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *without_file(arguments)]),
        "machine": describe_machine(setting),
        "seed": setting.seed,
        "dry_run": setting.tiny,
        "quick": setting.quick,
        "rows": [],
    }
    now = re.sub(r"\D", "", report["machine"]["date"][:19])  # each run is kept
    file = options.json or (None if setting.tiny else RESULTS / f"gpu-{slug(report['machine']['card'])}-{now}.json")
    report["ahead_seconds"] = round(compile_ahead(sections, options.only, setting), 1)
    if report["ahead_seconds"]:
        print(f"compiled ahead in {report['ahead_seconds']} seconds", file=sys.stderr, flush=True)
    save(report, file)
    began = time.monotonic()
    end = began + (SECONDS[TESTS] if TESTS in sections else ALL_SECONDS)
    ceilings: dict[str, float] = {}
    for section in sections:
        left = end - time.monotonic()
        if left <= 0 and not setting.tiny:
            add(report, {"section": section, "name": section, "status": "skipped", "reason": "no time was left"}, file)
            continue
        only = options.only if section == options.section else ""
        for row in rows_of(section, only, setting, min(SECONDS[section], left)):
            if section == "ceilings" and isinstance(row.get("rate"), float):
                ceilings[row["ceiling"]] = row["rate"]
            judge(row, ceilings)
            if (beside := put_beside(row, report["rows"])) is not None:
                judge(beside, ceilings)
            add(report, row, file)
    report["run_seconds"] = round(time.monotonic() - began, 1)
    save(report, file)
    print_table(report, in_part=options.section is not None)
    return int(any(row["status"] == "failed" for row in report["rows"] if "transformers" not in row["name"]))


def without_file(arguments: Sequence[str]) -> list[str]:
    """What was asked for. Where the results went concerns only the machine that they were made on."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json")
    return parser.parse_known_args(arguments)[1]


def put_beside(row: Row, rows: list[Row]) -> Row | None:
    """Add another engine's figures as a peer to our row for the same model; returns our row, or None."""
    model, _, peer = row["name"].partition(": transformers ")
    mine = next((other for other in rows if peer and other["name"] == f"{model}: minipaged"), None)
    if mine is not None:
        figures = {name: row[name] for name in ("tokens_per_second", "seconds", "batch", "finished") if name in row}
        said = str(row.get("reason") or row.get("error", row["status"]))
        mine.setdefault("peers", {})[peer] = figures if row["status"] == "ok" else said
    return mine


def add(report: dict[str, Any], row: Row, file: Path | None) -> None:
    report["rows"].append(row)
    save(report, file)
    said = row.get("reason") or row.get("error", "")
    print(f"{row['status']:8}{row['section']}: {row['name']}{f': {said}' if said else ''}", file=sys.stderr, flush=True)


def save(report: dict[str, Any], file: Path | None) -> None:
    """In one move: whoever ends this command finds the last whole report."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(".part")
        beside.write_text(json.dumps(report, indent=1) + "\n")
        beside.replace(file)


def describe_machine(setting: Setting) -> dict[str, Any]:
    packages = (
        "torch",
        "triton",
        "transformers",
        "numpy",
        "flashinfer-python",
        "flash-attn",
        "fa3-fwd",
        "conch-triton-kernels",
    )
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    card: dict[str, Any] = {"card": "none"}
    if setting.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        card = {
            "card": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
        }
    return card | {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": versions,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def slug(card: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


# --- The table ---------------------------------------------------------------------------------------


def print_table(report: dict[str, Any], in_part: bool) -> None:
    """`in_part`: of some jobs, so that there is nothing to say of what else is aimed at, and more of what failed."""
    rows, machine = report["rows"], report["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    print(f"\n{machine['card']}; Python {machine['python']}; {versions}; {machine['date']}; seed {report['seed']}")
    checks = [row for row in rows if row["section"] in CHECKS]
    for row in rows:
        if row["status"] != "ok":
            said = str(row.get("reason") or row["error"])
            print(f"{row['status']:8}{row['section']}: {row['name']}: {first_line(said)}")
    if checks:
        counts = Counter(row["status"] for row in checks)
        print(f"checks: {counts['ok']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
        for row in checks:
            if "summary" in row:
                print(f"{row['name']}: {row['summary']}")
    measured = [row for row in rows if row["status"] == "ok" and row not in checks]
    if report["dry_run"]:
        print(f"dry run: {len(measured)} measurements were gone through; nothing was measured")
    else:
        print_measured(rows, measured, in_part)
    for row in rows if in_part else []:
        if row["status"] == "failed":
            print(f"\n{row['name']}:\n{row.get('trace', row['error'])}")


def print_measured(rows: list[Row], measured: list[Row], in_part: bool) -> None:
    for row in measured:
        print(line_of(row))
    for name, reason in unavailable(measured).items():
        print(f"{name}: {reason}")
    told = [found for found in verdicts(rows) if not in_part or any(map(found.goal.about, rows))] if measured else []
    if told:
        print("\nwhat is aimed at, and the row that is worst off:")
    for found in told:
        aim = f"{found.goal.what}: {found.goal.say_aim()}"
        print(f"{found.verdict:7}{aim:108} {found.measured}{f' ({found.where})' if found.where else ''}")


def line_of(row: Row) -> str:
    """What it is, its rate and time, their share of the ceiling, whether that is what was aimed at, and the peers."""
    parts = [f"{row['name']:40}"]
    if "tokens_per_second" in row or "rate" in row:
        parts.append(speed_of(row))
    if "seconds" in row:
        parts.append(f"{row['seconds'] * 1e6:8.1f} us" if row["seconds"] < 1 else f"{row['seconds']:8.2f} s ")
    if "share" in row:
        parts.append(f"{row['share']:6.1%} of {'floor' if 'tokens_per_second' in row else row['ceiling']}")
    if row.get("busy") is not None:
        parts.append(f"GPU busy {row['busy']:.1%}")
    if "met" in row:
        missed = [what for what, reached in row["met"].items() if not reached]
        parts.append(f"MISSED: {', '.join(missed)}" if missed else "met")
    for name, peer in row.get("peers", {}).items():
        if isinstance(peer, dict):
            ratio = f" ({row['ratios'][name]:.2f} x)" if name in row.get("ratios", {}) else ""
            parts.append(f"; {name} {speed_of(peer).strip()}{ratio}")
    return " ".join(parts).replace(" ;", ";")


def speed_of(row: Row) -> str:
    if "tokens_per_second" in row:
        return f"{row['tokens_per_second']:9.0f} tokens/s"
    return f"{row['rate'] / (1e12 if row['unit'] == 'TFLOP/s' else 1e9):9.1f} {row['unit']:7}"


def unavailable(rows: list[Row]) -> dict[str, str]:
    """What each peer that has no time somewhere said first."""
    found: dict[str, str] = {}
    for row in rows:
        for name, peer in row.get("peers", {}).items():
            if isinstance(peer, str):
                missing = peer.startswith("missing")
                found.setdefault(name, first_line(peer) if missing else f"{first_line(peer)} ({row['name']})")
    return found


if __name__ == "__main__":
    sys.exit(main())
