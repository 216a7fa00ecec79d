"""What the paper printed, as numbers: its curves, bars and histograms (`data/paper.json`, with the source).

A *panel* is one plot of Figs. 12, 14, 16 and 17: requests a second across, mean normalized latency (seconds a token,
section 6.1) up, a curve for each system. Its *knee* is the rate at which a curve passes `KNEE` seconds a token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

Point = tuple[float, float]
"""(requests a second, seconds a token) of a curve; of other lines whatever their figure says."""
KNEE = 0.5
"""Seconds a token at which curves are compared: between what serves well and what has no end."""


@cache
def _paper() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((files("minipaged.paper") / "data/paper.json").read_text())
    return data


def source() -> str:
    text: str = _paper()["source"]
    return text


def panels() -> list[str]:
    """Their names: 12a, ..., 17."""
    return list(_paper()["curves"])


def model(panel: str) -> str:
    """Which model was served."""
    what: str = _paper()["curves"][panel]["what"]
    return next(word for word in what.split() if "-" in word and word[-1] == "B")


def dataset(panel: str) -> str:
    """Where the lengths come from: ShareGPT, Alpaca or WMT16."""
    what: str = _paper()["curves"][panel]["what"]
    return next((word for word in what.split() if word in ("ShareGPT", "Alpaca")), "WMT16")


def curves(panel: str) -> dict[str, list[Point]]:
    """The drawn points of each system, in order of rate."""
    return {system: [(x, y) for x, y in line] for system, line in _paper()["curves"][panel]["lines"].items()}


def with_exit(panel: str, system: str) -> list[Point]:
    """The drawn points, and the one where the curve leaves the panel at the top, if it does."""
    exits = _paper()["curves"][panel]["exits"]
    return curves(panel)[system] + ([tuple(exits[system])] if system in exits else [])


def other(name: str) -> Any:
    """What else is printed: bars and lines, by figure and words (`data/paper.json`)."""
    return _paper()["others"][name]


def histogram(dataset: str, side: str) -> tuple[float, float, list[int]]:
    """Fig. 11: (shortest, longest, counts of bins of equal width) of lengths in tokens. `side`: input or output."""
    found = _paper()["fig11"][f"{dataset} {side}"]
    return found["first"], found["last"], list(found["counts"])


def knee(line: Sequence[Point], at: float = KNEE) -> float | None:
    """The rate at which straight lines between the points first pass `at` seconds a token; None if they never do."""
    for (x0, y0), (x1, y1) in pairwise(line):
        if y0 <= at < y1:
            return x0 + (at - y0) / (y1 - y0) * (x1 - x0)
    return None
