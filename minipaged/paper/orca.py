"""The paper's baselines: Orca with contiguous memory (section 6.1), as a memory and a policy of the real engine.

Orca batches as this engine does, step by step. But each sequence has one contiguous piece, reserved when its request
comes in, for as many tokens as are expected of it:

- Orca (Max) expects the longest output that the model can make;
- Orca (Pow2) the true one, rounded up to a power of two: at most twice too much;
- Orca (Oracle) the true one, which nobody knows.

The pieces are chunks of a buddy allocator, so they are rounded up to a power of two once more. A request of n sequences
takes n chunks at once, a fork copies, nothing is shared, and nobody is ever preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minipaged.contracts import BlockAllocator, Tier
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.engine.step_writer import StepWriters
from minipaged.events import Emit
from minipaged.paper.buddy import LARGEST_TOKENS, power_of_two
from minipaged.paper.orca_memory import Estimate, OrcaMemory
from minipaged.params import EngineConfig
from minipaged.scheduling import RequestView

ESTIMATES: dict[str, Estimate] = {
    "Orca (Max)": lambda output: LARGEST_TOKENS,
    "Orca (Pow2)": power_of_two,
    "Orca (Oracle)": lambda output: output,
}


class OrcaPolicy(FirstComeFirstServed):
    """In order of arrival, as long as their chunks are there: so many free blocks are not enough."""

    def __init__(self, *settings: Any, memory: OrcaMemory) -> None:
        super().__init__(*settings)
        self.memory = memory

    def fits(self, request: RequestView) -> bool:
        return True  # what could be served alone, by the memory

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        """The next one; it is asked again for the one after it."""
        first = min(waiting, key=self.turn)
        chunks = self.memory.chunks(first.prompt_tokens, first.max_output_tokens, first.num_sequences)
        return [first.request_id] if self.memory.allocator.can_take(chunks) else []


class Orca:
    """The two doors of one engine: `Engine(memory=orca.memory, policy=orca.policy)`."""

    def __init__(self, system: str) -> None:
        """`system`: one of ESTIMATES."""
        self._estimate = ESTIMATES[system]

    def memory(
        self,
        config: EngineConfig,
        tier: Tier,
        allocator: Callable[[int], BlockAllocator] | None,
        writer: StepWriters,
        emit: Emit,
    ) -> OrcaMemory:
        self._memory = OrcaMemory(config, writer, emit, self._estimate)
        return self._memory

    def policy(self, *settings: Any) -> OrcaPolicy:
        return OrcaPolicy(*settings, memory=self._memory)
