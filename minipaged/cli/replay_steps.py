"""`minipaged replay-steps`: runs recorded steps again and compares each chosen token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from minipaged.cli.apps import app
from minipaged.cli.options import Command, takes
from minipaged.setup.settings import Settings


@app.command(name="replay-steps", cls=Command)
@takes(Settings, only=("tier", "device"))
def replay_steps(
    recording: Annotated[
        Path, typer.Argument(help="The file that `generate --record-steps` wrote.", show_default=False)
    ],
    model: Annotated[
        str | None, typer.Option(help="The model's name or folder here; by default as in the recording.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Data type to compute in; by default as in the recording.")] = None,
    **given: Any,
) -> None:
    """Run recorded steps again on this machine, and compare each chosen token.

    A token may differ only where it is a tie. Any other difference gives exit status 1.
    """
    from minipaged.recordings.replay_steps import open_replay
    from minipaged.recordings.step_files import read_recording
    from minipaged.setup.loaded_model import LoadedModel

    header, steps = read_recording(recording)
    loaded = LoadedModel.load(model or header.model, dtype=dtype or header.dtype, **given)
    replay = open_replay(header, steps, loaded)
    for difference in replay:
        print(difference)
    print(f"recorded on the {header.tier} tier in {header.dtype}, run on the {loaded.tier.description}")
    counts = f"{replay.num_steps} steps, {replay.num_choices} tokens: {replay.num_failures} differ"
    print(f"{counts}, and {replay.num_ties} at ties; other logprobs differ by {replay.largest_error:.2g} at most")
    if replay.num_failures:
        raise typer.Exit(1)
