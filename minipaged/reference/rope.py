"""The rotary embedding: each pair of dimensions of a query or key is turned by an angle, position × frequency.

So the product of a query and a key depends on the distance of their positions only. Frequencies may be scaled for
contexts longer than those in training.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from minipaged.models.config import ModelConfig
from minipaged.reference.kv_cache import Array

Rotation = tuple[Array, Array]
"""The rotary tables of a batch: cos and sin, [tokens, 1, head_dim / 2] each."""


def rotate(x: Array, rotation: Rotation) -> Array:
    """Rotate each pair of dimensions (i, i + head_dim / 2) of x [tokens, heads, head_dim] by its angle."""
    cos, sin = rotation  # [tokens, 1, head_dim / 2] each
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]  # [tokens, heads, head_dim / 2] each
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)  # [tokens, heads, head_dim]


def rotary_tables(positions: Array, frequencies: Array, dtype: npt.DTypeLike) -> Rotation:
    """Return cos and sin of every angle position × frequency: [tokens, 1, head_dim / 2] each, to broadcast over heads.

    The angles are float32 whatever `dtype` is, as in transformers: near position 8000 they are multiples of 0.0005.
    """
    angles = (positions[:, None].astype(np.float32) * frequencies)[:, None]  # [tokens, 1, head_dim / 2]
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def inverse_frequencies(config: ModelConfig, window: int | None = None) -> Array:
    """Return the rotary frequency of each pair of dimensions, in radians per position: [head_dim / 2] float32.

    `window`: of the layers with this window; None: of the layers that see all tokens. Powers are rounded where
    transformers rounds them: a frequency's last bit makes 0.001 radians at position 8000.
    """
    theta, scaling = config.rope(window)
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)  # [head_dim / 2]
    powers = (theta ** exponents.astype(np.float64)).astype(np.float32)  # [head_dim / 2], rounded once
    frequencies: Array = 1 / powers  # [head_dim / 2]
    if scaling is None:
        return frequencies
    stretched: Array = frequencies / scaling.factor  # [head_dim / 2]
    if scaling.rope_type == "linear":
        return stretched
    # llama3: keep the short wavelengths, stretch the long ones, and blend in between.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # [head_dim / 2] within that context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)  # [head_dim / 2]
    keep = np.clip(keep, 0, 1)  # [head_dim / 2]: 1 keeps, 0 stretches
    return keep * frequencies + (1 - keep) * stretched  # [head_dim / 2]
