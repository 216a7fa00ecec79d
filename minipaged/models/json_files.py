"""Reads the JSON objects that lie beside a model's weights, and names the file where one is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minipaged.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`, or ModelError."""
    return parse_json(path.read_bytes(), path)


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`; an empty one where there is no such file."""
    return read_json(path) if path.is_file() else {}


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """The JSON object that `data`, which is from the file `path`, holds."""
    try:
        parsed = json.loads(data)
    except ValueError as error:
        raise ModelError(f"{path} is damaged: its JSON does not parse ({error})") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} is damaged: its JSON is not an object")
    return parsed
