"""Fig. 15: memory saved by sharing blocks, where a request has several outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minipaged.paper import published
from minipaged.paper.figure import Check, Figure, Job, Line, Outcome, Plot, Sentence
from minipaged.paper.serving import Serving

MODEL, DATASET = "OPT-13B", "Alpaca"
SEQUENCES = (2, 4, 6)
RATES = {2: 9.0, 4: 5.0, 6: 3.5}
"""Requests a second: half of what vLLM serves of such requests (Fig. 14). What is saved hardly depends on it."""
SECONDS, QUICK_SECONDS = 300.0, 40.0
TOLERANCE = 3.0
"""Percent of the blocks."""


METHODS = {"parallel": "parallel sampling", "beam": "beam search"}
"""How requests get several outputs, by the paper's data."""
SAID = {"parallel": (6.1, 9.8), "beam": (37.6, 55.2)}
"""Percent of the blocks, with least and with most outputs: section 6.3."""


def serving(method: str, n: int, *, quick: bool, seed: int) -> Serving:
    """One bar: n outputs of each prompt."""
    seconds = QUICK_SECONDS if quick else SECONDS
    return Serving("vLLM", MODEL, DATASET, RATES[n], seconds, seed, n=n, beams=method == "beam")


class Fig15(Figure):
    """Blocks saved, by how many outputs."""

    name = "15"
    title = f"Fig. 15: memory saved by sharing, {MODEL}, {DATASET}"
    section = "6.3"
    look = (
        "Samples share their prompt and nothing else, and Alpaca's prompts are a quarter of the text: so it is about a "
        "tenth that they save. Beams share what they have generated too, as far back as their common parent."
    )
    change_it = (
        "Take ShareGPT (`DATASET`, and lower `RATES`): its prompts are 8 times as long. The paper says 16 to 31 %.",
        "Blocks of 1 token (`Serving(block_size=1)`): everything that could be shared is. How much is that?",
        "Ask for 8 samples of each (`SEQUENCES`, `RATES`, and no beams): where does the saving end?",
    )

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        return [serving(method, n, quick=quick, seed=seed) for method in METHODS for n in SEQUENCES]

    def outcome(self, results: Mapping[Job, Any]) -> Outcome:
        printed = published.other("15 memory saving (%) OPT-13B Alpaca, n=2,4,6")
        plots, checks = [], []
        of: dict[tuple[bool, int], float] = {}
        for job, result in results.items():
            assert isinstance(job, Serving)
            of[job.beams, job.n] = 100 * result["saved_share"]
        for method, title in METHODS.items():
            ours = [of[method == "beam", n] for n in SEQUENCES]
            bars = [
                Line("simulated", "ours", list(enumerate(ours))),
                Line("printed", "paper", list(enumerate(printed[method]))),
            ]
            groups = [str(n) for n in SEQUENCES]
            plots.append(Plot(title, "outputs of a request", "% of blocks saved", bars, groups=groups))
            checks += [
                Check(f"{title}, {n} outputs", printed[method][i], ours[i], TOLERANCE, relative=False, unit=" %")
                for i, n in enumerate(SEQUENCES)
            ]
        ends = {method: (printed[method][0], printed[method][-1]) for method in METHODS}
        own = {method: (of[method == "beam", SEQUENCES[0]], of[method == "beam", SEQUENCES[-1]]) for method in METHODS}
        in_paper, in_ours = (
            "; ".join(f"{least:.1f} % to {most:.1f} %" for least, most in pairs.values()) for pairs in (ends, own)
        )
        (few, many), (few_beams, many_beams) = SAID.values()
        sentence = Sentence(
            f"{few}% - {many}% memory saving on parallel sampling and {few_beams}% - {many_beams}% on beam search",
            self.section,
            in_paper,
            in_ours,
            {method: tuple(round(share, 1) for share in shares) for method, shares in ends.items()} == SAID,
        )
        return Outcome(
            plots,
            checks,
            [sentence],
            [
                "Saved is 1 - blocks held / block-table entries, over all steps: a block that three tables have is "
                "held once. The paper's bars were counted so as well.",
                "Beams diverge as those of SmolLM2 were heard to (paper/divergence.py). Fewer blocks are saved where "
                "beams part earlier, as OPT-13B's seem to.",
            ],
        )


FIG_15 = Fig15()
