"""The order that students' orders are compared with."""

from __future__ import annotations

from minipaged.scheduling import Objectives, RequestView


class Ours:
    """Serves first the requests that have begun to answer or can still be in time, then the others, each time the
    shortest first. One that has waited for most of the longest wait without a first token goes before all of them."""

    def __init__(self, objectives: Objectives, longest_wait: float) -> None:
        self.in_time = objectives.first_token
        self.urgent = 0.6 * longest_wait

    def turn(self, request: RequestView, now: float) -> tuple[float, ...]:
        waited, has_begun = now - request.arrival_time, request.num_tokens >= request.prompt_tokens
        if not has_begun and waited > self.urgent:
            return (0,)
        return 1 if has_begun or waited <= self.in_time else 2, request.prompt_tokens + request.max_output_tokens
