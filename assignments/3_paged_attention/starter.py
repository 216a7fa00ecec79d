"""Assignment 3: paged attention. Write the function; everything you need is in handout.md.

minipaged grade paged-attention starter.py
"""

import numpy as np  # noqa: F401  (you will need it)


def paged_attention(query, kv_cache, layer, block_tables, query_start, context_lens, scale):
    """Causal attention of a batch: each query attends to the positions of its own sequence up to its own position.

    query: [tokens, heads, head_dim], sequence after sequence. Sequence s has the rows query_start[s] to
        query_start[s + 1] - 1: the last of its context_lens[s] positions. Their keys and values are in the cache.
    kv_cache.read(layer, blocks), with blocks [n, k] integers, gives keys and values, each
        [n, k * block_size, kv_heads, head_dim]; kv_cache.block_size and kv_cache.num_kv_heads are numbers.
    block_tables: [seqs, max_blocks] integers, in logical order, padded at the end with -1.
    query_start: [seqs + 1] integers. context_lens: [seqs] integers, the new tokens included.
    scale: the factor of the products of queries and keys.
    Query head h reads key/value head h // (heads / kv_heads).

    Returns [tokens, heads, head_dim] of the query's dtype.
    """
    raise NotImplementedError
