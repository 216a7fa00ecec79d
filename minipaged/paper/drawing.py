"""Draws a figure's result with matplotlib. Our lines are solid, the paper's dashed, calibration points hollow circles.

A picture of blocks has the block tables on the left, and lines from their entries to the blocks of the pool."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

COLOURS = {
    "FasterTransformer": "#7f7f7f",
    "Orca (Max)": "#b35806",
    "Orca (Pow2)": "#e08214",
    "Orca (Oracle)": "#8073ac",
    "vLLM": "#1b7837",
}
"""The systems' colours, distinct in greyscale and for colour-blind readers. Other lines use matplotlib's colour cycle.
"""
MARKS = {"FasterTransformer": "v", "Orca (Max)": "s", "Orca (Pow2)": "^", "Orca (Oracle)": "D", "vLLM": "o"}
MOST_MARKS = 30
"""Lines with more points than this are drawn without marks."""
INCHES = (6.2, 3.6)
"""Width and height of one plot, in inches."""
LINE = 0.2
"""Height of one row in a picture of blocks, in inches."""


def draw(data: Mapping[str, Any]) -> Canvas:
    """Draw all plots of a result, two in a row."""
    plots = data["plots"]
    columns = min(2, len(plots))
    rows = -(-len(plots) // columns)
    high = max(_inches_high(plot) for plot in plots)
    canvas = Canvas(figsize=(INCHES[0] * columns, high * rows), layout="constrained")
    for axes, plot in zip(canvas.subplots(rows, columns, squeeze=False).flat, plots, strict=False):
        if "pool" in plot:
            _draw_blocks(axes, plot)
        else:
            _draw_plot(axes, plot)
    for axes in canvas.axes[len(plots) :]:
        axes.set_axis_off()
    return canvas


def save(data: Mapping[str, Any], path: Path) -> None:
    """Save the drawing as SVG or PNG, depending on the file's suffix. The same data gives the same bytes."""
    if path.suffix == ".svg":
        path.write_text('<?xml version="1.0" encoding="utf-8"?>\n' + svg(data) + "\n", encoding="utf-8")
    else:
        draw(data).savefig(path, dpi=150, metadata={"Software": None})


