"""What a reader has written into a page, run where there is nothing but Python: in that page, by Pyodide.

The text is a cell as of a notebook: a program whose last line is a recording or a picture, after the cells that it
needs. What comes back is what the page shows: the recording as the stepper takes it, or the picture; what was printed;
and what went wrong, with the line of the reader's code that it went wrong in. Of a run that fails half way there is
what was recorded until then.
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
"""The name of the text, in place of a file's."""
MOST_PRINTED = 5000
"""Characters; of more, the end."""


def run(text: str, needed: str = "") -> str:
    """Run a cell; as JSON: `run`, `picture`, `printed`, `error` and `line`, each of them null where there is none.

    `needed`: the code of the cells before it that it builds on.
    """
    linecache.cache[NAME] = (len(text), None, text.splitlines(keepends=True), NAME)  # where tracebacks look
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
    except BaseException as raised:  # SystemExit too: it is the reader's program that ends, not the page's
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
    """What went wrong, in words, and where in the reader's code. Where that was called by minipaged, which reported it
    by an error of its own, the line is the one where it began, and what happened there is told too."""
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
