"""Bars cut into parts, as SVG: for the tutorials.

A part is told from others by its pattern and by the words beside it, not only by its colour, and it takes the colour of
the text around it, so that it can be seen on light and on dark.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FILLS = {
    "full": "",
    "lines": '<path d="M0 8L8 0M-2 2L2 -2M6 10L10 6" stroke="currentColor" stroke-width="1.5"/>',
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
                drawn.append(self._part(x, y + 18, size * scale, kind, self._amount(size, whole)))
                x += size * scale
            y += ROW
        for i, kind in enumerate(self.fills):
            x = 1 + (i % 2) * WIDTH / 2
            drawn.append(self._part(x, y + 6, 22, kind, "", height=16))
            drawn.append(f'<text x="{x + 30}" y="{y + 19}">{html.escape(kind)}</text>')
            y += 24 if i % 2 or i == len(self.fills) - 1 else 0  # two to a line
        patterns = "".join(
            f'<pattern id="fill-{name}" width="8" height="8" patternUnits="userSpaceOnUse">{lines}</pattern>'
            for name, lines in FILLS.items()
            if lines
        )
        return (
            f'<svg viewBox="0 0 {WIDTH} {y + 6}" role="img" aria-label="{html.escape(self.as_text())}" '
            'xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" font-size="14" fill="currentColor" '
            f'style="max-width:{WIDTH * 3 // 2}px"><defs>{patterns}</defs>{"".join(drawn)}</svg>'
        )

    def as_text(self) -> str:
        """The same in words."""
        return "; ".join(
            f"{name}: "
            + ", ".join(f"{kind} {self._amount(size, sum(size for _, size in parts))}" for kind, size in parts)
            for name, parts in self.rows
        )

    def _amount(self, size: float, whole: float) -> str:
        return f"{size / whole:.0%}" if self.percent else f"{size:g}{self.unit}"

    def _part(self, x: float, y: float, width: float, kind: str, text: str, height: int = 26) -> str:
        fill = self.fills[kind]
        paint = {"full": 'fill="currentColor"', "empty": 'fill="none"'}.get(fill, f'fill="url(#fill-{fill})"')
        part = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" {paint} stroke="currentColor"/>'
        if width < 8 * len(text) + 8 or not text:
            return part
        label = f'<text x="{x + width / 2:.1f}" y="{y + 18}" text-anchor="middle"'
        if fill == "full":  # letters in the colour of the page, whatever that is
            return f'{part}{label} style="fill:var(--md-default-bg-color,Canvas)">{text}</text>'
        outline = "stroke:var(--md-default-bg-color,Canvas);stroke-width:4px;paint-order:stroke"
        return f'{part}{label} style="{outline}">{text}</text>'
