"""Compiled kernels that are kept are those of the files as they are, wherever these lie."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from minipaged.fast.cpu import kernel_cache
from tests.effort import thorough

INIT = """
import sys, types
for name in ("minipaged.fast", "minipaged.fast.cpu"):  # without torch, which takes seconds
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [{root!r} + name.replace(".", "/")]
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
ROOT = f"{Path(__file__).parent.parent.parent}/"


def write(folder: Path, number: int) -> None:
    """A package of kernels."""
    package = folder / "kernels"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(INIT.format(root=ROOT))
    (package / "outer.py").write_text(OUTER)
    (package / "inner.py").write_text(INNER.format(number))


def called(folder: Path, **environment: str) -> str:
    """What the kernel returns in a new process, and whether it was there."""
    variables = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", CALL],
        env=variables | {"PYTHONPATH": os.pathsep.join([str(folder), ROOT])} | environment,
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def test_a_kernel_is_compiled_anew_when_a_file_has_changed_that_it_takes_up(tmp_path: Path) -> None:
    """And is there for another copy of the same files."""
    cache = str(tmp_path / "cache")
    write(tmp_path / "here", 11)
    assert called(tmp_path / "here", MINIPAGED_CACHE=cache) == "11 0"
    write(tmp_path / "there", 11)
    assert called(tmp_path / "there", MINIPAGED_CACHE=cache) == "11 1"
    write(tmp_path / "here", 22)
    assert called(tmp_path / "here", MINIPAGED_CACHE=cache) == "22 0"


@thorough
def test_where_the_cache_cannot_be_written_to_kernels_are_kept_where_numba_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    for environment in ({"MINIPAGED_CACHE": str(tmp_path / "cache")}, {"NUMBA_CACHE_DIR": str(tmp_path / "numba")}):
        write(tmp_path, 11)
        assert called(tmp_path, **environment) == "11 0"
        assert called(tmp_path, **environment) == "11 1"
        write(tmp_path, 22)
        assert called(tmp_path, **environment) == "22 0"
    assert [*(tmp_path / "kernels" / "__pycache__").glob("*.nbi*")]
    assert [*(tmp_path / "numba").rglob("*.nbi*")]


def test_the_versions_that_were_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "MOST_FOLDERS", 3)
    used = [0]
    real = os.utime
    monkeypatch.setattr(os, "utime", lambda folder: real(folder, (used[0], used[0])))

    def use(number: int) -> set[str]:
        used[0] += 1
        folder = tmp_path / "kernels" / str(number)
        assert kernel_cache._made(folder) == folder
        return {each.name for each in folder.parent.iterdir()}

    assert [use(number) for number in range(3)][-1] == {"0", "1", "2"}
    assert use(0) == {"0", "1", "2"}
    assert use(3) == {"0", "2", "3"}


def test_a_kernel_runs_though_it_cannot_be_kept(tmp_path: Path) -> None:
    """And where the folder was removed meanwhile, it is kept there again."""
    kept = kernel_cache.KernelCache(_one, "digest", tmp_path / "gone" / "folder")
    one = numba.njit(_one)
    one._cache = kept
    assert one() == 1
    assert [*(tmp_path / "gone" / "folder").glob("*.nbc")]
    (tmp_path / "full" / "saving.lock").mkdir(parents=True)  # so that nothing is saved
    two = numba.njit(_one)
    two._cache = kernel_cache.KernelCache(_one, "digest", tmp_path / "full")
    assert two() == 1
    assert not [*(tmp_path / "full").glob("*.nbc")]


def _one() -> int:
    return 1
