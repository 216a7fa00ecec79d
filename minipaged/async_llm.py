"""Serves requests from an event loop: a thread owns the engine and steps it; coroutines add, read and cancel requests.

    allm = AsyncLLM("smollm2-135m-instruct")
    async for update in allm.generate("Once upon a time", SamplingParams(max_tokens=32)):
        print(update.completions[0].new_text, end="")
    await allm.shutdown()

    coroutines ──► inbox: add, abort ──► engine's thread: step, step, step …
         ▲                                        │
      streams ◄── one hand-over to the loop ◄─────┘  after each step

- Only its thread touches the engine. The loop puts its orders into the inbox; the thread carries them out, in order,
  between two steps.
- The updates of a step are handed to the loop in one call. Each request has one slot, in which updates that have not
  been read yet are joined into one. So behind a slow or sleeping reader, only the unread text grows.
- When a reader ends (it closes its stream, or is cancelled, wherever it waits), its requests are aborted, and their
  blocks are free before the next step (the invariant no-orphan).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol, TypeVar, Unpack
from uuid import uuid4

from minipaged.api.prompts import Prompt, salt_of
from minipaged.engine.grammar import Grammar
from minipaged.engine.stats import Stats
from minipaged.errors import EngineDead, InvalidRequest, MinipagedError, QueueFull, ShuttingDown
from minipaged.events import Listener
from minipaged.llm import LLM, Params
from minipaged.outputs import CompletionUpdate, RequestOutput, RequestUpdate
from minipaged.params import SamplingParams, StructuredOutputsParams
from minipaged.setup.loaded_model import LoadedModel, check_before_loading
from minipaged.setup.settings import GivenSettings, Settings, takes_settings

Result = TypeVar("Result")
COMPILE_S = 10
"""Seconds within which a request's grammar must be compiled, the wait for a thread included."""
LONG_TEXT = 2_000
"""Length in characters above which a text is tokenized in a thread, because it would block the event loop too long."""


class AsyncRequest(NamedTuple):
    """One request to add to the engine."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: Params
    prompt: str | None = None
    """The prompt's text, if it was given as text."""
    priority: int = 0
    cache_salt: str | None = None
    """Requests share cached blocks only with requests of the same salt."""


class Observer(Protocol):
    """An object that counts what the engine does. Its methods are called on the engine's thread, and must be fast."""

    def added(self, request_id: str, params: Params, num_prompt_tokens: int, arrival_time: float) -> None:
        """Called when the engine has accepted a request. Times are in seconds of `time.perf_counter`."""

    def refused(self, number: int) -> None:
        """Called when this number of requests was refused because the queue is full (QueueFull). Optional."""

    def after_step(
        self, updates: Sequence[RequestUpdate], stats: Stats, num_running: int, num_waiting: int, now: float
    ) -> None:
        """Called when the engine has run a step, with its results."""


class Stream:
    """An iterator over the updates of one or more requests, for one reader; it ends when all of them have ended.

    `finals_only`: yield only each request's last update, which has the whole output.
    """

    def __init__(self, llm: AsyncLLM, asked: Sequence[AsyncRequest], *, finals_only: bool = False) -> None:
        self.request_ids = [one.request_id for one in asked]
        self._llm = llm
        self._finals_only = finals_only
        self._open = set(self.request_ids)
        self._slots: dict[str, RequestUpdate] = {}  # by request, its unread updates joined into one
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        return self

    async def __anext__(self) -> RequestUpdate:
        """Return the next update. Raises EngineDead if the engine's thread has died."""
        while not self._slots:
            if self._error:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        update = self._slots.pop(next(iter(self._slots)))
        if update.output:
            self._open.discard(update.request_id)
        return update

    async def outputs(self) -> list[RequestOutput]:
        """Wait until all requests have ended, and return their outputs in the order in which they were added."""
        outputs = {update.request_id: update.output async for update in self if update.output}
        return [outputs[request_id] for request_id in self.request_ids]

    def close(self) -> None:
        """Stop reading; requests that have not ended are aborted."""
        self._llm._leave(self, self._open)
        self._open = set()

    # --- Called in the loop with what comes from the engine ---------------------------------------

    def _put(self, update: RequestUpdate) -> None:
        if self._finals_only and not update.output:
            return
        earlier = self._slots.get(update.request_id)
        self._slots[update.request_id] = joined(earlier, update) if earlier else update
        self._news.set()

    def _settle(self, error: Exception | None) -> None:
        """Note that the engine has accepted the requests, or refused them with an error."""
        if not self._taken.done():
            if error:
                self._taken.set_exception(error)
            else:
                self._taken.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._settle(error)
        self._news.set()


