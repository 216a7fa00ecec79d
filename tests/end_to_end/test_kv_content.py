"""The invariant `content`, of numbers: what is kept of a token in 8 bits is what its own key and value round to.

A second cache, of floats, is given the same writes and the same moves of blocks as the engine's. After every write, in
each layer, each slot of the pool has to hold its rounded numbers exactly: whatever was appended, shared, copied,
swapped and poisoned since.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.fast.kv_cache import KVCache as FastCache
from minipaged.reference.kv_cache import KVCache as ReferenceCache
from minipaged.reference.kv_cache import dequantize, quantize

STEM = list(range(20, 46))
PROMPTS = [STEM, [*STEM, 7], [*STEM[:17], 9, 8], [5], [*STEM, 7, 60, 61], list(range(90, 64, -3))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14),
    BeamSearchParams(beam_width=3, max_tokens=9),
    SamplingParams(n=3, temperature=1, seed=1, max_tokens=12, ignore_eos=True),
]


class Followed:
    """A runner's cache, and one of floats that is told all that it is told."""

    def __init__(self, runner: Any) -> None:
        self.cache = cache = runner.kv_cache
        of_numpy = isinstance(cache, ReferenceCache)
        sizes = (cache.num_layers, cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_dim)
        self.exact: Any = (ReferenceCache if of_numpy else FastCache)(*sizes, cache.num_swap_blocks)
        self.num_checked = 0
        for name in ("copy", "swap_out", "swap_in", "poison"):
            setattr(cache, name, self.both(getattr(cache, name), getattr(self.exact, name)))
        if of_numpy:
            cache.write = self.both(cache.write, self.exact.write, check=True)
        else:
            runner.kernels = self
            self.kernels = cache.kernels
        cache.poison(range(cache.num_blocks))  # what the fast tier measured while it was made is there yet

    def both(self, ours: Callable[..., None], exact: Callable[..., None], check: bool = False) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            ours(*arguments)
            exact(*arguments)
            if check:
                self.check(arguments[0])

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    def rope_and_write(self, qkv: Any, *arguments: Any) -> Any:
        """The kernel of the fast tier that writes."""
        *where, keys, _values, heads, norm, eps, _, _ = arguments
        layer = [self.cache.layer(i)[0].data_ptr() for i in range(self.cache.num_layers)].index(keys.data_ptr())
        self.kernels.rope_and_write(qkv.clone(), *where, *self.exact.layer(layer), heads, norm, eps)
        query = self.kernels.rope_and_write(qkv, *arguments)
        self.check(layer)
        return query

    def check(self, layer: int) -> None:
        """All slots, also those that are nobody's."""
        blocks: Any = np.arange(self.cache.num_blocks)[None]
        if not isinstance(self.cache, ReferenceCache):
            blocks = torch.from_numpy(blocks)
        for kept, exact in zip(self.cache.read(layer, blocks), self.exact.read(layer, blocks), strict=True):
            expected = dequantize(*quantize(np.asarray(exact), self.cache.kv_cache_dtype))
            np.testing.assert_array_equal(np.asarray(kept), expected)
        self.num_checked += 1


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_each_slot_holds_what_its_own_token_rounds_to(
    small_llama: Path, tier: Any, kv_cache_dtype: Any, preemption: Any
) -> None:
    llm = LLM(
        small_llama,
        tier=tier,
        device="cpu",
        dtype="float32",
        kv_cache_dtype=kv_cache_dtype,
        block_size=4,
        num_blocks=28,
        num_swap_blocks=60,
        preemption=preemption,
        max_num_batched_tokens=11,
        max_model_len=64,
        debug=True,
    )
    followed = Followed(llm.engine.runner)
    engine = llm.engine
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, PARAMS[i % len(PARAMS)])
        engine.step()
    while engine.unfinished_requests:
        engine.step()
    stats = llm.stats()
    assert followed.num_checked > 40
    assert stats.blocks_copied > 0
    assert stats.prefix_cache_hit_tokens > 0
    assert (stats.preempted_by_swap if preemption == "swap" else stats.preempted_by_recompute) > 0
