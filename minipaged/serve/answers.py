"""What the server answers: the engine's updates as OpenAI's JSON, whole or in pieces.

One `Answer` for each HTTP request. It may be about several requests of the engine (a prompt each) with several
sequences each: choice number prompt x n + sequence. Pieces are plain dicts, encoded at once: an object of pydantic's
for each would cost ten times as much, in every step for every stream.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from minipaged.async_llm import Asked
from minipaged.outputs import CompletionOutput, CompletionUpdate, RequestOutput, RequestUpdate
from minipaged.params import BeamSearchParams, SamplingParams
from minipaged.serve.protocol import ChatBody, CompletionBody, SamplingBody

Json = dict[str, Any]
Logprobs = Sequence[Mapping[int, float]]
LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity."""

DONE = b"data: [DONE]\n\n"


def event(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


@dataclass(slots=True)
class Tokens:
    """How single tokens are written in an answer."""

    text_of: Callable[[int], str]
    decode: Callable[[Sequence[int]], str]
    """All of them together: a character may be spread over several."""
    as_ids: bool
    """As "token_id:17", which is exact where a token is no whole character."""

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else self.text_of(token_id)


@dataclass(slots=True)
class Told:
    """What a stream has said of one choice."""

    num_tokens: int = 0
    num_characters: int = 0


@dataclass(slots=True)
class Prompt:
    """One prompt of an HTTP request: its text where it was given as text, and its tokens."""

    text: str | None
    token_ids: Sequence[int]


@dataclass
class Answer(ABC):
    """To one HTTP request."""

    KIND: ClassVar[str]
    CHUNK_KIND: ClassVar[str]
    id: str
    engine_id: str
    """What the engine calls it, of which there is no other."""
    model: str
    body: SamplingBody
    prompts: Sequence[Prompt]
    tokens: Tokens
    params: Sequence[SamplingParams | BeamSearchParams] = ()
    """Of each prompt."""
    created: int = field(default_factory=lambda: int(time.time()))
    _told: dict[int, Told] = field(default_factory=dict)
    _num_cached: int = 0

    @cached_property
    def request_ids(self) -> list[str]:
        """The engine's requests: several are numbered."""
        number = len(self.prompts)
        return [self.engine_id] if number == 1 else [f"{self.engine_id}-{place}" for place in range(number)]

    def asked(self) -> list[Asked]:
        """What is asked of the engine."""
        return [
            Asked(request_id, prompt.token_ids, params, prompt.text, self.body.priority or 0)
            for request_id, prompt, params in zip(self.request_ids, self.prompts, self.params, strict=True)
        ]

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The answer in one piece."""
        choices = [
            self._choice(self._number(place, one.index), output, one)
            for place, output in enumerate(outputs)
            for one in output.outputs
        ]
        num_generated = sum(self._num_generated(one) for output in outputs for one in output.outputs)
        num_cached = sum(output.num_cached_tokens for output in outputs)
        answer = self._head(self.KIND) | {"choices": choices, "usage": self._usage(num_generated, num_cached)}
        prompt_logprobs = [self._prompt_logprobs(output) for output in outputs]
        return answer | self._beside(prompt_logprobs, choices)

    def pieces(self, update: RequestUpdate) -> Iterator[bytes]:
        """The chunks that tell what is new of one request."""
        place = self.request_ids.index(update.request_id) if len(self.prompts) > 1 else 0
        if update.output:
            self._num_cached += update.output.num_cached_tokens
        for new in update.completions:
            number = self._number(place, new.index)
            told = self._told.get(number)
            if told is None:
                told = self._told[number] = Told()
                yield from (self._chunk(first) for first in self._first_choices(number, self.prompts[place], told))
            told.num_tokens += len(new.new_token_ids)
            if new.new_text or new.finish_reason or new.new_logprobs or self.body.return_token_ids:
                yield self._chunk(self._choice_piece(number, new, told))
                told.num_characters += len(new.new_text)

    def usage_piece(self) -> bytes:
        """The last chunk, which counts the tokens."""
        return event(self._head(self.CHUNK_KIND) | {"choices": [], "usage": self._usage_so_far()})

    # --- What the two ways to generate have of their own ------------------------------------------

    @abstractmethod
    def _choice(self, number: int, output: RequestOutput, one: CompletionOutput) -> Json:
        """One whole choice."""

    @abstractmethod
    def _first_choices(self, number: int, prompt: Prompt, told: Told) -> Iterable[Json]:
        """What comes before the first token of a choice, in a chunk each."""

    @abstractmethod
    def _choice_piece(self, number: int, new: CompletionUpdate, told: Told) -> Json:
        """What is new of a choice."""

    @abstractmethod
    def _beside(self, prompt_logprobs: list[list[Json | None] | None], choices: list[Json]) -> Json:
        """Where the log-probabilities of the prompts go: into the choices, or beside them (returned)."""

    # --- What they share --------------------------------------------------------------------------

    def _number(self, place: int, index: int) -> int:
        return place * (self.body.n or 1) + index

    def _num_generated(self, one: CompletionOutput) -> int:
        return len(one.token_ids)

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choice: Json) -> bytes:
        chunk = self._head(self.CHUNK_KIND) | {"choices": [choice]}
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

    def _prompt_logprobs(self, output: RequestOutput) -> list[Json | None] | None:
        """As vLLM has them: for each token of the prompt {token id: its log-probability and rank}; null for the first,
        and the rank null where it is beyond those that were asked for."""
        if self.body.prompt_logprobs is None or output.prompt_logprobs is None:
            return None
        number = self.body.prompt_logprobs
        both = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
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
    """To /v1/completions."""

    KIND = "text_completion"
    CHUNK_KIND = "text_completion"
    body: CompletionBody

    def _choice(self, number: int, output: RequestOutput, one: CompletionOutput) -> Json:
        prompt = self.prompts[number // (self.body.n or 1)]
        token_ids, logprobs, text = one.token_ids, one.logprobs, one.text
        if self._only_echo:
            token_ids, logprobs, text = (), () if logprobs is not None else None, ""
        if self.body.echo:
            text = self._prompt_text(prompt) + text
            token_ids = (*output.prompt_token_ids, *token_ids)
            if logprobs is not None:
                both = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
                asked = self.body.logprobs or 0
                of_prompt = (None if of is None else only(asked, token, of) for token, of in both)
                logprobs = (*of_prompt, *logprobs)  # type: ignore[arg-type]
        choice: Json = {
            "index": number,
            "text": text,
            "logprobs": None if logprobs is None else self._logprobs(token_ids, logprobs, 0),
            "finish_reason": "length" if self._only_echo else one.finish_reason,
            "stop_reason": None if self._only_echo else one.stop_reason,
        }
        if self.body.return_token_ids:
            generated = [] if self._only_echo else list(one.token_ids)
            choice |= {"token_ids": generated, "prompt_token_ids": list(output.prompt_token_ids)}
        return choice

    def _num_generated(self, one: CompletionOutput) -> int:
        return 0 if self._only_echo else len(one.token_ids)

    @property
    def _only_echo(self) -> bool:
        """Nothing is to be generated; the engine has made one token, for the prompt's sake."""
        return self.body.max_tokens == 0

    def _first_choices(self, number: int, prompt: Prompt, told: Told) -> Iterable[Json]:
        if self.body.echo:
            text = self._prompt_text(prompt)
            told.num_characters += len(text)
            yield {"index": number, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def _choice_piece(self, number: int, new: CompletionUpdate, told: Told) -> Json:
        logprobs = new.new_logprobs
        choice: Json = {
            "index": number,
            "text": new.new_text,
            "logprobs": None if logprobs is None else self._logprobs(new.new_token_ids, logprobs, told.num_characters),
            "finish_reason": new.finish_reason,
            "stop_reason": new.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(new.new_token_ids)
        return choice

    def _beside(self, prompt_logprobs: list[list[Json | None] | None], choices: list[Json]) -> Json:
        for choice in choices:
            choice["prompt_logprobs"] = prompt_logprobs[choice["index"] // (self.body.n or 1)]
        return {}

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self.tokens.decode(prompt.token_ids)

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, float] | None], offset: int) -> Json:
        texts = [self.tokens(token_id) for token_id in token_ids]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        chosen = [
            None if of is None else max(of[token], LEAST_LOGPROB) for token, of in zip(token_ids, logprobs, strict=True)
        ]
        top = [
            None if of is None else {self.tokens(token): max(logprob, LEAST_LOGPROB) for token, logprob in of.items()}
            for of in logprobs
        ]
        return {"text_offset": offsets, "token_logprobs": chosen, "tokens": texts, "top_logprobs": top}


class ChatAnswer(Answer):
    """To /v1/chat/completions."""

    KIND = "chat.completion"
    CHUNK_KIND = "chat.completion.chunk"
    body: ChatBody

    def _choice(self, number: int, output: RequestOutput, one: CompletionOutput) -> Json:
        content = (self.body.messages[-1].get("content") or "") + one.text if self._echoes else one.text
        choice: Json = {
            "index": number,
            "message": {"role": self._role, "content": content},
            "logprobs": None if one.logprobs is None else self._logprobs(one.token_ids, one.logprobs),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(one.token_ids)
        return choice

    @property
    def _echoes(self) -> bool:
        """The message that is continued comes back in front of what continues it."""
        last = self.body.messages[-1]
        return bool(self.body.echo and last.get("role") == self._role and isinstance(last.get("content"), str))

    @property
    def _role(self) -> str:
        last = self.body.messages[-1].get("role")
        return str(last) if self.body.continue_final_message and last else "assistant"

    def _first_choices(self, number: int, prompt: Prompt, told: Told) -> Iterable[Json]:
        yield {"index": number, "delta": {"role": self._role, "content": ""}, "logprobs": None, "finish_reason": None}

    def _choice_piece(self, number: int, new: CompletionUpdate, told: Told) -> Json:
        logprobs = new.new_logprobs
        choice: Json = {
            "index": number,
            "delta": {"content": new.new_text},
            "logprobs": None if logprobs is None else self._logprobs(new.new_token_ids, logprobs),
            "finish_reason": new.finish_reason,
        }
        if new.finish_reason:
            choice["stop_reason"] = new.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = list(new.new_token_ids)
        return choice

    def _beside(self, prompt_logprobs: list[list[Json | None] | None], choices: list[Json]) -> Json:
        beside: Json = {"prompt_logprobs": prompt_logprobs[0]}
        if self.body.return_token_ids:
            beside["prompt_token_ids"] = list(self.prompts[0].token_ids)
        return beside

    def _logprobs(self, token_ids: Sequence[int], logprobs: Logprobs) -> Json:
        return {"content": [self._ranking(token, of) for token, of in zip(token_ids, logprobs, strict=True)]}

    def _ranking(self, token_id: int, logprobs: Mapping[int, float]) -> Json:
        likeliest = list(logprobs.items())[: self.body.top_logprobs or 0]
        return self._entry(token_id, logprobs[token_id]) | {"top_logprobs": [self._entry(*one) for one in likeliest]}

    def _entry(self, token_id: int, logprob: float) -> Json:
        text = self.tokens(token_id)
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(text.encode())}


def only(number: int, token_id: int, logprobs: Mapping[int, float]) -> dict[int, float]:
    """Of these log-probabilities, which are in order, those of the `number` likeliest, and the token's own."""
    return dict(list(logprobs.items())[:number]) | {token_id: logprobs[token_id]}
