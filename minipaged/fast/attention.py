"""PagedAttention on the device (paper, section 4.1, Eq. 4): which kernel runs, and what it is given.

The twin of `reference/attention.py`, with the same signature and the same checks. The arithmetic is the same online
softmax, in the kernels:

    decode    sequences with one query. Every key and value is read once and little is done with each, so the kernel is
              as good as its share of the memory's speed: the query heads of a group go together, and long contexts
              are split over many workers, whose (m, l, o) are put together at the end.
    prefill   sequences with any number of queries. Each key that is read serves a whole tile of queries, so the kernel
              is as good as its matrix products.

The model lays a mixed batch out so that each kernel gets its part of it (`llama.FlatBatch`). `gpu/attention.py` has
them in Triton, `cpu/attention.py` and `cpu/prefill.py` in numba.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minipaged.fast.kernels import Paged
from minipaged.fast.kv_cache import KVCache


def paged_attention(
    query: Tensor,
    kv_cache: KVCache,
    layer: int,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention of a mixed batch, each query over its own sequence's positions up to its own.

    query: [tokens, heads, head_dim], sequence after sequence. Sequence s has the tokens query_start[s] to
        query_start[s + 1] - 1, the last of its context_lens[s] positions, whose K and V are in the cache already.
    block_tables: [seqs, max_blocks] integers, in logical order; what comes after a sequence's blocks is not looked at.
    query_start: [seqs + 1] integers. context_lens: [seqs] integers, query tokens included.
    Query head h reads key/value head h // (heads / kv_heads): grouped-query attention.

    Returns [tokens, heads, head_dim]. Raises IndexError for a block outside the pool, ValueError for lengths or
    heads that do not fit together. (Looking at the numbers makes the host wait for the device: the model, whose tables
    are made by the engine, calls `attend`.)
    """
    _check(query, kv_cache, block_tables, query_start, context_lens)
    if len(query) == 0:
        return torch.empty_like(query)
    max_query_len = int((query_start[1:] - query_start[:-1]).max())
    return attend(
        query.contiguous(),
        kv_cache,
        layer,
        block_tables.int().contiguous(),
        torch.arange(len(context_lens), dtype=torch.int32, device=query.device),
        query_start.int(),
        context_lens.int(),
        float(scale),
        num_decoding=len(context_lens) if max_query_len == 1 else 0,
        max_query_len=max_query_len,
    )


def attend(
    query: Tensor,
    kv_cache: KVCache,
    layer: int,
    tables: Tensor,
    rows: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    num_decoding: int = 0,
    max_query_len: int,
) -> Tensor:
    """`paged_attention` unchecked, all integers int32: sequence s has row rows[s] of `tables` [rows, max_blocks].

    num_decoding: so many sequences have one query token each, and come first. query_start: [the others + 1], in the
    query tokens after those.
    """
    paged = Paged(*kv_cache.layer(layer), tables, rows, context_lens, kv_cache.scales(layer))
    kernels, n = kv_cache.kernels, num_decoding
    parts: list[Tensor] = []
    if n:
        decoding = paged._replace(rows=rows[:n], context_lens=context_lens[:n])
        parts.append(kernels.paged_decode(query[:n], decoding, scale))
    if n < len(rows):
        # Triton has compiled the kernel for addresses that 16 divides, and would compile it anew for others.
        prompts = query[n:] if n * query[0].nbytes % 16 == 0 else query[n:].clone()
        others = paged._replace(rows=rows[n:], context_lens=context_lens[n:])
        parts.append(kernels.paged_prefill(prompts, others, query_start, scale, max_query_len=max_query_len))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check(query: Tensor, kv_cache: KVCache, block_tables: Tensor, query_start: Tensor, context_lens: Tensor) -> None:
    heads, kv_heads = query.shape[1], kv_cache.num_kv_heads
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot be shared out over {kv_heads} key/value heads")
    query_lens = query_start[1:] - query_start[:-1]  # [seqs]
    if query_start[0] != 0 or query_start[-1] != len(query) or (query_lens < 1).any():
        raise ValueError(f"query_start {query_start.tolist()} does not divide {len(query)} query tokens")
    if (context_lens < query_lens).any():
        raise ValueError(f"contexts {context_lens.tolist()} are shorter than their queries {query_lens.tolist()}")
    first = torch.arange(block_tables.shape[1], device=query.device) * kv_cache.block_size  # [max_blocks]
    if len(context_lens) and context_lens.max() > len(first) * kv_cache.block_size:
        raise ValueError(f"block tables of {len(first)} blocks are too short for {int(context_lens.max())} tokens")
    used = block_tables[first < context_lens[:, None]]
    wrong = used[(used < 0) | (used >= kv_cache.num_blocks)]
    if len(wrong):
        raise IndexError(f"block {int(wrong[0])} is outside the device pool's {kv_cache.num_blocks} blocks")
