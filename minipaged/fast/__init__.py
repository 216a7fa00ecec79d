"""The wing to be fast. Which of its two sets of kernels (`kernels.py`) runs is decided here, by the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from minipaged.fast.kernels import Kernels


def is_gpu(device: torch.device) -> bool:
    """Whether a device has memory, streams and graphs of its own, and runs Triton kernels.

    All of the wing asks here, so that the tests can rehearse the CUDA path with a CPU's tensors.
    """
    return device.type == "cuda"


def kernels_for(device: torch.device) -> Kernels:
    """The kernels for a device: `minipaged.fast.gpu` for CUDA, else `minipaged.fast.cpu`.

    Neither Triton nor numba is loaded before it is needed, and the first is not needed where there is no GPU.
    """
    if is_gpu(device):
        from minipaged.fast import gpu

        return gpu
    from minipaged.fast import cpu

    return cpu
