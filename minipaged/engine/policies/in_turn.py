"""Any order, and one that may depend on the time: whose turn it is says a function, given a request and the time.

What the other policies here promise, this one cannot. If the order changes while requests wait, somebody may be passed
for ever: that nobody is has to be the function's care.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minipaged.engine.policy import FirstComeFirstServed
from minipaged.scheduling import RequestView

Turn = float | tuple[float, ...]
"""The smaller, the earlier; equals in order of arrival."""


class InTurn(FirstComeFirstServed):
    """`by(request, now)` says whose turn it is; `clock` is the engine's, by which `arrival_time` is told, too."""

    def __init__(self, *settings: Any, by: Callable[[RequestView, float], Turn], clock: Callable[[], float]) -> None:
        super().__init__(*settings)
        self.by = by
        self.clock = clock

    def turn(self, request: RequestView) -> tuple[float, ...]:
        """As it is now."""
        turn = self.by(request, self.clock())
        return (*turn, request.arrival) if isinstance(turn, tuple) else (turn, request.arrival)
