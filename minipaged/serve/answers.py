"""The server's answers: turns the engine's updates into OpenAI's JSON, whole or in chunks.

Each HTTP request has one `Answer`. It may cover several requests of the engine (one per prompt), each with several
sequences. The choice of a sequence has the number prompt x n + sequence. Chunks are plain dicts, encoded immediately. A
pydantic object for each chunk would cost ten times as much, in every step for every stream.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from minipaged.async_llm import AsyncRequest
from minipaged.engine.detokenizer import Decode, Detokenizer, text_without_end
from minipaged.models.tokenizer import with_plain_content
from minipaged.outputs import CompletionOutput, CompletionUpdate, RequestOutput, RequestUpdate
from minipaged.params import MOST_LOGPROB_TOKENS, BeamSearchParams, SamplingParams
from minipaged.serve.call_parsers import Piece
from minipaged.serve.protocol import ChatBody, CompletionBody, SamplingBody
from minipaged.serve.tools import CallSource, ChoiceCalls, joined

Json = dict[str, Any]
Logprobs = Sequence[Mapping[int, float]]
PromptLogprobs = Sequence[Mapping[int, float] | None]
LEAST_LOGPROB = -9999.0
"""The smallest log-probability in an answer, because JSON has no minus infinity."""

DONE = b"data: [DONE]\n\n"


def event(data: Json) -> bytes:
    """Encode JSON as one server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Functions that write tokens in an answer."""

    bytes_of: Callable[[int], bytes]
    """Returns the bytes of a token's text, which may be a part of a character."""
    places: Callable[[str], list[int]]
    """Returns the offset at which each token of a text begins."""
    decode: Decode
    """Returns the text of several tokens, as the engine decodes an output."""
    decode_all: Decode
    """Returns the text of several tokens with special tokens, for the echo of a prompt that was given as tokens."""
    as_ids: bool
    """Whether to write a single token as "token_id:17", which is exact also for a part of a character."""

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else self.text_of(token_id)

    def text_of(self, token_id: int) -> str:
        """Return the text of one token. Bytes that are not a whole character become U+FFFD."""
        return self.bytes_of(token_id).decode(errors="replace")

    def ranking(self, token_id: int, logprobs: Mapping[int, float], number: int) -> Json:
        """Return a chosen token's entry in OpenAI's form, with those of the first `number` tokens."""
        likeliest = list(logprobs.items())[:number]
        return self._entry(token_id, logprobs[token_id]) | {"top_logprobs": [self._entry(*one) for one in likeliest]}

    def _entry(self, token_id: int, logprob: float) -> Json:
        own = list(self.bytes_of(token_id))
        return {"token": self(token_id), "logprob": max(logprob, LEAST_LOGPROB), "bytes": own}


@dataclass(slots=True)
class Prompt:
    """One prompt of an HTTP request."""

    text: str | None
    """The prompt's text; None if it was given as tokens."""
    token_ids: Sequence[int]
    echo: str | None = None
    """The prompt's text at the beginning of its choices, computed when it is first needed."""
    echoed_logprobs: Json | None = None
    """The log-probabilities of the prompt's tokens, computed when they are first needed."""


class Places:
    """Computes the offset of each output token in a choice's text, one token after another.

    All tokens of one character have the character's offset. A special token that is not shown has the offset of the
    next text. A token after the end of the text, such as the end of a stop string, has the offset that it would have.
    """

    def __init__(self, tokens: Tokens, prompt: Prompt, first: int = 0) -> None:
        """`first`: the offset of the first token."""
        self._text = Detokenizer(tokens.decode, prompt_token_ids=prompt.token_ids, prompt=prompt.text)
        self._next = first

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        places = []
        for token_id in token_ids:
            places.append(self._next)
            self._text.add(token_id)
            self._next += len(self._text.take())
        return places


def places_in_prompt(prompt: Prompt, tokens: Tokens) -> list[int]:
    """Return the offset of each token in the prompt's text. The text of a prompt that was given as tokens includes
    special tokens."""
    if prompt.text is not None:
        return tokens.places(prompt.text)
    text, place, places = Detokenizer(tokens.decode_all), 0, []
    for token_id in prompt.token_ids:
        places.append(place)
        text.add(token_id)
        place += len(text.take())
    return places


def calls_of(source: CallSource | None, tokens: Tokens, prompt: Prompt) -> ChoiceCalls | None:
    """Return a reader of the tool calls in one choice; None if it is to have none."""
    if source is None:
        return None
    return source.choice(Places(tokens, prompt).of if source.hidden else None)


