"""Matrix products on the packed weights of a quantized checkpoint, which stay as small in memory as in the file.

Decoding one token waits for the weights to be read from memory, and 4 bits arrive sooner than 16. Unpacking them must
not take longer than that. So a matrix is laid out again, once, while it is loaded: 16 rows form a *tile* and are
interleaved. Each of the 16 lanes of a vector of 512 bits belongs to one row, and a sum over the inputs never crosses
lanes.

    4 bits   a lane has 8 codes: inputs 0, 2, 4, 6 in the lower 16 bits, 1, 3, 5, 7 in the upper 16
    8 bits   a byte for each row, input after input

Codes of 4 bits are looked up. After a shift by 4 i, one instruction (vpermw) takes the lowest 5 bits of each half lane
as an index into a table of 32 entries (the 16 values, twice, because the fifth bit belongs to the next code). That
gives 16 rows times 2 inputs in bfloat16. One more instruction (vdpbf16ps) multiplies them by 2 inputs of a token and
adds both products to float32 sums, one for each row: three instructions for 32 weights. Each lookup serves 8 tokens.
Codes are integers of up to 8 bits, so bfloat16 represents them exactly, and float32 the products. Scale, zero and
minimum are applied in float32, once per group:

    y += (sum(q * x) - z * sum(x)) * s + m * sum(x)

So the result is nearer to the exact product than one with weights that are rounded to bfloat16. (In a bfloat16 model
the table of a `Codebook4` is rounded to bfloat16, as all weights are.) Weights are not rounded to the type of the tool
that made the matrix (`StoredMatrix.rounding`), except in `rows`.

The codes and factors of a group are stored together, and groups follow each other, so that memory is read in one
stream. (With a tile's scales stored after all of its codes, one thread read 8 GB/s instead of 20.)

Speed relative to the same matrices in bfloat16 (`llama.DenseMatrix`, which was used for bfloat16 then): all matrices of
SmolLM2-135M once, as its Q4_1 file has them (groups of 32; the head in 8 bits, left out at 512 tokens). AMD EPYC (Zen
4), one thread, its own CPU time, the best of several turns, while other work was running (`benchmarks/packed.py`
measures with all threads):

| | 1 token | 2 | 4 | 8 | 32 | 512 |
|---|---|---|---|---|---|---|
| packed | 5.1 ms | 6.2 | 8.1 | 14.3 | 51 | 602 |
| times as fast as bfloat16 | 2.3 | 3.7 | 2.0 | 1.6 | 1.01 | 0.88 |

(One matrix of 8192 x 2048 in groups of 64, one token: 26 GB/s of packed weights; torch's product with 4 bits: 10.)

For many tokens a product is bound by arithmetic. The instruction multiplies as fast as those of oneDNN; scale and
minimum take an eighth of the time with groups of 32.

Processors with AVX512_BF16 have these instructions (AMD Zen 4, Intel Cooper Lake and Sapphire Rapids). With AVX512
alone, and for models in float32, kernels multiply 16 floats at a time; on other processors they are plain loops.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg, attr-defined"

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from torch import Tensor

from minipaged.fast.cpu.attention import FASTMATH
from minipaged.fast.cpu.bfloat16 import Array, array_at, as_array, float_of_bits, narrow, widen
from minipaged.fast.cpu.kernel_cache import inner, kernel
from minipaged.fast.cpu.product import check_inputs
from minipaged.fast.cpu.vectors import (
    BITS32,
    BITS64,
    BYTES,
    FLOATS,
    HALVES,
    INTEGERS,
    LANES,
    PAIRS,
    Vectors,
    number_type,
)
from minipaged.fast.kernels import Matrix
from minipaged.models.quantized.stored import Codebook4, Float8, Grouped, StoredMatrix, e4m3_values, round_to, unpack

ROWS = LANES
"""The number of rows of a tile: the number of float32 sums in a vector."""
STEP = 8
"""The number of inputs that are laid out together: a lane's codes of 4 bits. Groups are padded to a multiple of it."""
TOKENS = (8, 4, 2, 1)
"""The numbers of tokens that can share a lookup. More tokens take several such blocks. (12 are 2 % faster than 8.)"""
CHAINS = 4
"""The number of sums that additions alternate between if there are few tokens: an addition takes 6 cycles, but a new
one can begin in each cycle."""
FEW = 4
"""The most tokens whose inputs one thread prepares before a second one would have woken up."""
AT_ONCE = 2**21
"""The number of weights that are unpacked at a time while a matrix is laid out."""
E4M3_BITS, E4M3_SCALE = 0x87F00000, 2.0**120
"""The mask and factor that decode a float of 8 bits (sign, 4 bits of exponent, 3 of fraction). Sign-extended to 32 bits
and shifted left by 20, it has its bits where float32 has them. The mask removes the copies of the sign, and the factor
corrects the exponent's bias."""
LINE, ALIGNMENT = 64, 32
"""In bytes: a cache line, at which every matrix begins, and the alignment of pieces."""


