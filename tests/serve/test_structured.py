"""Structured outputs on the server and with AsyncLLM: the fields for them, and grammars compiled in threads."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest

from minipaged.async_llm import AsyncRequest
from minipaged.errors import InvalidRequest, ShuttingDown
from minipaged.llm import LLM, LoadedModel
from minipaged.models.grammars import GrammarCompiler
from minipaged.params import SamplingParams, StructuredOutputsParams
from tests.serve.harness import Served, run
from tests.serve.test_async_llm import SIZES, collect, serving

MESSAGES = [{"role": "user", "content": "a person"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "grown": {"type": "boolean"}},
    "required": ["name", "grown"],
    "additionalProperties": False,
}
NAMED = {"name": "person", "schema": PERSON}
CHOICES = ["yes", "no", "perhaps"]


def answers(server: Served, path: str = "/v1/chat/completions", **fields: Any) -> list[str]:
    """The texts of an answer, which must have come to their end."""
    asked = {"messages": MESSAGES} if "chat" in path else {"prompt": "a person"}
    response = server.post(path, {"max_tokens": 200, "temperature": 1, "seed": 1} | asked | fields)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert {one["finish_reason"] for one in choices} == {"stop"}
    return [one["message"]["content"] if "message" in one else one["text"] for one in choices]


def is_person(text: str) -> None:
    jsonschema.validate(json.loads(text), PERSON)


FIELDS: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, is_person),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": True}}}, is_person),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": False}}}, is_person),
    ({"structured_outputs": {"json": PERSON}}, is_person),
    ({"structured_outputs": {"json": json.dumps(PERSON), "regex": None}}, is_person),
    ({"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}}, is_person),
    ({"structured_outputs": {"regex": "[a-f]{3}"}}, lambda text: re.fullmatch("[a-f]{3}", text).end()),  # type: ignore[union-attr]
    ({"structured_outputs": {"choice": CHOICES}}, CHOICES.index),
    ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, ["a", "b"].index),
    ({"guided_json": PERSON}, is_person),
    ({"guided_regex": "[a-f]{3}"}, lambda text: re.fullmatch("[a-f]{3}", text).end()),  # type: ignore[union-attr]
    ({"guided_choice": CHOICES}, CHOICES.index),
    ({"guided_grammar": 'start: "a" | "b"'}, ["a", "b"].index),
]


@pytest.mark.parametrize(("fields", "check"), FIELDS, ids=[str(fields)[:70] for fields, _ in FIELDS])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_answer_has_the_form(server: Served, path: str, fields: dict[str, Any], check: Callable[[str], Any]) -> None:
    [text] = answers(server, path, **fields)
    check(text)


def test_every_sample_has_the_form_with_whatever_else_is_asked(server: Served) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": NAMED}}
    more = {"n": 3, "presence_penalty": 0.5, "logprobs": True, "top_logprobs": 2, "top_p": 0.9, "bad_words": ["z"]}
    texts = answers(server, **form, **more)
    assert len(texts) == 3
    for text in texts:
        is_person(text)


def test_an_answer_is_streamed_as_it_would_be_sent(server: Served) -> None:
    body = {"messages": MESSAGES, "max_tokens": 200, "seed": 1, "stream": True, "guided_choice": CHOICES}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body) as response:
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    parts = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events]
    assert ["".join(parts)] == answers(server, guided_choice=CHOICES)


def test_any_object_is_cut_where_max_tokens_says_and_that_is_told(server: Served) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "response_format": {"type": "json_object"}}
    [choice] = server.post("/v1/chat/completions", body).json()["choices"]
    assert choice["message"]["content"].startswith("{")
    assert choice["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize("form", [{"type": "text"}, None], ids=str)
def test_a_format_that_asks_for_a_text_changes_nothing(server: Served, form: Any) -> None:
    body = {"messages": MESSAGES, "max_tokens": 9, "temperature": 0}
    plain, asked = (server.post("/v1/chat/completions", body | more).json() for more in ({}, {"response_format": form}))
    assert plain["choices"] == asked["choices"]


def test_a_model_of_pydantic_is_parsed_by_openais_client(server: Served) -> None:
    import openai
    import pydantic

    class Person(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        kind: str = pydantic.Field(pattern="^[a-c]{2}$")
        grown: bool

    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.parse(model="", messages=MESSAGES, response_format=Person, max_tokens=200)  # type: ignore[arg-type]
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "no json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format", "schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "'json_schema'"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs", "none of json, regex"),
        ({"structured_outputs": {"structural_tag": "a", "choice": ["a"]}}, None, "structural_tag is 'a'"),
        ({"structured_outputs": {"json": {"type": "person"}}}, "structured_outputs", "Invalid type: person"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"json": {"const": "a" * 2**18}}}, "structured_outputs", "characters"),
        ({"structured_outputs": {"choice": ["a"]}, "guided_regex": "a"}, "structured_outputs", "give one"),
        ({"structured_outputs": {"choice": ["a"]}, "use_beam_search": True}, "structured_outputs", "beam"),
        ({"structured_outputs": {"choice": ["a"]}, "min_tokens": 2}, "min_tokens", "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "response_format", "give one"),
        ({"guided_json": {"not": {}}}, "structured_outputs", "Unimplemented keys"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_done_is_a_400_with_the_reason(
    server: Served, fields: dict[str, Any], param: str | None, words: str
) -> None:
    response = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5} | fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert len(error["message"]) < 1500


def test_a_whitespace_pattern_is_counted_and_short() -> None:
    form = StructuredOutputsParams(json="{}", whitespace_pattern=" " * 1000)
    assert form.num_characters == 1002
    with pytest.raises(InvalidRequest, match=r"whitespace_pattern has 1,001 characters; 1,000 are the most"):
        StructuredOutputsParams(json_object=True, whitespace_pattern=" " * 1001)


@pytest.mark.parametrize(
    "large",
    [{"a": "x" * 10**6}, ["x" * 10**6, 3], [["x"] * 10**5], -(10**1000)],
    ids=lambda value: type(value).__name__,
)
def test_refusals_do_not_repeat_a_large_value(large: Any) -> None:
    for name in ("regex", "grammar", "whitespace_pattern", "choice", "disable_any_whitespace"):
        if name != "choice" or not isinstance(large, dict):
            with pytest.raises(InvalidRequest, match=f"^{name} is") as caught:
                StructuredOutputsParams(**{"json": "{}", name: large})
            assert len(str(caught.value)) < 400
    for name in ("stop", "bad_words", "structured_outputs", "n"):
        if name not in ("stop", "bad_words") or not isinstance(large, dict):
            with pytest.raises(InvalidRequest, match=f"^{name} is") as caught:
                SamplingParams(**{name: large})
            assert len(str(caught.value)) < 400


# --- Compiled beside the loop ---------------------------------------------------------------------

FORM = StructuredOutputsParams(choice=CHOICES)
PARAMS = SamplingParams(max_tokens=20, structured_outputs=FORM, seed=1)


class Held:
    """A compiler that compiles only when the test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.compiling = threading.Event(), threading.Event()
        compile_form = GrammarCompiler._compile

        def held(compiler: GrammarCompiler, lark: str) -> tuple[Any, int]:
            self.compiling.set()
            assert self.go_on.wait(60)
            return compile_form(compiler, lark)

        monkeypatch.setattr(GrammarCompiler, "_compile", held)


