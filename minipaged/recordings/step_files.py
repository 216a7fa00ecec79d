"""Steps as bytes, and files of recorded steps: each step that a runner ran, and the tokens that it chose.

**The encoding** of a step is one MessagePack value (https://msgpack.org). Each type of `steps.py` is an array of all
its fields, in their order there:

| type        | array of                                                                                             |
|-------------|------------------------------------------------------------------------------------------------------|
| StepInput   | number, fresh, forked, ended, begun, tables, told, moves, left_out, added, lane, allowed             |
| Forked      | sequence, parent, choice                                                                             |
| Begun       | sequence, token ids, prompt length, blocks, sampling (null: the host chooses)                        |
| Sampling    | params, seed, stream, forbidden token ids, bad words (each an array of token ids)                    |
| TableChange | sequence, kept, blocks                                                                               |
| ChosenToken | sequence, position, token id                                                                         |
| BlockMoves  | swapped out, poisoned, swapped in, copied (a pair of blocks is an array of two); loaded (each an     |
|             | array of a block and its bytes)                                                                      |
| Row         | sequence, start, number of tokens, number of choices (-1: logits), drafted token ids                 |
| Allowed-    | sequence, bits (bytes)                                                                               |
| Tokens      |                                                                                                      |

`params` is a map: the fields of `SamplingParams` by name; a field that a recording lacks has its default. So has
`allowed`, which older recordings lack. Every list is an array. So a step in which all sequences go on and no table
grows is 18 bytes, `9c n c2 90 90 90 90 90 95 90 90 90 90 90 90 90 00 90`, for any number of sequences without a
grammar. For each sequence with one, a step has a bit for each token of the vocabulary.

**A file** begins with the line `minipaged steps 2`. Frames follow, each a length in four bytes (big-endian) and that
number of bytes of MessagePack: a `Header` (a map), a `RecordedStep` (an array) for each step, and at the end the number
of steps. A file that lacks this number was cut short.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, overload

import msgspec

from minipaged.contracts import Runner, Sampled, StepResult
from minipaged.errors import BadRecording, InvalidRequest
from minipaged.llm import LLM
from minipaged.models.config import ModelConfig
from minipaged.params import EngineConfig
from minipaged.scheduling import Costs
from minipaged.steps import StepInput
from minipaged.tiers.devices import own_version

FIRST_LINE = b"minipaged steps 2\n"
_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_step_decoder = msgspec.msgpack.Decoder(StepInput)

Decoded = TypeVar("Decoded")


def encode(step: StepInput) -> bytes:
    """Encode a step as described above."""
    return _encoder.encode(step)


def decode(data: bytes) -> StepInput:
    """Decode a step that `encode` has encoded. Raises BadRecording if the bytes are not a step."""
    return _decode(_step_decoder, data)


def _decode(decoder: msgspec.msgpack.Decoder[Decoded], data: bytes) -> Decoded:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise BadRecording(f"not what a recording holds: {error}") from None


# --- Files ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Header:
    """The model, tier and settings with which steps were recorded."""

    version: str
    """The version of minipaged."""
    model: str
    """The model's name or path, as the user gave it."""
    model_config: ModelConfig
    tier: str
    device: str
    dtype: str
    engine_config: EngineConfig

    @classmethod
    def of(cls, model: str, llm: LLM) -> Header:
        """Make the header for the steps of an LLM that was made with this `model`. Raises InvalidRequest for one with a
        draft model, whose guesses are not in its steps."""
        if llm.loaded.draft is not None:
            raise InvalidRequest(
                "steps in which a draft model guesses cannot be recorded, because a replay would need its guesses; "
                "leave the recording out (--record-steps), or draft with the method 'ngram'"
            )
        tier = llm.loaded.tier
        sizes = (tier.name, tier.device, tier.dtype, llm.config)
        return cls(own_version(), model, llm.model_config, *sizes)


class RecordedStep(NamedTuple):
    """A step and the tokens that it chose."""

    step: StepInput
    choices: tuple[tuple[int, float], ...] | None
    """(token id, logprob) of each choice; None if the step failed or its choices were never read."""


