"""The live page tells what the engine has, to whoever looks and however slowly; and it can be used by everybody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser

from minipaged import SamplingParams
from minipaged.events import (
    BlockCached,
    BlockEvicted,
    BlocksFreed,
    BlocksPassed,
    EngineStarted,
    Event,
    PrefixReused,
    RequestAdmitted,
    RequestArrived,
    RequestPreempted,
    StepFinished,
    TokenGenerated,
    TokensComputed,
)
from minipaged.llm import LoadedModel
from minipaged.models.config import ModelConfig
from minipaged.params import EngineConfig
from minipaged.replay.state import LETTERS, PoolState, State
from minipaged.serve.live import watch as watch_module
from minipaged.serve.live.watch import KEPT_FIGURES, KEPT_REQUESTS, LONGEST_BACKLOG, Watch
from minipaged.serve.settings import ServeSettings
from minipaged.stepper import Storyteller
from minipaged.tiers import ReferenceTier, reference_tier
from tests.browser import Watched, axe_script, axe_violations
from tests.serve.harness import PATIENCE_S, Served, served, wait_until
from tests.workloads import Workload, WorkloadRun, random_workload, windowed

Json = dict[str, Any]
MODEL = Storyteller([" ".join(f"word{i}" for i in range(4000))])
"""Continues with the next word, so that whatever prompts have their beginnings in common."""
KEY = "a secret"


# --- What a watch tells ---------------------------------------------------------------------------


@dataclass
class Page:
    """One page's frames, put together."""

    device: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Block -> letter, holders, filled slots, cached; free ones are left out."""
    host: dict[int, tuple[int, ...]] = field(default_factory=dict)
    requests: dict[int, list[Any]] = field(default_factory=dict)
    figures: list[Any] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)

    def take(self, frame: bytes) -> None:
        self.frames.append(frame)
        told: Json = json.loads(frame)
        if told.get("whole"):
            self.device, self.host, self.requests, self.figures = {}, {}, {}, []
        for pool, runs in ((self.device, told.get("device", [])), (self.host, told.get("host", []))):
            for first, number, *cell in runs:
                for block in range(first, first + number):
                    pool[block] = tuple(cell)
                    if tuple(cell) == (-1, 0, 0, 0):
                        del pool[block]
        for row in told.get("requests", []):
            self.requests[row[0]] = row
        for number, generated in told.get("grown", []):
            self.requests[number][-1] = generated
        self.figures += told["figures"]

    def shows(self, state: State) -> bool:
        with contextlib.suppress(AssertionError):
            self.check(state)
            return True
        return False

    def check(self, state: State) -> None:
        """The page shows what the state is."""
        assert self.figures, "it was told nothing"
        assert self.device == cells(state, state.device)
        assert self.host == cells(state, state.host)
        live = {row[1]: row for row in self.requests.values() if row[2] in ("waiting", "running", "swapped")}
        assert {name: (row[2], row[3], row[4]) for name, row in live.items()} == {
            name: (request.queue, "".join(s.letter for s in request.sequences), len(request.prompt))
            for name, request in state.requests.items()
        }
        swapped = state.num_swapped
        assert self.figures[-1][1:6] == [
            state.step,
            len(state.running),
            len(state.waiting) - swapped,
            swapped,
            state.num_generated,
        ]
        assert self.figures[-1][8] == len(state.device.holders)
        windows = any(state.group_windows)
        assert self.figures[-1][10:] == [state.held_by_group, state.counts["blocks passed"]] * windows


def cells(state: State, pool: PoolState) -> dict[int, tuple[int, ...]]:
    cached = state.cached if pool is state.device else {}
    found = dict.fromkeys(cached, (-1, 0, state.block_size, 1))
    for block, holders in pool.holders.items():
        letter = LETTERS.find(state.sequences[holders[0]].letter)
        place = letter if letter >= 0 else len(LETTERS)
        found[block] = (place, len(holders), pool.filled[block], int(block in cached))
    return found


def events_of(workload: Workload) -> list[Event]:
    heard: list[Event] = []
    WorkloadRun(workload, listeners=[heard.append]).to_the_end()
    return heard


def test_the_frames_of_slow_and_quick_pages_add_up_to_the_state() -> None:
    """After any number of events, for whoever reads then: however much he has left out."""
    seen: set[str] = set()
    for seed in range(12):
        seen |= follow_with_pages(events_of(random_workload(seed)))
    assert seen > {"swapped_in", "prefix_reused", "sequence_forked", "block_copied", "block_deduplicated"}
    assert seen > {"block_evicted", "request_preempted", "beam_finished"}


def test_so_do_they_where_layers_are_in_groups() -> None:
    seen: set[str] = set()
    for seed in (2, 9, 17, 21, 37):
        seen |= follow_with_pages(events_of(windowed(seed)))
    assert seen > {"blocks_passed", "prefix_reused", "sequence_forked", "block_copied"}


def follow_with_pages(events: list[Event]) -> set[str]:
    """Returns what kinds of events there were."""
    state, watch = State(), Watch(interval=0)
    readers = [(1 + 7 * place, watch.frames(), Page()) for place in range(4)]

    async def follow() -> None:
        for number, event in enumerate(events, start=1):
            state.apply(event)
            watch(event)
            for pace, frames, page in readers:
                if number % pace == 0:
                    page.take(await anext(frames))
                    page.check(state)

    asyncio.run(follow())
    assert not watch.error
    passed = sum(len(event.blocks) for event in events if isinstance(event, BlocksPassed))
    assert watch.state.counts["blocks passed"] == passed
    return {event.name for event in events}


def test_what_each_request_has_generated_and_found_is_told() -> None:
    watch, page = Watch(interval=0), Page()
    engine = MODEL.engine(num_blocks=64, block_size=4, enable_prefix_caching=True)
    engine.listeners.append(watch)
    for name in ("first", "second"):
        engine.add_request(list(range(30)), SamplingParams(max_tokens=6, temperature=0), request_id=name)
        while engine.has_unfinished_requests():
            engine.step()

    async def read() -> None:
        page.take(await anext(watch.frames()))

    asyncio.run(read())
    first, second = page.requests[0], page.requests[1]
    assert first[1:6] == ["first", "finished", "", 30, 0]
    assert second[1:6] == ["second", "finished", "", 30, 29]
    assert sum(number for _, number in second[6]) == 8  # the last of them in part
    assert [row[-1] for row in (first, second)] == [6, 6]
    assert page.figures[-1][6:8] == [60, 29]  # of the 60 tokens of both prompts, 29 were found


def test_a_request_that_comes_back_is_told_by_what_it_found_first() -> None:
    watch, page = Watch(interval=0), Page()
    found, computed = PrefixReused(1, (0,), "cache"), TokensComputed(1, 6, (1,), 0)
    for event in (
        *(EngineStarted(8, 0, 4, 32), RequestArrived("a", 0, (1, 2, 3, 4), 1), RequestArrived("b", 1, (1,) * 6, 1)),
        *(RequestAdmitted("a", 4), TokensComputed(0, 4, (0,), 0), BlockCached(0, 0, 0)),
        *(RequestAdmitted("b", 6), found, computed, TokenGenerated("b", 1, 3, 0.0)),
        *(
            RequestPreempted("b", "recompute", 2, 6, 1),
            BlocksFreed(1, (0, 1)),
            RequestAdmitted("b", 6),
            found,
            computed,
        ),
    ):
        watch(event)

    async def read() -> None:
        page.take(await anext(watch.frames()))

    asyncio.run(read())
    assert not watch.error
    assert page.requests[1][5:7] == [4, [[0, 1]]]
    assert page.figures[-1][6:8] == [16, 8]  # as the metrics have it: it was looked up twice


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_ttft_is_counted_from_arrival_to_the_first_token_and_not_to_the_next_frame() -> None:
    clock, page = Clock(), Page()
    watch = Watch(interval=0, clock=clock)
    watch(EngineStarted(8, 0, 4, 32))
    watch(RequestArrived("slow", 0, (1, 2), 1))
    clock.now += 0.25
    watch(TokenGenerated("slow", 0, 3, 0.0))
    clock.now += 1
    watch(TokenGenerated("slow", 0, 4, 0.0))

    async def read() -> None:
        page.take(await anext(watch.frames()))

    asyncio.run(read())
    assert page.requests[0][7] == 250
    assert page.figures[-1][9] == 250


def test_nothing_is_sent_while_nothing_changes_but_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(interval=0.001)
    watch(EngineStarted(8, 0, 4, 32))

    async def read() -> list[bytes]:
        frames = watch.frames()
        got = [await anext(frames)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(frames), 0.05)
        monkeypatch.setattr(watch_module, "QUIET", 0.02)
        frames = watch.frames()
        return [*got, await anext(frames), await anext(frames)]

    first, again, life = asyncio.run(read())
    assert first == again != b""
    assert life == b""


def test_a_page_that_sleeps_makes_nothing_grow_and_then_gets_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "LONGEST_BACKLOG", 500)
    watch, state = Watch(interval=0), State()
    engine = MODEL.engine(num_blocks=64, block_size=4, enable_prefix_caching=True)
    engine.listeners.append(watch)
    engine.listeners.append(state.apply)
    engine.add_request(list(range(9)), SamplingParams(max_tokens=5, temperature=0))
    engine.step()
    sleeper, awake, page = watch.frames(), watch.frames(), Page()

    async def sleep() -> None:
        page.take(await anext(sleeper))
        for number in range(300):  # more than are remembered when they have ended
            first = number * 11 % 3000
            engine.add_request(list(range(first, first + 9)), SamplingParams(max_tokens=5, temperature=0))
            while engine.has_unfinished_requests():
                engine.step()
            assert len(watch._backlog) <= 501
            if number % 2:
                await anext(awake)
        page.take(await anext(sleeper))

    asyncio.run(sleep())
    page.check(state)
    assert b'"whole"' in page.frames[-1]  # it has not seen how some ended that are forgotten
    assert len(page.requests) == len(watch._requests) == KEPT_REQUESTS
    assert len(watch._device) <= 64


def test_with_no_page_at_all_the_backlog_is_bounded() -> None:
    watch = Watch()
    watch(EngineStarted(8, 0, 4, 10**9))
    watch(RequestArrived("endless", 0, (1, 2), 1))
    for _ in range(2 * LONGEST_BACKLOG):
        watch(TokenGenerated("endless", 0, 3, 0.0))
    assert len(watch._backlog) <= LONGEST_BACKLOG + 1
    watch._fold(10**9)
    assert watch.state.num_generated == 2 * LONGEST_BACKLOG


def test_figures_are_bounded() -> None:
    watch = Watch(interval=0)
    watch(EngineStarted(8, 0, 4, 10**9))

    async def read() -> None:
        frames, page = watch.frames(), Page()
        for step in range(KEPT_FIGURES + 50):
            watch(StepFinished(step, 1, 1, 0.01))
            page.take(await anext(frames))
        assert len(page.figures) == KEPT_FIGURES + 50
        late = Page()
        late.take(await anext(watch.frames()))
        assert late.figures == page.figures[-KEPT_FIGURES:]

    asyncio.run(read())


def test_many_pages_share_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    events, watch = events_of(random_workload(3)), Watch(interval=0.001)
    told: list[int] = []
    tell_since = Watch._tell_since
    monkeypatch.setattr(Watch, "_tell_since", lambda self, seen: told.append(seen) or tell_since(self, seen))

    pages, state = [Page() for _ in range(20)], State()
    for event in events:
        state.apply(event)

    async def read(page: Page) -> None:
        async for frame in watch.frames():
            page.take(frame)

    async def look() -> None:
        readers = [asyncio.create_task(read(page)) for page in pages]
        for event in events:
            watch(event)
            await asyncio.sleep(0)
        while not all(page.shows(state) for page in pages):
            await asyncio.sleep(0.01)
        watch.close()
        await asyncio.gather(*readers)

    asyncio.run(asyncio.wait_for(look(), PATIENCE_S))
    for page in pages:
        page.check(state)
    assert len(told) < sum(len(page.frames) for page in pages) / 4


def test_events_that_do_not_follow_end_the_telling_and_not_the_engine() -> None:
    watch = Watch(interval=0)
    watch(EngineStarted(8, 0, 4, 32))
    watch(BlockEvicted(3))
    watch(EngineStarted(8, 0, 4, 32))

    async def read() -> Json:
        told: Json = json.loads(await anext(watch.frames()))
        return told

    assert "block_evicted does not follow" in asyncio.run(read())["error"]


def test_a_busy_engine_of_10_000_blocks_is_told_in_few_bytes() -> None:
    watch, page = Watch(interval=0), Page()
    engine = MODEL.engine(num_blocks=10_000, block_size=16, max_model_len=4000)
    engine.listeners.append(watch)
    for number in range(32):
        prompt = list(range(number, number + 2000))
        engine.add_request(prompt, SamplingParams(max_tokens=60, temperature=0), request_id=f"chatcmpl-{number:032x}")
    while len(watch.state.running) < 32 or watch.state.waiting:
        engine.step()
        watch._fold(10**9)

    async def read() -> None:
        frames = watch.frames()
        for _ in range(8):
            engine.step()
            engine.step()
            page.take(await anext(frames))

    asyncio.run(read())
    whole, *later = [len(frame) for frame in page.frames]
    assert whole < 100_000
    assert max(later) < 2_500  # 25 kB a second
    assert sum(map(bool, page.device)) > 4000


def test_the_stream_ends_when_the_client_leaves_and_when_the_server_does(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that looks does not keep the server from ending, either."""
    looking: list[Watch] = []
    frames_of_watch = Watch.frames

    async def frames(watch: Watch) -> AsyncIterator[bytes]:
        looking.append(watch)
        try:
            async for frame in frames_of_watch(watch):
                yield frame
        finally:
            looking.remove(watch)

    monkeypatch.setattr(Watch, "frames", frames)
    with served(tiny, ServeSettings(shutdown_timeout=10 * PATIENCE_S)) as running, httpx.Client() as client:
        with client.stream("GET", f"{running.url}/live/events") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.iter_lines()  # which ends the stream when it is let go
            assert next(lines).startswith('data: {"whole":true')
            assert len(looking) == 1
        wait_until(lambda: not looking)
        with client.stream("GET", f"{running.url}/live/events") as answer:
            lines = answer.iter_lines()
            next(lines)
            assert len(looking) == 1
            running.terminate()
            assert list(lines)[-1:] == [""]
            running.thread.join(PATIENCE_S)
            assert not running.thread.is_alive()
        assert not looking


