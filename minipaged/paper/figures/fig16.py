"""Fig. 16 a and b: translation with a prefix that all requests share, LLaMA-13B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from minipaged.paper import published
from minipaged.paper.figure import Check
from minipaged.paper.figures.panel import Panel
from minipaged.paper.serving import Serving
from minipaged.paper.workloads import PREFIX

RATIO = 0.15
"""How far vLLM ÷ Orca (Oracle) may be from the paper's."""


class Fig16(Panel):
    """One panel."""

    section = "6.4"
    seconds = 300.0
    quick_seconds = 40.0
    look = (
        "With five examples in the prefix vLLM serves 3.5 times what Orca (Oracle) does, with one 1.7 times: the "
        "prefix is in memory once, and is computed once."
    )
    change_it = (
        "Cut the prefix to 320 and to 336 tokens: whole blocks of 16 are shared. Does 341 lose what 336 does not?",
        "Let the prefix be computed every time but held once: which of the two gains is the larger?",
        "Give every tenth request a prefix of its own. What does the cache do with them?",
    )

    def __init__(self, panel: str) -> None:
        super().__init__(panel)
        self.prefix = PREFIX[panel]
        self.title = f"Fig. {panel}: a shared prefix of {self.prefix} tokens, LLaMA-13B"

    def serving(self, system: str, rate: float, seconds: float, seed: int) -> Serving:
        return replace(super().serving(system, rate, seconds, seed), prefix=self.prefix)

    def checks(self, ours: Mapping[str, Sequence[published.Point]]) -> list[Check]:
        return [self.ratio_check(ours, "vLLM", "Orca (Oracle)", RATIO), *self.knee_checks(ours, None)]

    def notes(self) -> list[str]:
        return [
            "The paper does not say how long the sentences were: see TRANSLATION in `workloads.py`. They decide "
            "where the knees are, and hardly their ratio."
        ]


FIG_16 = tuple(Fig16(f"16{letter}") for letter in "ab")
