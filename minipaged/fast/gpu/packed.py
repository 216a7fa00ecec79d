"""Products with matrices that stay packed: y = x @ w.T, where w is decoded on its way into the tensor cores.

Decoding a token reads every weight once and multiplies it by a few numbers, so a product takes as long as reading its
bytes: a quarter of them in 4 bits, half in 8. That holds as long as decoding the codes keeps pace with memory. Per
cycle, a multiprocessor receives some 36 codes of 4 bits and starts instructions for 128 lanes: 3.5 for each weight in
all (docs/tuning.md has the calculation). Hence:

- **No conversion.** 0x4300 with a nibble in its last bits is the bfloat16 128 + q, exactly; 0x6400 the float16
  1024 + q. Subtracting 128 + 8 (also exact) gives q - 8: two bit operations and a subtraction for two codes, instead of
  conversions, which a multiprocessor starts at only 16 to 64 per cycle.
- **Scales are applied to sums, not to weights.** The products of a group of inputs are summed with the codes as
  weights, which are integers, so nothing is rounded; the sum times the scale is added to the result. For 16 tokens that
  is a quarter of an instruction per weight in groups of 64. If a group has its own zero or minimum (GGUF), its
  contribution is added times the sum of the group's inputs.
- **Weights are the left operand:** y.T = w @ x.T. Hopper's tensor cores take 64 rows at a time, which a matrix has and
  a decoding batch lacks. They also take the left operand from registers, where it was decoded.
- **A layout of its own**, made once while loading (`laid_out`). Blocks of inputs are stored one after another, each
  with all outputs: a tile of any number of outputs is one run of memory. Within a block, a word of 32 bits holds the
  codes of exactly the inputs that one thread passes to the tensor cores, so codes are decoded two at a time and threads
  exchange nothing. If groups are not runs of neighbours (GPTQ's act-order), the inputs are sorted by group, and so is x
  before each product.
- **Split along the inputs** if a matrix has fewer tiles than the GPU has room for: partial sums are written, and a
  second kernel adds them in order. (Atomic additions would save that kernel, but the last bits would depend on the
  order of arrival.) The number of splits depends on shapes alone, so that a CUDA graph can record it.

If inputs are quantized too (`Activations`), both sides of a product are codes of 8 bits: int8 with sums in int32, which
are exact; or float8 (e4m3) with sums that move into float32 after each block of at most 128 inputs, because Hopper
keeps only 14 bits while it adds. One kernel makes the inputs' codes and scales beforehand. On chips without float8
(sm_80), and for inputs quantized in ways that fit no block, the product uses the decoded floats instead.

No weight is rounded here, except by tables of 16 values (NF4), which are in the model's type. A tool that rounds
decoded weights to its own type (`StoredMatrix.rounding`) differs by that rounding: by at most a quarter of bfloat16's
last bit, if the type is float16.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
# Of an `if` and its `else` on a constant, Triton compiles only one. Triton has no `in`.
# ruff: noqa: RET505, SIM108, SIM109

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from minipaged.fast.device import is_gpu
from minipaged.fast.gpu.attention import _capability, _multiplies_from_shared_memory, _num_sms
from minipaged.fast.kernels import Matrix
from minipaged.fast.linear import QuantizingLinear
from minipaged.models.quantized.stored import Activations, Array, Codebook4, Float8, Grouped, StoredMatrix, unpack

# The decodings of a code. In the first four the tensor cores multiply numbers of the model's type.
NIBBLES = tl.constexpr(0)
"""Integers of 4 bits."""
BYTES = tl.constexpr(1)
"""Integers of 8 bits."""
TABLE = tl.constexpr(2)
"""4 bits: indices into a table of 16 values."""
FLOATS = tl.constexpr(3)
"""Floats of 8 bits (e4m3)."""
INT8 = tl.constexpr(4)
"""int8, multiplied by int8."""
FLOAT8 = tl.constexpr(5)
"""e4m3, multiplied by e4m3."""

STEP = 64
"""The fewest inputs in an iteration of the loop, with few rows: smaller blocks are taken two at a time."""
LARGEST_BLOCK = 128
"""The most inputs in a block. Products are summed over a block before they are scaled; on Hopper, float8 sums have only
14 bits until then."""
LOADED = 1 << 24
"""The number of codes that are laid out at a time."""
PROGRAMS_PER_SM = 3
"""The programs per multiprocessor for which inputs are split: while one decodes, the others' loads are under way."""
MIN_STEPS = 4
"""The fewest iterations in a split: a shorter one costs more to write and add than it saves."""
MAX_SPLITS = 16
"""The most splits. The partial sums, at 8 bytes written and read per number and split, must be small next to the
weights."""
SUMMED = 256
"""The outputs that one program adds up."""


