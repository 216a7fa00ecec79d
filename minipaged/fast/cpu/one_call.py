"""All layers of a Llama in one compiled call, on a CPU, for sequences that decode.

A step of a few sequences waits for the weights to be read. Each layer has four matrices, and reading one takes 0.02 to
0.09 ms. The nine calls from Python per layer together cost as much as reading a whole matrix, because each call makes
arrays of tensors and looks up types. The other threads wait meanwhile. So the loop over the layers is compiled too. It
calls the same functions as Python does elsewhere, in the same order, and its results are equal to the last bit.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg, attr-defined"

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from minipaged.fast.cpu.attention import (
    AS_IT_IS,
    KINDS,
    NO_WINDOW,
    NOTHING_SHARED,
    KernelPool,
    Scoring,
    _decode,
    pairs_or_floats,
    shared_arrays,
    without_sinks,
)
from minipaged.fast.cpu.bfloat16 import array_at, as_array
from minipaged.fast.cpu.kernel_cache import inner, kernel
from minipaged.fast.cpu.kv_cache import _rope_and_write
from minipaged.fast.cpu.llama import FEW, DenseMatrix, _add_rms_norm, _rms_norm, _swiglu, multiply
from minipaged.fast.cpu.product import TiledMatrix, multiply_tiles
from minipaged.fast.cpu.threads import num_pieces
from minipaged.fast.kernels import Layer, RunLayers, Shared


class OneCall(RunLayers):
    """See `minipaged.fast.kernels`, `in_one_call`."""

    def __init__(
        self,
        layers: Sequence[Layer],
        views: Sequence[tuple[Tensor, Tensor]],
        windows: Sequence[int | None],
        num_heads: int,
        cos: Tensor,
        sin: Tensor,
        scale: float,
        eps: float,
    ) -> None:
        """`layers`: layers whose matrices are all `DenseMatrix`, or all `TiledMatrix`."""
        self._layers = layers  # kept alive: the kernel reads their memory by address
        self._pool = KernelPool.of(*views[0], None)
        self._sizes = num_heads, layers[0].down.shape[1]
        self._angles, self._eps = (cos.numpy(), sin.numpy()), eps
        self._scoring = without_sinks(scale, None)
        self._number = pairs_or_floats(views[0][0].dtype, views[0][0].shape[3])
        self._addresses = np.array(
            [_addresses(*each) for each in zip(layers, views, windows, strict=True)]
        )  # [layers, 14] int64
        tiled = isinstance(layers[0].down, TiledMatrix)
        self._tiled = True if tiled else None  # of two types, so that numba compiles one of the two products
        self.most_tokens = sys.maxsize if tiled else FEW

    def __call__(
        self,
        residual: Tensor,
        positions: Tensor,
        slots: Tensor,
        tables: Tensor,
        rows: Tensor,
        context_lens: Tensor,
        shared: Shared | None = None,
    ) -> Tensor:
        x = torch.empty_like(residual)
        _run(
            self._addresses,
            self._sizes,
            as_array(residual),
            self._angles,
            (positions.numpy(), slots.numpy()),
            self._pool,
            (tables.numpy(), rows.numpy(), context_lens.numpy()),
            (shared_arrays(shared), NOTHING_SHARED),
            self._scoring,
            self._eps,
            (numba.get_num_threads(), num_pieces()),
            self._number,
            self._tiled,
            as_array(x),
        )
        return x


def in_one_call(
    layers: Sequence[Layer],
    views: Sequence[tuple[Tensor, Tensor]],
    windows: Sequence[int | None],
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    eps: float,
) -> RunLayers | None:
    """See `minipaged.fast.kernels`."""
    matrices = [matrix for each in layers for matrix in (each.qkv, each.o, each.gate_up, each.down)]
    alike = any(all(isinstance(matrix, kind) for matrix in matrices) for kind in (TiledMatrix, DenseMatrix))
    if not alike or any(matrix.bias is not None for matrix in matrices) or KINDS[views[0][0].dtype] != AS_IT_IS:
        return None
    if any(layer.sinks is not None for layer in layers):
        return None
    return OneCall(layers, views, windows, num_heads, cos, sin, scale, eps)


def _addresses(layer: Any, view: tuple[Tensor, Tensor], window: int | None) -> list[int]:
    """Return the addresses of a layer's weights, keys and values; 0 for norms of queries and keys that it lacks. Then
    the bytes that a weight of each matrix takes in tiles, and the window."""
    matrices = (layer.qkv, layer.o, layer.gate_up, layer.down)
    norms = layer.input_norm.data_ptr(), layer.post_norm.data_ptr()
    between = 0 if layer.qk_norm is None else layer.qk_norm.data_ptr()
    sizes = (getattr(matrix, "item_bytes", 0) for matrix in matrices)
    addresses = *norms, *(each.address for each in matrices), *(each.data_ptr() for each in view), between
    return [*addresses, *sizes, without_sinks(1.0, window).window]


@kernel()
def _run(layers, sizes, residual, angles, places, pool, where, shared, scoring, eps, numbers, number, tiled, x):
    """Overwrite residual [tokens, hidden], write the last layer's output to x [tokens, hidden]. angles: cos, sin
    [positions, head_dim / 2]. places: positions and slots, [tokens] each. shared: for layers without a window, and with
    one. numbers: of threads, and of the pieces of
    attention. tiled: whether the matrices are in tiles: True or None."""
    cos, sin = angles
    positions, slots = places
    num_threads, pieces = numbers
    heads, intermediate = sizes
    (tokens, hidden), head_dim, kv_heads, like = residual.shape, 2 * cos.shape[1], pool.kv_heads, residual[0, 0]
    q_size, qkv_size = heads * head_dim, (heads + 2 * kv_heads) * head_dim
    normed, qkv = np.empty_like(residual), np.empty((tokens, qkv_size), residual.dtype)
    query = np.empty((tokens, heads, head_dim), residual.dtype)
    attended = np.empty_like(query)
    gate_up = np.empty((tokens, 2 * intermediate), residual.dtype)
    activated = np.empty((tokens, intermediate), residual.dtype)
    epsilon = np.float32(eps)
    none = np.int64(0)  # numba gives each literal a type of its own, and would compile all callees once more
    for i in range(len(layers)):
        input_norm, post_norm = array_at(layers[i, 0], hidden, like), array_at(layers[i, 1], hidden, like)
        qkv_weight, o_weight, gate_up_weight, down_weight = layers[i, 2], layers[i, 3], layers[i, 4], layers[i, 5]
        keys, values = layers[i, 6], layers[i, 7]
        if i:
            _add_rms_norm(x, residual, input_norm, epsilon, normed)
        else:
            _rms_norm(residual, input_norm, epsilon, normed)
        _multiply(_at(normed), tokens, qkv_weight, layers[i, 9], qkv_size, hidden, like, tiled, num_threads, _at(qkv))
        to = keys, values, none, pool.block_stride, kv_heads, pool.block_size, None, none, layers[i, 8], eps
        _rope_and_write(qkv, cos, sin, positions, slots, *to, query)
        here = KernelPool(keys, values, 0, pool.block_stride, pool.head_stride, kv_heads, pool.block_size, pool.kind)
        window = layers[i, 13]
        score = Scoring(scoring.scale, window, scoring.soft_cap, scoring.sinks)
        _decode(query, here, where, shared[np.int64(window < NO_WINDOW)], score, pieces, number, attended)
        _multiply(_at(attended), tokens, o_weight, layers[i, 10], hidden, q_size, like, tiled, num_threads, _at(x))
        _add_rms_norm(x, residual, post_norm, epsilon, normed)
        _multiply(
            _at(normed),
            tokens,
            gate_up_weight,
            layers[i, 11],
            2 * intermediate,
            hidden,
            like,
            tiled,
            num_threads,
            _at(gate_up),
        )
        _swiglu(gate_up, activated)
        _multiply(
            _at(activated), tokens, down_weight, layers[i, 12], hidden, intermediate, like, tiled, num_threads, _at(x)
        )


def _multiply(
    x: Any,
    tokens: Any,
    weight: Any,
    item_bytes: Any,
    rows: Any,
    inputs: Any,
    like: Any,
    tiled: Any,
    num_threads: Any,
    out: Any,
) -> None:
    """Multiply x [tokens, inputs] by a matrix [rows, inputs] to out [tokens, rows], given by their addresses. Only for
    compiled code: numba selects the product by the type of `tiled`."""
    raise NotImplementedError("for compiled code")


@overload(_multiply)
def _multiply_as(x, tokens, weight, item_bytes, rows, inputs, like, tiled, num_threads, out):
    def by_rows(x, tokens, weight, item_bytes, rows, inputs, like, tiled, num_threads, out):
        multiply(x, tokens, weight, rows, inputs, like, num_threads, out)

    def by_tiles(x, tokens, weight, item_bytes, rows, inputs, like, tiled, num_threads, out):
        multiply_tiles(x, tokens, weight, item_bytes, rows, inputs, like, num_threads, out)

    return by_rows if tiled == types.none else by_tiles


@inner(inline="always")
def _at(array):
    """Return an array's address as int64, its type in calls from Python too, so that their compiled code is reused."""
    return np.int64(array.ctypes.data)
