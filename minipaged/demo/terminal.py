"""A terminal that shows pictures and reads keys, and is restored exactly afterwards.

Inside `with Terminal(...)` the alternate screen is shown, without a cursor, and keys are read as they are pressed.
The terminal is restored at every end of the block: the end of the show, an exception, Ctrl-C, a signal to terminate,
or Ctrl-Z (until the process continues). Only lines that have changed are written.

This needs a POSIX terminal. `is_live` says whether there is one; otherwise nothing in this module is used.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Literal, TextIO

from rich.color import ColorSystem
from rich.console import Console

from minipaged.demo.view import Frame, changes

try:
    import termios
    import tty
except ImportError:  # Windows
    termios = tty = None  # type: ignore[assignment]

Key = Literal["space", "right", "left", "s", "q", "resize", "other"]

KEYS: dict[bytes, Key] = {
    b" ": "space",
    b"\x1b[C": "right",
    b"\x1bOC": "right",
    b"\x1b[D": "left",
    b"\x1bOD": "left",
    b"s": "s",
    b"q": "q",
    b"S": "s",
    b"Q": "q",
}
BEGUN = (b"\x1b", b"\x1b[", b"\x1bO")
"""The beginnings of an arrow key's code. The rest may arrive later on a slow line. The Escape key is one of them."""
BEGUN_SECONDS = 0.05
SEVERAL_BYTES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.)", re.DOTALL)
"""The code of any other key with several bytes."""
ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""Codes that show the alternate screen, hide the cursor, turn off line wrapping, and clear the screen."""
LEAVE = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
RESIZE_SECONDS = 0.1
"""Seconds between checks of the terminal's size while waiting for a key."""


def is_live(output: TextIO, console: Console) -> bool:
    """Whether the output can be drawn on and keys can be read."""
    both = (output, sys.stdin)  # None if they are closed
    return termios is not None and all(one and one.isatty() for one in both) and not console.is_dumb_terminal


class Terminal:
    """The screen and the keys of one terminal."""

    def __init__(self, console: Console, output: TextIO | None = None) -> None:
        self.colors = color_system(console)
        self._output = output or sys.stdout
        self._shown: list[str] = []
        self._size = self.size()
        self._pressed = b""
        self._before: list[Any] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Terminal:
        self._before = termios.tcgetattr(sys.stdin)
        self._handlers = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._terminate),
            signal.SIGHUP: signal.signal(signal.SIGHUP, self._terminate),
            signal.SIGQUIT: signal.signal(signal.SIGQUIT, self._terminate),
            signal.SIGTSTP: signal.signal(signal.SIGTSTP, self._suspend),
        }
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the restoring
        self._give_back()
        signal.signal(signal.SIGINT, interrupt)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    # --- The player's Screen ----------------------------------------------------------------------

    def now(self) -> float:
        return time.perf_counter()

    def size(self) -> tuple[int, int]:
        """The number of columns and lines."""
        try:
            columns, lines = os.get_terminal_size(self._output.fileno())
        except OSError:
            return 80, 24
        return columns or 80, lines or 24  # a terminal of unknown size reports 0

    def show(self, frame: Frame) -> None:
        """Draw a frame by writing the lines that have changed."""
        lines = frame.ansi(self.colors)
        if self._size != self.size():
            self._size, self._shown = self.size(), []
        self._output.write(changes(lines, self._shown))
        self._output.flush()
        self._shown = lines

    def key(self, seconds: float) -> Key | None:
        """Wait at most `seconds` for a key. Returns "resize" if the terminal has a new size, and None for no key."""
        until = time.perf_counter() + seconds
        while True:
            if self._pressed and not (self._pressed in BEGUN and self._read(BEGUN_SECONDS)):
                return self._take_key()
            if self.size() != self._size:
                return "resize"
            left = until - time.perf_counter()
            if self._read(max(0.0, min(left, RESIZE_SECONDS))):
                if not self._pressed:  # the input was closed
                    return "q"
            elif left <= 0:
                return None

    # --- Inside -----------------------------------------------------------------------------------

    def _read(self, seconds: float) -> bool:
        """Read pressed keys. Returns False if there were none within `seconds`."""
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return False
        self._pressed += os.read(sys.stdin.fileno(), 64)
        return True

    def _take_key(self) -> Key:
        """Remove and return the first key that was pressed."""
        for code in sorted(KEYS, key=len, reverse=True):
            if self._pressed.startswith(code):
                self._pressed = self._pressed[len(code) :]
                return KEYS[code]
        unknown = SEVERAL_BYTES.match(self._pressed)
        self._pressed = self._pressed[unknown.end() if unknown else 1 :]
        return "other"

    def _take(self) -> None:
        tty.setcbreak(sys.stdin, termios.TCSADRAIN)
        self._output.write(ENTER)
        self._output.flush()
        self._shown = []

    def _give_back(self) -> None:
        with suppress(OSError, termios.error):  # the terminal may be closed
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)
        with suppress(OSError):
            self._output.write(LEAVE)
            self._output.flush()

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)  # this runs __exit__

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # sleeps here until `fg`
        signal.signal(signal.SIGTSTP, self._suspend)
        self._before = termios.tcgetattr(sys.stdin)
        self._take()
        self._size = (0, 0)  # so that everything is drawn again


def color_system(console: Console) -> ColorSystem | None:
    """The colours that rich has detected for this console; None if it has no escape sequences."""
    names = {"standard": ColorSystem.STANDARD, "256": ColorSystem.EIGHT_BIT, "truecolor": ColorSystem.TRUECOLOR}
    return names.get(console.color_system or "", ColorSystem.STANDARD if console.is_terminal else None)