def write_frame(file: BinaryIO, value: Any) -> None:
    """Append one value to a recording."""
    data = _encoder.encode(value)
    file.write(_LENGTH.pack(len(data)))
    file.write(data)


def read_recording(path: Path) -> tuple[Header, Iterator[RecordedStep]]:
    """Open a file of recorded steps: return its header, and an iterator that reads one step at a time.

    Raises BadRecording for a file that is not a recording, or that was cut short.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadRecording(f"cannot read {path}: {error.strerror}") from None
    first = file.readline(len(FIRST_LINE))
    if first != FIRST_LINE:
        known = first.startswith(b"minipaged steps ")
        what = f"a recording of another kind ({first.decode(errors='replace').strip()!r})" if known else "no recording"
        raise BadRecording(f"{path} is {what}; `minipaged generate --record-steps FILE` writes one")
    header = _decode(msgspec.msgpack.Decoder(Header), _read_frame(file, path))
    return header, _read_steps(file, path)


def _read_steps(file: BinaryIO, path: Path) -> Iterator[RecordedStep]:
    decoder = msgspec.msgpack.Decoder(RecordedStep | int)
    with file:
        count = 0
        while not isinstance(frame := _decode(decoder, _read_frame(file, path)), int):
            yield frame
            count += 1
        if frame != count or file.read(1):
            raise BadRecording(f"{path} is damaged: it should hold {frame} steps")


def _read_frame(file: BinaryIO, path: Path) -> bytes:
    head = file.read(_LENGTH.size)
    data = file.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
    if len(head) < _LENGTH.size or len(data) < _LENGTH.unpack(head)[0]:
        raise BadRecording(f"{path} was cut short: its last step is not there")
    return data


# --- Recording ------------------------------------------------------------------------------------


class StepRecorder(Runner):
    """A runner that passes steps on to another one, and writes each to a file once its choices have been read."""

    def __init__(self, runner: Runner, file: BinaryIO, header: Header) -> None:
        self._runner = runner
        self._file = file
        self._pending: deque[tuple[StepInput, _Watched | None]] = deque()  # have run, and are not written yet
        self._count = 0
        file.write(FIRST_LINE)
        write_frame(file, header)

    def run(self, step: StepInput) -> StepResult:
        for before, choices in self._pending if step.fresh else ():
            if choices is not None and before.lane == step.lane:
                choices.given_up = True
        self._write()
        try:
            result = self._runner.run(step)
        except BaseException:
            self._pending.append((step, None))
            raise
        choices = _Watched(result.choices)
        self._pending.append((step, choices))
        return result._replace(choices=choices)

    def close(self) -> None:
        """Write the steps that are left, and the number of steps, which completes the file."""
        self._write(all_of_it=True)
        write_frame(self._file, self._count)
        self._file.flush()

    def costs(self) -> Costs:
        return self._runner.costs()

    def _write(self, *, all_of_it: bool = False) -> None:
        """Write the steps whose choices are known; with `all_of_it` also the others, whose choices nobody will read."""
        while self._pending:
            step, choices = self._pending[0]
            seen = choices.seen if choices is not None else None
            if choices is not None and seen is None and not choices.given_up and not all_of_it:
                return
            self._pending.popleft()
            write_frame(self._file, RecordedStep(step, seen))
            self._count += 1


class _Watched(Sequence[Sampled]):
    """Choices that remember their values when they are read."""

    def __init__(self, choices: Sequence[Sampled]) -> None:
        self._choices = choices
        self.seen: tuple[tuple[int, float], ...] | None = None if len(choices) else ()
        self.given_up = False  # whether a fresh step came before these choices were read

    def __len__(self) -> int:
        return len(self._choices)

    def __iter__(self) -> Iterator[Sampled]:
        choices = list(self._choices)
        self.seen = tuple((one.token_id, one.logprob) for one in choices)
        return iter(choices)

    @overload
    def __getitem__(self, index: int) -> Sampled: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sampled]: ...
    def __getitem__(self, index: int | slice) -> Sampled | Sequence[Sampled]:
        return list(self)[index]