class Room:
    """Memory for many matrices, in large pieces, which get large pages from the system (see `llama.linears`). The
    system provides memory only for pages that are written."""

    SIZE = 2**25
    """The number of bytes of a piece."""

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def take(self, size: int) -> Array:
        """Return an array [size] uint8 that begins at a cache line."""
        if size > len(self._free) - LINE:
            self._free = np.empty(max(size, self.SIZE) + LINE, np.uint8)
        first = -self._free.ctypes.data % LINE
        taken, self._free = self._free[first : first + size], self._free[first + size :]
        return taken


class PackedLayout(NamedTuple):
    """The sizes, offsets and addresses of a packed matrix, as its kernels need them."""

    num_inputs: int
    num_pieces: int
    piece: int
    """The number of inputs of a piece."""
    num_tiles: int
    piece_bytes: int
    has_half: int
    """1 if scales and minima are float16, 0 if they are float32."""
    scales: int
    """The offset of the scales in a piece, in bytes. `zeros` and `minima` are offsets too, or 0 if there are none."""
    zeros: int
    minima: int
    places: int
    """The address of the input at each place of the pieces, [pieces * piece] int32. 0 if the inputs are in order."""
    bias: int
    """The address of the bias [tiles * ROWS] float32, or 0 if there is none."""
    table: int
    """The address of the values of 4-bit codes, twice, as bfloat16 or float32."""
    tiles: int
    """The address of the tiles."""


