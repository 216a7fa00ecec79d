"""Assignment 6: a Triton kernel for decoding. Write the kernel and the function; everything you need is in handout.md.

minipaged grade triton-decode starter.py
"""

import torch  # noqa: F401  (you will need them)
import triton  # noqa: F401
import triton.language as tl  # noqa: F401


def paged_decode(query, keys, values, block_tables, context_lens, scale, out):
    """Attention of one new token a sequence over its whole context. Launches a Triton kernel that fills `out`.

    query: [seqs, heads, head_dim], contiguous, float32 or float16; everything below but the integers has its dtype.
    keys, values: [num_blocks, kv_heads, block_size, head_dim], views of one cache with the same strides; the numbers of
        one head and slot lie side by side. The new tokens' own keys and values are there already.
    block_tables: [seqs, max_blocks] int32, in logical order; what comes after a sequence's blocks means nothing.
        Row s begins block_tables.stride(0) numbers after row s - 1, which may be more than max_blocks.
    context_lens: [seqs] int32, at least 1: how many positions each sequence has, the new token included.
    scale: what the products of queries and keys are multiplied by.
    out: [seqs, heads, head_dim], contiguous. Nothing else is written to.
    Query head h reads key/value head h // (heads / kv_heads).
    """
    raise NotImplementedError
