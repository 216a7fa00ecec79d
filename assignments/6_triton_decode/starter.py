"""Assignment 6: a Triton kernel for decoding. Write the kernel and the function; everything you need is in handout.md.

minipaged grade triton-decode starter.py
"""

import torch  # noqa: F401  (you will need them)
import triton  # noqa: F401
import triton.language as tl  # noqa: F401


def paged_decode(query, keys, values, block_tables, context_lens, scale, out):
    """Attention of one new token per sequence over its whole context. Launches a Triton kernel that fills `out`.

    query: [seqs, heads, head_dim], contiguous, float32 or float16; all tensors but the integer ones have its dtype.
    keys, values: [num_blocks, kv_heads, block_size, head_dim], views of one cache with the same strides; the numbers of
        one head and slot are contiguous. The new tokens' own keys and values are there already.
    block_tables: [seqs, max_blocks] int32, in logical order; numbers after a sequence's blocks have no meaning.
        Row s begins block_tables.stride(0) numbers after row s - 1, which may be more than max_blocks.
    context_lens: [seqs] int32, at least 1: the number of positions of each sequence, the new token included.
    scale: the factor of the products of queries and keys.
    out: [seqs, heads, head_dim], contiguous. No other argument is written to.
    Query head h reads key/value head h // (heads / kv_heads).
    """
    raise NotImplementedError
