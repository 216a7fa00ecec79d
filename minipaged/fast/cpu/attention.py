"""Paged attention of sequences with one query, compiled: keys and values are read where they lie, block by block.

Decoding reads every key and value once and does little with each: memory is what it waits for. So

- the query heads that share a key/value head go through the block together, while it is in the nearest cache;
- the work of a batch, whatever the lengths of its sequences, is cut into as many equal stretches of tiles as there are
  threads. A cut may fall within a sequence; the two halves of its online softmax are put together at the end, as the
  splits of the GPU's kernel are.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg"

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from minipaged.fast.cpu.bfloat16 import array_at, as_array, float_of_bits, narrow, prefetch, widen

TILE = 64
"""Keys between two updates of the running maximum."""
STEP = 4
"""Keys that are weighed at a time."""
CACHE_LINE = 64
"""Bytes that memory is read in. Asking ahead for them is worth a fifth to two fifths where keys and values are more
than the processor's cache holds (SmolLM2's shapes, 32 sequences of 1024: 20.1 GB/s for 16.5 in float32, 15.9 for 11.3
in bfloat16)."""
LOWEST = np.float32(-1e30)
"""Stands for minus infinity where there was no score yet: `LOWEST - LOWEST` is 0, and not NaN."""
SCALE_BYTES = 4
AS_IT_IS, INT8, E4M3 = 0, 1, 2
KINDS = {torch.float32: AS_IT_IS, torch.bfloat16: AS_IT_IS, torch.int8: INT8, torch.uint8: E4M3}
"""How keys and values are kept. Compiled loops are told in a number, and not by a type: one is compiled for all."""
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be reordered, so that they can be vectorised; but NaN and infinity stay what they are.

The compiled loops spell out what NumPy has a word for: its searches, and assignments of whole arrays with all their
checks, take numba seconds to compile, at whose end the first answer waits."""


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    scale: float,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """See `minipaged.fast.kernels`."""
    out = torch.empty_like(query)
    _decode(
        as_array(query),
        keys.data_ptr(),
        values.data_ptr(),
        0 if kv_scales is None else kv_scales.data_ptr(),
        keys.stride(0) * keys.itemsize,
        keys.stride(1) * keys.itemsize,
        keys.shape[1],
        keys.shape[2],
        KINDS[keys.dtype],
        tables.numpy(),
        rows.numpy(),
        context_lens.numpy(),
        np.float32(scale),
        numba.get_num_threads(),
        as_array(out),
    )
    return out


@njit(inline="always")
def exponential(x):
    """exp(x) of a float32: 2**n times a polynomial, which vectorises (a call of the library's does not).

    The largest relative error is about 1e-7. Beyond 87 on either side it stays where it is there: at 1e38 and 1e-38.
    """
    x = min(max(x, np.float32(-87.0)), np.float32(87.0))
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    # ln 2 in two parts: the first one's product with n is exact.
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * float_of_bits(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))


