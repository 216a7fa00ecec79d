"""Text, token by token: what is given out is never taken back, and no more is held back than has to be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from minipaged.engine.detokenizer import (
    MOST_DOUBTFUL,
    MOST_TOKENS,
    NOT_WHOLE,
    Decode,
    Detokenizer,
    text_of,
    text_without_end,
)
from minipaged.errors import DetokenizerFailed
from tests.effort import examples
from tests.models.tokenizers import bpe_with_byte_fallback, byte_level, unigram_with_metaspace, word_piece
from tests.tokens import PIECES, bytes_alone, bytes_joined, token


def without_first_space(token_ids: Sequence[int]) -> str:
    """As sentencepiece does it."""
    return bytes_joined(token_ids).removeprefix(" ")


FOLLOWS_BYTES: dict[str, Decode] = {"byte-level": bytes_joined, "without the first space": without_first_space}
DECODERS = {**FOLLOWS_BYTES, "byte by byte": bytes_alone}

tokens = st.lists(st.integers(0, len(PIECES) - 1), max_size=40)
streams = st.one_of(
    tokens,
    tokens.map(lambda some: some * 3),
    st.lists(st.sampled_from([token(piece) for piece in (b"\xf0", b"\x9f", b"\x98", b"\x80")]), max_size=90),
    st.lists(st.sampled_from([b"\xe2", b"\x82", b"\xac", b"a", b""]).map(token), max_size=60),
)
stops = st.lists(st.text("ab €", min_size=1, max_size=5), max_size=3).map(tuple)


def add_all(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    """What each token brings, and the end."""
    pieces = []
    for one in token_ids:
        detokenizer.add(one)
        pieces.append(detokenizer.take())
    detokenizer.finish()
    return [*pieces, detokenizer.take()]


@pytest.mark.parametrize("decode", FOLLOWS_BYTES.values(), ids=FOLLOWS_BYTES)
@settings(max_examples=examples(300))
@given(token_ids=streams)
@example([token(b"\xff")] * (3 * MOST_TOKENS) + [token("€")])
@example([token(b"")] * (3 * MOST_TOKENS) + [token("€"), token(b"a")])
@example([token(b" a"), *[token(b"")] * 40, token(b" a")])
@example([token(b"\xf0")] * 30)
def test_the_pieces_join_to_what_all_tokens_decode_to(decode: Decode, token_ids: list[int]) -> None:
    """Stream-equals-final; wherever the tokens end."""
    detokenizer = Detokenizer(decode)
    for count, one in enumerate(token_ids, start=1):
        detokenizer.add(one)
        whole = decode(token_ids[:count])
        ended = detokenizer.fork()
        ended.finish()
        assert ended.text == whole
        held = whole.removeprefix(detokenizer.text)
        assert detokenizer.text + held == whole
        assert held == NOT_WHOLE * len(held)
        assert len(held) <= MOST_DOUBTFUL
    assert text_of(token_ids, decode) == decode(token_ids)


@settings(max_examples=examples(300))
@given(streams)
@example([token(piece) for piece in (b"\xe2", b"\x82", b"\xac", b"\xe2", b"\xff", b"a")])
def test_a_decoder_that_takes_back_what_it_showed_gets_one_text_all_the_same(token_ids: list[int]) -> None:
    """One bad byte makes it show all bytes around it as none. What was given out stays; whole characters are whole."""
    detokenizer = Detokenizer(bytes_alone)
    pieces = add_all(detokenizer, token_ids)
    assert "".join(pieces) == detokenizer.text == text_of(token_ids, bytes_alone)
    if NOT_WHOLE not in (whole := bytes_alone(token_ids)):
        assert detokenizer.text == whole


@pytest.mark.parametrize("decode", DECODERS.values(), ids=DECODERS)
def test_characters_of_several_tokens_come_when_they_are_whole_however_many_follow_each_other(decode: Decode) -> None:
    for character in ("€", "😀"):
        token_ids = [token(bytes([byte])) for byte in character.encode()]
        pieces = add_all(Detokenizer(decode), token_ids * 50)
        assert pieces == ([""] * (len(token_ids) - 1) + [character]) * 50 + [""]


def given_until_stopped(token_ids: Sequence[int], stop: Sequence[str]) -> tuple[str, str | None, str]:
    """By trying everything: the text, the stop string that ended it, and what is held back at the end."""
    known = ""
    for count in range(1, len(token_ids) + 1):
        whole = bytes_joined(token_ids[:count])
        before, known = known, whole[: max(len(whole.rstrip(NOT_WHOLE)), len(whole) - MOST_DOUBTFUL)]
        found = [
            (at, string)
            for string in stop
            for at in range(len(known))
            if known.startswith(string, at) and at + len(string) > len(before)
        ]
        if found:
            at, string = min(found)
            return known[:at], string, ""
    ends = (known[at:] for at in range(len(known)))
    return known, None, next((end for end in ends if any(s.startswith(end) and s != end for s in stop)), "")


@settings(max_examples=examples(600))
@given(token_ids=streams, stop=stops)
@example([token(b"a"), token(b"b"), token(b"a"), token(b"b")], ("abb", "bab"))
@example([token(b"a"), token(b"a"), token(b"b")], ("aab", "aa b"))
def test_stop_strings_are_found_wherever_they_are_cut_and_only_their_beginnings_are_held_back(
    token_ids: list[int], stop: tuple[str, ...]
) -> None:
    """With `keeps_stop` all is the same, and the stop string comes when it is found."""
    detokenizer, keeping = Detokenizer(bytes_joined, stop), Detokenizer(bytes_joined, stop, keeps_stop=True)
    for count, one in enumerate(token_ids, start=1):
        detokenizer.add(one)
        keeping.add(one)
        text, stopped_by, held = given_until_stopped(token_ids[:count], stop)
        assert detokenizer.stopped_by == keeping.stopped_by == stopped_by
        assert detokenizer.text == text[: len(text) - len(held)]
        assert keeping.text == detokenizer.text + (stopped_by or "")
        ended = detokenizer.fork()
        ended.stopped_by = stopped_by
        ended.finish()
        assert ended.text == (text if stopped_by else bytes_joined(token_ids[:count]))
        if stopped_by:
            break


def test_a_stop_string_that_came_too_early_does_not_hide_a_later_one() -> None:
    """As min_tokens wants it: only what ends with a token that may stop counts."""
    detokenizer = Detokenizer(bytes_joined, ("ab", "bab"))
    for one in (b"a", b"b"):
        detokenizer.add(token(one), may_stop=False)
    assert (detokenizer.stopped_by, detokenizer.take()) == (None, "a")  # "b" may be the beginning of "bab"
    detokenizer.add(token(b"a"))
    assert (detokenizer.stopped_by, detokenizer.take()) == (None, "")
    detokenizer.add(token(b"b"))
    assert (detokenizer.stopped_by, detokenizer.take()) == ("bab", "")
    detokenizer.finish()
    assert detokenizer.text == "a"
    detokenizer = Detokenizer(bytes_joined, ("a", "ab "))
    detokenizer.add(token(b"a"), may_stop=False)
    detokenizer.add(token(b"b"))  # "a" is held back still, and has come too early all the same
    assert (detokenizer.stopped_by, detokenizer.take()) == (None, "")
    detokenizer.add(token(b"b"))
    assert (detokenizer.stopped_by, detokenizer.take()) == (None, "abb")


# --- Behind a prompt --------------------------------------------------------------------------------


KINDS = {
    "byte-level": byte_level(),
    "bytes to fall back to": bpe_with_byte_fallback(),
    "Metaspace": unigram_with_metaspace(),
    "WordPiece": word_piece(),
}
FALL_BACK_TO_BYTES = (KINDS["bytes to fall back to"], KINDS["Metaspace"])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@settings(max_examples=examples(150))
@given(text=st.lists(st.sampled_from(["t", "the", " ", "é", "€", "😀", "<s>", "\ufffd"]), max_size=14).map("".join))
@example("<s>" * 20 + "t e")
@example("t" + "<s>" * 20 + " e t")
@example("t" + "<s>" * 80 + "€ e")
@example(" " * 14)
@example("  t  e")
@example("\ufffd\ufffd t")
@example("t e" * 12)
def test_the_text_of_a_prompt_and_of_its_output_are_the_text_of_all_tokens_at_every_cut(
    kind: Tokenizer, text: str
) -> None:
    """Text-of-all: whole, token by token, and forked within. (Where bytes fall back, U+FFFD itself, which is whole,
    looks like bytes that are not, as soon as others follow: see `test_a_decoder_that_takes_back_what_it_showed`.)"""
    if kind in FALL_BACK_TO_BYTES:
        text = text.replace("\ufffd", "é")
    decode, token_ids = kind.decode, kind.encode(text).ids
    whole = decode(token_ids)
    for cut in range(len(token_ids)):
        prompt, output = token_ids[:cut], token_ids[cut:]
        shown = text_without_end(prompt, decode)
        assert not shown.endswith(NOT_WHOLE) or NOT_WHOLE in text
        expected = whole.removeprefix(shown)
        assert shown + expected == whole
        assert text_of(output, decode, prompt) == expected
        detokenizer = Detokenizer(decode, prompt_token_ids=prompt)
        for token_id in output[: len(output) // 2]:
            detokenizer.add(token_id)
        child = detokenizer.fork()
        rest = output[len(output) // 2 :]
        pieces = [detokenizer.take(), *add_all(detokenizer, rest)]
        assert "".join(pieces) == "".join(add_all(child, rest)) == expected


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@settings(max_examples=examples(100))
@given(prompt=st.text("te \ufffd€", max_size=6), output=st.text("te \ufffd€", min_size=1, max_size=6))
@example("t\ufffd", "e")
def test_a_character_that_stands_in_the_prompts_text_is_not_in_the_outputs(
    kind: Tokenizer, prompt: str, output: str
) -> None:
    """Also U+FFFD, which may be the beginning of a character where a prompt is given as tokens."""
    if kind in FALL_BACK_TO_BYTES:
        output = output.replace("\ufffd", "é")
    decode, token_ids = kind.decode, kind.encode(prompt + output).ids
    prompt_token_ids = kind.encode(prompt).ids
    rest = token_ids[len(prompt_token_ids) :]
    if token_ids[: len(prompt_token_ids)] == prompt_token_ids and rest and decode(prompt_token_ids) == prompt:
        assert prompt + text_of(rest, decode, prompt_token_ids, prompt) == decode(token_ids)


@pytest.mark.parametrize("kind", FALL_BACK_TO_BYTES)
@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.sampled_from(["é", "€", "😀", "the"]), st.integers(0, 4)), min_size=1, max_size=6),
    st.integers(1, 30),
)
@example([("😀", 2), ("😀", 0), ("😀", 3)], 1)
@example([("the", 0), ("😀", 2)], 4)
def test_a_special_token_within_a_character_changes_nothing(
    kind: Tokenizer, parts: list[tuple[str, int]], cut: int
) -> None:
    """Stream-equals-final and text-of-all where a decoder joins the bytes on both sides of it."""
    decode, token_ids = kind.decode, list[int]()
    for text, place in parts:
        some = kind.encode(text).ids
        token_ids += [*some[:place], 1, *some[place:]]
    prompt, output = token_ids[:cut], token_ids[cut:]
    shown = text_without_end(prompt, decode)
    detokenizer = Detokenizer(decode, prompt_token_ids=prompt)
    assert "".join(add_all(detokenizer, output)) == text_of(output, decode, prompt)
    if output:
        assert shown + detokenizer.text == decode(token_ids)


def test_what_stands_before_bytes_of_no_character_is_the_prompts_text() -> None:
    """However many tokens of such bytes follow in the prompt."""
    pieces = [b"a\xf0\x9f\x98", b"\xff", b"\xf0\x9f", b"b"]

    def decode(token_ids: Sequence[int]) -> str:
        return b"".join(pieces[token] for token in token_ids).decode(errors="replace")

    for prompt in ([0], [0, 1], [0, 1, 2, 2], [3, 2, 1]):
        assert text_without_end(prompt, decode) == decode(prompt).rstrip("\ufffd")


def test_a_stop_string_may_begin_with_the_space_before_the_first_word() -> None:
    decode, token_ids = KINDS["bytes to fall back to"].decode, KINDS["bytes to fall back to"].encode("the the").ids
    detokenizer = Detokenizer(decode, (" the",), prompt_token_ids=token_ids[:1])
    detokenizer.add(token_ids[1])
    assert (detokenizer.stopped_by, detokenizer.text) == (" the", "")


def test_a_stop_string_is_not_looked_for_in_the_prompt() -> None:
    decode, token_ids = KINDS["byte-level"].decode, KINDS["byte-level"].encode("two").ids
    detokenizer = Detokenizer(decode, ("two", "o!"), prompt_token_ids=token_ids[:2])
    detokenizer.add(token_ids[2])
    assert (detokenizer.stopped_by, detokenizer.take()) == (None, "")
    detokenizer.finish()
    assert detokenizer.take() == "o"


# --- Forks, failures, cost --------------------------------------------------------------------------


def test_a_fork_goes_its_own_way() -> None:
    parent = Detokenizer(bytes_joined, ("ab",))
    for one in (b"b", b"a", "€".encode()[:1]):
        parent.add(token(one))
    child = parent.fork()
    for one in "€".encode()[1:]:
        parent.add(token(bytes([one])))
    child.finish()
    assert (parent.text, child.text, child.take()) == ("ba€", "ba\ufffd", "ba\ufffd")


@pytest.mark.parametrize("bad", range(1, 20))
def test_a_call_that_raises_changes_nothing(bad: int) -> None:
    """Atomic-failure: the token can be added again."""
    calls: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        calls.append(len(token_ids))
        if len(calls) == bad:
            raise DetokenizerFailed
        return bytes_joined(token_ids)

    token_ids = [token(piece) for piece in (b"a", b"\xe2", b"\x82", b"\xac", b" ", b"b")] * 4
    detokenizer = Detokenizer(decode)
    failed = 0
    for one in token_ids:
        try:
            detokenizer.add(one)
        except DetokenizerFailed:
            failed += 1
            detokenizer.add(one)
    detokenizer.finish()
    assert (failed, detokenizer.text) == (1, bytes_joined(token_ids))


def test_only_a_few_tokens_are_decoded_at_a_time() -> None:
    """Or a long text would take ever longer, one without whole characters too."""
    for pieces in ([b"a"], [b"\xff"], [b""], [b"a", b"", b"\xff", b"\x80"]):
        longest = 0

        def decode(token_ids: Sequence[int]) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return bytes_joined(token_ids)

        add_all(Detokenizer(decode), [token(piece) for piece in pieces] * 500)
        assert longest <= MOST_TOKENS
