"""Bodies: large ones keep nobody waiting, and are taken or refused as small ones are; what is wrong is said plainly."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.errors import InvalidRequest
from minipaged.serve import bodies
from minipaged.serve.app import MOST_CHARACTERS, _given
from minipaged.serve.bodies import LARGE, LISTS, MOST_VALUES, decoded
from minipaged.serve.protocol import MOST_PROMPTS
from tests.serve.harness import PATIENCE_S, Served

HEADERS = {"Content-Type": "application/json"}
PADDING = b" " * LARGE


def lists(number: int, length: int) -> bytes:
    """A prompt of so many lists of so many tokens."""
    return b'{"max_tokens": 1, "prompt": [' + b",".join([b"[" + b",".join([b"7"] * length) + b"]"] * number) + b"]}"


def post(server: Served, body: bytes, path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(server.url + path, content=body, headers=HEADERS, timeout=PATIENCE_S)


def message(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text[:300]
    return str(answer.json()["error"]["message"])


# --- Large ones -----------------------------------------------------------------------------------


def test_a_large_body_keeps_nobody_waiting(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop has its turns while the body is decoded and validated: one in 20 ms, on average. (A thread gives
    way after 5 ms.)"""
    turns, during = 0, []
    real = bodies.validated

    async def watch() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    def watched(body: bytes, kind: Any) -> Any:
        before, begun = turns, time.perf_counter()
        try:
            return real(body, kind)
        finally:
            during.append((turns - before, time.perf_counter() - begun))

    monkeypatch.setattr(bodies, "validated", watched)
    watching = asyncio.run_coroutine_threadsafe(watch(), server.server.loop)
    assert "maximum context length is 1024 tokens" in message(post(server, lists(100, 5000)))
    watching.cancel()
    [(had, seconds)] = during
    assert had > max(2, seconds / 0.02)


