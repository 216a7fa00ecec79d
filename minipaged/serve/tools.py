"""The tools of a request: which functions the model may call, whether it must call one, and the calls in its answer.

A template describes the tools to the model; `call_parsers.py` finds the calls in the text that the model writes. Where
the model must call a tool, its answer is held to a JSON schema made here, which includes the tools' own schemas.
"""

from __future__ import annotations

import random
import re
import string
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec

from minipaged.errors import InvalidRequest
from minipaged.serve.call_parsers import FAMILIES, LIST, CallPiece, CallReader, ParserName, Piece

Json = dict[str, Any]
MOST_TOOLS = 128
MOST_BYTES = 2**18
"""The largest size of all tools of a request, as JSON. A template writes all of it into the prompt."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
BESIDE_SCHEMAS = {"const", "default", "enum", "examples"}
"""Keys of a JSON schema whose values are data: a `$ref` in them is no reference."""
SCHEMAS_BY_NAME = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
"""Keys of a JSON schema whose values map names, which may be any text, to schemas."""
MISTRAL_ID_LENGTH = 9
"""Mistral's templates accept only ids of this length, of letters and digits."""


@dataclass(frozen=True)
class Tools:
    """The tools that a request lets the model call."""

    functions: Sequence[Json]
    """Each as {"type": "function", "function": {"name", "description", "parameters"}}, for the template."""
    forced: str | bool = False
    """Whether the answer must call a tool; a string is the name of the one that it must call."""
    parallel: bool = True
    """Whether the answer may have several calls."""

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.functions]

    def schema_of_calls(self) -> Json | None:
        """Return the JSON schema to which the answer must be held; None if the model may answer as it likes. Raises
        InvalidRequest for a schema that is nested too deeply.

        For a named tool the answer consists of its arguments. Otherwise it is a list of calls.
        """
        if not self.forced:
            return None
        if isinstance(self.forced, str):
            [schema] = [_parameters(tool) for tool in self.functions if tool["function"]["name"] == self.forced]
            return schema
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{place}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for place, name in enumerate(self.names)
        ]
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if not self.parallel:
            schema["maxItems"] = 1
        try:
            definitions = {
                str(place): _with_moved_references(_parameters(tool), f"#/$defs/{place}")
                for place, tool in enumerate(self.functions)
            }
        except RecursionError:
            raise InvalidRequest("tools has a schema that is nested too deeply; make it flatter") from None
        return schema | {"$defs": definitions}

    def reader(self, parser: ParserName) -> CallReader:
        """Return a reader of one answer of a model that writes calls as `parser` says."""
        if isinstance(self.forced, str):
            return CallReader(LIST, only=self.forced)
        return CallReader(LIST if self.forced else FAMILIES[parser], self.names, parallel=self.parallel)


def tools_of(
    tools: Sequence[Json] | None, choice: str | Json | None, parallel: bool | None, *, flat: bool = False
) -> Tools | None:
    """Return the tools of a request, by its fields `tools`, `tool_choice` and `parallel_tool_calls`; None if the model
    may call none, and is not to see any. `flat`: a tool has its name beside its type, as in /v1/responses, and not in
    an object `function`, as in a chat. Raises InvalidRequest."""
    functions = _functions(tools or (), flat)
    forced = _forced(choice, [tool["function"]["name"] for tool in functions], flat)
    if not functions or choice == "none":
        return None
    return Tools(functions, forced, parallel is not False)


def _functions(tools: Sequence[Json], flat: bool) -> list[Json]:
    if len(tools) > MOST_TOOLS:
        raise InvalidRequest(f"tools holds {len(tools):,} tools; at most {MOST_TOOLS} are taken")
    functions: list[Json] = []
    names: set[str] = set()
    size = 0
    for place, tool in enumerate(tools):
        where = f"tools[{place}]"
        if tool.get("type") != "function":
            raise InvalidRequest(
                f'{where} is of type {_told(tool.get("type"))}; only tools of type "function" are taken, with a '
                '"name" and "parameters"'
            )
        function = tool if flat else tool.get("function")
        if not isinstance(function, dict):
            raise InvalidRequest(f'{where} has no "function"; give it one, with "name" and "parameters"')
        checked = _checked_function(function, where if flat else f"{where}.function")
        size += len(msgspec.json.encode(checked))
        if size > MOST_BYTES:
            raise InvalidRequest(
                f"tools holds more than {MOST_BYTES:,} bytes of JSON; leave out the tools that this request does not "
                "need, or shorten them: all of it is written into the prompt"
            )
        if checked["name"] in names:
            raise InvalidRequest(f"{where} has the name {checked['name']!r} again; each tool needs a name of its own")
        names.add(checked["name"])
        functions.append({"type": "function", "function": checked})
    return functions


def _checked_function(function: Json, where: str) -> Json:
    """Return the parts of a tool that a template reads: name, description and parameters. Raises InvalidRequest."""
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(
            f'{where} has the "name" {_told(name)}; a name has 1 to 64 letters, digits, and _ . - only'
        )
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f'{where} has the "description" {_told(description)}; it must be a text')
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise InvalidRequest(f'{where} has the "parameters" {_told(parameters)}; they are a JSON schema, an object')
    if (kind := parameters.get("type", "object")) != "object":
        raise InvalidRequest(f'{where} has "parameters" of the type {_told(kind)}; arguments are an "object"')
    return {"name": name, **({"description": description} if description else {}), "parameters": parameters}


