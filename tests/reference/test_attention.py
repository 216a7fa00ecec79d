"""Paged attention equals ordinary attention, whatever the blocks: the invariants "content" and "exact answers".

The yardstick is softmax attention in float64 over keys and values that lie in one piece. Every slot that no token
owns, every block that no sequence owns, and every slot before the window holds NaN throughout: reading one shows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.reference import attention
from minipaged.reference.attention import attend, paged_attention
from minipaged.reference.kv_cache import Array, KVCache
from tests.effort import examples

LAYER = 1  # of 2: the other layer holds NaN


@dataclass
class Batch:
    """A mixed batch, with its keys and values both in blocks and in one piece."""

    query: Array  # [tokens, heads, head_dim]
    keys: list[Array]  # of each sequence: [context, kv_heads, head_dim]
    values: list[Array]
    query_lens: Array  # [seqs]
    scale: float
    cache: KVCache
    block_tables: Array  # [seqs, max_blocks]
    window: int | None = None
    soft_cap: float | None = None
    sinks: Array | None = None  # [heads]

    @property
    def query_start(self) -> Array:
        return np.concatenate(([0], np.cumsum(self.query_lens)))

    @property
    def context_lens(self) -> Array:
        return np.array([len(keys) for keys in self.keys])

    def paged(self) -> Array:
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            tables, starts, lens = self.block_tables, self.query_start, self.context_lens
            return paged_attention(self.query, self.cache, LAYER, tables, starts, lens, self.scale, *self.more)

    @property
    def more(self) -> tuple[int | None, float | None, Array | None]:
        return self.window, self.soft_cap, self.sinks

    def contiguous(self) -> Array:
        """Softmax attention in float64."""
        outputs = []
        for s, (K, V) in enumerate(zip(self.keys, self.values, strict=True)):
            q = self.query[self.query_start[s] : self.query_start[s + 1]].astype(np.float64)  # [T, heads, head_dim]
            group = q.shape[1] // K.shape[1]
            K, V = (np.repeat(x.astype(np.float64), group, axis=1) for x in (K, V))  # [context, heads, head_dim]
            scores = np.einsum("qhd,khd->hqk", q, K) * self.scale  # [heads, T, context]
            position = np.arange(len(K) - len(q), len(K))  # [T]
            if self.soft_cap is not None:
                scores = np.tanh(scores / self.soft_cap) * self.soft_cap
            distance = position[:, None] - np.arange(len(K))  # [T, context]
            scores[:, (distance < 0) | (distance >= (self.window or len(K)))] = -np.inf
            if self.sinks is not None:  # as transformers has it: one more score, whose weight is dropped
                sinks = self.sinks.astype(np.float64)[:, None, None].repeat(len(q), axis=1)  # [heads, T, 1]
                scores = np.concatenate((scores, sinks), axis=-1)  # [heads, T, context + 1]
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights = (weights / weights.sum(axis=-1, keepdims=True))[..., : len(K)]  # [heads, T, context]
            outputs.append(np.einsum("hqk,khd->qhd", weights, V))
        return np.concatenate(outputs)  # [tokens, heads, head_dim]


def in_blocks(
    keys: list[Array], values: list[Array], block_size: int, rng: np.random.Generator, spare: int = 2
) -> tuple[KVCache, Array]:
    """Write each sequence into blocks in random places of a pool full of NaN. Returns cache and block tables."""
    num_blocks = [-(-len(k) // block_size) for k in keys]
    _, kv_heads, head_dim = keys[0].shape
    cache = KVCache(2, sum(num_blocks) + spare, block_size, kv_heads, head_dim, dtype=keys[0].dtype)
    cache.poison(range(cache.num_blocks))
    free = iter(rng.permutation(cache.num_blocks))
    tables = np.full((len(keys), max(num_blocks) + 1), -1)
    for s, (k, v) in enumerate(zip(keys, values, strict=True)):
        tables[s, : num_blocks[s]] = [next(free) for _ in range(num_blocks[s])]
        positions = np.arange(len(k))
        cache.write(LAYER, tables[s, positions // block_size] * block_size + positions % block_size, k, v)
    return cache, tables


def near_ten_thousand(
    rng: np.random.Generator, num_queries: int, contexts: list[int], heads: int, kv_heads: int, head_dim: int
) -> tuple[Array, list[Array], float]:
    """Queries and keys whose scores are near +10,000 or -10,000, close to one another, and exact even in float32.

    Whole numbers and a scale of 1/64: what error remains is that of the softmax itself, not of the products.
    """
    a = int(np.sqrt(1e4 * 64 / head_dim))
    direction = a * rng.choice([-1, 1], head_dim)
    query = rng.choice([-1, 1], (num_queries, heads, 1)) * direction + rng.integers(-1, 2, (heads, head_dim))
    keys = [
        rng.choice([-1, 1], (n, kv_heads, 1)) * (direction + (rng.random((n, kv_heads, head_dim)) < 2 / head_dim))
        for n in contexts
    ]
    return query, keys, 1 / 64


@st.composite
def batches(draw: st.DrawFn, dtype: type | None = None, max_context: int = 300, is_llama: bool = False) -> Batch:
    """`is_llama`: without windows, soft caps and sinks."""
    dtype = dtype or draw(st.sampled_from([np.float32, np.float32, np.float64]))
    block_size = draw(st.sampled_from([1, 2, 3, 7, 16, 32, 64, 100, 128, 256]) | st.integers(1, 256))
    head_dim = draw(st.sampled_from([32, 48, 64, 80, 96, 128, 256]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    context = st.integers(1, 20) | st.integers(1, max_context)
    sizes = draw(
        st.lists(
            context.flatmap(lambda n: st.tuples(st.just(n), st.just(1) | st.just(min(n, 3)) | st.integers(1, n))),
            min_size=1,
            max_size=6,
        )
    )
    huge_scores = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    contexts, query_lens = [n for n, _ in sizes], np.array([q for _, q in sizes])
    heads, num_queries = kv_heads * group, int(query_lens.sum())
    if huge_scores:
        query, keys, scale = near_ten_thousand(rng, num_queries, contexts, heads, kv_heads, head_dim)
    else:
        query, scale = rng.standard_normal((num_queries, heads, head_dim)), 1 / np.sqrt(head_dim)
        keys = [rng.standard_normal((n, kv_heads, head_dim)) for n in contexts]
    query, keys = query.astype(dtype), [k.astype(dtype) for k in keys]
    values = [rng.standard_normal(k.shape).astype(dtype) for k in keys]
    cache, tables = in_blocks(keys, values, block_size, rng)
    batch = Batch(query, keys, values, query_lens, float(scale), cache, tables)
    if not is_llama:
        batch.window = draw(st.none() | st.integers(1, 20) | st.integers(1, max_context))
        batch.soft_cap = draw(st.sampled_from([None, None, 0.5, 50.0]))
        if not huge_scores and draw(st.booleans()):  # beside scores of ±10,000, a sink takes all or nothing
            batch.sinks = rng.standard_normal(heads).astype(dtype) * draw(st.sampled_from([1, 10]))
        forget(batch)
    return batch


def forget(batch: Batch) -> None:
    """Lose every slot that no query sees any more, and every block of such slots, as if they had been given back."""
    if batch.window is None:
        return
    size = batch.cache.block_size
    for table, context, n in zip(batch.block_tables, batch.context_lens, batch.query_lens, strict=True):
        lost = np.arange(max(0, context - n + 1 - batch.window))  # the positions before the first query's window
        batch.cache.device_blocks[table[lost // size], LAYER, :, lost % size] = np.nan
        table[: len(lost) // size] = -1


def relative_error(actual: Array, expected: Array) -> float:
    """The worst of all heads of all tokens: norm of the difference over norm of the expected output."""
    difference = np.linalg.norm(actual - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(difference.max())


@settings(max_examples=examples(120))
@given(batch=batches(), tile=st.sampled_from([attention.TILE, 1]))
def test_paged_attention_equals_softmax_attention_over_contiguous_keys_and_values(batch: Batch, tile: int) -> None:
    with patch.object(attention, "TILE", tile):
        output = batch.paged()
    assert output.dtype == batch.query.dtype
    assert output.shape == batch.query.shape
    assert relative_error(output, batch.contiguous()) < (1e-5 if output.dtype == np.float32 else 1e-12)


@settings(max_examples=examples(60))
@given(batch=batches(max_context=60))
def test_the_loop_for_one_query_gives_the_same(batch: Batch) -> None:
    """Which is the paper's, and of which `paged_attention` is the batched form."""
    outputs = []
    for s, (n, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        for position in range(context - n, context):
            query = batch.query[batch.query_start[s] + position - (context - n)]
            with np.errstate(over="raise", invalid="raise", divide="raise"):
                blocks = batch.block_tables[s]
                outputs.append(attend(query, batch.cache, LAYER, blocks, position, batch.scale, *batch.more))
    assert outputs[0].dtype == batch.query.dtype
    tolerance = 1e-5 if batch.query.dtype == np.float32 else 1e-12
    assert relative_error(np.array(outputs), batch.contiguous()) < tolerance
    assert relative_error(np.array(outputs), batch.paged()) < tolerance


@settings(max_examples=examples(30))
@given(batch=batches(), seed=st.integers(0, 2**32))
def test_where_the_blocks_lie_changes_nothing(batch: Batch, seed: int) -> None:
    before = batch.paged()
    rng = np.random.default_rng(seed)
    batch.cache, batch.block_tables = in_blocks(batch.keys, batch.values, batch.cache.block_size, rng, spare=5)
    forget(batch)
    np.testing.assert_array_equal(batch.paged(), before)


@settings(max_examples=examples(30))
@given(batch=batches(dtype=np.float64, max_context=100), data=st.data())
def test_a_prompt_taken_in_chunks_gets_the_same_attention(batch: Batch, data: st.DataObject) -> None:
    whole = batch.paged()
    for s, n in enumerate(batch.query_lens):
        cuts = sorted({0, int(n), *data.draw(st.lists(st.integers(0, int(n)), max_size=4))})
        for start, stop in itertools.pairwise(cuts):
            tokens = slice(batch.query_start[s] + start, batch.query_start[s] + stop)
            chunk = paged_attention(
                batch.query[tokens],
                batch.cache,
                LAYER,
                batch.block_tables[s : s + 1],
                np.array([0, stop - start]),
                batch.context_lens[s : s + 1] - n + stop,
                batch.scale,
                *batch.more,
            )
            assert relative_error(chunk, whole[tokens]) < 1e-12


@settings(max_examples=examples(30))
@given(batch=batches(dtype=np.float64, max_context=100), data=st.data())
def test_a_sequence_gets_the_same_attention_in_any_company(batch: Batch, data: st.DataObject) -> None:
    together = batch.paged()
    order = data.draw(st.permutations(range(len(batch.keys))))
    order = order[: data.draw(st.integers(1, len(order)))]
    tokens = [np.arange(batch.query_start[s], batch.query_start[s + 1]) for s in order]
    some = paged_attention(
        batch.query[np.concatenate(tokens)],
        batch.cache,
        LAYER,
        batch.block_tables[order],
        np.concatenate(([0], np.cumsum(batch.query_lens[order]))),
        batch.context_lens[order],
        batch.scale,
        *batch.more,
    )
    assert relative_error(some, together[np.concatenate(tokens)]) < 1e-12


def test_sequences_may_share_blocks() -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 12, 2, 32))
    cache, tables = in_blocks([k], [v], 4, rng)
    query = rng.standard_normal((3, 4, 32))
    lens = np.array([12, 8, 9])
    shared = paged_attention(query, cache, LAYER, np.repeat(tables, 3, axis=0), np.arange(4), lens, 0.2)
    alone = Batch(query, [k[:n] for n in lens], [v[:n] for n in lens], np.array([1, 1, 1]), 0.2, cache, tables)
    assert relative_error(shared, alone.contiguous()) < 1e-12


