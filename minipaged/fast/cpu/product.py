"""Matrix products with the processor's own instructions, for any number of tokens, in bfloat16 and float32.

The weights are kept once, in tiles of 32 rows. A tile has the first two inputs of all its rows, then the next two, and
so on, so that a vector holds a pair of inputs for each of 16 rows. In bfloat16 one instruction (vdpbf16ps) multiplies
it by two inputs of a token and adds both products to 16 float32 sums, one for each row. The sums of 14 tokens by 32
rows stay in registers while the tile is read once, from its beginning to its end. So with 14 tokens each weight is
loaded once and multiplied 14 times. With a few tokens, reading the weights from memory is the limit. Each number of
tokens up to 14 has its own code, so that a tile is read once for 3 or 5 tokens too.

In float32 the weights are bfloat16 too if nothing is lost, as in a model that was published so. A vector of pairs is
then widened to two vectors of float32. One token reads half the memory, and the result is the same.

Each sum adds its products pair by pair: in float32 in the order of the inputs, in bfloat16 the second product of a
pair before the first. It does not depend on the other tokens of the batch, nor on the number of threads: a token gets
the same bits alone and among others. vdpbf16ps takes subnormal inputs and weights for 0 and makes subnormal sums 0
(below 2**-126). In float32 they count.

The four matrices of all 30 layers of SmolLM2-135M once, in milliseconds, on 2 cores of an AMD EPYC (Zen 4). The
library's way is `llama.DenseMatrix`: a loop over rows for one token, oneDNN for more. bfloat16: the best of 6 turns;
float32: of 3. For AVX2, numba and oneDNN were told to use nothing newer.

| tokens | 1 | 4 | 8 | 14 | 24 | 56 | 512 |
|---|---|---|---|---|---|---|---|
| bfloat16, in tiles | 5.7 | 6.6 | 8.2 | 11.4 | 18.2 | 35.4 | 285 |
| the library's | 8.7 | 10.6 | 12.4 | 15.2 | 20.1 | 41.3 | 275 |
| float32, in tiles of bfloat16 | 7.3 | 8.4 | 12.7 | 18.6 | 28.8 | 67.0 | 541 |
| in tiles of float32 | 13.6 | 13.8 | 14.7 | 19.2 | 28.2 | 64.3 | 528 |
| the library's | 17.7 | 19.7 | 21.0 | 26.0 | 34.6 | 66.0 | 511 |
| AVX2, in tiles of bfloat16 | 5.8 | 10.3 | 16.4 | 23.2 | 32.8 | 84.3 | 558 |
| in tiles of float32 | 9.2 | 17.6 | 24.2 | 32.2 | 42.0 | 103 | 568 |
| the library's | 10.6 to 14.8 | 26.8 | 31.9 | 37.5 | 46.4 | 97.7 | 562 |

On a processor where the library is clearly faster, it multiplies (`measured.py`). docs/tuning.md ("Matrices in tiles")
has what was tried.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg, attr-defined"

from __future__ import annotations

from typing import Any, ClassVar

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from minipaged.fast.cpu.bfloat16 import array_at, as_array
from minipaged.fast.cpu.kernel_cache import inner, kernel
from minipaged.fast.cpu.vectors import (
    BITS32,
    BITS64,
    FLOATS,
    HAS_FMA,
    HAS_VECTORS,
    INTEGERS,
    LANES,
    PAIRS,
    Vectors,
    number_type,
)
from minipaged.fast.kernels import Matrix

ROWS = 2 * LANES
"""The number of rows of a tile."""
VECTORS = 2 if HAS_VECTORS else 1
"""The number of vectors of rows whose sums share the registers."""
PAIRS_TOGETHER, FLOATS_TOGETHER = 14, 12 if HAS_VECTORS else 6
"""The most tokens whose sums share the registers, in bfloat16 and in float32. 14 times 2 sums, 2 vectors of weights and
a pair of inputs fill 31 registers of 32. Widening weights takes a few more. With vectors of 256 bits, one of 16 rows
takes 2 of 16 registers: 6 sums, a vector of weights and an input fill 15."""
GROUP_BLOCKS = 4
"""The number of blocks for which a thread reads a tile before the next one. Their inputs stay in its cache."""


class TiledMatrix(Matrix):
    """A matrix [out, in] in tiles, and its bias [out] if it has one."""

    def __init__(self, weight: Tensor, bias: Tensor | None, room: np.ndarray[Any, Any]) -> None:
        """`weight`: [out, in] float32 or bfloat16. `room`: [`num_bytes(weight)`] uint8, which will hold the tiles."""
        self.shape = len(weight), weight.shape[1]
        self.bias = bias
        self._like = as_array(weight[:1, :1])[0, 0]
        self.item_bytes = len(room) // _num_places(weight)
        """Bytes of a weight: 2 for bfloat16, 4 for float32."""
        # [tiles, pairs, ROWS, 2], in this order in bfloat16. In float32 the first inputs of all rows come first.
        if self.item_bytes == 2:
            tiles = torch.from_numpy(room).view(torch.bfloat16).view(_num_tiles(len(weight)), -1, ROWS, 2)
        else:
            tiles = torch.from_numpy(room).view(torch.float32).view(_num_tiles(len(weight)), -1, 2, ROWS).mT
        self._tiles, self.nbytes, self.address = tiles, tiles.nbytes, tiles.data_ptr()
        self._dtype = weight.dtype
        pairs, odd = divmod(weight.shape[1], 2)
        for tile, part in zip(tiles, weight.split(ROWS), strict=True):
            if odd or len(part) < ROWS:
                tile.zero_()
            tile[:pairs, : len(part)] = part[:, : 2 * pairs].reshape(len(part), pairs, 2).transpose(0, 1)
            if odd:
                tile[pairs, : len(part), 0] = part[:, -1]

    def rows(self, ids: Tensor) -> Tensor:
        tiles = self._tiles.view(torch.int32) if self.item_bytes == 2 else self._tiles  # copies a pair as one number
        found = tiles[ids // ROWS, :, ids % ROWS].view(self._tiles.dtype)  # [n, pairs, 2]
        return found.flatten(1)[:, : self.shape[1]].to(self._dtype).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        check_inputs(x, self.shape[1], self._dtype)
        x, out = x.contiguous(), torch.empty(len(x), self.shape[0], dtype=x.dtype)
        threads = numba.get_num_threads()
        multiply_tiles(
            *(x.data_ptr(), len(x), self.address, self.item_bytes, *self.shape, self._like, threads, out.data_ptr())
        )
        return out if self.bias is None else out.add_(self.bias)


def check_inputs(x: Tensor, size: int, dtype: torch.dtype) -> None:
    """Raise ValueError if x is not [tokens, size] of this dtype: a kernel would read other memory. It takes 0.5 µs."""
    if x.dtype != dtype or x.ndim != 2 or x.shape[1] != size:
        raise ValueError(
            f"the inputs of a product are {[*x.shape]} in {x.dtype}, but its matrix has {size} columns and multiplies "
            f"{dtype}; pass [tokens, {size}] in {dtype}"
        )


def can_multiply_tiles(dtype: torch.dtype) -> bool:
    """Whether this processor has instructions for tiles with inputs of this type."""
    return isinstance(number_type(dtype), np.uint16) if dtype == torch.bfloat16 else HAS_FMA


def num_bytes(weight: Tensor) -> int:
    """The number of bytes that a matrix [out, in] takes in tiles: 2 for each weight if it is bfloat16, or float32
    without any more bits; else 4."""
    if weight.dtype == torch.bfloat16:
        return 2 * _num_places(weight)
    lower_halves = weight.contiguous().numpy().view(np.uint16)[:, ::2]
    return (4 if lower_halves.any() else 2) * _num_places(weight)


def _num_places(weight: Tensor) -> int:
    """The number of weights for which the tiles of a matrix have room."""
    return _num_tiles(len(weight)) * ROWS * (weight.shape[1] + weight.shape[1] % 2)


def _num_tiles(rows: int) -> int:
    return -(-rows // ROWS)


@kernel(parallel=True)
def multiply_tiles(x_address, tokens, tiles_address, item_bytes, rows, inputs, like, num_threads, out_address):
    """Multiply x [tokens, inputs] by a matrix in tiles to out [tokens, rows], both of the type of `like`. Each is
    passed as an address, because making an array of it takes microseconds."""
    x = array_at(x_address, tokens * inputs, like).reshape(tokens, inputs)
    pairs = (inputs + 1) // 2
    by_pair = np.empty(2 * tokens * pairs, x.dtype)  # block after block: [pairs, tokens of the block, 2]
    most = PAIRS_TOGETHER if x.itemsize == 2 else FLOATS_TOGETHER
    whole = tokens // most
    if whole > GROUP_BLOCKS:
        for block in prange(whole):
            _arrange(x, block * most, most, by_pair)
    else:
        for block in range(whole):
            _arrange(x, block * most, most, by_pair)
    token = whole * most
    while token < tokens:
        token += _arrange(x, token, min(most, tokens - token), by_pair)
    num_tiles = (rows + ROWS - 1) // ROWS
    for thread in prange(num_threads):
        begin = _part_at(thread, num_threads, num_tiles, tokens, GROUP_BLOCKS * most)
        end = _part_at(thread + 1, num_threads, num_tiles, tokens, GROUP_BLOCKS * most)
        _multiply_parts(
            *(begin, end, by_pair.ctypes.data, tokens, most),
            *(tiles_address, item_bytes, num_tiles, rows, pairs, like, out_address),
        )


@inner()
def _part_at(thread, num_threads, num_tiles, tokens, group):
    """The first part of a thread. A part is a tile for a group of tokens; the last group may be small, so each thread
    gets an equal number of products of a tile and a token."""
    products = num_tiles * tokens * thread // num_threads
    before = products // (num_tiles * group)  # groups
    size = max(1, min(group, tokens - before * group))
    return before * num_tiles + (products - before * num_tiles * group) // size


@inner()
def _arrange(x, first, size, by_pair):
    """Write the inputs of a block of tokens, pair after pair. Returns the size of the block."""
    inputs = x.shape[1]
    to = first * (inputs + inputs % 2)
    for pair in range(inputs // 2):
        for token in range(first, first + size):
            by_pair[to], by_pair[to + 1] = x[token, 2 * pair], x[token, 2 * pair + 1]
            to += 2
    if inputs % 2:
        for token in range(first, first + size):
            by_pair[to], by_pair[to + 1] = x[token, inputs - 1], 0
            to += 2
    return size


@inner()
def _multiply_parts(begin, end, x, tokens, most, tiles, item_bytes, num_tiles, rows, pairs, like, out):
    """Multiply tiles by groups of tokens: parts `begin` to `end` - 1, all tiles of a group one after another."""
    last = np.empty((most, ROWS), array_at(out, 1, like).dtype)  # of a tile that is not full
    size_of = last.itemsize
    for part in range(begin, end):
        tile, token = part % num_tiles, part // num_tiles * GROUP_BLOCKS * most
        there = min(ROWS, rows - tile * ROWS)
        past = min(tokens, token + GROUP_BLOCKS * most)
        while token < past:
            size: Any = min(most, past - token)
            to, stride = out + size_of * (token * rows + tile * ROWS), size_of * rows
            if there < ROWS:
                to, stride = np.int64(last.ctypes.data), np.int64(size_of * ROWS)
            first_weight, first_input = tiles + tile * pairs * 2 * ROWS * item_bytes, x + token * pairs * 2 * size_of
            _multiply_block(size, item_bytes, first_weight, first_input, pairs, to, stride, like)
            if there < ROWS:
                for i in range(size):
                    row = array_at(out + size_of * ((token + i) * rows + tile * ROWS), there, like)
                    for j in range(there):
                        row[j] = last[i, j]
            token += size


@intrinsic
def _multiply_block(typingctx, size, item_bytes, tile, x, pairs, out, stride, like):
    """Multiply a tile by a block of `size` tokens, whose sums share the registers. tile, x and out are addresses;
    `stride`: bytes from one token of `out` to the next."""
    if like == types.uint16:
        products: dict[int, type[Product]] = {2: PairProduct}
        most = PAIRS_TOGETHER
    else:
        products = {2: WideningProduct, 4: FloatProduct}
        most = FLOATS_TOGETHER

    def codegen(context, builder, signature, arguments):
        for count in range(most, 0, -1):  # with the smallest first, LLVM makes code for 14 that takes 5 / 4 of the time
            for bytes_of_weight, product in products.items():
                is_it = builder.and_(
                    builder.icmp_unsigned("==", arguments[0], BITS64(count)),
                    builder.icmp_unsigned("==", arguments[1], BITS64(bytes_of_weight)),
                )
                with builder.if_then(is_it):
                    product(builder).write(count, *arguments[2:-1])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 7, like), codegen


class Product(Vectors):
    """Writes the product of a tile and a block of tokens as LLVM code."""

    input_bytes: ClassVar[int]
    """The size of an input and of a result."""
    weight_bytes: ClassVar[int]

    def write(self, count, tile, x, pairs, out, stride) -> None:
        together = VECTORS if count > 2 else ROWS // LANES  # sums of one or two tokens leave registers free
        for first in range(0, ROWS // LANES, together):
            self.write_rows(range(first, first + together), count, tile, x, pairs, out, stride)

    def write_rows(self, vectors, count, tile, x, pairs, out, stride) -> None:
        """Write the product of some of the tile's vectors of rows."""
        b = self.builder
        sums = [[self.variable() for _ in vectors] for _ in range(count)]
        with cgutils.for_range(b, pairs) as loop:
            weights = self.place(tile, loop.index, 2 * ROWS * self.weight_bytes)
            inputs = self.place(x, loop.index, 2 * count * self.input_bytes)
            self.add_pair(weights, vectors, inputs, sums)
        for token, totals in enumerate(sums):
            to = b.add(out, b.mul(stride, BITS64(token)))
            for i, total in zip(vectors, totals, strict=True):
                self.store(self.rounded(b.load(total)), to, i * LANES * self.input_bytes)

    def add_pair(self, weights, vectors, inputs, sums) -> None:
        """Add the products of the tokens' next two inputs. weights, inputs: addresses."""
        raise NotImplementedError

    def add(self, weights, x, totals) -> None:
        """Add the products of one token's input, or two of them."""
        for total, vector in zip(totals, weights, strict=True):
            self.add_product(total, vector, self.spread(x))

    def rounded(self, x):
        return x


