"""/v1/responses: what the model sees of the input, the items of an answer, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minipaged.async_llm import AsyncRequest
from minipaged.errors import EngineDead
from minipaged.serve.protocol import MOST_ITEMS
from minipaged.serve.response_bodies import INCLUDABLE, LOGPROBS, REFUSED_HERE, ResponsesBody
from tests.serve.scripted import TOOLS, Json, Script

PATH = "/v1/responses"
FLAT = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]
F = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
G = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
STEPS = (1, 2, 7, 1000)


@pytest.fixture(scope="module")
def module_script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return Script.make(tmp_path_factory.mktemp("responses"))


@pytest.fixture
def script(module_script: Script) -> Iterator[Script]:
    yield module_script
    module_script.engine.abort, module_script.engine.failure, module_script.engine.death = False, None, None


def without_ids(item: Json) -> Json:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def respond(script: Script, text: str, step: int | None = None, **fields: Any) -> Json:
    """The response, whole or as it stands in the last event of a stream whose events are checked."""
    body = {"input": "x", "tools": FLAT, **fields}
    if step is None:
        return script.answered(PATH, body, text)
    return check_events(script.chunks(PATH, body, text, step))


def check_events(events: list[Json]) -> Json:
    """Check that the events are in OpenAI's order, and that those of each item, put together, are the item."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    for event in events[:2]:
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
    last = dict(events[-1]["response"])
    assert kinds[-1] == last["status"]
    place, items = 2, list[Json]()
    while place < len(events) - 1:
        item, index = events[place]["item"], events[place]["output_index"]
        assert (kinds[place], item["status"], index) == ("output_item.added", "in_progress", len(items))
        place += 1
        is_message = item["type"] == "message"
        opens, kind = (["content_part.added"], "output_text") if is_message else ([], "function_call_arguments")
        assert kinds[place : place + len(opens)] == opens
        place += len(opens)
        pieces, logprobs = "", list[Json]()
        while kinds[place] == f"{kind}.delta":
            pieces += events[place]["delta"]
            logprobs += events[place].get("logprobs", [])
            place += 1
        closes = [f"{kind}.done", *(["content_part.done"] if is_message else []), "output_item.done"]
        assert kinds[place : place + len(closes)] == closes
        assert events[place]["text" if is_message else "arguments"] == pieces
        for event in events[place - 1 : place + len(closes) - 1]:
            assert (event["item_id"], event["output_index"]) == (item["id"], index)
        place += len(closes)
        done = events[place - 1]["item"]
        assert done["id"] == item["id"]
        if is_message:
            assert done["content"][0]["text"] == pieces
            assert done["content"][0] == events[place - 2]["part"]
            assert done["content"][0]["logprobs"][: len(logprobs)] == logprobs
        else:
            assert done["arguments"] == pieces
            assert item["arguments"] == ""
        items.append(done)
    assert last["output"] == items
    return last


def test_a_text_is_answered_by_a_message(script: Script) -> None:
    for step in (None, *STEPS):
        response = respond(script, "An </s> answer.", step, instructions="Be short.", metadata={"a": "b"})
        part = {"type": "output_text", "text": "An </s> answer.", "annotations": [], "logprobs": []}
        [item] = response["output"]
        assert without_ids(item) == {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }
        assert (response["object"], response["status"], response["model"]) == ("response", "completed", "tiny")
        assert (response["instructions"], response["metadata"]) == ("Be short.", {"a": "b"})
        assert (response["error"], response["incomplete_details"], response["store"]) == (None, None, False)
        assert response["id"].startswith("resp-")
        usage, num_prompt = response["usage"], len(script.engine.asked[-1].prompt_token_ids)
        assert usage["input_tokens_details"]["cached_tokens"] == 3
        assert (usage["input_tokens"], usage["output_tokens"]) == (num_prompt, len("An </s> answer.") + 1)
        assert usage["total_tokens"] == num_prompt + len("An </s> answer.") + 1
    assert script.engine.prompt.startswith("<|im_start|>system\nBe short.\n\nYou may call these tools:")


