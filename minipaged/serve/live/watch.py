"""Follows an engine's events while it runs, and sends each live page only the changes that it has not seen.

    engine's thread:  event ──► backlog                         (a few hundred nanoseconds)
    event loop:       backlog ──► State, ten times a second, a slice at a time
                      each block and request remembers when it last changed ──► a frame for each page

"Folding" an event means to apply it to the State. A page has no queue. The watch keeps only the version that the page
has seen, and its next frame holds the changes since then. So a slow or sleeping page gets the newest state when it
reads again, and nothing grows meanwhile. While there is no page, nothing is folded until the backlog is long. From then
on the engine's thread folds two old events for each new one. So a watch holds at most its backlog, one entry per block,
the running requests, and a few that have ended.

A frame is JSON:

    whole         whether the page must forget all earlier frames; such a frame has `sizes` too
    sizes         device blocks, host blocks, slots per block, tokens of the longest sequence, and the windows of the
                  groups of layers in tokens (null: they see everything)
    device, host  runs of equal blocks: [first, number, letter, holders, filled slots, cached]; the letter is the first
                  holder's, as its index in replay.LETTERS, 52 for a holder without a letter, -1 without a holder
    requests      [number, id, queue or reason of its end, letters, prompt tokens, tokens found in the prefix cache, the
                  runs of blocks that held those, TTFT in ms, generated tokens]
    grown         [number, generated tokens] of requests of which nothing else has changed
    figures       [seconds, step, running, waiting, swapped, generated tokens, tokens looked up in the prefix cache,
                  tokens found there, blocks held, TTFT in ms], one per version; the tokens are sums since the start.
                  If some layers have a window, also: [blocks held in each group], blocks that windows have passed
    error         why the watch can no longer follow the events; only if that is so
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import msgspec

from minipaged import events as ev
from minipaged.engine.engine import Engine
from minipaged.events import HOLE, Event
from minipaged.replay.state import LETTERS, PoolState, State

INTERVAL = 0.1
"""Seconds between two frames of a page."""
SLICE = 0.002
"""Seconds of folding before the event loop may run other tasks."""
LONGEST_BACKLOG = 20_000
"""The number of events that may wait in the backlog. Beyond it the engine's thread helps to fold them."""
KEPT_FIGURES = 600
KEPT_REQUESTS = 64
"""The number of ended requests that are kept."""
QUIET = 10.0
"""Seconds without a change after which a page gets a keep-alive. It shows each side that the other is still there."""
NOBODY = -1
PLACES = {letter: place for place, letter in enumerate(LETTERS)}


@dataclass(eq=False, slots=True)
class WatchedRequest:
    """A request in the page's list."""

    number: int
    name: str
    num_prompt_tokens: int
    arrived: float
    """The time of arrival, in seconds on the watch's clock."""
    num_generated: int = 0
    found: tuple[int, ...] = ()
    """The cached blocks that the request's first block table began with."""
    num_found: int = 0
    """The number of its tokens in those blocks."""
    ttft: float | None = None
    """Seconds from arrival to the first token."""
    ended: str = ""
    """Why the request ended; empty while it has not."""
    changed: int = 0
    """The version of the last change."""
    told: int = 0
    """The version of the last change of any field but `num_generated`."""


