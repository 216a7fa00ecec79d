"""The messages and scripts that report failures, shared by all assignments.

A counterexample is a script that imports the student's file and fails; once the bug is fixed, it runs without an error.
Its body is the calls that the session made.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from minipaged.course.grader.assignment import Submission
from minipaged.course.sandbox.contract import Handle, Outcome, Raised, StudentError
from minipaged.errors import Invariant

STANDARD = ("copy", "tracemalloc")
"""Modules that a script imports if its body uses them."""
ERRORS = ("BlockNotAllocated", "OutOfBlocks")
"""Errors that a script imports from minipaged if its body catches them."""
ALARM = (
    "import _thread",
    "import os",
    "import signal",
    "import threading",
    "",
    "# This may not return. After 10 seconds it is interrupted as by Ctrl-C; after 15 seconds the process ends.",
    "signal.signal(signal.SIGINT, signal.default_int_handler)",
    "alarms = [threading.Timer(10, _thread.interrupt_main), threading.Timer(15, os._exit, [1])]",
    "for alarm in alarms:",
    "    alarm.daemon = True",
    "    alarm.start()",
)
"""Lines that end a script whose call may not return. `faulthandler.dump_traceback_later` is not used, because it reads
running frames and has been seen to crash."""


def make_script(
    submission: Submission,
    name: str,
    invariant: Invariant | None,
    message: str,
    imports: Sequence[str],
    body: Sequence[str],
    seed: int | None = None,
) -> str:
    """Return a program that reproduces a failure.

    `imports` are lines of the program. `seed` seeds the random module, for a part that uses it.
    """
    path, text = submission.path, "\n".join(body)
    used = [module for module in STANDARD if re.search(rf"\b{module}\.", text)]
    errors = [error for error in ERRORS if re.search(rf"\bexcept {error}\b", text)]
    by_name = f"from {path.stem} import {name}"
    return "\n".join(
        [
            *([f"# {invariant}"] if invariant else []),
            *(f"# {line}" for line in textwrap.wrap(message, 110)),
            *(f"import {module}" for module in used),
            "import sys",
            "",
            f'sys.path[:0] = [{json.dumps(str(path.parent))}, "."]  # where {path.name} lies',
            *([f"from minipaged import {', '.join(errors)}"] if errors else []),
            *imports,
            by_name if path.stem.isidentifier() else f'{name} = __import__("{path.stem}").{name}',
            *(["import random", "", f"random.seed({seed})"] if seed is not None else []),
            *(ALARM if "did not end" in message else []),
            "",
            text,
            "",
        ]
    )


def must_raise(error: str, shown: str, why: str) -> list[str]:
    """Return lines of a script that raise AssertionError unless the call raises the error."""
    return [
        "try:",
        f"    {shown}",
        f"except {error}:",
        "    pass",
        "else:",
        f'    raise AssertionError("{shown} has to raise {error}: {why}")',
    ]


def sources_of(*functions: Callable[..., Any]) -> list[str]:
    """Return the source lines of our functions for a script: types removed, arguments on one line."""
    untyped = [re.sub(r"(:| ->) Any\b", "", inspect.getsource(one).strip()) for one in functions]
    arguments = re.compile(r"\(\n((?: +\w+,\n)+)\)")
    one_line = [arguments.sub(lambda match: f"({' '.join(match[1].split())[:-1]})", one) for one in untyped]
    return [*"\n\n\n".join(one_line).splitlines(), "", ""]


UNWRITTEN = "replace its `raise NotImplementedError`"
"""The end of the message for a call that reaches the starter's `raise NotImplementedError`."""


def is_unwritten(error: Exception) -> bool:
    """Whether the error is the starter file's `raise NotImplementedError`."""
    return isinstance(error, StudentError) and error.kind == "NotImplementedError"


def raised_message(method: str, error: Exception, shown: str) -> str:
    """Return the message for a call that should not have raised."""
    if isinstance(error, StudentError) and is_unwritten(error):
        place, _, function = error.places[-1].partition(" in ") if error.places else ("", "", "")
        where = f" ({place})" if place else ""
        return f"{function or method} is not written yet{where}: {UNWRITTEN}"
    described = str(error) if isinstance(error, StudentError) else f"{type(error).__name__}: {error}"
    return f"{shown} raised {described}"


def shown(answer: Outcome) -> str:
    """Describe an unexpected answer, as a phrase within a sentence."""
    return f"an object of type {answer.kind}" if isinstance(answer, Handle) else repr(answer)[:200]


def said(answer: Outcome) -> str:
    """Describe what a call did ("raised …" or "returned …"), as the end of a sentence."""
    if isinstance(answer, Raised):
        return f"raised {answer.error}"
    if isinstance(answer, Handle):
        return f"returned an object of type {answer.kind}"
    return f"returned {answer!r}"


def aligned(rows: list[list[str]]) -> list[str]:
    """Format rows of cells as lines with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def letter(number: int) -> str:
    """Return the name of object `number` in a script: a, b, ..., z, a1, b1, ..."""
    return chr(ord("a") + number % 26) + (str(number // 26) if number >= 26 else "")
