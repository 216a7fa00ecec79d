"""Shared reading: blocks with which many sequences begin are read once for all of them ("cascade attention").

Requests behind one system prompt hold the same blocks. Each decoding step reads them again for every request. The
online softmax (`attention.py`) allows better: attention over a context is made of parts. Each part has its largest
score m, its sum l of exp(score - m), and its sum o of exp(score - m) × v. Two parts a and b are merged by

    m = max(m_a, m_b)
    l = l_a × exp(m_a - m) + l_b × exp(m_b - m)
    o = o_a × exp(m_a - m) + o_b × exp(m_b - m)

So all queries behind a shared prefix attend to its blocks together. Then each query attends to the rest of its own
context, and its two parts are merged. The result differs from one walk by rounding only.

A learned sink is a part too, with m = sink, l = 1, o = 0. A layer with a window shares nothing: its queries see only
their last tokens, and a shared prefix lies at the beginning.

The block tables of the step, compared entry by entry, say which sequences share which blocks. A reference count does
not: it is the number of a block's holders, and does not say who they are.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np

from minipaged.reference.attention import paged_attention
from minipaged.reference.kv_cache import Array, KVCache


class Part(NamedTuple):
    """Attention over a part of a context, for some queries."""

    m: Array  # [queries, heads, 1], the largest scores
    l: Array  # [queries, heads, 1], the sums of exp(score - m)  # noqa: E741
    o: Array  # [queries, heads, head_dim], the sums of exp(score - m) × v


def attend_part(
    query: Array,
    kv_cache: KVCache,
    layer: int,
    blocks: Array,
    num_tokens: int,
    scale: float,
    soft_cap: float | None = None,
) -> Part:
    """Attend with some queries [queries, heads, head_dim] to the first `num_tokens` tokens in these blocks."""
    K, V = kv_cache.read(layer, blocks[None])  # [1, tokens, kv_heads, head_dim] each
    group = query.shape[1] // kv_cache.num_kv_heads  # query heads that share one key/value head
    K, V = (each[0, :num_tokens].repeat(group, axis=1) for each in (K, V))  # [num_tokens, heads, head_dim] each
    scores = scale * np.einsum("qhd,nhd->qhn", query, K)  # [queries, heads, num_tokens]
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)  # [queries, heads, num_tokens]
    m = scores.max(axis=-1, keepdims=True)  # [queries, heads, 1]
    p = np.exp(scores - m)  # [queries, heads, num_tokens]
    return Part(m, p.sum(axis=-1, keepdims=True), np.einsum("qhn,nhd->qhd", p, V))


def merge(a: Part, b: Part) -> Part:
    """Merge two parts of the same queries' contexts."""
    m = np.maximum(a.m, b.m)  # [queries, heads, 1]
    fade_a, fade_b = np.exp(a.m - m), np.exp(b.m - m)  # [queries, heads, 1] each
    return Part(m, a.l * fade_a + b.l * fade_b, a.o * fade_a + b.o * fade_b)


def shared_prefixes(block_tables: Array, context_lens: Array, block_size: int) -> list[tuple[Array, int]]:
    """Return the shared prefixes: for each, its members (the sequences that begin with it) and its number of blocks.
    There is one for each first block. A longer prefix that only some of the members share is not looked for.

    block_tables: [seqs, max_blocks]. context_lens: [seqs]. Each sequence has one query, its last token. The block of
    that token is not shared: the step writes into it.
    """
    prefixes = []
    for first in np.unique(block_tables[:, 0]):
        members = np.flatnonzero((block_tables[:, 0] == first) & (context_lens > block_size))  # [members]
        if len(members) > 1:
            tables = block_tables[members, : (context_lens[members].min() - 1) // block_size]  # [members, blocks]
            equal = (tables == tables[0]).all(axis=0)  # [blocks]
            prefixes.append((members, int(np.logical_and.accumulate(equal).sum())))
    return prefixes


def cascade_attention(
    query: Array,
    kv_cache: KVCache,
    layer: int,
    block_tables: Array,
    context_lens: Array,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Attention of one query token per sequence: query [seqs, heads, head_dim]. Returns the same shape.

    Equals `paged_attention` up to rounding, and reads shared blocks once.
    """
    if window is not None:
        starts = np.arange(len(query) + 1)  # [seqs + 1]
        return paged_attention(
            query, kv_cache, layer, block_tables, starts, context_lens, scale, window, soft_cap, sinks
        )
    block_size = kv_cache.block_size
    num_shared = np.zeros(len(query), int)  # [seqs], shared blocks of each sequence
    before: list[list[Part]] = [[] for _ in query]  # the parts of each sequence before its own tokens
    if sinks is not None:
        sink = Part(sinks[None, :, None], np.ones((1, len(sinks), 1), sinks.dtype), np.zeros_like(query[:1]))
        before = [[sink] for _ in query]
    for members, num_blocks in shared_prefixes(block_tables, context_lens, block_size):
        blocks = block_tables[members[0], :num_blocks]  # [num_blocks]
        part = attend_part(query[members], kv_cache, layer, blocks, num_blocks * block_size, scale, soft_cap)
        num_shared[members] = num_blocks
        for i, s in enumerate(members):
            before[s].append(Part(*(each[i : i + 1] for each in part)))
    output = np.empty_like(query)  # [seqs, heads, head_dim]
    for s, parts in enumerate(before):
        blocks = block_tables[s, num_shared[s] : -(-context_lens[s] // block_size)]  # [own blocks]
        own_tokens = context_lens[s] - num_shared[s] * block_size
        own = attend_part(query[s : s + 1], kv_cache, layer, blocks, own_tokens, scale, soft_cap)
        m_l_o = reduce(merge, parts, own)
        output[s] = m_l_o.o[0] / m_l_o.l[0]
    return output
