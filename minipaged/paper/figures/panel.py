"""A plot of normalized latency against request rate, with a curve for each system, as in Figs. 12, 14, 16 and 17."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from minipaged.paper import published
from minipaged.paper.calibration import flat_points
from minipaged.paper.figure import Check, Figure, FigureResult, Job, Line, PaperClaim, Plot
from minipaged.paper.serving import ServingSetup, systems

BEYOND = 1.1, 1.2
"""Each curve is also run at these multiples of the rate at which the paper's curve leaves its panel, or of its last
rate if it does not."""
RISE, APART = 8.0, 1.05
"""The two points around a knee of ours differ by at most a factor of RISE in latency, or by at most a factor of APART
in rate (with seed 0). Otherwise the knee would lie on a long straight line, far from any point that was run."""
BETWEEN: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "12a": {"Orca (Max)": (0.575, 0.613), "Orca (Pow2)": (0.838,)},
    "12b": {"Orca (Max)": (0.15,), "Orca (Pow2)": (0.275,), "Orca (Oracle)": (0.35,)},
    "12c": {"Orca (Max)": (0.875,)},
    "12d": {
        "Orca (Max)": (3.5, 3.75, 3.88),
        "Orca (Pow2)": (17.0, 16.5),
        "Orca (Oracle)": (22.2, 22.8),
        "vLLM": (32.5,),
    },
    "12e": {"Orca (Pow2)": (6.85,), "Orca (Oracle)": (10.5,)},
    "12f": {"Orca (Max)": (5.52,), "Orca (Pow2)": (18.2,), "Orca (Oracle)": (20.4,)},
    "14a": {"Orca (Pow2)": (9.54,), "Orca (Oracle)": (13.7,), "vLLM": (19.2,)},
    "14b": {"Orca (Max)": (0.375,), "vLLM": (11.1, 10.8)},
    "14c": {"Orca (Max)": (0.375,), "vLLM": (7.58, 7.29)},
    "14d": {"Orca (Pow2)": (8.33,), "Orca (Oracle)": (11.8,), "vLLM": (17.9,)},
    "14e": {"Orca (Max)": (0.375,), "vLLM": (10.2, 9.85)},
    "14f": {"vLLM": (6.75,)},
    "16a": {"vLLM": (44.0,)},
    "17": {"Orca (Max)": (0.5,)},
}
"""Panel -> system -> rates that were added by this rule, in the order in which `halfway` returned them. Every curve
that needed them got them, whatever its verdict was before or after, except FasterTransformer's, which is not judged."""


def halfway(line: Sequence[published.Point]) -> float | None:
    """Return the rate that a curve needs next, halfway between the two points around its knee, rounded to three digits.
    Returns None if it needs no more."""
    for (x0, y0), (x1, y1) in pairwise(line):
        if y0 <= published.KNEE < y1:
            return float(f"{(x0 + x1) / 2:.3g}") if y1 > RISE * y0 and x1 > APART * x0 else None
    return None


