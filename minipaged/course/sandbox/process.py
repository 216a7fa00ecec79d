"""The grader's end of a worker process: starts it, makes calls in it, and never waits longer than the time limit.

    with WorkerProcess(limits, modules=()) as process:
        part = process.load(Path("my_allocator.py"), "submission")
        allocator = part.call("BlockAllocator", 4)      # a handle: the object stays in the worker
        block = allocator.call("allocate")              # an int; or raises OutOfBlocks, or StudentError
        process.finish()                                # the completion message; raises Misbehaviour

`contract.py` describes the outcomes and the ways in which a submission can misbehave. `WorkerPool` starts many workers
fast: each is a fork of a process that has already imported the modules.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, Self

import minipaged
from minipaged.course.sandbox import wire
from minipaged.course.sandbox.contract import KEPT_OUTPUT, MOST_OUTPUT, Limits, Misbehaviour, Sandbox, Verdict

WORKER = "minipaged.course.sandbox.worker"


class WorkerProcess(Sandbox):
    """One worker process. Its working directory is its own, and is deleted when it is closed."""

    def __init__(self, limits: Limits, modules: Sequence[str] = (), *, origin: Origin | None = None) -> None:
        """Start the worker as a fork of `origin`, which has the same modules; without one, as a new program."""
        super().__init__(limits)
        self._unread = b""
        self._printed = bytearray()
        self._num_printed = 0
        self._channel, theirs = socket.socketpair()
        output, printed = os.pipe()
        self._output = os.fdopen(output, "rb", buffering=0)
        environment = _clean_environment(self.folder, limits.gpu)
        self._process: subprocess.Popen[bytes] | Copy
        try:
            if origin is not None:
                self._process = origin.copy(self.folder, environment, theirs.fileno(), printed)
            else:
                self._process = _start_program("main", theirs, self.folder, environment, printed)
        except BaseException:
            self._output.close()
            self._channel.close()
            super().close()
            raise
        finally:
            theirs.close()
            os.close(printed)
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()
        given = {"limits": asdict(limits), "processes_allowed": limits.processes_allowed, "modules": list(modules)}
        try:
            self._start(given)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the worker and its process group, and delete its working directory."""
        self._stop()
        self._channel.close()
        self._reader.join(timeout=2)  # a process that left the group may hold the other end
        super().close()

    def finish(self) -> None:
        super().finish()
        if len(self._unread):
            raise Misbehaviour(Verdict.FORGED_MESSAGE, "the submission wrote to the grader's channel")

    @property
    def output(self) -> str:
        """The beginning of the worker's printed output."""
        return self._printed.decode(errors="replace")

    # --- The channel ------------------------------------------------------------------------------

    def _ask(self, message: dict[str, Any], within: float | None = None) -> Any:
        token = secrets.token_hex(8)
        until = self._end(within)
        self._send({**message, "token": token}, until)
        while True:
            answer = self._receive(until)
            if answer.get("token") != token:
                raise Misbehaviour(
                    Verdict.FORGED_MESSAGE, "the submission wrote to the grader's channel: a message without its token"
                )
            if "ask" not in answer:
                return self._told(answer)
            if time.monotonic() > until:  # each question is quick, but there may be no end of them
                self._timed_out()
            self._send(self.carry_out(*answer["ask"]), until)

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
                raise Misbehaviour(Verdict.FORGED_MESSAGE, "an answer has more than 256 MB")
        line, _, self._unread = b"".join(pieces).partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise Misbehaviour(Verdict.FORGED_MESSAGE, "the submission wrote to the grader's channel: invalid message")
        return answer

    def _timed_out(self) -> NoReturn:
        self._stop()
        raise self._late()

    def _lost(self) -> None:
        """Raise Misbehaviour because the worker closed the channel, with the reason as far as it is known."""
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
            Verdict.ENDED, f"its process ended {how} in the middle of a test; a test does not pass by an exit status"
        )

    def _stop(self) -> None:
        self._kill()
        self._process.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.returncode is None:  # its process number is not reused yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._process.pid, signal.SIGKILL)

    def _drain(self) -> None:
        """Keep the beginning of the worker's output, and kill the worker if it prints too much."""
        with self._output as stream:
            while piece := os.read(stream.fileno(), 1 << 16):
                self._num_printed += len(piece)
                self._printed += piece[: KEPT_OUTPUT - len(self._printed)]
                if self._num_printed > MOST_OUTPUT:
                    self._kill()


