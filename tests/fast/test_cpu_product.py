"""Products of bfloat16 matrices in tiles are exact within rounding, whatever their size, and the batch does not matter.

They need a processor that multiplies pairs of bfloat16 (AVX512_BF16). Elsewhere a library multiplies, which
`test_cpu_packed.py` and the agreement tests check.
"""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minipaged.fast.cpu import llama, product
from minipaged.fast.cpu.llama import DenseMatrix, linears
from minipaged.fast.cpu.product import BLOCKS, GROUP, ROWS, TiledMatrix, num_elements

needs_pairs = pytest.mark.skipif(not llama.in_tiles(torch.bfloat16), reason="this processor has no AVX512_BF16")

sizes = st.one_of(st.integers(1, 2 * ROWS + 1), st.sampled_from([31, 32, 33, 64, 96, 97]))
numbers_of_tokens = st.one_of(st.integers(1, 2 * BLOCKS[0] + 1), st.sampled_from([GROUP - 1, GROUP, GROUP + 1, 130]))


def tiled(weight: Tensor, bias: Tensor | None = None) -> TiledMatrix:
    return TiledMatrix(weight, bias, np.full(num_elements(*weight.shape), 0x7FC0, np.uint16))  # NaN, to be overwritten


def bfloats(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_close(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Rounded once to bfloat16 from sums in float32. With a bias, once more."""
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), 2 * size + bias.double().abs()
    error = (found.double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + size * 2**-8 * (bias is not None) + size * x.shape[1] * 2**-24).all()


@needs_pairs
@given(sizes, sizes, numbers_of_tokens, st.integers(0, 9), st.booleans())
def test_products_are_exact_within_rounding(rows: int, inputs: int, tokens: int, seed: int, has_bias: bool) -> None:
    weight, x = bfloats(seed, rows, inputs), bfloats(seed + 1, tokens, inputs)
    bias = bfloats(seed + 2, rows) if has_bias else None
    matrix = tiled(weight, bias)
    assert_close(matrix(x), x, weight, bias)
    assert torch.equal(matrix.rows(torch.arange(rows)), weight)
    strided = torch.stack([x, x], dim=2)[:, :, 0]
    assert torch.equal(matrix(strided), matrix(x))
    ids = torch.tensor([rows - 1, 0, rows // 2], dtype=torch.int32)
    assert torch.equal(matrix.rows(ids), weight[ids])


@needs_pairs
@pytest.mark.parametrize("num_threads", [1, 2, 3, 40])
def test_a_token_gets_the_same_bits_in_every_batch_and_on_any_number_of_threads(num_threads: int) -> None:
    weight, x = bfloats(0, 100, 70), bfloats(1, 150, 70)
    matrix = tiled(weight)
    alone = torch.cat([matrix(row[None]) for row in x])
    with patch.object(product.numba, "get_num_threads", lambda: num_threads):  # the number of pieces
        for tokens in (1, 2, 3, 7, 14, 15, 29, GROUP, GROUP + 1, 150):
            assert torch.equal(matrix(x[:tokens]), alone[:tokens]), tokens


@needs_pairs
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_reaches_its_own_token_and_row_only(bad: float) -> None:
    weight, x = bfloats(0, 40, 33), bfloats(1, 20, 33)
    x[3, 32], weight[36, 0] = bad, bad
    finite = tiled(weight)(x).isfinite()
    expected = torch.ones(20, 40, dtype=torch.bool)
    expected[3], expected[:, 36] = False, False
    assert torch.equal(finite, expected)


@needs_pairs
def test_matrices_are_kept_once() -> None:
    sizes = [(96, 64), (33, 5)]
    matrices = linears(sizes, [bfloats(0, *size) for size in sizes], [None, None], bfloats(0, 1))
    assert [type(matrix) for matrix in matrices] == [TiledMatrix] * 2
    assert [matrix.nbytes for matrix in matrices] == [2 * 96 * 64, 2 * 64 * 6]
    assert matrices[1].address == matrices[0].address + matrices[0].nbytes  # type: ignore[attr-defined]


def test_other_types_and_other_processors_multiply_by_a_library() -> None:
    weights = [torch.randn(8, 6)]
    assert [type(matrix) for matrix in linears([(8, 6)], weights, [None], weights[0])] == [DenseMatrix]
    with patch.object(llama, "number_type", lambda _: np.float32(0)):  # AVX512 alone
        [matrix] = linears([(8, 6)], [weights[0].bfloat16()], [None], weights[0].bfloat16())
    assert type(matrix) is DenseMatrix
