"""The parts of a Llama around its attention, on a CPU: matrix products, and fused compiled loops between them.

Matrices are in tiles where the processor has instructions for them (`product.py`) and a library is not clearly faster
there (`measured.py`). The instructions are AVX512_BF16 for bfloat16, and AVX2 with FMA or ARM's for float32. The rest
of this text is about other processors. A matrix product is bound by reading the
weights for one token, and by arithmetic for many, and no routine of a library is good at both (all matrices of
SmolLM2-135M once, AMD EPYC with 2 cores, bfloat16 / float32):

| | 1 token | 32 tokens |
|---|---|---|
| torch's `linear` on the stored matrix | 19.6 / 41.6 ms | 40 / 86 ms |
| oneDNN on a matrix in its own layout | 10.9 / 22.6 ms | 27 / 49 ms |
| a compiled loop over the rows, all cores | 6.3 / 13.8 ms | |

So these matrices are kept twice, as rows and in oneDNN's layout, which trades memory for speed.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg, attr-defined"

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from minipaged.fast.cpu.attention import FASTMATH, exponential
from minipaged.fast.cpu.bfloat16 import array_at, as_array, narrow, widen
from minipaged.fast.cpu.kernel_cache import inner, kernel, loop
from minipaged.fast.cpu.measured import speeds
from minipaged.fast.cpu.packed import PackedMatrix, Room
from minipaged.fast.cpu.product import ROWS, TiledMatrix, can_multiply_tiles, check_inputs, num_bytes
from minipaged.fast.kernels import Matrix
from minipaged.fast.linear import quantizing
from minipaged.models.quantized.stored import StoredMatrix

FEW = 1
"""The most tokens for which the compiled loop is faster than oneDNN."""
FEW_ROWS = 4
"""The most tokens for which one thread finishes before a second one would have woken up."""

# oneDNN generates a program for each matrix shape and number of tokens, in 0.8 ms. Two caches (PyTorch's, and oneDNN's
# behind it) keep 1024 programs of 0.35 MiB each: 700 MiB after a few thousand requests. It is enough if the first cache
# has room for the frequent numbers of tokens: 100 MiB. Both limits are read when the first product is computed.
os.environ.setdefault("LRU_CACHE_CAPACITY", "256")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")


def linears(
    sizes: Sequence[tuple[int, int]],
    weights: Iterable[Tensor | StoredMatrix],
    biases: Sequence[Tensor | None],
    like: Tensor,
) -> list[Matrix]:
    """See `minipaged.fast.kernels`.

    Weights that are tensors are copied into one piece of memory. The system gives large pages to large pieces only, and
    with pages of 4 kB a good part of the time goes into address translation (one token through all of SmolLM2's
    matrices in bfloat16: 8.0 ms, instead of 9.6 ms with a piece of memory for each matrix). Packed weights stay packed.
    """
    prepared: list[Matrix] = []
    # The most that the matrices can take. The system provides memory only for pages that are written.
    most = sum((rows + ROWS) * (columns + 1) * like.itemsize for rows, columns in sizes)
    room, packed_room = np.empty(most, np.uint8), Room()
    for weight, bias in zip(weights, biases, strict=True):
        if isinstance(weight, StoredMatrix):
            prepared.append(quantizing(PackedMatrix(weight, bias, like.dtype, packed_room), weight.activations))
            continue
        tiled = uses_tiles(like.dtype)
        part, room = np.split(room, [num_bytes(weight) if tiled else weight.nbytes])
        if tiled:
            prepared.append(TiledMatrix(weight, bias, part))
            continue
        kept = torch.from_numpy(part).view(weight.dtype).view(weight.shape)
        prepared.append(DenseMatrix(kept.copy_(weight), bias))
    return prepared


def uses_tiles(dtype: torch.dtype) -> bool:
    """Whether matrices are put in tiles: the processor can multiply them, and the library is not clearly faster. The
    first call may measure that, in 0.1 s, or in 2 s where the product is not compiled yet."""
    return can_multiply_tiles(dtype) and not speeds(dtype, DenseMatrix).library_is_better


class DenseMatrix(Matrix):
    """A matrix [out, in] of the model's type, prepared for products, and its bias [out] if it has one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight`: [out, in], float32 or bfloat16."""
        self.weight = weight
        self.nbytes = weight.nbytes
        self.shape, self.address = weight.shape, weight.data_ptr()
        self.bias = bias
        self._like = as_array(weight[:1, :1])[0, 0]
        mkldnn = torch.ops.mkldnn  # oneDNN: some builds for ARM lack it, some processors lack it for bfloat16
        can_pack = torch.backends.mkldnn.is_available()
        can_pack = can_pack and (weight.dtype == torch.float32 or mkldnn._is_mkldnn_bf16_supported())
        self._packed = mkldnn._reorder_linear_weight(weight, None) if can_pack else None

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids]

    def __call__(self, x: Tensor) -> Tensor:
        check_inputs(x, self.shape[1], self.weight.dtype)
        if len(x) > FEW:
            if self._packed is None:
                return torch.nn.functional.linear(x, self.weight, self.bias)
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return product
        x, out = x.contiguous(), torch.empty(len(x), len(self.weight), dtype=x.dtype)
        threads = numba.get_num_threads()
        multiply(x.data_ptr(), len(x), self.address, *self.shape, self._like, threads, out.data_ptr())
        return out if self.bias is None else out.add_(self.bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `minipaged.fast.kernels`."""
    out = torch.empty(x.shape, dtype=weight.dtype)
    _rms_norm(as_array(x), as_array(weight), np.float32(eps), as_array(out))
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `minipaged.fast.kernels`."""
    out = torch.empty(x.shape, dtype=x.dtype)
    _add_rms_norm(as_array(x), as_array(residual), as_array(weight), np.float32(eps), as_array(out))
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """See `minipaged.fast.kernels`."""
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype)
    _swiglu(as_array(gate_up), as_array(out))
    return out