# --- Starting workers -----------------------------------------------------------------------------


def _start_program(
    function: str, channel: socket.socket, folder: Path, environment: dict[str, str], output: int, *arguments: str
) -> subprocess.Popen[bytes]:
    """Start a process that runs this function of `worker.py`."""
    root = str(Path(minipaged.__file__).parent.parent)
    command = f"import sys; sys.path.insert(0, sys.argv[2]); from {WORKER} import {function}; {function}()"
    return subprocess.Popen(
        # -s: no site-packages of the user; -P: no working directory on the path; -B: no byte code is written.
        [sys.executable, "-s", "-P", "-B", "-c", command, str(channel.fileno()), root, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=[channel.fileno()],
        start_new_session=True,
    )


class WorkerPool:
    """Starts workers by forking: for each list of modules, one process imports them and forks the workers.

    This works on Linux only. On other systems libraries may not survive a fork, and each worker is a new program.
    """

    def __init__(self) -> None:
        self._origins: dict[tuple[tuple[str, ...], bool], Origin] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, limits: Limits, modules: Sequence[str]) -> WorkerProcess:
        """Start a worker with these limits."""
        if sys.platform != "linux":
            return WorkerProcess(limits, modules)
        kind = (tuple(modules), limits.gpu)
        with self._lock:
            origin = self._origins.get(kind)
            if origin is not None and origin.has_ended():
                origin.close()
                origin = None
            if origin is None:
                origin = self._origins[kind] = Origin(*kind)
        return WorkerProcess(limits, modules, origin=origin)

    def close(self) -> None:
        """End the processes that fork workers. The workers must have been closed."""
        for origin in self._origins.values():
            origin.close()
        self._origins.clear()


ORIGIN_SECONDS = 300.0
"""The time limit for importing a part's modules, enough for a busy machine."""


class Origin:
    """A process that has imported the modules, and forks workers. It never runs student code."""

    def __init__(self, modules: tuple[str, ...], gpu: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="minipaged-origin-")
        # SOCK_SEQPACKET keeps each message whole, with its file descriptors.
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = _clean_environment(Path(self._folder.name), gpu)
        self._process = _start_program(
            "fork_workers", theirs, Path(self._folder.name), environment, subprocess.DEVNULL, *modules
        )
        theirs.close()
        self._requests.settimeout(ORIGIN_SECONDS)
        self._lock = threading.Lock()

    def copy(self, folder: Path, environment: dict[str, str], channel: int, output: int) -> Copy:
        """Fork a worker with this channel to the grader and this file for its output. Raises Misbehaviour."""
        number = self.ask({"folder": str(folder), "environment": environment}, channel, output)
        if number is None:
            raise Misbehaviour(Verdict.ENDED, "its process could not be started; is there memory left?")
        return Copy(self, number)

    def ask(self, request: dict[str, Any], *descriptors: int) -> int | None:
        """Send a request and return the answer; None if there is none or the process has ended."""
        with self._lock:
            try:
                socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)
                answer = self._requests.recv(1 << 16)
            except OSError:  # it does not answer, or was closed
                self._end()
                return None
            except BaseException:  # the answer must not be mistaken for a later one
                self._end()
                raise
        number: int | None = json.loads(answer) if answer else None
        return number

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process, and the workers that it forked."""
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        self._requests.close()
        self._process.kill()
        self._process.wait()


class Copy:
    """A forked worker with the interface of `subprocess.Popen`. Its parent, the origin, waits for it."""

    def __init__(self, origin: Origin, pid: int) -> None:
        self._origin, self.pid = origin, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        return self._wait(block=False)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end and return the exit status. Raises subprocess.TimeoutExpired."""
        if timeout is None:
            return self._wait(block=True)
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            time.sleep(0.01)
        return self.returncode

    def _wait(self, *, block: bool) -> int | None:
        if self.returncode is None:
            self.returncode = self._origin.ask({"wait": self.pid, "block": block})
        return self.returncode


def _clean_environment(folder: Path, gpu: bool) -> dict[str, str]:
    """Return a worker's environment: from the grader's, only PATH and the GPU's variables; and a fixed hash seed."""
    kept = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH")
    triton = {name: os.environ[name] for name in kept if name in os.environ} if gpu else {"TRITON_INTERPRET": "1"}
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / ".hypothesis"),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **triton,
    }
