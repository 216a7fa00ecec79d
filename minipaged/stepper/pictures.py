"""Bars cut into parts, and rows of cells, as SVG: for the tutorials.

A part is told from others by its pattern and by the words beside it, not only by its colour, and it takes the colour of
the text around it, so that it can be seen on light and on dark.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FILLS = {
    "full": "",
    "lines": '<path d="M0 8L8 0M-2 2L2 -2M6 10L10 6" stroke="currentColor"/>',
    "dots": '<circle cx="4" cy="4" r="1.3" fill="currentColor"/>',
    "grid": '<path d="M0 4H8M4 0V8" stroke="currentColor" stroke-width=".8"/>',
    "empty": "",
}
WIDTH, ROW = 480, 52


@dataclass(frozen=True)
class Bars:
    """`rows`: a name, and its parts from left to right as (kind, size). All rows have one scale."""

    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]
    fills: Mapping[str, str]
    """How each kind is drawn: one of FILLS."""
    unit: str = ""
    percent: bool = False
    """Write each part as its share of its row."""

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
        return _picture(drawn, y, self.fills, self.as_text())

    def as_text(self) -> str:
        """The same in words."""
        return "; ".join(
            f"{name}: "
            + ", ".join(f"{kind} {self._amount(size, sum(size for _, size in parts))}" for kind, size in parts)
            for name, parts in self.rows
        )

    def _amount(self, size: float, whole: float) -> str:
        return f"{size / whole:.0%}" if self.percent else f"{size:g}{self.unit}"


@dataclass(frozen=True)
class Cells:
    """`rows`: a name, and its cells from left to right as (text, kind). All cells have one width."""

    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]]
    fills: Mapping[str, str]
    """How each kind is drawn: one of FILLS."""

    def _repr_html_(self) -> str:
        left = 10 + 8 * max(len(name) for name, _ in self.rows)
        width = min(80.0, (WIDTH - 1 - left) / max(len(cells) for _, cells in self.rows))
        drawn, y = [], 4
        for name, cells in self.rows:
            drawn.append(f'<text x="1" y="{y + 18}">{html.escape(name)}</text>')
            for i, (text, kind) in enumerate(cells):
                drawn.append(_box(left + i * width, y, width, self.fills[kind], text))
            y += 32
        return _picture(drawn, y, self.fills, self.as_text())

    def as_text(self) -> str:
        """The same in words."""
        return "; ".join(
            f"{name}: " + ", ".join(f"{text} {kind}".strip() for text, kind in cells) for name, cells in self.rows
        )


def _box(x: float, y: float, width: float, fill: str, text: str, height: int = 26) -> str:
    """A box, with its text where there is room for it."""
    paint = {"full": 'fill="currentColor"', "empty": 'fill="none"'}.get(fill, f'fill="url(#fill-{fill})"')
    box = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" {paint} stroke="currentColor"/>'
    if width < 8 * len(text) + 8 or not text:
        return box
    label = f'<text x="{x + width / 2:.1f}" y="{y + 18}" text-anchor="middle"'
    if fill == "full":  # letters in the colour of the page, whatever that is
        return f'{box}{label} style="fill:var(--md-default-bg-color,Canvas)">{html.escape(text)}</text>'
    outline = "stroke:var(--md-default-bg-color,Canvas);stroke-width:7px;stroke-linejoin:round;paint-order:stroke"
    return f'{box}{label} style="{outline}">{html.escape(text)}</text>'


def _picture(drawn: list[str], y: float, fills: Mapping[str, str], words: str) -> str:
    """What was drawn, y high, and below it what each fill stands for."""
    for i, (kind, fill) in enumerate(fills.items()):
        x = 1 + (i % 2) * WIDTH / 2
        drawn.append(_box(x, y + 6, 22, fill, "", height=16))
        drawn.append(f'<text x="{x + 30}" y="{y + 19}">{html.escape(kind)}</text>')
        y += 24 if i % 2 or i == len(fills) - 1 else 0  # two to a line
    patterns = "".join(
        f'<pattern id="fill-{name}" width="8" height="8" patternUnits="userSpaceOnUse">{lines}</pattern>'
        for name, lines in FILLS.items()
        if lines
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {y + 6}" role="img" aria-label="{html.escape(words)}" '
        'xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" font-size="14" fill="currentColor" '
        f'style="max-width:{WIDTH * 3 // 2}px"><defs>{patterns}</defs>{"".join(drawn)}</svg>'
    )
