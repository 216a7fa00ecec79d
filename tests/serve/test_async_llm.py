"""The engine's thread: what coroutines get is what the engine gives, and whatever ends a reader ends his requests."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from minipaged.async_llm import AsyncLLM, AsyncRequest, joined
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.engine.stats import Stats
from minipaged.errors import EngineDead, InvalidRequest, QueueFull, ShuttingDown
from minipaged.llm import LLM, LoadedModel
from minipaged.models.tokenizer import Tokenizer
from minipaged.outputs import CompletionUpdate, RequestOutput, RequestUpdate
from minipaged.params import BeamSearchParams, SamplingParams
from minipaged.scheduling import Costs, RequestView
from tests.effort import examples, thorough
from tests.serve.harness import PATIENCE_S, check_empty, run, wait_until

SIZES: dict[str, Any] = {"num_blocks": 64, "num_swap_blocks": 16, "block_size": 4, "max_num_batched_tokens": 64}
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@asynccontextmanager
async def serving(model: LoadedModel, **options: Any) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM; after it nothing is left."""
    allm = AsyncLLM(model, **SIZES | options)
    try:
        yield allm
    finally:
        await allm.shutdown()
        if allm.error is None:
            assert not allm.num_open
            check_empty(allm)


async def collect(updates: AsyncIterator[RequestUpdate]) -> tuple[str, RequestOutput]:
    text, output = "", None
    async for update in updates:
        text += "".join(new.new_text for new in update.completions)
        output = update.output
    assert output is not None
    return text, output


def test_only_the_same_salt_finds_a_prompt_again(tiny: LoadedModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)

    async def work() -> list[int | None]:
        async with serving(tiny) as allm:
            prompts = [{"prompt": "one and a half", "cache_salt": salt} for salt in ("a", "b", "a", None)]
            outputs = [(await collect(allm.generate(prompt, params)))[1] for prompt in prompts]  # type: ignore[arg-type]
            for salt in ("", 7):
                with pytest.raises(InvalidRequest, match="cache_salt "):
                    await collect(allm.generate({"prompt": "one", "cache_salt": salt}, params))  # type: ignore[typeddict-item]
            return [output.num_cached_tokens for output in outputs]

    first, second, third, fourth = run(work)
    assert (first, second, fourth) == (0, 0, 0)
    assert third


def test_many_streams_at_once_give_the_tokens_that_each_gives_alone(tiny: LoadedModel) -> None:
    prompts = ["one", "two and a half", "three" * 10, "four"]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20)
    alone = [LLM(tiny, **SIZES).generate([prompt], params)[0].outputs[0] for prompt in prompts]

    async def work() -> list[tuple[str, RequestOutput]]:
        async with serving(tiny) as allm:
            return await asyncio.gather(*(collect(allm.generate(prompt, params)) for prompt in prompts))

    for expected, (text, output) in zip(alone, run(work), strict=True):
        assert text == expected.text
        assert output.outputs[0].token_ids == expected.token_ids


def test_a_reader_who_sleeps_gets_all_of_it_in_one_update(tiny: LoadedModel) -> None:
    async def work() -> None:
        async with serving(tiny) as allm:
            params = SamplingParams(temperature=0, max_tokens=30, logprobs=2, n=2, ignore_eos=True)
            stream = await allm.add([AsyncRequest("sleeper", [5, 6, 7], params)])
            while allm.num_open:  # it runs to its end without him
                assert len(stream._slots) <= 1
                await asyncio.sleep(0.001)
            updates = [update async for update in stream]
            assert len(updates) == 1
            for one in updates[0].output.outputs:  # type: ignore[union-attr]
                [new] = [new for new in updates[0].completions if new.index == one.index]
                assert new.new_token_ids == one.token_ids
                assert new.new_text == one.text
                assert new.new_logprobs == one.logprobs
                assert new.finish_reason == one.finish_reason

    run(work)


def test_joined_updates_keep_what_each_had() -> None:
    def update(index: int, tokens: tuple[int, ...], text: str, reason: str | None = None) -> RequestUpdate:
        logprobs = tuple({token: -1.0} for token in tokens)
        return RequestUpdate("r", (CompletionUpdate(index, tokens, text, logprobs, reason, None),), None)

    both = joined(joined(update(0, (1,), "a"), update(1, (7,), "x")), update(0, (2, 3), "bc", "stop"))
    assert [new.index for new in both.completions] == [0, 1]
    assert both.completions[0] == CompletionUpdate(0, (1, 2, 3), "abc", ({1: -1.0}, {2: -1.0}, {3: -1.0}), "stop", None)
    assert both.completions[1] == update(1, (7,), "x").completions[0]