class PackedMatrix(Matrix):
    """A quantized matrix [out, in], prepared for products, and its bias [out] if it has one.

    It is stored as records [tiles, pieces]. A record has codes [steps, ROWS], scales [ROWS], and zeros and minima
    [ROWS] if the matrix has them. A *piece* is a set of inputs with the same scale: a group, or a part of one
    (`pieces_of`).
    """

    def __init__(self, matrix: StoredMatrix, bias: Tensor | None, dtype: torch.dtype, room: Room | None = None) -> None:
        """`dtype`: the type of inputs and products, bfloat16 or float32. If `matrix` needs quantized inputs, the caller
        quantizes them."""
        num_rows, num_inputs = matrix.shape
        self.shape, self.dtype, self._rounding = matrix.shape, dtype, matrix.rounding
        self._number = number_type(dtype)
        self._table = table_of(matrix)
        places, groups = pieces_of(matrix)
        (num_pieces, self._piece), width = places.shape, places.size
        self._places = None if np.array_equal(places.ravel(), np.arange(num_inputs)) else places.ravel()

        types_of_parts = {name: part.dtype for name, part in parts_of(matrix, slice(0, 0)).items()}
        code, steps = types_of_parts.pop("codes"), places.shape[1]
        if self._table is not None:
            code, steps = np.dtype(np.uint32), steps // STEP
        fields: list[Any] = [("codes", code, (steps, ROWS))]
        factors = {kind for name, kind in types_of_parts.items() if name != "zeros"}
        has_half = factors == {np.dtype(np.float16)} and self._number is not None
        factor = np.dtype(np.float16 if has_half else np.float32)
        fields += [(name, kind if name == "zeros" else factor, (ROWS,)) for name, kind in types_of_parts.items()]
        fields.append(("filled", np.dtype(np.uint8), (-np.dtype(fields).itemsize % ALIGNMENT,)))
        record = np.dtype(fields)
        self._names = [name for name, *_ in fields[:-1]]

        num_tiles = -(-num_rows // ROWS)
        self.nbytes = num_tiles * num_pieces * record.itemsize
        memory = (Room() if room is None else room).take(self.nbytes)
        self._tiles = memory.view(record).reshape(num_tiles, num_pieces)
        at_once = max(1, AT_ONCE // (width * ROWS))
        for first in range(0, num_tiles, at_once):
            self._fill(matrix, slice(first, min(first + at_once, num_tiles)), groups)

        starts = {name: at for name, (_, at, *_) in dict(record.fields or {}).items()}
        self._bias = None
        if bias is not None:
            self._bias = np.zeros(num_tiles * ROWS, np.float32)
            self._bias[:num_rows] = bias.float().numpy()
        table = np.zeros(0) if self._table is None else self._table
        self._looked_up = np.tile(table, 2).astype(np.float32)
        if isinstance(self._number, np.uint16):
            self._looked_up = as_array(torch.from_numpy(self._looked_up).bfloat16())
        addresses = (0 if array is None else array.ctypes.data for array in (self._places, self._bias))
        layout = PackedLayout(
            *(num_inputs, *places.shape, num_tiles, record.itemsize, int(has_half)),
            *(starts.get(name, 0) for name in ("scales", "zeros", "minima")),
            *(*addresses, self._looked_up.ctypes.data, self._tiles.ctypes.data),
        )
        like = np.zeros(1, np.uint16 if dtype == torch.bfloat16 else np.float32)[0]
        self._arguments = (layout, like, self._number, np.zeros(1, code)[0])

    def __call__(self, x: Tensor) -> Tensor:
        num_rows, num_inputs = self.shape
        check_inputs(x, num_inputs, self.dtype)
        out = torch.empty(len(x), num_rows + -num_rows % ROWS, dtype=self.dtype)
        x = x.contiguous()
        _multiply(x.data_ptr(), len(x), out.data_ptr(), numba.get_num_threads(), *self._arguments)
        return out if out.shape[1] == num_rows else out[:, :num_rows].contiguous()

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [n] with the values that the checkpoint defines: [n, in] of the model's type."""
        tiles, lanes = np.divmod(ids.numpy(), ROWS)
        parts = {name: self._tiles[name][tiles, ..., lanes] for name in self._names}
        codes = parts["codes"]  # [n, pieces, steps]
        if self._table is not None:
            shifts = np.array([4 * (i // 2) + 16 * (i % 2) for i in range(STEP)], np.uint32)
            weights = self._table[codes[..., None] >> shifts & np.uint32(15)]  # [n, pieces, steps, STEP]
        else:
            weights = e4m3_values()[codes] if codes.dtype == np.uint8 else codes.astype(np.float32)
        weights = weights.reshape(*parts["scales"].shape, self._piece)  # [n, pieces, inputs of a piece]
        if "zeros" in parts:
            weights -= parts["zeros"][:, :, None]
        weights *= parts["scales"].astype(np.float32)[:, :, None]
        if "minima" in parts:
            weights += parts["minima"].astype(np.float32)[:, :, None]
        weights = round_to(weights.reshape(len(codes), codes.shape[1] * self._piece), self._rounding)
        if self._places is not None:
            ordered = np.empty((len(codes), self.shape[1]), np.float32)
            real = self._places >= 0
            ordered[:, self._places[real]] = weights[:, real]
            weights = ordered
        return torch.from_numpy(weights).to(self.dtype)

    def _fill(self, matrix: StoredMatrix, which: slice, groups: Array) -> None:
        """Lay out some tiles. `groups`: each piece's group [pieces]."""
        tiles = self._tiles[which]
        for name, part in parts_of(matrix, slice(which.start * ROWS, which.stop * ROWS)).items():
            if name == "codes" and self._places is not None:
                part = np.where(self._places >= 0, part[:, self._places], part.dtype.type(0))
            elif name != "codes":
                part = part[:, groups]
            filled = np.zeros((len(tiles) * ROWS, part.shape[1]), part.dtype)  # rows that the last tile lacks stay 0
            filled[: len(part)] = part
            if name == "codes" and self._table is not None:
                filled = lanes_of(filled)
            shape = tiles[name].shape  # [tiles, pieces, (steps,) ROWS]
            tiles[name] = np.moveaxis(filled.reshape(shape[0], ROWS, *shape[1:-1]), 1, -1)


def pieces_of(matrix: StoredMatrix) -> tuple[Array, Array]:
    """Return the inputs of each piece [pieces, inputs of a piece] int32, -1 for padding, and its group [pieces]."""
    num_inputs = matrix.shape[1]
    size = matrix.block[1] if isinstance(matrix, Float8) else matrix.group_size
    size = max(1, min(size, num_inputs))
    groups = np.arange(num_inputs) // size  # [in]
    if isinstance(matrix, Grouped) and matrix.group_index is not None:
        groups = matrix.group_index
    # A smaller last group would need padding, and padding needs a copy of every token. Smaller pieces avoid both.
    common = math.gcd(size, num_inputs)
    size = common if common % 32 == 0 else -(-size // STEP) * STEP
    pieces, groups_of_pieces = [], []
    order = np.argsort(groups, kind="stable")
    for inputs in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):  # the inputs of one group
        for first in range(0, len(inputs), size):
            piece = np.full(size, -1, np.int32)
            piece[: len(inputs) - first] = inputs[first : first + size]
            pieces.append(piece)
            groups_of_pieces.append(groups[inputs[0]])
    return np.array(pieces).reshape(-1, size), np.array(groups_of_pieces, np.int64)


def table_of(matrix: StoredMatrix) -> Array | None:
    """Return the values of 4-bit codes before the scale [16] float32, or None if the codes have 8 bits. (Codes of 2 and
    3 bits are stored as 4, those of 5 and 6 as 8.)"""
    if isinstance(matrix, Codebook4):
        return matrix.table
    if isinstance(matrix, Grouped) and matrix.bits <= 4:
        return np.arange(16, dtype=np.float32) - np.float32(taken_off(matrix))
    return None


def taken_off(matrix: Grouped) -> int:
    """Return the integer that is subtracted from all codes: the matrix's zero, if it is one for all and 8-bit codes
    minus it fit int8. Otherwise 0 for 4-bit codes and 128 for 8-bit codes; the groups' zeros hold the rest."""
    if matrix.bits <= 4:
        return matrix.zeros if isinstance(matrix.zeros, int) else 0
    fits = isinstance(matrix.zeros, int) and 2**matrix.bits - 128 <= matrix.zeros <= 128
    return int(matrix.zeros) if fits else 128


def parts_of(matrix: StoredMatrix, rows: slice) -> dict[str, Array]:
    """Return the parts of some rows: codes [rows, in], scales [rows, groups], and zeros (int8) and minima [rows,
    groups] if the matrix has them.

    Codes are uint8, except that integers of more than 4 bits are int8.
    """
    if isinstance(matrix, Codebook4):
        return {"codes": unpack(matrix.codes[rows], 4, matrix.shape[1]), "scales": matrix.scales[rows]}
    if isinstance(matrix, Float8):
        outputs = np.arange(matrix.shape[0])[rows] // matrix.block[0]  # [rows], the block of each
        codes, scales = matrix.codes[rows], matrix.scales[outputs]
        row, place = np.nonzero(codes & np.uint8(0x7F) == 0x7F)
        scales[row, place // matrix.block[1]] = np.nan  # NaN codes become NaN scales: kernels need no check
        return {"codes": codes, "scales": scales}
    assert isinstance(matrix, Grouped)
    codes, off = unpack(matrix.codes[rows], matrix.bits, matrix.shape[1]), taken_off(matrix)
    parts = {"codes": codes if matrix.bits <= 4 else (codes - np.uint8(off)).view(np.int8)}
    parts["scales"] = multiplied(matrix.scales, matrix.super_scales, rows)
    if not isinstance(matrix.zeros, int):
        parts["zeros"] = (matrix.zeros[rows].astype(np.int16) - off).astype(np.int8)
    elif matrix.zeros != off:
        parts["zeros"] = np.full(parts["scales"].shape, matrix.zeros - off, np.int8)
    if matrix.minima is not None:
        parts["minima"] = multiplied(matrix.minima, matrix.super_minima, rows)
    return parts


def multiplied(values: Array, supers: Array | None, rows: slice) -> Array:
    """Return scales or minima of some rows, as stored, or as float32 if they are multiplied by super-scales."""
    if supers is None:
        return values[rows]
    factors = supers[rows].astype(np.float32)  # [rows, super]
    each = values.shape[1] // supers.shape[1]
    return values[rows].astype(np.float32) * np.repeat(factors, each, axis=1)


def lanes_of(codes: Array) -> Array:
    """Pack codes of 4 bits [rows, in] uint8 into lanes [rows, in / STEP] uint32. Even inputs go to the lower half, odd
    ones to the upper half, in rising order from the lowest bits on."""
    steps = codes.reshape(len(codes), -1, STEP)
    packed = np.empty((*steps.shape[:2], 4), np.uint8)  # the bytes of a lane
    packed[:, :, :2] = steps[:, :, 0::4] | steps[:, :, 2::4] << np.uint8(4)
    packed[:, :, 2:] = steps[:, :, 1::4] | steps[:, :, 3::4] << np.uint8(4)
    return packed.view(np.uint32)[:, :, 0]


# --- The product ----------------------------------------------------------------------------------


@kernel(parallel=True)
def _multiply(x_address, tokens, out_address, num_threads, layout, like, number, code):
    """x [tokens, in] and out [tokens, tiles * ROWS] have the type of `like`. The type of `number` is the one to
    multiply in (`number_type`). The type of `code` says what codes are: 4 bits (uint32), integers of 8 bits (int8), or
    floats of 8 bits (uint8)."""
    is_copied = layout.places != 0 or _differ(number, like)
    copy = _empty(tokens * layout.num_pieces * layout.piece if is_copied else 0, number)
    sums = np.empty(tokens * layout.num_pieces if layout.zeros or layout.minima else 0, np.float32)
    if len(copy) or len(sums):
        _prepare(x_address, tokens, layout, copy, sums, like)
    for thread in prange(num_threads):
        x = np.int64(copy.ctypes.data) if is_copied else x_address
        for tile in range(layout.num_tiles * thread // num_threads, layout.num_tiles * (thread + 1) // num_threads):
            _multiply_tile(tile, x, tokens, sums.ctypes.data, out_address, layout, like, number, code)


@kernel(parallel=True)
def _prepare(x_address, tokens, layout, copy, sums, like):
    """Write the kernel's arguments: inputs in the order of the pieces and in the type to multiply in, and the sum of
    each piece. `copy` and `sums` are empty if they are not needed."""
    if tokens <= FEW:
        for t in range(tokens):
            _prepare_token(x_address, t, layout, copy, sums, like)
    else:
        for t in prange(tokens):
            _prepare_token(x_address, t, layout, copy, sums, like)


@inner(fastmath=FASTMATH)
def _prepare_token(x_address, token, layout, copy, sums, like):
    width = layout.num_pieces * layout.piece
    x = array_at(x_address, (token + 1) * layout.num_inputs, like)[token * layout.num_inputs :]
    to = copy[token * width : (token + 1) * width]
    if len(to) and layout.places:
        places = array_at(layout.places, width, np.int32(0))
        for i in range(width):
            to[i] = _converted(x[places[i]], to[0]) if places[i] >= 0 else 0
    elif len(to):
        for i in range(width):
            to[i] = _converted(x[i], to[0])
    for p in range(layout.num_pieces if len(sums) else 0):
        total = np.float32(0)
        if len(to):
            for i in range(p * layout.piece, (p + 1) * layout.piece):
                total += widen(to[i])
        else:
            for i in range(p * layout.piece, (p + 1) * layout.piece):
                total += widen(x[i])
        sums[token * layout.num_pieces + p] = total


def _multiply_tile(tile, x, tokens, sums, out, layout, like, number, code) -> None:
    """Multiply one tile by all tokens. Only for compiled code.

    `x` [tokens, pieces * piece] of the type of `number`, `sums` [tokens, pieces] float32, and `out` [tokens, tiles,
    ROWS] of the type of `like` are addresses.
    """
    raise NotImplementedError("for compiled code")


def _itemsize(like: Any) -> int:
    """Return the number of bytes of a number of this type."""
    raise NotImplementedError("for compiled code")


@overload(_itemsize)
def _itemsize_of(like):
    size = like.bitwidth // 8
    return lambda like: size


def _differ(one: Any, other: Any) -> bool:
    """Return whether two numbers have different types."""
    raise NotImplementedError("for compiled code")


@overload(_differ)
def _differ_in_type(one, other):
    differ = one != other
    return lambda one, other: differ


def _empty(size: Any, like: Any) -> Any:
    """Return an uninitialized array [size] of the type of `like`, or float32 if that is None."""
    raise NotImplementedError("for compiled code")


@overload(_empty)
def _empty_like(size, like):
    dtype = np.uint16 if like == types.uint16 else np.float32
    return lambda size, like: np.empty(size, dtype)


def _converted(value: Any, like: Any) -> Any:
    """Convert an input to the type that the kernel multiplies in."""
    raise NotImplementedError("for compiled code")


@overload(_converted, inline="always")
def _convert(value, like):
    return (lambda value, like: value) if value == like else (lambda value, like: widen(value))


@overload(_multiply_tile, jit_options={"fastmath": FASTMATH})
def _tile_kernel(tile, x, tokens, sums, out, layout, like, number, code):
    if isinstance(number, types.NoneType):
        return _multiply_tile_plainly
    return lambda tile, x, tokens, sums, out, layout, like, number, code: _multiply_tile_by_instructions(
        tile, x, tokens, sums, out, layout, like, number, code
    )


def _multiply_tile_plainly(tile, x, tokens, sums, out, layout, like, number, code):
    """Multiply without vector instructions: decode 8 inputs of 16 rows to floats, then multiply them by each token."""
    pieces, piece = layout.num_pieces, layout.piece
    inputs, sums_of_x = (
        array_at(x, tokens * pieces * piece, np.float32(0)),
        array_at(sums, tokens * pieces, np.float32(0)),
    )
    totals, products = np.zeros((tokens, ROWS), np.float32), np.empty((tokens, ROWS), np.float32)
    weights, looked_up = np.empty((STEP, ROWS), np.float32), array_at(layout.table, 16, np.float32(0))
    for p in range(pieces):
        place = layout.tiles + (tile * pieces + p) * layout.piece_bytes
        for t in range(tokens):
            for r in range(ROWS):
                products[t, r] = 0
        for step in range(piece // STEP):
            _decode(place, step, code, looked_up, weights)
            for t in range(tokens):
                first = (t * pieces + p) * piece + step * STEP
                for r in range(ROWS):
                    product = products[t, r]
                    for i in range(STEP):
                        product += weights[i, r] * inputs[first + i]
                    products[t, r] = product
        scale, least = (
            array_at(place + layout.scales, ROWS, np.float32(0)),
            array_at(place + layout.minima, ROWS, np.float32(0)),
        )
        zero = array_at(place + layout.zeros, ROWS, np.int8(0))
        for t in range(tokens):
            for r in range(ROWS):
                product = products[t, r]
                if layout.zeros:
                    product -= np.float32(zero[r]) * sums_of_x[t * pieces + p]
                product *= scale[r]
                if layout.minima:
                    product += least[r] * sums_of_x[t * pieces + p]
                totals[t, r] += product
    bias = array_at(layout.bias + tile * ROWS * 4, ROWS, np.float32(0))
    for t in range(tokens):
        to = array_at(out + (t * layout.num_tiles + tile) * ROWS * _itemsize(like), ROWS, like)
        for r in range(ROWS):
            to[r] = narrow(totals[t, r] + (bias[r] if layout.bias else np.float32(0)), like)


def _decode(piece: Any, step: Any, code: Any, table: Any, weights: Any) -> None:
    """Decode the weights [STEP, ROWS] of STEP inputs of a tile, before the scale. Only for compiled code."""
    raise NotImplementedError("for compiled code")


@overload(_decode)
def _decode_step(piece, step, code, table, weights):
    def nibbles(piece, step, code, table, weights):
        lanes = array_at(piece + step * ROWS * 4, ROWS, code)
        is_whole = True  # the values are consecutive integers, which need no lookup
        for i in range(16):
            is_whole &= table[i] == table[0] + np.float32(i)
        for i in range(STEP):
            shift = np.uint32(4 * (i // 2) + 16 * (i % 2))
            if is_whole:
                for r in range(ROWS):
                    weights[i, r] = np.float32(np.int32((lanes[r] >> shift) & np.uint32(15))) + table[0]
            else:
                for r in range(ROWS):
                    weights[i, r] = table[(lanes[r] >> shift) & np.uint32(15)]

    def bytes_(piece, step, code, table, weights):
        codes = array_at(piece + step * STEP * ROWS, STEP * ROWS, code)
        for i in range(STEP):
            for r in range(ROWS):
                weights[i, r] = _float_of(codes[i * ROWS + r])

    return nibbles if code == types.uint32 else bytes_


def _float_of(code: Any) -> Any:
    """Decode a code of 8 bits, before the scale. Only for compiled code."""
    raise NotImplementedError("for compiled code")


@overload(_float_of, inline="always")
def _float_of_code(code):
    if code == types.int8:
        return lambda code: np.float32(code)
    bits, scale = np.uint32(E4M3_BITS), np.float32(E4M3_SCALE)
    return lambda code: float_of_bits(np.uint32(np.int32(np.int8(code)) << np.int32(20)) & bits) * scale


# --- Vector instructions --------------------------------------------------------------------------


@intrinsic
def _multiply_tile_by_instructions(typingctx, tile, x, tokens, sums, out, layout, like, number, code):
    """See `_multiply_tile`."""

    def codegen(context, builder, signature, arguments):
        *numbers, layout = arguments[:6]
        TileKernel(builder, *numbers, PackedLayout(*cgutils.unpack_tuple(builder, layout)), like, number, code).write()
        return context.get_dummy_value()

    return types.none(*[types.int64] * 5, layout, like, number, code), codegen


class TileKernel(Vectors):
    """Writes the product of a tile and all tokens as LLVM code.

    A vector has one number for each of 16 rows, or two, of neighbouring inputs, to be multiplied in pairs.
    """

    def __init__(self, builder, tile, x, tokens, sums, out, layout, like, number, code) -> None:
        """`tile` to `layout` are values in the LLVM program. `like` to `code` are types."""
        super().__init__(builder)
        self.layout = layout
        self.tile, self.x, self.tokens, self.sums, self.out = tile, x, tokens, sums, out
        self.code, self.in_pairs, self.rounds = code, number == types.uint16, like == types.uint16
        self.input_bytes = 2 if self.in_pairs else 4
        self.values = self.load(layout.table, PAIRS if self.in_pairs else FLOATS) if code == types.uint32 else None

    def write(self) -> None:
        b = self.builder
        done = BITS64(0)
        for count in TOKENS:
            blocks = b.udiv(b.sub(self.tokens, done), BITS64(count))
            with cgutils.for_range(b, blocks) as loop:
                first = b.add(done, b.mul(loop.index, BITS64(count)))
                tokens = [b.add(first, BITS64(t)) for t in range(count)]
                width = b.mul(self.layout.num_pieces, self.layout.piece)
                inputs = [self.place(self.x, b.mul(t, width), self.input_bytes) for t in tokens]
                sums = [self.place(self.sums, b.mul(t, self.layout.num_pieces), 4) for t in tokens]
                totals = [self.variable() for _ in tokens]
                with self.where(self.layout.bias):
                    for total in totals:
                        b.store(self.load(self.place(self.layout.bias, self.tile, 4 * ROWS), FLOATS), total)
                with cgutils.for_range(b, self.layout.num_pieces) as pieces:
                    self.add_piece(pieces.index, inputs, sums, totals)
                for token, total in zip(tokens, totals, strict=True):
                    values = self.as_bfloats(b.load(total)) if self.rounds else b.load(total)
                    place = b.add(b.mul(token, self.layout.num_tiles), self.tile)
                    to = self.place(self.out, place, ROWS * (2 if self.rounds else 4))
                    b.store(values, b.inttoptr(to, values.type.as_pointer()), align=2)
            done = b.add(done, b.mul(blocks, BITS64(count)))

    def add_piece(self, piece, inputs, sums, totals) -> None:
        """Add a piece's products to `totals`. `inputs`, `sums`: the address of each token's inputs and sums."""
        b = self.builder
        chains = [[self.variable() for _ in range(min(CHAINS, max(TOKENS) // len(inputs)))] for _ in inputs]
        steps = b.udiv(self.layout.piece, BITS64(STEP))
        first = b.mul(self.tile, self.layout.num_pieces)
        codes = b.add(self.layout.tiles, b.mul(b.add(first, piece), self.layout.piece_bytes))
        with cgutils.for_range(b, steps) as loop:
            step = b.add(b.mul(piece, steps), loop.index)
            at = self.place(codes, loop.index, ROWS * (4 if self.code == types.uint32 else STEP))
            self.add_step(at, [self.place(x, step, STEP * self.input_bytes) for x in inputs], chains)
        products = [chain[0] for chain in chains]
        for chain in chains:
            b.store(functools.reduce(b.fadd, map(b.load, chain)), chain[0])
        with self.where(self.layout.zeros):
            zero = b.sitofp(self.load(b.add(codes, self.layout.zeros), BYTES), FLOATS)
            self.add_sums(b.fneg(zero), piece, sums, products)
        scale = self.scale(b.add(codes, self.layout.scales))
        for product, total in zip(products, totals, strict=True):
            self.add_product(total, b.load(product), scale)
        with self.where(self.layout.minima):
            self.add_sums(self.scale(b.add(codes, self.layout.minima)), piece, sums, totals)

    def add_step(self, codes, inputs, chains) -> None:
        """Add the products of 8 inputs to each token's chain of sums. `codes` and `inputs` are addresses."""
        together = 2 if self.in_pairs else 1
        for i in range(0, STEP, together):
            weights = self.pairs(codes, i) if self.in_pairs else self.weights(codes, i)
            for address, chain in zip(inputs, chains, strict=True):
                x = self.spread(self.load(address, BITS32 if self.in_pairs else ir.FloatType(), self.input_bytes * i))
                self.add_product(chain[i // together % len(chain)], weights, x)

    def pairs(self, codes, i):
        """Return the weights of inputs i and i + 1 in bfloat16, interleaved."""
        b = self.builder
        if self.code == types.uint32:
            places = b.lshr(self.load(codes, PAIRS), self.all_of(PAIRS, 2 * i))
            return self.call("llvm.x86.avx512.permvar.hi.512", PAIRS, self.values, places)
        low, high = (b.bitcast(self.weights(codes, j), INTEGERS) for j in (i, i + 1))
        return b.bitcast(b.or_(b.lshr(low, self.all_of(INTEGERS, 16)), high), PAIRS)  # 8 bits fit: no bit is lost

    def weights(self, codes, i):
        """Return the weights of input i in float32, before the scale."""
        b = self.builder
        if self.code == types.uint32:
            shift = self.all_of(INTEGERS, 4 * (i // 2) + 16 * (i % 2))
            return self.call(
                "llvm.x86.avx512.permvar.sf.512", FLOATS, self.values, b.lshr(self.load(codes, INTEGERS), shift)
            )
        each = b.sext(self.load(codes, BYTES, ROWS * i), INTEGERS)
        if self.code == types.int8:
            return b.sitofp(each, FLOATS)
        bits = b.and_(b.shl(each, self.all_of(INTEGERS, 20)), self.all_of(INTEGERS, E4M3_BITS))
        return b.fmul(b.bitcast(bits, FLOATS), self.all_of(FLOATS, E4M3_SCALE))

    def add_sums(self, factor, piece, sums, variables) -> None:
        """Add a factor times the sum of the piece's inputs to each token's variable."""
        for each, variable in zip(sums, variables, strict=True):
            x = self.spread(self.load(self.place(each, piece, 4), ir.FloatType()))
            self.add_product(variable, factor, x)

    def scale(self, address):
        """Return the scales or minima of a piece in float32."""
        b, scale = self.builder, self.variable()
        with b.if_else(b.trunc(self.layout.has_half, ir.IntType(1))) as (half, whole):
            with half:
                b.store(b.fpext(self.load(address, HALVES), FLOATS), scale)
            with whole:
                b.store(self.load(address, FLOATS), scale)
        return b.load(scale)
