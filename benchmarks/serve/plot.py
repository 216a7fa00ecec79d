"""The picture of a measurement: how times are distributed at one rate, or what becomes of them as the rate grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serve.figures import Figures
from benchmarks.serve.report import Measurement
from benchmarks.serve.run import Record


def draw(measured: Sequence[Measurement], file: Path) -> None:
    """Write the picture in the format that the end of the file's name says: .svg, .png or .pdf."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(10, 7), layout="constrained")
    finite = [m for m in measured if m.rate is not None and m.rate < math.inf]
    axes = list(picture.subplots(2, 2).flat)
    if len({m.rate for m in finite}) > 1:
        _over_rates(finite, axes)
    else:
        _distributions(measured, axes)
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    picture.savefig(file)


def _over_rates(measured: Sequence[Measurement], axes: Any) -> None:
    """A line for each server over the rates that it was offered; dashed: the 95th percentile."""
    panels: list[tuple[str, dict[str, Callable[[Figures], float | None]]]] = [
        ("output tokens a second", {"": lambda f: f.output_tokens_per_second}),
        ("requests a second, done (goodput, with objectives)", {"": _done}),
        ("TTFT, s", {" p50": lambda f: f.ttft and f.ttft.p50, " p95": lambda f: f.ttft and f.ttft.p95}),
        ("TPOT, s", {" p50": lambda f: f.tpot and f.tpot.p50, " p95": lambda f: f.tpot and f.tpot.p95}),
    ]
    for axis, (title, reads) in zip(axes, panels, strict=True):
        for color, name in enumerate(dict.fromkeys(m.target for m in measured)):
            for style, (what, read) in zip(("o-", "s--"), reads.items(), strict=False):
                points = [(m.rate, read(m.figures)) for m in measured if m.target == name]
                found = sorted(point for point in points if point[1] is not None)
                axis.plot([x for x, _ in found], [y for _, y in found], style, color=f"C{color}", label=name + what)
        axis.set(title=title, xlabel="requests a second, offered")
        axis.set_yscale("log" if title.endswith(", s") else "linear")


def _done(figures: Figures) -> float:
    return figures.requests_per_second if figures.goodput is None else figures.goodput


def _distributions(measured: Sequence[Measurement], axes: Any) -> None:
    panels: list[tuple[str, Callable[[Record], Sequence[float | None]]]] = [
        ("TTFT", lambda record: [record.ttft]),
        ("TPOT", lambda record: [record.tpot]),
        ("ITL", lambda record: record.itl),
        ("latency", lambda record: [record.latency]),
    ]
    for axis, (title, read) in zip(axes, panels, strict=True):
        for name in dict.fromkeys(m.target for m in measured):
            done = [record for m in measured if m.target == name for record in m.run.records if not record.error]
            found = [time for record in done for time in read(record) if time is not None]
            if found:
                axis.ecdf(found, label=name)
        axis.set(title=title, xlabel="seconds", ylabel="share")
        axis.set_xscale("log")
