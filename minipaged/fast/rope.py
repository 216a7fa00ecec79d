"""The tables of the rotary embedding. The twin of `reference/rope.py`; the rotation itself is in the kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minipaged.models.config import ModelConfig


def rotary_tables(
    config: ModelConfig, num_positions: int, device: torch.device, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every angle position × frequency: [num_positions, head_dim / 2] float32 each.

    `window`: as in `inverse_frequencies`.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)[:, None]  # [positions, 1]
    angles = positions * inverse_frequencies(config, window)  # [positions, head_dim / 2], float32 as in transformers
    return angles.cos().to(device), angles.sin().to(device)


def inverse_frequencies(config: ModelConfig, window: int | None = None) -> Tensor:
    """Return the rotary frequencies, in radians per position, of each pair of dimensions: [head_dim / 2] float32.

    `window`: of the layers with this window; None: of the layers that see all tokens. Rounded where transformers
    rounds: a frequency's last bit is 0.001 radians at position 8000.
    """
    theta, scaling = config.rope(window)
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim  # [head_dim / 2]
    powers = torch.pow(torch.tensor(theta, dtype=torch.float64), exponents.double())  # rounded once, below
    frequencies = 1 / powers.float()  # [head_dim / 2]
    if scaling is None:
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.rope_type == "linear":
        return stretched
    # llama3: short wavelengths are kept, long ones are stretched, those in between are blended.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # [head_dim / 2]
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * frequencies + (1 - keep) * stretched
