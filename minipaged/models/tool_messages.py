"""Tool calls and their results in a conversation, as chat templates read them.

Clients send the arguments of an earlier call as OpenAI does: a text that holds a JSON object. Templates expect the
object itself, and write it in the model's own way. A result is a message of the role `tool`; its `tool_call_id` names
the call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from minipaged.errors import InvalidRequest

MOST_CALLS = 2048
"""The largest number of tool calls in a conversation."""
MOST_CHARACTERS_TO_TELL = 100
"""The longest part of a faulty value in a message, in characters."""


def check_calls_and_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidRequest for a tool call without an id or a name, and for a result of a call that no earlier message
    has, or if there are too many. Arguments are not parsed here, because that can take long."""
    known: set[str] = set()
    num_calls = 0
    for place, message in enumerate(messages):
        where, calls = f"messages[{place}]", message.get("tool_calls")
        num_calls += len(calls) if isinstance(calls, list) else 0
        if num_calls > MOST_CALLS:
            raise InvalidRequest(f"messages has more than {MOST_CALLS:,} tool calls; leave out the oldest")
        for number, call in enumerate(_calls_of(message, where)):
            if not isinstance(call.get("id"), str) or not call["id"]:
                raise InvalidRequest(f'{where}.tool_calls[{number}] has no "id"; send the id of the call')
            known.add(call["id"])
        if message.get("role") == "tool":
            call_id = message.get("tool_call_id")
            if not isinstance(call_id, str):
                raise InvalidRequest(f'{where} has no "tool_call_id"; give it the id of the call that it answers')
            if call_id not in known:
                raise InvalidRequest(
                    f"{where} has the tool_call_id {call_id[:MOST_CHARACTERS_TO_TELL]!r}, which no earlier message "
                    "calls; send the assistant's message with that call before its result"
                )


def with_parsed_arguments(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the message with the arguments of its tool calls as dicts. Raises InvalidRequest if they are none.
    `where`: the name of the message in the error."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for number, call in enumerate(_calls_of(message, where)):
        function, named = call["function"], f"{where}.tool_calls[{number}].function.arguments"
        arguments = parsed_arguments(function.get("arguments"), named)
        calls.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def parsed_arguments(arguments: object, where: str) -> dict[str, Any]:
    """Return the arguments of a call as a dict. They are a dict, or a text that holds a JSON object; None and "" mean
    that there are none. Raises InvalidRequest for anything else; `where` is their name in the error.

    An escape for half of a character, which a model may generate, becomes U+FFFD, because no tokenizer can encode it.
    """
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    reason = "it is no text"
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments, strict=False)
            written = json.dumps(read, ensure_ascii=False)
            if not _is_encodable(written):
                read = json.loads(written.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
            if isinstance(read, dict):
                return read
            reason = f"it holds {_beginning(arguments)}"
        except (ValueError, RecursionError) as error:
            reason = f"{error}: {_beginning(arguments)}"
    raise InvalidRequest(
        f'{where} must be a text that holds a JSON object, such as "{{}}", but {reason}; send what the model called '
        "the tool with, or leave the call out"
    )


def _calls_of(message: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]]:
    """Return the tool calls of a message. Raises InvalidRequest if they have another form than OpenAI's."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise InvalidRequest(f'{where}.tool_calls must be a list of {{"id": ..., "type": "function", "function": ...}}')
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            raise InvalidRequest(f'{where}.tool_calls[{number}] must be a call of a "function"')
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest(f'{where}.tool_calls[{number}].function has no "name"; give it the name of the tool')
    return calls


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _beginning(text: str) -> str:
    return repr(text[:MOST_CHARACTERS_TO_TELL]) + ("..." if len(text) > MOST_CHARACTERS_TO_TELL else "")
