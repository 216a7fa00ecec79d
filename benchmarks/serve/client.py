"""One HTTP request to a server, and what came back when: asyncio's transports, with h11 for the protocol.

A load tool shares its machine with the server it measures, so what it costs is taken from the server. One chunk of a
stream costs 50 µs this way and 150 µs by httpx's streams (measured: 32 streams, one chunk each every 20 ms), and the
time of a chunk is taken where the bytes arrive, before any task has to be woken. Each request has a connection of its
own, as if each came from another user; opening it is part of the time to the first token.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import h11

LONGEST_REFUSAL = 64 * 1024
"""Bytes of an answer that is not a stream; more than that is not kept."""


class RequestFailed(Exception):
    """A request that did not end well. `kind` is what it is counted as; `message` tells of this one."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind = kind
        self.message = message


@dataclass(frozen=True)
class Server:
    """Where requests go. `path`: what stands before /v1/... and /tokenize."""

    host: str
    port: int
    path: str
    tls: bool
    api_key: str | None = None
    address: str | None = None
    """What the host's name stands for; a name would be looked up for each request."""

    @classmethod
    def at(cls, url: str, api_key: str | None) -> Server:
        """Of a URL as people have it: with or without the /v1 at its end. Raises ValueError where it is none."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL of a server; it looks like http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), path, tls, api_key)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"

    def head(self, method: str, path: str, num_bytes: int) -> h11.Request:
        headers = [("host", f"{self.host}:{self.port}"), ("connection", "close"), ("accept-encoding", "identity")]
        if num_bytes:
            headers += [("content-type", "application/json"), ("content-length", str(num_bytes))]
        if self.api_key:
            headers.append(("authorization", f"Bearer {self.api_key}"))
        return h11.Request(method=method, target=self.path + path, headers=headers)


class Exchange(asyncio.Protocol):
    """A request and its answer on one connection. `ended` is done when the answer is whole, or raises RequestFailed.

    The body of a stream goes to `on_data(bytes, time)` as it arrives; that of any other answer is kept in `body`.
    """

    def __init__(self, head: h11.Request, body: bytes, on_data: Callable[[bytes, float], None] | None) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.body = bytearray()
        self._request = (head, body)
        self._on_data = on_data
        self._streams = False
        self._answered = False
        self._http = h11.Connection(h11.CLIENT)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        head, body = self._request
        parts = [self._http.send(head), self._http.send(h11.Data(body)), self._http.send(h11.EndOfMessage())]
        transport.write(b"".join(part for part in parts if part))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._answered |= bool(data)
        try:
            self._http.receive_data(data)
            while not self.ended.done() and self._handle(self._http.next_event(), now):
                pass
        except h11.RemoteProtocolError as error:
            self._end(RequestFailed("not HTTP" if self._answered and not self.status else "cut off", str(error)))
        except RequestFailed as error:
            self._end(error)

    def eof_received(self) -> None:
        self.data_received(b"")  # the end of a body without a length; in any other place h11 takes it for an error

    def connection_lost(self, error: Exception | None) -> None:
        self._end(RequestFailed("cut off", str(error or "the connection was closed before the answer was whole")))

    def give_up(self) -> None:
        """Nothing more is wanted, and the server can see that nobody listens any longer."""
        if self._transport is not None:
            self._transport.abort()

    def _handle(self, event: Any, now: float) -> bool:
        """Whether there may be another event in what has arrived."""
        kind = type(event)
        if kind is h11.Data:
            self._take(bytes(event.data), now)
        elif kind is h11.Response:
            self.status = event.status_code
            content_type = next((value for name, value in event.headers if name == b"content-type"), b"")
            self._streams = self._on_data is not None and content_type.startswith(b"text/event-stream")
        elif kind is h11.EndOfMessage:
            self._end(None)
        elif event is h11.NEED_DATA or event is h11.PAUSED:
            return False
        elif kind is h11.ConnectionClosed:
            raise RequestFailed("cut off", "the connection was closed before the answer was whole")
        return True

    def _take(self, data: bytes, now: float) -> None:
        if self._streams and self._on_data is not None:
            self._on_data(data, now)
        elif len(self.body) < LONGEST_REFUSAL:
            self.body += data

    def _end(self, error: RequestFailed | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
        if self._transport is not None:
            self._transport.close()


async def look_up(server: Server, *, timeout: float) -> Server:
    """The same with its address: the first of those that its name stands for at which somebody listens. Raises
    RequestFailed."""
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(server.host, server.port)
    except TimeoutError:
        raise RequestFailed("timeout", f"no connection within {timeout:g} s") from None
    except OSError as error:
        raise RequestFailed("cannot connect", error.strerror or str(error)) from None
    address = writer.get_extra_info("peername")[0]
    writer.close()
    return replace(server, address=address)


async def ask(
    server: Server,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    timeout: float,
    on_data: Callable[[bytes, float], None] | None = None,
) -> bytes:
    """The body of the answer: empty where `on_data` was given all of it. Raises RequestFailed, also for a status other
    than 200, and where a stream was asked for and something else came."""
    loop = asyncio.get_running_loop()
    exchange = Exchange(server.head(method, path, len(body)), body, on_data)
    context = ssl.create_default_context() if server.tls else None
    try:
        async with asyncio.timeout(timeout):
            await loop.create_connection(
                lambda: exchange,
                server.address or server.host,
                server.port,
                ssl=context,
                server_hostname=server.host if server.tls else None,
            )
            await exchange.ended
    except TimeoutError:
        raise RequestFailed("timeout", f"no end within {timeout:g} s") from None
    except OSError as error:
        raise RequestFailed("cannot connect", error.strerror or str(error)) from None
    finally:
        exchange.give_up()
    if exchange.status != 200:
        raise RequestFailed(f"HTTP {exchange.status}", refusal(bytes(exchange.body)))
    if on_data is not None and exchange.body:
        raise RequestFailed("not a stream", f"the answer is no text/event-stream: {bytes(exchange.body[:200])!r}")
    return bytes(exchange.body)


def refusal(body: bytes) -> str:
    """What an error's body says, in the three shapes that servers use; the beginning of the text where it has none."""
    try:
        told = json.loads(body)
    except ValueError:
        told = body.decode(errors="replace")
    if isinstance(told, dict):
        told = told.get("error", told.get("detail", told))
    if isinstance(told, dict):
        told = told.get("message", told)
    return str(told)[:300].strip()
