"""The student's end of a sandbox: holds the student's objects, makes the grader's calls on them, and sends the answers.

Only the grader knows the right answers. It sends calls ("make a BlockAllocator of 3 blocks, allocate, ...") and
compares the answers with a model of its own. Hence there is no message "all tests passed" to forge: only a correct part
can answer every call rightly. Each request carries a random token, and its answer must carry the same one, so that the
grader detects messages that student code writes to the channel.

At the end of a test the grader asks for faults: threads still running, exceptions in `__del__`, modules with replaced
members. Subclasses of `ObjectHost` transport the messages and isolate student code: a process (`worker.py`), or the
grader's own interpreter in a page (`page_process.py`).
"""

from __future__ import annotations

import _thread
import gc
import importlib
import importlib.util
import json
import os
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from traceback import walk_tb
from types import ModuleType, TracebackType
from typing import Any

from minipaged.course.sandbox import wire

PLAIN: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        *(NotImplementedError, MemoryError, RecursionError, TimeoutError, KeyError, IndexError),
        *(TypeError, AttributeError, AssertionError),
    )
}
"""Python's errors that, like `wire.ERRORS`, are raised in student code with their own type. All others become a
RuntimeError."""
WATCHED_MODULES = (
    *("random", "time", "json", "os", "posixpath", "gc", "_thread", "threading", "copy", "tracemalloc"),
    *("numpy", "torch"),  # if the assignment's modules import them
)
PRIVATE = ("reference", "fast", "engine", "course", "demo", "models/quantized")
"""Parts of minipaged that contain answers or the grader."""


class Ended(BaseException):
    """Raised in student code to stop it, if the grader runs in the same interpreter."""


