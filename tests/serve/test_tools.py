"""Tools in a chat: what is refused, what the model sees, and the calls in its answer, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from minipaged.errors import InvalidRequest
from minipaged.params import SamplingParams, StructuredOutputsParams
from minipaged.serve.serving import held_to
from minipaged.serve.settings import ServeSettings
from minipaged.serve.tools import MOST_BYTES, MOST_TOOLS, Tools, tools_of
from tests.serve.scripted import ASKS, TOOLS, Json, Script, calls_in

CHAT = "/v1/chat/completions"
MISTRAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
F = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
G = '<tool_call>{"name": "g", "arguments": {"b": "<|im_end|>é"}}</tool_call>'
STEPS = (None, 1, 2, 7, 1000)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return Script.make(tmp_path_factory.mktemp("hermes"))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return Script.make(tmp_path_factory.mktemp("mistral"), MISTRAL, tool_call_parser="mistral")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Script:
    template = "{% if tools %}{{ tools }} <|python_tag|> {% endif %}{{ messages }}"
    return Script.make(tmp_path_factory.mktemp("llama"), ["<|python_tag|>"], chat_template=template)


def test_calls_come_in_openais_form(script: Script) -> None:
    for step in STEPS:
        choice = script.chat(f"{F}\n{G}", step)
        message = choice["message"]
        assert (message["role"], message["content"], choice["finish_reason"]) == ("assistant", None, "tool_calls")
        assert calls_in(choice) == [("f", '{"a": 1}'), ("g", '{"b": "é"}')]
        assert all(call["type"] == "function" for call in message["tool_calls"])
        ids = [call["id"] for call in message["tool_calls"]]
        assert len({*ids}) == 2
        assert all(each.startswith("call_") for each in ids)


def test_content_stands_beside_calls(script: Script) -> None:
    for step in STEPS:
        choice = script.chat(f"Let me see.\n{F}", step)
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me see.", "tool_calls")
        assert calls_in(choice) == [("f", '{"a": 1}')]


def test_an_answer_without_calls_is_a_text_to_the_letter(script: Script) -> None:
    """Also where it writes what looks like a special token, or the beginning of a marker."""
    for text in ("An answer </s> with [INST] and <tool_", " a\n\n", "<tool_call> is a marker", ""):
        for step in STEPS:
            choice = script.chat(text, step)
            assert choice["message"] == {"role": "assistant", "content": text}
            assert choice["finish_reason"] == "stop"


def test_without_parallel_calls_there_is_the_first_only(script: Script) -> None:
    for step in STEPS:
        choice = script.chat(f"{F}\n{G}", step, parallel_tool_calls=False)
        assert calls_in(choice) == [("f", '{"a": 1}')]
        assert choice["finish_reason"] == "tool_calls"
        cut = script.chat(f"{F}\n{G[:-14]}", step, parallel_tool_calls=False)  # the other call does not matter
        assert (cut["message"]["tool_calls"][0]["function"], cut["finish_reason"]) == (
            choice["message"]["tool_calls"][0]["function"],
            "tool_calls",
        )


def test_a_call_that_is_cut_says_what_cut_it(script: Script) -> None:
    cuts: list[tuple[Json, str]] = [({"max_tokens": 41}, "length"), ({"stop": ['": 1']}, "stop")]
    for fields, reason in cuts:
        for step in STEPS:
            choice = script.chat(F, step, **fields)
            assert choice["finish_reason"] == reason
            [(name, arguments)] = calls_in(choice)
            assert name == "f"
            assert '{"a": 1}'.startswith(arguments)
            assert arguments != '{"a": 1}'
    for step in STEPS:  # its arguments are whole
        choice = script.chat(F, step, stop=["</tool_call>"])
        assert (choice["finish_reason"], calls_in(choice)) == ("tool_calls", [("f", '{"a": 1}')])


def test_half_a_character_is_no_name_and_stays_an_escape_in_arguments(script: Script) -> None:
    for step in STEPS:
        text = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
        assert script.chat(text, step)["message"] == {"role": "assistant", "content": text}
        choice = script.chat('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}', step)
        assert calls_in(choice) == [("f", '{"a": "\\ud800"}')]
        sent = {"role": "assistant", "tool_calls": choice["message"]["tool_calls"]}
        result = {"role": "tool", "content": "!", "tool_call_id": sent["tool_calls"][0]["id"]}  # type: ignore[index]
        script.answered(CHAT, {"messages": [*ASKS, sent, result]})
        assert '{"a": "\ufffd"}' in script.engine.prompt


def test_hidden_markers_are_found_by_their_tokens(mistral: Script, llama: Script) -> None:
    for step in STEPS:
        for text in ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', '[TOOL_CALLS][{"name": "f", "arguments": '):
            text += '{"a": 1}}, {"name": "g"}]' * text.endswith(": ")
            choice = mistral.chat("Yes.é" + text, step)
            assert calls_in(choice) == [("f", '{"a": 1}'), ("g", "{}")]
            assert choice["message"]["content"] == "Yes.é"
            assert all(len(call["id"]) == 9 for call in choice["message"]["tool_calls"])  # its templates want that
        held = mistral.chat('Yes[TOOL_CALLS]f[ARGS]{"a": 1}', step, stop=["Yes!"])  # the text waits, and the marker too
        assert (held["message"]["content"], calls_in(held)) == ("Yes", [("f", '{"a": 1}')])
        shown = mistral.chat('[TOOL_CALLS]f[ARGS]{"a": 1}', step, skip_special_tokens=False)
        assert calls_in(shown) == [("f", '{"a": 1}')]
        assert mistral.chat("[TOOL_CALLS] no [ARGS]", step)["message"]["content"] == " no "
        assert mistral.chat("[TOOL_CALLS]x", step, tool_choice="none")["message"]["content"] == "x"
        choice = llama.chat('<|python_tag|>{"name": "f", "parameters": {"a": "x<|im_end|>"}}', step, stop=["}}}"])
        assert calls_in(choice) == [("f", '{"a": "x"}')]


def test_llamas_calls_are_read_at_the_beginning(llama: Script) -> None:
    for step in STEPS:
        two = '{"name": "f", "parameters": {"a": 1}}; {"name": "h", "parameters": {}}'
        assert calls_in(llama.chat(two, step)) == [("f", '{"a": 1}'), ("h", "{}")]
        assert llama.chat('{"name": "h", "parameters": {}}', step)["message"]["content"].startswith('{"name"')


def test_logprobs_are_those_of_all_tokens(script: Script) -> None:
    entries = script.chat(F, logprobs=True, top_logprobs=1)["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries).startswith(F)
    for step in STEPS[1:]:
        assert script.chat(F, step, logprobs=True, top_logprobs=1)["logprobs"]["content"] == entries


def test_a_continued_message_is_echoed_before_its_content(script: Script) -> None:
    messages = [*ASKS, {"role": "assistant", "content": "I see"}]
    fields: Json = {"messages": messages, "echo": True, "continue_final_message": True, "add_generation_prompt": False}
    for step in STEPS:
        assert script.chat(f"!{F}", step, **fields)["message"]["content"] == "I see!"


# --- What the model sees --------------------------------------------------------------------------


def test_the_template_describes_tools_unless_none_is_to_be_called(script: Script) -> None:
    """And without what it does not read."""
    strict: Json = {"type": "function", "function": {"name": "f", "strict": True, "x": 1}}
    script.answered(CHAT, {"messages": ASKS, "tools": [strict]})
    assert '{"name": "f", "parameters": {"type": "object", "properties": {}}}\n' in script.engine.prompt
    script.answered(CHAT, {"messages": ASKS, "tools": TOOLS, "tool_choice": "none"})
    assert "<tools>" not in script.engine.prompt
    assert script.chat(F, tool_choice="none")["message"]["content"] == F


def test_calls_and_results_go_back_through_the_template(script: Script) -> None:
    function = {"name": "f", "arguments": '{"a": "é"}'}
    call = {"id": "one", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "one", "content": [{"type": "text", "text": "42"}]}
    messages = [*ASKS, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    body = {"messages": messages, "tools": TOOLS}
    script.answered(CHAT, body)
    assert '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call><|im_end|>' in script.engine.prompt
    assert "<tool_response>42</tool_response>" in script.engine.prompt
    told = script.answered("/tokenize", body)["tokens"]
    assert told == list(script.engine.asked[-1].prompt_token_ids)


def test_a_model_without_tools_in_its_template_says_what_to_do(tmp_path: Path) -> None:
    script = Script.make(tmp_path, chat_template=None)
    error = script.refused(CHAT, {"messages": ASKS, "tools": TOOLS})
    assert error["param"] == "tools"
    assert "--chat-template FILE" in error["message"]
    call = {"id": "one", "function": {"name": "f"}}
    error = script.refused(CHAT, {"messages": [*ASKS, {"role": "assistant", "tool_calls": [call]}]})
    assert error["message"].startswith("messages[1] has tool_calls")
    assert script.answered(CHAT, {"messages": ASKS, "tools": TOOLS, "tool_choice": "none"})


def test_a_template_of_its_own_for_tools_is_taken(tmp_path: Path) -> None:
    script = Script.make(tmp_path, chat_template=None)
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }}"}]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    script.answered(CHAT, {"messages": ASKS, "tools": TOOLS})
    assert script.engine.prompt == "2"
    script.answered(CHAT, {"messages": ASKS})
    assert script.engine.prompt == "plain"


# --- What is refused ------------------------------------------------------------------------------


def named(name: Any, **more: Any) -> list[Json]:
    return [{"type": "function", "function": {"name": name, **more}}]


REFUSED: dict[str, tuple[Json, str, str]] = {
    "no type": ({"tools": [{}]}, "tools", "tools[0] is of type None"),
    "another type": ({"tools": [{"type": "custom"}]}, "tools", "tools[0] is of type 'custom'"),
    "no function": ({"tools": [{"type": "function"}]}, "tools", 'tools[0] has no "function"'),
    "a name with a space": ({"tools": named("a b")}, "tools", "tools[0].function has the \"name\" 'a b'"),
    "a long name": ({"tools": named("a" * 65)}, "tools", "1 to 64"),
    "no name": ({"tools": named(None)}, "tools", 'tools[0].function has the "name" None'),
    "a name twice": ({"tools": TOOLS + TOOLS}, "tools", "tools[2] has the name 'f' again"),
    "no schema": ({"tools": named("f", parameters=[])}, "tools", '"parameters" a list'),
    "no description": ({"tools": named("f", description=3)}, "tools", '"description" 3'),
    "many": ({"tools": TOOLS * 65}, "tools", f"at most {MOST_TOOLS}"),
    "large": ({"tools": named("f", description="x" * MOST_BYTES)}, "tools", "bytes of JSON"),
    "a list of texts": ({"tools": ["f"]}, "tools", "tools.0"),
    "must call nothing": ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    "an unknown choice": ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'any'"),
    "a choice of a type": ({"tools": TOOLS, "tool_choice": 3}, "tool_choice", "tool_choice must be"),
    "a choice of an object": ({"tools": TOOLS, "tool_choice": {"type": "x"}}, "tool_choice", "is an object; it must"),
    "an unknown tool": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}},
        "tool_choice",
        "names 'h', which is not among the tools: 'f, g'",
    ),
    "a beam search": ({"tools": TOOLS, "use_beam_search": True, "n": 2}, "tools", "beam search"),
    "the old field": ({"functions": [{"name": "f"}]}, "functions", "the old form of tools"),
}


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED.values(), ids=REFUSED)
def test_faulty_tools_are_refused_with_the_reason(script: Script, fields: Json, param: str, words: str) -> None:
    error = script.refused(CHAT, {"messages": ASKS, **fields})
    assert error["param"] == param
    assert words in error["message"]
    assert len(error["message"]) < 500


CALL: Json = {"id": "one", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FAULTY: dict[str, tuple[list[Json], str]] = {
    "a result of another request": (
        [{"role": "tool", "tool_call_id": "two", "content": "x"}],
        "messages[1] has the tool_call_id 'two', which no earlier message calls",
    ),
    "a result of nothing": ([{"role": "tool", "content": "x"}], 'messages[1] has no "tool_call_id"'),
    "many calls": ([{"role": "assistant", "tool_calls": [CALL] * 1025}] * 2, "more than 2,048 tool calls"),
    "calls that are no list": (
        [{"role": "assistant", "tool_calls": {"a": 1}}],
        "messages[1].tool_calls must be a list",
    ),
    "a call that is none": ([{"role": "assistant", "tool_calls": [3]}], "messages[1].tool_calls[0] must be a call"),
    "a call without an id": ([{"role": "assistant", "tool_calls": [CALL | {"id": ""}]}], 'tool_calls[0] has no "id"'),
    "a call without a name": (
        [{"role": "assistant", "tool_calls": [CALL | {"function": {}}]}],
        'messages[1].tool_calls[0].function has no "name"',
    ),
    "arguments that are no JSON": (
        [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "{a}"}}]}],
        "messages[1].tool_calls[0].function.arguments must be a text that holds a JSON object",
    ),
    "an old role": ([{"role": "function", "content": "x"}], 'messages[1] has the role "function", the old form'),
    "an old call": ([{"role": "assistant", "function_call": {"name": "f"}}], 'messages[1] has "function_call"'),
}


@pytest.mark.parametrize(("messages", "words"), FAULTY.values(), ids=FAULTY)
def test_faulty_calls_and_results_are_refused_by_their_place(script: Script, messages: list[Json], words: str) -> None:
    error = script.refused(CHAT, {"messages": [*ASKS, *messages]})
    assert error["param"] == "messages"
    assert words in error["message"]


def test_a_prompt_has_no_tools(script: Script) -> None:
    for path, body in (("/v1/completions", {"prompt": "x", "tools": TOOLS}), ("/tokenize", {"prompt": "x"})):
        assert script.refused(path, {**body, "tools": TOOLS})["param"] == "tools"


def test_a_template_is_read_from_a_file(tmp_path: Path) -> None:
    from minipaged.cli.options import given_for

    (tmp_path / "chat.jinja").write_text("{{ é }}", encoding="utf-8")
    for given, read in ((None, None), (str(tmp_path / "chat.jinja"), "{{ é }}")):
        assert given_for(ServeSettings, {"chat_template": given}) == {"chat_template": read}
    (tmp_path / "bytes").write_bytes(b"\xff")
    for wrong in ("none", "bytes"):
        with pytest.raises(InvalidRequest, match=r"--chat-template is .* cannot be read"):
            given_for(ServeSettings, {"chat_template": str(tmp_path / wrong)})


def test_a_schema_that_is_nested_too_deeply_is_refused(script: Script) -> None:
    deep: Json = {}
    for _ in range(800):
        deep = {"items": deep}
    for choice in ("auto", "required"):
        body = {"messages": ASKS, "tools": named("f", parameters=deep), "tool_choice": choice, "max_tokens": 1}
        script.refused(CHAT, body)
    for _ in range(1000):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        Tools(named("f", parameters=deep), forced=True).schema_of_calls()


def test_the_parser_is_one_that_is_known() -> None:
    with pytest.raises(InvalidRequest, match="tool_call_parser is 'other'"):
        ServeSettings(tool_call_parser="other")  # type: ignore[arg-type]


# --- Answers that must call -----------------------------------------------------------------------

SCHEMA: Json = {
    "type": "object",
    "properties": {"tree": {"$ref": "#/$defs/tree"}, "again": {"$ref": "#"}, "$ref": {"type": "string"}},
    "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "default": {"$ref": "#/no"}}},
}


def test_the_schema_of_calls_holds_the_schemas_of_the_tools() -> None:
    asked = tools_of([*named("f", parameters=SCHEMA), *named("g")], "required", False)
    assert asked
    schema = asked.schema_of_calls()
    assert schema
    good: list[Any] = [
        [{"name": "f", "parameters": {"tree": [[], [[]]], "again": {"tree": []}, "$ref": "x"}}],
        [{"name": "g", "parameters": {}}],
    ]
    bad: list[Any] = [[], good[0] + good[1], [{"name": "h", "parameters": {}}], {}, [{"name": "g"}]]
    bad += [[{"name": "f", "parameters": {"tree": [3]}}], [{"name": "f", "parameters": {"again": {"tree": 3}}}]]
    validator = jsonschema.Draft202012Validator(schema)
    assert all(validator.is_valid(calls) for calls in good)
    assert not any(validator.is_valid(calls) for calls in bad)
    assert schema["$defs"]["0"]["$defs"]["tree"]["default"] == {"$ref": "#/no"}  # which is data
    choice = {"type": "function", "function": {"name": "f"}}
    one = tools_of(named("f", parameters=SCHEMA), choice, None)
    assert one
    assert one.schema_of_calls() == SCHEMA
    free = tools_of(TOOLS, "auto", None)
    assert free
    assert free.schema_of_calls() is None


@pytest.mark.parametrize("within", ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
@pytest.mark.parametrize("name", ["default", "enum", "const", "examples", "$id", "$ref", "properties"])
def test_names_in_a_schema_may_be_those_of_keys(within: str, name: str) -> None:
    parameters: Json = {"$id": "https://example.org/a", within: {name: {"$ref": "#/$defs/X"}}}
    parameters.setdefault("$defs", {})["X"] = {"type": "integer"}
    schema = Tools(named("f", parameters=parameters), forced=True).schema_of_calls()
    assert schema
    [moved] = schema["$defs"].values()
    assert "$id" not in moved
    assert moved[within][name] == {"$ref": "#/$defs/0/$defs/X"}


def test_a_reference_to_an_anchor_is_refused_where_the_schema_is_moved(script: Script) -> None:
    parameters = {"properties": {"a": {"$ref": "#foo"}}, "$defs": {"X": {"$anchor": "foo", "type": "integer"}}}
    body = {"messages": ASKS, "tools": named("f", parameters=parameters)}
    error = script.refused(CHAT, {**body, "tool_choice": "required"})
    assert error["param"] == "tools"
    assert "'#foo', which names an anchor" in error["message"]
    assert script.answered(CHAT, body)


def test_answers_that_must_call_are_read_as_calls(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minipaged.serve.serving.held_to", lambda params, schema: params)
    for step in STEPS:
        text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
        choice = script.chat(text, step, tool_choice="required")
        assert (calls_in(choice), choice["finish_reason"]) == ([("f", '{"a": 1}'), ("g", "{}")], "tool_calls")
        one: Json = {"type": "function", "function": {"name": "f"}}
        choice = script.chat('{"a": 1}', step, tool_choice=one)
        assert (calls_in(choice), choice["finish_reason"]) == ([("f", '{"a": 1}')], "tool_calls")
        choice = script.chat('{"a": 1}', step, tool_choice=one, max_tokens=4)
        assert (calls_in(choice), choice["finish_reason"]) == ([("f", '{"a"')], "length")


def test_arguments_are_an_object_in_every_schema_of_calls() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        tools = tools_of(named("f", parameters={"properties": {"a": {"type": "integer"}}}), choice, None)
        assert tools
        schema = tools.schema_of_calls()
        assert schema
        validator = jsonschema.Draft202012Validator(schema)
        assert not validator.is_valid(5)
        assert not validator.is_valid([{"name": "f", "parameters": 5}])
        assert validator.is_valid({"a": 1} if choice != "required" else [{"name": "f", "parameters": {"a": 1}}])


def test_arguments_of_another_type_are_refused(script: Script) -> None:
    error = script.refused(CHAT, {"messages": ASKS, "tools": named("f", parameters={"type": "string"})})
    assert 'has "parameters" of the type \'string\'; arguments are an "object"' in error["message"]


@pytest.mark.parametrize("form", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}}])
def test_a_form_is_refused_where_the_model_may_call_and_gives_way_where_it_must(script: Script, form: Json) -> None:
    body = {"messages": ASKS, "tools": TOOLS, **form}
    assert "would leave no room for a call" in script.refused(CHAT, body)["message"]
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    held = held_to(params, {"type": "object"})
    assert isinstance(held, SamplingParams)
    assert held.structured_outputs == StructuredOutputsParams(json={"type": "object"})
    assert tools_of(TOOLS, "none", None) is None
