"""A run that can be gone through forwards and back: its events, and copies of the state on the way."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from minipaged.events import Event
from minipaged.replay.state import State

NEARBY = 100
"""Going far back leaves a copy of the state that many events before, for the next step back."""


def _at(copy: tuple[int, State]) -> int:
    return copy[0]


class Timeline:
    """The events of a run, which may still grow, and the state after the first `position` of them.

    A copy of the state is kept every `spacing` events, or fewer where a state is large: going back means going forward
    from the last copy before. Of a very long run only the last `keep` events (at least) can be gone back to.
    """

    def __init__(self, events: Iterable[Event] = (), *, spacing: int = 1000, keep: int = 400_000) -> None:
        self.state = State()
        self.position = 0
        self.first = 0
        """The earliest position that can be gone back to."""
        self._events = list(events)  # from `first` on
        self._copies: list[tuple[int, State]] = [(0, State())]
        self._spacing, self._keep = spacing, keep
        self._next_copy = spacing

    def __len__(self) -> int:
        return self.first + len(self._events)

    def append(self, event: Event) -> None:
        """One more event at the end. It changes no state until the timeline moves on. (A listener of the engine.)"""
        self._events.append(event)

    @property
    def events(self) -> Sequence[Event]:
        """Those that can be gone back to."""
        return self._events

    @property
    def at_end(self) -> bool:
        return self.position == len(self)

    def next_event(self) -> Event:
        """The event that `forward` will apply. Raises IndexError at the end."""
        return self._events[self.position - self.first]

    def forward(self) -> None:
        """Apply one event. Raises IndexError at the end."""
        self.state.apply(self.next_event())
        self.position += 1
        if self.position >= self._next_copy:
            self._copies.append((self.position, self.state.copy()))
            self._forget_old()
            # A copy takes about as long as following a quarter as many events as it has blocks and sequences.
            size = len(self.state.device.holders) + len(self.state.sequences)
            self._next_copy = self.position + max(self._spacing, 4 * size)

    def seek(self, position: int) -> None:
        """Go to the state after so many events, forwards or back, as far as there are any."""
        position = max(self.first, min(position, len(self)))
        if position < self.position:
            place = bisect_right(self._copies, position, key=_at)
            self.position, state = self._copies[place - 1]
            self.state = state.copy()
            if position - self.position > 2 * NEARBY:  # the next step is likely to go back, too
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
