"""An engine that answers with the texts that a test gives it, behind the real application."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI

from minipaged.async_llm import AsyncRequest
from minipaged.engine.detokenizer import Detokenizer
from minipaged.models.tokenizer import Tokenizer
from minipaged.outputs import CompletionOutput, CompletionUpdate, RequestMetrics, RequestOutput, RequestUpdate
from minipaged.params import EngineConfig, SamplingParams
from minipaged.serve.app import create_app
from minipaged.serve.serving import Words
from minipaged.serve.settings import ServeSettings
from tests.serve.harness import run
from tests.tiny_model import write_byte_tokenizer

Json = dict[str, Any]
TEMPLATE = (Path(__file__).parent.parent.parent / "docs" / "assets" / "chatml_tools.jinja").read_text()
TOOLS: list[Json] = [
    {"type": "function", "function": {"name": name, "description": "it", "parameters": {"type": "object"}}}
    for name in ("f", "g")
]
ASKS: list[Json] = [{"role": "user", "content": "x"}]
RESULT = RequestMetrics(0, 0, 0, 0, 0)


@dataclass
class Stream:
    """The updates of one request."""

    updates: list[RequestUpdate]
    error: Exception | None = None

    async def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        for update in self.updates:
            yield update
        if self.error:
            raise self.error

    async def outputs(self) -> list[RequestOutput]:
        if self.error:
            raise self.error
        return [self.updates[-1].output]  # type: ignore[list-item]

    def close(self) -> None: ...


@dataclass
class ScriptedEngine:
    """Answers every request with `text`, in updates of `step` tokens."""

    tokenizer: Tokenizer
    text: str = ""
    step: int = 1
    longest: int = 2**20
    abort: bool = False
    """Whether the answer ends as if the server had aborted it."""
    failure: str | None = None
    """The reason why the engine fails at the end of the text."""
    death: Exception | None = None
    """The error of the stream after the text."""
    asked: list[AsyncRequest] = field(default_factory=list)

    @property
    def llm(self) -> Any:
        config = EngineConfig(vocab_size=400, max_model_len=self.longest, num_blocks=2**18)
        model = SimpleNamespace(max_position_embeddings=2**20)
        need = lambda: self.tokenizer  # noqa: E731
        return SimpleNamespace(folder=Path("m"), config=config, model_config=model, need_tokenizer=need)

    @property
    def prompt(self) -> str:
        """The text of the latest prompt."""
        return self.tokenizer.decode(self.asked[-1].prompt_token_ids, skip_special_tokens=False)

    async def tokenizing(self, num_characters: int, call: Callable[[], Any]) -> Any:
        return call()

    async def add(self, asked: Sequence[AsyncRequest], *, finals_only: bool = False) -> Stream:
        [one] = asked
        self.asked.append(one)
        assert isinstance(one.params, SamplingParams)
        updates = list(self._updates(one, one.params))
        return Stream(updates, self.death)

    def _updates(self, one: AsyncRequest, params: SamplingParams) -> Iterator[RequestUpdate]:
        shows = partial(self.tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        text = Detokenizer(shows, params.stop, prompt_token_ids=one.prompt_token_ids)
        token_ids, reason = [], "abort" if self.abort else "error" if self.failure else "stop"
        for token_id in self.tokenizer.encode(self.text, add_special_tokens=False):
            text.add(token_id)
            token_ids.append(token_id)
            if text.stopped_by:
                break
            if len(token_ids) == params.max_tokens:
                reason = "length"
                break
            if len(token_ids) % self.step == 0:
                yield self._update(one, params, token_ids[-self.step :], text.take(), None)
        else:
            if reason == "stop":
                token_ids.append(2)  # the end token, which has no text
        text.finish()
        logprobs = None if params.logprobs is None else tuple({token: -1.0} for token in token_ids)
        output = CompletionOutput(0, text.text, tuple(token_ids), 0.0, logprobs, reason, text.stopped_by)
        rest = token_ids[len(token_ids) - 1 - (len(token_ids) - 1) % self.step :] if token_ids else []
        update = self._update(one, params, rest, text.take(), reason)
        ended = reason in ("stop", "length")
        update.output = RequestOutput(
            one.request_id, None, tuple(one.prompt_token_ids), (output,), ended, 3, RESULT, self.failure
        )
        yield update

    def _update(
        self, one: AsyncRequest, params: SamplingParams, new: list[int], text: str, reason: str | None
    ) -> RequestUpdate:
        logprobs = None if params.logprobs is None else tuple({token: -1.0} for token in new)
        return RequestUpdate(
            one.request_id, (CompletionUpdate(0, tuple(new), text, logprobs, reason, None),), None, None
        )


class Served(Words):
    """The served model."""

    async def check_health(self) -> None: ...

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        return b"", ""


@dataclass
class Script:
    """An application in front of a scripted engine."""

    engine: ScriptedEngine
    app: FastAPI

    @classmethod
    def make(cls, folder: Path, special: Sequence[str] = (), longest: int = 2**20, **settings: Any) -> Script:
        """`special`: special tokens that the tokenizer has beside its own. `longest`: the longest sequence."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        write_byte_tokenizer(folder, chat_template=True)
        if special:
            backend = Backend.from_file(str(folder / "tokenizer.json"))
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
            backend.save(str(folder / "tokenizer.json"))
        engine = ScriptedEngine(Tokenizer(folder), longest=longest)
        serving = Served(engine, ["tiny"], ServeSettings(**{"chat_template": TEMPLATE} | settings))
        return cls(engine, create_app(serving))

    def post(self, path: str, body: Json, text: str = "", step: int = 1) -> httpx.Response:
        """The response to a body, where the model answers with `text`."""
        self.engine.text, self.engine.step = text, step

        async def work() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://tiny") as client:
                return await client.post(path, json=body)

        return run(work)

    def answered(self, path: str, body: Json, text: str = "", step: int = 1) -> Json:
        answer = self.post(path, body, text, step)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def refused(self, path: str, body: Json) -> Json:
        answer = self.post(path, body)
        assert answer.status_code == 400, answer.text
        return dict(answer.json()["error"])

    def chunks(self, path: str, body: Json, text: str = "", step: int = 1) -> list[Json]:
        """The data of the events of a stream, without `[DONE]`."""
        answer = self.post(path, {**body, "stream": True}, text, step)
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def chat(self, text: str, step: int | None = None, **fields: Any) -> Json:
        """The choice of an answer with tools: whole, or streamed in steps of so many tokens and put together."""
        body = {"messages": ASKS, "tools": TOOLS, **fields}
        if step is None:
            [choice] = self.answered("/v1/chat/completions", body, text)["choices"]
            return dict(choice)
        choices = [chunk["choices"][0] for chunk in self.chunks("/v1/chat/completions", body, text, step)]
        content, calls, logprobs = "", list[Json](), list[Json]()
        for choice in choices:
            content += choice["delta"].get("content", "")
            logprobs += (choice["logprobs"] or {}).get("content", [])
            for piece in choice["delta"].get("tool_calls", []):
                if "id" in piece:
                    assert (piece["index"], piece["function"]["arguments"]) == (len(calls), "")
                    calls.append({key: value for key, value in piece.items() if key != "index"})
                else:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        message: Json = {"role": choices[0]["delta"]["role"], "content": content}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        assert all(choice["finish_reason"] is None for choice in choices[:-1])
        told = {"content": logprobs} if logprobs else None
        return {"message": message, "logprobs": told, "finish_reason": choices[-1]["finish_reason"]}


def calls_in(choice: Json) -> list[tuple[str, str]]:
    """The names and arguments of the calls in a choice."""
    functions = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return [(function["name"], function["arguments"]) for function in functions]
