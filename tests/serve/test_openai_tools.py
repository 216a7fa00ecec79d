"""The real `openai` client against a served model that calls tools: chats and responses, streamed and not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from minipaged.llm import LoadedModel
from minipaged.serve.settings import ServeSettings
from tests.models import tokenizers
from tests.serve.harness import Served, served
from tests.serve.scripted import TEMPLATE, TOOLS
from tests.tiny_model import make_successor_model

if TYPE_CHECKING:
    import openai  # at run time by the tests that need it: it takes two seconds, in each process that collects tests

ANSWER = [
    "I",
    " look.",
    "\n<tool",
    '_call>{"name"',
    ': "f',
    '", "arguments": {"city"',
    ": [1,",
    " 2]}}</",
    "tool_call>",
]
MESSAGES: Any = [{"role": "user", "content": "x"}]
ALL_TOOLS: Any = TOOLS
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
SAID = ("I look.", "f", '{"city": [1, 2]}')


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a model that answers with ANSWER, a token for each piece."""
    from tokenizers import AddedToken

    folder = tmp_path_factory.mktemp("tools")
    made = tokenizers.byte_level()
    made.add_tokens([AddedToken(piece, normalized=False) for piece in ANSWER])
    pieces = [made.token_to_id(piece) for piece in ANSWER]
    newline, end = made.encode("\n").ids[0], made.token_to_id("</s>")
    successors = dict(pairwise([newline, *pieces, end]))
    make_successor_model(folder, made.get_vocab_size(), successors, eos_token_id=end, max_position_embeddings=4096)
    tokenizers.write(made, folder, eos_token="</s>")
    settings = ServeSettings(shutdown_timeout=5, chat_template=TEMPLATE)
    with served(LoadedModel.load(folder, tier="reference"), settings) as running:
        yield running
        running.check_nothing_is_left()


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def test_a_chat_calls_a_tool(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": ALL_TOOLS, "temperature": 0}
    [choice] = client.chat.completions.create(**given).choices
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (choice.message.content, call.function.name, call.function.arguments) == SAID
    assert choice.finish_reason == "tool_calls"
    with client.chat.completions.stream(**given) as stream:
        events = list(stream)
        [streamed] = stream.get_final_completion().choices
    assert streamed.message.content == choice.message.content
    [again] = streamed.message.tool_calls or []
    assert (again.function.name, again.function.arguments) == SAID[1:]
    assert streamed.finish_reason == "tool_calls"
    assert "tool_calls.function.arguments.delta" in {event.type for event in events}
    answered: Any = [
        *MESSAGES,
        choice.message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "Paris"},
    ]
    assert client.chat.completions.create(**given | {"messages": answered}).choices[0].message.tool_calls


def test_each_of_several_choices_has_its_calls(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": ALL_TOOLS, "temperature": 0, "n": 2}
    choices = client.chat.completions.create(**given).choices
    told = [(choice.message.content, (choice.message.tool_calls or [])[0].to_dict()) for choice in choices]
    assert [(content, call["function"]) for content, call in told] == [
        (SAID[0], {"name": SAID[1], "arguments": SAID[2]})
    ] * 2
    assert told[0][1]["id"] != told[1][1]["id"]
    pieces = {0: "", 1: ""}
    for chunk in client.chat.completions.create(**given, stream=True):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                assert call.function
                pieces[choice.index] += call.function.arguments or ""
    assert pieces == {0: SAID[2], 1: SAID[2]}


def test_a_response_calls_a_tool(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "input": "x", "tools": FLAT, "temperature": 0, "store": False}
    response = client.responses.create(**given)
    _, call = response.output
    assert call.type == "function_call"
    assert (response.output_text, call.name, call.arguments) == SAID
    assert response.usage
    with client.responses.stream(**given) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert (streamed.output_text, streamed.output[1].name, streamed.output[1].arguments) == SAID  # type: ignore[union-attr]
    assert streamed.usage
    assert streamed.usage.output_tokens == response.usage.output_tokens == len(ANSWER) + 1
    assert streamed.usage.input_tokens_details.cached_tokens > 0  # the same prompt came before
    kinds = [event.type for event in events]
    assert kinds.index("response.created") < kinds.index("response.output_text.delta")
    assert kinds.index("response.output_text.done") < kinds.index("response.function_call_arguments.delta")
    assert kinds[-1] == "response.completed"
    items: Any = [{"role": "user", "content": "x"}, *(item.to_dict() for item in response.output)]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "Paris"})
    assert client.responses.create(**given | {"input": items}).output_text == SAID[0]