def test_an_empty_batch_gives_an_empty_output() -> None:
    none = np.zeros(0, dtype=np.int64)
    query = np.zeros((0, 2, 8), np.float32)
    output = paged_attention(query, KVCache(1, 1, 4, 1, 8), 0, np.zeros((0, 0), np.int64), np.zeros(1, int), none, 1.0)
    assert output.shape == query.shape


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 7, 8, 9, 12, 13])
@pytest.mark.parametrize("num_queries", [1, 3, 13])
def test_a_window_of_w_sees_the_token_itself_and_w_minus_1_before(window: int, num_queries: int) -> None:
    """All scores are equal, so the answer is the mean of the values that are seen: the positions themselves."""
    keys, values = np.zeros((13, 1, 2)), np.repeat(np.arange(13.0), 2).reshape(13, 1, 2)
    cache, tables = in_blocks([keys], [values], 4, np.random.default_rng(0))
    query, positions = np.zeros((num_queries, 1, 2)), np.arange(13 - num_queries, 13)
    expected = [np.arange(max(0, position - window + 1), position + 1).mean() for position in positions]
    starts, lens = np.array([0, num_queries]), np.array([13])
    for tile in (attention.TILE, 1):
        with patch.object(attention, "TILE", tile):
            output = paged_attention(query, cache, LAYER, tables, starts, lens, 1.0, window)
        np.testing.assert_allclose(output[:, 0, 0], expected, rtol=1e-12)
    one_by_one = [attend(query[0], cache, LAYER, tables[0], position, 1.0, window)[0, 0] for position in positions]
    np.testing.assert_allclose(one_by_one, expected, rtol=1e-12)


