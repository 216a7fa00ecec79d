"""Fig. 17: a chatbot, whose prompts are the last 1,024 tokens of a conversation, OPT-13B on ShareGPT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from minipaged.paper import published
from minipaged.paper.figure import Check, PaperClaim
from minipaged.paper.figures.panel import Panel
from minipaged.paper.serving import ServingSetup

RATIO = 0.2
"""Tolerance of the ratio vLLM ÷ Orca (Oracle), as a fraction."""
TOGETHER = 0.1
"""Tolerance of the other baselines' ratios to Orca (Oracle), as a fraction."""
SAID = 2.0
"""vLLM's rate relative to the baselines', by section 6.4."""
READ = 0.1
"""The paper's sentence holds if the paper's own curves give SAID within this fraction."""


class Fig17(Panel):
    """The one panel of Fig. 17."""

    section = "6.4"
    title = "Fig. 17: a chatbot, OPT-13B, ShareGPT"
    look = (
        "In the paper the three baselines have the same curve. Most prompts have 1,024 tokens, so with any output at "
        "all a chunk is rounded up to 2,048, even if the output length is known. Here the systems that know the "
        "length are slightly ahead, thanks to shorter prompts."
    )
    change_it = (
        "Cut the history to 960 tokens (`CHAT_PROMPT`), so that outputs below 64 fit into half the chunk: which "
        "system gains?",
        "Keep K and V from one round to the next, as prefix caching does today: run `minipaged paper run "
        "beyond/routing`.",
        "Let conversations end after every round (`CHAT_ENDS = 1`, and rates as in 12a): how far from 12a is it?",
    )

    def serving(self, system: str, rate: float, seconds: float, seed: int) -> ServingSetup:
        return replace(super().serving(system, rate, seconds, seed), dataset="chat")

    def checks(self, ours: Mapping[str, Sequence[published.Point]]) -> list[Check]:
        return [
            self.ratio_check(ours, "vLLM", "Orca (Oracle)", RATIO),
            self.ratio_check(ours, "Orca (Max)", "Orca (Oracle)", TOGETHER),
            self.ratio_check(ours, "Orca (Pow2)", "Orca (Oracle)", TOGETHER),
            *self.knee_checks(ours, None),
        ]

    def sentences(self, ours: Mapping[str, Sequence[published.Point]]) -> list[PaperClaim]:
        """Return the paper's sentence on vLLM's lead over the baselines."""
        return [
            self.times_said(ours, f"{SAID:g}x higher request rates compared to the three Orca baselines", SAID, READ)
        ]


FIG_17 = Fig17("17")
