"""The live page and its stream: GET / (the page), its two files, and GET /live/events (server-sent events).

The page and its files are the same for everybody, and open. What the engine does is told by /live alone, which is
behind the key where there is one: the page asks for it, and sends it as the chat box does.
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
    # The browser itself sees to it that nothing is asked for elsewhere.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def live_routes(watch: Watch) -> APIRouter:
    """The routes of the page that shows what `watch` follows. Their streams end with `watch.close()`."""
    routes = APIRouter(include_in_schema=False)
    for path, (name, kind) in FILES.items():
        routes.get(path)(_file((HERE / name).read_bytes(), kind))

    @routes.get("/live/events")
    async def events() -> StreamingResponse:
        headers = HEADERS | {"Live-Clock": f"{watch.now:.3f}"}  # the last figures may be old
        return StreamingResponse(_as_events(watch), media_type="text/event-stream", headers=headers)

    return routes


def _file(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def file() -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return file


async def _as_events(watch: Watch) -> AsyncIterator[bytes]:
    async for frame in watch.frames():
        yield b"data: %b\n\n" % frame if frame else b":\n\n"
