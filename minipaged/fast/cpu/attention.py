"""Compiled paged attention of sequences with one query. Keys and values are read in place, block by block.

Decoding reads every key and value once and computes little with each, so it is bound by memory. Therefore

- the query heads that share a key/value head process a block together, while it is in the nearest cache;
- the tiles of a batch, whatever the lengths of its sequences, are divided into equal stretches, as many as there are
  threads on a quiet machine. A stretch may begin or end within a sequence; the parts of that sequence's online softmax
  are merged at the end, as the GPU kernel merges its splits.

Sequences that begin with the same blocks (`kernels.Shared`) go through these blocks together: a tile is read once, and
all their queries attend to it while it is in the nearest cache. Then each goes on with its own blocks, with the running
values (m, l, o) that it has. So there is nothing to merge, and a result has the same bits as without sharing. A pair
that is cut between two stretches is left out, because its parts are merged.

With a window, a sequence's tiles begin at the first token that its query sees. So each tile is seen as a whole, and
nothing before the window is read.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg"

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic, overload
from torch import Tensor

from minipaged.fast.cpu.bfloat16 import Array, array_at, as_array, float_of_bits, narrow, prefetch, widen
from minipaged.fast.cpu.decode import GROUPS, SCORED, TILE, add_values, score_tile, score_turned, turn_keys
from minipaged.fast.cpu.kernel_cache import inner, kernel, loop
from minipaged.fast.cpu.threads import num_pieces
from minipaged.fast.cpu.vectors import LANES, number_type
from minipaged.fast.kernels import Paged, Shared

STEP = 4
"""The number of values that are weighted and added at a time."""
CACHE_LINE = 64
"""The size of a cache line in bytes. Prefetching lines gains a fifth to two fifths if keys and values do not fit the
processor's cache (SmolLM2's shapes, 32 sequences of 1024, float32: 20.1 GB/s instead of 16.5)."""


class KernelPool(NamedTuple):
    """The addresses and strides by which the kernels find a layer's keys and values."""

    keys: int
    """The address of the keys. `values` and `scales` are addresses too; `scales` is 0 if there are none."""
    values: int
    scales: int
    block_stride: int
    """Bytes from one block to the next; `head_stride` is bytes from one head to the next."""
    head_stride: int
    kv_heads: int
    block_size: int
    kind: int
    """How keys and values are stored: a value of KINDS."""

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, scales: Tensor | None) -> KernelPool:
        """Describe a layer's keys and values [num_blocks, kv_heads, block_size, head_dim]."""
        return cls(
            *(keys.data_ptr(), values.data_ptr(), 0 if scales is None else scales.data_ptr()),
            *(keys.stride(0) * keys.itemsize, keys.stride(1) * keys.itemsize, keys.shape[1], keys.shape[2]),
            KINDS[keys.dtype],
        )


class Scoring(NamedTuple):
    """How the scores of a layer are made (`Paged`), for compiled code."""

    scale: np.float32
    window: int
    """The number of tokens that a query sees; NO_WINDOW if it sees all."""
    soft_cap: np.float32
    """0 if there is none."""
    sinks: int
    """The address of the sinks, [heads] float32; 0 if there are none."""

    @classmethod
    def of(cls, paged: Paged, scale: float) -> Scoring:
        scoring = without_sinks(scale, paged.window, paged.soft_cap)
        return scoring if paged.sinks is None else scoring._replace(sinks=paged.sinks.data_ptr())


@cache
def without_sinks(scale: float, window: int | None, soft_cap: float | None = None) -> Scoring:
    """Return how a layer without sinks makes its scores. It is kept: making it costs each call a microsecond."""
    window = int(NO_WINDOW) if window is None else min(window, int(NO_WINDOW))
    return Scoring(np.float32(scale), window, np.float32(soft_cap or 0), 0)


