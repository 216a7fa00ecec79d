"""The worker: a process of its own in which a student's code runs. It answers calls (`answering.py`), and decides
nothing.

A worker is either a program (`main`), or a copy that another process makes of itself (`fork_workers`). That process
imports what the parts of an assignment need, once, and never runs student code. A copy starts in a hundredth of a
second, whatever was imported.

Before the student's file is loaded, the worker limits itself (memory, CPU time, files, processes), leaves the network
behind where Linux lets it, and sets a hook that notes what a part has no business doing: reading files other than
Python's own and its own, writing outside its working directory, starting processes, using the network.

This keeps mistakes and simple tricks out of the grades. **It is no sandbox**: whoever is determined to break out of a
Python process will. For submissions that nobody trusts, run the whole grader in a container or a virtual machine.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from minipaged import contracts
from minipaged.course.sandbox.answering import PRIVATE, ObjectHost

OPEN_TO_ALL = (
    "course/__init__.py",
    *(f"course/sandbox/{name}.py" for name in ("__init__", "answering", "worker", "wire")),
)

PROCESS_EVENTS = {
    **dict.fromkeys(
        (
            "subprocess.Popen",
            "os.system",
            "os.fork",
            "os.forkpty",
            "os.exec",
            "os.posix_spawn",
            "os.spawn",
            "pty.spawn",
        ),
        "started another process",
    ),
    **dict.fromkeys(("os.kill", "os.killpg"), "sent a signal to a process"),
    **dict.fromkeys(("ctypes.dlopen", "ctypes.dlsym"), "called functions of C"),
}
"""Let pass where processes may be started: a compiler's, and libraries made by it."""
FORBIDDEN_EVENTS = {
    **dict.fromkeys(
        ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"),
        "used the network",
    ),
    **dict.fromkeys(("resource.setrlimit", "resource.prlimit"), "changed the limits of its process"),
}
PATH_EVENTS = {
    **dict.fromkeys(("open", "os.listdir", "os.scandir"), "read"),
    **dict.fromkeys(
        (
            "os.remove",
            "os.rename",
            "os.rmdir",
            "os.mkdir",
            "os.link",
            "os.symlink",
            "os.truncate",
            "os.chmod",
            "os.chown",
        ),
        "change",
    ),
}
READABLE = (
    "/usr",
    "/lib",
    "/lib64",
    "/sys",
    "/etc/localtime",
    "/etc/os-release",
    "/dev/null",
    "/dev/zero",
    "/dev/random",
    "/dev/urandom",
)
READABLE_PROC = ("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/self/stat", "/proc/self/status")


class ChannelWorker(ObjectHost):
    """Answers on one channel to the grader."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__()
        self._channel = channel
        self._unread = b""

    def serve(self) -> None:
        """Answer until the grader hangs up."""
        while request := self._read():
            self._answer(request)

    def _read(self) -> dict[str, Any] | None:
        while b"\n" not in self._unread:
            received = self._channel.recv(1 << 20)
            if not received:
                return None
            self._unread += received
        first, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = self._loads(first)
        return message

    def _send(self, message: dict[str, Any]) -> None:
        self._channel.sendall(self._line(message))

    def _do_start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Limit this process. What the parts of the assignment need is imported first, while everything may be read."""
        self._begin(request["modules"])
        isolation = limit(request["limits"])
        # Tracebacks show their lines, and Hypothesis looks through all that is loaded: the packages they are in, too.
        names = {name.rsplit(".", n)[0] for name in request["modules"] for n in range(name.count(".") + 1)}
        ours = [os.path.realpath(str(sys.modules[name].__file__)) for name in names]
        sys.addaudithook(make_hook(self._faults.append, request["processes_allowed"], ours))
        return {"ok": {"isolation": isolation, "modules": list(self._objects)}}


# --- Limits ---------------------------------------------------------------------------------------


def limit(limits: dict[str, int]) -> dict[str, str]:
    """Limit this process, for good; returns what could and what could not be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    isolation = {"network": "open: only Linux can close it"}
    if sys.platform == "linux":
        new_user, new_net, die_with_parent = 0x10000000, 0x40000000, 1
        libc.prctl(die_with_parent, signal.SIGKILL, 0, 0, 0)
        closed = libc.unshare(new_user | new_net) == 0 or libc.unshare(new_net) == 0
        reason = os.strerror(ctypes.get_errno())
        isolation["network"] = "closed" if closed else f"open: this system gives no network namespace ({reason})"
    wanted = {
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_AS: mapped_bytes() + limits["memory_bytes"],
    }
    if limits["processes"] is not None:
        wanted[resource.RLIMIT_NPROC] = limits["processes"]
    for kind, value in wanted.items():
        try:
            resource.setrlimit(kind, (value, value))
        except (OSError, ValueError) as error:  # macOS knows no limit of address space
            isolation[f"limit {kind}"] = f"not set: {error}"
    return isolation


def mapped_bytes() -> int:
    """Address space that is taken already: of torch's libraries alone, close to a gigabyte."""
    try:
        with open("/proc/self/statm") as pages:
            return int(pages.read().split()[0]) * resource.getpagesize()
    except OSError:  # Linux alone tells
        return 0