class Panel(Figure):
    """One panel. Subclasses say what is served (`serving`), for how long, and what is checked."""

    seconds = 3600.0
    """Duration of the traces."""
    quick_seconds = 300.0
    """Duration of the traces of quick runs."""
    further: Mapping[str, tuple[float, ...]] = {}
    """System -> additional multiples like BEYOND's, if its curve leaves the panel later in our runs than in the paper.
    """

    def __init__(self, panel: str) -> None:
        self.name = self.panel = panel
        self.model = published.model(panel)
        self.systems = list(published.curves(panel))

    def serving(self, system: str, rate: float, seconds: float, seed: int) -> ServingSetup:
        """Return the job for one point of a curve."""
        return ServingSetup(system, self.model, published.dataset(self.panel), rate, seconds, seed)

    def rates(self, system: str) -> list[float]:
        """Return the rates to run.

        These are the rates of the paper's points, each once; the first multiple of BEYOND if the paper's curve leaves
        the panel, or else both; and the rates of `further` and `BETWEEN`."""
        drawn, line = published.curves(self.panel)[system], published.with_exit(self.panel, system)
        beyond = *BEYOND[: 1 if len(line) > len(drawn) else 2], *self.further.get(system, ())
        between = BETWEEN.get(self.panel, {}).get(system, ())
        return [*dict.fromkeys(rate for rate, _ in drawn), *(factor * line[-1][0] for factor in beyond), *between]

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        seconds = self.quick_seconds if quick else self.seconds
        return [self.serving(system, rate, seconds, seed) for system in self.systems for rate in self.rates(system)]

    def curves(self, results: Mapping[Job, Any]) -> dict[str, list[published.Point]]:
        """Return our curves from the results of the jobs."""
        found: dict[str, list[published.Point]] = {system: [] for system in self.systems}
        for job, result in results.items():
            assert isinstance(job, ServingSetup)
            found[job.system].append((job.rate, result["normalized_latency"]))
        return {system: sorted(points) for system, points in found.items()}

    def plot(self, ours: Mapping[str, Sequence[published.Point]]) -> Plot:
        lines = [Line(system, "ours", points) for system, points in ours.items()]
        lines += [Line(system, "paper", published.with_exit(self.panel, system)) for system in self.systems]
        if flat := [(point.rate, point.seconds_per_token) for point in flat_points(self.panel)]:
            lines.append(Line("", "calibrated", flat))
        return Plot(self.title, "requests/s", "normalized latency (s/token)", lines, y_max=1.0)

    def knees(self, ours: Mapping[str, Sequence[published.Point]]) -> dict[str, tuple[float | None, float | None]]:
        """Return the paper's knee and ours for each system."""
        return {
            system: (
                published.knee(published.with_exit(self.panel, system)),
                published.knee(ours[system]),
            )
            for system in self.systems
        }

    def knee_checks(self, ours: Mapping[str, Sequence[published.Point]], tolerance: float | None) -> list[Check]:
        judged = {name: system.judged for name, system in systems().items()}
        return [
            Check(f"{system}, requests/s", *pair, tolerance if judged[system] else None, unit="/s")
            for system, pair in self.knees(ours).items()
        ]

    def ratios(
        self, ours: Mapping[str, Sequence[published.Point]], over: str, under: str
    ) -> tuple[float | None, float | None]:
        """Return the ratio of the knee of `over` to the knee of `under`, in the paper and in ours."""
        knees = self.knees(ours)
        of = [None if a is None or b is None else a / b for a, b in zip(knees[over], knees[under], strict=True)]
        return of[0], of[1]

    def ratio_check(
        self, ours: Mapping[str, Sequence[published.Point]], over: str, under: str, tolerance: float
    ) -> Check:
        """Return a check of the ratio of two systems' knees."""
        return Check(f"{over} ÷ {under}", *self.ratios(ours, over, under), tolerance, unit="×")

    def times_said(
        self, ours: Mapping[str, Sequence[published.Point]], words: str, times: float, read: float, section: str = ""
    ) -> PaperClaim:
        """Return the paper's sentence `words`, which says that vLLM serves `times` the rate of Orca (Oracle).

        The sentence holds if the paper's own curves give `times` within the fraction `read`. `section` is the
        sentence's section, by default the figure's."""
        paper, found = self.ratios(ours, "vLLM", "Orca (Oracle)")
        in_paper, in_ours = ("no number" if x is None else f"{x:.2f} x" for x in (paper, found))
        holds = paper is not None and abs(paper / times - 1) <= read
        return PaperClaim(words, section or self.section, in_paper, in_ours, holds)

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        ours = self.curves(results)
        notes = [*self.notes(), *self.without_knee(ours)]
        return FigureResult([self.plot(ours)], self.checks(ours), self.sentences(ours), notes)

    def without_knee(self, ours: Mapping[str, Sequence[published.Point]]) -> list[str]:
        """Return a note that names the curves without a knee, whose places in the table are empty, if there are any."""
        ends = [f"{name} {line[-1][0]:.3g}/s" for name, line in ours.items() if published.knee(line) is None]
        if not ends:
            return []
        return [
            f"No number: up to the highest rate that was run ({', '.join(ends)}) the curve does not come to "
            f"{published.KNEE:g} s a token. Short traces (of --quick) end before the queue is so long: take "
            "longer ones, or a higher rate (`BEYOND`)."
        ]

    @abstractmethod
    def checks(self, ours: Mapping[str, Sequence[published.Point]]) -> list[Check]:
        """Return the panel's checks. Knees are at `published.KNEE` seconds per token."""

    def sentences(self, ours: Mapping[str, Sequence[published.Point]]) -> list[PaperClaim]:
        """Return the paper's sentences on this panel."""
        return []

    def notes(self) -> list[str]:
        return []
