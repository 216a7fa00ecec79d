"""Preemption: the cost of swapping and of recomputing a sequence on this device (section 4.5, Fig. 19).

The twin of `reference/preemption.py`: the same figures, measured on this device.

- Swapping moves blocks over the link to the host and back. On a GPU the copies run on a side stream, beside the
  computation, which waits only for the blocks it is about to read (`kv_cache.py`). The cost counted is the time for
  which the link is busy.
- Recomputing is one prefill of all tokens with the prompt kernel. On a GPU it is hundreds of times as fast as the
  decoding that produced the tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from minipaged.contracts import Batch, BatchRow
from minipaged.fast.device import is_gpu
from minipaged.fast.handover import write_blocks
from minipaged.fast.kv_cache import KVCache
from minipaged.scheduling import Costs
from minipaged.steps import BlockMoves

SCRATCH_BYTES, SCRATCH_BYTES_ON_GPU, SCRATCH_BLOCKS = 8 << 20, 32 << 20, 256
"""The limits of what `measure` copies: bytes, bytes on a GPU, and blocks. On a CPU it allocates three times this size
next to the model. With 32 MiB that was the peak memory of SmolLM2 in 4 bits (294 MB over the libraries, now 230)."""
PROBE_TOKENS, PROBE_TOKENS_ON_GPU = 64, 1024
"""The length of the prompt that `measure` runs: long enough that computing takes longer than launching."""


def carry(kv_cache: KVCache, moves: BlockMoves) -> None:
    """Carry out the moves in the contract's order: blocks that leave are saved before anything overwrites them."""
    kv_cache.swap_out(moves.swap_out)
    kv_cache.poison(moves.poison)
    kv_cache.swap_in(moves.swap_in)
    kv_cache.copy(moves.copy)
    write_blocks(kv_cache, moves.load)


def measure(
    kv_cache: KVCache, forward: Callable[[Batch], object], num_groups: int = 1, max_model_len: int | None = None
) -> Costs:
    """Time this device's copies and its prefill, in a fraction of a second. The cache must be unused: the prompt is
    written into its first blocks.

    `num_groups`: the groups of the model's layers. `max_model_len`: the longest sequence, in tokens, that `forward`
    accepts.
    """
    shape = (kv_cache.layers_per_block, kv_cache.block_size, kv_cache.num_kv_heads, kv_cache.head_dim)
    tiny = _seconds_per_block(kv_cache, (1, 1, 1, 2), 64)
    most = SCRATCH_BYTES_ON_GPU if is_gpu(kv_cache.device) else SCRATCH_BYTES
    full = _seconds_per_block(kv_cache, shape, max(1, min(SCRATCH_BLOCKS, most // kv_cache.block_bytes)))
    return Costs(
        seconds_per_copy=tiny,
        copies_per_block=1,  # a block is contiguous
        link_bytes_per_second=kv_cache.block_bytes / max(full - tiny, full / 2),
        block_bytes=kv_cache.block_bytes,
        prefill_tokens_per_second=_prefill_rate(kv_cache, forward, num_groups, max_model_len),
    )


def _seconds_per_block(kv_cache: KVCache, shape: tuple[int, int, int, int], num_blocks: int) -> float:
    """Swap out every other block of a scratch cache, so that no two are neighbours. Returns the best time per block of
    three rounds."""
    layers, block_size, kv_heads, head_dim = shape
    scratch = KVCache(
        layers,
        num_blocks,
        block_size,
        kv_heads,
        head_dim,
        num_swap_blocks=2 * num_blocks,
        dtype=kv_cache.dtype,
        device=kv_cache.device,
        kernels=kv_cache.kernels,
        kv_cache_dtype=kv_cache.kv_cache_dtype,
    )
    pairs = [(block, 2 * block) for block in range(num_blocks)]
    scratch.swap_out(pairs)  # now all of its memory is allocated; a copy's time excludes page faults
    return min(_seconds(kv_cache.device, lambda: scratch.swap_out(pairs)) for _ in range(3)) / num_blocks


def _prefill_rate(
    kv_cache: KVCache, forward: Callable[[Batch], object], num_groups: int, max_model_len: int | None
) -> float:
    """The prefill's speed in tokens per second, measured with a prompt in the first blocks."""
    most = kv_cache.num_blocks * kv_cache.block_size
    num_tokens = min(PROBE_TOKENS_ON_GPU if is_gpu(kv_cache.device) else PROBE_TOKENS, most, max_model_len or most)
    blocks = [i // num_groups for i in range(-(-num_tokens // kv_cache.block_size) * num_groups)]  # groups share them
    prompt = BatchRow([0] * num_tokens, first_position=0, blocks=blocks, wants_logits=False)
    forward([prompt])  # compiles the kernels
    return num_tokens / _seconds(kv_cache.device, lambda: forward([prompt]))


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The seconds that `work` takes until the device has finished it."""
    if is_gpu(device):
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if is_gpu(device):
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
