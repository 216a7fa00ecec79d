"""bfloat16 in compiled loops: NumPy and numba lack the type, so its 16 bits are stored as an unsigned integer.

bfloat16 is the upper half of a float32: sign, exponent, and the first 7 bits of the fraction. Widening is a shift,
narrowing a rounding. Both become a few vector instructions, so a loop that reads bfloat16 and computes in float32 runs
at the speed of the memory: half the bytes, twice the tokens.

Arrays of float32 go through the same loops: `widen` and `narrow` leave them unchanged. Keys and values in 8 bits, int8
or e4m3 floats (in a uint8), do too: decoding them, without the scale, is also a few instructions.
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
    """Return a CPU tensor's memory as an array without a copy; bfloat16 becomes uint16 with the same bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@intrinsic
def float_of_bits(typingctx, bits):
    """Return the float32 with these 32 bits (uint32)."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def bits_of_float(typingctx, value):
    """Return the 32 bits of a float32, as uint32."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def _pointer(typingctx, address, like):
    """Return the number `address` as a pointer to values of the type of `like`."""

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.intp, like), codegen


@intrinsic
def prefetch(typingctx, address):
    """Prefetch the cache line at a memory address, without waiting for it."""

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
    """Return a stored number as float32. (Only in compiled code, which selects the conversion by the number's type.)"""
    raise NotImplementedError("for compiled code")


@overload(widen, inline="always")
def _widen(value):
    if value == types.uint16:
        return lambda value: float_of_bits(np.uint32(value) << np.uint32(16))
    if value == types.int8:
        return lambda value: np.float32(value)
    if value == types.uint8:
        return _widen_e4m3
    return lambda value: value


def _widen_e4m3(value):
    """Decode e4m3: move sign, exponent and fraction to a float32's places, and add the missing 120 to the exponent. (No
    code is NaN.)"""
    sign, size = np.uint32(value) & np.uint32(128), np.uint32(value) & np.uint32(127)
    return float_of_bits(sign << np.uint32(24) | size << np.uint32(20)) * np.float32(2.0**120)


def narrow(value: Any, like: Any) -> Any:
    """Return a float32 in the storage type of `like`, rounded to nearest, ties to even.

    For storage in 8 bits, its absolute value must be at most 127 (int8) or 448 (e4m3).
    """
    raise NotImplementedError("for compiled code")


@overload(narrow, inline="always")
def _narrow(value, like):
    if like == types.int8:  # the lowest bits of 1.5 * 2**23 + n are those of n
        return lambda value, like: np.int8(bits_of_float(np.float32(value) + np.float32(12582912)))
    if like == types.uint8:
        return _narrow_e4m3
    if like != types.uint16:
        return lambda value, like: value

    def round_to_even(value, like):
        bits: Any = bits_of_float(np.float32(value))
        if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):  # NaN: rounding up could turn it into infinity
            return np.uint16(0x7FC0)
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return round_to_even


def _narrow_e4m3(value, like):
    bits: Any = bits_of_float(np.float32(value))
    sign, size = bits >> np.uint32(24) & np.uint32(128), bits & np.uint32(0x7FFFFFFF)
    if size < np.uint32(121 << 23):  # below 2**-6 the spacing is 2**-9, as from 16384 on in float32
        code = bits_of_float(float_of_bits(size) + np.float32(16384)) - np.uint32(0x46800000)
    else:  # the exponent's bias is 7 instead of 127, above a fraction of 3 bits
        rounded = size + np.uint32(0x7FFFF) + (size >> np.uint32(20) & np.uint32(1))
        code = (rounded >> np.uint32(20)) - np.uint32(960)
    return np.uint8(code | sign)


def array_at(address: Any, size: Any, like: Any) -> Any:
    """Return an array, without a copy, of `size` numbers like `like` from a memory address on.

    A layer's keys are a strided view of the cache, and numba can vectorize a loop only over rows that it knows to be
    contiguous. Each row of `head_dim` numbers is contiguous, and this function makes that known to numba.
    """
    raise NotImplementedError("for compiled code")


@overload(array_at, inline="always")
def _array_at(address, size, like):
    return lambda address, size, like: carray(_pointer(address, like), (size,))
