"""What the grader knows of where student code runs: what may be asked, what comes back, what can go wrong.

Calls go there, outcomes and questions come back (`wire.py`). How they get there is in the classes that extend
`Sandbox`: to a process (`process.py`), or to what stands in its place in a page (`page_process.py`).

What student code raises comes back as an error. What it *does* to where it runs (hang, eat memory, exit, write to the
channel, tamper) comes back as `Misbehaviour`, which is no `Exception`: no `except Exception` on the way to the grader
can swallow it, and Hypothesis does not try to shrink it.
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
    """What a submission did to its process. Each fails the test in which it happened."""

    TIMED_OUT = "timed-out"
    """A call did not return in time."""
    OUT_OF_MEMORY = "out-of-memory"
    """It asked for more memory than it may have."""
    ENDED = "ended"
    """The process ended in the middle of a test."""
    FLOODED_OUTPUT = "flooded-output"
    """It printed more than a megabyte."""
    FORGED_MESSAGE = "forged-message"
    """Something was written to the grader's channel that is no answer of the worker's."""
    FORBIDDEN = "forbidden"
    """It read, wrote, started or connected to something that is none of its business."""
    TAMPERED = "tampered"
    """It replaced members of minipaged or of the standard library."""
    LEFT_THREADS = "left-threads"
    """It left threads running."""
    RAISED_IN_DEL = "raised-in-del"
    """One of its objects raised an exception while it was deleted."""


class Misbehaviour(BaseException):
    """A verdict, and what happened, in a sentence."""

    def __init__(self, verdict: Verdict, message: str) -> None:
        super().__init__(f"{verdict}: {message}")
        self.verdict, self.message = verdict, message
        self.failure: Any = None
        """An `assignment.Failure` that tells more, where a test can."""


class StudentError(Exception):
    """Student code raised something that the contract does not name."""

    def __init__(self, kind: str, message: str, places: Sequence[str]) -> None:
        self.kind, self.message, self.places = kind, message, tuple(places)
        where = f" ({places[-1]})" if places else ""
        super().__init__(f"{kind}: {message}{where}" if message else f"{kind}{where}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker may use. None of it is scarce for a right solution."""

    call_seconds: float = 5.0
    """Wall-clock time of one call (or one batch of calls)."""
    test_seconds: float = 120.0
    """Wall-clock time of one test."""
    cpu_seconds: int = 120
    memory_bytes: int = 1 << 30
    """Address space, beside what is taken once the assignment's modules are loaded."""
    file_bytes: int = 16 << 20
    """Size of any file that it writes."""
    open_files: int = 64
    processes: int | None = 0
    """More processes and threads (of the same user) than this may not be started; None: no limit. Root has none."""
    processes_allowed: bool = False
    """Whether student code may start processes (a compiler, say)."""
    gpu: bool = False
    """Whether Triton kernels are compiled for a GPU; otherwise Triton's interpreter runs them, on the CPU."""


@dataclass(frozen=True, slots=True)
class Raised:
    """A call that raised."""

    error: Exception


Outcome = Any
"""What a call returned, or a `Raised`."""


@dataclass(frozen=True, slots=True)
class Handle:
    """An object that lives in the worker."""

    process: Sandbox
    number: int
    kind: str
    """The name of its type."""

    def call(self, member: str, *args: Any) -> Any:
        """Call a member; returns what it returned. Raises the contract's errors, StudentError and Misbehaviour."""
        return _value(self.process.batch([(self, member, args)])[0])

    def get(self, member: str) -> Any:
        """Look at an attribute or property."""
        return _value(self.process.batch([(self, member, None)])[0])


@dataclass(frozen=True, slots=True)
class Member:
    """A class or function of a student's file."""

    name: str
    is_class: bool
    members: tuple[str, ...]
    written: tuple[str, ...]
    """Those of them that no class of minipaged's has given it."""
    unfinished: tuple[str, ...]
    """Abstract members that it leaves open."""


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A student's file, loaded."""

    module: Handle
    contents: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """In a batch: what an earlier call of the same batch returned."""

    call: int


def _value(outcome: Outcome) -> Any:
    if isinstance(outcome, Raised):
        raise outcome.error
    return outcome


MOST_OUTPUT = 1 << 20
"""Bytes that a submission may print; whoever prints more is stopped."""
KEPT_OUTPUT = 4000
"""Bytes of it that are shown."""


