"""The disk cache of compiled kernels, valid until a file of this package or the version of numba changes.

numba stores a compiled function next to the file that defines it, with that file's date and size. But a kernel also
links functions of other files: after a change in one of them, numba would still use the old kernel. And another clone
would compile the same kernels again. So kernels are stored in minipaged's cache, in a folder named by a digest of
numba's version and of all files of this package. If NUMBA_CACHE_DIR is set, or the cache is not writable, they are
stored where numba stores its own. Their file names contain the digest too.
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
"""Mark a function that only compiled code may call. It is stored as a part of its callers and has no wrapper for
Python: a call from Python would crash."""
loop = partial(inner, pipeline_class=LoopCompiler)
"""Mark an inner function that is optimised by itself before its callers are."""


_whole = partial(njit, nogil=True, no_cfunc_wrapper=True, pipeline_class=KernelCompiler)


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Mark a function that Python calls. It is stored together with its callees. `options`: options of `numba.njit`."""

    def compiled(function: Callable[..., Any]) -> Any:
        made = _whole(**options)(function)
        try:
            made._cache = KernelCache(function)
        except RuntimeError as error:
            _warn(error)
        return made

    return compiled


def _warn(error: Exception) -> None:
    """Warn that kernels cannot be stored. Python shows the warning only once, although every kernel may issue it."""
    warnings.warn(
        f"compiled kernels cannot be kept, so each start will compile them ({error}); set MINIPAGED_CACHE to "
        "a folder that can be written to",
        stacklevel=1,
    )


MOST_FOLDERS = 8
"""The number of versions whose kernels are kept, the last used ones. A version has about 5 MB."""


class KernelCache(FunctionCache):
    """The stored compilations of one kernel."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        """Raise RuntimeError if no folder is writable."""
        self._impl_class = partial(_Kept, digest_of(Path(kernel.__code__.co_filename).parent))
        super().__init__(kernel)

    def save_overload(self, sig, data):
        """Save a compilation, under a lock: two processes that save one kernel for two types could choose the same file
        name. If it cannot be saved, the next process compiles it again."""
        try:
            os.makedirs(self.cache_path, exist_ok=True)  # it may have been removed
            with FileLock(Path(self.cache_path) / "saving.lock"):
                super().save_overload(sig, data)
        except (OSError, NotImplementedError) as error:
            _warn(error)


class _Kept(CompileResultCacheImpl):
    """The lookup that numba uses to find the files of a kernel."""

    def __init__(self, digest: str, kernel: Callable[..., Any]) -> None:
        self._digest = digest
        self._locator_classes = [_Folder, *CompileResultCacheImpl._locator_classes]
        super().__init__(kernel)

    def get_filename_base(self, fullname, abiflags):
        """Add the digest to numba's name. numba writes index and data separately, and two versions could mix them."""
        return f"{self._digest}.{super().get_filename_base(fullname, abiflags)}"


class _Folder:
    """The folder for the kernels of one digest, with numba's interface of a cache locator."""

    def __init__(self, folder: Path, kernel: Callable[..., Any]) -> None:
        self._folder = folder
        self._line = kernel.__code__.co_firstlineno

    @classmethod
    def from_function(cls, kernel: Callable[..., Any], file: str) -> _Folder | None:
        """Return the folder of a kernel, or None if numba should try its own locators."""
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
    """Return a digest of numba's version, of the files in `folder` (which define the kernels) and of this package's
    files. After a change to any of them, kernels are compiled again."""
    files = sorted({*folder.glob("*.py*"), *Path(__file__).parent.glob("*.py*")})  # *.pyc: modules without source
    made_of = [numba.__version__.encode(), *(file.read_bytes() for file in files)]
    return hashlib.sha256(b"\0".join(made_of)).hexdigest()[:12]


def _made(folder: Path) -> Path | None:
    """Return the folder, created if need be, or None if it is not writable and has no kernels. Creating one removes the
    least recently used folders beyond `MOST_FOLDERS`."""
    is_new = not folder.is_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)  # marks it as used now
    except OSError:
        is_new = False
    if is_new:
        with suppress(OSError):  # another process may be removing them too
            used_last = sorted(folder.parent.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
            for old in used_last[MOST_FOLDERS:]:
                shutil.rmtree(old, ignore_errors=True)
    return folder if os.access(folder, os.W_OK) or any(folder.glob("*.nbi")) else None