def test_the_page_is_open_and_what_it_shows_is_behind_the_key(tiny: LoadedModel) -> None:
    with served(tiny, ServeSettings(api_key=KEY)) as running:
        for path in ("/", "/assets/live.js", "/assets/live.css"):
            answer = running.get(path)
            assert answer.status_code == 200
            assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert running.get("/live/events").status_code == 401


# --- In a browser ---------------------------------------------------------------------------------


SCREENS = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}
ANSWER = "<b>The quick,lazy-dogs!"
"""What the model below says to everybody who chats."""
AROUND = 19
"""Tokens of a conversation with one question, beside the question, in which each character is one."""


class TellersTier(ReferenceTier):
    def make_runner(self, config: ModelConfig, weights: Any, engine_config: EngineConfig) -> Any:
        return weights


@pytest.fixture(scope="module")
def teller(tiny: LoadedModel) -> LoadedModel:
    """Knows its answer by heart, and goes on with the next token else; those from 300 on are no text."""
    model = copy(MODEL)
    model.following = MODEL.following.copy()
    assert tiny.tokenizer
    for token, after in pairwise([*tiny.tokenizer.encode(f"\n{ANSWER}"), tiny.config.eos_token_ids[0]]):
        model.following[token] = [after]
    config = replace(tiny.config, vocab_size=len(MODEL.words), max_position_embeddings=len(MODEL.words))
    return replace(tiny, config=config, tier=TellersTier.of(reference_tier(), "cpu", "float32"), weights=model)


DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Done when the page has been drawn as it is now."""


def until(page: Any, condition: str) -> None:
    """Wait until something holds on the page. (Playwright's own waiting is forbidden by the page's policy.)"""
    wait_until(lambda: bool(page.evaluate(condition)))


@dataclass
class Opened:
    server: Served
    watched: Watched
    client: httpx.Client
    stack: contextlib.ExitStack

    @property
    def page(self) -> Any:
        return self.watched.page

    def until(self, condition: str) -> None:
        """Wait until something holds of `shown`, the state on the page."""
        until(self.page, f"(() => {{ const shown = minipaged.shown(); return {condition}; }})()")

    def add(self, name: str, length: int, max_tokens: int, *, begin: Sequence[int] = (300,), **params: Any) -> None:
        """Ask for what follows on prompts of this length, which begin with these tokens and go on as MODEL does."""
        prompts = [list(range(first, first + length)) for first in begin]
        asked = {"prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "request_id": name, "stream": True}
        self.stack.enter_context(self.client.stream("POST", f"{self.server.url}/v1/completions", json=asked | params))

    def keep_busy(self, num_requests: int, length: int) -> None:
        """For long, with free, held, shared and cached blocks."""
        begin = range(300, 300 + 150 * num_requests, 150)
        self.add("over", length, 1, begin=begin[:1])
        self.add("two", length, 150, begin=begin[1:2], n=2)
        self.add("one", length, 150, begin=begin[2:])


@pytest.fixture
def open_page(browser: Browser, teller: LoadedModel) -> Iterator[Callable[..., Opened]]:
    """Opens the page of a small server; at the end, it has complained of nothing and asked for nothing elsewhere."""
    with contextlib.ExitStack() as stack:
        opened: list[Opened] = []

        def open_page(
            num_blocks: int = 64,
            step_seconds: float = 0.005,
            num_swap_blocks: int = 8,
            windows: tuple[int | None, ...] = (),
            **settings: Any,
        ) -> Opened:
            model = replace(teller, config=replace(teller.config, layer_windows=windows))
            running = stack.enter_context(served(model, num_blocks=num_blocks, num_swap_blocks=num_swap_blocks))
            stack.enter_context(running.slow(step_seconds))
            client = stack.enter_context(httpx.Client(timeout=PATIENCE_S))
            found = Opened(running, Watched(browser, **settings), client, stack)
            stack.callback(found.page.close)
            found.page.goto(running.url)
            found.until("shown.sizes[0] > 0")
            opened.append(found)
            return found

        yield open_page
        for one in opened:
            one.watched.check()
            assert {urlsplit(asked).netloc for asked in one.watched.asked} == {urlsplit(one.server.url).netloc}


def folded(opened: Opened) -> State:
    """What the engine's events come to."""
    watch = opened.server.server.serving.watch
    assert watch
    return watch.state


