"""The paper's other baseline: FasterTransformer behind a scheduler that batches whole requests (section 6.1).

A batch is the earliest requests for which there is room, a chunk of the longest length for each of their sequences (as
in Orca (Max)). It runs until all of them have ended, and only then the next one begins. The paper says no more of it,
and how large its batches could be is not known: so its curves are drawn here, and no verdict is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minipaged.paper.orca import Orca, OrcaPolicy
from minipaged.scheduling import RequestView


class WholeBatches(OrcaPolicy):
    """Nobody comes in while anybody runs."""

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        """The earliest, as many as there is room for."""
        admitted: list[str] = []
        chunks: list[int] = []
        for request in sorted(waiting, key=self.turn) if not running else ():
            chunks += self.memory.chunks(request.prompt_tokens, request.max_output_tokens, request.num_sequences)
            if not self.memory.allocator.can_take(chunks):
                break
            admitted.append(request.request_id)
        return admitted


class FasterTransformer(Orca):
    """Its two doors, as of Orca (Max)."""

    def __init__(self) -> None:
        super().__init__("Orca (Max)")

    def policy(self, *settings: Any) -> WholeBatches:
        return WholeBatches(*settings, memory=self._memory)
