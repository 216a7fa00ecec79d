"""The server of `minipaged serve`: loads the model, listens, and runs until a signal or the engine's death.

A first SIGTERM or Ctrl-C ends it in order: new requests are refused with 503, running ones may finish within
`shutdown_timeout` seconds, the rest are aborted (their clients get the output so far), and the exit status is 0. The
server waits a moment longer (`LAST_MOMENT_S`) for clients that do not read their answer and for a step that does not
end. A second signal ends the process immediately. If the engine's thread dies, every open request gets an error,
/health answers 503, and the exit status is 1.
"""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn

from minipaged.async_llm import AsyncLLM, check_before_serving, told
from minipaged.errors import InvalidRequest
from minipaged.serve.app import create_app, unavailable
from minipaged.serve.connections import Connection, Door, as_bytes, most_connections, raise_file_limit
from minipaged.serve.serving import LocalModel
from minipaged.serve.settings import ServeSettings
from minipaged.setup.loaded_model import LoadedModel

LAST_WORDS_S = 2
"""Seconds for which a server whose engine has died still answers, with errors."""
LAST_MOMENT_S = 1
"""Seconds after the time to finish: for the step in which the rest is aborted, and for connections to close."""
QUIET = {"/health", "/ping", "/load", "/metrics"}
"""Paths that monitoring polls all the time. Successful requests for them are not logged."""
M_ARENA_MAX = -8
"""glibc's parameter for the number of heaps (malloc.h)."""


def serve(model: str, settings: ServeSettings, **engine: Any) -> int:
    """Load the model, serve it until the end, and return the exit status. `engine`: settings of the engine.

    Before it loads the model, raises InvalidRequest for an address that cannot be listened on and for invalid settings.
    Also raises the errors of `LLM`.
    """
    check_before_serving(**engine)
    raise_file_limit()
    with listen(settings.host, settings.port) as listening:
        print(f"loading {model} ...", file=sys.stderr, flush=True)
        use_one_heap()
        server = make_server(model, settings, **engine)
        _introduce(listening, settings, server.serving)
        # FastAPI builds its routes at the first request, and suppresses this warning of pydantic meanwhile. That fails
        # if another thread, such as the next one, changes the warning filters at the same time.
        warnings.filterwarnings("ignore", message="The 'alias' attribute with value 'body'")
        threading.Thread(target=server.serving.warm_up).start()
        try:
            server.run(sockets=[listening])
        finally:
            server.serving.allm.llm.close()
    return server.status


def make_server(model: str | LoadedModel, settings: ServeSettings, **engine: Any) -> Server:
    """Load a model, and return its server, which does not run yet."""
    allm = AsyncLLM(model, max_waiting=settings.max_waiting, **engine)
    names = settings.served_model_name or (str(allm.llm.folder.name if isinstance(model, LoadedModel) else model),)
    serving = LocalModel(allm, names, settings, page=settings.page)
    app = create_app(serving, key=settings.api_key, cors_origins=settings.cors_origin)
    # Connection uses h11, because httptools, which uvicorn prefers if it is installed, accepts headers of any length.
    # lifespan is off, because the app starts nothing, and the server shuts itself down. Connections that are still open
    # after the last moment are cut off (`Server.shutdown`), and their tasks end by themselves. Cancelling them would
    # fill the log.
    config = uvicorn.Config(
        app,
        http="h11" if sys.platform == "win32" else Connection,
        log_level=settings.log_level,
        timeout_graceful_shutdown=2 * LAST_MOMENT_S,
        lifespan="off",
        server_header=False,
    )
    logging.getLogger("uvicorn.access").addFilter(_is_told)
    return Server(config, serving, settings.shutdown_timeout)


def _is_told(record: logging.LogRecord) -> bool:
    """Return whether a line belongs in the log of requests."""
    _, _, path, _, status = record.args  # type: ignore[misc]  # uvicorn's: client, method, path, HTTP version, status
    return status != 200 or str(path).partition("?")[0] not in QUIET


