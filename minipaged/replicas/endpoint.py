"""One endpoint in front of several engines: the server's application (`serve/app.py`), in a process that Ray starts.

    clients ──► Ray's proxy ──► Endpoint: HTTP, tokens ──► RayRouter ──► Replica: engine
                                                                     └─► Replica: engine

Prompts are tokenized here, because the router needs their tokens. Clients get the answers of a server with one engine.
Errors are handled as follows:

- A replica dies, or refuses a request, before it has accepted it: another replica is tried, and the client does not
  notice.
- A replica dies after it has accepted a request, or Ray ends it: the request ends with an error. It is not retried,
  because the client may have read a part of its stream, and a request that kills a replica would kill the others too.
- A replica raises an error that is not a MinipagedError: the client gets that error, and no other replica is tried.
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
"""Seconds within which a replica must accept a request. While Ray restarts one, there may be none for a while."""
ALIVE_S = 5
"""Seconds within which a replica must answer a health check."""
KILLED_BY_RAY = "killed by `ray.kill`"
"""Part of Ray's message about a replica that it has ended, because it was unhealthy, or because Ray scaled down and its
time to finish was over."""


class ServedModel:
    """The replicas' model without its weights: the endpoint needs only its tokenizer and configuration."""

    def __init__(self, facts: Facts) -> None:
        self.folder, self.config, self.model_config = facts.folder, facts.config, facts.model_config
        self._tokenizer = Tokenizer(facts.folder) if (facts.folder / "tokenizer.json").is_file() else None

    def need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ModelError(f"{self.folder} holds no tokenizer.json; put the tokenizer there, or give token ids")
        return self._tokenizer


class RemoteStream:
    """The updates of requests that a replica has accepted. Has the interface of `async_llm.Stream`."""

    def __init__(self, request_ids: Sequence[str], replies: Any, closed: Callable[[], None]) -> None:
        self._request_ids = request_ids
        self._open = set(request_ids)
        self._replies = replies
        self._closed = closed
        self._error: Exception | None = None

    def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        return self

    async def __anext__(self) -> RequestUpdate:
        """Return the next update. Raises EngineDead if the replica died, an error that the replica raised, or the error
        that was given to `end`."""
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
        """Wait until all requests have ended, and return their outputs in the order of `request_ids`."""
        outputs = {update.request_id: update.output async for update in self if update.output}
        return [outputs[request_id] for request_id in self._request_ids]

    def close(self) -> None:
        """Abort the requests that still run. Called when the reader is gone or done."""
        if self._open:
            self._replies.cancel()
        self._open = set()
        self._closed()

    def end(self, error: Exception) -> None:
        """Abort the requests that still run, and raise `error` to the reader."""
        self._error = error
        self.close()


def _cause(error: Exception) -> Exception:
    """Return the error for requests that a replica had accepted, from the error that Ray raised."""
    if isinstance(error, RayTaskError):
        cause: Exception = error.cause
        return cause
    what = "was ended by Ray" if KILLED_BY_RAY in str(error) else "has died"
    return EngineDead(f"the replica that had the request {what} before the answer was complete; ask again")


