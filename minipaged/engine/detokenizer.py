"""Text, one token at a time, and the search for stop strings in it.

A token need not be whole characters: a decoder shows an incomplete one as U+FFFD, and some decoders drop a leading
space. So only the difference between two decodings of the same recent tokens is added to the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

CONTEXT_TOKENS = 6
"""How many earlier tokens are decoded along with new ones, so that the new text joins on as in one decoding."""


class Detokenizer:
    """The growing text of one sequence's output."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []  # the last tokens that are in `text`
        self._pending: list[int] = []  # those after them, which end inside a character
        self.text = ""

    def add(self, token_id: int) -> str:
        """Take one more token; returns what it added to `text` ("" inside a character)."""
        tokens = [*self._context, *self._pending, token_id]
        before, after = self._decode(self._context), self._decode(tokens)
        if after.endswith("\ufffd"):
            self._pending.append(token_id)
            return ""
        added = after[len(before) :]
        self.text += added
        self._context, self._pending = tokens[-CONTEXT_TOKENS:], []
        return added


def find_stop(text: str, num_added: int, stop: Sequence[str]) -> tuple[int, str] | None:
    """Where the earliest stop string begins that ends within the last `num_added` characters, and which it is."""
    found = [
        (position, string)
        for string in stop
        if (position := text.find(string, max(0, len(text) - num_added - len(string) + 1))) >= 0
    ]
    return min(found, default=None)
