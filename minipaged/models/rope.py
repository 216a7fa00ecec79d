"""The rotary frequencies of a configuration in float64, to be compared with those in a GGUF file.

The tiers compute their own (`inverse_frequencies`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from minipaged.models.config import RopeScaling

Array = npt.NDArray[np.float64]


def plain_frequencies(theta: float, head_dim: int) -> Array:
    """[head_dim / 2]: the unscaled frequency of each pair of dimensions, in radians per position."""
    frequencies: Array = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    return frequencies


def divisors(scaling: RopeScaling, plain: Array) -> Array:
    """[head_dim / 2]: the number by which `scaling` divides each frequency.

    llama3: 1 for short wavelengths, `factor` for long ones, and a blend of the two frequencies in between.
    """
    if scaling.rope_type == "linear":
        return np.full_like(plain, scaling.factor)
    turns = scaling.original_max_position_embeddings * plain / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)  # weight of the unscaled frequency
    found: Array = 1 / (kept + (1 - kept) / scaling.factor)
    return found
