"""The processor's vector instructions in compiled loops: a small builder of LLVM code that kernels are written with.

LLVM vectorises many loops by itself. A kernel whose speed depends on the order of its instructions (which numbers stay
in registers, which are multiplied together) uses the methods below instead. A vector has 16 float32, or 16 pairs of
bfloat16; the instruction vdpbf16ps multiplies both numbers of each pair and adds both products to a float32.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg, attr-defined"

from __future__ import annotations

import functools
import math
import platform
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

LANES = 16
"""The number of float32 in a vector of 512 bits."""

POWERS = tuple(math.log(2) ** k / math.factorial(k) for k in range(7))
"""Taylor coefficients: 2 ** x is the sum of POWERS[k] * x ** k, for |x| <= 1/2 to the last bit or two of a float32."""


TANH = (1.0, -3.33332819422e-1, 1.33314422036e-1, -5.37397155531e-2, 2.06390887954e-2, -5.70498872745e-3)
"""tanh(x) is x times the sum of TANH[k] * x ** (2 * k), for |x| < 0.625 to the last bit or two (Cephes)."""


class BFloat16(ir.Type):  # type: ignore[misc]
    """The bfloat16 type, which LLVM has but its Python interface lacks."""

    def _to_string(self) -> str:
        return "bfloat"


BITS8, BITS16, BITS32, BITS64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOATS, INTEGERS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(BITS32, LANES)
HALVES, BYTES = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(BITS8, LANES)
PAIRS, BFLOATS = ir.VectorType(BITS16, 2 * LANES), ir.VectorType(BFloat16(), 2 * LANES)
OUT_BFLOATS, OUT_BITS = ir.VectorType(BFloat16(), LANES), ir.VectorType(BITS16, LANES)


@functools.cache
def number_type(dtype: torch.dtype) -> Any:
    """Return a number of the type that vector instructions multiply for `dtype`: uint16 (pairs of bfloat16) or float32.
    None if this processor has no such instructions, so that kernels run as plain loops.

    The processor's features are read from numba, because NUMBA_CPU_FEATURES may restrict them. numba stores compiled
    kernels separately for each set of features.
    """
    features = _features()
    if dtype == torch.bfloat16 and {"+avx512bf16", "+avx512bw"} <= features:
        return np.uint16(0)
    return np.float32(0) if "+avx512f" in features else None


def _features() -> set[str]:
    return set(cpu_target.target_context.codegen().magic_tuple()[2].split(","))


HAS_FMA = "+fma" in _features() or platform.machine() in ("aarch64", "arm64")
"""Whether one instruction multiplies and adds. (LLVM divides a vector of 16 floats into as many as it takes here.)"""


HAS_VECTORS = number_type(torch.float32) is not None
"""Whether numba may use vectors of 512 bits."""


class Vectors:
    """Writes vector instructions, one after another. Each subclass writes a kernel with them."""

    def __init__(self, builder) -> None:
        self.builder = builder

    def variable(self):
        """Return a variable for a vector of floats, initially 0. (LLVM keeps it in a register.)"""
        variable = cgutils.alloca_once(self.builder, FLOATS)
        self.builder.store(self.all_of(FLOATS, 0.0), variable)
        return variable

    def add_product(self, variable, weights, x) -> None:
        """Add `weights` * `x`, lane by lane, to a variable: one product for floats, two for pairs of bfloat16."""
        total = self.builder.load(variable)
        if weights.type == FLOATS:
            total = self.call("llvm.fma.v16f32", FLOATS, weights, x, total)
        else:
            weights, x = (self.builder.bitcast(pairs, BFLOATS) for pairs in (weights, x))
            total = self.call("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, weights, x)
        self.builder.store(total, variable)

    def where(self, number):
        """Return a context whose instructions run only if the number is not 0."""
        return self.builder.if_then(self.builder.icmp_unsigned("!=", number, BITS64(0)))

    def where_capped(self, cap):
        """Return a context whose instructions run only if a soft cap is not 0."""
        return self.builder.if_then(self.builder.fcmp_ordered(">", cap, ir.Constant(ir.FloatType(), 0.0)))

    def place(self, address, index, size):
        return self.builder.add(address, self.builder.mul(index, BITS64(size)))

    def load(self, address, kind, offset=0):
        address = self.builder.add(address, BITS64(offset))
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=1)

    def store(self, value, address, offset=0):
        address = self.builder.add(address, BITS64(offset))
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=1)

    def all_of(self, kind, value):
        return ir.Constant(kind, [value] * kind.count)

    def spread(self, value):
        """Return a vector with the same value in all 16 lanes."""
        one = ir.VectorType(value.type, LANES)
        first = self.builder.insert_element(ir.Constant(one, ir.Undefined), value, BITS32(0))
        return self.builder.shuffle_vector(first, first, self.all_of(INTEGERS, 0))

    def as_bfloats(self, x):
        """Round 16 floats to bfloat16 as `bfloat16.narrow` does. (Without AVX512_BF16, LLVM's own rounding calls a
        function that numba lacks.)"""
        b, bits = self.builder, self.builder.bitcast(x, INTEGERS)
        odd = b.and_(b.lshr(bits, self.all_of(INTEGERS, 16)), self.all_of(INTEGERS, 1))
        rounded = b.lshr(b.add(bits, b.add(odd, self.all_of(INTEGERS, 0x7FFF))), self.all_of(INTEGERS, 16))
        nan = self.all_of(INTEGERS, 0x7FC0)
        return b.trunc(b.select(b.fcmp_unordered("uno", x, x), nan, rounded), OUT_BITS)

    def call(self, name, result, *arguments):
        module = self.builder.module
        function = module.globals.get(name) or ir.Function(
            module, ir.FunctionType(result, [argument.type for argument in arguments]), name
        )
        return self.builder.call(function, arguments)

    def power(self, x):
        """Return 2 ** x: 0 for x of -160 or less, NaN for NaN."""
        b, least = self.builder, self.all_of(FLOATS, -160.0)
        x = b.select(b.fcmp_ordered("<", x, least), least, x)
        whole = self.call("llvm.rint.v16f32", FLOATS, x)
        rest, power = b.fsub(x, whole), self.all_of(FLOATS, POWERS[-1])
        for factor in reversed(POWERS[:-1]):
            power = self.call("llvm.fma.v16f32", FLOATS, power, rest, self.all_of(FLOATS, factor))
        lanes, current = ir.Constant(ir.IntType(16), -1), BITS32(4)
        return self.call("llvm.x86.avx512.mask.scalef.ps.512", FLOATS, power, whole, power, lanes, current)

    def capped(self, x, cap):
        """Return cap × tanh(x / cap)."""
        b, cap = self.builder, self.spread(cap)
        x = b.fdiv(x, cap)
        size, square, small = self.call("llvm.fabs.v16f32", FLOATS, x), b.fmul(x, x), self.all_of(FLOATS, TANH[-1])
        for factor in reversed(TANH[:-1]):
            small = self.call("llvm.fma.v16f32", FLOATS, small, square, self.all_of(FLOATS, factor))
        one, two = self.all_of(FLOATS, 1.0), self.all_of(FLOATS, 2.0)
        power = self.power(b.fmul(size, self.all_of(FLOATS, 2 * math.log2(math.e))))
        large = b.fsub(one, b.fdiv(two, b.fadd(power, one)))
        large = self.call("llvm.copysign.v16f32", FLOATS, large, x)
        is_small = b.fcmp_ordered("<", size, self.all_of(FLOATS, 0.625))
        return b.fmul(cap, b.select(is_small, b.fmul(x, small), large))
