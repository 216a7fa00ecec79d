"""Fig. 12 a to f: normalized latency against request rate, single sequences, three models and two datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from minipaged.paper import published
from minipaged.paper.calibration import flat_points
from minipaged.paper.figure import Check, Sentence
from minipaged.paper.figures.panel import Panel
from minipaged.paper.machines import SETTINGS

TOLERANCE = 0.18
"""Of each knee. (The median of all is to be within MEDIAN.)"""
MEDIAN = 0.06
HEIGHT = 0.10
"""Of a curve where nothing waits."""


@dataclass(frozen=True, slots=True)
class Said:
    """A sentence of the paper: on these datasets vLLM serves `least` to `most` times the rate of `system`."""

    words: str
    system: str
    datasets: tuple[str, ...]
    least: float
    most: float


SAID = (
    Said("1.7x-2.7x higher request rates compared to Orca (Oracle)", "Orca (Oracle)", ("ShareGPT",), 1.7, 2.7),
    Said("2.7x-8x higher request rates compared to Orca (Max)", "Orca (Max)", ("ShareGPT",), 2.7, 8.0),
    Said("up to 22x higher request rates than FasterTransformer", "FasterTransformer", ("ShareGPT", "Alpaca"), 0, 23.5),
)
"""Section 6.2, of single sequences. ("Up to" is borne out by what is less, and 23.1 is read off a curve.)"""


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
        if panel == "12d":
            self.further = {"vLLM": (1.2,)}

    def checks(self, ours: Mapping[str, Sequence[published.Point]]) -> list[Check]:
        return [*self.knee_checks(ours, TOLERANCE), self.height_check(dict(ours["vLLM"]))]

    def height_check(self, ours: Mapping[float, float]) -> Check:
        """Of vLLM, at the fastest rate by which the machine was calibrated: no prediction, but a machine that is wrong
        shows here. `ours`: seconds a token by rate."""
        rate = max(point.rate for point in flat_points(self.panel) if point.system == "vLLM")
        paper = fmean(y for x, y in published.curves(self.panel)["vLLM"] if x == rate)  # 12a has two at one rate
        return Check(f"vLLM at {rate:g}/s (calibrated)", paper, ours.get(rate), HEIGHT, unit=" s")

    def sentences(self, ours: Mapping[str, Sequence[published.Point]]) -> list[Sentence]:
        """Of how many times a baseline's rate vLLM serves."""
        dataset, knees, found = published.dataset(self.panel), self.knees(ours), list[Sentence]()
        for said in SAID:
            if dataset not in said.datasets:
                continue
            times = [a / b if a and b else None for a, b in zip(knees["vLLM"], knees[said.system], strict=True)]
            in_paper, in_ours = ("no number" if ratio is None else f"{ratio:.2f} x" for ratio in times)
            holds = times[0] is not None and said.least <= round(times[0], 1) <= said.most
            found.append(Sentence(said.words, self.section, in_paper, in_ours, holds))
        return found


FIG_12 = tuple(Fig12(f"12{letter}") for letter in "abcdef")
