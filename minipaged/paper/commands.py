"""The commands of `minipaged paper`: list the figures, run some or all of them, and write a report.

Commands that draw import matplotlib. The list works without it.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from minipaged.errors import InvalidRequest
from minipaged.paper.figure import Figure
from minipaged.paper.figures import FIGURES
from minipaged.paper.figures.from_files import MissingTrace
from minipaged.paper.pages import COLUMNS, cells, counts, label
from minipaged.paper.running import Results, Unusable, file_name, kept_figure, run_figure

COLOUR = {"holds": "green", "fails": "red", "not judged": "dim"}


def list_figures(folder: Path) -> None:
    """Print all figures, each with a summary of its stored result or the reason why that result cannot be used."""
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    for figure in FIGURES.values():
        try:
            data = kept_figure(folder, figure.name)
        except Unusable as unusable:
            table.add_row(figure.name, figure.title, f"[red]{escape(unusable.why)}; run it again[/]")
            continue
        quick = " (quick)" if data and data["made"]["quick"] else ""
        table.add_row(figure.name, figure.title, counts([data]) + quick if data else "[dim]not run[/]")
    console.print(table)


def figures_called(name: str) -> list[str]:
    """Return the names of the figures that `name` means: `all`, one figure (12a or Fig. 12a), or a group.

    The group 12 is 12a to 12f; `beyond` is every figure beyond the paper. Raises InvalidRequest."""
    if name.lower() == "all":
        return list(FIGURES)
    plain = name.lower().removeprefix("figure").removeprefix("fig").strip(" .")
    if plain in FIGURES:
        return [plain]
    found = [figure for figure in FIGURES if plain == _group_of(figure)]
    if not found:
        near = get_close_matches(plain, FIGURES, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise InvalidRequest(f"there is no figure {name!r}{meant}; there are: {', '.join(FIGURES)}, and all")
    return found


def _group_of(figure: str) -> str:
    """Return the part of the name before a slash or a panel's letter."""
    return figure.partition("/")[0] if "/" in figure else figure.rstrip("abcdef")


def run_figures(
    names: Sequence[str], *, quick: bool, seed: int, processes: int, output: Path, traces: Path | None = None
) -> bool:
    """Run these figures and print their tables. Returns whether no check failed; quick runs are not judged.

    A figure whose trace files are missing is left out. If a name means this figure alone, MissingTrace is raised."""
    from minipaged.paper.drawing import save  # imported first, so that a missing matplotlib is found before the runs
    from minipaged.paper.report import figure_page

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit like Ctrl-C, so that the worker processes end too
    chosen = list(dict.fromkeys(figure for name in names for figure in figures_called(name)))
    results = Results(output)
    console, good = Console(highlight=False), True
    for name in chosen:
        figure = FIGURES[name]
        if traces is not None:
            figure = figure.given(traces)
        try:
            data = _run_one(figure, results, quick=quick, seed=seed, processes=processes)
        except KeyboardInterrupt:
            print(
                f"The finished jobs of {name} are kept in {output}; run the same command again to continue",
                file=sys.stderr,
            )
            raise
        except MissingTrace as error:
            if any(figures_called(one) == [name] for one in names):
                raise
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        path = output / file_name(name)
        stepped = "recording" in data
        try:
            save(data, path.with_suffix(".svg"))
            save(data, path.with_suffix(".png"))
            if stepped:
                path.with_suffix(".html").write_text(figure_page(data), encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"cannot write {error.filename}: {error.strerror}; give another --output") from None
        show(data, console)
        print(f"{path}.json .svg .png{' .html' if stepped else ''}", file=sys.stderr)
        good &= quick or all(check["verdict"] != "fails" for check in data["checks"])
    return good


def _run_one(figure: Figure, results: Results, *, quick: bool, seed: int, processes: int) -> dict[str, Any]:
    """Run one figure, with a progress bar that advances by one per job."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label(figure.name), total=len(set(figure.jobs(quick=quick, seed=seed))))
        return run_figure(
            figure, results, quick=quick, seed=seed, processes=processes, done=lambda _: progress.advance(task)
        )


def show(data: Mapping[str, Any], console: Console) -> None:
    """Print a figure's table, sentences and notes. If all rows end alike, the ending moves to the column's header."""
    rows = [cells(check) for check in data["checks"]]
    ends = {row[0].partition(": ")[2] for row in rows}
    common = ends.pop() if len(ends) == 1 else ""
    title = data["title"] + (" (quick)" if data["made"]["quick"] else "")
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(common)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "verdict" else "right", no_wrap=True)
    for what, *numbers, verdict in rows:
        table.add_row(what.removesuffix(f": {common}"), *numbers, f"[{COLOUR[verdict]}]{verdict}[/]")
    console.print(table)
    for sentence in data["sentences"]:
        if not sentence["holds_in_paper"]:
            console.print(
                f"Not borne out by the paper's own figure: “{sentence['says']}” (section {sentence['section']}): "
                f"there {sentence['in_paper']}; here {sentence['ours']}",
                markup=False,
            )
    for note in data["notes"]:
        console.print(note, markup=False)


def write_report(folder: Path, output: Path) -> None:
    """Write one HTML file with all usable results of the folder."""
    from minipaged.paper.report import report

    results = {}
    for name in FIGURES:
        try:
            if data := kept_figure(folder, name):
                results[name] = data
        except Unusable as unusable:
            print(f"{name} is left out: {unusable}", file=sys.stderr)
    if not results:
        raise InvalidRequest(
            f"there are no results in {folder}; minipaged paper run all --output {folder} makes them, or give another "
            "--results"
        )
    try:
        output.write_text(report(results), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot write {output}: {error.strerror}; give another --output") from None
    print(output)
