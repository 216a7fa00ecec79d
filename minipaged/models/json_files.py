"""Read the JSON files next to a model's weights, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minipaged.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`. Raises ModelError if the file holds none."""
    return parse_json(path.read_bytes(), path)


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`, or an empty dict if the file does not exist."""
    return read_json(path) if path.is_file() else {}


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in `data`, the content of the file `path`. Raises ModelError if it holds none."""
    try:
        parsed = json.loads(data)
    except ValueError as error:
        raise ModelError(f"{path} is damaged: its JSON does not parse ({error})") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} is damaged: its JSON is not an object")
    return parsed
