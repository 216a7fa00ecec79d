"""The tiers by name: the one file that knows the wings of the house.

Everything above asks here for a tier's parts and for the runner that computes with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minipaged.contracts import Runner, Tier
from minipaged.errors import InvalidRequest
from minipaged.models.config import ModelConfig

DTYPES = {"auto": "float32", "float32": "float32", "float64": "float64"}
"""What `dtype` may be, and what each computes in."""


def choose_tier(name: str, device: str) -> Tier:
    """The tier called `name` on `device`. Raises InvalidRequest where there is none."""
    if name == "fast":
        raise InvalidRequest("this version has no fast tier yet; use tier='reference' (or 'auto')")
    if name not in ("auto", "reference"):
        raise InvalidRequest(f"tier is {name!r}; choose 'reference', 'fast' or 'auto'")
    if device not in ("auto", "cpu"):
        raise InvalidRequest(f"device is {device!r}; the reference tier computes with NumPy, on 'cpu' only")
    return reference_tier()


def reference_tier() -> Tier:
    """The wing to be read: NumPy."""
    from minipaged.reference.beam_search import BeamSearch
    from minipaged.reference.block_allocator import BlockAllocator
    from minipaged.reference.block_table import BlockTable
    from minipaged.reference.sampling import sample

    return Tier("reference", BlockAllocator, BlockTable, BeamSearch, sample)


def load_weights(folder: Path, config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The checkpoint's weights, in the type that `dtype` names. Raises ModelError, InvalidRequest."""
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype is {dtype!r}; the reference tier knows {', '.join(DTYPES)}")
    import numpy as np

    from minipaged.models.loading import load_weights

    return dict(load_weights(folder, config, np.dtype(DTYPES[dtype])))


def block_bytes(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Memory of one block: K and V of `block_size` tokens in every layer, in bytes."""
    item = 8 if DTYPES[dtype] == "float64" else 4
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * item
    return block_size * per_token


def make_runner(
    config: ModelConfig, weights: dict[str, Any], num_blocks: int, num_swap_blocks: int, block_size: int, dtype: str
) -> Runner:
    """The tier's Llama with its KV cache."""
    from minipaged.reference.kv_cache import KVCache
    from minipaged.reference.llama import Llama

    cache = KVCache(
        config.num_hidden_layers,
        num_blocks,
        block_size,
        config.num_key_value_heads,
        config.head_dim,
        num_swap_blocks,
        DTYPES[dtype],
    )
    return Llama(config, weights, cache)
