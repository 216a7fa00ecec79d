"""The grader's end of wherever student code runs: calls go there, outcomes and questions come back (`wire.py`).

How they get there is in the classes that extend `Asker`: to a process (`process.py`), or to what stands in its place in
a page (`page_process.py`). What may come back, and how a submission may misbehave, is in `contract.py`.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from minipaged.course.sandbox import wire
from minipaged.course.sandbox.contract import (
    CONTRACT_ERRORS,
    Handle,
    Limits,
    Loaded,
    Member,
    Misbehaviour,
    Outcome,
    Raised,
    Result,
    Sandbox,
    StudentError,
    Verdict,
)

MOST_OUTPUT = 1 << 20
"""Bytes that a submission may print; whoever prints more is stopped."""
KEPT_OUTPUT = 4000
"""Bytes of it that are shown."""


class Asker(Sandbox):
    """Asks a `Worker` (`answering.py`), and answers what student code asks of objects that it was offered. Has a
    folder in which the submission runs."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._hosted: list[Any] = []
        self._first_object = 0
        self._deadline = 0.0
        self.folder = Path(tempfile.mkdtemp(prefix="minipaged-grade-"))

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Delete its folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- What the grader asks ---------------------------------------------------------------------

    def load(self, path: Path, name: str, *, within: float = 20.0) -> Loaded:
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
        return Loaded(Handle(self, loaded["number"], "module"), contents)

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
        return Misbehaviour(
            Verdict.TIMED_OUT, f"{what} did not end within {seconds:g} seconds: an endless loop, or far too slow"
        )

    @staticmethod
    def _value(answer: dict[str, Any]) -> Any:
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
    if known and known[0] in CONTRACT_ERRORS:
        return CONTRACT_ERRORS[known[0]](raised["message"])
    return StudentError(str(raised["type"]), str(raised["message"]), [str(place) for place in raised["places"]])
