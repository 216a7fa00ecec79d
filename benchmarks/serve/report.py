"""What was measured, as it is shown in a terminal."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.serve.figures import Figures, Spread
from benchmarks.serve.run import Run


@dataclass(frozen=True)
class Measurement:
    """One run at one server."""

    round: int
    rate: float | None
    """Requests a second; None: a trace's own times."""
    target: str
    figures: Figures
    engine_tokens_per_second: float | None
    """What `LLM.generate` did with the same requests, just before."""
    run: Run

    @property
    def share_of_engine(self) -> float | None:
        engine = self.engine_tokens_per_second
        return None if engine is None else self.figures.output_tokens_per_second / engine

    def as_json(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "rate": self.rate if self.rate is None or math.isfinite(self.rate) else "inf",
            "target": self.target,
            "figures": asdict(self.figures),
            "engine_tokens_per_second": self.engine_tokens_per_second,
            "share_of_engine": self.share_of_engine,
            "records": [asdict(record) for record in self.run.records],
        }


def show_run(measurement: Measurement, console: Console) -> None:
    figures = measurement.figures
    title = f"{measurement.target}, {in_words(measurement.rate)}"
    table = Table("ms", "mean", "p50", "p95", "p99", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    spreads = {"TTFT": figures.ttft, "TPOT": figures.tpot, "ITL": figures.itl, "latency": figures.latency}
    for name, spread in spreads.items():
        table.add_row(name, *_milliseconds(spread))
    console.print(table)
    for line in lines(measurement):
        print(line, file=console.file)


def show_all(measured: list[Measurement], console: Console) -> None:
    """The runs in one table, and the knees, where there is more than one run."""
    if len(measured) < 2:
        return
    table = Table("server", "offered/s", "done/s", "tokens/s", "TTFT p95", "TPOT p95", "goodput/s", "keeps up")
    for m in measured:
        f = m.figures
        table.add_row(
            m.target,
            "trace" if m.rate is None else f"{m.rate:g}",
            f"{f.requests_per_second:.2f}",
            f"{f.output_tokens_per_second:.1f}",
            _milliseconds(f.ttft)[2],
            _milliseconds(f.tpot)[2],
            "" if f.goodput is None else f"{f.goodput:.2f}",
            {None: "", True: "yes", False: "no"}[f.keeps_up],
        )
    console.print(table)
    found = knees(measured)
    for name, knee in found.items():
        print(f"{name}: {knee_in_words(knee, next(iter(found.values())))}", file=console.file)


def lines(measurement: Measurement) -> list[str]:
    """What the table of one run does not say."""
    figures = measurement.figures
    found = [
        f"{figures.completed} of {figures.requests} requests in {figures.seconds:.1f} s: "
        f"{figures.requests_per_second:.2f} requests/s, {figures.output_tokens_per_second:.1f} output tokens/s"
    ]
    if figures.goodput is not None:
        found.append(f"goodput: {figures.goodput:.2f} requests/s; {figures.share_met:.0%} met the objectives")
    if measurement.share_of_engine is not None:
        found.append(
            f"{measurement.share_of_engine:.1%} of the engine's own {measurement.engine_tokens_per_second:.1f} tokens/s"
        )
    if figures.share_delivered is not None:
        found.append(
            f"the server does not keep up: {'; '.join(figures.behind_because)}"
            if figures.behind_because
            else f"{figures.share_delivered:.0%} of the tokens came while they were asked for; the server keeps up"
        )
    examples = {record.error: record.message for record in reversed(measurement.run.records) if record.error}
    found += [f"failed: {count} × {kind}: {examples[kind]}" for kind, count in figures.errors.items()]
    asked, counted = figures.output_tokens
    if abs(asked - counted) > 0.01 * asked:
        found.append(
            f"outputs: {asked:.1f} tokens asked for and {counted:.1f} made: the server does not hold the lengths"
        )
    asked, counted = figures.prompt_tokens
    if counted and abs(asked - counted) > 0.01 * asked:
        found.append(f"prompts: {asked:.1f} tokens asked for and {counted:.1f} counted by the server")
    if figures.share_cached > 0.01:
        found.append(
            f"{figures.share_cached:.0%} of the prompts came from the prefix cache; another --seed makes other prompts"
        )
    if figures.late_because:
        found.append(f"the tool itself was late: {'; '.join(figures.late_because)}")
    return found


def knees(measured: list[Measurement]) -> dict[str, dict[str, Any]]:
    """By server: the highest rate at which it kept up in every round, and what it did there (the median of rounds)."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(m.target for m in measured):
        runs = [m for m in measured if m.target == name and m.rate is not None and m.figures.keeps_up is not None]
        behind = [m for m in runs if not m.figures.keeps_up]
        failed = {m.rate for m in behind}
        kept = {m.rate for m in runs} - failed
        below = [rate for rate in kept if rate < min(failed, default=math.inf)]
        if not runs:
            continue
        at = [m.figures for m in runs if m.rate == max(below, default=None)]
        found[name] = {
            "rate": max(below, default=None),
            "not_at": min(failed, default=None),
            "not_because": next((m.figures.behind_because for m in behind if m.rate == min(failed)), []),
            "output_tokens_per_second": _median([f.output_tokens_per_second for f in at]),
            "ttft_p95": _median([f.ttft.p95 for f in at if f.ttft]),
        }
    return found


def in_words(rate: float | None) -> str:
    if rate is None:
        return "as in the trace"
    return "all at once" if rate == math.inf else f"{rate:g} requests a second"


def knee_in_words(knee: dict[str, Any], first: dict[str, Any]) -> str:
    because = "; ".join(knee["not_because"])
    if knee["rate"] is None:
        return f"does not keep up with {knee['not_at']:g} requests/s, the lowest rate here ({because})"
    beyond = "the highest rate here; the knee lies above it"
    if knee["not_at"]:
        beyond = f"and not with {knee['not_at']:g} ({because})"
    said = (
        f"keeps up with {knee['rate']:g} requests/s, {beyond}: {knee['output_tokens_per_second']:.1f} output tokens/s, "
        f"TTFT p95 {knee['ttft_p95'] * 1e3:.0f} ms"
    )
    if knee is first or first["rate"] is None:
        return said
    tokens, ttft = (knee[what] / first[what] for what in ("output_tokens_per_second", "ttft_p95"))
    return f"{said} ({tokens:.2f} × and {ttft:.2f} × those of the first)"


def _median(values: list[float]) -> float | None:
    return sorted(values)[(len(values) - 1) // 2] if values else None


def _milliseconds(spread: Spread | None) -> tuple[str, ...]:
    if spread is None:
        return ("-",) * 4
    return tuple(f"{seconds * 1e3:.1f}" for seconds in (spread.mean, spread.p50, spread.p95, spread.p99))
