"""Reads tool calls in a model's answer, as the answer grows.

A model that knows tools writes a call as text. The families that run here write it like this:

- `hermes` (Qwen2.5, Qwen3, SmolLM2): `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, several blocks, or a
  list in one block;
- `llama3_json` (Llama 3.1 to 3.3): `{"name": "f", "parameters": {...}}` at the beginning of the answer, or after
  `<|python_tag|>`; several separated by `;`, or as a list;
- `mistral`: `[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]` (templates v2 to v7), and
  `[TOOL_CALLS]f[ARGS]{...}` for each call (v11 and newer, with or without `[CALL_ID]...`).

`CallReader` has one grammar for all of them: an optional marker, then one object or several, in a list or not. It reads
a stream piece by piece; a whole answer is a stream of one piece, so both give the same. Text that could still become a
call is held back. If it does not become one, it is *content*, as all other text is. A call is given out as soon as its
name is known and its arguments begin, and is never taken back. The work is linear in the length of the text: each
character is looked at a bounded number of times, however the pieces are cut.

Some tokenizers have markers as special tokens, which the text does not show. The marker is then represented in the text
by a lone surrogate, which no text contains otherwise (`CallFamily.stand_ins`). It never reaches the client.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

LONGEST_NAME = 128
"""The longest name of a call, or of a key in it, in characters."""

SPACE = re.compile(r"\s*")
WORD = re.compile(r"[\w.:/-]*")
SCALAR = re.compile(r'[^\s,{}\[\]"]*')
TO_QUOTE = re.compile(r'[^"\\]*')
BRACKET_OR_QUOTE = re.compile(r'[{}\[\]"]')
QUOTE_OR_BACKSLASH = re.compile(r'["\\]')
STAND_IN = re.compile("[\ud800-\udbff]")

ARGUMENTS = ("arguments", "parameters")
BESIDE = ("type", "id", "index")
"""Keys that some models write before the arguments, and that have no meaning here."""

Steps = Generator[None, None, bool]
"""A generator that reads a part of the answer: it yields when it needs more text, and returns whether it found its
part."""


@dataclass(frozen=True)
class CallFamily:
    """The way in which a family of models writes calls."""

    opener: str | None
    """The marker before calls; None if there is none."""
    closer: str | None = None
    """The marker after calls, which may be missing."""
    parts: tuple[str, ...] = ()
    """Markers within a call, in order."""
    begins_bare: bool = False
    """Whether an answer may begin with a call without a marker."""

    @cached_property
    def markers(self) -> tuple[str, ...]:
        return tuple(marker for marker in (self.opener, self.closer, *self.parts) if marker)

    @cached_property
    def stand_ins(self) -> Mapping[str, str]:
        """Maps each marker to the character that stands for it if it is a special token."""
        return {marker: chr(0xD800 + i) for i, marker in enumerate(self.markers)}

    @cached_property
    def openers(self) -> tuple[str, ...]:
        return (self.opener, self.stand_ins[self.opener]) if self.opener else ()


ParserName = Literal["hermes", "llama3_json", "mistral"]
FAMILIES: Mapping[ParserName, CallFamily] = {
    "hermes": CallFamily("<tool_call>", "</tool_call>"),
    "llama3_json": CallFamily("<|python_tag|>", begins_bare=True),
    "mistral": CallFamily("[TOOL_CALLS]", parts=("[CALL_ID]", "[ARGS]")),
}
LIST = CallFamily(None, begins_bare=True)
"""The form of an answer that must consist of calls: a JSON list (`tools.schema_of_calls`). It has no content."""


def family_name(template: str, added_tokens: Collection[str]) -> ParserName:
    """Return the name of the family whose opener is in a model's chat template, or else among its tokenizer's added
    tokens. A model without any opener in them is read as `hermes`."""
    for signs in (template, added_tokens):
        for name, family in FAMILIES.items():
            if family.openers[0] in signs:
                return name
    return "hermes"


@dataclass(slots=True)
class CallPiece:
    """The beginning of a call, which has a name and no arguments yet, or a piece of its arguments."""

    index: int
    """The number of the call in its answer."""
    name: str | None
    arguments: str


Piece = str | CallPiece
"""A piece of an answer: content, or a part of a call."""


class CallReader:
    """Reads one answer.

    `names`: the tools of the request. A call without a marker before it must name one of them; after a marker, and
    after a first call, every name is taken, so that a client can tell the model that it has no such tool. `parallel`:
    whether to give out more than the first call; the others are dropped. `only`: the whole answer is the arguments of a
    call of this tool.
    """

    def __init__(
        self, family: CallFamily, names: Collection[str] = (), *, parallel: bool = True, only: str | None = None
    ) -> None:
        self._family = family
        self._names = names
        self._parallel = parallel
        openers = family.openers
        self._opener = re.compile("|".join(map(re.escape, openers))) if openers else None
        self.num_calls = 0
        """The number of calls that were given out."""
        self.is_cut = False
        """Whether the text has ended within the arguments of a call that was given out."""
        self._text = ""  # not read before `_at`
        self._at = 0
        self._is_over = False
        self._held: list[str] = []  # read, and content unless it becomes a call
        self._space: list[str] = []  # white space at the end of the content so far
        self._has_ended_in_call = False  # nothing but white space has come since the last call
        self._is_shown = True  # whether the current call is given out
        self._pieces: list[Piece] = []
        self._reading = self._call_of(only) if only is not None else self._answer()

    def feed(self, text: str) -> list[Piece]:
        """Read more text, and return the pieces that are certain."""
        self._text, self._at = self._text[self._at :] + text, 0
        return self._go_on()

    def finish(self) -> list[Piece]:
        """Return the last pieces: no more text will come."""
        self._is_over = True
        return self._go_on()

    def _go_on(self) -> list[Piece]:
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    # --- The grammar ------------------------------------------------------------------------------

    def _answer(self) -> Steps:
        if self._family.begins_bare:
            yield from self._take(SPACE)
            yield from self._calls(after_marker=False)
        while (yield from self._content()):
            yield from self._calls(after_marker=True)
        if not self._has_ended_in_call:
            self._give("".join(self._space))
        return True

    def _call_of(self, name: str) -> Steps:
        """Read an answer that is the arguments of one call."""
        yield from self._take(SPACE)
        if (yield from self._comes("{")):
            self._begin(name)
            yield from self._arguments()
            while (yield from self._more()):
                self._at = len(self._text)  # only white space can follow
        else:
            self._release()
            yield from self._content()
            self._give("".join(self._space))
        return True

    def _content(self) -> Steps:
        """Read content up to the end of the next opener, and return whether there is one. White space before an opener
        belongs to it."""
        while (yield from self._more()):
            text, begin = self._text, self._at
            if self._opener and (found := self._opener.search(text, begin)):
                self._add(text[begin : found.start()])
                self._at = found.end()
                self._held.append(found[0])
                return True
            self._at = len(text) - self._length_held(text, begin)
            self._add(text[begin : self._at])
            if self._at < len(text):
                if self._is_over:
                    self._add(text[self._at :])
                    self._at = len(text)
                else:
                    yield
        return False

    def _length_held(self, text: str, begin: int) -> int:
        """Return the length of the longest end of the text that begins an opener."""
        for length in range(min(max(map(len, self._family.openers), default=1) - 1, len(text) - begin), 0, -1):
            if any(opener.startswith(text[-length:]) for opener in self._family.openers):
                return length
        return 0

    def _calls(self, after_marker: bool) -> Steps:
        """Read calls. Text that belongs to no call becomes content, or is dropped if it only separates calls."""
        is_list = yield from self._begins_list()
        found = yield from self._call(
            any_name=after_marker, needs_arguments=not after_marker, after_marker=after_marker
        )
        while found:
            self._held.clear()
            yield from self._take(SPACE)
            if (yield from self._closes()):
                break
            if is_list and (yield from self._literal("]")):
                is_list = False
                continue
            again = yield from self._marker(self._family.opener)
            if again:
                is_list = yield from self._begins_list()
            elif (yield from self._literal(",")) or (yield from self._literal(";")):
                yield from self._take(SPACE)
            if not again and not (yield from self._more()):
                break
            found = yield from self._call(any_name=True, needs_arguments=False, after_marker=again)
        else:
            self._release()
            return False
        self._held.clear()
        return True

    def _begins_list(self) -> Steps:
        yield from self._take(SPACE)
        is_list = yield from self._literal("[")
        yield from self._take(SPACE)
        return is_list

    def _call(self, *, any_name: bool, needs_arguments: bool, after_marker: bool) -> Steps:
        """Read one call. `any_name`: whether it may name a tool that the request does not have. `needs_arguments`:
        whether an object without arguments is no call."""
        if not (yield from self._literal("{")):
            return after_marker and bool(self._family.parts) and (yield from self._name_and_arguments())
        name: str | None = None
        early = ""  # arguments that came before the name
        has_begun = False
        while True:
            yield from self._take(SPACE)
            key = yield from self._string()
            if key is None:
                return has_begun
            yield from self._take(SPACE)
            if not (yield from self._literal(":")):
                return has_begun
            yield from self._take(SPACE)
            if key == "name" and name is None:
                name = yield from self._string()
                if not name or not (any_name or name in self._names):
                    return False
                if early:
                    has_begun = self._begin(name, early)
            elif key in ARGUMENTS and not has_begun and not early:
                if name is not None and (yield from self._comes("{")):
                    has_begun = self._begin(name)
                    if not (yield from self._arguments()):
                        return True
                else:
                    early = yield from self._early_arguments()
                    if not early:
                        return False
                    if name is not None:
                        has_begun = self._begin(name, early)
            elif has_begun or key in BESIDE:
                if not (yield from self._value()):
                    return has_begun
            else:
                return False
            yield from self._take(SPACE)
            if (yield from self._literal("}")):
                if not has_begun and name is not None and not needs_arguments:
                    has_begun = self._begin(name, "{}")
                return has_begun
            if not (yield from self._literal(",")):
                return has_begun

    def _name_and_arguments(self) -> Steps:
        """Read a call whose name stands before its arguments, with markers between them."""
        name = yield from self._take(WORD, LONGEST_NAME)
        yield from self._take(SPACE)
        for part in self._family.parts:
            if (yield from self._marker(part)):
                yield from self._take(SPACE)
                if part != self._family.parts[-1]:
                    yield from self._take(WORD)  # an id, which the answer replaces by one of its own
                    yield from self._take(SPACE)
        if not name or not (yield from self._comes("{")):
            return False
        self._begin(name)
        yield from self._arguments()
        return True

    def _early_arguments(self) -> Generator[None, None, str]:
        """Read arguments before they can be given out; "" if they are not an object. `null` means none."""
        if (yield from self._comes("{")):
            begin = len(self._held)
            is_whole = yield from self._value()
            return "".join(self._held[begin:]) if is_whole else ""
        return "{}" if (yield from self._take(SCALAR)) == "null" else ""

    # --- Reading ----------------------------------------------------------------------------------

    def _more(self) -> Steps:
        """Wait for a character, and return whether there is one."""
        while self._at == len(self._text) and not self._is_over:
            yield
        return self._at < len(self._text)

    def _comes(self, character: str) -> Steps:
        """Return whether the next character is this one, which is not read."""
        return (yield from self._more()) and self._text[self._at] == character

    def _take(self, run: re.Pattern[str], most: int | None = None) -> Generator[None, None, str]:
        """Read the characters that match, which may be none; "" if there are more than `most`."""
        taken: list[str] = []
        length = 0
        while (yield from self._more()):
            found = run.match(self._text, self._at)
            assert found
            self._at = found.end()
            taken.append(found[0])
            self._held.append(found[0])
            length += len(found[0])
            if most is not None and length > most:
                return ""
            if self._at < len(self._text):
                break
        return "".join(taken)

    def _literal(self, literal: str) -> Steps:
        """Read these characters if they come next, and return whether they do."""
        while not self._is_over and len(rest := self._text[self._at : self._at + len(literal)]) < len(literal):
            if not literal.startswith(rest):
                return False
            yield
        if not self._text.startswith(literal, self._at):
            return False
        self._at += len(literal)
        self._held.append(literal)
        return True

    def _marker(self, marker: str | None) -> Steps:
        if marker is None:
            return False
        return (yield from self._literal(marker)) or (yield from self._literal(self._family.stand_ins[marker]))

    def _closes(self) -> Steps:
        """Read the marker after calls if it comes next, or its beginning if the text ends within it."""
        if (yield from self._marker(self._family.closer)):
            return True
        is_begun = self._is_over and (self._family.closer or "").startswith(self._text[self._at :])
        self._at = len(self._text) if is_begun else self._at
        return is_begun

    def _string(self) -> Generator[None, None, str | None]:
        """Read a short JSON string; None if there is none, or if it has half of a character."""
        if not (yield from self._literal('"')):
            return None
        begin, length = len(self._held), 0
        while length <= LONGEST_NAME:
            length += len((yield from self._take(TO_QUOTE, LONGEST_NAME)))
            if not (yield from self._more()) or self._text[self._at] not in '"\\':
                return None
            if self._text[self._at] == '"':
                try:
                    read = str(json.loads(f'"{"".join(self._held[begin:])}"', strict=False))
                    read.encode()
                except ValueError:
                    return None
                yield from self._literal('"')
                return read
            yield from self._literal("\\")
            if not (yield from self._more()):
                return None
            self._held.append(self._text[self._at])
            self._at += 1
            length += 2
        return None

    def _value(self) -> Steps:
        """Read a JSON value, and return whether it is whole."""
        if (yield from self._comes('"')) or (yield from self._comes("{")) or (yield from self._comes("[")):
            return (yield from self._nested(shows=False))
        return bool((yield from self._take(SCALAR)))

    def _arguments(self) -> Steps:
        """Read the arguments of a call that has begun, and give them out. Return whether they are whole."""
        is_whole = yield from self._nested(shows=True)
        self.is_cut = not is_whole and self._is_shown
        return is_whole

    def _nested(self, *, shows: bool) -> Steps:
        """Read a string, an object or a list, up to its end. `shows`: give it out as arguments instead of holding it.
        Return whether it is whole."""
        depth, is_in_string, num_escaped = 0, False, 0
        while (yield from self._more()):
            text, at = self._text, self._at + num_escaped
            is_whole = False
            while at < len(text) and not is_whole:
                found = (QUOTE_OR_BACKSLASH if is_in_string else BRACKET_OR_QUOTE).search(text, at)
                if not found:
                    at = len(text)
                    break
                at = found.end()
                if found[0] == "\\":
                    at += 1  # the next character is escaped
                elif found[0] == '"':
                    is_in_string = not is_in_string
                else:
                    depth += 1 if found[0] in "{[" else -1
                is_whole = depth == 0 and not is_in_string
            num_escaped = max(0, at - len(text))
            read = text[self._at : at]
            self._at = min(at, len(text))
            if shows:
                self._tell(read)
            else:
                self._held.append(read)
            if is_whole:
                return True
        return False

    # --- Giving out -------------------------------------------------------------------------------

    def _begin(self, name: str, arguments: str = "") -> bool:
        """Begin a call, and return True."""
        self._held.clear()
        self._space.clear()
        self._has_ended_in_call = True
        self._is_shown = self._parallel or not self.num_calls
        if self._is_shown:
            self._pieces.append(CallPiece(self.num_calls, name, ""))
            self.num_calls += 1
            self._tell(arguments)
        return True

    def _tell(self, arguments: str) -> None:
        """Give out a piece of the current call's arguments."""
        shown = STAND_IN.sub("", arguments)
        if self._is_shown and shown:
            self._pieces.append(CallPiece(self.num_calls - 1, None, shown))

    def _release(self) -> None:
        """Make the held text content."""
        self._add("".join(self._held))
        self._held.clear()

    def _add(self, text: str) -> None:
        """Add text to the content. White space at the text's end waits, because it may come before a call."""
        if told := text.rstrip():
            self._space.append(told)
            self._give("".join(self._space))
            self._space = [text[len(told) :]]
        else:
            self._space.append(text)

    def _give(self, content: str) -> None:
        content = STAND_IN.sub("", content)
        if content and self._family is not LIST:  # there it is what a limit has left of a call
            self._has_ended_in_call = False
            last = self._pieces.pop() if self._pieces and isinstance(self._pieces[-1], str) else ""
            self._pieces.append(f"{last}{content}")
