"""Writing and copying keys and values on a CPU, compiled: every number is touched once.

One pass over the projections of a token rotates its queries and keys and puts keys and values where they belong. In
torch the same takes a dozen operations, each with an intermediate result and several microseconds of overhead; a step
of a small model has thirty layers of them.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg, attr-defined"

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from minipaged.fast.cpu.bfloat16 import array_at, as_array, narrow, widen
from minipaged.fast.cpu.llama import FEW_ROWS, normalize


def rope_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    qk_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """See `minipaged.fast.kernels`."""
    query = torch.empty(len(qkv), num_heads, keys.shape[3], dtype=qkv.dtype)
    _rope_and_write(
        as_array(qkv),
        cos.numpy(),
        sin.numpy(),
        positions.numpy(),
        slots.numpy(),
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0) * keys.itemsize,
        keys.shape[1],
        keys.shape[2],
        0 if qk_norm is None else qk_norm.data_ptr(),
        eps,
        as_array(query),
    )
    return query


def write(slots: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> None:
    """See `minipaged.fast.kernels`."""
    real = slots >= 0
    blocks = (slots[real] // keys.shape[2]).long()
    offsets = (slots[real] % keys.shape[2]).long()
    keys[blocks, :, offsets] = k[real]
    values[blocks, :, offsets] = v[real]


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """See `minipaged.fast.kernels`."""
    cache[pairs[:, 1].long()] = cache[pairs[:, 0].long()]


def poison_blocks(cache: Tensor, blocks: Tensor) -> None:
    """See `minipaged.fast.kernels`."""
    cache[blocks.long()] = torch.nan


@njit(parallel=True, nogil=True, cache=True)
def _rope_and_write(
    qkv, cos, sin, positions, slots, keys, values, block_stride, kv_heads, block_size, norms, eps, query
):
    """`keys`, `values` and `norms` are addresses (`norms` may be 0: none), and `block_stride` counts bytes."""
    if len(qkv) <= FEW_ROWS:
        for t in range(len(qkv)):
            c, s = cos[positions[t]], sin[positions[t]]  # [head_dim / 2]
            _one_token(qkv[t], c, s, slots[t], keys, values, block_stride, kv_heads, block_size, norms, eps, query[t])
    else:
        for t in prange(len(qkv)):
            c, s = cos[positions[t]], sin[positions[t]]
            _one_token(qkv[t], c, s, slots[t], keys, values, block_stride, kv_heads, block_size, norms, eps, query[t])


@njit(cache=True)
def _one_token(qkv, cos, sin, slot, keys, values, block_stride, kv_heads, block_size, norms, eps, query):
    """qkv: [(heads + 2 * kv_heads) * head_dim]; query: [heads, head_dim]."""
    heads, head_dim = query.shape
    if norms:
        _normalize_heads(qkv, norms, np.float32(eps), heads, kv_heads, head_dim)
    for h in range(heads):
        _rotate(qkv[h * head_dim : (h + 1) * head_dim], cos, sin, query[h])
    if slot < 0:
        return
    start = np.int64(slot // block_size) * block_stride
    for h in range(kv_heads):
        row = start + (h * block_size + slot % block_size) * head_dim * qkv.itemsize
        first = (heads + h) * head_dim
        _rotate(qkv[first : first + head_dim], cos, sin, array_at(keys + row, head_dim, qkv[0]))
        first += kv_heads * head_dim
        value, to = qkv[first : first + head_dim], array_at(values + row, head_dim, qkv[0])
        for i in range(head_dim):
            to[i] = value[i]


@njit(cache=True)
def _normalize_heads(qkv, norms, eps, heads, kv_heads, head_dim):
    """One token's queries and keys, in place."""
    for h in range(heads + kv_heads):
        head = qkv[h * head_dim : (h + 1) * head_dim]
        weight = array_at(norms + (h >= heads) * head_dim * qkv.itemsize, head_dim, qkv[0])
        normalize(head, weight, eps, head)


@njit(cache=True)
def _rotate(x, cos, sin, out):
    """One head [head_dim]: each pair (i, i + head_dim / 2) turned by its angle."""
    half = len(x) // 2
    a, b, first, second = x[:half], x[half:], out[:half], out[half:]
    for i in range(half):
        left, right = widen(a[i]), widen(b[i])
        first[i] = narrow(left * cos[i] - right * sin[i], out[0])
        second[i] = narrow(right * cos[i] + left * sin[i], out[0])
