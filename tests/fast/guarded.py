"""Memory in which it shows what a kernel leaves unwritten, and what it writes beside its results.

Kernels allocate their results (and what lies between two of them) themselves. Within `GuardedMemory` each tensor that
they allocate is NaN until it is written (integers: the least one), and lies between two pieces of the same, which must
be untouched at the end.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GUARD = 256
"""Elements before a tensor and after it: a multiple of 16 bytes, so that it lies as well as any."""
ALLOCATING = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty}


class GuardedMemory(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here by torch, and skipping it would import all of it (1.7 s of processor)."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []
        """In the order of their allocation."""
        self._memory: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket not in ALLOCATING:
            return result
        assert result.is_contiguous()
        memory = result.new_full((result.numel() + 2 * GUARD,), unwritten(result.dtype))
        self._memory.append(memory)
        self.allocated.append(memory[GUARD:-GUARD].view(result.shape))
        return self.allocated[-1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if error is None:
            assert self.allocated, "nothing was allocated"
            for memory in self._memory:
                around = torch.cat([memory[:GUARD], memory[-GUARD:]])
                expected = torch.full_like(around, unwritten(around.dtype))
                assert torch.equal(around.view(torch.uint8), expected.view(torch.uint8)), "written beside a result"


def unwritten(dtype: torch.dtype) -> float:
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