def make_hook(
    note: Callable[[str], None], processes_allowed: bool, ours: Sequence[str]
) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that refuses, and notes, what a part has no business doing. Nothing can take it away again."""
    realpath, fspath, here = os.path.realpath, os.fsdecode, os.path.realpath(os.getcwd())
    package = os.path.dirname(os.path.realpath(contracts.__file__))
    root = os.path.dirname(package)
    private = tuple(os.path.join(package, name) + os.sep for name in PRIVATE)
    allowed_files = {os.path.join(package, name) for name in OPEN_TO_ALL} | set(ours)
    own = here + os.sep
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.__file__), package, *READABLE}
    python |= {entry for entry in sys.path if entry.endswith("-packages")}
    readable = tuple(realpath(folder) + os.sep for folder in python) + tuple(READABLE)
    forbidden = FORBIDDEN_EVENTS if processes_allowed else FORBIDDEN_EVENTS | PROCESS_EVENTS
    change_flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    is_folder = os.path.isdir
    refused, path_types = PermissionError, (str, bytes, os.PathLike)

    def refuse(what: str) -> None:
        note(what)
        raise refused(f"the grader does not allow this: the submission {what}")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in forbidden:
            refuse(forbidden[event])
        if event == "os.chdir" and not (isinstance(args[0], path_types) and realpath(fspath(args[0])) == here):
            refuse("left its working directory")  # to change to where it is already is what pytest does
        if event not in PATH_EVENTS:
            return
        changes = PATH_EVENTS[event] == "change"
        if event == "open" and len(args) > 2 and isinstance(args[2], int) and args[2] & change_flags:
            changes = True
        for value in args[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]:
            if not isinstance(value, path_types):
                continue
            path = realpath(fspath(value))
            if fspath(value) in READABLE_PROC and not changes:  # /proc/self is another path for each process
                continue
            if path == here or path.startswith(own) or path == "/dev/null":
                continue
            if changes:
                refuse(f"wrote to {path}, outside its working directory")
            if event == "open" and is_folder(path):  # what is opened relative to it, this hook would not know
                refuse(f"opened the folder {path}, outside its working directory")
            if path in allowed_files or path in (package, root):  # where imports look
                continue
            if path.startswith(private):
                refuse(f"read {path}, which belongs to the grader or holds the answer")
            if not (f"{path}/".startswith(readable)):
                refuse(f"read {path}, outside its working directory")

    return hook


# --- The two ways to start ------------------------------------------------------------------------


def main() -> None:
    """A worker's whole life. The channel is the file descriptor that the grader names."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    worker = ChannelWorker(channel)
    # However student code ends: no exit handlers of its own, no waiting for its threads.
    try:
        worker.serve()
    finally:
        os._exit(0)


def fork_workers() -> None:
    """The whole life of a process that workers are copies of. The grader asks it for one by `{"folder", "environment"}`
    (with the ends of the worker's channel and of its output), and how one ended by `{"wait", "block"}`."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[3:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a copy that collected garbage would have to write to each object
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 16, 2)
        if not message:
            os._exit(0)
        request = json.loads(message)
        answer: int | None
        if "wait" in request:
            ended, status = os.waitpid(request["wait"], 0 if request["block"] else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            answer = _fork(requests, request["folder"], request["environment"], *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            if answer is not None:
                continue  # the copy has answered
        requests.send(json.dumps(answer).encode())


def _fork(requests: socket.socket, folder: str, environment: dict[str, str], channel: int, output: int) -> int | None:
    """Make a copy, which answers the grader with its number and goes on as a worker. None where the system has no room
    for one."""
    try:
        pid = os.fork()
    except OSError:
        return None
    if pid == 0:
        os.setsid()  # it is killed with all that it starts, and cannot leave
        requests.send(json.dumps(os.getpid()).encode())
        requests.close()
        become_worker(folder, environment, channel, output)
    return pid


def become_worker(folder: str, environment: dict[str, str], channel: int, output: int) -> None:
    """This copy gets what a program of its own is started with, and goes on as one."""
    os.chdir(folder)
    os.environ.update(environment)
    tempfile.tempdir = None  # it may have been looked up already
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.argv[1] = str(channel)
    main()
