"""What the grader knows of where student code runs: what may be asked, what comes back, what can go wrong.

What student code raises comes back as an error. What it *does* to where it runs (hang, eat memory, exit, write to the
channel, tamper) comes back as `Misbehaviour`, which is no `Exception`: no `except Exception` on the way to the grader
can swallow it, and Hypothesis does not try to shrink it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from minipaged.errors import BadLogits, BlockNotAllocated, InvalidRequest, OutOfBlocks


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


CONTRACT_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (OutOfBlocks, BlockNotAllocated, InvalidRequest, BadLogits, ValueError)
}
"""Errors that contracts name: raised in the grader as what they are."""


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
class Loaded:
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


class Sandbox(Protocol):
    """Where one submission runs: a process (`process.WorkerProcess`), or what stands in its place."""

    isolation: dict[str, str]
    """How student code is kept apart, and what could not be had."""
    modules: list[Handle]
    """Ours, loaded before any student code."""

    @property
    def output(self) -> str:
        """The beginning of what the submission printed."""

    def load(self, path: Path, name: str) -> Loaded:
        """Load a copy of a student's file as module `name`. Raises StudentError and Misbehaviour."""

    def copy(self, path: Path) -> str:
        """Put a copy of the file where the submission runs; its name there."""

    def batch(
        self, calls: Iterable[tuple[Handle, str, Sequence[Any] | None]], *, seed: int | None = None
    ) -> list[Outcome]:
        """Make several calls in one message; the outcome of each. No args: look at an attribute.

        `seed`: what `random` is seeded with before, so that a run can be repeated.
        """

    def seconds(self, target: Handle, members: Sequence[str], calls: Sequence[tuple[str, Any, int | None]]) -> float:
        """How long the calls take in a row: (member, a number or None, or the call whose result is the argument)."""

    def forget(self) -> None:
        """Drop all objects that were made since the files were loaded."""

    def finish(self) -> None:
        """Ask whether everything is in order. Raises Misbehaviour unless it is."""

    def close(self) -> None:
        """End it, whatever runs there."""


StartSandbox = Callable[[Limits, Sequence[str]], Sandbox]
"""Makes one, with modules of ours loaded before any student code."""
