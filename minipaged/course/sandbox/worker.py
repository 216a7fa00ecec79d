"""The worker: the process in which a student's code runs. It only answers the grader's calls (`answering.py`).

A worker is either a new program (`main`), or a fork of another process (`fork_workers`). That process imports the
assignment's modules once, and never runs student code. A fork starts in a hundredth of a second, whatever was imported.

Before it loads the student's file, the worker limits itself (memory, CPU time, files, processes), gives up the network
if Linux allows that, and sets an audit hook that refuses and notes forbidden actions: reading files other than Python's
and its own, writing outside its working directory, starting processes, using the network.

This keeps mistakes and simple tricks out of the grades. **It is not a secure sandbox**: a determined attacker can break
out of a Python process. For submissions that you do not trust, run the whole grader in a container or virtual machine.
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
"""Audit events that are allowed if processes may be started: a compiler's, and those of the libraries it makes."""
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
    """The student's end of a `WorkerProcess`, which answers over a socket."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__()
        self._channel = channel
        self._unread = b""

    def serve(self) -> None:
        """Answer requests until the grader closes the channel."""
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
        """Import the assignment's modules, while all files may still be read; then limit this process."""
        self._begin(request["modules"])
        isolation = limit(request["limits"])
        # Tracebacks read the source of these modules, and Hypothesis reads all loaded ones, so their packages too.
        names = {name.rsplit(".", n)[0] for name in request["modules"] for n in range(name.count(".") + 1)}
        ours = [os.path.realpath(str(sys.modules[name].__file__)) for name in names]
        sys.addaudithook(make_hook(self._faults.append, request["processes_allowed"], ours))
        return {"ok": {"isolation": isolation, "modules": list(self._objects)}}


# --- Limits ---------------------------------------------------------------------------------------


def limit(limits: dict[str, int]) -> dict[str, str]:
    """Limit this process for good. Returns the isolation in effect, and the limits that could not be set."""
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
        except (OSError, ValueError) as error:  # macOS has no limit of address space
            isolation[f"limit {kind}"] = f"not set: {error}"
    return isolation


def mapped_bytes() -> int:
    """Return the address space in use, in bytes. torch's libraries alone take close to a gigabyte."""
    try:
        with open("/proc/self/statm") as pages:
            return int(pages.read().split()[0]) * resource.getpagesize()
    except OSError:  # only Linux has this file
        return 0


def make_hook(
    note: Callable[[str], None], processes_allowed: bool, ours: Sequence[str]
) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that refuses and notes forbidden actions. An audit hook cannot be removed."""
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
            refuse("left its working directory")  # pytest changes to the current directory
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
            if event == "open" and is_folder(path):  # this hook does not see what is opened relative to it
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
    """The main function of a worker. The channel is the file descriptor in the first argument."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    worker = ChannelWorker(channel)
    # However student code ends, its exit handlers do not run, and nothing waits for its threads.
    try:
        worker.serve()
    finally:
        os._exit(0)


def fork_workers() -> None:
    """The main function of an `Origin`, which forks workers.

    The request `{"folder", "environment"}`, with the file descriptors of a channel and an output, forks a worker; the
    answer is its process number. The request `{"wait", "block"}` gets a worker's exit status.
    """
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[3:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise a garbage collection in a fork writes to every object, and so copies its memory
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
                continue  # the fork itself has answered
        requests.send(json.dumps(answer).encode())


def _fork(requests: socket.socket, folder: str, environment: dict[str, str], channel: int, output: int) -> int | None:
    """Fork a worker, which sends its process number to the grader and runs. Returns None if the system cannot fork."""
    try:
        pid = os.fork()
    except OSError:
        return None
    if pid == 0:
        os.setsid()  # a process group that it cannot leave, so that killing the group kills all its processes
        requests.send(json.dumps(os.getpid()).encode())
        requests.close()
        become_worker(folder, environment, channel, output)
    return pid


def become_worker(folder: str, environment: dict[str, str], channel: int, output: int) -> None:
    """Give this fork the settings of a new program (directory, environment, output), and run `main`."""
    os.chdir(folder)
    os.environ.update(environment)
    tempfile.tempdir = None  # the imports may have looked it up already
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.argv[1] = str(channel)
    main()
