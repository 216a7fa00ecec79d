"""A served model: turns the body of an HTTP request into requests for the engine, with tokens and parameters."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol, TypeVar

from minipaged.async_llm import LONG_TEXT, AsyncLLM, AsyncRequest
from minipaged.engine.grouped_memory import pool_tokens
from minipaged.errors import InvalidRequest, MinipagedError
from minipaged.models.config import ModelConfig
from minipaged.models.tokenizer import ChatOptions, Tokenizer
from minipaged.outputs import RequestOutput, RequestUpdate
from minipaged.params import BeamSearchParams, EngineConfig, SamplingParams, StructuredOutputsParams, truncated
from minipaged.serve.answers import ChatAnswer, CompletionAnswer, Json, Prompt, Tokens
from minipaged.serve.call_parsers import FAMILIES, ParserName, family_name
from minipaged.serve.live.watch import Watch
from minipaged.serve.metrics import Metrics
from minipaged.serve.protocol import (
    COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    SamplingBody,
    TokenizeBody,
)
from minipaged.serve.response_bodies import ResponsesBody
from minipaged.serve.responses import ResponseAnswer
from minipaged.serve.settings import ServeSettings
from minipaged.serve.tools import CallSource, Tools

Result = TypeVar("Result")


class UnknownModel(MinipagedError):
    """A request names a model that is not served."""


class TooLong(InvalidRequest):
    """The field `param` asks for more tokens than a sequence may have. The code is OpenAI's, by which clients recognize
    that they must send less."""

    code = "context_length_exceeded"

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class UpdateStream(Protocol):
    """The updates of some requests. `async_llm.Stream` implements it."""

    def __aiter__(self) -> AsyncIterator[RequestUpdate]: ...

    async def outputs(self) -> list[RequestOutput]: ...

    def close(self) -> None: ...


class Model(Protocol):
    """The attributes of a served model that this room uses. `LLM` has them."""

    folder: Path
    config: EngineConfig
    model_config: ModelConfig

    def need_tokenizer(self) -> Tokenizer: ...


class ServedEngine(Protocol):
    """The engine of a served model: an `AsyncLLM`, or several of them (`replicas/`)."""

    @property
    def llm(self) -> Model: ...

    async def add(self, asked: Sequence[AsyncRequest], *, finals_only: bool = False) -> UpdateStream: ...

    async def tokenizing(self, num_characters: int, call: Callable[[], Result]) -> Result: ...


class Words(ABC):
    """A served model, with its tokenizer and the names that clients use for it."""

    watch: Watch | None = None
    """The source of the live page; None if the server has no page."""
    no_page = "the server was started with --no-page"
    """Why the server has no live page, if it has none."""

    def __init__(self, allm: ServedEngine, names: Sequence[str], settings: ServeSettings | None = None) -> None:
        self.allm = allm
        self.names = names
        settings = settings or ServeSettings()
        self._trust_chat_templates = settings.trust_request_chat_template
        self._chat_template = settings.chat_template
        self._parser = settings.tool_call_parser
        self._config = allm.llm.config
        self._bytes_of = lru_cache(self._config.vocab_size)(lambda token_id: self._tokenizer.token_bytes(token_id))

    @abstractmethod
    async def check_health(self) -> None:
        """Raise EngineDead or ShuttingDown if the engine accepts no requests."""

    @abstractmethod
    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics and their content type. `accept`: the Accept header of the scrape."""

    @property
    def is_bound_by_pool(self) -> bool:
        """Whether the pool limits the length of a sequence, and not the model's context length or `max_model_len`."""
        length, made_for = self._config.max_model_len, self.allm.llm.model_config.max_position_embeddings
        return length == pool_tokens(self._config) < made_for

    def warm_up(self) -> None:
        """Encode a conversation, which imports a library. Otherwise the first client would wait for that."""
        with suppress(Exception):  # a request for a chat will get the error
            self._tokenizer.encode_chat([{"role": "user", "content": ""}], chat_template=self._chat_template)

    async def completion(self, body: CompletionBody, answer_id: str, engine_id: str) -> CompletionAnswer:
        """Prepare the answer to a completion, with its requests for the engine. Raises InvalidRequest, UnknownModel."""
        self.check_model(body.model)
        body.check()
        max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        prompts = await self._prompts(body, max_tokens)
        prompt_logprobs = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
        answer = CompletionAnswer(answer_id, engine_id, self._name(body.model), body, prompts, self._tokens(body))
        answer.params = [
            body.params(self._most(prompt, body, max(1, max_tokens)), prompt_logprobs) for prompt in prompts
        ]
        return answer

    async def chat(self, body: ChatBody, answer_id: str, engine_id: str) -> ChatAnswer:
        """Prepare the answer to a chat, with its request for the engine. Raises InvalidRequest, UnknownModel."""
        self.check_model(body.model)
        body.check()
        tools = body.asked_tools()
        token_ids = await self._encode_chat(body.messages, self._chat_options(body, tools))
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        max_tokens: int | None = getattr(body, name)
        prompts = [self._prompt(None, token_ids, body, max_tokens)]
        answer = ChatAnswer(answer_id, engine_id, self._name(body.model), body, prompts, self._tokens(body))
        params = body.params(self._most(prompts[0], body, max_tokens, name, "messages"), body.prompt_logprobs)
        if tools:
            answer.call_source = await self._call_source(tools, body)
            params = held_to(params, tools.schema_of_calls())
        answer.params = [params]
        return answer

    async def respond(self, body: ResponsesBody, answer_id: str, engine_id: str) -> ResponseAnswer:
        """Prepare the answer to POST /v1/responses, with its request for the engine. Raises InvalidRequest and
        UnknownModel."""
        self.check_model(body.model)
        body.check()
        tools = body.asked_tools()
        conversation = body.read_input()
        self._check_length(sum(map(num_characters, conversation.messages)), "input")
        if conversation.calls:
            await asyncio.to_thread(conversation.parse_calls)
        options: ChatOptions = {"tools": tools.functions if tools else None, "chat_template": self._chat_template}
        token_ids = await self._encode_chat(conversation.messages, options)
        prompt = self._prompt(None, token_ids, body, body.max_output_tokens)
        most = self._most(prompt, body, body.max_output_tokens, "max_output_tokens", "input")
        params, source = body.params(most, None), None
        if tools:
            source = await self._call_source(tools, body)
            params = held_to(params, tools.schema_of_calls())
        tokens, name = self._tokens(body), self._name(body.model)
        return ResponseAnswer(answer_id, engine_id, name, body, prompt, tokens, params, source)

    async def _call_source(self, tools: Tools, body: SamplingBody) -> CallSource:
        """Return the source of readers of tool calls. A marker that is a special token is not in the text, unless the
        request asks for special tokens."""
        parser = await self._parser_name()
        hides = body.skip_special_tokens is not False and not tools.forced
        ids, special = self._tokenizer.added_tokens, self._tokenizer.special_token_ids
        stand_ins = FAMILIES[parser].stand_ins if hides else {}
        hidden = {ids[marker]: each for marker, each in stand_ins.items() if ids.get(marker) in special}
        return CallSource(tools, parser, hidden)

    async def _parser_name(self) -> ParserName:
        if self._parser == "auto":
            template_text = partial(self._tokenizer.template_text, self._chat_template, for_tools=True)
            self._parser = family_name(await asyncio.to_thread(template_text), self._tokenizer.added_tokens)
        return self._parser

    async def tokenize(self, body: TokenizeBody) -> Json:
        """Return the tokens of a prompt or a conversation, in the form of vLLM's /tokenize."""
        self.check_model(body.model)
        body.check()
        if body.prompt is not None:
            [tokens] = await self._encode([body.prompt], body.add_special_tokens)
        else:
            assert body.messages is not None
            tokens = await self._encode_chat(body.messages, self._chat_options(body, body.asked_tools()))
        names = [self._tokenizer.token_name(token) for token in tokens] if body.return_token_strs else None
        length = self._config.max_model_len
        return {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": names}

    async def detokenize(self, body: DetokenizeBody) -> Json:
        """Return the text of tokens, including special ones."""
        self.check_model(body.model)
        self._check_tokens(body.tokens)
        decode = partial(self._tokenizer.decode, skip_special_tokens=False)
        return {"prompt": await asyncio.to_thread(decode, body.tokens)}

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModel if no model of this name is served. A request may leave the name out."""
        if name and name not in self.names:
            raise UnknownModel(f"there is no model {name[:200]!r} here; there is {', '.join(map(repr, self.names))}")

    def card(self, name: str, created: int) -> Json:
        """Return the model's entry in /v1/models, under one of its names."""
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "minipaged",
            "root": str(self.allm.llm.folder),
            "parent": None,
            "max_model_len": self._config.max_model_len,
            "permission": [],
        }

    def _name(self, asked: str | None) -> str:
        return asked or self.names[0]

    # --- Tokens -----------------------------------------------------------------------------------

    @property
    def _tokenizer(self) -> Tokenizer:
        return self.allm.llm.need_tokenizer()

    async def _prompts(self, body: CompletionBody, max_tokens: int) -> list[Prompt]:
        given = body.prompts()
        if isinstance(given[0], str):
            texts: list[str] = given
            if body.truncate_prompt_tokens is None:
                self._check_length(max(map(len, texts)), "prompt")
            encoded = await self._encode(texts, body.add_special_tokens)
            return [self._prompt(*both, body, max_tokens) for both in zip(texts, encoded, strict=True)]
        return [self._prompt(None, tokens, body, max_tokens) for tokens in given]

    def _prompt(self, text: str | None, tokens: Sequence[int], body: SamplingBody, max_tokens: int | None) -> Prompt:
        """Return the prompt, truncated to `truncate_prompt_tokens` if that is given. -1 keeps as many tokens as leave
        room for `max_tokens`. Raises InvalidRequest for a prompt without tokens."""
        if not tokens:
            raise InvalidRequest("prompt is empty; give it at least one token")
        most = body.truncate_prompt_tokens
        if most == -1:
            most = max(1, self._config.max_model_len - max(1, max_tokens or 1))
        kept = truncated(tokens, most, body.truncation_side or "left")
        return Prompt(text if len(kept) == len(tokens) else None, kept)

    def _check_length(self, num_characters: int, param: str) -> None:
        """Raise TooLong if any text of this length has too many tokens. To tokenize it first would take seconds."""
        if self._tokenizer.least_tokens(num_characters) > self._config.max_model_len:
            raise TooLong(f"{self._longest}, and the prompt has {num_characters:,} characters; shorten it", param)

    @property
    def _longest(self) -> str:
        """The message for sequences that are too long. Some clients of OpenAI and vLLM shorten their prompts by it."""
        why = " (the pool of blocks holds no more)" if self.is_bound_by_pool else ""
        return f"this model's maximum context length is {self._config.max_model_len} tokens{why}"

    async def _encode(self, texts: Sequence[str], add_special_tokens: bool | None) -> list[list[int]]:
        encode = partial(self._tokenizer.encode, add_special_tokens=add_special_tokens is not False)
        return await self.allm.tokenizing(sum(map(len, texts)), lambda: list(map(encode, texts)))

    def _chat_options(self, body: ChatBody | TokenizeBody, tools: Tools | None) -> ChatOptions:
        """Return the options of the chat template. Raises InvalidRequest for a template that is not trusted."""
        if body.chat_template is not None and not self._trust_chat_templates:
            raise InvalidRequest(
                "chat_template is refused: a template is a program; the server takes them with "
                "--trust-request-chat-template"
            )
        return {
            "chat_template": body.chat_template or self._chat_template,
            "tools": tools.functions if tools else None,
            "add_generation_prompt": body.add_generation_prompt is not False,
            "continue_final_message": bool(body.continue_final_message),
            "chat_template_kwargs": body.chat_template_kwargs,
        }

    async def _encode_chat(self, messages: Sequence[Message], options: ChatOptions) -> list[int]:
        length = sum(map(num_characters, messages))
        self._check_length(length, "messages")
        encode = partial(self._tokenizer.encode_chat, messages, **options)
        if length <= LONG_TEXT:
            return await asyncio.to_thread(encode)  # the first call imports a library
        return await self.allm.tokenizing(length, encode)

    def _most(
        self,
        prompt: Prompt,
        body: SamplingBody,
        max_tokens: int | None,
        name: str = "max_tokens",
        of_prompt: str = "prompt",
    ) -> int | None:
        """Return `max_tokens`, lowered to the room that each sequence has; None, which generates as many tokens as fit,
        stays None.

        Raises TooLong if `max_tokens` (the field `name`) exceeds max_model_len, as in vLLM, if the prompt (the field
        `of_prompt`) leaves no room, or if `min_tokens` exceeds the room.
        """
        length, most = len(prompt.token_ids), self._config.max_model_len
        if max_tokens is not None and max_tokens > most:
            raise TooLong(f"{name} is {max_tokens}, and {self._longest}; lower it to that", name)
        if length >= most:
            raise TooLong(
                f"{self._longest}, and the prompt has {length}; shorten it, or give truncate_prompt_tokens", of_prompt
            )
        number = body.n or 1
        room = self._room(length, number)
        if body.min_tokens and body.min_tokens > room and not (max_tokens and body.min_tokens > max_tokens):
            several = f", and n is {number}" if number > 1 else ""
            raise TooLong(
                f"min_tokens is {body.min_tokens}; {self._longest}, the prompt has {length}{several}: "
                f"lower min_tokens to {room}, or shorten the prompt",
                "min_tokens",
            )
        return None if max_tokens is None else min(max_tokens, room)

    def _room(self, prompt_length: int, num_sequences: int) -> int:
        """Return the number of tokens that each of `num_sequences` sequences has room for. It is limited by
        max_model_len and by an equal share of the pool. The sequences share the prompt's full blocks, and the last
        token needs no slot."""
        room = self._config.max_model_len - prompt_length
        if num_sequences == 1:
            return room
        size = self._config.block_size
        shared = prompt_length // size
        blocks = shared + (self._config.num_blocks - shared) // num_sequences
        return max(1, min(room, blocks * size - prompt_length + 1))

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token >= self._config.vocab_size:
                raise InvalidRequest(f"tokens holds {token}; tokens are the numbers 0 to {self._config.vocab_size - 1}")

    def _tokens(self, body: SamplingBody) -> Tokens:
        decode, spaces = self._tokenizer.decode, body.spaces_between_special_tokens is not False
        decode_all = partial(decode, skip_special_tokens=False, spaces_between_special_tokens=spaces)
        shown = decode if body.skip_special_tokens is not False or body.use_beam_search else decode_all
        add_special_tokens = getattr(body, "add_special_tokens", None) is not False
        places = partial(self._tokenizer.places, add_special_tokens=add_special_tokens)
        return Tokens(self._bytes_of, places, shown, decode_all, bool(body.return_tokens_as_token_ids))


