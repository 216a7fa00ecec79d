"""Contestants in turns on one machine, and what they reached as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from minipaged.tiers.devices import own_version


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    what: str
    value: float
    unit: str
    against: str = ""
    """What it is compared with, and what that reached."""
    ratio: float | None = None
    target: str = ""
    met: bool | None = None


def median_seconds(
    repetitions: int, contestants: dict[str, Callable[[], object]], *, quiet: bool = False
) -> dict[str, float]:
    """Run all contestants in turn, again and again; the median time of each."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(repetitions):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
        if not quiet:
            print(f"repetition {repetition + 1} of {repetitions} done", file=sys.stderr)
    return {name: statistics.median(times) for name, times in seconds.items()}


def at_least(what: str, value: float, unit: str, other: str, others_value: float, target: float | None) -> Result:
    ratio = value / others_value
    against = f"{other}: {others_value:.1f}"
    if target is None:
        return Result(what, value, unit, against, ratio)
    return Result(what, value, unit, against, ratio, f">= {target}x", ratio >= target)


def describe_machine() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {"minipaged": own_version()}
        | {name: version(name) for name in ("numba", "numpy", "torch", "transformers")},
        "threads": {name: os.environ.get(name, "default") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")},
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    """The processor's name: from /proc where there is one, for Python knows it on few systems."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def print_table(results: list[Result], machine: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    print(f"{machine['cpu']}, {machine['cores']} cores; Python {machine['python']}, {versions}; {machine['date']}\n")
    print(f"{'':40}{'':>8} {'':13}{'against':26}{'ratio':>7}  target")
    for result in results:
        ratio = "" if result.ratio is None else f"{result.ratio:.2f}x"
        verdict = {None: "", True: "  met", False: "  MISSED"}[result.met]
        print(
            f"{result.what:40}{result.value:8.1f} {result.unit:13}{result.against:26}{ratio:>7}  "
            f"{result.target}{verdict}".rstrip()
        )


def report(results: list[Result], settings: dict[str, Any], file: Path | None) -> None:
    """Print the table; write results, settings and machine to `file` where one is given."""
    machine = describe_machine()
    print_table(results, machine)
    if file:
        whole = {"machine": machine, "settings": settings, "results": [asdict(result) for result in results]}
        file.write_text(json.dumps(whole, indent=2) + "\n")
