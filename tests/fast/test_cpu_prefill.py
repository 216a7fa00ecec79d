"""Attention of prompts on a CPU, in every way to compute it, against float64: within what rounding explains."""

from __future__ import annotations

import math
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from torch import Tensor

from minipaged.fast.cpu import attention, prefill
from minipaged.fast.cpu.bfloat16 import as_array
from minipaged.fast.cpu.vectors import number_type
from minipaged.fast.kernels import Paged
from tests.effort import examples, thorough

NO_RESERVE = 0x4000
"""MAP_NORESERVE, which Python has no name for before 3.13: the system need not have as much memory."""
WAYS = {
    "pairs": (torch.bfloat16, np.uint16(0)),
    "floats": (torch.float32, np.float32(0)),
    "widened floats": (torch.bfloat16, np.float32(0)),
    "library": (torch.float32, None),
    "library, widened": (torch.bfloat16, None),
}
"""A model's type, and what products are computed with (`number_type`)."""
on_every_way = pytest.mark.parametrize("way", WAYS)
Arguments = tuple[Tensor, Paged, Tensor, float]
more = st.fixed_dictionaries(
    {
        "window": st.none() | st.integers(1, 9) | st.integers(1, 300),
        "soft_cap": st.sampled_from([None, 0.5, 20.0]),
        "sinks": st.booleans(),
    }
)
"""What some layers have more, as `make` takes it."""


