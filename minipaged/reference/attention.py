"""PagedAttention: attention over keys and values that lie in scattered blocks (paper, section 4.1, Eq. 4).

Ordinary attention of one query q at position p is, over the keys and values of positions 0 .. p,

    o = sum_t softmax_t(q · k_t × scale) v_t

Here keys and values are read block by block, through the block table, and no score is kept. Instead each query carries
three running values (the "online softmax" of Milakov and Gimelshein, 2018):

    m   the largest score so far
    l   the sum of exp(score - m) so far: the softmax's denominator
    o   the sum of exp(score - m) × v so far: its numerator

A new block may raise m. The sums made under the old m are then multiplied by exp(m_old - m_new), and the block's own
terms are added. After the last block the result is o / l. Every exponent is at most 0, so nothing overflows, however
large the scores are. `attend` is this loop for one query. It is here to be read, and tests compare with it.

A layer may have more (`models/config.py` says which models do):

    window     a query sees only its own token and the window - 1 tokens before it. Blocks that lie before the window
               are not read, and may be missing from the table (-1)
    soft cap   scores become cap × tanh(score / cap)
    sinks      a learned score for each head, of no token: it joins the denominator l only, so that a head can
               attend to nothing. The loop begins with it: m = sink, l = 1

`paged_attention` is the same loop for a batch. Sequences with the same number of query tokens go through it together,
such as all that decode (one query each). The longest context comes first, so that the sequences which have a block j
are always the first few.
"""

from __future__ import annotations

import numpy as np

from minipaged.reference.kv_cache import Array, KVCache


