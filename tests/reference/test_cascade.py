"""Shared reading gives what paged attention gives, whatever the sequences share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.reference.attention import paged_attention
from minipaged.reference.cascade import attend_part, cascade_attention, merge, shared_prefixes
from minipaged.reference.kv_cache import KVCache
from tests.effort import examples

LAYER = 1


@given(data=st.data())
@settings(max_examples=examples(40, least=10))
def test_what_is_read_once_gives_the_result_of_reading_it_for_each(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    cache = KVCache(2, 40, block_size, 2, 8, dtype=dtype)
    cache.poison(range(40))
    # Few blocks in many tables, so that all sorts of beginnings are shared: tables that differ in one block too.
    lengths = data.draw(st.lists(st.integers(1, 6 * block_size), min_size=1, max_size=6))
    tables = np.full((len(lengths), 7), -1)
    for table, length in zip(tables, lengths, strict=True):
        count = -(-length // block_size)
        table[:count] = [10 * min(i, 3) + rng.choice([0, 0, 0, 0, 1, 2]) for i in range(count)]
        slots = np.arange(count * block_size)
        k, v = rng.standard_normal((2, len(slots), 2, 8)).astype(dtype)
        cache.write(LAYER, table[slots // block_size] * block_size + slots % block_size, k, v)
    query, context_lens = rng.standard_normal((len(lengths), 6, 8)).astype(dtype), np.array(lengths)
    window = data.draw(st.one_of(st.none(), st.integers(1, 7 * block_size)))
    soft_cap = data.draw(st.sampled_from([None, 0.7]))
    sinks = data.draw(st.sampled_from([None, rng.standard_normal(6).astype(dtype)]))
    more = (0.5, window, soft_cap, sinks)
    expected = paged_attention(query, cache, LAYER, tables, np.arange(len(lengths) + 1), context_lens, *more)
    found = cascade_attention(query, cache, LAYER, tables, context_lens, *more)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 if dtype == np.float64 else 2e-6)


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_merged_parts_are_the_whole(cut: int) -> None:
    """Within float64's rounding; the scores are so large that exp of them would overflow."""
    rng = np.random.default_rng(cut)
    cache = KVCache(2, 12, 1, 2, 4, dtype=np.float64)
    cache.write(LAYER, np.arange(12), *rng.standard_normal((2, 12, 2, 4)))
    query, blocks = rng.standard_normal((3, 4, 4)), np.arange(12)
    whole = attend_part(query, cache, LAYER, blocks, 12, 1000.0)
    parts = (blocks[:cut], blocks[cut:])
    merged = merge(*(attend_part(query, cache, LAYER, part, len(part), 1000.0) for part in parts))
    assert whole.m.max() > 1000
    for found, expected in zip(merged, whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-13)


def test_sequences_share_the_blocks_with_which_all_of_them_begin() -> None:
    tables = np.array([[3, 5, 7, -1], [1, 5, 7, -1], [3, 5, 8, 2], [3, 5, 8, 4], [1, 5, 7, 6]])
    prefixes = shared_prefixes(tables, np.array([9, 12, 16, 16, 13]), 4)
    assert [(members.tolist(), num_blocks) for members, num_blocks in prefixes] == [([1, 4], 2), ([0, 2, 3], 2)]


def test_a_block_in_which_tables_differ_ends_what_is_shared() -> None:
    """However often the blocks after it are held."""
    tables = np.array([[3, 5, 7, 8], [3, 6, 7, 8]])
    assert [num_blocks for _, num_blocks in shared_prefixes(tables, np.array([16, 16]), 4)] == [1]


def test_the_block_of_the_query_is_not_shared() -> None:
    tables = np.array([[3, 5], [3, 5]])
    assert [num_blocks for _, num_blocks in shared_prefixes(tables, np.array([8, 8]), 4)] == [1]
    assert shared_prefixes(tables, np.array([4, 8]), 4) == []
