"""Products on packed matrices on a CPU: every form, on every way to compute them, against float64."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llvmlite.binding import get_host_cpu_features

from minipaged.fast.cpu import packed
from minipaged.fast.cpu.llama import FEW, DenseMatrix
from minipaged.fast.cpu.packed import TOKENS, PackedMatrix, Room, number_type
from minipaged.models.quantized.stored import Codebook4, Float8, Grouped, StoredMatrix, e4m3_values, pack
from tests.effort import quick_cases, thorough

BITS = {"nibbles": (2, 3, 4), "bytes": (5, 6, 8)}
WAYS = {
    "pairs": (torch.bfloat16, np.uint16(0)),
    "floats": (torch.float32, np.float32(0)),
    "plain": (torch.float32, None),
    "widened floats": (torch.bfloat16, np.float32(0)),
    "plain and widened": (torch.bfloat16, None),
}
"""A model's type, and what products are computed with (`number_type`)."""
CASES = [(way, kind) for kind in ("nibbles", "bytes", "float8") for way in WAYS]
ON_EVERY_WAY = pytest.mark.parametrize(("way", "kind"), CASES)


def packed_by(way: str, matrix: StoredMatrix, bias: torch.Tensor | None = None) -> PackedMatrix:
    dtype, number = WAYS[way]
    if number is not None and type(number) not in [type(number_type(each)) for each, _ in WAYS.values()]:
        pytest.skip("not on this processor")
    with patch.object(packed, "number_type", lambda dtype: number):
        return PackedMatrix(matrix, bias, dtype)


