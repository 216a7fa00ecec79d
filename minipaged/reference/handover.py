"""Blocks as bytes, for other engines: what is read out of one pool can be written into another (`kv_connector.py`).

A block is its keys and values, [layers, 2, block_size, kv_heads, head_dim] in one piece, 2: keys, values. In 8 bits
that are codes, and before them come the scales, of that shape without head_dim. Both tiers agree on it, so that one may
compute a prompt and the other go on from there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minipaged.reference.kv_cache import Array, KVCache


def read_blocks(kv_cache: KVCache, blocks: Sequence[int]) -> list[bytes]:
    """What is in these device blocks. Raises IndexError for one outside the pool."""
    kv_cache.check_blocks(np.asarray(blocks, dtype=np.int64))
    return [content.tobytes() for content in _as_bytes(kv_cache)[list(blocks)]]


def write_blocks(kv_cache: KVCache, blocks: Sequence[tuple[int, bytes]]) -> None:
    """Let each of these device blocks have what was read elsewhere.

    Raises ValueError for a block of another size, IndexError for one outside the pool; nothing is written.
    """
    if not blocks:
        return  # as nearly always: a cache that nobody hands over, a student's, need not know how
    kv_cache.check_blocks(np.asarray([block for block, _ in blocks], dtype=np.int64))
    for _, content in blocks:
        if len(content) != kv_cache.block_bytes:
            raise ValueError(f"a block of {len(content):,} bytes was loaded; here it has {kv_cache.block_bytes:,}")
    pool = _as_bytes(kv_cache)  # [blocks, bytes]
    for block, content in blocks:
        pool[block] = np.frombuffer(content, np.uint8)


def _as_bytes(kv_cache: KVCache) -> Array:
    """The device's pool, [num_blocks, block_bytes]: the same memory. Blocks lie there as they travel."""
    return kv_cache.device_blocks.view(np.uint8).reshape(kv_cache.num_blocks, kv_cache.block_bytes)