class Server(uvicorn.Server):
    """uvicorn's server with its own shutdown: running requests finish, or get an error, before the socket closes."""

    def __init__(self, config: uvicorn.Config, serving: LocalModel, shutdown_timeout: float) -> None:
        super().__init__(config)
        self.status = 0
        self.serving = serving
        self._shutdown_timeout = shutdown_timeout
        self._ending: asyncio.Task[None] | None = None
        self.door: Door | None = None
        serving.allm.on_death = self._engine_died

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.serving.allm.start()
        if sys.platform == "win32":
            await super().startup(sockets)
            return
        full = unavailable("the server has no room for more connections; ask again later, or another server")
        self.door = Door(self.config, self.server_state, most_connections(), full)
        await super().startup([])
        self.door.open(sockets or [])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close pages, whose streams would never end, then the door, then the server."""
        if self.serving.watch:
            self.serving.watch.close()
        if self.door:
            self.door.close()
        self.loop.call_later(LAST_MOMENT_S, self._cut_off)
        await super().shutdown(sockets)

    def _cut_off(self) -> None:
        """Close the connections left: with half a request, a step that does not end, or a client that does not read."""
        over = as_bytes(unavailable("the server has shut down before the request could be answered; ask another"))
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.cut_off(over)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal, which may come at any moment."""
        if self._ending or not self.started:
            os._exit(128 + sig)
        self._ending = self.loop.create_task(self._end(sig))
        self.loop.call_soon_threadsafe(lambda: None)  # wakes the loop, which may be waiting for a socket

    async def _end(self, sig: int) -> None:
        num_open = self.serving.allm.num_open
        if num_open:
            print(
                f"{signal.Signals(sig).name}: {num_open} request{'s have' if num_open > 1 else ' has'} "
                f"{self._shutdown_timeout:g} s to finish; "
                "a second signal ends it at once",
                file=sys.stderr,
            )
        with suppress(TimeoutError):
            ending = self.serving.allm.shutdown(self._shutdown_timeout)
            await asyncio.wait_for(ending, self._shutdown_timeout + LAST_MOMENT_S)
        self.should_exit = True

    def _engine_died(self, error: BaseException) -> None:
        self.status = 1
        print(f"error: the engine has stopped: {told(error)}", file=sys.stderr)
        self.loop.call_later(LAST_WORDS_S, setattr, self, "should_exit", True)


def use_one_heap() -> None:
    """Let all threads allocate from one heap. glibc gives each thread its own, and free memory in one does not serve
    another.

    From 500 to 5,000 requests SmolLM2's process grows by 37 MiB, and by 167 MiB with a heap per thread. The setting is
    for the whole process. It is skipped if the environment has its own.
    """
    if os.environ.keys() & {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"}:
        return
    with suppress(OSError, AttributeError, TypeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises InvalidRequest if the address cannot be listened on."""
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listening = socket.socket(family, kind)
    except OSError as error:
        raise InvalidRequest(f"host is {host!r}, which is not an address of this machine: {error.strerror}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise InvalidRequest(f"cannot listen on {host}, port {port}: {error.strerror}; choose another --port") from None
    return listening


def _introduce(listening: socket.socket, settings: ServeSettings, serving: LocalModel) -> None:
    """Print on stderr what is served, and at which address."""
    llm, port = serving.allm.llm, listening.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    lines = [
        f"{', '.join(serving.names)} on the {llm.description}",
        f"{llm.config.num_blocks} blocks of {llm.config.block_size} tokens, {llm.config.num_swap_blocks} more to swap "
        f"to; at most {llm.config.max_model_len} tokens a sequence"
        + (", because the pool holds no more" if serving.is_bound_by_pool else ""),
        f"listening on http://{host}:{port} (OpenAI's API is at /v1)",
    ]
    if settings.api_key is None and not _is_loopback(listening):
        lines.append("warning: anyone who can reach this machine can use the server; --api-key KEY requires a key")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _is_loopback(listening: socket.socket) -> bool:
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback
