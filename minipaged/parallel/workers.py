"""The driver's hold on its workers: it starts them, hears of whatever ends one, and leaves none behind.

Each worker has one end of a socket pair. A worker that dies closes its end, whatever it died of, and the thread that
reads from it hears of it at once; a driver that dies closes its own, and the workers go by themselves. What the workers
print goes into a file each, of which the last lines are told when one fails. Files have no names (where the system can
do that): so nothing is left of them, whoever is killed.

What has come of steps has a socket pair for itself, at whose other end are all workers. It is read by whoever wants to
know: so in a step that goes well no thread waits for another, and those that listen sleep. Where a worker fails, the
reader is woken by closing it.
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
"""Of what a worker has printed, told when it fails."""
TO_START_S = 30.0
"""Python itself has started within this time, also on a busy machine."""
TO_ANSWER_S = 1.0
"""A worker says what it is doing within this time, whatever that is."""
TO_DIE_S = 0.3
"""Where a worker fails because another one has died, that one's end is heard of within this time."""
TO_END_S = 5.0
"""A worker whose driver has gone ends within this time, or is killed."""


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
        with suppress(OSError, ValueError):  # they are being closed
            size = os.fstat(self.log.fileno()).st_size
            lines = os.pread(self.log.fileno(), size, 0).decode(errors="replace").splitlines()[-LOG_LINES:]
        return "".join(f"\n  | {line}" for line in lines) or " (none)"


@dataclass(eq=False)
class Heard:
    """What the workers have said and nobody has asked for yet."""

    answers: list[deque[Answer]]
    """Of each rank."""
    results: socket.socket
    """From which whoever waits for a step's result reads it himself."""
    doing: dict[int, Doing] = field(default_factory=dict)
    """By rank, what they have said that they do, since they were last asked."""
    failure: str | None = None
    """What has ended them. (An exception would keep all that it has passed through.)"""
    ending: bool = False
    """They were told to go."""
    on_failure: Callable[[WorkerFailed], None] | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)
    driver: int = field(default_factory=os.getpid)
    listeners: list[threading.Thread] = field(default_factory=list)
    """One for each worker, which may stop in the middle of what it tells."""


class RankProcesses:
    """A model's ranks, a process each. `close` ends them; so do the garbage collector and the interpreter's end."""

    def __init__(self, options: Sequence[Options], timeout: float) -> None:
        """Start a worker with each of these. `timeout`: how many seconds a step may take, before they are given up."""
        self.timeout = timeout
        self.num_served = 0
        self.serves: object = None
        """Whose steps they run. They have one KV cache, so it is one at a time."""
        self.free_device_bytes: float = float("inf")
        """Of the GPU that has the least, after loading the weights."""
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
        """Their processes, by rank."""
        return [process.popen.pid for process in self._processes]

    def on_failure(self, call: Callable[[WorkerFailed], None]) -> None:
        """Call this when one of them fails, or has, on any thread; also if nobody waits for an answer just then."""
        with self._heard.changed:
            self._heard.on_failure = call
        if self._heard.failure:
            call(WorkerFailed(self._heard.failure))

    def tell(self, message: Message) -> None:
        """The same bytes to each of them. Raises WorkerFailed if one has failed."""
        data, heard = encode(message), self._heard
        if heard.failure:
            raise WorkerFailed(heard.failure)
        for process in self._processes:
            try:
                process.connection.sendall(data)
            except OSError:  # it has gone, which is heard in a moment; or it hangs, and there is no more room
                with heard.changed:
                    heard.changed.wait_for(lambda: heard.failure, TO_ANSWER_S)
                if not heard.failure:
                    _fail(self._processes, heard, process, "hangs: it takes no more messages")
            except BaseException:  # Ctrl-C: some have been told and others not, and would wait for each other
                _fail(self._processes, heard, process, "was interrupted while it was told what to do")
                raise
        if heard.failure:
            raise WorkerFailed(heard.failure)

    def answer(self, rank: int, *, patient: bool = False) -> Answer:
        """The next answer of this rank. Raises WorkerFailed if any of them fails, or if it takes longer than the
        timeout. `patient`: it may take as long as it takes, as long as all of them say what they are doing."""
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
        """What is told next of steps. Raises WorkerFailed as `answer` does."""
        heard = self._heard
        while not heard.failure:
            try:
                if told := self._results.read():
                    return told
            except BlockingIOError:
                self._look_after_them(patient)
            else:  # all have gone, which each one's listener is about to tell
                with heard.changed:
                    heard.changed.wait_for(lambda: heard.failure, TO_ANSWER_S)
        raise WorkerFailed(heard.failure)

    def close(self) -> None:
        """End them all, and wait until they have."""
        self._end()

    def _look_after_them(self, patient: bool) -> None:
        """After a long silence: who is stuck? Fails unless all of them work, and we are patient."""
        heard = self._heard
        heard.doing = {}
        self.tell(Where())
        seconds = TO_START_S if patient else TO_ANSWER_S  # what is imported or compiled may keep all threads waiting
        with heard.changed:
            heard.changed.wait_for(lambda: len(heard.doing) == len(self._processes) or heard.failure, seconds)
        silent = [process for process in self._processes if process.rank not in heard.doing]
        if patient and not silent:
            return
        late = [process for process in self._processes if process not in silent and not heard.doing[process.rank].waits]
        stuck = (silent or late or self._processes)[0]
        stuck.popen.send_signal(signal.SIGUSR1)  # it writes down where it is
        time.sleep(TO_DIE_S)
        what = "it does not answer at all" if silent else heard.doing[stuck.rank].what
        _fail(self._processes, heard, stuck, f"hangs: {what} (worker_timeout is {self.timeout:g} s)")


