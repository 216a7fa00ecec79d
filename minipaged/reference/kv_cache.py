"""The KV cache: the memory that block tables point into (paper, section 4.2 and Fig. 5).

The keys and values of every token live in *blocks* of `block_size` slots. A slot is one number, `block * block_size +
offset`. There are two pools: the device's, which attention reads, and the host's, where blocks wait while their
sequence is swapped out (section 4.5). The allocator keeps track of who holds a block. This file only stores its
content:

    unowned --write, copy, swap_in or load--> some token's keys and values --poison--> NaN (debugging only)

The layout decides how many copies it takes to move a block. A block's keys and values of all layers lie in one piece of
memory, so a copy-on-write or a swap is one copy per block. (A pool for each layer's keys and another for its values, as
in the paper's system, needs 2 × layers smaller copies per block: see `preemption.py`.)

With a `kv_cache_dtype` of 8 bits, a slot has codes and their scales instead of numbers (`eight_bits.py`). Both lie in
their block, so copying, swapping and sharing work as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from minipaged.reference.eight_bits import dequantize, quantize
from minipaged.steps import CopyPair

Array = npt.NDArray[Any]


class KVCache:
    """Keys and values of `num_blocks` blocks on the device, with room for `num_swap_blocks` on the host."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        num_swap_blocks: int = 0,
        dtype: npt.DTypeLike = np.float32,
        kv_cache_dtype: str = "auto",
        static_scales: Array | None = None,
        places: Sequence[int] | None = None,
    ) -> None:
        """Reserve both pools. Memory is used only as blocks are written.

        `dtype`: the dtype of keys and values written and read. `kv_cache_dtype`: how they are stored, unchanged
        ("auto") or as 8-bit codes ("int8", "fp8"). `static_scales`: [num_layers, 2, num_kv_heads], where 2 is keys,
        values; None: each token has its own scales. `places`: the place of each layer in a block, which layers of
        different groups have in different blocks (`models/layer_groups.py`); None: each has its own. Raises ValueError
        if a size is below 1 (`num_swap_blocks`: below 0).
        """
        sizes = {
            "num_layers": num_layers,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be 1 or more")
        if num_swap_blocks < 0:
            raise ValueError(f"num_swap_blocks is {num_swap_blocks}; it must be 0 or more")
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_swap_blocks = num_swap_blocks
        self.dtype = np.dtype(dtype)
        self.kv_cache_dtype = kv_cache_dtype
        self.static_scales = static_scales
        self.places = places or range(num_layers)
        self.layers_per_block = max(self.places) + 1
        block_shape = (self.layers_per_block, 2, block_size, num_kv_heads, head_dim)  # 2: keys, values
        if kv_cache_dtype == "auto":
            block = np.dtype((self.dtype, block_shape))
        else:
            codes = np.int8 if kv_cache_dtype == "int8" else np.uint8
            block = np.dtype([("scales", np.float32, block_shape[:-1]), ("codes", codes, block_shape)])
        # np.zeros gets pages of zeros from the system, which take no memory until they are written. In 8 bits a pool is
        # an array [blocks] of such records; otherwise it is an array [blocks, layers, 2, block_size, kv_heads,
        # head_dim].
        self.device_blocks: Array = np.zeros(num_blocks, block)
        self.host_blocks: Array = np.zeros(num_swap_blocks, block)
        self.block_bytes = block.itemsize

    def write(self, layer: int, slots: npt.ArrayLike, k: Array, v: Array) -> None:
        """Write the keys and values of n tokens into their slots, in one layer.

        slots: [n] integers; -1 is padding and is not written. k, v: [n, kv_heads, head_dim].
        Raises IndexError for a slot or layer outside the cache and ValueError for a wrong shape; then nothing is
        written.
        """
        slots = np.asarray(slots, dtype=np.int64)  # [n]
        shape = (slots.size, self.num_kv_heads, self.head_dim)
        if slots.ndim != 1 or k.shape != shape or v.shape != shape:
            raise ValueError(f"{slots.shape} slots need keys and values {shape}, not {k.shape} and {v.shape}")
        place = self._place(layer)
        if slots.size and (slots.min() < -1 or slots.max() >= self.num_blocks * self.block_size):
            wrong = slots[(slots < -1) | (slots >= self.num_blocks * self.block_size)][0]
            raise IndexError(
                f"slot {wrong} is outside the cache's {self.num_blocks} blocks of {self.block_size} slots "
                f"(0 to {self.num_blocks * self.block_size - 1}, or -1 for padding)"
            )
        real = slots >= 0  # [n]
        blocks, offsets = np.divmod(slots[real], self.block_size)  # [n real] each
        for part, values in enumerate((k[real], v[real])):  # [n real, kv_heads, head_dim] each
            at = blocks, place, part, offsets
            if self.kv_cache_dtype == "auto":
                self.device_blocks[at] = values
            else:
                given = None if self.static_scales is None else self.static_scales[layer, part]  # [kv_heads]
                codes, scales = quantize(values, self.kv_cache_dtype, given)
                self.device_blocks["codes"][at] = codes  # [n real, kv_heads, head_dim]
                self.device_blocks["scales"][at] = scales  # [n real, kv_heads]

    def read(self, layer: int, blocks: Array) -> tuple[Array, Array]:
        """Return copies of the keys and the values in n consecutive logical blocks of each sequence, in one layer.

        blocks: [seqs, n] physical blocks; the caller has already checked them, once for all layers (`check_blocks`).
        Keys and values are [seqs, n * block_size, kv_heads, head_dim] each.
        """
        place = self._place(layer)
        shape = (len(blocks), blocks.shape[1] * self.block_size, self.num_kv_heads, self.head_dim)
        if self.kv_cache_dtype == "auto":
            k, v = (self.device_blocks[blocks, place, part] for part in (0, 1))
        else:
            codes, scales = self.device_blocks["codes"], self.device_blocks["scales"]
            k, v = (dequantize(codes[blocks, place, part], scales[blocks, place, part]) for part in (0, 1))
        k, v = k.astype(self.dtype, copy=False), v.astype(self.dtype, copy=False)
        return k.reshape(shape), v.reshape(shape)  # [seqs, n * block_size, kv_heads, head_dim] each

    def copy(self, pairs: Sequence[CopyPair]) -> None:
        """Copy blocks within the device's pool, for copy-on-write. Destinations are distinct, and none is a source."""
        both = {source for source, _ in pairs} & {destination for _, destination in pairs}
        if both:
            raise ValueError(f"block {min(both)} is both copied from and copied to; do it in two calls")
        self._move(self.device_blocks, self.device_blocks, pairs)

    def swap_out(self, pairs: Sequence[CopyPair]) -> None:
        """Copy blocks to the host: (device block, host block) pairs."""
        self._move(self.device_blocks, self.host_blocks, pairs)

    def swap_in(self, pairs: Sequence[CopyPair]) -> None:
        """Copy blocks back to the device: (host block, device block) pairs."""
        self._move(self.host_blocks, self.device_blocks, pairs)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill unowned device blocks with NaN, so that a wrong read shows immediately."""
        self.check_blocks(np.asarray(blocks, dtype=np.int64))
        floats = self.device_blocks if self.kv_cache_dtype == "auto" else self.device_blocks["scales"]
        for block in blocks:
            floats[block] = np.nan  # the whole block, or all of its scales: any code × NaN is NaN

    def check_blocks(self, blocks: Array) -> None:
        """Raise IndexError unless all `blocks` are in the device's pool. (NumPy takes -1 for the last block.)"""
        _check_blocks(blocks, self.num_blocks, "device")

    def _place(self, layer: int) -> int:
        """The layer's place in a block. Raises IndexError for a layer outside the cache."""
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} is outside the cache's {self.num_layers} layers")
        return self.places[layer]

    def _move(self, source: Array, destination: Array, pairs: Sequence[CopyPair]) -> None:
        """Check every pair, then copy: one contiguous copy per block, whatever the number of layers."""
        for pool, side in ((source, 0), (destination, 1)):
            name = "device" if pool is self.device_blocks else "host"
            _check_blocks(np.array([pair[side] for pair in pairs], dtype=np.int64), len(pool), name)
        if len({to for _, to in pairs}) < len(pairs):
            raise ValueError(f"two blocks would be copied to the same place: {list(pairs)}")
        for from_block, to_block in pairs:
            destination[to_block] = source[from_block]  # all layers' keys, values and scales


def _check_blocks(blocks: Array, num_blocks: int, pool: str) -> None:
    if blocks.size and (blocks.min() < 0 or blocks.max() >= num_blocks):
        wrong = blocks[(blocks < 0) | (blocks >= num_blocks)][0]
        raise IndexError(f"block {wrong} is outside the {pool} pool's {num_blocks} blocks")
