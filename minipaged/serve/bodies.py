"""Decodes the bodies of requests without blocking other requests.

A small body is decoded immediately and validated by FastAPI. A large one would block the event loop for seconds, so it
is decoded and validated in a thread, one at a time. Other threads get a turn only between two calls into a library, so
each call must be short. Therefore a body with too many values is refused before it is decoded, and lists of token ids
are decoded one by one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from minipaged.errors import InvalidRequest
from minipaged.serve.protocol import MOST_PROMPTS

Body = TypeVar("Body", bound=BaseModel)
LARGE = 2**16
"""The longest body, in bytes, that is decoded in the event loop. A longer one would block it for too long."""
MOST_VALUES = 2**18
"""The largest number of values in one field, and in one list of token ids. Decoding them takes half a dozen
milliseconds."""
FEW_TEXTS = 2**13
"""The number of quotes up to which a body is decoded field by field. With more it holds many texts, and is checked and
decoded as a whole."""
LISTS = 8
"""Decoding a list or an object takes as long as decoding this number of numbers."""

NO_OBJECT = "the body must be a JSON object, with the fields of the request"
LONE_HALF = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""Matches each escape sequence. Group 1 is set if it is a surrogate without its other half."""
AT_BYTE = re.compile(r" \(byte (\d+)\)$")
WORD = re.compile(rb"-?[A-Za-z_]\w*")


class JsonRequest(Request):
    """A request whose body is strict JSON: without NaN, lone surrogates or very deep nesting."""

    def __init__(self, request: Request, kind: type[BaseModel], thread: Executor) -> None:
        super().__init__(request.scope, request.receive)
        self._kind = kind
        self._thread = thread

    async def json(self) -> Any:
        """Return the body, decoded. A large one is validated too, so that FastAPI does not validate it."""
        body = await self.body()
        if len(body) <= LARGE:
            return decoded(body)
        work = partial(validated, body, self._kind)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def json_route(thread: Executor) -> type[APIRoute]:
    """Return the class of routes that take a body. `thread` decodes large ones."""

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            assert self.body_field
            kind: Any = self.body_field.field_info.annotation

            async def strictly(request: Request) -> Response:
                try:
                    return await handle(JsonRequest(request, kind, thread))
                except (
                    HTTPException
                ) as error:  # FastAPI raises it for any error in `json` that is not a JSONDecodeError
                    if isinstance(error.__cause__, InvalidRequest | RequestValidationError):
                        raise error.__cause__ from None
                    raise

            return strictly

    return JsonRoute


def validated(body: bytes, kind: type[Body]) -> Body:
    """Decode and validate a body. Raises the errors of `decoded`, and RequestValidationError as FastAPI does."""
    given = decoded(body)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        faults = [fault | {"loc": ("body", *fault["loc"])} for fault in error.errors(include_url=False)]
        raise RequestValidationError(faults, body=given) from None