def test_a_sink_takes_weight_and_gives_no_value() -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 13, 1, 8))
    cache, tables = in_blocks([k], [v], 4, rng)
    query = rng.standard_normal((2, 2, 8))
    arguments = (cache, LAYER, tables, np.array([0, 2]), np.array([13]), 1.0, None, None)
    without = paged_attention(query, *arguments)
    sinks = np.array([-1e4, 1e4])  # of the first head nothing goes there, of the second all
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        output = paged_attention(query, *arguments, sinks)
        alone = attend(query[1], cache, LAYER, tables[0], 12, 1.0, None, None, sinks)
    np.testing.assert_array_equal(output[:, 0], without[:, 0])
    np.testing.assert_array_equal(output[:, 1], 0)
    np.testing.assert_allclose(alone, output[1], rtol=1e-12)


def test_prompts_of_one_length_may_begin_at_different_places_of_a_window() -> None:
    """The last queries of the longer sequence see nothing of the first blocks, which the others still see."""
    rng = np.random.default_rng(0)
    keys, values = ([each[:n] for n in (13, 16, 20)] for each in rng.standard_normal((2, 20, 1, 8)))
    cache, tables = in_blocks(keys, values, 4, rng)
    batch = Batch(rng.standard_normal((39, 2, 8)), keys, values, np.array([13] * 3), 1.0, cache, tables, window=3)
    with patch.object(attention, "TILE", 1):
        assert relative_error(batch.paged(), batch.contiguous()) < 1e-12


