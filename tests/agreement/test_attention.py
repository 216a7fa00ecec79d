"""Paged attention of both tiers on the same mixed batches: the same results within each type's rounding."""

from __future__ import annotations

from dataclasses import dataclass
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

    def expected(self) -> np.ndarray:
        arguments = (LAYER, self.tables, self.query_start, self.context_lens, self.scale)
        return reference.paged_attention(self.query.float().cpu().numpy(), self.reference_cache, *arguments)

    def result(self) -> np.ndarray:
        device = self.query.device
        tensors = [torch.from_numpy(a).to(device) for a in (self.tables, self.query_start, self.context_lens)]
        out = fast.paged_attention(self.query, self.cache, LAYER, *tensors, self.scale)
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
) -> Batch:
    """`sizes`: of each sequence, its context length and number of queries. Blocks lie in random places of the pool."""
    rng = np.random.default_rng(seed)
    num_blocks = [-(-context // block_size) for context, _ in sizes]
    total = sum(num_blocks) + 1
    shape = (2, total, block_size, kv_heads, head_dim, 0)
    cache = FastCache(*shape, dtype, kv_cache_dtype, None, kernel_set.device, kernel_set.kernels)
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
    query_start = np.cumsum([0, *(queries for _, queries in sizes)]).astype(np.int32)
    query = torch.from_numpy(rng.standard_normal((query_start[-1], kv_heads * group, head_dim))).to(dtype)
    context_lens = np.array([context for context, _ in sizes], np.int32)
    return Batch(query.to(kernel_set.device), cache, reference_cache, tables, query_start, context_lens, head_dim**-0.5)


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
        )
    )


@pytest.mark.parametrize("block_size", [1, 16, 256])
@every_kernel_set
def test_contexts_around_a_blocks_end_agree(kernel_set: KernelSet, block_size: int) -> None:
    contexts = [1, max(1, block_size - 1), block_size, block_size + 1, 63, 64, 65]
    check(make_batch(kernel_set, torch.float32, [(context, 1) for context in contexts], block_size=block_size))


@pytest.mark.parametrize("head_dim", [128, 256])
@every_kernel_set
def test_large_heads_agree(kernel_set: KernelSet, head_dim: int) -> None:
    check(make_batch(kernel_set, torch.float32, [(70, 1), (33, 20)], block_size=16, head_dim=head_dim))


def test_any_lengths_are_divided_on_a_cpu() -> None:
    """A long context is cut, a batch of short ones is not; with any number of pieces."""
    from minipaged.fast.cpu import attention

    for pieces in (1, 2, 3, 8):
        with patch.object(attention, "num_pieces", lambda pieces=pieces: pieces):
            for contexts in ([3000], [1], [1, 2000, 5], [64] * 7, [1000, 1000, 1000]):
                check(make_batch(CPU, torch.float32, [(c, 1) for c in contexts], block_size=16, kv_heads=1))


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
