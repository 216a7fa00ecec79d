"""`minipaged page`: makes a web page that steps through a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minipaged.cli.apps import app, decoder_of
from minipaged.cli.options import Command
from minipaged.errors import InvalidRequest


@app.command(cls=Command)
def page(
    events: Annotated[
        Path, typer.Argument(help="The file that `minipaged generate --events` wrote.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.", show_default=False)],
    title: Annotated[str, typer.Option(help="The page's title; by default the name of the events file.")] = "",
    model: Annotated[
        str | None, typer.Option(help="Show tokens as text of this model; by default as token ids.")
    ] = None,
) -> None:
    """Make an HTML page that steps through a run. It is one file that needs no server or network."""
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
