"""How many threads compute on a CPU: as many as get a core.

Threads that compute one step together meet some 200 times in it, and each time all of them wait for the last one. So on
a machine that does something else as well, a thread that has to share its core makes all the others wait. With one
thread fewer than cores, only the share of that thread is lost. (Tokens a second; SmolLM2-135M in bfloat16, before its
matrices were in tiles, on 2 cores of an AMD EPYC; where a core is taken, another process computes on it.)

| | quiet, 2 threads | a core taken, 2 threads | a core taken, 1 thread |
|---|---|---|---|
| one request | 89 | 26 | 58 |
| 32 decoding | 497 | 119 | 279 |

Whether a thread had to wait for a core shows in the processor time of this process. A thread that waits for others does
so in a loop, and so takes processor time too. Threads that are never kept from running take nearly a second of
processor time a second each. If they take clearly less, some of them did not get a core. On the same machine two
threads take 1.95 seconds if nobody else wants them (for one request: 1.8), and at most 1.5 if one core is taken.

This is the time of the whole process. So where another Python thread of it computes something else, a lost core may not
show: the time of that thread is taken for theirs.

That other programs have ended does not show while there are fewer threads. So now and then one more thread is tried.

With more threads, a core or two that are taken hide among what all of them lose on a quiet machine. But each thread has
an equal share of a step, so the step takes about twice as long. So where cores are missing, fewer threads are tried now
and then while steps are alike, and kept if these steps are faster. (Tested on simulated machines only.)
"""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock, RLock

import numba
import torch

from minipaged.fast.cores import usable_cores

WINDOW = 0.05
"""The seconds of computing after which the number of threads may change."""
LOST = 0.3
"""The part of a core that each thread but the first may lose before there are fewer threads. Threads lose a little on a
quiet machine too, when one of them works alone and the others fall asleep. (Measured with 2 threads only.)"""
FIRST_WAIT, LONGEST_WAIT = 0.5, 4.0
"""The seconds until one more thread is tried, and at most. Each attempt that fails doubles the wait."""
LONGEST_DOUBT = 60.0
"""The most seconds until fewer threads are tried again. This wait, too, begins with `FIRST_WAIT` and doubles."""
FASTER = 0.8
"""The part of a step's time that it may take on fewer threads, for these to be kept."""


