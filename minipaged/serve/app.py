"""The endpoints, OpenAI's and vLLM's, in front of an engine that a thread steps (`async_llm.py`).

- A faulty request gets a 400 that names its faults, ten at most. FastAPI's 422 is never used.
- When a client hangs up, its requests are aborted immediately, also while they are being read, queued, prefilled or
  streamed. All work for a client therefore races against `receive()`, which reports that the client is gone. Polling
  for that does not work everywhere.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from minipaged.async_llm import AsyncRequest
from minipaged.errors import EngineDead, InvalidRequest, MinipagedError, ModelError, QueueFull, ShuttingDown
from minipaged.outputs import RequestOutput, RequestUpdate
from minipaged.serve.answers import Json
from minipaged.serve.bodies import json_route
from minipaged.serve.guards import KeyGuard, LengthGuard, LoadGuard, ServerLoad
from minipaged.serve.live.routes import live_routes
from minipaged.serve.protocol import (
    FIELDS,
    SHAPES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SamplingBody,
    TokenizeBody,
)
from minipaged.serve.response_bodies import RESPONSE_FIELDS, ResponsesBody
from minipaged.serve.serving import TooLong, UnknownModel, UpdateStream, Words
from minipaged.tiers.devices import own_version

Result = TypeVar("Result")
MOST_BODY_BYTES = 8 * 2**20
TOO_LONG = f"the body is longer than the limit of {MOST_BODY_BYTES:,} bytes; send less at a time"
MOST_FAULTS = 10
MOST_CHARACTERS = 200
"""The number of characters of a faulty value that an error message quotes."""
RETRY_AFTER = "1"
"""Seconds after which to try again, sent with each 503. By then the queue may have room, or another server be ready."""
ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
CLIENT_GONE = 499
MANY_TOKENS = 500
"""Writing an answer that reports this number of tokens one by one takes about ten milliseconds."""

STATUS = {
    InvalidRequest: (400, "BadRequestError"),
    ModelError: (400, "BadRequestError"),  # no tokenizer, no chat template
    UnknownModel: (404, "NotFoundError"),
    QueueFull: (503, "ServiceUnavailableError"),
    ShuttingDown: (503, "ServiceUnavailableError"),
    EngineDead: (503, "ServiceUnavailableError"),
}


def create_app(serving: Words, *, key: str | None = None, cors_origins: Sequence[str] = ()) -> FastAPI:
    """Make the server's application. `key`: the API key that clients must send. `cors_origins`: the origins of web
    pages that may call it."""
    app = FastAPI(
        title="minipaged",
        description="An OpenAI-compatible server around PagedAttention.",
        version=own_version(),
        docs_url=None,  # its page loads scripts from other servers
        redoc_url=None,
    )
    load = ServerLoad()
    routers = [_generating(serving), _telling(serving, load)]
    for router in routers:
        app.include_router(router)
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    paths = [route.path.replace(":path}", "}") for route in routes if route.path != "/v1/models/"] + ["/openapi.json"]
    if serving.watch:
        app.include_router(live_routes(serving.watch))
        paths.append("/")
    app.state.no_page = serving.no_page
    app.state.endpoints = ", ".join(paths)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(MinipagedError, _known_error)
    app.add_exception_handler(Exception, _unknown_error)
    app.add_middleware(LoadGuard, load=load)
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=MOST_BODY_BYTES)  # for bodies without a length
    too_long = answered(_error(TOO_LONG, "BadRequestError", 413), 413)
    app.add_middleware(LengthGuard, most=MOST_BODY_BYTES, refusal=too_long)
    if key:
        app.add_middleware(KeyGuard, key=key)
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["*"], allow_headers=["*"])
    return app


# --- Endpoints that generate ----------------------------------------------------------------------

ERROR = {"error": {"type": "object"}}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": what, "content": {"application/json": {"schema": {"type": "object", "properties": ERROR}}}}
    for status, what in {
        400: "Something is wrong with the request; the message says what.",
        401: "The key is wrong.",
        404: "There is no such model.",
        413: "The body is too long.",
        500: "The engine failed.",
        503: "The queue is full, or the server is shutting down, or its engine is dead.",
    }.items()
}


def _generating(serving: Words) -> APIRouter:
    thread = ThreadPoolExecutor(1, "minipaged-bodies")
    router = APIRouter(route_class=json_route(thread), responses=ERRORS)
    pieces: Json = {"text/event-stream": {}}
    told: dict[int | str, dict[str, Any]] = {
        200: {"description": "The answer; in chunks with stream=true.", "content": pieces}
    }

    @router.post("/v1/completions", summary="Continue prompts", responses=told)
    async def completions(body: CompletionBody, request: Request) -> Response:
        answer = await unless_gone(request, serving.completion(body, *_names(request, body.request_id, "cmpl")))
        return await _respond(serving, answer, request)

    @router.post("/v1/chat/completions", summary="Answer a conversation", responses=told)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        answer = await unless_gone(request, serving.chat(body, *_names(request, body.request_id, "chatcmpl")))
        return await _respond(serving, answer, request)

    @router.post("/v1/responses", summary="Answer a conversation, in the form of OpenAI's Responses", responses=told)
    async def responses(body: ResponsesBody, request: Request) -> Response:
        answer = await unless_gone(request, serving.respond(body, *_names(request, body.request_id, "resp")))
        return await _respond(serving, answer, request)

    @router.post("/tokenize", summary="Tokenize a prompt or a conversation")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        return answered(await unless_gone(request, serving.tokenize(body)))

    @router.post("/detokenize", summary="Turn tokens into text")
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        return answered(await unless_gone(request, serving.detokenize(body)))

    return router


def _names(request: Request, given: str | None, prefix: str) -> tuple[str, str]:
    """Return the id of an answer, and the engine's id for it. The id is from the body, or the header X-Request-Id, or
    random. The engine's id always has a random part, because a client may use an id again, e.g. for a second attempt,
    before the engine is done with the first."""
    if given and not ID.fullmatch(given):
        raise InvalidRequest("request_id may have letters, digits, and _ . : - only, 128 at most")
    name = given or request.headers.get("x-request-id", "")
    own = uuid4().hex
    if not ID.fullmatch(name):
        return f"{prefix}-{own}", f"{prefix}-{own}"
    return f"{prefix}-{name}", f"{prefix}-{name}-{own}"


class HttpAnswer(Protocol):
    """The attributes of an answer that this module uses. `answers.Answer` and `responses.ResponseAnswer` have them."""

    @property
    def body(self) -> SamplingBody: ...

    @property
    def num_closing(self) -> int:
        """The number of tokens that `closing` reports."""

    def asked(self) -> list[AsyncRequest]: ...

    def num_told(self, outputs: Sequence[RequestOutput]) -> int: ...

    def whole(self, outputs: Sequence[RequestOutput]) -> Json: ...

    def opening(self) -> bytes: ...

    def num_written(self, update: RequestUpdate) -> int: ...

    def pieces(self, update: RequestUpdate) -> Iterable[bytes]: ...

    def closing(self, error: Json | None) -> bytes: ...


async def _respond(serving: Words, answer: HttpAnswer | None, request: Request) -> Response:
    """Send an answer's requests to the engine, and respond with the whole answer or a stream. `answer` is None if the
    client is gone."""
    if answer is None:
        return Response(status_code=CLIENT_GONE)
    if answer.body.stream:
        # No race here: if the client leaves meanwhile, the EventStream notices it immediately.
        return EventStream(answer, await serving.allm.add(answer.asked()))

    async def work() -> Json:
        stream = await serving.allm.add(answer.asked(), finals_only=True)
        try:
            outputs = await stream.outputs()
        finally:
            stream.close()
        if error := next((output.error for output in outputs if output.error), None):
            raise HTTPException(500, error)
        return await written(answer.num_told(outputs), partial(answer.whole, outputs))

    return answered(await unless_gone(request, work()))


class EventStream(Response):
    """A response that sends an answer as server-sent events, until it is complete or the client is gone."""

    media_type = "text/event-stream"

    def __init__(self, answer: HttpAnswer, stream: UpdateStream) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._answer = answer
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stream.close()
            sending.cancel()  # it may wait for a full buffer that the client no longer reads
            gone.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        error: str | None = None
        status, kind = 500, "InternalServerError"
        try:
            if opening := self._answer.opening():
                await send({"type": "http.response.body", "body": opening, "more_body": True})
            async for update in self._stream:
                write = partial(b"".join, self._answer.pieces(update))
                if pieces := await written(self._answer.num_written(update), write):
                    await send({"type": "http.response.body", "body": pieces, "more_body": True})
                if update.output and update.output.error:
                    error = update.output.error
                    break
        except (EngineDead, ShuttingDown) as ended:
            error, (status, kind) = str(ended), STATUS[type(ended)]
        except Exception as failed:
            logging.getLogger("uvicorn.error").exception("an answer could not be written")
            error = f"{type(failed).__name__}: {failed}"
        close = partial(self._answer.closing, _error(error, kind, status) if error else None)
        await send({"type": "http.response.body", "body": await written(self._answer.num_closing, close)})


async def written(num_tokens: int, write: Callable[[], Result]) -> Result:
    """Return the result of `write`, which reports `num_tokens` tokens one by one. For many tokens it runs in a thread,
    so that it does not block the event loop."""
    return write() if num_tokens <= MANY_TOKENS else await asyncio.to_thread(write)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Return the result of the work; None if the client hangs up before it is done. In that case, cancel the work and
    wait for its end."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def answered(data: Json | None, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Respond with JSON; with an empty response if `data` is None, because the client is gone."""
    if data is None:
        return Response(status_code=CLIENT_GONE)
    return Response(msgspec.json.encode(data), status, headers, "application/json")


