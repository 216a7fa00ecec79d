"""The kernels of a Llama between its matrix products: normalize, add, gate.

They do very little arithmetic per byte they move, so each is one pass over memory: a row is read once, in accesses of
16 bytes if its size and address allow, kept in registers, and written once. In plain tensor operations, a norm alone
would read and write the row five times.

    rms_norm       norm(x)
    add_rms_norm   residual += x, norm(residual): the sum is normalized while it is still in registers
    swiglu         silu(gate) * up
    geglu          gelu(gate) * up

Rounding follows transformers' `LlamaRMSNorm`: the norm in float32, rounded to the tensor's type, then multiplied by the
weight in that type. Rounding elsewhere would be as accurate, but in half precision the last bits of the logits would
differ from the model's, and greedy ties would fall differently. For the same reason no multiplication is fused with an
addition (`enable_fp_fusion`), which costs nothing in kernels bound by memory.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from minipaged.fast.gpu.packed import packed
from minipaged.fast.kernels import Layer, Matrix, RunLayers
from minipaged.fast.linear import expanded, quantizing
from minipaged.models.quantized.stored import StoredMatrix

TILE = 1024
"""The elements that a program of `swiglu` or `geglu` computes: with four warps, each thread has 8 elements, which are
16 bytes in half precision."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `minipaged.fast.kernels`. Rows may be strided."""
    hidden = x.shape[1]
    normed = x.new_empty(x.shape)
    _rms_norm[(len(x),)](
        x, weight, normed, x.stride(0), eps,
        HIDDEN=hidden, WIDTH=triton.next_power_of_2(hidden), num_warps=_warps(x), enable_fp_fusion=False,
    )  # fmt: skip
    return normed


@triton.jit
def _rms_norm(x, weight, normed, x_stride, eps, HIDDEN: tl.constexpr, WIDTH: tl.constexpr):
    """One program per token normalizes its whole row."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)  # [WIDTH]
    row = tl.load(x + token * x_stride + i, mask=i < HIDDEN, other=0.0)
    tl.store(normed + token * HIDDEN + i, _normed(row, weight, eps, HIDDEN, WIDTH), mask=i < HIDDEN)


@triton.jit
def _normed(row, weight, eps, HIDDEN: tl.constexpr, WIDTH: tl.constexpr):
    """Return the norm of a row [WIDTH] that is 0 from HIDDEN on."""
    i = tl.arange(0, WIDTH)  # [WIDTH]
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / HIDDEN + eps)
    return (wide * scale).to(row.dtype) * tl.load(weight + i, mask=i < HIDDEN, other=0.0)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `minipaged.fast.kernels`. Rows of x and residual may be strided."""
    hidden = x.shape[1]
    normed = x.new_empty(x.shape)
    _add_rms_norm[(len(x),)](
        x, residual, weight, normed, x.stride(0), residual.stride(0), eps,
        HIDDEN=hidden, WIDTH=triton.next_power_of_2(hidden), num_warps=_warps(x), enable_fp_fusion=False,
    )  # fmt: skip
    return normed


@triton.jit
def _add_rms_norm(
    x, residual, weight, normed, x_stride, residual_stride, eps, HIDDEN: tl.constexpr, WIDTH: tl.constexpr
):
    """One program per token adds and normalizes its whole row."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)  # [WIDTH]
    residual_row = residual + token * residual_stride + i
    row = tl.load(residual_row, mask=i < HIDDEN, other=0.0)
    row += tl.load(x + token * x_stride + i, mask=i < HIDDEN, other=0.0)  # rounded to the type, like the stored sum
    tl.store(residual_row, row, mask=i < HIDDEN)
    tl.store(normed + token * HIDDEN + i, _normed(row, weight, eps, HIDDEN, WIDTH), mask=i < HIDDEN)


def _warps(x: Tensor) -> int:
    """Return the number of warps that gives each thread one access of 16 bytes of a row, at most 16.

    In decoding there are fewer rows than multiprocessors, so the row's width is the only parallelism.
    """
    row_bytes: int = triton.next_power_of_2(x.shape[1]) * x.element_size()
    return min(16, max(1, row_bytes // (32 * 16)))


def swiglu(gate_up: Tensor) -> Tensor:
    """See `minipaged.fast.kernels`. Rows may be strided."""
    return _gated(gate_up, gelu=False)


def geglu(gate_up: Tensor) -> Tensor:
    """See `minipaged.fast.kernels`. Rows may be strided."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    tokens, intermediate = len(gate_up), gate_up.shape[1] // 2
    activated = gate_up.new_empty(tokens, intermediate)
    _gate[tokens, triton.cdiv(intermediate, TILE)](
        gate_up, activated, gate_up.stride(0),
        INTERMEDIATE=intermediate, TILE=TILE, GELU=gelu, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return activated


@triton.jit
def _gate(gate_up, activated, gate_up_stride, INTERMEDIATE: tl.constexpr, TILE: tl.constexpr, GELU: tl.constexpr):
    """One program per (token, tile) computes a tile of the token's row."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)  # [TILE]
    row = gate_up + token * gate_up_stride + i
    gate = tl.load(row, mask=i < INTERMEDIATE, other=0.0).to(tl.float32)
    up = tl.load(row + INTERMEDIATE, mask=i < INTERMEDIATE, other=0.0).to(tl.float32)
    steepness = gate
    if GELU:
        steepness = 2 * 0.7978845608 * (gate + 0.044715 * gate * gate * gate)  # 0.79...: sqrt(2 / pi)
    # exp may become inf, and gate / inf = 0 is right.
    tl.store(activated + token * INTERMEDIATE + i, gate / (1 + tl.exp(-steepness)) * up, mask=i < INTERMEDIATE)


def computing(*, throughout: bool = True, kind: Hashable = None) -> AbstractContextManager[None]:
    """Does nothing: kernels on a GPU need no threads of the host."""
    return nullcontext()


def in_one_call(
    layers: Sequence[Layer],
    views: Sequence[tuple[Tensor, Tensor]],
    windows: Sequence[int | None],
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    eps: float,
) -> RunLayers | None:
    """Returns None: a CUDA graph already launches all kernels of a step in one call."""
    return None


def linears(
    sizes: Sequence[tuple[int, int]],
    weights: Iterable[Tensor | StoredMatrix],
    biases: Sequence[Tensor | None],
    like: Tensor,
) -> list[Matrix]:
    """See `minipaged.fast.kernels`."""
    prepared: list[Matrix] = []
    for weight, bias in zip(weights, biases, strict=True):
        if not isinstance(weight, StoredMatrix):
            prepared.append(DenseMatrix(weight, bias))
        elif matrix := packed(weight, bias, like.dtype, like.device):
            prepared.append(matrix)
        else:
            dense = DenseMatrix(expanded(weight, like.device, like.dtype), bias)
            prepared.append(quantizing(dense, weight.activations))
    return prepared


class DenseMatrix(Matrix):
    """A matrix [out, in], ready for products. It keeps its layout, which is the one that cuBLAS needs."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.nbytes = weight.nbytes
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self._bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids]
