"""The body of POST /v1/responses, and the conversation in it.

Its `input` is a text or a list of items: messages, calls of tools, and results of calls. They become the messages of a
chat, because a chat template knows nothing else. Nothing of a response is kept, so fields that refer to an earlier
response are refused by name. Sampling parameters beyond OpenAI's are those of a chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from minipaged.errors import InvalidRequest
from minipaged.models.tool_messages import parsed_arguments
from minipaged.serve.protocol import (
    ASKS_FOR_NOTHING,
    MOST_ITEMS,
    MOST_LOGPROBS,
    Message,
    ResponseFormat,
    SamplingBody,
    Whole,
)
from minipaged.serve.tools import Tools, tools_of

Json = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = {
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
}
"""OpenAI's values of `include`. All but the first ask for parts of items that models here do not generate."""

_NOT_KEPT = "no response is kept; send the whole conversation as input"
_OF_CHATS = "it belongs to /v1/chat/completions, which takes messages; leave it out"
REFUSED_HERE: dict[str, str] = {
    "previous_response_id": _NOT_KEPT,
    "conversation": _NOT_KEPT,
    "background": "a response is made while its client waits; leave it out, or set stream",
    "prompt": "no prompts are kept; send input, and perhaps instructions",
    "context_management": "a conversation is taken as it is; leave it out, and shorten the input",
    "moderation": "nothing here judges a text; leave it out",
    "messages": "their name here is input",
    "response_format": "its name here is text.format",
    "max_tokens": "its name here is max_output_tokens",
    "max_completion_tokens": "its name here is max_output_tokens",
    **dict.fromkeys(("n", "use_beam_search", "length_penalty"), "a response is one sequence, which is sampled"),
    **dict.fromkeys(
        (
            *("add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message", "echo"),
            *("logprob_token_ids", "logprobs", "prompt_logprobs", "return_token_ids"),
        ),
        _OF_CHATS,
    ),
}
"""Maps a field that this endpoint does not take to the reason, or to what to do instead."""
DEFAULTS = {"n": 1, "length_penalty": 1.0, "add_generation_prompt": True, "chat_template_kwargs": {}}
"""Values of refused fields that ask for what happens anyway."""


@dataclass
class InputMessages:
    """The messages of an input."""

    messages: list[Message] = field(default_factory=list)
    calls: list[tuple[Json, str]] = field(default_factory=list)
    """The function of each tool call in the messages, and the name of its arguments in the body."""

    def parse_calls(self) -> None:
        """Parse the arguments of all calls, which can take long. Raises InvalidRequest."""
        for function, name in self.calls:
            function["arguments"] = parsed_arguments(function["arguments"], name)


