"""A prompt's attention on a CPU with vectors of 512 bits: matrix products on tiles of keys and values.

A *row* is one query of one head. The heads that share a key/value head are neighbours, so that keys and values are
fetched once for all of them. Each of the 16 lanes of a vector is a row, and ROWS rows are computed together:

    S = K @ Q.T   [keys, rows]    keys as their block stores them; queries are transposed once
    P = 2 ** (S * scale * log2(e) - m), and the largest score m and the sum l of each row
    O += V.T @ P  [head_dim, rows]    values of two neighbouring keys, interleaved once per tile

The largest score and the sum of a row belong to one lane, so nothing is ever added up across lanes. In bfloat16 one
instruction (vdpbf16ps) multiplies two numbers of each lane by two and adds both products to a float32. So P is rounded
to bfloat16; scores, sums and results are float32. The sums of 8 keys (or dimensions) and 3 vectors of rows are kept in
24 of the 32 registers: 24 such instructions load only 3 vectors. Their other factor is one number for all lanes, which
each instruction reads from the cache.

The work is cut into items of ITEM rows of one key/value head, or of ROWS if ITEM would leave threads without work. Each
thread takes the next item when it has finished one, a sequence's longest first. So a thread that shares its core with
another process takes fewer items.

A row's result does not depend on the other rows, if all values are finite: tiles of keys begin at multiples of TILE,
whatever chunk the row is in. (A chunk of one query is computed like decoding, which differs in the last bits.) With a
window, the first tile that some row sees is read from the first key that some row sees, so nothing before the window is
read.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg, attr-defined"

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from torch import Tensor

from minipaged.fast.cpu.attention import (
    KINDS,
    LOWEST,
    SCALE_BYTES,
    STEP,
    KernelPool,
    Scoring,
    paged_decode,
    read_tile,
    take,
)
from minipaged.fast.cpu.bfloat16 import array_at, as_array, narrow, widen
from minipaged.fast.cpu.kernel_cache import inner, kernel
from minipaged.fast.cpu.threads import num_pieces
from minipaged.fast.cpu.vectors import BITS8, BITS32, BITS64, FLOATS, INTEGERS, LANES, PAIRS, Vectors, number_type
from minipaged.fast.kernels import Paged

VECTORS = 3
ROWS = LANES * VECTORS
"""The number of rows whose sums are in registers together."""
TOGETHER = 8
"""The number of keys, or dimensions, whose sums are in registers together."""
TILE = 64
"""The number of keys between two updates of a row's largest score. Scores, keys, values and queries of such a tile fit
the nearest cache."""
LOG2_E = math.log2(math.e)
ITEM = 4 * ROWS
"""The number of rows for which a tile of keys is fetched once."""
QUERY_TILE = 256
KEY_TILE = 1024
"""The number of queries (`QUERY_TILE`) and keys in one of torch's products, without vectors of 512 bits. They are large
enough to be fast, and the scores fit the cache."""


def paged_prefill(query: Tensor, paged: Paged, query_start: Tensor, scale: float, *, max_query_len: int) -> Tensor:
    """See `minipaged.fast.kernels`. Sequences with one query are passed to `paged_decode`."""
    out = torch.empty_like(query)
    single = np.flatnonzero(np.diff(query_start.numpy()) == 1)  # [sequences with one query]
    if len(single):
        tokens = query_start[single].long()
        one_query = paged._replace(rows=paged.rows[single], context_lens=paged.context_lens[single])
        out[tokens] = paged_decode(query[tokens], one_query, scale)
    if max_query_len > 1:
        number = number_type(query.dtype if paged.scales is None and query.shape[2] % 2 == 0 else torch.float32)
        if number is None:
            _prefill_by_library(query, paged, query_start, scale, out)
            return out
        pool = KernelPool.of(paged.keys, paged.values, paged.scales)
        where = paged.tables.numpy(), paged.rows.numpy(), query_start.numpy(), paged.context_lens.numpy()
        _prefill(as_array(query), pool, where, Scoring.of(paged, scale), num_pieces(), number, as_array(out))
    return out


def _prefill_by_library(query: Tensor, paged: Paged, query_start: Tensor, scale: float, out: Tensor) -> None:
    """Compute without vectors of 512 bits: torch does the products, in float32. Keys and values are gathered KEY_TILE
    at a time, and the online softmax runs over those tiles."""
    query_lens = query_start[1:] - query_start[:-1]  # [seqs]
    for s in torch.nonzero(query_lens > 1)[:, 0].tolist():
        begin, end, context_len = int(query_start[s]), int(query_start[s + 1]), int(paged.context_lens[s])
        num_blocks = -(-context_len // paged.keys.shape[2])
        blocks = paged.tables[int(paged.rows[s]), :num_blocks]
        for tile in range(begin, end, QUERY_TILE):
            stop = min(end, tile + QUERY_TILE)
            out[tile:stop] = _prefill_tile(
                query[tile:stop], paged, blocks, context_len - (end - tile), context_len, scale
            )


def _prefill_tile(query: Tensor, paged: Paged, blocks: Tensor, first: int, context_len: int, scale: float) -> Tensor:
    """Attend with up to QUERY_TILE queries [T, heads, head_dim] of one sequence, the first one at position `first`."""
    T, heads, head_dim = query.shape
    kv_heads, block_size = paged.keys.shape[1:3]
    group = heads // kv_heads
    q = query.float().mul_(scale) if query.dtype != torch.float32 else query * scale
    q = q.view(T, kv_heads, group, head_dim).permute(1, 0, 2, 3).reshape(kv_heads, T * group, head_dim)
    position = first + torch.arange(T).repeat_interleave(group)  # [T * group]
    # The first m is finite: a row that has seen no key yet subtracts it from itself.
    m = torch.full((kv_heads, T * group, 1), float(LOWEST))
    l = torch.zeros(kv_heads, T * group, 1)  # noqa: E741
    if paged.sinks is not None:
        m, l = paged.sinks.view(kv_heads, 1, group).repeat(1, T, 1).view(m.shape), l + 1  # noqa: E741
    o = torch.zeros(kv_heads, T * group, head_dim)
    seen = min(context_len, first + T)  # keys past it come after every query
    window = seen if paged.window is None else paged.window
    before = max(0, first + 1 - window)  # keys that come before every query's window
    step = max(1, KEY_TILE // block_size)  # blocks per tile
    key_scales, value_scales = (None, None) if paged.scales is None else paged.scales.unbind(1)
    like = as_array(query)
    for j in range(before // block_size, -(-seen // block_size), step):
        start, stop = j * block_size, min((j + step) * block_size, seen)
        K = _gather(paged.keys, key_scales, blocks[j : j + step], stop - start, like)  # [kv_heads, keys, head_dim]
        V = _gather(paged.values, value_scales, blocks[j : j + step], stop - start, like)  # [kv_heads, keys, head_dim]
        scores = q @ K.mT  # [kv_heads, T * group, keys]
        if paged.soft_cap is not None:
            scores.div_(paged.soft_cap).tanh_().mul_(paged.soft_cap)
        key = torch.arange(start, stop)  # [keys]
        if stop > first + 1:  # at least the first query must not see all of these keys
            scores.masked_fill_(key > position[:, None], -torch.inf)
        if start <= first + T - 1 - window:  # at least the last query must not see all of them
            scores.masked_fill_(key <= position[:, None] - window, -torch.inf)
            V[:, : max(0, before - start)] = 0  # nobody sees them, but weight 0 × NaN would be NaN
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        fade = torch.exp(m - m_new)
        p = scores.sub_(m_new).exp_()
        l = l * fade + p.sum(-1, keepdim=True)  # noqa: E741
        o = torch.baddbmm(o.mul_(fade), p, V)
        m = m_new
    o = (o / l).view(kv_heads, T, group, head_dim).permute(1, 0, 2, 3)
    return o.reshape(T, heads, head_dim)


def _gather(pool: Tensor, scales: Tensor | None, blocks: Tensor, num_keys: int, like: Any) -> Tensor:
    """Return the first `num_keys` keys (or values) of these blocks: float32 [kv_heads, num_keys, head_dim].

    like: an array of the model's type.
    """
    kv_heads, block_size, head_dim = pool.shape[1:]
    tiles = torch.empty(kv_heads, -(-num_keys // STEP) * STEP, head_dim)
    _read_heads(
        pool.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        KINDS[pool.dtype],
        pool.stride(0) * pool.itemsize,
        pool.stride(1) * pool.itemsize,
        block_size,
        blocks.numpy(),
        num_keys,
        like,
        tiles.numpy(),
    )
    return tiles[:, :num_keys]


@kernel()
def _read_heads(pool, scales, kind, block_stride, head_stride, block_size, table, size, like, tiles):
    """Read the first `size` keys (or values) of each head in `table` to `tiles` [kv_heads, size or more, head_dim]."""
    for h in range(len(tiles)):
        head, head_scales = pool + h * head_stride, scales + h * block_size * SCALE_BYTES
        read_tile(head, head_scales, kind, block_stride, block_size, table, 0, size, like, tiles[h])


@kernel(parallel=True, error_model="numpy")
def _prefill(query, pool, where, scoring, num_pieces, number, out):
    """query, out: [tokens, heads, head_dim]. where: tables, rows, query_start, context_lens. number: a number of the
    type to multiply in."""
    _, rows, query_start, _ = where
    group = query.shape[1] // pool.kv_heads
    item_rows = ITEM if len(query) * query.shape[1] >= num_pieces * ITEM else ROWS
    first_item = np.zeros(len(rows) + 1, np.int64)  # each sequence's first item; a sequence with one query has no items
    for s in range(len(rows)):
        n = np.int64(query_start[s + 1] - query_start[s])
        items = (n * group + item_rows - 1) // item_rows * pool.kv_heads if n > 1 else 0
        first_item[s + 1] = first_item[s] + items
    taken = np.zeros(1, np.int64)
    for _ in prange(min(num_pieces, first_item[-1])):
        _work(query, pool, where, scoring, first_item, item_rows, taken, number, out)


@inner(error_model="numpy")
def _work(query, pool, where, scoring, first_item, item_rows, taken, number, out):
    """Compute items of up to `item_rows` rows each, until none is left."""
    tables, rows, query_start, context_lens = where
    head_dim, kv_heads = query.shape[2], pool.kv_heads
    blocks, wide = ITEM // ROWS, head_dim + -head_dim % TOGETHER
    q = _aligned(blocks * head_dim * ROWS).reshape(blocks, head_dim, ROWS)  # or half the number of pairs
    o = _aligned(blocks * wide * ROWS).reshape(blocks, wide, ROWS)
    m_l = _aligned(blocks * 2 * ROWS).reshape(blocks, 2, ROWS)
    limits = np.empty((blocks, ROWS), np.int32)
    # Rows are head_dim apart. Numbers past the last one are multiplied too; nothing reads their sums.
    k, v = _aligned(TILE * wide).reshape(TILE, wide), _aligned(TILE * wide).reshape(TILE, wide)
    scores = _aligned(TILE * max(ROWS, head_dim))  # before there are any: values to interleave
    s = 0
    while True:
        item: Any = take(taken.ctypes.data)
        if item >= first_item[-1]:
            break
        while first_item[s + 1] <= item:
            s += 1
        tiles = (first_item[s + 1] - first_item[s]) // kv_heads
        tile, h = tiles - 1 - (item - first_item[s]) // kv_heads, (item - first_item[s]) % kv_heads
        begin, context_len = np.int64(query_start[s]), np.int64(context_lens[s])
        n = np.int64(query_start[s + 1]) - begin
        _attend(
            *(
                query[begin : begin + n],
                pool,
                h,
                tables[rows[s]],
                tile * item_rows,
                item_rows,
                context_len,
                scoring,
                number,
            ),
            *(q, o, m_l, limits, k, v, scores, out[begin : begin + n]),
        )


@inner()
def _aligned(size):
    """Return an array [size] float32 that begins at a cache line."""
    room = np.empty(size + LANES, np.float32)
    first = -room.ctypes.data % 64 // 4
    return room[first : first + size]


@inner(error_model="numpy")
def _attend(query, pool, h, table, first, most, context_len, scoring, number, q, o, m_l, limits, k, v, scores, out):
    """Attend with up to `most` rows from `first` on of key/value head h. query, out: [queries, heads, head_dim] of one
    sequence.

    The arguments between `number` and `out` are scratch memory.
    """
    head_dim, group = query.shape[2], query.shape[1] // pool.kv_heads
    num_rows = min(most, len(query) * group - first)
    blocks = (num_rows + ROWS - 1) // ROWS
    before = context_len - len(query)
    for r in range(blocks * ROWS):
        b, i = r // ROWS, r % ROWS
        row = first + min(r, num_rows - 1)  # past the last row, the last one again
        limits[b, i] = before + row // group + 1
        _turn(query[row // group, h * group + row % group], q[b], i, number)
        m_l[b, 0, i], m_l[b, 1, i] = LOWEST, 0
        if scoring.sinks:
            sinks = array_at(scoring.sinks, query.shape[1], np.float32(0))
            m_l[b, 0, i], m_l[b, 1, i] = sinks[h * group + row % group] * np.float32(LOG2_E), 1
    for b in range(blocks):
        for d in range(o.shape[1]):
            for i in range(ROWS):
                o[b, d, i] = 0
    seen, window = np.int64(limits[blocks - 1, ROWS - 1]), scoring.window
    unseen = max(0, limits[0, 0] - window)  # keys that come before every row's window
    for start in range(unseen // TILE * TILE, seen, TILE):
        size, skipped = min(TILE, seen - start), max(0, unseen - start)
        _read_keys(pool, h, table, start, skipped, size, query, k, number)
        _read_values(pool, h, table, start, skipped, size, query, v, scores, number)
        for b in range(blocks):
            needed = min(size, limits[b, ROWS - 1] - start)
            if needed > 0 and start + needed > limits[b, 0] - window:
                needed += -needed % TOGETHER
                masks = np.int64(limits[b, 0] < start + needed or start < limits[b, ROWS - 1] - window)
                _attend_tile(
                    *(q[b].ctypes.data, k.ctypes.data, v.ctypes.data, scores.ctypes.data, o[b].ctypes.data),
                    *(m_l[b].ctypes.data, limits[b].ctypes.data, start, needed, head_dim, masks, window),
                    *(scoring.scale, scoring.soft_cap, number),
                )
    for r in range(num_rows):
        b, i, row = r // ROWS, r % ROWS, first + r
        share = np.float32(1) / m_l[b, 1, i]
        to = out[row // group, h * group + row % group]
        for d in range(head_dim):
            to[d] = narrow(o[b, d, i] * share, to[0])


def _turn(row: Any, q: Any, i: Any, number: Any) -> None:
    """Copy query `row` [head_dim] to lane i of q [head_dim, ROWS]. Only for compiled code, like the functions below."""
    raise NotImplementedError("for compiled code")


@overload(_turn)
def _turn_query(row, q, i, number):
    def pairs(row, q, i, number):
        to = array_at(q.ctypes.data, len(row) // 2 * ROWS, np.uint32(0))
        for d in range(len(row) // 2):
            to[d * ROWS + i] = np.uint32(row[2 * d]) | np.uint32(row[2 * d + 1]) << np.uint32(16)

    def floats(row, q, i, number):
        for d in range(len(row)):
            q[d, i] = widen(row[d])

    return pairs if number == types.uint16 else floats


def _read_keys(
    pool: Any, h: Any, table: Any, start: Any, skipped: Any, size: Any, like: Any, k: Any, number: Any
) -> None:
    """Copy `size` keys from position `start` on, one after another, to the beginning of k. The first `skipped` of them
    are left out."""
    raise NotImplementedError("for compiled code")


@overload(_read_keys)
def _read_keys_as(pool, h, table, start, skipped, size, like, k, number):
    def pairs(pool, h, table, start, skipped, size, like, k, number):
        head, row_bytes = pool.keys + h * pool.head_stride, 2 * like.shape[2]
        _copy(pool, head, table, start + skipped, size - skipped, row_bytes, k.ctypes.data + skipped * row_bytes)

    def floats(pool, h, table, start, skipped, size, like, k, number):
        head, factors = pool.keys + h * pool.head_stride, pool.scales + h * pool.block_size * SCALE_BYTES
        rows, at, left = _rows(k, skipped, like.shape[2]), start + skipped, size - skipped
        read_tile(head, factors, pool.kind, pool.block_stride, pool.block_size, table, at, left, like, rows)

    return pairs if number == types.uint16 else floats


def _read_values(
    pool: Any,
    h: Any,
    table: Any,
    start: Any,
    skipped: Any,
    size: Any,
    like: Any,
    v: Any,
    room: Any,
    number: Any,
) -> None:
    """Copy `size` values from position `start` on to v, followed by zeros up to a multiple of TOGETHER. The first
    `skipped` of them are zeros: weight 0 × NaN would be NaN."""
    raise NotImplementedError("for compiled code")


@overload(_read_values)
def _read_values_as(pool, h, table, start, skipped, size, like, v, room, number):
    def pairs(pool, h, table, start, skipped, size, like, v, room, number):
        head_dim, head = like.shape[2], pool.values + h * pool.head_stride
        row_bytes, room_at, v_at = 2 * head_dim, room.ctypes.data, v.ctypes.data
        _copy(pool, head, table, start + skipped, size - skipped, row_bytes, room_at + skipped * row_bytes)
        whole = size + -size % TOGETHER
        rest = array_at(room_at + size * row_bytes, (whole - size) * head_dim, np.uint16(0))
        for i in range(len(rest)):
            rest[i] = 0
        before = array_at(room_at, skipped * head_dim, np.uint16(0))
        for i in range(len(before)):
            before[i] = 0
        for j in range(whole // 2):
            low = array_at(room_at + 2 * j * row_bytes, head_dim, np.uint16(0))
            high = array_at(room_at + (2 * j + 1) * row_bytes, head_dim, np.uint16(0))
            both = array_at(v_at + j * head_dim * 4, head_dim, np.uint32(0))
            for d in range(head_dim):
                both[d] = np.uint32(low[d]) | np.uint32(high[d]) << np.uint32(16)

    def floats(pool, h, table, start, skipped, size, like, v, room, number):
        head_dim, head = like.shape[2], pool.values + h * pool.head_stride
        to = array_at(v.ctypes.data, TILE * head_dim, np.float32(0))
        factors = pool.scales + (pool.kv_heads + h) * pool.block_size * SCALE_BYTES
        rows, at, left = _rows(v, skipped, head_dim), start + skipped, size - skipped
        read_tile(head, factors, pool.kind, pool.block_stride, pool.block_size, table, at, left, like, rows)
        for i in range(skipped * head_dim):
            to[i] = 0
        for rest in range(size * head_dim, (size + -size % TOGETHER) * head_dim):
            to[rest] = 0

    return pairs if number == types.uint16 else floats


@inner()
def _rows(tile, first, head_dim):
    """Return the rows of a tile from `first` on: [TILE - first, head_dim]."""
    count = TILE - first
    return array_at(tile.ctypes.data + first * head_dim * 4, count * head_dim, np.float32(0)).reshape(count, head_dim)


@inner()
def _copy(pool, head, table, start, size, row_bytes, address):
    """Copy keys (or values) unchanged, block after block, to an address. `head`: the head's address in block 0."""
    j, block, offset = 0, start // pool.block_size, start % pool.block_size
    while j < size:
        there = min(pool.block_size - offset, size - j)
        place = head + table[block] * pool.block_stride + offset * row_bytes
        _copy_bytes(address + j * row_bytes, place, there * row_bytes)
        j, block, offset = j + there, block + 1, 0


