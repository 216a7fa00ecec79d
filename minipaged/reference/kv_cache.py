"""The KV cache: the memory that block tables point into (paper, section 4.2 and Fig. 5).

The keys and values of every token live in *blocks* of `block_size` slots. A slot is one number,
`block * block_size + offset`. There are two pools: the device's, which attention reads, and the host's, where
blocks wait while their sequence is swapped out (section 4.5). Who holds a block is the allocator's business; here
is only its content:

    nobody's --write, copy, swap_in or load--> some token's keys and values --poison--> NaN (debugging only)

The layout decides what a block costs to move. All that belongs to one block, every layer's keys and values, lies
in one piece of memory, so that a copy-on-write or a swap is one copy a block. (A pool for each layer's keys and
another for its values, as in the paper's system, makes 2 × layers smaller copies of it: see `preemption.py`.)

Keys and values can be kept in 8 bits (`kv_cache_dtype`), so that the same memory has nearly four times the blocks that
it has in float32. Each head of each token is rounded by itself: its largest number becomes the largest that 8 bits can
say, and the factor, its *scale*, is kept in float32 beside the slot:

    scale = max |x| / largest        code = the nearest to x / scale        x ≈ code × scale

    int8    whole numbers up to 127: every step is as large as the others, at most scale / 2 is lost
    fp8     floats of 4 bits exponent and 3 bits fraction, up to 448: small numbers have small steps

A scale depends on nothing but its own token. So what is appended never changes what is there already, a token has the
same code in whatever batch it was computed, and a block, its scales within it, is copied, swapped and shared as ever.

Some checkpoints bring *static* scales, one for all tokens of a layer or of a head, found on a few texts beforehand.
They are used instead and lie in the same place, so that nothing else has to know of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from minipaged.models.quantized.stored import e4m3_values, round_to_e4m3
from minipaged.steps import CopyPair

Array = npt.NDArray[Any]

LARGEST = {"int8": 127, "fp8": 448}
"""The largest number that a code stands for. (int8 has -128 too, which only a static scale can lead to.)"""
SMALLEST_SCALE = np.finfo(np.float32).tiny
"""Of a head of zeros, so that nothing is divided by 0."""


class KVCache:
    """Keys and values of `num_blocks` blocks on the device, and room for `num_swap_blocks` on the host."""

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
    ) -> None:
        """Reserve both pools. Memory is used up only as blocks are written.

        `dtype`: of the numbers that are written and read. `kv_cache_dtype`: how they are kept, as they are ("auto") or
        as codes of 8 bits ("int8", "fp8"). `static_scales`: [num_layers, 2, num_kv_heads], 2: keys, values; None: each
        token's own.
        Raises ValueError when a size is below 1 (`num_swap_blocks`: below 0).
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
        block_shape = (num_layers, 2, block_size, num_kv_heads, head_dim)  # 2: keys, values
        if kv_cache_dtype == "auto":
            block = np.dtype((self.dtype, block_shape))
        else:
            codes = np.int8 if kv_cache_dtype == "int8" else np.uint8
            block = np.dtype([("scales", np.float32, block_shape[:-1]), ("codes", codes, block_shape)])
        # np.zeros asks the system for pages of zeros, which take no memory until they are written. In 8 bits a pool is
        # an array [blocks] of such records; otherwise it is simply [blocks, layers, 2, block_size, kv_heads, head_dim].
        self.device_blocks: Array = np.zeros(num_blocks, block)
        self.host_blocks: Array = np.zeros(num_swap_blocks, block)
        self.block_bytes = block.itemsize

    def write(self, layer: int, slots: npt.ArrayLike, k: Array, v: Array) -> None:
        """Put the keys and values of n tokens into their slots, in one layer.

        slots: [n], integers; -1 is padding and is not written. k, v: [n, kv_heads, head_dim].
        Raises IndexError for a slot or layer outside the cache, ValueError for a wrong shape; nothing is written.
        """
        slots = np.asarray(slots, dtype=np.int64)  # [n]
        shape = (slots.size, self.num_kv_heads, self.head_dim)
        if slots.ndim != 1 or k.shape != shape or v.shape != shape:
            raise ValueError(f"{slots.shape} slots need keys and values {shape}, not {k.shape} and {v.shape}")
        self._check_layer(layer)
        if slots.size and (slots.min() < -1 or slots.max() >= self.num_blocks * self.block_size):
            wrong = slots[(slots < -1) | (slots >= self.num_blocks * self.block_size)][0]
            raise IndexError(
                f"slot {wrong} is outside the cache's {self.num_blocks} blocks of {self.block_size} slots "
                f"(0 to {self.num_blocks * self.block_size - 1}, or -1 for padding)"
            )
        real = slots >= 0  # [n]
        blocks, offsets = np.divmod(slots[real], self.block_size)  # [n real] each
        for part, values in enumerate((k[real], v[real])):  # [n real, kv_heads, head_dim] each
            at = blocks, layer, part, offsets
            if self.kv_cache_dtype == "auto":
                self.device_blocks[at] = values
            else:
                given = None if self.static_scales is None else self.static_scales[layer, part]  # [kv_heads]
                codes, scales = quantize(values, self.kv_cache_dtype, given)
                self.device_blocks["codes"][at] = codes  # [n real, kv_heads, head_dim]
                self.device_blocks["scales"][at] = scales  # [n real, kv_heads]

    def read(self, layer: int, blocks: Array) -> tuple[Array, Array]:
        """The keys and the values, as copies, that some sequences have in n consecutive logical blocks, in one layer.

        blocks: [seqs, n] integers in the pool; the caller has checked them once for all layers' reads (`check_blocks`).
        Keys and values are [seqs, n * block_size, kv_heads, head_dim] each.
        """
        self._check_layer(layer)
        shape = (len(blocks), blocks.shape[1] * self.block_size, self.num_kv_heads, self.head_dim)
        if self.kv_cache_dtype == "auto":
            k, v = (self.device_blocks[blocks, layer, part] for part in (0, 1))
        else:
            codes, scales = self.device_blocks["codes"], self.device_blocks["scales"]
            k, v = (dequantize(codes[blocks, layer, part], scales[blocks, layer, part]) for part in (0, 1))
        k, v = k.astype(self.dtype, copy=False), v.astype(self.dtype, copy=False)
        return k.reshape(shape), v.reshape(shape)  # [seqs, n * block_size, kv_heads, head_dim] each

    def copy(self, pairs: Sequence[CopyPair]) -> None:
        """Copy blocks within the device's pool, for copy-on-write. No destination may be a source, or come twice."""
        both = {source for source, _ in pairs} & {destination for _, destination in pairs}
        if both:
            raise ValueError(f"block {min(both)} is both copied from and copied to; do it in two calls")
        self._move(self.device_blocks, self.device_blocks, pairs)

    def swap_out(self, pairs: Sequence[CopyPair]) -> None:
        """Copy (device block, host block) pairs to the host."""
        self._move(self.device_blocks, self.host_blocks, pairs)

    def swap_in(self, pairs: Sequence[CopyPair]) -> None:
        """Copy (host block, device block) pairs back to the device."""
        self._move(self.host_blocks, self.device_blocks, pairs)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill device blocks that are nobody's with NaN, so that reading them shows at once."""
        self.check_blocks(np.asarray(blocks, dtype=np.int64))
        floats = self.device_blocks if self.kv_cache_dtype == "auto" else self.device_blocks["scales"]
        for block in blocks:
            floats[block] = np.nan  # all of it, or all of its scales: any code × NaN is NaN

    def check_blocks(self, blocks: Array) -> None:
        """Raise IndexError unless all `blocks` are in the device's pool. (NumPy takes -1 for the last block.)"""
        _check_blocks(blocks, self.num_blocks, "device")

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} is outside the cache's {self.num_layers} layers")

    def _move(self, source: Array, destination: Array, pairs: Sequence[CopyPair]) -> None:
        """Check every pair, then copy: one contiguous copy a block, whatever the number of layers."""
        for pool, side in ((source, 0), (destination, 1)):
            name = "device" if pool is self.device_blocks else "host"
            _check_blocks(np.array([pair[side] for pair in pairs], dtype=np.int64), len(pool), name)
        if len({to for _, to in pairs}) < len(pairs):
            raise ValueError(f"two blocks would be copied to the same place: {list(pairs)}")
        for from_block, to_block in pairs:
            destination[to_block] = source[from_block]  # all layers, keys and values, and their scales