class ObjectHost(ABC):
    """Holds the student's objects, and records the faults of student code."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._next_number = 0
        self._stubs: dict[int, Stub] = {}
        self._token = ""
        """The token of the request that is being answered."""
        self.student_files: list[str] = []
        self._faults: list[str] = []
        """Forbidden actions of student code, as ends of the sentence "the submission …"."""
        self._unraisable: list[str] = []
        # Own references, so that a student's module cannot replace these functions.
        self._loads, self._line, self._clock = json.loads, wire.line, time.perf_counter
        self._seed, self._collect, self._count_threads = random.seed, gc.collect, _thread._count
        self._snapshot: dict[str, tuple[Any, dict[str, Any]]] = {}

    @abstractmethod
    def _read(self) -> dict[str, Any] | None:
        """Return the grader's next message, or None if it closed the channel."""

    @abstractmethod
    def _send(self, message: dict[str, Any]) -> None:
        """Send a message to the grader."""

    def _answer(self, request: dict[str, Any]) -> None:
        before, self._token = self._token, request["token"]
        answer = getattr(self, f"_do_{request['do']}")(request)
        self._token = before
        if self._faults:
            answer = {"fault": self._faults[0]}
        self._send({"token": request["token"], **answer})

    # --- The grader's requests --------------------------------------------------------------------

    @abstractmethod
    def _do_start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Prepare for student code: call `_begin`, and isolate the process."""

    def _begin(self, modules: Sequence[str]) -> None:
        """Import the assignment's modules, and take a snapshot of the members that must not change."""
        for name in modules:
            self._objects[self._new_number()] = importlib.import_module(name)
        sys.unraisablehook = self._note_unraisable
        self._hooks = (sys.unraisablehook, sys.stdout, sys.stderr)
        self._take_snapshot()
        self._own_threads = self._count_threads()  # not the student's

    def _do_load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Import a student's file from the working directory, and answer with its classes and functions."""
        path, name = request["path"], request["name"]
        self.student_files.append(path)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = self._new_module(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Ended:
            raise
        except BaseException as error:  # SystemExit too: a file that ends the process when loaded cannot be graded
            return {"raised": self._describe(error)}
        number = self._new_number()
        self._objects[number] = module
        return {"ok": {"number": number, "contents": self._contents(module)}}

    def _new_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.util.module_from_spec(spec)

    def _do_calls(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make the calls in order and answer with what each returned or raised."""
        if request["seed"] is not None:
            self._seed(request["seed"])
        results: list[Any] = []
        special = self._resolver(results)
        outcomes: list[dict[str, Any]] = []
        for target, member, args in request["calls"]:
            try:
                found = getattr(wire.decode(target, special), member)
                result = found if args is None else found(*wire.decode(args, special))
                results.append(result)
                outcomes.append({"ok": wire.encode(result, self._handle)})
            except Ended:
                raise
            except BaseException as error:
                results.append(None)
                outcomes.append({"raised": self._describe(error)})
        return {"ok": outcomes}

    def _do_time(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer with the seconds that the calls take in a row.

        Each call is a member, an argument, and a reference: the number of an earlier call whose result is the argument.
        """
        results: list[Any] = []
        methods = {name: getattr(self._objects[request["target"]], name) for name in request["members"]}
        calls = [(methods[member], argument, reference) for member, argument, reference in request["calls"]]
        append, started = results.append, self._clock()
        for method, argument, reference in calls:
            if reference is not None:
                append(method(results[reference]))
            elif argument is not None:
                append(method(argument))
            else:
                append(method())
        return {"ok": self._clock() - started}

    def _do_forget(self, request: dict[str, Any]) -> dict[str, Any]:
        """Drop the objects that were made since the files were loaded."""
        for number in [number for number in self._objects if number >= request["from"]]:
            del self._objects[number]
        self._stubs.clear()
        return {"ok": None}

    def _do_finish(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer with the completion message, which names the first fault, if any. No test passes without it."""
        self._do_forget(request)
        self._collect()
        if self._unraisable:
            return {"ok": {"verdict": "raised-in-del", "message": self._unraisable[0]}}
        if (sys.unraisablehook, sys.stdout, sys.stderr) != self._hooks:
            return {
                "ok": {"verdict": "tampered", "message": "it replaced sys.unraisablehook, sys.stdout or sys.stderr"}
            }
        if replaced := self._replaced():
            return {"ok": {"verdict": "tampered", "message": f"it replaced {replaced}"}}
        if (threads := self._count_threads() - self._own_threads) > 0:
            return {"ok": {"verdict": "left-threads", "message": f"{threads} threads of its own are still running"}}
        return {"ok": {"verdict": None}}

    # --- Objects that do not travel ---------------------------------------------------------------

    def _new_number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _handle(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Stub):
            return {"$host": [object.__getattribute__(value, "_number")]}
        number = self._new_number()
        self._objects[number] = value
        return {"$handle": [number, type(value).__name__]}

    def _resolver(self, results: Sequence[Any]) -> Callable[[str, Any], Any]:
        def resolve(tag: str, content: Any) -> Any:
            if tag == "$handle":
                return self._objects[content[0]]
            if tag == "$result":
                return results[content]
            assert tag == "$host"
            number, methods, properties = content
            if number not in self._stubs:
                self._stubs[number] = Stub(number, methods, properties, self._ask)
            return self._stubs[number]

        return resolve

    def _ask(self, number: int, member: str, args: Sequence[Any] | None) -> Any:
        """Make a call of student code on an object of the grader's."""
        encoded = None if args is None else [wire.encode(_as_list(value), self._handle) for value in args]
        self._send({"token": self._token, "ask": [number, member, encoded]})
        while (message := self._read()) is not None:
            if "do" not in message:
                break
            self._answer(message)  # before it answers, the grader may call student code
        if message is None:
            os._exit(0)
        if "raised" in message:
            name, text = message["raised"]
            raise (wire.ERRORS | PLAIN).get(name, RuntimeError)(text)
        return wire.decode(message["ok"], self._resolver(()))

    # --- Errors -----------------------------------------------------------------------------------

    def _describe(self, error: BaseException) -> dict[str, Any]:
        """Return the error's type, message, and places in the student's files."""
        try:
            text = str(error.msg if isinstance(error, SyntaxError) else error)[:2000]
        except BaseException:
            text = "(its message cannot be read)"
        places = [*self._places(error.__traceback__)]
        if isinstance(error, SyntaxError) and error.lineno:
            places.append(f"{os.path.basename(str(error.filename))}:{error.lineno}")
        known = [name for name, kind in wire.ERRORS.items() if isinstance(error, kind)]
        return {"type": type(error).__name__, "known": known[:1], "message": text, "places": places[-8:]}

    def _places(self, traceback: TracebackType | None) -> list[str]:
        theirs = {os.path.basename(file) for file in self.student_files}
        lines = [(os.path.basename(frame.f_code.co_filename), line, frame) for frame, line in walk_tb(traceback)]
        return [f"{file}:{line} in {frame.f_code.co_name}" for file, line, frame in lines if file in theirs]

    def _note_unraisable(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        self._unraisable.append(f"{type(error).__name__}: {error} in {unraisable.object!r}"[:500])

    @staticmethod
    def _contents(module: ModuleType) -> list[dict[str, Any]]:
        """Return the classes and functions that the file defines, with their members."""
        return [
            {
                "name": name,
                "is_class": isinstance(value, type),
                "members": [member for member in dir(value) if not member.startswith("__")],
                "written": [
                    member for member in dir(value) if not (member.startswith("__") or _is_ours(value, member))
                ],
                "unfinished": sorted(getattr(value, "__abstractmethods__", ())),
            }
            for name, value in list(vars(module).items())
            if callable(value) and getattr(value, "__module__", None) == module.__name__ and isinstance(name, str)
        ]

    # --- Replaced members -------------------------------------------------------------------------

    def _take_snapshot(self) -> None:
        importlib.import_module("threading")
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "minipaged" or name in WATCHED_MODULES:
                self._snapshot[name] = (module, dict(vars(module)))
                for key, value in list(vars(module).items()):
                    if isinstance(value, type) and value.__module__ == name:
                        self._snapshot[f"{name}.{key}"] = (value, dict(vars(value)))

    def _replaced(self) -> str | None:
        return next((f"{name}.{key}" for name, _, key in self._changes()), None)

    def _changes(self) -> Iterator[tuple[str, Any, str]]:
        """Yield each replaced member: the name of its module or class, that object, and the member's name."""
        for name, (owner, before) in self._snapshot.items():
            now = vars(owner)
            for key, value in before.items():
                if now.get(key, None) is not value and key not in ("__annotations__", "__annotations_cache__"):
                    yield name, owner, key
            inherited = owner.__mro__[1:] if isinstance(owner, type) else ()
            for key in now.keys() - before.keys():
                if any(key in vars(base) for base in inherited):
                    yield name, owner, key


class Stub:
    """A proxy for an object of the grader's. Each call, and each read of a property, is a message to the grader."""

    def __init__(self, number: int, methods: Sequence[str], properties: Sequence[str], ask: Callable[..., Any]) -> None:
        self._number, self._methods, self._properties, self._asks = number, methods, properties, ask

    def __getattr__(self, name: str) -> Any:
        if name in self._methods:
            return lambda *args: self._asks(self._number, name, args)
        if name in self._properties:
            return self._asks(self._number, name, None)
        raise AttributeError(name)

    def __call__(self, *args: Any) -> Any:
        return self._asks(self._number, "__call__", args)


def _is_ours(kind: Any, member: str) -> bool:
    """Whether a class inherits the member from a class of minipaged."""
    owner = next((base for base in getattr(kind, "__mro__", ()) if member in vars(base)), None)
    return str(getattr(owner, "__module__", "")).partition(".")[0] == "minipaged"


def _as_list(value: Any) -> Any:
    """Return iterators (`reversed(blocks)`, a generator) and ranges as lists, since these can travel."""
    return list(value) if hasattr(type(value), "__next__") or type(value) is range else value