class Head(NamedTuple):
    """The location of one key/value head of a layer: the addresses of its first row and scales, and the strides."""

    k: int
    v: int
    k_scales: int
    v_scales: int
    kind: int
    block_stride: int
    block_size: int
    row_bytes: int


class Scratch(NamedTuple):
    """The scratch memory of a thread."""

    q: Array
    """[group, head_dim]: the scaled queries. Like `tile`, not used if pairs of bfloat16 are multiplied."""
    o: Array
    """[group, head_dim]: the weighted sums of values."""
    m_l: Array
    """[group, 2]: the largest score, and the sum of weights."""
    p: Array
    """[group, TILE]: the weights. In bfloat16 they fill half of it."""
    tile: Array
    """[TILE, head_dim]: keys or values, widened to float32."""
    places: Array
    """[TILE]: the addresses of keys or values."""


SharedArrays = tuple[Array, Array, Array]
"""`Shared` for compiled code: members, starts, numbers of tokens."""
NOTHING_SHARED: SharedArrays = np.empty(0, np.int32), np.zeros(1, np.int32), np.empty(0, np.int32)
NO_WINDOW = np.int64(2**31 - 1)
TOGETHER = 16
"""The most sequences that go through shared blocks together. Their queries, sums and weights fit the second cache."""
AT_LEAST = 4
"""The fewest members in a chunk, where a prefix's members are divided so that all threads have work."""
LOWEST = np.float32(-1e30)
"""The largest score before there is any. Minus infinity would not do: `LOWEST - LOWEST` must be 0, not NaN."""
SCALE_BYTES = 4
AS_IT_IS, INT8, E4M3 = 0, 1, 2
KINDS = {torch.float32: AS_IT_IS, torch.bfloat16: AS_IT_IS, torch.int8: INT8, torch.uint8: E4M3}
"""How keys and values are stored: as a number, not as a type, so that one compiled loop serves all kinds."""
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
"""LLVM's fast-math flags for compiled loops. They let LLVM reorder sums, which vectors need, and preserve NaN and
infinity.

The loops also spell out what NumPy has functions for. Its searches, and its checked assignments of whole arrays, take
numba seconds to compile, and the first answer waits for them."""


def paged_decode(query: Tensor, paged: Paged, scale: float) -> Tensor:
    """See `minipaged.fast.kernels`."""
    out = torch.empty_like(query)
    _decode(
        as_array(query),
        KernelPool.of(paged.keys, paged.values, paged.scales),
        (paged.tables.numpy(), paged.rows.numpy(), paged.context_lens.numpy()),
        shared_arrays(paged.shared),
        Scoring.of(paged, scale),
        num_pieces(),
        np.float32(0) if paged.scales is not None else pairs_or_floats(query.dtype, query.shape[2]),
        as_array(out),
    )
    return out


def shared_arrays(shared: Shared | None) -> SharedArrays:
    """Return the shared prefixes for compiled code."""
    return NOTHING_SHARED if shared is None else tuple(each.numpy() for each in shared)  # type: ignore[return-value]


def pairs_or_floats(dtype: torch.dtype, head_dim: int) -> Any:
    """Return a number of the type to multiply in: uint16 for pairs of bfloat16 (`decode.py`), or float32. For keys and
    values of the model's type."""
    number = number_type(dtype) if head_dim % (2 * LANES) == 0 else None
    return number if isinstance(number, np.uint16) else np.float32(0)


@inner(inline="always")
def exponential(x):
    """Return exp(x) of a float32: 2**n times a polynomial, which vectorises (a call into the C library does not).

    The largest relative error is about 1e-7. x is clamped to [-87, 87], so the result is at most 1e38 and at least
    1e-38.
    """
    x = min(max(x, np.float32(-87.0)), np.float32(87.0))
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    # ln 2 is in two parts, so that the product of n and the first is exact.
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * float_of_bits(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))