class Watch:
    """A listener that follows one engine's events from the first one on, and makes frames for any number of pages.

    The engine's thread calls the watch with events. Call `frames` and `close` in one event loop. `clock` returns
    seconds.
    """

    def __init__(self, *, interval: float = INTERVAL, clock: Callable[[], float] = time.perf_counter) -> None:
        self.state = State()
        self.error = ""
        """Why the watch can no longer follow the events; empty while it can."""
        self._interval = interval
        self._clock = clock
        self._began = clock()
        self._backlog: deque[tuple[float, Event]] = deque()
        self._lock = Lock()  # held while folding, and while reading the folded state
        self._in_turn = asyncio.Lock()  # pages fold one after another
        self._closed = False
        self._next_fold = 0.0
        self._version = 0  # of the last complete state; events that are being folded belong to the next version
        self._dirty = False  # whether an event of the next version has been folded
        self._last_frame = (0, 0, b"")
        self._forget_run()

    def _forget_run(self) -> None:
        """Forget everything about the run, because another one begins."""
        self._whole_since = self._version + 1  # a page that has not seen this version gets a whole frame
        self._device: OrderedDict[int, int] = OrderedDict()  # block -> version of its last change, sorted by version
        self._host: OrderedDict[int, int] = OrderedDict()
        self._requests: OrderedDict[str, WatchedRequest] = OrderedDict()  # sorted by their last changes
        self._ended: deque[WatchedRequest] = deque()
        self._figures: deque[tuple[int, tuple[Any, ...]]] = deque(maxlen=KEPT_FIGURES)
        self._num_requests = self._num_queried = 0
        self._ttft: float | None = None  # the longest one since the last figures

    @classmethod
    def of(cls, engine: Engine) -> Watch:
        """Make a watch of an engine that has not run yet. Its pages show the engine's memory from the beginning."""
        watch, config = cls(), engine.config
        sizes = (config.num_blocks, config.num_swap_blocks, config.block_size, config.max_model_len)
        watch(ev.EngineStarted(*sizes, config.group_windows))
        engine.listeners.append(watch)  # the engine sends EngineStarted again, before its first other event
        return watch

    # --- For the engine's thread ------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        """Add an event to the backlog. If that is too long, fold two events."""
        self._backlog.append((self._clock(), event))
        over = len(self._backlog) - LONGEST_BACKLOG
        if over > 0 and self._lock.acquire(blocking=over > LONGEST_BACKLOG):  # the event loop may be folding now
            try:
                self._fold(2)
            finally:
                self._lock.release()

    @property
    def now(self) -> float:
        """Seconds since the watch began, as in the figures."""
        return self._clock() - self._began

    # --- For the event loop -----------------------------------------------------------------------

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the frames for one page: first the whole state, then changes. An empty frame is a keep-alive."""
        seen, last = 0, self._clock()
        while not self._closed:
            await self._catch_up()
            if seen < self._version:
                seen, frame = self._version, self._frame_since(seen)
                last = self._clock()
                yield frame
            elif self._clock() - last >= QUIET:
                last = self._clock()
                yield b""
            await asyncio.sleep(self._interval)

    def close(self) -> None:
        """End the frames of all pages, within one interval."""
        self._closed = True

    async def _catch_up(self) -> None:
        """Fold the backlog, unless that was done a moment ago for another page."""
        async with self._in_turn:
            if self._clock() < self._next_fold:
                return
            remaining = len(self._backlog)  # events that come meanwhile wait for the next call
            while remaining > 0:
                with self._lock:
                    remaining -= self._fold(remaining, until=self._clock() + SLICE)
                await asyncio.sleep(0)
            with self._lock:
                self._end_version()
            self._next_fold = self._clock() + self._interval * 0.9  # 0.9, because a page may wake a little early

    def _end_version(self) -> None:
        """Start a new version with new figures, if anything was folded since the last one."""
        if not self._dirty:
            return
        self._dirty = False
        self._version += 1
        state = self.state
        ttft, self._ttft = self._ttft, None
        figures: tuple[Any, ...] = (
            round(self.now, 3),
            state.step,
            len(state.running),
            len(state.waiting) - state.num_swapped,
            state.num_swapped,
            state.num_generated,
            self._num_queried,
            state.counts["tokens found in cache"],
            len(state.device.holders),
            _milliseconds(ttft),
        )
        if any(state.group_windows):
            figures += (state.held_by_group, state.counts["blocks passed"])
        self._figures.append((self._version, figures))

    # --- Folding ----------------------------------------------------------------------------------

    def _fold(self, most: int, until: float = float("inf")) -> int:
        """Fold at most `most` events of the backlog, and stop at the time `until`. Return the number of folded events,
        or `most` if none is left."""
        for done in range(most):
            if not self._backlog:
                break  # another thread has folded the rest
            if done % 16 == 15 and self._clock() >= until:
                return done
            moment, event = self._backlog.popleft()
            if self.error:
                continue
            self._dirty = True
            try:
                self._follow(event, moment)
            except (LookupError, ValueError) as error:  # must not stop the engine
                self.error = f"{event.name} does not follow from what happened before: {error!r}"
        return most

    def _follow(self, event: Event, moment: float) -> None:
        """Apply an event to the state, and note which blocks and requests it changes."""
        state, device = self.state, self._device
        match event:
            case ev.TokensComputed():
                sequence = state.sequences[event.sequence]
                first = sequence.num_computed // state.block_size
                begins = not sequence.table
                state.apply(event)
                self._touch(device, sequence.table[first * sequence.num_groups :])
                if begins:
                    self._tell(sequence.request.name)
            case ev.TokenGenerated():
                state.apply(event)
                self._generated(event.request, moment)
            case ev.BlockCopied():
                state.apply(event)
                self._touch(device, (event.source, event.destination))
            case ev.BlocksFreed():
                sequence = state.sequences[event.sequence]
                self._touch(self._host if sequence.swapped else device, event.blocks)
                state.apply(event)
                self._tell(sequence.request.name)
            case ev.PrefixReused():
                state.apply(event)
                self._touch(device, [block for block in event.blocks if block != HOLE])
                self._reused(event)
            case ev.BlocksRolledBack():
                state.apply(event)
                sequence = state.sequences[event.sequence]
                self._touch(device, (*sequence.table[-sequence.num_groups :], *event.blocks))
                self._tell(sequence.request.name)
            case ev.BlocksPassed():
                state.apply(event)
                self._touch(device, event.blocks)
                self._tell(state.sequences[event.sequence].request.name)
            case ev.BlockDemoted() | ev.HostBlockDropped():
                state.apply(event)
                self._touch(self._host, (event.host_block,))
            case ev.BlocksLoaded() | ev.BlocksPromoted():
                state.apply(event)
                blocks = event.blocks if isinstance(event, ev.BlocksLoaded) else [block for _, block in event.pairs]
                self._touch(device, blocks)
                self._tell(state.sequences[event.sequence].request.name)
            case ev.SwappedOut() | ev.SwappedIn():
                state.apply(event)
                for one, other in event.pairs:
                    on_device, on_host = (one, other) if isinstance(event, ev.SwappedOut) else (other, one)
                    self._touch(device, (on_device,))
                    self._touch(self._host, (on_host,))
                self._tell(event.request)
            case ev.BlockCached() | ev.BlockEvicted():
                state.apply(event)
                self._touch(device, (event.block,))
            case ev.BlockDeduplicated():
                state.apply(event)
                self._touch(device, (event.own, event.cached))
            case ev.SequenceForked():
                state.apply(event)
                parent = state.sequences[event.parent]
                self._touch(self._host if parent.swapped else device, parent.blocks)
                self._tell(event.request)
            case _:
                state.apply(event)
                self._follow_request(event, moment)

    def _follow_request(self, event: Event, moment: float) -> None:
        match event:
            case ev.EngineStarted():
                self._forget_run()
            case ev.RequestArrived():
                if earlier := self._requests.get(event.request):  # it has ended, and its id is used again
                    self._forget(earlier)
                prompt = len(event.prompt_token_ids)
                self._requests[event.request] = WatchedRequest(self._num_requests, event.request, prompt, moment)
                self._num_requests += 1
                self._tell(event.request)
            case ev.RequestAdmitted():
                self._num_queried += event.num_looked_up
                self._tell(event.request)
            case ev.RequestPreempted() | ev.SequenceFinished():
                self._tell(event.request)
            case ev.RequestFinished():
                self._tell(event.request)
                self._end(self._requests[event.request], event.reason)
            case ev.StepFailed():
                for name in event.requests:
                    self._tell(name)

    def _touch(self, changed: OrderedDict[int, int], blocks: Iterable[int]) -> None:
        """Note that these blocks change in the next version."""
        for block in blocks:
            changed[block] = self._version + 1
            changed.move_to_end(block)

    def _tell(self, name: str) -> None:
        """Note that a request changes in the next version, in more than its number of generated tokens."""
        request = self._requests[name]
        request.changed = request.told = self._version + 1
        self._requests.move_to_end(name)

    def _generated(self, name: str, moment: float) -> None:
        request = self._requests[name]
        request.num_generated += 1
        if request.ttft is None:
            request.ttft = moment - request.arrived
            self._ttft = max(self._ttft or 0.0, request.ttft)
            self._tell(name)
        request.changed = self._version + 1
        self._requests.move_to_end(name)

    def _reused(self, event: ev.PrefixReused) -> None:
        name = self.state.sequences[event.sequence].request.name
        request = self._requests[name]
        if event.source == "cache" and request.ttft is None and not request.found:  # not after a preemption
            request.found, request.num_found = event.held, event.num_found(self.state.block_size)
        self._tell(name)

    def _end(self, request: WatchedRequest, reason: str) -> None:
        request.ended = reason
        self._ended.append(request)
        if len(self._ended) > KEPT_REQUESTS:
            self._forget(self._ended[0])

    def _forget(self, request: WatchedRequest) -> None:
        """Forget an ended request. A page that has not seen its end will get a whole frame."""
        self._ended.remove(request)
        del self._requests[request.name]
        self._whole_since = max(self._whole_since, request.changed)

    # --- Frames -----------------------------------------------------------------------------------

    def _frame_since(self, seen: int) -> bytes:
        """Return the frame with the changes since version `seen`. Pages that have seen the same version share it."""
        if self._last_frame[:2] != (seen, self._version):
            with self._lock:
                self._last_frame = (seen, self._version, msgspec.json.encode(self._tell_since(seen)))
        return self._last_frame[2]

    def _tell_since(self, seen: int) -> dict[str, Any]:
        state = self.state
        frame: dict[str, Any] = {}
        if seen < self._whole_since:
            seen = 0
            sizes = (state.device.num_blocks, state.host.num_blocks, state.block_size, state.max_model_len)
            frame |= {"whole": True, "sizes": (*sizes, state.group_windows)}
        if device := self._runs(state.device, _newer(self._device, seen)):
            frame["device"] = device
        if host := self._runs(state.host, _newer(self._host, seen)):
            frame["host"] = host
        changed = []
        for request in reversed(self._requests.values()):
            if request.changed <= seen:
                break
            changed.append(request)
        if told := [self._row(request) for request in changed if request.told > seen]:
            frame["requests"] = told
        if grown := [(one.number, one.num_generated) for one in changed if one.told <= seen]:
            frame["grown"] = grown
        frame["figures"] = [figures for version, figures in self._figures if version > seen]
        if self.error:
            frame["error"] = self.error
        return frame

    def _runs(self, pool: PoolState, blocks: list[int]) -> list[list[int]]:
        """Return the state of these blocks. Neighbours with equal states are joined to one run."""
        runs: list[list[int]] = []
        cached = self.state.cached if pool is self.state.device else self.state.demoted
        sequences, holders_of, filled = self.state.sequences, pool.holders, pool.filled
        end, before = -1, None
        for block in sorted(blocks):
            is_cached = block in cached
            if holders := holders_of.get(block):
                letter = PLACES.get(sequences[holders[0]].letter, len(LETTERS))
                cell = (letter, len(holders), filled[block], int(is_cached))
            else:
                cell = (NOBODY, 0, self.state.block_size if is_cached else 0, int(is_cached))
            if block == end and cell == before:
                runs[-1][1] += 1
            else:
                runs.append([block, 1, *cell])
                before = cell
            end = block + 1
        return runs

    def _row(self, request: WatchedRequest) -> tuple[Any, ...]:
        live = self.state.requests.get(request.name) if not request.ended else None
        return (
            request.number,
            request.name,
            live.queue if live else request.ended,
            "".join(sequence.letter for sequence in live.sequences) if live else "",
            request.num_prompt_tokens,
            request.num_found,
            _runs_of(request.found),
            _milliseconds(request.ttft),
            request.num_generated,
        )


def _newer(changed: OrderedDict[int, int], seen: int) -> list[int]:
    """Return the blocks that changed after version `seen`."""
    found = []
    for block in reversed(changed):
        if changed[block] <= seen:
            break
        found.append(block)
    return found


def _runs_of(blocks: Iterable[int]) -> list[list[int]]:
    """Group successive numbers into runs [first, number]: 7, 8, 9, 4 -> [7, 3], [4, 1]."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    return runs


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)
