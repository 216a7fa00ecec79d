"""Shared reading on a CPU: which sequences share is read from their tables, and no bit of a result depends on it."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.contracts import BatchRow
from minipaged.fast import llama as fast_llama
from minipaged.fast.cascade import MOST_SPLITS, shared_prefixes
from minipaged.fast.cpu import attention, paged_decode
from minipaged.fast.cpu.vectors import number_type
from minipaged.fast.kernels import Paged, Shared
from tests.effort import examples
from tests.fast.test_cpu_one_call import _short_probe, make  # noqa: F401


def prefixes_of(shared: Shared | None) -> list[tuple[list[int], int]]:
    if shared is None:
        return []
    members, starts, num_tokens = (each.tolist() for each in shared)
    return [(members[a:z], n) for (a, z), n in zip(pairwise(starts), num_tokens, strict=True)]


# --- Who shares --------------------------------------------------------------------------------------


@given(
    tables=st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=1, max_size=8),
    lengths=st.lists(st.integers(1, 24), min_size=8, max_size=8),
    least=st.integers(1, 20),
)
@settings(max_examples=examples(200))
def test_members_begin_with_the_same_blocks_and_save_what_can_be_saved(
    tables: list[list[int]], lengths: list[int], least: int
) -> None:
    lens = lengths[: len(tables)]
    found = prefixes_of(shared_prefixes(torch.tensor(tables).int(), torch.tensor(lens).int(), 4, least=least))
    everybody = [member for members, _ in found for member in members]
    assert len(set(everybody)) == len(everybody)
    for members, num_tokens in found:
        assert num_tokens % 4 == 0
        assert num_tokens < min(lens[member] for member in members)
        assert len({tuple(tables[member][: num_tokens // 4]) for member in members}) == 1
        assert (len(members) - 1) * num_tokens >= least

    def most(members: list[int], depth: int) -> int:
        """The most tokens saved by members that begin with the same `depth` blocks: all together, or apart."""
        parts: dict[int, list[int]] = {}
        for member in members:
            if (depth + 1) * 4 < lens[member]:
                parts.setdefault(tables[member][depth], []).append(member)
        return max((len(members) - 1) * depth * 4, sum(most(part, depth + 1) for part in parts.values()))

    all_found = prefixes_of(shared_prefixes(torch.tensor(tables).int(), torch.tensor(lens).int(), 4))
    assert sum((len(members) - 1) * num_tokens for members, num_tokens in all_found) == most([*range(len(tables))], 0)


def test_a_prefix_is_two_longer_ones_where_that_saves_more() -> None:
    tables = torch.tensor([[1, 2, 3, 9], [1, 5, 6, 9], [1, 2, 3, 8], [1, 5, 6, 8]], dtype=torch.int32)
    lens = torch.tensor([16, 16, 16, 16], dtype=torch.int32)
    assert prefixes_of(shared_prefixes(tables, lens, 4)) == [([0, 2], 12), ([1, 3], 12)]
    assert prefixes_of(shared_prefixes(tables, lens - 8, 4)) == [([0, 1, 2, 3], 4)]


def test_members_are_split_a_few_times_and_no_more() -> None:
    """Sequence i leaves the others at block i: each split would be one more call within the others."""
    count = 1200
    blocks = torch.arange(count, dtype=torch.int32)
    own = count + blocks[:, None] * count
    tables = torch.where(blocks[None] < blocks[:, None], blocks[None], own + blocks[None])
    found = prefixes_of(shared_prefixes(tables, torch.full((count,), count, dtype=torch.int32), 1))
    assert [num_tokens for _, num_tokens in found] == [MOST_SPLITS + 1]
    for members, num_tokens in found:
        assert all(torch.equal(tables[members[0], :num_tokens], tables[one, :num_tokens]) for one in members)


def test_rows_may_be_anybodys() -> None:
    tables = torch.tensor([[9, 9, 9], [3, 5, 7], [9, 9, 9], [3, 5, 8]], dtype=torch.int32)
    rows, lens = torch.tensor([3, 1, 0], dtype=torch.int32), torch.tensor([12, 12, 12], dtype=torch.int32)
    assert prefixes_of(shared_prefixes(tables, lens, 4, rows)) == [([0, 1], 8)]


# --- The kernel --------------------------------------------------------------------------------------


def random_batch(data: st.DataObject, way: str) -> tuple[torch.Tensor, Paged]:
    """Sequences that begin with the first one's blocks, or with a part of them, in a pool full of NaN."""
    block_size = data.draw(st.sampled_from([4, 16, 64]))
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 3, 5]))
    head_dim = data.draw(st.sampled_from([32, 64])) if way == "pairs" else 24
    seqs = data.draw(st.integers(2, 40) | st.integers(2, 5))
    common = [block_size * (data.draw(st.integers(0, 330)) // block_size) for _ in range(2)]
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    draw = lambda most, size: torch.randint(0, most, (size,), generator=random)  # noqa: E731
    shared = torch.tensor(common)[draw(2, seqs)]
    lens = (shared + 1 + draw(150, seqs)).int()
    most_blocks = -(-int(lens.max()) // block_size)
    tables = torch.arange(seqs * most_blocks, dtype=torch.int32).view(seqs, most_blocks)
    for s in range(1, seqs):
        tables[s, : int(shared[s]) // block_size] = tables[0, : int(shared[s]) // block_size]
    dtype = torch.bfloat16 if way == "pairs" else torch.float32
    values = 4 * torch.randn(seqs * most_blocks, 2, kv_heads, block_size, head_dim, generator=random)
    query = torch.randn(seqs, kv_heads * group, head_dim, generator=random).to(dtype)
    rows = torch.randperm(seqs, generator=random).int()
    tables = tables[rows.argsort()]  # row rows[s] is the table of sequence s
    sinks = torch.randn(kv_heads * group, generator=random) if data.draw(st.booleans()) else None
    more: dict[str, Any] = {"soft_cap": data.draw(st.sampled_from([None, 2.0])), "sinks": sinks}
    if way != "int8":
        return query, Paged(*values.to(dtype).unbind(1), tables, rows, lens, **more)
    size, scale_size = 2 * kv_heads * block_size * head_dim, 2 * kv_heads * block_size * 4
    blocks = torch.zeros(len(values), size + scale_size, dtype=torch.int8)
    codes, scales = blocks[:, :size].view(values.shape), blocks[:, size:].view(torch.float32).view(values.shape[:-1])
    codes.copy_(values * 20)
    scales.copy_(torch.rand(scales.shape, generator=random))
    return query, Paged(*codes.unbind(1), tables, rows, lens, scales, **more)


@pytest.mark.parametrize("way", ["pairs", "floats", "int8"])
@given(data=st.data(), num_pieces=st.integers(1, 4))
@settings(max_examples=examples(30, least=10))
def test_no_bit_depends_on_what_is_shared(way: str, data: st.DataObject, num_pieces: int) -> None:
    if way == "pairs" and not isinstance(number_type(torch.bfloat16), np.uint16):
        pytest.skip("not on this processor")
    query, paged = random_batch(data, way)
    shared = shared_prefixes(paged.tables, paged.context_lens, paged.keys.shape[2], paged.rows)
    with patch.object(attention, "num_pieces", lambda: num_pieces):
        found = paged_decode(query, paged._replace(shared=shared), 0.1)
        assert torch.equal(found, paged_decode(query, paged, 0.1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shared_blocks_are_read_once_in_the_first_ones_table(dtype: torch.dtype) -> None:
    """The others' entries for them lead to NaN here. A pair that is cut between two pieces reads its own."""
    keys, values = torch.randn(2, 40, 2, 16, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    query = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    tables = torch.tensor([[*range(8), i] for i in (8, 9, 10)], dtype=torch.int32)
    prefixes = ([0, 1, 2], [0, 3], [128])
    shared = Shared(*(torch.tensor(each, dtype=torch.int32) for each in prefixes))
    paged = Paged(keys, values, tables, torch.arange(3).int(), torch.tensor([130, 140, 131], dtype=torch.int32))
    with patch.object(attention, "num_pieces", lambda: 1):
        expected = paged_decode(query, paged, 0.1)
        keys[20], values[20] = torch.nan, torch.nan
        tables[1:, :8] = 20
        assert torch.equal(paged_decode(query, paged._replace(shared=shared), 0.1), expected)
        assert paged_decode(query, paged, 0.1)[1:].isnan().all()


def test_every_loop_that_is_meant_to_be_parallel_is() -> None:
    """numba makes an ordinary loop of `prange(a if b else c)`, without a word."""
    sources = [path.read_text() for path in Path(attention.__file__).parent.glob("*.py")]
    calls = [node for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    sizes = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "prange"]
    assert len(sizes) > 10
    assert not [ast.unparse(size) for size in sizes if isinstance(size, ast.IfExp)]


# --- The model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [(torch.bfloat16, "auto"), (torch.float32, "auto"), (torch.bfloat16, "int8")]
)
@pytest.mark.parametrize("with_a_prompt", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_logits_are_those_of_reading_everything_for_each(
    dtype: torch.dtype, kv_cache_dtype: str, with_a_prompt: bool, model_type: str
) -> None:
    """Through all layers in one call, layer by layer, and in a batch with a prompt. A layer with a window (a Mistral's)
    shares nothing."""
    llama = make(model_type, dtype, kv_cache_dtype)
    llama.forward([BatchRow([i % 64 for i in range(128)], 0, list(range(32)), wants_logits=False)])
    rows = [BatchRow([3 + i], 128, [*range(32), 32 + i], wants_logits=True) for i in range(4)]
    if with_a_prompt:
        rows.insert(1, BatchRow([1, 2, 3], 0, [39], wants_logits=True))
    taken = list[Any]()

    def counted(*arguments: Any) -> Shared | None:
        taken.append(shared_prefixes(*arguments[:-1], least=1))
        return taken[-1]

    expected = llama.forward(rows)
    with patch.object(fast_llama, "shared_prefixes", counted):
        found = llama.forward(rows)
    assert [prefixes_of(one) for one in taken[:1]] == ([[([0, 1, 2, 3], 128)]] if model_type == "llama" else [])
    assert torch.equal(found, expected)
