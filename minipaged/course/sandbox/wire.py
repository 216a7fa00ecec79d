"""The message format between the grader and the worker that runs a student's code: one line of JSON per message.

An answer must not run code in the grader, so nothing is pickled. Numbers, texts, lists, arrays, and the plain
dataclasses of the contracts travel by value. Any other object that student code returns stays in the worker, and a
*handle* to it travels: the grader can call it and pass it back, and never looks inside. Likewise an object of the
grader's (such as an allocator for a student's block table) stays in the grader, and the worker gets a *stub* that sends
every call to the grader.

In JSON, a dict with one key that begins with "$" is one of these. `encode` and `decode` handle all but the last three:

    {"$tuple": [...]}  {"$dict": [[key, value], ...]}  {"$array": [dtype, shape, base64]}
    {"$data": [module, class, {field: value}]}         {"$result": n}: what call n of the same message returned
    {"$handle": [number, type]}                        {"$host": [number, methods, properties]}
"""

from __future__ import annotations

import base64
import importlib
import json
import sys
from array import array
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from minipaged.errors import BadLogits, BlockNotAllocated, InvalidRequest, OutOfBlocks

DATA_MODULES = ("minipaged.contracts", "minipaged.params", "minipaged.events", "minipaged.scheduling")
"""Modules whose dataclasses travel by value."""
ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (OutOfBlocks, BlockNotAllocated, InvalidRequest, BadLogits, ValueError)
}
"""Errors that the contracts name; they have the same type on both sides. Others travel as a name and a message."""
LARGEST_INT = 1024
"""The most bits of an integer that travels; Python refuses to write integers of many thousands of digits."""
LARGEST_ANSWER = 256 << 20
"""The most bytes of a message from the worker. A longer one is an attack, or a serious mistake."""


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """Return `value` in a form that JSON can hold. `other` encodes an object that does not travel by value."""
    kind = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and value.bit_length() <= LARGEST_INT):
        return value
    if kind is list or kind is array:
        return [encode(item, other) for item in value]
    if kind is tuple:
        return {"$tuple": [encode(item, other) for item in value]}
    if kind is dict:
        return {"$dict": [[encode(key, other), encode(item, other)] for key, item in value.items()]}
    numpy = sys.modules.get("numpy")  # if it was never imported, no value is an array
    if numpy and isinstance(value, numpy.generic):
        return value.item()
    if numpy and kind is numpy.ndarray and value.dtype.kind in "biuf":
        data = base64.b64encode(numpy.ascontiguousarray(value).tobytes()).decode()
        return {"$array": [value.dtype.str, list(value.shape), data]}
    if kind.__module__ in DATA_MODULES and is_dataclass(value):
        values = {field.name: encode(getattr(value, field.name), other) for field in fields(value)}
        return {"$data": [kind.__module__, kind.__name__, values]}
    return other(value)


def decode(value: Any, special: Callable[[str, Any], Any]) -> Any:
    """Return the value that `encode` encoded. `special(tag, content)` decodes handles, results and stubs."""
    if isinstance(value, list):
        return [decode(item, special) for item in value]
    if not isinstance(value, dict):
        return value
    [(tag, content)] = value.items()
    match tag:
        case "$tuple":
            return tuple(decode(item, special) for item in content)
        case "$dict":
            return {decode(key, special): decode(item, special) for key, item in content}
        case "$array":
            import numpy as np

            dtype, shape, data = content
            if np.dtype(dtype).kind not in "biuf":
                raise ValueError(f"not a numeric array: {dtype}")
            return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
        case "$data":
            module, name, values = content
            kind = getattr(importlib.import_module(module), name, None) if module in DATA_MODULES else None
            if not (isinstance(kind, type) and is_dataclass(kind)):
                raise ValueError(f"not data of the contracts: {module}.{name}")
            return kind(**{key: decode(item, special) for key, item in values.items()})
    return special(tag, content)


def line(message: dict[str, Any]) -> bytes:
    """Return the message as the bytes that are sent."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