# --- 8 bits ---------------------------------------------------------------------------------------


def quantize(values: Array, kv_cache_dtype: str, static_scales: Array | None = None) -> tuple[Array, Array]:
    """Some heads [..., head_dim] as codes of the same shape, int8 or the bits of e4m3 floats, and scales [...] float32.

    `static_scales` [..., or what broadcasts to it] are taken as they are: numbers that are too large for them are cut.
    A head that holds NaN or infinity has a scale that is NaN or infinite, so that what is read is no number either.
    """
    values = values.astype(np.float32)  # [..., head_dim]
    largest = np.float32(LARGEST[kv_cache_dtype])
    sizes = np.abs(values).max(axis=-1)  # [...]
    if static_scales is None:
        scales = np.maximum(sizes / largest, SMALLEST_SCALE)  # [...]
    else:
        scales = np.where(np.isfinite(sizes), static_scales, sizes)  # [...]
    with np.errstate(invalid="ignore"):  # a code of NaN may be any
        scaled = values / scales[..., None]  # [..., head_dim], from -largest to largest if scales are their own
        if kv_cache_dtype == "int8":
            return np.rint(scaled.clip(-largest - 1, largest)).astype(np.int8), scales
        rounded = round_to_e4m3(scaled.clip(-largest, largest))  # [..., head_dim]
    codes = np.searchsorted(e4m3_values()[:127], np.abs(rounded))  # [..., head_dim]: codes 0 to 126 are 0 to 448
    return (codes | np.signbit(rounded) << 7).astype(np.uint8), scales


def dequantize(codes: Array, scales: Array) -> Array:
    """What the codes [..., head_dim] and their scales [...] stand for: [..., head_dim] float32."""
    values = codes.astype(np.float32) if codes.dtype == np.int8 else e4m3_values()[codes]  # [..., head_dim]
    with np.errstate(invalid="ignore"):  # 0 × infinity
        product: Array = values * scales[..., None]  # [..., head_dim]
    return product


def _check_blocks(blocks: Array, num_blocks: int, pool: str) -> None:
    if blocks.size and (blocks.min() < 0 or blocks.max() >= num_blocks):
        wrong = blocks[(blocks < 0) | (blocks >= num_blocks)][0]
        raise IndexError(f"block {wrong} is outside the {pool} pool's {num_blocks} blocks")
