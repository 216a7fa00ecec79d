"""The messages between driver and workers: MessagePack values on a socket, each after its length in four bytes."""

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
"""The number of bytes to read at a time. Nearly all messages arrive in one read."""

Told = TypeVar("Told")


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A message, encoded as an array of the class name and the fields."""


# --- From the driver ------------------------------------------------------------------------------


class Make(Message, frozen=True):
    """The order to reserve the KV cache and prepare for steps."""

    config: EngineConfig
    number: int
    """The number of this order, counted from 1."""


class RunStep(Message, frozen=True):
    """The order to run a step (`steps.py`)."""

    step: StepInput
    chosen: list[tuple[int, list[int]]] = []
    """Numbers of earlier steps with the tokens that they chose. Only models with several stages need them."""


class Where(Message, frozen=True):
    """The request to report the current activity. A separate thread of the worker answers it immediately."""


# --- From a worker --------------------------------------------------------------------------------


class RankLoaded(Message, frozen=True):
    """The answer that a rank has loaded its weights."""

    free_device_bytes: int | None
    """Free memory of the rank's GPU; None on a CPU."""


class RankRefused(Message, frozen=True):
    """The answer that the checkpoint cannot be loaded, or cannot be cut for this rank."""

    error: str


class RankReady(Message, frozen=True):
    """The answer to `Make`: the rank is ready for steps."""

    number: int
    """The number of the `Make`."""
    costs: Costs


class NoRoom(Message, frozen=True):
    """The answer to `Make` if the rank has too little memory for the KV cache."""

    error: str


class RankFailed(Message, frozen=True):
    """The report that a rank has raised an exception and can run nothing more."""

    error: str


class Doing(Message, frozen=True):
    """The answer to `Where`: the worker's current activity."""

    what: str
    """The activity in a few words."""
    waits: bool
    """Whether the rank is waiting for another one, which is then the late one."""


# --- From the first rank of the last stage, on a connection of its own ----------------------------


class Making(Message, frozen=True):
    """The report that the rank has started a `Make`. The results of all earlier steps have been sent before it."""

    number: int
    """The number of the `Make`."""


class Ran(Message, frozen=True):
    """The result of a step."""

    number: int
    """The number of the step."""
    choices: Choices
    prompt_logprobs: dict[int, Choices] = {}
    logits: bytes = b""
    """float32 [rows that need logits or choose tokens, vocab]; empty if no row needs logits."""


class Choices(msgspec.Struct, array_like=True, frozen=True):
    """Sampled tokens in order. Rare attributes are dicts, keyed by the position of the token."""

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
        """The tokens as `Sampled` objects, the inverse of `of`."""
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
    """Encode a message, preceded by its length."""
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


class Incoming(Generic[Told]):
    """The messages that arrive on a connection, for one reader. An interrupted read loses no part of a message."""

    def __init__(self, connection: socket.socket, decode: Callable[[memoryview], Told]) -> None:
        self._connection = connection
        self._decode = decode
        self._parts: list[bytes] = []  # received parts of the next message, and maybe of later ones

    def read(self) -> Told | None:
        """The next message; None if the other end has closed the connection. Raises BlockingIOError if nothing arrives
        within the connection's timeout (SO_RCVTIMEO)."""
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
                self._parts.extend(
                    map(self._connection.recv, (_PART,))
                )  # one call, so that Ctrl-C cannot interrupt in between
            except BlockingIOError:
                raise
            except OSError:  # reset, or closed on this side
                return None
            if not self._parts[-1]:
                return None


def orders(connection: socket.socket) -> Incoming[Order]:
    """The driver's orders, as a worker reads them."""
    return Incoming(connection, _order_decoder.decode)


def answers(connection: socket.socket) -> Incoming[Answer]:
    """A worker's answers, as the driver reads them."""
    return Incoming(connection, _answer_decoder.decode)


def results(connection: socket.socket) -> Incoming[Result]:
    """The results of steps, as the driver reads them."""
    return Incoming(connection, _result_decoder.decode)
