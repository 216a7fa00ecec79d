"""The queue of events: each is counted immediately, and delivered to listeners when the call that caused it is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from minipaged.engine.batch import Plan
from minipaged.engine.stats import Stats, StepUsage
from minipaged.events import EngineStarted, Event, Listener, StepFinished, StepScheduled, StepStarted


class EventQueue:
    """A callable that the parts of an engine call with each event (`events.Emit`)."""

    def __init__(self, stats: Stats, listeners: Iterable[Listener]) -> None:
        self.listeners = list(listeners)
        self._stats = stats
        self._events: deque[Event] = deque()
        self._delivering = False

    @property
    def heard(self) -> bool:
        """Whether there are listeners. If not, events about single tokens need not be made."""
        return bool(self.listeners)

    def __call__(self, event: Event) -> None:
        self._stats.on_event(event)
        if self.listeners or isinstance(event, EngineStarted):  # early listeners receive the sizes too
            self._events.append(event)

    # Without listeners, the events of every step are counted without being made.

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
        """Deliver the events in order. A listener that calls the engine adds events to the end of the same queue.

        If a listener raises, the others still receive every event. The first error is raised when all events are
        delivered.
        """
        if self._delivering or not self._events:
            return
        self._delivering = True
        errors: list[BaseException] = []
        try:
            while self._events:
                event = self._events.popleft()
                for listener in tuple(self.listeners):  # a listener may remove itself
                    try:
                        listener(event)
                    except BaseException as error:
                        errors.append(error)
        finally:
            self._delivering = False
        if errors:
            raise errors[0]
