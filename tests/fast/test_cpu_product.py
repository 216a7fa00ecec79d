"""Products of matrices in tiles are exact within rounding, whatever their size, and the batch does not matter.

In bfloat16 they need a processor that multiplies pairs (AVX512_BF16), in float32 one that multiplies and adds in one
instruction. Elsewhere a library multiplies, which `test_cpu_packed.py` and the agreement tests check.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import binding, ir
from torch import Tensor

from minipaged.fast.cpu import llama, product
from minipaged.fast.cpu.llama import DenseMatrix, linears
from minipaged.fast.cpu.packed import PackedMatrix
from minipaged.fast.cpu.product import (
    FLOATS_TOGETHER,
    GROUP_BLOCKS,
    PAIRS_TOGETHER,
    ROWS,
    FloatProduct,
    TiledMatrix,
    WideningProduct,
    can_multiply_tiles,
    num_bytes,
)
from tests.effort import thorough
from tests.fast.test_cpu_packed import q4_1

KINDS = {"bfloat16": (torch.bfloat16, 2), "float32 from bfloat16": (torch.float32, 2), "float32": (torch.float32, 4)}
"""The types of inputs, and the bytes that a weight takes."""
kinds = [kind for kind, (dtype, _) in KINDS.items() if can_multiply_tiles(dtype)]

sizes = st.one_of(st.integers(1, 2 * ROWS + 1), st.sampled_from([31, 32, 33, 64, 96, 97]))
GROUP = GROUP_BLOCKS * PAIRS_TOGETHER
numbers_of_tokens = st.one_of(
    st.integers(1, 2 * PAIRS_TOGETHER + 1),
    st.sampled_from([GROUP_BLOCKS * FLOATS_TOGETHER + 1, GROUP - 1, GROUP, GROUP + 1, 130]),
)


def tiled(weight: Tensor, bias: Tensor | None = None) -> TiledMatrix:
    return TiledMatrix(weight, bias, np.full(num_bytes(weight), 0xFF, np.uint8))  # NaN, to be overwritten


def numbers(kind: str, seed: int, *shape: int) -> Tensor:
    dtype, item_bytes = KINDS[kind]
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (drawn.bfloat16() if item_bytes == 2 else drawn).to(dtype)


def assert_close(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Rounded once to the type of the inputs from sums in float32. With a bias, once more."""
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), 2 * size + bias.double().abs()
    error, unit = (found.double() - exact).abs(), 2**-8 if x.dtype == torch.bfloat16 else 2**-24
    assert (error <= exact.abs() * unit + size * unit * (bias is not None) + size * x.shape[1] * 2**-24).all()


@pytest.mark.skipif(not kinds, reason="this processor has no instructions for tiles")
@given(st.sampled_from(kinds), sizes, sizes, numbers_of_tokens, st.integers(0, 9), st.booleans())
def test_products_are_exact_within_rounding(
    kind: str, rows: int, inputs: int, tokens: int, seed: int, has_bias: bool
) -> None:
    weight, x = numbers(kind, seed, rows, inputs), numbers("float32", seed + 1, tokens, inputs).to(KINDS[kind][0])
    bias = numbers(kind, seed + 2, rows) if has_bias else None
    matrix = tiled(weight, bias)
    assert matrix.item_bytes == KINDS[kind][1]
    assert_close(matrix(x), x, weight, bias)
    assert torch.equal(matrix.rows(torch.arange(rows)), weight)
    strided = torch.stack([x, x], dim=2)[:, :, 0]
    assert torch.equal(matrix(strided), matrix(x))
    ids = torch.tensor([rows - 1, 0, rows // 2], dtype=torch.int32)
    assert torch.equal(matrix.rows(ids), weight[ids])


@pytest.mark.parametrize("kind", kinds)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 40])
def test_a_token_gets_the_same_bits_in_every_batch_and_on_any_number_of_threads(kind: str, num_threads: int) -> None:
    weight, x = numbers(kind, 0, 100, 70), numbers(kind, 1, 150, 70)
    matrix = tiled(weight)
    alone = torch.cat([matrix(row[None]) for row in x])
    with patch.object(product.numba, "get_num_threads", lambda: num_threads):  # the number of pieces
        for tokens in (*range(1, PAIRS_TOGETHER + 2), 29, 49, GROUP, GROUP + 1, 150):
            assert torch.equal(matrix(x[:tokens]), alone[:tokens]), tokens