class PairProduct(Product):
    """The product in bfloat16: one instruction multiplies both inputs of a pair."""

    input_bytes = weight_bytes = 2

    def add_pair(self, weights, vectors, inputs, sums) -> None:
        both = [self.load(weights, PAIRS, 4 * LANES * i) for i in vectors]
        for token, totals in enumerate(sums):
            self.add(both, self.load(inputs, BITS32, 4 * token), totals)

    def rounded(self, x):
        return self.as_bfloats(x)


class FloatProduct(Product):
    """The product in float32."""

    input_bytes = weight_bytes = 4

    def add_pair(self, weights, vectors, inputs, sums) -> None:
        for number in range(2):
            wide = [self.weights(weights, i, number) for i in vectors]
            for token, totals in enumerate(sums):
                self.add(wide, self.load(inputs, ir.FloatType(), 4 * (2 * token + number)), totals)

    def weights(self, address, vector, number):
        """Return weights of 16 rows for one of two inputs."""
        return self.load(address, FLOATS, 4 * (number * ROWS + vector * LANES))


class WideningProduct(FloatProduct):
    """The product of inputs in float32 and weights in bfloat16, which a shift or a mask turns into float32."""

    weight_bytes = 2

    def weights(self, address, vector, number):
        b, both = self.builder, self.load(address, INTEGERS, 4 * LANES * vector)
        bits = b.and_(both, self.all_of(INTEGERS, 0xFFFF0000)) if number else b.shl(both, self.all_of(INTEGERS, 16))
        return b.bitcast(bits, FLOATS)