def svg(data: Mapping[str, Any]) -> str:
    """Return the drawing as an SVG element. Its ids depend on the figure's name, so a page can hold several figures."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": data["figure"]}):  # matplotlib derives ids from the salt
        draw(data).savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    drawn = file.getvalue()
    element = re.sub(r' id="[a-z]+[\w.]*_\d+"', "", drawn[drawn.index("<svg") :].strip())  # nothing uses these ids
    title = html.escape(in_words(data))
    return element.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def in_words(data: Mapping[str, Any]) -> str:
    """Describe the picture in words, for readers who cannot see it."""
    if any("pool" not in plot for plot in data["plots"]):
        return f"{data['title']}: ours solid, the paper's dashed"
    told = [
        f"{plot['title']}: "
        + ", ".join(f"{table['label']} has blocks {_numbers(table['entries'])}" for table in plot["tables"])
        for plot in data["plots"]
    ]
    return f"{data['title']}: {'; '.join(told)}"


def _numbers(entries: Iterable[Mapping[str, Any]]) -> str:
    return " ".join(str(entry["block"]) for entry in entries)


def _draw_plot(axes: Axes, plot: Mapping[str, Any]) -> None:
    axes.set_title(plot["title"], fontsize=10)
    axes.set_xlabel(plot["x"])
    axes.set_ylabel(plot["y"])
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    if plot["groups"]:
        _draw_bars(axes, plot)
    else:
        _draw_lines(axes, plot)
    if plot["log_x"]:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    if plot["log_y"]:
        axes.set_yscale("log")
    if plot["y_max"] is not None:
        axes.set_ylim(0 if not plot["log_y"] else None, plot["y_max"])
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))  # beside the axes, where it hides no line


def _draw_lines(axes: Axes, plot: Mapping[str, Any]) -> None:
    """Draw lines and their legend. A system with two lines is named once. Solid, dashed and circles are explained once.
    Circles that belong to no single line are black."""
    labels = list(dict.fromkeys(line["label"] for line in plot["lines"]))
    ours = {line["label"] for line in plot["lines"] if line["style"] == "ours"}
    papers = {line["label"] for line in plot["lines"] if line["style"] == "paper"}
    for line in plot["lines"]:
        label, style = line["label"], line["style"]
        colour = COLOURS.get(label, f"C{labels.index(label)}")
        x, y = zip(*line["points"], strict=True) if line["points"] else ((), ())
        if style == "ours":
            mark = MARKS.get(label, "o") if len(x) <= MOST_MARKS else ""
            axes.plot(x, y, "-", marker=mark, ms=4, color=colour, label=label)
        elif style == "paper":
            darker = [0.6 * part for part in to_rgb(colour)]  # stays visible on top of ours
            axes.plot(x, y, "--", color=darker, zorder=3, label=None if label in ours else f"{label}, paper")
        else:
            axes.plot(x, y, "o", ms=9, mfc="none", mec=colour if label else "black")
    if any(line["style"] == "calibrated" for line in plot["lines"]):
        axes.plot([], [], "o", ms=9, mfc="none", color="black", label="calibrated by")
    if ours & papers:
        axes.plot([], [], "-", color="black", label="ours")
        axes.plot([], [], "--", color="black", label="the paper's")


def _draw_bars(axes: Axes, plot: Mapping[str, Any]) -> None:
    groups, lines = plot["groups"], plot["lines"]
    width = 0.8 if plot["stacked"] else 0.8 / len(lines)
    bottom = [0.0] * len(groups)
    for i, line in enumerate(lines):
        heights = [y for _, y in line["points"]]
        places = [x if plot["stacked"] else x - 0.4 + (i + 0.5) * width for x, _ in line["points"]]
        label = line["label"] if line["style"] == "ours" or plot["stacked"] else f"{line['label']}, paper"
        hatch = "//" if line["style"] == "paper" else None
        below = bottom if plot["stacked"] else 0
        axes.bar(places, heights, width, below, label=label, hatch=hatch, edgecolor="white")
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)] if plot["stacked"] else bottom
    axes.set_xticks(range(len(groups)), groups, fontsize=8)


def _rows_of(plot: Mapping[str, Any]) -> int:
    """Return the number of rows in a picture of blocks. A table takes one row for its name and one for each entry."""
    return max(len(plot["pool"]), sum(1 + len(table["entries"]) for table in plot["tables"]))


def _inches_high(plot: Mapping[str, Any]) -> float:
    return max(INCHES[1], LINE * (_rows_of(plot) + 4)) if "pool" in plot else INCHES[1]


def _draw_blocks(axes: Axes, plot: Mapping[str, Any]) -> None:
    """Draw block tables and the pool. A row is 1 high. The pool starts at x = 0, and the tables are left of it."""
    pool, slots, high = plot["pool"], plot["block_size"], _rows_of(plot)
    axes.set_title(plot["title"], fontsize=10)
    axes.set_axis_off()
    wide = max(slots, 3)  # small blocks get wider slots, so that the picture is at least 3 wide
    axes.set_xlim(-0.8 * wide, wide + 0.9)
    axes.set_ylim(high + 0.2, -1.4)
    apart = high / len(pool)
    middle = {box["number"]: (i + 0.5) * apart for i, box in enumerate(pool)}
    small: dict[str, Any] = {"fontsize": 7, "va": "center", "ha": "center"}
    axes.text(-0.55 * wide, -0.7, "logical: physical, #filled", **small)
    axes.text(wide / 2, -0.7, "physical blocks, × reference count", **small)
    for box in pool:
        y = middle[box["number"]]
        colour = "black" if box["holders"] else "0.7"
        for i in range(slots):
            word = box["words"][i] if i < len(box["words"]) else ""
            fill = "#fdd49e" if word and box["marked"] else "#e8eef7" if word else "white"
            x = i * wide / slots
            axes.add_patch(Rectangle((x, y - 0.4), wide / slots, 0.8, fc=fill, ec=colour, lw=0.8))
            axes.text(x + wide / slots / 2, y, word, **small)
        axes.text(-0.08, y, str(box["number"]), **small | {"ha": "right", "color": colour})
        count = f"×{box['holders']}" if box["holders"] else ""
        axes.text(wide + 0.08, y, f"{count} {box['said']}".strip(), **small | {"ha": "left"})
    y = 0.5
    for place, table in enumerate(plot["tables"]):
        colour = f"C{place}"
        axes.text(-0.55 * wide, y, table["label"], **small | {"color": colour, "weight": "bold"})
        for logical, entry in enumerate(table["entries"]):
            y += 1
            axes.add_patch(Rectangle((-0.75 * wide, y - 0.4), 0.4 * wide, 0.8, fc="white", ec=colour, lw=0.8))
            axes.text(-0.55 * wide, y, f"{logical}: {entry['block']}, {entry['filled']}", **small)
            axes.plot((-0.35 * wide, -0.25), (y, middle[entry["block"]]), "-", color=colour, lw=0.9, alpha=0.8)
        y += 1
