"""The driver's side of the workers: it starts them, detects every end of one, and leaves none behind.

Each worker has one end of a socket pair. A worker that dies for any reason closes its end, which the driver's reading
thread notices immediately. A driver that dies closes its own end, and the workers then end themselves. Each worker
prints into its own file, and the error message of a failure contains the last lines. The files have no names (if the
system supports that), so that nothing is left of them, even if processes are killed.

The results of steps have a separate socket pair, whose other end all workers share. The thread that needs a result
reads from it directly. In a step without failures no thread therefore waits for another, and the listening threads
sleep. If a worker fails, the socket is closed, which wakes the reader.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from minipaged.errors import WorkerFailed
from minipaged.parallel.messages import (
    Answer,
    Doing,
    Message,
    NoRoom,
    RankFailed,
    RankRefused,
    Result,
    Where,
    answers,
    encode,
    results,
)
from minipaged.parallel.options import Options

LOG_LINES = 20
"""The number of lines, from the end of a failed worker's output, that the error message shows."""
TO_START_S = 30.0
"""Seconds within which Python starts, even on a busy machine."""
TO_ANSWER_S = 1.0
"""Seconds within which a worker reports its activity."""
TO_DIE_S = 0.3
"""Seconds to wait for the end of another worker, which may have caused a worker's failure."""
TO_END_S = 5.0
"""Seconds within which a worker must end after the driver has closed the connection; then it is killed."""


@dataclass(eq=False)
class Process:
    """One worker, as the driver sees it."""

    rank: int
    popen: subprocess.Popen[bytes]
    connection: socket.socket
    log: IO[bytes]

    def how_it_ended(self) -> str:
        status = self.popen.poll()
        if status is None:
            return "has closed its connection"
        if status >= 0:
            return f"has ended with status {status}"
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        return f"was killed by {name}" + (" (by hand, or for want of memory)" if name == "SIGKILL" else "")

    def last_lines(self) -> str:
        lines: list[str] = []
        with suppress(OSError, ValueError):  # the file may be closed already
            size = os.fstat(self.log.fileno()).st_size
            lines = os.pread(self.log.fileno(), size, 0).decode(errors="replace").splitlines()[-LOG_LINES:]
        return "".join(f"\n  | {line}" for line in lines) or " (none)"


@dataclass(eq=False)
class Heard:
    """The state that the driver shares with its listening threads: unread answers, and a failure if there is one."""

    answers: list[deque[Answer]]
    """The unread answers of each rank."""
    results: socket.socket
    """The driver's end of the connection for results. The thread that waits for a step's result reads from it."""
    doing: dict[int, Doing] = field(default_factory=dict)
    """The activities, by rank, that have been reported since the last `Where`."""
    failure: str | None = None
    """The message of the failure that has ended the workers. (An exception would keep its whole traceback alive.)"""
    ending: bool = False
    """Whether the driver is ending the workers."""
    on_failure: Callable[[WorkerFailed], None] | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)
    driver: int = field(default_factory=os.getpid)
    """The driver's process id."""
    listeners: list[threading.Thread] = field(default_factory=list)
    """The reading threads, one per worker, because a worker may stop in the middle of a message."""