SHOWN = """() => {
  const {device, requests, figures} = minipaged.shown();
  const cells = {};
  for (let i = 0; i < device.length; i++) {
    const cell = [device.letter[i], device.holders[i], device.filled[i], device.cached[i]];
    if (cell.join() !== "-1,0,0,0") cells[i] = cell;
  }
  return {cells, step: figures[1], names: [...requests.values()].map((r) => [r.id, r.queue, r.generated]).sort()};
}"""


def test_the_page_shows_what_the_engine_has(open_page: Callable[..., Opened]) -> None:
    opened = open_page(step_seconds=0.02)
    opened.add("first", 100, 30, n=3)
    opened.add("second", 70, 10)
    opened.until("[...shown.requests.values()].some((r) => r.queue === 'running' && r.letters.length === 3)")
    page = opened.page
    assert "shared)" in page.locator("#counts").text_content()
    assert page.locator("#rows .swatch").count() >= 3
    opened.until("[...shown.requests.values()].every((r) => r.queue === 'finished') && shown.requests.size === 2")
    shown, state = page.evaluate(SHOWN), folded(opened)
    assert {int(block): tuple(cell) for block, cell in shown["cells"].items()} == cells(state, state.device)
    assert shown["step"] == state.step
    names = [[name.rpartition("-")[0], *rest] for name, *rest in shown["names"]]
    assert names == [["cmpl-first", "finished", 90], ["cmpl-second", "finished", 10]]
    assert page.locator("#model").text_content() == "tiny"
    assert page.locator("#groups").is_hidden()
    captions = " ".join(page.locator("figcaption").all_text_contents())
    assert "running, waiting (dashed), swapped (dotted): 0, 0, 0" in captions
    until(page, "document.querySelector('#plots').textContent.includes('tokens a second: 0')")  # a second later
    assert re.search(r"time to first token: [\d,]+ ms", captions)
    assert re.search(r"prompt tokens found in the cache: \d+ %", captions)
    with opened.server.slow(1.0):  # one long time to first token leaves the others to be seen
        opened.add("late", 20, 1)
        opened.until("shown.requests.size === 3 && shown.figures[2] + shown.figures[3] === 0")
    plot = page.locator("figure", has_text="time to first token")
    until(page, "document.querySelector('#plots').textContent.includes('broken bars')")
    told = re.search(r"ms \(most ([\d,]+); broken bars: over ([\d,]+)\)", plot.text_content())
    most, cut = (int(number.replace(",", "")) for number in told.groups())
    assert cut < 1000 <= most
    ends = [float(end) for end in re.findall(r"V([\d.]+)", plot.locator("path").get_attribute("d"))]
    assert sorted(ends)[:3] == [0, 12, pytest.approx(30)]  # both parts of the broken bar; the longest of the others


def test_blocks_are_counted_by_group_of_layers_where_some_have_a_window(open_page: Callable[..., Opened]) -> None:
    opened = open_page(windows=(None, 40))
    opened.add("one", 100, 30)
    opened.until("shown.figures[11] > 0")
    opened.until("[...shown.requests.values()].every((r) => r.queue === 'finished') && shown.requests.size === 1")
    state = folded(opened)
    assert opened.page.locator("#groups").is_visible()
    assert opened.page.locator("#groups").text_content() == (
        "Held by layers: 0 in group 0 (sees all), 0 in group 1 (last 40 tokens). "
        f"Windows have passed {state.counts['blocks passed']} blocks, which were given back."
    )
    watch = opened.server.server.serving.watch
    assert watch
    held = [(figures[8], *figures[10]) for _, figures in watch._figures]
    assert all(all_held == first + second for all_held, first, second in held)
    assert any(first > second > 0 for _, first, second in held)