def unavailable(message: str) -> Response:
    """Respond with 503, and the time after which to try again."""
    return answered(_error(message, "ServiceUnavailableError", 503), 503, {"Retry-After": RETRY_AFTER})


# --- Endpoints that report ------------------------------------------------------------------------


def _telling(serving: Words, load: ServerLoad) -> APIRouter:
    router = APIRouter()
    started = int(time.time())

    @router.get("/v1/models", summary="List the model under each of its names")
    @router.get("/v1/models/", include_in_schema=False)  # else it would match a model with an empty name
    async def models() -> Response:
        return answered({"object": "list", "data": [serving.card(name, started) for name in serving.names]})

    @router.get("/v1/models/{name:path}", summary="Describe the model", responses={404: ERRORS[404]})
    async def model(name: str) -> Response:
        serving.check_model(name)
        return answered(serving.card(name, started))

    dead: dict[int | str, dict[str, Any]] = {503: {"description": "The engine is dead, or takes no more requests."}}

    @router.get("/health", summary="Check whether the engine is alive", response_class=Response, responses=dead)
    @router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
    async def health() -> Response:
        await serving.check_health()
        return Response()

    @router.get("/version", summary="The version of minipaged")
    async def tell_version() -> Response:
        return answered({"version": own_version()})

    @router.get("/metrics", summary="Metrics for Prometheus, with vLLM's names", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        accept = request.headers.get("accept", "")
        text, content_type = await serving.exposition(accept)
        return Response(text, headers={"Content-Type": content_type})

    @router.get("/load", summary="The number of requests being served")
    async def tell_load() -> Response:
        return answered({"server_load": load.num_served})

    return router


# --- Errors ---------------------------------------------------------------------------------------


def _error(message: str, kind: str, status: int, param: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


async def _invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = error.errors()  # few, because a list reports only its first fault
    # For a field that may have several types, pydantic reports a fault for each of them.
    told = list(dict.fromkeys(_shape(fault, error.body) or _fault(fault) for fault in faults))
    if len(told) > MOST_FAULTS:
        told[MOST_FAULTS:] = [f"and {len(told) - MOST_FAULTS} more"]
    where = [str(part) for part in faults[0]["loc"] if part != "body"]
    param = where[0] if where and faults[0]["type"] != "json_invalid" else None
    return answered(_error("; ".join(told), "BadRequestError", 400, param), 400)


def _shape(fault: Json, body: Any) -> str | None:
    """Describe the types of a field that may have several; None for other fields."""
    where = fault["loc"][1:2]
    if not where or where[0] not in SHAPES or not isinstance(body, dict):
        return None
    return f"{where[0]} must be {SHAPES[where[0]]} (given: {_given(body.get(where[0]))})"


def _given(value: Any) -> str:
    """Return the value as text, cut at MOST_CHARACTERS. Only the beginning of a long value is ever written out."""
    given = repr(_beginning(value, iter(range(MOST_CHARACTERS))))
    return given if len(given) <= MOST_CHARACTERS else given[:MOST_CHARACTERS] + "…"


def _beginning(value: Any, left: Iterator[int]) -> Any:
    """Return the beginning of a value: lists and objects keep their first values, until `left` is used up."""
    if isinstance(value, list):
        return [_beginning(each, left) for each, _ in zip(value, left, strict=False)]
    if isinstance(value, dict):
        return {name: _beginning(each, left) for (name, each), _ in zip(value.items(), left, strict=False)}
    return value[: MOST_CHARACTERS + 1] if isinstance(value, str | bytes) else value


def _fault(fault: Json) -> str:
    if fault["type"] == "json_invalid":
        return f"the body is not JSON: {fault['ctx']['error']}"
    if isinstance(fault.get("input"), bytes):
        return "the body is not declared as JSON; send it with the header Content-Type: application/json"
    if fault["type"] == "missing" and fault["loc"] == ("body",):
        return "the body is empty; send a JSON object"
    where = ".".join(str(part) for part in fault["loc"] if part != "body") or "the body"
    return f"{where}: {fault['msg'].removeprefix('Value error, ')} (given: {_given(fault.get('input'))})"


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, kind = str(error.detail), "BadRequestError" if error.status_code < 500 else "InternalServerError"
    if error.status_code == 404:
        kind = "NotFoundError"
        message = f"there is no {request.url.path[:MOST_CHARACTERS]} here; there is {request.app.state.endpoints}"
        if request.url.path == "/":
            message = f"there is no page here: {request.app.state.no_page}; there is {request.app.state.endpoints}"
    elif error.status_code == 405:
        allowed = (error.headers or {})["Allow"]
        message = f"{request.url.path[:MOST_CHARACTERS]} takes {allowed}, not {request.method}"
    elif error.status_code == 413:
        message = TOO_LONG
    return answered(_error(message, kind, error.status_code), error.status_code, dict(error.headers or {}))


async def _known_error(request: Request, error: Exception) -> Response:
    status, kind = next((STATUS[each] for each in type(error).__mro__ if each in STATUS), (500, "InternalServerError"))
    headers = {"Retry-After": RETRY_AFTER} if status == 503 else None
    told = _error(str(error), kind, status, _param(error))
    if isinstance(error, TooLong):
        told["error"] |= {"param": error.param, "code": error.code}
    return answered(told, status, headers)


def _param(error: Exception) -> str | None:
    """Return the field that an error is about. Such a message begins with the field's name."""
    [first] = re.findall(r"^\w*", str(error))
    return "model" if isinstance(error, UnknownModel) else first if first in FIELDS | RESPONSE_FIELDS else None


async def _unknown_error(request: Request, error: Exception) -> Response:
    return answered(_error(f"{type(error).__name__}: {error}", "InternalServerError", 500), 500)
