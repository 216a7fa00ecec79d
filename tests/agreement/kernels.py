"""The two sets of kernels of the fast tier, and where and in which types each is tested.

The Triton kernels run on a GPU where there is one. Elsewhere they run in Triton's interpreter, on the same inputs; but
not in bfloat16, in which the interpreter computes nonsense without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from minipaged.fast import cpu, gpu
from minipaged.fast.kernels import Kernels
from tests.effort import thorough


@dataclass(frozen=True)
class KernelSet:
    name: str
    kernels: Kernels
    device: torch.device
    dtypes: tuple[torch.dtype, ...]


HAS_GPU = torch.cuda.is_available()
CPU = KernelSet("numba", cpu, torch.device("cpu"), (torch.float32, torch.bfloat16))
TRITON = KernelSet(
    "triton" if HAS_GPU else "triton-interpreted",
    gpu,
    torch.device("cuda" if HAS_GPU else "cpu"),
    (torch.float32, torch.float16, torch.bfloat16) if HAS_GPU else (torch.float32, torch.float16),
)
KERNEL_SETS = (CPU, TRITON)

every_kernel_set = pytest.mark.parametrize("kernel_set", KERNEL_SETS, ids=lambda kernel_set: kernel_set.name)


def case(kernel_set: KernelSet, dtype: torch.dtype, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(kernel_set, dtype, id=f"{kernel_set.name}-{str(dtype).removeprefix('torch.')}", marks=marks)


CASES = [(kernel_set, dtype) for kernel_set in KERNEL_SETS for dtype in kernel_set.dtypes]
every_kernel_set_and_dtype = pytest.mark.parametrize(("kernel_set", "dtype"), [case(*each) for each in CASES])
every_kernel_set_and_dtype_in_8_bits = pytest.mark.parametrize(
    ("kernel_set", "dtype"), [case(*each, *[thorough] * (each == (CPU, torch.bfloat16))) for each in CASES]
)
"""numba compiles kernels for a model in bfloat16 with a cache in 8 bits, and few other tests call them: 18 s."""

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Most that a result may differ, as a fraction of the largest one of its kind: some units of the type's last place."""
