"""A user's own parts, named by a text on the command line or in a config file.

allocator           FILE.py:Class
scheduling_policy   FILE.py:Class, or the name of one of ours
kv_connector        the folder of a SharedStorageConnector
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minipaged.errors import InvalidRequest
from minipaged.handover.shared_storage import SharedStorageConnector

USERS_MODULE = "minipaged_users_{}"
"""The module name under which a user's file is imported, whatever the file's name."""
PARTS = {"--allocator": "allocator", "--scheduling-policy": "policy"}


def place_in_users_file(error: BaseException) -> tuple[str, str] | None:
    """The user's part that raised an error, and FILE:LINE where it did; None if the error was raised elsewhere."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for part in PARTS.values():
        if frames and frames[-1].f_globals.get("__name__") == USERS_MODULE.format(part):
            return part, f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}"
    return None


def is_users(part: object) -> bool:
    """Whether `part` is from a file that `load_class` has loaded."""
    return getattr(part, "__module__", "") in [USERS_MODULE.format(each) for each in PARTS.values()]


def load_class(option: str, spec: str) -> Any:
    """Load the class that FILE.py:Class names. Raises InvalidRequest if it is missing or the file does not load."""
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        example = f"my_{PARTS[option]}.py:{'BlockAllocator' if option == '--allocator' else 'Mine'}"
        raise InvalidRequest(f"{option} is {spec!r}; write it as FILE.py:Class, e.g. {example}")
    path = Path(file).expanduser()
    if not path.is_file():
        raise InvalidRequest(f"{option}: there is no file {path}")
    module_spec = importlib.util.spec_from_file_location(USERS_MODULE.format(PARTS[option]), path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module.__name__] = module  # dataclasses and pickling look the module up by name
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise InvalidRequest(f"{option}: {path} does not load: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise InvalidRequest(f"{option}: {path} has no class {name}; it has {', '.join(classes) or 'none'}")
    return found


FROM_TEXT: dict[str, Callable[[Any], Any]] = {
    "allocator": lambda text: None if text is None else load_class("--allocator", text),
    "scheduling_policy": lambda text: load_class("--scheduling-policy", text) if ":" in text else text,
    "kv_connector": lambda text: None if text is None else SharedStorageConnector(text),
}
"""For each setting that is an object, the function that makes it from a text. It raises InvalidRequest if it cannot."""
