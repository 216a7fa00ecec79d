"""The grader's end of a worker process: start it, call into it, and never wait for it longer than agreed.

    with WorkerProcess(limits, modules=()) as process:
        part = process.load(Path("my_allocator.py"), "submission")
        allocator = part.call("BlockAllocator", 4)      # a handle: the object stays in the worker
        block = allocator.call("allocate")              # an int; or raises OutOfBlocks, or StudentError
        process.finish()                                # the completion message; raises Misbehaviour

What may come back, and how a submission may misbehave, is in `contract.py`. Whoever needs many workers begins with
`WorkerPool`: each is then a copy of a process that has imported the modules before.
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
    """One worker, in a working directory of its own that is deleted with it."""

    def __init__(self, limits: Limits, modules: Sequence[str] = (), *, origin: Origin | None = None) -> None:
        """`origin`: what it is to be a copy of, with the same modules; None: a program of its own."""
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
        """Kill the worker and all of its process group; delete its working directory."""
        self._stop()
        self._channel.close()
        self._reader.join(timeout=2)  # somebody who left the group may hold the other end
        super().close()

    def finish(self) -> None:
        super().finish()
        if len(self._unread):
            raise Misbehaviour(Verdict.FORGED_MESSAGE, "the submission wrote to the grader's channel")

    @property
    def output(self) -> str:
        """The beginning of what the worker printed."""
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
            if time.monotonic() > until:  # each question may be quick, and the questions endless
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
                raise Misbehaviour(Verdict.FORGED_MESSAGE, "an answer of more than 256 MB")
        line, _, self._unread = b"".join(pieces).partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise Misbehaviour(Verdict.FORGED_MESSAGE, "the submission wrote to the grader's channel: no valid message")
        return answer

    def _timed_out(self) -> NoReturn:
        self._stop()
        raise self._late()

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
        self._kill()
        self._process.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.returncode is None:  # its number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._process.pid, signal.SIGKILL)

    def _drain(self) -> None:
        """Keep the beginning of what the worker prints; stop it when that is too much."""
        with self._output as stream:
            while piece := os.read(stream.fileno(), 1 << 16):
                self._num_printed += len(piece)
                self._printed += piece[: KEPT_OUTPUT - len(self._printed)]
                if self._num_printed > MOST_OUTPUT:
                    self._kill()


# --- Where workers come from ----------------------------------------------------------------------


def _start_program(
    function: str, channel: socket.socket, folder: Path, environment: dict[str, str], output: int, *arguments: str
) -> subprocess.Popen[bytes]:
    """A process that runs this function of `worker.py`."""
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
    """Starts workers that are copies: for each list of modules one process imports them, and forks.

    On Linux alone: elsewhere libraries may not survive that, and each worker is a program of its own.
    """

    def __init__(self) -> None:
        self._origins: dict[tuple[tuple[str, ...], bool], Origin] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, limits: Limits, modules: Sequence[str]) -> WorkerProcess:
        """A worker. Its limits are its own."""
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
        """The workers must have been closed."""
        for origin in self._origins.values():
            origin.close()
        self._origins.clear()


ORIGIN_SECONDS = 300.0
"""How long the imports of a part's modules may take, on a busy machine."""


class Origin:
    """A process that has imported the modules, and of which workers are copies. It runs no student code."""

    def __init__(self, modules: tuple[str, ...], gpu: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="minipaged-origin-")
        # Each message comes as one, with the file descriptors that belong to it.
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = _clean_environment(Path(self._folder.name), gpu)
        self._process = _start_program(
            "fork_workers", theirs, Path(self._folder.name), environment, subprocess.DEVNULL, *modules
        )
        theirs.close()
        self._requests.settimeout(ORIGIN_SECONDS)
        self._lock = threading.Lock()

    def copy(self, folder: Path, environment: dict[str, str], channel: int, output: int) -> Copy:
        """Fork: a worker with this channel to the grader, which prints there. Raises Misbehaviour."""
        number = self.ask({"folder": str(folder), "environment": environment}, channel, output)
        if number is None:
            raise Misbehaviour(Verdict.ENDED, "its process ended before it had begun; is there memory left?")
        return Copy(self, number)

    def ask(self, request: dict[str, Any], *descriptors: int) -> int | None:
        """Its answer; None where it has none, or is not there any more."""
        with self._lock:
            try:
                socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)
                answer = self._requests.recv(1 << 16)
            except OSError:  # it does not answer, or was closed
                self._end()
                return None
            except BaseException:  # the answer must not be taken for the next one
                self._end()
                raise
        number: int | None = json.loads(answer) if answer else None
        return number

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End it; a copy that still runs ends with it."""
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        self._requests.close()
        self._process.kill()
        self._process.wait()


class Copy:
    """A worker that was forked, as `subprocess.Popen` would have it: its parent waits for it."""

    def __init__(self, origin: Origin, pid: int) -> None:
        self._origin, self.pid = origin, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._wait(block=False)

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits for its end and returns its exit status. Raises subprocess.TimeoutExpired."""
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
    """Nothing of the grader's own environment but where programs are, and the GPU; the same hashes every time."""
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
