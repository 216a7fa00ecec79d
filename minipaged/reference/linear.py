"""A product with a matrix of weights, which may be packed.

A packed matrix is never there in floats as a whole: the product takes the weights of a few rows at a time. The
arithmetic of each packed form is in `models/quantized/stored.py`.
"""

from __future__ import annotations

import numpy as np

from minipaged.models.quantized.stored import StoredMatrix
from minipaged.reference.kv_cache import Array

Weight = Array | StoredMatrix

TILE = 2**18
"""Weights of a packed matrix that are taken out at a time: 1 MB, which stays in a processor's cache."""

FEW = 64
"""Tokens, up to which a product is of columns. Of more, a result of rows is worth an eighth of the processor's time (a
prompt of 512): all that is added up and normalised between products goes along rows then."""


def linear(x: Array, weight: Weight) -> Array:
    """x [tokens, in] through weight [out, in]: [tokens, out].

    For FEW tokens this is x @ weight.T written so that BLAS reads the large matrix row by row: a third faster for 16
    tokens. More of them, as in a prompt, are better off with a result that has each token's numbers side by side. Of a
    packed matrix there are never more than a few rows in floats.
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
