"""Fig. 11: the lengths of prompts and outputs in ShareGPT and Alpaca."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minipaged.paper import published
from minipaged.paper.figure import Check, Figure, FigureResult, Job, Line, Plot
from minipaged.paper.workloads import draw_lengths

PRINTED = {"ShareGPT": (161.31, 337.99), "Alpaca": (19.31, 58.45)}
"""Mean tokens of prompts and of outputs, as printed in the figure."""
TOLERANCE = 0.01
"""Tolerance of the means, as a fraction."""
MOVED = 2.0
"""The share of requests that may lie in another bin than in the paper, in percent."""
NUM, QUICK_NUM = 200_000, 80_000
"""The number of requests drawn. The mean of ShareGPT's prompts then varies by 0.4 %, and by 0.6 % in quick runs."""
SHOWN = {"ShareGPT": 2048.0, "Alpaca": 400.0}
SIDES = ("input", "output")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A job that draws request lengths of a dataset, in the same way as a trace."""

    dataset: str
    num: int
    seed: int

    def run(self) -> DrawnLengths:
        """Draw them."""
        drawn = np.array(draw_lengths(self.dataset, self.num, np.random.default_rng((self.seed, 0))))  # [num, 2]
        counts: list[list[int]] = []
        for side, lengths in zip(SIDES, drawn.T, strict=True):
            first, last, printed = published.histogram(self.dataset, side)
            found, _ = np.histogram(lengths, len(printed), (first, last))  # [bins]
            counts.append(found.tolist())
        return DrawnLengths(drawn.mean(axis=0).tolist(), counts, int((drawn.sum(axis=1) >= 2048).sum()))


@dataclass(frozen=True, slots=True)
class DrawnLengths:
    """Means and histograms of drawn lengths. Lists have prompts first, then outputs."""

    means: list[float]
    counts: list[list[int]]
    """The number of requests in each of the paper's bins."""
    too_long: int
    """Requests whose prompt and output together exceed the model's context."""


class Fig11(Figure):
    """Histograms of each dataset: the paper's, and those of the drawn lengths."""

    name = "11"
    title = "Fig. 11: lengths of prompts and outputs"
    section = "6.1"
    look = (
        "ShareGPT's prompts are 8 times as long as Alpaca's, and its outputs 6 times. Both vary far more. A system "
        "that reserves memory for the longest length loses most if lengths vary most."
    )
    change_it = (
        "Draw 2,000 requests (`QUICK_NUM = 2_000`, --quick) with three seeds: how far apart are the means?",
        "Give each long prompt a long output (sort both in `workloads.draw_lengths`): the histograms stay the same, "
        "but does Fig. 12a?",
        "Give all requests the mean lengths, and run 12a again: which system gains most, and why?",
    )

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        return [Lengths(dataset, QUICK_NUM if quick else NUM, seed) for dataset in PRINTED]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        plots, checks = [], []
        for job, found in results.items():
            assert isinstance(job, Lengths)
            lines = []
            for i, side in enumerate(SIDES):
                first, last, printed = published.histogram(job.dataset, side)
                ours, paper = (100 * np.asarray(counts) / sum(counts) for counts in (found["counts"][i], printed))
                width = (last - first) / len(printed)
                middles = [first + (bin_ + 0.5) * width for bin_ in range(len(printed))]
                for style, shares in (("ours", ours), ("paper", paper)):
                    shown = [(x, y) for x, y in zip(middles, shares.tolist(), strict=True) if x < SHOWN[job.dataset]]
                    lines.append(Line(side, style, shown))  # type: ignore[arg-type]
                what = f"{job.dataset}: {side}"
                moved = float(np.abs(ours - paper).sum() / 2)
                checks += [
                    Check(f"{what}, mean tokens", PRINTED[job.dataset][i], found["means"][i], TOLERANCE, kind="exact"),
                    Check(f"{what}, in other bins", 0.0, moved, MOVED, relative=False, unit=" %", kind="exact"),
                ]
            plots.append(Plot(job.dataset, "tokens", "requests in a bin (%)", lines))
        return FigureResult(
            plots,
            checks,
            notes=[
                "The paper prints the lengths of prompts and of outputs, but not which belong together. Here they "
                "are drawn independently, except that both together fit into 2,048 tokens.",
                "All lengths within a bin are drawn with equal probability, as a histogram says no more.",
            ],
        )


FIG_11 = Fig11()