class RankProcesses:
    """A model's ranks, each a process. `close`, the garbage collector or the interpreter's exit ends them."""

    def __init__(self, options: Sequence[Options], timeout: float) -> None:
        """Start a worker for each of the options. `timeout`: seconds that a step may take before the workers fail."""
        self.timeout = timeout
        self.num_served = 0
        """The number of runners that have used the workers."""
        self.serves: object = None
        """A token of the runner that uses the workers now. There is only one, because workers have one KV cache."""
        self.free_device_bytes: float = float("inf")
        """Bytes of free memory on the fullest GPU after loading the weights."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout))
        self._results = results(ours)
        self._heard = Heard([deque() for _ in options], ours)
        self._rendezvous = rendezvous_file()
        self._processes: list[Process] = []
        self._end = weakref.finalize(self, _end, self._processes, self._heard, self._rendezvous)
        try:
            with theirs:
                for each in options:
                    self._processes.append(_start(each, self._rendezvous, theirs, timeout))
        except BaseException:
            self._end()
            raise
        for process in self._processes:
            arguments = (process, self._processes, self._heard)
            listener = threading.Thread(target=_listen, args=arguments, name=f"worker {process.rank}", daemon=True)
            self._heard.listeners.append(listener)
            listener.start()

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def pids(self) -> list[int]:
        """The process ids by rank."""
        return [process.popen.pid for process in self._processes]

    def on_failure(self, call: Callable[[WorkerFailed], None]) -> None:
        """Call `call` once a worker fails, or now if one has failed. The call may come from any thread."""
        with self._heard.changed:
            self._heard.on_failure = call
        if self._heard.failure:
            call(WorkerFailed(self._heard.failure))

    def tell(self, message: Message) -> None:
        """Send a message to all workers. Raises WorkerFailed if one has failed."""
        data, heard = encode(message), self._heard
        if heard.failure:
            raise WorkerFailed(heard.failure)
        for process in self._processes:
            try:
                process.connection.sendall(data)
            except OSError:  # it has ended, which its listener is about to note; or it hangs, and the buffer is full
                with heard.changed:
                    heard.changed.wait_for(lambda: heard.failure, TO_ANSWER_S)
                if not heard.failure:
                    _fail(self._processes, heard, process, "hangs: it takes no more messages")
            except BaseException:  # Ctrl-C: only some have the message, and they would wait for the others
                _fail(self._processes, heard, process, "was interrupted while it was sent a message")
                raise
        if heard.failure:
            raise WorkerFailed(heard.failure)

    def answer(self, rank: int, *, patient: bool = False) -> Answer:
        """The next answer of a rank. Raises WorkerFailed if any worker fails or the timeout passes.

        `patient`: wait beyond the timeout for as long as all workers report their activity.
        """
        heard, seconds = self._heard, max(self.timeout, TO_START_S) if patient else self.timeout
        while True:
            with heard.changed:
                heard.changed.wait_for(lambda: heard.answers[rank] or heard.failure, seconds)
                if heard.failure:
                    raise WorkerFailed(heard.failure)
                if heard.answers[rank]:
                    return heard.answers[rank].popleft()
            self._look_after_them(patient)

    def result(self, *, patient: bool = False) -> Result:
        """The next result of a step. Raises WorkerFailed like `answer`."""
        heard = self._heard
        while not heard.failure:
            try:
                if told := self._results.read():
                    return told
            except BlockingIOError:
                self._look_after_them(patient)
            else:  # all workers have ended, which their listeners are about to note
                with heard.changed:
                    heard.changed.wait_for(lambda: heard.failure, TO_ANSWER_S)
        raise WorkerFailed(heard.failure)

    def close(self) -> None:
        """End all workers, and wait until they have ended."""
        self._end()

    def _look_after_them(self, patient: bool) -> None:
        """After a timeout, find the worker that is stuck and fail with its name.

        Returns only if `patient` is set and all workers report their activity.
        """
        heard = self._heard
        heard.doing = {}
        self.tell(Where())
        seconds = TO_START_S if patient else TO_ANSWER_S  # an import or a compilation may block all threads
        with heard.changed:
            heard.changed.wait_for(lambda: len(heard.doing) == len(self._processes) or heard.failure, seconds)
        silent = [process for process in self._processes if process.rank not in heard.doing]
        if patient and not silent:
            return
        late = [process for process in self._processes if process not in silent and not heard.doing[process.rank].waits]
        stuck = (silent or late or self._processes)[0]
        stuck.popen.send_signal(signal.SIGUSR1)  # it prints its stack traces
        time.sleep(TO_DIE_S)
        what = "it does not answer at all" if silent else heard.doing[stuck.rank].what
        _fail(self._processes, heard, stuck, f"hangs: {what} (worker_timeout is {self.timeout:g} s)")


def rendezvous_file() -> IO[bytes]:
    """Open the file through which the ranks find each other. It has no name if the system supports that."""
    if Path("/proc/self/fd").is_dir():
        return tempfile.TemporaryFile()  # stays open until the workers have ended
    return tempfile.NamedTemporaryFile(prefix="minipaged-workers-")


def _start(options: Options, rendezvous: IO[bytes], results: socket.socket, timeout: float) -> Process:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout))
    log = tempfile.TemporaryFile()  # noqa: SIM115  # stays open until the worker has ended
    ends = {"socket": theirs.fileno(), "results": results.fileno()}
    passed, where = list(ends.values()), rendezvous.name
    if isinstance(where, int):  # it has no name
        passed, where = [*passed, rendezvous.fileno()], f"/proc/self/fd/{rendezvous.fileno()}"
    given = msgspec.structs.replace(options, rendezvous=where, **ends)
    command = [sys.executable, "-m", "minipaged.parallel.worker", msgspec.json.encode(given).decode()]
    with theirs:
        popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=passed)
    return Process(options.rank, popen, ours, log)


def _timeval(seconds: float) -> bytes:
    """The time as a socket option. It is rounded up, because 0 would mean no timeout."""
    return struct.pack("ll", *divmod(math.ceil(seconds * 1e6), 1_000_000))


def _listen(process: Process, processes: list[Process], heard: Heard) -> None:
    """Read one worker's answers until it closes the connection."""
    told = answers(process.connection)
    while answer := told.read():
        if isinstance(answer, RankFailed):
            _fail(processes, heard, process, f"has failed: {answer.error}")
            continue
        with heard.changed:
            if isinstance(answer, Doing):
                heard.doing[process.rank] = answer
            elif isinstance(
                answer, NoRoom | RankRefused
            ):  # it answers for all ranks, because the others wait for this one
                for those in heard.answers:
                    those.append(answer)
            else:
                heard.answers[process.rank].append(answer)
            heard.changed.notify_all()
    if not heard.failure and not heard.ending:
        _fail(processes, heard, process)


