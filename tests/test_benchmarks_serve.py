"""The load tool's own tests: its figures are what they are said to be, and what goes wrong at a server is counted.

No test looks at the clock: times are made up where figures are checked, and a stand-in for a server, in a thread, says
what happened in which order, or sleeps so long that no machine can be faster.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import random
import re
import socket
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.serve import arguments
from benchmarks.serve.__main__ import main
from benchmarks.serve.arguments import parse_arguments
from benchmarks.serve.client import RequestFailed, Server, ask, refusal
from benchmarks.serve.engine import EngineProcess
from benchmarks.serve.figures import Figures, Spread, late_because, meets, parse_objective, share_delivered
from benchmarks.serve.load import WORDS, PromptWriter, Request, from_trace, parse_lengths, poisson
from benchmarks.serve.report import Measurement, knee_in_words, knees, lines
from benchmarks.serve.run import Answer, Record, Run, Target, run
from minipaged.simulation.traces import TraceRequest
from tests.effort import thorough
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module", autouse=True)
def _frozen_again() -> Iterator[None]:
    """What `run` lets go of at its end are also the objects that the tests have frozen."""
    yield
    gc.collect()
    gc.freeze()


# --- A stand-in for a server ----------------------------------------------------------------------


def event(**choice: Any) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'finish_reason': None} | choice]})}\n\n"


async def whole(body: dict[str, Any]) -> AsyncIterator[str]:
    """As many chunks as tokens were asked for, then usage."""
    tokens, prompt = body["max_tokens"], body.get("prompt") or body["messages"][0]["content"]
    for _ in range(tokens):
        yield event(text=" word")
    yield event(text="", finish_reason="length")
    details = {"cached_tokens": 0}
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": tokens, "prompt_tokens_details": details}
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"


Reply = Callable[[dict[str, Any]], AsyncIterator[str] | Response]


class StandIn:
    """An OpenAI-compatible server without a model. `reply` answers completions; `bodies` are those that came."""

    def __init__(self, reply: Reply = whole) -> None:
        self.reply = reply
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.max_model_len = 4096
        self.extra_tokens: int | None = 2
        """Beside one for each word, that /tokenize counts; None: there is no /tokenize."""
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
        ]
        self._listens = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listens.getsockname()[1]}"
        config = uvicorn.Config(
            Starlette(routes=routes), log_level="critical", lifespan="off", timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._listens]})

    def __enter__(self) -> StandIn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = self.server.force_exit = True
        self._thread.join()
        self._listens.close()

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"data": [{"id": "stand-in", "max_model_len": self.max_model_len}]})

    async def tokenize(self, request: HttpRequest) -> Response:
        if self.extra_tokens is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        body = await request.json()
        prompt = body.get("prompt") or body["messages"][0]["content"]
        return JSONResponse({"count": len(prompt.split()) + self.extra_tokens})

    async def complete(self, request: HttpRequest) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        answer = self.reply(body)
        return answer if isinstance(answer, Response) else StreamingResponse(answer, media_type="text/event-stream")


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with StandIn() as server:
        yield server


def load(server: StandIn, requests: list[Request], **options: Any) -> list[Record]:
    target = Target("it", Server.at(server.url, None), "stand-in", options.pop("chat", False), "ignore_eos")
    return asyncio.run(run(target, requests, timeout=options.pop("timeout", 30.0))).records


def at_once(number: int, tokens: int = 3) -> list[Request]:
    return [Request(0.0, 2, tokens, "two words")] * number


# --- What one answer tells ------------------------------------------------------------------------


def record_of(*reads: tuple[float, str]) -> Record:
    """Of a stream that arrives in these pieces, each at its time."""
    record = Record(intended=0.0, prompt_tokens_asked=1, output_tokens_asked=1)
    answer = Answer(record, 0.0)
    for now, text in reads:
        answer.feed(text.encode(), now)
    answer.close()
    return record


def test_ttft_tpot_and_itl_are_what_they_are_defined_as() -> None:
    record = record_of((1.0, event(text="a")), (1.5, event(text="b")), (3.0, event(text="c", finish_reason="stop")))
    record.intended = 0.25
    assert record.ttft == 0.75
    assert record.latency == 2.75
    assert record.tpot == (2.75 - 0.75) / 2
    assert record.itl == [0.5, 1.5]


def test_tokens_are_the_servers_count_and_chunks_where_it_does_not_count() -> None:
    usage = 'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}\n\n'
    reads = (1.0, event(text="a")), (2.0, event(text="bcde", finish_reason="stop"))
    assert (record_of(*reads).output_tokens, record_of(*reads).prompt_tokens) == (2, None)
    counted = record_of(*reads, (2.5, usage))
    assert (counted.output_tokens, counted.prompt_tokens) == (5, 7)
    assert counted.latency == 2.0  # the usage is no token
    assert counted.tpot == 1.0 / 4


def test_a_stream_may_be_cut_anywhere() -> None:
    events = event(text="é") + event(text="b") + event(text="", finish_reason="stop")
    stream = f": a comment\r\n\r\n{events}data: [DONE]\n\n".encode()
    rng = random.Random(1)
    for _ in range(50):
        cuts = sorted(rng.sample(range(len(stream)), 5))
        record = Record(0.0, 1, 1)
        answer = Answer(record, 0.0)
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            answer.feed(stream[begin:end], 1.0)
        answer.close()
        assert len(record.chunks) == 2


def test_a_chats_role_and_the_reason_of_the_end_are_no_tokens_and_a_token_without_text_is_one() -> None:
    record = record_of(
        (1.0, event(delta={"role": "assistant", "content": ""})),
        (2.0, event(delta={"content": ""})),
        (3.0, event(delta={"content": "é"})),
        (4.0, event(delta={"reasoning_content": "x"})),
        (5.0, event(delta={}, finish_reason="stop")),
    )
    assert record.chunks == [2.0, 3.0, 4.0]
    assert record.ended == 5.0


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (event(text="a"), "cut off"),
        (event(text="", finish_reason="stop"), "no tokens"),
        ('data: {"error": {"message": "out of luck"}}\n\n', "error in stream"),
        ('data: {"error": "out of luck"}\n\n', "error in stream"),
        ("data: {oops\n\n", "not the protocol"),
        ('data: {"choices": [3]}\n\n', "not the protocol"),
        ('data: {"choices": [], "usage": {"completion_tokens": "many"}}\n\n', "not the protocol"),
    ],
)
def test_an_answer_that_does_not_end_well_has_failed(stream: str, kind: str) -> None:
    with pytest.raises(RequestFailed) as failure:
        record_of((1.0, stream))
    assert failure.value.kind == kind
    if kind == "error in stream":
        assert failure.value.message == "out of luck"


# --- From records to figures ----------------------------------------------------------------------


def made(intended: float, chunks: list[float], *, error: str | None = None, sent: float | None = None) -> Record:
    number = len(chunks)
    ended = None if error else chunks[-1]
    sent = intended if sent is None else sent
    return Record(intended, 5, number, sent, chunks, ended, 6, number, 3, error, "because" if error else "")


def figures(records: list[Record], objectives: dict[str, float] | None = None, **tool: Any) -> Figures:
    return Figures.of(Run(records, 10.0, tool.get("cpu", 1.0), tool.get("lags", [0.001])), objectives or {})


def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed() -> None:
    values = [float(value) for value in range(1, 101)]
    random.Random(0).shuffle(values)
    assert Spread.of(values) == Spread(mean=50.5, p50=50, p95=95, p99=99, max=100)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 3.0, 3.0)
    assert Spread.of([]) is None


def test_throughput_counts_what_completed_until_the_last_one_did() -> None:
    found = figures([made(0, [1, 2]), made(1, [2, 3, 4]), made(2, [5, 8], error="cut off")])
    assert (found.requests, found.completed, found.errors) == (3, 2, {"cut off": 1})
    assert found.seconds == 4
    assert found.requests_per_second == 2 / 4
    assert found.output_tokens_per_second == 5 / 4
    assert found.ttft == Spread(1.0, 1.0, 1.0, 1.0, 1.0)
    assert found.itl == Spread(1.0, 1.0, 1.0, 1.0, 1.0)
    assert found.latency is not None
    assert (found.latency.mean, found.latency.max) == (2.5, 3.0)
    assert found.prompt_tokens == (5, 6)
    assert found.share_cached == 0.5


def test_times_count_from_when_a_request_should_have_been_sent() -> None:
    late = figures([made(1.0, [3.0, 4.0], sent=2.5)])
    assert late.ttft is not None
    assert late.ttft.p50 == 2.0
    assert late.send_delay is not None
    assert late.send_delay.max == 1.5


def test_goodput_counts_the_requests_that_meet_every_objective() -> None:
    good, slow_first, slow_after = made(0, [1, 2, 3]), made(0, [3, 4, 5]), made(0, [1, 2, 6])
    failed = made(0, [1], error="timeout")
    found = figures([good, slow_first, slow_after, failed], {"ttft": 1.0, "tpot": 1.0})
    assert found.goodput == 1 / 6
    assert found.share_met == 1 / 4
    assert figures([good]).goodput is None


def test_each_objective_is_about_its_own_time() -> None:
    record = made(0, [1, 2, 6])  # TTFT 1, TPOT 2.5, longest pause 4, latency 6
    for name, time_of_it in {"ttft": 1, "tpot": 2.5, "itl": 4, "latency": 6}.items():
        assert meets(record, {name: time_of_it})
        assert not meets(record, {name: time_of_it - 0.1})
    assert meets(made(0, [1]), {"tpot": 0.001, "itl": 0.001})  # one token: there is nothing that could be late


@pytest.mark.parametrize(
    ("text", "expected"), [("ttft=200ms", ("ttft", 0.2)), ("latency=5s", ("latency", 5.0)), ("itl=0.5s", ("itl", 0.5))]
)
def test_an_objective_is_a_name_and_a_time(text: str, expected: tuple[str, float]) -> None:
    assert parse_objective(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["ttft", "ttft=", "ttft=5", "ttft=-5ms", "ttft=nans", "ttft=infs", "speed=5ms", "ttft=fastms"]
)
def test_what_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no objective"):
        parse_objective(text)


def test_a_server_keeps_up_when_tokens_come_as_fast_as_they_are_asked_for() -> None:
    steady = [made(t, [t + 5 + i for i in range(4)]) for t in range(100)]
    half = [made(t, [2 * t + i / 2 for i in range(4)]) for t in range(100)]
    assert share_delivered(steady) == pytest.approx(1.0, abs=0.05)
    assert share_delivered(half) == pytest.approx(0.5, abs=0.05)
    assert figures(steady).keeps_up is True
    assert figures(half).keeps_up is False
    assert figures(steady, {"latency": 1.0}).keeps_up is False
    assert figures([*steady, made(50, [], error="timeout")]).keeps_up is False
    assert figures([made(0.0, [1, 2])] * 9).keeps_up is None  # all at once: there is no rate to keep up with


def test_a_server_that_does_not_keep_up_is_told_why() -> None:
    steady = [made(t, [t + 5 + i for i in range(4)]) for t in range(100)]
    half = [made(t, [2 * t + i / 2 for i in range(4)]) for t in range(100)]
    failed = [made(50, [], error="timeout")] * 2
    slow = "0.0% of the requests met the objectives, not 90%"
    assert figures(steady).behind_because == []
    assert figures([*steady, *failed]).behind_because == ["2 requests failed"]
    assert figures(steady, {"latency": 1.0}).behind_because == [slow]
    [late, *others] = figures([*half, *failed], {"latency": 0.1}).behind_because
    assert re.fullmatch(r"(4\d|50)\.\d% of the tokens came while they were asked for, not 90%", late)
    assert others == ["2 requests failed", slow]
    assert figures([made(0.0, [], error="timeout")] * 9).behind_because == []
    behind, kept_up = ("\n".join(lines(measured("ours", 1.0, share))) for share in (0.5, 1.0))
    assert "the server does not keep up: 49.8% of the tokens came while they were asked for, not 90%" in behind
    assert "100% of the tokens came while they were asked for; the server keeps up" in kept_up


def test_the_tool_says_when_it_was_late_itself() -> None:
    good, bad = Spread(0, 0, 0, 0.009, 0.5), Spread(0, 0, 0, 0.011, 0.5)
    assert late_because(good, good, 0.5) == []
    assert len(late_because(bad, bad, 0.9)) == 3
    assert late_because(None, good, 0.5) == []
    assert figures([made(1, [2], sent=1.5)]).late_because
    assert figures([made(0, [2], sent=0.5)]).late_because == []  # nobody can send all at once
    assert figures([made(0, [2])], cpu=9.0).late_because == ["the tool took 90% of a core"]


def measured(target: str, rate: float, share: float, turn: int = 0) -> Measurement:
    """A run in which so much of what was asked for arrived in time."""
    records = [made(t, [t / share + i / 2 for i in range(1, 4)]) for t in range(200)]
    done = Run(records, 1.0, 0.1, [0.0])
    return Measurement(turn, rate, target, Figures.of(done, {}), 100.0, done)


def test_the_knee_is_the_highest_rate_that_was_kept_up_with_in_every_round() -> None:
    rounds = [
        measured("ours", rate, share, turn)
        for turn, row in enumerate(((1, 1, 0.5), (1, 0.5, 1)))
        for rate, share in zip((1.0, 2.0, 4.0), row, strict=True)
    ]
    found = knees([*rounds, measured("theirs", 1.0, 0.5), measured("third", 8.0, 1.0)])
    assert (found["ours"]["rate"], found["ours"]["not_at"]) == (1.0, 2.0)
    assert (found["theirs"]["rate"], found["theirs"]["not_at"]) == (None, 1.0)
    assert (found["third"]["rate"], found["third"]["not_at"]) == (8.0, None)
    said = [knee_in_words(knee, found["ours"]) for knee in found.values()]
    assert "keeps up with 1 requests/s, and not with 2 (49.8% of" in said[0]
    assert re.search(r"does not keep up with 1 requests/s, the lowest .* \(49\.8% of the tokens came while", said[1])
    assert "the knee lies above it" in said[2]
    assert "1.00 × and 1.00 × those of the first" in said[2]


def test_throughput_is_put_beside_the_engines_own() -> None:
    measurement = measured("ours", 1.0, 1.0)
    assert measurement.share_of_engine == measurement.figures.output_tokens_per_second / 100.0


# --- What is asked, and when ----------------------------------------------------------------------


def draw(text: str, number: int) -> list[int]:
    lengths, rng = parse_lengths(text), random.Random(3)
    return [lengths(rng) for _ in range(number)]


def test_lengths_are_fixed_or_between_two_or_lognormal() -> None:
    assert set(draw("128", 9)) == {128}
    assert set(draw("3-5", 200)) == {3, 4, 5}
    many = sorted(draw("median=200,p95=1000", 20_000))
    assert many[10_000] == pytest.approx(200, rel=0.05)
    assert many[19_000] == pytest.approx(1000, rel=0.1)
    assert many[0] >= 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-5",
        "5-",
        "9-3",
        "1-2-3",
        "many",
        "1.5",
        "median=5",
        "median=9,p95=3",
        "median=5,p95=9,p99=10",
        "p95=a,median=5",
    ],
)
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"tokens|median|first"):
        parse_lengths(text)


def test_arrivals_are_poisson_and_the_seed_decides() -> None:
    lengths = parse_lengths("1-1000")

    def plan(rate: float, seed: int = 0) -> list[Request]:
        return poisson(rate, lengths, lengths, seed=seed, requests=20_000, seconds=None)

    two, four = plan(2.0), plan(4.0)
    assert two == plan(2.0)
    assert two != plan(2.0, seed=1)
    assert [r.seconds for r in two] == pytest.approx([2 * r.seconds for r in four])
    assert [r.output_tokens for r in two] == [r.output_tokens for r in four]
    gaps = [b.seconds - a.seconds for a, b in pairwise(two)]
    assert statistics.fmean(gaps) == pytest.approx(0.5, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.5, rel=0.03)  # an exponential's is its mean
    assert two[0].seconds == 0.0


def test_arrivals_stop_after_so_many_seconds_and_at_inf_all_come_at_once() -> None:
    one = parse_lengths("1")
    timed = poisson(5.0, one, one, seed=0, requests=None, seconds=40.0)
    assert timed[-1].seconds < 40.0
    assert len(timed) == pytest.approx(200, rel=0.3)
    assert {r.seconds for r in poisson(math.inf, one, one, seed=0, requests=7, seconds=None)} == {0.0}


def test_a_trace_comes_at_its_own_times_or_at_a_rate() -> None:
    trace = [TraceRequest(0.0, 5, 6), TraceRequest(4.0, 7, 8)]
    assert from_trace(trace, rate=None, pace=2.0, seed=0) == [Request(0.0, 5, 6), Request(2.0, 7, 8)]
    at_rate = from_trace(trace, rate=0.001, pace=1.0, seed=0)
    assert [(r.prompt_tokens, r.output_tokens) for r in at_rate] == [(5, 6), (7, 8)]
    assert at_rate[1].seconds > 4.0


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_have_the_wanted_number_of_tokens_where_the_server_counts(stand_in: StandIn, chat: bool) -> None:
    writer = PromptWriter(Server.at(stand_in.url, None), "m", chat=chat, timeout=30.0)
    found = asyncio.run(writer.write([Request(0, wanted, 1) for wanted in (3, 50, 7)], "seed"))
    assert [len(request.prompt.split()) + 2 for request in found] == [3, 50, 7]
    assert str(writer) == "counted by /tokenize, at most 0 tokens beside what was asked for"
    asyncio.run(writer.write([Request(0, 1, 1)], "seed"))  # less than there always is
    assert writer.furthest == 2


def test_without_a_count_prompts_have_a_word_for_each_token(stand_in: StandIn) -> None:
    stand_in.extra_tokens = None
    writer = PromptWriter(Server.at(stand_in.url, None), "m", chat=False, timeout=30.0)
    one, other = (asyncio.run(writer.write([Request(0, 40, 1)], seed))[0].prompt for seed in ("a", "b"))
    assert len(one.split()) == 40
    assert one != other
    assert "not counted" in str(writer)


@pytest.mark.model
def test_each_word_is_one_token_to_smollm2() -> None:
    from minipaged.models import hub
    from minipaged.models.tokenizer import Tokenizer

    tokenizer = Tokenizer(hub.resolve("smollm2-135m-instruct"))
    assert [word for word in WORDS if len(tokenizer.encode(f" {word}")) != 1] == []


# --- Load -----------------------------------------------------------------------------------------


def test_no_request_waits_for_another() -> None:
    waiting = 0
    all_here = asyncio.Event()

    async def reply(body: dict[str, Any]) -> AsyncIterator[str]:
        nonlocal waiting
        waiting += 1
        if waiting == 8:
            all_here.set()
        await all_here.wait()  # a tool that waits for an answer before it asks again never gets here
        async for text in whole(body):
            yield text

    with StandIn(reply) as server:
        records = load(server, [Request(i * 0.01, 2, 3, "two words") for i in range(8)], timeout=10.0)
    assert [record.error for record in records] == [None] * 8


def test_a_slow_first_token_is_ttft_and_a_slow_second_is_itl() -> None:
    async def reply(body: dict[str, Any]) -> AsyncIterator[str]:
        await asyncio.sleep(0.1)
        yield event(text="a")
        await asyncio.sleep(0.2)
        yield event(text="b", finish_reason="length")

    with StandIn(reply) as server:
        (record,) = load(server, at_once(1, 2))
    assert record.ttft is not None
    assert record.tpot is not None
    assert record.ttft >= 0.1
    assert record.itl[0] == pytest.approx(record.tpot)
    assert record.tpot >= 0.15  # the first may have been late on its way


def test_a_tool_that_is_kept_busy_counts_its_own_delay() -> None:
    async def held_up(target: Target, requests: list[Request]) -> Run:
        asyncio.get_running_loop().call_later(0.05, time.sleep, 0.3)
        return await run(target, requests, timeout=30.0)

    with StandIn() as server:
        target = Target("it", Server.at(server.url, None), "stand-in", False, "ignore_eos")
        done = asyncio.run(held_up(target, [Request(0.0, 2, 3, "two words"), Request(0.1, 2, 3, "two words")]))
    found = Figures.of(done, {})
    assert done.records[1].ttft is not None
    assert done.records[1].ttft >= 0.2
    assert found.send_delay is not None
    assert found.send_delay.max >= 0.2
    assert any("sent" in reason for reason in found.late_because)
    assert any("read" in reason for reason in found.late_because)


def test_every_way_to_fail_is_counted_by_its_name() -> None:
    async def cut(body: dict[str, Any]) -> AsyncIterator[str]:
        yield event(text="a")
        raise RuntimeError("the server's own")

    async def told(body: dict[str, Any]) -> AsyncIterator[str]:
        yield event(text="a")
        yield 'data: {"error": {"message": "no blocks left"}}\n\n'
        yield "data: [DONE]\n\n"

    async def never(body: dict[str, Any]) -> AsyncIterator[str]:
        yield event(text="a")
        await asyncio.sleep(60)

    ways: list[tuple[Reply, str]] = [
        (cut, "cut off"),
        (told, "error in stream"),
        (never, "timeout"),
        (lambda body: JSONResponse({"error": {"message": "queue full"}}, 503), "HTTP 503"),
        (lambda body: JSONResponse({"choices": []}), "not a stream"),
        (whole, "none"),
    ]
    coming = iter(ways)
    with StandIn(lambda body: next(coming)[0](body)) as server:
        records = load(server, at_once(len(ways)), timeout=2.0)
    assert sorted(record.error or "none" for record in records) == sorted(kind for _, kind in ways)
    messages = {record.error: record.message for record in records}
    assert messages["HTTP 503"] == "queue full"
    assert messages["error in stream"] == "no blocks left"
    assert all(record.ended is None and record.ttft is None for record in records if record.error)


def test_a_server_that_dies_midway_fails_those_under_way_and_those_to_come() -> None:
    with StandIn() as server:

        async def reply(body: dict[str, Any]) -> AsyncIterator[str]:
            yield event(text="a")
            server.server.should_exit = server.server.force_exit = True
            await asyncio.sleep(60)

        server.reply = reply
        early, late = load(server, [Request(0.0, 2, 3, "two words"), Request(1.5, 2, 3, "two words")], timeout=20.0)
    assert early.error == "cut off"
    assert late.error == "cannot connect"


def test_what_is_no_web_server_is_told_from_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listens:

        def answer() -> None:
            connection, _ = listens.accept()
            connection.recv(1000)
            connection.sendall(b"SSH-2.0-stand-in\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RequestFailed) as failure:
            asyncio.run(ask(Server("127.0.0.1", listens.getsockname()[1], "", False), "GET", "/", timeout=20.0))
        thread.join()
    assert failure.value.kind == "not HTTP"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "m"}}', "m"),
        (b'{"error": "m"}', "m"),
        (b'{"detail": "m"}', "m"),
        (b"m\n", "m"),
        (b"[1]", "[1]"),
    ],
)
def test_a_refusal_is_read_in_every_shape(body: bytes, message: str) -> None:
    assert refusal(body) == message


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://a:81", "http://a:81"),
        ("http://a:81/v1/", "http://a:81"),
        ("https://a/proxy/v1", "https://a:443/proxy"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_a_url_may_end_in_v1_or_not(url: str, expected: str) -> None:
    assert Server.at(url, None).url == expected


# --- The command ----------------------------------------------------------------------------------

SMALL = ["--prompt-tokens", "4", "--output-tokens", "3", "--warm-up", "2"]


def test_a_run_ends_with_everything_as_json(
    stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    words = [
        "--url",
        f"it={stand_in.url}/v1",
        "--rate",
        "inf",
        "--requests",
        "5",
        "--api-key",
        "secret",
        "--json",
        str(file),
    ]
    assert main([*words, *SMALL, "--objective", "ttft=60s", "latency=60s"]) == 0
    told = json.loads(file.read_text())
    (done,) = told["runs"]
    assert (done["target"], done["rate"], done["round"]) == ("it", "inf", 0)
    assert done["figures"]["completed"] == 5
    assert done["figures"]["share_met"] == 1.0
    assert done["figures"]["output_tokens"] == [3, 3]
    assert len(done["records"]) == 5
    assert told["targets"] == [
        {"name": "it", "url": stand_in.url, "model": "stand-in", "lengths_held_by": "ignore_eos"}
    ]
    assert told["load"]["objectives"] == {"ttft": 60.0, "latency": 60.0}
    assert "secret" not in file.read_text()
    assert all(headers["authorization"] == "Bearer secret" for headers in stand_in.headers)
    body = stand_in.bodies[-1]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"], body["model"]) == (3, True, True, "stand-in")
    shown = capsys.readouterr().out
    assert "5 of 5 requests" in shown
    assert "goodput" in shown
    assert "TTFT" in shown


def test_a_chat_is_asked_as_one(stand_in: StandIn) -> None:
    words = ["--url", stand_in.url, "--rate", "inf", "--requests", "2", "--api", "chat"]
    assert main([*words, *SMALL]) == 0
    assert stand_in.bodies[-1]["messages"][0]["role"] == "user"


def test_servers_are_sent_the_same_prompts_and_every_run_has_new_ones(stand_in: StandIn) -> None:
    with StandIn() as other:
        other.extra_tokens = None
        urls = ["--url", f"b={other.url}", "--url", f"a={stand_in.url}"]
        assert main([*urls, "--rate", "inf", "--requests", "3", "--rounds", "2", *SMALL]) == 0
        prompts = [sorted(body["prompt"] for body in server.bodies) for server in (stand_in, other)]
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0])) == 2 + 3 + 3


def test_a_server_that_refuses_a_field_is_asked_its_own_way(tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> Any:
        if "ignore_eos" in body:
            return JSONResponse({"detail": "Unexpected fields in the request: {'ignore_eos'}"}, 422)
        return whole(body)

    file = tmp_path / "run.json"
    with StandIn(reply) as server:
        assert main(["--url", server.url, "--rate", "inf", "--requests", "2", *SMALL, "--json", str(file)]) == 0
        assert json.loads(server.bodies[-1]["generation_config"])["min_new_tokens"] == 3
    assert json.loads(file.read_text())["targets"][0]["lengths_held_by"] == "generation_config"


def test_a_sweep_ends_at_the_first_rate_that_is_too_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def reply(body: dict[str, Any]) -> AsyncIterator[str]:
        await asyncio.sleep(0.4)  # 40 requests come within 0.04 s on average: nothing is there by then
        async for text in whole(body):
            yield text

    file = tmp_path / "run.json"
    with StandIn(reply) as server:
        rates = ["--rate", "1000", "2000", "inf", "--requests", "40"]
        assert main(["--url", f"it={server.url}", *rates, *SMALL, "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    assert [done["rate"] for done in told["runs"]] == [1000, "inf"]
    assert told["knees"]["it"]["rate"] is None
    assert "does not keep up with 1000 requests/s" in capsys.readouterr().out


def test_what_was_measured_is_kept_when_a_later_run_fails(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = 0

    async def fails_in_the_end(*arguments: Any, **options: Any) -> Run:
        nonlocal runs
        runs += 1
        if runs == 4:  # after two for warming up and one that counts
            raise KeyboardInterrupt
        return await run(*arguments, **options)

    monkeypatch.setattr("benchmarks.serve.__main__.run", fails_in_the_end)
    file = tmp_path / "run.json"
    words = ["--url", stand_in.url, "--rate", "inf", "--rounds", "2", "--requests", "2", "--json", str(file)]
    assert main([*words, *SMALL]) == 130
    assert len(json.loads(file.read_text())["runs"]) == 1
    assert str(file) in capsys.readouterr().err


def test_requests_that_the_model_cannot_hold_are_left_out(
    stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("time,context_tokens,generated_tokens\n0,4,3\n0.01,4000,300\n0.02,5,2\n")
    assert main(["--url", stand_in.url, "--trace", str(trace)]) == 0
    assert "1 of 3 requests do not fit the model's 4096 tokens" in capsys.readouterr().err
    assert sorted(body["max_tokens"] for body in stand_in.bodies) == [2, 2, 3, 3]  # warm-up, and the run
    stand_in.max_model_len = 5
    assert main(["--url", stand_in.url, "--trace", str(trace)]) == 1
    assert "no request is left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda server: setattr(server, "reply", lambda body: JSONResponse({"error": "Unauthorized"}, 401)),
            "give --api-key",
        ),
        (
            lambda server: setattr(server, "reply", lambda body: JSONResponse({"detail": "Not Found"}, 404)),
            "try --api chat",
        ),
        (
            lambda server: setattr(server, "reply", lambda body: JSONResponse({}, 400)),
            "the first request failed: HTTP 400",
        ),
    ],
)
def test_a_server_that_cannot_be_measured_is_told_of(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str], change: Callable[[StandIn], None], message: str
) -> None:
    change(stand_in)
    assert main(["--url", stand_in.url, *SMALL]) == 1
    assert message in capsys.readouterr().err


def test_where_nothing_listens_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listens:
        port = listens.getsockname()[1]
    assert main(["--url", f"http://127.0.0.1:{port}"]) == 1
    assert "is the server running" in capsys.readouterr().err


def test_another_web_server_is_no_openai_server(stand_in: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", f"{stand_in.url}/elsewhere"]) == 1
    assert "an OpenAI-compatible server has /v1/models" in capsys.readouterr().err


def test_the_docs_name_everything_in_the_json_file() -> None:
    page = (Path(__file__).parent.parent / "docs" / "measuring.md").read_text()
    tables = [
        re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]*) \|", part, re.MULTILINE)))
        for part in page.split("| record |")
    ]
    assert [sorted(table) for table in tables] == [sorted(f.name for f in fields(kind)) for kind in (Figures, Record)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "localhost:8000"], "it looks like http://127.0.0.1:8000"),
        (["--url", "http://a:1", "--url", "http://a:1"], "the same name"),
        (["--url", "http://a:1", "--rate", "0"], "above 0"),
        (["--url", "http://a:1", "--rate", "nan"], "above 0"),
        (["--url", "http://a:1", "--rate", "inf", "--seconds", "3"], "how many with --requests"),
        (["--url", "http://a:1", "--requests", "3", "--seconds", "3"], "give one of them"),
        (["--url", "http://a:1", "--requests", "0"], "whole number above 0"),
        (["--url", "http://a:1", "--trace", "t.csv", "--output-tokens", "3"], "a --trace says"),
        (["--url", "http://a:1", "--objective", "ttft=5"], "is no objective"),
        (["--url", "http://a:1", "--output-tokens", "5-3"], "smaller number comes first"),
        (["--url", "http://a:1", "--json", "/no/such/folder/run.json"], "there is no folder"),
        (["--url", "http://a:1", "--engine-settings", "[]"], "JSON like"),
        (["--url", "http://a:1", "--plot", "run.gif"], "has to end in"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_asked(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(words)
    assert message in " ".join(capsys.readouterr().err.split())


def test_without_matplotlib_a_plot_is_refused_before_the_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse_arguments(["--url", "http://a:1", "--plot", "run.svg"])
    assert "pip install matplotlib" in capsys.readouterr().err


@thorough
@pytest.mark.parametrize(("rates", "titles"), [((1.0, 2.0), ["TTFT, s", "goodput"]), ((1.0,), ["ITL", "latency"])])
def test_the_plot_is_over_rates_or_of_distributions(
    tmp_path: Path, rates: tuple[float, ...], titles: list[str]
) -> None:
    import matplotlib

    from benchmarks.serve.plot import draw as plot

    matplotlib.rcParams["svg.fonttype"] = "none"
    file = tmp_path / "run.svg"
    plot([measured(name, rate, 1.0) for name in ("ours", "theirs") for rate in rates], file)
    text = " ".join(ElementTree.parse(file).getroot().itertext())
    assert all(title in text for title in ("ours", "theirs", *titles))


@thorough
def test_the_engine_is_the_yardstick(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path)
    for chat in (False, True):
        with EngineProcess(str(model), {"tier": "reference", "num_blocks": 64}, chat=chat) as engine:
            assert engine.tokens_per_second(at_once(3)) > 0


@thorough
def test_an_engine_that_cannot_be_made_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the engine's process has ended"):
        EngineProcess(str(tmp_path / "nothing"), {}, chat=False)
