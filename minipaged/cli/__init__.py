"""The command line: `minipaged demo | generate | serve | quantize | page | chat | model | grade | …`, a file a command.

Each command fills in the objects of the API (LLM, SamplingParams, BeamSearchParams). Their fields become its options
(`options.py`), and they check the values. An error is one line on stderr and exit status 1 (2 for wrong usage). Heavy
imports wait until they are needed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from minipaged.cli.apps import app
from minipaged.errors import MinipagedError
from minipaged.setup.own_parts import place_in_users_file

__all__ = ["app", "main"]

COMMANDS = (
    "generate",
    "replay_steps",
    "chat",
    "serve",
    "quantize",
    "doctor",
    "demo",
    "page",
    "course",
    "model",
    "paper",
)
"""The files of the commands, in the order of `--help`. Importing a file registers its commands."""

for _file in COMMANDS:
    import_module(f"minipaged.cli.{_file}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and exit the process."""
    try:
        app(args=None if arguments is None else list(arguments))
    except MinipagedError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output is gone, as after `| head`
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        where = place_in_users_file(error)
        if where is None:
            raise
        print(f"error: the {where[0]} raised {type(error).__name__}: {error} ({where[1]})", file=sys.stderr)
        sys.exit(1)
