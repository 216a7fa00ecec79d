"""`minipaged paper`: list the figures, run some or all of them, and write a report."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from minipaged.errors import InvalidRequest
from minipaged.paper.drawing import save
from minipaged.paper.figure import Figure
from minipaged.paper.figures import FIGURES
from minipaged.paper.running import Results, run_figure

COLOUR = {"holds": "green", "fails": "red", "not judged": "dim"}


def list_figures() -> None:
    for figure in FIGURES.values():
        print(f"{figure.name:28} {figure.title}")


def run_figures(names: Sequence[str], *, quick: bool, seed: int, processes: int, output: Path) -> bool:
    """Run these figures, or all; returns whether no check failed."""
    chosen = list(FIGURES) if list(names) == ["all"] else list(names)
    if unknown := [name for name in chosen if name not in FIGURES]:
        raise InvalidRequest(f"there is no figure {unknown[0]!r}; there are: {', '.join(FIGURES)}")
    results, console, good = Results(output), Console(highlight=False), True
    for name in chosen:
        data = _run_one(FIGURES[name], results, quick=quick, seed=seed, processes=processes)
        path = output / name.replace("/", "-")
        save(data, path.with_suffix(".svg"))
        save(data, path.with_suffix(".png"))
        show(data, console)
        print(f"{path}.json .svg .png", file=sys.stderr)
        good &= all(check["verdict"] != "fails" for check in data["checks"])
    return good


def _run_one(figure: Figure, results: Results, *, quick: bool, seed: int, processes: int) -> dict[str, Any]:
    """With a bar, a step for each job."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(figure.name, total=len(set(figure.jobs(quick=quick, seed=seed))))
        return run_figure(
            figure, results, quick=quick, seed=seed, processes=processes, done=lambda _: progress.advance(task)
        )


def show(data: Mapping[str, Any], console: Console) -> None:
    """The table under a figure."""
    table = Table(title=data["title"] + (" (quick)" if data["made"]["quick"] else ""), title_justify="left")
    for column in ("", "paper", "ours", "difference", "tolerance", "verdict"):
        table.add_column(column, justify="left" if column in ("", "verdict") else "right")
    for check in data["checks"]:
        colour = COLOUR[check["verdict"]]
        table.add_row(*cells(check)[:-1], f"[{colour}]{check['verdict']}[/]")
    console.print(table)
    for said in data["sentences"]:
        borne = "its figure bears that out" if said["holds_in_paper"] else "its own figure does not bear that out"
        console.print(
            f'"{said["says"]}" (section {said["section"]}): {borne}, {said["in_paper"]}. Ours: {said["ours"]}.'
        )
    for note in data["notes"]:
        console.print(note)


def cells(check: Mapping[str, Any]) -> list[str]:
    """One row of the table: what, paper, ours, difference, tolerance, verdict."""

    def number(value: float | None) -> str:
        if value is None:
            return "-"
        return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}") + check["unit"]

    def apart(value: float | None, sign: str) -> str:
        if value is None:
            return "-"
        return f"{value:{sign}.1%}" if check["relative"] else f"{value:{sign}.3g}{check['unit']}"

    return [
        check["what"],
        number(check["paper"]),
        number(check["ours"]),
        apart(check["difference"], "+"),
        apart(check["tolerance"], ""),
        check["verdict"],
    ]
