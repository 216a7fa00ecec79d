"""Whether tensors are on a GPU, and how they get there."""

from __future__ import annotations

import torch
from torch import Tensor


def is_gpu(device: torch.device) -> bool:
    """Whether a device has its own memory, streams and graphs, and runs Triton kernels.

    The whole fast tier calls this function, so that tests can rehearse the CUDA path with a CPU's tensors.
    """
    return device.type == "cuda"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host's memory to a device. The host waits neither for the copy nor for earlier work: a GPU
    fetches the tensor when it reaches the copy, from memory that stays pinned until then."""
    return tensor.pin_memory().to(device, non_blocking=True) if is_gpu(device) else tensor