def _fail(processes: list[Process], heard: Heard, process: Process, what: str = "") -> None:
    """Record which worker has failed and why, and end all workers, because the others are useless without it.

    `what`: the reason. Empty: the worker has ended, and its exit status gives the reason.
    """
    ended = _wait_for_end(processes if what else [process])
    if ended or not what:
        process = ended or process
        what = process.how_it_ended()
    failure = (
        f"worker {process.rank} of {len(processes)} (process {process.popen.pid}) {what}. All workers were ended, and "
        f"what they had computed is lost; the model has to be loaded again. Its last lines:{process.last_lines()}"
    )
    for each in processes:
        each.popen.kill()
    with heard.changed:
        if heard.failure or heard.ending:
            return
        heard.failure, call = failure, heard.on_failure
        heard.changed.notify_all()
        _wake(heard.results)
    if call:
        call(WorkerFailed(failure))
    for each in processes:
        with suppress(subprocess.TimeoutExpired):
            each.popen.wait(TO_ANSWER_S)


def _wake(results: socket.socket) -> None:
    """Wake the thread that reads results, by shutting the socket down."""
    with suppress(OSError):  # it is closed already
        results.shutdown(socket.SHUT_RDWR)


def _wait_for_end(processes: list[Process]) -> Process | None:
    """The first process that ends within TO_DIE_S, or None. (A worker may fail because another one has died.)"""
    deadline = time.monotonic() + TO_DIE_S
    while time.monotonic() < deadline:
        for process in processes:
            if process.popen.poll() is not None:
                return process
        time.sleep(0.01)
    return None


def _end(processes: list[Process], heard: Heard, rendezvous: IO[bytes]) -> None:
    """Close the connections to the workers, which ends them; kill those that are still alive after TO_END_S."""
    if os.getpid() != heard.driver:  # this process was forked from the driver
        return
    with heard.changed:
        heard.ending = True
        heard.failure = heard.failure or "the workers of this model were closed; load it again"
        heard.changed.notify_all()
        _wake(heard.results)
    for process in processes:
        with suppress(OSError):  # it has already ended
            process.connection.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + TO_END_S
    for process in processes:
        try:
            process.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.popen.wait()
    for listener in heard.listeners:
        if listener is not threading.current_thread():  # the garbage collector may run in any thread
            listener.join(TO_END_S)
    for process in processes:
        process.connection.close()
        process.log.close()
    heard.results.close()
    with suppress(OSError):  # a worker has removed it
        rendezvous.close()