class ResponsesBody(SamplingBody):
    """POST /v1/responses."""

    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MOST_ITEMS)]
    instructions: str | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    include: Annotated[list[str], Field(fail_fast=True, max_length=32)] | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MOST_LOGPROBS)] | None = 0
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    store: bool | None = None

    @property
    def reported(self) -> int | None:
        return self.top_logprobs or 0 if LOGPROBS in (self.include or ()) else None

    def check(self) -> None:
        for name, why in REFUSED_HERE.items():
            given = getattr(self, name) if name in type(self).model_fields else (self.model_extra or {}).get(name)
            if given not in ((None, DEFAULTS[name]) if name in DEFAULTS else ASKS_FOR_NOTHING):
                raise InvalidRequest(f"{name} is not supported: {why}")
        super().check()
        if unknown := [name for name in self.include or () if name not in INCLUDABLE]:
            raise InvalidRequest(
                f"include names {unknown[0][:100]!r}, which is none of {', '.join(sorted(INCLUDABLE))}"
            )
        if any(value not in (None, "none") for value in (self.reasoning or {}).values()):
            raise InvalidRequest(
                "reasoning is not supported: models here do not think before they answer; leave it out"
            )
        if self.truncation == "auto":
            raise InvalidRequest('truncation is not supported as "auto": no item is left out; shorten the input')
        if (self.text or {}).get("verbosity") not in (None, "medium"):
            raise InvalidRequest("text.verbosity is not supported: say in the instructions how long an answer is to be")

    def asked_tools(self) -> Tools | None:
        """Return the tools that the model may call; None if it is to call none. Raises InvalidRequest."""
        return tools_of(self.tools, self.tool_choice, self.parallel_tool_calls, flat=True)

    def asked_forms(self) -> dict[str, Json | None]:
        return super().asked_forms() | {"text.format": self._asked_format()}

    def _asked_format(self) -> Json | None:
        given = (self.text or {}).get("format")
        if given is None:
            return None
        if isinstance(given, dict) and given.get("type") == "json_schema":  # flat, where a chat's has it inside
            given = {"type": "json_schema", "json_schema": given}
        try:
            return ResponseFormat.model_validate(given).form() or None
        except ValidationError:
            raise InvalidRequest(
                'text.format must be {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "name": '
                '..., "schema": ...}'
            ) from None

    def read_input(self) -> InputMessages:
        """Return the messages that the input stands for. Raises InvalidRequest, with the place in the input."""
        made = InputMessages()
        if self.instructions:
            made.messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            made.messages.append({"role": "user", "content": self.input})
            return made
        if sum(len(parts) for item in self.input if isinstance(parts := _parts_of(item), list)) > MOST_ITEMS:
            raise InvalidRequest(f"input has more than {MOST_ITEMS:,} parts; join those that are text")
        known: set[str] = set()
        for place, item in enumerate(self.input):
            where, kind = f"input[{place}]", item.get("type") or "message"
            if kind == "message":
                made.messages.append(_message(item, where))
            elif kind == "function_call":
                known.add(_text(item, "call_id", where))
                _add_call(made, item, where)
            elif kind == "function_call_output":
                made.messages.append(_result(item, known, where))
            elif kind != "reasoning":  # which the model has not made, and its template cannot write
                raise InvalidRequest(
                    f"{where} is of the type {str(kind)[:100]!r}; items are messages, function_call, and "
                    "function_call_output"
                )
        if not made.messages:
            raise InvalidRequest("input is empty; give it a message")
        return made


RESPONSE_FIELDS = {*ResponsesBody.model_fields, *REFUSED_HERE}


def _parts_of(item: Json) -> object:
    return item.get("content") or item.get("output")


def _message(item: Json, where: str) -> Message:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequest(f'{where} has the role {str(role)[:100]!r}; give it "user", "assistant", or "system"')
    return {
        "role": "system" if role == "developer" else role,
        "content": _plain(item.get("content"), f"{where}.content"),
    }


def _add_call(made: InputMessages, item: Json, where: str) -> None:
    """Add a call to the message before it if that is the assistant's, as in a chat, or else to one of its own."""
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        raise InvalidRequest(f"{where}.arguments must be a text that holds a JSON object")
    function: Json = {"name": _text(item, "name", where), "arguments": arguments}
    if not made.messages or made.messages[-1]["role"] != "assistant":
        made.messages.append({"role": "assistant", "content": ""})
    call = {"id": item["call_id"], "type": "function", "function": function}
    made.messages[-1].setdefault("tool_calls", []).append(call)
    made.calls.append((function, f"{where}.arguments"))


def _result(item: Json, known: set[str], where: str) -> Message:
    call_id = _text(item, "call_id", where)
    if call_id not in known:
        raise InvalidRequest(
            f"{where} has the call_id {call_id[:100]!r}, which no earlier item has; send the function_call before its "
            "output"
        )
    return {"role": "tool", "tool_call_id": call_id, "content": _plain(item.get("output"), f"{where}.output")}


def _text(item: Json, name: str, where: str) -> str:
    if not isinstance(text := item.get(name), str) or not text:
        raise InvalidRequest(f"{where} has no {name}; give it one, a text")
    return text


def _plain(content: object, where: str) -> str:
    """Return a content as one text, of which each part is a line."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where} must be a text, or a list of parts that are text")
    lines = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal") or not isinstance(text, str):
            raise InvalidRequest(
                f'{where}[{place}] must be {{"type": "input_text" or "output_text", "text": ...}}; models here cannot '
                f"read a part of the type {str(kind)[:100]!r}"
            )
        lines.append(text)
    return "\n".join(lines)