class Engines:
    """All replicas behind the interface `serve.serving.ServedEngine`. `replicas`: Ray's handle of them."""

    def __init__(self, replicas: Any, facts: Facts) -> None:
        self.llm = ServedModel(facts)
        self._replicas = replicas
        self._generate = replicas.options(method_name="generate", stream=True)
        self._streams: set[RemoteStream] = set()
        self._all_ended = asyncio.Event()
        self._closing = False
        self._tokenizer = ThreadPoolExecutor(1, "minipaged-tokenizer")

    async def add(self, asked: Sequence[AsyncRequest], *, finals_only: bool = False) -> RemoteStream:
        """Find one replica that accepts all of these requests, and return the stream of their updates.

        Raises the errors of `AsyncLLM.add`, QueueFull if all queues are full, and any other error of a replica.
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
        """Return the replies of the replica that accepts the requests. The first reply has been read."""
        refused: dict[str, Exception] = {}
        while True:
            replies = self._generate.remote(list(asked), finals_only, list(refused))
            try:
                first = await anext(replies)
            except BackPressureError:
                raise QueueFull("the queue of requests is full; ask again later") from None
            except RayTaskError as error:  # the replica lives, and another one would raise the same error
                raise error.cause from None
            except (RayError, RayServeException):  # the replica has died, and the router no longer chooses it
                await asyncio.sleep(0.1)
                continue
            except BaseException:
                replies.cancel()
                raise
            if isinstance(first, Taken):
                return replies
            assert isinstance(first, ReplicaRefused)
            again = isinstance(first.error, QueueFull | ShuttingDown | EngineDead)
            if not again or first.replica in refused:  # it is asked twice only if all others have refused too
                raise first.error
            refused[first.replica] = first.error

    async def tokenizing(self, num_characters: int, call: Callable[[], Result]) -> Result:
        """Run `call`, which tokenizes a text of this length, as `AsyncLLM.tokenizing` does."""
        if num_characters <= LONG_TEXT:
            return call()
        self.check_open()
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer, call)

    def check_open(self) -> None:
        """Raise ShuttingDown if `shutdown` was called."""
        if self._closing:
            raise ShuttingDown("the server is shutting down and takes no more requests; ask another, or later")

    async def shutdown(self, timeout: float) -> None:
        """Refuse new requests, let running ones finish for `timeout` seconds, then abort the rest."""
        self._closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._streams:
                    self._all_ended.clear()
                    await self._all_ended.wait()
        over = "the server is shutting down, and the time to finish is over, but the answer is not complete; ask again"
        for stream in list(self._streams):
            stream.end(ShuttingDown(over))

    @property
    def num_open(self) -> int:
        """The number of HTTP requests whose answer is not complete."""
        return len(self._streams)

    def _note_end(self, stream: RemoteStream) -> None:
        self._streams.discard(stream)
        if not self._streams:
            self._all_ended.set()


class Replicated(Words):
    """A model that several replicas serve."""

    allm: Engines
    no_page = "it shows the blocks of one engine, and this server has several (--replicas)"

    def __init__(self, allm: Engines, names: Sequence[str], replicas: Any, settings: ServeSettings) -> None:
        super().__init__(allm, names, settings)
        self._replicas = replicas

    async def check_health(self) -> None:
        """Raise EngineDead unless a replica answers that it is alive. Raises ShuttingDown during a shutdown."""
        self.allm.check_open()
        try:
            async with asyncio.timeout(ALIVE_S):
                await self._replicas.alive.remote()
        except (TimeoutError, RayError, RayServeException):
            raise EngineDead(f"no replica has answered within {ALIVE_S} s") from None

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics of all replicas and of this process. The label `engine` holds a replica's id."""
        with suppress(TimeoutError, RayError, RayServeException):
            told = await self._replicas.broadcast("collect").results_async(timeout_s=ALIVE_S)
            return await asyncio.to_thread(_exposition, accept, [metric for one in told for metric in one])
        return await asyncio.to_thread(_exposition, accept, [])


class _Told:
    """A collector of metrics from several replicas: it joins metrics of one name, and adds up samples with equal labels
    (some of vLLM's metrics have no label for the engine)."""

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
    """The Ray deployment that receives HTTP requests from Ray's proxy."""

    async def __init__(self, replicas: Any, names: Sequence[str], settings: ServeSettings) -> None:  # type: ignore[misc]
        self._replicas = replicas
        self._facts: Facts = await replicas.facts.remote()  # waits for the first replica
        self._engines = Engines(replicas, self._facts)
        serving = Replicated(self._engines, names, replicas, settings)
        self._app = create_app(serving, key=settings.api_key, cors_origins=settings.cors_origin)
        await asyncio.to_thread(serving.warm_up)

    async def __call__(self, request: Request) -> Response:
        return _Handed(self._app)

    async def facts(self) -> Facts:
        """Return the properties that all replicas share."""
        return self._facts

    async def pools(self) -> list[int]:
        """Return the number of blocks of each replica, sorted. They differ if free memory changed between starts."""
        told: list[Facts] = await self._replicas.broadcast("facts").results_async(timeout_s=ALIVE_S)
        return sorted(one.config.num_blocks for one in told)

    async def num_open(self) -> int:
        """Return the number of HTTP requests whose answer is not complete."""
        return self._engines.num_open

    async def end(self, timeout: float) -> None:
        """Refuse new requests, and finish the running ones. Not named `shutdown`, which is a method of Ray's handle."""
        await self._engines.shutdown(timeout)


class _Handed(Response):
    """A response that lets an ASGI application handle the whole request. Ray calls it like any other response."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