@njit(parallel=True, nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")
def _decode(
    query,
    keys,
    values,
    scales,
    block_stride,
    head_stride,
    kv_heads,
    block_size,
    kind,
    tables,
    rows,
    context_lens,
    scale,
    num_threads,
    out,
):
    """`keys`, `values` and `scales` are addresses, and the strides count bytes. kind: one of KINDS; AS_IT_IS has no
    scales."""
    seqs, heads, head_dim = query.shape
    group = heads // kv_heads
    row_bytes = head_dim * (query.itemsize if kind == AS_IT_IS else 1)
    scale_stride = block_size * SCALE_BYTES  # from head to head
    first_tile = np.empty(seqs * kv_heads + 1, np.int64)  # of each pair (sequence, key/value head), counted through
    first_tile[0] = 0
    for s in range(seqs):
        tiles = (context_lens[s] + TILE - 1) // TILE
        for g in range(heads if tiles == 0 else 0):
            for d in range(head_dim):
                out[s, g, d] = narrow(np.float32(0), out[0, 0, 0])
        for h in range(kv_heads):
            first_tile[s * kv_heads + h + 1] = first_tile[s * kv_heads + h] + tiles
    # A thread's stretch may begin and end within a pair: those two it leaves unfinished.
    part_of = np.empty((num_threads, 2), np.int64)
    for thread in range(num_threads):
        part_of[thread, 0] = part_of[thread, 1] = -1
    part_m = np.empty((num_threads, 2, group), np.float32)
    part_l = np.empty((num_threads, 2, group), np.float32)
    part_o = np.empty((num_threads, 2, group, head_dim), np.float32)
    for thread in prange(num_threads):
        begin = first_tile[-1] * thread // num_threads
        end = first_tile[-1] * (thread + 1) // num_threads
        q = np.empty((group, head_dim), np.float32)
        o = np.empty((group, head_dim), np.float32)
        m = np.empty(group, np.float32)
        l = np.empty(group, np.float32)  # noqa: E741
        p = np.empty((group, TILE), np.float32)
        tile = np.empty((TILE, head_dim), np.float32)
        pair = 0
        while begin < end and first_tile[pair + 1] <= begin:
            pair += 1
        while begin < end:
            s, h = pair // kv_heads, pair % kv_heads
            k, v, table = keys + h * head_stride, values + h * head_stride, tables[rows[s]]
            k_scales, v_scales = scales + h * scale_stride, scales + (kv_heads + h) * scale_stride
            stop = min(end, first_tile[pair + 1])
            if stop > begin:
                for g in range(group):
                    m[g], l[g] = LOWEST, 0
                    for d in range(head_dim):
                        q[g, d] = widen(query[s, h * group + g, d]) * scale
                        o[g, d] = 0
                for t in range(begin - first_tile[pair], stop - first_tile[pair]):
                    start, size = t * TILE, min(TILE, context_lens[s] - t * TILE)
                    read_tile(k, k_scales, kind, block_stride, block_size, table, start, size, query, tile)
                    _prefetch_tile(v, block_stride, block_size, table, start, size, row_bytes)
                    _take_scores(q, tile, size, m, l, o, p)
                    read_tile(v, v_scales, kind, block_stride, block_size, table, start, size, query, tile)
                    next_size = min(TILE, context_lens[s] - start - TILE)
                    _prefetch_tile(k, block_stride, block_size, table, start + TILE, next_size, row_bytes)
                    _take_values(p, tile, size, o)
                if begin == first_tile[pair] and stop == first_tile[pair + 1]:
                    for g in range(group):
                        for d in range(head_dim):
                            out[s, h * group + g, d] = narrow(o[g, d] / l[g], out[0, 0, 0])
                else:
                    side = 0 if begin > first_tile[pair] else 1
                    part_of[thread, side] = pair
                    for g in range(group):
                        part_m[thread, side, g], part_l[thread, side, g] = m[g], l[g]
                        for d in range(head_dim):
                            part_o[thread, side, g, d] = o[g, d]
            begin = stop
            pair += 1
    _merge(part_of, part_m, part_l, part_o, kv_heads, out)


@njit(cache=True)
def _prefetch_tile(pool, block_stride, block_size, table, start, size, row_bytes):
    """Ask for what `read_tile` will read next, while there is something to compute."""
    j, block, offset = 0, start // block_size, start % block_size
    while j < size:
        there = min(block_size - offset, size - j)
        address = pool + table[block] * block_stride + offset * row_bytes
        for line in range(0, there * row_bytes, CACHE_LINE):
            prefetch(address + line)
        j, block, offset = j + there, block + 1, 0


@njit(cache=True)
def read_tile(pool, scales, kind, block_stride, block_size, table, start, size, like, tile):
    """Widen `size` keys (or values) from position `start` on into `tile` [TILE, head_dim], block after block."""
    head_dim = tile.shape[1]
    j, block, offset = 0, start // block_size, start % block_size
    while j < size:
        there = min(block_size - offset, size - j)
        here, numbers = table[block] * block_stride, offset * head_dim
        factors = scales + here + offset * SCALE_BYTES
        if kind == INT8:
            _read_codes(array_at(pool + here + numbers, there * head_dim, np.int8(0)), factors, j, tile)
        elif kind == E4M3:
            _read_codes(array_at(pool + here + numbers, there * head_dim, np.uint8(0)), factors, j, tile)
        else:
            source = array_at(pool + here + numbers * like.itemsize, there * head_dim, like[0, 0, 0])
            for i in range(there):
                for d in range(head_dim):
                    tile[j + i, d] = widen(source[i * head_dim + d])
        j, block, offset = j + there, block + 1, 0
    for rest in range(
        size, (size + STEP - 1) // STEP * STEP
    ):  # what `_take_values` weighs with 0: another sequence's NaN stays NaN
        for d in range(head_dim):
            tile[rest, d] = 0


@njit(cache=True)
def _read_codes(codes, scales, first, tile):
    """What the codes of some keys (or values) stand for, into the rows of `tile` from `first` on."""
    head_dim = tile.shape[1]
    factors = array_at(scales, len(codes) // head_dim, np.float32(0))
    for i in range(len(factors)):
        for d in range(head_dim):
            tile[first + i, d] = widen(codes[i * head_dim + d]) * factors[i]


@njit(cache=True, fastmath=FASTMATH, error_model="numpy")
def _take_scores(q, tile, size, m, l, o, p):  # noqa: E741
    """The scores of `size` keys against the group's queries, into (m, l) and, as weights, into p [group, TILE]."""
    group, head_dim = q.shape
    threes = group - group % 3
    for g in range(0, threes, 3):
        _score_three(q[g], q[g + 1], q[g + 2], tile, size, p[g], p[g + 1], p[g + 2])
    for g in range(threes, group):
        for j in range(size):
            score = np.float32(0)
            for d in range(head_dim):
                score += q[g, d] * tile[j, d]
            p[g, j] = score
    for g in range(group):
        m_new = m[g]
        for j in range(size):
            m_new = max(m_new, p[g, j])
        fade = exponential(m[g] - m_new)
        total = np.float32(0)
        for j in range(size):
            p[g, j] = exponential(p[g, j] - m_new)
            total += p[g, j]
        for j in range(size, p.shape[1]):
            p[g, j] = 0
        m[g], l[g] = m_new, l[g] * fade + total
        for d in range(head_dim):
            o[g, d] *= fade


@njit(cache=True, fastmath=FASTMATH, error_model="numpy")
def _score_three(qa, qb, qc, tile, size, pa, pb, pc):
    """Three heads at once: each key is loaded once for them (a quarter less time than one after another)."""
    for j in range(size):
        k = tile[j]
        a, b, c = np.float32(0), np.float32(0), np.float32(0)
        for d in range(len(k)):
            a += qa[d] * k[d]
            b += qb[d] * k[d]
            c += qc[d] * k[d]
        pa[j], pb[j], pc[j] = a, b, c


@njit(cache=True, fastmath=FASTMATH, error_model="numpy")
def _take_values(p, tile, size, o):
    """Add the weighted values to o [group, head_dim]: STEP keys for each time that the sums are loaded and stored."""
    group, head_dim = o.shape
    threes = group - group % 3
    for g in range(0, threes, 3):
        _add_three(p[g], p[g + 1], p[g + 2], tile, size, o[g], o[g + 1], o[g + 2])
    for g in range(threes, group):
        for j in range(0, size, STEP):
            a0, a1, a2, a3 = p[g, j], p[g, j + 1], p[g, j + 2], p[g, j + 3]
            for d in range(head_dim):
                o[g, d] += a0 * tile[j, d] + a1 * tile[j + 1, d] + a2 * tile[j + 2, d] + a3 * tile[j + 3, d]


@njit(cache=True, fastmath=FASTMATH, error_model="numpy")
def _add_three(pa, pb, pc, tile, size, oa, ob, oc):
    """Three heads at once: each value is loaded once for them (a third less time than one after another)."""
    for j in range(0, size, STEP):
        a0, a1, a2, a3 = pa[j], pa[j + 1], pa[j + 2], pa[j + 3]
        b0, b1, b2, b3 = pb[j], pb[j + 1], pb[j + 2], pb[j + 3]
        c0, c1, c2, c3 = pc[j], pc[j + 1], pc[j + 2], pc[j + 3]
        for d in range(len(oa)):
            v0, v1, v2, v3 = tile[j, d], tile[j + 1, d], tile[j + 2, d], tile[j + 3, d]
            oa[d] += a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3
            ob[d] += b0 * v0 + b1 * v1 + b2 * v2 + b3 * v3
            oc[d] += c0 * v0 + c1 * v1 + c2 * v2 + c3 * v3


@njit(cache=True, error_model="numpy")
def _merge(part_of, part_m, part_l, part_o, kv_heads, out):
    """Put the stretches of each cut (sequence, head) together; they follow one another."""
    group, head_dim = part_o.shape[2], part_o.shape[3]
    part_of, part_m = part_of.reshape(-1), part_m.reshape(-1, group)
    part_l, part_o = part_l.reshape(-1, group), part_o.reshape(-1, group, head_dim)
    for i in range(len(part_of)):
        pair = part_of[i]
        merged = pair < 0
        for j in range(i):
            merged |= part_of[j] == pair
        if merged:
            continue
        for g in range(group):
            m = LOWEST
            for j in range(i, len(part_of)):
                if part_of[j] == pair:
                    m = max(m, part_m[j, g])
            l, o = np.float32(0), np.zeros(head_dim, np.float32)  # noqa: E741
            for j in range(i, len(part_of)):
                if part_of[j] == pair:
                    fade = np.float32(np.exp(part_m[j, g] - m))
                    l += part_l[j, g] * fade  # noqa: E741
                    for d in range(head_dim):
                        o[d] += part_o[j, g, d] * fade
            for d in range(head_dim):
                out[pair // kv_heads, pair % kv_heads * group + g, d] = narrow(o[d] / l, out[0, 0, 0])