@pytest.mark.parametrize(("num_queries", "first_needed"), [(1, 2), (2, 2), (3, 1), (6, 1), (7, 0)])
def test_only_the_blocks_before_the_window_may_be_missing(num_queries: int, first_needed: int) -> None:
    """The context has 13 tokens in blocks of 4, and the window 4: a single query sees positions 9 to 12."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 13, 1, 8))
    cache, tables = in_blocks([k], [v], 4, rng)
    query = rng.standard_normal((num_queries, 1, 8))
    for missing in range(4):
        holes = tables.copy()
        holes[0, missing] = -1
        arguments = (query, cache, LAYER, holes, np.array([0, num_queries]), np.array([13]), 1.0, 4)
        if missing < first_needed:
            paged_attention(*arguments)
        else:
            with pytest.raises(IndexError, match="block -1 is outside"):
                paged_attention(*arguments)


def test_blocks_before_the_window_are_not_read() -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 1000, 1, 8))
    cache, tables = in_blocks([k, k[:300]], [v, v[:300]], 4, rng)
    query, starts, lens = rng.standard_normal((2, 1, 8)), np.arange(3), np.array([1000, 300])
    read = []

    def watched(layer: int, blocks: Array) -> tuple[Array, Array]:
        read.extend(blocks.ravel().tolist())
        return KVCache.read(cache, layer, blocks)

    with patch.object(cache, "read", watched):
        paged_attention(query, cache, LAYER, tables, starts, lens, 1.0, 10)
        attend(query[0], cache, LAYER, tables[0], 999, 1.0, 10)
    assert set(read) <= {*tables[0, 247:250], *tables[1, 72:75]}


@pytest.mark.parametrize("wrong_block", [-1, 4, -4])
def test_a_block_outside_the_pool_is_refused_where_the_context_needs_it(wrong_block: int) -> None:
    cache = KVCache(1, 4, 2, 1, 8)
    query, starts, lens = np.ones((1, 1, 8), np.float32), np.array([0, 1]), np.array([3])
    with pytest.raises(IndexError, match=f"block {wrong_block} is outside"):
        paged_attention(query, cache, 0, np.array([[0, wrong_block]]), starts, lens, 1.0)
    paged_attention(query, cache, 0, np.array([[0, 1, wrong_block]]).clip(-1, 3), starts, lens, 1.0)


@pytest.mark.parametrize(
    ("heads", "starts", "lens", "complaint"),
    [
        (3, [0, 1, 2], [3, 3], "3 query heads cannot be shared"),
        (2, [0, 1, 1], [3, 3], "does not divide"),
        (2, [0, 1, 3], [3, 3], "does not divide"),
        (2, [0, 2], [1], "shorter than their queries"),
        (2, [0, 1, 2], [3, 5], "too short for 5 tokens"),
    ],
)
def test_lengths_and_heads_that_do_not_fit_together_are_refused(
    heads: int, starts: list[int], lens: list[int], complaint: str
) -> None:
    query = np.ones((2, heads, 8), np.float32)
    tables = np.array([[0, 1]] * len(lens))
    with pytest.raises(ValueError, match=complaint):
        paged_attention(query, KVCache(1, 4, 2, 2, 8), 0, tables, np.array(starts), np.array(lens), 1.0)