@dataclass(slots=True)
class StreamedChoice:
    """The state of one choice in a stream."""

    places: Places | None
    """Computes the offsets of the choice's tokens; None if the answer has no log-probabilities."""
    first: Json
    """Extra fields for the choice's first chunk; empty once that is sent."""
    calls: ChoiceCalls | None = None
    """Reads the choice's tool calls; None if it is to have none."""
    num_tokens: int = 0

    def take_first(self) -> Json:
        taken, self.first = self.first, {}
        return taken


@dataclass
class Answer(ABC):
    """The answer to one HTTP request."""

    KIND: ClassVar[str]
    CHUNK_KIND: ClassVar[str]
    id: str
    engine_id: str
    """The unique id under which the engine knows the request."""
    model: str
    body: SamplingBody
    prompts: Sequence[Prompt]
    tokens: Tokens
    params: Sequence[SamplingParams | BeamSearchParams] = ()
    """The parameters of each prompt."""
    created: int = field(default_factory=lambda: int(time.time()))
    _told: dict[int, StreamedChoice] = field(default_factory=dict)
    _num_cached: int = 0

    @cached_property
    def request_ids(self) -> list[str]:
        """The ids of the engine's requests. They have a number at the end if there are several prompts."""
        number = len(self.prompts)
        return [self.engine_id] if number == 1 else [f"{self.engine_id}-{place}" for place in range(number)]

    def asked(self) -> list[AsyncRequest]:
        """Return the requests for the engine, one per prompt."""
        return [
            AsyncRequest(
                request_id, prompt.token_ids, params, prompt.text, self.body.priority or 0, self.body.cache_salt
            )
            for request_id, prompt, params in zip(self.request_ids, self.prompts, self.params, strict=True)
        ]

    def num_told(self, outputs: Sequence[RequestOutput]) -> int:
        """Return the number of tokens that `whole` reports one by one, which determines its cost."""
        if not self.body.echo and self.body.reported is None and self.body.prompt_logprobs is None:
            return 0
        return sum(
            len(output.prompt_token_ids) + sum(len(one.token_ids) for one in output.outputs) for output in outputs
        )

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole answer."""
        choices = [
            self._choice(self._number(place, one.index), output, one)
            for place, output in enumerate(outputs)
            for one in output.outputs
        ]
        num_generated = sum(self._num_generated(one.token_ids) for output in outputs for one in output.outputs)
        num_cached = sum(output.num_cached_tokens for output in outputs)
        answer = self._head(self.KIND) | {"choices": choices, "usage": self._usage(num_generated, num_cached)}
        prompt_logprobs = [self._prompt_logprobs(output.prompt_token_ids, output.prompt_logprobs) for output in outputs]
        return answer | self._beside(prompt_logprobs, choices)

    def pieces(self, update: RequestUpdate) -> Iterator[bytes]:
        """Yield the chunks for one update, encoded."""
        place = self.request_ids.index(update.request_id) if len(self.prompts) > 1 else 0
        if update.output:
            self._num_cached += update.output.num_cached_tokens
        for new in update.completions:
            number = self._number(place, new.index)
            told = self._told.get(number)
            if told is None:
                prompt = self.prompts[place]
                told = self._told[number] = StreamedChoice(
                    self._places(prompt), self._of_prompt(prompt, update.prompt_logprobs), self._calls(prompt)
                )
                for first in self._first_chunks(number, prompt, told, update.prompt_logprobs):
                    yield self._chunk(first)
            told.num_tokens += self._num_generated(new.new_token_ids)
            if new.new_text or new.finish_reason or new.new_logprobs or self.body.return_token_ids or told.calls:
                for piece in self._choice_pieces(number, new, told):
                    yield self._chunk({"choices": [piece]})

    def opening(self) -> bytes:
        """Return what a stream begins with, before the engine has begun."""
        return b""

    def num_written(self, update: RequestUpdate) -> int:
        """Return the number of tokens that `pieces` reports for an update, besides the new ones."""
        return len(update.prompt_logprobs or ())

    @property
    def num_closing(self) -> int:
        """The number of tokens that `closing` reports one by one."""
        return 0

    def closing(self, error: Json | None) -> bytes:
        """Return the end of a stream: the chunk with the number of tokens if the request wants it, or the error."""
        if error is not None:
            return event(error) + DONE
        if not self.body.wants_usage:
            return DONE
        return event(self._head(self.CHUNK_KIND) | {"choices": [], "usage": self._usage_so_far()}) + DONE

    # --- Differences between completions and chats ------------------------------------------------

    @abstractmethod
    def _choice(self, number: int, output: RequestOutput, one: CompletionOutput) -> Json:
        """Return one whole choice."""

    @abstractmethod
    def _first_chunks(
        self, number: int, prompt: Prompt, told: StreamedChoice, prompt_logprobs: PromptLogprobs | None
    ) -> Iterable[Json]:
        """Return the chunks that come before the first token of a choice."""

    @abstractmethod
    def _places(self, prompt: Prompt) -> Places | None:
        """Return a `Places` for the tokens of a choice; None if the answer has no offsets."""

    @abstractmethod
    def _choice_pieces(self, number: int, new: CompletionUpdate, told: StreamedChoice) -> Iterable[Json]:
        """Return the chunks for an update of a choice."""

    @abstractmethod
    def _beside(self, prompt_logprobs: list[list[Json | None] | None], choices: list[Json]) -> Json:
        """Add the prompts' log-probabilities to the choices, or return them as fields of the answer."""

    def _calls(self, prompt: Prompt) -> ChoiceCalls | None:
        """Return a reader of a choice's tool calls; None if it is to have none."""
        return None

    # --- Shared parts -----------------------------------------------------------------------------

    def _number(self, place: int, index: int) -> int:
        return place * (self.body.n or 1) + index

    def _num_generated(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def _of_prompt(self, prompt: Prompt, prompt_logprobs: PromptLogprobs | None) -> Json:
        """Return the fields about a prompt that a stream sends once per choice, besides the prompt's text."""
        said: Json = {"prompt_token_ids": list(prompt.token_ids)} if self.body.return_token_ids else {}
        if (ranked := self._prompt_logprobs(prompt.token_ids, prompt_logprobs)) is not None:
            said["prompt_logprobs"] = ranked
        return said

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, content: Json) -> bytes:
        chunk = self._head(self.CHUNK_KIND) | content
        if self.body.wants_usage_always:
            chunk["usage"] = self._usage_so_far()
        return event(chunk)

    def _usage_so_far(self) -> Json:
        return self._usage(sum(told.num_tokens for told in self._told.values()), self._num_cached)

    def _usage(self, num_generated: int, num_cached: int) -> Json:
        num_prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _prompt_logprobs(
        self, token_ids: Sequence[int], prompt_logprobs: PromptLogprobs | None
    ) -> list[Json | None] | None:
        """Return the prompt's log-probabilities in vLLM's form: for each token a dict {token id: log-probability and
        rank}. It is null for the first token. A rank beyond the requested number is null."""
        if self.body.prompt_logprobs is None or prompt_logprobs is None:
            return None
        number = self.body.prompt_logprobs
        both = zip(token_ids, prompt_logprobs, strict=True)
        return [None if of is None else self._ranked(only(number, token, of), number) for token, of in both]

    def _ranked(self, logprobs: Mapping[int, float], num_ranked: int) -> Json:
        return {
            str(token_id): {
                "logprob": max(logprob, LEAST_LOGPROB),
                "rank": place if place <= num_ranked else None,
                "decoded_token": self.tokens.text_of(token_id),
            }
            for place, (token_id, logprob) in enumerate(logprobs.items(), 1)
        }


