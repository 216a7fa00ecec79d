"""Attention of one token on a CPU that multiplies pairs of bfloat16, against float64: within what rounding explains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from minipaged.fast.cpu.decode import GROUPS, TILE, add_values, score_tile
from minipaged.fast.cpu.vectors import number_type
from tests.effort import examples
from tests.fast.test_cpu_prefill import WAYS, attended, check, make, more

pytestmark = pytest.mark.skipif(not isinstance(number_type(torch.bfloat16), np.uint16), reason="not on this processor")


@given(data=st.data())
@settings(max_examples=examples(50, least=10))
def test_random_batches_are_exact_within_rounding(data: st.DataObject) -> None:
    contexts = data.draw(st.lists(st.integers(1, 9) | st.integers(1, 400), min_size=1, max_size=6))
    arguments = make(
        [(context, 1) for context in contexts],
        torch.bfloat16,
        block_size=data.draw(st.sampled_from([1, 3, 16, 100])),
        kv_heads=data.draw(st.integers(1, 3)),
        group=data.draw(st.sampled_from([1, 2, 3, 4, 7, 12])),
        head_dim=data.draw(st.sampled_from([32, 64, 96, 128, 256])),
        spread=data.draw(st.sampled_from([0.1, 1.0, 30.0])),
        seed=data.draw(st.integers(0, 2**32)),
        **data.draw(more),
    )
    check("pairs", arguments)


def test_another_sequences_nan_stays_there() -> None:
    arguments = make([(70, 1), (5, 1), (9, 1)], torch.bfloat16)
    whole = attended("pairs", arguments)
    keys, values, tables, rows, *_ = arguments[1]
    for pool in (keys, values):
        pool[tables[rows[1]].long()[:1]] = torch.nan
    result = attended("pairs", arguments)
    assert result[1].isnan().all()
    assert torch.equal(result[[0, 2]], whole[[0, 2]])


@njit
def one_tile(q, keys, values, size, group, head_dim, scale, p, o, m_l):
    score_tile(q, keys, size, group, head_dim, scale, np.float32(0), p, o, m_l)
    add_values(values, size, group, head_dim, p, o)


@pytest.mark.parametrize("size", [1, 15, 16, 17, TILE - 1, TILE])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 32), (3, 64), (GROUPS[0] + 5, 128)])
def test_nothing_beside_scratch_memory_is_written(size: int, group: int, head_dim: int) -> None:
    dtype, random = WAYS["pairs"][0], torch.Generator().manual_seed(size)
    q, k, v = (torch.randn(rows, head_dim, generator=random).to(dtype) for rows in (group, TILE, TILE))
    addresses = np.array([[rows[min(j, size - 1)].data_ptr() for j in range(TILE)] for rows in (k, v)])
    guard, canary = 256, -77.0
    sizes = {"p": group * TILE // 2, "o": group * head_dim, "m_l": 2 * group}
    memory = {name: np.full(count + 2 * guard, canary, np.float32) for name, count in sizes.items()}
    p, o, m_l = (each[guard:-guard] for each in memory.values())
    o[:], m_l[0::2], m_l[1::2] = 0, -1e30, 0
    places = addresses[0].ctypes.data, addresses[1].ctypes.data
    one_tile(
        *(q.data_ptr(), *places, size, group, head_dim, np.float32(0.1)),
        *(each.ctypes.data for each in (p, o, m_l)),
    )
    for each in memory.values():
        assert (each[:guard] == canary).all()
        assert (each[-guard:] == canary).all()
    weights = (0.1 * q.double() @ k[:size].double().T).softmax(-1)
    result = torch.from_numpy(o).view(group, head_dim) / torch.from_numpy(m_l).view(group, 2)[:, 1:]
    torch.testing.assert_close(result.double(), weights @ v[:size].double(), rtol=0.02, atol=0.02)
