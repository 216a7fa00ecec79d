"""Blocks as bytes, for other engines: bytes read from one pool can be written into another (`kv_connector.py`).

A block is its keys and values in one piece, [layers, 2, block_size, kv_heads, head_dim], where 2 is keys, values. In 8
bits it holds codes instead, preceded by their scales, which have the same shape without head_dim. Both tiers use this
format, so one can compute a prompt and the other can continue from there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minipaged.reference.kv_cache import Array, KVCache


def read_blocks(kv_cache: KVCache, blocks: Sequence[int]) -> list[bytes]:
    """Return the contents of these device blocks. Raises IndexError for a block outside the pool."""
    kv_cache.check_blocks(np.asarray(blocks, dtype=np.int64))
    return [content.tobytes() for content in _as_bytes(kv_cache)[list(blocks)]]


def read_host_blocks(kv_cache: KVCache, blocks: Sequence[int]) -> list[bytes]:
    """Return the contents of these host blocks. Raises IndexError for a block outside the pool."""
    for block in blocks:
        if not 0 <= block < kv_cache.num_swap_blocks:
            raise IndexError(f"block {block} is outside the host pool's {kv_cache.num_swap_blocks} blocks")
    return [kv_cache.host_blocks[block].tobytes() for block in blocks]


def write_blocks(kv_cache: KVCache, blocks: Sequence[tuple[int, bytes]]) -> None:
    """Write (block, content) pairs from another engine into these device blocks.

    Raises ValueError for content of the wrong size and IndexError for a block outside the pool; then nothing is
    written.
    """
    if not blocks:
        return  # the usual case; a student's cache need not support handing over
    kv_cache.check_blocks(np.asarray([block for block, _ in blocks], dtype=np.int64))
    for _, content in blocks:
        if len(content) != kv_cache.block_bytes:
            raise ValueError(f"a block of {len(content):,} bytes was loaded; here it has {kv_cache.block_bytes:,}")
    pool = _as_bytes(kv_cache)  # [blocks, bytes]
    for block, content in blocks:
        pool[block] = np.frombuffer(content, np.uint8)


def _as_bytes(kv_cache: KVCache) -> Array:
    """Return the device's pool as bytes, [num_blocks, block_bytes], without copying. Blocks are sent in this layout."""
    return kv_cache.device_blocks.view(np.uint8).reshape(kv_cache.num_blocks, kv_cache.block_bytes)