class Sandbox(ABC):
    """Where one submission runs, in a folder of its own. Asks an `ObjectHost` (`answering.py`), and answers student
    code that calls the objects it was offered."""

    isolation: dict[str, str]
    """How student code is kept apart, and what could not be had."""
    modules: list[Handle]
    """Ours, loaded before any student code."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._hosted: list[Any] = []
        self._first_object = 0
        self._deadline = 0.0
        self.folder = Path(tempfile.mkdtemp(prefix="minipaged-grade-"))

    @property
    @abstractmethod
    def output(self) -> str:
        """The beginning of what the submission printed."""

    @abstractmethod
    def _ask(self, message: dict[str, Any], within: float | None = None) -> Any:
        """Have it answered, in as many seconds (None: in what is left to a call). Raises what the answer says, and
        Misbehaviour."""

    def _start(self, message: dict[str, Any]) -> None:
        """The first message. What `modules` of it names is loaded before any student code."""
        self._deadline = time.monotonic() + self._limits.test_seconds
        started = self._ask({"do": "start", **message}, within=60.0)  # of our own doing: imports
        self.isolation = started["isolation"]
        self.modules = [Handle(self, number, "module") for number in started["modules"]]
        self._deadline = time.monotonic() + self._limits.test_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete its folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- What the grader asks ---------------------------------------------------------------------

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
        """Put a copy of the file into its folder; its name there."""
        shutil.copy(path, self.folder / path.name)
        return path.name

    def batch(
        self, calls: Iterable[tuple[Handle, str, Sequence[Any] | None]], *, seed: int | None = None
    ) -> list[Outcome]:
        """Make several calls in one message; the outcome of each. No args: look at an attribute.

        `seed`: what the worker's `random` is seeded with before, so that a run can be repeated.
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
        """How long the calls take in a row: (member, a number or None, or the call whose result is the argument)."""
        message = {"do": "time", "target": target.number, "members": list(members), "calls": calls}
        return float(self._ask(message))

    def forget(self) -> None:
        """Drop all objects that were made since the files were loaded."""
        self._hosted.clear()
        self._ask({"do": "forget", "from": self._first_object})

    def finish(self) -> None:
        """Ask for the completion message. Raises Misbehaviour unless it comes and everything is in order."""
        report = self._ask({"do": "finish", "from": self._first_object})
        if not isinstance(report, dict) or "verdict" not in report:
            raise Misbehaviour(Verdict.FORGED_MESSAGE, "the completion message is damaged")
        if report["verdict"] is not None:
            raise Misbehaviour(Verdict(report["verdict"]), f"the submission misbehaved: {report['message']}")

    # --- Time and questions -----------------------------------------------------------------------

    def _end(self, within: float | None) -> float:
        """When that call has to be over, by `time.monotonic`."""
        now = time.monotonic()
        return now + within if within else min(now + self._limits.call_seconds, self._deadline)

    def _late(self) -> Misbehaviour:
        """What to say of a call that is not over in time."""
        whole = time.monotonic() >= self._deadline
        what, seconds = ("the test", self._limits.test_seconds) if whole else ("a call", self._limits.call_seconds)
        within = f"{seconds:g} second{'s' * (seconds != 1)}"
        return Misbehaviour(Verdict.TIMED_OUT, f"{what} did not end within {within}: an endless loop, or far too slow")

    @staticmethod
    def _told(answer: dict[str, Any]) -> Any:
        """What an answer tells, which is no question."""
        if "fault" in answer:
            raise Misbehaviour(Verdict.FORBIDDEN, f"the submission {answer['fault']}")
        if "raised" in answer:
            raise _error(answer["raised"])
        return answer["ok"]

    def carry_out(self, number: int, member: str, args: list[Any] | None) -> dict[str, Any]:
        """A call that student code makes on an object of ours. Only what was offered can be asked for."""
        if not (isinstance(number, int) and 0 <= number < len(self._hosted)):
            raise Misbehaviour(Verdict.FORGED_MESSAGE, "it asks for an object that was never offered")
        target = self._hosted[number]
        methods, properties = _offered(target)
        try:
            if member in properties and args is None:
                value = getattr(target, member)
            elif member in methods and isinstance(args, list):
                value = getattr(target, member)(*(wire.decode(item, self._special) for item in args))
            else:
                raise Misbehaviour(Verdict.FORGED_MESSAGE, f"it asks for {member!r}, which was never offered")
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
            raise Misbehaviour(Verdict.FORGED_MESSAGE, f"an answer that is no value: {error}") from None

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
            raise TypeError(f"{value!r} cannot be sent to a worker: it is neither data nor has it OFFERED members")
        number = next((i for i, hosted in enumerate(self._hosted) if hosted is value), len(self._hosted))
        if number == len(self._hosted):
            self._hosted.append(value)
        methods, properties = _offered(value)
        return {"$host": [number, methods, properties]}


StartSandbox = Callable[[Limits, Sequence[str]], Sandbox]
"""Makes one, with modules of ours loaded before any student code."""


def _offered(value: Any) -> tuple[list[str], list[str]]:
    """The members that student code may use, by its class's `OFFERED`: methods, properties."""
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