def rendezvous_file() -> IO[bytes]:
    """By which the ranks find each other."""
    if Path("/proc/self/fd").is_dir():
        return tempfile.TemporaryFile()  # open as long as the workers
    return tempfile.NamedTemporaryFile(prefix="minipaged-workers-")


def _start(options: Options, rendezvous: IO[bytes], results: socket.socket, timeout: float) -> Process:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout))
    log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the worker
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
    """As socket options have it; rounded up, for 0 would be for ever."""
    return struct.pack("ll", *divmod(math.ceil(seconds * 1e6), 1_000_000))


def _listen(process: Process, processes: list[Process], heard: Heard) -> None:
    """Take in what one worker tells, until it has gone."""
    told = answers(process.connection)
    while answer := told.read():
        if isinstance(answer, RankFailed):
            _fail(processes, heard, process, f"has failed: {answer.error}")
            continue
        with heard.changed:
            if isinstance(answer, Doing):
                heard.doing[process.rank] = answer
            elif isinstance(answer, NoRoom | RankRefused):  # it is everybody's, for the others wait for this one
                for those in heard.answers:
                    those.append(answer)
            else:
                heard.answers[process.rank].append(answer)
            heard.changed.notify_all()
    if not heard.failure and not heard.ending:
        _fail(processes, heard, process)


def _fail(processes: list[Process], heard: Heard, process: Process, what: str = "") -> None:
    """Say which worker has failed, and why; and end them all, for without one the others are of no use."""
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
    """Have whoever reads from it see that it is over."""
    with suppress(OSError):  # it is closed already
        results.shutdown(socket.SHUT_RDWR)


def _wait_for_end(processes: list[Process]) -> Process | None:
    """The first of these to have ended. (One that fails may do so because another has died.)"""
    deadline = time.monotonic() + TO_DIE_S
    while time.monotonic() < deadline:
        for process in processes:
            if process.popen.poll() is not None:
                return process
        time.sleep(0.01)
    return None


def _end(processes: list[Process], heard: Heard, rendezvous: IO[bytes]) -> None:
    """Let the workers go, and see that they do."""
    if os.getpid() != heard.driver:  # a process that was forked from it
        return
    with heard.changed:
        heard.ending = True
        heard.failure = heard.failure or "the workers of this model were closed; load it again"
        heard.changed.notify_all()
        _wake(heard.results)
    for process in processes:
        with suppress(OSError):  # it has gone by itself
            process.connection.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + TO_END_S
    for process in processes:
        try:
            process.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.popen.wait()
    for listener in heard.listeners:
        if listener is not threading.current_thread():  # the garbage collector may have run in any
            listener.join(TO_END_S)
    for process in processes:
        process.connection.close()
        process.log.close()
    heard.results.close()
    with suppress(OSError):  # a worker has removed it
        rendezvous.close()