class AsyncLLM:
    """An `LLM` that serves any number of concurrent requests from one event loop.

    An error of a step ends the engine, and every reader gets EngineDead. An error of a single request (bad logits,
    tokens that cannot be decoded) is in its output, as with `LLM`. Raises the errors of `LLM`, and InvalidRequest if
    `max_model_len` is longer than the pool, because a server reports it to its clients.

    `max_waiting` limits the queue: while this number of requests wait for their first turn, further ones are refused
    (QueueFull). The requests of one `add` are accepted together, even if they exceed the limit. `observers` are called
    on the engine's thread. The other arguments are those of `LLM`.
    """

    @takes_settings
    def __init__(
        self,
        model: str | Path | LoadedModel = "smollm2-135m-instruct",
        *,
        listeners: Sequence[Listener] = (),
        observers: Sequence[Observer] = (),
        max_waiting: int | None = None,
        host_sharers: int = 1,
        **settings: Unpack[GivenSettings],
    ) -> None:
        self.llm = LLM(model, listeners=listeners, host_sharers=host_sharers, **settings)
        config = self.llm.config
        try:
            _check_servable(config.max_model_len, config.num_blocks, config.block_size)
        except InvalidRequest:
            if not isinstance(model, LoadedModel):  # it is used nowhere else
                self.llm.close()
            raise
        self.max_waiting = max_waiting
        self.observers = list(observers)
        self.error: BaseException | None = None
        """The error that ended the engine's thread, or None."""
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: stop
        self._streams: dict[str, Stream] = {}  # by request that has not ended
        self._left: set[str] = set()  # requests whose reader has left, and whose end the engine has yet to report
        self._all_ended = asyncio.Event()
        self._ended = asyncio.Event()  # set when the engine's thread has ended
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="minipaged-engine", daemon=True)
        self._tokenizer = ThreadPoolExecutor(1, "minipaged-tokenizer")
        self._compiler = ThreadPoolExecutor(2, "minipaged-grammars")
        self.on_death: Callable[[BaseException], None] | None = None
        """A function that is called in the loop when the engine's thread has died, after all readers got the error."""

    # --- For coroutines ---------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestUpdate]:
        """Continue one prompt (text, or a list of token ids), and yield its new output after each step.

        The last update carries the whole output. Closing the iterator, or cancelling its reader, ends the request.
        Raises the errors of `add`.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        given = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        length = len(given) if isinstance(given, str) else 0
        tokens, text = await self.tokenizing(length, partial(self.llm.read_prompt, prompt))
        asked = AsyncRequest(request_id or uuid4().hex, tokens, params, text, priority, salt_of(prompt))
        stream = await self.add([asked])
        try:
            async for update in stream:
                yield update
        finally:
            stream.close()

    async def add(self, asked: Sequence[AsyncRequest], *, finals_only: bool = False) -> Stream:
        """Add requests to the waiting queue, all of them or none, and return their stream. A reader who leaves early
        must close the stream.

        Their grammars are compiled first, in a thread. Raises InvalidRequest for a request that could never be served,
        QueueFull, ShuttingDown, EngineDead.
        """
        self.check_open(asked)
        grammars = [await self._compiled(form) for form in dict.fromkeys(map(_form_of, asked)) if form]
        if grammars:
            self.check_open(asked)
        self.start()
        stream = Stream(self, asked, finals_only=finals_only)
        self._streams |= dict.fromkeys(stream.request_ids, stream)
        arrival_time = time.perf_counter()
        self._inbox.put(lambda: self._add(asked, stream, arrival_time))
        try:
            await stream._taken
        except BaseException:
            stream.close()  # also if this was cancelled while the requests were being added
            raise
        del grammars  # the engine's requests hold them now; until then they must not be dropped and compiled again
        return stream

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Refuse new requests, let the others go on for `timeout` seconds, abort the rest, and end the engine's thread.
        Readers get all output generated until then. (Worker processes end later, by `LLM.close` or with the LLM.)"""
        self._closing = True
        for threads in (self._tokenizer, self._compiler):
            threads.shutdown(wait=False, cancel_futures=True)
        if not self._thread.is_alive():
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wait_for_all(), timeout)
        for request_id in list(self._streams):
            self._inbox.put(partial(self.llm.engine.abort, request_id))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wait_for_all(), timeout=60)  # the step in progress may be long
        self._inbox.put(None)
        await self._ended.wait()  # not a thread that joins: a caller that is cancelled here need not wait for the step
        self._thread.join()

    async def tokenizing(self, num_characters: int, call: Callable[[], Result]) -> Result:
        """Return the result of `call`, which tokenizes this number of characters. Long texts are tokenized in a thread,
        one after another; short ones here, so that they never wait for long ones. Raises ShuttingDown and the errors of
        `call`."""
        return call() if num_characters <= LONG_TEXT else await self._in_thread(self._tokenizer, call)

    async def _compiled(self, form: StructuredOutputsParams) -> Grammar | None:
        """Return the compiled grammar; None if there is no tokenizer, which the engine refuses."""
        if (grammars := self.llm.grammars) is None:
            return None
        if grammar := grammars.compiled(form):
            return grammar
        try:
            return await asyncio.wait_for(self._in_thread(self._compiler, partial(grammars.compile, form)), COMPILE_S)
        except TimeoutError:
            raise InvalidRequest(
                f"structured_outputs were not compiled within {COMPILE_S} seconds; simplify them, or ask again later"
            ) from None

    async def _in_thread(self, threads: ThreadPoolExecutor, call: Callable[[], Result]) -> Result:
        self.check_open()
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, call)
        except asyncio.CancelledError:
            self.check_open()  # `shutdown` may have cancelled it, and not the caller
            raise

    @property
    def num_open(self) -> int:
        """The number of requests that have not ended."""
        return len(self._streams)

    def check_open(self, asked: Iterable[AsyncRequest] = ()) -> None:
        """Raise the errors that `add` can raise without the engine: EngineDead, ShuttingDown, InvalidRequest."""
        if self.error is not None:
            raise EngineDead(f"the engine has stopped; start it again. The cause: {told(self.error)}")
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise InvalidRequest("this AsyncLLM is of another event loop; make one here, from the same LoadedModel")
        if self._closing:
            raise ShuttingDown("the engine is shutting down and takes no more requests; ask another, or later")
        names: set[str] = set()
        for one in asked:
            if one.request_id in self._streams or one.request_id in self._left or one.request_id in names:
                raise InvalidRequest(
                    f"request id {one.request_id!r} is in use; wait for that request or choose another id"
                )
            names.add(one.request_id)

    def start(self) -> None:
        """Begin to serve this event loop. (`add` does so too; before that, the failure of a worker is not noticed.)"""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()
            inbox = self._inbox  # workers may outlive this object, and must not keep it alive
            self.llm.engine.runner.on_failure(lambda error: inbox.put(partial(_raise, error)))

    def _leave(self, stream: Stream, request_ids: Iterable[str]) -> None:
        """Abort these requests of a stream, because its reader has left."""
        for request_id in request_ids:
            if self._streams.get(request_id) is stream:  # another stream may have the id now
                del self._streams[request_id]
                self._left.add(request_id)
                self._inbox.put(partial(self.llm.engine.abort, request_id))
        self._note_ends()

    async def _wait_for_all(self) -> None:
        while self._streams:
            self._all_ended.clear()
            await self._all_ended.wait()

    def _note_ends(self) -> None:
        if not self._streams:
            self._all_ended.set()

    # --- On the engine's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._follow_inbox():
                if self.llm.engine.has_unfinished_requests():
                    self._tell(self.llm.engine.step())
        except BaseException as error:
            self.error = error
            with suppress(RuntimeError):  # the loop is closed, so there is no reader left
                self._in_loop(self._fail_all, error)
        finally:
            with suppress(RuntimeError):
                self._in_loop(self._ended.set)

    def _follow_inbox(self) -> bool:
        """Carry out the orders in the inbox; wait for one if there is nothing to step. False: stop."""
        waits = not self.llm.engine.has_unfinished_requests()
        while True:
            try:
                order = self._inbox.get(block=waits)
            except Empty:
                return True
            if order is None:
                return False
            order()
            waits = False

    def _add(self, asked: Sequence[AsyncRequest], stream: Stream, arrival_time: float) -> None:
        engine, added = self.llm.engine, []
        error: Exception | None = None
        new = sum(request.first_scheduled_time is None for request in engine.scheduler.waiting)
        try:
            if self.max_waiting is not None and new >= self.max_waiting:
                for observer in self.observers:
                    if hasattr(observer, "refused"):
                        observer.refused(len(asked))
                raise QueueFull(f"{self.max_waiting} requests wait already; ask again later, or ask another server")
            for one in asked:
                engine.add_request(
                    one.prompt_token_ids,
                    one.params,
                    request_id=one.request_id,
                    prompt=one.prompt,
                    priority=one.priority,
                    cache_salt=one.cache_salt,
                )
                added.append(one)
        except Exception as refused:  # any error concerns only these requests
            error = refused
            for one in added:
                engine.abort(one.request_id)
        else:
            for observer in self.observers:
                for one in added:
                    observer.added(one.request_id, one.params, _prompt_length(one), arrival_time)
        self._in_loop(self._settle, stream, error, {one.request_id for one in added})

    def _tell(self, updates: list[RequestUpdate]) -> None:
        engine, now = self.llm.engine, time.perf_counter()
        if self.observers:
            stats, scheduler = engine.current_stats(), engine.scheduler
            for observer in self.observers:
                observer.after_step(updates, stats, len(scheduler.running), len(scheduler.waiting), now)
        if updates:
            self._in_loop(self._hand_over, updates)

    def _in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *arguments)

    # --- In the loop ------------------------------------------------------------------------------

    def _settle(self, stream: Stream, error: Exception | None, added: set[str]) -> None:
        """Note that the engine has `added` these requests of the stream: all of them, unless there is an error."""
        if error:
            for request_id in stream.request_ids:
                self._left.discard(request_id)
                self._streams.pop(request_id, None)
            self._left |= added  # the engine has yet to report their end
            self._note_ends()
        stream._settle(error)

    def _hand_over(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            stream = self._streams.get(update.request_id)
            if update.output:
                self._left.discard(update.request_id)
                self._streams.pop(update.request_id, None)
            if stream:
                stream._put(update)
        self._note_ends()

    def _fail_all(self, error: BaseException) -> None:
        streams, self._streams = set(self._streams.values()), {}
        for stream in streams:
            stream._fail(EngineDead(f"the engine has stopped: {told(error)}"))
        self._note_ends()
        if self.on_death:
            self.on_death(error)


def check_before_serving(**settings: Unpack[GivenSettings]) -> None:
    """Raise InvalidRequest for settings of an AsyncLLM that are wrong for every model."""
    check_before_loading(**settings)
    asked = Settings(**settings)
    if asked.max_model_len is not None and asked.num_blocks is not None:
        _check_servable(asked.max_model_len, asked.num_blocks, asked.block_size)


def _check_servable(max_model_len: int, num_blocks: int, block_size: int) -> None:
    """Raise InvalidRequest if `max_model_len` is longer than the pool. A server reports it to its clients, which rely
    on it."""
    room = num_blocks * block_size
    if max_model_len > room:
        raise InvalidRequest(
            f"max_model_len is {max_model_len}, but no sequence can become that long: the pool holds {room} tokens "
            f"({num_blocks} blocks of {block_size}); lower max_model_len to {room} or leave it out, or raise num_blocks"
        )


def told(error: BaseException) -> str:
    """The cause of the engine's death as text: the message of an error of ours, the repr of any other."""
    return str(error) if isinstance(error, MinipagedError) else repr(error)


def _raise(error: Exception) -> None:
    raise error


def _form_of(asked: AsyncRequest) -> StructuredOutputsParams | None:
    return asked.params.structured_outputs if isinstance(asked.params, SamplingParams) else None


def _prompt_length(asked: AsyncRequest) -> int:
    """The number of tokens that the engine uses of the prompt."""
    most = asked.params.truncate_prompt_tokens if isinstance(asked.params, SamplingParams) else None
    return min(len(asked.prompt_token_ids), most or len(asked.prompt_token_ids))


def joined(earlier: RequestUpdate, later: RequestUpdate) -> RequestUpdate:
    """Join two updates of a request into one."""
    parts = {part.index: part for part in earlier.completions}
    for new in later.completions:
        old = parts.get(new.index)
        parts[new.index] = _joined_part(old, new) if old else new
    prompt_logprobs = later.prompt_logprobs if earlier.prompt_logprobs is None else earlier.prompt_logprobs
    return RequestUpdate(later.request_id, tuple(parts.values()), later.output, prompt_logprobs)


def _joined_part(old: CompletionUpdate, new: CompletionUpdate) -> CompletionUpdate:
    logprobs = None
    if old.new_logprobs is not None and new.new_logprobs is not None:
        logprobs = (*old.new_logprobs, *new.new_logprobs)
    tokens, text = (*old.new_token_ids, *new.new_token_ids), old.new_text + new.new_text
    return CompletionUpdate(new.index, tokens, text, logprobs, new.finish_reason, new.stop_reason)
