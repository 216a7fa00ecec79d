"""Compiled kernels that are kept are those of the files as they are, wherever these lie."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from numba.core.caching import FunctionCache

from minipaged.fast.cpu import kernel_cache
from minipaged.fast.cpu.kernel_cache import kernel
from tests.effort import thorough

INIT = """
import sys, types
for name in ("minipaged.fast", "minipaged.fast.cpu"):  # without torch, which takes seconds
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [{root!r} + name.replace(".", "/")]
"""
INNER = """
from minipaged.fast.cpu.kernel_cache import inner

@inner()
def number():
    return {}
"""
OUTER = """
from kernels.inner import number
from minipaged.fast.cpu.kernel_cache import kernel

@kernel()
def called(x):
    return x + number()
"""
CALL = """
from kernels.outer import called
print(called(0), len(called.stats.cache_hits))
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
    variables["PYTHONPATH"] = os.pathsep.join([str(folder), ROOT])
    variables["PYTHONDONTWRITEBYTECODE"] = "1"  # by size and second Python would take an edited file for the same
    done = subprocess.run(
        [sys.executable, "-c", CALL],
        env=variables | environment,
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


def test_a_folder_that_others_have_filled_is_read_though_it_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    assert kernel_cache._made(tmp_path) is None
    (tmp_path / "a.nbi").touch()
    assert kernel_cache._made(tmp_path) == tmp_path


def test_a_kernel_runs_though_it_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so. And where the folder was removed meanwhile, it is kept there again."""
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path))
    one = kernel()(_one)
    folder = Path(one._cache.cache_path)
    shutil.rmtree(folder)
    assert one() == 1
    assert [*folder.glob("*.nbc")]

    shutil.rmtree(folder)
    (folder / "saving.lock").mkdir(parents=True)
    two = kernel()(_one)
    with pytest.warns(UserWarning, match=r"kernels cannot be kept.*saving\.lock.*MINIPAGED_CACHE"):
        assert two() == 1
    assert not [*folder.glob("*.nbc")]

    monkeypatch.setattr(kernel_cache.CompileResultCacheImpl, "_locator_classes", [])
    assert kernel()(_one)._cache.cache_path == str(folder), "no place of numba's own is needed"
    monkeypatch.setattr(kernel_cache, "_made", lambda folder: None)
    with pytest.warns(UserWarning, match="kernels cannot be kept.*no locator available"):
        three = kernel()(_one)
    assert three() == 1


def test_the_digest_of_compiled_modules_alone_follows_them(tmp_path: Path) -> None:
    digests = []
    for content in (b"one", b"two"):
        (tmp_path / "kernels.pyc").write_bytes(content)
        kernel_cache.digest_of.cache_clear()
        digests.append(kernel_cache.digest_of(tmp_path))
    assert digests[0] != digests[1]


def test_one_process_at_a_time_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba looks for a free name, then writes the index, then the file: two could give two types one name."""
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path))
    held: list[str] = []
    saved: list[list[str]] = []

    @contextmanager
    def lock(path: Path) -> Iterator[None]:
        held.append(path.name)
        yield
        held.remove(path.name)

    monkeypatch.setattr(kernel_cache, "FileLock", lock)
    monkeypatch.setattr(FunctionCache, "save_overload", lambda *arguments: saved.append([*held]))
    assert kernel()(_one)() == 1
    assert saved == [["saving.lock"]]


def _one() -> int:
    return 1