def geglu(gate_up: Tensor) -> Tensor:
    """See `minipaged.fast.kernels`."""
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype)
    _geglu(as_array(gate_up), as_array(out))
    return out


@kernel(parallel=True, fastmath=FASTMATH)
def multiply(x_address, tokens, weight_address, rows, size, like, num_threads, out_address):
    """Multiply x [tokens, size] by weight [rows, size] to out [tokens, rows], all of the type of `like`. Each is passed
    as an address, because making an array of it takes microseconds."""
    x, out = array_at(x_address, tokens * size, like), array_at(out_address, tokens * rows, like)
    weight = array_at(weight_address, rows * size, like).reshape(rows, size)
    wide = np.empty((tokens, size), np.float32)
    for t in range(tokens):
        for i in range(size):
            wide[t, i] = widen(x[t * size + i])
    for thread in prange(num_threads):
        for row in range(rows * thread // num_threads, rows * (thread + 1) // num_threads):
            for t in range(tokens):
                total = np.float32(0)
                for i in range(size):
                    total += widen(weight[row, i]) * wide[t, i]
                out[t * rows + row] = narrow(total, like)


@loop(fastmath=FASTMATH, error_model="numpy")  # so that it adds in the same order wherever it is called
def normalize(x, weight, eps, out):
    """Normalize one row x [hidden]. Rounds where transformers does: before the weight is applied, and after."""
    total = np.float32(0)
    for i in range(len(x)):
        total += widen(x[i]) * widen(x[i])
    factor = np.float32(1) / np.sqrt(total / np.float32(len(x)) + eps)
    for i in range(len(x)):
        out[i] = narrow(widen(narrow(widen(x[i]) * factor, out[0])) * widen(weight[i]), out[0])


@kernel(parallel=True)
def _rms_norm(x, weight, eps, out):
    if len(x) <= FEW_ROWS:
        for token in range(len(x)):
            normalize(x[token], weight, eps, out[token])
    else:
        for token in prange(len(x)):
            normalize(x[token], weight, eps, out[token])


@kernel(parallel=True)
def _add_rms_norm(x, residual, weight, eps, out):
    if len(x) <= FEW_ROWS:
        for token in range(len(x)):
            add(x[token], residual[token])
            normalize(residual[token], weight, eps, out[token])
    else:
        for token in prange(len(x)):
            add(x[token], residual[token])
            normalize(residual[token], weight, eps, out[token])


@inner()
def add(x, residual):
    for i in range(len(x)):
        residual[i] = narrow(widen(residual[i]) + widen(x[i]), residual[0])


@kernel(parallel=True)
def _swiglu(gate_up, out):
    size = out.shape[1]
    if len(out) <= FEW_ROWS:
        for token in range(len(out)):
            activate(gate_up[token, :size], gate_up[token, size:], out[token])
    else:
        for token in prange(len(out)):
            activate(gate_up[token, :size], gate_up[token, size:], out[token])


@loop(fastmath=FASTMATH, error_model="numpy")  # like `normalize`
def activate(gate, up, out):
    for i in range(len(out)):
        z = widen(gate[i])
        out[i] = narrow(z / (np.float32(1) + exponential(-z)) * widen(up[i]), out[0])


@kernel(parallel=True)
def _geglu(gate_up, out):
    size = out.shape[1]
    if len(out) <= FEW_ROWS:
        for token in range(len(out)):
            activate_by_gelu(gate_up[token, :size], gate_up[token, size:], out[token])
    else:
        for token in prange(len(out)):
            activate_by_gelu(gate_up[token, :size], gate_up[token, size:], out[token])


@loop(fastmath=FASTMATH, error_model="numpy")
def activate_by_gelu(gate, up, out):
    for i in range(len(gate)):
        z = widen(gate[i])
        u = np.float32(0.7978845608) * (z + np.float32(0.044715) * z * z * z)
        out[i] = narrow(z / (np.float32(1) + exponential(np.float32(-2) * u)) * widen(up[i]), out[0])
