"""Triton's interpreter: quicker, and watched."""

from __future__ import annotations

import bisect
import functools
import inspect
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor


def skip_idle_work() -> None:
    """From here on, what the interpreter does again and again is done once, or not at all, with the same results."""
    patch_the_language_once_a_launch()
    look_for_overflow_in_debug_alone()
    find_types_in_a_table()
    make_shapes_once()


def patch_the_language_once_a_launch() -> None:
    """The interpreter puts its own functions in place of the language's at each launch, and once more at each call of a
    function within it, where they are in place already. Each time it searches the whole language for them.
    """
    from triton import language
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(package):
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    @functools.cache
    def languages_of(function: Any) -> frozenset[str]:
        """The names of the two modules of the language, as far as the function knows them."""
        known = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return frozenset(each.__name__ for each in (language, language.core) if each in known)

    patch_language, patched = interpreter._patch_lang, set[str]()

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        """The launch's. Those of calls within it are never restored by themselves."""

        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch_language_once(function: Any) -> Any:
        languages = languages_of(function)
        if languages and languages <= patched:
            return Scope()
        patched.update(languages)
        return patch_language(function)

    interpreter._patch_builtin = patch_builtins
    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch_language_once


def look_for_overflow_in_debug_alone() -> None:
    """The interpreter looks for overflow in each sum and product of integers, and then says so only in `debug` mode."""
    from triton.language.semantic import TritonSemantic

    look_for_overflow = TritonSemantic.binary_op_sanitize_overflow_impl

    def look_for_overflow_if_it_is_told(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            look_for_overflow(self, lhs, rhs, binary_op)

    TritonSemantic.binary_op_sanitize_overflow_impl = look_for_overflow_if_it_is_told


def find_types_in_a_table() -> None:
    """The interpreter writes out a table of all types whenever it looks up one."""
    from triton.language.core import dtype
    from triton.runtime import interpreter

    type_of = interpreter._get_np_dtype
    type_of_numbers = functools.cache(type_of)
    interpreter._get_np_dtype = lambda of: (type_of_numbers if type(of) is dtype else type_of)(of)


def make_shapes_once() -> None:
    """The shape of each type and of each tensor is checked, named and wrapped anew; there are but a few shapes."""
    from triton._utils import validate_block_shape
    from triton.language import core

    @functools.cache
    def of_type(shape: tuple[int, ...]) -> tuple[Any, int]:
        return core.tuple(shape), validate_block_shape(shape)

    @functools.cache
    def of_tensor(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape, self.numel = of_type(sizes)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor(tuple(type.shape) if type.is_block() else ())

    core.block_type.__init__ = make_block_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__ = make_tensor


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