def _forced(choice: str | Json | None, names: Collection[str], flat: bool) -> str | bool:
    """Return whether an answer must call a tool, or the name of the one that it must call."""
    if choice in (None, "none", "auto"):
        return False
    if choice == "required":
        if not names:
            raise InvalidRequest('tool_choice is "required", and there are no tools; give some, or leave it out')
        return True
    named: Any = choice if isinstance(choice, dict) and choice.get("type") == "function" else {}
    named = named if flat else named.get("function")
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str):
        form = '"name": ...' if flat else '"function": {"name": ...}'
        raise InvalidRequest(
            f'tool_choice is {_told(choice)}; it must be "none", "auto", "required", or {{"type": "function", {form}}}'
        )
    if name not in names:
        known = ", ".join(names)
        raise InvalidRequest(f"tool_choice names {_told(name)}, which is not among the tools: {_told(known)}")
    return name


def _told(value: object) -> str:
    """Return a value for an error message: a text of at most 100 characters, or the kind of a longer value."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    told = repr(value[:101] if isinstance(value, str) else value)
    return told if len(told) <= 100 else told[:100] + "..."


def _parameters(tool: Json) -> Json:
    """Return the schema of a tool's arguments, which are an object whether it says so or not."""
    parameters: Json = tool["function"]["parameters"]
    return {"type": "object"} | parameters


def _with_moved_references(schema: Any, root: str, *, has_names: bool = False) -> Any:
    """Return a JSON schema for a place within another one: its references to parts of itself begin at `root`, and it
    has no `$id`, relative to which they would be read. `has_names`: its keys are names. Raises InvalidRequest for a
    reference to an anchor."""
    if isinstance(schema, list):
        return [_with_moved_references(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if has_names:
            moved[key] = _with_moved_references(value, root)
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            if value[1:2] not in ("", "/"):
                raise InvalidRequest(
                    f'tools has the "$ref" {_told(value)}, which names an anchor; name the place of the schema '
                    'instead, as in "#/$defs/name"'
                )
            moved[key] = root + value[1:]
        elif key in BESIDE_SCHEMAS:
            moved[key] = value
        elif key != "$id":
            moved[key] = _with_moved_references(value, root, has_names=key in SCHEMAS_BY_NAME)
    return moved


# --- Calls in an answer ---------------------------------------------------------------------------


@dataclass(frozen=True)
class CallSource:
    """Makes the reader of each choice of an answer."""

    tools: Tools
    parser: ParserName
    hidden: Mapping[int, str]
    """The ids of markers that are special tokens, which the text does not show, and the characters that stand for
    them."""

    def choice(self, places: Callable[[Sequence[int]], list[int]] | None) -> ChoiceCalls:
        """`places`: returns the offset in the text of each of the next tokens; None if no marker is hidden."""
        return ChoiceCalls(self.tools.reader(self.parser), self.hidden, places, self.parser == "mistral")


@dataclass
class ChoiceCalls:
    """The calls in one choice, whole or as it grows."""

    _reader: CallReader
    _hidden: Mapping[int, str]
    _places: Callable[[Sequence[int]], list[int]] | None
    _has_short_ids: bool
    _ids: list[str] = field(default_factory=list)
    _waiting: deque[tuple[int, str]] = field(default_factory=deque)
    _length: int = 0

    def read(self, text: str, token_ids: Sequence[int], is_last: bool) -> list[Piece]:
        """Return the pieces of new text. `token_ids`: the new tokens. `is_last`: whether the choice ends here."""
        pieces = self._reader.feed(self._with_markers(text, token_ids))
        return pieces + self._reader.finish() if is_last else pieces

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason of the choice: `tool_calls` if its text has stopped and its last call is whole, else
        that of its text (`reason`)."""
        has_calls = self._reader.num_calls and not self._reader.is_cut
        return "tool_calls" if reason == "stop" and has_calls else reason

    @property
    def is_cut(self) -> bool:
        """Whether the choice has ended within the arguments of a call."""
        return self._reader.is_cut

    def id_of(self, call: int) -> str:
        """Return the id of a call, by its number."""
        while len(self._ids) <= call:
            letters = string.ascii_letters + string.digits
            short = "".join(random.choices(letters, k=MISTRAL_ID_LENGTH)) if self._has_short_ids else ""
            self._ids.append(short or f"call_{uuid4().hex[:24]}")
        return self._ids[call]

    def _with_markers(self, text: str, token_ids: Sequence[int]) -> str:
        """Put the character for each hidden marker into the text where the marker's token stands. Text may come later
        than its tokens. A marker then waits until the text has reached its place."""
        if self._places is None:
            return text
        for token_id, place in zip(token_ids, self._places(token_ids), strict=True):
            if token_id in self._hidden:
                self._waiting.append((place, self._hidden[token_id]))
        begin, done, parts = self._length, 0, []
        self._length += len(text)
        while self._waiting and self._waiting[0][0] <= self._length:
            place, marker = self._waiting.popleft()
            parts += [text[done : max(done, place - begin)], marker]
            done = max(done, place - begin)
        return "".join((*parts, text[done:]))


def joined(pieces: Sequence[Piece], id_of: Callable[[int], str]) -> tuple[str, list[Json]]:
    """Return the content and the calls of a whole choice."""
    content, calls = "".join(piece for piece in pieces if isinstance(piece, str)), list[Json]()
    arguments: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallPiece):
            if piece.name is not None:
                function = {"name": piece.name, "arguments": ""}
                calls.append({"id": id_of(piece.index), "type": "function", "function": function})
                arguments.append([])
            arguments[piece.index].append(piece.arguments)
    for call, parts in zip(calls, arguments, strict=True):
        call["function"]["arguments"] = "".join(parts)
    return content, calls
