"""The paper's baselines: Orca with contiguous memory (section 6.1), as a memory and a policy of the real engine.

Orca batches step by step, like this engine. Each sequence has one contiguous piece of memory, reserved when its request
is admitted. The piece has room for the prompt and the expected output:

- Orca (Max) expects the longest output that the model can generate.
- Orca (Pow2) expects the true output length rounded up to a power of two, at most twice too much.
- Orca (Oracle) expects the true output length, which a real system does not know.

The pieces are chunks of a buddy allocator, which rounds them up to a power of two again. A request with n sequences
takes n chunks at once. A fork copies, nothing is shared, and no request is ever preempted.
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
    """A first-come-first-served policy that admits a request only if its chunks are free. Enough free blocks do not
    suffice."""

    def __init__(self, *settings: Any, memory: OrcaMemory) -> None:
        super().__init__(*settings)
        self.memory = memory

    def fits(self, request: RequestView) -> bool:
        return True  # the memory refuses requests that would not fit even alone

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        """Admit the next request if its chunks are free. The scheduler calls again for the one after it."""
        first = min(waiting, key=self.turn)
        chunks = self.memory.chunks(first.prompt_tokens, first.max_output_tokens, first.num_sequences)
        return [first.request_id] if self.memory.allocator.can_take(chunks) else []


class Orca:
    """The memory and the policy for one engine: `Engine(memory=orca.memory, policy=orca.policy)`."""

    def __init__(self, system: str) -> None:
        """`system` is one of the keys of ESTIMATES."""
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