def test_a_grammar_is_compiled_beside_the_loop_and_the_engine(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is, other requests begin and end."""
    [alone] = LLM(tiny, **SIZES).generate(["a"], PARAMS)
    held = Held(monkeypatch)

    async def work() -> None:
        async with serving(tiny) as allm:
            waiting = asyncio.create_task(collect(allm.generate("a", PARAMS)))
            await asyncio.to_thread(held.compiling.wait)
            assert not allm.num_open
            await collect(allm.generate("b", SamplingParams(max_tokens=5)))
            assert not waiting.done()
            held.go_on.set()
            text, _ = await waiting
            assert text == alone.outputs[0].text
            held.compiling.clear()
            await collect(allm.generate("c", PARAMS))
            assert not held.compiling.is_set(), "a form seen before is not compiled again"

    run(work)


def test_a_request_that_is_cancelled_while_its_grammar_is_compiled_leaves_nothing(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)

    async def work() -> None:
        async with serving(tiny) as allm:
            tasks = [
                asyncio.create_task(collect(allm.generate("a", SamplingParams(structured_outputs=form))))
                for form in (StructuredOutputsParams(choice=[str(i)]) for i in range(5))
            ]
            await asyncio.to_thread(held.compiling.wait)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            assert not allm.num_open
            held.go_on.set()
            text, _ = await collect(allm.generate("a", PARAMS))
            assert text in CHOICES

    run(work)


def test_shutting_down_ends_the_wait_for_a_grammar(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)

    async def work() -> None:
        async with serving(tiny) as allm:
            forms = (StructuredOutputsParams(choice=[str(i)]) for i in range(4))
            asked = [SamplingParams(structured_outputs=form) for form in forms]
            tasks = [asyncio.create_task(collect(allm.generate("a", params))) for params in asked]
            await asyncio.to_thread(held.compiling.wait)
            await allm.shutdown()
            held.go_on.set()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, ShuttingDown)

    run(work)


def test_a_grammar_that_takes_too_long_is_refused(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    monkeypatch.setattr("minipaged.async_llm.COMPILE_S", 0.05)

    async def work() -> None:
        async with serving(tiny) as allm:
            with pytest.raises(InvalidRequest, match="not compiled within"):
                await collect(allm.generate("a", PARAMS))
            assert not allm.num_open
            held.go_on.set()

    run(work)


def test_requests_are_refused_together_if_one_form_is(tiny: LoadedModel) -> None:
    async def work() -> None:
        async with serving(tiny) as allm:
            good, bad = (SamplingParams(structured_outputs=StructuredOutputsParams(regex=text)) for text in ("a", "("))
            with pytest.raises(InvalidRequest, match="unclosed group"):
                await allm.add([AsyncRequest("1", [5], good), AsyncRequest("2", [5], bad)])
            assert not allm.num_open

    run(work)


def test_a_hostile_schema_holds_up_nobody(server: Served) -> None:
    """It is compiled for a while; /health answers meanwhile."""
    schema = {"properties": {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i % 50 + 1}}}$"} for i in range(1500)}}
    bodies = [{"prompt": "a", "guided_json": schema | {"title": title}} for title in ("one", "another")]
    threads = [threading.Thread(target=server.post, args=("/v1/completions", body)) for body in bodies]
    for thread in threads:
        thread.start()
    slowest = 0.0
    while any(thread.is_alive() for thread in threads):
        begun = time.monotonic()
        assert server.get("/health").status_code == 200
        slowest = max(slowest, time.monotonic() - begun)
    assert slowest < 1


def test_an_engine_thread_finds_what_was_compiled_though_the_cache_has_dropped_it(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minipaged.models.grammars.MOST_KEPT", 0)
    compiled: list[str] = []
    compile_form = GrammarCompiler._compile

    def noting(compiler: GrammarCompiler, lark: str) -> tuple[Any, int]:
        compiled.append(lark)
        return compile_form(compiler, lark)

    monkeypatch.setattr(GrammarCompiler, "_compile", noting)

    async def work() -> None:
        async with serving(tiny) as allm:
            await collect(allm.generate("a", PARAMS))
            assert len(compiled) == 1

    run(work)
