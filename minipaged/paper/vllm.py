"""vLLM's scheduler at the time of the paper, and its later prefill-first scheduler, to compare chunked prefill with.

A step of this engine computes prompts and decodes together, as vLLM's did when the paper was written. Later, until it
had chunked prefill, a step of vLLM computed either prompts or decodes. As long as prompts could be admitted, it
computed them whole, and decoding requests stalled (Sarathi-Serve, OSDI 2024, section 3). This engine imitates that in
two ways. Prompts are admitted whole (`WholePrompts`), and a step with both takes two passes, the prompts' pass first
(`PromptsApart`). Stalls are shorter than vLLM's were: after each pass of prompts, decoding requests get a token even if
more prompts wait.
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
"""The share of all blocks that vLLM kept free when it admitted requests, at the time of the paper."""


class VLLM(FirstComeFirstServed):
    """vLLM's policy at the time of the paper. It differs from this engine's own in two ways.

    The number of a request's sequences decides between swapping and recomputing. And admission keeps 1 % of all blocks
    free (the *watermark*) instead of one block for each running sequence. So the memory is fuller, and preemptions are
    more frequent."""

    def __init__(self, *settings: Any, preemption: Way | None) -> None:
        super().__init__(*settings)
        self.preemption = preemption

    def soon(self, request: RequestView, num_blocks: int) -> int:
        return 0

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        """Admit requests as long as the watermark stays free. If no request runs, all blocks may be used."""
        watermark = int(WATERMARK * self.num_blocks) if running else 0
        return super().admit(waiting, running, num_free - watermark, tokens_left)

    def way_back(self, request: RequestView, host_free: int) -> Way:
        return self.preemption or ("recompute" if request.num_sequences == 1 else "swap")


class WholePrompts(VLLM):
    """A policy that admits a prompt only if the step has enough tokens for all of it, so that no prompt is split."""

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        """Admit, of the requests that VLLM would admit, the first ones whose whole prompts fit in the step's tokens."""
        sizes = {request.request_id: request.tokens_to_run for request in waiting}
        whole: list[str] = []
        for name in super().admit(waiting, running, num_free, tokens_left):
            tokens_left -= sizes[name]
            if tokens_left < 0:
                break
            whole.append(name)
        return whole


class PromptsApart(SimulatedRunner):
    """A runner whose steps with both prompts and decodes take two passes. Each pass reads the weights.

    The decodes' pass comes second. Its time is charged at the beginning of the next step, so that first tokens appear
    before it. The decodes' tokens then appear one pass too early, a small error over a whole output.
    """

    owed = 0.0
    """Seconds of the latest step's second pass, still to be charged."""

    def step_seconds(self, step: StepInput, rows: Rows) -> float:
        owed, self.owed = self.owed, 0.0
        prompts = [row for row in step.added if row.num_tokens > 1]
        if not prompts or len(prompts) == len(rows):
            return owed + super().step_seconds(step, rows)
        tokens, context = sum(row.num_tokens for row in prompts), sum(row.stop for row in prompts)
        decodes = len(rows) - len(prompts), rows.num_query_tokens - tokens, rows.num_context_tokens - context
        self.owed = self.machine.step_seconds(*decodes)
        return owed + self.machine.step_seconds(len(prompts), tokens, context)
