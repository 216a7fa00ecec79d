"""Matrix products in bfloat16 with the processor's own instructions, for any number of tokens.

The weights are kept once, in tiles of 32 rows. A tile has the first two inputs of all its rows, then the next two, and
so on, so that a vector holds a pair of inputs for each of 16 rows. One instruction (vdpbf16ps) multiplies it by two
inputs of a token and adds both products to 16 float32 sums, one for each row. The sums of 14 tokens by 32 rows stay in
registers while the tile is read once, from its beginning to its end. So with 14 tokens each weight is loaded once and
multiplied 14 times. With a few tokens, reading the weights from memory is the limit.

Each sum adds its products in the order of the inputs. It does not depend on the other tokens of the batch, nor on the
number of threads: a token gets the same bits alone and among others.

The four matrices of all 30 layers of SmolLM2-135M once, in milliseconds, on 2 cores of an AMD EPYC (Zen 4), the best of
6 turns with the library's way (`llama.DenseMatrix`):

| tokens | 1 | 2 | 4 | 8 | 14 | 24 | 32 | 56 | 512 |
|---|---|---|---|---|---|---|---|---|---|
| in tiles | 5.7 | 5.7 | 6.6 | 8.2 | 11.4 | 18.2 | 22.3 | 35.4 | 285 |
| a loop over rows; oneDNN from 2 tokens on | 8.7 | 13.1 | 10.6 | 12.4 | 15.2 | 20.1 | 24.4 | 41.3 | 275 |

docs/tuning.md ("Matrices in tiles") has what was tried.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg, attr-defined"

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from minipaged.fast.cpu.bfloat16 import array_at
from minipaged.fast.cpu.kernel_cache import inner, kernel
from minipaged.fast.cpu.vectors import BITS32, BITS64, LANES, PAIRS, Vectors
from minipaged.fast.kernels import Matrix

ROWS = 2 * LANES
"""The number of rows of a tile."""
BLOCKS = (14, 8, 4, 2, 1)
"""How many tokens can share the registers. 14 times 2 sums, 2 vectors of weights and a pair of inputs fill 31 of 32."""
GROUP = 4 * BLOCKS[0]
"""The number of tokens for which a thread reads a tile before the next one. Their inputs stay in its cache."""
PAIR_BYTES, TILE_BYTES = 4, 4 * ROWS
"""The size of two inputs of a token, and of the weights of a tile for them."""


class TiledMatrix(Matrix):
    """A matrix [out, in] of bfloat16 in tiles, and its bias [out] if it has one."""

    def __init__(self, weight: Tensor, bias: Tensor | None, room: np.ndarray[Any, Any]) -> None:
        """`weight`: [out, in] bfloat16. `room`: [`num_elements(out, in)`] uint16, which will hold the tiles."""
        self.shape = len(weight), weight.shape[1]
        self.bias = bias
        self._tiles = torch.from_numpy(room).view(torch.bfloat16).view(_num_tiles(len(weight)), -1, ROWS, 2)
        self.nbytes = self._tiles.nbytes
        self.address = self._tiles.data_ptr()
        pairs, odd = divmod(weight.shape[1], 2)
        for tile, part in zip(self._tiles, weight.split(ROWS), strict=True):
            if odd or len(part) < ROWS:
                tile.zero_()
            tile[:pairs, : len(part)] = part[:, : 2 * pairs].reshape(len(part), pairs, 2).transpose(0, 1)
            if odd:
                tile[pairs, : len(part), 0] = part[:, -1]

    def rows(self, ids: Tensor) -> Tensor:
        return self._tiles[ids // ROWS, :, ids % ROWS].flatten(1)[:, : self.shape[1]].contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        x, out = x.contiguous(), torch.empty(len(x), self.shape[0], dtype=x.dtype)
        multiply_tiles(x.data_ptr(), len(x), self.address, *self.shape, numba.get_num_threads(), out.data_ptr())
        return out if self.bias is None else out.add_(self.bias)


def num_elements(rows: int, inputs: int) -> int:
    """The number of bfloat16 that a matrix takes in tiles."""
    return _num_tiles(rows) * ROWS * (inputs + inputs % 2)


def _num_tiles(rows: int) -> int:
    return -(-rows // ROWS)


@kernel(parallel=True)
def multiply_tiles(x_address, tokens, tiles_address, rows, inputs, num_threads, out_address):
    """Multiply x [tokens, inputs] by a matrix in tiles to out [tokens, rows], all bfloat16. Each is passed as an
    address, because making an array of it takes microseconds."""
    x = array_at(x_address, tokens * inputs, np.uint16(0)).reshape(tokens, inputs)
    pairs = (inputs + 1) // 2
    by_pair = np.empty(tokens * pairs, np.uint32)  # block after block: [pairs, tokens of the block]
    whole = tokens // BLOCKS[0]
    if tokens > GROUP:
        for block in prange(whole):
            _arrange(x, block * BLOCKS[0], BLOCKS[0], by_pair)
    else:
        for block in range(whole):
            _arrange(x, block * BLOCKS[0], BLOCKS[0], by_pair)
    token = whole * BLOCKS[0]
    while token < tokens:
        token += _arrange(x, token, _block_size(tokens - token), by_pair)
    num_tiles = (rows + ROWS - 1) // ROWS
    for thread in prange(num_threads):
        begin = _part_at(thread, num_threads, num_tiles, tokens)
        end = _part_at(thread + 1, num_threads, num_tiles, tokens)
        _multiply_parts(begin, end, by_pair.ctypes.data, tokens, tiles_address, num_tiles, rows, pairs, out_address)


@inner()
def _part_at(thread, num_threads, num_tiles, tokens):
    """The first part of a thread. A part is a tile for a group of tokens; the last group may be small, so each thread
    gets an equal number of products of a tile and a token."""
    products = num_tiles * tokens * thread // num_threads
    group = products // (num_tiles * GROUP)
    size = max(1, min(GROUP, tokens - group * GROUP))
    return group * num_tiles + (products - group * num_tiles * GROUP) // size


@inner()
def _block_size(tokens):
    """The number of tokens of the next block, if `tokens` are left."""
    size = BLOCKS[0]
    for smaller in BLOCKS[1:]:
        if size > tokens:
            size = smaller
    return size


@inner()
def _arrange(x, first, size, by_pair):
    """Write the inputs of a block of tokens, pair after pair. Returns the size of the block."""
    inputs = x.shape[1]
    to = first * ((inputs + 1) // 2)
    for pair in range(inputs // 2):
        for token in range(first, first + size):
            by_pair[to] = np.uint32(x[token, 2 * pair]) | np.uint32(x[token, 2 * pair + 1]) << np.uint32(16)
            to += 1
    if inputs % 2:
        for token in range(first, first + size):
            by_pair[to] = np.uint32(x[token, inputs - 1])
            to += 1
    return size


@inner()
def _multiply_parts(begin, end, x, tokens, tiles, num_tiles, rows, pairs, out):
    """Multiply tiles by groups of tokens: parts `begin` to `end` - 1, all tiles of a group one after another."""
    last = np.empty((BLOCKS[0], ROWS), np.uint16)  # of a tile that is not full
    for part in range(begin, end):
        tile, token = part % num_tiles, part // num_tiles * GROUP
        there = min(ROWS, rows - tile * ROWS)
        past = min(tokens, token + GROUP)
        while token < past:
            size: Any = _block_size(past - token)
            to, stride = out + 2 * (token * rows + tile * ROWS), 2 * rows
            if there < ROWS:
                to, stride = np.int64(last.ctypes.data), np.int64(2 * ROWS)
            _multiply_block(size, tiles + tile * pairs * TILE_BYTES, x + token * pairs * PAIR_BYTES, pairs, to, stride)
            if there < ROWS:
                for i in range(size):
                    row = array_at(out + 2 * ((token + i) * rows + tile * ROWS), there, np.uint16(0))
                    for j in range(there):
                        row[j] = last[i, j]
            token += size


@intrinsic
def _multiply_block(typingctx, size, tile, x, pairs, out, stride):
    """Multiply a tile by a block of `size` tokens, one of `BLOCKS`. tile, x and out are addresses; `stride`: bytes from
    one token of `out` to the next."""

    def codegen(context, builder, signature, arguments):
        product = Product(builder)
        for count in BLOCKS:
            with builder.if_then(builder.icmp_unsigned("==", arguments[0], BITS64(count))):
                product.write(count, *arguments[1:])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 6), codegen


class Product(Vectors):
    """Writes the product of a tile and a block of tokens as LLVM code."""

    def write(self, count, tile, x, pairs, out, stride) -> None:
        b = self.builder
        sums = [[self.variable(), self.variable()] for _ in range(count)]
        with cgutils.for_range(b, pairs) as loop:
            at = self.place(tile, loop.index, TILE_BYTES)
            weights = [self.load(at, PAIRS, i * TILE_BYTES // 2) for i in range(2)]
            inputs = self.place(x, loop.index, PAIR_BYTES * count)
            for token, totals in enumerate(sums):
                pair = self.spread(self.load(inputs, BITS32, PAIR_BYTES * token))
                for total, vector in zip(totals, weights, strict=True):
                    self.add_product(total, vector, pair)
        for token, totals in enumerate(sums):
            to = b.add(out, b.mul(stride, BITS64(token)))
            for i, total in enumerate(totals):
                self.store(self.as_bfloats(b.load(total)), to, i * 2 * LANES)