@intrinsic
def _copy_bytes(typingctx, to, source, size):
    """Copy `size` bytes from one address to another."""

    def codegen(context, builder, signature, arguments):
        to, source = (builder.inttoptr(address, BITS8.as_pointer()) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 3), codegen


@intrinsic
def _attend_tile(typingctx, q, k, v, scores, o, m_l, limits, start, size, head_dim, masks, window, scale, cap, number):
    """Attend to a tile of `size` keys, a multiple of TOGETHER, with ROWS rows. The first 7 arguments are addresses.
    `masks`: whether some of the rows must not see some of the keys. `cap`: the soft cap, 0 for none."""

    def codegen(context, builder, signature, arguments):
        Attention(builder, *arguments[:14], number == types.uint16).write()
        return context.get_dummy_value()

    return types.none(*[types.int64] * 12, *[types.float32] * 2, number), codegen


class Attention(Vectors):
    """Writes the attention of a block of rows to a tile of keys as LLVM code."""

    def __init__(
        self,
        builder,
        q,
        k,
        v,
        scores,
        o,
        m_l,
        limits,
        start,
        size,
        head_dim,
        masks,
        window,
        scale,
        cap,
        in_pairs,
    ) -> None:
        """All arguments are values in the LLVM program, except `in_pairs`: whether it multiplies pairs of bfloat16."""
        super().__init__(builder)
        self.q, self.k, self.v, self.scores, self.o, self.m_l, self.limits = q, k, v, scores, o, m_l, limits
        self.start, self.size, self.head_dim, self.masks, self.scale = start, size, head_dim, masks, scale
        self.window, self.cap, self.in_pairs = window, cap, in_pairs

    def write(self) -> None:
        b = self.builder
        log2_e = ir.Constant(ir.FloatType(), LOG2_E)
        scale = self.spread(b.fmul(self.scale, log2_e))
        before = [self.load(self.m_l, FLOATS, 64 * i) for i in range(VECTORS)]
        highest = [self.variable() for _ in before]
        for variable, m in zip(highest, before, strict=True):
            b.store(m, variable)
        with cgutils.for_range(b, b.udiv(self.size, BITS64(TOGETHER))) as loop:
            self.write_scores(b.mul(loop.index, BITS64(TOGETHER)), scale, highest)
        with self.where_capped(self.cap):
            self.cap_scores(b.fmul(self.cap, log2_e), before, highest)
        m = [b.load(variable) for variable in highest]
        fade = [self.power(b.fsub(old, new)) for old, new in zip(before, m, strict=True)]
        totals = [self.variable() for _ in m]
        for i in range(VECTORS):
            b.store(b.fmul(self.load(self.m_l, FLOATS, 4 * ROWS + 64 * i), fade[i]), totals[i])
            self.store(m[i], self.m_l, 64 * i)
        with cgutils.for_range(b, self.halved(self.size)) as loop:
            self.write_weights(loop.index, m, totals)
        for i in range(VECTORS):
            self.store(b.load(totals[i]), self.m_l, 4 * ROWS + 64 * i)
        chunks = b.udiv(b.add(self.head_dim, BITS64(TOGETHER - 1)), BITS64(TOGETHER))
        with cgutils.for_range(b, chunks) as loop:
            self.add_values(b.mul(loop.index, BITS64(TOGETHER)), fade)

    def write_scores(self, first, scale, highest) -> None:
        """Score TOGETHER keys from `first` on, and update the largest scores."""
        b = self.builder
        row_bytes = b.mul(self.head_dim, BITS64(2 if self.in_pairs else 4))
        keys = [b.add(self.k, b.mul(b.add(first, BITS64(j)), row_bytes)) for j in range(TOGETHER)]
        sums = [[self.variable() for _ in range(VECTORS)] for _ in keys]
        with cgutils.for_range(b, self.halved(self.head_dim)) as loop:
            rows = self.vectors(self.place(self.q, loop.index, 4 * ROWS))
            for key, totals in zip(keys, sums, strict=True):
                self.add_products(totals, rows, self.place(key, loop.index, 4))
        for totals in sums:
            for total in totals:
                b.store(b.fmul(b.load(total), scale), total)
        with self.where(self.masks):
            window = self.spread(b.trunc(self.window, BITS32))
            for j, totals in enumerate(sums):
                position = b.trunc(b.add(b.add(self.start, first), BITS64(j)), BITS32)
                for i, total in enumerate(totals):
                    # How many tokens the row's own is after this key; as an unsigned number, large if it is before it.
                    after = b.sub(self.load(self.limits, INTEGERS, 64 * i), self.spread(b.add(position, BITS32(1))))
                    sees = b.icmp_unsigned("<", after, window)
                    lowest = self.all_of(FLOATS, -math.inf)
                    b.store(b.select(sees, b.load(total), lowest), total)
        for j, totals in enumerate(sums):
            to = self.place(self.scores, b.add(first, BITS64(j)), 4 * ROWS)
            for i, total in enumerate(totals):
                score, m = b.load(total), b.load(highest[i])
                self.store(score, to, 64 * i)
                b.store(b.select(b.fcmp_ordered(">", score, m), score, m), highest[i])

    def cap_scores(self, cap, before, highest) -> None:
        """Cap all scores, and find the largest again. `cap`: in units of log2(e), as the scores are."""
        b, lowest = self.builder, self.all_of(FLOATS, -math.inf)
        for variable, m in zip(highest, before, strict=True):
            b.store(m, variable)
        with cgutils.for_range(b, self.size) as loop:
            at = self.place(self.scores, loop.index, 4 * ROWS)
            for i, variable in enumerate(highest):
                score, m = self.load(at, FLOATS, 64 * i), b.load(variable)
                score = b.select(b.fcmp_ordered("==", score, lowest), lowest, self.capped(score, cap))
                self.store(score, at, 64 * i)
                b.store(b.select(b.fcmp_ordered(">", score, m), score, m), variable)

    def write_weights(self, step, m, totals) -> None:
        """Write one key's weights. In bfloat16: two keys', interleaved, over scores that have been read already."""
        b, keys = self.builder, 2 if self.in_pairs else 1
        for i in range(VECTORS):
            at = self.place(self.scores, step, 4 * ROWS * keys)
            weights = [self.power(b.fsub(self.load(at, FLOATS, 64 * i + 4 * ROWS * j), m[i])) for j in range(keys)]
            for weight in weights:
                b.store(b.fadd(b.load(totals[i]), weight), totals[i])
            to = self.place(self.scores, step, 4 * ROWS)
            if self.in_pairs:  # round to nearest: add half a unit of the last place, cut off the rest
                half = self.all_of(INTEGERS, 0x8000)
                low, high = (b.add(b.bitcast(weight, INTEGERS), half) for weight in weights)
                upper = b.and_(high, self.all_of(INTEGERS, 0xFFFF0000))
                self.store(b.or_(b.lshr(low, self.all_of(INTEGERS, 16)), upper), to, 64 * i)
            else:
                self.store(weights[0], to, 64 * i)

    def add_values(self, first, fade) -> None:
        """Add the weighted values to the sums of TOGETHER dimensions from `first` on."""
        b = self.builder
        places = [self.place(self.o, b.add(first, BITS64(j)), 4 * ROWS) for j in range(TOGETHER)]
        sums = [[self.variable() for _ in range(VECTORS)] for _ in places]
        for place, totals in zip(places, sums, strict=True):
            for i, total in enumerate(totals):
                b.store(b.fmul(self.load(place, FLOATS, 64 * i), fade[i]), total)
        values = self.place(self.v, first, 4)
        with cgutils.for_range(b, self.halved(self.size)) as loop:
            weights = self.vectors(self.place(self.scores, loop.index, 4 * ROWS))
            at = b.add(values, b.mul(loop.index, b.mul(self.head_dim, BITS64(4))))
            for j, totals in enumerate(sums):
                self.add_products(totals, weights, b.add(at, BITS64(4 * j)))
        for place, totals in zip(places, sums, strict=True):
            for i, total in enumerate(totals):
                self.store(b.load(total), place, 64 * i)

    def halved(self, size):
        """Return the number of steps over `size` numbers: two numbers per step in pairs, else one."""
        return self.builder.lshr(size, BITS64(1)) if self.in_pairs else size

    def vectors(self, address):
        return [self.load(address, PAIRS if self.in_pairs else FLOATS, 64 * i) for i in range(VECTORS)]

    def add_products(self, totals, rows, address) -> None:
        """Multiply each vector of rows by the number (or pair) at an address, and add the products to `totals`."""
        number = self.spread(self.load(address, BITS32 if self.in_pairs else ir.FloatType()))
        for total, row in zip(totals, rows, strict=True):
            self.add_product(total, row, number)
