"""The grader's interface to a sandbox: calls, their outcomes, and the ways in which a submission can misbehave.

The grader sends calls; outcomes and questions come back (`wire.py`). Subclasses of `Sandbox` transport them: to a
process (`process.py`), or within a page's interpreter (`page_process.py`).

An error that student code raises comes back as an error. Harm that it does to its process (hang, use too much memory,
exit, write to the channel, tamper) is raised as `Misbehaviour`. This is not an `Exception`, so that no `except
Exception` on the way to the grader catches it, and Hypothesis does not try to shrink it.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from minipaged.course.sandbox import wire


class Verdict(StrEnum):
    """A kind of misbehaviour of a submission. Each fails the test in which it happened."""

    TIMED_OUT = "timed-out"
    """A call did not return in time."""
    OUT_OF_MEMORY = "out-of-memory"
    """It requested more memory than its limit."""
    ENDED = "ended"
    """The process ended in the middle of a test."""
    FLOODED_OUTPUT = "flooded-output"
    """It printed more than a megabyte."""
    FORGED_MESSAGE = "forged-message"
    """It wrote a message of its own to the grader's channel."""
    FORBIDDEN = "forbidden"
    """It read, wrote, started or connected to something forbidden."""
    TAMPERED = "tampered"
    """It replaced members of minipaged or of the standard library."""
    LEFT_THREADS = "left-threads"
    """It left threads running."""
    RAISED_IN_DEL = "raised-in-del"
    """One of its objects raised an exception while it was deleted."""


class Misbehaviour(BaseException):
    """Raised when a submission misbehaves, with the verdict and a sentence that says what happened."""

    def __init__(self, verdict: Verdict, message: str) -> None:
        super().__init__(f"{verdict}: {message}")
        self.verdict, self.message = verdict, message
        self.failure: Any = None
        """An `assignment.Failure` with the details, if the test has them."""


class StudentError(Exception):
    """An error in student code that the contract does not name."""

    def __init__(self, kind: str, message: str, places: Sequence[str]) -> None:
        self.kind, self.message, self.places = kind, message, tuple(places)
        where = f" ({places[-1]})" if places else ""
        super().__init__(f"{kind}: {message}{where}" if message else f"{kind}{where}")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a worker. A right solution stays far below each."""

    call_seconds: float = 5.0
    """Wall-clock time of one call or one batch of calls."""
    test_seconds: float = 120.0
    """Wall-clock time of one test."""
    cpu_seconds: int = 120
    memory_bytes: int = 1 << 30
    """Address space, in addition to the space used once the assignment's modules are loaded."""
    file_bytes: int = 16 << 20
    """Size of any file that the worker writes."""
    open_files: int = 64
    processes: int | None = 0
    """The most processes and threads of the same user; None for no limit. Root is never limited."""
    processes_allowed: bool = False
    """Whether student code may start processes, such as a compiler."""
    gpu: bool = False
    """Whether Triton compiles kernels for a GPU; otherwise its interpreter runs them on the CPU."""


@dataclass(frozen=True, slots=True)
class Raised:
    """The outcome of a call that raised an error."""

    error: Exception


Outcome = Any
"""The value that a call returned, or a `Raised`."""


@dataclass(frozen=True, slots=True)
class Handle:
    """A reference to an object in the worker."""

    process: Sandbox
    number: int
    kind: str
    """The name of its type."""

    def call(self, member: str, *args: Any) -> Any:
        """Call a member and return its result. Raises the contract's errors, StudentError and Misbehaviour."""
        return _value(self.process.batch([(self, member, args)])[0])

    def get(self, member: str) -> Any:
        """Read an attribute or property."""
        return _value(self.process.batch([(self, member, None)])[0])


@dataclass(frozen=True, slots=True)
class Member:
    """A class or function of a student's file."""

    name: str
    is_class: bool
    members: tuple[str, ...]
    written: tuple[str, ...]
    """The members that it does not inherit from a class of minipaged."""
    unfinished: tuple[str, ...]
    """Abstract members that it does not implement."""


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A student's file, loaded."""

    module: Handle
    contents: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """An argument in a batch: the result of an earlier call of the same batch."""

    call: int


