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


def parallel(n: int, *, quick: bool, seed: int) -> Serving:
    """n outputs sampled of each prompt."""
    return Serving("vLLM", MODEL, DATASET, RATES[n], QUICK_SECONDS if quick else SECONDS, seed, n=n)


METHODS = {"parallel": parallel}
"""As the paper's data names them: how requests get several outputs, and what serves them."""


class Fig15(Figure):
    """Blocks saved, by how many outputs."""

    name = "15"
    title = f"Fig. 15: memory saved by sharing, {MODEL}, {DATASET}"
    section = "6.3"
    look = (
        "Samples share their prompt and nothing else, and Alpaca's prompts are a quarter of the text: so it is a tenth "
        "at most that they save. Only full blocks stay shared: most prompts have one, the mean has 19 tokens."
    )
    change_it = (
        "Take ShareGPT (`DATASET`, and lower `RATES`): its prompts are 8 times as long. The paper says 16 to 31 %.",
        "Blocks of 1 token (`Serving(block_size=1)`): everything that could be shared is. How much is that?",
        "Ask for 32 outputs of each: where does the saving end, and which share of the text is that?",
    )

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        return [make(n, quick=quick, seed=seed) for make in METHODS.values() for n in SEQUENCES]

    def outcome(self, results: Mapping[Job, Any]) -> Outcome:
        printed = published.other("15 memory saving (%) OPT-13B Alpaca, n=2,4,6")
        plots, checks = [], []
        found = iter(results.values())  # in the order of `jobs`
        for method in METHODS:
            ours = [100 * next(found)["saved_share"] for _ in SEQUENCES]
            bars = [
                Line("simulated", "ours", list(enumerate(ours))),
                Line("printed", "paper", list(enumerate(printed[method]))),
            ]
            groups = [str(n) for n in SEQUENCES]
            plots.append(Plot(f"{method} sampling", "outputs of a request", "% of blocks saved", bars, groups=groups))
            checks += [
                Check(f"{method}, {n} outputs", printed[method][i], ours[i], TOLERANCE, relative=False, unit=" %")
                for i, n in enumerate(SEQUENCES)
            ]
        least, most = printed["parallel"][0], printed["parallel"][-1]
        sentence = Sentence(
            "6.1% - 9.8% memory saving on parallel sampling",
            self.section,
            f"{least} % to {most} %",
            " to ".join(f"{check.ours:.1f} %" for check in (checks[0], checks[len(SEQUENCES) - 1])),
            True,
        )
        return Outcome(
            plots,
            checks,
            [sentence],
            [
                "Saved is 1 - blocks held / block-table entries, over all steps: a block that three tables have is "
                "held once. The paper's bars were counted so as well."
            ],
        )


FIG_15 = Fig15()
