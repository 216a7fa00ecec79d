"""The server as whoever speaks HTTP meets it: the endpoints beside OpenAI's, errors, keys, limits, hostile input."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from minipaged.engine.detokenizer import naming_failures
from minipaged.llm import LoadedModel
from minipaged.models.tokenizer import Tokenizer
from minipaged.serve import answers
from minipaged.serve.app import MANY_TOKENS
from minipaged.serve.protocol import SHAPES
from minipaged.serve.settings import ServeSettings
from tests.effort import thorough
from tests.serve.harness import PATIENCE_S, Served, served

COMPLETE = {"prompt": "x", "max_tokens": 1}
HELLO = [{"role": "user", "content": "x"}]


def test_tokens_and_texts(server: Served) -> None:
    answer = server.post("/tokenize", {"prompt": "Ab", "return_token_strs": True}).json()
    assert answer["count"] == 2
    assert answer["token_strs"] == ["A", "b"]
    assert answer["max_model_len"] == server.allm.llm.config.max_model_len
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "Ab"}
    chat = {"messages": [{"role": "user", "content": "Ab"}]}
    assert server.post("/tokenize", chat).json()["tokens"] == server.allm.llm.encode_chat(chat["messages"])
    for wrong in ({}, {"prompt": "x", **chat}):
        assert server.post("/tokenize", wrong).status_code == 400
    assert server.post("/detokenize", {"tokens": [10**9]}).status_code == 400


def test_health_version_load(server: Served) -> None:
    for ask in (server.get("/health"), server.get("/ping"), server.post("/ping", {})):
        assert ask.status_code == 200
        assert ask.content == b""
    assert set(server.get("/version").json()) == {"version"}
    assert server.get("/load").json() == {"server_load": 0}
    endless = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with (
        server.slow(),
        httpx.stream("POST", server.url + "/v1/completions", json=endless, timeout=PATIENCE_S) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        assert server.get("/load").json() == {"server_load": 1}
    server.check_nothing_is_left()
    while server.get("/load").json()["server_load"]:
        pass


def test_the_metrics_count_what_is_served(server: Served) -> None:
    def generated() -> float:
        [line] = [line for line in server.get("/metrics").text.splitlines() if line.startswith("vllm:generation_tok")]
        assert 'model_name="tiny"' in line
        return float(line.split()[-1])

    before = generated()
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 7, "ignore_eos": True})
    assert generated() == before + 7
    assert server.get("/metrics").headers["content-type"].startswith("text/plain; version=")
    openmetrics = server.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")


def test_only_the_same_salt_finds_a_prompt_again(server: Served) -> None:
    def found(path: str, **body: Any) -> int:
        answer = server.post(f"/v1/{path}", body | {"max_tokens": 1}).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def num_salts() -> float:
        lines = server.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("minipaged:prefix_cache_salts_total{"))

    before = num_salts()
    asked: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": "salt " * 20}),
        ("chat/completions", {"messages": [{"role": "user", "content": "salt " * 20}]}),
    ]
    for path, body in asked:
        for salt in ("mine", None, "theirs"):
            salted = body if salt is None else body | {"cache_salt": salt}
            first, second = found(path, **salted), found(path, **salted)
            assert first < 40 < second or salt is None  # others without a salt may have begun alike
            assert first == 0 or salt is None
    assert num_salts() == before + 2


def test_a_stream_is_server_sent_events(server: Served) -> None:
    answer = server.post("/v1/completions", COMPLETE | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in answer.headers
    events = answer.text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    assert events.pop() == "data: [DONE]"
    for event in events:
        json.loads(event.removeprefix("data: "))


def test_the_id_may_be_given(server: Served) -> None:
    assert server.post("/v1/completions", COMPLETE | {"request_id": "mine"}).json()["id"] == "cmpl-mine"
    answer = server.post("/v1/completions", COMPLETE, headers={"X-Request-Id": "header.1"})
    assert answer.json()["id"] == "cmpl-header.1"
    assert server.post("/v1/completions", COMPLETE, headers={"X-Request-Id": "a b"}).json()["id"] != "cmpl-a b"


def test_an_id_may_come_again_while_the_engine_has_the_first(server: Served) -> None:
    """As from a client that has given up waiting, and tries again: each gets its own answer."""
    again = {"X-Request-Id": "again"}
    with server.slow(0.05):
        for _ in range(3):
            body = {"prompt": "the first", "max_tokens": 500, "ignore_eos": True}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(
                    server.url + "/v1/completions",
                    json=body,
                    headers=again,
                    timeout=httpx.Timeout(PATIENCE_S, read=0.2),
                )
            answer = server.post("/v1/completions", COMPLETE | {"return_token_ids": True}, headers=again).json()
            assert answer["id"] == "cmpl-again"
            assert answer["choices"][0]["prompt_token_ids"] == server.allm.llm.need_tokenizer().encode("x")
            assert answer["choices"][0]["finish_reason"] == "length"
    server.check_nothing_is_left()


@thorough
def test_a_long_prompt_keeps_nobody_waiting(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizing lets the event loop go on: it is asked for something else all the while."""
    turns = 0

    async def watch() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.005)
            turns += 1

    encode, meanwhile = Tokenizer.encode, []

    def watched(tokenizer: Tokenizer, text: str, *rest: Any, **more: Any) -> list[int]:
        before = turns
        tokens = encode(tokenizer, text, *rest, **more)
        meanwhile.append(turns - before)
        return tokens

    monkeypatch.setattr(Tokenizer, "encode", watched)
    watching = asyncio.run_coroutine_threadsafe(watch(), server.server.loop)
    assert server.post("/tokenize", {"prompt": "many words of a prompt " * 100_000}).json()["count"] > 1_000_000
    watching.cancel()
    assert len(meanwhile) == 1
    assert meanwhile[0] > 3


