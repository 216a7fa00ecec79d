"""Wheels of the Python package index, fetched once into build/wheels and checked: what Python in a page has besides."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from docs.npm import NotFetched

FOLDER = Path(__file__).parent.parent / "build" / "wheels"
PYTHON = ("--python-version", "314", "--implementation", "cp", "--abi", "cp314", "--abi", "none")
"""Pyodide's; not the one that this is run by."""
PLATFORMS = ("--platform", "pyemscripten_2026_0_wasm32", "--platform", "any")


def fetch(package: str, sha256: str) -> Path:
    """The wheel of `name==version` for Pyodide, whose bytes have this digest (hexadecimal, as the index states it).

    Raises NotFetched; and ValueError for a wheel that is another.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    pattern = f"{package.replace('==', '-')}-*.whl"
    with FileLock(FOLDER / "lock"):
        if not any(FOLDER.glob(pattern)):
            options = ["--quiet", "--no-deps", "--only-binary=:all:", *PYTHON, *PLATFORMS, "--dest", str(FOLDER)]
            command = [sys.executable, "-m", "pip", "download", *options, package]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                lines = done.stderr.splitlines() or ["it said nothing"]
                errors = [line for line in lines if line.startswith("ERROR")] or lines
                raise NotFetched(f"pip could not fetch {package} for Pyodide: {errors[-1]}")
        [wheel] = FOLDER.glob(pattern)
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != sha256:
        raise ValueError(f"{wheel} is not what it was when it was chosen; delete it, and it is fetched again")
    return wheel
