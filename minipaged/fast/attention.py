"""PagedAttention on the device (paper, section 4.1, Eq. 4): selects the kernel and prepares its arguments.

The twin of `reference/attention.py`, with the same signature and the same checks. Both kernels compute the same online
softmax:

    decode    sequences with one query token. Each key and value is read once and takes little arithmetic, so the
              memory's bandwidth is the limit. The query heads of a group share each read, and long contexts are split
              over many workers, whose partial results (m, l, o) are merged at the end.
    prefill   sequences with any number of query tokens. Each key that is read serves a whole tile of queries, so the
              speed of matrix products is the limit.

The model lays a mixed batch out so that each kernel gets its part of it (`llama.FlatBatch`). `gpu/attention.py` has the
kernels in Triton, `cpu/attention.py` and `cpu/prefill.py` in numba.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minipaged.fast.kernels import Paged, Shared
from minipaged.fast.kv_cache import KVCache


def paged_attention(
    query: Tensor,
    kv_cache: KVCache,
    layer: int,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a mixed batch: each query attends to its own sequence's positions up to its own.

    query: [tokens, heads, head_dim], sequence after sequence. Sequence s has the tokens query_start[s] to
        query_start[s + 1] - 1. They are the last of its context_lens[s] positions, and their K and V are already in the
        cache.
    block_tables: [seqs, max_blocks] integers, in logical order. Entries past a sequence's blocks are ignored, and those
        of blocks that lie before the window of its first query.
    query_start: [seqs + 1] integers. context_lens: [seqs] integers, query tokens included.
    window, soft_cap, sinks [heads]: as in `reference/attention.py`.
    Query head h reads key/value head h // (heads / kv_heads): grouped-query attention.

    Returns [tokens, heads, head_dim]. Raises IndexError for a block outside the pool, ValueError for lengths or heads
    that do not fit together. (These checks make the host wait for the device. The model skips them and calls `attend`,
    because its tables are made by the engine.)
    """
    _check(query, kv_cache, block_tables, query_start, context_lens, window)
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
        window=window,
        soft_cap=soft_cap,
        sinks=None if sinks is None else sinks.float().contiguous(),
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
    shared: Shared | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention` without the checks, with int32 integers. Sequence s has row rows[s] of `tables`
    [rows, max_blocks].

    num_decoding: the number of sequences with one query token each; they come first. query_start:
    [other sequences + 1], offsets into the query tokens after those. shared: groups of sequences with one query token;
    a layer with a window shares nothing. window, soft_cap, sinks: as in `Paged`.
    """
    paged = Paged(
        *kv_cache.layer(layer),
        tables,
        rows,
        context_lens,
        kv_cache.scales(layer),
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    kernels, n = kv_cache.kernels, num_decoding
    parts: list[Tensor] = []
    if n:
        shared = shared if window is None else None
        decoding = paged._replace(rows=rows[:n], context_lens=context_lens[:n], shared=shared)
        parts.append(kernels.paged_decode(query[:n], decoding, scale))
    if n < len(rows):
        # Triton has compiled the kernel for addresses that are multiples of 16, and would recompile it for others.
        prompts = query[n:] if n * query[0].nbytes % 16 == 0 else query[n:].clone()
        others = paged._replace(rows=rows[n:], context_lens=context_lens[n:])
        parts.append(kernels.paged_prefill(prompts, others, query_start, scale, max_query_len=max_query_len))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check(
    query: Tensor,
    kv_cache: KVCache,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    window: int | None,
) -> None:
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
    seen = first < context_lens[:, None]  # [seqs, max_blocks]
    if window is not None:
        seen &= first[None] + kv_cache.block_size > (context_lens - query_lens + 1 - window)[:, None]
    used = block_tables[seen]
    wrong = used[(used < 0) | (used >= kv_cache.num_blocks)]
    if len(wrong):
        raise IndexError(f"block {int(wrong[0])} is outside the device pool's {kv_cache.num_blocks} blocks")
