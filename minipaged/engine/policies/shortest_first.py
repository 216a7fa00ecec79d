"""The shortest job first: many short ones need not wait for one that is long, and the mean wait is the shortest.

That takes to know how long a job is. A trace does; a server does not, and goes by an estimate: here by `max_tokens`,
the most that a request asks for, if it is not given a better one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minipaged.engine.policy import FirstComeFirstServed
from minipaged.scheduling import RequestView


def asked_for(request: RequestView) -> float:
    """Tokens to generate, at most."""
    return request.max_output_tokens


class ShortestFirst(FirstComeFirstServed):
    """Each token that a request is expected to generate moves it back `PLACES` places in the order of arrival.

    So it is passed only by those that arrive among the next `PLACES * estimate(request)`, however many come. `estimate`
    has to say the same of a request each time it is asked.
    """

    PLACES = 1

    def __init__(self, *settings: Any, estimate: Callable[[RequestView], float] = asked_for) -> None:
        super().__init__(*settings)
        self.estimate = estimate

    def turn(self, request: RequestView) -> tuple[float, ...]:
        """Its place in the order of arrival, moved by its length."""
        return request.arrival + self.PLACES * self.estimate(request), request.arrival
