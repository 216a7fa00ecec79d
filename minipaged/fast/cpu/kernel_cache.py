"""What numba keeps of compiled kernels holds as long as none of the files that they are made of has changed.

numba keeps a compiled function with the date and size of the file that defines it. But a kernel takes up functions of
other files too: after a change there, the old one would go on being used. So here a digest of all of the package's
files takes that date's place.
"""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import hashlib
import sys
from functools import partial
from pathlib import Path

from numba import njit
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher

from minipaged.fast.cpu.whole_kernels import KernelCompiler, LoopCompiler

kernel = partial(njit, nogil=True, cache=True, no_cfunc_wrapper=True, pipeline_class=KernelCompiler)
"""What Python calls: numba keeps it, and its callees with it."""
inner = partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""What only compiled code calls: kept with its callers, and not for itself, nor compiled for calls from Python,
which would crash."""
loop = partial(inner, pipeline_class=LoopCompiler)
"""An inner function that is optimised by itself before its callers are."""


def follow_sources(package: str) -> None:
    """Let compiled functions of all modules of a package, which are loaded, hold for its files as they are."""
    files = sorted(Path(str(sys.modules[package].__file__)).parent.glob("*.py"))
    if not files:
        return  # compiled modules alone: numba's own date is all there is
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}."):
            for each in vars(module).values():
                own = isinstance(each, Dispatcher) and each.py_func.__module__ == name  # others only import it
                if own and isinstance(each._cache, FunctionCache):
                    kept = each._cache._cache_file
                    kept._source_stamp = digest
                    # In names too: numba writes what is kept, and under which names, one after the other.
                    kept._index_path = f"{kept._index_path}.{digest[:12]}"
                    kept._data_name_pattern = f"{digest[:12]}.{kept._data_name_pattern}"
