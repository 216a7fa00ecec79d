"""A plot of normalized latency against request rate, as in Figs. 12, 14, 16 and 17: a curve for each system."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from minipaged.paper import published
from minipaged.paper.calibration import flat_points
from minipaged.paper.figure import Check, Figure, Job, Line, Outcome, Plot, Sentence
from minipaged.paper.serving import Serving

BEYOND = 1.1, 1.2
"""Each curve goes on to so many times the rate at which the paper's leaves its panel, or of its last point."""


class Panel(Figure):
    """One panel: what is served (`serving`), by which systems, for how long."""

    seconds = 3600.0
    """How long the traces are."""
    quick_seconds = 300.0
    """The same of quick runs."""
    further: Mapping[str, tuple[float, ...]] = {}
    """System -> factors as in BEYOND."""

    def __init__(self, panel: str) -> None:
        self.name = self.panel = panel
        self.model = published.model(panel)
        self.systems = list(published.curves(panel))

    def serving(self, system: str, rate: float, seconds: float, seed: int) -> Serving:
        """One point of a curve."""
        return Serving(system, self.model, published.dataset(self.panel), rate, seconds, seed)

    def rates(self, system: str) -> list[float]:
        """Those of the paper's points, each once; one beyond the panel, or two where its curve does not leave it; and
        more where ours leaves it later (`further`)."""
        drawn, line = published.curves(self.panel)[system], published.with_exit(self.panel, system)
        beyond = *BEYOND[: 1 if len(line) > len(drawn) else 2], *self.further.get(system, ())
        return [*dict.fromkeys(rate for rate, _ in drawn), *(factor * line[-1][0] for factor in beyond)]

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        seconds = self.quick_seconds if quick else self.seconds
        return [self.serving(system, rate, seconds, seed) for system in self.systems for rate in self.rates(system)]

    def curves(self, results: Mapping[Job, Any]) -> dict[str, list[published.Point]]:
        """Ours."""
        found: dict[str, list[published.Point]] = {system: [] for system in self.systems}
        for job, result in results.items():
            assert isinstance(job, Serving)
            found[job.system].append((job.rate, result["normalized_latency"]))
        return {system: sorted(points) for system, points in found.items()}

    def plot(self, ours: Mapping[str, Sequence[published.Point]]) -> Plot:
        lines = [Line(system, "ours", points) for system, points in ours.items()]
        lines += [Line(system, "paper", published.with_exit(self.panel, system)) for system in self.systems]
        if flat := [(point.rate, point.seconds_per_token) for point in flat_points(self.panel)]:
            lines.append(Line("", "calibrated", flat))
        return Plot(self.title, "requests/s", "normalized latency (s/token)", lines, y_max=1.0)

    def knees(self, ours: Mapping[str, Sequence[published.Point]]) -> dict[str, tuple[float | None, float | None]]:
        """Of each system the paper's and ours."""
        return {
            system: (
                published.knee(published.with_exit(self.panel, system)),
                published.knee(ours[system]),
            )
            for system in self.systems
        }

    def knee_checks(self, ours: Mapping[str, Sequence[published.Point]], tolerance: float | None) -> list[Check]:
        return [
            Check(
                f"{system}, requests/s",
                *pair,
                None if system == "FasterTransformer" else tolerance,
                unit="/s",
            )
            for system, pair in self.knees(ours).items()
        ]

    def ratio_check(
        self, ours: Mapping[str, Sequence[published.Point]], over: str, under: str, tolerance: float
    ) -> Check:
        """How many times the requests of `under` `over` serves."""
        knees = self.knees(ours)
        quotients = [None if a is None or b is None else a / b for a, b in zip(knees[over], knees[under], strict=True)]
        return Check(f"{over} ÷ {under}", quotients[0], quotients[1], tolerance, unit="×")

    def outcome(self, results: Mapping[Job, Any]) -> Outcome:
        ours = self.curves(results)
        return Outcome([self.plot(ours)], self.checks(ours), self.sentences(ours), self.notes())

    @abstractmethod
    def checks(self, ours: Mapping[str, Sequence[published.Point]]) -> list[Check]:
        """What is compared; knees are at `published.KNEE` seconds a token."""

    def sentences(self, ours: Mapping[str, Sequence[published.Point]]) -> list[Sentence]:
        """Of the paper, about its panel."""
        return []

    def notes(self) -> list[str]:
        return []
