"""One token through all layers of a Llama in one compiled call, on a CPU.

A request that decodes alone waits for the weights to be read: four matrices per layer, each in 0.02 to 0.1 ms. The nine
calls from Python per layer together cost as much as reading a whole matrix: they make arrays of tensors and look up
types, and threads go to sleep meanwhile. So the loop over the layers is compiled too. It calls the same functions as
Python does elsewhere, in the same order, and its results are equal to the last bit.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minipaged.fast.cpu.attention import AS_IT_IS, KINDS, KernelPool, _decode, pairs_or_floats
from minipaged.fast.cpu.bfloat16 import array_at, as_array
from minipaged.fast.cpu.kernel_cache import inner, kernel
from minipaged.fast.cpu.kv_cache import write_token
from minipaged.fast.cpu.llama import DenseMatrix, activate, add, multiply, normalize
from minipaged.fast.cpu.threads import num_pieces
from minipaged.fast.kernels import Layer


class OneToken:
    """See `minipaged.fast.kernels`, `one_token`."""

    def __init__(self, layers: Sequence[Layer], views: Sequence[tuple[Tensor, Tensor]], num_heads: int) -> None:
        """`layers`: layers whose matrices are all `DenseMatrix`. `views`: each layer's keys and values."""
        self._layers = layers  # kept alive: the kernel reads their memory by address
        self._pool = KernelPool.of(*views[0], None)
        self._sizes = num_heads, layers[0].down.weight.shape[1]  # type: ignore[attr-defined]
        self._addresses = np.array([_addresses(*each) for each in zip(layers, views, strict=True)])  # [layers, 9] int64

    def __call__(
        self,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        position: Tensor,
        slot: Tensor,
        tables: Tensor,
        rows: Tensor,
        context_lens: Tensor,
        scale: float,
        eps: float,
    ) -> Tensor:
        x = torch.empty_like(residual)
        at = int(position)
        _run(
            self._addresses,
            self._sizes,
            as_array(residual)[0],
            (cos.numpy()[at], sin.numpy()[at]),
            np.int32(int(slot)),
            self._pool,
            (tables.numpy(), rows.numpy(), context_lens.numpy()),
            np.float32(scale),
            eps,
            num_pieces(),
            pairs_or_floats(residual.dtype, cos.shape[1] * 2),
            as_array(x)[0],
        )
        return x


def one_token(
    layers: Sequence[Layer], views: Sequence[tuple[Tensor, Tensor]], num_heads: int
) -> Callable[..., Tensor] | None:
    """See `minipaged.fast.kernels`."""
    matrices = [matrix for each in layers for matrix in (each.qkv, each.o, each.gate_up, each.down)]
    plain = all(isinstance(matrix, DenseMatrix) and matrix.bias is None for matrix in matrices)
    return OneToken(layers, views, num_heads) if plain and KINDS[views[0][0].dtype] == AS_IT_IS else None


def _addresses(layer: Any, view: tuple[Tensor, Tensor]) -> list[int]:
    """Return the addresses of a layer's weights, keys and values; 0 for norms of queries and keys that it lacks."""
    weights = (layer.qkv.weight, layer.o.weight, layer.gate_up.weight, layer.down.weight)
    norms = layer.input_norm, layer.post_norm
    between = 0 if layer.qk_norm is None else layer.qk_norm.data_ptr()
    return [*(each.data_ptr() for each in (*norms, *weights, *view)), between]


@kernel()
def _run(layers, sizes, residual, angles, slot, pool, where, scale, eps, num_pieces, number, x):
    """Overwrite residual [hidden], write the last layer's output to x [hidden]. angles: cos, sin [head_dim / 2]."""
    cos, sin = angles
    heads, intermediate = sizes
    hidden, head_dim, kv_heads, like = len(residual), 2 * len(cos), pool.kv_heads, residual[0]
    qkv_size, q_size = (heads + 2 * kv_heads) * head_dim, heads * head_dim
    normed, qkv = np.empty_like(residual), np.empty(qkv_size, residual.dtype)
    query = np.empty((1, heads, head_dim), residual.dtype)
    attended = np.empty_like(query)
    gate_up, activated = np.empty(2 * intermediate, residual.dtype), np.empty(intermediate, residual.dtype)
    epsilon = np.float32(eps)
    # Explicit int64: numba gives each literal a type of its own, and would compile all callees once more.
    one, none = np.int64(1), np.int64(0)
    for i in range(len(layers)):
        input_norm, post_norm, qkv_weight, o_weight = layers[i, 0], layers[i, 1], layers[i, 2], layers[i, 3]
        gate_up_weight, down_weight, keys, values = layers[i, 4], layers[i, 5], layers[i, 6], layers[i, 7]
        if i:
            add(x, residual)
        normalize(residual, array_at(input_norm, hidden, like), epsilon, normed)
        multiply(_at(normed), one, qkv_weight, qkv_size, hidden, like, num_pieces, _at(qkv))
        to = keys, values, none, pool.block_stride, kv_heads, pool.block_size, none, layers[i, 8], eps
        write_token(qkv, cos, sin, slot, to, None, query[0])
        here = KernelPool(keys, values, 0, pool.block_stride, pool.head_stride, kv_heads, pool.block_size, pool.kind)
        _decode(query, here, where, scale, num_pieces, number, attended)
        multiply(_at(attended), one, o_weight, hidden, q_size, like, num_pieces, _at(x))
        add(x, residual)
        normalize(residual, array_at(post_norm, hidden, like), epsilon, normed)
        multiply(_at(normed), one, gate_up_weight, 2 * intermediate, hidden, like, num_pieces, _at(gate_up))
        activate(gate_up[:intermediate], gate_up[intermediate:], activated)
        multiply(_at(activated), one, down_weight, hidden, intermediate, like, num_pieces, _at(x))


@inner(inline="always")
def _at(array):
    """Return an array's address as int64, its type in calls from Python too, so that their compiled code is reused."""
    return np.int64(array.ctypes.data)
