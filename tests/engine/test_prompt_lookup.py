"""Prompt lookup finds by its index what a plain search finds, at a cost that stays the same."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.engine.prompt_lookup import PromptLookup
from tests.effort import thorough


def searched(tokens: list[int], shortest: int, longest: int, k: int) -> list[int]:
    """vLLM's rule, by a plain search: the longest n-gram that occurred earlier, at its first occurrence."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for begin in range(len(tokens) - n):
            if tokens[begin : begin + n] == tokens[-n:]:
                return tokens[begin + n : begin + n + k]
    return []


@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 6), st.data())
def test_the_index_finds_what_a_search_finds(shortest: int, more: int, vocab: int, data: st.DataObject) -> None:
    """Tokens are appended a few at a time."""
    longest = shortest + more
    tokens = list[int]()
    lookup = PromptLookup(tokens, shortest, longest)
    for _ in range(data.draw(st.integers(0, 25))):
        tokens += data.draw(st.lists(st.integers(0, vocab - 1), max_size=4))
        if data.draw(st.booleans()):
            k = data.draw(st.integers(0, 5))
            assert lookup.draft(k) == searched(tokens, shortest, longest, k)
    assert lookup.draft(3) == searched(tokens, shortest, longest, 3)


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 2, 3], [4, 2, 3]),  # the last two tokens; not three, because 4, 2, 3 is new
        ([5, 1, 2, 9, 8, 1, 2, 7, 7, 1, 2], [9, 8, 1, 2]),  # the first of two occurrences
        ([0, 1, 2, 9, 5, 1, 2, 7, 0, 1, 2], [9, 5, 1, 2]),  # three tokens go before two
        ([5, 1, 2, 9, 0, 1, 2, 7, 0, 1, 2], [7, 0, 1, 2]),  # also where two occurred earlier
        ([6, 6, 6, 6, 6, 6], [6, 6, 6]),  # an occurrence may overlap the end
        ([1, 2, 3], []),
        ([3], []),
        ([], []),
    ],
)
def test_the_draft_follows_the_longest_ngram_that_occurred_earlier(tokens: list[int], draft: list[int]) -> None:
    assert PromptLookup(tokens, 2, 3).draft(4) == draft


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (-1, 1), (3, 2)])
def test_lengths_that_make_no_sense_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(ValueError, match=f"prompt_lookup_min .* not {shortest} with a prompt_lookup_max of {longest}"):
        PromptLookup([], shortest, longest)


@thorough
def test_a_token_costs_as_much_after_32_000_as_after_1_000() -> None:
    """The least of several turns, because others use the processor too."""

    def seconds(num_tokens: int) -> float:
        tokens = [i * i * 7 % 5003 for i in range(num_tokens)]
        lookup = PromptLookup(tokens, 2, 5)
        lookup.draft(4)
        turns = list[float]()
        for turn in range(200):
            started = time.perf_counter()
            for i in range(10):
                tokens.append(turn * i % 5003)
                lookup.draft(4)
            turns.append(time.perf_counter() - started)
        return min(turns)

    assert seconds(32_000) < 3 * seconds(1_000)
