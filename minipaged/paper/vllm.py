"""vLLM's scheduler in the paper's days, and prompts first: what chunked prefill is compared with.

This engine's steps have prompts and decodes together, as vLLM's had when the paper was written. Soon after, and until
chunked prefill, a step of vLLM had either: as long as prompts could come in they were computed, whole and alone, and
those that decode stood still (Sarathi-Serve, OSDI 2024, section 3). Two things make that of this engine: prompts come
in whole (`WholePrompts`), and a step with both is carried out in two passes, the prompts' first (`PromptsApart`). It is
kinder than vLLM was in one thing: after each pass of prompts those that decode get a token, even if more wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minipaged.engine.policy import FirstComeFirstServed
from minipaged.mirror import Rows
from minipaged.scheduling import RequestView, Way
from minipaged.simulation.simulated import SimulatedRunner
from minipaged.steps import StepInput

WATERMARK = 0.01
"""Of all blocks, what vLLM's newcomers left free then."""


class VLLM(FirstComeFirstServed):
    """vLLM's policy in the paper's days: this engine's own but for two things. Which way back depends on the number of
    sequences. And newcomers leave a hundredth of all blocks free (its *watermark*), not one for each sequence that
    runs: memory is fuller, and preemptions are more."""

    def __init__(self, *settings: Any, preemption: Way | None) -> None:
        super().__init__(*settings)
        self.preemption = preemption

    def soon(self, request: RequestView, num_blocks: int) -> int:
        return 0

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        """As long as the watermark stays free; but who is alone may have all."""
        watermark = int(WATERMARK * self.num_blocks) if running else 0
        return super().admit(waiting, running, num_free - watermark, tokens_left)

    def way_back(self, request: RequestView, host_free: int) -> Way:
        return self.preemption or ("recompute" if request.num_sequences == 1 else "swap")


class WholePrompts(VLLM):
    """A prompt comes in when a step has tokens for all of it, and so is never computed in pieces."""

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        """The first of those that there are blocks for, as far as the tokens reach."""
        sizes = {request.request_id: request.tokens_to_run for request in waiting}
        whole: list[str] = []
        for name in super().admit(waiting, running, num_free, tokens_left):
            tokens_left -= sizes[name]
            if tokens_left < 0:
                break
            whole.append(name)
        return whole


class PromptsApart(SimulatedRunner):
    """A step with prompts and decodes takes two passes, each of which reads the weights.

    The decodes' pass is the second, and is paid for when the next step begins: so first tokens come out before it. (The
    tokens of the second come out by one pass too early, which of a whole output is little.)
    """

    owed = 0.0
    """Seconds, of the latest step's second pass."""

    def step_seconds(self, step: StepInput, rows: Rows) -> float:
        owed, self.owed = self.owed, 0.0
        prompts = [row for row in step.added if row.num_tokens > 1]
        if not prompts or len(prompts) == len(rows):
            return owed + super().step_seconds(step, rows)
        tokens, context = sum(row.num_tokens for row in prompts), sum(row.stop for row in prompts)
        decodes = len(rows) - len(prompts), rows.num_query_tokens - tokens, rows.num_context_tokens - context
        self.owed = self.machine.step_seconds(*decodes)
        return owed + self.machine.step_seconds(len(prompts), tokens, context)
