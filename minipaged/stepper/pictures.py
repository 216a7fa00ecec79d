"""Stacked bars, rows of cells, and curves as SVG, for the tutorials.

The parts of a bar differ in the pattern at their foot and in their labels, not only in colour. All colours are visible
on light and dark backgrounds. Curves differ in colour and dashes, and each has its name at its end.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FILLS = {
    "full": ("#0072b2", "#fff", ""),
    "lines": ("#e69f00", "#000", '<path d="M0 8L8 0M-2 2L2 -2M6 10L10 6" stroke="#000"/>'),
    "dots": ("#009e73", "#000", '<circle cx="4" cy="4" r="1.3" fill="#000"/>'),
    "grid": ("#cc79a7", "#000", '<path d="M0 4H8M4 0V8" stroke="#000" stroke-width=".8"/>'),
    "empty": ("none", "currentColor", ""),
}
"""Fill colours (by Okabe and Ito, who chose them for colour-blind readers), each with a text colour and a pattern."""
STRIP = 7
"""The height of the pattern at the foot of a box, which stays free of text."""
WIDTH, ROW = 480, 56
CURVES = (("#0072b2", ""), ("#c4461f", "7 4"), ("#0a7f5c", "2 4"), ("#9c4f8c", "9 3 2 3"))
"""Colours and dashes of curves. Colour-blind readers can tell the colours apart (after Okabe and Ito), on white and on
dark grey."""


@dataclass(frozen=True)
class Bars:
    """Stacked bars on one scale. `rows`: the name of each bar, and its parts from left to right as (kind, size)."""

    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]
    fills: Mapping[str, str]
    """The fill of each kind: a key of FILLS."""
    unit: str = ""
    percent: bool = False
    """Whether each part is labelled with its share of the row."""
    axis: str = ""
    """The name of the quantity on the axis, if the numbers have no unit."""

    def _repr_html_(self) -> str:
        longest = max(sum(size for _, size in parts) for _, parts in self.rows)
        scale = (WIDTH - 2) / longest
        drawn, y = [], 4
        for name, parts in self.rows:
            drawn.append(f'<text x="1" y="{y + 12}">{html.escape(name)}</text>')
            x, whole = 1.0, sum(size for _, size in parts)
            for kind, size in parts:
                drawn.append(_box(x, y + 18, size * scale, self.fills[kind], self._amount(size, whole)))
                x += size * scale
            y += ROW
        axis = self._axis(y, longest, scale)
        return _picture([*drawn, *axis], y + 40 * bool(axis), self.fills, self.as_text())

    def _axis(self, y: float, longest: float, scale: float) -> list[str]:
        """The axis below the bars; none if they are shares of different wholes."""
        wholes = [sum(size for _, size in parts) for _, parts in self.rows]
        if self.percent and min(wholes) < 0.999 * longest:
            return []
        each, name = (longest / 100, "per cent") if self.percent else (1.0, self.axis or self.unit.strip())
        drawn = [f'<path d="M1 {y}H{WIDTH - 1}" stroke="currentColor"/>']
        for tick in _ticks(longest / each * (1 + 1e-9)):
            x = 1 + tick * each * scale
            anchor = "start" if tick == 0 else "end" if x > WIDTH - 16 else "middle"
            drawn.append(f'<path d="M{x:.1f} {y}v5" stroke="currentColor"/>')
            drawn.append(f'<text x="{x:.1f}" y="{y + 18}" text-anchor="{anchor}">{tick:g}</text>')
        return [*drawn, f'<text x="{WIDTH / 2}" y="{y + 35}" text-anchor="middle">{html.escape(name)}</text>']

    def as_text(self) -> str:
        """The bars in words, for screen readers."""
        return "; ".join(
            f"{name}: "
            + ", ".join(f"{kind} {self._amount(size, sum(size for _, size in parts))}" for kind, size in parts)
            for name, parts in self.rows
        )

    def _amount(self, size: float, whole: float) -> str:
        return f"{size / whole:.0%}" if self.percent else f"{size:g}{self.unit}"


@dataclass(frozen=True)
class Cells:
    """Rows of cells of one width. `rows`: the name of each row, and its cells from left to right as (text, kind)."""

    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]]
    fills: Mapping[str, str]
    """The fill of each kind: a key of FILLS."""

    def _repr_html_(self) -> str:
        left = 12 + 9.5 * max(len(name) for name, _ in self.rows)  # on a phone letters are 17 units high
        width = min(80.0, (WIDTH - 1 - left) / max(len(cells) for _, cells in self.rows))
        drawn, y = [], 4
        for name, cells in self.rows:
            drawn.append(f'<text x="1" y="{y + 19}">{html.escape(name)}</text>')
            for i, (text, kind) in enumerate(cells):
                drawn.append(_box(left + i * width, y, width, self.fills[kind], text))
            y += 36
        return _picture(drawn, y, self.fills, self.as_text())

    def as_text(self) -> str:
        """The rows of cells in words, for screen readers."""
        return "; ".join(
            f"{name}: " + ", ".join(f"{text} {kind}".strip() for text, kind in cells) for name, cells in self.rows
        )


@dataclass(frozen=True)
class Curves:
    """Curves in one diagram, whose axes both begin at 0. `curves`: the name of each, and its points (x, y) from left to
    right, all of them 0 or more."""

    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]]
    x: str
    """The quantity on the x axis, with its unit."""
    y: str
    """The quantity on the y axis."""
    height: int = 220
    percent: bool = False
    """Whether y is a share, written in per cent."""
    notes: Sequence[str] = ()
    """Lines of text below the diagram."""

    def _repr_html_(self) -> str:
        left, right, floor = 50, 34 + 9 * max(len(name) for name, _ in self.curves), 26.0 + self.height
        most_x = max(x for _, points in self.curves for x, _ in points) or 1
        most_y = max(y for _, points in self.curves for _, y in points) or 1
        across, up = (WIDTH - left - right) / most_x, self.height / most_y

        def at(x: float, y: float) -> tuple[float, float]:
            return left + x * across, floor - y * up

        drawn = [f'<text x="1" y="14">{html.escape(self.y)}</text>']
        for tick in _ticks(most_y):
            y = at(0, tick)[1]
            drawn.append(f'<path d="M{left} {y:.1f}H{WIDTH - right}" stroke="currentColor" stroke-opacity=".25"/>')
            drawn.append(f'<text x="{left - 6}" y="{y + 5:.1f}" text-anchor="end">{self._amount(tick)}</text>')
        for tick in _ticks(most_x):
            x = at(tick, 0)[0]
            drawn.append(f'<path d="M{x:.1f} {floor}v5" stroke="currentColor"/>')
            drawn.append(f'<text x="{x:.1f}" y="{floor + 19}" text-anchor="middle">{tick:g}</text>')
        drawn.append(f'<path d="M{left} {floor}H{WIDTH - right}" stroke="currentColor"/>')
        middle = (left + WIDTH - right) / 2
        drawn.append(f'<text x="{middle}" y="{floor + 38}" text-anchor="middle">{html.escape(self.x)}</text>')
        ends = []
        for (name, points), (colour, dashes) in zip(self.curves, CURVES, strict=False):
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
            stroke = f'fill="none" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dashes}"'
            drawn.append(f'<polyline points="{line}" {stroke}/>')
            ends.append((at(*points[-1])[1], name, stroke))
        low = 0.0
        for y, name, stroke in sorted(ends):  # one name below another if curves end at the same height
            low = max(y, low + 18)
            drawn.append(f'<path d="M{WIDTH - right + 4} {low:.1f}h18" {stroke}/>')
            drawn.append(f'<text x="{WIDTH - right + 26}" y="{low + 5:.1f}">{html.escape(name)}</text>')
        y = floor + 42
        for note in self.notes:
            drawn.append(f'<text x="1" y="{y + 14}">{html.escape(note)}</text>')
            y += 22
        return _picture(drawn, y, {}, self.as_text())

    def as_text(self) -> str:
        """The curves in words, for screen readers."""
        drawn = "; ".join(
            f"{name} " + ", ".join(f"{x:g}: {self._amount(y)}" for x, y in points) for name, points in self.curves
        )
        return ". ".join([f"{self.y} over {self.x}: {drawn}", *self.notes])

    def _amount(self, y: float) -> str:
        return f"{y:.0%}" if self.percent else f"{y:.3g}"


Picture = Bars | Cells | Curves


def _ticks(most: float) -> list[float]:
    """About four to eight round numbers from 0 to `most`."""
    power = 10.0 ** math.floor(math.log10(most))
    step = next(part * power for part in (0.1, 0.2, 0.25, 0.5, 1, 2) if most / (part * power) <= 8)
    return [round(i * step, 10) for i in range(int(most / step + 1e-9) + 1)]


def _box(x: float, y: float, width: float, fill: str, text: str, height: int = 30) -> str:
    """A box, with its text if there is room for it."""
    colour, ink, pattern = FILLS[fill]
    size = f'x="{x:.1f}" width="{width:.1f}"'
    box = f'<rect {size} y="{y}" height="{height}" fill="{colour}" stroke="currentColor"/>'
    if pattern:
        box += f'<rect {size} y="{y + height - STRIP}" height="{STRIP}" fill="url(#fill-{fill})"/>'
    if width < 10 * len(text) + 4 or not text:
        return box
    middle = y + (height - STRIP) / 2 + 5  # also in boxes without a pattern, so that a row has one baseline
    label = f'<text x="{x + width / 2:.1f}" y="{middle:g}" text-anchor="middle" fill="{ink}">'
    return f"{box}{label}{html.escape(text)}</text>"


def _picture(drawn: list[str], y: float, fills: Mapping[str, str], words: str) -> str:
    """A whole picture: the elements `drawn`, which are `y` high, and below them the legend of the fills."""
    for i, (kind, fill) in enumerate(fills.items()):
        x = 1 + (i % 2) * WIDTH / 2
        drawn.append(_box(x, y + 6, 22, fill, "", height=16))
        drawn.append(f'<text x="{x + 30}" y="{y + 19}">{html.escape(kind)}</text>')
        y += 24 if i % 2 or i == len(fills) - 1 else 0  # two to a line
    patterns = "".join(
        f'<pattern id="fill-{name}" width="8" height="8" patternUnits="userSpaceOnUse">{lines}</pattern>'
        for name, (_, _, lines) in FILLS.items()
        if lines
    )
    return (  # limit the width, so that letters are at most as large as the text around the picture
        f'<svg viewBox="0 0 {WIDTH} {y + 6}" role="img" aria-label="{html.escape(words)}" '
        'xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" font-size="14" fill="currentColor" '
        f'style="max-width:{WIDTH * 7 // 6}px"><defs>{patterns}</defs>{"".join(drawn)}</svg>'
    )
