"""GPTQ: what rounding one input's weights spoils, the weights of the inputs after it make up for.

Frantar, Ashkboos, Hoefler and Alistarh, "GPTQ" (ICLR 2023, arXiv 2210.17323). A matrix is there for its products. With
inputs X [tokens, in] from a calibration text, the error to keep small is that of the outputs,

    || X W.T - X Q.T ||²  =  sum over outputs of  d H d.T        d = w - q,  H = X.T X [in, in]   (section 3, Eq. 1)

Each output's row of weights is a problem of its own, and all of them have the same H. Inputs are rounded one after
another, for all outputs at once: "columns" of W. Rounding column i errs by w_i - q_i; the best that the columns not
yet rounded can do about it is known (section 3, Eq. 2), and in terms of U, the upper triangular matrix with
H⁻¹ = U.T U (section 4, step 3), it is one line:

    e = (w_i - q_i) / U_ii            w_j -= e · U_ij   for all j > i                             (Algorithm 1)

Columns far away need not hear of each error at once: within a block they are told one by one, and all others of the
block's errors in one product (section 4, step 2).

Not in the paper, but in its authors' code: `act_order` begins with the inputs that weigh most, on the diagonal of H,
while many columns are left that can make up for them. Groups may then be of columns that follow one another in that
order, so that each input's group has to be stored; or "static": of neighbours as ever, with grids from the weights as
they were, and the file looks as if there were no order.
"""

from __future__ import annotations

import math

import numpy as np

from minipaged.models.quantized.recipe import Recipe
from minipaged.models.quantized.stored import Array, Grouped
from minipaged.reference.quantize.rtn import Grid, packed

BLOCK = 128
"""Columns that are told of each other's errors at once."""
DAMP = 0.01
"""Of the mean of H's diagonal: added to it, so that H can be inverted whatever the text (section 4, step 3)."""


def gptq(weight: Array, hessian: Array, recipe: Recipe) -> Grouped:
    """weight [out, in], quantized for inputs with this `hessian` [in, in]: X.T X, or any multiple of it.

    Computes in the dtype of `weight`.
    """
    num_outputs, num_inputs = weight.shape
    size, order = recipe.size(num_inputs), np.arange(num_inputs)  # [in], in which columns are rounded
    if recipe.act_order != "none":
        order = np.argsort(-np.diag(hessian), kind="stable")  # [in]
    # The group of each column, in that order, and the grids of the groups.
    group = (order if recipe.act_order == "static" else np.arange(num_inputs)) // size  # [in]
    grid = Grid.over(weight.reshape(num_outputs, -1, size).swapaxes(0, 1), recipe)  # [groups, out, 1]
    scales, zeros = grid.scales[..., 0], grid.zeros[..., 0]  # [groups, out] each
    grid = Grid(scales, zeros, recipe.top)  # [groups, out]
    U = upper_root_of_inverse(hessian[order][:, order]).astype(weight.dtype)  # [in, in]
    rest = weight.T[order]  # [in, out], a copy: a column of W is a row here, in one piece of memory
    codes = np.empty_like(rest)  # [in, out]
    block = BLOCK
    if recipe.act_order != "static":  # a group begins where a block does
        block = size if size <= BLOCK else math.gcd(size, BLOCK)
    for first in range(0, num_inputs, block):
        own = slice(first, first + block)
        if recipe.act_order != "static" and first % size == 0:  # by the weights as they are by now
            found = Grid.over(rest[first : first + size].T, recipe)  # [out, 1]
            scales[first // size], zeros[first // size] = found.scales[:, 0], found.zeros[:, 0]  # [out] each
        codes[own], errors = round_block(rest[own], U[own, own], grid[group[own]])  # [block, out] each
        rest[first + block :] -= U[own, first + block :].T @ errors  # [columns after, out]
    in_place, index = np.empty_like(codes), np.empty(num_inputs, np.int32)  # [in, out], [in]
    in_place[order], index[order] = codes, group
    by_output = Grid(scales.T, zeros.T, recipe.top)  # [out, groups]
    return packed(in_place.T, by_output, recipe, index if recipe.act_order == "group" else None)


def round_block(columns: Array, U: Array, grid: Grid) -> tuple[Array, Array]:
    """Codes and errors [block, out] of some columns [block, out], each with a grid of its own. Changes `columns`.

    U [block, block]: how each one's error is made up for by those after it.
    """
    codes, errors = np.empty_like(columns), np.empty_like(columns)  # [block, out] each
    for i in range(len(columns)):
        codes[i] = grid[i].encode(columns[i])  # [out]
        errors[i] = (columns[i] - grid[i].decode(codes[i])) / U[i, i]  # [out]
        columns[i + 1 :] -= U[i, i + 1 :, None] * errors[i]  # [columns after, out]
    return codes, errors


def upper_root_of_inverse(hessian: Array) -> Array:
    """The upper triangular U [in, in] with U.T U = (H + damping)⁻¹, float64.

    H is never inverted: the Cholesky root of H read from its end is an upper R with H = R R.T, and U = R⁻¹. An input
    that the text never used has a row of zeros in H. It is given what the others have on average, and so is rounded to
    nearest. (The authors give it a 1, which may be much more than that, and then dampens the others.)
    """
    H = hessian.astype(np.float64)  # [in, in], a copy
    diagonal = np.einsum("ii->i", H)  # [in], a view
    used = diagonal > 0  # [in]
    mean = diagonal[used].mean() if used.any() else 1.0
    diagonal[~used] = mean
    diagonal += DAMP * mean
    R = np.linalg.cholesky(H[::-1, ::-1])[::-1, ::-1]  # [in, in]
    return np.linalg.inv(R)  # [in, in]
