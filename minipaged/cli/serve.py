"""`minipaged serve`: serves a model over HTTP, with one engine or several replicas."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, NoReturn

import typer

from minipaged.cli.apps import app, refuse_given
from minipaged.cli.options import Command, given_for, names_of, takes
from minipaged.errors import MinipagedError
from minipaged.replicas.settings import ReplicaSettings
from minipaged.serve.settings import ServeSettings
from minipaged.setup.settings import Settings


@app.command(cls=Command)
@takes(ServeSettings, ReplicaSettings, Settings)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A known name, a folder, a .gguf file, or a hub id.")] = (
        "smollm2-135m-instruct"
    ),
    **given: Any,
) -> None:
    """Serve a model over HTTP with OpenAI's API: POST /v1/chat/completions and others. GET / shows the blocks live."""
    settings = ServeSettings(**given_for(ServeSettings, given))
    if given["replicas"] is None:
        of_replicas = [name for name in names_of(ReplicaSettings) if name != "replicas"]
        refuse_given(context, of_replicas, "is given, but there are no replicas; say how many with --replicas")
    replicas = ReplicaSettings(**given_for(ReplicaSettings, given))
    of_engine = given_for(Settings, given)
    try:
        if replicas.replicas is None:
            from minipaged.serve.server import serve as serve_one

            run_server = partial(serve_one, model, settings, **of_engine)
        else:
            from minipaged.replicas.server import serve_replicas

            run_server = partial(serve_replicas, model, settings, replicas, **of_engine)
    except ModuleNotFoundError as error:
        extra, what = ("fast,serve", "serving") if replicas.replicas is None else ("fast,ray", "serving by replicas")
        raise MinipagedError(
            f"{what} needs {error.name}, which is not installed: pip install -c constraints.txt -e '.[{extra}]'"
        ) from None
    try:
        status = run_server()
    except MinipagedError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    _leave(status)


def _leave(status: int) -> NoReturn:
    """Exit immediately. A normal exit would take seconds to unload torch and numba, and would wait for threads whose
    work no longer matters."""
    with suppress(OSError):  # the output has no reader any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
