"""The wing to be fast. Which of its two sets of kernels (`kernels.py`) runs is decided here, by the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from minipaged.fast.kernels import Kernels


def kernels_for(device: torch.device) -> Kernels:
    """The kernels for a device: `minipaged.fast.gpu` for CUDA, else `minipaged.fast.cpu`.

    Neither Triton nor numba is loaded before it is needed, and the first is not needed where there is no GPU.
    """
    from minipaged.fast.device import is_gpu

    if is_gpu(device):
        from minipaged.fast import gpu

        return gpu
    from minipaged.fast import cpu

    return cpu
