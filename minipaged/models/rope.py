"""The rotary frequencies that a configuration gives, to compare with those that a file brings.

The wings compute their own (`inverse_frequencies`); these are float64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from minipaged.models.config import RopeScaling

Array = npt.NDArray[np.float64]


def plain_frequencies(theta: float, head_dim: int) -> Array:
    """[head_dim / 2]: radians a position, of each pair of dimensions, before any scaling."""
    frequencies: Array = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    return frequencies


def divisors(scaling: RopeScaling, plain: Array) -> Array:
    """[head_dim / 2]: what scaling divides each frequency by.

    llama3: 1 for short wavelengths, `factor` for long ones, in between a blend of the frequencies.
    """
    if scaling.rope_type == "linear":
        return np.full_like(plain, scaling.factor)
    turns = scaling.original_max_position_embeddings * plain / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)  # the share of the frequency that stays as it was
    found: Array = 1 / (kept + (1 - kept) / scaling.factor)
    return found
