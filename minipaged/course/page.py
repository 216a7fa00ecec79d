"""Grading in a web page. docs/assets/grader.js calls this module in Pyodide.

The grader is the same as on the command line, with the same tests, points and counterexamples; the student's part runs
in the same interpreter (`sandbox/page_process.py`). The SmolLM2 tests and the speed measurement are left out. A failed
test's result contains its run in the stepper's format, and the line of the student's code where it went wrong.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from minipaged.course.grader.assignment import (
    CannotBeGraded,
    Grade,
    GradeStatus,
    Submission,
    TestResult,
    find_assignment,
)
from minipaged.course.grader.counterexample import ALARM, UNWRITTEN
from minipaged.course.grader.formats import as_json, fails_like
from minipaged.course.grader.grading import VERDICT_HINTS, grade
from minipaged.course.sandbox.answering import Ended
from minipaged.course.sandbox.contract import Verdict
from minipaged.course.sandbox.page_process import PageProcess
from minipaged.errors import InvalidRequest
from minipaged.stepper.page import as_data, failure_of
from minipaged.stepper.recording import function_of

CALL_SECONDS = 2.0
"""The time limit of one call. It is shorter than a process has, since no other process competes with a page."""
PULSE_SECONDS = 1.0
"""The least time between two "still running" messages."""
LOOKED_AT = ("__init__", "ref_count", "num_free", "num_blocks", "num_tokens", "blocks")
"""Members that checks read. They report state, so the mistake is in another method."""
MOST_LINES = 20_000
"""The most lines of student code to trace in a counterexample; tracing stops there if it does not end by itself."""


def run(name: str, text: str, tell: Callable[[str], object]) -> str:
    """Grade a student's source text and return the grade as JSON.

    `tell` receives each test as JSON when it is done, and "null" now and then as a sign of life. If the text cannot be
    graded, the result has `error`, and `line` if one is known.
    """
    assignment = find_assignment(name)
    assignment = replace(assignment, measure=None, limits=replace(assignment.limits, call_seconds=CALL_SECONDS))
    # The file is alone in the working directory, so that counterexamples import it from there.
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        submission = Submission(Path(f"{name.replace('-', '_')}.py"))
        submission.path.write_text(text)

        def report(grade: Grade) -> None:
            if not grade.finished:
                tell(json.dumps(_told(grade)))

        try:
            start = partial(PageProcess, alive=Pulse(tell))
            graded = grade(assignment, submission, model=None, report=report, start=start)
        except CannotBeGraded as error:
            place = re.search(rf"\b{re.escape(submission.path.name)}:(\d+)", str(error))
            return json.dumps({"error": str(error), "line": place and int(place[1])})
    return as_json(graded)


class Pulse:
    """Sends "null" at most once per PULSE_SECONDS, so that a waiting page knows that grading goes on."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell, self._last = tell, 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last > PULSE_SECONDS:
            self._last = now
            self._tell("null")


def _told(grade: Grade) -> dict[str, Any]:
    """Return the latest test as in `as_json`, with the additional fields that the page shows."""
    *earlier, result = grade.results
    told: dict[str, Any] = json.loads(as_json(grade))["tests"][-1]
    if result.test.hidden:
        told |= dict.fromkeys(("meaning", "hint", "output"), "") | dict.fromkeys(("counterexample", "same", "run"))
        return told | {"message": "A hidden test; what it found is not shown."}
    told["unwritten"] = UNWRITTEN in result.message
    same = fails_like(result, earlier) if result.status is GradeStatus.FAILED else None
    failure = result.failure
    if failure and failure.verdict:
        told["hint"] = VERDICT_HINTS[Verdict(failure.verdict)]
    return told | {"same": same and same.test.name, "run": None if same else _run(result, grade.submission.path)}


def _run(result: TestResult, path: Path) -> dict[str, Any] | None:
    """Return the run as the stepper's data, or None if there is nothing to step through."""
    failure = result.failure
    if failure is None or not failure.events:
        return None
    last = last_line(failure.script, path) if failure.script else None
    try:
        data = as_data(result.test.name, failure.events) | failure_of(failure.events)
    except InvalidRequest:
        return None
    if last and "broken" in data:
        steps = len(data["events"])
        function, line = function_of(last[0]), last[1]
        data |= {"functions": [function], "lines": [[], [[0, [line]]]], "lines_of": [0] * steps + [1]}
        data |= {"current": [None] * steps + [[0, line]], "broken": data["broken"] | {"line": line}}
    return data


def last_line(script: str, path: Path) -> tuple[CodeType, int] | None:
    """Run a counterexample and return the student's line where it went wrong.

    This is the line that raised, or else the last line that ran outside of LOOKED_AT.
    """
    ran: list[tuple[CodeType, int]] = []
    num_lines = 0

    def on_call(frame: FrameType, kind: str, argument: object) -> Any:
        return on_line if Path(frame.f_code.co_filename).name == path.name else None

    def on_line(frame: FrameType, kind: str, argument: object) -> Any:
        nonlocal num_lines
        num_lines += 1
        if frame.f_code.co_name not in LOOKED_AT:
            ran.append((frame.f_code, frame.f_lineno))
        if num_lines > MOST_LINES:
            raise Ended
        return on_line

    program = compile(script.replace("\n".join(ALARM), ""), "counterexample.py", "exec")
    paths, before = list(sys.path), sys.gettrace()
    importlib.invalidate_caches()  # the student's file has just been written
    sys.settrace(on_call)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            exec(program, {"__name__": "__main__"})
    except BaseException as error:
        sys.settrace(before)
        raised = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        own = [(frame.f_code, frame.f_lineno) for frame in raised if Path(frame.f_code.co_filename).name == path.name]
        ran += own[-1:]
    finally:
        sys.settrace(before)
        sys.path[:] = paths
        sys.modules.pop(path.stem, None)
    return ran[-1] if ran else None
