"""An assignment graded in a web page: what docs/assets/grader.js calls, in Pyodide.

It is the grader of the command line, with a student's part in the same interpreter (`sandbox/page_process.py`): the
same tests, points and counterexamples. What only a command line has (SmolLM2, the speed) is left out. A failed test
comes with its run as the stepper wants it, and with the line of the student's in which it went wrong.
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
    Submission,
    TestResult,
    TestStatus,
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
"""Of a call that does not return; a process may take longer, because others may keep it waiting."""
PULSE_SECONDS = 1.0
"""Between two signs of life."""
LOOKED_AT = ("__init__", "ref_count", "num_free", "num_blocks", "num_tokens", "blocks")
"""Members that are asked for the sake of checks: what they say was decided elsewhere."""
MOST_LINES = 20_000
"""Of a counterexample: one that does not end by itself is left there."""


def run(name: str, text: str, tell: Callable[[str], object]) -> str:
    """Grade a student's text. `tell` is given each test as JSON when it is done, and null now and then: it goes on. The
    whole grade comes back, or with `error`, and perhaps `line`, why there is none."""
    assignment = find_assignment(name)
    assignment = replace(assignment, measure=None, limits=replace(assignment.limits, call_seconds=CALL_SECONDS))
    # In a folder of its own: counterexamples then say that the student's file lies beside them.
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
    """Tells, once in a while, that there is nothing to tell. For a page that waits."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell, self._last = tell, 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last > PULSE_SECONDS:
            self._last = now
            self._tell("null")


def _told(grade: Grade) -> dict[str, Any]:
    """The latest test, as `as_json` has it; and for the page more."""
    *earlier, result = grade.results
    told: dict[str, Any] = json.loads(as_json(grade))["tests"][-1]
    if result.test.hidden:
        told |= dict.fromkeys(("meaning", "hint", "output"), "") | dict.fromkeys(("counterexample", "same", "run"))
        return told | {"message": "A hidden test; what it found is not shown."}
    told["unwritten"] = UNWRITTEN in result.message
    same = fails_like(result, earlier) if result.status is TestStatus.FAILED else None
    failure = result.failure
    if failure and failure.verdict:
        told["hint"] = VERDICT_HINTS[Verdict(failure.verdict)]
    return told | {"same": same and same.test.name, "run": None if same else _run(result, grade.submission.path)}


def _run(result: TestResult, path: Path) -> dict[str, Any] | None:
    """What the stepper is fed with, if there is anything to step through."""
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
    """The line of the student's where a counterexample went wrong: that which raised, or the last one that ran of a
    method that does something."""
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