@st.composite
def matrices(draw: st.DrawFn, kind: str) -> StoredMatrix:
    """Rows, inputs and groups of any size; what is rounded beside it (`rounding`) is left out."""
    r = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, inputs = draw(st.integers(1, 40)), draw(st.integers(1, 100))
    scale_type = draw(st.sampled_from([np.float16, np.float32]))
    common: dict[str, Any] = {"shape": (rows, inputs), "rounding": "float32"}
    if kind == "float8":
        block = draw(st.integers(1, 50)), draw(st.integers(1, inputs))
        codes = r.choice(np.flatnonzero(np.isfinite(e4m3_values())).astype(np.uint8), (rows, inputs))
        scales = r.uniform(0.5, 2, (-(-rows // block[0]), -(-inputs // block[1]))).astype(scale_type)
        return Float8(**common, codes=codes, scales=scales, block=block)
    if kind == "nibbles" and draw(st.booleans()):
        size = draw(st.sampled_from([size for size in range(1, inputs + 1) if inputs % size == 0]))
        codes = pack(r.integers(0, 16, (rows, inputs), dtype=np.uint8), 4)
        table = np.sort(r.standard_normal(16)).astype(np.float32)
        scales = r.uniform(0.5, 2, (rows, inputs // size)).astype(np.float32)
        return Codebook4(**common, codes=codes, table=table, scales=scales, group_size=size)
    bits, size = draw(st.sampled_from(BITS[kind])), draw(st.integers(1, inputs))
    groups = -(-inputs // size)
    fields: dict[str, Any] = {"bits": bits, "group_size": size}
    fields["codes"] = pack(r.integers(0, 2**bits, (rows, inputs), dtype=np.uint8), bits)
    one_zero = draw(st.integers(0, 2**bits - 1) | st.sampled_from([0, 2 ** (bits - 1)]))
    any_zeros = r.integers(0, min(2**bits + 1, 256), (rows, groups), dtype=np.uint8)
    fields["zeros"] = one_zero if draw(st.booleans()) else any_zeros
    if draw(st.booleans()):  # in any order, and not as many in each
        fields["group_index"] = r.integers(0, groups, inputs).astype(np.int32)
    supers = draw(st.sampled_from([None, *(each for each in range(1, groups + 1) if groups % each == 0)]))
    if supers is None:
        fields["scales"] = r.uniform(0.5, 2, (rows, groups)).astype(scale_type)
    else:
        fields["scales"] = r.integers(-128, 128, (rows, groups)).astype(np.int8)
        fields["super_scales"] = r.uniform(0.01, 0.02, (rows, supers)).astype(np.float16)
    if draw(st.booleans()):
        fields["minima"] = r.standard_normal((rows, groups)).astype(scale_type)
        if supers is not None and draw(st.booleans()):
            fields["minima"] = r.integers(0, 64, (rows, groups)).astype(np.uint8)
            fields["super_minima"] = -r.uniform(0.01, 0.02, (rows, supers)).astype(np.float16)
    return Grouped(**common, **fields)


def largest_parts(matrix: StoredMatrix) -> np.ndarray:
    """[rows, in]: what is rounded on the way to a weight is no larger than this."""
    weights = np.abs(matrix.rows().astype(np.float64))
    if not isinstance(matrix, Grouped):
        return weights
    groups = matrix.group_index if matrix.group_index is not None else np.arange(matrix.shape[1]) // matrix.group_size
    scales = packed.multiplied(matrix.scales, matrix.super_scales, slice(None)).astype(np.float64)
    bound = 2 ** max(matrix.bits, 8) * np.abs(scales)
    if matrix.minima is not None:
        bound += np.abs(packed.multiplied(matrix.minima, matrix.super_minima, slice(None)))
    return bound[:, groups]


def check_product(matrix: StoredMatrix, x: torch.Tensor, bias: torch.Tensor | None, found: torch.Tensor) -> None:
    """As near to float64 as sums in float32 are, with a rounding for each number added and a few for a group; and the
    result is rounded once to the model's type."""
    inputs = x.double().numpy()
    expected = inputs @ matrix.rows().astype(np.float64).T
    sizes = np.abs(inputs) @ largest_parts(matrix).T
    if bias is not None:
        expected += bias.double().numpy()
        sizes += bias.double().abs().numpy()
    allowed = (matrix.shape[1] + 20) * 2.0**-24 * sizes + 1e-30
    if x.dtype == torch.bfloat16:
        allowed += 2.0**-8 * (np.abs(expected) + allowed)
        if isinstance(matrix, Codebook4):
            allowed += 2.0**-8 * sizes  # the table's rounding
    assert found.dtype == x.dtype
    assert found.shape == expected.shape
    assert found.is_contiguous()
    assert (np.abs(found.double().numpy() - expected) <= allowed).all()


@ON_EVERY_WAY
@quick_cases(2)
@given(data=st.data())
def test_products_are_those_of_the_weights(way: str, kind: str, data: st.DataObject) -> None:
    """Whatever the form, the shape, the groups and their order, and however many tokens."""
    dtype, matrix = WAYS[way][0], data.draw(matrices(kind))
    tokens, seed = data.draw(st.integers(0, 2 * sum(TOKENS))), data.draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(matrix.shape[0], generator=generator).to(dtype) if data.draw(st.booleans()) else None
    x = torch.randn(tokens, matrix.shape[1], generator=generator).to(dtype)
    check_product(matrix, x, bias, packed_by(way, matrix, bias)(x))


@ON_EVERY_WAY
@quick_cases(2)
@given(data=st.data())
def test_rows_are_read_as_they_were_stored(way: str, kind: str, data: st.DataObject) -> None:
    """To the last bit, whatever a product makes of them."""
    matrix = data.draw(matrices(kind))
    ids = np.array(data.draw(st.lists(st.integers(0, matrix.shape[0] - 1), max_size=5)), np.int64)
    found = packed_by(way, matrix).rows(torch.from_numpy(ids))
    assert torch.equal(found, torch.from_numpy(matrix.rows(ids)).to(WAYS[way][0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_share_the_rows(dtype: torch.dtype) -> None:
    """However many there are, and more than there are rows for."""
    matrix = q4_1((50, 64))
    x = torch.randn(9, 64).to(dtype)
    whole = PackedMatrix(matrix, None, dtype)
    out = torch.empty(3, 9, 64, dtype=dtype)
    for part, num_threads in zip(out, (1, 3, 7), strict=True):
        packed._multiply(x.data_ptr(), len(x), part.data_ptr(), num_threads, *whole._arguments)
        check_product(matrix, x, None, part[:, :50].contiguous())
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[0], out[2])


def test_inputs_may_be_strided() -> None:
    matrix, x = q4_1((16, 64)), torch.randn(5, 2, 64).bfloat16()
    whole = PackedMatrix(matrix, None, torch.bfloat16)
    assert torch.equal(whole(x[:, 1]), whole(x[:, 1].contiguous()))


def test_what_is_no_number_stays_none() -> None:
    """A float of 8 bits may be none; inputs may be none, and infinite."""
    codes = np.full((3, 32), 0x38, np.uint8)
    codes[1, 7] = 0xFF
    matrix = Float8(
        shape=(3, 32), rounding="float32", codes=codes, scales=np.ones((1, 1), np.float32), block=(128, 128)
    )
    found = PackedMatrix(matrix, None, torch.float32)
    assert found(torch.ones(2, 32)).isnan().tolist() == [[False, True, False]] * 2
    assert found(torch.ones(1, 32))[0, 0] == 32
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    x[0, 5], x[1, 5] = torch.nan, torch.inf
    products = PackedMatrix(q4_1((16, 64)), None, torch.bfloat16)(x)
    assert products.isfinite().all(1).tolist() == [False, False, True]
    assert products[0].isnan().all()


def test_results_are_rounded_to_bfloat16_as_torch_rounds_them() -> None:
    """The same sums of float32, rounded once: to even where two are as near, and none stays none."""
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    ties = [1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 2.0**-130, torch.finfo().max, torch.inf, -torch.inf, torch.nan]
    all_ones = torch.tensor([2**31 - 1], dtype=torch.int32).view(torch.float32)  # rounded up it would be a number
    bias = torch.cat([values, torch.tensor(ties), all_ones])
    matrix = q4_1((len(bias), 32))
    x = torch.zeros(1, 32)
    exact = packed_by("floats", matrix, bias)(x)
    assert torch.equal(exact[0].nan_to_num(), bias.nan_to_num())
    rounded = packed_by("widened floats", matrix, bias)(x.bfloat16())
    torch.testing.assert_close(rounded, exact.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_a_matrix_takes_the_memory_of_its_bytes_and_is_never_there_in_floats() -> None:
    """4096 x 2048 of 4 bits are 5 MB, would be 34 MB in float32, and 8 MB as a byte each."""
    matrix, room = q4_1((4096, 2048)), Room()
    tracemalloc.start()
    whole = PackedMatrix(matrix, None, torch.bfloat16, room)
    size, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_factors = 2 * 4096 * 2048 // 32  # a scale and a minimum a group; float16, but for loops without instructions
    assert whole.nbytes == matrix.nbytes + (2 * num_factors if number_type(torch.bfloat16) is None else 0)
    assert size <= Room.SIZE + 200_000
    assert peak <= Room.SIZE + 6 * packed.AT_ONCE


def test_a_matrix_of_bfloat16_needs_no_onednn_that_multiplies_it() -> None:
    """Which refuses to lay it out, on a processor without AVX512."""
    weight, x = torch.randn(8, 16).bfloat16(), torch.randn(FEW + 1, 16).bfloat16()
    exact = x.double() @ weight.double().T
    for supported in (False, torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        with patch.object(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda supported=supported: supported):
            matrix = DenseMatrix(weight, None)
            product = matrix(x)
        assert (matrix._packed is not None) == supported
        torch.testing.assert_close(product.double(), exact, rtol=0.01, atol=0.03)


def test_matrices_lie_side_by_side() -> None:
    room = Room()
    addresses = [PackedMatrix(q4_1((40, 96)), None, torch.float32, room)._tiles.ctypes.data for _ in range(3)]
    assert len({second - first for first, second in itertools.pairwise(addresses)}) == 1
    assert addresses[1] - addresses[0] < 10_000
    assert all(address % packed.LINE == 0 for address in addresses)


@thorough
@pytest.mark.parametrize("has", ["no vectors", "AVX512 alone"])
def test_a_processor_without_the_instructions_multiplies_too(has: str) -> None:
    """numba is told to know none, or none for bfloat16, so that what remains is compiled as it would be elsewhere."""
    if has == "AVX512 alone" and number_type(torch.float32) is None:
        pytest.skip("not on this processor")
    code = (
        "import torch\n"
        "from minipaged.fast.cpu.packed import PackedMatrix, number_type\n"
        "from tests.fast.test_cpu_packed import check_product, q4_1\n"
        "print(*(number_type(dtype) for dtype in (torch.bfloat16, torch.float32)))\n"
        "matrix, x = q4_1((40, 64)), torch.randn(5, 64).bfloat16()\n"
        "check_product(matrix, x, None, PackedMatrix(matrix, None, torch.bfloat16)(x))\n"
    )
    features = get_host_cpu_features().flatten().replace("+avx512bf16", "-avx512bf16")
    told, numbers = {
        "no vectors": ({"NUMBA_CPU_NAME": "generic"}, "None None"),
        "AVX512 alone": ({"NUMBA_CPU_FEATURES": features}, "0.0 0.0"),
    }[has]
    root = Path(__file__).parent.parent.parent
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, env=os.environ | told, capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == (f"{numbers}\n", 0), ran.stderr


def q4_1(shape: tuple[int, int]) -> Grouped:
    """As a GGUF file has it."""
    r, groups = np.random.default_rng(0), (shape[0], shape[1] // 32)
    return Grouped(
        shape=shape,
        rounding="float32",
        bits=4,
        codes=r.integers(0, 256, (shape[0], shape[1] // 2), dtype=np.uint8),
        scales=r.uniform(0.5, 2, groups).astype(np.float16),
        zeros=0,
        minima=r.standard_normal(groups).astype(np.float16),
        group_size=32,
    )