def attend(
    query: Array,
    kv_cache: KVCache,
    layer: int,
    blocks: Array,
    position: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Attention of one query [heads, head_dim] at `position`, over its sequence's blocks. Returns [heads, head_dim]."""
    heads, block_size = len(query), kv_cache.block_size
    group = heads // kv_cache.num_kv_heads  # query heads that share one key/value head
    first = 0 if window is None else max(0, position + 1 - window)  # the first position that the query sees
    m = np.full(heads, -np.inf, query.dtype) if sinks is None else sinks  # [heads]
    l = np.full(heads, sinks is not None, query.dtype)  # [heads]  # noqa: E741
    o = np.zeros_like(query)  # [heads, head_dim]
    for j in range(first // block_size, position // block_size + 1):
        start = max(0, first - j * block_size)  # tokens before the window, in logical block j
        n = min(block_size, position + 1 - j * block_size)  # tokens up to the query's, in logical block j
        K, V = kv_cache.read(layer, blocks[None, j : j + 1])  # [1, block_size, kv_heads, head_dim] each
        K, V = (each[0, start:n].repeat(group, axis=1) for each in (K, V))  # [keys, heads, head_dim] each
        scores = scale * np.einsum("hd,khd->hk", query, K)  # [heads, keys]
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)  # [heads, keys]
        old, m = m, np.maximum(m, scores.max(axis=1))  # [heads] each
        fade, p = np.exp(old - m), np.exp(scores - m[:, None])  # [heads], [heads, keys]
        l = fade * l + p.sum(axis=1)  # [heads]  # noqa: E741
        o = fade[:, None] * o + np.einsum("hk,khd->hd", p, V)  # [heads, head_dim]
    return o / l[:, None]


# --- A batch --------------------------------------------------------------------------------------

TILE = 64
"""Keys per loop iteration. A NumPy call costs about as much for 64 keys as for one, so several small blocks are read
together. Compared with one block of 16 per iteration (SmolLM2-135M's shapes), one sequence decodes 2.3 times as fast at
a context of 128 and 3 times at 1000, and a prompt of 512 takes half as long."""


def paged_attention(
    query: Array,
    kv_cache: KVCache,
    layer: int,
    block_tables: Array,
    query_start: Array,
    context_lens: Array,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Causal attention of a mixed batch: each query attends to its own sequence's positions up to its own.

    query: [tokens, heads, head_dim], sequence after sequence. Sequence s has the tokens query_start[s] to
        query_start[s + 1] - 1. They are the last of its context_lens[s] positions; their K and V are already in the
        cache.
    block_tables: [seqs, max_blocks] integers, in logical order, padded at the end with -1. Blocks that lie before the
        window of a sequence's first query may be -1 too.
    query_start: [seqs + 1] integers. context_lens: [seqs] integers, query tokens included.
    sinks: [heads]. Query head h reads key/value head h // (heads / kv_heads): grouped-query attention.

    Returns [tokens, heads, head_dim]. Raises IndexError for a block outside the pool, and ValueError for lengths or
    head counts that do not fit together.
    """
    query_lens = query_start[1:] - query_start[:-1]  # [seqs]
    if window is not None:
        block_tables, context_lens = from_window(
            block_tables, context_lens, context_lens - query_lens + 1 - window, kv_cache.block_size
        )
    _check(query, kv_cache, block_tables, query_start, context_lens)
    tables = np.maximum(block_tables, 0)  # [seqs, max_blocks]: a tile may reach into the padding, which is masked
    scale = float(scale)  # a NumPy float64 would turn float32 queries, and everything computed from them, into float64
    output = np.empty_like(query)  # [tokens, heads, head_dim]
    for num_queries in set(query_lens.tolist()):
        seqs = np.flatnonzero(query_lens == num_queries)  # [S], the sequences with this number of query tokens
        seqs = seqs[np.argsort(-context_lens[seqs], kind="stable")]  # [S], longest context first
        tokens = query_start[seqs, None] + np.arange(num_queries)  # [S, T]
        lens = context_lens[seqs]  # [S]
        output[tokens] = _attend(
            query[tokens] * scale, kv_cache, layer, tables[seqs], lens, window or int(lens[0]), soft_cap, sinks
        )
    return output


def from_window(block_tables: Array, context_lens: Array, first: Array, block_size: int) -> tuple[Array, Array]:
    """Return tables [seqs, blocks] without the blocks that lie before position `first` [seqs] of their sequence, and
    the context lengths [seqs] without these blocks' tokens. So positions count from the first block that is left."""
    left_out = np.maximum(first, 0) // block_size  # [seqs] blocks
    context_lens = context_lens - left_out * block_size  # [seqs]
    columns = left_out[:, None] + np.arange(-(-context_lens.max(initial=0) // block_size))  # [seqs, blocks]
    padded = np.pad(block_tables, ((0, 0), (0, 1)), constant_values=-1)  # [seqs, max_blocks + 1]
    return np.take_along_axis(padded, np.minimum(columns, block_tables.shape[1]), axis=1), context_lens


def _attend(
    query: Array,
    kv_cache: KVCache,
    layer: int,
    tables: Array,
    context_lens: Array,
    window: int,
    soft_cap: float | None,
    sinks: Array | None,
) -> Array:
    """Attention of S sequences with T queries each: query [S, T, heads, head_dim], context_lens [S], longest first.

    Keys and values stored in 8 bits become floats as they are read: never more of them than one iteration needs.
    """
    S, T, heads, head_dim = query.shape
    kv_heads, block_size = kv_cache.num_kv_heads, kv_cache.block_size
    group = heads // kv_heads  # query heads that share one key/value head
    q = query.reshape(S, T, kv_heads, group, head_dim).swapaxes(1, 2)  # [S, kv_heads, T, group, head_dim]
    q = q.reshape(S, kv_heads, T * group, head_dim)  # [S, kv_heads, rows, head_dim]; row r is query r // group
    position = context_lens[:, None] - T + np.arange(T * group) // group  # [S, rows], position of each row's query
    # The first m is finite: a row that has seen no key yet subtracts it from itself, and -inf - -inf would be NaN.
    m = np.full((S, kv_heads, T * group, 1), np.finfo(q.dtype).min / 2, q.dtype)  # [S, kv_heads, rows, 1]
    l = np.zeros_like(m)  # [S, kv_heads, rows, 1]  # noqa: E741
    o = np.zeros_like(q)  # [S, kv_heads, rows, head_dim]
    if sinks is not None:
        m[:, :, :, 0], l[:] = np.tile(sinks.reshape(kv_heads, group), T), 1

    tile = -(-TILE // block_size)  # blocks at a time
    for j in range(0, -(-int(context_lens[0]) // block_size), tile):
        start = j * block_size  # the first position in logical block j
        s = int(np.count_nonzero(context_lens > start))  # only the first s sequences reach block j
        r = max(0, start - int(context_lens[0]) + T) * group  # rows before r lie before block j in every sequence
        K, V = kv_cache.read(layer, tables[:s, j : j + tile])  # [s, keys, kv_heads, head_dim] each
        key = np.arange(start, start + K.shape[1])  # [keys], their positions
        past = int(key[-1]) + window - int(context_lens[s - 1]) + T  # queries from here on see none of these keys
        end = min(T, past) * group
        rows = slice(r, end)
        scores = q[:s, :, rows] @ K.transpose(0, 2, 3, 1)  # [s, kv_heads, rows, keys]
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)  # [s, kv_heads, rows, keys]
        later, passed = key[-1] > position[s - 1, r], key[0] <= position[0, end - 1] - window
        if later or passed:  # some query does not see some key
            at, lens = position[:s, None, rows, None], context_lens[:s, None]  # [s, 1, rows, 1], [s, 1]
            seen, unseen = key <= at, key >= lens  # [s, 1, rows, keys], [s, keys]: unseen by all queries
            if passed:
                seen, unseen = seen & (key > at - window), unseen | (key <= lens - T - window)
            scores = np.where(seen, scores, -np.inf)  # [s, kv_heads, rows, keys]
            V[unseen] = 0  # weight 0 × NaN would be NaN
        m_old = m[:s, :, rows]  # [s, kv_heads, rows, 1]
        m_new = np.maximum(m_old, scores.max(axis=-1, keepdims=True))  # [s, kv_heads, rows, 1]
        fade = np.exp(m_old - m_new)  # [s, kv_heads, rows, 1]
        p = np.exp(scores - m_new)  # [s, kv_heads, rows, keys]
        l[:s, :, rows] = l[:s, :, rows] * fade + p.sum(axis=-1, keepdims=True)  # [s, kv_heads, rows, 1]
        o[:s, :, rows] = o[:s, :, rows] * fade + p @ V.swapaxes(1, 2)  # [s, kv_heads, rows, head_dim]
        m[:s, :, rows] = m_new  # [s, kv_heads, rows, 1]

    out = (o / l).reshape(S, kv_heads, T, group, head_dim).swapaxes(1, 2)  # [S, T, kv_heads, group, head_dim]
    return out.reshape(S, T, heads, head_dim)  # [S, T, heads, head_dim]


def _check(query: Array, kv_cache: KVCache, block_tables: Array, query_start: Array, context_lens: Array) -> None:
    heads, kv_heads = query.shape[1], kv_cache.num_kv_heads
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot be shared out over {kv_heads} key/value heads")
    query_lens = query_start[1:] - query_start[:-1]  # [seqs]
    if query_start[0] != 0 or query_start[-1] != len(query) or (query_lens < 1).any():
        raise ValueError(f"query_start {query_start.tolist()} does not divide {len(query)} query tokens")
    if (context_lens < query_lens).any():
        raise ValueError(f"contexts {context_lens.tolist()} are shorter than their queries {query_lens.tolist()}")
    first = np.arange(block_tables.shape[1]) * kv_cache.block_size  # [max_blocks], first position of each block
    if context_lens.max(initial=0) > len(first) * kv_cache.block_size:
        raise ValueError(f"block tables of {len(first)} blocks are too short for {context_lens.max()} tokens")
    kv_cache.check_blocks(block_tables[first < context_lens[:, None]])
