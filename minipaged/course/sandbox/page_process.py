"""The sandbox in a web page: the grader and the student's part share one interpreter, since a page has no processes.

A page's Python (Pyodide) ends with the page, and a grade there concerns its reader alone. Therefore this sandbox only
protects against mistakes: a call that does not return is ended, printed output is bounded, replaced members of other
modules are detected and restored, and importing the answers is forbidden. Values are encoded as between processes
(`wire.py`), so that a part that passes here passes there.
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
"""The number of lines of student code between two checks of the time limit."""


class PageProcess(Sandbox):
    """A sandbox like `WorkerProcess`, in this interpreter. `alive` is called before each call.

    A call that takes too long is ended by an exception in its next line. Python then stops tracing, so student code
    that catches this exception (`except:`) goes on; and a call that runs no lines (`sum(iter(int, 1))`) gets no
    exception. The page ends these calls, because `alive` is no longer called.
    """

    def __init__(
        self, limits: Limits, modules: Sequence[str] = (), *, alive: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(limits)
        self._alive = alive
        self._printed = Printed(self)
        self._worker = PageWorker(self)
        self._until = 0.0
        """The deadline of the current call."""
        self._lines = 0
        self._ended: BaseException | None = None
        """The error that stopped the student's code, if any."""
        self._start({"modules": list(modules)})

    def copy(self, path: Path) -> str:
        return str(self.folder / super().copy(path))  # a full path, since the working directory is the page's

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
        """Stop student code with an `Ended`; `_ask` then raises `why`. Called while student code runs."""
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
    """The output stream of student code. Keeps the beginning, and stops the code if it prints too much."""

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
    """The student's end of a `PageProcess`. It has no channel, and sets no limits on the page's interpreter."""

    def __init__(self, process: PageProcess) -> None:
        super().__init__()
        self._process = process
        self._answered: list[dict[str, Any]] = []
        self._replies: list[dict[str, Any]] = []
        self._before = sys.unraisablehook
        self._loaded: list[str] = []

    def leave(self) -> None:
        """Restore the members that student code replaced, and drop the modules that it loaded."""
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
        except BaseException as error:  # the grader's own error, which student code must not catch
            self._process.end(error)

    def _read(self) -> dict[str, Any] | None:
        return self._replies.pop()

    @staticmethod
    def _travelled(message: dict[str, Any]) -> dict[str, Any]:
        """Return the message as a channel would deliver it: a copy that shares no objects."""
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
        """Import for the student's import statements; private modules of minipaged are noted as faults."""
        for module in (name, *(f"{name}.{part}" for part in fromlist or ())):
            if f"{module.replace('.', '/')}/".startswith(tuple(f"minipaged/{private}/" for private in PRIVATE)):
                self._faults.append(f"read {module}, which belongs to the grader or holds the answer")
        return importlib.__import__(name, names, locals, fromlist, level)
