"""Matrices of a checkpoint as linear layers, where that takes more than one product.

A packed matrix (`models/quantized/stored.py`) stays packed if the set of kernels can compute with it (`packed.py` in
each set). If not, it is expanded while loading, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minipaged.fast.kernels import Linear, Matrix
from minipaged.models.quantized.stored import Activations, StoredMatrix

EXPANDED = 2**24
"""The number of a packed matrix's weights that are expanded to float32 at a time, on their way to the device."""


def expanded(matrix: StoredMatrix, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Expand a packed matrix to a tensor [out, in], a few rows at a time."""
    num_outputs, num_inputs = matrix.shape
    weight = torch.empty(num_outputs, num_inputs, device=device, dtype=dtype)
    num_rows = max(1, EXPANDED // num_inputs)
    for first in range(0, num_outputs, num_rows):
        rows = slice(first, first + num_rows)
        weight[rows] = torch.from_numpy(matrix.rows(rows)).to(device)
    return weight


def quantizing(matrix: Matrix, activations: Activations | None) -> Matrix:
    """Return the matrix, wrapped so that its inputs are quantized first if the checkpoint asks for it."""
    return matrix if activations is None else QuantizingLinear(matrix, activations)


def joined_linear(matrices: Sequence[Linear]) -> Linear:
    """Return one linear layer that concatenates the outputs of several matrices."""
    return matrices[0] if len(matrices) == 1 else JoinedLinear(matrices)


class QuantizingLinear(Matrix):
    """A matrix whose inputs are quantized: each is rounded to the float that its code decodes to
    (`Activations.applied`)."""

    def __init__(self, matrix: Matrix, activations: Activations) -> None:
        self.matrix, self.activations = matrix, activations
        self._divisor: Tensor | None = None  # on the device; None before the first call
        self.nbytes = matrix.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.matrix(self.applied(x))

    def rows(self, ids: Tensor) -> Tensor:
        return self.matrix.rows(ids)

    def applied(self, x: Tensor) -> Tensor:
        """Return x [tokens, in], quantized. Computed in float32, like the scales."""
        how = self.activations
        size = how.group_size or x.shape[1]
        whole = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % size))  # each group's range includes 0 in any case
        groups = whole.view(len(x), whole.shape[1] // size, size)  # [tokens, groups, size]
        divisor = self._divisor_like(groups)
        scale, zero = self._found(groups, divisor) if how.scale is None else (divisor, how.zero)
        if how.kind == "float8":
            codes = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        else:
            codes = (groups / scale + zero).clamp(-128, 127).round() - zero
        return (codes * scale).view(whole.shape)[:, : x.shape[1]].to(x.dtype)

    def _divisor_like(self, groups: Tensor) -> Tensor:
        """The static scale, or the number of steps in a group's range, as a tensor on the device.

        With a divisor that is a Python number, torch on a GPU multiplies by its reciprocal. That rounds once more, and
        the smallest input of a group got the code -127 instead of -128.
        """
        how = self.activations
        if self._divisor is None or self._divisor.device != groups.device:
            of_range = 448 if how.kind == "float8" else 127.5 if how.symmetric else 255
            value = of_range if how.scale is None else how.scale
            self._divisor = torch.full((), value, dtype=groups.dtype, device=groups.device)
        return self._divisor

    def _found(self, groups: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor | int]:
        """Return scale and zero [tokens, groups, 1] from each group's own range, which includes 0."""
        low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
        smallest_scale = torch.finfo(torch.float32).eps
        if self.activations.kind == "float8" or self.activations.symmetric:
            return (torch.maximum(-low, high) / divisor).clamp(min=smallest_scale), 0
        scale = ((high - low) / divisor).clamp(min=smallest_scale)
        return scale, (-128 - low / scale).clamp(-128, 127).round()


class JoinedLinear(Linear):
    """Matrices of the same inputs that cannot be stacked into one, because they are packed or quantize their inputs
    differently."""

    def __init__(self, matrices: Sequence[Linear]) -> None:
        self.matrices = matrices
        self.nbytes = sum(matrix.nbytes for matrix in matrices)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([matrix(x) for matrix in self.matrices], 1)