@pytest.mark.parametrize(
    "body",
    [lists(1000, 1000), lists(3, MOST_VALUES - 20), b'{"prompt": "' + b"a, [" * 300_000 + b'"}', lists(1, 10)],
    ids=["many", "long", "text", "small"],
)
def test_no_call_decodes_more_than_the_loop_can_wait_for(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread has a turn within one."""
    decode, sizes = msgspec.json.decode, []

    def watched(text: bytes, **more: Any) -> Any:
        if not more and not text.startswith(b'"'):  # what is split, or is one text, takes no time
            sizes.append(text.count(b","))
        return decode(text, **more)

    monkeypatch.setattr(msgspec.json, "decode", watched)
    assert decoded(body) == json.loads(body)
    assert max(sizes, default=0) <= MOST_VALUES


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", lists(MOST_PROMPTS + 1, 500), "prompt"),
        ("/v1/completions", lists(2, MOST_VALUES + 2), "prompt"),
        ("/v1/completions", b'{"prompt": [' + b"1," * MOST_VALUES + b"1, 1]}", "prompt"),
        ("/v1/completions", b'{"prompt": [[[' + b"1]], [[" * MOST_VALUES + b"1]]]}", "prompt"),
        ("/v1/completions", b'{"prompt": [[1], ' + b"1," * MOST_VALUES + b"[1]]}", "prompt"),
        ("/v1/completions", b'{"prompt": [' + b'"",' * MOST_VALUES + b'"", ""]}', None),
        ("/v1/completions", b'{"prompt": "x", "nobody": [' + b"{}," * MOST_VALUES + b"{}]}", None),
        ("/v1/completions", b'{"prompt": "x"' + b', "a": 1' * MOST_VALUES + b', "b": 1}', None),
        ("/v1/chat/completions", b'{"messages": [' + b"{}," * MOST_VALUES + b"{}]}", "messages"),
        ("/detokenize", b'{"tokens": [' + b"1," * MOST_VALUES + b"1, 1]}", "tokens"),
        ("/tokenize", b'{"messages": [' + b"{}," * MOST_VALUES + b"{}]}", "messages"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_holds_too_many_values_is_refused_unread(
    server: Served, path: str, body: bytes, field: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, sizes = msgspec.json.decode, [0]

    def watched(text: bytes, **more: Any) -> Any:
        if not more:
            sizes.append(text.count(b","))
        return decode(text, **more)

    monkeypatch.setattr(msgspec.json, "decode", watched)
    answer = post(server, body, path)
    assert "too many values: at most 262,144" in message(answer)
    assert answer.json()["error"]["param"] == field
    assert max(sizes) <= MOST_VALUES


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.text(st.sampled_from('ab,[]{}":\\\n é😀')),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=40,
)
NUMBERS = st.lists(st.lists(st.integers(0, 300), max_size=9), max_size=9)


@pytest.mark.parametrize(("most", "few"), [(6, 0), (6, 10**6), (60, 10**6), (10**6, 0)])
@given(data=st.dictionaries(st.text(max_size=4), VALUES | NUMBERS, max_size=4), indent=st.sampled_from([None, 1]))
def test_what_is_decoded_in_parts_is_what_the_body_says(most: int, few: int, data: Any, indent: int | None) -> None:
    """Or it has more values than are taken, in one of its fields or as a whole."""
    body = json.dumps(data, indent=indent, ensure_ascii=bool(indent)).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "MOST_VALUES", most)
        patch.setattr(bodies, "FEW_TEXTS", few)
        if weight(data) <= most:
            assert decoded(body) == data
            return
        with suppress(InvalidRequest):  # some of that is a text's commas, or tokens in lists of their own
            assert decoded(body) == data


def weight(data: Any) -> int:
    """How many numbers it takes as long as, at most."""
    inner = list(data.values()) if isinstance(data, dict) else data if isinstance(data, list) else None
    return 1 if inner is None else LISTS + sum(map(weight, inner))


WRONG: list[bytes] = [
    b"{",
    b"[]",
    b'"x"',
    b'{"prompt": 5}',
    b'{"prompt": ["x", 5]}',
    b'{"prompt": [-1]}',
    b'{"prompt": [1.5]}',
    b'{"prompt": [true]}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "n": "many", "seed": {}}',
    b'{"prompt": "x", "n": -1, "top_p": 3}',
    b'{"prompt": "x", "tools": [1]}',
    b'{"prompt": "\xff"}',
    b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}",
]


@pytest.mark.parametrize("body", WRONG, ids=lambda value: repr(value)[:40])
def test_a_large_body_is_refused_in_the_words_for_a_small_one(server: Served, body: bytes) -> None:
    small, large = post(server, body), post(server, PADDING + body)
    there = small.json()["error"] | {"message": None}
    assert large.json()["error"] | {"message": None} == there
    if "byte" not in message(small):
        assert message(large) == message(small)


def test_a_large_body_is_answered_as_a_small_one(server: Served) -> None:
    body = json.dumps({"prompt": [[70], [71, 72]], "max_tokens": 4, "temperature": 0, "return_token_ids": True})
    post(server, body.encode())  # now the cache has all that either of the others can find
    small, large = (post(server, padding + body.encode()).json() for padding in (b"", PADDING))
    assert small["choices"] == large["choices"]
    assert small["usage"] == large["usage"]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("x" * 10_000, "'" + "x" * (MOST_CHARACTERS - 1) + "…"),
        (list(range(100_000)), repr(list(range(100)))[:MOST_CHARACTERS] + "…"),
        ([[1, 2], {"a": [None]}], "[[1, 2], {'a': [None]}]"),
        (1.5, "1.5"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_of_what_was_given_the_beginning_is_told(value: Any, told: str) -> None:
    assert _given(value) == told


def test_of_a_long_value_no_more_is_written_out_than_is_told() -> None:
    class Silent(int):
        def __repr__(self) -> str:
            raise AssertionError("nobody reads this")

    assert _given([[1] * 250, *[[Silent()]] * 100]).endswith("…")


# --- What is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "half", "at"),
    [
        (rb'{"prompt": "\ud800"}', r"\ud800", 12),
        (rb'{"prompt": "\udc00"}', r"\udc00", 12),
        (rb'{"prompt": "\uDBFF"}', r"\uDBFF", 12),
        (rb'{"prompt": "\ud800x"}', r"\ud800", 12),
        (rb'{"prompt": "\ud800\u0041 and more"}', r"\ud800", 12),
        (rb'{"prompt": "\ud83d\ude00 \ud83d\ud83d\ude00"}', r"\ud83d", 25),
        (rb'{"prompt": "\\\ud800"}', r"\ud800", 14),
        (rb'{"\ud800": 1, "prompt": "x"}', r"\ud800", 2),
        (rb'{"prompt": "x", "stop": ["a", "\udfff"]}', r"\udfff", 31),
        (rb'{"prompt": "x", "bad_words": ["\ud801"]}', r"\ud801", 31),
        (rb'{"messages": [{"role": "user", "content": "\ud800"}], "prompt": "x"}', r"\ud800", 43),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_half_a_character_is_called_so(server: Served, body: bytes, half: str, at: int) -> None:
    said = message(post(server, body))
    assert said.startswith(f"the body has {half} at byte {at}, which is half of a character")
    assert "UTF-8" in said
    assert "truncated" not in said


@pytest.mark.parametrize("body", [rb'{"prompt": "\ud83d\ude00", "max_tokens": 1}', rb'{"prompt": "\\ud800", "n": 1}'])
def test_whole_characters_are_taken(server: Served, body: bytes) -> None:
    assert post(server, body).status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": "x", "n": NaN}', "the body is not JSON: NaN is no value of JSON (byte 21)"),
        (b'{"prompt": "x", "n": -Infinity}', "the body is not JSON: -Infinity is no value of JSON (byte "),
        (b'{"prompt": None}', "the body is not JSON: None is no value of JSON (byte "),
        (b'{"prompt": nope}', "the body is not JSON: nope is no value of JSON (byte "),
        (
            b'{"prompt": "a\nb"}',
            "the body is not JSON: a text in it has the control character \\u000a unescaped (byte 13)",
        ),
        (b'{"prompt": "x"', "the body is not JSON: it ends too early"),
        (b"   ", "the body is not JSON: it ends too early"),
        (b'\xef\xbb\xbf{"prompt": "x"}', "the body is not JSON: it begins with a byte order mark"),
        (b'{"prompt": "\xff"}', "the body is not JSON: a text in it is not UTF-8 (it has the byte 0xff)"),
        (b'{"prompt": "x",}', "the body is not JSON: trailing comma in object (byte "),
        (b'{"prompt": 1e999}', "a number in the body is out of range"),
        (b"[]", "the body must be a JSON object"),
        (b"null", "the body must be a JSON object"),
        (b"[" * 5000 + b"]" * 5000, "the body is nested too deeply"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "the body is nested too deeply"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_wrong_with_the_json_is_said_as_it_is(server: Served, body: bytes, words: str) -> None:
    assert message(post(server, body)).startswith(words)
