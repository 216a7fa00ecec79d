"""`minipaged paper`: reproduces the figures of the PagedAttention paper."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from minipaged.cli.apps import paper_app
from minipaged.cli.options import Command
from minipaged.errors import InvalidRequest


@paper_app.command("list", cls=Command)
def paper_list(
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of results.")] = Path("paper-results"),
) -> None:
    """List the figures, and which of them have been run."""
    from minipaged.paper.commands import list_figures

    list_figures(output)


@paper_app.command("run", cls=Command)
def paper_run(
    figures: Annotated[
        list[str], typer.Argument(metavar="FIG...", help="The figures to run, e.g. 12a 13, or all.", show_default=False)
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Use short traces. Takes seconds, but the knees come out too high.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Random seed: the same seed gives the same numbers.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="The number of processes; by default one per core.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of results.")] = Path("paper-results"),
    traces: Annotated[Path | None, typer.Option(help="The folder of the traces that some figures need.")] = None,
) -> None:
    """Reproduce figures of the paper. Exit status 1 if one deviates by more than its tolerance."""
    from minipaged.paper.commands import run_figures
    from minipaged.tiers.devices import usable_cores

    with _drawing():
        good = run_figures(
            figures, quick=quick, seed=seed, processes=jobs or usable_cores(), output=output, traces=traces
        )
    if not good:
        raise typer.Exit(1)


@paper_app.command("report", cls=Command)
def paper_report(
    results: Annotated[Path, typer.Option("--results", "-r", help="The folder of results.")] = Path("paper-results"),
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("paper.html"),
) -> None:
    """Write all results to one HTML file, with plots, verdicts and the source of each number."""
    from minipaged.paper.commands import write_report

    with _drawing():
        write_report(results, output)


@contextmanager
def _drawing() -> Iterator[None]:
    """Raise InvalidRequest, which says how to install matplotlib, if the code within cannot import it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise InvalidRequest(
            "drawing needs matplotlib; install minipaged with its extra 'paper' "
            f"(in a clone: {sys.executable} -m pip install -c constraints.txt -e '.[paper]')"
        ) from None