def _value(outcome: Outcome) -> Any:
    if isinstance(outcome, Raised):
        raise outcome.error
    return outcome


MOST_OUTPUT = 1 << 20
"""The number of bytes that a submission may print. One that prints more is stopped."""
KEPT_OUTPUT = 4000
"""The number of printed bytes that are shown."""


class Sandbox(ABC):
    """The grader's end of the place where one submission runs, with a folder of its own.

    It sends requests to an `ObjectHost` (`answering.py`), and answers student code that calls the grader's objects.
    """

    isolation: dict[str, str]
    """The isolation in effect, and the limits that could not be set."""
    modules: list[Handle]
    """Modules of minipaged, loaded before any student code."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._hosted: list[Any] = []
        self._first_object = 0
        self._deadline = 0.0
        self.folder = Path(tempfile.mkdtemp(prefix="minipaged-grade-"))

    @property
    @abstractmethod
    def output(self) -> str:
        """The beginning of the submission's printed output."""

    @abstractmethod
    def _ask(self, message: dict[str, Any], within: float | None = None) -> Any:
        """Send a request and return the answer. Raises the error in the answer, and Misbehaviour.

        `within` is the time limit in seconds; None means the limit of a call.
        """

    def _start(self, message: dict[str, Any]) -> None:
        """Send the first message. Its `modules` are loaded before any student code."""
        self._deadline = time.monotonic() + self._limits.test_seconds
        started = self._ask({"do": "start", **message}, within=60.0)  # minipaged's own imports take this time
        self.isolation = started["isolation"]
        self.modules = [Handle(self, number, "module") for number in started["modules"]]
        self._deadline = time.monotonic() + self._limits.test_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- The grader's requests --------------------------------------------------------------------

    def load(self, path: Path, name: str, *, within: float = 20.0) -> LoadedFile:
        """Load a copy of a student's file as module `name`. Raises StudentError and Misbehaviour."""
        loaded = self._ask({"do": "load", "path": self.copy(path), "name": name}, within)
        self._first_object = max(self._first_object, loaded["number"] + 1)
        contents = tuple(
            Member(
                *(item["name"], item["is_class"]),
                *(tuple(item[kind]) for kind in ("members", "written", "unfinished")),
            )
            for item in loaded["contents"]
        )
        return LoadedFile(Handle(self, loaded["number"], "module"), contents)

    def copy(self, path: Path) -> str:
        """Copy the file into the sandbox's folder and return its name there."""
        shutil.copy(path, self.folder / path.name)
        return path.name

    def batch(
        self, calls: Iterable[tuple[Handle, str, Sequence[Any] | None]], *, seed: int | None = None
    ) -> list[Outcome]:
        """Make several calls in one message and return their outcomes. With None for arguments, read an attribute.

        `seed` first seeds the worker's `random`, so that a run can be repeated.
        """
        encoded = [
            [
                self._encode(target),
                member,
                None if args is None else [self._encode(value) for value in args],
            ]
            for target, member, args in calls
        ]
        return [self._outcome(answer) for answer in self._ask({"do": "calls", "calls": encoded, "seed": seed})]

    def seconds(self, target: Handle, members: Sequence[str], calls: Sequence[tuple[str, Any, int | None]]) -> float:
        """Return the seconds that the calls take in a row.

        Each call is (member, argument or None, number of an earlier call whose result is the argument, or None).
        """
        message = {"do": "time", "target": target.number, "members": list(members), "calls": calls}
        return float(self._ask(message))

    def forget(self) -> None:
        """Drop all objects made since the files were loaded."""
        self._hosted.clear()
        self._ask({"do": "forget", "from": self._first_object})

    def finish(self) -> None:
        """Request the completion message. Raises Misbehaviour if it reports a fault or does not come."""
        report = self._ask({"do": "finish", "from": self._first_object})
        if not isinstance(report, dict) or "verdict" not in report:
            raise Misbehaviour(Verdict.FORGED_MESSAGE, "the completion message is damaged")
        if report["verdict"] is not None:
            raise Misbehaviour(Verdict(report["verdict"]), f"the submission misbehaved: {report['message']}")

    # --- Time and questions -----------------------------------------------------------------------

    def _end(self, within: float | None) -> float:
        """Return the deadline of a call that starts now, in the time of `time.monotonic`."""
        now = time.monotonic()
        return now + within if within else min(now + self._limits.call_seconds, self._deadline)

    def _late(self) -> Misbehaviour:
        """Return the error for a call that exceeds its time limit."""
        whole = time.monotonic() >= self._deadline
        what, seconds = ("the test", self._limits.test_seconds) if whole else ("a call", self._limits.call_seconds)
        within = f"{seconds:g} second{'s' * (seconds != 1)}"
        return Misbehaviour(Verdict.TIMED_OUT, f"{what} did not end within {within}: an endless loop, or far too slow")

    @staticmethod
    def _told(answer: dict[str, Any]) -> Any:
        """Return the value of an answer, or raise its error."""
        if "fault" in answer:
            raise Misbehaviour(Verdict.FORBIDDEN, f"the submission {answer['fault']}")
        if "raised" in answer:
            raise _error(answer["raised"])
        return answer["ok"]

    def carry_out(self, number: int, member: str, args: list[Any] | None) -> dict[str, Any]:
        """Make a call of student code on an object of the grader's. Raises Misbehaviour for members not offered."""
        if not (isinstance(number, int) and 0 <= number < len(self._hosted)):
            raise Misbehaviour(Verdict.FORGED_MESSAGE, "it requested an object that was never offered")
        target = self._hosted[number]
        methods, properties = _offered(target)
        try:
            if member in properties and args is None:
                value = getattr(target, member)
            elif member in methods and isinstance(args, list):
                value = getattr(target, member)(*(wire.decode(item, self._special) for item in args))
            else:
                raise Misbehaviour(Verdict.FORGED_MESSAGE, f"it requested {member!r}, which was never offered")
        except Exception as error:
            return {"raised": [type(error).__name__, str(error)]}
        return {"ok": self._encode(value)}

    # --- Values -----------------------------------------------------------------------------------

    def _outcome(self, answer: Any) -> Outcome:
        if "raised" in answer:
            return Raised(_error(answer["raised"]))
        try:
            return wire.decode(answer["ok"], self._special)
        except Exception as error:
            raise Misbehaviour(Verdict.FORGED_MESSAGE, f"an answer is not a valid value: {error}") from None

    def _special(self, tag: str, content: Any) -> Any:
        if tag == "$handle":
            return Handle(self, int(content[0]), str(content[1]))
        if tag == "$host":
            return self._hosted[content[0]]
        raise ValueError(f"unknown tag {tag}")

    def _encode(self, value: Any) -> Any:
        return wire.encode(value, self._offer)

    def _offer(self, value: Any) -> Any:
        if isinstance(value, Result):
            return {"$result": value.call}
        if isinstance(value, Handle):
            return {"$handle": [value.number, value.kind]}
        if not hasattr(type(value), "OFFERED"):
            raise TypeError(f"{value!r} cannot be sent to a worker: it is not data, and its class has no OFFERED")
        number = next((i for i, hosted in enumerate(self._hosted) if hosted is value), len(self._hosted))
        if number == len(self._hosted):
            self._hosted.append(value)
        methods, properties = _offered(value)
        return {"$host": [number, methods, properties]}


StartSandbox = Callable[[Limits, Sequence[str]], Sandbox]
"""Starts a sandbox with these limits; the named modules are loaded before any student code."""


def _offered(value: Any) -> tuple[list[str], list[str]]:
    """Return the methods and the properties that student code may use, from the class's `OFFERED`."""
    offered: Iterable[str] = type(value).OFFERED
    methods: list[str] = []
    properties: list[str] = []
    for name in offered:
        (properties if isinstance(getattr(type(value), name, None), property) else methods).append(name)
    return methods, properties


def _error(raised: dict[str, Any]) -> Exception:
    known = raised["known"]
    if known and known[0] in wire.ERRORS:
        return wire.ERRORS[known[0]](raised["message"])
    return StudentError(str(raised["type"]), str(raised["message"]), [str(place) for place in raised["places"]])
