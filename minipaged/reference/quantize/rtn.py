"""Round to nearest: every weight gets the nearest code. Only the weights are needed, no calibration text.

A group of weights has a *grid* of 2**bits values, evenly spaced:

    w = (q - z) * s        q: 0 .. 2**bits - 1      s: the step between two values      z: the code that means 0

The grid reaches from the group's smallest weight to its largest, and 0 is on it. A symmetric grid reaches equally far
to both sides, with 0 in the middle. The other methods use the same grids: GPTQ chooses other codes, and AWQ scales the
weights first.

Steps are stored in float16, so they are rounded to float16 as soon as they are computed. Codes are then chosen for
exactly the values that a reader will compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minipaged.errors import ModelError
from minipaged.models.quantized.recipe import Recipe
from minipaged.models.quantized.stored import Array, Grouped, pack

SMALLEST = 2.0**-24
"""The lower bound of a step: the smallest float16 above 0. It is the step of a group of zeros."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that weights can take, for each of the groups in `scales`."""

    scales: Array
    """Steps: float16 values, in the dtype of the weights."""
    zeros: Array
    """The codes that mean 0: whole numbers, in the same shape and dtype."""
    top: int
    """The largest code."""

    @classmethod
    def over(cls, groups: Array, recipe: Recipe, shrink: float = 1) -> Grid:
        """Return the grids of groups [..., inputs per group], each fitted to its own weights: scales and zeros [...,
        1].

        `shrink`: the fraction of the range that the grid covers; weights beyond it are clipped to its ends. Raises
        ModelError for weights that are not finite, or too large for float16 scales.
        """
        low = shrink * groups.min(axis=-1, keepdims=True, initial=0)  # [..., 1]
        high = shrink * groups.max(axis=-1, keepdims=True, initial=0)  # [..., 1]
        if recipe.symmetric:
            high = np.maximum(high, -low)  # [..., 1]
            low = -high  # [..., 1]
        with np.errstate(over="ignore"):
            scales = np.maximum((high - low) / recipe.top, SMALLEST).astype(np.float16)  # [..., 1]
        if not np.isfinite(scales).all():
            raise ModelError("weights are infinite, NaN, or too large for float16 scales")
        scales = scales.astype(groups.dtype)  # [..., 1]
        zeros = np.clip(np.rint(-low / scales), 0, recipe.top)  # [..., 1]
        if recipe.symmetric:
            zeros = np.full_like(scales, 2 ** (recipe.bits - 1))  # [..., 1]
        return cls(scales, zeros, recipe.top)

    def __getitem__(self, group: Array | int) -> Grid:
        """Return the grids of some groups, by an index into the first dimension."""
        return Grid(self.scales[group], self.zeros[group], self.top)

    def encode(self, weights: Array) -> Array:
        """Return the nearest codes, as floats. The shapes of grid and weights must broadcast."""
        codes: Array = np.clip(np.rint(weights / self.scales) + self.zeros, 0, self.top)
        return codes

    def decode(self, codes: Array) -> Array:
        """Return the weights that the codes represent."""
        return (codes - self.zeros) * self.scales


def rtn(weight: Array, recipe: Recipe) -> Grouped:
    """Quantize weight [out, in]: round each weight to the grid of its group."""
    num_outputs, num_inputs = weight.shape
    groups = weight.reshape(num_outputs, -1, recipe.size(num_inputs))  # [out, groups, inputs of a group]
    grid = Grid.over(groups, recipe)  # [out, groups, 1]
    return packed(grid.encode(groups).reshape(weight.shape), grid, recipe)


def packed(codes: Array, grid: Grid, recipe: Recipe, group_index: Array | None = None) -> Grouped:
    """Pack codes [out, in] and their grid, which has an entry per output and group, into a stored matrix.

    `group_index` [in]: the group of each input, if groups are not made of neighbouring inputs.
    """
    num_outputs, num_inputs = codes.shape
    scales = grid.scales.reshape(num_outputs, -1)  # [out, groups]
    zeros = grid.zeros.reshape(scales.shape)  # [out, groups]
    return Grouped(
        shape=codes.shape,
        rounding="float16",
        bits=recipe.bits,
        codes=pack(np.ascontiguousarray(codes, np.uint8), recipe.bits),
        scales=np.ascontiguousarray(scales, np.float16),
        zeros=2 ** (recipe.bits - 1) if recipe.symmetric else np.ascontiguousarray(zeros, np.uint8),
        group_size=recipe.size(num_inputs),
        group_index=group_index,
    )
