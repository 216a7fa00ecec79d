"""Reads a run from the file that `minipaged generate --events FILE` wrote, and checks its events."""

from __future__ import annotations

import sys
from pathlib import Path

from minipaged.errors import InvalidRequest
from minipaged.events import EngineStarted, from_json
from minipaged.replay.teller import tell
from minipaged.replay.timeline import Timeline

LARGEST = 10**7
"""The largest size that a run may start with. A larger pool or block could not be drawn."""


def read_run(path: Path) -> Timeline:
    """Read the events of a file into a timeline, at its end. Raises InvalidRequest for an event that is not possible
    after the ones before it."""
    timeline, number = Timeline(keep=sys.maxsize), 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):  # noqa: B007  (used in error messages)
                if not line.strip():
                    continue
                event = from_json(line)
                if not len(timeline) and not isinstance(event, EngineStarted):
                    raise ValueError("the first event of a run is engine_started; record it from the start")
                if isinstance(event, EngineStarted):
                    _check_sizes(event)
                timeline.append(event)
                tell(timeline.state, event)
                timeline.forward()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from None
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        why = str(error) if isinstance(error, ValueError) else f"it does not follow from the events before ({error!r})"
        raise InvalidRequest(f"{path}, line {number}: {why}") from None
    if not len(timeline):
        raise InvalidRequest(f"{path} holds no events; minipaged generate --events FILE writes some")
    return timeline


def _check_sizes(event: EngineStarted) -> None:
    for name, least in (("num_blocks", 1), ("num_swap_blocks", 0), ("block_size", 1), ("max_model_len", 1)):
        if not least <= getattr(event, name) <= LARGEST:
            raise ValueError(f"{name} is {getattr(event, name)}; it must be between {least} and {LARGEST}")
