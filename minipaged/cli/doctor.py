"""`minipaged doctor`: reports what this machine can compute with."""

from __future__ import annotations

import typer

from minipaged.cli.apps import app
from minipaged.cli.options import Command


@app.command(cls=Command)
def doctor() -> None:
    """Show which tiers and devices this machine has, which ones would be chosen, and why."""
    from minipaged.tiers.doctor import report

    for name, text in report():
        typer.echo(f"{name:15} {text}")
