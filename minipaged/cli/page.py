"""`minipaged page`: a run to step through, as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minipaged.cli.app import app, decoder_of
from minipaged.cli.options import Command
from minipaged.errors import InvalidRequest


@app.command(cls=Command)
def page(
    events: Annotated[Path, typer.Argument(help="What `minipaged generate --events` wrote.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.", show_default=False)],
    title: Annotated[str, typer.Option(help="What the page is called; else the name of the file of events.")] = "",
    model: Annotated[
        str | None, typer.Option(help="Show the words of this model's tokens; else their numbers are shown.")
    ] = None,
) -> None:
    """Make a page that steps through a run, to be opened in a browser or sent to somebody. It needs nothing else."""
    from minipaged.replay.recorded import read_run
    from minipaged.stepper.page import as_data, failure_of, page, words_of

    run = read_run(events).events
    words = words_of(run, decoder_of(model)) if model else None
    data = as_data(title or events.name, run, words=words) | failure_of(run)
    try:
        output.write_text(page(data), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot write the page to {output}: {error.strerror}") from None
    print(f"{output}: {len(data['events'])} steps")
