"""The command line: `minipaged demo | generate | serve | quantize | page | chat | model | grade | …`, a file a command.

Each command fills in the same objects that the API takes (LLM, SamplingParams, BeamSearchParams), has their fields for
options (`options.py`), and leaves checking to them: an error is one line on stderr and exit status 1 (2 for a wrong
usage). Heavy imports wait until they are needed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from minipaged.cli.app import app
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
"""The files of the commands, in the order in which `--help` lists them: each registers its own."""

for _file in COMMANDS:
    import_module(f"minipaged.cli.{_file}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits the process."""
    try:
        app(args=None if arguments is None else list(arguments))
    except MinipagedError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        where = place_in_users_file(error)
        if where is None:
            raise
        print(f"error: the {where[0]} raised {type(error).__name__}: {error} ({where[1]})", file=sys.stderr)
        sys.exit(1)
