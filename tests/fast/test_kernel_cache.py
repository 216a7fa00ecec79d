"""Compiled kernels that numba keeps are those of the files as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

INIT = """
from minipaged.fast.cpu.kernel_cache import follow_sources
from kernels import inner, outer
follow_sources(__name__)
"""
INNER = "from numba import njit\n@njit(cache=True)\ndef number():\n    return {}\n"
OUTER = (
    "from numba import njit\nfrom kernels.inner import number\n@njit(cache=True)\ndef kernel():\n    return number()\n"
)
CALL = """
from kernels.outer import kernel
print(kernel(), len(kernel.stats.cache_hits))
"""


def test_a_kernel_is_compiled_anew_when_a_file_has_changed_that_it_takes_up(tmp_path: Path) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text(INIT)
    (package / "outer.py").write_text(OUTER)
    root = str(Path(__file__).parent.parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), root])}

    def called() -> str:
        done = subprocess.run(
            [sys.executable, "-c", CALL], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    (package / "inner.py").write_text(INNER.format(11))
    assert called() == "11 0"
    assert called() == "11 1"
    (package / "inner.py").write_text(INNER.format(22))
    assert called() == "22 0"