@pytest.mark.parametrize("kind", kinds)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_reaches_its_own_token_and_row_only(kind: str, bad: float) -> None:
    weight, x = numbers(kind, 0, 40, 33), numbers(kind, 1, 20, 33)
    x[3, 32], weight[36, 0] = bad, bad
    finite = tiled(weight)(x).isfinite()
    expected = torch.ones(20, 40, dtype=torch.bool)
    expected[3], expected[:, 36] = False, False
    assert torch.equal(finite, expected)


@pytest.mark.parametrize("kind", kinds)
def test_a_sum_adds_the_products_pair_by_pair(kind: str) -> None:
    """Beside a large number a 1 is lost, unless that number is gone by then."""
    large, dtype = 2.0**26, KINDS[kind][0]
    weight = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.1, 1.1, 1.1, 1.1]])[: 2 if KINDS[kind][1] == 4 else 1].to(dtype)
    x = torch.tensor([[large, 0, 1, -large], [large, 0, -large, 1], [1, large, -large, 0]], dtype=dtype)
    second_first = dtype == torch.bfloat16  # in a pair
    assert tiled(weight)(x)[:, 0].tolist() == [float(second_first), float(not second_first), 0]


@pytest.mark.parametrize("kind", kinds)
def test_subnormal_numbers_count_in_float32_alone(kind: str) -> None:
    dtype, item_bytes = KINDS[kind]
    tiny, most = 2.0**-130, 2.0**100
    weight = torch.tensor([[1.0], [tiny]] + [[1.1]] * (item_bytes == 4)).to(dtype)
    found = tiled(weight)(torch.tensor([[tiny], [most]], dtype=dtype))[:, :2]
    counts = dtype == torch.float32
    assert found.tolist() == [[tiny * counts, 0], [most, most * tiny * counts]]
    least = torch.tensor([[1.5 * 2.0**-126, -(2.0**-126)]], dtype=dtype)
    assert tiled(torch.ones(1, 2, dtype=dtype))(least).item() == 2.0**-127 * counts, "nor does a sum"


def test_the_loop_over_rows_takes_inputs_that_are_strided() -> None:
    x, matrix = torch.arange(16.0).view(1, 8, 2)[:, :, 0], DenseMatrix(torch.eye(8), None)
    assert matrix(x).tolist() == x.tolist()