def test_one_can_step_back_and_on_again(open_page: Callable[..., Opened]) -> None:
    opened = open_page(step_seconds=0.02)
    page = opened.page
    page.evaluate(
        """() => {  // remember each state as it was when it was the newest
          const {history} = minipaged;
          globalThis.were = [];
          const push = history.push.bind(history);
          history.push = (frame) => { push(frame); were[history.last] = history.latest.copy(); };
        }"""
    )
    opened.add("first", 100, 80, n=2)
    opened.add("second", 50, 60)
    opened.until("[...shown.requests.values()].every((r) => r.queue === 'finished') && shown.requests.size === 2")
    same = page.evaluate(
        """() => Object.keys(were).reverse().map((n) => [
          JSON.stringify([...minipaged.history.at(Number(n)).requests, minipaged.history.at(Number(n))]),
          JSON.stringify([...were[n].requests, were[n]])])"""
    )
    assert len(same) > 10
    assert len({then for _, then in same}) == len(same)
    assert all(back == then for back, then in same)
    page.get_by_role("button", name="Pause").click()
    newest = page.evaluate("minipaged.history.last")
    page.get_by_role("button", name="One change back").click()
    page.get_by_role("button", name="One change back").click()
    until(page, f"document.querySelector('#when').value === '{newest - 2}'")
    assert "s before the newest" in page.locator("#moment").text_content()
    page.get_by_role("button", name="One change on").click()
    page.get_by_role("slider", name="Change").press("Home")
    until(page, "minipaged.shown().figures[1] === 0")
    assert page.get_by_role("button", name="One change back").is_disabled()
    opened.add("third", 50, 5)  # what comes meanwhile does not disturb who looks at the past
    until(page, f"minipaged.history.last > {newest}")
    assert page.evaluate("minipaged.shown().figures[1]") == 0
    page.get_by_role("button", name="Live").click()
    opened.until(
        "shown === minipaged.history.latest && [...shown.requests.values()].some((r) => r.id.startsWith('cmpl-third'))"
    )


def test_the_history_is_bounded_and_says_so(open_page: Callable[..., Opened]) -> None:
    opened = open_page()
    sizes = opened.page.evaluate(
        """() => {
          const {history} = minipaged;
          for (let i = 1; i <= 1500; i++) {
            history.push({device: [[i % 64, 1, i % 50, 1, 3, 0]], figures: [[i, i, 0, 0, 0, 0, 0, 0, 0, null]]});
          }
          const {frames, copies, first, last} = history;
          const [oldest, newest] = [first, last].map((n) => history.at(n).figures[0]);
          return [frames.length, copies.length, last - first + 1, oldest, newest];
        }"""
    )
    frames, copies, length, oldest, newest = sizes
    assert 600 <= frames == length <= 650
    assert copies <= 13
    assert newest == 1500
    assert oldest == 1500 - frames + 1
    assert "The last 600 changes are kept" in opened.page.locator("#moment").text_content()


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def test_the_chat_says_which_blocks_each_turn_shared(open_page: Callable[..., Opened]) -> None:
    opened = open_page()
    page = opened.page
    first, second, said = "three words here", "and more", len(ANSWER)
    ask(page, first)
    notes = page.locator("#turns .note")
    length = AROUND + len(first)
    until(page, f"/ {said + 1} tokens.*usage/.test(document.querySelector('#turns .note')?.textContent)")
    note = notes.first.text_content()
    assert f"Shared no block: all {length} prompt tokens were computed. {said + 1} tokens generated. (usage: 0" in note
    assert page.locator("#turns .text").nth(1).text_content() == ANSWER
    assert page.locator("#turns .text").nth(1).locator("b").count() == 0  # what the model says is only text
    ask(page, second)
    until(page, "document.querySelectorAll('#turns .note')[1]?.textContent.includes('usage')")
    found = length + said
    length += said + 2 + AROUND + len(second)  # an answer has an end and a new line behind it
    note = notes.nth(1).text_content()
    assert f"Shared {-(-found // 16)} blocks with earlier requests: {found} of {length} prompt tokens" in note
    assert f"(usage: {found} cached)" in note
    show = page.get_by_role("button", name="Show them")
    page.locator("#send").scroll_into_view_if_needed()
    at = show.bounding_box()
    assert 24 <= at["height"] < 30  # it is among text, and can be reached from 40 px
    for y in (-7, at["height"] + 7):
        reached = page.evaluate("([x, y]) => document.elementFromPoint(x, y).textContent", [at["x"] + 9, at["y"] + y])
        assert reached == "Show them"
    show.click()
    assert show.get_attribute("aria-pressed") == "true"
    show.click()
    assert show.get_attribute("aria-pressed") == "false"
    page.get_by_role("button", name="New conversation").click()
    assert page.locator("#turns li").count() == 0


