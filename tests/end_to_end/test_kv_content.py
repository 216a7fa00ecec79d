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
from minipaged.contracts import BatchRow
from minipaged.fast.kv_cache import KVCache as FastCache
from minipaged.llm import LoadedModel
from minipaged.params import KVCacheDtype
from minipaged.reference.eight_bits import dequantize, quantize
from minipaged.reference.kv_cache import KVCache as ReferenceCache
from tests.effort import thorough

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


TEXT = """Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once
or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it,
"and what is the use of a book," thought Alice, "without pictures or conversations?" So she was considering in
her own mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the
pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when
suddenly a White Rabbit with pink eyes ran close by."""


@thorough
@pytest.mark.model
def test_a_real_models_logits_move_by_two_percent_in_int8_at_most_and_five_in_fp8(smollm2_folder: Path) -> None:
    """The Euclidean norm is that of all logits after 12 beginnings of a text; each goes on from the one before."""
    model = LoadedModel.load(smollm2_folder, "fast", device="cpu", dtype="float32")
    assert model.tokenizer is not None
    token_ids = model.tokenizer.encode(TEXT)
    logits = {}
    kinds: tuple[KVCacheDtype, ...] = ("auto", "int8", "fp8")
    for kind in kinds:
        llm = LLM(model, kv_cache_dtype=kind, num_blocks=8, num_swap_blocks=0)
        runner: Any = llm.engine.runner
        firsts = range(0, 120, 10)
        rows = [[BatchRow(tuple(token_ids[i : i + 10]), i, tuple(range(8)), wants_logits=True)] for i in firsts]
        logits[kind] = torch.cat([runner.forward(row) for row in rows])  # [beginnings, vocab]
    apart = {kind: ((logits[kind] - logits["auto"]).norm() / logits["auto"].norm()).item() for kind in kinds}
    assert 0.001 < apart["int8"] < 0.02
    assert 0.001 < apart["fp8"] < 0.05
