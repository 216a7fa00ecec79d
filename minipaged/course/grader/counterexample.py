"""The words and the programs in which failures are told, the same for all assignments.

A counterexample is a script with the student's file beside it that ends in an error, and without one once the bug is
gone. Its body is the calls that were made; the session that made them keeps it.
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
"""Modules that a body may use without asking for them."""
ERRORS = ("BlockNotAllocated", "OutOfBlocks")
"""Errors of minipaged that a body may name."""
ALARM = (
    "import _thread",
    "import os",
    "import signal",
    "import threading",
    "",
    "# It may not return: as by Ctrl-C, it then says where it is. If it does not listen either, it is ended.",
    "signal.signal(signal.SIGINT, signal.default_int_handler)",
    "alarms = [threading.Timer(10, _thread.interrupt_main), threading.Timer(15, os._exit, [1])]",
    "for alarm in alarms:",
    "    alarm.daemon = True",
    "    alarm.start()",
)
"""(`faulthandler.dump_traceback_later` looks at frames while they run, and has been seen to crash.)"""


def make_script(
    submission: Submission,
    name: str,
    invariant: Invariant | None,
    message: str,
    imports: Sequence[str],
    body: Sequence[str],
    seed: int | None = None,
) -> str:
    """A program that fails by itself. `imports`: lines; `seed`: of the random module, for a part that draws from it."""
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
    """Lines of a script that end in an AssertionError unless the call raises the error."""
    return [
        "try:",
        f"    {shown}",
        f"except {error}:",
        "    pass",
        "else:",
        f'    raise AssertionError("{shown} has to raise {error}: {why}")',
    ]


def sources_of(*functions: Callable[..., Any]) -> list[str]:
    """Lines of a script: functions of ours as a student would write them, without types, arguments on one line."""
    untyped = [re.sub(r"(:| ->) Any\b", "", inspect.getsource(one).strip()) for one in functions]
    arguments = re.compile(r"\(\n((?: +\w+,\n)+)\)")
    one_line = [arguments.sub(lambda match: f"({' '.join(match[1].split())[:-1]})", one) for one in untyped]
    return [*"\n\n\n".join(one_line).splitlines(), "", ""]


UNWRITTEN = "replace its `raise NotImplementedError`"
"""How the message ends of a call that a starter file answers."""


def is_unwritten(error: Exception) -> bool:
    """Whether it is the starter file's `raise NotImplementedError`."""
    return isinstance(error, StudentError) and error.kind == "NotImplementedError"


def raised_message(method: str, error: Exception, shown: str) -> str:
    """What to say of a call that should not have raised."""
    if isinstance(error, StudentError) and is_unwritten(error):
        place, _, function = error.places[-1].partition(" in ") if error.places else ("", "", "")
        where = f" ({place})" if place else ""
        return f"{function or method} is not written yet{where}: {UNWRITTEN}"
    described = str(error) if isinstance(error, StudentError) else f"{type(error).__name__}: {error}"
    return f"{shown} raised {described}"


def shown(answer: Outcome) -> str:
    """An answer that was not to be given, within a sentence."""
    return f"an object of type {answer.kind}" if isinstance(answer, Handle) else repr(answer)[:200]


def said(answer: Outcome) -> str:
    """What a call that should have raised, or have returned something else, did instead."""
    if isinstance(answer, Raised):
        return f"raised {answer.error}"
    if isinstance(answer, Handle):
        return f"returned an object of type {answer.kind}"
    return f"returned {answer!r}"


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows of cells as lines with columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def letter(number: int) -> str:
    """a, b, ..., z, a1, b1, ...: the names of things in a script."""
    return chr(ord("a") + number % 26) + (str(number // 26) if number >= 26 else "")
