"""Runs in the worker with a student's quantizer: the loops that quantize a whole matrix by its calls.

The module is loaded before the student's file. It does not compute the right codes.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def rounded(quantizer: Any, weights: Any, size: Any) -> Any:
    """Round weights [out, in] to nearest in groups of `size` inputs. Returns packed codes, scales, zeros."""
    codes, scales, zeros = quantizer.round_to_nearest(weights.reshape(len(weights), -1, size).copy())
    return quantizer.pack(codes.reshape(weights.shape)), scales, zeros


def compensated(quantizer: Any, weights: Any, U: Any, size: Any) -> Any:
    """Quantize weights [out, in] column by column (GPTQ). A group's grid is chosen at its first column.

    Returns packed codes, scales, zeros.
    """
    codes, grids, rest = np.empty(weights.shape, np.uint8), [], weights
    for i in range(weights.shape[1]):
        if i % size == 0:
            _, scales, zeros = quantizer.round_to_nearest(rest[:, None, :size].copy())  # [out, 1] both
            grids.append((scales, zeros))
        codes[:, i], rest = quantizer.round_column(rest.copy(), U[i:, i:], scales[:, 0], zeros[:, 0])
    scales, zeros = (np.concatenate(parts, axis=1) for parts in zip(*grids, strict=True))  # [out, groups] each
    return quantizer.pack(codes), scales, zeros
