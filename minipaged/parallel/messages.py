"""What driver and workers tell each other: MessagePack values on a socket, each behind its length in four bytes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Generic, TypeVar

import msgspec

from minipaged.contracts import Sampled
from minipaged.params import EngineConfig
from minipaged.scheduling import Costs
from minipaged.steps import StepInput

_LENGTH = struct.Struct(">I")
_PART = 1 << 16
"""Bytes that are asked for at once. Nearly all messages come in one go."""

Told = TypeVar("Told")


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """An array of its kind's name and its fields."""


# --- From the driver ------------------------------------------------------------------------------


class Make(Message, frozen=True):
    """Reserve the KV cache and get ready to run steps."""

    config: EngineConfig
    number: int
    """How many were asked for, this one included."""


class RunStep(Message, frozen=True, tag="Run"):  # the message of every step: its name is sent each time
    """Follow this step (`steps.py`)."""

    step: StepInput
    chosen: list[tuple[int, list[int]]] = []
    """With several stages: of steps that have been run, by number, the tokens that were chosen."""


class Where(Message, frozen=True):
    """Say what you are doing. It is answered at once, by a thread of its own."""


# --- From a worker --------------------------------------------------------------------------------


class RankLoaded(Message, frozen=True):
    """The weights are there."""

    free_device_bytes: int | None


class RankRefused(Message, frozen=True):
    """The checkpoint cannot be loaded, or not cut so."""

    error: str


class RankReady(Message, frozen=True):
    """Steps can come."""

    number: int
    """As in `Make`."""
    costs: Costs


class NoRoom(Message, frozen=True):
    """There is too little memory for the cache."""

    error: str


class RankFailed(Message, frozen=True):
    """Something has raised, and nothing will work any more."""

    error: str


class Doing(Message, frozen=True):
    """What the worker does, in a few words."""

    what: str
    waits: bool
    """For another rank, so that it is not this one that is late."""


# --- From the first rank of the last stage, on a connection of its own ----------------------------


class Making(Message, frozen=True):
    """What has come of the steps before a `Make` was told, all of it."""

    number: int
    """As in `Make`."""


class Ran(Message, frozen=True):
    """A step has been run, and this has come of it."""

    number: int
    choices: Choices
    prompt_logprobs: dict[int, Choices] = {}
    logits: bytes = b""
    """[rows that ask for logits or choose, vocab], float32, where some ask for them."""


class Choices(msgspec.Struct, array_like=True, frozen=True):
    """Sampled tokens, one after another; what few of them have is told by their places."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: dict[int, dict[int, float]]
    errors: dict[int, str]

    @classmethod
    def of(cls, sampled: Sequence[Sampled]) -> Choices:
        return cls(
            [one.token_id for one in sampled],
            [one.logprob for one in sampled],
            {place: one.top_logprobs for place, one in enumerate(sampled) if one.top_logprobs is not None},
            {place: one.error for place, one in enumerate(sampled) if one.error is not None},
        )

    def sampled(self) -> list[Sampled]:
        """What `of` was given."""
        chosen = list(map(Sampled, self.token_ids, self.logprobs, repeat(None)))
        for place, top in self.top_logprobs.items():
            chosen[place].top_logprobs = top
        for place, error in self.errors.items():
            chosen[place].error = error
        return chosen


Order = Make | RunStep | Where
Answer = RankLoaded | RankRefused | RankReady | NoRoom | RankFailed | Doing
Result = Making | Ran

_encoder = msgspec.msgpack.Encoder()
_order_decoder = msgspec.msgpack.Decoder(Order)
_answer_decoder = msgspec.msgpack.Decoder(Answer)
_result_decoder = msgspec.msgpack.Decoder(Result)


def encode(message: Message) -> bytes:
    """With its length before it."""
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


class Incoming(Generic[Told]):
    """The messages that come on a connection, for one reader. No part of one is lost where he is interrupted."""

    def __init__(self, connection: socket.socket, decode: Callable[[memoryview], Told]) -> None:
        self._connection = connection
        self._decode = decode
        self._parts: list[bytes] = []  # what has come of the next message, and maybe of those after it

    def read(self) -> Told | None:
        """The next one; None where the other end has gone. Raises BlockingIOError where the connection has a timeout
        (SO_RCVTIMEO) and nothing has come in it."""
        while True:
            there = sum(map(len, self._parts))
            if there >= _LENGTH.size:
                if len(self._parts[0]) < _LENGTH.size:
                    self._parts = [b"".join(self._parts)]
                end = _LENGTH.size + _LENGTH.unpack_from(self._parts[0])[0]
                if there >= end:
                    data = b"".join(self._parts)
                    self._parts = [data[end:]] if there > end else []
                    return self._decode(memoryview(data)[_LENGTH.size : end])
            try:
                self._parts.extend(map(self._connection.recv, (_PART,)))  # in one go, or Ctrl-C could come in between
            except BlockingIOError:
                raise
            except OSError:  # reset, or closed on this side
                return None
            if not self._parts[-1]:
                return None


def orders(connection: socket.socket) -> Incoming[Order]:
    """What the driver says."""
    return Incoming(connection, _order_decoder.decode)


def answers(connection: socket.socket) -> Incoming[Answer]:
    """What a worker says."""
    return Incoming(connection, _answer_decoder.decode)


def results(connection: socket.socket) -> Incoming[Result]:
    """What has come of steps."""
    return Incoming(connection, _result_decoder.decode)
