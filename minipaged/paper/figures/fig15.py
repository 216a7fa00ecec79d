"""Fig. 15: memory saved by sharing blocks between several outputs of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minipaged.paper import published
from minipaged.paper.divergence import DIVERGENCE, GAP
from minipaged.paper.figure import Check, Figure, FigureResult, Job, Line, PaperClaim, Plot
from minipaged.paper.serving import ServingSetup

MODEL, DATASET = "OPT-13B", "Alpaca"
SEQUENCES = (2, 4, 6)
RATES = {2: 9.0, 4: 5.0, 6: 3.5}
"""Requests per second, by the number of outputs: half of what vLLM can serve (Fig. 14). The saving hardly depends on
the rate."""
SECONDS, QUICK_SECONDS = 300.0, 40.0
TOLERANCE = 3.0
"""Tolerance of the saving, in percent of the blocks."""


METHODS = {"parallel": "parallel sampling", "beam": "beam search"}
"""The methods that give a request several outputs: name in the paper's data -> label."""
SAID = {"parallel": (6.1, 9.8), "beam": (37.6, 55.2)}
"""Savings with the fewest and with the most outputs, in percent of the blocks, by section 6.3."""


def serving(method: str, n: int, divergence: str, *, quick: bool, seed: int) -> ServingSetup:
    """Return the job for one bar, with `n` outputs of each prompt."""
    seconds = QUICK_SECONDS if quick else SECONDS
    return ServingSetup(
        "vLLM", MODEL, DATASET, RATES[n], seconds, seed, n=n, beams=method == "beam", divergence=divergence
    )


class Fig15(Figure):
    """The share of blocks saved, by the number of outputs."""

    name = "15"
    title = f"Fig. 15: memory saved by sharing, {MODEL}, {DATASET}"
    section = "6.3"
    look = (
        "Samples share only their prompt. Alpaca's prompts are a quarter of the text, so samples save about a tenth "
        "of the blocks. Beams also share what they generated, as far back as their common parent."
    )
    change_it = (
        "Serve ShareGPT (`DATASET`, and lower `RATES`), whose prompts are 8 times as long. The paper reports 16 to "
        "31 %.",
        "Use blocks of 1 token (`ServingSetup(block_size=1)`): everything that could be shared is shared. How much "
        "is that?",
        "Let beams stay separate for longer (`GAP = 12` in `divergence.py`): which modelled bars come within 3 "
        "points of the paper's?",
    )

    why: Mapping[str, str] = {
        "beam search": "the measured beams of SmolLM2 share more of the tokens that they generated than the paper's "
        "beams seem to. Beams of OPT-13B were not measured.",
    }

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        of = {"parallel": ["measured"], "beam": list(DIVERGENCE)}
        return [
            serving(method, n, divergence, quick=quick, seed=seed)
            for method in METHODS
            for divergence in of[method]
            for n in SEQUENCES
        ]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        printed = published.other("15 memory saving (%) OPT-13B Alpaca, n=2,4,6")
        plots, checks = [], []
        of: dict[tuple[bool, str], list[float]] = {}  # (beams, divergence) -> savings by number of outputs
        for job, result in results.items():
            assert isinstance(job, ServingSetup)
            of.setdefault((job.beams, job.divergence), []).append(100 * result["saved_share"])
        measured, modelled = {method: of[method == "beam", "measured"] for method in METHODS}, of[True, "modelled"]
        for method, title in METHODS.items():
            ours = measured[method]
            bars = [
                Line("simulated", "ours", list(enumerate(ours))),
                Line("printed", "paper", list(enumerate(printed[method]))),
            ]
            if method == "beam":
                bars.append(Line("simulated, by a model", "ours", list(enumerate(modelled))))
            groups = [str(n) for n in SEQUENCES]
            plots.append(Plot(title, "outputs of a request", "% of blocks saved", bars, groups=groups))
            checks += [
                Check(f"{title}, {n} outputs", printed[method][i], ours[i], TOLERANCE, relative=False, unit=" %")
                for i, n in enumerate(SEQUENCES)
            ]
        checks += [
            Check(f"beam search, {n} outputs, by a model", printed["beam"][i], modelled[i], None, False, " %")
            for i, n in enumerate(SEQUENCES)
        ]
        ends = {method: (printed[method][0], printed[method][-1]) for method in METHODS}
        own = {method: (line[0], line[-1]) for method, line in measured.items()}
        in_paper, in_ours = (
            "; ".join(f"{least:.1f} % to {most:.1f} %" for least, most in pairs.values()) for pairs in (ends, own)
        )
        (few, many), (few_beams, many_beams) = SAID.values()
        sentence = PaperClaim(
            f"{few}% - {many}% memory saving on parallel sampling and {few_beams}% - {many_beams}% on beam search",
            self.section,
            in_paper,
            in_ours,
            {method: tuple(round(share, 1) for share in shares) for method, shares in ends.items()} == SAID,
        )
        return FigureResult(
            plots,
            checks,
            [sentence],
            [
                "The saving is 1 - blocks held / block-table entries, over all steps: a block in three tables is "
                "held once. The paper counts its bars in the same way.",
                "The judged beams diverge as those of SmolLM2 were measured to. The other bars are a model with one "
                f"number, {GAP:g}, whose beams share as much as the measured ones (`divergence.py`). Fewer blocks are "
                "saved if beams stay separate for longer, as OPT-13B's seem to.",
            ],
        )


FIG_15 = Fig15()
