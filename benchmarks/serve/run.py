"""One open-loop run: every request is sent at its time, whatever has become of those before it.

A closed loop (so many users, each of whom waits for an answer before asking again) slows down together with the server,
and so never sees how long a queue gets. Here a late answer delays nobody's question; and where the tool itself is late,
the time counts all the same, because times are counted from when a request *should* have been sent.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.serve.client import RequestFailed, Server, ask
from benchmarks.serve.load import Request

HEARTBEAT = 0.02
"""Seconds between two looks at how late the event loop is."""


@dataclass(frozen=True)
class Target:
    """A server under load: what it is called here, and how requests are put to it."""

    name: str
    server: Server
    model: str
    chat: bool
    hold: str
    """How outputs get exactly as long as was asked for: a name in HOLDS."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, request: Request) -> bytes:
        asked = {"messages": [{"role": "user", "content": request.prompt}]} if self.chat else {"prompt": request.prompt}
        return json.dumps(
            {
                "model": self.model,
                **asked,
                "max_tokens": request.output_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **HOLDS[self.hold](request.output_tokens),
            }
        ).encode()


HOLDS: dict[str, Any] = {
    "ignore_eos": lambda tokens: {"ignore_eos": True},
    "generation_config": lambda tokens: {
        "generation_config": json.dumps({"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False})
    },
    "nothing": lambda tokens: {},
}
"""What makes a server go on past the end of sequence: vLLM's field, which most servers know; that of `transformers
serve`, which refuses fields it does not know; or nothing, and outputs are as long as the model likes."""


@dataclass(slots=True)
class Record:
    """What became of one request. All times in seconds from the beginning of the run; None: it never happened."""

    intended: float
    """When it should have been sent."""
    prompt_tokens_asked: int
    output_tokens_asked: int
    sent: float | None = None
    """When the tool came to send it."""
    chunks: list[float] = field(default_factory=list)
    """When each chunk with new tokens arrived."""
    ended: float | None = None
    """When the last chunk with tokens, or with the reason of the end, arrived. None where the request failed."""
    prompt_tokens: int | None = None
    """As the server counted; None where it does not tell."""
    output_tokens: int | None = None
    """As the server counted, or one for each chunk where it does not tell."""
    cached_tokens: int = 0
    """Of the prompt, found in the prefix cache."""
    error: str | None = None
    """The kind of failure."""
    message: str = ""

    @property
    def ttft(self) -> float | None:
        """Time to the first token, from when the request should have been sent."""
        return self.chunks[0] - self.intended if self.ended is not None and self.chunks else None

    @property
    def latency(self) -> float | None:
        return None if self.ended is None else self.ended - self.intended

    @property
    def tpot(self) -> float | None:
        """Time per output token: (latency - TTFT) / (n - 1); None where there is one token only."""
        if self.ttft is None or self.latency is None or not self.output_tokens or self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the time from each chunk to the next."""
        return [later - earlier for earlier, later in pairwise(self.chunks)]


class Answer:
    """Follows the server-sent events of one stream, and writes down in `record` what they tell."""

    def __init__(self, record: Record, began: float) -> None:
        self._record = record
        self._began = began
        self._rest = b""
        self._last = 0.0
        self._finished = False

    def feed(self, data: bytes, now: float) -> None:
        """The next bytes, which arrived at `now`. Raises RequestFailed for an event that tells of an error, or that is
        none of the protocol's."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                event = line[5:].strip()
                if event != b"[DONE]":
                    self._follow(event, now - self._began)

    def close(self) -> None:
        """The stream has ended. Raises RequestFailed unless the answer had."""
        record = self._record
        if not self._finished:
            raise RequestFailed("cut off", f"the stream ended after {len(record.chunks)} chunks, without a reason")
        if not record.chunks:
            raise RequestFailed("no tokens", "the stream ended well and brought none")
        record.ended = self._last
        if record.output_tokens is None:
            record.output_tokens = len(record.chunks)

    def _follow(self, event: bytes, now: float) -> None:
        try:
            told = json.loads(event)
            if told.get("error") is not None:
                error = told["error"]
                message = error.get("message", error) if isinstance(error, dict) else error
                raise RequestFailed("error in stream", str(message)[:300])
            if usage := told.get("usage"):
                self._note_usage(usage)
            for choice in told.get("choices") or ():
                self._note_choice(choice, now)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RequestFailed(
                "not the protocol", f"an event that is no chunk of a completion: {event[:200]!r}"
            ) from None

    def _note_usage(self, usage: dict[str, Any]) -> None:
        record = self._record
        record.prompt_tokens, record.output_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        record.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def _note_choice(self, choice: dict[str, Any], now: float) -> None:
        """A chunk counts when it has text, or none but is neither a chat's first (the role) nor the end: a token whose
        text is held back until a character is whole."""
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        finished = choice.get("finish_reason") is not None
        if text or not (finished or "role" in delta):
            self._record.chunks.append(now)
        self._finished |= finished
        self._last = now


@dataclass(frozen=True)
class Run:
    """What happened, and what the tool itself took for it."""

    records: list[Record]
    seconds: float
    """From the beginning to the end of the last request."""
    cpu_seconds: float
    """Of the tool's process."""
    loop_lags: list[float]
    """How late the event loop was, each time that it was looked at."""


async def run(target: Target, requests: list[Request], *, timeout: float) -> Run:
    """Send each request at its time, and wait until all have ended, each within `timeout` seconds."""
    bodies = [target.body(request) for request in requests]
    records = [Record(request.seconds, request.prompt_tokens, request.output_tokens) for request in requests]
    lags: list[float] = []
    heartbeat = asyncio.create_task(_watch_loop(lags))
    gc.freeze()  # what is there now is left out of every collection that falls into the measurement
    began, cpu = time.perf_counter(), time.process_time()
    try:
        async with asyncio.TaskGroup() as group:
            for record, body in zip(records, bodies, strict=True):
                if (wait := began + record.intended - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(_send(target, record, body, began, timeout))
    finally:
        heartbeat.cancel()
        gc.unfreeze()
    return Run(records, time.perf_counter() - began, time.process_time() - cpu, lags)


async def _send(target: Target, record: Record, body: bytes, began: float, timeout: float) -> None:
    record.sent = time.perf_counter() - began
    answer = Answer(record, began)
    try:
        await ask(target.server, "POST", target.path, body, timeout=timeout, on_data=answer.feed)
        answer.close()
    except RequestFailed as failure:
        record.error, record.message = failure.kind, failure.message


async def _watch_loop(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + HEARTBEAT
        await asyncio.sleep(HEARTBEAT)
        lags.append(time.perf_counter() - due)
