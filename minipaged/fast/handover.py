"""Blocks as bytes, for other engines: what is read out of one pool can be written into another (`kv_connector.py`).

The twin of `reference/handover.py`, and blocks travel as they lie there: [layers, 2, block_size, kv_heads, head_dim],
in 8 bits behind their scales. Here heads come before slots, so they are put in that order on the way out and in, on the
host. Steps of decoding do not wait for that: blocks are read when a prompt has been computed, written when one begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from minipaged.fast.device import to_device
from minipaged.fast.kv_cache import KVCache


def read_blocks(kv_cache: KVCache, blocks: Sequence[int]) -> list[bytes]:
    """What is in these device blocks, once all that is queued has been computed. Raises IndexError for one outside the
    pool."""
    numbers = _checked(kv_cache, blocks)
    parts = [part.contiguous() for part in _parts(kv_cache, kv_cache.device_blocks[numbers].cpu())]
    return [b"".join(part[i].view(torch.uint8).numpy().tobytes() for part in parts) for i in range(len(blocks))]


def write_blocks(kv_cache: KVCache, blocks: Sequence[tuple[int, bytes]]) -> None:
    """Let each of these device blocks have what was read elsewhere.

    Raises ValueError for a block of another size, IndexError for one outside the pool; nothing is written.
    """
    if not blocks:
        return  # as in nearly every step
    numbers = _checked(kv_cache, [block for block, _ in blocks])
    for _, content in blocks:
        if len(content) != kv_cache.block_bytes:
            raise ValueError(f"a block of {len(content):,} bytes was loaded; here it has {kv_cache.block_bytes:,}")
    arriving = torch.empty((len(blocks), *kv_cache.device_blocks.shape[1:]), dtype=kv_cache.device_blocks.dtype)
    for (_, content), *parts in zip(blocks, *_parts(kv_cache, arriving), strict=True):
        raw, start = torch.frombuffer(bytearray(content), dtype=torch.uint8), 0  # a copy: bytes cannot be written
        for part in parts:
            part.copy_(raw[start : start + part.nbytes].view(part.dtype).view(part.shape))
            start += part.nbytes
    kv_cache.device_blocks[numbers] = to_device(arriving, kv_cache.device)


def _parts(kv_cache: KVCache, pool: Tensor) -> list[Tensor]:
    """All that is in a pool, as it travels: views [blocks, layers, 2, block_size, kv_heads, ...]."""
    numbers, scales = kv_cache.parts(pool)
    return [part.transpose(3, 4) for part in ([numbers] if scales is None else [scales, numbers])]


def _checked(kv_cache: KVCache, blocks: Iterable[int]) -> Tensor:
    """[n] int64, on the device."""
    blocks = list(blocks)
    for block in blocks:
        if not 0 <= block < kv_cache.num_blocks:
            raise IndexError(f"block {block} is outside the device pool's {kv_cache.num_blocks} blocks")
    return to_device(torch.tensor(blocks, dtype=torch.int64), kv_cache.device)