def test_calls_are_items_after_the_text(script: Script) -> None:
    for step in (None, *STEPS):
        response = respond(script, f"Let me see.\n{F}\n{G}", step)
        message, first, second = response["output"]
        assert message["content"][0]["text"] == "Let me see."
        call = {"type": "function_call", "name": "f", "arguments": '{"a": 1}', "status": "completed"}
        assert without_ids(first) == call
        assert without_ids(second) == call | {"name": "g", "arguments": "{}"}
        assert first["call_id"].startswith("call_")
        assert first["call_id"] != second["call_id"]
        [only] = respond(script, f"{F}\n{G}", step, parallel_tool_calls=False)["output"]
        assert without_ids(only) == call
        assert [item["type"] for item in respond(script, f"{F} and", step)["output"]] == ["function_call", "message"]


def test_an_answer_that_is_cut_is_incomplete(script: Script) -> None:
    for step in (None, *STEPS):
        response = respond(script, "A long answer", step, max_output_tokens=4)
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["output"][0]["status"] == "incomplete"
        response = respond(script, F, step, max_output_tokens=42)
        assert response["output"][0]["status"] == response["status"] == "incomplete"
        assert response["output"][0]["arguments"] == '{"a"'
        response = respond(script, F, step, stop=['": 1'])
        assert response["status"] == response["output"][0]["status"] == "incomplete"
        assert response["incomplete_details"] == {}  # OpenAI has no reason for this


def test_an_aborted_response_has_failed(script: Script) -> None:
    """The event, the status and the items say the same."""
    script.engine.abort = True
    for step in (None, *STEPS):
        response = respond(script, "Half of", step)
        assert response["status"] == "failed"
        assert "shutting down" in response["error"]["message"]
        assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("text", ["Half of", F[:-14], '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"'])
def test_a_failure_closes_the_open_item_first(script: Script, text: str) -> None:
    for step in STEPS:
        script.engine.failure, script.engine.death = "no numbers", None
        response = respond(script, text, step)
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
        assert response["error"]["message"] == "no numbers"
        assert response["output"][0]["status"] == "incomplete"
        script.engine.failure, script.engine.death = None, EngineDead("the engine is dead")
        assert respond(script, text, step)["error"]["message"] == "the engine is dead"
    script.engine.death = None
    script.engine.failure = "no numbers"
    assert script.post(PATH, {"input": "x"}, "Half").status_code == 500


def test_logprobs_come_if_they_are_included(script: Script) -> None:
    for step in (None, *STEPS):
        fields: Json = {"include": [LOGPROBS], "top_logprobs": 1}
        [item] = respond(script, "Yes", step, **fields)["output"]
        entries = item["content"][0]["logprobs"]
        assert [entry["token"] for entry in entries] == ["Y", "e", "s", "<|im_end|>"]
        assert all(len(entry["top_logprobs"]) == 1 and entry["bytes"] for entry in entries)
        assert respond(script, "Yes", step, top_logprobs=1)["output"][0]["content"][0]["logprobs"] == []
    for step in (None, 1):  # those of calls are left out
        message, _ = respond(script, f"Yes.\n{F}", step, **fields)["output"]
        assert "".join(entry["token"] for entry in message["content"][0]["logprobs"]) == "Yes."


# --- The input ------------------------------------------------------------------------------------

CALL: Json = {"type": "function_call", "call_id": "one", "name": "f", "arguments": '{"a": "é"}'}
OUTPUT: Json = {"type": "function_call_output", "call_id": "one", "output": "42"}


