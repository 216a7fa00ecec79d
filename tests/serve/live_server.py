"""A small server with the live page: an engine whose model knows one text by heart, on a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any
from uuid import uuid4

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from minipaged import SamplingParams
from minipaged.outputs import RequestUpdate
from minipaged.serve.live.routes import live_routes
from minipaged.serve.live.watch import Watch
from minipaged.stepper import Storyteller

MODEL = Storyteller([" ".join(f"word{i}" for i in range(4000))])
"""Continues with the next word, so that whatever prompts have their beginnings in common."""
KEY = "a secret"


class SmallServer:
    """`step_seconds`: how long a step takes at least."""

    watch_kind = Watch

    def __init__(self, *, key: str | None = None, step_seconds: float = 0.005, **sizes: Any) -> None:
        self.step_seconds = step_seconds
        sizes = {"num_blocks": 64, "block_size": 16, "enable_prefix_caching": True} | sizes
        self.engine = MODEL.engine(**{"max_model_len": 4000} | sizes)
        self.watch = self.watch_kind.of(self.engine)
        self.aborted: list[str] = []
        self._key = key
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._readers: dict[str, Callable[[RequestUpdate], object]] = {}

    # --- The engine's thread ----------------------------------------------------------------------

    def call(self, function: Callable[[], object]) -> None:
        """Have the engine's thread do something, and wait until it is done."""
        done = threading.Event()
        self._inbox.put(lambda: (function(), done.set()))
        assert done.wait(30)

    def add(self, num_words: int, max_tokens: int, name: str | None = None, first: int = 0, **params: Any) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, **params)
        prompt = list(range(first, first + num_words))
        self.call(lambda: self.engine.add_request(prompt, sampling, request_id=name))

    def run(self) -> None:
        while True:
            try:
                order = self._inbox.get(block=not self.engine.has_unfinished_requests())
                if order is None:
                    return
                order()
                continue
            except Empty:
                pass
            began = time.perf_counter()
            for update in self.engine.step():
                if reader := self._readers.get(update.request_id):
                    reader(update)
            time.sleep(max(0, began + self.step_seconds - time.perf_counter()))

    # --- What clients ask for ---------------------------------------------------------------------

    def app(self) -> FastAPI:
        app = FastAPI()
        app.include_router(live_routes(self.watch))

        @app.get("/v1/models")
        async def models() -> Any:
            return {"data": [{"id": "a model that tells words"}]}

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            messages = (await request.json())["messages"]
            if messages[-1]["content"] == "fail":
                return JSONResponse({"error": {"message": "nothing will come of it"}}, 400)
            return StreamingResponse(self._answer(messages), media_type="text/event-stream")

        if self._key:
            app.add_middleware(Guard, key=self._key)
        return app

    async def _answer(self, messages: list[dict[str, str]]) -> AsyncIterator[str]:
        name = f"chatcmpl-{uuid4().hex}"
        news: asyncio.Queue[RequestUpdate] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._readers[name] = lambda update: loop.call_soon_threadsafe(news.put_nowait, update)
        num_words = 40 * sum(len(message["content"].split()) for message in messages)
        most = 2000 if "long" in messages[-1]["content"] else 20
        self._inbox.put(
            lambda: self.engine.add_request(
                list(range(num_words)), SamplingParams(max_tokens=most, temperature=0), request_id=name
            )
        )
        ended = False
        try:
            while not ended:
                update = await news.get()
                ended = update.output is not None
                for part in update.completions:
                    chunk = {"id": name, "choices": [{"index": 0, "delta": {"content": f"{part.new_text} "}}]}
                    yield f"data: {json.dumps(chunk)}\n\n"
                if update.output:
                    details = {"cached_tokens": update.output.num_cached_tokens}
                    usage = {"id": name, "choices": [], "usage": {"prompt_tokens_details": details}}
                    yield f"data: {json.dumps(usage)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            if not ended:
                self.aborted.append(name)
                self._inbox.put(lambda: self.engine.abort(name))

    @contextmanager
    def served(self, port: int = 0) -> Iterator[str]:
        """Serve (on a free port, if none is named); gives the address."""
        server = uvicorn.Server(uvicorn.Config(self.app(), port=port, log_level="warning", lifespan="off"))
        threads = [threading.Thread(target=self.run), threading.Thread(target=server.run)]
        for thread in threads:
            thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            self.watch.close()
            self._inbox.put(None)
            server.should_exit = True
            for thread in threads:
                thread.join(20)
            assert not any(thread.is_alive() for thread in threads)


class Guard:
    """Wants the key for /v1 and /live."""

    def __init__(self, app: Any, key: str) -> None:
        self._app = app
        self._key = f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        behind = scope["type"] == "http" and scope["path"].startswith(("/v1", "/live"))
        if behind and dict(scope["headers"]).get(b"authorization") != self._key:
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)
