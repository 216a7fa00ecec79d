"""The product with a weight matrix, which may be packed.

A packed matrix is never expanded as a whole: the product expands a few rows at a time. `models/quantized/stored.py` has
the arithmetic of each packed format.
"""

from __future__ import annotations

import numpy as np

from minipaged.models.quantized.stored import StoredMatrix
from minipaged.reference.kv_cache import Array

Weight = Array | StoredMatrix

TILE = 2**18
"""Weights of a packed matrix expanded at a time: 1 MB, which stays in a processor's cache."""

FEW = 64
"""Up to this number of tokens, a result is stored column by column. For more tokens it is stored row by row, because
the sums and norms between products then run along rows: an eighth of the processor's time is saved (a prompt of
512)."""


def linear(x: Array, weight: Weight) -> Array:
    """Return x @ weight.T [tokens, out] for x [tokens, in] and weight [out, in].

    For up to FEW tokens the product is written so that BLAS reads the large matrix row by row: a third faster for 16
    tokens. Longer inputs, such as prompts, do better with a result in which each token's numbers lie side by side. A
    packed matrix is expanded a few rows at a time.
    """
    if not isinstance(weight, StoredMatrix):
        return (weight @ x.T).T if len(x) <= FEW else x @ weight.T  # [tokens, out]
    if weight.activations is not None:
        x = weight.activations.applied(x)  # [tokens, in]
    num_outputs, num_inputs = weight.shape
    num_rows = max(1, TILE // num_inputs)
    y = np.empty((num_outputs, len(x)), x.dtype)  # [out, tokens]
    for first in range(0, num_outputs, num_rows):
        rows = slice(first, first + num_rows)
        y[rows] = weight.rows(rows).astype(x.dtype, copy=False) @ x.T  # [rows, tokens]
    return y.T  # [tokens, out]
