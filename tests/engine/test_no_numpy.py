"""The engine runs wherever Python runs, a browser included: what it consists of imports neither NumPy nor torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "minipaged.contracts",
        "minipaged.events",
        "minipaged.params",
        "minipaged.outputs",
        "minipaged.engine.engine",
        "minipaged.reference.block_allocator",
        "minipaged.reference.block_table",
        "minipaged.replay.recorded",
        "minipaged.stepper.edited",
    ],
)
def test_importing_it_imports_neither_numpy_nor_torch(module: str) -> None:
    program = f"import sys, {module}; print(*sorted({{'numpy', 'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).split() == []