class Threads:
    """The number of threads, and when to change it. It counts from 1 to `most`."""

    def __init__(
        self,
        most: int,
        clock: Callable[[], float] = time.perf_counter,
        processor_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self.most = self.count = most
        self._clock, self._processor_clock = clock, processor_clock
        self._seconds = self._processor_seconds = 0.0
        self._wait, self._next_try = FIRST_WAIT, 0.0
        self._tries = self._is_watching = False
        self._lost = 0.0  # in the last window
        self._doubt, self._next_doubt = FIRST_WAIT, 0.0
        self._without, self._lost_before = 0, 0.0  # how many threads fewer were tried last, and what was lost before
        self._tries_without = False
        self._kinds: list[Hashable] = []  # of this window's stretches
        self._each: tuple[Hashable, float] = (None, math.nan)  # the kind of those of the last window, and their seconds

    @contextmanager
    def watched(self, kind: Hashable = None) -> Iterator[None]:
        """Watch a stretch in which all `count` threads compute, or wait for each other in a loop.

        kind: equal for stretches with the same work; None if no other has the same.
        """
        if self._is_watching:  # the other one's processor time could not be told from this one's
            yield
            return
        self._is_watching = True
        began, processor_began = self._clock(), self._processor_clock()
        try:
            yield
        finally:
            self._is_watching = False
            now = self._clock()
            self._seconds += now - began
            self._processor_seconds += self._processor_clock() - processor_began
            self._kinds.append(kind)
            if self._seconds >= WINDOW:
                self._adapt(self.count - self._processor_seconds / self._seconds, self._ratio(), now)
                self._seconds = self._processor_seconds = 0.0
                self._kinds.clear()

    def _ratio(self) -> float:
        """The time of a stretch in this window ÷ that in the last one, if all were of one kind; NaN otherwise."""
        kind = self._kinds[0] if len({*self._kinds}) == 1 else None
        (kind_before, before), each = self._each, self._seconds / len(self._kinds)
        self._each = kind, each
        return each / before if kind is not None and kind == kind_before else math.nan

    def _adapt(self, lost: float, ratio: float, now: float) -> None:
        """`lost`: the number of cores that the threads did not get. `ratio`: see `_ratio`."""
        if self._tries_without:
            self._tries_without, self._lost = False, lost
            if ratio < FASTER:
                self._wait, self._doubt, self._without = FIRST_WAIT, FIRST_WAIT, 0
                self._next_try = now + self._wait
            else:
                self.count += self._without
                self._doubt = min(2 * self._doubt, LONGEST_DOUBT)
                self._next_doubt = now + self._doubt
            return
        # What one more thread has lost shows beside what the others lost without it.
        too_much = lost - self._lost if self._tries else lost
        self._lost = lost
        if self.count > 1 and too_much > (LOST if self._tries else LOST * (self.count - 1)):
            self._wait = min(2 * self._wait, LONGEST_WAIT) if self._tries else FIRST_WAIT
            self._next_try = now + self._wait
            self.count = max(1, self.count - max(1, round(too_much)))
            self._tries = False
        elif self.count < self.most and (self._tries or now >= self._next_try):
            self.count += 1
            self._tries = True
        else:
            self._tries = False
            if lost > self._lost_before + LOST:  # more than when fewer threads were tried last
                self._without, self._next_doubt = 0, now
            if self.count > 1 and lost > LOST and now >= self._next_doubt and self._each[0] is not None:
                # Each thread that shares its core loses about half of it.
                self._without = min(self.count - 1, self._without % max(1, round(2 * lost)) + 1)
                self.count -= self._without
                self._tries_without, self._lost_before = True, lost


_threads = Threads(0)
_num_computing = 0
"""How many engines of this process compute now. Changed under `_lock`."""
_lock = Lock()
_turn = RLock()
"""Held by the engine that computes, if numba's threads are its own ("workqueue"). Those end a process in which two
threads of Python call them at once."""


def _current() -> Threads:
    """The threads of this process. They count anew when torch is given another number."""
    global _threads  # torch's number is the whole process's, too
    if not _num_computing:  # otherwise torch's number may be the one that another engine computes with
        most = min(torch.get_num_threads(), usable_cores(), numba.config.NUMBA_NUM_THREADS)
        if most != _threads.most:
            _threads = Threads(most)
    return _threads


def most_threads() -> int:
    """The number of threads that compute where nobody else takes a core: as many as torch's, and as usable cores."""
    return _current().most


def num_pieces() -> int:
    """The number of pieces into which threads divide work whose result depends on the division, in its last bits: the
    threads of a machine that does nothing else, however many there are now."""
    return _threads.most or _current().most


def computing(*, throughout: bool = True, kind: Hashable = None) -> AbstractContextManager[None]:
    """Return a context in which as many threads compute as get a core. Afterwards numba and torch have their own
    numbers again.

    `throughout`: whether threads compute nearly all the time, so that lost cores show. `kind`: see `Threads.watched`.
    """
    return _computing(throughout, kind)


def on_one_thread() -> AbstractContextManager[None]:
    """Return a context in which one thread computes. Afterwards numba and torch have their own numbers again."""
    return _computing(throughout=False, most=1)


@contextmanager
def _computing(throughout: bool, kind: Hashable = None, most: int | None = None) -> Iterator[None]:
    global _num_computing
    with _turn if threading_layer() == "workqueue" else nullcontext():
        given, threads = torch.get_num_threads(), _current()
        with _lock:
            _num_computing += 1
        try:
            _set(threads.count if most is None else most)
            with threads.watched(kind) if throughout and _shows_lost_cores() else nullcontext():
                yield
        finally:
            with _lock:
                _num_computing -= 1
            _set(threads.most)
            if given > threads.most:  # it is never lower, unless another engine was computing
                torch.set_num_threads(given)


def use_threads() -> None:
    """Let numba and torch compute on all threads for which there are usable cores, in this thread of Python, outside
    `computing` (numba has a number for each). Both then obey OMP_NUM_THREADS."""
    _set(most_threads())


def _set(count: int) -> None:
    numba.set_num_threads(count)
    if torch.get_num_threads() != count:  # see `threading_layer`
        torch.set_num_threads(count)


def threading_layer() -> str:
    """Return the kind of numba's threads: "omp" (OpenMP's), "tbb", or "workqueue" (numba's own, if it finds no library
    for the others). They are started if they are not running yet."""
    given = torch.get_num_threads()
    numba.get_num_threads()
    if torch.get_num_threads() != given:  # numba, when it starts its threads, changes OpenMP's number, which torch uses
        torch.set_num_threads(given)
    layer: str = numba.threading_layer()
    return layer


def _shows_lost_cores() -> bool:
    """Whether threads that wait take processor time. OpenMP's on Linux do, unless they are told to sleep. A rank also
    waits for other ranks, and sleeps then."""
    sleeps = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE" or os.environ.get("GOMP_SPINCOUNT") == "0"
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    return sys.platform == "linux" and not sleeps and alone and threading_layer() == "omp"
