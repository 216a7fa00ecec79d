"""Triton's interpreter: quicker, and watched."""

from __future__ import annotations

import bisect
import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor


def skip_idle_work() -> None:
    """From here on, what the interpreter does again and again is done once, or not at all, with the same results.

    - At every call within a kernel it searches its whole language for functions to put its own in the place of. They
      are the same ones each time: a third of the time of a kernel.
    - It finds out for each sum and product of integers whether it overflows, and then tells only who asked for `debug`:
      two fifths of what is left.
    - It writes out a table of all types whenever it looks up one.
    """
    from triton.language.core import dtype, is_builtin
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    @functools.cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(package):
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtins

    look_for_overflow = TritonSemantic.binary_op_sanitize_overflow_impl

    def look_for_overflow_if_it_is_told(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            look_for_overflow(self, lhs, rhs, binary_op)

    TritonSemantic.binary_op_sanitize_overflow_impl = look_for_overflow_if_it_is_told

    type_of = interpreter._get_np_dtype
    type_of_numbers = functools.cache(type_of)
    interpreter._get_np_dtype = lambda of: (type_of_numbers if type(of) is dtype else type_of)(of)


class OutsideItsTensors(AssertionError):
    """A kernel accesses memory that it was not given."""


class Watch:
    """Which storages (`UntypedStorage._cdata`) a kernel has read and written."""

    def __init__(self, given: Iterable[object], real: Any) -> None:
        storages = {arg.untyped_storage()._cdata: arg.untyped_storage() for arg in given if isinstance(arg, Tensor)}
        spans = sorted((storage.data_ptr(), storage.nbytes(), key) for key, storage in storages.items())
        self._begins = [begin for begin, _, _ in spans]
        self._ends = [begin + size for begin, size, _ in spans]
        self._keys = [key for _, _, key in spans]
        self._real = real
        self.read: set[int] = set()
        self.written: set[int] = set()

    def _touched(self, pointers: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> Iterator[int]:
        """The storages of the lowest address and of the highest; the rest lies between them."""
        if mask.any():
            for address in (int(pointers[mask].min()), int(pointers[mask].max())):
                place = bisect.bisect_right(self._begins, address) - 1
                if place < 0 or address >= self._ends[place]:
                    raise OutsideItsTensors(hex(address))
                yield self._keys[place]

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.read.update(self._touched(pointers, mask))
        return self._real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> None:
        self.written.update(self._touched(pointers, mask))
        self._real.store(pointers, values, mask)


@contextmanager
def watched(given: Iterable[object]) -> Iterator[Watch]:
    """Within it, kernels may access the memory of these tensors, and it is noted which they do."""
    from triton.runtime import interpreter

    watch = Watch(given, interpreter._interpreter)
    with patch.object(interpreter, "_interpreter", watch):
        yield watch
