"""Fig. 12 a to f: normalized latency against request rate, single sequences, three models and two datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minipaged.paper import published
from minipaged.paper.figure import Check
from minipaged.paper.figures.panel import Panel
from minipaged.paper.machines import SETTINGS

TOLERANCE = 0.18
"""Of each knee. (The median of all is to be within MEDIAN.)"""
MEDIAN = 0.06


class Fig12(Panel):
    """One panel."""

    section = "6.2"
    look = (
        "Each curve is flat, and then it is not: from some rate on the queue grows as long as requests come. Where "
        "that happens is decided by how many requests fit into the memory at once, and so by how much of it holds "
        "tokens."
    )
    change_it = (
        "Give the machine twice the memory for K and V (`kv_memory_bytes` in `machines.py`): which knee moves most?",
        "Let Orca (Pow2) expect the true length, less a quarter (`ESTIMATES` in `orca.py`): what breaks, and where?",
        "Halve `seconds_per_row` in `CALIBRATED`: which panels' verdicts turn red, and which do not care?",
    )

    def __init__(self, panel: str) -> None:
        super().__init__(panel)
        self.title = f"Fig. {panel}: {self.model}, {published.dataset(panel)}"
        self.seconds = SETTINGS[self.model].seconds

    def checks(self, ours: Mapping[str, Sequence[published.Point]]) -> list[Check]:
        return self.knee_checks(ours, TOLERANCE)


FIG_12 = tuple(Fig12(f"12{letter}") for letter in "abcdef")
