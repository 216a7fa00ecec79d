"""Which of two accesses to memory comes first, and which two nothing puts in order: races, found by vector clocks.

A *thread* is whoever works by itself: the host, and each stream of a GPU. A thread's clock says, for every thread, how
many of its operations surely lie in the past (Mattern, 1989). An operation on a stream knows all that the host knew
when it queued it; an event carries a stream's clock to those who wait for it. Two accesses of which one writes race
unless the second one's thread knows of the first. Whether they collided this time does not matter: so one run finds
what would go wrong in one of a million.

Memory also ends. It goes back to whom it came from, who may hand it out again at once, to work of his own. That is
right only if he knows of every use of it, or waits for those that were recorded with it (`Tensor.record_stream`).
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

HOST = "the host"

Clock = Counter[str]
"""thread -> how many of its operations lie in the past."""


class Access(NamedTuple):
    thread: str
    time: int
    """Of that thread: its number among the thread's operations."""
    what: str


@dataclass(eq=False)
class Memory:
    """One allocation, and who used it last."""

    order: Order
    owner: str | None
    """The thread that it was allocated for. None: it is kept for a graph, and nobody else gets it."""
    made: str = ""
    """By what."""
    written: Access | None = None
    read: dict[str, Access] = field(default_factory=dict)  # by thread, since it was written
    used: dict[str, Access] = field(default_factory=dict)  # by thread
    recorded: set[str] = field(default_factory=set)
    """Threads whose work is waited for before the memory is handed out again."""

    def __del__(self) -> None:
        self.order.ended(self)


class Order:
    """The clocks of all threads, and the races so far."""

    def __init__(self) -> None:
        self.clocks: defaultdict[str, Clock] = defaultdict(Counter)
        self.races: Counter[str] = Counter()

    def begin(self, thread: str) -> int:
        """One more operation of a thread: its time. The host is where all of them come from."""
        self.hear(thread, self.clocks[HOST])
        self.clocks[thread][thread] += 1
        return self.clocks[thread][thread]

    def hear(self, thread: str, clock: Clock) -> None:
        """From here on, the thread knows what this clock knows."""
        self.clocks[thread] |= clock  # the larger of each

    def knows(self, thread: str, access: Access) -> bool:
        return access.thread == thread or self.clocks[thread][access.thread] >= access.time

    def access(self, memory: Memory, now: Access, *, writes: bool) -> None:
        earlier = [memory.written] if memory.written else []
        if writes:
            earlier += memory.read.values()
        for access in earlier:
            if not self.knows(now.thread, access):
                verb = "written" if access is memory.written else "read"
                self.found(f"{now.what} {'writes' if writes else 'reads'} {memory.made}, {verb} by {access.what}")
        if writes:
            memory.written, memory.read = now, {}
        else:
            memory.read[now.thread] = now
        memory.used[now.thread] = now

    def ended(self, memory: Memory) -> None:
        """It goes back to its owner. What the host knows, the owner's next operation will know too."""
        if memory.owner is None:
            return
        for thread, access in memory.used.items():
            if thread not in memory.recorded and not (self.knows(memory.owner, access) or self.knows(HOST, access)):
                self.found(f"{memory.made} is given back to {memory.owner} before {access.what}")

    def found(self, race: str) -> None:
        self.races[race] += 1


def who(*, rooms: tuple[str, ...] = ("minipaged/fast/", "rehearse_streams.py")) -> str:
    """The function of the fast tier (or of its rehearsal) that is running, to name what it does."""
    frame = sys._getframe(1)
    while frame.f_back and not any(room in frame.f_code.co_filename for room in rooms):
        frame = frame.f_back
    return frame.f_code.co_qualname
