"""Round to nearest: every weight takes the code that comes closest, and nothing is asked but the weights.

A group of weights has a *grid* of 2**bits values, evenly spaced:

    w = (q - z) * s        q: 0 .. 2**bits - 1      s: the step between two values      z: the code that means 0

The grid reaches from the group's smallest weight to its largest, and 0 is on it. A symmetric one reaches as far to
both sides, and its zero is the middle. The other methods use the same grids: GPTQ chooses other codes, AWQ moves the
weights before.

Steps are rounded to float16 as soon as they are found, since they are stored so: codes are chosen for the values that
a reader will compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minipaged.errors import ModelError
from minipaged.models.quantized.recipe import Recipe
from minipaged.models.quantized.stored import Array, Grouped, pack

SMALLEST = 2.0**-24
"""A step is at least the smallest float16 over 0: that of a group of zeros."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that weights can take, for as many groups as `scales` has entries."""

    scales: Array
    """Steps, each of them a float16, in the weights' dtype."""
    zeros: Array
    """The codes that mean 0: whole numbers, in the same shape and dtype."""
    top: int
    """The largest code."""

    @classmethod
    def over(cls, groups: Array, recipe: Recipe, shrink: float = 1) -> Grid:
        """The grids of groups [..., inputs of a group], each for its own weights: scales and zeros [..., 1].

        `shrink`: the share of the range that the grid covers; weights beyond take its ends.
        """
        low = shrink * groups.min(axis=-1, keepdims=True, initial=0)  # [..., 1]
        high = shrink * groups.max(axis=-1, keepdims=True, initial=0)  # [..., 1]
        if recipe.symmetric:
            high = np.maximum(high, -low)  # [..., 1]
            low = -high  # [..., 1]
        with np.errstate(over="ignore"):
            scales = np.maximum((high - low) / recipe.top, SMALLEST).astype(np.float16)  # [..., 1]
        if not np.isfinite(scales).all():
            raise ModelError("weights that are infinite, no numbers, or too large for scales in float16")
        scales = scales.astype(groups.dtype)  # [..., 1]
        zeros = np.clip(np.rint(-low / scales), 0, recipe.top)  # [..., 1]
        if recipe.symmetric:
            zeros = np.full_like(scales, 2 ** (recipe.bits - 1))  # [..., 1]
        return cls(scales, zeros, recipe.top)

    def __getitem__(self, group: Array | int) -> Grid:
        """Of some of the groups: an index into the first dimension."""
        return Grid(self.scales[group], self.zeros[group], self.top)

    def encode(self, weights: Array) -> Array:
        """The nearest codes, as floats. The shapes of grid and weights have to go together."""
        codes: Array = np.clip(np.rint(weights / self.scales) + self.zeros, 0, self.top)
        return codes

    def decode(self, codes: Array) -> Array:
        """What they stand for."""
        return (codes - self.zeros) * self.scales


def rtn(weight: Array, recipe: Recipe) -> Grouped:
    """weight [out, in], each one rounded to the grid of its group."""
    num_outputs, num_inputs = weight.shape
    groups = weight.reshape(num_outputs, -1, recipe.size(num_inputs))  # [out, groups, inputs of a group]
    grid = Grid.over(groups, recipe)  # [out, groups, 1]
    return packed(grid.encode(groups).reshape(weight.shape), grid, recipe)


def packed(codes: Array, grid: Grid, recipe: Recipe, group_index: Array | None = None) -> Grouped:
    """codes [out, in], with a grid of as many entries as there are outputs and groups, as a stored matrix.

    `group_index` [in]: the group of each input, where groups are no neighbours.
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
