"""Memory of a test process, of which several models have theirs one after another."""

from __future__ import annotations

import ctypes
import gc


def give_back() -> None:
    """To the system: what nobody refers to, also what refers to itself, and what glibc keeps because it was freed in
    small pieces (100 to 500 MB, after a model's weights)."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
