"""The routes of the live page: GET / (the page), its two files, and GET /live/events (server-sent events).

The page and its files are static and public. Only /live shows the engine's state. It requires the API key, if the
server has one. The page asks the user for the key, and sends it with the stream and the chat box.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from minipaged.serve.live.watch import Watch

HERE = Path(__file__).parent
FILES = {
    "/": ("live.html", "text/html"),
    "/assets/live.css": ("live.css", "text/css"),
    "/assets/live.js": ("live.js", "text/javascript"),
}
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    # The browser then loads nothing from other servers.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def live_routes(watch: Watch) -> APIRouter:
    """Return the routes of a page that shows the state in `watch`. Its streams end after `watch.close()`."""
    routes = APIRouter(include_in_schema=False)
    for path, (name, kind) in FILES.items():
        routes.get(path)(_file((HERE / name).read_bytes(), kind))

    @routes.get("/live/events")
    async def events() -> StreamingResponse:
        headers = HEADERS | {"Live-Clock": f"{watch.now:.3f}"}  # needed, because the last figures may be old
        return StreamingResponse(_as_events(watch), media_type="text/event-stream", headers=headers)

    return routes


def _file(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def file() -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return file


async def _as_events(watch: Watch) -> AsyncIterator[bytes]:
    async for frame in watch.frames():
        yield b"data: %b\n\n" % frame if frame else b":\n\n"
