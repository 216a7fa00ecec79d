"""Matrices of a checkpoint as the layers multiply by them, where that is not simply one product.

A packed matrix (`models/quantized/stored.py`) stays packed where a set of kernels can compute with it (`packed.py` in
each). Where it cannot, the matrix is expanded while loading, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minipaged.fast.kernels import Linear, Matrix
from minipaged.models.quantized.stored import Activations, StoredMatrix

EXPANDED = 2**24
"""Weights of a packed matrix that are float32 at one time, on their way to the device."""


def expanded(matrix: StoredMatrix, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A packed matrix as a tensor [out, in], made of a few rows at a time."""
    num_outputs, num_inputs = matrix.shape
    weight = torch.empty(num_outputs, num_inputs, device=device, dtype=dtype)
    num_rows = max(1, EXPANDED // num_inputs)
    for first in range(0, num_outputs, num_rows):
        rows = slice(first, first + num_rows)
        weight[rows] = torch.from_numpy(matrix.rows(rows)).to(device)
    return weight


def quantizing(matrix: Matrix, activations: Activations | None) -> Matrix:
    """The matrix, its inputs rounded first where they have to be."""
    return matrix if activations is None else QuantizingLinear(matrix, activations)


def joined_linear(matrices: Sequence[Linear]) -> Linear:
    """Several matrices as if they lay one under another."""
    return matrices[0] if len(matrices) == 1 else JoinedLinear(matrices)


class QuantizingLinear(Matrix):
    """A matrix whose inputs are quantized, each to the float that its code stands for (`Activations.applied`)."""

    def __init__(self, matrix: Matrix, activations: Activations) -> None:
        self.matrix, self.activations = matrix, activations
        self.nbytes = matrix.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.matrix(self.applied(x))

    def rows(self, ids: Tensor) -> Tensor:
        return self.matrix.rows(ids)

    def applied(self, x: Tensor) -> Tensor:
        """x [tokens, in], rounded. Computed in float32, as the scales are."""
        how = self.activations
        size = how.group_size or x.shape[1]
        whole = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % size))  # 0 is in each group's range anyway
        groups = whole.view(len(x), whole.shape[1] // size, size)  # [tokens, groups, size]
        scale, zero = self._found(groups) if how.scale is None else (_number(how.scale, groups), how.zero)
        if how.kind == "float8":
            codes = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        else:
            codes = (groups / scale + zero).clamp(-128, 127).round() - zero
        return (codes * scale).view(whole.shape)[:, : x.shape[1]].to(x.dtype)

    def _found(self, groups: Tensor) -> tuple[Tensor, Tensor | int]:
        """Scale and zero [tokens, groups, 1] of each group's own range, which includes 0."""
        low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
        smallest_scale = torch.finfo(torch.float32).eps
        if self.activations.kind == "float8" or self.activations.symmetric:
            largest = torch.maximum(-low, high)
            steps = _number(448 if self.activations.kind == "float8" else 127.5, groups)
            return (largest / steps).clamp(min=smallest_scale), 0
        scale = ((high - low) / _number(255, groups)).clamp(min=smallest_scale)
        return scale, (-128 - low / scale).clamp(-128, 127).round()


def _number(value: float, like: Tensor) -> Tensor:
    """A divisor, on the device: on a GPU torch multiplies by the reciprocal of a number of the host. That rounds once
    more, and the smallest input of a group got the code -127 in place of -128."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


class JoinedLinear(Linear):
    """Matrices of the same inputs that cannot be one: they are packed differently, or round their inputs so."""

    def __init__(self, matrices: Sequence[Linear]) -> None:
        self.matrices = matrices
        self.nbytes = sum(matrix.nbytes for matrix in matrices)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([matrix(x) for matrix in self.matrices], 1)
