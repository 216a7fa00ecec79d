"""AWQ: weights that multiply large inputs get finer steps.

Lin et al., "AWQ" (MLSys 2024, arXiv 2306.00978). A few inputs of a matrix are much larger than the others, so rounding
errors in their weights matter most (section 3.1). Multiply the weights of input j by s_j > 1 and divide the input by
s_j: the product is the same. Unless the largest weight of a group has grown, rounding makes errors of the same size as
before, and their effect is divided by s_j (section 3.2, Eq. 2). The division costs nothing where it can be folded into
what comes before: a norm's weight, or the rows of the preceding matrix.

The best s is searched for (section 3.2, Eq. 4 and 5): s_j = mean|x_j| ** alpha for 20 values of alpha. Each is judged
by the error of the outputs that GPTQ also minimizes,

    || X W.T - X Q.T ||²  =  sum over outputs of  d H d.T          d = w - q,  H = X.T X

so that the inputs themselves are needed only once. (The authors run the whole attention or MLP instead.)

Then each group's grid is shrunk, in 10 steps down to about half (the authors' `auto_clip.py`): weights at the ends are
clipped, and all others have finer steps. Each group is judged by itself, as if its inputs were independent of the other
groups' inputs.

Values of alpha, or of the shrinking, with which a step does not fit float16 are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from minipaged.errors import ModelError
from minipaged.models.quantized.recipe import Recipe
from minipaged.models.quantized.stored import Array, Grouped
from minipaged.reference.quantize.rtn import Grid, packed

ALPHAS = tuple(i / 20 for i in range(20))  # 0 treats all inputs alike
SHRINKS = tuple(1 - i / 20 for i in range(10))
LEAST = 1e-4
"""The lower bound of a scale, before all scales are brought near 1."""


def awq_scales(weights: Sequence[Array], hessian: Array, mean_abs: Array, recipe: Recipe) -> Array:
    """Return the scales [in] of the inputs that several matrices [out, in] have in common.

    `hessian` [in, in]: X.T X, or any multiple of it. `mean_abs` [in]: the mean of |X| over the tokens. Raises
    ModelError if no alpha gives steps that fit float16.
    """
    weight = np.concatenate(list(weights))  # [out of all, in]
    best, least = np.ones_like(mean_abs), math.inf  # [in]
    for alpha in ALPHAS:
        scales = np.maximum(mean_abs**alpha, LEAST)  # [in]
        scales /= np.sqrt(scales.max() * scales.min())  # [in], around 1
        groups = (weight * scales).reshape(len(weight), -1, recipe.size(weight.shape[1]))  # [out, groups, size]
        try:
            grid = Grid.over(groups, recipe)  # [out, groups, 1]
        except ModelError:
            if least == math.inf and alpha == ALPHAS[-1]:
                raise
            continue
        d = weight - grid.decode(grid.encode(groups)).reshape(weight.shape) / scales  # [out, in]
        error = float(np.vdot(d @ hessian, d))
        if error < least:
            best, least = scales, error
    return best


def awq_clipped(weight: Array, hessian: Array, recipe: Recipe) -> Grouped:
    """Quantize weight [out, in]: round to nearest, on the best of the shrunk grids of each group.

    `hessian` [in, in]: X.T X of the inputs X of these weights, or any multiple. Raises ModelError if no grid's steps
    fit float16.
    """
    num_outputs, num_inputs = weight.shape
    size = recipe.size(num_inputs)
    groups = weight.reshape(num_outputs, -1, size)  # [out, groups, size]
    blocks = hessian.reshape(-1, size, num_inputs // size, size)  # [groups, size, groups, size]
    blocks = np.einsum("gigj->gij", blocks)  # [groups, size, size], those on the diagonal
    best = Grid.over(groups, recipe, SHRINKS[-1])  # [out, groups, 1]; if these steps do not fit, none do
    least = np.full((*groups.shape[:2], 1), np.inf)  # [out, groups, 1]
    for shrink in SHRINKS:
        try:
            grid = Grid.over(groups, recipe, shrink)  # [out, groups, 1]
        except ModelError:
            continue
        d = (groups - grid.decode(grid.encode(groups))).swapaxes(0, 1)  # [groups, out, size]
        errors = np.vecdot(d @ blocks, d).T[..., None]  # [out, groups, 1]
        better = errors < least  # [out, groups, 1]
        scales = np.where(better, grid.scales, best.scales)  # [out, groups, 1]
        best = Grid(scales, np.where(better, grid.zeros, best.zeros), recipe.top)  # [out, groups, 1]
        least = np.minimum(errors, least)  # [out, groups, 1]
    return packed(best.encode(groups).reshape(weight.shape), best, recipe)