@inner(inline="always")
def capped(score, cap):
    """Return cap × tanh(score / cap), to about 1e-7 of it."""
    x = score / cap
    size = abs(x)
    square = x * x
    small = np.float32(-5.70498872745e-3) * square + np.float32(2.06390887954e-2)
    small = small * square + np.float32(-5.37397155531e-2)
    small = small * square + np.float32(1.33314422036e-1)
    small = small * square + np.float32(-3.33332819422e-1)
    large = np.float32(1) - np.float32(2) / (exponential(size + size) + np.float32(1))
    large = large if x > np.float32(0) else -large
    return cap * (x + x * square * small if size < np.float32(0.625) else large)


@kernel(parallel=True, error_model="numpy")
def _decode(query, pool, where, shared, scoring, num_pieces, number, out):
    """query, out: [seqs, heads, head_dim]. where: tables, rows, context_lens. shared: `SharedArrays`. number: see
    `pairs_or_floats`.

    The parallel loops contain little more than a call, because numba takes several times as long to compile the code
    inside such a loop.
    """
    _, _, context_lens = where
    seqs, heads, head_dim = query.shape
    group = heads // pool.kv_heads
    for s in range(seqs):
        for g in range(heads if context_lens[s] == 0 else 0):
            for d in range(head_dim):
                out[s, g, d] = narrow(np.float32(0), out[0, 0, 0])
    # A piece may begin and end within a pair (sequence, key/value head). These two pairs stay unfinished.
    part_of = np.empty((num_pieces, 2), np.int64)
    part_m_l = np.empty((num_pieces, 2, group, 2), np.float32)
    part_o = np.empty((num_pieces, 2, group, head_dim), np.float32)
    parts = part_m_l.reshape(-1, group, 2), part_o.reshape(-1, group, head_dim)
    work, first, next_of_piece = _divide(context_lens, scoring.window, pool.kv_heads, part_of)
    chunks = _chunks(shared, pool.kv_heads, num_pieces)
    pairs = seqs * pool.kv_heads if len(chunks) else 0
    # `np.zeros` would be a parallel loop of its own here.
    taken, tiles_done = np.empty(1, np.int64), np.empty(pairs, np.int64)
    done = tiles_done, np.empty((pairs, group, 2), np.float32), np.empty((pairs, group, head_dim), np.float32)
    taken[0] = 0
    for pair in range(pairs):
        tiles_done[pair] = 0
    if pairs:  # threads meet at a parallel loop even if it has no turns
        for _ in prange(num_pieces):
            _attend_together(query, pool, where, shared, scoring, chunks, taken, part_of, number, done)
    for piece in prange(num_pieces):
        # After shared blocks, what is left differs from pair to pair: each thread takes the next one.
        at, end = (0, len(work)) if pairs else (piece, first[piece + 1])
        _attend(query, pool, where, scoring, work, next_of_piece[at:], end, number, done, parts, out)
    _merge(part_of, part_m_l, part_o, pool.kv_heads, out)


