"""Middleware in front of the endpoints. It is plain ASGI, because middleware that wraps the response would hide that a
client has left."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

BEHIND_KEY = ("/v1", "/live", "/tokenize", "/detokenize")


@dataclass(slots=True)
class ServerLoad:
    """The server's current load."""

    num_served: int = 0
    """The number of requests for generation whose answer is not complete."""


class KeyGuard:
    """Answers requests without the header `Authorization: Bearer KEY` with 401, for all paths in `BEHIND_KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and scope["path"].startswith(BEHIND_KEY):
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            right = secrets.compare_digest(key.lstrip(b" "), self._expected)
            if scheme.lower() != b"bearer" or not right:
                headers = {"WWW-Authenticate": "Bearer"}
                await JSONResponse({"error": "Unauthorized"}, 401, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class LengthGuard:
    """Answers with `refusal` if a body is announced to be longer than `most` bytes, before any of it is read."""

    def __init__(self, app: ASGIApp, most: int, refusal: Response) -> None:
        self._app = app
        self._most = most
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = dict(scope["headers"]).get(b"content-length", b"0") if scope["type"] == "http" else b"0"
        app = (
            self._refusal if int(length) > self._most else self._app
        )  # the HTTP server has checked that it is a number
        await app(scope, receive, send)


class LoadGuard:
    """Counts the POST requests to /v1 that are being served, in `load.num_served`."""

    def __init__(self, app: ASGIApp, load: ServerLoad) -> None:
        self._app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith("/v1")
        self._load.num_served += counts
        try:
            await self._app(scope, receive, send)
        finally:  # also if the server cancels the request
            self._load.num_served -= counts
