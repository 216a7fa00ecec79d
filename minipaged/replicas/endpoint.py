"""One endpoint before several engines: the server's application (`serve/app.py`) in a process that Ray has started.

    clients ──► Ray's proxy ──► Endpoint: HTTP, tokens ──► RayRouter ──► Replica: engine
                                                                     └─► Replica: engine

Prompts are tokenized here, for the router goes by their tokens. What a client hears is what one engine would say, with
some errors more:

- a replica that dies, or refuses, before it has taken a request: another one is asked, and nobody notices;
- one that dies afterwards, or is ended by Ray: its requests end with an error. They are not tried again: a stream has
  been read, and a request of which replicas die would kill all of them;
- one in which something raises that is no error of ours: that is told, as it is, and nobody else is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minipaged.async_llm import LONG_TEXT, AsyncRequest
from minipaged.errors import EngineDead, ModelError, QueueFull, ShuttingDown
from minipaged.models.tokenizer import Tokenizer
from minipaged.outputs import RequestOutput, RequestUpdate
from minipaged.replicas.replica import Facts, ReplicaRefused, Taken
from minipaged.serve.app import create_app
from minipaged.serve.serving import Words
from minipaged.serve.settings import ServeSettings

Result = TypeVar("Result")
TAKEN_S = 60
"""Seconds in which some replica has to take a request; there may be none for a while, when one is started again."""
ALIVE_S = 5
"""Seconds in which one has to say that it lives."""
KILLED_BY_RAY = "killed by `ray.kill`"
"""What Ray says of a replica that it has ended: one too many, whose time to finish was over, or one that is unwell."""


class ServedModel:
    """The replicas' model, of which the endpoint needs the tokenizer only."""

    def __init__(self, facts: Facts) -> None:
        self.folder, self.config, self.model_config = facts.folder, facts.config, facts.model_config
        self._tokenizer = Tokenizer(facts.folder) if (facts.folder / "tokenizer.json").is_file() else None

    def need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ModelError(f"{self.folder} holds no tokenizer.json; put the tokenizer there, or give token ids")
        return self._tokenizer


class RemoteStream:
    """What is new of requests that some replica has taken (`async_llm.Stream`)."""

    def __init__(self, request_ids: Sequence[str], replies: Any, closed: Callable[[], None]) -> None:
        self._request_ids = request_ids
        self._open = set(request_ids)
        self._replies = replies
        self._closed = closed
        self._error: Exception | None = None

    def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        return self

    async def __anext__(self) -> RequestUpdate:
        """Raises EngineDead when the replica has died, what it raised itself, and what `end` was given."""
        if self._error:
            raise self._error
        if not self._open:
            self.close()
            raise StopAsyncIteration
        try:
            update = await anext(self._replies)
        except (RayError, RayServeException) as error:
            raise self._error or _cause(error) from None
        if not isinstance(update, RequestUpdate):
            raise update  # EngineDead, from the replica itself
        if update.output:
            self._open.discard(update.request_id)
        return update

    async def outputs(self) -> list[RequestOutput]:
        """All of it, once all requests have ended; in the order in which they were asked for."""
        outputs = {update.request_id: update.output async for update in self if update.output}
        return [outputs[request_id] for request_id in self._request_ids]

    def close(self) -> None:
        """Nobody reads any more: what goes on is aborted."""
        if self._open:
            self._replies.cancel()
        self._open = set()
        self._closed()

    def end(self, error: Exception) -> None:
        """What goes on is aborted, and the reader is told why."""
        self._error = error
        self.close()


def _cause(error: Exception) -> Exception:
    """What ended requests that a replica had taken, of what Ray says of it."""
    if isinstance(error, RayTaskError):
        cause: Exception = error.cause
        return cause
    what = "was ended by Ray" if KILLED_BY_RAY in str(error) else "has died"
    return EngineDead(f"the replica that had the request {what} before the answer was complete; ask again")