def test_whatever_ends_a_reader_frees_his_blocks_before_the_next_step(tiny: LoadedModel) -> None:
    """Steps are counted on the engine's thread: none runs with a request whose reader has left before it began."""

    async def work() -> None:
        async with serving(tiny) as allm:
            async for _ in allm.generate("hello", LONG):
                break  # the iterator is closed
            await asyncio.sleep(0)
            task = asyncio.create_task(collect(allm.generate("hello again", LONG)))
            while not allm.num_open:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not allm.num_open
            stream = await allm.add([AsyncRequest("left", [5, 6, 7], LONG)])
            stream.close()
            seen: list[int] = []
            allm._inbox.put(lambda: seen.append(allm.llm.engine.blocks.num_used))
            await asyncio.to_thread(wait_until, lambda: bool(seen))
            assert seen == [0]

    run(work)


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_a_reader_may_leave_at_any_moment(tiny: LoadedModel, how: str) -> None:
    """After every number of turns of the loop, that of being added among them."""

    async def work() -> None:
        async with serving(tiny, max_num_batched_tokens=8) as allm:
            for turns in range(examples(300, least=40)):
                task = asyncio.create_task(read(allm, turns))
                for _ in range(turns % 40):
                    await asyncio.sleep(0)
                if turns >= 40:
                    await asyncio.sleep(turns / 20_000)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert not allm.num_open

    async def read(allm: AsyncLLM, turns: int) -> None:
        updates = allm.generate("a prompt that takes several steps to be computed", LONG)
        async for _ in updates:
            if how == "closed" and turns % 3 == 0:
                await updates.aclose()  # type: ignore[attr-defined]
                return

    run(work)


def test_requests_are_added_all_or_none(tiny: LoadedModel) -> None:
    async def work() -> None:
        async with serving(tiny) as allm:
            with pytest.raises(InvalidRequest, match="whole numbers"):
                await allm.add([AsyncRequest("good", [1, 2], LONG), AsyncRequest("bad", [10**6], LONG)])
            assert not allm.num_open
            stream = await allm.add([AsyncRequest("a", [5], LONG)])
            with pytest.raises(InvalidRequest, match="in use"):
                await allm.add([AsyncRequest("a", [5], LONG)])
            with pytest.raises(InvalidRequest, match="in use"):
                await allm.add([AsyncRequest("b", [5], LONG), AsyncRequest("b", [6], LONG)])
            assert allm.num_open == 1
            stream.close()

    run(work)


def test_what_raises_while_a_request_is_added_is_its_own_trouble(tiny: LoadedModel) -> None:
    class Unsure(FirstComeFirstServed):
        def fits(self, request: RequestView) -> bool:
            raise RuntimeError("cannot decide")

    async def work() -> None:
        async with serving(tiny) as allm:
            stream = await allm.add([AsyncRequest("before", [5], LONG)])
            scheduler = allm.llm.engine.scheduler
            policy = scheduler.policy
            scheduler.policy = Unsure(64, 4, 8, 64, Costs(1.0, 1, 1, 1.0, 1.0))
            with pytest.raises(RuntimeError, match="cannot decide"):
                await allm.add([AsyncRequest("a", [5], LONG)])
            scheduler.policy = policy
            [output] = await stream.outputs()
            assert output.finished

    run(work)


