"""Write a recording of the pictures: an animated picture (.svg) or a terminal session (.cast).

- An SVG is self-contained and has no links. Each row of the screen is a strip with all lines that the row ever shows,
  one below another, behind a window that shows one of them. CSS alone moves the strips at the right times. The
  animation begins with the picture that has the most blocks held, and shows the earlier pictures when it repeats. A
  user who prefers reduced motion sees only that picture.
- A .cast is asciinema's format, version 2: JSON Lines of (seconds, "o", output to the terminal).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TextIO

from rich.cells import cell_len
from rich.color import Color, ColorSystem
from rich.segment import Segment
from rich.style import Style

from minipaged.demo.view import BASIC_COLORS, COLORS, Frame, Line, changes
from minipaged.errors import InvalidRequest

LONGEST_SECONDS = 4.0
"""The longest time for which a picture is shown."""
LAST_SECONDS = 3.0
"""The time for which the last picture is shown before the animation repeats."""
SUFFIXES = (".svg", ".cast")

SVG_SECONDS = 0.15
"""The shortest time for which an SVG shows a picture."""
COLUMN, ROW = 8.4, 18
"""The width and height of a character, in units of the picture."""
MARGIN = 10
STYLE = """
svg{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
text{fill:#d4d7dd;dominant-baseline:central;white-space:pre}rect{fill:#d4d7dd;height:16px}
.p{fill:#16181d;height:100%}.b{font-weight:bold}.d{opacity:.55}.i{font-style:italic}.u{text-decoration:underline}
.n{fill:#16181d;font-weight:bold}
@media(prefers-color-scheme:light){text,rect{fill:#24272e}.p,.n{fill:#fbfbfa}}
.s{animation-duration:DURATIONs;animation-iteration-count:infinite;animation-timing-function:step-end;animation-delay:-FIRSTs}
@media(prefers-reduced-motion:reduce){.s{animation-play-state:paused}}
"""


@dataclass(slots=True)
class Screencast:
    """The pictures of a show, with their times, and the file to write them to."""

    path: Path
    frames: list[tuple[float, Frame]] = field(default_factory=list)
    _clock: float = 0.0
    _last: float | None = None

    def __post_init__(self) -> None:
        if self.path.suffix not in SUFFIXES:
            raise InvalidRequest(f"--record is {self.path}; its name must end in {' or '.join(SUFFIXES)}")
        try:
            self.path.open("a", encoding="utf-8").close()  # fail before the show rather than after it
        except OSError as error:
            raise InvalidRequest(f"cannot write the recording to {self.path}: {error.strerror}") from None

    def add(self, now: float, frame: Frame) -> None:
        """Add the picture that is shown at time `now`. Long waits, such as a user's pause, are shortened."""
        if self._last is not None:
            self._clock += min(now - self._last, LONGEST_SECONDS)
        self._last = now
        if self.frames and self._clock - self.frames[-1][0] < 1e-3:
            self.frames.pop()
        self.frames.append((self._clock, frame))

    def save(self) -> None:
        """Write the file in the format of its suffix."""
        if not self.frames:
            return
        with self.path.open("w", encoding="utf-8") as file:
            (self._write_cast if self.path.suffix == ".cast" else self._write_svg)(file)

    @property
    def size(self) -> tuple[int, int]:
        """The most columns and the most lines of any picture."""
        frames = [frame for _, frame in self.frames]
        return max(frame.width for frame in frames), max(len(frame.lines) for frame in frames)

    # --- asciinema --------------------------------------------------------------------------------

    def _write_cast(self, file: TextIO) -> None:
        width, height = self.size
        header = {"version": 2, "width": width, "height": height, "env": {"TERM": "xterm-256color"}}
        print(json.dumps(header), file=file)
        shown: list[str] = []
        for at, frame in self.frames:
            lines = frame.ansi(ColorSystem.EIGHT_BIT)
            start = "" if shown else "\x1b[?25l"
            print(json.dumps([round(at, 3), "o", start + changes(lines, shown)], ensure_ascii=False), file=file)
            shown = lines
        print(json.dumps([round(self.frames[-1][0] + LAST_SECONDS, 3), "o", "\x1b[?25h"]), file=file)

    # --- SVG --------------------------------------------------------------------------------------

    def _write_svg(self, file: TextIO) -> None:
        columns, rows = self.size
        ends = [at for at, _ in self.frames[1:]] + [float("inf")]
        frames = [(at, frame) for (at, frame), end in zip(self.frames, ends, strict=True) if end - at >= SVG_SECONDS]
        start, duration = frames[0][0], frames[-1][0] - frames[0][0] + LAST_SECONDS
        strips = [
            _strip(
                row,
                columns,
                [((at - start) / duration, frame.lines[row] if row < len(frame.lines) else []) for at, frame in frames],
            )
            for row in range(rows)
        ]
        width, height = columns * COLUMN + 2 * MARGIN, rows * ROW + 2 * MARGIN
        fullest = max(frames, key=lambda shown: _held(shown[1]))[0] - start + SVG_SECONDS / 2
        style = STYLE.replace("DURATION", f"{duration:.2f}").replace("FIRST", f"{fullest:.2f}")
        file.write(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'xml:space="preserve"><style>{style}{_color_classes()}</style>'
            f'<rect class="p" width="100%" rx="8"/>\n{"".join(strips)}</svg>\n'
        )


def _held(frame: Frame) -> int:
    """The number of columns in reverse video, which shows held blocks."""
    return sum(cell_len(text) for line in frame.lines for text, style, _ in line if style and style.reverse)


def _strip(row: int, columns: int, lines: list[tuple[float, Line]]) -> str:
    """The SVG of all lines that one row ever shows, with their times. `lines`: start times, from 0 to 1, and lines."""
    places: dict[str, int] = {}
    moments: list[tuple[float, int]] = []
    for at, line in lines:
        place = places.setdefault(_svg_line(line), len(places))
        if not moments or moments[-1][1] != place:
            moments.append((at, place))
    if set(places) == {""}:
        return ""
    drawn = "".join(
        f'<g transform="translate(0,{ROW * i + ROW // 2})">{line}</g>\n' for line, i in places.items() if line
    )
    window = f'<svg x="{MARGIN}" y="{MARGIN + row * ROW}" width="{columns * COLUMN:g}" height="{ROW}">'
    if len(moments) == 1:
        return f"{window}{drawn}</svg>\n"
    jumps = "".join(f"{100 * at:.2f}%{{transform:translateY({-ROW * place}px)}}" for at, place in moments)
    keyframes = f"<style>@keyframes k{row}{{{jumps}}}</style>"
    return f'{keyframes}{window}<g class="s" style="animation-name:k{row}">{drawn}</g></svg>\n'


def _svg_line(line: Line) -> str:
    """The SVG of one line: its texts, and rectangles behind those in reverse video."""
    parts, column = [], 0
    for text, style, _ in Segment.simplify(line):
        parts.append(_svg_piece(text, style or Style(), column))
        column += cell_len(text)
    return "".join(parts)


def _svg_piece(text: str, style: Style, column: int) -> str:
    bare = text.strip(" ")
    color = f"c{style.color.number}" if style.color is not None else ""
    drawn = ""
    if style.reverse:
        drawn = f'<rect x="{column * COLUMN:.4g}" y="-8" width="{cell_len(text) * COLUMN:.4g}"{_class(color)}/>'
    if not bare:
        return drawn
    start = column + cell_len(text[: len(text) - len(text.lstrip(" "))])
    marks = {"b": style.bold and not style.reverse, "d": style.dim, "i": style.italic, "u": style.underline}
    classes = _class("n" if style.reverse else color, *(mark for mark, given in marks.items() if given))
    size = f'x="{start * COLUMN:.4g}" textLength="{cell_len(bare) * COLUMN:.4g}"'
    return f"{drawn}<text {size}{classes}>{escape(bare, quote=False)}</text>"


def _class(*names: str) -> str:
    joined = " ".join(name for name in names if name)
    return f' class="{joined}"' if joined else ""


def _color_classes() -> str:
    """CSS classes for the view's colours, by number."""
    colors = {number: Color.from_ansi(number).get_truecolor().hex for number in (*COLORS, *BASIC_COLORS)}
    return "".join(f".c{number}{{fill:{color}!important}}" for number, color in colors.items())
