"""Paged attention of both tiers on the same mixed batches: the same results within each type's rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.fast import attention as fast
from minipaged.fast.kv_cache import KVCache as FastCache
from minipaged.reference import attention as reference
from minipaged.reference.kv_cache import KVCache as ReferenceCache
from tests.agreement.kernels import CPU, TOLERANCE, KernelSet, every_kernel_set, every_kernel_set_and_dtype
from tests.effort import examples

LAYER = 1


@dataclass
class Batch:
    """The same batch for both tiers; every slot that holds no token is NaN, and so is what is written to at first."""

    query: torch.Tensor
    cache: FastCache
    reference_cache: ReferenceCache
    tables: np.ndarray
    query_start: np.ndarray
    context_lens: np.ndarray
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: np.ndarray | None = None

    def expected(self) -> np.ndarray:
        arguments = (LAYER, self.tables, self.query_start, self.context_lens, self.scale)
        arguments += (self.window, self.soft_cap, self.sinks)
        return reference.paged_attention(self.query.float().cpu().numpy(), self.reference_cache, *arguments)

    def result(self) -> np.ndarray:
        device = self.query.device
        tensors = [torch.from_numpy(a).to(device) for a in (self.tables, self.query_start, self.context_lens)]
        sinks = None if self.sinks is None else torch.from_numpy(self.sinks).to(device)
        more = self.scale, self.window, self.soft_cap, sinks
        out = fast.paged_attention(self.query, self.cache, LAYER, *tensors, *more)
        assert out.dtype == self.query.dtype
        return out.float().cpu().numpy()


def make_batch(
    kernel_set: KernelSet,
    dtype: torch.dtype,
    sizes: list[tuple[int, int]],
    *,
    block_size: int,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 32,
    seed: int = 0,
    kv_cache_dtype: str = "auto",
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> Batch:
    """`sizes`: of each sequence, its context length and number of queries. Blocks lie in random places of the pool.
    Those that lie before a window are in no table, and NaN."""
    rng = np.random.default_rng(seed)
    num_blocks = [-(-context // block_size) for context, _ in sizes]
    total = sum(num_blocks) + 1
    shape = (2, total, block_size, kv_heads, head_dim, 0)
    cache = FastCache(*shape, dtype, kv_cache_dtype, device=kernel_set.device, kernels=kernel_set.kernels)
    reference_cache = ReferenceCache(*shape, kv_cache_dtype=kv_cache_dtype)
    cache.poison(range(total))
    reference_cache.poison(range(total))
    places = iter(rng.permutation(total))
    tables = np.full((len(sizes), max(num_blocks)), -1, np.int32)
    for s, (context, _) in enumerate(sizes):
        tables[s, : num_blocks[s]] = [next(places) for _ in range(num_blocks[s])]
        slots = tables[s, np.arange(context) // block_size] * block_size + np.arange(context) % block_size
        k, v = torch.from_numpy(rng.standard_normal((2, context, kv_heads, head_dim))).to(kernel_set.device, dtype)
        cache.write(LAYER, torch.from_numpy(slots).to(kernel_set.device), k, v)
        reference_cache.write(LAYER, slots, k.float().cpu().numpy(), v.float().cpu().numpy())
    for table, (context, queries) in zip(tables, sizes, strict=True):
        left_out = 0 if window is None else max(0, context - queries + 1 - window) // block_size
        cache.poison(table[:left_out].tolist())
        table[:left_out] = -1
    query_start = np.cumsum([0, *(queries for _, queries in sizes)]).astype(np.int32)
    query = torch.from_numpy(rng.standard_normal((query_start[-1], kv_heads * group, head_dim))).to(dtype)
    context_lens = np.array([context for context, _ in sizes], np.int32)
    logits = 2 * rng.standard_normal(kv_heads * group).astype(np.float32) if sinks else None
    lengths, more = (tables, query_start, context_lens), (head_dim**-0.5, window, soft_cap, logits)
    return Batch(query.to(kernel_set.device), cache, reference_cache, *lengths, *more)


def check(batch: Batch) -> None:
    expected, result = batch.expected(), batch.result()
    assert np.isfinite(result).all(), "everything was written, and nothing unseen was read"
    tolerance = TOLERANCE[batch.query.dtype]
    np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@every_kernel_set_and_dtype
@given(data=st.data())
@settings(max_examples=examples(15))
def test_mixed_batches_agree(kernel_set: KernelSet, dtype: torch.dtype, data: st.DataObject) -> None:
    longest = 1000 if kernel_set is CPU else 150
    context = st.integers(1, 20) | st.integers(1, longest)
    queries = st.integers(0, 3) | st.integers(0, longest)
    drawn = data.draw(st.lists(st.tuples(context, queries), min_size=1, max_size=4))
    sizes = [(context, min(context, 1 + queries)) for context, queries in drawn]
    if data.draw(st.booleans()):
        sizes = [(context, 1) for context, _ in sizes]  # a step of decoding
    check(
        make_batch(
            kernel_set,
            dtype,
            sizes,
            block_size=data.draw(st.sampled_from([1, 3, 16, 64, 100, 256])),
            kv_heads=data.draw(st.integers(1, 3)),
            group=data.draw(st.sampled_from([1, 2, 3, 8])),
            head_dim=data.draw(st.sampled_from([32, 64, 80] if kernel_set is CPU else [32, 40])),
            seed=data.draw(st.integers(0, 2**32)),
            kv_cache_dtype=data.draw(st.sampled_from(["auto", "int8", "fp8"])),
            **data.draw(MORE),
        )
    )


MORE = st.fixed_dictionaries(
    {
        "window": st.none() | st.integers(1, 20) | st.integers(1, 1000),
        "soft_cap": st.sampled_from([None, 1.0, 50.0]),
        "sinks": st.booleans(),
    }
)
"""What some layers have more."""


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize(("block_size", "window"), [(16, 40), (16, 33), (64, 100), (5, 64)])
def test_windows_that_are_no_multiples_of_a_block_agree(block_size: int, window: int, kv_cache_dtype: str) -> None:
    """For chunks that a window cuts, whole prompts, and single tokens, with wide heads too."""
    more: dict[str, Any] = {"window": window, "block_size": block_size, "kv_cache_dtype": kv_cache_dtype}
    decoding, chunks = (
        [(200, 1), (window, 1), (window + 1, 1), (3, 1)],
        [(200, 60), (window + 7, 8), (130, 130), (90, 1)],
    )
    for head_dim in (64, 256):
        check(make_batch(CPU, torch.float32, decoding, head_dim=head_dim, sinks=True, **more))
        check(make_batch(CPU, torch.float32, chunks, head_dim=head_dim, soft_cap=2.0, **more))


@pytest.mark.parametrize("block_size", [1, 16, 256])
@every_kernel_set
def test_contexts_around_a_blocks_end_agree(kernel_set: KernelSet, block_size: int) -> None:
    contexts = [1, max(1, block_size - 1), block_size, block_size + 1, 63, 64, 65]
    check(make_batch(kernel_set, torch.float32, [(context, 1) for context in contexts], block_size=block_size))


@pytest.mark.parametrize("head_dim", [128, 256])
@every_kernel_set
def test_large_heads_agree(kernel_set: KernelSet, head_dim: int) -> None:
    check(make_batch(kernel_set, torch.float32, [(70, 1), (33, 20)], block_size=16, head_dim=head_dim))


@pytest.mark.parametrize("window", [None, 700])
def test_any_lengths_are_divided_on_a_cpu(window: int | None) -> None:
    """A long context is cut, a batch of short ones is not; with any number of pieces. A sink counts once."""
    from minipaged.fast.cpu import attention

    for pieces in (1, 2, 3, 8):
        with patch.object(attention, "num_pieces", lambda pieces=pieces: pieces):
            for contexts in ([3000], [1], [1, 2000, 5], [64] * 7, [1000, 1000, 1000]):
                sizes, more = [(context, 1) for context in contexts], {"window": window, "sinks": True}
                check(make_batch(CPU, torch.float32, sizes, block_size=16, kv_heads=1, **more))


def test_one_sequences_nan_stays_its_own() -> None:
    """A sequence whose values are NaN shares a thread, and its scratch memory, with the next one."""
    batch = make_batch(CPU, torch.float32, [(60, 1), (3, 1)], block_size=16)
    blocks = batch.tables[0, :4]
    batch.cache.device_blocks[blocks] = torch.nan
    result = batch.result()
    assert np.isnan(result[0]).all()
    np.testing.assert_allclose(result[1], batch.expected()[1], atol=1e-5)


WRONG = {
    "a block outside the pool": lambda batch: setattr(batch, "tables", np.full_like(batch.tables, 99)),
    "a block before the pool": lambda batch: setattr(batch, "tables", np.full_like(batch.tables, -1)),
    "queries that are not all somebody's": lambda batch: setattr(batch, "query_start", np.array([0, 3], np.int32)),
    "a context shorter than its queries": lambda batch: setattr(batch, "context_lens", np.array([1], np.int32)),
    "a table too short for its context": lambda batch: setattr(batch, "context_lens", np.array([900], np.int32)),
    "heads that do not divide": lambda batch: setattr(batch, "query", batch.query[:, :3].contiguous()),
}


@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)
@every_kernel_set
def test_both_refuse_the_same_arguments(kernel_set: KernelSet, spoil: object) -> None:
    batch = make_batch(kernel_set, torch.float32, [(20, 2)], block_size=16)
    spoil(batch)  # type: ignore[operator]
    with pytest.raises((IndexError, ValueError)) as theirs:
        batch.expected()
    with pytest.raises((IndexError, ValueError)) as ours:
        batch.result()
    assert ours.type is theirs.type
    assert str(ours.value) == str(theirs.value)
