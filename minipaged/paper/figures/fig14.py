"""Fig. 14 a to f: parallel sampling and beam search with 2, 4 and 6 sequences, OPT-13B on Alpaca."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from minipaged.paper import published
from minipaged.paper.figure import Check
from minipaged.paper.figures.panel import Panel
from minipaged.paper.serving import FURTHER_BEAM, FURTHER_SAMPLE, Serving

RATIO = 0.15
"""How far vLLM ÷ Orca (Oracle) may be from the paper's."""
WIDTHS = {"a": 2, "b": 4, "c": 6, "d": 2, "e": 4, "f": 6}


class Fig14(Panel):
    """One panel."""

    section = "6.3"
    seconds = 600.0
    quick_seconds = 40.0
    look = (
        "vLLM's lead over Orca (Oracle) grows with the number of sequences, because they share the blocks of their "
        "prompt, and beams also much of what they generated; Orca holds a chunk for each."
    )
    change_it = (
        "Serve ShareGPT in place of Alpaca (`serving`): prompts are eight times longer, so there is more to share.",
        "Take blocks of 64 tokens: an Alpaca prompt has 19. What is left to be shared?",
        "Let beams never fork (`DivergingBeams`: each survivor stems from itself). Which curve moves, and how far?",
    )

    def __init__(self, panel: str) -> None:
        super().__init__(panel)
        self.beams = panel[-1] in "def"
        self.width = WIDTHS[panel[-1]]
        if self.beams:
            self.further = dict.fromkeys(("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)"), (1.25, 1.4))
        kind = "beam search" if self.beams else "parallel sampling"
        self.title = f"Fig. {panel}: {kind}, {self.width} sequences, OPT-13B, Alpaca"

    def serving(self, system: str, rate: float, seconds: float, seed: int) -> Serving:
        return replace(super().serving(system, rate, seconds, seed), n=self.width, beams=self.beams)

    def checks(self, ours: Mapping[str, Sequence[published.Point]]) -> list[Check]:
        return [self.ratio_check(ours, "vLLM", "Orca (Oracle)", RATIO), *self.knee_checks(ours, None)]

    def notes(self) -> list[str]:
        cost = FURTHER_BEAM if self.beams else FURTHER_SAMPLE
        notes = [
            f"What the second and each further sequence of a request costs a step beside its tokens, {cost:g} of what "
            "the first one does, is calibrated by vLLM's flat points of this figure. The ratio of the knees is not.",
            "Traces are ten minutes long, the paper's an hour: all knees are higher than an hour's would be, for a "
            "queue has less time to grow.",
        ]
        if self.beams:
            notes.append("Which beams survive was measured on SmolLM2, not on OPT-13B: see `divergence.py`.")
        return notes


FIG_14 = tuple(Fig14(f"14{letter}") for letter in "abcdef")