def make(
    sizes: list[tuple[int, int]],
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 64,
    spread: float = 1.0,
    seed: int = 0,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> Arguments:
    """What `paged_prefill` takes. `sizes`: context and queries of each sequence. Slots without a token are NaN. Blocks
    that lie before the window are not in the tables, nor is any other block beside the window's."""
    random = torch.Generator().manual_seed(seed)
    num_blocks = [-(-context // block_size) for context, _ in sizes]
    pool = torch.full((sum(num_blocks), 2, kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    keys, values = pool.unbind(1)
    places = torch.randperm(len(pool), generator=random).split(num_blocks)
    rows = torch.randperm(len(sizes) + 2, generator=random)[: len(sizes)].int()  # some rows are nobody's
    tables = torch.full((len(sizes) + 2, max(num_blocks)), -1, dtype=torch.int32)
    for s, (context, _) in enumerate(sizes):
        table = tables[rows[s]]
        table[: num_blocks[s]] = places[s]
        num_queries = sizes[s][1]
        position = torch.arange(context)
        block, offset = table.long()[position // block_size], position % block_size
        for each in (keys, values):
            each[block, :, offset] = torch.randn(context, kv_heads, head_dim, generator=random).to(dtype)
        if window is not None:
            first = max(0, context - num_queries + 1 - window)
            pool[block[:first], :, :, offset[:first]] = torch.nan
            table[: first // block_size] = -1
    lens = torch.tensor([queries for _, queries in sizes])
    query = spread * torch.randn(int(lens.sum()), kv_heads * group, head_dim, generator=random)
    start = torch.cat([torch.zeros(1), lens.cumsum(0)]).int()
    contexts = torch.tensor([context for context, _ in sizes], dtype=torch.int32)
    logits = 3 * torch.randn(kv_heads * group, generator=random) if sinks else None
    paged = Paged(keys, values, tables, rows, contexts, window=window, soft_cap=soft_cap, sinks=logits)
    return query.to(dtype), paged, start, head_dim**-0.5


def number_of(way: str) -> np.uint16 | np.float32 | None:
    """What `number_type` says where this way is gone. Skips the test where the processor has no instructions for it."""
    number = WAYS[way][1]
    if number is not None and type(number) not in [type(number_type(dtype)) for dtype, _ in WAYS.values()]:
        pytest.skip("not on this processor")
    return number


def attended(way: str, arguments: Arguments) -> Tensor:
    number = number_of(way)
    with (
        patch.object(prefill, "number_type", lambda _: number),
        patch.object(attention, "number_type", lambda _: number),
    ):
        start = arguments[2]
        return prefill.paged_prefill(*arguments, max_query_len=int((start[1:] - start[:-1]).max()))


def check(way: str, arguments: Arguments) -> None:
    """The weights are rounded to bfloat16 where pairs are multiplied, the result to the model's type: each by at most
    half a unit of its last place, which is a 256th (with the place before the point). The rest is float32: what a score
    is wrong by, the weight is wrong by in proportion."""
    result, (dtype, number) = attended(way, arguments), WAYS[way]
    exact, size, terms = expected(arguments)  # size: the sum of the weights times how large the values are
    bound = 1e-6 * (1 + terms) * size + 1e-6
    if number == 0 and isinstance(number, np.uint16):
        bound = bound + size / 256
    if dtype == torch.bfloat16:
        bound = bound + exact.abs() / 256
    assert result.dtype == dtype
    assert ((result.double() - exact).abs() <= bound).all()


def expected(arguments: Arguments) -> tuple[Tensor, Tensor, float]:
    """Attention in float64; the same with the values' absolutes; and the most that a score's terms add up to, with
    theirs."""
    query, paged, start, scale = arguments
    keys, values, tables, rows, contexts, *_ = paged
    group = query.shape[1] // keys.shape[1]
    (exact, size), terms = torch.empty(2, *query.shape, dtype=torch.float64), 0.0
    for s, context in enumerate(contexts.tolist()):
        blocks = tables[rows[s], : -(-context // keys.shape[2])].long()
        K, V = (
            pool[blocks].transpose(0, 1).flatten(1, 2)[:, :context].double().repeat_interleave(group, 0)
            for pool in (keys, values)
        )  # [heads, context, head_dim]
        own = slice(int(start[s]), int(start[s + 1]))
        q = query[own].double().transpose(0, 1)  # [heads, queries, head_dim]
        distance = torch.arange(context - q.shape[1], context)[:, None] - torch.arange(context)  # [queries, context]
        seen = (distance >= 0) & (distance < (paged.window or context))
        for each in (K, V):
            each[:, ~seen.any(0)] = 0  # in blocks that may be another's
        scores = q @ K.mT * scale  # [heads, queries, context]
        if paged.soft_cap is not None:
            scores = paged.soft_cap * torch.tanh(scores / paged.soft_cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if paged.sinks is not None:
            scores = torch.cat([scores, paged.sinks[:, None, None].expand(-1, q.shape[1], 1)], -1)
        weights = scores.softmax(-1)[:, :, :context]
        terms = max(terms, float((q.abs() @ K.abs().mT * scale).max()))
        exact[own], size[own] = (weights @ V).transpose(0, 1), (weights @ V.abs()).transpose(0, 1)
    return exact, size, terms


@on_every_way
@given(data=st.data())
@settings(max_examples=examples(30, least=5))
def test_random_batches_are_exact_within_rounding(way: str, data: st.DataObject) -> None:
    contexts = data.draw(st.lists(st.integers(1, 9) | st.integers(1, 400), min_size=1, max_size=4))
    sizes = [(context, data.draw(st.integers(1, context))) for context in contexts]
    arguments = make(
        sizes,
        WAYS[way][0],
        block_size=data.draw(st.sampled_from([1, 3, 16, 100])),
        kv_heads=data.draw(st.integers(1, 3)),
        group=data.draw(st.sampled_from([1, 3, 4, 7])),
        head_dim=data.draw(st.sampled_from([4, 8, 20, 64, 80, 128, 256])),
        spread=data.draw(st.sampled_from([0.1, 1.0, 30.0])),
        seed=data.draw(st.integers(0, 2**32)),
        **data.draw(more),
    )
    check(way, arguments)


@pytest.mark.parametrize("window", [1, prefill.TILE - 1, prefill.TILE, prefill.TILE + 1, 150])
@on_every_way
def test_a_window_of_any_length(way: str, window: int) -> None:
    """Nothing before it is read, not even the entries of a table: of whole prompts, chunks and single tokens."""
    sizes = [(400, 400), (400, 70), (300, 1), (64, 64), (2 * window, window), (window + 1, 1)]
    check(way, make(sizes, WAYS[way][0], window=window, sinks=True, soft_cap=5.0))
    check(way, make(sizes, WAYS[way][0], window=window, block_size=7, head_dim=256))


@pytest.mark.parametrize("context", [2, prefill.TILE - 1, prefill.TILE, prefill.TILE + 1, 3 * prefill.TILE])
@pytest.mark.parametrize("group", [1, 3, prefill.ROWS])
def test_prompts_around_a_tiles_end(context: int, group: int) -> None:
    for way in ("pairs", "floats"):
        check(way, make([(context, context)], WAYS[way][0], kv_heads=1, group=group))


@pytest.mark.parametrize("head_dim", [96, 128, 256])
@pytest.mark.parametrize("way", ["pairs", "floats"])
def test_wide_heads(way: str, head_dim: int) -> None:
    for _ in range(4):
        check(way, make([(200, 200), (65, 40)], WAYS[way][0], head_dim=head_dim))


@on_every_way
def test_blocks_that_lie_far_apart(way: str) -> None:
    """More than 2**32 bytes: each block is 2**31 from the next."""
    query, paged, *others = make([(40, 40), (33, 1)], WAYS[way][0], kv_heads=1)
    pool = torch.stack(paged[:2], 1)  # [blocks, 2, kv_heads, block_size, head_dim]
    apart = 2**31 // pool.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = torch.frombuffer(mmap.mmap(-1, len(pool) * 2**31, flags=flags), dtype=pool.dtype)
    far = memory.view(len(pool), apart)[:, : pool[0].numel()].unflatten(1, pool.shape[1:])
    far.copy_(pool)
    check(way, (query, Paged(*far.unbind(1), *paged[2:]), *others))


@pytest.mark.parametrize("window", [None, 80])
@pytest.mark.parametrize("way", ["pairs", "floats"])
def test_a_chunk_gives_what_the_whole_prompt_gives(way: str, window: int | None) -> None:
    """To the last bit, wherever it is cut, and with any number of threads."""
    query, paged, start, scale = make([(300, 300)], WAYS[way][0], window=window)
    whole = attended(way, (query, paged, start, scale))
    before = numba.get_num_threads()
    try:
        for threads in range(1, numba.config.NUMBA_NUM_THREADS + 1):
            numba.set_num_threads(threads)
            with patch.object(prefill, "num_pieces", lambda threads=threads: threads):
                for first, last in [(0, 300), (0, 2), (2, 67), (67, 128), (128, 300)]:
                    seen = paged._replace(context_lens=torch.tensor([last]).int())
                    part = attended(way, (query[first:last], seen, torch.tensor([0, last - first]).int(), scale))
                    assert part.equal(whole[first:last])
    finally:
        numba.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


@on_every_way
def test_one_prompts_nan_stays_its_own(way: str, one_thread: None) -> None:
    """A prompt whose keys and values are NaN shares a thread, and its scratch memory, with others."""
    arguments = make([(70, 70), (5, 5), (9, 3)], WAYS[way][0], kv_heads=1)
    exact, *_ = expected(arguments)
    keys, values, tables, rows, *_ = arguments[1]
    for pool in (keys, values):
        pool[tables[rows[0]].long()] = torch.nan
    result = attended(way, arguments)
    assert result[:70].isnan().all()
    torch.testing.assert_close(result[70:].double(), exact[70:], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("way", ["floats", "library"])
def test_keys_and_values_of_8_bits(way: str) -> None:
    """A number is an integer times the scale of its slot and head; scales lie before their block's numbers."""
    query, paged, *others = make([(70, 70), (130, 9)], torch.float32, head_dim=20)
    pool = torch.stack(paged[:2], 1)  # [blocks, 2, kv_heads, block_size, head_dim]
    factors = pool.abs().amax(-1) / 127  # [blocks, 2, kv_heads, block_size]; NaN where there is no token
    integers = torch.where(pool.isnan(), 0, pool / factors[..., None]).round().to(torch.int8)
    rounded = Paged(*(integers * factors[..., None]).unbind(1), *paged[2:])
    exact, *_ = expected((query, rounded, *others))
    blocks = torch.cat([factors.flatten(1).view(torch.int8), integers.flatten(1)], 1)  # [blocks, bytes]
    scale_bytes = 4 * factors[0].numel()
    numbers = blocks[:, scale_bytes:].view(pool.shape)
    kv_scales = blocks[:, :scale_bytes].view(torch.float32).view(factors.shape)
    number = number_of(way)
    with patch.object(prefill, "number_type", lambda dtype: number):
        stored = Paged(*numbers.unbind(1), *paged[2:5], kv_scales)
        result = prefill.paged_prefill(query, stored, *others, max_query_len=70)
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_head_of_an_odd_size_is_not_multiplied_in_pairs() -> None:
    """Whatever the processor can: this is not patched."""
    arguments = make([(70, 70)], torch.bfloat16, head_dim=7)
    exact, *_ = expected(arguments)
    result = prefill.paged_prefill(*arguments, max_query_len=70)
    torch.testing.assert_close(result.double(), exact, rtol=0.01, atol=1e-5)


def test_scores_of_any_size() -> None:
    """Exponentials neither overflow nor leave nothing."""
    for way in ("pairs", "floats"):
        query, *others = make([(200, 200)], WAYS[way][0])
        check(way, (query * 1000, *others))


@njit
def attend_one(*arguments):  # type: ignore[no-untyped-def, untyped-decorator]
    """Python cannot call it."""
    prefill._attend(*arguments)


@pytest.mark.parametrize("window", [None, 23, 25])
@pytest.mark.parametrize("head_dim", [7, 20, 64, 256])
@pytest.mark.parametrize("way", ["pairs", "floats", "widened floats"])
def test_nothing_beside_scratch_memory_is_written(way: str, head_dim: int, window: int | None) -> None:
    dtype, number = WAYS[way][0], number_of(way)
    if isinstance(number, np.uint16) and head_dim % 2:
        pytest.skip("not multiplied in pairs")
    query, paged, _, scale = make([(130, 90)], dtype, head_dim=head_dim, kv_heads=1, window=window)
    keys, values, tables, rows, contexts, *_ = paged
    pool = attention.KernelPool(
        *(keys.data_ptr(), values.data_ptr(), 0, keys.stride(0) * keys.itemsize, keys.stride(1) * keys.itemsize),
        *(1, keys.shape[2], attention.KINDS[dtype]),
    )
    blocks, wide, guard, canary = prefill.ITEM // prefill.ROWS, head_dim + -head_dim % prefill.TOGETHER, 256, -77
    floats = [(blocks, head_dim, prefill.ROWS), (blocks, wide, prefill.ROWS), (blocks, 2, prefill.ROWS)]
    tile = (prefill.TILE, wide)
    shapes = [*floats, (blocks, prefill.ROWS), tile, tile, (prefill.TILE * max(prefill.ROWS, head_dim),)]
    memory = [
        np.full(math.prod(shape) + 2 * guard, canary, np.int32 if i == len(floats) else np.float32)
        for i, shape in enumerate(shapes)
    ]
    scratch = [each[guard:-guard].reshape(shape) for each, shape in zip(memory, shapes, strict=True)]
    for each in scratch[-3:]:  # keys, values and scores: leftovers of other work
        each[:] = np.nan
    out = torch.empty_like(query)
    for first in range(0, query.shape[0] * query.shape[1], prefill.ITEM):
        attend_one(
            *(as_array(query), pool, 0, tables[rows[0]].numpy(), first, prefill.ITEM, int(contexts[0])),
            *(attention.Scoring.of(paged, scale), number, *scratch, as_array(out)),
        )
    for each in memory:
        assert (each[:guard] == canary).all()
        assert (each[-guard:] == canary).all()
    assert not out.isnan().any()


@thorough
def test_a_processor_without_the_instructions_takes_the_librarys_products() -> None:
    """numba is told to know none, so that what remains is compiled as it would be elsewhere."""
    code = (
        "import torch\n"
        "from minipaged.fast.cpu.vectors import number_type\n"
        "from tests.fast.test_cpu_prefill import check, make\n"
        "assert number_type(torch.bfloat16) is None and number_type(torch.float32) is None\n"
        "check('library, widened', make([(40, 30), (7, 1)], torch.bfloat16))\n"
    )
    root = Path(__file__).parent.parent.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, env=os.environ | {"NUMBA_CPU_NAME": "generic"}, check=True)
