"""Accepts connections, bounds their number, and notices when a client leaves.

Each connection is an open file, and the system limits the number of files of a process. At the limit, asyncio would try
to accept the next connection again and again, and log each attempt. So the server accepts connections itself (`Door`),
and never more than it has files for:

- Below the limit, each connection is accepted.
- At the limit, the connection that has been silent the longest is closed to make room. A connection is silent if it has
  sent nothing yet or half of a request, or waits between two requests. So idle connections keep no client out.
- If no connection has been silent long enough, the new one gets a 503 immediately and is closed.

(On Windows there is no such limit, and the event loop cannot wait for sockets this way, so uvicorn accepts there.)

A connection is read also while its request is served, because this is the only way to notice that it has ended. Data
that a client sends meanwhile is kept for later, up to a bound (`Connection`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

if sys.platform != "win32":
    import resource

MOST_FILES = 2**16
"""The largest file limit that the process asks the system for, as in vLLM."""
SPARE_FILES = 64
"""The number of files kept free for other purposes: files read while serving, and connections being refused or
closed."""
AT_ONCE = 16
"""The number of connections accepted before the event loop runs other tasks. Also the largest number of refused
connections that stay open for a moment."""
SILENT_S = 0.25
"""Seconds for which a connection must be silent before it may be closed to make room. Its first request may be on its
way."""
LINGER_S = 1.0
"""Seconds for which a refused client can read the answer, and for which the door stays shut when the system has no more
files."""
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors of `accept` when the system has no more files or memory for a connection, in spite of the spare files."""
QUIET_S = 60.0
"""The least number of seconds between two log messages of the door."""
MOST_AHEAD = 2**16
"""The number of bytes that a client may send ahead while its request is served (HTTP pipelining)."""


def raise_file_limit() -> None:
    """Raise this process's file limit to the system's maximum, or to `MOST_FILES` if that is less."""
    if sys.platform == "win32":  # it has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # some systems have another, lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """Return the number of connections that this process has files for, in addition to its open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if soft == resource.RLIM_INFINITY else soft
    return max(1, most - len(os.listdir("/dev/fd")) - SPARE_FILES)


class Connection(H11Protocol):
    """A uvicorn connection that keeps reading when a client sends a request ahead, so that it notices when the client
    leaves."""

    def __init__(self, door: Door, **given: Any) -> None:
        super().__init__(**given)
        self._door = door
        self._ahead = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_served:
            super().data_received(data)
            self._note()
        elif self.cycle.keep_alive:
            self._ahead += data
            if len(self._ahead) > MOST_AHEAD:  # answer the current request, and none after it
                self._ahead.clear()
                self.cycle.keep_alive = False
                self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()
        if self._ahead and not self.transport.is_closing():
            data, self._ahead = bytes(self._ahead), bytearray()
            self.data_received(data)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note()

    def cut_off(self, refusal: bytes) -> None:
        """Close the connection now. Send `refusal` if the client waits for an answer that has not begun."""
        if self.cycle and not self.cycle.response_started and not self.transport.is_closing():
            self.transport.write(refusal)
            self.transport.close()
        else:
            self.transport.abort()

    @property
    def _is_served(self) -> bool:
        """Whether a request has been received completely, and its answer is not complete."""
        return bool(self.cycle) and not self.cycle.response_complete and not self.cycle.more_body

    def _note(self) -> None:
        """Restart the measurement of silence after data was received or sent. The connection is silent from now on if
        it waits for the client."""
        silent = self._door.silent
        silent.pop(self, None)
        if not (self._is_served or self.flow.write_paused or self.transport.is_closing()):
            silent[self] = self.loop.time()  # added at the end, so that `silent` stays in order of time


