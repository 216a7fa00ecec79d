"""Fig. 12 a to f: normalized latency against request rate, single sequences, three models and two datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minipaged.paper import published
from minipaged.paper.calibration import FlatPoint, Means, flat_points, normalized_latency
from minipaged.paper.figure import Check, PaperClaim
from minipaged.paper.figures.panel import Panel
from minipaged.paper.machines import SETTINGS, machine

TOLERANCE = 0.18
"""Tolerance of each knee, as a fraction."""
MEDIAN = 0.06
"""The limit of the median error of all knees."""
HEIGHT = 0.10
"""Tolerance of a curve's height where nothing waits, as a fraction."""


@dataclass(frozen=True, slots=True)
class Said:
    """A sentence of the paper which says that on these datasets vLLM serves `least` to `most` times `system`'s rate."""

    words: str
    system: str
    datasets: tuple[str, ...]
    least: float
    most: float


BASIC = 1.3
"""vLLM's rate relative to Orca (Oracle)'s on Alpaca with one sequence per request, by section 6.3 on Fig. 12d."""
READ = 0.05
"""The paper's sentence holds if the paper's own curves give BASIC within this fraction."""
SAID = (
    Said("1.7x-2.7x higher request rates compared to Orca (Oracle)", "Orca (Oracle)", ("ShareGPT",), 1.7, 2.7),
    Said("2.7x-8x higher request rates compared to Orca (Max)", "Orca (Max)", ("ShareGPT",), 2.7, 8.0),
    Said("up to 22x higher request rates than FasterTransformer", "FasterTransformer", ("ShareGPT", "Alpaca"), 0, 23.5),
)
"""The sentences of section 6.2 on single sequences. "Up to 22x" also holds for smaller ratios, and for the 23.1 that
the paper's curves give."""


WHY = {
    "12a": {
        "vLLM at": "the paper draws two points at 1.5/s, 0.0424 s and 0.0487 s. The check uses the first, which "
        "calibrated the machine. Our result is close to the second. The difference to the law is waiting time: in a "
        "twentieth of the steps some request finds no room, and 375 requests are preempted in the hour.",
    },
    "12b": {
        "vLLM at": "the difference is waiting time. In a twentieth of the steps some request finds no room, and 130 "
        "requests are preempted in the hour. OPT-66B leaves room for 9.7 thousand tokens, which a few long requests "
        "fill. The paper's point is below the law's, so no request waited there. Why not is not known.",
    },
}
"""`Figure.why` of each panel."""


class Fig12(Panel):
    """One panel of Fig. 12."""

    section = "6.2"
    look = (
        "Each curve is flat up to some rate. From there on the queue grows as long as requests arrive. That rate "
        "depends on how many requests fit into the memory at once, and so on the share of the memory that holds "
        "tokens."
    )
    change_it = (
        "Give the machine twice the memory for K and V (`kv_memory_bytes` in `machines.py`): which knee moves most?",
        "Let Orca (Pow2) expect the true length minus a quarter (`ESTIMATES` in `orca.py`): what breaks, and where?",
        "Halve `seconds_per_row` in `CALIBRATED`: which panels' checks fail now, and which still hold?",
    )

    def __init__(self, panel: str) -> None:
        super().__init__(panel)
        self.title = f"Fig. {panel}: {self.model}, {published.dataset(panel)}"
        self.seconds = SETTINGS[self.model].seconds
        self.why = WHY.get(panel, {})
        if panel == "12d":
            self.further = {"vLLM": (1.2,)}
        if panel == "12e":  # no point of the paper's lies between 0.1/s and 1.25/s
            self.further = {"FasterTransformer": (0.1, 0.15, 0.25)}

    def checks(self, ours: Mapping[str, Sequence[published.Point]]) -> list[Check]:
        return [*self.knee_checks(ours, TOLERANCE), self.height_check(dict(ours["vLLM"]))]

    def flat_point(self) -> FlatPoint:
        """Return vLLM's flat point with the highest rate."""
        return max((point for point in flat_points(self.panel) if point.system == "vLLM"), key=lambda point: point.rate)

    def height_check(self, ours: Mapping[float, float]) -> Check:
        """Return a check of vLLM's latency at its flat point with the highest rate.

        The point calibrated the machine, so the check is no prediction. But it shows whether the machine is wrong.
        `ours` is seconds per token by rate."""
        flat = self.flat_point()
        paper, found = flat.seconds_per_token, ours.get(flat.rate)
        return Check(f"vLLM at {flat.rate:g}/s", paper, found, HEIGHT, unit=" s", kind="calibrated")

    def sentences(self, ours: Mapping[str, Sequence[published.Point]]) -> list[PaperClaim]:
        """Return the paper's sentences on vLLM's rate relative to the baselines'."""
        dataset, knees, found = published.dataset(self.panel), self.knees(ours), list[PaperClaim]()
        for said in SAID:
            if dataset not in said.datasets:
                continue
            times = [a / b if a and b else None for a, b in zip(knees["vLLM"], knees[said.system], strict=True)]
            in_paper, in_ours = ("no number" if ratio is None else f"{ratio:.2f} x" for ratio in times)
            holds = times[0] is not None and said.least <= round(times[0], 1) <= said.most
            found.append(PaperClaim(said.words, self.section, in_paper, in_ours, holds))
        if self.name == "12d":
            words = f"improvement [...] over Orca (Oracle) [...] goes from {BASIC:g}x in basic sampling"
            found.append(self.times_said(ours, words, BASIC, READ, section="6.3"))
        return found

    def notes(self) -> list[str]:
        rate = self.flat_point().rate
        by_law = normalized_latency(machine(self.model), rate, Means.of(published.dataset(self.panel)))
        return [
            f"If nothing waits, vLLM at {rate:g}/s takes {by_law:.4f} s a token by the law of a step alone, with the "
            "dataset's lengths. Our result differs because requests wait, and because of the lengths in its trace.",
            "FasterTransformer is not judged, because its batch sizes are not known. Here each of its sequences has a "
            "chunk of the longest length, as in Orca (Max).",
        ]


FIG_12 = tuple(Fig12(f"12{letter}") for letter in "abcdef")
