"""Prompt lookup: drafts from the request's own tokens (Saxena, 2023, "prompt lookup decoding"; vLLM's method `ngram`).

Edited code, summaries and answers about a text repeat their prompt. So the last n tokens of a sequence (an *n-gram*)
are looked up among its earlier tokens, and what followed them there is the draft. vLLM's rule decides which:

- the longest n-gram from `prompt_lookup_min` to `prompt_lookup_max` that occurred earlier;
- of its occurrences, the first. It has the most tokens after it, where the latest of a repetition may have only one.

An index finds it, so that a long context is not searched at every step. Each n-gram is represented by the place where
it ended first, which is a number. The n-gram that ends at a token is the (n - 1)-gram before the token, and the token.
So its key is two numbers whatever n is: a token is indexed with one look-up for each length. There is at most one entry
for each token and length.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class PromptLookup:
    """The index of one sequence. It is brought up to date when a draft is asked for, and costs nothing before.

    `tokens`: the sequence's verified tokens. The caller appends to this list, and changes no token in it.
    """

    def __init__(self, tokens: Sequence[int], prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        """Raises ValueError unless 1 <= prompt_lookup_min <= prompt_lookup_max."""
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise ValueError(
                "prompt_lookup_min must be at least 1 and at most prompt_lookup_max, not "
                f"{prompt_lookup_min} with a prompt_lookup_max of {prompt_lookup_max}"
            )
        self._tokens = tokens
        self._shortest, self._longest = prompt_lookup_min, prompt_lookup_max
        self._num_indexed = 0
        # For each length, the n-gram's key -> the number of tokens up to its first end.
        self._ends: list[dict[Hashable, int]] = [{} for _ in range(prompt_lookup_min, prompt_lookup_max + 1)]
        self._firsts: list[int] = []  # the values of the n-grams that end at the last token, the shortest first

    def draft(self, k: int) -> list[int]:
        """Return up to `k` tokens that may come next; fewer if fewer came after that occurrence, none if there is
        none."""
        self._index()
        for first in reversed(self._firsts):
            if first < self._num_indexed:
                return list(self._tokens[first : first + k])
        return []

    def _index(self) -> None:
        """Add the n-grams that end at the tokens since the last call."""
        tokens, shortest, num_lengths = self._tokens, self._shortest, self._longest - self._shortest + 1
        ends, firsts = self._ends, self._firsts
        for end in range(max(self._num_indexed + 1, shortest), len(tokens) + 1):
            key: Hashable = tuple(tokens[end - shortest : end])
            before, firsts = firsts, []
            for i in range(num_lengths):
                firsts.append(ends[i].setdefault(key, end))
                if i == len(before):  # the sequence is not longer
                    break
                key = (before[i], tokens[end - 1])
        self._firsts, self._num_indexed = firsts, len(tokens)