class Door:
    """Accepts connections for a server, `most` at a time. `refusal`: the answer to further ones."""

    def __init__(self, config: uvicorn.Config, state: ServerState, most: int, refusal: Response) -> None:
        self.most = most
        self.refusal = as_bytes(refusal)
        self.silent: dict[Connection, float] = {}
        """Connection that waits for its client -> the time since when. The longest wait comes first."""
        self._config = config
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []
        self._open: set[Connection] = set()
        self._beginning: set[asyncio.Task[Any]] = set()
        self._refused: deque[socket.socket] = deque()
        self._told_at = -QUIET_S

    def open(self, sockets: Sequence[socket.socket]) -> None:
        """Start accepting connections from these sockets."""
        for listening in sockets:
            listening.setblocking(False)
            self._listening.append(listening)
            self._loop.add_reader(listening.fileno(), self._take_in, listening)

    def close(self) -> None:
        """Stop accepting connections."""
        for listening in self._listening:
            self._loop.remove_reader(listening.fileno())
        self._listening.clear()
        while self._refused:
            self._let_go(self._refused[0])

    def _take_in(self, listening: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                client, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    continue  # an error of this connection, which is gone
                self._tell(f"no connection can be accepted: {error.strerror}; silent connections are closed")
                for _ in range(AT_ONCE):
                    self._make_room()
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(LINGER_S, self._open_again, listening)
                return
            client.setblocking(False)
            if len(self._open) < self.most or self._make_room():
                self._begin(client)
            else:
                self._refuse(client)

    def _open_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            self._loop.add_reader(listening.fileno(), self._take_in, listening)

    def forget(self, connection: Connection) -> None:
        """Forget a connection that has closed."""
        self._open.discard(connection)
        self.silent.pop(connection, None)

    def _begin(self, client: socket.socket) -> None:
        given = {"config": self._config, "server_state": self._state, "app_state": {}, "_loop": self._loop}
        connection = Connection(self, **given)

        def begun(task: asyncio.Task[Any]) -> None:
            self._beginning.discard(task)
            if task.cancelled() or task.exception():  # the client is gone already
                self.forget(connection)
                client.close()

        self._open.add(connection)
        task = self._loop.create_task(self._loop.connect_accepted_socket(lambda: connection, client))
        self._beginning.add(task)
        task.add_done_callback(begun)

    def _make_room(self) -> bool:
        """Close the connection that has been silent the longest, if at least for SILENT_S. Return whether it did so."""
        longest = next(iter(self.silent), None)
        if longest is None or self._loop.time() - self.silent[longest] < SILENT_S:
            return False
        self._tell_bound()
        del self.silent[longest]
        longest.transport.abort()
        return True

    def _refuse(self, client: socket.socket) -> None:
        self._tell_bound()
        with suppress(OSError):
            client.send(self.refusal)
            client.shutdown(socket.SHUT_WR)
        self._refused.append(client)
        self._loop.call_later(LINGER_S, self._let_go, client)
        if len(self._refused) > AT_ONCE:
            self._let_go(self._refused[0])

    def _let_go(self, client: socket.socket) -> None:
        if client in self._refused:
            self._refused.remove(client)
            with suppress(OSError):
                client.recv(2**16)  # closing with unread data would reset the connection, and lose the answer
            client.close()

    def _tell_bound(self) -> None:
        self._tell(
            f"{self.most:,} connections are open, which is the limit by files (ulimit -n): a new one replaces a silent "
            "one, or is refused with 503"
        )

    def _tell(self, message: str) -> None:
        """Log the message, unless the door logged one in the last `QUIET_S` seconds."""
        if self._loop.time() - self._told_at >= QUIET_S:
            self._told_at = self._loop.time()
            logging.getLogger("uvicorn.error").warning(message)


def as_bytes(response: Response) -> bytes:
    """Return a response as bytes, with a header that says that the connection is closed after it."""
    headers = [*response.raw_headers, CLOSE_HEADER]
    lines = [f"HTTP/1.1 {response.status_code} Service Unavailable".encode(), *(b": ".join(pair) for pair in headers)]
    return b"\r\n".join([*lines, b"", bytes(response.body)])
