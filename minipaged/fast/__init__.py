"""The fast tier. The device decides which of its two sets of kernels (`kernels.py`) runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from minipaged.fast.kernels import Kernels


def kernels_for(device: torch.device) -> Kernels:
    """Return the kernels for a device: `minipaged.fast.gpu` for CUDA, else `minipaged.fast.cpu`.

    Triton and numba are imported only when they are needed. Without a GPU, Triton is not needed.
    """
    from minipaged.fast.device import is_gpu

    if is_gpu(device):
        from minipaged.fast import gpu

        return gpu
    from minipaged.fast import cpu

    return cpu
