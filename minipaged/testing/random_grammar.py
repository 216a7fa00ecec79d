"""A grammar for models without weights: after each beginning of an output, random tokens are allowed."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from minipaged.errors import RequestFailed
from minipaged.params import StructuredOutputsParams


class RandomGrammar:
    """The grammar that a text names. It allows about half of the tokens at each place, and an end at some of them."""

    def __init__(self, form: StructuredOutputsParams, vocab_size: int) -> None:
        self.name = form.grammar
        self.vocab_size = vocab_size

    def begin(self, final_token_ids: Collection[int]) -> RandomState:
        return RandomState(self, frozenset(final_token_ids), ())


class RandomState:
    """A place in a random grammar (`engine.sequence.SequenceGrammar`). It depends on all tokens of the output."""

    def __init__(self, grammar: RandomGrammar, final: frozenset[int], output: Sequence[int]) -> None:
        self._grammar, self._final, self._output = grammar, final, tuple(output)
        r = random.Random(f"{grammar.name} {self._output}")
        tokens = range(grammar.vocab_size)
        going_on = {token for token in tokens if r.random() < 0.5} - final
        may_end, must_end = r.random() < 0.2, len(output) > 0 and r.random() < 0.03
        if must_end:
            may_end, going_on = True, set()
        elif not going_on:
            going_on = {*tokens} - final
        self.allowed = going_on | final if may_end else going_on
        self.is_complete = must_end and not final

    @property
    def bits(self) -> bytes:
        row = sum(1 << token for token in self.allowed)
        return row.to_bytes((self._grammar.vocab_size + 31) // 32 * 4, "little")

    def consume(self, token_id: int) -> bool:
        if token_id not in self.allowed - self._final:
            raise RequestFailed(f"token {token_id} is none of the allowed ones, {self.allowed}")
        self.__init__(self._grammar, self._final, (*self._output, token_id))  # type: ignore[misc]
        return self.is_complete

    def fork(self) -> RandomState:
        return RandomState(self._grammar, self._final, self._output)
