"""By priority, as in vLLM: the smaller, the earlier; among equals in order of arrival. Nobody starves."""

from __future__ import annotations

from minipaged.engine.policy import FirstComeFirstServed
from minipaged.scheduling import RequestView


class PriorityFirst(FirstComeFirstServed):
    """Each step of `priority` is worth `PLACES` places in the order of arrival.

    So a request is passed only by those that arrive among the next `PLACES * d`, where d is by how much its priority
    number is above theirs: by that many at most, however many come.
    """

    PLACES = 100

    def turn(self, request: RequestView) -> tuple[float, ...]:
        """Its place in the order of arrival, moved by its priority."""
        return request.arrival + self.PLACES * request.priority, request.arrival