def test_a_shared_model_is_not_closed_where_it_cannot_be_served(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others use it."""
    closed = list[LoadedModel]()
    monkeypatch.setattr(LoadedModel, "close", lambda model: closed.append(model))
    with pytest.raises(InvalidRequest, match="no sequence can become that long"):
        AsyncLLM(tiny, num_blocks=2, max_model_len=40)
    assert not closed
    with pytest.raises(InvalidRequest, match="no sequence can become that long"):
        AsyncLLM(tiny.folder, tier="reference", num_blocks=2, max_model_len=40)
    assert len(closed) == 1


def test_a_stream_that_is_closed_late_ends_nobody_elses_request(tiny: LoadedModel) -> None:
    async def work() -> None:
        async with serving(tiny) as allm:
            short = SamplingParams(max_tokens=1)
            first = await allm.add([AsyncRequest("name", [5], short)])
            while allm.num_open:
                await asyncio.sleep(0.001)
            second = await allm.add([AsyncRequest("name", [6], SamplingParams(max_tokens=20, ignore_eos=True))])
            first.close()  # unread
            [output] = await second.outputs()
            assert output.prompt_token_ids == (6,)
            assert len(output.outputs[0].token_ids) == 20
            third = await allm.add([AsyncRequest("name", [7], LONG)])
            third.close()
            with pytest.raises(InvalidRequest, match="in use"):  # the engine has yet to tell of its end
                await allm.add([AsyncRequest("name", [8], short)])
            while allm._left:
                await asyncio.sleep(0.001)
            [output] = await (await allm.add([AsyncRequest("name", [8], short)])).outputs()
            assert output.prompt_token_ids == (8,)
            with pytest.raises(InvalidRequest):
                await allm.add([AsyncRequest("good", [8], LONG), AsyncRequest("bad", [10**6], short)])
            while allm._left:
                await asyncio.sleep(0.001)

    run(work)


def test_it_belongs_to_one_event_loop(tiny: LoadedModel) -> None:
    allm = AsyncLLM(tiny, **SIZES)

    async def work() -> None:
        await collect(allm.generate([5], SamplingParams(max_tokens=1)))

    run(work)
    with pytest.raises(InvalidRequest, match="another event loop"):
        run(work)


def test_a_full_queue_refuses(tiny: LoadedModel) -> None:
    async def work() -> None:
        async with serving(tiny, max_num_seqs=1, max_waiting=2, observers=[Uninterested()]) as allm:
            streams = [await allm.add([AsyncRequest(str(i), [5, 6], LONG)]) for i in range(2)]
            await anext(streams[0])  # it runs, and one waits
            streams.append(await allm.add([AsyncRequest("2", [5, 6], LONG)]))
            with pytest.raises(QueueFull, match="2 requests wait"):
                await allm.add([AsyncRequest("3", [5, 6], LONG)])
            streams[1].close()
            together = [AsyncRequest(str(i), [5, 6], LONG) for i in range(3, 6)]
            streams.append(await allm.add(together))
            for stream in streams:
                stream.close()

    run(work)


def test_shutting_down_lets_requests_finish_and_aborts_the_rest(tiny: LoadedModel) -> None:
    async def work() -> None:
        async with serving(tiny) as allm:
            short = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
            stream = await allm.add([AsyncRequest("short", [5, 6], short)])
            ending = asyncio.create_task(allm.shutdown(timeout=PATIENCE_S))
            await asyncio.sleep(0)
            with pytest.raises(ShuttingDown):
                await allm.add([AsyncRequest("late", [5, 6], short)])
            [output] = await stream.outputs()
            assert output.finished
            await ending
        async with serving(tiny) as allm:
            endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
            stream = await allm.add([AsyncRequest("endless", [5, 6], endless)])
            await anext(stream)
            await allm.shutdown(timeout=0)
            [output] = await stream.outputs()
            assert output.outputs[0].finish_reason == "abort"
            assert output.outputs[0].token_ids

    run(work)


def test_when_the_engine_dies_everybody_is_told(tiny: LoadedModel) -> None:
    deaths: list[BaseException] = []

    async def work() -> None:
        async with serving(tiny) as allm:
            allm.on_death = deaths.append
            stream = await allm.add([AsyncRequest("a", [5, 6], LONG)])
            allm.llm.engine.step = broken  # type: ignore[method-assign]
            with pytest.raises(EngineDead, match="no memory"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineDead, match="start it again"):
                await allm.add([AsyncRequest("b", [5, 6], LONG)])
            assert not allm.num_open

    def broken() -> list[RequestUpdate]:
        raise MemoryError("no memory")

    run(work)
    assert [str(error) for error in deaths] == ["no memory"]


class Uninterested:
    """An observer that does without what it need not have."""

    def added(self, request_id: str, params: Any, num_prompt_tokens: int, arrival_time: float) -> None: ...

    def after_step(self, updates: Any, stats: Stats, num_running: int, num_waiting: int, now: float) -> None: ...


def test_observers_are_told_on_the_engines_thread_of_all_that_is_taken(tiny: LoadedModel) -> None:
    class Counting:
        def __init__(self) -> None:
            self.names: list[str] = []
            self.num_tokens = 0
            self.threads: set[str] = set()

        def added(self, request_id: str, params: Any, num_prompt_tokens: int, arrival_time: float) -> None:
            assert num_prompt_tokens == 2
            assert arrival_time <= time.perf_counter()
            self.names.append(request_id)

        def refused(self, number: int) -> None:
            raise AssertionError("the queue was not full")

        def after_step(self, updates: Any, stats: Stats, num_running: int, num_waiting: int, now: float) -> None:
            self.threads.add(threading.current_thread().name)
            self.num_tokens += sum(len(new.new_token_ids) for update in updates for new in update.completions)
            assert self.num_tokens == stats.generated_tokens

    counting = Counting()

    async def work() -> None:
        async with serving(tiny, observers=[counting]) as allm:
            _, output = await collect(allm.generate([5, 6], SamplingParams(max_tokens=7), "seen"))
            assert counting.num_tokens == len(output.outputs[0].token_ids)
            with pytest.raises(InvalidRequest):
                await collect(allm.generate([10**6]))

    run(work)
    assert counting.names == ["seen"]
    assert counting.threads == {"minipaged-engine"}


def test_beams_come_at_once_at_the_end(tiny: LoadedModel) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)

    async def work() -> RequestOutput:
        async with serving(tiny) as allm:
            return (await collect(allm.generate("beams", params)))[1]

    [expected] = LLM(tiny, **SIZES).beam_search(["beams"], params)
    assert run(work).outputs == expected.outputs


def test_long_texts_are_tokenized_beside_the_loop(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    encode = Tokenizer.encode

    def noting(tokenizer: Tokenizer, text: str) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(tokenizer, text)

    monkeypatch.setattr(Tokenizer, "encode", noting)

    async def work() -> None:
        async with serving(tiny) as allm:
            await anext(allm.generate("short"))
            assert threads == [threading.current_thread().name]  # where it takes no turn of anybody's
            with pytest.raises(InvalidRequest, match="no room"):
                await anext(allm.generate({"prompt": "long" * 1000}))
            assert threads[1].startswith("minipaged-tokenizer")  # and it lets the loop go on (test_http.py)

    run(work)


def test_short_texts_wait_for_no_long_one_and_come_in_order(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    encode = Tokenizer.encode
    order: list[str] = []

    def slowly(tokenizer: Tokenizer, text: str) -> list[int]:
        if len(text) > 100:
            assert go_on.wait(PATIENCE_S)
        return encode(tokenizer, text[:100])

    monkeypatch.setattr(Tokenizer, "encode", slowly)

    async def ask(allm: AsyncLLM, text: str, name: str) -> None:
        await collect(allm.generate(text, SamplingParams(max_tokens=1), name))
        order.append(name)

    async def work() -> None:
        async with serving(tiny, max_num_seqs=1) as allm:
            long = [asyncio.create_task(ask(allm, "long" * 1000, f"long {i}")) for i in range(40)]
            await asyncio.gather(*(ask(allm, f"short {i}", str(i)) for i in range(20)))
            assert order == [str(i) for i in range(20)]
            go_on.set()
            await asyncio.gather(*long)

    run(work)


def test_a_long_text_that_waits_when_the_engine_shuts_down_is_told(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slowly(tokenizer: Tokenizer, text: str) -> list[int]:
        began.set()
        assert go_on.wait(PATIENCE_S)
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", slowly)

    async def work() -> None:
        allm = AsyncLLM(tiny, **SIZES)
        first, second = (asyncio.create_task(collect(allm.generate("long" * 1000))) for _ in range(2))
        await asyncio.to_thread(began.wait)
        await asyncio.wait_for(allm.shutdown(), PATIENCE_S)  # it does not wait for what it cannot end
        with pytest.raises(ShuttingDown):
            await second
        go_on.set()
        with pytest.raises(ShuttingDown):
            await first

    run(work)


@thorough
def test_a_crowd_of_whom_a_third_vanishes_leaves_nothing(tiny: LoadedModel) -> None:
    rng = random.Random(0)

    async def client(allm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=rng.randint(1, 30), n=rng.choice([1, 1, 2]), ignore_eos=True)
        prompt = [rng.randrange(3, 200) for _ in range(20)]
        task = asyncio.ensure_future(collect(allm.generate(prompt, params)))
        if rng.random() < 1 / 3:
            await asyncio.sleep(rng.random() / 50)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def work() -> None:
        async with serving(tiny, max_num_seqs=8) as allm:
            for _ in range(30):
                await asyncio.gather(*(client(allm) for _ in range(20)))
            assert not allm.num_open

    run(work)
