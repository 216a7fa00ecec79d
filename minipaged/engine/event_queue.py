"""Events on their way to those who listen: counted at once, handed on when the call that caused them is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from minipaged.engine.batch import Plan
from minipaged.engine.stats import Stats, StepUsage
from minipaged.events import EngineStarted, Event, Listener, StepFinished, StepScheduled, StepStarted


class EventQueue:
    """What the parts of an engine call with each event (`events.Emit`)."""

    def __init__(self, stats: Stats, listeners: Iterable[Listener]) -> None:
        self.listeners = list(listeners)
        self._stats = stats
        self._events: deque[Event] = deque()
        self._delivering = False

    @property
    def heard(self) -> bool:
        """Whether anybody listens. If not, what only tells of single tokens need not be made."""
        return bool(self.listeners)

    def __call__(self, event: Event) -> None:
        self._stats.on_event(event)
        if self.listeners or isinstance(event, EngineStarted):  # who joins before the first call gets the sizes, too
            self._events.append(event)

    # What every step has is counted without its event where nobody listens.

    def step_started(self, step: int) -> None:
        if self.listeners:
            self(StepStarted(step))

    def step_scheduled(self, step: int, held: StepUsage) -> None:
        if self.listeners:
            self(StepScheduled(step, *held))
        else:
            self._stats.note_memory(held)

    def step_finished(self, step: int, plan: Plan, seconds: float, num_generated: int) -> None:
        if self.listeners:
            self(StepFinished(step, len(plan.rows), plan.num_query_tokens, seconds, num_generated))
        else:
            self._stats.note_step(plan.num_query_tokens, seconds, num_generated)

    def deliver(self) -> None:
        """Hand the events on in order. A listener that calls the engine adds events to the end of the same queue.

        One that raises keeps no other from any event; its error is raised when all is delivered, the first of several.
        """
        if self._delivering or not self._events:
            return
        self._delivering = True
        errors: list[BaseException] = []
        try:
            while self._events:
                event = self._events.popleft()
                for listener in tuple(self.listeners):  # one may remove itself
                    try:
                        listener(event)
                    except BaseException as error:
                        errors.append(error)
        finally:
            self._delivering = False
        if errors:
            raise errors[0]
