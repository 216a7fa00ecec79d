"""`make check-install`: do the pinned versions (constraints.txt) install, from the package index alone?

Every extra, on every machine and Python that minipaged is for, found out from the wheels' metadata: nothing is
installed. uv does it for all machines. pip does it too, for this one: its `--platform` would leave the markers as they
are here, so that torch for macOS wanted CUDA. This machine's settings do not count, for it may have wheels that others
have not: a build of torch without CUDA requires no triton, and hides that the pinned triton is the wrong one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

INDEX = "https://pypi.org/simple"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EXTRAS = ("base", "course", "docs", "fast", "paper", "ray", "serve", "structured", "test")  # base: no extra
MACHINES = {
    "Linux x86-64": "x86_64-manylinux_2_31",
    "Linux aarch64": "aarch64-manylinux_2_31",
    "macOS Apple": "aarch64-apple-darwin",
    "macOS Intel": "x86_64-apple-darwin",
    "Windows x86-64": "x86_64-pc-windows-msvc",
}
NO_WHEELS = {"macOS Intel": (("fast", "ray", "test"), "there is no torch, no numba and no ray for it")}
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))} | {
    "MACOSX_DEPLOYMENT_TARGET": "14.0",  # torch's wheels need it
}


def run(*arguments: str) -> str:
    """What a command says when it fails; nothing where it succeeds."""
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, env=ENVIRONMENT)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"


def by_uv(cache: str, machine: str, python: str, *extras: str) -> str:
    command = f"uv pip compile --quiet --no-config --no-python-downloads --only-binary :all: --default-index {INDEX}"
    wanted = [part for extra in extras for part in ("--extra", extra) if extra != "base"]
    where = ["--cache-dir", cache, "--python-platform", MACHINES[machine], "--python-version", python]
    return run(*command.split(), *where, *wanted, "--constraint", "constraints.txt", "pyproject.toml")


def by_pip() -> str:
    # fast-deps: of a wheel whose metadata the index does not serve apart, only the end is read, not all its gigabytes.
    command = f"pip install --quiet --isolated --index-url {INDEX} --dry-run --ignore-installed --no-cache-dir"
    return run(*command.split(), "--use-feature=fast-deps", "--constraint", "constraints.txt", ".[ray,test]")


def check(cache: str, machine: str, python: str) -> tuple[str, str]:
    """The problem of this machine and Python, if there is one, and which extras they have.

    All extras are asked for at once: what can be installed together can be installed apart. Those that are expected to
    fail are asked for one by one, and must.
    """
    without, why = NO_WHEELS.get(machine, ((), ""))
    extras = [extra for extra in EXTRAS if extra not in without]
    problems = [by_uv(cache, machine, python, *extras)]
    for extra in without:
        problem = by_uv(cache, machine, python, extra)
        if not re.search("no (usable )?wheels", problem):  # another reason: the index cannot be reached?
            problems.append(f"{extra}: {problem or 'can be installed now; take it out of NO_WHEELS'}")
    said = ", ".join(extras) + (f"; not {', '.join(without)}: {why}" if without else "")
    return "\n".join(filter(None, problems)), said


def main() -> int:
    combinations = [(machine, python) for machine in MACHINES for python in PYTHONS]
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(4) as pool:
        pip = pool.submit(by_pip)
        results = pool.map(lambda combination: check(cache, *combination), combinations)
        bad = sum([report(f"{m}, Python {p}", *result) for (m, p), result in zip(combinations, results, strict=True)])
        bad += report(f"by pip, on this machine, Python {sys.version.split()[0]}", pip.result(), ", ".join(EXTRAS))
    print(f"constraints.txt cannot be installed everywhere: {bad} fail" if bad else "constraints.txt can be installed")
    return 1 if bad else 0


def report(where: str, problem: str, extras: str) -> bool:
    print(f"FAIL {where}\n{problem}" if problem else f"ok   {where}: {extras}", flush=True)
    return bool(problem)


if __name__ == "__main__":
    sys.exit(main())