class Engines:
    """All replicas as one `serve.serving.Engine`. `replicas`: Ray's handle of them."""

    def __init__(self, replicas: Any, facts: Facts) -> None:
        self.llm = ServedModel(facts)
        self._replicas = replicas
        self._generate = replicas.options(method_name="generate", stream=True)
        self._streams: set[RemoteStream] = set()
        self._all_ended = asyncio.Event()
        self._closing = False
        self._tokenizer = ThreadPoolExecutor(1, "minipaged-tokenizer")

    async def add(self, asked: Sequence[AsyncRequest], *, finals_only: bool = False) -> RemoteStream:
        """Have some replica take these requests, all of them or none.

        Raises what `AsyncLLM.add` raises; QueueFull where all queues are full; anything else that a replica raised.
        """
        self.check_open()
        try:
            async with asyncio.timeout(TAKEN_S):
                replies = await self._taken(asked, finals_only)
        except TimeoutError:
            raise EngineDead(f"no replica has taken the request in {TAKEN_S} s; ask again later") from None
        stream = RemoteStream([one.request_id for one in asked], replies, lambda: self._note_end(stream))
        self._streams.add(stream)
        return stream

    async def _taken(self, asked: Sequence[AsyncRequest], finals_only: bool) -> Any:
        """The replies of a replica that has taken the requests."""
        refused: dict[str, Exception] = {}
        while True:
            replies = self._generate.remote(list(asked), finals_only, list(refused))
            try:
                first = await anext(replies)
            except BackPressureError:
                raise QueueFull("as many requests wait already as may; ask again later") from None
            except RayTaskError as error:  # it lives, and another one would do the same
                raise error.cause from None
            except (RayError, RayServeException):  # it has died: the router knows it, too
                await asyncio.sleep(0.1)
                continue
            except BaseException:
                replies.cancel()
                raise
            if isinstance(first, Taken):
                return replies
            assert isinstance(first, ReplicaRefused)
            again = isinstance(first.error, QueueFull | ShuttingDown | EngineDead)
            if not again or first.replica in refused:  # all others have refused it, too
                raise first.error
            refused[first.replica] = first.error

    async def tokenizing(self, num_characters: int, call: Callable[[], Result]) -> Result:
        """As `AsyncLLM.tokenizing`."""
        if num_characters <= LONG_TEXT:
            return call()
        self.check_open()
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer, call)

    def check_open(self) -> None:
        """Raises ShuttingDown."""
        if self._closing:
            raise ShuttingDown("the server is shutting down and takes no more requests; ask another, or later")

    async def shutdown(self, timeout: float) -> None:
        """Take no more requests, let those that go on finish for so many seconds, abort the rest."""
        self._closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._streams:
                    self._all_ended.clear()
                    await self._all_ended.wait()
        over = "the server is shutting down, and the time to finish is over before the answer was complete; ask again"
        for stream in list(self._streams):
            stream.end(ShuttingDown(over))

    @property
    def num_open(self) -> int:
        """HTTP requests that go on."""
        return len(self._streams)

    def _note_end(self, stream: RemoteStream) -> None:
        self._streams.discard(stream)
        if not self._streams:
            self._all_ended.set()


class Replicated(Words):
    """A model that several replicas serve."""

    allm: Engines
    no_page = "it shows the blocks of one engine, and this server has several (--replicas)"

    def __init__(self, allm: Engines, names: Sequence[str], replicas: Any, *, trust_chat_templates: bool) -> None:
        super().__init__(allm, names, trust_chat_templates=trust_chat_templates)
        self._replicas = replicas

    async def check_health(self) -> None:
        """Healthy is, of whom some replica says that it lives."""
        self.allm.check_open()
        try:
            async with asyncio.timeout(ALIVE_S):
                await self._replicas.alive.remote()
        except (TimeoutError, RayError, RayServeException):
            raise EngineDead(f"no replica has answered within {ALIVE_S} s") from None

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """Those of all replicas, whose ids are in the label `engine`, and of this process."""
        with suppress(TimeoutError, RayError, RayServeException):
            told = await self._replicas.broadcast("collect").results_async(timeout_s=ALIVE_S)
            return await asyncio.to_thread(_exposition, accept, [metric for one in told for metric in one])
        return await asyncio.to_thread(_exposition, accept, [])


class _Told:
    """A collector of what was collected elsewhere: the samples of one name together, and those of equal labels (vLLM's,
    which do not tell engines apart) as their sum."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = sorted(metrics, key=lambda metric: metric.name)

    def collect(self) -> list[Metric]:
        together = []
        for _, group in groupby(self._metrics, key=lambda metric: metric.name):
            first, *others = group
            samples: dict[Any, Any] = {}
            for sample in (sample for one in (first, *others) for sample in one.samples):
                key = (sample.name, *sorted(sample.labels.items()))
                before = samples[key].value if key in samples else 0
                samples[key] = sample._replace(value=before + sample.value)
            first.samples = list(samples.values())
            together.append(first)
        return together


def _exposition(accept: str, metrics: list[Metric]) -> tuple[bytes, str]:
    registry = CollectorRegistry()
    registry.register(_Told(metrics))
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class Endpoint:
    """What Ray's proxy hands HTTP requests to."""

    async def __init__(self, replicas: Any, names: Sequence[str], settings: ServeSettings) -> None:  # type: ignore[misc]
        self._replicas = replicas
        self._facts: Facts = await replicas.facts.remote()  # waits for the first of them
        self._engines = Engines(replicas, self._facts)
        serving = Replicated(self._engines, names, replicas, trust_chat_templates=settings.trust_request_chat_template)
        self._app = create_app(serving, key=settings.api_key, cors_origins=settings.cors_origin)
        await asyncio.to_thread(serving.warm_up)

    async def __call__(self, request: Request) -> Response:
        return _Handed(self._app)

    async def facts(self) -> Facts:
        """Of the replicas."""
        return self._facts

    async def pools(self) -> list[int]:
        """Blocks in the pool of each replica there is; they differ where memory was filled meanwhile."""
        told: list[Facts] = await self._replicas.broadcast("facts").results_async(timeout_s=ALIVE_S)
        return sorted(one.config.num_blocks for one in told)

    async def num_open(self) -> int:
        """HTTP requests that go on."""
        return self._engines.num_open

    async def end(self, timeout: float) -> None:
        """Finish what goes on, and refuse the rest. (`shutdown` is a method of Ray's handle.)"""
        await self._engines.shutdown(timeout)


class _Handed(Response):
    """A response that is all of an application's: Ray calls it as it would any response, and keeps out of it."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
