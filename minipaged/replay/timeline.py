"""The events of a run, through which one can step forward and back, with saved copies of the state."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from minipaged.events import Event
from minipaged.replay.state import State

NEARBY = 100
"""A long seek backwards saves a copy of the state this number of events before its target, for the next step back."""


def _at(copy: tuple[int, State]) -> int:
    return copy[0]


class Timeline:
    """The events of a run, which may still grow, and the state after the first `position` of them.

    A copy of the state is saved every `spacing` events, or less frequently if the state is large. A seek backwards
    replays the events from the last copy before its target. In a very long run, only the last `keep` events or more are
    kept, and one cannot go back further.
    """

    def __init__(self, events: Iterable[Event] = (), *, spacing: int = 1000, keep: int = 400_000) -> None:
        self.state = State()
        self.position = 0
        self.first = 0
        """The earliest position that one can go back to."""
        self._events = list(events)  # from `first` on
        self._copies: list[tuple[int, State]] = [(0, State())]
        self._spacing, self._keep = spacing, keep
        self._next_copy = spacing

    def __len__(self) -> int:
        return self.first + len(self._events)

    def append(self, event: Event) -> None:
        """Add an event at the end, without moving the position. Can be a listener of an engine."""
        self._events.append(event)

    @property
    def events(self) -> Sequence[Event]:
        """The events that are kept, from `first` on."""
        return self._events

    @property
    def at_end(self) -> bool:
        return self.position == len(self)

    def next_event(self) -> Event:
        """The event that `forward` will apply. Raises IndexError at the end."""
        return self._events[self.position - self.first]

    def forward(self) -> None:
        """Apply the next event. Raises IndexError at the end."""
        self.state.apply(self.next_event())
        self.position += 1
        if self.position >= self._next_copy:
            self._copies.append((self.position, self.state.copy()))
            self._forget_old()
            # A copy takes about as long as applying n / 4 events, where n is its number of blocks and sequences.
            size = len(self.state.device.holders) + len(self.state.sequences)
            self._next_copy = self.position + max(self._spacing, 4 * size)

    def seek(self, position: int) -> None:
        """Go to the state after the first `position` events, forwards or back, as far as they are kept."""
        position = max(self.first, min(position, len(self)))
        if position < self.position:
            place = bisect_right(self._copies, position, key=_at)
            self.position, state = self._copies[place - 1]
            self.state = state.copy()
            if position - self.position > 2 * NEARBY:  # the next seek probably goes back too
                self.seek(position - NEARBY)
                self._copies.insert(place, (self.position, self.state.copy()))
        while self.position < position:
            self.forward()

    def _forget_old(self) -> None:
        if len(self._events) < 2 * self._keep:
            return
        wanted = min(len(self) - self._keep, self.position)
        place = bisect_right(self._copies, wanted, key=_at) - 1
        start = self._copies[place][0]
        del self._events[: start - self.first]
        del self._copies[:place]
        self.first = start
