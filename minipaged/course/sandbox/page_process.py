"""Grading in a web page: the grader and the student's part in one interpreter, where there are no processes.

A page's Python (Pyodide) is thrown away with the page, and what is graded there counts for nobody but its reader. So
nothing is kept apart but what mistakes need: a call that does not return is ended, what is printed is bounded, members
of other modules that were replaced are found out and put back, and the answers are not to be imported. Calls and their
values travel as they do between processes (`wire.py`), so that a part that passes here passes there.
"""

from __future__ import annotations

import builtins
import importlib
import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from minipaged.course.sandbox import wire
from minipaged.course.sandbox.answering import PRIVATE, Ended, ObjectHost
from minipaged.course.sandbox.contract import KEPT_OUTPUT, MOST_OUTPUT, Limits, Misbehaviour, Sandbox, Verdict

LINES = 100
"""Of a student's code, that are run between two looks at the clock."""


class PageProcess(Sandbox):
    """What a `WorkerProcess` is, in this interpreter. `alive` is called before each call.

    A call is ended by an exception in its next line. Python then traces no further, so whoever catches that one
    (`except:`) goes on; and what has no lines (`sum(iter(int, 1))`) gets none. The page ends those: it hears nothing.
    """

    def __init__(
        self, limits: Limits, modules: Sequence[str] = (), *, alive: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(limits)
        self._alive = alive
        self._printed = Printed(self)
        self._worker = PageWorker(self)
        self._until = 0.0
        """When the call has to be over that is being made."""
        self._lines = 0
        self._ended: BaseException | None = None
        """Why the student's code is not to go on."""
        self._start({"modules": list(modules)})

    def copy(self, path: Path) -> str:
        return str(self.folder / super().copy(path))  # there is no working directory of its own

    def close(self) -> None:
        self._worker.leave()
        super().close()

    @property
    def output(self) -> str:
        return self._printed.kept

    def _ask(self, message: dict[str, Any], within: float | None = None) -> Any:
        self._alive()
        before, self._until = self._until, self._end(within)
        trace = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            with redirect_stdout(self._printed), redirect_stderr(self._printed):
                answer = self._worker.answer(message)
        except Ended:
            assert self._ended
        finally:
            sys.settrace(trace)
            self._until = before
        if self._ended:
            raise self._ended
        return self._told(answer)

    def end(self, why: BaseException) -> None:
        """Called while student code runs: this is not to go on."""
        self._ended = self._ended or why
        raise Ended

    def _on_call(self, frame: FrameType, kind: str, argument: object) -> Any:
        return self._on_line if frame.f_code.co_filename in self._worker.student_files else None

    def _on_line(self, frame: FrameType, kind: str, argument: object) -> Any:
        self._lines += 1
        if self._lines % LINES == 0 and time.monotonic() > self._until:
            self.end(self._late())
        return self._on_line


class Printed(io.TextIOBase):
    """What student code prints: the beginning of it is kept."""

    def __init__(self, process: PageProcess) -> None:
        self._process = process
        self._size = 0
        self.kept = ""

    def write(self, text: str) -> int:
        self.kept += text[: KEPT_OUTPUT - len(self.kept)]
        self._size += len(text)
        if self._size > MOST_OUTPUT:
            self._process.end(Misbehaviour(Verdict.FLOODED_OUTPUT, "it printed more than a megabyte and was stopped"))
        return len(text)


class PageWorker(ObjectHost):
    """Answers without a channel, and limits nothing: the page has other things to run."""

    def __init__(self, process: PageProcess) -> None:
        super().__init__()
        self._process = process
        self._answered: list[dict[str, Any]] = []
        self._replies: list[dict[str, Any]] = []
        self._before = sys.unraisablehook
        self._loaded: list[str] = []

    def leave(self) -> None:
        """Put back what student code has replaced, and drop what it has loaded."""
        for name, owner, key in list(self._changes()):
            before = self._snapshot[name][1]
            if key in before:
                setattr(owner, key, before[key])
            else:
                delattr(owner, key)
        for name in self._loaded:
            sys.modules.pop(name, None)
        sys.unraisablehook = self._before

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        self._answer(self._travelled({**message, "token": ""}))
        return self._answered.pop()

    def _send(self, message: dict[str, Any]) -> None:
        message = self._travelled(message)
        if "ask" not in message:
            self._answered.append(message)
            return
        try:
            self._replies.append(self._travelled(self._process.carry_out(*message["ask"])))
        except BaseException as error:  # the grader's own: not for student code to catch
            self._process.end(error)

    def _read(self) -> dict[str, Any] | None:
        return self._replies.pop()

    @staticmethod
    def _travelled(message: dict[str, Any]) -> dict[str, Any]:
        """As it comes out of a channel: nothing in it is shared."""
        came: dict[str, Any] = json.loads(wire.line(message))
        return came

    def _do_start(self, request: dict[str, Any]) -> dict[str, Any]:
        self._begin(request["modules"])
        return {"ok": {"isolation": {}, "modules": list(self._objects)}}

    def _new_module(self, spec: ModuleSpec) -> ModuleType:
        self._loaded.append(spec.name)
        module = super()._new_module(spec)
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import}
        return module

    def _import(
        self, name: str, names: Any = None, locals: Any = None, fromlist: Sequence[str] = (), level: int = 0
    ) -> ModuleType:
        """What an import statement of the student's does."""
        for module in (name, *(f"{name}.{part}" for part in fromlist or ())):
            if f"{module.replace('.', '/')}/".startswith(tuple(f"minipaged/{private}/" for private in PRIVATE)):
                self._faults.append(f"read {module}, which belongs to the grader or holds the answer")
        return importlib.__import__(name, names, locals, fromlist, level)
