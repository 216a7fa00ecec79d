"""Computes sizes that the user left open: blocks on the device, blocks on the host, and the length of a sequence."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import fields
from functools import partial
from pathlib import Path

from minipaged.engine.grouped_memory import blocks_alone, most_at_once
from minipaged.errors import InvalidRequest
from minipaged.models.shards import check_parallel_sizes
from minipaged.params import EngineConfig, EngineSettings
from minipaged.setup.loaded_model import LoadedModel
from minipaged.setup.settings import Settings

SWAP_SHARE = 0.25
"""Blocks of the host pool per block of the device pool, if the user leaves `num_swap_blocks` open."""


def engine_config(asked: Settings, loaded: LoadedModel, host_sharers: int) -> EngineConfig:
    """The engine's config: the sizes that the user gave, and for those left open, sizes that fit model and memory.

    `host_sharers`: engines that share this machine's memory (see `LLM`). Raises InvalidRequest if no block fits.
    """
    config = loaded.config
    check_parallel_sizes(config, asked.tensor_parallel_size, asked.pipeline_parallel_size)
    on_cpu = loaded.tier.device == "cpu"
    num_blocks, num_swap_blocks, max_model_len = asked.num_blocks, asked.num_swap_blocks, asked.max_model_len
    if num_blocks is None:
        num_blocks = _blocks_that_fit(asked, loaded, host_sharers)
    kind = (asked.block_size, asked.kv_cache_dtype, asked.tensor_parallel_size, asked.pipeline_parallel_size)
    size = loaded.block_bytes(*kind, on_host=True)
    if asked.swap_space is not None:
        num_swap_blocks = int(asked.swap_space * 2**30 / size)
    elif num_swap_blocks is None:
        # At most half of the free memory. For a GPU it is reserved in powers of two, which is up to twice the pool.
        room = int(_free_host_bytes(host_sharers) / (2 if on_cpu else 4) / size)
        num_swap_blocks = max(1, min(int(num_blocks * SWAP_SHARE), room))
    if max_model_len is None:
        lengths = range(1, _longest(loaded) + 1)
        max_model_len = max(1, bisect_right(lengths, num_blocks, key=partial(_blocks_of_one, asked, loaded)))
    return EngineConfig(
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        group_windows=config.groups.windows,
        async_scheduling=_is_async(asked, loaded),
        speculative_config=asked.speculation,
        **{each.name: getattr(asked, each.name) for each in fields(EngineSettings)},
    )


def _blocks_that_fit(asked: Settings, loaded: LoadedModel, host_sharers: int) -> int:
    """The number of device blocks that fit into `gpu_memory_utilization` of the free memory (on a CPU both pools share
    it), but no more than `max_num_seqs` sequences of maximum length can fill."""
    parallel = (asked.tensor_parallel_size, asked.pipeline_parallel_size)
    size = loaded.block_bytes(asked.block_size, asked.kv_cache_dtype, *parallel)
    sizes = (asked.max_num_seqs, asked.max_num_batched_tokens)
    on_device = loaded.tier.free_device_bytes(loaded.config, loaded.weights, *sizes)
    free = (_free_host_bytes(host_sharers) if on_device is None else on_device) * asked.gpu_memory_utilization
    num_blocks = int(free / size / (1 + SWAP_SHARE if on_device is None else 1))
    if num_blocks < 1:
        raise InvalidRequest(
            f"a block of {asked.block_size} tokens takes {size:,} bytes, but only {int(free):,} may be used; lower "
            "block_size, raise gpu_memory_utilization, or free some memory"
        )
    return min(num_blocks, asked.max_num_seqs * _blocks_of_one(asked, loaded, _longest(loaded)))


def _longest(loaded: LoadedModel) -> int:
    """The most tokens that the model was made for, and its draft model if it has one."""
    return min(each.config.max_position_embeddings for each in (loaded, loaded.draft) if each)


def _blocks_of_one(asked: Settings, loaded: LoadedModel, num_tokens: int) -> int:
    """The most blocks that a sequence of this length holds."""
    windows = loaded.config.groups.windows
    at_once = most_at_once(asked.max_num_batched_tokens, _is_async(asked, loaded))
    return blocks_alone(windows, num_tokens, asked.block_size, at_once)


def _is_async(asked: Settings, loaded: LoadedModel) -> bool:
    if asked.async_scheduling is None:
        return loaded.tier.device != "cpu" and asked.speculation is None
    return asked.async_scheduling


def _free_host_bytes(host_sharers: int) -> float:
    """One engine's share of this machine's free memory, in bytes."""
    import psutil

    free = min(psutil.virtual_memory().available, _container_limit() - psutil.Process().memory_info().rss)
    return free / host_sharers


def _container_limit() -> float:
    """The memory that a container (a Linux control group) allows this process, in bytes; infinity if unlimited."""
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        return float(limit.read_text().replace("max", "inf"))
    except (OSError, ValueError):
        return float("inf")
