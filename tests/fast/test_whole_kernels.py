"""What a kernel calls is neither optimised nor translated by itself; the kernel works, also when it is read back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from numba import njit

from minipaged.fast.cpu.kernel_cache import inner, kernel, loop

KERNELS = """
import sys

import numpy as np
from minipaged.fast.cpu.kernel_cache import inner, kernel

@inner()
def checked(x):
    if x < 0:
        raise ValueError("below zero", x)
    return np.sqrt(x)

@kernel(parallel=True)
def roots(x):
    out = np.empty(len(x))
    for i in range(len(x)):
        out[i] = checked(x[i])
    return out

if __name__ == "__main__":
    print(roots(np.array([4.0, 9.0])), len(roots.stats.cache_hits))
    try:
        roots(np.array([4.0, -1.0]))
    except ValueError as error:
        print(error.args)
"""


def test_an_error_in_what_a_kernel_calls_is_raised_when_it_is_compiled_and_when_it_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    root = str(Path(__file__).parent.parent.parent)
    environment = os.environ | {"PYTHONPATH": root, "NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    for hits in (0, 1):
        done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"[2. 3.] {hits}", "('below zero', -1.0)"]


@inner()
def doubled(x):
    return x + x


@loop()
def added_up(x):
    total = 0.0
    for i in range(len(x)):
        total += doubled(x[i])
    return total


@kernel()
def called_from_python(x):
    return added_up(np.sort(x))


def test_what_a_kernel_has_taken_up_serves_others_too() -> None:
    """A second kernel, a function that Python calls, and numba's own functions that all of them call."""
    x = np.array([3.0, 1.0, 2.0])

    @kernel()
    def another(x):
        return added_up(x) + called_from_python(x)

    @njit
    def plain(x):
        return np.sort(x)[0] + added_up(x)

    assert called_from_python(x) == 12
    assert another(x) == 24
    assert plain(x) == 13
