"""Writing and copying keys and values on a CPU, compiled: each number is touched once.

One pass over a token's projections rotates its queries and keys and stores keys and values in their slots. In torch
that takes a dozen operations, each with an intermediate result and several microseconds of overhead, and a step of a
small model does it in thirty layers.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg, attr-defined"

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from minipaged.fast.cpu.attention import INT8, KINDS, SCALE_BYTES
from minipaged.fast.cpu.bfloat16 import array_at, as_array, bits_of_float, float_of_bits, narrow, widen
from minipaged.fast.cpu.kernel_cache import inner, kernel
from minipaged.fast.cpu.llama import FEW_ROWS, normalize

SMALLEST_SCALE = np.finfo(np.float32).tiny
"""The smallest scale, used for a head of zeros, so that nothing is divided by 0."""
INFINITE = np.uint32(0x7F800000)
"""The bits of infinity. As integers, the bits of NaN are larger."""


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
    kv_scales: Tensor | None = None,
    static_scales: Tensor | None = None,
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
        0 if kv_scales is None else kv_scales.data_ptr(),
        keys.stride(0) * keys.itemsize,
        keys.shape[1],
        keys.shape[2],
        None if kv_scales is None else KINDS[keys.dtype],
        0 if static_scales is None else static_scales.data_ptr(),
        0 if qk_norm is None else qk_norm.data_ptr(),
        eps,
        as_array(query),
    )
    return query


def write(
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    kv_scales: Tensor | None = None,
    static_scales: Tensor | None = None,
) -> None:
    """See `minipaged.fast.kernels`."""
    if kv_scales is not None:
        _write_codes(
            slots.numpy(),
            k.float().numpy(),
            v.float().numpy(),
            keys.data_ptr(),
            values.data_ptr(),
            kv_scales.data_ptr(),
            keys.stride(0),
            keys.shape[2],
            KINDS[keys.dtype],
            0 if static_scales is None else static_scales.data_ptr(),
        )
        return
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


@kernel(parallel=True)
def _rope_and_write(
    qkv,
    cos,
    sin,
    positions,
    slots,
    keys,
    values,
    scales,
    block_stride,
    kv_heads,
    block_size,
    kind,
    static,
    norms,
    eps,
    query,
):
    """`keys`, `values`, `scales`, `static` and `norms` are addresses (the last two may be 0: none). `block_stride` is
    in bytes. kind: one of KINDS, or None for keys and values in the model's type. (None omits the code for 8 bits.)"""
    where = keys, values, scales, block_stride, kv_heads, block_size, static, norms, eps
    if len(qkv) <= FEW_ROWS:
        for t in range(len(qkv)):
            c, s = cos[positions[t]], sin[positions[t]]  # [head_dim / 2]
            write_token(qkv[t], c, s, slots[t], where, kind, query[t])
    else:
        for t in prange(len(qkv)):
            c, s = cos[positions[t]], sin[positions[t]]
            write_token(qkv[t], c, s, slots[t], where, kind, query[t])


@inner()
def write_token(qkv, cos, sin, slot, where, kind, query):
    """Rotate one token's query and key, and store its key and value. qkv: [(heads + 2 * kv_heads) * head_dim]; query:
    [heads, head_dim]."""
    keys, values, scales, block_stride, kv_heads, block_size, static, norms, eps = where
    heads, head_dim = query.shape
    if norms:
        _normalize_heads(qkv, norms, np.float32(eps), heads, kv_heads, head_dim)
    for h in range(heads):
        _rotate(qkv[h * head_dim : (h + 1) * head_dim], cos, sin, query[h])
    if slot < 0:
        return
    start = np.int64(slot // block_size) * block_stride
    for h in range(kv_heads):
        place = h * block_size + slot % block_size
        first = (heads + h) * head_dim
        key = qkv[first : first + head_dim]
        first += kv_heads * head_dim
        value = qkv[first : first + head_dim]
        if kind is None:
            row = start + place * head_dim * qkv.itemsize
            _rotate(key, cos, sin, array_at(keys + row, head_dim, qkv[0]))
            to = array_at(values + row, head_dim, qkv[0])
            for i in range(head_dim):
                to[i] = value[i]
        else:
            row, scale = start + place * head_dim, scales + start + place * SCALE_BYTES
            wide = np.empty(head_dim, np.float32)
            _rotate(key, cos, sin, wide)
            _write_head(wide, keys + row, scale, kind, _given(static, h))
            value_scale = scale + kv_heads * block_size * SCALE_BYTES
            _write_head(value, values + row, value_scale, kind, _given(static, kv_heads + h))


@inner()
def _given(static, i):
    """Return static scale number i, or 0 if there are none."""
    return array_at(static, i + 1, np.float32(0))[i] if static else np.float32(0)


@inner(error_model="numpy")
def _write_head(x, codes, scale_address, kind, given):
    """Store one head [head_dim] as codes, and its scale, at these addresses. given: a static scale, or 0 to compute the
    scale."""
    bits = np.uint32(0)  # of the largest number: the order of bits is that of sizes, with NaN above all
    for i in range(len(x)):
        bits = max(bits, np.uint32(bits_of_float(widen(x[i])) & np.uint32(0x7FFFFFFF)))
    scale = float_of_bits(bits) / np.float32(127 if kind == INT8 else 448)
    if given > 0 and bits < INFINITE:
        scale = given
    elif scale < SMALLEST_SCALE:
        scale = SMALLEST_SCALE
    array_at(scale_address, 1, np.float32(0))[0] = scale
    if kind == INT8:
        _round(x, scale, np.float32(-128), np.float32(127), array_at(codes, len(x), np.int8(0)))
    else:
        _round(x, scale, np.float32(-448), np.float32(448), array_at(codes, len(x), np.uint8(0)))


@inner(error_model="numpy")
def _round(x, scale, least, most, codes):
    for i in range(len(x)):
        codes[i] = narrow(min(max(widen(x[i]) / scale, least), most), codes[0])


@kernel()
def _write_codes(slots, k, v, keys, values, scales, block_stride, block_size, kind, static):
    """Store k, v: [tokens, kv_heads, head_dim] float32, as codes."""
    tokens, kv_heads, head_dim = k.shape
    for t in range(tokens):
        start = np.int64(slots[t] // block_size) * block_stride
        for h in range(kv_heads if slots[t] >= 0 else 0):
            place = h * block_size + slots[t] % block_size
            row, scale = start + place * head_dim, scales + start + place * SCALE_BYTES
            _write_head(k[t, h], keys + row, scale, kind, _given(static, h))
            value_scale = scale + kv_heads * block_size * SCALE_BYTES
            _write_head(v[t, h], values + row, value_scale, kind, _given(static, kv_heads + h))


@inner()
def _normalize_heads(qkv, norms, eps, heads, kv_heads, head_dim):
    """Normalize one token's queries and keys in place."""
    for h in range(heads + kv_heads):
        head = qkv[h * head_dim : (h + 1) * head_dim]
        weight = array_at(norms + (h >= heads) * head_dim * qkv.itemsize, head_dim, qkv[0])
        normalize(head, weight, eps, head)


@inner()
def _rotate(x, cos, sin, out):
    """Rotate one head [head_dim]: each pair (i, i + head_dim / 2) by its angle."""
    half = len(x) // 2
    a, b, first, second = x[:half], x[half:], out[:half], out[half:]
    for i in range(half):
        left, right = widen(a[i]), widen(b[i])
        first[i] = narrow(left * cos[i] - right * sin[i], out[0])
        second[i] = narrow(right * cos[i] + left * sin[i], out[0])