def test_items_become_messages(script: Script) -> None:
    said = {"type": "message", "role": "assistant", "id": "msg", "status": "completed"}
    items: list[Json] = [
        {"role": "developer", "content": "Be kind."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "reasoning", "id": "rs", "summary": []},
        said | {"content": [{"type": "output_text", "text": "c", "annotations": []}]},
        CALL,
        CALL | {"call_id": "two", "arguments": ""},
        OUTPUT,
        OUTPUT | {"call_id": "two", "output": [{"type": "input_text", "text": "43"}]},
        {"role": "user", "content": "d"},
    ]
    script.answered(PATH, {"input": items})
    messages: list[Json] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "c",
            "tool_calls": [
                {"id": "one", "function": {"name": "f", "arguments": {"a": "é"}}},
                {"id": "two", "function": {"name": "f", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "one", "content": "42"},
        {"role": "tool", "tool_call_id": "two", "content": "43"},
        {"role": "user", "content": "d"},
    ]
    prompt = script.engine.prompt
    script.answered("/v1/chat/completions", {"messages": messages})
    assert script.engine.prompt == prompt


def test_an_answer_goes_back_as_it_came(script: Script) -> None:
    asked: Json = {"role": "user", "content": "x"}
    for step in (None, 1):
        output = respond(script, f"See.\n{F}", step)["output"]
        result = OUTPUT | {"call_id": output[1]["call_id"]}
        script.answered(PATH, {"input": [asked, *output, result], "tools": FLAT})
        assert f"<|im_start|>assistant\nSee.\n{F}<|im_end|>" in script.engine.prompt
        assert "<tool_response>42</tool_response>" in script.engine.prompt


FAULTY: dict[str, tuple[Any, str]] = {
    "a number": (3, "input must be a text, or a list of at most"),
    "nothing": ([], "input is empty"),
    "many items": ([{"role": "user", "content": "x"}] * (MOST_ITEMS + 1), "input must be a text, or a list of at most"),
    "many parts": ([{"role": "user", "content": [{"type": "input_text", "text": ""}] * 25_000}], "parts"),
    "a text": (["x"], "input must be"),
    "no role": ([{"content": "x"}], "input[0] has the role 'None'"),
    "no content": ([{"role": "user"}], "input[0].content must be a text"),
    "an image": ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0] must be"),
    "a reference": ([{"type": "item_reference", "id": "x"}], "input[0] is of the type 'item_reference'"),
    "arguments that are no JSON": ([CALL | {"arguments": "{a}"}], "input[0].arguments must be a text that holds"),
    "arguments that are no text": ([CALL | {"arguments": {}}], "input[0].arguments must be a text that holds"),
    "a call without a name": ([CALL | {"name": ""}], "input[0] has no name"),
    "a call without an id": ([CALL | {"call_id": 3}], "input[0] has no call_id"),
    "an output of another request": ([CALL, OUTPUT | {"call_id": "two"}], "input[1] has the call_id 'two'"),
    "an output that is none": ([CALL, OUTPUT | {"output": None}], "input[1].output must be a text"),
}


@pytest.mark.parametrize(("given", "words"), FAULTY.values(), ids=FAULTY)
def test_faulty_input_is_refused_by_its_place(script: Script, given: Any, words: str) -> None:
    error = script.refused(PATH, {"input": given})
    assert error["param"] == "input"
    assert words in error["message"]
    assert "messages[" not in error["message"]
    assert len(error["message"]) < 700


def test_a_long_input_is_too_long_as_input(tmp_path: Path) -> None:
    script = Script.make(tmp_path, longest=100)
    for body in ({"input": "x" * 1000}, {"input": "x" * 60}):
        error = script.refused(PATH, body)
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    error = script.refused(PATH, {"input": "x", "max_output_tokens": 200})
    assert (error["param"], error["code"]) == ("max_output_tokens", "context_length_exceeded")


