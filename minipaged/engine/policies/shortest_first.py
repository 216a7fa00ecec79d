"""The shortest job first: many short requests need not wait for a long one, and the mean wait is the shortest.

This needs the length of a job in advance. A trace has it. A server has only an estimate: by default `max_tokens`, the
most that a request asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minipaged.engine.policy import FirstComeFirstServed
from minipaged.scheduling import RequestView


def asked_for(request: RequestView) -> float:
    """The most tokens that the request may generate."""
    return request.max_output_tokens


class ShortestFirst(FirstComeFirstServed):
    """Each token that a request is expected to generate moves it back `PLACES` places in the order of arrival.

    So only requests among the next `PLACES * estimate(request)` arrivals can overtake it, however many come later.
    `estimate` must return the same number for a request each time it is called.
    """

    PLACES = 1

    def __init__(self, *settings: Any, estimate: Callable[[RequestView], float] = asked_for) -> None:
        super().__init__(*settings)
        self.estimate = estimate

    def turn(self, request: RequestView) -> tuple[float, ...]:
        """The request's place in the order of arrival, moved by its length."""
        return request.arrival + self.PLACES * self.estimate(request), request.arrival
