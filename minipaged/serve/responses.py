"""The answer to POST /v1/responses: a list of items (messages and tool calls), whole or as a stream of events.

A stream has OpenAI's events in OpenAI's order. `response.created` and `response.in_progress` come first. Then each item
is added, grows by deltas, and is done; a message has one content part, which is added and done within it. The last
event is `response.completed`, `response.incomplete` (`max_output_tokens` was reached, or a stop string cut a call) or
`response.failed`, and has the whole response. Every event has the next
`sequence_number`. A whole answer is the items of such a stream.

Log-probabilities, and the fields of the request that a response repeats, are in several events. They are encoded once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal
from uuid import uuid4

import msgspec

from minipaged.async_llm import AsyncRequest
from minipaged.outputs import CompletionUpdate, RequestOutput, RequestUpdate
from minipaged.params import BeamSearchParams, SamplingParams
from minipaged.serve.answers import Json, Logprobs, Places, Prompt, Tokens, calls_of
from minipaged.serve.call_parsers import CallPiece
from minipaged.serve.response_bodies import ResponsesBody
from minipaged.serve.tools import CallSource, ChoiceCalls

ABORTED = "the server was shutting down, and the time to finish was over; ask again"
COPIES = 4
"""The number of events at the end of a stream that repeat the log-probabilities of all tokens."""
Status = Literal["completed", "incomplete"]


class Items:
    """The output items of a response, which grow. `add` and `close` yield the events that report the change."""

    def __init__(self, calls: ChoiceCalls | None) -> None:
        self.all: list[Json] = []
        self._calls = calls
        self._is_open = False  # whether the last item may still grow
        self._text: list[str] = []  # the pieces of its text, or of its arguments
        self._logprobs: list[bytes] = []  # the log-probabilities of its tokens, each encoded
        self._new_logprobs: list[bytes] = []  # those of tokens whose text has not come yet

    def add(self, text: str, token_ids: Sequence[int], is_last: bool, logprobs: Sequence[bytes] = ()) -> Iterator[Json]:
        """Add new text. `logprobs`: the log-probabilities of the new tokens, each encoded."""
        self._new_logprobs += logprobs
        pieces = self._calls.read(text, token_ids, is_last) if self._calls else [text] if text else []
        for piece in pieces:
            if isinstance(piece, CallPiece):
                yield from self._add_to_call(piece)
            else:
                yield from self._add_to_message(piece)

    def close(self, status: Status) -> Iterator[Json]:
        """End the open item."""
        if not self._is_open:
            return
        self._is_open = False
        item, text = self.all[-1], "".join(self._text)
        where = {"item_id": item["id"], "output_index": len(self.all) - 1}
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {"arguments": text, "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **where, **done}
        else:
            self._logprobs += self._new_logprobs
            [part] = item["content"]
            part |= {"text": text, "logprobs": _listed(self._logprobs)}
            where["content_index"] = 0
            yield {"type": "response.output_text.done", **where, "text": text, "logprobs": part["logprobs"]}
            yield {"type": "response.content_part.done", **where, "part": part}
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.all) - 1, "item": item}

    @property
    def num_logprobs(self) -> int:
        return len(self._logprobs) + len(self._new_logprobs)

    def _add_to_message(self, text: str) -> Iterator[Json]:
        if not self._is_open or self.all[-1]["type"] != "message":
            yield from self.close("completed")
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            message: Json = {"type": "message", "id": f"msg_{uuid4().hex}", "status": "in_progress"}
            yield self._open(message | {"role": "assistant", "content": []})
            self.all[-1]["content"] = [part]
            where = {"item_id": message["id"], "output_index": len(self.all) - 1, "content_index": 0}
            yield {"type": "response.content_part.added", **where, "part": dict(part)}
        self._text.append(text)
        self._logprobs += self._new_logprobs
        where = {"item_id": self.all[-1]["id"], "output_index": len(self.all) - 1, "content_index": 0}
        yield {
            "type": "response.output_text.delta",
            **where,
            "delta": text,
            "logprobs": _listed(self._new_logprobs),
        }
        self._new_logprobs = []

    def _add_to_call(self, piece: CallPiece) -> Iterator[Json]:
        assert self._calls
        self._new_logprobs = []  # only messages have them
        if piece.name is not None:
            yield from self.close("completed")
            call: Json = {"type": "function_call", "id": f"fc_{uuid4().hex}", "status": "in_progress"}
            call |= {"call_id": self._calls.id_of(piece.index), "name": piece.name, "arguments": ""}
            yield self._open(call)
        if piece.arguments:
            self._text.append(piece.arguments)
            where = {"item_id": self.all[-1]["id"], "output_index": len(self.all) - 1}
            yield {"type": "response.function_call_arguments.delta", **where, "delta": piece.arguments}

    def _open(self, item: Json) -> Json:
        self.all.append(item)
        self._text, self._logprobs, self._is_open = [], [], True
        return {"type": "response.output_item.added", "output_index": len(self.all) - 1, "item": dict(item)}


@dataclass
class ResponseAnswer:
    """The answer to one request."""

    id: str
    engine_id: str
    model: str
    body: ResponsesBody
    prompt: Prompt
    tokens: Tokens
    params: SamplingParams | BeamSearchParams
    call_source: CallSource | None = None
    """Makes the reader of tool calls; None if the model may call no tools."""
    created: int = field(default_factory=lambda: int(time.time()))
    _num_events: int = 0
    _num_generated: int = 0
    _num_cached: int = 0
    _reason: str | None = None

    def asked(self) -> list[AsyncRequest]:
        priority, salt = self.body.priority or 0, self.body.cache_salt
        return [AsyncRequest(self.engine_id, self.prompt.token_ids, self.params, priority=priority, cache_salt=salt)]

    def num_told(self, outputs: Sequence[RequestOutput]) -> int:
        """Return the number of tokens that `whole` reports one by one, or that it reads for calls."""
        if self.body.reported is None and not self.call_source:
            return 0
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole response."""
        [output] = outputs
        [one] = output.outputs
        self._num_generated, self._num_cached = len(one.token_ids), output.num_cached_tokens
        for text, token_ids, logprobs in self._spread(one.text, one.token_ids, one.logprobs):
            _run(self._items.add(text, token_ids, False, self._encoded(token_ids, logprobs)))
        _run(self._items.add("", (), True))
        self._reason = one.finish_reason
        _run(self._items.close(self._status_of_last()))
        return self._response(self._status())

    def opening(self) -> bytes:
        began = self._response("in_progress") | {"output": []}
        return self._event({"type": "response.created", "response": began}) + self._event(
            {"type": "response.in_progress", "response": began}
        )

    def num_written(self, update: RequestUpdate) -> int:
        """Return the number of tokens that `pieces` reports one by one: many if the client reads slowly."""
        return 0 if self.body.reported is None else sum(len(new.new_token_ids) for new in update.completions)

    @property
    def num_closing(self) -> int:
        """The number of tokens that `closing` reports one by one."""
        return COPIES * self._items.num_logprobs

    def pieces(self, update: RequestUpdate) -> Iterator[bytes]:
        """Yield the events for one update, encoded."""
        if update.output:
            self._num_cached = update.output.num_cached_tokens
        for new in update.completions:
            yield from map(self._event, self._told(new))

    def closing(self, error: Json | None) -> bytes:
        """Return the last events."""
        why = {"code": "server_error", "message": error["error"]["message"]} if error else None
        status = "failed" if error else self._status()
        events = list(self._items.close("incomplete" if error else self._status_of_last()))
        events.append({"type": f"response.{status}", "response": self._response(status, why)})
        return b"".join(map(self._event, events))

    # --- Parts ------------------------------------------------------------------------------------

    @cached_property
    def _calls(self) -> ChoiceCalls | None:
        return calls_of(self.call_source, self.tokens, self.prompt)

    @cached_property
    def _items(self) -> Items:
        return Items(self._calls)

    def _told(self, new: CompletionUpdate) -> Iterator[Json]:
        """Return the events of an update."""
        self._num_generated += len(new.new_token_ids)
        self._reason = new.finish_reason
        logprobs = self._encoded(new.new_token_ids, new.new_logprobs)
        return self._items.add(new.new_text, new.new_token_ids, new.finish_reason is not None, logprobs)

    def _spread(
        self, text: str, token_ids: Sequence[int], logprobs: Logprobs | None
    ) -> Iterable[tuple[str, Sequence[int], Logprobs | None]]:
        """Return the parts of a whole text with their tokens. If log-probabilities are reported and there may be calls,
        each token is a part, because calls are reported without log-probabilities."""
        if logprobs is None or not self.call_source:
            return [(text, token_ids, logprobs)]
        places = [*Places(self.tokens, self.prompt).of(token_ids), len(text)]
        return [
            (text[places[i] : places[i + 1]], token_ids[i : i + 1], logprobs[i : i + 1]) for i in range(len(token_ids))
        ]

    def _encoded(self, token_ids: Sequence[int], logprobs: Logprobs | None) -> list[bytes]:
        if logprobs is None:
            return []
        number = self.body.top_logprobs or 0
        both = zip(token_ids, logprobs, strict=True)
        return [msgspec.json.encode(self.tokens.ranking(token, of, number)) for token, of in both]

    def _status_of_last(self) -> Status:
        """Return the status of the last item: incomplete if the text or a call was cut."""
        is_whole = self._reason == "stop" and not (self._calls and self._calls.is_cut)
        return "completed" if is_whole else "incomplete"

    def _status(self) -> str:
        return self._status_of_last() if self._reason in ("stop", "length") else "failed"

    @property
    def _incomplete_details(self) -> Json:
        """The reason why the response is incomplete. OpenAI has none for a call that a stop string cut."""
        return {"reason": "max_output_tokens"} if self._reason == "length" else {}

    def _response(self, status: str, error: Json | None = None) -> Json:
        ended = status != "in_progress"
        if status == "failed" and error is None:
            error = {"code": "server_error", "message": ABORTED}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": self._incomplete_details if status == "incomplete" else None,
            "model": self.model,
            "output": self._items.all,
            "usage": self._usage() if ended else None,
            **self._echoed,
        }

    @cached_property
    def _echoed(self) -> Json:
        """The fields of the request that a response repeats."""
        body = self.body
        echoed = {
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }
        return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in echoed.items()}

    def _usage(self) -> Json:
        num_prompt = len(self.prompt.token_ids)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": self._num_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + self._num_generated,
        }

    def _event(self, data: Json) -> bytes:
        numbered = {"type": data["type"], "sequence_number": self._num_events, **data}
        self._num_events += 1
        return f"event: {data['type']}\n".encode() + b"data: " + msgspec.json.encode(numbered) + b"\n\n"


def _listed(encoded: Sequence[bytes]) -> Any:
    """Return an object that msgspec encodes as the list of these values, which are encoded already."""
    return msgspec.Raw(b"[" + b",".join(encoded) + b"]")


def _run(events: Iterator[Json]) -> None:
    """Run through the events, which makes the items grow, and drop them."""
    for _ in events:
        pass
