"""Fig. 2: the use of the KV memory: tokens, slots reserved for tokens to come, and waste."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minipaged.paper import published
from minipaged.paper.figure import Check, Figure, FigureResult, Job, Line, PaperClaim, Plot
from minipaged.paper.figures.fig13 import SYSTEMS, serving
from minipaged.paper.serving import ServingSetup

TOLERANCE = 2.0
"""Tolerance of the share of tokens, in percent of the memory. The paper has a single run, and does not describe how it
counts."""
OTHERS_TOLERANCE = 5.0
"""Tolerance of the other shares, in percent of the memory."""
SAID = 20.4, 38.2
"""The lowest and highest share of tokens in systems that reserve memory, in percent, by section 1."""
PARTS = {
    "token states": "tokens",
    "reservation": "reserved",
    "internal": "internal",
    "external and others": "external",
}
"""The paper's name of each share -> its field in `serving.Queued`."""


class Fig2(Figure):
    """Shares of the KV memory in four systems."""

    name = "2"
    title = "Fig. 2: what the KV memory holds, OPT-13B, ShareGPT"
    section = "3.1"
    look = (
        "Orca (Max) loses most to tokens that never come. Orca (Oracle), which knows the output lengths, loses most "
        "to rounding and to slots whose tokens have not come yet. Paging has none of these losses: it loses half a "
        "block for each sequence."
    )
    change_it = (
        "Let Orca expect twice the true output (a new estimate in `orca.ESTIMATES`): between which two systems is it?",
        "Hand out chunks of any size (`OrcaMemory.chunks`, with an allocator that splits anywhere instead of "
        "`BuddyAllocator`): how much of *external* was rounding?",
        "Serve Alpaca (`fig13.serving`): why does Orca (Max) waste 96 % of its memory?",
    )

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        return [serving(system, "ShareGPT", quick=quick, seed=seed) for system in SYSTEMS]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        printed = published.other("2 share of KV memory (%)")
        ours: dict[str, dict[str, float]] = {}
        for job, result in results.items():
            assert isinstance(job, ServingSetup)
            shares = {part: 100 * result["queued"][field] for part, field in PARTS.items() if field != "external"}
            ours[job.system] = {**shares, "external and others": 100 - sum(shares.values())}
        groups = [f"{system.replace(' ', chr(10))}\n{whose}" for system in SYSTEMS for whose in ("paper", "ours")]
        bars = []
        for part in PARTS:
            heights = [of[system][part] or 0.0 for system in SYSTEMS for of in (printed, ours)]
            bars.append(Line(part, "ours", list(enumerate(heights))))
        checks = [
            Check(
                f"{system}: {part}",
                printed[system][part] if system != "vLLM" or part == "token states" else None,
                ours[system][part],
                TOLERANCE if part == "token states" else OTHERS_TOLERANCE,
                relative=False,
                unit=" %",
            )
            for system in SYSTEMS
            for part in PARTS
        ]
        of_tokens = [printed[system]["token states"] for system in SYSTEMS[:-1]]
        own = [ours[system]["token states"] for system in SYSTEMS[:-1]]
        sentence = PaperClaim(
            f"only {SAID[0]}% - {SAID[1]}% of the KV cache memory is used to store the actual token states",
            "1",
            f"{min(of_tokens)} % to {max(of_tokens)} %",
            f"{min(own):.1f} % to {max(own):.1f} %",
            (min(of_tokens), max(of_tokens)) == SAID,
        )
        return FigureResult(
            [Plot(self.title, "", "% of the KV memory", bars, y_max=140, groups=groups, stacked=True)],
            checks,
            [sentence],
            [
                "Means are over the steps during which a request waits, so that all of the memory is in demand.",
                "*Internal* is memory for tokens that were expected and never come. *External and others* is memory "
                "that no request holds, and memory that the buddy allocator adds when it rounds a chunk up to a "
                "power of two. This way of counting fits the paper's bars: its Orca (Oracle) has no internal waste "
                "although its chunks are rounded.",
            ],
        )


FIG_2 = Fig2()
