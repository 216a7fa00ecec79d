"""A cache of compiled kernels on disk, valid until a file of this package or the version of numba changes.

numba keeps a compiled function beside the file that defines it, with that file's date and size. But a kernel links in
functions of other files too: after a change in one of those, numba would go on using the old kernel. And another clone
would compile the same kernels again. So here kernels are kept in minipaged's cache, in a folder that is named by a
digest of numba's version and of all files of this package. If NUMBA_CACHE_DIR is set or the cache is not writable,
kernels are kept where numba keeps its own. The digest is also in the files' names.
"""

# mypy: disable-error-code="assignment, attr-defined, misc, no-untyped-call, no-untyped-def"

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numba
from filelock import FileLock
from numba import njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache

from minipaged.fast.cpu.whole_kernels import KernelCompiler, LoopCompiler
from minipaged.models.hub import cache_folder

inner = partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorator of a function that only compiled code may call. It is kept as a part of its callers and has no wrapper for
Python: a call from Python would crash."""
loop = partial(inner, pipeline_class=LoopCompiler)
"""Decorator of an inner function that is optimized by itself before its callers are."""


_whole = partial(njit, nogil=True, no_cfunc_wrapper=True, pipeline_class=KernelCompiler)


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator of a function that Python calls. It is kept on disk together with its callees. `options`: those of
    `numba.njit`."""

    def compiled(function: Callable[..., Any]) -> Any:
        made = _whole(**options)(function)
        try:
            made._cache = KernelCache(function)
        except RuntimeError as error:
            _warn(error)
        return made

    return compiled


def _warn(error: Exception) -> None:
    """Warns once that kernels cannot be kept, since every kernel calls this."""
    warnings.warn(
        f"compiled kernels cannot be kept, so each start will compile them ({error}); set MINIPAGED_CACHE to a "
        "writable folder",
        stacklevel=1,
    )


MOST_FOLDERS = 8
"""The number of versions whose kernels are kept: the most recently used. A version has about 5 MB."""


class KernelCache(FunctionCache):
    """The cache of one kernel."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        """Raises RuntimeError if no folder can be written to."""
        self._impl_class = partial(_Kept, digest_of(Path(kernel.__code__.co_filename).parent))
        super().__init__(kernel)

    def save_overload(self, sig, data):
        """Saves under a lock, because two processes that save one kernel for two types could give both the same file.
        If saving fails, the next process compiles the kernel again."""
        try:
            os.makedirs(self.cache_path, exist_ok=True)  # it may have been removed
            with FileLock(Path(self.cache_path) / "saving.lock"):
                super().save_overload(sig, data)
        except (OSError, NotImplementedError) as error:
            _warn(error)


class _Kept(CompileResultCacheImpl):
    """The naming of a kernel's files, as numba calls it."""

    def __init__(self, digest: str, kernel: Callable[..., Any]) -> None:
        self._digest = digest
        self._locator_classes = [_Folder, *CompileResultCacheImpl._locator_classes]
        super().__init__(kernel)

    def get_filename_base(self, fullname, abiflags):
        """Adds the digest: numba writes index and data one after the other, and two versions could mix them."""
        return f"{self._digest}.{super().get_filename_base(fullname, abiflags)}"


class _Folder:
    """The folder for the kernels of one digest, in the form of numba's cache locators."""

    def __init__(self, folder: Path, kernel: Callable[..., Any]) -> None:
        self._folder = folder
        self._line = kernel.__code__.co_firstlineno

    @classmethod
    def from_function(cls, kernel: Callable[..., Any], file: str) -> _Folder | None:
        """Returns None if numba should try another locator."""
        if numba.config.CACHE_DIR:
            return None
        folder = _made(cache_folder() / "kernels" / digest_of(Path(file).parent))
        return None if folder is None else cls(folder, kernel)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def ensure_cache_path(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def get_source_stamp(self) -> str:
        return self._folder.name

    def get_disambiguator(self) -> str:
        return str(self._line)


@lru_cache
def digest_of(folder: Path) -> str:
    """A digest of numba's version, of the files in `folder`, which holds the kernels' source, and of this package's
    files. After a change to any of them, kernels are compiled again."""
    files = sorted({*folder.glob("*.py*"), *Path(__file__).parent.glob("*.py*")})  # compiled modules alone are *.pyc
    made_of = [numba.__version__.encode(), *(file.read_bytes() for file in files)]
    return hashlib.sha256(b"\0".join(made_of)).hexdigest()[:12]


def _made(folder: Path) -> Path | None:
    """Creates a folder and returns it, or returns None if it is neither writable nor holds any kernel. Creating it
    removes the least recently used folders beyond `MOST_FOLDERS`."""
    is_new = not folder.is_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)  # marks the folder as used
    except OSError:
        is_new = False
    if is_new:
        with suppress(OSError):  # another process may tidy, too
            used_last = sorted(folder.parent.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
            for old in used_last[MOST_FOLDERS:]:
                shutil.rmtree(old, ignore_errors=True)
    return folder if os.access(folder, os.W_OK) or any(folder.glob("*.nbi")) else None
