"""The paper's printed numbers: its curves, bars and histograms (`data/paper.json`, which names the source).

A *panel* is one plot of Figs. 12, 14, 16 and 17. It shows mean normalized latency (seconds per token, section 6.1)
against the request rate (requests per second), with a curve for each system. The *knee* of a curve is the rate at which
it passes `KNEE` seconds per token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

Point = tuple[float, float]
"""A point of a line. In a panel: (requests per second, seconds per token). Other figures have other units."""
KNEE = 0.5
"""Seconds per token at which curves are compared: above a usable latency, and below that of an ever-growing queue."""


@cache
def _paper() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((files("minipaged.paper") / "data/paper.json").read_text())
    return data


def source() -> str:
    text: str = _paper()["source"]
    return text


def panels() -> list[str]:
    """Return the names of all panels: 12a, ..., 17."""
    return list(_paper()["curves"])


def model(panel: str) -> str:
    """Return the name of the model that the panel serves."""
    what: str = _paper()["curves"][panel]["what"]
    return next(word for word in what.split() if "-" in word and word[-1] == "B")


def dataset(panel: str) -> str:
    """Return the dataset of the panel's request lengths: ShareGPT, Alpaca or WMT16."""
    what: str = _paper()["curves"][panel]["what"]
    return next((word for word in what.split() if word in ("ShareGPT", "Alpaca")), "WMT16")


def curves(panel: str) -> dict[str, list[Point]]:
    """Return the points of each system's curve, in order of rate."""
    return {system: [(x, y) for x, y in line] for system, line in _paper()["curves"][panel]["lines"].items()}


def with_exit(panel: str, system: str) -> list[Point]:
    """Return a curve's points. If it leaves the panel at the top, the point where it does comes last."""
    exits = _paper()["curves"][panel]["exits"]
    return curves(panel)[system] + ([tuple(exits[system])] if system in exits else [])


def other(name: str) -> Any:
    """Return the printed bars or lines of another figure. `name` is their key in `data/paper.json`, under "others"."""
    return _paper()["others"][name]


def histogram(dataset: str, side: str) -> tuple[float, float, list[int]]:
    """Return a histogram of Fig. 11: the shortest and longest length in tokens, and the counts of equally wide bins.

    `side` is "input" or "output"."""
    found = _paper()["fig11"][f"{dataset} {side}"]
    return found["first"], found["last"], list(found["counts"])


def knee(line: Sequence[Point], at: float = KNEE) -> float | None:
    """Return the rate at which the line first passes `at` seconds per token, or None. Points are joined linearly."""
    for (x0, y0), (x1, y1) in pairwise(line):
        if y0 <= at < y1:
            return x0 + (at - y0) / (y1 - y0) * (x1 - x0)
    return None