@pytest.mark.parametrize("stream", [False, True])
def test_to_write_a_long_answer_keeps_nobody_waiting(
    server: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Places and log-probabilities of many tokens are made while the event loop goes on."""
    threads: list[str] = []
    places = answers.places_in_prompt

    def watched(*given: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return places(*given)

    monkeypatch.setattr(answers, "places_in_prompt", watched)
    own = server.thread.name
    for length, is_long in ((10, False), (MANY_TOKENS + 10, True)):
        body = {"prompt": [70] * length, "max_tokens": 1, "echo": True, "logprobs": 0, "n": 3, "stream": stream}
        assert server.post("/v1/completions", body).status_code == 200
        assert [name != own for name in threads] == [is_long]  # once for all choices
        threads.clear()


def error_of(answer: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == (code or status)
    return dict(error)


def test_faults_are_told_by_name_ten_at_most_and_cut(server: Served) -> None:
    error = error_of(server.post("/v1/completions", {"prompt": "x", "temperature": "hot" * 1000}), 400)
    assert error["param"] == "temperature"
    assert "temperature" in error["message"]
    assert len(error["message"]) < 600
    many = dict.fromkeys(("n", "top_p", "top_k", "min_p", "seed", "min_tokens", "priority", "max_tokens"), "wrong")
    many |= dict.fromkeys(("logprobs", "presence_penalty", "frequency_penalty", "length_penalty", "echo"), "wrong")
    error = error_of(server.post("/v1/completions", {"prompt": "x", **many}), 400)
    assert "and 3 more" in error["message"]


def test_null_is_nothing_and_unknown_fields_are_let_pass(server: Served) -> None:
    nulls = dict.fromkeys(
        ("n", "temperature", "top_p", "seed", "stop", "logprobs", "stream", "stream_options", "user", "logit_bias"),
    )
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2, **nulls}).status_code == 200
    assert server.post("/v1/completions", COMPLETE | {"nobody_knows": {"this": 1}}).status_code == 200
    assert server.post("/v1/completions", COMPLETE | {"model": ""}).status_code == 200
    assert server.post("/v1/completions", COMPLETE | {"model": None}).status_code == 200


HOSTILE: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b"null", 400),
    (b"[]", 400),
    (b'"text"', 400),
    (b"[" * 100_000, 400),
    (b'{"prompt": ' + b"[" * 100_000, 400),
    (b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", 400),
    (b'{"prompt": "x", "temperature": NaN}', 400),
    (b'{"prompt": "x", "temperature": Infinity}', 400),
    (b'{"prompt": "x", "temperature": 1e999}', 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b'{"prompt": "x", "stop": "\\udc00"}', 400),
    (b'{"prompt": "\xff\xfe"}', 400),
    (b'{"prompt": "x\\u0000y", "max_tokens": 1}', 200),
    (b'{"prompt": [-1], "max_tokens": 1}', 400),
    (b'{"prompt": [99999999999999999999999], "max_tokens": 1}', 400),
    (b'{"prompt": [1.5], "max_tokens": 1}', 400),
    (b'{"prompt": [true], "max_tokens": 1}', 400),
    (b'{"prompt": [[1], "a"], "max_tokens": 1}', 400),
    (b'{"prompt": [[]]}', 400),
    (b'{"prompt": [""]}', 400),
    (b'{"prompt": ""}', 400),
    (b'{"prompt": "x", "max_tokens": -1}', 400),
    (b'{"prompt": "x", "max_tokens": 0}', 400),
    (b'{"prompt": "x", "max_tokens": 1e30}', 400),
    (b'{"prompt": "x", "n": -1}', 400),
    (b'{"prompt": "x", "n": 100000}', 400),
    (b'{"prompt": "x", "seed": 1' + b"0" * 40 + b"}", 400),
    (b'{"prompt": "x", "top_p": 0}', 400),
    (b'{"prompt": "x", "top_k": -2}', 400),
    (b'{"prompt": "x", "top_k": 9223372036854775808}', 400),
    (b'{"prompt": "x", "top_k": 2147483647, "max_tokens": 2}', 200),
    (b'{"prompt": "x", "priority": 1' + b"0" * 60 + b', "max_tokens": 1}', 400),
    (b'{"prompt": "x", "min_tokens": 1' + b"0" * 60 + b"}", 400),
    (b'{"prompt": "x", "repetition_penalty": 1e-320}', 400),
    (b'{"prompt": "x", "temperature": 1e-320, "max_tokens": 2}', 200),
    (b'{"prompt": "x", "temperature": 1e308, "max_tokens": 2}', 200),
    (b'{"prompt": "x", "min_p": 1e-320, "top_p": 1e-320, "max_tokens": 2}', 200),
    (b'{"prompt": "x", "stop": "' + b"x" * 1_000_000 + b'"}', 400),
    (b'{"prompt": "x", "bad_words": ' + json.dumps(["x"] * 100_000).encode() + b"}", 400),
    (b'{"prompt": ' + json.dumps([None] * 200_000).encode() + b"}", 400),
    (b'{"prompt": "x", "request_id": "a b"}', 400),
    (b'{"prompt": "x", "use_beam_search": true, "logprobs": 2}', 400),
    (b'{"prompt": "x", "truncate_prompt_tokens": 0}', 400),
    (b'{"prompt": "' + b"x" * 1100 + b'", "truncate_prompt_tokens": -1, "max_tokens": 3}', 200),
    (b'{"prompt": "x", "min_p": 2}', 400),
    (b'{"prompt": "x", "logprobs": 21}', 400),
    (b'{"prompt": "x", "logprobs": -1}', 400),
    (b'{"prompt": "x", "min_tokens": 20}', 400),
    (b'{"prompt": "x", "repetition_penalty": 0}', 400),
    (b'{"prompt": "x", "stop_token_ids": [-3]}', 400),
    (b'{"prompt": "x", "stop": ' + json.dumps([str(i) for i in range(10_000)]).encode() + b"}", 400),
    (b'{"prompt": "x", "stop": [""]}', 400),
    (b'{"prompt": "x", "logit_bias": {"-1": 5}}', 400),
    (b'{"prompt": "x", "logit_bias": {"5": 1000}}', 400),
    (b'{"prompt": "x", "allowed_token_ids": []}', 400),
    (b'{"prompt": "x", "request_id": ""}', 400),
    (b'{"prompt": "x", "cache_salt": ""}', 400),
    (b'{"prompt": "x", "cache_salt": 7}', 400),
    (b'{"prompt": "x", "cache_salt": ["a"]}', 400),
    (b'{"prompt": "x", "cache_salt": "' + b"x" * 1025 + b'"}', 400),
    (b'{"prompt": "x", "cache_salt": "' + b"x" * 1_000_000 + b'"}', 400),
    (b'{"prompt": "x", "cache_salt": "\\ud800"}', 400),
    (b'{"prompt": "x", "cache_salt": "' + b"x" * 1024 + b'"}', 200),
    (b'{"prompt": "x", "cache_salt": "\\u0000 \xf0\x9f\xa7\x82"}', 200),
    (b'{"prompt": "x", "cache_salt": null}', 200),
    (b'{"prompt": ' + json.dumps(["x"] * 1025).encode() + b"}", 400),
    (b'{"prompt": "' + b"long " * 300_000 + b'"}', 400),
    (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413),
]


@pytest.fixture(scope="module")
def fast_server(tiny_folder: Path) -> Iterator[Served]:
    """The same model on the fast tier, whose numbers are those of the machine."""
    with served(LoadedModel.load(tiny_folder, tier="fast", device="cpu", dtype="float32")) as running:
        yield running
        running.check_nothing_is_left()


@pytest.mark.parametrize("tier", ["reference", "fast"])
@pytest.mark.parametrize(("body", "status"), HOSTILE, ids=lambda value: repr(value)[:40])
def test_hostile_bodies_are_refused_and_the_server_lives(
    tier: str, body: bytes, status: int, request: pytest.FixtureRequest
) -> None:
    server: Served = request.getfixturevalue("server" if tier == "reference" else "fast_server")
    answer = httpx.post(
        server.url + "/v1/completions", content=body, headers={"Content-Type": "application/json"}, timeout=PATIENCE_S
    )
    assert answer.status_code == status, answer.text[:300]
    assert len(answer.content) < 10_000
    assert server.post("/v1/completions", COMPLETE).status_code == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_another_content_type_is_refused(server: Served, content_type: str) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    error = error_of(
        httpx.post(server.url + "/v1/completions", content=b'{"prompt": "x"}', headers=headers, timeout=PATIENCE_S), 400
    )
    assert "application/json" in error["message"]


def test_a_slash_at_the_end_asks_for_the_list_of_models(server: Served) -> None:
    """A model without a name would be none."""
    models = server.get("/v1/models/")
    assert models.json()["object"] == "list"
    assert models.json() == server.get("/v1/models").json()
    assert server.get("/v1/models/tiny").json() in models.json()["data"]
    assert "/v1/models/," not in error_of(server.get("/v1/nonsense"), 404)["message"]


def test_another_method_is_refused_and_the_right_one_named(server: Served) -> None:
    error = error_of(server.get("/v1/completions"), 405)
    assert error["message"] == "/v1/completions takes POST, not GET"


@pytest.mark.parametrize("path", ["/v1/nonsense", "/v1/audio/speech", "/v1/embeddings"])
def test_who_asks_for_what_there_is_not_is_told_what_there_is(server: Served, path: str) -> None:
    error = error_of(server.post(path, {}), 404)
    assert error["message"].startswith(f"there is no {path} here; there is /v1/completions, /v1/chat/completions, ")
    assert "/v1/models/{name}, " in error["message"]
    assert error["message"].endswith(", /openapi.json, /")
    assert error["type"] == "NotFoundError"


@pytest.mark.parametrize("content", [b" " * (8 * 2**20 + 1), [b" " * 2**20] * 9], ids=["told", "not told"])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_that_is_too_long_is_told_so(server: Served, path: str, content: Any) -> None:
    """Whether its length is in a header or not."""
    headers = {"Content-Type": "application/json"}
    error = error_of(httpx.post(server.url + path, content=content, headers=headers), 413)
    assert "8,388,608 bytes" in error["message"]


ABOUT: list[tuple[str, dict[str, Any], str | None]] = [
    ("completions", {"prompt": "x", "max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ("completions", {"prompt": [10**9]}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": ["x"] * 1025}, "prompt"),
    ("completions", {"prompt": "x", "n": 1000}, "n"),
    ("completions", {"prompt": "x", "stop": ["a"] * 5}, "stop"),
    ("completions", {"prompt": "x", "stream_options": {"include_usage": False}}, "stream_options"),
    ("completions", {"prompt": "x", "truncation_side": "middle"}, "truncation_side"),
    ("completions", {"prompt": "x", "logprob_token_ids": [5]}, "logprob_token_ids"),
    ("completions", {"prompt": "x", "logprobs": 0, "logprob_token_ids": [10**6]}, "logprob_token_ids"),
    ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ("completions", {"prompt": "x", "best_of": 2}, "best_of"),
    ("completions", {"prompt": "x", "request_id": "a b"}, "request_id"),
    ("completions", {"prompt": "x", "cache_salt": ""}, "cache_salt"),
    ("chat/completions", {"cache_salt": 7}, "cache_salt"),
    ("completions", {"prompt": "x", "stop_token_ids": [10**6]}, "stop_token_ids"),
    ("completions", {"prompt": "x", "allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ("completions", {"prompt": "x", "logit_bias": {"1000000": 1}}, "logit_bias"),
    ("chat/completions", {"tools": [{}]}, "tools"),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {"chat_template": "x"}, "chat_template"),
    ("chat/completions", {"messages": [{"role": 3, "content": "x"}]}, "messages"),
    ("chat/completions", {"messages": [{"content": "x"}]}, "messages"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ("completions", {"prompt": "x", "length_penalty": 2.0}, "length_penalty"),
]


@pytest.mark.parametrize(("path", "body", "param"), ABOUT, ids=lambda value: repr(value)[:40])
def test_an_error_names_the_field_that_it_is_about(
    server: Served, path: str, body: dict[str, Any], param: str | None
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **body} if path.startswith("chat") else body
    assert error_of(server.post(f"/v1/{path}", body), 400)["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "x", "max_tokens": 5000}, "max_tokens"),
        ("completions", {"prompt": "x" * 2000}, "prompt"),
        ("completions", {"prompt": "long " * 300_000}, "prompt"),
        ("chat/completions", {"messages": HELLO, "max_completion_tokens": 5000}, "max_completion_tokens"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_too_long_is_told_so_in_openais_words(
    server: Served, path: str, body: dict[str, Any], param: str
) -> None:
    """Clients go by them when they shorten a conversation."""
    error = error_of(server.post(f"/v1/{path}", body), 400, "context_length_exceeded")
    assert error["param"] == param
    assert f"maximum context length is {server.allm.llm.config.max_model_len} tokens" in error["message"]


def test_where_the_pool_bounds_a_sequence_it_is_said(tiny: LoadedModel) -> None:
    with served(tiny, num_blocks=4) as running:
        error = error_of(running.post("/v1/completions", {"prompt": "x" * 100}), 400, "context_length_exceeded")
        assert "64 tokens (the pool of blocks holds no more)" in error["message"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"role": "assistant", "tool_calls": [{}], "content": None},
            "messages[0].tool_calls[0] must be a call",
        ),
        ({"role": "tool", "content": "x"}, 'messages[0] has no "tool_call_id"'),
        ({"role": "user", "content": None}, 'messages[0] has no "content"'),
        ({"content": "x"}, 'messages[0] has no "role"'),
        ({"role": "user", "content": [{"type": "image_url"}]}, 'messages[0]: a part of a "content" is'),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, 'messages[0]: a part of a "content" is'),
    ],
)
def test_what_is_wrong_with_a_message_is_told_with_its_place(
    server: Served, message: dict[str, Any], words: str
) -> None:
    error = error_of(server.post("/v1/chat/completions", {"messages": [message]}), 400)
    assert error["message"].startswith(words)


PASSED: dict[str, Any] = {
    "metadata": {"a": "b"},
    "store": False,
    "user": "me",
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "tool_choice": "none",
    "prompt_cache_key": "key",
    "safety_identifier": "me",
    "length_penalty": 1.0,
}


def test_what_asks_for_nothing_is_let_pass(server: Served) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    assert server.post("/v1/chat/completions", body | PASSED).status_code == 200
    for changed in ({"tool_choice": "auto"}, {"service_tier": "default"}, {"tools": []}):
        assert server.post("/v1/chat/completions", body | changed).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("web_search_options", {}),
        ("documents", [{"text": "x"}]),
        ("reasoning_effort", "high"),
        ("prediction", {"type": "content", "content": "x"}),
        ("service_tier", "flex"),
        ("store", True),
        ("function_call", {"name": "f"}),
        ("verbosity", "low"),
    ],
)
def test_what_asks_for_something_that_does_not_happen_is_refused_by_name(server: Served, name: str, value: Any) -> None:
    error = error_of(server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, name: value}), 400)
    assert error["param"] == name
    assert error["message"].startswith(f"{name} is not supported: ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": 5}', f"prompt must be {SHAPES['prompt']} (given: 5)"),
        (b'{"prompt": "x", "stop": 5}', f"stop must be {SHAPES['stop']} (given: 5)"),
        (b"", "the body is empty; send a JSON object"),
        (
            b'{"prompt": "x", "seed": 18446744073709551616}',
            "seed: must be from -9223372036854775808 to 18446744073709551615 (given: 18446744073709551616)",
        ),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_fault_is_told_once_and_in_plain_words(server: Served, body: bytes, message: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(server.url + "/v1/completions", content=body, headers=headers, timeout=PATIENCE_S)
    assert error_of(answer, 400)["message"] == message


def test_ten_thousand_stop_strings_are_told_the_limit_once(server: Served) -> None:
    error = error_of(server.post("/v1/completions", COMPLETE | {"stop": list(map(str, range(10_000)))}), 400)
    assert error["message"].startswith("stop must be a text, or a list of at most 4, ")
    assert error["message"].count("'0', '1'") == 1


def test_best_of_one_asks_for_nothing(server: Served) -> None:
    for value, status in ((1, 200), (None, 200), (2, 400), (0.5, 400)):
        assert server.post("/v1/completions", COMPLETE | {"best_of": value}).status_code == status


def test_a_body_without_a_length_is_not_read_without_end(server: Served) -> None:
    def endless() -> Any:
        for _ in range(400):
            yield b" " * 65536

    with pytest.raises((httpx.WriteError, httpx.ReadError, httpx.HTTPStatusError, httpx.RemoteProtocolError)):
        httpx.post(
            server.url + "/v1/completions",
            content=endless(),
            headers={"Content-Type": "application/json"},
            timeout=PATIENCE_S,
        ).raise_for_status()
    assert server.get("/health").status_code == 200


def test_a_flood_of_headers_is_refused(server: Served) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_S)
    connection.putrequest("GET", "/health")
    try:
        for i in range(20_000):
            connection.putheader(f"X-{i}", "y" * 100)
        connection.endheaders()
        assert connection.getresponse().status >= 400
    except OSError:
        pass  # it hung up
    connection.close()
    assert server.get("/health").status_code == 200


def test_half_a_request_does_not_keep_the_others_waiting(server: Served) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert server.post("/v1/completions", COMPLETE).status_code == 200


def test_a_priority_is_taken_where_it_makes_a_difference(server: Served, tiny: LoadedModel) -> None:
    error = error_of(server.post("/v1/completions", COMPLETE | {"priority": 1}), 400)
    assert error["param"] == "priority"
    assert "--scheduling-policy priority" in error["message"]
    assert server.post("/v1/completions", COMPLETE | {"priority": 0}).status_code == 200
    with served(tiny, scheduling_policy="priority") as running:
        for priority in (-3, 10**60):
            assert running.post("/v1/completions", COMPLETE | {"priority": priority}).status_code == 200


def test_the_key_is_asked_for_under_v1(tiny: LoadedModel) -> None:
    with served(tiny, ServeSettings(api_key="secret", cors_origin=("https://a.example",))) as running:
        for wrong in (
            {},
            {"Authorization": "secret"},
            {"Authorization": "Bearer secre"},
            {"Authorization": "Bearer é"},
        ):
            headers = {name: value.encode() for name, value in wrong.items()}
            answer = running.post("/v1/completions", COMPLETE, headers=headers)
            assert answer.status_code == 401
            assert answer.json() == {"error": "Unauthorized"}
            assert answer.headers["www-authenticate"] == "Bearer"
        for scheme in ("Bearer", "bearer", "BEARER"):
            right = {"Authorization": f"{scheme} secret"}
            assert running.post("/v1/completions", COMPLETE, headers=right).status_code == 200
        assert running.get("/health").status_code == 200
        asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        preflight = httpx.options(running.url + "/v1/completions", headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"


def test_a_full_queue_says_when_to_ask_again(tiny: LoadedModel) -> None:
    endless = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
    settings = ServeSettings(max_waiting=1)
    with (
        served(tiny, settings, max_num_seqs=1) as running,
        running.slow(0.1),
        httpx.Client(timeout=PATIENCE_S) as client,
    ):
        streams = []
        for _ in range(2):
            request = client.build_request("POST", running.url + "/v1/completions", json=endless)
            streams.append(client.send(request, stream=True))
            if not streams[1:]:
                lines = streams[0].iter_lines()
                next(lines)  # it runs, so the next one waits
        answer = running.post("/v1/completions", COMPLETE)
        error_of(answer, 503)
        assert answer.headers["retry-after"] == "1"
        error_of(running.post("/v1/completions", COMPLETE | {"prompt": ["x", "y"]}), 503)
        rejected = 'vllm:admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"} 3.0'
        assert rejected in running.get("/metrics").text.splitlines()
        for stream in streams:
            stream.close()
        running.check_nothing_is_left()
        assert running.post("/v1/completions", COMPLETE).status_code == 200


def test_one_requests_failure_is_told_and_is_its_own(tiny: LoadedModel) -> None:
    """Tokens that cannot be decoded end the request that they are of."""
    with served(tiny) as running:
        decode = running.allm.llm.tokenizer.decode  # type: ignore[union-attr]

        def failing(*arguments: Any, **options: Any) -> str:
            raise ValueError("no text")

        running.allm.llm.engine._arrivals._decode = naming_failures(failing)
        error = error_of(running.post("/v1/completions", COMPLETE), 500)
        assert "no text" in error["message"]
        events = running.post("/v1/completions", COMPLETE | {"stream": True}).text.strip().split("\n\n")
        assert "no text" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
        assert events[-1] == "data: [DONE]"
        assert decode([70])
        running.check_nothing_is_left()