class CompletionAnswer(Answer):
    """The answer to POST /v1/completions."""

    KIND = "text_completion"
    CHUNK_KIND = "text_completion"
    body: CompletionBody

    def _choice(self, number: int, output: RequestOutput, one: CompletionOutput) -> Json:
        prompt = self.prompts[number // (self.body.n or 1)]
        generated, text, logprobs = one.token_ids, one.text, self._logprobs(one.token_ids, one.logprobs, prompt)
        if self._only_echo:
            generated, text, logprobs = (), "", self._logprobs((), one.logprobs, prompt)
        if self.body.echo:
            text = self._prompt_text(prompt) + text
            logprobs = _joined(self._logprobs_of_prompt(prompt, output.prompt_logprobs), logprobs)
        choice: Json = {
            "index": number,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length" if self._only_echo else one.finish_reason,
            "stop_reason": None if self._only_echo else one.stop_reason,
        }
        if self.body.return_token_ids:
            choice |= {"token_ids": list(generated), "prompt_token_ids": list(output.prompt_token_ids)}
        return choice

    def _num_generated(self, token_ids: Sequence[int]) -> int:
        return 0 if self._only_echo else len(token_ids)

    @property
    def _only_echo(self) -> bool:
        """Whether the answer is only the prompt. The engine then generates one token, which is dropped."""
        return self.body.max_tokens == 0

    def _first_chunks(
        self, number: int, prompt: Prompt, told: StreamedChoice, prompt_logprobs: PromptLogprobs | None
    ) -> Iterable[Json]:
        if self.body.echo:
            shown = {"text": self._prompt_text(prompt), "logprobs": self._logprobs_of_prompt(prompt, prompt_logprobs)}
            nothing = {"finish_reason": None, "stop_reason": None}
            yield {"choices": [{"index": number} | shown | nothing | told.take_first()]}

    def _choice_pieces(self, number: int, new: CompletionUpdate, told: StreamedChoice) -> Iterable[Json]:
        generated = () if self._only_echo else new.new_token_ids
        logprobs = None
        if told.places and new.new_logprobs is not None and not self._only_echo:
            logprobs = self._with_places(generated, new.new_logprobs, told.places.of(generated))
        choice: Json = {
            "index": number,
            "text": "" if self._only_echo else new.new_text,
            "logprobs": logprobs,
            "finish_reason": "length" if self._only_echo and new.finish_reason else new.finish_reason,
            "stop_reason": None if self._only_echo else new.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(generated)
        yield choice | told.take_first()

    def _beside(self, prompt_logprobs: list[list[Json | None] | None], choices: list[Json]) -> Json:
        for choice in choices:
            choice["prompt_logprobs"] = prompt_logprobs[choice["index"] // (self.body.n or 1)]
        return {}

    def _prompt_text(self, prompt: Prompt) -> str:
        """Return the prompt's text. A prompt of token ids is shown with its special tokens. If it ends within a
        character, that character is left to the generated text, if there is any."""
        if prompt.text is not None:
            return prompt.text
        if prompt.echo is None:
            shown, decode = prompt.token_ids, self.tokens.decode_all
            prompt.echo = decode(shown) if self._only_echo else text_without_end(shown, decode)
        return prompt.echo

    def _places(self, prompt: Prompt) -> Places | None:
        if self.body.logprobs is None:
            return None
        return Places(self.tokens, prompt, len(self._prompt_text(prompt)) if self.body.echo else 0)

    def _logprobs(self, token_ids: Sequence[int], logprobs: Logprobs | None, prompt: Prompt) -> Json | None:
        """Return the log-probabilities of an output."""
        places = self._places(prompt)
        if logprobs is None or places is None:
            return None
        return self._with_places(token_ids, logprobs[: len(token_ids)], places.of(token_ids))

    def _logprobs_of_prompt(self, prompt: Prompt, logprobs: PromptLogprobs | None) -> Json | None:
        """Return the log-probabilities of an echoed prompt, with the same number per token as for the output."""
        if self.body.logprobs is None or logprobs is None:
            return None
        if prompt.echoed_logprobs is None:
            both = zip(prompt.token_ids, logprobs, strict=True)
            asked = [None if of is None else only(self.body.logprobs, token, of) for token, of in both]
            places = places_in_prompt(prompt, self.tokens)
            prompt.echoed_logprobs = self._with_places(prompt.token_ids, asked, places)
        return prompt.echoed_logprobs

    def _with_places(
        self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, float] | None], places: list[int]
    ) -> Json:
        both = list(zip(token_ids, logprobs, strict=True))
        return {
            "text_offset": places,
            "token_logprobs": [None if of is None else max(of[token], LEAST_LOGPROB) for token, of in both],
            "tokens": [self.tokens(token) for token in token_ids],
            "top_logprobs": [None if of is None else self._by_text(token, of) for token, of in both],
        }

    def _by_text(self, chosen: int, logprobs: Mapping[int, float]) -> Json:
        """Return log-probabilities by the tokens' texts, the likeliest first. If several tokens have one text, such as
        parts of characters, only one of them is kept: the chosen one, or else the likeliest."""
        by_text: Json = {}
        for token, logprob in logprobs.items():
            by_text.setdefault(self.tokens(token), max(logprob, LEAST_LOGPROB))
        return by_text | {self.tokens(chosen): max(logprobs[chosen], LEAST_LOGPROB)}


def _joined(first: Json | None, second: Json | None) -> Json | None:
    """Return the log-probabilities of a prompt, followed by those of its output."""
    if first is None or second is None:
        return second
    return {name: [*first[name], *second[name]] for name in first}


@dataclass
class ChatAnswer(Answer):
    """The answer to POST /v1/chat/completions."""

    KIND = "chat.completion"
    CHUNK_KIND = "chat.completion.chunk"
    body: ChatBody
    call_source: CallSource | None = None
    """Makes the readers of tool calls; None if the answer is to have none."""

    def num_told(self, outputs: Sequence[RequestOutput]) -> int:
        """Return the number of tokens that `whole` reports one by one, or that it reads for calls."""
        if self.call_source:
            return sum(len(one.token_ids) for output in outputs for one in output.outputs)
        return super().num_told(outputs)

    def _choice(self, number: int, output: RequestOutput, one: CompletionOutput) -> Json:
        message: Json = {"role": self._role, "content": self._echo + one.text}
        reason: str | None = one.finish_reason
        if calls := self._calls(self.prompts[0]):
            content, told = joined(calls.read(one.text, one.token_ids, is_last=True), calls.id_of)
            message["content"] = self._echo + content
            reason = calls.finish_reason(reason)
            if told:
                message |= {"content": message["content"] or None, "tool_calls": told}
        choice: Json = {
            "index": number,
            "message": message,
            "logprobs": None if one.logprobs is None else self._logprobs(one.token_ids, one.logprobs),
            "finish_reason": reason,
            "stop_reason": one.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(one.token_ids)
        return choice

    def _calls(self, prompt: Prompt) -> ChoiceCalls | None:
        return calls_of(self.call_source, self.tokens, prompt)

    @property
    def _echo(self) -> str:
        """The message that the answer continues, which is repeated before the new text; "" without `echo`."""
        last = self.body.messages[-1]
        if not self.body.echo or last.get("role") != self._role:
            return ""
        return str(with_plain_content(last)["content"])

    @property
    def _role(self) -> str:
        last = self.body.messages[-1].get("role")
        return str(last) if self.body.continue_final_message and last else "assistant"

    def _first_chunks(
        self, number: int, prompt: Prompt, told: StreamedChoice, prompt_logprobs: PromptLogprobs | None
    ) -> Iterable[Json]:
        nothing = {"logprobs": None, "finish_reason": None}
        role = {"index": number, "delta": {"role": self._role, "content": ""}}
        yield {"choices": [role | nothing]} | told.take_first()
        if self._echo:
            yield {"choices": [{"index": number, "delta": {"content": self._echo}} | nothing]}

    def _places(self, prompt: Prompt) -> None:
        return None

    def _choice_pieces(self, number: int, new: CompletionUpdate, told: StreamedChoice) -> Iterable[Json]:
        pieces: Sequence[Piece] = [new.new_text]
        reason = new.finish_reason
        if calls := told.calls:
            pieces = calls.read(new.new_text, new.new_token_ids, is_last=reason is not None)
            reason = calls.finish_reason(reason)
        deltas = [self._delta(piece, calls) for piece in pieces]
        if not deltas and (reason or new.new_logprobs or self.body.return_token_ids):
            deltas = [{}]
        for place, delta in enumerate(deltas, 1):
            yield {"index": number, "delta": delta} | self._beside_delta(new, reason, place == 1, place == len(deltas))

    def _delta(self, piece: Piece, calls: ChoiceCalls | None) -> Json:
        if isinstance(piece, str) or calls is None:
            return {"content": piece}
        if piece.name is None:
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.arguments}}]}
        function = {"name": piece.name, "arguments": piece.arguments}
        call = {"index": piece.index, "id": calls.id_of(piece.index), "type": "function", "function": function}
        return {"tool_calls": [call]}

    def _beside_delta(self, new: CompletionUpdate, reason: str | None, is_first: bool, is_last: bool) -> Json:
        """Return the other fields of a chunk. The first chunk of an update has its tokens, the last its end."""
        logprobs = new.new_logprobs if is_first else None
        beside: Json = {
            "logprobs": None if logprobs is None else self._logprobs(new.new_token_ids, logprobs),
            "finish_reason": reason if is_last else None,
        }
        if beside["finish_reason"]:
            beside["stop_reason"] = new.stop_reason
        if self.body.return_token_ids and is_first:
            beside["token_ids"] = list(new.new_token_ids)
        return beside

    def _beside(self, prompt_logprobs: list[list[Json | None] | None], choices: list[Json]) -> Json:
        beside: Json = {"prompt_logprobs": prompt_logprobs[0]}
        if self.body.return_token_ids:
            beside["prompt_token_ids"] = list(self.prompts[0].token_ids)
        return beside

    def _logprobs(self, token_ids: Sequence[int], logprobs: Logprobs) -> Json:
        number = MOST_LOGPROB_TOKENS if self.body.logprob_token_ids else self.body.top_logprobs or 0
        both = zip(token_ids, logprobs, strict=True)
        return {"content": [self.tokens.ranking(token, of, number) for token, of in both]}


def only(number: int, token_id: int, logprobs: Mapping[int, float]) -> dict[int, float]:
    """Return the first `number` log-probabilities, which are sorted, and the token's own."""
    return dict(list(logprobs.items())[:number]) | {token_id: logprobs[token_id]}
