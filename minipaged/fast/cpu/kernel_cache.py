"""Compiled kernels are kept on disk, and used until a file of this package or the version of numba changes.

numba keeps a compiled function beside the file that defines it, with that file's date and size. But a kernel links in
functions of other files too: after a change in one of those, numba would go on using the old kernel. And another clone
would compile the same kernels again. So here kernels are kept in minipaged's cache, in a folder that is named by a
digest of numba's version and of all files of this package. Where NUMBA_CACHE_DIR is set, and where the cache cannot be
written to, numba's own place is used, and the digest is in the files' names.
"""

# mypy: disable-error-code="attr-defined, misc, no-untyped-call, no-untyped-def"

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numba
from filelock import FileLock
from numba import njit
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher

from minipaged.fast.cpu.whole_kernels import KernelCompiler, LoopCompiler
from minipaged.models.hub import cache_folder

kernel = partial(njit, nogil=True, cache=True, no_cfunc_wrapper=True, pipeline_class=KernelCompiler)
"""What Python calls: numba keeps it, and its callees with it."""
inner = partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""A function that only compiled code may call. It is kept as a part of its callers and has no wrapper for Python: a
call from Python would crash."""
loop = partial(inner, pipeline_class=LoopCompiler)
"""An inner function that is optimised by itself before its callers are."""

MOST_FOLDERS = 8
"""The number of versions whose kernels are kept: those used last. A version has about 5 MB."""


class KernelCache(FunctionCache):
    """What numba keeps of one kernel."""

    def __init__(self, kernel: Callable[..., Any], digest: str, folder: Path | None) -> None:
        """`folder`: where kernels of this digest are kept; None: where numba keeps them."""
        super().__init__(kernel)
        self._folder = folder
        kept = self._cache_file
        if folder is not None:
            self._cache_path = kept._cache_path = str(folder)
            kept._index_path = str(folder / f"{kernel.__module__}.{kept._index_name}")
            kept._data_name_pattern = f"{kernel.__module__}.{kept._data_name_pattern}"
        else:  # in the names too: numba writes index and data one after the other, and two versions could mix them
            kept._index_path = f"{kept._index_path}.{digest}"
            kept._data_name_pattern = f"{digest}.{kept._data_name_pattern}"
        kept._source_stamp = digest

    def save_overload(self, sig, data):
        """One process at a time: two that save one kernel for two types could give both the same file. A folder that
        was removed is made again; where there is no room, the kernel is compiled anew by the next process."""
        if self._folder is None:
            super().save_overload(sig, data)
            return
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self._folder / "saving.lock"):
                super().save_overload(sig, data)


def follow_sources(package: str) -> None:
    """Ties the kernels of the package's loaded modules to its files as they are: after a change to any of them, kernels
    are compiled again."""
    files = sorted(Path(str(sys.modules[package].__file__)).parent.glob("*.py"))
    if not files:
        return  # compiled modules alone: numba's own date is all there is
    made_of = [numba.__version__.encode(), *(file.read_bytes() for file in files)]
    digest = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:12]
    folder = None if numba.config.CACHE_DIR else _made(cache_folder() / "kernels" / digest)
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}."):
            for each in vars(module).values():
                own = isinstance(each, Dispatcher) and each.py_func.__module__ == name  # others only import it
                if own and isinstance(each._cache, FunctionCache):
                    each._cache = KernelCache(each.py_func, digest, folder)


def _made(folder: Path) -> Path | None:
    """The folder, or None where it cannot be written to. Creating it removes the least recently used ones beyond
    `MOST_FOLDERS`."""
    try:
        is_new = not folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)  # it is used
    except OSError:
        return None
    if is_new:
        with suppress(OSError):  # another process may tidy, too
            used_last = sorted(folder.parent.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
            for old in used_last[MOST_FOLDERS:]:
                shutil.rmtree(old, ignore_errors=True)
    return folder if os.access(folder, os.W_OK) else None
