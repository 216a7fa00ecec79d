"""Quantized matrices in memory: small codes with the scales that turn them into weights. There are three forms.

    Grouped      w = (q - z) * s + m    q: whole numbers of 2 to 8 bits; z, s, m: one for each group of inputs
    Float8       w = value of q * s     q: 8-bit floats (e4m3); s: one for each rectangular block
    Codebook4    w = table[q] * s       q: 4-bit index into a table of 16 values; s: one for each group of inputs

| form | checkpoints |
|---|---|
| Grouped | GPTQ, AWQ, compressed-tensors' integers, GGUF's Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K |
| Float8 | compressed-tensors' and DeepSeek's FP8 |
| Codebook4 | bitsandbytes' NF4 and FP4, compressed-tensors' nvfp4 and mxfp4 |

A matrix is [out, in], as in transformers: y = x @ w.T. Codes are packed along the inputs, and each output's row begins
with a new byte, so that a matrix can be cut between any two rows. A computation unpacks the weights of a few rows at a
time (`rows`), and memory never holds a full matrix of floats. `activations` describes the quantization of the inputs,
if there is one. A process with a part of a model (`models/shards.py`) has some rows of a matrix or some of its inputs
(`matrix[:, 128:256]`), still packed. A group that is cut becomes several groups with the same scale.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from minipaged.errors import ModelError

Array = npt.NDArray[Any]

LEAST_GROUP = 8
"""The smallest number of inputs per scale after a cut, so that scales do not take more memory than codes."""

Rounding = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Activations:
    """The quantization of a matrix' inputs: each is rounded to a value with an 8-bit code before the product."""

    kind: Literal["int8", "float8"]
    group_size: int | None = None
    """Inputs of one token that share a scale; None: all of them."""
    symmetric: bool = True
    """Whether there is no zero point. (A float8 never has one.)"""
    scale: float | None = None
    """The scale for all tokens, from calibration. None: computed for each token, or for each group of its inputs."""
    zero: int = 0
    """The code of 0, if the scale is from calibration and not symmetric."""

    def applied(self, x: Array) -> Array:
        """Round each number in x [tokens, in] to the nearest value that has a code.

        The arithmetic is that of compressed-tensors: it treats the range of int8, -128 to 127, as symmetric, with 127.5
        on either side. (vLLM's kernels use 127.)
        """
        size = self.group_size or x.shape[1]
        whole = np.pad(x, ((0, 0), (0, -x.shape[1] % size)))  # every group's range includes 0 anyway
        groups = whole.reshape(len(x), whole.shape[1] // size, size)  # [tokens, groups, size]
        scale, zero = self._found(groups) if self.scale is None else (x.dtype.type(self.scale), self.zero)
        if self.kind == "float8":
            coded = round_to_e4m3(groups / scale) * scale
        else:
            coded = (np.rint(np.clip(groups / scale + zero, -128, 127)) - zero) * scale
        given: Array = coded.reshape(whole.shape)[:, : x.shape[1]]
        return given

    def _found(self, groups: Array) -> tuple[Array, Array | int]:
        """Compute scale and zero [tokens, groups, 1] from the range of each group, extended to include 0."""
        low, high = groups.min(2, keepdims=True, initial=0), groups.max(2, keepdims=True, initial=0)
        largest = np.maximum(-low, high)  # [tokens, groups, 1]
        smallest_scale = np.finfo(np.float32).eps
        if self.kind == "float8":
            return np.maximum(largest / groups.dtype.type(448), smallest_scale), 0
        if self.symmetric:
            return np.maximum(largest / groups.dtype.type(127.5), smallest_scale), 0
        scale = np.maximum((high - low) / groups.dtype.type(255), smallest_scale)
        return scale, np.rint(np.clip(-128 - low / scale, -128, 127))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredMatrix(ABC):
    """A packed matrix of weights [out, in]."""

    shape: tuple[int, int]
    """The number of outputs and inputs."""
    rounding: Rounding
    """The type to which each weight is rounded. It is the type for which the quantizing tool chose the codes."""
    activations: Activations | None = None

    @abstractmethod
    def rows(self, which: slice | Array = slice(None)) -> Array:
        """Unpack the weights of some rows: [rows, in] float32."""

    def __getitem__(self, part: tuple[slice, ...]) -> StoredMatrix:
        """Neighbouring rows or inputs, still packed: `matrix[2:4,]`, `matrix[:, 64:128]`. Arrays are views if possible.

        The weights are bit-identical. The slices in `part` have steps of 1. Raises ModelError for inputs that cannot be
        cut out.
        """
        both = zip(self.shape, (*part, slice(None)), strict=False)
        rows, columns = (range(size)[which] for size, which in both)
        matrix = self if len(rows) == self.shape[0] else self._of_outputs(rows)
        if len(columns) == self.shape[1]:
            return matrix
        if (how := self.activations) is not None and how.scale is None:
            if how.group_size is None:
                raise ModelError(
                    "the inputs of a token are quantized with one scale, which would need the inputs of all ranks"
                )
            if columns.start % how.group_size or (columns.stop % how.group_size and columns.stop != self.shape[1]):
                raise ModelError(f"its inputs are quantized in groups of {how.group_size}, and a group would be cut")
        return matrix._of_inputs(columns)

    def _of_outputs(self, rows: range) -> StoredMatrix:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        cut = {name: value[rows.start : rows.stop] for name, value in values.items() if _is_of_each_output(value)}
        return replace(self, shape=(len(rows), self.shape[1]), **cut)

    def _of_inputs(self, columns: range) -> StoredMatrix:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """The matrix' size in memory, in bytes."""
        values = (getattr(self, field.name) for field in fields(self))
        return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grouped(StoredMatrix):
    """A matrix of whole numbers, with a scale for each group of inputs: w = (q - z) * s + m."""

    bits: int
    """Bits per code: 2, 3, 4, 5, 6 or 8."""
    codes: Array
    """[out, bytes] uint8: the codes of a row without gaps, from the lowest bit on, `bits` for each input."""
    scales: Array
    """[out, groups] float16 or float32; or 8-bit whole numbers, which are multiplied by `super_scales`."""
    zeros: Array | int
    """The code for 0: [out, groups] uint8, or one number for all groups."""
    minima: Array | None = None
    """[out, groups], of the scales' type: added to the weights. None: nothing is added."""
    group_size: int
    """Inputs per group. The last group may be smaller."""
    group_index: Array | None = None
    """[in] int32: the group of each input, if groups are not runs of neighbours (GPTQ's act-order)."""
    super_scales: Array | None = None
    """[out, super] float16: factors of the scales. Each applies to groups / super neighbouring groups."""
    super_minima: Array | None = None
    """[out, super] float16: factors of the minima, like `super_scales`."""

    def rows(self, which: slice | Array = slice(None)) -> Array:
        num_inputs = self.shape[1]
        weights = as_floats(self.codes[which], self.bits, num_inputs)  # [rows, in]
        scales = _expanded(self.scales, self.super_scales, which)  # [rows, groups]
        zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[which].astype(np.float32)
        if self.group_index is not None or num_inputs % self.group_size:
            groups = np.arange(num_inputs) // self.group_size if self.group_index is None else self.group_index  # [in]
            weights -= zeros if isinstance(zeros, int) else zeros[:, groups]  # exact: whole numbers
            weights *= scales[:, groups]
            if self.minima is not None:
                weights += _expanded(self.minima, self.super_minima, which)[:, groups]
            return round_to(weights, self.rounding)
        grouped = weights.reshape(*scales.shape, self.group_size)  # [rows, groups, inputs of a group]
        if not isinstance(zeros, int):
            grouped -= zeros[:, :, None]
        elif zeros:
            grouped -= zeros
        grouped *= scales[:, :, None]
        if self.minima is not None:
            grouped += _expanded(self.minima, self.super_minima, which)[:, :, None]
        return round_to(weights, self.rounding)

    def _of_inputs(self, columns: range) -> Grouped:
        cut: dict[str, Any] = {"shape": (self.shape[0], len(columns))}
        cut["codes"] = _cut_codes(self.codes, self.bits, columns)
        if self.group_index is not None:
            return replace(self, group_index=self.group_index[columns.start : columns.stop], **cut)
        cut["group_size"], groups = _cut_groups(self.group_size, columns)
        cut["scales"] = _written_out(self.scales, self.super_scales)[:, groups]
        if not isinstance(self.zeros, int):
            cut["zeros"] = self.zeros[:, groups]
        if self.minima is not None:
            cut["minima"] = _written_out(self.minima, self.super_minima)[:, groups]
        return replace(self, super_scales=None, super_minima=None, **cut)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Float8(StoredMatrix):
    """A matrix of 8-bit floats (e4m3: sign, 4 bits of exponent, 3 of fraction), with a scale for each block."""

    codes: Array
    """[out, in] uint8: the bits of the floats."""
    scales: Array
    """[blocks of outputs, blocks of inputs] float32 or float16."""
    block: tuple[int, int]
    """The number of outputs and of inputs in a block. The last blocks may be smaller."""

    def by_output(self) -> Float8:
        """The matrix with blocks of one output each, by repeating the scales."""
        outputs = np.arange(self.shape[0]) // self.block[0]
        return replace(self, scales=self.scales[outputs], block=(1, self.block[1]))

    def _of_outputs(self, rows: range) -> Float8:
        size = self.block[0]
        blocks = slice(rows.start // size, -(-rows.stop // size))
        if rows.start % size and blocks.stop - blocks.start > 1:  # the first row is not the first one of a block
            return self.by_output()._of_outputs(rows)
        codes = self.codes[rows.start : rows.stop]
        return replace(self, shape=(len(rows), self.shape[1]), codes=codes, scales=self.scales[blocks])

    def _of_inputs(self, columns: range) -> Float8:
        codes = self.codes[:, columns.start : columns.stop]
        size, groups = _cut_groups(self.block[1], columns)
        block, scales = (self.block[0], size), self.scales[:, groups]
        return replace(self, shape=(self.shape[0], len(columns)), codes=codes, scales=scales, block=block)

    def rows(self, which: slice | Array = slice(None)) -> Array:
        outputs = np.arange(self.shape[0])[which] // self.block[0]  # [rows], the block of each
        inputs = np.arange(self.shape[1]) // self.block[1]  # [in]
        scales = self.scales.astype(np.float32)[outputs]  # [rows, blocks of inputs]
        weights: Array = e4m3_values()[self.codes[which]]  # [rows, in]
        weights *= scales if scales.shape[1] == 1 else scales[:, inputs]
        return round_to(weights, self.rounding)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Codebook4(StoredMatrix):
    """A matrix of 4-bit codes, which index a table of 16 values, with a scale for each group of inputs."""

    codes: Array
    """[out, bytes] uint8: two codes per byte, the first one in the lower half."""
    table: Array
    """[16] float32: the value of each code."""
    scales: Array
    """[out, groups] float32."""
    group_size: int
    """Inputs per group."""

    def _of_inputs(self, columns: range) -> Codebook4:
        codes = _cut_codes(self.codes, 4, columns)
        size, groups = _cut_groups(self.group_size, columns)
        scales = self.scales[:, groups]
        return replace(self, shape=(self.shape[0], len(columns)), codes=codes, scales=scales, group_size=size)

    def rows(self, which: slice | Array = slice(None)) -> Array:
        weights: Array = self.table[unpack(self.codes[which], 4, self.shape[1])]  # [rows, in]
        scales = self.scales[which]  # [rows, groups]
        weights.reshape(*scales.shape, self.group_size)[:] *= scales[:, :, None]
        return round_to(weights, self.rounding)


def can_stack(matrices: Sequence[StoredMatrix]) -> bool:
    """Whether `stack` can join them: their forms, codes, groups, tables and zeros must be of the same kind."""
    return len({_kind(matrix) for matrix in matrices}) <= 1


def stack(matrices: Sequence[StoredMatrix]) -> StoredMatrix:
    """Join matrices with the same inputs into one with all their outputs, in order."""
    if len(matrices) == 1:
        return matrices[0]
    parts = [matrix.by_output() if isinstance(matrix, Float8) else matrix for matrix in matrices]
    stacked: dict[str, Any] = {"shape": (sum(matrix.shape[0] for matrix in parts), parts[0].shape[1])}
    for field in fields(parts[0]):
        values = [getattr(matrix, field.name) for matrix in parts]
        if _is_of_each_output(values[0]):
            stacked[field.name] = np.concatenate(values)
    return replace(parts[0], **stacked)


def _kind(matrix: StoredMatrix) -> tuple[Any, ...]:
    """A key that is equal for matrices that can be stacked."""
    values = ((field.name, getattr(matrix, field.name)) for field in fields(matrix))
    kinds = [type(matrix), matrix.shape[1]]
    for name, value in values:
        if _is_of_each_output(value):
            kinds.append((value.dtype, None if isinstance(matrix, Float8) else value.shape[1]))
        elif isinstance(value, np.ndarray):
            kinds.append(value.tobytes())
        elif name == "block":
            kinds.append(value[1])
        elif name != "shape":
            kinds.append(value)
    return tuple(kinds)


def _is_of_each_output(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 2


def _expanded(values: Array, supers: Array | None, which: slice | Array) -> Array:
    """The scales or minima of some rows, multiplied by their super-scales or super-minima: [rows, groups] float32."""
    expanded: Array = values[which].astype(np.float32)
    if supers is not None:
        num_supers = supers.shape[1]
        parts = expanded.reshape(len(expanded), num_supers, expanded.shape[1] // num_supers)  # [rows, super, groups]
        parts *= supers[which].astype(np.float32)[:, :, None]
    return expanded


def _written_out(values: Array, supers: Array | None) -> Array:
    return values if supers is None else _expanded(values, supers, slice(None))


def _cut_codes(codes: Array, bits: int, columns: range) -> Array:
    """The codes [out, bytes] of neighbouring inputs. Raises ModelError unless the first one begins with a byte."""
    if columns.start * bits % 8:
        raise ModelError(f"the codes of inputs {columns.start - 1} and {columns.start}, {bits} bits each, share a byte")
    return codes[:, columns.start * bits // 8 : -(-columns.stop * bits // 8)]


def _cut_groups(size: int, columns: range) -> tuple[int, Array]:
    """Regroup neighbouring inputs of a matrix with groups of `size`: the new group size, and each new group's old one.

    Raises ModelError if the new groups would be too small.
    """
    if columns.start // size == (columns.stop - 1) // size:
        return len(columns), np.array([columns.start // size])
    smaller = math.gcd(size, columns.start, columns.stop)
    if smaller < min(size, LEAST_GROUP):
        raise ModelError(f"inputs {columns.start} to {columns.stop - 1} cut through groups of {size}")
    return smaller, np.arange(columns.start, columns.stop, smaller) // size


def unpack(packed: Array, bits: int, count: int) -> Array:
    """Unpack each row's first `count` codes of `bits` bits, lowest bits first: [rows, bytes] uint8 -> [rows, count]."""
    if bits == 8:
        return packed[:, :count]
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = packed[:, :, None] >> shifts & np.uint8(2**bits - 1)  # [rows, bytes, codes of a byte]
        return codes.reshape(len(packed), packed.shape[1] * len(shifts))[:, :count]
    each = np.unpackbits(packed, axis=1, count=bits * count, bitorder="little").reshape(len(packed), count, bits)
    unpacked: Array = np.packbits(each, axis=2, bitorder="little")[:, :, 0]
    return unpacked


def as_floats(packed: Array, bits: int, count: int) -> Array:
    """`unpack` to float32. A table looks up two 4-bit codes at a time, which is five times as fast."""
    if bits != 4:
        return unpack(packed, bits, count).astype(np.float32)
    floats = pairs_of_floats()[packed].view(np.float32)  # [rows, 2 * bytes]
    return floats if floats.shape[1] == count else np.ascontiguousarray(floats[:, :count])


@cache
def pairs_of_floats() -> Array:
    """A table for `as_floats`, [256] complex64: each entry is two float32, the lower and the upper half of a byte."""
    values = np.arange(256)
    return np.stack((values & 15, values >> 4), axis=1).astype(np.float32).view(np.complex64)[:, 0]


def pack(codes: Array, bits: int) -> Array:
    """Pack codes, the inverse of `unpack`: [rows, count] uint8, each below 2 ** bits -> [rows, bytes] uint8."""
    if bits == 4 and codes.shape[1] % 2 == 0:
        halves: Array = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
        return halves
    each = np.unpackbits(codes[:, :, None], axis=2, count=bits, bitorder="little")  # [rows, count, bits]
    packed: Array = np.packbits(each.reshape(len(codes), codes.shape[1] * bits), axis=1, bitorder="little")
    return packed


def round_to(values: Array, rounding: Rounding) -> Array:
    """Round each float32 value to the nearest one of type `rounding`. The result is still float32."""
    if rounding == "float32":
        return values
    if rounding == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    # bfloat16 is the upper half of a float32. Ties round to even, and NaN stays NaN.
    bits = np.ascontiguousarray(values).view(np.uint32)
    upper = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)
    rounded: Array = np.where(np.isnan(values), values, upper.view(np.float32))
    return rounded


@cache
def e4m3_values() -> Array:
    """[256] float32: the value of each byte as an e4m3 float. There is no infinity; 0x7F and 0xFF are NaN."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    sizes = np.where(exponent == 0, np.ldexp(fraction / 8, -6), np.ldexp(1 + fraction / 8, exponent - 7))
    values = np.where(codes < 128, sizes, -sizes).astype(np.float32)
    values[[0x7F, 0xFF]] = np.nan
    return values


def round_to_e4m3(values: Array) -> Array:
    """Round each value to the nearest e4m3 float, from -448 to 448, and keep the type of `values`."""
    clipped = np.clip(values, -448, 448)
    exponent = np.maximum(np.frexp(clipped)[1] - 1, -6)  # of the leading bit; the step is constant below 2 ** -6
    step = np.ldexp(np.ones_like(clipped), exponent - 3)
    rounded: Array = np.rint(clipped / step) * step
    return rounded