@inner()
def _divide(context_lens, window, kv_heads, part_of):
    """Divide all tiles into equal pieces [num_pieces]. Returns work [n, 4]: a pair, the first tile, the end, and the
    place among the parts (-1 for a whole pair); and the first work of each piece [num_pieces + 1]. Fills part_of
    [num_pieces, 2] with the pairs that are cut."""
    total = 0
    for s in range(len(context_lens)):
        total += (min(context_lens[s], window) + TILE - 1) // TILE * kv_heads
    num_pieces = len(part_of)
    work = np.empty((len(context_lens) * kv_heads + num_pieces, 4), np.int64)
    first = np.zeros(num_pieces + 1, np.int64)
    n, pair, start, tiles = 0, -1, 0, 0  # the pair's first tile among all tiles, and its number of tiles
    for piece in range(num_pieces):
        part_of[piece, 0] = part_of[piece, 1] = -1
        begin, end = total * piece // num_pieces, total * (piece + 1) // num_pieces
        while begin < end:
            while start + tiles <= begin:
                pair += 1
                start += tiles
                tiles = (min(context_lens[pair // kv_heads], window) + TILE - 1) // TILE
            stop, place = min(end, start + tiles), -1
            if begin > start or stop < start + tiles:
                side = 0 if begin > start else 1
                part_of[piece, side] = pair
                place = 2 * piece + side
            work[n, 0], work[n, 1], work[n, 2], work[n, 3] = pair, begin - start, stop - start, place
            n += 1
            begin = stop
        first[piece + 1] = n
    return work[:n], first, first.copy()


@inner()
def _chunks(shared, kv_heads, num_pieces):
    """Divide the members of the shared prefixes into chunks [n, 3]: the prefix, its first member, and the end. Each
    chunk, with each key/value head, is work for one thread."""
    _, starts, num_tokens = shared
    chunks = np.empty((starts[-1], 3), np.int64)
    n = 0
    for g in range(len(num_tokens)):
        size = np.int64(starts[g + 1] - starts[g])
        for_all_threads = (2 * num_pieces + kv_heads - 1) // kv_heads
        parts = max((size + TOGETHER - 1) // TOGETHER, min(for_all_threads, size // AT_LEAST))
        for i in range(parts if num_tokens[g] >= TILE else 0):
            chunks[n, 0] = g
            chunks[n, 1], chunks[n, 2] = starts[g] + size * i // parts, starts[g] + size * (i + 1) // parts
            n += 1
    return chunks[:n]


@inner(fastmath=FASTMATH, error_model="numpy")
def _attend_together(query, pool, where, shared, scoring, chunks, taken, part_of, number, done):
    """Attend to the whole tiles of shared blocks, one chunk of sequences after another, until none is left. Writes to
    `done`, for each pair: the number of tiles, m and l [group, 2], and o [group, head_dim]. Pairs that are cut are left
    out."""
    tables, rows, _ = where
    members, _, num_tokens = shared
    tiles_done, done_m_l, done_o = done
    kv_heads, group, head_dim = pool.kv_heads, query.shape[1] // pool.kv_heads, query.shape[2]
    most = TOGETHER * group
    most += -most % SCORED  # queries that do not exist are zeros
    queries, pairs = np.zeros((most, head_dim), query.dtype), np.empty(TOGETHER, np.int64)
    q, o = np.empty((most, head_dim), np.float32), np.empty((most, head_dim), np.float32)
    m_l, p = np.empty((most, 2), np.float32), np.empty((most, TILE), np.float32)
    scratch = Scratch(q, o, m_l, p, np.empty((TILE, head_dim), np.float32), np.empty(TILE, np.int64))
    while True:
        item: Any = take(taken.ctypes.data)
        if item >= len(chunks) * kv_heads:
            break
        chunk, h = item // kv_heads, item % kv_heads
        g, n = chunks[chunk, 0], 0
        for i in range(chunks[chunk, 1], chunks[chunk, 2]):
            s = np.int64(members[i])
            if _is_cut(part_of, s * kv_heads + h):
                continue
            pairs[n] = s * kv_heads + h
            for j in range(group):
                m_l[n * group + j, 0], m_l[n * group + j, 1] = _begin(scoring, h * group + j)
                for d in range(head_dim):
                    queries[n * group + j, d] = query[s, h * group + j, d]
            n += 1
        for row in range(most):
            if row >= n * group:
                m_l[row, 0], m_l[row, 1] = LOWEST, 0
            for d in range(head_dim):
                q[row, d], o[row, d] = widen(queries[row, d]) * scoring.scale, 0
        num_tiles = num_tokens[g] // TILE if n else 0
        head, table = _head(pool, h, query, head_dim), tables[rows[members[chunks[chunk, 1]]]]
        for t in range(num_tiles):
            _attend_shared_tile(queries, head, table, t * TILE, num_tokens[g], scoring, n, group, scratch, number)
        for i in range(n):
            tiles_done[pairs[i]] = num_tiles
            for j in range(group):
                row = i * group + j
                done_m_l[pairs[i], j, 0], done_m_l[pairs[i], j, 1] = m_l[row, 0], m_l[row, 1]
                for d in range(head_dim):
                    done_o[pairs[i], j, d] = o[row, d]


@inner()
def _begin(scoring, head):
    """Return m and l of a query head before its first key."""
    if scoring.sinks:
        return array_at(scoring.sinks, head + 1, np.float32(0))[head], np.float32(1)
    return LOWEST, np.float32(0)


@inner()
def _is_cut(part_of, pair):
    cut = False
    for piece in range(len(part_of)):
        cut |= part_of[piece, 0] == pair or part_of[piece, 1] == pair
    return cut


@inner(fastmath=FASTMATH, error_model="numpy")
def _attend(query, pool, where, scoring, work, taken, end, number, done, parts, out):
    """Do the work from the number taken[0] on, up to `end`. Write whole pairs' results to `out`, cut pairs' to
    `parts`. Pairs in `done` go on from what they have."""
    tables, rows, context_lens = where
    part_m_l, part_o = parts
    tiles_done, done_m_l, done_o = done
    kv_heads, group, head_dim = pool.kv_heads, query.shape[1] // pool.kv_heads, query.shape[2]
    q, o = np.empty((group, head_dim), np.float32), np.empty((group, head_dim), np.float32)
    m_l, p = np.empty((group, 2), np.float32), np.empty((group, TILE), np.float32)
    tile, places = np.empty((TILE, head_dim), np.float32), np.empty(TILE, np.int64)
    scratch = Scratch(q, o, m_l, p, tile, places)
    while True:
        item: Any = take(taken.ctypes.data)
        if item >= end:
            break
        pair, begin, stop, place = work[item, 0], work[item, 1], work[item, 2], work[item, 3]
        s, h = pair // kv_heads, pair % kv_heads
        head, queries = _head(pool, h, query, head_dim), query[s : s + 1, h * group : (h + 1) * group]
        goes_on = len(tiles_done) > 0 and tiles_done[pair] > 0
        for g in range(group):
            m_l[g, 0], m_l[g, 1] = LOWEST, np.float32(0)
            if goes_on:
                m_l[g, 0], m_l[g, 1] = done_m_l[pair, g, 0], done_m_l[pair, g, 1]
            elif begin == 0:
                m_l[g, 0], m_l[g, 1] = _begin(scoring, h * group + g)
            for d in range(head_dim):
                q[g, d] = widen(queries[0, g, d]) * scoring.scale
                o[g, d] = done_o[pair, g, d] if goes_on else np.float32(0)
        seen = max(0, context_lens[s] - scoring.window)  # the first token that the query sees
        for t in range(tiles_done[pair] if goes_on else begin, stop):
            _attend_tile(queries, head, tables[rows[s]], seen + t * TILE, context_lens[s], scoring, scratch, number)
        for g in range(group):
            if place < 0:
                for d in range(head_dim):
                    out[s, h * group + g, d] = narrow(o[g, d] / m_l[g, 1], out[0, 0, 0])
            else:
                part_m_l[place, g, 0], part_m_l[place, g, 1] = m_l[g, 0], m_l[g, 1]
                for d in range(head_dim):
                    part_o[place, g, d] = o[g, d]


@inner()
def _head(pool, h, query, head_dim):
    """Return the location of key/value head h. query: an array of the model's type."""
    scale_stride = pool.block_size * SCALE_BYTES  # from one head to the next
    return Head(
        pool.keys + h * pool.head_stride,
        pool.values + h * pool.head_stride,
        pool.scales + h * scale_stride,
        pool.scales + (pool.kv_heads + h) * scale_stride,
        pool.kind,
        pool.block_stride,
        pool.block_size,
        head_dim * (query.itemsize if pool.kind == AS_IT_IS else 1),
    )


@intrinsic
def take(typingctx, address):
    """Return the number at an address and increment it, atomically across threads."""

    def codegen(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.IntType(64)(1), "monotonic")

    return types.int64(types.int64), codegen


def _attend_shared_tile(
    queries: Any,
    head: Any,
    table: Any,
    start: Any,
    end: Any,
    scoring: Any,
    n: Any,
    group: Any,
    scratch: Any,
    number: Any,
) -> None:
    """Attend to the TILE keys from position `start` on, with the queries [n * group, head_dim] of n sequences. `end`:
    of the shared tokens. Only for compiled code, like `_attend_tile`."""
    raise NotImplementedError("for compiled code")


@overload(_attend_shared_tile, jit_options={"fastmath": False})
def _attend_shared_tile_as(queries, head, table, start, end, scoring, n, group, scratch, number):
    def pairs(queries, head, table, start, end, scoring, n, group, scratch, number):
        size, next_size, head_dim = np.int64(TILE), min(TILE, end - start - TILE), np.int64(queries.shape[1])
        places, rows, turned = scratch.places, np.int64(n * group), scratch.tile.ctypes.data
        q, p, o = queries.ctypes.data, scratch.p.ctypes.data, scratch.o.ctypes.data
        _find_rows(head.k, head, table, start, size, places)
        turn_keys(places.ctypes.data, head_dim, turned)
        # A few lines are prefetched at a time: more would wait for each other.
        for i in range(0, rows, SCORED):
            a, z = TILE * i // rows, min(TILE, TILE * (i + SCORED) // rows)
            _prefetch_tile(head.v, head.block_stride, head.block_size, table, start + a, z - a, head.row_bytes)
            score_turned(
                *(q + i * head_dim * 2, turned, np.int64(SCORED), head_dim),
                *(scoring.scale, scoring.soft_cap),
                *(p + i * TILE * 2, o + i * head_dim * 4, scratch.m_l.ctypes.data + i * 8),
            )
        for j in range(TILE):
            places[j] += head.v - head.k
        for i in range(0, rows, GROUPS[0]):
            a, z = next_size * i // rows, min(next_size, next_size * (i + GROUPS[0]) // rows)
            _prefetch_tile(head.k, head.block_stride, head.block_size, table, start + TILE + a, z - a, head.row_bytes)
            add_values(
                *(places.ctypes.data, size, min(np.int64(GROUPS[0]), rows - i), head_dim),
                *(p + i * TILE * 2, o + i * head_dim * 4),
            )

    def floats(queries, head, table, start, end, scoring, n, group, scratch, number):
        # The size is TILE. But if LLVM knew that, it would compile the loops once more for it, and add sums in another
        # order than without sharing.
        size, next_size = min(TILE, end - start), min(TILE, end - start - TILE)
        like = queries.reshape(1, queries.shape[0], queries.shape[1])
        k, v, kind, block_stride, block_size = head.k, head.v, head.kind, head.block_stride, head.block_size
        q, o, m_l, p, tile = scratch.q, scratch.o, scratch.m_l, scratch.p, scratch.tile
        read_tile(k, head.k_scales, kind, block_stride, block_size, table, start, size, like, tile)
        _prefetch_tile(v, block_stride, block_size, table, start, size, head.row_bytes)
        for i in range(0, n * group, group):  # each sequence by itself, for the same bits as without sharing
            own, cap = m_l[i : i + group], scoring.soft_cap
            _take_scores(q[i : i + group], tile, size, cap, own[:, 0], own[:, 1], o[i : i + group], p[i : i + group])
        read_tile(v, head.v_scales, kind, block_stride, block_size, table, start, size, like, tile)
        _prefetch_tile(k, block_stride, block_size, table, start + TILE, next_size, head.row_bytes)
        for i in range(0, n * group, group):
            _take_values(p[i : i + group], tile, size, o[i : i + group])

    return pairs if number == types.uint16 else floats


def _attend_tile(
    queries: Any, head: Any, table: Any, start: Any, context_len: Any, scoring: Any, scratch: Any, number: Any
) -> None:
    """Attend to up to TILE keys from position `start` on, with a sequence's queries [1, group, head_dim]. Only for
    compiled code."""
    raise NotImplementedError("for compiled code")


@overload(_attend_tile, jit_options={"fastmath": False})
def _attend_tile_as(queries, head, table, start, context_len, scoring, scratch, number):
    def pairs(queries, head, table, start, context_len, scoring, scratch, number):
        size, next_size = min(TILE, context_len - start), min(TILE, context_len - start - TILE)
        _, group, head_dim = queries.shape
        places, p, o = scratch.places, scratch.p.ctypes.data, scratch.o.ctypes.data
        _find_rows(head.k, head, table, start, size, places)
        _prefetch_tile(head.v, head.block_stride, head.block_size, table, start, size, head.row_bytes)
        score_tile(
            *(queries.ctypes.data, places.ctypes.data, np.int64(size), group, head_dim),
            *(scoring.scale, scoring.soft_cap, p, o, scratch.m_l.ctypes.data),
        )
        for j in range(TILE):
            places[j] += head.v - head.k
        _prefetch_tile(head.k, head.block_stride, head.block_size, table, start + TILE, next_size, head.row_bytes)
        add_values(places.ctypes.data, np.int64(size), group, head_dim, p, o)

    def floats(queries, head, table, start, context_len, scoring, scratch, number):
        size, next_size = min(TILE, context_len - start), min(TILE, context_len - start - TILE)
        k, v, kind, block_stride, block_size = head.k, head.v, head.kind, head.block_stride, head.block_size
        tile, p, o = scratch.tile, scratch.p, scratch.o
        read_tile(k, head.k_scales, kind, block_stride, block_size, table, start, size, queries, tile)
        _prefetch_tile(v, block_stride, block_size, table, start, size, head.row_bytes)
        _take_scores(scratch.q, tile, size, scoring.soft_cap, scratch.m_l[:, 0], scratch.m_l[:, 1], o, p)
        read_tile(v, head.v_scales, kind, block_stride, block_size, table, start, size, queries, tile)
        _prefetch_tile(k, block_stride, block_size, table, start + TILE, next_size, head.row_bytes)
        _take_values(p, tile, size, o)

    return pairs if number == types.uint16 else floats


@inner()
def _find_rows(pool, head, table, start, size, places):
    """Fill `places` with the addresses of `size` keys (or values) from position `start` on, and repeat the last one."""
    block, offset = start // head.block_size, start % head.block_size
    place = np.int64(0)
    for j in range(TILE):
        if j < size:
            place = pool + table[block] * head.block_stride + offset * head.row_bytes
        places[j] = place
        offset += 1
        if offset == head.block_size:
            block, offset = block + 1, 0


@inner()
def _prefetch_tile(pool, block_stride, block_size, table, start, size, row_bytes):
    """Prefetch the memory that `read_tile` will read next, while other work is being computed."""
    j, block, offset = 0, start // block_size, start % block_size
    while j < size:
        there = min(block_size - offset, size - j)
        address = pool + table[block] * block_stride + offset * row_bytes
        for line in range(0, there * row_bytes, CACHE_LINE):
            prefetch(address + line)
        j, block, offset = j + there, block + 1, 0


@loop()
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
    # Their weight is 0 in `_take_values`, but 0 times a leftover NaN of another sequence is NaN.
    for rest in range(size, min((size + STEP - 1) // STEP * STEP, len(tile))):
        for d in range(head_dim):
            tile[rest, d] = 0


@inner()
def _read_codes(codes, scales, first, tile):
    """Decode the codes of some keys (or values) into the rows of `tile` from `first` on."""
    head_dim = tile.shape[1]
    factors = array_at(scales, len(codes) // head_dim, np.float32(0))
    for i in range(len(factors)):
        for d in range(head_dim):
            tile[first + i, d] = widen(codes[i * head_dim + d]) * factors[i]


@inner(fastmath=FASTMATH, error_model="numpy")
def _cap_scores(p, size, cap):
    for g in range(len(p)):
        for j in range(size):
            p[g, j] = capped(p[g, j], cap)


@loop(fastmath=FASTMATH, error_model="numpy")
def _take_scores(q, tile, size, cap, m, l, o, p):  # noqa: E741
    """Score `size` keys against the group's queries, with a soft cap unless it is 0. Update m, l and o, and write the
    weights to p [group, TILE]."""
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
    if cap > 0:
        _cap_scores(p, size, cap)
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


@loop(fastmath=FASTMATH, error_model="numpy")
def _score_three(qa, qb, qc, tile, size, pa, pb, pc):
    """Score keys for three heads at a time. Each key is loaded once for all (a quarter less time than head by head)."""
    for j in range(size):
        k = tile[j]
        a, b, c = np.float32(0), np.float32(0), np.float32(0)
        for d in range(len(k)):
            a += qa[d] * k[d]
            b += qb[d] * k[d]
            c += qc[d] * k[d]
        pa[j], pb[j], pc[j] = a, b, c


@loop(fastmath=FASTMATH, error_model="numpy")
def _take_values(p, tile, size, o):
    """Add the weighted values to o [group, head_dim], STEP keys each time that the sums are loaded and stored."""
    group, head_dim = o.shape
    threes = group - group % 3
    for g in range(0, threes, 3):
        _add_three(p[g], p[g + 1], p[g + 2], tile, size, o[g], o[g + 1], o[g + 2])
    for g in range(threes, group):
        for j in range(0, size, STEP):
            a0, a1, a2, a3 = p[g, j], p[g, j + 1], p[g, j + 2], p[g, j + 3]
            for d in range(head_dim):
                o[g, d] += a0 * tile[j, d] + a1 * tile[j + 1, d] + a2 * tile[j + 2, d] + a3 * tile[j + 3, d]


@loop(fastmath=FASTMATH, error_model="numpy")
def _add_three(pa, pb, pc, tile, size, oa, ob, oc):
    """Add values for three heads at a time. Each value is loaded once for all (a third less time than head by head)."""
    for j in range(0, size, STEP):
        a0, a1, a2, a3 = pa[j], pa[j + 1], pa[j + 2], pa[j + 3]
        b0, b1, b2, b3 = pb[j], pb[j + 1], pb[j + 2], pb[j + 3]
        c0, c1, c2, c3 = pc[j], pc[j + 1], pc[j + 2], pc[j + 3]
        for d in range(len(oa)):
            v0, v1, v2, v3 = tile[j, d], tile[j + 1, d], tile[j + 2, d], tile[j + 3, d]
            oa[d] += a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3
            ob[d] += b0 * v0 + b1 * v1 + b2 * v2 + b3 * v3
            oc[d] += c0 * v0 + c1 * v1 + c2 * v2 + c3 * v3


@inner(error_model="numpy")
def _merge(part_of, part_m_l, part_o, kv_heads, out):
    """Merge the parts of each pair (sequence, key/value head) that was cut, and write the results to `out`."""
    group, head_dim = part_o.shape[2], part_o.shape[3]
    part_of = part_of.reshape(-1)
    part_m_l, part_o = part_m_l.reshape(-1, group, 2), part_o.reshape(-1, group, head_dim)
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
                    m = max(m, part_m_l[j, g, 0])
            l, o = np.float32(0), np.zeros(head_dim, np.float32)  # noqa: E741
            for j in range(i, len(part_of)):
                if part_of[j] == pair:
                    fade = np.float32(np.exp(part_m_l[j, g, 0] - m))
                    l += part_m_l[j, g, 1] * fade  # noqa: E741
                    for d in range(head_dim):
                        o[d] += part_o[j, g, d] * fade
            for d in range(head_dim):
                out[pair // kv_heads, pair % kv_heads * group + g, d] = narrow(o[d] / l, out[0, 0, 0])
