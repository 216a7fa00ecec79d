"""The KV cache: one tensor of blocks on the device, and one in host memory for swapping (paper, section 4.2).

The twin of `reference/kv_cache.py`: the same blocks and slots, and the same calls with the same checks. The
differences:

- A block's layout is [layers, 2, kv_heads, block_size, head_dim]. A block is contiguous, so that copying or swapping it
  is one copy. The keys of one head are adjacent, which is how attention reads them.
- Compiled `kernels` for the GPU or the CPU move the numbers (`kernels.py`).
- On a GPU, swapping runs on a side stream. Between the pool and the link, blocks are gathered into one contiguous piece
  on the device. Gathering or scattering takes microseconds, the link milliseconds. So while blocks are swapped out, the
  next step can already write into their places; and blocks can be swapped in while the previous step still uses their
  future places. Runs of neighbours on the host are one copy each, because small copies do not reach the link's speed.
- In 8 bits a block is bytes: first the scales of all its slots, [layers, 2, kv_heads, block_size], then the codes in
  the layout above. It remains contiguous, and is copied and swapped by the same calls. The kernels scale and round in
  registers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minipaged.fast import kernels_for
from minipaged.fast.device import is_gpu, to_device
from minipaged.fast.kernels import Kernels
from minipaged.steps import CopyPair

CODES = {"int8": torch.int8, "fp8": torch.uint8}
"""The storage type of keys and values in 8 bits. (e4m3 floats are stored as their bits: not every GPU has the type.)"""
STAGED_BYTES = 64 << 20
"""The size of the pieces that are gathered on their way to or from the host. (The host queues the next piece without
waiting, so several may exist at a time.)"""


class KVCache:
    """Keys and values of `num_blocks` blocks on the device, and room for `num_swap_blocks` blocks on the host."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        num_swap_blocks: int = 0,
        dtype: torch.dtype = torch.float32,
        kv_cache_dtype: str = "auto",
        static_scales: Tensor | None = None,
        places: Sequence[int] | None = None,
        device: str | torch.device = "cpu",
        kernels: Kernels | None = None,
    ) -> None:
        """Reserve both pools. Raises ValueError if a size is below 1 (`num_swap_blocks`: below 0).

        dtype: the type of the keys and values that are written and read.
        kv_cache_dtype: how they are stored: unchanged ("auto") or as codes of 8 bits ("int8", "fp8"), which need an
            even `head_dim`.
        static_scales: [num_layers, 2, num_kv_heads] float32 on the device, 2: keys, values. None: a scale for each
            token and head.
        places: the place of each layer in a block, which layers of different groups have in different blocks
            (`models/layer_groups.py`). None: each has its own.
        kernels: `minipaged.fast.gpu` or `minipaged.fast.cpu`. None: selected by the device.
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
        self.dtype = dtype
        self.kv_cache_dtype = kv_cache_dtype
        self.static_scales = static_scales
        self.device = torch.device(device)
        self.kernels = kernels or kernels_for(self.device)
        self.places = places or range(num_layers)
        self.layers_per_block = max(self.places) + 1
        block_shape: tuple[int, ...] = (self.layers_per_block, 2, num_kv_heads, block_size, head_dim)  # 2: keys, values
        stored = dtype
        if kv_cache_dtype != "auto":
            if head_dim % 2:
                raise ValueError(
                    f"head_dim is {head_dim}; in 8 bits it must be even, so that scales are aligned to words"
                )
            stored, block_shape = torch.uint8, (math.prod(block_shape[:-1]) * (4 + head_dim),)  # bytes
        on_gpu = is_gpu(self.device)
        if on_gpu:
            self.device_blocks = torch.zeros((num_blocks, *block_shape), dtype=stored, device=self.device)
            self.host_blocks = torch.empty((num_swap_blocks, *block_shape), dtype=stored, pin_memory=True)
        else:
            self.device_blocks = _untouched_zeros((num_blocks, *block_shape), stored)
            self.host_blocks = _untouched_zeros((num_swap_blocks, *block_shape), stored)
        self.block_bytes = math.prod(block_shape) * stored.itemsize
        self._side_stream = torch.cuda.Stream(self.device) if on_gpu else None  # type: ignore[no-untyped-call]
        numbers, self._scales = self.parts(self.device_blocks)
        self._views = [(numbers[:, i, 0], numbers[:, i, 1]) for i in self.places]

    def parts(self, pool: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return views of a pool: the numbers [blocks, layers, 2, kv_heads, block_size, head_dim], and in 8 bits their
        scales, of the same shape without head_dim."""
        if self.kv_cache_dtype == "auto":
            return pool, None
        slots = (len(pool), self.layers_per_block, 2, self.num_kv_heads, self.block_size)
        scale_bytes = 4 * math.prod(slots[1:])
        codes = pool[:, scale_bytes:].view(CODES[self.kv_cache_dtype])
        return codes.view(*slots, self.head_dim), pool[:, :scale_bytes].view(torch.float32).view(slots)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of one layer's keys and values: [num_blocks, kv_heads, block_size, head_dim] each."""
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} is outside the cache's {self.num_layers} layers")
        return self._views[layer]

    def scales(self, layer: int) -> Tensor | None:
        """Return a view of one layer's scales in 8 bits: [num_blocks, 2, kv_heads, block_size] float32, 2: keys,
        values."""
        return None if self._scales is None else self._scales[:, self.places[layer]]

    def static(self, layer: int) -> Tensor | None:
        """One layer's static scales, [2, num_kv_heads] float32; None if the cache has none."""
        return None if self.static_scales is None else self.static_scales[layer]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write the keys and values of n tokens into their slots in one layer.

        slots: [n], integers; -1 is padding and is not written. k, v: [n, kv_heads, head_dim]. Raises IndexError for a
        slot or layer outside the cache, ValueError for a wrong shape; nothing is written then. (The model, whose slots
        come from block tables, writes through `kernels.rope_and_write`, without checks.)
        """
        shape = (slots.numel(), self.num_kv_heads, self.head_dim)
        if slots.ndim != 1 or k.shape != shape or v.shape != shape:
            raise ValueError(
                f"{tuple(slots.shape)} slots need keys and values {shape}, not {tuple(k.shape)} and {tuple(v.shape)}"
            )
        keys, values = self.layer(layer)
        wrong = slots[(slots < -1) | (slots >= self.num_blocks * self.block_size)]
        if len(wrong):
            raise IndexError(
                f"slot {int(wrong[0])} is outside the cache's {self.num_blocks} blocks of {self.block_size} slots "
                f"(0 to {self.num_blocks * self.block_size - 1}, or -1 for padding)"
            )
        if len(slots):
            self.kernels.write(slots, k, v, keys, values, self.scales(layer), self.static(layer))

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and the values in n consecutive logical blocks of some sequences, in one layer.

        blocks: [seqs, n] block numbers. Keys and values are [seqs, n * block_size, kv_heads, head_dim] each.
        """
        keys, values = self.layer(layer)
        shape = (len(blocks), blocks.shape[1] * self.block_size, self.num_kv_heads, self.head_dim)
        scales = self.scales(layer)
        k = _gather(keys, None if scales is None else scales[:, 0], blocks.long()).transpose(2, 3).reshape(shape)
        v = _gather(values, None if scales is None else scales[:, 1], blocks.long()).transpose(2, 3).reshape(shape)
        return k.to(self.dtype), v.to(self.dtype)

    def copy(self, pairs: Sequence[CopyPair]) -> None:
        """Copy blocks within the device's pool, for copy-on-write. Destinations must be distinct, and none may be a
        source."""
        both = {source for source, _ in pairs} & {destination for _, destination in pairs}
        if both:
            raise ValueError(f"block {min(both)} is both copied from and copied to; do it in two calls")
        self._check_pairs(pairs, "device", "device")
        if pairs:
            self.kernels.copy_blocks(self.device_blocks, self._on_device(pairs))

    def swap_out(self, pairs: Sequence[CopyPair]) -> None:
        """Copy blocks to the host. `pairs`: (device block, host block) each."""
        self._check_pairs(pairs, "device", "host")
        if not pairs:
            return
        pairs = sorted(pairs, key=lambda pair: pair[1])  # neighbours on the host become one copy
        for piece in self._pieces(pairs):
            leaving = self.device_blocks[self._on_device([device for device, _ in piece])]  # [n, ...], one piece
            if self._side_stream:
                self._side_stream.wait_stream(torch.cuda.current_stream(self.device))
                leaving.record_stream(self._side_stream)  # frees its memory only after the copy
            with self._beside_computing():
                for start, stop, host in _runs([host for _, host in piece]):
                    self.host_blocks[host : host + stop - start].copy_(leaving[start:stop], non_blocking=True)

    def swap_in(self, pairs: Sequence[CopyPair]) -> None:
        """Copy blocks back to the device. `pairs`: (host block, device block) each."""
        self._check_pairs(pairs, "host", "device")
        if not pairs:
            return
        for piece in self._pieces(sorted(pairs)):
            with self._beside_computing():  # the step in flight does not use the side stream's memory
                arriving = self.device_blocks.new_empty(len(piece), *self.device_blocks.shape[1:])
                for start, stop, host in _runs([host for host, _ in piece]):
                    arriving[start:stop].copy_(self.host_blocks[host : host + stop - start], non_blocking=True)
            if self._side_stream:
                computing = torch.cuda.current_stream(self.device)
                computing.wait_stream(self._side_stream)
                arriving.record_stream(computing)  # frees its memory only after the scatter
            self.device_blocks[self._on_device([device for _, device in piece])] = arriving

    def read_host(self, blocks: Sequence[int]) -> Tensor:
        """Return copies of these host blocks [blocks, block_size bytes], after all queued swaps have finished."""
        if self._side_stream:
            self._side_stream.synchronize()
        return self.host_blocks[list(blocks)]

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill free device blocks with NaN, so that an erroneous read shows immediately."""
        _check_blocks(blocks, self.num_blocks, "device")
        if len(blocks):
            floats = self.device_blocks if self._scales is None else self._scales  # any code × NaN is NaN
            self.kernels.poison_blocks(floats, self._on_device(list(blocks)))

    def _pieces(self, pairs: Sequence[CopyPair]) -> Iterable[Sequence[CopyPair]]:
        """Split the pairs into pieces, because blocks in transit take up memory a second time until they have
        arrived."""
        count = max(1, STAGED_BYTES // self.block_bytes)
        return (pairs[start : start + count] for start in range(0, len(pairs), count))

    def _check_pairs(self, pairs: Sequence[CopyPair], source: str, destination: str) -> None:
        sizes = {"device": self.num_blocks, "host": self.num_swap_blocks}
        _check_blocks((block for block, _ in pairs), sizes[source], source)
        _check_blocks((block for _, block in pairs), sizes[destination], destination)
        if len({to for _, to in pairs}) < len(pairs):
            raise ValueError(f"two blocks would be copied to the same place: {list(pairs)}")

    def _on_device(self, numbers: Sequence[Any]) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self.device)

    def _beside_computing(self) -> AbstractContextManager[Any]:
        """Return a context whose copies are queued on the side stream, so that they do not wait for queued
        computation."""
        return torch.cuda.stream(self._side_stream) if self._side_stream else nullcontext()


def _gather(pool: Tensor, scales: Tensor | None, blocks: Tensor) -> Tensor:
    """Return copies of the keys (or values) in some blocks: [*blocks.shape, kv_heads, block_size, head_dim]; in 8 bits,
    float32.

    pool: one layer's keys, [num_blocks, kv_heads, block_size, head_dim]. scales: in 8 bits, their scales, of the same
    shape without head_dim. blocks: int64.
    """
    if scales is None:
        return pool[blocks]
    codes = pool[blocks]
    values = codes if codes.dtype == torch.int8 else codes.view(torch.float8_e4m3fn)
    return values.float() * scales[blocks][..., None]


def _runs(blocks: Sequence[int]) -> Iterable[tuple[int, int, int]]:
    """Yield runs of neighbours in rising block numbers: (first index, last index + 1, first block) of each run."""
    start = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield start, i, blocks[start]
            start = i


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that take up memory only when written: NumPy gets such pages from the system, torch would write
    them."""
    integers = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    return torch.from_numpy(np.zeros(shape, integers[dtype.itemsize])).view(dtype)


def _check_blocks(blocks: Iterable[int], num_blocks: int, pool: str) -> None:
    for block in blocks:
        if not 0 <= block < num_blocks:
            raise IndexError(f"block {block} is outside the {pool} pool's {num_blocks} blocks")
