"""Fig. 16 a and b: translation with a prefix that all requests share, LLaMA-13B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from minipaged.paper import published
from minipaged.paper.figure import Check, PaperClaim
from minipaged.paper.figures.panel import Panel
from minipaged.paper.serving import ServingSetup
from minipaged.paper.workloads import PREFIX

RATIO = 0.15
"""Tolerance of the ratio vLLM ÷ Orca (Oracle), as a fraction."""
SAID = {"16a": 1.67, "16b": 3.58}
"""vLLM's throughput relative to Orca (Oracle)'s, by section 6.4."""
READ = 0.03
"""The paper's sentence holds if the paper's own curves give SAID within this fraction."""


class Fig16(Panel):
    """One panel of Fig. 16."""

    section = "6.4"
    seconds = 300.0
    quick_seconds = 40.0
    look = (
        "With five examples in the prefix, vLLM serves 3.5 times as many requests as Orca (Oracle) in the paper, and "
        "3.0 times here. With one example it is 1.7 and 1.6 times. The prefix is stored once and computed once."
    )
    change_it = (
        "Cut the prefix to 320 and to 336 tokens. Only whole blocks of 16 are shared: does 341 lose what 336 does not?",
        "Turn `enable_prefix_caching` off (`serving.engine_of`): what is left of vLLM's lead?",
        "Give every tenth request a prefix of its own (`serving.prompt_of`). What does the cache do with them?",
    )

    def __init__(self, panel: str) -> None:
        super().__init__(panel)
        self.prefix = PREFIX[panel]
        self.title = f"Fig. {panel}: a shared prefix of {self.prefix} tokens, LLaMA-13B"

    why: Mapping[str, str] = {
        "vLLM ÷ Orca (Oracle)": "vLLM's knee is too early, and memory is not the only reason. Where nothing waits, "
        "at 24/s, the law is already a tenth above the paper's point (`minipaged paper run calibration`). In a step "
        "each row reads the shared prefix separately, at the full speed of the data sheet, where the calibration's "
        "search ended. A GPU may find the prefix in its cache after the first row; that was not measured.",
    }

    def serving(self, system: str, rate: float, seconds: float, seed: int) -> ServingSetup:
        return replace(super().serving(system, rate, seconds, seed), prefix=self.prefix)

    def checks(self, ours: Mapping[str, Sequence[published.Point]]) -> list[Check]:
        return [self.ratio_check(ours, "vLLM", "Orca (Oracle)", RATIO), *self.knee_checks(ours, None)]

    def notes(self) -> list[str]:
        return [
            "The paper does not say how long the sentences were: see TRANSLATION in `workloads.py`. The knees and "
            "their ratio depend on it.",
            "The traces are shorter than the paper's hour. So all knees are higher than with an hour, because a queue "
            "has less time to grow.",
        ]

    def sentences(self, ours: Mapping[str, Sequence[published.Point]]) -> list[PaperClaim]:
        """Return the paper's sentence on the ratio vLLM ÷ Orca (Oracle)."""
        said = SAID[self.panel]
        words = "when the one-shot prefix is shared" if self.panel == "16a" else "when more examples are shared"
        return [self.times_said(ours, f"{said}x higher throughput than Orca (Oracle) {words}", said, READ)]


FIG_16 = tuple(Fig16(f"16{letter}") for letter in "ab")
