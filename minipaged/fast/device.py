"""Whether tensors are a GPU's, and how they get there."""

from __future__ import annotations

import torch
from torch import Tensor


def is_gpu(device: torch.device) -> bool:
    """Whether a device has memory, streams and graphs of its own, and runs Triton kernels.

    All of the wing asks here, so that the tests can rehearse the CUDA path with a CPU's tensors.
    """
    return device.type == "cuda"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's memory on a device. The host does not wait for the copy, nor for what is queued before it:
    a GPU fetches it when it comes to that, out of memory that is pinned until then."""
    return tensor.pin_memory().to(device, non_blocking=True) if is_gpu(device) else tensor
