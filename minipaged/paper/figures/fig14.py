"""Fig. 14 a to f: parallel sampling and beam search with 2, 4 and 6 sequences, OPT-13B on Alpaca."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from minipaged.paper import published
from minipaged.paper.calibration import flat_points
from minipaged.paper.figure import Check, PaperClaim
from minipaged.paper.figures.panel import Panel
from minipaged.paper.machines import FURTHER_BEAM, FURTHER_SAMPLE
from minipaged.paper.serving import ServingSetup, serve

RATIO = 0.15
"""Tolerance of the ratio vLLM ÷ Orca (Oracle), as a fraction."""
SAID = 2.3
"""vLLM's rate relative to Orca (Oracle)'s with beam width 6, by section 6.3."""
READ = 0.05
"""The paper's sentence holds if the paper's own curves give SAID within this fraction."""
FLAT_SECONDS = 60.0
"""Duration of the traces that calibrate the cost of further sequences. Nothing waits, so short traces suffice."""
ORCA_IS_TOO_FAST = (
    "Orca is too fast here. With beams (d, e, f) its knees are 13 to 51 % too high, and vLLM's are within 8 %. With "
    "samples (a, b, c) Orca's are at most 5 % too high. Unlike samples, beams fork and die all the time, and each "
    "time Orca copies all tokens of a beam. Here only the bytes of a copy cost time. In a trial, each copy also cost "
    "the time to start it (by Fig. 19a). Then the knee of Orca (Oracle) was below 2.8/s, earlier than the paper's. "
    "The true cost of its copies is not known."
)
WIDTHS = {"a": 2, "b": 4, "c": 6, "d": 2, "e": 4, "f": 6}


class Fig14(Panel):
    """One panel of Fig. 14."""

    section = "6.3"
    seconds = 600.0
    quick_seconds = 40.0
    look = (
        "vLLM's lead over Orca (Oracle) grows with the number of sequences. They share the blocks of their prompt, "
        "and beams also share much of what they generated. Orca has a separate chunk for each sequence."
    )
    change_it = (
        "Serve ShareGPT instead of Alpaca (`serving`): its prompts are eight times longer, so there is more to share.",
        "Use blocks of 64 tokens. An Alpaca prompt has 19: what can still be shared?",
        "Let beams never fork (`DivergingBeams`: each survivor is its own parent). Which curve moves, and how far?",
    )

    def __init__(self, panel: str) -> None:
        super().__init__(panel)
        self.beams = panel[-1] in "def"
        self.width = WIDTHS[panel[-1]]
        if self.beams:
            self.further = dict.fromkeys(("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)"), (1.25, 1.4))
            self.why = {"vLLM ÷ Orca (Oracle)": ORCA_IS_TOO_FAST}
        kind = "beam search" if self.beams else "parallel sampling"
        self.title = f"Fig. {panel}: {kind}, {self.width} sequences, OPT-13B, Alpaca"

    def serving(self, system: str, rate: float, seconds: float, seed: int) -> ServingSetup:
        return replace(super().serving(system, rate, seconds, seed), n=self.width, beams=self.beams)

    def checks(self, ours: Mapping[str, Sequence[published.Point]]) -> list[Check]:
        return [self.ratio_check(ours, "vLLM", "Orca (Oracle)", RATIO), *self.knee_checks(ours, None)]

    def sentences(self, ours: Mapping[str, Sequence[published.Point]]) -> list[PaperClaim]:
        """Return the paper's sentence on the widest beams. Its first half belongs to Fig. 12d."""
        said = f"improvement [...] over Orca (Oracle) [...] goes [...] to {SAID:g}x in beam search with a width of 6"
        return [self.times_said(ours, said, SAID, READ)] if self.name == "14f" else []

    def notes(self) -> list[str]:
        cost = FURTHER_BEAM if self.beams else FURTHER_SAMPLE
        notes = [
            f"Each sequence of a request after the first costs {cost:g} of the first one's row in a step. This number "
            "is calibrated by vLLM's flat points of this figure. The ratio of the knees is not.",
            "The traces are shorter than the paper's hour. So all knees are higher than with an hour, because a queue "
            "has less time to grow.",
        ]
        if self.beams:
            notes.append("The survival of beams was measured on SmolLM2, not on OPT-13B: see `divergence.py`.")
        return notes


def misses(beams: bool, further: float) -> list[float]:
    """Return the relative error, (ours - paper) / paper, at each of vLLM's flat points of Fig. 14, if `further` is the
    relative cost of a request's further sequences."""
    return [
        serve(asked, asked.arrivals(), further).normalized_latency / point.seconds_per_token - 1
        for panel in FIG_14
        for point in flat_points(panel.name)
        if panel.beams == beams
        for asked in [panel.serving("vLLM", point.rate, FLAT_SECONDS, seed=0)]
    ]


FIG_14 = tuple(Fig14(f"14{letter}") for letter in "abcdef")
