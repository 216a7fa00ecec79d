"""The layers of a Llama between its attention, on a CPU: matrix products, and fused compiled loops around them.

A matrix product of one token is bound by reading the weights, of many tokens by arithmetic, and no one routine is good
at both (SmolLM2-135M, all of its matrices once, AMD EPYC with 2 cores, bfloat16 / float32):

| | 1 token | 32 tokens |
|---|---|---|
| torch's `linear` on the matrix as it is | 19.6 / 41.6 ms | 40 / 86 ms |
| oneDNN on a matrix laid out for it beforehand | 10.9 / 22.6 ms | 27 / 49 ms |
| a compiled loop over the rows, all cores | 6.3 / 13.8 ms | |

So every matrix is kept twice, as rows and laid out for oneDNN: memory for speed.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg, attr-defined"

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from minipaged.fast.cpu.attention import FASTMATH, exponential
from minipaged.fast.cpu.bfloat16 import as_array, narrow, widen

FEW = 1
"""Up to so many tokens the compiled loop is the faster one."""


class Linear:
    """A matrix [out, in], ready to be multiplied by."""

    def __init__(self, weight: Tensor) -> None:
        """`weight`: [out, in], float32 or bfloat16."""
        self.weight = weight
        self._rows = as_array(weight)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, in] times the matrix's transpose: [tokens, out]."""
        if len(x) > FEW:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
            return product
        out = torch.empty(len(x), len(self.weight), dtype=x.dtype)
        _multiply(as_array(x), self._rows, numba.get_num_threads(), as_array(out))
        return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each token's x [tokens, hidden] divided by its root mean square, times the weight [hidden]."""
    out = torch.empty(x.shape, dtype=weight.dtype)
    _rms_norm(as_array(x), as_array(weight), np.float32(eps), as_array(out))
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to the residual [tokens, hidden] in place; return the norm of the sum."""
    out = torch.empty(x.shape, dtype=x.dtype)
    _add_rms_norm(as_array(x), as_array(residual), as_array(weight), np.float32(eps), as_array(out))
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) × up, of the two halves of gate_up [tokens, 2 × intermediate]: [tokens, intermediate]."""
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype)
    _swiglu(as_array(gate_up), as_array(out))
    return out


@njit(parallel=True, cache=True, fastmath=FASTMATH)
def _multiply(x, weight, num_threads, out):
    size = x.shape[1]
    wide = np.empty(x.shape, np.float32)
    for t in range(len(x)):
        for i in range(size):
            wide[t, i] = widen(x[t, i])
    for thread in prange(num_threads):
        for row in range(len(weight) * thread // num_threads, len(weight) * (thread + 1) // num_threads):
            for t in range(len(x)):
                total = np.float32(0)
                for i in range(size):
                    total += widen(weight[row, i]) * wide[t, i]
                out[t, row] = narrow(total, out[0, 0])


@njit(cache=True, fastmath=FASTMATH, error_model="numpy")
def _normalize(x, weight, eps, out):
    """One token's x [hidden]. Rounded where transformers rounds: before the weight and after it."""
    total = np.float32(0)
    for i in range(len(x)):
        total += widen(x[i]) * widen(x[i])
    factor = np.float32(1) / np.sqrt(total / np.float32(len(x)) + eps)
    for i in range(len(x)):
        out[i] = narrow(widen(narrow(widen(x[i]) * factor, out[0])) * widen(weight[i]), out[0])


@njit(parallel=True, cache=True)
def _rms_norm(x, weight, eps, out):
    for token in prange(len(x)):
        _normalize(x[token], weight, eps, out[token])


@njit(parallel=True, cache=True)
def _add_rms_norm(x, residual, weight, eps, out):
    for token in prange(len(x)):
        for i in range(x.shape[1]):
            residual[token, i] = narrow(widen(residual[token, i]) + widen(x[token, i]), residual[0, 0])
        _normalize(residual[token], weight, eps, out[token])


@njit(parallel=True, cache=True, fastmath=FASTMATH, error_model="numpy")
def _swiglu(gate_up, out):
    tokens, size = out.shape
    # Cut by tokens and by columns, so that one token keeps all cores busy too.
    for piece in prange(tokens * 4):
        token, quarter = piece // 4, piece % 4
        for i in range(size * quarter // 4, size * (quarter + 1) // 4):
            gate = min(max(widen(gate_up[token, i]), np.float32(-80)), np.float32(3e38))
            sigmoid = np.float32(1) / (np.float32(1) + exponential(-gate))
            out[token, i] = narrow(widen(gate_up[token, i]) * sigmoid * widen(gate_up[token, size + i]), out[0, 0])
