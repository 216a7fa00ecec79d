"""Tool calls in a text: found in each family's way of writing, however the text is cut, and in linear time."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.serve.call_parsers import FAMILIES, LIST, CallFamily, CallPiece, CallReader, Piece, family_name
from tests.serve.scripted import TEMPLATE

HERMES, LLAMA, MISTRAL = (FAMILIES[name] for name in ("hermes", "llama3_json", "mistral"))
NAMES = ["f", "g"]
Said = tuple[str, list[tuple[str, str]], bool]


def read(reader: CallReader, pieces: list[str]) -> Said:
    """The content, the calls, and whether the last call is cut."""
    told: list[Piece] = [piece for text in pieces for piece in reader.feed(text)]
    told += reader.finish()
    calls: list[list[str]] = []
    for piece in told:
        if isinstance(piece, CallPiece):
            if piece.name is not None:
                assert (piece.index, piece.arguments) == (len(calls), "")
                calls.append([piece.name, ""])
            assert piece.index == len(calls) - 1
            calls[-1][1] += piece.arguments
    content = "".join(piece for piece in told if isinstance(piece, str))
    return content, [(name, arguments) for name, arguments in calls], reader.is_cut


def of_whole(family: CallFamily, text: str, *, parallel: bool = True) -> Said:
    """What is read in a text; also if it comes in pieces of one character, or of three."""
    said = read(CallReader(family, NAMES, parallel=parallel), [text])
    for step in (1, 3):
        pieces = [text[at : at + step] for at in range(0, len(text), step)]
        assert read(CallReader(family, NAMES, parallel=parallel), pieces) == said
    return said


F = '{"name": "f", "arguments": {"a": "}\\"{"}}'
G = '{"name": "g", "parameters": {}}'
TWO = [("f", '{"a": "}\\"{"}'), ("g", "{}")]
CALLS = {
    "blocks": (HERMES, f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>\n"),
    "a list in a block": (HERMES, f"<tool_call>[{F}, {G}]</tool_call>"),
    "blocks without ends": (HERMES, f"<tool_call>{F}<tool_call>{G}"),
    "bare": (LLAMA, f"{F}; {G}"),
    "a bare list": (LLAMA, f" [{F},\n{G}]"),
    "after a marker": (LLAMA, f"<|python_tag|>{F};{G}"),
    "after a special token": (LLAMA, f"\ud800{F};{G}"),
    "a list after a marker": (MISTRAL, f"[TOOL_CALLS] [{F}, {G}]"),
    "names before arguments": (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": "}\\"{"}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}'),
    "names before arguments, special tokens": (MISTRAL, '\ud800f\ud802{"a": "}\\"{"}\ud800g\ud801abc\ud802{}'),
    "names and arguments without a marker": (MISTRAL, '[TOOL_CALLS]f{"a": "}\\"{"}\n[TOOL_CALLS] g {}'),
    "an answer that must call": (LIST, f"[{F}, {G}]"),
}


@pytest.mark.parametrize(("family", "text"), CALLS.values(), ids=CALLS)
def test_each_way_of_writing_two_calls_is_read(family: CallFamily, text: str) -> None:
    assert of_whole(family, text) == ("", TWO, False)
    assert of_whole(family, text, parallel=False) == ("", TWO[:1], False)


@pytest.mark.parametrize("name", [name for name, (family, _) in CALLS.items() if family.opener])
def test_text_around_calls_is_content(name: str) -> None:
    family, text = CALLS[name]
    before = "" if "bare" in name else "I look.\n"
    content, calls, _ = of_whole(family, before + text.strip() + "\nDone ")
    assert (content, calls) == ("I look.\nDone " if before else "\nDone ", TWO)


NO_CALLS = {
    "an ordinary text": (HERMES, "a </s> <b> tool_call> \n b \n"),
    "an end of a marker's beginning": (HERMES, "a <tool_"),
    "a marker before a text": (HERMES, "I write <tool_call> before and </tool_call> after. "),
    "another object": (HERMES, '<tool_call>{"title": {"name": "f"}}</tool_call>'),
    "arguments that are no object": (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    "a name that is no text": (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    "no name": (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    "a name with half of a character": (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    "a second name": (HERMES, '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
    "a call that ends before its arguments": (HERMES, '<tool_call>{"name": "f", "arg'),
    "an unknown tool": (LLAMA, '{"name": "h", "parameters": {}}'),
    "an object with a name": (LLAMA, '{"name": "f", "age": 3}'),
    "an object": (LLAMA, ' {"answer": [3, {}]}  '),
    "a call later in the text": (LLAMA, 'Call {"name": "f", "parameters": {}}'),
    "a text after the marker": (MISTRAL, "[TOOL_CALLS] are calls [ARGS]"),
}


@pytest.mark.parametrize(("family", "text"), NO_CALLS.values(), ids=NO_CALLS)
def test_what_is_no_call_is_content_to_the_letter(family: CallFamily, text: str) -> None:
    assert of_whole(family, text) == (text, [], False)


def test_a_special_token_before_a_text_is_not_shown() -> None:
    assert of_whole(LLAMA, "\ud800print(1)") == ("print(1)", [], False)
    assert of_whole(MISTRAL, '\ud800[{"name": "f", "arguments": {"a": "\ud802"}}]\ud800') == (
        "",
        [("f", '{"a": ""}')],
        False,
    )


def test_a_call_needs_no_arguments_after_a_marker() -> None:
    for arguments in ("", ', "arguments": null', ', "arguments": {}'):
        assert of_whole(HERMES, f'<tool_call>{{"name": "f"{arguments}}}</tool_call>') == ("", [("f", "{}")], False)


def test_after_a_marker_or_a_first_call_any_tool_is_called() -> None:
    """The client can tell the model that there is no such tool."""
    unknown = '{"name": "a tool", "parameters": {}}'
    assert of_whole(HERMES, f"<tool_call>{unknown}")[1] == [("a tool", "{}")]
    assert of_whole(LLAMA, f"{G}; {unknown}") == ("", [("g", "{}"), ("a tool", "{}")], False)


def test_the_order_of_keys_does_not_matter_and_what_comes_again_is_left_out() -> None:
    text = '<tool_call>{"id": 3, "arguments": {"a": 1}, "type": "function", "name": "f"}</tool_call>'
    assert of_whole(HERMES, text) == ("", [("f", '{"a": 1}')], False)
    again = '<tool_call>{"name": "f", "arguments": {"a": 1}, "name": "g", "arguments": {"b": 2}, "x": [{}]}</tool_call>'
    assert of_whole(HERMES, again) == ("", [("f", '{"a": 1}')], False)


def test_half_of_a_character_in_arguments_stays_an_escape() -> None:
    [(_, arguments)] = of_whole(HERMES, '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}')[1]
    assert arguments == '{"a": "\\ud800"}'
    arguments.encode()


def test_a_call_may_end_anywhere() -> None:
    """Its arguments are those that came; it is cut only if they are not whole."""
    text = '<tool_call>{"name": "f", "arguments": {"a": [1, "\\\\"]}}</tool_call>'
    begins, ends = text.index('{"a'), text.index("}}") + 1
    for end in range(len(text)):
        content, calls, is_cut = of_whole(HERMES, text[:end])
        assert (content, calls) == (("", [("f", text[begins : min(end, ends)])]) if end > begins else (text[:end], []))
        assert is_cut == (begins < end < ends)


def test_text_is_held_back_only_while_it_can_become_a_call() -> None:
    reader = CallReader(HERMES, NAMES)
    told = [(piece, reader.feed(piece)) for piece in ("a", " ", "<", "b", "<tool_call>", '{"q', '"', ": 1}")]
    assert told == [
        ("a", ["a"]),
        (" ", []),
        ("<", []),
        ("b", [" <b"]),
        ("<tool_call>", []),
        ('{"q', []),
        ('"', []),
        (": 1}", ['<tool_call>{"q": 1}']),
    ]
    bare = CallReader(LLAMA, NAMES)
    assert (bare.feed(" \n"), bare.feed("T"), bare.feed("{")) == ([], [" \nT"], ["{"])


def test_arguments_are_given_out_as_they_come() -> None:
    reader = CallReader(HERMES, NAMES)
    assert reader.feed('<tool_call>{"name": "f", "arguments": {') == [CallPiece(0, "f", ""), CallPiece(0, None, "{")]
    assert reader.feed('"a') == [CallPiece(0, None, '"a')]
    assert reader.feed('"}}</tool') == [CallPiece(0, None, '"}')]
    assert reader.feed("_call>") == reader.finish() == []


def test_the_answer_to_a_named_tool_is_its_arguments() -> None:
    for pieces in ([' {"a": 1}\n'], list(' {"a": 1}\n')):
        assert read(CallReader(LIST, only="f"), pieces) == ("", [("f", '{"a": 1}')], False)
    assert read(CallReader(LIST, only="f"), ['{"a": 1']) == ("", [("f", '{"a": 1')], True)
    assert read(CallReader(LIST, only="f"), ["no"]) == ("", [], False)


PARTS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "\ud800", "\ud802", "f", "[", "]"]
PARTS += [F, G, '{"name"', ': "f"', ', "arguments": ', "{", "}", '"', "\\", " ", "\n", ",", ";", "null", "<", "x"]


@given(
    family=st.sampled_from([HERMES, LLAMA, MISTRAL, LIST]),
    parts=st.lists(st.sampled_from(PARTS), max_size=12),
    cuts=st.lists(st.integers(0, 200)),
    parallel=st.booleans(),
)
def test_any_text_is_read_the_same_however_it_is_cut(
    family: CallFamily, parts: list[str], cuts: list[int], parallel: bool
) -> None:
    """Every character is in the content or belongs to a call, and nothing that cannot be written is told. An answer
    that must be calls has no content."""
    text = "".join(parts)
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    said = read(CallReader(family, NAMES, parallel=parallel), [text])
    pieces = [text[begin:end] for begin, end in pairwise(at)]
    assert read(CallReader(family, NAMES, parallel=parallel), pieces) == said
    content, calls, _ = said
    json.dumps([content, calls], ensure_ascii=False).encode()
    assert parallel or len(calls) <= 1
    if not calls:
        assert content == text.replace("\ud800", "").replace("\ud802", "") or family in (HERMES, LIST)
    assert family is not LIST or not content


@pytest.mark.parametrize("unit", [" ", "<", "<tool_call>", "a", '{"', "\\", "[TOOL_CALLS]a", "; ", '{"name":'])
def test_the_time_is_linear(unit: str) -> None:
    """Ten times the text takes about ten times as long; a hundred times would be quadratic."""

    def seconds(number: int) -> float:
        text = '<tool_call>{"name": "f", "arguments": {"a": ' * (unit == "\\") + unit * number
        begun = time.process_time()
        for family in (HERMES, LLAMA, MISTRAL):
            read(CallReader(family, NAMES), list(text))
            read(CallReader(family, NAMES), [text])
        return time.process_time() - begun

    few = min(seconds(100) for _ in range(3))
    assert min(seconds(1000) for _ in range(3)) < 40 * few


def test_the_family_is_found_by_the_template_or_the_tokens() -> None:
    assert family_name(TEMPLATE, []) == "hermes"
    assert family_name("{{ '[TOOL_CALLS]' }}", ["<|python_tag|>"]) == "mistral"
    assert family_name("{{ messages }}", ["<|python_tag|>"]) == "llama3_json"
    assert family_name("", []) == "hermes"