@pytest.mark.parametrize("kind", ["in tiles", "as rows", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_of_another_type_or_width_are_refused(kind: str, dtype: torch.dtype) -> None:
    """A kernel would read other memory."""
    weight, matrix = torch.ones(8, 32, dtype=dtype), None
    if kind == "packed":
        matrix = PackedMatrix(q4_1((8, 32)), None, dtype)
    elif kind == "as rows":
        matrix = DenseMatrix(weight, None)
    elif can_multiply_tiles(dtype):
        matrix = tiled(weight)
    if matrix is None:
        pytest.skip("this processor has no instructions for tiles")
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    for tokens in (1, 9):
        for x in (torch.ones(tokens, 32, dtype=other), torch.ones(tokens, 31, dtype=dtype)):
            with pytest.raises(ValueError, match=rf"{tokens}, 3[12]\] in {x.dtype}.* pass \[tokens, 32\] in {dtype}"):
                matrix(x)
    with pytest.raises(ValueError, match=r"are \[32\] in"):
        matrix(torch.ones(32, dtype=dtype))


@pytest.mark.parametrize("kind", kinds)
def test_matrices_are_kept_once_in_the_fewest_bytes_that_lose_nothing(kind: str) -> None:
    sizes, (dtype, item_bytes) = [(96, 64), (33, 5)], KINDS[kind]
    weights, like = [numbers(kind, 0, *size) for size in sizes], torch.zeros(1, dtype=dtype)
    with patch.object(llama, "uses_tiles", lambda dtype: True):
        matrices = linears(sizes, weights, [None, None], like)
    assert [type(matrix) for matrix in matrices] == [TiledMatrix] * 2
    assert [matrix.nbytes for matrix in matrices] == [item_bytes * 96 * 64, item_bytes * 64 * 6]
    assert matrices[1].address == matrices[0].address + matrices[0].nbytes  # type: ignore[attr-defined]


def test_on_other_processors_a_library_multiplies() -> None:
    weight = torch.randn(8, 6)
    with patch.object(llama, "can_multiply_tiles", lambda dtype: False):
        for like in (weight, weight.bfloat16()):
            assert [type(matrix) for matrix in linears([(8, 6)], [like], [None], like)] == [DenseMatrix]
    with patch.object(product, "number_type", lambda dtype: np.float32(0)):  # AVX512 alone
        assert not can_multiply_tiles(torch.bfloat16)


# --- The same product on other processors ---------------------------------------------------------------


def module_of(kind: type[FloatProduct], count: int) -> str:
    """LLVM code of a function that multiplies a tile by `count` tokens, as without vectors of 512 bits."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 5), "multiply")
    builder = ir.IRBuilder(function.append_basic_block())
    with patch.object(product, "VECTORS", 1):
        kind(builder).write(count, *function.args)  # type: ignore[no-untyped-call]
    builder.ret_void()
    return str(module)


@pytest.mark.parametrize("kind", [FloatProduct, WideningProduct])
@pytest.mark.parametrize("count", [6, 4, 2, 1])
def test_with_fewer_registers_the_sums_of_a_tile_are_the_same(kind: type[FloatProduct], count: int) -> None:
    pairs, random = 5, np.random.default_rng(count)
    module = binding.parse_assembly(module_of(kind, count))
    target = binding.Target.from_default_triple().create_target_machine(features="+avx2,+fma")
    engine = binding.create_mcjit_compiler(module, target)
    multiply = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(engine.get_function_address("multiply"))
    weight = torch.from_numpy(random.normal(size=(ROWS, 2 * pairs)).astype(np.float32)).bfloat16().float()
    if kind is FloatProduct:
        weight *= 1.1
    x = random.normal(size=(pairs, count, 2)).astype(np.float32)
    out = np.full((count, ROWS), np.nan, np.float32)
    matrix = tiled(weight)
    multiply(matrix.address, x.ctypes.data, pairs, out.ctypes.data, out.strides[0])
    assert_close(torch.from_numpy(out), torch.from_numpy(x.transpose(1, 0, 2).reshape(count, -1)), weight)


@pytest.mark.parametrize("kind", [FloatProduct, WideningProduct])
def test_the_product_in_float32_is_compiled_for_arm_without_calls(kind: type[FloatProduct]) -> None:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("aarch64-linux-gnu").create_target_machine(opt=3)
    lines = target.emit_assembly(binding.parse_assembly(module_of(kind, 6))).splitlines()
    assert sum("fmla" in line for line in lines) >= 2 * 6 * 4  # two inputs, 6 tokens, 4 vectors of 4 rows
    assert not any(line.split()[:1] == ["bl"] for line in lines)


@thorough
def test_a_model_runs_with_vectors_of_256_bits(tiny_model: Path) -> None:
    """The processor's newer instructions are hidden from numba, oneDNN and torch. Without bfloat16 in oneDNN, the fast
    tier computes in float32."""
    has = binding.get_host_cpu_features()
    if not {"avx2", "fma"} <= {name for name, there in has.items() if there}:
        pytest.skip("not on this processor")
    newer = ("avx512", "evex512", "amx", "avx10")
    features = ",".join(f"{'-' if name.startswith(newer) else '+'}{name}" for name, there in has.items() if there)
    hidden = {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": features,
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    }
    code = (
        "import sys\n"
        "from minipaged import LLM, SamplingParams\n"
        "from minipaged.fast.cpu.vectors import HAS_FMA, HAS_VECTORS\n"
        "prompts, params = [[3, 4, 5], [*range(10, 80)], [7]], SamplingParams(max_tokens=20, ignore_eos=True)\n"
        "told = [HAS_FMA, HAS_VECTORS]\n"
        "for tier in ('fast', 'reference'):\n"
        "    llm = LLM(sys.argv[1], tier=tier, device='cpu', num_blocks=64)\n"
        "    print([done.outputs[0].token_ids for done in llm.generate(prompts, params, use_tqdm=False)])\n"
        "    told.append(llm.loaded.tier.dtype)\n"
        "print(*told)\n"
    )
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-c", code, str(tiny_model)]
    ran = subprocess.run(command, cwd=root, env=os.environ | hidden, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    fast, reference, told = ran.stdout.splitlines()
    assert told == "True False float32 float32"
    assert fast == reference
    assert fast.count(",") == 3 * 20 - 1