# --- Other fields ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REFUSED_HERE))
def test_what_is_refused_is_refused_by_name(script: Script, name: str) -> None:
    values: Json = {"n": 2, "length_penalty": 2.0, "prompt_logprobs": 1, "chat_template_kwargs": {"a": 1}}
    values |= {"add_generation_prompt": 0, "logprob_token_ids": [3], "chat_template": "x"}
    values |= dict.fromkeys(("background", "use_beam_search", "echo", "return_token_ids"), True)
    error = script.refused(PATH, {"input": "x", name: values.get(name, "something")})
    assert error["param"] == name
    assert name in error["message"]
    assert script.post(PATH, {"input": "x", name: None}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["everything"]}, "include"),
        ({"include": [LOGPROBS] * 200_000}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools"),
        ({"tools": TOOLS}, "tools"),
        ({"tools": FLAT, "tool_choice": {"type": "function", "name": "h"}}, "tool_choice"),
        ({"tools": FLAT, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"metadata": {"a": 3}}, "metadata"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"cache": 1, "tool_choice": "required"}, "tool_choice"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_asks_for_something_else_is_refused(script: Script, fields: Json, param: str) -> None:
    assert script.refused(PATH, {"input": "x", **fields})["param"] == param


def test_what_asks_for_nothing_is_let_pass(script: Script) -> None:
    for reasoning in (None, {}, {"effort": None, "summary": None}, {"effort": "none"}):
        assert script.post(PATH, {"input": "x", "reasoning": reasoning}).status_code == 200
    passed: Json = {"store": True, "include": sorted(INCLUDABLE), "truncation": "disabled", "background": False}
    passed |= {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "service_tier": "auto", "n": 1}
    passed |= {"stream_options": None, "prompt_cache_key": "a", "user": "me", "add_generation_prompt": True}
    passed |= {"tool_choice": "auto", "parallel_tool_calls": True, "tools": [], "temperature": None}
    assert script.answered(PATH, {"input": "x", **passed})["store"] is False
    obfuscated = {"input": "x", "stream_options": {"include_obfuscation": False}}
    assert check_events(script.chunks(PATH, obfuscated, "y"))["status"] == "completed"


def test_the_fields_of_the_request_come_back(script: Script) -> None:
    response = respond(script, "", temperature=0.5, top_p=0.9, tool_choice="none", max_output_tokens=9)
    assert {**response, "tools": None} == response | {
        "temperature": 0.5,
        "top_p": 0.9,
        "tool_choice": "none",
        "max_output_tokens": 9,
        "tools": None,
        "output": [],
    }
    assert response["tools"] == FLAT
    assert script.engine.asked[-1].params.temperature == 0.5  # type: ignore[union-attr]
    assert "<tools>" not in script.engine.prompt


def test_the_engine_receives_the_fields_that_concern_it(script: Script) -> None:
    """All that a request for the engine has in common with a body."""
    common = ResponsesBody.model_fields.keys() & {*AsyncRequest._fields} - {"request_id", "prompt"}
    given: Json = {"priority": 3, "cache_salt": "mine"}
    for path, body in (
        (PATH, {"input": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        script.answered(path, body | {name: given[name] for name in common})
        for name in common:
            assert getattr(script.engine.asked[-1], name) == given[name]


def test_a_stream_is_named_events_without_an_end_mark(script: Script) -> None:
    answer = script.post(PATH, {"input": "x", "stream": True}, "y")
    events = answer.text.split("\n\n")
    assert events.pop() == ""
    for event in events:
        name, data = event.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


def test_what_is_told_many_times_is_encoded_once(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the last events of a long answer are written in a thread."""
    from minipaged.serve import app

    asked: list[int] = []
    written = app.written

    async def noting(num_tokens: int, write: Any) -> Any:
        asked.append(num_tokens)
        return await written(num_tokens, write)

    monkeypatch.setattr(app, "written", noting)
    respond(script, "x" * 300, 1, include=[LOGPROBS], top_logprobs=1)
    assert asked[-1] > app.MANY_TOKENS
    respond(script, "x" * 600, 1000, include=[LOGPROBS])  # many tokens in one update, as behind a slow reader
    assert max(asked[-2:]) == asked[-1] > asked[-2] > app.MANY_TOKENS
