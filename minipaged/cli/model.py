"""`minipaged model`: lists, downloads and locates the models that are known by name."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from minipaged.cli.apps import model_app
from minipaged.cli.options import Command


@model_app.command("list", cls=Command)
def model_list() -> None:
    """List the known models, and the folder of each that has been fetched."""
    from minipaged.models import hub

    for name in hub.known_models():
        folder = hub.where(name)
        print(f"{name}  {folder if folder else 'not fetched'}")


@model_app.command("fetch", cls=Command)
def model_fetch(
    name: Annotated[str, typer.Argument(help="A known model.")] = "smollm2-135m-instruct",
    again: Annotated[bool, typer.Option("--again", help="Delete the fetched files and fetch them again.")] = False,
) -> None:
    """Download a known model into the cache, verify it, and print its folder. Does nothing if it is there already."""
    from minipaged.models import hub

    print(hub.fetch(name, again=again))


@model_app.command("where", cls=Command)
def model_where(name: Annotated[str, typer.Argument(help="A known model.")] = "smollm2-135m-instruct") -> None:
    """Print the folder of a known model; exit status 1 if it has not been fetched."""
    from minipaged.models import hub

    folder = hub.where(name)
    if folder is None:
        print(f"{name} has not been fetched; run: minipaged model fetch {name}", file=sys.stderr)
        raise typer.Exit(1)
    print(folder)