def decoded(body: bytes) -> dict[str, Any]:
    """Decode a body, which must be a JSON object. Raises JSONDecodeError if it is not JSON, and InvalidRequest if it is
    not an object or too large."""
    try:
        few = _weight(body) <= MOST_VALUES
        if few or body.count(b'"') > FEW_TEXTS:
            if not few:
                _check_number(body, "the body")
            given = msgspec.json.decode(body)
            if not isinstance(given, dict):
                raise InvalidRequest(NO_OBJECT)
            return given
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return {name: _field(name, bytes(raw).strip()) for name, raw in fields.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _what_is_wrong(body, error) from None


def _weight(text: bytes) -> int:
    """Return an upper bound on the cost of decoding JSON, in numbers. It counts commas and brackets in texts too."""
    return text.count(b",") + LISTS * (text.count(b"[") + text.count(b"{"))


def _field(name: str, text: bytes) -> Any:
    """Decode the value of one field."""
    if _weight(text) <= MOST_VALUES:
        return msgspec.json.decode(text)
    if b'"' not in text and (lists := _lists(name, text)) is not None:
        return [
            msgspec.json.decode(each) for each in lists
        ]  # not `map`, which would not let other threads run in between
    _check_number(text, name if re.fullmatch(r"\w{1,100}", name) else "a field of the body")
    return msgspec.json.decode(text)


def _lists(name: str, text: bytes) -> list[bytes] | None:
    """Split a list of lists of numbers into its lists; return None for anything else. The text is known to be JSON."""
    if text.count(b"]", 0, -1) != text.count(b"[", 1) or not text.startswith(b"["):
        return None
    if text.count(b"[", 1) > MOST_PROMPTS:
        return None
    parts = [part.strip().removeprefix(b",").lstrip() for part in text[1:-1].split(b"]")]
    if parts.pop() or not all(part.startswith(b"[") and b"[" not in part[1:] for part in parts):
        return None
    for part in parts:
        _check_number(part, name)
    return [part + b"]" for part in parts]


def _check_number(text: bytes, what: str) -> None:
    """Raise InvalidRequest if the JSON holds too many values. Commas and brackets in texts do not count."""
    weight = at = 0
    while weight <= MOST_VALUES:
        begin = text.find(b'"', at)
        end = len(text) if begin < 0 else begin
        weight += text.count(b",", at, end) + LISTS * (text.count(b"[", at, end) + text.count(b"{", at, end))
        if begin < 0:
            break
        at = _end_of_text(text, begin)
    if weight > MOST_VALUES:
        raise InvalidRequest(
            f"{what} holds too many values: at most {MOST_VALUES:,} numbers in one list, {MOST_PROMPTS:,} such "
            f"lists as prompts, and {MOST_VALUES // LISTS:,} lists or objects are allowed; send less at a time"
        )


def _end_of_text(text: bytes, begin: int) -> int:
    """Return the index after the end of the text that begins with the quote at `begin`."""
    end = begin
    while (end := text.find(b'"', end + 1)) >= 0:
        before = end
        while text[before - 1] == ord("\\"):
            before -= 1
        if (end - before) % 2 == 0:  # the quote itself is not escaped
            return end + 1
    return len(text)


# --- Error messages -------------------------------------------------------------------------------


def _what_is_wrong(body: bytes, error: Exception) -> Exception:
    """Return an error with a message that says what to look for."""
    if isinstance(error, RecursionError):
        return InvalidRequest("the body is nested too deeply: lists in lists, or objects in objects; make it flatter")
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start]
        return json.JSONDecodeError(
            f"a text in it is not UTF-8 (it has the byte 0x{byte:02x}); encode it in UTF-8", "", 0
        )
    if isinstance(error, msgspec.ValidationError):
        if "out of range" in str(error):
            return InvalidRequest("a number in the body is out of range: it must be less than 1e308 or so")
        return InvalidRequest(NO_OBJECT)
    said = str(error)
    escapes = LONE_HALF.finditer(body) if said == "Input data was truncated" or "surrogate" in said else ()
    if half := next((escape for escape in escapes if escape[1]), None):
        return InvalidRequest(
            f"the body has {half[0].decode()} at byte {half.start()}, which is half of a character, and cannot be "
            "written in UTF-8: escapes from d800 to dfff are valid only in pairs; leave it out, or send both halves"
        )
    words = said.removeprefix("JSON is malformed: ").replace("Input data was truncated", "it ends too early")
    return json.JSONDecodeError(_plainer(body, words), "", 0)


def _plainer(body: bytes, words: str) -> str:
    """Return the decoder's message, or a better one if it only says that a character is invalid."""
    at = AT_BYTE.search(words)
    if not words.startswith("invalid character (") or not at:
        return words
    start = int(at[1])
    if body.startswith(b"\xef\xbb\xbf"):
        return "it begins with a byte order mark; leave that out"
    if body[start] < 0x20:
        return f"a text in it has the control character \\u{body[start]:04x} unescaped{at[0]}; escape it"
    while start and body[start - 1 : start].isalnum() | (body[start - 1 : start] == b"-"):
        start -= 1
    if word := WORD.match(body, start):
        return f"{word[0][:40].decode('ascii', 'replace')} is no value of JSON{at[0]}"
    return words