def packed(matrix: StoredMatrix, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Matrix | None:
    """Return the matrix, ready for products with numbers of `dtype`; None if no kernel supports it."""
    how = matrix.activations
    form = _form(matrix, device)
    block = None if form is None else _block(matrix, form)
    if form is not None and block is not None:
        return PackedMatrix(matrix, form, block, bias, dtype, device)
    if how is None:
        return None
    by_floats = packed(replace(matrix, activations=None), bias, dtype, device)
    return by_floats and QuantizingLinear(by_floats, how)


def _form(matrix: StoredMatrix, device: torch.device) -> int | None:
    """Return the decoding of a matrix's codes, and of its inputs' codes if these are quantized; None if there
    is no such decoding."""
    how, form = matrix.activations, None
    if isinstance(matrix, Codebook4):
        form = TABLE if how is None else None
    elif isinstance(matrix, Float8):
        form = FLOATS if how is None else FLOAT8 if how.kind == "float8" and _has_float8(device) else None
    elif isinstance(matrix, Grouped):
        centred = matrix.bits == 8 and isinstance(matrix.zeros, int) and matrix.zeros == 128 and matrix.minima is None
        in_order = matrix.group_index is None
        if how is None:
            form = NIBBLES if matrix.bits <= 4 else BYTES
        elif how.kind == "int8" and centred and in_order and (how.symmetric or how.group_size is None):
            form = INT8
    return None if form is None else form.value


def _block(matrix: StoredMatrix, form: int) -> int | None:
    """Return the number of inputs in a block: the largest power of 2 that divides all groups; None if the tensor cores
    need more."""
    inputs = matrix.shape[1]
    groups = [size for size in (_group(matrix), matrix.activations and matrix.activations.group_size) if size]
    if isinstance(matrix, Grouped) and matrix.group_index is not None and _order(matrix) is None:
        return None  # groups of different sizes
    of_all = math.gcd(*groups) if groups else inputs
    block = min(LARGEST_BLOCK, of_all & -of_all)
    least = 16 if form in (BYTES.value, FLOATS.value) else 32
    if block < least:
        return None if groups else least  # a single group may be padded
    return block


def _group(matrix: StoredMatrix) -> int:
    """Return the number of inputs in a group of weights; 0: all inputs are one group."""
    size = matrix.block[1] if isinstance(matrix, Float8) else matrix.group_size  # type: ignore[attr-defined]
    return 0 if size >= matrix.shape[1] else size


def _order(matrix: StoredMatrix) -> Tensor | None:
    """Return [in]: the inputs sorted by their groups; None if they are sorted already, or if groups differ in size."""
    if not isinstance(matrix, Grouped) or matrix.group_index is None:
        return None
    order = np.argsort(matrix.group_index, kind="stable")
    whole = np.array_equal(matrix.group_index[order], np.arange(len(order)) // matrix.group_size)
    return torch.from_numpy(order) if whole else None


class PackedMatrix(Matrix):
    """A matrix that stays packed, in the kernels' own layout."""

    def __init__(
        self,
        matrix: StoredMatrix,
        form: int,
        block: int,
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = matrix.shape
        self._form, self._block = form, block
        self._bias, self._dtype, self._activations = bias, dtype, matrix.activations
        self._x_group = (matrix.activations and matrix.activations.group_size) or 0
        order = _order(matrix)
        self._order = None if order is None else order.to(device)
        self._zero = 0
        self._zeros = self._minima = self._table = self._row_sums = None
        num_inputs = matrix.shape[1]
        unit = max(block, 2 * block if block < STEP else 0)  # small blocks are taken two at a time
        self._padded = -(-num_inputs // unit) * unit
        # A single group is scaled at the end, unless something else must be added to the sums of blocks.
        several = self._x_group or (isinstance(matrix, Grouped) and _has_sums(matrix))
        self._group = _group(matrix) or (self._padded if several else 0)
        self._codes = laid_out(matrix, form, block, self._padded, self._order, device)
        self._scales = self._by_group(_scales(matrix), device)
        if isinstance(matrix, Grouped):
            self._zero = matrix.zeros if isinstance(matrix.zeros, int) else 2 ** (matrix.bits - 1)
            if not isinstance(matrix.zeros, int):
                self._zeros = self._by_group(matrix.zeros, device)
            if matrix.minima is not None:
                self._minima = self._by_group(_expanded(matrix.minima, matrix.super_minima), device)
        if isinstance(matrix, Codebook4):
            self._table = torch.from_numpy(matrix.table).to(device, dtype)
        how = matrix.activations
        if how is not None and not how.symmetric:  # the contribution of 0, for asymmetric codes
            self._row_sums = torch.cat(
                [torch.from_numpy(matrix.rows(rows).sum(1, dtype=np.float32)) for rows in _pieces(matrix)]
            ).to(device)
        self.nbytes = sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def _by_group(self, values: Array, device: torch.device) -> Tensor:
        """Return [out, groups] as [groups, out] on the device, with the groups of padding."""
        by_group = torch.from_numpy(np.ascontiguousarray(values.T)).to(device)
        missing = -(-self._padded // self._group) - len(by_group) if self._group else 0
        return torch.nn.functional.pad(by_group, (0, 0, 0, missing))

    def __call__(self, x: Tensor) -> Tensor:
        rows, (num_outputs, num_inputs) = len(x), self.shape
        out = x.new_empty(rows, num_outputs)
        if rows == 0:
            return out
        group_scales = x_scales = x_zeros = None
        if self._activations is not None:
            x, x_scales, x_zeros = quantized(x, self._activations)
            if self._x_group:
                group_scales, x_scales = x_scales, None
        elif self._order is not None:
            x = x[:, self._order]
        options = tile_options(
            rows, self._form, self._dtype, self._block,
            sums=self._zeros is not None or self._minima is not None, several=self._group > 0,
            capability=_capability(x.device),
        )  # fmt: skip
        steps = self._padded // (self._block * options["BLOCKS_A_STEP"])
        tiles = triton.cdiv(num_outputs, options["TILE_OUT"]), triton.cdiv(rows, options["TILE_ROWS"])
        steps_a_split = _steps_a_split(tiles[0] * tiles[1], steps, _num_sms(x.device))
        splits = triton.cdiv(steps, steps_a_split)
        partial = torch.empty(splits if splits > 1 else 0, rows, num_outputs, dtype=torch.float32, device=x.device)
        finish = (x_scales, x_zeros, self._row_sums, self._bias)
        _multiply[(*tiles, splits)](
            x,
            self._codes,
            self._scales,
            self._zeros,
            self._minima,
            self._table,
            group_scales,
            *finish,
            out,
            partial,
            rows,
            num_outputs,
            num_inputs,
            x.stride(0),
            steps,
            steps_a_split,
            FORM=self._form,
            ZERO=self._zero,
            BLOCK=self._block,
            GROUP=self._group,
            X_GROUP=self._x_group,
            WHOLE=self._padded == num_inputs,
            **options,
        )
        if splits > 1:
            _sum[(triton.cdiv(num_outputs, SUMMED), rows)](
                partial, *finish, out, rows, num_outputs, splits, TILE=SUMMED, num_warps=2
            )
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weights of some outputs [n]: [n, in]."""
        blocks = self._padded // self._block
        found = torch.empty(len(ids), self.shape[1], dtype=self._dtype, device=ids.device)
        if len(ids):
            _look_up[(len(ids), blocks)](
                ids.long(), self._codes, self._scales, self._zeros, self._minima, self._table, found, *self.shape,
                FORM=self._form, ZERO=self._zero, BLOCK=self._block, GROUP=self._group, num_warps=1,
            )  # fmt: skip
        return found if self._order is None else found[:, self._order.argsort()]


def _has_sums(matrix: Grouped) -> bool:
    """Whether sums of inputs are added, times a number for each group."""
    return matrix.minima is not None or not isinstance(matrix.zeros, int)


def _scales(matrix: StoredMatrix) -> Array:
    """Return the scales [out, groups], combined with their super scales."""
    if isinstance(matrix, Float8):
        return matrix.by_output().scales
    assert isinstance(matrix, Grouped | Codebook4)
    return _expanded(matrix.scales, matrix.super_scales if isinstance(matrix, Grouped) else None)


def _expanded(values: Array, supers: Array | None) -> Array:
    """Return scales or minima [out, groups]: as stored, or multiplied by their super scales as float32."""
    if supers is None:
        return values
    wide: Array = values.astype(np.float32) * np.repeat(
        supers.astype(np.float32), values.shape[1] // supers.shape[1], 1
    )
    return wide


def _pieces(matrix: StoredMatrix) -> Iterator[slice]:
    """Yield slices of the matrix's outputs, a few at a time."""
    outputs, inputs = matrix.shape
    step = max(1, LOADED // inputs)
    return (slice(first, min(first + step, outputs)) for first in range(0, outputs, step))


def laid_out(
    matrix: StoredMatrix, form: int, block: int, padded: int, order: Tensor | None, device: torch.device
) -> Tensor:
    """Lay the codes out for `_multiply`: [blocks, out, block] int8 or float8, or [blocks, out, words] int32.

    A word holds the codes of 8 inputs of a run of 32 (4 bits), or of 4 of a run of 16 (8 bits): inputs 2t and 2t + 1,
    and the same pair after 8, 16 and 24. These are the numbers that thread t of four has in its registers of a
    product's left operand (PTX ISA, "Matrix Fragments for mma.m16n8k16"), two per register: the first of each pair is
    in the lower half of the word.
    """
    outputs, inputs = matrix.shape
    direct, bits = form in (INT8.value, FLOAT8.value), 4 if form in (NIBBLES.value, TABLE.value) else 8
    blocks, width = padded // block, block if direct else block * bits // 32
    codes = torch.empty(blocks, outputs, width, dtype=torch.uint8 if direct else torch.int32, device=device)
    for rows in _pieces(matrix):
        piece = _codes(matrix, rows).to(device)  # [rows, in]
        if order is not None:
            piece = piece[:, order]
        piece = torch.nn.functional.pad(piece, (0, padded - inputs)).view(len(piece), blocks, block)
        if form == INT8.value:
            piece = piece ^ 128  # minus 128, as an int8
        if not direct:
            steps = 32 // bits // 4  # steps of 16 inputs in a run
            piece = piece.view(len(piece), blocks, -1, steps, 2, 4, 2)  # row, block, run, s, h, t, p
            piece = piece.permute(0, 1, 2, 5, 6, 3, 4).reshape(*piece.shape[:2], width, 32 // bits).int()
            half = torch.arange(32 // bits, device=device)
            places = half % (16 // bits) * bits + half // (16 // bits) * 16  # p selects the half; s, h the place in it
            piece = (piece << places.int()).sum(3, dtype=torch.int64).int()
        codes[:, rows] = piece.transpose(0, 1)
    return codes.view({INT8.value: torch.int8, FLOAT8.value: torch.float8_e4m3fn}.get(form, codes.dtype))


def _codes(matrix: StoredMatrix, rows: slice) -> Tensor:
    """Return the codes [rows, in] uint8."""
    if isinstance(matrix, Float8):
        return torch.from_numpy(matrix.codes[rows])
    assert isinstance(matrix, Grouped | Codebook4)
    bits = matrix.bits if isinstance(matrix, Grouped) else 4
    return torch.from_numpy(np.ascontiguousarray(unpack(matrix.codes[rows], bits, matrix.shape[1])))


# --- The product -----------------------------------------------------------------------------------


def tile_options(
    rows: int, form: int, dtype: torch.dtype, block: int, *, sums: bool, several: bool, capability: int
) -> dict[str, int]:
    """Return tiles, warps and stages for a product with `rows` rows: at most four different kernels for each matrix.

    `sums`: whether inputs are summed, too. `several`: whether there are several groups. `capability`: the GPU's, times
    ten.
    """
    if dtype == torch.float32 and form not in (INT8.value, FLOAT8.value):  # for comparisons, not for serving
        options = {"BLOCKS_A_STEP": 1, "TILE_OUT": 64, "TILE_ROWS": 16 if rows <= 16 else 32}
        return options | {"num_warps": 4, "num_stages": 2}
    # Three accumulators, or the left operand in mma.sync's layout, take the registers that 128 rows would need.
    # (Blackwell has separate memory for accumulators; there, three of them spill with 64 rows.)
    in_own_memory = capability // 10 == 10
    crowded = (sums and not in_own_memory) or not _multiplies_from_shared_memory(capability)
    sizes = [16, 32, 64] if crowded or (form == FLOAT8.value and several) else [16, 32, 64, 128]
    if sums and in_own_memory:
        sizes.remove(64)
    tile_rows = next((size for size in sizes if rows <= size), sizes[-1])
    return {
        "BLOCKS_A_STEP": 2 if tile_rows == 16 and block < STEP else 1,
        "TILE_OUT": 128,
        "TILE_ROWS": tile_rows,
        "num_warps": 8 if tile_rows > 32 else 4,
        "num_stages": 4 if tile_rows <= 32 else 3,
    }


def _steps_a_split(tiles: int, steps: int, num_sms: int) -> int:
    """Return the number of loop iterations per split, such that there are programs for all multiprocessors."""
    splits = max(1, min(PROGRAMS_PER_SM * num_sms // tiles, steps // MIN_STEPS, MAX_SPLITS))
    return -(-steps // splits)


@triton.jit(do_not_specialize=["rows", "steps", "steps_a_split"])
def _multiply(
    x,  # [rows, inputs]
    codes,  # [blocks, outputs, BLOCK or words]
    scales,  # [groups, outputs]
    zeros,  # like scales, or None
    minima,  # like scales, or None
    table,  # [16], or None
    group_scales,  # [rows, groups of X_GROUP inputs] float32, or None
    x_scales,  # [rows] float32, or None
    x_zeros,  # [rows] float32, or None
    row_sums,  # [outputs] float32, or None
    bias,  # [outputs], or None
    out,  # [rows, outputs]
    partial,  # [splits, rows, outputs] float32
    rows,
    outputs,
    inputs,
    x_stride,
    steps,
    steps_a_split,
    FORM: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    X_GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCKS_A_STEP: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """One program per (tile of outputs, tile of rows, split) computes a tile of the product, over the split's
    inputs."""
    n = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)  # [TILE_OUT]
    m = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)  # [TILE_ROWS]
    split = tl.program_id(2)
    total = tl.zeros([TILE_OUT, TILE_ROWS], tl.int32 if FORM == INT8 and GROUP == 0 else tl.float32)
    SUMS: tl.constexpr = zeros is not None or minima is not None
    for step in range(split * steps_a_split, tl.minimum((split + 1) * steps_a_split, steps)):
        block = step * BLOCKS_A_STEP
        part, sums = _of_block(
            x, codes, table, total, n, m, block, rows, outputs, inputs, x_stride,
            FORM, ZERO, BLOCK, GROUP, WHOLE, TILE_OUT, SUMS,
        )  # fmt: skip
        if GROUP == 0:
            total = part
        if BLOCKS_A_STEP == 2:  # before the first is scaled, so that the tensor cores need not wait
            part_2, sums_2 = _of_block(
                x, codes, table, total, n, m, block + 1, rows, outputs, inputs, x_stride,
                FORM, ZERO, BLOCK, GROUP, WHOLE, TILE_OUT, SUMS,
            )  # fmt: skip
            if GROUP == 0:
                total = part_2
        if GROUP > 0:
            total = _scaled(
                total, part, sums, scales, zeros, minima, group_scales, n, m, block, rows, outputs, inputs,
                ZERO, BLOCK, GROUP, X_GROUP,
            )  # fmt: skip
            if BLOCKS_A_STEP == 2:
                total = _scaled(
                    total, part_2, sums_2, scales, zeros, minima, group_scales, n, m, block + 1, rows, outputs, inputs,
                    ZERO, BLOCK, GROUP, X_GROUP,
                )  # fmt: skip
    y = total.to(tl.float32)
    if GROUP == 0:
        y *= tl.load(scales + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    exists = (n < outputs)[:, None] & (m < rows)[None, :]
    if tl.num_programs(2) > 1:
        at = (split * rows + m).to(tl.int64)[None, :] * outputs + n[:, None]
        tl.store(partial + at, y, mask=exists)
    else:
        y = _finished(y, x_scales, x_zeros, row_sums, bias, n[:, None], m[None, :], outputs, rows)
        at = m.to(tl.int64)[None, :] * outputs + n[:, None]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=exists)


@triton.jit
def _of_block(
    x, codes, table, total, n, m, block, rows, outputs, inputs, x_stride,
    FORM: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE_OUT: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Return the products with the codes of one block [TILE_OUT, TILE_ROWS], and the sums of the inputs in the same
    shape. If all inputs are one group, the products are added to the total.

    Sums are products with ones: the tensor cores have spare time, and leave the sums in all threads, which need them.
    Other sums would have to be exchanged between threads.
    """
    k = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    wanted = (m < rows)[None, :]
    if not WHOLE:
        wanted = wanted & (k < inputs)[:, None]
    columns = tl.load(x + m.to(tl.int64)[None, :] * x_stride + k[:, None], mask=wanted, other=0.0)  # [BLOCK, TILE_ROWS]
    WIDTH: tl.constexpr = BLOCK if FORM >= INT8 else BLOCK // (8 if FORM == NIBBLES or FORM == TABLE else 4)
    at = (block.to(tl.int64) * outputs + n)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    code = tl.load(codes + at, mask=(n < outputs)[:, None], other=0.0)  # [TILE_OUT, WIDTH]
    if FORM >= INT8:
        weights = code
    else:
        weights = _decoded(code, table, FORM, ZERO, BLOCK, TILE_OUT, x.dtype.element_ty)  # [TILE_OUT, BLOCK]
    if FORM == INT8:
        if GROUP == 0:
            part = tl.dot(weights, columns, total, out_dtype=tl.int32)
        else:
            part = tl.dot(weights, columns, out_dtype=tl.int32).to(tl.float32)
    elif FORM == FLOAT8:
        part = tl.dot(weights, columns)
        if GROUP == 0:
            part = total + part
    else:
        if GROUP == 0:
            part = tl.dot(weights, columns, total, input_precision="ieee")
        else:
            part = tl.dot(weights, columns, input_precision="ieee")
    sums = part
    if SUMS:
        sums = tl.dot(tl.full([TILE_OUT, BLOCK], 1, x.dtype.element_ty), columns, input_precision="ieee")
    return part, sums


@triton.jit
def _scaled(
    total, part, sums, scales, zeros, minima, group_scales, n, m, block, rows, outputs, inputs,
    ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    X_GROUP: tl.constexpr,
):  # fmt: skip
    """Add a block to the total. The products of its inputs with codes minus ZERO are multiplied by the codes' scale.
    The sums of its inputs are multiplied by what the group's own zero and minimum add to each code."""
    at = (block * BLOCK // GROUP).to(tl.int64) * outputs + n
    if group_scales is not None:
        x_groups = (inputs + X_GROUP - 1) // X_GROUP
        x_group = block * BLOCK // X_GROUP
        exists = (m < rows) & (x_group < x_groups)  # the last blocks may be padding
        part *= tl.load(group_scales + m.to(tl.int64) * x_groups + x_group, mask=exists, other=0.0)[None, :]
    scale = tl.load(scales + at, mask=n < outputs, other=0.0).to(tl.float32)
    total += part * scale[:, None]
    if zeros is not None or minima is not None:
        minimum = tl.zeros_like(scale)
        if zeros is not None:
            minimum += (ZERO - tl.load(zeros + at, mask=n < outputs, other=0).to(tl.float32)) * scale
        if minima is not None:
            minimum += tl.load(minima + at, mask=n < outputs, other=0.0).to(tl.float32)
        total += minimum[:, None] * sums
    return total


@triton.jit
def _decoded(
    words, table, FORM: tl.constexpr, ZERO: tl.constexpr, BLOCK: tl.constexpr, OUTPUTS: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Decode words [OUTPUTS, words] to numbers of `dtype` [OUTPUTS, BLOCK], minus ZERO."""
    words = words.to(tl.uint32, bitcast=True)
    if FORM == NIBBLES:
        if dtype == tl.bfloat16:
            bits = _of_nibbles(words, 0x43004300, BLOCK, OUTPUTS)
            return bits.to(tl.bfloat16, bitcast=True) - tl.full([1, 1], 128 + ZERO, tl.bfloat16)
        else:
            bits = _of_nibbles(words, 0x64006400, BLOCK, OUTPUTS)
            return (bits.to(tl.float16, bitcast=True) - tl.full([1, 1], 1024 + ZERO, tl.float16)).to(dtype)
    elif FORM == TABLE:
        return tl.load(table + _of_nibbles(words, 0, BLOCK, OUTPUTS).to(tl.int32))
    elif FORM == BYTES:  # a bfloat16 has too few bits for them below its leading bit
        first, second = words & 0x00FF00FF, (words >> 8) & 0x00FF00FF
        bits = _of_bytes(first | 0x64006400, second | 0x64006400, BLOCK, OUTPUTS)
        return (bits.to(tl.float16, bitcast=True) - tl.full([1, 1], 1024 + ZERO, tl.float16)).to(dtype)
    else:  # keeps the exponent's bits; a power of 2 corrects its bias, subnormals too
        first, second = (words << 8) & 0x80008000, words & 0x80008000
        if dtype == tl.bfloat16:
            first, second = first | ((words << 4) & 0x07F007F0), second | ((words >> 4) & 0x07F007F0)
            bits = _of_bytes(first, second, BLOCK, OUTPUTS)
            return bits.to(tl.bfloat16, bitcast=True) * tl.full([1, 1], 2.0**120, tl.bfloat16)
        else:
            first, second = first | ((words << 7) & 0x3F803F80), second | ((words >> 1) & 0x3F803F80)
            bits = _of_bytes(first, second, BLOCK, OUTPUTS)
            return (bits.to(tl.float16, bitcast=True) * tl.full([1, 1], 256, tl.float16)).to(dtype)


@triton.jit
def _of_nibbles(words, MAGIC: tl.constexpr, BLOCK: tl.constexpr, OUTPUTS: tl.constexpr):
    """Unpack [OUTPUTS, words] uint32 to [OUTPUTS, BLOCK] uint16: each code with the magic bits, in its place
    (`laid_out`)."""
    MASK: tl.constexpr = 0x000F000F
    first = tl.join(_halves(words & MASK | MAGIC), _halves((words >> 4) & MASK | MAGIC))  # [OUTPUTS, words, p, h]
    second = tl.join(_halves((words >> 8) & MASK | MAGIC), _halves((words >> 12) & MASK | MAGIC))
    pairs = tl.reshape(tl.join(first, second), [OUTPUTS, BLOCK // 32, 4, 2, 2, 2])  # [OUTPUTS, run, t, p, h, s]
    return tl.reshape(tl.permute(pairs, [0, 1, 5, 4, 2, 3]), [OUTPUTS, BLOCK])


@triton.jit
def _of_bytes(first, second, BLOCK: tl.constexpr, OUTPUTS: tl.constexpr):
    """Unpack words of two codes each [OUTPUTS, words] uint32 to [OUTPUTS, BLOCK] uint16."""
    pairs = tl.join(_halves(first), _halves(second))  # [OUTPUTS, words, p, h]
    pairs = tl.reshape(pairs, [OUTPUTS, BLOCK // 16, 4, 2, 2])  # [OUTPUTS, run, t, p, h]
    return tl.reshape(tl.permute(pairs, [0, 1, 4, 2, 3]), [OUTPUTS, BLOCK])


@triton.jit
def _halves(words):
    """Split [..., words] uint32 into [..., words, 2] uint16: lower and upper halves."""
    return tl.join((words & 0xFFFF).to(tl.uint16), (words >> 16).to(tl.uint16))


@triton.jit
def _finished(y, x_scales, x_zeros, sums, bias, n, m, outputs, rows):
    """Finish sums over all inputs: subtract the contribution of the inputs' codes of 0, apply their scales, add the
    bias."""
    if x_zeros is not None:
        of_zero = tl.load(sums + n, mask=n < outputs, other=0.0)
        y -= of_zero * tl.load(x_zeros + m, mask=m < rows, other=0.0)
    if x_scales is not None:
        y *= tl.load(x_scales + m, mask=m < rows, other=0.0)
    if bias is not None:
        y += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    return y


@triton.jit(do_not_specialize=["rows", "splits"])
def _sum(partial, x_scales, x_zeros, sums, bias, out, rows, outputs, splits, TILE: tl.constexpr):
    """One program per (tile of outputs, row) adds up the splits, always in the same order."""
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    m = tl.program_id(1)
    y = tl.zeros([TILE], tl.float32)
    for split in range(splits):
        y += tl.load(partial + (split * rows + m).to(tl.int64) * outputs + n, mask=n < outputs, other=0.0)
    y = _finished(y, x_scales, x_zeros, sums, bias, n, m + tl.zeros([1], tl.int32), outputs, rows)
    tl.store(out + m.to(tl.int64) * outputs + n, y.to(out.dtype.element_ty), mask=n < outputs)


@triton.jit(do_not_specialize=["ids"])
def _look_up(
    ids, codes, scales, zeros, minima, table, found, outputs, inputs,
    FORM: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """One program per (token, block) decodes one block of inputs of one output's weights."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    n = tl.load(ids + token) + tl.zeros([1], tl.int64)  # [1]
    k = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    WIDTH: tl.constexpr = BLOCK if FORM >= INT8 else BLOCK // (8 if FORM == NIBBLES or FORM == TABLE else 4)
    code = tl.load(codes + (block.to(tl.int64) * outputs + n)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
    group = block * BLOCK // (GROUP if GROUP else 2**30)
    at = group.to(tl.int64) * outputs + n
    if FORM >= INT8:
        weights = code.to(tl.float32)
    else:
        weights = _decoded(code, table, FORM, ZERO, BLOCK, 1, found.dtype.element_ty).to(tl.float32)  # [1, BLOCK]
    if zeros is not None:
        weights += ZERO - tl.load(zeros + at).to(tl.float32)[:, None]
    weights = weights * tl.load(scales + at).to(tl.float32)[:, None]
    if minima is not None:
        weights += tl.load(minima + at).to(tl.float32)[:, None]
    weights = weights.to(found.dtype.element_ty)
    tl.store(found + token * inputs + k[None, :], weights, mask=(k < inputs)[None, :])


# --- Inputs that are quantized too -----------------------------------------------------------------


def quantized(x: Tensor, how: Activations) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the codes of inputs x [tokens, in] (int8, or float8), their scales [tokens, groups] float32, and their
    codes of 0 [tokens] float32, or None if symmetric. The arithmetic is that of `Activations`."""
    tokens, inputs = x.shape
    size = how.group_size or inputs
    groups = triton.cdiv(inputs, size)
    is_float8 = how.kind == "float8"
    codes = torch.empty(tokens, inputs, dtype=torch.uint8, device=x.device)
    scales = torch.empty(tokens, groups, dtype=torch.float32, device=x.device)
    zeros = None if how.symmetric or is_float8 else torch.empty(tokens, dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(size)
    _quantize[(tokens, groups)](
        x, codes, scales, zeros, x.stride(0), 0.0 if how.scale is None else how.scale, how.zero,
        INPUTS=inputs, SIZE=size, WIDTH=width, IS_FLOAT8=is_float8, FOUND=how.scale is None,
        num_warps=min(16, max(1, width // 256)), enable_fp_fusion=False,
    )  # fmt: skip
    return codes.view(torch.float8_e4m3fn if is_float8 else torch.int8), scales, zeros


@triton.jit(do_not_specialize=["zero"])
def _quantize(
    x, codes, scales, zeros, x_stride, scale, zero,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    FOUND: tl.constexpr,
):  # fmt: skip
    """One program per (token, group) computes the group's scale and codes."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    i = tl.arange(0, WIDTH)  # [WIDTH]
    k = group * SIZE + i
    exists = (i < SIZE) & (k < INPUTS)
    row = tl.load(x + token * x_stride + k, mask=exists, other=0.0).to(tl.float32)
    origin = zero.to(tl.float32)
    if FOUND:
        low, high = tl.minimum(tl.min(row, 0), 0.0), tl.maximum(tl.max(row, 0), 0.0)
        if zeros is None:
            scale = tl.div_rn(tl.maximum(-low, high), 448.0 if IS_FLOAT8 else 127.5)
            scale = tl.maximum(scale, 1.1920928955078125e-07)
        else:
            scale = tl.maximum(tl.div_rn(high - low, 255.0), 1.1920928955078125e-07)
            origin = _nearest(tl.clamp(-128.0 - tl.div_rn(low, scale), -128.0, 127.0))
    if tl.sum((row != row).to(tl.int32), 0) > 0:  # NaN has no code, but must not get lost
        scale = float("nan")
    tl.store(scales + token * tl.num_programs(1) + group, scale)
    if zeros is not None:
        tl.store(zeros + token, origin)
    steps = tl.div_rn(row, scale + tl.zeros([WIDTH], tl.float32))
    if IS_FLOAT8:
        code = _as_float8(tl.clamp(steps, -448.0, 448.0))
    else:
        if zeros is not None:
            steps += origin
        code = _nearest(tl.clamp(steps, -128.0, 127.0)).to(tl.int32) & 0xFF
    tl.store(codes + token * INPUTS + k, code.to(tl.uint8), mask=exists)


@triton.jit
def _nearest(values):
    """Round to integers, ties to even. Adding 1.5 * 2**23 leaves no bits for a fraction, and subtracting it restores
    the number."""
    return (values + 12582912.0) - 12582912.0


@triton.jit
def _as_float8(values):
    """Return the bits of the nearest floats of 8 bits (e4m3), for values within ±448. (A conversion would be simpler,
    but is wrong in Triton's interpreter.)"""
    bits = values.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # Drop 20 of the fraction's 23 bits, ties to even. A carry raises the exponent, whose bias is 7 instead of 127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the spacing is 2^-9.
    small = _nearest(tl.abs(values) * 512.0).to(tl.uint32)
    return sign | tl.where(size < 0x3C800000, small, normal)


def _has_float8(device: torch.device) -> bool:
    """Whether the tensor cores multiply floats of 8 bits. (Triton's interpreter does.)"""
    return not is_gpu(device) or _capability(device) >= 89
