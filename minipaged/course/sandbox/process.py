"""The grader's end of a worker process: start it, call into it, and never wait for it longer than agreed.

    with WorkerProcess(limits, modules=()) as process:
        part = process.load(Path("my_allocator.py"), "submission")
        allocator = part.call("BlockAllocator", 4)      # a handle: the object stays in the worker
        block = allocator.call("allocate")              # an int; or raises OutOfBlocks, or StudentError
        process.finish()                                # the completion message; raises Misbehaviour

What may come back, and how a submission may misbehave, is in `contract.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import minipaged
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
    StudentError,
    Verdict,
)

MOST_OUTPUT = 1 << 20
"""Bytes that a worker may print; whoever prints more is stopped."""
WORKER = "minipaged.course.sandbox.worker"
KEPT_OUTPUT = 4000
"""Bytes of it that are shown."""


class WorkerProcess:
    """One worker, in a working directory of its own that is deleted with it."""

    def __init__(self, limits: Limits, modules: Sequence[str] = ()) -> None:
        self._limits = limits
        self._unread = b""
        self._hosted: list[Any] = []
        self._printed = bytearray()
        self._num_printed = 0
        self._deadline = time.monotonic() + limits.test_seconds
        self.folder = Path(tempfile.mkdtemp(prefix="minipaged-grade-"))
        ours, theirs = socket.socketpair()
        self._channel = ours
        root = str(Path(minipaged.__file__).parent.parent)
        command = f"import sys; sys.path.insert(0, sys.argv[2]); from {WORKER} import main; main()"
        try:
            self._process = subprocess.Popen(
                # -s: no site-packages of the user; -P: no working directory on the path; -B: no byte code is written.
                [sys.executable, "-s", "-P", "-B", "-c", command, str(theirs.fileno()), root],
                cwd=self.folder,
                env=_clean_environment(self.folder, limits.gpu),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        finally:
            theirs.close()
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()
        started = self._ask(
            {
                "do": "start",
                "limits": asdict(limits),
                "processes_allowed": limits.processes_allowed,
                "modules": list(modules),
            },
            within=60.0,  # of our own doing: imports
        )
        self.isolation: dict[str, str] = started["isolation"]
        self.modules = [Handle(self, number, "module") for number in started["modules"]]
        """What `modules` named: ours, loaded before any student code."""
        self._first_object = 0
        self._deadline = time.monotonic() + limits.test_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the worker and all of its process group; delete its working directory."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()
        self._reader.join(timeout=2)  # somebody who left the group may hold the other end
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
        """Put a copy of the file into the worker's working directory; its name there."""
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
        if len(self._unread):
            raise Misbehaviour(Verdict.FORGED_MESSAGE, "the submission wrote to the grader's channel")

    @property
    def output(self) -> str:
        """The beginning of what the worker printed."""
        return self._printed.decode(errors="replace")

    # --- The channel ------------------------------------------------------------------------------

    def _ask(self, message: dict[str, Any], within: float | None = None) -> Any:
        token = secrets.token_hex(8)
        until = min(time.monotonic() + (within or self._limits.call_seconds), self._deadline if not within else 1e18)
        self._send({**message, "token": token}, until)
        while True:
            answer = self._receive(until)
            if answer.get("token") != token:
                raise Misbehaviour(
                    Verdict.FORGED_MESSAGE, "the submission wrote to the grader's channel: a message without its token"
                )
            if "fault" in answer:
                raise Misbehaviour(Verdict.FORBIDDEN, f"the submission {answer['fault']}")
            if "raised" in answer:
                raise _error(answer["raised"])
            if "ask" not in answer:
                return answer["ok"]
            if time.monotonic() > until:  # each question may be quick, and the questions endless
                self._timed_out()
            self._send(self._carry_out(*answer["ask"]), until)

    def _carry_out(self, number: int, member: str, args: list[Any] | None) -> dict[str, Any]:
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

    def _send(self, message: dict[str, Any], until: float) -> None:
        try:
            self._channel.settimeout(max(0.01, until - time.monotonic()))
            self._channel.sendall(wire.line(message))
        except TimeoutError:
            self._timed_out()
        except OSError:
            self._lost()

    def _receive(self, until: float) -> dict[str, Any]:
        pieces, size = [self._unread], len(self._unread)
        while b"\n" not in pieces[-1]:
            try:
                self._channel.settimeout(max(0.01, until - time.monotonic()))
                received = self._channel.recv(1 << 20)
            except TimeoutError:
                self._timed_out()
            except OSError:
                received = b""
            if not received:
                self._lost()
            pieces.append(received)
            size += len(received)
            if size > wire.LARGEST_ANSWER:
                raise Misbehaviour(Verdict.FORGED_MESSAGE, "an answer of more than 256 MB")
        line, _, self._unread = b"".join(pieces).partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise Misbehaviour(Verdict.FORGED_MESSAGE, "the submission wrote to the grader's channel: no valid message")
        return answer

    def _timed_out(self) -> None:
        self._stop()
        whole = time.monotonic() >= self._deadline
        what, seconds = ("the test", self._limits.test_seconds) if whole else ("a call", self._limits.call_seconds)
        raise Misbehaviour(
            Verdict.TIMED_OUT, f"{what} did not end within {seconds:g} seconds: an endless loop, or far too slow"
        )

    def _lost(self) -> None:
        """The worker hung up: say why, as far as that can be known."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        status = self._process.poll()
        self._stop()
        if self._num_printed > MOST_OUTPUT:
            raise Misbehaviour(Verdict.FLOODED_OUTPUT, "it printed more than a megabyte and was stopped")
        if status == -signal.SIGXCPU:
            raise Misbehaviour(
                Verdict.TIMED_OUT, f"it used more than {self._limits.cpu_seconds} seconds of processor time"
            )
        if b"MemoryError" in self._printed or status == -signal.SIGKILL:
            raise Misbehaviour(Verdict.OUT_OF_MEMORY, f"it used more than {self._limits.memory_bytes >> 20} MB")
        how = f"by signal {-status}" if status is not None and status < 0 else f"with exit status {status}"
        raise Misbehaviour(
            Verdict.ENDED, f"its process ended {how} in the middle of a test; an exit status proves nothing here"
        )

    def _stop(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _drain(self) -> None:
        """Keep the beginning of what the worker prints; stop it when that is too much."""
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while piece := os.read(stream.fileno(), 1 << 16):
                self._num_printed += len(piece)
                self._printed += piece[: KEPT_OUTPUT - len(self._printed)]
                if self._num_printed > MOST_OUTPUT:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(self._process.pid, signal.SIGKILL)

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


def _clean_environment(folder: Path, gpu: bool) -> dict[str, str]:
    """Nothing of the grader's own environment but where programs are, and the GPU; the same hashes every time."""
    kept = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH")
    triton = {name: os.environ[name] for name in kept if name in os.environ} if gpu else {"TRITON_INTERPRET": "1"}
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **triton,
    }
