"""The paper's other baseline: FasterTransformer behind a scheduler that batches whole requests (section 6.1).

A batch holds the earliest requests that fit, with a chunk of the longest length for each sequence (as in Orca (Max)).
The next batch starts when all requests of the batch have ended. The paper says no more about it, and its batch sizes
are not known. Its curves are therefore drawn but not judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minipaged.paper.orca import Orca, OrcaPolicy
from minipaged.scheduling import RequestView


class WholeBatches(OrcaPolicy):
    """A policy that admits requests only when none is running."""

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        """Admit the earliest requests whose chunks fit together, if none is running."""
        admitted: list[str] = []
        chunks: list[int] = []
        for request in sorted(waiting, key=self.turn) if not running else ():
            chunks += self.memory.chunks(request.prompt_tokens, request.max_output_tokens, request.num_sequences)
            if not self.memory.allocator.can_take(chunks):
                break
            admitted.append(request.request_id)
        return admitted


class FasterTransformer(Orca):
    """FasterTransformer's memory and policy for an engine. The memory is that of Orca (Max)."""

    def __init__(self) -> None:
        super().__init__("Orca (Max)")

    def policy(self, *settings: Any) -> WholeBatches:
        return WholeBatches(*settings, memory=self._memory)
