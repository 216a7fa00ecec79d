"""`minipaged paper`: the figures of the PagedAttention paper, made again."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from minipaged.cli.app import paper_app
from minipaged.cli.options import Command
from minipaged.errors import InvalidRequest


@paper_app.command("list", cls=Command)
def paper_list(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where results are kept.")] = Path("paper-results"),
) -> None:
    """What there is to run, and what has been."""
    from minipaged.paper.commands import list_figures

    list_figures(output)


@paper_app.command("run", cls=Command)
def paper_run(
    figures: Annotated[list[str], typer.Argument(metavar="FIG...", help="As in: 12a 13; or all.", show_default=False)],
    quick: Annotated[bool, typer.Option("--quick", help="Short traces: seconds, and knees come out too high.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same numbers.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; else one for each core.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where results are kept.")] = Path("paper-results"),
    traces: Annotated[Path | None, typer.Option(help="A folder with the traces that some figures need.")] = None,
) -> None:
    """Make figures of the paper again; exit status 1 if one of them is off by more than was allowed."""
    from minipaged.paper.commands import run_figures

    with _drawing():
        good = run_figures(
            figures, quick=quick, seed=seed, processes=jobs or os.cpu_count() or 1, output=output, traces=traces
        )
    if not good:
        raise typer.Exit(1)


@paper_app.command("report", cls=Command)
def paper_report(
    results: Annotated[Path, typer.Option("--results", "-r", help="Where results are kept.")] = Path("paper-results"),
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("paper.html"),
) -> None:
    """All results as one HTML file, with pictures, verdicts, and where each number comes from."""
    from minipaged.paper.commands import write_report

    with _drawing():
        write_report(results, output)


@contextmanager
def _drawing() -> Iterator[None]:
    """What is done within needs matplotlib."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise InvalidRequest(
            "drawing needs matplotlib; install minipaged with its extra 'paper' "
            f"(in a clone: {sys.executable} -m pip install -c constraints.txt -e '.[paper]')"
        ) from None
