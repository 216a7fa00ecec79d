"""Blocks as bytes, for other engines: blocks read from one pool can be written into another (`kv_connector.py`).

The twin of `reference/handover.py`. Blocks travel in the reference's layout,
[layers, 2, block_size, kv_heads, head_dim]; in 8 bits their scales come first. In this tier's pool, heads come before
slots, so the host reorders them on the way out and in. Decoding steps do not wait for that: blocks are read after a
prompt has been computed, and written when a prompt begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from minipaged.fast.device import to_device
from minipaged.fast.kv_cache import KVCache


def read_blocks(kv_cache: KVCache, blocks: Sequence[int]) -> list[bytes]:
    """Return the contents of these device blocks, after all queued work has finished. Raises IndexError for a block
    outside the pool."""
    return _contents(kv_cache, kv_cache.device_blocks[_checked(kv_cache, blocks)].cpu())


def read_host_blocks(kv_cache: KVCache, blocks: Sequence[int]) -> list[bytes]:
    """Return the contents of these host blocks, after all queued swaps have finished. Raises IndexError for a block
    outside the pool."""
    for block in blocks:
        if not 0 <= block < kv_cache.num_swap_blocks:
            raise IndexError(f"block {block} is outside the host pool's {kv_cache.num_swap_blocks} blocks")
    return _contents(kv_cache, kv_cache.read_host(blocks))


def _contents(kv_cache: KVCache, pool: Tensor) -> list[bytes]:
    """Each block of this pool, which is in host memory, as bytes."""
    parts = [part.contiguous() for part in _parts(kv_cache, pool)]
    return [b"".join(part[i].view(torch.uint8).numpy().tobytes() for part in parts) for i in range(len(pool))]


def write_blocks(kv_cache: KVCache, blocks: Sequence[tuple[int, bytes]]) -> None:
    """Overwrite device blocks. `blocks`: (block, its content as `read_blocks` returned it) for each.

    Raises ValueError for content of another size and IndexError for a block outside the pool; then nothing is written.
    """
    if not blocks:
        return  # the case in nearly every step
    numbers = _checked(kv_cache, [block for block, _ in blocks])
    for _, content in blocks:
        if len(content) != kv_cache.block_bytes:
            raise ValueError(f"a block of {len(content):,} bytes was loaded; here it has {kv_cache.block_bytes:,}")
    arriving = torch.empty((len(blocks), *kv_cache.device_blocks.shape[1:]), dtype=kv_cache.device_blocks.dtype)
    for (_, content), *parts in zip(blocks, *_parts(kv_cache, arriving), strict=True):
        raw, start = torch.frombuffer(bytearray(content), dtype=torch.uint8), 0  # a copy, because bytes are read-only
        for part in parts:
            part.copy_(raw[start : start + part.nbytes].view(part.dtype).view(part.shape))
            start += part.nbytes
    kv_cache.device_blocks[numbers] = to_device(arriving, kv_cache.device)


def _parts(kv_cache: KVCache, pool: Tensor) -> list[Tensor]:
    """The contents of a pool in the order in which they travel: views [blocks, layers, 2, block_size, kv_heads,
    ...]."""
    numbers, scales = kv_cache.parts(pool)
    return [part.transpose(3, 4) for part in ([numbers] if scales is None else [scales, numbers])]


def _checked(kv_cache: KVCache, blocks: Iterable[int]) -> Tensor:
    """The block numbers [n] as int64 on the device. Raises IndexError for one outside the pool."""
    blocks = list(blocks)
    for block in blocks:
        if not 0 <= block < kv_cache.num_blocks:
            raise IndexError(f"block {block} is outside the device pool's {kv_cache.num_blocks} blocks")
    return to_device(torch.tensor(blocks, dtype=torch.int64), kv_cache.device)
