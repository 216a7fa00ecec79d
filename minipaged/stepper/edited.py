"""Run code that a reader has edited in a page. It runs in that page, by Pyodide, with nothing but Python.

The code is like a notebook cell: a program whose last line is a recording or a picture. It can depend on earlier
cells. The result is everything that the page shows: the data for the stepper, or the picture; the printed text; and an
error, with the line of the reader's code that caused it. If a run fails half way, the recording contains the events up
to the failure.
"""

from __future__ import annotations

import ast
import io
import json
import linecache
import traceback
from contextlib import redirect_stdout
from typing import Any

from minipaged.errors import InvalidRequest
from minipaged.stepper.pictures import Picture
from minipaged.stepper.recording import Recording

NAME = "<the code above>"
"""The file name of the reader's code in tracebacks."""
MOST_PRINTED = 5000
"""The number of characters of printed text that are returned; the beginning is cut off."""


def run(text: str, needed: str = "") -> str:
    """Run a cell. Returns a JSON object with `run`, `picture`, `printed`, `error` and `line`; missing ones are null.

    `needed`: the code of the earlier cells that the cell depends on.
    """
    linecache.cache[NAME] = (len(text), None, text.splitlines(keepends=True), NAME)  # so that tracebacks find lines
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    shown = error = line = None
    try:
        with redirect_stdout(io.StringIO()):
            exec(compile(needed, "<the cells before>", "exec"), names)
        with redirect_stdout(printed):
            shown = _execute(text, names)
        if not isinstance(shown, Recording | Picture):
            raise InvalidRequest("nothing to show: the last line must name a recording, as `run` does, or a picture")
    except BaseException as raised:  # SystemExit too: only the reader's program should end
        recordings = [value for value in names.values() if isinstance(value, Recording) and value.events]
        shown = recordings[-1] if recordings else None
        error, line = _told(raised)
    data = shown.data() if isinstance(shown, Recording) else None
    picture = shown._repr_html_() if isinstance(shown, Picture) else None
    said = printed.getvalue()[-MOST_PRINTED:] or None
    return json.dumps({"run": data, "picture": picture, "printed": said, "error": error, "line": line}, default=str)


def _execute(text: str, names: dict[str, Any]) -> Any:
    """The value of the text's last line, if that is an expression."""
    program = ast.parse(text, NAME)
    last = program.body.pop() if program.body and isinstance(program.body[-1], ast.Expr) else None
    exec(compile(program, NAME, "exec"), names)
    return eval(compile(ast.Expression(last.value), NAME, "eval"), names) if isinstance(last, ast.Expr) else None


def _told(error: BaseException) -> tuple[str, int | None]:
    """The message of an error and its line in the reader's code.

    If minipaged called the reader's code and raised an error caused by the reader's, the line is that of the reader's
    error, and the message contains both.
    """
    message = "; because of ".join(
        f"{type(link).__name__}: {link}" if str(link) else type(link).__name__
        for link in (error, error.__cause__)
        if link is not None
    )
    if isinstance(error, SyntaxError) and error.filename == NAME:
        return f"Line {error.lineno}: {type(error).__name__}: {error.msg}", error.lineno
    frames = [
        frame
        for link in (error, error.__cause__)
        if link is not None
        for frame in traceback.extract_tb(link.__traceback__)
        if frame.filename == NAME
    ]
    if not frames:
        return message, None
    where = "" if frames[-1].name == "<module>" else f", in {frames[-1].name}"
    return f"Line {frames[-1].lineno}{where}: {message}", frames[-1].lineno
