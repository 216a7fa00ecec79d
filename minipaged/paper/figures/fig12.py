"""Fig. 12 a to f: normalized latency against request rate, single sequences, three models and two datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minipaged.paper import published
from minipaged.paper.calibration import flat_points
from minipaged.paper.figure import Check, Figure, Job, Line, Outcome, Plot, Sentence
from minipaged.paper.machines import SETTINGS
from minipaged.paper.serving import Serving

TOLERANCE = 0.18
"""Of each knee. (The median of all is to be within MEDIAN.)"""
MEDIAN = 0.06
BEYOND = 1.1
QUICK_SECONDS = 300.0
SYSTEMS = ("FasterTransformer", "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM")


class Fig12(Figure):
    """One panel."""

    section = "6.2"
    look = (
        "Each curve is flat, and then it is not: from some rate on the queue grows as long as requests come. Where "
        "that happens is decided by how many requests fit into the memory at once, and so by how much of it holds "
        "tokens."
    )

    def __init__(self, panel: str) -> None:
        self.panel = panel
        self.model, self.dataset = published.model(panel), published.dataset(panel)
        self.name = panel
        self.title = f"Fig. {panel}: {self.model}, {self.dataset}"

    def rates(self, system: str) -> list[float]:
        """Those of the paper's points, each once, and one beyond where its curve leaves the panel."""
        last = BEYOND * published.with_exit(self.panel, system)[-1][0]
        return [*dict.fromkeys(rate for rate, _ in published.curves(self.panel)[system]), last]

    def _serving(self, system: str, rate: float, seconds: float, seed: int) -> Serving:
        return Serving(system, self.model, self.dataset, rate, seconds, seed)

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        seconds = QUICK_SECONDS if quick else SETTINGS[self.model].seconds
        return [self._serving(system, rate, seconds, seed) for system in SYSTEMS for rate in self.rates(system)]

    def outcome(self, results: Mapping[Job, Any]) -> Outcome:
        ours: dict[str, list[published.Point]] = {system: [] for system in SYSTEMS}
        for job, result in results.items():
            assert isinstance(job, Serving)
            ours[job.system].append((job.rate, result["normalized_latency"]))
        lines = [Line(system, "ours", sorted(points)) for system, points in ours.items()]
        lines += [Line(system, "paper", published.with_exit(self.panel, system)) for system in SYSTEMS]
        flat = [(point.rate, point.seconds_per_token) for point in flat_points(self.panel)]
        plot = Plot(
            self.title, "requests/s", "normalized latency (s/token)", [*lines, Line("", "calibrated", flat)], y_max=1.0
        )
        checks = [
            Check(
                f"{system}: requests/s at {published.KNEE} s/token",
                published.knee(published.with_exit(self.panel, system)),
                published.knee(sorted(ours[system])),
                None if system == "FasterTransformer" else TOLERANCE,
                unit="/s",
            )
            for system in SYSTEMS
        ]
        return Outcome([plot], checks, self._sentences(ours))

    def _sentences(self, ours: Mapping[str, list[published.Point]]) -> list[Sentence]:
        return []


FIG_12 = tuple(Fig12(f"12{letter}") for letter in "abcdef")
