"""GPTQ: the error made by rounding one input's weights is compensated by the weights of the inputs after it.

Frantar, Ashkboos, Hoefler and Alistarh, "GPTQ" (ICLR 2023, arXiv 2210.17323). A matrix matters by its products. With
inputs X [tokens, in] from a calibration text, the error to minimize is that of the outputs,

    || X W.T - X Q.T ||²  =  sum over outputs of  d H d.T        d = w - q,  H = X.T X [in, in]   (section 3, Eq. 1)

Each output's row of weights is a problem of its own, and all of them have the same H. Inputs, which are "columns" of W,
are rounded one after another, each for all outputs together. Rounding column i makes the error w_i - q_i. The best
correction of the columns not yet rounded is known (section 3, Eq. 2). In terms of U, the upper triangular matrix with
H⁻¹ = U.T U (section 4, step 3), it is one line:

    e = (w_i - q_i) / U_ii            w_j -= e · U_ij   for all j > i                             (Algorithm 1)

Columns far away need not be corrected after each error. Within a block, columns are corrected one by one; all later
columns are corrected for the whole block's errors in one product (section 4, step 2).

Not in the paper, but in its authors' code: `act_order` begins with the inputs that weigh most, by the diagonal of H,
while many columns are left to compensate for them. Groups are then either of columns that follow one another in that
order, and each input's group has to be stored; or "static": of neighbouring inputs as before, with grids from the
original weights, and the file looks as if there were no order.
"""

from __future__ import annotations

import math

import numpy as np

from minipaged.models.quantized.recipe import Recipe
from minipaged.models.quantized.stored import Array, Grouped
from minipaged.reference.quantize.rtn import Grid, packed

BLOCK = 128
"""Columns in a block; columns after it are corrected for all of its errors in one product."""
DAMP = 0.01
"""The fraction of the mean of H's diagonal added to it, so that H can be inverted for any text (section 4, step 3)."""


def gptq(weight: Array, hessian: Array, recipe: Recipe) -> Grouped:
    """Quantize weight [out, in] for inputs with this `hessian` [in, in]: X.T X, or any multiple of it.

    Computes in the dtype of `weight`.
    """
    num_outputs, num_inputs = weight.shape
    size, order = recipe.size(num_inputs), np.arange(num_inputs)  # [in], the order of rounding columns
    if recipe.act_order != "none":
        order = np.argsort(-np.diag(hessian), kind="stable")  # [in]
    # The group of each column, in that order, and the grids of the groups.
    group = (order if recipe.act_order == "static" else np.arange(num_inputs)) // size  # [in]
    grid = Grid.over(weight.reshape(num_outputs, -1, size).swapaxes(0, 1), recipe)  # [groups, out, 1]
    scales, zeros = grid.scales[..., 0], grid.zeros[..., 0]  # [groups, out] each
    grid = Grid(scales, zeros, recipe.top)  # [groups, out]
    U = upper_root_of_inverse(hessian[order][:, order]).astype(weight.dtype)  # [in, in]
    rest = weight.T[order]  # [in, out], a copy in which a column of W is a contiguous row
    codes = np.empty_like(rest)  # [in, out]
    block = BLOCK
    if recipe.act_order != "static":  # a group begins at the start of a block
        block = size if size <= BLOCK else math.gcd(size, BLOCK)
    for first in range(0, num_inputs, block):
        own = slice(first, first + block)
        if recipe.act_order != "static" and first % size == 0:  # a grid for the weights as corrected so far
            found = Grid.over(rest[first : first + size].T, recipe)  # [out, 1]
            scales[first // size], zeros[first // size] = found.scales[:, 0], found.zeros[:, 0]  # [out] each
        codes[own], errors = round_block(rest[own], U[own, own], grid[group[own]])  # [block, out] each
        rest[first + block :] -= U[own, first + block :].T @ errors  # [columns after, out]
    in_place, index = np.empty_like(codes), np.empty(num_inputs, np.int32)  # [in, out], [in]
    in_place[order], index[order] = codes, group
    by_output = Grid(scales.T, zeros.T, recipe.top)  # [out, groups]
    return packed(in_place.T, by_output, recipe, index if recipe.act_order == "group" else None)


def round_block(columns: Array, U: Array, grid: Grid) -> tuple[Array, Array]:
    """Round columns [block, out], each with a grid of its own; return codes and errors [block, out]. Changes `columns`.

    U [block, block]: how the later columns compensate for each column's error.
    """
    codes, errors = np.empty_like(columns), np.empty_like(columns)  # [block, out] each
    for i in range(len(columns)):
        codes[i] = grid[i].encode(columns[i])  # [out]
        errors[i] = (columns[i] - grid[i].decode(codes[i])) / U[i, i]  # [out]
        columns[i + 1 :] -= U[i, i + 1 :, None] * errors[i]  # [columns after, out]
    return codes, errors


def upper_root_of_inverse(hessian: Array) -> Array:
    """Return the upper triangular U [in, in] with U.T U = (H + damping)⁻¹, float64.

    H is never inverted: the Cholesky root of H read from its end is an upper R with H = R R.T, and U = R⁻¹. An input
    that the text never used has a row of zeros in H. Its diagonal entry is set to the mean of the others, so its
    weights are rounded to nearest. (The authors set it to 1, which may be much larger than the mean and then raises the
    damping of all others.)
    """
    H = hessian.astype(np.float64)  # [in, in], a copy
    diagonal = np.einsum("ii->i", H)  # [in], a view
    used = diagonal > 0  # [in]
    mean = diagonal[used].mean() if used.any() else 1.0
    diagonal[~used] = mean
    diagonal += DAMP * mean
    R = np.linalg.cholesky(H[::-1, ::-1])[::-1, ::-1]  # [in, in]
    return np.linalg.inv(R)  # [in, in]
