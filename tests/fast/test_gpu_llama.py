"""The fused kernels between a Llama's matrix products, against float64 and against transformers' rounding."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from minipaged.fast.gpu import add_rms_norm, geglu, rms_norm, swiglu
from minipaged.reference import llama
from tests.effort import examples
from tests.fast.guarded import GuardedMemory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's bfloat16 is wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # relative, of two roundings
SIZES = st.sampled_from([1, 2, 31, 32, 33, 576, 1000, 1024, 2048, 4097])


def numbers(*shape: int, dtype: torch.dtype, seed: int, strided: bool = False) -> torch.Tensor:
    wide = torch.randn(*shape[:-1], shape[-1] + 7 * strided, generator=torch.Generator().manual_seed(seed))
    return wide.to(dtype).to(DEVICE)[..., : shape[-1]]


def wide(x: torch.Tensor) -> np.ndarray:
    return x.double().cpu().numpy()


@settings(max_examples=examples(40))
@given(
    tokens=st.integers(0, 4),
    hidden=SIZES,
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from(
        [1e-3, 1.0, 100.0]
    ),  # in float16 the squares of the last overflow, and those of the first vanish
    strided=st.booleans(),
)
def test_rms_norm_is_the_references(tokens: int, hidden: int, dtype: torch.dtype, scale: float, strided: bool) -> None:
    x = numbers(tokens, hidden, dtype=dtype, seed=1, strided=strided)
    x *= scale  # in place: strided it stays
    weight = numbers(hidden, dtype=dtype, seed=2)
    expected = llama.rms_norm(wide(x), wide(weight), 1e-5)
    with GuardedMemory():
        normed = rms_norm(x, weight, 1e-5)
    np.testing.assert_allclose(wide(normed), expected, rtol=ROUNDING[dtype], atol=1e-7)
    assert torch.equal(rms_norm(x, weight, 1e-5), normed)


@settings(max_examples=examples(40))
@given(tokens=st.integers(0, 4), hidden=SIZES, dtype=st.sampled_from(DTYPES), strided=st.booleans())
def test_add_rms_norm_adds_in_place_and_normalises_the_sum(
    tokens: int, hidden: int, dtype: torch.dtype, strided: bool
) -> None:
    x = numbers(tokens, hidden, dtype=dtype, seed=3, strided=strided)
    memory = numbers(tokens + 2, hidden + 3, dtype=dtype, seed=4)
    residual = memory[1:-1, 2:-1]
    weight = numbers(hidden, dtype=dtype, seed=5)
    expected = memory.clone()
    expected[1:-1, 2:-1] += x  # rounded to the type

    with GuardedMemory():
        normed = add_rms_norm(x, residual, weight, 1e-5)

    assert torch.equal(memory, expected)  # what lies around the residual included
    summed = llama.rms_norm(wide(residual), wide(weight), 1e-5)
    np.testing.assert_allclose(wide(normed), summed, rtol=ROUNDING[dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32])
def test_half_precision_is_rounded_where_transformers_rounds_it(dtype: torch.dtype) -> None:
    """Equal to the last bit but for the few elements where the order of summation decides. Multiplying by the weight in
    float32 instead would round a third of them otherwise."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = LlamaRMSNorm(576, eps=1e-5).to(DEVICE)
    theirs.weight.data = numbers(576, dtype=dtype, seed=6)
    x = numbers(16, 576, dtype=dtype, seed=7)
    equal = rms_norm(x, theirs.weight.data, 1e-5) == theirs(x)
    assert equal.float().mean() > 0.99


@settings(max_examples=examples(40))
@given(tokens=st.integers(0, 4), intermediate=SIZES, dtype=st.sampled_from(DTYPES), strided=st.booleans())
def test_gates_are_the_references(tokens: int, intermediate: int, dtype: torch.dtype, strided: bool) -> None:
    gate_up = numbers(tokens, 2 * intermediate, dtype=dtype, seed=8, strided=strided)
    gate_up[:, :intermediate] *= 10
    gate, up = wide(gate_up)[:, :intermediate], wide(gate_up)[:, intermediate:]
    for gated, activate in ((swiglu, llama.silu), (geglu, llama.gelu)):
        expected = activate(gate) * up
        with GuardedMemory():
            activated = gated(gate_up)
        # Half precision's smallest steps are absolute.
        np.testing.assert_allclose(wide(activated), expected, rtol=ROUNDING[dtype], atol=1e-7)
        assert torch.equal(gated(gate_up), activated)


def test_a_gate_far_below_zero_closes_and_far_above_lets_through():
    gate_up = torch.tensor([[-1000.0, 1000.0, 0.0, 3.0, 3.0, 3.0]], device=DEVICE)
    assert swiglu(gate_up).tolist() == geglu(gate_up).tolist() == [[0.0, 3000.0, 0.0]]
