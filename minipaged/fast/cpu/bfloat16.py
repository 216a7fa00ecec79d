"""bfloat16 in compiled loops: NumPy and numba have no such type, so its 16 bits travel as an unsigned integer.

bfloat16 is the upper half of a float32: sign, exponent, and the first 7 bits of the fraction. Widening is a shift,
narrowing a rounding. Both become a few vector instructions, so that a loop which reads bfloat16 and computes in float32
runs at the speed of the memory: half the bytes, twice the tokens.

Arrays of float32 go through the same loops: `widen` and `narrow` leave them as they are.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg, attr-defined"

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic, overload

Array = npt.NDArray[Any]


def as_array(tensor: torch.Tensor) -> Array:
    """The memory of a CPU tensor as an array; bfloat16 as uint16, bit by bit."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@intrinsic
def float_of_bits(typingctx, bits):
    """The float32 with these 32 bits (uint32)."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def bits_of_float(typingctx, value):
    """The 32 bits of a float32, as uint32."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def _pointer(typingctx, address, like):
    """The number `address` as a pointer to values of the type of `like`."""

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.intp, like), codegen


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at a memory address, and do not wait for it."""

    def codegen(context, builder, signature, arguments):
        byte, integer = ir.IntType(8).as_pointer(), ir.IntType(32)
        name = "llvm.prefetch.p0"
        function = builder.module.globals.get(name) or ir.Function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, integer, integer, integer]), name
        )
        pointer = builder.inttoptr(arguments[0], byte)
        builder.call(function, [pointer, *(ir.Constant(integer, number) for number in (0, 2, 1))])
        return context.get_dummy_value()

    return types.none(types.intp), codegen


def widen(value: Any) -> Any:
    """A stored number as float32. (In compiled code; what each type means is decided when it is compiled.)"""
    raise NotImplementedError("for compiled code")


@overload(widen, inline="always")
def _widen(value):
    if isinstance(value, types.Integer):
        return lambda value: float_of_bits(np.uint32(value) << np.uint32(16))
    return lambda value: value


def narrow(value: Any, like: Any) -> Any:
    """A float32 as it is stored in an array whose numbers are like `like`: rounded to the nearest, ties to even."""
    raise NotImplementedError("for compiled code")


@overload(narrow, inline="always")
def _narrow(value, like):
    if not isinstance(like, types.Integer):
        return lambda value, like: value

    def round_to_even(value, like):
        bits: Any = bits_of_float(np.float32(value))
        if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):  # NaN: rounding up could make it infinite
            return np.uint16(0x7FC0)
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return round_to_even


def array_at(address: Any, size: Any, like: Any) -> Any:
    """`size` numbers like `like` from a memory address on, as an array without a copy.

    A layer's keys are a strided view of the cache, and numba can vectorise a loop only over rows that it knows to be
    contiguous: every row of `head_dim` numbers is, and this is how it is told.
    """
    raise NotImplementedError("for compiled code")


@overload(array_at, inline="always")
def _array_at(address, size, like):
    return lambda address, size, like: carray(_pointer(address, like), (size,))
