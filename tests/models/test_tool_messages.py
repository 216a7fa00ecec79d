"""Tool calls in the messages of a chat, as a template reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.errors import InvalidRequest
from minipaged.models.tokenizer import Tokenizer
from minipaged.models.tool_messages import parsed_arguments, with_parsed_arguments
from tests.tiny_model import write_byte_tokenizer

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(), each, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.text(), VALUES, max_size=4), ascii_only=st.booleans())
def test_arguments_as_a_text_are_the_arguments(arguments: dict[str, Any], ascii_only: bool) -> None:
    assert parsed_arguments(json.dumps(arguments, ensure_ascii=ascii_only), "x") == arguments
    assert parsed_arguments(arguments, "x") == arguments


def test_arguments_are_objects_or_texts_that_hold_one() -> None:
    for empty in (None, "", "{}", {}):
        assert parsed_arguments(empty, "x") == {}
    for wrong in ("[]", "{", 3, "[" * 100_000):
        with pytest.raises(InvalidRequest, match=r"^input\[3\]\.arguments must be") as caught:
            parsed_arguments(wrong, "input[3].arguments")
        assert len(str(caught.value)) < 500


@given(text=st.text(st.sampled_from("aé😀\ud83d\ude00\ud800\udc00")))
def test_half_of_a_character_becomes_one_that_can_be_encoded(text: str) -> None:
    read = parsed_arguments(json.dumps({"a": text}), "x")["a"]
    read.encode()
    assert len(read.encode("utf-16")) == len(text.encode("utf-16", "surrogatepass"))


def test_a_message_keeps_what_else_it_has() -> None:
    call = {"id": "one", "function": {"name": "f", "arguments": '{"a": 1}'}, "x": 3}
    message = {"role": "assistant", "content": "", "tool_calls": [call], "name": "y"}
    parsed = {"id": "one", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}, "x": 3}
    assert with_parsed_arguments(message, "x") == message | {"tool_calls": [parsed]}
    assert call["function"]["arguments"] == '{"a": 1}'  # what was given stays as it is


def test_a_template_must_mention_what_it_is_given(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, chat_template=True)
    tokenizer, asks = Tokenizer(tmp_path), {"role": "user", "content": "x"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(
        InvalidRequest, match=r"^tools are given, and the model's chat template does not mention them; "
    ):
        tokenizer.encode_chat([asks], tools=tools)
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    with pytest.raises(InvalidRequest, match=r"^messages\[1\] has tool_calls, and the model's chat template does not"):
        tokenizer.encode_chat([asks, calls])
    template = "{{ tools | length }} {{ messages[1]['tool_calls'][0]['function']['arguments'] | tojson }}"
    told = tokenizer.encode_chat([asks, calls], tools=tools, chat_template=template)
    assert tokenizer.decode(told) == "1 {}"
    assert tokenizer.encode_chat([asks], tools=[]) == tokenizer.encode_chat([asks])
