"""Any order of turns, which may also depend on the time: a function of a request and the time gives the turn.

Unlike the other policies here, this one cannot promise that no request starves. If the order changes while requests
wait, one may be overtaken for ever. The function has to prevent that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minipaged.engine.policy import FirstComeFirstServed
from minipaged.scheduling import RequestView

Turn = float | tuple[float, ...]
"""The smaller comes first; equals in order of arrival."""


class InTurn(FirstComeFirstServed):
    """A policy in which `by(request, now)` is a request's turn. `clock`: the engine's clock, as for `arrival_time`."""

    def __init__(self, *settings: Any, by: Callable[[RequestView, float], Turn], clock: Callable[[], float]) -> None:
        super().__init__(*settings)
        self.by = by
        self.clock = clock

    def turn(self, request: RequestView) -> tuple[float, ...]:
        """The request's turn at this moment."""
        turn = self.by(request, self.clock())
        return (*turn, request.arrival) if isinstance(turn, tuple) else (turn, request.arrival)
