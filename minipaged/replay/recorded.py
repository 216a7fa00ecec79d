"""A run that was written to a file (`minipaged generate --events FILE`), read back and followed to its end."""

from __future__ import annotations

import sys
from pathlib import Path

from minipaged.errors import InvalidRequest
from minipaged.events import EngineStarted, from_json
from minipaged.replay.teller import tell
from minipaged.replay.timeline import Timeline

LARGEST = 10**7
"""Of any size that a run may begin with: what is larger, nobody could draw."""


def read_run(path: Path) -> Timeline:
    """The events of a file, followed to their end. Raises InvalidRequest where they do not follow from each other."""
    timeline, number = Timeline(keep=sys.maxsize), 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):  # noqa: B007  (an error tells it)
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