def test_the_chat_offers_a_tool_and_shows_its_calls(open_page: Callable[..., Opened]) -> None:
    """The server's answers are given here: the model of these tests says one thing only."""
    opened = open_page()
    page = opened.page
    function = {"name": "count_blocks", "arguments": ""}
    deltas: list[list[dict[str, Any]]] = [
        [
            {"content": "I look."},
            {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        ],
        [{"content": "All are free."}],
        [{"content": "Yes."}],
    ]
    asked: list[dict[str, Any]] = []

    def fulfil(route: Any) -> None:
        asked.append(route.request.post_data_json)
        events = [f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas[len(asked) - 1]]
        route.fulfill(content_type="text/event-stream", body="".join([*events, "data: [DONE]\n\n"]))

    page.route("**/v1/chat/completions", fulfil)
    page.get_by_label("Offer the model a tool").check()
    ask(page, "How full is it?")
    page.get_by_text("All are free.").wait_for()
    result = '{"held":0,"cached":0,"free":64}'
    assert page.locator("#turns li").nth(1).locator(".text").all_text_contents() == [
        "I look.",
        f"count_blocks({{}}) → {result}",
    ]
    page.get_by_label("Offer the model a tool").uncheck()
    ask(page, "Really?")
    page.get_by_text("Yes.").wait_for()
    assert [[tool["function"]["name"] for tool in body.get("tools", [])] for body in asked] == [
        ["count_blocks"],
        ["count_blocks"],
        [],
    ]
    call = {"id": "call_1", "type": "function", "function": {"name": "count_blocks", "arguments": "{}"}}
    assert asked[2]["messages"] == [
        {"role": "user", "content": "How full is it?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
        {"role": "assistant", "content": "All are free."},
        {"role": "user", "content": "Really?"},
    ]


def test_the_chat_can_be_stopped_and_then_nothing_goes_on(open_page: Callable[..., Opened]) -> None:
    opened = open_page(step_seconds=0.1)
    page = opened.page
    send, stop = (page.get_by_role("button", name=name) for name in ("Send", "Stop"))
    wait = page.locator("#wait")
    assert wait.text_content() == ""
    ask(page, "a long story")
    until(page, "document.querySelector('#turns li:last-child .text').textContent.includes('b>T')")
    assert not send.is_enabled()
    assert wait.text_content() == "Send waits for the answer to end; Stop ends it."
    ask(page, "another one")
    assert "stays here" in wait.text_content()
    send.click(force=True)
    assert page.get_by_label("Message").input_value() == "another one"
    stop.click()
    page.get_by_text("Stopped.").wait_for()
    opened.until("[...shown.requests.values()].map((r) => r.queue).join() === 'aborted'")
    opened.server.check_nothing_is_left()
    assert send.is_enabled()
    assert stop.is_disabled()
    assert wait.text_content() == ""
    assert page.locator("#turns li").count() == 2  # the one answer, of the one question


def test_the_chat_says_that_a_question_is_being_read_or_waits(open_page: Callable[..., Opened]) -> None:
    opened = open_page()
    page, question = opened.page, "a long question"
    tokens = f"{AROUND + len(question)} prompt tokens"
    note = "document.querySelector('#turns li:last-child .note').textContent"
    with opened.server.slow(0.5):
        ask(page, question)
        until(page, f"{note}.includes('Reading {tokens} …')")
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("Stopped.").wait_for()
        opened.until("[...shown.requests.values()].map((r) => r.queue).join() === 'aborted'")
        page.get_by_role("button", name="New conversation").click()
        opened.add("other", 50, 20)
        opened.until("[...shown.requests.values()].some((r) => r.queue === 'running')")
        ask(page, question)
        until(page, f"{note}.includes('Waiting for its turn, or being read already: {tokens}.')")
    until(page, f"/[1-9][0-9]* tokens generated/.test({note})")


TOO_LONG = "x" * 5000


@pytest.mark.thorough
def test_the_chat_says_what_went_wrong_and_goes_on(open_page: Callable[..., Opened]) -> None:
    opened = open_page()
    page = opened.page
    ask(page, TOO_LONG)
    page.get_by_role("alert").get_by_text("maximum context length is 1024 tokens").wait_for()
    assert any("400" in said for said in opened.watched.complaints)  # the browser's own word for it
    opened.watched.complaints.clear()
    ask(page, "better now")
    until(page, "document.querySelectorAll('#turns .note').length === 2")
    all_of = f"all {AROUND + len('better now')} prompt tokens"
    until(page, f"document.querySelectorAll('#turns .note')[1].textContent.includes('{all_of}')")


@pytest.mark.thorough
def test_what_is_asked_and_how_requests_are_named_is_only_text(open_page: Callable[..., Opened]) -> None:
    opened = open_page()
    evil = "<img src=x onerror=alert(1)>"
    ask(opened.page, evil)
    opened.until("shown.requests.size === 1")
    engine = opened.server.allm.llm.engine
    opened.server.on_engine(lambda: engine.add_request([1, 2], SamplingParams(max_tokens=3), request_id=evil))
    opened.until(f"[...shown.requests.values()].some((r) => r.id === '{evil}')")
    assert evil in opened.page.locator("#turns").text_content()
    until(opened.page, f"document.querySelector('#rows [title=\"{evil}\"]')")
    assert opened.page.locator("img").count() == 0


@pytest.mark.thorough
def test_a_page_whose_server_is_started_again_shows_the_new_one(
    open_page: Callable[..., Opened], teller: LoadedModel
) -> None:
    opened = open_page()
    page = opened.page
    opened.add("before", 40, 5)
    opened.until("shown.requests.size === 1")
    opened.server.terminate()
    page.get_by_text("not connected, trying again").wait_for()
    opened.server.thread.join(PATIENCE_S)
    with served(teller, port=urlsplit(opened.server.url).port or 0, num_blocks=32):
        opened.until("shown.device.length === 32 && shown.requests.size === 0")
        assert page.locator("#status").text_content() == "connected"
        page.close()
    assert all("ERR_" in said for said in opened.watched.complaints)  # while there was no server
    opened.watched.complaints.clear()


def test_with_a_key_the_page_asks_for_it_until_it_is_right(browser: Browser, teller: LoadedModel) -> None:
    with served(teller, ServeSettings(api_key=KEY), num_blocks=64) as running:
        page = browser.new_page()
        page.goto(running.url)
        for wrong_or_right in ("wrong", KEY):
            page.get_by_label("This server wants its API key").fill(wrong_or_right)
            page.keyboard.press("Enter")
            if wrong_or_right == "wrong":
                page.get_by_text("this key is not the server's").wait_for()
        until(page, "minipaged.shown().device.length === 64")
        assert page.locator("form#key").is_hidden()
        ask(page, "hello")
        all_of = f"{AROUND + len('hello')} prompt tokens"
        until(page, f"document.querySelector('#turns .note')?.textContent.includes('{all_of}')")
        page.reload()
        until(page, "minipaged.shown().device.length === 64")  # it is known as long as the tab is open
        page.close()


GREY = """() => {
  const canvas = document.querySelector("#device"), pen = canvas.getContext("2d"), {device} = minipaged.shown();
  const box = canvas.getBoundingClientRect(), scale = canvas.width / box.width;
  const {pitch, columns, number} = minipaged.maps.device;
  const {data} = pen.getImageData(0, 0, canvas.width, canvas.height);
  const grey = {};
  for (let i = 0; i < number; i++) {
    const holders = device.holders[i];
    const kind = holders > 1 ? "shared" : holders ? "held" : device.cached[i] ? "cached" : "free";
    const place = [(i % columns) * pitch, Math.floor(i / columns) * pitch, pitch];
    const [x, y, side] = place.map((v) => Math.round(v * scale));
    let sum = 0;
    for (let row = y; row < y + side; row++) {
      for (let column = x; column < x + side; column++) {
        const [r, g, b, a] = data.subarray(4 * (row * canvas.width + column));
        sum += (a / 255) * (255 - (0.2126 * r + 0.7152 * g + 0.0722 * b)) / 255;
      }
    }
    (grey[kind] ??= []).push(sum / side ** 2);
  }
  return grey;
}"""
"""How much darker than the (white) page each kind of block is drawn, from 0 to 1."""


@pytest.mark.parametrize(("num_blocks", "words"), [(64, 160), pytest.param(10_000, 900, marks=pytest.mark.thorough)])
def test_free_cached_and_held_blocks_differ_without_colour(
    open_page: Callable[..., Opened], num_blocks: int, words: int
) -> None:
    opened = open_page(num_blocks, step_seconds=0.05, viewport=SCREENS["desktop"])
    opened.keep_busy(4 if num_blocks == 64 else 8, words)
    opened.until("shown.figures[2] >= 2 && shown.device.counts().cached > 3 && shown.device.counts().shared > 3")
    opened.page.get_by_role("button", name="Pause").click()
    opened.page.evaluate(DRAWN)
    grey = opened.page.evaluate(GREY)
    assert set(grey) == {"free", "cached", "held", "shared"}
    lightest = {kind: min(found) for kind, found in grey.items()}
    darkest = {kind: max(found) for kind, found in grey.items()}
    assert darkest["free"] + 0.03 < lightest["cached"], (lightest, darkest)
    assert darkest["cached"] + 0.03 < lightest["held"], (lightest, darkest)
    drawn, held = opened.page.evaluate("[minipaged.maps.device.number, minipaged.shown().device.counts().held]")
    assert held < drawn == sum(map(len, grey.values()))
    height = opened.page.locator("#device").bounding_box()["height"]
    assert height < 700


def check_plots_and_chat_are_seen(page: Any) -> None:
    """On a desktop without scrolling, on a phone within two screens; and nothing is empty between them."""
    for screen, screens in (("desktop", 1), ("phone", 2)):
        page.set_viewport_size(SCREENS[screen])
        page.evaluate(DRAWN)
        box = page.locator("#question").bounding_box()
        assert box["y"] + box["height"] < screens * SCREENS[screen]["height"]
        plot, chat = (page.locator(part).bounding_box() for part in ("figure:last-child", ".chat"))
        assert 0 <= chat["y"] - plot["y"] - plot["height"] < 20
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def check_seen(page: Any, block: str) -> None:
    """A block that is held is in view, in a map that scrolls by itself."""
    page.evaluate(DRAWN)
    drawn, top, lowest, whole = page.evaluate(f"""() => {{
      const {{canvas, box, pitch, columns, number}} = minipaged.maps.device;
      const [x, y] = [({block}) % columns, Math.floor(({block}) / columns)].map((place) => place * pitch);
      const scale = canvas.width / canvas.clientWidth;
      const copy = new OffscreenCanvas(1, 1).getContext("2d");
      copy.drawImage(canvas, -(x + 3) * scale, -(y + 3) * scale);
      return [copy.getImageData(0, 0, 1, 1).data[3], y - box.scrollTop, box.clientHeight - pitch, canvas.clientHeight];
    }}""")
    assert drawn == 255
    assert 0 <= top <= lowest < 460 < whole


def test_of_57_000_blocks_those_are_drawn_that_were_ever_used(open_page: Callable[..., Opened]) -> None:
    opened = open_page(45_816, num_swap_blocks=11_454, viewport=SCREENS["desktop"])
    page, blocks = opened.page, opened.page.get_by_role("slider", name="Device blocks")
    assert page.locator("#device-rest").text_content() == "… 45,560 more blocks not used yet"
    assert page.locator("#host-counts").text_content() == "Host memory: none of 11,454 blocks held"
    assert page.locator("#host").is_hidden()
    assert page.locator("#host-rest").is_hidden()
    check_plots_and_chat_are_seen(page)
    opened.add("long", 900, 2, begin=range(300, 900, 100))
    opened.until("shown.device.reached > 256 && minipaged.maps.device.number === 512")
    blocks.press("End")
    assert page.locator("#tip").text_content() == "block 511: free"
    opened.until("[...shown.requests.values()].every((r) => r.queue === 'finished')")
    page.evaluate("""() => minipaged.history.push({device: [[0, 45_816, 0, 1, 16, 0]], host: [[0, 300, 0, 1, 16, 0]],
      figures: [minipaged.history.latest.figures]})""")
    page.get_by_role("button", name="Pause").click()
    until(page, "minipaged.maps.device.number === 45_816 && minipaged.maps.host.number === 512")
    assert page.locator("#device-rest").text_content() == "The map scrolls."
    check_plots_and_chat_are_seen(page)
    blocks.press("End")
    assert page.locator("#tip").text_content().startswith("block 45815: held")
    check_seen(page, "number - 1")
    page.evaluate("minipaged.maps.device.box.scrollTop = 700")
    check_seen(page, "150 * columns")


HELD_LINE = """[...document.querySelectorAll("figure")].at(-1)?.querySelector("path")?.getAttribute("d")"""


def test_time_goes_on_in_the_plots_while_nothing_happens(open_page: Callable[..., Opened]) -> None:
    opened = open_page()
    page = opened.page
    opened.add("one", 100, 30)
    opened.until("shown.figures[5] === 30 && shown.figures[8] === 0")
    until(page, f"/V57H300$/.test({HELD_LINE})")

    def fell() -> float:
        """Seconds ago, as the line has it."""
        line = page.evaluate(HELD_LINE)
        assert re.fullmatch(r"M[\d.]+,[\d.]+(H[\d.]+V[\d.]+)+H300", line), line  # of steps alone
        return (300 - float(re.findall(r"H([\d.]+)V57", line)[-1])) / 5

    page.clock.install()  # its clock goes on, and can be turned forward
    page.reload()
    until(page, f"/V57H300$/.test({HELD_LINE})")
    page.clock.run_for(30_000)
    assert fell() > 29
    page.evaluate("""() => {
      Object.defineProperty(document, "hidden", {value: true, configurable: true});
      document.dispatchEvent(new Event("visibilitychange"));
    }""")
    hidden = fell()
    page.clock.run_for(1200)
    assert fell() == hidden
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    assert fell() > hidden + 1
    watch = opened.server.server.serving.watch
    assert watch
    watch._began -= 40  # a page that is opened later knows how long ago it was
    page.reload()
    until(page, f"/V57H300$/.test({HELD_LINE})")
    assert 39 < fell() < 60
    watch._began -= 60
    page.reload()
    until(page, f"{HELD_LINE} === 'M0,57H300'")


def test_each_block_tells_of_itself_by_key_and_by_pointer(open_page: Callable[..., Opened]) -> None:
    opened = open_page(step_seconds=0.05)
    opened.keep_busy(4, 160)
    opened.until("shown.figures[2] >= 2 && shown.device.counts().cached > 3 && shown.device.counts().shared > 3")
    page = opened.page
    page.get_by_role("button", name="Pause").click()
    page.evaluate(DRAWN)
    shared = page.evaluate("minipaged.shown().device.holders.findIndex((n) => n > 1)")
    blocks = page.get_by_role("slider", name="Device blocks")
    blocks.focus()
    blocks.press("Home")
    for _ in range(shared):
        blocks.press("ArrowRight")
    tip = page.locator("#tip")
    assert re.fullmatch(
        rf"block {shared}: held by [A-Z] of cmpl-two-[0-9a-f]+ and 1 other sequence.*; 16 of 16 slots filled",
        tip.text_content(),
    )
    assert blocks.get_attribute("aria-valuetext") == tip.text_content()
    blocks.press("End")
    assert tip.text_content() == "block 63: free"
    blocks.hover(position={"x": 3, "y": 3})
    assert tip.text_content().startswith("block 0: ")
    maps = page.evaluate("[minipaged.maps.device.pitch, minipaged.maps.device.columns]")
    blocks.press("ArrowDown")
    assert tip.text_content().startswith(f"block {maps[1]}: ")


@pytest.mark.parametrize(
    ("screen", "colors"),
    [
        ("desktop", "light"),
        ("phone", "dark"),
        pytest.param("desktop", "dark", marks=pytest.mark.thorough),
        pytest.param("phone", "light", marks=pytest.mark.thorough),
    ],
)
def test_the_page_is_for_everybody(open_page: Callable[..., Opened], screen: str, colors: str) -> None:
    opened = open_page(200, step_seconds=0.05, viewport=SCREENS[screen], color_scheme=colors, reduced_motion="reduce")
    opened.keep_busy(20, 100)
    page = opened.page
    opened.until("new Set([...shown.requests.values()].flatMap((r) => [...r.letters])).size > 12")
    ask(page, TOO_LONG)
    page.get_by_role("alert").wait_for()
    opened.watched.complaints.clear()
    page.get_by_role("button", name="Pause").click()
    page.evaluate("document.querySelector('#key').hidden = false")
    script = axe_script()
    page.evaluate(script)
    found = axe_violations(page, preload=False)
    assert [(wrong["id"], [node["html"] for node in wrong["nodes"]]) for wrong in found] == []
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0
    buttons = [button.bounding_box() for button in page.get_by_role("button").all()]
    assert min(box["height"] for box in buttons) >= 40
    assert page.evaluate("document.getAnimations().length") == 0
    sections = page.evaluate("[...document.querySelectorAll('main > section')].map((s) => [s.offsetTop, s.className])")
    assert [name for _, name in sections] == ["history", "memory", "plots", "chat", "requests"]
    assert screen == "desktop" or sections == sorted(sections)
    for part in ("span:first-child", "b", "svg"):  # of the plots: they stand in rows
        boxes = [one.bounding_box() for one in page.locator(f"figure {part}").all()]
        xs, ys = ({round(box[side]) for box in boxes} for side in "xy")
        assert len(ys) == math.ceil(len(boxes) / len(xs))


# --- In the server --------------------------------------------------------------------------------


def frames_of(url: str) -> Iterator[Json]:
    with httpx.stream("GET", f"{url}/live/events") as answer:
        for line in answer.iter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


def test_the_server_has_the_page_and_an_answer_names_its_request(server: Served) -> None:
    config = server.allm.llm.config
    assert "minipaged, live" in server.get("/").text
    assert next(frames_of(server.url))["sizes"][:3] == [config.num_blocks, config.num_swap_blocks, config.block_size]
    prompt = [1 + place % 7 for place in range(3 * config.block_size)]
    for num_found in (0, len(prompt) - 1):  # the last token is always computed
        answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 3}).json()
        rows = (row for frame in frames_of(server.url) for row in frame.get("requests", []))
        row = next(row for row in rows if row[1:3] == [answer["id"], "finished"])
        assert row[5] == num_found == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (row[4], row[-1]) == (len(prompt), answer["usage"]["completion_tokens"])


def test_without_the_page_nobody_listens(tiny: LoadedModel) -> None:
    with served(tiny, ServeSettings(page=False)) as running:
        assert running.get("/").status_code == running.get("/live/events").status_code == 404
        assert not running.allm.llm.engine.listeners
        assert "started with --no-page" in running.get("/").json()["error"]["message"]
