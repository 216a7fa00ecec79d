"""Priorities, as in vLLM: smaller comes first, equals in order of arrival. No request starves."""

from __future__ import annotations

from minipaged.engine.policy import FirstComeFirstServed
from minipaged.scheduling import RequestView


class PriorityFirst(FirstComeFirstServed):
    """Each step of `priority` is worth `PLACES` places in the order of arrival.

    If a request's priority number is larger than the others' by d, only requests among the next `PLACES * d` arrivals
    can overtake it, however many come later.
    """

    PLACES = 100

    def turn(self, request: RequestView) -> tuple[float, ...]:
        """The request's place in the order of arrival, moved by its priority."""
        return request.arrival + self.PLACES * request.priority, request.arrival
