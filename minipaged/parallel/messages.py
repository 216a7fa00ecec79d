"""What driver and workers tell each other: MessagePack values on a socket, each behind its length in four bytes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from itertools import repeat

import msgspec

from minipaged.contracts import Sampled
from minipaged.params import EngineConfig
from minipaged.scheduling import Costs
from minipaged.steps import StepInput

_LENGTH = struct.Struct(">I")


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """An array of its kind's name and its fields."""


# --- From the driver ------------------------------------------------------------------------------


class Make(Message, frozen=True):
    """Reserve the KV cache and get ready to run steps."""

    config: EngineConfig
    number: int
    """How many were asked for, this one included."""


class Run(Message, frozen=True):
    """Follow this step (`steps.py`)."""

    step: StepInput
    chosen: list[tuple[int, list[int]]] = []
    """With several stages: of steps that have been run, by number, the tokens that were chosen."""


class Where(Message, frozen=True):
    """Say what you are doing. It is answered at once, by a thread of its own."""


# --- From a worker --------------------------------------------------------------------------------


class Loaded(Message, frozen=True):
    """The weights are there."""

    free_device_bytes: int | None


class Refused(Message, frozen=True):
    """The checkpoint cannot be loaded, or not cut so."""

    error: str


class Made(Message, frozen=True):
    """Steps can come."""

    number: int
    """As in `Make`."""
    costs: Costs


class NoRoom(Message, frozen=True):
    """There is too little memory for the cache."""

    error: str


class Ran(Message, frozen=True):
    """A step has been run. The first rank of the last stage tells what came of it."""

    number: int
    choices: Choices
    prompt_logprobs: dict[int, Choices] = {}
    logits: bytes = b""
    """[rows that ask for logits or choose, vocab], float32, where some ask for them."""


class Failed(Message, frozen=True):
    """Something has raised, and nothing will work any more."""

    error: str


class Doing(Message, frozen=True):
    """What the worker does, in a few words."""

    what: str
    waits: bool
    """For another rank, so that it is not this one that is late."""


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


Order = Make | Run | Where
Answer = Loaded | Refused | Made | NoRoom | Ran | Failed | Doing

_encoder = msgspec.msgpack.Encoder()
_order_decoder = msgspec.msgpack.Decoder(Order)
_answer_decoder = msgspec.msgpack.Decoder(Answer)


def encode(message: Message) -> bytes:
    """With its length before it."""
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


def read_order(connection: socket.socket) -> Order | None:
    """The next thing to do; None where the driver has gone."""
    data = _read(connection)
    return None if data is None else _order_decoder.decode(data)


def read_answer(connection: socket.socket) -> Answer | None:
    """The next thing that a worker tells; None where it has gone."""
    data = _read(connection)
    return None if data is None else _answer_decoder.decode(data)


def _read(connection: socket.socket) -> bytearray | None:
    head = _read_bytes(connection, _LENGTH.size)
    return None if head is None else _read_bytes(connection, *_LENGTH.unpack(head))


def _read_bytes(connection: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        try:
            received = connection.recv_into(view[done:])
        except ConnectionError:
            return None
        if not received:
            return None
        done += received
    return data
