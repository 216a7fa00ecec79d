"""Play a run on a screen at a pace that the user can follow, with a pause, forwards and backwards.

A run is a `Timeline` that grows with each step of its engine. The player is at a position of it:

    events     |=================================|.................
               0            position             end of past events   future steps of the engine

Playing moves the position to the next interesting event, and stays there for a time that depends on the event. The
engine runs another step only when the position has reached the end. A user who has paused can therefore step back and
forth through the past events, and a step beyond their end runs the engine.

Everything runs in one thread. Drawing a picture while the player waits costs no time. If the engine is slower than the
pace, pictures may take `DRAWING_SHARE` of its time, and others are skipped.
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
    "pass": 0.8,
    "draft": 1.5,
    "accept": 1.5,
    "roll back": 1.0,
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
"""Seconds for which the player shows the first events of each topic. Events of other topics are skipped."""
QUIET = (TokenGenerated, BlockCached, BeamFinished, BlocksFreed, SequenceFinished, SequenceForked, RequestAdmitted)
"""Events that are described only when the user steps to them. (Some occur thousands of times a second.)"""
HISTORY = SECONDS.keys() - {"step"}
"""The topics whose sentences stay visible after their event."""
FULL_TIMES = 2
"""The number of events of a topic that get the full time. The following ones get less and less."""
OPENING_SECONDS = 2.5
"""Seconds for reading the instructions at the start of a run."""
CLOSING_SECONDS = 6.0
"""Seconds for reading the measurements at the end of a scene."""
DRAWING_SHARE = 0.04
"""The time that pictures may take, as a share of the engine's time."""
FRAME_SECONDS = 0.08
"""The shortest time between two pictures."""
SHOWN_NOTES = 6
MOST_NOTES = 2000
"""The number of sentences kept, to be shown again when the user steps back."""


class NextScene(Exception):
    """Raised when the user asks for the next scene."""


class Quit(Exception):
    """Raised when the user asks to quit."""


class Screen(Protocol):
    """The device that shows the pictures: a `Terminal`, or a `Film` for a recording without one."""

    def now(self) -> float:
        """The time on the screen's clock, in seconds."""

    def size(self) -> tuple[int, int]: ...

    def show(self, frame: Frame) -> None: ...

    def key(self, seconds: float) -> Key | None:
        """Wait at most `seconds` for a key. Returns None if none was pressed."""


class Film:
    """A screen without a user. Its clock advances only when the player waits for a key."""

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

    `speed`: a factor for the pace above (infinity: as fast as the engine). `recording` receives every picture. `keys`:
    whether there is a user who can press keys.
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
        """Seconds that the engine has run."""
        self.drawing_seconds = 0.0
        """Seconds spent on following, describing and drawing events."""
        self._picture_seconds = 0.0  # the part of them spent on pictures
        self._screen = screen
        self._speed = speed
        self._recording = recording
        self._keys = KEYS if keys else ""
        self._timeline = Timeline()
        self._advance: Callable[[], bool] = lambda: False
        self._notes: list[Note] = []
        self._told: Counter[Topic] = Counter()
        self._paused = False
        self._here: Note | None = None  # the event to which the last key stepped
        self._drawn = float("-inf")  # the time of the last picture
        self._due = 0.0  # the time to show the next event

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
        """Show a run to its end. `advance` runs one more step of the engine and returns False if there is none.

        `paced`: stop at interesting events; otherwise run as fast as the engine. `ranks`, `beside`: see `Caption`.
        Raises NextScene or Quit when the user asks for it.
        """
        self._timeline, self._advance = timeline, advance
        self._notes, self._told, self._here = [], Counter(), None
        self.view.questions = {} if questions is None else questions  # the run may add more
        self.caption = replace(self.caption, run=run, measured=(), ranks=tuple(ranks), beside=beside)
        self._due = self._screen.now()
        while timeline.at_end and self._run_engine():
            pass  # until there is something to show
        if not timeline.at_end:
            self._forward()  # the first event, which gives the sizes
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
        """Show the measurements until the user presses a key or the time is over. Raises Quit."""
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
        """Move past one event and note its sentence. Returns its topic, or None if it is not interesting."""
        timeline = self._timeline
        event = timeline.next_event()
        if isinstance(event, QUIET) or (isinstance(event, TokensComputed) and not event.new_blocks):
            timeline.forward()
            return None
        sentence = tell(timeline.state, event, self.view.word if self.view.decode else None)
        timeline.forward()
        if sentence is None:
            return None
        new = not self._notes or timeline.position > self._notes[-1].position  # otherwise it has a note already
        if new and sentence.topic in HISTORY:
            self._notes.append(Note(timeline.position, timeline.state.step, sentence))
            if len(self._notes) > 2 * MOST_NOTES:
                del self._notes[:MOST_NOTES]
        return sentence.topic

    def _move_on(self) -> float:
        """Move to the next interesting event. Returns the seconds for which to show it."""
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
        """Move to just after the first `position` events, and describe the last of them, even a quiet one."""
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
        """Show the current position for `seconds` at the set speed, and obey keys in the meantime."""
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
                    pass  # until there is an event
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
        self._picture_seconds = spent  # a picture that the user asked for does not delay later ones

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
        """The last few notes up to the current position, including that of the event to which the user stepped."""
        place = bisect_right(self._notes, self._timeline.position, key=lambda note: note.position)
        shown = self._notes[max(0, place - SHOWN_NOTES) : place]
        if self._here and (not shown or shown[-1].position < self._here.position):
            shown.append(self._here)
        return shown
