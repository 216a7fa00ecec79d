"""The tutorials as the home page shows them: a picture from the tutorial's own run, and how many minutes it takes.

The picture is that of the pictures drawn by its cells that has the most parts, without the words, which would be too
small, and so without what stands for each fill. Of a tutorial that draws none it is the pool of its recorded runs, when
it holds the most.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.opening import hue
from minipaged.events import from_json
from minipaged.replay.state import State

WORDS_A_MINUTE, LINES_A_MINUTE = 200, 15
"""At which text, and code, are read: a rule of thumb, and not measured."""
RULE = f"Minutes are for reading, at {WORDS_A_MINUTE} words or {LINES_A_MINUTE} lines of code a minute."
LISTED = re.compile(r"(?:^- \[\d+\. [^\]]+\]\(tutorials/\w+\.md\)\n)+", re.MULTILINE)
"""The list of the tutorials in the home page's source,"""
LINE = re.compile(r"- \[(?P<number>\d+)\. (?P<title>[^\]]+)\]\(tutorials/(?P<stem>\w+)\.md\)")
"""and one of its lines."""
STEPPER = re.compile(r'<paged-stepper[^>]*><script type="application/json">(.*?)</script>', re.DOTALL)
PICTURE = re.compile(r'<div class="picture">(<svg.*?</svg>)</div>', re.DOTALL)
TEXT = re.compile(r"<text.*?</text>", re.DOTALL)
KEY = re.compile(r'<rect [^>]*height="16"[^>]*/>(?:<rect [^>]*fill="url[^>]*/>)?|<path d="M[\d.]+ [\d.]+h18"[^>]*/>')
"""What says which fill or dash is what (`minipaged.stepper.pictures`): a small box, or a short line."""
PART = re.compile("<rect |<polyline ")
RECT = re.compile(r'<rect x="([\d.]+)" width="([\d.]+)" y="([\d.]+)" height="([\d.]+)"')
POINT = re.compile(r"([\d.]+),([\d.]+)(?=[ \"])")
AXIS = re.compile(r'd="M([\d.]+) ([\d.]+)H([\d.]+)"')
WIDE = 12
"""Most squares in a row of a small picture."""


def with_cards(page: str, tutorials: Path) -> str:
    """The home page, its list of tutorials as cards. `tutorials`: where their pages and notebooks are by now."""

    def card(line: re.Match[str]) -> str:
        notebook = json.loads((tutorials / f"{line['stem']}.ipynb").read_text())
        drawn = picture((tutorials / f"{line['stem']}.md").read_text())
        return (
            f'<li><a href="tutorials/{line["stem"]}.html">{drawn}<b>{line["number"]}. {html.escape(line["title"])}</b>'
            f"<span>{minutes(notebook['cells'])} min</span></a></li>"
        )

    def cards(listed: re.Match[str]) -> str:
        return f'<ol class="cards">{"".join(map(card, LINE.finditer(listed[0])))}</ol>\n\n{RULE}\n'

    return LISTED.sub(cards, page)


def minutes(cells: Sequence[Mapping[str, Any]]) -> int:
    """How long it takes to read a notebook."""
    texts = {
        kind: "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == kind) for kind in ("markdown", "code")
    }
    lines = [line for line in texts["code"].splitlines() if line.strip()]
    return math.ceil(len(texts["markdown"].split()) / WORDS_A_MINUTE + len(lines) / LINES_A_MINUTE)


def picture(page: str) -> str:
    """A tutorial's, as SVG. Raises ValueError for a page that shows nothing."""
    if drawn := PICTURE.findall(page):
        return small(max(drawn, key=lambda svg: len(PART.findall(KEY.sub("", svg)))))
    if runs := STEPPER.findall(page):
        return pool(*(json.loads(run)["events"] for run in runs))
    raise ValueError("a tutorial has neither a recorded run nor a picture for its card")


def small(svg: str) -> str:
    """A picture of a cell without its words and the key to its fills, and no larger than what is left."""
    svg = KEY.sub("", TEXT.sub("", svg))
    corners = [
        (x + right, y + down)
        for x, width, y, height in (map(float, part.groups()) for part in RECT.finditer(svg))
        for right, down in ((0, 0), (width, height))
    ]
    corners += [(float(x), float(y)) for x, y in POINT.findall(svg)]
    corners += [(float(x), float(y)) for left, y, right in AXIS.findall(svg) for x in (left, right)]
    (left, top), (right, bottom) = (tuple(map(edge, zip(*corners, strict=True))) for edge in (min, max))
    box = f'viewBox="{left - 2:g} {top - 2:g} {right - left + 4:g} {bottom - top + 4:g}" aria-hidden="true"'
    return re.sub(r'viewBox="[^"]*" role="img" aria-label="[^"]*"', box, svg, count=1)


def pool(*runs: Sequence[Mapping[str, Any]]) -> str:
    """The pool of some runs when it holds the most: a square a block, with a stripe for each sequence that holds it."""
    fullest, num_blocks = dict[int, list[int]](), 0
    for events in runs:
        state = State()
        for event in events:
            state.apply(from_json(json.dumps(event)))
            held = {block: sorted(set(who)) for block, who in state.device.holders.items() if who}
            if (len(held), sum(map(len, held.values()))) > (len(fullest), sum(map(len, fullest.values()))):
                fullest, num_blocks = held, state.device.num_blocks
    shown = min(num_blocks, max(fullest) + 1 + WIDE // 2)
    columns = min(WIDE, math.ceil(math.sqrt(2.5 * shown)))
    squares = "".join(_square(block % columns, block // columns, fullest.get(block, [])) for block in range(shown))
    size = f"0 0 {columns * 20} {math.ceil(shown / columns) * 20}"
    return f'<svg class="pool" viewBox="{size}" aria-hidden="true">{squares}</svg>'


def _square(column: int, row: int, holders: Sequence[int]) -> str:
    x, y, width = 20 * column + 1, 20 * row + 1, 18 / max(1, len(holders))
    return f'<path class="free" d="M{x} {y}h18v18h-18z"/>' + "".join(
        f'<path style="{hue(sequence)}" d="M{x + i * width:.4g} {y}h{width:.3g}v18h-{width:.3g}z"/>'
        for i, sequence in enumerate(holders)
    )
