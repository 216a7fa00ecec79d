"""Plays a run on a screen: at a pace that can be followed, with a pause, forwards and back.

A run is a `Timeline` that grows whenever its engine is asked for one more step. The player is at some place of it:

    events     |=================================|.................
               0            the place            what has happened   what the engine has yet to do

Playing moves the place on, from one event worth a look to the next, and stays there for as long as it is worth. Only
when it has come to the end is the engine asked for another step. So whoever has paused can step back and on again
through what has happened, and stepping on from its end runs the engine.

Everything is done in one thread. A picture that is drawn while nothing else has to be done costs nobody anything; when
the engine is slower than the pace, pictures may take `DRAWING_SHARE` of its time, and those in between are left out.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from minipaged.demo.recording import Screencast
from minipaged.demo.terminal import Key
from minipaged.demo.view import Caption, Frame, Note, PlayerStatus, StateView
from minipaged.events import (
    BeamFinished,
    BlockCached,
    BlocksFreed,
    RequestAdmitted,
    SequenceFinished,
    SequenceForked,
    TokenGenerated,
    TokensComputed,
)
from minipaged.replay.state import State
from minipaged.replay.teller import Topic, tell
from minipaged.replay.timeline import Timeline

KEYS = "space pause   ← → step back, on   s next scene   q quit"

SECONDS: dict[Topic, float] = {
    "start": 0.5,
    "step": 0.06,
    "arrive": 0.1,
    "join": 0.6,
    "grow": 0.5,
    "prefix": 1.5,
    "load": 2.0,
    "same": 0.8,
    "evict": 0.8,
    "fork": 2.5,
    "copy": 2.0,
    "beams": 1.6,
    "leave": 0.6,
    "refuse": 2.0,
    "preempt": 3.0,
    "swap": 2.0,
    "return": 2.5,
    "fail": 3.0,
}
"""How long an event is worth a look, the first times. What is not named here is passed over."""
QUIET = (TokenGenerated, BlockCached, BeamFinished, BlocksFreed, SequenceFinished, SequenceForked, RequestAdmitted)
"""Events that are told only to who steps through them one by one. (Some come thousands of times a second.)"""
HISTORY = SECONDS.keys() - {"step"}
"""What of the past is shown."""
FULL_TIMES = 2
"""After so many of a kind, the next ones take less and less time."""
OPENING_SECONDS = 2.5
"""For reading what to watch for."""
CLOSING_SECONDS = 6.0
"""For reading what was measured."""
DRAWING_SHARE = 0.04
"""Of the time that the engine takes."""
FRAME_SECONDS = 0.08
"""Pictures come no faster than that."""
SHOWN_NOTES = 6
MOST_NOTES = 2000
"""Sentences kept to be shown again when stepping back."""


class NextScene(Exception):
    """The user wants to see the next scene."""


class Quit(Exception):
    """The user has seen enough."""


class Screen(Protocol):
    """What pictures are shown on: a `Terminal`, or a `Film` for a recording without one."""

    def now(self) -> float:
        """Seconds on its clock."""

    def size(self) -> tuple[int, int]: ...

    def show(self, frame: Frame) -> None: ...

    def key(self, seconds: float) -> Key | None:
        """The next key, waiting for it at most so long."""


class Film:
    """A screen that nobody looks at: time passes only where somebody would have waited."""

    def __init__(self, width: int, height: int) -> None:
        self._size = (width, height)
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def size(self) -> tuple[int, int]:
        return self._size

    def show(self, frame: Frame) -> None:
        pass

    def key(self, seconds: float) -> Key | None:
        self._now += max(0.0, seconds)
        return None


class Player:
    """Plays runs on one screen, one after the other.

    `speed`: how many times as fast as the pace above (infinity: no pace, as fast as the engine). `recording` is given
    every picture. `keys`: whether there is somebody to press them.
    """

    def __init__(
        self,
        screen: Screen,
        view: StateView,
        *,
        speed: float = 1.0,
        recording: Screencast | None = None,
        keys: bool = True,
    ) -> None:
        self.view = view
        self.caption = Caption()
        self.engine_seconds = 0.0
        """That the engine has run."""
        self.drawing_seconds = 0.0
        """That went into following events, telling and drawing them."""
        self._picture_seconds = 0.0  # of it, for pictures alone
        self._screen = screen
        self._speed = speed
        self._recording = recording
        self._keys = KEYS if keys else ""
        self._timeline = Timeline()
        self._advance: Callable[[], bool] = lambda: False
        self._notes: list[Note] = []
        self._told: Counter[Topic] = Counter()
        self._paused = False
        self._here: Note | None = None  # what the last key stepped to
        self._drawn = float("-inf")  # when, on the screen's clock
        self._due = 0.0  # when the next event is to be shown

    # --- One run ----------------------------------------------------------------------------------

    def play(
        self,
        timeline: Timeline,
        advance: Callable[[], bool],
        *,
        run: str = "",
        questions: Mapping[str, str] | None = None,
        paced: bool = True,
        ranks: Sequence[str] = (),
        beside: State | None = None,
    ) -> None:
        """Show a run to its end. `advance` makes the engine do one more step (False: there is nothing left to do).

        `paced`: stay where something happens; otherwise run as fast as the engine does. `ranks`, `beside`: see
        `Caption`. Raises NextScene and Quit.
        """
        self._timeline, self._advance = timeline, advance
        self._notes, self._told, self._here = [], Counter(), None
        self.view.questions = {} if questions is None else questions  # may be filled as the run goes on
        self.caption = replace(self.caption, run=run, measured=(), ranks=tuple(ranks), beside=beside)
        self._due = self._screen.now()
        while timeline.at_end and self._run_engine():
            pass  # until there is something to show
        if not timeline.at_end:
            self._forward()  # the sizes of everything
        self._wait(OPENING_SECONDS)
        while True:
            if self._paused:
                self._wait_paused()
            elif timeline.at_end and not self._run_engine():
                break
            else:
                self._wait(self._move_on() if paced else self._move_to_end())
        self._draw()

    def close(self, measured: tuple[str, ...], *, seconds: float = CLOSING_SECONDS) -> None:
        """Show what was measured, until a key is pressed or some time has gone by."""
        self.caption = replace(self.caption, measured=measured)
        self._due = self._screen.now() + seconds / self._speed
        self._draw()
        while (left := self._due - self._screen.now()) > 0:
            key = self._screen.key(left)
            if key == "resize":
                self._draw()
            elif key == "q":
                raise Quit
            elif key is not None:
                return

    # --- Moving on --------------------------------------------------------------------------------

    def _run_engine(self) -> bool:
        started = time.perf_counter()
        try:
            return self._advance()
        finally:
            self.engine_seconds += time.perf_counter() - started

    def _forward(self) -> Topic | None:
        """Follow one event; what kind of thing it was, if it may be worth a look."""
        timeline = self._timeline
        event = timeline.next_event()
        if isinstance(event, QUIET) or (isinstance(event, TokensComputed) and not event.new_blocks):
            timeline.forward()
            return None
        sentence = tell(timeline.state, event)
        timeline.forward()
        if sentence is None:
            return None
        new = not self._notes or timeline.position > self._notes[-1].position  # else it was told before
        if new and sentence.topic in HISTORY:
            self._notes.append(Note(timeline.position, timeline.state.step, sentence))
            if len(self._notes) > 2 * MOST_NOTES:
                del self._notes[:MOST_NOTES]
        return sentence.topic

    def _move_on(self) -> float:
        """Go to the next event that is worth a look; how long."""
        started = time.perf_counter()
        seconds = 0.0
        while not seconds and not self._timeline.at_end:
            topic = self._forward()
            if topic in SECONDS:
                self._told[topic] += 1
                rarity = 1.0 if topic == "step" else min(1.0, FULL_TIMES / self._told[topic])
                seconds = SECONDS[topic] * rarity**1.5
        self.drawing_seconds += time.perf_counter() - started
        return seconds

    def _move_to_end(self) -> float:
        started = time.perf_counter()
        while not self._timeline.at_end:
            self._forward()
        self.drawing_seconds += time.perf_counter() - started
        return 0.0

    def _step_to(self, position: int) -> None:
        """Stop after so many events, and tell the last of them, whatever it is."""
        timeline = self._timeline
        timeline.seek(position - 1)
        self._here = None
        if timeline.position < position and not timeline.at_end:
            event, state = timeline.next_event(), timeline.state
            sentence = tell(state, event, self.view.word if self.view.decode else None)
            self._forward()
            if sentence:
                self._here = Note(timeline.position, timeline.state.step, sentence)

    # --- Waiting, and keys ------------------------------------------------------------------------

    def _wait(self, seconds: float) -> None:
        """Show where we are until its time is over, or a key is pressed."""
        now = self._screen.now()
        self._due = max(self._due, now - FRAME_SECONDS) + seconds / self._speed
        left = self._due - now
        affordable = left > 0 or self._picture_seconds <= DRAWING_SHARE * self.engine_seconds
        if left >= FRAME_SECONDS or (affordable and now - self._drawn >= FRAME_SECONDS):
            self._draw()
        while True:
            key = self._screen.key(max(0.0, self._due - self._screen.now()))
            if key is None:
                return
            self._obey(key)
            if self._paused:
                return

    def _wait_paused(self) -> None:
        key = self._screen.key(3600.0)
        if key is not None:
            self._obey(key)

    def _obey(self, key: Key) -> None:
        match key:
            case "q":
                raise Quit
            case "s":
                self._paused = False
                raise NextScene
            case "space":
                self._paused = not self._paused
                self._here = None
                self._due = self._screen.now()
            case "right":
                self._paused = True
                while self._timeline.at_end and self._run_engine():
                    pass  # until something has happened
                self._step_to(self._timeline.position + 1)
            case "left":
                self._paused = True
                self._step_to(max(self._timeline.first + 1, self._timeline.position - 1))
            case "resize":
                pass
            case "other":
                return
        spent = self._picture_seconds
        self._draw()
        self._picture_seconds = spent  # what somebody asked for is not counted against what follows

    # --- Drawing ----------------------------------------------------------------------------------

    def _draw(self) -> None:
        started = time.perf_counter()
        timeline = self._timeline
        status = PlayerStatus(timeline.position, len(timeline), self._paused, self._keys)
        width, height = self._screen.size()
        frame = self.view.frame(timeline.state, width, height, self.caption, self._latest_notes(), status)
        self._screen.show(frame)
        self._drawn = self._screen.now()
        if self._recording:
            self._recording.add(self._drawn, frame)
        seconds = time.perf_counter() - started
        self._picture_seconds += seconds
        self.drawing_seconds += seconds

    def _latest_notes(self) -> list[Note]:
        """The last few sentences that were worth a look; and that of the place where we are, if we stepped there."""
        place = bisect_right(self._notes, self._timeline.position, key=lambda note: note.position)
        shown = self._notes[max(0, place - SHOWN_NOTES) : place]
        if self._here and (not shown or shown[-1].position < self._here.position):
            shown.append(self._here)
        return shown