def num_characters(message: Message) -> int:
    """Return the length of what a template writes of a message: its content, and the arguments of its calls."""
    calls = message.get("tool_calls") or ()
    return len(str(message.get("content") or "")) + sum(len(str(call["function"].get("arguments"))) for call in calls)


def held_to(params: SamplingParams | BeamSearchParams, schema: Json | None) -> SamplingParams | BeamSearchParams:
    """Return the parameters with which the output is held to the schema of calls that it must be; the same ones if it
    need not be a call (None). A form that was asked for is one of the other answers, so a call that must be wins over
    it. Raises InvalidRequest if the model were to choose between the two, because a form leaves no room for a call."""
    assert isinstance(params, SamplingParams), "tools are refused with beam search"
    if schema is not None:
        return replace(params, structured_outputs=StructuredOutputsParams(json=schema))
    if params.structured_outputs:
        raise InvalidRequest(
            "tools are given, and a form of the answer, which would leave no room for a call; set tool_choice to "
            '"none" or "required", or leave out the form'
        )
    return params


class LocalModel(Words):
    """A model whose engine is in this process.

    `page`: whether to serve the live page. The engine must not have done anything yet.
    """

    allm: AsyncLLM

    def __init__(
        self, allm: AsyncLLM, names: Sequence[str], settings: ServeSettings | None = None, *, page: bool = False
    ) -> None:
        super().__init__(allm, names, settings)
        self.metrics = Metrics(names[0], self._config)
        allm.observers.append(self.metrics)
        self.watch = Watch.of(allm.llm.engine) if page else None

    async def check_health(self) -> None:
        self.allm.check_open()

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        return await asyncio.to_thread(self.metrics.exposition, accept)
