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
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import minipaged
from minipaged.course.sandbox import wire
from minipaged.course.sandbox.contract import KEPT_OUTPUT, MOST_OUTPUT, Limits, Misbehaviour, Sandbox, Verdict

WORKER = "minipaged.course.sandbox.worker"


class WorkerProcess(Sandbox):
    """One worker, in a working directory of its own that is deleted with it."""

    def __init__(self, limits: Limits, modules: Sequence[str] = ()) -> None:
        super().__init__(limits)
        self._unread = b""
        self._printed = bytearray()
        self._num_printed = 0
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

    def _drain(self) -> None:
        """Keep the beginning of what the worker prints; stop it when that is too much."""
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while piece := os.read(stream.fileno(), 1 << 16):
                self._num_printed += len(piece)
                self._printed += piece[: KEPT_OUTPUT - len(self._printed)]
                if self._num_printed > MOST_OUTPUT:
                    self._kill()


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
